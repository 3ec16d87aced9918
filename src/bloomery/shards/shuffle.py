"""
A shuffle that needs no memory: the place of a document is a hash of seed, stream, epoch and its id.

    key(document, epoch) = scramble(first 64 bits of sha256(id) xor 64 bits of sha256("seed stream epoch"))

Documents come in the order of their keys, whatever files they lie in. Where a stream is cut, by tokens, is found in two
passes over the keys with 2^16 sums; nothing is sorted that is larger than one run or one part of the output.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.core.errors import DataError
from bloomery.core.files import whole_file
from bloomery.shards.order import scramble

Keys = NDArray[np.uint64]
END = 2**64
"""Behind every key."""
BIN_BITS = 16
BLOCK_TOKENS, SHORT = 2**16, 300

INDEX = np.dtype([("id", "<u8"), ("tie", "<u8"), ("tokens", "<u4")])
"""A document of a run: 128 bits of the hash of its id, and its length. In the run they stand in this order."""
PLACED = np.dtype([("key", "<u8"), ("tie", "<u8"), ("start", "<u8"), ("tokens", "<u4")])
"""A document of a stream: when it comes, and where in its run it lies."""


class Chosen(NamedTuple):
    """Which documents of a domain a stream takes."""

    epochs: int
    """How often it takes all of them."""
    until: int
    """Of one epoch more those with a smaller key; 0 for none."""


def keys(ids: Keys, seed: int, stream: str, epoch: int) -> Keys:
    """When documents come in an epoch of a stream: a bijection of their 64-bit ids."""
    salt = hashlib.sha256(f"{seed} {stream} {epoch}".encode()).digest()
    return scramble(ids ^ np.uint64(int.from_bytes(salt[:8], "little")))


def hashed(ids: Sequence[str]) -> tuple[Keys, Keys]:
    """128 bits of the sha256 of each id, as two columns."""
    digests = b"".join(hashlib.sha256(id.encode()).digest()[:16] for id in ids)
    both = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    return both[:, 0], both[:, 1]


def cuts(passes: Callable[[], Iterator[tuple[Keys, NDArray[Any]]]], targets: Sequence[int]) -> list[int]:
    """
    For each number of tokens the key of the first document that begins there or later, in the order of keys, or END.

    `passes` gives the keys and lengths (over 0) of all documents, in pieces of any order, and is called twice.
    `targets` ascend.
    """
    sums = np.zeros(2**BIN_BITS, dtype=np.int64)
    shift = np.uint64(64 - BIN_BITS)
    for some, lengths in passes():
        # Sums of float64 are exact below 2^53 tokens.
        here = np.bincount((some >> shift).astype(np.int64), weights=lengths, minlength=len(sums))
        sums += here.astype(np.int64)
    filled = np.append(np.flatnonzero(sums), len(sums))  # bins that hold documents, and the end
    before = np.append(np.cumsum(sums) - sums, sums.sum())[filled]
    # The document is in the last bin that begins before the target, or it is the first of the next bin.
    bins = np.maximum(np.searchsorted(before, targets, side="left") - 1, 0)
    wanted = filled[np.unique(np.minimum(np.concatenate([bins, bins + 1]), len(filled) - 1))]
    pieces: list[tuple[Keys, NDArray[Any]]] = [(np.zeros(0, np.uint64), np.zeros(0, np.int64))]
    for some, lengths in passes():
        chosen = np.isin((some >> shift).astype(np.int64), wanted)
        pieces.append((some[chosen], lengths[chosen]))
    found, lengths = (np.concatenate([piece[column] for piece in pieces]) for column in (0, 1))
    order = np.lexsort((lengths, found))
    found, lengths = found[order], lengths[order].astype(np.int64)
    places = (found >> shift).astype(np.int64)
    result = []
    for target, bin in zip(targets, bins.tolist(), strict=True):
        first, last = np.searchsorted(places, [filled[bin], filled[bin] + 1])
        starts = before[bin] + np.cumsum(lengths[first:last]) - lengths[first:last]
        at = int(first + np.searchsorted(starts, target, side="left"))
        result.append(int(found[at]) if at < len(found) else END)
    return result


def save(path: Path, table: NDArray[Any]) -> None:
    """Write an index as an .npy file."""
    with whole_file(path) as file:
        np.save(file, table, allow_pickle=False)


def load(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An index that `save` wrote, memory-mapped where it holds something. Raises DataError for one that is torn."""
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        cure = "Remove the folder of its stage and run the recipe again."
        raise DataError(f"cannot be read: {error}", where=str(path), cure=cure) from None
    assert table.dtype == dtype, f"{path} holds {table.dtype}"
    found: NDArray[Any] = table
    return found


def placed(index: NDArray[Any], starts: NDArray[np.int64], seed: int, stream: str, chosen: Chosen) -> NDArray[Any]:
    """The documents of one domain of a run that a stream takes, once for every epoch in which it does; not sorted."""
    tables = []
    for epoch in range(chosen.epochs + bool(chosen.until)):
        when = keys(index["id"], seed, stream, epoch)
        table = np.empty(len(index), dtype=PLACED)
        table["key"], table["tie"], table["start"], table["tokens"] = when, index["tie"], starts, index["tokens"]
        whole = epoch < chosen.epochs or chosen.until >= END
        tables.append(table if whole else table[when < np.uint64(chosen.until)])
    return np.concatenate(tables) if tables else np.zeros(0, dtype=PLACED)


def in_order(table: NDArray[Any]) -> NDArray[Any]:
    """Documents by key; of equal keys, by the rest of the hash of their ids."""
    found: NDArray[Any] = table[np.lexsort((table["tie"], table["key"]))]
    return found


def between(table: NDArray[Any], low: int, high: int) -> NDArray[Any]:
    """The documents of a sorted table with keys from `low` to below `high`."""
    ends = [len(table) if key >= END else int(np.searchsorted(table["key"], np.uint64(key))) for key in (low, high)]
    found: NDArray[Any] = table[ends[0] : ends[1]]
    return found


def collect(
    tokens: NDArray[Any], starts: NDArray[Any], lengths: NDArray[Any], made: NDArray[Any] | None = None
) -> NDArray[Any]:
    """
    Documents of `tokens`, given by where they start and how long they are, end to end in this order; into `made`.

    Neighbors are copied as one. Long pieces are copied one by one, of short ones the tokens in blocks that stay in the
    processor's cache: at 40 tokens a document this is three times as fast.
    """
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    made = np.empty(int(ends[-1]) if len(ends) else 0, dtype=tokens.dtype) if made is None else made
    opens = np.ones(len(starts), dtype=bool)
    opens[1:] = starts[1:] != starts[:-1] + lengths[:-1]
    first = np.flatnonzero(opens)
    if not len(first):
        return made
    starts, places = starts[first], (ends - lengths)[first]
    lengths = np.diff(np.append(places, ends[-1]))
    step = max(1, BLOCK_TOKENS * len(lengths) // max(1, len(made)))
    if step > BLOCK_TOKENS // SHORT:
        for at in range(0, len(starts), step):
            some = slice(at, at + step)
            low, size = int(places[at]), int(lengths[some].sum())
            here = np.repeat(starts[some] - places[some] + low, lengths[some]) + np.arange(size)
            np.take(tokens, here, out=made[low : low + size])
    else:
        for start, place, length in zip(starts.tolist(), places.tolist(), lengths.tolist(), strict=True):
            made[place : place + length] = tokens[start : start + length]
    return made
