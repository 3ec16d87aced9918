"""
Sources that are fetched: data sets of the hub, files by their address, buckets, and presets of well-known corpora.

Each lists its files without downloading them, and a file is downloaded when its documents are read: a source that
takes only so many documents or bytes downloads no more files than that needs. Where it takes only some, files come in
the order of the hash of their names, so that what is taken is a sample of the whole.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, TypeAdapter, model_validator
from typing_extensions import TypedDict

from bloomery.core import files
from bloomery.core.bounds import Attempts
from bloomery.core.config import VOLATILE, Config
from bloomery.core.errors import DataError, UnreachableError
from bloomery.data import cache, hosts, hub, reading, remote, web_files
from bloomery.data.cache import Content
from bloomery.data.hosts import RefusedError
from bloomery.data.hub import Repository
from bloomery.data.presets import PRESETS, PresetName
from bloomery.data.reading import Columns, Item, Piece
from bloomery.data.remote import RemoteFile
from bloomery.data.web_files import WebFile

WebAddress = Annotated[str, Field(pattern=r"^https?://[^@/]+/\S+$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Reach(Config):
    """How files are fetched into the cache ($BLOOMERY_CACHE or ~/.cache/bloomery)."""

    offline: bool = Field(False, json_schema_extra=VOLATILE)
    """Only the cache is asked. So it is for the hub, too, where HF_HUB_OFFLINE is 1."""
    attempts: Attempts = Field(8, json_schema_extra=VOLATILE)
    """Failures in a row, without a mebibyte of progress between them, after which an address is given up."""


class AtHub(Config):
    """Files of a data set of the hub."""

    dataset: str = Field("", pattern=r"^([\w.\-]+/)?[\w.\-]*$")
    """Owner and name of the data set, as in "roneneldan/TinyStories"."""
    revision: str = Field("main", min_length=1)
    """A branch, a tag or a commit. What it is when the run begins joins the fingerprint; a commit asks nobody."""
    files: tuple[str, ...] = ()
    """Globs of files in the repository: `*` stays in a folder, `**` does not."""
    config: str | None = None
    """Instead of `files`: one of the configs that the data set's card declares."""
    split: str = "train"
    """Of the config."""
    endpoint: str | None = Field(None, pattern=r"^https?://[^@]+$", json_schema_extra=VOLATILE)
    """The hub. None: HF_ENDPOINT, or https://huggingface.co. The token (HF_TOKEN) goes there and nowhere else."""
    mirrors: tuple[str, ...] = Field((), json_schema_extra=VOLATILE)
    """Hubs, or addresses of the same file, to ask where the first does not answer, in this order. They get no token."""

    @model_validator(mode="after")
    def _files_or_config(self) -> "AtHub":
        if self.files and self.config is not None:
            raise ValueError("files and config both say which files to take; leave one of the two")
        return self


class Fetched(Reach, Columns):
    """What every source has whose files come from elsewhere."""

    format: reading.Format | None = None
    """Of its files. None: as their names end."""


class FromHub(AtHub, Fetched):
    """A source whose files the hub may have."""


class Hub(FromHub):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")


class Address(Fetched):
    """One file of the web."""

    kind: Literal["address"] = "address"
    address: WebAddress
    sha256: Sha256 | None = None
    """Of its content. Without, what its server calls its version stands for it."""
    mirrors: tuple[WebAddress, ...] = Field((), json_schema_extra=VOLATILE)
    """Other addresses of the same bytes, tried in this order. They need `sha256`."""

    @model_validator(mode="after")
    def _mirrors_can_be_checked(self) -> "Address":
        if self.mirrors and self.sha256 is None:
            raise ValueError("mirrors may serve other bytes; give sha256, so that they can be checked")
        return self


class Remote(Fetched):
    """Files of a bucket or another store that fsspec knows: s3:// (extra `s3`), gs:// (`gcs`), http:// (`http`)."""

    kind: Literal["remote"] = "remote"
    patterns: tuple[Annotated[str, Field(pattern=r"^\w+://[^@]+$")], ...] = Field(min_length=1)
    """Addresses whose paths may hold `*`, `**` and `?`."""


class Preset(FromHub):
    """A well-known corpus with its fields, limits and license, from `presets.PRESETS`; what is set here goes first."""

    kind: Literal["preset"] = "preset"
    preset: PresetName
    """Which one. Where it is left out, `name` says it."""
    address: WebAddress | None = None
    sha256: Sha256 | None = None

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset", given.get("name"))
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"there is no preset {preset!r}; presets: {', '.join(PRESETS)}")
        defaults = {"name": preset, "preset": preset, "invalid": "skip", **PRESETS[preset]}
        if given.get("config") is not None:
            defaults.pop("files", None)
        return {key: parsed(cls, key, value) for key, value in {**defaults, **given}.items()}


def parsed(cls: type[Config], key: str, value: Any) -> Any:
    """An array or table as what its field makes of it: behind a validator, strict fields take no JSON any more."""
    if key not in cls.model_fields or not isinstance(value, list | dict):
        return value
    annotation: Any = cls.model_fields[key].annotation
    return TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)


Elsewhere = Hub | Address | Remote | Preset


def pieces(source: Elsewhere) -> list[Piece]:
    """Every file of a source, not downloaded yet. Raises DataError where it has none, or its host does not answer."""
    found: list[WebFile] | list[RemoteFile] = _listing(source)
    listed = [Piece(f.name, ((f.name, json.dumps(dataclasses.asdict(f))),), f.num_bytes or 0) for f in found]
    if source.max_bytes is None and source.max_documents is None:
        return listed
    return sorted(listed, key=lambda piece: hashlib.sha256(f"{source.name}/{piece.name}".encode()).digest())


