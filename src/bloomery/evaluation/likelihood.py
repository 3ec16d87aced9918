"""
How likely texts are after a prompt: log p(continuation | prompt), summed over the continuation's tokens only.

Prompt and continuation are encoded together, and what is beyond the prompt's own ids is the continuation; white space
at the prompt's end belongs to it. So does lm-evaluation-harness, and scores equal its scores. What is longer than the
model's context loses its beginning.

Several continuations of one prompt share it: prompt and continuations are one row, in which each sees the prompt and
itself, at the positions it would have alone.

    row         p p p p a a b b b        positions  0 1 2 3 4 5 4 5 6        b b b see p p p p and what of b is before
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.errors import DataError
from bloomery.generate.sampling import check_finite
from bloomery.model.attention import Cache
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.tokenizer import Tokenizer

import torch
from torch import Tensor

TOKENS_AT_ONCE = 8192
SCORES_AT_ONCE = 2**26
"""Numbers in one table of scores, places times vocabulary."""


class Asked(NamedTuple):
    """A continuation of a prompt, in ids."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


class Likelihood(NamedTuple):
    log_p: float
    """In nats."""
    greedy: bool
    """Whether every token was the most likely one of those that the tokenizer has."""
    tokens: int


@dataclass(frozen=True)
class _Row:
    """A prompt with some continuations of it."""

    prompt: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]
    """Which of those asked each continuation is."""

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(len(tail) - 1 for tail in self.tails)


def encoded(tokenizer: Tokenizer, prompt: str, continuation: str, *, opening: bool = True) -> Asked:
    """
    Ids of a pair. With `opening`, the token that opens every document stands first, as in training; an empty prompt has
    it in any case, for something has to stand before the first token.
    """
    kept = prompt.rstrip()
    before = tokenizer.encode(kept)
    whole = tokenizer.encode(prompt + continuation)
    if len(whole) <= len(before):
        cure = "Leave this question out: its tokenizer makes one token of the prompt's end and what follows."
        raise DataError(f"{continuation!r} adds no token to its prompt", where=repr(prompt[-40:]), cure=cure)
    first = [tokenizer.document_id] if opening or not before else []
    return Asked((*first, *before), tuple(whole[len(before) :]))


def score(
    model: Transformer,
    asked: Sequence[Asked],
    *,
    num_ids: int,
    tokens_at_once: int = TOKENS_AT_ONCE,
    seen: Callable[[int], None],
) -> list[Likelihood]:
    """
    The likelihood of each, in their order. `seen` is told how many are done; `num_ids` are those of the tokenizer.

    How they are put together into batches changes nothing but the last bits.
    """
    rows = sorted(_rows(model, asked), key=lambda row: (row.length, row.owners))
    found: dict[int, Likelihood] = {}
    model.eval()
    for batch in _batches(rows, tokens_at_once):
        found |= _of_batch(model, batch, num_ids)
        seen(len(found))
    return [found[number] for number in range(len(asked))]


def _rows(model: Transformer, asked: Sequence[Asked]) -> Iterator[_Row]:
    """Those of one prompt together where the model's attention allows it and they fit; others by themselves."""
    context = model.config.context
    together = model.config.positions != "alibi" and all(window == "full" for window in _windows(model))
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, one in enumerate(asked):
        whole = (one.prompt + one.continuation)[-(context + 1) :]
        fits = len(whole) == len(one.prompt) + len(one.continuation)
        if together and fits and len(one.continuation) > 0:
            groups[one.prompt].append(number)
        else:
            tail = whole[len(whole) - min(len(one.continuation), len(whole) - 1) :]
            yield _Row(whole[: len(whole) - len(tail)], (tail,), (number,))
    for prompt, numbers in groups.items():
        yield _Row(prompt, tuple(asked[number].continuation for number in numbers), tuple(numbers))


def _windows(model: Transformer) -> Iterator[object]:
    return (model.config.layer(number)[1] for number in range(model.config.num_layers))


