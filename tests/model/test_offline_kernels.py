"""Our GPU kernels compile for chips that are not there, fit into their memory, and spill nothing that was not known."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.hw.bad_device import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed; it is made for Linux on x86-64"
)
PAGE = ROOT / "docs" / "understand" / "kernels.md"
KNOWN: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "offline_kernels.json").read_text("utf-8"))
TARGETS = ("gfx1151", "gfx1100", "gfx1201", "gfx90a", "gfx942", "gfx950", "sm_80", "sm_90", "sm_120")
MORE_REGISTERS = 8
"""Than were known, from the same Triton: on machines that differ, not between kernels that do."""


def asked(*words: str) -> dict[str, Any]:
    """What the script tells, in a process of its own: one in which kernels are interpreted compiles none."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, str(ROOT / "scripts" / "offline_kernels.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
def test_what_is_known_is_of_these_kernels_and_stands_in_the_docs() -> None:
    told = asked("--known")
    again = "run: python scripts/offline_kernels.py --write"
    assert told["digest"] == KNOWN["digest"], again
    assert told["table"] in PAGE.read_text(encoding="utf-8"), again
    assert KNOWN["faults"] == []
    assert all(set(row) == set(TARGETS) for row in KNOWN["kernels"].values())
    assert KNOWN["triton"] in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx1151", "gfx942", "sm_90"])
def test_every_kernel_compiles_for_a_target_and_takes_what_is_known(target: str) -> None:
    """For a chip of each kind: whoever changes a kernel compiles it for all of them, or the digest differs."""
    told = asked(target)
    assert told["faults"] == []
    assert set(told["kernels"]) == set(KNOWN["kernels"])
    if told["triton"] != KNOWN["triton"]:
        pytest.skip(f"nothing is known of Triton {told['triton']}; it keeps the limits")
    for name, row in told["kernels"].items():
        took, known = row[target], KNOWN["kernels"][name][target]
        assert took["registers"] <= known["registers"] + MORE_REGISTERS, name
        assert took["lds_bytes"] <= known["lds_bytes"], name
        assert took["spills"] <= known["spills"], name
