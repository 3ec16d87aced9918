"""
The output of `bloomery plan`: which stages would run and why, and what training needs.

This module needs no torch.
"""

import importlib.util
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import numpy

from bloomery.core import cache, pipeline, records
from bloomery.core.config import nested, paths, plain
from bloomery.core.errors import ConfigError, wrapped
from bloomery.core.io import MANIFEST, whole_file
from bloomery.core.log import about
from bloomery.core.pipeline import Stage
from bloomery.core.pipeline import StagePlan as Laid
from bloomery.data.chat import readers
from bloomery.data.chat.formats import Conversation
from bloomery.data.chat.readers import ChatFiles, ChatSourceConfig, ToyChats
from bloomery.data.sources import http_client, stdlib
from bloomery.data.sources.local import WORLD_BYTES, StandardLibrary, Worlds
from bloomery.data.sources.remote import Reach
from bloomery.evaluation import charts
from bloomery.evaluation.charts import Html, tag
from bloomery.hw.host import Host, find_gpus
from bloomery.hw.launcher import cores
from bloomery.hw.specs import GIB, named
from bloomery.model.config import ModelConfig, cost
from bloomery.stages.config import Pretrain, check_named_paths
from bloomery.train.config import Adapters, Finetune, Mesh, Training, trained_tokens
from bloomery.train.plan import memory
from bloomery.train.plan import report as plan_report
from bloomery.train.plan.memory import Machine, of_entry, of_memory
from bloomery.train.plan.report import HourlyPrice, PlanReport
from bloomery.train.plan.search import FitCheck
from bloomery.train.plan.sharding import ShardedTensor, ShardingPlan, asked, fix, sharded
from bloomery.train.preference.config import Prefer

Here = Callable[[Training, int], Machine]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """For which machine a plan is made. Without a device and a memory it is this one."""

    device: str | None = None
    memory_bytes: int | None = None
    devices: int | None = None
    """None: as many as the section has ranks."""
    price: HourlyPrice = field(default_factory=HourlyPrice)

    def target(self, config: Training, here: Here | None) -> Machine:
        devices = self.devices or config.num_processes
        if self.device is not None:
            return of_entry(named(self.device, self.memory_bytes), devices, self.memory_bytes)
        if self.memory_bytes is not None:
            return of_memory(self.memory_bytes, devices)
        if here is None:
            unknown = "an assumed device of 16 GiB, as nothing is known of this machine without torch"
            return replace(of_memory(UNKNOWN_BYTES, devices), name=f"{unknown} (pass --device or --memory)")
        return here(config, devices)

    def words(self) -> list[str]:
        """In those of the command line."""
        words = ["--device", self.device] if self.device else []
        words += [f"--memory={self.memory_bytes / GIB:g}GiB"] if self.memory_bytes else []
        return [*words, f"--devices={self.devices}"] if self.devices else words

    def of_mesh(self, mesh: Mesh) -> tuple[Machine, float | None]:
        """The devices of a mesh, and the bytes per second of their links where those are known. Raises ConfigError."""
        if self.devices not in (None, mesh.devices):
            what = f"{self.devices} devices were requested, but dp_replicate x dp_shard x tp is {mesh.devices}"
            raise ConfigError(what, where="finetune.mesh", hint="Remove --devices, or change the mesh.")
        if name := self.device or (None if self.memory_bytes else mesh.device):
            entry = named(name, self.memory_bytes)
            return of_entry(entry, mesh.devices, self.memory_bytes), entry.link
        if self.memory_bytes is None:
            hint = 'Set device="...", or pass --device or --memory.'
            raise ConfigError("no device is set", where="finetune.mesh", hint=hint)
        return of_memory(self.memory_bytes, mesh.devices), None


