"""What holds of any benchmark: who guesses scores chance, who knows scores 1, and nobody's company matters."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.core.errors import ConfigError, DataError
from bloomery.evaluation import harness, tasks
from bloomery.evaluation.harness import Continuation as Pair
from bloomery.evaluation.harness import EvalRequest, Likelihood, QuestionResult
from bloomery.evaluation.report import render
from bloomery.evaluation.tasks import TaskFiles
from bloomery.weights import hf
from bloomery.weights.hf import Loaded
from tests.evaluation.sets import write
from tests.weights.made import model

WORDS = ("lamp", "door", "apple", "river", "stone", "cloud", "bread", "horse")


def choices(folder: Path, count: int = 400) -> TaskFiles:
    """Questions with four choices, of which the right one is told by the question."""
    rng = random.Random(5)
    rows = []
    for number in range(count):
        some = rng.sample(WORDS, 4)
        gold = rng.randrange(4)
        rows.append({"query": f"{number}: it is the {some[gold]}. It is the", "choices": some, "gold": gold})
    write(folder / "openbookqa.jsonl", rows)
    return TaskFiles((folder,))


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return hf.load(model(tmp_path / "model", context=120))


def scorer(log_p: Callable[[Pair], float]) -> Any:
    def score(model: Any, pairs: Sequence[Pair], *, num_ids: int, seen: Any) -> list[Likelihood]:
        return [Likelihood(log_p(pair), log_p(pair) == 0.0, len(pair.continuation)) for pair in pairs]

    return score


def test_a_model_for_which_all_is_alike_scores_chance(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "score", scorer(lambda pair: -1.0))
    asked = EvalRequest(tasks=("openbookqa",), files=choices(tmp_path))
    told = harness.scores("openbookqa", harness.evaluate(loaded, asked)["openbookqa"])
    assert told["n"] == 400
    assert told["scores"]["acc"]["low"] < told["chance"] < told["scores"]["acc"]["high"]


def piqa(folder: Path, count: int) -> TaskFiles:
    """Rows as the hub has them, made up: which of two things opens a thing is told by the goal."""
    rng = random.Random(6)
    rows = []
    for number in range(count):
        one, other = rng.sample(WORDS, 2)
        label = rng.randrange(2)
        goal = f"{number}: To open it, use the {(one, other)[label]}."
        rows.append({"goal": goal, "sol1": f"Use the {one}.", "sol2": f"Use the {other}.", "label": label})
    pq.write_table(pa.Table.from_pylist(rows), folder / "piqa_validation.parquet")
    return TaskFiles((folder,))


def test_chance_comes_from_the_number_of_choices_that_the_rows_have() -> None:
    results = [
        QuestionResult(task="commonsense_qa", row=row, scores={"acc": 1.0}, facts={"log_p": [-1.0] * num})
        for row, num in ((1, 4), (2, 5))
    ]
    assert harness.scores("commonsense_qa", results[:1])["chance"] == 0.25
    assert harness.scores("commonsense_qa", results)["chance"] == 0.225


def test_piqa_is_asked_as_goal_and_solutions_and_who_knows_scores_one(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = EvalRequest(tasks=("piqa",), files=piqa(tmp_path, 40))
    (first, *_) = tasks.rows("piqa", asked.files)
    assert first.prompts[0].startswith("Question: 0: To open it")
    assert first.prompts[0].endswith("\nAnswer:")
    told = harness.scores("piqa", harness.evaluate(loaded, asked)["piqa"])
    assert told["n"] == 40
    assert told["chance"] == 0.5
    for metric in ("acc", "acc_norm"):
        score = told["scores"][metric]
        assert 0 <= score["low"] <= score["value"] <= score["high"] <= 1

    def knows(pair: Pair) -> float:
        text, choice = loaded.tokenizer.decode(pair.prompt), loaded.tokenizer.decode(pair.continuation)
        return 0.0 if choice.strip().lower() in text.lower() else -5.0

    monkeypatch.setattr(harness, "score", scorer(knows))
    told = harness.scores("piqa", harness.evaluate(loaded, asked)["piqa"])
    assert all(told["scores"][metric]["value"] == 1.0 for metric in ("acc", "acc_norm"))


def test_the_hidden_answers_of_a_test_split_are_refused_and_not_scored_as_wrong(tmp_path: Path) -> None:
    write(tmp_path / "piqa_test.jsonl", [{"goal": "Open a jar", "sol1": "Twist.", "sol2": "Wait.", "label": -1}])
    with pytest.raises(DataError, match="the correct choice is -1 of 2"):
        tasks.rows("piqa", TaskFiles((tmp_path,)))


def test_a_question_has_the_same_result_in_any_company(loaded: Loaded, tmp_path: Path) -> None:
    place = choices(tmp_path, 60)
    every = harness.evaluate(loaded, EvalRequest(tasks=("openbookqa",), files=place))["openbookqa"]
    few = harness.evaluate(loaded, EvalRequest(tasks=("openbookqa",), files=place, limit=7))["openbookqa"]
    assert len(few) == 7
    by_row = {one.row: one for one in every}
    for one in few:
        assert one.scores == by_row[one.row].scores
        assert one.facts["log_p"] == pytest.approx(by_row[one.row].facts["log_p"], abs=1e-4)


def test_a_seed_draws_the_questions(tmp_path: Path) -> None:
    asked = EvalRequest(tasks=("openbookqa",), files=choices(tmp_path), limit=30)
    drawn = [item.row for item in harness.questions("openbookqa", asked)]
    assert drawn == sorted(set(drawn))
    assert drawn == [item.row for item in harness.questions("openbookqa", asked)]
    assert drawn != [item.row for item in harness.questions("openbookqa", replace(asked, seed=1))]


def test_the_last_word_is_judged_token_by_token_and_has_a_perplexity(loaded: Loaded, tmp_path: Path) -> None:
    write(tmp_path / "lambada.jsonl", [{"text": f"the {word} is a {word}"} for word in WORDS])
    results = harness.evaluate(loaded, EvalRequest(tasks=("lambada",), files=TaskFiles((tmp_path,))))["lambada"]
    told = harness.scores("lambada", results)["scores"]
    assert told["perplexity"]["low"] < told["perplexity"]["value"] < told["perplexity"]["high"]
    assert told["acc"]["n"] == told["perplexity"]["n"] == len(WORDS)


def test_of_a_set_with_a_known_part_clean_and_dirty_are_scored_apart() -> None:
    results = [QuestionResult(task="copa", row=row, scores={"acc": float(row > 4)}) for row in range(1, 11)]
    told = harness.scores("copa", results, dirty={7, 8, 9, 10})
    assert told["scores"]["acc"]["value"] == 0.6
    assert told["clean"]["acc"]["value"] == pytest.approx(1 / 3, abs=1e-6)
    assert (told["dirty"]["acc"]["value"], told["dirty_n"]) == (1.0, 4)
    (line,) = harness.lines({"copa": told})
    assert "60.0%" in line
    assert "clean 33.3%" in line
    assert "dirty 100.0%" in line


def test_every_question_is_a_line_of_the_file(tmp_path: Path) -> None:
    results = {"copa": [QuestionResult(task="copa", row=3, scores={"acc": 1.0}, facts={"gold": 0, "chosen": 0})]}
    harness.save(tmp_path / "samples.jsonl", results, {"copa": {3}})
    expected = {"task": "copa", "row": 3, "acc": 1.0, "dirty": True, "gold": 0, "chosen": 0}
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == expected


def test_examples_of_a_task_that_has_none_are_refused(loaded: Loaded, tmp_path: Path) -> None:
    write(tmp_path / "lambada.jsonl", [{"text": "a b c"}])
    with pytest.raises(ConfigError, match="lambada has no few-shot examples, but num_fewshot=2"):
        harness.evaluate(loaded, EvalRequest(tasks=("lambada",), files=TaskFiles((tmp_path,)), num_fewshot=2))


# --- CORE ----------------------------------------------------------------------------------------------------------


def of_core(folder: Path) -> EvalRequest:
    """Two parts of it: choices, and a text that goes on."""
    choices(folder, 30)
    write(folder / "lambada.jsonl", [{"context": f"the {word} is a", "continuation": word} for word in WORDS])
    return EvalRequest(tasks=(), files=TaskFiles((folder,)), limit=8)


def test_every_question_of_core_has_a_result_and_the_average_is_theirs(loaded: Loaded, tmp_path: Path) -> None:
    asked = of_core(tmp_path)
    found = harness.evaluate_core(loaded, asked)
    questions = harness.core_questions(asked)
    assert list(found) == list(questions) == ["core.openbook_qa", "core.lambada_openai"]
    for name, results in found.items():
        assert [one.row for one in results] == [item.row for item in questions[name]]
        assert {one.task for one in results} == {name}
    told = harness.core_scores(found)
    for name, results in found.items():
        part = told["parts"][name.removeprefix("core.")]
        assert (part["n"], part["acc"]) == (8, sum(one.scores["acc"] for one in results) / 8)


def test_core_is_told_without_its_dirty_questions_beside_all() -> None:
    def results(right: Sequence[bool]) -> list[QuestionResult]:
        return [QuestionResult(task="", row=row, scores={"acc": float(one)}) for row, one in enumerate(right, 1)]

    found = {"core.copa": results([True, True, False, False]), "core.squad": results([True, True])}
    told = harness.core_scores(found, {"core.copa": {1}, "core.squad": set()})
    assert (told["mean_of_parts"], told["n"], told["dirty_n"]) == (0.5, 6, 1)
    assert [part["dirty_n"] for part in told["parts"].values()] == [1, 0]
    assert told["clean"]["n"] == 5
    assert told["clean"]["mean_of_parts"] == pytest.approx(((1 / 3 - 0.5) / 0.5 + 1) / 2, abs=1e-6)
    assert any(
        "clean" in line and "without 1 that occur in the training text" in line for line in harness.core_lines(told)
    )
    assert "1 questions occur in the training text; on the other questions it is 0.3333" in render({"core": told})
    gone = harness.core_scores(found, {"core.copa": set(), "core.squad": {1, 2}})
    assert gone["clean"]["missing"] == [*told["missing"][:17], "squad", *told["missing"][17:]]
    assert harness.core_scores(found, {"core.copa": {1, 2, 3, 4}, "core.squad": {1, 2}})["clean"] is None
    assert "clean" not in harness.core_scores(found)
