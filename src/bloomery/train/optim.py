"""Optimizers, built from a recipe's words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.errors import CheckpointError
from bloomery.train import optim_rules as rules
from bloomery.train.config import AdamW8bit, AdEMAMix, Lion, Muon, Optimizer
from bloomery.train.optim_adamw import ScaledAdamW
from bloomery.train.optim_muon import BatchedMuon

import torch
from torch import Tensor, nn

REMEMBERED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    ScaledAdamW: ("step", "exp_avg", "exp_avg_sq"),
    BatchedMuon: ("momentum_buffer",),
    rules.AdEMAMix: ("step", "exp_avg", "exp_avg_slow", "exp_avg_sq"),
    rules.AdamW8bit: ("step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"),
    rules.Lion: ("exp_avg",),
}
"""What each optimizer keeps of a weight from step to step."""


@dataclass(frozen=True)
class Kinds:
    """The weights of a model that are trained, each in one list."""

    matrices: list[nn.Parameter]
    """Of the blocks, two or more dimensions: they decay, and are what Muon is for."""
    tables: list[nn.Parameter]
    """Outside of the blocks, two or more dimensions: embedding, positions, head. They decay where the recipe says."""
    vectors: list[nn.Parameter]
    """One dimension or none: norms and biases. They never decay."""

    @classmethod
    def of(cls, model: nn.Module) -> "Kinds":
        found = cls([], [], [])
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                hidden = name.startswith("blocks.")
                (found.vectors if weight.dim() < 2 else found.matrices if hidden else found.tables).append(weight)
        return found


_OF_ANOTHER = "It is of another model or kind of optimizer: go on with the recipe that made it, or start anew."


class Optimizers:
    """One or two torch optimizers that together own every weight of a model that is trained, each weight once."""

    def __init__(self, model: nn.Module, config: Optimizer, dtype: torch.dtype = torch.bfloat16) -> None:
        """`dtype` is that of Muon's matrix products."""
        self._names = {weight: name for name, weight in model.named_parameters() if weight.requires_grad}
        self.parts = _parts(Kinds.of(model), config, dtype)
        self._peaks = [[float(group["lr"]) for group in part.param_groups] for part in self.parts]

    def set_share(self, value: float) -> float:
        """Set every learning rate to this share of its peak. Returns that of the first group."""
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * value
        return self._peaks[0][0] * value

    def step(self, scale: float = 1.0) -> None:
        """Update the weights with their gradients times `scale`, which may or may not be written back to them."""
        for part in self.parts:
            if isinstance(part, ScaledAdamW):
                part.scale = scale
            elif scale != 1.0:
                torch._foreach_mul_(
                    [w.grad for group in part.param_groups for w in group["params"] if w.grad is not None], scale
                )
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """All that the optimizers remember, by name of the weight and of the quantity. Empty before the first step."""
        return {
            f"{self._names[weight]}/{key}": value
            for part, weight in self._owned()
            for key, value in part.state[weight].items()
        }

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """
        Take up a state made by `state`; an empty one is that of before the first step.

        Raises CheckpointError, and changes nothing, for one that misses a weight or is of another model or optimizer.
        """
        expected = {
            f"{self._names[weight]}/{key}": (part, weight, key)
            for part, weight in self._owned()
            for key in REMEMBERED[type(part)]
        }
        if saved:
            self._refuse(sorted(expected.keys() - saved.keys()), "misses")
            self._refuse(sorted(saved.keys() - expected.keys()), "holds an unknown")
        for path, value in saved.items():
            part, weight, key = expected[path]
            shape: tuple[int, ...] = () if key == "step" else tuple(weight.shape)
            if key.endswith("_scales"):
                shape = (-(-weight.numel() // part.defaults["block"]),)
            fits = value.dtype == torch.uint8 if key.endswith("_codes") else value.is_floating_point()
            if tuple(value.shape) != shape or not fits:
                what = f"holds {key!r} of {path.rpartition('/')[0]!r} as {value.dtype} of shape {tuple(value.shape)}"
                raise CheckpointError(f"the state of the optimizer {what}, not {shape}", cure=_OF_ANOTHER)
        for part in self.parts:
            part.state.clear()
        for path, value in saved.items():
            part, weight, key = expected[path]
            # Counts of steps stay where the optimizer made them: AdamW's fused one with the weight, others on the host.
            here = weight.device if key != "step" or isinstance(part, torch.optim.AdamW) else torch.device("cpu")
            kept: dict[str, Any] = part.state[weight]
            kept[key] = value.to(device=here, copy=True)

    def _refuse(self, paths: list[str], what: str) -> None:
        if paths:
            name, _, key = paths[0].rpartition("/")
            more = f", and {len(paths) - 1} more" if len(paths) > 1 else ""
            raise CheckpointError(
                f"the state of the optimizer {what} {key!r} of {name!r}{more}",
                cure=_OF_ANOTHER,
            )

    def _owned(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        for part in self.parts:
            for group in part.param_groups:
                for weight in group["params"]:
                    yield part, weight


def _parts(kinds: Kinds, config: Optimizer, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    lr, betas = config.learning_rate, (config.beta1, config.beta2)
    matrices = _group(kinds.matrices, config.weight_decay)
    tables = _group(kinds.tables, config.weight_decay if config.decay_embeddings else 0.0)
    vectors = _group(kinds.vectors, 0.0)
    if isinstance(config, Lion):
        return [rules.Lion(matrices + tables + vectors, lr=lr, betas=betas)]

    def adamw(groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        return [ScaledAdamW(groups, lr=lr, betas=betas, eps=config.epsilon, fused=True)] if groups else []

    if isinstance(config, Muon):
        return [*_muon(matrices, config, dtype), *adamw(tables + vectors)]
    if isinstance(config, AdEMAMix):
        return [
            rules.AdEMAMix(
                matrices + tables + vectors,
                lr=lr,
                betas=(*betas, config.beta3),
                alpha=config.alpha,
                eps=config.epsilon,
                ramp=config.ramp_steps,
            )
        ]
    if isinstance(config, AdamW8bit):
        coded = rules.AdamW8bit(matrices + tables, lr=lr, betas=betas, eps=config.epsilon, block=config.block)
        return [coded, *adamw(vectors)]
    return adamw(matrices + tables + vectors)


def _group(weights: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [{"params": weights, "weight_decay": weight_decay}] if weights else []


def _muon(groups: list[dict[str, Any]], config: Muon, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    if not groups:
        return []
    return [
        BatchedMuon(
            groups,
            lr=config.matrix_learning_rate,
            momentum=config.momentum,
            ns_steps=config.newton_schulz_steps,
            adjust_lr_fn=config.scaling,
            dtype=dtype,
        )
    ]
