"""
The ranks of one training run: join a process group, exchange tensors and JSON, share errors.

A process learns its rank from the environment, under torchrun's names. The names are RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. `train/launch.py` starts processes with the same names. CPU tensors go by gloo, and GPU
tensors by the vendor's library. Texts go as JSON, and nothing is pickled.

If a rank is lost, the others notice at the next exchange and raise a RunError.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

from bloomery.core import errors
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


class RankLostError(RunError):
    """Another rank is gone, so this rank cannot continue. Read the error of the other rank."""


@dataclass(frozen=True)
class World:
    """The ranks of one training. Whatever one of them calls here, all of them call, in the same order."""

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False)
    """Torch's handle of the connection. None: that which `joined` has opened."""

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
            return replace(self, group=dist.new_group(backend="gloo"))

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


def handed_out(number: int) -> Any:
    """The task of this number, as soon as the first rank has handed it out: after its data stages, in days maybe."""
    with _together("task"):
        _store().wait([f"task/{number}"], PATIENCE)
        return json.loads(_store().get(f"task/{number}"))


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
    if not (dist.is_available() and dist.is_gloo_available()):
        what = f"torch {torch.__version__} was built without torch.distributed, so {world.size} ranks cannot be had"
        raise HardwareError(what, hint="Train with one rank, or install another build of torch.")
    with _together("start"):
        store = c10d.PrefixStore(f"world/{number}", _store())
        dist.init_process_group(
            ",".join(f"{kind}:{backend}" for kind, backend in _backends().items()),
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=SILENCE,
        )
        _limit_gpus()
    try:
        yield world
    finally:
        dist.destroy_process_group()


def _limit_gpus() -> None:
    """Give the library for GPUs a limit of its own: it is opened with that of the CPU's."""
    if "cuda" in _backends():
        group = c10d.distributed_c10d._get_default_group()
        group._get_backend(torch.device("cuda"))._set_default_timeout(GPU_SILENCE)


def error_facts(error: BaseException) -> dict[str, str]:
    """An error as text, from which another process can raise it. A bug is raised only on its own rank."""
    if not isinstance(error, BloomeryError):
        hint = "Read its error. The same command resumes from the newest checkpoint."
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
        raise HardwareError(what, where="ranks", hint='Take as many ranks as there are GPUs, or device="cpu".')


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
            what = f"{ranks} ranks on this machine, but it has {torch.cuda.device_count()} GPUs"
            raise HardwareError(what, where=where, hint='Take as many ranks as there are GPUs, or device="cpu".')
    elif choice in ("auto", "mps") and torch.backends.mps.is_available():
        raise HardwareError(f"{ranks} ranks cannot share one Apple GPU", where=where, hint="Train with one rank.")
    else:
        launcher.check_processes(ranks, where)


def open_store() -> tuple[Any, int]:
    """A store where ranks of this machine meet, on the loopback interface, and its port, held by this process."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    handle = listening.detach()
    store = c10d.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=SILENCE, master_listen_fd=handle
    )
    return store, port


@cache
def _store() -> Any:
    """Where the ranks of this process's launcher meet. Cached: a process has one launcher."""
    host, port = launcher.address()
    elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = not elsewhere and os.environ["RANK"] == "0"
    store = c10d.TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=SILENCE)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return c10d.PrefixStore(f"bloomery/{attempt}", store)


def _backends() -> dict[str, str]:
    """Kind of device -> the library by which its numbers go to other ranks. `nccl` stands for RCCL on AMD."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        return {"cpu": "gloo", "cuda": "nccl"}
    return {"cpu": "gloo"}


_spoken = cache(_backends)


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


@contextmanager
def _together(what: str) -> Iterator[None]:
    """Report a broken connection (RuntimeError and its kin in torch) as its cause: another rank is gone."""
    try:
        yield
    except (RuntimeError, KeyError) as error:
        _lost(what, error)


def _lost(what: str, error: BaseException) -> NoReturn:
    first = str(error).strip().partition("\n")[0]
    hint = "Read the errors of the other ranks. The same command resumes from the newest checkpoint."
    raise RankLostError(
        f"another rank is gone ({what}: {first})", where=f"rank {os.environ.get('RANK')}", hint=hint
    ) from error
