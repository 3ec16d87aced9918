"""
Evaluation files of llm.c: questions with answers to choose from, as ids (HellaSwag, MMLU).

    256 int32      20240522, 1, number of examples, bytes of the longest
    uint16         of each example: 65535, its bytes, its number, the right answer, how many answers,
                   tokens of the question and these; of each answer its tokens and these
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bloomery.core.errors import DataError
from bloomery.core.files import check_regular
from bloomery.shards.format import HEADER_BYTES, HEADER_INTS

MAGIC, VERSION = 20240522, 1
BEGIN = 65535
FIRST = 6
"""uint16 before the question's tokens."""


@dataclass(frozen=True, kw_only=True)
class Example:
    question: NDArray[np.uint16]
    answers: tuple[NDArray[np.uint16], ...]
    right: int
    """Which of the answers."""


def read(file: Path, *, vocab_size: int) -> list[Example]:
    """
    All examples of a file. Raises DataError, which names the file and the example, for one that is torn, is of another
    kind, or holds ids outside of the vocabulary.
    """
    if os.path.exists(file):
        check_regular(file)
    size = file.stat().st_size if os.path.isfile(file) else -1
    if size < HEADER_BYTES:
        shown = "is missing" if size < 0 else f"has {size} bytes, less than a header of {HEADER_BYTES}"
        raise DataError(shown, where=str(file), cure=_CURE)
    header = np.fromfile(file, dtype="<i4", count=HEADER_INTS)
    if (header[0], header[1]) != (MAGIC, VERSION):
        raise DataError(f"begins with {header[0]} and {header[1]}, not {MAGIC} and {VERSION}", where=str(file))
    if size % 2:
        raise DataError(f"has {size} bytes, which is no whole number of uint16", where=str(file), cure=_CURE)
    stream = np.fromfile(file, dtype="<u2", offset=HEADER_BYTES)
    examples, place = [], 0
    for number in range(int(header[2])):
        example, place = _example(stream, place, number, file)
        if (highest := max(int(ids.max()) for ids in (example.question, *example.answers))) >= vocab_size:
            what = f"holds the token {highest}, outside of a vocabulary of {vocab_size}"
            raise DataError(what, where=f"{file}, example {number}", cure="It was made with another tokenizer.")
        examples.append(example)
    if place != len(stream):
        what = f"goes on for {2 * (len(stream) - place)} bytes after its {len(examples)} examples"
        raise DataError(what, where=str(file), cure=_CURE)
    return examples


_CURE = "It is damaged. Make it or fetch it again."


def _example(stream: NDArray[np.uint16], place: int, number: int, file: Path) -> tuple[Example, int]:
    """The example that begins at a place, and where the next one does."""
    where = f"{file}, example {number}"
    if len(stream) - place < FIRST:
        raise DataError(f"the file ends after {number} examples", where=where, cure=_CURE)
    begin, num_bytes, index, right, num_answers = map(int, stream[place : place + FIRST - 1])
    if begin != BEGIN or index != number:
        raise DataError(f"begins with {begin} and the number {index}", where=where, cure=_CURE)
    end = place + num_bytes // 2
    lists: list[NDArray[np.uint16]] = []
    at = place + FIRST - 1
    for _ in range(1 + num_answers):
        count = int(stream[at]) if at < min(end, len(stream)) else 0
        lists.append(stream[at + 1 : at + 1 + count])
        at += 1 + count
    if at != end or at > len(stream) or any(len(ids) == 0 for ids in lists):
        raise DataError(
            f"says it has {num_bytes} bytes, and its lists need {2 * (at - place)}", where=where, cure=_CURE
        )
    if right >= num_answers:
        raise DataError(f"says that answer {right} of {num_answers} is right", where=where, cure=_CURE)
    return Example(question=lists[0], answers=tuple(lists[1:]), right=right), end
