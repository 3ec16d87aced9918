import copy
import re
from dataclasses import replace
from typing import Any

import pytest

from bloomery.core.config import apply_override, build
from bloomery.core.errors import ConfigError
from bloomery.hw.specs import GIB
from bloomery.model.config import ModelConfig
from bloomery.stages.config import Pretrain
from bloomery.train.config import AdamW, Muon
from bloomery.train.plan import report
from bloomery.train.plan.gpu_time import BUS, bus_bytes, rates, step_time
from bloomery.train.plan.memory import (
    Machine,
    TrainSetup,
    Workload,
    moving_bytes,
    needs,
    of_memory,
    offloaded_bytes,
    pinned_share,
    usable,
)
from bloomery.train.plan.search import Candidate, PlanRequest
from bloomery.train.plan.trace import trace, traced_step
from tests.train.planning.made import card, plan

GPT2 = ModelConfig(preset="gpt2-124m")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["gpt2-124m", "plasma-500m", "llama-3.1-8b"])
def test_the_arithmetic_is_near_to_what_a_trace_finds(name: str, level: str) -> None:
    shape = ModelConfig(preset=name, context_length=1024)
    what = Workload(model=shape, vocab_size=50_000, optimizer=AdamW())
    way = TrainSetup(rows=8, activation_checkpointing=level)  # type: ignore[arg-type]
    needed = needs(what, way)
    option = Candidate(way=way, what=what, needs=needed, peak_bytes=0, fits=True, pace=None)
    found = trace(traced_step(option, accumulates=True))
    assert needed.peak == pytest.approx(found.peak, rel=0.12)
    assert needed.resting == pytest.approx(found.resting, rel=0.01)


def test_the_recipe_says_tokens_a_step_and_the_plan_says_how_many_at_once() -> None:
    made = plan(GPT2, 50_257, card(), tokens=524_288)
    choice = made.facts()["choice"]
    assert made.choice.fits
    assert choice["micro_batch_tokens"] * choice["micro_batches"] == 524_288
    assert choice["peak_bytes"] <= made.target.usable_bytes


def test_less_memory_means_fewer_rows_at_once_and_never_more_tokens() -> None:
    rows = [plan(GPT2, 50_257, of_memory(size * GIB), tokens=2**17).choice.way.rows for size in (6, 8, 12, 24, 48)]
    assert rows == sorted(rows)
    assert rows[0] < rows[-1]


def test_a_number_in_the_recipe_is_kept_whether_it_fits_or_not() -> None:
    small, large = (plan(GPT2, 50_257, of_memory(6 * GIB), micro_batch_tokens=tokens) for tokens in (1024, 65_536))
    assert (small.choice.way.rows, large.choice.way.rows) == (1, 64)
    assert (small.choice.fits, large.choice.fits) == (True, False)
    assert large.change is not None
    assert large.change[0] == 'pretrain.micro_batch_tokens="auto"', "which costs nothing"
    tighter = plan(GPT2, 50_257, of_memory(4 * GIB), micro_batch_tokens=65_536)
    assert tighter.change is not None
    assert tighter.change[0].startswith('pretrain.micro_batch_tokens="auto" pretrain.activation_checkpointing=')


def test_what_a_run_refuses_is_not_planned() -> None:
    with pytest.raises(ConfigError, match="adapters"):
        plan(GPT2, 50_257, replace(card(), devices=4), finetune=True, lora={}, parallelism="fsdp")
    made = plan(GPT2, 50_257, of_memory(GIB), finetune=True, lora={})
    assert made.devices_needed is None, "of which each would have a part"


def test_what_does_not_fit_is_told_with_the_cheapest_change_that_would() -> None:
    made = plan(
        ModelConfig(preset="plasma-500m"), 48_000, of_memory(12 * GIB), activation_checkpointing="none", tokens=2**15
    )
    assert made.choice.fits == (made.change is None)
    tight = plan(ModelConfig(preset="plasma-756m"), 48_000, of_memory(12 * GIB), tokens=2**15)
    assert not tight.choice.fits
    assert tight.change is not None
    assert tight.change[1].fits
    assert "adamw8bit" in tight.change[0]
    assert re.search("  fix .*adamw8bit", " ".join(tight.lines()))


def test_without_a_known_peak_there_is_no_time() -> None:
    facts = plan(GPT2, 50_257, of_memory(24 * GIB)).facts()
    assert facts["fits"]
    assert facts["tokens_per_second"] is facts["seconds"] is facts["cost"] is None
    assert facts["speed_from"] == "unknown"


def test_nothing_is_faster_than_its_roofline() -> None:
    made = plan(GPT2, 50_257, card())
    for one in (made.choice, *(one for one, _ in made.others)):
        if one.pace is not None:
            assert 0.2 * one.pace.ceiling < one.pace.tokens_per_second < one.pace.ceiling


