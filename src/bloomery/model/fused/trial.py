"""
Our own GPU kernels, tried as the doctor tries torch's: `python -m bloomery.model.fused.trial rms-norm-triton`. A word
that ends in -torch tries what callers compute without them.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

from bloomery.hw import device as devices
from bloomery.hw import needs_torch as needs_torch
from bloomery.hw import trusted
from bloomery.hw.device import Device
from bloomery.hw.probe import kernels as probe
from bloomery.hw.probe.compare import compare, say, tell_device, tell_time
from bloomery.model.fused import operations, plain
from bloomery.model.layers import RMSNorm
from bloomery.model.positions import rotate
from bloomery.model.quantize import NF4, numbers

import torch
from torch import Tensor, nn

EPS = 1e-6
LONG = {"cpu": 4}
"""Rows of what is timed where Triton interprets its kernels; 4096 on the GPUs that they are for."""


def _long(device: Device) -> int:
    return LONG.get(device.place.type, 4096)


def rms_norm(device: Device) -> None:
    dtype = device.compute_dtype
    x, weight, slope = 3 * torch.randn(65, 328), torch.rand(328) + 0.5, torch.randn(65, 328).to(dtype).float()

    def normed(x: Tensor, g: Tensor) -> Tensor:
        return operations.rms_norm(x, g, EPS, dtype)

    probe.forward_and_back(device, "norm", normed, probe.plain_rms_norm, (x, weight), slope, "xg")
    rows, scale = (one.requires_grad_() for one in _on(device, torch.randn(_long(device), 1024), torch.ones(1024)))
    tell_time(device, lambda: torch.autograd.grad(normed(rows, scale).sum(), (rows, scale)))


Losing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _fused_loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    z, reached = operations.cross_entropy_(scores, targets)
    return z - reached, scores


def _plain_loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    reached = scores.gather(1, targets[:, None]).float()
    z, slopes = plain.cross_entropy_(scores, targets, 0.0, True)
    assert slopes is not None
    return (z - reached)[:, 0], slopes


def cross_entropy(device: Device, lost: Losing) -> None:
    """It may overwrite the scores with their gradients, and so is compared by hand."""
    scores, targets = (4 * torch.randn(65, 5003)).to(device.compute_dtype), torch.randint(0, 5003, (65,))
    z, reached, slopes = plain.cross_entropy(scores.double(), targets)
    say(trying="loss")
    losses, found = lost(*_on(device, scores.clone(), targets))
    compare("loss", losses, z - reached)
    compare("loss, gradient of s", found, slopes)
    many = torch.randn(_long(device) // 4, 8192, device=device.place).to(device.compute_dtype)
    places = torch.arange(len(many), device=device.place)
    tell_time(device, lambda: lost(many, places))


Turning = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def _ours(x: Tensor, cosine: Tensor, sine: Tensor, weight: Tensor | None) -> Tensor:
    return operations.turn(x, cosine, sine, weight, None if weight is None else EPS)


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
    slope = torch.randn(2, 3, tokens, width).to(dtype).float()
    inputs = (x, torch.rand(width) + 0.5) if normed else (x,)
    c, s = _on(device, cosine.to(dtype), sine.to(dtype))

    def work(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return turned(x, c, s, weight)

    def formula(x: Tensor, weight: Tensor | None = None) -> Tensor:
        turned_by = cosine.to(dtype).double(), sine.to(dtype).double()
        return plain.turn(x, *turned_by, weight, None if weight is None else EPS)

    probe.forward_and_back(device, "turned", work, formula, inputs, slope, "xg"[: len(inputs)])
    tokens = _long(device)
    c, s = (one.to(dtype) for one in _on(device, *_angles(tokens, 64)))
    many = [torch.randn(1, tokens, 16, 64, device=device.place).to(dtype).transpose(1, 2).requires_grad_()]
    if normed:
        many.append(torch.ones(64, device=device.place, requires_grad=True))
    tell_time(device, lambda: torch.autograd.grad(work(*many), many, torch.ones_like(many[0])))


def _angles(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    angle = (torch.arange(tokens)[:, None] / 10.0 ** torch.linspace(0, 4, width // 2))[None, None]
    return torch.cat((angle, angle), 3).cos(), torch.cat((angle, angle), 3).sin()


Multiplying = Callable[[NF4, Tensor, bool], Tensor]


def _tiled(matrix: NF4, x: Tensor, back: bool) -> Tensor:
    shape, sixteen = (matrix.num_rows, matrix.width), numbers(x.device)
    bias = None if back else matrix.bias
    return operations.nf4_product(
        x, matrix.weight, matrix.scales, sixteen, shape, coarse=matrix.coarse, bias=bias, back=back
    )


def _dense(matrix: NF4, x: Tensor, back: bool) -> Tensor:
    return matrix.times_back(x) if back else matrix.times(x, None if matrix.bias is None else matrix.bias.to(x.dtype))


def nf4(device: Device, multiplied: Multiplying) -> None:
    dtype = device.compute_dtype
    for double in (False, True):
        say(trying=f"scales {'coded' if double else 'as they are'}")
        matrix = NF4(nn.Linear(200, 72), double)
        dense = plain.nf4_dense(matrix.weight, matrix.scales, numbers(torch.device("cpu")), (72, 200), matrix.coarse)
        x, slope = torch.randn(65, 200).to(dtype), torch.randn(65, 72).to(dtype)
        right = x.double() @ dense.double().t() + (matrix.bias.double() if matrix.bias is not None else 0.0)
        matrix = matrix.to(device.place)
        given, back = _on(device, x, slope)
        words = "product, scales coded" if double else "product"
        compare(words, multiplied(matrix, given, False), right)
        compare(f"{words}, gradient of x", multiplied(matrix, back, True), slope.double() @ dense.double())
    width = 2048 if _long(device) > 16 else 64
    matrix = NF4(nn.Linear(width, width)).to(device.place)
    many = torch.randn(_long(device), width, device=device.place).to(dtype)
    tell_time(device, lambda: (multiplied(matrix, many, False), multiplied(matrix, many, True)))


def _on(device: Device, *tensors: Tensor) -> list[Tensor]:
    return [one.to(device.place) for one in tensors]


KERNELS: dict[str, Callable[[Device], None]] = {
    "rms-norm-triton": rms_norm,
    "cross-entropy-triton": lambda device: cross_entropy(device, _fused_loss),
    "rotary-triton": lambda device: rotary(device, _ours, False),
    "rotary-norm-triton": lambda device: rotary(device, _ours, True),
    "nf4-triton": lambda device: nf4(device, _tiled),
    "cross-entropy-torch": lambda device: cross_entropy(device, _plain_loss),
    "rotary-torch": lambda device: rotary(device, _torchs, False),
    "rotary-norm-torch": lambda device: rotary(device, _torchs, True),
    "nf4-torch": lambda device: nf4(device, _dense),
}


def main(name: str, device: Device) -> None:
    tell_device(device)
    torch.manual_seed(0)
    formats = [device.compute_dtype]
    if name.endswith(trusted.OWN):
        if not devices.compiles_kernels(device.place):
            say(absent="Triton is not installed" if device.place.type != "cpu" else "Triton compiles for GPUs alone")
            return
        if device.compute_dtype not in operations.DTYPES:
            say(absent=f"{device.compute_dtype} is left to torch")
            return
        formats = sorted({torch.float32, *formats}, key=lambda dtype: dtype == device.compute_dtype)
    for dtype in formats:  # the time of the last counts
        KERNELS[name](replace(device, compute_dtype=dtype))


if __name__ == "__main__":
    main(sys.argv[1], devices.find())
