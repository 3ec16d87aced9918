"""
Trains byte-level BPE and SentencePiece BPE tokenizers on a balanced sample of documents, and measures them.

A SentencePiece model becomes a `tokenizers` tokenizer with the same token IDs, as an imported one does (importers.py).
The measures are bytes per token, tokens per word, and token IDs that no text uses.

A balanced, random sample of documents is taken in one pass and in bounded memory. Each domain gives its weight's
share of the budget. What small domains leave over goes to the larger domains. A level L is found such that the
domains' min(size, L · weight) add up to the budget.

Documents are taken in the order of the hash of their IDs until that size is reached. The sample therefore depends
neither on their order nor on files. As more documents arrive, L only falls. A document beyond L now is therefore
never needed later, and is dropped as the pass continues.
"""

import hashlib
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, models, pre_tokenizers, trainers

from bloomery.core import extras
from bloomery.core.errors import DataError
from bloomery.tokenizer import chat_template
from bloomery.tokenizer.config import SentencePiece
from bloomery.tokenizer.fast_encode import Encoder
from bloomery.tokenizer.importers import read_sentencepiece
from bloomery.tokenizer.tokenizer import SPACE, SPECIAL, PatternName, Tokenizer, byte_level

LOOKED_AT = 300
"""Documents of a domain whose language is asked for; and of each, this many characters: enough to tell."""
AT_ONCE = 1000
"""Texts whose token IDs are in memory at a time."""
WORD = re.compile(r"\w+")


def used(tokenizer: Tokenizer, encoder: Encoder, texts: Mapping[str, Sequence[str]]) -> dict[str, NDArray[np.int64]]:
    """How often the texts of each domain use each id."""
    counts = {domain: np.zeros(tokenizer.vocab_size, dtype=np.int64) for domain in texts}
    for domain, some in texts.items():
        for at in range(0, len(some), AT_ONCE):
            ids = np.concatenate(encoder.encode_batch(some[at : at + AT_ONCE]))
            counts[domain] += np.bincount(ids, minlength=tokenizer.vocab_size)
    return counts


def bytes_per_token(texts: Mapping[str, Sequence[str]], counts: Mapping[str, NDArray[np.int64]]) -> dict[str, float]:
    """UTF-8 bytes for a token, by domain: more is better, at the same size of the vocabulary."""
    sizes = {domain: sum(len(text.encode()) for text in some) for domain, some in texts.items()}
    return {domain: round(size / max(int(counts[domain].sum()), 1), 3) for domain, size in sizes.items()}


def unused(tokenizer: Tokenizer, counts: Mapping[str, NDArray[np.int64]]) -> int:
    """How many token IDs, without special tokens, no text uses."""
    total = np.sum([np.zeros(tokenizer.vocab_size, dtype=np.int64), *counts.values()], axis=0)
    total[sorted(tokenizer.special_ids)] = 1
    return int((total == 0).sum())


def fertility(encoder: Encoder, texts: Mapping[str, Sequence[str]], languages: str) -> dict[str, dict[str, Any]]:
    """
    Tokens for a word and for a character, by language (or script), of up to LOOKED_AT documents of each domain.

    A word is a run of letters, digits and underscores; scripts without spaces have long ones, so look at characters
    there. Raises DataError where languages are asked for and py3langid is not installed.
    """
    name = _langid() if languages == "langid" else script
    tally: dict[str, Counter[str]] = {}
    for some in texts.values():
        for text, ids in zip(some[:LOOKED_AT], encoder.encode_batch(some[:LOOKED_AT]), strict=True):
            words = len(WORD.findall(text))
            counts = Counter(documents=1, tokens=len(ids), words=words, characters=len(text))
            tally.setdefault(name(text[:LOOKED_AT]), Counter()).update(counts)
    return {
        language: {
            "documents": count["documents"],
            "tokens_per_word": round(count["tokens"] / max(count["words"], 1), 3),
            "tokens_per_character": round(count["tokens"] / max(count["characters"], 1), 3),
        }
        for language, count in sorted(tally.items())
    }


def script(text: str) -> str:
    """What most letters of a text are, as Unicode names them: latin, cyrillic, cjk …; japanese where kana are there."""
    tally = Counter(unicodedata.name(letter, "none").split(" ", 1)[0] for letter in text if letter.isalpha())
    if not tally:
        return "none"
    kana = tally["HIRAGANA"] + tally["KATAKANA"]
    return "japanese" if kana > 0.1 * tally.total() else tally.most_common(1)[0][0].lower()


def _langid() -> Callable[[str], str]:
    classify = extras.load("py3langid").classify
    return lambda text: str(classify(text)[0])


