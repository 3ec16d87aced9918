"""A few of the kills of benchmarks/kill_runs.py, which does two hundred."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "kill_runs.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_whole_run_that_is_killed_again_and_again_is_the_same_and_leaves_no_process() -> None:
    command = [sys.executable, str(BENCHMARK), "--json", "--kills", "3", "--at-once", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["ours"]["value"] >= 3
    assert (result["notes"]["lost"], result["notes"]["different"], result["notes"]["left"]) == ([], [], [])
