"""
Schemas of the JSON files that are read back, and checked leftovers of interrupted work.

A kind of record is a type: a TypedDict, or a list or dict of simpler kinds. Every reader of a file shares its kind.
A file may be missing, torn, enormous, nested too deeply, not a regular file, or of another shape. Then a
BloomeryError names the file, the key and the fix. Keys that a kind does not name are kept, so that files of other
versions and other programs can be read.

Leftovers: an interrupted piece of work leaves a record, with the sha256 of the record and of each file. The next
attempt resumes only if nothing has changed. Otherwise the piece is made again, and a line says why.
"""

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import AfterValidator, Field, GetPydanticSchema, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from bloomery.core import io as core_io
from bloomery.core.config import read_tree
from bloomery.core.errors import BloomeryError, RunError, shorten
from bloomery.core.io import MANIFEST
from bloomery.core.log import info

MAX_MANIFEST_BYTES = 256 * 2**20
"""Of a file that lists others: a stage may leave some hundred thousand."""
MAX_NAME_BYTES = 255
"""Of one part of a path, as file systems have it."""
MAX_PATH_BYTES = 2_000
"""Of a path inside a folder: Linux takes 4,096 with the folder's own."""
AGAIN = "The file is damaged. Remove it, and run the same command again."

T = TypeVar("T")
_adapter: Any = cache(TypeAdapter)
"""The checker of a kind."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""Of a record: zero or more, within 64 bits."""


def _inside(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or any(part == ".." or "\\" in part or "\0" in part for part in parts):
        raise ValueError("should be the name of a file inside the folder")
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    if max(sizes) > MAX_NAME_BYTES or sum(sizes) > MAX_PATH_BYTES:
        raise ValueError(f"should have at most {MAX_NAME_BYTES} bytes in each part, and {MAX_PATH_BYTES} in all")
    return name


NameInside = Annotated[str, AfterValidator(_inside)]
"""The name of a file below the folder of its record: relative, and never out of it."""


RecordPath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_BYTES, pattern=r"^[^\x00]*$")]
"""The path of a file, wherever it is."""


class ListedFile(TypedDict):
    """What `io.listing` says of a file."""

    bytes: Count
    sha256: str


def read_record(
    path: Path,
    kind: Callable[..., T],
    *,
    error: type[BloomeryError] = RunError,
    fix: str = AGAIN,
    max_bytes: int = core_io.MAX_JSON_BYTES,
) -> T:
    """The record in a JSON file. Raises `error`, with file, key and `fix`, for anything that is none of its kind."""
    try:
        value = core_io.read_json(path, max_bytes)
    except OSError as trouble:
        raise error(f"cannot be read: {trouble.strerror or trouble}", where=str(path), hint=fix) from None
    except ValueError as trouble:
        raise error(f"cannot be read: {shorten(str(trouble))}", where=str(path), hint=fix) from None
    return checked(value, kind, where=str(path), error=error, fix=fix)


def read_lines(path: Path, kind: Callable[..., T], *, error: type[BloomeryError] = RunError) -> Iterator[T]:
    """The records of a file with one in each line; only "\\n" ends a line. Raises `error`, which names the line."""
    try:
        with core_io.open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(core_io.MAX_JSON_BYTES), b""), 1):
                yield checked(core_io.parse_json(line), kind, where=f"{path}:{number}", error=error)
    except (OSError, ValueError) as trouble:
        raise error(f"cannot be read: {shorten(str(trouble))}", where=str(path), hint=AGAIN) from None


