"""Training with the residual stream in bfloat16 and matmuls in float8: settings, plans, and whole runs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, HardwareError
from bloomery.hw import device as devices
from bloomery.hw.distributed import World
from bloomery.hw.specs import CATALOG, named
from bloomery.model.config import PRESETS, ModelConfig
from bloomery.shards.loader import PackedDataset
from bloomery.train import compile, launch, loss, precision
from bloomery.train.config import AdamW, Finetune, Training
from bloomery.train.plan.gpu_time import rates, step_time
from bloomery.train.plan.here import room
from bloomery.train.plan.memory import TrainSetup, Workload, check_shard, needs, of_entry, of_memory
from bloomery.train.plan.report import asked, check_formats
from bloomery.train.plan.trace import TracedStep, trace
from bloomery.train.preference.config import Prefer
from tests.tokenizer.made import small
from tests.train import made
from tests.train.made import ADAMW, lines, model_bytes, run, session, stopped

import torch

WIDE = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=48, context_length=made.T
)
SHORT: dict[str, Any] = {"residual_dtype": "bfloat16", "float8": "all", "precision": "bfloat16"}
RUN: dict[str, Any] = {"optimizer": ADAMW, "steps": 30, "eval_every": 10, "save_every_seconds": 1e9}


def training(**settings: Any) -> Training:
    return build(Training, {"steps": 1, "global_batch_tokens": 1, **settings})


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape with sides of multiples of 16, and a CPU that counts as a device for float8."""
    monkeypatch.setattr(made, "SHAPE", WIDE)
    monkeypatch.setattr(precision, "check_float8", lambda device: None)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"residual_dtype": "bfloat16", "precision": "float16"}, "needs matmuls in bfloat16, not in float16"),
        ({"float8": "head", "precision": "float32"}, 'float8="head" needs matmuls in bfloat16, not in float32'),
        ({"float8": "blocks"}, "float8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        training(**settings)


def test_adapters_and_preferences_have_no_float8() -> None:
    with pytest.raises(ConfigError, match="applies to trained weights, and lora freezes them"):
        build(Finetune, {"steps": 1, "global_batch_tokens": 1, "lora": {}, "float8": "all"})
    with pytest.raises(ConfigError, match="is for pretraining and finetuning: remove it"):
        build(Prefer, {"steps": 1, "global_batch_tokens": 1, "pairs": [{"kind": "worlds"}], "float8": "all"})
    with pytest.raises(ConfigError, match='residual_dtype="bfloat16" is for pretraining and finetuning'):
        build(
            Prefer, {"steps": 1, "global_batch_tokens": 1, "pairs": [{"kind": "worlds"}], "residual_dtype": "bfloat16"}
        )


@pytest.mark.parametrize(("name", "value"), [("float8", "head"), ("residual_dtype", "bfloat16")])
def test_tensor_parallelism_has_neither(name: str, value: str) -> None:
    mesh = {"mesh": {"dp_shard": 2, "tp": 2}, "num_processes": 4}
    with pytest.raises(ConfigError, match=rf'{name}="{value}" does not work with a mesh: with tp'):
        check_shard(training(**{name: value}, **mesh), 4)
    assert check_shard(training(**{name: value}, mesh={"dp_replicate": 2, "dp_shard": 2}), 4) is not None


def test_a_run_on_a_cpu_refuses_float8_before_it_trains(shards: Path, tmp_path: Path) -> None:
    with pytest.raises((HardwareError, ConfigError), match="needs a GPU that multiplies numbers of 8 bits"):
        run(shards, tmp_path, 1, **RUN, float8="all", precision="bfloat16")
    assert not (tmp_path / "model").exists()


def test_other_matmuls_must_be_in_bfloat16(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.hw.device.fast_bf16", lambda host: False)
    with pytest.raises((HardwareError, ConfigError), match=r"needs matmuls in bfloat16, but .* computes in float32"):
        run(shards, tmp_path, 1, **RUN, residual_dtype="bfloat16", precision="auto")


def test_a_run_learns_about_as_well_and_resumes_bit_for_bit(shards: Path, tmp_path: Path, wide: None) -> None:
    plain = session(shards, tmp_path / "plain", **RUN, precision="bfloat16").run()
    short = session(shards, tmp_path / "short", **RUN, **SHORT).run()
    start = lines(tmp_path / "plain", "loss")[0]["loss"]
    assert short["validation_loss"] < start - 0.5 * (start - plain["validation_loss"])
    assert short["validation_loss"] == pytest.approx(plain["validation_loss"], rel=0.03)
    session(shards, tmp_path / "whole", **RUN | SHORT | {"keep_every": 5}).run()
    again = stopped(tmp_path / "whole", tmp_path / "again", 15)
    session(shards, again, **RUN | SHORT | {"keep_every": 5}).run()
    ends = [model_bytes(tmp_path / name) for name in ("short", "whole", "again")]
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("level", ["selective", "full"])
def test_what_is_computed_again_in_8_bits_is_the_same(shards: Path, tmp_path: Path, wide: None, level: str) -> None:
    """Bit for bit; but what CPUs compute in place of a GPU's matmul rounds otherwise where a mode watches it."""
    settings = RUN | SHORT | {"steps": 4}
    losses = []
    for name in ("none", level):
        session(shards, tmp_path / name, **settings, activation_checkpointing=name).run()
        losses.append([line["loss"] for line in lines(tmp_path / name, "loss")])
    assert losses[1] == (losses[0] if level == "full" else pytest.approx(losses[0], rel=1e-3))


def in_parts(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """A run of a rank that holds a part of each weight."""
    made.SHAPE = WIDE
    setattr(precision, "check_float8", lambda device: None)  # noqa: B010  for mypy, it is no name of the module
    return made.trained(task, world)


@pytest.mark.slow
def test_ranks_that_hold_parts_learn_what_one_learns(shards: Path, tmp_path: Path, wide: None) -> None:
    settings = RUN | SHORT | {"steps": 8, "micro_batch_tokens": 2 * made.T}
    session(shards, tmp_path / "one", **settings).run()
    task = {"shards": str(shards), "out": str(tmp_path / "parts"), "settings": settings | {"parallelism": "fsdp"}}
    launch.run("tests.train.test_short_formats:in_parts", task, 2)
    one, parts = ([line["loss"] for line in lines(tmp_path / name, "loss")] for name in ("one", "parts"))
    assert parts == pytest.approx(one, rel=5e-3)  # ranks have other micro-batches, and so other scales
    assert math.isfinite(parts[-1])


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["7900xtx", "strix-halo-128", "a100-80", "rtx-3090", "apple-m4", "mi250x"])
def test_a_plan_refuses_float8_on_a_device_without_it(key: str) -> None:
    config = training(float8="all", precision="bfloat16", global_batch_tokens=2**15)
    target = of_entry(named(key), memory_bytes=2**35)
    with pytest.raises(
        ConfigError, match=rf"needs a GPU that multiplies numbers of 8 bits, not {key}\nSet pretrain\.fl"
    ):
        check_formats(config, WIDE, target, "pretrain")
    check_formats(training(residual_dtype="bfloat16", precision="bfloat16"), WIDE, target, "pretrain")


def test_a_plan_for_an_unknown_gpu_leaves_float8_to_the_run() -> None:
    check_formats(training(float8="all"), WIDE, of_memory(2**34), "pretrain")
    with pytest.raises(ConfigError, match=r"computes in float16\nSet pretrain\.precision"):
        check_formats(training(float8="all"), WIDE, of_entry(named("t4")), "pretrain")


def test_a_plan_refuses_shapes_that_are_not_multiples_of_16_and_says_what_works() -> None:
    odd, target = WIDE.model_copy(update={"intermediate_size": 40}), of_entry(named("h100"))
    with pytest.raises(ConfigError, match=r'but one has 40 x 32\nSet float8="head" or "off"'):
        check_formats(training(float8="all"), odd, target, "pretrain")
    check_formats(training(float8="head"), odd, target, "pretrain")
    with pytest.raises(ConfigError, match=r'Set float8="off"'):
        check_formats(training(float8="head"), WIDE.model_copy(update={"hidden_size": 40}), target, "pretrain")


@pytest.mark.parametrize(
    ("facts", "rocm", "there"),
    [
        ({"major": 8, "minor": 0}, False, False),
        ({"major": 8, "minor": 9}, False, True),
        ({"major": 9, "minor": 0}, False, True),
        ({"gcnArchName": "gfx942:sramecc+:xnack-", "major": 9, "minor": 4}, True, True),
        ({"gcnArchName": "gfx1100", "major": 11, "minor": 0}, True, False),
        ({"gcnArchName": "gfx1201", "major": 12, "minor": 0}, True, True),
    ],
)
def test_a_plan_for_this_machine_knows_whether_its_gpu_has_float8(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], rocm: bool, there: bool
) -> None:
    monkeypatch.setattr(devices, "is_rocm", lambda: rocm)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(**facts))
    gpu = replace(made.processor(torch.bfloat16), torch_device=torch.device("cuda", 0), memory_bytes=2**34)
    assert room(gpu, 1).float8 is there
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert room(gpu, 1).float8 is None
    assert room(made.processor(), 1).float8 is False


