"""
A stage is data, its folder is its fingerprint, and the manifest comes last.

A folder's name ends in a hash of the stage's name, version, config and of the fingerprints of its inputs, so whatever
could change the output changes the folder, and the work of an unchanged stage is found again. A folder counts as
done when its manifest is there, every file that it lists has the size it lists, and its inputs hold what it was made
from: an input that was made again, with other content, is not seen by a fingerprint. A stage that died in between
finds its own leftovers in the folder, where it can go on from them, and else an empty one.
"""

import difflib
import importlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bloomery.core import files, native
from bloomery.core.config import Config, plain
from bloomery.core.errors import RunError, UnreachableError
from bloomery.core.files import MANIFEST
from bloomery.core.log import say

if sys.platform != "win32":
    import fcntl

BEGUN = "begun.json"
"""Which content of its inputs a stage that resumes began with: leftovers of another content are not gone on from."""

Stats = Mapping[str, Any]
"""What a stage reports: JSON data, shown by `status` and in the report."""

Runner = Callable[[Any, Mapping[str, Path], Path], Stats]
"""`run(config, inputs, out) -> stats`: inputs maps the name of an earlier stage to its folder."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    run: str
    """Where its function lives, as `package.module:function`. Text, so that reading a recipe imports no torch."""
    after: tuple[str, ...] = ()
    version: int = 1
    """Raised when the meaning of the output changes. Code is not hashed."""
    digest: str | None = None
    """`module:function` of config -> str, for what the stage reads from outside the run. It joins the fingerprint."""
    needed: str | None = None
    """`module:function` of its section's name and its config, which raises where this machine lacks what it needs."""
    lacking: str | None = None
    """`module:function` of its config and its folder: whether that is done, and yet less than the config asks for."""
    resumes: bool = False
    """Whether it goes on from what an attempt that died has left. Otherwise every attempt begins in an empty folder."""
    guards: bool = False
    """Whether it tells by itself that what was left belongs to other inputs. Otherwise such leftovers are removed."""
    optional: bool = False
    """Whether a recipe may do without its section: then it is not there, and those after it do without it too."""
    hands_on: str = ""
    """
    The beginning of the names of what later stages are made from, as in "model/"; "" for all it leaves. Metrics and
    checkpoints hold speeds, and are never the same twice.
    """

    def runner(self) -> Runner:
        runner: Runner = resolve(self.run)
        return runner

    def outside(self, config: Config) -> str:
        """The digest of what it reads from outside the run, as it is now; "" where it reads nothing."""
        return str(resolve(self.digest)(config)) if self.digest else ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where a stage's output is or will be."""

    stage: Stage
    config: Config
    folder: Path
    fingerprint: str
    inputs: Mapping[str, Path]
    outside: str = ""
    """The digest that joined the fingerprint."""
    unseen: str = ""
    """Why the digest of this stage, or of one before it, could not be taken; then neither is its folder known."""

    @property
    def fresh(self) -> bool:
        """Whether there is nothing to do."""
        if self.unseen or damage(self.folder):
            return False
        return not (self.stage.lacking and resolve(self.stage.lacking)(self.config, self.folder))


