import io
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bloomery.core import log
from bloomery.core.errors import COLUMNS, DataError, RunError
from bloomery.core.log import Metrics, info, kept, progress, read_metrics


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr("bloomery.core.log.time.monotonic", lambda: now[0])
    return now


def test_a_program_gets_a_plain_line_every_few_seconds_and_none_at_the_end(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("shard", "documents", 4000) as meter:
        meter.at(1)
        clock[0] += log.SECONDS_BETWEEN_PLAIN_LINES
        meter.at(1000, loss=2.5)
        meter.at(1001)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "shard: 1,000/4,000 documents, loss 2.50, 100/s, 30 s left\n"


def test_the_work_of_an_earlier_attempt_says_nothing_about_the_speed(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("pretrain", "steps", 300) as meter:
        meter.start_at(100)
        clock[0] += 10
        meter.at(200, tokens_per_second=123_456)
    assert capsys.readouterr().err == "pretrain: 200/300 steps, 123k tok/s, 10 s left\n"


def test_a_terminal_gets_a_live_line_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(log, "console", Console(file=screen, force_terminal=True, width=100))
    with progress("filter", "documents", 10) as meter:
        meter.at(5, total=20, kept=0.25)
    assert "5/20 documents" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


def test_a_live_line_is_made_of_whole_parts_and_a_wider_one_has_those_of_a_narrower_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []
    for width in range(16, 100):
        screen = io.StringIO()
        monkeypatch.setattr(log, "console", Console(file=screen, force_terminal=True, width=width, color_system=None))
        with progress("pretrain", "steps", 300) as meter:
            meter.at(275, tokens_per_second=135_800, loss=0.4938, margin=1.25)
        line = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).rstrip())[-1].rstrip()
        assert len(line) <= min(width, COLUMNS)
        shown.append(re.sub(r"[\d.]+ s left", "time", line)[2:])
    parts = [set(re.split(r" {2,}", re.sub(r"[━╸╺]+", "bar", line))) for line in shown]
    assert all(narrow <= wide for narrow, wide in pairwise(parts))
    assert parts[0] == {"pretrain"}
    assert parts[50 - 16] == {"pretrain", "275/300 steps", "loss 0.494"}
    assert parts[80 - 16] == parts[-1] == {"pretrain", "bar", "275/300 steps", "136k tok/s", "loss 0.494", "time"}


@given(st.floats(-1e12, 1e12) | st.integers(-(10**12), 10**12) | st.sampled_from([math.nan, math.inf, -math.inf]))
def test_every_number_can_be_shown_briefly(value: float) -> None:
    shown = log.short(value)
    assert len(shown) <= 10
    if abs(value) < 999:
        assert float(shown) == pytest.approx(value, rel=0.01)
    if 1e-3 <= abs(value) < 1e12:
        assert "e" not in shown


def test_numbers_are_written_as_people_read_them() -> None:
    numbers = (0, 0.4938, 3.2, 42, 999, 6190, 19_400, 131_009, 4.1e6, 1.24e9)
    shown = ["0", "0.494", "3.20", "42", "999", "6.2k", "19.4k", "131k", "4.1M", "1.2G"]
    assert [log.short(number) for number in numbers] == shown
    assert [log.size(number) for number in (1, 812, 15_657_244, 1.2e9)] == ["1 byte", "812 bytes", "15.7 MB", "1.2 GB"]
    times = ["0.1 s", "0.3 s", "1 s", "59 s", "1 min", "3 min 20 s", "2 h 5 min", "1 day 3 h", "2 days"]
    seconds = (0, 0.3, 0.96, 59.4, 59.6, 200, 7500, 100_000, 2 * 86_400)
    assert [log.duration(each) for each in seconds] == times
    shares = [(0, 5), (5, 5), (78, 100), (24_753, 24_829), (9_999, 10_000), (1, 10_000), (0, 0)]
    assert [log.percent(*share) for share in shares] == ["0 %", "100 %", "78 %", "99.7 %", "> 99.9 %", "< 0.1 %", "0 %"]
    assert (log.counted(1, "copy", "copies"), log.counted(24_829, "document")) == ("1 copy", "24,829 documents")


