"""The stage `fetch`: everything is kept or rejected, limits are exact, and the bytes depend on the sources alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.config import build
from bloomery.core.errors import DataError
from bloomery.data import documents, executor
from bloomery.data.readers.read import RejectedDocument
from bloomery.data.sources import local
from bloomery.stages import fetch
from bloomery.stages.config import Fetch
from tests.data.made_poison import MOST_BYTES, POISONED_LINES, line
from tests.stages.made_documents import hashes


def jsonl(root: Path, name: str = "a", **more: Any) -> dict[str, Any]:
    return {"kind": "jsonl", "name": name, "domain": "web", "path": str(root / "*.jsonl"), **more}


def ids(folder: Path) -> list[str]:
    return [row["id"] for row in documents.read(folder, ["id"])]


def write(path: Path, lines: list[bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(one + b"\n" for one in lines))


@settings(max_examples=15)
@given(st.lists(st.lists(st.sampled_from([line("good"), *POISONED_LINES]), max_size=9), min_size=1, max_size=4))
def test_documents_in_are_documents_kept_and_rejected(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[bytes]]
) -> None:
    root = tmp_path_factory.mktemp("mixed")
    write(root / "raw" / "first.jsonl", [line("good")])
    for number, lines in enumerate(files):
        write(root / "raw" / f"{number}.jsonl", lines)
    source = jsonl(root / "raw", invalid="skip", max_document_bytes=MOST_BYTES)
    stats = fetch.run(build(Fetch, {"sources": [source]}), {}, root / "out")
    lines = [one for lines in files for one in lines]
    good, empty = sum(one not in POISONED_LINES for one in lines), sum(not lines for lines in files)
    assert stats["documents"] == documents.count(root / "out" / "documents") == 1 + good
    assert stats["rejected"] == documents.count(root / "out" / "rejected") == len(lines) - good + empty
    assert sum(stats["reasons"].values()) == stats["rejected"]
    rejected = list(documents.read(root / "out" / "rejected"))
    reasons = [POISONED_LINES[one] for one in lines if one in POISONED_LINES] + ["no_rows"] * empty
    assert sorted(row["reason"] for row in rejected) == sorted(reasons)
    shutil.rmtree(root)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Twelve files of twenty documents of 100 bytes, every fifth of them empty."""
    for file in range(12):
        write(
            tmp_path / "raw" / f"{file:02d}.jsonl", [line(f"{file * 20 + n:0100d}" if n % 5 else "") for n in range(20)]
        )
    return tmp_path / "raw"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GROUP_BYTES", 1)


LIMITS = [
    {},
    {"max_documents": 1},
    {"max_documents": 16},
    {"max_documents": 70},
    {"max_bytes": 4_850},
    {"max_bytes": 1600},
]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("limits", [*LIMITS, {"max_bytes": 3_000, "max_documents": 29}, {"max_documents": 10**6}])
def test_what_is_taken_is_what_one_reader_would_take(many: Path, tmp_path: Path, limits: dict[str, Any]) -> None:
    config = build(Fetch, {"sources": [jsonl(many, **limits)]})
    stats = fetch.run(config, {}, tmp_path / "out")
    items = list(local.read(config.sources[0]))
    kept = [item for item in items if not isinstance(item, RejectedDocument)]
    assert list(documents.read(tmp_path / "out" / "documents")) == kept
    assert ids(tmp_path / "out" / "rejected") == [
        item.row["id"] for item in items if isinstance(item, RejectedDocument)
    ]
    assert (stats["documents"], stats["bytes"]) == (len(kept), 100 * len(kept))
    listed = {path.stem for path in (tmp_path / "out" / executor.RECORDS / fetch.WORK).iterdir()}
    assert {path.name.rpartition("-")[0] for path in (tmp_path / "out" / "documents").iterdir()} == listed