def report(
    stage_table: Sequence[Stage], recipe: Any, root: Path, wish: Wish
) -> tuple[dict[str, Any], dict[str, PlanReport]]:
    """
    What `bloomery plan --json` prints of a recipe (`facts`), and the plans of the stages that train. Writes nothing.

    Raises ConfigError, DataError, HardwareError or RunError for what would end the run before its first stage.
    """
    with http_client.impatiently():
        laid = pipeline.plan_stages(stage_table, recipe, root, blind=True)
    due = [stage_plan for stage_plan in laid if not stage_plan.fresh]
    missing_packages: dict[str, Any] = {}
    if wish.device is None and wish.memory_bytes is None:
        pipeline.check_machine(due)
        if error := pipeline.missing_packages(due):
            missing_packages = {"missing_packages": str(error)}
    for stage_plan in due:
        check_named_paths(stage_plan.stage.name, stage_plan.config)
    reports: dict[str, PlanReport] = {}
    pretrain, start, count = recipe.pretrain, start_of(recipe), None
    if pretrain is not None or start is not None:
        tools: dict[str, Any] = {}
        if importlib.util.find_spec("torch") is not None:
            tools = {"here": pipeline.resolve("bloomery.train.plan.here:here")}
            if is_traced(start[0] if start else pretrain.model):
                tools["check"] = pipeline.resolve("bloomery.train.plan.trace:check")
        sections = {"pretrain": pretrain, "finetune": recipe.finetune, "prefer": recipe.prefer}
        if recipe.finetune is not None and recipe.finetune.epochs is not None:
            sections["finetune"], count = steps_of(recipe, {one.stage.name: one for one in laid})
        sections = {name: _in_known_format(recipe, config) for name, config in sections.items()}
        tools |= {"count": count, "sequence_length": recipe.instruct.sequence_length}
        if start is not None:
            reports = plans(sections, *start, wish, **tools)
        else:
            rows = pipeline.resolve("bloomery.stages.tokenizer:vocab_size")(recipe.tokenizer)
            if pretrain.start_from is not None:
                rows = pipeline.resolve("bloomery.stages.pretrain:num_rows")(pretrain, rows)
            reports = plans(sections, pretrain.model, rows, wish, **tools)
    more: dict[str, Any] = {"only_here": only_here(recipe), **missing_packages}
    if pretrain is not None and pretrain.depth:
        more = {"depth": _depth_facts(pretrain), **more}
    missing = pipeline.missing_sections(stage_table, recipe)
    return facts(recipe.name, laid, missing, reports, more, recipe.shard.tokens), reports


def start_of(recipe: Any) -> tuple[ModelConfig, int] | None:
    """Shape, with the context of the rows, and number of token IDs of the model that finetuning starts from, if any."""
    if (path := _started_from(recipe)) is None:
        return None
    shape, rows = pipeline.resolve("bloomery.weights.hf:config_of")(path)
    return shape, rows


def _started_from(recipe: Any) -> Path | None:
    """The folder or file of the model that finetuning starts from, if the recipe trains none before."""
    section = (
        recipe.finetune if recipe.finetune is not None and recipe.finetune.start_from is not None else recipe.prefer
    )
    if section is None or section.start_from is None or importlib.util.find_spec("torch") is None:
        return None
    path: Path = pipeline.resolve("bloomery.weights.locate:locate_model")(section.start_from.expanduser())
    return path


def _in_known_format(recipe: Any, config: Any) -> Any:
    """A section whose frozen base is kept as in its files, with that format: float32 for a model of this recipe."""
    if not isinstance(config, Adapters) or not config.asks_for_format:
        return config
    follows = config is recipe.prefer and config.start_from is None and recipe.finetune is not None
    if follows and recipe.finetune.lora is None:  # the stage before writes the model in the format it trains in
        return config.on_base(recipe.finetune.weight_dtype)
    if (path := _started_from(recipe)) is not None:
        return pipeline.resolve("bloomery.stages.finetune:in_known_format")(config, path)
    return config.on_base("float32")


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """What tells how many steps epochs come to."""

    origin: Literal["packed", "estimated", "unknown"]
    note: str


TOKEN_BYTES = 4
"""Of a file of conversations, that come to one token of a packed sequence: English text with its fields."""
SAMPLED = 50
"""Conversations whose mean length stands for all of a source that is limited in number."""


def steps_of(recipe: Any, laid: Mapping[str, Laid]) -> tuple[Finetune, StepCount]:
    """
    [finetune] with steps in place of its epochs, from the packed sequences where the stage `instruct` is done, and else
    from the bytes of its sources. Raises ConfigError where the packed sequences make a run refuse the schedule.
    """
    config, length = recipe.finetune, recipe.instruct.sequence_length
    rows_per_step = memory.rows_per_step(config, length - 1)
    if laid["instruct"].fresh:
        rows = int(records.read_manifest(laid["instruct"].folder)["stats"]["train"]["rows"])
        steps = config.of_length(rows, rows_per_step)
        return steps, StepCount(origin="packed", note=f"{steps.steps:,} steps: {config.epochs:g} x {rows:,} sequences")
    sizes = [_bytes(source) for source in recipe.instruct.read]
    if recipe.synthesize.enabled:
        file = laid["synthesize"].folder / "conversations.jsonl"
        sizes.append(file.stat().st_size if laid["synthesize"].fresh else None)
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return config, StepCount(origin="unknown", note=config.not_planned)
    rows = math.ceil(sum(known) * (1 - recipe.instruct.val_fraction) / TOKEN_BYTES / length)
    how = f"{config.epochs:g} x {rows:,} sequences, estimated at {TOKEN_BYTES} bytes per token"
    try:
        steps = config.of_length(rows, rows_per_step)
    except ConfigError as error:
        return config, StepCount(origin="unknown", note=f"with {how}, a run would refuse: {error.what}")
    return steps, StepCount(origin="estimated", note=f"about {steps.steps:,} steps: {how}")


