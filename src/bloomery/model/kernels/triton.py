"""
GPU operations with gradients that launch Bloomery's Triton kernels.

Callers ask `ready(kernel, tensor)` first, and keep their own lines of PyTorch for when it says no. The formulas
that trials and tests compare with stand at the end, as `plain_…`. They run in the format of their inputs. Training
uses `plain_cross_entropy_` where it has no kernel.

Triton may be missing. Then no caller gets here, because no kernel was trusted. A launch can also be written down
instead, so that it is compiled for GPUs that are not there.

Letters used for shapes are those of layers.py; N heads, C rows of logits, R rows of a quantised matrix.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from jaxtyping import Float, Int

import bloomery.hw.require_torch  # noqa: F401
from bloomery.hw import device as devices

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LANGUAGE = "bloomery.model.kernels.triton_source"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel that was asked for: everything that Triton compiles it by."""

    kernel: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, int | bool]
    warps: int
    stages: int


_RECORD: ContextVar[list[Launch] | None] = ContextVar("record", default=None)
_TRACED: ContextVar[frozenset[str]] = ContextVar("traced", default=frozenset())


def is_there() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def language() -> Any:
    """The kernels as Triton sees them."""
    return importlib.import_module(LANGUAGE)


def launch(request: Launch) -> None:
    """Run a kernel on the device of its tensors, or write down that it was asked for."""
    record = _RECORD.get()
    if _TRACED.get():
        return
    if record is not None:
        record.append(request)
        return
    kernel = getattr(language(), request.kernel)
    kernel[request.grid](**request.arguments, **request.constants, num_warps=request.warps, num_stages=request.stages)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Write down what is asked for meanwhile, and run nothing."""
    launches: list[Launch] = []
    token = _RECORD.set(launches)
    try:
        yield launches
    finally:
        _RECORD.reset(token)


@contextmanager
def traced(kernels: frozenset[str]) -> Iterator[None]:
    """Take these kernels for tensors without numbers, and run nothing: it shows what they keep in memory."""
    token = _TRACED.set(kernels)
    try:
        yield
    finally:
        _TRACED.reset(token)


DTYPES = (torch.float32, torch.bfloat16)
LARGEST_ROW = 8192
"""Numbers of a row that one program holds in registers: 32 for each of 256 threads. 16384 spill on RDNA."""
PARTS = 512
"""Programs that share the rows when gradients of weights are summed: a fixed number, for sums in a fixed order."""
TILE_VALUES = 4096
"""Numbers of several heads that one program rotates at once."""
LOGITS_AT_ONCE = 4096


def ready(kernel: str, *tensors: Tensor) -> bool:
    """Whether our own kernel of that name may be used for these tensors: it was tried on this device, and won."""
    if torch.compiler.is_compiling():  # asked first: compiled code cannot read a context variable
        return False
    if kernel in _TRACED.get():
        return all(tensor.dtype in DTYPES for tensor in tensors)
    return (
        devices.trusted(kernel)
        and all(type(one) in (Tensor, nn.Parameter) and one.dtype in DTYPES for one in tensors)
        and all(devices.compiles_kernels(one.device) for one in tensors)
    )


def _power(size: int) -> int:
    """The power of two that is not below it."""
    return 1 << max(0, size - 1).bit_length()


def _warps(values: int) -> int:
    """Warps for so many numbers: 16 a thread where warps have 32, at most 512 threads where they have 64."""
    return max(1, min(8, values // 512))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        y, inverses = torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)
        context.save_for_backward(x, weight, inverses)
        width, rows = x.shape[-1], inverses.numel()
        at = {"x_at": x, "weight_at": x if weight is None else weight, "y_at": y, "inverse_at": inverses}
        if rows:
            launch(
                Launch(
                    kernel="norm",
                    grid=(rows,),
                    arguments=at | {"width": width, "eps": float(eps)},
                    constants={"weighted": weight is not None, "block": _power(width)},
                    warps=_warps(_power(width)),
                    stages=1,
                )
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverses = context.saved_tensors
        dy, dx = upstream[0].contiguous(), torch.empty_like(x)
        width, rows = x.shape[-1], inverses.numel()
        share = max(1, -(-rows // PARTS))
        parts = x.new_zeros(-(-rows // share), width, dtype=torch.float32)
        at = {"x_at": x, "weight_at": x if weight is None else weight, "inverse_at": inverses}
        if rows:
            launch(
                Launch(
                    kernel="norm_grads",
                    grid=(len(parts),),
                    arguments=at
                    | {"dy_at": dy, "dx_at": dx, "dweight_at": parts}
                    | {"rows": rows, "share_rows": share, "width": width},
                    constants={"weighted": weight is not None, "block": _power(width)},
                    warps=_warps(_power(width)),
                    stages=1,
                )
            )
        return dx, None if weight is None else parts.sum(0).to(weight.dtype), None, None


def rms_norm(
    x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"] | None, eps: float, dtype: torch.dtype
) -> Float[Tensor, "*B D"]:
    """x / √(mean(x²) + ε) · weight, to a number format. D is at most LARGEST_ROW."""
    y: Tensor = _RMSNorm.apply(x, weight, eps, dtype)  # type: ignore[no-untyped-call]
    return y


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor | None, cosine: Tensor, sine: Tensor, eps: float | None
    ) -> Tensor:
        x = x if x.stride(3) == 1 else x.contiguous()
        context.eps = eps
        context.save_for_backward(*((cosine, sine) if eps is None else (cosine, sine, x, weight)))
        B, N, T, E = x.shape
        y = torch.empty((B, T, N, E), dtype=x.dtype, device=x.device).transpose(1, 2)  # attention keeps that order
        _turned(x, y, weight, cosine, sine, eps, 1.0)
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        dy = upstream[0] if upstream[0].stride(3) == 1 else upstream[0].contiguous()
        B, N, T, E = dy.shape
        dx = torch.empty((B, T, N, E), dtype=dy.dtype, device=dy.device).transpose(1, 2)  # as the projection gave it
        if context.eps is None:
            cosine, sine = context.saved_tensors
            _turned(dy, dx, None, cosine, sine, None, -1.0)
            return dx, None, None, None, None
        cosine, sine, x, weight = context.saved_tensors
        parts = _rotate_grads(x, dy, dx, weight, cosine, sine, context.eps)
        return dx, None if weight is None else parts.sum(0).to(weight.dtype), None, None, None


def _places(**tensors: Tensor) -> dict[str, int]:
    """How far batches, heads and tokens of (B, N, T, E) lie from each other."""
    return {
        f"{name}_{axis}": tensor.stride(dim)
        for name, tensor in tensors.items()
        for dim, axis in enumerate(("batch", "head", "token"))
    }


def _angles(x: Tensor, cosine: Tensor) -> dict[str, int]:
    return {"angle_batch": cosine.stride(0) if len(cosine) == len(x) else 0, "angle_token": cosine.stride(2)}


def _blocks(heads: int, half: int) -> dict[str, int]:
    return {
        "block_heads": min(_power(heads), max(1, TILE_VALUES // (2 * _power(half)))),
        "block_half": _power(half),
    }


def _turned(
    x: Tensor, y: Tensor, weight: Tensor | None, cosine: Tensor, sine: Tensor, eps: float | None, sign: float
) -> None:
    B, N, T, E = x.shape
    blocks = _blocks(N, E // 2)
    sizes: dict[str, int | float] = {"heads": N, "tokens": T, "half": E // 2, "eps": eps or 0.0, "sign": sign}
    if not x.numel():
        return
    launch(
        Launch(
            kernel="rotate",
            grid=(B * T, -(-N // blocks["block_heads"])),
            arguments={"x_at": x, "y_at": y, "weight_at": x if weight is None else weight}
            | {"cosine_at": cosine, "sine_at": sine}
            | sizes
            | _places(x=x, y=y)
            | _angles(x, cosine),
            constants={"normed": eps is not None, "weighted": weight is not None} | blocks,
            warps=_warps(2 * blocks["block_heads"] * blocks["block_half"]),
            stages=1,
        )
    )


def _rotate_grads(
    x: Tensor, dy: Tensor, dx: Tensor, weight: Tensor | None, cosine: Tensor, sine: Tensor, eps: float
) -> Float[Tensor, "parts E"]:
    B, N, T, E = x.shape
    blocks = _blocks(N, E // 2)
    groups, share = -(-N // blocks["block_heads"]), max(1, -(-B * T // PARTS))
    programs = -(-B * T // share)
    parts = x.new_zeros(programs * groups, E, dtype=torch.float32)
    if not x.numel():
        return parts
    launch(
        Launch(
            kernel="rotate_grads",
            grid=(programs, groups),
            arguments={"x_at": x, "dy_at": dy, "dx_at": dx, "weight_at": x if weight is None else weight}
            | {"dweight_at": parts, "cosine_at": cosine, "sine_at": sine}
            | {"rows": B * T, "share_rows": share, "heads": N, "tokens": T, "half": E // 2}
            | _places(x=x, dy=dy, dx=dx)
            | _angles(x, cosine)
            | {"eps": eps},
            constants={"weighted": weight is not None} | blocks,
            warps=_warps(2 * blocks["block_heads"] * blocks["block_half"]),
            stages=1,
        )
    )
    return parts


def rotate(
    x: Float[Tensor, "B N T E"],
    cosine: Float[Tensor, "#B 1 T E"],
    sine: Float[Tensor, "#B 1 T E"],
    weight: Float[Tensor, " E"] | None = None,
    eps: float | None = None,
) -> Float[Tensor, "B N T E"]:
    """
    Each pair of numbers (e, e + E/2) of a head rotated by its angle; the second half of the angles repeats the first.
    With `eps`, the head is first divided by √(mean(x²) + ε) and multiplied by the weights, if any.
    """
    y: Tensor = _Turn.apply(x, weight, cosine.contiguous(), sine.contiguous(), eps)  # type: ignore[no-untyped-call]
    return y


def cross_entropy_(
    logits: Float[Tensor, "C V"],
    targets: Int[Tensor, " C"],
    *,
    z_loss: float = 0.0,
    share: float = 1.0,
    with_grads: bool = True,
    grads: Float[Tensor, "C V"] | None = None,
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """
    z = log Σ exp(s) of each row s of logits, and s[target], in float32; the cross entropy is their difference.
    Both are 0 for rows with a negative target, which do not count.

    With `with_grads` the logits are overwritten with the gradient of share · Σ (z − s[target] + z_loss · z²), or
    `grads` are, in their format.
    """
    z, reached = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    block = min(LOGITS_AT_ONCE, _power(logits.shape[1]))
    if len(logits):
        launch(
            Launch(
                kernel="entropy",
                grid=(len(logits),),
                arguments={"logits_at": logits, "targets_at": targets.contiguous()}
                | {"grads_at": logits if grads is None else grads, "z_at": z, "reached_at": reached}
                | {"width": logits.shape[1], "z_loss": float(z_loss), "share": float(share)},
                constants={"with_grads": with_grads, "block": block},
                warps=_warps(block),
                stages=1,
            )
        )
    return z, reached


GEMV_ROWS = 16
"""Of x at most, which matrix units take at once."""
GROUP_BYTES = {"int8": 32, "int4": 16, "nf4": 32}
"""Bytes of codes that share a scale; those of int8 share that of the row."""
TILE_BYTES, WIDE_TILE_BYTES = 4096, 64
"""Of codes that a program reads at once for one row of x; of a row of W, for more rows in bfloat16."""
PROGRAMS = 512
"""That are enough for every GPU. Few outputs are shared out further along the width."""


def gemv(
    x: Float[Tensor, "M D"],
    codes: Tensor,
    scales: Tensor,
    layout: str,
    *,
    numbers: Float[Tensor, "16"] | None = None,
    coarse: Float[Tensor, " scales"] | None = None,
    bias: Float[Tensor, " R"] | None = None,
) -> Float[Tensor, "M R"]:
    """
    x Wᵀ + bias for at most GEMV_ROWS rows and a matrix W in the layout of quantize.Int8, Int4 or NF4, whose 16
    `numbers` are given. `coarse` is there where scales are codes themselves. Sums are in a fixed order.
    """
    x, codes = x.contiguous(), codes.flatten(1)
    (M, D), R, size = x.shape, len(codes), GROUP_BYTES[layout]
    groups = -(-codes.shape[1] // size)
    if M == 1:
        block_out = 1 << max(0, min(4, R // PROGRAMS).bit_length() - 1)
        block_groups, parts = min(_power(groups), TILE_BYTES // (block_out * size)), 1
    else:
        block_out, block_groups = (
            32,
            WIDE_TILE_BYTES // (2 if x.dtype == torch.float32 or layout == "nf4" else 1) // size,
        )
        parts = min(-(-groups // (2 * block_groups)), max(1, 2 * PROGRAMS * block_out // R))
    share = -(-groups // (parts * block_groups)) * block_groups
    parts = -(-groups // share)
    y = x.new_empty(parts, M, R, dtype=torch.float32 if parts > 1 else x.dtype)
    if y.numel():
        launch(
            Launch(
                kernel="gemv",
                grid=(-(-R // block_out), parts),
                arguments={"x_at": x, "codes_at": codes, "scales_at": scales, "y_at": y}
                | {"coarse_at": x if coarse is None else coarse, "numbers_at": x if numbers is None else numbers}
                | {"bias_at": x if bias is None else bias}
                | {"rows": M, "outputs": R, "inputs": D}
                | {"code_bytes": codes.shape[1], "groups": groups, "share_groups": share}
                | {"coarse_last": 0 if coarse is None else len(coarse) - 1},
                constants={
                    "bits": 8 if layout == "int8" else 4,
                    "normal": layout == "nf4",
                    "double": coarse is not None,
                }
                | {"biased": bias is not None and parts == 1, "block_rows": 1 if M == 1 else GEMV_ROWS}
                | {"block_out": block_out, "block_groups": block_groups, "group_bytes": size},
                warps=4,
                stages=1 if layout == "nf4" else 2,  # more would copy each of the 16 numbers apart
            )
        )
    if parts == 1:
        return y[0]
    total = y.sum(0)
    return (total if bias is None else total + bias).to(x.dtype)


def plain_rms_norm(x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"] | None, eps: float) -> Float[Tensor, "*B D"]:
    """x / √(mean(x²) + ε) · weight"""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def plain_rotate(
    x: Float[Tensor, "B N T E"],
    cosine: Float[Tensor, "#B 1 T E"],
    sine: Float[Tensor, "#B 1 T E"],
    weight: Float[Tensor, " E"] | None = None,
    eps: float | None = None,
) -> Float[Tensor, "B N T E"]:
    """(first · cos − second · sin, second · cos + first · sin) of each head's halves, after its norm."""
    x = x if eps is None else plain_rms_norm(x, weight, eps)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def plain_cross_entropy(
    logits: Float[Tensor, "C V"], targets: Int[Tensor, " C"], z_loss: float = 0.0
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"], Float[Tensor, "C V"]]:
    """z = log Σ exp(logits), the targets' logits `reached`, and the gradients of Σ (z − reached + z_loss · z²)."""
    counts, labels = targets >= 0, targets.clamp_min(0)[:, None]
    z, reached = torch.logsumexp(logits, 1), logits.gather(1, labels)[:, 0]
    grads = torch.softmax(logits, 1) * (1 + 2 * z_loss * z)[:, None]
    grads = grads.scatter_add(1, labels, -torch.ones_like(labels, dtype=logits.dtype)) * counts[:, None]
    return z * counts, reached * counts, grads


def plain_cross_entropy_(
    logits: Float[Tensor, "C V"], targets: Int[Tensor, " C"], z_loss: float, with_grads: bool, share: float = 1.0
) -> tuple[Float[Tensor, "C 1"], Float[Tensor, "C V"] | None]:
    """
    z, and `share` times the gradients, in few passes over memory. Training uses it where there is no kernel.

    z is in float32, the gradients in the dtype of the logits, which may be overwritten. Every target counts.
    """
    if not with_grads:
        return torch.logsumexp(logits.float(), 1, keepdim=True), None
    labels = targets[:, None]
    largest, index = logits.max(1, keepdim=True)
    shares = torch.softmax(logits, 1, dtype=torch.float32)
    z = largest.float() - shares.gather(1, index).log_()  # the largest share is at least 1 / V
    if z_loss:
        shares.mul_(1 + 2 * z_loss * z)
    shares.scatter_add_(1, labels, shares.new_full(labels.shape, -1.0))
    return z, torch.mul(shares, share, out=shares if logits.dtype == torch.float32 else logits)
