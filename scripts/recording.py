"""
A terminal recording as an animated picture: docs/images/demo.svg, from a real run of `make demo`.

    python scripts/recording.py record demo.cast -- make demo
    python scripts/recording.py draw demo.cast --command 'make demo' --begin 'bloomery run'

`record` runs a command in a terminal of 80 columns and 20 rows, and writes what it prints with times (asciicast v2).
`draw` also reads recordings of asciinema, and those of `script --log-out FILE --log-timing TIMES` with --timing TIMES.

The picture plays in a browser by CSS alone, also as an image in a page. Who asks for less motion sees the last screen.
No line is shown for longer than --pause seconds before the next one, so that waits are short. The title has the time
that the run really took.
"""

import argparse
import codecs
import fcntl
import html
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 80, 20
CHAR_WIDTH, LINE_HEIGHT, FONT_SIZE = 8.4, 18, 14
MARGIN, TITLE_HEIGHT = 16, 28
"""All in pixels. 20 rows are 406 high and 80 columns 704 wide, which fits into a README without scaling."""
FRAME_SECONDS = 0.08
"""Changes within this time are one frame."""
LINE_SECONDS = 0.1
"""A line that came at once with others stays alone for this long, so that output does not jump."""
TYPE_SECONDS = 0.07
PALETTE = (
    *("#7d8590", "#ff7b72", "#56d364", "#e3b341", "#79c0ff", "#d2a8ff", "#56d4dd", "#d1d7e0"),
    *("#9198a1", "#ffa198", "#7ee787", "#f2cc60", "#a5d6ff", "#e2c5ff", "#85e8ee", "#ffffff"),
)
"""The sixteen colors of a terminal, each with a contrast of 4.5 or more to the background."""

Event = tuple[float, str]
"""Seconds since the start, and output."""
Cell = tuple[str, str]
"""A character and its CSS classes, or a color after them."""

