"""Answers that a model in training draws to questions, as samples of the loop; and what they are worth."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bloomery.core import io as core_io
from bloomery.core import records
from bloomery.core.errors import RunError
from bloomery.core.io import whole_file
from bloomery.evaluation.harness import last_number, marked_number, stable_seed
from bloomery.generate.engine import Completion, Engine
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch, sample_positions
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train.preference.config import Grpo
from bloomery.train.preference.losses import Drawn, advantages, by_token
from bloomery.train.validation import evaluating

import torch

AT_ONCE = 64
FOLDER = "drawn"
"""Of the stage: answers that more than one update is made with, until no checkpoint needs them."""


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
    renderer: Renderer,
    max_tokens: int,
    temperature: float,
) -> list[Completion]:
    """What the model, as it is, says to each question by a seed of its own."""
    prompts, stop = [one.prompt for one in asked], frozenset({renderer.end_id})
    with evaluating(model):
        return Engine(model, renderer.tokenizer.vocab_size).draw(
            prompts, seeds, max_tokens=max_tokens, stop_ids=stop, temperature=temperature, batch=AT_ONCE
        )


def judge(renderer: Renderer, question: PolicyQuestion, answer: Completion, *, marked: bool) -> Reward:
    """Whether the number of an answer is the right one: that behind ####, or else, unless `marked`, the last."""
    said = renderer.said(answer.ids)
    number = marked_number(said)
    if number is None and not marked:
        number = last_number(said)
    return Reward(said, answer.stopped and number == question.right, answer.stopped)


