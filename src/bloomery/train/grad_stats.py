"""
Norms of weights, gradients and updates by layer, measured at a fixed interval of steps.

    gradient flow    norm of the gradient of each layer, before clipping
    weight norm      norm of all weights that are trained
    update norm      norm of what one step of the optimizers changed them by

Of a weight with many numbers, the update is looked at in about SAMPLED of them at even distances, and scaled up. A
copy of all weights would need their memory once more. So the update norm is exact for small weights, and an
estimate for large weights.
"""

from collections.abc import Iterator

import bloomery.hw.require_torch  # noqa: F401
from bloomery.train.fsdp import whole

import torch
from torch import Tensor, nn

SAMPLED = 2**15


class Norms:
    def __init__(self, model: nn.Module, *, every: int) -> None:
        """Measured after each `every` steps; never for 0."""
        self._model, self._every = model, every
        self._before: list[Tensor] = []
        self._flow: dict[str, float] = {}
        self.latest: dict[str, float | dict[str, float]] = {}
        """Of the last measured step: weight_norm, update_norm, and gradient_flow by layer."""

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        self._before = []
        if self.due(step):
            self._flow = by_layer(self._model)
            self._before = [seen.clone() for seen, _ in self._seen()]

    @torch.no_grad()
    def after_update(self) -> None:
        if not self._before:
            return
        pairs = zip(self._seen(), self._before, strict=True)
        changed = torch.stack([scale * (seen - before).float().square().sum() for (seen, scale), before in pairs])
        weights = torch.stack(
            torch._foreach_norm([whole(one) for one in self._model.parameters() if one.requires_grad])
        )
        self._before = []
        self.latest = {
            "weight_norm": float(weights.norm()),
            "update_norm": float(changed.sum().sqrt()),
            "gradient_flow": self._flow,
        }

    def _seen(self) -> Iterator[tuple[Tensor, float]]:
        """Some numbers of each weight that is trained, and for how many each of them stands."""
        for weight in self._model.parameters():
            if weight.requires_grad:
                flat = whole(weight).flatten()
                seen = flat[:: max(1, len(flat) // SAMPLED)]
                yield seen, len(flat) / max(1, len(seen))


def by_layer(model: nn.Module) -> dict[str, float]:
    """The gradient norm of each layer: of `blocks.3.mlp.up.weight` that of blocks.3."""
    layers: dict[str, list[Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            parts = name.split(".")
            layers.setdefault(".".join(parts[: 2 if parts[0] == "blocks" else 1]), []).append(whole(weight.grad))
    return {name: float(torch.stack(torch._foreach_norm(grads)).norm()) for name, grads in layers.items()}
