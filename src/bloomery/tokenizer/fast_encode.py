"""
Encodes several times faster than `tokenizers`, with the same token IDs, through `tiktoken`.

`tiktoken` runs byte-level BPE and SentencePiece BPE here. The two libraries merge by different rules. `tokenizers`
applies a list of merges, pairs in order of rank. `tiktoken` joins any two neighbors whose joined bytes are a token,
lowest rank first. It takes a whole word that is a token as it is. Both give the same token IDs for every text if,
for every token T of more than one byte,

    1. its merges stand together in the list, after the merges of their parts, and
    2. the merges turn the bytes of T alone into T.

Proof: take any text, and two boundaries that no merge has crossed. The tokens between them, before the merges of T
are tried, depend on the bytes between them alone. So if the bytes of T end as two tokens that some other pair could
join, condition 2 fails.

`_ranks` checks both conditions for every token. `HARD` and the first texts then check the patterns, which no proof
covers. If a tokenizer is of another kind or a check fails, `tokenizers` does the work, and that is logged.

SentencePiece BPE: both libraries join the two neighbors whose joined text is the best token, the leftmost of
equals. But `tiktoken` begins with bytes, and SentencePiece with characters. So the bytes of each character that has
a piece are joined first. Helper tokens stand for the beginnings of the character. For a character without a piece,
bytes and helpers remain, and a helper becomes its bytes at the end. A text is split before each run of spaces,
which no piece crosses from the left, and around symbols.

Some merges have parts that rank after their result. They never happen if the other merges alone turn the text of every
piece into that piece. Once the rank of a piece is passed, its text never stands as two parts again (the proof above).
Each piece then has only one derivation. It does not matter that `tokenizers` ranks derivations and `tiktoken` does not.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import tokenizers
from numpy.typing import NDArray

from bloomery.core.errors import DataError
from bloomery.core.log import info
from bloomery.tokenizer.tokenizer import PATTERNS, SPACE, SPECIAL, Tokenizer, byte_letters, named


class UnfitError(Exception):
    """Why `tiktoken` cannot do what a tokenizer does."""


class Ids(NamedTuple):
    """The token IDs of ranks: where in `flat` the IDs of a rank begin, and how many there are."""

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
        ids: NDArray[np.uint32] = self.flat[places]
        return ids


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
        raise UnfitError("the tokenizer is not SentencePiece BPE with byte fallback")
    special = {token["content"] for token in spec["added_tokens"] if token["special"]} | {model.get("unk_token")}
    symbols = [token["content"] for token in spec["added_tokens"] if not token["special"]]
    if (first and symbols) or any(len(symbol) > 1 or symbol in (" ", SPACE) for symbol in symbols):
        raise UnfitError(f"the tokenizer splits {symbols[0]!r} off before it looks at pieces")
    letters = [name for name in vocab if len(name) == 1]
    if odd := special.intersection(letters):
        raise UnfitError(f"the special token {min(odd)!r} is one character")
    pieces = _in_order(model, vocab)
    within = re.compile(f"[^{SPACE}]{SPACE}|[{re.escape(''.join(symbols))}]" if symbols else f"[^{SPACE}]{SPACE}")
    if reaching := next((piece for piece in pieces if within.search(piece)), None):
        raise UnfitError(f"the piece {reaching!r} crosses a space or a symbol")
    table = {bytes([byte]): [vocab[name]] for byte, name in enumerate(as_bytes)}
    table |= {letter.replace(SPACE, " ").encode(): [vocab[letter]] for letter in letters if letter.isascii()}
    wide = sorted((letter.replace(SPACE, " ").encode(), vocab[letter]) for letter in letters if not letter.isascii())
    for size in (2, 3):
        table |= {
            code[:size]: [table[code[at : at + 1]][0] for at in range(size)] for code, _ in wide if len(code) > size
        }
    table |= {code: [id] for code, id in wide}
    table |= {piece.replace(SPACE, " ").encode(): [vocab[piece]] for piece in pieces}
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

    def rank(piece: str) -> int:
        return -1 if len(piece) == 1 else ranks.get(piece, len(ranks))

    merges = [(left, right) for left, right in model["merges"]]
    early = [(left, right) for left, right in merges if max(rank(left), rank(right)) < ranks[left + right]]
    bare = tokenizers.models.BPE(vocab=dict(vocab), merges=early)
    for piece in ranks:
        if len(bare.tokenize(piece)) != 1:
            raise UnfitError(f"the merges do not make {piece!r} from its characters")
    return list(ranks)


NEVER = {"<|never in a text, and never allowed|>": 2**32 - 1}
"""A special token nothing becomes. Without any, `tiktoken` looks for the empty one at every letter: half the time."""
CHECKED_BYTES = 200_000
"""Of the first texts, that are encoded by both libraries."""


class Encoder:
    """
    A tokenizer for many texts. `name` is "tiktoken", or "tokenizers" as the fallback; then `why` gives the reason.

    Text never becomes a special token. A fallback is logged once for each encoder, unless `aloud` is False.
    """

    def __init__(self, tokenizer: Tokenizer, *, aloud: bool = True) -> None:
        self._tokenizer, self._aloud = tokenizer, aloud
        self._fast: tiktoken.Encoding | None = None
        self.why = ""
        self.slow_texts = 0
        """Texts that `tokenizers` encoded because `tiktoken` gave them up: white space without end."""
        self._left_to_check = CHECKED_BYTES
        try:
            self._how = _how(tokenizer)
            self._fast = _encoding(self._how)
        except UnfitError as reason:
            self._fall_back(str(reason))
        self._check(HARD)

    @property
    def name(self) -> str:
        return "tokenizers" if self._fast is None else "tiktoken"

    def facts(self) -> dict[str, Any]:
        """For the statistics of a stage: which library encoded, and what was left to the other one."""
        why: dict[str, Any] = {"because": self.why} if self.why else {}
        left = {"texts_left_to_tokenizers": self.slow_texts} if self.slow_texts else {}
        return {"encoder": self.name} | why | left

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token IDs of each text, on one core (`tokenizers`: on all). Raises DataError for text that is no UTF-8."""
        if self._left_to_check > 0 and self._fast is not None:
            some = list(_up_to(texts, self._left_to_check))
            self._left_to_check -= sum(map(len, some))
            self._check(some)
        if self._fast is None:
            return [np.array(ids, dtype=np.uint32) for ids in self._tokenizer.encode_batch(texts)]
        return [self._encode(self._fast, text) for text in texts]

    def _encode(self, fast: tiktoken.Encoding, text: str) -> NDArray[np.uint32]:
        if self._how.spaces:
            text = self._how.first * bool(text) + text.replace(SPACE, " ")
        try:
            ranks = fast.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError as error:
            raise DataError(f"the text holds half a surrogate pair at character {error.start}") from None
        except ValueError:  # its regular expressions ran out of stack, in a run of white space as long as a book
            self.slow_texts += 1
            return np.array(self._tokenizer.encode(text[len(self._how.first) :]), dtype=np.uint32)
        return ranks if self._how.ids is None else self._how.ids(ranks)

    def _check(self, texts: Sequence[str]) -> None:
        """Fall back where the libraries differ about a text."""
        if self._fast is None:
            return
        for text, ids in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            slow = self.slow_texts
            if self._encode(self._fast, text).tolist() != ids:
                self._fall_back(f"tiktoken encodes {text[:60]!r} in another way")
                return
            self.slow_texts = slow

    def _fall_back(self, why: str) -> None:
        self._fast, self.why = None, why
        if self._aloud:
            info(f"encoding with tokenizers, about 4 times slower than tiktoken would be: {why}", style="yellow")


