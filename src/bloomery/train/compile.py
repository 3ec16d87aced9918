"""
How the blocks of a model run: compiled by torch.compile if the results match, and with activations recomputed.

If the recipe leaves the choice open, compiled blocks must also be faster. Blocks are compiled separately. They
share one piece of code, so that a deep model compiles as fast as a shallow one. A first step decides: loss and
gradient norm must agree with those of the plain blocks. Without agreement, after an error, and after too long a
time, the plain blocks are used, and the reason is printed.

The compiler makes another program for each shape. Shapes that the first step has not tried run on the plain blocks.
What blocks share, such as a mask, is made before the first block. Compiled code could not keep it for the next.
torch may also give up without an error, and call the plain code. So the graphs that it made are counted.

`checkpoint_activations` has blocks recompute activations in the backward pass instead of keeping them:

    none         nothing
    full         each block: only its input is kept
    selective    the cheap operations of each block. Its input stays, and so do the results of matmuls with weights
                 and of fused attention. Recomputed are norms, positions, activations, and attention weights
                 that were written out

The gradients are the same bits, because the same operations make them (Chen et al. 2016,
https://arxiv.org/abs/1604.06174; selective: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
"""

import importlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import io as core_io
from bloomery.core.errors import RunError
from bloomery.core.log import info
from bloomery.core.records import read_record
from bloomery.hw import device as devices
from bloomery.hw import kernel_selection
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model.attention import Attention, AttentionMask
from bloomery.model.config import ModelConfig
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, AnnealedDataset, Batch, PackedDataset, SampleSource
from bloomery.train import collectives
from bloomery.train.config import Level, Training
from bloomery.train.plan.memory import rows_at_once, rows_per_step
from bloomery.train.precision import Precision, set_short_formats
from bloomery.train.step import accumulate_gradients, retry_on_overflow

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

CompileMode = Literal["off", "auto", "on"]
Trial = Callable[[], tuple[float, float]]
"""A forward and backward pass: loss and gradient norm. It leaves no gradients."""

LOOSE, TIGHT = (0.01, 0.05), (1e-4, 1e-3)
"""Allowed relative differences of loss and of gradient norm: where matmuls are rounded, and in float32."""

ROWS_SEEN, TOKENS_SEEN, SELDOM = 256, 2**20, 0.01
"""What is looked at of each part of the samples; and the share of micro-batches below which a kind is not tried."""
ELSEWHERE = "it is not on another rank"
FEW_IDS = 256
"""Of a model whose layers alone are tried."""

LIMIT_SECONDS = 600.0
STATIC = partial(torch.compile, dynamic=False)
PROGRAMS = 64
"""That the compiler may make of a block: blocks share code, and differ by kind and by the shape of their input."""

GAIN = 0.95
"""`auto` keeps compiled blocks that take at most this share of the plain ones' time."""
WORTH_SECONDS = 120.0
"""`auto` compiles where all passes of the run take longer: compiling takes 10 to 60 s, and saves up to half of them."""

FAILURES = (RuntimeError, TimeoutError, OSError, ImportError, subprocess.SubprocessError)
"""What compilers raise: torch's own errors are RuntimeErrors, and a C++ compiler may be missing or fail."""


@dataclass(frozen=True)
class Verdict:
    compiled: bool
    why: str
    lasts: bool = True
    """Whether a resumed run keeps to it. A longer run asks again whether compiling is worth its time."""


RowCount = Annotated[str, Field(pattern="^[0-9]{1,18}$")]


class SavedVerdict(TypedDict):
    compiled: bool
    why: str


def settled(config: Training, device: Device, early: bool = True) -> Training:
    """
    The settings for a device: `auto` compiles for GPUs alone, as on a CPU it takes minutes, and small models lose. It
    also needs samples for a trial before the first step, which are not `early` where the model samples them itself.
    Over a mesh, `auto` does not try. Nor does it in a deterministic run, for the time of a trial is not the same twice.
    """
    may_try = early and config.mesh is None and not config.deterministic
    if config.compile != "auto" or (may_try and device.is_gpu):
        return config
    return config.model_copy(update={"compile": "off"})