def checked(
    value: Any, kind: Callable[..., T], *, where: str, error: type[BloomeryError] = RunError, fix: str = AGAIN
) -> T:
    """A JSON value as the record that it is. Raises `error`, with the keys that are wrong, where it is none."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as failure:
        raise error(f"cannot be read: {_explained(failure)}", where=where, hint=fix) from None
    record: T = value
    return record


def _explained(failure: ValidationError) -> str:
    """The first key that is wrong, and how."""
    problem = failure.errors(include_url=False)[0]
    key = shorten(".".join(str(part) for part in problem["loc"] if part != "[key]"))
    message = problem["msg"].removeprefix("Value error, ")
    more = f" ({failure.error_count() - 1} more keys are wrong)" if failure.error_count() > 1 else ""
    got = "" if problem["type"] == "missing" else f", got {_shown(problem['input'])}"
    return f"{key}: {message[0].lower()}{message[1:]}{got}{more}".removeprefix(": ")


def _shown(value: Any) -> str:
    return shorten(repr(value) if isinstance(value, str) else value)


class Leftover(TypedDict, total=False):
    """What `save` writes. A file of another version that lacks a key is made again."""

    record: dict[str, Any]
    outputs: dict[NameInside, ListedFile]
    sha256: str
    """Of the two together."""


def save(path: Path, record: Mapping[str, Any], outputs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the record of finished work, JSON data, with its files as `io.listed` describes them."""
    content = {"record": core_io.named_where_not_finite(record), "outputs": dict(outputs)}
    core_io.write_json(path, {**content, "sha256": _sha256(content)})


def load(path: Path, folder: Path, name: str) -> dict[str, Any] | None:
    """
    The record at `path`, if it and all files that it lists below `folder` are as they were saved; else None.

    Says why the work called `name` runs again. Raises RunError for a file that holds no JSON of this kind.
    """
    if not path.exists():
        return None
    record, trouble = read(path, folder)
    if trouble:
        info(f"{name} runs again, because {trouble}", style="yellow")
    return None if trouble else record


