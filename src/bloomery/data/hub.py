"""
Data sets of the Hugging Face hub: which commit a revision is, and the files of that commit, through the hub's client.

A revision is resolved to a commit once in a process, and the commit pins every byte: it is what the fingerprint holds,
and what files are downloaded from. Listings of a commit never change, so they are kept in the cache; offline, what the
cache knows is all there is.
"""

import importlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as remembered
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import quote

from typing_extensions import TypedDict

from bloomery.core import files
from bloomery.core.errors import DataError, UnreachableError
from bloomery.core.log import say
from bloomery.data import cache, hosts
from bloomery.data.cache import Content
from bloomery.data.hosts import PassingError, RefusedError
from bloomery.data.web_files import WebFile

ENDPOINT = "https://huggingface.co"
COMMIT = re.compile(r"[0-9a-f]{40}")
TRUE = ("1", "ON", "YES", "TRUE")
READABLE = re.compile(r"^(?!(?:.*/)?README\.md$).*\.(txt|md|html?|jsonl?|csv|tsv|parquet|warc|wet)(\.(gz|zst))?$")
"""Names of files that can hold documents: what is taken where a recipe names neither files nor a config."""

T = TypeVar("T")


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
    found: str | None = _client().get_token()
    return hosts.secret(found, "HF_TOKEN") if found else found


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
    note = cache.dataset_folder(repository.dataset) / "refs" / f"{quote(repository.revision, safe='')}.json"
    before = cache.known(note, NotedCommit)
    if repository.cut_off:
        if before is None:
            what = f"revision {repository.revision!r} is not in the cache {cache.root()}, and this is offline mode"
            raise UnreachableError(what, where=repository.dataset, cure=_ONLINE)
        return str(before["commit"])
    found = str(_ask(repository, lambda api: api.dataset_info(repository.dataset, revision=repository.revision).sha))
    if before is not None and before["commit"] != found:
        say(
            f"{repository.dataset}: revision {repository.revision!r} is now {found}; on {before['seen']} it was "
            f'{before["commit"]}. What was fetched then is not used. To keep it: revision = "{before["commit"]}"',
            style="yellow",
        )
    if before is None or before["commit"] != found:
        cache.note(note, {"commit": found, "seen": time.strftime("%Y-%m-%d", time.gmtime())})
    return found


_ONLINE = "Run once without offline and HF_HUB_OFFLINE, or point BLOOMERY_CACHE at the cache that has it."


def digest(repository: Repository) -> str:
    """What joins the fingerprint: the data set and its commit, which pin every file."""
    return files.sha256_bytes(files.canonical([repository.dataset, commit(repository)]))


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
    wanted = [_matcher(pattern) for pattern in patterns] or [READABLE.search]
    found = [row for row in rows if any(fits(row["path"]) for fits in wanted)]
    if not found:
        near = ", ".join(row["path"] for row in rows[:5]) or "no file there"
        what = f"has no file that matches {', '.join(patterns) or 'a known format'} at {commit(repository)[:12]}"
        raise DataError(what, where=repository.dataset, cure=f"It has: {near} … See {repository.page}/tree/main")
    return [_web_file(repository, row) for row in found]


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
    note = cache.dataset_folder(repository.dataset) / sha / f"tree-{quote(folder or '', safe='')}.json"
    whole = note.with_name("tree-.json")
    for known in (note, whole):
        if (rows := cache.known(known, list[NotedFile])) is not None:
            return [row for row in rows if row["path"].startswith(f"{folder}/" if folder else "")]
    if repository.cut_off:
        what = f"the list of its files at {sha[:12]} is not in the cache {cache.root()}, and this is offline mode"
        raise UnreachableError(what, where=repository.dataset, cure=_ONLINE)

    def ask(api: Any) -> list[NotedFile]:
        found = api.list_repo_tree(
            repository.dataset, path_in_repo=folder, recursive=True, revision=sha, repo_type="dataset"
        )
        return [
            {"path": f.path, "size": f.size, "git": f.blob_id, "sha256": f.lfs.sha256 if f.lfs else None}
            for f in found
            if hasattr(f, "blob_id")
        ]

    rows = sorted(_ask(repository, ask), key=lambda row: str(row["path"]))
    cache.note(note, rows)
    return rows


