"""
The ranks of one training run: join a process group, exchange tensors and JSON, share errors.

A process learns its rank from the environment, under torchrun's names. The names are RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. `train/launch.py` starts processes with the same names. CPU tensors go by gloo, and GPU
tensors by the vendor's library. Texts go as JSON, and nothing is pickled.

If a rank is lost, the others notice at the next exchange and raise a RunError. A rank that is frozen, or whose cable
is cut, closes no connection. So all ranks give signs of life (`LifeWatch`), and end soon after one stops.
"""

import atexit
import json
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from bloomery.core import errors
from bloomery.core import io as core_io
from bloomery.core.errors import BloomeryError, HardwareError, RunError
from bloomery.core.signals import Terminated
from bloomery.hw import launcher
from bloomery.hw import require_torch as require_torch

import torch
import torch.distributed as dist
from torch import Tensor

c10d: Any = dist
"""Its stores are not there in builds without torch.distributed, such as AMD's for Windows, where World.alone() is."""
SILENCE = timedelta(hours=2)
"""How long a rank waits for the others in the midst of training: longer than any save or evaluation."""
GPU_SILENCE = timedelta(minutes=10)
"""
How long GPUs wait for each other. They exchange within steps alone: ranks that wait for an evaluation, or a save, of
the first do so on the CPU. A kernel that waits cannot be asked why, so the process ends after this time.
"""
PATIENCE = timedelta(days=30)
"""How long a rank waits for the first to have something to train."""
JOIN = timedelta(minutes=10)
"""How long the ranks of one command may take to find each other."""
LAST_READ = timedelta(seconds=10)
"""How long the first waits at its end for ranks that read its last message."""
LIFE, LIFE_SECONDS = "BLOOMERY_RANK_SECONDS", 120
"""A variable of the environment, and its default: after so many seconds without a sign of life, a rank is lost."""
SECONDS_BETWEEN_SIGNS = 2.0
SILENT = "did not respond for"
"""What the error says of a rank that gives no signs of life."""
RESUMES = "Check its machine and network. The same command resumes, also with only the ranks that are left."


class RankLostError(RunError):
    """Another rank is gone, so this rank cannot continue. Read the error of the other rank."""


