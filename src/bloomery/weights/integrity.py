"""
Whether a model folder still holds what was written into it.

    SHA256SUMS      sha256 and name of each file of the folder, as `sha256sum -c SHA256SUMS` reads it

A folder in a stage, or a checkpoint, is compared with that manifest too. A third-party folder has neither.
"""

import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

from typing_extensions import TypedDict

from bloomery.core import cache
from bloomery.core.errors import CheckpointError
from bloomery.core.io import MANIFEST, read_regular, sha256_file, whole_file
from bloomery.core.pipeline import RECIPE, STAGE_FOLDER
from bloomery.core.records import MAX_MANIFEST_BYTES, ListedFile, NameInside, read_record
from bloomery.weights.safetensors import STEP_FOLDER

SUMS = "SHA256SUMS"
MAX_SUMS_BYTES = 2**20
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\\0]+)")


class Listing(TypedDict):
    """The manifest of a stage or of a checkpoint, as far as it is read here."""

    outputs: dict[NameInside, ListedFile]


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS for all files that lie directly in a folder."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file() and file.name != SUMS)
    with whole_file(folder / SUMS, "w") as file:
        file.writelines(f"{sha256_file(folder / name)}  {name}\n" for name in names)


def verify(folder: Path, only: str | None = None) -> None:
    """
    Compare the files of a model folder with every record of their sha256, or `only` the file of this name. Raises
    CheckpointError, which names the file and what makes it again, for one that is gone or differs.

    About 0.7 s a GiB on one core of 2026; hashes of unchanged files are noted in the cache.
    """
    folder = folder.resolve()
    for record, hashes, hint in _records(folder):
        selected = hashes if only is None else {name: hashes[name] for name in (only,) if name in hashes}
        if trouble := cache.changed(folder, selected):
            raise CheckpointError(f"{trouble}, unlike in {record}", where=str(folder), hint=hint)


def _records(folder: Path) -> Iterator[tuple[Path, Mapping[str, str], str]]:
    """Each file that records hashes of a model folder, these by name, and how a damaged file is made again."""
    stage = folder.parent
    if folder.name == "model" and STAGE_FOLDER.fullmatch(stage.name) and os.path.lexists(stage / MANIFEST):
        hint = f"Remove {stage / MANIFEST}, and run: bloomery run {stage.parent / RECIPE}"
        yield stage / MANIFEST, _listed(stage / MANIFEST, "model/"), hint
    if fnmatch(folder.name, STEP_FOLDER) and os.path.lexists(folder / MANIFEST):
        yield folder / MANIFEST, _listed(folder / MANIFEST, ""), "Name another checkpoint, or train this step again."
    if os.path.lexists(folder / SUMS):
        hint = "Run, export or import it again, or fetch it again. After a change of your own, remove its "
        yield folder / SUMS, _sums(folder / SUMS), f"{hint}line from {SUMS}."


def _listed(manifest: Path, prefix: str) -> dict[str, str]:
    """Name -> sha256 of the files that a manifest lists directly below `prefix`."""
    fix = "Remove it and run the recipe again."
    listed = read_record(manifest, Listing, error=CheckpointError, fix=fix, max_bytes=MAX_MANIFEST_BYTES)["outputs"]
    names = ((name, name.removeprefix(prefix)) for name in listed if name.startswith(prefix))
    return {short: listed[name]["sha256"] for name, short in names if "/" not in short}


def _sums(file: Path) -> dict[str, str]:
    """Name -> sha256 of the files that are there: what a reader needs and does not find, it reports itself."""
    hint = f"Make or fetch the folder again, or remove {file} to read it unchecked."
    try:
        text = read_regular(file, MAX_SUMS_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(file), hint=hint) from None
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    sums = {line[2]: line[1] for line in lines if line is not None}
    if None in lines or not sums:
        raise CheckpointError("is no list of sha256 and names", where=str(file), hint=hint)
    return {name: sha256 for name, sha256 in sums.items() if (file.parent / name).exists()}
