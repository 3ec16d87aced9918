"""The memory that a plan reckons with on GPUs, against traces of the step that a run makes there."""

import json
import sys
from pathlib import Path

import pytest

from bloomery.model.config import PRESETS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_memory  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpt2-124m", "plasma-500m"])
def test_the_arithmetic_is_within_three_percent_of_the_trace(preset: str) -> None:
    for devices in (1, 8):
        found = gpu_memory.row(preset, devices)
        assert abs(found["error"]) <= 0.03
        assert (
            found["traced_gib"]["packed, with a bias"] >= found["traced_gib"]["packed"] >= found["traced_gib"]["plain"]
        )


def test_the_results_that_are_kept_are_of_every_preset_and_within_three_percent_where_a_run_fits() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu_memory.json").read_text("utf-8"))["notes"]["rows"]
    assert {(row["preset"], row["devices"]) for row in rows} == {(name, count) for name in PRESETS for count in (1, 8)}
    for row in rows:
        assert abs(row["error"]) <= (0.03 if row["fits"] else 0.06), row
        assert row["traced_gib"]["packed"] == pytest.approx(row["traced_gib"]["plain"], rel=0.01)
