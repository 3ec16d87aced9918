import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from bloomery.train.config import ConstantSchedule, CosineSchedule, LinearSchedule, Schedule, WSDSchedule
from bloomery.train.optim import decay_start, learning_rate_share

PEAK = 6e-4


def made(**settings: Any) -> Schedule:
    return TypeAdapter[Schedule](Schedule).validate_python(settings)


warm = st.integers(0, 30)
schedules = st.one_of(
    st.builds(ConstantSchedule, warmup_steps=warm),
    st.builds(LinearSchedule, warmup_steps=warm, min_lr_ratio=st.floats(0, 1)),
    st.builds(CosineSchedule, warmup_steps=warm, min_lr_ratio=st.floats(0, 1)),
    st.builds(
        WSDSchedule,
        warmup_steps=warm,
        decay_fraction=st.floats(0, 1),
        decay_steps=st.none() | st.integers(0, 250),
        shape=st.sampled_from(["linear", "cosine", "1-sqrt"]),
        min_lr_ratio=st.floats(0, 1),
    ),
)


@given(st.integers(0, 1000), st.integers(1, 10**6))
def test_a_share_of_decay_is_that_of_the_number_as_it_is_written(thousandths: int, steps: int) -> None:
    """By whole numbers: 0.29 of 100 steps are 29, and anything is at least one."""
    for share_in_thousandths, all_steps in ((thousandths, steps), (290, 100), (570, 100), (580, 100), (1, 5)):
        decay = WSDSchedule(decay_fraction=share_in_thousandths / 1000)
        length = share_in_thousandths * all_steps // 1000
        assert all_steps - decay_start(decay, all_steps) == (max(1, length) if share_in_thousandths else 0)


# --- golden values ---------------------------------------------------------------------------------------------------

# Of llm.c's llmc/schedulers.h, compiled, at 18,865 steps with a warm-up of 700 and a final share of 0.1, and of 1386's
# src/train/scheduler.py, run on its own configurations. Both count steps from 0.
LLMC = {"warmup_steps": 700, "min_lr_ratio": 0.1}
GOLDEN: list[tuple[dict[str, Any], int, dict[int, float]]] = [
    (
        {"kind": "cosine", **LLMC},
        18865,
        {0: 8.57142879e-07, 699: 6e-4, 700: 6e-4, 5000: 0.000528716249, 9432: 0.000346356886, 18864: 6.00000021e-05},
    ),
    (
        {"kind": "linear", **LLMC},
        18865,
        {3: 3.42857152e-06, 5000: 0.000472171756, 9432: 0.000340419501, 18864: 6.00297353e-05},
    ),
    (
        {"kind": "wsd", "decay_fraction": 0.2, "shape": "1-sqrt", **LLMC},
        18865,
        {3: 3.42857152e-06, 15091: 6e-4, 15092: 6e-4, 17000: 0.000215992666, 18864: 6.00715866e-05},
    ),
    ({"kind": "constant"}, 18865, {0: 6e-4, 18864: 6e-4}),
    (
        {"kind": "cosine", "warmup_steps": 2000, "min_lr_ratio": 0.1},
        318_000,
        {0: 3e-07, 999: 3e-4, 1999: 6e-4, 2000: 6e-4, 100_000: 0.0004816736956466081, 317_999: 6.000000001334317e-05},
    ),
    (
        {"kind": "wsd", "warmup_steps": 2000, "decay_fraction": 0.1, "shape": "1-sqrt"},
        460_000,
        {
            0: 3e-07,
            414_000: 6e-4,
            414_001: 0.000597202485575279,
            437_000: 0.00017573593128807145,
            459_999: 6.52177457e-09,
        },
    ),
    (
        {"kind": "wsd", "warmup_steps": 2000, "decay_fraction": 0.1, "shape": "linear"},
        460_000,
        {413_999: 6e-4, 414_001: 0.000599986956521739, 437_000: 3e-4, 459_999: 1.3043478260876817e-08},
    ),
    (
        {"kind": "wsd", "warmup_steps": 2000, "decay_fraction": 0.1, "shape": "cosine"},
        460_000,
        {1999: 6e-4, 414_001: 0.0005999999993003588, 437_000: 3e-4, 459_999: 6.996411450188588e-13},
    ),
    (
        {"kind": "wsd", "warmup_steps": 2000, "decay_steps": 46_000, "shape": "1-sqrt"},
        326_000,
        {279_999: 6e-4, 280_000: 6e-4, 303_000: 0.00017573593128807145, 325_999: 6.5217745750523185e-09},
    ),
    (
        {"kind": "wsd", "warmup_steps": 40, "decay_fraction": 0.29, "shape": "1-sqrt", "min_lr_ratio": 0.1},
        57,
        {39: 6e-4, 41: 6e-4, 42: 0.0004649999999999999, 56: 7.71472482619987e-05},
    ),
]


