"""The step that a plan is about, as a thing that can be made: traced without numbers, or timed with them."""

import math
from dataclasses import dataclass, replace

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.device import Device
from bloomery.model import lora
from bloomery.model.config import ModelConfig
from bloomery.model.lora_config import Lora
from bloomery.model.transformer import Transformer
from bloomery.train.config import Level, Optimizer
from bloomery.train.device import fast_dtype
from bloomery.train.optim import Optimizers
from bloomery.train.recompute import recompute

import torch


@dataclass(frozen=True, kw_only=True)
class Step:
    """Some rows, in one or more micro-batches."""

    model: ModelConfig
    vocab_size: int
    optimizer: Optimizer
    recompute: Level
    precision: torch.dtype
    rows: int
    """Of a micro-batch."""
    accumulates: bool
    """Whether there are more micro-batches, whose gradients are there before its own."""
    on_processor: bool = True
    ranks: int = 1
    """That each hold a part of weights, gradients and optimizer; this is the step of one of them."""
    lora: Lora | None = None
    """What is trained beside frozen weights; all weights where nothing is said."""

    @property
    def turn(self) -> int:
        """Layers until their kinds begin again."""
        kinds = self.model.attention, self.model.sliding_window, self.model.feed_forward
        return math.lcm(*(len(one) for one in kinds))

    def with_layers(self, layers: int) -> "Step":
        return replace(self, model=self.model.model_copy(update={"num_layers": layers}))

    def load(self, *, initialized: bool = False) -> Transformer:
        """The model as a stage hands it to the loop, with weights of any value unless it is to be initialized."""
        model = Transformer(self.model, self.vocab_size)
        if initialized:
            model.initialize(0)
        if self.lora is not None:
            lora.attach(model, self.lora, seed=0)
        return model

    def prepare(self, model: Transformer, device: Device) -> Optimizers:
        """As a run does when the model is in its place."""
        recompute(model, self.recompute)
        return Optimizers(model, self.optimizer, fast_dtype(device))
