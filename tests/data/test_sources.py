import gzip
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.data import documents
from bloomery.data.readers.read import RejectedDocument
from bloomery.data.sources import local, toy_worlds
from bloomery.data.sources.local import AnyFiles, Csv, Folder, Jsonl, Parquet, StandardLibrary, Worlds, digest, read
from bloomery.stages.config import Fetch

ODD = "one\u2028two\u0085three\x0cfour\x1dfive\r\nsix"
"""Every line break that `str.splitlines` knows and JSON lines do not."""


def folder(path: Path, **more: Any) -> Folder:
    return Folder(name="notes", domain="web", path=path, **{"invalid": "error", **more})


def jsonl(path: Path, **more: Any) -> Jsonl:
    return Jsonl(name="rows", domain="web", path=path, **{"invalid": "error", **more})


def parquet(path: Path, **more: Any) -> Parquet:
    return Parquet(name="table", domain="web", path=path, **{"invalid": "error", **more})


def kept(source: Any) -> list[documents.DocumentRow]:
    return [item for item in read(source) if not isinstance(item, RejectedDocument)]


def rejected(source: Any) -> list[tuple[str, str, float]]:
    return [(i.row["id"], i.problem.reason, i.problem.value) for i in read(source) if isinstance(i, RejectedDocument)]


def lines(*objects: Any) -> bytes:
    return b"".join(json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in objects)


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def test_a_document_of_a_folder_is_a_whole_file_with_its_blank_lines(tmp_path: Path) -> None:
    text = "First paragraph.\n\n\n   indented\n\nLast one. " + ODD
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.md").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    rows = kept(folder(tmp_path))
    assert [(row["id"], row["text"]) for row in rows] == [("notes/b.md", "with a mark"), ("notes/deep/a.txt", text)]
    assert [row["id"] for row in kept(folder(tmp_path, recursive=False))] == ["notes/b.md"]
    assert pa.Table.from_pylist(rows, schema=documents.SCHEMA()).num_rows == 2


