import json
import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bloomery.data.decontamination import Match, OverlapIndex, OverlapSettings, hits, located, plain

QUESTIONS = [
    "How many apples are left when Tom has 17 apples and gives 5 of them to each of his 3 friends?",
    "What causes the tides of the sea?",
    "The pleura",
    "Café society met in the ﬁrst days of May 1920, where?",
]


def index_of(questions: list[str], folder: Path, **more: int) -> OverlapIndex:
    path = folder / "quiz.jsonl"
    path.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions))
    return OverlapIndex.of(OverlapSettings(files=(path,), **more))  # type: ignore[arg-type]


def rows_in(index: OverlapIndex, text: str) -> set[int]:
    return {index.rows[match.row][1] for match in index.find([text])}


def ngrams(text: str, size: int) -> list[tuple[str, ...]]:
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold())
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda text: text.replace(" ", "\n"),
        lambda text: text.replace(" ", " -- "),
        lambda text: "**" + text.replace(" ", "_ _") + "**",
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
        lambda text: text.replace("a", "a\u00ad"),
        lambda text: "Some words before. " + text + " And some after.",
    ],
)
def test_a_question_is_found_in_any_dress(change: object, tmp_path: Path) -> None:
    index = index_of(QUESTIONS, tmp_path)
    assert callable(change)
    for number in (1, 2, 4):
        assert rows_in(index, change(QUESTIONS[number - 1])) == {number}
    assert rows_in(index, "The pleura is thin.") == set()


def test_a_long_text_is_found_by_thirteen_of_its_words_and_a_short_one_whole(tmp_path: Path) -> None:
    index = index_of(QUESTIONS, tmp_path)
    words = QUESTIONS[0].split()
    assert rows_in(index, " ".join(words[3:16])) == {1}
    assert rows_in(index, " ".join(words[3:15])) == set()
    assert rows_in(index, "causes the tides of the sea") == set()


def test_numbers_tell_questions_apart(tmp_path: Path) -> None:
    index = index_of(QUESTIONS, tmp_path)
    assert rows_in(index, QUESTIONS[0].replace("17", "18").replace("5 of", "6 of")) == set()


def test_matches_do_not_reach_over_the_end_of_a_text(tmp_path: Path) -> None:
    index = index_of(QUESTIONS, tmp_path)
    first, second = QUESTIONS[1][:15], QUESTIONS[1][15:]
    assert list(index.find([first, second])) == []
    assert list(index.find(["x", QUESTIONS[1], first])) == [Match(1, 0, 7, 1)]
    assert list(index.find([])) == []


def test_what_is_found_is_what_shares_an_n_gram(tmp_path: Path) -> None:
    rng = random.Random(0)
    letters = "abcd"
    questions = [" ".join(rng.choices(letters, k=rng.randrange(3, 9))) for _ in range(12)]
    index = index_of(questions, tmp_path, ngram_words=5, min_question_words=3)
    texts = [" ".join(rng.choices(letters, k=rng.randrange(0, 60))) for _ in range(60)]
    found = {(match.text, index.rows[match.row][1]) for match in index.find(texts)}
    expected = set()
    for number, question in enumerate(questions, 1):
        size = min(5, len(question.split()))
        wanted = set(ngrams(question, size))
        expected |= {(place, number) for place, text in enumerate(texts) if wanted & set(ngrams(text, size))}
    assert found == expected


def test_a_form_of_words_that_many_questions_share_is_none_of_them(tmp_path: Path) -> None:
    form = "this question refers to the following information that you should read with some care"
    index = index_of([f"{form} and answer number {n} of all these many questions here" for n in range(20)], tmp_path)
    assert rows_in(index, form) == set()
    assert rows_in(index, f"{form} and answer number 7 of all these many questions here") >= {8}


def test_a_saved_index_finds_the_same(tmp_path: Path) -> None:
    index = index_of(QUESTIONS, tmp_path)
    index.save(tmp_path / "index")
    again = OverlapIndex.load(tmp_path / "index")
    assert again.rows == index.rows
    texts = [*QUESTIONS, "nothing"]
    assert list(again.find(texts)) == list(index.find(texts)) != []


def test_a_hit_says_where_and_what(tmp_path: Path) -> None:
    index = index_of(QUESTIONS, tmp_path)
    text = "É: “what causes\n the_tides of the sea” is old. What causes the tides of the sea? " + QUESTIONS[0]
    batch = pa.record_batch({"id": ["clean", "bad"], "text": ["Nothing to see here at all.", text]})
    worst, listed = hits(index, batch)
    assert worst == {1: ("quiz", 2 + len(ngrams(QUESTIONS[0], 13)))}
    assert [(hit["row"], hit["id"], hit["place"], hit["words"]) for hit in listed] == [
        (1, "bad", text.index("How many"), 13),
        (2, "bad", 3, 7),
    ]
    assert listed[1]["matched"] == "“what causes\n the_tides of the sea”"


def test_words_are_located_by_number() -> None:
    text = "a-b  c_d\u00a0ﬁve … six"
    found = located(text, [(number, 1) for number in range(6)])
    assert [matched for _, matched in found] == ["a-b", "a-b", "c_d", "c_d", "ﬁve", "six"]
    assert located(text, [(1, 3)]) == [(0, "a-b  c_d")]
    assert plain("ＡB_ß") == "ab ss"


def test_a_very_long_document_is_searched_too(tmp_path: Path) -> None:
    index = index_of(QUESTIONS, tmp_path)
    text = "word " * 500_000 + QUESTIONS[0] + " word" * 1000
    found = list(index.find([text]))
    assert {index.rows[match.row][1] for match in found} == {1}
    assert min(found).word == 500_000
    assert np.diff([match.word for match in found]).tolist() == [1] * (len(found) - 1)


def test_a_text_that_stands_in_many_rows_and_one_without_its_inner_marks_are_found(tmp_path: Path) -> None:
    question = "Why did the woman's short-run plan for the old mill's wheel fail before the first snow fell that year?"
    short = "Whose is the baker's dog?"
    task = tmp_path / "riddles.jsonl"
    task.write_text("".join(json.dumps({"question": one}) + "\n" for one in [question] * 12 + [short]))
    index = OverlapIndex.of(OverlapSettings(files=(task,)))
    bare = re.sub(r"[^\w\s]", "", question)
    texts = [
        question,
        bare,
        "Well. " + re.sub(r"[^\w\s]", "", short) + " Mine.",
        "nothing of the kind stands here at all",
    ]
    assert {match.text for match in index.find(texts)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"sentence": "The cup fell as the _ was wet.", "option1": "table", "option2": "cat", "answer": "1"},
         "Look: the cup fell as the table was wet. And more."),
        ({"question": "Planets orbit", "choices": {"text": ["a moon", "a star"]}, "answerKey": "B"},
         "We know: planets orbit a star. And more."),
        ({"question_stem": "What do all planets orbit?"}, "Well, what do all planets orbit? A star."),
        ({"article": "Once a very small cat sat on a mat."}, "So: once a very small cat sat on a mat. And more."),
    ],
    ids=["winogrande", "arc", "openbookqa", "race"],
)  # fmt: skip
def test_rows_as_the_hub_has_them_are_found(tmp_path: Path, row: dict[str, object], text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    index = OverlapIndex.of(OverlapSettings(files=(tmp_path / "rows.jsonl",), min_question_words=3))
    assert list(index.find([text]))
    assert not list(index.find(["A text of other words, which stands in no row."]))
