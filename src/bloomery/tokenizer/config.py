"""The section `tokenizer` of a recipe: a byte-level BPE or a SentencePiece model to train, or a tokenizer to import."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import model_validator

from bloomery.core.chat import TemplateName
from bloomery.core.config import Between, Bytes, Config, DiskPath, Weight, repeated
from bloomery.core.extras import DATA
from bloomery.tokenizer.chat_template import special_tokens
from bloomery.tokenizer.tokenizer import MAX_IDS, PatternName

MANY_IDS = "each token ID is a row of the embedding"


class DomainShare(Config):
    domain: str
    """The domain."""
    weight: Weight
    """Weight of the domain: its share of the sample, relative to the other domains."""


class SampledText(Config):
    """What every kind has: the text that it is trained or measured on."""

    sample_bytes: Bytes = 20_000_000
    """Size of the training sample. It has whole documents, chosen by hash, and no possible validation documents."""
    weights: tuple[DomainShare, ...] = ()
    """Domains of the sample. A named domain without documents is an error. Empty: all domains evenly."""
    languages: Literal["script", "langid"] = "script"
    """How reports group fertility: by the script of a document, or by its language, which py3langid guesses."""
    chat_template: TemplateName = "bloomery"
    """The chat template whose special tokens the tokenizer has. A recipe takes it from `instruct.chat_template`."""
    gpt2: DiskPath | None = None
    """Folder with GPT-2's vocab.bpe and encoder.json, to compare with. None: `$BLOOMERY_SHARED/data/tokenizer`."""

    def packages(self) -> tuple[str, ...]:
        return (*DATA, "py3langid") if self.languages == "langid" else DATA

    @model_validator(mode="after")
    def _one_weight_a_domain(self) -> "SampledText":
        names = [share.domain for share in self.weights]
        if twice := repeated(names):
            raise ValueError(f"weights has the domain {twice[0]!r} twice; remove one of them")
        return self


class ByteBpe(SampledText):
    """Byte-level BPE: every text can be encoded, and decodes to the same bytes."""

    kind: Literal["byte_bpe"] = "byte_bpe"
    vocab_size: Annotated[int, Between(1, 2**20, MANY_IDS)] = 4096
    """Size of the vocabulary, including special tokens."""
    pattern: PatternName = "qwen2"
    """How text is split into words: a name from llama.cpp. qwen2 makes every digit a token."""

    @model_validator(mode="after")
    def _has_room(self) -> "ByteBpe":
        _check_room(self.vocab_size, self.chat_template)
        return self


class SentencePiece(SampledText):
    """
    SentencePiece BPE with byte fallback, as `sentencepiece` trains it. U+2581 (▁) decodes to a space.

    It does not normalize text, adds no space before it, and keeps white space.
    """

    kind: Literal["sentencepiece"] = "sentencepiece"
    vocab_size: Annotated[int, Between(300, 2**20, MANY_IDS)] = 4096
    """Size of the vocabulary, including special tokens and 256 bytes."""
    character_coverage: Annotated[float, Between(0.9, 1, "it is a share", "with less most text is bytes")] = 0.9999
    """Share of the sample's characters that get their own token. All other characters become bytes."""
    max_piece_characters: Annotated[int, Between(1, 512, "SentencePiece takes no more")] = 16
    """Maximum length of a token."""
    split_digits: bool = True
    """Whether each digit is a separate token."""
    symbols: tuple[str, ...] = ("\n", "\t")
    """
    Texts that are always one token. Do not list marks of a conversation: any text that contains the mark would produce
    its token.
    """

    def packages(self) -> tuple[str, ...]:
        return (*super().packages(), "sentencepiece")

    @model_validator(mode="after")
    def _has_room(self) -> "SentencePiece":
        _check_room(self.vocab_size, self.chat_template, self.symbols)
        return self


def _check_room(vocab_size: int, template: TemplateName, symbols: Sequence[str] = ()) -> None:
    """Raises ValueError where a vocabulary has no room for what it holds before anything is learned."""
    special = special_tokens(template)
    if vocab_size < (needed := 256 + len({*special, *symbols})):
        also = f" and {len(set(symbols))} symbols" if symbols else ""
        what = f"256 bytes, {len(special)} special tokens of the template {template!r}{also}"
        raise ValueError(f"vocab_size must be at least {needed:,}, got {vocab_size}: {what}")


class Imported(SampledText):
    """An existing tokenizer. It keeps its token IDs. Missing special tokens get the IDs after them."""

    kind: Literal["import"] = "import"
    path: DiskPath
    """
    tokenizer.json, ranks as `.tiktoken`, a SentencePiece `.model`, llm.c's `.bin`, a folder with vocab.bpe and
    encoder.json, a GGUF file, or a model of a hub.
    """
    pattern: PatternName | None = None
    """How text is split into words, for files that do not state it: `.tiktoken`, and llm.c's tokenizer."""
    vocab_size: Annotated[int, Between(1, MAX_IDS, MANY_IDS)] | None = None
    """Number of token IDs, added special tokens included. A plan uses it while the tokenizer does not exist yet."""
    measure: bool = True
    """Whether to measure the tokenizer on the documents of the run. If false, the stage needs no documents."""

    def packages(self) -> tuple[str, ...]:
        return super().packages() if self.measure else ()

    def needs(self, after: tuple[str, ...]) -> tuple[str, ...]:
        return after if self.measure else ()


AnyKind = ByteBpe | SentencePiece | Imported
