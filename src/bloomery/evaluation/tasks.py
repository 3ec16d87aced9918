"""
Evaluation tasks: prompts, few-shot examples, grading, and the source of each task's rows.

The table names five kinds of task:

    choice      which of several texts is the most likely: acc by the sum of log p, acc_norm by that sum for each byte
    word        whether the most likely text is the right one, token by token (acc), and its perplexity
    number      whether the number that the model arrives at is the right one
    program     whether the code that the model writes passes its tests (pass@k); runs only where code may run
    prompts     the benchmark prompts of 1386.ai, each with a check of its own

Rows of a task come from a file, a folder, or the Hugging Face hub. Decontamination looks for these
very questions, and so does `dirty`, in the text that a model was trained on.

Prompts and choices are those of lm-evaluation-harness, so that results can be compared. Rows have the format of
their data sets on the hub, or the format of llm-foundry and DCLM. The latter is {query, choices, gold}, {context,
continuation}, or {context_options, continuation, gold}. One space stands between prompt and choice.

The benchmark prompts of 1386.ai come from its own file scripts/eval_prompts.py. Bloomery parses that file and never
runs it.

    FACTUAL       right where one of the keywords is in the answer, as a word or a beginning of one
    CODE          right where the function that is written passes the tests; needs leave to run code
    INSTRUCTION   right where exactly as many different things are listed as were asked for
    ESSAY         right from 25 words on, with two keywords and no sentence twice
    CONVO         right where the answer has at least three words, and refuses nothing

The table of CORE's 22 tasks holds few-shot examples, chance, and how rows become prompts, as in DCLM's evaluation.

CORE: the mean of 22 centered accuracies (Li et al. 2024, DataComp-LM, arXiv 2406.11794).

    centered = (accuracy − chance) / (1 − chance)        0 is guessing, 1 is all right

Tasks, few-shot examples and chance are those of DCLM's evaluation. Among choices, the choice with the highest mean
of log p over its tokens wins. A continuation counts as right if every token is the most likely token. Few-shot
examples are sampled from the task's other questions, seeded by the row number. If some tasks are missing, the mean
is a different number and has a different name.

One file holds all of this because a task is its table entry, its row format and its grading together.
"""

import ast
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bloomery.core import io as core_io
from bloomery.core.chat import lone_surrogate
from bloomery.core.errors import ConfigError, DataError
from bloomery.data import decontamination
from bloomery.data.documents import batched_by_size
from bloomery.data.sources import download
from bloomery.data.sources.download import Repository
from bloomery.evaluation.stats import wilson

TaskRow = Mapping[str, Any]
LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, kw_only=True)
class EvalItem:
    """One question of a task, as it is put to a model."""

    prompts: tuple[str, ...]
    """One for all choices, or one for each."""
    choices: tuple[str, ...] = ()
    """What may follow; without choices, `answer` is compared with what the model writes."""
    gold: int = 0
    """The place of the right choice."""
    answer: str = ""
    """The right text, with its reasoning where the data has it."""
    head: str = ""
    """What stands before the examples and the question."""
    test: str = ""
    """Code that raises where a program is wrong."""
    row: int = 0
    """From 1, in the task's file."""
    asked: str = ""
    """The question alone, where the prompt lists the texts of its choices too."""
    listed: tuple[str, ...] = ()
    """Those texts."""

    @property
    def question(self) -> str:
        """What no training text may hold."""
        return self.asked or self.prompts[0]

    @property
    def solved(self) -> str:
        """The question with its right answer, as an example of what is wanted."""
        prompt = self.prompts[self.gold if len(self.prompts) > 1 else 0]
        return f"{prompt} {self.choices[self.gold] if self.choices else self.answer}"


RowShape = Callable[[TaskRow], EvalItem]


