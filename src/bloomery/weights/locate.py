"""
Find the folder with the weights of a run, stage, checkpoint or model that a person names, and fetch models of a hub.

hub:OWNER/NAME[/FILE.gguf][@REVISION] is a folder, or a file, in the cache of Hugging Face's client. Only the files that
are needed are fetched: configuration, tokenizer, and weights as safetensors, or one GGUF file. What was cut off is
resumed by the client. The cache names large files by their sha256, which is compared whenever a model is opened. With
HF_HUB_OFFLINE=1 only the cache is asked. HF_ENDPOINT names another hub, HF_TOKEN a token for it.
"""

import importlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bloomery.core import cache, records
from bloomery.core import io as core_io
from bloomery.core.config import HUB, is_of_hub
from bloomery.core.errors import CheckpointError, DataError, RunError, UnreachableError
from bloomery.core.io import MANIFEST, MAX_JSON_BYTES
from bloomery.core.log import info
from bloomery.core.records import CURRENT, finishing_command, read_manifest
from bloomery.weights.opened import ADAPTER_WEIGHTS, CONFIG, is_model
from bloomery.weights.safetensors import INDEX, WEIGHTS, WEIGHTS_SUFFIX, files_of_index

PREFIX = HUB
NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?")
NAMED = re.compile(rf"(?:{PREFIX})?((?:\w[\w.-]*/)?\w[\w.-]*)(?:@([\w./-]+))?")
"""What adapters may call a model of a hub; old names have no owner, such as gpt2."""
IN_CACHE = re.compile(r"models--(.+)")
"""The folder of a model in the cache of the hub's client."""
SPELLED = "Write hub:OWNER/NAME, hub:OWNER/NAME@REVISION, or hub:OWNER/NAME/FILE.gguf."
FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "README.md")
"""Files at the top of a repository that may lie next to the weights, and the card, which states the license."""
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
        raise CheckpointError("is not a model name of a hub", where=name, hint=SPELLED)
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

        def index() -> Path:
            of_commit = {"revision": listed.sha, "endpoint": endpoint, "library_name": "bloomery"}
            return Path(_asked(name, lambda: client.hf_hub_download(model.repository, INDEX, **of_commit)))

        patterns = _needed(name, model, listed, index)
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
    if offline and model.file is None:
        _check_weights(name, model, path)
    _verify(path, name)
    return path


def of_hub(folder: Path) -> tuple[str, str] | None:
    """OWNER/NAME, or an old name without owner, and the commit of a model folder in the cache of the hub's client."""
    match = IN_CACHE.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return None if match is None else (match[1].replace("--", "/"), folder.name)


def named_model(file: Path, named: str, revision: str | None = None) -> Path:
    """
    The base model that a file of adapters names: a path from the folder of that file or from the working directory, or
    OWNER/NAME of a hub in the cache. Nothing is fetched. Raises CheckpointError where none of them holds a model.
    """
    folder, below = file.parent, Path(named.removeprefix(PREFIX))
    where, hint = str(folder), f"Copy the base model there, or set its folder in {file.name}."
    try:
        below = below.expanduser()
        if (local := next(filter(is_model, (folder / below, below)), None)) is not None:
            return local.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # too long, or characters that no path has, or no such user
        raise CheckpointError(f"needs the base model {named!r}: {error}", where=where, hint=hint) from None
    at = f"{folder / below}" if below.is_absolute() else f"{folder / below} or {below} in the working directory"
    if (match := NAMED.fullmatch(named)) is None or ".." in named:
        raise CheckpointError(f"needs the base model {named}, which is not at {at}", where=where, hint=hint)
    repository, revision = match[1], match[2] or revision
    client = importlib.import_module("huggingface_hub")
    cached = client.try_to_load_from_cache(repository, CONFIG, revision=revision)
    if isinstance(cached, str) and is_model(Path(cached).parent):
        _verify(Path(cached).parent, named)
        return Path(cached).parent
    command = shlex.join(["hf", "download", repository, *(["--revision", revision] if revision else [])])
    what = f"needs the base model {named}, which is neither in the cache of the hub nor at {at}"
    raise CheckpointError(what, where=where, hint=f"If it is a model of the hub, run: {command}\n{hint}")


