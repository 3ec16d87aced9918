import json
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.shards import format

TOKENIZER = "a" * 64


def independent(path: Path) -> tuple[int, int, int, list[int]]:
    """Magic, version, count and tokens, read as llm.c reads them (dev/data/data_common.py; llmc/dataloader.h)."""
    data = path.read_bytes()
    header = struct.unpack("<256i", data[:1024])
    kind = {20240520: "H", 20240801: "I"}[header[0]]
    assert set(header[3:]) == {0}
    return header[0], header[1], header[2], list(struct.unpack(f"<{header[2]}{kind}", data[1024:]))


def write(folder: Path, tokens: list[int], vocab_size: int = 1000, mask: list[int] | None = None) -> Path:
    path = folder / "train-00000"
    marks = None if mask is None else np.array(mask, dtype=np.uint8)
    format.write(
        path,
        np.array(tokens, dtype=np.int64),
        vocab_size=vocab_size,
        starts=[0] if tokens else [],
        tokenizer_hash=TOKENIZER,
        mask=marks,
        facts={"document_id": 0},
    )
    return path


@pytest.mark.parametrize(
    ("vocab_size", "magic", "version", "width"),
    [(300, 20240520, 1, 2), (65536, 20240520, 1, 2), (65537, 20240801, 7, 4), (200_000, 20240801, 7, 4)],
)
@settings(max_examples=15)  # each waits for the disk
@given(data=st.data())
def test_a_token_file_is_read_by_another_reader_and_by_this_one(
    tmp_path_factory: pytest.TempPathFactory, vocab_size: int, magic: int, version: int, width: int, data: Any
) -> None:
    tokens = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=30)) + data.draw(
        st.sampled_from([[], [vocab_size - 1]])
    )
    path = write(tmp_path_factory.mktemp("shard"), tokens, vocab_size)
    file = path.with_suffix(".bin")
    assert independent(file) == (magic, version, len(tokens), tokens)
    assert file.stat().st_size == 1024 + width * len(tokens)
    shard = format.read(path, tokenizer_hash=TOKENIZER, verify=True)
    assert shard.tokens.tolist() == tokens
    assert shard.tokens.dtype == np.dtype(f"<u{width}")
    assert shard.mask is None


def test_a_file_that_llm_c_wrote_is_read(tmp_path: Path) -> None:
    """As its own writer does it: header and tokens by numpy, no index."""
    tokens = np.arange(500, dtype=np.uint16) * 131
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(tokens)
    with (tmp_path / "theirs.bin").open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.tobytes())
    assert np.array_equal(format.read_tokens(tmp_path / "theirs.bin"), tokens)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 1)), max_size=30))
def test_masks_and_facts_come_back(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]]) -> None:
    folder = tmp_path_factory.mktemp("shard")
    path = write(folder, [token for token, _ in pairs], mask=[marked for _, marked in pairs])
    shard = format.read(path, verify=True)
    assert shard.mask is not None
    assert shard.mask.tolist() == [marked for _, marked in pairs]
    assert (folder / "train-00000.mask").read_bytes() == bytes(marked for _, marked in pairs)
    assert shard.index["document_id"] == 0
    assert shard.index["tokens"] == len(pairs)
    assert set(shard.index["sha256"]) == {"train-00000.bin", "train-00000.mask"}


