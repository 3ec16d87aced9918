"""
Ranks and other processes for tests, forked from one that has imported torch and the trainer: hundreds of them start,
and the imports of each would take seconds. A program that is forked by `python` forks what it starts in its turn.
"""

import atexit
import contextlib
import gc
import json
import math
import multiprocessing
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import bloomery
from bloomery.core import child

ROOT = Path(__file__).parents[1]
IMPORTED = ("pytest", "bloomery.train.trainer", "bloomery.train.launch", "tests.train.made", "torch._dynamo")
"""Before any starts. The last comes with the first optimizer, and takes a second."""
OF_PROGRAMS = ("duckdb", "pyarrow.parquet", "scipy.sparse", "sklearn.linear_model", "torch.distributed.tensor")
"""Before the first program starts, with all of Bloomery."""
ALL = "all"
"""In the place of the name of a module: all of Bloomery, and what its commands import besides."""
MESSAGE_BYTES = 2**17
PEAK = 1e11
"""FLOP/s of matmuls: what is forked does not measure them anew, which takes a third of a second."""


class Process(subprocess.Popen[bytes]):
    """A process that the server has forked and waits for."""

    _child_created = False

    def __init__(self, server: socket.socket, pid: int) -> None:
        self.pid, self.returncode, self._server = pid, None, server

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = asked(self._server, {"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.005)
        return code


def popen(command: Sequence[str], *, env: dict[str, str], **how: Any) -> Process:
    """In the place of the Popen of `launch`, whose command ends with the folder of a task."""
    task = json.loads((Path(command[-1]) / "task.json").read_text())
    return start("bloomery.train.launch:be_rank", [command[-1]], env, [task["function"]])


STARTS = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
"""In the place of the module `subprocess` in `launch`."""


def start(
    function: str,
    arguments: list[Any],
    env: Mapping[str, str],
    imports: Sequence[str] = (),
    *,
    out: int = 1,
    err: int = 2,
) -> Process:
    """
    A process in a session of its own, which calls "package.module:name" with arguments of JSON and ends with the number
    that it returns. Imported before is what it says besides. `out` and `err` are its stdout and stderr.
    """
    request = {"function": function, "arguments": arguments, "env": dict(env), "folder": os.getcwd()}
    request["imports"] = [name.partition(":")[0] for name in (function, *imports)]
    server = _server()
    return Process(server, asked(server, request, [out, err]))


def python(
    words: list[str], env: Mapping[str, str], imports: Sequence[str] = (ALL,), *, out: int = 1, err: int = 2
) -> Process:
    """
    What `python WORDS` is, but forked, and so are the commands of Bloomery and the ranks that it starts in its turn,
    whose parent it is. A process that has computed must not start any: threads do not outlive a fork.
    """
    return start("tests.warm:be_python", [words], env, imports, out=out, err=err)


@cache
def _import_all() -> None:
    for name in (*(module.name for module in pkgutil.walk_packages(bloomery.__path__, "bloomery.")), *OF_PROGRAMS):
        with contextlib.suppress(ImportError):  # of an extra or a GPU that is not there: a command says so
            import_module(name)


def run(command: Sequence[str], *, timeout: float, **how: Any) -> "subprocess.CompletedProcess[str]":
    """In the place of the `run` of `subprocess`, for a program that ends when its parent does; what it says is kept."""
    words = list(command[command.index(sys.executable, 1) + 1 :])
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = python(words, os.environ, [words[1]], out=out.fileno(), err=err.fileno())
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def be_python(words: Sequence[str]) -> None:
    """Run a program as Python would, in this process."""
    from bloomery.data import executor

    subprocess.Popen = Forked  # type: ignore[misc, assignment]
    executor.multiprocessing = FORKS  # type: ignore[attr-defined, assignment]
    _run(words)


FORKS = SimpleNamespace(get_context=lambda kind: multiprocessing.get_context("fork"))
"""In the place of the module `multiprocessing` where worker processes are started."""


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """In the place of Popen: what would import torch again is forked instead, just before it would begin."""

    def __init__(self, command: Any, *, env: Mapping[str, str] | None = None, **how: Any) -> None:
        words = [str(word) for word in command]
        if words[1:4] == LEASHED and sys.executable in words[6:7]:
            words = words[6:]  # what has a group of its own is ended with it
        if words[0] == sys.executable and any(name in " ".join(words[1:5]) for name in FORKED):
            how["preexec_fn"] = partial(_begin, words[1:], dict(os.environ if env is None else env))
        super().__init__(command, env=env, **how)


LEASHED = child.leashed([])[1:4]
"""The first words of a command that ends with its parent."""
FORKED = (
    *("-m bloomery.cli", "-m bloomery.hw.probes", "-m bloomery.model.kernels.trials", "bloomery.train import launch"),
    *("gpu_parts.py", "gpu_runs.py"),
)
"""What the first words of a command say of a program that imports torch."""


def _begin(words: list[str], env: dict[str, str]) -> NoReturn:
    """Runs between fork and exec, and never comes to exec. All files but the first three are closed, as by exec."""
    from bloomery.core import log, signals
    from bloomery.hw import distributed
    from bloomery.train import launch

    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(env)
    gc.enable()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for known in (signals._listening, log._listeners, log._stage_line, launch._handed_out, distributed._watches):
        known.clear()  # of the program that started this one
    _end(lambda: _run(words))


def _run(words: Sequence[str]) -> None:
    kind, *rest = words
    while kind == "-X":
        kind, *rest = rest[1:]
    sys.argv = [kind, *rest]
    if kind == "-c":
        sys.argv = [kind, *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)  # it is run anew
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


def asked(server: socket.socket, request: dict[str, Any], files: list[int] | None = None) -> Any:
    socket.send_fds(server, [json.dumps(request).encode()], files or [])
    return json.loads(server.recv(MESSAGE_BYTES))


@cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"from tests import warm; warm.serve({theirs.fileno()}, {os.getpid()})"
    words, fds = [sys.executable, "-c", code], [theirs.fileno()]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    process = subprocess.Popen(words, pass_fds=fds, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(channel: int, parent: int) -> None:
    """Fork processes and tell how they ended, until nobody asks any more."""
    child.die_with(parent)
    for name in IMPORTED:
        import_module(name)
    vars(import_module("bloomery.hw.device"))["_measured"] = lambda *of: PEAK
    server, own = socket.socket(fileno=channel), os.getpid()
    while True:
        message, files, *_ = socket.recv_fds(server, MESSAGE_BYTES, 2)
        if not message:
            return
        request = json.loads(message)
        if "poll" in request:
            found, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            for name in request["imports"]:
                _import_all() if name == ALL else import_module(name)
            gc.freeze()
            answer = os.fork() or _become(request, files, own)
        server.send(json.dumps(answer).encode())
        for file in files:
            os.close(file)


def _become(request: dict[str, Any], files: list[int], server: int) -> NoReturn:
    import torch

    def begin() -> Any:
        child.die_with(server)
        os.setsid()
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["folder"])
        torch.set_num_threads(int(request["env"].get("OMP_NUM_THREADS", "1")))
        module, _, name = request["function"].partition(":")
        return getattr(import_module(module), name)(*request["arguments"])

    _end(begin)


def _end(work: Callable[[], Any]) -> NoReturn:
    """Do it, and end with the code that it returns or exits with, without taking apart what is imported."""
    code = 1
    try:
        code = work() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
