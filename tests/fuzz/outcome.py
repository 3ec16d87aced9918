"""What can become of one input, and the calls that say so."""

import contextlib
import io
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hypothesis.strategies import SearchStrategy

from bloomery import cli
from bloomery.core.errors import BloomeryError

PACKAGE = os.path.dirname(cli.__file__) + os.sep
REFUSED = (2, 130, 143)
MOST_MESSAGE_CHARACTERS = 4_000


class WrongError(Exception):
    """An input that was neither done nor refused as it must be. `kind` is what a summary counts it as."""

    def __init__(self, kind: str, what: str, where: str = "") -> None:
        self.kind, self.what, self.where = kind, what, where
        super().__init__(f"{kind}: {what}")


class RefusedError(Exception):
    """The command line refused an input as it must: exit code 2, 130 or 143, and a message."""


@dataclass(frozen=True)
class Target:
    """One kind of input. `attempt` gets the bytes and an empty folder, and raises where they are not done."""

    inputs: SearchStrategy[bytes]
    attempt: Callable[[bytes, Path], None]


@dataclass(frozen=True)
class Outcome:
    kind: str
    """done, refused, or what is wrong: traceback, hang, abort, memory, processes, absurd, lost."""
    what: str = ""
    where: str = ""
    """The last function of Bloomery that a traceback names, or the value that was accepted. Equal for equal faults."""

    @property
    def is_find(self) -> bool:
        return self.kind not in ("done", "refused")

    @property
    def signature(self) -> tuple[str, str]:
        return self.kind, self.where


def tried(target: Target, data: bytes, folder: Path) -> Outcome:
    """Try one input. Catches all that Python can: this is where a fault becomes a find."""
    try:
        target.attempt(data, folder)
    except RefusedError as refused:
        return _refusal(str(refused))
    except BloomeryError as error:
        return _refusal(str(error))
    except WrongError as wrong:
        return Outcome(wrong.kind, wrong.what[:2000], wrong.where or wrong.what[:100])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Rust's panics are no Exceptions
        return Outcome("traceback", f"{type(error).__name__}: {error}"[:2000], _where(error.__traceback__, error))
    return Outcome("done")


def command(*words: str | Path) -> str:
    """Run a verb as the command line does; what it printed. Raises RefusedError or WrongError for other exit codes."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:  # argparse's own
            code = end.code if isinstance(end.code, int) else 1
    if code in REFUSED:
        raise RefusedError(err.getvalue())
    if code != 0:
        raise WrongError("traceback", err.getvalue()[-2000:], _named_in(err.getvalue()))
    return out.getvalue()


def _refusal(message: str) -> Outcome:
    if len(message) > MOST_MESSAGE_CHARACTERS:
        what = f"a message of {len(message):,} characters: {message[:300]}"
        return Outcome("absurd", what, f"long message: {message[:40]}")
    return Outcome("refused", message)


def _where(trace: TracebackType | None, error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename.startswith(PACKAGE)]
    last = frames[-1] if frames else None
    place = f"{last.filename.removeprefix(PACKAGE)}:{last.name}" if last else "elsewhere"
    return f"{type(error).__name__} in {place}"


def _named_in(printed: str) -> str:
    """The same of a traceback that was printed."""
    lines = printed.splitlines()
    frames = [line.split('"') for line in lines if line.startswith(f'  File "{PACKAGE}')]
    error = next((line.partition(":")[0] for line in reversed(lines[:-1]) if line and line[0].isalpha()), "exit 1")
    if not frames:
        return f"{error} elsewhere"
    file, rest = frames[-1][1], frames[-1][2]
    return f"{error} in {file.removeprefix(PACKAGE)}:{rest.rpartition(' in ')[2]}"
