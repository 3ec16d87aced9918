"""
The data card and the report page of a run, written into its folder after every `bloomery run`.

The page goes to RUN/report.html and RUN/report.json. It shows what is known of the run's text and training. Once
a run has been evaluated, the page is that stage's own.

The data card says what the text of a run is, whose it is, and under which licenses. It also says what became of the
text, and the hashes to check. It is written next to the stages, from the manifests of the finished stages.
data_card.json is for programs and data_card.md is for people. Anything that a stage did not report is left out, and
nothing is guessed.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.core import copied, pipeline, records, run_dir
from bloomery.core import io as core_io
from bloomery.core.errors import ConfigError
from bloomery.core.extras import pq
from bloomery.core.log import METRICS, SAMPLES, info, read_metrics
from bloomery.core.pipeline import Stage, StagePlan, machine, resolve, versions
from bloomery.core.records import content_hash, find_manifest, read_manifest, read_record
from bloomery.data import documents
from bloomery.evaluation.report import before_evaluation, render
from bloomery.hw import launcher
from bloomery.stages import plan as stages_plan
from bloomery.stages import terminal
from bloomery.train.config import Training
from bloomery.train.plan.memory import check_shard

PAGE, NUMBERS = "report.html", "report.json"
SHOWN_CHARACTERS = 300
TRAINED = ("pretrain", "finetune", "prefer")


def by_first_process(work: Callable[[], None]) -> None:
    """Call `work`. Of several processes that a launcher started, the first one calls it; the others train with it."""
    if launcher.num_processes() == 1:
        work()
    else:
        resolve("bloomery.train.launch:by_first_process")(work)


def run_recipe(
    stages: Sequence[Stage],
    recipe: Any,
    root: Path,
    *,
    until: str | None = None,
    only: str | None = None,
    again: str = "the same command",
) -> list[str]:
    """
    Run what is not done of a recipe in its run folder, as `pipeline.run`; report each stage on the terminal, and write
    the data card and the page. `again` is the command that runs what `until` and `only` leave. Returns these stages.
    Raises ConfigError for a stage that is to run over a mesh of another number of processes, and for what a mesh does
    not train.
    """
    for stage in stages:
        if only in (None, stage.name):
            _check_mesh(stage, stages, recipe, root)
        if stage.name == until:
            break
    began = time.monotonic()
    ran: list[str] = []

    def before(recipe: Any, plans: Sequence[StagePlan], due: Sequence[StagePlan]) -> None:
        for plan in due:
            copied.check_original(plan.folder)
        ran.extend(plan.stage.name for plan in due)
        terminal.head(root, plans, due, lambda: stages_plan.first_seconds(recipe, due))
        trains = any(plan.stage.name == "pretrain" for plan in plans)
        if trains and (reasons := stages_plan.only_here(recipe)):
            info(f"only Bloomery can load this model: {'; '.join(reasons)}", "yellow")

    def between(plan: StagePlan) -> None:
        if plan.stage.name in ("fetch", "filter", "dedup") and "shard" in ran:
            resolve("bloomery.stages.shard:check_validation")(recipe.shard, plan.folder)

    def after(root: Path) -> None:
        write_card(root)
        write_page(root)

    left = pipeline.run(
        stages,
        recipe,
        root,
        until=until,
        only=only,
        before=before,
        sentence=terminal.sentence,
        between=between,
        after=after,
    )
    asked = f"up to {until}" if until else f"only {only}" if only else ""
    idle = {name for name in left if (section := getattr(recipe, name)) is None or section.is_idle()}
    left = [name for name in left if name not in idle]
    # Conversations are for a model that is finetuned. Without that section, a run does not ask for more.
    sections = [name for name, value in recipe if value is not None]
    waiting = [name for name in left if name not in records.unused_stages(sections)]
    seconds = time.monotonic() - began if ran else None
    terminal.ending(run_dir.run_state(root), seconds=seconds, left=waiting, asked=asked, again=again)
    return left


def _check_mesh(stage: Stage, stages: Sequence[Stage], recipe: Any, root: Path) -> None:
    """Whether the processes can train over the mesh of a stage. One that is done stays as it is."""
    config = getattr(recipe, stage.name)
    if not isinstance(config, Training) or (config.mesh is None and config.offload != "host"):
        return
    try:
        adapters = getattr(config, "lora", None) is not None
        check_shard(config, launcher.num_processes(config.num_processes), adapters=adapters)
    except ConfigError:
        plans = pipeline.plan_stages(stages, recipe, root, blind=True) if root.is_dir() else []
        if not any(plan.stage.name == stage.name and plan.fresh for plan in plans):
            raise


def write_page(root: Path) -> Path | None:
    """Write the page into a run folder; returns it, or None where nothing was fetched and nothing trained yet."""
    every = records.stage_folders(root)
    folders = {name: folder for name, folder in every.items() if find_manifest(folder) is not None}
    begun = {name: folder for name, folder in every.items() if (folder / METRICS).is_file()}
    if "fetch" not in folders and not begun:
        return None
    if "evaluate" in folders:
        page = (folders["evaluate"] / PAGE).read_text(encoding="utf-8")
        report = read_record(folders["evaluate"] / NUMBERS, dict[str, Any])
    else:
        header = {"recipe": root.name, "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        report = {**header, "versions": versions(), "machine": machine(), **training(begun), **corpus(folders)}
        page = render(report, before_evaluation(read="fetch" in folders, trained=bool(begun)))
    core_io.write_json(root / NUMBERS, report)
    with core_io.whole_file(root / PAGE, "w") as file:
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
    data_folders = {name: folder for name, folder in folders.items() if name not in (*TRAINED, "evaluate")}
    stats = {name: read_manifest(folder)["stats"] for name, folder in data_folders.items()}
    samples = list(dropped_samples(folders["filter"])) if "filter" in folders else []
    stages = [stage_facts(folder) for folder in folders.values()]
    return {"corpus": stats, "dropped_samples": samples, "stages": stages}


def dropped_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """One document for each reason, the first that came."""
    seen: set[str] = set()
    for path in documents.parts(folder / "dropped"):
        first: dict[str, int] = {}
        reasons = (one for batch in documents.part_batches(path, ["reason"]) for one in batch.column(0).to_pylist())
        for index, reason in enumerate(reasons):
            if reason not in seen:
                seen.add(reason)
                first[reason] = index
        if first:  # texts are read only where there is something to show
            table = pq.read_table(path, columns=["reason", "value", "domain", "text"]).take(list(first.values()))
            for row in table.to_pylist():
                yield {**row, "text": row["text"][:SHOWN_CHARACTERS]}


def stage_facts(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    return {name: manifest[name] for name in ("stage", "seconds", "resumed")} | {"folder": folder.name}


ON_CARD = ("fetch", "filter", "dedup", "tokenizer", "shard")
CARD = "data_card"
SHOWN_LICENSES = 6
"""In the table for people; the JSON has all of them."""
MIX = ("asked", "share", "tokens", "asked_tokens", "documents", "epochs", "limited_by")
COUNTS = ("documents", "kept", "dropped", "removed", "rejected", "validation")
HELD_OUT = "held_out_documents"
"""What the stage shard calls the number of its validation documents, which `documents` does not count."""


def write_card(root: Path) -> Path | None:
    """Write both files into a run folder; returns the Markdown, or None where nothing was fetched yet."""
    folders = {name: folder for name, folder in records.stage_folders(root).items() if name in ON_CARD}
    done = {name: found for name, folder in folders.items() if (found := find_manifest(folder)) is not None}
    if "fetch" not in done:
        return None
    card = facts(root.name, done, {name: content_hash(folders[name]) for name in done})
    core_io.write_json(root / f"{CARD}.json", card)
    with core_io.whole_file(root / f"{CARD}.md", "w") as file:
        file.write(markdown(card))
    return root / f"{CARD}.md"


def facts(name: str, manifests: Mapping[str, Mapping[str, Any]], hashes: Mapping[str, str]) -> dict[str, Any]:
    """The card as JSON data. `manifests` and `hashes` (of the content) by stage; fetch is among them."""
    fetched = manifests["fetch"]
    counted: Mapping[str, Any] = fetched["stats"].get("by_source", {})
    sources = [_source(source, counted.get(source.get("name"), {})) for source in fetched["config"].get("sources", ())]
    sharded: Mapping[str, Any] = manifests.get("shard", {}).get("stats", {})
    return {
        "run": name,
        "sources": sources,
        "stages": {
            stage: {
                "sha256": hashes[stage],
                "finished": manifest["finished"],
                **{key: manifest["stats"][key] for key in COUNTS if isinstance(manifest["stats"].get(key), int)},
                **({"validation": manifest["stats"][HELD_OUT]} if HELD_OUT in manifest["stats"] else {}),
                "reasons": manifest["stats"].get("reasons", {}),
            }
            for stage, manifest in manifests.items()
        },
        "by_domain": {
            stage: manifest["stats"]["by_domain"]
            for stage, manifest in manifests.items()
            if isinstance(manifest["stats"].get("by_domain"), dict)
        },
        "mix": sharded.get("mix", {}),
        **({"anneal": sharded["anneal"]} if sharded.get("anneal") else {}),
        "versions": fetched["versions"],
    }


def _source(config: Mapping[str, Any], counts: Mapping[str, Any]) -> dict[str, Any]:
    """The report of one source: its config without unset keys, its license, and its counts."""
    said = {key: value for key, value in config.items() if value not in (None, [], {}, "")}
    return {
        "name": config.get("name"),
        "domain": config.get("domain"),
        "license": config.get("license"),
        "counts": counts,
        "config": said,
    }


def markdown(card: Mapping[str, Any]) -> str:
    lines = [f"# Data of {card['run']}", "", "## Sources", ""]
    header = ("source", "domain", "license", "documents", "bytes", "rejected")
    rows = [
        (source["name"], source["domain"], _licenses(source), *(source["counts"].get(key) for key in header[3:]))
        for source in card["sources"]
    ]
    lines += [*_table(header, rows), ""]
    versions = {one["name"]: one["counts"]["version"] for one in card["sources"] if "version" in one["counts"]}
    lines += [*(f"- {name} is {version}" for name, version in versions.items()), ""] if versions else []
    lines += ["## Documents by stage", ""]
    kept = [name for name in COUNTS if any(name in stage for stage in card["stages"].values())]
    rows = [(name, *(stage.get(key) for key in kept), stage["sha256"][:16]) for name, stage in card["stages"].items()]
    lines += [*_table(("stage", *kept, "SHA-256 of its content"), rows), ""]
    for name, stage in card["stages"].items():
        if stage["reasons"]:
            most = sorted(stage["reasons"].items(), key=lambda pair: (-pair[1], pair[0]))
            lines += [f"Reasons in {name}: " + ", ".join(f"{reason} {count:,}" for reason, count in most) + ".", ""]
    for title, mix in (("Mix", card["mix"]), ("Annealing mix", card.get("anneal"))):
        if mix:
            lines += [f"## {title}", ""]
            keys = [key for key in MIX if any(key in one for one in mix.values())]
            shown = [(name, *(one.get(key) for key in keys)) for name, one in mix.items() if isinstance(one, Mapping)]
            lines += [*_table(("domain", *keys), shown), ""]
    lines += [
        "## How to reproduce the data",
        "",
        "Run the recipe.toml of this run. The same sources give the same hashes,",
    ]
    lines += ["for any number of workers. Each stage folder keeps its dropped documents, with their reasons."]
    return "\n".join(lines) + "\n"


def _licenses(source: Mapping[str, Any]) -> str | None:
    """Of the documents, where they say their own; else of the source."""
    counts = source["counts"].get("licenses")
    if isinstance(counts, Mapping) and counts:
        first = sorted(map(str, counts), key=lambda name: (-counts[name], name))
        more = [f"and {len(first) - SHOWN_LICENSES} more"] if len(first) > SHOWN_LICENSES else []
        return ", ".join([*first[:SHOWN_LICENSES], *more])
    license: str | None = source["license"]
    return license


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(map(_cell, row)) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
