"""
Build a plan for a training stage, and print it as data or as text. Needs no torch.

A plan starts from what a recipe says of a training stage. Anything that needs torch is passed in.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bloomery.hw.specs import GIB
from bloomery.model.config import Lora, ModelConfig
from bloomery.train.config import LEVELS, Level, Training
from bloomery.train.plan import memory
from bloomery.train.plan.memory import (
    BASES,
    Machine,
    TrainSetup,
    Workload,
    check_shard,
    host_needs,
    in_host,
    kv_bytes,
    remarks,
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
            "sharded": way.sharded,
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
        """As text."""
        ask, choice = self.ask, self.choice
        facts, each = self.facts(), "" if ask.steps else " a step"
        flops = products_per_token(ask.what, choice.way) * ask.tokens
        lines = [
            f"{ask.stage}: {facts['parameters']:,} parameters, {ask.tokens:,} tokens{each}, {flops:.3g} FLOPs{each}, "
            f"on {self._target()}",
            f"  memory   {self._components()}",
            f"  host     {self._host()}",
            f"  choice   {describe(choice)}: {self.why}",
        ]
        if not choice.fits:
            lines += self._does_not_fit()
        else:
            lines.append(f"  time     {self._time()}")
        if choice.fits and self.target.lent_bytes is not None and choice.peak_bytes > self.target.lent_bytes:
            lines.append(
                f"  setting  Linux lends this GPU {_size(self.target.lent_bytes)} until ttm.pages_limit says more: "
                "docs/do/train-on-strix-halo.md has the line"
            )
        lines += [f"  note     {one}" for one in self.remarks]
        if ask.besides:
            lines.append(f"  note     {ask.besides}")
        if choice.way.devices > ask.rows_per_step:
            idle = choice.way.devices - ask.rows_per_step
            lines.append(f"  note     a step has {ask.rows_per_step:,} rows: {idle:,} devices would have none")
        lines.append(
            f"  disk     {_size(self.disk_bytes)} of checkpoints and models; a conversation's keys and values "
            f"take {_size(facts['kv_bytes'])}"
        )
        lines.append(f"  {'way':<50} {'rows':>5} {'peak':>11} {'tokens/s':>11}")
        lines += [self._row(one) for one in self._shown()]
        return lines

    def _row(self, candidate: Candidate) -> str:
        rate = f"{candidate.pace.tokens_per_second:,.0f}" if candidate.pace else "unknown"
        timed = self.choice.pace is not None and self.choice.pace.timed
        rate = f"~{rate}" if candidate.pace and timed and not candidate.pace.timed else rate
        mark = "" if candidate.fits else "  does not fit"
        peak = f"{'~' if self.choice.traced and not candidate.traced else ''}{_size(candidate.peak_bytes)}"
        return f"  {describe(candidate, rows=False):<50} {candidate.way.rows:>5} {peak:>11} {rate:>11}{mark}"

    def _shown(self) -> list[Candidate]:
        """Of the ways that can be had, for each method, format and sharding: those that fit, or the least."""
        groups: dict[Any, list[Candidate]] = {}
        for candidate, missing in self.others:
            if not missing:
                way = candidate.way
                groups.setdefault((way.method, way.precision, way.sharded, way.weight_dtype), []).append(candidate)
        shown = []
        for group in groups.values():
            fitting = [one for one in group if one.fits]
            shown += fitting or [min(group, key=lambda candidate: candidate.peak_bytes)]
        return shown

    def _target(self) -> str:
        target = self.target
        peak = target.peak(self.choice.way.precision)
        speed = "speed unknown" if peak is None else f"{peak / 1e12:.4g} TFLOP/s {target.flops_from}"
        several = f"{target.devices} ranks, each with its share of " if target.processor else f"{target.devices} x "
        count = several if target.devices > 1 else ""
        return f"{count}{target.name} ({_size(target.memory_bytes)}, {_size(target.usable_bytes)} usable, {speed})"

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
        breakdown = " + ".join(f"{words} {_size(parts[name])}" for name, words in PARTS.items() if parts.get(name))
        how = "traced" if self.choice.traced else "by arithmetic"
        later = "" if parts.get("gradients") else f"; gradients {_size(self.choice.needs.gradients)} come after it"
        return f"{_size(self.choice.peak_bytes)} at the peak ({how}, {MOMENTS[moment]}) = {breakdown}{later}"

    def _does_not_fit(self) -> list[str]:
        if self.change is not None:
            say, candidate = self.change
            rows = "1 row" if candidate.way.rows == 1 else f"{candidate.way.rows} rows"
            return [f"  fix      {say} fits: {_size(candidate.peak_bytes)} with {rows}"]
        count = self.devices_needed
        more = "" if count is None else f"; so would {count} such devices, each with its part"
        return [f"  fix      none of this software's ways fits; a smaller model or context would{more}"]

    def _time(self) -> str:
        if self.step_seconds is None or self.choice.pace is None:
            known = "this device" if self.target.flops is None else f"it in {self.choice.way.precision}"
            return f"unknown: no peak of {known} is known, and none is borrowed"
        share = f"matmuls at {self.target.share:.0%} of the {self.target.flops_from} peak"
        how = "steps of small models, timed here" if self.choice.pace.timed else share
        rate, most = self.choice.pace.tokens_per_second, self.choice.pace.ceiling
        whole = f"{self.step_seconds:,.2f} seconds a step" if self.seconds is None else duration(self.seconds)
        text = f"{whole} at about {rate:,.0f} tokens/s ({how}; "
        text += f"{most:,.0f} if nothing else took time"
        text += "; what devices send each other is not counted)" if self.target.devices > 1 else ")"
        if self.seconds is None:
            return text
        hours = self.seconds / 3600
        if self.price.per_hour is not None:
            text += f"; {hours * self.price.per_hour:,.2f} at {self.price.per_hour:g} an hour"
        if self.price.watts is not None:
            text += f"; {hours * self.price.watts / 1000:,.1f} kWh"
        return text


PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "copies": "copies of weights",
    "activations": "activations",
    "logits": "logits",
    "update": "update",
    "gathered": "gathered",
    "libraries": "libraries",
}
"""Of the peak, as `planning.needs` tells them, and what libraries keep for themselves."""
HOST_PARTS = {
    "processes": "processes",
    "loading": "loading the model",
    "training": "training",
    "saving": "copies of a save",
}
MOMENTS = {"loading": "while the model is made", "micro-batch": "in a micro-batch", "update": "in the update"}
METHODS = {
    "full": "all weights",
    "lora": "LoRA",
    "lora32": "LoRA on float32",
    "int8": "LoRA on int8",
    "nf4": "LoRA on NF4",
}


def _origin(candidate: Candidate) -> str:
    return "trace" if candidate.traced else "arithmetic"


def describe(candidate: Candidate, *, rows: bool = True) -> str:
    way = candidate.way
    method = METHODS[way.method] + (" in bfloat16" if way.weight_dtype == "bfloat16" else "")
    parts = [
        method,
        way.precision,
        *([f"checkpointing {way.activation_checkpointing}"] if way.activation_checkpointing != "none" else []),
    ]
    parts += ["sharded"] if way.sharded else []
    if rows:
        tokens = way.rows * candidate.what.model.context_length
        parts.append(f"{way.rows} row{'s' if way.rows > 1 else ''} ({tokens:,} tokens) at once")
    return ", ".join(parts)


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 4 else f"{size / 2**20:,.1f} MiB"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"


def asked(stage: str, config: Training, model: ModelConfig, vocab_size: int, target: Machine) -> PlanRequest:
    """What a section asks for, on a target. Raises ConfigError for what a run would refuse."""
    precision = target.precision if config.compute_dtype == "auto" else config.compute_dtype
    explicit = 0 if config.micro_batch_tokens == "auto" else rows_at_once(config, model.context_length)
    rows = rows_per_step(config, model.context_length)
    lora: Lora | None = getattr(config, "lora", None)
    level: Level = "none" if config.activation_checkpointing == "auto" else config.activation_checkpointing
    sharded = check_shard(config, target.devices, adapters=lora is not None)
    return PlanRequest(
        stage=stage,
        what=Workload(
            model=model,
            vocab_size=vocab_size,
            optimizer=config.optimizer,
            processor=target.processor,
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
            method="full" if lora is None else BASES[lora.base_dtype],
            rank=TrainSetup.rank if lora is None else lora.rank,
            sharded=sharded,
            weight_dtype=config.weight_dtype,
        ),
        available=frozenset(type(config).model_fields),
        compiled=config.compile != "off",
        levels=LEVELS if config.activation_checkpointing == "auto" else (),
        besides=config.not_planned,
    )


def planned(
    ask: PlanRequest, config: Training, target: Machine, check: FitCheck | None = None, price: HourlyPrice | None = None
) -> PlanReport:
    """The choice, by arithmetic, and by `check` where there is one: then with fewer rows until it fits."""
    choice = first_fitting(ask, lambda way: fitting(ask, ask.what, way, target, check))
    faster = _faster(choice, ask, target)
    ways = [(_as_fast(one, faster), why) for one, why in alternatives(ask, target)]
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
            return "does not fit, whatever the batch: weights, gradients and optimizer alone are more than there is"
        return "does not fit: no room for activations next to weights and optimizer"
    if ask.levels and choice.way.activation_checkpointing != "none":
        return "recomputes as little as needed to fit"
    if ask.way.rows:
        return "as the recipe says, and it fits"
    batches = max(1, -(-ask.rows_per_step // (choice.way.rows * choice.way.devices)))
    whole = "the whole step at once" if batches == 1 else f"{batches} micro-batches a step"
    return f"{whole}; as many rows as fit, up to where more are no faster"
