"""How well a tokenizer does: bytes for a token, tokens for a word, ids that nothing uses."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.data import extras
from bloomery.tokenizer.quick import Encoder
from bloomery.tokenizer.tokenizer import Tokenizer

LOOKED_AT = 300
"""Documents of a domain whose language is asked for; and of each, this many characters: enough to tell."""
AT_ONCE = 1000
"""Texts whose ids are held at one time."""
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
    """How many ids, special tokens aside, no text uses."""
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
            one = Counter(documents=1, tokens=len(ids), words=words, characters=len(text))
            tally.setdefault(name(text[:LOOKED_AT]), Counter()).update(one)
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
    found = Counter(unicodedata.name(letter, "none").split(" ", 1)[0] for letter in text if letter.isalpha())
    if not found:
        return "none"
    kana = found["HIRAGANA"] + found["KATAKANA"]
    return "japanese" if kana > 0.1 * found.total() else found.most_common(1)[0][0].lower()


def _langid() -> Callable[[str], str]:
    classify = extras.load("py3langid", extra="web").classify
    return lambda text: str(classify(text)[0])
