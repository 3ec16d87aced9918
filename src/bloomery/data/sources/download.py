"""
Downloads files over HTTP and from the Hugging Face hub into a cache, resumable and verified.

Downloads: they resume where they were interrupted, wait when a server asks for it, and are verified before they
count. A download is a loop over addresses (mirrors, in order), and for each address over attempts. Received bytes
stay in a .partial file. The next attempt, in this process or a later one, asks for the rest (Range). The file must
still be the same (If-Range). If the hash of the content is known, the complete file is checked at the end instead.

Cache: one folder for all runs, with each file under the name of its content, complete or partial.

    $BLOOMERY_CACHE or ~/.cache/bloomery
      blobs/ab/sha256-ab12….parquet            a complete, verified file
      blobs/ab/sha256-ab12….parquet.partial    a partial file, with .from.json next to it: the origin of its bytes
      hub/OWNER--NAME/                         which commit a revision was, and the files of that commit
      addresses/                               what a plain address last reported about its file
      hashes/                                  SHA-256 of large local files, as they were (core/cache.py)

The cache can be deleted at any time: missing files are downloaded again. A run removes nothing from it.

Hub: data sets are read through the hub's own client. A revision is resolved to a commit once per process, and the
commit pins every byte. The fingerprint holds the commit, and files are downloaded from it. Listings of a commit
never change, so the cache keeps them. Offline, only what the cache knows is available.

Downloads, cache and hub share one file because each download passes through all of them.
"""

import hashlib
import importlib
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as remembered
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

from typing_extensions import TypedDict

from bloomery.core import io as core_io
from bloomery.core.cache import load_note, locked, root, save_note
from bloomery.core.errors import DataError, RunError, UnreachableError
from bloomery.core.log import info
from bloomery.data.sources import http_client
from bloomery.data.sources.http_client import PassingError, RefusedError

LONGEST_SUFFIXES = 24
T = TypeVar("T")


class Content(NamedTuple):
    """
    What a file's content is called before it is downloaded.

    `sha256` and `git` can be checked afterwards. `git` is the name of a blob: sha1 over a header and the bytes. `etag`
    is a hash of an address and of the version that its server names, and is only as good as that server.
    """

    kind: Literal["sha256", "git", "etag"]
    value: str


def cache_path(content: Content, name: str) -> Path:
    """Where a file of this content is, or will be. It keeps the suffixes of `name`, which say its format."""
    suffixes = "".join(PurePosixPath(name).suffixes)[-LONGEST_SUFFIXES:]
    return root() / "blobs" / content.value[:2] / f"{content.kind}-{content.value}{suffixes}"


def dataset_folder(dataset: str) -> Path:
    return root() / "hub" / dataset.replace("/", "--")


def append(file: FileIO, data: bytes) -> None:
    """
    Write all of the bytes at once, so that a process that is killed has left what it was given.

    Raises RunError where the disk is full.
    """
    rest = memoryview(data)
    with core_io.disk_errors(Path(str(file.name))):
        while rest:
            rest = rest[file.write(rest) :]  # a disk that gets full takes a part, and then raises


CHUNK_BYTES = 1 << 18
PROGRESS_BYTES = 1 << 20
"""An attempt that brings less than this does not count as progress."""
UNCHECKED_BYTES, RESERVED_BYTES = 64 << 20, 1 << 30
"""Of a file of unknown size: how often the free disk is looked at, and how much of it such a file leaves."""
SECONDS_BETWEEN_LINES = 30.0
WORTH_A_LINE_BYTES = 16 << 20


@dataclass(frozen=True)
class WebFile:
    """One file that hosts serve, and what is known of it before it is downloaded."""

    name: str
    """Of the file within its source; documents' ids hold it."""
    addresses: tuple[str, ...]
    """Tried in this order. The first belongs to the host that the token is for."""
    content: Content
    num_bytes: int | None = None
    etag: str | None = None
    """Of the version that `content` stands for, where it stands for an address and its version."""
    page: str = ""
    """Where a person accepts the terms of a gated data set."""


class WrongBytesError(Exception):
    """The file is whole and is not the one that was asked for."""


