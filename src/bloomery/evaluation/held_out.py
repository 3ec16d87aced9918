"""
Evaluate on validation text, on validation conversations and on validation questions of the toy worlds.

Text: bits per byte, compared with two compressors on the same bytes.

    bits per byte = Σ −log₂ p(token | what came before in its document) / bytes of the documents

The number does not depend on the tokenizer. The compressors see all documents of a domain as one stream, and learn only
from that stream. The model has its training behind it, so the model should win. The margin shows how much it learned.

Conversations: the log-likelihood of the assistant's messages, and whether the model's own answers end. Both are
measured before and after finetuning, on the sequences that the stage `instruct` set aside for validation. The model
sees the text before an answer exactly as it was rendered for training. So an answer is the part inside the loss mask.

Questions: the model answers greedily, and an answer counts as right if it equals the expected answer.
"""

import lzma
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

import bloomery.hw.require_torch  # noqa: F401  # noqa: F401
from bloomery.core.chat import Message, SamplingConfig, as_message
from bloomery.core.errors import DataError
from bloomery.data.sources import toy_worlds
from bloomery.evaluation import harness
from bloomery.evaluation.harness import Continuation, stable_seed
from bloomery.evaluation.stats import Score
from bloomery.generate.engine import Completion, Engine, check_finite
from bloomery.hw.device import Device
from bloomery.model.transformer import Transformer
from bloomery.shards import format
from bloomery.shards.loader import IGNORE, Batch
from bloomery.tokenizer.chat_template import ChatRenderer
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train.precision import Precision
from bloomery.train.step import micro_batch_loss
from bloomery.weights.hf import Loaded

import torch

AT_ONCE = 50
"""Answers that are sampled between two reports of progress."""


@dataclass(frozen=True)
class HeldOutAnswer:
    """An answer of a validation conversation, in token IDs, with everything before it."""

    number: int
    """Of its conversation, in the order of the shard."""
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    """With the token that ends it."""


