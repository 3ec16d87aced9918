"""
Try each kernel implementation in a child process, and save the results for later runs.

A trial checks one implementation of one kernel that training uses. A child prints its answers as lines of JSON,
each as soon as it is known. The child's exit status and the missing lines tell the rest. Nothing here needs torch.

Saved results are filed by chip, driver, torch, Triton and environment. When any of these changes, the results no
longer count, and the machine is tried again. A run takes the fastest implementation of each kernel that passed. A
run does not start if a kernel has no such implementation.

"""

import hashlib
import json
import math
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from bloomery.core import native as core_native
from bloomery.core.errors import HardwareError
from bloomery.core.io import canonical, write_json
from bloomery.core.records import read_record
from bloomery.hw.host import CommandResult, Host, cpu_features, find_gpus

OWN = "triton"
"""The implementation by kernels of our own, in the words of trials."""

TrialStatus = Literal["passed", "failed", "absent"]

FUSED = "bloomery.model.kernels.trials"
FLEX = "attention-flex"
"""The trial of the attention that torch compiles for a mask: long packed sequences, windows, ALiBi."""
VARLEN = "attention-varlen"
"""The trial of torch's flash attention over documents that lie one after another, which competes with the former."""
FUSED_ATTENTION = ("flash", "efficient", "cudnn")
"""Implementations of attention that keep no number for each pair of tokens."""
EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
"""Opens AMD's fused attention on chips for which its makers call it experimental. What passes here is used."""
NEXT_TRIAL = "next trial\n"
"""The line before the answers of each trial of a child process that has several."""
LIMIT_SECONDS, FURTHER_LIMIT_SECONDS = 120.0, 10.0
"""Of a trial, and of each trial in a child process that has several."""
COMPILE_LIMIT_SECONDS = 300.0
LARGEST_ERROR = {"bfloat16": 0.02, "float16": 0.01, "float32": 1e-3}
"""Relative, of forward passes. Rounding gives a fifth of it or less; gradients pass by several roundings."""
GRADIENT_FACTOR = 2.0
FLIPPED_COSINE = -0.5


@dataclass(frozen=True, kw_only=True)
class KernelName:
    kernel: str
    implementation: str = ""
    """"" where there is only one."""

    @property
    def name(self) -> str:
        return f"{self.kernel}-{self.implementation}" if self.implementation else self.kernel


@dataclass(frozen=True, kw_only=True)
class KernelTrial(KernelName):
    """One way to compute something, and the program that tries it."""

    module: str = "bloomery.hw.probes"
    probe: str = ""
    """The program's word for it, where that is not `name`."""
    env: Mapping[str, str] = field(default_factory=dict)
    limit_seconds: float = LIMIT_SECONDS


