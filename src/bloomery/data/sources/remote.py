"""
Remote sources: Hugging Face data sets, web addresses, buckets, and presets of known corpora.

Each source lists its files without downloading them. A file is downloaded when its documents are read. A source
with a limit on documents or bytes therefore downloads no more files than it needs. With a limit, files come in the
order of the hash of their names. The result is therefore a sample of the whole.

Buckets and other stores are read through fsspec: s3://, gs://, http(s):// folders, and any other store that it
knows. Patterns are listed. The store's facts about a file (size, ETag, generation, times) name its content. A file
is copied into the cache in ranges, so that an interrupted copy resumes. At the end the store is asked again, and a
file that changed meanwhile is an error. Access rights come from each store's own settings in the environment.

Presets are settings of well-known corpora (presets.toml).

Settings and stores share one file because every remote source lists, pins and downloads by the same steps.
"""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
from pydantic import Field, TypeAdapter, model_validator

from bloomery.core import cache, extras
from bloomery.core import io as core_io
from bloomery.core.config import VOLATILE, Attempts, Config, packaged
from bloomery.core.errors import DataError
from bloomery.core.log import info
from bloomery.data.readers import read
from bloomery.data.readers.read import DocumentItem, SourceChunk, TableSource
from bloomery.data.sources import download, http_client
from bloomery.data.sources.download import Content, Repository, Version, WebFile
from bloomery.data.sources.http_client import PassingError, RefusedError

PRESETS = Path(__file__).with_name("presets.toml")
SourcePresetName = Literal[
    "fineweb-edu",
    "fineweb",
    "wikipedia",
    "stackexchange",
    "starcoder",
    "arxiv",
    "finemath",
    "cosmopedia",
    "tinystories",
    "tinyshakespeare",
]
RANGE_BYTES = 8 << 20
NEEDS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
"""Scheme to package."""
FACTS = ("ETag", "etag", "md5Hash", "generation", "crc32c", "mtime", "LastModified", "created", "ino")
"""What stores say of a file that changes with its content."""
ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("aiohttp", "ClientError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("gcsfs.retry", "HttpError"),
)
"""Errors of stores that are no OSError: module and name, of those modules that are loaded."""

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFile:
    """One file of a store."""

    name: str
    address: str
    content: Content
    num_bytes: int
    facts: dict[str, str]
    """What the store said of it when it was listed."""


def listing(patterns: Sequence[str], *, attempts: int) -> list[RemoteFile]:
    """
    The files that match, sorted by address. A pattern is an address whose path may hold `*`, `**` and `?`.

    A file's name is its path below the folder that all of them share. Raises DataError where a pattern finds nothing,
    or its store cannot be asked.
    """
    entries: dict[str, dict[str, Any]] = {}
    for pattern in patterns:
        matching = _asked(pattern, partial(_glob, pattern), attempts)
        if not matching:
            raise DataError(
                "no file matches", where=http_client.shown(pattern), hint="Check the spelling of the folder."
            )
        entries |= matching
    places = {address: _place(address) for address in entries}
    folder = os.path.commonpath([os.path.dirname(place) for place in places.values()])
    return [
        RemoteFile(
            name=os.path.relpath(places[address], folder),
            address=address,
            content=Content("etag", core_io.sha256_bytes(core_io.canonical([address, _facts(entry)]))),
            num_bytes=int(entry.get("size") or 0),
            facts=_facts(entry),
        )
        for address, entry in sorted(entries.items())
    ]


def _place(address: str) -> str:
    parts = urlsplit(address)
    return (parts.netloc or parts.scheme) + parts.path


def _glob(pattern: str) -> dict[str, dict[str, Any]]:
    """Address -> what the store says of it."""
    system, path = _system(pattern)
    entries = system.glob(path, detail=True) if any(mark in path for mark in "*?[") else {path: system.info(path)}
    return {
        system.unstrip_protocol(name): system.info(name) if urlsplit(pattern).scheme in ("http", "https") else entry
        for name, entry in entries.items()
        if entry["type"] == "file"
    }


def _system(address: str) -> tuple[Any, str]:
    """A file system that remembers no listings, and the path in it."""
    scheme = urlsplit(address).scheme
    if scheme in NEEDS:
        extras.load(NEEDS[scheme])
    try:
        system_and_path: tuple[Any, str] = fsspec.url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        hint = f"Install the package that fsspec needs for {scheme}://, or check the spelling of the address."
        raise DataError(f"is not a store that can be read here: {error}", where=address, hint=hint) from None
    return system_and_path


def _facts(info: dict[str, Any]) -> dict[str, str]:
    """The fields that identify a version, as text: one call to a store may give dates where another gives seconds."""
    return {name: _plain(info[name]) for name in ("size", *FACTS) if info.get(name) is not None}


