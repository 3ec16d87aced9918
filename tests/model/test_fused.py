"""Our GPU kernels compute what their formulas say, and are used only where a trial on the device let them."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import pytest

from bloomery.hw import device as devices
from bloomery.hw import kernel_trials
from bloomery.hw.host import CommandResult
from bloomery.hw.kernel_trials import KernelTrial, TrialResult, judge
from bloomery.hw.torch_install import numbers
from bloomery.model.kernels import trials, triton
from bloomery.model.layers import RMSNorm
from bloomery.model.quantize import NF4
from tests.hw.bad_device import ROOT
from tests.model.made import SHAPES, lively, random_ids

import torch
from torch import nn

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed; it is made for Linux on x86-64"
)
KERNELS_LIMIT, MODELS_LIMIT = 3e-6, 3e-5
"""Of the largest number. float32 sums in another order; a model passes through many of them."""


@pytest.fixture(autouse=True)
def trusts_nothing() -> Iterator[None]:
    yield
    devices.trust(())


def triton_version() -> tuple[int, ...]:
    """Of the module: its package has another name where it is built for AMD."""
    return numbers(importlib.import_module("triton").__version__)[:2]


@cache
def interpreted() -> Mapping[str, str]:
    """What was told, by the line that names it."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "BLOOMERY_NATIVE": "0"}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.model.interpreted"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr and triton_version() < (3, 7):
        pytest.skip("the interpreter of Triton before 3.7 does not work with NumPy from 2.4 on")
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("# ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def errors(group: str) -> Mapping[str, float]:
    found: dict[str, float] = json.loads(interpreted()["errors"])[group]
    return found


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.parametrize("operation", ["norm", "turned", "entropy", "int8", "int4", "nf4"])
def test_a_kernel_equals_its_formula_in_float64_with_its_gradients(operation: str) -> None:
    found = {case: error for case, error in errors("kernels").items() if operation in case}
    assert len(found) >= 6
    assert {case: error for case, error in found.items() if not error <= KERNELS_LIMIT} == {}


@NEEDS_TRITON
@pytest.mark.slow
def test_a_model_learns_the_same_with_our_kernels_as_with_those_of_torch() -> None:
    found = errors("models")
    assert len(found) == 4
    assert {case: error for case, error in found.items() if not error <= MODELS_LIMIT} == {}


@NEEDS_TRITON
@pytest.mark.slow
def test_a_trial_lets_a_sound_kernel_pass_and_names_what_is_wrong_with_another() -> None:
    outcomes = {words: outcome(words.split()[0], told) for words, told in interpreted().items() if words != "errors"}
    sound = {words: one for words, one in outcomes.items() if words.endswith("none none")}
    assert {one.status for one in sound.values()} == {"passed"}
    assert all(one.milliseconds for one in sound.values())
    assert {words: one.why for words, one in outcomes.items() if words not in sound} == {
        "rms-norm-triton norm zeros": "norm: returns zeros",
        "rms-norm-triton norm_grads flip": "norm, gradient of x: has the wrong sign (cosine -1.00)",
        "cross-entropy-triton entropy nan": "loss, gradient of s: returns NaN or infinity",
        "rotary-triton rotate flip": "rotated: has the wrong sign (cosine -1.00)",
        "rotary-norm-triton rotate_grads zeros": "rotated, gradient of x: returns zeros",
        "gemv-int8-triton gemv flip": "1 × int8 of 72 × 200: has the wrong sign (cosine -1.00)",
    }


def outcome(name: str, told: str) -> TrialResult:
    kernel, _, implementation = name.rpartition("-")
    return judge(KernelTrial(kernel=kernel, implementation=implementation), CommandResult(code=0, out=told))


def test_nothing_is_used_before_a_trial_found_it_right_and_fastest() -> None:
    assert not triton.ready("rms-norm", torch.ones(2, 2))


def test_what_was_trusted_is_still_not_used_for_tensors_of_a_processor() -> None:
    devices.trust(("rms-norm", "rotary", "rotary-norm", "cross-entropy", "gemv-nf4"))
    x = torch.randn(3, 64)
    assert not triton.ready("rms-norm", x)
    assert RMSNorm(64, 1e-5)(x).shape == x.shape
    assert NF4(nn.Linear(64, 3))(x).shape == (3, 3)
    assert bool(lively(SHAPES[0])(random_ids(1, 4)).isfinite().all())


def test_inside_the_compiler_of_torch_its_own_operations_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.trust(("rms-norm",))
    monkeypatch.setattr(devices, "compiles_kernels", lambda place: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not triton.ready("rms-norm", torch.ones(2, 2))


def test_a_trial_on_a_processor_says_that_there_is_nothing_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (name for name in trials.TRITON_KERNELS if name.endswith(kernel_trials.OWN)):
        trials.main(name, devices.find("cpu"))
        assert outcome(name, capsys.readouterr().out).why == "Triton compiles for GPUs alone"


@pytest.mark.parametrize("name", [name for name in trials.TRITON_KERNELS if name.endswith("-torch")])
def test_what_torch_computes_passes_the_trial_that_ours_has_to_pass(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trials.main(name, devices.find("cpu"))
    found = outcome(name, capsys.readouterr().out)
    assert found.status == "passed", found.why
    assert found.milliseconds


def test_a_format_without_kernels_of_ours_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "compiles_kernels", lambda place: True)
    trials.main("gemv-nf4-triton", replace(devices.find("cpu"), compute_dtype=torch.float16))
    assert outcome("gemv-nf4-triton", capsys.readouterr().out).status == "absent"


def test_formats_that_were_not_compiled_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.trust(("rms-norm",))
    monkeypatch.setattr(devices, "compiles_kernels", lambda place: True)
    assert triton.ready("rms-norm", torch.ones(2, 2), torch.ones(2, dtype=torch.bfloat16))
    assert not triton.ready("rms-norm", torch.ones(2, 2, dtype=torch.float64))
    assert not triton.ready("rotary", torch.ones(2, 2))


@pytest.mark.parametrize("normed", [False, True])
def test_turned_heads_lie_as_the_projection_gave_them(normed: bool) -> None:
    """Else attention's result lies head by head, and its copy for the next matmul is kept by each layer."""
    angles = torch.ones(1, 1, 3, 8)
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    with triton.traced(frozenset({"rotary", "rotary-norm"})):
        y = triton.rotate(
            x.transpose(1, 2), angles, angles, torch.ones(8) if normed else None, 1e-5 if normed else None
        )
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert y.shape == (2, 5, 3, 8)
    assert y.transpose(1, 2).is_contiguous()
    assert x.grad is not None
    assert x.grad.is_contiguous()
