"""
Errors that a user can cause and fix. Any other exception is a bug.

    BloomeryError
      ConfigError        a recipe, an override or a flag is wrong
      DataError          an input file, document, shard or conversation is wrong
        UnreachableError what it refers to elsewhere cannot be seen now
        MissingPackageError a package that it needs is not installed
      CheckpointError    a checkpoint is missing, torn, of another shape or of another tokenizer
      HardwareError      the machine lacks what was asked of it
      RunError           a run folder is missing, busy, or not as its manifest says

Each message says what is wrong with the value in it, where, and what to do. `cli.py` prints these without a traceback
and exits 2. A message shows at most 200 characters of a value: the code that shows it calls `shorten`, and
`BloomeryError` bounds every message.
"""

import re

MAX_VALUE_CHARS = 200
MAX_NAME_CHARS = 255
"""What a file system takes as one name, so no whole path is ever cut."""
MAX_LINE_CHARS = 4_500
"""Room for the longest path of Linux (4,096 bytes) and a sentence around it."""
MAX_MESSAGE_CHARS = 20_000

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONG_NAME = re.compile(rf"[^\s/]{{{MAX_NAME_CHARS + 1},}}")
_LONG_VALUE = re.compile(rf"(?<!\w)(?:'[^'\n]{{{MAX_VALUE_CHARS + 1},}}'|\"[^\"\n]{{{MAX_VALUE_CHARS + 1},}}\")(?!\w)")


def shorten(value: object, max_chars: int = MAX_VALUE_CHARS) -> str:
    """A value as a message shows it: text as it is, anything else by its `repr`, without the middle if it is long."""
    text = value if isinstance(value, str) else _repr(value)
    if len(text) <= max_chars:
        return text
    tail = max_chars // 4
    return f"{text[: max_chars - tail]} … [{len(text) - max_chars:,} characters left out] … {text[-tail:]}"


def readable(text: str) -> str:
    """
    Text that a terminal shows and does not obey: control characters other than newline and tab, and what UTF-8 cannot
    hold (half a surrogate pair, as in the name of a file), are written out as their numbers.
    """
    text = _CONTROL.sub(lambda letter: f"\\x{ord(letter[0]):02x}", text)
    return text.encode("utf-8", "backslashreplace").decode()


def _repr(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to write an integer of 4,300 digits
        return f"an integer of about {round(value.bit_length() * 0.30103):,} digits"
    try:
        return repr(value)
    except (RecursionError, ValueError):  # nested deeper than Python's stack, or an integer like that inside
        return f"a {type(value).__name__} that is too deep or too long to be shown"


def _bounded(text: str) -> str:
    text = _LONG_VALUE.sub(lambda run: shorten(run[0]), text)
    lines = (shorten(_LONG_NAME.sub(lambda run: shorten(run[0]), line), MAX_LINE_CHARS) for line in text.split("\n"))
    return shorten("\n".join(lines), MAX_MESSAGE_CHARS)


class BloomeryError(Exception):
    """Base of every error that a user can fix: what is wrong, where it is, and the hint."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        what, where, hint = _bounded(what), _bounded(where), _bounded(hint)
        self.what, self.where, self.hint = what, where, hint
        super().__init__("\n".join(line for line in (f"{where}: {what}" if where else what, hint) if line))


class ConfigError(BloomeryError): ...


class DataError(BloomeryError): ...


class UnreachableError(DataError): ...


class MissingPackageError(DataError): ...


class CheckpointError(BloomeryError): ...


class HardwareError(BloomeryError): ...


class RunError(BloomeryError): ...
