"""Rows of one length, in which rendered conversations stand side by side, as one shard with its mask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bloomery.shards import format
from bloomery.shards.packing import first_fit_decreasing
from bloomery.tokenizer.tokenizer import Tokenizer


@runtime_checkable
class Line(Protocol):
    """A conversation as ids, and which of them are learned."""

    @property
    def ids(self) -> Any: ...

    @property
    def mask(self) -> Any: ...


@dataclass(frozen=True)
class Packed:
    rows: list[list[int]]
    """Which groups stand in each row, in order."""
    tokens: int
    """Without padding."""
    supervised: int

    def full(self, row_tokens: int) -> float:
        """Share of the rows that is not padding."""
        return round(self.tokens / max(len(self.rows) * row_tokens, 1), 4)


def write(
    path: Path,
    groups: Sequence[Sequence[Line]],
    *,
    tokenizer: Tokenizer,
    row_tokens: int,
    facts: Mapping[str, Any],
    longest_padding: int | None = None,
) -> Packed:
    """
    Pack groups, whose lines stay together in their order, into rows; pad these, and write them. Padding belongs to the
    last line of its row, and with `longest_padding` to pieces of its own, of no more tokens than that.
    """
    packed = first_fit_decreasing([sum(len(line.ids) for line in group) for group in groups], row_tokens)
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    tokens = np.full((len(packed), row_tokens), tokenizer.pad_id, dtype=kind)
    mask = np.zeros((len(packed), row_tokens), dtype=np.uint8)
    starts: list[int] = []
    filled = 0
    for row, indices in enumerate(packed):
        place = 0
        for line in (line for index in indices for line in groups[index]):
            starts.append(row * row_tokens + place)
            tokens[row, place : place + len(line.ids)] = line.ids
            mask[row, place : place + len(line.ids)] = line.mask
            place += len(line.ids)
        filled += place
        if longest_padding is not None:
            starts += [row * row_tokens + at for at in range(place, row_tokens, longest_padding)]
    format.write(
        path,
        tokens.reshape(-1),
        mask=mask.reshape(-1),
        vocab_size=tokenizer.vocab_size,
        starts=starts,
        tokenizer_hash=tokenizer.hash,
        layout="rows",
        facts={"document_id": tokenizer.document_id, "row_tokens": row_tokens, **facts},
    )
    return Packed(packed, filled, int(mask.sum()))
