"""
Run the tasks of the table on a model: scores with intervals, and what became of every question.

Every question is asked by itself, so neither its batch nor how many others are asked changes its result.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.errors import ConfigError
from bloomery.core.files import whole_file
from bloomery.core.log import progress
from bloomery.evaluation import battery, core_average, likelihood, sandbox, tasks, written
from bloomery.evaluation.likelihood import Likelihood
from bloomery.evaluation.scoring import Score, pass_at
from bloomery.evaluation.shapes import Item
from bloomery.evaluation.tasks import TASKS, Place, Task
from bloomery.evaluation.written import Writing
from bloomery.weights.huggingface import Loaded

PASS_AT = (1, 10, 100)
CORE = f"{core_average.NAME}."
"""Before the name of a part: some parts are called as tasks are."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which tasks, and how."""

    tasks: tuple[str, ...]
    place: Place = field(default_factory=Place)
    limit: int | None = None
    """Questions of each task, drawn by `seed`; None: all."""
    shots: int | None = None
    """Examples before each question; None: as the task says."""
    samples: int = 1
    temperature: float = 0.0
    max_tokens: int | None = None
    seed: int = 0
    opening: bool = True
    """Whether a prompt begins with the token that opens a document."""
    chat: bool | None = None
    run_code: bool = False
    """Whether programs that the model writes may run, in the sandbox."""
    weaker_sandbox: bool = False
    """Whether they may also run behind fewer walls than the sandbox wants."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one question."""

    task: str
    row: int
    scores: dict[str, float]
    """By metric."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the model chose or wrote."""

    def line(self, dirty: bool | None) -> str:
        told = {} if dirty is None else {"dirty": dirty}
        return json.dumps({"task": self.task, "row": self.row, **self.scores, **told, **self.facts}, ensure_ascii=False)


def questions(name: str, asked: Asked) -> list[Item]:
    """The questions of a task that are asked, in the order of its file, without examples."""
    items = tasks.rows(name, asked.place)
    if asked.limit is None or asked.limit >= len(items):
        return items
    drawn = random.Random(f"{asked.seed}:{name}").sample(range(len(items)), asked.limit)
    return [items[place] for place in sorted(drawn)]


def run(loaded: Loaded, asked: Asked) -> dict[str, list[Result]]:
    """The results of every task, question by question. Raises ConfigError for a task that is not there."""
    found: dict[str, list[Result]] = {}
    names = tasks.named(asked.tasks)
    if not asked.run_code and (runs := [name for name in names if TASKS[name].kind == "program"]):
        cure = "Say --run-code (evaluate.run_code = true), or leave the task out."
        raise ConfigError(f"{runs[0]} runs code that the model writes, and nobody has allowed that", cure=cure)
    if asked.run_code:
        sandbox.check(asked.weaker_sandbox)
    for name in names:
        items = with_examples(name, questions(name, asked), asked)
        with progress(name, "questions", len(items)) as meter:
            found[name] = ask(loaded, name, TASKS[name], items, asked, meter.at)
    return found


def core(loaded: Loaded, asked: Asked) -> dict[str, list[Result]]:
    """The results of the parts of CORE that are there, by `core.NAME`. `acc` takes the highest mean of log p."""
    found: dict[str, list[Result]] = {}
    for part in core_average.present(asked.place)[0]:
        name, items = CORE + part, core_average.questions(part, asked.place, asked.limit, asked.seed)
        with progress(name, "questions", len(items)) as meter:
            scored = likelihoods(loaded, items, asked.opening, meter.at)
        found[name] = [replace(_of_core(item, one), task=name) for item, one in zip(items, scored, strict=True)]
    return found


def core_questions(asked: Asked) -> dict[str, list[Item]]:
    """The questions of those parts that are asked, without examples."""
    there = core_average.present(asked.place)[0]
    return {CORE + part: core_average.drawn(part, asked.place, asked.limit, asked.seed)[0] for part in there}


def with_examples(name: str, items: Sequence[Item], asked: Asked) -> list[Item]:
    shots = TASKS[name].shots if asked.shots is None else asked.shots
    if shots and not TASKS[name].examples:
        raise ConfigError(f"{name} has no examples to show, and shots={shots}", cure="Ask it with shots=0.")
    pool = tasks.rows(name, asked.place, examples=True) if shots else []
    return [tasks.prompted(item, pool, shots) for item in items]