def test_a_story_hides_details_from_the_terminal_and_not_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verbose in (False, True):
        with log.story(verbose=verbose), kept(tmp_path / "log.txt"):
            info("a detail")
            info("a warning", "yellow")
            log.say("a sentence", mark="✓", name="filter")
        detail = "a detail\n" if verbose else ""
        assert capsys.readouterr().err == f"{detail}a warning\n✓ filter     a sentence\n"
    assert [line[21:] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["a detail", "a warning"] * 2
    info("outside of a story")
    assert capsys.readouterr().err == "outside of a story\n"


def test_a_stage_has_one_live_line_for_all_its_work_and_nothing_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, color_system=None, soft_wrap=True)
    monkeypatch.setattr(log, "console", console)
    with log.stage_line("dedup"):
        log.doing("dry run")
        log._stage_line[-1][0].refresh()
        for work in ("sign", "compare"):
            with progress(work, "parts", 4) as meter:
                meter.at(2, percent=49.6)
                log._stage_line[-1][0].refresh()
    log.say("word " * 30, mark="✓", name="dedup")
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()))]
    assert max(map(len, lines)) <= 60
    assert all(any(f" dedup      {rest}" in line for line in lines) for rest in ("loading", "dry run", "━━━━"))
    assert all(any(f"{work} 2/4 parts  50 %" in line for line in lines) for work in ("sign", "compare"))
    assert [line[:13] for line in lines if "word" in line] == ["✓ dedup      ", *[" " * 13] * 3]


SAID = "from bloomery.core import log; log.say('fine', mark='✓', name='dedup', style='green')"
FOUND = """
from bloomery import cli
from bloomery.hw.doctor import report
from bloomery.hw.doctor.finding import Finding
report.GROUPS = {"Machine": (lambda facts: [Finding(id="python", status="ok", value="fine")],)}
cli.main(["doctor"])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
@pytest.mark.parametrize("program", [SAID, FOUND], ids=["run", "doctor"])
def test_marks_are_colored_on_a_terminal_and_nowhere_else(program: str) -> None:
    def shown(**more: str) -> str:
        leader, follower = os.openpty()
        surroundings = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        surroundings |= {"TERM": "xterm", "COLUMNS": "80"} | more
        with os.fdopen(follower, "wb") as terminal:
            subprocess.run(
                [sys.executable, "-c", program], check=True, stdout=terminal, stderr=terminal, env=surroundings
            )
        try:
            return os.read(leader, 2**16).decode()
        finally:
            os.close(leader)

    assert "\x1b[32m✓" in shown()
    for more in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "✓" in shown(**more)
        assert "\x1b[32m" not in shown(**more)
    piped = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "✓" in piped.stdout + piped.stderr
    assert "\x1b" not in piped.stdout + piped.stderr


def test_metrics_of_lost_work_are_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        for step in (1, 2, 3, 4):
            metrics.write(step=step, loss=1 / step)
        assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]  # while it is still being written
    with Metrics(path, 2) as metrics:
        metrics.write(step=3, loss=7, note="again")
    assert read_metrics(path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 7, "note": "again"},
    ]


def test_a_resume_that_dies_at_once_has_kept_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        metrics.write(step=1)

    def die(value: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bloomery.core.log.json.dumps", die)
        with pytest.raises(KeyboardInterrupt):
            Metrics(path, 1)
    assert read_metrics(path) == [{"step": 1}]


def test_a_torn_last_line_is_not_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "note": "é"}\n{"step": 2, "note": "€"}\n'.encode()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert [line["step"] for line in read_metrics(path)] == [1, 2][: whole[:cut].count(b"\n")]
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("wrong", [b'{"step": 2', b'{"step": "2"}', b'{"loss": 2}', b"[2]", b"\xff", b"\0\0"])
def test_a_wrong_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path, wrong: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + wrong + b'\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: is no"):
        read_metrics(path)
    with pytest.raises(DataError, match=r"(?s)metrics\.jsonl:2: .*Remove the line"):
        Metrics(path, 3)


def test_what_is_said_is_kept_with_its_time_while_the_block_runs(tmp_path: Path) -> None:
    for words in ("first", "second"):
        with kept(tmp_path / "new" / "log.txt"):
            info(words)
        info("not kept")
    lines = (tmp_path / "new" / "log.txt").read_text().splitlines()
    assert [line[21:] for line in lines] == ["first", "second"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line[:21]) for line in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
def test_half_a_surrogate_pair_is_shown_as_its_number_on_the_terminal_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with kept(tmp_path / "log.txt"):
        info("threads \ud800")
    assert capsys.readouterr().err == "threads \\ud800\n"
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith("  threads \\ud800\n")


def test_what_a_full_disk_does_not_keep_is_an_error_with_the_hint() -> None:
    with pytest.raises(RunError, match=r"^/dev/full: cannot be written: No space left.*\nFree some space"):  # noqa: SIM117
        with kept(Path("/dev/full")):
            info("once")


def test_a_number_that_json_cannot_hold_becomes_its_name(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m.jsonl", 0) as metrics:
        metrics.write(step=1, loss=float("inf"), norm=float("nan"), fine=1.5)
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "loss": "inf", "norm": "nan", "fine": 1.5}]
