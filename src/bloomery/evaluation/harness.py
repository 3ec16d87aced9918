"""
Run benchmark tasks on a model: log-likelihoods, generated answers, metrics with intervals.

`bloomery eval --task` runs these tasks on one model. It prints lines for a terminal or one JSON object.
The model gets every question by itself. So neither its batch nor the number of other questions changes its result.
The steps share one file because each passes its results straight to the next.

Likelihood of a continuation: log p(continuation | prompt), summed over the continuation's tokens only.

Prompt and continuation are encoded together. The continuation is everything beyond the prompt's own token IDs.
White space at the prompt's end belongs to the continuation. lm-evaluation-harness does the same, and the results
equal its results. A text that is longer than the model's context loses its beginning.

Several continuations of one prompt share it. They form one sequence with the prompt. Each continuation sees the
prompt and itself, at the positions that it would have alone.

    row         p p p p a a b b b        positions  0 1 2 3 4 5 4 5 6        each b sees p p p p and the b before it

Generated answers: a model that was trained on conversations gets the prompt as a conversation. Any other model
continues the text. Answers to GSM8K end with "#### 18". The strict metric looks for that mark. The flexible metric
takes the last number in the answer.
"""

import argparse
import hashlib
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import ConfigError, DataError, RunError
from bloomery.core.io import make_folder, whole_file
from bloomery.core.log import info, progress
from bloomery.evaluation import sandbox
from bloomery.evaluation import tasks as evaluation_tasks
from bloomery.evaluation.stats import Score, pass_at, shown
from bloomery.evaluation.tasks import TASKS, EvalItem, EvalTask, TaskFiles
from bloomery.generate.engine import Engine, check_finite
from bloomery.hw import device
from bloomery.model.attention import Cache
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.weights import hf, locate
from bloomery.weights.hf import Loaded

import torch
from torch import Tensor

TOKENS_AT_ONCE = 8192
SCORES_AT_ONCE = 2**26
"""Numbers in one table of logits: positions times vocabulary."""


class Continuation(NamedTuple):
    """A continuation of a prompt, in ids."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


class Likelihood(NamedTuple):
    log_p: float
    """In nats."""
    greedy: bool
    """Whether every token was the most likely one of those that the tokenizer has."""
    tokens: int
    cut: bool = False
    """Whether its prompt was longer than the context, and lost its beginning."""


@dataclass(frozen=True)
class _Row:
    """A prompt with some continuations of it."""

    prompt: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]
    """Which of those asked each continuation is."""

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(len(tail) - 1 for tail in self.tails)


def encoded(tokenizer: Tokenizer, prompt: str, continuation: str, *, opening: Sequence[int]) -> Continuation:
    """
    Ids of a pair, after those of `opening`. An empty prompt without them has the token that opens a document, for
    something has to stand before the first token.
    """
    kept = prompt.rstrip()
    before = tokenizer.encode(kept)
    whole = tokenizer.encode(prompt + continuation)
    if len(whole) <= len(before):
        hint = "Remove this question: its tokenizer merges the end of the prompt and the continuation into one token."
        raise DataError(f"{continuation!r} adds no token to its prompt", where=repr(prompt[-40:]), hint=hint)
    first = opening or ([] if before else [tokenizer.document_id])
    return Continuation((*first, *before), tuple(whole[len(before) :]))


def score(
    model: Transformer,
    asked: Sequence[Continuation],
    *,
    num_ids: int,
    tokens_at_once: int = TOKENS_AT_ONCE,
    seen: Callable[[int], None],
) -> list[Likelihood]:
    """
    The likelihood of each continuation, in order. `seen` gets the number done. `num_ids` is the tokenizer's.

    The split into batches changes nothing but the last bits.
    """
    rows = sorted(_rows(model, asked), key=lambda row: (row.length, row.owners))
    by_number: dict[int, Likelihood] = {}
    model.eval()
    for batch in _batches(rows, tokens_at_once):
        by_number |= _of_batch(model, batch, num_ids)
        seen(len(by_number))
    return [by_number[number] for number in range(len(asked))]


def _rows(model: Transformer, asked: Sequence[Continuation]) -> Iterator[_Row]:
    """Those of one prompt together where the model's attention allows it and they fit; others by themselves."""
    context = model.config.context_length
    together = model.config.position_embedding != "alibi" and all(window == "full" for window in _windows(model))
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, request in enumerate(asked):
        whole = (request.prompt + request.continuation)[-(context + 1) :]
        fits = len(whole) == len(request.prompt) + len(request.continuation)
        if together and fits and len(request.continuation) > 0:
            groups[request.prompt].append(number)
        else:
            tail = whole[len(whole) - min(len(request.continuation), len(whole) - 1) :]
            yield _Row(whole[: len(whole) - len(tail)], (tail,), (number,))
    for prompt, numbers in groups.items():
        yield _Row(prompt, tuple(asked[number].continuation for number in numbers), tuple(numbers))