LONGEST = 1_000_000
"""Characters. A longer document gives only a window, at a hashed offset, so that no file dominates its domain."""
SLACK = 1.25
"""How far memory may run over the budget before what is beyond the level is dropped."""


class Sample:
    """About `budget` bytes of text, by domain. Without weights all domains are sampled, evenly."""

    def __init__(self, budget: int, weights: Mapping[str, float] | None = None) -> None:
        self._budget, self._weights = budget, dict(weights or {})
        self._even = not weights
        self.seen_bytes: dict[str, int] = dict.fromkeys(self._weights, 0)
        self.seen_documents: dict[str, int] = dict.fromkeys(self._weights, 0)
        self._kept: dict[str, list[tuple[bytes, str, int]]] = {domain: [] for domain in self._weights}
        self._last: dict[str, bytes] = {}
        self._held = 0

    def add(self, domain: str, id: str, text: str) -> None:
        """Offer a document."""
        if domain not in self._weights:
            if not self._even:
                return
            self._weights[domain] = 1.0
            self.seen_bytes[domain] = self.seen_documents[domain] = 0
            self._kept[domain] = []
        key = hashlib.sha256(id.encode()).digest()
        if len(text) > LONGEST:
            start = int.from_bytes(key[-8:], "big") % (len(text) - LONGEST)
            text = text[start : start + LONGEST]
        size = len(text.encode())
        self.seen_bytes[domain] += size
        self.seen_documents[domain] += 1
        if key > self._last.get(domain, key):
            return  # beyond what a lower level will want
        self._kept[domain].append((key, text, size))
        self._held += size
        if self._held > self._budget * SLACK + LONGEST:
            self._trim()

    def missing(self) -> list[str]:
        """The domains that were asked for and have no text."""
        return sorted(domain for domain, size in self.seen_bytes.items() if not size)

    def texts(self) -> dict[str, list[str]]:
        """The sample, by domain, in the order of the hashes."""
        self._trim()
        return {
            domain: [text for _, text, _ in self._kept[domain]] for domain in sorted(self._kept) if self._kept[domain]
        }

    def level(self) -> float:
        """L: bytes for each unit of weight."""
        left, weight = float(self._budget), sum(self._weights.values())
        for domain in sorted(self._weights, key=lambda name: self.seen_bytes[name] / self._weights[name]):
            share = self._weights[domain]
            if self.seen_bytes[domain] >= left / weight * share:
                return left / weight
            left, weight = left - self.seen_bytes[domain], weight - share
        return float("inf")

    def _trim(self) -> None:
        level = self.level()
        self._held = 0
        for domain, kept in self._kept.items():
            kept.sort()
            size, budget = 0, level * self._weights[domain]
            for index, (_, _, text_size) in enumerate(kept):
                if size >= budget:
                    del kept[index:]
                    self._last[domain] = kept[-1][0]
                    break
                size += text_size
            self._held += size


LONGEST_WORD = 256
"""In characters. The trainer takes time in the square of a word's length: one line of 3 MB without a space, hours."""


def train_byte_level(
    texts: Iterable[str], vocab_size: int, pattern: PatternName = "qwen2", special: Sequence[str] = SPECIAL
) -> Tokenizer:
    """
    A tokenizer of at most `vocab_size` token IDs, special tokens included; fewer where the text has no more merges.

    Training splits words longer than LONGEST_WORD into pieces. Encoding leaves them whole.
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


LONGEST_LINE = 100_000
"""Characters of a training line; a longer line is split. SentencePiece itself would leave it out."""


def train_sentencepiece(texts: Iterable[str], config: SentencePiece) -> Tokenizer:
    """A tokenizer trained by `sentencepiece`. Raises DataError where it is not installed or cannot learn."""
    return Tokenizer(read_sentencepiece(learned(texts, config), "the trained model"))


def learned(texts: Iterable[str], config: SentencePiece) -> bytes:
    """
    The `.model` that `sentencepiece` trains on the lines of texts. Raises DataError.

    Special tokens are control symbols, which no text becomes, after the unknown one.
    """
    trainer = extras.load("sentencepiece")
    buffer = io.BytesIO()
    try:
        trainer.SentencePieceTrainer.train(
            sentence_iterator=lines(texts),
            model_writer=buffer,
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
            control_symbols=list(chat_template.special_tokens(config.chat_template)),
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
        raise DataError(f"SentencePiece could not train: {error}", hint=hint) from None
    return buffer.getvalue()


def lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of texts without their ends, long ones in pieces; NUL, which SentencePiece cannot learn, left out."""
    for text in texts:
        for line in text.replace("\0", "").split("\n"):
            for at in range(0, len(line), LONGEST_LINE):
                yield line[at : at + LONGEST_LINE]
