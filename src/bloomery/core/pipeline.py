"""
Runs the stages of a recipe, reuses finished outputs, and writes their manifests.

A stage is data, its folder name holds its fingerprint, and its manifest is written last.

The name of a folder ends in a hash. The hash covers the stage's name, version and config, and the fingerprints of
its inputs. Whatever could change the output therefore changes the folder, and the output of an unchanged stage is
found again.

A folder is complete under three conditions. Its manifest exists. Every file that the manifest lists has the listed
size. Its inputs still hold the content that the output was made from. The third condition is needed because a
fingerprint does not see an input that was made again with other content.

Before a stage runs, the SHA-256 of every file that its inputs pass on is compared with their manifests. A stage
that died finds its own leftovers in the folder if it can resume from them. Otherwise it finds an empty folder.

This is one file because fingerprint, execution and manifest depend on each other: each checks what another wrote.
"""

import difflib
import importlib
import os
import platform
import re
import stat
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from typing_extensions import TypedDict

from bloomery.core import cache, extras, native
from bloomery.core import io as core_io
from bloomery.core.config import Config, packages, paths, plain, to_toml
from bloomery.core.errors import COLUMNS, DataError, MissingPackageError, RunError, UnreachableError
from bloomery.core.io import MANIFEST
from bloomery.core.log import console, duration, info, say, stage_line
from bloomery.core.records import (
    CURRENT,
    NOT_DONE,
    RECIPE,
    FolderName,
    content_hash,
    damage,
    handed_on,
    read_manifest,
    read_record,
)

if sys.platform != "win32":
    import fcntl

BEGUN = "begun.json"
"""Which content of its inputs a stage that resumes began with. It does not resume from leftovers of other content."""
CHECKPOINTS = "checkpoints"
"""In the folder of a stage that trains: a folder for each step that it can resume from."""
LOCK = ".lock"
"""In a run folder: the number of the process that holds it."""
ATTEMPTS, SECONDS_BETWEEN_ATTEMPTS = 5, 0.02
"""To take the lock: `status` may hold it for a moment."""

Stats = Mapping[str, Any]
"""What a stage reports: JSON data, shown by `status` and in the report."""


Runner = Callable[[Any, Mapping[str, Path], Path], Stats]
"""`run(config, inputs, out) -> stats`: inputs maps the name of an earlier stage to its folder."""


@dataclass(frozen=True)
class Stage:
    """
    A stage of a recipe. Its module says the rest, and is imported when the stage is planned or run, so that reading a
    recipe imports no torch. The module has `run`; each of the other names has a default.

        run(config, inputs, out) -> stats       does the work; see Runner
        VERSION = 1                             raised when the meaning of the output changes; code is not hashed
        external_inputs(config) -> str          a digest of what the stage reads from outside the run, or ""; it joins
                                                the fingerprint
        preflight(section, config)              raises where this machine lacks what the stage needs
        is_incomplete(config, folder) -> bool   whether the stage is done there, and yet less than the config asks for
        RESUMES = False                         whether the stage resumes from what an attempt that died has left;
                                                otherwise every attempt begins in an empty folder
        OWNS_LEFTOVERS = False                  whether the stage finds out by itself that leftovers belong to other
                                                inputs; otherwise such leftovers are removed
        OUTPUT_PREFIX = ""                      the beginning of the names of the files that later stages read, as in
                                                "model/". Metrics and checkpoints hold speeds, and never repeat
    """

    name: str
    module: str
    after: tuple[str, ...] = ()
    optional: bool = False
    """Whether a recipe may do without its section: then it is not there, and those after it do without it too."""
    run_by: str = ""
    """`module:function` that calls `run` of the module, for a stage that has other inputs than in a recipe."""
    planned_by: str = ""
    """`module:object` with the names above but `run`, for a module that needs torch: a plan is made without it."""

    @property
    def code(self) -> Any:
        return resolve(self.planned_by) if self.planned_by else importlib.import_module(self.module)

    @property
    def version(self) -> int:
        return int(getattr(self.code, "VERSION", 1))

    @property
    def resumes(self) -> bool:
        return bool(getattr(self.code, "RESUMES", False))

    @property
    def owns_leftovers(self) -> bool:
        return bool(getattr(self.code, "OWNS_LEFTOVERS", False))

    @property
    def output_prefix(self) -> str:
        return str(getattr(self.code, "OUTPUT_PREFIX", ""))

    def runner(self) -> Runner:
        runner: Runner = resolve(self.run_by or f"{self.module}:run")
        return runner

    def external_inputs(self, config: Config) -> str:
        """The digest of what it reads from outside the run, as it is now; "" where it reads nothing."""
        return str(self.code.external_inputs(config)) if hasattr(self.code, "external_inputs") else ""

    def preflight(self, config: Config) -> None:
        """Raises where this machine lacks what the stage needs."""
        if hasattr(self.code, "preflight"):
            self.code.preflight(self.name, config)

    def is_incomplete(self, config: Config, folder: Path) -> bool:
        """Whether a folder that is done holds less than the config asks for."""
        return hasattr(self.code, "is_incomplete") and bool(self.code.is_incomplete(config, folder))