@dataclass(frozen=True)
class World:
    """The ranks of one training. Whatever one of them calls here, all of them call, in the same order."""

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False)
    """Torch's handle of the connection. None: that which `joined` has opened."""
    receivers: tuple[int, ...] = ()
    """A rank of each machine that has its own disk, and so needs copies of the first rank's files: hw/copies.py."""
    file_group: Any = field(default=None, compare=False)
    """Torch's handle of the connection between the first rank and the receivers."""

    @classmethod
    def alone(cls) -> "World":
        """One process without company: nothing is sent, and nothing is waited for."""
        return cls()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes, prints and decides."""
        return self.rank == 0

    def apart(self) -> "World":
        """The same ranks with a connection of their own, for a thread that speaks while training does."""
        if self.size == 1:
            return self
        with _together("connection"):
            return replace(self, group=dist.new_group(backend="gloo")).with_receivers(self.receivers)

    def with_receivers(self, receivers: Sequence[int]) -> "World":
        """The same ranks with a new connection from the first one to those that receive its files."""
        if not receivers:
            return self
        with _together("connection"):
            group = dist.new_group([0, *receivers], backend="gloo", timeout=SILENCE)
        return replace(self, receivers=tuple(receivers), file_group=group)

    def hand_over(self, piece: memoryview, source: int) -> None:
        """
        Copy bytes from `source` over those of the others in `file_group`: from the first rank to all receivers, or from
        a receiver to the first rank. Other ranks only take note.
        """
        numbers = torch.frombuffer(piece, dtype=torch.uint8)
        with _together("copy"):
            if source == 0 and self.rank in (0, *self.receivers):
                dist.broadcast(numbers, 0, group=self.file_group)
            elif source and self.rank == source:
                dist.send(numbers, 0, group=self.file_group)
            elif source and self.is_first:
                dist.recv(numbers, source, group=self.file_group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Put into a tensor its sum over all ranks, the same bits on each, and return it."""
        if self.size > 1:
            with _together("sum"):
                if tensor.device.type in _spoken():
                    dist.all_reduce(tensor, group=self.group)
                else:
                    moved = tensor.cpu()
                    dist.all_reduce(moved, group=self.group)
                    tensor.copy_(moved)
        return tensor

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """As `sum`, which continues while the caller computes. Returns what waits for it."""
        if self.size == 1 or tensor.device.type not in _spoken():
            self.sum(tensor)
            return lambda: None
        with _together("sum"):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait() -> None:
            with _together("sum"):
                work.wait()

        return wait

    def all_gather(self, tensor: Tensor) -> Tensor:
        """What every rank has, by rank, on every rank: tensors of one shape, on a device that ranks speak from."""
        if self.size == 1:
            return tensor[None]
        count, *rest = tensor.shape
        gathered = torch.empty((self.size * count, *rest), dtype=tensor.dtype, device=tensor.device)
        with _together("gather"):
            dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.group)
        return gathered.view(self.size, count, *rest)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send each rank its row of a tensor. Returns what all ranks have sent here, by rank, in the same shape."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor)
        with _together("exchange"):
            dist.all_to_all_single(received, tensor, group=self.group)
        return received

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum(torch.zeros(1))

    def any(self, value: bool) -> bool:
        """Whether it is so on at least one rank."""
        return bool(self.sum(torch.tensor([float(value)])).item()) if self.size > 1 else value

    def broadcast(self, value: Any) -> Any:
        """What the first rank says, as JSON, on every rank. The others' values are not looked at."""
        if self.size == 1:
            return value
        raw = _bytes(value) if self.is_first else torch.empty(0, dtype=torch.uint8)
        with _together("broadcast"):
            count = torch.tensor([len(raw)])
            dist.broadcast(count, 0, group=self.group)
            if not self.is_first:
                raw = torch.empty(int(count), dtype=torch.uint8)
            dist.broadcast(raw, 0, group=self.group)
        return json.loads(raw.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """What every rank says, as JSON, by rank, on every rank."""
        if self.size == 1:
            return [value]
        raw = _bytes(value)
        counts = self.sum(torch.zeros(self.size, dtype=torch.int64).index_fill_(0, torch.tensor([self.rank]), len(raw)))
        padded = torch.zeros(int(counts.max()), dtype=torch.uint8)
        padded[: len(raw)] = raw
        said = [torch.empty_like(padded) for _ in range(self.size)]
        with _together("gather"):
            dist.all_gather(said, padded, group=self.group)
        return [json.loads(one[: int(n)].numpy().tobytes()) for one, n in zip(said, counts, strict=True)]

    @contextmanager
    def alike(self) -> Iterator[None]:
        """
        An error that the block raises on one rank is raised on all ranks at its end. Otherwise the other ranks would
        wait in a collective that the failed rank never joins. Within the block, ranks do not communicate, or only in
        calls that fail on all of them. An interrupt passes through.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
        except (KeyboardInterrupt, Terminated):
            raise
        except BaseException as error:  # one that is no Exception would leave the others waiting as well
            self.gather(error_facts(error))
            raise
        for facts in self.gather(None):
            if facts is not None:
                raise heard(facts)


def launched_world(env: Mapping[str, str] | None = None) -> World | None:
    """
    The rank that a launcher has given to this process, or None where none has. Raises ConfigError for words that make
    no sense together. No contact is made.
    """
    process = launcher.launched(env)
    return None if process is None else World(process.rank, process.size)


def hand_out(number: int, task: Any) -> None:
    """Tell the other ranks, which wait in `handed_out`, the task of this number. To be called by the first."""
    with _together("task"):
        _store().set(f"task/{number}", json.dumps(task))


def stop_watching() -> None:
    """Blame no rank from now on: ranks end one by one."""
    for watch in _watches:
        watch.rest()


def handed_out(number: int) -> Any:
    """The task of this number, as soon as the first rank has handed it out: after its data stages, in days maybe."""
    with _together("task"):
        _store().wait([f"task/{number}"], PATIENCE)
        return json.loads(_store().get(f"task/{number}"))


def leave() -> None:
    """Tell the first rank that this one reads nothing more of its store, which ends with it."""
    world = launched_world()
    assert world is not None
    with suppress(RuntimeError):  # it has ended
        _store().set(f"left/{world.rank}", "")


def wait_for_readers() -> None:
    """Wait for a moment until all others have called `leave`. To be called by the first before it ends."""
    world = launched_world()
    assert world is not None
    if not _store_is_elsewhere():
        with suppress(RuntimeError):  # of one that is gone nothing is heard
            _store().wait([f"left/{rank}" for rank in range(1, world.size)], LAST_READ)


@contextmanager
def joined(number: int = 0) -> Iterator[World]:
    """
    The world of this process while the block runs. `number` tells apart the worlds that a process joins one after
    another. Raises HardwareError where this torch cannot do it.
    """
    world = launched_world()
    if world is None or world.size == 1:
        yield World.alone()
        return
    _check_available(f"{world.size} ranks need", "Use one rank")
    with _together("start"):
        store = c10d.PrefixStore(f"world/{number}", _store())
        dist.init_process_group(
            _libraries(),
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=SILENCE,
        )
        _limit_gpus()
    try:
        yield world
    finally:
        stop_watching()  # a rank may still rescue weights when others have ended
        dist.destroy_process_group()


@contextmanager
def joined_alone() -> Iterator[None]:
    """A process group of this process alone while the block runs: FSDP2 needs one. Raises HardwareError as `joined`."""
    _check_available("offloading needs", 'Set offload="none"')
    dist.init_process_group(_libraries(), store=c10d.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_available(needed_by: str, fix: str) -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        what = f"torch {torch.__version__} was built without torch.distributed, which {needed_by}"
        raise HardwareError(what, hint=f"{fix}, or install another build of torch.")


def _limit_gpus() -> None:
    """Give the library for GPUs a limit of its own: it is opened with that of the CPU's."""
    if "cuda" in _backends():
        group = c10d.distributed_c10d._get_default_group()
        group._get_backend(torch.device("cuda"))._set_default_timeout(GPU_SILENCE)


def error_facts(error: BaseException) -> dict[str, str]:
    """An error as text, from which another process can raise it. A bug is raised only on its own rank."""
    if not isinstance(error, BloomeryError):
        hint = "Read the error of that rank. The same command resumes from the newest checkpoint."
        error = RankLostError(f"another rank had to stop: {type(error).__name__}: {error}", hint=hint)
    return {"kind": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}


def heard(facts: Mapping[str, str]) -> BloomeryError:
    """The error that another process has `told`."""
    kind = RankLostError if facts["kind"] == "RankLostError" else getattr(errors, facts["kind"], RunError)
    error: BloomeryError = kind(facts["what"], where=facts["where"], hint=facts["hint"])
    return error


def ranks_here(world: World) -> int:
    """How many of the ranks are on this machine."""
    process = launcher.launched()
    return world.size if process is None else process.local_size


def check_devices(world: World, device: torch.device) -> None:
    """
    Raises HardwareError where ranks of this machine would have to share a GPU. Some launchers show each rank another
    GPU as its only one, so the numbers that are built into GPUs are compared.
    """
    if device.type != "cuda" or world.size == 1:
        check_ranks(ranks_here(world), device.type, "ranks")
        return
    label = f"{socket.gethostname()} {_identity(device)}"
    shared = world.gather(label)
    if len(set(shared)) < len(shared):
        first = next(label for label in shared if shared.count(label) > 1)
        ranks = [str(rank) for rank, other in enumerate(shared) if other == first]
        what = f"ranks {' and '.join(ranks)} have the same GPU ({first})"
        raise HardwareError(what, where="ranks", hint='Use at most one rank for each GPU, or set device="cpu".')


def _identity(device: torch.device) -> str:
    """What tells a GPU from others of this machine: its UUID, or its position on the bus."""
    facts = torch.cuda.get_device_properties(device)
    names = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")
    known = [str(getattr(facts, name)) for name in names if getattr(facts, name, None) is not None]
    return " ".join(known) or str(device)


def check_ranks(ranks: int, choice: str, where: str) -> None:
    """
    Raises HardwareError for more ranks, all started here, than this machine has GPUs, or without a GPU, than its CPU
    can do anything with. Nothing is started, and no GPU is touched. `where` is the setting that says how many.
    """
    if ranks == 1:
        return
    if choice in ("auto", "cuda") and torch.cuda.is_available():
        if ranks > torch.cuda.device_count():
            what = f"{ranks} ranks are set, but this machine has {torch.cuda.device_count()} GPUs"
            raise HardwareError(what, where=where, hint='Use at most one rank for each GPU, or set device="cpu".')
    elif choice in ("auto", "mps") and torch.backends.mps.is_available():
        raise HardwareError(f"{ranks} ranks cannot share one Apple GPU", where=where, hint="Use one rank.")
    else:
        launcher.check_processes(ranks, where)


def open_store() -> tuple[Any, int]:
    """A store where ranks of this machine meet, on the loopback interface, and its port, held by this process."""
    _check_available("ranks need", 'Use one rank, with offload="none"')
    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    handle = listening.detach()
    store = c10d.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=SILENCE, master_listen_fd=handle
    )
    return store, port