def _windows(model: Transformer) -> Iterator[object]:
    return (model.config.layer(number)[1] for number in range(model.config.num_layers))


def _batches(rows: Sequence[_Row], tokens_at_once: int) -> Iterator[list[_Row]]:
    """Rows that ascend in length, so many that all together, filled up to the longest, have about so many tokens."""
    batch: list[_Row] = []
    for row in rows:
        if batch and (len(batch) + 1) * row.length > tokens_at_once:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def _of_batch(model: Transformer, rows: Sequence[_Row], num_ids: int) -> dict[int, Likelihood]:
    T = max(row.length for row in rows)
    device = model.embed.weight.device
    ids = torch.zeros((len(rows), T), dtype=torch.long)
    positions = torch.zeros_like(ids)
    parts = torch.full_like(ids, -1)
    places: list[tuple[int, int]] = []
    targets: list[int] = []
    for number, row in enumerate(rows):
        _lay(row, ids[number], positions[number], parts[number])
        for spot, target in _wanted(row):
            places.append((number, spot))
            targets.append(target)
    hidden = _hidden(model, ids.to(device), positions.to(device), parts.to(device))
    chosen = torch.tensor(places, device=device)
    target_ids = torch.tensor(targets, device=device)
    log_p, best = _log_p(model, hidden[chosen[:, 0], chosen[:, 1]], target_ids, num_ids)
    begin = 0
    by_number: dict[int, Likelihood] = {}
    for row in rows:
        for owner, tail in zip(row.owners, row.tails, strict=True):
            end = begin + len(tail)
            by_number[owner] = Likelihood(float(log_p[begin:end].sum()), bool(best[begin:end].all()), len(tail))
            begin = end
    return by_number


def _lay(row: _Row, ids: Tensor, positions: Tensor, parts: Tensor) -> None:
    """Fill in a row: the prompt is part 0, and the continuations are 1, 2, …, each without its last token."""
    spot = len(row.prompt)
    ids[:spot] = torch.tensor(row.prompt)
    positions[:spot] = torch.arange(spot)
    parts[:spot] = 0
    for number, tail in enumerate(row.tails, 1):
        end = spot + len(tail) - 1
        ids[spot:end] = torch.tensor(tail[:-1], dtype=torch.long)
        positions[spot:end] = torch.arange(len(row.prompt), len(row.prompt) + len(tail) - 1)
        parts[spot:end] = number
        spot = end


def _wanted(row: _Row) -> Iterator[tuple[int, int]]:
    """Where each token of each continuation is predicted, and the token."""
    spot = len(row.prompt)
    for tail in row.tails:
        for number, target in enumerate(tail):
            yield (spot + number - 1 if number else len(row.prompt) - 1), target
        spot += len(tail) - 1


def _hidden(model: Transformer, ids: Tensor, positions: Tensor, parts: Tensor) -> Tensor:
    if int(parts.max()) <= 1:  # one continuation each: nothing but what comes before can be seen
        alone: Tensor = model(ids)
        return alone
    mask = (parts[:, None, :] == 0) | (parts[:, None, :] == parts[:, :, None])
    cache = Cache.empty(model.config, len(ids), ids.shape[1], model.embed.weight)
    return model.extend(ids, cache, positions=positions, mask=mask)


