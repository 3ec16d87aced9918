"""Our kernels on a GPU: what runs there is what was compiled for chips elsewhere and interpreted on processors."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bloomery.hw import device as devices
from bloomery.hw import kernel_trials
from bloomery.hw.host import Host
from bloomery.hw.kernel_trials import FUSED, KernelTrial, attempt, trials
from tests.hw.bad_device import ROOT
from tests.model.interpreted import trained
from tests.model.made import CHOICES, lively, random_ids

import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(autouse=True)
def trusts_nothing() -> Iterator[None]:
    yield
    kernel_trials.trust(())


@pytest.mark.parametrize("trial", [one for one in trials("nvidia") if one.module == FUSED], ids=lambda one: one.name)
def test_a_trial_on_this_gpu_passes_and_is_timed(trial: KernelTrial) -> None:
    found = attempt(Host.here(), trial)
    assert found.status == "passed", found.why
    assert found.milliseconds


@pytest.mark.parametrize("name", ["Qwen3", "YaRN", "differential", "GeGLU and bare norms"])
def test_a_model_learns_the_same_with_our_kernels(name: str) -> None:
    code = f"from tests.model.test_fused_on_gpu import error; print(error({name!r}))"
    command = [sys.executable, "-c", code]  # beartype must not wrap what Triton reads
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1e-4


def error(name: str) -> float:
    """The largest difference of loss and gradients in float32 between our kernels and what PyTorch computes."""
    place = devices.find().torch_device
    return trained(lively(CHOICES[name]).to(place), set(), random_ids(2, 33).to(place))
