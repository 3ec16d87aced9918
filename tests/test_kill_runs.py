"""A few of the kills of benchmarks/kill_runs.py, which does two hundred."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "kill_runs.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_whole_run_that_is_killed_again_and_again_is_the_same_and_leaves_no_process(tmp_path: Path) -> None:
    """Commands and ranks are forked, and so in no namespace of their own."""
    env = os.environ | {"BLOOMERY_KILL_RUNS_NAMESPACE": "no"}
    with (tmp_path / "said").open("wb") as said:
        process = warm.python([str(BENCHMARK), "--json", "--kills", "3", "--at-once", "1"], env, out=said.fileno())
        code = process.wait(600)
    result = json.loads((tmp_path / "said").read_text())
    assert (result["notes"]["lost"], result["notes"]["different"], result["notes"]["left"]) == ([], [], [])
    assert result["ours"]["value"] >= 3
    assert code == 0
