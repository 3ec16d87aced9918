"""
The model card of an export, in Markdown with the front matter of a hub: base, license, data, training and results.

Everything on it comes from files: manifests of the stages, the data card and the evaluation of the run, and the card
of the base. The card leaves out what no file states.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.config import is_of_hub
from bloomery.core.errors import CheckpointError, DataError
from bloomery.core.log import info
from bloomery.core.records import RECIPE, find_manifest, read_record
from bloomery.weights import gguf, locate, peft
from bloomery.weights.opened import ADAPTER_CONFIG, GGUF_SUFFIX, is_adapter

CARD = "README.md"
DATA_CARD, REPORT = "data_card.md", "report.json"
STAGE = re.compile(r"\d\d-(\w+)-[0-9a-f]+")
OF_HUB = re.compile(r"[\w.-]+/[\w.-]+")
UNKNOWN = "not known: state it with --license before you publish the model"
MAX_BYTES = 2**20
"""Of a card that is looked at for a license."""
TRAINED_BY = ("prefer", "finetune", "pretrain")


@dataclass(frozen=True)
class Provenance:
    """Where a model comes from."""

    name: str
    base: str | None
    """OWNER/NAME of a hub, or the name of a folder or file; None for a model that was trained from scratch."""
    license: str | None
    run: Path | None = None
    stage: Path | None = None
    """The folder of the stage that made the model."""
    checkpoint: str | None = None
    """The step of a checkpoint of that stage; None where it is what the stage handed on."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """What the stage `evaluate` has measured of it."""


def provenance(folder: Path, license: str | None = None) -> Provenance:
    """
    What files say of the model in a folder or a file. `license` goes before the license of its base. Raises DataError
    where it is no identifier.
    """
    if license is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", license):
        hint = "Use an identifier of SPDX or the hub, such as apache-2.0, mit or other."
        raise DataError(f"{license!r} is not a license identifier", where="--license", hint=hint)
    stage = next((path for path in folder.resolve().parents if STAGE.fullmatch(path.name)), None)
    run = stage.parent if stage is not None and (stage.parent / RECIPE).is_file() else None
    base = _base(stage) if run is not None and stage is not None else folder
    if run is None and is_adapter(folder):
        adapter = peft.read(folder)
        base = locate.named_model(folder / ADAPTER_CONFIG, adapter.base, adapter.revision)
    known = license or (None if base is None else license_of(base))
    is_final = stage is not None and folder.resolve() == stage / "model"
    report = _report(run, stage) if run is not None and stage is not None and is_final else {}
    return Provenance(
        name=folder.resolve().name if run is None else run.name,
        base=_named(base) if base else None,
        license=known,
        run=run,
        stage=stage,
        checkpoint=None if stage is None or is_final else folder.resolve().name.lstrip("0") or "0",
        report=report,
    )


def _base(stage: Path | None) -> Path | None:
    """The model that a run started from, as its stages name it: the last one first."""
    while stage is not None:
        manifest = find_manifest(stage)
        if manifest is None:
            return None
        if start := manifest["config"].get("start_from"):
            return Path(start)
        stage = _trained(stage)
    return None


def _trained(stage: Path) -> Path | None:
    """The stage whose model another one started from, or measured."""
    manifest = find_manifest(stage)
    inputs = {} if manifest is None else manifest.get("inputs", {})
    return next((stage.parent / inputs[name] for name in TRAINED_BY if name in inputs), None)


def _named(base: Path) -> str:
    if is_of_hub(base):
        return locate.parsed(str(base)).repository
    cached = next((named for folder in (base, *base.parents) if (named := locate.of_hub(folder))), None)
    return cached[0] if cached else base.name


def license_of(base: Path) -> str | None:
    """The license that the files of a model state: its card, or a GGUF file. None where they state none."""
    if is_of_hub(base):
        parsed = locate.parsed(str(base))
        name = parsed.file or CARD
        cached = try_to_load_from_cache(parsed.repository, name, revision=parsed.revision)
        return license_of(Path(cached)) if isinstance(cached, str) else None
    base = base.expanduser()
    if base.suffix == GGUF_SUFFIX:
        return gguf.read(base).license if base.is_file() else None
    file = base / CARD if base.is_dir() else base
    if not file.is_file() or file.name != CARD or file.stat().st_size > MAX_BYTES:
        return None
    try:
        said = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.get("license")
    except ValueError as error:  # front matter that is none
        info(f"{file}: states no license that can be read: {error}", "yellow")
        return None
    return said if isinstance(said, str) else None


def _report(run: Path, stage: Path) -> dict[str, Any]:
    for folder in sorted(run.glob("[0-9][0-9]-evaluate-*"), key=lambda path: path.stat().st_mtime, reverse=True):
        if _trained(folder) == stage and (folder / REPORT).is_file():
            return read_record(folder / REPORT, dict[str, Any], error=CheckpointError, fix="Evaluate the run again.")
    return {}


def card(source: Provenance, rows: Mapping[str, str], *, library: str = "transformers", title: str = "") -> str:
    """The card. `rows` are facts of the exported model."""
    scores = list(_scores(source.report))
    title = title or source.name
    results = [
        EvalResult("text-generation", dataset_type=task, dataset_name=task, metric_type=metric, metric_value=value)
        for task, metric, value, _ in scores
    ]
    data = _data(source)
    front = ModelCardData(
        base_model=source.base if source.base and OF_HUB.fullmatch(source.base) else None,
        datasets=sorted({name for name, _ in data if OF_HUB.fullmatch(name)}) or None,
        eval_results=results or None,
        library_name=library,
        license=source.license,
        model_name=title if results else None,
        pipeline_tag="text-generation",
        tags=["bloomery"],
    )
    facts = {"base": source.base or "none", "license": source.license or UNKNOWN, **_training(source), **rows}
    parts = [f"---\n{front.to_yaml()}\n---", f"# {title}", "Made with Bloomery.", _table(("", ""), facts.items())]
    if scores:
        cells = [(task, metric, f"{value:.4g}", interval) for task, metric, value, interval in scores]
        parts += ["## Scores", _table(("task", "score", "value", "95 % interval"), cells)]
    if data:
        parts += ["## Training data", _table(("source", "license"), data)]
    if source.run is not None and (file := source.run / DATA_CARD).is_file():
        parts.append(file.read_text(encoding="utf-8").strip())
    return "\n\n".join(parts) + "\n"


def _table(heads: tuple[str, ...], rows: Any) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines)


def _data(source: Provenance) -> list[tuple[str, str]]:
    """Sources of the stages before the one that trained, with their licenses. OWNER/NAME is a data set of the hub."""
    sources: dict[str, str] = {}
    stages = [source.stage] if source.stage is not None else []
    for stage in stages:  # which grows
        manifest = find_manifest(stage)
        if manifest is None:
            continue
        stages += [stage.parent / name for name in manifest.get("inputs", {}).values()]
        for config in manifest["config"].get("sources") or ():
            named = (config.get(key) for key in ("dataset", "preset", "name", "path", "kind"))
            name = next(str(value) for value in named if value)
            sources[name if name == config.get("dataset") else Path(name).name] = config.get("license") or "not stated"
    return list(sources.items())


def _training(source: Provenance) -> dict[str, str]:
    """How the stage trained, from its manifest; of a checkpoint, its step."""
    stage = source.stage
    manifest = None if stage is None else find_manifest(stage)
    if manifest is None or stage is None:
        return {}
    config, stats = manifest["config"], manifest["stats"]
    rows = {"training stage": manifest["stage"]}
    if lora := config.get("lora"):
        rows["adapters"] = f"LoRA of rank {lora.get('rank')}, base kept as {lora.get('base_dtype')}"
    if source.checkpoint is not None:
        return rows | {"checkpoint of step": source.checkpoint}
    for key in ("steps", "tokens"):
        if isinstance(stats.get(key), int):
            rows[key] = f"{stats[key]:,}"
    if isinstance(loss := stats.get("validation_loss"), float):
        rows["validation loss"] = f"{loss:.4f} nats per token"
    return rows


def _scores(report: Mapping[str, Any]) -> Iterator[tuple[str, str, float, str]]:
    for task, stats in (report.get("tasks") or {}).items():
        for metric, score in stats["scores"].items():
            yield task, metric, score["value"], f"{score['low']:.4g} to {score['high']:.4g}"
