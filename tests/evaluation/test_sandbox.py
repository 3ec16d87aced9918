"""Attempts to get out, to take more than is given, and to stay: all held, in bounded time, with nothing left behind."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.core.errors import HardwareError
from bloomery.evaluation import sandbox, sandbox_child, tasks
from bloomery.evaluation.sandbox import SandboxLimits, SandboxResult, run
from tests.evaluation import sets

QUICK = SandboxLimits(seconds=10.0, cpu_seconds=5)


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
    """Processes that run a cell of this copy of the source."""
    child = os.fsencode(Path(sandbox.__file__).with_name("sandbox_child.py"))
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if child in words:
            found.add(int(place.parent.name))
    return found


def mounts() -> list[str]:
    """What is mounted here, less the folders that tests of other files mount meanwhile."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if not line.startswith("bloomery-test ")]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before, mounted = cells(), mounts()
    yield
    deadline = time.monotonic() + 60
    while cells() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not cells() - before
    assert mounts() == mounted


def tried(code: str, limits: SandboxLimits = QUICK, tests: str = "") -> SandboxResult:
    began = time.monotonic()
    outcome = run(code, tests, limits)
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
        *(f"import sys; sys.exit({code})" for code in (sandbox_child.REFUSED, sandbox_child.PASSED, 200)),
        *(f"import os; os._exit({code})" for code in (sandbox_child.REFUSED, sandbox_child.PASSED)),
        *(
            f"import os; os.execv('/bin/sh', ['sh', '-c', 'exit {code}'])"
            for code in (sandbox_child.REFUSED, sandbox_child.PASSED)
        ),
        *(SAYS_ALL_IT_CAN.format(code) for code in (0, sandbox_child.REFUSED, sandbox_child.PASSED)),
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


