"""
Texts that a model generates during training: samples to look at, and answers that get rewards.

Both come from the same engine, between two steps of the loop.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bloomery.core import io as core_io
from bloomery.core import records
from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import RunError
from bloomery.core.io import whole_file
from bloomery.evaluation.harness import last_number, marked_number, stable_seed
from bloomery.generate.engine import Completion, Engine
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch, sample_positions
from bloomery.tokenizer.chat_template import ChatRenderer
from bloomery.train.precision import Precision
from bloomery.train.preference.config import Grpo
from bloomery.train.preference.losses import Drawn, advantages, by_token, packed_groups
from bloomery.train.validation import Sampler, evaluating

import torch

AT_ONCE = 64
LENGTH_STEP = 64
"""Lengths of batches are multiples of it."""
FOLDER = "drawn"
"""Of the stage: answers that more than one update is made with, until no checkpoint needs them."""


SAMPLES = SamplingConfig(top_p=0.95, seed=0)
"""With a fixed seed, so that only training makes a difference between two steps."""


def continuing(renderer: ChatRenderer) -> Sampler:
    """Prompts are beginnings of documents."""
    tokenizer = renderer.tokenizer
    return _sampler(renderer, lambda prompt: [tokenizer.document_id, *tokenizer.encode(prompt)])


def answering(renderer: ChatRenderer) -> Sampler:
    """Prompts are what a user says."""
    return _sampler(renderer, lambda prompt: renderer.prompt([{"role": "user", "content": prompt}]))


def _sampler(renderer: ChatRenderer, ids: Callable[[str], list[int]]) -> Sampler:
    tokenizer = renderer.tokenizer
    stop = tokenizer.end_ids | renderer.end_ids

    def sample(model: Transformer, prompts: Sequence[str], max_tokens: int) -> Iterator[str]:
        engine = Engine(model, tokenizer.vocab_size)
        sampling = replace(SAMPLES, max_tokens=max_tokens)
        for prompt in prompts:
            said = engine.stream(ids(prompt), sampling, stop_ids=stop)
            yield renderer.said([id for id in said if id not in stop])

    return sample


@dataclass(frozen=True)
class PolicyQuestion:
    id: str
    text: str
    prompt: tuple[int, ...]
    right: Decimal


@dataclass(frozen=True)
class Reward:
    """What came of an answer."""

    said: str
    right: bool
    ended: bool


def answered(
    model: Transformer,
    asked: Sequence[PolicyQuestion],
    seeds: Sequence[int],
    renderer: ChatRenderer,
    sampling: SamplingConfig,
) -> list[Completion]:
    """What the model, as it is, says to each question by a seed of its own."""
    prompts, stop = [one.prompt for one in asked], renderer.end_ids
    with evaluating(model):
        return Engine(model, renderer.tokenizer.vocab_size).generate_batch(
            prompts, sampling, stop_ids=stop, seeds=seeds, batch=AT_ONCE
        )


def judge(renderer: ChatRenderer, question: PolicyQuestion, answer: Completion, *, marked: bool) -> Reward:
    """Whether the number of an answer is the right one: that behind ####, or else, unless `marked`, the last."""
    said = renderer.said(answer.ids)
    number = marked_number(said)
    if number is None and not marked:
        number = last_number(said)
    return Reward(said, answer.stopped and number == question.right, answer.stopped)


