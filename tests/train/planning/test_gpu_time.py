"""Times of GPUs: what others have published, and what any step obeys."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.hw.specs import named
from bloomery.model.config import PRESETS, ModelConfig, cost
from bloomery.train.config import AdamW
from bloomery.train.plan import gpu_time
from bloomery.train.plan.gpu_time import Program, StepTime, rates, step_time
from bloomery.train.plan.memory import TrainSetup, Workload, of_entry
from tests.train.planning.made import card

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_counts  # noqa: E402
import gpu_model  # noqa: E402

PLASMA = Workload(model=ModelConfig(preset="plasma-500m"), vocab_size=48_000, optimizer=AdamW(), memory_bytes=2**36)


def seconds(way: TrainSetup, rows: int = 32, *, what: Workload = PLASMA, target: str = "h100") -> StepTime:
    return step_time(what, way, rates(card(target, way.devices), "bfloat16"), rows)


@pytest.mark.parametrize("case", gpu_model.PUBLISHED, ids=lambda case: case.name)
def test_one_set_of_constants_comes_within_15_percent_of_three_published_speeds(case: gpu_model.Case) -> None:
    assert case.facts()["ratio"] == pytest.approx(1.0, abs=0.15)


def test_speeds_that_were_looked_at_later_are_within_a_quarter() -> None:
    assert all(0.75 < case.facts()["ratio"] < 1.25 for case in gpu_model.OTHERS)


def test_the_result_that_is_kept_is_that_of_the_constants() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "gpu_model.json").read_text("utf-8"))["notes"]
    assert kept["constants"] == {name: getattr(gpu_time, name) for name in gpu_model.CONSTANTS}
    for group, cases in (
        ("published", gpu_model.PUBLISHED),
        ("others", gpu_model.OTHERS),
        ("targets", gpu_model.TARGETS),
    ):
        assert kept[group] == [case.facts() for case in cases]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_no_step_is_faster_than_its_matmuls_at_the_peak_and_every_part_takes_time(preset: str) -> None:
    model = ModelConfig(preset=preset)
    what = Workload(model=model, vocab_size=PRESETS[preset].vocab_size, optimizer=AdamW(), memory_bytes=2**36)
    found = seconds(TrainSetup(rows=1), 1, what=what)
    least = cost(model, what.vocab_size).train_flops_per_token * model.context_length / 989.4e12
    assert found.matmuls + found.attention > least
    assert min(found.attention, found.memory, found.update, found.host) > 0 == found.exchange


def test_work_that_is_repeated_or_given_to_others_adds_up() -> None:
    kept, again = (seconds(TrainSetup(rows=32, activation_checkpointing=level)) for level in ("none", "full"))
    head = 48_000 * 1280 / cost(PLASMA.model, 48_000).matmul_parameters
    assert again.matmuls / kept.matmuls == pytest.approx(1 + (1 - head) / 3, rel=0.02)
    assert again.attention / kept.attention == pytest.approx(4.5 / 3.5)
    half = seconds(TrainSetup(rows=16))
    assert half.matmuls == pytest.approx(kept.matmuls, rel=0.05)
    assert half.memory > kept.memory, "weights are rounded twice"
    eight = seconds(TrainSetup(rows=4, devices=8))
    assert 0.5 < kept.seconds / 8 / eight.seconds < 0.9
    assert seconds(TrainSetup(rows=32, devices=8), 256).seconds < 1.05 * kept.seconds


def test_links_count_only_as_far_as_the_backward_pass_does_not_hide_them() -> None:
    way = TrainSetup(rows=4, devices=8)
    fast, slow = (
        step_time(PLASMA, way, replace(rates(card("h100", 8), "bfloat16"), link=link), 32) for link in (360e9, 20e9)
    )
    table = 2 * 7 / 8 * 4 * 48_000 * 1280
    assert fast.exchange == pytest.approx(table / 360e9), "the embedding's gradient, which is the last"
    assert slow.exchange > 2 * 7 / 8 * 4 * PLASMA.parameters / 20e9 - fast.seconds
    unknown = step_time(PLASMA, way, replace(rates(card("h100", 8), "bfloat16"), link=None), 32)
    assert unknown.exchange == 0


def test_a_measured_peak_of_square_matmuls_gives_their_time_back() -> None:
    target = replace(of_entry(named("h100")), flops=700e12, flops_from="measured")
    at = rates(target, "bfloat16")
    square = 2 * 8192**3 / at.matmul + 3 * 2 * 8192**2 / at.memory
    assert 2 * 8192**3 / square == pytest.approx(700e12)
    assert rates(card("strix-halo-128"), "bfloat16").matmul == pytest.approx(33.5e12, rel=0.08), "as others measured it"


def test_bytes_by_shape_are_those_that_the_code_moves_where_its_kernels_are_fused() -> None:
    """The counter takes LayerNorms for one kernel each; the arithmetic lets some inputs be read twice."""
    model = ModelConfig(preset="gpt2-124m", num_layers=3, context_length=512)
    counted = gpu_counts.counts_of(model, 4096, 8, AdamW(), packed=False)["micro-batch"]
    what = Workload(model=model, vocab_size=4096, optimizer=AdamW(), memory_bytes=2**36)
    at = rates(card("h100"), "bfloat16")
    found = step_time(what, TrainSetup(rows=8), at, 8, Program())
    assert found.memory * at.memory == pytest.approx(counted.fused_bytes, rel=0.25)
    assert counted.fused_bytes < counted.bytes_moved / 2
    per_layer = (counted.fused_kernels + counted.matmuls) / 3
    assert per_layer < 2 * gpu_time.KERNELS[True]
