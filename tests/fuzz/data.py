"""Documents and conversations in every format that is read, and parquet, whose reader may not survive what it reads."""

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import strategies as st

from bloomery.core import io as core_io
from bloomery.data.chat import readers
from bloomery.data.chat.formats import RejectedRow
from bloomery.data.chat.preferences import PairFiles, judged
from bloomery.data.chat.readers import ChatFiles
from bloomery.data.readers import read
from bloomery.data.sources import local
from bloomery.data.sources.local import AnyFiles
from bloomery.stages import instruct
from bloomery.stages.config import Instruct
from tests.data.made_poison import answer, record
from tests.fuzz.mutation import VALUES, bytes_like, changed, named, split, written
from tests.fuzz.outcome import RefusedError, Target, WrongError, command
from tests.tokenizer.made import small

ONE_IN = 100
"""Of the inputs that are read, so many go through a whole stage too."""
TEXT = "A lamp stands upstairs, and Mia took it to the kitchen. "
ROWS: list[Any] = [
    {"id": "a", "text": TEXT, "url": "http://x/", "domain": "d"},
    {"text": TEXT * 3, "license": "MIT", "answers": [{"body": "x", "score": 3}]},
    {"id": 7, "text": "zwölf Boxkämpfer\n😀"},
]
TALK = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "Here."}]
TALKS: list[list[Any]] = [
    [{"messages": [{"role": "system", "content": "Be brief."}, *TALK]}, {"messages": TALK * 3}],
    [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}],
    [{"instruction": "Add", "input": "1 2", "output": "3"}, {"instruction": "Add", "input": "", "output": "0"}],
    [{"question": "Why?", "answer": "So."}],
    [
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"prompt": TALK[:1], "completion": TALK[1:]},
    ],
    [{"text": "User: Hi\nAssistant: Hello"}],
    [
        {"message_id": "a", "parent_id": None, "role": "prompter", "text": "Hi"},
        {"message_id": "b", "parent_id": "a", "role": "assistant", "text": "Hello"},
    ],
]
PAGE = b"<html><head><title>t</title></head><body><nav>menu</nav><main><p>Hello &amp; bye</p></main></body></html>"
CRAWL = record("warcinfo", 1, b"x: y") + answer(2, PAGE) + record("conversion", 3, TEXT.encode())
TABLE = b'id,text,url\r\n1,"a, ""quoted"" text\nof two lines",http://x/\r\n2,second,\r\n'

