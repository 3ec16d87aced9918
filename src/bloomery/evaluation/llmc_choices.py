"""
Multiple-choice evaluation files of llm.c (HellaSwag, MMLU): read them and rank the answers.

The answers are token IDs already. The likeliest answer is the model's choice, by two measures:

    per byte     the highest   Σ log p(answer | question) / bytes of the answer
    per token    the highest   Σ log p(answer | question) / tokens of the answer, which is what llm.c counts

The sum alone would favor short answers. The measure per byte compares models with different tokenizers.

File format:

    256 int32      20240522, 1, number of examples, bytes of the longest
    uint16         of each example: 65535, its bytes, its number, the right answer, how many answers,
                   tokens of the question and these; of each answer its tokens and these
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import DataError
from bloomery.core.io import check_regular
from bloomery.core.signals import StopRequest
from bloomery.model.transformer import Transformer
from bloomery.shards.format import HEADER_BYTES, HEADER_INTS
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train.precision import Precision

import torch
from torch import Tensor

MAGIC, VERSION = 20240522, 1
BEGIN = 65535
FIRST = 6
"""uint16 before the question's tokens."""


@dataclass(frozen=True, kw_only=True)
class ChoiceExample:
    question: NDArray[np.uint16]
    answers: tuple[NDArray[np.uint16], ...]
    right: int
    """Which of the answers."""


def read(file: Path, *, vocab_size: int) -> list[ChoiceExample]:
    """
    All examples of a file. Raises DataError, which names the file and the example, for one that is torn, is of another
    kind, or holds ids outside of the vocabulary.
    """
    if os.path.exists(file):
        check_regular(file)
    size = file.stat().st_size if os.path.isfile(file) else -1
    if size < HEADER_BYTES:
        shown = "is missing" if size < 0 else f"has {size} bytes, less than a header of {HEADER_BYTES}"
        raise DataError(shown, where=str(file), hint=_CURE)
    header = np.fromfile(file, dtype="<i4", count=HEADER_INTS)
    if (header[0], header[1]) != (MAGIC, VERSION):
        raise DataError(f"begins with {header[0]} and {header[1]}, not {MAGIC} and {VERSION}", where=str(file))
    if size % 2:
        raise DataError(f"has {size} bytes, which is not a multiple of 2", where=str(file), hint=_CURE)
    stream = np.fromfile(file, dtype="<u2", offset=HEADER_BYTES)
    examples, offset = [], 0
    for number in range(int(header[2])):
        example, offset = _example(stream, offset, number, file)
        if (highest := max(int(ids.max()) for ids in (example.question, *example.answers))) >= vocab_size:
            what = f"holds the token {highest}, outside the vocabulary of {vocab_size}"
            raise DataError(
                what, where=f"{file}, example {number}", hint="Use a file that was made with this tokenizer."
            )
        examples.append(example)
    if offset != len(stream):
        what = f"has {2 * (len(stream) - offset)} more bytes after its {len(examples)} examples"
        raise DataError(what, where=str(file), hint=_CURE)
    return examples


_CURE = "The file is damaged. Create or download it again."


def _example(stream: NDArray[np.uint16], offset: int, number: int, file: Path) -> tuple[ChoiceExample, int]:
    """The example that begins at `offset`, and the offset of the next example."""
    where = f"{file}, example {number}"
    if len(stream) - offset < FIRST:
        raise DataError(f"the file ends after {number} examples", where=where, hint=_CURE)
    begin, num_bytes, index, right, num_answers = map(int, stream[offset : offset + FIRST - 1])
    if begin != BEGIN or index != number:
        raise DataError(f"begins with {begin} and the number {index}, not as an example does", where=where, hint=_CURE)
    end = offset + num_bytes // 2
    lists: list[NDArray[np.uint16]] = []
    at = offset + FIRST - 1
    for _ in range(1 + num_answers):
        count = int(stream[at]) if at < min(end, len(stream)) else 0
        lists.append(stream[at + 1 : at + 1 + count])
        at += 1 + count
    if at != end or at > len(stream) or any(len(ids) == 0 for ids in lists):
        raise DataError(
            f"says that it has {num_bytes} bytes, but its lists need {2 * (at - offset)}", where=where, hint=_CURE
        )
    if right >= num_answers:
        raise DataError(f"says that answer {right} of {num_answers} is correct", where=where, hint=_CURE)
    return ChoiceExample(question=lists[0], answers=tuple(lists[1:]), right=right), end