def ready(row: TaskRow, ending: str = "") -> EvalItem:
    """A row whose question is written out; `ending` is what llm-foundry puts between it and a choice."""
    if "context_options" in row:
        options = tuple(row["context_options"])
        return EvalItem(prompts=options, choices=(row["continuation"],) * len(options), gold=int(row["gold"]))
    if "continuation" in row:
        return EvalItem(prompts=(row["context"].strip() + ending,), choices=(row["continuation"].strip(),))
    return EvalItem(prompts=(row["query"] + ending,), choices=tuple(row["choices"]), gold=int(row["gold"]))


def hellaswag(row: TaskRow) -> EvalItem:
    if "query" in row:
        return ready(row)
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}" if "ctx_a" in row else row["ctx"]
    choices = tuple(map(_without_brackets, row["endings"]))
    return EvalItem(
        prompts=(_without_brackets(f"{row['activity_label']}: {context}"),), choices=choices, gold=int(row["label"])
    )


def _without_brackets(text: str) -> str:
    """WikiHow's headings become sentences, and what else stands in brackets goes."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def arc(row: TaskRow) -> EvalItem:
    if "query" in row:
        return ready(row, "\nAnswer:")
    return _lettered(row, f"Question: {row['question']}\nAnswer:")


def openbookqa(row: TaskRow) -> EvalItem:
    return ready(row) if "query" in row else _lettered(row, row["question_stem"])


def _lettered(row: TaskRow, prompt: str) -> EvalItem:
    """Choices as the hub has AI2's: {"text": […], "label": […]}, and the label of the right one."""
    choices, labels = row["choices"]["text"], list(row["choices"]["label"])
    return EvalItem(prompts=(prompt,), choices=tuple(choices), gold=labels.index(row["answerKey"].strip()))


def piqa(row: TaskRow) -> EvalItem:
    if "query" in row:
        return ready(row, "\nAnswer:")
    return EvalItem(
        prompts=(f"Question: {row['goal']}\nAnswer:",), choices=(row["sol1"], row["sol2"]), gold=int(row["label"])
    )


def boolq(row: TaskRow) -> EvalItem:
    if "query" in row:
        return ready(row, "\nAnswer:")
    right = row["label"] if "label" in row else row["answer"]
    prompt = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return EvalItem(prompts=(prompt,), choices=("no", "yes"), gold=int(right))


def winogrande(row: TaskRow) -> EvalItem:
    """The choices are beginnings here, and what follows is the same."""
    if "sentence" not in row:
        return ready(row)
    before, _, after = row["sentence"].partition("_")
    prompts = tuple(before + row[option] for option in ("option1", "option2"))
    return EvalItem(prompts=prompts, choices=(after.strip(),) * 2, gold=int(row["answer"]) - 1)


def copa(row: TaskRow) -> EvalItem:
    if "query" in row:
        return ready(row)
    link = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = tuple(row[name][0].lower() + row[name][1:] for name in ("choice1", "choice2"))
    return EvalItem(prompts=(f"{row['premise'].strip()[:-1]} {link}",), choices=choices, gold=int(row["label"]))


def commonsense_qa(row: TaskRow) -> EvalItem:
    if "query" in row:
        return ready(row)
    texts = row["choices"]["text"]
    prompt = f"Question: {row['question'].strip()}\n{_listed(texts)}\nAnswer:"
    return EvalItem(
        prompts=(prompt,),
        choices=tuple(LETTERS[: len(texts)]),
        gold=LETTERS.index(row["answerKey"]),
        asked=row["question"].strip(),
        listed=tuple(texts),
    )


def mmlu(row: TaskRow) -> EvalItem:
    right = row["label"] if "label" in row else row["answer"]
    gold = LETTERS.index(right) if isinstance(right, str) else int(right)
    about = row["subject"].replace("_", " ")
    return EvalItem(
        head=f"The following are multiple choice questions (with answers) about {about}.\n\n",
        prompts=(f"{row['question'].strip()}\n{_listed(row['choices'])}\nAnswer:",),
        choices=tuple(LETTERS[: len(row["choices"])]),
        gold=gold,
        asked=row["question"].strip(),
        listed=tuple(row["choices"]),
    )


