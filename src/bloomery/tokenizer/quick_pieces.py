"""
What `tiktoken` needs to encode as a SentencePiece BPE does.

Both join the two neighbors whose joined text is the best token, the leftmost of equals; but `tiktoken` begins with
bytes, and SentencePiece with characters. So the bytes of each character that has a piece are joined first, over helpers
that are its beginnings. Of a character without a piece, bytes and helpers stay, and a helper becomes its bytes at the
end. A text is cut before each run of spaces, which no piece reaches over from the left, and around symbols.

Merges whose parts rank after what they make never happen if the others alone turn the text of every piece into that
piece: once its rank is passed, its text never stands as two parts again (the argument of `quick`). Then each piece
comes about in one way only, and it does not matter that `tokenizers` ranks the ways and `tiktoken` does not.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bloomery.tokenizer.tokenizer import SPACE


class UnfitError(Exception):
    """Why `tiktoken` cannot do what a tokenizer does."""


class Ids(NamedTuple):
    """The ids of ranks: where in `flat` those of a rank begin, and how many they are."""

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    flat: NDArray[np.uint32]

    @classmethod
    def of(cls, table: Iterable[Sequence[int]]) -> "Ids":
        rows = list(table)
        sizes = np.array([len(row) for row in rows], dtype=np.int64)
        return cls(np.cumsum(sizes) - sizes, sizes, np.array([id for row in rows for id in row], dtype=np.uint32))

    def __call__(self, ranks: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Ids of ranks, helpers as the bytes that they are."""
        sizes = self.sizes[ranks]
        places = self.starts[ranks]
        if len(ranks) and sizes.max() > 1:
            ends = np.cumsum(sizes)
            places = np.repeat(places - (ends - sizes), sizes) + np.arange(ends[-1])
        made: NDArray[np.uint32] = self.flat[places]
        return made


class Quick(NamedTuple):
    """How `tiktoken` is to be used."""

    pattern: str
    ranks: dict[bytes, int]
    ids: Ids | None
    """None: a rank is an id."""
    spaces: bool = False
    """Whether U+2581 is read as a space, which is what it stands for."""
    first: str = ""
    """What is put before a text that is not empty."""


def prepared(spec: Mapping[str, Any]) -> Quick:
    """From what tokenizer.json holds. Raises UnfitError."""
    model, vocab = spec["model"], dict[str, int](spec["model"]["vocab"])
    steps = spec["normalizer"]["normalizers"] if spec["normalizer"]["type"] == "Sequence" else [spec["normalizer"]]
    first = steps[:1] == [{"type": "Prepend", "prepend": SPACE}]
    if steps[int(first) :] != [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]:
        raise UnfitError("the tokenizer changes text before it encodes it")
    plain = not (model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    as_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    if not plain or spec["pre_tokenizer"] or model.get("ignore_merges") or not {SPACE, *as_bytes} <= vocab.keys():
        raise UnfitError("the tokenizer is no SentencePiece BPE with byte fallback")
    special = {token["content"] for token in spec["added_tokens"] if token["special"]} | {model.get("unk_token")}
    symbols = [token["content"] for token in spec["added_tokens"] if not token["special"]]
    if (first and symbols) or any(len(symbol) > 1 or symbol in (" ", SPACE) for symbol in symbols):
        raise UnfitError(f"the tokenizer takes {symbols[0]!r} out of text before it looks at pieces")
    letters = [name for name in vocab if len(name) == 1]
    if odd := special.intersection(letters):
        raise UnfitError(f"the special token {min(odd)!r} is one character")
    made = _in_order(model, vocab)
    within = re.compile(f"[^{SPACE}]{SPACE}|[{re.escape(''.join(symbols))}]" if symbols else f"[^{SPACE}]{SPACE}")
    if reaching := next((piece for piece in made if within.search(piece)), None):
        raise UnfitError(f"the piece {reaching!r} reaches over a space or a symbol")
    table = {bytes([byte]): [vocab[name]] for byte, name in enumerate(as_bytes)}
    table |= {letter.replace(SPACE, " ").encode(): [vocab[letter]] for letter in letters if letter.isascii()}
    wide = sorted((letter.replace(SPACE, " ").encode(), vocab[letter]) for letter in letters if not letter.isascii())
    for size in (2, 3):
        table |= {
            code[:size]: [table[code[at : at + 1]][0] for at in range(size)] for code, _ in wide if len(code) > size
        }
    table |= {code: [id] for code, id in wide}
    table |= {piece.replace(SPACE, " ").encode(): [vocab[piece]] for piece in made}
    signs = "".join(rf"\x{{{ord(symbol):x}}}" for symbol in symbols)
    pattern = rf" *[^ {signs}]+| +" + (rf"|[{signs}]" if signs else "")
    ranks = {code: rank for rank, code in enumerate(table)}
    return Quick(pattern, ranks, Ids.of(table.values()), spaces=True, first=" " if first else "")


def _in_order(model: Mapping[str, Any], vocab: Mapping[str, int]) -> list[str]:
    """What merges make, in the order of the merges. Raises UnfitError where that order does not say it all."""
    ranks: dict[str, int] = {}
    for left, right in model["merges"]:
        if ranks.setdefault(left + right, len(ranks)) != len(ranks) - 1:
            raise UnfitError(f"the merge of {left!r} and {right!r} is out of order")

    def rank(part: str) -> int:
        return -1 if len(part) == 1 else ranks.get(part, len(ranks))

    merges = [(left, right) for left, right in model["merges"]]
    early = [(left, right) for left, right in merges if max(rank(left), rank(right)) < ranks[left + right]]
    bare = tokenizers.models.BPE(vocab=dict(vocab), merges=early)
    for piece in ranks:
        if len(bare.tokenize(piece)) != 1:
            raise UnfitError(f"the merges do not make {piece!r} from its characters")
    return list(ranks)
