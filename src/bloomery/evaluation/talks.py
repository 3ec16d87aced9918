"""
Held-out conversations: how likely a model finds what the assistant says in them, and whether its own answers end.

Both are asked of a model before and after finetuning, from the rows that the stage `instruct` held out. What comes
before an answer is given to the model as it was rendered for training; so an answer is what stands in the mask.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.evaluation import likelihood
from bloomery.evaluation.likelihood import Asked
from bloomery.evaluation.scoring import Score
from bloomery.evaluation.written import stable_seed
from bloomery.generate.engine import Completion, Engine
from bloomery.shards import format
from bloomery.weights.huggingface import Loaded

AT_ONCE = 50
"""Answers that are drawn before it is told how many there are."""


@dataclass(frozen=True)
class Turn:
    """An answer of a held-out conversation, in ids, with all that comes before it."""

    number: int
    """Of its conversation, in the order of the shard."""
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    """With the token that ends it."""


def turns(instruct: Path, tokenizer_hash: str) -> Iterator[Turn]:
    """Every answer of every conversation that was held out, in the order of the shards."""
    number = 0
    for path in format.names(instruct, "val"):
        shard = format.read(path, tokenizer_hash=tokenizer_hash)
        assert shard.mask is not None, f"{path} has no mask"
        row_tokens = int(shard.index["row_tokens"])
        for start, following in zip(shard.starts, [*shard.starts[1:], len(shard.tokens)], strict=True):
            stop = min(following, (start // row_tokens + 1) * row_tokens)
            ids, mask = shard.tokens[start:stop].tolist(), shard.mask[start:stop]
            edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
            for begin, end in edges.tolist():
                yield Turn(number, tuple(ids[:begin]), tuple(ids[begin:end]))
            number += 1


def drawn(found: Iterable[Turn], count: int, seed: int, longest_prompt: int) -> list[Turn]:
    """
    One answer of each of `count` conversations; of all of them where there are fewer. An answer is not drawn where too
    much comes before it: `longest_prompt` in tokens.
    """
    rng = np.random.default_rng(seed)
    talks: dict[int, list[Turn]] = {}
    for turn in found:
        if len(turn.prompt) <= longest_prompt:
            talks.setdefault(turn.number, []).append(turn)
    chosen = sorted(rng.permutation(sorted(talks))[:count].tolist())
    return [talks[number][int(rng.integers(len(talks[number])))] for number in chosen]


def answers(
    loaded: Loaded, asked: Sequence[Turn], *, max_tokens: int, temperature: float, seed: int
) -> Iterator[Completion]:
    """What the model says in place of each answer. Each is drawn by a seed of its own."""
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size)
    stop = frozenset({loaded.renderer.end_id})
    for begin in range(0, len(asked), AT_ONCE):
        some = asked[begin : begin + AT_ONCE]
        seeds = [stable_seed(seed, turn.number, len(turn.prompt)) for turn in some]
        prompts = [turn.prompt for turn in some]
        yield from engine.draw(prompts, seeds, max_tokens=max_tokens, stop_ids=stop, temperature=temperature)


def scores(loaded: Loaded, asked: Sequence[Turn], said: Sequence[Completion]) -> dict[str, Any]:
    """
    ended: the share of answers that end by themselves. nats_per_token and bits_per_byte: of the given answers, with the
    token that ends each; perplexity: e to the nats. length: the mean of tokens said, and of those of the given answers,
    the token that ends one among them.
    """
    pairs = [Asked(one.prompt, one.answer) for one in asked]
    found = likelihood.score(loaded.model, pairs, num_ids=loaded.tokenizer.vocab_size, seen=lambda _: None)
    sizes = [len(loaded.renderer.said(one.answer).encode()) for one in asked]
    nats = -sum(one.log_p for one in found)
    tokens, size = sum(one.tokens for one in found), sum(sizes)
    return {
        "ended": vars(Score.of([float(one.stopped) for one in said])),
        "nats_per_token": round(nats / max(tokens, 1), 6),
        "perplexity": round(math.exp(nats / max(tokens, 1)), 4),
        "bits_per_byte": round(nats / math.log(2) / max(size, 1), 6),
        "tokens": tokens,
        "bytes": size,
        "length": {
            "said": round(sum(len(one.ids) + one.stopped for one in said) / max(len(said), 1), 2),
            "given": round(tokens / max(len(asked), 1), 2),
        },
    }


def shown(loaded: Loaded, turn: Turn, said: Completion) -> dict[str, Any]:
    """For people: the conversation with its marks, what stood there, and what the model says."""
    return {
        "before": loaded.tokenizer.decode(turn.prompt),
        "given": loaded.renderer.said(turn.answer),
        "said": loaded.renderer.said(said.ids),
        "ended": said.stopped,
    }
