"""The models of all run folders, loaded when they are first asked for."""

import threading
from collections.abc import Sequence
from pathlib import Path

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.errors import RunError
from bloomery.generate.engine import Engine
from bloomery.hw import device
from bloomery.serve.answerer import Answerer, ModelInfo, TextAnswerer
from bloomery.weights import find, huggingface


def answerer(name: str, folder: Path) -> TextAnswerer:
    """Load the model in a folder to this machine's device, with the tokenizer and template it was trained with."""
    loaded = huggingface.load(folder, device.find().place)
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size)
    return TextAnswerer(name, engine, loaded.renderer, loaded.tokenizer)


class Shelf:
    """
    Finds the models below a folder of runs; new ones appear as runs finish. Loaded ones stay in memory.

    A model that has been trained again since it was loaded is loaded again.
    """

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._loaded: dict[str, tuple[float, Answerer]] = {}
        self._lock = threading.Lock()

    def names(self) -> Sequence[ModelInfo]:
        return [ModelInfo(one.name, int(_made(one.folder)), one.folder) for one in find.models(self.runs)]

    def get(self, name: str) -> Answerer:
        folders = {one.name: one.folder for one in find.models(self.runs)}
        if name not in folders:
            known = ", ".join(folders) or "none yet"
            raise RunError(f"there is no model {name!r}", where=str(self.runs), cure=f"Models: {known}.")
        made = _made(folders[name])
        with self._lock:
            if name not in self._loaded or self._loaded[name][0] != made:
                self._loaded[name] = made, answerer(name, folders[name])
            return self._loaded[name][1]


def _made(folder: Path) -> float:
    return (folder / huggingface.WEIGHTS).stat().st_mtime
