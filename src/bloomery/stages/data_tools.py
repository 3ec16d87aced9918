"""
Run one data stage on its own: files in, a folder of kept and dropped documents out.

    OUT/kept/part-*.parquet       documents, with their id
    OUT/dropped/part-*.parquet    the others, with reason and value; also what could not be read
    OUT/hits.parquet              of `decontaminate`: which text of which task stands in which document, and where
    OUT/clusters.parquet          of `dedup`: which documents are copies of one another, kept or not
    OUT/shards/, OUT/tokenizer/   of `tokenize`, in place of kept/: token files, and their tokenizer
    OUT/result.json               the counts, and the sha256 of the files above; written last

The stages are those of a recipe. They run in OUT/work, which is removed when the result is there. A run that died
resumes.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from bloomery.core import config, pipeline, records
from bloomery.core import io as core_io
from bloomery.core.config import Config, Override
from bloomery.core.errors import ConfigError, DataError, RunError
from bloomery.core.extras import pa, pq
from bloomery.core.pipeline import Stage, StagePlan
from bloomery.core.records import Count, ListedFile, NameInside, read_record
from bloomery.data import documents as data_documents
from bloomery.data.dedup.dedup import CLUSTERS
from bloomery.data.executor import Parallel
from bloomery.stages import decontaminate as decontamination
from bloomery.stages import dedup as deduplicate
from bloomery.stages import filter as rules
from bloomery.stages import shard as shards
from bloomery.stages import tokenizer as vocabulary
from bloomery.stages.config import STAGES, Decontaminate, Dedup, Fetch, Filter, Shard
from bloomery.tokenizer.config import AnyKind, ByteBpe

RESULT, WORK = "result.json", "work"
KEPT, DROPPED, SHARDS, TOKENIZER = "kept", "dropped", "shards", "tokenizer"
MARKER = "bloomery-data.json"
"""In WORK: this module has made it, and with it all that OUT holds under the names above. Of another's OUT, nothing is
removed."""
BESIDE = (decontamination.HITS, CLUSTERS, "repeated")
"""Files and folders that a stage may leave in addition to documents. OUT gets them unchanged."""


class Decontamination(Parallel, Decontaminate):
    """[dedup.decontaminate] of a recipe, as a stage of its own."""


class ToolSections(Config):
    """The sections of a recipe that the tools take their settings from."""

    fetch: Fetch
    decontaminate: Decontamination | None = None
    filter: Filter = Filter()
    dedup: Dedup = Dedup()
    tokenizer: AnyKind = Field(ByteBpe(), discriminator="kind")
    shard: Shard = Shard(val_fraction=0)


class SavedToolResult(TypedDict):
    """What RESULT holds, as far as anything reads it."""

    documents: Count
    kept: Count
    dropped: Count
    reasons: dict[str, Count]
    seconds: float
    made_from: str
    outputs: dict[NameInside, ListedFile]


class Tool(NamedTuple):
    """What a tool runs, and which section its settings are of."""

    section: str
    stages: tuple[Stage, ...]


RULES = ({"kind": "preset", "name": "gopher"},)
"""What `filter` goes by where nobody says."""

BY_NAME = {one.name: one for one in STAGES}


def _on_inputs(name: str, *after: str) -> Stage:
    """A stage of a recipe on other inputs, which a function of this module gives the names that it has in a recipe."""
    return replace(BY_NAME[name], run_by=f"bloomery.stages.data_tools:{name}", after=after)


READ = BY_NAME["fetch"]
DECONTAMINATE = Stage(
    "decontaminate",
    "bloomery.stages.decontaminate",
    after=("fetch",),
    run_by="bloomery.stages.data_tools:decontaminate",
)
TOOLS = {
    "filter": Tool("filter", (READ, _on_inputs("filter", "fetch"))),
    "dedup": Tool("dedup", (READ, _on_inputs("dedup", "fetch"))),
    "decontaminate": Tool("decontaminate", (READ, DECONTAMINATE)),
    "tokenize": Tool("shard", (READ, _on_inputs("tokenizer", "fetch"), _on_inputs("shard", "fetch", "tokenizer"))),
}


class DataCommand(NamedTuple):
    """What the command line says."""

    tool: str
    inputs: Sequence[str]
    """Files and folders, or patterns of them."""
    out: Path
    sections: Mapping[str, Any]
    """Of the recipe that was named, as plain data; empty without one."""
    settings: Sequence[Override] = ()
    """In the words of the tool's section."""
    text_field: str = "text"
    id_field: str | None = None
    workers: int | None = None
    memory_bytes: int | None = None
    against: Sequence[str] = ()
    tokenizer: Path | None = None


