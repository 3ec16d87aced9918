"""
The models that a server answers with: those of all run folders, and those that were named.

Each is loaded when it is first requested. Idle models leave memory where another one has no room, and may leave it
once nobody asks them.
"""

import gc
import threading
import time
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import CheckpointError, DataError, RunError
from bloomery.core.log import info, size
from bloomery.generate.decoder import Decoder, PagePool, Pages, work_bytes
from bloomery.generate.engine import PROMPT_TOKENS, Engine, unpacked
from bloomery.generate.scheduler import CACHE_SHARE, Scheduler, free_device_bytes
from bloomery.hw import device
from bloomery.model.transformer import Transformer, on_meta
from bloomery.serve.chat_model import ModelInfo, ModelWords, NoRoomError, TextAnswerer
from bloomery.weights import hf, locate
from bloomery.weights.hf import Loaded, LoadFormat, SeparateAdapter
from bloomery.weights.opened import is_adapter

import torch

MAX_WAITING = 1024
"""Sequences of a model. The queue of requests has its own, smaller limit."""
FEWEST_TOKENS = 2048
"""Of one conversation, for whose keys and values memory has to be left; fewer where the context is shorter."""
WEIGHT_BYTES: dict[LoadFormat, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "int8": 1.0,
    "int4": 0.625,
    "nf4": 0.53125,
}
"""Of a number in the matrices of blocks, with its share of scales. What is not in these matrices has 2 or 4 bytes."""


@dataclass(frozen=True)
class LoadSettings:
    """How models are kept in memory, and how long."""

    dtype: LoadFormat = "float32"
    """Number format of weights."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Number format of keys and values. Others than `auto` need packed weights."""
    draft_tokens: int = 0
    """Tokens that are guessed at once: see Drafter."""
    unload_after: int = 0
    """Seconds without a request after which a model leaves memory; 0 keeps it."""


AS_IN_FILE = LoadSettings()


class SharedBase:
    """A loaded model with its scheduler, which answers for it and for adapters of it in the same steps."""

    def __init__(self, loaded: Loaded, settings: LoadSettings = AS_IN_FILE) -> None:
        self._loaded = loaded
        self.engine = Engine(loaded.model, loaded.tokenizer.vocab_size, pack=True, cache_dtype=cache_dtype(settings))
        self._scheduler = Scheduler(self.engine, max_waiting=MAX_WAITING, draft_tokens=settings.draft_tokens)
        weakref.finalize(self, self._scheduler.close)

    def answerer(self, name: str, adapter: SeparateAdapter | None = None) -> TextAnswerer:
        """Of the model, or of an adapter, which needs packed weights."""
        loaded, engine = self._loaded, self.engine
        if adapter is not None:
            loaded, engine = replace(loaded, language=adapter.language), engine.adapted(adapter.changes)
        return TextAnswerer(name, self._scheduler, ModelWords.of(loaded), engine, self)


Bases = MutableMapping[tuple[Path, float], SharedBase]
"""Models in memory by their path, and when they were written."""


def answerer(name: str, path: Path, settings: LoadSettings, bases: Bases) -> TextAnswerer:
    """
    Load a model to this machine's device, with the tokenizer and template it was trained with. On the CPU, adapters
    share the weights of their base with it and with each other, where these are packed. Raises NoRoomError where the
    model does not fit into the free memory, and ConfigError for a `kv_dtype` that it cannot have.
    """
    target = device.find().torch_device
    if target.type == "cpu" and is_adapter(path) and (adapter := hf.separate_adapter(path, settings.dtype)):
        base = _base(adapter.base, target, settings, bases)
        if base.engine.decoder is not None:
            return base.answerer(name, adapter)
        del base
    return _base(path, target, settings, bases).answerer(name)


def _base(path: Path, target: torch.device, settings: LoadSettings, bases: Bases) -> SharedBase:
    key = path.resolve(), _made(path)
    if (base := bases.get(key)) is None:
        check_settings(path, target, settings)
        base = bases[key] = SharedBase(hf.load(path, target, dtype=settings.dtype), settings)
    return base


def answerer_of(name: str, loaded: Loaded) -> TextAnswerer:
    """The answerer of a model that is loaded. Its scheduler ends with it."""
    return SharedBase(loaded).answerer(name)


