"""The shapes in which the hub writes preferences, each as its rows stand there."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.data.chat.formats import RejectedRow
from bloomery.data.chat.preferences import JudgedRow, PairFiles, WorldPairs, digest, judged, understood
from bloomery.data.readers.bytes import ReadError

HOW = PairFiles(name="some", path=Path("."))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be kind."}
ASKED, GOOD, BAD = [user("2 + 2?")], [assistant("4")], [assistant("5")]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, ASKED),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": BAD}, ASKED),
        ({"chosen": ASKED + GOOD, "rejected": ASKED + BAD}, ASKED),
        ({"prompt": "2 + 2?", "chosen": ASKED + GOOD, "rejected": ASKED + BAD}, ASKED),
        ({"prompt": "2 + 2?", "chosen": [SYSTEM, *ASKED, *GOOD], "rejected": [SYSTEM, *ASKED, *BAD]}, [SYSTEM, *ASKED]),
        ({"chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5"}, ASKED),
        ({"system": "Be kind.", "question": "2 + 2?", "chosen": "4", "rejected": "5"}, [SYSTEM, *ASKED]),
        ({"system": "", "question": "2 + 2?", "chosen": "4", "rejected": "5"}, ASKED),
        ({"instruction": "2 + 2?", "chosen_response": "4", "rejected_response": "5"}, ASKED),
        (
            {
                "conversations": [{"from": "human", "value": "2 + 2?"}],
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
            },
            ASKED,
        ),
        (
            {
                "chosen": [user("Hi"), assistant("Yes?"), *ASKED, *GOOD],
                "rejected": [user("Hi"), assistant("Yes?"), *ASKED, *BAD],
            },
            [user("Hi"), assistant("Yes?"), *ASKED],
        ),
    ],
)
def test_a_pair_is_understood_in_every_shape(row: dict[str, Any], prompt: list[Any]) -> None:
    assert understood(row, HOW) == (prompt, GOOD, BAD)


EARLIER = [user("Hi"), assistant("Yes?")]


@pytest.mark.parametrize(
    ("asks", "prompt"),
    [
        ({"instruction": "Add.", "input": "2 + 2"}, [user("Add.\n\n2 + 2")]),
        ({"instruction": "Add.", "context": "2 + 2"}, [user("Add.\n\n2 + 2")]),
        ({"instruction": "2 + 2?", "input": ""}, ASKED),
        ({"instruction": None, "input": "2 + 2?"}, ASKED),
        ({"instruction": "2 + 2?", "history": [["Hi", "Yes?"]]}, EARLIER + ASKED),
        ({"prompt": "2 + 2?", "history": EARLIER}, EARLIER + ASKED),
        ({"prompt": EARLIER + ASKED, "history": [["Hi", "Yes?"]]}, EARLIER + ASKED),
        ({"prompt": "2 + 2?", "history": [["Hi", "Yes?"]], "system": "Be kind."}, [SYSTEM, *EARLIER, *ASKED]),
    ],
)
def test_the_prompt_has_the_input_that_belongs_to_an_instruction_and_the_turns_before(
    asks: dict[str, Any], prompt: list[Any]
) -> None:
    assert understood({**asks, "chosen": "4", "rejected": "5"}, HOW) == (prompt, GOOD, BAD)


@pytest.mark.parametrize(
    ("asks", "begin", "prompt"),
    [
        ({"prompt": "2 + 2? "}, ASKED, ASKED),
        ({"prompt": "2 + 2? ", "system": "Be kind."}, ASKED, [SYSTEM, *ASKED]),
        ({"prompt": " Hi"}, EARLIER + ASKED, EARLIER + ASKED),
    ],
)
def test_a_prompt_that_the_answers_begin_with_too_is_not_said_twice(
    asks: dict[str, Any], begin: list[Any], prompt: list[Any]
) -> None:
    assert understood({**asks, "chosen": begin + GOOD, "rejected": begin + BAD}, HOW) == (prompt, GOOD, BAD)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "4"}, "same_answer"),
        ({"chosen": ASKED + GOOD, "rejected": ASKED}, "same_answer"),
        ({"chosen": "4", "rejected": "5"}, "no_prompt"),
        ({"chosen": [*ASKED, *GOOD], "rejected": [user("3 + 3?"), *BAD]}, "no_prompt"),
        ({"prompt": "2 + 2?", "chosen": [user("4")], "rejected": "5"}, "no_answer"),
        ({"prompt": "2 + 2?", "chosen": 4, "rejected": "5"}, "not_text"),
        ({"prompt": "2 + 2?", "chosen": [], "rejected": "5"}, "not_text"),
        ({"prompt": "2 + 2?", "chosen": "\ud83d", "rejected": "5"}, "not_unicode"),
        ({"prompt": [{"role": "boss", "content": "2 + 2?"}], "chosen": "4", "rejected": "5"}, "unknown_role"),
        ({"instruction": "Add.", "input": 4, "chosen": "4", "rejected": "5"}, "not_text"),
        ({"prompt": "2 + 2?", "history": ["Hi"], "chosen": "4", "rejected": "5"}, "bad_message"),
        ({"prompt": "2 + 2?", "completion": "4", "label": True}, "unknown_shape"),
        ({"text": "2 + 2 = 4"}, "unknown_shape"),
    ],
)
def test_what_is_no_pair_has_its_reason(row: dict[str, Any], reason: str) -> None:
    found = understood(row, HOW)
    assert isinstance(found, ReadError)
    assert found.reason == reason


def test_the_recipe_may_name_the_fields() -> None:
    how = PairFiles(name="a", path=Path("."), prompt_field="q", chosen_field="a.best", rejected_field="a.worst")
    assert understood({"q": "2 + 2?", "a": {"best": "4", "worst": "5"}}, how) == (ASKED, GOOD, BAD)


def test_rows_come_from_files_with_their_lines_and_rejected_ones_with_their_reasons(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1?", "chosen": str(n + 1), "rejected": str(n), "score": n} for n in range(5)]
    lines = [json.dumps(row) for row in rows] + ["{", json.dumps({"prompt": "?"})]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    source = PairFiles(name="a", path=tmp_path, accept=({"kind": "field", "field": "score", "at_least": 2},))
    found = list(judged([source]))
    kept = [one for one in found if isinstance(one, JudgedRow)]
    reasons = [(one.problem.reason, one.location.rpartition("/")[2]) for one in found if isinstance(one, RejectedRow)]
    assert [one.asked for one in kept] == ["2 + 1?", "3 + 1?", "4 + 1?"] * 2
    assert [one.id for one in kept][:3] == [f"a/pairs.jsonl:{line}" for line in (3, 4, 5)]
    assert [reason for reason, _ in reasons] == ["accept.score"] * 2 + ["not_json", "accept.score.missing"] + [
        "accept.score"
    ] * 2
    assert reasons[2][1] == "pairs.jsonl:6"
    capped = PairFiles(name="a", path=tmp_path, max_rows=4)
    assert sum(isinstance(one, JudgedRow) for one in judged([capped])) == 4
    before = digest([capped])
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines[1:]))
    assert digest([capped]) != before


def test_small_worlds_give_pairs_of_a_right_and_a_wrong_answer_of_the_same_kind() -> None:
    found = [one for one in judged([WorldPairs(count=200, seed=1)]) if isinstance(one, JudgedRow)]
    assert len(found) == 200
    assert found == list(judged([WorldPairs(count=200, seed=1)]))
    for one in found:
        assert one.chosen != one.rejected
        assert one.prompt[-1]["role"] == "user"