def ask(loaded: Loaded, name: str, task: Task, items: Sequence[Item], asked: Asked, seen: Any) -> list[Result]:
    """Put finished prompts to the model."""
    if task.kind in ("choice", "word"):
        judge = _chosen if task.kind == "choice" else _continued
        return [replace(one, task=name) for one in judge(items, likelihoods(loaded, items, asked.opening, seen))]
    how = Writing(
        max_tokens=asked.max_tokens or task.max_tokens,
        until=task.until,
        samples=asked.samples,
        temperature=asked.temperature,
        seed=asked.seed,
        chat=asked.chat,
    )
    said = written.write(loaded, items, how, seen)
    chat = written.in_conversation(loaded, how)
    if task.kind == "prompts" and not asked.run_code:
        pairs = [(item, one) for item, one in zip(items, said, strict=True) if not item.test]
    else:
        pairs = list(zip(items, said, strict=True))
    found: list[Result] = []
    for item, one in pairs:
        facts: dict[str, Any] = {"said": one.texts, "prompt_cut": one.cut}
        if task.kind == "number":
            scores = _numbers(item, one.texts)
        elif item.test:
            scores, ended = _programs(item, one.texts, task, chat, asked)
            facts["ended"] = ended
        else:
            scores = {"right": sum(battery.is_right(item, text) for text in one.texts) / len(one.texts)}
        found.append(Result(task=name, row=item.row, scores=scores, facts=facts))
    return found


def likelihoods(loaded: Loaded, items: Sequence[Item], opening: bool, seen: Any) -> list[list[Likelihood]]:
    """Of every choice of every question."""
    pairs = [
        likelihood.encoded(loaded.tokenizer, prompt, f" {choice}", opening=opening)
        for item in items
        for prompt, choice in zip(_prompts(item), item.choices, strict=True)
    ]
    share = len(items) / max(len(pairs), 1)
    num_ids = loaded.tokenizer.vocab_size
    scored = iter(likelihood.score(loaded.model, pairs, num_ids=num_ids, seen=lambda done: seen(int(done * share))))
    return [[next(scored) for _ in item.choices] for item in items]


def _prompts(item: Item) -> Sequence[str]:
    return item.prompts if len(item.prompts) > 1 else item.prompts * len(item.choices)


def _chosen(items: Sequence[Item], scored: Sequence[Sequence[Likelihood]]) -> Iterator[Result]:
    """The most likely choice, as it stands and for each byte; of equally likely ones the first."""
    for item, found in zip(items, scored, strict=True):
        log_p = [one.log_p for one in found]
        by_byte = [one / max(len(choice.encode()), 1) for one, choice in zip(log_p, item.choices, strict=True)]
        by_token = [one.log_p / one.tokens for one in found]
        picked, normed, meant = (values.index(max(values)) for values in (log_p, by_byte, by_token))
        yield Result(
            task="",
            row=item.row,
            scores={"acc": float(picked == item.gold), "acc_norm": float(normed == item.gold)},
            facts={
                "gold": item.gold,
                "chosen": picked,
                "chosen_norm": normed,
                "chosen_by_token": meant,
                "log_p": [round(one, 5) for one in log_p],
            },
        )


def _continued(items: Sequence[Item], scored: Sequence[Sequence[Likelihood]]) -> Iterator[Result]:
    for item, (found,) in zip(items, scored, strict=True):
        facts = {"expected": item.choices[0], "log_p": round(found.log_p, 5)}
        scores = {"acc": float(found.greedy), "nats": -found.log_p}
        yield Result(task="", row=item.row, scores=scores, facts=facts)


def _of_core(item: Item, scored: Sequence[Likelihood]) -> Result:
    if len(item.choices) == 1:
        (one,) = _continued([item], [scored])
        return replace(one, scores={"acc": one.scores["acc"]})
    (one,) = _chosen([item], [scored])
    return replace(one, scores={"acc": float(one.facts["chosen_by_token"] == item.gold)})


