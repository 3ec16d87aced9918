"""A block of a transformer as torch compiles it, against the same one uncompiled on the same device."""

import importlib.util
import shutil
import sys

from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import compiles_kernels, find
from bloomery.hw.probe.compare import compare, say, tell_device, tell_time

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH, HEADS, TOKENS = 128, 2, 64


def compiled() -> None:
    device = find()
    tell_device(device)
    if device.place.type == "cuda" and not compiles_kernels(device.place):
        say(absent="Triton is not installed")
        return
    if device.place.type == "cpu" and not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        say(absent="there is no C++ compiler")
        return
    if device.place.type == "mps" or importlib.util.find_spec("torch._inductor") is None or sys.platform == "win32":
        say(absent="torch compiles nothing for this device")
        return
    torch.manual_seed(0)
    shapes = ((4, TOKENS, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    tensors = [torch.randn(shape) * shape[-2] ** -0.5 for shape in shapes]
    x, *weights = [one.to(device.place, device.compute_dtype).requires_grad_() for one in tensors]
    fast = torch.compile(_block, dynamic=False)
    say(trying="forward")
    plain, found = _block(x, *weights), fast(x, *weights)
    compare("forward", found, plain)
    say(trying="gradients")
    slope = torch.randn_like(plain)
    right = torch.autograd.grad(plain, [x, *weights], slope)
    given = torch.autograd.grad(found, [x, *weights], slope)
    for name, one, other in zip(("x", "qkv", "out", "up", "down"), given, right, strict=True):
        compare(f"gradient of {name}", one, other)
    tell_time(device, lambda: torch.autograd.grad(fast(x, *weights), [x, *weights], slope))


def _block(x: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
    q, k, v = (F.rms_norm(x, (WIDTH,)) @ qkv).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.transpose(1, 2).flatten(2) @ out
    y: Tensor = x + F.silu(F.rms_norm(x, (WIDTH,)) @ up) @ down
    return y
