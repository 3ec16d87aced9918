import gzip
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.data.readers import rows
from bloomery.data.readers.rows import ReadError


def texts(path: Path) -> list[str]:
    return [row["text"] for _, row in rows.jsonl(path) if not isinstance(row, ReadError)]


def test_a_compressed_file_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    a, b = b'{"text": "a"}\n', b'{"text": "b"}\n'
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(pack(a) + pack(b))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(a) + gzip.compress(b) + bytes(500))
    assert texts(tmp_path / "a.jsonl.zst") == texts(tmp_path / "a.jsonl.gz") == ["a", "b"]


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_a_file_that_is_not_what_its_name_says_is_torn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b'{"text": "plain"}\n')
    [(number, found)] = list(rows.jsonl(path))
    assert number == 1
    assert isinstance(found, ReadError)
    assert found.reason == "torn"


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        list(rows.jsonl(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"none\.parquet: cannot be read"):
        list(rows.parquet(tmp_path / "none.parquet", ["text"]))


@given(st.binary(max_size=40))
def test_bytes_are_their_text_or_a_problem_at_the_first_wrong_byte(data: bytes) -> None:
    found = rows.decode(data)
    if isinstance(found, str):
        assert found.encode() == data.removeprefix(b"\xef\xbb\xbf")
    elif found.reason == "binary":
        assert data[int(found.value)] == 0
    else:
        assert found.reason == "not_utf8"
        data[: int(found.value)].decode()
