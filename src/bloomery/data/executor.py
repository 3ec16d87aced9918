"""
Runs one function over many parts: in this process, in worker processes or on Ray.

    work(config, part, out) -> record

The function writes the part's files below `out`, each complete or absent, and returns a record of the results. The
record goes to out/parts/WHAT/NAME.json once the files exist, with the SHA-256 of each. A part whose record and
files are unchanged is not processed again. A run that was killed at any point therefore resumes with the next part.

The output of a part depends on that part alone. Nothing depends on the number of workers, their order, or which of
them were killed.

On a Ray cluster the same function runs over the same parts, through Ray Data. Every node sees `out` and the inputs
under the same paths (a shared file system). The node that processes a part writes its files. The record returns to
the driver, which writes it. A cluster therefore leaves the same files as a single machine.

`Counts` of a part are in its record, as `to_json` gives them; a stage merges those of all parts.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bloomery.core import child, errors, extras
from bloomery.core import io as core_io
from bloomery.core import records as core_records
from bloomery.core.config import VOLATILE, Between, Config
from bloomery.core.errors import BloomeryError, RunError
from bloomery.core.extras import DATA, pa
from bloomery.core.log import progress
from bloomery.hw.launcher import check_processes, cores


def run(
    address: str | None, workers: int | None, work: Callable[..., Any], config: Any, parts: Sequence[Any], out: Path
) -> Iterator[tuple[Any, Any]]:
    """
    Parts with their records, in order of completion.

    Connects to Ray at an address, or starts Ray if none is given. If Ray runs in this process already, takes that.
    Raises the errors of `work`, and DataError where Ray is not installed.
    """
    ray, data = extras.load("ray"), extras.load("ray.data")
    ours = not ray.is_initialized()
    if ours:
        _start(ray, address, workers)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    try:
        order = sorted(range(len(parts)), key=lambda index: -parts[index].num_bytes)
        rows = data.from_items([{"place": place} for place in order], override_num_blocks=len(parts))
        kept = list(parts)
        done = rows.map(_task, fn_args=(work, config, kept, out), num_cpus=1, concurrency=workers)
        for row in done.iter_rows():
            answer = row["answer"]
            if "error" in answer:
                raise getattr(errors, answer["error"])(answer["what"], where=answer["where"], hint=answer["hint"])
            yield parts[row["place"]], answer["record"]
    finally:
        if ours:
            ray.shutdown()


def _start(ray: Any, address: str | None, workers: int | None) -> None:
    """Join the cluster at `address`, or start one of this machine's that nobody else can reach."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    quiet = {"log_to_driver": False, "configure_logging": False}
    before = signal.getsignal(signal.SIGTERM)
    if address is None:
        ray.init(num_cpus=workers, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    else:
        ray.init(address=address, **quiet)
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray's own handler exits with code 15


def _task(row: dict[str, Any], work: Callable[..., Any], config: Any, parts: Sequence[Any], out: Path) -> Any:
    """One part, on whatever node it came to. The user's errors come back as data: Ray would wrap them in its own."""
    index = int(row["place"])
    try:
        answer = {"record": work(config, parts[index], out)}
    except BloomeryError as error:
        answer = {"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}
    return {"place": index, "answer": answer}


RECORDS = "parts"
SMALL_BYTES = 32 * 2**20
"""Less than this is done in this process where nobody says how many workers: two of them take 1.5 s to start."""

MOST_PATHS = 3
"""How many files of a part an error names."""
UNCAUGHT = 1
"""Exit code of a Python process that an exception has ended."""


class ExecutorConfig(Config):
    """Where the parts of a stage are worked on. The output is the same everywhere."""

    kind: Literal["local", "ray"] = "local"
    """Worker processes of this machine, or a Ray cluster."""
    workers: Annotated[int, Between(1, 4096, "each worker is a process")] | None = None
    """
    Number of worker processes. Not set: one for each core that this process may use; on Ray, as many as the cluster can
    run.
    """
    address: str | None = None
    """Address of a Ray cluster, in the form of `ray.init`. Not set: a local Ray that ends with the stage."""

    @model_validator(mode="after")
    def _an_address_is_of_a_cluster(self) -> "ExecutorConfig":
        if self.kind == "local" and self.address is not None:
            raise ValueError(f'address {self.address!r} is for a Ray cluster; also set kind = "ray"')
        return self


class Parallel(Config):
    """Base of the sections whose stages work on parts."""

    engine: ExecutorConfig = Field(ExecutorConfig(), json_schema_extra=VOLATILE)
    """Where workers process its parts. Without it, the stage uses the recipe's section [engine]."""

    def packages(self) -> tuple[str, ...]:
        return (*DATA, "ray") if self.engine.kind == "ray" else DATA


class Part(NamedTuple):
    """One piece of a stage's work."""

    name: str
    """Of its record, and of the files that it leaves: no other part of the same work has it."""
    inputs: Any
    """The input of the function in addition to the config: plain data."""
    num_bytes: int = 0
    """How much there is to do, for the progress and for the decision whether workers are worth their start."""


PartRecord = Mapping[str, Any]
"""JSON data. `files` lists what the part has written, relative to `out`; nothing in it may differ between runs."""

Work = Callable[[Any, Part, Path], PartRecord]


def run_parts(
    engine: ExecutorConfig, work: Work, config: Any, parts: Sequence[Part], out: Path, *, what: str, unit: str = "parts"
) -> list[PartRecord]:
    """
    Do the parts that are not done yet; returns the records of all of them, in the order of `parts`.

    `what` names the work within its folder. `work` is a function at the top of a module. Raises the BloomeryError that
    `work` raises, RuntimeError with the part's name for any other in a worker, and RunError, which names the part, for
    a worker that died.
    """
    names = [part.name for part in parts]
    assert len(set(names)) == len(names), f"two parts of {what} have one name"
    records: dict[str, PartRecord] = {}
    total, done = sum(max(1, part.num_bytes) for part in parts), 0
    with progress(what, unit, total=len(parts)) as meter:

        def take(chunk: Part, record: PartRecord) -> None:
            nonlocal done
            records[chunk.name], done = record, done + max(1, chunk.num_bytes)
            shown = {"percent": round(100 * done / total, 1)} if total > len(parts) else {}
            meter.at(len(records), **shown)

        for chunk in parts:
            if (known := _done(out, what, chunk.name)) is not None:
                take(chunk, known)
        meter.start_at(len(records))
        todo = [part for part in parts if part.name not in records]
        for chunk, finished in _run(engine, partial(_hashed, work), config, todo, out):
            core_records.save(_place(out, what, chunk.name), finished["record"], finished["outputs"])
            take(chunk, finished["record"])
    return [records[name] for name in names]


def _place(out: Path, what: str, name: str) -> Path:
    return out / RECORDS / what / f"{name}.json"


def _done(out: Path, what: str, name: str) -> PartRecord | None:
    """The record of a part whose files are all there as they were written, or None."""
    return core_records.load(_place(out, what, name), out, f"{what}: part {name}")


def _hashed(work: Work, config: Any, chunk: Part, out: Path) -> PartRecord:
    """A part's record, and its files with their sha256: taken by the worker, while the files are in memory."""
    record = work(config, chunk, out)
    return {"record": record, "outputs": core_io.listed(out, record["files"])}


def _run(
    engine: ExecutorConfig, work: Work, config: Any, parts: Sequence[Part], out: Path
) -> Iterator[tuple[Part, PartRecord]]:
    """Parts with their records, in the order in which they come to be done."""
    if not parts:
        return
    if engine.kind == "ray":
        yield from run(engine.address, engine.workers, work, config, parts, out)
        return
    workers = min(engine.workers or _default_workers(parts), len(parts))
    if workers == 1:
        for chunk in parts:
            yield chunk, work(config, chunk, out)
    else:
        yield from _run_in_workers(workers, work, config, parts, out)


def _default_workers(parts: Sequence[Part]) -> int:
    return cores() if sum(part.num_bytes for part in parts) >= SMALL_BYTES else 1


def check_workers(section: str, config: Parallel) -> None:
    """Raises HardwareError, before the first stage of a run, for more workers than this machine should start."""
    engine = config.engine
    if engine.workers is not None and engine.address is None:
        check_processes(engine.workers, f"{section}.engine.workers")


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


def _run_in_workers(
    count: int, work: Work, config: Any, parts: Sequence[Part], out: Path
) -> Iterator[tuple[Part, PartRecord]]:
    """Largest parts first, so that no large one is left for the end."""
    waiting = deque(sorted(parts, key=lambda chunk: -chunk.num_bytes))
    with ExitStack() as stack:
        busy: dict[Connection, tuple[_Worker, Part]] = {}
        for _ in range(count):
            worker = stack.enter_context(_started(work, config, out))
            busy[worker.pipe] = (worker, _give(worker, waiting.popleft()))
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, chunk = busy.pop(pipe)
                record = _answer(worker, chunk)
                if waiting:
                    busy[pipe] = (worker, _give(worker, waiting.popleft()))
                yield chunk, record


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


def _give(worker: _Worker, chunk: Part) -> Part:
    try:
        worker.pipe.send(chunk)
    except BrokenPipeError:
        raise _death(worker, chunk) from None
    return chunk


def _answer(worker: _Worker, chunk: Part) -> PartRecord:
    try:
        answer: dict[str, Any] = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        raise _death(worker, chunk) from None
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["what"], where=answer["where"], hint=answer["hint"])
    record: PartRecord = answer["record"]
    return record


def _death(worker: _Worker, chunk: Part) -> Exception:
    worker.process.join()
    code = worker.process.exitcode or 0
    if code == UNCAUGHT:  # which its process has written to stderr, with all lines
        return RuntimeError(f"part {chunk.name}: the lines above say where its worker failed")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    what = f"the worker on part {chunk.name} {how}"
    hint = "Run the same command again. Finished parts are kept. If it dies again"
    if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGFPE, -signal.SIGILL):
        hint += ", a library cannot read its input: the lines above say why. Write those files again, or remove them."
    else:
        hint += ", there may be too little memory: engine.workers=1 needs the least."
    return RunError(what, where=", ".join(_paths(chunk.inputs)), hint=hint)


