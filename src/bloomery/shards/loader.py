"""
Batches of training samples from memory-mapped shards, in a deterministic shuffled order.

The whole state of a loader is one integer: the number of the next sample. A thread prepares the batches ahead. How
far ahead it prepares is no part of the state.

The order of samples is a pure function, so that there is nothing to store and nothing to lose.

    sample(n) = position of the n-th sample of a run = permutation of (seed, epoch = n div N) at n mod N

The permutation is a four-round Feistel network on the smallest even number of bits that holds N. It repeats until the
result is below N (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). It is a bijection for every
key, takes no memory, and seeks to any sample at once.
"""

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bloomery.core.errors import DataError
from bloomery.core.io import GOLDEN, splitmix64
from bloomery.shards import format

ROUNDS = 4


def sample_positions(first: int, count: int, num_samples: int, seed: int) -> NDArray[np.int64]:
    """Positions in the data of the samples first … first + count − 1 of a run over `num_samples` samples."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    epochs, places = numbers // np.uint64(num_samples), numbers % np.uint64(num_samples)
    return permute(places, epochs, num_samples, seed).astype(np.int64)


def permute(places: NDArray[np.uint64], epochs: NDArray[np.uint64], num_samples: int, seed: int) -> NDArray[np.uint64]:
    """A bijection of 0 … num_samples − 1 for each epoch and seed, applied to each of `places`."""
    half = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    result = places.copy()
    walking = np.ones(len(places), dtype=bool)
    while walking.any():
        result[walking] = _feistel(result[walking], epochs[walking], half, seed)
        walking = result >= num_samples
    return result


def _feistel(values: NDArray[np.uint64], epochs: NDArray[np.uint64], half: np.uint64, seed: int) -> NDArray[np.uint64]:
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & low_bits
    for round_number in range(ROUNDS):
        key = np.uint64((seed * GOLDEN + round_number * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF)
        left, right = right, left ^ (splitmix64(right + key + epochs * np.uint64(0xA0761D6478BD642F)) & low_bits)
    return (left << half) | right


IGNORE = -100
"""A target that carries no loss: padding, or what the user said."""
AHEAD = 4
SPLITS = {"train": "the text to train on", "anneal": "the text to train on last", "val": "the validation text"}


@dataclass(frozen=True)
class Batch:
    """Samples side by side, B × T each. Token t is input, and token t + 1 its target."""

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Counted from the start of each document."""
    segments: NDArray[np.int64]
    """Which document of the sample a token belongs to."""
    samples: NDArray[np.int64]
    """The numbers of the samples in the data, to name them."""

    def split(self, size: int) -> list["Batch"]:
        """The same samples in micro-batches of at most `size`."""
        return [self.rows(slice(start, start + size)) for start in range(0, len(self.ids), size)]

    def of_rank(self, rank: int, size: int) -> "Batch":
        """Samples rank, rank + size, rank + 2 · size …: what one of `size` ranks computes of a global batch."""
        return self if size == 1 else self.rows(slice(rank, None, size))

    def rows(self, which: NDArray[np.int64] | slice) -> "Batch":
        """Some of the samples, in the order of their numbers in `which`."""
        parts = (self.ids, self.targets, self.positions, self.segments, self.samples)
        return Batch(*(part[which] for part in parts))


