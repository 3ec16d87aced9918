"""Our kernels on a GPU: what runs there is what was compiled for chips elsewhere and interpreted on processors."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bloomery.hw import device as devices
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
    devices.trust(())


def test_models_learn_the_same_with_our_kernels() -> None:
    """In one process: beartype must not wrap what Triton reads."""
    names = ("Qwen3", "YaRN", "differential", "GeGLU and bare norms")
    code = f"from tests.model.test_fused_on_gpu import error; print([error(name) for name in {names}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) <= 1e-4


def error(name: str) -> float:
    """The largest difference of loss and gradients in float32 between our kernels and what PyTorch computes."""
    place = devices.find().torch_device
    return trained(lively(CHOICES[name]).to(place), set(), random_ids(2, 33).to(place))