def _listed(choices: Sequence[str]) -> str:
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))


def lambada(row: TaskRow) -> EvalItem:
    """The last word of a passage."""
    if "continuation" in row:
        return ready(row)
    context, _, word = row["text"].rpartition(" ")
    return EvalItem(prompts=(context,), choices=(word,))


def gsm8k(row: TaskRow) -> EvalItem:
    if not re.search(r"####\s*-?[\d.,]*\d", row["answer"]):
        raise ValueError(f"its answer {row['answer'][-60:]!r} has no number after ####")
    return EvalItem(prompts=(f"Question: {row['question']}\nAnswer:",), answer=row["answer"])


def svamp(row: TaskRow) -> EvalItem:
    """The hub's rows have a body and a question, llm-foundry's both in `context`; an equation leads to the answer."""
    question = row["context"] if "context" in row else f"{row['Body'].strip()} {row['Question'].strip()}"
    steps = row["chain_of_thought"] if "context" in row else row["Equation"]
    result = str(row["answer"] if "context" in row else row["Answer"])
    return EvalItem(prompts=(f"Question: {question}\nAnswer:",), answer=f"{steps}\n#### {result}")


def humaneval(row: TaskRow) -> EvalItem:
    test = f"{row['test']}\ncheck({row['entry_point']})\n"
    return EvalItem(prompts=(row["prompt"],), answer=row["canonical_solution"], test=test)


FEWEST_WORDS, FEWEST_KEYWORDS, FEWEST_SPOKEN = 25, 2, 3
REFUSAL = re.compile(r"\b(as an ai|i cannot|i can't|i am unable|i'm unable|i'm sorry)\b", re.IGNORECASE)


