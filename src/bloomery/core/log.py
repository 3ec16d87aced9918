"""
Progress lines for people, and metrics.jsonl for programs.

A terminal gets one live line per stage (rich): stage, bar, tokens/s, loss, time left. Any other output gets a plain
line every few seconds. Both go to stderr, so that stdout stays free for results. Numbers go to metrics.jsonl.

The live line shows as many complete fields as the terminal's width allows, in order of priority.

A caller may close the three standard streams, or put a full disk behind them. A result that cannot be written to
stdout is an error. A progress line that cannot be written to stderr is dropped, and never ends a run.
"""

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from bloomery.core.errors import BloomeryError, DataError, readable, shorten
from bloomery.core.io import disk_errors, named_where_not_finite, parse_json, read_regular, whole_file

NARROW, WIDE = 8, 24
"""Of the bar, in columns: with less it is left out, and more it does not take."""
NAME = 11
"""Columns of a stage's name, so that the lines of most begin alike."""
GAP = 2


@dataclass(frozen=True)
class ProgressText:
    """Progress of a task, shown in addition to its name and times."""

    done: str
    speed: str = ""
    numbers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (" " * GAP).join(part for part in (self.done, self.speed, *self.numbers) if part)


@dataclass(frozen=True)
class ProgressField:
    """Something that a line may show, and how soon it goes where room is scarce: that with the highest rank first."""

    rank: int
    text: Text
    is_bar: bool = False


def fitting(parts: Sequence[ProgressField], width: int) -> tuple[list[ProgressField], int]:
    """
    The parts that a line of `width` columns has room for, in their order, and how many columns stay free. One that has
    no room takes with it all that are less wanted.
    """
    kept, free = set[int](), width + GAP
    for index in sorted(range(len(parts)), key=lambda index: parts[index].rank):
        size = parts[index].text.cell_len + GAP
        if size > free:
            break
        kept.add(index)
        free -= size
    return [part for place, part in enumerate(parts) if place in kept], free if kept else width