def run(asked: DataCommand) -> dict[str, Any]:
    """
    Do what is asked, and return what result.json holds: tool, documents, kept, dropped, reasons, …

    Raises ConfigError for settings that are none, DataError for input that is not there, and RunError for an OUT that
    holds something else.
    """
    tool = TOOLS[asked.tool]
    out = asked.out
    _check_paths(asked)
    sections = _sections(asked, tool)
    with pipeline.locked(out):
        plans = pipeline.plan_stages(tool.stages, sections, out / WORK)
        result = out / RESULT
        if result.exists() and (saved := _read_result(result))["made_from"] == plans[-1].fingerprint:
            if trouble := core_io.find_corruption(out, saved["outputs"], thorough=True):
                raise RunError(f"was changed: {trouble}", where=str(out), hint=_ANOTHER)
            return _without_outputs(saved)
        _check_that_nothing_is_lost(out)
        core_io.write_json(out / WORK / MARKER, {"tool": asked.tool})
        began = time.monotonic()
        _check_whole(plans, pipeline.execute(plans))
        return _delivered(asked, plans, out, time.monotonic() - began)


_ANOTHER = "Name a new folder with --out, or remove this one."


def _read_result(path: Path) -> SavedToolResult:
    return read_record(path, SavedToolResult, fix=_ANOTHER)


def _without_outputs(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "outputs"}


def _sections(asked: DataCommand, tool: Tool) -> ToolSections:
    """Recipe, then the flags, then the settings: the later one wins."""
    tree: dict[str, Any] = {name: dict(section) for name, section in asked.sections.items()}
    tree["fetch"] = {"sources": [_source(asked, number, path) for number, path in enumerate(asked.inputs, 1)]}
    if asked.tool == "decontaminate":
        tree["decontaminate"] = dict(asked.sections.get("dedup", {}).get("decontaminate") or {})
    section = tree.setdefault(tool.section, {})
    if asked.workers is not None:
        for stage_section in (tree["fetch"], section):
            stage_section["engine"] = {**stage_section.get("engine", {}), "workers": asked.workers}
    if asked.memory_bytes is not None:
        section["memory_bytes"] = asked.memory_bytes
    if asked.against:
        section["files"] = list(asked.against)
    if asked.tool == "filter" and not asked.sections:
        section["rules"] = list(RULES)
    if asked.tool == "tokenize":
        section.setdefault("val_fraction", 0.0)
    if asked.tokenizer is not None:
        tree["tokenizer"] = {"kind": "import", "path": str(_tokenizer_of(asked.tokenizer))}
    for path, value in map(config.split_override, asked.settings):
        known = path.partition(".")[0] in ToolSections.model_fields
        config.apply_override(tree, (path if known else f"{tool.section}.{path}", value))
    if asked.tool == "decontaminate" and not (section.get("files") or section.get("tasks")):
        hint = "Pass files of tasks, or folders of them: --against tasks/ (jsonl, .zst and .gz too, or parquet)."
        raise ConfigError("no evaluation task is set, so there is nothing to search for", hint=hint)
    if "tokenizer" in tree:
        tree["tokenizer"] = {"kind": "byte_bpe"} | tree["tokenizer"]
    return config.build(ToolSections, tree, where=f"bloomery data {asked.tool}")


def _tokenizer_of(path: Path) -> Path:
    """A tokenizer, or that of a run. Raises RunError for a run that has none yet."""
    if not (path / records.CURRENT).is_file():
        return path
    folder = records.stage_folders(path).get("tokenizer")
    if folder is None or records.find_manifest(folder) is None:
        raise RunError("has no finished tokenizer", where=str(path), hint="bloomery run RECIPE --until tokenizer")
    return folder


def _check_paths(asked: DataCommand) -> None:
    """
    Raises DataError for a name that no recipe could hold, and RunError for an OUT that lies in an input, or holds one.
    """
    read = [*asked.inputs, *asked.against, *([] if asked.tokenizer is None else [str(asked.tokenizer)])]
    for name in (*read, str(asked.out)):
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            hint = "Rename it, or pass the folder that contains it. Names inside the folder do not matter."
            raise DataError("is not valid UTF-8", where=ascii(name), hint=hint)
    out = _real(asked.out)
    for name in asked.inputs:
        if (folder := _real(Path(name))).is_dir() and out.is_relative_to(folder):
            what = f"lies in {name}, so the tool would read its own output"
            raise RunError(what, where=str(asked.out), hint="Choose another folder with --out.")
    for name in read:
        if _real(Path(name)).is_relative_to(out):
            what = f"lies in {asked.out}, where the tool writes and removes files"
            raise RunError(what, where=name, hint="Choose another folder with --out.")


def _real(path: Path) -> Path:
    """A path without links, as far as they lead anywhere: of a link to itself, its own."""
    return Path(os.path.realpath(path.expanduser()))


def _source(asked: DataCommand, number: int, path: str) -> dict[str, Any]:
    """A path as a source. What cannot be read is rejected with its reason and goes to dropped/; nothing stops."""
    source: dict[str, Any] = {"kind": "files", "name": f"in{number}", "domain": "text", "path": path, "invalid": "skip"}
    if asked.id_field is not None:
        source |= {"id_field": asked.id_field, "needs_id": True}
    return source | {"text_field": asked.text_field}