class PackedDataset:
    """Every sample of a split, by number: a window of T + 1 tokens."""

    def __init__(self, folder: Path, split: str, length: int, tokenizer_hash: str, *, verify: bool = False) -> None:
        """
        `length` is T. Raises DataError where the split is missing, damaged, or too small for one sample; damage in the
        midst of a shard is only looked for with `verify`.
        """
        paths = format.names(folder, split)
        if not paths:
            never = split == "val" and format.names(folder, "train")
            hint = "Set shard.val_fraction above 0." if never else "Run the previous stage again."
            raise DataError(f"there are no shards {split}-*.bin", where=str(folder), hint=hint)
        self.length = length
        self._shards = [format.read(path, tokenizer_hash=tokenizer_hash, verify=verify) for path in paths]
        if (known := self._shards[0].index.get("shards", len(paths))) != len(paths):
            what = f"holds {len(paths)} of {known} shards {split}-*.bin"
            raise DataError(what, where=str(folder), hint="Remove this folder and run the recipe again.")
        kind, *others = [[s.index.get(key) for key in ("layout", "document_id", "row_tokens")] for s in self._shards]
        for path, other in zip(paths[1:], others, strict=True):
            if other != kind:
                what = f"has {other}, but {paths[0].name} has {kind} (layout, opening token, tokens per row)"
                raise DataError(what, where=str(path), hint="Run the previous stage again, in an empty folder.")
        layout, document, row = kind
        if not isinstance(document, int) and layout != "rows":
            raise DataError("its index names no document_id", where=str(paths[0]), hint="Run the previous stage again.")
        self._document, self._packed = document, layout == "rows"
        self._stride = length + 1 if layout == "rows" else length
        if layout == "rows" and row != length + 1:
            raise DataError(
                f"rows have {row} tokens, but {length + 1} are needed", where=str(folder), hint="Pack them again."
            )
        counts = [max(0, (len(s.tokens) - (length + 1)) // self._stride + 1) for s in self._shards]
        self._ends = np.cumsum(counts)
        self.num_samples = int(self._ends[-1])
        if self.num_samples == 0:
            raise self._too_small(folder, split)

    def _too_small(self, folder: Path, split: str) -> DataError:
        have = f"{max(len(shard.tokens) for shard in self._shards)} tokens"
        have += f" in the longest of {len(self._shards)} shards" if len(self._shards) > 1 else ""
        name = f"{SPLITS.get(split, split)} ({split}-*.bin)"
        what = f"{name} is too small: {have} are fewer than one sample of {self.length + 1}"
        more = "Raise shard.val_fraction, fetch" if split == "val" else "Fetch"
        hint = "Import longer token files" if "source" in self._shards[0].index else f"{more} more text"
        return DataError(what, where=str(folder), hint=f"{hint}, or lower pretrain.model.context_length.")

    def epochs(self, seen: int) -> float:
        """How often the first `seen` samples of a run go through the split."""
        return seen / self.num_samples

    def order(self, first: int, count: int, seed: int) -> NDArray[np.int64]:
        """Numbers of the samples that come at `first` … `first + count − 1` of a run."""
        return sample_positions(first, count, self.num_samples, seed)

    def batch(self, numbers: NDArray[np.int64]) -> Batch:
        rows = np.empty((len(numbers), self.length + 1), dtype=np.int64)
        learned = np.ones_like(rows, dtype=bool)
        opens = np.zeros((len(numbers), self.length), dtype=bool)
        for row, number in enumerate(numbers):
            which = int(np.searchsorted(self._ends, number, side="right"))
            shard = self._shards[which]
            start = (int(number) - (int(self._ends[which - 1]) if which else 0)) * self._stride
            rows[row] = shard.tokens[start : start + self.length + 1]
            if self._packed:
                opens[row, _within(shard.starts, start, self.length)] = True
            if shard.mask is not None:
                learned[row] = shard.mask[start : start + self.length + 1] != 0
        ids = rows[:, :-1]
        if not self._packed:
            opens = ids == self._document
        opens[:, 0] = True
        positions = np.arange(self.length)
        begin = np.maximum.accumulate(np.where(opens, positions, 0), axis=1)
        targets = np.where(learned[:, 1:], rows[:, 1:], IGNORE)
        return Batch(ids.copy(), targets, positions - begin, np.cumsum(opens, axis=1), numbers)


def _within(starts: NDArray[np.int64], begin: int, length: int) -> NDArray[np.int64]:
    """Where, counted from `begin`, conversations begin: not every template opens them with a token of its own."""
    first, last = np.searchsorted(starts, [begin, begin + length])
    return starts[first:last] - begin


class AnnealedDataset:
    """
    The samples of a whole training run: first those of a split, as often as they are wanted, then at the end others.

    Of a run of R samples over a split of N the last min(M, ⌈R · M / (N + M)⌉) are of the M others. So a run over all
    that there is ends with all of them, a shorter one with their share, and none of them comes twice.
    """

    def __init__(self, main: PackedDataset, last: PackedDataset, run_samples: int) -> None:
        """`run_samples` is R. Raises ValueError where the two do not have one length."""
        if main.length != last.length:
            raise ValueError(f"samples of {main.length} and of {last.length} tokens do not make one run")
        self.main, self.last, self.length = main, last, main.length
        self.num_samples = main.num_samples
        """N: those of an epoch."""
        share = -(-run_samples * last.num_samples // (main.num_samples + last.num_samples))
        self.switch = run_samples - min(last.num_samples, share)
        """The number, in the run, of the first sample of the others."""

    def epochs(self, seen: int) -> float:
        """How often the first `seen` samples of the run go through the split, the others left out."""
        return min(seen, self.switch) / self.num_samples

    def order(self, first: int, count: int, seed: int) -> NDArray[np.int64]:
        """Numbers of the samples that come at `first` … `first + count − 1`: those of the others from N on."""
        before = min(count, max(0, self.switch - first))
        main = self.main.order(first, before, seed)
        last = self.last.order(first + before - self.switch, count - before, seed)
        return np.concatenate([main, last + self.num_samples])

    def batch(self, numbers: NDArray[np.int64]) -> Batch:
        others = numbers >= self.num_samples
        if not others.any():
            return self.main.batch(numbers)
        parts = [(self.main, numbers[~others]), (self.last, numbers[others] - self.num_samples)]
        sub_batches = [samples.batch(some) for samples, some in parts]
        places = np.argsort(np.concatenate([np.flatnonzero(~others), np.flatnonzero(others)]))

        def joined(name: str) -> NDArray[np.int64]:
            together: NDArray[np.int64] = np.concatenate([getattr(batch, name) for batch in sub_batches])[places]
            return together

        return Batch(joined("ids"), joined("targets"), joined("positions"), joined("segments"), numbers)


def others_begin(samples: "SampleSource", first: int, last: int) -> bool:
    """Whether a course goes over to its others among the samples `first` … `last − 1` of the run."""
    return isinstance(samples, AnnealedDataset) and first <= samples.switch < last


@runtime_checkable
class SampleSource(Protocol):
    """A source of samples: `PackedDataset`, `AnnealedDataset`, or samples that are made during training."""

    length: int
    """Tokens of a sample."""
    num_samples: int
    """Those of an epoch."""

    def epochs(self, seen: int) -> float: ...

    def order(self, first: int, count: int, seed: int) -> NDArray[np.int64]: ...

    def batch(self, numbers: NDArray[np.int64]) -> Batch: ...


def batches(samples: SampleSource, *, first: int, size: int, seed: int, early: bool = True) -> Generator[Batch]:
    """
    Batches without end, from the run's sample number `first` on, prepared ahead by one thread, or, where they must
    not be early, each when it is asked for.

    A thread and not processes: forked workers hang on some drivers, and memory-mapped shards need no more than one.
    """

    def prepare(number: int) -> Batch:
        return samples.batch(samples.order(number, size, seed))

    while not early:
        yield prepare(first)
        first += size
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as thread:
        ahead = deque(thread.submit(prepare, first + place * size) for place in range(AHEAD))
        number = first + AHEAD * size
        try:
            while True:
                ahead.append(thread.submit(prepare, number))
                number += size
                yield ahead.popleft().result()
        finally:
            for waiting in ahead:
                waiting.cancel()