def resolve(place: str) -> Any:
    """The object that `package.module:name` stands for."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def lay_out(stages: Sequence[Stage], recipe: Config, root: Path, *, blind: bool = False) -> list[Plan]:
    """
    Every stage of a recipe with its folder under `root`, in order, but for those that the recipe has no section for.

    Reads sources' digests; writes nothing. Raises UnreachableError where one is on a host that cannot be asked, unless
    `blind`: then the plan says so.
    """
    plans: dict[str, Plan] = {}
    left_out, not_wanted = missing_sections(stages, recipe), unwanted(stages, recipe)
    for number, stage in enumerate([stage for stage in stages if stage.name not in not_wanted], 1):
        if stage.name in left_out:
            continue
        config: Config = getattr(recipe, stage.name)
        outside, unseen = _seen(stage, config, blind)
        after = [name for name in config.needs(stage.after) if name not in not_wanted]
        inputs = [plans[name].fingerprint for name in after]
        known = [stage.name, stage.version, plain(config, stable_only=True), inputs, outside]
        fingerprint = files.sha256_bytes(files.canonical(known))[:8]
        plans[stage.name] = Plan(
            stage=stage,
            config=config,
            folder=root / f"{number:02d}-{stage.name}-{fingerprint}",
            fingerprint=fingerprint,
            inputs={name: plans[name].folder for name in after},
            outside=outside,
            unseen=unseen or next((plans[name].unseen for name in after if plans[name].unseen), ""),
        )
    return list(plans.values())


def _seen(stage: Stage, config: Config, blind: bool) -> tuple[str, str]:
    """The digest of what a stage reads from outside, or why it is not known."""
    try:
        return stage.outside(config), ""
    except UnreachableError as error:
        if not blind:
            raise
        return "", str(error).splitlines()[0]


def missing_sections(stages: Sequence[Stage], recipe: Config) -> dict[str, list[str]]:
    """Stage -> the sections that it needs and the recipe does not have: its own, and those of stages before it."""
    missing: dict[str, list[str]] = {}
    not_wanted = unwanted(stages, recipe)
    for stage in stages:
        if stage.name in not_wanted:
            missing[stage.name] = []
            continue
        section: Config | None = getattr(recipe, stage.name)
        own = [stage.name] if section is None else []
        after = stage.after if section is None else section.needs(stage.after)
        missing[stage.name] = list(dict.fromkeys([name for given in after for name in missing[given]] + own))
    return {name: sections for name, sections in missing.items() if sections}


def unwanted(stages: Sequence[Stage], recipe: Config) -> set[str]:
    """The optional stages that a recipe has no section for."""
    return {stage.name for stage in stages if stage.optional and getattr(recipe, stage.name) is None}


def check_sections(
    stages: Sequence[Stage], recipe: Config, *, until: str | None = None, only: str | None = None
) -> None:
    """Raises RunError where what is asked for, as `execute` takes it, comes to a stage without its section."""
    missing = missing_sections(stages, recipe)
    asked = until or only
    if asked in unwanted(stages, recipe):
        raise RunError(f"the recipe has no section [{asked}]", where=f"stage {asked}", cure=f"Write [{asked}] into it.")
    stopped = asked if asked in missing else None if asked else next(iter(missing), None)
    if stopped is None:
        return
    left = [stage for stage in stages if stage.name not in missing]
    ends = [one.name for one in left if not any(one.name in other.after for other in left)]
    sections = " and ".join(f"[{name}]" for name in missing[stopped])
    cure = f"Write {sections} into it, or go as far as it reaches: {' or '.join(f'--until {name}' for name in ends)}"
    raise RunError(f"the recipe has no section {sections}, which it needs", where=f"stage {stopped}", cure=cure)


def check_names(stages: Sequence[Stage], *names: str | None) -> None:
    """Raises RunError for the name of a stage that is not there. None is no name."""
    known = [stage.name for stage in stages]
    for name in names:
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"Did you mean {near[0]!r}? " if near else ""
            raise RunError(f"there is no stage {name!r}", cure=f"{meant}Stages: {', '.join(known)}.")


def execute(plans: Sequence[Plan], *, until: str | None = None, only: str | None = None) -> dict[str, str]:
    """
    Run what is not done, in order. Returns what became of each stage: "fresh" (nothing to do) or "ran".

    `until` is the last stage wanted, `only` the single one; at most one of them is given. Raises RunError for a stage
    that is not there, where an input of the single one is not done, and, before any runs, what `Stage.needed` does.
    """
    assert until is None or only is None
    check_names([plan.stage for plan in plans], until, only)
    by_name = {plan.stage.name: plan for plan in plans}
    wanted = _ancestors(by_name, until) if until else {only} if only else set(by_name)
    for plan in plans:
        if plan.stage.needed and plan.stage.name in wanted and not plan.fresh:
            resolve(plan.stage.needed)(plan.stage.name, plan.config)
    done: dict[str, str] = {}
    for plan in plans:
        if plan.stage.name in wanted:
            done[plan.stage.name] = "fresh" if plan.fresh else _run(plan)
            if done[plan.stage.name] == "fresh":
                say(f"✓ {plan.stage.name:<11} fresh   {plan.folder.name}", style="dim")
    return done


def _run(plan: Plan) -> str:
    for name, folder in plan.inputs.items():
        if trouble := damage(folder):
            cure = f"Run it first: bloomery run RECIPE --until {name}"
            raise RunError(f"its input {name} is not done ({trouble})", where=plan.stage.name, cure=cure)
    _check_outside(plan)
    with files.disk_errors(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
        (plan.folder / MANIFEST).unlink(missing_ok=True)  # of outputs that are damaged: it must not vouch for new ones
        _keep_what_is_of_use(plan)
    resumed = any(path.name != BEGUN for path in plan.folder.iterdir())
    say(
        f"▸ {plan.stage.name:<11} {'goes on' if resumed else 'runs'}{'' if resumed else '   '} {plan.folder.name}",
        "bold",
    )
    began = time.time()
    stats = plan.stage.runner()(plan.config, plan.inputs, plan.folder)
    _check_outside(plan)
    seal(plan, stats, seconds=time.time() - began, resumed=resumed)
    say(f"✓ {plan.stage.name:<11} done    {time.time() - began:.1f} s   {brief(stats)}")
    return "ran"


def _check_outside(plan: Plan) -> None:
    """A file that is edited in the hours before a stage reads it must not pass for the one of the fingerprint."""
    if plan.stage.outside(plan.config) != plan.outside:
        what = "what it reads from outside the run has changed since this run began"
        raise RunError(what, where=plan.stage.name, cure="Run the same command again, when nobody writes there.")


def _keep_what_is_of_use(plan: Plan) -> None:
    """Empty the folder, but for what an attempt with the same content of the same inputs has left to go on from."""
    if plan.stage.resumes and plan.stage.guards:
        return
    begun = plan.folder / BEGUN
    origin = {name: content_hash(folder) for name, folder in plan.inputs.items()}
    if not plan.stage.resumes or not begun.is_file() or files.read_json(begun) != origin:
        _empty(plan.folder)
    if plan.stage.resumes and not begun.is_file():
        files.write_json(begun, origin)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def seal(plan: Plan, stats: Stats, *, seconds: float, resumed: bool) -> None:
    """Write the manifest: from here on the folder is done, and says what it was made from."""
    manifest = {
        "stage": plan.stage.name,
        "version": plan.stage.version,
        "fingerprint": plan.fingerprint,
        "inputs": {name: folder.name for name, folder in plan.inputs.items()},
        "input_hashes": {name: content_hash(folder) for name, folder in plan.inputs.items()},
        "config": plain(plan.config),
        "stats": stats,
        "hands_on": plan.stage.hands_on,
        "outputs": files.listing(plan.folder),
        "seconds": round(seconds, 3),
        "resumed": resumed,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "machine": machine(),
    }
    files.write_json(plan.folder / MANIFEST, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished stage folder."""
    try:
        manifest: dict[str, Any] = files.read_json(folder / MANIFEST)
        if not isinstance(manifest, dict) or "outputs" not in manifest:
            raise ValueError("it is no manifest of a stage")
    except FileNotFoundError:
        raise RunError("has no manifest, so it is not done", where=str(folder), cure="Run its recipe again.") from None
    except ValueError as error:
        cure = "Remove that file and run the recipe again."
        raise RunError(f"cannot be read: {error}", where=str(folder / MANIFEST), cure=cure) from None
    return manifest


