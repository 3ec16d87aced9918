"""
What an attempt that died has left of a piece of work: a record, and the sha256 of the record and of each file.

The next attempt takes it up only if nothing of it has changed. Otherwise that piece is made again, and a line says why.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from bloomery.core import files
from bloomery.core.log import say
from bloomery.core.records import ListedFile, NameInside, read_record


class Leftover(TypedDict, total=False):
    """What `save` writes. A file of another version that lacks a key is made again."""

    record: dict[str, Any]
    outputs: dict[NameInside, ListedFile]
    sha256: str
    """Of the two together."""


def save(path: Path, record: Mapping[str, Any], outputs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the record of finished work, JSON data, with its files as `files.listed` describes them."""
    content = {"record": files.named_where_not_finite(record), "outputs": dict(outputs)}
    files.write_json(path, {**content, "sha256": _sha256(content)})


def load(path: Path, folder: Path, name: str) -> dict[str, Any] | None:
    """
    The record at `path`, if it and all files that it lists below `folder` are as they were saved; else None.

    Says why the work called `name` runs again. Raises RunError for a file that holds no JSON of this kind.
    """
    if not path.exists():
        return None
    record, trouble = read(path, folder)
    if trouble:
        say(f"{name} runs again, because {trouble}", style="yellow")
    return None if trouble else record


def read(path: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """The record at `path`, and what is not as it was saved, or ""."""
    found = read_record(path, Leftover)
    content = {key: value for key, value in found.items() if key in ("record", "outputs")}
    if len(content) < 2 or found.get("sha256") != _sha256(content):
        return {}, f"its record was changed: {path}"
    damaged = files.damage(folder, found["outputs"], thorough=True)
    return found["record"], damaged and str(folder / damaged)


def _sha256(content: Mapping[str, Any]) -> str:
    return files.sha256_bytes(files.canonical(content))
