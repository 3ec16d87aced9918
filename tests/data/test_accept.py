from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from bloomery.data.readers.read import Condition, first_unmet


def unmet(text: str, row: dict[str, Any], **condition: Any) -> tuple[str, float] | None:
    one: Any = TypeAdapter(Condition).validate_python(condition)
    problem = first_unmet((one,), text, row)
    return None if problem is None else (problem.reason, problem.value)


def test_a_field_has_to_be_in_its_range() -> None:
    score = {"kind": "field", "field": "meta.score", "at_least": 3, "at_most": 5}
    assert unmet("", {"meta": {"score": 3}}, **score) is None
    assert unmet("", {"meta": {"score": 2.5}}, **score) == ("accept.meta.score", 2.5)
    assert unmet("", {"meta.score": 6}, **score) == ("accept.meta.score", 6)
    for row in ({}, {"meta": 1}, {"meta": {"score": None}}, {"meta": {"score": "4"}}, {"meta": {"score": True}}):
        assert unmet("", row, **score) == ("accept.meta.score.missing", 0)
    for value in (float("nan"), float("inf"), 10**400):
        assert unmet("", {"meta": {"score": value}}, **score) is not None


def test_a_field_has_to_be_one_of_some() -> None:
    language = {"kind": "field", "field": "lang", "one_of": ("py", "js")}
    assert unmet("", {"lang": "js"}, **language) is None
    assert unmet("", {"lang": "c"}, **language) == ("accept.lang", 0)
    assert unmet("", {"n": True}, kind="field", field="n", one_of=(1,)) == ("accept.n", 0)
    with pytest.raises(ValidationError, match="is empty; set"):
        unmet("", {}, kind="field", field="lang")


def test_text_has_to_have_its_length_and_lines() -> None:
    assert unmet("x" * 9, {}, kind="characters", at_least=10) == ("accept.characters", 9)
    assert unmet("x" * 9, {}, kind="characters", at_most=8) == ("accept.characters", 9)
    assert unmet("a\nb\n", {}, kind="lines", at_least=3) == ("accept.lines", 2)
    assert unmet("a\u2028b\nc", {}, kind="lines", at_least=2, longest=3) is None
    assert unmet("aaaa\nb", {}, kind="lines", longest=3) == ("accept.longest_line", 4)
    code = "# one\n\n// two\n  * three\nx = 1\n"
    assert unmet(code, {}, kind="code_lines", at_least=0.25) is None
    assert unmet(code, {}, kind="code_lines", at_least=0.3) == ("accept.code_lines", 0.25)