def test_a_file_that_is_not_utf8_is_an_error_with_name_offset_and_hint(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    convert = r"Convert it to UTF-8, as iconv -f WINDOWS-1252 .*encoding = \"detect\""
    told = rf"(?s)latin\.txt.*byte offset 3.*0xe9.*not UTF-8\n{convert}.*invalid = \"skip\""
    with pytest.raises(DataError, match=told):
        kept(folder(tmp_path))


@pytest.mark.parametrize("name", ["UTF-16", "UTF-32"])
def test_a_byte_order_mark_says_what_a_file_is_in(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_bytes("café".encode(name))
    (tmp_path / "rows.jsonl").write_bytes('{"text": "café"}\n'.encode(name))
    told = rf"the byte order mark of {name}, which is not UTF-8\nConvert it to UTF-8, as iconv -f {name} -t UTF-8"
    with pytest.raises(DataError, match=told):
        kept(folder(tmp_path))
    with pytest.raises(DataError, match=told):
        kept(jsonl(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("name", "encoding", "said"),
    [
        ("rows.csv", "cp1252", "WINDOWS-1252"),
        ("rows.csv", "UTF-16", "UTF-16"),
        ("rows.jsonl", "cp1252", "WINDOWS-1252"),
        ("rows.json", "cp1252", "WINDOWS-1252"),
    ],
)
def test_rows_that_are_not_utf8_are_told_how_to_become_so(tmp_path: Path, name: str, encoding: str, said: str) -> None:
    text = {".csv": "text\ncafé\n", ".jsonl": '{"text": "café"}\n', ".json": '[{"text": "café"}]'}
    path = tmp_path / name
    path.write_bytes(text[path.suffix].encode(encoding))
    source = Csv(name="rows", domain="web", path=path, invalid="error") if path.suffix == ".csv" else jsonl(path)
    with pytest.raises(DataError, match=rf"not UTF-8\nConvert it to UTF-8, as iconv -f {said} -t UTF-8 does"):
        kept(source)


def test_what_is_skipped_is_counted_with_reason_and_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "binary.txt").write_bytes(b"ab\0cd")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9")
    (tmp_path / "white.txt").write_bytes(b" \n\n")
    source = folder(tmp_path, invalid="skip")
    assert [row["id"] for row in kept(source)] == ["notes/a.txt"]
    assert rejected(source) == [
        ("notes/binary.txt", "binary", 2),
        ("notes/empty.txt", "empty", 0),
        ("notes/latin.txt", "not_utf8", 6),
        ("notes/white.txt", "empty", 0),
    ]


@pytest.mark.parametrize("pack", [("rows.jsonl", bytes), ("rows.jsonl.zst", zstd), ("rows.jsonl.gz", gzip.compress)])
def test_rows_end_at_line_feeds_only(tmp_path: Path, pack: tuple[str, Callable[[bytes], bytes]]) -> None:
    texts = [ODD, "second\n\nparagraph", "x" * (3 << 20), "no end of line"]
    data = lines(*({"text": text} for text in texts)).rstrip(b"\n")
    (tmp_path / pack[0]).write_bytes(pack[1](data))
    rows = kept(jsonl(tmp_path / pack[0]))
    assert [row["text"] for row in rows] == texts
    assert [row["id"] for row in rows] == [f"rows/{pack[0]}:{number}" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("pack", [("rows.jsonl.zst", zstd), ("rows.jsonl.gz", gzip.compress)])
def test_a_torn_compressed_file_is_an_error_that_names_the_line(
    tmp_path: Path, pack: tuple[str, Callable[[bytes], bytes]]
) -> None:
    path = tmp_path / pack[0]
    texts = (hashlib.sha512(str(number).encode()).hexdigest() for number in range(8000))  # hardly compressible
    whole = pack[1](lines(*({"text": text} for text in texts)))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"(?s){pack[0]}:\d+.*ends early.*line \d+ is incomplete"):
        kept(jsonl(path))
    source = jsonl(path, invalid="skip")
    num_kept = len(kept(source))
    assert num_kept > 100
    assert rejected(source) == [(f"rows/{pack[0]}:{num_kept + 1}", "torn", num_kept + 1)]


def test_a_last_line_that_was_cut_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines({"text": "a"}) + b'{"text": "b')
    with pytest.raises(DataError, match=r"(?s)rows\.jsonl:2.*the file was cut"):
        kept(jsonl(path))


def test_wrong_rows_are_named_by_line_and_reason(tmp_path: Path) -> None:
    bad = [
        b"{broken}\n",
        b'{"text": "\xff"}\n',
        b"[1]\n",
        b'{"text": 3}\n',
        b'{"body": "x"}\n',
        b'{"text": "\\ud800"}\n',
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "ok"}\n\n' + b"".join(bad) + b'{"text": " "}\n{"text": null}\n' + b"[" * 100_000)
    found = rejected(jsonl(path, invalid="skip"))
    assert [row.rpartition(":")[2] for row, *_ in found] == ["3", "4", "5", "6", "7", "8", "9", "10", "11"]
    reasons = ["not_json", "not_utf8", "not_json", "not_text", "no_text", "not_unicode", "empty", "empty", "torn"]
    assert [reason for _, reason, _ in found] == reasons
    for number, line in enumerate(bad):
        (one := tmp_path / f"one{number}.jsonl").write_bytes(line)
        with pytest.raises(DataError, match=rf"one{number}\.jsonl:1"):
            kept(jsonl(one))


def test_a_row_keeps_its_own_id_url_and_license(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines({"key": "a1", "text": "x", "url": "http://x", "license": "MIT"}, {"key": 7, "text": "y"}))
    rows = kept(jsonl(path, id_field="key", license="CC0-1.0"))
    assert [(r["id"], r["url"], r["license"]) for r in rows] == [("a1", "http://x", "MIT"), ("7", None, "CC0-1.0")]
    path.write_bytes(lines({"text": "x"}))
    with pytest.raises(DataError, match="no id in field 'key'"):
        kept(jsonl(path, id_field="key"))


def test_wildcards_name_files_by_the_path_after_the_fixed_part(tmp_path: Path) -> None:
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "rows.jsonl").write_bytes(lines({"text": part}))
    rows = kept(jsonl(tmp_path / "*" / "rows.jsonl"))
    assert [(row["id"], row["text"]) for row in rows] == [("rows/a/rows.jsonl:1", "a"), ("rows/b/rows.jsonl:1", "b")]


