import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bloomery.core.errors import DataError
from bloomery.shards import format
from bloomery.shards.loader import (
    AHEAD,
    IGNORE,
    AnnealedDataset,
    Batch,
    PackedDataset,
    batches,
    permute,
    sample_positions,
)

TOKENIZER = "a" * 64
DOCUMENT, PAD, VOCAB_SIZE = 0, 2, 500


def write(
    folder: Path,
    number: int,
    tokens: list[int],
    *,
    sequence_length: int | None = None,
    mask: list[int] | None = None,
    split: str = "train",
) -> None:
    format.write(
        folder / f"{split}-{number:05d}",
        np.array(tokens, dtype=np.uint16),
        vocab_size=VOCAB_SIZE,
        starts=[place for place, token in enumerate(tokens) if token == DOCUMENT],
        tokenizer_hash=TOKENIZER,
        layout="rows" if sequence_length else "stream",
        mask=None if mask is None else np.array(mask, dtype=np.uint8),
        facts={"document_id": DOCUMENT, **({"row_tokens": sequence_length} if sequence_length else {})},
    )


def stream(folder: Path, sizes: tuple[int, ...] = (103, 5, 61, 8, 40), length: int = 8) -> PackedDataset:
    """Shards of these many tokens, no two tokens near each other alike, with documents here and there."""
    rng = np.random.default_rng(1)
    for number, size in enumerate(sizes):
        tokens = (np.arange(size) * 7 + 1000 * number) % 490 + 10
        tokens[rng.random(size) < 0.15] = DOCUMENT
        write(folder, number, tokens.tolist())
    return PackedDataset(folder, "train", length, TOKENIZER)


@pytest.fixture
def samples(tmp_path: Path) -> PackedDataset:
    return stream(tmp_path)


def every(samples: PackedDataset) -> Batch:
    return samples.batch(np.arange(samples.num_samples))


# --- what a sample is ----------------------------------------------------------------------------------------------


