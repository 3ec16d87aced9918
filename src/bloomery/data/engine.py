"""
The engine: one function over many parts, in this process, in worker processes or on a Ray cluster; killed anywhere.

    work(config, part, out) -> record

writes the part's files below `out`, each whole or absent, and returns what there is to say about them. The record goes
to out/parts/WHAT/NAME.json when the files are there, with the sha256 of each. A part whose record and files are
unchanged is not done again, so that a run that was killed goes on with the next part. What a part leaves depends on the
part alone, and so nothing depends on the number of workers, on their order or on what was killed.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field, model_validator
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bloomery.core import child, errors, files, leftovers, shortage
from bloomery.core.bounds import Between
from bloomery.core.config import VOLATILE, Config
from bloomery.core.errors import BloomeryError, RunError
from bloomery.core.log import progress
from bloomery.data import cluster
from bloomery.hw.launcher import check_processes, cores

RECORDS = "parts"
SMALL_BYTES = 32 * 2**20
"""Less than this is done in this process where nobody says how many workers: two of them take 1.5 s to start."""

MOST_PATHS = 3
"""How many files of a part an error names."""
UNCAUGHT = 1
"""Exit code of a Python process that an exception has ended."""


class Engine(Config):
    """Where the parts of a stage are worked on. The output is the same everywhere."""

    kind: Literal["local", "ray"] = "local"
    workers: Annotated[int, Between(1, 4096, "each worker is a process")] | None = None
    """Processes. None: one for each core that this process may use; on Ray, as many as the cluster takes."""
    address: str | None = None
    """Of a Ray cluster, as `ray.init` takes it. None: one of this machine, for the time of the stage."""

    @model_validator(mode="after")
    def _an_address_is_of_a_cluster(self) -> "Engine":
        if self.kind == "local" and self.address is not None:
            raise ValueError(f'address {self.address!r} is of a Ray cluster; say kind = "ray" too')
        return self


class Parallel(Config):
    """Base of the sections whose stages work on parts."""

    engine: Engine = Field(Engine(), json_schema_extra=VOLATILE)
    """Where its parts are worked on. A recipe's own section [engine] is what all stages take that do not say."""


class Part(NamedTuple):
    """One piece of a stage's work."""

    name: str
    """Of its record, and of the files that it leaves: no other part of the same work has it."""
    given: Any
    """What the function needs to know besides the config: plain data."""
    num_bytes: int = 0
    """How much there is to do, for the progress and for the decision whether workers are worth their start."""


Record = Mapping[str, Any]
"""JSON data. `files` lists what the part has written, relative to `out`; nothing in it may differ between runs."""

Work = Callable[[Any, Part, Path], Record]


def run_parts(
    engine: Engine,
    work: Work,
    config: Any,
    parts: Sequence[Part],
    out: Path,
    *,
    what: str,
    unit: str = "parts",
) -> list[Record]:
    """
    Do the parts that are not done yet; returns the records of all of them, in the order of `parts`.

    `what` names the work within its folder. `work` is a function at the top of a module. Raises the BloomeryError that
    `work` raises, RuntimeError with the part's name for any other in a worker, and RunError, which names the part, for
    a worker that died.
    """
    names = [part.name for part in parts]
    assert len(set(names)) == len(names), f"two parts of {what} have one name"
    records: dict[str, Record] = {}
    total, done = sum(max(1, part.num_bytes) for part in parts), 0
    with progress(what, unit, total=len(parts)) as meter:

        def take(part: Part, record: Record) -> None:
            nonlocal done
            records[part.name], done = record, done + max(1, part.num_bytes)
            shown = {"percent": round(100 * done / total, 1)} if total > len(parts) else {}
            meter.at(len(records), **shown)

        for part in parts:
            if (known := _done(out, what, part.name)) is not None:
                take(part, known)
        meter.start_at(len(records))
        todo = [part for part in parts if part.name not in records]
        for part, finished in _run(engine, partial(_hashed, work), config, todo, out):
            leftovers.save(_place(out, what, part.name), finished["record"], finished["outputs"])
            take(part, finished["record"])
    return [records[name] for name in names]


def _place(out: Path, what: str, name: str) -> Path:
    return out / RECORDS / what / f"{name}.json"


def _done(out: Path, what: str, name: str) -> Record | None:
    """The record of a part whose files are all there as they were written, or None."""
    return leftovers.load(_place(out, what, name), out, f"{what}: part {name}")


