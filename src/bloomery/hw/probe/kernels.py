"""
Single operations of training, forward and backward, against the processor's in float64.

There are GPUs whose forward pass is right and whose gradients are not, so that both are asked for everywhere.
"""

from collections.abc import Callable

from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import Device, find
from bloomery.hw.probe.compare import canaries, compare, poison, say, tell_device, tell_time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD_WIDTHS = (64, 128)
TOKENS = 200  # no multiple of a kernel's block, so that edges are computed too
LONG = {"cpu": 512}
"""Tokens of the attention that is timed; 2048 elsewhere."""
NOT_HERE = ("No available kernel", "No viable backend", "not compiled", "not been compiled", "is not supported")


def launch() -> None:
    """The simplest kernel: a sum into canaries. Broken stacks mostly end here."""
    device = find()
    tell_device(device)
    say(trying="sum")
    a, b = torch.arange(4096.0), torch.arange(4096.0).flip(0) / 3
    out = torch.add(a.to(device.place), b.to(device.place), out=canaries(a.to(device.place), 4096))
    compare("sum", out, a + b)


def matmul(library: str | None = None) -> None:
    """Products in the three layouts that layers and their gradients ask for, by one of the libraries for them."""
    device = find()
    tell_device(device)
    if library is not None:
        try:
            torch.backends.cuda.preferred_blas_library(library)
        except RuntimeError as error:
            say(absent=first_line(error))
            return
    torch.manual_seed(0)
    M, K, N = 200, 328, 136
    sides = {"NN": ((M, K), (K, N)), "NT": ((M, K), (N, K)), "TN": ((K, M), (K, N))}
    for name, (left, right) in sides.items():
        say(trying=name)
        a, b = (torch.randn(*shape).to(device.compute_dtype) for shape in (left, right))
        x, y = a.to(device.place), b.to(device.place)
        if name == "NT":
            b, y = b.t(), y.t()
        if name == "TN":
            a, x = a.t(), x.t()
        compare(name, torch.mm(x, y, out=canaries(x, M, N)), a.double() @ b.double())
    size = 256 if device.place.type == "cpu" else 2048
    square = torch.randn(size, size, device=device.place, dtype=device.compute_dtype)
    tell_time(device, lambda: square @ square)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def attention(name: str) -> None:
    """One of torch's implementations of attention, at the widths of heads that models have."""
    device = find()
    tell_device(device)
    torch.manual_seed(0)
    with sdpa_kernel(getattr(SDPBackend, name)):
        for width in HEAD_WIDTHS:
            q, k, v, slope = (torch.randn(1, 4, TOKENS, width).to(device.compute_dtype) for _ in range(4))
            try:
                forward_and_back(device, f"heads of {width}", _sdpa, plain_attention, (q, k, v), slope)
            except RuntimeError as error:
                if not any(words in str(error) for words in NOT_HERE):
                    raise
                say(absent=first_line(error))
                return
        shape = (1, 8, LONG.get(device.place.type, 2048), HEAD_WIDTHS[0])
        tensors = [torch.randn(shape, device=device.place, dtype=device.compute_dtype) for _ in range(3)]
        for one in tensors:
            one.requires_grad_()
        tell_time(device, lambda: torch.autograd.grad(_sdpa(*tensors).sum(), tensors))


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula."""
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, -torch.inf), dim=3) @ v


def forward_and_back(
    device: Device,
    case: str,
    work: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    slope: Tensor,
    names: str = "qkv",
) -> None:
    """Compare an operation and its gradients on the device with the formula in float64."""
    say(trying=case)
    theirs = [one.detach().to(device.place).requires_grad_() for one in inputs]
    ours = [one.detach().double().requires_grad_() for one in inputs]
    upstream = slope.to(device.place)
    poison(upstream)
    given, expected = work(*theirs), formula(*ours)
    compare(case, given, expected)
    say(trying=f"{case}, gradients")
    poison(*(one.detach() for one in theirs))
    found = torch.autograd.grad(given, theirs, upstream.to(given.dtype))
    right = torch.autograd.grad(expected, ours, slope.double())
    for name, one, other in zip(names, found, right, strict=True):
        compare(f"{case}, gradient of {name}", one, other)


def rms_norm() -> None:
    device = find()
    tell_device(device)
    torch.manual_seed(0)
    x, weight, slope = 3 * torch.randn(65, 328), torch.rand(328) + 0.5, torch.randn(65, 328)
    forward_and_back(
        device, "norm", lambda x, g: F.rms_norm(x, (328,), g, 1e-6), plain_rms_norm, (x, weight), slope, "xg"
    )
    rows, scale = norm_inputs(device)

    def work() -> object:
        normed = F.rms_norm(rows, (1024,), scale, 1e-6).to(device.compute_dtype)  # as layers hand it on
        return torch.autograd.grad(normed.sum(), (rows, scale))

    tell_time(device, work)


def norm_inputs(device: Device) -> tuple[Tensor, Tensor]:
    """What a norm is timed on."""
    rows, scale = torch.randn(4096, 1024, device=device.place), torch.ones(1024, device=device.place)
    return rows.requires_grad_(), scale.requires_grad_()


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def cross_entropy() -> None:
    """The loss of each row and its gradient, in float32 on scores of the compute format."""
    device = find()
    tell_device(device)
    torch.manual_seed(0)
    scores, targets = (4 * torch.randn(65, 5003)).to(device.compute_dtype), torch.randint(0, 5003, (65,))
    places = targets.to(device.place)
    forward_and_back(
        device,
        "loss",
        lambda s: F.cross_entropy(s.float(), places, reduction="none"),
        lambda s: torch.logsumexp(s, 1) - s.gather(1, targets[:, None])[:, 0],
        (scores,),
        torch.rand(65),
        "s",
    )
    many, wanted = entropy_inputs(device)
    tell_time(device, lambda: torch.autograd.grad(F.cross_entropy(many.float(), wanted, reduction="sum"), many))


def entropy_inputs(device: Device) -> tuple[Tensor, Tensor]:
    """What a loss is timed on."""
    scores = torch.randn(1024, 8192, device=device.place).to(device.compute_dtype)
    return scores.requires_grad_(), torch.arange(1024, device=device.place)
