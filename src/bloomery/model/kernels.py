"""
Operations of training on the processor by the compiled library, with their gradients.

Each computes what a line or two of PyTorch do, in one pass over its numbers, in float32 whatever the format of its
tensors is; so in bfloat16 it rounds once where PyTorch rounds at every step. Callers ask `ready(tensor)` and keep the
lines of PyTorch for when it says no. Letters used for shapes are those of layers.py.
"""

import ctypes
from contextvars import ContextVar
from typing import Any

from jaxtyping import Float, Int

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core import native

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

LIBRARY, NORMS = "training", "norms"
KINDS = {torch.float32: 0, torch.bfloat16: 1}
ELSEWHERE: ContextVar[bool] = ContextVar("elsewhere", default=False)
"""Set while a step on another kind of device is drawn up with fake tensors: nothing meant for processors runs then."""


PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types of tensors that lie whole in the memory of this process, or would."""


def ready(*tensors: Tensor) -> bool:
    """Whether the library is there, and takes these tensors: on the processor, all float32 or all bfloat16."""
    first = tensors[0]
    return (
        all(one.device.type == "cpu" and one.dtype == first.dtype for one in tensors)
        and all(type(one) in PLAIN for one in tensors)
        and first.dtype in KINDS
        and not torch.compiler.is_compiling()
        and not ELSEWHERE.get()
        and native.library(LIBRARY) is not None
        and native.library(NORMS) is not None
    )


def call(library: str, name: str, *arguments: Tensor | int | float) -> None:
    """Tensors are handed over as addresses, and have to be contiguous unless strides are given with them."""
    if any(isinstance(one, FakeTensor) for one in arguments):
        return  # what is written into tensors without numbers is of no interest
    function = getattr(native.library(library), f"bloomery_{name}")
    function.restype = None
    function(*map(_native, (*arguments, torch.get_num_threads())))


def _call(name: str, *arguments: Tensor | int | float) -> None:
    call(LIBRARY, name, *arguments)


def _native(value: Tensor | int | float) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        centered: bool,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.contiguous()
        weight, bias = (None if one is None else one.contiguous() for one in (weight, bias))
        y, inverses = torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[:-1])
        means = torch.empty_like(inverses) if centered else None
        learned = (0 if one is None else one for one in (weight, bias))
        sizes = inverses.numel(), x.shape[-1], float(eps)
        call(NORMS, "norm", KINDS[dtype], x, *learned, y, 0 if means is None else means, inverses, *sizes)
        context.save_for_backward(x, weight, means, inverses)
        context.biased = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        x, weight, means, inverses = context.saved_tensors
        dy, dx = upstream[0].contiguous(), torch.empty_like(x)
        sums = x.new_zeros(torch.get_num_threads(), 2, x.shape[-1])
        given = (0 if one is None else one for one in (weight, means))
        call(NORMS, "norm_slopes", KINDS[dy.dtype], x, *given, inverses, dy, dx, sums, inverses.numel(), x.shape[-1])
        dweight, dbias = sums.sum(0)
        return dx, None if weight is None else dweight, dbias if context.biased else None, None, None, None


def rms_norm(x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"] | None, eps: float, dtype: torch.dtype) -> Tensor:
    """x / √(mean(x²) + ε) · weight, from float32 to a number format."""
    y: Tensor = _Norm.apply(x, weight, None, False, eps, dtype)  # type: ignore[no-untyped-call]
    return y


def layer_norm(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, " D"] | None,
    bias: Float[Tensor, " D"] | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """(x − mean(x)) / √(var(x) + ε) · weight + bias, from float32 to a number format."""
    y: Tensor = _Norm.apply(x, weight, bias, True, eps, dtype)  # type: ignore[no-untyped-call]
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        context.save_for_backward(gate, up)
        y = torch.empty_like(gate)
        _call("swiglu", KINDS[gate.dtype], gate, up, y, y.numel())
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = context.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        _call("swiglu_slopes", KINDS[gate.dtype], gate, up, upstream[0].contiguous(), dgate, dup, gate.numel())
        return dgate, dup


def swiglu(gate: Float[Tensor, "*B M"], up: Float[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
    """silu(gate) ⊙ up."""
    y: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return y


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        context.save_for_backward(x)
        y = torch.empty_like(x)
        _call("gelu", KINDS[x.dtype], x, y, y.numel())
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        dx = torch.empty_like(x)
        _call("gelu_slopes", KINDS[x.dtype], x, upstream[0].contiguous(), dx, x.numel())
        return dx


def gelu_tanh(x: Float[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
    """GELU approximated by tanh, as in GPT-2. The exact one is fast in PyTorch as it is."""
    y: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        context.save_for_backward(cosine, sine)
        return _turned(x, torch.empty(x.shape, dtype=x.dtype), cosine, sine, 1.0)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        dy = upstream[0]
        B, N, T, E = dy.shape
        dx = torch.empty((B, T, N, E), dtype=dy.dtype).transpose(1, 2)  # as what the projection gave lies in memory
        cosine, sine = context.saved_tensors
        return _turned(dy, dx, cosine, sine, -1.0), None, None


def _turned(x: Tensor, y: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    B, N, T, E = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    angles = (cosine.stride(0) if cosine.shape[0] == B else 0, cosine.stride(2))
    strides = torch.tensor([*x.stride()[:3], *y.stride()[:3], *angles])
    _call("turn", KINDS[x.dtype], x, y, cosine, sine, B, N, T, E, strides, sign)
    return y


def rotate(
    x: Float[Tensor, "B N T E"], cosine: Float[Tensor, "#B 1 T E"], sine: Float[Tensor, "#B 1 T E"]
) -> Float[Tensor, "B N T E"]:
    """Each pair of numbers (e, e + E/2) turned by its angle; the second half of the angles repeats the first."""
    y: Tensor = _Rotate.apply(x, cosine.contiguous(), sine.contiguous())  # type: ignore[no-untyped-call]
    return y


def first_seen(segments: Int[Tensor, "B T"], window: int | None = None) -> Int[Tensor, "B T"]:
    """The first key that each query sees: of its segment, whose tokens stand together, and of its window."""
    T = segments.shape[1]
    places = torch.arange(T).expand(segments.shape)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return first if window is None else torch.maximum(first, places - (window - 1))


def column_sums(x: Float[Tensor, "N D"]) -> Float[Tensor, " D"]:
    """Σ x[n] over rows n, in float32."""
    sums, x = torch.empty(x.shape[1], dtype=torch.float32), x.contiguous()
    _call("columns", KINDS[x.dtype], x, sums, *x.shape)
    return sums


def cross_entropy_(
    scores: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    *,
    z_loss: float = 0.0,
    share: float = 1.0,
    slopes: bool = True,
) -> Float[Tensor, " N"]:
    """
    z = log Σ exp(scores) of each row, in float32; the cross entropy is z − scores[target].

    With `slopes` the scores are overwritten with the gradient of share · Σ (z − scores[target] + z_loss · z²).
    """
    z = torch.empty(len(scores), dtype=torch.float32)
    _call(
        "entropy",
        KINDS[scores.dtype],
        scores,
        scores.stride(0),
        targets.contiguous(),
        z,
        *scores.shape,
        float(z_loss),
        float(share),
        int(slopes),
    )
    return z
