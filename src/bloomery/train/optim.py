"""Optimizers, built from a recipe's words."""

from collections.abc import Iterator, Mapping
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.train.config import AdamW, Muon
from bloomery.train.schedule import share as share

import torch
from torch import Tensor, nn


class Optimizers:
    """One or two torch optimizers that together own every weight of a model, each weight once."""

    def __init__(self, model: nn.Module, config: Muon | AdamW) -> None:
        self._names = {weight: name for name, weight in model.named_parameters() if weight.requires_grad}
        matrices = [weight for weight, name in self._names.items() if weight.dim() == 2 and name.startswith("blocks.")]
        tables = [w for w, name in self._names.items() if w.dim() == 2 and not name.startswith("blocks.")]
        vectors = [weight for weight in self._names if weight.dim() != 2]
        betas = (config.beta1, config.beta2)
        self.parts: list[torch.optim.Optimizer] = []
        if isinstance(config, Muon):
            self.parts.append(
                torch.optim.Muon(
                    matrices,
                    lr=config.matrix_learning_rate,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    ns_steps=config.newton_schulz_steps,
                    adjust_lr_fn=config.scaling,
                )
            )
            decayed, free = (tables, vectors) if config.decay_embeddings else ([], tables + vectors)
        else:
            decayed, free = matrices + tables, vectors
            if not config.decay_embeddings:
                decayed, free = matrices, tables + vectors
        groups = [
            {"params": weights, "weight_decay": decay}
            for weights, decay in ((decayed, config.weight_decay), (free, 0.0))
            if weights
        ]
        self.parts.append(
            torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)
        )
        self._peaks = [[float(group["lr"]) for group in part.param_groups] for part in self.parts]

    def set_share(self, value: float) -> float:
        """Set every learning rate to this share of its peak. Returns that of the first group."""
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * value
        return self._peaks[0][0] * value

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """All that the optimizers remember, by name of the weight and of the quantity."""
        return {
            f"{self._names[weight]}/{key}": value
            for part, weight in self._owned()
            for key, value in part.state[weight].items()
        }

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take up a state made by `state`."""
        weights = {name: weight for weight, name in self._names.items()}
        owners = {weight: part for part, weight in self._owned()}
        for path, value in saved.items():
            name, key = path.rsplit("/", 1)
            weight = weights[name]
            kept: dict[str, Any] = owners[weight].state[weight]
            # AdamW counts its steps in a float32 scalar where the weight is; moments have the weight's format.
            kept[key] = value.to(device=weight.device, dtype=value.dtype)

    def _owned(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        for part in self.parts:
            for group in part.param_groups:
                for weight in group["params"]:
                    yield part, weight