def _how(tokenizer: Tokenizer) -> Quick:
    """How `tiktoken` gives the same token IDs. Raises UnfitError."""
    spec = tokenizer.spec
    if spec["normalizer"] is not None and spec["model"].get("byte_fallback"):
        return prepared(spec)
    if spec["normalizer"] is not None:
        raise UnfitError("the tokenizer changes text before it encodes it")
    if added := [token["content"] for token in spec["added_tokens"] if not token["special"]]:
        raise UnfitError(f"the tokenizer splits {added[0]!r} off before it looks at words")
    pattern = _pattern(spec["pre_tokenizer"])
    ranks, ids = _ranks(spec["model"], {token["content"] for token in spec["added_tokens"]})
    return Quick(PATTERNS[name].quick if (name := named(pattern)) else pattern, ranks, ids)


def _encoding(how: Quick) -> tiktoken.Encoding:
    try:
        return tiktoken.Encoding("quick", pat_str=how.pattern, mergeable_ranks=how.ranks, special_tokens=NEVER)
    except ValueError as error:
        raise UnfitError(f"tiktoken does not accept its pattern: {error}") from None


def _pattern(splitter: Mapping[str, Any] | None) -> str:
    """The pattern that a byte-level pre-tokenizer cuts words with. Raises UnfitError for anything else."""
    steps = splitter["pretokenizers"] if splitter and splitter["type"] == "Sequence" else [splitter]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return PATTERNS["gpt2"].regex
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return regex
    raise UnfitError("the tokenizer does not split words by one pattern, as byte-level BPE does")


