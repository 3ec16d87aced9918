"""
The stage `prefer`: improve a model with judged answers, or with answers that can be checked.

Input is a model that answers. The training data is either judged answers or questions with one right number.

Judged answers become packed sequences, with the role of each sequence. Questions with one right number become
prompts. Both write down which inputs could not become training data.

One file holds the stage and both kinds of training data, because the stage starts with one of the two.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from bloomery.core import io as core_io
from bloomery.core import records
from bloomery.core.errors import DataError
from bloomery.core.io import whole_file
from bloomery.core.log import info, progress
from bloomery.core.pipeline import content_hash
from bloomery.core.records import read_lines, read_record
from bloomery.core.signals import StopRequest
from bloomery.data.chat import preferences
from bloomery.data.chat.messages import Message, Messages, RejectedRow
from bloomery.data.chat.preferences import ArithmeticProblem, JudgedRow
from bloomery.data.documents import is_held_out
from bloomery.data.readers.bytes import ReadError
from bloomery.evaluation.harness import last_number, marked_number
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.shards import packing
from bloomery.shards.loader import PackedDataset
from bloomery.stages import instruct
from bloomery.stages.instruct import gone, write_line
from bloomery.stages.rollouts import HeldOut, PolicyQuestion, Rollouts
from bloomery.stages.sampling import answering
from bloomery.tokenizer.chat_template import Renderer
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import launch
from bloomery.train.checkpointing import AdapterSaver
from bloomery.train.preference.config import Grpo, Kto, Prefer, SimPo
from bloomery.train.preference.losses import (
    CHOSEN,
    ELSEWHERE,
    REJECTED,
    GRPOLoss,
    PairTable,
    PreferenceLoss,
    reference_of,
)
from bloomery.train.trainer import TrainingRun
from bloomery.train.validation import EvalCheck, Validation
from bloomery.weights import hf
from bloomery.weights.hf import BaseModel, Lineage, Loaded

ROWS, PREPARED, REJECTED_ROWS = "rows", "prepared.json", "rejected.jsonl"
NEIGHBORS = 16
"""How many examples are tried for an answer to another question that fits behind a prompt."""

PreferenceSplit = Literal["train", "val"]
SPLITS: tuple[PreferenceSplit, ...] = ("train", "val")


@dataclass(frozen=True, eq=False)
class EncodedAnswer:
    """A prompt and an answer as ids, of which the answer is looked at."""

    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    kind: int


@dataclass(frozen=True, eq=False)
class Group:
    """Answers that are looked at together: a pair, or a single one."""

    answers: list[EncodedAnswer]
    prompt: Messages
    said: Messages
    """Of a single one, what is answered."""


class Prepared(TypedDict):
    """What `prepare` had to say of the rows, as far as anything but a report reads it."""

    hash: str


class PreparedFile(TypedDict):
    record: Prepared


def prepared(out: Path) -> dict[str, Any]:
    """What `prepare` or `prepare_prompts` had to say of the rows. `hash` names their content."""
    return {**read_record(out / ROWS / PREPARED, PreparedFile)["record"]}


def load_prepared(out: Path) -> dict[str, Any] | None:
    """The same of an earlier attempt, if its rows are unchanged; else None, and what is left of them is removed."""
    found = records.load(out / ROWS / PREPARED, out, "prefer: making rows")
    if found is None:
        core_io.remove_path(out / ROWS)
        (out / ROWS).mkdir(parents=True)
    return found


def save_prepared(out: Path, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Write down that the rows are there; returns `stats` with the hash of their content."""
    outputs = core_io.listed(out, [f"{ROWS}/{path.name}" for path in sorted((out / ROWS).iterdir())])
    hashes = {name.removeprefix(f"{ROWS}/"): facts["sha256"] for name, facts in outputs.items()}
    whole = {**stats, "hash": core_io.sha256_bytes(core_io.canonical(hashes))}
    records.save(out / ROWS / PREPARED, whole, outputs | core_io.listed(out, [REJECTED_ROWS]))
    return whole


def kinds_of(out: Path, split: PreferenceSplit) -> NDArray[np.int8]:
    """What each sequence of each row is, as numbers of train/preference/losses.py."""
    return np.asarray(np.load(out / ROWS / f"{split}.kinds.npy", allow_pickle=False), np.int8)


