"""benchmarks/gpu.py on this machine without a GPU: every part ends, and one that fails, hangs or dies costs itself."""

import json
import os
import re
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests import warm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu  # noqa: E402

OPTIONS = Namespace(device="cpu", quick=True, ranks=2)


def part(tmp_path: Path, code: str, seconds: float = 30) -> dict[str, Any]:
    """What comes of a part whose program is this."""
    script = tmp_path / "part.py"
    script.write_text("import json, os, signal, sys, time\n" + code, encoding="utf-8")
    return gpu.run_part(gpu.Part("part", "A part", seconds, str(script)), OPTIONS, seconds)


def test_what_a_part_said_before_it_failed_stays(tmp_path: Path) -> None:
    facts = part(tmp_path, 'print(json.dumps({"rows": [{"a": 1}]}), flush=True); raise ValueError("broken")')
    assert facts["results"] == {"rows": [{"a": 1}]}
    assert facts["status"] == "failed with code 1: ValueError: broken"
    assert "Traceback" in facts["error"]


def test_a_part_that_kills_itself_is_reported_with_its_signal(tmp_path: Path) -> None:
    facts = part(tmp_path, 'print("{}", flush=True); os.kill(os.getpid(), signal.SIGKILL)')
    assert facts["status"].startswith("failed by signal 9")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_part_that_hangs_ends_at_its_limit_with_the_processes_it_started(tmp_path: Path) -> None:
    code = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"child": child.pid}), flush=True)
time.sleep(600)
"""
    facts = part(tmp_path, code, seconds=4)
    assert facts["status"] == "ended after its 4 s"
    deadline = time.monotonic() + 120
    while alive(facts["results"]["child"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(process: int) -> bool:
    """Whether it still runs; one that nobody has waited for does not."""
    try:
        return re.search(r"State:\s+Z", Path(f"/proc/{process}/status").read_text()) is None
    except FileNotFoundError:
        return False


def test_entries_under_one_name_are_joined_and_a_torn_line_is_none() -> None:
    assert gpu.merged('{"a": [1]}\n{"a": [2], "b": 3}\nnoise\n{"a": [4}\n{"b"') == {"a": [1, 2], "b": 3}


def test_a_page_shows_parts_that_failed_and_escapes_what_would_break_a_table() -> None:
    parts = {
        "train": {"status": "failed with code 1: x", "seconds": 1.0, "results": {"rows": [{"k": "a|b"}, {"m": None}]}}
    }
    report = {"name": "gpu", "machine": {}, "versions": {}, "commit": None, "quick": True, "parts": parts}
    page = gpu.page(report, gpu.PARTS)
    assert "This part failed with code 1: x" in page
    assert "| a\\|b |  |" in page
    assert "|  | – |" in page


@pytest.mark.parametrize("parts", [gpu.PARTS, gpu.MULTI])
def test_all_limits_together_are_ten_minutes_at_most(parts: tuple[gpu.Part, ...]) -> None:
    assert sum(part.seconds for part in parts) <= gpu.TOTAL_SECONDS == 600


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for ranks to kill")
@pytest.mark.parametrize("words", [[], ["--multi"]])
def test_all_parts_run_to_their_end_without_a_gpu(tmp_path: Path, words: list[str]) -> None:
    """Its parts, runs and ranks are forked: forty of them would import torch."""
    command = [str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--quick", "--out", str(tmp_path), *words]
    with (tmp_path / "said").open("wb") as said:
        process = warm.python(command, os.environ, out=said.fileno())
        assert process.wait(850) == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert {name: facts["status"] for name, facts in report["parts"].items()} == dict.fromkeys(report["parts"], "done")
    results = {key: value for facts in report["parts"].values() for key, value in facts["results"].items()}
    if words:
        assert [row["exit"] for row in results["runs"]] == [0, 0, 0]
        assert all(row["largest_difference_of_loss"] < 1e-3 for row in results["runs"])
        assert (results["resumed_exit"], results["steps"]) == (0, 60)
        assert {row["kind"] for row in results["overlap"]} == {"ddp", "fsdp"}
    else:
        assert len(results["attention"]) == 12
        assert results["first_step_that_differs"] is None
        assert results["first_step_that_differs_after_resume"] is None
        assert len(results["decoding"]) == 9
        assert [row["base"] for row in results["adapters"]] == ["bfloat16", "nf4"]
    assert json.loads((tmp_path / "said").read_text().splitlines()[-1])["notes"]["quick"] is True
