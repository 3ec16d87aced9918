import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.core.errors import DataError
from bloomery.data.readers import read as readers_read
from bloomery.data.readers import web
from bloomery.data.readers.bytes import ReadError
from bloomery.data.sources import local
from tests.data.made_poison import answer, record

MOST = 5_000
PAGE = b"<html><nav>menu</nav><main><p>Hello there, this is the page.</p></main></html>"
ZIPPED = "Content-Encoding: gzip\r\n"
RECORDS = [
    record("warcinfo", 1, b"software: x"),
    answer(2, PAGE, kind="text/html; charset=UTF-8"),
    record("request", 3, b"GET / HTTP/1.1\r\n\r\n"),
    answer(4, b"gone", status="404 Not Found"),
    answer(5, b"\x89PNG\0", kind="image/png"),
    answer(6, "<p>caf\xe9 cr\xe8me</p>".encode("latin-1"), kind="text/html; charset=iso-8859-1"),
    answer(7, gzip.compress(PAGE), more=ZIPPED),
    answer(8, PAGE, more=ZIPPED),
    answer(9, b"5\r\nhello\r\n6;x=y\r\n there\r\n0\r\n\r\n", kind="text/plain", more="Transfer-Encoding: chunked\r\n"),
    record("conversion", 10, "naïve text".encode()),
    answer(11, b"x" * 6_000),
    answer(12, gzip.compress(bytes(10**8)), more=ZIPPED),
    answer(13, b"?", more="Content-Encoding: br\r\n"),
    record("conversion", 14, b"x" * 2_000_000),
    record("conversion", 15, b"the last one"),
]
HEADLESS = zlib.compress(PAGE, wbits=-15)
MORE = {
    "a stream without a header": (HEADLESS, "Content-Encoding: deflate\r\n", PAGE),
    "an encoding next to none": (gzip.compress(PAGE), "Content-Encoding: gzip, identity\r\n", PAGE),
    "a charset as encoding": (PAGE, "Content-Encoding: UTF-8\r\n", PAGE),
    "a line that begins as a size": (b"Dear reader,\r\nhi", "Transfer-Encoding: chunked\r\n", b"Dear reader,\r\nhi"),
}
FOUND: list[tuple[int, bytes | str]] = [
    (2, PAGE),
    (4, "http_status"),
    (5, "not_html"),
    (6, "<p>caf\xe9 cr\xe8me</p>".encode("latin-1")),
    (7, PAGE),
    (8, PAGE),
    (9, b"hello there"),
    (10, "naïve text".encode()),
    (11, "too_long"),
    (12, "too_long"),
    (13, "not_html"),
    (14, "too_long"),
    (15, b"the last one"),
]


def read(path: Path, most: int = MOST) -> list[tuple[int, bytes | str]]:
    found = web.records(path, most)
    return [(number, one.data.reason if isinstance(one.data, ReadError) else one.data) for number, one in found]