def prepare(config: Prefer, renderer: Renderer, context: int, out: Path) -> dict[str, Any]:
    """
    Write rows of two contexts to train and to validate on, and what was rejected; once. Returns what there is to say.

    Raises DataError for sources that cannot be read, and where nothing is left to learn from or to validate on.
    """
    if (known := load_prepared(out)) is not None:
        return known
    with whole_file(out / REJECTED_ROWS, "w") as file, progress("prefer", "pairs") as meter:
        sorter = _PreferenceSorter(config, renderer, context, file)
        for number, one in enumerate(preferences.judged(config.pairs)):
            meter.at(number)
            sorter.take(one)
    why = gone("rejected", sorter.reasons, out / REJECTED_ROWS)
    for split, hint in (("train", "Add pairs, or lower prefer.hold_out."), ("val", "Add pairs, or raise it.")):
        if not sorter.kept[split]:
            what = f"of {sorter.counts['read']} rows none is left for the split {split}"
            raise DataError(what, where="prefer", hint=f"{hint} {why}".rstrip())
    if why:
        info(f"prefer: {why}", "yellow")
    stats: dict[str, Any] = {name: sorter.counts[name] for name in ("read", "kept", "rejected", "cut_at_a_turn")}
    stats["rejected_by_reason"] = dict(sorted(sorter.reasons.items()))
    stats["template"] = renderer.template.hash
    for split in SPLITS:
        stats[split] = _write(config, renderer, context, out / ROWS, split, sorter.kept[split])
    stats = save_prepared(out, stats)
    info(summary(stats))
    return stats