@pytest.mark.usefixtures("small_pieces")
def test_the_bytes_are_the_same_after_any_part_is_lost(many: Path, tmp_path: Path) -> None:
    given = {"sources": [jsonl(many, max_bytes=4_850), jsonl(many, "b", max_documents=3)]}
    stats = fetch.run(build(Fetch, given), {}, tmp_path / "out")
    whole = hashes(tmp_path / "out")
    for name in sorted(whole)[3::14]:
        (tmp_path / "out" / name).unlink()
        (tmp_path / "out" / "documents" / "part-000-000011-000.parquet").write_bytes(b"of an attempt that died")
        assert fetch.run(build(Fetch, given), {}, tmp_path / "out") == stats
        assert hashes(tmp_path / "out") == whole


@pytest.mark.usefixtures("small_pieces")
def test_a_round_looks_only_at_the_parts_that_are_new(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    whole = executor.run_parts

    def counted(*given: Any, **more: Any) -> Any:
        asked.extend(part.name for part in given[3])
        return whole(*given, **more)

    monkeypatch.setattr(executor, "run_parts", counted)
    fetch.run(build(Fetch, {"sources": [jsonl(many, max_bytes=4_850)]}), {}, tmp_path / "out")
    assert len(asked) == len(set(asked)) > 3


@pytest.mark.usefixtures("small_pieces")
def test_the_bytes_are_the_same_with_any_number_of_workers(many: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        given = {"sources": [jsonl(many), jsonl(many, "b", max_documents=16)], "engine": {"workers": workers}}
        fetch.run(build(Fetch, given), {}, tmp_path / str(workers))
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2")


def test_long_files_roll_over_and_keep_their_order(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.data.documents.BYTES_PER_PART", 1000)
    fetch.run(config := build(Fetch, {"sources": [jsonl(many)]}), {}, tmp_path / "out")
    files = documents.parts(tmp_path / "out" / "documents")
    assert len(files) == 20
    assert list(documents.read(tmp_path / "out" / "documents")) == [
        item for item in local.read(config.sources[0]) if not isinstance(item, RejectedDocument)
    ]


@pytest.mark.usefixtures("small_pieces")
def test_of_documents_with_one_id_the_first_stays_and_the_others_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, keys in {"a": [1, 2, 2, 3], "b": [3, 4], "c": [1, 1, 5]}.items():
        write(tmp_path / "raw" / f"{file}.jsonl", [line(f"{file}{n}", key=key) for n, key in enumerate(keys)])
    skip = build(Fetch, {"sources": [jsonl(tmp_path / "raw", id_field="key", invalid="skip", license="MIT")]})
    stats = fetch.run(skip, {}, tmp_path / "out")
    kept = [(row["id"], row["text"]) for row in documents.read(tmp_path / "out" / "documents")]
    assert kept == [("1", "a0"), ("2", "a1"), ("3", "a3"), ("4", "b1"), ("5", "c2")]
    assert ids(tmp_path / "out" / "rejected") == ["2", "3", "1", "1"]
    assert stats["reasons"] == {"duplicate_id": 4}
    assert "rejected 4 because an earlier document has the same ID" in " ".join(capsys.readouterr().err.split())
    assert stats["by_source"]["a"] == {
        **{"documents": 5, "bytes": 10, "rejected": 4},
        **{"reasons": {"duplicate_id": 4}, "licenses": {"MIT": 5}},
    }
    assert stats["by_domain"] == {"web": {"documents": 5, "bytes": 10}}
    whole = hashes(tmp_path / "out")
    assert fetch.run(skip, {}, tmp_path / "out") == stats
    assert hashes(tmp_path / "out") == whole
    strict = build(Fetch, {"sources": [jsonl(tmp_path / "raw", id_field="key")]})
    with pytest.raises(DataError, match=r"two documents have the ID '2': a/a\.jsonl:2 and a/a\.jsonl:3"):
        fetch.run(strict, {}, tmp_path / "strict")


def test_an_id_of_its_own_may_not_be_that_of_another_source(tmp_path: Path) -> None:
    write(tmp_path / "raw" / "x.jsonl", [line("one", key="worlds/000001")])
    worlds = {"kind": "worlds", "name": "worlds", "domain": "stories", "count": 3}
    config = build(Fetch, {"sources": [worlds, jsonl(tmp_path / "raw", id_field="key")]})
    with pytest.raises(
        DataError, match=r"a: two documents have the ID 'worlds/000001': worlds/000001 and a/x\.jsonl:1"
    ):
        fetch.run(config, {}, tmp_path / "out")


def test_licenses_are_counted_and_domains_are_those_of_the_documents(tmp_path: Path) -> None:
    rows = [line("a", license="MIT", domain="code"), line("b", domain="qa"), line("c"), line("d", license="x" * 300)]
    write(tmp_path / "raw" / "x.jsonl", rows)
    source = {"kind": "files", "name": "all", "domain": "web", "path": str(tmp_path / "raw")}
    stats = fetch.run(build(Fetch, {"sources": [source]}), {}, tmp_path / "out")
    assert stats["by_source"]["all"]["licenses"] == {"MIT": 1, "not stated": 2, "x" * 100: 1}
    assert stats["by_domain"] == {
        name: {"documents": n, "bytes": n} for name, n in (("code", 1), ("qa", 1), ("web", 2))
    }
    json.dumps(stats)


@pytest.mark.parametrize(("field", "told"), [("topic", False), ("topics", True)])
def test_a_field_for_the_domain_that_no_row_has_is_told(
    field: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "raw" / "x.jsonl", [line("a", topic="code"), line("b")])
    config = build(Fetch, {"sources": [jsonl(tmp_path / "raw", domain="web", domain_field=field)]})
    fetch.run(config, {}, tmp_path / "out")
    assert ("no row has a text in 'topics', which domain_field names" in capsys.readouterr().err) == told


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS)
def test_a_long_file_of_lines_is_several_parts_with_the_documents_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    lines = [
        [line(f"{n:0100d}" if n % 5 else ""), b"", b"no json"][n % 7 == 3 or 2 * (n % 11 == 4)] for n in range(130)
    ]
    write(tmp_path / "raw" / "a.jsonl", [line("a small one")])
    write(tmp_path / "raw" / "b.jsonl", lines)
    write(tmp_path / "raw" / "c.jsonl", [line("another")])
    given = {
        "sources": [{**jsonl(tmp_path / "raw", **limits), "kind": kind, "name": kind} for kind in ("jsonl", "files")]
    }
    given["sources"][1]["path"] = str(tmp_path / "raw")
    config = build(Fetch, given)
    whole = fetch.run(config, {}, tmp_path / "whole")
    monkeypatch.setattr(local, "SPLIT_BYTES", 1000)
    pieces = local.pieces(config.sources[0])
    assert len(pieces) > 8
    assert len({piece.name for piece in pieces}) == len(pieces)
    for workers in (1, 2) if not limits else (1,):
        out = tmp_path / str(workers)
        assert fetch.run(build(Fetch, {**given, "engine": {"workers": workers}}), {}, out) == whole
        for folder in ("documents", "rejected"):
            assert list(documents.read(out / folder)) == list(documents.read(tmp_path / "whole" / folder))
    before = hashes(tmp_path / "1")
    for name in sorted(before)[2::13]:
        (tmp_path / "1" / name).unlink()
        assert fetch.run(config, {}, tmp_path / "1") == whole
        assert hashes(tmp_path / "1") == before


def test_the_lines_of_a_long_file_are_named_as_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SPLIT_BYTES", 1000)
    write(tmp_path / "raw" / "a.jsonl", [line(f"{n:0100d}", key=n % 90) for n in range(100)])
    with pytest.raises(DataError, match=r"two documents have the ID '0': a/a\.jsonl:1 and a/a\.jsonl:91"):
        fetch.run(build(Fetch, {"sources": [jsonl(tmp_path / "raw", id_field="key")]}), {}, tmp_path / "out")
    with (tmp_path / "raw" / "a.jsonl").open("ab") as file:
        file.write(b'{"text": "cut he')
    with pytest.raises(DataError, match=r"a\.jsonl:101: line 101 is not JSON .* the file was cut"):
        fetch.run(build(Fetch, {"sources": [jsonl(tmp_path / "raw")]}), {}, tmp_path / "again")