def check_settings(path: Path, target: torch.device, settings: LoadSettings) -> None:
    """
    Raises NoRoomError for a model that does not fit into the free memory, and ConfigError where its keys and values
    cannot be in the format of the settings. What cannot be read is left to loading, which says more of it.
    """
    try:
        model = on_meta(*hf.config_of(path))
    except (CheckpointError, DataError):
        return
    weights, free = weight_bytes(model, settings.dtype), free_device_bytes(target)
    cache = cache_dtype(settings)
    if cache is not None and not (target.type == "cpu" and Decoder.packs(model)):
        raise unpacked(cache)
    if cache is not None and 3 * weights > free:
        what = (
            f"its weights take {size(weights)}, and three times as much to be packed; {size(free)} of memory are free"
        )
        raise NoRoomError(what, where=str(path), hint="Serve with --dtype int8 or int4, or without --kv-dtype.")
    short = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    pages = Pages.needed(min(model.config.context_length, FEWEST_TOKENS))
    keys = pages * PagePool.page_bytes(model.config, cache or short)
    work = PROMPT_TOKENS * work_bytes(model.config)
    if weights + CACHE_SHARE * keys + work > free:
        what = (
            f"its weights take {size(weights)}, keys and values {size(keys)}, for which {CACHE_SHARE} times as much has"
            f" to be left, and intermediate results {size(work)}; {size(free)} of memory are free"
        )
        raise NoRoomError(what, where=str(path), hint="Serve with --dtype int8 or int4.")


def weight_bytes(model: Transformer, dtype: LoadFormat) -> int:
    """
    Memory that the weights of a model take in a number format, estimated from its shape. `auto` counts 2 bytes a
    number, the fewest of a file that is not quantized.
    """
    matrices = sum(weight.numel() for weight in model.blocks.parameters() if weight.dim() == 2)
    others = sum(weight.numel() for weight in model.parameters()) - matrices
    return round(matrices * WEIGHT_BYTES.get(dtype, 2.0) + others * (4 if dtype == "float32" else 2))


def cache_dtype(settings: LoadSettings) -> torch.dtype | None:
    """Of keys and values; None for that of the weights."""
    return None if settings.kv_dtype == "auto" else getattr(torch, settings.kv_dtype)


