import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.data.documents import SCHEMA
from bloomery.data.readers.read import RejectedDocument, format_of, row_of
from bloomery.data.sources.local import AnyFiles, Csv, Folder, Jsonl, Parquet, read
from tests.data.made_poison import MOST_BYTES, POISONED_LINES, line

LINES = st.lists(st.one_of(st.text(min_size=1, max_size=20).filter(str.strip), st.sampled_from([*POISONED_LINES])))


def told(source: Any) -> list[str]:
    """Texts of documents, and reasons of what is rejected."""
    return [i.problem.reason if isinstance(i, RejectedDocument) else i["text"] for i in read(source)]


def jsonl(path: Path, **more: Any) -> Jsonl:
    return Jsonl(name="rows", domain="web", path=path, **more)


@given(LINES)
def test_of_good_and_poisoned_lines_each_is_a_document_or_is_rejected_with_its_reason(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str | bytes]
) -> None:
    good = {"\0": "binary"}
    path = tmp_path_factory.getbasetemp() / "mixed.jsonl"
    data = [one if isinstance(one, bytes) else json.dumps({"text": one}).encode() for one in lines]
    path.write_bytes(b"".join(one + b"\n" for one in data) or b"\n")
    expected = [POISONED_LINES[o] if isinstance(o, bytes) else good["\0"] if "\0" in o else o for o in lines]
    found = list(read(jsonl(path, invalid="skip", max_document_bytes=MOST_BYTES)))
    assert [i.problem.reason if isinstance(i, RejectedDocument) else i["text"] for i in found] == (
        expected or ["no_rows"]
    )
    assert [row_of(item)["id"] for item in found if lines] == [f"rows/mixed.jsonl:{n + 1}" for n in range(len(lines))]
    assert pa.Table.from_pylist([row_of(item) for item in found], schema=SCHEMA()).num_rows == len(found)


@pytest.mark.parametrize("poison", [one for one, reason in POISONED_LINES.items() if reason != "empty"])
def test_a_poisoned_line_stops_a_source_that_says_so_and_is_named(tmp_path: Path, poison: bytes) -> None:
    (path := tmp_path / "x.jsonl").write_bytes(line("good") + b"\n" + poison + b"\n")
    with pytest.raises(DataError, match=r"(?s)x\.jsonl:2: .*set invalid = \"skip\" in source 'rows'") as caught:
        told(jsonl(path, max_document_bytes=MOST_BYTES, invalid="error"))
    assert ("max_document_bytes" in str(caught.value)) == (POISONED_LINES[poison] == "too_long")


@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_a_json_file_holds_a_list_of_objects_or_a_line_for_each_and_long_elements_name_their_setting(
    tmp_path: Path, name: str
) -> None:
    pack = gzip.compress if name.endswith(".gz") else bytes
    objects = [{"text": "one"}, {"text": "two\nlines"}, {"text": "long " * 40}]
    rows = "\n".join(map(json.dumps, objects))
    for text in (json.dumps(objects, indent=1), json.dumps(objects), rows):
        (tmp_path / name).write_bytes(pack(text.encode()))
        for source in (
            jsonl(tmp_path / name, max_document_bytes=150),
            AnyFiles(name="rows", domain="web", path=tmp_path, max_document_bytes=150),
        ):
            found = list(read(source))
            assert [i["text"] for i in found if not isinstance(i, RejectedDocument)] == ["one", "two\nlines"]
            (rejected,) = (i for i in found if isinstance(i, RejectedDocument))
            assert rejected.problem.reason == "too_long"
            assert "max_document_bytes = 150" in rejected.problem.what
            assert len({row_of(item)["id"] for item in found}) == 3


def test_a_byte_that_is_not_utf_8_costs_its_own_element_of_a_list_alone(tmp_path: Path) -> None:
    elements = [json.dumps({"text": f"document {number}"}).encode() for number in range(20_000)]
    for bad in (3, 12_000):
        some = [*elements]
        some[bad] = b'{"text": "caf\xe9"}'
        (tmp_path / "x.json").write_bytes(b"[" + b",\n".join(some) + b"]")
        found = told(jsonl(tmp_path / "x.json"))
        assert found == [f"document {n}" if n != bad else "not_utf8" for n in range(20_000)]


