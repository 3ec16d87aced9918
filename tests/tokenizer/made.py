"""One small tokenizer for every test that needs some tokenizer."""

from functools import cache

from hypothesis import strategies as st

from bloomery.data.sources import toy_worlds
from bloomery.tokenizer.chat_template import special_tokens
from bloomery.tokenizer.tokenizer import SPECIAL, Tokenizer
from bloomery.tokenizer.train import train_byte_level

VOCAB_SIZE = 700

CODE = "def add(a, b):\n    if a < 0:\n\t\treturn None  # why\n    return a + b\n\n\n"
ELSEWHERE = "Größe café naïve – «ёлка» 東京都 한국어 العربية 😀👩‍👩‍👧 e\u0301 \u200b\u00a0 1234567890 x² ½\r\n"


def training_texts() -> list[str]:
    return [*toy_worlds.documents(1, 150), CODE * 20, ELSEWHERE * 20, " ".join(SPECIAL) * 5]


@cache
def small() -> Tokenizer:
    return train_byte_level(training_texts(), VOCAB_SIZE)


@cache
def made_for(template: str) -> Tokenizer:
    """The same text, with the special tokens of a template."""
    return train_byte_level(training_texts(), VOCAB_SIZE, special=special_tokens(template))


SPELLED = [*SPECIAL, "<|", "|>", "end", "<|user", " ", "\n", "the lamp", "12", "é", "😀"]

TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=40),
    st.text(" \n\r\t\x0b\x0c\x00\x1f\x7f\x85\u00a0\u2028\u3000ab1'.", max_size=20),
    st.lists(st.sampled_from(SPELLED), max_size=6).map("".join),
)
"""Text of every kind: any letters, nothing but space and control characters, and what looks like special tokens."""
