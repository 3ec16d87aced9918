"""
The table of evaluation tasks: what each asks, how it is judged, and where its rows are.

    choice      which of several texts is the most likely: acc by the sum of log p, acc_norm by that sum for each byte
    word        whether the most likely text is the right one, token by token (acc), and its perplexity
    number      whether the number that the model arrives at is the right one
    program     whether the code that the model writes passes its tests (pass@k); runs only where code may run
    prompts     the benchmark prompts of 1386.ai, each with a check of its own

A task's rows are read from a file or a folder, or from the hub. Decontamination looks for these very questions.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bloomery.core import files
from bloomery.core.errors import ConfigError, DataError
from bloomery.data import examined, hub, web_files
from bloomery.data.conversations.conversation import half_pair
from bloomery.data.hub import Repository
from bloomery.evaluation import battery, shapes
from bloomery.evaluation.core_parts import PARTS
from bloomery.evaluation.shapes import Item, Row, Shape

Kind = Literal["choice", "word", "number", "program", "prompts"]
EXAMPLES_SEED = 1234
SPLITS = ("", "test", "val", "validation", "dev", "train")
"""How a file's name may end, the first that is there is the one that is asked."""
EXAMPLE_SPLITS = ("train", "dev")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A row of the table."""

    kind: Kind
    shape: Shape
    chance: float = 0.0
    """The share that guessing gets right, where the rows do not tell it by their choices."""
    dataset: str = ""
    """Of the hub; empty where only a file will do."""
    files: str = ""
    """A glob in it."""
    examples: str = ""
    """A glob of the rows that examples are taken from."""
    aliases: tuple[str, ...] = ()
    """Other names of the task's file."""
    shots: int = 0
    """Examples before a question, unless told."""
    until: tuple[str, ...] = ()
    """Where what the model writes is cut."""
    max_tokens: int = 256


QUESTIONS = ("Question:", "\n\n\n")
STATEMENTS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

TASKS: Mapping[str, Task] = {
    "hellaswag": Task(
        kind="choice",
        shape=shapes.hellaswag,
        chance=0.25,
        dataset="Rowan/hellaswag",
        files="**/validation*.parquet",
        examples="**/train*.parquet",
    ),
    "arc_easy": Task(
        kind="choice",
        shape=shapes.arc,
        chance=0.25,
        dataset="allenai/ai2_arc",
        files="ARC-Easy/test*.parquet",
        examples="ARC-Easy/train*.parquet",
    ),
    "arc_challenge": Task(
        kind="choice",
        shape=shapes.arc,
        chance=0.25,
        dataset="allenai/ai2_arc",
        files="ARC-Challenge/test*.parquet",
        examples="ARC-Challenge/train*.parquet",
    ),
    "piqa": Task(
        kind="choice",
        shape=shapes.piqa,
        chance=0.5,
        dataset="baber/piqa",
        files="**/validation*.parquet",
        examples="**/train*.parquet",
    ),
    "openbookqa": Task(
        kind="choice",
        shape=shapes.openbookqa,
        chance=0.25,
        dataset="allenai/openbookqa",
        files="main/test*.parquet",
        examples="main/train*.parquet",
    ),
    "boolq": Task(
        kind="choice",
        shape=shapes.boolq,
        chance=0.5,
        dataset="aps/super_glue",
        files="boolq/validation*.parquet",
        examples="boolq/train*.parquet",
    ),
    "winogrande": Task(
        kind="choice",
        shape=shapes.winogrande,
        chance=0.5,
        dataset="allenai/winogrande",
        files="winogrande_xl/validation*.parquet",
        examples="winogrande_xl/train*.parquet",
    ),
    "copa": Task(
        kind="choice",
        shape=shapes.copa,
        chance=0.5,
        dataset="aps/super_glue",
        files="copa/validation*.parquet",
        examples="copa/train*.parquet",
    ),
    "commonsense_qa": Task(
        kind="choice",
        shape=shapes.commonsense_qa,
        chance=0.2,
        dataset="tau/commonsense_qa",
        files="**/validation*.parquet",
        examples="**/train*.parquet",
    ),
    "mmlu": Task(
        kind="choice",
        shape=shapes.mmlu,
        chance=0.25,
        dataset="cais/mmlu",
        files="all/test*.parquet",
        examples="all/dev*.parquet",
    ),
    "lambada": Task(
        kind="word",
        shape=shapes.lambada,
        dataset="EleutherAI/lambada_openai",
        files="default/test*.parquet",
        aliases=("lambada_openai",),
    ),
    "gsm8k": Task(
        kind="number",
        shape=shapes.gsm8k,
        dataset="openai/gsm8k",
        files="main/test*.parquet",
        examples="main/train*.parquet",
        shots=5,
        until=QUESTIONS,
    ),
    "svamp": Task(
        kind="number",
        shape=shapes.svamp,
        dataset="ChilleD/SVAMP",
        files="data/test*.parquet",
        examples="data/train*.parquet",
        until=QUESTIONS,
    ),
    "humaneval": Task(
        kind="program",
        shape=shapes.humaneval,
        dataset="openai/openai_humaneval",
        files="**/test*.parquet",
        until=STATEMENTS,
        max_tokens=512,
    ),
    "prompts": Task(kind="prompts", shape=battery.prompt, aliases=("eval_prompts",), max_tokens=200),
}


