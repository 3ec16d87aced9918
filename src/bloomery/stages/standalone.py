"""
The data tools on their own: files in, one stage of the data half, and a folder of what is kept and what is dropped.

    OUT/kept/part-*.parquet       documents, with their id
    OUT/dropped/part-*.parquet    the others, with reason and value; also what could not be read
    OUT/shards/                   of `tokenize`, in the place of kept/: token files
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
import pyarrow.compute as pc

from bloomery.core import config, files, stage
from bloomery.core.config import Config
from bloomery.core.errors import ConfigError, RunError
from bloomery.core.stage import Plan, Stage
from bloomery.data import document
from bloomery.data.engine import Engine
from bloomery.stages import dedup as deduplicate
from bloomery.stages import filter as rules
from bloomery.stages import shard as shards
from bloomery.stages.config import Dedup, Fetch, Filter, Shard, Vocabulary

RESULT, WORK = "result.json", "work"
KEPT, DROPPED, SHARDS = "kept", "dropped", "shards"


class Sections(Config):
    """The sections of a recipe that the tools take their settings from."""

    fetch: Fetch
    filter: Filter = Filter()
    dedup: Dedup = Dedup()
    tokenizer: Vocabulary = Vocabulary()
    shard: Shard = Shard(hold_out=0)


class Tool(NamedTuple):
    """What a tool runs, and which section its settings are of."""

    section: str
    stages: tuple[Stage, ...]


HERE = "bloomery.stages.standalone"
READ = Stage(name="fetch", run="bloomery.stages.fetch:run", digest="bloomery.stages.fetch:digest", resumes=True)
DEDUP = Stage(name="dedup", run=f"{HERE}:dedup", after=("fetch",), resumes=True)
TOOLS = {
    "filter": Tool("filter", (READ, Stage(name="filter", run=f"{HERE}:filter_", after=("fetch",), resumes=True))),
    "dedup": Tool("dedup", (READ, DEDUP)),
    "decontaminate": Tool("dedup", (READ, DEDUP)),
    "tokenize": Tool(
        "shard",
        (
            READ,
            Stage(name="tokenizer", run=f"{HERE}:tokenizer", after=("fetch",)),
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
    sections = _sections(asked, tool)
    out = asked.out
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
    tree: dict[str, Any] = {name: dict(section) for name, section in asked.sections.items()}
    tree["fetch"] = {"sources": [_source(asked, number, path) for number, path in enumerate(asked.inputs, 1)]}
    if asked.tool == "decontaminate":
        tree["dedup"] = _only_decontamination(tree.get("dedup", {}), asked)
    if asked.tokenizer is not None:
        tree["tokenizer"] = {"kind": "import", "path": str(asked.tokenizer)}
    for setting in asked.settings:
        prefix = "" if setting.partition(".")[0] in Sections.model_fields else f"{tool.section}."
        config.apply_override(tree, prefix + setting)
    for name in Sections.model_fields:
        section = tree.setdefault(name, {})
        if asked.workers is not None and "engine" in Sections.model_fields[name].annotation.model_fields:  # type: ignore[union-attr]
            section["engine"] = {**section.get("engine", {}), "workers": asked.workers}
        if asked.memory_bytes is not None and "memory_bytes" in Sections.model_fields[name].annotation.model_fields:  # type: ignore[union-attr]
            section["memory_bytes"] = asked.memory_bytes
    return config.build(Sections, tree, where=f"bloomery data {asked.tool}")


def _source(asked: Asked, number: int, path: str) -> dict[str, Any]:
    """A path as a source. What cannot be read is rejected with its reason and goes to dropped/; nothing stops."""
    fields = {"text_field": asked.text_field} | ({"id_field": asked.id_field} if asked.id_field else {})
    return {"kind": "files", "name": f"in{number}", "domain": "text", "path": path, "invalid": "skip", **fields}
