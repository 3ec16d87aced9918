"""Training a tokenizer: byte-level BPE on a balanced sample of documents."""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from bloomery.tokenizer.patterns import PATTERNS, PatternName
from bloomery.tokenizer.tokenizer import SPECIAL, Tokenizer

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
