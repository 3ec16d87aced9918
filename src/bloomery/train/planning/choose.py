"""
Which ways there are to train what a recipe asks for, which of them fit, and which is taken. Needs no torch.

A recipe decides what is trained: method, format, recomputation, sharding. How many rows go through the model at once
is decided here, from its shape and the memory of the device alone, so that a run which goes on decides the same: as
many as fit, up to where more are no faster. Where none fits, the first change of `CHANGES` that makes one fit is told:
they stand in the order of what they cost.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from bloomery.train.config import AdamW8bit, Level
from bloomery.train.plan import BASE_WHOLE, COMPILED_WHOLE, SCALES_WHOLE, USUAL_TOKENS
from bloomery.train.planning.needs import Method, Moment, Needs, Trained, Way, needs
from bloomery.train.planning.speed import Pace, pace
from bloomery.train.planning.target import Target

NO_OFFLOAD = "nothing is moved to the host while a model trains; AdamW in 8 bits keeps a quarter of its numbers instead"
ONE_MEMORY = "host and device have one memory, of which nothing would be freed"
MOST_TOKENS = {True: USUAL_TOKENS, False: 2**16}
"""Of a micro-batch, by whether a processor computes it. Larger ones gain less than a hundredth."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a recipe asks of a stage that trains."""

    stage: str
    what: Trained
    rows_per_step: int
    """Of the whole global batch."""
    steps: int
    way: Way
    """Its rows are those that the recipe says, or 0 where it leaves them to the plan."""
    available: frozenset[str] = frozenset()
    """Settings that this stage has, as `lora` and `shard`: only they are chosen."""
    compiled: bool = False
    besides: str = ""
    """What the stage does that is in no number of the plan."""

    @property
    def tokens(self) -> int:
        return self.steps * self.rows_per_step * self.what.model.context


@dataclass(frozen=True, kw_only=True)
class Option:
    """A way, with what it needs and how fast it is."""

    way: Way
    what: Trained
    needs: Needs
    peak_bytes: int
    """Of the arithmetic, or of a trace where there was one."""
    fits: bool
    pace: Pace | None
    traced: tuple[Moment, Mapping[str, int]] | None = None
    """When the most is there and its parts, where a trace has found it."""

    @property
    def at_peak(self) -> tuple[Moment, Mapping[str, int]]:
        """When the most is there, and parts that add up to `peak_bytes`."""
        return self.traced or self.needs.at_peak


Check = Callable[[Ask, Target, Option], Option]
"""The same option with its memory found out in another way."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that a person can change in a recipe."""

    say: str
    """In the words of the command line."""
    setting: str
    """Which settings a stage must have for it, of `Ask.available`; "" for none."""
    make: Callable[[Trained, Way], tuple[Trained, Way]]


def _recompute(level: Level) -> Callable[[Trained, Way], tuple[Trained, Way]]:
    return lambda what, way: (what, replace(way, recompute=level))


def _eight_bits(what: Trained, way: Way) -> tuple[Trained, Way]:
    return replace(what, optimizer=AdamW8bit()), replace(way, recompute="block", sharded=False)


def _shard(what: Trained, way: Way) -> tuple[Trained, Way]:
    return what, replace(way, sharded=way.devices > 1, recompute="block")


def _adapters(what: Trained, way: Way) -> tuple[Trained, Way]:
    return what, replace(way, method="lora", recompute="block", sharded=False)


def _four_bits(what: Trained, way: Way) -> tuple[Trained, Way]:
    return what, replace(way, method="nf4", recompute="block", sharded=False)


CHANGES = (
    Change(say='{stage}.recompute="selective"', setting="", make=_recompute("selective")),
    Change(say='{stage}.recompute="block"', setting="", make=_recompute("block")),
    Change(say='{stage}.recompute="block" {stage}.shard="fsdp"', setting="shard", make=_shard),
    Change(say='{stage}.recompute="block" {stage}.optimizer={{kind="adamw8bit"}}', setting="", make=_eight_bits),
    Change(say='{stage}.recompute="block" {stage}.lora.base="bfloat16"', setting="lora", make=_adapters),
    Change(say='{stage}.recompute="block" {stage}.lora.base="nf4"', setting="lora", make=_four_bits),
)
"""From the cheapest on: time, then several devices, then numbers, then what is trained at all."""


