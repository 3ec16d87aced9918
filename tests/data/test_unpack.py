import bz2
import gzip
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.data.readers import bytes as readers_bytes
from bloomery.data.readers.bytes import ReadError
from bloomery.data.readers.read import RejectedDocument
from bloomery.data.sources import local
from tests.data import made_poison

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def joined(path: Path) -> bytes:
    return b"".join(chunk for chunk in readers_bytes.chunks(path) if isinstance(chunk, bytes))


@pytest.mark.parametrize("suffix", PACKERS)
def test_what_is_unpacked_is_what_was_packed_frame_after_frame(tmp_path: Path, suffix: str) -> None:
    parts = [b"", b"a", bytes(readers_bytes.CHUNK_BYTES), b"<div>" * 200_000, b"end\n"]
    (path := tmp_path / f"x{suffix}").write_bytes(b"".join(PACKERS[suffix](part) for part in parts))
    assert joined(path) == b"".join(parts)


def uncompressed(lines: list[bytes]) -> bool:
    return readers_bytes.compressed(b"\n".join(lines)) is None


LINES = st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line)).filter(uncompressed)


@given(LINES, st.sampled_from(sorted(PACKERS)))
def test_lines_are_what_stands_between_line_feeds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"lines{suffix}"
    path.write_bytes(PACKERS[suffix](b"\n".join(lines)))
    found = list(readers_bytes.lines(path))
    assert b"".join(line for _, line in found if isinstance(line, bytes)) == b"\n".join(lines)
    assert [number for number, _ in found] == list(range(1, len(found) + 1))
    filled = [number for number, line in found if line != b"\n"]
    assert [number for number, _ in readers_bytes.lines(path, blank=False)] == filled


@given(st.lists(st.integers(0, 60), max_size=8), st.integers(1, 40))
def test_a_line_that_is_too_long_is_counted_and_the_next_one_is_read(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], most: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "long"
    path.write_bytes(b"".join(b"x" * size + b"\n" for size in sizes))
    found = [line.value if isinstance(line, ReadError) else -len(line) for _, line in readers_bytes.lines(path, most)]
    assert found == [size + 1 if size + 1 > most else -size - 1 for size in sizes]


def test_a_file_is_read_whole_up_to_a_limit(tmp_path: Path) -> None:
    for suffix, pack in PACKERS.items():
        (path := tmp_path / f"x{suffix}").write_bytes(pack(b"y" * 1000))
        assert readers_bytes.whole(path, 1000) == b"y" * 1000
        assert isinstance(found := readers_bytes.whole(path, 999), ReadError)
        assert (found.reason, found.value) == ("too_long", 1000)
        assert found.what.endswith("1,000 bytes, more than max_document_bytes = 999")
    with pytest.raises(DataError, match=r"none: cannot be read"):
        readers_bytes.whole(tmp_path / "none", 10)


@pytest.mark.parametrize(
    ("program", "pack", "hint"),
    [
        ("gzip", gzip.compress, "end in .gz"),
        ("zstd", PACKERS[".zst"], "end in .zst"),
        ("xz", lzma.compress, "Decompress"),
        ("bzip2", bz2.compress, "Decompress"),
        ("zip", b"PK\x03\x04".__add__, "Word and EPUB"),
    ],
)
def test_a_compressed_file_that_is_not_unpacked_stops_the_run(
    tmp_path: Path, program: str, pack: Callable[[bytes], bytes], hint: str
) -> None:
    for name, source in (("a.jsonl", local.Jsonl), ("a.csv", local.Csv), ("a.txt.GZ", local.AnyFiles)):
        (path := tmp_path / name).write_bytes(pack(b'{"text": "a"}\n' * 9))
        with pytest.raises(DataError, match=f"(?s)compressed with {program}, .*{hint}"):
            list(local.read(source(name="s", domain="d", path=path)))
        (item,) = local.read(source(name="s", domain="d", path=path, invalid="skip"))
        assert isinstance(item, RejectedDocument)
        assert item.problem.reason == "compressed"


CHILD = """
import resource, sys
from pathlib import Path
from bloomery.data.readers import bytes, read
from bloomery.data.sources import local
if not Path(sys.argv[1]).name.startswith("line"):
    bytes.BOMB_BYTES = 2**26  # a smaller bomb is made in less time
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
make = local.Folder if sys.argv[2] == "folder" else local.Jsonl
path = Path(sys.argv[1]) if sys.argv[2] == "jsonl" else Path(sys.argv[1]).parent
more = {"patterns": ("*",)} if sys.argv[2] == "folder" else {}
for item in local.read(make(name="a", domain="b", path=path, invalid="skip", max_document_bytes=2**22, **more)):
    print(item.problem.reason if isinstance(item, read.RejectedDocument) else item["text"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is counted in KiB on Linux only")
@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("line.jsonl", "jsonl", ["good", "too_long", "good"]),
        ("line.jsonl.zst", "jsonl", ["good", "too_long", "good"]),
        ("bomb.jsonl.zst", "jsonl", ["bomb"]),
        ("breaks.jsonl.zst", "jsonl", ["bomb"]),
        ("bomb.jsonl.gz", "jsonl", ["bomb"]),
        ("bomb.txt.zst", "folder", ["too_long"]),
        ("text.txt", "folder", ["too_long"]),
    ],
)
def test_a_line_of_100_mb_and_a_bomb_are_rejected_within_little_memory(
    tmp_path: Path, name: str, kind: str, told: list[str]
) -> None:
    path = tmp_path / name
    good = made_poison.line("good") + b"\n"
    if name.startswith("bomb") and name.endswith(".gz"):
        made_poison.gzip_bomb(path, 2**27)
    elif not name.startswith(("line", "text")):
        made_poison.zstd_bomb(path, 2**27, b"\n" if name.startswith("breaks") else b"\0")
    else:
        data = good + b'{"text": "' + b"x" * 10**8 + b'"}\n' + good
        path.write_bytes(PACKERS[".zst"](data) if path.suffix == ".zst" else data)
        del data
    done = subprocess.run([sys.executable, "-c", CHILD, str(path), kind], capture_output=True, text=True, check=True)
    *lines, grown = done.stdout.split()
    assert lines == told
    # 4 MiB of document, 32 MiB that one bite of zstd can unpack to, and what joins them
    assert int(grown) < 120 * 1024, f"{int(grown) / 1024:.0f} MiB"


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(st.binary(max_size=12).map(lambda one: one.replace(b"\n", b"")), max_size=30).filter(uncompressed),
    st.booleans(),
    st.data(),
)
def test_spans_are_the_file_cut_at_line_ends_with_the_numbers_of_its_lines(
    tmp_path_factory: pytest.TempPathFactory, found: list[bytes], ended: bool, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("spans") / "a.jsonl"
    path.write_bytes(b"\n".join(found) + b"\n" * ended)
    span_bytes = data.draw(st.integers(1, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers_bytes, "CHUNK_BYTES", data.draw(st.integers(1, 50)))
        spans = readers_bytes.spans(path, span_bytes)
        parts = [list(readers_bytes.lines(path, span=span)) for span in spans]
        assert [one for part in parts for one in part] == list(readers_bytes.lines(path))
    assert [span.begin for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == path.stat().st_size
    assert len(spans) <= max(1, path.stat().st_size // span_bytes)
    assert all(span.end > span.begin for span in spans) or path.stat().st_size == 0