@dataclass(eq=False)
class Rollouts:
    """
    A source of samples that the model in training writes on demand.

    Sample n is answer n mod G to question n div G of the run, sampled with a seed of n. The same weights give the same
    answer, whoever asks and whenever. The order of questions is that of `shards/loader.py`.
    """

    loss: Grpo
    questions: Sequence[PolicyQuestion]
    renderer: ChatRenderer
    model: Transformer
    seed: int
    out: Path
    reference: Transformer | None = None
    """None: what the model is without its adapters."""
    world: World = field(default_factory=World.alone)
    precision: Precision | None = None
    """Where and how log-probabilities are computed; None: not yet."""
    rows_at_once: int = 1
    used_before: bool = False
    """Whether the next batch was trained on before."""
    trims: bool = True
    """Whether a batch is as long as its longest answer needs, in steps: compiled blocks want a single length."""
    learned_from: bool = False
    """Whether batches are for a run, in its order. If not, they are for a trial before the run, which keeps nothing."""
    length: int = field(init=False)
    """Tokens of a sample at most: the longest question, and the longest answer."""
    num_samples: int = field(init=False)
    _kept: "tuple[Batch, Drawn] | None" = None

    def __post_init__(self) -> None:
        self.length = max(len(one.prompt) for one in self.questions) + self.loss.max_new_tokens
        self.num_samples = len(self.questions) * self.loss.group_size

    @property
    def drawn(self) -> Drawn:
        assert self._kept is not None
        return self._kept[1]

    @property
    def length_step(self) -> int | None:
        return LENGTH_STEP if self.trims else None

    @property
    def capacity(self) -> int | None:
        """Tokens of a row that answers may share."""
        return self.length if self.trims else None

    def epochs(self, seen: int) -> float:
        return seen / self.loss.updates / self.num_samples

    def order(self, first: int, count: int, seed: int) -> NDArray[np.int64]:
        """`updates` batches one after another have the same samples."""
        step, self.learned_from = first // count, True
        self.used_before = step % self.loss.updates > 0
        return step // self.loss.updates * count + np.arange(count)

    def batch(self, numbers: NDArray[np.int64]) -> Batch:
        if self.used_before:
            if self._kept is None or not np.array_equal(self._kept[0].samples, numbers):
                self._kept = self._read(numbers)
        else:
            self._kept = self._draw(numbers)
            if self.loss.updates > 1 and self.learned_from and self.precision is not None and self.world.is_first:
                self._write(*self._kept)
        return self._kept[0]

    def _question(self, number: int) -> PolicyQuestion:
        position = sample_positions(number // self.loss.group_size, 1, len(self.questions), self.seed)[0]
        return self.questions[int(position)]

    def _draw(self, numbers: NDArray[np.int64]) -> tuple[Batch, Drawn]:
        """Ranks share the answers, and each gets all."""
        mine = np.arange(self.world.rank, len(numbers), self.world.size)
        asked = [self._question(int(numbers[row])) for row in mine]
        seeds = [stable_seed(self.seed, int(numbers[row])) for row in mine]
        sampling = SamplingConfig(max_tokens=self.loss.max_new_tokens, temperature=self.loss.temperature)
        answers = answered(self.model, asked, seeds, self.renderer, sampling)
        tokens = torch.zeros((len(numbers), self.length + 1), dtype=torch.int64)
        learned = torch.zeros_like(tokens)
        worth = torch.zeros((len(numbers), 3), dtype=torch.float64)  # right, ended, tokens
        for row, question, answer in zip(mine.tolist(), asked, answers, strict=True):
            said = [*answer.ids, *([] if answer.end_id is None else [answer.end_id])]
            begin, end = len(question.prompt), len(question.prompt) + len(said)
            tokens[row] = self.renderer.tokenizer.fill_id
            tokens[row, :end] = torch.tensor([*question.prompt, *said])
            learned[row, begin:end] = 1
            reward = judge(self.renderer, question, answer, marked=self.loss.marked)
            worth[row] = torch.tensor([reward.right, reward.ended, len(said)])
        for tensor in (tokens, learned, worth):
            self.world.sum(tensor)
        length = self.length
        if self.trims:  # what is behind the last answer has no loss, and no answer sees it
            last = int((learned.any(0) * torch.arange(length + 1)).max())
            length = min(length, -(-last // LENGTH_STEP) * LENGTH_STEP)
        rows, count = tokens.numpy()[:, : length + 1], len(numbers)
        batch = Batch(
            ids=rows[:, :-1].copy(),
            targets=np.where(learned.numpy()[:, 1 : length + 1] > 0, rows[:, 1:], IGNORE),
            positions=np.tile(np.arange(length), (count, 1)),
            segments=np.zeros((count, length), np.int64),
            samples=numbers,
        )
        return batch, self._told(batch, worth.numpy())

    def _told(self, batch: Batch, worth: NDArray[np.float64]) -> Drawn:
        groups = batch.samples // self.loss.group_size
        right, ended, tokens = worth.T
        deviations = [right[groups == group].std(ddof=1) for group in np.unique(groups) if (groups == group).sum() > 1]
        now = before = None
        if self.precision is not None and self.loss.updates > 1:
            now = self._log_probs(batch, self.model, self.precision)
        if self.precision is not None and self.loss.kl_coef > 0:
            with lora.switched_off(self.model) if self.reference is None else nullcontext():
                before = self._log_probs(batch, self.reference or self.model, self.precision)
        return Drawn(
            numbers=batch.samples,
            advantage=advantages(right, groups, deviation=self.loss.deviation),
            now=now,
            before=before,
            facts={
                "reward": float(right.mean()),
                "reward_deviation": float(np.mean(deviations)) if deviations else 0.0,
                "groups_alike": float(np.mean([one == 0 for one in deviations])) if deviations else 1.0,
                "ended": float(ended.mean()),
                "answer_tokens": float(tokens.mean()),
            },
        )

    def _log_probs(self, batch: Batch, model: Transformer, precision: Precision) -> NDArray[np.float32]:
        """N × T, under a model as it is; ranks share the rows."""
        log_p = torch.zeros(batch.ids.shape)
        mine = np.arange(self.world.rank, len(batch.ids), self.world.size)
        lengths, was_training = (self.length_step, self.capacity), model.training
        with torch.no_grad():
            model.eval()
            for group in packed_groups(batch.rows(mine), self.rows_at_once, precision, *lengths):
                rows = mine[group]
                some = by_token(model, batch.rows(rows), precision, self.loss.temperature, *lengths)
                log_p[torch.from_numpy(rows)] = some.cpu()
            model.train(was_training)
        return np.asarray(self.world.sum(log_p).numpy(), np.float32)

    # --- answers that are used again ----------------------------------------------------------------------------------

    def _file(self, numbers: NDArray[np.int64]) -> Path:
        return self.out / FOLDER / f"{int(numbers[0]):012d}.npz"

    def _write(self, batch: Batch, drawn: Drawn) -> None:
        """Write the files that a run needs to resume amid these updates, and remove those that no run needs."""
        optional = {"now": drawn.now, "before": drawn.before}
        arrays = {name: value for name, value in optional.items() if value is not None}
        names = sorted(drawn.facts)
        answers_path = self._file(drawn.numbers)
        with whole_file(answers_path) as file:
            np.savez(
                file,
                **{name: getattr(batch, name) for name in FIELDS},
                advantage=drawn.advantage,
                names=np.array(names),
                values=np.array([drawn.facts[name] for name in names]),
                **arrays,  # type: ignore[arg-type]
            )
        records.save(answers_path.with_suffix(".json"), {}, core_io.listed(answers_path.parent, [answers_path.name]))
        checkpoints = [int(one.name) for one in (self.out / "checkpoints").glob("[0-9]*") if one.name.isdigit()]
        oldest = min(checkpoints, default=0) // self.loss.updates * len(batch.ids)
        for path in (self.out / FOLDER).iterdir():
            if path.stem.isdigit() and int(path.stem) < oldest:
                path.unlink()

    def _read(self, numbers: NDArray[np.int64]) -> tuple[Batch, Drawn]:
        path, hint = self._file(numbers), f"Remove {self.out / 'checkpoints'} to train from the start."
        if not path.is_file():
            raise RunError("the answers that this step trains on are missing", where=str(path), hint=hint)
        if trouble := records.read(path.with_suffix(".json"), path.parent)[1]:
            what = f"the answers that this step trains on are damaged: {trouble}"
            raise RunError(what, where=str(path), hint=hint)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts = dict(zip(arrays["names"].tolist(), arrays["values"].tolist(), strict=True))
        batch = Batch(*(arrays[name] for name in FIELDS))
        if not np.array_equal(batch.samples, numbers):
            what = f"holds answers {batch.samples.tolist()}, but this step trains on {numbers.tolist()}"
            raise RunError(what, where=str(path), hint=hint)
        return batch, Drawn(batch.samples, arrays["advantage"], arrays.get("now"), arrays.get("before"), facts)


FIELDS = ("ids", "targets", "positions", "segments", "samples")


@dataclass(eq=False)
class HeldOut:
    """
    Greedy and sampled answers of a model to questions that it is never trained on: an `EvalCheck` of a run. Training
    maximizes the reward of sampled answers. Each check samples with the same seeds.
    """

    loss: Grpo
    questions: Sequence[PolicyQuestion]
    renderer: ChatRenderer
    file: Path
    """Where the newest answers are written."""
    name: str = "validation_reward"
    bytes_per_token: float | None = None

    def measure(self, model: Transformer, precision: Precision, most: int | None = None) -> dict[str, float]:
        asked = self.questions[: 1 if most else self.loss.check_questions]
        sampling = SamplingConfig(max_tokens=self.loss.max_new_tokens, temperature=self.loss.temperature)
        answers, drawn = (
            answered(model, asked, range(len(asked)), self.renderer, how)
            for how in (replace(sampling, temperature=0.0), sampling)
        )
        rewards, others = (
            [
                judge(self.renderer, question, answer, marked=self.loss.marked)
                for question, answer in zip(asked, some, strict=True)
            ]
            for some in (answers, drawn)
        )
        if most is None:
            with whole_file(self.file, "w") as opened:
                for question, worth in zip(asked, rewards, strict=True):
                    opened.write(json.dumps(answer_record(question, worth), ensure_ascii=False) + "\n")
        return {
            self.name: round(sum(one.right for one in rewards) / len(rewards), 5),
            "validation_reward_drawn": round(sum(one.right for one in others) / len(others), 5),
            "validation_ended": round(sum(one.ended for one in rewards) / len(rewards), 5),
            "validation_answer_tokens": round(sum(len(one.ids) for one in answers) / len(rewards), 3),
        }


def answer_record(question: PolicyQuestion, worth: Reward) -> dict[str, object]:
    return {"id": question.id, "question": question.text, "right": str(question.right), "said": worth.said,
            "is_right": worth.right, "ended": worth.ended}  # fmt: skip