def _hashed(work: Work, config: Any, part: Part, out: Path) -> Record:
    """A part's record, and its files with their sha256: taken by the worker, while the files are in memory."""
    record = work(config, part, out)
    return {"record": record, "outputs": files.listed(out, record["files"])}


def _run(engine: Engine, work: Work, config: Any, parts: Sequence[Part], out: Path) -> Iterator[tuple[Part, Record]]:
    """Parts with their records, in the order in which they come to be done."""
    if not parts:
        return
    if engine.kind == "ray":
        yield from cluster.run(engine.address, engine.workers, work, config, parts, out)
        return
    workers = min(engine.workers or _default_workers(parts), len(parts))
    if workers == 1:
        for part in parts:
            yield part, work(config, part, out)
    else:
        yield from _run_in_workers(workers, work, config, parts, out)


def _default_workers(parts: Sequence[Part]) -> int:
    return cores() if sum(part.num_bytes for part in parts) >= SMALL_BYTES else 1


def needed(section: str, config: Parallel) -> None:
    """Raises HardwareError, before the first stage of a run, for more workers than this machine should start."""
    engine = config.engine
    if engine.workers is not None and engine.address is None:
        check_processes(engine.workers, f"{section}.engine.workers")


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


def _run_in_workers(
    count: int, work: Work, config: Any, parts: Sequence[Part], out: Path
) -> Iterator[tuple[Part, Record]]:
    """Largest parts first, so that no large one is left for the end."""
    waiting = deque(sorted(parts, key=lambda part: -part.num_bytes))
    with ExitStack() as stack:
        busy: dict[Connection, tuple[_Worker, Part]] = {}
        for _ in range(count):
            worker = stack.enter_context(_started(work, config, out))
            busy[worker.pipe] = (worker, _give(worker, waiting.popleft()))
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, part = busy.pop(pipe)
                record = _answer(worker, part)
                if waiting:
                    busy[pipe] = (worker, _give(worker, waiting.popleft()))
                yield part, record


@contextmanager
def _started(work: Work, config: Any, out: Path) -> Iterator[_Worker]:
    spawn = multiprocessing.get_context("spawn")  # forked processes hang on locks that threads held
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(there, os.getpid(), work, config, out), daemon=True)
    process.start()
    there.close()
    try:
        yield _Worker(process, here)
    finally:
        here.close()
        process.terminate()
        process.join()


def _give(worker: _Worker, part: Part) -> Part:
    try:
        worker.pipe.send(part)
    except BrokenPipeError:
        raise _death(worker, part) from None
    return part


def _answer(worker: _Worker, part: Part) -> Record:
    try:
        answer: dict[str, Any] = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        raise _death(worker, part) from None
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["what"], where=answer["where"], cure=answer["cure"])
    record: Record = answer["record"]
    return record


def _death(worker: _Worker, part: Part) -> Exception:
    worker.process.join()
    code = worker.process.exitcode or 0
    if code == UNCAUGHT:  # which its process has written to stderr, with all lines
        return RuntimeError(f"part {part.name}: the lines above say where its worker failed")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    what = f"the worker on part {part.name} {how}"
    cure = "Run the same command again: finished parts are kept. If it dies again"
    if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGFPE, -signal.SIGILL):
        cure += ", a library cannot read its input: the lines above say why. Write those files again, or remove them."
    else:
        cure += ", there may be too little memory: engine.workers=1 needs the least."
    return RunError(what, where=", ".join(_paths(part.given)), cure=cure)


def _paths(given: Any) -> list[str]:
    """The first files that a part names, for a person."""
    if isinstance(given, str | Path):
        return [str(given)[:200]]
    values = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    found = [path for value in values for path in _paths(value) if os.sep in path]
    return found[:MOST_PATHS]


def _serve(pipe: Connection, parent: int, work: Work, config: Any, out: Path) -> None:
    """What a worker process does: parts, one after the other, until the pipe ends."""
    child.die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is left to the parent
    os.environ["RAYON_NUM_THREADS"] = "1"
    pa.set_cpu_count(1)
    with threadpool_limits(1):
        while True:
            try:
                part = pipe.recv()
            except EOFError:
                return
            pipe.send(_answered(work, config, part, out))


def _answered(work: Work, config: Any, part: Part, out: Path) -> dict[str, Any]:
    try:
        return {"record": work(config, part, out)}
    except BloomeryError as error:
        return told(error)
    except Exception as error:
        if (short := shortage.as_error(error)) is not None:
            return told(short)
        raise


def told(error: BloomeryError) -> dict[str, Any]:
    return {"error": type(error).__name__, "what": error.what, "where": error.where, "cure": error.cure}
