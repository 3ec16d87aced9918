"""
Lines for people, numbers as people read them, and metrics.jsonl for programs.

A terminal gets one live line per stage (rich): stage, bar, amount done, loss, tokens/s, time left. Any other output
gets a plain line now and then. Both go to stderr, so that stdout stays free for results. Numbers go to metrics.jsonl.

The live line shows as many complete fields as the terminal's width allows, in order of priority.

While a recipe runs (`story`), the terminal gets what `say` says, and warnings. Other `info` lines are details: they
go to the log files of a run, and to the terminal with `--verbose`.

A progress line that cannot be written to stderr is dropped, and never ends a run.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, Task
from rich.table import Table
from rich.text import Text

from bloomery.core.errors import COLUMNS, STDERR, CheckedOutput, DataError, discard, readable, shorten, wrapped
from bloomery.core.io import disk_errors, named_where_not_finite, open_regular, parse_json, read_regular, whole_file

MetricNumber = float | int
"""Counts are whole and rates are not; a checker at run time tells the two apart."""

NARROW, WIDE = 8, 24
"""Of the bar, in columns: with less it is left out, and more it does not take."""
NAME = 10
"""Columns of a stage's name."""
GAP = 2


# --- numbers -------------------------------------------------------------------------------------------------------


def short(value: MetricNumber) -> str:
    """A number in at most seven characters: 0.494, 42, 6.2k, 131k, 4.1M."""
    if not math.isfinite(value):
        return str(value)
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.99995:
            return f"{value / unit:.{1 if abs(value) < 99.95 * unit else 0}f}{letter}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:#.3g}" if 0.001 <= abs(value) < 99.95 else f"{value:.3g}"


def size(num_bytes: MetricNumber) -> str:
    """Bytes in decimal units: 812 bytes, 15.7 MB, 1.2 GB."""
    if num_bytes < 1000:
        return counted(round(num_bytes), "byte")
    text = short(num_bytes)
    return f"{text[:-1]} {text[-1]}B"


def duration(seconds: float) -> str:
    """A time in at most two units: 0.3 s, 12 s, 3 min 20 s, 2 h 5 min, 3 days 4 h."""
    if seconds < 0.95:
        return f"{max(0.1, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{counted(days, 'day')} {hours} h" if hours else counted(days, "day")
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    if minutes:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{rest} s"


def about(seconds: float) -> str:
    """A time that is estimated, in words as exact as an estimate can be: about 40 s, about 4 min 30 s, about 2 h."""
    steps = ((10, 1), (95, 10), (600, 30), (3600, 60), (36_000, 600), (math.inf, 3600))
    step = next(step for end, step in steps if seconds < end)
    return f"about {duration(max(1, round(seconds / step)) * step)}"


def percent(amount: float, whole: float) -> str:
    """A share: 78 %, 99.7 %, 0.3 %. It is 0 % or 100 % only where that is exact."""
    share = 100 * amount / whole if whole else 0.0
    if share in (0, 100) or 1 <= share <= 99:
        return f"{share:.0f} %"
    if not 0.1 <= share <= 99.9:
        return "< 0.1 %" if share < 1 else "> 99.9 %"
    return f"{share:.1f} %"


def counted(number: int, noun: str, plural: str = "") -> str:
    """1 document, 24,829 documents."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


# --- the live line -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgressText:
    """Progress of a task, shown in addition to its name."""

    done: str
    speed: str = ""
    numbers: tuple[str, ...] = ()
    left: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.done, *self.numbers, self.speed, self.left)))


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
        self._spinner = SpinnerColumn()
        super().__init__(console=console, transient=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The lines, as they are now and as wide as the terminal is now."""
        for task in self.tasks:
            parts, free = fitting(self._parts(task), min(self.console.width, COLUMNS) - 1)
            bar = BarColumn(bar_width=min(WIDE, NARROW + free))
            line = Table.grid(padding=(0, GAP))
            line.add_row(*(bar.render(task) if part.is_bar else part.text for part in parts))
            yield line

    def _parts(self, task: Task) -> list[ProgressField]:
        text: ProgressText = task.fields["told"]
        spinner = cast(Text, self._spinner.render(task))
        numbers = [ProgressField(2 if place == 0 else 7, Text(number)) for place, number in enumerate(text.numbers)]
        left = text.left or (duration(task.elapsed) if task.elapsed is not None and task.elapsed >= 1 else "")
        return [
            ProgressField(0, Text.assemble(spinner, " ", (f"{task.description:<{NAME - 1}}", "bold"))),
            *([ProgressField(4, Text(" " * NARROW), is_bar=True)] if task.total is not None else []),
            *([ProgressField(1, Text(text.done))] if text.done else []),
            *numbers,
            *([ProgressField(5, Text(text.speed))] if text.speed else []),
            *([ProgressField(3, Text(left, style="dim"))] if left else []),
        ]