def _store_is_elsewhere() -> bool:
    """Whether a launcher holds it, and not the first rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def _store() -> Any:
    """Where the ranks of this process's launcher meet. Cached: a process has one launcher."""
    host, port = launcher.address()
    elsewhere = _store_is_elsewhere()
    hosts = not elsewhere and os.environ["RANK"] == "0"
    try:
        store = c10d.TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=JOIN)
        store.set_timeout(SILENCE)
        own = c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=JOIN)
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        what = f"{'cannot listen' if hosts else 'the first rank does not answer'}: {first}"
        hint = "Set MASTER_ADDR to the first machine, and MASTER_PORT to a free port on it that the others can reach."
        raise RunError(what, where=f"{host}:{port}", hint=hint) from None
    process = launcher.launched()
    assert process is not None
    watch = LifeWatch(own, World(process.rank, process.size), process.local_size < process.size)
    _watches.append(watch)
    kept = elsewhere and launcher.TASK_FOLDER not in os.environ
    if kept and process.rank:
        hello = f"{process.rank}/{secrets.token_hex(8)}"
        store.set(f"hello/{process.rank}", hello)
        with _together("welcome"):
            store.wait([f"welcome/{hello}"], JOIN)
        watch.attempt = store.get(f"welcome/{hello}").decode()
    elif kept:
        watch.attempt = secrets.token_hex(8)
    watch.start()
    return c10d.PrefixStore(watch.attempt, store)


