import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.dedup.dedup import Unit, pieces, thinned, without

TEXTS = st.text(st.sampled_from("ab \n\r\t"), max_size=40)


@given(TEXTS, st.sampled_from(["line", "paragraph"]), st.integers(0, 99))
def test_what_is_taken_out_and_what_is_left_are_the_text(text: str, unit: Unit, seed: int) -> None:
    found = pieces(text, unit)
    assert "".join(line + end for line, end in found) == text
    numbers = {number: "x" for number in range(len(found)) if random.Random(seed + number).random() < 0.5}
    left, gone = without(text, numbers, unit)
    assert [number for number, _ in gone] == sorted(numbers)
    rest = [line + end for number, (line, end) in enumerate(found) if number not in numbers]
    assert "".join(rest) == left
    assert [piece for _, piece in gone] == ["".join(found[number]) for number in sorted(numbers)]


@pytest.mark.parametrize(("unit", "expected"), [("line", ["a", "b", "", "c"]), ("paragraph", ["a\nb", "c"])])
def test_paragraphs_end_with_an_empty_line(unit: Unit, expected: list[str]) -> None:
    assert [line for line, _ in pieces("a\nb\n\nc", unit)] == expected


def test_a_document_that_would_be_empty_is_told_and_stays_as_it_is() -> None:
    batch = pa.record_batch({"id": ["p", "q"], "text": ["one\n\n", "one\ntwo"]})
    cuts = [{"row": row, "number": 0, "first_id": "f"} for row in (0, 1)]
    thin, removed, empty = thinned(batch, cuts, "line")
    assert thin.column("text").to_pylist() == ["one\n\n", "two"]
    assert removed == [{"id": "q", "number": 0, "text": "one\n", "first_id": "f"}]
    assert empty == [0]