def named(names: Sequence[str]) -> list[str]:
    """Names of tasks, each once. Raises ConfigError for one that is not in the table."""
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"there is no task {name!r}", cure=f"Tasks: {', '.join(TASKS)}.")
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class Place:
    """Where rows are read from: files or folders of them; without any, from the hub."""

    paths: tuple[Path, ...] = ()
    offline: bool = False
    any_name: bool = False
    """Whether a file that is given itself may be called as it likes: where no other task is asked."""


def place(names: Sequence[str], paths: Sequence[Path], *, offline: bool = False) -> Place:
    """Where the rows of these tasks are."""
    return Place(tuple(path.expanduser() for path in paths), offline, any_name=len(set(names)) == 1)


def rows(name: str, place: Place, *, examples: bool = False) -> list[Item]:
    """The questions of a task in the order of its file, or those that may be examples. Raises DataError."""
    task = TASKS[name]
    found: list[Item] = []
    for path in paths(name, place, examples=examples):
        for number, row in battery.rows_of(path) if path.suffix == ".py" else examined.rows_of(path):
            found.append(replace(shaped(task.shape, row, f"{path}:{number}"), row=len(found) + 1))
    if not found:
        raise DataError(f"has no rows of {name}", where=", ".join(map(str, place.paths)))
    return found


def shaped(shape: Shape, row: Row, where: str) -> Item:
    try:
        item = shape(row)
        if item.choices and not 0 <= item.gold < len(item.choices):  # -1 where a split keeps its answers secret
            raise ValueError(f"the right one of {len(item.choices)} choices is {item.gold}")
        for text in (item.head, *item.prompts, *item.choices, item.answer, item.test):
            if (spot := half_pair(text)) is not None:
                raise ValueError(f"a text of it holds half a surrogate pair at character {spot}")
        return item
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        what = f"is no row of this task: {type(error).__name__}: {error}; its fields: {', '.join(row)}"
        raise DataError(what, where=where, cure="Name the file as it is on the hub, or as DCLM has it.") from None


def paths(name: str, place: Place, *, examples: bool = False) -> list[Path]:
    """The files that hold a task's rows; what is on the hub is downloaded first."""
    task = TASKS[name]
    if not place.paths:
        return _from_hub(name, task.examples if examples else task.files, place.offline)
    splits = EXAMPLE_SPLITS if examples else SPLITS
    what, any_name = "examples of " * examples + name, place.any_name and not examples
    return [find((name, *task.aliases), place.paths, splits, what=what, any_name=any_name)]