@pytest.mark.parametrize(("settings", "steps", "expected"), GOLDEN)
def test_learning_rates_are_those_of_the_seeds(
    settings: dict[str, Any], steps: int, expected: dict[int, float]
) -> None:
    schedule = made(**settings)
    for place, rate in expected.items():
        assert PEAK * learning_rate_share(schedule, place + 1, steps) == pytest.approx(rate, rel=1e-6, abs=1e-12), place


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_the_warm_up_is_a_line_whose_first_step_already_moves(kind: str) -> None:
    schedule = made(kind=kind, warmup_steps=4)
    assert [learning_rate_share(schedule, step, 20) for step in range(1, 6)] == [0.25, 0.5, 0.75, 1, 1]


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [("linear", 0.75, 0.5), ("cosine", (1 + math.cos(math.pi / 4)) / 2, 0.5), ("1-sqrt", 0.5, 1 - math.sqrt(0.5))],
)
def test_the_decay_has_its_shape_and_ends_where_it_shall(shape: str, quarter: float, half: float) -> None:
    for final in (0.0, 0.1):
        for size in ({"decay_fraction": 0.8}, {"decay_steps": 80}):
            schedule = made(kind="wsd", shape=shape, min_lr_ratio=final, **size)
            for step, expected in ((20, 1.0), (21, 1.0), (41, quarter), (61, half), (101, 0.0)):
                assert learning_rate_share(schedule, step, 100) == pytest.approx(final + (1 - final) * expected)


def test_linear_and_cosine_are_decays_that_begin_where_the_warm_up_ends() -> None:
    for kind in ("linear", "cosine"):
        whole = made(kind=kind, warmup_steps=7, min_lr_ratio=0.1)
        decay = made(kind="wsd", shape=kind, warmup_steps=7, min_lr_ratio=0.1, decay_fraction=1.0)
        assert [learning_rate_share(whole, step, 50) for step in range(1, 51)] == [
            learning_rate_share(decay, step, 50) for step in range(1, 51)
        ]


@given(schedules, st.integers(1, 200))
def test_a_share_rises_to_the_peak_and_falls_to_no_less_than_the_final_one(schedule: Schedule, steps: int) -> None:
    found = [learning_rate_share(schedule, step, steps) for step in range(1, steps + 1)]
    assert all(0 <= one <= 1 for one in found)
    peak = found.index(max(found))
    assert all(a <= b for a, b in pairwise(found[: peak + 1]))
    assert all(a + 1e-12 >= b for a, b in pairwise(found[peak:]))
    if steps > schedule.warmup_steps:
        assert max(found) == 1.0
        assert found[-1] >= getattr(schedule, "min_lr_ratio", 1.0) - 1e-12
        assert min(found, default=1.0) > 0 or getattr(schedule, "min_lr_ratio", 1.0) == 0
    assert learning_rate_share(schedule, steps + 100, steps) <= found[-1] + 1e-12 or steps < schedule.warmup_steps + 100


@given(schedules, st.integers(1, 100), st.integers(0, 100))
def test_more_steps_change_nothing_before_the_decay(schedule: Schedule, steps: int, more: int) -> None:
    """So that a run that stopped on the level part goes on, or decays from there, as if it had always meant to."""
    same = min(decay_start(schedule, steps), decay_start(schedule, steps + more), steps)
    for step in range(1, same + 1):
        assert learning_rate_share(schedule, step, steps) == learning_rate_share(schedule, step, steps + more)


def test_a_wsd_run_of_fewer_steps_is_the_beginning_of_a_longer_one() -> None:
    schedule = made(kind="wsd", warmup_steps=5, decay_steps=20)
    short, long = ([learning_rate_share(schedule, step, steps) for step in range(1, steps + 1)] for steps in (100, 300))
    assert short[:80] == long[:80] == [*(n / 5 for n in range(1, 6)), *[1.0] * 75]
    assert short[80:] == long[280:]