def screen() -> Console:
    """The terminal behind stdout, for text that has passed `readable`."""
    stream = sys.stdout.stream if isinstance(sys.stdout, CheckedOutput) else sys.stdout
    return Console(file=stream, highlight=False)


METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
"""What a stage that trains leaves: its numbers, and what the model wrote on the way."""
MAX_METRICS_BYTES = 2**31
"""Of such a file: a line has some hundred bytes, and a long run a million steps."""
TAIL_BYTES = 2**16
_DAMAGED = "The file is damaged. Remove the line or the file: only reports and charts read it."
SECONDS_BETWEEN_PLAIN_LINES = 10.0
SHARE_BETWEEN_PLAIN_LINES = 0.05
"""Of the time since the start: a run of hours prints fewer lines an hour than one of minutes."""


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


VARYING = frozenset({"tokens_per_second", "mfu", "memory_bytes", "seconds", "gpus"})
"""Metrics that describe the machine and not the model: they differ between equal runs."""

_listeners: list[TextIO] = []
"""Log files that receive each `info` line, each while its `kept` block runs."""


DETAILS = "BLOOMERY_DETAILS"
"""A variable of the environment, which the processes that train inherit: "hidden" inside of `story`."""


@contextmanager
def story(*, verbose: bool = False) -> Iterator[None]:
    """While the block runs, the terminal gets what `say` says and warnings; of details only what is `verbose`."""
    before = os.environ.get(DETAILS)
    os.environ[DETAILS] = "shown" if verbose else "hidden"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DETAILS]
        else:
            os.environ[DETAILS] = before


def details() -> bool:
    return os.environ.get(DETAILS) != "hidden"


def info(text: str, style: str = "") -> None:
    """
    Log one line for a person, as `readable` formats it. With a style it is a warning, or about work that one waits
    for. Without, it is a detail.
    """
    text = readable(text)
    if style or details():
        _print(Text(fitted(text, "  "), style=style))
    for file in _listeners:
        with disk_errors(Path(file.name)):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
            file.flush()


def say(text: str, *, mark: str = "", name: str = "", style: str = "", indent: int = 0) -> None:
    """
    Print one line of the story of a run. `mark` and the `name` of a stage stand before the text, `style` is that of
    the mark, or of a line without one. On a terminal, a line that is too long is broken between words, and begins
    again after `indent` spaces, or below the text.
    """
    if not mark:
        _print(Text(fitted(readable(text), " " * indent), style=style))
        return
    begin = f"{mark} {name:<{NAME}} "
    line = Text(fitted(begin + readable(text), " " * len(begin)))
    line.stylize(style, 0, len(mark))
    line.stylize("bold", len(mark), len(begin))
    _print(line)