def _needed(name: str, model: HubModel, listed: Any, index: Callable[[], Path]) -> list[str]:
    """
    The files to fetch; `index` fetches the index of the weights, if they have one. Raises CheckpointError where a model
    lacks them or the disk has no room.
    """
    sizes = {file.rfilename: file.size or 0 for file in listed.siblings}
    if model.file is not None:
        if model.file not in sizes:
            shown = ", ".join(_ggufs(sizes)[:5]) or "none"
            raise CheckpointError(f"has no file {model.file}", where=name, hint=f"Its GGUF files: {shown}.")
        needed = [model.file]
    else:
        needed = [file for file in sizes if "/" not in file and any(fnmatchcase(file, one) for one in FILES)]
        needed += _weights(name, model, sizes, index)
    cached = {file.rfilename for file in listed.siblings if _is_cached(model.repository, file)}
    size, room = sum(sizes[file] for file in needed), shutil.disk_usage(core_io.nearest_folder(_cache())).free
    missing = sum(sizes[file] for file in needed if file not in cached)
    if missing > room:
        hint = "Free some space, or set HF_HOME to a folder on a larger disk."
        raise CheckpointError(f"needs {missing / 1e9:.1f} GB, but {room / 1e9:.1f} GB are free", where=name, hint=hint)
    shown = f"{size / 1e9:.2f} GB, {missing / 1e9:.2f} GB of them to fetch"
    info(f"{name}: {len(needed)} files, {shown}, from {listed.sha[:12]}", "dim")
    return needed


def _ggufs(names: Iterable[str]) -> list[str]:
    return sorted(file for file in names if file.endswith(".gguf"))


def _weights(name: str, model: HubModel, sizes: Mapping[str, int], index: Callable[[], Path]) -> list[str]:
    """The files of a repository whose weights are read. Raises CheckpointError where there are none."""
    weights = [file for file in (WEIGHTS, ADAPTER_WEIGHTS) if file in sizes]
    if WEIGHTS not in sizes and INDEX in sizes:
        if sizes[INDEX] > MAX_JSON_BYTES:
            what = f"{INDEX} has {sizes[INDEX]:,} bytes, more than {MAX_JSON_BYTES:,}"
            raise CheckpointError(what, where=name, hint="Use another copy of the model.")
        hint = "Use another revision or another copy of the model."
        shards = sorted({*files_of_index(index(), hint).values()})
        if missing := [file for file in shards if file not in sizes]:
            raise CheckpointError(f"has no file {missing[0]}, which {INDEX} names", where=name, hint=hint)
        weights += shards
    if weights:
        return weights
    hint = "Bloomery reads safetensors and GGUF files. Download pickled weights yourself and give their file."
    if ggufs := _ggufs(sizes):
        hint = f"Use one of its GGUF files, such as {PREFIX}{model.repository}/{ggufs[0]}"
    if others := sorted(file for file in sizes if "/" not in file and file.endswith(WEIGHTS_SUFFIX)):
        what = f"has {', '.join(others[:3])}, but no {WEIGHTS} and no {INDEX}"
        raise CheckpointError(what, where=name, hint=f"Use a copy in the layout of transformers. {hint}")
    raise CheckpointError("has no weights as safetensors", where=name, hint=hint)


def _check_weights(name: str, model: HubModel, folder: Path) -> None:
    """Raises UnreachableError where the cache lacks weights of a model, for example after an interrupted download."""
    try:
        sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
        _weights(name, model, sizes, lambda: folder / INDEX)
    except CheckpointError as error:
        hint = "Download it once with a network and without HF_HUB_OFFLINE."
        raise UnreachableError(f"the copy in the cache {error.what}", where=name, hint=hint) from None


