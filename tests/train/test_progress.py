"""A training that learned nothing is an error; one with a few bad steps is none."""

import math
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, RunError
from bloomery.core.log import read_metrics
from bloomery.train.config import Training
from bloomery.train.preference.config import Prefer
from bloomery.train.progress import ProgressCheck, check_rollbacks
from bloomery.train.state import SpikeStats, State
from tests.tokenizer.made import small
from tests.train.made import run, session

PAST = SpikeStats(losses=[3.0])
LANGUAGE = ProgressCheck(name="pretrain", vocab_size=512, warmup_steps=10)


def state(**given: Any) -> State:
    return State(**{"step": 60, "tokens": 1000, "metrics": {"loss": 3.0}, "first_loss": 6.2, **given})


# --- the rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "measured", "told"),
    [
        ({"tokens": 0}, 3.0, "no token was trained on"),
        ({"metrics": {}}, 3.0, "there is no loss"),
        (
            {},
            426.0,
            r"loss is 426, and was 6.2 before the first step; a model that learns stays below 6.86",
        ),
        ({}, math.nan, "the validation loss is nan"),
        ({}, math.inf, "the validation loss is inf"),
        ({"guard": SpikeStats(skipped=45, rollbacks=[[4 * n, 0] for n in range(1, 16)])}, 6.2, "rolled back 3 times"),
        (
            {"guard": SpikeStats(skipped=31, rollbacks=[[20, 0], [30, 10], [50, 20]])},
            6.2,
            "31 of 60 steps were skipped, and only 10 remain",
        ),
    ],
)
def test_a_training_that_learned_nothing_is_an_error_that_says_why(
    given: dict[str, Any], measured: float, told: str
) -> None:
    with pytest.raises(RunError, match=f"pretrain, step 60: nothing was learned: .*{told}") as caught:
        LANGUAGE.check(state(**given), {60: measured})
    assert "[pretrain.optimizer]" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "measured"),
    [
        ({}, {60: 5.9}),
        ({}, {60: 6.7}),  # hardly anything, in a few steps
        ({}, {}),  # another rank measures
        ({"first_loss": None}, {60: 6.3}),  # of a checkpoint from before it was kept
        ({"first_loss": 12.0}, {60: 9.0}),  # a base that had never seen the tokens of a template
        (
            {"metrics": {}, "guard": SpikeStats(losses=[3.0], skipped=1, in_a_row=1)},
            {60: 5.0},
        ),  # the last step was skipped
        ({"guard": SpikeStats(skipped=9, rollbacks=[[20, 10], [35, 30], [50, 40]])}, {60: 5.0}),
        ({"guard": SpikeStats(skipped=6, rollbacks=[[15, 4], [30, 4]])}, {60: 5.0}),
    ],
)
def test_a_training_that_learned_is_none(given: dict[str, Any], measured: dict[int, float]) -> None:
    LANGUAGE.check(state(**given), measured)


def test_the_limit_of_a_preference_is_twice_its_first_loss() -> None:
    preference = ProgressCheck(name="prefer", vocab_size=None)
    preference.check(state(first_loss=math.log(2)), {60: 1.2})
    with pytest.raises(RunError, match="the validation loss is 40"):
        preference.check(state(first_loss=math.log(2)), {60: 40.0})
    preference.check(state(first_loss=None), {60: 40.0})


def test_three_evaluations_in_a_row_that_are_worse_than_no_model_end_a_run_early() -> None:
    bad = {5: 90.0, 15: 90.0, 25: 80.0}
    LANGUAGE.check_early(state(step=25), bad)  # the first was within the warm-up
    LANGUAGE.check_early(state(step=35), bad | {35: 6.0})
    with pytest.raises(RunError, match="step 35: nothing was learned: the validation loss is 70"):
        LANGUAGE.check_early(state(step=35), bad | {35: 70.0})


def test_steps_that_were_given_up_twice_count_once() -> None:
    assert SpikeStats(rollbacks=[[10, 6], [20, 16]]).num_given_up == 8
    assert SpikeStats(rollbacks=[[10, 6], [12, 4]]).num_given_up == 8
    assert SpikeStats(rollbacks=[[4, 0], [8, 0], [12, 0]]).num_given_up == 12
    assert SpikeStats().num_given_up == 0


def test_rollbacks_that_get_further_each_time_are_no_error() -> None:
    check_rollbacks("pretrain", 400, SpikeStats(skipped=9, rollbacks=[[100, 50], [200, 150], [300, 250]]))
    with pytest.raises(RunError, match=r"after steps 100, 200, 300\), and never got past step 50"):
        check_rollbacks("pretrain", 300, SpikeStats(skipped=9, rollbacks=[[100, 50], [200, 50], [300, 50]]))


