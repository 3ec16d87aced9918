"""
Cross entropy without the logits: the largest tensor of a small model with a large vocabulary never exists whole.

On GPUs, matmuls in a short format see a vocabulary that is a multiple of ALIGNED_ROWS. Tensor cores want rows that
start at multiples of 16 bytes. Rows beyond the vocabulary are zeros with logits of −∞.

Letters used for shapes: N supervised tokens, C tokens of a chunk, D width, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jaxtyping import Float, Int

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import HardwareError
from bloomery.hw.device import Device, float8_formats
from bloomery.hw.distributed import World
from bloomery.model.config import FLOAT8_SIDE
from bloomery.model.kernels import cpu, triton
from bloomery.model.layers import Formats, HeadInFloat8, check_device, padded_rows, to_float8

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK_BYTES = 2**27
"""Bytes of float32 logits that exist at once. Smaller chunks read the head's weights more often."""
CHUNK_BYTES_THERE: ContextVar[int | None] = ContextVar("chunk_bytes_there", default=None)
"""The same on a device that is no CPU: see `chunks_of`."""
ALIGNED_ROWS, TILE_TOKENS = 64, 256
"""Of the head's matrix on GPUs, and of chunks there: multiples of what a kernel computes at once."""

LARGEST_ERROR_OF_FLOAT8 = 0.2
"""Relative, of a loss and its gradients. Random numbers give 0.06."""
PIECE, FEWEST_ROWS = 512, 16
"""Of a vocabulary, that is summed up by itself; and of a matrix that is multiplied as a matrix, with room to spare."""


@contextmanager
def chunks_of(size_bytes: int) -> Iterator[None]:
    """Within, chunks of that many bytes of float32 logits on devices that are no CPU."""
    token = CHUNK_BYTES_THERE.set(size_bytes)
    try:
        yield
    finally:
        CHUNK_BYTES_THERE.reset(token)