def _log_p(model: Transformer, hidden: Tensor, target_ids: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Of every wanted token: log p, and whether it is the most likely one of the first `num_ids`."""
    size = max(1, SCORES_AT_ONCE // model.vocab_size)
    chunks = []
    for begin in range(0, len(target_ids), size):
        logits = model.logits(hidden[None, begin : begin + size])[0]
        some = target_ids[begin : begin + size]
        log_p = torch.log_softmax(logits, dim=-1).gather(1, some[:, None])[:, 0]
        check_finite(log_p)
        best = logits[:, :num_ids].argmax(dim=-1) == some
        chunks.append((log_p.cpu().double(), best.cpu()))  # Apple's GPUs have no float64
    return torch.cat([one for one, _ in chunks]), torch.cat([one for _, one in chunks])


AT_ONCE = 64
MARKED = re.compile(r"####\s*(-?[\d.,]+)")
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
FENCED = re.compile(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Writing:
    """How answers are written: how each is sampled, and how many there are."""

    sampling: SamplingConfig
    samples: int = 1
    chat: bool | None = None
    """Whether the prompt is asked in a conversation. None: where the model has learned conversations."""


@dataclass(frozen=True)
class Generation:
    texts: list[str]
    """One for each sample."""
    cut: bool
    """Whether the prompt was too long and lost its beginning."""


def write(loaded: Loaded, items: Sequence[EvalItem], how: Writing, seen: Callable[[int], None]) -> list[Generation]:
    """What follows each prompt, `how.samples` times. `seen` gets the number done."""
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size, pack=True)
    chat = in_conversation(loaded, how)
    room = min(how.sampling.max_tokens, engine.context // 2)
    prompts = [_ids(loaded, item.prompts[0], chat, engine.context - room) for item in items]
    done: list[Generation] = []
    for begin in range(0, len(items), AT_ONCE):
        some = prompts[begin : begin + AT_ONCE]
        drawn = _drawn(loaded, engine, [ids for ids, _ in some], items[begin : begin + AT_ONCE], how, room)
        for texts, (_, cut) in zip(drawn, some, strict=True):
            done.append(Generation([cut_at(text, () if chat else how.sampling.stop) for text in texts], cut))
        seen(len(done))
    return done


def in_conversation(loaded: Loaded, how: Writing) -> bool:
    return loaded.lineage.template is not None if how.chat is None else how.chat


def _ids(loaded: Loaded, prompt: str, chat: bool, most: int) -> tuple[list[int], bool]:
    """The prompt's ids, at most so many; where it is longer, its end counts."""
    ids = loaded.renderer.prompt([{"role": "user", "content": prompt}]) if chat else loaded.language.text_ids(prompt)
    return (ids, False) if len(ids) <= most else ([ids[0], *ids[1 - most :]], True)


def _drawn(
    loaded: Loaded, engine: Engine, prompts: Sequence[list[int]], items: Sequence[EvalItem], how: Writing, room: int
) -> Iterator[list[str]]:
    """The samples of each prompt. At temperature 0, a single sample stands for all."""
    each = 1 if how.sampling.temperature == 0.0 else how.samples
    seed = how.sampling.seed or 0
    drawn = engine.generate_batch(
        [ids for ids in prompts for _ in range(each)],
        replace(how.sampling, max_tokens=room),
        stop_ids=loaded.language.stop_ids,
        seeds=[stable_seed(seed, item.row, number) for item in items for number in range(each)],
    )
    for begin in range(0, len(drawn), each):
        texts = [loaded.tokenizer.decode(one.ids) for one in drawn[begin : begin + each]]
        yield texts * (how.samples // each)


def stable_seed(*parts: int) -> int:
    """The same on every machine, and another for every row and sample."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def cut_at(text: str, until: Sequence[str]) -> str:
    """Up to the first of these that stands in it."""
    return text[: min((place for one in until if (place := text.find(one)) >= 0), default=len(text))]


def marked_number(text: str) -> Decimal | None:
    """The first number after ####."""
    match = MARKED.search(text)
    return as_number(match[1]) if match else None


def last_number(text: str) -> Decimal | None:
    matches = NUMBER.findall(text)
    return as_number(matches[-1]) if matches else None


def as_number(text: str) -> Decimal | None:
    """Without dollar signs, thousands' commas, and the full stop that ends a sentence."""
    try:
        return Decimal(text.replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None


def code(text: str) -> str:
    """The first fenced block, where there is one."""
    match = FENCED.search(text)
    return match[1] if match else text


def program(item: EvalItem, text: str, *, chat: bool, begun: bool) -> str:
    """
    The code that was written, without its tests. Where the prompt is itself the beginning of the program (`begun`),
    it stands before; in a conversation, the code that was written may also be the whole function again.
    """
    written = code(text) if chat or not begun else text
    before = f"{item.prompts[0]}\n" if begun and chat else item.prompts[0] if begun else ""
    return before + written


PASS_AT = (1, 10, 100)
CORE = f"{evaluation_tasks.NAME}."
"""Before the name of a part: some parts are called as tasks are."""


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """Which tasks, and how."""

    tasks: tuple[str, ...]
    files: TaskFiles = field(default_factory=TaskFiles)
    limit: int | None = None
    """Questions of each task, sampled by `seed`; None: all."""
    num_fewshot: int | None = None
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
    allow_partial_sandbox: bool = False
    """Whether programs may also run with less isolation than the sandbox wants."""


@dataclass(frozen=True, kw_only=True)
class QuestionResult:
    """What became of one question."""

    task: str
    row: int
    scores: dict[str, float]
    """By metric."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the model chose or wrote."""

    def line(self, dirty: bool | None) -> str:
        extra = {} if dirty is None else {"dirty": dirty}
        return json.dumps(
            {"task": self.task, "row": self.row, **self.scores, **extra, **self.facts}, ensure_ascii=False
        )


def questions(name: str, asked: EvalRequest) -> list[EvalItem]:
    """The questions of a task that are asked, in the order of its file, without examples."""
    items = evaluation_tasks.rows(name, asked.files)
    if asked.limit is None or asked.limit >= len(items):
        return items
    drawn = random.Random(f"{asked.seed}:{name}").sample(range(len(items)), asked.limit)
    return [items[place] for place in sorted(drawn)]


def evaluate(loaded: Loaded, asked: EvalRequest) -> dict[str, list[QuestionResult]]:
    """The results of every task, question by question. Raises ConfigError for a task that is not there."""
    by_task: dict[str, list[QuestionResult]] = {}
    names = evaluation_tasks.named(asked.tasks)
    if not asked.run_code and (runs := [name for name in names if TASKS[name].kind == "program"]):
        hint = "Set --run-code (evaluate.run_code = true), or remove the task."
        raise ConfigError(f"{runs[0]} runs code that the model writes, which is not enabled", hint=hint)
    if asked.run_code:
        sandbox.check(asked.allow_partial_sandbox)
    items_by_task = {name: with_examples(name, questions(name, asked), asked) for name in names}
    for name, items in items_by_task.items():
        with progress(name, "questions", len(items)) as meter:
            by_task[name] = ask(loaded, name, TASKS[name], items, asked, meter.at)
    return by_task


def evaluate_core(loaded: Loaded, asked: EvalRequest) -> dict[str, list[QuestionResult]]:
    """The results of the parts of CORE that are there, by `core.NAME`. `acc` takes the highest mean of log p."""
    by_task: dict[str, list[QuestionResult]] = {}
    for task_name in evaluation_tasks.present(asked.files)[0]:
        name, items = CORE + task_name, evaluation_tasks.core_items(task_name, asked.files, asked.limit, asked.seed)
        with progress(name, "questions", len(items)) as meter:
            scored = likelihoods(loaded, items, asked.opening, meter.at)
        by_task[name] = [replace(_of_core(item, one), task=name) for item, one in zip(items, scored, strict=True)]
    return by_task


def core_questions(asked: EvalRequest) -> dict[str, list[EvalItem]]:
    """The questions of those parts that are asked, without examples."""
    there = evaluation_tasks.present(asked.files)[0]
    return {CORE + part: evaluation_tasks.drawn(part, asked.files, asked.limit, asked.seed)[0] for part in there}


def with_examples(name: str, items: Sequence[EvalItem], asked: EvalRequest) -> list[EvalItem]:
    num_fewshot = TASKS[name].num_fewshot if asked.num_fewshot is None else asked.num_fewshot
    if num_fewshot and not TASKS[name].examples:
        raise ConfigError(f"{name} has no few-shot examples, but num_fewshot={num_fewshot}", hint="Set num_fewshot=0.")
    pool = evaluation_tasks.rows(name, asked.files, examples=True) if num_fewshot else []
    return [evaluation_tasks.prompted(item, pool, num_fewshot) for item in items]


def ask(
    loaded: Loaded, name: str, task: EvalTask, items: Sequence[EvalItem], asked: EvalRequest, seen: Any
) -> list[QuestionResult]:
    """Put finished prompts to the model."""
    if task.kind in ("choice", "word"):
        judge = _chosen if task.kind == "choice" else _continued
        return [replace(one, task=name) for one in judge(items, likelihoods(loaded, items, asked.opening, seen))]
    sampling = SamplingConfig(
        max_tokens=asked.max_tokens or task.max_tokens, temperature=asked.temperature, seed=asked.seed, stop=task.until
    )
    how = Writing(sampling, samples=asked.samples, chat=asked.chat)
    said = write(loaded, items, how, seen)
    chat = in_conversation(loaded, how)
    if task.kind == "prompts" and not asked.run_code:
        pairs = [(item, one) for item, one in zip(items, said, strict=True) if not item.test]
    else:
        pairs = list(zip(items, said, strict=True))
    results: list[QuestionResult] = []
    for item, answer in pairs:
        facts: dict[str, Any] = {"said": answer.texts, "prompt_cut": answer.cut}
        if task.kind == "number":
            scores = _numbers(item, answer.texts)
        elif item.test:
            scores, ended = _programs(item, answer.texts, task, chat, asked)
            facts["ended"] = ended
        else:
            scores = {"right": sum(evaluation_tasks.is_right(item, text) for text in answer.texts) / len(answer.texts)}
        results.append(QuestionResult(task=name, row=item.row, scores=scores, facts=facts))
    return results


def likelihoods(loaded: Loaded, items: Sequence[EvalItem], opening: bool, seen: Any) -> list[list[Likelihood]]:
    """Of every choice of every question."""
    pairs = [
        encoded(loaded.tokenizer, prompt, f" {choice}", opening=loaded.language.opening_ids if opening else ())
        for item in items
        for prompt, choice in zip(_prompts(item), item.choices, strict=True)
    ]
    share = len(items) / max(len(pairs), 1)
    num_ids = loaded.tokenizer.vocab_size
    alone = score(loaded.model, pairs, num_ids=num_ids, seen=lambda done: seen(int(done * share)))
    longest = loaded.model.config.context_length + 1
    cut = (len(pair.prompt) + len(pair.continuation) > longest for pair in pairs)
    scored = iter([one._replace(cut=is_cut) for one, is_cut in zip(alone, cut, strict=True)])
    return [[next(scored) for _ in item.choices] for item in items]


def _prompts(item: EvalItem) -> Sequence[str]:
    return item.prompts if len(item.prompts) > 1 else item.prompts * len(item.choices)


def _chosen(items: Sequence[EvalItem], scored: Sequence[Sequence[Likelihood]]) -> Iterator[QuestionResult]:
    """The most likely choice, as it stands and for each byte; of equally likely ones the first."""
    for item, per_choice in zip(items, scored, strict=True):
        log_p = [one.log_p for one in per_choice]
        by_byte = [one / max(len(choice.encode()), 1) for one, choice in zip(log_p, item.choices, strict=True)]
        by_token = [one.log_p / one.tokens for one in per_choice]
        picked, normed, meant = (values.index(max(values)) for values in (log_p, by_byte, by_token))
        yield QuestionResult(
            task="",
            row=item.row,
            scores={"acc": float(picked == item.gold), "acc_norm": float(normed == item.gold)},
            facts={
                "gold": item.gold,
                "chosen": picked,
                "chosen_norm": normed,
                "chosen_by_token": meant,
                "log_p": [round(one, 5) for one in log_p],
                **({"prompt_cut": True} if any(one.cut for one in per_choice) else {}),
            },
        )


def _continued(items: Sequence[EvalItem], scored: Sequence[Sequence[Likelihood]]) -> Iterator[QuestionResult]:
    for item, (likelihood,) in zip(items, scored, strict=True):
        facts = {"expected": item.choices[0], "log_p": round(likelihood.log_p, 5)}
        facts |= {"prompt_cut": True} if likelihood.cut else {}
        scores = {"acc": float(likelihood.greedy), "nats": -likelihood.log_p}
        yield QuestionResult(task="", row=item.row, scores=scores, facts=facts)


def _of_core(item: EvalItem, scored: Sequence[Likelihood]) -> QuestionResult:
    if len(item.choices) == 1:
        (result,) = _continued([item], [scored])
        return replace(result, scores={"acc": result.scores["acc"]})
    (result,) = _chosen([item], [scored])
    return replace(result, scores={"acc": float(result.facts["chosen_by_token"] == item.gold)})


def _numbers(item: EvalItem, texts: Sequence[str]) -> dict[str, float]:
    """Over the samples: the share that is right by the number after ####, and by the last number."""
    right = marked_number(item.answer)
    strict = sum(right is not None and marked_number(text) == right for text in texts)
    loose = sum(right is not None and last_number(text) == right for text in texts)
    return {"exact": strict / len(texts), "flexible": loose / len(texts)}


def _programs(
    item: EvalItem, texts: Sequence[str], task: EvalTask, chat: bool, asked: EvalRequest
) -> tuple[dict[str, float], list[str]]:
    """
    Run every sample: pass@k for 1, 10 and 100 as far as there are so many, or the share that is right; and how each
    ended.
    """
    begun = task.kind == "program"
    ran = {
        code: sandbox.run(code, item.test, weaker=asked.allow_partial_sandbox)
        for code in dict.fromkeys(program(item, text, chat=chat, begun=begun) for text in texts)
    }
    outcomes = [ran[program(item, text, chat=chat, begun=begun)] for text in texts]
    passed = sum(one.passed for one in outcomes)
    ended: list[str] = [one.status for one in outcomes]
    if not begun:
        return {"right": passed / len(texts)}, ended
    return {f"pass@{k}": pass_at(k, len(texts), passed) for k in PASS_AT if k <= len(texts)}, ended


# --- scores --------------------------------------------------------------------------------------------------------


def scores(name: str, results: Sequence[QuestionResult], dirty: set[int] | None = None) -> dict[str, Any]:
    """
    Scores with intervals over all questions. `dirty` has the rows of the questions that occur in the training text.
    With it there are also scores over the questions that do not stand there, and over those that do.
    """
    stats: dict[str, Any] = {"n": len(results), "chance": _chance(name, results), "scores": _scored(results)}
    if any(one.facts.get("prompt_cut") for one in results):
        stats["prompts_cut"] = sum(bool(one.facts.get("prompt_cut")) for one in results)
    if dirty is not None:
        stats["clean"] = _scored([one for one in results if one.row not in dirty])
        stats["dirty"] = _scored([one for one in results if one.row in dirty])
        stats["dirty_n"] = sum(one.row in dirty for one in results)
    return stats


def core_scores(
    by_task: Mapping[str, Sequence[QuestionResult]], dirty: Mapping[str, set[int]] | None = None
) -> dict[str, Any]:
    """
    The CORE average, or the mean of its tasks that are there. With `dirty` also the average over questions that do not
    stand in the training text (`clean`; None where all do).
    """
    stats = evaluation_tasks.average(_right(by_task))
    if cut := sum(bool(one.facts.get("prompt_cut")) for results in by_task.values() for one in results):
        stats["prompts_cut"] = cut
    if dirty is not None:
        clean = {name: [one for one in results if one.row not in dirty[name]] for name, results in by_task.items()}
        for name, results in by_task.items():
            stats["parts"][name.removeprefix(CORE)]["dirty_n"] = len(results) - len(clean[name])
        stats["dirty_n"] = stats["n"] - sum(map(len, clean.values()))
        stats["clean"] = evaluation_tasks.average(_right(clean)) if any(clean.values()) else None
    return stats


def _right(by_task: Mapping[str, Sequence[QuestionResult]]) -> dict[str, list[bool]]:
    """By part of CORE; one without questions is missing."""
    return {name.removeprefix(CORE): [one.scores["acc"] == 1 for one in some] for name, some in by_task.items() if some}


def _chance(name: str, results: Sequence[QuestionResult]) -> float:
    """What guessing gives: by the number of choices that each row has, which differs between copies of a task."""
    choices = [len(one.facts["log_p"]) for one in results if isinstance(one.facts.get("log_p"), list)]
    return round(sum(1 / num for num in choices) / len(choices), 4) if choices else TASKS[name].chance


def _scored(results: Sequence[QuestionResult]) -> dict[str, Any]:
    by_metric = {}
    for metric in dict.fromkeys(name for one in results for name in one.scores):
        score = asdict(Score.of([one.scores[metric] for one in results]))
        if metric == "nats":
            metric, numbers = "perplexity", (score["value"], score["low"], score["high"])
            score |= dict(zip(("value", "low", "high"), (round(math.exp(one), 4) for one in numbers), strict=True))
        by_metric[metric] = score
    return by_metric


def save(
    path: Path, by_task: Mapping[str, Sequence[QuestionResult]], dirty: Mapping[str, set[int]] | None = None
) -> None:
    """One line of JSON for every question: its row in the task's file, scores, and what the model chose or wrote."""
    with whole_file(path, "w") as file:
        for name, results in by_task.items():
            for result in results:
                file.write(result.line(None if dirty is None else result.row in dirty[name]) + "\n")


CUT = "were longer than the context, and lost their beginning"


def lines(stats_by_task: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for every score of every task, with its interval, and the clean and dirty scores where both are known."""
    for name, stats in stats_by_task.items():
        for metric, score in stats["scores"].items():
            chance = f"  chance {stats['chance']:.1%}" if metric in ("acc", "acc_norm") and stats.get("chance") else ""
            parts = [f"{part} {shown(metric, stats[part][metric])}" for part in ("clean", "dirty") if _has(stats, part)]
            apart = f"  ({', '.join(parts)})" if parts else ""
            yield f"{name:<16} {metric:<11} {shown(metric, score)}  of {score['n']:,}{chance}{apart}"
        if cut := stats.get("prompts_cut"):
            yield f"{name:<16} {cut:,} of {stats['n']:,} prompts {CUT}"


def core_lines(stats: Mapping[str, Any]) -> Iterator[str]:
    """The mean of centered accuracies, which is CORE where no task is missing."""
    for name, task in stats["parts"].items():
        yield f"{name:<34} {task['acc']:7.1%}  centered {task['centered']:7.4f}  of {task['n']:,}"
    name = f"mean of {len(stats['parts'])} of CORE's {stats['of']}" if stats["missing"] else "CORE"
    yield f"{name:<34} {stats['mean_of_parts']:.4f} ({stats['low']:.4f} to {stats['high']:.4f})"
    if clean := stats.get("dirty_n") and stats.get("clean"):
        share = f"of {clean['n']:,}, without {stats['dirty_n']:,} that occur in the training text"
        yield f"{'clean':<34} {clean['mean_of_parts']:.4f} ({clean['low']:.4f} to {clean['high']:.4f})  {share}"
    if cut := stats.get("prompts_cut"):
        yield f"{cut:,} of {stats['n']:,} prompts {CUT}"
    if stats["missing"]:
        yield f"missing: {', '.join(stats['missing'])}"


def _has(stats: Mapping[str, Any], subset: str) -> bool:
    return bool(stats.get(subset)) and bool(stats.get("dirty_n"))


def run_command(options: argparse.Namespace) -> None:
    """
    Ask, print the scores, and write the results of every question where that was asked for. Raises RunError where they
    could not be written, before anything is asked.
    """
    if options.toy_questions is not None:
        raise DataError("is not for benchmarks", where="--toy-questions", hint="Use --limit, or remove --task.")
    if options.out is not None:
        check_new_file(options.out, options.data)
    asked = EvalRequest(
        tasks=tuple(name for name in options.task if name != evaluation_tasks.NAME),
        files=evaluation_tasks.task_files(options.task, options.data, offline=options.offline),
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        samples=options.samples,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed or 0,
        opening=not options.no_bos,
        run_code=options.run_code,
        allow_partial_sandbox=options.allow_partial_sandbox,
    )
    loaded = hf.load(locate.locate_model(options.model), device.find().torch_device, dtype=options.dtype)
    by_task = evaluate(loaded, asked)
    stats_by_task: dict[str, Any] = {name: scores(name, results) for name, results in by_task.items()}
    parts = evaluate_core(loaded, asked) if evaluation_tasks.NAME in options.task else {}
    whole = core_scores(parts) if parts else None
    if options.json:
        core = {} if whole is None else {"core": whole}
        print(json.dumps({"model": str(options.model), "seed": asked.seed, "tasks": stats_by_task, **core}))
    else:
        print("\n".join([*lines(stats_by_task), *([] if whole is None else core_lines(whole))]))
    if options.out is not None:
        save(options.out, by_task | parts)
        info(f"{options.out}: {sum(map(len, (by_task | parts).values())):,} questions")


def check_new_file(path: Path, kept: Iterable[Path]) -> None:
    """Raises RunError where results cannot be written to a file, or would replace one of those that are `kept`."""
    hint = "Choose another file for --out."
    if path.is_dir():
        raise RunError("is a folder", where=str(path), hint=hint)
    whole = path.resolve()
    if path.exists() and any(whole.is_relative_to(one.resolve()) for one in kept):
        raise RunError("holds the questions, which --out would replace", where=str(path), hint=hint)
    make_folder(path.parent)
