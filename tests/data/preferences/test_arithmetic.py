import json
import re
from pathlib import Path
from typing import Any

from bloomery.data.chat.formats import RejectedRow
from bloomery.data.chat.preferences import Arithmetic, ArithmeticProblem, ProblemFiles, problems
from bloomery.data.sources import toy_worlds


def made(**settings: object) -> list[ArithmeticProblem]:
    return [one for one in problems([Arithmetic.model_validate(settings)]) if isinstance(one, ArithmeticProblem)]


def test_every_question_has_the_number_that_python_finds_for_it() -> None:
    found = made(count=500, largest=12, operations=("plus", "minus", "times"), terms=4)
    assert len({one.question for one in found}) == 500
    for one in found:
        asked = re.fullmatch(r"What is (.+)\?", one.question)
        assert asked
        python = asked[1].replace("plus", "+").replace("minus", "-").replace("times", "*")
        assert one.solution == f"#### {eval(python)}"


def test_questions_depend_on_the_seed_and_their_number_alone_and_end_where_there_are_no_more() -> None:
    assert made(count=40, seed=3)[:20] == made(count=20, seed=3)
    assert made(count=20, seed=4) != made(count=20, seed=3)
    assert len(made(count=1000, largest=2)) == 9


def test_no_question_is_a_sum_that_small_worlds_hold_out() -> None:
    for one in made(count=1500):
        a, b = (int(number) for number in re.findall(r"\d+", one.question))
        assert not toy_worlds.is_held_out(toy_worlds.sum_of(a, b).fact)


def test_rows_of_gsm8k_are_problems_and_others_are_rejected_with_their_line(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "Tom has 3 and buys 15. How many?", "answer": "3 + 15 = <<3+15=18>>18\n#### 18"},
        {"question": "How many?", "answer": "none"},
        {"question": "How many?", "answer": 7},
        {"answer": "#### 1"},
        {"question": 5.5, "answer": "#### 1"},
        {"question": ["?"], "answer": "#### 1"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(problems([ProblemFiles(name="a", path=tmp_path / "a.jsonl")]))
    kept = [one.question for one in found if isinstance(one, ArithmeticProblem)]
    assert kept == [rows[0]["question"], "How many?", "5.5"]
    rejected = [(one.problem.reason, one.location[-2:]) for one in found if isinstance(one, RejectedRow)]
    assert rejected == [("no_number", ":2"), ("no_field", ":4"), ("not_text", ":6")]
