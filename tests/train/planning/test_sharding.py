"""Plans over a mesh: bytes of each device, bytes between them, and what fits."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery import api, cli
from bloomery.core.config import Config
from bloomery.core.errors import ConfigError
from bloomery.hw.specs import HOST_LINK, named
from bloomery.model import lora
from bloomery.model.config import PRESETS, Lora, ModelConfig, cost
from bloomery.model.quantize import kept_bytes
from bloomery.model.transformer import Transformer
from bloomery.stages.run_report import run_recipe
from bloomery.train.config import AdamW, AdamW8bit, Mesh, Training
from bloomery.train.plan.memory import of_entry, of_memory
from bloomery.train.plan.sharding import MATMUL_BYTES, ShardingPlan, ShardingRequest, fix, sharded
from tests.train.planning.made import card, plan
from tests.two_stages import STAGES, Section

SMALL = ModelConfig(
    hidden_size=256, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=512, tie_embeddings=False
)


def request(model: ModelConfig, mesh: Mesh, adapters: Lora | None = None, **more: Any) -> ShardingRequest:
    sizes: dict[str, Any] = {"vocab_size": 512, "optimizer": AdamW(), "rows_per_step": 8} | more
    return ShardingRequest(model=model, mesh=mesh, lora=adapters, **sizes)


def small(adapters: Lora | None = None, *, rows: int = 1, **axes: int) -> ShardingPlan:
    return sharded(request(SMALL, Mesh(preset="gpt2-124m", **axes), adapters, rows=rows), of_memory(2**34, 8))


def of_preset(
    preset: str, device: str, base: str | None, tokens: int = 4096, rows: int = 8, **axes: int
) -> ShardingPlan:
    mesh = Mesh(preset=preset, **axes)
    model = ModelConfig(preset=preset).model_copy(update={"context_length": tokens})
    adapters = None if base is None else Lora(rank=8, base_dtype=base)
    ask = request(model, mesh, adapters, vocab_size=PRESETS[preset].vocab_size, rows_per_step=rows)
    entry = named(device)
    return sharded(ask, of_entry(entry, mesh.devices), entry.link)


@pytest.mark.parametrize("base", ["float32", "bfloat16", "int8", "nf4"])
@pytest.mark.parametrize("axes", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}])
def test_all_devices_together_hold_what_a_model_of_training_keeps(base: str, axes: dict[str, int]) -> None:
    """Once a copy, but for vectors that each device of tp has whole."""
    adapters = Lora(rank=8, base_dtype=base)
    model = Transformer(SMALL, 512)
    lora.attach(model, adapters, 0)
    plan = small(adapters, **axes)
    tp = axes.get("tp", 1)
    whole = [one for one in plan.tensors if one.tp is None and tp > 1]
    more = sum(one.numbers * one.number_bytes for one in whole) * (tp - 1)
    devices = axes["dp_shard"] * tp
    assert plan.memory.weights * devices == kept_bytes(model) + more
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    copied = sum(one.numbers for one in whole if one.trained) * (tp - 1)
    assert plan.memory.gradients * devices == 4 * (trained + copied)
    assert plan.memory.optimizer == 2 * plan.memory.gradients


def test_more_devices_never_need_more_memory_of_each() -> None:
    for adapters in (None, Lora(rank=8, base_dtype="bfloat16"), Lora(rank=8, base_dtype="nf4", dora=True)):
        for axis in ("dp_shard", "tp"):
            peaks = [small(adapters, **{"dp_shard": 2, axis: count}).memory.peak for count in (1, 2, 4)]
            assert peaks[2] <= peaks[1]
            if axis == "tp":
                assert peaks[1] < peaks[0]


@pytest.mark.parametrize("adapters", [None, Lora(rank=8, base_dtype="bfloat16"), Lora(rank=8, base_dtype="nf4")])
def test_a_lower_stage_of_zero_receives_less_and_holds_more_by_what_it_no_longer_cuts(adapters: Lora | None) -> None:
    plans = [small(adapters, rows=1, dp_replicate=2, dp_shard=2, zero_stage=stage) for stage in (1, 2, 3)]
    received = [sum(traffic.num_bytes for traffic in plan.traffic) for plan in plans]
    assert received[0] < received[1] < received[2]
    held = [plan.memory.gathered for plan in plans]
    assert held[0] > held[1] > held[2]
    whole = sum(tensor.gathered_bytes(plans[0].ask.mesh, MATMUL_BYTES) for tensor in plans[0].tensors)
    assert held[0] == whole + 4 * sum(tensor.numbers for tensor in plans[0].tensors if tensor.trained)
    by = [{(one.collective, one.axis): one.num_bytes for one in plan.traffic} for plan in plans]
    assert by[0]["all-gather", "dp_shard"] == by[1]["all-gather", "dp_shard"] == whole // 2
    assert plans[0].facts()["mesh"]["zero_stage"] == 1
    one, other = plans[0].lines()[1], plans[2].lines()[1]
    assert one == f"{other}, ZeRO stage 1"


def test_a_stage_of_zero_without_shards_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="zero_stage=2 needs several devices of dp_shard"):
        Mesh(tp=2, zero_stage=2)


@pytest.mark.parametrize("stage", [1, 2])
def test_without_a_preset_a_stage_of_zero_is_planned_as_with_one(stage: int) -> None:
    mesh = {"dp_shard": 4, "zero_stage": stage}
    made = plan(SMALL, 512, card("rtx-4090", 4), finetune=True, num_processes=4, mesh=mesh, tokens=4096)
    expected = small(None, rows=1, **mesh).memory.gathered
    assert made.choice.needs.gathered == pytest.approx(expected, rel=0.15)


def test_a_device_receives_the_bytes_of_the_formulas_of_its_collectives() -> None:
    adapters = Lora(rank=8, base_dtype="bfloat16")
    D, M, L, V, T, rank = 256, 512, 3, 512, SMALL.context_length, 8
    heads = 256 + 2 * 128
    block = D * heads + D * D + 3 * D * M
    ends = (D + 256) * 2 + (D + 128) * 2 + 3 * (D + M)
    trained, vectors = L * rank * ends, 2 * D
    units = 2 * L * (block + rank * ends + 2 * vectors) + V * D + V * D + 2 * D  # norms are gathered in float32
    by = {(one.collective, one.axis): one.num_bytes for one in small(adapters, rows=2, dp_shard=4).traffic}
    assert by == {
        ("all-gather", "dp_shard"): units * MATMUL_BYTES * 3 // 4,
        ("reduce-scatter", "dp_shard"): trained * 4 * 3 // 4,
    }
    by = {(one.collective, one.axis): one.num_bytes for one in small(adapters, rows=8, tp=2).traffic}
    a_of_columns = L * rank * (3 * D + 2 * D)  # whole on each device, as B of rows is
    b_of_rows = L * rank * 2 * D
    stream, entered = 8 * T * D * MATMUL_BYTES, 3 * 2 * L  # by layers, in three passes
    assert by == {
        ("all-gather", "tp"): stream * (entered + 1) // 2,  # and after the last norm
        ("reduce-scatter", "tp"): stream * (entered - L) // 2,  # a block is computed again without its last sum
        ("all-reduce", "tp"): 4 * (a_of_columns + b_of_rows) + stream + 8 * T * 4 * 3,  # the head's
    }
    assert small(adapters).traffic == []
    twice = small(adapters, rows=1, dp_shard=4).traffic
    assert [one.num_bytes for one in twice] == [
        2 * one.num_bytes for one in small(adapters, rows=2, dp_shard=4).traffic
    ]


@pytest.mark.parametrize("base", ["bfloat16", "nf4"])
def test_llama_405b_with_adapters_fits_on_eight_devices_of_192_gb(base: str) -> None:
    plan = of_preset("llama-3.1-405b", "mi300x", base, dp_shard=8)
    assert plan.fits
    assert plan.needed is None
    assert sum(one.numbers for one in plan.tensors if one.trained) == 311_721_984
    matrices = 405_853_388_800 - 2 * 128_256 * 16_384 - 253 * 16_384
    number_bytes = {"bfloat16": 2.0, "nf4": 0.53125}[base]
    expected = (matrices * number_bytes + 4 * (2 * 128_256 * 16_384 + 253 * 16_384 + 311_721_984)) / 8
    assert plan.memory.weights == pytest.approx(expected, rel=1e-9)
    multiplied = matrices + 128_256 * 16_384  # all but the embedding and the norms
    assert plan.tokens_per_second == pytest.approx(8 * 1307.4e12 * 0.178 / (4 * multiplied))


def test_plans_of_known_machines() -> None:
    """70B on 8 x 80 GB and 8 x 192 GB, 8B in full on 4 x 24 GB, Baichuan2-13B on 2 x 16 GB."""
    for device in ("a100-80", "h100", "mi300x"):
        assert of_preset("llama-3.1-70b", device, "bfloat16", dp_shard=8).fits
    full = of_preset("llama-3.1-8b", "rtx-4090", None, dp_shard=4)
    assert not full.fits
    resident = full.memory.weights + full.memory.gradients + full.memory.optimizer
    assert resident * 4 == 16 * cost(full.ask.model, 128_256).parameters
    assert full.needed == 16
    assert of_preset("llama-3.1-8b", "rtx-4090", None, dp_shard=full.needed).fits
    assert of_preset("baichuan2-13b", "rtx-4080", "nf4", tokens=512, dp_shard=2).fits
    assert not of_preset("baichuan2-13b", "rtx-4080", "bfloat16", tokens=512, dp_shard=2).fits


@pytest.mark.parametrize("base", ["bfloat16", "int8", "nf4"])
def test_without_a_preset_a_mesh_of_adapters_is_planned_in_parts_as_with_one(base: str) -> None:
    """Which is what each device trains, frozen base included."""
    lora = {"rank": 8, "base_dtype": base}
    made = plan(
        *(SMALL, 512, card("rtx-4090", 4)), finetune=True, num_processes=4, mesh={"dp_shard": 4}, lora=lora, tokens=4096
    )
    parts = small(Lora(rank=8, base_dtype=base), dp_shard=4).memory
    assert made.choice.needs.weights == pytest.approx(parts.weights, rel=0.01)
    assert made.choice.needs.optimizer == pytest.approx(parts.optimizer, rel=0.01)
    assert [why for one, why in made.others if one.way == made.choice.way] == [""]


def test_links_decide_the_speed_where_they_take_longer_than_matmuls() -> None:
    plan = of_preset("llama-3.1-8b", "rtx-4090", "bfloat16", tokens=128, dp_shard=4)
    assert plan.compute_seconds is not None
    assert plan.link_seconds is not None
    assert plan.link_seconds > plan.compute_seconds
    assert plan.tokens_per_second == pytest.approx(plan.step_tokens / plan.link_seconds)
    unknown = sharded(plan.ask, of_memory(2**37, 4))
    assert unknown.tokens_per_second is None
    assert unknown.facts()["tokens_per_second"] is None


def test_bytes_of_the_units_of_the_json_are_those_of_the_weights() -> None:
    plan = small(Lora(rank=8, base_dtype="nf4"), dp_shard=2, tp=2)
    facts = plan.facts()
    assert [one["unit"] for one in facts["units"]] == ["embed", "blocks.0", "head"]
    assert sum(one["units"] * one["bytes"] for one in facts["units"]) == plan.memory.weights
    assert sum(facts["at_peak"][name] for name in facts["at_peak"] if name != "moment") == facts["peak_bytes"]


@pytest.mark.parametrize("base", [None, "nf4"])
@pytest.mark.parametrize("axes", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}])
def test_offloading_moves_what_devices_keep_to_their_host(base: str | None, axes: dict[str, int]) -> None:
    mesh, adapters = Mesh(**axes), None if base is None else Lora(rank=8, base_dtype=base)
    ask = request(SMALL, mesh, adapters, rows=1)
    on_device, on_host = (sharded(replace(ask, offload=offload), card("rtx-4080", 4)) for offload in ("none", "host"))
    kept, moved = on_device.memory, on_host.memory
    assert (moved.weights, moved.gradients, moved.optimizer) == (0, 0, 0)
    assert moved.activations == kept.activations
    resting = 4 * (kept.weights + kept.gradients + kept.optimizer)
    assert resting <= on_host.host["offloaded"] < 2 * resting, "pinned memory comes in powers of two"
    assert on_device.bus_bytes == 0
    assert on_host.traffic == on_device.traffic
    assert on_host.tokens_per_second is not None
    assert on_device.tokens_per_second is not None
    assert on_host.tokens_per_second < on_device.tokens_per_second


def test_a_mesh_goes_to_the_host_where_nothing_else_fits_and_is_told_so() -> None:
    mesh, model = Mesh(dp_shard=4), ModelConfig(preset="llama-3.1-8b", context_length=2048)
    ask = request(model, mesh, vocab_size=128_256, rows_per_step=8)
    target = replace(card("rtx-4090", 4), host_bytes=512 * 2**30)
    assert not sharded(ask, target).fits
    auto = sharded(replace(ask, offload="auto"), target)
    assert auto.fits
    assert auto.offloads
    assert auto.facts()["offload"] == "host"
    assert any("offloaded to the host" in line for line in auto.lines())
    assert not sharded(replace(ask, offload="auto", can_offload=False), target).fits
    assert not sharded(replace(ask, offload="auto"), replace(target, host_bytes=64 * 2**30)).fits
    seventy = request(ModelConfig(preset="llama-3.1-70b", context_length=512), mesh, Lora(base_dtype="nf4"))
    told = [fix(sharded(replace(seventy, can_offload=can), card("rtx-4080", 4))) for can in (True, False)]
    assert told == [["finetune.offload=host"], []]
    roomy = sharded(replace(ask, offload="auto"), card("mi300x", 4))
    assert roomy.fits
    assert not roomy.offloads


def test_all_weights_in_bfloat16_are_proposed_before_adapters() -> None:
    """8B on four cards of 24 GB. Norms stay in float32; a step gathers and sends as much as before."""
    mesh, model = Mesh(dp_shard=4), ModelConfig(preset="llama-3.1-8b", context_length=4096)
    ask = request(model, mesh, vocab_size=128_256, rows_per_step=16)
    target = card("rtx-4090", 4)
    plain = sharded(ask, target)
    assert fix(plain) == ["finetune.weight_dtype=bfloat16", 'finetune.optimizer={kind="adamw8bit"}']
    halved = sharded(replace(ask, weight_dtype="bfloat16", optimizer=AdamW8bit()), target)
    assert halved.fits
    norms = 4 * sum(one.local_numbers for one in halved.tensors if one.name.endswith("norm.weight"))
    assert halved.memory.weights == halved.memory.gradients == (plain.memory.weights - norms) // 2 + norms
    assert [one.num_bytes for one in halved.traffic] == [one.num_bytes for one in plain.traffic]


def test_moments_in_8_bits_take_a_byte_and_their_part_of_a_scale() -> None:
    ask = request(SMALL, Mesh(preset="gpt2-124m", dp_shard=2))
    plan = sharded(replace(ask, optimizer=AdamW8bit(block=256)), of_memory(2**34, 2))
    matrices = sum(one.local_numbers for one in plan.tensors if len(one.shape) == 2)
    vectors = sum(one.local_numbers for one in plan.tensors if len(one.shape) == 1)
    assert plan.memory.optimizer == round(matrices * (2 + 8 / 256) + 8 * vectors)


# --- the command ---------------------------------------------------------------------------------------------------

RECIPE = Path(__file__).parents[3] / "recipes" / "llama-3.1-405b-lora-8x192gb.toml"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `bloomery plan` prints of the recipe."""
    code, out = cli.main(["plan", str(RECIPE), *words]), capsys.readouterr().out
    assert code == (2 if "It does not fit" in out or '"fits": false' in out else 0)
    return out


