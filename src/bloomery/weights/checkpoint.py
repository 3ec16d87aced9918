"""
Write, verify and find checkpoints: complete or absent, and checked before use.

    checkpoints/000001000/    a model as `weights/hf.py` writes it, and next to it
        training/             the optimizer state, in one or more parts
        state.json            step, samples, tokens, and the metrics of the last step
        environment.json      what bit-exactness depends on, as it was
        manifest.json         the step, whether a run may go back to it, and size and sha256 of every other file; last

All files go to 000001000.partial and are flushed. The folder takes its name by one rename. The newest checkpoint
that matches its manifest is used. A checkpoint that does not match is skipped and reported. If none matches,
nothing starts from the beginning: that would remove data that may be repaired.

Optimizer state: files of torch.distributed.checkpoint, kept in safetensors. The format that
torch.distributed.checkpoint writes by itself holds a pickle (.metadata), and no pickle is read here. Its storage
for safetensors keeps the same facts as JSON in the header of each file: which part of which tensor it holds. So any
number of ranks can read what a different number of ranks wrote in parts.

The optimizer state is in this file because it is part of a checkpoint and never stands alone.
"""

import errno
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from safetensors import SafetensorError
from typing_extensions import TypedDict

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import io as core_io
from bloomery.core.errors import CheckpointError, RunError, shorten
from bloomery.core.io import MANIFEST
from bloomery.core.log import info
from bloomery.core.records import Count, ListedFile, NameInside, read_record
from bloomery.hw import copies
from bloomery.hw import device as devices
from bloomery.hw.distributed import RankLostError, World
from bloomery.weights.safetensors import STEP_FOLDER, check_header

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

FILE_BYTES = 256 * 2**20
"""Of one file at most, if no tensor is larger: a file is put together in memory before it is written."""

DECODED = "_decoded"
"""Ends the names of moments in 8 bits that were decoded: see AdamW8bitOptimizer in train/optim.py."""
UNREADABLE = (OSError, SafetensorError, CheckpointException, ValueError, KeyError, TypeError, RuntimeError)
"""What torch.distributed.checkpoint raises for files that are not of its kind, and torch where memory is too small."""
TensorPlacement = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Of the name, whole shape and number format of a tensor: where it, or this rank's part of it, is to be read to."""


def copy_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """
    A copy of the tensors in CPU memory, so that training can continue; of a sharded tensor, this rank's part. Moments
    that were decoded for it are copies already.
    """
    names = [name for name in tensors if not name.endswith(DECODED)]
    own = (one.to_local() if isinstance(one, DTensor) else one for one in (tensors[name] for name in names))
    copies = dict(zip(names, devices.copied_to_host(own), strict=True))
    return {name: as_part(copies[name], one) if name in copies else one for name, one in tensors.items()}


