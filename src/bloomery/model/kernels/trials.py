"""
Trial programs for Bloomery's own CPU and GPU kernels, called as the doctor calls torch's.

    python -m bloomery.model.kernels.trials rms-norm           a kernel of the compiled library
    python -m bloomery.model.kernels.trials rms-norm-triton    a GPU kernel of ours

A word that ends in -torch tries what callers compute without the kernels. A library that crashes, or computes other
numbers than the formula, is not used: see hw/kernel_selection.py.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from bloomery.core import native
from bloomery.hw import device as devices
from bloomery.hw import kernel_trials, probes
from bloomery.hw import require_torch as require_torch
from bloomery.hw.device import Device, find
from bloomery.hw.probes import compare, say, tell_device, tell_time
from bloomery.model.attention import (
    HALF,
    AttentionMask,
    compiled_flex,
    flexible_attention,
    segment_attention,
    segment_bounds,
    softmax_attention,
)
from bloomery.model.config import Base
from bloomery.model.kernels import cpu, triton
from bloomery.model.kernels.cpu import causal_attention
from bloomery.model.layers import RMSNorm, rotate
from bloomery.model.quantize import QuantizedLinear, frozen

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, HEADS, WIDTH, OTHER_WIDTH = 200, 4, 64, 48


def attention() -> None:
    dtype = find("cpu").compute_dtype
    first = torch.zeros(1, TOKENS, dtype=torch.int64)
    for width in (OTHER_WIDTH, WIDTH):  # some widths are computed by pairs, others are not
        q, k, v, grad = (torch.randn(1, HEADS, TOKENS, width).to(dtype) for _ in range(4))
        probes.forward_and_back(
            find("cpu"),
            f"heads of {width}",
            lambda q, k, v: causal_attention(q, k, v, first),
            probes.plain_attention,
            (q, k, v),
            grad,
        )
    queries, keys, values = tensors = [torch.randn(1, 8, 512, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]
    long = torch.zeros(1, 512, dtype=torch.int64)
    tell_time(find("cpu"), lambda: torch.autograd.grad(causal_attention(queries, keys, values, long).sum(), tensors))


def cpu_rms_norm() -> None:
    device = find("cpu")
    x, weight, grad = 3 * torch.randn(65, 328), torch.rand(328) + 0.5, torch.randn(65, 328)
    grad = grad.to(device.compute_dtype).float()
    probes.forward_and_back(
        device,
        "norm",
        lambda x, g: cpu.rms_norm(x, g, 1e-6, device.compute_dtype),
        probes.plain_rms_norm,
        (x, weight),
        grad,
        "xg",
    )
    rows, scale = probes.norm_inputs(device)

    def work() -> object:
        return torch.autograd.grad(cpu.rms_norm(rows, scale, 1e-6, device.compute_dtype).sum(), (rows, scale))

    tell_time(device, work)


def cpu_cross_entropy() -> None:
    """Compared by hand, because the kernel overwrites the logits with their gradients."""
    dtype = find("cpu").compute_dtype
    logits, targets = (4 * torch.randn(65, 5003)).to(dtype), torch.randint(0, 5003, (65,))
    exact = logits.double()
    say(trying="loss")
    z = cpu.cross_entropy_(logits, targets)
    compare("loss", z, torch.logsumexp(exact, 1))
    grads = torch.softmax(exact, 1)
    grads[torch.arange(65), targets] -= 1
    compare("loss, gradient of s", logits, grads)
    many, labels = probes.entropy_inputs(find("cpu"))
    tell_time(find("cpu"), lambda: cpu.cross_entropy_(many.detach().clone(), labels))


CPU_KERNELS: dict[str, Callable[[], None]] = {
    "attention": attention,
    "rms-norm": cpu_rms_norm,
    "cross-entropy": cpu_cross_entropy,
}


def main_cpu(name: str) -> None:
    tell_device(find("cpu"))
    torch.manual_seed(0)
    if native.library(cpu.LIBRARY) is None:
        say(absent=native.state(cpu.LIBRARY))
    else:
        CPU_KERNELS[name]()


EPS = 1e-6
LONG = {"cpu": 4}
"""Rows of what is timed where Triton interprets its kernels."""
ROWS, PRODUCT_ROWS = 2**15, 2**12
"""On the GPUs that they are for: as many as a micro-batch has tokens, and fewer where a row is a whole matmul."""


def _long(device: Device, rows: int = ROWS) -> int:
    return LONG.get(device.torch_device.type, rows)


def triton_rms_norm(device: Device) -> None:
    dtype = device.compute_dtype
    x, weight, grad = 3 * torch.randn(65, 328), torch.rand(328) + 0.5, torch.randn(65, 328).to(dtype).float()

    def normed(x: Tensor, g: Tensor) -> Tensor:
        return triton.rms_norm(x, g, EPS, dtype)

    probes.forward_and_back(device, "norm", normed, probes.plain_rms_norm, (x, weight), grad, "xg")
    rows, scale = (one.requires_grad_() for one in _on(device, torch.randn(_long(device), 1024), torch.ones(1024)))
    tell_time(device, lambda: torch.autograd.grad(normed(rows, scale).sum(), (rows, scale)))


Losing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _fused_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    z, reached = triton.cross_entropy_(logits, targets)
    return z - reached, logits


def _plain_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    reached = logits.gather(1, targets[:, None]).float()
    z, grads = triton.plain_cross_entropy_(logits, targets, 0.0, True)
    assert grads is not None
    return (z - reached)[:, 0], grads


def triton_cross_entropy(device: Device, lost: Losing) -> None:
    """Compared by hand, because the kernel may overwrite the logits with their gradients."""
    logits, targets = (4 * torch.randn(65, 5003)).to(device.compute_dtype), torch.randint(0, 5003, (65,))
    z, reached, exact_grads = triton.plain_cross_entropy(logits.double(), targets)
    say(trying="loss")
    losses, grads = lost(*_on(device, logits.clone(), targets))
    compare("loss", losses, z - reached)
    compare("loss, gradient of s", grads, exact_grads)
    many = torch.randn(_long(device, PRODUCT_ROWS) // 4, 8192, device=device.torch_device).to(device.compute_dtype)
    places = torch.arange(len(many), device=device.torch_device)
    tell_time(device, lambda: lost(many, places))


Turning = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def _ours(x: Tensor, cosine: Tensor, sine: Tensor, weight: Tensor | None) -> Tensor:
    return triton.rotate(x, cosine, sine, weight, None if weight is None else EPS)


def _torchs(x: Tensor, cosine: Tensor, sine: Tensor, weight: Tensor | None) -> Tensor:
    """What attention computes without kernels of our own."""
    if weight is not None:
        norm = RMSNorm(len(weight), EPS)
        x = torch.func.functional_call(norm, {"weight": weight}, (x,)).to(x.dtype)
    return rotate(x, (cosine, sine))


def rotary(device: Device, turned: Turning, normed: bool) -> None:
    dtype, width, tokens = device.compute_dtype, 80, 37
    cosine, sine = _angles(tokens, width)
    x = torch.randn(2, tokens, 3, width).to(dtype).transpose(1, 2)
    grad = torch.randn(2, 3, tokens, width).to(dtype).float()
    inputs = (x, torch.rand(width) + 0.5) if normed else (x,)
    c, s = _on(device, cosine.to(dtype), sine.to(dtype))

    def work(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return turned(x, c, s, weight)

    def formula(x: Tensor, weight: Tensor | None = None) -> Tensor:
        rope = cosine.to(dtype).double(), sine.to(dtype).double()
        return triton.plain_rotate(x, *rope, weight, None if weight is None else EPS)

    probes.forward_and_back(device, "rotated", work, formula, inputs, grad, "xg"[: len(inputs)])
    tokens = _long(device)
    c, s = (one.to(dtype) for one in _on(device, *_angles(tokens, 64)))
    many = [torch.randn(1, tokens, 16, 64, device=device.torch_device).to(dtype).transpose(1, 2).requires_grad_()]
    if normed:
        many.append(torch.ones(64, device=device.torch_device, requires_grad=True))
    tell_time(device, lambda: torch.autograd.grad(work(*many), many, torch.ones_like(many[0])))


def _angles(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    angle = (torch.arange(tokens)[:, None] / 10.0 ** torch.linspace(0, 4, width // 2))[None, None]
    return torch.cat((angle, angle), 3).cos(), torch.cat((angle, angle), 3).sin()


Multiplying = Callable[[QuantizedLinear, Tensor], Tensor]


def _few(matrix: QuantizedLinear, x: Tensor) -> Tensor:
    return matrix.few(x, None if matrix.bias is None else matrix.bias.to(x.dtype))


def _dense(matrix: QuantizedLinear, x: Tensor) -> Tensor:
    return F.linear(x, matrix.dense(x.dtype), None if matrix.bias is None else matrix.bias.to(x.dtype))


def gemv(device: Device, bases: Sequence[Base | Literal["int4"]], multiplied: Multiplying) -> None:
    """For one row and for as many as the kernel takes; a narrow matrix, and one that is shared out along its width."""
    dtype = device.compute_dtype
    for base, (outputs, width), count in itertools.product(bases, ((72, 200), (33, 1100)), (1, triton.GEMV_ROWS)):
        matrix, x = frozen(nn.Linear(width, outputs), base), torch.randn(count, width).to(dtype)
        case = f"{count} × {base} of {outputs} × {width}"
        say(trying=case)
        assert matrix.bias is not None
        right = x.double() @ matrix.dense(torch.float32).double().t() + matrix.bias.double()
        compare(case, multiplied(matrix.to(device.torch_device), *_on(device, x)), right)
    width = 4096 if _long(device) > 16 else 64
    matrix = frozen(nn.Linear(width, width, device=device.torch_device), bases[0])
    many = torch.randn(triton.GEMV_ROWS, width, device=device.torch_device).to(dtype)
    tell_time(device, lambda: (multiplied(matrix, many[:1]), multiplied(matrix, many)))


def _on(device: Device, *tensors: Tensor) -> list[Tensor]:
    return [one.to(device.torch_device) for one in tensors]


FLEX_SHAPES = ((5, 1, 64), (2, 2, 128))
"""Query heads, key heads and width: a group that is no power of two, and the other common width."""
DOCUMENT_TOKENS = 90


def flex_attention(device: Device) -> None:
    """Attention over several documents in a row, by the kernel that torch compiles for the mask."""
    if not devices.compiles_kernels(device.torch_device):
        say(absent="Triton is not installed")
        return
    documents(device, lambda q, k, v, mask: flexible_attention(q, k, v, mask, compiled_flex()))


def varlen_attention(device: Device) -> None:
    """The same by torch's flash attention for documents of any length."""
    if device.compute_dtype not in HALF:
        say(absent=f"not for {device.compute_dtype}")
        return
    try:
        documents(device, segment_attention)
    except RuntimeError as error:
        if not probes.is_not_here(error):
            raise
        say(absent=probes.first_line(error))