def rows_of(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The prompts of a Python file whose lists are literals. Raises DataError for a file without."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"is not Python: {error}", where=str(path), hint="Use scripts/eval_prompts.py.") from None
    number = 0
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if not (isinstance(node, ast.Assign) and isinstance(target, ast.Name) and target.id in CHECKS):
            continue
        for entry in _literal(node.value, path):
            number += 1
            yield number, {"kind": target.id, **(entry if isinstance(entry, dict) else {"q": entry})}


def _literal(value: ast.expr, path: Path) -> list[Any]:
    try:
        return list(ast.literal_eval(value))
    except (ValueError, TypeError) as error:
        hint = "Write the prompts as literals: the file is read, never run."
        raise DataError(f"holds more than literals: {error}", where=str(path), hint=hint) from None


def prompt(row: Mapping[str, Any]) -> EvalItem:
    """A row of `rows_of`: `answer` holds what its check needs, as JSON."""
    facts = {key: value for key, value in row.items() if key != "q"}
    test = ""
    if row["kind"] == "CODE":
        test = "".join(f"assert {row['fn']}(*{tuple(given)!r}) == {wanted!r}\n" for given, wanted in row["tests"])
        facts.pop("tests")
    return EvalItem(prompts=(row["q"],), answer=json.dumps(facts), test=test)


def is_right(item: EvalItem, said: str) -> bool:
    """What the check of a prompt says of an answer; programs are run instead."""
    facts = json.loads(item.answer)
    return CHECKS[facts["kind"]](facts, said)


def _has_keyword(facts: Mapping[str, Any], said: str) -> bool:
    return any(_holds(said, keyword) for keyword in facts["kw"])


def _holds(said: str, keyword: str) -> bool:
    """At the beginning of a word; numbers only whole: 0 is not in 100."""
    ending = r"(?!\d)" if keyword.strip()[-1].isdigit() else ""
    return re.search(rf"(?<!\w){re.escape(keyword.strip())}{ending}", said, re.IGNORECASE) is not None


def _lists_as_many(facts: Mapping[str, Any], said: str) -> bool:
    lines = [line for line in said.strip().splitlines() if line.strip()]
    numbered = [line for line in lines if re.match(r"\s*(\d+[.)]|[-*•])\s*\S", line)]
    if not numbered and len(lines) == 1:
        listed = re.split(r",\s*(?:and\s+)?|\s+and\s+", lines[0].rpartition(":")[2].strip(" ."))
    else:
        listed = [re.sub(r"^\s*(\d+[.)]|[-*•])\s*", "", line) for line in numbered or lines]
    different = {one.strip(" .").lower() for one in listed if one.strip(" .")}
    return len(different) == len(listed) and len(listed) == int(facts["n"])


def _is_essay(facts: Mapping[str, Any], said: str) -> bool:
    sentences = [one.strip().lower() for one in re.split(r"[.!?]\s", said) if one.strip()]
    keywords = sum(_holds(said, keyword) for keyword in facts["kw"])
    long = len(said.split()) >= FEWEST_WORDS
    return long and keywords >= FEWEST_KEYWORDS and len(set(sentences)) == len(sentences) and not REFUSAL.search(said)


def _speaks(facts: Mapping[str, Any], said: str) -> bool:
    return len(said.split()) >= FEWEST_SPOKEN and not REFUSAL.search(said)


def _is_program(facts: Mapping[str, Any], said: str) -> bool:
    raise AssertionError("programs are run")


CHECKS: Mapping[str, Callable[[Mapping[str, Any], str], bool]] = {
    "FACTUAL": _has_keyword,
    "CODE": _is_program,
    "INSTRUCTION": _lists_as_many,
    "ESSAY": _is_essay,
    "CONVO": _speaks,
}


ANSWER = "\nAnswer:"


@dataclass(frozen=True)
class CoreTask:
    """One of the 22."""

    num_fewshot: int = 10
    chance: float = 0.0
    ending: str = ""
    """Text between a question and its choice, in addition to the space."""
    aliases: tuple[str, ...] = ()

    def shape(self, name: str) -> RowShape:
        if name.startswith("hellaswag"):
            return hellaswag
        return partial(ready, ending=self.ending)


PARTS: Mapping[str, CoreTask] = {
    "hellaswag_zeroshot": CoreTask(0, 0.25, aliases=("hellaswag",)),
    "jeopardy": CoreTask(ending=ANSWER, aliases=("jeopardy_all",)),
    "bigbench_qa_wikidata": CoreTask(),
    "arc_easy": CoreTask(10, 0.25, ANSWER),
    "arc_challenge": CoreTask(10, 0.25, ANSWER),
    "copa": CoreTask(0, 0.5),
    "commonsense_qa": CoreTask(10, 0.403),
    "piqa": CoreTask(10, 0.5, ANSWER),
    "openbook_qa": CoreTask(0, 0.25),
    "lambada_openai": CoreTask(0, aliases=("lambada",)),
    "hellaswag": CoreTask(10, 0.25),
    "winograd": CoreTask(0, 0.5, aliases=("winograd_wsc",)),
    "winogrande": CoreTask(0, 0.5),
    "bigbench_dyck_languages": CoreTask(),
    "agi_eval_lsat_ar": CoreTask(3, 0.25),
    "bigbench_cs_algorithms": CoreTask(),
    "bigbench_operators": CoreTask(),
    "bigbench_repeat_copy_logic": CoreTask(),
    "squad": CoreTask(),
    "coqa": CoreTask(0),
    "boolq": CoreTask(10, 0.62, ANSWER),
    "bigbench_language_identification": CoreTask(10, 0.25),
}
"""Chance as DCLM has it since September 2025. Three values were lower before, so that guessing scored above 0."""


TaskKind = Literal["choice", "word", "number", "program", "prompts"]
EXAMPLES_SEED = 1234
SPLITS = ("", "test", "val", "validation", "dev", "train")
"""How a file's name may end, the first that is there is the one that is asked."""
EXAMPLE_SPLITS = ("train", "dev")


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """A row of the table."""

    kind: TaskKind
    shape: RowShape
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
    num_fewshot: int = 0
    """Examples before a question, unless told."""
    until: tuple[str, ...] = ()
    """Where what the model writes is cut."""
    max_tokens: int = 256


QUESTIONS = ("Question:", "\n\n\n")
STATEMENTS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

TASKS: Mapping[str, EvalTask] = {
    "hellaswag": EvalTask(
        kind="choice",
        shape=hellaswag,
        chance=0.25,
        dataset="Rowan/hellaswag",
        files="**/validation*.parquet",
        examples="**/train*.parquet",
    ),
    "arc_easy": EvalTask(
        kind="choice",
        shape=arc,
        chance=0.25,
        dataset="allenai/ai2_arc",
        files="ARC-Easy/test*.parquet",
        examples="ARC-Easy/train*.parquet",
    ),
    "arc_challenge": EvalTask(
        kind="choice",
        shape=arc,
        chance=0.25,
        dataset="allenai/ai2_arc",
        files="ARC-Challenge/test*.parquet",
        examples="ARC-Challenge/train*.parquet",
    ),
    "piqa": EvalTask(
        kind="choice",
        shape=piqa,
        chance=0.5,
        dataset="baber/piqa",
        files="**/validation*.parquet",
        examples="**/train*.parquet",
    ),
    "openbookqa": EvalTask(
        kind="choice",
        shape=openbookqa,
        chance=0.25,
        dataset="allenai/openbookqa",
        files="main/test*.parquet",
        examples="main/train*.parquet",
    ),
    "boolq": EvalTask(
        kind="choice",
        shape=boolq,
        chance=0.5,
        dataset="aps/super_glue",
        files="boolq/validation*.parquet",
        examples="boolq/train*.parquet",
    ),
    "winogrande": EvalTask(
        kind="choice",
        shape=winogrande,
        chance=0.5,
        dataset="allenai/winogrande",
        files="winogrande_xl/validation*.parquet",
        examples="winogrande_xl/train*.parquet",
    ),
    "copa": EvalTask(
        kind="choice",
        shape=copa,
        chance=0.5,
        dataset="aps/super_glue",
        files="copa/validation*.parquet",
        examples="copa/train*.parquet",
    ),
    "commonsense_qa": EvalTask(
        kind="choice",
        shape=commonsense_qa,
        chance=0.2,
        dataset="tau/commonsense_qa",
        files="**/validation*.parquet",
        examples="**/train*.parquet",
    ),
    "mmlu": EvalTask(
        kind="choice",
        shape=mmlu,
        chance=0.25,
        dataset="cais/mmlu",
        files="all/test*.parquet",
        examples="all/dev*.parquet",
    ),
    "lambada": EvalTask(
        kind="word",
        shape=lambada,
        dataset="EleutherAI/lambada_openai",
        files="default/test*.parquet",
        aliases=("lambada_openai",),
    ),
    "gsm8k": EvalTask(
        kind="number",
        shape=gsm8k,
        dataset="openai/gsm8k",
        files="main/test*.parquet",
        examples="main/train*.parquet",
        num_fewshot=5,
        until=QUESTIONS,
    ),
    "svamp": EvalTask(
        kind="number",
        shape=svamp,
        dataset="ChilleD/SVAMP",
        files="data/test*.parquet",
        examples="data/train*.parquet",
        until=QUESTIONS,
    ),
    "humaneval": EvalTask(
        kind="program",
        shape=humaneval,
        dataset="openai/openai_humaneval",
        files="**/test*.parquet",
        until=STATEMENTS,
        max_tokens=512,
    ),
    "prompts": EvalTask(kind="prompts", shape=prompt, aliases=("eval_prompts",), max_tokens=200),
}


def named(names: Sequence[str]) -> list[str]:
    """Names of tasks, each once. Raises ConfigError for one that is not in the table."""
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"there is no task {name!r}", hint=f"Use one of {', '.join(TASKS)}.")
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class TaskFiles:
    """Where rows are read from: files or folders of them; without any, from the hub."""

    paths: tuple[Path, ...] = ()
    offline: bool = False
    any_name: bool = False
    """Whether a file that is given itself may be called as it likes: where no other task is asked."""