def _of_config(repository: Repository, config: str, split: str) -> list[str]:
    """The globs that the data set's card declares for a config and split."""
    note = cache.dataset_folder(repository.dataset) / commit(repository) / "configs.json"
    declared = cache.known(note, dict[str, dict[str, list[str]]])
    if declared is None:
        if repository.cut_off:
            what = f"its configs are not in the cache {cache.root()}, and this is offline mode"
            raise UnreachableError(what, where=repository.dataset, cure=_ONLINE)
        declared = _ask(repository, lambda api: _configs(api, repository))
        cache.note(note, declared)
    if config not in declared:
        cure = f'Its configs: {", ".join(declared) or "none"}. Or name files = ["folder/*.parquet"].'
        raise DataError(f"its card declares no config {config!r}", where=repository.dataset, cure=cure)
    patterns: list[str] = declared[config].get(split, [])
    if not patterns:
        cure = f"Its splits: {', '.join(declared[config]) or 'none'}."
        raise DataError(f"config {config!r} has no split {split!r}", where=repository.dataset, cure=cure)
    return patterns


def _configs(api: Any, repository: Repository) -> dict[str, dict[str, list[str]]]:
    """Config -> split -> globs, as in the head of the data set's card. What has no split is `train`."""
    card = api.dataset_info(repository.dataset, revision=commit(repository)).card_data
    found: dict[str, dict[str, list[str]]] = {}
    for entry in (card.get("configs") if card else None) or []:
        given = entry.get("data_files") or []
        splits = found.setdefault(str(entry.get("config_name", "default")), {})
        for item in given if isinstance(given, list) else [given]:
            item = item if isinstance(item, dict) else {"path": item}
            paths = item.get("path") or []
            globs = paths if isinstance(paths, list) else [paths]
            splits.setdefault(str(item.get("split", "train")), []).extend(str(glob) for glob in globs)
    return found


def _folder(patterns: Sequence[str]) -> str | None:
    """The folder that all patterns lie in, so that no more than it has to be listed."""
    folders = [[*itertools.takewhile(_is_plain, pattern.split("/")[:-1])] for pattern in patterns]
    shared = [parts[0] for parts in itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))]
    return "/".join(shared) or None


def _is_plain(part: str) -> bool:
    return not re.search(r"[*?]", part)


def _matcher(pattern: str) -> Callable[[str], Any]:
    """A glob as a test: `*` and `?` stay within a folder, `**` does not."""
    marks = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(marks.get(part, re.escape(part)) for part in parts) + r"\Z").match


def _ask(repository: Repository, question: Callable[[Any], T]) -> T:
    """What the first endpoint that can answer says. Raises DataError, which names the cure."""
    failures = []
    for number, endpoint in enumerate(repository.endpoints):
        own = token() if number == 0 else None
        api = _client().HfApi(endpoint=endpoint, token=own or False, library_name="bloomery")
        call = _translated(partial(question, api), repository)
        try:
            return hosts.patiently(call, attempts=repository.attempts, what=repository.dataset)
        except RefusedError as error:
            failures.append(error)
            if number + 1 < len(repository.endpoints):
                say(f"{repository.dataset}: {hosts.shown(endpoint)}: {error}; asking a mirror", style="yellow")
    told = zip(repository.endpoints, failures, strict=True)
    what = "the hub does not list it: " + "; ".join(f"{hosts.shown(endpoint)}: {error}" for endpoint, error in told)
    cure = next((failure.cure for failure in failures if failure.cure), "Look at the network, or set offline = true.")
    raise DataError(what, where=repository.dataset, cure=cure)


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
            raise hosts.trouble(403, {"X-Error-Code": "GatedRepo"} | _said(error), repository.page) from None
        except errors.RepositoryNotFoundError:
            cure = f"See whether {repository.page} exists; for a private one set HF_TOKEN to a token that may read it."
            raise RefusedError("is not on the hub, or is private", cure) from None
        except errors.HfHubHTTPError as error:
            response = error.response
            raise hosts.trouble(response.status_code, response.headers, repository.page) from None
        except transport as error:
            raise PassingError(f"the connection failed: {error}") from None

    return translated


def _said(error: Any) -> dict[str, str]:
    return {"X-Error-Message": error.server_message} if getattr(error, "server_message", None) else {}


@remembered
def _client() -> ModuleType:
    """The hub's client, which takes a third of a second to import: only where the hub is asked."""
    return importlib.import_module("huggingface_hub")


def _transport() -> type[Exception]:
    """The base of the errors of the HTTP library that the hub's client uses, which differs between its versions."""
    library = type(_client().utils.get_session()).__module__.partition(".")[0]
    error: type[Exception] = sys.modules[library].HTTPError
    return error
