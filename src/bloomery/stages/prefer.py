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
from bloomery.core.chat import Message
from bloomery.core.errors import ConfigError, DataError
from bloomery.core.io import whole_file
from bloomery.core.log import info, progress
from bloomery.core.records import content_hash, read_lines, read_record
from bloomery.core.signals import StopRequest
from bloomery.data.chat import preferences
from bloomery.data.chat.formats import Messages, RejectedRow
from bloomery.data.chat.preferences import ArithmeticProblem, JudgedRow
from bloomery.data.documents import is_held_out
from bloomery.data.executor import Counts
from bloomery.data.readers.bytes import ReadError
from bloomery.evaluation.harness import last_number, marked_number
from bloomery.hw import copies, launcher
from bloomery.hw import device as devices
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.shards import build
from bloomery.shards.loader import PackedDataset
from bloomery.stages import instruct
from bloomery.stages.finetune import base_dtype, in_known_format
from bloomery.stages.instruct import gone, write_line
from bloomery.stages.rollouts import HeldOut, PolicyQuestion, Rollouts, answering
from bloomery.tokenizer.chat_template import ChatRenderer
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import launch
from bloomery.train.checkpointing import AdapterSaver, FullModelSaver, ModelSaver
from bloomery.train.precision import Precision
from bloomery.train.preference.config import Grpo, Prefer, SimPo
from bloomery.train.preference.losses import (
    CHOSEN,
    REJECTED,
    GRPOLoss,
    PairTable,
    PreferenceLoss,
    keep_as_computed,
    reference_of,
)
from bloomery.train.trainer import TrainingRun
from bloomery.train.validation import EvalCheck, Validation
from bloomery.weights import hf, locate
from bloomery.weights.hf import BaseModel, Lineage, Loaded

ROWS, PREPARED, REJECTED_ROWS = "rows", "prepared.json", "rejected.jsonl"

PreferenceSplit = Literal["train", "val"]
SPLITS: tuple[PreferenceSplit, ...] = ("train", "val")


@dataclass(frozen=True, eq=False)
class EncodedAnswer:
    """A prompt and an answer as ids, of which the answer is looked at."""

    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    kind: int


AnswerPair = list[EncodedAnswer]
"""The better answer and the worse one."""


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
    saved = records.load(out / ROWS / PREPARED, out, "prefer: making rows")
    if saved is None:
        core_io.remove_path(out / ROWS)
        (out / ROWS).mkdir(parents=True)
    return saved


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


def prepare(config: Prefer, renderer: ChatRenderer, context: int, out: Path) -> dict[str, Any]:
    """
    Write rows of twice `context` tokens for both splits, and the rejected rows, once. Returns their statistics.

    Raises DataError for sources that cannot be read, and where nothing is left to train or to validate on.
    """
    if (known := load_prepared(out)) is not None:
        return known
    with whole_file(out / REJECTED_ROWS, "w") as file, progress("prefer", "pairs") as meter:
        sorter = _PreferenceSorter(config, renderer, context, file)
        for number, row in enumerate(preferences.judged(config.pairs)):
            meter.at(number)
            sorter.take(row)
    why = gone("rejected", sorter.reasons["rejected"], out / REJECTED_ROWS)
    total = sorter.by_source.total()
    for split, hint in (("train", "Add pairs, or lower prefer.val_fraction."), ("val", "Add pairs, or raise it.")):
        if not sorter.kept[split]:
            what = f"none of {total['read']} rows is left for the split {split}"
            raise DataError(what, where="prefer", hint=f"{hint} {why}".rstrip())
    if why:
        info(f"prefer: {why}", "yellow")
    stats: dict[str, Any] = {name: total[name] for name in ("read", "kept", "rejected", "cut_at_a_turn")}
    stats["rejected_by_reason"] = dict(sorted(sorter.reasons["rejected"].items()))
    stats["template"] = renderer.hash
    for split in SPLITS:
        stats[split] = _write(renderer, context, out / ROWS, split, sorter.kept[split])
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
        f"for validation: {val['chosen']:,} and {val['rejected']:,}"
    )


