"""scripts/recording.py shows what a terminal showed, waits less, and writes a picture that plays by itself."""

import json
import re
import runpy
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

RECORDING: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "recording.py"))
SVG = "{http://www.w3.org/2000/svg}"


def screen(*chunks: str, columns: int = 20, rows: int = 4) -> list[str]:
    terminal = RECORDING["Terminal"](columns, rows)
    for chunk in chunks:
        terminal.feed(chunk)
    return ["".join(letter for letter, _ in line).rstrip() for line in terminal.lines]


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        ("a\r\nb", ["a", "b"]),
        ("abc\rx", ["xbc"]),
        ("abc\r\x1b[2Kx", ["x"]),
        ("a\r\nb\x1b[1A\x1b[2K\rc", ["c", "b"]),
        ("a\x1b[5Gb\x1b[3Dc", ["a c b"]),
        ("a\r\nb\r\nc\x1b[2A\x1b[J", ["a", "", ""]),
        ("a\tb\x08c", ["a       c"]),
        ("x" * 25, ["x" * 20, "x" * 5]),
        ("\x1b]8;;file:///a\x1b\\a\x1b]8;;\x07 link\x1b[?25l", ["a link"]),
        ("1\r\n2\r\n3\r\n4\r\n5\x1b[9A\rx", ["1", "x", "3", "4", "5"]),
        ("1\r\n2\x1b[1;1Hx\x1b[2;3Hy", ["x", "2 y"]),
        ("語b", ["語b"]),
    ],
)
def test_a_screen_is_what_a_terminal_shows_however_its_output_is_split(output: str, lines: list[str]) -> None:
    assert screen(output) == lines
    assert screen(*output) == lines


def test_colors_are_kept() -> None:
    terminal = RECORDING["Terminal"]()
    terminal.feed("\x1b[1;32ma\x1b[0mb\x1b[38;5;196mc\x1b[38;2;1;2;3md\x1b[39me\x1b[96mf")
    assert [style for _, style in terminal.lines[0]] == ["b c2", "", "#ff0000", "#010203", "", "c14"]


def cast(path: Path, events: list[tuple[float, str]]) -> Path:
    header = {"version": 2, "width": 80, "height": 20}
    path.write_text("\n".join(json.dumps(line) for line in (header, *([at, "o", text] for at, text in events))))
    return path


def drawn(*arguments: str) -> str:
    svg: str = RECORDING["draw"](RECORDING["parsed"](["draw", *arguments]))
    return svg


def test_a_picture_has_every_line_scrolls_and_needs_no_script(tmp_path: Path) -> None:
    events = [(number * 10.0, f"line <{number}>\r\n") for number in range(30)]
    svg = drawn(str(cast(tmp_path / "demo.cast", events)), "--command", "make demo", "--pause", "1")
    tree = xml.etree.ElementTree.fromstring(svg)
    texts = ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]
    assert [text for text in texts if text.startswith("line")] == [f"line <{number}>" for number in range(30)]
    assert "make demo · 4 min 50 s, shown in 31 s" in texts
    assert int(tree.attrib["height"]) <= 410
    assert not any(word in svg for word in ("<script", "https:", "@import", "url(", "href"))
    assert "prefers-reduced-motion" in svg
    assert re.findall(r"translateY\(-(\d+)px\)", svg)[-1] == str(12 * RECORDING["LINE_HEIGHT"])


def test_waits_are_shortened_and_the_order_stays() -> None:
    events = [(0.0, "a\r\n"), *((1 + n / 10, f"\r{n}%") for n in range(600)), (100.0, "\r\nb\r\n"), (100.01, "c\r\n")]
    recorded = RECORDING["frames"](events, RECORDING["Terminal"]())
    shots = RECORDING["shortened"](recorded, 2.0)
    assert shots[-1].seconds < 4.5
    assert len(shots) < 80
    assert [shot.seconds for shot in shots] == sorted({shot.seconds for shot in shots})
    lines: dict[int, Any] = {}
    for shot in shots:
        lines |= shot.changed
    assert ["".join(letter for letter, _ in lines[number]) for number in range(4)] == ["a", "599%", "b", "c"]


def test_what_comes_before_the_first_line_is_left_out(tmp_path: Path) -> None:
    path = cast(tmp_path / "demo.cast", [(0.0, "pip\r\n"), (5.0, "run it\r\n"), (6.0, "done\r\n")])
    assert "pip" not in drawn(str(path), "--begin", "^run")
    with pytest.raises(SystemExit, match="no line matches"):
        drawn(str(path), "--begin", "nothing")


@pytest.mark.parametrize("timing", ["0.5 5\n9 6\n", "H 0 TERM x\nO 0.5 5\nI 1 1\nO 8 6\n"])
def test_recordings_of_script_are_read_in_both_formats(timing: str) -> None:
    output = b'Script started on 2026-11-25 [COLUMNS="100" LINES="30"]\na\xc3\xa9\r\nbcd \r\n'
    assert RECORDING["typescript"](output, timing) == (100, 30, [(0.5, "aé\r\n"), (9.5, "bcd \r\n")])


def test_a_command_is_recorded_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import shutil, sys; print(shutil.get_terminal_size(), sys.stdout.isatty()); sys.exit(3)"
    assert RECORDING["record"]([sys.executable, "-c", program], tmp_path / "a.cast") == 3
    columns, rows, events = RECORDING["asciicast"]((tmp_path / "a.cast").read_text())
    said = "os.terminal_size(columns=80, lines=20) True\r\n"
    assert (columns, rows, "".join(text for _, text in events)) == (80, 20, said)
    assert capsys.readouterr().out == said
