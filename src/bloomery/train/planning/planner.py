"""From what a recipe says of a stage that trains to a plan. Needs no torch; what needs it is handed in."""

from dataclasses import replace

from bloomery.model.config import ModelConfig
from bloomery.train.config import Finetune, Training
from bloomery.train.plan import check_shard, remarks, rows_at_once, rows_per_step
from bloomery.train.planning import disk
from bloomery.train.planning.choose import Ask, Check, Option, alternatives, cheapest_change, devices_needed, fitting
from bloomery.train.planning.needs import BASES, Trained, Way
from bloomery.train.planning.report import Plan, Price
from bloomery.train.planning.speed import pace
from bloomery.train.planning.target import Target
from bloomery.train.preference.config import Prefer


def asked(stage: str, config: Training, model: ModelConfig, vocab_size: int, target: Target) -> Ask:
    """What a section asks for, on a target. Raises ConfigError for what a run would refuse."""
    precision = target.precision if config.precision == "auto" else config.precision
    explicit = 0 if config.micro_batch_tokens == "auto" else rows_at_once(config, model.context)
    rows = rows_per_step(config, model.context)
    lora = config.lora if isinstance(config, Finetune | Prefer) else None
    prefers = config if isinstance(config, Prefer) else None
    sharded = check_shard(config, target.devices, adapters=lora is not None)
    shape = Trained(
        model=model, vocab_size=vocab_size, optimizer=config.optimizer, processor=target.processor, lora=lora
    )
    return Ask(
        stage=stage,
        what=shape if prefers is None else replace(shape, reference=prefers.keeps_reference),
        rows_per_step=rows,
        steps=config.steps,
        way=Way(
            rows=min(explicit, -(-rows // target.devices)),
            recompute=config.recompute,
            precision=precision,
            devices=target.devices,
            method="full" if lora is None else BASES[lora.base],
            rank=Way.rank if lora is None else lora.rank,
            sharded=sharded,
        ),
        available=frozenset(type(config).model_fields),
        compiled=config.compile != "off",
        besides="" if prefers is None else prefers.not_planned,
    )


def planned(ask: Ask, config: Training, target: Target, check: Check | None = None, price: Price | None = None) -> Plan:
    """The choice, by arithmetic, and by `check` where there is one: then with fewer rows until it fits."""
    choice = fitting(ask, ask.what, ask.way, target, check)
    faster = _faster(choice, ask, target)
    ways = [(_as_fast(one, faster), why) for one, why in alternatives(ask, target)]
    return Plan(
        ask=ask,
        target=target,
        choice=choice,
        why=_why(ask, target, choice),
        others=[(_as_chosen(one, choice, target), why) for one, why in ways],
        change=None if choice.fits else cheapest_change(ask, target, check),
        devices_needed=None if choice.fits else devices_needed(ask, target),
        disk_bytes=disk.training_bytes(config, ask.what, choice.way),
        price=price or Price(),
        remarks=remarks(config, ask.what.model.context),
    )


def _faster(choice: Option, ask: Ask, target: Target) -> float:
    """How many times as fast as was reckoned the choice was found to be, where it was timed; else 1."""
    reckoned = pace(ask.what, choice.way, target, ask.rows_per_step)
    if reckoned is None or choice.pace is None or not choice.pace.timed:
        return 1.0
    return choice.pace.tokens_per_second / reckoned.tokens_per_second


def _as_fast(one: Option, faster: float) -> Option:
    """
    A way whose reckoned speed is as far from the truth as that of the choice: else one that computes more would seem
    faster than the choice.
    """
    if one.pace is None or faster == 1.0:
        return one
    rate = min(faster * one.pace.tokens_per_second, one.pace.ceiling)
    return replace(one, pace=replace(one.pace, tokens_per_second=rate))


def _as_chosen(one: Option, choice: Option, target: Target) -> Option:
    """A way with the memory of the choice, where it is that; or that without what it would keep on the host."""
    if one.way == choice.way:
        return choice
    if replace(one.way, offload=False) != choice.way:
        return one
    peak = choice.peak_bytes - choice.needs.optimizer + one.needs.optimizer
    return replace(one, peak_bytes=peak, fits=peak <= target.usable_bytes)


def _why(ask: Ask, target: Target, choice: Option) -> str:
    if not choice.fits:
        floor = choice.needs.resting + choice.needs.gradients
        if floor > target.usable_bytes:
            return "does not fit, whatever the batch: weights, gradients and optimizer alone are more than there is"
        return "does not fit: activations are too much besides weights and optimizer"
    if ask.way.rows:
        return "as the recipe says, and it fits"
    batches = max(1, -(-ask.rows_per_step // (choice.way.rows * choice.way.devices)))
    whole = "the whole step at once" if batches == 1 else f"{batches} micro-batches a step"
    return f"{whole}; as many rows as fit, up to where more are no faster"