def option(ask: Ask, what: Trained, way: Way, target: Target) -> Option:
    really = replace(way, offload=way.offload and not target.one_memory)
    needed = needs(what, really)
    return Option(
        way=way,
        what=what,
        needs=needed,
        peak_bytes=needed.peak,
        fits=needed.peak <= target.usable_bytes,
        pace=pace(what, really, target, ask.rows_per_step),
    )


def rows_allowed(ask: Ask, target: Target) -> list[int]:
    """Powers of two up to what a device has of a step, and that itself."""
    most = max(1, -(-ask.rows_per_step // target.devices))
    most = min(most, max(1, MOST_TOKENS[target.processor] // ask.what.model.context))
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def best(ask: Ask, what: Trained, way: Way, target: Target) -> Option:
    """With as many rows as fit; with one where none does, or as many as are asked for."""
    if way.rows:
        return option(ask, what, way, target)
    found = [option(ask, what, replace(way, rows=rows), target) for rows in rows_allowed(ask, target)]
    return next((one for one in reversed(found) if one.fits), found[0])


def alternatives(ask: Ask, target: Target) -> list[tuple[Option, str]]:
    """
    What is asked for with every level of recomputation, method, sharding, format and offload, each with its best rows;
    and why one cannot be had, or "".
    """
    free = replace(ask.way, rows=0)
    ways = [replace(free, recompute=level) for level in get_args(Level)]
    if target.devices > 1:
        ways += [replace(way, sharded=not ask.way.sharded) for way in ways]
    ways += [replace(way, method=method) for method in get_args(Method) if method != ask.way.method for way in ways]
    if ask.way.precision != "float32":
        ways.append(replace(free, precision="float32"))
    ways += [replace(free, recompute=level, offload=True) for level in get_args(Level)]
    return [(best(ask, ask.what, way, target), _missing(ask, ask.what, way, target)) for way in ways]


def _missing(ask: Ask, what: Trained, way: Way, target: Target) -> str:
    if way.offload:
        return ONE_MEMORY if target.one_memory else NO_OFFLOAD
    if way.method != ask.way.method and "lora" not in ask.available:
        return f"{ask.stage} trains all weights"
    if way.sharded and way.method != "full":
        return BASE_WHOLE
    if way.sharded and what.optimizer.kind == "adamw8bit":
        return SCALES_WHOLE
    return COMPILED_WHOLE if way.sharded and ask.compiled else ""


def fitting(ask: Ask, what: Trained, way: Way, target: Target, check: Check | None) -> Option:
    """By arithmetic, and by `check` where there is one: then with fewer rows until it fits, where they are open."""
    found = best(ask, what, way, target)
    if check is None:
        return found
    found = check(ask, target, found)
    while not found.fits and not way.rows and found.way.rows > 1:
        found = check(ask, target, best(ask, what, replace(way, rows=found.way.rows // 2), target))
    return found


def cheapest_change(ask: Ask, target: Target, check: Check | None = None) -> tuple[str, Option] | None:
    """
    The first change that makes a recipe fit that does not, and how it then is. Rows are left to the plan first, and
    nothing is told that a run would refuse.
    """
    freed = f'{ask.stage}.micro_batch_tokens="auto"' if ask.way.rows else ""
    if freed and (fewer := fitting(ask, ask.what, replace(ask.way, rows=0), target, check)).fits:
        return freed, fewer
    for change in CHANGES:
        what, way = change.make(ask.what, replace(ask.way, rows=0))
        unknown = not set(change.setting.split()) <= ask.available
        if unknown or _missing(ask, what, way, target) or (change.setting == "shard" and target.devices == 1):
            continue
        if best(ask, what, way, target).fits and (found := fitting(ask, what, way, target, check)).fits:
            whole = f'{ask.stage}.shard="none"' if ask.way.sharded and not way.sharded else ""
            return " ".join(filter(None, [freed, whole, change.say.format(stage=ask.stage)])), found
    return None


def devices_needed(ask: Ask, target: Target, most: int = 1024) -> int | None:
    """How many of the target's devices would do, each with its part; None where `most` are too few, or none may."""
    if _missing(ask, ask.what, replace(ask.way, sharded=True), target):
        return None

    def holds(count: int) -> bool:
        way = replace(ask.way, rows=1, sharded=True, devices=count, recompute="block")
        return needs(ask.what, way).peak <= target.usable_bytes

    if not holds(most):
        return None
    return next(count for count in range(2, most + 1) if holds(count))