@dataclass(eq=False)
class Rollouts:
    """
    A source of samples that are made when they are asked for, by the model as it then is.

    Sample n is answer n mod G to question n div G of the run, drawn with a seed of n: the same for the same weights,
    whoever asks and whenever. The order of questions is that of `shards/loader.py`.
    """

    loss: Grpo
    questions: Sequence[PolicyQuestion]
    renderer: Renderer
    model: Transformer
    seed: int
    out: Path
    reference: Transformer | None = None
    """None: what the model is without its adapters."""
    world: World = field(default_factory=World.alone)
    device: Device | None = None
    """Where log-probabilities are computed; None: not yet."""
    rows_at_once: int = 1
    used_before: bool = False
    """Whether the next batch is one that has been learned from."""
    learned_from: bool = False
    """Whether batches are for a run, in its order, and not for a trial before it, of which nothing is kept."""
    length: int = field(init=False)
    """Tokens of a sample: the longest question, and the longest answer."""
    num_samples: int = field(init=False)
    _kept: "tuple[Batch, Drawn] | None" = None

    def __post_init__(self) -> None:
        self.length = max(len(one.prompt) for one in self.questions) + self.loss.answer_tokens
        self.num_samples = len(self.questions) * self.loss.answers

    @property
    def drawn(self) -> Drawn:
        assert self._kept is not None
        return self._kept[1]

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
            if self.loss.updates > 1 and self.learned_from and self.device is not None and self.world.is_first:
                self._write(*self._kept)
        return self._kept[0]

    def _question(self, number: int) -> PolicyQuestion:
        place = sample_positions(number // self.loss.answers, 1, len(self.questions), self.seed)[0]
        return self.questions[int(place)]

    def _draw(self, numbers: NDArray[np.int64]) -> tuple[Batch, Drawn]:
        """Ranks share the answers, and each gets all."""
        mine = np.arange(self.world.rank, len(numbers), self.world.size)
        asked = [self._question(int(numbers[row])) for row in mine]
        seeds = [stable_seed(self.seed, int(numbers[row])) for row in mine]
        answers = answered(self.model, asked, seeds, self.renderer, self.loss.answer_tokens, self.loss.temperature)
        tokens = torch.zeros((len(numbers), self.length + 1), dtype=torch.int64)
        learned = torch.zeros_like(tokens)
        worth = torch.zeros((len(numbers), 3), dtype=torch.float64)  # right, ended, tokens
        for row, question, answer in zip(mine.tolist(), asked, answers, strict=True):
            said = [*answer.ids, *([self.renderer.end_id] if answer.stopped else [])]
            begin, end = len(question.prompt), len(question.prompt) + len(said)
            tokens[row] = self.renderer.tokenizer.pad_id
            tokens[row, :end] = torch.tensor([*question.prompt, *said])
            learned[row, begin:end] = 1
            found = judge(self.renderer, question, answer, marked=self.loss.marked)
            worth[row] = torch.tensor([found.right, found.ended, len(said)])
        for part in (tokens, learned, worth):
            self.world.sum(part)
        rows, count = tokens.numpy(), len(numbers)
        batch = Batch(
            ids=rows[:, :-1].copy(),
            targets=np.where(learned.numpy()[:, 1:] > 0, rows[:, 1:], IGNORE),
            positions=np.tile(np.arange(self.length), (count, 1)),
            segments=np.zeros((count, self.length), np.int64),
            samples=numbers,
        )
        return batch, self._told(batch, worth.numpy())

    def _told(self, batch: Batch, worth: NDArray[np.float64]) -> Drawn:
        groups = batch.samples // self.loss.answers
        right, ended, tokens = worth.T
        deviations = [right[groups == group].std(ddof=1) for group in np.unique(groups) if (groups == group).sum() > 1]
        now = before = None
        if self.device is not None and self.loss.updates > 1:
            now = self._log_probs(batch, self.model, self.device)
        if self.device is not None and self.loss.kl_weight > 0:
            with lora.switched_off(self.model) if self.reference is None else nullcontext():
                before = self._log_probs(batch, self.reference or self.model, self.device)
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

    def _log_probs(self, batch: Batch, model: Transformer, device: Device) -> NDArray[np.float32]:
        """N × T, under a model as it is; ranks share the rows."""
        found = torch.zeros(batch.ids.shape)
        mine = np.arange(self.world.rank, len(batch.ids), self.world.size)
        was_training = model.training
        with torch.no_grad():
            model.eval()
            begin = 0
            for part in batch.of_rank(self.world.rank, self.world.size).split(self.rows_at_once):
                rows = torch.from_numpy(mine[begin : begin + len(part.ids)])
                found[rows] = by_token(model, part, device, self.loss.temperature).cpu()
                begin += len(part.ids)
            model.train(was_training)
        return np.asarray(self.world.sum(found).numpy(), np.float32)

    # --- answers that are used again ----------------------------------------------------------------------------------

    def _file(self, numbers: NDArray[np.int64]) -> Path:
        return self.out / FOLDER / f"{int(numbers[0]):012d}.npz"

    def _write(self, batch: Batch, drawn: Drawn) -> None:
        """Leave what a run needs that goes on in the midst of these updates, and remove what none needs any more."""
        optional = {"now": drawn.now, "before": drawn.before}
        arrays = {name: value for name, value in optional.items() if value is not None}
        names = sorted(drawn.facts)
        place = self._file(drawn.numbers)
        with whole_file(place) as file:
            np.savez(
                file,
                **{name: getattr(batch, name) for name in FIELDS},
                advantage=drawn.advantage,
                names=np.array(names),
                values=np.array([drawn.facts[name] for name in names]),
                **arrays,  # type: ignore[arg-type]
            )
        records.save(place.with_suffix(".json"), {}, core_io.listed(place.parent, [place.name]))
        checkpoints = [int(one.name) for one in (self.out / "checkpoints").glob("[0-9]*") if one.name.isdigit()]
        oldest = min(checkpoints, default=0) // self.loss.updates * len(batch.ids)
        for path in (self.out / FOLDER).iterdir():
            if path.stem.isdigit() and int(path.stem) < oldest:
                path.unlink()

    def _read(self, numbers: NDArray[np.int64]) -> tuple[Batch, Drawn]:
        path, hint = self._file(numbers), f"Remove {self.out / 'checkpoints'} to train from the start."
        if not path.is_file():
            raise RunError("the answers that this step learns from are not there", where=str(path), hint=hint)
        if trouble := records.read(path.with_suffix(".json"), path.parent)[1]:
            what = f"the answers that this step learns from are damaged: {trouble}"
            raise RunError(what, where=str(path), hint=hint)
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
        facts = dict(zip(found["names"].tolist(), found["values"].tolist(), strict=True))
        batch = Batch(*(found[name] for name in FIELDS))
        if not np.array_equal(batch.samples, numbers):
            what = f"holds answers {batch.samples.tolist()}, and this step learns from {numbers.tolist()}"
            raise RunError(what, where=str(path), hint=hint)
        return batch, Drawn(batch.samples, found["advantage"], found.get("now"), found.get("before"), facts)


FIELDS = ("ids", "targets", "positions", "segments", "samples")


@dataclass(eq=False)
class HeldOut:
    """
    What a model answers to questions that it never learns from, greedily and as it draws: an `EvalCheck` of a run. What
    is drawn is what is maximized; with the same seeds every time.
    """

    loss: Grpo
    questions: Sequence[PolicyQuestion]
    renderer: Renderer
    file: Path
    """Where the newest answers are written."""
    name: str = "validation_reward"
    bytes_per_token: float | None = None

    def measure(self, model: Transformer, device: Device, most: int | None = None) -> dict[str, float]:
        asked = self.questions[: 1 if most else self.loss.check_questions]
        answers, drawn = (
            answered(model, asked, range(len(asked)), self.renderer, self.loss.answer_tokens, heat)
            for heat in (0.0, self.loss.temperature)
        )
        found, others = (
            [
                judge(self.renderer, question, answer, marked=self.loss.marked)
                for question, answer in zip(asked, some, strict=True)
            ]
            for some in (answers, drawn)
        )
        if most is None:
            with whole_file(self.file, "w") as opened:
                for question, worth in zip(asked, found, strict=True):
                    opened.write(json.dumps(told(question, worth), ensure_ascii=False) + "\n")
        return {
            self.name: round(sum(one.right for one in found) / len(found), 5),
            "validation_reward_drawn": round(sum(one.right for one in others) / len(others), 5),
            "validation_ended": round(sum(one.ended for one in found) / len(found), 5),
            "validation_answer_tokens": round(sum(len(one.ids) for one in answers) / len(found), 3),
        }


def told(question: PolicyQuestion, worth: Reward) -> dict[str, object]:
    return {"id": question.id, "question": question.text, "right": str(question.right), "said": worth.said,
            "is_right": worth.right, "ended": worth.ended}  # fmt: skip
