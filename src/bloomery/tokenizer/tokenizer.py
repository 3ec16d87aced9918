"""
Encodes text to token IDs and back; text can never become a special token.

A thin wrapper of the `tokenizers` library. Byte-level BPE is lossless: every text has token IDs, and every token ID
has bytes. Tokenizers from SentencePiece write spaces as U+2581, so a U+2581 in the text comes back as a space.

Patterns split text into words before merges are learned or applied. llama.cpp knows these patterns by name. A GGUF
file holds no pattern, only a name, and llama.cpp splits by the code under that name. So a tokenizer that is to be
served there has to use one of its patterns, letter by letter.

Each pattern is written twice: for `tokenizers`, and in the form that the regular expressions of `tiktoken` run
faster. The second form puts all but the two alternatives with a look-ahead into one group, which runs as one
automaton. It also puts the most frequent words first. A test checks that both split every text alike.

Patterns and wrapper share one file because a pattern is part of what a tokenizer saves and loads.

Each step of an imported normalizer, pre-tokenizer or decoder can make a text longer by some factor, in bytes. Steps
in sequence multiply. Five steps that write 100 letters for one would make 10^10 bytes of a single letter, so the
product has an upper bound.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from bloomery.core.chat import ROLES
from bloomery.core.errors import DataError, shorten
from bloomery.core.io import canonical, sha256_bytes, whole_file
from bloomery.core.log import info

PatternName = Literal["gpt2", "llama3", "qwen2", "gpt4o"]


class Pattern(NamedTuple):
    regex: str
    """As it stands in tokenizer.json."""
    quick: str
    """The same language, with the same choice between alternatives, for `tiktoken`."""
    gguf: str
    """What llama.cpp calls it: `tokenizer.ggml.pre`."""
    splits_digits: bool
    """Whether every digit is a word of its own."""


_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACE = r"\s+(?!\S)|\s+"


def _like_llama3(digits: str) -> tuple[str, str]:
    """Words with one leading sign or space, `digits`, punctuation with its line ends, line ends, other space."""
    rest = rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    regex = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{rest}|{_SPACE}"
    return regex, rf"(?:[^\r\n\p{{L}}\p{{N}}']?\p{{L}}+|{_SHORT}|'\p{{L}}+|{rest})|{_SPACE}"


def _gpt4o() -> tuple[str, str]:
    """Of o200k: as llama3, but words end where small letters meet capitals, and take a following 's with them."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{_UPPER}*{_LOWER}+{_SHORT}?|{lead}{_UPPER}+{_LOWER}*{_SHORT}?"
    most = rf"{words}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+"
    return rf"{most}|{_SPACE}", rf"(?:{most})|{_SPACE}"


_GPT2_REST = r"| ?\p{N}+| ?[^\s\p{L}\p{N}]+"

PATTERNS: dict[str, Pattern] = {
    # Radford et al. 2019; as `encoder.py` of GPT-2 has it, with the last alternative that it leaves to the end of text
    "gpt2": Pattern(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+{_GPT2_REST}|{_SPACE}",
        rf"(?: ?\p{{L}}+|'(?:s|t|re|ve|m|ll|d){_GPT2_REST})|{_SPACE}",
        gguf="gpt-2",
        splits_digits=False,
    ),
    "llama3": Pattern(*_like_llama3(r"\p{N}{1,3}"), gguf="llama-bpe", splits_digits=False),
    # single digits make numbers of every length look alike to the model
    "qwen2": Pattern(*_like_llama3(r"\p{N}"), gguf="qwen2", splits_digits=True),
    "gpt4o": Pattern(*_gpt4o(), gguf="gpt-4o", splits_digits=False),
}
assert tuple(PATTERNS) == get_args(PatternName)


def named(regex: str) -> str | None:
    """The name of a pattern by its text; None for one that is not in the table."""
    return next((name for name, pattern in PATTERNS.items() if pattern.regex == regex), None)


MAX_GROWTH = 1024
"""SentencePiece's table of NFKC (33), runs of spaces as one (4), and Metaspace (4) make 528."""

