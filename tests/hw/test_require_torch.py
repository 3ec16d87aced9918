"""Without torch, a part that needs it says how to get it, and is both kinds of error."""

import subprocess
import sys

from tests.hw.machines import HIDE_TORCH

BLOCKED = """
import sys
from bloomery.core.errors import HardwareError
from bloomery.hw.torch_install import MissingTorch
try:
    import {module}
except MissingTorch as error:
    assert isinstance(error, HardwareError) and isinstance(error, ModuleNotFoundError)
    assert error.name == "torch", error.name
    print(error)
else:
    sys.exit("it was imported")
"""


def without_torch(module: str) -> str:
    code = HIDE_TORCH + BLOCKED.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_missing_torch_names_the_command_that_installs_it() -> None:
    said = without_torch("bloomery.hw.require_torch")
    assert "torch is not installed" in said
    assert "pip install" in said or "DTK" in said


def test_the_device_file_says_it_too() -> None:
    assert "torch is not installed" in without_torch("bloomery.hw.device")


def test_with_torch_it_imports_it_leaves_garbage_collection_on_and_says_nothing() -> None:
    code = "import gc, sys, bloomery.hw.require_torch; sys.exit(not gc.isenabled() or 'torch' not in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