def task_files(names: Sequence[str], paths: Sequence[Path], *, offline: bool = False) -> TaskFiles:
    """Where the rows of these tasks are."""
    return TaskFiles(tuple(path.expanduser() for path in paths), offline, any_name=len(set(names)) == 1)


def rows(name: str, files: TaskFiles, *, examples: bool = False) -> list[EvalItem]:
    """The questions of a task in the order of its file, or those that may be examples. Raises DataError."""
    task = TASKS[name]
    items: list[EvalItem] = []
    for path in paths(name, files, examples=examples):
        for number, row in rows_of(path) if path.suffix == ".py" else decontamination.rows_of(path):
            items.append(replace(shaped(task.shape, row, f"{path}:{number}"), row=len(items) + 1))
    if not items:
        raise DataError(f"has no rows of {name}", where=", ".join(map(str, files.paths)))
    return items


def shaped(shape: RowShape, row: TaskRow, where: str) -> EvalItem:
    try:
        item = shape(row)
        if item.choices and not 0 <= item.gold < len(item.choices):  # -1 where a split keeps its answers secret
            raise ValueError(f"the correct choice is {item.gold} of {len(item.choices)}")
        for text in (item.head, *item.prompts, *item.choices, item.answer, item.test):
            if (spot := lone_surrogate(text)) is not None:
                raise ValueError(f"one of its texts holds half a surrogate pair at character {spot}")
        return item
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        what = f"is not a row of this task: {type(error).__name__}: {error}; its fields: {', '.join(row)}"
        raise DataError(what, where=where, hint="Use the file as it is on the hub or in DCLM.") from None


