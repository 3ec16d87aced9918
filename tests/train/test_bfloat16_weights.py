"""Weights in bfloat16 whose updates are rounded stochastically."""

from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError
from bloomery.hw.specs import GIB
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.stages.config import Finetune
from bloomery.train import optim
from bloomery.train.config import AdamW, AdamW8bit, AdEMAMix, Lion, Muon, Optimizer, Training
from bloomery.train.fsdp import keep_weights
from bloomery.train.optim import Optimizers, round_into
from bloomery.train.plan import report
from bloomery.train.plan.memory import check_shard, of_memory
from bloomery.train.plan.report import PlanReport
from bloomery.train.plan.trace import check
from bloomery.weights import checkpoint
from tests.model.made import SHAPES, VOCAB_SIZE
from tests.train.made import lines, model_bytes, result, run, session, stopped

import safetensors.torch
import torch
from torch import nn

QWEN = ModelConfig(
    hidden_size=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    intermediate_size=8960,
    context_length=1024,
    biases="qkv",
    tie_embeddings=True,
)
"""The shape of Qwen2.5-1.5B."""


@pytest.mark.parametrize("number", [1.001, -3.1415927, 1e-20, -7e-39, 65504.3])
def test_the_mean_of_rounded_numbers_is_the_number_and_each_is_a_neighbor(number: float) -> None:
    numbers = torch.full((2**18,), number)
    weight = torch.empty(2**18, dtype=torch.bfloat16)
    round_into(weight, numbers, seed=3)
    found = weight.double()
    below, above = found.min(), found.max()
    assert below <= numbers[0].double() <= above
    assert len(set(weight.tolist())) <= 2
    step = float(above - below)
    assert abs(float(found.mean()) - float(numbers[0].double())) <= 4 * step / 2 / 2**9
    again, other = torch.empty_like(weight), torch.empty_like(weight)
    round_into(again, numbers, seed=3)
    round_into(other, numbers, seed=4)
    assert torch.equal(again, weight)
    assert step == 0 or not torch.equal(other, weight)


def test_what_bfloat16_holds_stays_the_same_bits_and_what_is_not_finite_stays_that() -> None:
    held = torch.randn(1000).bfloat16()
    ends = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    numbers = torch.cat([held.float(), ends])
    weight = torch.empty(len(numbers), dtype=torch.bfloat16)
    round_into(weight, numbers, seed=1)
    assert torch.equal(weight.view(torch.int16), numbers.bfloat16().view(torch.int16))


@pytest.mark.parametrize(
    "config",
    [
        AdamW(learning_rate=1e-4, weight_decay=0),
        AdamW8bit(learning_rate=1e-4, weight_decay=0),
        AdEMAMix(learning_rate=1e-4, weight_decay=0),
        Lion(learning_rate=1e-4, weight_decay=0),
        Muon(muon_lr=1e-4, learning_rate=1e-4, weight_decay=0),
    ],
    ids=lambda config: config.kind,
)
def test_updates_far_below_half_a_step_of_bfloat16_move_the_mean_as_in_float32(config: Optimizer) -> None:
    def moved(dtype: torch.dtype) -> float:
        model = nn.Module()
        model.register_module("blocks", nn.ModuleList([nn.Linear(128, 128, bias=False)]))
        weight = model.get_parameter("blocks.0.weight")
        weight.data = torch.ones(128, 128, dtype=dtype)
        optimizers = Optimizers(model, config, torch.float32, seed=5)
        for step in range(20):
            gradient = torch.eye(128) + 0.1  # of full rank, and all positive
            weight.grad = gradient.to(dtype)
            optimizers.step(number=step)
        return float(weight.detach().double().mean()) - 1.0

    exact, rounded = moved(torch.float32), moved(torch.bfloat16)
    assert abs(exact) < 20 * 1.1e-4 < 2**-8, "less than half of the distance of 1 to the number below it, in all"
    assert rounded == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_kept_in_bfloat16_and_vectors_and_moments_in_float32(shape: ModelConfig) -> None:
    model = Transformer(shape, VOCAB_SIZE)
    keep_weights(model, "bfloat16")
    assert all((one.dtype == torch.bfloat16) == (one.dim() > 1) for one in model.parameters())
    assert (model.head.weight is model.embed.weight) == shape.tie_embeddings
    for config in (AdamW(), Muon(), AdEMAMix(), Lion()):
        optimizers = Optimizers(model, config)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        optimizers.step()
        assert {one.dtype for one in optimizers.state().values()} == {torch.float32}
        assert all((one.dtype == torch.bfloat16) == (one.dim() > 1) for one in model.parameters())


@pytest.mark.parametrize("kind", [pytest.param("adamw8bit", marks=pytest.mark.slow), "muon"])
def test_a_run_that_was_stopped_and_resumed_is_one_that_was_not_bit_for_bit(
    shards: Path, tmp_path: Path, kind: str
) -> None:
    settings: dict[str, Any] = {"precision": "auto", "weight_dtype": "bfloat16", "optimizer": {"kind": kind}}
    session(shards, tmp_path / "whole", keep_last=9, **settings).run()
    stopped(tmp_path / "whole", tmp_path / "resumed", after=4)
    session(shards, tmp_path / "resumed", keep_last=9, **settings).run()
    assert result(tmp_path / "resumed") == result(tmp_path / "whole")
    for folder in (tmp_path / "whole" / "model", checkpoint.folders(tmp_path / "whole" / "checkpoints")[-1]):
        saved = safetensors.torch.load_file(folder / "model.safetensors")
        assert all((one.dtype == torch.bfloat16) == (one.dim() > 1) for one in saved.values())
    session(shards, tmp_path / "other", seed=1, **settings).run()
    assert result(tmp_path / "other")["model"] != result(tmp_path / "whole")["model"]


