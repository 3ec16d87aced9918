"""
Search the training setups that a recipe allows: which fit, how fast, and the choice.

This module needs no torch. A recipe decides what is trained: method, format, recomputation, sharding. This module
decides how many sequences go through the model at once. It depends only on the model's shape and the memory of the
device, so a resumed run decides the same. It takes as many sequences as fit, up to the point where more are no
faster. If none fits, the first change in `CHANGES` that makes it fit is reported. `CHANGES` is in the order of
cost.

Time of a step on a GPU: see train/plan/gpu_time.py. On a CPU, from what it computes and moves:

    seconds   micro-batches · (matmuls / (share · peak) + traffic / bandwidth) + update / bandwidth

`share` is what matmuls of a step reach of large square matmuls: see train/plan/memory.py. Traffic lies outside of
matmuls: activations written once and read three times, and logits read and written twice. It also counts weights
rounded for each micro-batch and their gradients added up. Nothing is counted between processes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from bloomery.model.config import cost
from bloomery.train.config import AdamW8bit, Level
from bloomery.train.plan.gpu_time import rates, step_time
from bloomery.train.plan.memory import (
    BASE_WHOLE,
    FROZEN_BYTES,
    MEASURED_SHARE,
    ROUNDED_ON_DEVICE,
    USUAL_TOKENS,
    Machine,
    MemoryEstimate,
    Method,
    Moment,
    TrainSetup,
    Workload,
    activation_bytes_per_token,
    adapter_parameters,
    fits,
    needs,
    with_host,
)

ACTIVATION_PASSES = 4
SCORE_PASSES = 4
WEIGHT_BYTES_PER_MICRO_BATCH = 4 + 2 + 2 + 2 + 2 + 8
"""Read and rounded, read forward and backward, a gradient written and added to that in float32."""
FROZEN_PASSES = 2
UPDATE_BYTES = 4 + 4 + 8 + 16 + 4
"""A gradient read for its norm and for the update, a weight and two moments read and written."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    tokens_per_second: float
    """Of all devices."""
    ceiling: float
    """If matmuls ran at the peak and nothing else took time: the roofline, repeated computation included."""
    timed: bool = False
    """Whether steps of two small models on this machine tell it, and not the peak."""


def products_per_token(what: Workload, way: TrainSetup) -> float:
    """FLOPs of matmuls per token, including those of activation checkpointing."""
    whole = cost(what.model, what.vocab_size).train_flops_per_token
    again = {"none": 0.0, "selective": 0.0, "full": whole / 3}[way.activation_checkpointing]
    if way.method == "full":
        return whole + again
    adapters = 6.0 * adapter_parameters(what.model, way.rank)
    return whole * 2 / 3 + again + adapters  # no gradient of a frozen weight


