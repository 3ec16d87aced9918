"""
Build a plan for a training stage, and print it as data or as text. Needs no torch.

A plan starts from what a recipe says of a training stage. Anything that needs torch is passed in.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bloomery.core.errors import ConfigError, wrapped
from bloomery.core.log import about, counted
from bloomery.hw.specs import GIB
from bloomery.model.config import FLOAT8_SIDE, Lora, ModelConfig, without_float8
from bloomery.train.config import LEVELS, Level, Training, remarks
from bloomery.train.plan import memory
from bloomery.train.plan.gpu_time import BUS, HOST_DEVICES, HOST_MEMORY, bus_bytes, host_update
from bloomery.train.plan.memory import (
    BASES,
    MEASURED_SHARE,
    Machine,
    TrainSetup,
    Workload,
    check_offload,
    check_shard,
    host_needs,
    in_host,
    matrix_sides,
    may_offload,
    needs,
    rows_at_once,
    rows_per_step,
)
from bloomery.train.plan.search import (
    Candidate,
    FitCheck,
    PlanRequest,
    alternatives,
    cheapest_change,
    devices_needed,
    first_fitting,
    fitting,
    pace,
    products_per_token,
)


@dataclass(frozen=True, kw_only=True)
class HourlyPrice:
    """What an hour costs, of all devices together: in money of any kind, and in watts."""

    per_hour: float | None = None
    watts: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Of one stage that trains."""

    ask: PlanRequest
    target: Machine
    choice: Candidate
    why: str
    others: list[tuple[Candidate, str]]
    change: tuple[str, Candidate] | None
    """The cheapest that would make it fit, where it does not."""
    devices_needed: int | None
    disk_bytes: int
    price: HourlyPrice = HourlyPrice()
    remarks: Sequence[str] = ()

    @property
    def tokens_per_second(self) -> float | None:
        return self.choice.pace.tokens_per_second if self.choice.pace else None

    @property
    def seconds(self) -> float | None:
        """None where the choice does not fit, or no speed or number of steps is known."""
        return self.step_seconds * self.ask.steps if self.step_seconds and self.ask.steps else None

    @property
    def step_seconds(self) -> float | None:
        rate = self.tokens_per_second if self.choice.fits else None
        return self.ask.step_tokens / rate if rate else None

    def facts(self) -> dict[str, Any]:
        """As JSON data."""
        ask, target, choice, seconds = self.ask, self.target, self.choice, self.seconds
        moment, parts = choice.at_peak
        flops = products_per_token(ask.what, choice.way) * ask.tokens
        hours = None if seconds is None else seconds / 3600
        return {
            "parameters": ask.what.parameters,
            "steps": ask.steps or None,
            "steps_from": ask.steps_from,
            "tokens": ask.tokens if ask.steps else None,
            "flops": flops if ask.steps else None,
            **{f"{name}_bytes": size for name, size in self._sizes().items()},
            "kv_bytes": kv_bytes(ask.what.model),
            "peak_bytes": choice.peak_bytes,
            "at_peak": {"moment": moment, **{f"{name}_bytes": size for name, size in parts.items()}},
            "peak_from": _origin(choice),
            "disk_bytes": self.disk_bytes,
            "device": target.name,
            "devices": target.devices,
            "memory_bytes": target.memory_bytes,
            "usable_bytes": target.usable_bytes,
            "fits": choice.fits,
            "host_bytes": sum(self.host.values()),
            "host_memory_bytes": target.host_bytes,
            "tokens_per_second": _round(self.tokens_per_second),
            "tokens_per_second_at_peak": _round(choice.pace.ceiling if choice.pace else None),
            "speed_from": self._speed_from(choice),
            "seconds": _round(seconds),
            "seconds_per_step": _round(self.step_seconds),
            "cost": None if hours is None or self.price.per_hour is None else round(hours * self.price.per_hour, 2),
            "kilowatt_hours": None
            if hours is None or self.price.watts is None
            else round(hours * self.price.watts / 1000, 2),
            "choice": self._way(choice) | {"why": self.why},
            "alternatives": [
                self._way(candidate) | {"available": not missing, "why_not": missing}
                for candidate, missing in self.others
            ],
            "change": None if self.change is None else {"settings": self.change[0]} | self._way(self.change[1]),
            "devices_needed": self.devices_needed,
            "remarks": [*self.remarks],
            **({"not_planned": ask.besides} if ask.besides else {}),
        }

    def _way(self, candidate: Candidate) -> dict[str, Any]:
        ask, way = self.ask, candidate.way
        return {
            "micro_batch_tokens": way.rows * ask.what.model.context_length,
            "rows": way.rows,
            "micro_batches": self.micro_batches(candidate),
            "activation_checkpointing": way.activation_checkpointing,
            "precision": way.precision,
            "method": way.method,
            "weight_dtype": way.weight_dtype,
            "residual_dtype": way.residual_dtype,
            "float8": way.float8,
            "sharded": way.sharded,
            "offload": "host" if way.offload else "none",
            "devices": way.devices,
            "optimizer": candidate.what.optimizer.kind,
            "peak_bytes": candidate.peak_bytes,
            "peak_from": _origin(candidate),
            "fits": candidate.fits,
            "tokens_per_second": _round(candidate.pace.tokens_per_second if candidate.pace else None),
            "speed_from": self._speed_from(candidate),
        }

    def _speed_from(self, candidate: Candidate) -> str:
        """Steps of small models that were timed here, or the source of the peak."""
        if candidate.pace is None:
            return "unknown"
        return "timed" if candidate.pace.timed else self.target.flops_from

    def micro_batches(self, candidate: Candidate) -> int:
        return max(1, -(-self.ask.rows_per_step // (candidate.way.rows * candidate.way.devices)))

    def lines(self) -> list[str]:
        """As text of 80 columns."""
        ask, choice, kv = self.ask, self.choice, kv_bytes(self.ask.what.model)
        flops = f"{products_per_token(ask.what, choice.way) * ask.tokens:.1e}".replace("e+", "e")
        each = "" if ask.steps else " per step"
        rows = [
            ("on", self._target()),
            ("setup", f"{describe(choice)}; {self.why}"),
            ("memory", self._components()),
            ("host", self._host()),
            *([("time", self._time())] if choice.fits else [("fix", fix(self))]),
        ]
        if choice.fits and self.target.lent_bytes is not None and choice.peak_bytes > self.target.lent_bytes:
            lent = _size(self.target.lent_bytes)
            hint = "See docs/do/train-on-strix-halo.md."
            rows.append(("setting", f"Linux lends this GPU {lent} until ttm.pages_limit allows more. {hint}"))
        moved = bus(ask, choice) if choice.way.offload and not self.target.processor else ""
        rows += [("note", note) for note in (*self.remarks, ask.besides, moved) if note]
        if choice.way.devices > ask.rows_per_step:
            idle = choice.way.devices - ask.rows_per_step
            step = counted(ask.rows_per_step, "sequence")
            rows.append(("note", f"a step has {step}, so {counted(idle, 'device')} would have none"))
        rows.append(("disk", f"{_size(self.disk_bytes)} for checkpoints and models"))
        rows.append(("chat", f"keys and values of one full context take {_size(kv)}"))
        tokens = f"{ask.tokens:,} tokens{each}, {flops} FLOPs{each}"
        head = f"  {'setup' + self._marks():<46}{'sequences':>10}{'peak':>11}{'tokens/s':>11}"
        return [
            f"{ask.stage}: {ask.what.parameters:,} parameters, {tokens}",
            *(line for label, text in rows for line in wrapped(f"  {label:<8} {text}", " " * 11).split("\n")),
            "",
            head,
            *(self._row(candidate) for candidate in self._shown()),
        ]

    def _marks(self) -> str:
        others = [candidate for candidate in self._shown() if candidate is not self.choice]
        return " (~: estimated)" if any("~" in self._row(candidate) for candidate in others) else ""

    def _row(self, candidate: Candidate) -> str:
        rate = f"{candidate.pace.tokens_per_second:,.0f}" if candidate.pace else "unknown"
        timed = self.choice.pace is not None and self.choice.pace.timed
        rate = f"~{rate}" if candidate.pace and timed and not candidate.pace.timed else rate
        rate = rate if candidate.fits else "too large"
        peak = f"{'~' if self.choice.traced and not candidate.traced else ''}{_size(candidate.peak_bytes)}"
        name = describe(candidate, rows=False, precision=candidate.way.precision != self.choice.way.precision)
        return f"  {name:<46}{candidate.way.rows:>10}{peak:>11}{rate:>11}"

    def _shown(self) -> list[Candidate]:
        """Of the setups that can be had, for each method, format and sharding: those that fit, or the least."""
        groups: dict[Any, list[Candidate]] = {}
        for candidate, missing in self.others:
            if not missing:
                way = candidate.way
                kind = (way.method, way.precision, way.sharded, way.offload, way.weight_dtype)
                groups.setdefault(kind, []).append(candidate)
        shown = []
        for group in groups.values():
            fitting = [one for one in group if one.fits]
            shown += fitting or [min(group, key=lambda candidate: candidate.peak_bytes)]
        return shown

    def _target(self) -> str:
        target = self.target
        peak = target.peak(self.choice.way.precision)
        source = SOURCES[target.flops_from]
        speed = "speed unknown" if peak is None else f"{peak / 1e12:.4g} TFLOP/s ({source})"
        several = f"{target.devices} processes, each with its share of " if target.processor else f"{target.devices} x "
        count = several if target.devices > 1 else ""
        return f"{count}{target.name}: {_size(target.usable_bytes)} of {_size(target.memory_bytes)} usable, {speed}"

    @property
    def host(self) -> dict[str, int]:
        """Bytes of the host's memory that the choice takes, by `HOST_PARTS`."""
        return host_needs(self.ask.what, self.choice.way, self.target, self.choice.peak_bytes)

    @property
    def fits_in_host(self) -> bool:
        choice = self.choice
        return self.target.host_bytes is None or in_host(choice.what, choice.way, self.target, choice.peak_bytes)

    def _host(self) -> str:
        there = "" if self.target.host_bytes is None else f" of {_size(self.target.host_bytes)}"
        breakdown = " + ".join(f"{HOST_PARTS[name]} {_size(size)}" for name, size in self.host.items())
        return f"{_size(sum(self.host.values()))}{there} of the computer's own memory = {breakdown}"

    def _sizes(self) -> dict[str, int]:
        """Of each part as it is at the peak, or by arithmetic where it is not there yet or any more."""
        parts, reckoned = self.choice.at_peak[1], asdict(self.choice.needs)
        return {name: parts.get(name) or reckoned.get(name, 0) for name in PARTS}

    def _components(self) -> str:
        moment, parts = self.choice.at_peak
        largest_first = sorted((name for name in PARTS if parts.get(name)), key=lambda name: -parts[name])
        breakdown = ", ".join(f"{PARTS[name]} {_size(parts[name])}" for name in largest_first)
        how = "traced" if self.choice.traced else "estimated"
        gradients = 0 if parts.get("gradients") else self.choice.needs.gradients
        later = f"; gradients ({_size(gradients)}) come later" if gradients else ""
        return f"{_size(self.choice.peak_bytes)} at the peak, {MOMENTS[moment]} ({how}): {breakdown}{later}"

    def _time(self) -> str:
        if self.step_seconds is None or self.choice.pace is None:
            known = "of this device" if self.target.flops is None else f"in {self.choice.way.precision}"
            return f"unknown: no peak {known} is known"
        rate, most = self.choice.pace.tokens_per_second, self.choice.pace.ceiling
        share = f"assuming {100 * MEASURED_SHARE:.0f} % of the measured peak"
        shapes = f"estimated from shapes and the {SOURCES[self.target.flops_from]}"
        estimated = share if self.target.processor else shapes
        how = "timed here with small models" if self.choice.pace.timed else estimated
        whole = f"about {self.step_seconds:,.2f} seconds per step" if self.seconds is None else about(self.seconds)
        text = f"{whole} at {rate:,.0f} tokens/s, {how} (at the full peak: {most:,.0f} tokens/s"
        unknown = self.target.devices > 1 and (self.target.link is None or self.target.devices > HOST_DEVICES)
        where = "devices" if self.target.link is None else "hosts"
        text += f"; without communication between {where})" if unknown else ")"
        if self.seconds is None:
            return text
        hours = self.seconds / 3600
        if self.price.per_hour is not None:
            text += f"; {hours * self.price.per_hour:,.2f} at {self.price.per_hour:g} per hour"
        if self.price.watts is not None:
            text += f"; {hours * self.price.watts / 1000:,.1f} kWh"
        return text


def fix(plan: PlanReport) -> str:
    """What makes a stage fit that does not."""
    if plan.change is not None:
        settings, candidate = plan.change
        sequences = counted(candidate.way.rows, "sequence")
        text = f"{settings} fits: {_size(candidate.peak_bytes)} with {sequences} per micro-batch"
        if not candidate.way.offload:
            return text
        needed = sum(host_needs(candidate.what, candidate.way, plan.target, candidate.peak_bytes).values())
        count = plan.devices_needed
        more = "" if count is None else f" Or use {count} such devices with {_shared(plan.ask, count)}."
        return f"{text}, and {_size(needed)} of the computer's own memory. {bus(plan.ask, candidate)}{more}"
    context, count = context_that_fits(plan), plan.devices_needed
    smaller = "a smaller model" if context is None else f"a context of {context:,} tokens (estimated)"
    more = "" if count is None else f", or {count} such devices with {_shared(plan.ask, count)}"
    return f"no other setting makes it fit; use {smaller}{more}"


def _shared(ask: PlanRequest, devices: int) -> str:
    """The setting with which so many devices share a model."""
    return f"{ask.stage}.mesh.dp_shard={devices}" if ask.way.shards else f'{ask.stage}.parallelism="fsdp"'


def context_that_fits(plan: PlanReport) -> int | None:
    """The largest power of two below the context of a plan with which one sequence fits by arithmetic, if any."""
    ask, length = plan.ask, plan.ask.what.model.context_length
    for power in range((length - 1).bit_length() - 1, 6, -1):
        shorter = replace(ask.what, model=ask.what.model.model_copy(update={"context_length": 2**power}))
        if needs(shorter, replace(ask.way, rows=1)).peak <= plan.target.usable_bytes:
            return int(2**power)
    return None


SOURCES = {"measured": "measured", "catalogue": "spec sheet", "unknown": "unknown"}
"""Of a peak, in the words of a text."""


PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "copies": "copies of weights",
    "activations": "activations",
    "logits": "logits",
    "update": "update",
    "gathered": "gathered weights",
    "libraries": "libraries",
}
"""Of the peak, as `planning.needs` tells them, and what libraries keep for themselves."""
HOST_PARTS = {
    "processes": "processes",
    "loading": "loading the model",
    "training": "training",
    "saving": "copies of a save",
    "offloaded": "weights, gradients and optimizer",
}
MOMENTS = {"loading": "while the model is built", "micro-batch": "in a micro-batch", "update": "in the update"}
METHODS = {
    "full": "all weights",
    "lora": "LoRA",
    "lora32": "LoRA on float32",
    "int8": "LoRA on int8",
    "nf4": "LoRA on NF4",
}


def _origin(candidate: Candidate) -> str:
    return "trace" if candidate.traced else "arithmetic"


def describe(candidate: Candidate, *, rows: bool = True, precision: bool = True) -> str:
    way = candidate.way
    parts = [
        "bfloat16 weights" if way.weight_dtype == "bfloat16" else METHODS[way.method],
        *([way.precision] if precision else []),
        *([f"checkpointing {way.activation_checkpointing}"] if way.activation_checkpointing != "none" else []),
    ]
    parts += ["offload"] if way.offload else ["sharded"] if way.sharded else []
    if rows:
        tokens = way.rows * candidate.what.model.context_length
        parts += ["residual stream in bfloat16"] if way.residual_dtype == "bfloat16" else []
        parts += [f'float8="{way.float8}"'] if way.float8 != "off" else []
        parts.append(f"{counted(way.rows, 'sequence')} ({tokens:,} tokens) per micro-batch")
    return ", ".join(parts)


def bus(ask: PlanRequest, candidate: Candidate) -> str:
    """What a configuration that offloads costs in a step, as a sentence."""
    moved = bus_bytes(candidate.what, candidate.way, ask.rows_per_step)
    update = host_update(candidate.what, candidate.way)
    copies = f"{_size(int(moved))} between host and device ({_seconds(moved / BUS)} at an assumed {BUS / 1e9:.0f} GB/s)"
    return f"Each step copies {copies}, and the CPU updates in {_seconds(update)} (at {HOST_MEMORY / 1e9:.0f} GB/s)."


def _seconds(value: float) -> str:
    return f"{value:,.{2 if value < 1 else 1 if value < 10 else 0}f} s"


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _size(size: int) -> str:
    if size >= GIB / 4:
        return f"{size / GIB:,.{2 if size < 1000 * GIB else 0}f} GiB"
    return f"{size / 2**20:,.1f} MiB"


def kv_bytes(model: ModelConfig, bytes_per_number: int = 2) -> int:
    """Of keys and values of one conversation as long as the context."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * model.context_length * bytes_per_number


def check_formats(config: Training, model: ModelConfig, target: Machine, stage: str) -> None:
    """Raises ConfigError for short formats that a target does not compute in, or a model has no shapes for."""
    precision = target.precision if config.compute_dtype == "auto" else config.compute_dtype
    for name, (value, default) in config.short_formats.items():
        if precision != "bfloat16":
            what = f'{name}="{value}" needs matmuls in bfloat16, but {target.name} computes in {precision}'
            hint = f'Set {stage}.precision="bfloat16", or {stage}.{name}="{default}".'
            raise ConfigError(what, where=f"{stage}.{name}", hint=hint)
    if config.float8 != "off" and (target.processor or target.float8 is False):
        what = f'float8="{config.float8}" needs a GPU that multiplies numbers of 8 bits, not {target.name}'
        raise ConfigError(what, where=f"{stage}.float8", hint=f'Set {stage}.float8="off".')
    sides = list(matrix_sides(model)) if config.float8 == "all" else [(model.hidden_size, FLOAT8_SIDE)]
    odd = next((sizes for sizes in sides if sizes[0] % FLOAT8_SIDE or sizes[1] % FLOAT8_SIDE), None)
    if config.float8 != "off" and odd is not None:
        what = f'float8="{config.float8}" needs matrices with sides that are multiples of {FLOAT8_SIDE}'
        raise ConfigError(
            f"{what}, but one has {odd[1]:,} x {odd[0]:,}",
            where=f"{stage}.float8",
            hint=without_float8(model.hidden_size),
        )


def asked(stage: str, config: Training, model: ModelConfig, vocab_size: int, target: Machine) -> PlanRequest:
    """What a section asks for, on a target. Raises ConfigError for what a run would refuse."""
    precision = target.precision if config.compute_dtype == "auto" else config.compute_dtype
    explicit = 0 if config.micro_batch_tokens == "auto" else rows_at_once(config, model.context_length)
    rows = rows_per_step(config, model.context_length)
    lora: Lora | None = getattr(config, "lora", None)
    level: Level = "none" if config.activation_checkpointing == "auto" else config.activation_checkpointing
    mesh = check_shard(config, target.devices, adapters=lora is not None)
    check_offload(config.offload, target, type(config).__name__.lower())
    check_formats(config, model, target, type(config).__name__.lower())
    shards = 1 if mesh is None else mesh.dp_shard * mesh.tp
    accepted = may_offload(config, target.devices, adapters=lora is not None)
    refused = (set() if config.may_shard else {"parallelism"}) | (set() if accepted else {"offload"})
    offloads = accepted and target.offloads and (mesh is not None or target.devices == 1)
    return PlanRequest(
        stage=stage,
        what=Workload(
            model=model,
            vocab_size=vocab_size,
            optimizer=config.optimizer,
            processor=target.processor,
            memory_bytes=target.memory_bytes,
            lora=lora,
            initialized=stage == "pretrain" and getattr(config, "start_from", None) is None,
            reference=config.keeps_reference,
        ),
        rows_per_step=rows,
        steps=config.steps,
        steps_from="recipe" if config.steps else "unknown",
        way=TrainSetup(
            rows=min(explicit, -(-rows // target.devices)),
            activation_checkpointing=level,
            precision=precision,
            devices=target.devices,
            method="full" if lora is None else BASES[lora.frozen_dtype],
            rank=TrainSetup.rank if lora is None else lora.rank,
            sharded=shards > 1 or config.offload == "host",
            shards=shards if config.mesh is not None and (shards > 1 or config.offload == "host") else 0,
            zero_stage=3 if mesh is None else mesh.zero_stage,
            weight_dtype=config.weight_dtype,
            residual_dtype=config.residual_dtype,
            float8=config.float8,
            compiled=config.compile == "on",
            offload=config.offload == "host",
        ),
        available=frozenset(type(config).model_fields) - refused,
        may_offload=config.offload == "auto" and offloads,
        levels=LEVELS if config.activation_checkpointing == "auto" else (),
        besides=config.not_planned,
    )


def planned(
    ask: PlanRequest, config: Training, target: Machine, check: FitCheck | None = None, price: HourlyPrice | None = None
) -> PlanReport:
    """The choice, by arithmetic, and by `check` where there is one: then with fewer rows until it fits."""
    choice = first_fitting(ask, lambda way: fitting(ask, ask.what, way, target, check))
    faster = _faster(choice, ask, target)
    ways = [(_as_fast(one, faster), why) for one, why in alternatives(ask, target, offload=choice.way.offload)]
    return PlanReport(
        ask=ask,
        target=target,
        choice=choice,
        why=_why(ask, target, choice),
        others=[(choice if one.way == choice.way else one, why) for one, why in ways],
        change=None if choice.fits else cheapest_change(ask, target, check),
        devices_needed=None if choice.fits else devices_needed(ask, target),
        disk_bytes=memory.training_bytes(config, ask.what, choice.way),
        price=price or HourlyPrice(),
        remarks=remarks(config, ask.what.model.context_length),
    )


def _faster(choice: Candidate, ask: PlanRequest, target: Machine) -> float:
    """Measured speed of the choice as a multiple of the estimated speed, if it was timed; else 1."""
    reckoned = pace(ask.what, choice.way, target, ask.rows_per_step)
    if reckoned is None or choice.pace is None or not choice.pace.timed:
        return 1.0
    return choice.pace.tokens_per_second / reckoned.tokens_per_second


def _as_fast(candidate: Candidate, faster: float) -> Candidate:
    """
    A configuration with its estimated speed scaled by the same correction as the choice. Without it, a configuration
    that computes more would seem faster than the choice.
    """
    if candidate.pace is None or faster == 1.0:
        return candidate
    rate = min(faster * candidate.pace.tokens_per_second, candidate.pace.ceiling)
    return replace(candidate, pace=replace(candidate.pace, tokens_per_second=rate))


def _why(ask: PlanRequest, target: Machine, choice: Candidate) -> str:
    if not choice.fits:
        if choice.peak_bytes <= target.usable_bytes:
            return "does not fit into the computer's own memory"
        floor = choice.needs.resting + choice.needs.gradients
        if floor > target.usable_bytes:
            return "does not fit with any batch: weights, gradients and optimizer alone are too large"
        return "does not fit: activations have no room next to weights and optimizer"
    if ask.may_offload and choice.way.offload:
        return "nothing else that the recipe allows fits"
    if ask.levels and choice.way.activation_checkpointing != "none":
        return "recomputes as little as needed to fit"
    if ask.way.rows:
        return "as the recipe says"
    batches = max(1, -(-ask.rows_per_step // (choice.way.rows * choice.way.devices)))
    return f"{counted(batches, 'micro-batch', 'micro-batches')} per step"