def download(file: WebFile, *, attempts: int, token: str | None = None, offline: bool = False) -> Path:
    """
    The path of a file in the cache, downloaded if it is not there. Two processes at once download it once.

    `attempts` failures in a row, between which less than a mebibyte came, end an address. Bytes of a wrong hash are
    fetched once more from the start. `token` goes to the host of the first address only, also after a redirect.
    Raises DataError where no address gives the file, and RunError where the disk is full, or nearly so by a file of
    unknown size.
    """

    def fetch(path: Path) -> None:
        def at(address: str) -> None:
            own = token if http_client.host(address) == http_client.host(file.addresses[0]) else None
            _Download(file, path, address, own).run(attempts)

        hint = "Run the same command again later. The downloaded part is kept."
        _first(file.addresses, at, where=file.name, what="cannot be downloaded", hint=hint)

    return cached(file.content, file.name, file.num_bytes, fetch, where=file.name, offline=offline)


def cached(
    content: Content, name: str, num_bytes: int | None, fetch: Callable[[Path], None], *, where: str, offline: bool
) -> Path:
    """
    The path of a file in the cache. `fetch` writes it if it is missing, or has another size than it should have. Two
    processes at once fetch it once. Raises UnreachableError where it would have to be fetched offline.
    """
    path = cache_path(content, name)

    def is_whole() -> bool:
        return path.is_file() and num_bytes in (None, path.stat().st_size)

    if is_whole():
        return path
    if offline:
        raise not_cached(where)
    with locked(path):
        if not is_whole():
            fetch(path)
    return path


def not_cached(where: str, subject: str = "") -> UnreachableError:
    """The error of offline mode, to be raised; `subject` is what is missing, where it is not `where` itself."""
    hint = "Run once without offline and HF_HUB_OFFLINE, or set BLOOMERY_CACHE to a cache that has it."
    what = f"{subject} is not in the cache {root()}, and offline mode is on".lstrip()
    return UnreachableError(what, where=where, hint=hint)


def _first(addresses: Sequence[str], ask: Callable[[str], T], *, where: str, what: str, hint: str) -> T:
    """What the first address gives that does not refuse. Raises DataError with the reason of every address."""
    failures: list[RefusedError] = []
    for number, address in enumerate(addresses, 1):
        try:
            return ask(address)
        except RefusedError as error:
            failures.append(RefusedError(f"{http_client.shown(address)}: {error}", error.hint))
            if number < len(addresses):
                mirror = http_client.shown(addresses[number])
                info(f"{where}: {failures[-1]}; trying the mirror {mirror}", style="yellow")
    reasons = "; ".join(map(str, failures))
    hint = next((failure.hint for failure in failures if failure.hint), hint)
    raise DataError(f"{what}: {reasons}", where=where, hint=hint)


