import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.train.compiled import TIGHT, Verdict, compile_blocks
from bloomery.train.loop import accumulate_gradients, gradients
from bloomery.train.recompute import recompute
from tests.model.made import SHAPES, lively
from tests.train.made import processor, random_batch

import torch
from torch import Tensor, nn

BATCH = random_batch(3)
ROOT = Path(__file__).parents[2]


def tried(compiler: Callable[..., Any], wanted: Any = "on", level: Any = "none", **how: Any) -> tuple[Verdict, Any]:
    model = lively(SHAPES[0])
    recompute(model, level)

    def trial() -> tuple[float, float]:
        loss, _ = accumulate_gradients(model, BATCH, 2, processor())
        norm = float(nn.utils.get_total_norm(gradients(model)))
        model.zero_grad(set_to_none=True)
        return loss, norm

    return compile_blocks(model, wanted, trial, tolerance=TIGHT, compiler=compiler, **how), model


def honest(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: plain(*inputs)


def wrong(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: plain(*inputs) * 1.5


class Steeper(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> Tensor:
        return upstream[0] * 1.1


def wrong_backward(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: Steeper.apply(plain(*inputs))  # type: ignore[no-untyped-call]


def broken(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fail(*inputs: Any) -> Tensor:
        raise RuntimeError("no lowering for this\nand a long dump")

    return fail


def slow(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wait(*inputs: Any) -> Tensor:
        time.sleep(0.05)
        return plain(*inputs)

    return wait


def is_plain(model: Any) -> bool:
    return all("forward" not in block.__dict__ for block in model.blocks)


def test_blocks_that_agree_are_compiled_and_train_the_same() -> None:
    verdict, model = tried(honest)
    assert verdict.compiled
    assert verdict.why.startswith("loss and gradient norm agree")
    assert not is_plain(model)
    found = accumulate_gradients(model, BATCH, 2, processor())
    assert found == accumulate_gradients(lively(SHAPES[0]), BATCH, 2, processor())


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        (wrong, r"^it computes a loss of [\d.]+ where the plain blocks have [\d.]+$"),
        (wrong_backward, r"^it computes a gradient norm of [\d.]+ where the plain blocks have [\d.]+$"),
        (broken, r"^it failed with RuntimeError: no lowering for this$"),
    ],
)
def test_wrong_numbers_and_errors_are_caught_and_said_and_the_plain_blocks_are_taken(compiler: Any, why: str) -> None:
    verdict, model = tried(compiler)
    assert not verdict.compiled
    assert re.search(why, verdict.why), verdict.why
    assert is_plain(model)
    assert not gradients(model)
    assert accumulate_gradients(model, BATCH, 2, processor()) == accumulate_gradients(
        lively(SHAPES[0]), BATCH, 2, processor()
    )


def test_what_compiles_too_long_is_given_up() -> None:
    verdict, model = tried(slow, limit_seconds=0.02)
    assert verdict == Verdict(False, "it failed with TimeoutError: it took longer than 0 s")
    assert is_plain(model)


def test_auto_takes_only_what_is_faster() -> None:
    verdict, model = tried(slow, "auto")
    assert not verdict.compiled
    assert "without it" in verdict.why
    assert is_plain(model)


def test_off_tries_nothing() -> None:
    assert tried(broken, "off")[0] == Verdict(False, "not asked for")


def test_blocks_go_back_to_recomputation_where_they_had_it() -> None:
    model = tried(broken, level="block")[1]
    assert all(block.__dict__["forward"].plain for block in model.blocks)


def test_without_gradients_the_plain_blocks_run() -> None:
    calls: list[int] = []

    def counted(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*inputs: Any) -> Tensor:
            calls.append(1)
            return plain(*inputs)

        return call

    _, model = tried(counted)
    before = len(calls)
    with torch.no_grad():
        model(torch.arange(3)[None])
    assert before > 0
    assert len(calls) == before


REAL = """
from bloomery.train.compiled import STATIC
from tests.train.test_compiled import tried
verdict, _ = tried(STATIC, level="{level}")
print(verdict.compiled, verdict.why)
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", "selective"])
def test_what_torch_compiles_agrees_with_the_plain_blocks(level: str) -> None:
    """In a process of its own: the compiler cannot look through the checks that tests put around functions."""
    done = subprocess.run(
        [sys.executable, "-c", REAL.format(level=level)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.startswith("True loss and gradient norm agree"), done.stdout + done.stderr[-2000:]