def items(source: Elsewhere, piece: Piece) -> Iterator[Item]:
    """The documents of one file, which is downloaded first, and what it rejects. Raises DataError and RunError."""
    for name, place in piece.members:
        if isinstance(source, Remote):
            stored = TypeAdapter(RemoteFile).validate_json(place)
            path, url = remote.copied(stored, attempts=source.attempts, offline=source.offline), stored.address
        else:
            path, url = _downloaded(source, TypeAdapter(WebFile).validate_json(place))
        try:
            yield from reading.items(source, path, name, form=source.format, url=url)
        except DataError as error:
            raise DataError(error.what, where=f"{url} ({error.where})", cure=error.cure) from None


def digest(source: Elsewhere) -> str:
    """
    What names the content of all files, without any of them: a commit, a sha256, or what their servers call them.

    Raises DataError where a host has to be asked and does not answer.
    """
    if (repository := _repository(source)) is not None:
        return hub.digest(repository)
    if isinstance(source, Address | Preset) and source.sha256 is not None:
        return source.sha256
    return files.sha256_bytes(files.canonical([[file.name, *file.content] for file in _listing(source)]))


def pinned(source: Elsewhere) -> str | None:
    """The version that is read, as a person can ask for it again: a commit or a sha256. Asks nobody twice."""
    if (repository := _repository(source)) is not None:
        return f"{repository.dataset}@{hub.commit(repository)}"
    return source.sha256 if isinstance(source, Address | Preset) else None


def repository(source: AtHub, reach: Reach) -> Repository:
    """The data set that settings name."""
    return Repository(source.dataset, source.revision, source.endpoint, source.mirrors, reach.offline, reach.attempts)


def _repository(source: Elsewhere) -> Repository | None:
    """The data set of the hub that a source reads, if it reads one."""
    if not isinstance(source, FromHub) or (isinstance(source, Preset) and source.address is not None):
        return None
    return repository(source, source)


def _listing(source: Elsewhere) -> list[WebFile] | list[RemoteFile]:
    if (repository := _repository(source)) is not None:
        assert isinstance(source, FromHub)
        return hub.listing(repository, source.files, config=source.config, split=source.split)
    if isinstance(source, Remote):
        return _in_store(source)
    assert isinstance(source, Address | Preset)
    return [_at_address(source)]


class NotedVersion(TypedDict):
    """What a plain address last said of its file."""

    sha256: str | None
    etag: str | None
    num_bytes: int | None


def _in_store(source: Remote) -> list[RemoteFile]:
    """What a store lists, and offline what it listed the last time."""
    note = cache.root() / "listings" / f"{files.sha256_bytes(files.canonical(source.patterns))}.json"
    if source.offline:
        if (known := cache.known(note, list[dict[str, Any]])) is None:
            what = f"what is there is not in the cache {cache.root()}, and this is offline mode"
            raise UnreachableError(what, where=", ".join(source.patterns), cure="Run once without offline.")
        return [TypeAdapter(RemoteFile).validate_json(json.dumps(one)) for one in known]
    found = remote.listing(source.patterns, attempts=source.attempts)
    cache.note(note, [dataclasses.asdict(file) for file in found])
    return found


def _at_address(source: Address | Preset) -> WebFile:
    address = source.address
    assert address is not None
    addresses, name = (address, *source.mirrors), unquote(urlsplit(address).path).rpartition("/")[2] or "file"
    if source.sha256 is not None:
        return WebFile(name, addresses, Content("sha256", source.sha256))
    note = cache.root() / "addresses" / f"{files.sha256_bytes(address.encode())}.json"
    known: Any = cache.known(note, NotedVersion)
    if source.offline:
        if known is None:
            what = f"is not in the cache {cache.root()}, and this is offline mode"
            raise UnreachableError(what, where=hosts.shown(address), cure="Run once without offline.")
    else:
        try:
            seen = web_files.version(address, attempts=source.attempts)
        except RefusedError as error:
            cure = error.cure or "See whether the address is right and the network works."
            raise DataError(str(error), where=hosts.shown(address), cure=cure) from None
        told, known = known, dataclasses.asdict(seen)
        if told != known:
            cache.note(note, known)
    if known["sha256"] is not None:
        return WebFile(name, addresses, Content("sha256", known["sha256"]), known["num_bytes"])
    version = files.sha256_bytes(files.canonical([address, known["etag"], known["num_bytes"]]))
    return WebFile(name, addresses, Content("etag", version), known["num_bytes"], known["etag"])


def _downloaded(source: Elsewhere, file: WebFile) -> tuple[Path, str]:
    """Where a file is now, and the address that its documents are said to come from: the same from any mirror."""
    if (found := _repository(source)) is not None:
        return from_hub(found, file)
    path = web_files.download(file, attempts=source.attempts, offline=source.offline)
    return path, hosts.shown(file.addresses[0])


def from_hub(repository: Repository, file: WebFile) -> tuple[Path, str]:
    """Where a file of the hub is now, downloaded if it has to be, and its name there: data set, commit and file."""
    offline = repository.cut_off
    token = None if offline else hub.token()
    path = web_files.download(file, attempts=repository.attempts, token=token, offline=offline)
    commit = file.addresses[0].partition("/resolve/")[2].partition("/")[0]
    return path, f"hf://datasets/{repository.dataset}@{commit}/{file.name}"
