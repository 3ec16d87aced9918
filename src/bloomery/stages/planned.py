"""What `bloomery plan` says: which stages would run and why, and what those that train need. Needs no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bloomery.core import stage as stages
from bloomery.core.config import plain
from bloomery.core.files import MANIFEST
from bloomery.core.stage import Plan as Laid
from bloomery.hw.catalog import GIB, named
from bloomery.model.config import ModelConfig
from bloomery.train.config import Training
from bloomery.train.planning import disk, planner
from bloomery.train.planning.choose import Check
from bloomery.train.planning.report import Plan, Price
from bloomery.train.planning.target import Target, of_entry, of_memory

Here = Callable[[Training, int], Target]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """For which machine a plan is made. Without a device and a memory it is this one."""

    device: str | None = None
    memory_bytes: int | None = None
    devices: int | None = None
    """As many as the section has ranks, where nothing is said."""
    price: Price = field(default_factory=Price)

    def target(self, config: Training, here: Here | None) -> Target:
        devices = self.devices or config.ranks
        if self.device is not None:
            return of_entry(named(self.device, self.memory_bytes), devices, self.memory_bytes)
        if self.memory_bytes is not None:
            return of_memory(self.memory_bytes, devices)
        if here is None:
            unknown = "an assumed device of 16 GiB, as nothing is known of this machine without torch"
            return replace(of_memory(UNKNOWN_BYTES, devices), name=f"{unknown} (say --device or --memory)")
        return here(config, devices)


UNKNOWN_BYTES = 16 * GIB
"""Of a device that nobody names, where there is no torch to look for one."""


def plans(
    sections: Mapping[str, Training | None],
    model: ModelConfig,
    vocab_size: int,
    wish: Wish,
    *,
    here: Here | None = None,
    check: Check | None = None,
) -> dict[str, Plan]:
    """Of the stages that train, by their names."""
    found = {}
    for name, config in sections.items():
        if config is not None:
            target = wish.target(config, here)
            ask = planner.asked(name, config, model, vocab_size, target)
            found[name] = planner.planned(ask, config, target, check, wish.price)
    return found


def facts(
    recipe: str,
    laid: Sequence[Laid],
    left_out: Mapping[str, Sequence[str]],
    made: Mapping[str, Plan],
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
        shards = 0 if shard_tokens is None else disk.shard_bytes(shard_tokens, plan.ask.what.vocab_size)
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
    problem = stages.damage(one.folder)
    if not problem:
        return "done with these settings and inputs"
    if one.folder.exists():
        return "begun, and goes on" if one.stage.resumes else problem
    beginning = one.folder.name.removesuffix(one.fingerprint)
    others = [folder for folder in one.folder.parent.glob(f"{beginning}*") if (folder / MANIFEST).is_file()]
    if not others:
        return "never done"
    newest = max(others, key=lambda folder: (folder / MANIFEST).stat().st_mtime)
    before, now = stages.read_manifest(newest)["config"], plain(one.config)
    fixed = plain(one.config, stable_only=True)
    changed = [key for key in fixed if before.get(key) != now[key]]
    return f"{', '.join(changed) or 'what it is made from'} changed since {newest.name}"


def _line(one: Mapping[str, Any]) -> str:
    """Of a stage."""
    state = "fresh" if one["fresh"] else "will run"
    return f"{one['stage']:<11} {state:<9} {one['folder']}" + ("" if one["fresh"] else f"  ({one['why']})")


def lines(told: Mapping[str, Any], made: Mapping[str, Plan]) -> list[str]:
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
