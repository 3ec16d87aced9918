"""Attempts to get out, to take more than is given, and to stay: all held, in bounded time, with nothing left behind."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.core.errors import HardwareError
from bloomery.evaluation import cell, sandbox
from bloomery.evaluation.sandbox import Limits, Outcome, run

QUICK = Limits(seconds=10.0, cpu_seconds=5)


def holds() -> str:
    if sys.platform != "linux":
        return f"there is no sandbox for {sys.platform}"
    try:
        sandbox.check()
    except HardwareError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(holds()), reason=holds())


def cells() -> set[int]:
    """Processes of ours that run a cell."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"evaluation/cell.py") for word in words):
            found.add(int(place.parent.name))
    return found


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before, mounts = cells(), Path("/proc/self/mounts").read_text()
    yield
    deadline = time.monotonic() + 60
    while cells() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not cells() - before
    assert Path("/proc/self/mounts").read_text() == mounts


def tried(code: str, limits: Limits = QUICK) -> Outcome:
    began = time.monotonic()
    outcome = run(code, limits)
    assert time.monotonic() - began < limits.seconds + 30
    return outcome


def test_code_that_comes_to_its_end_passes_and_what_it_prints_is_kept() -> None:
    outcome = tried("import json, math\nprint(json.dumps([math.pi > 3, 'ü']), flush=True)")
    assert (outcome.status, outcome.output) == ("passed", '[true, "\\u00fc"]\n')


@pytest.mark.parametrize("code", ["assert 1 == 2", "raise SystemExit(0)", "import os; os._exit(0)", "def", "1 / 0"])
def test_code_that_fails_or_ends_before_its_tests_does_not_pass(code: str) -> None:
    assert tried(code).status == "failed"


FORKED = """
import os, time
if os.fork():
    time.sleep(0.3)
    os._exit(0)
"""
SAYS_ALL_IT_CAN = """
import os
for number in range(3, 64):
    for word in (b'+', b'refused', bytes(16)):
        try: os.write(number, word)
        except OSError: pass
os._exit({})
"""


@pytest.mark.parametrize(
    "code",
    [
        *(f"import sys; sys.exit({code})" for code in (cell.REFUSED, cell.PASSED, 200)),
        *(f"import os; os._exit({code})" for code in (cell.REFUSED, cell.PASSED)),
        *(f"import os; os.execv('/bin/sh', ['sh', '-c', 'exit {code}'])" for code in (cell.REFUSED, cell.PASSED)),
        *(SAYS_ALL_IT_CAN.format(code) for code in (0, cell.REFUSED, cell.PASSED)),
        FORKED,
    ],
)
def test_no_exit_of_the_code_is_taken_for_a_word_of_the_cell(code: str) -> None:
    assert tried(f"{code}\nassert 1 == 2").status == "failed"
    assert tried(code).status == "failed"


def test_code_passes_that_takes_the_ways_to_harm_out_of_os() -> None:
    assert tried("import os\nfor name in ('_exit', 'write', 'getpid', 'fork'): setattr(os, name, None)").passed


def test_code_that_no_file_can_hold_fails() -> None:
    outcome = tried("print('\ud800')")
    assert (outcome.status, outcome.output[:31]) == ("failed", "character 7 of the program is h")


def test_an_endless_loop_ends_with_its_time_also_where_it_ignores_signals() -> None:
    stubborn = "import signal\nfor one in (2, 15, 24): signal.signal(one, signal.SIG_IGN)\nwhile True: pass"
    outcome = tried(stubborn, Limits(seconds=1.0, cpu_seconds=20))
    assert outcome.status == "timeout"
    assert outcome.seconds < 15
    assert tried("while True: pass", Limits(seconds=60.0, cpu_seconds=1)).status == "killed"
    assert tried("import time; time.sleep(60)", Limits(seconds=0.5)).status == "timeout"


def test_a_fork_bomb_has_few_processes_and_none_of_them_stays() -> None:
    bomb = """
import os, time
made = 0
for number in range(500):
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
    except OSError:
        break
    made += 1
print(made)
"""
    outcome = tried(bomb)
    assert outcome.passed
    assert int(outcome.output) < Limits().processes
    assert (
        tried("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", Limits(seconds=1.0)).status
        == "timeout"
    )


def test_memory_is_limited_for_values_files_and_folders() -> None:
    assert "MemoryError" in tried("x = bytearray(2**30)").output
    assert "MemoryError" in tried("x = []\nwhile True: x.append('y' * 2**20)").output
    filled = """
import errno
try:
    for number in range(100):
        with open(f'/work/{number}', 'wb') as file:
            file.write(bytes(2**20))
except OSError as error:
    print(errno.errorcode[error.errno], number)
"""
    name, number = tried(filled).output.split()
    assert name == "ENOSPC"
    assert int(number) <= 32
    large = tried("import signal\nsignal.signal(25, signal.SIG_IGN)\nopen('a', 'wb').write(bytes(2**25))")
    assert "File too large" in large.output