def _is_cached(repository: str, file: Any) -> bool:
    """Whether the cache holds the content of a file that the hub lists, from whichever commit."""
    blob = file.lfs.sha256 if file.lfs else file.blob_id
    return bool(blob) and (_cache() / f"models--{repository.replace('/', '--')}" / "blobs" / blob).is_file()


def _cache() -> Path:
    return Path(importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE)


def _verify(path: Path, name: str) -> None:
    """Raises CheckpointError where a file of the cache differs from the sha256 that it is named by."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        blob = file.resolve()
        if SHA256.fullmatch(blob.name) and (actual := cache.sha256_of(blob)) != blob.name:
            what = f"{file.name} has the sha256 {actual[:12]}, but the hub says {blob.name[:12]}"
            raise CheckpointError(what, where=name, hint=f"The file is damaged. Remove {blob} and try again.")


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
        hint = "Accept its terms on its page, and set HF_TOKEN to a token of the same account."
        raise CheckpointError("is gated: you must accept its terms first", where=name, hint=hint) from None
    except errors.RepositoryNotFoundError:
        hint = "Check the name. For a private model, set HF_TOKEN to a token with read access."
        raise CheckpointError("is not on the hub, or is private", where=name, hint=hint) from None
    except errors.LocalEntryNotFoundError:
        hint = "Download it once with a network and without HF_HUB_OFFLINE."
        raise UnreachableError("is not in the cache, and the hub was not reached", where=name, hint=hint) from None
    except (errors.HfHubHTTPError, *connection) as error:
        hint = "Check the network. To use the copy in the cache, set HF_HUB_OFFLINE=1."
        raise UnreachableError(f"the hub did not answer: {error}", where=name, hint=hint) from None


TRAINED = ("prefer", "finetune", "pretrain")
"""Stages that leave a model, the one to talk to first."""
MODEL = "model/"
ANSWERING = TRAINED[:2]
"""Those whose models have learned conversations."""


@dataclass(frozen=True)
class LocatedModel:
    name: str
    """As in a picker: run, run/stage, or run/folder of a stage for one of other settings."""
    folder: Path
    damage: str = ""
    """Why the model cannot be used: which of its files is gone, or of another size or kind."""


def locate_model(path: Path) -> Path:
    """
    The folder with config.json and weights, or the GGUF file, that `path` stands for. Raises CheckpointError.

    hub:OWNER/NAME[@REVISION] stands for a model of a hub, which is fetched to the cache. A run folder stands for a
    model that its current settings have finished: that of `prefer`, else the finetuned model, else the pretrained
    model, which is logged. A finished model that is damaged is an error: no other model replaces it. A stage folder
    stands for the model it left. Weights that PyTorch pickled, named as a file, stand for their folder.
    """
    if is_of_hub(path):
        return fetched(str(path))
    if not path.exists():
        raise CheckpointError("does not exist", where=str(path), hint="Use a run folder, for example runs/demo.")
    kernel = core_io.kernel(path)
    if what := (f"lies in {kernel}" if kernel else "") if path.is_dir() else core_io.special(path):
        raise DataError(what, where=str(path), hint="Use the file or folder of a model.")
    if (path / CURRENT).is_file():
        return _of_run(path)
    for folder in (path, path / "model"):
        if is_model(folder):
            return folder
    if path.is_file():
        from bloomery.weights import pickled

        if pickled.is_named(path):
            return pickled.converted(path)
    hint = "Give a run, stage, checkpoint or model folder, a GGUF file, or hub:OWNER/NAME."
    raise CheckpointError("holds no model", where=str(path), hint=hint)


def models(root: Path) -> Iterator[LocatedModel]:
    """
    The finished models of every run folder under `root`, those that answer first. Where the current settings of a run
    have not finished a stage, the newest one of other settings stands in, under the name of its folder. Folders whose
    path is not UTF-8 are left out (`unnamable`).
    """
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not _is_utf8(folder):
            continue
        try:
            finished = _finished(folder)
        except RunError:
            continue  # something else that lies in the folder of runs
        answers = next((stage for stage in ANSWERING if stage in finished), "")
        for stage in TRAINED:
            if stage in finished:
                name = folder.name if stage == answers else f"{folder.name}/{stage}"
                yield LocatedModel(name, finished[stage] / "model", _damage(finished[stage]))
            elif older := _older(folder, stage):
                yield LocatedModel(f"{folder.name}/{older.name}", older / "model")


def unnamable(root: Path) -> list[Path]:
    """The folders under `root` whose path is not UTF-8: neither JSON nor safetensors can name their files."""
    return [folder for folder in sorted(root.iterdir()) if not _is_utf8(folder)] if root.is_dir() else []


def _is_utf8(path: Path) -> bool:
    return str(path).encode("utf-8", "replace").decode() == str(path)


def check(run: Path, stage: Path, damage: str) -> None:
    """Raises CheckpointError for a finished stage whose model is damaged."""
    if damage:
        hint = f"Remove {stage / MANIFEST}, and run: {finishing_command(run)}"
        raise CheckpointError(f"its model is damaged: {damage}", where=str(stage), hint=hint)


def _of_run(run: Path) -> Path:
    finished = _finished(run)
    if (answers := next((stage for stage in ANSWERING if stage in finished), None)) is not None:
        check(run, finished[answers], _damage(finished[answers]))
        if answers != ANSWERING[0] and ANSWERING[0] in records.stage_folders(run):
            info(f"{run}: prefer is not done, so this is the finetuned model", "yellow")
        return finished[answers] / "model"
    asked = [stage for stage in TRAINED if stage in records.stage_folders(run)]
    hint = f"Finish it: {finishing_command(run)}" if asked else "Add [pretrain] to its recipe."
    why = "finetune is not done"
    if asked[:1] == ["pretrain"] and finished:
        why, hint = "its recipe has no [finetune]", "Write [instruct] and [finetune] into the recipe, and run it."
    if older := next(filter(None, (_older(run, stage) for stage in TRAINED if stage not in finished)), None):
        hint += f"\nOr name what was finished with other settings: {older}"
    if not finished:
        raise CheckpointError("no model with its current settings is complete", where=str(run), hint=hint)
    check(run, finished["pretrain"], _damage(finished["pretrain"]))
    info(f"{run}: {why}, so this model only continues text\n{hint}", "yellow")
    return finished["pretrain"] / "model"


def _finished(run: Path) -> dict[str, Path]:
    """Stage -> folder of what the current settings of a run have trained to the end, be it damaged since."""
    return {
        stage: folder for stage, folder in records.stage_folders(run).items() if stage in TRAINED and _is_done(folder)
    }


def _older(run: Path, stage: str) -> Path | None:
    """The folder of a stage that was finished last, with whatever settings, and is not damaged."""
    folders = (folder for folder in run.glob(f"[0-9][0-9]-{stage}-*") if _is_utf8(folder))
    done = [folder for folder in folders if _is_done(folder) and not _damage(folder)]
    return max(done, key=lambda folder: (folder / MANIFEST).stat().st_mtime, default=None)


def _is_done(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def _damage(stage: Path) -> str:
    """Which file of the model of a finished stage is gone, or of another size or kind than its manifest says, or ""."""
    try:
        listed = _listed(stage / MANIFEST, (stage / MANIFEST).stat().st_mtime_ns)
    except RunError as error:
        return f"{MANIFEST} {error.what}"
    return core_io.find_corruption(stage, listed) or ("" if is_model(stage / "model") else "model/ holds no model")


@lru_cache(maxsize=1024)
def _listed(manifest: Path, changed: int) -> dict[str, Any]:
    """What a manifest that was changed at some time lists of the model: a server asks at every request."""
    return {name: facts for name, facts in read_manifest(manifest.parent)["outputs"].items() if name.startswith(MODEL)}