def paths(name: str, files: TaskFiles, *, examples: bool = False) -> list[Path]:
    """The files that hold a task's rows; what is on the hub is downloaded first."""
    task = TASKS[name]
    if not files.paths:
        return _from_hub(name, task.examples if examples else task.files, files.offline)
    splits = EXAMPLE_SPLITS if examples else SPLITS
    what, any_name = "examples of " * examples + name, files.any_name and not examples
    return [find((name, *task.aliases), files.paths, splits, what=what, any_name=any_name)]


def find(
    names: Sequence[str], places: Sequence[Path], splits: Sequence[str], *, what: str, any_name: bool = False
) -> Path:
    """
    The file of a task: the one that is called NAME or NAME_SPLIT, or, with `any_name`, the only one that is given.

    A file that is called as another task's is that one's. Raises DataError where there is none, or more than one.
    """
    if match := look(names, places, splits, what=what):
        return match
    alone = places[0] if len(places) == 1 and places[0].is_file() else None
    owner = _owner(alone) if alone else None
    if alone and any_name and not owner:
        return alone
    near = sorted({path.name for place in places if place.is_dir() for path in core_io.below(place)})
    message = f"there is no file of {what}" + (f"; its name would be one of {owner}" if owner else "")
    first = names[0] + (f"_{splits[0]}" if splits[0] else "")
    hint = f"Add a file named {first}.jsonl (.zst, .gz) or .parquet, also with _{splits[-1]}."
    if alone and not owner and splits is SPLITS:
        hint += " It may have any name where it is given itself, and one task is asked."
    hint += f" Here is {', '.join(near[:5])}{', …' * (len(near) > 5)}." if near else ""
    raise DataError(message, where=", ".join(map(str, places)), hint=hint)