@dataclass(frozen=True, kw_only=True)
class StagePlan:
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
        return not self.stage.is_incomplete(self.config, self.folder)


def resolve(reference: str) -> Any:
    """The object that `package.module:name` stands for."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def plan_stages(stages: Sequence[Stage], recipe: Config, root: Path, *, blind: bool = False) -> list[StagePlan]:
    """
    Every stage of a recipe with its folder under `root`, in order, but for those that the recipe has no section for.

    Reads sources' digests; writes nothing. Raises UnreachableError where one is on a host that cannot be asked, unless
    `blind`: then the plan says so.
    """
    plans: dict[str, StagePlan] = {}
    left_out, not_wanted = missing_sections(stages, recipe), unwanted(stages, recipe)
    for number, stage in enumerate([stage for stage in stages if stage.name not in not_wanted], 1):
        config: Config = getattr(recipe, stage.name)
        _check_paths(stage.name, config)
        if stage.name in left_out:
            continue
        outside, unseen = _seen(stage, config, blind)
        after = [name for name in config.needs(stage.after) if name not in not_wanted]
        inputs = [plans[name].fingerprint for name in after]
        known = [stage.name, stage.version, plain(config, stable_only=True), inputs, outside]
        fingerprint = core_io.sha256_bytes(core_io.canonical(known))[:8]
        plans[stage.name] = StagePlan(
            stage=stage,
            config=config,
            folder=root / f"{number:02d}-{stage.name}-{fingerprint}",
            fingerprint=fingerprint,
            inputs={name: plans[name].folder for name in after},
            outside=outside,
            unseen=unseen or next((plans[name].unseen for name in after if plans[name].unseen), ""),
        )
    return list(plans.values())


def _check_paths(section: str, config: Config | None) -> None:
    """Raises DataError for a path of a section that exists and is neither a folder nor a regular file."""
    for key, raw_path in paths(config, section):
        path = raw_path.expanduser()
        if os.path.exists(path) and not os.path.isdir(path) and (what := core_io.special(path)):
            raise DataError(what, where=f"{key} = {path}", hint="Use a regular file.")
        if os.path.isdir(path) and (folder := core_io.kernel(path)):
            raise DataError(
                f"lies in {folder}", where=f"{key} = {path}", hint="Use a folder that holds only regular files."
            )


def _seen(stage: Stage, config: Config, blind: bool) -> tuple[str, str]:
    """The digest of what a stage reads from outside, or why it is not known."""
    try:
        return stage.external_inputs(config), ""
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
    """The optional stages that a recipe has no section for, and those that it does without."""
    return {
        stage.name
        for stage in stages
        if (stage.optional and getattr(recipe, stage.name) is None) or stage.name in recipe.skipped()
    }


def check_sections(
    stages: Sequence[Stage], recipe: Config, *, until: str | None = None, only: str | None = None
) -> None:
    """Raises RunError where what is asked for, as `execute` takes it, comes to a stage without its section."""
    missing = missing_sections(stages, recipe)
    asked = until or only
    if asked in unwanted(stages, recipe):
        raise RunError(
            f"the recipe has no section [{asked}]", where=f"stage {asked}", hint=f"Add [{asked}] to the recipe."
        )
    stopped = asked if asked in missing else None if asked else next(iter(missing), None)
    if stopped is None:
        return
    not_wanted = unwanted(stages, recipe)
    left = [stage for stage in stages if stage.name not in missing and stage.name not in not_wanted]
    ends = [one.name for one in left if not any(one.name in other.after for other in left)]
    sections = " and ".join(f"[{name}]" for name in missing[stopped])
    hint = f"Add {sections} to the recipe, or stop earlier: {' or '.join(f'--until {name}' for name in ends)}"
    raise RunError(f"the recipe has no section {sections}, which it needs", where=f"stage {stopped}", hint=hint)


def check_names(stages: Sequence[Stage], *names: str | None) -> None:
    """Raises RunError for the name of a stage that is not there. None is no name."""
    known = [stage.name for stage in stages]
    for name in names:
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"Did you mean {near[0]!r}? " if near else ""
            raise RunError(f"there is no stage {name!r}", hint=f"{meant}Stages: {', '.join(known)}.")


Sentence = Callable[[str, Stats], tuple[str, str]]
"""`sentence(stage, stats)`: what a stage has done, and what stands after the time that it took."""


def plain_sentence(stage: str, stats: Stats) -> tuple[str, str]:
    """Of a stage that nobody has words for: its plain numbers."""
    numbers = brief(stats).replace("=", " ").replace("  ", ", ")
    return "done", f": {numbers}" if numbers else ""


def run(
    stages: Sequence[Stage],
    recipe: Config,
    root: Path,
    *,
    until: str | None = None,
    only: str | None = None,
    before: Callable[[Any, Sequence[StagePlan], Sequence[StagePlan]], None] = lambda recipe, plans, due: None,
    sentence: Sentence = plain_sentence,
    between: Callable[[StagePlan], None] = lambda plan: None,
    after: Callable[[Path], None] = lambda root: None,
) -> list[str]:
    """
    Run what is not done of a recipe in its run folder `root`, up to the stage `until`, or the stage `only` alone.
    Returns the stages that are still to run.

    Nobody else can run in the folder meanwhile. `before` is called with the plans of all stages and of those that will
    run now, when all of these can. `between` is called after each stage, and `after` when the stages have run. Raises
    what `check_names`, `check_sections`, `plan_stages` and `execute` do.
    """
    check_names(stages, until, only)
    check_sections(stages, recipe, until=until, only=only)
    with locked(root):
        try:
            plans = plan_stages(stages, recipe, root)
        except MissingPackageError:  # what a store needs before it can be asked; the other stages may lack more
            check_packages(stages, recipe, until=until, only=only)
            raise
        remember(root, recipe, plans)
        due = ready(plans, until=until, only=only)
        before(recipe, plans, due)
        execute(plans, until=until, only=only, sentence=sentence, between=between)
        after(root)
        return [plan.stage.name for plan in plans if not plan.fresh]


class UpToDate(TypedDict):
    """That a command had nothing to do, and the state of all that it depended on."""

    root: str
    recipe: str
    program: str
    watched: list[str]
    state: str
    current: str
    pages: list[str]


@dataclass(frozen=True)
class RunCommand:
    """
    What was typed: a recipe, settings and the folder of runs. When a run of it ends with every stage done, the cache
    notes that, and the state of every file that it depends on. As long as no state changes, the same command has
    nothing to do, and says so without reading a recipe or importing a stage.
    """

    recipe: Path
    settings: tuple[str, ...]
    runs: Path

    @property
    def note(self) -> Path:
        words = [str(self.recipe.absolute()), [*self.settings], str(self.runs.absolute()), os.getcwd()]
        return cache.root() / "up-to-date" / f"{core_io.sha256_bytes(core_io.canonical(words))}.json"

    def before(self, watched: list[str] | None) -> UpToDate | None:
        """The state before stages are planned; `watched` are the files outside of the run that they read."""
        if watched is None or not self.recipe.is_file():
            return None
        began = time.time_ns()
        state, newest = cache.state_of(watched)
        if newest + cache.SETTLED_NANOSECONDS > began:
            return None
        recipe = core_io.sha256_file(self.recipe)
        return UpToDate(root="", recipe=recipe, program=_program(), watched=watched, state=state, current="", pages=[])

    def remember(self, root: Path, before: UpToDate | None) -> None:
        """Note that every stage is done in the run folder `root`, as it was planned in the state `before`."""
        if before is not None:
            pages = sorted(path.name for path in root.iterdir() if path.is_file() and path.name != LOCK)
            facts = {"root": str(root.absolute()), "current": core_io.sha256_file(root / CURRENT), "pages": pages}
            cache.save_note(self.note, {**before, **facts})

    def up_to_date(self) -> Path | None:
        """The run folder of this command where it is noted that there is nothing to do, and that is still true."""
        note = cache.load_note(self.note, UpToDate)
        if note is None or not self.recipe.is_file():
            return None
        root = Path(note["root"])
        same = (
            note["recipe"] == core_io.sha256_file(self.recipe)
            and note["program"] == _program()
            and note["state"] == cache.state_of(note["watched"])[0]
            and all((root / name).is_file() for name in note["pages"])
            and note["current"] == core_io.sha256_file(root / CURRENT)
        )
        if not same:
            return None
        folders = read_record(root / CURRENT, dict[str, FolderName])
        return None if any(damage(root / name) for name in folders.values()) else root


def _program() -> str:
    """A hash over Python's version and the state of every file of this package."""
    package = Path(__file__).parents[1]
    files = sorted(path for path in package.rglob("*") if path.suffix != ".pyc" and path.is_file())
    return f"{sys.version} {cache.state_of([*map(str, files)])[0]}"


