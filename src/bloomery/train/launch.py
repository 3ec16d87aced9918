"""
Starting of ranks: one function, on each process that trains a model together with others.

    function(task, world) -> what there is to say about it

`task` is JSON and the answer is that of the first rank. Where torchrun has started this process, its others wait in
`follow` and are told the task; else `ranks` processes of this machine are started for the time of the task, and end
with it, however it ends. One rank is this process itself.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from typing_extensions import TypedDict

from bloomery.core import io as core_io
from bloomery.core import shortage
from bloomery.core.config import Config, build, plain
from bloomery.core.errors import BloomeryError, RunError
from bloomery.core.log import console
from bloomery.core.pipeline import resolve
from bloomery.core.records import read_record
from bloomery.core.signals import TERMINATED, StopRequest, Terminated, on_signals
from bloomery.hw import distributed
from bloomery.hw.distributed import RankLostError, World
from bloomery.hw.launcher import cores
from bloomery.train.config import Training

SECONDS_BETWEEN_LOOKS = 0.05
GRACE_SECONDS = 60.0
"""How long others may take to come to where ranks meet, after one has ended in error; longer where one is busy."""
BUSY, DESK = "busy", "BLOOMERY_RANKS"
"""A file in the folder of a task, whose path ranks find in this variable: one of them saves what others would lose."""

RANK = """
import sys
from bloomery.core import child
child.die_with(int(sys.argv[1]))
from bloomery.train import launch
launch.be_rank(sys.argv[2])
"""
"""What the process of a rank runs: the import of torch takes seconds, in which the parent may die."""

ENDED = (TERMINATED, -signal.SIGTERM)
"""Codes of a rank that was asked to stop: it did where nothing is lost, or had not begun."""
WELL = (None, 0, TERMINATED)
"""Codes of a rank for which the others need not end: it runs, is done, or has stopped after the same step as they."""

Answer = dict[str, Any]


class RankTask(TypedDict):
    """What a rank is started for."""

    function: str
    task: dict[str, Any]


C = TypeVar("C", bound=Config)
_handed_out: list[str] = []
"""The tasks that this process has had under torchrun. The number of the next tells its world from theirs."""


def run(function: str, task: Mapping[str, Any], ranks: int = 1) -> Answer:
    """
    Run `function` ("package.module:name") on every rank and return the answer of the first. Raises RunError, which
    names it, for a rank that dies, and whatever BloomeryError a rank raises.
    """
    if (world := distributed.given()) is not None and world.size > 1:
        assert world.is_first, "the others wait in `follow`"
        number = len(_handed_out)
        distributed.hand_out(number, {"function": function, "task": dict(task)})
        return _take_part(number, function, task)
    if ranks == 1:  # also where a launcher has started no more than one
        return dict(resolve(function)(task, World.alone()))
    return _on_processes(function, task, ranks)


def stage(function: str, config: Training, inputs: Mapping[str, Path], out: Path) -> Answer:
    """Run a stage's `function` on every rank; each finds its config, inputs and folder again by `unpacked`."""
    where = {"inputs": {name: str(folder) for name, folder in inputs.items()}, "out": str(out)}
    return run(function, {"config": plain(config), **where}, config.ranks)


def unpacked(cls: type[C], task: Mapping[str, Any]) -> tuple[C, dict[str, Path], Path]:
    """The config, the inputs and the folder of a stage, as `stage` has packed them."""
    inputs = {name: Path(folder) for name, folder in task["inputs"].items()}
    return build(cls, dict(task["config"])), inputs, Path(task["out"])


def follow() -> None:
    """What ranks but the first do under torchrun: take part in what the first hands out, until it is done."""
    console.quiet = True
    while (told := distributed.handed_out(number := len(_handed_out)))["function"]:
        _take_part(number, told["function"], told["task"])


def dismiss() -> None:
    """Let the ranks go that wait in `follow`."""
    distributed.hand_out(len(_handed_out), {"function": ""})


def _take_part(number: int, function: str, task: Mapping[str, Any]) -> Answer:
    _handed_out.append(function)
    with distributed.joined(number) as world:
        return dict(resolve(function)(task, world))


# --- processes of this machine -------------------------------------------------------------------------------------


