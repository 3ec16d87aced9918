"""
The data tools on their own: files in, one stage of the data half, and a folder of what is kept and what is dropped.

    OUT/kept/part-*.parquet       documents, with their id
    OUT/dropped/part-*.parquet    the others, with reason and value; also what could not be read
    OUT/hits.parquet              of `decontaminate`: which text of which task stands in which document, and where
    OUT/clusters.parquet          of `dedup`: which documents are copies of one another, kept or not
    OUT/shards/, OUT/tokenizer/   of `tokenize`, in the place of kept/: token files, and what gives them a meaning
    OUT/result.json               the counts, written last

The stages are those of a recipe. They run in OUT/work, which goes when the result is there; a run that died goes on.
"""

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from bloomery.core import config, files, stage
from bloomery.core.config import Config
from bloomery.core.errors import ConfigError, DataError, RunError
from bloomery.core.stage import Plan, Stage
from bloomery.data import document
from bloomery.data.deduplicate import CLUSTERS
from bloomery.data.engine import Parallel
from bloomery.stages import decontaminate as decontamination
from bloomery.stages import dedup as deduplicate
from bloomery.stages import filter as rules
from bloomery.stages import shard as shards
from bloomery.stages import tokenizer as vocabulary
from bloomery.stages.config import Decontaminate, Dedup, Fetch, Filter, Shard
from bloomery.tokenizer.config import AnyKind, ByteBpe

RESULT, WORK = "result.json", "work"
KEPT, DROPPED, SHARDS, TOKENIZER = "kept", "dropped", "shards", "tokenizer"
BESIDE = (decontamination.HITS, CLUSTERS, "repeated")
"""What a stage may leave beside documents, and OUT gets as it is."""


class Decontamination(Parallel, Decontaminate):
    """[dedup.decontaminate] of a recipe, as a stage of its own."""


class Sections(Config):
    """The sections of a recipe that the tools take their settings from."""

    fetch: Fetch
    decontaminate: Decontamination | None = None
    filter: Filter = Filter()
    dedup: Dedup = Dedup()
    tokenizer: AnyKind = Field(ByteBpe(), discriminator="kind")
    shard: Shard = Shard(hold_out=0)


class Tool(NamedTuple):
    """What a tool runs, and which section its settings are of."""

    section: str
    stages: tuple[Stage, ...]


RULES = ({"kind": "preset", "name": "gopher"},)
"""What `filter` goes by where nobody says."""

HERE = "bloomery.stages.standalone"
READ = Stage(
    name="fetch", run="bloomery.stages.fetch:run", digest="bloomery.stages.fetch:digest", version=2, resumes=True
)
DEDUP = Stage(name="dedup", run=f"{HERE}:dedup", digest="bloomery.stages.dedup:digest", after=("fetch",), resumes=True)
FILTER = Stage(
    name="filter", run=f"{HERE}:filter_", digest="bloomery.stages.filter:digest", after=("fetch",), resumes=True
)
DECONTAMINATE = Stage(
    name="decontaminate",
    run=f"{HERE}:decontaminate",
    digest="bloomery.stages.decontaminate:digest",
    after=("fetch",),
    version=2,
    resumes=True,
)
TOOLS = {
    "filter": Tool("filter", (READ, FILTER)),
    "dedup": Tool("dedup", (READ, DEDUP)),
    "decontaminate": Tool("decontaminate", (READ, DECONTAMINATE)),
    "tokenize": Tool(
        "shard",
        (
            READ,
            Stage(
                name="tokenizer",
                run=f"{HERE}:tokenizer",
                digest="bloomery.stages.tokenizer:digest",
                after=("fetch",),
            ),
            Stage(name="shard", run=f"{HERE}:shard", after=("fetch", "tokenizer"), resumes=True),
        ),
    ),
}


class Asked(NamedTuple):
    """What the command line says."""

    tool: str
    inputs: Sequence[str]
    """Files and folders, or patterns of them."""
    out: Path
    sections: Mapping[str, Any]
    """Of the recipe that was named, as plain data; empty without one."""
    settings: Sequence[str] = ()
    """key=value in the words of the tool's section."""
    text_field: str = "text"
    id_field: str | None = None
    workers: int | None = None
    memory_bytes: int | None = None
    against: Sequence[str] = ()
    tokenizer: Path | None = None


def run(asked: Asked) -> dict[str, Any]:
    """
    Do what is asked, and return what result.json holds: tool, documents, kept, dropped, reasons, …

    Raises ConfigError for settings that are none, DataError for input that is not there, and RunError for an OUT that
    holds something else.
    """
    tool = TOOLS[asked.tool]
    out = asked.out
    _check_paths(asked)
    sections = _sections(asked, tool)
    with stage.locked(out):
        plans = stage.lay_out(tool.stages, sections, out / WORK)
        result = out / RESULT
        if result.is_file() and (found := files.read_json(result))["made_from"] == plans[-1].fingerprint:
            return dict(found)
        _check_that_nothing_is_lost(out)
        began = time.monotonic()
        stage.execute(plans)
        return _delivered(asked, plans, out, time.monotonic() - began)


