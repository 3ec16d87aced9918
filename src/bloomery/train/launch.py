"""
Start ranks: one function in each of several processes that train a model together.

    function(task, world) -> what there is to say about it

`task` is JSON and the answer is that of the first rank. If torchrun started this process, its others wait in `follow`
for the task. Otherwise `ranks` processes of this machine start for the time of the task, and end with it, however it
ends. A process that trains alone does not come here.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import TypedDict

from bloomery.core import errors
from bloomery.core import io as core_io
from bloomery.core.config import build, is_of_hub, plain
from bloomery.core.errors import BloomeryError, RunError
from bloomery.core.log import console, info, lent_terminal
from bloomery.core.pipeline import resolve, versions
from bloomery.core.records import read_record
from bloomery.core.signals import TERMINATED, StopRequest, Terminated, on_signals
from bloomery.hw import copies, distributed, launcher
from bloomery.hw.distributed import RankLostError, World
from bloomery.train.config import Training
from bloomery.weights import hf
from bloomery.weights.locate import locate_model, of_hub
from bloomery.weights.opened import is_adapter

SECONDS_BETWEEN_LOOKS = 0.05
GRACE_SECONDS = 60.0
"""How long others may take to come to where ranks meet, after one has ended in error; longer where one is busy."""

BUSY = "busy"
"""The file in which a rank that saves says so."""

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


_handed_out: list[str] = []
"""The tasks that this process has had under torchrun. The number of the next tells its world from theirs."""


def run(function: str, task: Mapping[str, Any], ranks: int) -> Answer:
    """
    Run `function` ("package.module:name") on every rank and return the answer of the first. Raises RunError, which
    names it, for a rank that dies, and whatever BloomeryError a rank raises.
    """
    if (world := distributed.launched_world()) is not None and world.size > 1:
        assert world.is_first, "the others wait in `follow`"
        number = len(_handed_out)
        distributed.hand_out(number, {"function": function, "task": dict(task)})
        return _take_part(number, function, task)
    return _on_processes(function, task, ranks)


def stays_here(config: Training) -> bool:
    """Whether this process trains a stage itself. Pinned memory of one that offloads ends only with its process."""
    return launcher.num_processes(config.num_processes) == 1 and config.offload == "none"


def stage(function: str, config: Training, inputs: Mapping[str, Path], out: Path) -> Answer:
    """Run a stage's `function(config, inputs, out, world)` on every rank: see `run`."""
    task = {
        "function": function,
        "config_class": f"{type(config).__module__}:{type(config).__qualname__}",
        "config": plain(config),
        "inputs": {name: str(folder) for name, folder in inputs.items()},
        "out": str(out),
    }
    return run("bloomery.train.launch:stage_on_rank", task, config.num_processes)


def stage_on_rank(task: Mapping[str, Any], world: World) -> Answer:
    """What each rank does for `stage`."""
    check_versions(world)
    config = build(resolve(task["config_class"]), dict(task["config"]))
    inputs, out = {name: Path(folder) for name, folder in task["inputs"].items()}, Path(task["out"])
    world = copies.with_receivers(world, out)
    if world.receivers:
        config = _brought(world, config, inputs, out)
    return dict(resolve(task["function"])(config, inputs, out, world))


def check_versions(world: World) -> None:
    """Raises RunError, on all ranks, where a machine has other versions of Bloomery or torch than the first."""
    if world.size == distributed.ranks_here(world):
        return
    installed = versions()
    facts = {name: installed.get(name) for name in ("bloomery", "torch")}
    first = world.broadcast(facts)
    with world.alike():
        if facts != first:
            what = f"{socket.gethostname()} has {facts}, but the machine of the first rank has {first}"
            raise RunError(what, where=f"rank {world.rank}", hint="Install the same versions on all machines.")


def _brought(world: World, config: Training, inputs: Mapping[str, Path], out: Path) -> Training:
    """Copy what ranks read to machines with disks of their own. Returns the settings with the paths of copies."""
    with world.alike():
        named = {name: str(path) for name, path in _named(config).items()} if world.is_first else {}
    named = world.broadcast(named)
    folders = [*inputs.values(), out, *map(Path, named.values())]
    with world.alike():
        bases = [str(base) for folder in folders for base in _bases(folder)] if world.is_first else []
    for folder in dict.fromkeys([*folders, *map(Path, world.broadcast(bases))]):
        copies.bring(world, folder)
    copies.mark(world, out)
    known = {name: Path(path) for name, path in named.items()}
    return config if world.is_first else config.model_copy(update=known)


