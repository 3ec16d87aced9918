import importlib.util
import json
import re
import shlex
import socket
from pathlib import Path

import pytest

from bloomery.core import config, pipeline, records
from bloomery.core.errors import ConfigError
from bloomery.data.sources import http_client
from bloomery.hw import device as devices
from bloomery.hw.specs import GIB
from bloomery.model.config import ModelConfig
from bloomery.recipe import STAGES, Recipe
from bloomery.stages import plan as stages_plan
from bloomery.stages.plan import Wish
from bloomery.train.plan.here import here
from bloomery.train.plan.report import PlanReport
from tests.calling import Call
from tests.stages.test_finetune import recipe_of
from tests.train.planning.made import card, plan, training

import torch

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"


@pytest.mark.slow
def test_a_plan_says_what_will_run_and_what_it_needs(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("plan", DEMO, "--runs", tmp_path, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["recipe"] == "demo"
    assert [one["stage"] for one in facts["stages"]][-1] == "evaluate"
    assert not any(one["fresh"] for one in facts["stages"])
    assert facts["pretrain"]["parameters"] == facts["finetune"]["parameters"] == 4_000_000
    assert facts["pretrain"]["peak_bytes"] > facts["pretrain"]["weights_bytes"] == 16_000_000
    wanted = {
        "parameters",
        "weights_bytes",
        "peak_bytes",
        "fits",
        "tokens_per_second",
        "seconds",
        "choice",
        "alternatives",
    }
    assert wanted <= facts.keys() & facts["pretrain"].keys()
    assert facts["pretrain"]["peak_from"] == "trace"
    assert facts["pretrain"]["speed_from"] == "timed"
    assert list(tmp_path.iterdir()) == []
    settings = ("pretrain.steps=7", "pretrain.schedule.warmup_steps=4", "pretrain.global_batch_tokens=1000")
    text = call("plan", DEMO, "--runs", tmp_path, "--memory", "16GiB", *settings)[1]
    assert "pretrain: 4,000,000 parameters, 5,376 tokens" in text


@pytest.mark.usefixtures("untraced")
@pytest.mark.slow
def test_a_plan_is_for_as_many_devices_as_the_recipe_has_ranks_unless_another_number_is_said(
    call: Call, tmp_path: Path
) -> None:
    words = ["plan", DEMO, "--runs", tmp_path, "--json", "--device", "rtx-4090", "pretrain.num_processes=2"]
    found = [json.loads(call(*words, *more)[1]) for more in ([], ["--devices", "4"])]
    assert [one["pretrain"]["devices"] for one in found] == [2, 4]
    assert [one["finetune"]["devices"] for one in found] == [1, 4]
    assert found[0]["choice"]["micro_batches"] * found[0]["choice"]["rows"] * 2 >= 16


def test_a_device_has_memory(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("0", "900MB", "1GiB"):
        with pytest.raises(SystemExit) as refused:
            call("plan", DEMO, "--memory", size)
        assert refused.value.code == 2
        assert "not a size from 1,610,612,736 to" in capsys.readouterr().err


@pytest.mark.usefixtures("untraced")
@pytest.mark.slow
def test_a_plan_is_made_for_a_machine_that_is_not_here(call: Call, tmp_path: Path) -> None:
    words = ["--device", "rtx-4090", "--devices", "2", "--price", "0.8", "--power-watts", "900"]
    code, out, _ = call("plan", DEMO, "--runs", tmp_path, "--json", *words)
    facts = json.loads(out)["pretrain"]
    assert code == 0
    assert (facts["device"], facts["devices"], facts["speed_from"]) == ("rtx-4090", 2, "catalogue")
    assert facts["cost"] == pytest.approx(facts["seconds"] / 3600 * 0.8, abs=0.01)
    code, out, _ = call("plan", DEMO, "--runs", tmp_path, "--memory", "2GiB")
    assert code == 0
    assert "time     unknown" in out
    code, _, err = call("plan", DEMO, "--runs", tmp_path, "--device", "rtx-4091")
    assert code == 2
    assert "rtx-4090" in err


def test_a_plan_of_a_recipe_that_trains_nothing_has_the_same_keys(call: Call, tmp_path: Path) -> None:
    recipe = tmp_path / "data.toml"
    source = '{kind = "standard_library", name = "code", domain = "code", subset = "code"}'
    recipe.write_text(f'name = "data"\n[fetch]\nsources = [{source}]\n')
    code, out, err = call("plan", recipe, "--runs", tmp_path / "runs", "--json")
    assert code == 0, err
    facts = json.loads(out)
    wanted = ("parameters", "weights_bytes", "peak_bytes", "fits", "tokens_per_second", "seconds", "choice")
    assert [facts[name] for name in (*wanted, "alternatives")] == [None] * 8


def test_without_torch_a_plan_says_that_it_knows_nothing_of_this_machine(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    code, out, _ = call("plan", DEMO, "--runs", tmp_path)
    assert code == 0
    assert "nothing is known of this machine without torch (pass --device or --memory)" in " ".join(out.split())


@pytest.mark.usefixtures("untraced")
@pytest.mark.slow
def test_a_plan_of_text_on_a_host_that_cannot_be_asked_says_all_but_what_is_fresh(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nobody waits for a network to know whether a model fits."""
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(http_client, "wait", pytest.fail)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and listens to nobody
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        source = f'{{kind="hub", name="far", domain="web", dataset="made/texts", endpoint="{address}"}}'
        words = [
            f"fetch.sources=[{source}]",
            "evaluate.domains=[]",
            "shard.weights=[]",
            "--device",
            "rtx-4090",
            "--runs",
            tmp_path,
        ]
        code, out, _ = call("plan", DEMO, *words, "--json")
        assert code == 0
        stages = {one["stage"]: one for one in json.loads(out)["stages"]}
        assert [name for name, one in stages.items() if one["fresh"] is not None] == ["synthesize"]
        assert stages["pretrain"]["folder"] is None
        assert stages["pretrain"]["why"].startswith("unknown: made/texts: the connection failed")
        assert json.loads(out)["pretrain"]["parameters"] == 4_000_000
        code, out, _ = call("plan", DEMO, *words)
        assert code == 0
        assert re.search(r"^unknown +fetch, .*: made/texts: the connection failed", out, re.MULTILINE | re.DOTALL)
        code, out, _ = call("plan", DEMO, *words[:1], "--runs", tmp_path, "fetch.sources=[]", "--json")
        assert (code, json.loads(out)["stages"][0]["fresh"]) == (0, False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, _ = call("plan", DEMO, *words, "--json")
    assert (code, json.loads(out)["stages"][0]["fresh"]) == (0, None)


@pytest.mark.usefixtures("untraced")
def test_a_plan_counts_the_reference_that_stays_beside_the_model_and_says_what_it_leaves_out(
    call: Call, tmp_path: Path
) -> None:
    words = ["--runs", tmp_path, "--device", "rtx-4090", "--json", "prefer.steps=10", "prefer.global_batch_tokens=8192"]
    problems = 'prefer.loss={kind="grpo", problems=[{kind="arithmetic"}], kl_coef=%s}'
    found = []
    for weight in ("0.0", "0.1"):
        code, out, err = call("plan", DEMO, *words, problems % weight)
        assert code == 0, err
        found.append(json.loads(out)["prefer"])
    assert found[1]["peak_bytes"] - found[0]["peak_bytes"] == found[1]["weights_bytes"] - found[0]["weights_bytes"]
    assert 2.0 < (found[1]["weights_bytes"] - found[0]["weights_bytes"]) / found[0]["parameters"] < 4.0  # matrices: 2
    assert "drawing answers" in found[0]["not_planned"]
    code, out, _ = call(
        "plan", DEMO, *words[:-3], "--device", "rtx-4090", *words[-2:], 'prefer.pairs=[{kind="worlds"}]'
    )
    assert "note     the time of one forward pass over all rows" in out


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
def test_epochs_are_planned_by_packed_sequences_or_an_estimate_and_refused_where_a_run_refuses_them(
    tmp_path: Path,
) -> None:
    source = recipe_of(tmp_path / "theirs")
    source.write_text(source.read_text().replace("steps = 3\nglobal", "epochs = 2\nglobal"))
    wish = Wish(device="rtx-4090")

    def planned(*overrides: str) -> PlanReport:
        recipe = config.load(Recipe, source, overrides)
        return stages_plan.report(STAGES, recipe, tmp_path / "run", wish)[1]["finetune"]

    before = planned()
    assert before.ask.steps_from == "estimated"
    assert "sequences, estimated at 4 bytes per token" in " ".join(" ".join(before.lines()).split())
    more = planned("instruct.sources=[{kind='worlds', count=600}]")
    assert more.ask.steps == pytest.approx(10 * before.ask.steps, rel=0.15)
    away = planned("instruct.sources=[{kind='preset', name='dolly'}]")
    facts = away.facts()
    assert [facts[name] for name in ("steps", "steps_from", "tokens", "seconds")] == [None, "unknown", None, None]
    assert facts["seconds_per_step"] > 0
    assert "seconds per step at " in " ".join(" ".join(away.lines()).split())

    recipe = config.load(Recipe, source)
    plans = pipeline.plan_stages(STAGES, recipe, tmp_path / "run")
    pipeline.execute(plans, until="finetune")
    after = planned("finetune.seed=1")
    assert after.ask.steps_from == "packed"
    folder = next(one.folder for one in plans if one.stage.name == "finetune")
    assert after.ask.steps == records.read_manifest(folder)["stats"]["steps"] > 1
    late = "finetune.schedule={kind='linear', warmup_steps=1000}"
    with pytest.raises(ConfigError, match="warmup_steps=1000 is more than steps") as refused:
        planned(late)
    plans = pipeline.plan_stages(STAGES, config.load(Recipe, source, [late]), tmp_path / "run")
    with pytest.raises(ConfigError) as ran:
        pipeline.execute(plans, until="finetune")
    assert str(ran.value) == str(refused.value)


@pytest.mark.usefixtures("untraced")
def test_a_recipe_that_does_not_fit_ends_with_2_and_with_a_command_of_settings_that_fit(
    call: Call, tmp_path: Path
) -> None:
    words = ["plan", DEMO, "pretrain.model.context_length=131072", "--memory", "2GiB", "--runs", tmp_path]
    code, out, _ = call(*words)
    assert code == 2
    assert max(map(len, out.splitlines()[:-1])) <= 80
    last = out.splitlines()[-1]
    assert last.startswith("Next: bloomery plan ")
    code, out, _ = call(*shlex.split(last)[2:])
    assert code == 0
    assert "\nIt fits: " in out


def test_the_next_command_starts_what_was_planned_and_ends_where_the_sections_do() -> None:
    reports = {name: plan(ModelConfig(), 300, card("h100")) for name in ("pretrain", "finetune")}
    facts = {"missing_sections": {"evaluate": ["fetch"]}, "stages": [{"stage": "finetune"}]}
    words = ["bloomery", "plan", "a.toml"]
    (last,) = stages_plan.next_command(words, ["finetune.num_processes=4"], [], Wish(devices=2), reports, facts)
    assert last == "Next: bloomery run a.toml pretrain.num_processes=2 finetune.num_processes=2 --until finetune"
    (last,) = stages_plan.next_command(words, [], [], Wish(), reports, facts | {"missing_sections": {}})
    assert last == "Next: bloomery run a.toml"
    only = {"pretrain": reports["pretrain"]}
    listed = facts | {"stages": [{"stage": "pretrain"}, {"stage": "instruct"}]}
    (last,) = stages_plan.next_command(words, [], [], Wish(), only, listed)
    assert last == "Next: bloomery run a.toml --until pretrain"


@pytest.mark.slow
def test_the_verdict_names_the_context_of_a_preset_where_its_activations_decide() -> None:
    large = plan(ModelConfig(preset="llama-3.1-8b"), 128_256, card("h100"))
    first, *rest = stages_plan.verdict({"pretrain": large})
    assert first.startswith("It does not fit: a context of 131,072 tokens at batch size 1 needs ")
    assert rest[-1].startswith("Fix: ")
    many = plan(ModelConfig(preset="llama-3.1-405b", context_length=256), 128_256, card("h100"))
    assert "parameters need" in stages_plan.verdict({"pretrain": many})[0]
    small = plan(ModelConfig(preset="gpt2-124m"), 50_257, card("h100"))
    assert [line.partition(":")[0] for line in stages_plan.verdict({"pretrain": small})] == ["It fits"]


def test_apple_gpus_are_planned_in_the_number_format_that_runs_compute_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 48 * GIB)
    found = devices.find("mps")
    target = Wish(device="apple-m4-max", memory_bytes=64 * GIB).target(training(), here)
    assert f"torch.{target.precision}" == str(found.compute_dtype)
    assert target.peak("float32") == target.flops
