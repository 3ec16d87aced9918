"""
Models that others made: their tokenizer with the special tokens that conversations need, and rows for those.

A new row is what the model has for the closest thing it knows: the token that opens a document is read as the one that
begins a text, what ends a document or a message is said where a text would end, and the rest is the mean of all rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.core.errors import CheckpointError
from bloomery.model.transformer import Transformer
from bloomery.tokenizer import importers
from bloomery.tokenizer.tokenizer import DOCUMENT, END, SPECIAL, Tokenizer

import torch
from torch import Tensor

NAME = "imported"
"""Stands for the hash of the shards in the lineage of a model that others trained."""


def tokenizer_of(folder: Path, rows: int, special: Sequence[str] = SPECIAL) -> tuple[Tokenizer, dict[str, int]]:
    """
    The tokenizer of a model folder or of a file, and the special tokens that were added to it, with their ids. Raises
    CheckpointError where it has more ids than the model has rows, DataError where there is none that can be read.
    """
    tokenizer, added = importers.load_with_added(folder, special=special)
    ids = {name: tokenizer.special_id(name) for name in special}
    added |= {name: id for name, id in ids.items() if id is not None and id >= rows}
    if more := set(range(rows, tokenizer.vocab_size)) - set(added.values()):
        what = f"the tokenizer has {rows + len(more)} ids, and the model {rows}"
        raise CheckpointError(what, where=str(folder), cure="It is the tokenizer of another model.")
    return tokenizer, added


def add_rows(model: Transformer, rows: int, added: Mapping[str, int], facts: Mapping[str, Any]) -> None:
    """
    Fill the rows of the special tokens that were added to a model of `rows` ids, and any that nothing uses. `facts`
    may say which ids begin and end a text (bos_token_id, eos_token_id).
    """
    begin, end = (_first(facts.get(name)) for name in ("bos_token_id", "eos_token_id"))
    begin, end = (begin if begin is not None else end), (end if end is not None else begin)
    embed, head = model.embed.weight, model.head.weight
    with torch.no_grad():
        for table, opens in ((embed, begin), (head, end)):
            mean = table[:rows].float().mean(0)
            table[rows:] = mean.to(table.dtype)
            for name, id in added.items():
                like = opens if name == DOCUMENT else end if name == END else None
                table[id] = mean.to(table.dtype) if like is None else _row(table, like, rows, mean)
            if head is embed:
                break


def _row(table: Tensor, id: int, rows: int, mean: Tensor) -> Tensor:
    return table[id].clone() if id < rows else mean.to(table.dtype)


def _first(value: Any) -> int | None:
    """Of one id or several, the first; None for what is no id."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if type(value) is int and value >= 0 else None
