"""The sentence of a stage says the number that matters, for every run that its recipe allows."""

from pathlib import Path
from typing import Any

import pytest

from bloomery.core import config
from bloomery.core.log import about
from bloomery.core.pipeline import StagePlan
from bloomery.recipe import STAGES, Recipe
from bloomery.stages import plan as stages_plan
from bloomery.stages.terminal import sentence
from tests.calling import Call

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"
NO_DOMAINS = ("evaluate.domains=[]", "shard.weights=[]", "filter.rules=[]", "filter.min_scores=[]")

NOTHING = {"answers": {"n": 0}, "bits_per_byte": {"model": None, "bytes": 0}}
TALKS = {"n": 20, "pretrain": {"bits_per_byte": 0.701}, "finetune": {"bits_per_byte": 0.512}}


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        ({"answers": {"n": 20, "exact": 0.5}}, "answered 50.0 % of 20 questions right"),
        ({"bits_per_byte": {"model": 2.5, "bytes": 3000}}, "measured 2.50 bits per byte on 3.0 kB of validation text"),
        (
            {"conversations": TALKS},
            "measured 0.51 bits per byte on 20 validation conversations (0.70 before finetuning)",
        ),
        ({"tasks": {"arc_easy": {}}}, "scored 1 task"),
        ({}, "wrote its report"),
    ],
)
def test_an_evaluation_without_questions_and_without_shards_has_a_sentence(stats: dict[str, Any], text: str) -> None:
    assert sentence("evaluate", NOTHING | stats) == (text, "")


def demo(*settings: str) -> tuple[Recipe, list[StagePlan]]:
    recipe = config.load(Recipe, DEMO, settings)
    sections = [(stage, getattr(recipe, stage.name)) for stage in STAGES]
    return recipe, [
        StagePlan(stage=stage, config=section, folder=Path(stage.name), fingerprint="", inputs={})
        for stage, section in sections
        if section is not None
    ]


def test_a_first_run_has_an_estimate_that_grows_with_its_steps_and_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed speed of matmuls, as a measured one differs from call to call."""
    monkeypatch.setattr(stages_plan, "_numpy_flops", lambda: 4e11)
    monkeypatch.setattr(stages_plan, "cores", lambda: 2)
    monkeypatch.setattr(stages_plan, "find_gpus", lambda host: [])
    whole = stages_plan.first_seconds(*demo())
    assert whole is not None
    assert 200 < whole < 400, "docs/transcript.txt: 264 s, with matmuls of 4.3e11 FLOP/s"
    longer = stages_plan.first_seconds(*demo("pretrain.steps=660"))
    assert longer is not None
    assert longer - whole == pytest.approx(330 * 4096 * 25.5e6 / (0.6 * 4e11), rel=0.01)
    source = '{kind="worlds", name="worlds", domain="worlds", count=%d}'
    few, many = (
        stages_plan.first_seconds(*demo(f"fetch.sources=[{source % count}]", *NO_DOMAINS)) for count in (1000, 100_000)
    )
    assert few is not None
    assert many is not None
    assert few < many


def test_no_time_is_estimated_where_a_gpu_or_another_host_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_plan, "find_gpus", lambda host: [])
    hub = '{kind="hub", name="far", domain="web", dataset="made/texts"}'
    assert stages_plan.first_seconds(*demo(f"fetch.sources=[{hub}]", *NO_DOMAINS)) is None
    monkeypatch.setattr(stages_plan, "find_gpus", lambda host: ["a GPU"])
    assert stages_plan.first_seconds(*demo()) is None


def test_documents_without_one_for_validation_end_a_run_after_fetch_with_the_fix(call: Call, tmp_path: Path) -> None:
    recipe = tmp_path / "few.toml"
    source = '{kind = "worlds", name = "worlds", domain = "worlds", count = 5}'
    recipe.write_text(f'name = "few"\n[fetch]\nsources = [{source}]\n')
    words = ["run", recipe, "--until", "shard", "--runs", tmp_path / "runs", "tokenizer.vocab_size=300"]
    code, _, err = call(*words, "shard.val_fraction=1e-6")
    assert code == 2
    assert "no document is left for validation" in err
    assert "Raise shard.val_fraction" in err
    assert [path.parent.name[:8] for path in (tmp_path / "runs").rglob("manifest.json")] == ["01-fetch"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "about 1 s"),
        (7.4, "about 7 s"),
        (43, "about 40 s"),
        (278, "about 4 min 30 s"),
        (131_400, "about 1 day 12 h"),
    ],
)
def test_an_estimate_shows_no_digits_that_nobody_knows(seconds: float, words: str) -> None:
    assert about(seconds) == words