def meet() -> None:
    """
    Find the other ranks, and watch over each other from now on: the first may have days of other work before it hands
    out a task. Raises RunError where the first one's address cannot be had or reached.
    """
    with _together("start"):
        _store()


class LifeWatch:
    """
    Signs of life. Each rank tells the store every SECONDS_BETWEEN_SIGNS what it does. The first rank looks at all of
    them, and says so where a rank is lost; the others look at the first one's. A rank that waits for a lost one waits
    within torch, where nothing reaches it. So the watch ends the process with exit code 2, and an error that names the
    rank and its last collective. Looks are counted and not seconds, because a process that was stopped missed some.
    """

    def __init__(self, store: Any, world: World, several_machines: bool) -> None:
        """`store` is a connection of its own. On one machine the store cannot be out of reach."""
        self.attempt = "bloomery"
        """
        What keys begin with. torchrun keeps its store when it begins again, and its agents count attempts differently.
        So the first rank takes a new name, and tells it to all who say hello.
        """
        self._root, self._store, self._world, self._several = store, store, world, several_machines
        self.collective, self._count, self.verdict = "start", 0, ""
        self._looks, self._resting, self._wide = 0, False, world.is_first
        self._leaves, self._threads = threading.Event(), list[threading.Thread]()
        self._seen: dict[int, tuple[str, int]] = {}
        """Rank -> its last sign ("" for none yet), and how many looks ago it was new."""
        limit = launcher.number(LIFE, os.environ, LIFE_SECONDS, at_least=10, below=86_401, hint=f"Unset {LIFE}.")
        self._patience = limit / SECONDS_BETWEEN_SIGNS

    def start(self) -> None:
        self._store = c10d.PrefixStore(self.attempt, self._root)
        if self._world.is_first:
            self._store.set("lost", "")
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._give_signs, self._mind_store)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """Give no more signs. A thread that asks the store while Python ends would abort the process."""
        self._leaves.set()
        for thread in self._threads:
            thread.join(3 * SECONDS_BETWEEN_SIGNS)

    def enter(self, collective: str, *, again: bool = False) -> None:
        """Remember where this rank is: "" within no collective, or `again` within one that it has not left."""
        if threading.current_thread() is threading.main_thread():
            self.collective, self._count = collective, self._count + (bool(collective) and not again)
            self._resting = False

    def rest(self) -> None:
        """Blame no rank, and give signs that ask for no others: this rank has left the training."""
        self._resting, self.collective = True, ""

    def lost(self) -> str:
        """Which ranks no longer give signs, or are behind all others; "" where that is not known in a few looks."""
        self._wide, before = True, self._looks
        deadline = time.monotonic() + 6 * SECONDS_BETWEEN_SIGNS
        while self._looks < before + 4 and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_SIGNS / 10)
        if self._looks == before:
            return "the first rank, or the way to it"
        signs = dict(self._seen)
        silent = [rank for rank, (sign, looks) in signs.items() if sign and looks >= 2]
        counts = {rank: int(sign.split()[1]) for rank, (sign, _) in signs.items() if sign}
        behind = [rank for rank, count in counts.items() if count < max(counts.values())]
        return " and ".join(self._named(rank) for rank in silent or behind)

    def _sign(self) -> str:
        where = self.collective or "none"
        return f"{self._looks} {self._count} {where} {socket.gethostname()} {os.getpid()} {int(self._resting)}"

    def _named(self, rank: int) -> str:
        sign, _ = self._seen[rank]
        if not sign:
            return f"rank {rank}"
        _, count, collective, host, process, _ = sign.split()
        where = f"within {collective}" if collective != "none" else "after collective"
        return f"rank {rank} ({host}, process {process}, {where} {count})"

    def _give_signs(self) -> None:
        while not self._leaves.is_set():
            with suppress(RuntimeError):  # the store is gone, as at the end; if not, `_mind_store` ends the process
                self._store.set(f"sign/{self._world.rank}", self._sign())
                self._look()
                self._looks += 1
            self._leaves.wait(SECONDS_BETWEEN_SIGNS)

    def _welcome(self) -> None:
        """Tell the name of this attempt to the ranks that are not there yet. Earlier hellos have no reader."""
        for rank in range(1, self._world.size):
            if not self._seen.get(rank, ("", 0))[0] and self._root.check([f"hello/{rank}"]):
                self._root.set(f"welcome/{self._root.get(f'hello/{rank}').decode()}", self.attempt)

    def _look(self) -> None:
        looked_at = range(self._world.size) if self._wide else [0]
        if self._world.is_first:
            self._welcome()
        there = [rank for rank in looked_at if self._seen.get(rank, ("", 0))[0] or self._store.check([f"sign/{rank}"])]
        signs = (
            dict(zip(there, self._store.multi_get([f"sign/{rank}" for rank in there]), strict=True)) if there else {}
        )
        for rank in looked_at:
            sign, (before, looks) = signs.get(rank, b"").decode(), self._seen.get(rank, ("", 0))
            self._seen[rank] = (sign, looks + 1 if sign == before else 0)
            if self._resting or sign.endswith(" 1"):
                continue
            patience = self._patience if sign else JOIN.total_seconds() / SECONDS_BETWEEN_SIGNS
            judged = (rank == 0) != self._world.is_first
            if judged and self._seen[rank][1] > patience:
                seconds = round(patience * SECONDS_BETWEEN_SIGNS)
                what = f"{self._named(rank)} {SILENT} {seconds} s"
                if self._world.is_first:
                    self.verdict = what
                    self._store.set("lost", what)
                    time.sleep(2 * SECONDS_BETWEEN_SIGNS)  # in which the others hear of it
                    if self._resting:  # the wait has ended otherwise: weights may be on their way to disk
                        continue
                self._end(what)
        if not self._world.is_first and self._store.check(["lost"]) and (what := self._store.get("lost").decode()):
            self._end(what)

    def _mind_store(self) -> None:
        """End the process where the store does not answer, which blocks whoever asks it."""
        looks, silent = -1, 0
        while self._several and not self._leaves.wait(SECONDS_BETWEEN_SIGNS):
            silent = silent + 1 if looks == self._looks else 0
            looks = self._looks
            if silent > self._patience and not self._resting:
                host, port = launcher.address()
                self._end(f"the machine of the first rank ({host}:{port}) did not answer for {silent * 2} s")

    def _end(self, what: str) -> NoReturn:
        where = f"rank {self._world.rank}"
        error = RankLostError(what, where=f"{where}, in {self.collective}" if self.collective else where, hint=RESUMES)
        if folder := os.environ.get(launcher.TASK_FOLDER):
            core_io.write_json(Path(folder) / f"{self._world.rank}.json", {"error": error_facts(error)})
        else:
            errors.tell(f"error: {error}")
        os._exit(2)