def settled_before_sharding(
    config: Training, shape: ModelConfig, samples: SampleSource, precision: Precision, out: Path, world: World
) -> Training:
    """
    The settings of a model that is to lie in parts: whether `auto` compiles, the same on all ranks. Parts are exchanged
    in front of each block, where a trial that fails on a rank would leave the others waiting. So each rank tries a few
    layers of its own, with random weights and few token IDs, before there are parts.
    """
    if config.compile != "auto":
        return config
    note, rows = out / "compile.json", _rows(config, samples.length, world.size)
    verdict = _agreed(note, rows, world)
    if verdict is None:
        with world.alike():
            verdict = _tried_layers(config, shape, samples, precision, world.size)
        if world.any(not verdict.compiled):
            why = ELSEWHERE if verdict.compiled else verdict.why
            info(f"  blocks are not compiled: {why}", style="yellow" if verdict.lasts else "")
            if verdict.lasts:
                core_io.write_json(note, {**_noted(note), str(rows): {"compiled": False, "why": why}})
            return config.model_copy(update={"compile": "off"})
    return config.model_copy(update={"compile": "on" if verdict.compiled else "off"})


def _tried_layers(
    config: Training, shape: ModelConfig, samples: SampleSource, precision: Precision, ranks: int
) -> Verdict:
    if why := kernel_selection.why_not("block-compiled", precision.device):
        return Verdict(False, why)
    layers = min(shape.num_layers, shape.turn)
    model = Transformer(shape.model_copy(update={"num_layers": layers}), FEW_IDS)
    model.initialize(0)
    model.to(precision.device.torch_device)
    set_short_formats(model, config.residual_dtype, config.float8, precision.device.torch_device)
    assert config.activation_checkpointing != "auto", "decided before"
    checkpoint_activations(model, config.activation_checkpointing)
    batches = [
        replace(batch, ids=batch.ids % FEW_IDS, targets=np.where(learned, batch.targets % FEW_IDS, IGNORE))
        for batch in usual_batches(samples, config, ranks)
        for learned in [batch.targets != IGNORE]
    ]
    trials = [partial(_pass, model, batch, precision) for batch in batches]
    passes = _passes(config, samples.length, ranks) * shape.num_layers / layers
    tolerance = TIGHT if precision.dtype == torch.float32 else LOOSE
    verdict = compile_blocks(model, "auto", trials, tolerance=tolerance, compiler=STATIC, passes=passes)
    del model, trials
    devices.give_back_memory()
    return verdict


