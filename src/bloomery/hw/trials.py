"""
Trials: each implementation of each kernel that training uses, tried in a child process, and what came of it.

A child tells its answers as lines of JSON, each as soon as it is known; how it ended and which lines are missing says
the rest. Nothing here needs torch.
"""

import json
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bloomery.hw import trusted
from bloomery.hw.host import Host, Reply

Status = Literal["passed", "failed", "absent"]

FUSED = "bloomery.model.fused.trial"
LIMIT_SECONDS = 120.0
COMPILE_LIMIT_SECONDS = 300.0
LARGEST_ERROR = {"bfloat16": 0.02, "float16": 0.01, "float32": 1e-3}
"""Relative, of forward passes. Rounding gives a fifth of it or less; gradients pass by several roundings."""
GRADIENT_FACTOR = 2.0
FLIPPED_COSINE = -0.5


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way to compute something, and the program that tries it."""

    kernel: str
    implementation: str = ""
    """"" where there is only one."""
    module: str = "bloomery.hw.probe"
    probe: str = ""
    """The program's word for it, where that is not `name`."""
    env: Mapping[str, str] = field(default_factory=dict)
    limit_seconds: float = LIMIT_SECONDS

    @property
    def name(self) -> str:
        return f"{self.kernel}-{self.implementation}" if self.implementation else self.kernel


@dataclass(frozen=True, kw_only=True)
class Outcome:
    kernel: str
    implementation: str
    status: Status
    why: str
    milliseconds: float | None = None

    @property
    def name(self) -> str:
        return f"{self.kernel}-{self.implementation}" if self.implementation else self.kernel

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def trials(vendor: str) -> list[Trial]:
    """What is tried on a device of a vendor, in the words of `Device.vendor`."""
    launch = Trial(kernel="launch")
    norm = Trial(kernel="rms-norm", implementation="torch", probe="rms-norm")
    block = Trial(kernel="block", implementation="compiled", limit_seconds=COMPILE_LIMIT_SECONDS)
    last = [block, Trial(kernel="training")]
    ends = [norm, Trial(kernel="cross-entropy", implementation="torch", probe="cross-entropy"), *last]
    if vendor == "apple":
        return [launch, Trial(kernel="matmul"), Trial(kernel="attention", implementation="math"), *ends]
    if vendor == "cpu":
        native = [
            Trial(kernel=kernel, implementation="native", module="bloomery.model.trial", probe=kernel)
            for kernel in ("attention", "rms-norm", "cross-entropy")
        ]
        attention = [Trial(kernel="attention", implementation=name) for name in ("flash", "math")]
        return [launch, Trial(kernel="matmul"), *attention, *native, *ends]
    blas = ("hipblas", "hipblaslt") if vendor == "amd" else ("cublas", "cublaslt")
    products = [
        Trial(kernel="matmul", implementation=name, probe=f"matmul-blas{'lt' if name.endswith('lt') else ''}")
        for name in blas
    ]
    kinds = ("flash", "efficient", "math") if vendor == "amd" else ("flash", "efficient", "cudnn", "math")
    attention = [Trial(kernel="attention", implementation=kind) for kind in kinds]
    return [launch, *products, *attention, norm, *_fused(), *last]


def _fused() -> list[Trial]:
    """Kernels of our own in Triton, and what of torch they compete with, as training computes it."""
    of_torch = [
        Trial(kernel=kernel, implementation="torch", module=FUSED)
        for kernel in ("cross-entropy", "rotary", "rotary-norm", "nf4")
    ]
    ours = [
        Trial(kernel=kernel, implementation=trusted.OWN, module=FUSED, limit_seconds=COMPILE_LIMIT_SECONDS)
        for kernel in ("rms-norm", "cross-entropy", "rotary", "rotary-norm", "nf4")
    ]
    return [*of_torch, *ours]


def command(host: Host, trial: Trial) -> list[str]:
    """The line that tries it, which a person can paste too."""
    words = [f"{name}={value}" for name, value in trial.env.items()]
    python = [host.python, "-X", "faulthandler", "-m", trial.module, trial.probe or trial.name]
    return ["env", *words, *python] if words else python


def attempt(host: Host, trial: Trial) -> Outcome:
    return judge(trial, host.run(command(host, trial), trial.limit_seconds))


def answers(reply: Reply) -> list[dict[str, Any]]:
    """The lines of JSON that a child process wrote. One that it was writing when it died is left out."""
    lines = [line for line in reply.out.splitlines() if line.startswith("{") and line.endswith("}")]
    return [json.loads(line) for line in lines]


def merged(reply: Reply) -> dict[str, Any]:
    """All that a child process said, as one dictionary."""
    return {key: value for answer in answers(reply) for key, value in answer.items()}


def ending(reply: Reply) -> str:
    """How a child process ended, in words."""
    if reply.code is None:
        return "did not end in time"
    if reply.code < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"was killed by signal {-reply.code} ({names.get(-reply.code, 'unknown')})"
    last = reply.err.strip().splitlines()[-1:] or ["no message"]
    return f"failed: {last[0]}"


def judge(trial: Trial, reply: Reply) -> Outcome:
    """What a child's answers and its end say of an implementation."""
    told = merged(reply)

    def outcome(status: Status, why: str) -> Outcome:
        took = told.get("milliseconds")
        milliseconds = round(took, 4) if took is not None else None
        return Outcome(
            kernel=trial.kernel, implementation=trial.implementation, status=status, why=why, milliseconds=milliseconds
        )

    wrong = list(_wrong(answers(reply), told.get("dtype", "float32")))
    if wrong:
        return outcome("failed", wrong[0])
    if reply.code != 0:
        place = f" at {told['trying']}" if "trying" in told else ""
        return outcome("failed", f"{ending(reply)}{place}")
    if "absent" in told:
        return outcome("absent", told["absent"])
    if trial.kernel == "training":
        return outcome(*_learned(told))
    cases = [answer for answer in answers(reply) if "case" in answer]
    if not cases:
        return outcome("failed", "ended without an answer")
    return outcome("passed", f"relative error at most {max(case['error'] for case in cases):.2g}")


def _learned(told: Mapping[str, Any]) -> tuple[Status, str]:
    first, last = told.get("first_loss", math.nan), told.get("last_loss", math.nan)
    if last < first / 2:
        return "passed", f"loss {first:.3f} → {last:.3f} in sixty steps"
    return "failed", f"loss {first:.3f} → {last:.3f} in sixty steps, where it should halve"


def _wrong(told: Sequence[Mapping[str, Any]], dtype: str) -> Iterator[str]:
    """What is wrong with the numbers of each case, in the words of its most telling symptom."""
    for answer in told:
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
