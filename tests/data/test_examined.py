import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.core.errors import DataError
from bloomery.data.decontamination import TaskText, task_files, task_name, task_texts


def texts_of(row: dict[str, object], tmp_path: Path, fields: tuple[str, ...] = ()) -> list[str]:
    path = tmp_path / "some_task.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return [piece.text for piece in task_texts(path, fields)]


def test_what_a_harness_puts_around_a_question_is_taken_off(tmp_path: Path) -> None:
    query = "Question: Why is mars red?\nChoices:\nA. rust\nB. fire\nAnswer:"
    found = texts_of({"query": query, "choices": ["rust", "fire"], "gold": 0}, tmp_path)
    assert {query, " Why is mars red?\n", " Why is mars red?\n\nrust", " Why is mars red?\n\nrust\nfire"} <= set(found)
    assert not [text for text in found if text.strip() == "A. rust\nB. fire"]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question": "The pleura", "choices": ["have none", "have many"], "answer": "B"}, "The pleura\nhave many"),
        ({"ctx": "A man sits.", "endings": ["He runs.", "He gets up."], "label": 1}, "A man sits.\nHe gets up."),
        ({"context": "She said", "continuation": "nothing"}, "She said\nnothing"),
        ({"context_options": ["Ann met Bo so Ann", "Ann met Bo so Bo"], "continuation": "won."}, "Ann met Bo so won."),
        (
            {"context_options": ["Ann met Bo so Ann", "Ann met Bo so Bo"], "continuation": "won."},
            "Ann met Bo so Bo\nwon.",
        ),
        ({"prompt": "def f():"}, "def f():"),
        ({"passage": "It rained.", "question": "Did it?"}, "Did it?\nIt rained."),
    ],
)
def test_short_texts_also_count_with_what_belongs_to_them(row: dict[str, object], text: str, tmp_path: Path) -> None:
    assert text in texts_of(row, tmp_path)


def test_named_fields_are_the_only_ones(tmp_path: Path) -> None:
    assert texts_of({"question": "a", "mine": "b"}, tmp_path, ("mine",)) == ["b", "b"]
    with pytest.raises(DataError, match=r"some_task.*(?s:.)*one of its fields: mine, question"):
        texts_of({"question": "a", "mine": "b"}, tmp_path, ("other",))


def test_parquet_and_folders_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["one", "two"]}), tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text('{"question": "three"}\n')
    (tmp_path / "notes.txt").write_text("no task")
    files = task_files([tmp_path])
    assert [task_name(path) for path in files] == ["a", "b"]
    assert set(task_texts(files[1])) == {TaskText("b", 1, "one"), TaskText("b", 2, "two")}
    with pytest.raises(DataError, match="holds no evaluation tasks"):
        task_files([tmp_path / "notes.txt"])
    torn = pa.array([b"caf\xe9"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"question": torn}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet: cannot be read: 'utf-8' codec"):
        list(task_texts(tmp_path / "c.parquet"))


def test_a_broken_row_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "x"}\n{oops\n')
    with pytest.raises(DataError, match=r"a\.jsonl"):
        list(task_texts(path))
