"""
Save, resume and roll back training runs, and track what bit-exact resuming depends on.

A save starts and continues in a thread. Weights that are not finite are never saved. A run resumes from the newest
checkpoint, whenever that was saved. It rolls back only to checkpoints of steps that are saved independently of the
clock, the start among them. Otherwise weights would depend on how fast the machine was.

What a save holds of the model is up to a `ModelSaver`: all weights, or the adapters alone.

A run with more steps can extend a shorter run instead of repeating its first steps. It ends as if it had run from
the start. The sequence of samples does not depend on the number of steps. Until its decay begins, neither does the
learning rate of a schedule of the kinds constant and wsd. So a checkpoint of the shorter run that lies in the part
common to both belongs to the longer run too. It is copied with the metrics logged until then, and `continued.json` says
where it came from. Any other difference than the number of steps and the decay is refused by name.

The last bits of a training run depend on more than recipe and data. This is recorded, and compared on resume. The
order in which numbers are added differs with the number of threads where kernels are compiled. It differs between
fused and plain optimizers, and between versions, CPUs and compiled libraries. It also differs with the number of
ranks. If all of this is unchanged, a resumed run ends with the same bits as a run that was never stopped. Otherwise
the difference is one of rounding.
"""

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import io as core_io
from bloomery.core import native
from bloomery.core.config import build, plain
from bloomery.core.errors import CheckpointError, RunError
from bloomery.core.io import MANIFEST
from bloomery.core.log import METRICS, info
from bloomery.core.records import read_manifest, read_record
from bloomery.hw import copies, kernel_selection
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.model.config import Lora
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer, on_meta
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import collectives, fsdp, progress
from bloomery.train.config import Training
from bloomery.train.metrics import MAIN_LOG
from bloomery.train.optim import Optimizers, learning_rate_share
from bloomery.train.state import State, forget
from bloomery.train.validation import SAMPLES
from bloomery.weights import checkpoint, hf, peft
from bloomery.weights.checkpoint import Checkpoint, RollbackInfo, Saver
from bloomery.weights.hf import BaseModel, Lineage, ModelLanguage

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Write = Callable[[Path, int], None]
"""Leaves a model in a folder, as that of a step."""


@runtime_checkable
class ModelSaver(Protocol):
    """What of a model is saved, and how it is taken up again."""

    of_adapters: ClassVar[bool]
    """Whether the rest of the model never changes, and lies elsewhere."""

    def write(self, folder: Path, step: int) -> None:
        """Leave it in a folder, as it is now."""
        ...

    def copied(self, world: World) -> tuple[Write, int]:
        """What writes a copy that training does not change, and its bytes. All ranks call it; the first writes."""
        ...

    def fill(self, folder: Path, world: World) -> None:
        """
        Take it up from a folder. All ranks call it; of a sharded model only the first reads. Raises CheckpointError
        where the folder was made from something else.
        """
        ...