def _bytes(source: ChatSourceConfig) -> float | None:
    """About how many bytes of conversations a source has; None where that takes a download, or is compressed."""
    if isinstance(source, ChatFiles):
        files = [path for _, path in readers.local_files(source)]
        if any(path.suffix in (".gz", ".zst", ".parquet") for path in files):
            return None
        total = float(sum(path.stat().st_size for path in files))
    elif isinstance(source, ToyChats):
        total = math.inf
    else:
        return None
    limits = [one for one in (source.max_conversations, getattr(source, "count", None)) if one is not None]
    if limits:
        sampled = [one for one in islice(readers.conversations([source]), SAMPLED) if isinstance(one, Conversation)]
        text = sum(len(message["content"].encode()) for one in sampled for message in one.messages)
        total = min(total, min(limits) * text / max(len(sampled), 1))
    return total * source.repeat


def only_here(recipe: Any) -> list[str]:
    """What of the model no other program has; nothing where none is trained, or where there is no torch."""
    if recipe.pretrain is None or importlib.util.find_spec("torch") is None:
        return []
    reasons: list[str] = pipeline.resolve("bloomery.weights.architectures:reasons")(recipe.pretrain.model)
    return reasons


def watched(recipe: Any) -> list[str] | None:
    """
    The files and folders that a recipe reads, apart from its run. None where they are too many, or it reads from
    another host, whose state no file tells.
    """
    configs = [*nested(recipe)]
    if any(isinstance(config, Reach) or (getattr(config, "tasks", ()) and not _own(config)) for config in configs):
        return None
    library = [path for one in configs if isinstance(one, StandardLibrary) for _, path in stdlib.files(one.exclude)]
    return cache.watchable([path for _, path in paths(recipe)], [*library, *{path.parent for path in library}])


def _own(config: Any) -> bool:
    """Whether a config that names tasks also names the files that hold them, so that none is downloaded."""
    return bool(getattr(config, "data", ()) or getattr(config, "files", ()))


def _depth_facts(pretrain: Pretrain) -> dict[str, Any]:
    """What the dial of [pretrain] came to, with what the recipe says itself."""
    return {
        "depth": pretrain.depth,
        "model": pretrain.model.model_dump(
            include={"hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size"}
        ),
        "global_batch_tokens": trained_tokens(pretrain.global_batch_tokens, pretrain.model.context_length),
        "steps": pretrain.steps,
        "rates": {
            name: rate for name, rate in pretrain.optimizer.model_dump().items() if name in ("muon_lr", "learning_rate")
        },
    }


MAX_TRACED_LAYERS, MAX_TRACED_CONTEXT = 200, 2**17


def is_traced(model: ModelConfig) -> bool:
    """Whether a plan traces a model: a trace of a deeper or longer one takes minutes, and arithmetic answers soon."""
    return model.num_layers <= MAX_TRACED_LAYERS and model.context_length <= MAX_TRACED_CONTEXT


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
    count: StepCount | None = None,
    sequence_length: int = 0,
) -> dict[str, PlanReport]:
    """Of the stages that train, by their names. `sequence_length` is that of packed conversations."""
    reports = {}
    for name, config in sections.items():
        if config is not None:
            target, shape = wish.target(config, here), model
            if name == "finetune" and sequence_length:
                shape = model.model_copy(update={"context_length": sequence_length - 1})
            if isinstance(config, Prefer):
                shape = model.model_copy(update={"context_length": config.row_tokens(model.context_length)})
            ask = plan_report.asked(name, config, shape, vocab_size, target)
            if name == "finetune" and count is not None:
                ask = replace(ask, steps_from=count.origin, besides=count.note)
            reports[name] = plan_report.planned(ask, config, target, check, wish.price)
    return reports


