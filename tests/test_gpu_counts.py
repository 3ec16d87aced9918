"""What a step asks of a GPU, by benchmarks/gpu_counts.py: budgets that only fall, by preset."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bloomery.model.config import ModelConfig
from bloomery.train.config import AdamW, Muon
from bloomery.train.plan.trace import TracedStep, trace

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_counts  # noqa: E402

import torch  # noqa: E402

BUDGETS = {
    "gpt2-124m": {"kernels": 1_240, "gigabytes": 140.0, "update_kernels": 490, "update_gigabytes": 5.1},
    "plasma-235m": {"kernels": 2_430, "gigabytes": 355.0, "update_kernels": 740, "update_gigabytes": 11.0},
    "plasma-500m": {"kernels": 3_510, "gigabytes": 628.0, "update_kernels": 1_120, "update_gigabytes": 24.6},
    "harness-220m": {"kernels": 1_615, "gigabytes": 269.0, "update_kernels": 490, "update_gigabytes": 9.7},
    "harness-1b": {"kernels": 2_510, "gigabytes": 705.0, "update_kernels": 1_080, "update_gigabytes": 51.5},
}
"""Of a micro-batch of 32,768 tokens of several documents a row, and of an update of Muon. Lower them when they fall."""


@pytest.mark.parametrize("preset", ["gpt2-124m", pytest.param("plasma-500m", marks=pytest.mark.slow)])
def test_a_step_keeps_to_its_budget_waits_for_no_number_and_has_no_odd_matmul(preset: str) -> None:
    facts = gpu_counts.of_preset(preset, Muon())
    batch, update, budget = facts["micro-batch"], facts["update"], BUDGETS[preset]
    assert batch["kernels"] <= budget["kernels"]
    assert batch["gigabytes_moved"] <= budget["gigabytes"]
    assert update["kernels"] <= budget["update_kernels"]
    assert update["gigabytes_moved"] <= budget["update_gigabytes"]
    assert batch["host_reads"] == 0
    assert (batch["unaligned_flops"], update["unaligned_flops"]) == (0, 0)
    assert facts["work_over_that_of_the_model"] == pytest.approx(1.0, abs=0.02)


def test_the_results_that_are_kept_are_within_the_budgets_and_of_every_preset() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu_counts.json").read_text("utf-8"))["notes"]["rows"]
    muon = {row["preset"]: row for row in rows if row["optimizer"] == "muon"}
    assert muon.keys() == BUDGETS.keys()
    for preset, budget in BUDGETS.items():
        batch, update = muon[preset]["micro-batch"], muon[preset]["update"]
        assert 0.95 * budget["kernels"] <= batch["kernels"] <= budget["kernels"]
        assert 0.95 * budget["gigabytes"] <= batch["gigabytes_moved"] <= budget["gigabytes"]
        assert 0.95 * budget["update_kernels"] <= update["kernels"] <= budget["update_kernels"]
        assert batch["host_reads"] == 0


def test_matmuls_are_those_that_a_plan_traces() -> None:
    """Two counters of the same step, neither of which counts attention as matmuls."""
    shape = ModelConfig(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96, context_length=64
    )
    found = gpu_counts.counts_of(shape, 512, 2, AdamW(), packed=False)["micro-batch"]
    traced = trace(
        TracedStep(
            model=shape,
            vocab_size=512,
            optimizer=AdamW(),
            activation_checkpointing="none",
            precision=torch.bfloat16,
            rows=2,
            accumulates=True,
            on_processor=False,
        )
    )
    assert found.matmul_flops == sum(2 * b * m * k * n * count for (b, m, k, n, _), count in traced.products.items())


def test_what_reads_a_number_and_what_multiplies_odd_sides_is_counted() -> None:
    counts = gpu_counts.Counts()
    left, right = torch.ones(8, 9, dtype=torch.bfloat16), torch.ones(9, 16, dtype=torch.bfloat16)
    with gpu_counts.DispatchCounter(counts):
        product: Any = left @ right
        product.sum().item()
        product.view(-1).transpose(0, 0)
    assert (counts.host_reads, counts.matmuls, counts.matmul_flops) == (1, 1, 2 * 8 * 9 * 16)
    assert counts.unaligned == {"8x9x16": 1}
    assert counts.by_name["mm"] == counts.by_name["sum"] == 1
    assert counts.bytes_moved == 8 * 16 * 2 + 2 + 2, "of the sum, and of the number that is read"
