"""
A run is a folder: a stage's output in each of its folders, the recipe that made them, and which of them are current.

    runs/demo/
      recipe.toml            the resolved recipe of the last run
      current.json           stage -> folder, for that recipe
      01-fetch-9f31c2aa/ …   as stage.py leaves them
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bloomery.core import files
from bloomery.core.config import Config, plain, to_toml
from bloomery.core.errors import RunError
from bloomery.core.files import MANIFEST
from bloomery.core.stage import Plan, damage, read_manifest

RECIPE, CURRENT = "recipe.toml", "current.json"
STAGE_FOLDER = re.compile(r"\d\d-\w+-[0-9a-f]{8}")
OUTLIVES = frozenset({"requests.jsonl"})
"""Files of a folder that later settings still read: answers that were paid for (data/synthesis/ledger.py)."""


@dataclass(frozen=True)
class StageState:
    stage: str
    folder: Path
    state: Literal["done", "begun", "waiting", "damaged"]
    seconds: float | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    damage: str = ""
    """What is damaged, as `stage.damage` says it."""


@dataclass(frozen=True)
class Waste:
    """Something in a run folder that its current recipe does not need."""

    path: Path
    size: int
    why: str


def remember(root: Path, recipe: Config, plans: Sequence[Plan]) -> None:
    """Save the resolved recipe and the folders that belong to it."""
    with files.whole_file(root / RECIPE, "w") as file:
        file.write(to_toml(plain(recipe)))
    files.write_json(root / CURRENT, {plan.stage.name: plan.folder.name for plan in plans})


def current(root: Path) -> dict[str, Path]:
    """Stage -> folder of the recipe that ran last. Raises RunError where a folder is no run."""
    try:
        names: dict[str, str] = dict(files.read_json(root / CURRENT))
    except (FileNotFoundError, NotADirectoryError):
        shown = "is no run folder" if root.exists() else "does not exist"
        cure = "Run folders lie in runs/ and are made by: bloomery run RECIPE"
        raise RunError(f"{shown} (it has no {CURRENT})", where=str(root), cure=cure) from None
    except (ValueError, TypeError) as error:
        cure = "Remove that file and run its recipe again: what is done stays done."
        raise RunError(f"cannot be read: {error}", where=str(root / CURRENT), cure=cure) from None
    return {stage: root / name for stage, name in names.items()}


def states(root: Path, *, thorough: bool = False) -> list[StageState]:
    """What has become of each stage of a run; `thorough` compares every file with its sha256."""
    found = []
    for stage, folder in current(root).items():
        trouble = damage(folder, thorough=thorough)
        if trouble == "not done":
            begun = folder.is_dir() and any(folder.iterdir())
            found.append(StageState(stage, folder, "begun" if begun else "waiting"))
        else:
            manifest = read_manifest(folder)
            state: Literal["damaged", "done"] = "damaged" if trouble else "done"
            found.append(StageState(stage, folder, state, manifest["seconds"], manifest["stats"], trouble))
    return found


def waste(root: Path) -> list[Waste]:
    """What could be removed: folders of other settings, and torn files. What no stage made is left alone."""
    kept = set(current(root).values())
    found = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and STAGE_FOLDER.fullmatch(path.name)):
        if folder not in kept:
            if any(path.name not in OUTLIVES for path in folder.iterdir()):
                found.append(Waste(folder, size_of(folder), "made with other settings"))
            continue
        torn = [path for path in sorted(folder.rglob(f"*{files.PARTIAL}")) if not _inside_torn(path, folder)]
        found += [Waste(path, size_of(path), "torn: a write that did not end") for path in torn]
    return found


def _inside_torn(path: Path, folder: Path) -> bool:
    return any(parent.name.endswith(files.PARTIAL) for parent in path.relative_to(folder).parents)


def remove(found: Sequence[Waste]) -> int:
    """
    Remove waste; returns the bytes freed. A stage folder loses its manifest first, so that it never looks done, and
    keeps what OUTLIVES it.
    """
    for one in found:
        with files.disk_errors(one.path):
            if one.path.is_dir():
                (one.path / MANIFEST).unlink(missing_ok=True)
                for path in one.path.iterdir():
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    elif path.name not in OUTLIVES:
                        path.unlink()
                if not any(one.path.iterdir()):
                    one.path.rmdir()
            else:
                one.path.unlink(missing_ok=True)
    return sum(one.size for one in found)


def size_of(path: Path) -> int:
    """Bytes in a file, or in all files below a folder but what OUTLIVES it."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.name not in OUTLIVES)