def _bases(folder: Path) -> Iterator[Path]:
    """
    The models below the adapters in a folder, or in its folder `model`. Not those of a hub: each machine has its cache.
    Paths are from the folder on, without links, because adapters name their base so.
    """
    for model in (folder, folder / "model"):
        while is_adapter(model) and of_hub(base := hf.base_of(model)) is None:
            near = Path(os.path.normpath(model.absolute() / os.path.relpath(base, model.resolve())))
            model = near if near.exists() and near.samefile(base) else base
            yield model


def _named(config: Training) -> dict[str, Path]:
    """The local model and file that settings name and every rank reads, as absolute paths."""
    named: dict[str, Path] = {}
    if (start := getattr(config, "start_from", None)) is not None and not is_of_hub(start):
        named["start_from"] = locate_model(start.expanduser()).absolute()
    if (questions := getattr(config, "hellaswag", None)) is not None:
        named["hellaswag"] = questions.expanduser().absolute()
    return named


def by_first_process(work: Callable[[], None]) -> None:
    """Of the processes that torchrun has started: the first calls `work`, and the others only train with it."""
    distributed.meet()  # before hours of data stages
    process = launcher.launched()
    if process is not None and process.rank > 0:
        follow()
        return
    try:
        work()
    finally:
        dismiss()


def follow() -> None:
    """What ranks but the first do under torchrun: take part in what the first hands out, until it is done."""
    console.quiet = True
    try:
        while (rank_task := distributed.handed_out(number := len(_handed_out)))["function"]:
            _take_part(number, rank_task["function"], rank_task["task"])
    finally:
        distributed.leave()


