"""
Text to ids and back, without a way for text to become a special token.

A thin hold on the `tokenizers` library. Byte-level BPE is without loss: every text has ids, every id has bytes. What
comes from SentencePiece writes spaces as U+2581, and so gives that sign back as a space.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from bloomery.core.errors import DataError
from bloomery.core.files import canonical, sha256_bytes, whole_file

FILE = "tokenizer.json"
SPACE = "\u2581"
"""What SentencePiece writes for a space."""

DOCUMENT = "<|endoftext|>"
"""Opens every document and every conversation. Wherever it stands, a new context begins."""
END = "<|end|>"
"""Ends every message."""
PAD = "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (DOCUMENT, END, PAD, *(f"<|{role}|>" for role in ROLES))


class Tokenizer:
    """A trained tokenizer. `hash` names it: weights and shards that were made with it carry that hash."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Text that spells a special token is text: a document or a user cannot end a turn.
        inner.encode_special_tokens = True
        self._inner = inner
        vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        if missing := [name for name in SPECIAL if name not in vocabulary]:
            cure = "Train it with `bloomery run`, whose tokenizers hold all of them."
            raise DataError(f"the tokenizer lacks the special tokens {', '.join(missing)}", cure=cure)
        self.special = {name: vocabulary[name] for name in SPECIAL}
        self.document_id, self.end_id, self.pad_id = (self.special[name] for name in (DOCUMENT, END, PAD))

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read FOLDER/tokenizer.json. Raises DataError."""
        file = folder / FILE
        if not file.is_file():
            raise DataError(
                "there is no tokenizer.json", where=str(folder), cure="Name the folder that a tokenizer was saved in."
            )
        try:
            inner = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:
            if type(error) in (Exception, UnicodeDecodeError):  # the library raises nothing more precise
                raise DataError(f"is no tokenizer: {error}", where=str(file), cure="Run its stage again.") from None
            raise
        return cls(inner)

    def save(self, folder: Path) -> None:
        with whole_file(folder / FILE, "w") as file:
            file.write(self._inner.to_str(pretty=True))

    def special_id(self, name: str) -> int | None:
        """The id of a special token, also of one that only some templates need; None where there is none."""
        return self._special_by_name.get(name)

    @cached_property
    def _special_by_name(self) -> dict[str, int]:
        return {one.content: id for id, one in self._inner.get_added_tokens_decoder().items() if one.special}

    @cached_property
    def spec(self) -> dict[str, Any]:
        """All that the tokenizer is, as tokenizer.json holds it."""
        spec: dict[str, Any] = json.loads(self._inner.to_str())
        return spec

    @cached_property
    def hash(self) -> str:
        """sha256 of what decides about ids."""
        return sha256_bytes(canonical(self.spec))

    @property
    def vocab_size(self) -> int:
        return self._size

    @cached_property
    def _size(self) -> int:
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Many texts at once, on all cores."""
        return [coded.ids for coded in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        text = self.decode_bytes(ids).decode("utf-8", "replace")
        return text[1:] if self._puts_space_first and text.startswith(" ") else text

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of ids; special tokens have none."""
        table = self._bytes
        return b"".join(table[id] for id in ids)

    @cached_property
    def byte_lengths(self) -> list[int]:
        """How many bytes each id stands for; none for special tokens."""
        return [len(piece) for piece in self._bytes]

    @cached_property
    def _puts_space_first(self) -> bool:
        """Whether every text gets a space in front, which is no part of it: so did the first Llama's."""
        return '"Prepend"' in json.dumps(self.spec["normalizer"])

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Of all special tokens, also such as an imported tokenizer brought along: no text becomes one of them."""
        return frozenset(token["id"] for token in self.spec["added_tokens"] if token["special"])

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        added = {token["content"] for token in self.spec["added_tokens"]}
        unknown = self.spec["model"].get("unk_token")
        by_bytes = "ByteLevel" in json.dumps(self.spec["decoder"])
        for name, id in self._inner.get_vocab(with_added_tokens=True).items():
            if id not in self.special_ids and name != unknown:
                table[id] = _piece(name) if not by_bytes else name.encode() if name in added else _letters(name)
        return table


def _letters(name: str) -> bytes:
    return bytes(_BYTES[letter] for letter in name)


def _piece(name: str) -> bytes:
    """The bytes of a piece as SentencePiece writes it: U+2581 for a space, <0xNN> for a byte."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace(SPACE, " ").encode()


def byte_letters() -> dict[int, str]:
    """
    The printable letter that stands for each byte in a byte-level vocabulary.

    Bytes that print stand for themselves, the others for the letters from U+0100 on
    (Radford et al. 2019; the table of GPT-2's encoder).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


_BYTES = {letter: byte for byte, letter in byte_letters().items()}