def content_hash(folder: Path) -> str:
    """sha256 over the names and hashes of what a finished stage hands on: equal for equal content, at any time."""
    manifest = read_manifest(folder)
    outputs, handed_on = manifest["outputs"], manifest.get("hands_on", "")
    hashes = {name: facts["sha256"] for name, facts in outputs.items() if name.startswith(handed_on)}
    return files.sha256_bytes(files.canonical(hashes))


def damage(folder: Path, *, thorough: bool = False) -> str:
    """
    Why a stage folder is not whole, or not made from what its inputs hold, or "". `thorough` compares sha256 too.

    An input that is not there, or not done, tells nothing.
    """
    if not (folder / MANIFEST).is_file():
        return "not done"
    manifest = read_manifest(folder)
    if broken := files.damage(folder, manifest["outputs"], thorough=thorough):
        return broken
    for name, made_from in manifest.get("input_hashes", {}).items():
        given = folder.parent / manifest["inputs"][name]
        if (given / MANIFEST).is_file() and content_hash(given) != made_from:
            return f"its input {name} was made again, with other content"
    return ""


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """
    Hold a run folder for this process, so that two runs cannot write into each other. Raises RunError.

    On Windows nothing is held.
    """
    with files.disk_errors(root):
        try:
            root.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:  # as in /proc, where nobody makes folders
            raise RunError("cannot be made", where=str(root), cure="Name another folder.") from None
        (root / ".lock").touch()
    with (root / ".lock").open("a+") as file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                cure = "Wait for it, or choose another folder with --runs."
                raise RunError(f"process {holder} is running in it", where=str(root), cure=cure) from None
        file.truncate(0)
        with files.disk_errors(root / ".lock"):
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


def versions() -> dict[str, str]:
    """Versions of what decides about results: Python, Bloomery, libraries; and what compiled code runs, if any."""
    found = {"python": platform.python_version()}
    for name in ("bloomery", "torch", "numpy", "tokenizers", "scikit-learn", "pyarrow", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"native": native.summary()}


def machine() -> dict[str, Any]:
    return {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}


def brief(stats: Stats) -> str:
    """The plain numbers of a stage's statistics, on one line."""
    return "  ".join(
        f"{name}={value:,}" if isinstance(value, int) else f"{name}={value:.4g}" if isinstance(value, float) else ""
        for name, value in stats.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )


def _ancestors(by_name: Mapping[str, Plan], name: str) -> set[str]:
    return {name}.union(*(_ancestors(by_name, parent) for parent in by_name[name].inputs))