class _Download:
    """One file from one address."""

    def __init__(self, file: WebFile, path: Path, address: str, token: str | None) -> None:
        self.file, self.path, self.address, self.token = file, path, address, token
        self.partial = path.with_name(path.name + core_io.PARTIAL)
        self.origin = path.with_name(path.name + ".from.json")
        self._said = time.monotonic()

    def run(self, attempts: int) -> None:
        """Raises RefusedError after too many failures, or at once where another attempt would be the same."""
        failures, reached, second_try = 0, self._begun(), False
        if (self.file.num_bytes or 0) >= WORTH_A_LINE_BYTES:
            info(f"{self.file.name}: downloading {self._so_far()}", style="dim")
        while True:
            try:
                self._request()
                self._take()
                return
            except WrongBytesError as error:
                self._discard()
                if second_try:
                    raise RefusedError(
                        f"{error}, twice", "Report it to the owner of the server, or use a mirror."
                    ) from None
                second_try, reached = True, 0
                info(f"{self.file.name}: {error}; fetching it again", style="yellow")
            except PassingError as error:
                begun = self._begun()
                progressed = begun >= reached + PROGRESS_BYTES
                failures, reached = (1 if progressed else failures + 1), max(reached, begun)
                if failures >= attempts:
                    raise RefusedError(f"{error} ({failures} attempts)") from None
                http_client.wait(failures, error, self.file.name)

    def _begun(self) -> int:
        return self.partial.stat().st_size if self.partial.is_file() else 0

    def _discard(self) -> None:
        self.partial.unlink(missing_ok=True)
        self.origin.unlink(missing_ok=True)

    def _request(self) -> None:
        """One request for what is missing; what comes is appended. Raises PassingError where it ends too early."""
        begun = self._begun()
        if begun and begun == self.file.num_bytes:
            return
        if self.file.num_bytes is not None and begun > self.file.num_bytes:
            raise WrongBytesError(f"has more than the expected {self.file.num_bytes:,} bytes")
        condition = self._rest(begun) if begun else None
        with http_client.asked(
            "GET", self.address, token=self.token, headers=condition, page=self.file.page
        ) as response:
            if response.status == 416:
                self._discard()
                raise PassingError(f"the server has no bytes from {begun:,} on")
            if response.status == 206 and condition:
                self._check_range(response, begun)
            elif response.status == 200:
                begun = 0
            else:
                raise RefusedError(f"answered HTTP {response.status} to a request for a file")
            self._check_version(response)
            self._receive(response, begun)

    def _rest(self, begun: int) -> dict[str, str] | None:
        """Headers that ask for the rest of a partial file; None if nothing shows that the rest still fits."""
        origin = load_note(self.origin, dict[str, Any]) or {}
        etag = origin.get("etag") if origin.get("address") == self.address else None
        strong = isinstance(etag, str) and not etag.startswith("W/")
        if strong and etag:
            return {"Range": f"bytes={begun}-", "If-Range": etag}
        return {"Range": f"bytes={begun}-"} if self.file.content.kind != "etag" else None

    def _check_range(self, response: Any, begun: int) -> None:
        said = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if not said or int(said[1]) != begun:
            self._discard()
            raise PassingError("the server sent a range that was not requested")
        if said[2] != "*" and self.file.num_bytes not in (None, int(said[2])):
            raise WrongBytesError(f"has {int(said[2]):,} bytes instead of {self.file.num_bytes:,}")

    def _check_version(self, response: Any) -> None:
        etag = _named(response.headers)
        if self.file.content.kind == "etag" and self.file.etag and etag and etag != self.file.etag:
            self._discard()
            hint = "Run the same command again to use the new version."
            raise DataError("has changed on its server since this run began", where=self.file.name, hint=hint)

    def _receive(self, response: Any, begun: int) -> None:
        with core_io.disk_errors(self.partial):
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            if begun == 0:
                self._discard()
            core_io.write_json(self.origin, {"address": self.address, "etag": _named(response.headers)})
            file = self.partial.open("ab", buffering=0)
        with file:
            # Decoding goes through a buffer that is lost where the connection ends, so only what is encoded is decoded.
            encoded = response.headers.get("Content-Encoding", "identity") != "identity"
            unchecked = 0
            for chunk in response.stream(CHUNK_BYTES, decode_content=encoded):
                if self.file.num_bytes is not None and begun + len(chunk) > self.file.num_bytes:
                    raise WrongBytesError(f"has more than {self.file.num_bytes:,} bytes")
                append(file, chunk)
                begun, unchecked = begun + len(chunk), unchecked + len(chunk)
                if self.file.num_bytes is None and unchecked >= UNCHECKED_BYTES:
                    self._check_room(begun)
                    unchecked = 0
                if time.monotonic() - self._said > SECONDS_BETWEEN_LINES:
                    self._said = time.monotonic()
                    info(f"{self.file.name}: {self._so_far()}", style="dim")
        if self.file.num_bytes is not None and begun < self.file.num_bytes:
            raise PassingError(f"the connection ended after {begun:,} of {self.file.num_bytes:,} bytes")

    def _check_room(self, begun: int) -> None:
        """Raises RunError where a file of unknown size has left too little of the disk: it may be without end."""
        free = shutil.disk_usage(self.partial.parent).free
        if free < RESERVED_BYTES:
            came = f"{begun / 2**30:,.1f} GiB came of a file whose size its server does not say"
            hint = "Set BLOOMERY_CACHE to a folder on a larger disk. If the file cannot be that large, remove it"
            raise RunError(
                f"{came}, and {free / 2**30:,.1f} GiB of the disk are free",
                where=str(self.partial),
                hint=f"{hint} and use another address for {self.file.name}.",
            )

    def _so_far(self) -> str:
        total = f" of {self.file.num_bytes / 2**20:,.0f}" if self.file.num_bytes else ""
        return f"{self._begun() / 2**20:,.0f}{total} MiB"

    def _take(self) -> None:
        """Give the file its name, if it is the one that was asked for. Raises WrongBytesError."""
        size = self._begun()
        if self.file.num_bytes not in (None, size):
            raise WrongBytesError(f"has {size:,} bytes instead of {self.file.num_bytes:,}")
        with self.partial.open("rb") as file:
            actual = _hash(file, self.file.content.kind, size)
            if actual is not None and actual != self.file.content.value:
                kind = "sha256" if self.file.content.kind == "sha256" else "git hash"
                raise WrongBytesError(f"has the {kind} {actual}, expected {self.file.content.value}")
            with core_io.disk_errors(self.partial):
                os.fsync(file.fileno())
        with core_io.disk_errors(self.path):
            self.partial.replace(self.path)
            self.origin.unlink(missing_ok=True)
        core_io.sync_folder(self.path.parent)