def turns(instruct: Path, tokenizer_hash: str) -> Iterator[HeldOutAnswer]:
    """Every answer of every validation conversation, in the order of the shards."""
    number = 0
    for path in format.names(instruct, "val"):
        shard = format.read(path, tokenizer_hash=tokenizer_hash)
        assert shard.mask is not None, f"{path} has no mask"
        sequence_length = int(shard.index["row_tokens"])
        for start, following in zip(shard.starts, [*shard.starts[1:], len(shard.tokens)], strict=True):
            stop = min(following, (start // sequence_length + 1) * sequence_length)
            ids, mask = shard.tokens[start:stop].tolist(), shard.mask[start:stop]
            edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
            for begin, end in edges.tolist():
                yield HeldOutAnswer(number, tuple(ids[:begin]), tuple(ids[begin:end]))
            number += 1


def drawn(candidates: Iterable[HeldOutAnswer], count: int, seed: int, longest_prompt: int) -> list[HeldOutAnswer]:
    """
    One answer of each of `count` conversations, or of all conversations where there are fewer. Answers with more than
    `longest_prompt` tokens before them are not sampled.
    """
    rng = np.random.default_rng(seed)
    talks: dict[int, list[HeldOutAnswer]] = {}
    for turn in candidates:
        if len(turn.prompt) <= longest_prompt:
            talks.setdefault(turn.number, []).append(turn)
    chosen = sorted(rng.permutation(sorted(talks))[:count].tolist())
    return [talks[number][int(rng.integers(len(talks[number])))] for number in chosen]


def answers(loaded: Loaded, asked: Sequence[HeldOutAnswer], sampling: SamplingConfig) -> Iterator[Completion]:
    """What the model says in place of each answer. Each has a seed of its own, which that of `sampling` decides."""
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size, pack=True)
    stop = loaded.renderer.end_ids
    for begin in range(0, len(asked), AT_ONCE):
        some = asked[begin : begin + AT_ONCE]
        seeds = [stable_seed(sampling.seed or 0, turn.number, len(turn.prompt)) for turn in some]
        prompts = [turn.prompt for turn in some]
        yield from engine.generate_batch(prompts, sampling, stop_ids=stop, seeds=seeds)


def answer_scores(loaded: Loaded, asked: Sequence[HeldOutAnswer], said: Sequence[Completion]) -> dict[str, Any]:
    """
    `ended` is the share of answers that end by themselves. `nats_per_token` and `bits_per_byte` are of the given
    answers, with the token that ends each. `perplexity` is e to the nats. `length` has the mean number of tokens of the
    model's answers, and of the given answers. Both count the token that ends an answer.
    """
    pairs = [Continuation(one.prompt, one.answer) for one in asked]
    likelihoods = harness.score(loaded.model, pairs, num_ids=loaded.tokenizer.vocab_size, seen=lambda _: None)
    sizes = [len(loaded.renderer.said(one.answer).encode()) for one in asked]
    nats = -sum(one.log_p for one in likelihoods)
    tokens, size = sum(one.tokens for one in likelihoods), sum(sizes)
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


def shown(loaded: Loaded, turn: HeldOutAnswer, said: Completion) -> dict[str, Any]:
    """For people: the conversation with its marks, what stood there, and what the model says."""
    return {
        "before": loaded.tokenizer.decode(turn.prompt),
        "given": loaded.renderer.said(turn.answer),
        "said": loaded.renderer.said(said.ids),
        "ended": said.stopped,
    }


DRAWS_TO_FIND_KINDS = 1000
"""The rarest kind is one in a hundred: none is missed."""
DRAWS_BEFORE_USED_UP = 5000


@dataclass(frozen=True)
class ToyQuestion:
    kind: str
    messages: list[Message]
    """Up to the question; earlier answers are the right ones."""
    answer: str


@dataclass(frozen=True)
class JudgedAnswer:
    question: ToyQuestion
    said: str
    ended: bool

    @property
    def exact(self) -> bool:
        return self.ended and self.said == self.question.answer


def held_out(seed: int, count: int) -> list[ToyQuestion]:
    """
    `count` validation questions, as evenly over the kinds as possible, no question twice.

    Some kinds have few questions. When a kind is used up, the others get more; when all are, there are fewer than
    `count`.
    """
    kinds = sorted({talk.kind for talk in toy_worlds.conversations(seed, DRAWS_TO_FIND_KINDS, "held out")})
    quotas = {kind: count // len(kinds) + (place < count % len(kinds)) for place, kind in enumerate(kinds)}
    by_kind: dict[str, list[ToyQuestion]] = {kind: [] for kind in kinds}
    seen: set[str] = set()
    misses = 0
    for question in _stream(seed):
        if len(seen) == count or misses > 2 * DRAWS_BEFORE_USED_UP:
            break
        key = "\n".join(message["content"] for message in question.messages)
        misses += 1
        if misses > DRAWS_BEFORE_USED_UP:
            quotas = dict.fromkeys(kinds, count)
        if key not in seen and len(by_kind.get(question.kind, ())) < quotas.get(question.kind, 0):
            seen.add(key)
            by_kind[question.kind].append(question)
            misses = 0
    return [question for kind in kinds for question in by_kind[kind]]


def _stream(seed: int) -> Iterator[ToyQuestion]:
    for talk in toy_worlds.conversations(seed, 10**9, "held out"):
        messages = [as_message(message) for message in talk.messages()]
        yield ToyQuestion(talk.kind, messages[:-1], messages[-1]["content"])


def fitting(engine: Engine, renderer: ChatRenderer, questions: Sequence[ToyQuestion]) -> list[ToyQuestion]:
    """
    The questions that leave room for an answer in the model's context: the others cannot be asked.

    Raises DataError where there are questions, and none of them fits.
    """
    lengths = [len(renderer.prompt(question.messages)) for question in questions]
    kept = [question for question, length in zip(questions, lengths, strict=True) if length < engine.context]
    if questions and not kept:
        what = f"none of {len(questions)} validation questions fits into the model's context of {engine.context} tokens"
        hint = f"Raise pretrain.model.context_length above {min(lengths)}, or set evaluate.toy_questions=0."
        raise DataError(what, where="evaluate.toy_questions", hint=hint)
    return kept


def ask(
    engine: Engine, renderer: ChatRenderer, questions: Sequence[ToyQuestion], max_tokens: int
) -> list[JudgedAnswer]:
    """Every question, answered greedily by the model, through the renderer it was trained with."""
    prompts = [renderer.prompt(question.messages) for question in questions]
    stop = renderer.end_ids
    answers = engine.generate_batch(prompts, SamplingConfig.greedy(max_tokens), stop_ids=stop)
    return [
        JudgedAnswer(question, renderer.said(answer.ids), answer.stopped)
        for question, answer in zip(questions, answers, strict=True)
    ]


def table(judged: Sequence[JudgedAnswer]) -> dict[str, dict[str, float | int]]:
    """By kind: how many, and the shares that were exactly right and that ended by themselves."""
    kinds: dict[str, list[JudgedAnswer]] = defaultdict(list)
    for answer in judged:
        kinds[answer.question.kind].append(answer)
    return {kind: question_scores(some) for kind, some in sorted(kinds.items())}


def question_scores(judged: Sequence[JudgedAnswer]) -> dict[str, float | int]:
    n = len(judged)
    return {
        "n": n,
        "exact": round(sum(one.exact for one in judged) / max(n, 1), 4),
        "ended": round(sum(one.ended for one in judged) / max(n, 1), 4),
    }


WINDOWS_AT_ONCE = 32


@dataclass(frozen=True)
class Compression:
    """Bits per byte of the same bytes under three predictors."""

    model: float
    xz: float
    zstd: float
    bytes: int
    documents: int


def measure(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], device: Device) -> Compression:
    """Score whole documents. Every token is predicted from at least half a context, where its document has so much."""
    raw = "\n".join(texts).encode()
    size = sum(len(text.encode()) for text in texts)
    nats = document_nats(model, tokenizer, texts, device)
    return Compression(
        model=round(nats / math.log(2) / size, 4),
        xz=round(8 * len(lzma.compress(raw, preset=9)) / len(raw), 4),
        zstd=round(8 * len(zstandard.ZstdCompressor(level=19).compress(raw)) / len(raw), 4),
        bytes=size,
        documents=len(texts),
    )


def document_nats(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], device: Device) -> float:
    """−log p of all documents, each after its opening token, in nats."""
    T, precision = model.config.context_length, Precision.decide("auto", device)
    rows, targets = [], []
    for text in texts:
        ids = np.array([tokenizer.document_id, *tokenizer.encode(text)], dtype=np.int64)
        for start, first in windows(len(ids) - 1, T):
            row = np.full(T, tokenizer.fill_id, dtype=np.int64)
            target = np.full(T, IGNORE, dtype=np.int64)
            piece = ids[start : start + T + 1]
            row[: len(piece) - 1] = piece[:-1]
            target[first : len(piece) - 1] = piece[first + 1 :]
            rows.append(row)
            targets.append(target)
    total = 0.0
    model.eval()
    with torch.no_grad():
        for offset in range(0, len(rows), WINDOWS_AT_ONCE):
            some = np.stack(rows[offset : offset + WINDOWS_AT_ONCE])
            positions = np.broadcast_to(np.arange(T), some.shape).copy()
            batch = Batch(
                some,
                np.stack(targets[offset : offset + WINDOWS_AT_ONCE]),
                positions,
                np.zeros_like(some),
                positions[:, 0],
            )
            loss = micro_batch_loss(model, batch, precision)
            check_finite(loss)
            total += float(loss)
    return total


def windows(num_targets: int, length: int) -> list[tuple[int, int]]:
    """(start, first scored position) of windows that score each target once. All but the first keep half as context."""
    spans = [(0, 0)]
    scored = min(num_targets, length)
    while scored < num_targets:
        start = scored - length // 2
        spans.append((start, length // 2))
        scored = min(num_targets, start + length)
    return spans