def read(path: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """The record at `path`, and what is not as it was saved, or ""."""
    saved = read_record(path, Leftover)
    content = {key: value for key, value in saved.items() if key in ("record", "outputs")}
    if len(content) < 2 or saved.get("sha256") != _sha256(content):
        return {}, f"its record was changed: {path}"
    damaged = core_io.find_corruption(folder, saved["outputs"], thorough=True)
    return saved["record"], damaged and str(folder / damaged)


def _sha256(content: Mapping[str, Any]) -> str:
    return core_io.sha256_bytes(core_io.canonical(content))


RECIPE, CURRENT = "recipe.toml", "current.json"
"""In a run folder: the resolved recipe of the last run; stage -> folder, for that recipe."""

NOT_DONE = "not done"
"""What `damage` says of a folder that no manifest vouches for."""

STAGE_FOLDER = re.compile(r"[0-9]{2}-(\w+)-[0-9a-f]{8}", re.ASCII)
"""Number, name and fingerprint of a stage, as `plan_stages` names folders."""

FolderName = Annotated[str, Field(pattern=r"^[0-9]{2}-[0-9A-Za-z_]+-[0-9a-f]{8}$")]
"""Of a record: the folder of a stage, next to others in its run. It never leads out of the run folder."""


class SavedSource(TypedDict, total=False):
    name: str
    domain: str | None
    license: str | None


class SavedConfig(TypedDict, total=False):
    """The settings of a stage, as far as others read them."""

    sources: list[SavedSource]
    val_fraction: float
    path: str | None


class SavedStats(TypedDict, total=False):
    """What a stage reported, as far as others read it: the data card of a run, and the data tools."""

    documents: Count
    rejected: Any
    by_source: dict[str, dict[str, Any]]
    reasons: dict[str, Count]
    mix: dict[str, dict[str, Any]]
    anneal: dict[str, dict[str, Any]] | None


class StageManifest(TypedDict):
    """What `seal` writes of a finished stage, as far as anything reads it."""

    stage: str
    version: NotRequired[int]
    fingerprint: NotRequired[str]
    inputs: NotRequired[dict[str, FolderName]]
    input_hashes: NotRequired[dict[str, str]]
    config: Annotated[dict[str, Any], GetPydanticSchema(lambda _, handler: handler(SavedConfig))]
    stats: Annotated[dict[str, Any], GetPydanticSchema(lambda _, handler: handler(SavedStats))]
    hands_on: NotRequired[str]
    outputs: dict[NameInside, ListedFile]
    seconds: Annotated[float, Field(ge=0)]
    resumed: bool
    finished: str
    versions: NotRequired[dict[str, str | None]]
    machine: NotRequired[dict[str, Any]]


def read_manifest(folder: Path) -> StageManifest:
    """The manifest of a finished stage folder. Raises RunError where there is none, or it cannot be read."""
    if not (folder / MANIFEST).exists():
        raise RunError("has no manifest, so the stage is not complete", where=str(folder), hint="Run the recipe again.")
    fix = "Remove that file and run the recipe again."
    return read_record(folder / MANIFEST, StageManifest, fix=fix, max_bytes=MAX_MANIFEST_BYTES)


def find_manifest(folder: Path) -> StageManifest | None:
    """The manifest of a stage folder, or None where it is not done or its manifest is damaged (see `damage`)."""
    try:
        return read_manifest(folder)
    except RunError:
        return None


def content_hash(folder: Path) -> str:
    """sha256 over the names and hashes of what a finished stage hands on: equal for equal content, at any time."""
    return _hash_of(read_manifest(folder))


def _hash_of(manifest: StageManifest) -> str:
    return core_io.sha256_bytes(core_io.canonical(handed_on(manifest)))


def handed_on(manifest: StageManifest) -> dict[str, str]:
    """Name -> sha256 of what a finished stage hands on."""
    outputs, handed_on = manifest["outputs"], manifest.get("hands_on", "")
    return {name: facts["sha256"] for name, facts in outputs.items() if name.startswith(handed_on)}


def damage(folder: Path, *, thorough: bool = False) -> str:
    """
    Why a stage folder is not whole, or not made from what its inputs hold, or "". `thorough` compares sha256 too.

    An input that is not there, not done, or has a damaged manifest, tells nothing.
    """
    if not (folder / MANIFEST).exists():
        return NOT_DONE
    try:
        manifest = read_manifest(folder)
    except RunError as error:
        return f"{MANIFEST} {error.what}"
    if broken := core_io.find_corruption(folder, manifest["outputs"], thorough=thorough):
        return broken
    hashes = manifest.get("input_hashes", {})
    for name, input_folder in manifest.get("inputs", {}).items():
        source = find_manifest(folder.parent / input_folder)
        if source is not None and name in hashes and _hash_of(source) != hashes[name]:
            return f"its input {name} was made again, with other content"
    return ""


def stage_folders(root: Path) -> dict[str, Path]:
    """Stage -> folder of the recipe that ran last. Raises RunError where a folder is no run."""
    if not os.path.lexists(root / CURRENT):
        shown = "is not a run folder" if root.exists() else "does not exist"
        hint = "Run folders are in runs/. To create one: bloomery run RECIPE"
        raise RunError(f"{shown} (it has no {CURRENT})", where=str(root), hint=hint)
    fix = "Remove that file and run its recipe again: what is done stays done."
    names = read_record(root / CURRENT, dict[str, FolderName], fix=fix)
    if not names:
        raise RunError("names no stage", where=str(root / CURRENT), hint=fix)
    for stage, name in names.items():
        if (parts := STAGE_FOLDER.fullmatch(name)) is None or parts[1] != stage:
            what = f"{stage}: {name} is not a folder of that stage"
            raise RunError(what, where=str(root / CURRENT), hint=fix)
    return {stage: root / name for stage, name in names.items()}


def last_stage(sections: Collection[str]) -> str:
    """The last stage that a recipe has the sections for, or "" where it has them for all."""
    if "finetune" in sections or "prefer" in sections:
        return ""
    return "pretrain" if "pretrain" in sections else "shard" if "fetch" in sections else ""


def unused_stages(sections: Collection[str]) -> tuple[str, ...]:
    """The stages that prepare what no section of a recipe uses: conversations, where it finetunes no model."""
    return ("synthesize", "instruct") if last_stage(sections) else ()


def recipe_of(root: Path) -> dict[str, Any]:
    """The recipe of a run as TOML data, empty where the run has none. Raises what `read_tree` raises."""
    return read_tree(root / RECIPE) if (root / RECIPE).is_file() else {}


def finishing_command(root: Path) -> str:
    """The command that finishes a run: up to the last stage that its recipe has the sections for."""
    recipe = recipe_of(root)
    words = ["bloomery", "run", str(root / RECIPE)]
    words += [f"name={root.name}"] if recipe.get("name", root.name) != root.name else []
    words += ["--runs", str(root.parent)] if str(root.parent) != "runs" else []
    return shlex.join([*words, *(["--until", last] if (last := last_stage(recipe)) else [])])