def test_the_plan_of_405b_is_arithmetic_in_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = planned(capsys)
    assert max(map(len, out.replace(str(RECIPE), "RECIPE").splitlines())) <= 80
    assert "It fits by arithmetic" in out
    assert "This plan is arithmetic" in out
    command = shlex.split(out.partition("Next: ")[2])
    assert command[:2] == ["bloomery", "plan"]
    assert command[-2:] == ["--html", "sharding.html"]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_ends_with_a_command_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    smaller = ["--memory=124GiB", "finetune.mesh.dp_shard=8"]
    out = planned(capsys, *smaller)
    assert "It does not fit" in out
    command = shlex.split(out.partition("Next: ")[2])
    assert "finetune.lora.base_dtype=nf4" in command
    assert "It fits by arithmetic" in planned(capsys, *command[3:])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["finetune.num_processes=4"], "finetune.mesh: the mesh dp_replicate 1 x dp_shard 8 x tp 1 needs 8 processes"),
        (["finetune.mesh.tp=8", "finetune.mesh.dp_shard=1", "finetune.sample_every=5"], "sample_every does not work"),
        (["finetune.parallelism=fsdp"], "both say how ranks share the model"),
        (["finetune.offload=host", "finetune.sample_every=5"], "for each token, all weights would come from the host"),
        (["finetune.mesh.tp=2", "finetune.mesh.dp_shard=4", "finetune.lora.dropout=0.1"], "lora.dropout does not work"),
    ],
)
def test_a_run_refuses_what_a_mesh_does_not_train_before_it_reads_anything_and_a_plan_does_not_plan_it(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["run", str(RECIPE), "--runs", str(tmp_path), *words]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    if "num_processes" in words[0]:  # a plan may be of another mesh, and tells what a run needs
        assert "To run it, also set finetune.num_processes=8: the recipe has 4." in planned(capsys, *words)
    else:
        assert cli.main(["plan", str(RECIPE), *words]) == 2
        assert told in capsys.readouterr().err


def test_a_plan_lists_every_tensor_with_its_shape_what_cuts_it_and_its_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, facts = planned(capsys), json.loads(planned(capsys, "--json"))["finetune"]
    listed = out.partition("tensors: shape, axes that cut it, bytes on a device\n")[2].partition("\n\n")[0]
    assert "  blocks.0, and 125 more blocks like it\n" in listed
    names = {line.split()[0] for line in listed.splitlines() if line.startswith("    ")}
    wanted = {one["name"].removeprefix(f"{unit['unit']}.") for unit in facts["units"] for one in unit["tensors"]}
    assert names == wanted


def test_other_hosts_are_reached_at_the_rate_of_their_adapters_and_float32_at_its_own() -> None:
    request = of_preset("llama-3.1-405b", "mi300x", "bfloat16", dp_shard=16).ask
    link = 448e9
    for mesh, rate in ((Mesh(preset="llama-3.1-405b", dp_shard=8), link), (request.mesh, HOST_LINK)):
        plan = sharded(replace(request, mesh=mesh), card("mi300x", mesh.devices), link)
        assert plan.link_seconds == pytest.approx(sum(one.num_bytes for one in plan.traffic) / rate)
    exact = sharded(replace(request, matmul_bytes=4), card("mi300x", 16), link)
    halved = sharded(request, card("mi300x", 16), link)
    assert exact.compute_seconds is not None
    assert halved.compute_seconds is not None
    assert exact.compute_seconds > 4 * halved.compute_seconds


class Trained(Training):
    number: int = 1


class Recipe(Config):
    name: str = "small"
    make: Section = Section()
    double: Trained


def test_a_plan_to_offload_is_arithmetic_in_80_columns_or_refused_as_a_run_refuses_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = planned(capsys, "finetune.offload=host")
    assert max(map(len, out.replace(str(RECIPE), "RECIPE").splitlines())) <= 80
    assert "It fits by arithmetic" in out
    assert re.search(r"and the longer decides; the\s+host adds [\d.]+ s", out)
    assert cli.main(["plan", str(RECIPE), "finetune.offload=host", "finetune.sample_every=5"]) == 2
    assert "for each token, all weights would come from the host" in capsys.readouterr().err


def test_a_process_that_cannot_offload_is_refused_before_the_stages_in_front_of_it(tmp_path: Path) -> None:
    trained = Trained(steps=1, global_batch_tokens=8, offload="host", weight_dtype="bfloat16")
    with pytest.raises(ConfigError, match='"bfloat16" does not work with offload="host"'):
        run_recipe(STAGES, Recipe(double=trained), tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_the_mesh_of_a_stage_that_is_done_or_not_asked_for_is_not_checked(tmp_path: Path) -> None:
    two, one = (
        Recipe(double=Trained(steps=1, global_batch_tokens=8, mesh=Mesh(dp_shard=2), num_processes=count))
        for count in (2, 1)
    )
    for only in (None, "double"):
        with pytest.raises(ConfigError, match="needs 2 processes, but 1 train"):
            run_recipe(STAGES, one, tmp_path / "small", only=only)
    run_recipe(STAGES, one, tmp_path / "small", until="make")
    run_recipe(STAGES, one, tmp_path / "small", only="make")
    with pytest.raises(ConfigError, match="needs 2 processes, but 1 train"):
        run_recipe(STAGES, one, tmp_path / "small")
    run_recipe(STAGES, two, tmp_path / "small")
    assert run_recipe(STAGES, one, tmp_path / "small") == []


def test_the_json_of_a_mesh_is_that_of_the_interface(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(planned(capsys, "--json", "finetune.mesh.tp=8", "finetune.mesh.dp_shard=1"))
    assert facts["fits"]
    assert facts["finetune"]["mesh"] == {"dp_replicate": 1, "dp_shard": 1, "tp": 8, "zero_stage": 3}
    there = api.plan(RECIPE, {"finetune.mesh.tp": 8, "finetune.mesh.dp_shard": 1})
    assert facts == json.loads(json.dumps(there))


def test_the_page_draws_every_device_and_loads_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "sharding.html"
    planned(capsys, "--html", str(page), "finetune.mesh.tp=2", "finetune.mesh.dp_shard=4")
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<script|https?:|@import|url\(|<link|src=", text)
    assert len(re.findall(r'class="device"', text)) == 8
    assert "prefers-color-scheme: dark" in text
    inside = re.findall(r'<rect class="both" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', text)
    of_one = {place for place in inside if place[2:] == ("10.00", "20.00")}  # columns: tp by rows, dp_shard by columns
    assert of_one == {(f"{1 + 10 * x:.2f}", f"{1 + 20 * y:.2f}", "10.00", "20.00") for x in range(4) for y in range(2)}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["finetune.mesh.tp=3"], "num_heads is 128, and tp=3 does not divide it"),
        (["--devices", "4"], "4 devices were requested"),
        (["instruct.sequence_length=200000"], "more than the context of llama-3.1-405b"),
        (['finetune.mesh={preset="llama"}'], "there is no preset 'llama'"),
        (['finetune.mesh={preset="llama-3.1-8b"}'], "no device is set"),
    ],
)
def test_a_mesh_that_cannot_be_planned_is_refused_by_name(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(RECIPE), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_page_of_a_recipe_without_a_mesh_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["plan", str(RECIPE.with_name("demo.toml")), "--html", str(tmp_path / "a.html")]) == 2
    assert "the recipe has none" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
