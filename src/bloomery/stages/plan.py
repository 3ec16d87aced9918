"""
The output of `bloomery plan`: which stages would run and why, and what training needs.

This module needs no torch.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bloomery.core import pipeline
from bloomery.core.config import Config, plain
from bloomery.core.errors import DataError
from bloomery.core.io import MANIFEST
from bloomery.core.pipeline import Stage
from bloomery.core.pipeline import StagePlan as Laid
from bloomery.data.sources import http_client
from bloomery.hw.specs import GIB, named
from bloomery.model.config import ModelConfig
from bloomery.stages.config import Pretrain
from bloomery.train import metrics
from bloomery.train.config import Training
from bloomery.train.plan import memory
from bloomery.train.plan import report as plan_report
from bloomery.train.plan.memory import Machine, of_entry, of_memory, trained_tokens
from bloomery.train.plan.report import HourlyPrice, PlanReport
from bloomery.train.plan.search import FitCheck

Here = Callable[[Training, int], Machine]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """For which machine a plan is made. Without a device and a memory it is this one."""

    device: str | None = None
    memory_bytes: int | None = None
    devices: int | None = None
    """As many as the section has ranks, where nothing is said."""
    price: HourlyPrice = field(default_factory=HourlyPrice)

    def target(self, config: Training, here: Here | None) -> Machine:
        devices = self.devices or config.ranks
        if self.device is not None:
            return of_entry(named(self.device, self.memory_bytes), devices, self.memory_bytes)
        if self.memory_bytes is not None:
            return of_memory(self.memory_bytes, devices)
        if here is None:
            unknown = "an assumed device of 16 GiB, as nothing is known of this machine without torch"
            return replace(of_memory(UNKNOWN_BYTES, devices), name=f"{unknown} (say --device or --memory)")
        return here(config, devices)


LOOKED_AT = {"hellaswag": "file", "continue_from": "folder", "gpt2": "folder"}
"""Paths that no fingerprint holds, and what they are: otherwise seen when their stage begins."""


def report(
    stage_table: Sequence[Stage], recipe: Any, root: Path, wish: Wish
) -> tuple[dict[str, Any], dict[str, PlanReport]]:
    """
    What `bloomery plan --json` prints of a recipe (`facts`), and the plans of the stages that train. Writes nothing.

    Raises ConfigError, DataError, HardwareError or RunError for what would end the run before its first stage.
    """
    with http_client.impatiently():
        laid = pipeline.plan_stages(stage_table, recipe, root, blind=True)
    if wish.device is None and wish.memory_bytes is None:
        pipeline.check_needed(laid)
    for one in laid:
        if not one.fresh:
            check_paths(one.stage.name, one.config)
    made: dict[str, PlanReport] = {}
    if (pretrain := recipe.pretrain) is not None:
        tools: dict[str, Any] = {}
        if importlib.util.find_spec("torch") is not None:
            tools = {"here": pipeline.resolve("bloomery.train.plan.here:here")}
            if is_traced(pretrain.model):
                tools["check"] = pipeline.resolve("bloomery.train.plan.here:check")
        sections = {"pretrain": pretrain, "finetune": recipe.finetune, "prefer": recipe.prefer}
        rows = pipeline.resolve("bloomery.stages.tokenizer:vocab_size")(recipe.tokenizer)
        if pretrain.start_from is not None:
            rows = pipeline.resolve("bloomery.stages.pretrain:num_rows")(pretrain, rows)
        made = plans(sections, pretrain.model, rows, wish, **tools)
    more: dict[str, Any] = {"only_here": only_here(recipe)}
    if pretrain is not None and pretrain.depth:
        more = {"depth": _depth_facts(pretrain), **more}
    missing = pipeline.missing_sections(stage_table, recipe)
    return facts(recipe.name, laid, missing, made, more, recipe.shard.tokens), made


def only_here(recipe: Any) -> list[str]:
    """What of the model no other program has; nothing where none is trained, or where there is no torch."""
    if recipe.pretrain is None or importlib.util.find_spec("torch") is None:
        return []
    reasons: list[str] = pipeline.resolve("bloomery.weights.architectures:reasons")(recipe.pretrain.model)
    return reasons


def _depth_facts(pretrain: Pretrain) -> dict[str, Any]:
    """What the dial of [pretrain] came to, with what the recipe says itself."""
    return {
        "depth": pretrain.depth,
        "model": pretrain.model.model_dump(include={"width", "num_layers", "num_heads", "num_kv_heads", "mlp_width"}),
        "tokens_per_step": trained_tokens(pretrain.tokens_per_step, pretrain.model.context),
        "steps": pretrain.steps,
        "rates": {
            name: rate for name, rate in pretrain.optimizer.model_dump().items() if name.endswith("learning_rate")
        },
    }


def needed(section: str, config: Config) -> None:
    """Raises DataError for a sink whose package is missing, and what `check_paths` does."""
    if isinstance(config, Training):
        metrics.needed(section, config)
    check_paths(section, config)


def check_paths(section: str, config: Config) -> None:
    """Raises DataError for a path of LOOKED_AT that is not there, or is of another kind."""
    for name, kind in LOOKED_AT.items():
        path: Path | None = getattr(config, name, None)
        is_kind = os.path.isfile if kind == "file" else os.path.isdir
        if path is not None and not is_kind(path.expanduser()):
            hint = f"Name a {kind} that is there, or leave {section}.{name} out."
            raise DataError(f"there is no such {kind}", where=f"{section}.{name} = {path}", hint=hint)


MAX_TRACED_LAYERS, MAX_TRACED_CONTEXT = 200, 2**17


def is_traced(model: ModelConfig) -> bool:
    """Whether a plan traces a model: a trace of a deeper or longer one takes minutes, and arithmetic answers soon."""
    return model.num_layers <= MAX_TRACED_LAYERS and model.context <= MAX_TRACED_CONTEXT


UNKNOWN_BYTES = 16 * GIB
"""Of a device that nobody names, where there is no torch to look for one."""


def plans(
    sections: Mapping[str, Training | None],
    model: ModelConfig,
    vocab_size: int,
    wish: Wish,
    *,
    here: Here | None = None,
    check: FitCheck | None = None,
) -> dict[str, PlanReport]:
    """Of the stages that train, by their names."""
    found = {}
    for name, config in sections.items():
        if config is not None:
            target = wish.target(config, here)
            ask = plan_report.asked(name, config, model, vocab_size, target)
            found[name] = plan_report.planned(ask, config, target, check, wish.price)
    return found


def facts(
    recipe: str,
    laid: Sequence[Laid],
    left_out: Mapping[str, Sequence[str]],
    made: Mapping[str, PlanReport],
    told: Mapping[str, Any],
    shard_tokens: int | None,
) -> dict[str, Any]:
    """All of it as JSON data: of each stage, and of the one that needs most on top."""
    found: dict[str, Any] = {
        "recipe": recipe,
        "stages": [
            {
                "stage": one.stage.name,
                "fresh": None if one.unseen else one.fresh,
                "why": why(one),
                "folder": None if one.unseen else str(one.folder),
            }
            for one in laid
        ],
        "missing_sections": dict(left_out),
        **told,
    }
    each = {name: plan.facts() for name, plan in made.items()}
    found |= dict.fromkeys((*ON_TOP, "fits", "seconds", "disk_bytes"))  # null, where no stage trains
    if each:
        largest = max(each, key=lambda name: int(each[name]["peak_bytes"]))
        top = each[largest]
        seconds = [one["seconds"] for one in each.values()]
        plan = made[largest]
        shards = 0 if shard_tokens is None else memory.shard_bytes(shard_tokens, plan.ask.what.vocab_size)
        found |= {name: top[name] for name in ON_TOP}
        found |= {
            "fits": all(one["fits"] for one in each.values()),
            "seconds": None if None in seconds else round(sum(seconds), 1),
            "disk_bytes": shards + sum(one["disk_bytes"] for one in each.values()),
        }
    return found | each


ON_TOP = ("parameters", "weights_bytes", "peak_bytes", "tokens_per_second", "choice", "alternatives")


def why(one: Laid) -> str:
    """Why a stage is fresh, or would run."""
    if one.unseen:
        return f"unknown: {one.unseen}"
    problem = pipeline.damage(one.folder)
    if not problem:
        return "done with these settings and inputs"
    if one.folder.exists():
        return "begun, and goes on" if one.stage.resumes else problem
    beginning = one.folder.name.removesuffix(one.fingerprint)
    others = [folder for folder in one.folder.parent.glob(f"{beginning}*") if (folder / MANIFEST).is_file()]
    if not others:
        return "never done"
    newest = max(others, key=lambda folder: (folder / MANIFEST).stat().st_mtime)
    before, now = pipeline.read_manifest(newest)["config"], plain(one.config)
    fixed = plain(one.config, stable_only=True)
    changed = [key for key in fixed if before.get(key) != now[key]]
    return f"{', '.join(changed) or 'what it is made from'} changed since {newest.name}"


def _line(one: Mapping[str, Any]) -> str:
    """Of a stage."""
    state = "fresh" if one["fresh"] else "will run"
    return f"{one['stage']:<11} {state:<9} {one['folder']}" + ("" if one["fresh"] else f"  ({one['why']})")


def lines(told: Mapping[str, Any], made: Mapping[str, PlanReport]) -> list[str]:
    """As text."""
    found = [_line(one) for one in told["stages"] if one["fresh"] is not None]
    if unseen := [one for one in told["stages"] if one["fresh"] is None]:
        names = ", ".join(one["stage"] for one in unseen)
        found.insert(0, f"Whether these are fresh is {unseen[0]['why']}\n    {names}")
    for name, missing in told["missing_sections"].items():
        sections = " and ".join(f"[{one}]" for one in missing)
        found.append(f"{name:<11} {'left out':<9} the recipe has no section {sections}")
    if depth := told.get("depth"):
        rates = ", ".join(f"{name} {rate:g}" for name, rate in depth["rates"].items())
        model = depth["model"]
        found.append(
            f"pretrain: depth {depth['depth']}: width {model['width']}, {model['num_heads']} heads, mlp_width "
            f"{model['mlp_width']}, {depth['steps']:,} steps of {depth['tokens_per_step']:,} tokens, {rates}"
        )
    if told["only_here"]:
        found.append(f"pretrain: a model that can be used here and nowhere else: {'; '.join(told['only_here'])}")
    for plan in made.values():
        found += ["", *plan.lines()]
    return found