@dataclass(frozen=True, kw_only=True)
class TrialResult(KernelName):
    status: TrialStatus
    why: str
    milliseconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def trials(vendor: str) -> list[KernelTrial]:
    """What is tried on a device of a vendor, in the words of `Device.vendor`."""
    launch = KernelTrial(kernel="launch")
    norm = KernelTrial(kernel="rms-norm", implementation="torch", probe="rms-norm")
    entropy = KernelTrial(kernel="cross-entropy", implementation="torch", probe="cross-entropy")
    block = KernelTrial(kernel="block", implementation="compiled", limit_seconds=COMPILE_LIMIT_SECONDS)
    training = KernelTrial(kernel="training")
    ends = [norm, entropy, block, training]
    if vendor == "apple":
        return [launch, KernelTrial(kernel="matmul"), KernelTrial(kernel="attention", implementation="math"), *ends]
    if vendor == "cpu":
        native = [
            KernelTrial(kernel=kernel, implementation="native", module="bloomery.model.kernels.trials", probe=kernel)
            for kernel in ("attention", "rms-norm", "cross-entropy")
        ]
        attention = [KernelTrial(kernel="attention", implementation=name) for name in ("flash", "math")]
        # torch.compile has no trial: it takes longest of all, and a run compares compiled blocks with plain ones itself
        of_torch = [one for one in ends if one.kernel not in REPLACEABLE]
        return [launch, KernelTrial(kernel="matmul"), *attention, *of_torch, *native]
    blas = ("hipblas", "hipblaslt") if vendor == "amd" else ("cublas", "cublaslt")
    products = [
        KernelTrial(kernel="matmul", implementation=name, probe=f"matmul-blas{'lt' if name.endswith('lt') else ''}")
        for name in blas
    ]
    kinds = ("flash", "efficient", "math") if vendor == "amd" else ("flash", "efficient", "cudnn", "math")
    attention = [
        KernelTrial(
            kernel="attention",
            implementation=kind,
            env={EXPERIMENTAL: "1"} if vendor == "amd" and kind in FUSED_ATTENTION else {},
        )
        for kind in kinds
    ]
    varlen = KernelTrial(kernel=VARLEN, env=attention[0].env)
    flex = KernelTrial(kernel=FLEX, limit_seconds=COMPILE_LIMIT_SECONDS)
    kernels = ("cross-entropy", "rotary", "rotary-norm", "gemv-int8", "gemv-int4", "gemv-nf4")
    of_torch = [KernelTrial(kernel=kernel, implementation="torch") for kernel in kernels]
    ours = [
        KernelTrial(kernel=kernel, implementation=OWN, limit_seconds=COMPILE_LIMIT_SECONDS)
        for kernel in ("rms-norm", *kernels)
    ]
    rest = [*products, *attention[:-1], varlen, attention[-1], norm, *of_torch, training, flex, *ours, block]
    return [launch, *(replace(trial, module=FUSED) for trial in rest)]


def command(host: Host, trial: KernelTrial) -> list[str]:
    """The line that tries it, which a person can paste too."""
    words = [f"{name}={value}" for name, value in trial.env.items() if name != EXPERIMENTAL or name not in host.env]
    python = [host.python, "-X", "faulthandler", "-m", trial.module, trial.probe or trial.name]
    return ["env", *words, *python] if words else python


def attempt(host: Host, trial: KernelTrial) -> TrialResult:
    return judge(trial, host.run(command(host, trial), trial.limit_seconds))


def answers(reply: CommandResult) -> list[dict[str, Any]]:
    """The lines of JSON that a child process wrote. One that it was writing when it died is left out."""
    lines = [line for line in reply.out.splitlines() if line.startswith("{") and line.endswith("}")]
    return [json.loads(line) for line in lines]


def merged(reply: CommandResult) -> dict[str, Any]:
    """All that a child process said, as one dictionary."""
    return {key: value for answer in answers(reply) for key, value in answer.items()}


def ending(reply: CommandResult) -> str:
    """How a child process ended, in words."""
    if reply.code is None:
        return "timed out"
    if reply.code < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"was killed by signal {-reply.code} ({names.get(-reply.code, 'unknown')})"
    last = reply.err.strip().splitlines()[-1:] or ["no message"]
    return f"failed: {last[0]}"


def judge(trial: KernelTrial, reply: CommandResult) -> TrialResult:
    """What a child's answers and its end say of an implementation."""
    metrics = merged(reply)

    def outcome(status: TrialStatus, why: str) -> TrialResult:
        took = metrics.get("milliseconds")
        milliseconds = round(took, 4) if took is not None else None
        return TrialResult(
            kernel=trial.kernel, implementation=trial.implementation, status=status, why=why, milliseconds=milliseconds
        )

    wrong = list(_wrong(answers(reply), metrics.get("dtype", "float32")))
    if wrong:
        return outcome("failed", wrong[0])
    if reply.code != 0:
        where = f" at {metrics['trying']}" if "trying" in metrics else ""
        return outcome("failed", f"{ending(reply)}{where}")
    if "absent" in metrics:
        return outcome("absent", metrics["absent"])
    if trial.kernel == "training":
        return outcome(*_learned(metrics))
    cases = [answer for answer in answers(reply) if "case" in answer]
    if not cases:
        return outcome("failed", "ended without an answer")
    return outcome("passed", f"relative error at most {max(case['error'] for case in cases):.2g}")