def test_layers_that_are_tried_before_sharding_have_the_formats_of_the_run(
    shards: Path, wide: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def noted(model: Any, *inputs: Any, **how: Any) -> compile.Verdict:
        tried.append(model)
        return compile.Verdict(False, "not now")

    monkeypatch.setattr(compile, "compile_blocks", noted)
    samples = PackedDataset(shards, "train", made.T, small().hash)
    config = training(**SHORT, optimizer=ADAMW, micro_batch_tokens=2 * made.T)
    compile._tried_layers(config, WIDE, samples, made.on_cpu(torch.bfloat16), 1)
    assert tried[0].residual_dtype == torch.bfloat16
    assert tried[0].blocks[0].mlp.gate.float8 is not None


def test_a_loss_that_a_gpu_computes_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "check_device", lambda device: None)
    loss.check_float8(made.processor(torch.bfloat16))
    monkeypatch.setattr(loss, "to_float8", lambda *inputs: (inputs[0].to(inputs[1]), torch.full((), 1.5)))
    with pytest.raises(HardwareError, match=r"test computes a wrong loss with numbers of 8 bits \(error"):
        loss.check_float8(made.processor(torch.bfloat16))


def test_every_key_of_a_device_with_float8_is_in_the_catalog() -> None:
    assert {"h100", "mi300x", "rtx-4090"} <= {entry.key for entry in CATALOG if entry.float8}
    assert not any(entry.float8 for entry in CATALOG if entry.peak("bfloat16") is None)