def test_computing_again_is_slower_and_needs_less() -> None:
    made = plan(GPT2, 50_257, card(), micro_batch_tokens=16_384)
    again = plan(GPT2, 50_257, card(), micro_batch_tokens=16_384, activation_checkpointing="full")
    assert again.choice.peak_bytes < made.choice.peak_bytes
    assert again.tokens_per_second is not None
    assert made.tokens_per_second is not None
    assert again.tokens_per_second < made.tokens_per_second


def test_parts_on_several_devices_are_parts_of_all() -> None:
    what = Workload(model=GPT2, vocab_size=50_257, optimizer=AdamW())
    alone, four = needs(what, TrainSetup(rows=1)), needs(what, TrainSetup(rows=1, devices=4, sharded=True))
    assert four.weights * 4 == pytest.approx(alone.weights, rel=1e-6)
    assert four.optimizer * 4 == pytest.approx(alone.optimizer, rel=1e-6)
    assert four.activations == alone.activations
    assert needs(what, TrainSetup(rows=1, devices=4)) == alone


def test_parts_are_told_where_all_on_each_device_is_too_much() -> None:
    shape, two = ModelConfig(preset="plasma-756m"), of_memory(12 * GIB, 2)
    made = plan(shape, 48_000, two, tokens=2**15)
    assert not made.choice.fits
    assert made.change is not None
    assert made.change[0] == 'pretrain.activation_checkpointing="full" pretrain.parallelism="fsdp"'
    assert any("sharded" in line and "too large" not in line for line in made.lines())
    parts = plan(shape, 48_000, two, tokens=2**15, parallelism="fsdp", activation_checkpointing="full")
    assert parts.choice.fits
    assert parts.choice.way.sharded
    assert parts.facts()["choice"]["sharded"]
    assert not plan(shape, 48_000, of_memory(12 * GIB), tokens=2**15, parallelism="fsdp").choice.way.sharded


def test_what_does_not_go_with_parts_is_listed_with_the_reason() -> None:
    made = plan(ModelConfig(preset="plasma-756m"), 48_000, of_memory(12 * GIB, 2), finetune=True)
    missing = {why for one, why in made.others if one.way.sharded and one.way.method != "full"}
    assert missing == {"a frozen base lies whole on each device"}
    assert not any(why for one, why in made.others if one.way.sharded and one.way.method == "full")


def test_the_rest_of_a_machine_is_left_its_share_of_a_memory_that_is_shared() -> None:
    assert usable(128 * GIB, shared=True) == 128 * GIB - int(12.8 * GIB)
    assert usable(32 * GIB, shared=True) == 24 * GIB
    assert usable(8 * GIB, shared=True) == 4 * GIB, "of a small one half"
    assert usable(24 * GIB) < 23 * GIB


def test_a_plan_says_where_its_numbers_come_from() -> None:
    made = plan(GPT2, 50_257, card("mi300x", 2))
    facts = made.facts()
    assert facts["speed_from"] == "catalogue"
    assert facts["peak_from"] == "arithmetic"
    assert facts["devices"] == 2
    assert "2 x mi300x: 183.32 GiB of 192.00 GiB usable, 1307 TFLOP/s (spec sheet)" in " ".join(
        "".join(made.lines()).split()
    )
    assert not any(one["available"] for one in facts["alternatives"] if one["method"] != "full")
    adapted = plan(GPT2, 50_257, card(), finetune=True, lora={"base_dtype": "nf4", "rank": 4})
    assert (adapted.choice.way.method, adapted.choice.way.rank) == ("nf4", 4)
    assert adapted.choice.needs.optimizer < made.choice.needs.optimizer / 100
    assert replace(made, price=made.price).facts() == facts


SEVEN = ModelConfig(preset="baichuan2-7b", context_length=512)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"optimizer": {"kind": "adamw8bit"}}, {"lora": {"base_dtype": "bfloat16", "rank": 8}}],
    ids=lambda settings: next(iter(settings)),
)
def test_no_change_is_told_that_a_run_refuses(settings: dict[str, Any]) -> None:
    """Every one is applied as it is told."""
    target = of_memory(14 * GIB, 8)
    made = plan(SEVEN, 125_696, target, finetune=True, **settings)
    assert not made.choice.fits
    assert made.change is not None
    tree = {"finetune": copy.deepcopy(settings)}
    for said in made.change[0].split():
        apply_override(tree, said)
    after = plan(SEVEN, 125_696, target, finetune=True, **tree["finetune"])
    assert after.choice.fits
    assert after.choice.peak_bytes == made.change[1].peak_bytes


