"""
Save, resume, roll back and extend training runs, and track what bit-exact resuming depends on.

A save starts and continues in a thread. Weights that are not finite are never saved. A run resumes from the newest
checkpoint, whenever that was saved. It rolls back only to checkpoints of steps that are saved independently of the
clock, the start among them. Otherwise weights would depend on how fast the machine was.

A save holds all weights of the model, or the adapters alone if the rest never changes.

The last bits of a training run depend on more than recipe and data. This is recorded, and compared on resume. The
order in which numbers are added differs with the number of threads where kernels are compiled. It differs between
fused and plain optimizers, and between versions, CPUs and compiled libraries. It also differs with the number of
ranks. If all of this is unchanged, a resumed run ends with the same bits as a run that was never stopped. Otherwise
the difference is one of rounding.

A run with more steps can extend a shorter run instead of repeating its first steps. It ends as if it had run from
the start. The sequence of samples does not depend on the number of steps. Until the decay begins, neither does the
learning rate of a constant schedule. So a checkpoint of the shorter run that lies in the part common to both
belongs to the longer run too. It is copied with the metrics logged until then, and `continued.json` says where it
came from. Any other difference than the number of steps and the decay is refused by name.

Saving, resuming, rollback and extension share one file because they must agree on which checkpoints count.
"""

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import io as core_io
from bloomery.core import native
from bloomery.core.config import build, plain
from bloomery.core.errors import CheckpointError, RunError
from bloomery.core.io import MANIFEST
from bloomery.core.log import METRICS, info
from bloomery.core.pipeline import read_manifest
from bloomery.core.records import read_record
from bloomery.hw import device as devices
from bloomery.hw import kernel_selection
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.model.kernels import cpu
from bloomery.model.lora_config import Lora
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import fsdp, fused_adamw, progress
from bloomery.train.config import Training
from bloomery.train.metrics import MAIN_LOG
from bloomery.train.optim import Optimizers, learning_rate_share
from bloomery.train.state import State, forget
from bloomery.train.validation import SAMPLES
from bloomery.weights import checkpoint, hf
from bloomery.weights.checkpoint import Checkpoint, RollbackInfo, Saver
from bloomery.weights.hf import BaseModel, Lineage

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Write = Callable[[Path, Lineage], None]


@dataclass
class FullModelSaver:
    """Every weight."""

    model: Transformer
    renderer: Renderer

    def write(self, folder: Path, lineage: Lineage) -> None:
        """Leave it in a folder, as it is now."""
        hf.save(folder, self.model, self.renderer, lineage)

    def copied(self, world: World) -> tuple[Write, int]:
        """What writes a copy that training does not change, and its bytes. All ranks call it; the first writes."""
        twin = fsdp.copy_of(self.model, world)
        return FullModelSaver(twin, self.renderer).write, fsdp.weight_bytes(twin)

    def fill(self, folder: Path, lineage: Lineage) -> None:
        """Take it up from a folder. Raises CheckpointError where that was made from something else."""
        if not fsdp.is_sharded(self.model):
            hf.fill(self.model, folder, lineage)
            return
        twin = Transformer(self.model.config, self.model.vocab_size)
        hf.fill(twin, folder, lineage)
        fsdp.take(self.model, twin)


@dataclass
class AdapterSaver:
    """The adapters beside a frozen base, which stays where it is."""

    model: Transformer
    renderer: Renderer
    settings: Lora
    base: BaseModel

    def write(self, folder: Path, lineage: Lineage) -> None:
        self._write(folder, lineage, dict(lora.weights(self.model)))

    def copied(self, world: World) -> tuple[Write, int]:
        weights = {name: one.detach().to("cpu", copy=True) for name, one in lora.weights(self.model).items()}
        size = sum(one.numel() * one.element_size() for one in weights.values())
        return lambda folder, lineage: self._write(folder, lineage, weights), size

    def fill(self, folder: Path, lineage: Lineage) -> None:
        hf.fill_adapters(self.model, folder, lineage)

    def _write(self, folder: Path, lineage: Lineage, weights: lora.Weights) -> None:
        hf.save_adapters(folder, weights, self.model, self.renderer, lineage, self.settings, self.base)