def remember(root: Path, recipe: Config, plans: Sequence[StagePlan]) -> None:
    """Save the resolved recipe and the folders that belong to it."""
    with core_io.whole_file(root / RECIPE, "w") as file:
        file.write(to_toml(plain(recipe)))
    core_io.write_json(root / CURRENT, {plan.stage.name: plan.folder.name for plan in plans})


def requested(plans: Sequence[StagePlan], *, until: str | None = None, only: str | None = None) -> list[StagePlan]:
    """The stages that are asked for, in order. Raises RunError for a stage that is not there."""
    assert until is None or only is None
    check_names([plan.stage for plan in plans], until, only)
    by_name = {plan.stage.name: plan for plan in plans}
    names = _ancestors(by_name, until) if until else {only} if only else set(by_name)
    return [plan for plan in plans if plan.stage.name in names]


def ready(plans: Sequence[StagePlan], *, until: str | None = None, only: str | None = None) -> list[StagePlan]:
    """The stages that will run. Raises what `requested`, `missing_packages` and `Stage.preflight` do."""
    due = [plan for plan in requested(plans, until=until, only=only) if not plan.fresh]
    if error := missing_packages(due):
        raise error
    check_machine(due)
    return due


def execute(
    plans: Sequence[StagePlan],
    *,
    until: str | None = None,
    only: str | None = None,
    sentence: Sentence = plain_sentence,
    between: Callable[[StagePlan], None] = lambda plan: None,
) -> dict[str, str]:
    """
    Run what is not done, in order. Returns what became of each stage: "fresh" (nothing to do) or "ran".

    `until` is the last stage wanted, `only` the single one; at most one of them is given. Raises RunError where an
    input of the single one is not done, and, before any runs, what `ready` does.
    """
    ready(plans, until=until, only=only)
    done: dict[str, str] = {}
    for plan in requested(plans, until=until, only=only):
        done[plan.stage.name] = "fresh" if plan.fresh else _run(plan, sentence)
        between(plan)
    return done


