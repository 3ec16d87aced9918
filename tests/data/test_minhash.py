import json
import os
import random
import re
import string
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.data import rows
from bloomery.data.minhash import Found, Settings, band_keys, find, jaccard, normalized, shingles

SHARED = Path(os.environ.get("BLOOMERY_SHARED", Path(__file__).resolve().parents[3] / "shared"))
LABELS = SHARED / "data" / "dev" / "dedup_labels.parquet"
needs_labels = pytest.mark.skipif(not LABELS.is_file(), reason=f"needs {LABELS}; set BLOOMERY_SHARED")

WORDS = ["".join(pair) for pair in zip(string.ascii_lowercase * 8, string.ascii_lowercase[::-1] * 8, strict=True)]


def by_hand(a: str, b: str, words: int = 5) -> float:
    """Exact Jaccard of word shingles, the slow and plain way."""

    def sets(text: str) -> set[tuple[str, ...]]:
        found = re.findall(r"\w+", text.lower())
        return {tuple(found[start : start + words]) for start in range(len(found) - words + 1)}

    one, two = sets(a), sets(b)
    return len(one & two) / len(one | two) if one | two else 1.0


def find_in(texts: dict[str, str], **more: object) -> Found:
    return find(lambda: iter(texts.items()), Settings(**more))  # type: ignore[arg-type]


def corpus(seed: int, families: int = 30) -> dict[str, str]:
    """Families of documents, each with exact, near and distant relatives."""
    rng = random.Random(seed)
    texts = {}
    for family in range(families):
        words = [f"w{rng.randrange(3000)}" for _ in range(rng.randint(30, 200))]
        for member in range(rng.randint(1, 6)):
            edited = list(words)
            for _ in range(rng.choice((0, 0, 1, 2, 5, 20))):
                edited[rng.randrange(len(edited))] = f"w{rng.randrange(3000)}"
            space = rng.choice((" ", "\n"))
            texts[f"d{family:02d}-{member}"] = space.join(edited[rng.choice((0, 0, 3)) :])
    return texts