def _paths(inputs: Any) -> list[str]:
    """The first files that a part names, for a person."""
    if isinstance(inputs, str | Path):
        return [str(inputs)[:200]]
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    paths = [path for value in values for path in _paths(value) if os.sep in path]
    return paths[:MOST_PATHS]


def _serve(pipe: Connection, parent: int, work: Work, config: Any, out: Path) -> None:
    """What a worker process does: parts, one after the other, until the pipe ends."""
    child.die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is left to the parent
    os.environ["RAYON_NUM_THREADS"] = "1"
    pa.set_cpu_count(1)
    with threadpool_limits(1):
        while True:
            try:
                chunk = pipe.recv()
            except EOFError:
                return
            pipe.send(_answered(work, config, chunk, out))


def _answered(work: Work, config: Any, chunk: Part, out: Path) -> dict[str, Any]:
    try:
        return {"record": work(config, chunk, out)}
    except BloomeryError as error:
        return error_facts(error)
    except Exception as error:
        if (short := errors.as_error(error)) is not None:
            return error_facts(short)
        raise


def error_facts(error: BloomeryError) -> dict[str, Any]:
    return {"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}


def ranked(numbers: Mapping[str, int]) -> dict[str, int]:
    """Numbers by name, the largest first, equal ones by name."""
    return dict(sorted(numbers.items(), key=lambda pair: (-pair[1], pair[0])))


class Counts:
    """
    Whole numbers by group and name, such as {"web": {"documents": 3, "kept": 2}}.

    A group is a domain or a source. It has each of `names` from its first count on, also where that stays 0.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._groups: dict[str, Counter[str]] = {}

    def __getitem__(self, group: str) -> Counter[str]:
        """The numbers of a group; of an unknown group none."""
        return self._groups.get(group, Counter())

    def add(self, group: str, numbers: Mapping[str, int]) -> None:
        """Add to the numbers of a group. A number may be negative."""
        if group not in self._groups:
            self._groups[group] = Counter(dict.fromkeys(self._names, 0))
        known = self._groups[group]
        for name, number in numbers.items():
            known[name] += number

    def merge(self, by_group: Mapping[str, Mapping[str, int]]) -> None:
        """Add what `to_json` returned for another part."""
        for group, numbers in by_group.items():
            self.add(group, numbers)

    def total(self) -> Counter[str]:
        whole: Counter[str] = Counter()
        for numbers in self._groups.values():
            whole.update(numbers)
        return whole

    def to_json(self, *, sort_groups: bool = True, by_number: bool = False) -> dict[str, dict[str, int]]:
        """
        JSON data: groups by name, or in the order of their first count.

        The names of the constructor come first, in their order, the others by name; or all by number, the largest
        first.
        """
        listed = sorted(self._groups) if sort_groups else self._groups
        return {group: ranked(self._groups[group]) if by_number else self._ordered(group) for group in listed}

    def _ordered(self, group: str) -> dict[str, int]:
        numbers = self._groups[group]
        return {name: numbers[name] for name in (*self._names, *sorted(numbers.keys() - set(self._names)))}