class ModelRegistry:
    """
    Finds the models below a folder of runs, and those that were named. New ones appear as runs finish. Loaded ones stay
    in memory until another one needs the room, or for the seconds without a request that the settings give.

    A model that has been trained again since it was loaded is loaded again.
    """

    def __init__(
        self, runs: Path, named: Mapping[str, Path] = MappingProxyType({}), settings: LoadSettings = AS_IN_FILE
    ) -> None:
        """`named` are models outside of `runs`, by the names that clients use."""
        self.runs, self.named, self.settings = runs, named, settings
        self._loaded: dict[str, tuple[float, TextAnswerer]] = {}
        self._bases = weakref.WeakValueDictionary[tuple[Path, float], SharedBase]()
        self._asked: dict[str, float] = {}
        """When each loaded model was last asked or computed."""
        self._facts: dict[tuple[Path, float], tuple[int, dict[str, Any]]] = {}
        self._lock, self._locks, self._loading = threading.Lock(), dict[str, threading.Lock](), set[str]()
        self._load_lock, self._watched = threading.Lock(), set[str]()
        for folder in locate.unnamable(runs):
            info(f"{folder}: left out, because its name is not UTF-8. Rename it.", "yellow")

    def names(self) -> Sequence[ModelInfo]:
        there = {model.name: model.folder for model in locate.models(self.runs) if not model.damage}
        infos = list[ModelInfo]()
        for name, path in {**self.named, **there}.items():
            try:
                infos.append(self._info(name, path))
            except FileNotFoundError:  # it is being replaced, or was moved: the others are still there
                continue
        return infos

    def get(self, name: str) -> TextAnswerer:
        models = {one.name: one for one in locate.models(self.runs)}
        if name in models:
            path = models[name].folder
            locate.check(path.parents[1], path.parent, models[name].damage)
        elif name in self.named:
            path = self.named[name]
        else:
            known = [*self.named, *(one.name for one in models.values() if not one.damage)]
            hint = f"Models: {', '.join(known) or 'none yet'}."
            raise RunError(f"there is no model {name!r}", where=str(self.runs), hint=hint)
        mtime = _made(path)
        with self._lock:
            own = self._locks.setdefault(name, threading.Lock())
        with own:
            self._asked[name] = time.monotonic()
            loaded_mtime, model = self._loaded.get(name, (0.0, None))
            if model is None or loaded_mtime != mtime:
                self._loading.add(name)
                try:
                    with self._load_lock:  # the memory that one takes is not counted for another
                        self._loaded.pop(name, None)
                        if model is not None:  # an earlier version gives its memory back
                            model = None
                            _free()
                        model = self._load(name, path)
                finally:
                    self._loading.discard(name)
                self._loaded[name] = mtime, model
                if self.settings.unload_after and name not in self._watched:
                    self._watched.add(name)
                    self._watch(name)
            return model

    def _load(self, name: str, path: Path) -> TextAnswerer:
        """Load a model. Where it has no room, idle ones leave memory, the one that was asked longest ago first."""
        while True:
            try:
                return answerer(name, path, self.settings, self._bases)
            except NoRoomError:
                others = sorted(self._loaded, key=lambda other: self._asked[other])
                if not any(map(self._makes_room, others)):
                    raise

    def _makes_room(self, name: str) -> bool:
        """Unload a model, unless it is being asked or computes."""
        own = self._locks[name]
        if not own.acquire(blocking=False):
            return False
        try:
            return name in self._loaded and self._unload(name, "to make room for another model")
        finally:
            own.release()

    def _watch(self, name: str) -> None:
        """Look later whether a model is idle."""
        timer = threading.Timer(self.settings.unload_after / 4, self._unload_idle, [name])
        timer.daemon = True
        timer.start()

    def _unload_idle(self, name: str) -> None:
        with self._locks[name]:
            if name in self._loaded:  # it has not made room, and a newer version could be loaded
                now = time.monotonic()
                if self._loaded[name][1].is_busy:
                    self._asked[name] = now
                is_late = now - self._asked[name] >= self.settings.unload_after
                if not is_late or not self._unload(name, f"after {self.settings.unload_after} s without a request"):
                    return self._watch(name)
            self._watched.discard(name)

    def _unload(self, name: str, why: str) -> bool:
        """Whether a model has left memory: nobody asks it, which its lock ensures, and no thread works with it."""
        mtime, model = self._loaded[name]
        if model.is_busy:
            return False
        del self._loaded[name]
        there = weakref.ref(model)
        del model
        gc.collect()
        if (held := there()) is not None:  # its memory would not be free
            self._loaded[name] = mtime, held
            return False
        _free()
        info(f"{name}: unloaded {why}")
        return True

    @property
    def is_loading(self) -> bool:
        return bool(self._loading) and not self._loaded

    def _info(self, name: str, path: Path) -> ModelInfo:
        mtime = _made(path)
        if (path, mtime) not in self._facts:
            self._facts[path, mtime] = _facts(path)
        context, facts = self._facts[path, mtime]
        loaded_mtime, model = self._loaded.get(name, (0.0, None))
        if model is not None and loaded_mtime == mtime:
            facts = {**facts, **model.facts()}
        return ModelInfo(name, int(mtime), path, context, facts)


def _facts(path: Path) -> tuple[int, dict[str, Any]]:
    """
    The context of a model, 0 for one that cannot be read, and what its files say of it, without its weights. A request
    for a model that cannot be read gets the error.
    """
    from bloomery.weights import card

    try:
        config, rows = hf.config_of(path)
        source = card.provenance(path)
    except (CheckpointError, DataError):
        return 0, {}
    parameters = sum(weight.numel() for weight in on_meta(config, rows).parameters())
    bits = source.report.get("bits_per_byte", {})
    known = {
        "parameters": parameters,
        "license": source.license,
        "bits_per_byte": bits.get("model") if isinstance(bits, dict) and bits.get("bytes") else None,
    }
    return config.context_length, {name: value for name, value in known.items() if value is not None}


def _free() -> None:
    """Give the memory of models back that nobody holds, to the device too."""
    gc.collect()
    device.find().release()
    device.return_freed_memory()


def _made(path: Path) -> float:
    """When the weights of a model were written last: of one file, several, or adapters."""
    files = [path] if path.is_file() else list(path.glob(f"*{hf.WEIGHTS_SUFFIX}"))
    return max((file.stat().st_mtime for file in files), default=0.0)