_watches: list[LifeWatch] = []
"""That of this process, as soon as it has met the others."""


def _backends() -> dict[str, str]:
    """Kind of device -> the library by which its numbers go to other ranks. `nccl` stands for RCCL on AMD."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        return {"cpu": "gloo", "cuda": "nccl"}
    return {"cpu": "gloo"}


def _libraries() -> str:
    """All of them, as torch.distributed wants to hear it: numbers that are kept on the host go to other ranks too."""
    return ",".join(f"{kind}:{backend}" for kind, backend in _backends().items())


_spoken = cache(_backends)


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


@contextmanager
def _together(what: str) -> Iterator[None]:
    """Report a broken connection (RuntimeError and its kin in torch) as its cause: another rank is gone."""
    around = next((watch.collective for watch in _watches), "")
    for watch in _watches:
        watch.enter(what)
    try:
        yield
    except (RuntimeError, KeyError) as error:
        _lost(what, error)
    for watch in _watches:  # one that began within stands in "start"
        watch.enter(around, again=True)


@contextmanager
def exchanging(what: str = "") -> Iterator[None]:
    """
    Within the block, torch exchanges parts of a model by itself: `what`, in one word, or now and then. Report a broken
    connection as its cause, by the name of the collective, and let every other error pass.
    """
    for watch in _watches:
        watch.enter(what)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in BROKEN):
            _lost(_collective(error) or what or "exchange", error)
        raise
    for watch in _watches:
        watch.enter("")


BROKEN = ("/gloo/transport/", "Connection closed by peer", "Connection reset by peer", "NCCL error")
"""What texts of a RuntimeError say of a connection."""
COLLECTIVES = {
    "all-gather": ("all_gather", "unshard", "_to_replicate"),
    "reduce-scatter": ("reduce_scatter", "foreach_reduce", "_reduce_shard"),
    "all-reduce": ("all_reduce", "_reduce_value"),
}
"""Names -> what functions of torch that run them are called."""


def _collective(error: BaseException) -> str:
    """That which an error comes from, by the innermost function that tells; "" for none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for name, signs in COLLECTIVES.items():
            if any(sign in frame.name for sign in signs):
                return name
    return ""


def _lost(what: str, error: BaseException) -> NoReturn:
    first = str(error).strip().partition("\n")[0]
    stop_watching()
    parent = launcher.TASK_FOLDER in os.environ  # which knows better
    if verdict := next((watch.verdict for watch in _watches if watch.verdict), ""):
        raise RankLostError(verdict, where=f"rank {os.environ.get('RANK')}, in {what}", hint=RESUMES) from error
    named = "".join(watch.lost() for watch in _watches if not parent)
    hint = "Read the errors of the other ranks. The same command resumes from the newest checkpoint."
    raise RankLostError(
        f"lost {named or 'another rank'} ({what}: {first})", where=f"rank {os.environ.get('RANK')}", hint=hint
    ) from error
