"""
The GPU kernels in Triton's interpreter, on the processor and in float32, in a process of its own: Triton reads
TRITON_INTERPRET=1 when a kernel is defined, and then compiles nothing any more.

`python -m tests.model.interpreted` tells trials of the doctor, of sound kernels and of such with a fault, each after a
line that names them. After `# errors` comes JSON: the largest error of each case of the kernels against the formulas in
float64, and of models against the same with what PyTorch computes.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from bloomery.hw import device as devices
from bloomery.hw import kernel_trials, probes
from bloomery.model import lora, quantize
from bloomery.model.config import Lora
from bloomery.model.kernels import trials, triton
from bloomery.model.transformer import Transformer
from bloomery.train.loss import token_losses
from tests.model.made import CHOICES, lively, random_ids

import torch
from torch import Tensor, nn

KERNELS = ("rms-norm", "cross-entropy", "rotary", "rotary-norm", "gemv-int8", "gemv-int4", "gemv-nf4")
SHARE = 0.75
"""Of a loss, by which its grads are multiplied on the way."""
LAUNCH = triton.launch
PROGRAMS = 5
"""That share rows of grads of weights, or outputs of few rows, so that each has several, and the last fewer."""


def far(found: Tensor, right: Tensor) -> float:
    """The largest error, relative to the largest number; infinite where not the same numbers are finite."""
    found, right = found.detach().double(), right.detach().double()
    if found.shape != right.shape or not torch.equal(found.isfinite(), right.isfinite()):
        return float("inf")
    found, right = found[right.isfinite()], right[right.isfinite()]
    return float((found - right).abs().max() / right.abs().max().clamp_min(1e-30)) if right.numel() else 0.0


def both(ours: Callable[..., Tensor], formula: Callable[..., Tensor], *given: Tensor) -> float:
    """Of an operation and of all its gradients."""
    one, other = [x.clone().requires_grad_() for x in given], [x.double().requires_grad_() for x in given]
    found, right = ours(*one), formula(*other)
    grad = torch.randn(found.shape)
    grads = zip(torch.autograd.grad(found, one, grad), torch.autograd.grad(right, other, grad.double()), strict=True)
    return max(far(found, right), *(far(mine, theirs) for mine, theirs in grads))


def norms() -> Iterator[tuple[str, float]]:
    for rows, width in ((1, 64), (2, 3), (13, 300), (2, triton.LARGEST_ROW)):
        x, weight = torch.randn(rows, width) * 3, torch.rand(width) + 0.5
        error = both(
            lambda x, g: triton.rms_norm(x, g, 1e-6, torch.float32),
            lambda x, g: triton.plain_rms_norm(x, g, 1e-6),
            x,
            weight,
        )
        yield f"norm of {rows} × {width}", error
    bare = both(
        lambda x: triton.rms_norm(x, None, 1e-6, torch.float32),
        lambda x: triton.plain_rms_norm(x, None, 1e-6),
        x[:, :70],
    )
    yield "norm without weights", bare
    for name, x in (
        ("very large", torch.randn(2, 70) * 1e18),
        ("very small", torch.randn(2, 70) * 1e-20),
        ("zeros", torch.zeros(2, 70)),
        ("infinite", torch.randn(3, 70).index_fill(0, torch.tensor([1]), torch.inf)),
    ):
        found = triton.rms_norm(x, torch.ones(70), 1e-6, torch.float32)
        yield (
            f"norm of numbers that are {name}",
            far(found, triton.plain_rms_norm(x.double(), torch.ones(70).double(), 1e-6)),
        )
    yield "norm of nothing", float(triton.rms_norm(torch.ones(0, 8), None, 1e-6, torch.float32).numel())


def angles(rows: int, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, 1, tokens, width // 2) * 1000
    return torch.cat((angle, angle), 3).cos(), torch.cat((angle, angle), 3).sin()


def turns() -> Iterator[tuple[str, float]]:
    for heads, tokens, width, rows in ((3, 5, 16, 2), (5, 1, 10, 1), (2, 4, 128, 1), (20, 2, 160, 2)):
        where = f"turned, {heads} heads of {width}, {tokens} tokens, {rows} rows of angles"
        cosine, sine = angles(rows, tokens, width)
        x, weight = torch.randn(2, tokens, heads, width).transpose(1, 2), torch.rand(width) + 0.5
        yield where, turned(cosine, sine, x.contiguous())
        yield f"normed and {where}", turned(cosine, sine, x, weight, eps=1e-6)
    yield "normed without weights and turned", turned(cosine, sine, x, eps=1e-6)


def turned(cosine: Tensor, sine: Tensor, *given: Tensor, eps: float | None = None) -> float:
    return both(
        lambda x, g=None: triton.rotate(x, cosine, sine, g, eps),
        lambda x, g=None: triton.plain_rotate(x, cosine.double(), sine.double(), g, eps),
        *given,
    )


def entropies() -> Iterator[tuple[str, float]]:
    for width in (1, 501, 4096, 4097, 128256):
        targets = torch.tensor([0, -100, width // 2, width - 1][-1 if width > 5000 else 0 :])
        scores = torch.randn(len(targets), width) * 5
        for z_loss in (0.0, 0.1)[: 1 if width > 5000 else 2]:
            yield f"entropy of {width} scores, z_loss {z_loss}", entropy(scores, targets, z_loss)
    wide, targets = torch.randn(3, 9000) * 1e4, torch.tensor([8999, 17, 4096])
    yield "entropy of scores far apart", entropy(wide, targets, 0.0)
    hidden = torch.randn(3, 9000).index_fill(1, torch.arange(4500), -torch.inf)
    yield "entropy where the first half has no chance", entropy(hidden, torch.tensor([8999, 5000, 4500]), 0.0)
    kept = wide.clone()
    triton.cross_entropy_(kept, targets, with_grads=False)
    yield "entropy without grads leaves the scores", far(kept, wide)
    yield "entropy with grads in 8 bits", short_entropy(torch.randn(3, 300) * 5, torch.tensor([0, -1, 299]))
    broken = torch.randn(3, 300)
    broken[1, 7], broken[2, 8] = torch.nan, torch.inf
    z, _ = triton.cross_entropy_(broken, torch.tensor([0, 1, 2]))
    yield "entropy of what is not finite", float(z.isfinite().tolist() != [True, False, False])


def entropy(scores: Tensor, targets: Tensor, z_loss: float) -> float:
    z, reached, grads = triton.plain_cross_entropy(scores.double(), targets, z_loss)
    found = scores.clone()
    found_z, found_reached = triton.cross_entropy_(found, targets, z_loss=z_loss, share=SHARE)
    ignored = float(found[targets < 0].abs().sum())
    return max(far(found_z, z), far(found_reached, reached), far(found, SHARE * grads), ignored)


def short_entropy(scores: Tensor, targets: Tensor) -> float:
    """
    Grads written to a tensor of their own. Triton's interpreter loses a carry of its rounding, and what is below the
    normal numbers: such numbers are left out.
    """
    dtype = torch.float8_e5m2
    limit, found, kept = torch.finfo(dtype).max, torch.empty(scores.shape, dtype=dtype), scores.clone()
    triton.cross_entropy_(kept, targets, share=limit, grads=found)
    right = limit * triton.plain_cross_entropy(scores.double(), targets)[2]
    mantissa = torch.frexp(right)[0].abs() * 2
    compared = (mantissa < 1.874) & ((right.abs() > 1e-4) | (right == 0))
    assert compared.double().mean() > 0.5
    return max(far(kept, scores), far(found.double()[compared], right.to(dtype).double()[compared]))


def products() -> Iterator[tuple[str, float]]:
    bases: tuple[Any, ...] = ("int8", "int4", "nf4", "nf4_double")
    shapes = ((34, 100, 1), (34, 100, 16), (2, 10, 1), (2, 10, 3), (33, 1300, 1), (33, 1300, 3))
    for (place, base), (number, (rows, width, count)) in itertools.product(enumerate(bases), enumerate(shapes)):
        matrix, x = quantize.frozen(nn.Linear(width, rows), base), torch.randn(count, width)
        dense, bias = matrix.dense(torch.float32).double(), matrix.bias
        assert bias is not None
        words = f"{count} × {base} of {rows} × {width}"
        if (place + number) % 2:
            yield words, far(matrix.few(x, bias), x.double() @ dense.t() + bias)
        else:
            yield f"{words}, without bias", far(matrix.few(x, None), x.double() @ dense.t())


def models() -> Iterator[tuple[str, float]]:
    """Whole models, loss and gradients, with our kernels and with those of torch."""
    for name in ("Qwen3", "YaRN", "differential"):
        model = lively(CHOICES[name])
        yield f"a model: {name}", trained(model, {"norm", "norm_grads", "rotate", "entropy"})
    model = lively(CHOICES["Qwen3"])
    lora.attach(model, Lora(base_dtype="nf4", rank=2), seed=3)
    assert any(isinstance(module, quantize.NF4) for module in model.modules())
    yield "a model on NF4", trained(model, {"norm", "rotate_grads", "gemv", "entropy"})


def trained(model: Transformer, wanted: set[str], ids: Tensor | None = None) -> float:
    """The largest difference of loss and gradients between our kernels and what PyTorch computes."""
    ids = random_ids(2, 5) if ids is None else ids
    results = []
    for kernels in ((), KERNELS):
        devices.trust(kernels)
        USED.clear()
        model.zero_grad()
        hidden = model(ids[:, :-1]).flatten(0, 1)
        loss, _ = token_losses(hidden, model.head.weight, ids[:, 1:].flatten(), 1e-3)
        torch.autograd.backward(loss)
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        results.append([loss.detach(), *(one.clone() for one in grads)])
        assert set(USED) >= (wanted if kernels else set()), USED
    devices.trust(())
    return max(far(found, right) for right, found in zip(*results, strict=True))


TRIALS = [
    *((f"{kernel}-{kernel_trials.OWN}", "none", "none") for kernel in KERNELS),
    ("rms-norm-triton", "norm", "zeros"),
    ("rms-norm-triton", "norm_grads", "flip"),
    ("cross-entropy-triton", "entropy", "nan"),
    ("rotary-triton", "rotate", "flip"),
    ("rotary-norm-triton", "rotate_grads", "zeros"),
    ("gemv-int8-triton", "gemv", "flip"),
]
"""Name of a trial, a kernel of it, and what is wrong with that."""

USED: list[str] = []
FACTORS = {"zeros": 0.0, "nan": float("nan"), "flip": -1.0}
WRITTEN = ("y_at", "dx_at", "dweight_at", "logits_at")


def spoil(name: str, fault: str) -> None:
    """Let a kernel write zeros, NaN or the opposite where it should write numbers."""

    def faulty(one: triton.Launch) -> None:
        LAUNCH(one)
        for place, tensor in one.arguments.items():
            if one.kernel == name and place in WRITTEN:
                assert isinstance(tensor, Tensor)
                tensor.mul_(FACTORS[fault])

    vars(triton)["launch"] = faulty


def watch() -> None:
    def watched(one: triton.Launch) -> None:
        USED.append(one.kernel)
        LAUNCH(one)

    vars(triton)["launch"] = watched


def main() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.manual_seed(0)
    processor = replace(devices.find("cpu"), compute_dtype=torch.float32)
    devices.compiles_kernels = lambda device: True
    probes.FEWEST_ROUNDS = probes.MOST_ROUNDS = 2
    for name, kernel, fault in TRIALS:
        print(f"# {name} {kernel} {fault}", flush=True)
        spoil(kernel, fault)
        trials.main(name, processor)
    torch.manual_seed(0)
    triton.PARTS = triton.PROGRAMS = PROGRAMS
    watch()
    groups = {"kernels": (norms, turns, entropies, products), "models": (models,)}
    errors = {name: dict(case for group in members for case in group()) for name, members in groups.items()}
    print(f"# errors\n{json.dumps(errors)}")


if __name__ == "__main__":
    main()
