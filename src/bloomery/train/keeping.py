"""What of a model in training is kept: all of it, or the adapters alone where the rest never changes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.dist import World
from bloomery.model import lora
from bloomery.model.lora_config import Lora
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.chat import Renderer
from bloomery.train import parallel
from bloomery.weights import huggingface
from bloomery.weights.huggingface import BaseModel, Lineage

Write = Callable[[Path, Lineage], None]


@dataclass
class Whole:
    """Every weight."""

    model: Transformer
    renderer: Renderer

    def write(self, folder: Path, lineage: Lineage) -> None:
        """Leave it in a folder, as it is now."""
        huggingface.save(folder, self.model, self.renderer, lineage)

    def copied(self, world: World) -> tuple[Write, int]:
        """What writes a copy that training does not change, and its bytes. All ranks call it; the first writes."""
        twin = parallel.copy_of(self.model, world)
        return Whole(twin, self.renderer).write, parallel.weight_bytes(twin)

    def fill(self, folder: Path, lineage: Lineage) -> None:
        """Take it up from a folder. Raises CheckpointError where that was made from something else."""
        if not parallel.is_sharded(self.model):
            huggingface.fill(self.model, folder, lineage)
            return
        twin = Transformer(self.model.config, self.model.vocab_size)
        huggingface.fill(twin, folder, lineage)
        parallel.take(self.model, twin)


@dataclass
class Adapters:
    """The adapters beside a frozen base, which stays where it is."""

    model: Transformer
    renderer: Renderer
    settings: Lora
    base: BaseModel

    def write(self, folder: Path, lineage: Lineage) -> None:
        self._write(folder, lineage, dict(lora.weights(self.model)))

    def copied(self, world: World) -> tuple[Write, int]:
        weights = {name: one.detach().to("cpu", copy=True) for name, one in lora.weights(self.model).items()}
        size = sum(one.numel() * one.element_size() for one in weights.values())
        return lambda folder, lineage: self._write(folder, lineage, weights), size

    def fill(self, folder: Path, lineage: Lineage) -> None:
        huggingface.fill_adapters(self.model, folder, lineage)

    def _write(self, folder: Path, lineage: Lineage, weights: lora.Weights) -> None:
        huggingface.save_adapters(folder, weights, self.model, self.renderer, lineage, self.settings, self.base)


Kept = Whole | Adapters
