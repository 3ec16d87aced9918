"""Four small stages, of which one needs none, one, or two of the others."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import Field

from bloomery.core import io as core_io
from bloomery.core.config import VOLATILE, Config
from bloomery.core.io import MANIFEST
from bloomery.core.pipeline import Stage


class Section(Config):
    number: int = 1
    outside: Path | None = None
    workers: int = Field(1, json_schema_extra=VOLATILE)


class Recipe(Config):
    make: Section = Section()
    double: Section = Section()
    side: Section = Section()
    join: Section = Section()


RUNS: list[str] = []
"""Every stage that ran, in order."""
FAIL = ""
"""A stage whose next run dies after it has left something behind."""


def make(config: Section, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return work("make", str(config.number), out)


def double(config: Section, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return work("double", 2 * (inputs["make"] / "out.txt").read_text(), out)


def side(config: Section, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return work("side", "side", out)


def join(config: Section, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return work("join", "+".join((inputs[name] / "out.txt").read_text() for name in ("double", "side")), out)


def work(name: str, text: str, out: Path) -> dict[str, Any]:
    RUNS.append(name)
    assert not (out / MANIFEST).exists()
    found = (out / "leftover.txt").exists()
    (out / "leftover.txt").write_text("half")
    if name == FAIL:
        raise RuntimeError("died")
    (out / "deep").mkdir(exist_ok=True)
    core_io.write_json(out / "deep" / "more.json", [text])
    (out / "out.txt").write_text(text)
    return {"characters": len(text), "share": 0.5, "found": found}


def external_inputs(config: Section) -> str:
    return core_io.sha256_file(config.outside) if config.outside else ""


HERE = "tests.core.made"


def stage(name: str, *after: str, **says: Any) -> Stage:
    """A stage that this file runs, whose module, made here, says `says` of it."""
    code = ModuleType(f"{HERE}.{name}.{len(sys.modules)}")
    code.__dict__.update(says)
    sys.modules[code.__name__] = code
    return Stage(name, code.__name__, after, run_by=f"{HERE}:{name}")


STAGES = (
    stage("make", external_inputs=external_inputs),
    stage("double", "make", RESUMES=True),
    stage("side"),
    stage("join", "double", "side"),
)


def manifest(outputs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The manifest of a finished stage, with as little in it as is read."""
    facts = {
        "stage": "made",
        "config": {},
        "stats": {},
        "seconds": 1.0,
        "resumed": False,
        "finished": "2026-01-01T00:00:00Z",
    }
    return {**facts, "outputs": dict(outputs or {}), **more}
