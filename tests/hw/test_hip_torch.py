"""The torch under which `make test-amd` runs what needs no GPU is one for AMD, for tests and for what they start."""

import os
import subprocess
import sys
from pathlib import Path

from tests.hw.hip_torch import EVERYWHERE

ROOT = Path(__file__).parents[2]
ASKED = """
from bloomery.hw import device
from bloomery.hw import probes
import torch
assert device.is_rocm() and torch.version.cuda is None and torch.version.hip
assert device.find("cpu").vendor == "cpu"
probes.torch_itself()
"""


def told(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pretended_torch_is_one_for_amd() -> None:
    assert '"hip": "7.2.26015", "cuda": null' in told(
        "from tests.hw import hip_torch; hip_torch.pytest_configure()" + ASKED
    )


def test_every_process_that_a_test_starts_finds_it_too() -> None:
    """Also those that these start: it comes with the environment."""
    path = os.pathsep.join([str(EVERYWHERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASKED!r}], check=True)"
    assert '"hip": "7.2.26015", "cuda": null' in told(inner, PYTHONPATH=path)