@pytest.mark.slow
def test_parts_of_a_stopped_run_resume_bit_for_bit_and_on_another_number_of_ranks(shards: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "auto", "weight_dtype": "bfloat16", "optimizer": {"kind": "adamw"}}
    settings |= {"parallelism": "fsdp", "keep_last": 9}
    run(shards, tmp_path / "whole", 2, **settings)
    stopped(tmp_path / "whole", tmp_path / "resumed", after=4)
    stopped(tmp_path / "whole", tmp_path / "other", after=4)
    run(shards, tmp_path / "resumed", 2, **settings)
    assert model_bytes(tmp_path / "resumed") == model_bytes(tmp_path / "whole")
    run(shards, tmp_path / "other", 1, **settings)
    losses = [[line["loss"] for line in lines(tmp_path / name, "loss")] for name in ("whole", "other")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    saved = safetensors.torch.load_file(tmp_path / "whole" / "model" / "model.safetensors")
    assert all((one.dtype == torch.float32) == ("norm" in name) for name, one in saved.items())


@pytest.mark.slow
def test_training_ends_at_a_loss_close_to_that_of_float32(shards: Path, tmp_path: Path) -> None:
    def last(name: str, **more: Any) -> float:
        settings: dict[str, Any] = {"steps": 60, "eval_every": 60, "save_every_seconds": 1e9, "precision": "bfloat16"}
        optimizer = {"kind": "adamw", "learning_rate": 3e-3}
        session(shards, tmp_path / name, optimizer=optimizer, **settings | more).run()
        losses = [line["loss"] for line in lines(tmp_path / name, "loss")]
        assert losses[-1] < 0.7 * losses[0]
        return float(sum(losses[-5:]) / 5)

    assert last("bfloat16", weight_dtype="bfloat16") == pytest.approx(last("float32"), rel=0.02)


def test_what_does_not_go_with_weights_in_bfloat16_is_refused() -> None:
    base = {"steps": 1, "global_batch_tokens": 64, "weight_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="multiplies in bfloat16, not in float32"):
        build(Training, base | {"precision": "float32"})
    with pytest.raises(ConfigError, match="lora freezes them"):
        build(Finetune, base | {"lora": {}})
    with pytest.raises(ConfigError, match=r'weight_dtype="bfloat16" does not work with offload="host"'):
        check_shard(build(Training, base | {"offload": "host", "optimizer": {"kind": "adamw"}}), 1)


def qwen_plan(traced: bool = False, **settings: Any) -> PlanReport:
    given = {"steps": 100, "global_batch_tokens": 2**15, "optimizer": {"kind": "adamw", "learning_rate": 1e-5}}
    config, target = build(Finetune, given | settings), of_memory(16 * GIB)
    ask = report.asked("finetune", config, QWEN, 151_936, target)
    return report.planned(ask, config, target, check if traced else None)


def test_all_weights_of_the_shape_of_qwen_1_5b_are_trained_on_a_card_of_16_gb_in_bfloat16() -> None:
    plain = qwen_plan()
    assert plain.ask.what.parameters == 1_543_714_304
    assert not plain.choice.fits
    assert plain.change is not None
    assert plain.change[0].endswith('finetune.weight_dtype="bfloat16"')
    fitting = qwen_plan(
        weight_dtype="bfloat16",
        optimizer={"kind": "adamw8bit"},
        activation_checkpointing="full",
        micro_batch_tokens=1024,
    )
    assert fitting.choice.fits
    facts = fitting.facts()
    assert facts["weights_bytes"] == facts["gradients_bytes"] == 2 * plain.ask.what.parameters
    assert facts["at_peak"].get("copies_bytes", 0) == 0


@pytest.mark.slow
def test_a_trace_of_that_shape_finds_less_than_10_gib_and_no_more_than_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optim, "CHUNK_NUMBERS", 2**22)  # fewer pieces take less time
    settings = {"weight_dtype": "bfloat16", "activation_checkpointing": "full", "optimizer": {"kind": "adamw8bit"}}
    plan = qwen_plan(traced=True, global_batch_tokens=2**13, **settings)
    assert plan.choice.fits
    assert plan.choice.way.rows == 8
    assert plan.choice.peak_bytes < 10 * GIB
    assert plan.choice.peak_bytes <= plan.choice.needs.peak


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (AdamW(), {"attention": ("differential",), "norm_affine": False, "biases": "qkv", "num_layers": 4}),
        (Muon(), {"num_layers": 1, "position_embedding": "learned", "tie_embeddings": False}),
    ],
    ids=["AdamW", "Muon"],
)
def test_matrices_may_be_as_many_as_vectors(config: Optimizer, shape: dict[str, Any]) -> None:
    model = Transformer(ModelConfig(**(SHAPES[0].model_dump() | shape)), VOCAB_SIZE)
    keep_weights(model, "bfloat16")
    optimizers = Optimizers(model, config)
    assert {id(one) for _, one in optimizers._owned()} == {id(one) for one in model.parameters()}