_FACTORS = {
    # Unicode: what a character of each form takes at most (U+0390, U+FDFA; https://unicode.org/faq/normalization.html)
    **{"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5},
    # accents split off (3), small letters (1.5), and a space on either side of a Chinese character (5 bytes for 3)
    "BertNormalizer": 7.5,
    **dict.fromkeys(("Strip", "StripAccents", "Nmt"), 1.0),
    # pre-tokenizers that only cut
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation"), 1.0),
    **dict.fromkeys(("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1.0),
    # decoders; these write less than the name of a token, or a space after it
    **dict.fromkeys(("BPEDecoder", "ByteFallback", "CTC", "Fuse", "WordPiece"), 2.0),
}
_LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
BEFORE_MODEL = ("normalizer", "pre_tokenizer")


def steps(component: Any, name: str) -> list[dict[str, Any]]:
    """What a normalizer, pre-tokenizer or decoder does, one step after the other."""
    if not component:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [step for inner in component[_LISTS[name]] for step in steps(inner, name)]


def growth(spec: dict[str, Any]) -> float:
    """How many times as many bytes normalizer and pre-tokenizer can make of a text."""
    return _product(_taken(spec, BEFORE_MODEL))


def growth_problem(spec: dict[str, Any]) -> str:
    """Why the steps of a tokenizer must not run, or ""; `spec` is as the library writes it."""
    for name in _LISTS:
        for step in steps(spec[name], name):
            title = name.replace("_", "-")
            if step["type"] not in _FACTORS and step["type"] not in _BY_CONTENT:
                return f"has a {title} of the unknown type {shorten(step['type'])!r}"
            if step.get("pattern") in ({"String": ""}, {"Regex": ""}):
                return f"has a {title} {step['type']} with an empty pattern, which stands between any two characters"
            if step.get("prepend") == "":
                return f"has a {title} Prepend with an empty text"
            if _factor(step) > MAX_GROWTH:
                return f"has a {title} {step['type']} that can make a text {_factor(step):,.0f} times as long{_LIMIT}"
    for names in (BEFORE_MODEL, ("decoder",)):
        selected = _taken(spec, names)
        if (product := _product(selected)) > MAX_GROWTH:
            shown = shorten(", ".join(step["type"] for step in selected if _factor(step) > 1))
            return f"has steps that can make a text {product:,.0f} times as long ({shown}){_LIMIT}"
    return ""


_LIMIT = f"; {MAX_GROWTH:,} times is the limit"


def _taken(spec: dict[str, Any], names: Iterable[str]) -> list[dict[str, Any]]:
    return [step for name in names for step in steps(spec[name], name)]


def _product(selected: Iterable[dict[str, Any]]) -> float:
    product = 1.0
    for step in selected:
        product = min(product * _factor(step), 1e30)
    return product


def _factor(step: dict[str, Any]) -> float:
    by_content = _BY_CONTENT.get(step["type"])
    return by_content(step) if by_content else _FACTORS[step["type"]]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _replaced(step: dict[str, Any]) -> float:
    """A pattern of text by its length; any other may match one byte, or between two."""
    content, pattern = _size(step["content"]), step["pattern"].get("String")
    return max(1.0, content / max(1, _size(pattern))) if pattern is not None else 1.0 + content


def _by_table(step: dict[str, Any]) -> float:
    """The longest text of SentencePiece's table: 4 bytes with the size of a trie, the trie, texts that end with NUL."""
    try:
        table = base64.b64decode(step["precompiled_charsmap"] or "")
    except binascii.Error:
        return 1.0
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return float(max(1, *(len(text) for text in texts.split(b"\0"))) if texts else 1)


_BY_CONTENT: dict[str, Callable[[dict[str, Any]], float]] = {
    "Replace": _replaced,
    "Prepend": lambda step: 1.0 + _size(step["prepend"]),
    "Precompiled": _by_table,
    # each byte becomes a letter of one or two bytes, and a word may get a space
    "ByteLevel": lambda step: 4.0 if step.get("add_prefix_space") else 2.0,
    "Metaspace": lambda step: 1.0 + _size(step["replacement"]),
}
"""Steps whose factor depends on their settings. Added tokens cut a text, so each byte may get a prefix of its own."""


FILE = "tokenizer.json"
SPACE = "\u2581"
"""What SentencePiece writes for a space."""

DOCUMENT = "<|endoftext|>"
"""Opens every document and every conversation. Wherever it stands, a new context begins."""
END = "<|end|>"
"""Ends every message."""
PAD = "<|pad|>"
MAX_IDS = 2**22
"""Each token ID is a row of the embedding."""
SPARE_IDS = 1_000_000
"""How far IDs may go beyond twice the number of tokens."""
DAMAGED = "The file is damaged or malicious. Download it again, or use another tokenizer."
MAX_SHOWN = 300
"""Characters of a message of the library."""
SPECIAL = (DOCUMENT, END, PAD, *(f"<|{role}|>" for role in ROLES))

MAX_NORMALIZED_BYTES = 2**24
"""Of a text that `encode_within` encodes at once, after its normalizer. The library takes about 200 bytes for each."""
PIECE, LONGEST_PIECE = 2**15, 2**16
"""Characters that `encode_within` encodes at a time: `tokenizers` takes 150 to 250 bytes of memory for each."""
_LETTER = "[A-Za-zÀ-ÖØ-öø-ɏΑ-Ωα-ωА-яא-תء-غ一-鿋ぁ-ゖァ-ヺ가-힣]"
_WORD_END = re.compile(f"{_LETTER}(?=[ ,.;:!?，。、；：！？]{_LETTER})")
"""Every pattern of PATTERNS begins a word between a letter and a sign that another letter follows."""


def text_of(file: Path, hint: str = "") -> str:
    """A file as text. Raises DataError for one that is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"is not a tokenizer: {error}", where=str(file), hint=hint) from None


def parsed(content: str | dict[str, Any], where: str, hint: str = "") -> tokenizers.Tokenizer:
    """
    What `tokenizers` makes of a tokenizer.json, from its text or its content. Raises DataError where that is nothing or
    encodes nothing, and for huge IDs: the library allocates memory for every ID up to the largest.
    """
    try:
        spec = json.loads(content) if isinstance(content, str) else content
        if problem := _problem(spec) or growth_problem(_steps_of(spec)):
            raise DataError(problem, where=where, hint=hint or DAMAGED)
        inner = tokenizers.Tokenizer.from_str(json.dumps(spec))
        if spec.get("padding") is None:  # or else it may be padded to any length
            inner.encode("hello wörld 12 \u2581", add_special_tokens=False)
    except BaseException as error:
        # the library raises nothing more precise than Exception, and panics with an error that is none
        known = isinstance(error, ValueError | RecursionError) or type(error) is Exception
        if known or type(error).__name__ == "PanicException":
            raise DataError(f"is not a tokenizer: {error}"[:MAX_SHOWN], where=where, hint=hint) from None
        raise
    return inner


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Raises DataError where the library gives up on a text, as its regular expressions do after many attempts."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            what = f"the tokenizer library failed on a text: {error}"[:MAX_SHOWN]
            hint = "Its regular expressions are too slow for the text. Use another tokenizer, or remove the text."
            raise DataError(what, where="tokenizer.json", hint=hint) from None
        raise


def _steps_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """
    Normalizer, pre-tokenizer and decoder as the library understands them; it also reads spellings of older versions.
    They go without added tokens, because the library normalizes those as it reads them.
    """
    only: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    only |= {name: spec.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    steps: dict[str, Any] = json.loads(tokenizers.Tokenizer.from_str(json.dumps(only)).to_str())
    return steps


def _problem(spec: Any) -> str:
    """Why a parsed tokenizer.json must not reach the library, or ""."""
    model, added = (spec.get(name) for name in ("model", "added_tokens")) if isinstance(spec, dict) else (None, None)
    added = [] if added is None else added
    if not isinstance(model, dict) or not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        return "is not a tokenizer: it needs an object `model`, and `added_tokens` as a list of objects"
    if any(one.get("content") == "" for one in added):
        return "has an added token with an empty text, which stands between any two characters"
    vocabulary = model.get("vocab")
    return problem_of_ids(vocabulary if isinstance(vocabulary, dict) else {}, [one.get("id") for one in added])


def problem_of_ids(vocabulary: Mapping[str, Any], added: Sequence[Any] = ()) -> str:
    """What is wrong with the IDs of a vocabulary and of added tokens: no ID, one twice, or one far above all; or ""."""
    limit = 2 * (len(vocabulary) + len(added)) + SPARE_IDS
    for ids in (list(vocabulary.values()), added):
        if wrong := [id for id in ids if type(id) is not int or not 0 <= id < limit]:
            return (
                f"has the ID {str(wrong[0])[:20]} in a vocabulary of {len(vocabulary):,} tokens; IDs end at {limit:,}"
            )
        if len(set(ids)) < len(ids):
            return "assigns one ID to two tokens"
    return ""


def byte_level(model: models.BPE, pattern: PatternName) -> tokenizers.Tokenizer:
    """A byte-level BPE that cuts words by one of PATTERNS."""
    inner = tokenizers.Tokenizer(model)
    words = pre_tokenizers.Split(Regex(PATTERNS[pattern].regex), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    inner.decoder = decoders.ByteLevel()
    return inner


class Tokenizer:
    """
    A trained tokenizer. `hash` names it: weights and shards that were made with it carry that hash.

    One of ours has all of SPECIAL. One of another model keeps the special tokens that it has. `roles` names them by
    transformers' keys (bos_token, eos_token, pad_token, unk_token).
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        roles: Mapping[str, str | None] | None = None,
        boundary_ids: Sequence[int] = (),
    ) -> None:
        """
        `boundary_ids` are IDs that begin or end a text, for a tokenizer whose roles name none. Raises DataError where a
        tokenizer of ours lacks a special token.
        """
        # Text that spells a special token is text: a document or a user cannot end a turn.
        inner.encode_special_tokens = True
        # A file may say that every text gets 2^40 tokens of padding.
        inner.no_padding()
        inner.no_truncation()
        self._inner, self._reported = inner, False
        self._roles, self._boundary_ids = roles, boundary_ids
        vocabulary = self._vocabulary
        ours = all(name in vocabulary for name in SPECIAL)
        if roles is None and not ours:
            missing = [name for name in SPECIAL if name not in vocabulary]
            hint = "Train a tokenizer with `bloomery run RECIPE`: it has all special tokens."
            raise DataError(f"the tokenizer lacks the special tokens {', '.join(missing)}", hint=hint)
        self.special = {name: vocabulary[name] for name in SPECIAL if name in vocabulary}
        names = {"eos_token": END, "pad_token": PAD} if ours else roles or {}
        ids = {role: vocabulary.get(name) for role, name in names.items() if name is not None}
        self.end_id, self.pad_id = ids.get("eos_token"), ids.get("pad_token")
        self.opening_ids: list[int] = [] if ours else _opening(inner)
        """What transformers puts before a plain text."""
        opens = [self.special.get(DOCUMENT)] if ours else [*self.opening_ids[:1], ids.get("bos_token"), self.end_id]
        opens += [self.special_id(DOCUMENT), *(id for id in boundary_ids if 0 <= id < inner.get_vocab_size())]
        self.boundary_id = next((id for id in opens if id is not None), None)
        """As `document_id`; None for another model's tokenizer that has no such token."""
        self.fill_id: int = next((id for id in (self.pad_id, self.end_id, self.boundary_id) if id is not None), 0)
        """Fills what is left of a sequence."""
        self.end_ids = frozenset(id for id in (self.boundary_id, self.end_id) if id is not None)
        """IDs after which a text is over."""

    @property
    def document_id(self) -> int:
        """Opens every document. Raises DataError where no token begins or ends a text."""
        if self.boundary_id is None:
            hint = "Add bos_token or eos_token to tokenizer_config.json, and its ID to config.json."
            raise DataError("the tokenizer defines no token that begins or ends a text", hint=hint)
        return self.boundary_id

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read FOLDER/tokenizer.json. Raises DataError."""
        file = folder / FILE
        if not file.is_file():
            raise DataError(
                "there is no tokenizer.json", where=str(folder), hint="Use a folder with a saved tokenizer."
            )
        return cls(parsed(text_of(file, "Run its stage again."), str(file), "Run its stage again."))

    def save(self, folder: Path) -> None:
        with whole_file(folder / FILE, "w") as file:
            file.write(self._inner.to_str(pretty=True))

    def to_json(self) -> str:
        """The text of a tokenizer.json."""
        return self._inner.to_str()

    def recognizing(self) -> tokenizers.Tokenizer:
        """The same tokenizer, which finds special tokens in a text and puts none around it."""
        added = self._inner.get_added_tokens_decoder()
        copy = tokenizers.Tokenizer(self._inner.model)  # shares the vocabulary, which takes most of a second to read
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            if (component := getattr(self._inner, name)) is not None:
                setattr(copy, name, component)
        for id in sorted(added):
            (copy.add_special_tokens if added[id].special else copy.add_tokens)([added[id]])
        if copy.get_added_tokens_decoder() == added:
            return copy
        return tokenizers.Tokenizer.from_str(json.dumps(self.spec | {"post_processor": None}))

    def special_id(self, name: str) -> int | None:
        """The id of a special token, also of one that only some templates need; None where there is none."""
        return self._special_by_name.get(name)

    def holds(self, name: str) -> bool:
        """Whether a token has this name, special or not."""
        return self._inner.token_to_id(name) is not None

    def promoted(self, names: Iterable[str]) -> "Tokenizer":
        """The same tokenizer, in which those of its tokens that have these names are special: no text becomes them."""
        plain = [name for name in names if self.holds(name) and self.special_id(name) is None]
        if not plain:
            return self
        inner = tokenizers.Tokenizer.from_str(self._inner.to_str())
        inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in plain])
        return Tokenizer(inner, self._roles, self._boundary_ids)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        """Names of all tokens, and their IDs. The library takes a moment to list them."""
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return vocabulary

    @cached_property
    def _special_by_name(self) -> dict[str, int]:
        return {one.content: id for id, one in self._inner.get_added_tokens_decoder().items() if one.special}

    @cached_property
    def spec(self) -> dict[str, Any]:
        """All that the tokenizer is, as tokenizer.json holds it."""
        spec: dict[str, Any] = json.loads(self._inner.to_str())
        return spec

    @cached_property
    def outline(self) -> dict[str, Any]:
        """`spec` without vocabulary and merges, and with no more of the model than what is asked of it."""
        parts = {name: getattr(self._inner, name) for name in _LISTS}
        model, flags = self._inner.model, ("single_word", "lstrip", "rstrip", "normalized", "special")
        return {
            **{name: part and json.loads(part.__getstate__()) for name, part in parts.items()},
            "added_tokens": [
                {"id": id, "content": token.content, **{flag: getattr(token, flag) for flag in flags}}
                for id, token in sorted(self._inner.get_added_tokens_decoder().items())
            ],
            "model": {name: getattr(model, name, None) for name in ("unk_token", "byte_fallback")},
        }

    @cached_property
    def hash(self) -> str:
        """sha256 of everything that determines token IDs."""
        return sha256_bytes(canonical(self.spec))

    @cached_property
    def vocab_size(self) -> int:
        return max(self._vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        self._report_missing((text,))
        with _panics_are_errors():
            return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Many texts at once, on all cores."""
        self._report_missing(texts)
        with _panics_are_errors():
            return [coded.ids for coded in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _report_missing(self, texts: Iterable[str]) -> None:
        """Log once that a text has bytes that no token stands for: the library leaves them out."""
        if self._missing and not self._reported:
            lost = next((text for text in texts if _holds(text, self._missing)), None)
            if lost is not None:
                self._reported = True
                shown = next(letter for letter in lost if _holds(letter, self._missing))
                info(f"the tokenizer has no token for some bytes, e.g. of {shown!r}; it leaves them out", "yellow")

    @cached_property
    def _missing(self) -> bytes:
        """Bytes of UTF-8 that a byte-level tokenizer has no token for, where the model has no unknown token."""
        if "ByteLevel" not in json.dumps(self.outline["decoder"]) or self.outline["model"]["unk_token"] is not None:
            return b""
        id_of = self._inner.model.token_to_id
        return bytes(byte for byte, letter in byte_letters().items() if id_of(letter) is None and byte not in _NEVER)

    def encode_within(self, text: str, max_tokens: int) -> list[int] | int:
        """
        As `encode`, for text of a stranger. Of text that has more tokens, how many it has at least, before all of it
        was encoded: by its bytes, or by the pieces so far. Other threads run meanwhile.

        The IDs are those of `encode`, unless LONGEST_PIECE characters hold no end of a word.
        """
        size = len(text.encode())
        if not self._cuts_words and size * self._growth > MAX_NORMALIZED_BYTES:
            what = f"the text has {size:,} bytes, which the tokenizer may expand {self._growth:,.0f} times"
            hint = f"Shorten the text to {int(MAX_NORMALIZED_BYTES / self._growth):,} bytes."
            raise DataError(what, where="messages", hint=hint)
        if self.max_token_bytes and (least := -(-size // self.max_token_bytes)) > max_tokens:
            return least
        ids: list[int] = []
        for piece, is_last in self._cut(text):
            ids += self.encode_batch([piece])[0]
            if len(ids) > max_tokens and not is_last:
                return len(ids)
        return ids

    def _cut(self, text: str) -> Iterator[tuple[str, bool]]:
        """Pieces of a text that have the IDs of the whole, each with whether it is the last."""
        begin = 0
        while self._cuts_words and len(text) - begin > LONGEST_PIECE:
            word_end = _WORD_END.search(text, begin + PIECE, begin + LONGEST_PIECE)
            end = word_end.end() if word_end else begin + LONGEST_PIECE
            yield text[begin:end], False
            begin = end
        yield text[begin:], True

    @cached_property
    def _cuts_words(self) -> bool:
        """Whether words are cut by one of PATTERNS, and nothing joins what it cuts."""
        match _steps(self.outline["pre_tokenizer"], "pretokenizers"):
            case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
                known = True
            case [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}, _]:
                known = named(regex) is not None
            case _:
                known = False
        joined = any(
            _WORD_END.search(token["content"]) for token in self.outline["added_tokens"] if not token["special"]
        )
        return known and not joined and self.outline["normalizer"] in (None, {"type": "NFC"})

    @cached_property
    def _growth(self) -> float:
        return growth(self.outline)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """The most bytes of text that one token stands for; None where the tokenizer may drop some of the text."""
        normalizers = _steps(self.outline["normalizer"], "normalizers")
        steps = normalizers + _steps(self.outline["pre_tokenizer"], "pretokenizers")
        names, added = self._inner.get_vocab(with_added_tokens=False).keys(), self.outline["added_tokens"]
        in_bytes = {f"<0x{byte:02X}>" for byte in range(256)} if self.outline["model"]["byte_fallback"] else set(_BYTES)
        drops = any(one["lstrip"] or one["rstrip"] for one in added if not one["special"])
        if drops or not in_bytes <= names or not all(map(_keeps_bytes, steps)):
            return None
        return max(self.byte_lengths) * (4 if {"type": "NFC"} in normalizers else 1)  # it leaves a third at least

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token IDs, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text = self.decode_bytes(ids).decode("utf-8", "replace")
        return text[1:] if self.puts_space_first and text.startswith(" ") else text

    def encode_after(self, text: str) -> list[int]:
        """Token IDs of a text that follows other text, so that no space is put in front of it."""
        if not self.puts_space_first:
            return self.encode(text)
        for before in ("\x02", "\n"):  # one that no token joins with what follows
            ids, seen = self.encode(before + text), b""
            for count, id in enumerate(ids, 1):
                seen += self.decode_bytes([id])
                if seen.lstrip(b" ") == before.encode():
                    return ids[count:]
        raise DataError("has a token for each text that begins with U+0002 or a line end", where="tokenizer")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of token IDs; special tokens have none."""
        table = self._bytes
        return b"".join(table[id] for id in ids)

    @cached_property
    def byte_lengths(self) -> list[int]:
        """How many bytes each id stands for; none for special tokens."""
        return [len(piece) for piece in self._bytes]

    @cached_property
    def puts_space_first(self) -> bool:
        """Whether every text gets a space in front, which is no part of it: so did the first Llama's."""
        joined = _steps(self.outline["pre_tokenizer"], "pretokenizers")
        first = any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in joined)
        return first or '"Prepend"' in json.dumps(self.outline["normalizer"])

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Of all special tokens, also such as an imported tokenizer brought along: no text becomes one of them."""
        return frozenset(token["id"] for token in self.outline["added_tokens"] if token["special"])

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        added = {token["content"] for token in self.outline["added_tokens"]}
        unknown = self.outline["model"]["unk_token"]
        by_bytes = "ByteLevel" in json.dumps(self.outline["decoder"])
        for name, id in self._vocabulary.items():
            if id not in self.special_ids and name != unknown:
                table[id] = _piece(name) if not by_bytes else name.encode() if name in added else _letters(name)
        return table


def _steps(spec: Any, key: str) -> list[Any]:
    """What a normalizer or pre-tokenizer does, one after the other."""
    return spec[key] if spec and spec["type"] == "Sequence" else [spec] if spec else []


def _keeps_bytes(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Replace"}:
            return (step["pattern"], step["content"]) == ({"String": " "}, SPACE)
        case {"type": "Split"}:
            return bool(step["behavior"] != "Removed")
    return step["type"] in ("NFC", "Prepend", "ByteLevel", "Digits")


def _letters(name: str) -> bytes:
    """A name with other letters stands for itself: vocabularies hold a few that no merge makes."""
    try:
        return bytes(map(_BYTES.__getitem__, name))
    except KeyError:
        return name.encode()


def _opening(inner: tokenizers.Tokenizer) -> list[int]:
    """The IDs that transformers puts before a text."""
    with _panics_are_errors():
        whole, plain = (inner.encode("a", add_special_tokens=added).ids for added in (True, False))
    begin = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return whole[:begin]


def _holds(text: str, missing: bytes) -> bool:
    data = text.encode("utf-8", "surrogatepass")
    return len(data.translate(None, missing)) < len(data)


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
_NEVER = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
"""Bytes that UTF-8 never holds."""