def _named(headers: Mapping[str, str]) -> str | None:
    """What a server calls the version of a file; either may stand in If-Range (RFC 9110, 13.1.5)."""
    return headers.get("ETag") or headers.get("Last-Modified")


def _hash(file: Any, kind: str, size: int) -> str | None:
    """What a file's content is called, or None where its name is not made from its bytes."""
    if kind == "sha256":
        return hashlib.file_digest(file, "sha256").hexdigest()
    if kind == "git":
        return hashlib.file_digest(file, lambda: hashlib.sha1(f"blob {size}\0".encode())).hexdigest()
    return None


class Version(TypedDict):
    """What a server says about a file without sending it."""

    etag: str | None
    num_bytes: int | None
    sha256: str | None


def version(address: str, *, attempts: int) -> Version:
    """
    Ask a server which version of a file it has. Raises RefusedError.

    A sha256 is known where the address is the hub's (X-Linked-Etag). Servers that know no HEAD are asked for one byte.
    """

    def ask(method: str, headers: Mapping[str, str]) -> Version:
        with http_client.asked(method, address, headers=headers) as response:
            length = response.headers.get("Content-Length") if response.status == 200 else None
            return _version(response.headers, response.headers.get("Content-Range", "").rpartition("/")[2] or length)

    def patiently(method: str, headers: Mapping[str, str]) -> Version:
        call = partial(ask, method, headers)
        return http_client.patiently(call, attempts=attempts, what=http_client.shown(address))

    try:
        return patiently("HEAD", {})
    except RefusedError as error:
        if not re.match(r"HTTP (403|405|501)", str(error)):
            raise
        return patiently("GET", {"Range": "bytes=0-0"})


def _version(headers: Mapping[str, str], length: str | None) -> Version:
    linked = headers.get("X-Linked-Etag", "").strip('"')
    size = headers.get("X-Linked-Size") or (None if headers.get("Content-Encoding") else length)
    return {
        "etag": _named(headers),
        "num_bytes": int(size) if size and size.isdecimal() else None,
        "sha256": linked if re.fullmatch(r"[0-9a-f]{64}", linked) else None,
    }


ENDPOINT = "https://huggingface.co"
COMMIT = re.compile(r"[0-9a-f]{40}")
TRUE = ("1", "ON", "YES", "TRUE")
READABLE = re.compile(r"^(?!(?:.*/)?README\.md$).*\.(txt|md|html?|jsonl?|csv|tsv|parquet|warc|wet)(\.(gz|zst))?$")
"""Names of files that can hold documents: what is taken where a recipe names neither files nor a config."""


@dataclass(frozen=True)
class Repository:
    """A data set as a recipe names it."""

    dataset: str
    revision: str = "main"
    endpoint: str | None = None
    mirrors: tuple[str, ...] = ()
    offline: bool = False
    attempts: int = 8

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The hub and its mirrors, in the order they are asked: the recipe's, else HF_ENDPOINT, else the hub itself."""
        first = self.endpoint or os.environ.get("HF_ENDPOINT") or ENDPOINT
        return tuple(address.rstrip("/") for address in (first, *self.mirrors))

    @property
    def cut_off(self) -> bool:
        """Whether nothing but the cache may be asked."""
        return self.offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE

    @property
    def page(self) -> str:
        """What a person opens in a browser."""
        return f"{self.endpoints[0]}/datasets/{self.dataset}"


def token() -> str | None:
    """The user's token: HF_TOKEN, or what `hf auth login` has left. It is never written, shown or handed on."""
    raw: str | None = _client().get_token()
    return http_client.secret(raw, "HF_TOKEN") if raw else raw


class NotedCommit(TypedDict):
    """Which commit a revision was, and on which day."""

    commit: str
    seen: str


class NotedFile(TypedDict):
    """A file of a commit."""

    path: str
    size: int | None
    git: str
    sha256: str | None