def summary(stats: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    train, val = stats["train"], stats["val"]
    return (
        f"prefer: {stats['kept']:,} of {stats['read']:,} rows kept ({stats['rejected']:,} rejected, "
        f"{stats['cut_at_a_turn']:,} cut at a turn); {train['chosen']:,} better and {train['rejected']:,} worse "
        f"answers in {train['rows']:,} rows, {train['packing']:.1%} full, "
        f"{train['supervised'] / train['tokens']:.1%} of them looked at; "
        f"held out: {val['chosen']:,} and {val['rejected']:,}"
    )


@dataclass
class _PreferenceSorter:
    config: Prefer
    renderer: Renderer
    context: int
    rejected: IO[str]
    kept: dict[str, list[Group]] = field(default_factory=lambda: {"train": [], "val": []})
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def take(self, one: JudgedRow | RejectedRow) -> None:
        self.counts["read"] += 1
        if isinstance(one, RejectedRow):
            self._reject(one)
            return
        single = isinstance(self.config.loss, Kto)
        found = fit(self.renderer, one, self.context, single)
        if isinstance(found, ReadError):
            self._reject(RejectedRow(one.source, one.place, found, {"id": one.id, "prompt": one.prompt}))
            return
        groups, cut = found
        self.counts["kept"] += 1
        self.counts["cut_at_a_turn"] += cut
        self.kept["val" if is_held_out(one.asked, self.config.hold_out) else "train"] += groups

    def _reject(self, one: RejectedRow) -> None:
        self.counts["rejected"] += 1
        self.reasons[one.problem.reason] += 1
        write_line(self.rejected, one.told)


def fit(renderer: Renderer, one: JudgedRow, context: int, single: bool) -> tuple[list[Group], bool] | ReadError:
    """
    Groups of what was judged, each sequence in at most `context` tokens, and whether turns were left out for it: the
    oldest ones of the prompt, what the system says aside. With `single`, answers apart from each other.
    """
    if not single and (one.chosen is None or one.rejected is None):
        return ReadError("no_pair", 0, 'is a single answer with a label; loss.kind = "kto" learns from those')
    said = [(kind, answer) for kind, answer in ((CHOSEN, one.chosen), (REJECTED, one.rejected)) if answer is not None]
    for _, answer in said:
        if what := renderer.trouble([*one.prompt, *answer]):
            return ReadError("not_in_the_template", 0, what)
    for cut, prompt in enumerate(_beginnings(one.prompt)):
        answers = [_answer(renderer, prompt, answer, kind) for kind, answer in said]
        if max(len(answer.ids) for answer in answers) > context:
            continue
        if len(answers) == 2 and np.array_equal(answers[0].ids, answers[1].ids):
            return ReadError("same_answer", 0, "the two answers are the same as the template writes them")
        groups = [Group(answers, prompt, [])]
        if single:
            groups = [Group([a], prompt, said) for a, (_, said) in zip(answers, said, strict=True)]
        return groups, cut > 0
    return ReadError("too_long", 0, f"the last message before the answers and one of these take over {context} tokens")


def _beginnings(prompt: Messages) -> Iterator[Messages]:
    """The prompt, and then with ever less of its older turns: each begins with what a user says."""
    yield prompt
    system = prompt[:1] if prompt[0]["role"] == "system" else []
    for place in range(len(system) + 1, len(prompt)):
        if prompt[place]["role"] == "user":
            yield system + prompt[place:]


def _answer(renderer: Renderer, prompt: Messages, answer: Messages, kind: int) -> EncodedAnswer:
    """What is learned of a conversation, but nothing before its answer."""
    rendered = renderer.render([*prompt, *answer])
    mask = np.array(rendered.mask, np.uint8)
    mask[: len(renderer.prompt(prompt))] = 0
    return EncodedAnswer(np.array(rendered.ids, np.uint32), mask, kind)


def _write(
    config: Prefer, renderer: Renderer, context: int, folder: Path, split: PreferenceSplit, groups: Sequence[Group]
) -> dict[str, Any]:
    lines = [group.answers for group in groups]
    if isinstance(config.loss, Kto):
        lines = [_with_elsewhere(renderer, groups, place, context) for place in range(len(groups))]
    row_tokens = 2 * context + 1
    packed = packing.write(
        folder / f"{split}-00000",
        lines,
        tokenizer=renderer.tokenizer,
        row_tokens=row_tokens,
        longest_padding=context,
        facts={"template": renderer.template.hash, "template_name": renderer.template.name},
    )
    listed = [[answer.kind for index in row for answer in lines[index]] for row in packed.rows]
    kinds = np.zeros((len(listed), max(map(len, listed))), np.int8)
    for row, numbers in enumerate(listed):
        kinds[row, : len(numbers)] = numbers
    with whole_file(folder / f"{split}.kinds.npy") as file:
        np.save(file, kinds, allow_pickle=False)
    counts = {"chosen": int((kinds == CHOSEN).sum()), "rejected": int((kinds == REJECTED).sum())}
    return {
        **counts,
        "rows": len(packed.rows),
        "tokens": packed.tokens,
        "supervised": packed.supervised,
        "packing": packed.full(row_tokens),
    }


def _with_elsewhere(renderer: Renderer, groups: Sequence[Group], place: int, context: int) -> list[EncodedAnswer]:
    """A single answer, and behind its prompt the answer to one of the next questions, if one fits."""
    own = groups[place]
    for step in range(1, min(NEIGHBORS, len(groups))):
        other = groups[(place + step) % len(groups)]
        if other.prompt == own.prompt:
            continue
        found = _answer(renderer, own.prompt, other.said, ELSEWHERE)
        if len(found.ids) <= context:
            return [*own.answers, found]
    return own.answers


class AskedQuestion(TypedDict):
    """A line of a split."""

    id: str
    question: str
    solution: str


def prepare_prompts(loss: Grpo, hold_out: float, renderer: Renderer, context: int, out: Path) -> dict[str, Any]:
    """
    Write the questions to train and to validate on, and what was rejected; once. Returns what there is to say.

    Raises DataError for sources that cannot be read, and where nothing is left to learn from or to validate on.
    """
    if (known := load_prepared(out)) is not None:
        return known
    kept: dict[PreferenceSplit, list[ArithmeticProblem]] = {split: [] for split in SPLITS}
    reasons, read, cut = Counter[str](), 0, context - loss.answer_tokens
    with whole_file(out / REJECTED_ROWS, "w") as file, progress("prefer", "questions") as meter:
        for one in preferences.problems(loss.problems):
            read += 1
            meter.at(read)
            found = one if isinstance(one, RejectedRow) else _too_long(one, renderer, cut)
            if isinstance(found, RejectedRow):
                reasons[found.problem.reason] += 1
                write_line(file, found.told)
            elif isinstance(one, ArithmeticProblem):
                kept["val" if is_held_out(one.question, hold_out) else "train"].append(one)
    why = gone("rejected", reasons, out / REJECTED_ROWS)
    for split in SPLITS:
        if not kept[split]:
            what = f"of {read} questions none is left for the split {split}"
            raise DataError(what, where="prefer", hint=f"Add questions, or change prefer.hold_out. {why}".rstrip())
        with whole_file(_file(out, split), "w") as file:
            for one in kept[split]:
                write_line(file, {"id": one.id, "question": one.question, "solution": one.solution})
    if why:
        info(f"prefer: {why}", "yellow")
    return save_prepared(
        out,
        {
            "read": read,
            "kept": read - reasons.total(),
            "rejected": reasons.total(),
            "rejected_by_reason": dict(sorted(reasons.items())),
            "template": renderer.template.hash,
            "train": {"questions": len(kept["train"])},
            "val": {"questions": len(kept["val"])},
        },
    )


def questions(out: Path, split: PreferenceSplit, renderer: Renderer) -> list[PolicyQuestion]:
    """What `prepare` left of a split."""
    found = []
    for row in read_lines(_file(out, split), AskedQuestion):
        number = _right(row["solution"])
        assert number is not None, "a problem without a number was rejected"
        found.append(PolicyQuestion(row["id"], row["question"], tuple(_prompt(row["question"], renderer)), number))
    return found


def _file(out: Path, split: PreferenceSplit) -> Path:
    return out / ROWS / f"{split}.questions.jsonl"


def _prompt(question: str, renderer: Renderer) -> list[int]:
    return renderer.prompt([Message(role="user", content=question)])


def _right(solution: str) -> Any:
    number = marked_number(solution)
    return last_number(solution) if number is None else number


def _too_long(one: ArithmeticProblem, renderer: Renderer, most: int) -> ArithmeticProblem | RejectedRow:
    row = {"id": one.id, "question": one.question}
    if _right(one.solution) is None:
        return RejectedRow(one.source, one.place, ReadError("no_number", 0, "its solution holds no number"), row)
    tokens = len(_prompt(one.question, renderer))
    if tokens <= most:
        return one
    what = f"its {tokens} tokens leave less than loss.answer_tokens of the context"
    return RejectedRow(one.source, one.place, ReadError("too_long", tokens, what), row)


def texts(out: Path) -> Iterator[str]:
    """The questions that were trained on."""
    if _file(out, "train").is_file():
        yield from (row["question"] for row in read_lines(_file(out, "train"), AskedQuestion))


BEFORE = "before.json"
"""What is measured of the model as it starts."""


class Before(TypedDict):
    record: dict[str, float | str]
    """Numbers by name; "nan", "inf" and "-inf" stand for what JSON cannot hold."""


def digest(config: Prefer) -> str:
    """A hash of the contents of all files that are read, for the stage's fingerprint. Raises DataError."""
    return preferences.digest(config.loss.problems if isinstance(config.loss, Grpo) else config.pairs)


def run(config: Prefer, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """Raises DataError for sources that cannot be read, and where nothing is left to learn from."""
    start = hf.load(inputs["finetune"] / "model")
    context = start.model.config.context
    if isinstance(config.loss, Grpo):
        data = prepare_prompts(config.loss, config.hold_out, start.renderer, context, out)
    else:
        data = prepare(config, start.renderer, context, out)
    del start
    done = launch.stage("bloomery.stages.prefer:train", config, inputs, out)
    return {"method": config.loss.kind, **done, "data": data}


def trained_on(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Every message that the stage has left to learn from, and every question."""
    yield from instruct.trained_on(folder / ROWS, tokenizer)
    yield from texts(folder)


def train(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What each rank does for `run`."""
    config, inputs, out = launch.unpacked(Prefer, task)
    devices.keep_freed_memory()
    start = hf.load(inputs["finetune"] / "model")
    made = _of_draws if isinstance(config.loss, Grpo) else _of_pairs
    training_run = made(config, start, inputs["finetune"], out, world)
    return {**training_run.run(), "before": read_record(out / BEFORE, Before)["record"] if world.is_first else {}}


def _of_pairs(config: Prefer, start: Loaded, finetune: Path, out: Path, world: World) -> TrainingRun:
    """A run over packed rows of judged answers."""
    common = _common(config, start, finetune, out, world)
    rows = {split: _Rows.open(config, start, out, split) for split in SPLITS}
    training_run = TrainingRun(
        **common,
        config=config,
        samples=rows["train"].samples,
        validation=rows["val"].samples,
        objective=rows["train"].objective,
        check_objective=rows["val"].objective,
    )

    def begin(device: Device, rows_at_once: int, stop: StopRequest) -> None:
        for one in rows.values():
            one.refer(training_run, device, rows_at_once, stop)
        val = rows["val"]
        check = Validation(val.samples, training_run.renderer.tokenizer, rows_at_once, stop, val.objective)
        _measure_before(training_run, check, device)

    training_run.begin = begin
    return training_run


def _of_draws(config: Prefer, start: Loaded, finetune: Path, out: Path, world: World) -> TrainingRun:
    """A run over answers that the model draws itself, with its copy as the reference."""
    loss = config.loss
    assert isinstance(loss, Grpo)
    reference = None
    if loss.kl_weight and config.lora is None:
        reference = copy.deepcopy(start.model).requires_grad_(False).eval()
    common = _common(config, start, finetune, out, world)
    known = {split: questions(out, split, start.renderer) for split in SPLITS}
    rollouts = Rollouts(loss, known["train"], start.renderer, start.model, config.seed, out, reference, world)
    rows = max(1, config.tokens_per_step // (loss.answers * rollouts.length)) * loss.answers
    info(f"  a step asks {rows // loss.answers} questions, and draws {loss.answers} answers to each")
    training_run = TrainingRun(
        **common,
        config=config.model_copy(update={"tokens_per_step": rows * rollouts.length}),
        samples=rollouts,
        validation=HeldOut(loss, known["val"], start.renderer, out / "answers.jsonl"),
        objective=GRPOLoss(loss, lambda: rollouts.drawn),
        early=False,
    )

    def begin(device: Device, rows_at_once: int, stop: StopRequest) -> None:
        rollouts.device, rollouts.rows_at_once = device, rows_at_once
        if reference is not None:
            reference.to(device.place)
        _measure_before(training_run, training_run.validation, device)

    training_run.begin = begin
    return training_run


def _common(config: Prefer, start: Loaded, finetune: Path, out: Path, world: World) -> dict[str, Any]:
    """What sessions of both kinds have."""
    kept = None
    if config.lora is not None:
        lora.attach(start.model, config.lora, config.seed)
        below = BaseModel(finetune / "model", hf.digest(finetune / "model"))
        kept = AdapterSaver(start.model, start.renderer, config.lora, below)
    lineage = Lineage(
        tokenizer=start.tokenizer.hash,
        template=start.renderer.template.hash,
        shards=str(prepared(out)["hash"]),
        base=content_hash(finetune),
    )
    return {
        "name": "prefer",
        "model": start.model.train(),
        "renderer": start.renderer,
        "lineage": lineage,
        "out": out,
        "world": world,
        "sampler": answering(start.renderer),
        "kept": kept,
    }


def _measure_before(training_run: TrainingRun, check: PackedDataset | EvalCheck, device: Device) -> None:
    """Write what is measured of the model as it starts, if that is not known yet."""
    assert not isinstance(check, PackedDataset)
    path = training_run.out / BEFORE
    if (
        training_run.world.is_first
        and records.load(path, training_run.out, "prefer: measuring the first model") is None
    ):
        records.save(path, check.measure(training_run.model, device), {})


@dataclass(eq=False)
class _Rows:
    """The rows of a split, and what is minimized over them."""

    split: PreferenceSplit
    samples: PackedDataset
    objective: PreferenceLoss

    @classmethod
    def open(cls, config: Prefer, start: Loaded, out: Path, split: PreferenceSplit) -> "_Rows":
        assert not isinstance(config.loss, Grpo)
        samples = PackedDataset(out / ROWS, split, 2 * start.model.config.context, start.tokenizer.hash)
        return cls(split, samples, PreferenceLoss(config.loss, PairTable(kinds_of(out, split))))

    def refer(self, training_run: TrainingRun, device: Device, rows_at_once: int, stop: StopRequest) -> None:
        """Look up what the reference says, or ask it: the model as it is before the first step."""
        if isinstance(self.objective.loss, SimPo):
            return
        rows, table, world = training_run.out / ROWS, self.objective.table, training_run.world
        file, finished = rows / f"{self.split}.reference.npy", rows / f"{self.split}.reference.json"
        with world.alike():
            known = world.is_first and records.load(finished, rows, "prefer: asking the reference") is not None
        if not world.broadcast(known):
            found = reference_of(training_run.model, self.samples, table, rows_at_once, device, world, stop)
            if world.is_first:
                with whole_file(file) as opened:
                    np.save(opened, found, allow_pickle=False)
                records.save(finished, {}, core_io.listed(rows, [file.name]))
            world.barrier()
        reference = np.asarray(np.load(file, allow_pickle=False), np.float32)
        self.objective.table = PairTable(table.kinds, reference)
