"""Five seconds of benchmarks/serve_soak.py, which takes two minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "serve_soak.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory and descriptors of the server from /proc")
def test_honest_clients_get_their_answers_while_hostile_clients_attack_the_server() -> None:
    command = [sys.executable, str(BENCHMARK), "--seconds", "5", "--clients", "12", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ours"]["value"] > 0
    assert result["notes"]["failures"] == {}