@dataclass
class _PreferenceSorter:
    config: Prefer
    renderer: ChatRenderer
    context: int
    rejected: IO[str]
    kept: dict[str, list[AnswerPair]] = field(default_factory=lambda: {"train": [], "val": []})
    by_source: Counts = field(default_factory=Counts)
    reasons: Counts = field(default_factory=Counts)

    def take(self, row: JudgedRow | RejectedRow) -> None:
        self.by_source.add(row.source, {"read": 1})
        if isinstance(row, RejectedRow):
            self._reject(row)
            return
        fitted = fit(self.renderer, row, self.context)
        if isinstance(fitted, ReadError):
            self._reject(RejectedRow(row.source, row.location, fitted, {"id": row.id, "prompt": row.prompt}))
            return
        pair, cut = fitted
        self.by_source.add(row.source, {"kept": 1, "cut_at_a_turn": cut})
        self.kept["val" if is_held_out(row.asked, self.config.val_fraction) else "train"].append(pair)

    def _reject(self, row: RejectedRow) -> None:
        self.by_source.add(row.source, {"rejected": 1})
        self.reasons.add("rejected", {row.problem.reason: 1})
        write_line(self.rejected, row.record)


def fit(renderer: ChatRenderer, row: JudgedRow, context: int) -> tuple[AnswerPair, bool] | ReadError:
    """
    The two answers, each sequence in at most `context` tokens, and whether turns were left out for it: the oldest ones
    of the prompt, what the system says aside.
    """
    said = ((CHOSEN, row.chosen), (REJECTED, row.rejected))
    for _, answer in said:
        if what := renderer.trouble([*row.prompt, *answer]):
            return ReadError("not_in_the_template", 0, what)
    for cut, prompt in enumerate(_beginnings(row.prompt)):
        answers = [_answer(renderer, prompt, answer, kind) for kind, answer in said]
        if max(len(answer.ids) for answer in answers) > context:
            continue
        if np.array_equal(answers[0].ids, answers[1].ids):
            return ReadError("same_answer", 0, "the two answers are the same as the template writes them")
        if not all(answer.mask.any() for answer in answers):
            return ReadError("nothing_to_learn", 0, "no token of the chosen or of the rejected answer is in the loss")
        return answers, cut > 0
    return ReadError("too_long", 0, f"the last message before the answers and one of these take over {context} tokens")


def _beginnings(prompt: Messages) -> Iterator[Messages]:
    """The prompt, and then with ever less of its older turns: each begins with what a user says."""
    yield prompt
    system = prompt[:1] if prompt[0]["role"] == "system" else []
    for index in range(len(system) + 1, len(prompt)):
        if prompt[index]["role"] == "user":
            yield system + prompt[index:]


def _answer(renderer: ChatRenderer, prompt: Messages, answer: Messages, kind: int) -> EncodedAnswer:
    """What is learned of a conversation, but nothing before its answer."""
    rendered, asked = renderer.render([*prompt, *answer]), renderer.prompt(prompt)
    mask = np.array(rendered.mask, np.uint8)
    begin = len(asked)
    if rendered.ids[:begin] != asked:  # a template that writes a turn otherwise where the assistant is to speak
        own = sum(message["role"] == "assistant" for message in answer)
        begins = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        begin = begins[-own] if own <= len(begins) else 0
    mask[:begin] = 0
    return EncodedAnswer(np.array(rendered.ids, np.uint32), mask, kind)


def _write(
    renderer: ChatRenderer, context: int, folder: Path, split: PreferenceSplit, pairs: Sequence[AnswerPair]
) -> dict[str, Any]:
    sequence_length = 2 * context + 1
    packed = build.write_packed(
        folder / f"{split}-00000",
        pairs,
        tokenizer=renderer.tokenizer,
        sequence_length=sequence_length,
        longest_padding=context,
        facts=instruct.template_facts(renderer),
    )
    listed = [[answer.kind for index in row for answer in pairs[index]] for row in packed.rows]
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
        "packing": packed.full(sequence_length),
    }


