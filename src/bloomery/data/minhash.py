"""
Duplicates: exact by hash of the normalized text, near by MinHash, and every near one verified.

    J(A, B) = |A ∩ B| / |A ∪ B|            A, B: sets of the n-word shingles of two documents
    P(min h(A) = min h(B)) = J             so b bands of r minima each agree in one band with 1 − (1 − J**r)**b

Bands only propose. A document is removed when the exact Jaccard with a document that is kept reaches the limit, and it
names that one. Sources: Broder 1997, On the resemblance and containment of documents; Leskovec et al., Mining of
Massive Datasets, 3.4. All arithmetic on hashes is modulo 2**64, on purpose.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bloomery.core.errors import DataError

Hashes = NDArray[np.uint64]
Documents = Callable[[], Iterable[tuple[str, str]]]
"""Calling it walks over (id, text) of every document; it is called twice."""

WORD = re.compile(r"\w+")
MAX_CACHED_WORDS = 1_000_000
SHINGLES_PER_BLOCK = 4096  # times the permutations, 8 bytes each: fits into a second-level cache


@dataclass(frozen=True)
class Twin:
    """Why a document is removed: what it is a copy of, and their exact Jaccard."""

    kept_id: str
    reason: str
    """"exact" or "near"."""
    jaccard: float


@dataclass(frozen=True)
class Found:
    twins: Mapping[str, Twin]
    """The documents to remove, by id."""
    compared: int
    """Pairs that the bands proposed and whose Jaccard was computed."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    permutations: int = 112
    bands: int = 14
    """Divides `permutations`."""
    shingle_words: int = 5
    min_jaccard: float = 0.8
    seed: int = 0


class _Words(dict[str, int]):
    """64-bit hashes of words. Python's own `hash` of a string changes with the process."""

    def __missing__(self, word: str) -> int:
        if len(self) >= MAX_CACHED_WORDS:
            self.clear()
        self[word] = value = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest())
        return value


_words = _Words()