def _sections(asked: Asked, tool: Tool) -> Sections:
    """Recipe, then the flags, then the settings: the later one wins."""
    tree: dict[str, Any] = {name: dict(section) for name, section in asked.sections.items()}
    tree["fetch"] = {"sources": [_source(asked, number, path) for number, path in enumerate(asked.inputs, 1)]}
    if asked.tool == "decontaminate":
        tree["decontaminate"] = dict(asked.sections.get("dedup", {}).get("decontaminate") or {})
    section = tree.setdefault(tool.section, {})
    if asked.workers is not None:
        for one in (tree["fetch"], section):
            one["engine"] = {**one.get("engine", {}), "workers": asked.workers}
    if asked.memory_bytes is not None:
        section["memory_bytes"] = asked.memory_bytes
    if asked.against:
        section["files"] = list(asked.against)
    if asked.tool == "filter" and not asked.sections:
        section["rules"] = list(RULES)
    if asked.tool == "tokenize":
        section.setdefault("hold_out", 0.0)
    if asked.tokenizer is not None:
        tree["tokenizer"] = {"kind": "import", "path": str(asked.tokenizer)}
    for setting in asked.settings:
        known = setting.partition("=")[0].partition(".")[0] in Sections.model_fields
        config.apply_override(tree, setting if known else f"{tool.section}.{setting}")
    if asked.tool == "decontaminate" and not (section.get("files") or section.get("tasks")):
        cure = "Name files of tasks, or folders of them: --against tasks/ (jsonl, .zst and .gz too, or parquet)."
        raise ConfigError("no evaluation task is named, so nothing could be looked for", cure=cure)
    if "tokenizer" in tree:
        tree["tokenizer"] = {"kind": "byte_bpe"} | tree["tokenizer"]
    return config.build(Sections, tree, where=f"bloomery data {asked.tool}")


def _check_paths(asked: Asked) -> None:
    """Raises DataError for a name that no recipe could hold, and RunError for an OUT that would be read as input."""
    more = [str(path) for path in (asked.out, asked.tokenizer) if path is not None]
    for name in (*asked.inputs, *asked.against, *more):
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            cure = "Rename it, or name the folder that holds it: what is in there may be called as it likes."
            raise DataError("is a name that is no UTF-8", where=ascii(name), cure=cure)
    for name in asked.inputs:
        if (folder := Path(name).expanduser().resolve()).is_dir() and asked.out.resolve().is_relative_to(folder):
            what = f"lies in {name}, so that the tool would read what it writes"
            raise RunError(what, where=str(asked.out), cure="Name another folder with --out.")


def _source(asked: Asked, number: int, path: str) -> dict[str, Any]:
    """A path as a source. What cannot be read is rejected with its reason and goes to dropped/; nothing stops."""
    found: dict[str, Any] = {"kind": "files", "name": f"in{number}", "domain": "text", "path": path, "invalid": "skip"}
    if asked.id_field is not None:
        found |= {"id_field": asked.id_field, "needs_id": True}
    return found | {"text_field": asked.text_field}


def _check_that_nothing_is_lost(out: Path) -> None:
    """OUT may hold what an attempt with the same settings has left, and nothing else."""
    strangers = sorted(path.name for path in out.iterdir() if path.name not in (WORK, ".lock"))
    begun = out / WORK
    if strangers and not begun.is_dir():
        cure = "Name a new folder with --out, or remove this one."
        raise RunError(f"holds something else: {', '.join(strangers[:5])}", where=str(out), cure=cure)


def _delivered(asked: Asked, plans: Sequence[Plan], out: Path, seconds: float) -> dict[str, Any]:
    """Bring what the stages left to its place in OUT, count it, and write result.json."""
    first, last = plans[0].folder, plans[-1].folder
    stats = stage.read_manifest(last)["stats"]
    read = stage.read_manifest(first)["stats"]
    for stale in (KEPT, DROPPED, SHARDS, TOKENIZER, *BESIDE):  # of an attempt that died right here
        if (out / stale).is_dir():
            shutil.rmtree(out / stale)
    reasons = _gathered([*_dropped_parts(first), *_dropped_parts(last)], out / DROPPED)
    if asked.tool == "tokenize":
        kept = read["documents"]
        plans[1].folder.rename(out / TOKENIZER)
        last.rename(out / SHARDS)
    else:
        kept = document.count(last / KEPT)
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
    }
    files.write_json(out / RESULT, result)
    shutil.rmtree(out / WORK)
    return result


def _dropped_parts(folder: Path) -> list[Path]:
    """Every file of documents below a stage's folder whose documents have a reason."""
    found = sorted(folder.glob("*/part-*.parquet"))
    return [path for path in found if "reason" in pq.read_schema(path).names]


def _gathered(parts: Sequence[Path], folder: Path) -> Counter[str]:
    """Move files of dropped documents into one folder, with the same columns in all; returns how many, by reason."""
    folder.mkdir()
    reasons: Counter[str] = Counter()
    filled = [path for path in parts if pq.read_metadata(path).num_rows] or list(parts[:1])
    schema = pa.unify_schemas([_nullable(pq.read_schema(path)) for path in filled])
    for number, path in enumerate(filled):
        for batch in document.part_batches(path, ["reason"]):
            reasons.update(batch.column("reason").to_pylist())
        place = folder / f"part-{number:05d}.parquet"
        if pq.read_schema(path).names == schema.names:
            path.rename(place)
            continue
        with document.PartWriter(place, schema) as writer:
            for batch in document.part_batches(path):
                writer.write(batch.to_pylist())
    return reasons


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


def filter_(settings: Filter, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return rules.sift(settings, inputs, out)


def dedup(settings: Dedup, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return deduplicate.run(settings, {"filter": inputs["fetch"]}, out)


def decontaminate(settings: Decontamination, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return decontamination.run(settings, document.parts(document.handed_on(inputs["fetch"])), out, settings.engine)


def tokenizer(settings: AnyKind, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return vocabulary.run(settings, {"dedup": inputs["fetch"]}, out)


def shard(settings: Shard, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return shards.run(settings, {"dedup": inputs["fetch"], "tokenizer": inputs["tokenizer"]}, out)
