import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import DataError, RunError
from bloomery.core.io import PARTIAL
from bloomery.data import documents
from bloomery.data.documents import DocumentRow, Rolling
from tests.data.made_documents import part_rows

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"id": TEXT, "text": TEXT, "source": TEXT, "domain": TEXT, "url": st.none() | TEXT, "license": st.none() | TEXT}
    ),
    max_size=12,
)


def row(number: int, text: str = "a text") -> DocumentRow:
    return {"id": str(number), "text": text, "source": "s", "domain": "web", "url": None, "license": None}


def write(folder: Path, rows: Iterable[DocumentRow], schema: pa.Schema | None = None) -> None:
    """As the stage fetch writes what it has read."""
    with Rolling(folder, "part", schema or documents.SCHEMA()) as writer:
        for one in rows:
            writer.write(one, len(one["text"].encode()))


@settings(max_examples=30)  # each waits for the disk
@given(rows=ROWS)
def test_documents_come_back_in_order(tmp_path_factory: pytest.TempPathFactory, rows: list[DocumentRow]) -> None:
    folder = tmp_path_factory.mktemp("documents")
    write(folder, rows)
    assert documents.count(folder) == len(rows)
    assert list(documents.read(folder)) == rows
    assert list(documents.read(folder, ["text"])) == [{"text": one["text"]} for one in rows]
    assert sum(batch.num_rows for batch in documents.batches(folder)) == len(rows)


@pytest.mark.parametrize(("rows_per_part", "bytes_per_part"), [(1, 10**9), (4, 10**9), (10**9, 25), (10**9, 1)])
def test_parts_roll_over_by_rows_and_by_size_and_together_hold_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_part: int, bytes_per_part: int
) -> None:
    monkeypatch.setattr(documents, "ROWS_PER_PART", rows_per_part)
    monkeypatch.setattr(documents, "BYTES_PER_PART", bytes_per_part)
    rows = [row(number, "x" * number) for number in range(1, 11)]
    write(tmp_path, rows)
    assert list(documents.read(tmp_path)) == rows
    assert documents.count(tmp_path) == 10
    tables = [pq.read_table(part).to_pylist() for part in documents.parts(tmp_path)]
    assert len(tables) > 1
    for some in tables:
        assert len(some) <= rows_per_part
        assert sum(len(one["text"]) for one in some[:-1]) < bytes_per_part


def test_no_documents_are_one_empty_part(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert documents.count(tmp_path) == 0
    assert list(documents.read(tmp_path)) == []


def test_columns_of_a_stage_come_back_and_columns_without_a_place_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, [{**row(1), "reason": "length.too_short", "value": 3.0, "other": 1}], documents.dropped_schema())
    assert list(documents.read(tmp_path)) == [{**row(1), "reason": "length.too_short", "value": 3.0}]


def test_an_error_leaves_out_the_open_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "ROWS_PER_PART", 4)

    def rows() -> Iterator[DocumentRow]:
        yield from (row(number) for number in range(10))
        raise KeyError

    with pytest.raises(KeyError):
        write(tmp_path, rows())
    assert [one["id"] for one in documents.read(tmp_path)] == list("01234567")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["part-000.parquet", "part-001.parquet"]


def test_a_file_that_cannot_take_the_last_documents_is_left_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: documents.PartWriter, rows: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(documents.PartWriter, "write", full)
    with pytest.raises(OSError, match="full"):
        write(tmp_path, [row(1)])
    assert list(tmp_path.iterdir()) == []


DIE = """
import os, signal, sys
from pathlib import Path
from bloomery.data import documents
documents.ROWS_PER_PART = 3
number, seen = int(sys.argv[2]), 0
whole = os.fsync
def fsync(handle):  # between the bytes of a part and its name
    global seen
    seen += 1
    if seen == number:
        os.kill(os.getpid(), signal.SIGKILL)
    whole(handle)
os.fsync = fsync
with documents.Rolling(Path(sys.argv[1]), "part", documents.SCHEMA()) as writer:
    for number_of_row in range(10):
        writer.write({"id": str(number_of_row), "text": "x", "source": "s", "domain": "d"}, 1)
"""


@pytest.mark.parametrize("moment", [1, 3, 4])
def test_a_killed_process_leaves_whole_parts_and_no_torn_one(tmp_path: Path, moment: int) -> None:
    """Every part is flushed twice: its bytes (1, 3, 5 …), then its name in the folder (2, 4, …)."""
    done = subprocess.run([sys.executable, "-c", DIE, str(tmp_path), str(moment)], check=False)
    assert done.returncode == -signal.SIGKILL
    whole = moment // 2
    assert len(list(tmp_path.glob(f"*{PARTIAL}"))) == moment % 2
    assert len(list(tmp_path.glob("part-*.parquet"))) == whole
    if whole:
        assert [one["id"] for one in documents.read(tmp_path)] == [str(number) for number in range(3 * whole)]


def test_a_torn_part_is_an_error_that_names_it_wherever_it_was_cut(tmp_path: Path) -> None:
    write(tmp_path, (row(number, os.urandom(20).hex()) for number in range(500)))
    [part] = documents.parts(tmp_path)
    data = part.read_bytes()
    for cut in (0, 3, 100, len(data) // 2, len(data) - 1):
        part.write_bytes(data[:cut])
        with pytest.raises(DataError, match=r"(?s)part-000\.parquet: cannot be read.*The file is damaged"):
            list(documents.read(tmp_path))
        with pytest.raises(DataError, match=r"(?s)part-000\.parquet: cannot be read.*The file is damaged"):
            documents.count(tmp_path)


def test_a_folder_without_documents_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match=r"(?s)holds no documents.*Run the previous stage again"):
            list(documents.read(folder))


def test_a_part_that_outgrows_the_disk_is_an_error_that_names_it_and_leaves_nothing(tmp_path: Path) -> None:
    """pyarrow hands the system's error on as it is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def grow() -> None:
        write(tmp_path, (row(number, os.urandom(2000).hex()) for number in range(200)))

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(RunError, match=r"part-000\.parquet: cannot be written: File too large"):
            grow()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_part_holds_what_was_written_however_it_was_handed_in(tmp_path: Path) -> None:
    rows = [row(number) for number in range(2 * documents.ROWS_PER_BATCH + 7)]
    batches = pa.Table.from_pylist(rows, schema=documents.SCHEMA()).to_batches(max_chunksize=333)
    with documents.PartWriter(tmp_path / "a.parquet") as one:
        one.write(rows)
    with documents.PartWriter(tmp_path / "b.parquet") as other:
        for batch in batches:
            other.write_batch(batch)
    assert one.rows == other.rows == len(rows)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert part_rows(tmp_path / "a.parquet") == rows


def test_a_part_without_documents_is_a_file_and_one_that_failed_is_none(tmp_path: Path) -> None:
    with documents.PartWriter(tmp_path / "empty.parquet"):
        pass
    assert part_rows(tmp_path / "empty.parquet") == []
    with pytest.raises(KeyError), documents.PartWriter(tmp_path / "failed.parquet") as writer:
        writer.write([row(1), {"id": "no more"}["row"]])  # type: ignore[list-item]
    assert not (tmp_path / "failed.parquet").exists()