def test_a_json_file_with_settings_stays_a_text_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text(settings := json.dumps({"name": "x", "version": "1"}, indent=2))
    (tmp_path / "rows.json").write_text(json.dumps([{"text": "one"}]))
    assert told(AnyFiles(name="rows", domain="web", path=tmp_path)) == [settings, "one"]
    (tmp_path / "package.json").write_text(" \n")
    assert told(AnyFiles(name="rows", domain="web", path=tmp_path)) == ["empty", "one"]
    (tmp_path / "package.json").write_text(settings[:-1])  # no JSON: a table with broken lines
    assert "not_json" in told(AnyFiles(name="rows", domain="web", path=tmp_path, invalid="skip"))


def test_by_default_rows_and_long_documents_are_rejected_and_files_that_are_torn_or_no_text_stop(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.jsonl").write_bytes(line("good") + b"\n" + b"\n".join(POISONED_LINES) + b"\n" + line("more") + b"\n")
    found = list(read(jsonl(tmp_path / "x.jsonl", max_document_bytes=MOST_BYTES)))
    assert [isinstance(item, RejectedDocument) for item in found] == [False, *[True] * len(POISONED_LINES), False]
    (tmp_path / "y.jsonl").write_bytes(line("good") + b'\n{"text": "cut')
    with pytest.raises(DataError, match=r"y\.jsonl:2: .*the file was cut"):
        told(jsonl(tmp_path / "y.jsonl"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("long " * MOST_BYTES)
    (tmp_path / "texts" / "b.txt").write_text("short")
    source = Folder(name="texts", domain="web", path=tmp_path / "texts", max_document_bytes=MOST_BYTES)
    assert [isinstance(item, RejectedDocument) for item in read(source)] == [True, False]
    (tmp_path / "texts" / "c.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"c\.txt: .*not UTF-8"):
        list(read(source))


def test_text_is_made_of_several_fields_by_a_template(tmp_path: Path) -> None:
    rows = [
        {"q": "Why?", "a": {"text": "So."}, "title": "T"},
        {"q": "Why?", "a": {"text": ""}},
        {"q": "Why?", "a": {"text": 3}},
        {"q": "Why?"},
    ]
    (path := tmp_path / "x.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    template = "Question: {q}\n\nAnswer: {a.text}"
    source = jsonl(path, template=template, invalid="skip")
    assert told(source) == ["Question: Why?\n\nAnswer: So.", "empty", "not_text", "no_text"]
    pq.write_table(pa.Table.from_pylist(rows[:2]), path := tmp_path / "x.parquet")
    assert told(Parquet(name="p", domain="qa", path=path, template=template)) == told(source)[:2]
    for wrong in ("no field", "{", "{}"):
        with pytest.raises(ConfigError, match="template"):
            build(Jsonl, {"name": "a", "domain": "b", "path": "x", "template": wrong})


def test_the_best_of_some_answers_is_taken_and_a_condition_may_ask_for_its_score(tmp_path: Path) -> None:
    answers = [[("a", 1), ("b", 3), ("c", 3)], [("d", 0)], [], [("e", None)], "none"]
    rows = [
        {"question": f"<p>q{n}</p>", "answers": [{"text": t, "score": s} for t, s in a] if isinstance(a, list) else a}
        for n, a in enumerate(answers)
    ]
    (path := tmp_path / "x.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    source = {
        "name": "a",
        "domain": "qa",
        "path": str(path),
        "template": "{question}: {answers.text}",
        "best": {"field": "answers", "by": "score"},
        "accept": [{"kind": "field", "field": "answers.score", "at_least": 1}],
    }
    assert told(build(Jsonl, source)) == ["<p>q0</p>: b", "accept.answers.score", "empty", "empty", "empty"]


def test_conditions_on_numbers_hold_for_the_cells_of_tables(tmp_path: Path) -> None:
    (path := tmp_path / "x.csv").write_bytes(b"text,score,kind\na,4,1\nb,2.5,1\nc,1e1,2\nd,?,1\ne,-7,1\n")
    least = {"kind": "field", "field": "score", "at_least": 3}
    kinds = {"kind": "field", "field": "kind", "one_of": [1]}
    source = {"name": "a", "domain": "web", "path": str(path), "accept": [least]}
    assert told(build(Csv, source)) == ["a", "accept.score", "c", "accept.score.missing", "accept.score"]
    assert told(build(Csv, source | {"accept": [kinds]})) == ["a", "b", "accept.kind", "d", "e"]
    named = {"kind": "field", "field": "kind", "one_of": ["2"]}
    assert told(build(Csv, source | {"accept": [named]}))[2] == "c"


def test_fields_may_hold_html(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse", reason="the extra web is not installed")
    (path := tmp_path / "x.jsonl").write_bytes(line("<p>One &amp; two</p><p>caf\u00c3\u00a9</p>") + b"\n")
    assert told(jsonl(path, markup="html", main_content=False)) == ["One & two\n\ncafé"]
    assert told(jsonl(path, markup="html", main_content=False, repair=False)) == ["One & two\n\ncafÃ©"]


def test_text_is_repaired_where_asked_for(tmp_path: Path) -> None:
    (path := tmp_path / "x.jsonl").write_bytes(line("“schÃ¶n” ﬁne &amp; l’été\u2028") + b"\n")
    assert told(jsonl(path)) == ["“schÃ¶n” ﬁne &amp; l’été\u2028"]
    assert told(jsonl(path, repair=True)) == ["“schön” ﬁne &amp; l’été\u2028"]


def test_csv_is_read_by_its_columns_and_tsv_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'\xef\xbb\xbfid,text,url\r\n7,"a\nb",http://x\r\n8\r\n')
    (tmp_path / "y.tsv.gz").write_bytes(gzip.compress(b"text\tlicense\nc\tMIT\n"))
    source = Csv(name="t", domain="web", path=tmp_path / "*", invalid="skip")
    items = list(read(source))
    assert [(i["id"], i["text"], i["url"], i["license"]) for i in items if not isinstance(i, RejectedDocument)] == [
        ("t/x.csv:2", "a\nb", "http://x", None),
        ("t/y.tsv.gz:2", "c", None, "MIT"),
    ]
    assert told(source) == ["a\nb", "not_csv", "c"]


def test_a_folder_holds_text_code_and_pages_packed_or_not(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse", reason="the extra web is not installed")
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"# Title\n"))
    (tmp_path / "c.html").write_bytes("<main><p>café</p></main>".encode("latin-1"))
    (tmp_path / "d.txt").write_bytes("café, déjà vu, crème brûlée".encode("latin-1"))
    folder = Folder(name="f", domain="web", path=tmp_path, patterns=("*",), invalid="skip")
    assert told(folder) == ["x = 1\n", "# Title\n", "café", "not_utf8"]
    found = told(folder.model_copy(update={"encoding": "detect"}))
    assert found == ["x = 1\n", "# Title\n", "café", "café, déjà vu, crème brûlée"]


def test_a_text_that_is_too_long_is_rejected_in_parquet_too(tmp_path: Path) -> None:
    texts = ["é" * 50, "x" * 101, "y" * 100]
    pq.write_table(pa.table({"text": texts}), path := tmp_path / "x.parquet")
    source = Parquet(name="p", domain="web", path=path, max_document_bytes=100, invalid="skip")
    assert told(source) == [texts[0], "too_long", texts[2]]


def test_the_format_is_told_by_the_end_of_a_name() -> None:
    names = ("a.jsonl.zst", "a.ndjson", "a.parquet", "a.csv.gz", "a.TSV", "a.warc.gz", "a.warc.wet.gz", "a.htm", "a.py")
    formats = ["jsonl", "jsonl", "parquet", "csv", "tsv", "warc", "warc", "html", "text"]
    assert [format_of(name) for name in names] == formats


def test_what_is_said_beside_the_text_can_be_poisoned_too(tmp_path: Path) -> None:
    bad = [
        json.dumps({"text": "t", "id": one, "url": "\ud800x", "license": "\udfffé"})
        for one in ("\ud800", "a\0", " ", True)
    ]
    (path := tmp_path / "x.jsonl").write_text("\n".join([*bad, bad[0].replace("\\ud800", "1", 1)]))
    items = list(read(jsonl(path, id_field="id", invalid="skip")))
    assert [item.problem.reason for item in items if isinstance(item, RejectedDocument)] == ["no_id"] * 4
    assert [(item["id"], item["url"], item["license"]) for item in items if not isinstance(item, RejectedDocument)] == [
        ("1", "?x", "?é")
    ]
    assert pa.Table.from_pylist([row_of(item) for item in items], schema=SCHEMA()).num_rows == 5


def test_a_file_with_a_separator_holds_a_document_between_every_two(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\nline\n\n\n\ntwo\n\n  \n\nthree", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\n\n", encoding="utf-8")
    source = Folder(name="f", domain="web", path=tmp_path, separator="\n\n")
    found = list(read(source))
    assert told(source) == ["one\nline", "two", "three", "empty"]
    assert [row_of(item)["id"] for item in found] == ["f/a.txt:1", "f/a.txt:2", "f/a.txt:3", "f/b.txt"]