def _learned(metrics: Mapping[str, Any]) -> tuple[TrialStatus, str]:
    first, last = metrics.get("first_loss", math.nan), metrics.get("last_loss", math.nan)
    if last < first / 2:
        return "passed", f"loss {first:.3f} → {last:.3f} in 60 steps"
    return "failed", f"loss {first:.3f} → {last:.3f} in 60 steps, but must halve"


def _wrong(messages: Sequence[Mapping[str, Any]], dtype: str) -> Iterator[str]:
    """What is wrong with the numbers of each case, in the words of its most telling symptom."""
    for answer in messages:
        if "case" not in answer:
            continue
        case, error = answer["case"], answer["error"]
        limit = LARGEST_ERROR.get(dtype, 1e-3) * (GRADIENT_FACTOR if "gradient" in case else 1.0)
        if answer["unwritten"] > 0:
            yield f"{case}: leaves {answer['unwritten']:.0%} of its output unwritten"
        elif answer["zeros"]:
            yield f"{case}: returns zeros"
        elif not answer["finite"]:
            yield f"{case}: returns NaN or infinity"
        elif answer["cosine"] < FLIPPED_COSINE:
            yield f"{case}: has the wrong sign (cosine {answer['cosine']:.2f})"
        elif not error <= limit:
            yield f"{case}: relative error {error:.2g}, where {limit:.2g} is allowed"


if sys.platform != "win32":
    import fcntl

SWITCHES = re.compile(
    r"(HSA|HIP|ROCR?|ROCM|CUDA|NVIDIA|NCCL|RCCL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|MIOPEN|HIPBLASLT|AOTRITON|FLASH_ATTENTION)_\w+"
    r"|BLOOMERY_NATIVE|AMD_SERIALIZE_KERNEL|GPU_MAX_HW_QUEUES|LD_LIBRARY_PATH"
)
"""Variables of the environment that can change what a kernel computes."""
WITHOUT_EFFECT = re.compile(
    r"TORCHELASTIC_\w+|TORCH_LOGS\w*|TORCH_NCCL_ASYNC_ERROR_HANDLING|(NCCL|RCCL)_\w+|\w+_CACHE_(DIR|PATH)"
)
"""Of those: what says where files are, and how ranks talk. A scheduler gives each job another."""
VISIBLE = re.compile(r"\w+_VISIBLE_DEVICES")
NATIVE = "native"
"""The implementation by the compiled library."""
REPLACEABLE = ("block", FLEX, VARLEN)
"""Kernels that only have implementations which a run can do without."""


def identity(host: Host, vendor: str) -> Mapping[str, object]:
    """What trials on a device of this vendor depend on."""
    from bloomery.hw import torch_install

    have, packages = torch_install.installed(host), torch_install.distributions(host)
    tritons = [one for name, one in packages.items() if name in ("triton", "triton-rocm", "pytorch-triton-rocm")]
    model = re.search(r"^model name\s*:\s*(.*)$", host.read("proc/cpuinfo") or "", re.MULTILINE)
    features = hashlib.sha256(" ".join(sorted(cpu_features(host))).encode()).hexdigest()[:8]
    nvidia = re.search(r"\d+\.\d+[.\d]*", host.read("proc/driver/nvidia/version") or "")
    amdgpu = (host.read("sys/module/amdgpu/version") or "").strip()
    chips = [f"{gpu.maker} {gpu.target or gpu.name}".strip() for gpu in find_gpus(host)]

    def counts(name: str, value: str) -> bool:
        if not SWITCHES.fullmatch(name) or WITHOUT_EFFECT.fullmatch(name) or (name, value) == (EXPERIMENTAL, "1"):
            return False
        return len(set(chips)) > 1 or not VISIBLE.fullmatch(name)  # of GPUs that are alike, any may be tried

    return {
        "vendor": vendor,
        "chip": chips,
        "trials": [trial.name for trial in trials(vendor)],
        "processor": f"{model[1] if model else host.processor} {features}",
        "driver": " ".join([host.kernel or host.system, amdgpu, nvidia[0] if nvidia else ""]).strip(),
        "torch": have.version if have else "",
        "triton": sorted(f"{one.name} {one.version}" for one in tritons),
        "native": core_native.digest(core_native.FOLDER),
        "environment": {name: value for name, value in sorted(host.env.items()) if counts(name, value)},
    }