def table(rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of a label and a text."""
    width = 2 + max(len(label) for label, _ in rows) + GAP
    for label, text in rows:
        line = Text(fitted(f"  {label:<{width - 2}}{readable(text)}", " " * width))
        line.stylize("dim", 0, width)
        _print(line)


def fitted(text: str, indent: str) -> str:
    """A text in lines that fit a terminal, the second and further ones indented. Elsewhere as it is."""
    if not console.is_terminal:
        return text
    return wrapped(text, indent, max(min(console.width, COLUMNS), 2 * NAME + len(indent)))


def _print(text: Text) -> None:
    try:
        console.print(text)
    except OSError:
        discard(STDERR)


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


_stage_line: "list[tuple[Live, Any, str]]" = []
"""The live line of the stage that runs, its task and its name, while there is a terminal and a stage."""


@contextmanager
def stage_line(name: str) -> Iterator[None]:
    """Show a live line with a stage's name while the block runs, on a terminal. A meter within is shown on it."""
    if not console.is_terminal:
        yield
        return
    live = Live(console)
    _stage_line.append((live, live.add_task(name, total=None, told=ProgressText("loading")), name))
    live.start()
    try:
        yield
    finally:
        live.stop()
        _stage_line.pop()


def doing(text: str) -> None:
    """Show on the live line of a stage what it does before it can count anything."""
    for live, task, _ in _stage_line:
        live.update(task, told=ProgressText(text))


@contextmanager
def lent_terminal() -> Iterator[None]:
    """While the block runs, another process shows what is done: the live line of this one is away."""
    for live, *_ in _stage_line:
        live.stop()
    try:
        yield
    finally:
        for live, *_ in _stage_line:
            live.start()


class ProgressMeter:
    """The progress of one piece of work. Made by `progress`; a stage calls `at` with the amount done so far."""

    def __init__(self, name: str, unit: str, total: MetricNumber | None) -> None:
        self.name, self.unit, self.total = name, unit, total
        self.done: MetricNumber = 0
        self._first: MetricNumber = 0
        self._began = self._printed = time.monotonic()
        self._live: Live | None = None
        self._work = ""
        if _stage_line:
            self._live, self._task, stage = _stage_line[-1]
            self._work = "" if name == stage else f"{name} "
        elif console.is_terminal:
            self._live = Live(console)
            self._task = self._live.add_task(name, total=total, told=ProgressText(""))
            self._live.start()
        self._show(self._told(self._began, {}))

    def start_at(self, done: MetricNumber) -> None:
        """Set the work that an earlier attempt did, which does not count towards today's speed."""
        self.done = self._first = done

    def at(self, done: MetricNumber, *, total: MetricNumber | None = None, **numbers: MetricNumber) -> None:
        """Report `done` units so far, and any numbers worth showing with them."""
        self.done, self.total = done, total if total is not None else self.total
        now = time.monotonic()
        if self._live is not None:
            self._show(self._told(now, numbers))
        elif now - self._printed >= max(SECONDS_BETWEEN_PLAIN_LINES, SHARE_BETWEEN_PLAIN_LINES * (now - self._began)):
            self._printed = now
            say(f"{self.name}: {self._told(now, numbers)}")

    def close(self) -> None:
        if _stage_line:
            self.total = None
            self._show(ProgressText(""))
        elif self._live is not None:
            self._live.stop()

    def _show(self, text: ProgressText) -> None:
        if self._live is not None:
            task = next(task for task in self._live.tasks if task.id == self._task)
            task.total, task.completed = self.total, self.done
            self._live.update(self._task, told=text)

    def _seconds_left(self, now: float) -> float | None:
        if not self.total or self.done <= self._first:
            return None
        return (now - self._began) * max(0, self.total - self.done) / (self.done - self._first)

    def _told(self, now: float, numbers: Mapping[str, MetricNumber]) -> ProgressText:
        numbers = dict(numbers)
        speed = ""
        if (tokens := numbers.pop("tokens_per_second", None)) is not None:
            speed = f"{short(tokens)} tok/s"
        elif now > self._began + 1:
            speed = f"{short((self.done - self._first) / (now - self._began))}/s"
        share = [f"{numbers.pop('percent'):.0f} %"] if "percent" in numbers else []
        others = [f"{name} {short(value)}" for name, value in numbers.items()]
        of = f"/{_exact(self.total)}" if self.total else ""
        left = "" if (seconds := self._seconds_left(now)) is None else f"{duration(_coarse(seconds))} left"
        done = f"{self._work}{_exact(self.done)}{of} {self.unit}"
        return ProgressText(done, speed, (*share, *others), left if self.done != self.total else "")


@contextmanager
def progress(name: str, unit: str, total: MetricNumber | None = None) -> Iterator[ProgressMeter]:
    """Show how far a piece of work is while the block runs."""
    meter = ProgressMeter(name, unit, total)
    try:
        yield meter
    finally:
        meter.close()


def _exact(value: MetricNumber) -> str:
    return f"{value:,.0f}" if value < 1e6 else short(value)


def _coarse(seconds: float) -> float:
    """Of a time left: nobody reads its single seconds where it is minutes, and they would flicker."""
    return seconds if seconds < 60 else round(seconds / 10) * 10 if seconds < 600 else round(seconds / 60) * 60


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


def last_metrics(path: Path) -> list[dict[str, Any]]:
    """The last whole lines of a metrics file, about a hundred. Raises DataError as `read_metrics` does."""
    if not path.exists():
        return []
    try:
        with open_regular(path) as file:
            begin = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(begin)
            lines = file.read(TAIL_BYTES).split(b"\n")[:-1]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_DAMAGED) from None
    return [_metrics_line(line, str(path)) for line in lines[1 if begin else 0 :] if line]


def _metrics_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"is not valid JSON: {shorten(str(error))}", where=where, hint=_DAMAGED) from None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise DataError("is not a JSON object with an integer step", where=where, hint=_DAMAGED)
    return row


def print_pieces(texts: Iterator[str]) -> Iterator[str]:
    """Print an answer as it is made, and hand on its pieces."""
    for text in texts:
        print(text, end="", flush=True)
        yield text
    print()
