"""The models of all run folders, loaded when they are first requested."""

import threading
from collections.abc import Sequence
from pathlib import Path

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import CheckpointError, RunError
from bloomery.core.log import info
from bloomery.generate.engine import Engine
from bloomery.hw import device
from bloomery.serve.chat_model import Answerer, ModelInfo, TextAnswerer
from bloomery.weights import hf, locate
from bloomery.weights.hf import Loaded


def answerer(name: str, folder: Path) -> TextAnswerer:
    """Load the model in a folder to this machine's device, with the tokenizer and template it was trained with."""
    return answerer_of(name, hf.load(folder, device.find().torch_device))


def answerer_of(name: str, loaded: Loaded) -> TextAnswerer:
    """The answerer of a model that is loaded."""
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size)
    return TextAnswerer(name, engine, loaded.renderer, loaded.tokenizer)


class ModelRegistry:
    """
    Finds the models below a folder of runs; new ones appear as runs finish. Loaded ones stay in memory.

    A model that has been trained again since it was loaded is loaded again.
    """

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._loaded: dict[str, tuple[float, Answerer]] = {}
        self._contexts: dict[tuple[Path, float], int] = {}
        self._lock = threading.Lock()
        for folder in locate.unnamable(runs):
            info(f"{folder}: left out, because its name is not UTF-8. Rename it.", "yellow")

    def names(self) -> Sequence[ModelInfo]:
        return [
            ModelInfo(model.name, int(mtime := _made(model.folder)), model.folder, self._context(model.folder, mtime))
            for model in locate.models(self.runs)
            if not model.damage
        ]

    def get(self, name: str) -> Answerer:
        models = {one.name: one for one in locate.models(self.runs)}
        if name not in models:
            known = ", ".join(one.name for one in models.values() if not one.damage) or "none yet"
            raise RunError(f"there is no model {name!r}", where=str(self.runs), hint=f"Models: {known}.")
        folder = models[name].folder
        locate.check(folder.parents[1], folder.parent, models[name].damage)
        mtime = _made(folder)
        with self._lock:
            if name not in self._loaded or self._loaded[name][0] != mtime:
                self._loaded[name] = mtime, answerer(name, folder)
            return self._loaded[name][1]

    def _context(self, folder: Path, mtime: float) -> int:
        """The context length; 0 for a model that cannot be read. A request for that model gets the error."""
        if (folder, mtime) not in self._contexts:
            try:
                self._contexts[folder, mtime] = hf.context(folder)
            except CheckpointError:
                self._contexts[folder, mtime] = 0
        return self._contexts[folder, mtime]


def _made(folder: Path) -> float:
    return (folder / hf.WEIGHTS).stat().st_mtime
