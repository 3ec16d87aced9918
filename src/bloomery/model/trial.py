"""
The compiled library's kernels, tried as the doctor tries torch's: `python -m bloomery.model.trial rms-norm`.

A library that crashes or computes other numbers than the formula is not used: see hw/choice.py.
"""

import sys
from collections.abc import Callable

from bloomery.core import native
from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import find
from bloomery.hw.probe import kernels as plain
from bloomery.hw.probe.compare import compare, say, tell_device, tell_time
from bloomery.model import kernels
from bloomery.model.causal import causal_attention

import torch

TOKENS, HEADS, WIDTH, OTHER_WIDTH = 200, 4, 64, 48


def attention() -> None:
    dtype = find("cpu").compute_dtype
    first = torch.zeros(1, TOKENS, dtype=torch.int64)
    for width in (OTHER_WIDTH, WIDTH):  # some widths are computed by pairs, others are not
        q, k, v, slope = (torch.randn(1, HEADS, TOKENS, width).to(dtype) for _ in range(4))
        plain.forward_and_back(
            find("cpu"),
            f"heads of {width}",
            lambda q, k, v: causal_attention(q, k, v, first),
            plain.plain_attention,
            (q, k, v),
            slope,
        )
    queries, keys, values = tensors = [torch.randn(1, 8, 512, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]
    long = torch.zeros(1, 512, dtype=torch.int64)
    tell_time(find("cpu"), lambda: torch.autograd.grad(causal_attention(queries, keys, values, long).sum(), tensors))


def rms_norm() -> None:
    device = find("cpu")
    x, weight, slope = 3 * torch.randn(65, 328), torch.rand(328) + 0.5, torch.randn(65, 328)
    slope = slope.to(device.compute_dtype).float()
    plain.forward_and_back(
        device,
        "norm",
        lambda x, g: kernels.rms_norm(x, g, 1e-6, device.compute_dtype),
        plain.plain_rms_norm,
        (x, weight),
        slope,
        "xg",
    )
    rows, scale = plain.norm_inputs(device)

    def work() -> object:
        return torch.autograd.grad(kernels.rms_norm(rows, scale, 1e-6, device.compute_dtype).sum(), (rows, scale))

    tell_time(device, work)


def cross_entropy() -> None:
    """It overwrites the scores with their gradients, and so is compared by hand."""
    dtype = find("cpu").compute_dtype
    scores, targets = (4 * torch.randn(65, 5003)).to(dtype), torch.randint(0, 5003, (65,))
    exact = scores.double()
    say(trying="loss")
    z = kernels.cross_entropy_(scores, targets)
    compare("loss", z, torch.logsumexp(exact, 1))
    slopes = torch.softmax(exact, 1)
    slopes[torch.arange(65), targets] -= 1
    compare("loss, gradient of s", scores, slopes)
    many, wanted = plain.entropy_inputs(find("cpu"))
    tell_time(find("cpu"), lambda: kernels.cross_entropy_(many.detach().clone(), wanted))


KERNELS: dict[str, Callable[[], None]] = {
    "attention": attention,
    "rms-norm": rms_norm,
    "cross-entropy": cross_entropy,
}

if __name__ == "__main__":
    tell_device(find("cpu"))
    torch.manual_seed(0)
    if native.library(kernels.LIBRARY) is None:
        say(absent=native.state(kernels.LIBRARY))
    else:
        KERNELS[sys.argv[1]]()
