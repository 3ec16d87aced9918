"""
Checkpoints of a training run: whole or absent, and checked before they are believed.

    checkpoints/000001000/    a model as `huggingface.py` writes it, and beside it
        training/             what the optimizers remember, in one or more parts (`training_state.py`)
        state.json            step, samples, tokens, and the metrics of the last step
        environment.json      what bit-exactness depends on, as it was
        manifest.json         size and sha256 of every other file; written last

All files go to 000001000.partial, are flushed, and the folder takes its name by one rename. The newest checkpoint that
is as its manifest says is used; one that is not is passed over, and said.
"""

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core import files
from bloomery.core.errors import RunError
from bloomery.core.files import MANIFEST
from bloomery.core.log import say
from bloomery.hw.dist import World
from bloomery.weights import training_state
from bloomery.weights.training_state import Place

import safetensors.torch
from torch import Tensor

TRAINING, STATE, ENVIRONMENT = "training", "state.json", "environment.json"
OLD_TRAINING = "training.safetensors"
"""Of checkpoints before training state could be sharded. They are still read."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: dict[str, Any]
    training: dict[str, Tensor]
    environment: dict[str, Any] = field(default_factory=dict)
    """What bit-exactness depended on when it was saved. Empty where nobody had written it down."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay: the newest `last`, those of steps that `every` divides, and those of some `steps`."""

    last: int
    every: int | None = None
    steps: frozenset[int] = frozenset()

    def __call__(self, step: int) -> bool:
        """Whether that of a step stays, however old."""
        return step in self.steps or (self.every is not None and step % self.every == 0)


def save(
    root: Path,
    step: int,
    write_model: Callable[[Path], None],
    training: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int | Keep,
    environment: Mapping[str, Any] | None = None,
    model_bytes: int = 0,
    world: World | None = None,
) -> Path:
    """
    Save a checkpoint for `step` under `root`, and then remove those that need not stay.

    Whatever else lies there of this step or of later ones is damaged: an attempt that died left it, or it was passed
    over. Every rank of `world` calls it, and only the first writes what is not sharded. Raises RunError where the disk
    is full: before anything is written where the tensors alone, with `model_bytes` of weights, are too many.
    """
    world, keep = world or World.alone(), keep if isinstance(keep, Keep) else Keep(last=keep)
    folder = root / f"{step:09d}"
    partial = folder.with_name(folder.name + files.PARTIAL)
    with files.disk_errors(folder):
        if world.is_first:
            for stale in [*root.glob(f"*{files.PARTIAL}"), *(one for one in folders(root) if one >= folder)]:
                shutil.rmtree(stale)
            root.mkdir(parents=True, exist_ok=True)
            check_space(folder, model_bytes + training_state.size_bytes(training))
            partial.mkdir()
        world.barrier()
        training_state.write(partial / TRAINING, training, world)
        world.barrier()  # the folder takes its name only when no rank writes into it any more
        if not world.is_first:
            return folder
        write_model(partial)
        files.write_json(partial / STATE, dict(state))
        files.write_json(partial / ENVIRONMENT, dict(environment or {}))
        files.write_json(partial / MANIFEST, {"step": step, "outputs": files.listing(partial)})
        files.sync_folder(partial)
        partial.rename(folder)
        files.sync_folder(root)
        for old in folders(root)[: -keep.last]:
            if not keep(int(old.name)):
                _remove(old)
    return folder


def check_space(folder: Path, needed: int) -> None:
    """Raises RunError where a disk has less room than `needed` bytes, with both numbers."""
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        what = f"cannot be written: {os.strerror(errno.ENOSPC)} for it. It needs {needed:,} bytes, {free:,} are free"
        cure = "Free some space and run the same command again: finished parts are kept."
        raise RunError(f"{what}; nothing was written", where=str(folder), cure=cure)


class Saver:
    """
    Saves while training goes on: what is to be saved is copied at once, and a thread writes it. One save at a time.

    Every rank makes one, in the same order as anything else that ranks do together. Used as a context, it ends when
    the last save is whole.
    """

    def __init__(self, root: Path, keep: Keep, world: World | None = None) -> None:
        self._root, self._keep = root, keep
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
    ) -> None:
        """
        Begin a save, when the one before is whole; see `save`. `write_model` is called later, by the thread, so it
        must not look at weights that training changes. Raises RunError for what went wrong with the one before.
        """
        self.wait()
        sharded = training_state.is_sharded(training)
        if not (sharded or self._world.is_first):
            return
        self._running = self._thread.submit(
            save,
            self._root,
            step,
            write_model,
            training_state.copied(training),
            dict(state),
            keep=self._keep,
            environment=environment,
            model_bytes=model_bytes,
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
    root: Path, before: int | None = None, *, world: World | None = None, place: Place | None = None
) -> Checkpoint | None:
    """
    The newest checkpoint that is whole, of those of a step before `before` where that is given, or None.

    The first rank of `world` decides which, and all of them read it; `place` says where to, if not as whole tensors.
    """
    world = world or World.alone()
    found = newest_folder(root, before) if world.is_first else None
    name = world.broadcast(found.name if found else None)
    if name is None:
        return None
    folder = root / name
    if (folder / OLD_TRAINING).is_file():
        training = safetensors.torch.load_file(folder / OLD_TRAINING)
    else:
        training = training_state.read(folder / TRAINING, place)
    environment = files.read_json(folder / ENVIRONMENT) if (folder / ENVIRONMENT).is_file() else {}
    return Checkpoint(folder, files.read_json(folder / STATE), training, environment)


def newest_folder(root: Path, before: int | None = None) -> Path | None:
    """The folder of that checkpoint."""
    for folder in reversed(folders(root)):
        if before is not None and int(folder.name) >= before:
            continue
        if not (trouble := damage(folder)):
            return folder
        say(f"checkpoint {folder} is passed over: {trouble}", style="yellow")
    return None


def damage(folder: Path) -> str:
    """Why a checkpoint is not as its manifest says, or ""."""
    if not (folder / MANIFEST).is_file():
        return "it has no manifest"
    try:
        return files.damage(folder, files.read_json(folder / MANIFEST)["outputs"], thorough=True)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its manifest cannot be read"


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that at no moment half of it passes for one."""
    doomed = folder.with_name(folder.name + files.PARTIAL)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def folders(root: Path) -> list[Path]:
    """Finished checkpoint folders by step; their names have nine digits, so that they sort as numbers do."""
    return sorted(folder for folder in root.glob("[0-9]" * 9) if folder.is_dir())