def test_missing_and_empty_inputs_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        kept(jsonl(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        kept(jsonl(tmp_path))
    with pytest.raises(DataError, match="is not a folder"):
        kept(folder(tmp_path / "none"))
    for source in (folder(Path("$HOME/none")), jsonl(Path("${HOME}/none.jsonl"))):
        with pytest.raises(DataError, match=r"Write the value of \$(HOME|{HOME}): only ~ is expanded in a path"):
            kept(source)
    with pytest.raises(DataError, match="holds no file that matches"):
        kept(folder(tmp_path))
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(DataError, match="holds no rows"):
        kept(jsonl(tmp_path / "rows.jsonl"))


def test_a_link_to_nothing_is_an_error_and_a_lock_of_emacs_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / ".#a.txt").symlink_to("user@host.1234")
    (tmp_path / "b.md.orig").symlink_to("nothing")
    assert [row["text"] for row in kept(folder(tmp_path))] == ["text"]
    (tmp_path / "b.txt").symlink_to("b.txt")
    for source in (folder(tmp_path), jsonl(tmp_path / "*.txt"), jsonl(tmp_path / "**" / "*.txt")):
        with pytest.raises(DataError, match=r"b\.txt: is a link to a file that does not exist\nRestore the file"):
            digest(source)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (closed := tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scan = os.scandir

    def scandir(path: str) -> Any:
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=rf"{closed}: cannot be read: Permission denied\nMake it readable"):
        kept(folder(tmp_path))


def test_a_file_that_vanishes_after_it_was_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "files_of", lambda source: [("a.txt", tmp_path / "a.txt")])
    for use in (digest, kept):
        with pytest.raises(DataError, match=r"a\.txt: cannot be read: .*No such file"):
            use(AnyFiles(name="s", domain="d", path=tmp_path))


def test_parquet_rows_are_the_same_for_every_kind_of_string_column(tmp_path: Path) -> None:
    texts = [ODD, "", None, "plain"]
    for number, kind in enumerate((pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"text": pa.array(texts, pa.string()).cast(kind), "n": [1, 2, 3, 4]}), path)
        source = parquet(path)
        assert [row["text"] for row in kept(source)] == [ODD, "plain"]
        assert [reason for _, reason, _ in rejected(source)] == ["empty", "empty"]
        with pytest.raises(DataError, match=r"(?s)no column 'body'.*text, n"):
            kept(parquet(path, text_field="body"))
        with pytest.raises(DataError, match="holds int instead of a string"):
            kept(parquet(path, text_field="n"))


def test_a_cell_that_is_not_utf8_is_not_told_to_convert_its_file(tmp_path: Path) -> None:
    texts = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="byte offset 3 holds 0xe9, which is not UTF-8") as caught:
        kept(parquet(tmp_path / "t.parquet"))
    assert "iconv" not in caught.value.hint