def find(
    names: Sequence[str], places: Sequence[Path], splits: Sequence[str], *, what: str, any_name: bool = False
) -> Path:
    """
    The file of a task: the one that is called NAME or NAME_SPLIT, or, with `any_name`, the only one that is given.

    A file that is called as another task's is that one's. Raises DataError where there is none, or more than one.
    """
    if found := look(names, places, splits, what=what):
        return found
    alone = places[0] if len(places) == 1 and places[0].is_file() else None
    owner = _owner(alone) if alone else None
    if alone and any_name and not owner:
        return alone
    near = sorted({path.name for place in places if place.is_dir() for path in files.below(place)})
    told = f"there is no file of {what}" + (f"; it is called as one of {owner}" if owner else "")
    cure = f"A file of it is called {names[0]}.jsonl (.zst, .gz) or .parquet, maybe with _{splits[-1]}."
    if alone and not owner and splits is SPLITS:
        cure += " It may have any name where it is given itself, and one task is asked."
    cure += f" Here is {', '.join(near[:5])}{', …' * (len(near) > 5)}." if near else ""
    raise DataError(told, where=", ".join(map(str, places)), cure=cure)


def look(names: Sequence[str], places: Sequence[Path], splits: Sequence[str], *, what: str) -> Path | None:
    """
    The file that is called NAME or NAME_SPLIT, among `places` and in those that are folders.

    Of several splits the first of `splits` wins. Raises DataError where there is more than one.
    """
    wanted = {_squeezed(name + split): place for name in names for place, split in enumerate(splits)}
    inside = [path for place in places for path in (sorted(files.below(place)) if place.is_dir() else [place])]
    for place in places:
        if not place.exists():
            raise DataError("does not exist", where=str(place), cure="Name a file of the task, or a folder with it.")
    ranked: dict[int, list[Path]] = {}
    for path in inside:
        stem = path.name.partition(".")[0]
        if path.is_file() and path.name.endswith((*examined.SUFFIXES, ".py")) and _squeezed(stem) in wanted:
            ranked.setdefault(wanted[_squeezed(stem)], []).append(path)
    best = ranked[min(ranked)] if ranked else [None]
    if len(best) > 1:
        raise DataError(f"is {what}, and so is {best[1]}", where=str(best[0]), cure="Name one of them.")
    return best[0]


def _owner(path: Path) -> str | None:
    """The task, of the table or of CORE, whose file is called so."""
    stem = _squeezed(path.name.partition(".")[0])
    aliases = {name: (name, *one.aliases) for table in (TASKS, PARTS) for name, one in table.items()}
    known = ((name, _squeezed(own + split)) for name, every in aliases.items() for own in every for split in SPLITS)
    return next((name for name, called in known if called == stem), None)


def _squeezed(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _from_hub(name: str, pattern: str, offline: bool) -> list[Path]:
    dataset = TASKS[name].dataset
    if not dataset or not pattern:
        raise DataError(f"{name} is not on the hub", cure="Name its file, or the folder that holds it: --data PATH.")
    repository = Repository(dataset, offline=offline)
    token = None if repository.cut_off else hub.token()
    return [
        web_files.download(file, attempts=repository.attempts, token=token, offline=repository.cut_off)
        for file in hub.listing(repository, (pattern,))
    ]


def prompted(item: Item, examples: Sequence[Item], shots: int) -> Item:
    """The question behind `shots` examples, which its row draws: the same ones whatever else is asked."""
    if not shots:
        return replace(item, prompts=tuple(item.head + prompt for prompt in item.prompts))
    pool = [one for one in examples if one.solved != item.solved and one.head == item.head]
    if len(pool) < shots:
        raise DataError(f"there are {len(pool)} examples, and {shots} were asked for", cure="Ask for fewer: --shots 0.")
    drawn = random.Random(EXAMPLES_SEED + item.row - 1).sample(pool, shots)
    before = item.head + "".join(f"{one.solved}\n\n" for one in drawn)
    return replace(item, prompts=tuple(before + prompt for prompt in item.prompts))


def as_rows(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Questions and choices as decontamination reads them."""
    for item in items:
        if len(item.prompts) > 1:
            yield {"context_options": list(item.prompts), "continuation": item.choices[0]}
        else:
            yield {"query": item.question, "choices": list(item.choices), "gold": item.gold}
