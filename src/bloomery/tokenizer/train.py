"""
Trains byte-level BPE and SentencePiece BPE tokenizers on a balanced sample of documents.

A SentencePiece model becomes a `tokenizers` tokenizer with the same token IDs, as an imported one does (importers.py).
"""

import io
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Regex, models, pre_tokenizers, trainers

from bloomery.core import extras
from bloomery.core.errors import DataError
from bloomery.tokenizer import chat_template
from bloomery.tokenizer.config import SentencePiece
from bloomery.tokenizer.importers import read_sentencepiece
from bloomery.tokenizer.tokenizer import SPACE, SPECIAL, PatternName, Tokenizer, byte_level

LONGEST_WORD = 256
"""In characters. The trainer takes time in the square of a word's length: one line of 3 MB without a space, hours."""


def train(
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
        raise DataError(f"sentencepiece could not learn: {error}", hint=hint) from None
    return buffer.getvalue()


def lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of texts without their ends, long ones in pieces; NUL, which SentencePiece cannot learn, left out."""
    for text in texts:
        for line in text.replace("\0", "").split("\n"):
            for at in range(0, len(line), LONGEST_LINE):
                yield line[at : at + LONGEST_LINE]