def dismiss() -> None:
    """Let the ranks go that wait in `follow`."""
    distributed.hand_out(len(_handed_out), {"function": ""})
    distributed.stop_watching()
    distributed.wait_for_readers()


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
                with lent_terminal():
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
        "OMP_NUM_THREADS": str(max(1, launcher.cores() // ranks)),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        launcher.TASK_FOLDER: str(folder),
        launcher.BUSY: str(folder / BUSY),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command = [sys.executable, "-c", RANK, str(os.getpid()), str(folder)]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def be_rank(name: str) -> None:
    """What a process that `run` has started does. `name` is the folder of its task. Exits 0 with an answer."""
    folder, rank = Path(name), int(os.environ["RANK"])
    rank_task = read_record(folder / "task.json", RankTask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is left to the parent
    console.quiet = rank > 0
    try:
        with on_signals():  # until it is gone: who asks all processes of a group asks each rank more than once
            core_io.write_json(
                folder / f"{rank}.json", {"answer": _take_part(0, rank_task["function"], rank_task["task"])}
            )
    except Terminated as ended:
        _leave(int(ended.code or 0))
    except BloomeryError as error:
        core_io.write_json(folder / f"{rank}.json", {"error": distributed.error_facts(error)})
        _leave(2)
    except Exception as error:
        if (short := errors.as_error(error)) is not None:
            core_io.write_json(folder / f"{rank}.json", {"error": distributed.error_facts(short)})
            _leave(2)
        sys.excepthook(type(error), error, error.__traceback__)
        _leave(1)


def _leave(code: int) -> NoReturn:
    """End at once: threads of torch that still wait for other ranks can abort a process that unloads them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch(processes: "Sequence[subprocess.Popen[bytes]]", folder: Path, stop: StopRequest) -> None:
    """
    Wait for all, and ask them to stop when this process is. Raises Terminated when they have; of ranks that fail, the
    error of one, as soon as it is known which of them was the first to.
    """
    done_at: float | None = None

    def goes_well() -> bool:
        nonlocal done_at
        if processes[0].poll() in (0, TERMINATED):
            done_at = done_at or time.monotonic()
            if time.monotonic() > done_at + GRACE_SECONDS:
                return False
        return not any(process.poll() not in WELL for process in processes)

    _wait(processes, stop, goes_well)
    if processes[0].poll() in (0, TERMINATED) and all(process.poll() in WELL for process in processes):
        for rank, process in enumerate(processes):
            if process.poll() is None:  # the work is done and safe
                what = f"rank {rank} (process {process.pid}) did not end within {GRACE_SECONDS:.0f} s of the first rank"
                info(f"{what}, and is killed", style="yellow")
        if processes[0].poll() == TERMINATED:
            raise Terminated(stop.code)
        stop.check()
        return
    deadline = time.monotonic() + GRACE_SECONDS

    def may_go_on() -> bool:
        if stop.asked and _ended_before_start(processes, folder):
            return False  # those that started wait for it, deaf to signals, and have trained nothing
        if (processes[0].poll() or 0) < 0:
            (folder / launcher.FIRST_DIED).touch()
        return time.monotonic() < deadline + _is_saving(processes, folder) * launcher.BUSY_SECONDS

    _wait(processes, stop, may_go_on)
    codes = [process.poll() for process in processes]
    if codes[0] == TERMINATED:  # the first has saved; the others stopped with it, or lost it while they waited for it
        raise Terminated(stop.code)
    if (stuck := _stuck(codes)) and not stop.asked:
        names = " and ".join(f"rank {rank} (process {processes[rank].pid})" for rank in stuck)
        what = f"{names} stopped responding, and the other ranks stopped waiting after {distributed.GPU_SILENCE}"
        raise RunError(what, hint="Check its GPU with `bloomery doctor` and the kernel's log. Then run it again.")
    failures = [(_error(rank, processes[rank], folder), code == 1) for rank, code in enumerate(codes) if code]
    if stop.asked:  # one that was still starting has no other way to stop, and those that miss it are no failure
        failures = [
            failure
            for failure, code in zip(failures, filter(None, codes), strict=True)
            if code not in ENDED and not isinstance(failure[0], RankLostError)
        ]
    if failures:
        # one that lost another is not the cause, and a fault of ours may have been caused by a rank that is gone
        raise min(failures, key=lambda failure: _how_far(*failure))[0]
    stop.check()


def _is_saving(processes: "Sequence[subprocess.Popen[bytes]]", folder: Path) -> bool:
    """Whether a rank that runs saves what others would lose."""
    try:
        rank = (folder / BUSY).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return rank.isdecimal() and processes[int(rank)].poll() is None


def _how_far(error: BloomeryError, is_fault: bool) -> int:
    """From the cause: an error of a rank itself, a rank without signs of life, a fault of ours, a lost rank."""
    if not isinstance(error, RankLostError):
        return 2 if is_fault else 0
    return 1 if distributed.SILENT in error.what else 3


def _ended_before_start(processes: "Sequence[subprocess.Popen[bytes]]", folder: Path) -> bool:
    """Whether SIGTERM ended a rank that did not handle it yet: without that rank, none has begun."""
    ended = (rank for rank, process in enumerate(processes) if process.poll() == -signal.SIGTERM)
    return any(not (folder / f"{rank}.json").exists() for rank in ended)


def _stuck(codes: Sequence[int | None]) -> list[int]:
    """
    Ranks that still run where all others were aborted: the library for GPUs ends a process that has waited too long
    for another, and says nothing to Python.
    """
    ended = [code for code in codes if code is not None]
    gave_up = bool(ended) and all(code == -signal.SIGABRT for code in ended)
    return [rank for rank, code in enumerate(codes) if code is None] if gave_up else []


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", stop: StopRequest, patience: Callable[[], bool]) -> None:
    """Wait for all processes, as long as there is patience. A request to stop is passed on to each process once."""
    notified = False
    while any(process.poll() is None for process in processes) and patience():
        if stop.asked and not notified:
            notified = True
            for process in processes:
                process.terminate()
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _error(rank: int, process: "subprocess.Popen[bytes]", folder: Path) -> BloomeryError:
    file = folder / f"{rank}.json"
    if process.returncode == 2 and file.is_file():
        return distributed.heard(read_record(file, dict[str, Any])["error"])
    code = process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = "Its output is above. The same command resumes from the newest checkpoint."
    return RunError(f"rank {rank} (process {process.pid}) {how}; the other ranks were stopped", hint=hint)
