"""A few of the kills of benchmarks/kill_resume.py, which does a hundred."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "kill_resume.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")
def test_a_training_killed_again_and_again_is_not_lost_and_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """Ranks are forked too."""
    with (tmp_path / "said").open("wb") as said:
        assert warm.python([str(BENCHMARK), "--quick", "--json"], os.environ, out=said.fileno()).wait(400) == 0
    result = json.loads((tmp_path / "said").read_text())
    assert result["ours"]["value"] == 6
    assert (result["notes"]["lost"], result["notes"]["different"]) == (0, 0)
