"""
The page of a run that is not evaluated yet: what is known of its text and of its training, in RUN/report.html, .json.

Written after every `bloomery run`. Once a run has been evaluated, the page is that stage's own.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bloomery.core import files, run
from bloomery.core.log import METRICS, SAMPLES, read_metrics
from bloomery.core.records import read_record
from bloomery.core.stage import find_manifest, machine, read_manifest, versions
from bloomery.data import document
from bloomery.evaluation.report import before_evaluation, render

PAGE, NUMBERS = "report.html", "report.json"
SHOWN_CHARACTERS = 300
TRAINED = ("pretrain", "finetune", "prefer")


def write(root: Path) -> Path | None:
    """Write the page into a run folder; returns it, or None where nothing was fetched and nothing trained yet."""
    every = run.current(root)
    folders = {name: folder for name, folder in every.items() if find_manifest(folder) is not None}
    begun = {name: folder for name, folder in every.items() if (folder / METRICS).is_file()}
    if "fetch" not in folders and not begun:
        return None
    if "evaluate" in folders:
        page = (folders["evaluate"] / PAGE).read_text(encoding="utf-8")
        report = read_record(folders["evaluate"] / NUMBERS, dict[str, Any])
    else:
        made = {"recipe": root.name, "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        report = {**made, "versions": versions(), "machine": machine(), **training(begun), **corpus(folders)}
        page = render(report, before_evaluation(read="fetch" in folders, trained=bool(begun)))
    files.write_json(root / NUMBERS, report)
    with files.whole_file(root / PAGE, "w") as file:
        file.write(page)
    return root / PAGE


def training(folders: Mapping[str, Path]) -> dict[str, Any]:
    """What a report says of the stages that train, as far as they have come: all numbers, and what was written."""
    trained = {name: folder for name, folder in folders.items() if name in TRAINED}
    prefer = trained.get("prefer")
    done = find_manifest(prefer) if prefer is not None else None
    return {
        "curves": {name: read_metrics(folder / METRICS) for name, folder in trained.items()},
        "written": {name: read_metrics(folder / SAMPLES) for name, folder in trained.items()},
        **({"preference": done["stats"]} if done is not None else {}),
    }


def corpus(folders: Mapping[str, Path]) -> dict[str, Any]:
    """What a report says of the stages that are done and are no training, and how long each of all took."""
    made = {name: folder for name, folder in folders.items() if name not in (*TRAINED, "evaluate")}
    stats = {name: read_manifest(folder)["stats"] for name, folder in made.items()}
    samples = list(dropped_samples(folders["filter"])) if "filter" in folders else []
    stages = [stage_facts(folder) for folder in folders.values()]
    return {"corpus": stats, "dropped_samples": samples, "stages": stages}


def dropped_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """One document for each reason, the first that came."""
    seen: set[str] = set()
    for part in document.parts(folder / "dropped"):
        first: dict[str, int] = {}
        reasons = (one for batch in document.part_batches(part, ["reason"]) for one in batch.column(0).to_pylist())
        for place, reason in enumerate(reasons):
            if reason not in seen:
                seen.add(reason)
                first[reason] = place
        if first:  # texts are read only where there is something to show
            table = pq.read_table(part, columns=["reason", "value", "domain", "text"]).take(list(first.values()))
            for row in table.to_pylist():
                yield {**row, "text": row["text"][:SHOWN_CHARACTERS]}


def stage_facts(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    return {name: manifest[name] for name in ("stage", "seconds", "resumed")} | {"folder": folder.name}