def test_a_torn_parquet_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "torn.parquet"
    pq.write_table(pa.table({"text": ["x" * 1000, "y"]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"(?s)torn\.parquet:0: .*is broken from row 0 on.*set invalid = \"skip\""):
        kept(parquet(path))


def test_a_broken_parquet_file_can_be_skipped_and_what_stands_before_the_break_is_kept(tmp_path: Path) -> None:
    texts = [hashlib.sha512(str(number).encode()).hexdigest() for number in range(5000)]  # hardly compressible
    for name, damage in (("a", lambda data: b""), ("b", lambda data: data[:-20]), ("d", lambda data: b"PAR1" + data)):
        pq.write_table(pa.table({"text": texts}), path := tmp_path / f"{name}.parquet")
        path.write_bytes(damage(path.read_bytes()))
    pq.write_table(pa.table({"text": ["whole"]}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": texts}), path := tmp_path / "e.parquet", row_group_size=1000)
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + bytes(1000) + data[half + 1000 :])
    source = parquet(tmp_path / "*.parquet", invalid="skip")
    rows = kept(source)
    assert [row["text"] for row in rows if row["id"].startswith("table/c")] == ["whole"]
    before = [row["text"] for row in rows if row["id"].startswith("table/e")]
    assert before == texts[: len(before)]
    assert 1000 <= len(before) < 5000
    assert len(rows) == 1 + len(before)
    places = {"a": 0, "b": 0, "d": 0, "e": len(before)}
    assert rejected(source) == [(f"table/{name}.parquet:{at}", "torn", at) for name, at in places.items()]


def test_a_parquet_string_that_is_not_utf8_is_a_problem_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "bytes.parquet"
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"fine", b"caf\xe9"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": broken}), path)
    with pytest.raises(DataError, match=r"bytes\.parquet:1: byte offset 3"):
        kept(parquet(path))
    assert [row["text"] for row in kept(parquet(path, invalid="skip"))] == ["fine"]


def test_a_limited_folder_gives_a_sample_by_hash_that_grows_with_the_limit(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number:03d}.txt").write_text("x" * 10)
    some = [row["id"] for row in kept(folder(tmp_path, max_documents=20))]
    more = [row["id"] for row in kept(folder(tmp_path, max_bytes=405))]
    assert (len(some), len(more)) == (20, 40)
    assert more[:20] == some
    assert some != sorted(some)


def test_the_digest_follows_names_and_contents_but_not_times(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    first = digest(folder(tmp_path))
    (tmp_path / "a.txt").touch()
    (tmp_path / "other.bin").write_text("not read")
    assert digest(folder(tmp_path)) == first
    (tmp_path / "a.txt").write_text("two")
    second = digest(folder(tmp_path))
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert len({first, second, digest(folder(tmp_path))}) == 3


def test_the_standard_library_gives_code_and_docs_with_unique_ids() -> None:
    code = StandardLibrary(name="python", domain="code", subset="code", max_bytes=1_000_000)
    docs = StandardLibrary(name="help", domain="docs", subset="docs", max_bytes=300_000)
    code_rows, docs_rows = kept(code), kept(docs)
    assert sum(len(row["text"].encode()) for row in code_rows) > 800_000
    assert not any("/test" in row["id"] or "site-packages" in row["id"] for row in code_rows)
    assert all(row["license"] == "PSF-2.0" for row in code_rows + docs_rows)
    assert any(row["id"].startswith("help/topics/") for row in docs_rows)
    assert len({row["id"] for row in code_rows + docs_rows}) == len(code_rows + docs_rows)
    assert kept(docs) == docs_rows
    assert len({digest(code), digest(docs)}) == 2


def test_a_python_without_sources_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(DataError, match=r"(?s)python311\.zip.*no sources of its standard library.*kind = \"folder\""):
        digest(StandardLibrary(name="python", domain="code", subset="code"))


def test_worlds_are_what_the_generator_makes() -> None:
    source = Worlds(name="worlds", domain="stories", count=5, seed=3)
    rows = kept(source)
    assert [row["text"] for row in rows] == list(toy_worlds.documents(3, 5))
    assert [row["id"] for row in rows] == [f"worlds/{number:06d}" for number in range(5)]
    assert digest(source) == ""
    assert len(kept(Worlds(name="worlds", domain="stories", count=5, seed=3, max_documents=2))) == 2


def test_a_recipe_names_sources_by_kind() -> None:
    source = {"kind": "jsonl", "name": "a", "domain": "web", "path": "x.jsonl"}
    assert isinstance(build(Fetch, {"sources": [source]}).sources[0], Jsonl)
    with pytest.raises(ConfigError, match=r"sources\.0\.kind: 'jsonI'.*\n?.*Did you mean 'jsonl'"):
        build(Fetch, {"sources": [source | {"kind": "jsonI"}]})
    with pytest.raises(ConfigError, match="two sources have the name 'a'"):
        build(Fetch, {"sources": [source, source]})
    with pytest.raises(ConfigError, match=r"sources\.0\.name"):
        build(Fetch, {"sources": [source | {"name": "a/b"}]})


def test_a_folder_of_all_kinds_is_read_by_the_ends_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "b.jsonl").write_text('{"text": "one", "id": "own", "domain": "wiki"}\n{"text": "two"}\n')
    (tmp_path / "deep" / "c.csv").write_text("text,id\nthree,7\n")
    pq.write_table(pa.table({"text": ["four"], "id": ["x"]}), tmp_path / "deep" / "d.parquet")
    pq.write_table(pa.table({"text": ["five"]}), tmp_path / "deep" / "e.parquet")
    source = AnyFiles(name="in", domain="text", path=tmp_path)
    found = [item for item in read(source) if not isinstance(item, RejectedDocument)]
    assert {row["id"]: (row["text"], row["domain"]) for row in found} == {
        "in/a.txt": ("plain text", "text"),
        "own": ("one", "wiki"),
        "in/b.jsonl:2": ("two", "text"),
        "7": ("three", "text"),
        "x": ("four", "text"),
        "in/deep/e.parquet:0": ("five", "text"),
    }