def mix(values: Hashes) -> Hashes:
    """A bijection of 64-bit numbers that looks random (the finalizer of splitmix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def shingles(text: str, words: int) -> Hashes:
    """
    Hashes of the different n-word shingles of a text, sorted; empty where it has fewer words.

    Words are `re.findall(r"\\w+", text.lower())`. Two different shingles agree with p = 2**-64.
    """
    found = WORD.findall(text.lower())
    if len(found) < words:
        return np.zeros(0, np.uint64)
    ids = np.fromiter(map(_words.__getitem__, found), np.uint64, len(found))
    keys = np.zeros(len(ids) - words + 1, np.uint64)
    for shift in range(words):
        keys = mix(keys + ids[shift : shift + len(keys)] + np.uint64(1))
    return np.unique(keys)


def jaccard(a: Hashes, b: Hashes) -> float:
    """Exact Jaccard of two sets of shingles, given sorted and without repeats. That of two empty sets is 1."""
    shared = len(a) + len(b) - len(np.union1d(a, b))
    return shared / (len(a) + len(b) - shared) if len(a) + len(b) else 1.0


def normalized(text: str) -> bytes:
    """A hash of a text without regard to letter case and white space."""
    return hashlib.blake2b(" ".join(text.lower().split()).encode("utf-8", "replace"), digest_size=16).digest()


def band_keys(found: Hashes, settings: Settings) -> Hashes:
    """One key for each band of the MinHash signature of a set of shingles: [bands] uint64."""
    factors, terms = _permutations(settings)
    minima = np.full(settings.permutations, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(found), SHINGLES_PER_BLOCK):
        block = np.multiply.outer(factors, found[start : start + SHINGLES_PER_BLOCK])
        block += terms[:, None]
        np.minimum(minima, block.min(axis=1), out=minima)
    rows = minima.reshape(settings.bands, -1)
    keys = np.zeros(settings.bands, np.uint64)
    for column in range(rows.shape[1]):
        keys = mix(keys + rows[:, column] + np.uint64(1))
    return keys


def _permutations(settings: Settings) -> tuple[Hashes, Hashes]:
    """h(x) = a·x + b with odd a is a bijection modulo 2**64; x has been through `mix` before."""
    counter = np.arange(1, 2 * settings.permutations + 1, dtype=np.uint64)
    numbers = mix(counter * np.uint64(0x9E3779B97F4A7C15) + mix(np.array([settings.seed], np.uint64)))
    return numbers[: settings.permutations] | np.uint64(1), numbers[settings.permutations :]


def find(documents: Documents, settings: Settings) -> Found:
    """
    The documents to remove. Of copies the longest stays, of equally long ones that with the smallest id.

    The result does not depend on the order of the documents. A document that is only linked to the kept one through a
    chain of others, without being similar enough itself, stays. Raises DataError where two documents share an id.
    """
    lengths: dict[str, int] = {}
    groups: dict[bytes, list[str]] = defaultdict(list)
    keys: dict[str, Hashes] = {}
    for name, text in documents():
        if name in lengths:
            raise DataError(f"two documents have the id {name!r}", cure="Give every document an id of its own.")
        lengths[name] = len(text)
        group = groups[normalized(text)]
        group.append(name)
        if len(group) == 1 and len(found := shingles(text, settings.shingle_words)):
            keys[name] = band_keys(found, settings)
    twins: dict[str, Twin] = {}
    for group in groups.values():
        first, *others = sorted(group, key=lambda name: (-lengths[name], name))
        twins.update({other: Twin(first, "exact", 1.0) for other in others})
        if group[0] in keys:
            keys[first] = keys.pop(group[0])  # the same words, whichever of them was hashed
    names = sorted(keys, key=lambda name: (-lengths[name], name))
    components = list(_components(names, keys))
    wanted = {name for component in components for name in component}
    sets = {name: shingles(text, settings.shingle_words) for name, text in documents() if name in wanted}
    compared = 0
    for component in components:
        near, pairs = _resolve(component, keys, sets, settings.min_jaccard)
        twins.update(near)
        compared += pairs
    return Found(_settled(twins), compared)


def _components(names: Sequence[str], keys: Mapping[str, Hashes]) -> Iterator[list[str]]:
    """Documents that share a band, or are linked by others that do; in the order of `names`, single ones left out."""
    if not names:
        return
    parents = list(range(len(names)))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    table = np.stack([keys[name] for name in names])
    for column in table.T:
        order = np.argsort(column, kind="stable")
        equal = np.flatnonzero(column[order[1:]] == column[order[:-1]])
        for left, right in zip(order[equal].tolist(), order[equal + 1].tolist(), strict=True):
            a, b = root(left), root(right)
            parents[max(a, b)] = min(a, b)
    members: dict[int, list[str]] = defaultdict(list)
    for node, name in enumerate(names):
        members[root(node)].append(name)
    yield from (component for component in members.values() if len(component) > 1)


def _resolve(
    component: Sequence[str], keys: Mapping[str, Hashes], sets: Mapping[str, Hashes], least: float
) -> tuple[dict[str, Twin], int]:
    """
    Who of a component goes: from the longest to the shortest, each is compared with the kept ones that share a band.

    Returns the twins and how many pairs were compared.
    """
    buckets: dict[tuple[int, int], list[str]] = defaultdict(list)
    twins: dict[str, Twin] = {}
    compared = 0
    for name in component:
        places = list(enumerate(keys[name].tolist()))
        near: tuple[float, str] | None = None
        for other in dict.fromkeys(kept for place in places for kept in buckets[place]):
            small, large = sorted((len(sets[name]), len(sets[other])))
            if small < least * large:
                continue  # their Jaccard is at most small / large
            compared += 1
            value = jaccard(sets[name], sets[other])
            if value >= least and (near is None or (-value, other) < (-near[0], near[1])):
                near = value, other
        if near is not None:
            twins[name] = Twin(near[1], "near", near[0])
        else:
            for place in places:
                buckets[place].append(name)
    return twins, compared


def _settled(twins: Mapping[str, Twin]) -> dict[str, Twin]:
    """Exact copies of a document that is itself removed are near copies of what is kept: they have its words."""
    return {name: twins.get(twin.kept_id, twin) for name, twin in twins.items()}