def _ranks(model: Mapping[str, Any], special: Set[str]) -> tuple[dict[bytes, int], Ids | None]:
    """Tokens as bytes in merge order, and their token IDs where these have another order. Raises UnfitError."""
    vocab: dict[str, int] = model.get("vocab", {})
    letters = byte_letters()
    plain = not (model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    if model["type"] != "BPE" or not plain or model.get("byte_fallback"):
        raise UnfitError("the tokenizer is not byte-level BPE")
    if missing := [byte for byte, letter in letters.items() if letter not in vocab]:
        raise UnfitError(f"the vocabulary lacks the byte {missing[0]:#04x}")
    merges = [(left, right) for left, right in model["merges"]]
    ranks = {letter: rank for rank, letter in enumerate(letters.values())}
    for left, right in merges:
        joined, newest = left + right, len(ranks) - 1
        if left not in ranks or right not in ranks or ranks.get(joined, newest) != newest:
            raise UnfitError(f"the merge of {left!r} and {right!r} is out of order")
        ranks.setdefault(joined, len(ranks))
    if model.get("ignore_merges") and (others := vocab.keys() - ranks.keys() - special):
        raise UnfitError(f"the vocabulary holds {min(others)!r} as a word that no merge makes")
    bare = tokenizers.models.BPE(vocab=vocab, merges=merges)
    for token in ranks:
        pieces = len(bare.tokenize(token))
        if pieces == 2 or (pieces > 2 and not model.get("ignore_merges")):
            raise UnfitError(f"the merges do not make {token!r} from its letters")
    back = {letter: byte for byte, letter in letters.items()}
    as_bytes = {bytes(back[letter] for letter in token): rank for token, rank in ranks.items()}
    ids = [vocab[token] for token in ranks]
    if all(
        previous < other for previous, other in pairwise(ids[len(letters) :])
    ):  # token IDs order merges as ranks do, so they can be the ranks
        return dict(zip(as_bytes, ids, strict=True)), None
    return as_bytes, Ids.of([id] for id in ids)


def _up_to(texts: Sequence[str], size: int) -> Iterator[str]:
    """Texts, and beginnings of long ones, of `size` characters together."""
    for text in texts:
        if size <= 0:
            return
        yield text[:size]
        size -= len(text)


def _hard() -> tuple[str, ...]:
    """Texts on which encoders have differed: signs, space, scripts, new letters, control characters, noise."""
    noise = np.random.default_rng(0)
    codes = noise.integers(0, 0x110000, 600)
    letters = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    few = "".join(noise.choice(list("aZ1 '\n\r\tés.,\u00a0漢😀"), 3000))
    raw = noise.integers(0, 256, 2000, dtype=np.uint8).tobytes()
    # first letters and digits of blocks that came with Unicode 14 to 17: tables of classes differ in age
    young = "𐕰𑼀𞓐𮯰𐗀𐵀𑎀\u1c89\ua7cb\U000323b0\U00010940\U00011db0\U00016ea0\U0001ccf0\U00011de0"
    return (
        "",
        "def f(x):\n    if x['a'] >= 10:\n\t\treturn \"b\" + 'c'  # why\r\n\r\n\n  \t \nclass A: pass\n",
        "I'll, you'Re, 'tis, we've'd 'sS 'LL'm rock'n'roll o'clock '’s it's's ''s ' s 'ſ 'K",
        "3.14159 1234567 x² ½ Ⅷ ٣٤٥ १२३ 1a2b3c 0x1F 1,000,000.00 10:30",
        "Größe café naïve «ёлка» ΑΒΓ Straße İstanbul e\u0301a\u0308 DŽ dž ǅ ﬁn ß ẞ camelCaseWordsHTMLParser",
        "東京都は日本の首都。한국어 텍스트 العربية עברית हिन्दी ไทย 中文,标点!?ქართული",
        "😀👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪 ☃️ 👍🏽\u200b\u200d\ufe0f",
        "".join(map(chr, range(0x20))) + "\x7f\x80\x85\x9f\xa0\xad" + "".join(f"a{chr(code)}b" for code in range(0x20)),
        *(
            f"{lead}{space * count}{tail}"
            for lead in ("", "a", ".")
            for space in " \n\t\r\u00a0\u3000\x0b"
            for count in (1, 2, 3, 70)
            for tail in ("", "b", "1", "!")
        ),
        " \n \n\n  \r\n \t\r x  \n\u2028y\u2029 \x85z \u1680\u2000\u205f\ufeff\u180e",
        "".join(f"a{letter}.{letter} {letter}1{letter}\n" for letter in young),
        "a" * 3000 + "=" * 1000 + " " * 1000 + "1" * 500 + "é" * 500 + "-x" * 300,
        "".join(SPECIAL) + " ".join(SPECIAL) + "<|im_start|><s></s>[INST]<|user",
        letters,
        few,
        raw.decode("utf-8", "replace"),
        raw.decode("latin-1"),
    )


HARD = _hard()