def check_machine(due: Sequence[StagePlan]) -> None:
    """Raises what `Stage.preflight` does, of stages that would run."""
    for plan in due:
        plan.stage.preflight(plan.config)


def missing_packages(due: Sequence[StagePlan]) -> MissingPackageError | None:
    """The error for all packages that stages that would run need and that are not installed."""
    return extras.missing(need for plan in due for need in packages(plan.config, plan.stage.name))


def check_packages(
    stages: Sequence[Stage], recipe: Config, *, until: str | None = None, only: str | None = None
) -> None:
    """Raises MissingPackageError for all packages that the stages need which `execute` would come to, or may."""
    requested = {until or only} if until or only else {stage.name for stage in stages}
    for stage in reversed(stages):
        section: Config | None = getattr(recipe, stage.name)
        if stage.name in requested and section is not None and only is None:
            requested.update(section.needs(stage.after))
    sections = {stage.name: getattr(recipe, stage.name) for stage in stages if stage.name in requested}
    if error := extras.missing(need for name, section in sections.items() for need in packages(section, name)):
        raise error


def _run(plan: StagePlan, sentence: Sentence) -> str:
    for name, folder in plan.inputs.items():
        if trouble := damage(folder):
            hint = f"Run it first: bloomery run RECIPE --until {name}"
            raise RunError(f"its input {name} is not ready ({trouble})", where=plan.stage.name, hint=hint)
        if trouble := cache.changed(folder, handed_on(read_manifest(folder))):
            hint = f"Remove {folder / MANIFEST} and run the same command again to repeat {name}."
            raise RunError(f"its input {name} is damaged: {folder / trouble}", where=plan.stage.name, hint=hint)
    _check_outside(plan)
    if (trouble := damage(plan.folder)) and trouble != NOT_DONE:
        info(f"  {plan.stage.name} runs again: {trouble}", "yellow")
    if plan.folder.is_symlink():
        hint = "Remove the link and run the same command again. The files that it points to stay."
        what = f"is a link to {plan.folder.resolve()}; a stage writes only into its own folder"
        raise RunError(what, where=str(plan.folder), hint=hint)
    with core_io.disk_errors(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
        core_io.remove_path(plan.folder / MANIFEST)  # of outputs that are damaged: it must not vouch for new ones
        _keep_what_is_of_use(plan)
    resumed = any(path.name != BEGUN for path in plan.folder.iterdir())
    name, began = plan.stage.name, time.time()
    if not plan.config.is_idle() and not console.is_terminal:  # there a live line shows what runs
        say("resumes" if resumed else "runs", mark="▸", name=name)
    info(str(plan.folder))
    whole = False
    try:
        with stage_line(name):
            stats = plan.stage.runner()(plan.config, plan.inputs, plan.folder)
        whole = True
    finally:
        if not whole:
            failed = isinstance(sys.exc_info()[1], Exception)
            how = f"{'failed' if failed else 'stopped'} after {duration(time.time() - began)}; {_kept(plan)}"
            say(how, mark="✗" if failed else "◐", name=name, style="red" if failed else "yellow")
    _check_outside(plan)
    seal(plan, stats, seconds=time.time() - began, resumed=resumed)
    if not plan.config.is_idle():
        text, more = sentence(name, stats)
        say(f"{text} in {duration(time.time() - began)}{more}.", mark="✓", name=name, style="green")
    info("\n".join(textwrap.wrap(brief(stats), COLUMNS)))
    return "ran"


def _kept(plan: StagePlan) -> str:
    """What is left of a stage that did not end, and of those before it."""
    names = [path.name for path in (plan.folder / CHECKPOINTS).glob("[0-9]*")]
    saved = max((int(name) for name in names if name.isdigit()), default=0)
    own = f"step {saved:,}" if saved else "what it has finished" if plan.stage.resumes else "nothing of it"
    return f"{own} and all stages before it are kept." if plan.inputs else f"{own} is kept."


def _check_outside(plan: StagePlan) -> None:
    """A file that is edited in the hours before a stage reads it must not pass for the one of the fingerprint."""
    if plan.stage.external_inputs(plan.config) != plan.outside:
        what = "an input outside the run folder changed while the run was in progress"
        raise RunError(
            what, where=plan.stage.name, hint="Run the same command again when no other program writes to it."
        )


def _keep_what_is_of_use(plan: StagePlan) -> None:
    """Empty the folder. Leftovers of an attempt with the same content of the same inputs stay, to resume from."""
    if plan.stage.resumes and plan.stage.owns_leftovers:
        return
    begun = plan.folder / BEGUN
    origin = {name: content_hash(folder) for name, folder in plan.inputs.items()}
    fix = f"Remove {plan.folder}, and run the same command again: the stage starts over."
    if not plan.stage.resumes or not begun.exists() or read_record(begun, dict[str, str], fix=fix) != origin:
        for path in plan.folder.iterdir():
            core_io.remove_path(path)
    if plan.stage.resumes and not begun.exists():
        core_io.write_json(begun, origin)


def seal(plan: StagePlan, stats: Stats, *, seconds: float, resumed: bool) -> None:
    """Write the manifest: from here on the folder is done, and says what it was made from."""
    manifest = {
        "stage": plan.stage.name,
        "version": plan.stage.version,
        "fingerprint": plan.fingerprint,
        "inputs": {name: folder.name for name, folder in plan.inputs.items()},
        "input_hashes": {name: content_hash(folder) for name, folder in plan.inputs.items()},
        "config": plain(plan.config),
        "stats": stats,
        "hands_on": plan.stage.output_prefix,
        "outputs": core_io.listing(plan.folder),
        "seconds": round(seconds, 3),
        "resumed": resumed,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "machine": machine(),
    }
    core_io.write_json(plan.folder / MANIFEST, manifest)


def holder(root: Path) -> int | None:
    """
    The process that runs in a run folder now; None where none does, and on Windows. The lock is held for the moment of
    the question, which `locked` waits for.
    """
    if sys.platform == "win32" or not (root / LOCK).is_file():
        return None
    with open(root / LOCK, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            number = file.read(20)
            return int(number) if number.isdigit() else None
    return None


def _lock(file: IO[str]) -> None:
    """Raises BlockingIOError where another process holds the lock for longer than `holder` does."""
    for attempt in range(ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(SECONDS_BETWEEN_ATTEMPTS)
        else:
            return


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """
    Hold a run folder for this process, so that two runs cannot write into each other. Raises RunError.

    On Windows nothing is held.
    """
    core_io.make_folder(root)
    with core_io.disk_errors(root):
        _check_lock(root / LOCK)
    with open(root / LOCK, "a+", opener=core_io.open_own) as file:
        if sys.platform != "win32":
            try:
                _lock(file)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                hint = "Wait until it ends, or choose another folder with --runs."
                raise RunError(f"process {holder} is running in it", where=str(root), hint=hint) from None
        file.truncate(0)
        with core_io.disk_errors(root / LOCK):
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


def _check_lock(path: Path) -> None:
    """Raises RunError where the file of the lock is another program's: a link, or anything but a process's number."""
    try:
        kind = path.lstat().st_mode
        is_ours = stat.S_ISREG(kind) and re.fullmatch(rb"[0-9]{0,20}", path.read_bytes()[:21]) is not None
    except FileNotFoundError:
        is_ours = True
    if not is_ours:
        hint = "Move it away, or choose another folder."
        raise RunError("would be overwritten, but does not hold a process ID", where=str(path), hint=hint)


def versions() -> dict[str, str]:
    """Versions of what decides about results: Python, Bloomery, libraries; and what compiled code runs, if any."""
    installed = {"python": platform.python_version()}
    for name in ("bloomery", "torch", "numpy", "tokenizers", "scikit-learn", "pyarrow", "safetensors"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed | {"native": native.summary()}


def machine() -> dict[str, Any]:
    return {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}


def brief(stats: Stats) -> str:
    """The plain numbers of a stage's statistics, on one line."""
    return "  ".join(
        f"{name}={value:,}" if isinstance(value, int) else f"{name}={value:.4g}" if isinstance(value, float) else ""
        for name, value in stats.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )


def _ancestors(by_name: Mapping[str, StagePlan], name: str) -> set[str]:
    return {name}.union(*(_ancestors(by_name, parent) for parent in by_name[name].inputs))