def facts(
    recipe: str,
    laid: Sequence[Laid],
    left_out: Mapping[str, Sequence[str]],
    reports: Mapping[str, PlanReport],
    extra: Mapping[str, Any],
    shard_tokens: int | None,
) -> dict[str, Any]:
    """All of it as JSON data: of each stage, and of the one that needs most on top."""
    summary: dict[str, Any] = {
        "recipe": recipe,
        "stages": [
            {
                "stage": stage_plan.stage.name,
                "fresh": None if stage_plan.unseen else stage_plan.fresh,
                "why": why(stage_plan),
                "idle": stage_plan.config.is_idle(),
                "folder": None if stage_plan.unseen else str(stage_plan.folder),
            }
            for stage_plan in laid
        ],
        "missing_sections": dict(left_out),
        **extra,
    }
    each = {name: plan.facts() for name, plan in reports.items()}
    summary |= dict.fromkeys((*ON_TOP, "fits", "seconds", "disk_bytes"))  # null, where no stage trains
    if each:
        largest = max(each, key=lambda name: int(each[name]["peak_bytes"]))
        top = each[largest]
        seconds = [one["seconds"] for one in each.values()]
        plan = reports[largest]
        shards = 0 if shard_tokens is None else memory.shard_bytes(shard_tokens, plan.ask.what.vocab_size)
        summary |= {name: top[name] for name in ON_TOP}
        summary |= {
            "fits": all(one["fits"] for one in each.values()),
            "seconds": None if None in seconds else round(sum(seconds), 1),
            "disk_bytes": shards + sum(one["disk_bytes"] for one in each.values()),
        }
    return summary | each


ON_TOP = ("parameters", "weights_bytes", "peak_bytes", "tokens_per_second", "choice", "alternatives")


DATA_BYTES_PER_SECOND = 1.4e6
"""Of text, from fetch to shard: 15.7 MB in 11.3 s, on two cores (recipes/demo.toml)."""
CONVERSATIONS_PER_SECOND, QUESTIONS_PER_SECOND = 3900, 18
"""24,000 in 6.2 s, and 220 in 12 s with 4 million parameters; the same run."""
QUESTIONED_PARAMETERS = 4_000_000
TRAINED_SHARE = 0.6
"""Of the peak, that the training of that run reached, with its evaluations and checkpoints: 0.57 and 0.69."""
STARTING_SECONDS = {True: 5.0, False: 1.0}
"""Of a stage that trains, and of any other: imports, a dry run, files. Seven stages over six documents take 10 s."""
SQUARE = 1024


def first_seconds(recipe: Any, due: Sequence[Laid]) -> float | None:
    """
    About how long stages take that have never run, without torch: text and steps at the speed of recipes/demo.toml,
    matmuls at the speed of numpy here. None where that would mislead: on a GPU, or for sources on other hosts.
    """
    configs: dict[str, Any] = {one.stage.name: one.config for one in due if not one.config.is_idle()}
    watched_files = None if find_gpus(Host.here()) else watched(recipe)
    known = {"fetch", "pretrain", "finetune"} & configs.keys() and not {"prefer", "synthesize"} & configs.keys()
    if watched_files is None or not known:
        return None
    seconds = sum(STARTING_SECONDS[issubclass(type(config), Training)] for config in configs.values())
    if "fetch" in configs:
        files = sum(os.stat(name).st_size for name in watched_files if os.path.isfile(name))
        generated = sum(WORLD_BYTES * world.count for world in nested(configs["fetch"]) if isinstance(world, Worlds))
        seconds += (files + generated) / DATA_BYTES_PER_SECOND * 2 / cores()
    if "instruct" in configs:
        chats = sum(chat.count for chat in nested(configs["instruct"]) if isinstance(chat, ToyChats))
        seconds += chats / CONVERSATIONS_PER_SECOND
    if trained := [configs[name] for name in ("pretrain", "finetune") if name in configs]:
        pretrain = recipe.pretrain
        if pretrain is None or any(getattr(config, "start_from", None) for config in trained):
            return None
        each = cost(pretrain.model, pipeline.resolve("bloomery.stages.tokenizer:vocab_size")(recipe.tokenizer))
        tokens = sum(
            (config.steps or 0) * trained_tokens(config.global_batch_tokens, pretrain.model.context_length)
            for config in trained
        )
        seconds += tokens * each.train_flops_per_token / (TRAINED_SHARE * _numpy_flops())
        if "evaluate" in configs:
            larger = max(1.0, each.parameters / QUESTIONED_PARAMETERS)
            seconds += larger * configs["evaluate"].toy_questions / QUESTIONS_PER_SECOND
    return seconds


