"""
Models of a hub: hub:OWNER/NAME[/FILE.gguf][@REVISION] is a folder, or a file, in the cache of Hugging Face's client.

Only the files that are needed are fetched: configuration, tokenizer, and weights as safetensors, or one GGUF file. What
was cut off is resumed by the client. The cache names large files by their sha256, which is compared whenever a model
is opened. With HF_HUB_OFFLINE=1 only the cache is asked. HF_ENDPOINT names another hub, HF_TOKEN a token for it.
"""

import importlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bloomery.core import cache
from bloomery.core.config import HUB
from bloomery.core.errors import CheckpointError, UnreachableError
from bloomery.core.log import info

PREFIX = HUB
NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?")
SPELLED = "Write hub:OWNER/NAME, hub:OWNER/NAME@REVISION, or hub:OWNER/NAME/FILE.gguf."
FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "README.md")
"""Files at the top of a repository that a model may consist of, and its card, which states the license."""
SHA256 = re.compile(r"[0-9a-f]{64}")
TRUE = ("1", "ON", "YES", "TRUE")
T = TypeVar("T")


class HubModel(NamedTuple):
    """What a name says."""

    repository: str
    file: str | None
    revision: str | None


def parsed(name: str) -> HubModel:
    """The parts of a name. Raises CheckpointError for one that is none."""
    match = NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None or ".." in name:
        raise CheckpointError("names no model of a hub", where=name, hint=SPELLED)
    return HubModel(match["repository"], match["file"], match["revision"])


def fetched(name: str) -> Path:
    """
    The folder of a model in the cache, or its GGUF file, fetched where it is not there yet. Raises UnreachableError
    where the hub does not answer, CheckpointError where it has no such model or a file differs from its sha256.
    """
    model, offline = parsed(name), os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE
    client, endpoint = importlib.import_module("huggingface_hub"), os.environ.get("HF_ENDPOINT") or None
    patterns = [model.file] if model.file else list(FILES)
    if not offline:
        api = client.HfApi(endpoint=endpoint, library_name="bloomery")
        listed = _asked(name, lambda: api.model_info(model.repository, revision=model.revision, files_metadata=True))
        patterns = _needed(name, model, listed)
    folder = _asked(
        name,
        lambda: client.snapshot_download(
            model.repository,
            revision=model.revision,  # not its commit, for the cache keeps which commit a branch is, for offline use
            endpoint=endpoint,
            allow_patterns=patterns,
            ignore_patterns=None if model.file else ["*/*"],  # a pattern's * reaches into folders
            local_files_only=offline,
            library_name="bloomery",
        ),
    )
    path = Path(folder) / model.file if model.file else Path(folder)
    _verify(path, name)
    return path


def _needed(name: str, model: HubModel, listed: Any) -> list[str]:
    """The files to fetch. Raises CheckpointError where a model lacks them or the disk has no room."""
    sizes = {file.rfilename: file.size or 0 for file in listed.siblings}
    ggufs = sorted(file for file in sizes if file.endswith(".gguf"))
    if model.file is not None:
        if model.file not in sizes:
            shown = ", ".join(ggufs[:5]) or "none"
            raise CheckpointError(f"has no file {model.file}", where=name, hint=f"Its GGUF files: {shown}.")
        needed = [model.file]
    else:
        needed = [file for file in sizes if "/" not in file and any(fnmatchcase(file, one) for one in FILES)]
        if not any(file.endswith(".safetensors") for file in needed):
            hint = "Bloomery reads safetensors and GGUF files. Fetch pickled weights yourself, and name their file."
            if ggufs:
                hint = f"Name one of its GGUF files, as {PREFIX}{model.repository}/{ggufs[0]}"
            raise CheckpointError("has no weights as safetensors", where=name, hint=hint)
    cached = {file.rfilename for file in listed.siblings if _is_cached(model.repository, file)}
    size, room = sum(sizes[file] for file in needed), shutil.disk_usage(_nearest(_cache())).free
    missing = sum(sizes[file] for file in needed if file not in cached)
    if missing > room:
        hint = "Free some, or set HF_HOME to a folder on a larger disk."
        raise CheckpointError(f"takes {missing / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free", where=name, hint=hint)
    shown = f"{size / 1e9:.2f} GB, {missing / 1e9:.2f} GB of them to fetch"
    info(f"{name}: {len(needed)} files, {shown}, from {listed.sha[:12]}", "dim")
    return needed


def _is_cached(repository: str, file: Any) -> bool:
    """Whether the cache holds the content of a file that the hub lists, from whichever commit."""
    blob = file.lfs.sha256 if file.lfs else file.blob_id
    return bool(blob) and (_cache() / f"models--{repository.replace('/', '--')}" / "blobs" / blob).is_file()


def _cache() -> Path:
    return Path(importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE)


def _nearest(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _verify(path: Path, name: str) -> None:
    """Raises CheckpointError where a file of the cache differs from the sha256 that it is named by."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        blob = file.resolve()
        if SHA256.fullmatch(blob.name) and (actual := cache.sha256_of(blob)) != blob.name:
            what = f"{file.name} has the sha256 {actual[:12]}, and the hub says {blob.name[:12]}"
            raise CheckpointError(what, where=name, hint=f"It is damaged. Remove {blob}, and try again.")


def transport_errors(error: type[Exception]) -> tuple[type[Exception], ...]:
    """What the hub's client raises where nobody answers: versions of it use httpx or httpx2."""
    return tuple(kind for kind in error.__mro__ if kind.__name__ == "HTTPError")


def _asked(name: str, call: Callable[[], T]) -> T:
    """What the hub's client answers. Raises UnreachableError and CheckpointError in place of its own errors."""
    errors = importlib.import_module("huggingface_hub.errors")
    connection: Sequence[type[Exception]] = (*transport_errors(errors.HfHubHTTPError), ConnectionError, TimeoutError)
    try:
        return call()
    except errors.RevisionNotFoundError:
        raise CheckpointError("the hub has no such revision", where=name, hint=SPELLED) from None
    except errors.GatedRepoError:
        hint = "Accept its terms on its page, and set HF_TOKEN to a token of that account."
        raise CheckpointError("is open only to those who accept its terms", where=name, hint=hint) from None
    except errors.RepositoryNotFoundError:
        hint = "Check the name. For a private model, set HF_TOKEN to a token that may read it."
        raise CheckpointError("is not on the hub, or is private", where=name, hint=hint) from None
    except errors.LocalEntryNotFoundError:
        hint = "Fetch it once with a network and without HF_HUB_OFFLINE."
        raise UnreachableError("is not in the cache, and the hub was not reached", where=name, hint=hint) from None
    except (errors.HfHubHTTPError, *connection) as error:
        hint = "Check the network. To use the copy in the cache, set HF_HUB_OFFLINE=1."
        raise UnreachableError(f"the hub did not answer: {error}", where=name, hint=hint) from None