def outcomes_file(host: Host, vendor: str) -> Path | None:
    """The file in which the outcomes of this machine, as it is now, are or would be; None where nothing is kept."""
    if host.cache is None:
        return None
    return host.cache / "probes" / f"{hashlib.sha256(canonical(identity(host, vendor))).hexdigest()[:16]}.json"


class SavedOutcome(TypedDict):
    kernel: str
    implementation: str
    status: TrialStatus
    why: str
    milliseconds: NotRequired[float | None]


class Saved(TypedDict):
    """What `save` leaves."""

    identity: dict[str, Any]
    outcomes: list[SavedOutcome]


def save(host: Host, vendor: str, outcomes: Sequence[TrialResult]) -> None:
    file = outcomes_file(host, vendor)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, host, vendor, outcomes)


def write(file: Path, host: Host, vendor: str, outcomes: Sequence[TrialResult]) -> None:
    write_json(file, {"identity": identity(host, vendor), "outcomes": [one.as_json() for one in outcomes]})


def load(host: Host, vendor: str) -> list[TrialResult] | None:
    """The outcomes of this machine as it is now; None where it was not tried."""
    file = outcomes_file(host, vendor)
    return None if file is None else read(file, host, vendor)


def read(file: Path, host: Host, vendor: str) -> list[TrialResult] | None:
    """The outcomes in a file; None where there is none, or where it is of another machine or other software."""
    if not file.is_file():
        return None
    saved = read_record(file, Saved, fix="Remove that file, and the machine is tried again.")
    if canonical(saved["identity"]) != canonical(identity(host, vendor)):
        return None
    return [TrialResult(**one) for one in saved["outcomes"]]


