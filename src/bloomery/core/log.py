"""
What a person sees of a run, and what a program reads of it.

A terminal gets one live line per stage (rich): stage, bar, tokens/s, loss, time left. Anything else gets a plain line
every few seconds. Both go to stderr, so that stdout stays free for results. Numbers go to metrics.jsonl.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console

from bloomery.core.errors import DataError, readable, shorten
from bloomery.core.files import disk_errors, named_where_not_finite, parse_json, read_regular, whole_file
from bloomery.core.live import Live, Told
from bloomery.core.streams import STDERR, discard

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
"""What a stage that trains leaves: its numbers, and what the model wrote on the way."""
MAX_METRICS_BYTES = 2**31
"""Of such a file: a line has some hundred bytes, and a long run a million steps."""
_DAMAGED = "The file is damaged. Remove that line, or the file: nothing but reports and charts reads it."
SECONDS_BETWEEN_PLAIN_LINES = 10.0

Number = float | int
"""Counts are whole and rates are not; a checker at run time tells the two apart."""


class _Lines(Console):
    """A console whose reader may leave: `bloomery run … 2>&1 | head` ends no run."""

    def on_broken_pipe(self) -> None:
        discard(STDERR)


console = _Lines(stderr=True, highlight=False, soft_wrap=True)
"""Where people look. stdout is for what a verb answers."""


@contextmanager
def quiet() -> Iterator[None]:
    """Show nothing while the block runs: it reports by what it returns."""
    before, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = before


VARYING = frozenset({"tokens_per_second", "mfu", "memory_bytes", "seconds"})
"""What a line of metrics tells of the machine, and not of the model: it is never the same twice."""

_listeners: list[TextIO] = []
"""Files that keep what is said, each while its `kept` block runs."""


def say(text: str, style: str = "") -> None:
    """One line for a person, shown as `readable` has it."""
    text = readable(text)
    try:
        console.print(text, style=style, markup=False)
    except OSError:
        discard(STDERR)
    for file in _listeners:
        with disk_errors(Path(file.name)):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
            file.flush()


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Add what is said while the block runs to a file, each line with its time."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    _listeners.append(file)
    try:
        yield
    finally:
        _listeners.remove(file)
        with disk_errors(path):  # closing writes what a full disk has not taken yet
            file.close()


class Meter:
    """How far one stage is. Made by `progress`; a stage calls `at` with what is done so far."""

    def __init__(self, name: str, unit: str, total: Number | None) -> None:
        self.name, self.unit, self.total = name, unit, total
        self.done: Number = 0
        self._first: Number = 0
        self._began = self._printed = time.monotonic()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console)
            self._task = self._live.add_task(name, total=total, told=Told(""))
            self._live.start()

    def start_at(self, done: Number) -> None:
        """Work that an earlier attempt did, which says nothing about today's speed."""
        self.done = self._first = done

    def at(self, done: Number, *, total: Number | None = None, **numbers: Number) -> None:
        """Report `done` units so far, and any numbers worth showing beside them."""
        self.done, self.total = done, total if total is not None else self.total
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._task, completed=done, total=self.total, told=self._told(now, numbers))
        elif now - self._printed >= SECONDS_BETWEEN_PLAIN_LINES:
            self._printed = now
            left = f", {_clock(seconds)} left" if (seconds := self._seconds_left(now)) is not None else ""
            say(f"{self.name}: {self._told(now, numbers)}{left}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _seconds_left(self, now: float) -> float | None:
        if not self.total or self.done <= self._first:
            return None
        return (now - self._began) * max(0, self.total - self.done) / (self.done - self._first)

    def _told(self, now: float, numbers: Mapping[str, Number]) -> Told:
        of = f"/{_short(self.total)}" if self.total else ""
        speed = ""
        if "tokens_per_second" in numbers:
            speed = f"tok/s {_short(numbers['tokens_per_second'])}"
        elif now > self._began + 1:
            speed = f"{_short((self.done - self._first) / (now - self._began))}/s"
        others = [f"{name} {_short(value)}" for name, value in numbers.items() if name != "tokens_per_second"]
        return Told(f"{_short(self.done)}{of} {self.unit}", speed, tuple(others))


@contextmanager
def progress(name: str, unit: str, total: Number | None = None) -> Iterator[Meter]:
    """Show how far a piece of work is while the block runs."""
    meter = Meter(name, unit, total)
    try:
        yield meter
    finally:
        meter.close()


class Metrics:
    """
    An append-only file of numbers, one JSON object a line, every one with its `step`.

    A run that goes on from step N drops the lines after N first: they tell of work that was lost. Raises DataError
    for a file that is damaged, and RunError where the disk is full.
    """

    def __init__(self, path: Path, resume_at: int) -> None:
        self._path = path
        self.kept = [line for line in read_metrics(path) if line["step"] <= resume_at]
        """The lines that were there and stay."""
        with whole_file(path, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.kept)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, *, step: int, **values: Any) -> None:
        """Add a line. A number that is not finite, which JSON cannot hold, becomes its name."""
        line = named_where_not_finite(values)
        with disk_errors(self._path):
            self._file.write(json.dumps({"step": step, **line}) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Let what was written survive a power cut."""
        with disk_errors(self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with disk_errors(self._path):  # closing writes what a full disk has not taken yet
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """
    All whole lines of a metrics file; a last line that a dying process left torn is not one.

    Raises DataError, which names file and line, for any other line that is no JSON object with a step.
    """
    if not path.exists():
        return []
    try:
        whole = read_regular(path, MAX_METRICS_BYTES).split(b"\n")[:-1]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), cure=_DAMAGED) from None
    return [_metrics_line(line, f"{path}:{number}") for number, line in enumerate(whole, 1) if line]


def _metrics_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise DataError(f"is no JSON: {shorten(str(error))}", where=where, cure=_DAMAGED) from None
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        raise DataError("is no JSON object with a whole number as step", where=where, cure=_DAMAGED)
    return found


def _short(value: Number) -> str:
    if not math.isfinite(value):
        return str(value)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:.1f}{letter}"
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
