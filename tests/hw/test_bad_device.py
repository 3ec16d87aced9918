"""A device that computes nothing, nonsense or the opposite is caught by a trial, and the trial says how."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.core.errors import HardwareError
from bloomery.hw import kernel_trials
from bloomery.hw.host import Host
from bloomery.hw.kernel_trials import KernelTrial, TrialResult, attempt, trials
from tests.hw.bad_device import ROOT, BadDevice, row

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and waits for processes by their handles")

PAGE = ROOT / "docs" / "reference" / "doctor.md"
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
FAULTS = [
    ("launch", "unwritten", "aten.add.out", "leaves 100% of its output unwritten"),
    ("launch", "hang", "aten.add.out", "timed out at sum"),
    ("matmul", "zeros", "aten.mm.out", "NN: returns zeros"),
    ("matmul", "unwritten", "aten.mm.out", "NN: leaves 100% of its output unwritten"),
    ("matmul", "nan", "aten.mm.out", "NN: returns NaN"),
    ("attention-flash", "segfault", f"{FLASH}.", "was killed by signal 11 (SIGSEGV) at heads of 64"),
    ("attention-flash", "flip", f"{FLASH}_backward.", "heads of 64, gradient of q: has the wrong sign"),
    ("attention-flash", "nan", f"{FLASH}_backward.", "heads of 64, gradient of q: returns NaN"),
    ("rms-norm-torch", "zeros", "rsqrt", "norm: returns zeros"),
    ("cross-entropy-torch", "flip", "_log_softmax_backward_data", "gradient of s: has the wrong sign"),
    ("training", "flip", "_log_softmax_backward_data", "but must halve"),
]


@pytest.fixture(scope="module")
def device() -> Iterator[BadDevice]:
    with BadDevice() as started:
        yield started


def trial(name: str) -> KernelTrial:
    return next(one for one in trials("cpu") if one.name == name)


def outcome(device: BadDevice, name: str, seconds: float = 60.0) -> TrialResult:
    wanted = trial(name)
    host = Host(root=Path("/"), run=lambda command, limit: device.run(command, min(limit, seconds)))
    return attempt(host, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault", "operation", "words"), FAULTS)
def test_a_broken_kernel_is_caught_and_named(
    device: BadDevice, name: str, fault: str, operation: str, words: str
) -> None:
    found = outcome(device.has(fault, operation), name, seconds=2.0 if fault == "hang" else 60.0)
    assert found.status == "failed", found
    assert words in found.why
    assert row(name, fault, operation, found.why) in PAGE.read_text(encoding="utf-8")  # scripts/findings.py --write
    with pytest.raises(HardwareError, match=name):
        kernel_trials.check([found])


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in trials("cpu") if one.name != "block-compiled"])
def test_a_sound_device_passes(device: BadDevice, name: str) -> None:
    found = outcome(device.has("", ""), name)
    assert found.status == "absent" if name.endswith("native") and found.status != "passed" else "passed", found


@pytest.mark.slow
def test_one_that_is_not_here_is_no_failure(device: BadDevice) -> None:
    host = Host(root=Path("/"), run=device.has("", "").run)
    found = attempt(host, KernelTrial(kernel="attention", implementation="efficient"))
    assert found.status == "absent"
    kernel_trials.check([found])
