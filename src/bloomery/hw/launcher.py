"""
How many processes may start here, and what a launcher such as torchrun says about this one. Needs no torch.

RANK and WORLD_SIZE count the processes of all machines, LOCAL_RANK and LOCAL_WORLD_SIZE those of this machine. These
are torchrun's names. `adopt` sets them from the variables of srun and mpirun.

Sources: the manual pages of srun (output environment variables) and of Open MPI, MVAPICH2 and MPICH's Hydra.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bloomery.core.errors import ConfigError, HardwareError

MAX_PROCESSES = 2**20
"""More than any machine, or group of machines, has."""
PROCESSES_A_CORE = 8
"""More of them compute nothing sooner, and each takes some hundred megabytes of memory."""


MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH2": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Of each mpirun: rank, size, local rank and local size. Intel MPI has the names of MPICH."""
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
"""Of a task of srun: rank, size, local rank. A batch script has a SLURM_PROCID too, but no size: it is no task."""
MAX_PARENTS = 32
FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Where jobs meet that name no port: below the ports that systems give to whoever asks for any."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One process among those that a launcher has started."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched(env: Mapping[str, str] | None = None) -> Launched | None:
    """
    None where no launcher has set WORLD_SIZE. Raises ConfigError, with the name of the variable, for a value that is no
    number or contradicts another one.
    """
    env = os.environ if env is None else env
    if "WORLD_SIZE" not in env:
        return None
    size = number("WORLD_SIZE", env, at_least=1)
    rank = number("RANK", env, *([] if size > 1 else [0]), below=size)
    local_size = number("LOCAL_WORLD_SIZE", env, size, at_least=1, below=size + 1)
    local_rank = number("LOCAL_RANK", env, min(rank, local_size - 1), below=min(local_size, rank + 1))
    return Launched(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def adopt(env: MutableMapping[str, str] | None = None) -> None:
    """
    Put what srun or mpirun says about this process under torchrun's names. Names that are set stay, so torchrun within
    a job of Slurm wins. One task alone sets nothing. Raises ConfigError for a variable that is missing or no number.
    """
    env = os.environ if env is None else env
    if "WORLD_SIZE" in env:
        return
    for tool, names in MPI.items():
        if names[0] in env and names[3] in env:
            rank, size, local_rank, local_size = (_task_number(name, env, tool) for name in names)
            hosts = "127.0.0.1" if local_size == size else ""
            job = env.get("PMIX_NAMESPACE") or (starter(names[0]) if hosts else _batch_job(env))
            cure = (
                f"With several machines, hand on the first one's name as MASTER_ADDR, in {tool} by an option of mpirun."
            )
            break
    else:
        if SLURM[1] not in env:
            return
        rank, size, local_rank = (_task_number(name, env, "srun") for name in SLURM)
        local_size = len(env["SLURM_GTIDS"].split(",")) if env.get("SLURM_GTIDS") else size
        hosts = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
        job = _batch_job(env)
        cure = "Set MASTER_ADDR to the first host."
    if size == 1:
        return
    if not (env.get("MASTER_ADDR") or hosts):
        raise ConfigError(f"MASTER_ADDR is not set, but there are {size} processes", where="environment", hint=cure)
    env.setdefault("MASTER_ADDR", hosts)
    env.setdefault("MASTER_PORT", str(port_of(job)))
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size, "WORLD_SIZE": size}
    env.update({name: str(value) for name, value in numbers.items()})


def _task_number(name: str, env: Mapping[str, str], tool: str) -> int:
    return number(name, env, hint=f"{tool} sets it. Start the command with {tool}, or unset its variables.")