def _passes(config: Training, length: int, ranks: int) -> int:
    """Micro-batches of a rank in the whole run."""
    return config.steps * -(-rows_per_step(config, length) // (_rows(config, length, ranks) * ranks))


def prepare(
    model: Transformer, config: Training, samples: SampleSource, precision: Precision, out: Path, world: World
) -> Verdict:
    """Put a model where it computes, recomputing and compiled as a recipe asks for: see `decide`."""
    if not collectives.is_sharded(model):  # its parts are where they stay
        model.to(precision.device.torch_device)
    assert config.activation_checkpointing != "auto", "decided before"
    checkpoint_activations(model, config.activation_checkpointing)
    return decide(model, config, samples, precision, out, world)


def decide(
    model: Transformer, config: Training, samples: SampleSource, precision: Precision, out: Path, world: World
) -> Verdict:
    """
    Compile the blocks of a model, on all ranks or on none, if the recipe asks for it and a trial on some samples
    succeeds. The first rank logs the verdict and keeps it in `out/compile.json`, by the number of rows, so that a
    resumed run computes as before. A verdict for another number of rows does not count.
    """
    _take_away(model)
    if config.compile == "off":
        return Verdict(False, "not asked for")
    why = kernel_selection.why_not("block-compiled", precision.device) if config.compile == "auto" else ""
    if world.any(bool(why)):
        info(f"  blocks are not compiled: a small one, tried by the doctor, {why or ELSEWHERE}", style="yellow")
        return Verdict(False, why or ELSEWHERE)
    note, rows = out / "compile.json", _rows(config, samples.length, world.size)
    known = _agreed(note, rows, world)
    if known is not None and not known.compiled:
        info(f"  blocks are not compiled, as before: {known.why} (remove {note} to try again)")
        return known
    mode: CompileMode = "on" if known is not None else config.compile
    batches = usual_batches(samples, config, world.size)
    trials = [partial(_pass, model, batch, precision) for batch in batches]
    halves = [partial(_pass, model, batch, precision, 2) for batch in batches if mode == "on" and len(batch.ids) > 1]
    tolerance = TIGHT if precision.dtype == torch.float32 else LOOSE
    passes = _passes(config, samples.length, world.size)
    with world.alike():
        verdict = compile_blocks(
            model, mode, trials, tolerance=tolerance, compiler=STATIC, passes=passes, halves=halves
        )
    if world.any(not verdict.compiled) and verdict.compiled:
        _take_away(model)
        verdict = Verdict(False, ELSEWHERE)
    said = "compiled" if verdict.compiled else "not compiled" if known is None else "no longer compiled"
    info(f"  blocks are {said}: {verdict.why}", style="yellow" if verdict.lasts and not verdict.compiled else "")
    if verdict.lasts:
        core_io.write_json(note, {**_noted(note), str(rows): {"compiled": verdict.compiled, "why": verdict.why}})
    return verdict


def _take_away(model: Transformer) -> None:
    """Let the plain blocks compute, where compiled ones do."""
    for block in model.blocks:
        if isinstance(block.forward, _Compiled):
            block.__dict__["forward"] = block.forward.plain


def _rows(config: Training, length: int, ranks: int) -> int:
    """Of a micro-batch."""
    return min(rows_at_once(config, length), -(-rows_per_step(config, length) // ranks))


def usual_batches(samples: SampleSource, config: Training, ranks: int = 1) -> list[Batch]:
    """
    A micro-batch of sequences with several documents, and a micro-batch of sequences with one document. Each is there
    where its kind is not seldom in the samples. Training computes the two in different ways.
    """
    rows = _rows(config, samples.length, ranks)
    kinds: dict[bool, Batch] = {}
    for numbers in _places(samples, rows):
        batch = samples.batch(numbers)
        single = (batch.segments == batch.segments[:, :1]).all(1)
        alone = float(single.mean()) ** rows
        for kind, which, share in ((False, ~single, 1 - alone), (True, single, alone)):
            if share >= SELDOM and kind not in kinds:
                kinds[kind] = batch.rows(np.resize(which.nonzero()[0], rows))
    return [kinds[kind] for kind in sorted(kinds)]


def _places(samples: SampleSource, rows: int) -> list[NDArray[np.int64]]:
    """Numbers of samples from all over, for each part of a course; of what is made when asked for, a micro-batch."""
    N = samples.num_samples
    if not isinstance(samples, PackedDataset | AnnealedDataset):
        return [np.arange(rows) % N]
    seen = max(rows, min(ROWS_SEEN, TOKENS_SEEN // samples.length))
    parts = [(0, N), (N, samples.last.num_samples)] if isinstance(samples, AnnealedDataset) else [(0, N)]
    return [first + np.arange(seen) * max(1, size // seen) % size for first, size in parts]


def _pass(model: Transformer, batch: Batch, precision: Precision, parts: int = 1) -> tuple[float, float]:
    trial = precision.for_trial()
    work = partial(accumulate_gradients, model, batch, -(-len(batch.ids) // parts), trial)
    sums, norm = retry_on_overflow(model, trial, work)
    model.zero_grad(set_to_none=True)
    return sums.loss, float(norm)


def _agreed(note: Path, rows: int, world: World) -> Verdict | None:
    """What came of it before with so many rows, as the first rank knows."""
    with world.alike():
        saved = _noted(note).get(str(rows)) if world.is_first else None
    fields = world.broadcast(saved)
    return None if fields is None else Verdict(**fields)


def _noted(note: Path) -> dict[str, Any]:
    """Verdicts by number of rows. Raises RunError if the file cannot be read: a resumed run depends on it."""
    if not note.exists():
        return {}
    fix = "Remove it to repeat the trial. The resumed run may then compute its steps differently."
    verdicts = read_record(note, dict[RowCount, SavedVerdict], fix=fix)
    if not verdicts:
        raise RunError("does not say whether blocks were compiled", where=str(note), hint=fix)
    return {rows: {"compiled": one["compiled"], "why": one["why"]} for rows, one in verdicts.items()}


def compile_blocks(
    model: Transformer,
    mode: CompileMode,
    trials: Sequence[Trial],
    *,
    tolerance: tuple[float, float] = LOOSE,
    compiler: Callable[..., Any] = STATIC,
    limit_seconds: float = LIMIT_SECONDS,
    passes: float = math.inf,
    halves: Sequence[Trial] = (),
) -> Verdict:
    """
    Put compiled blocks in place of plain ones, for what the trials compute, if they speak for it. `auto` asks for speed
    too: of a pass, and of all `passes` of the run. `halves` are the trials with half the rows at once, for plain blocks
    that memory does not hold: compiled ones take less.
    """
    if mode == "off":
        return Verdict(False, "not asked for")
    sharded, before = collectives.is_sharded(model), 0.0
    plain: list[tuple[float, float]] | None = None
    for some in filter(None, (trials, halves)):
        try:
            before = _seconds(some) if mode == "auto" else 0.0
            ahead = passes * before / len(some)
            if mode == "auto" and ahead < WORTH_SECONDS:
                why = f"the run is short: all passes take about {math.ceil(ahead)} s, and compiling takes 10 to 60 s"
                return Verdict(False, why, lasts=False)
            plain = [trial() for trial in some]
            break
        except RuntimeError as error:
            if sharded or not devices.is_out_of_memory(error):
                raise
        model.zero_grad(set_to_none=True)  # outside of the handler, whose error holds on to all tensors of the pass
        devices.give_back_memory()
    if plain is None:
        return Verdict(False, "memory runs out in a pass of the plain blocks")
    kinds, graphs = _Kinds(), Graphs.begin() if _by_torch(compiler) else None
    originals = [block.__dict__.get("forward") for block in model.blocks]
    over_tp = collectives.ranks_of_a_matmul(model) > 1

    def compiled_in_one(plain: Any) -> Any:
        """Over tp, a block exchanges its weights for parts, which torch does not compile as something to recompute."""
        if over_tp and isinstance(plain, RecomputedForward) and plain.level == "full":
            return RecomputedForward(compiler(plain.plain), plain.level)
        return compiler(plain)

    for block in model.blocks:
        attention = block.attention
        assert isinstance(attention, Attention)
        block.__dict__["forward"] = _Compiled(block.forward, compiled_in_one(block.forward), kinds, attention.prepare)
    began = time.monotonic()
    try:
        with _time_limit(limit_seconds):
            compiled = [trial() for trial in trials]
        problem = next(filter(None, map(partial(_difference, tolerance=tolerance), plain, compiled)), "")
        problem = problem or (graphs.problem() if graphs else "")
    except _failures() as error:
        if sharded:  # it may be in the midst of an exchange, from which no rank finds back
            raise RunError(f"compiled blocks failed: {_first_line(error)}", hint='Set compile="off".') from error
        problem = f"it failed with {type(error).__name__}: {_first_line(error)}"
    finally:
        if graphs:
            graphs.end()
    took = time.monotonic() - began
    kinds.tried = True
    if not problem and mode == "auto" and (after := _seconds(trials)) > GAIN * before:
        problem = f"a pass takes {after:.3f} s, and {before:.3f} s without it"
    if not problem:
        gain = f", a pass takes {after:.3f} s instead of {before:.3f} s" if mode == "auto" else ""
        how = f"{graphs} " if graphs else ""
        return Verdict(True, f"loss and gradient norm agree with the plain blocks; {how}compiled in {took:.0f} s{gain}")
    model.zero_grad(set_to_none=True)
    for block, original in zip(model.blocks, originals, strict=True):
        del block.__dict__["forward"]
        if original is not None:
            block.__dict__["forward"] = original
    return Verdict(False, problem)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _failures() -> tuple[type[Exception], ...]:
    """What compilers raise. torch's limit of programs is an error of its own kind."""
    exceptions: Any = sys.modules.get("torch._dynamo.exc")
    return FAILURES if exceptions is None else (*FAILURES, exceptions.FailOnRecompileLimitHit)


def _by_torch(compiler: Callable[..., Any]) -> bool:
    return isinstance(compiler, partial) and compiler.func is torch.compile


@dataclass
class Graphs:
    """What torch's compiler made since `begin`: a graph is code that was compiled in one piece."""

    count: int
    breaks: int
    """Places where it left compiled code, and called the plain."""

    @classmethod
    def begin(cls) -> "Graphs":
        """
        Forget what was compiled before, and let the compiler make as many programs as blocks need. One more is an
        error, where torch would only warn.
        """
        dynamo: Any = importlib.import_module("torch._dynamo")
        dynamo.reset()
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, PROGRAMS)
        dynamo.config.fail_on_recompile_limit_hit = True
        return cls(*_graph_counts())

    def end(self) -> None:
        """Let torch call plain code again, where it has compiled enough: training is not to end for it."""
        dynamo: Any = importlib.import_module("torch._dynamo")
        dynamo.config.fail_on_recompile_limit_hit = False

    @property
    def since(self) -> "Graphs":
        count, breaks = _graph_counts()
        return Graphs(count - self.count, breaks - self.breaks)

    def problem(self) -> str:
        since = self.since
        return "" if since.count else f"torch compiled none of it ({since.breaks} graph breaks)"

    def __str__(self) -> str:
        since = self.since
        broken = f" with {since.breaks} graph breaks" if since.breaks else ""
        return f"{since.count} graph{'' if since.count == 1 else 's'}{broken}"


def _graph_counts() -> tuple[int, int]:
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@dataclass
class _Kinds:
    """Of inputs: all, until they are tried; from then on those that were seen."""

    tried: bool = False
    seen: set[Hashable] = field(default_factory=set)
    refused: set[Hashable] = field(default_factory=set)

    def takes(self, x: Tensor, mask: AttentionMask, cache: Any) -> bool:
        unset = tuple(one is None for one in (mask.segments, mask.bounds, mask.allowed, cache))
        kind = (tuple(x.shape), *unset)
        if not self.tried:
            self.seen.add(kind)
        elif kind not in self.seen | self.refused:
            self.refused.add(kind)
            several = "" if mask.segments is None else " with several documents"
            info(f"  {x.shape[0]} rows of {x.shape[1]} tokens{several} were not tried, so plain blocks compute them")
        return kind in self.seen


class _Compiled:
    """A block's forward pass, compiled where gradients are wanted, for the kinds of inputs that were tried."""

    def __init__(
        self,
        plain: Callable[..., Tensor],
        fast: Callable[..., Any],
        kinds: _Kinds,
        prepare: Callable[[AttentionMask, Tensor], None],
    ) -> None:
        self.plain, self._fast, self._kinds, self._prepare = plain, fast, kinds, prepare

    def __call__(self, x: Tensor, rope: Any, mask: AttentionMask, cache: Any) -> Tensor:
        fast = torch.is_grad_enabled() and self._kinds.takes(x, mask, cache)
        if fast:
            self._prepare(mask, x)
        output: Tensor = (self._fast if fast else self.plain)(x, rope, mask, cache)
        return output


def _difference(plain: tuple[float, float], compiled: tuple[float, float], tolerance: tuple[float, float]) -> str:
    """What is wrong with the numbers of compiled blocks, or ""."""
    for name, expected, value, allowed in zip(("loss", "gradient norm"), plain, compiled, tolerance, strict=True):
        if not math.isclose(expected, value, rel_tol=allowed):
            return f"it computes a {name} of {value:.6g} where the plain blocks have {expected:.6g}"
    return ""


def _seconds(trials: Sequence[Trial], times: int = 3) -> float:
    """Of all trials, the shortest of a few times."""
    elapsed = []
    for _ in range(times):
        began = time.perf_counter()
        for trial in trials:
            trial()
        elapsed.append(time.perf_counter() - began)
    return min(elapsed)


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


KEPT = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
]
"""Batched matmuls are not among these: on a CPU their results are the attention weights, T × T for each head."""


def checkpoint_activations(model: Transformer, level: Level) -> None:
    """Have the blocks of a model compute again in the backward pass what `level` says. Names of weights stay."""
    for block in model.blocks:
        plain: Callable[..., Tensor] = block.__dict__.pop("forward", block.forward)
        plain = getattr(plain, "plain", plain)
        if level != "none":
            block.__dict__["forward"] = RecomputedForward(plain, level)


class RecomputedForward:
    """A block's forward pass that keeps less, where anything has to be kept."""

    def __init__(self, plain: Callable[..., Tensor], level: Level) -> None:
        self.plain, self.level = plain, level
        self._how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if level == "selective":
            self._how["context_fn"] = partial(create_selective_checkpoint_contexts, [*KEPT, cpu.forward_operation()])

    def __call__(self, *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self.plain(*inputs)
        output: Tensor = checkpoint(self.plain, *inputs, **self._how)
        return output