@lru_cache(maxsize=256)
def commit(repository: Repository) -> str:
    """
    The commit that a revision is, asked for once in a process. Says so where it was another one the last time.

    A revision that is a commit already is not asked for. Raises DataError where the hub cannot say, and offline where
    the cache does not know.
    """
    if COMMIT.fullmatch(repository.revision):
        return repository.revision
    note = dataset_folder(repository.dataset) / "refs" / f"{quote(repository.revision, safe='')}.json"
    before = load_note(note, NotedCommit)
    if repository.cut_off:
        if before is None:
            raise not_cached(repository.dataset, f"revision {repository.revision!r}")
        return str(before["commit"])
    sha = str(_ask(repository, lambda api: api.dataset_info(repository.dataset, revision=repository.revision).sha))
    if before is not None and before["commit"] != sha:
        info(
            f"{repository.dataset}: revision {repository.revision!r} is now {sha}; on {before['seen']} it was "
            f'{before["commit"]}. The earlier download stays unused. To keep it: revision = "{before["commit"]}"',
            style="yellow",
        )
    if before is None or before["commit"] != sha:
        save_note(note, {"commit": sha, "seen": time.strftime("%Y-%m-%d", time.gmtime())})
    return sha


def digest(repository: Repository) -> str:
    """What joins the fingerprint: the data set and its commit, which pin every file."""
    return core_io.sha256_bytes(core_io.canonical([repository.dataset, commit(repository)]))


def listing(
    repository: Repository, patterns: Sequence[str] = (), *, config: str | None = None, split: str = "train"
) -> list[WebFile]:
    """
    The files of a data set that match, sorted by name. Nothing is downloaded but their list.

    `patterns` are globs within the repository (`*` within a folder, `**` over folders). Without them, `config` is one
    of those that the data set's card declares, of which `split` is taken; without either, all files whose names say
    that they hold documents. Raises DataError where nothing matches.
    """
    if config is not None:
        patterns = _of_config(repository, config, split)
    rows = _tree(repository, _folder(patterns))
    matchers = [_matcher(pattern) for pattern in patterns] or [READABLE.search]
    matches = [row for row in rows if any(fits(row["path"]) for fits in matchers)]
    if not matches:
        near = ", ".join(row["path"] for row in rows[:5]) or "no file there"
        what = f"has no file that matches {', '.join(patterns) or 'a known format'} at {commit(repository)[:12]}"
        raise DataError(what, where=repository.dataset, hint=f"It has: {near} … See {repository.page}/tree/main")
    return [_web_file(repository, row) for row in matches]


def _web_file(repository: Repository, row: Mapping[str, Any]) -> WebFile:
    path = f"datasets/{repository.dataset}/resolve/{commit(repository)}/{quote(row['path'])}"
    return WebFile(
        name=row["path"],
        addresses=tuple(f"{endpoint}/{path}" for endpoint in repository.endpoints),
        content=Content("sha256", row["sha256"]) if row["sha256"] else Content("git", row["git"]),
        num_bytes=row["size"],
        page=repository.page,
    )


def _tree(repository: Repository, folder: str | None) -> list[NotedFile]:
    """The files below a folder of the pinned commit."""
    sha = commit(repository)
    notes = dataset_folder(repository.dataset) / sha
    if (rows := load_note(notes / "tree-.json", list[NotedFile])) is not None:
        return [row for row in rows if row["path"].startswith(f"{folder}/" if folder else "")]

    def ask(api: Any) -> list[NotedFile]:
        entries = api.list_repo_tree(
            repository.dataset, path_in_repo=folder, recursive=True, revision=sha, repo_type="dataset"
        )
        files: list[NotedFile] = [
            {"path": f.path, "size": f.size, "git": f.blob_id, "sha256": f.lfs.sha256 if f.lfs else None}
            for f in entries
            if hasattr(f, "blob_id")
        ]
        return sorted(files, key=lambda row: row["path"])

    note = notes / f"tree-{quote(folder or '', safe='')}.json"
    return _noted(repository, note, list[NotedFile], f"the list of its files at {sha[:12]}", ask)


def _noted(repository: Repository, note: Path, kind: Callable[..., T], subject: str, ask: Callable[[Any], T]) -> T:
    """What the cache has noted, or else what the hub answers, which is noted. Raises DataError."""
    if (known := load_note(note, kind)) is not None:
        return known
    if repository.cut_off:
        raise not_cached(repository.dataset, subject)
    answer = _ask(repository, ask)
    save_note(note, answer)
    return answer