def _check_that_nothing_is_lost(out: Path) -> None:
    """OUT is empty, or holds what an earlier attempt has left. Raises RunError where it is somebody else's."""
    begun = out / WORK
    if (begun / MARKER).is_file() and not begun.is_symlink() and not (out / RESULT).exists():
        return
    if strangers := sorted(path.name for path in out.iterdir() if path.name != pipeline.LOCK):
        raise RunError(f"holds something else: {', '.join(strangers[:5])}", where=str(out), hint=_ANOTHER)


def _check_whole(plans: Sequence[StagePlan], became: Mapping[str, str]) -> None:
    """Raises RunError where a stage that an earlier attempt has finished is damaged: its files would be handed over."""
    for plan in plans:
        if became[plan.stage.name] == "fresh" and (trouble := records.damage(plan.folder, thorough=True)):
            hint = f"Remove {plan.folder / core_io.MANIFEST}, and run the same command again."
            raise RunError(f"is damaged: {trouble}", where=str(plan.folder), hint=hint)


def _delivered(asked: DataCommand, plans: Sequence[StagePlan], out: Path, seconds: float) -> dict[str, Any]:
    """Put the results of the stages into OUT, count them, and write result.json."""
    first, last = plans[0].folder, plans[-1].folder
    stats = records.read_manifest(last)["stats"]
    read = records.read_manifest(first)["stats"]
    for stale in (KEPT, DROPPED, SHARDS, TOKENIZER, *BESIDE):  # of an attempt that died right here
        core_io.remove_path(out / stale)
    reasons = _gathered([*_dropped_parts(first), *_dropped_parts(last)], out / DROPPED)
    if asked.tool == "tokenize":
        kept = read["documents"]
        plans[1].folder.rename(out / TOKENIZER)
        last.rename(out / SHARDS)
    else:
        kept = data_documents.count(last / KEPT)
        (last / KEPT).rename(out / KEPT)
        for name in BESIDE:
            if (last / name).exists():
                (last / name).replace(out / name)
    dropped = sum(reasons.values())
    documents = read["documents"] + read["rejected"]
    assert documents == kept + dropped, f"{documents} documents came in, {kept} + {dropped} went out"
    result = {
        "tool": asked.tool,
        "documents": documents,
        "kept": kept,
        "dropped": dropped,
        "reasons": dict(sorted(reasons.items())),
        "out": str(out),
        "seconds": round(seconds, 3),
        "stats": stats,
        "made_from": plans[-1].fingerprint,
        "outputs": core_io.listed(out, _outputs(out)),
    }
    core_io.write_json(out / RESULT, result)
    core_io.remove_path(out / WORK)
    return _without_outputs(result)


def _outputs(out: Path) -> list[str]:
    handed_over = [out / name for name in (KEPT, DROPPED, SHARDS, TOKENIZER, *BESIDE) if (out / name).exists()]
    paths = (path for top in handed_over for path in ([top] if top.is_file() else sorted(top.rglob("*"))))
    return [path.relative_to(out).as_posix() for path in paths if path.is_file()]


def _dropped_parts(folder: Path) -> list[Path]:
    """Every file of documents below a stage's folder whose documents have a reason."""
    files = sorted(folder.glob("*/part-*.parquet"))
    return [path for path in files if "reason" in pq.read_schema(path).names]


def _gathered(parts: Sequence[Path], folder: Path) -> Counter[str]:
    """Move files of dropped documents into one folder, with the same columns in all; returns how many, by reason."""
    folder.mkdir()
    reasons: Counter[str] = Counter()
    filled = [path for path in parts if pq.read_metadata(path).num_rows] or list(parts[:1])
    schema = pa.unify_schemas([_nullable(pq.read_schema(path)) for path in filled])
    for number, path in enumerate(filled):
        for batch in data_documents.part_batches(path, ["reason"]):
            reasons.update(batch.column("reason").to_pylist())
        target = folder / f"part-{number:05d}.parquet"
        if pq.read_schema(path).names == schema.names:
            path.rename(target)
            continue
        with data_documents.PartWriter(target, schema) as writer:
            for batch in data_documents.part_batches(path):
                writer.write(batch.to_pylist())
    return reasons


def _nullable(schema: "pa.Schema") -> "pa.Schema":
    return pa.schema([field.with_nullable(True) for field in schema])


def filter(settings: Filter, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return rules.sift(settings, inputs, out)


def dedup(settings: Dedup, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return deduplicate.run(settings, {"filter": inputs["fetch"]}, out)


def decontaminate(settings: Decontamination, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return decontamination.run(
        settings, data_documents.parts(data_documents.handed_on(inputs["fetch"])), out, settings.engine
    )


def tokenizer(settings: AnyKind, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return vocabulary.run(settings, {"dedup": inputs["fetch"]}, out)


def shard(settings: Shard, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return shards.run(settings, {"dedup": inputs["fetch"], "tokenizer": inputs["tokenizer"]}, out)
