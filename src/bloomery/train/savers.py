"""Save all weights of a model, or its adapters alone, as a model folder, and load them again."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.model.config import Lora
from bloomery.model.transformer import Transformer, on_meta
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import collectives, fsdp
from bloomery.train.checkpointing import Write
from bloomery.weights import hf, peft
from bloomery.weights.hf import BaseModel, Lineage, ModelLanguage

from torch import Tensor


@dataclass
class FullModelSaver:
    """Every weight."""

    model: Transformer
    language: ModelLanguage | Renderer
    lineage: Lineage
    of_adapters: ClassVar[bool] = False

    def write(self, folder: Path, step: int) -> None:
        hf.save(folder, self.model, self.language, replace(self.lineage, step=step), number_format=None)

    def copied(self, world: World) -> tuple[Write, int]:
        twin = fsdp.copy_of(self.model, world)
        return FullModelSaver(twin, self.language, self.lineage).write, fsdp.weight_bytes(twin)

    def fill(self, folder: Path, world: World) -> None:
        if not collectives.is_sharded(self.model):
            hf.fill(self.model, folder, self.lineage)
            return
        full_weights: dict[str, Tensor] | None = None
        with world.alike():
            if world.is_first:
                twin = on_meta(self.model.config, self.model.vocab_size).to_empty(device="cpu")
                if self.model.config.tie_embeddings:
                    twin.head.weight = twin.embed.weight
                hf.fill(twin, folder, self.lineage)
                full_weights = dict(twin.named_parameters())
        fsdp.take(self.model, full_weights)


@dataclass
class AdapterSaver:
    """Saves the adapters alone. Their frozen base stays where it is."""

    model: Transformer
    language: ModelLanguage | Renderer
    settings: Lora
    base: BaseModel
    lineage: Lineage
    of_adapters: ClassVar[bool] = True
    _lengths: dict[str, Tensor] = field(default_factory=dict)
    """Of rows of frozen matrices of a sharded model that transformers has in one tensor with adapted ones of DoRA."""

    def write(self, folder: Path, step: int) -> None:
        self._write(folder, step, dict(lora.weights(self.model)))

    def copied(self, world: World) -> tuple[Write, int]:
        weights = {name: collectives.whole(one).to("cpu", copy=True) for name, one in lora.weights(self.model).items()}
        if self.settings.dora and collectives.is_sharded(self.model) and not self._lengths:
            twin = self._twin()
            for path in peft.unadapted_parts(weights, twin, self.base.kind):
                lengths = fsdp.row_lengths(self.model.get_submodule(path), twin.get_submodule(path))
                self._lengths[f"{path}.magnitude"] = lengths.cpu()
        weights |= self._lengths
        size = sum(one.numel() * one.element_size() for one in weights.values())
        return lambda folder, step: self._write(folder, step, weights), size

    def fill(self, folder: Path, world: World) -> None:
        if not collectives.is_sharded(self.model):
            hf.fill_adapters(self.model, folder, self.lineage)
            return
        names, twin = lora.weights(self.model).keys(), self._twin()
        with world.alike():
            if world.is_first:
                hf.fill_adapters(twin, folder, self.lineage)
        fsdp.take(self.model, lora.weights(twin) if world.is_first else None, names)

    def _twin(self) -> Transformer:
        """A model of the same names and whole shapes, whose adapters alone have numbers."""
        twin = on_meta(self.model.config, self.model.vocab_size)
        lora.attach(twin, self.settings, 0)
        return twin

    def _write(self, folder: Path, step: int, weights: lora.Weights) -> None:
        lineage = replace(self.lineage, step=step)
        model = self._twin() if collectives.is_sharded(self.model) else self.model
        hf.save_adapters(folder, weights, model, self.language, lineage, self.settings, self.base)
