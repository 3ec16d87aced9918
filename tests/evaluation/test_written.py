from decimal import Decimal
from typing import Any

import pytest

from bloomery.evaluation.harness import code, cut_at, last_number, marked_number, program, stable_seed
from bloomery.evaluation.tasks import EvalItem


@pytest.mark.parametrize(
    ("text", "marked", "last"),
    [
        ("She has 3 + 4 = 7.\n#### 7", 7, 7),
        ("#### 1,234\nQuestion: 9", 1234, 9),
        ("#### -5.50", "-5.5", "-5.5"),
        ("It costs $18.", None, 18),
        ("It costs $1,000.50 in all.", None, "1000.5"),
        ("no number", None, None),
        ("#### none, so 4", None, 4),
        ("2.0", None, 2),
    ],
)
def test_a_number_is_taken_from_behind_the_mark_or_from_the_end(text: str, marked: object, last: object) -> None:
    assert marked_number(text) == (None if marked is None else Decimal(str(marked)))
    assert last_number(text) == (None if last is None else Decimal(str(last)))


def test_text_is_cut_where_the_next_question_begins() -> None:
    assert cut_at("7\n\nQuestion: more", ("\n\n", "Question:")) == "7"
    assert cut_at("7", ("\n\n",)) == "7"


def test_seeds_differ_by_row_and_sample_and_never_change() -> None:
    assert stable_seed(0, 1, 2) == 66112467763644943
    assert len({stable_seed(0, row, sample) for row in range(20) for sample in range(20)}) == 400


def test_a_program_is_the_prompt_with_what_was_written() -> None:
    item = EvalItem(prompts=('def one():\n    """1"""\n',))
    for said, chat, begun in (
        ("    return 1", False, True),
        ("Sure:\n```python\ndef one():\n    return 1\n```\nDone.", True, True),
        ("```\ndef one():\n    return 1\n```", False, False),
    ):
        names: dict[str, Any] = {}
        exec(compile(program(item, said, chat=chat, begun=begun), "made", "exec"), names)
        assert names["one"]() == 1
    assert code("no fence") == "no fence"
