"""
Ranks and other processes for tests, forked from one that has imported torch and the trainer: hundreds of them start,
and the imports of each would take seconds. A command that a test runs by itself starts its ranks as it does elsewhere.
"""

import atexit
import gc
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from bloomery.core import child

ROOT = Path(__file__).parents[1]
IMPORTED = ("pytest", "bloomery.train.trainer", "bloomery.train.launch", "tests.train.made")
MESSAGE_BYTES = 2**17


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
    return start("bloomery.train.launch:be_rank", [command[-1]], env, task["function"])


STARTS = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
"""In the place of the module `subprocess` in `launch`."""


def start(function: str, arguments: list[Any], env: Mapping[str, str], calls: str = "", err: int = 2) -> Process:
    """
    A process in a session of its own, which calls "package.module:name" with arguments of JSON and ends with the number
    that it returns; imported before it starts is also the module of what it calls in its turn. `err` is its stderr.
    """
    request = {"function": function, "arguments": arguments, "env": dict(env), "folder": os.getcwd()}
    request["imports"] = [name.partition(":")[0] for name in (function, calls) if name]
    server = _server()
    return Process(server, asked(server, request, [1, err]))


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
                import_module(name)
            gc.freeze()
            answer = os.fork() or _become(request, files, own)
        server.send(json.dumps(answer).encode())
        for file in files:
            os.close(file)


def _become(request: dict[str, Any], files: list[int], server: int) -> NoReturn:
    import torch

    code = 1
    try:
        child.die_with(server)
        os.setsid()
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["folder"])
        torch.set_num_threads(int(request["env"]["OMP_NUM_THREADS"]))
        module, _, name = request["function"].partition(":")
        code = getattr(import_module(module), name)(*request["arguments"]) or 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