@contextmanager
def alone(host: Host) -> Iterator[None]:
    """Let one process at a time try a machine: each of several ranks asks for it."""
    if host.cache is None or sys.platform == "win32":
        yield
        return
    (host.cache / "probes").mkdir(parents=True, exist_ok=True)
    with (host.cache / "probes" / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tried(host: Host, vendor: str) -> Iterator[TrialResult]:
    """
    Results of the trials, each as soon as it is known. Where the first trial, a sum, fails, no other is tried, because
    each would hang too. Trials that take about as long share a child process, because to import torch takes longer
    than most of them.
    """
    listed = trials(vendor)

    def kind(trial: KernelTrial) -> object:
        alone = trial is listed[0] and vendor != "cpu"
        return alone, trial.module, tuple(trial.env.items()), trial.limit_seconds

    for _, group in groupby(listed, key=kind):
        for outcome in together(host, list(group)):
            yield outcome
            if outcome.name == listed[0].name and outcome.status == "failed":
                return


def together(host: Host, waiting: Sequence[KernelTrial]) -> Iterator[TrialResult]:
    """
    Results of trials of one module in one child process. Behind a trial that fails nothing in its process counts, for
    a GPU may stay broken after a fault: the next child process does the rest. A trial that ends its process, or in
    which the time is over, is repeated as the first of the next one.
    """
    while waiting:
        words = [trial.probe or trial.name for trial in waiting[1:]]
        seconds = max(trial.limit_seconds for trial in waiting) + len(words) * FURTHER_LIMIT_SECONDS
        reply = host.run([*command(host, waiting[0]), *words], seconds)
        parts = reply.out.split(NEXT_TRIAL)[1:] or [reply.out]
        endings = [CommandResult(code=0, out=part) for part in parts[:-1]]
        endings.append(replace(reply, out=parts[-1]))
        done = 0
        for trial, ending in zip(waiting, endings, strict=False):
            outcome = judge(trial, ending)
            if outcome.status == "failed" and done and ending is endings[-1] and reply.code != 0:
                break  # the time of all was over, or a crash may come from one before: it is tried again as a first
            yield outcome
            done += 1
            if outcome.status == "failed":
                break
        waiting = waiting[done:]


def choose(outcomes: Sequence[TrialResult]) -> Mapping[str, TrialResult]:
    """
    Kernel -> the implementation that runs take: the fastest that passed; one that was not timed comes after those that
    were. The compiled library is taken or left as a whole.
    """
    library = not library_fault(outcomes)
    best: dict[str, TrialResult] = {}
    for outcome in sorted(
        outcomes, key=lambda outcome: (outcome.implementation != NATIVE, outcome.milliseconds or float("inf"))
    ):
        if outcome.status == "passed" and (library or outcome.implementation != NATIVE):
            best.setdefault(outcome.kernel, outcome)
    return best


def attention_order(outcomes: Sequence[TrialResult]) -> list[str]:
    """Torch's implementations of attention that passed: the fused ones, fastest first, and then the one that is not."""
    passed = {
        outcome.implementation: outcome.milliseconds or math.inf
        for outcome in outcomes
        if outcome.kernel == "attention" and outcome.status == "passed"
    }
    fused = [name for name in FUSED_ATTENTION if name in passed]
    return [*sorted(fused, key=lambda name: passed[name]), *(["math"] if "math" in passed else [])]


def documents_by(outcomes: Sequence[TrialResult]) -> list[str]:
    """What may compute rows of several documents: "varlen" and "flex" as far as they passed, the faster first."""
    named = {VARLEN: "varlen", FLEX: "flex"}
    passed = [outcome for outcome in outcomes if outcome.name in named and outcome.status == "passed"]
    return [named[outcome.name] for outcome in sorted(passed, key=lambda outcome: outcome.milliseconds or math.inf)]


def needs_experimental(vendor: str, outcomes: Sequence[TrialResult]) -> bool:
    """Whether fused attention passed on an AMD GPU, where trials ran with the switch of AOTriton."""
    return vendor == "amd" and any(name in FUSED_ATTENTION for name in attention_order(outcomes))


def library_fault(outcomes: Sequence[TrialResult]) -> str:
    """Why the compiled library is better left alone: a kernel of it fails, or all together are slower; else ""."""
    ours = [one for one in outcomes if one.implementation == NATIVE]
    failed = [f"{one.name} {one.why}" for one in ours if one.status == "failed"]
    if failed:
        return failed[0]
    elapsed, left = 0.0, 0.0
    for outcome in ours:
        others = [
            other.milliseconds
            for other in outcomes
            if other.kernel == outcome.kernel
            and other is not outcome
            and other.status == "passed"
            and other.milliseconds
        ]
        if outcome.milliseconds and others:
            elapsed, left = elapsed + outcome.milliseconds, left + min(others)
    return f"it takes {elapsed:.1f} ms where torch takes {left:.1f}" if elapsed > left else ""


def summary(outcomes: Sequence[TrialResult]) -> str:
    """What runs take, in words; compiled blocks are for those who ask for them."""
    selected = choose(outcomes)
    words = [f"{kernel} by {one.implementation}" for kernel, one in selected.items() if one.implementation]
    words = [word for word in words if not word.startswith(REPLACEABLE)]
    documents = documents_by(outcomes)
    if documents:
        words.append(f"several documents in a row by {documents[0]}")
    return ", ".join(words) or "those of torch"


def check(outcomes: Sequence[TrialResult]) -> None:
    """Raises HardwareError where a kernel that training needs has no implementation that passed."""
    selected = choose(outcomes)
    for outcome in outcomes:
        if outcome.status == "failed" and outcome.kernel not in selected and outcome.kernel not in REPLACEABLE:
            what = f"{outcome.name} computes wrong numbers on this machine: {outcome.why}"
            raise HardwareError(
                what, hint='Run `bloomery doctor` to test it again, or set device="cpu" to train meanwhile.'
            )
