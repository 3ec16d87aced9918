"""
Files in buckets and other stores, through fsspec: s3://, gs://, http(s):// folders, and what else it knows.

Patterns are listed, and what the store says of a file (size, ETag, generation, times) names its content. A file is
copied into the cache in ranges, so that a copy that was cut goes on; at the end the store is asked again, and a file
that changed meanwhile is an error. Who may read is the affair of each store's own settings in the environment.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec

from bloomery.core import files
from bloomery.core.errors import DataError, UnreachableError
from bloomery.core.log import say
from bloomery.data import cache, extras, hosts, web_files
from bloomery.data.cache import Content
from bloomery.data.hosts import PassingError, RefusedError
from bloomery.data.web_files import WebFile

RANGE_BYTES = 8 << 20
NEEDS = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
}
"""Scheme -> package and extra."""
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
    found: dict[str, dict[str, Any]] = {}
    for pattern in patterns:
        matching = _asked(pattern, partial(_glob, pattern), attempts)
        if not matching:
            raise DataError("no file matches", where=hosts.shown(pattern), cure="See whether the folder is spelled so.")
        found |= matching
    places = {address: _place(address) for address in found}
    folder = os.path.commonpath([os.path.dirname(place) for place in places.values()])
    return [
        RemoteFile(
            name=os.path.relpath(places[address], folder),
            address=address,
            content=Content("etag", files.sha256_bytes(files.canonical([address, _facts(info)]))),
            num_bytes=int(info.get("size") or 0),
            facts=_facts(info),
        )
        for address, info in sorted(found.items())
    ]


def _place(address: str) -> str:
    parts = urlsplit(address)
    return (parts.netloc or parts.scheme) + parts.path


def _glob(pattern: str) -> dict[str, dict[str, Any]]:
    """Address -> what the store says of it."""
    system, path = _system(pattern)
    found = system.glob(path, detail=True) if any(mark in path for mark in "*?[") else {path: system.info(path)}
    return {
        system.unstrip_protocol(name): system.info(name) if urlsplit(pattern).scheme in ("http", "https") else info
        for name, info in found.items()
        if info["type"] == "file"
    }


def _system(address: str) -> tuple[Any, str]:
    """A file system that remembers no listings, and the path in it."""
    scheme = urlsplit(address).scheme
    if scheme in NEEDS:
        package, extra = NEEDS[scheme]
        extras.load(package, extra=extra)
    try:
        found: tuple[Any, str] = fsspec.url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        cure = f"Install what fsspec needs for {scheme}://, or see whether the address is spelled so."
        raise DataError(f"is no store that can be read here: {error}", where=address, cure=cure) from None
    return found


def _facts(info: dict[str, Any]) -> dict[str, str]:
    """What names a version, as text. The same store tells times as dates in one place and as seconds in another."""
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
        return web_files.download(web, attempts=attempts, offline=offline)
    place = cache.place(file.content, file.name)
    if place.is_file():
        return place
    if offline:
        cure = "Run once without offline, or point BLOOMERY_CACHE at the cache that has it."
        raise UnreachableError(
            f"is not in the cache {cache.root()}, and this is offline mode", where=file.address, cure=cure
        )
    with cache.locked(place):
        if not place.is_file():
            _copy(file, place, attempts)
    return place


def _copy(file: RemoteFile, place: Path, attempts: int) -> None:
    begun_file = place.with_name(place.name + files.PARTIAL)
    with files.disk_errors(begun_file):
        target = begun_file.open("ab", buffering=0)
    with target:
        if target.tell() > file.num_bytes:
            target.truncate(0)
        said = time.monotonic()
        while (begun := target.seek(0, os.SEEK_END)) < file.num_bytes:
            end = min(begun + RANGE_BYTES, file.num_bytes)
            cache.append(target, _asked(file.address, partial(_range, file.address, begun, end), attempts))
            if time.monotonic() - said > 30:
                said = time.monotonic()
                say(f"{file.name}: {end / 2**20:,.0f} of {file.num_bytes / 2**20:,.0f} MiB", style="dim")
        os.fsync(target.fileno())
    now = _facts(_asked(file.address, partial(_glob, file.address), attempts)[file.address])
    if any(now[name] != file.facts[name] for name in now.keys() & file.facts.keys()):  # lists tell less than files do
        begun_file.unlink()
        cure = "Run the same command again: it then begins with the new version."
        raise DataError("has changed since it was listed", where=file.address, cure=cure)
    begun_file.replace(place)
    files.sync_folder(place.parent)


def _range(address: str, begin: int, end: int) -> bytes:
    system, path = _system(address)
    data: bytes = system.cat_file(path, start=begin, end=end)
    if len(data) != end - begin:
        raise PassingError(f"gave {len(data):,} bytes from {begin:,} on instead of {end - begin:,}")
    return data


def _asked(address: str, question: Callable[[], T], attempts: int) -> T:
    """What a store answers, asked again while it is only out of order. Raises DataError."""
    where = hosts.shown(address)

    def translated() -> T:
        try:
            return question()
        except FileNotFoundError:
            raise RefusedError("there is no such file or folder", "See whether it is spelled so.") from None
        except PermissionError as error:
            raise RefusedError(f"may not be read: {error}", _SIGN_IN) from None
        except _errors() as error:
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"):
                raise RefusedError(str(error), _SIGN_IN) from None
            raise PassingError(f"cannot be asked: {error}") from None

    try:
        return hosts.patiently(translated, attempts=attempts, what=where)
    except RefusedError as error:
        raise DataError(str(error), where=where, cure=error.cure or "Look at the network and at the address.") from None


_SIGN_IN = "Set the store's keys in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or gcloud's login)."


def _errors() -> tuple[type[Exception], ...]:
    loaded = [(sys.modules[module], name) for module, name in ERRORS if module in sys.modules]
    return (OSError, *(getattr(module, name) for module, name in loaded))
