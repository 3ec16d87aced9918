"""
Pack tokenized conversations into sequences of one length, written as a shard with its mask.

Packing takes the longest conversation first, so that little is padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bloomery.shards import format
from bloomery.tokenizer.tokenizer import Tokenizer


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Rows of indices whose lengths add up to at most `capacity`; every index in exactly one row.

    Longest first, each into the first row that still takes it (Johnson 1973: at most 11/9 of the best number of rows,
    plus 6/9). Ties go by index, so equal inputs give equal rows. Raises ValueError for a length over capacity.

    A tree over the rows holds the largest room below each of its nodes, so that n lengths take n log n steps.
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node n has the children 2n and 2n + 1; the rows are the last `leaves` nodes
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"length {length} does not fit into a row of {capacity}")
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


@runtime_checkable
class Line(Protocol):
    """A conversation as token IDs, with a mask of those in the loss."""

    @property
    def ids(self) -> Any: ...

    @property
    def mask(self) -> Any: ...


@dataclass(frozen=True)
class PackedRows:
    rows: list[list[int]]
    """Which groups stand in each row, in order."""
    tokens: int
    """Without padding."""
    supervised: int

    def full(self, sequence_length: int) -> float:
        """Share of the rows that is not padding."""
        return round(self.tokens / max(len(self.rows) * sequence_length, 1), 4)


def write(
    path: Path,
    groups: Sequence[Sequence[Line]],
    *,
    tokenizer: Tokenizer,
    sequence_length: int,
    facts: Mapping[str, Any],
    longest_padding: int | None = None,
) -> PackedRows:
    """
    Pack groups, whose lines stay together in their order, into rows; pad these, and write them. Padding belongs to the
    last line of its row, and with `longest_padding` to pieces of its own, of no more tokens than that.
    """
    packed = first_fit_decreasing([sum(len(line.ids) for line in group) for group in groups], sequence_length)
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    tokens = np.full((len(packed), sequence_length), tokenizer.fill_id, dtype=kind)
    mask = np.zeros((len(packed), sequence_length), dtype=np.uint8)
    starts: list[int] = []
    filled = 0
    for row, indices in enumerate(packed):
        position = 0
        for line in (line for index in indices for line in groups[index]):
            starts.append(row * sequence_length + position)
            tokens[row, position : position + len(line.ids)] = line.ids
            mask[row, position : position + len(line.ids)] = line.mask
            position += len(line.ids)
        filled += position
        if longest_padding is not None:
            starts += [row * sequence_length + at for at in range(position, sequence_length, longest_padding)]
    format.write(
        path,
        tokens.reshape(-1),
        mask=mask.reshape(-1),
        vocab_size=tokenizer.vocab_size,
        starts=starts,
        tokenizer_hash=tokenizer.hash,
        layout="rows",
        facts={"document_id": tokenizer.document_id, "row_tokens": sequence_length, **facts},
    )
    return PackedRows(packed, filled, int(mask.sum()))
