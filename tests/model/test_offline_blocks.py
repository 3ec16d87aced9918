"""The kernels that torch.compile writes for a block compile for GPUs that are not there: scripts/offline_blocks.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KNOWN: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/offline_blocks.json").read_text("utf-8"))


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row["target"])
def test_every_kernel_became_a_binary_that_a_launch_has_room_for(row: dict[str, Any]) -> None:
    assert row["fits"]
    assert row["kernels"] >= 5
    assert row["configurations"] >= row["kernels"]
    assert row["binary"] == ["hsaco" if row["target"].startswith("gfx") else "cubin"]


@pytest.mark.slow
def test_what_is_compiled_now_is_what_was_written() -> None:
    pytest.importorskip("triton")
    row = next(row for row in KNOWN if row["target"] == "90")
    command = [sys.executable, str(ROOT / "scripts" / "offline_blocks.py"), "90"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == row
