"""Parquet files that make Arrow abort are named, and end no process but the child that opens them first."""

import base64
import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.core.errors import DataError
from bloomery.data import decontamination, isolated
from bloomery.data.chat import readers
from bloomery.data.chat.formats import RejectedRow as RejectedTalk
from bloomery.data.chat.readers import ChatFiles
from bloomery.data.readers import rows as readers_rows
from bloomery.data.readers.read import RejectedDocument
from bloomery.data.sources import local
from bloomery.data.sources.local import Parquet
from tests.calling import Call

ABORTS = base64.b64decode(
    "UEFSMRUEFRQVFEwVBBUAEgAAAQAAAGEBAAAAYhUAFRIVEiwVBBUQFQYVBhw2ACgBYhgBYRERAAAAAgAAAAQBAQMCFQQVChUKTBUCFQASAAABAA"
    "AAeBUAFRIVEiwVBBUQFQYVBhw2AigBeBgBeBERAAAAAgAAAAMBAQIAFQQZPDUAGAZzY2hlbWEVBAAVCCUCGAJpZCUATBwAAAAVDCUCGAR0ZXh0"
    "JQBMHAAAABYEGRwZLCYAHBUMGTUABhAZGAJpZBUAFgQWfBZ8JjgmCBw2ACgBYhgBYRERABksFQQVABUCABUAFRAVAgA8FgQZBhkmAAQAAAAmAB"
    "wVDBk1AAYQGRgEdGV4dBUAFgQWchZyJqoBJoQBHDYCKAF4GAF4EREAGSwVBBUAFQIAFQAVEBUCADwWAhkGGSYCAgAAABbuARYEJggW7gEAKCBw"
    "YXJxdWV0LWNwcC1hcnJvdyB2ZXJzaW9uIDI2LjAuMRksHAAAHAAAAPcAAABQQVIx"
)
"""
Two rows of `id` and `text` as Arrow 26 writes them, with one flipped bit: the column `text` is said to hold floats. Its
statistics count bytes, which floats have none of, and no Python catches what Arrow throws there.
"""
WHY = r"makes Arrow abort \(SIGABRT\): Unencoded byte array data bytes does not support FLOAT"


@pytest.fixture(autouse=True)
def own_notes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path_factory.mktemp("cache")))
    isolated._noted.cache_clear()


def aborting(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ABORTS)
    return file


def whole(file: Path, rows: int = 2) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [f"{file.stem}-{n}" for n in range(rows)], "text": ["some text"] * rows}), file)
    return file


def test_every_reader_of_parquet_names_a_file_that_makes_arrow_abort(tmp_path: Path) -> None:
    file = aborting(tmp_path / "a.parquet")
    ((number, problem),) = readers_rows.parquet(file, ["text"])
    assert (number, problem.reason) == (0, "torn")  # type: ignore[union-attr]
    source = ChatFiles(name="a", path=file)
    with pytest.raises(DataError, match=WHY):
        list(decontamination.rows_of(file))
    (rejected,) = readers.conversations([source])
    assert isinstance(rejected, RejectedTalk)
    assert "makes Arrow abort" in rejected.problem.what


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_names_the_file_and_the_fix(tmp_path: Path, workers: int, call: Call) -> None:
    aborting(tmp_path / "in" / "a.parquet"), aborting(tmp_path / "in" / "b.parquet")
    words = ["data", "filter", tmp_path / "in", "--out", tmp_path / "out", f"engine.workers={workers}"]
    code, _, err = call(*words, 'rules=[{kind="length"}]')
    said = " ".join(err.split())
    assert (code, "{" in said) == (2, False)
    assert f"{tmp_path / 'in' / 'a.parquet'}:0: this file makes Arrow abort (SIGABRT)" in said
    assert "Remove it or write it again" in said
    whole(tmp_path / "in" / "c.parquet")
    code, out, _ = call(*words, 'rules=[{kind="length"}]', "--json")
    found = json.loads(out)
    assert (code, found["reasons"]["torn"], found["kept"] + found["dropped"]) == (0, 2, 4)


@pytest.mark.slow
def test_a_file_that_is_skipped_is_one_rejected_file_and_all_others_are_read(tmp_path: Path) -> None:
    for name in "acd":
        whole(tmp_path / f"{name}.parquet", rows=3)
    aborting(tmp_path / "b.parquet")
    source = Parquet(name="s", domain="d", path=tmp_path / "*.parquet", invalid="skip")
    items = list(local.read(source))
    (rejected,) = [item for item in items if isinstance(item, RejectedDocument)]
    assert (rejected.problem.reason, rejected.where) == ("torn", f"{tmp_path / 'b.parquet'}:0")
    assert len(items) == 3 * 3 + 1


def test_one_child_opens_all_files_and_none_is_started_for_those_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [whole(tmp_path / f"{n}.parquet") for n in range(20)]
    started: list[int] = []
    child = isolated._Child
    monkeypatch.setattr(isolated, "_Child", lambda: started.append(1) or child())  # type: ignore[func-returns-value]
    monkeypatch.setattr(isolated, "SETTLED_NANOSECONDS", 0)
    isolated._opener.end()
    assert isolated.problems(paths) == {}
    assert started == [1]
    isolated._opener.end()
    isolated._noted.cache_clear()  # as another process
    assert isolated.problems(paths) == {}
    assert started == [1]
    aborting(paths[3])
    os.utime(paths[3], ns=(time.time_ns(), time.time_ns()))
    assert list(isolated.problems(paths)) == [paths[3]]


@pytest.mark.slow
def test_files_behind_one_that_ends_the_child_are_opened_by_another(tmp_path: Path) -> None:
    paths = [
        aborting(tmp_path / f"{n}.parquet") if n in (0, 3, 4) else whole(tmp_path / f"{n}.parquet") for n in range(7)
    ]
    assert list(isolated.problems(paths)) == [paths[0], paths[3], paths[4]]


def test_a_child_that_was_ended_from_outside_is_not_held_against_a_file(tmp_path: Path) -> None:
    assert isolated.problem(whole(tmp_path / "a.parquet")) == ""
    assert isolated._opener.child is not None
    isolated._opener.child._process.kill()
    isolated._opener.child._process.wait()
    assert isolated.problem(whole(tmp_path / "b.parquet")) == ""


@pytest.mark.slow
def test_a_file_that_keeps_its_reader_busy_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "MAX_SECONDS", 1.0)
    fifo = tmp_path / "a.parquet"
    os.mkfifo(fifo)
    assert isolated.problem(fifo) == "keeps Arrow busy for more than 1 s"


@pytest.mark.parametrize("text", ["", "no note\n", "\x00\xff", json.dumps({"a": 1})])
def test_notes_that_are_none_are_passed_over(tmp_path: Path, text: str) -> None:
    isolated._notes().parent.mkdir(parents=True, exist_ok=True)
    isolated._notes().write_text(text)
    assert list(isolated.problems([aborting(tmp_path / "a.parquet"), whole(tmp_path / "b.parquet")])) == [
        tmp_path / "a.parquet"
    ]