def _numpy_flops() -> float:
    """FLOP/s of the better of some float32 matmuls on all cores."""
    square, best = numpy.ones((SQUARE, SQUARE), numpy.float32), math.inf
    for _ in range(4):
        began = time.perf_counter()
        square @ square
        best = min(best, time.perf_counter() - began)
    return float(2 * SQUARE**3 / best)


def why(stage_plan: Laid) -> str:
    """Why a stage is up to date, or would run."""
    if stage_plan.unseen:
        return f"unknown: {stage_plan.unseen}"
    problem = records.damage(stage_plan.folder)
    if not problem:
        return "done with these settings and inputs"
    if stage_plan.folder.exists():
        return "begun, resumes" if stage_plan.stage.resumes else problem
    beginning = stage_plan.folder.name.removesuffix(stage_plan.fingerprint)
    others = [folder for folder in stage_plan.folder.parent.glob(f"{beginning}*") if (folder / MANIFEST).is_file()]
    if not others:
        return "never done"
    newest = max(others, key=lambda folder: (folder / MANIFEST).stat().st_mtime)
    before, now = records.read_manifest(newest)["config"], plain(stage_plan.config)
    fixed = plain(stage_plan.config, stable_only=True)
    changed = [key for key in fixed if before.get(key) != now[key]]
    return f"{', '.join(changed) or 'what it is made from'} changed since {newest.name}"


def verdict(reports: Mapping[str, PlanReport]) -> list[str]:
    """Whether the stages that train fit and how long they take. Where one does not, first what decides it."""
    if not reports:
        return ["Nothing to train: the recipe has no section [pretrain], and no start_from."]
    tight = max(reports.values(), key=lambda plan: (not plan.choice.fits, plan.choice.peak_bytes))
    target, peak = tight.target, tight.choice.peak_bytes / GIB
    usable = target.usable_bytes / GIB
    if tight.choice.fits:
        seconds = [plan.seconds for plan in reports.values()]
        known = sum(one for one in seconds if one is not None)
        time = "time unknown" if None in seconds else f"{about(known)} of training"
        return [f"It fits: {peak:.1f} of {usable:.1f} GiB, {time} on {target.name}."]
    if not tight.fits_in_host and peak <= usable:
        needed, there = sum(tight.host.values()) / GIB, (target.host_bytes or 0) / GIB
        return [
            f"It does not fit: {tight.ask.stage} needs {needed:,.1f} GiB of the computer's own {there:,.1f} GiB.",
            f"Fix: {plan_report.fix(tight)}.",
        ]
    parts, model = tight.choice.at_peak[1], tight.ask.what.model
    largest = max(parts, key=lambda name: parts[name])
    what = f"{tight.ask.what.parameters:,} parameters need"
    if largest in ("activations", "logits"):
        what = f"a context of {model.context_length:,} tokens at batch size {tight.choice.way.rows} needs"
    return [
        f"It does not fit: {what} {parts[largest] / GIB:,.1f} GiB for the {plan_report.PARTS[largest]}.",
        f"{tight.ask.stage} needs {peak:,.1f} GiB in all; {usable:.1f} GiB are usable on {target.name}.",
        f"Fix: {plan_report.fix(tight)}.",
    ]


def settings_that_fit(reports: Mapping[str, PlanReport]) -> list[str]:
    """Settings with which a recipe fits that does not, in the words of the command line."""
    settings: list[str] = []
    for plan in reports.values():
        if plan.choice.fits:
            continue
        if plan.change is not None:
            settings += plan.change[0].split()
        elif (context := plan_report.context_that_fits(plan)) is not None:
            shorter = f"pretrain.model.context_length={context}"
            if plan.ask.stage == "prefer":
                shorter = f"prefer.sequence_length={context // 2}"
            elif "pretrain" not in reports:
                shorter = f"instruct.sequence_length={context + 1}"
            settings.append(shorter)
    return list(dict.fromkeys(settings))