def look(names: Sequence[str], places: Sequence[Path], splits: Sequence[str], *, what: str) -> Path | None:
    """
    The file called NAME or NAME_SPLIT, among the files and folders of `places`.

    Of several splits the first of `splits` wins. Raises DataError where there is more than one.
    """
    split_ranks = {_squeezed(name + split): place for name in names for place, split in enumerate(splits)}
    inside = [path for place in places for path in (sorted(core_io.below(place)) if place.is_dir() else [place])]
    for location in places:
        if not location.exists():
            raise DataError(
                "does not exist", where=str(location), hint="Pass a file of the task, or a folder that contains it."
            )
    ranked: dict[int, list[Path]] = {}
    for path in inside:
        stem = path.name.partition(".")[0]
        if path.is_file() and path.name.endswith((*decontamination.SUFFIXES, ".py")) and _squeezed(stem) in split_ranks:
            ranked.setdefault(split_ranks[_squeezed(stem)], []).append(path)
    best = ranked[min(ranked)] if ranked else [None]
    if len(best) > 1:
        raise DataError(f"is {what}, and so is {best[1]}", where=str(best[0]), hint="Pass only one of them.")
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
        raise DataError(f"{name} is not on the hub", hint="Pass its file, or the folder that contains it: --data PATH.")
    repository = Repository(dataset, offline=offline)
    token = None if repository.cut_off else download.token()
    return [
        download.download(file, attempts=repository.attempts, token=token, offline=repository.cut_off)
        for file in download.listing(repository, (pattern,))
    ]


def prompted(item: EvalItem, examples: Sequence[EvalItem], num_fewshot: int) -> EvalItem:
    """The question behind `num_fewshot` examples, sampled by its row: the same examples whatever else is asked."""
    if not num_fewshot:
        return replace(item, prompts=tuple(item.head + prompt for prompt in item.prompts))
    pool = [one for one in examples if one.solved != item.solved and one.head == item.head]
    if len(pool) < num_fewshot:
        raise DataError(f"num_fewshot={num_fewshot} is more than the {len(pool)} examples", hint="Lower --num-fewshot.")
    drawn = random.Random(EXAMPLES_SEED + item.row - 1).sample(pool, num_fewshot)
    before = item.head + "".join(f"{one.solved}\n\n" for one in drawn)
    return replace(item, prompts=tuple(before + prompt for prompt in item.prompts))


def as_rows(items: Sequence[EvalItem]) -> Iterator[dict[str, Any]]:
    """Questions and choices as decontamination reads them."""
    for item in items:
        if len(item.prompts) > 1:
            yield {"context_options": list(item.prompts), "continuation": item.choices[0]}
        else:
            yield {"query": item.question, "choices": list(item.listed or item.choices), "gold": item.gold}


NAME = "core"


def core_items(name: str, files: TaskFiles, limit: int | None, seed: int) -> list[EvalItem]:
    """The questions of a part behind their examples. Raises DataError where its file is not there."""
    chosen, every = drawn(name, files, limit, seed)
    return [prompted(item, every, PARTS[name].num_fewshot) for item in chosen]


def drawn(name: str, files: TaskFiles, limit: int | None, seed: int) -> tuple[list[EvalItem], list[EvalItem]]:
    """The questions of a part that are asked, without examples, and all that it has."""
    core_task = PARTS[name]
    path = find(_called(name), files.paths, SPLITS, what=name)
    every = [
        replace(shaped(core_task.shape(name), row, f"{path}:{number}"), row=number)
        for number, row in decontamination.rows_of(path)
    ]
    if not every:
        raise DataError(f"has no rows of {name}", where=str(path), hint="Add its rows, or move the file away.")
    chosen: Sequence[int] = range(len(every))
    if limit is not None and limit < len(every):
        chosen = sorted(random.Random(f"{seed}:{name}").sample(chosen, limit))
    return [every[place] for place in chosen], every


def files_of(files: TaskFiles) -> list[Path]:
    return [find(_called(name), files.paths, SPLITS, what=name) for name in present(files)[0]]