@given(
    st.lists(st.sampled_from(["the", "a", "iron", "Fire", "It's", "naïve", "東京", "x1"]), max_size=40),
    st.integers(0, 2**32),
)
def test_jaccard_equals_sets_of_tuples(words: list[str], seed: int) -> None:
    other = list(words)
    random.Random(seed).shuffle(other)
    one, two = " ".join(words), " - ".join(other[: len(other) // 2] + words[len(words) // 2 :])
    assert jaccard(shingles(one, 3), shingles(two, 3)) == by_hand(one, two, 3)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_removed_is_as_similar_to_the_kept_one_as_it_says(seed: int) -> None:
    texts = corpus(seed)
    twins = find_in(texts).twins
    assert len(twins) > 20
    for name, twin in twins.items():
        assert twin.kept_id not in twins
        assert twin.jaccard == by_hand(texts[name], texts[twin.kept_id]) >= 0.8
        assert (twin.reason == "exact") == (normalized(texts[name]) == normalized(texts[twin.kept_id]))
        assert (-len(texts[twin.kept_id]), twin.kept_id) < (-len(texts[name]), name)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_documents_does_not_matter(seed: int) -> None:
    texts = corpus(seed)
    expected = find_in(texts)
    for turn in range(3):
        names = list(texts)
        random.Random(turn).shuffle(names)
        assert find_in({name: texts[name] for name in names}) == expected


def test_with_one_row_a_band_every_similar_pair_is_found() -> None:
    texts = corpus(7)
    found = find_in(texts, permutations=112, bands=112)
    kept = [name for name in texts if name not in found.twins]
    missed = [(a, b) for a in kept for b in kept if a < b and by_hand(texts[a], texts[b]) >= 0.8]
    assert missed == []


def test_copies_but_for_case_and_white_space_are_exact() -> None:
    texts = {"b": "Some Words\nthat  are\tthe same here", "a": "some words that are the same here", "c": "other words"}
    twins = find_in(texts).twins
    assert {name: (twin.kept_id, twin.reason, twin.jaccard) for name, twin in twins.items()} == {
        "a": ("b", "exact", 1.0)
    }


def test_of_equally_long_copies_the_smallest_id_stays() -> None:
    assert set(find_in(dict.fromkeys("cab", "one two three four five six")).twins) == {"b", "c"}


def test_a_text_of_fewer_words_than_a_shingle_is_compared_exactly_only() -> None:
    texts = {"a": "one two", "b": "One  two", "c": "two one", "d": "", "e": " \n"}
    twins = find_in(texts).twins
    assert {name: twin.kept_id for name, twin in twins.items()} == {"a": "b", "d": "e"}


def test_a_document_linked_through_a_chain_only_stays() -> None:
    words = [f"w{number:03d}" for number in range(240)]
    chain = {f"d{step}": " ".join(words[8 * step : 8 * step + 100 - step]) for step in range(6)}
    assert all(by_hand(chain[a], chain[b]) >= 0.8 for a, b in pairwise(chain))
    assert by_hand(chain["d0"], chain["d2"]) < 0.8
    twins = find_in(chain, bands=112).twins
    assert {name: twin.kept_id for name, twin in twins.items()} == {"d1": "d0", "d3": "d2", "d5": "d4"}


def test_an_exact_copy_of_a_removed_document_names_what_is_kept() -> None:
    words = [f"w{number}" for number in range(100)]
    texts = {"long": " ".join([*words, "and", "more"]), "near": " ".join(words), "copy": " ".join(words).upper()}
    twins = find_in(texts).twins
    assert {name: (twin.kept_id, twin.reason) for name, twin in twins.items()} == {
        "near": ("long", "near"),
        "copy": ("long", "near"),
    }


def test_minima_agree_as_often_as_shingles_do() -> None:
    """With one row a band, the share of equal keys is the unbiased MinHash estimate of the Jaccard."""
    rng = np.random.default_rng(0)
    settings = Settings(permutations=2048, bands=2048)
    for share in (0.2, 0.5, 0.8):
        common, rest = round(600 * share), round(600 * (1 - share) / 2)
        a, b, c = (rng.integers(0, 2**64, size, np.uint64) for size in (common, rest, rest))
        one, two = np.unique(np.concatenate([a, b])), np.unique(np.concatenate([a, c]))
        estimate = float((band_keys(one, settings) == band_keys(two, settings)).mean())
        assert estimate == pytest.approx(jaccard(one, two), abs=0.04)


def test_hashes_stay_the_same_between_versions_and_machines() -> None:
    """Numbers written down once: a change here makes every earlier signature worthless."""
    found = shingles("The quick brown fox jumps over the lazy dog", 5)
    assert found.tolist() == sorted(found.tolist())
    assert int(found[0]) == 0x1ADA2CCAB7B746CC
    assert int(band_keys(found, Settings())[0]) == 0xBF46D200136CA9E8


def test_two_documents_with_one_id_are_an_error() -> None:
    with pytest.raises(DataError, match="two documents have the id 'a'"):
        find(lambda: iter([("a", "x"), ("a", "y")]), Settings())


def test_no_documents_have_no_copies() -> None:
    assert find_in({}) == Found({}, 0)


@needs_labels
def test_labeled_copies_in_web_and_code_are_found_and_nothing_else() -> None:
    """Pairs with an exact Jaccard of 0.8 and more, found with more bands and checked by hand; 0.92 is theory at 0.8."""
    table = pq.read_table(LABELS).to_pylist()
    pairs = [
        (row["doc_id_a"], row["doc_id_b"], row["jaccard_5word"]) for row in table if row["corpus_a"] in ("web", "code")
    ]
    wanted = {name for a, b, value in pairs if value >= 0.7 for name in (a, b)}
    texts = {}
    for part in ("web", "code"):
        for _, row in rows.jsonl(LABELS.parent / f"{part}.jsonl.zst"):
            assert isinstance(row, dict)
            if row["id"] in wanted:
                texts[row["id"]] = row["text"]
    assert len(texts) == len(wanted)
    twins = find_in(texts).twins
    similar = [(a, b, value) for a, b, value in pairs if value >= 0.8]
    recall = np.mean([a in twins or b in twins for a, b, _ in similar])
    sure = np.mean([a in twins or b in twins for a, b, value in similar if value >= 0.9])
    print(json.dumps({"documents": len(texts), "removed": len(twins), "recall": recall, "recall at 0.9": sure}))
    assert recall > 0.95
    assert sure == 1.0
    for name, twin in list(twins.items())[::5]:
        assert twin.jaccard == by_hand(texts[name], texts[twin.kept_id]) >= 0.8
