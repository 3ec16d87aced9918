"""The compiled library computes what numpy does, number for number; without a compiler there is nothing to compare."""

import ctypes
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core import io as core_io
from bloomery.core import native
from bloomery.data.dedup import hashing, minhash
from bloomery.data.dedup.hashing import ShingleKind, Shingles, jaccard, shingle_set
from bloomery.data.dedup.minhash import MinHashSettings, PackedTexts, minhash_signatures
from bloomery.data.documents import batched_by_size
from bloomery.data.executor import Part

LETTERS = st.sampled_from([*"aAbB1_ \n\t.,-'é\u0307ΣσςİiΑ東京が\u0085\u2028\x00ﬁ\ud800\udfff\U0010ffff", "😀"])
TEXTS = st.lists(st.text(LETTERS | st.characters(exclude_categories=[]), max_size=60), min_size=1, max_size=6)
KINDS = st.sampled_from(["words", "characters"])


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = native.library("text")
    if found is None:
        pytest.skip(f"the library of texts is not there: {native.state('text')}")
    return found


def same(one: Shingles, two: Shingles) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, two, strict=True))


@given(TEXTS, KINDS, st.integers(1, 9))
def test_shingles_and_digests_equal_those_of_numpy(
    library: ctypes.CDLL, texts: list[str], kind: ShingleKind, size: int
) -> None:
    assert same(
        minhash.native_shingles(library, PackedTexts.of(texts), kind, size), hashing.shingles(texts, kind, size)
    )


@pytest.mark.parametrize("piece", [6, 100, 2**20])
def test_a_long_text_is_cut_in_the_same_places(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(hashing, "LARGEST_PIECE", piece)
    rng = random.Random(piece)
    for spaces in ("", " ", "\n" * 40):
        text = "".join(rng.choices("abcΣİ東." + spaces, k=3000))
        for size in (1, 5):
            found = minhash.native_shingles(library, PackedTexts.of([text]), "words", size)
            assert same(found, hashing.shingles([text], "words", size))


def test_every_code_point_is_read_alike(library: ctypes.CDLL) -> None:
    texts = ["".join(map(chr, range(begin, begin + 0x1000))) for begin in range(0, 0x110000, 0x1000)]
    for kind in ("words", "characters"):
        for block in batched_by_size(texts, hashing.CHARACTERS_PER_BLOCK):
            found = minhash.native_shingles(library, PackedTexts.of(block), kind, 1)
            assert same(found, hashing.shingles(block, kind, 1))


@given(st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=200), min_size=1, max_size=5))
def test_minima_sets_and_jaccards_equal_those_of_numpy(library: ctypes.CDLL, lists: list[list[int]]) -> None:
    arrays = [np.array(one, np.uint64) for one in lists]
    bounds = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    found = Shingles(np.concatenate(arrays), bounds, np.zeros((0, 2), np.uint64))
    for num_perm in (1, 6, 112):
        settings = MinHashSettings(num_perm=num_perm, num_bands=1, seed=num_perm)
        assert np.array_equal(minhash.native_signatures(library, found, settings), minhash_signatures(found, settings))
    sets, sizes = minhash.native_sets(library, found)
    expected = [shingle_set(one) for one in arrays]
    assert sizes.tolist() == [len(one) for one in expected]
    assert np.array_equal(sets, np.concatenate(expected))
    for other in expected:
        assert minhash.native_jaccard(library, expected[0], other) == jaccard(expected[0], other)


def test_minima_and_sets_of_long_texts_equal_those_of_numpy(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 40_000, np.uint64)
    hashes[10_000:20_000] >>= np.uint64(30)  # badly spread, so that they fall into one bucket
    found = Shingles(hashes, np.array([0, 5, 30_000, 30_000, 40_000]), np.zeros((0, 2), np.uint64))
    assert np.array_equal(
        minhash.native_signatures(library, found, MinHashSettings()), minhash_signatures(found, MinHashSettings())
    )
    expected = [shingle_set(hashes[a:b]) for a, b in ((0, 5), (5, 30_000), (30_000, 30_000), (30_000, 40_000))]
    sets, sizes = minhash.native_sets(library, found)
    assert np.array_equal(sets, np.concatenate(expected))
    assert sizes.tolist() == [len(one) for one in expected]


@given(TEXTS, st.integers(0, 3), st.booleans())
def test_a_column_of_arrow_is_read_where_it_lies(texts: list[str], begin: int, wide: bool) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    column = pa.array(texts, pa.large_string() if wide else pa.string())[begin:]
    packed = PackedTexts.of_arrow(column)
    assert packed.strings() == texts[begin:]


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_signing_writes_the_same_bytes_with_and_without_it(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: ShingleKind
) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab cd. éΣİ 東京\n", k=rng.randrange(3000))) for _ in range(300)] + ["", "x" * 200_000]
    columns = {"id": [f"doc-{number}" for number in range(len(texts))], "text": texts}
    path = tmp_path / "part-00000.parquet"
    pq.write_table(pa.table(columns), path)
    settings = minhash.DedupSettings(shingles=kind)
    hashes = []
    for switch in ("0", "1"):
        monkeypatch.setenv(native.SWITCH, switch)
        out = tmp_path / switch
        record = minhash.sign(settings, Part(path.stem, {"path": str(path), "begin": 0}, 1), out)
        hashes.append([core_io.sha256_file(out / name) for name in record["files"]])
    assert hashes[0] == hashes[1]