def _batches(rows: Sequence[_Row], tokens_at_once: int) -> Iterator[list[_Row]]:
    """Rows that ascend in length, so many that all together, filled up to the longest, have about so many tokens."""
    batch: list[_Row] = []
    for row in rows:
        if batch and (len(batch) + 1) * row.length > tokens_at_once:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def _of_batch(model: Transformer, rows: Sequence[_Row], num_ids: int) -> dict[int, Likelihood]:
    T = max(row.length for row in rows)
    device = model.embed.weight.device
    ids = torch.zeros((len(rows), T), dtype=torch.long)
    positions = torch.zeros_like(ids)
    parts = torch.full_like(ids, -1)
    places: list[tuple[int, int]] = []
    targets: list[int] = []
    for number, row in enumerate(rows):
        _lay(row, ids[number], positions[number], parts[number])
        for spot, target in _wanted(row):
            places.append((number, spot))
            targets.append(target)
    hidden = _hidden(model, ids.to(device), positions.to(device), parts.to(device))
    chosen = torch.tensor(places, device=device)
    wanted = torch.tensor(targets, device=device)
    log_p, best = _log_p(model, hidden[chosen[:, 0], chosen[:, 1]], wanted, num_ids)
    begin = 0
    found: dict[int, Likelihood] = {}
    for row in rows:
        for owner, tail in zip(row.owners, row.tails, strict=True):
            end = begin + len(tail)
            found[owner] = Likelihood(float(log_p[begin:end].sum()), bool(best[begin:end].all()), len(tail))
            begin = end
    return found


def _lay(row: _Row, ids: Tensor, positions: Tensor, parts: Tensor) -> None:
    """Fill in a row: the prompt is part 0, and the continuations are 1, 2, …, each without its last token."""
    spot = len(row.prompt)
    ids[:spot] = torch.tensor(row.prompt)
    positions[:spot] = torch.arange(spot)
    parts[:spot] = 0
    for number, tail in enumerate(row.tails, 1):
        end = spot + len(tail) - 1
        ids[spot:end] = torch.tensor(tail[:-1], dtype=torch.long)
        positions[spot:end] = torch.arange(len(row.prompt), len(row.prompt) + len(tail) - 1)
        parts[spot:end] = number
        spot = end


def _wanted(row: _Row) -> Iterator[tuple[int, int]]:
    """Where each token of each continuation is predicted, and the token."""
    spot = len(row.prompt)
    for tail in row.tails:
        for number, target in enumerate(tail):
            yield (spot + number - 1 if number else len(row.prompt) - 1), target
        spot += len(tail) - 1


def _hidden(model: Transformer, ids: Tensor, positions: Tensor, parts: Tensor) -> Tensor:
    if int(parts.max()) <= 1:  # one continuation each: nothing but what comes before can be seen
        alone: Tensor = model(ids)
        return alone
    mask = (parts[:, None, :] == 0) | (parts[:, None, :] == parts[:, :, None])
    cache = Cache.empty(model.config, len(ids), ids.shape[1], model.embed.weight)
    return model.extend(ids, cache, positions=positions, mask=mask)


def _log_p(model: Transformer, hidden: Tensor, wanted: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Of every wanted token: log p, and whether it is the most likely one of the first `num_ids`."""
    size = max(1, SCORES_AT_ONCE // model.vocab_size)
    found = []
    for begin in range(0, len(wanted), size):
        scores = model.logits(hidden[None, begin : begin + size])[0]
        some = wanted[begin : begin + size]
        log_p = torch.log_softmax(scores, dim=-1).gather(1, some[:, None])[:, 0]
        check_finite(log_p)
        best = scores[:, :num_ids].argmax(dim=-1) == some
        found.append((log_p.cpu().double(), best.cpu()))  # Apple's GPUs have no float64
    return torch.cat([one for one, _ in found]), torch.cat([one for _, one in found])
