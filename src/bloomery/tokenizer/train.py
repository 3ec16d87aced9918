"""
Trains byte-level BPE and SentencePiece BPE tokenizers, and reads SentencePiece models.

Byte-level BPE is trained on a balanced sample of documents.

SentencePiece models of the kind BPE are trained, or read from a `.model` file. They become a `tokenizers` tokenizer
with the same token IDs.

SentencePiece joins the two neighbors whose joined text is the piece of the highest score, the leftmost of equals.
Here that becomes a list of merges. For every piece, best score first, it holds each pair of pieces that the piece
splits into. A text is one word, its spaces are written as U+2581, and a character without a piece becomes its
bytes. A `.model` is a protocol buffer (sentencepiece_model.proto). The few fields that matter are read without the
package.
"""

import io
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from bloomery.core import errors
from bloomery.core.errors import DataError
from bloomery.tokenizer import chat_template
from bloomery.tokenizer.config import SentencePiece
from bloomery.tokenizer.tokenizer import PATTERNS, SPACE, SPECIAL, PatternName, Tokenizer

LONGEST_WORD = 256
"""In characters. The trainer takes time in the square of a word's length: one line of 3 MB without a space, hours."""


def train(
    texts: Iterable[str], vocab_size: int, pattern: PatternName = "qwen2", special: Sequence[str] = SPECIAL
) -> Tokenizer:
    """
    A tokenizer of at most `vocab_size` ids, special tokens included; fewer where the text holds no more merges.

    Longer words than LONGEST_WORD are learned from in pieces. Encoding leaves them whole.
    """
    inner = byte_level(models.BPE(), pattern)
    words, letters = inner.pre_tokenizer
    pieces = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{LONGEST_WORD}}}"), behavior="isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, pieces, letters])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    return Tokenizer(inner)