def _numbers(item: Item, texts: Sequence[str]) -> dict[str, float]:
    """Over the samples: the share that is right by the number after ####, and by the last number."""
    right = written.marked_number(item.answer)
    strict = sum(written.marked_number(text) == right for text in texts)
    loose = sum(written.last_number(text) == right for text in texts)
    return {"exact": strict / len(texts), "flexible": loose / len(texts)}


def _programs(
    item: Item, texts: Sequence[str], task: Task, chat: bool, asked: Asked
) -> tuple[dict[str, float], list[str]]:
    """
    Run every sample: pass@k for 1, 10 and 100 as far as there are so many, or the share that is right; and how each
    ended.
    """
    begun = task.kind == "program"
    ran = {
        code: sandbox.run(code, item.test, weaker=asked.weaker_sandbox)
        for code in dict.fromkeys(written.program(item, text, chat=chat, begun=begun) for text in texts)
    }
    outcomes = [ran[written.program(item, text, chat=chat, begun=begun)] for text in texts]
    passed = sum(one.passed for one in outcomes)
    ended: list[str] = [one.status for one in outcomes]
    if not begun:
        return {"right": passed / len(texts)}, ended
    return {f"pass@{k}": pass_at(k, len(texts), passed) for k in PASS_AT if k <= len(texts)}, ended


# --- scores --------------------------------------------------------------------------------------------------------


def scores(name: str, results: Sequence[Result], dirty: set[int] | None = None) -> dict[str, Any]:
    """
    Scores with intervals over all questions; where it was looked for them in the training text (`dirty` has their
    rows), also over those that do not stand there, and over those that do.
    """
    told: dict[str, Any] = {"n": len(results), "chance": _chance(name, results), "scores": _scored(results)}
    if any(one.facts.get("prompt_cut") for one in results):
        told["prompts_cut"] = sum(bool(one.facts["prompt_cut"]) for one in results)
    if dirty is not None:
        told["clean"] = _scored([one for one in results if one.row not in dirty])
        told["dirty"] = _scored([one for one in results if one.row in dirty])
        told["dirty_n"] = sum(one.row in dirty for one in results)
    return told


def core_scores(found: Mapping[str, Sequence[Result]], dirty: Mapping[str, set[int]] | None = None) -> dict[str, Any]:
    """
    The CORE average, or the mean of what is there of it; where it was looked for its questions in the training text,
    also that of those that do not stand there (`clean`; None where all do).
    """
    told = core_average.average(_right(found))
    if dirty is not None:
        clean = {name: [one for one in results if one.row not in dirty[name]] for name, results in found.items()}
        for name, results in found.items():
            told["parts"][name.removeprefix(CORE)]["dirty_n"] = len(results) - len(clean[name])
        told["dirty_n"] = told["n"] - sum(map(len, clean.values()))
        told["clean"] = core_average.average(_right(clean)) if any(clean.values()) else None
    return told


def _right(found: Mapping[str, Sequence[Result]]) -> dict[str, list[bool]]:
    """By part of CORE; one without questions is missing."""
    return {name.removeprefix(CORE): [one.scores["acc"] == 1 for one in some] for name, some in found.items() if some}


def _chance(name: str, results: Sequence[Result]) -> float:
    """What guessing gives: by the number of choices that each row has, which differs between copies of a task."""
    choices = [len(one.facts["log_p"]) for one in results if isinstance(one.facts.get("log_p"), list)]
    return round(sum(1 / num for num in choices) / len(choices), 4) if choices else TASKS[name].chance


def _scored(results: Sequence[Result]) -> dict[str, Any]:
    found = {}
    for metric in dict.fromkeys(name for one in results for name in one.scores):
        score = asdict(Score.of([one.scores[metric] for one in results]))
        if metric == "nats":
            metric, numbers = "perplexity", (score["value"], score["low"], score["high"])
            score |= dict(zip(("value", "low", "high"), (round(math.exp(one), 4) for one in numbers), strict=True))
        found[metric] = score
    return found


def save(path: Path, found: Mapping[str, Sequence[Result]], dirty: Mapping[str, set[int]] | None = None) -> None:
    """One line of JSON for every question: its row in the task's file, scores, and what the model chose or wrote."""
    with whole_file(path, "w") as file:
        for name, results in found.items():
            for one in results:
                file.write(one.line(None if dirty is None else one.row in dirty[name]) + "\n")