class AskedQuestion(TypedDict):
    """A line of a split."""

    id: str
    question: str
    solution: str


def prepare_prompts(loss: Grpo, val_fraction: float, renderer: ChatRenderer, context: int, out: Path) -> dict[str, Any]:
    """
    Write the questions for training and validation, and the rejected ones, once. Returns their statistics.

    Raises DataError for sources that cannot be read, and where nothing is left to train or to validate on.
    """
    if (known := load_prepared(out)) is not None:
        return known
    kept: dict[PreferenceSplit, list[ArithmeticProblem]] = {split: [] for split in SPLITS}
    reasons, read, cut = Counter[str](), 0, context - loss.max_new_tokens
    with whole_file(out / REJECTED_ROWS, "w") as file, progress("prefer", "questions") as meter:
        for problem in preferences.problems(loss.problems):
            read += 1
            meter.at(read)
            checked = problem if isinstance(problem, RejectedRow) else _too_long(problem, renderer, cut)
            if isinstance(checked, RejectedRow):
                reasons[checked.problem.reason] += 1
                write_line(file, checked.record)
            elif isinstance(problem, ArithmeticProblem):
                kept["val" if is_held_out(problem.question, val_fraction) else "train"].append(problem)
    why = gone("rejected", reasons, out / REJECTED_ROWS)
    for split in SPLITS:
        if not kept[split]:
            what = f"none of {read} questions is left for the split {split}"
            raise DataError(what, where="prefer", hint=f"Add questions, or change prefer.val_fraction. {why}".rstrip())
        with whole_file(_file(out, split), "w") as file:
            for problem in kept[split]:
                write_line(file, {"id": problem.id, "question": problem.question, "solution": problem.solution})
    if why:
        info(f"prefer: {why}", "yellow")
    return save_prepared(
        out,
        {
            "read": read,
            "kept": read - reasons.total(),
            "rejected": reasons.total(),
            "rejected_by_reason": dict(sorted(reasons.items())),
            "template": renderer.hash,
            "train": {"questions": len(kept["train"])},
            "val": {"questions": len(kept["val"])},
        },
    )


def questions(out: Path, split: PreferenceSplit, renderer: ChatRenderer) -> list[PolicyQuestion]:
    """What `prepare` left of a split."""
    policy_questions = []
    for row in read_lines(_file(out, split), AskedQuestion):
        number = _right(row["solution"])
        assert number is not None, "a problem without a number was rejected"
        policy_questions.append(
            PolicyQuestion(row["id"], row["question"], tuple(_prompt(row["question"], renderer)), number)
        )
    return policy_questions


def _file(out: Path, split: PreferenceSplit) -> Path:
    return out / ROWS / f"{split}.questions.jsonl"


def _prompt(question: str, renderer: ChatRenderer) -> list[int]:
    return renderer.prompt([Message(role="user", content=question)])


def _right(solution: str) -> Any:
    number = marked_number(solution)
    return last_number(solution) if number is None else number


def _too_long(problem: ArithmeticProblem, renderer: ChatRenderer, most: int) -> ArithmeticProblem | RejectedRow:
    row = {"id": problem.id, "question": problem.question}
    if _right(problem.solution) is None:
        return RejectedRow(
            problem.source, problem.location, ReadError("no_number", 0, "its solution contains no number"), row
        )
    tokens = len(_prompt(problem.question, renderer))
    if tokens <= most:
        return problem
    what = f"its {tokens} tokens leave less than loss.max_new_tokens of the context"
    return RejectedRow(problem.source, problem.location, ReadError("too_long", tokens, what), row)


def texts(out: Path) -> Iterator[str]:
    """The questions that were trained on."""
    if _file(out, "train").is_file():
        yield from (row["question"] for row in read_lines(_file(out, "train"), AskedQuestion))


