"""
The page about the data of a run, before there is a model: data_report.html, and the numbers in data_report.json.

Written beside the stages after every `bloomery run`, from the manifests of the stages that are done.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bloomery.core import files, run
from bloomery.core.stage import machine, read_manifest, versions
from bloomery.data import document
from bloomery.evaluation.report import DATA_SECTIONS, render

STAGES = ("fetch", "classify", "filter", "dedup", "tokenizer", "shard")
PAGE = "data_report"
SAMPLE_CHARACTERS = 300


def write(root: Path) -> Path | None:
    """Write both files into a run folder; returns the page, or None where nothing was fetched yet."""
    current = run.current(root)
    done = {name: current[name] for name in STAGES if name in current and (current[name] / files.MANIFEST).is_file()}
    if "fetch" not in done:
        return None
    report = {
        "recipe": root.name,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "machine": machine(),
        **facts(done),
    }
    files.write_json(root / f"{PAGE}.json", report)
    with files.whole_file(root / f"{PAGE}.html", "w") as file:
        file.write(render(report, DATA_SECTIONS))
    return root / f"{PAGE}.html"


def facts(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Of stages that are done: their statistics (`corpus`), samples of what was dropped, and where the time went."""
    return {
        "corpus": {name: read_manifest(folder)["stats"] for name, folder in folders.items()},
        "dropped_samples": list(dropped_samples(folders["filter"])) if "filter" in folders else [],
        "stages": [stage_facts(folder) for folder in folders.values()],
    }


def stage_facts(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    return {name: manifest[name] for name in ("stage", "seconds", "resumed")} | {"folder": folder.name}


def dropped_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """One document for each reason, the first that came. Stops where every reason has one."""
    wanted = set(read_manifest(folder)["stats"].get("reasons", ()))
    for part in document.parts(folder / "dropped"):
        for row in document.part_rows(part, ["reason", "value", "domain", "text"]):
            if row["reason"] in wanted:
                wanted.remove(row["reason"])
                yield row | {"text": row["text"][:SAMPLE_CHARACTERS]}
        if not wanted:
            return
