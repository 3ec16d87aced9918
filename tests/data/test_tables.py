import csv
import gzip
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.readers import rows as readers_rows
from bloomery.data.readers.bytes import ReadError

MOST = 10_000
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


def rows(path: Path, delimiter: str = ",", most: int = MOST) -> list[dict[str, str] | tuple[int, str]]:
    found = readers_rows.delimited(path, delimiter, most)
    return [(number, row.reason) if isinstance(row, ReadError) else row for number, row in found]


@given(st.lists(st.tuples(TEXT, TEXT.filter(bool)), max_size=6), st.sampled_from(",\t;"), st.booleans())
def test_every_table_that_python_writes_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, cells: list[tuple[str, str]], delimiter: str, windows: bool
) -> None:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\r\n" if windows else "\n")
    writer.writerow(["one", "text"])
    writer.writerows(cells)
    (path := tmp_path_factory.getbasetemp() / "t.csv.gz").write_bytes(
        gzip.compress(file.getvalue().encode("utf-8-sig"))
    )
    assert rows(path, delimiter) == [{"one": one, "text": text} for one, text in cells]


def test_line_breaks_in_quotes_stay_and_numbers_are_those_of_lines(tmp_path: Path) -> None:
    (path := tmp_path / "t.csv").write_bytes('id,text\n1,"a\n\n\u2028b ""x"""\r\n2,c\n'.encode())
    found = list(readers_rows.delimited(path, ",", MOST))
    assert found == [(2, {"id": "1", "text": 'a\n\n\u2028b "x"'}), (5, {"id": "2", "text": "c"})]


def test_a_wrong_row_is_a_problem_and_the_next_one_is_read(tmp_path: Path) -> None:
    bad = [b"1\n", b"1,2,3\n", b'1,"a"b\n', b"1,caf\xe9\n", b"1,\0\n", b"1," + b"x" * 9000 + b"\n"]
    (path := tmp_path / "t.csv").write_bytes(b"id,text\n" + b"".join(line + b"2,good\n" for line in bad))
    reasons = ["not_csv", "not_csv", "not_csv", "not_utf8", "binary", "too_long"]
    good = {"id": "2", "text": "good"}
    expected = [item for n, reason in enumerate(reasons) for item in ((2 * n + 2, reason), good)]
    assert rows(path, most=8000) == expected


def test_a_row_that_a_stray_quote_continues_names_all_lines_that_are_lost_with_it(tmp_path: Path) -> None:
    (path := tmp_path / "t.csv").write_bytes(b'id,text\n1,"open\n2,x\n3,y"z\n4,good\n')
    (number, problem), (_, row) = readers_rows.delimited(path, ",", MOST)
    assert isinstance(problem, ReadError)
    assert (number, problem.reason, row) == (2, "not_csv", {"id": "4", "text": "good"})
    assert problem.what.startswith("one row of lines 2 to 4: ")


def test_a_quote_that_is_never_closed_takes_no_more_than_the_limit(tmp_path: Path) -> None:
    (path := tmp_path / "t.csv").write_bytes(b'id,text\n1,"open\n' + b"2,x\n" * 5000)
    found = rows(path, most=1000)
    assert found[0] == (2, "too_long")
    assert found[-1] == {"id": "2", "text": "x"}
    (path := tmp_path / "u.csv").write_bytes(b'id,text\n1,"open\n2,x\n')
    assert rows(path) == [(2, "torn")]


def test_a_column_that_is_missing_is_named_and_one_with_a_dot_stands_for_its_object(tmp_path: Path) -> None:
    pq.write_table(pa.table({"meta": [{"a": "x"}], "text": ["t"]}), path := tmp_path / "t.parquet")
    assert list(readers_rows.parquet(path, ["meta.a"], ["score"])) == [(0, {"meta": {"a": "x"}})]
    ((place, problem),) = readers_rows.parquet(path, ["score"])
    assert isinstance(problem, ReadError)
    assert (place, problem.reason, problem.what) == (0, "no_column", "has no column 'score'; its columns: meta, text")


@pytest.mark.parametrize(
    ("header", "what", "hint"),
    [
        ("id,body", "has no column 'text'; its columns: id, body", ""),
        ("id;text", "has no column 'text'; its columns: id;text", "';' between its names, but ',' is read"),
        ("id,text,text", "has 2 columns named 'text'; rename all but one", ""),
        ("text,url,url", "has 2 columns named 'url'; rename all but one", ""),
    ],
)
def test_a_csv_file_without_its_column_or_with_two_of_it_is_one_problem(
    tmp_path: Path, header: str, what: str, hint: str
) -> None:
    (path := tmp_path / "t.csv").write_text(f"{header}\n1,2,3\n4,5,6\n")
    ((line, problem),) = readers_rows.delimited(path, ",", MOST, ["text"], ["url"])
    assert isinstance(problem, ReadError)
    assert (line, problem.reason, problem.what) == (1, "no_column", what)
    assert hint in problem.hint


@pytest.mark.parametrize("line", [b'[{"text": "a"}, {"text": "b"}]', b'{"text": "a"}\r{"text": "b"}\r', b"7"])
def test_a_last_line_that_is_no_object_is_not_called_cut_off(tmp_path: Path, line: bytes) -> None:
    (path := tmp_path / "t.jsonl").write_bytes(line)
    ((_, problem),) = readers_rows.jsonl(path)
    assert isinstance(problem, ReadError)
    assert (problem.reason, "cut off" in problem.what) == ("not_json", False)
    assert "jq" in problem.hint


def test_a_parquet_file_whose_columns_have_no_utf8_names_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "other": ["b"]}), path)
    path.write_bytes(path.read_bytes().replace(b"other", b"oth\xf3r"))
    rows = [row for _, row in readers_rows.parquet(path, ["text"])]
    assert isinstance(rows[-1], ReadError)
    assert rows[-1].reason == "torn"


@pytest.mark.slow
def test_long_rows_come_in_small_batches(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 2**20] * 200}), path := tmp_path / "t.parquet", use_dictionary=False)
    with pq.ParquetFile(path) as file:
        assert readers_rows._batch_rows(file, 0) < 70
    assert sum(1 for _ in readers_rows.parquet(path, ["text"])) == 200


def test_rows_that_would_unpack_to_a_bomb_are_one_problem_and_those_behind_them_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers_rows, "BOMB_BYTES", 2**22)
    with pq.ParquetWriter(path := tmp_path / "t.parquet", pa.schema({"text": pa.string()}), compression="zstd") as file:
        for text in ("before", "x" * 2**24, "after"):
            file.write_table(pa.table({"text": [text]}))
    found = list(readers_rows.parquet(path, ["text"]))
    assert found[::2] == [(0, {"text": "before"}), (2, {"text": "after"})]
    assert isinstance(problem := found[1][1], ReadError)
    assert problem.reason == "bomb"