def environment(config: Training, device: Device, world: World, optimizers: Optimizers) -> dict[str, Any]:
    """Everything that bit-exactness depends on and that a recipe's fingerprint does not hold."""
    mesh = config.mesh and config.mesh.sizes | ({"zero_stage": 1} if config.mesh.zero_stage == 1 else {})
    on_host = " on the host" if config.offload == "host" and device.is_gpu else ""
    return {
        "ranks": world.size,
        "threads": devices.threads(),
        "parallelism": "none" if world.size == 1 else config.parallelism if mesh is None else mesh,
        "micro_batch_tokens": config.micro_batch_tokens,
        "compile": config.compile,
        "activation_checkpointing": config.activation_checkpointing,
        "precision": str(device.compute_dtype).removeprefix("torch."),
        "optimizer": [
            f"{type(optimizer).__name__}{' fused' if optimizer.defaults.get('fused') else ''}{on_host}"
            for optimizer in optimizers.parts
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


LIBRARIES = (cpu.LIBRARY, cpu.NORMS, cpu.MATMUL_LIBRARY, collectives.LIBRARY)
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
    """Log what changed since the checkpoint was saved. Changes do not stop the run: some are made on purpose."""
    for difference in differences(before, now):
        info(f"  {difference}: results may differ in the last bits from an uninterrupted run", style="yellow")


COST_TIMES = 50.0
"""Between saves that a clock begins, so that they take at most 2 % of the time."""


@dataclass
class Checkpoints:
    """The checkpoints of a run, in `root`. Each rank has one; what one of them calls, all call."""

    name: str
    root: Path
    model: Transformer
    model_saver: ModelSaver
    optimizers: Optimizers
    environment: dict[str, Any]
    goals: Callable[[int], bool]
    """Of which steps there is a checkpoint whatever a clock says, so that a run may go back to it."""
    others_begin: Callable[[int, int], bool]
    """Whether data of another kind, which have another loss, begin among these samples of the run."""
    saver: Saver
    world: World
    removes: bool = True
    """Whether a save removes older ones that need not stay."""
    _saved: tuple[float, int] = (0.0, -1)
    """When, and of which step, the newest one was begun."""
    _whole: tuple[float, int] = (0.0, -1)
    """The same of the newest that is known to be whole."""
    _cost: float = 0.0
    """Seconds that training on a GPU waited for the last save to begin."""
    _passed_over: frozenset[int] = frozenset()
    """Steps of those that `resume` found damaged, until the first save."""

    def resume(self) -> State:
        """Take up the newest whole one. Without any, the state is that of before the first step, and saved."""
        saved = self._newest(None)
        if saved is None:
            self._saved = self._whole = (time.monotonic(), -1)
            self.save(State())
            return State()
        self._take_up(saved)
        info(f"  {self.name} resumes from step {saved.state['step']} ({saved.folder.name})")
        tell(saved.environment, self.environment)
        self._saved = self._whole = (time.monotonic(), saved.state["step"])
        self._passed_over = frozenset(int(one.name) for one in checkpoint.folders(self.root) if one > saved.folder)
        return State.restored(saved.state)

    def _take_up(self, saved: Checkpoint) -> None:
        self.model_saver.fill(saved.folder, self.world)
        self.optimizers.restore(saved.training, take_over=True)

    def _place(self, name: str, shape: torch.Size, kind: torch.dtype) -> Tensor:
        """Room for what an optimizer remembers: of a weight that is spread over ranks, for this rank's part."""
        owner, _, _ = name.rpartition("/")
        weight = dict(self.model.named_parameters())[owner]
        if isinstance(weight, DTensor) and weight.shape == shape:
            if self.optimizers.is_recoded(owner):  # in 8 bits it takes less room there
                return checkpoint.as_part(torch.zeros(weight.to_local().shape, dtype=kind), weight)
            return torch.zeros_like(weight, dtype=kind)
        return torch.empty(shape, dtype=kind)

    def roll_back(self, state: State) -> int:
        """
        Restore weights, optimizers and the guard's window from the newest good checkpoint, and return its step. The
        window starts empty if the run has reached data of another kind since.

        A checkpoint is known to be good once the step after it was accepted. The checkpoint right before the bad steps
        is therefore used only if there is no other. Last choices are checkpoints of steps that are not in `goals`, and
        checkpoints that the run has already gone back behind.
        Raises RunError if there is no checkpoint, if no update was made since the last rollback, and after too many
        rollbacks: see progress.py.
        """
        bad, accepted = state.guard.in_a_row, state.step - state.guard.in_a_row
        after, last = state.guard.rollbacks[-1] if state.guard.rollbacks else (-1, 0)
        what, where = f"{bad} steps in a row were skipped; metrics.jsonl names their samples", f"step {state.step}"
        hint = (
            f"If the samples are bad, the same command with {self.name}.max_skipped_steps={2 * bad} resumes after "
            f"them. If the threshold is too low, set a larger {self.name}.spike_sigma. A lower learning rate or "
            f"{self.name}.precision=float32 starts another run from the beginning."
        )
        if accepted <= after:
            what = f"{what}. The run has already rolled back to step {last} after step {after}, and it did not help"
            raise RunError(what, where=where, hint=hint)
        self.wait()
        left = state.guard.left
        goal = self._newest(accepted, goals=True, left=left) or self._newest(accepted + 1, goals=True, left=left)
        saved = goal or self._newest(accepted) or self._newest(None)
        if saved is None:
            raise RunError(f"{what}. There is no checkpoint to roll back to", where=where, hint=hint)
        self._take_up(saved)
        past = State.restored(saved.state)
        if self.others_begin(past.samples, state.samples):
            forget(past.guard)
        past.guard.skipped, past.guard.in_a_row = state.guard.skipped, 0
        past.guard.rollbacks = [*state.guard.rollbacks, [state.step, past.step]]
        progress.check_rollbacks(self.name, state.step, past.guard)
        state.tokens, state.guard = past.tokens, past.guard
        return past.step

    def _newest(self, before: int | None, *, goals: bool = False, left: Sequence[range] = ()) -> Checkpoint | None:
        return checkpoint.newest(self.root, before, goals=goals, left=left, world=self.world, alloc=self._place)

    def late(self, seconds: float) -> bool:
        """Whether the newest one is older than that; on a GPU, also than COST_TIMES what a save takes of training."""
        return time.monotonic() - self._saved[0] >= max(seconds, COST_TIMES * self._cost)

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
        return self.world if collectives.is_sharded(self.model) else World.alone()

    def save(self, state: State, before: Callable[[], None] | None = None) -> None:
        """
        Begin to make the state safe, or wait until it is if that was begun before. Weights that are not finite are not
        worth it. Raises RunError for what went wrong with the save before, and for what has to be done `before`.
        """
        sharded, began = collectives.is_sharded(self.model), time.monotonic()
        if not (self.world.is_first or sharded):
            return
        self.wait(before)
        if self._saved[1] == state.step:
            return
        if not collectives.is_finite(self.model, self.world):
            info(f"step {state.step} is not saved: its weights are not finite", style="yellow")
            return
        if sharded:
            self._saved = (time.monotonic(), state.step)  # also if it fails: all ranks have to think the same
        (write, size), step = self.model_saver.copied(self.world), state.step
        doubtful, passed_over = state.guard.in_a_row > 0, self._passed_over
        good = self.goals(state.step) and not doubtful
        with self._company.alike():  # moments in 8 bits are decoded, for which memory may be too small
            training = self.optimizers.state(checkpoint.as_part)
        self.saver.start(
            state.step,
            lambda folder: write(folder, step),
            training,
            asdict(state),
            environment=self.environment,
            model_bytes=size,
            standing=RollbackInfo(
                goal=good, doubtful=doubtful, removes=self.removes, left=state.guard.left, passed_over=passed_over
            ),
        )
        self._saved, self._passed_over = (time.monotonic(), state.step), frozenset()
        if collectives.computed_on(next(self.model.parameters())).type != "cpu":
            self._cost = time.monotonic() - began

    def rescue(self, state: State, before: Callable[[], None]) -> None:
        """
        Save the newest step when another rank is gone: no other will save it. Ranks lose each other before an update
        or after the hooks, so that the weights are those of `state.step`; after skipped steps older ones are better.
        Parts of weights that are gone cannot be saved. A rank that is not the first removes no older checkpoint,
        because it does not know which have the best weights.
        """
        if state.guard.in_a_row or collectives.is_sharded(self.model):
            return
        if self.world.is_first:
            self.save(state, before)
            self.wait()
        elif all(int(one.name) < state.step or checkpoint.damage(one) for one in checkpoint.folders(self.root)):
            with Saver(self.root, self.saver.keep) as saver:
                replace(self, world=World.alone(), saver=saver, removes=False).save(state, before)

    def take_weights(self, step: int) -> None:
        """Take up the weights of an earlier step, to be left. Raises CheckpointError where they are gone or damaged."""
        folder = self.root / f"{step:09d}"
        with self.world.alike():
            if self.world.is_first and (trouble := checkpoint.damage(folder)):
                what = f"the weights of step {step} had the lowest validation loss, and cannot be read: {trouble}"
                hint = 'Keep the last weights instead: finetune.keep="last".'
                raise CheckpointError(what, where=str(folder), hint=hint)
        if not collectives.is_sharded(self.model):  # of a sharded one, only the first rank reads weights
            copies.bring(self.world, folder, lambda name: "/" not in name)
        self.model_saver.fill(folder, self.world)

    def leave_model(self, folder: Path, step: int) -> None:
        """Leave the model as it is, as that of a step, for others to read."""
        write = self.model_saver.copied(self.world)[0] if collectives.is_sharded(self.model) else self.model_saver.write
        if self.world.is_first:
            write(folder, step)

    def check_finite(self, state: State) -> None:
        """Raises RunError where the last updates have hurt the weights."""
        if not collectives.is_finite(self.model, self.world):
            raise RunError(
                "the weights are not finite after the last updates",
                where=f"step {state.step}",
                hint=f"Earlier checkpoints are in {self.root}. Lower the learning rate, or train in float32.",
            )


CONTINUED = "continued.json"


def continued_from(out: Path) -> dict[str, Any] | None:
    """Where the first steps of a run come from, if from another run."""
    return read_record(out / CONTINUED, dict[str, Any]) if (out / CONTINUED).exists() else None


@dataclass
class FullModelSaver:
    """Every weight."""

    model: Transformer
    language: ModelLanguage | Renderer
    lineage: Lineage
    of_adapters: ClassVar[bool] = False

    def write(self, folder: Path, step: int) -> None:
        hf.save(folder, self.model, self.language, replace(self.lineage, step=step), number_format=None)

    def copied(self, world: World) -> tuple[Write, int]:
        twin = fsdp.copy_of(self.model, world)
        return FullModelSaver(twin, self.language, self.lineage).write, fsdp.weight_bytes(twin)

    def fill(self, folder: Path, world: World) -> None:
        if not collectives.is_sharded(self.model):
            hf.fill(self.model, folder, self.lineage)
            return
        full_weights: dict[str, Tensor] | None = None
        with world.alike():
            if world.is_first:
                twin = on_meta(self.model.config, self.model.vocab_size).to_empty(device="cpu")
                if self.model.config.tie_embeddings:
                    twin.head.weight = twin.embed.weight
                hf.fill(twin, folder, self.lineage)
                full_weights = dict(twin.named_parameters())
        fsdp.take(self.model, full_weights)


@dataclass
class AdapterSaver:
    """Saves the adapters alone. Their frozen base stays where it is."""

    model: Transformer
    language: ModelLanguage | Renderer
    settings: Lora
    base: BaseModel
    lineage: Lineage
    of_adapters: ClassVar[bool] = True
    _lengths: dict[str, Tensor] = field(default_factory=dict)
    """Of rows of frozen matrices of a sharded model that transformers has in one tensor with adapted ones of DoRA."""

    def write(self, folder: Path, step: int) -> None:
        self._write(folder, step, dict(lora.weights(self.model)))

    def copied(self, world: World) -> tuple[Write, int]:
        weights = {name: collectives.whole(one).to("cpu", copy=True) for name, one in lora.weights(self.model).items()}
        if self.settings.dora and collectives.is_sharded(self.model) and not self._lengths:
            twin = self._twin()
            for path in peft.unadapted_parts(weights, twin, self.base.kind):
                lengths = fsdp.row_lengths(self.model.get_submodule(path), twin.get_submodule(path))
                self._lengths[f"{path}.magnitude"] = lengths.cpu()
        weights |= self._lengths
        size = sum(one.numel() * one.element_size() for one in weights.values())
        return lambda folder, step: self._write(folder, step, weights), size

    def fill(self, folder: Path, world: World) -> None:
        if not collectives.is_sharded(self.model):
            hf.fill_adapters(self.model, folder, self.lineage)
            return
        names, twin = lora.weights(self.model).keys(), self._twin()
        with world.alike():
            if world.is_first:
                hf.fill_adapters(twin, folder, self.lineage)
        fsdp.take(self.model, lora.weights(twin) if world.is_first else None, names)

    def _twin(self) -> Transformer:
        """A model of the same names and whole shapes, whose adapters alone have numbers."""
        twin = on_meta(self.model.config, self.model.vocab_size)
        lora.attach(twin, self.settings, 0)
        return twin

    def _write(self, folder: Path, step: int, weights: lora.Weights) -> None:
        lineage = replace(self.lineage, step=step)
        model = self._twin() if collectives.is_sharded(self.model) else self.model
        hf.save_adapters(folder, weights, model, self.language, lineage, self.settings, self.base)


SETTINGS = "settings.json"
FREE = ("steps", "schedule", "device", "depth", "tokens_per_parameter", "start_from")
"""What may differ: shares of the learning rate are compared step by step, what training starts from by its content."""


def remember_settings(config: Training, out: Path) -> None:
    """Leave in a stage's folder with which settings it trains, so that a longer run can be compared with it."""
    out.mkdir(parents=True, exist_ok=True)
    core_io.write_json(out / SETTINGS, plain(config, stable_only=True))
    if not _trained(out):
        (out / CONTINUED).unlink(missing_ok=True)  # of an attempt that died before it had brought a checkpoint


def bring_checkpoint(
    path: Path, config: Training, out: Path, lineage: Lineage, *, samples_alike: Callable[[int], float]
) -> None:
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
    if differing := _setting_changes(before, plain(config, stable_only=True)):
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


def _setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
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