def _plain(value: Any) -> str:
    value = value.timestamp() if isinstance(value, datetime) else value
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def copied(file: RemoteFile, *, attempts: int, offline: bool) -> Path:
    """
    The path of a file in the cache, copied if it is not there.

    Raises DataError where the store does not give it, or gives another than was listed, and RunError for a full disk.
    """
    if urlsplit(file.address).scheme in ("http", "https"):
        web = WebFile(file.name, (file.address,), file.content, file.num_bytes or None, file.facts.get("ETag"))
        return download.download(web, attempts=attempts, offline=offline)
    copy = partial(_copy, file, attempts)
    return download.cached(file.content, file.name, file.num_bytes, copy, where=file.address, offline=offline)


def _copy(file: RemoteFile, attempts: int, path: Path) -> None:
    begun_file = path.with_name(path.name + core_io.PARTIAL)
    with core_io.disk_errors(begun_file):
        target = begun_file.open("ab", buffering=0)
    with target:
        if target.tell() > file.num_bytes:
            target.truncate(0)
        said = time.monotonic()
        while (begun := target.seek(0, os.SEEK_END)) < file.num_bytes:
            end = min(begun + RANGE_BYTES, file.num_bytes)
            download.append(target, _asked(file.address, partial(_range, file.address, begun, end), attempts))
            if time.monotonic() - said > 30:
                said = time.monotonic()
                info(f"{file.name}: {end / 2**20:,.0f} of {file.num_bytes / 2**20:,.0f} MiB", style="dim")
        os.fsync(target.fileno())
    now = _facts(_asked(file.address, partial(_glob, file.address), attempts)[file.address])
    if any(now[name] != file.facts[name] for name in now.keys() & file.facts.keys()):  # lists tell less than files do
        begun_file.unlink()
        hint = "Run the same command again to use the new version."
        raise DataError("has changed since it was listed", where=file.address, hint=hint)
    begun_file.replace(path)
    core_io.sync_folder(path.parent)


def _range(address: str, begin: int, end: int) -> bytes:
    system, path = _system(address)
    data: bytes = system.cat_file(path, start=begin, end=end)
    if len(data) != end - begin:
        raise PassingError(f"sent {len(data):,} bytes instead of {end - begin:,}, from byte {begin:,}")
    return data


def _asked(address: str, question: Callable[[], T], attempts: int) -> T:
    """What a store answers, asked again while it is only out of order. Raises DataError."""
    where = http_client.shown(address)

    def translated() -> T:
        try:
            return question()
        except FileNotFoundError:
            raise RefusedError("there is no such file or folder", "Check the spelling.") from None
        except PermissionError as error:
            raise RefusedError(f"may not be read: {error}", _SIGN_IN) from None
        except _errors() as error:
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"):
                raise RefusedError(str(error), _SIGN_IN) from None
            raise PassingError(f"cannot be reached: {error}") from None

    try:
        return http_client.patiently(translated, attempts=attempts, what=where)
    except RefusedError as error:
        raise DataError(str(error), where=where, hint=error.hint or "Check the network and the address.") from None


_SIGN_IN = "Set the store's keys in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or gcloud's login)."


def _errors() -> tuple[type[Exception], ...]:
    loaded = [(sys.modules[module], name) for module, name in ERRORS if module in sys.modules]
    return (OSError, *(getattr(module, name) for module, name in loaded))