@pytest.mark.parametrize("packed", [False, True])
def test_every_response_and_conversion_is_content_or_a_problem(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("a.warc.gz" if packed else "a.warc")
    path.write_bytes(b"".join(gzip.compress(one) if packed else one for one in RECORDS))
    assert read(path) == FOUND
    assert [record.url for _, record in web.records(path, MOST)] == [f"http://x/{number}" for number, _ in FOUND]


def test_a_crawl_cut_anywhere_gives_what_stands_before_the_cut_and_is_torn(tmp_path: Path) -> None:
    whole = b"".join(gzip.compress(one) for one in RECORDS[:9])
    path = tmp_path / "a.warc.gz"
    for size in range(10, len(whole) - 1, 97):
        path.write_bytes(whole[:size])
        *before, last = read(path)
        assert before == FOUND[: len(before)]
        assert last[1] == "torn"
    path = tmp_path / "a.warc"
    path.write_bytes(RECORDS[1] + RECORDS[3][:-30])
    assert read(path) == [(1, PAGE), (2, "torn")]


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_page_whose_content_is_cut_anywhere_is_torn_and_the_next_page_is_read(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path, packed, kind = tmp_path / "a.warc", pack(PAGE), "gzip" if pack is gzip.compress else "deflate"
    more = f"Content-Encoding: {kind}\r\n"
    for size in range(1, len(packed)):
        path.write_bytes(answer(1, packed[:size], more=more) + RECORDS[1])
        assert read(path) == [(1, "torn_page"), (2, PAGE)]
    path.write_bytes(answer(1, packed[:-3] + bytes([packed[-3] ^ 1]) + packed[-2:], more=more))
    assert read(path) == [(1, "torn_page")]
    path.write_bytes(answer(1, packed + b"\r\n", more=more))  # as browsers do, what follows is ignored
    assert read(path) == [(1, PAGE)]
    path.write_bytes(answer(1, packed, more=more))
    assert read(path, len(PAGE)) == [(1, PAGE)]
    assert read(path, len(PAGE) - 1) == [(1, "too_long")]


@pytest.mark.parametrize("name", MORE)
def test_a_header_that_is_not_quite_true_loses_no_page(tmp_path: Path, name: str) -> None:
    body, more, content = MORE[name]
    (tmp_path / "a.warc").write_bytes(answer(1, body, more=more) + RECORDS[1])
    assert read(tmp_path / "a.warc") == [(1, content), (2, PAGE)]


def test_all_members_of_gzip_are_one_page_within_one_limit(tmp_path: Path) -> None:
    path, members = tmp_path / "a.warc", b"".join(gzip.compress(PAGE[at : at + 7]) for at in range(0, len(PAGE), 7))
    path.write_bytes(answer(1, members, more=ZIPPED))
    assert read(path, len(PAGE)) == [(1, PAGE)]
    assert read(path, len(PAGE) - 1) == [(1, "too_long")]
    path.write_bytes(answer(1, members[:-3], more=ZIPPED))
    assert read(path) == [(1, "torn_page")]
    large = gzip.compress(b"x" * 3_000, compresslevel=0) * 2  # members that end within a bite
    path.write_bytes(answer(1, large, more=ZIPPED))
    assert read(path, 6_000) == [(1, b"x" * 6_000)]


def test_chunks_without_the_empty_one_that_ends_them_are_torn(tmp_path: Path) -> None:
    path, whole, more = (
        tmp_path / "a.warc",
        b"5\r\nhello\r\n6;x=y\r\n there\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n",
    )
    for size in range(3, len(whole) - 4):
        path.write_bytes(answer(1, whole[:size], kind="text/plain", more=more) + RECORDS[1])
        assert read(path) == [(1, "torn_page"), (2, PAGE)]


def test_what_is_no_record_is_told_and_the_next_record_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    wrong = [b"junk " * 9000, RECORDS[1].replace(b"Content-Length: ", b"Content-Length: -"), b"\n\r\n\n"]
    path.write_bytes(wrong[0] + b"\n" + RECORDS[1] + wrong[1] + wrong[2] + RECORDS[9])
    found = read(path)
    assert [item for item in found if item[1] != "not_warc"] == [(2, PAGE), (4, "naïve text".encode())]
    path.write_bytes(b"junk\n" * 9)
    assert read(path) == [(1, "not_warc")]
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "none.warc")


def test_a_crawl_is_a_source_of_the_text_of_its_pages(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse", reason="the extra web is not installed")
    path = tmp_path / "a.warc"
    path.write_bytes(b"".join(RECORDS))
    source = local.Warc(name="crawl", domain="web", path=path, max_document_bytes=MOST, invalid="skip")
    items = list(local.read(source))
    texts = {
        item["id"]: (item["text"], item["url"]) for item in items if not isinstance(item, readers_read.RejectedDocument)
    }
    page = "Hello there, this is the page."
    assert texts == {
        "crawl/a.warc:2": (page, "http://x/2"),
        "crawl/a.warc:6": ("café crème", "http://x/6"),
        "crawl/a.warc:7": (page, "http://x/7"),
        "crawl/a.warc:8": (page, "http://x/8"),
        "crawl/a.warc:9": ("hello there", "http://x/9"),
        "crawl/a.warc:10": ("naïve text", "http://x/10"),
        "crawl/a.warc:15": ("the last one", "http://x/15"),
    }
    assert len(items) == len(FOUND)
    path.write_bytes(b"".join(RECORDS[:10]))
    assert len(list(local.read(source.model_copy(update={"invalid": "error"})))) == 8
    path.write_bytes(answer(1, gzip.compress(PAGE)[:-9], more=ZIPPED) + RECORDS[1])
    torn, read_next = local.read(source.model_copy(update={"invalid": "skip_rows"}))  # a page, and not the file
    assert isinstance(torn, readers_read.RejectedDocument)
    assert not isinstance(read_next, readers_read.RejectedDocument)
    with pytest.raises(DataError, match="its compressed content ends early"):
        list(local.read(source.model_copy(update={"invalid": "error"})))