def pace(what: Workload, way: TrainSetup, target: Machine, rows_per_step: int) -> Throughput | None:
    """None where the target's peak in this format is not known. `rows_per_step` are those of all devices together."""
    peak = target.peak(way.precision)
    if peak is None:
        return None
    tokens = way.rows * what.model.context_length
    micro_batches = max(1, -(-rows_per_step // (way.rows * way.devices)))
    compute = products_per_token(what, way) * tokens / peak
    if target.processor:
        moved, updated = _traffic(what, way, tokens)
        waiting = [0.0 if target.bandwidth is None else size / target.bandwidth for size in (moved, updated)]
        seconds = micro_batches * (compute / MEASURED_SHARE + waiting[0]) + waiting[1]
    else:
        seconds = step_time(what, way, rates(target, way.precision), rows_per_step).seconds
    done = rows_per_step * what.model.context_length
    busy = min(way.devices, -(-rows_per_step // way.rows))
    return Throughput(tokens_per_second=done / seconds, ceiling=busy * tokens / compute)


def _traffic(what: Workload, way: TrainSetup, tokens: int) -> tuple[float, float]:
    """Bytes of a micro-batch on a CPU, and of an update."""
    b, num_shards = way.bytes_per_number, way.num_shards
    scores = SCORE_PASSES * tokens * what.vocab_size * b / 2
    each = activation_bytes_per_token(what.model, "none", b)
    activations = (ACTIVATION_PASSES + (way.activation_checkpointing != "none")) * tokens * each
    if way.method == "full":
        return (
            activations + scores + WEIGHT_BYTES_PER_MICRO_BATCH * what.parameters,
            UPDATE_BYTES * what.parameters / num_shards,
        )
    frozen = FROZEN_PASSES * (2 + FROZEN_BYTES[way.method])  # written out, and read again by a matmul
    return activations + scores + frozen * what.parameters, UPDATE_BYTES * adapter_parameters(
        what.model, way.rank
    ) / num_shards


MOST_TOKENS = {True: USUAL_TOKENS, False: 2**16}
"""Of a micro-batch, by whether a CPU computes it. Larger micro-batches gain less than 1 %."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a recipe asks of a stage that trains."""

    stage: str
    what: Workload
    rows_per_step: int
    """Of the whole global batch."""
    steps: int
    """0 where nothing tells how many there are."""
    way: TrainSetup
    """Its rows are those that the recipe says, or 0 where it leaves them to the plan."""
    available: frozenset[str] = frozenset()
    """Settings that this stage has, as `lora` and `parallelism`: only they are chosen."""
    besides: str = ""
    """What the stage does that is in no number of the plan."""
    levels: tuple[Level, ...] = ()
    """Of activation checkpointing, where the recipe leaves it open: the first that fits is taken."""
    may_offload: bool = False
    """Whether weights go to the host where none of these fits: the recipe leaves it open, and a run accepts it."""
    steps_from: Literal["recipe", "packed", "estimated", "unknown"] = "recipe"
    """What tells the number of steps: the recipe, packed sequences, or the size of the files of conversations."""

    @property
    def step_tokens(self) -> int:
        return self.rows_per_step * self.what.model.context_length

    @property
    def tokens(self) -> int:
        """Of all steps; of one step where their number is not known."""
        return (self.steps or 1) * self.step_tokens


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way, with what it needs and how fast it is."""

    way: TrainSetup
    what: Workload
    needs: MemoryEstimate
    peak_bytes: int
    """Of the arithmetic, or of a trace where there was one."""
    fits: bool
    pace: Throughput | None
    traced: tuple[Moment, Mapping[str, int]] | None = None
    """When the most is there and its parts, where a trace has found it."""

    @property
    def at_peak(self) -> tuple[Moment, Mapping[str, int]]:
        """When the most is there, and parts that add up to `peak_bytes`."""
        return self.traced or self.needs.at_peak


FitCheck = Callable[[PlanRequest, Machine, Candidate], Candidate]
"""Returns the same option with its memory computed by another method."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that a person can change in a recipe."""

    say: str
    """In the words of the command line."""
    setting: str
    """Which settings a stage must have for it, of `PlanRequest.available`; "" for none."""
    make: Callable[[Workload, TrainSetup], tuple[Workload, TrainSetup]]


def _recompute(level: Level) -> Callable[[Workload, TrainSetup], tuple[Workload, TrainSetup]]:
    return lambda what, way: (what, replace(way, activation_checkpointing=level))


def _eight_bits(what: Workload, way: TrainSetup) -> tuple[Workload, TrainSetup]:
    return replace(what, optimizer=AdamW8bit()), replace(_whole(way), activation_checkpointing="full")


def _bfloat16(what: Workload, way: TrainSetup) -> tuple[Workload, TrainSetup]:
    what, way = _eight_bits(what, way)
    return what, replace(way, weight_dtype="bfloat16")


def _shard(what: Workload, way: TrainSetup) -> tuple[Workload, TrainSetup]:
    return what, replace(way, sharded=way.devices > 1, activation_checkpointing="full")


def _adapters(what: Workload, way: TrainSetup) -> tuple[Workload, TrainSetup]:
    return what, replace(_whole(way), method="lora", weight_dtype="float32", activation_checkpointing="full")


def _four_bits(what: Workload, way: TrainSetup) -> tuple[Workload, TrainSetup]:
    return what, replace(_whole(way), method="nf4", weight_dtype="float32", activation_checkpointing="full")


def _offload(what: Workload, way: TrainSetup) -> tuple[Workload, TrainSetup]:
    return what, replace(on_host(way), activation_checkpointing="full")


def _four_bits_offloaded(what: Workload, way: TrainSetup) -> tuple[Workload, TrainSetup]:
    what, way = _four_bits(what, way)
    return what, on_host(way)


def _whole(way: TrainSetup) -> TrainSetup:
    return replace(way, sharded=False, offload=False)


def on_host(way: TrainSetup) -> TrainSetup:
    """The same with weights, gradients and optimizer on the host."""
    return replace(way, sharded=True, offload=True)


CHANGES = (
    Change(say='{stage}.activation_checkpointing="selective"', setting="", make=_recompute("selective")),
    Change(say='{stage}.activation_checkpointing="full"', setting="", make=_recompute("full")),
    Change(
        say='{stage}.activation_checkpointing="full" {stage}.parallelism="fsdp"', setting="parallelism", make=_shard
    ),
    Change(
        say='{stage}.activation_checkpointing="full" {stage}.optimizer={{kind="adamw8bit"}}',
        setting="",
        make=_eight_bits,
    ),
    Change(
        say='{stage}.activation_checkpointing="full" {stage}.optimizer={{kind="adamw8bit"}} '
        '{stage}.weight_dtype="bfloat16"',
        setting="weight_dtype",
        make=_bfloat16,
    ),
    Change(
        say='{stage}.activation_checkpointing="full" {stage}.lora.base_dtype="bfloat16"', setting="lora", make=_adapters
    ),
    Change(
        say='{stage}.activation_checkpointing="full" {stage}.lora.base_dtype="nf4"', setting="lora", make=_four_bits
    ),
    Change(say='{stage}.activation_checkpointing="full" {stage}.offload="host"', setting="offload", make=_offload),
    Change(
        say='{stage}.activation_checkpointing="full" {stage}.lora.base_dtype="nf4" {stage}.offload="host"',
        setting="lora offload",
        make=_four_bits_offloaded,
    ),
)
"""From the cheapest on: time, then several devices, then numbers, then what is trained at all; at last the host."""


def option(ask: PlanRequest, what: Workload, way: TrainSetup, target: Machine) -> Candidate:
    needed = needs(what, way)
    return Candidate(
        way=way,
        what=what,
        needs=needed,
        peak_bytes=needed.peak,
        fits=fits(what, way, target, needed.peak),
        pace=pace(what, way, target, ask.rows_per_step),
    )


def rows_allowed(ask: PlanRequest, target: Machine) -> list[int]:
    """Powers of two up to what a device has of a step, and that itself."""
    most = max(1, -(-ask.rows_per_step // target.devices))
    most = min(most, max(1, MOST_TOKENS[target.processor] // ask.what.model.context_length))
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def best(ask: PlanRequest, what: Workload, way: TrainSetup, target: Machine) -> Candidate:
    """With as many rows as fit; with one where none does, or as many as are asked for."""
    if way.rows:
        return option(ask, what, way, target)
    candidates = [option(ask, what, replace(way, rows=rows), target) for rows in rows_allowed(ask, target)]
    return next((one for one in reversed(candidates) if one.fits), candidates[0])


def alternatives(ask: PlanRequest, target: Machine, *, offload: bool = False) -> list[tuple[Candidate, str]]:
    """
    What is asked for with every level of recomputation, method, sharding and format, each with its best rows; and why
    one cannot be had, or "". With `offload`, also the same on the host.
    """
    free = replace(ask.way, rows=0, offload=False, sharded=ask.way.sharded and ask.way.devices > 1)
    ways = [replace(free, activation_checkpointing=level) for level in get_args(Level)]
    if target.devices > 1:
        ways += [replace(way, sharded=not free.sharded) for way in ways]
    halves = [replace(way, weight_dtype="bfloat16") for way in ways if _may_halve(way)]
    whole = [replace(way, weight_dtype="float32", float8="off") for way in ways]
    ways += [replace(way, method=method) for method in get_args(Method) if method != ask.way.method for way in whole]
    ways += halves or (whole if ask.way.weight_bytes == 2 else [])
    if ask.way.precision != "float32":
        ways.append(replace(free, precision="float32", weight_dtype="float32", residual_dtype="float32", float8="off"))
    if offload:
        ways += [on_host(replace(free, activation_checkpointing=level)) for level in get_args(Level)]
    return [(best(ask, ask.what, way, target), _missing(ask, ask.what, way)) for way in ways]


def _may_halve(way: TrainSetup) -> bool:
    """Whether weights could be kept in bfloat16, which are not yet."""
    return way.method == "full" and way.weight_bytes > 2 and way.precision == "bfloat16" and not way.offload


def _missing(ask: PlanRequest, what: Workload, way: TrainSetup) -> str:
    if way.method != ask.way.method and "lora" not in ask.available:
        return f"{ask.stage} trains all weights"
    alone = way.offload and way.devices == 1
    if way.sharded and way.method != "full" and not (ask.way.shards or alone):  # a mesh has some
        return BASE_WHOLE
    if way.method == "full" and way.weight_bytes == 2 and way.precision != "bfloat16":
        return "weights in bfloat16 are multiplied as they are"
    if way.offload and way.weight_bytes == 2:
        return ROUNDED_ON_DEVICE
    return ""


def fitting(ask: PlanRequest, what: Workload, way: TrainSetup, target: Machine, check: FitCheck | None) -> Candidate:
    """By arithmetic, and by `check` where there is one: then with fewer rows until it fits, where they are open."""
    candidate = best(ask, what, way, target)
    if check is None:
        return candidate
    candidate = check(ask, target, candidate)
    while not candidate.fits and not way.rows and candidate.way.rows > 1:
        candidate = check(ask, target, best(ask, what, replace(way, rows=candidate.way.rows // 2), target))
    return candidate


def first_fitting(ask: PlanRequest, find: Callable[[TrainSetup], Candidate]) -> Candidate:
    """
    What `find` makes of the first level of recomputation that fits, of those that are open; else of the last. Before
    that, it tries the same levels on the host, where that is open.
    """
    levels = ask.levels or (ask.way.activation_checkpointing,)
    ways = [replace(ask.way, activation_checkpointing=level) for level in levels]
    last: Candidate | None = None
    for way in [*ways, *(map(on_host, ways) if ask.may_offload else [])]:
        candidate = find(way)
        if candidate.fits:
            return candidate
        last = candidate if way == ways[-1] else last
    assert last is not None
    return last


def cheapest_change(ask: PlanRequest, target: Machine, check: FitCheck | None = None) -> tuple[str, Candidate] | None:
    """
    The first change that makes a recipe fit, and the plan with that change. The first change to try leaves the
    micro-batch to the plan. A change that a run would refuse is not returned.
    """
    freed = f'{ask.stage}.micro_batch_tokens="auto"' if ask.way.rows else ""
    if freed and (fewer := fitting(ask, ask.what, replace(ask.way, rows=0), target, check)).fits:
        return freed, fewer
    for change in CHANGES:
        what, way = change.make(ask.what, replace(ask.way, rows=0))
        unknown = not set(change.setting.split()) <= ask.available
        if unknown or _missing(ask, what, way) or (change.setting == "parallelism" and target.devices == 1):
            continue
        machine = with_host(target) if way.offload else target
        if way.offload and not target.offloads:
            continue
        if best(ask, what, way, machine).fits and (candidate := fitting(ask, what, way, machine, check)).fits:
            several = target.devices > 1
            others = [
                f'{ask.stage}.parallelism="none"' if several and ask.way.sharded and not way.sharded else "",
                f'{ask.stage}.parallelism="fsdp"' if several and way.offload and not ask.way.sharded else "",
                f'{ask.stage}.offload="none"' if ask.way.offload and not way.offload else "",
            ]
            return " ".join(filter(None, [freed, *others, change.say.format(stage=ask.stage)])), candidate
    return None


def devices_needed(ask: PlanRequest, target: Machine, most: int = 1024) -> int | None:
    """How many of the target's devices would do, each with its part; None where `most` are too few, or none may."""
    if _missing(ask, ask.what, replace(ask.way, sharded=True, offload=False)):
        return None

    def holds(count: int) -> bool:
        way = replace(ask.way, rows=1, shards=0, devices=count, activation_checkpointing="full")
        way = replace(way, sharded=True, offload=False)
        return needs(ask.what, way).peak <= target.usable_bytes

    if not holds(most):
        return None
    return next(count for count in range(2, most + 1) if holds(count))