WebAddress = Annotated[str, Field(pattern=r"^https?://[^@/]+/\S+$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Reach(Config):
    """How files are fetched into the cache ($BLOOMERY_CACHE or ~/.cache/bloomery)."""

    offline: bool = Field(False, json_schema_extra=VOLATILE)
    """Use only the cache. For the hub, HF_HUB_OFFLINE=1 does the same."""
    attempts: Attempts = Field(8, json_schema_extra=VOLATILE)
    """Number of failures in a row, with less than 1 MiB between them, after which an address is given up."""


class AtHub(Reach):
    """Files of a data set of the hub."""

    dataset: str = Field("", pattern=r"^([\w.\-]+/)?[\w.\-]*$")
    """Owner and name of the data set, as in "roneneldan/TinyStories"."""
    revision: str = Field("main", min_length=1)
    """A branch, a tag or a commit. Its commit at the start of the run is part of the fingerprint."""
    files: tuple[str, ...] = ()
    """Globs of files in the repository: `*` stays in a folder, `**` does not."""
    config: str | None = None
    """Instead of `files`: one of the configs that the data set's card declares."""
    split: str = "train"
    """The split of that config."""
    endpoint: str | None = Field(None, pattern=r"^https?://[^@]+$", json_schema_extra=VOLATILE)
    """The hub. None: HF_ENDPOINT, or https://huggingface.co. The token (HF_TOKEN) is sent only there."""
    mirrors: tuple[str, ...] = Field((), json_schema_extra=VOLATILE)
    """Other hubs, or addresses of the same file, to try in this order if the first fails. They get no token."""

    def packages(self) -> tuple[str, ...]:
        return (*super().packages(), *extras.for_files(self.files))

    @model_validator(mode="after")
    def _files_or_config(self) -> "AtHub":
        if self.files and self.config is not None:
            raise ValueError("files and config both select files; remove one of them")
        return self

    @property
    def repository(self) -> Repository:
        return Repository(self.dataset, self.revision, self.endpoint, self.mirrors, self.offline, self.attempts)


class Fetched(Reach, TableSource):
    """What every source has whose files come from elsewhere."""

    format: read.FileFormat | None = None
    """Format of its files. None: by the file extensions."""

    def packages(self) -> tuple[str, ...]:
        if self.format is None:
            return super().packages()
        return ("resiliparse",) if self.format in ("html", "warc") or self.encoding == "detect" else ()


class FromHub(AtHub, Fetched):
    """A source whose files the hub may have."""

    def names(self) -> tuple[str, ...]:
        return self.files


class Hub(FromHub):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")


class Address(Fetched):
    """One file at a web address."""

    kind: Literal["address"] = "address"
    address: WebAddress
    """The web address of the file."""
    sha256: Sha256 | None = None
    """SHA-256 of its content. None: the version that its server states."""
    mirrors: tuple[WebAddress, ...] = Field((), json_schema_extra=VOLATILE)
    """Other addresses of the same bytes, tried in this order. They need `sha256`."""

    def names(self) -> tuple[str, ...]:
        return (urlsplit(self.address).path,)

    @model_validator(mode="after")
    def _mirrors_can_be_checked(self) -> "Address":
        if self.mirrors and self.sha256 is None:
            raise ValueError("mirrors may serve other bytes; set sha256 so that their files can be checked")
        return self


class Remote(Fetched):
    """Files of a bucket or another store that fsspec knows: s3:// (extra `s3`), gs:// (`gcs`), http:// (`http`)."""

    kind: Literal["remote"] = "remote"
    patterns: tuple[Annotated[str, Field(pattern=r"^\w+://[^@]+$")], ...] = Field(min_length=1)
    """Addresses whose paths may hold `*`, `**` and `?`."""

    def packages(self) -> tuple[str, ...]:
        schemes = (urlsplit(pattern).scheme for pattern in self.patterns)
        return (*super().packages(), *(NEEDS[scheme] for scheme in schemes if scheme in NEEDS))

    def names(self) -> tuple[str, ...]:
        return self.patterns


class PresetSource(FromHub):
    """A well-known corpus with its fields, limits and license, from presets.toml. Your own keys override them."""

    kind: Literal["preset"] = "preset"
    preset: SourcePresetName
    """Name of the preset. None: the same as `name`."""
    address: WebAddress | None = None
    """A web address that replaces the preset's."""
    sha256: Sha256 | None = None
    """SHA-256 of the content at `address`."""

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, raw: Any) -> Any:
        return filled(cls, raw, packaged(PRESETS), invalid="skip")


def filled(cls: type[Config], raw: Any, presets: Mapping[str, Any], **defaults: Any) -> Any:
    """Given settings, then those of the preset that they name, then defaults. Raises ValueError for an unknown name."""
    if not isinstance(raw, dict):
        return raw
    preset = raw.get("preset", raw.get("name"))
    if not isinstance(preset, str) or preset not in presets:
        raise ValueError(f"there is no preset {preset!r}; presets: {', '.join(presets)}")
    defaults = {"name": preset, "preset": preset, **defaults, **presets[preset]}
    if raw.get("config") is not None:
        defaults.pop("files", None)
    return {key: _parsed(cls, key, value) for key, value in {**defaults, **raw}.items()}


def _parsed(cls: type[Config], key: str, value: Any) -> Any:
    """An array or table as what its field makes of it: behind a validator, strict fields take no JSON any more."""
    if key not in cls.model_fields or not isinstance(value, list | dict):
        return value
    annotation: Any = cls.model_fields[key].annotation
    return TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)


Elsewhere = Hub | Address | Remote | PresetSource


def pieces(source: Elsewhere) -> list[SourceChunk]:
    """Every file of a source, not downloaded yet. Raises DataError where it has none, or its host does not answer."""
    files: list[WebFile] | list[RemoteFile] = _listing(source)
    listed = [SourceChunk(f.name, ((f.name, json.dumps(dataclasses.asdict(f))),), f.num_bytes or 0) for f in files]
    if source.max_bytes is None and source.max_documents is None:
        return listed
    return sorted(listed, key=lambda piece: hashlib.sha256(f"{source.name}/{piece.name}".encode()).digest())