def test_windows_share_one_token_so_that_every_token_is_a_target_once(tmp_path: Path) -> None:
    """Of each shard all but its first token, and the tail that fills no window."""
    sizes, length = (103, 5, 61, 8, 9, 17), 8
    samples = stream(tmp_path, sizes, length)
    expected: list[int] = []
    for path in format.names(tmp_path, "train"):
        tokens = format.read(path).tokens.tolist()
        windows = (len(tokens) - 1) // length
        expected += tokens[1 : windows * length + 1]
    assert every(samples).targets.flatten().tolist() == expected
    assert samples.num_samples == sum((size - 1) // length for size in sizes)


def test_a_target_is_the_next_token_also_at_the_end_of_a_window(tmp_path: Path) -> None:
    batch = every(stream(tmp_path, (81,), 8))
    assert np.array_equal(batch.targets[:, :-1], batch.ids[:, 1:])
    assert np.array_equal(batch.targets[:-1, -1], batch.ids[1:, 0])


def slow(tokens: list[int], mask: list[int] | None) -> dict[str, list[int]]:
    """One sample of T + 1 tokens, as one would explain it."""
    ids, targets, positions, segments = tokens[:-1], [], [], []
    position, segment = -1, 1
    for place, id in enumerate(ids):
        if id == DOCUMENT and place > 0:
            position, segment = 0, segment + 1
        else:
            position += 1
        positions.append(position)
        segments.append(segment)
        targets.append(tokens[place + 1] if mask is None or mask[place + 1] else IGNORE)
    return {"ids": ids, "targets": targets, "positions": positions, "segments": segments}


TOKEN = st.sampled_from([DOCUMENT, DOCUMENT, PAD, 7, 8, 9])


@settings(max_examples=30)  # each waits for the disk
@given(st.integers(1, 6), st.lists(st.tuples(TOKEN, st.integers(0, 1)), min_size=7, max_size=60), st.booleans())
def test_a_batch_is_what_a_slow_reference_says(
    tmp_path_factory: pytest.TempPathFactory, length: int, pairs: list[tuple[int, int]], rows: bool
) -> None:
    folder, row = tmp_path_factory.mktemp("shard"), length + 1
    pairs = pairs[: len(pairs) // row * row] if rows else pairs
    tokens, mask = [token for token, _ in pairs], [marked for _, marked in pairs]
    write(folder, 0, tokens, sequence_length=row if rows else None, mask=mask if rows else None)
    batch = every(PackedDataset(folder, "train", length, TOKENIZER))
    stride = row if rows else length
    starts = range(0, len(tokens) - length, stride)
    assert len(batch.ids) == len(starts)
    for number, start in enumerate(starts):
        expected = slow(tokens[start : start + row], mask[start : start + row] if rows else None)
        for name, values in expected.items():
            assert getattr(batch, name)[number].tolist() == values, name


def test_segments_and_positions_count_from_the_token_that_opens_a_document(tmp_path: Path) -> None:
    write(tmp_path, 0, [5, 6, 0, 7, 8, 0, 0, 9, 3], sequence_length=9, mask=[0, 1, 0, 0, 1, 0, 0, 1, 1])
    batch = every(PackedDataset(tmp_path, "train", 8, TOKENIZER))
    assert batch.segments[0].tolist() == [1, 1, 2, 2, 2, 3, 4, 4]
    assert batch.positions[0].tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
    assert batch.targets[0].tolist() == [6, -100, -100, 8, -100, -100, 9, 3]


def test_a_batch_splits_into_the_same_samples(samples: PackedDataset) -> None:
    batch = every(samples)
    for size in (1, 3, 100):
        parts = batch.split(size)
        assert all(len(part.ids) <= size for part in parts)
        for name in ("ids", "targets", "positions", "segments", "samples"):
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(batch, name))


# --- which come when -----------------------------------------------------------------------------------------------


def numbers(samples: PackedDataset, *, first: int, size: int, count: int, seed: int = 3) -> list[int]:
    source = batches(samples, first=first, size=size, seed=seed)
    found = [int(number) for batch in islice(source, count) for number in batch.samples]
    source.close()
    return found


@pytest.mark.parametrize("size", [1, 2, 5, 7, 64])
def test_every_sample_comes_exactly_once_an_epoch_at_any_batch_size(samples: PackedDataset, size: int) -> None:
    n = samples.num_samples
    found = numbers(samples, first=0, size=size, count=-(-3 * n // size))
    for epoch in range(3):
        assert sorted(found[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert found == numbers(samples, first=0, size=1, count=len(found))
    assert found != numbers(samples, first=0, size=1, count=len(found), seed=4)


@pytest.mark.parametrize("size", [1, 4, 6])
@pytest.mark.parametrize("done", [1, 2, 9])
def test_a_resumed_run_sees_what_an_uninterrupted_one_would_have_seen(
    samples: PackedDataset, size: int, done: int
) -> None:
    whole = list(islice(batches(samples, first=0, size=size, seed=3), done + 4))
    tail = list(islice(batches(samples, first=done * size, size=size, seed=3), 4))
    for one, other in zip(whole[done:], tail, strict=True):
        for name in ("ids", "targets", "positions", "segments", "samples"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


def test_a_run_may_go_on_with_another_batch_size(samples: PackedDataset) -> None:
    whole = numbers(samples, first=0, size=1, count=60)
    assert numbers(samples, first=0, size=5, count=4) + numbers(samples, first=20, size=8, count=5) == whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_the_sequence_of_a_run_knows_neither_ranks_nor_micro_batches(
    samples: PackedDataset, ranks: int, micro_batch: int
) -> None:
    """Rows of a global batch, dealt to ranks and cut into micro-batches, are all of its rows, each once."""
    size, epochs, seen = 5, 2, list[int]()
    with contextlib.closing(batches(samples, first=0, size=size, seed=3)) as source:
        for _ in range(epochs * samples.num_samples // size):
            batch = next(source)
            parts = [part for rank in range(ranks) for part in batch.of_rank(rank, ranks).split(micro_batch)]
            dealt = [int(number) for part in parts for number in part.samples]
            assert sorted(dealt) == sorted(batch.samples.tolist())
            assert len(parts) >= min(ranks, size)
            seen += batch.samples.tolist()
    assert seen == samples.order(0, len(seen), 3).tolist()


def test_a_batch_is_the_samples_it_names(samples: PackedDataset) -> None:
    for batch in islice(batches(samples, first=0, size=4, seed=3), 8):
        again = samples.batch(batch.samples)
        assert np.array_equal(batch.ids, again.ids)
        assert np.array_equal(batch.targets, again.targets)


# --- what comes last -----------------------------------------------------------------------------------------------


@pytest.fixture
def course(samples: PackedDataset, tmp_path: Path) -> AnnealedDataset:
    """A run of 40 samples, of 23 that there are, and of 5 others at its end."""
    last = tmp_path / "last"
    last.mkdir()
    return AnnealedDataset(samples, stream(last, (41,)), run_samples=40)


def test_the_others_come_last_each_once_and_before_them_all_of_the_split(course: AnnealedDataset) -> None:
    found = [int(number) for batch in islice(batches(course, first=0, size=4, seed=3), 10) for number in batch.samples]
    n = course.num_samples
    assert (n, course.switch) == (23, 35)
    assert sorted(found[35:]) == [n, n + 1, n + 2, n + 3, n + 4]
    assert sorted(found[:23]) == list(range(23))
    assert found[:35] == sample_positions(0, 35, n, seed=3).tolist()
    assert (course.epochs(13), course.epochs(40)) == (13 / 23, 35 / 23)


def test_a_batch_of_both_is_the_samples_it_names(course: AnnealedDataset) -> None:
    source = batches(course, first=0, size=7, seed=3)
    for batch in islice(source, 6):
        for row, number in enumerate(batch.samples.tolist()):
            samples = course.main if number < 23 else course.last
            alone = samples.batch(np.array([number % 23]))
            for name in ("ids", "targets", "positions", "segments"):
                assert np.array_equal(getattr(batch, name)[row], getattr(alone, name)[0])
    source.close()


@settings(max_examples=30)
@given(st.integers(1, 120), st.integers(1, 9), st.data())
def test_a_course_is_resumed_at_any_sample_and_with_any_batch_size(run: int, size: int, data: Any) -> None:
    course = of_sizes(26, 5, run)
    whole = course.order(0, run, seed=1).tolist()
    first = data.draw(st.integers(0, run))
    found = [number for at in range(first, run, size) for number in course.order(at, min(size, run - at), seed=1)]
    assert found == whole[first:]


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 3000))
def test_the_last_part_of_a_run_is_as_large_a_share_as_there_is_and_never_repeats(
    main: int, last: int, run: int
) -> None:
    course = of_sizes(main, last, run)
    found = course.order(0, run, seed=2)
    others = found[course.switch :] - main
    assert (found[: course.switch] < main).all()
    assert len(np.unique(others)) == len(others) == min(last, -(-run * last // (main + last)))
    assert ((others >= 0) & (others < last)).all()


def of_sizes(main: int, last: int, run: int) -> AnnealedDataset:
    """A course over splits of which nothing is known but how many samples they have."""
    splits = []
    for number in (main, last):
        split = object.__new__(PackedDataset)
        split.num_samples, split.length = number, 8
        splits.append(split)
    return AnnealedDataset(splits[0], splits[1], run)


def test_samples_of_two_lengths_make_no_run(samples: PackedDataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="samples of 8 and of 4 tokens do not make one run"):
        AnnealedDataset(samples, PackedDataset(tmp_path, "train", 4, TOKENIZER), 3)


# --- the thread ----------------------------------------------------------------------------------------------------


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert loaders() == []


def test_batches_are_prepared_ahead_by_one_thread_which_ends_with_the_reader(
    samples: PackedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[int] = Counter()
    whole = samples.batch

    def counted(which: Any) -> Batch:
        asked[len(which)] += 1
        return whole(which)

    monkeypatch.setattr(samples, "batch", counted)
    source = batches(samples, first=0, size=2, seed=0)
    assert loaders() == []  # nothing happens before the first batch is wanted
    next(source)
    assert len(loaders()) == 1
    until = time.monotonic() + 60
    while asked[2] < AHEAD + 1 and time.monotonic() < until:
        time.sleep(0.001)
    assert asked[2] == AHEAD + 1
    source.close()
    assert loaders() == []


def test_an_error_in_the_thread_reaches_the_reader(samples: PackedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = samples.batch

    def torn(which: Any) -> Batch:
        if 5 in which:
            raise DataError("is torn")
        return whole(which)

    monkeypatch.setattr(samples, "batch", torn)
    source = batches(samples, first=0, size=1, seed=0)
    order = sample_positions(0, samples.num_samples, samples.num_samples, seed=0).tolist()
    for number in order[: order.index(5)]:
        assert next(source).samples.tolist() == [number]
    with pytest.raises(DataError, match="is torn"):
        next(source)
    assert loaders() == []


# --- what is refused -----------------------------------------------------------------------------------------------


def test_shards_that_are_absent_too_small_or_of_other_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there are no shards train-\*\.bin"):
        PackedDataset(tmp_path, "train", 8, TOKENIZER)
    write(tmp_path, 0, [0, 7, 8])
    with pytest.raises(DataError, match=r"to train on .* 3 tokens are fewer than one sample of 9\nFetch more"):
        PackedDataset(tmp_path, "train", 8, TOKENIZER)
    with pytest.raises(DataError, match=r"there are no shards val-\*\.bin\nSet shard\.val_fraction"):
        PackedDataset(tmp_path, "val", 8, TOKENIZER)
    for number in range(2):
        write(tmp_path, number, [0, 7, 8, 9][: 4 - number], split="val")
    told = (
        r"validation text \(val-\*\.bin\) .* 4 tokens in the longest of 2 shards are .* of 9\nRaise shard\.val_fraction"
    )
    with pytest.raises(DataError, match=told):
        PackedDataset(tmp_path, "val", 8, TOKENIZER)
    with pytest.raises(DataError, match="was made with tokenizer aaaaaaaa, not bbbbbbbb"):
        PackedDataset(tmp_path, "train", 2, "b" * 64)
    write(tmp_path, 0, [0, 7, 8, 9], sequence_length=4)
    with pytest.raises(DataError, match="rows have 4 tokens, but 9 are needed"):
        PackedDataset(tmp_path, "train", 8, TOKENIZER)
    assert PackedDataset(tmp_path, "train", 3, TOKENIZER).num_samples == 1


def test_a_torn_shard_among_whole_ones_is_refused_by_name(tmp_path: Path) -> None:
    stream(tmp_path)
    file = tmp_path / "train-00002.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train-00002\.bin: has"):
        PackedDataset(tmp_path, "train", 8, TOKENIZER)


def test_a_split_of_which_a_shard_is_missing_is_refused(tmp_path: Path) -> None:
    for number in (0, 1, 2):
        facts = {"document_id": DOCUMENT, "shard": number, "shards": 3}
        path = tmp_path / f"train-{number:05d}"
        known: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "tokenizer_hash": TOKENIZER, "facts": facts}
        format.write(path, np.zeros(20, dtype=np.uint16), starts=[0], **known)
    assert PackedDataset(tmp_path, "train", 8, TOKENIZER).num_samples == 6
    (tmp_path / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"holds 2 of 3 shards train-\*\.bin"):
        PackedDataset(tmp_path, "train", 8, TOKENIZER)


def test_shards_of_two_kinds_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, 0, [0] * 18)
    write(tmp_path, 1, [0] * 18, sequence_length=9)
    with pytest.raises(DataError, match=r"train-00001: has \['rows', 0, 9\], but train-00000 has \['stream'"):
        PackedDataset(tmp_path, "train", 8, TOKENIZER)


def test_batches_that_must_not_be_early_are_made_when_they_are_asked_for(samples: PackedDataset) -> None:
    made: list[int] = []

    class Watched(PackedDataset):
        def batch(self, numbers: NDArray[np.int64]) -> Batch:
            made.append(len(made))
            return samples.batch(numbers)

    watched = object.__new__(Watched)
    watched.__dict__.update(samples.__dict__)
    source = batches(watched, first=2, size=2, seed=3, early=False)
    found = [next(source).samples.tolist() for _ in range(3)]
    assert len(made) == 3
    assert found == [batch.samples.tolist() for batch in islice(batches(samples, first=2, size=2, seed=3), 3)]


# --- order ------------------------------------------------------------------------------------------------------------


SIZES = [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4096, 4097]


@pytest.mark.parametrize("num_samples", SIZES)
@pytest.mark.parametrize("seed", [0, 1, -5, 2**63])
def test_every_sample_comes_exactly_once_an_epoch(num_samples: int, seed: int) -> None:
    for epoch in (0, 1, 7, 10**6):
        found = sample_positions(epoch * num_samples, num_samples, num_samples, seed)
        assert np.array_equal(np.sort(found), np.arange(num_samples))


@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_an_epoch_is_a_bijection_for_any_size_and_seed(num_samples: int, seed: int, epoch: int) -> None:
    found = sample_positions(epoch * num_samples, num_samples, num_samples, seed)
    assert len(np.unique(found)) == num_samples
    assert found.min() == 0
    assert found.max() == num_samples - 1


@given(st.integers(1, 3000), st.integers(0, 99), st.integers(0, 10**12), st.lists(st.integers(0, 50), max_size=6))
def test_steps_of_any_length_and_one_long_stretch_are_the_same(
    num_samples: int, seed: int, first: int, lengths: list[int]
) -> None:
    whole = sample_positions(first, sum(lengths), num_samples, seed)
    ends = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    pieces = [sample_positions(first + a, b - a, num_samples, seed) for a, b in pairwise(ends)]
    assert [number for piece in pieces for number in piece] == whole.tolist()


def test_a_far_place_is_found_at_once_and_is_the_one_that_stepping_reaches() -> None:
    num_samples, far = 999_983, 10**9
    began = time.process_time()
    found = sample_positions(far, 64, num_samples, seed=3)
    assert time.process_time() - began < 0.1
    epoch, place = divmod(far, num_samples)
    stepped = sample_positions(epoch * num_samples, num_samples, num_samples, seed=3)
    assert np.array_equal(found, stepped[place : place + 64])


def test_epochs_and_seeds_differ() -> None:
    orders = [sample_positions(epoch * 100, 100, 100, seed) for epoch in range(6) for seed in range(6)]
    assert len({tuple(order.tolist()) for order in orders}) == 36
    same_place = [int((one == other).sum()) for one, other in pairwise(orders)]
    assert max(same_place) < 12  # chance leaves one of a hundred in its place


def test_the_order_is_written_down_and_stays_what_it_is() -> None:
    """Runs that are resumed with a newer version must see the samples they have not seen."""
    assert sample_positions(0, 12, 10, seed=0).tolist() == [7, 5, 4, 8, 0, 3, 9, 2, 6, 1, 9, 3]
    assert sample_positions(10**9, 6, 4097, seed=1234).tolist() == [1767, 395, 2620, 1365, 1546, 495]


@pytest.mark.parametrize("num_samples", [100, 1000, 4097])
def test_every_sample_is_as_likely_at_every_place(num_samples: int) -> None:
    """Within a tenth, where chance leaves a fourteenth. (With ten samples it is a quarter: halves of two bits.)"""
    epochs, bins = np.arange(20_000, dtype=np.uint64), 10
    for place in (0, num_samples // 2, num_samples - 1):
        found = permute(np.full_like(epochs, place), epochs, num_samples, seed=1) * bins // num_samples
        counts = np.bincount(found.astype(np.int64), minlength=bins)
        assert np.abs(counts * bins / len(epochs) - 1).max() < 0.1


def test_neighbors_in_an_epoch_are_not_neighbors_in_the_data() -> None:
    order = sample_positions(0, 10_000, 10_000, seed=5)
    steps = np.abs(np.diff(order))
    assert (steps == 1).mean() < 0.002
    assert steps.mean() == pytest.approx(10_000 / 3, rel=0.05)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.04
