"""
The engine: one function over many parts, in this process, in worker processes or on a Ray cluster; killed anywhere.

    work(config, part, out) -> record

writes the part's files below `out`, each whole or absent, and returns what there is to say about them. The record goes
to out/parts/WHAT/NAME.json when the files are there. A part whose record and files are whole is not done again, so
that a run that was killed goes on with the next part. What a part leaves depends on the part alone, and so nothing
depends on the number of workers, on their order or on what was killed.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field, model_validator
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bloomery.core import errors, files
from bloomery.core.config import VOLATILE, Config, Positive
from bloomery.core.errors import BloomeryError, RunError
from bloomery.core.log import Meter, progress
from bloomery.data import cluster, orphan

RECORDS = "parts"
SMALL_BYTES = 32 * 2**20
"""Less than this is done in this process where nobody says how many workers: two of them take 1.5 s to start."""

UNCAUGHT = 1
"""Exit code of a Python process that an exception has ended."""


class Engine(Config):
    """Where the parts of a stage are worked on. The output is the same everywhere."""

    kind: Literal["local", "ray"] = "local"
    workers: Positive | None = None
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
    records = {part.name: record for part in parts if (record := _done(out, what, part.name)) is not None}
    todo = [part for part in parts if part.name not in records]
    total = sum(max(1, part.num_bytes) for part in parts)
    with progress(what, unit, total=len(parts)) as meter:
        meter.start_at(len(records))
        for part, record in _run(engine, work, config, todo, out):
            assert "files" in record
            sizes = {name: (out / name).stat().st_size for name in record["files"]}
            files.write_json(_place(out, what, part.name), {"record": record, "bytes": sizes})
            records[part.name] = record
            _tell(meter, records, parts, total)
    return [records[name] for name in names]


def _tell(meter: Meter, records: Mapping[str, Record], parts: Sequence[Part], total: int) -> None:
    done = sum(max(1, part.num_bytes) for part in parts if part.name in records)
    if total > len(parts):
        meter.at(len(records), percent=round(100 * done / total, 1))
    else:
        meter.at(len(records))


def _place(out: Path, what: str, name: str) -> Path:
    return out / RECORDS / what / f"{name}.json"


def _done(out: Path, what: str, name: str) -> Record | None:
    """The record of a part whose files are all there as they were written, or None."""
    place = _place(out, what, name)
    if not place.is_file():
        return None
    found = files.read_json(place)
    for file, size in found["bytes"].items():
        if not (out / file).is_file() or (out / file).stat().st_size != size:
            return None
    record: Record = found["record"]
    return record


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


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    cure = "Run the same command again: finished parts are kept. If it dies again, there may be too little memory: "
    return RunError(what, where=str(part.given)[:200], cure=f"{cure}engine.workers=1 needs the least.")


def _serve(pipe: Connection, parent: int, work: Work, config: Any, out: Path) -> None:
    """What a worker process does: parts, one after the other, until the pipe ends."""
    orphan.die_with(parent)
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
        return {"error": type(error).__name__, "what": error.what, "where": error.where, "cure": error.cure}