PACKED = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def lines(rows: Any) -> bytes:
    return b"".join(written(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def documents(folder: Path) -> Target:
    rows = st.builds(changed, st.just(ROWS), st.integers(0, 2**62), VALUES).map(lines)
    plain = {
        ".jsonl": st.one_of(rows, bytes_like([lines(ROWS)])),
        ".txt": bytes_like([TEXT.encode(), "Größe\r\n東京".encode(), b""]),
        ".md": bytes_like([b"# A title\n\n* one\n* two\n"]),
        ".html": bytes_like([PAGE, b"<p>" * 50 + b"deep", "<meta charset=utf-16><p>ä".encode()]),
        ".warc": bytes_like([CRAWL]),
        ".wet": bytes_like([record("conversion", 1, TEXT.encode())]),
        ".csv": bytes_like([TABLE]),
        ".tsv": bytes_like([TABLE.replace(b",", b"\t")]),
    }
    intact = {f"{name}{end}": inner.map(PACKED[end]) for name, inner in plain.items() for end in PACKED}
    torn = {
        f"{name}{end}": bytes_like([PACKED[end](data)])
        for name, data in ((".jsonl", lines(ROWS)), (".warc", CRAWL), (".csv", TABLE), (".txt", TEXT.encode()))
        for end in PACKED
    }
    names = [*plain, *intact]

    def attempt(data: bytes, work: Path) -> None:
        name, body = split(data, names)
        (path := work / f"in{name}").write_bytes(body)
        source = AnyFiles(name="s", domain="d", path=path, invalid="skip")
        found = list(local.read(source))
        kept = sum(not isinstance(item, read.RejectedDocument) for item in found)
        expected = _lines_of(body) if name == ".jsonl" else 1 if name in (".txt", ".md", ".html") else len(found)
        _same_rows(expected, len(found), name)
        if zlib.crc32(data) % ONE_IN == 0:
            _filtered(path, work, len(found), kept)

    return Target(st.one_of(named(plain), named(plain), named(intact), named(torn)), attempt)


def _lines_of(body: bytes) -> int:
    """Lines that hold something; a file of none is one row, which says so."""
    return max(1, sum(1 for line in body.split(b"\n") if line.strip()))


def _same_rows(expected: int, found: int, what: str) -> None:
    if expected != found:
        raise WrongError("lost", f"{expected} rows in, {found} rows out", f"rows of {what}")


def _filtered(path: Path, work: Path, rows: int | None, kept: int | None) -> None:
    """What `bloomery data filter` says of a file, against what its reader gives and what it writes."""
    out = work / "out"
    told = json.loads(command("data", "filter", path, "--out", out, "--workers", "1", "--json", "rules=[]"))
    _same_rows(told["documents"], told["kept"] + told["dropped"], "data filter")
    for name in ("kept", "dropped"):
        held = sum(pq.read_metadata(file).num_rows for file in (out / name).glob("*.parquet"))
        _same_rows(told[name], held, f"{name}/")
    if rows is not None and kept is not None:
        # of documents with one id, all but the first are dropped
        _same_rows(rows, told["documents"], "data filter")
        if told["kept"] > kept:
            raise WrongError("lost", f"{kept} documents are read, {told['kept']} are kept", "data filter")


def conversations(folder: Path) -> Target:
    rows = st.builds(changed, st.sampled_from(TALKS), st.integers(0, 2**62), VALUES)
    whole = [lines(talk) for talk in TALKS]
    plain = {
        ".jsonl": st.one_of(rows.map(lines), bytes_like(whole)),
        ".json": st.one_of(rows.map(written), bytes_like([written(talk) for talk in TALKS])),
        ".txt": bytes_like([b"User: Hi\nAssistant: Hello\nUser: So?\nAssistant: Yes"]),
    }
    intact = {f"{name}{end}": inner.map(PACKED[end]) for name, inner in plain.items() for end in PACKED}
    torn = {f".jsonl{end}": bytes_like([PACKED[end](data) for data in whole]) for end in PACKED}
    stage = _Instruct(folder)

    def attempt(data: bytes, work: Path) -> None:
        name, body = split(data, [*plain, *intact])
        (path := work / f"in{name}").write_bytes(body)
        found = list(readers.conversations([ChatFiles(name="s", path=path)]))
        if name == ".jsonl" and not any(getattr(item, "group", "") for item in found):
            trees = any(isinstance(item, RejectedRow) and item.row is None for item in found)
            _same_rows(_lines_of(body) if body.strip() else 0, len(found), name) if not trees else None
        for item in found:
            if not isinstance(item, RejectedRow) and any("\0" in message["content"] for message in item.messages):
                raise WrongError("absurd", f"a message holds a NUL: {item.messages!r:.200}", "NUL in a message")
        list(judged([PairFiles(name="s", path=path)]))
        if zlib.crc32(data) % ONE_IN == 0:
            stage.run(path, work)

    return Target(st.one_of(named(plain), named(plain), named(intact), named(torn)), attempt)


class _Instruct:
    """The stage `instruct` with a small tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.inputs = {"tokenizer": folder / "tokenizer", "synthesize": folder / "synthesize"}
        for made in self.inputs.values():
            made.mkdir()
        small().save(self.inputs["tokenizer"])
        (self.inputs["synthesize"] / "conversations.jsonl").write_text("")

    def run(self, path: Path, work: Path) -> None:
        (out := work / "out").mkdir()
        settings = Instruct(sources=(ChatFiles(name="s", path=path),), sequence_length=65, val_fraction=0.5)
        instruct.external_inputs(settings)
        told = instruct.run(settings, self.inputs, out)
        _same_rows(told["read"], told["conversations"] + told["rejected"] + told["dropped"], "instruct")
        _same_rows(told["rejected"], (out / "rejected.jsonl").read_text().count("\n"), "rejected.jsonl")


def parquet(folder: Path) -> Target:
    tables = {
        "documents.parquet": pa.table({"id": ["a", "b"], "text": [TEXT, "two"], "n": [1, 2], "l": [[1.5], []]}),
        "conversations.parquet": pa.table({"messages": [TALK, TALK * 2], "id": ["x", None]}),
    }
    stage = _Instruct(folder)

    def attempt(data: bytes, work: Path) -> None:
        name, body = split(data, list(tables))
        (path := work / name).write_bytes(body)
        try:
            if name == "documents.parquet":
                _filtered(path, work, None, None)
            else:
                stage.run(path, work)
        except RefusedError as refused:
            if name not in str(refused) and "gave no documents" not in str(refused):
                raise WrongError("absurd", f"no name of a file in: {refused}", "parquet without its name") from None
            raise

    return Target(named({name: bytes_like([_parquet(table)]) for name, table in tables.items()}), attempt)


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    assert core_io.sha256_bytes(buffer.getvalue())
    return buffer.getvalue()