def _on_processes(function: str, task: Mapping[str, Any], ranks: int) -> Answer:
    with on_signals(_interrupt) as stop:  # before anything starts, so that nothing that has started is left
        stop.saves = True
        store, port = distributed.open_store()
        with tempfile.TemporaryDirectory(prefix="bloomery-ranks-") as name:
            folder = Path(name)
            core_io.write_json(folder / "task.json", {"function": function, "task": dict(task)})
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for rank in range(ranks):
                    stop.check()
                    processes.append(_start(folder, port, rank, ranks))
                _watch(processes, folder, stop)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            del store
            answer: Answer = read_record(folder / "0.json", dict[str, Answer])["answer"]
    return answer


def _interrupt() -> NoReturn:
    """What a second Ctrl-C does: the ranks are killed, and nothing is waited for."""
    raise KeyboardInterrupt


def _start(folder: Path, port: int, rank: int, ranks: int) -> "subprocess.Popen[bytes]":
    env = {
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        DESK: str(folder),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command = [sys.executable, "-c", RANK, str(os.getpid()), str(folder)]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def be_rank(name: str) -> None:
    """What a process that `run` has started does. `name` is the folder of its task. Exits 0 with an answer."""
    folder, rank = Path(name), int(os.environ["RANK"])
    told = read_record(folder / "task.json", RankTask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is left to the parent
    console.quiet = rank > 0
    try:
        with on_signals():  # until it is gone: who asks all processes of a group asks each rank more than once
            core_io.write_json(folder / f"{rank}.json", {"answer": _take_part(0, told["function"], told["task"])})
    except Terminated as ended:
        _leave(int(ended.code or 0))
    except BloomeryError as error:
        core_io.write_json(folder / f"{rank}.json", {"error": distributed.told(error)})
        _leave(2)
    except Exception as error:
        if (short := shortage.as_error(error)) is not None:
            core_io.write_json(folder / f"{rank}.json", {"error": distributed.told(short)})
            _leave(2)
        sys.excepthook(type(error), error, error.__traceback__)
        _leave(1)


def _leave(code: int) -> NoReturn:
    """End at once: threads of torch that still wait for other ranks can abort a process that unloads them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def busy() -> Iterator[None]:
    """While the block runs, whoever has started this rank does not end it because others have failed."""
    if DESK not in os.environ:
        yield
        return
    note = Path(os.environ[DESK]) / BUSY
    note.touch()
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def _watch(processes: "Sequence[subprocess.Popen[bytes]]", folder: Path, stop: StopRequest) -> None:
    """
    Wait for all, and ask them to stop when this process is. Raises Terminated when they have; of ranks that fail, the
    error of one, as soon as it is known which of them was the first to.
    """
    _wait(processes, stop, lambda: not any(process.poll() not in WELL for process in processes))
    deadline = time.monotonic() + GRACE_SECONDS

    def may_go_on() -> bool:
        return time.monotonic() < deadline or (processes[0].poll() is None and (folder / BUSY).exists())

    _wait(processes, stop, may_go_on)
    codes = [process.poll() for process in processes]
    if codes[0] == TERMINATED:  # the first has saved; the others stopped with it, or lost it while they waited for it
        raise Terminated(stop.code)
    found = [(_error(rank, processes[rank], folder), code == 1) for rank, code in enumerate(codes) if code]
    if stop.asked:  # one that was still starting has no other way to stop, and those that miss it are no failure
        found = [
            one
            for one, code in zip(found, filter(None, codes), strict=True)
            if code not in ENDED and not isinstance(one[0], RankLostError)
        ]
    if found:
        # one that lost another is not the cause, and a fault of ours may have been caused by a rank that is gone
        raise min(found, key=lambda one: (isinstance(one[0], RankLostError), one[1]))[0]
    stop.check()


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", stop: StopRequest, patience: Callable[[], bool]) -> None:
    """Wait for all, as long as there is patience. Each is told once when this process is asked to stop."""
    told = False
    while any(process.poll() is None for process in processes) and patience():
        if stop.asked and not told:
            told = True
            for process in processes:
                process.terminate()
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _error(rank: int, process: "subprocess.Popen[bytes]", folder: Path) -> BloomeryError:
    file = folder / f"{rank}.json"
    if process.returncode == 2 and file.is_file():
        return distributed.heard(read_record(file, dict[str, Any])["error"])
    code = process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = "What it said stands above. The same command goes on from the newest checkpoint."
    return RunError(f"rank {rank} (process {process.pid}) {how}; the other ranks were stopped", hint=hint)
