"""
A shell whose `bloomery` and `python FILE.py` start at once.

    with Shell(folder) as shell:
        code, output = shell.run(script, cwd)

torch takes seconds to import, and the pages of docs/ have hundreds of commands. A server process imports everything
once and forks for each command. The commands in `bin` are a small client: it hands its words, working directory,
environment and file descriptors to the server, passes signals on, and exits with the command's exit code. Pipes,
redirections, background jobs and exit codes of a script therefore work as with the real programs. A client in
namespaces of its own, such as those of a machine of a test, gets its command there.

This file is also the program of the server and of the client, so it imports little.
"""

import contextlib
import ctypes
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

CPU_SECONDS = 60
"""Most CPU time of one command. Wall time would make a busy machine a failure."""
WALL_SECONDS = 300
"""Most time of one command, and of one script."""
POLL_SECONDS = 0.01
TOO_LONG = 124
"""The exit code of a command that was stopped, as that of timeout(1)."""


class Shell:
    """Bash, with the commands of this file first on its PATH. `home` is a new folder for HOME and caches."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.home, self._logs = folder / "bin", folder / "home", folder / "scripts"
        for made in (self.bin, self.home, self._logs):
            made.mkdir(parents=True)
        self._listener = socket.socket(socket.AF_UNIX)
        # The path of a socket has at most 103 characters on some systems, and those of pytest's folders have more.
        self._socket = Path(f"/tmp/bloomery-snippets-{os.getpid()}-{time.monotonic_ns():x}")
        self._listener.bind(str(self._socket))
        self._listener.listen(64)
        for name in ("bloomery", "python", "python3"):
            words = shlex.join([sys.executable, "-ISP", __file__, "client", str(self._socket), sys.executable, name])
            (self.bin / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
            (self.bin / name).chmod(0o755)
        unwanted = ("BLOOMERY_", "PYTHON", "PYTEST", "HF_", "XDG_")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)} | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TERM": "dumb",
        }
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """Start the server, which takes seconds: not before a script runs, unless it is asked to."""
        words = [sys.executable, "-P", __file__, "server", str(self._listener.fileno())]
        fds = [self._listener.fileno()]
        self._server = subprocess.Popen(words, stdin=subprocess.PIPE, env=self.environment, pass_fds=fds)
        self._listener.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is None:
            self._listener.close()
        else:
            assert self._server.stdin is not None
            self._server.stdin.close()  # and the server ends
            self._server.wait(timeout=60)
        self._socket.unlink(missing_ok=True)

    def run(self, text: str, cwd: Path, *, line: int = 2, python: bool = False) -> tuple[int, int, str]:
        """
        The exit code, the line of the failed command, and the output of a script that stands at this line of a page.

        The script is padded with empty lines, so that bash and Python name lines of the page in their messages.
        """
        if self._server is None:
            self.start()
        script = self._logs / f"{line}{'.py' if python else '.sh'}"
        failed, output = self._logs / "failed", self._logs / "output"
        failed.unlink(missing_ok=True)
        head = "" if python else f"trap 'echo $LINENO > {shlex.quote(str(failed))}' ERR"
        script.write_text(head + "\n" * (line - 1) + text + "\n", encoding="utf-8")
        program = [str(self.bin / "python")] if python else ["bash", "-e", "-o", "pipefail"]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*program, str(script)],
                cwd=cwd,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(WALL_SECONDS)
            except subprocess.TimeoutExpired:
                code = TOO_LONG
            _kill(process.pid)  # also what it left in the background
            process.wait()
        where = int(failed.read_text() or line) if failed.exists() else line
        return code, where, output.read_text(encoding="utf-8", errors="replace")


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


# --- client --------------------------------------------------------------------------------------------------------


def client(path: str, python: str, name: str, *words: str) -> int:
    """Have a command run by the server; returns its exit code."""
    if name != "bloomery" and not (words and words[0].endswith(".py")):
        os.execv(python, [python, *words])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = {"name": name, "words": words, "cwd": os.getcwd(), "environ": dict(os.environ), "client": os.getpid()}
    socket.send_fds(connection, [b"?"], [0, 1, 2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    message = json.dumps(request).encode()
    connection.sendall(len(message).to_bytes(8, "big") + message)
    answer = connection.recv(1)
    return answer[0] if answer else 1


# --- server --------------------------------------------------------------------------------------------------------


def server(descriptor: int) -> int:
    """Fork for each command, until stdin ends."""
    _preload()
    listener = socket.socket(fileno=descriptor)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 1)
        while _reaped():
            pass
        if sys.stdin in ready:
            return 0
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(connection)
        connection.close()


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _preload() -> None:
    import gc
    import importlib
    import pkgutil

    import bloomery

    found = [module.name for module in pkgutil.walk_packages(bloomery.__path__, "bloomery.")]
    late = ("duckdb", "pyarrow.parquet", "scipy.sparse", "sklearn.linear_model", "torch._dynamo")  # of first uses
    for name in [*found, *late]:
        with contextlib.suppress(ImportError):  # of an extra or a GPU that is not there: a command says so
            importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy all memory


def _attend(connection: socket.socket) -> NoReturn:
    """Run one command in a process group of its own, and send its exit code."""
    _, fds, _, _ = socket.recv_fds(connection, 1, 3)
    size = int.from_bytes(_read(connection, 8), "big")
    request = json.loads(_read(connection, size))
    child = os.fork()
    if child == 0:
        connection.close()
        os.setsid()
        for number, descriptor in enumerate(fds):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _end(_command(request))
    for descriptor in fds:
        os.close(descriptor)
    code = _waited(child, connection)
    _kill(child)
    with contextlib.suppress(OSError):
        connection.sendall(bytes([code]))
    os._exit(0)


def _waited(child: int, connection: socket.socket) -> int:
    """The exit code of a command; signals of its client are passed on, and it is killed when the client is gone."""
    end = time.monotonic() + WALL_SECONDS
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else TOO_LONG if -code == signal.SIGXCPU else 128 - code
        if select.select([connection], [], [], POLL_SECONDS)[0]:
            try:
                number = connection.recv(1)
            except OSError:
                number = b""
            if number:
                os.kill(child, number[0])
        else:
            number = b"?"
        if not number or time.monotonic() > end:
            _kill(child)
            os.waitpid(child, 0)
            return TOO_LONG


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


def _command(request: dict[str, Any]) -> int:
    import resource
    import runpy
    import traceback

    from bloomery import cli

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environ"])
    _enter(Path(f"/proc/{request['client']}/ns"))
    os.chdir(request["cwd"])
    name, words = request["name"], request["words"]
    try:
        if name == "bloomery":
            sys.argv = [name, *words]
            return cli.main(words)
        sys.argv = words
        sys.path[:0] = [os.path.dirname(words[0]), request["cwd"]]
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        at = error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename != words[0]:
            at = at.tb_next  # the frames of this file and of runpy
        traceback.print_exception(error.with_traceback(at))
        return 1
    return 0


def _enter(namespaces: Path) -> None:
    """Go into the network and the file systems of another process, where they are not those of this one."""
    for kind in ("net", "mnt") if sys.platform == "linux" else ():
        if (namespaces / kind).readlink() != Path("/proc/self/ns", kind).readlink():
            with (namespaces / kind).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns of {kind}")


def _end(code: int) -> NoReturn:
    """As Python ends, without the seconds in which it takes the imported modules apart."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(role: str, *words: str) -> int:
    return client(*words) if role == "client" else server(int(words[0]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
