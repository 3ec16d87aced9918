"""
Extend a shorter run instead of repeating its first steps.

A run with more steps can extend a shorter run instead of repeating its first steps. It ends as if it had run from
the start. The sequence of samples does not depend on the number of steps. Until the decay begins, neither does the
learning rate of a constant schedule. So a checkpoint of the shorter run that lies in the part common to both
belongs to the longer run too. It is copied with the metrics logged until then, and `continued.json` says where it
came from. Any other difference than the number of steps and the decay is refused by name.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.core.config import build, plain
from bloomery.core.errors import CheckpointError
from bloomery.core.io import MANIFEST
from bloomery.core.log import METRICS, info
from bloomery.core.records import read_manifest, read_record
from bloomery.train.checkpointing import CONTINUED
from bloomery.train.config import Training
from bloomery.train.metrics import MAIN_LOG
from bloomery.train.optim import learning_rate_share
from bloomery.train.validation import SAMPLES
from bloomery.weights import checkpoint, hf
from bloomery.weights.hf import Lineage

SETTINGS = "settings.json"
FREE = ("steps", "schedule", "device", "depth", "tokens_per_parameter", "start_from")
"""What may differ: shares of the learning rate are compared step by step, what training starts from by its content."""


def remember(config: Training, out: Path) -> None:
    """Leave in a stage's folder with which settings it trains, so that a longer run can be compared with it."""
    out.mkdir(parents=True, exist_ok=True)
    core_io.write_json(out / SETTINGS, plain(config, stable_only=True))
    if not _trained(out):
        (out / CONTINUED).unlink(missing_ok=True)  # of an attempt that died before it had brought a checkpoint


def bring(path: Path, config: Training, out: Path, lineage: Lineage, *, samples_alike: Callable[[int], float]) -> None:
    """
    Bring the newest checkpoint of another run of this stage to `out` that this run would come by as well, if `out` has
    none yet. `samples_alike` says for a number of steps how many samples come before their order depends on it.

    Raises CheckpointError where there is none, or the other run differs in something else.
    """
    own = checkpoint.newest_folder(out / "checkpoints")
    if own is not None and int(own.name):
        return
    folder = _stage_folder(path, out)
    before = _settings(folder)
    if differing := _differences(before, plain(config, stable_only=True)):
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        what = f"was trained with other settings: {'; '.join(differing[:3])}{more}"
        raise CheckpointError(what, where=str(folder), hint="Use the same settings, or remove continue_from.")
    last = common_steps(config, before)
    newest = checkpoint.newest_folder(folder / "checkpoints", before=last + 1)
    while newest is not None and _samples(newest) > min(map(samples_alike, (config.steps, before["steps"]))):
        newest = checkpoint.newest_folder(folder / "checkpoints", before=int(newest.name))
    if newest is None or not int(newest.name):
        there = ", ".join(map(str, _trained(folder))) or "none"
        what = f"has the same learning rates until step {last}, but no checkpoint of that part (only: {there})"
        hint = "A run keeps the end of its constant part and every keep_every steps. Or remove continue_from."
        raise CheckpointError(what, where=str(folder), hint=hint)
    _same_origin(newest, lineage)
    _copy(newest, folder, out)


def common_steps(config: Training, before: Mapping[str, Any]) -> int:
    """After how many steps two runs still have had the same learning rates."""
    other = build(Training, {name: value for name, value in before.items() if name in Training.model_fields})
    pairs = range(1, min(config.steps, other.steps) + 1)
    same = (
        learning_rate_share(config.schedule, t, config.steps) == learning_rate_share(other.schedule, t, other.steps)
        for t in pairs
    )
    return next((t - 1 for t, alike in zip(pairs, same, strict=True) if not alike), len(pairs))


def _trained(folder: Path) -> list[int]:
    """The steps of a stage's checkpoints but for the start, of which a run has one before it has done anything."""
    return [step for one in checkpoint.folders(folder / "checkpoints") if (step := int(one.name))]


def _stage_folder(path: Path, out: Path) -> Path:
    """The folder of a stage, or that of the only stage of this name in a run that has checkpoints."""
    if (path / "checkpoints").is_dir():
        return path
    name = out.name.split("-")[1] if out.name.count("-") >= 2 else out.name
    there = [one for one in sorted(path.glob(f"[0-9][0-9]-{name}-*")) if (one / "checkpoints").is_dir() and one != out]
    if len(there) == 1:
        return there[0]
    names = ", ".join(one.name for one in there) or "none"
    what = f"has {len(there)} folders of the stage {name} with checkpoints ({names})"
    raise CheckpointError(what, where=str(path), hint="Set continue_from to one folder of that stage.")


def _settings(folder: Path) -> dict[str, Any]:
    if (folder / SETTINGS).exists():
        return read_record(folder / SETTINGS, dict[str, Any], error=CheckpointError)
    if (folder / MANIFEST).exists():
        return read_manifest(folder)["config"]
    what = f"does not record its training settings: it has neither {SETTINGS} nor {MANIFEST}"
    raise CheckpointError(what, where=str(folder), hint="Remove continue_from to train from the start.")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What both know and is not the same, each as `name was X and is Y`."""
    known, current = (dict(_flat({n: v for n, v in one.items() if n not in FREE})) for one in (before, now))
    pairs = [(name, known[name], value) for name, value in current.items() if name in known]
    return [f"{name} was {was!r} and is {value!r}" for name, was, value in pairs if was != value]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _samples(newest: Path) -> int:
    return checkpoint.read_state(newest)["samples"]


def _same_origin(newest: Path, lineage: Lineage) -> None:
    saved, expected = (asdict(replace(one, step=0)) for one in (hf.lineage_of(newest), lineage))
    for name in saved:
        if saved[name] != expected[name]:
            was, is_now = (one[name][:8] if one[name] else "none" for one in (saved, expected))
            hint = "Continue a run on the same data, or remove continue_from."
            raise CheckpointError(
                f"was made with {name} {was}, but this run has {is_now}", where=str(newest), hint=hint
            )


def _copy(newest: Path, folder: Path, out: Path) -> None:
    root = out / "checkpoints"
    partial = root / (newest.name + core_io.PARTIAL)
    with core_io.disk_errors(partial):
        root.mkdir(parents=True, exist_ok=True)
        checkpoint.check_space(partial, sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()))
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(newest, partial)
        for name in (METRICS, MAIN_LOG, SAMPLES):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)
        facts = {"from": str(folder), "step": int(newest.name), "manifest": core_io.sha256_file(newest / MANIFEST)}
        core_io.write_json(out / CONTINUED, facts)
        core_io.sync_folder(partial)
        partial.rename(root / newest.name)
    info(f"  the first {int(newest.name)} steps come from {folder}")
