r"""
How text is cut into words before merges are learned or applied: patterns that llama.cpp knows by name.

A GGUF file holds no pattern, only a name, and llama.cpp splits by the code that it keeps under that name. So a
tokenizer that shall be served there has to use one of its patterns, letter by letter. Each stands here twice: as
`tokenizers` runs it, and as the regular expressions of `tiktoken` run it faster. The second puts all but the two
alternatives with a look-ahead into one group, which runs as one automaton, and the most frequent words first; a test
holds that both cut every text alike.
"""

from typing import Literal, NamedTuple, get_args

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
