"""A few of the kills of benchmarks/kill_resume.py, which does a hundred."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "kill_resume.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")
def test_a_training_killed_again_and_again_is_not_lost_and_is_the_same_bit_for_bit() -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ours"]["value"] == 6
    assert (result["notes"]["lost"], result["notes"]["different"]) == (0, 0)
