"""
The folder of a run: which stage outputs are current, what is unneeded, and its removal.

A run is a folder. It holds the output folder of each stage, the recipe that made them, and the list of current outputs.

    runs/demo/
      recipe.toml            the resolved recipe of the last run
      current.json           stage -> folder, for that recipe
      01-fetch-9f31c2aa/ …   stage outputs, as core/pipeline.py leaves them
      .trash/TIME/ …         files that `clean` moved away, under their old names
"""

import errno
import re
import shlex
import time
from calendar import timegm
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from bloomery.core import io as core_io
from bloomery.core.cache import changed
from bloomery.core.errors import BloomeryError, RunError
from bloomery.core.io import MANIFEST
from bloomery.core.log import METRICS, last_metrics
from bloomery.core.pipeline import holder
from bloomery.core.records import (
    CURRENT,
    NOT_DONE,
    STAGE_FOLDER,
    damage,
    find_manifest,
    read_manifest,
    recipe_of,
    stage_folders,
    unused_stages,
)

TRASH = ".trash"
SECONDS_IN_TRASH = 24 * 3600
TIMES = "%Y%m%dT%H%M%SZ"
"""How a folder of the trash is called."""
MOVED_AT = re.compile(rf"([0-9]{{8}}T[0-9]{{6}}Z)(-[0-9]+)?({re.escape(core_io.PARTIAL)})?")
"""The name of a folder that `clean` made in the trash: its time, a number, and the mark of a deletion."""
MAX_LINKS = 40
"""Of one path, as Linux has it: more are a circle."""
OUTLIVES = frozenset({"requests.jsonl"})
"""Files of a folder that later settings still read: answers that were paid for (data/synthesis/generate.py)."""


@dataclass(frozen=True)
class StageState:
    stage: str
    folder: Path
    state: Literal["done", "begun", "waiting", "damaged"]
    seconds: float | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    damage: str = ""
    """What is damaged, as `records.damage` says it."""
    idle: bool = False
    """Whether the recipe asks for no work of it: it is off, or it prepares what no section uses."""
    step: int | None = None
    """Of a stage that trains and is not done: the last step that it has logged."""
    steps: int | None = None
    """How many the recipe asks for."""
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    """Until the last step, at this speed."""


@dataclass(frozen=True)
class RunState:
    """What has become of a run, and whether it lives."""

    root: Path
    stages: list[StageState]
    pid: int | None = None
    """The process that runs in it now."""
    error: str = ""
    """Why its state cannot be read, in a list of several runs."""

    @property
    def done(self) -> bool:
        return not self.error and all(stage.state == "done" or stage.idle for stage in self.stages)

    @property
    def damaged(self) -> list[StageState]:
        return [stage for stage in self.stages if stage.state == "damaged"]

    @property
    def running(self) -> str:
        """The stage that runs now, or ""."""
        return "" if self.pid is None else next((one.stage for one in self.stages if one.state != "done"), "")


@dataclass(frozen=True)
class Waste:
    """Something in a run folder that its current recipe does not need."""

    path: Path
    size: int
    why: str


def states(root: Path, *, thorough: bool = False) -> list[StageState]:
    """What has become of each stage of a run; `thorough` compares every file with its sha256."""
    stages = []
    recipe = recipe_of(root)
    for stage, folder in stage_folders(root).items():
        section = keys if isinstance(keys := recipe.get(stage), dict) else {}
        idle = section.get("enabled") is False or stage in unused_stages(recipe)
        trouble = damage(folder, thorough=thorough)
        if trouble == NOT_DONE:
            begun = folder.is_dir() and any(folder.iterdir())
            progress = _progress(folder, section) if begun else {}
            stages.append(StageState(stage, folder, "begun" if begun else "waiting", idle=idle, **progress))
        elif (manifest := find_manifest(folder)) is None:
            stages.append(StageState(stage, folder, "damaged", damage=trouble))
        else:
            state: Literal["damaged", "done"] = "damaged" if trouble else "done"
            stages.append(StageState(stage, folder, state, manifest["seconds"], manifest["stats"], trouble, idle))
    return stages


