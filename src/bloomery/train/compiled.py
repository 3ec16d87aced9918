"""
torch.compile for the blocks of a model, and only where it computes the same and, if that is to be found out, is faster.

Blocks are compiled one by one: they share one piece of code, so that a deep model compiles as fast as a shallow one. A
first step decides: loss and gradient norm must agree with those of the plain blocks. Without agreement, after an error
and after too long a time the plain blocks are taken, and it is said why.
"""

import json
import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bloomery.core.log import say
from bloomery.hw import chosen
from bloomery.hw.device import Device
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Source
from bloomery.train.config import Training
from bloomery.train.loop import accumulate_gradients, gradients
from bloomery.train.plan import rows_at_once
from bloomery.train.recompute import recompute

import torch
from torch import Tensor, nn

Wanted = Literal["off", "auto", "on"]
Trial = Callable[[], tuple[float, float]]
"""A forward and backward pass: loss and gradient norm. It leaves no gradients."""

LOOSE, TIGHT = (0.01, 0.05), (1e-4, 1e-3)
"""Relative differences of loss and of gradient norm that are allowed where products are rounded, and in float32."""

LIMIT_SECONDS = 600.0
STATIC = partial(torch.compile, dynamic=False)

GAIN = 0.95
"""`auto` keeps compiled blocks that take at most this share of the plain ones' time."""

FAILURES = (RuntimeError, TimeoutError, OSError, ImportError, subprocess.SubprocessError)
"""What compilers raise: torch's own errors are RuntimeErrors, and a C++ compiler may be missing or fail."""


@dataclass(frozen=True)
class Verdict:
    compiled: bool
    why: str


def prepare(model: Transformer, config: Training, samples: Source, device: Device, out: Path) -> Verdict:
    """
    Put a model where it computes, recomputing and compiled as a recipe asks for; the latter after a trial on the first
    samples. What came of it is said and stays in `out/compile.json`, so that a run that goes on computes as before.
    """
    model.to(device.place)
    recompute(model, config.recompute)
    if config.compile == "off":
        return Verdict(False, "not asked for")
    if config.compile == "auto" and (why := chosen.why_not("block-compiled", device)):
        say(f"  blocks are not compiled: a small one, tried by the doctor, {why}", style="yellow")
        return Verdict(False, why)
    note = out / "compile.json"
    known = json.loads(note.read_text(encoding="utf-8")) if note.exists() else None
    if known is not None and not known["compiled"]:
        say(f"  blocks are not compiled, as before: {known['why']} (remove {note} to try again)")
        return Verdict(False, known["why"])
    rows = rows_at_once(config, samples.length)
    batch = samples.batch(np.arange(rows))

    def trial() -> tuple[float, float]:
        loss, _ = accumulate_gradients(model, batch, rows, device)
        norm = float(nn.utils.get_total_norm(gradients(model)))
        model.zero_grad(set_to_none=True)
        return loss, norm

    tolerance = TIGHT if device.compute_dtype == torch.float32 else LOOSE
    verdict = compile_blocks(model, "on" if known is not None else config.compile, trial, tolerance=tolerance)
    said = "compiled" if verdict.compiled else "not compiled" if known is None else "no longer compiled"
    say(f"  blocks are {said}: {verdict.why}", style="" if verdict.compiled else "yellow")
    note.write_text(json.dumps({"compiled": verdict.compiled, "why": verdict.why}) + "\n", encoding="utf-8")
    return verdict


def compile_blocks(
    model: Transformer,
    wanted: Wanted,
    trial: Trial,
    *,
    tolerance: tuple[float, float] = LOOSE,
    compiler: Callable[..., Any] = STATIC,
    limit_seconds: float = LIMIT_SECONDS,
) -> Verdict:
    """Put compiled blocks in place of plain ones if a trial of both speaks for it. `auto` asks for speed too."""
    if wanted == "off":
        return Verdict(False, "not asked for")
    plain = trial()
    before = _seconds(trial) if wanted == "auto" else 0.0
    originals = [block.__dict__.get("forward") for block in model.blocks]
    for block in model.blocks:
        block.__dict__["forward"] = _Compiled(block.forward, compiler)
    began = time.monotonic()
    try:
        with _time_limit(limit_seconds):
            found = trial()
        problem = _difference(plain, found, tolerance)
    except FAILURES as error:
        problem = f"it failed with {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    took = time.monotonic() - began
    if not problem and wanted == "auto" and (after := _seconds(trial)) > GAIN * before:
        problem = f"a pass takes {after:.3f} s, and {before:.3f} s without it"
    if not problem:
        gain = f", a pass takes {after:.3f} s instead of {before:.3f} s" if wanted == "auto" else ""
        return Verdict(True, f"loss and gradient norm agree with the plain blocks; compiled in {took:.0f} s{gain}")
    model.zero_grad(set_to_none=True)
    for block, original in zip(model.blocks, originals, strict=True):
        del block.__dict__["forward"]
        if original is not None:
            block.__dict__["forward"] = original
    return Verdict(False, problem)


class _Compiled:
    """A block's forward pass, compiled where gradients are wanted: shapes vary where they are not."""

    def __init__(self, plain: Callable[..., Tensor], compiler: Callable[..., Any]) -> None:
        self._plain, self._fast = plain, compiler(plain)

    def __call__(self, *inputs: Any) -> Tensor:
        made: Tensor = (self._fast if torch.is_grad_enabled() else self._plain)(*inputs)
        return made


def _difference(plain: tuple[float, float], found: tuple[float, float], tolerance: tuple[float, float]) -> str:
    """What is wrong with the numbers of compiled blocks, or ""."""
    for name, expected, value, allowed in zip(("loss", "gradient norm"), plain, found, tolerance, strict=True):
        if not math.isclose(expected, value, rel_tol=allowed):
            return f"it computes a {name} of {value:.6g} where the plain blocks have {expected:.6g}"
    return ""


def _seconds(trial: Trial, times: int = 3) -> float:
    """The shortest of a few trials."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        trial()
        taken.append(time.perf_counter() - began)
    return min(taken)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """
    Raise TimeoutError in what runs here when it takes longer. Only a main thread can be interrupted, and only where
    there are timers; elsewhere it takes as long as it takes.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"it took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