SCRATCH = ProgressCheck(name="pretrain", vocab_size=512, from_scratch=True, start_loss=6.245)
TRAINED = ProgressCheck(name="finetune", vocab_size=512, start_loss=2.0)


@pytest.mark.parametrize("last", [6.245, 6.2449, 6.2445, 6.5, math.nan])
def test_a_training_from_scratch_ends_below_the_untrained_model(last: float) -> None:
    with pytest.raises(RunError, match="nothing was learned: the validation loss is") as caught:
        SCRATCH.check(state(), {60: last})
    assert ("Raise the learning rates" in caught.value.hint) == (last <= 6.245)
    SCRATCH.check(state(), {60: 6.244})
    SCRATCH.check(state(), None)


def test_an_untrained_model_that_is_better_than_uniform_guessing_has_to_improve_too() -> None:
    lucky = ProgressCheck(name="pretrain", vocab_size=512, from_scratch=True, start_loss=6.0)
    with pytest.raises(RunError, match=r"was 6 before the first step; a model that learns stays below 5\.9994"):
        lucky.check(state(), {60: 5.9999})
    lucky.check(state(), {60: 5.9})


def test_where_the_last_evaluation_failed_the_last_training_losses_decide() -> None:
    SCRATCH.check(state(guard=SpikeStats(losses=[6.3, 6.3, 4.0, 4.1])), {})
    with pytest.raises(RunError, match=r"the mean training loss of the last 2 steps is 6.25"):
        SCRATCH.check(state(guard=SpikeStats(losses=[6.3, 6.3, 6.24, 6.26])), {30: 6.0})


def test_a_loss_without_tokens_and_without_validation_has_no_limit() -> None:
    drawn = ProgressCheck(name="prefer", vocab_size=None)
    drawn.check(state(first_loss=0.0, guard=SpikeStats(losses=[0.0, 0.0, 1.0, 1.0])), {})


@pytest.mark.parametrize("measured", [{60: 2.0}, {60: 2.00001}, {30: 2.0, 60: 1.99999}])
def test_trained_weights_that_stay_as_they_were_have_learned_nothing(measured: dict[int, float]) -> None:
    with pytest.raises(RunError, match="the same as before the first step") as caught:
        TRAINED.check(state(), measured)
    assert "Raise the learning rates of [finetune.optimizer]" in caught.value.hint


@pytest.mark.parametrize("measured", [{60: 1.5}, {30: 1.9, 60: 2.0}, {60: 2.4}])
def test_trained_weights_may_return_to_their_loss_and_may_overfit(measured: dict[int, float]) -> None:
    TRAINED.check(state(), measured)


def test_weights_that_are_handed_on_and_worse_than_before_are_warned_of() -> None:
    assert "is 2.2, and was 2 before" in TRAINED.warning({30: 2.2, 60: 2.4}, {}, 30)
    assert not TRAINED.warning({30: 2.2}, {30: 0.3}, 30), "within the error of the evaluation"
    assert not TRAINED.warning({30: 1.9, 60: 2.4}, {}, 30)
    assert not SCRATCH.warning({30: 9.0}, {}, 30)


def test_trained_weights_end_no_worse_than_uniform_guessing_or_than_they_started() -> None:
    with pytest.raises(RunError, match=r"the validation loss is 6.3, and was 2 before the first step"):
        TRAINED.check(state(), {60: 6.3})
    above = ProgressCheck(name="finetune", vocab_size=512, start_loss=9.0)
    above.check(state(), {60: 8.0})
    with pytest.raises(RunError, match="nothing was learned"):
        above.check(state(), {60: 9.1})


def test_a_preference_that_changes_nothing_has_learned_nothing() -> None:
    preference = ProgressCheck(name="prefer", vocab_size=None, start_loss=0.69315)
    preference.check(state(first_loss=0.69315), {60: 0.7})
    with pytest.raises(RunError, match="the same as before the first step"):
        preference.check(state(first_loss=0.69315), {60: 0.69315})


# --- real runs --------------------------------------------------------------------------------------------------------

ABSURD = {"kind": "adamw", "learning_rate": 1e30, "weight_decay": 0.0}
LARGE = {"kind": "muon", "learning_rate": 10.0, "muon_lr": 10.0, "weight_decay": 0.0}


def unlimited(shards: Path, out: Path, **settings: Any) -> Any:
    """A session with a rate that a recipe refuses, in case it comes to be reached by another way."""
    rate = settings["optimizer"].pop("learning_rate")
    made = session(shards, out, **settings)
    optimizer = made.config.optimizer.model_copy(update={"learning_rate": rate})
    made.config = made.config.model_copy(update={"optimizer": optimizer})
    return made