Kept = FullModelSaver | AdapterSaver


def environment(config: Training, device: Device, world: World, optimizers: Optimizers) -> dict[str, Any]:
    """Everything that bit-exactness depends on and that a recipe's fingerprint does not hold."""
    return {
        "ranks": world.size,
        "threads": devices.threads(),
        "shard": config.shard if world.size > 1 else "none",
        "micro_batch_tokens": config.micro_batch_tokens,
        "compile": config.compile,
        "recompute": config.recompute,
        "precision": str(device.compute_dtype).removeprefix("torch."),
        "optimizer": [
            f"{type(part).__name__}{' fused' if part.defaults.get('fused') else ''}" for part in optimizers.parts
        ],
        "device": device.name,
        "kernels": kernel_selection.state(device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        **{f"library {name}": native.identity(name) for name in LIBRARIES},
        "products": cpu.UNITS[cpu.units()],
        "torch": torch.__version__,
        "bloomery": metadata.version("bloomery"),
        "numpy": metadata.version("numpy"),
        "set": {name: os.environ[name] for name in KERNEL_SETTINGS if name in os.environ},
    }


LIBRARIES = (cpu.LIBRARY, cpu.NORMS, cpu.MATMUL_LIBRARY, fused_adamw.LIBRARY)
"""Compiled ones that compute in a step."""
KERNEL_SETTINGS = (
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Variables by which libraries choose among kernels."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was, each as `name was X and is Y`. Nothing where nothing was written down."""
    names = [name for name in now if before and before.get(name) != now[name]]
    return [f"{name} was {before.get(name)} and is {now[name]}" for name in names]


def tell(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say what a resumed run finds changed. A run that changes it on purpose may well go on."""
    for difference in differences(before, now):
        info(f"  {difference}: what follows may differ in the last bits from an undisturbed run", style="yellow")


@dataclass
class Checkpoints:
    """The checkpoints of a run, in `root`. Each rank has one; what one of them calls, all call."""

    name: str
    root: Path
    model: Transformer
    kept: Kept
    optimizers: Optimizers
    lineage: Lineage
    environment: dict[str, Any]
    goals: Callable[[int], bool]
    """Of which steps there is a checkpoint whatever a clock says, so that a run may go back to it."""
    others_begin: Callable[[int, int], bool]
    """Whether data of another kind, which have another loss, begin among these samples of the run."""
    saver: Saver
    world: World
    _saved: tuple[float, int] = (0.0, -1)
    """When, and of which step, the newest one was begun."""
    _whole: tuple[float, int] = (0.0, -1)
    """The same of the newest that is known to be whole."""
    _passed_over: frozenset[int] = frozenset()
    """Steps of those that `resume` found damaged, until the first save."""

    def resume(self) -> State:
        """Take up the newest whole one. Without any, the state is that of before the first step, and saved."""
        found = self._newest(None)
        if found is None:
            self._saved = self._whole = (time.monotonic(), -1)
            self.save(State())
            return State()
        self._take_up(found)
        info(f"  {self.name} goes on from step {found.state['step']} ({found.folder.name})")
        tell(found.environment, self.environment)
        self._saved = self._whole = (time.monotonic(), found.state["step"])
        self._passed_over = frozenset(int(one.name) for one in checkpoint.folders(self.root) if one > found.folder)
        return State.restored(found.state)

    def _take_up(self, found: Checkpoint) -> None:
        self.kept.fill(found.folder, self.lineage)
        self.optimizers.restore(found.training)

    def _place(self, name: str, shape: torch.Size, kind: torch.dtype) -> Tensor:
        """Room for what an optimizer remembers: of a weight that is spread over ranks, for this rank's part."""
        weights = dict(self.model.named_parameters())
        weight = weights[name.rpartition("/")[0]]
        if isinstance(weight, DTensor) and weight.shape == shape:
            return torch.zeros_like(weight, dtype=kind)
        return torch.empty(shape, dtype=kind)

    def roll_back(self, state: State) -> int:
        """
        Give weights, optimizers and the guard's window back what they held at the newest good checkpoint; where data of
        another kind have come since, the window begins anew. Returns its step.

        That a checkpoint is good is only known when the step after it was accepted, so the one right before the bad
        steps is used only if there is no other; and one of another step than `goals`, or one that the run has gone back
        behind, only if there is none of these.
        Raises RunError where there is none, where no update was made since the run went back the last time, and where
        it has gone back too often: see progress.py.
        """
        bad, accepted = state.guard.in_a_row, state.step - state.guard.in_a_row
        after, last = state.guard.rollbacks[-1] if state.guard.rollbacks else (-1, 0)
        what, where = f"{bad} steps in a row were skipped; metrics.jsonl names their samples", f"step {state.step}"
        hint = (
            f"Where the samples are bad, the same command with max_skips={2 * bad} goes on behind them; where only the "
            "threshold is too low, with a larger skip_sigma. A lower learning rate or precision=float32 makes another "
            "run, from the start."
        )
        if accepted <= after:
            what = f"{what}. The run has already gone back to step {last} after step {after}, and it did not help"
            raise RunError(what, where=where, hint=hint)
        self.wait()
        left = state.guard.left
        goal = self._newest(accepted, goals=True, left=left) or self._newest(accepted + 1, goals=True, left=left)
        found = goal or self._newest(accepted) or self._newest(None)
        if found is None:
            raise RunError(f"{what}. There is no checkpoint to go back to", where=where, hint=hint)
        self._take_up(found)
        past = State.restored(found.state)
        if self.others_begin(past.samples, state.samples):
            forget(past.guard)
        past.guard.skipped, past.guard.in_a_row = state.guard.skipped, 0
        past.guard.rollbacks = [*state.guard.rollbacks, [state.step, past.step]]
        progress.check_rollbacks(self.name, state.step, past.guard)
        state.tokens, state.guard = past.tokens, past.guard
        return past.step

    def _newest(self, before: int | None, *, goals: bool = False, left: Sequence[range] = ()) -> Checkpoint | None:
        return checkpoint.newest(self.root, before, goals=goals, left=left, world=self.world, place=self._place)

    def late(self, seconds: float) -> bool:
        """Whether the newest one is older than that."""
        return time.monotonic() - self._saved[0] >= seconds

    def wait(self, before: Callable[[], None] | None = None) -> None:
        """
        Return when nothing is being written. Raises RunError where a save has failed: its step is not safe then. What
        comes `before` may fail as well; where ranks hold parts of the weights, all of them raise what one has to.
        """
        try:
            with self._company.alike():
                if before is not None:
                    before()
                self.saver.wait()
        except Exception:
            self._saved = self._whole
            raise
        self._whole = self._saved

    @property
    def _company(self) -> World:
        """The ranks that save together."""
        return self.world if fsdp.is_sharded(self.model) else World.alone()

    def save(self, state: State, before: Callable[[], None] | None = None) -> None:
        """
        Begin to make the state safe, or wait until it is if that was begun before. Weights that are not finite are not
        worth it. Raises RunError for what went wrong with the save before, and for what has to be done `before`.
        """
        sharded = fsdp.is_sharded(self.model)
        if not (self.world.is_first or sharded):
            return
        self.wait(before)
        if self._saved[1] == state.step:
            return
        if not fsdp.is_finite(self.model, self.world):
            info(f"step {state.step} is not saved: its weights are not finite", style="yellow")
            return
        if sharded:
            self._saved = (time.monotonic(), state.step)  # also if it fails: all ranks have to think the same
        (write, size), lineage = self.kept.copied(self.world), self.lineage_of(state)
        doubtful, passed_over = state.guard.in_a_row > 0, self._passed_over
        good = self.goals(state.step) and not doubtful
        self.saver.start(
            state.step,
            lambda folder: write(folder, lineage),
            self.optimizers.state(),
            asdict(state),
            environment=self.environment,
            model_bytes=size,
            standing=RollbackInfo(goal=good, doubtful=doubtful, left=state.guard.left, passed_over=passed_over),
        )
        self._saved, self._passed_over = (time.monotonic(), state.step), frozenset()

    def rescue(self, state: State, before: Callable[[], None]) -> None:
        """
        Save the newest step when another rank is gone: no other will save it. Ranks lose each other before an update
        or after the hooks, so that the weights are those of `state.step`; after skipped steps older ones are better.
        Parts of weights that are gone cannot be saved.
        """
        if self.world.is_first and not state.guard.in_a_row and not fsdp.is_sharded(self.model):
            self.save(state, before)
            self.wait()

    def lineage_of(self, state: State) -> Lineage:
        return replace(self.lineage, step=state.step)

    def leave_model(self, folder: Path, state: State) -> None:
        """Leave the model as it is, for others to read."""
        write = self.kept.copied(self.world)[0] if fsdp.is_sharded(self.model) else self.kept.write
        if self.world.is_first:
            write(folder, self.lineage_of(state))

    def check_finite(self, state: State) -> None:
        """Raises RunError where the last updates have hurt the weights."""
        if not fsdp.is_finite(self.model, self.world):
            raise RunError(
                "the last updates left weights that are not finite",
                where=f"step {state.step}",
                hint=f"The good ones are in {self.root}. Lower the learning rate, or train in float32.",
            )


SETTINGS, CONTINUED = "settings.json", "continued.json"
FREE = ("steps", "schedule", "device", "depth", "tokens_per_parameter", "start_from")
"""What may differ: shares of the learning rate are compared step by step, what training starts from by its content."""


def remember(config: Training, out: Path) -> None:
    """Leave in a stage's folder with which settings it trains, so that a longer run can be compared with it."""
    out.mkdir(parents=True, exist_ok=True)
    core_io.write_json(out / SETTINGS, plain(config, stable_only=True))
    if not _trained(out):
        (out / CONTINUED).unlink(missing_ok=True)  # of an attempt that died before it had brought a checkpoint


def bring(given: Path, config: Training, out: Path, lineage: Lineage, *, samples_alike: Callable[[int], float]) -> None:
    """
    Bring the newest checkpoint of another run of this stage to `out` that this run would come by as well, if `out` has
    none yet. `samples_alike` says for a number of steps how many samples come before their order depends on it.

    Raises CheckpointError where there is none, or the other run differs in something else.
    """
    own = checkpoint.newest_folder(out / "checkpoints")
    if own is not None and int(own.name):
        return
    folder = _stage_folder(given, out)
    before = _settings(folder)
    if differing := _differences(before, plain(config, stable_only=True)):
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        what = f"was trained with other settings: {'; '.join(differing[:3])}{more}"
        raise CheckpointError(what, where=str(folder), hint="Say the same, or leave out continue_from.")
    last = common_steps(config, before)
    found = checkpoint.newest_folder(folder / "checkpoints", before=last + 1)
    while found is not None and _samples(found) > min(map(samples_alike, (config.steps, before["steps"]))):
        found = checkpoint.newest_folder(folder / "checkpoints", before=int(found.name))
    if found is None or not int(found.name):
        there = ", ".join(map(str, _trained(folder))) or "none"
        what = f"has the same learning rates until step {last}, and no checkpoint of that part (only: {there})"
        hint = "A run keeps that of the end of its level part, and keep_every_steps. Or leave out continue_from."
        raise CheckpointError(what, where=str(folder), hint=hint)
    _same_origin(found, lineage)
    _copy(found, folder, out)


def common_steps(config: Training, before: Mapping[str, Any]) -> int:
    """After how many steps two runs still have had the same learning rates."""
    other = build(Training, {name: value for name, value in before.items() if name in Training.model_fields})
    pairs = range(1, min(config.steps, other.steps) + 1)
    same = (
        learning_rate_share(config.schedule, t, config.steps) == learning_rate_share(other.schedule, t, other.steps)
        for t in pairs
    )
    return next((t - 1 for t, alike in zip(pairs, same, strict=True) if not alike), len(pairs))


def told(out: Path) -> dict[str, Any] | None:
    """Where the first steps of a run come from, if from another run."""
    return read_record(out / CONTINUED, dict[str, Any]) if (out / CONTINUED).exists() else None


def _trained(folder: Path) -> list[int]:
    """The steps of a stage's checkpoints but for the start, of which a run has one before it has done anything."""
    return [step for one in checkpoint.folders(folder / "checkpoints") if (step := int(one.name))]


def _stage_folder(given: Path, out: Path) -> Path:
    """The folder of a stage, or that of the only stage of this name in a run that has checkpoints."""
    if (given / "checkpoints").is_dir():
        return given
    name = out.name.split("-")[1] if out.name.count("-") >= 2 else out.name
    there = [one for one in sorted(given.glob(f"[0-9][0-9]-{name}-*")) if (one / "checkpoints").is_dir() and one != out]
    if len(there) == 1:
        return there[0]
    names = ", ".join(one.name for one in there) or "none"
    what = f"has {len(there)} folders of the stage {name} with checkpoints ({names})"
    raise CheckpointError(what, where=str(given), hint="Let continue_from name one folder of that stage.")


def _settings(folder: Path) -> dict[str, Any]:
    if (folder / SETTINGS).exists():
        return read_record(folder / SETTINGS, dict[str, Any], error=CheckpointError)
    if (folder / MANIFEST).exists():
        return read_manifest(folder)["config"]
    what = f"says nowhere with which settings it trains: it has neither {SETTINGS} nor {MANIFEST}"
    raise CheckpointError(what, where=str(folder), hint="Leave out continue_from, and train from the start.")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What both know and is not the same, each as `name was X and is Y`."""
    known, wanted = (dict(_flat({n: v for n, v in one.items() if n not in FREE})) for one in (before, now))
    pairs = [(name, known[name], value) for name, value in wanted.items() if name in known]
    return [f"{name} was {was!r} and is {value!r}" for name, was, value in pairs if was != value]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _samples(found: Path) -> int:
    return checkpoint.read_state(found)["samples"]


def _same_origin(found: Path, lineage: Lineage) -> None:
    made, wanted = (asdict(replace(one, step=0)) for one in (hf.lineage_of(found), lineage))
    for name in made:
        if made[name] != wanted[name]:
            was, is_now = (one[name][:8] if one[name] else "none" for one in (made, wanted))
            hint = "Go on from a run on the same data, or leave out continue_from."
            raise CheckpointError(f"was made with {name} {was}, and this run has {is_now}", where=str(found), hint=hint)


def _copy(found: Path, folder: Path, out: Path) -> None:
    root = out / "checkpoints"
    partial = root / (found.name + core_io.PARTIAL)
    with core_io.disk_errors(partial):
        root.mkdir(parents=True, exist_ok=True)
        checkpoint.check_space(partial, sum(file.stat().st_size for file in found.rglob("*") if file.is_file()))
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(found, partial)
        for name in (METRICS, MAIN_LOG, SAMPLES):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)
        facts = {"from": str(folder), "step": int(found.name), "manifest": core_io.sha256_file(found / MANIFEST)}
        core_io.write_json(out / CONTINUED, facts)
        core_io.sync_folder(partial)
        partial.rename(root / found.name)
    info(f"  the first {int(found.name)} steps are those of {folder}")