def as_part(copy: Tensor, tensor: Tensor) -> Tensor:
    """What is in CPU memory for this rank's part of a tensor, as a part of a whole one."""
    if not isinstance(tensor, DTensor):
        return copy
    mesh = tensor.device_mesh
    if mesh.device_type != "cpu":  # nothing is sent over it: it says which part this is
        mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    return DTensor.from_local(copy, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def size_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of tensors; of sharded ones, all parts together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether ranks hold parts of them, and so all of them have to write."""
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def write(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """
    Write tensors from CPU memory as files below a folder, and flush them. Every rank of `world` writes its parts.
    Raises RunError, which names the rank, on all ranks if a disk is full for any rank.
    """
    _quiet()
    with world.alike(), _disk_of(world.rank, folder, world):
        folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(sorted(tensors.items()))  # so that equal states are equal files
    index, filled = {}, 0
    for name, tensor in tensors.items():
        index[name] = filled // FILE_BYTES + 1
        filled += tensor.numel() * tensor.element_size()
    numbers = {number: place for place, number in enumerate(sorted(set(index.values())), 1)}
    index = {name: numbers[number] for name, number in index.items()}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=index or None, save_distributed=True)
    try:
        state_dict_saver.save(tensors, storage_writer=writer, process_group=world.group, no_dist=world.size == 1)
    except CheckpointException as error:
        for rank, (cause, _) in error.failures.items():
            if isinstance(cause, OSError):
                with _disk_of(rank, folder, world):
                    raise cause from error
        raise
    core_io.sync_folder(folder)


def read(folder: Path, alloc: TensorPlacement | None = None) -> dict[str, Tensor]:
    """
    The tensors that `write` left, whole, or in the parts that `alloc` makes room for. Raises CheckpointError for files
    that it has not written, or whose tensors `alloc` has no room for.
    """
    _quiet()
    room: dict[str, Tensor] = {}
    try:
        for name, facts in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
            if not isinstance(facts, TensorStorageMetadata):
                raise TypeError(f"{name} is not a tensor")
            kind = facts.properties.dtype
            room[name] = torch.empty(facts.size, dtype=kind) if alloc is None else alloc(name, facts.size, kind)
        if room:
            load(room, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except UNREADABLE as error:
        what = f"cannot be read: {type(error).__name__}: {shorten(str(error))}"
        hint = f"Remove {folder.parent}. The same command then resumes from the checkpoint before it."
        raise CheckpointError(what, where=str(folder), hint=hint) from None
    return room


def _quiet() -> None:
    """torch.distributed.checkpoint warns whenever one process saves alone, as is meant here, and logs every tensor."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)


_quiet()  # before another thread opens a `catch_warnings`, whose end undoes log settings made meanwhile


TRAINING, STATE, ENVIRONMENT = "training", "state.json", "environment.json"
OLD_TRAINING = "training.safetensors"
"""Of checkpoints before training state could be sharded. They are still read."""


StepNumber = Annotated[int, Field(ge=0, lt=10 ** len("000001000"))]
"""As many as a folder's name can say."""
NOTHING_ELSE = ConfigDict(extra="forbid")
"""For files that a run resumes from: this version refuses keys that it does not know."""
StateNumber = Annotated[float, Field(allow_inf_nan=False)]


@with_config(NOTHING_ELSE)
class SavedGuard(TypedDict, total=False):
    """What the guard of a run remembers: train/state.py."""

    losses: list[StateNumber]
    norms: list[StateNumber]
    in_a_row: Count
    skipped: Count
    rollbacks: list[Annotated[list[StepNumber], Field(min_length=2, max_length=2)]]


@with_config(NOTHING_ELSE)
class SavedState(TypedDict):
    """What STATE holds: train/state.py. Older checkpoints lack some of it."""

    step: StepNumber
    samples: Count
    tokens: NotRequired[Count]
    metrics: NotRequired[dict[str, StateNumber | Literal["nan", "inf", "-inf"]]]
    guard: NotRequired[SavedGuard]
    precision: NotRequired[dict[str, StateNumber]]
    rows: NotRequired[Count]
    first_loss: NotRequired[StateNumber | None]
    logged: NotRequired[StepNumber]


class CheckpointManifest(TypedDict):
    """What MANIFEST holds of a checkpoint. Older ones do not say whether a run may go back to them."""

    step: StepNumber
    goal: NotRequired[bool]
    outputs: dict[NameInside, ListedFile]


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: SavedState
    training: dict[str, Tensor]
    environment: dict[str, Any] = field(default_factory=dict)
    """What bit-exactness depended on when it was saved. Empty where nobody had written it down."""


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """
    Which checkpoints stay: the newest `last`, those of steps that `every` divides, and those of some `steps`. Also the
    newest checkpoint before the last that a run may go back to.
    """

    last: int
    every: int | None = None
    steps: frozenset[int] = frozenset()
    goals_every: int | None = None
    goals: frozenset[int] = frozenset()
    best: Callable[[], int | None] | None = None
    """The step of the best weights so far, which stay too."""

    def __call__(self, step: int) -> bool:
        """Whether that of a step stays, however old."""
        return step > 0 and (step in self.steps or (self.every is not None and step % self.every == 0))

    def stays(self, step: int) -> bool:
        """The same for now: also where its weights are the best so far."""
        return self(step) or (self.best is not None and step == self.best())

    def is_goal(self, step: int) -> bool:
        """
        Whether that of a step is one to go back to: the start, one that stays, one of `goals`, or a step that
        `goals_every` divides.
        """
        divided = self.goals_every is not None and step % self.goals_every == 0
        return step == 0 or self(step) or step in self.goals or divided


@dataclass(frozen=True, kw_only=True)
class RollbackInfo:
    """What a checkpoint is to a run that may have to go back."""

    goal: bool = False
    """Whether a run may go back to it."""
    doubtful: bool = False
    """Whether it was saved between bad steps: then nothing is removed for it, as the run may go back behind it."""
    removes: bool = True
    """Whether others are removed at all when this one is whole."""
    left: Sequence[range] = ()
    """Steps that the run has gone back behind: it goes back to none of them."""
    passed_over: frozenset[int] = frozenset()
    """Steps of damaged ones that the run began behind: they go, whatever their step, when this one is whole."""


PLAIN = RollbackInfo()


def save(
    root: Path,
    step: int,
    write_model: Callable[[Path], None],
    training: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int | RetentionPolicy,
    environment: Mapping[str, Any] | None = None,
    model_bytes: int = 0,
    standing: RollbackInfo = PLAIN,
    world: World | None = None,
) -> Path:
    """
    Save a checkpoint for `step` under `root`, and then remove those that need not stay.

    Whatever else lies there of this step or of later ones was passed over, as was what `standing` says; it goes when
    the new one is whole. Every rank of `world` calls it, and only the first writes what is not sharded. A failure on
    one rank fails on all, and none of them goes on to the next part. Raises RunError where a file is in the way and
    where the disk is full: before anything is written where the tensors alone, with `model_bytes` of weights, are too
    many.
    """
    world, keep = world or World.alone(), keep if isinstance(keep, RetentionPolicy) else RetentionPolicy(last=keep)
    folder = root / f"{step:09d}"
    partial = folder.with_name(folder.name + core_io.PARTIAL)
    with _part(folder, world):
        if world.is_first:
            _check_way(root)
            for torn in root.glob(f"*{core_io.PARTIAL}"):
                core_io.remove_path(torn)
            root.mkdir(parents=True, exist_ok=True)
            check_space(folder, model_bytes + size_bytes(training))
            partial.mkdir()
        elif world.rank in world.receivers:
            for torn in root.glob(f"*{core_io.PARTIAL}"):
                core_io.remove_path(torn)
    with _part(folder, world):
        write(partial / TRAINING, training, world)
    if world.receivers:
        with _part(folder, world):
            copies.collect(world, partial / TRAINING)
            if world.rank in world.receivers:
                core_io.remove_path(partial)
    with _part(folder, world):  # the folder takes its name only when no rank writes into it any more
        if world.is_first:
            write_model(partial)
            core_io.write_json(partial / STATE, dict(state))
            core_io.write_json(partial / ENVIRONMENT, dict(environment or {}))
            facts = {"step": step, "goal": standing.goal}
            core_io.write_json(partial / MANIFEST, facts | {"outputs": core_io.listing(partial)})
            core_io.sync_folder(partial)
            if folder.is_dir():
                folder.rename(folder.with_name(f"{folder.name}.old{core_io.PARTIAL}"))
            partial.rename(folder)
            core_io.sync_folder(root)
            _prune(root, folder, keep, standing)
    return folder


@contextmanager
def _part(folder: Path, world: World) -> Iterator[None]:
    """A part of a save, at whose end all ranks know whether it is done on all of them."""
    with world.alike(), _disk_of(world.rank, folder, world):
        yield


@contextmanager
def _disk_of(rank: int, path: Path, world: World) -> Iterator[None]:
    """As `disk_errors`, and of several ranks it names the one that cannot write."""
    try:
        with core_io.disk_errors(path):
            yield
    except RunError as error:
        if world.size > 1 and not isinstance(error, RankLostError) and "(rank " not in error.where:
            raise RunError(error.what, where=f"{error.where} (rank {rank})", hint=error.hint) from None
        raise


def _check_way(root: Path) -> None:
    """Raises RunError for what is no folder and stands where checkpoints are to be."""
    for path in (root, *root.glob(STEP_FOLDER)):
        if (path.exists() or path.is_symlink()) and not path.is_dir():
            hint = "Move it away and run the same command again."
            raise RunError("is not a folder, but checkpoints are written there", where=str(path), hint=hint)


def _prune(root: Path, newest: Path, keep: RetentionPolicy, standing: RollbackInfo) -> None:
    """Remove the checkpoints that need not stay, now that the newest is whole."""
    there = folders(root) if standing.removes else []
    passed_over = [one for one in there if one > newest or (one < newest and int(one.name) in standing.passed_over)]
    behind = [one for one in there if one < newest and one not in passed_over]
    goal = next((one for one in reversed(behind) if is_goal(one, standing.left)), None)
    old = [] if standing.doubtful else [*behind, newest][: -keep.last]
    for folder in [*passed_over, *(one for one in old if one != goal and not keep.stays(int(one.name)))]:
        _remove(folder)
    for torn in root.glob(f"*{core_io.PARTIAL}"):
        core_io.remove_path(torn)


def is_goal(folder: Path, left: Sequence[range] = ()) -> bool:
    """Whether a run may go back to a checkpoint: no, where it is damaged, does not say or is of a step in `left`."""
    if any(int(folder.name) in steps for steps in left):
        return False
    try:
        return _manifest(folder).get("goal", False)
    except CheckpointError:
        return False


def check_space(folder: Path, needed: int) -> None:
    """Raises RunError where a disk has less room than `needed` bytes, with both numbers."""
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        what = f"cannot be written: {os.strerror(errno.ENOSPC)} for it. It needs {needed:,} bytes; {free:,} are free"
        hint = "Free some space and run the same command again. Finished parts are kept."
        raise RunError(f"{what}; nothing was written", where=str(folder), hint=hint)


class Saver:
    """
    Saves during training: the state is copied at once, and a thread writes it. One save at a time.

    Every rank makes a Saver, in the same order as their other collective operations. Used as a context, it ends when
    the last save is whole.
    """

    def __init__(self, root: Path, keep: RetentionPolicy, world: World | None = None) -> None:
        self._root, self.keep = root, keep
        self._world = world or World.alone()
        self._apart = self._world.apart()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._running: Future[Path] | None = None

    def start(
        self,
        step: int,
        write_model: Callable[[Path], None],
        training: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        environment: Mapping[str, Any] | None = None,
        model_bytes: int = 0,
        standing: RollbackInfo = PLAIN,
    ) -> None:
        """
        Begin a save, when the one before is whole; see `save`. `write_model` is called later, by the thread, so it
        must not look at weights that training changes. Raises RunError for what went wrong with the one before.
        """
        self.wait()
        sharded = is_sharded(training)
        if not (sharded or self._world.is_first):
            return
        with (self._world if sharded else World.alone()).alike():  # no thread waits for that of a rank without memory
            copied = copy_state(training)
        self._running = self._thread.submit(
            save,
            self._root,
            step,
            write_model,
            copied,
            dict(state),
            keep=self.keep,
            environment=environment,
            model_bytes=model_bytes,
            standing=standing,
            world=self._apart if sharded else None,
        )

    def wait(self) -> None:
        """Return when nothing is being written. Raises RunError where a save has failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def newest(
    root: Path,
    before: int | None = None,
    *,
    goals: bool = False,
    left: Sequence[range] = (),
    world: World | None = None,
    alloc: TensorPlacement | None = None,
) -> Checkpoint | None:
    """
    The newest checkpoint that is whole, or None. `before` allows only earlier steps. `goals` allows only steps that a
    run which has `left` some steps may go back to. Raises CheckpointError where there are some, and none of all is
    whole.

    The first rank of `world` decides which, and all of them read it; `alloc` says where to, if not as whole tensors.
    """
    world = world or World.alone()
    selected = newest_folder(root, before, goals=goals, left=left) if world.is_first else None
    name = world.broadcast(selected.name if selected else None)
    if name is None:
        return None
    folder = root / name
    copies.bring(world, folder)
    copies.drop_others(world, folder)
    for file in sorted(_training_files(folder)):
        check_header(folder / file, f"Remove {folder}: the run resumes from the checkpoint before it.")
    if (folder / OLD_TRAINING).is_file():
        training = safetensors.torch.load_file(folder / OLD_TRAINING)
    else:
        training = read(folder / TRAINING, alloc)
    environment: dict[str, Any] = {}
    if (folder / ENVIRONMENT).exists():
        environment = read_record(folder / ENVIRONMENT, dict[str, Any], error=CheckpointError)
    return Checkpoint(folder, read_state(folder), training, environment)


def newest_folder(
    root: Path, before: int | None = None, *, goals: bool = False, left: Sequence[range] = ()
) -> Path | None:
    """The folder of that checkpoint."""
    troubles = []
    for folder in reversed(folders(root)):
        if (before is not None and int(folder.name) >= before) or (goals and not is_goal(folder, left)):
            continue
        if not (trouble := damage(folder)):
            return folder
        info(f"skipped checkpoint {folder}: {trouble}", style="yellow")
        troubles.append(f"{folder.name}: {trouble}")
    if troubles and before is None and not goals:
        what = f"none of {len(troubles)} checkpoints is valid; {troubles[0]}"
        hint = f"Restore the files. Or remove {root}: the same command then starts from the beginning."
        raise CheckpointError(what, where=str(root), hint=hint)
    return None


def damage(folder: Path) -> str:
    """Why a checkpoint is not as its manifest says, or ""."""
    try:
        if not (folder / MANIFEST).exists():
            return "it has no manifest"
        manifest = _manifest(folder)
        listed = manifest["outputs"]
        if corruption := core_io.find_corruption(folder, listed, thorough=True):
            return corruption
        steps = (manifest["step"], read_state(folder)["step"])
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read: {error.strerror or error}"
    except CheckpointError as error:
        return f"its {Path(error.where).name} {error.what}"
    if strange := sorted(_training_files(folder) - listed.keys()):
        return f"{strange[0]} is not in its manifest"
    return next((f"it is of step {step}" for step in steps if step != int(folder.name)), "")


def read_state(folder: Path) -> SavedState:
    """How far training was at a checkpoint. Raises CheckpointError."""
    return read_record(folder / STATE, SavedState, error=CheckpointError, fix=f"Remove {folder}.")


def _manifest(folder: Path) -> CheckpointManifest:
    return read_record(folder / MANIFEST, CheckpointManifest, error=CheckpointError, fix=f"Remove {folder}.")


def _training_files(folder: Path) -> set[str]:
    """What is read as training state, listed or not. What else a person or a program puts there harms nothing."""
    candidates = [folder / OLD_TRAINING, *(folder / TRAINING).glob("*.safetensors")]
    return {path.relative_to(folder).as_posix() for path in candidates if path.exists() or path.is_symlink()}


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that at no moment half of it passes for one."""
    doomed = folder.with_name(folder.name + core_io.PARTIAL)
    folder.rename(doomed)
    core_io.remove_path(doomed)


def folders(root: Path) -> list[Path]:
    """Finished checkpoint folders by step."""
    return sorted(folder for folder in root.glob(STEP_FOLDER) if folder.is_dir())