def first_host(nodes: str) -> str:
    """The first of a list of Slurm's: "gpu[07-09,12],login" -> "gpu07"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def port_of(job: str) -> int:
    """
    The port where the processes of a job meet, the same on all of its machines. Jobs that run at the same time have
    numbers near each other. So NUMBER and NUMBER.STEP are not hashed: first steps of near jobs share no port.
    """
    if match := re.fullmatch(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?", job):
        return FIRST_PORT + (int(match[1]) + 1009 * int(match[2] or 0)) % NUM_PORTS
    return FIRST_PORT + int.from_bytes(job.encode(), "big") % NUM_PORTS


def _batch_job(env: Mapping[str, str]) -> str:
    """What a batch system calls this job and step: the same on all machines."""
    if "SLURM_JOB_ID" in env:
        return ".".join(filter(None, (env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID"))))
    return next((env[name] for name in ("PBS_JOBID", "LSB_JOBID", "JOB_ID") if name in env), "")


def starter(variable: str, proc: Path = Path("/proc")) -> str:
    """
    The process of the launcher of this machine: the first above this one without the variable that it sets, because
    scripts may stand between. "" where that is not seen.
    """
    process = os.getpid()
    for _ in range(MAX_PARENTS):
        try:
            stat = (proc / str(process) / "stat").read_bytes()
            process = int(stat.rpartition(b")")[2].split()[1])
            known = (proc / str(process) / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            return ""
        if not any(line.startswith(f"{variable}=".encode()) for line in known):
            return str(process)
    return ""


def num_processes(requested: int = 1) -> int:
    """How many processes train together: as many as a launcher has started, else `requested`. Raises as `launched`."""
    return requested if (process := launched()) is None or process.size == 1 else process.size


def address(env: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Where the processes meet: host and port. Raises ConfigError where the launcher does not say so."""
    env = os.environ if env is None else env
    if not env.get("MASTER_ADDR"):
        raise ConfigError("MASTER_ADDR is not set, but WORLD_SIZE is", where="environment", hint=CURE)
    return env["MASTER_ADDR"], number("MASTER_PORT", env, at_least=1, below=2**16)


TASK_FOLDER = "BLOOMERY_RANKS"
"""A variable of the environment: the folder where ranks find their task."""
BUSY, BUSY_SECONDS = "BLOOMERY_RANK_BUSY", 7200.0
"""A variable with the path of a file that is there while a rank saves what others would lose; how long it may."""


@contextmanager
def busy() -> Iterator[None]:
    """While the block runs, the process that started this rank does not end it because others have failed."""
    if BUSY not in os.environ:
        yield
        return
    note = Path(os.environ[BUSY])
    note.write_text(os.environ.get("RANK", "0"), encoding="utf-8")
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


FIRST_DIED, TAKEN_OVER = "first-rank-died", "taken-over"
"""Files in TASK_FOLDER: the process that started the ranks makes the first, and the rank that takes over the second."""
SECONDS_TO_HEAR = 2.0


def takes_over() -> bool:
    """
    Whether this rank does what the first one, which was killed, can do no more: one of the ranks that ask. Always false
    under a launcher that does not say which rank has died.
    """
    if TASK_FOLDER not in os.environ:
        return False
    folder = Path(os.environ[TASK_FOLDER])
    deadline = time.monotonic() + SECONDS_TO_HEAR
    while not (folder / FIRST_DIED).exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(SECONDS_TO_HEAR / 40)
    try:
        (folder / TAKEN_OVER).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


CURE = "Start the command with torchrun, srun, mpirun or `bloomery run --hosts`, or unset WORLD_SIZE."


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_processes(count: int, where: str) -> None:
    """Raises HardwareError for more processes than this machine can do anything with. `where` is the setting."""
    if count > (most := PROCESSES_A_CORE * cores()):
        what = f"{count} processes on {cores()} CPU cores; the limit is {most}, {PROCESSES_A_CORE} per core"
        raise HardwareError(what, where=where, hint=f"Set {where}={cores()}, or another number up to {most}.")


def number(
    name: str, env: Mapping[str, str], *default: int, at_least: int = 0, below: int = MAX_PROCESSES, hint: str = CURE
) -> int:
    """The whole number in a variable of the environment. Raises ConfigError for anything else."""
    if name not in env and default:
        return default[0]
    text = env.get(name, "")
    if text.isascii() and text.isdecimal() and len(text) < 10 and at_least <= int(text) < below:
        return int(text)
    said = f"{name}={text[:40]!r}" if name in env else f"{name} is not set"
    what = f"{said}, but must be an integer from {at_least} to {below - 1}"
    raise ConfigError(what, where="environment", hint=hint)
