"""A run with [prefer]: what is preferred is what is evaluated and found, and nothing before it runs again."""

import json
from pathlib import Path

import pytest

from bloomery.weights import hf, locate
from tests.test_end_to_end import make_place

WORDS = (
    *("prefer.steps=3", "prefer.global_batch_tokens=2048", "prefer.micro_batch_tokens=1024", "prefer.lora.rank=2"),
    'prefer.pairs=[{kind="worlds", count=120}]',
)
DRAWS = (
    *("prefer.steps=2", "prefer.global_batch_tokens=500"),
    'prefer.loss={kind="grpo", problems=[{kind="arithmetic", count=60}], group_size=2, max_new_tokens=4, updates=2}',
)


@pytest.mark.slow
def test_what_is_preferred_is_what_is_evaluated_and_found_and_nothing_before_it_runs_again(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    assert place.run("finetune.lora.rank=2") == 0
    before = {name: place.stage(name) for name in ("finetune", "evaluate")}
    assert place.run("finetune.lora.rank=2", *WORDS) == 0
    folder = place.stage("prefer")
    assert place.stage("finetune") == before["finetune"]
    assert place.stage("evaluate") != before["evaluate"]
    report = json.loads((place.stage("evaluate") / "report.json").read_text())
    assert report["model"]["folder"] == f"{folder.name}/model"
    assert report["preference"]["method"] == "dpo"
    assert "Prefer</h3>" in (place.stage("evaluate") / "report.html").read_text()
    assert locate.locate_model(place.runs / "small") == folder / "model"
    loaded = hf.load(folder / "model")  # adapters beside a model that is adapters beside a model
    assert loaded.lineage.base != hf.load(before["finetune"] / "model").lineage.base
    assert place.run("finetune.lora.rank=2", *DRAWS) == 0
    report = json.loads((place.stage("evaluate") / "report.json").read_text())
    assert report["preference"]["method"] == "grpo"
    assert "Reward: correct answers" in (place.stage("evaluate") / "report.html").read_text()
    assert place.run("finetune.lora.rank=2") == 0
    assert place.stage("evaluate") == before["evaluate"]