def seconds(key: str, **way: Any) -> float:
    model = ModelConfig(preset="plasma-500m")
    target = of_entry(named(key))
    what = Workload(model=model, vocab_size=48_000, optimizer=AdamW(), memory_bytes=target.memory_bytes)
    return step_time(what, TrainSetup(rows=32, **way), rates(target, "bfloat16"), 32).seconds


def test_a_plan_expects_that_short_formats_are_faster_where_the_work_is_large() -> None:
    plain = seconds("h100")
    assert seconds("h100", residual_dtype="bfloat16") < plain
    assert seconds("h100", float8="all") < seconds("h100", float8="head") < plain
    assert seconds("h100", float8="all") > plain / 2, "attention and other kernels stay as they are"
    assert seconds("h100", weight_dtype="bfloat16") < plain


def test_what_is_asked_for_reaches_the_plan_and_its_trace() -> None:
    model = ModelConfig(preset="gpt2-124m")
    config = training(**SHORT, global_batch_tokens=2**13, optimizer=ADAMW)
    way = asked("pretrain", config, model, 50_263, of_entry(named("h100"))).way
    assert (way.residual_dtype, way.float8) == ("bfloat16", "all")


@pytest.mark.parametrize("level", ["none", "full"])
def test_memory_of_short_formats_is_planned(level: Any) -> None:
    """The trace of a step stays below its plan, and close to it."""
    preset = PRESETS["gpt2-124m"]
    model = ModelConfig(preset="gpt2-124m").model_copy(update={"num_layers": 4})
    what = Workload(model=model, vocab_size=preset.vocab_size, optimizer=AdamW(), memory_bytes=2**36)
    step = TracedStep(
        model=model,
        vocab_size=preset.vocab_size,
        optimizer=AdamW(),
        activation_checkpointing=level,
        precision=torch.bfloat16,
        rows=8,
        accumulates=True,
        on_processor=False,
        logits_chunk_bytes=what.logits_chunk_bytes,
    )
    way = TrainSetup(rows=8, activation_checkpointing=level)
    plain, short = trace(step), trace(replace(step, residual_dtype="bfloat16", float8="all"))
    planned = needs(what, replace(way, residual_dtype="bfloat16", float8="all")).peak
    assert short.peak <= 1.03 * planned
    if level == "full":
        assert trace(replace(step, residual_dtype="bfloat16")).peak < plain.peak
    if level == "none":  # a block that is computed again ends with one matmul more
        halves = [sum(one.products[key] for key in one.products if key[-1] == torch.bfloat16) for one in (plain, short)]
        assert halves[0] == halves[1], "every matmul is timed"