def documents(device: Device, attend: Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]) -> None:
    for heads, kv_heads, width in FLEX_SHAPES:
        q, grad = (torch.randn(1, heads, TOKENS, width).to(device.compute_dtype) for _ in range(2))
        k, v = (torch.randn(1, kv_heads, TOKENS, width).to(device.compute_dtype) for _ in range(2))
        case = f"{heads} heads of {width}, {kv_heads} of keys"
        here, there = _documents(TOKENS, torch.device("cpu")), _documents(TOKENS, device.torch_device)

        def work(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask = there) -> Tensor:
            return attend(q, k, v, mask)

        def formula(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask = here) -> Tensor:
            return softmax_attention(q, k, v, mask)

        probes.forward_and_back(device, case, work, formula, (q, k, v), grad)
    tokens = 2048
    shape = (1, 8, tokens, 64)
    q, k, v = (
        torch.randn(shape, device=device.torch_device).to(device.compute_dtype).requires_grad_() for _ in range(3)
    )
    mask = _documents(tokens, device.torch_device)
    tell_time(
        device,
        lambda: torch.autograd.grad(attend(q, k, v, mask).sum(), (q, k, v)),
    )


def _documents(
    tokens: int, device: torch.device, rows: int = 1, document_tokens: int = DOCUMENT_TOKENS
) -> AttentionMask:
    segments = (torch.arange(tokens) // document_tokens).repeat(rows, 1)
    bounds = segment_bounds(segments.numpy())
    ends = None if bounds is None else torch.from_numpy(bounds).to(device)
    return AttentionMask(num_queries=tokens, num_keys=tokens, device=device, segments=segments.to(device), bounds=ends)


TRITON_KERNELS: dict[str, Callable[[Device], None]] = {
    "rms-norm-triton": triton_rms_norm,
    "cross-entropy-triton": lambda device: triton_cross_entropy(device, _fused_loss),
    "rotary-triton": lambda device: rotary(device, _ours, False),
    "rotary-norm-triton": lambda device: rotary(device, _ours, True),
    "gemv-int8-triton": lambda device: gemv(device, ("int8",), _few),
    "gemv-int4-triton": lambda device: gemv(device, ("int4",), _few),
    "gemv-nf4-triton": lambda device: gemv(device, ("nf4", "nf4_double"), _few),
    "cross-entropy-torch": lambda device: triton_cross_entropy(device, _plain_loss),
    "rotary-torch": lambda device: rotary(device, _torchs, False),
    "rotary-norm-torch": lambda device: rotary(device, _torchs, True),
    "gemv-int8-torch": lambda device: gemv(device, ("int8",), _dense),
    "gemv-int4-torch": lambda device: gemv(device, ("int4",), _dense),
    "gemv-nf4-torch": lambda device: gemv(device, ("nf4", "nf4_double"), _dense),
    kernel_trials.FLEX: flex_attention,
    kernel_trials.VARLEN: varlen_attention,
}


def main(name: str, device: Device) -> None:
    tell_device(device)
    torch.manual_seed(0)
    formats = [device.compute_dtype]
    if name.endswith(kernel_trials.OWN):
        if not devices.compiles_kernels(device.torch_device):
            say(
                absent="Triton is not installed"
                if device.torch_device.type != "cpu"
                else "Triton compiles for GPUs alone"
            )
            return
        if device.compute_dtype not in triton.DTYPES:
            say(absent=f"{device.compute_dtype} is left to torch")
            return
        formats = sorted({torch.float32, *formats}, key=lambda dtype: dtype == device.compute_dtype)
    for dtype in formats:  # the time of the last counts
        TRITON_KERNELS[name](replace(device, compute_dtype=dtype))


def run(name: str, gpu: bool) -> None:
    """On a GPU, also the trials of torch's own kernels: one process has all."""
    if name in TRITON_KERNELS:
        main(name, devices.find())
    elif gpu:
        probes.run(name)
    else:
        main_cpu(name)


if __name__ == "__main__":
    probes.answer(sys.argv[1:], partial(run, gpu=devices.find().is_gpu))
