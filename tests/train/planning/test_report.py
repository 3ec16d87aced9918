"""What a plan tells, whatever it is of."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.errors import ConfigError
from bloomery.hw import device as devices
from bloomery.hw.device import listed_peak
from bloomery.hw.distributed import World, ranks_here
from bloomery.hw.specs import GIB
from bloomery.model.config import ModelConfig
from bloomery.stages.plan import verdict
from bloomery.train.plan import here as plan_here
from bloomery.train.plan import memory, report
from bloomery.train.plan.here import decided, here, offload_cost, room, slower
from bloomery.train.plan.memory import of_memory
from bloomery.train.plan.report import PlanReport
from bloomery.train.plan.search import Candidate
from bloomery.train.plan.trace import check
from tests.train.made import processor
from tests.train.planning.made import SMALL, card, plan, training

import torch

KEYS = {
    "parameters",
    "flops",
    "weights_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "logits_bytes",
    "kv_bytes",
    "peak_bytes",
    "fits",
    "tokens_per_second",
    "seconds",
    "choice",
    "alternatives",
    "disk_bytes",
}
GPT2 = ModelConfig(preset="gpt2-124m")
LARGE = ModelConfig(preset="baichuan2-7b", context_length=512)
PLANS: Mapping[str, tuple[Any, ...]] = {
    "all weights": (GPT2, card(), {}),
    "parts": (GPT2, card(devices=2), {"parallelism": "fsdp"}),
    "adapters": (GPT2, card(), {"finetune": True, "lora": {"base_dtype": "bfloat16"}}),
    "adapters in four bits": (GPT2, card(), {"finetune": True, "lora": {"base_dtype": "nf4"}}),
    "too large": (LARGE, of_memory(16 * GIB, 2), {}),
    "too large for anything": (ModelConfig(preset="llama-3.1-405b"), of_memory(8 * GIB), {}),
}


def adds_up(made: PlanReport) -> bool:
    told = made.facts()
    parts = {name: size for name, size in told["at_peak"].items() if name != "moment"}
    assert all(size >= 0 for size in parts.values())
    return bool(sum(parts.values()) == told["peak_bytes"] == made.choice.peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_tells_the_same_facts_and_parts_that_add_up_to_its_peak(name: str) -> None:
    model, target, settings = PLANS[name]
    made = plan(model, 50_257, target, **settings)
    told = made.facts()
    assert told.keys() >= KEYS
    assert adds_up(made)
    assert {
        "micro_batch_tokens",
        "activation_checkpointing",
        "precision",
        "method",
        "sharded",
        "peak_bytes",
        "fits",
    } <= told["choice"].keys()
    assert all(
        {"tokens_per_second", "peak_bytes", "peak_from", "available"} <= one.keys() for one in told["alternatives"]
    )
    assert told["fits"] == (not name.startswith("too large"))
    if not told["fits"]:
        assert any(line.startswith("  fix") for line in made.lines())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (2**8, {}),
        (2**12, {"activation_checkpointing": "full"}),
        (2**12, {"finetune": True, "lora": {"base_dtype": "nf4"}}),
        (2**8, {"finetune": True, "lora": {"base_dtype": "bfloat16"}}),
    ],
)
@pytest.mark.parametrize("on_processor", [True, False], ids=["processor", "card"])
def test_the_parts_of_a_traced_peak_add_up_to_it_too(tokens: int, settings: dict[str, Any], on_processor: bool) -> None:
    target = replace(card(), processor=on_processor)
    made = plan(SMALL, 512, target, tokens=tokens, micro_batch_tokens=2**8, **settings)
    made = replace(made, choice=check(made.ask, target, made.choice))
    assert made.facts()["peak_from"] == "trace"
    assert adds_up(made)
    told = made.facts()
    if tokens > 2**8 and told["at_peak"]["moment"] != "loading":
        assert told["at_peak"]["gradients_bytes"] == pytest.approx(made.choice.needs.gradients, rel=0.01)
    if "lora" not in settings:
        assert told["weights_bytes"] == 4 * told["parameters"]
        assert told["optimizer_bytes"] == pytest.approx(8 * told["parameters"], rel=0.01)


def test_the_way_that_was_chosen_is_the_same_among_the_alternatives() -> None:
    target = card()
    ask = report.asked("pretrain", training(), SMALL.model_copy(update={"num_layers": 2}), 512, target)
    made = report.planned(ask, training(), target, check)
    same = [one for one, _ in made.others if one.way == made.choice.way]
    assert [one.peak_bytes for one in same] == [made.choice.peak_bytes]
    assert made.choice.traced


def test_ways_that_were_not_timed_are_as_far_from_their_reckoning_as_the_one_that_was() -> None:
    target = replace(card("7900xtx"), peaks={"float32": 60e12})
    config = training(steps=1000, global_batch_tokens=2**16)
    ask = report.asked("pretrain", config, SMALL, 1000, target)
    plain = report.planned(ask, config, target)
    slow = report.planned(ask, config, target, lambda _ask, _target, one: at(one, 0.25))
    assert slow.choice.pace
    assert plain.choice.pace
    assert slow.choice.way == plain.choice.way
    for (one, _), (before, _) in zip(slow.others, plain.others, strict=True):
        assert one.pace
        assert before.pace
        assert one.way == before.way
        assert one.pace.tokens_per_second == pytest.approx(before.pace.tokens_per_second / 4)
        assert one.pace.timed == (one.way == slow.choice.way)
        assert one.way.precision == "bfloat16" or one.pace.tokens_per_second < slow.choice.pace.tokens_per_second
    marked = [line for line in slow.lines() if "checkpointing full" in line]
    assert marked
    assert all("~" in line.split()[-1] for line in marked)
    fast = report.planned(ask, config, target, lambda _ask, _target, one: at(one, 1e6))
    assert all(
        one.pace.tokens_per_second <= one.pace.ceiling for one, _ in fast.others if one.pace and not one.pace.timed
    )


def at(one: Candidate, faster: float) -> Candidate:
    """As if steps of it had been timed, so many times as fast as was reckoned."""
    assert one.pace is not None
    return replace(one, pace=replace(one.pace, tokens_per_second=faster * one.pace.tokens_per_second, timed=True))


def test_this_machine_has_a_measured_peak_of_both_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.bfloat16: 8e11, torch.float32: 2e11}
    monkeypatch.setattr(devices, "find", lambda _name: processor(torch.bfloat16))
    monkeypatch.setattr(plan_here, "measured_peak", lambda device: rates[device.compute_dtype])
    monkeypatch.setattr(plan_here, "slower", lambda ranks: 2.0 * ranks)
    target = here(training(), 2)
    assert (target.peak("bfloat16"), target.peak("float32"), target.peak("float16")) == (2e11, 0.5e11, None)
    exact = here(training(precision="float32"))
    assert exact.precision == "float32"
    assert exact.peak("float32") == 1e11
    assert exact.peak("bfloat16") is None


def test_ranks_on_a_processor_share_its_memory_and_those_on_cards_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    device = replace(processor(), memory_bytes=64 * GIB)
    alone, two = room(device), room(device, 2, ranks_here(World(0, 2)))
    assert two.usable_bytes == pytest.approx(alone.usable_bytes / 2, abs=1)
    assert (alone.memory_bytes, two.memory_bytes) == (64 * GIB, 32 * GIB)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert room(device, 2, ranks_here(World(0, 2))).usable_bytes == alone.usable_bytes, "each on a machine of its own"
    assert card(devices=2).usable_bytes == card().usable_bytes


def test_recomputation_is_chosen_only_where_it_is_needed_and_kept_for_the_same_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = ModelConfig(preset="gpt2-124m", context_length=1024)
    config = training(
        activation_checkpointing="auto", global_batch_tokens=2**14, micro_batch_tokens=2**13, precision="float32"
    )

    def level(gib: float) -> str:
        device = replace(processor(), memory_bytes=int(gib * GIB))
        target = room(device)
        run = decided(config, deep, 50_257, device, World(), tmp_path).activation_checkpointing
        made = report.planned(report.asked("pretrain", config, deep, 50_257, target), config, target)
        assert made.choice.way.activation_checkpointing == run
        assert made.choice.fits == (gib > 10)
        return run

    assert [level(gib) for gib in (200, 20, 16, 6)] == ["none", "selective", "full", "full"]
    assert level(200) == "none"
    monkeypatch.setattr(plan_here, "first_fitting", None)
    assert decided(config, deep, 50_257, replace(processor(), memory_bytes=200 * GIB), World(), tmp_path) == (
        config.model_copy(update={"activation_checkpointing": "none"})
    )
    with pytest.raises(TypeError):
        decided(config, deep, 50_257, replace(processor(), memory_bytes=100 * GIB), World(), tmp_path)


def test_a_run_offloads_where_its_plan_does_says_what_it_costs_and_keeps_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_here, "memory_bytes", lambda host: 64 * GIB)
    model = ModelConfig(preset="gpt2-1558m", context_length=512)
    config = training(
        offload="auto", activation_checkpointing="full", global_batch_tokens=2**14, optimizer={"kind": "adamw"}
    )

    def gpu(gib: int, *, shared: bool = False) -> devices.Device:
        facts: dict[str, Any] = {"torch_device": torch.device("cuda"), "vendor": "amd", "shared": shared}
        dtype = torch.bfloat16
        return devices.Device(
            name=f"{gib} {shared}", memory_bytes=gib * GIB, compute_dtype=dtype, backend="nccl", **facts
        )

    def offload(device: devices.Device) -> str:
        run, target = decided(config, model, 50_257, device, World(), tmp_path), room(device)
        made = report.planned(report.asked("pretrain", config, model, 50_257, target), config, target)
        assert run.offload == ("host" if made.choice.way.offload else "none")
        assert run.micro_batch_tokens == made.choice.way.rows * 512
        return run.offload

    assert [offload(gpu(gib)) for gib in (80, 12)] == ["none", "host"]
    assert offload(gpu(12, shared=True)) == "none"
    assert offload(gpu(12)) == "host"
    settled = decided(config, model, 50_257, gpu(12), World(), tmp_path)
    cost = offload_cost(settled, model, 50_257, gpu(12), World())
    assert re.match(r"  offload: weights, gradients and optimizer stay on the host\. Each step copies [\d.]+ GiB", cost)
    with pytest.raises(ConfigError, match='offload="host" frees nothing'):
        offload_cost(settled, model, 50_257, gpu(12, shared=True), World())
    monkeypatch.setattr(plan_here, "first_fitting", None)
    assert decided(config, model, 50_257, gpu(12), World(), tmp_path) == settled, "from the run's folder"
    monkeypatch.undo()
    monkeypatch.setattr(plan_here, "memory_bytes", lambda host: 16 * GIB)
    assert offload(gpu(11)) == "none", "the host is too small"


def test_all_ranks_take_the_rows_that_the_one_with_the_least_memory_does(tmp_path: Path) -> None:
    """Ranks that hold parts of the weights would wait for each other for ever, where one has more micro-batches."""

    class Company(World):
        def gather(self, value: Any) -> list[Any]:
            return [value, 3 * SMALL.context_length]

    device = replace(processor(), memory_bytes=64 * GIB)
    config = training(micro_batch_tokens="auto", global_batch_tokens=64 * SMALL.context_length)
    folders = [tmp_path / "alone", tmp_path / "company"]
    for folder in folders:
        folder.mkdir()
    one, other = (
        decided(config, SMALL, 256, device, world, folder).micro_batch_tokens
        for world, folder in zip((World(), Company()), folders, strict=True)
    )
    assert one != other == 3 * SMALL.context_length


def test_ranks_that_take_turns_on_a_core_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert slower(1) >= 1
    assert slower(64) > slower(2) >= slower(1)


def test_a_processor_has_no_peak_of_the_gpu_that_its_name_speaks_of() -> None:
    device = replace(processor(torch.bfloat16), name="AMD RYZEN AI MAX+ 395 w/ Radeon 8060S")
    assert listed_peak(device) is None
    assert listed_peak(replace(device, torch_device=torch.device("cuda"))) == 59.4e12


def test_what_needs_more_than_linux_lends_a_gpu_says_which_setting_lends_it() -> None:
    large = ModelConfig(preset="llama-3.1-8b", context_length=2048)
    adapters = {"finetune": True, "lora": {"base_dtype": "float32"}}
    for model, settings, told in ((large, adapters, True), (GPT2, {"micro_batch_tokens": 1024}, False)):
        made = plan(model, 128_256, card("strix-halo-64"), **settings)
        assert made.choice.fits
        assert (made.choice.peak_bytes > 32 * GIB) == told
        assert ("32.00 GiB until ttm.pages_limit" in " ".join(" ".join(made.lines()).split())) == told


def test_a_plan_tells_the_memory_of_the_host_and_refuses_what_it_cannot_hold() -> None:
    on_card = plan(GPT2, 50_257, card())
    weights, file = 4 * on_card.ask.what.parameters, memory.FILE_BYTES
    assert on_card.host["processes"] == memory.PROCESS_BYTES
    matrices = {768 * 768: 4 * 12, 768 * 3072: 2 * 12, 768 * 50_257: 1}
    pinned = sum(count * 2 ** math.ceil(math.log2(size)) for size, count in matrices.items())
    rounded = pinned / sum(count * size for size, count in matrices.items())
    assert on_card.host["saving"] == pytest.approx(3 * weights * rounded + file, rel=1e-6), "each copy a power of two"
    assert 1.2 < rounded < 2
    assert on_card.facts()["host_memory_bytes"] is None
    shared = replace(card(), host_bytes=GIB)
    held = plan(GPT2, 50_257, shared)
    assert held.choice.peak_bytes < shared.usable_bytes
    assert not held.choice.fits
    assert held.why == "does not fit into the computer's own memory"
    assert "of the computer's own 1.0 GiB" in verdict({"pretrain": held})[0]
    small = replace(card(), host_bytes=2 * GIB)
    assert plan(GPT2, 50_257, small, optimizer={"kind": "adamw8bit"}).choice.fits
    cpu = replace(room(replace(processor(), memory_bytes=64 * GIB)), precision="float32")
    assert cpu.host_bytes == 64 * GIB
    made = plan(GPT2, 50_257, cpu)
    assert made.host["training"] == made.choice.peak_bytes, "which is the same memory"
    assert made.host["saving"] == 3 * weights + file