def present(files: TaskFiles) -> tuple[list[str], list[str]]:
    """Names of the parts whose files are there, and of the others. Raises DataError where none is."""
    if not files.paths:
        raise DataError("CORE is not on the hub", hint="Pass the folder with DCLM's files: --data PATH.")
    there = [name for name in PARTS if look(_called(name), files.paths, SPLITS, what=name)]
    if not there:
        hint = f"Add files named {', '.join(f'{name}.jsonl' for name in PARTS)} (.zst, .gz), or .parquet."
        raise DataError("holds none of CORE's 22 tasks", where=", ".join(map(str, files.paths)), hint=hint)
    return there, [name for name in PARTS if name not in there]


def _called(name: str) -> tuple[str, ...]:
    return name, *PARTS[name].aliases


def average(right: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """
    The mean of the centered accuracies, its 95 % interval, and what was left out; `core` is None without all 22.

    Of each part's interval (Wilson's) the longer arm counts, because a part with nothing right, or all, is not known
    for sure. Arms add up as independent errors do. Nothing right and all right are the bounds.
    """
    centered: list[float] = []
    parts: dict[str, dict[str, float]] = {}
    spread = least = 0.0
    for name, outcomes in right.items():
        chance, share = PARTS[name].chance, sum(outcomes) / len(outcomes)
        low, high = wilson(sum(outcomes), len(outcomes))
        centered.append((share - chance) / (1 - chance))
        spread += (max(share - low, high - share) / (1 - chance)) ** 2
        least -= chance / (1 - chance) / len(right)
        parts[name] = {"n": len(outcomes), "acc": round(share, 6), "centered": round(centered[-1], 6)}
    mean, error = sum(centered) / len(centered), math.sqrt(spread) / len(centered)
    missing = [name for name in PARTS if name not in right]
    return {
        "core": None if missing else round(mean, 6),
        "mean_of_parts": round(mean, 6),
        "low": round(max(mean - error, least), 6),
        "high": round(min(mean + error, 1.0), 6),
        "n": sum(map(len, right.values())),
        "of": len(PARTS),
        "missing": missing,
        "parts": parts,
    }


CHARACTERS_AT_ONCE = 2**20
ASKED_FIELDS = ("query", "context_options")
"""Of the rows that `write_texts` writes."""


def write_texts(folder: Path, asked: Mapping[str, Sequence[EvalItem]]) -> tuple[Path, ...]:
    """Files of what must not be found, one for each task, called as it."""
    return tuple(_write(folder / f"{name}.jsonl", _lines(items)) for name, items in asked.items())


def task_texts(folder: Path, names: Sequence[str], files: TaskFiles) -> tuple[Path, ...]:
    """The same of whole tasks."""
    return write_texts(folder, {name: rows(name, files) for name in named(names)})


def dirty(asked: Mapping[str, Sequence[EvalItem]], texts: Iterable[str], scratch: Path) -> dict[str, set[int]]:
    """
    Rows of the questions that stand somewhere in the texts, by task.

    A question that several tasks ask, as CORE's do, is looked for once, and found in each of them.
    """
    rows_by_task: dict[str, set[int]] = {name: set() for name in asked}
    owners: dict[str, list[tuple[str, int]]] = {}
    for name, items in asked.items():
        for item, line in zip(items, _lines(items), strict=True):
            owners.setdefault(line, []).append((name, item.row))
    path = _write(scratch / "asked.jsonl", owners)
    index, by_line = (
        decontamination.OverlapIndex.of(decontamination.OverlapSettings(files=(path,))),
        list(owners.values()),
    )
    for batch in batched_by_size(texts, CHARACTERS_AT_ONCE):
        for match in index.find(batch):
            for name, number in by_line[index.rows[match.row][1] - 1]:
                rows_by_task[name].add(number)
    return rows_by_task


def _lines(items: Sequence[EvalItem]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) for row in as_rows(items))


def _write(path: Path, lines: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with core_io.whole_file(path, "w") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path