@dataclass(frozen=True)
class MultipleChoiceEval:
    """Examples, and how many bytes each id stands for."""

    examples: Sequence[ChoiceExample]
    byte_lengths: Sequence[int]
    rows_at_once: int = 16

    @classmethod
    def read(
        cls, file: Path, tokenizer: Tokenizer, *, limit: int | None = None, rows_at_once: int = 16
    ) -> "MultipleChoiceEval":
        """All examples of a file, or so many of them at even distances. Raises DataError where it is none of ours."""
        examples = read(file, vocab_size=tokenizer.vocab_size)
        if not examples:
            raise DataError("holds no examples", where=str(file), hint="Create or download it again.")
        count = min(limit or len(examples), len(examples))
        chosen = [examples[place * len(examples) // count] for place in range(count)]
        return cls(chosen, tokenizer.byte_lengths, rows_at_once)

    def accuracy(self, name: str, model: Transformer, precision: Precision, stop: StopRequest) -> dict[str, float]:
        """
        The share of examples whose right answer is the likeliest, as `name` by bytes and `name`_per_token. Raises
        Terminated where `stop` was asked for.
        """
        sums = iter(self._log_likelihoods(model, precision, stop))
        by_bytes = by_tokens = 0
        for example in self.examples:
            likelihoods = np.array([next(sums) for _ in example.answers])
            sizes = np.array([sum(self.byte_lengths[id] for id in ids) for ids in example.answers])
            counts = np.array([len(ids) for ids in example.answers])
            by_bytes += int(np.argmax(likelihoods / np.maximum(sizes, 1))) == example.right
            by_tokens += int(np.argmax(likelihoods / counts)) == example.right
        total = len(self.examples)
        return {name: round(by_bytes / total, 5), f"{name}_per_token": round(by_tokens / total, 5)}

    def _log_likelihoods(self, model: Transformer, precision: Precision, stop: StopRequest) -> Iterator[float]:
        """Of each answer after its question, in nats, in order."""
        rows = [(example.question, ids) for example in self.examples for ids in example.answers]
        for first in range(0, len(rows), self.rows_at_once):
            stop.check()
            yield from log_likelihoods(model, precision, rows[first : first + self.rows_at_once]).tolist()


@torch.no_grad()
def log_likelihoods(model: Transformer, precision: Precision, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Tensor:
    """
    Σ log p(answer | question) of each row, in nats. Of what is longer than the model's context the end is read; of an
    answer that is, only its last tokens count.
    """
    whole = [np.concatenate(row).astype(np.int64)[-model.config.context_length - 1 :] for row in rows]
    scored = [min(len(answer), len(ids) - 1) for (_, answer), ids in zip(rows, whole, strict=True)]
    longest = max(len(ids) for ids in whole) - 1
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    targets, counts = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, (tokens, count) in enumerate(zip(whole, scored, strict=True)):
        end = len(tokens) - 1
        ids[row, :end], targets[row, :end] = torch.from_numpy(tokens[:-1]), torch.from_numpy(tokens[1:])
        counts[row, end - count : end] = True
    torch_device = precision.device.torch_device
    with precision.autocast():
        hidden = model(ids.to(torch_device))
        scores = model.logits(hidden[counts.to(torch_device)][None])[0]
    log_probs = torch.log_softmax(scores.float(), -1).gather(1, targets[counts].to(torch_device)[:, None])[:, 0]
    owner = torch.arange(len(rows)).repeat_interleave(counts.sum(1)).to(torch_device)
    return torch.zeros(len(rows), device=torch_device, dtype=torch.float32).index_add(0, owner, log_probs).cpu()