def next_command(
    words: Sequence[str],
    settings: Sequence[str],
    runs: Sequence[str],
    wish: Wish,
    reports: Mapping[str, PlanReport],
    facts: Mapping[str, Any],
) -> list[str]:
    """
    The line with the next command, of the words and settings of this one: a run, or a plan that fits; [] if none.

    A run goes as far as its sections lead, on as many devices as were asked for.
    """
    fits = all(plan.choice.fits for plan in reports.values())
    changes = settings_that_fit(reports)
    if not changes and not (fits and wish.device is None and wish.memory_bytes is None):
        return []
    if fits and wish.devices is not None:
        changes = [*changes, *(f"{name}.num_processes={wish.devices}" for name in reports)]
    changed = {setting.partition("=")[0] for setting in changes}
    kept = [setting for setting in settings if setting.partition("=")[0] not in changed]
    program, verb, recipe = words
    command = [program, "run" if fits else verb, recipe, *kept, *changes, *runs]
    if fits and facts["missing_sections"] and reports:
        command += ["--until", list(reports)[-1]]
    return [f"Next: {shlex.join([*command, *([] if fits else wish.words())])}"]


def lines(summary: Mapping[str, Any], reports: Mapping[str, PlanReport]) -> list[str]:
    """As text of 80 columns."""
    text_lines = [wrapped(line, " " * 13) for line in _stage_lines(summary)]
    if depth := summary.get("depth"):
        rates = ", ".join(f"{name} {rate:g}" for name, rate in depth["rates"].items())
        model = depth["model"]
        text_lines.append(
            f"pretrain: depth {depth['depth']}: hidden_size {model['hidden_size']}, {model['num_heads']} heads, "
            f"intermediate_size {model['intermediate_size']}, {depth['steps']:,} steps of "
            f"{depth['global_batch_tokens']:,} tokens, {rates}"
        )
    if missing_packages := summary.get("missing_packages"):
        text_lines.append(missing_packages[0].upper() + missing_packages[1:])
    if summary["only_here"]:
        text_lines.append(f"pretrain: only Bloomery can load this model: {'; '.join(summary['only_here'])}")
    for plan in reports.values():
        text_lines += ["", *plan.lines()]
    return [wrapped(line, "  ") for line in text_lines]