@settings(max_examples=20)
@given(st.lists(st.lists(st.lists(st.integers(0, 70_000), min_size=1, max_size=6), max_size=4), max_size=4))
def test_a_shard_in_pieces_is_the_shard_at_once(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[list[list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    documents = [document for piece in pieces for document in piece]
    made = [end_to_end(piece) for piece in pieces]
    whole, starts = end_to_end(documents)
    known: dict[str, Any] = {"vocab_size": 70_001, "tokenizer_hash": TOKENIZER, "facts": {"document_id": 0}}
    format.write_pieces(folder / "train-00000", made, num_tokens=len(whole), **known)
    (folder / "other").mkdir()
    format.write(folder / "other" / "train-00000", whole, starts=starts.tolist(), **known)
    for name in ("train-00000.bin", "train-00000.json"):
        assert (folder / name).read_bytes() == (folder / "other" / name).read_bytes()
    shard = format.read(folder / "train-00000", verify=True)
    bounds = [*shard.starts.tolist(), len(shard.tokens)]
    assert [shard.tokens[start:end].tolist() for start, end in pairwise(bounds)] == documents
    with pytest.raises(ValueError, match=f"were given for a shard of {len(whole) + 1}"):
        format.write_pieces(folder / "train-00001", made, num_tokens=len(whole) + 1, **known)
    assert not (folder / "train-00001.bin").exists()


def end_to_end(documents: list[list[int]]) -> tuple[Any, Any]:
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    return np.array([token for document in documents for token in document], dtype=np.int64), (
        np.cumsum(lengths) - lengths
    )


def test_a_token_outside_of_the_vocabulary_is_never_written(tmp_path: Path) -> None:
    for tokens in ([1, 2, 300], [-1]):
        with pytest.raises(ValueError, match="outside the vocabulary of 300"):
            write(tmp_path, tokens, vocab_size=300)
    with pytest.raises(ValueError, match="2 marks of a mask for 3 tokens"):
        write(tmp_path, [1, 2, 3], mask=[1, 1])
    assert list(tmp_path.iterdir()) == []


def test_the_shards_of_a_split_come_in_order(tmp_path: Path) -> None:
    for name in ("val-00000", "train-00010", "train-00002", "train-00001"):
        (tmp_path / f"{name}.bin").touch()
    (tmp_path / "train-00003.bin.partial").touch()
    found = [path.name for path in format.names(tmp_path, "train")]
    assert found == ["train-00001", "train-00002", "train-00010"]


# --- damage --------------------------------------------------------------------------------------------------------


def patch(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        file = folder / f"train-00000.{name}"
        file.write_bytes(change(file.read_bytes()))

    return do


def header(place: int, value: int) -> Callable[[bytes], bytes]:
    return lambda data: data[: 4 * place] + struct.pack("<i", value) + data[4 * place + 4 :]


def index(**changes: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        facts = json.loads(data) | changes
        return json.dumps({key: value for key, value in facts.items() if value is not None}).encode()

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / f"train-00000.{name}").unlink()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "torn": (patch("bin", lambda data: data[:-1]), r"\.bin: has 1223 bytes, but 100 tokens need 1224"),
    "torn by whole tokens": (patch("bin", lambda data: data[:-20]), r"\.bin: has 1204 bytes, but 100 tokens need 1224"),
    "too long": (patch("bin", lambda data: data + b"\0\0"), r"\.bin: has 1226 bytes, but 100 tokens need 1224"),
    "no header": (patch("bin", lambda data: data[:1000]), r"\.bin: has 1000 bytes, less than a header of 1024"),
    "empty": (patch("bin", lambda data: b""), r"\.bin: has 0 bytes"),
    "missing": (remove("bin"), r"\.bin: is missing"),
    "another magic": (patch("bin", header(0, 20240521)), r"\.bin: begins with 20240521 and 1, which is no token file"),
    "another version": (patch("bin", header(1, 7)), r"\.bin: begins with 20240520 and 7, which is no token file"),
    "another count": (patch("bin", header(2, 99)), r"\.bin: has 1224 bytes, but 99 tokens need 1222"),
    "a negative count": (patch("bin", header(2, -1)), r"\.bin: has 1224 bytes"),
    "another count in the index": (patch("json", index(tokens=99)), r"\.bin: holds 100 tokens, but its index says 99"),
    "no index": (remove("json"), r"\.json: the shard has no index.*The shard is incomplete"),
    "a torn index": (patch("json", lambda data: data[:50]), r"\.json: cannot be read: "),
    "an index of something else": (
        patch("json", lambda data: b"[]"),
        r"\.json: cannot be read: .* should be a valid dictionary",
    ),
    "an index without a hash": (patch("json", index(tokenizer=None)), r"\.json: cannot be read: tokenizer: "),
    "an index that is a number": (patch("json", lambda data: b"5"), r"\.json: cannot be read"),
    "an index that is nested without end": (
        patch("json", lambda data: b"[" * 100_000),
        r"\.json: cannot be read",
    ),
    "an index whose count is text": (
        patch("json", index(tokens="100")),
        r"\.json: cannot be read: tokens: input should be",
    ),
    "an index whose hashes are a list": (patch("json", index(sha256=[1])), r"\.json: cannot be read: sha256: "),
    "an index whose tokenizer is a number": (patch("json", index(tokenizer=5)), r"\.json: cannot be read: tokenizer: "),
    "an index whose edges are a number": (patch("json", index(edges=5)), r"\.json: cannot be read: edges: "),
    "an index whose layout is unknown": (patch("json", index(layout="x")), r"\.json: cannot be read: layout: "),
    "an index of a file elsewhere": (
        patch("json", index(sha256={"train-00000.bin": "a", "/dev/zero": "b"})),
        r"\.json: cannot be read: sha256\./dev/zero",
    ),
    "edges of a file elsewhere": (patch("json", index(edges={"../x": "b"})), r"\.json: cannot be read: edges\.\.\./x"),
    "starts that are text": (patch("json", index(starts=["a"])), r"\.json: cannot be read: starts"),
    "starts that are a number": (patch("json", index(starts=5)), r"\.json: cannot be read: starts"),
    "starts that are fractions": (patch("json", index(starts=[0.5])), r"\.json: cannot be read: starts"),
    "starts of no number of bits": (
        patch("json", index(starts=[10**30])),
        r"\.json: cannot be read: an integer has 31 digits",
    ),
    "a start behind the end": (patch("json", index(starts=[0, 101])), r"\.json: is not an index: starts"),
    "a negative start": (patch("json", index(starts=[-1, 5])), r"\.json: cannot be read: starts"),
    "starts out of order": (patch("json", index(starts=[0, 9, 5])), r"\.json: is not an index: starts"),
    "another tokenizer": (
        patch("json", index(tokenizer="b" * 64)),
        r"\.bin: was made with tokenizer bbbbbbbb, not a",
    ),
    "a short mask": (patch("mask", lambda data: data[:-1]), r"\.mask: masks 99 tokens of 100"),
    "a long mask": (patch("mask", lambda data: data + b"\1"), r"\.mask: masks 101 tokens of 100"),
    "an empty mask": (patch("mask", lambda data: b""), r"\.mask: masks 0 tokens of 100"),
    "no mask": (remove("mask"), r"\.mask: is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_damage_is_refused_and_names_the_file(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, list(range(100)), mask=[1] * 100)
    do, told = DAMAGE[kind]
    do(tmp_path)
    with pytest.raises(DataError, match=f"(?s){tmp_path}/train-00000{told}") as caught:
        format.read(path, tokenizer_hash=TOKENIZER)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["bin", "mask"])
def test_a_flipped_bit_is_found_at_once_at_the_edges_and_elsewhere_when_looked_for(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format, "EDGE_BYTES", 20)
    path = write(tmp_path, list(range(100)), mask=[1] * 100)
    file = tmp_path / f"train-00000.{name}"
    whole = file.read_bytes()
    for spot in range(1024 if name == "bin" else 0, len(whole), 7):
        file.write_bytes(whole[:spot] + bytes([whole[spot] ^ 1]) + whole[spot + 1 :])
        if 20 <= spot < len(whole) - 20:
            format.read(path, tokenizer_hash=TOKENIZER)
            told = "has a sha256 that differs from its index"
        else:
            told = "begins or ends with bytes that differ from its index"
        with pytest.raises(DataError, match=rf"{path}\.{name}: {told}"):
            format.read(path, tokenizer_hash=TOKENIZER, verify=True)
    file.write_bytes(whole)
    format.read(path, verify=True)


@pytest.mark.parametrize("endings", [(".bin",), (".bin", ".json"), (".json",)])
def test_shards_of_one_size_that_have_changed_places_are_refused_by_name(
    tmp_path: Path, endings: tuple[str, ...]
) -> None:
    for number in (0, 1):
        tokens = np.arange(100 * number, 100 * number + 100)
        path = tmp_path / f"train-{number:05d}"
        format.write(path, tokens, vocab_size=1000, starts=[0], tokenizer_hash=TOKENIZER)
    for ending in endings:
        one, other = (tmp_path / f"train-0000{number}{ending}" for number in (0, 1))
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)
    for number in (0, 1):
        with pytest.raises(DataError, match=rf"train-0000{number}\.(bin|json): (begins or ends|is the index of)"):
            format.read(tmp_path / f"train-0000{number}")


def test_an_earlier_index_does_not_vouch_for_a_shard_that_is_being_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, list(range(100)))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(format, "_write_index", die)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, list(range(100, 200)))
    with pytest.raises(DataError, match="the shard has no index"):
        format.read(path)