# --- weights, gradients and optimizer on the host ---------------------------------------------------------------------


def test_the_host_is_proposed_only_where_nothing_else_fits_and_with_what_it_takes() -> None:
    made = plan(SEVEN, 125_696, card("rtx-4080"), tokens=2**12)
    assert made.change is not None
    assert made.change[0] == 'pretrain.activation_checkpointing="full" pretrain.offload="host"'
    text = " ".join(" ".join(made.lines()).split())
    assert re.search(r"GiB of the computer's own memory\. Each step copies [\d,.]+ GiB between host and device", text)
    assert f'Or use {made.devices_needed} such devices with pretrain.parallelism="fsdp"' in text
    adapters = plan(SEVEN, 125_696, card("rtx-4080"), finetune=True, tokens=2**12)
    assert adapters.change is not None
    assert "offload" not in adapters.change[0], "LoRA fits"
    assert not any(one.way.offload for one, _ in made.others)


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        (replace(card("rtx-4080"), host_bytes=128 * GIB), {}),  # the host is too small
        (card("strix-halo-64"), {}),  # it shares its memory with the host
        (card("rtx-4080"), {"sample_every": 5}),
    ],
)
def test_the_host_is_not_proposed_where_it_does_not_help_or_a_run_refuses_it(
    target: Machine, settings: dict[str, Any]
) -> None:
    model = SEVEN if target.offloads else ModelConfig(preset="baichuan2-13b", context_length=512)
    made = plan(model, 125_696, target, tokens=2**12, **settings)
    assert not made.choice.fits
    assert made.change is None
    auto = plan(model, 125_696, target, offload="auto", tokens=2**12, **settings)
    assert not auto.choice.way.offload


@pytest.mark.parametrize("devices", [1, 4])
def test_a_change_to_the_host_is_planned_as_it_is_told(devices: int) -> None:
    target = replace(card("rtx-4080", devices), host_bytes=512 * GIB)
    made = plan(SEVEN, 125_696, target, tokens=2**12)
    assert made.change is not None
    assert made.change[0].count("offload") == 1
    assert ('pretrain.parallelism="fsdp"' in made.change[0]) == (devices > 1)
    tree: dict[str, Any] = {}
    for said in made.change[0].split():
        apply_override(tree, said)
    after = plan(SEVEN, 125_696, target, tokens=2**12, **tree["pretrain"])
    assert after.choice.fits
    assert after.choice.way == made.change[1].way
    assert any("offload" in line for line in after.lines())
    assert after.facts()["choice"]["offload"] == "host"


def test_a_host_that_is_too_small_is_told_so_and_what_fits_without_it() -> None:
    target, settings = replace(card("rtx-4080"), host_bytes=64 * GIB), {"offload": "host", "finetune": True}
    made = plan(SEVEN, 125_696, target, tokens=2**12, activation_checkpointing="full", **settings)  # type: ignore[arg-type]
    assert made.choice.peak_bytes <= target.usable_bytes
    assert made.why == "does not fit into the computer's own memory"
    assert made.change is not None
    tree: dict[str, Any] = {"finetune": {"offload": "host"}}
    for said in made.change[0].split():
        apply_override(tree, said)
    assert tree["finetune"]["offload"] == "none"
    after = plan(SEVEN, 125_696, target, finetune=True, tokens=2**12, **tree["finetune"])
    assert after.choice.fits
    assert after.choice.way == made.change[1].way


def test_auto_goes_to_the_host_only_where_no_open_setting_fits() -> None:
    """The same run with more memory stays on the device, and without the host's does not fit."""
    settings: dict[str, Any] = {"offload": "auto", "activation_checkpointing": "auto", "tokens": 2**12}
    small, large = (plan(SEVEN, 125_696, of_memory(size * GIB), **settings) for size in (16, 192))
    assert small.choice.fits
    assert small.choice.way.offload
    assert small.why == "nothing else that the recipe allows fits"
    assert large.choice.fits
    assert not large.choice.way.offload
    assert not plan(SEVEN, 125_696, of_memory(16 * GIB), **settings | {"offload": "none"}).choice.fits
    assert not plan(SEVEN, 125_696, of_memory(16 * GIB, 2), **settings).choice.way.offload, "each would hold all"


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_device_keeps_nothing_and_the_host_all_of_it_once(devices: int, kind: str) -> None:
    optimizer = AdamW() if kind == "adamw" else Muon()
    what = Workload(model=SEVEN, vocab_size=125_696, optimizer=optimizer)
    way = TrainSetup(rows=1, activation_checkpointing="full", devices=devices, sharded=True, offload=True)
    on_host, on_device = needs(what, way), needs(what, replace(way, offload=False))
    assert (on_host.weights, on_host.gradients, on_host.optimizer) == (0, 0, 0)
    assert on_host.activations == on_device.activations
    assert on_host.gathered - on_device.gathered == moving_bytes(what, way) > 0
    assert on_host.peak < on_device.peak
    resting = on_device.weights + on_device.gradients + on_device.optimizer
    pinned = (on_device.weights + on_device.gradients) * (pinned_share(what, devices) - 1)
    assert offloaded_bytes(what, way) == pytest.approx(devices * (resting + pinned), rel=1e-6)
    assert 1 <= pinned_share(what, devices) < 2