def byte_level(model: models.BPE, pattern: PatternName) -> tokenizers.Tokenizer:
    """A byte-level BPE that cuts words by one of PATTERNS."""
    inner = tokenizers.Tokenizer(model)
    words = pre_tokenizers.Split(Regex(PATTERNS[pattern].regex), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    inner.decoder = decoders.ByteLevel()
    return inner


LONGEST_LINE = 100_000
"""Characters of a line that is learned from; a longer one is cut. SentencePiece itself would leave it out."""

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
BPE = 2
PARTS, PIECE = {1: bytes, 2: bytes, 3: bytes}, {1: bytes, 2: bytes, 3: int}
TRAINER, NORMALIZER = {3: int, 35: int}, {2: bytes, 3: int, 4: int}
"""Types of the fields that are read of a model, of a piece, and of its settings, by number."""
MOST_VARINT_BYTES = 10
"""Of 64 bits, 7 in a byte."""


class SentencePieceToken(NamedTuple):
    text: str
    score: float
    type: int


class SentencePieceModel(NamedTuple):
    pieces: list[SentencePieceToken]
    kind: int
    """1 unigram, 2 BPE, 3 words, 4 characters."""
    charsmap: bytes
    """The table of a normalization; empty for none."""
    puts_space_first: bool
    squeezes_space: bool
    byte_fallback: bool


def train_sentencepiece(texts: Iterable[str], config: SentencePiece) -> Tokenizer:
    """A tokenizer trained by `sentencepiece`. Raises DataError where it is not installed or cannot learn."""
    return Tokenizer(read(learned(texts, config), "the trained model"))


def learned(texts: Iterable[str], config: SentencePiece) -> bytes:
    """
    The `.model` that `sentencepiece` learns from the lines of texts. Raises DataError.

    Special tokens are control symbols, which no text becomes, after the unknown one.
    """
    trainer = errors.load("sentencepiece", extra="sentencepiece")
    made = io.BytesIO()
    try:
        trainer.SentencePieceTrainer.train(
            sentence_iterator=lines(texts),
            model_writer=made,
            model_type="bpe",
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=True,
            split_digits=config.split_digits,
            max_sentencepiece_length=config.max_piece_characters,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            hard_vocab_limit=False,
            user_defined_symbols=[symbol.replace(" ", SPACE) for symbol in config.symbols],
            control_symbols=list(chat_template.wanted(config.template)),
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            max_sentence_length=8 * LONGEST_LINE,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        hint = "Raise tokenizer.sample_bytes, or lower tokenizer.vocab_size."
        raise DataError(f"sentencepiece could not learn: {error}", hint=hint) from None
    return made.getvalue()


def lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of texts without their ends, long ones in pieces; NUL, which SentencePiece cannot learn, left out."""
    for text in texts:
        for line in text.replace("\0", "").split("\n"):
            for at in range(0, len(line), LONGEST_LINE):
                yield line[at : at + LONGEST_LINE]


def read(data: bytes, where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a `.model` file. Raises DataError, which says why, where it cannot have the same ids."""
    try:
        model = parse(data)
    except (IndexError, KeyError, ValueError, struct.error):
        raise DataError("is no SentencePiece model", where=where) from None
    if problem := _problem(model):
        raise DataError(f"cannot be read with the same ids: {problem}", where=where)
    vocab = {piece.text: id for id, piece in enumerate(model.pieces)}
    unknown = next((piece.text for piece in model.pieces if piece.type == UNKNOWN), None)
    bpe = models.BPE(
        vocab=vocab,
        merges=merges(model.pieces),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )
    inner = tokenizers.Tokenizer(bpe)
    first = [normalizers.Prepend(SPACE)] if model.puts_space_first else []
    inner.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if model.puts_space_first else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    inner.decoder = decoders.Sequence(steps)
    special = [piece.text for piece in model.pieces if piece.type == CONTROL]
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    # one with a space in it is never found: spaces are U+2581 by the time it is looked for
    users = [piece.text for piece in model.pieces if piece.type == USER and " " not in piece.text]
    inner.add_tokens([AddedToken(name, normalized=SPACE in name, special=False) for name in users])
    return inner


def _problem(model: SentencePieceModel) -> str:
    users = [piece.text for piece in model.pieces if piece.type == USER]
    kinds = {1: "unigram", 3: "words", 4: "characters"}
    if model.kind != BPE:
        return f"it is a model of {kinds.get(model.kind, 'an unknown kind')}, not BPE"
    if model.charsmap or model.squeezes_space:
        return "it changes text before it encodes it (normalization, or runs of space made one)"
    if any(piece.type == UNUSED for piece in model.pieces):
        return "it has pieces marked as unused"
    if not model.byte_fallback:
        return "it has no bytes to fall back to, so it loses text"
    if users and model.puts_space_first:
        return "it puts a space before each text and has user-defined symbols"
    if any(len(piece.text) == 1 and piece.type in (CONTROL, UNKNOWN) for piece in model.pieces):
        return "it has a special token of one character"
    if len({piece.text for piece in model.pieces}) < len(model.pieces):
        return "it has one piece twice"
    return ""


def merges(pieces: Iterable[SentencePieceToken]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, in the order of its score; of one piece's, shorter left parts first."""
    learned = [piece for piece in pieces if piece.type == NORMAL]
    known = {piece.text for piece in learned}
    found = []
    for piece in sorted(learned, key=lambda piece: -piece.score):
        cuts = ((piece.text[:place], piece.text[place:]) for place in range(1, len(piece.text)))
        found += [(left, right) for left, right in cuts if left in known and right in known]
    return found


def parse(data: bytes) -> SentencePieceModel:
    """What a `.model` file says. Raises ValueError, KeyError, IndexError or struct.error for what is none."""
    pieces, trainer, normalizer = [], dict[int, Any](), dict[int, Any]()
    for number, value in _fields(data, PARTS):
        if number == 1:
            told = dict(_fields(value, PIECE))
            pieces.append(
                SentencePieceToken(told[1].decode(), struct.unpack("<f", told.get(2, bytes(4)))[0], told.get(3, NORMAL))
            )
        elif number == 2:
            trainer = dict(_fields(value, TRAINER))
        elif number == 3:
            normalizer = dict(_fields(value, NORMALIZER))
    if not pieces:
        raise ValueError("no pieces")
    return SentencePieceModel(
        pieces,
        kind=trainer.get(3, 1),
        charsmap=normalizer.get(2, b""),
        puts_space_first=bool(normalizer.get(3, 1)),
        squeezes_space=bool(normalizer.get(4, 1)),
        byte_fallback=bool(trainer.get(35, 0)),
    )


def _fields(data: bytes, types: Mapping[int, type]) -> Iterator[tuple[int, Any]]:
    """
    Number and value of each field of a protocol buffer: int, or bytes for all that is longer. Raises ValueError where a
    field of `types` is of another type; others may be of any.
    """
    for number, value in _any_fields(data):
        if not isinstance(value, types.get(number, int | bytes)):
            raise ValueError(f"field {number} is {type(value).__name__}")
        yield number, value


def _any_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        match tag & 7:
            case 0:
                value, place = _varint(data, place)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, place = _varint(data, place)
            case 5:
                size = 4
            case wire:
                raise ValueError(f"wire type {wire}")
        if place + size > len(data):
            raise ValueError("cut off")
        yield tag >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[place : place + MOST_VARINT_BYTES]:
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            return value, place
    raise ValueError("a number without end")
