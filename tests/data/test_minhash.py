import numpy as np
import pytest

from bloomery.data.dedup.hashing import Shingles, jaccard, shingle_set
from bloomery.data.dedup.minhash import MinHashSettings, band_keys, minhash_signatures

NO_DIGESTS = np.zeros((0, 2), np.uint64)


def signed(sets: list[np.ndarray], settings: MinHashSettings) -> np.ndarray:
    bounds = np.cumsum([0, *map(len, sets)])
    return minhash_signatures(Shingles(np.concatenate(sets), bounds, NO_DIGESTS), settings)


def random_set(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 2**64, size, np.uint64)


def test_minima_agree_as_often_as_shingles_do() -> None:
    """The share of equal minima is the unbiased MinHash estimate of the Jaccard."""
    rng = np.random.default_rng(0)
    settings = MinHashSettings(num_perm=2048, num_bands=2048)
    for share in (0.2, 0.5, 0.8):
        common = random_set(rng, round(600 * share))
        sets = [np.concatenate([common, random_set(rng, round(600 * (1 - share) / 2))]) for _ in range(2)]
        found = signed(sets, settings)
        wanted = jaccard(shingle_set(sets[0]), shingle_set(sets[1]))
        assert float((found[:, 0] == found[:, 1]).mean()) == pytest.approx(wanted, abs=0.04)


def test_minima_do_not_depend_on_steps_or_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    sets = [random_set(rng, size) for size in (0, 3, 500, 0, 0, 64, 65, 1, 0)]
    settings = MinHashSettings()
    plain = np.stack([signed([one], settings)[:, 0] for one in sets], axis=1)
    for step in (1, 7, 64, 1000):
        monkeypatch.setattr("bloomery.data.dedup.minhash.SHINGLES_PER_STEP", step)
        assert np.array_equal(signed(sets, settings), plain)
    assert (plain[:, 0] == 2**32 - 1).all()


def test_signatures_with_equal_rows_share_that_band_only() -> None:
    settings = MinHashSettings(num_perm=12, num_bands=4, num_rotations=2)
    rng = np.random.default_rng(2)
    one, two = (rng.integers(0, 2**32, (12, 1), np.uint32) for _ in range(2))
    two[3:6] = one[3:6]
    same = band_keys(one, settings)[:, 0] == band_keys(two, settings)[:, 0]
    assert same.tolist() == [False, True, False, False, False, False, False, False]


def test_two_minima_of_a_band_are_apart_in_the_other_banding() -> None:
    settings = MinHashSettings(num_perm=112, num_bands=14, num_rotations=2)
    bands = []
    for row in range(112):
        signature = np.zeros((112, 2), np.uint32)
        signature[row, 1] = 1
        keys = band_keys(signature, settings)
        bands.append(np.flatnonzero(keys[:, 0] != keys[:, 1]).tolist())
    assert all(len(found) == 2 and found[0] < 14 <= found[1] for found in bands)
    assert len({tuple(found) for found in bands}) == 112


def test_keys_of_different_bands_differ_even_where_their_minima_do_not() -> None:
    keys = band_keys(np.zeros((112, 1), np.uint32), MinHashSettings())
    assert len(set(keys[:, 0].tolist())) == 28


def test_signatures_stay_the_same_between_versions_and_machines() -> None:
    found = signed([np.arange(100, dtype=np.uint64) << np.uint64(40)], MinHashSettings())
    assert int(found[1, 0]) == MINIMUM
    assert int(band_keys(found, MinHashSettings())[0, 0]) == KEY


MINIMUM, KEY = 0x00000000, 0xB3B23837189A521B