def test_each_micro_batch_moves_all_weights_and_so_takes_longer_than_on_the_device() -> None:
    what, at = Workload(model=SEVEN, vocab_size=125_696, optimizer=AdamW()), rates(card("rtx-4080"), "bfloat16")
    way = TrainSetup(rows=8, activation_checkpointing="full", sharded=True, offload=True)
    once, twice = (bus_bytes(what, way, rows) for rows in (8, 16))
    assert twice == 2 * once
    head = 125_696 * SEVEN.hidden_size
    assert once == 3 * 4 * what.parameters - 4 * head, "for both passes, but the head for one; and gradients back"
    on_host, on_device = (step_time(what, replace(way, offload=offload), at, 8) for offload in (True, False))
    assert on_host.bus == once / BUS
    assert on_host.update > on_device.update
    assert on_host.seconds > on_device.seconds + on_host.bus
    nf4 = replace(way, method="nf4")
    assert bus_bytes(what, nf4, 8) < once / 4


def test_a_device_without_memory_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r'offload: offload="host" frees nothing on strix-halo-64.*\nSet offload="none"'
    ):
        plan(GPT2, 50_257, card("strix-halo-64"), offload="host")


def test_a_change_keeps_what_a_recipe_says_of_its_adapters() -> None:
    made = plan(SEVEN, 125_696, of_memory(14 * GIB), finetune=True, lora={"base_dtype": "bfloat16", "rank": 64})
    assert made.change is not None
    assert made.change[0] == 'finetune.activation_checkpointing="full" finetune.lora.base_dtype="nf4"'
    assert made.change[1].way.rank == 64


@pytest.mark.parametrize("memory_gib", [7, 8])
def test_a_change_counts_only_if_it_fits_when_it_is_traced_too(memory_gib: int) -> None:
    """As `check` finds more than the arithmetic, less is promised: fewer rows, or a change that needs less."""
    target = of_memory(memory_gib * GIB)
    config = build(Pretrain, {"steps": 10, "global_batch_tokens": 2**16, "optimizer": {"kind": "adamw"}})
    ask = report.asked("pretrain", config, ModelConfig(preset="gpt2-350m"), 50_257, target)

    def a_fifth_more(ask: PlanRequest, target: Machine, option: Candidate) -> Candidate:
        return replace(option, peak_bytes=(peak := option.peak_bytes * 6 // 5), fits=peak <= target.usable_bytes)

    plain = report.planned(ask, config, target)
    traced = report.planned(ask, config, target, a_fifth_more)
    assert plain.change is not None
    assert traced.change is not None
    assert traced.change[1].fits
    assert traced.change[1].peak_bytes <= target.usable_bytes
    assert (plain.change[0], plain.change[1].way.rows) != (traced.change[0], traced.change[1].way.rows)


@pytest.mark.parametrize(("precision", "peak"), [("float32", 163.4e12), ("bfloat16", 1307.4e12)])
def test_a_format_has_its_own_peak_or_none(precision: str, peak: float) -> None:
    made = plan(GPT2, 50_257, card("mi300x"), precision=precision)
    assert made.target.peak(precision) == pytest.approx(peak, rel=0.01)  # type: ignore[arg-type]
    assert made.seconds is not None
    assert f"{peak / 1e12:.4g} TFLOP/s (spec sheet)" in " ".join("".join(made.lines()).split())
    unknown = plan(GPT2, 50_257, card("9070xt"), precision="float32")
    assert unknown.seconds is None
    assert unknown.facts()["speed_from"] == "unknown"
    assert any("no peak in float32 is known" in line for line in unknown.lines())


def test_what_does_not_fit_takes_no_time() -> None:
    made = plan(SEVEN, 125_696, card("7900xt"))
    assert (made.choice.fits, made.facts()["seconds"]) == (False, None)


def test_devices_without_a_row_are_told_and_make_nothing_faster() -> None:
    some, many = (plan(GPT2, 50_257, card("mi300x", devices), tokens=64 * 1024) for devices in (64, 1000))
    assert many.choice.pace is not None
    assert some.choice.pace is not None
    assert many.choice.pace.ceiling == some.choice.pace.ceiling
    assert any("936 devices would have none" in line for line in many.lines())
