"""The live line of a terminal: as many whole parts as its width has room for, the most wanted first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

NARROW, WIDE = 8, 24
"""Of the bar, in columns: with less it is left out, and more it does not take."""
NAME = 11
"""Columns of a stage's name, so that the lines of most begin alike."""
GAP = 2


@dataclass(frozen=True)
class Told:
    """What is said of a piece of work beside its name and times."""

    done: str
    speed: str = ""
    numbers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (" " * GAP).join(part for part in (self.done, self.speed, *self.numbers) if part)


@dataclass(frozen=True)
class Part:
    """Something that a line may show, and how soon it goes where room is scarce: that with the highest rank first."""

    rank: int
    text: Text
    is_bar: bool = False


def fitting(parts: Sequence[Part], width: int) -> tuple[list[Part], int]:
    """
    The parts that a line of `width` columns has room for, in their order, and how many columns stay free. One that has
    no room takes with it all that are less wanted.
    """
    kept, free = set[int](), width + GAP
    for place in sorted(range(len(parts)), key=lambda place: parts[place].rank):
        size = parts[place].text.cell_len + GAP
        if size > free:
            break
        kept.add(place)
        free -= size
    return [part for place, part in enumerate(parts) if place in kept], free if kept else width


class Live(Progress):
    """A line for each task. What is said of one is its field `told`, a `Told`."""

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

    def _parts(self, task: Task) -> list[Part]:
        told: Told = task.fields["told"]
        numbers = [Part(2 if place == 0 else 7, Text(number)) for place, number in enumerate(told.numbers)]
        return [
            Part(0, Text(f"{task.description:<{NAME}}", style="bold")),
            Part(5, Text(" " * NARROW), is_bar=True),
            *([Part(1, Text(told.done))] if told.done else []),
            *([Part(4, Text(told.speed))] if told.speed else []),
            *numbers,
            Part(6, self._elapsed.render(task)),
            *([Part(3, Text.assemble("left ", self._left.render(task)))] if task.total is not None else []),
        ]
