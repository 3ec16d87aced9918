"""
Norms of gradients, weights and updates, also of tensors that lie in parts on several ranks.

`Norms` measures by layer, at a fixed interval of steps:

    gradient flow    norm of the gradient of each layer, before clipping
    weight norm      norm of all weights that are trained
    update norm      norm of what one step of the optimizers changed them by

Of a weight with many numbers, the update is looked at in about SAMPLED of them at even distances, and scaled up. A
copy of all weights would need their memory once more. So the update norm is exact for small weights, and an
estimate for large weights. Ranks that hold parts of weights each measure their parts, and send each other only sums.
"""

from collections.abc import Iterable, Iterator, Sequence

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import native
from bloomery.model.kernels.cpu import call
from bloomery.train.collectives import copies, local, over_ranks

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LIBRARY = "optimizer"
CHUNK = 2**14
"""Numbers of which the compiled library gives one sum of squares."""
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
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._before = []
        self.latest = {
            "weight_norm": norms_of([weights])[0],
            "update_norm": float(over_ranks(changed.sum(), weights[0]).sqrt()),
            "gradient_flow": self._flow,
        }

    def _seen(self) -> Iterator[tuple[Tensor, float]]:
        """Some numbers of each weight that is trained, or of its part, and for how many each of them stands."""
        for weight in self._model.parameters():
            if weight.requires_grad:
                flat = local(weight).flatten()
                seen = flat[:: max(1, weight.numel() // SAMPLED)]
                yield seen, len(flat) / max(1, len(seen)) / copies(weight)


def by_layer(model: nn.Module) -> dict[str, float]:
    """The gradient norm of each layer: of `blocks.3.mlp.up.weight` that of blocks.3."""
    layers: dict[str, list[Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            parts = name.split(".")
            layers.setdefault(".".join(parts[: 2 if parts[0] == "blocks" else 1]), []).append(weight.grad)
    return dict(zip(layers, norms_of(list(layers.values())), strict=True))


def norms_of(groups: Sequence[Sequence[Tensor]]) -> list[float]:
    """The norm of all numbers of each group of tensors. Ranks that hold parts hear the sums of the others."""
    if any(isinstance(tensor, DTensor) for group in groups for tensor in group):
        norms: list[float] = square_sums(groups).sqrt().tolist()
        return norms
    return [float(torch.stack(torch._foreach_norm([one.detach() for one in group])).norm()) for group in groups]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """√ Σ g² over all numbers of all gradients: 0 for none."""
    if any(gradient.dtype != torch.float32 for gradient in gradients):  # a norm in bfloat16 has three digits
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
    if not takes_compiled(gradients):
        return nn.utils.get_total_norm(gradients)
    sums = [torch.empty(-(-gradient.numel() // CHUNK), dtype=torch.float64) for gradient in gradients]
    for gradient, into in zip(gradients, sums, strict=True):
        call(LIBRARY, "squares", gradient, gradient.numel(), into)
    return torch.cat(sums).sum().sqrt().float() if sums else torch.zeros(())


@torch.no_grad()
def square_sums(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """
    The sum of squares of each group of tensors, in float32. Of tensors in parts, each rank adds up its own numbers, and
    the sums of all groups go to the others at once. No tensor is put together.
    """
    own = [
        [torch.linalg.vector_norm(local(one), dtype=torch.float32).square() / copies(one) for one in group]
        for group in groups
    ]
    sums = torch.stack([torch.stack(squares).sum() for squares in own])
    tensors = [tensor for group in groups for tensor in group if isinstance(tensor, DTensor)]
    return over_ranks(sums, tensors[0]) if tensors else sums


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together, the same bits on every rank."""
    tensors = list(gradients)
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return square_sums([tensors]).sqrt()[0]
    return total_norm(tensors)


def takes_compiled(tensors: Sequence[Tensor]) -> bool:
    """Whether the compiled library can take them: float32 on the CPU."""
    return native.library(LIBRARY) is not None and all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and tensor.is_contiguous()
        for tensor in tensors
    )