def _progress(folder: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    """How far a stage that trains is, from its metrics and its section; nothing for another stage."""
    lines = [line for line in last_metrics(folder / METRICS) if "tokens_per_second" in line]
    if not lines:
        return {}
    last, steps, tokens = lines[-1], section.get("steps"), section.get("global_batch_tokens")
    speed = last["tokens_per_second"]
    known = bool(steps) and tokens is not None and speed > 0  # steps are 0 where epochs say how long it trains
    return {
        "step": last["step"],
        "steps": steps or None,
        "loss": loss if isinstance(loss := last.get("loss"), float) else None,
        "tokens_per_second": speed,
        "seconds_left": round(max(0, steps - last["step"]) * tokens / speed, 1) if known else None,
    }


def run_state(root: Path, *, thorough: bool = False) -> RunState:
    """What has become of a run. Raises RunError where a folder is no run."""
    return RunState(root, states(root, thorough=thorough), holder(root))


def run_states(runs: Path, *, thorough: bool = False) -> list[RunState]:
    """The state of every run in a folder, the newest first. A run that cannot be read says why, and hides no other."""
    states = []
    for folder in run_folders(runs):
        try:
            states.append(run_state(folder, thorough=thorough))
        except (BloomeryError, OSError) as error:
            states.append(RunState(folder, [], error=str(error)))
    return states


def run_folders(runs: Path) -> list[Path]:
    """The run folders in a folder, the newest first. Raises RunError where it does not exist."""
    if not runs.is_dir():
        raise RunError("does not exist", where=str(runs), hint="Start a run: bloomery run RECIPE")
    folders = [path for path in runs.iterdir() if (path / CURRENT).is_file()]
    return sorted(folders, key=lambda path: (path / CURRENT).stat().st_mtime, reverse=True)


def as_json(state: RunState) -> dict[str, Any]:
    rows = [{**asdict(stage), "folder": str(stage.folder)} for stage in state.stages]
    return {
        "run": str(state.root),
        "done": state.done,
        "pid": state.pid,
        "running": state.running,
        "error": state.error,
        "stages": rows,
    }


# --- clean ---------------------------------------------------------------------------------------------------------


def waste(root: Path) -> list[Waste]:
    """
    What could be removed: folders of other settings, and what is torn: writes and removals that did not end.

    A folder of other settings is waste only where its stage is done with the current ones, and every file of that has
    the sha256 that its manifest lists. What no stage made is left alone, no link is followed, and what a link of a
    current stage leads to stays.
    """
    folders = stage_folders(root)
    whole = cache(lambda stage: _is_intact(folders[stage]))
    needed = set[Path]().union(*map(_passed, folders.values()))
    items = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() or path.is_symlink()):
        name = STAGE_FOLDER.fullmatch(folder.name.removesuffix(core_io.PARTIAL))
        if name is None:
            continue
        if folder.name.endswith(core_io.PARTIAL):
            items.append(Waste(folder, size_of(folder), "torn: a removal that did not end"))
        elif folder in folders.values():
            torn = [] if folder.is_symlink() else _torn(folder)
            items += [Waste(path, size_of(path), "torn: a write that did not end") for path in torn]
        elif folder.parent.resolve() / folder.name in needed:
            continue
        elif name[1] in folders and any(_leaving(folder)) and whole(name[1]):
            items.append(Waste(folder, size_of(folder), "made with other settings"))
    return items


def _is_intact(folder: Path) -> bool:
    """Whether a stage is done, and each of its files still has the sha256 that its manifest lists."""
    if damage(folder):
        return False
    outputs = read_manifest(folder)["outputs"]
    return not changed(folder, {name: facts["sha256"] for name, facts in outputs.items()})


def _passed(path: Path) -> set[Path]:
    """Every file and folder on the way to what a path leads to, each link among them."""
    passed, links = set[Path](), 0
    here, *parts = map(Path, path.absolute().parts)
    while parts and links <= MAX_LINKS:
        name = parts.pop(0)
        here = here.parent if name == Path("..") else here / name
        passed.add(here)
        if here.is_symlink():
            links += 1
            here, *more = map(Path, (here.parent / here.readlink()).parts)
            parts = more + parts
    return passed


def _leaving(path: Path) -> list[Path]:
    """
    What is to be moved or deleted of waste: all of it at once, or, of a folder with something that OUTLIVES it, the
    rest of what is in there. That begins with the manifest, so that at no moment a part of a stage looks done.
    """
    if path.is_symlink() or not path.is_dir() or not any((path / name).exists() for name in OUTLIVES):
        return [path]
    rest = sorted(inner for inner in path.iterdir() if inner.name not in OUTLIVES)
    return sorted(rest, key=lambda inner: inner.name != MANIFEST)