@pytest.mark.slow
def test_an_endless_loop_ends_with_its_time_also_where_it_ignores_signals() -> None:
    stubborn = "import signal\nfor one in (2, 15, 24): signal.signal(one, signal.SIG_IGN)\nwhile True: pass"
    outcome = tried(stubborn, SandboxLimits(seconds=1.0, cpu_seconds=20))
    assert outcome.status == "timeout"
    assert outcome.seconds < 15
    assert tried("while True: pass", SandboxLimits(seconds=60.0, cpu_seconds=1)).status == "killed"
    assert tried("import time; time.sleep(60)", SandboxLimits(seconds=0.5)).status == "timeout"


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
    assert int(outcome.output) < SandboxLimits().processes
    assert (
        tried("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", SandboxLimits(seconds=1.0)).status
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
    outcome = tried("while True: print('x' * 10000)", SandboxLimits(seconds=60.0))
    assert outcome.status == "output"
    assert len(outcome.output) == SandboxLimits().output_bytes
    assert outcome.seconds < 50


@pytest.mark.slow
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
    outcome = tried(code, SandboxLimits(seconds=60.0, cpu_seconds=30))
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
        "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
        "import resource; resource.prlimit(1, resource.RLIMIT_CPU)",
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
    text = Path(sandbox_child.__file__).read_text()
    assert text.count(before) == 1
    script = tmp_path / "evaluation" / "cell.py"
    script.parent.mkdir()
    script.write_text(text.replace(before, after))
    monkeypatch.setattr(sandbox_child, "__file__", str(script))


def test_where_a_wall_cannot_be_had_nothing_runs_unless_weaker_ones_are_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changed(tmp_path, "user = namespaces()", "raise MissingError('namespaces: not here')", monkeypatch)
    with pytest.raises(HardwareError, match=r"was not run: refused: namespaces: not here\n.*--allow-partial-sandbox"):
        run("print('ran')", "", QUICK)
    outcome = run("print('ran')", "", QUICK, weaker=True)
    assert (outcome.status, outcome.output) == ("passed", "ran\n")
    assert "PermissionError" in run("import socket; socket.socket()", "", QUICK, weaker=True).output
    assert "MemoryError" in run("x = bytearray(2**30)", "", QUICK, weaker=True).output
    assert run("while True: pass", "", SandboxLimits(seconds=1.0), weaker=True).status == "timeout"


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
    assert tried("import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(0, 15)").passed
    assert not tried(f"{FORGE}{ATTACKS['descriptors']}\ndef f(x): attack()", tests="assert f(41) == 42").passed
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert tried(bomb, SandboxLimits(seconds=1.0)).status == "timeout"


FORGE = """
import gc, json, os, sys
def frame(message):
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, 'big') + data
MESSAGES = [['ready'], ['refuse', 'x'], ['return', 1, [], None, None], ['return', 1, [], True, None],
            ['raise', 1, [], ['list', 'SystemExit'], ['list', 97]], ['raise', 1, [], ['list', 'SystemExit'], ['list']],
            ['call', 1, '__call__', ['list', ['class', 'object']], ['dict']], ['passed'], []]
"""
ATTACKS = {
    "frames": """
def attack():
    frame_ = sys._getframe()
    while frame_:
        for space in (frame_.f_locals, frame_.f_globals):
            for value in list(space.values()):
                if hasattr(value, 'exchange') and not isinstance(value, type):
                    for message in MESSAGES: value.send(message)
        frame_ = frame_.f_back
""",
    "objects": """
def attack():
    for value in gc.get_objects():
        if type(value).__name__ in ('Solution', 'Peer', 'Tests') and not isinstance(value, type):
            value.num_calls = 0
            for message in MESSAGES: value.send(message)
""",
    "descriptors": """
def attack():
    for number in range(3, 64):
        for message in MESSAGES:
            try: os.write(number, frame(message))
            except OSError: pass
""",
    "descriptors of the parent": """
def attack():
    for process in (1, os.getppid(), 'self', 'thread-self'):
        for number in range(64):
            try:
                with open(f'/proc/{process}/fd/{number}', 'wb', buffering=0) as file: file.write(frame(['ready']))
            except OSError: pass
""",
    "exit": "def attack(): os._exit(97)",
    "exit in C": "import ctypes\ndef attack(): ctypes.CDLL(None)._exit(97)",
    "system exit": "def attack(): raise SystemExit(97)",
    "interrupt": "def attack(): raise KeyboardInterrupt",
    "kill": """
import signal
def attack():
    for process in (1, os.getppid(), -1, 0):
        for number in (2, 10, 12, 15, 17, 19, 9):
            if process == 0 and number in (10, 12, 15, 19, 9): continue
            if process == 0: signal.signal(number, signal.SIG_IGN)
            try: os.kill(process, number)
            except OSError: pass
""",
    "limits of the parent": """
import resource
def attack():
    names = ("CPU", "NOFILE", "AS", "DATA", "STACK")
    for limit in (getattr(resource, f"RLIMIT_{name}") for name in names):
        resource.prlimit(1, limit, (0, 0))
""",
    "builtins": """
import builtins
def attack():
    for name in ('AssertionError', 'Exception', 'BaseException', 'len', 'isinstance', 'abs', 'all'):
        setattr(builtins, name, lambda *_: True)
    for name in list(sys.modules):
        if name != 'builtins': sys.modules[name] = None
""",
    "at exit": """
import atexit
class Late:
    def __del__(self): os._exit(97)
late = Late()
atexit.register(os._exit, 97)
def attack():
    global late
    late = None
""",
    "trace": """
import threading
def trace(*_):
    for message in MESSAGES: os.write(1, frame(message))
    return trace
def attack():
    sys.settrace(trace); sys.setprofile(trace); threading.settrace(trace)
""",
    "signals": """
import signal
def attack():
    signal.signal(signal.SIGALRM, lambda *_: os._exit(97))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.pause()
""",
    "threads": """
import threading, time
def write():
    for _ in range(100):
        for number in range(3, 8):
            try: os.write(number, frame(['return', 1, [], True, None]))
            except OSError: pass
        time.sleep(0.001)
def attack(): threading.Thread(target=write, daemon=True).start()
""",
    "fork": """
def attack():
    if os.fork(): os._exit(0)
""",
    "answers in advance": """
def attack():
    for number in range(3, 8):
        for answered in range(50):
            try: os.write(number, frame(['return', answered, [], True, None]))
            except OSError: pass
""",
    "half a message": """
def attack():
    for number in range(3, 8):
        try: os.write(number, bytes([0, 0, 255, 0]))
        except OSError: pass
""",
    "a message without end": """
def attack():
    for number in range(3, 8):
        try:
            while True: os.write(number, bytes([255]) * 4096)
        except OSError: pass
""",
    "bytes that are no message": """
def attack():
    for number in range(3, 8):
        for data in (b'{}', b'[[[', b'[' * 5000, b'[' * 5000 + b']' * 5000, b'nul', b'\\xff', b'', b'7', b'1' * 5000):
            try: os.write(number, len(data).to_bytes(4, 'big') + data)
            except OSError: pass
""",
    "close everything": "def attack(): os.closerange(3, 64)",
    "another program": "def attack(): os.execv('/bin/sh', ['sh', '-c', 'exit 97'])",
}


@pytest.mark.slow
@pytest.mark.parametrize("when", ["as it is loaded", "as it is called"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_solution_ends_its_tests(attack: str, when: str) -> None:
    called = "attack()" if when == "as it is called" else "pass"
    loaded = "attack()" if when == "as it is loaded" else "pass"
    code = f"{FORGE}{ATTACKS[attack]}\ndef f(x):\n    {called}\n    return 0\n{loaded}\n"
    assert not tried(code, SandboxLimits(seconds=1.0), "assert f(41) == 42").passed


def test_a_solution_cannot_end_trace_or_read_the_process_of_its_tests() -> None:
    code = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
def f():
    done = [request for request in (16, 0x4206) if libc.ptrace(request, 1, 0, 0) != -1]
    if libc.process_vm_readv(1, 0, 0, 0, 0, 0) != -1: done.append('process_vm_readv')
    for name in ('mem', 'environ', 'maps', 'syscall', 'stack', 'fd/0', 'fd/3', 'fd/4', 'fd/5'):
        try: open(f'/proc/1/{name}', 'rb').read(1)
        except OSError: continue
        done.append(name)
    for process in (1, os.getppid(), -1):
        for number in (2, 10, 12, 15, 17, 19, 9):
            try: os.kill(process, number)
            except ProcessLookupError: pass  # there is nobody else
    return done
"""
    outcome = tried(code, tests="assert f() == []")
    assert outcome.passed, outcome.output


EQUAL = """
class Equal:
    {names}
class Whole(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
    __sub__ = __rsub__ = __abs__ = lambda *_: 0
class Text(str):
    __eq__ = __contains__ = startswith = lambda *_: True
    __hash__ = str.__hash__
class Many(list):
    __eq__ = __contains__ = lambda *_: True
class Fields(dict):
    __eq__ = __contains__ = lambda *_: True
class Liar:
    __class__ = int
    __eq__ = lambda *_: True
""".format(
    names="; ".join(
        f"__{name}__ = lambda *_: True"
        for name in ("eq", "lt", "le", "gt", "ge", "contains", "add", "sub", "rsub", "mul", "abs", "and", "or", "hash")
    )
)
UNTRUE = [
    "f() == 42",
    "42 == f()",
    "not f() != 42",
    "f() == 'a'",
    "f() == [1]",
    "f() == {'a': 1}",
    "f() in (1, 2)",
    "5 in f()",
    "abs(f() - 42.5) < 0.1",
    "abs(42.5 - f()) < 0.1",
    "f() > 5",
    "{f(): 1} == {42: 1}",
    "isinstance(f(), (int, str, list, dict)) and f()",
]


@pytest.mark.parametrize("value", ["Equal()", "Whole(0)", "Text('')", "Many()", "Fields()", "Liar()", "Equal"])
def test_an_object_that_equals_everything_equals_no_expected_value(value: str) -> None:
    tests = f"""
for condition in {UNTRUE!r}:
    try: holds = eval(condition)
    except TypeError: continue
    assert not holds, condition
"""
    outcome = tried(f"{EQUAL}\ndef f(): return {value}", tests=tests)
    assert outcome.passed, outcome.output


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = []\nfor _ in range(5000): x = [x]\ndef f(): return x", "nested too deeply"),
        ("def f(): return 'x' * 2**24", "at most 8388608 can cross"),
        ("import sys\ndef f(): return sys", "the module sys"),
        ("import os, sys\ndef f(): os._exit(0)", "the solution ended before the tests did"),
        ("import os, threading\ndef f(): threading.Timer(0.05, os._exit, [0]).start()", "the solution ended before"),
    ],
)
def test_what_cannot_cross_fails_with_its_reason_and_no_except_of_the_tests_sees_it(code: str, reason: str) -> None:
    again = "while True:\n        print('.', end='')\n        time.sleep(0.01)"  # less than the output that is allowed
    outcome = tried(code, tests=f"import time\ntry:\n    f()\n    {again}\nexcept BaseException: pass")
    assert (outcome.status, reason in outcome.output) == ("failed", True), outcome
    outcome = tried("def f(x): pass", tests="class Own: pass\ntry: f(Own())\nexcept BaseException: pass")
    assert (outcome.status, outcome.output) == ("failed", "failed: unsupported value: an object of the class Own\n")


@pytest.mark.slow
def test_an_answer_without_end_is_stopped() -> None:
    for test in ("list(f())", "for _ in f(): pass", "f()()()"):
        assert not tried("def f():\n    while True: yield 1", SandboxLimits(seconds=1.0), test).passed
    assert tried("def f():\n    while True: pass", SandboxLimits(seconds=1.0), "f()").status == "timeout"


def test_names_of_the_solution_never_stand_for_builtins_of_the_tests() -> None:
    code = "abs = len = sorted = AssertionError = isinstance = print = lambda *_, **__: True\ndef f(x): return x"
    assert tried(code, tests="assert abs(f(-3)) == 3 and len('ab') == 2 and sorted([2, 1]) == [1, 2]").passed
    assert tried(code, tests="assert f(1) == 2").status == "failed"


def test_a_solution_cannot_read_its_tests() -> None:
    code = """
import gc, sys
def texts():
    seen, todo = set(), [*gc.get_objects(), sys._getframe()]
    while todo:
        value = todo.pop()
        if id(value) in seen: continue
        seen.add(id(value))
        if isinstance(value, (str, bytes)): yield value if isinstance(value, str) else value.decode('latin-1')
        todo += gc.get_referents(value)
        if isinstance(value, type(sys._getframe())): todo += [value.f_back, value.f_locals]
def f(): return any('xyz'[::-1] + 'zyx'[::-1] in text for text in texts() if len(text) < 10**6)
"""
    assert tried(code, SandboxLimits(seconds=60.0, cpu_seconds=30), "assert f() is False  # zyxxyz").passed


PLAIN = """
import math, string
from typing import List
LIMIT = 7
class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
    def __hash__(self): return hash(self.x)
    def double(self): return Point(self.x * 2)
class Odd(ValueError): pass
def same(*args, **kwargs): return args[0] if args else kwargs
def sort(values): values.sort(); return values
def grow(grid): grid[0].append(5); grid.append([6]); return grid[0]
def count(n):
    for i in range(n): yield i
def fail(kind):
    raise {'odd': Odd('no', 1), 'key': KeyError('k'), 'os': OSError(2, 'x')}[kind]
def apply(function, *values): return [function(one) for one in values]
def adder(n): return lambda x: x + n
def put(mapping): mapping['b'] = {1}; mapping.pop('a'); return len(mapping)
def again(items): return items[0] is items[1]
"""


@pytest.mark.parametrize(
    "test",
    [
        "for v in (None, True, 0, -1, 2**63, -2**80, 0.1, -0.0, 1e308, float('inf'), 2+3j, 'ü\\ud800\\0', b'\\xff',\n"
        "    [], (), {1: [2]}, {1, 'a'}, frozenset({(1,)}), range(0, 9, 2), bytearray(b'x'), {(1, 2): None},\n"
        "    [[1], (2, [3])]):\n    assert same(v) == v and type(same(v)) is type(v), v",
        "assert same(float('nan')) != same(float('nan')) and repr(same(-0.0)) == '-0.0'",
        "assert same(a=1, b=[2]) == {'a': 1, 'b': [2]}",
        "v = [3, 1, 2]\nassert sort(v) is v and v == [1, 2, 3]",
        "inner = [1]; grid = [inner, [2]]\nassert grow(grid) is inner and grid == [[1, 5], [2], [6]]",
        "m = {'a': 1}\nassert put(m) == 1 and m == {'b': {1}}",
        "row = [0]\nassert again([row, row]) and not again([row, [0]])",
        "loop = []; loop.append(loop)\nassert same(loop) is loop",
        "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6 and next(iter(count(1))) == 0",
        "assert apply(lambda x: x * 2, 1, 2) == [2, 4] and apply(len, 'ab') == [2] and apply(str, 1) == ['1']",
        "assert adder(2)(3) == 5 and apply(adder(1), 1) == [2]",
        "p = Point(2)\nassert p.x == 2 and p.double().x == 4 and p == Point(2) and p != Point(3) and p != 2",
        "p = Point(2); p.x = 9\nassert p.x == 9 and isinstance(p, Point) and len({Point(1), Point(1)}) == 1",
        "assert LIMIT == 7 and math.sqrt(4) == 2 and string.digits[0] == '0'",
        "def g(x: List[int]): return same(x)\nassert g([1]) == [1]",
        "try: fail('odd')\nexcept ValueError as e: assert str(e) == \"('no', 1)\"\nelse: assert False",
        "try: fail('key')\nexcept KeyError as e: assert e.args == ('k',)\nelse: assert False",
        "try: fail('os')\nexcept FileNotFoundError as e: assert e.errno == 2\nelse: assert False",
        "def bad(x): raise LookupError(x)\ntry: apply(bad, 4)\nexcept LookupError as e: assert e.args == (4,)\n"
        "else: assert False",
        "try: missing\nexcept NameError: pass\nelse: assert False",
        "assert not hasattr(Point(1), 'y')",
    ],
)
def test_values_cross_and_objects_are_referred_to(test: str) -> None:
    outcome = tried(PLAIN, tests=test)
    assert outcome.passed, outcome.output


@sets.needs_sets
@pytest.mark.slow
def test_the_known_solutions_of_humaneval_pass_and_none_does_without_its_body() -> None:
    for item in tasks.rows("humaneval", tasks.TaskFiles((sets.SETS,)))[::6]:
        assert run(item.prompts[0] + item.answer, item.test).passed, item.row
        assert not run(item.prompts[0] + "    pass\n", item.test).passed, item.row