def _stage_lines(summary: Mapping[str, Any]) -> list[str]:
    """A line for the stages that are up to date, and for those that run for the same reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for stage in summary["stages"]:
        if not stage["idle"]:
            state = "unknown" if stage["fresh"] is None else "up to date" if stage["fresh"] else "will run"
            why = "" if stage["fresh"] else f": {stage['why'].removeprefix('unknown: ')}"
            groups.setdefault((state, why), []).append(stage["stage"])
    for name, missing in summary["missing_sections"].items():
        key = ("skipped", f": the recipe has no {' and '.join(f'[{one}]' for one in missing)}")
        groups.setdefault(key, []).append(name)
    return [f"{state:<12} {', '.join(names)}{reason}" for (state, reason), names in groups.items()]


# --- plans over a mesh ------------------------------------------------------------------------------------------------

ARITHMETIC = "This plan is arithmetic alone: it used no device."


def check_ranks(recipe: Any, ranks: int) -> None:
    """
    Raises ConfigError for a recipe of which no stage trains on so many ranks; stages that are done may need others. A
    single rank starts those that the recipe asks for.
    """
    errors, stages = [], [one for one in (recipe.pretrain, recipe.finetune, recipe.prefer) if one is not None]
    for stage in stages:
        try:
            count = stage.num_processes if ranks == 1 else ranks
            memory.check_shard(stage, count, adapters=getattr(stage, "lora", None) is not None)
        except ConfigError as error:
            errors.append(error)
    if errors and len(errors) == len(stages):
        raise errors[0]


def mesh_plan(recipe: Any, wish: Wish, html: Path | None = None) -> ShardingPlan | None:
    """
    Of a recipe whose finetune.mesh names a preset; None for any other. `html` is a file for its page. Raises
    ConfigError where the mesh cannot cut the shape, or where there is none, and RunError where the page cannot be
    written.
    """
    config = recipe.finetune
    if html is not None and html.is_dir():
        raise ConfigError(f"{html} is a folder", where="--html", hint="Name a file, such as sharding.html.")
    if config is None or config.mesh is None or config.mesh.preset is None:
        if html is not None:
            what, hint = "it shows the preset of finetune.mesh, but the recipe has none", "Remove --html."
            raise ConfigError(what, where="--html", hint=hint)
        return None
    if recipe.pretrain is not None:
        what = "it plans a model that is downloaded, but this recipe pretrains its own"
        raise ConfigError(what, where="finetune.mesh.preset", hint="Remove finetune.mesh.preset.")
    if wish.price != HourlyPrice():
        what, hint = "a plan over a mesh counts no hours", "Remove --price and --power-watts."
        raise ConfigError(what, where="--price", hint=hint)
    ask = asked(config, recipe.instruct.sequence_length)
    target, link = wish.of_mesh(config.mesh)
    plan = sharded(ask, target, link)
    if html is not None:
        write_mesh_page(plan, html)
    return plan


def _tensor_lines(plan: ShardingPlan) -> list[str]:
    """Each tensor: its shape, what cuts it, and the bytes of a device. Blocks that are alike stand together."""
    lines = ["tensors: shape, axes that cut it, bytes on a device"]
    for units, tensors in plan.units():
        count = f", and {len(units) - 1:,} more blocks like it" if len(units) > 1 else ""
        lines.append(f"  {units[0]}{count}")
        for tensor in tensors:
            axes = [axis for axis, dim in (("tp", tensor.tp), ("dp_shard", tensor.dp_shard)) if dim is not None]
            name = tensor.name.removeprefix(f"{units[0]}.")
            cut = " and ".join(axes) or "none"
            lines.append(f"    {name:<27}{_sizes(tensor.shape):>17}  {cut:<15}{charts.size(tensor.local_bytes):>12}")
    return lines


def mesh_facts(recipe: str, plan: ShardingPlan) -> dict[str, Any]:
    """As JSON data."""
    return {"recipe": recipe, "fits": plan.fits, "finetune": plan.facts()}


def mesh_lines(plan: ShardingPlan, words: Sequence[str], html: Path | None = None) -> list[str]:
    """As text of 80 columns. `words` are those of the command; the last line is the next command."""
    peak, usable = plan.memory.peak / GIB, plan.target.usable_bytes / GIB
    changes = list[str]()
    if plan.fits:
        verdict = f"It fits by arithmetic: {peak:,.1f} of {usable:,.1f} GiB on each device."
    else:
        verdict = f"It does not fit: {peak:,.1f} GiB are needed on each device, but {usable:,.1f} GiB are usable."
        changes = fix(plan)
    text = [*plan.lines(), "", *_tensor_lines(plan), "", verdict]
    starts, needed = plan.ask.num_processes, plan.ask.mesh.devices
    key = "finetune.num_processes="
    if starts not in (1, needed) and not any(change.startswith(key) for change in changes):  # 1: a launcher may start
        text.append(f"To run it, also set {key}{needed}: the recipe has {starts}.")
    text.append(ARITHMETIC)
    if changes:
        names = tuple(f"{change.partition('=')[0]}=" for change in changes)
        text.append(f"Next: {shlex.join([*(word for word in words if not word.startswith(names)), *changes])}")
    elif html is None:
        text.append(f"Next: {shlex.join([*words, '--html', 'sharding.html'])}")
    return [wrapped(line, "" if line in (verdict, ARITHMETIC) else "    ") for line in text]


DRAWN_DEVICES = 64
SIDE, THIN = 40, 9
"""Of the picture of a tensor, in pixels: a side that is long, and one that is short next to it."""
LOOKS = {
    (False, False): ("whole", "whole on each device"),
    (True, False): ("shard", "a part by dp_shard"),
    (False, True): ("tp", "a part by tp"),
    (True, True): ("both", "a part by tp and dp_shard"),
}
MESH_STYLE = """
.device { padding: .9rem 1.1rem; border: 1px solid var(--line); border-radius: .8rem; background: var(--card); }
.device h3 { margin: 0 0 .4rem; font-size: 1rem; }
.device h4 { margin: .8rem 0 .3rem; }
.parts { display: flex; flex-wrap: wrap; gap: .5rem .7rem; }
.part { margin: 0; font-size: .7rem; color: var(--quiet); max-width: 6rem; overflow-wrap: anywhere; }
.part svg { display: block; }
.part .edge { fill: none; stroke: var(--gray); }
.key { display: inline-block; width: .9rem; height: .9rem; margin-right: .35rem; vertical-align: -.1rem; }
.whole { fill: var(--gray); background: var(--gray); }
.shard { fill: var(--blue); background: var(--blue); }
.tp { fill: var(--ember); background: var(--ember); }
.both { fill: var(--right); background: var(--right); }
"""


def write_mesh_page(plan: ShardingPlan, file: Path) -> None:
    """The sharding as a page that loads nothing: a box for each device. Raises RunError where it cannot be written."""
    mesh = plan.ask.mesh
    axes = [range(size) for size in (mesh.dp_replicate, mesh.dp_shard, mesh.tp)]
    devices = list(islice(product(*axes), DRAWN_DEVICES))
    _, parts = plan.memory.at_peak
    memory_rows = [(name, f"{size / GIB:,.2f} GiB") for name, size in parts.items() if size]
    tensors = [
        (
            tensor.name,
            _sizes(tensor.shape),
            _sizes(tensor.local_shape),
            _look(tensor)[1],
            charts.size(tensor.local_bytes),
        )
        for _, unit in plan.units()
        for tensor in unit
    ]
    keys = [tag("li", tag("span", class_=f"key {look}"), text) for look, text in LOOKS.values()]
    more = f"The first {DRAWN_DEVICES} of {mesh.devices:,} devices." if mesh.devices > DRAWN_DEVICES else None
    sections: dict[str, tuple[str, list[object]]] = {
        "memory": ("Memory of a device", [charts.table(("at the peak", "bytes"), memory_rows)]),
        "traffic": (
            "Received by a device in a step",
            [
                charts.table(
                    ("collective", "over", "bytes"),
                    [(traffic.collective, traffic.axis, charts.size(traffic.num_bytes)) for traffic in plan.traffic],
                )
            ],
        ),
        "devices": (
            "Devices",
            [
                tag("ul", *keys, class_="chips"),
                more and tag("p", more, class_="note"),
                tag("div", *(_device(plan, *at) for at in devices), class_="cards"),
            ],
        ),
        "tensors": ("Tensors", [charts.table(("tensor", "shape", "on a device", "placement", "bytes"), tensors)]),
    }
    contents = [tag("li", tag("a", title, href=f"#{anchor}")) for anchor, (title, _) in sections.items()]
    head = Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">')
    title = f"{mesh.preset} on {mesh.devices:,} devices"
    lines = [line.strip() for line in plan.lines()[:3]]
    body = [
        tag("header", tag("h1", title), *(tag("p", line) for line in (*lines, ARITHMETIC))),
        tag("nav", tag("ol", *contents), aria_label="Contents"),
        tag("main", *(tag("section", tag("h2", name), *made, id=key) for key, (name, made) in sections.items())),
    ]
    style = tag("style", Html(charts.STYLE + MESH_STYLE))
    page = tag("html", tag("head", head, tag("title", title), style), tag("body", *body), lang="en")
    with whole_file(file, "w") as out:
        out.write(f"<!doctype html>\n{page}\n")


def _device(plan: ShardingPlan, replica: int, shard: int, tp: int) -> Html:
    """The box of a device: each tensor of each kind of unit as an outline, with its part of it filled."""
    units = [
        tag(
            "div",
            tag("h4", unit[0].unit if len(names) == 1 else f"{unit[0].unit} and {len(names) - 1:,} like it"),
            tag("div", *(_part(plan, tensor, shard, tp) for tensor in unit), class_="parts"),
        )
        for names, unit in plan.units()
    ]
    return tag("div", tag("h3", f"dp_replicate {replica}, dp_shard {shard}, tp {tp}"), *units, class_="device")


def _part(plan: ShardingPlan, tensor: ShardedTensor, shard: int, tp: int) -> Html:
    tall = tensor.shape[0]
    wide = tensor.shape[1] if len(tensor.shape) > 1 else 0
    sides = [SIDE if tall * 16 > wide else THIN, SIDE if wide * 16 > tall else THIN]
    corner, extent = [1.0, 1.0], [float(side) for side in sides]
    mesh = plan.ask.mesh
    for dim, index, count in ((tensor.tp, tp, mesh.tp), (tensor.dp_shard, shard, mesh.dp_shard)):
        if dim is not None:
            extent[dim] /= count
            corner[dim] += index * extent[dim]
    fill = tag(
        "rect",
        class_=_look(tensor)[0],
        x=f"{corner[1]:.2f}",
        y=f"{corner[0]:.2f}",
        width=f"{extent[1]:.2f}",
        height=f"{extent[0]:.2f}",
    )
    edge = tag("rect", class_="edge", x="1", y="1", width=str(sides[1]), height=str(sides[0]))
    name = tensor.name.removeprefix(f"{tensor.unit}.")
    label = f"{name}: {_sizes(tensor.local_shape)} of {_sizes(tensor.shape)}"
    size = {"width": str(sides[1] + 2), "height": str(sides[0] + 2)}
    return tag("figure", tag("svg", fill, edge, role="img", aria_label=label, **size), name, class_="part")


def _look(tensor: ShardedTensor) -> tuple[str, str]:
    return LOOKS[tensor.dp_shard is not None, tensor.tp is not None]


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