def test_a_flood_of_output_ends_the_program_and_is_cut() -> None:
    outcome = tried("while True: print('x' * 10000)", Limits(seconds=60.0))
    assert outcome.status == "output"
    assert len(outcome.output) == Limits().output_bytes
    assert outcome.seconds < 50


def test_secrets_of_the_environment_of_homes_and_of_other_processes_are_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    (tmp_path / "secret.txt").write_text("hunter2")
    code = f"""
import os
seen = [str(dict(os.environ))]
for name in os.listdir('/proc'):
    if name.isdigit():
        for what in ('environ', 'cmdline', 'maps'):
            try: seen.append(open(f'/proc/{{name}}/{{what}}').read())
            except OSError: pass
for top in ({str(tmp_path)!r}, {str(Path.home())!r}, '/etc', '/tmp', '/var', '/run', '/home', '/sys', '/proc/1/root'):
    for folder, _, files in os.walk(top):
        if 'versions' in folder or 'python' in folder: continue
        for file in files:
            try: seen.append(folder + '/' + file + open(f'{{folder}}/{{file}}').read())
            except (OSError, UnicodeDecodeError): pass
text = ''.join(seen)
processes = sorted(int(name) for name in os.listdir('/proc') if name.isdigit())
print(len(os.listdir('/work')), 'hunter2' in text, 'passwd' in text, processes)
"""
    outcome = tried(code, Limits(seconds=60.0, cpu_seconds=30))
    assert (outcome.status, outcome.output) == ("passed", "0 False False [1, 2]\n")


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket()",
        "import socket; socket.socketpair()",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1')",
        "open('/usr/lib/written', 'w')",
        "open('/written', 'w')",
        "open('/dev/written', 'w')",
        "open('/proc/sys/kernel/hostname', 'w').write('x')",
        "open('/proc/self/oom_score_adj', 'w').write('-1000')",
        "import os; os.remove('/bin/sh')",
        "import os; os.kill(1, 9); os.setuid(0)",
        "import os; os.mknod('/work/x', 0o60600, 1)",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/work', b'tmpfs', 0, None) == 0",
        "import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0",
        "import ctypes; assert ctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0",
        "import ctypes; assert ctypes.CDLL(None).syscall(435, 0, 0) >= 0",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "import os; os.chroot('/work')",
        "import ctypes; assert ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).semget(0, 1, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
        "import os\nfor name in os.listdir('/proc/1/fd'): os.write(int(name), b'x')",
    ],
)
def test_the_way_out_is_closed(code: str) -> None:
    outcome = tried(code)
    assert not outcome.passed, outcome
    assert outcome.status == "failed"


def test_programs_are_found_and_may_start_but_see_the_same_walls() -> None:
    code = "import subprocess\nprint(subprocess.run(['/bin/sh', '-c', 'id -u; echo x > /usr/y'], capture_output=True))"
    output = tried(code).output
    assert "Read-only file system" in output or "cannot create" in output
    assert "stdout=b'0" not in output


def test_one_program_sees_nothing_of_the_one_before() -> None:
    assert tried("open('/work/left', 'w').write('x')").passed
    assert tried("import os; assert os.listdir('/work') == []").passed


def changed(tmp_path: Path, before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell with one line that is another."""
    text = Path(cell.__file__).read_text()
    assert text.count(before) == 1
    script = tmp_path / "evaluation" / "cell.py"
    script.parent.mkdir()
    script.write_text(text.replace(before, after))
    monkeypatch.setattr(cell, "__file__", str(script))


def test_where_a_wall_cannot_be_had_nothing_runs_unless_weaker_ones_are_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changed(tmp_path, "user = namespaces()", "raise MissingError('namespaces: not here')", monkeypatch)
    with pytest.raises(HardwareError, match=r"was not run: refused: namespaces: not here\n.*--weaker-sandbox"):
        run("print('ran')", QUICK)
    outcome = run("print('ran')", QUICK, weaker=True)
    assert (outcome.status, outcome.output) == ("passed", "ran\n")
    assert "PermissionError" in run("import socket; socket.socket()", QUICK, weaker=True).output
    assert "MemoryError" in run("x = bytearray(2**30)", QUICK, weaker=True).output
    assert run("while True: pass", Limits(seconds=1.0), weaker=True).status == "timeout"


def test_a_user_without_rights_gets_the_same_walls_from_a_user_namespace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not os.stat(os.path.realpath(sys.executable)).st_mode & 1 or not all(
        folder.stat().st_mode & 1 for folder in Path(os.path.realpath(sys.executable)).parents
    ):
        pytest.skip(f"others may not read {os.path.realpath(sys.executable)}")
    changed(tmp_path, "if os.geteuid() == 0 and libc.unshare(wanted) == 0:", "if False:", monkeypatch)
    assert tried("import os; print(os.listdir('/work'), os.access('/root', os.R_OK))").output == "[] False\n"
    for code in (
        "open('/x', 'w')",
        "import socket; socket.socket()",
        "import os; os.setuid(5)",
        "x = bytearray(2**30)",
    ):
        assert tried(code).status == "failed"
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert tried(bomb, Limits(seconds=1.0)).status == "timeout"
