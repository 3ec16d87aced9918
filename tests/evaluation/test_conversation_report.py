"""The page about conversations, as a reader sees it."""

import json
from typing import Any

from bloomery.evaluation.report import page
from tests.evaluation.test_report import Checked, by_look, drawings, section

ODD: tuple[Any, ...] = (None, 3, "x", [1], {"a": {"b": []}})
INJECTED = "<script>alert(1)</script>"


def report() -> dict[str, Any]:
    runs = [
        {"text": "<|user|>", "learned": False, "special": True},
        {"text": f"Hi {INJECTED}", "learned": False, "special": False},
        {"text": "<|assistant|>", "learned": False, "special": True},
        {"text": "你好。", "learned": True, "special": False},
        {"text": "<|end|>", "learned": True, "special": True},
    ]
    sample = {
        "source": "a",
        "id": "1",
        "place": "a.jsonl:1",
        "tokens": 700,
        "supervised": 8,
        "shown": 600,
        "runs": runs,
    }
    split = {"conversations": 40, "rows": 11, "tokens": 12_345, "supervised": 4_938, "packing": 0.9876}
    counts = {"read": 50, "conversations": 44, "rejected": 4, "dropped": 2, "cut_at_a_turn": 3}
    return {
        **counts,
        "rejected_by_reason": {"too_long": 3, "not_json": 1},
        "dropped_by_reason": {"identity": 2},
        "template": "abc",
        "tokenizer": "def",
        "sequence_length": 1025,
        "splits": {"train": split, "val": {**split, "conversations": 4}},
        "sources": [{"source": "a", **counts, "in_rows": 44, "tokens": 100, "supervised": 40, "supervised_share": 0.4}],
        "lengths": [{"from": 1, "to": 16, "conversations": 4}, {"from": 17, "to": 1025, "conversations": 40}],
        "samples": [sample],
    }


def test_the_page_shows_the_numbers_and_needs_nothing_but_itself() -> None:
    made = page(report())
    seen = Checked(made).seen
    for number in ("44", "12.35k", "40%", "98.8%", "1,025", "3 (6%)"):
        assert number in seen, number
    assert "http" not in made
    assert drawings(made)


def test_what_is_learned_is_marked_and_nothing_else() -> None:
    made = section(page(report()), "samples")
    checked = Checked(made)
    assert checked.count("mark", "learned") == 1 + 2, "the legend, the answer and its end"
    assert "8 of 700 tokens in the loss; the first 600 are shown" in checked.seen
    assert INJECTED in checked.seen
    assert INJECTED not in made


def test_every_reason_and_length_has_a_bar() -> None:
    made = page(report())
    assert len(by_look(section(made, "gone"), "bar-fill")) == 3
    assert len(by_look(section(made, "lengths"), "bar-fill")) == 2


def test_a_report_of_which_parts_are_missing_is_a_page() -> None:
    whole = report()
    for name in whole:
        Checked(page({key: value for key, value in whole.items() if key != name}))
        for odd in ODD:
            Checked(page({**whole, name: odd}))
    assert "No row was rejected or dropped" in Checked(page({})).seen
    assert json.dumps(whole) == json.dumps(report()), "nothing in it was changed"