def _torn(folder: Path) -> Iterator[Path]:
    """Files and folders below a folder whose write did not end."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith(core_io.PARTIAL):
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from _torn(path)


def size_of(path: Path) -> int:
    """Bytes in a file, or in all files below a folder but what OUTLIVES it. A link has none."""
    if path.is_symlink():
        return 0
    if not path.is_dir():
        return path.stat().st_size
    return sum(size_of(inner) for inner in path.iterdir() if inner.name not in OUTLIVES)


@dataclass(frozen=True)
class Moved:
    """What `remove` has moved into the trash."""

    moves: tuple[tuple[Path, Path], ...] = ()
    """(from, to), in their order."""

    def restore(self) -> list[str]:
        """Commands of a shell that put it back; a manifest, which was moved first, comes back last."""
        sources: dict[Path, list[Path]] = {}
        for origin, trash_path in reversed(self.moves):
            sources.setdefault(origin.parent, []).append(trash_path)
        return [shlex.join(["mv", "-n", "--", *map(str, some), f"{parent}/"]) for parent, some in sources.items()]


def remove(root: Path, items: Sequence[Waste]) -> Moved:
    """
    Move waste into the trash of its run, where nothing looks for stages. Only names change, so nothing is copied.

    A folder that holds what OUTLIVES it keeps that, and loses its manifest first. Raises RunError where the trash is
    no folder, or on another file system.
    """
    trash = _new_trash(root) if items else root
    moves: list[tuple[Path, Path]] = []
    for item in items:
        for path in _leaving(item.path):
            trash_path = trash / path.relative_to(root)
            with _same_file_system(path):
                trash_path.parent.mkdir(parents=True, exist_ok=True)
                path.rename(trash_path)
            moves.append((path, trash_path))
    return Moved(tuple(moves))


def _new_trash(root: Path) -> Path:
    """A new folder in the trash, called by the time."""
    _check_trash(root)
    began = time.strftime(TIMES, time.gmtime())
    with core_io.disk_errors(root / TRASH):
        (root / TRASH).mkdir(exist_ok=True)
        existing = {path.name for path in (root / TRASH).iterdir()}
        names = (began if number == 0 else f"{began}-{number}" for number in range(len(existing) + 1))
        folder = root / TRASH / next(name for name in names if name not in existing)
        folder.mkdir()
    return folder


def _check_trash(root: Path) -> None:
    """Raises RunError for a trash that is no folder of the run: what lies behind a link is not ours to delete."""
    if (root / TRASH).is_symlink() or ((root / TRASH).exists() and not (root / TRASH).is_dir()):
        raise RunError("is not a folder", where=str(root / TRASH), hint="Remove it, and run the same command again.")


@contextmanager
def _same_file_system(path: Path) -> Iterator[None]:
    try:
        with core_io.disk_errors(path):
            yield
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EBUSY):
            raise
        hint = "It is a mount point. Unmount it, or remove its files by hand."
        raise RunError(f"cannot be moved into {TRASH}: {error.strerror}", where=str(path), hint=hint) from None


def expired(root: Path, *, now: bool = False) -> list[Waste]:
    """What `clean` moved into the trash more than a day ago, or with `now` at any time."""
    limit = float("inf") if now else time.time() - SECONDS_IN_TRASH
    old = [path for path in _in_trash(root) if _moved_at(path) < limit]
    return [Waste(path, size_of(path), "in the trash" if now else "in the trash for more than a day") for path in old]


def strangers(root: Path) -> list[Path]:
    """What lies in the trash, and was not moved there by `clean`. It is never deleted."""
    return [path for path in _in_trash(root) if _moved_at(path) == float("inf")]


def _in_trash(root: Path) -> list[Path]:
    _check_trash(root)
    return sorted((root / TRASH).iterdir()) if (root / TRASH).is_dir() else []


def _moved_at(path: Path) -> float:
    """
    When a folder of the trash was made, in seconds since 1970; infinite for what `clean` did not make. What an
    interrupted deletion has left is as old as can be.
    """
    name = MOVED_AT.fullmatch(path.name)
    if name is None or path.is_symlink() or not path.is_dir():
        return float("inf")
    if name[3]:
        return 0.0
    try:
        return timegm(time.strptime(name[1], TIMES))
    except ValueError:
        return float("inf")


def delete(items: Sequence[Waste]) -> int:
    """
    Delete waste, and folders of the trash, at once; returns the bytes freed. What is deleted first loses its name, so
    that a deletion that is interrupted leaves something torn, and needs no room on a full disk.
    """
    for item in items:
        for path in _leaving(item.path):
            with core_io.disk_errors(path):
                torn = path.name.endswith(core_io.PARTIAL)
                core_io.remove_path(path if torn else path.rename(path.with_name(path.name + core_io.PARTIAL)))
    return sum(one.size for one in items)
