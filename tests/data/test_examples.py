import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.core.errors import DataError
from bloomery.data.quality.examples import Labels, TextExample, contrast, labeled
from tests.data.made_documents import write_documents

SETTINGS: dict[str, Any] = {"text_field": "text", "label_field": "label", "group_field": None}
SETTINGS |= {"samples": 1000, "characters": 1000, "seed": 0}
ROWS = [{"text": f"Text number {number}", "label": number % 2, "page": number // 4} for number in range(40)]


def written(rows: Iterable[Any], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, labels: Labels | None = None, **more: object) -> list[TextExample]:
    return labeled(path, labels or Labels(), **(SETTINGS | more))


def test_examples_are_the_same_whatever_the_order_of_the_rows_and_the_format(tmp_path: Path) -> None:
    forward = read(written(ROWS, tmp_path / "a.jsonl"))
    assert read(written(ROWS[::-1], tmp_path / "b.jsonl")) == forward
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "c.parquet")
    assert read(tmp_path / "c.parquet") == forward
    assert {(example.text, example.positive) for example in forward} == {(r["text"], r["label"] == 1) for r in ROWS}
    assert read(tmp_path / "a.jsonl", samples=10) == forward[:10]
    assert read(tmp_path / "a.jsonl", seed=1) != forward


def test_labels_may_be_words(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": word} for n, word in enumerate(("hate", "rude", "fine", "fine"))]
    path = written(rows, tmp_path / "a.jsonl")
    found = read(path, Labels(("hate", "rude"), ("fine",)))
    assert sorted(example.text for example in found if example.positive) == ["text 0", "text 1"]
    with pytest.raises(
        DataError, match=r"(?s)a\.jsonl:2: has label 'rude'.*Known labels are positive 'hate'; negative"
    ):
        read(path, Labels(("hate",), ("fine",)))


def test_labels_may_be_numbers_with_a_gap_between_the_classes(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": n / 10} for n in range(11)]
    found = read(written(rows, tmp_path / "a.jsonl"), Labels(positive_from=0.5, negative_below=0.1))
    assert sorted(example.text for example in found if not example.positive) == ["text 0"]
    assert len(found) == 1 + 6


def test_texts_that_differ_in_case_and_marks_are_one_group(tmp_path: Path) -> None:
    rows = [{"text": text, "label": n} for n, text in enumerate(("Well, done!", "well done"))]
    one, two = read(written(rows, tmp_path / "a.jsonl"))
    assert one.group == two.group
    path = written(ROWS, tmp_path / "b.jsonl")
    assert {example.group for example in read(path, group_field="page")} == {str(number) for number in range(10)}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"text": "", "label": 1}, r"a\.jsonl:41: its text is empty.*Remove this row"),
        ({"text": " \n", "label": 1}, "its text is empty"),
        ({"text": None, "label": 1}, "its text is None, not text"),
        ({"label": 1}, "has no field 'text'.*text_field to .*; the row has 'label'"),
        ({"text": "x"}, "has no field 'label'.*label_field"),
        ({"text": "x", "label": 2}, "has label 2, which is neither.*positive 1; negative 0"),
        ({"text": "x", "label": "1"}, "has label '1', which is neither"),
        ({"text": "x", "label": None}, "has label None"),
        ([], "line 41 holds list instead of an object"),
    ],
)
def test_a_broken_row_is_an_error_with_place_and_hint(row: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"(?s){what}"):
        read(written([*ROWS, row], tmp_path / "a.jsonl"))


def test_one_class_only_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)has 20 texts, 20 of them positive, by label.*missing class"):
        read(written([row for row in ROWS if row["label"]], tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"has 0 texts, 0 of them positive"):
        read(written([], tmp_path / "empty.jsonl"))


def test_another_kind_of_file_and_a_missing_group_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv is neither jsonl nor parquet"):
        read(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"(?s)has no family.*remove group_field"):
        read(written(ROWS, tmp_path / "a.jsonl"), group_field="family")


def test_contrast_takes_documents_evenly_over_domains_and_pairs_each_with_its_damaged_copy(tmp_path: Path) -> None:
    rows = [
        {"id": f"{number}", "text": f"Some words of {number}. " * 30, "source": "s", "domain": domain}
        for number, domain in enumerate(["rare"] * 10 + ["web"] * 80)
    ]
    write_documents(tmp_path, rows)
    found = list(contrast(tmp_path, samples=20, characters=300, seed=0))
    assert len(found) == 40
    assert sum(int(example.group) < 10 for example in found) == 20
    for good, bad in zip(found[::2], found[1::2], strict=True):
        assert (good.group, good.positive, bad.positive) == (bad.group, True, False)
        assert len(bad.text) <= len(good.text) <= 301
        assert bad.kind
    assert list(contrast(tmp_path, samples=20, characters=300, seed=1)) != found