def test_a_rate_that_throws_every_step_away_ends_early_and_again_when_it_is_run_again(
    shards: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"steps": 60, "eval_every": 50, "schedule": {"kind": "constant"}}
    for _ in range(2):
        with pytest.raises(RunError, match="nothing was learned: it rolled back 3 times"):
            unlimited(shards, tmp_path, **settings, optimizer=dict(ABSURD)).run()
    assert not (tmp_path / "model").exists()
    assert (tmp_path / "checkpoints").is_dir()
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] <= 20


@pytest.mark.slow
@pytest.mark.parametrize("every", [50, 5])
def test_rates_of_ten_are_an_error_and_leave_no_model(shards: Path, tmp_path: Path, every: int) -> None:
    settings: dict[str, Any] = {"steps": 40, "eval_every": every, "schedule": {"kind": "constant"}}
    with pytest.raises(RunError, match="nothing was learned: the validation loss is") as caught:
        session(shards, tmp_path, **settings, optimizer=LARGE).run()
    assert not (tmp_path / "model").exists()
    assert caught.value.where == f"pretrain, step {40 if every == 50 else 15}"
    if every == 50:
        with pytest.raises(RunError, match="nothing was learned"):
            session(shards, tmp_path, **settings, optimizer=LARGE).run()


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "scratch"), [(1e-12, True), (1e-12, False), (1e-7, True), (1e-7, False)])
def test_rates_that_change_nothing_are_an_error_and_leave_no_model(
    shards: Path, tmp_path: Path, rate: float, scratch: bool
) -> None:
    optimizer = {"kind": "muon", "learning_rate": rate, "muon_lr": rate}
    made = session(shards, tmp_path, optimizer=optimizer)
    made.from_scratch = scratch
    with pytest.raises(RunError, match="nothing was learned: the validation loss is") as caught:
        made.run()
    assert not (tmp_path / "model").exists()
    assert "Raise the learning rates" in caught.value.hint


def test_a_run_that_resumes_is_compared_with_the_weights_that_it_started_from(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[float | None] = []
    check = ProgressCheck.check

    def noted(self: ProgressCheck, *how: Any) -> None:
        starts.append(self.start_loss)
        check(self, *how)

    monkeypatch.setattr(ProgressCheck, "check", noted)
    for _ in range(2):
        session(shards, tmp_path).run()
    assert starts[0] == starts[1]
    assert starts[0] == pytest.approx(math.log(small().vocab_size), rel=0.01)


@pytest.mark.slow
def test_ranks_together_all_end_with_the_same_error(shards: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 20, "eval_every": 50, "schedule": {"kind": "constant"}}
    with pytest.raises(RunError, match="nothing was learned"):
        run(shards, tmp_path, 2, **settings, optimizer=LARGE)


# --- what a recipe cannot ask for -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"schedule": {"kind": "wsd", "warmup_steps": 61}}, "schedule.warmup_steps=61 is more than steps=60"),
        ({"schedule": {"kind": "cosine", "warmup_steps": 10**12}}, "set at most 60"),
        ({"schedule": {"kind": "wsd", "warmup_steps": 20, "decay_steps": 41}}, "set a decay of at most 40"),
        (
            {"optimizer": {"kind": "adamw", "weight_decay": 100.0, "learning_rate": 0.02}},
            "is 2, no less than 1",
        ),
        (
            {"optimizer": {"kind": "muon", "weight_decay": 50.0}},
            "muon_lr=0.02 times weight_decay=50 is 1,",
        ),
        ({"optimizer": {"kind": "lion", "weight_decay": 90.0, "learning_rate": 1.0}}, "is 90"),
    ],
)
def test_a_schedule_or_decay_that_cannot_work_is_refused_with_the_recipe(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Training, {"steps": 60, "global_batch_tokens": 64} | settings)
    assert told in str(caught.value)


def test_a_warmup_that_nobody_asked_for_gives_way_to_a_short_run() -> None:
    pairs = {"pairs": [{"kind": "worlds"}], "global_batch_tokens": 64}
    for steps, warmup in ((1, 1), (3, 3), (5, 5), (6, 5), (60, 5)):
        assert build(Prefer, {"steps": steps} | pairs).schedule.warmup_steps == warmup
    with pytest.raises(ConfigError, match="more than steps=3"):
        build(Prefer, {"steps": 3, "schedule": {"kind": "linear", "warmup_steps": 5}} | pairs)