BEFORE = "before.json"
"""What is measured of the model as it starts."""


class Before(TypedDict):
    record: dict[str, float | str]
    """Numbers by name; "nan", "inf" and "-inf" stand for what JSON cannot hold."""


def model_of(config: Prefer, inputs: Mapping[str, Path]) -> Path:
    """The folder of the model that training starts from."""
    if config.start_from is None:
        return inputs["finetune"] / "model"
    return locate.locate_model(config.start_from.expanduser())


def run(config: Prefer, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """Raises DataError for sources that cannot be read, and where nothing is left to train on."""
    folder = model_of(config, inputs)
    start = hf.load(folder, dtype=config.weight_dtype, base=base_dtype(in_known_format(config, folder)))
    context = start.model.config.context_length
    if isinstance(config.loss, Grpo):
        data = prepare_prompts(config.loss, config.val_fraction, start.renderer, context, out)
    else:
        if config.sequence_length is not None and config.sequence_length > context:
            what = f"sequence_length={config.sequence_length} is more than the model's context of {context}"
            raise ConfigError(what, where="prefer", hint=f"Set at most {context}.")
        data = prepare(config, start.renderer, config.answer_tokens(context), out)
    del start
    if launcher.num_processes(config.num_processes) == 1:
        done = train(config, inputs, out, World.alone())
    else:
        done = launch.stage("bloomery.stages.prefer:train", config, inputs, out)
    return {"method": config.loss.kind, **done, "data": data}


def trained_on(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Every message and every question that the stage left to train on."""
    yield from instruct.trained_on(folder / ROWS, tokenizer)
    yield from texts(folder)


def train(config: Prefer, inputs: Mapping[str, Path], out: Path, world: World) -> dict[str, Any]:
    """What each rank does."""
    devices.keep_freed_memory()
    folder = model_of(config, inputs)
    config = in_known_format(config, folder)
    start, base = (
        hf.load(folder, dtype=config.weight_dtype, base=base_dtype(config)),
        content_hash(inputs["finetune"]) if "finetune" in inputs else hf.digest(folder),
    )
    build_run = _of_draws if isinstance(config.loss, Grpo) else _of_pairs
    training_run = build_run(config, start, base, out, world)
    return {**training_run.run(), "before": read_record(out / BEFORE, Before)["record"] if world.is_first else {}}


def _of_pairs(config: Prefer, start: Loaded, base: str, out: Path, world: World) -> TrainingRun:
    """A run over packed rows of judged answers."""
    common = _common(config, start, base, out, world)
    rows = {split: _Rows.open(config, start, out, split) for split in SPLITS}
    training_run = TrainingRun(
        **common,
        config=config,
        samples=rows["train"].samples,
        validation=rows["val"].samples,
        loss_function=rows["train"].loss_function,
        validation_loss_function=rows["val"].loss_function,
    )

    def begin(precision: Precision, rows_at_once: int, stop: StopRequest) -> None:
        for split_rows in rows.values():
            split_rows.refer(training_run, precision, rows_at_once, stop)
        val = rows["val"]
        check = Validation(val.samples, training_run.tokenizer, rows_at_once, stop, val.loss_function)
        _measure_before(training_run, check, precision)

    training_run.begin = begin
    return training_run


def _of_draws(config: Prefer, start: Loaded, base: str, out: Path, world: World) -> TrainingRun:
    """A run over answers that the model samples itself, with its copy as the reference."""
    loss = config.loss
    assert isinstance(loss, Grpo)
    reference = None
    if loss.kl_coef and config.lora is None:
        reference = copy.deepcopy(start.model).requires_grad_(False).eval()
    common = _common(config, start, base, out, world)
    known = {split: questions(out, split, start.renderer) for split in SPLITS}
    rollouts = Rollouts(loss, known["train"], start.renderer, start.model, config.seed, out, reference, world)
    rollouts.trims = config.compile != "on"
    rows = max(1, config.global_batch_tokens // (loss.group_size * rollouts.length)) * loss.group_size
    info(f"  a step asks {rows // loss.group_size} questions, and samples {loss.group_size} answers to each")
    training_run = TrainingRun(
        **common,
        config=config.model_copy(update={"global_batch_tokens": rows * rollouts.length}),
        samples=rollouts,
        validation=HeldOut(loss, known["val"], start.renderer, out / "answers.jsonl"),
        loss_function=GRPOLoss(loss, lambda: rollouts.drawn, rollouts.length_step, rollouts.capacity),
        early=False,
    )

    def begin(precision: Precision, rows_at_once: int, stop: StopRequest) -> None:
        rollouts.precision, rollouts.rows_at_once = precision, rows_at_once
        if reference is not None:
            keep_as_computed(reference, precision)
            reference.to(precision.device.torch_device)
        _measure_before(training_run, training_run.validation, precision)

    training_run.begin = begin
    return training_run


def _common(config: Prefer, start: Loaded, base: str, out: Path, world: World) -> dict[str, Any]:
    """What runs of both kinds have. `base` is the content hash of what the model was made by."""
    lineage = Lineage(
        tokenizer=start.tokenizer.hash, template=start.renderer.hash, shards=str(prepared(out)["hash"]), base=base
    )
    model_saver: ModelSaver = FullModelSaver(start.model, start.language, lineage)
    if config.lora is not None:
        lora.attach(start.model, config.lora, config.seed)
        below = BaseModel(start.folder, hf.digest(start.folder))
        model_saver = AdapterSaver(start.model, start.language, config.lora, below, lineage)
    return {
        "name": "prefer",
        "model": start.model.train(),
        "model_saver": model_saver,
        "tokenizer": start.tokenizer,
        "out": out,
        "world": world,
        "sampler": answering(start.renderer),
    }


def _measure_before(training_run: TrainingRun, check: PackedDataset | EvalCheck, precision: Precision) -> None:
    """Write what is measured of the model as it starts, if that is not known yet."""
    assert not isinstance(check, PackedDataset)
    path = training_run.out / BEFORE
    if (
        training_run.world.is_first
        and records.load(path, training_run.out, "prefer: measuring the first model") is None
    ):
        records.save(path, check.measure(training_run.model, precision), {})
    training_run.world.barrier()  # the others wait here: sums between GPUs give up after minutes


@dataclass(eq=False)
class _Rows:
    """The rows of a split, and the loss function over them."""

    split: PreferenceSplit
    samples: PackedDataset
    loss_function: PreferenceLoss

    @classmethod
    def open(cls, config: Prefer, start: Loaded, out: Path, split: PreferenceSplit) -> "_Rows":
        assert not isinstance(config.loss, Grpo)
        length = config.row_tokens(start.model.config.context_length)
        samples = PackedDataset(out / ROWS, split, length, start.tokenizer.hash)
        return cls(split, samples, PreferenceLoss(config.loss, PairTable(kinds_of(out, split))))

    def refer(self, training_run: TrainingRun, precision: Precision, rows_at_once: int, stop: StopRequest) -> None:
        """Look up what the reference says, or ask it: the model as it is before the first step."""
        if isinstance(self.loss_function.loss, SimPo):
            return
        rows, table, world = training_run.out / ROWS, self.loss_function.table, training_run.world
        file, finished = rows / f"{self.split}.reference.npy", rows / f"{self.split}.reference.json"
        with world.alike():
            known = world.is_first and records.load(finished, rows, "prefer: asking the reference") is not None
        if not world.broadcast(known):
            sums = reference_of(training_run.model, self.samples, table, rows_at_once, precision, world, stop)
            if world.is_first:
                with whole_file(file) as opened:
                    np.save(opened, sums, allow_pickle=False)
                records.save(finished, {}, core_io.listed(rows, [file.name]))
            world.barrier()
        copies.bring(world, training_run.out)
        reference = np.asarray(np.load(file, allow_pickle=False), np.float32)
        self.loss_function.table = PairTable(table.kinds, reference)