def chunk_tokens(vocab_size: int, *, processor: bool = True) -> int:
    """How many tokens have their logits in memory at once, on a CPU or elsewhere."""
    there = None if processor else CHUNK_BYTES_THERE.get()
    tokens = max(1, (CHUNK_BYTES if there is None else there) // (4 * vocab_size))
    return tokens if there is None or tokens < TILE_TOKENS else tokens // TILE_TOKENS * TILE_TOKENS


def on_processor(where: Tensor | torch.device) -> bool:
    """Whether a CPU computes there, or would where another device is only traced."""
    device = where.device if isinstance(where, Tensor) else where
    return device.type == "cpu" and not cpu.ELSEWHERE.get()


def padded_table(weight: Float[Tensor, "V D"], dtype: torch.dtype) -> Float[Tensor, "P D"]:
    """The head's matrix in a format, with zeros up to a multiple of ALIGNED_ROWS where the format is short."""
    extra = -len(weight) % ALIGNED_ROWS
    if dtype == torch.float32 or not extra:
        return weight.to(dtype)
    table = torch.empty((len(weight) + extra, weight.shape[1]), dtype=dtype, device=weight.device)
    table[: len(weight)].copy_(weight.detach())
    table[len(weight) :].zero_()
    return table


class _ChunkedCrossEntropy(torch.autograd.Function):
    """
        loss = Σ (z − s[target] + c·z²)      s = h Wᵀ,  z = log Σ exp(s), in nats

    in chunks of tokens. The gradients of a chunk are computed while its logits s are in memory, so that nothing is
    computed twice: ∂loss/∂s = softmax(s) · (1 + 2·c·z) − onehot(target). Ranks of `company` have rows of W each.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        z_loss: float,
        share: float,
        with_grads: bool,
        company: World,
        most_rows: int,
        float8: Formats | None,
    ) -> tuple[Tensor, Tensor]:
        totals = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        tiles, here = float8 is None and cpu.matmul_ready(hidden, weight), on_processor(hidden)
        learns, vocab_size = context.needs_input_grad[1], len(weight)
        head = None if float8 is None else HeadInFloat8(weight, float8, ALIGNED_ROWS)
        as_it_is = tiles or head is not None
        table = weight if as_it_is else weight.to(hidden.dtype) if here else padded_table(weight, hidden.dtype)
        grad_hidden = hidden.new_empty(hidden.shape) if with_grads else None
        grad_weight: Tensor | None = None
        size = chunk_tokens(most_rows, processor=here)  # the same on all ranks, which sum each chunk
        for start in range(0, len(hidden), size):
            piece = slice(start, start + size)
            logits = _logits(hidden[piece], table, tiles) if head is None else head.logits(hidden[piece])
            if logits.shape[1] > vocab_size:
                logits[:, vocab_size:] = -torch.inf
            if company.size > 1:
                sums, grad = _chunk_of_parts(logits, targets[piece], z_loss, share, with_grads, company)
            elif head is not None:
                sums, grad8 = _chunk_in_float8(logits, targets[piece], z_loss, share, with_grads, head.wide)
                grad = None if grad8 is None else grad8[0]
            else:
                sums, grad = chunk(logits, targets[piece], z_loss, share, with_grads)
            totals += sums
            if grad is None or grad_hidden is None:
                continue
            if tiles:
                cpu.product(grad, table, grad_hidden[piece])
                if not learns:
                    continue
                into = weight.new_empty(weight.shape) if grad_weight is None else grad_weight
                grad_weight = cpu.product(grad.t(), hidden[piece], into, add=grad_weight is not None)
                continue
            if head is None:
                grad_hidden[piece] = over_the_vocabulary(grad, table)
                chunk_grad = grad.t() @ hidden[piece] if learns else None
            else:
                assert grad8 is not None
                rows, chunk_grad = head.gradients(grad8, hidden.dtype, learns=learns)
                grad_hidden[piece] = rows[: len(logits)]
            if chunk_grad is None:
                continue  # the head is frozen
            chunk_grad = chunk_grad[:vocab_size]
            kind = (
                weight.dtype if here else torch.float32
            )  # where ranks gather weights in a short format, they are short
            grad_weight = chunk_grad.to(kind) if grad_weight is None else grad_weight.add_(chunk_grad)
        if with_grads:
            company.sum(grad_hidden)  # type: ignore[arg-type]
            if grad_weight is None and learns:
                grad_weight = torch.zeros_like(weight)
            grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
            context.grads = grad_hidden, grad_weight
        entropy = totals[0].clone()
        context.mark_non_differentiable(entropy)
        return totals.sum() * share, entropy

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, *tuple[None, ...]]:
        """The gradients are given away, not copied: there is no second backward pass."""
        if context.grads is None:
            raise RuntimeError(
                "the gradients of this loss were given to a backward pass before; compute the loss again"
            )
        (grad_hidden, grad_weight), context.grads = context.grads, None
        known = upstream[0].device.type == "cpu" and type(upstream[0]) is Tensor
        if not known or float(upstream[0]) != 1.0:  # a pass over the largest weight
            grad_hidden = grad_hidden.mul_(upstream[0])
            grad_weight = None if grad_weight is None else grad_weight.mul_(upstream[0])
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _logits(hidden: Tensor, table: Tensor, tiles: bool) -> Tensor:
    if tiles:
        return cpu.product(hidden, table.t(), cpu.aligned_rows(len(hidden), len(table)))
    return hidden @ table.t()


def over_the_vocabulary(grad: Float[Tensor, "C V"], table: Float[Tensor, "V D"]) -> Float[Tensor, "C D"]:
    """
    Gradient of the logits · table. For few rows, libraries sum over all of V in sequence: in float32 the error is ten
    times that of their code for many rows. A sum over pieces of V takes the same time without that error.
    """
    whole = len(table) // PIECE * PIECE
    if len(grad) >= FEWEST_ROWS or grad.dtype != torch.float32 or not whole:
        return grad @ table
    left = grad[:, :whole].reshape(len(grad), -1, PIECE).transpose(0, 1)
    pieces = left @ table[:whole].reshape(-1, PIECE, table.shape[1])
    return pieces.sum(0).addmm_(grad[:, whole:], table[whole:])


def chunk(
    logits: Float[Tensor, "C V"], targets: Int[Tensor, " C"], z_loss: float, share: float, with_grads: bool
) -> tuple[Float[Tensor, "2"], Float[Tensor, "C V"] | None]:
    """
    Sum of the cross entropies and of the penalties of a chunk, and `share` times the gradient of both together with
    respect to the logits, in their format. It may overwrite the logits.
    """
    if triton.ready("cross-entropy", logits):
        z, reached = triton.cross_entropy_(logits, targets, z_loss=z_loss, share=share, with_grads=with_grads)
        return torch.stack(((z - reached).sum(), z_loss * z.square().sum())), logits if with_grads else None
    reached = logits.gather(1, targets[:, None]).float()
    if cpu.ready(logits):
        z = cpu.cross_entropy_(logits, targets, z_loss=z_loss, share=share, with_grads=with_grads)
        grad = logits if with_grads else None
    else:
        z, grad = triton.plain_cross_entropy_(logits, targets, z_loss, with_grads, share)
    return torch.stack(((z.flatten() - reached.flatten()).sum(), z_loss * z.square().sum())), grad


def _chunk_in_float8(
    logits: Float[Tensor, "C V"],
    targets: Int[Tensor, " C"],
    z_loss: float,
    share: float,
    with_grads: bool,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "2"], tuple[Tensor, Tensor] | None]:
    """
    As `chunk`, with the gradient in 8 bits, as many rows as a matmul wants, and its scale. Without `z_loss`, no number
    of the gradient is larger than `share`.
    """
    if z_loss or not with_grads or not triton.ready("cross-entropy", logits):
        sums, grad = chunk(logits, targets, z_loss, share, with_grads)
        largest = None if z_loss else sums.new_full((), share)  # a tensor of a number would wait for the GPU
        return sums, None if grad is None else to_float8(padded_rows(grad), dtype, largest)
    limit = torch.finfo(dtype).max
    grads = logits.new_empty((len(logits) + -len(logits) % FLOAT8_SIDE, logits.shape[1]), dtype=dtype)
    grads[len(logits) :].view(torch.uint8).zero_()
    z, reached = triton.cross_entropy_(logits, targets, share=limit, grads=grads)
    loss = (z - reached).sum()
    return torch.stack((loss, torch.zeros_like(loss))), (grads, loss.new_full((), share / limit))


def _chunk_of_parts(
    logits: Float[Tensor, "C V"],
    targets: Int[Tensor, " C"],
    z_loss: float,
    share: float,
    with_grads: bool,
    company: World,
) -> tuple[Float[Tensor, "2"], Float[Tensor, "C V"] | None]:
    """As `chunk`, where each rank has the logits of some token IDs; targets count from its first."""
    scores = logits.float()
    parts = scores.new_zeros((company.size, len(scores)))
    parts[company.rank] = torch.logsumexp(scores, 1)
    z = torch.logsumexp(company.sum(parts), 0)
    own = ((targets >= 0) & (targets < scores.shape[1])).nonzero().flatten()
    reached = torch.zeros_like(z).index_put_((own,), scores[own, targets[own]])
    company.sum(reached)
    grad = None
    if with_grads:
        grad = (scores - z[:, None]).exp_().mul_((share * (1 + 2 * z_loss * z))[:, None])
        grad[own, targets[own]] -= share
        grad = grad.to(logits.dtype)
    return torch.stack(((z - reached).sum(), z_loss * z.square().sum())), grad


def token_losses(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    z_loss: float = 0.0,
    share: float = 1.0,
    float8: Formats | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """
    What is minimized, times `share`, and the cross entropy alone, without gradient: sums over all N tokens, in nats.

    They differ by z_loss · (log Σ exp logits)², which keeps the logits of a long run near zero (Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, §5). Zeros for N = 0. A weight that is a DTensor has rows on each of its ranks,
    which all call it with the same tokens. With `float8`, numbers of 8 bits are multiplied; not with a DTensor.
    """
    company, most_rows = World.alone(), len(weight)
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        company = World(mesh.get_local_rank(), mesh.size(), mesh.get_group())
        most_rows = -(-len(weight) // company.size)
        targets = targets - company.rank * most_rows
        weight = weight.to_local()
    losses: tuple[Tensor, Tensor] = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, z_loss, share, torch.is_grad_enabled(), company, most_rows, float8
    )
    return losses


def check_float8(device: Device) -> None:
    """Raises HardwareError for a device that multiplies no numbers of 8 bits, or computes a wrong loss with them."""
    check_device(device)
    generator = torch.Generator().manual_seed(0)
    h, w = torch.randn(100, 64, generator=generator), torch.randn(203, 64, generator=generator) / 8
    targets, results = torch.arange(100, device=device.torch_device), list[list[Tensor]]()
    for formats in (None, float8_formats(device.torch_device)):
        hidden = h.to(device.torch_device, torch.bfloat16).requires_grad_()
        weight = w.clone().to(device.torch_device).requires_grad_()
        loss, _ = token_losses(hidden, weight, targets, share=0.01, float8=formats)
        results.append([one.detach().float().cpu() for one in (loss, *torch.autograd.grad(loss, (hidden, weight)))])
    errors = [float((found - right).norm() / right.norm()) for right, found in zip(*results, strict=True)]
    if not max(errors) <= LARGEST_ERROR_OF_FLOAT8:
        what = f"{device.name} computes a wrong loss with numbers of 8 bits (error {max(errors):.2g})"
        raise HardwareError(what, hint='Set float8="off".')