def _of_config(repository: Repository, config: str, split: str) -> list[str]:
    """The globs that the data set's card declares for a config and split."""
    note = dataset_folder(repository.dataset) / commit(repository) / "configs.json"
    ask = partial(_configs, repository)
    declared = _noted(repository, note, dict[str, dict[str, list[str]]], "the list of its configs", ask)
    if config not in declared:
        hint = f'Use one of its configs: {", ".join(declared) or "none"}. Or set files = ["folder/*.parquet"].'
        raise DataError(f"its card declares no config {config!r}", where=repository.dataset, hint=hint)
    patterns = declared[config].get(split, [])
    if not patterns:
        hint = f"Use one of its splits: {', '.join(declared[config]) or 'none'}."
        raise DataError(f"config {config!r} has no split {split!r}", where=repository.dataset, hint=hint)
    return patterns


def _configs(repository: Repository, api: Any) -> dict[str, dict[str, list[str]]]:
    """Config -> split -> globs, as in the head of the data set's card. What has no split is `train`."""
    card = api.dataset_info(repository.dataset, revision=commit(repository)).card_data
    configs: dict[str, dict[str, list[str]]] = {}
    for entry in (card.get("configs") if card else None) or []:
        data_files = entry.get("data_files") or []
        splits = configs.setdefault(str(entry.get("config_name", "default")), {})
        for item in data_files if isinstance(data_files, list) else [data_files]:
            item = item if isinstance(item, dict) else {"path": item}
            paths = item.get("path") or []
            globs = paths if isinstance(paths, list) else [paths]
            splits.setdefault(str(item.get("split", "train")), []).extend(str(glob) for glob in globs)
    return configs


def _folder(patterns: Sequence[str]) -> str | None:
    """The folder that all patterns lie in, so that no more than it has to be listed."""
    folders = [[*itertools.takewhile(_is_plain, pattern.split("/")[:-1])] for pattern in patterns]
    shared = [parts[0] for parts in itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))]
    return "/".join(shared) or None


def _is_plain(name: str) -> bool:
    return not re.search(r"[*?]", name)


def _matcher(pattern: str) -> Callable[[str], Any]:
    """A glob as a test: `*` and `?` stay within a folder, `**` does not."""
    marks = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(marks.get(part, re.escape(part)) for part in parts) + r"\Z").match


def _ask(repository: Repository, question: Callable[[Any], T]) -> T:
    """What the first endpoint that can answer says. Raises DataError, which names the hint."""

    def at(endpoint: str) -> T:
        own = token() if endpoint == repository.endpoints[0] else None
        api = _client().HfApi(endpoint=endpoint, token=own or False, library_name="bloomery")
        call = _translated(partial(question, api), repository)
        return http_client.patiently(call, attempts=repository.attempts, what=repository.dataset)

    hint = "Check the network, or set offline = true."
    return _first(
        repository.endpoints, at, where=repository.dataset, what="the hub could not list its files", hint=hint
    )


def _translated(call: Callable[[], T], repository: Repository) -> Callable[[], T]:
    """A call of the hub's client whose errors are PassingError and RefusedError."""
    errors, transport = importlib.import_module("huggingface_hub.errors"), _transport()

    def translated() -> T:
        try:
            return call()
        except errors.RevisionNotFoundError:
            raise RefusedError(f"has no revision {repository.revision!r}", f"See {repository.page}/tree/main") from None
        except errors.EntryNotFoundError:
            raise RefusedError("has no such folder or file", f"See {repository.page}/tree/main") from None
        except errors.GatedRepoError as error:
            raise http_client.trouble(403, error.response.headers, repository.page) from None
        except errors.RepositoryNotFoundError:
            hint = f"Check that {repository.page} exists. If it is private, set HF_TOKEN to a token with read access."
            raise RefusedError("is not on the hub, or is private", hint) from None
        except errors.HfHubHTTPError as error:
            raise http_client.trouble(error.response.status_code, error.response.headers, repository.page) from None
        except transport as error:
            raise PassingError(f"the connection failed: {error}") from None

    return translated


@remembered
def _client() -> ModuleType:
    """The hub's client, which takes a third of a second to import: only where the hub is asked."""
    return importlib.import_module("huggingface_hub")


def _transport() -> type[Exception]:
    """The base of the errors of the HTTP library that the hub's client uses, which differs between its versions."""
    library = type(_client().utils.get_session()).__module__.partition(".")[0]
    error: type[Exception] = sys.modules[library].HTTPError
    return error