class Live(Progress):
    """A line for each task. The field `told` of a task is its `ProgressText`."""

    def __init__(self, console: Console) -> None:
        self._spinner, self._elapsed, self._left = SpinnerColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        super().__init__(console=console, transient=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The lines, as they are now and as wide as the terminal is now."""
        for task in self.tasks:
            parts, free = fitting(self._parts(task), self.console.width - 1 - GAP)
            bar = BarColumn(bar_width=min(WIDE, NARROW + free))
            line = Table.grid(padding=(0, GAP))
            line.add_row(
                self._spinner.render(task), *(bar.render(task) if part.is_bar else part.text for part in parts)
            )
            yield line

    def _parts(self, task: Task) -> list[ProgressField]:
        text: ProgressText = task.fields["told"]
        numbers = [ProgressField(2 if place == 0 else 7, Text(number)) for place, number in enumerate(text.numbers)]
        return [
            ProgressField(0, Text(f"{task.description:<{NAME}}", style="bold")),
            ProgressField(5, Text(" " * NARROW), is_bar=True),
            *([ProgressField(1, Text(text.done))] if text.done else []),
            *([ProgressField(4, Text(text.speed))] if text.speed else []),
            *numbers,
            ProgressField(6, self._elapsed.render(task)),
            *([ProgressField(3, Text.assemble("left ", self._left.render(task)))] if task.total is not None else []),
        ]


STDOUT, STDERR = 1, 2


class OutputError(BloomeryError): ...


def open_closed() -> None:
    """Let descriptors 0 to 2 that are closed lead nowhere. Else the next file that is opened takes the place of one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # which takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = os.fdopen(STDOUT, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w", encoding="utf-8")


def show_every_character() -> None:
    """Let stdout show as its number what its encoding lacks: an accent in ASCII, a byte of a file name in UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def discard(number: int) -> None:
    """Let a descriptor lead nowhere from now on, for the processes that this one starts too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


@contextmanager
def checked_output() -> Iterator[None]:
    """While the block runs, what cannot be written to stdout raises OutputError, or BrokenPipeError."""
    before = sys.stdout
    sys.stdout = cast(TextIO, _Output(before))
    try:
        yield
    finally:
        sys.stdout = before


class _Output:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As a file's. Names and models' answers may hold sequences that a terminal would obey."""
        return int(self._call(self._stream.write, readable(text) if self._stream.isatty() else text))

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, function: Callable[..., Any], *words: str) -> Any:
        try:
            return function(*words)
        except BrokenPipeError:
            raise
        except OSError as error:
            what = f"cannot be written: {error.strerror}"
            raise OutputError(what, where="standard output", hint="Send it to a disk with free space.") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tell(text: str) -> None:
    """A line for people."""
    try:
        print(readable(text), file=sys.stderr, flush=True)
    except OSError:
        discard(STDERR)


METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
"""What a stage that trains leaves: its numbers, and what the model wrote on the way."""
MAX_METRICS_BYTES = 2**31
"""Of such a file: a line has some hundred bytes, and a long run a million steps."""
_DAMAGED = "The file is damaged. Remove that line, or the file: nothing but reports and charts reads it."
SECONDS_BETWEEN_PLAIN_LINES = 10.0

MetricNumber = float | int
"""Counts are whole and rates are not; a checker at run time tells the two apart."""


class _LineConsole(Console):
    """A console whose reader may leave: `bloomery run … 2>&1 | head` ends no run."""

    def on_broken_pipe(self) -> None:
        discard(STDERR)


console = _LineConsole(stderr=True, highlight=False, soft_wrap=True)
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
"""Metrics that describe the machine and not the model: they differ between equal runs."""

_listeners: list[TextIO] = []
"""Log files that receive each `info` line, each while its `kept` block runs."""


def info(text: str, style: str = "") -> None:
    """Print one line for a person, as `readable` formats it."""
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
    """Append the `info` lines printed while the block runs to a file, each with its time."""
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


class ProgressMeter:
    """The progress of one stage. Made by `progress`; a stage calls `at` with the amount done so far."""

    def __init__(self, name: str, unit: str, total: MetricNumber | None) -> None:
        self.name, self.unit, self.total = name, unit, total
        self.done: MetricNumber = 0
        self._first: MetricNumber = 0
        self._began = self._printed = time.monotonic()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console)
            self._task = self._live.add_task(name, total=total, told=ProgressText(""))
            self._live.start()

    def start_at(self, done: MetricNumber) -> None:
        """Set the work that an earlier attempt did, which does not count towards today's speed."""
        self.done = self._first = done

    def at(self, done: MetricNumber, *, total: MetricNumber | None = None, **numbers: MetricNumber) -> None:
        """Report `done` units so far, and any numbers worth showing with them."""
        self.done, self.total = done, total if total is not None else self.total
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._task, completed=done, total=self.total, told=self._told(now, numbers))
        elif now - self._printed >= SECONDS_BETWEEN_PLAIN_LINES:
            self._printed = now
            left = f", {_clock(seconds)} left" if (seconds := self._seconds_left(now)) is not None else ""
            info(f"{self.name}: {self._told(now, numbers)}{left}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _seconds_left(self, now: float) -> float | None:
        if not self.total or self.done <= self._first:
            return None
        return (now - self._began) * max(0, self.total - self.done) / (self.done - self._first)

    def _told(self, now: float, numbers: Mapping[str, MetricNumber]) -> ProgressText:
        of = f"/{_short(self.total)}" if self.total else ""
        speed = ""
        if "tokens_per_second" in numbers:
            speed = f"tok/s {_short(numbers['tokens_per_second'])}"
        elif now > self._began + 1:
            speed = f"{_short((self.done - self._first) / (now - self._began))}/s"
        others = [f"{name} {_short(value)}" for name, value in numbers.items() if name != "tokens_per_second"]
        return ProgressText(f"{_short(self.done)}{of} {self.unit}", speed, tuple(others))


@contextmanager
def progress(name: str, unit: str, total: MetricNumber | None = None) -> Iterator[ProgressMeter]:
    """Show how far a piece of work is while the block runs."""
    meter = ProgressMeter(name, unit, total)
    try:
        yield meter
    finally:
        meter.close()


class Metrics:
    """
    An append-only file of numbers: one JSON object a line, each with its `step`.

    A run that resumes from step N first drops the lines after N, because their work was lost. Raises DataError
    for a damaged file, and RunError where the disk is full.
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
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_DAMAGED) from None
    return [_metrics_line(line, f"{path}:{number}") for number, line in enumerate(whole, 1) if line]


def _metrics_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"is no JSON: {shorten(str(error))}", where=where, hint=_DAMAGED) from None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise DataError("is no JSON object with a whole number as step", where=where, hint=_DAMAGED)
    return row


def _short(value: MetricNumber) -> str:
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