def items(source: Elsewhere, piece: SourceChunk) -> Iterator[DocumentItem]:
    """The documents of one file, which is downloaded first, and what it rejects. Raises DataError and RunError."""
    for name, file_json in piece.members:
        if isinstance(source, Remote):
            stored = TypeAdapter(RemoteFile).validate_json(file_json)
            path, url = copied(stored, attempts=source.attempts, offline=source.offline), stored.address
        else:
            path, url = _downloaded(source, TypeAdapter(WebFile).validate_json(file_json))
        try:
            yield from read.items(source, path, name, form=source.format, url=url)
        except DataError as error:
            raise DataError(error.what, where=f"{url} ({error.where})", hint=error.hint) from None


def digest(source: Elsewhere) -> str:
    """
    What names the content of all files, without any of them: a commit, a sha256, or what their servers call them.

    Raises DataError where a host has to be asked and does not answer.
    """
    if (repository := _repository(source)) is not None:
        return download.digest(repository)
    if isinstance(source, Address | PresetSource) and source.sha256 is not None:
        return source.sha256
    return core_io.sha256_bytes(core_io.canonical([[file.name, *file.content] for file in _listing(source)]))


def pinned(source: Elsewhere) -> str | None:
    """The version that is read, as a person can ask for it again: a commit or a sha256. Asks nobody twice."""
    if (repository := _repository(source)) is not None:
        return f"{repository.dataset}@{download.commit(repository)}"
    return source.sha256 if isinstance(source, Address | PresetSource) else None


def _repository(source: Elsewhere) -> Repository | None:
    """The data set of the hub that a source reads, if it reads one."""
    if not isinstance(source, FromHub) or (isinstance(source, PresetSource) and source.address is not None):
        return None
    return source.repository


def _listing(source: Elsewhere) -> list[WebFile] | list[RemoteFile]:
    if (repository := _repository(source)) is not None:
        assert isinstance(source, FromHub)
        return download.listing(repository, source.files, config=source.config, split=source.split)
    if isinstance(source, Remote):
        return _in_store(source)
    assert isinstance(source, Address | PresetSource)
    return [_at_address(source)]


def _in_store(source: Remote) -> list[RemoteFile]:
    """What a store lists, and offline what it listed the last time."""
    note = cache.root() / "listings" / f"{core_io.sha256_bytes(core_io.canonical(source.patterns))}.json"
    if source.offline:
        if (known := cache.load_note(note, list[dict[str, Any]])) is None:
            raise download.not_cached(", ".join(source.patterns), "what is there")
        return [TypeAdapter(RemoteFile).validate_json(json.dumps(one)) for one in known]
    files = listing(source.patterns, attempts=source.attempts)
    cache.save_note(note, [dataclasses.asdict(file) for file in files])
    return files


def _at_address(source: Address | PresetSource) -> WebFile:
    address = source.address
    assert address is not None
    addresses, name = (address, *source.mirrors), unquote(urlsplit(address).path).rpartition("/")[2] or "file"
    if source.sha256 is not None:
        return WebFile(name, addresses, Content("sha256", source.sha256))
    note = cache.root() / "addresses" / f"{core_io.sha256_bytes(address.encode())}.json"
    known = cache.load_note(note, Version)
    if source.offline:
        if known is None:
            raise download.not_cached(http_client.shown(address))
        seen = known
    else:
        try:
            seen = download.version(address, attempts=source.attempts)
        except RefusedError as error:
            hint = error.hint or "Check the address and the network."
            raise DataError(str(error), where=http_client.shown(address), hint=hint) from None
        if seen != known:
            cache.save_note(note, seen)
    if seen["sha256"] is not None:
        return WebFile(name, addresses, Content("sha256", seen["sha256"]), seen["num_bytes"])
    version = core_io.sha256_bytes(core_io.canonical([address, seen["etag"], seen["num_bytes"]]))
    return WebFile(name, addresses, Content("etag", version), seen["num_bytes"], seen["etag"])


def _downloaded(source: Elsewhere, file: WebFile) -> tuple[Path, str]:
    """The path of a file, and the address that its documents state as their origin, the same for all mirrors."""
    if (repo := _repository(source)) is not None:
        return from_hub(repo, file)
    path = download.download(file, attempts=source.attempts, offline=source.offline)
    return path, http_client.shown(file.addresses[0])


def from_hub(repository: Repository, file: WebFile) -> tuple[Path, str]:
    """Where a file of the hub is now, downloaded if it has to be, and its name there: data set, commit and file."""
    offline = repository.cut_off
    token = None if offline else download.token()
    path = download.download(file, attempts=repository.attempts, token=token, offline=offline)
    commit = file.addresses[0].partition("/resolve/")[2].partition("/")[0]
    return path, f"hf://datasets/{repository.dataset}@{commit}/{file.name}"
