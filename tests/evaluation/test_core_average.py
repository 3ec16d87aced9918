import random
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.errors import DataError
from bloomery.evaluation import harness, tasks
from bloomery.evaluation.stats import wilson
from bloomery.evaluation.tasks import PARTS, TaskFiles
from tests.evaluation.sets import SETS, needs_sets, write


def guessed(seed: int) -> dict[str, list[bool]]:
    rng = random.Random(seed)
    return {name: [rng.random() < part.chance for _ in range(2000)] for name, part in PARTS.items()}


def test_all_right_is_one_and_guessing_is_about_nothing() -> None:
    assert len(PARTS) == 22
    whole = tasks.average({name: [True] * 10 for name in PARTS})
    assert (whole["core"], whole["high"], whole["missing"]) == (1.0, 1.0, [])
    found = tasks.average(guessed(0))
    assert found["low"] < 0 < found["high"]
    assert abs(found["core"]) < 0.02


def test_the_interval_holds_the_truth_in_about_nineteen_of_twenty_draws() -> None:
    held = [tasks.average(guessed(seed)) for seed in range(60)]
    assert sum(one["low"] <= 0 <= one["high"] for one in held) >= 50


@pytest.mark.parametrize("answer", [True, False])
def test_parts_with_all_or_nothing_right_are_not_known_for_sure(answer: bool) -> None:
    few, many = (tasks.average({name: [answer] * count for name in PARTS}) for count in (5, 500))
    assert few["high"] - few["low"] > many["high"] - many["low"] > 0.001
    assert few["low"] <= few["mean_of_parts"] <= few["high"] <= 1
    one = tasks.average({"copa": [answer] * 10})
    assert one["high"] - one["low"] == pytest.approx(2 * (1 - wilson(10, 10)[0]), abs=1e-5)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.97])
@pytest.mark.parametrize("count", [5, 50])
def test_the_interval_holds_the_truth_where_parts_have_few_questions_or_a_share_near_the_end(
    share: float, count: int
) -> None:
    rng = random.Random(7)
    truth = sum((share - part.chance) / (1 - part.chance) for part in PARTS.values()) / len(PARTS)
    held = 0
    for _ in range(400):
        found = tasks.average({name: [rng.random() < share for _ in range(count)] for name in PARTS})
        held += found["low"] <= truth <= found["high"]
    assert held >= 0.92 * 400


def test_a_mean_with_tasks_missing_is_not_called_core() -> None:
    found = tasks.average({"copa": [True, False], "piqa": [True, True]})
    assert found["core"] is None
    assert found["mean_of_parts"] == 0.5
    assert len(found["missing"]) == 20
    lines = list(harness.core_lines(found))
    assert any(line.startswith("mean of 2 of CORE's 22") for line in lines)
    assert lines[-1].startswith("missing: hellaswag_zeroshot, jeopardy")


@needs_sets
def test_what_is_there_is_asked_as_dclm_asks_it() -> None:
    place = TaskFiles((SETS,))
    there, missing = tasks.present(place)
    assert there == [
        *("hellaswag_zeroshot", "arc_easy", "arc_challenge", "copa", "commonsense_qa", "openbook_qa", "lambada_openai"),
        *("hellaswag", "winogrande", "boolq"),
    ]
    assert {*there, *missing} == set(PARTS)
    (item,) = tasks.core_items("arc_easy", place, 1, 0)
    assert item.prompts[0].count("\nAnswer: ") == 10
    assert item.prompts[0].endswith("\nAnswer:")
    assert item.prompts[0].count("\n\nQuestion: ") == 10
    assert tasks.core_items("boolq", place, 2, 0) == tasks.core_items("boolq", place, 2, 0)


def test_a_folder_without_any_of_the_tasks_is_an_error(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"query": "a", "choices": ["b"], "gold": 0}]
    write(tmp_path / "other.jsonl", rows)
    write(tmp_path / "more.jsonl", rows)
    with pytest.raises(DataError, match="holds none of CORE's 22 tasks"):
        tasks.present(TaskFiles((tmp_path,)))
    with pytest.raises(DataError, match="is not on the hub"):
        tasks.present(TaskFiles())


def test_one_file_is_one_part_and_not_all_of_core(tmp_path: Path) -> None:
    rows = [{"query": f"q{number}", "choices": ["a", "b", "c", "d"], "gold": 1} for number in range(12)]
    write(tmp_path / "arc_easy_test.jsonl", rows)
    for place in (tmp_path, tmp_path / "arc_easy_test.jsonl"):
        there, missing = tasks.present(tasks.task_files(["core"], [place]))
        assert there == ["arc_easy"]
        assert len(missing) == 21
    with pytest.raises(DataError, match=r"none of CORE's 22 tasks\nAdd files named hellaswag_zeroshot\.jsonl, jeop"):
        tasks.present(tasks.task_files(["core"], [write(tmp_path / "mine.jsonl", rows)]))


def test_a_part_without_rows_is_an_error_that_names_its_file(tmp_path: Path) -> None:
    write(tmp_path / "copa.jsonl", [])
    with pytest.raises(DataError, match=r"copa\.jsonl: has no rows of copa"):
        tasks.core_items("copa", TaskFiles((tmp_path,)), None, 0)
