"""What needs no GPU runs the same where torch was built for AMD."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = ("tests/hw/test_device.py", "tests/hw/test_chosen.py", "tests/train/test_precision.py")
MORE = ("tests/model", "tests/train/test_optim.py", "tests/train/test_loss.py", "tests/generate", "tests/hw")
"""What asks for the device, and the mathematics of a step."""
FROM_LOOP_TO_ANSWER = (
    *(f"tests/train/test_{name}.py" for name in ("loop", "session", "keeping", "guard", "hooks", "recompute")),
    *("tests/train/preference", "tests/stages/test_finetune.py", "tests/stages/test_evaluate.py"),
    *("tests/weights/test_huggingface.py", "tests/weights/test_adapters.py", "tests/weights/test_llmc.py"),
    *(f"tests/evaluation/test_{name}.py" for name in ("likelihood", "written", "talks")),
    *("tests/serve/test_models.py", "tests/serve/test_answerer.py"),
)
"""What trains, saves, resumes, finetunes, evaluates and answers. `make test-amd` runs all tests."""


def run_under_it(*names: str) -> None:
    """Run tests in a child process, but not this file."""
    options = ["-p", "tests.hw.hip_torch", "-p", "no:cacheprovider", "-m", "not gpu and not slow", "-q", "-x"]
    command = [sys.executable, "-m", "pytest", *options, "--ignore", __file__, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "100%" in done.stdout


def test_what_asks_for_the_device_runs_under_a_torch_for_amd() -> None:
    run_under_it(*QUICK)


@pytest.mark.slow
def test_what_needs_no_gpu_runs_under_a_torch_for_amd() -> None:
    run_under_it(*MORE)


@pytest.mark.slow
def test_a_model_is_trained_kept_and_asked_under_a_torch_for_amd() -> None:
    run_under_it(*FROM_LOOP_TO_ANSWER)


def test_the_pretended_torch_is_one_for_amd() -> None:
    code = """
import sys; sys.argv = ["x"]
from tests.hw import hip_torch
hip_torch.pytest_configure()
import torch
from bloomery.hw import device, probe
from bloomery.hw.probe import describe
assert device.is_rocm() and torch.version.cuda is None and torch.version.hip
assert device.find("cpu").vendor == "cpu"
describe.torch_itself()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"hip": "7.2.26015", "cuda": null' in done.stdout