TOKEN = re.compile(
    r"\x1b\[(?P<values>[0-9;:?<=>]*)[ -/]*(?P<name>[@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()#].|\x1b[ -~]"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f\x7f])|(?P<text>[^\x00-\x1f\x7f]+)",
    re.DOTALL,
)
UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[ -/]*|\][^\x07\x1b]*\x1b?|[()#])?$")


@dataclass
class Terminal:
    """What a terminal shows. Lines that have scrolled off the top stay in `lines`."""

    columns: int = COLUMNS
    rows: int = ROWS
    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: dict[str, str] = field(default_factory=dict)
    rest: str = ""
    """The begin of a control sequence whose end has not come yet."""

    @property
    def top(self) -> int:
        """The first line that the cursor can reach."""
        return max(0, len(self.lines) - self.rows)

    @property
    def end(self) -> int:
        """Number of lines up to the last one with text, or with the cursor."""
        return max([self.row, *(number for number in range(self.top, len(self.lines)) if self.lines[number])]) + 1

    def feed(self, text: str) -> None:
        text = self.rest + text
        tail = UNFINISHED.search(text)
        self.rest = tail[0] if tail else ""
        for match in TOKEN.finditer(text[: len(text) - len(self.rest)]):
            if match["text"]:
                for letter in match["text"]:
                    self._put(letter)
            elif match["control"]:
                self._control(match["control"])
            elif match["name"] and not match["values"].startswith(("?", "<", "=", ">")):
                self._sequence(match["name"], [int(number or 0) for number in re.split("[;:]", match["values"])])

    def _put(self, letter: str) -> None:
        if unicodedata.combining(letter):
            return
        width = 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if self.column + width > self.columns:
            self._down()
            self.column = 0
        line, style = self.lines[self.row], " ".join(self.style.values())
        line += [(" ", "")] * (self.column + width - len(line))
        line[self.column : self.column + width] = [(letter, style), ("", style)][:width]
        self.column += width

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def _control(self, code: str) -> None:
        match code:
            case "\n":
                self._down()
            case "\r":
                self.column = 0
            case "\b":
                self.column = max(0, self.column - 1)
            case "\t":
                self.column = min(self.columns - 1, self.column // 8 * 8 + 8)

    def _sequence(self, name: str, values: Sequence[int]) -> None:
        """A control sequence: its final letter, and its numbers."""
        count = max(1, values[0])
        match name:
            case "A" | "F":
                self.row = max(self.top, self.row - count)
            case "B" | "E":
                self.row = min(len(self.lines) - 1, self.row + count)
            case "C":
                self.column = min(self.columns - 1, self.column + count)
            case "D":
                self.column = max(0, self.column - count)
            case "G":
                self.column = min(self.columns, count) - 1
            case "H" | "f":
                self.row = min(self.top + count, len(self.lines)) - 1
                self.column = min(self.columns, max(1, *values[1:2], 1)) - 1
            case "J" | "K":
                self._erase(name, values[0])
            case "m":
                self._color(list(values))
        if name in "EF":
            self.column = 0

    def _erase(self, name: str, which: int) -> None:
        line = self.lines[self.row]
        if which == 1:
            line[: self.column + 1] = [(" ", "")] * min(len(line), self.column + 1)
        else:
            del line[0 if which else self.column :]
        if name == "J":
            first = self.row + 1 if which == 0 else self.top
            for number in range(first, self.row if which == 1 else len(self.lines)):
                self.lines[number] = []

    def _color(self, values: list[int]) -> None:
        while values:
            match values:
                case [38, 5, color, *values]:
                    self.style["color"] = f"c{color}" if color < 16 else _cube(color)
                case [38, 2, red, green, blue, *values]:
                    self.style["color"] = f"#{red:02x}{green:02x}{blue:02x}"
                case [48, 5, _, *values] | [48, 2, _, _, _, *values]:
                    pass
                case [0, *values]:
                    self.style.clear()
                case [1, *values]:
                    self.style["bold"] = "b"
                case [2, *values]:
                    self.style["dim"] = "d"
                case [22, *values]:
                    self.style.pop("bold", None)
                    self.style.pop("dim", None)
                case [39, *values]:
                    self.style.pop("color", None)
                case [color, *values] if 30 <= color <= 37 or 90 <= color <= 97:
                    self.style["color"] = f"c{color - 30 if color < 90 else color - 82}"
                case [_, *values]:
                    pass


def _cube(color: int) -> str:
    """A color of the 256, from 16 on, as #rrggbb."""
    if color >= 232:
        return f"#{8 + 10 * (color - 232):02x}" + f"{8 + 10 * (color - 232):02x}" * 2
    levels = (0, 95, 135, 175, 215, 255)
    return "#" + "".join(f"{levels[(color - 16) // step % 6]:02x}" for step in (36, 6, 1))


# --- Recordings ----------------------------------------------------------------------------------------------------


def record(command: Sequence[str], path: Path) -> int:
    """Run a command in a terminal of its own, show what it prints, and write an asciicast. Returns its exit code."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment, close_fds=True)
    os.close(child)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"version": 2, "width": COLUMNS, "height": ROWS}) + "\n")
        while data := _output(parent):
            text = decoder.decode(data)
            file.write(json.dumps([round(time.monotonic() - began, 3), "o", text]) + "\n")
            sys.stdout.write(text)
            sys.stdout.flush()
    os.close(parent)
    return process.wait()


def _output(terminal: int) -> bytes:
    """The next output of a pseudo-terminal; empty at its end, which Linux reports as an error."""
    try:
        return os.read(terminal, 65_536)
    except OSError:
        return b""


def asciicast(text: str) -> tuple[int, int, list[Event]]:
    """Columns, rows and events of an asciicast of version 2 or 3."""
    header, *lines = (json.loads(line) for line in text.splitlines() if line and not line.startswith("#"))
    size = header.get("term", {})
    columns, rows = header.get("width") or size.get("cols", COLUMNS), header.get("height") or size.get("rows", ROWS)
    events, now = [], 0.0
    for at, kind, data in lines:
        now = now + at if header["version"] == 3 else at
        if kind == "o":
            events.append((now, data))
    return columns, rows, events


def typescript(output: bytes, timing: str) -> tuple[int, int, list[Event]]:
    """Columns, rows and events of a recording of `script`, in its classic or its advanced format."""
    columns, rows = COLUMNS, ROWS
    if output.startswith(b"Script started"):
        header, _, output = output.partition(b"\n")
        columns, rows = (
            int(found[1]) if (found := re.search(rf'{name}="(\d+)"'.encode(), header)) else size
            for name, size in (("COLUMNS", COLUMNS), ("LINES", ROWS))
        )
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    events, now, start = [], 0.0, 0
    for line in timing.splitlines():
        kind, delay, size, *_ = line.split() if line[:1].isalpha() else ["O", *line.split()]
        if kind not in "OI":
            continue
        now += float(delay)
        if kind == "O":
            events.append((now, decoder.decode(output[start : start + int(size)])))
            start += int(size)
    return columns, rows, events


# --- Frames --------------------------------------------------------------------------------------------------------


@dataclass
class Frame:
    seconds: float
    end: int
    """Number of lines that are there."""
    changed: dict[int, tuple[Cell, ...]]
    """Lines that are not as in the frame before."""


def frames(events: Iterable[Event], terminal: Terminal, begin: str = "") -> list[Frame]:
    """Frames in the time of the recording, from the first line on that matches `begin`, which becomes line 0."""
    result: list[Frame] = []
    shown: dict[int, tuple[Cell, ...]] = {}
    first = None if begin else 0
    for seconds, text in events:
        terminal.feed(text)
        if first is None:
            texts = ("".join(letter for letter, _ in line) for line in terminal.lines)
            first = next((number for number, line in enumerate(texts) if re.search(begin, line)), None)
        if first is None:
            continue
        now = {
            number - first: tuple(terminal.lines[number]) for number in range(max(first, terminal.top), terminal.end)
        }
        gone: dict[int, tuple[Cell, ...]] = {number: () for number in shown if number >= terminal.end - first}
        changed = {number: line for number, line in {**now, **gone}.items() if shown.get(number, ()) != line}
        shown |= changed
        result.append(Frame(seconds, terminal.end - first, changed))
    if first is None:
        raise SystemExit(f"no line matches --begin {begin!r}")
    return result


def shortened(recorded: Sequence[Frame], pause: float, start: float = 0.0) -> list[Frame]:
    """The same frames, in the time of the picture: between two new lines at most `pause` seconds pass."""
    stretches: list[list[Frame]] = []
    most = 0
    for frame in recorded:
        if frame.end > most or not stretches:
            stretches.append([])
        most = max(most, frame.end)
        stretches[-1].append(frame)
    result: list[Frame] = []
    for number, stretch in enumerate(stretches):
        began = stretch[0].seconds
        ended = stretches[number + 1][0].seconds if number + 1 < len(stretches) else stretch[-1].seconds
        length = max(min(ended - began, pause), LINE_SECONDS)
        for frame in stretch:
            share = (frame.seconds - began) / (ended - began) if ended > began else 0.0
            at = round((start + share * length) / FRAME_SECONDS) * FRAME_SECONDS
            if result and result[-1].seconds == at:
                result[-1] = Frame(at, frame.end, result[-1].changed | frame.changed)
            else:
                result.append(Frame(at, frame.end, frame.changed))
        start += length
    return result


def typed(command: str) -> list[Frame]:
    """Frames in which a command is typed at a prompt, on line 0."""
    prompt = [("$", "c2"), (" ", "")]
    letters = [(letter, "b") for letter in command]
    return [
        Frame(0.4 * bool(count) + count * TYPE_SECONDS, 1, {0: (*prompt, *letters[:count])})
        for count in range(len(command) + 1)
    ]


# --- The picture ---------------------------------------------------------------------------------------------------


def picture(shots: Sequence[Frame], *, columns: int, rows: int, title: str, hold: float) -> str:
    """An SVG that shows the frames one after the other, the last for `hold` seconds, and begins again."""
    total = shots[-1].seconds + hold
    width = round(columns * CHAR_WIDTH + 2 * MARGIN)
    height = TITLE_HEIGHT + rows * LINE_HEIGHT + MARGIN + 2
    histories: dict[int, list[tuple[float, tuple[Cell, ...]]]] = {}
    scrolls: list[tuple[float, int]] = [(0.0, 0)]
    for shot in shots:
        for number, line in shot.changed.items():
            histories.setdefault(number, []).append((shot.seconds, line))
        if (scroll := max(0, shot.end - rows)) != scrolls[-1][1]:
            scrolls.append((shot.seconds, scroll))
    keyframes: dict[tuple[str, str], str] = {}
    body: list[str] = []
    for number, history in sorted(histories.items()):
        for (since, line), (until, _) in zip(history, [*history[1:], (total, ())], strict=True):
            if any(letter.strip() for letter, _ in line):
                times = (percent(since, total), percent(until, total))
                name = keyframes.setdefault(times, f"k{len(keyframes)}")
                shown = "a" if until == total else "a h"
                body.append(f'<g class="{shown}" style="animation-name:{name}">{row(line, number)}</g>')
    rules = [
        f"@keyframes {name}{{{'0%{visibility:hidden}' if since != '0%' else ''}{since}{{visibility:visible}}"
        f"{'' if until == '100%' else f'{until}{{visibility:hidden}}'}}}"
        for (since, until), name in keyframes.items()
    ]
    steps = "".join(f"{percent(at, total)}{{transform:translateY(-{n * LINE_HEIGHT}px)}}" for at, n in scrolls)
    colors = "".join(f".c{number}{{fill:{color}}}" for number, color in enumerate(PALETTE))
    dots = "".join(f'<circle cx="{20 + 16 * number}" cy="15" r="5" fill="#3d444d"/>' for number in range(3))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(title)}">
<title>{html.escape(title)}</title>
<style>
text{{font:{FONT_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#d1d7e0;\
white-space:pre}}
{colors}.b{{font-weight:bold}}.d{{opacity:.75}}.h{{visibility:hidden}}
.a{{animation:{total:.2f}s step-end infinite}}
@media(prefers-reduced-motion:reduce){{.a{{animation:none}}}}
@keyframes s{{{steps}}}
{"".join(rules)}
</style>
<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="#151b23" stroke="#3d444d"/>
{dots}<text x="{width / 2:g}" y="20" text-anchor="middle" class="c8">{html.escape(title)}</text>
<svg x="{MARGIN}" y="{TITLE_HEIGHT}" width="{columns * CHAR_WIDTH:g}" height="{rows * LINE_HEIGHT + 4}">
<g class="a" style="animation-name:s;transform:translateY(-{scrolls[-1][1] * LINE_HEIGHT}px)">
{chr(10).join(body)}
</g></svg></svg>
"""


def percent(seconds: float, total: float) -> str:
    return f"{100 * seconds / total:.3f}".rstrip("0").rstrip(".") + "%"


def row(line: Sequence[Cell], number: int) -> str:
    """A line as text elements, one for each run of equal style, each as wide as its characters."""
    parts = []
    column = 0
    for style, cells in groupby(line, key=lambda cell: cell[1]):
        letters = [letter for letter, _ in cells]
        text = "".join(letters)
        if text.strip():
            lead = len(text) - len(text.lstrip())
            size = len(letters) - lead - (len(text) - len(text.rstrip()))
            names = " ".join(name for name in style.split() if not name.startswith("#"))
            css = f' class="{names}"' if names else ""
            css += "".join(f' style="fill:{name}"' for name in style.split() if name.startswith("#"))
            parts.append(
                f'<text x="{(column + lead) * CHAR_WIDTH:g}" y="{number * LINE_HEIGHT + FONT_SIZE}" '
                f'textLength="{size * CHAR_WIDTH:g}" lengthAdjust="spacingAndGlyphs"{css}>'
                f"{html.escape(text.strip(), quote=False)}</text>"
            )
        column += len(letters)
    return "".join(parts)


def took(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def draw(options: argparse.Namespace) -> str:
    """The picture of a recording."""
    columns, rows, events = (
        typescript(options.recording.read_bytes(), options.timing.read_text())
        if options.timing
        else asciicast(options.recording.read_text(encoding="utf-8"))
    )
    recorded = frames(events, Terminal(columns, rows), options.begin)
    shots: list[Frame] = []
    if options.command:
        shots = typed(options.command)
        recorded = [
            Frame(shot.seconds, shot.end + 1, {number + 1: line for number, line in shot.changed.items()})
            for shot in recorded
        ]
    shots += shortened(recorded, options.pause, shots[-1].seconds + 0.5 if shots else 0.0)
    real = took(recorded[-1].seconds - recorded[0].seconds)
    title = f"{options.command or options.recording.stem} · {real}, shown in {took(shots[-1].seconds)}"
    return picture(shots, columns=columns, rows=options.rows, title=title, hold=options.hold)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    verb = verbs.add_parser("record", help="run a command and write what it prints, with times")
    verb.add_argument("recording", type=Path, help="the file to write")
    verb.add_argument("command", nargs="+", help="after --, the command and its arguments")
    verb = verbs.add_parser("draw", help="write the animated picture of a recording")
    verb.add_argument("recording", type=Path, help="an asciicast, or the output that script logged")
    verb.add_argument("--timing", type=Path, help="the times that script logged")
    verb.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "demo.svg")
    verb.add_argument("--command", default="", help="show this command at a prompt before the output")
    verb.add_argument("--begin", default="", metavar="REGEX", help="leave out what comes before the first such line")
    verb.add_argument("--rows", type=int, default=ROWS, help=f"visible rows (default: {ROWS})")
    verb.add_argument(
        "--pause", type=float, default=2.0, help="longest wait between two lines, in seconds (default: 2)"
    )
    verb.add_argument("--hold", type=float, default=5.0, help="how long the last screen stays (default: 5 seconds)")
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed()
    if options.verb == "record":
        return record(options.command, options.recording)
    svg = draw(options)
    options.out.write_text(svg, encoding="utf-8")
    print(f"{options.out}: {len(svg) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
