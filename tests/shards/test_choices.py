"""Evaluation files of llm.c, laid out by hand from their documented layout."""

import struct
from pathlib import Path

import pytest

from bloomery.core.errors import DataError
from bloomery.evaluation import llmc_choices

EXAMPLES = [([11, 12, 13], [[1], [2, 3], [4, 5, 6], [7]], 2), ([21], [[8, 9], [1], [2], [3]], 0)]


def by_hand(count: int = 2, magic: int = 20240522) -> bytes:
    body, longest = b"", 0
    for number, (question, answers, right) in enumerate(EXAMPLES):
        lists = b"".join(struct.pack(f"<{1 + len(ids)}H", len(ids), *ids) for ids in (question, *answers))
        size = 10 + len(lists)
        longest = max(longest, size)
        body += struct.pack("<5H", 65535, size, number, right, len(answers)) + lists
    return struct.pack("<256i", magic, 1, count, longest, *[0] * 252) + body


def test_an_evaluation_file_gives_questions_answers_and_which_is_right(tmp_path: Path) -> None:
    file = tmp_path / "hellaswag_val.bin"
    file.write_bytes(by_hand())
    found = llmc_choices.read(file, vocab_size=30)
    shown = [(one.question.tolist(), [ids.tolist() for ids in one.answers], one.right) for one in found]
    assert shown == EXAMPLES


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (by_hand()[:-2], "example 1: says that it has"),
        (by_hand()[:-1], "which is not a multiple of 2"),
        (by_hand()[:1026], "example 0: the file ends after 0 examples"),
        (by_hand(count=3), "example 2: the file ends after 2 examples"),
        (by_hand(count=1), "has 32 more bytes after its 1 examples"),
        (by_hand() + b"ab", "has 2 more bytes after its 2 examples"),
        (by_hand(magic=20240520), "begins with 20240520 and 1, not 20240522 and 1"),
        (by_hand()[:1028] + b"\1" + by_hand()[1029:], "example 0: begins with 65535 and the number 1"),
        (b"", "has 0 bytes, less than a header"),
    ],
)
def test_a_damaged_evaluation_file_is_refused_by_name(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "eval.bin"
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{file}.*({told})"):
        llmc_choices.read(file, vocab_size=30)


def test_ids_of_another_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "eval.bin"
    file.write_bytes(by_hand())
    with pytest.raises(DataError, match="example 1: holds the token 21, outside the vocabulary of 20"):
        llmc_choices.read(file, vocab_size=20)
