"""The stage `prefer`: a model that answers, and answers that were judged or can be checked -> a better one."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from bloomery.core import files, leftovers
from bloomery.core.files import whole_file
from bloomery.core.log import say
from bloomery.core.records import read_record
from bloomery.core.stage import content_hash
from bloomery.core.stop import Stop
from bloomery.data.preferences import readers
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model import lora
from bloomery.shards.loader import Samples
from bloomery.stages import asked, instruct, judged_rows
from bloomery.stages.judged_rows import ROWS, SPLITS, Split, prepared
from bloomery.stages.rollouts import HeldOut, Rollouts
from bloomery.stages.sampling import answering
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import launch
from bloomery.train.keeping import Adapters
from bloomery.train.preference.config import Grpo, Prefer, SimPo
from bloomery.train.preference.pairs import Preference, Table, reference_of
from bloomery.train.preference.policy import Policy
from bloomery.train.session import Session
from bloomery.train.validation import Check, Validation
from bloomery.weights import huggingface
from bloomery.weights.huggingface import BaseModel, Lineage, Loaded

BEFORE = "before.json"
"""What is measured of the model as it starts."""


class Before(TypedDict):
    record: dict[str, float | str]
    """Numbers by name; "nan", "inf" and "-inf" stand for what JSON cannot hold."""


def digest(config: Prefer) -> str:
    """A hash of the contents of all files that are read, for the stage's fingerprint. Raises DataError."""
    return readers.digest(config.loss.problems if isinstance(config.loss, Grpo) else config.pairs)


def run(config: Prefer, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """Raises DataError for sources that cannot be read, and where nothing is left to learn from."""
    start = huggingface.load(inputs["finetune"] / "model")
    context = start.model.config.context
    if isinstance(config.loss, Grpo):
        data = asked.prepare(config.loss, config.hold_out, start.renderer, context, out)
    else:
        data = judged_rows.prepare(config, start.renderer, context, out)
    del start
    done = launch.stage("bloomery.stages.prefer:train", config, inputs, out)
    return {"method": config.loss.kind, **done, "data": data}


def trained_on(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Every message that the stage has left to learn from, and every question."""
    yield from instruct.trained_on(folder / ROWS, tokenizer)
    yield from asked.texts(folder)


def train(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What each rank does for `run`."""
    config, inputs, out = launch.unpacked(Prefer, task)
    devices.keep_freed_memory()
    start = huggingface.load(inputs["finetune"] / "model")
    made = _of_draws if isinstance(config.loss, Grpo) else _of_pairs
    session = made(config, start, inputs["finetune"], out, world)
    return {**session.run(), "before": read_record(out / BEFORE, Before)["record"] if world.is_first else {}}


def _of_pairs(config: Prefer, start: Loaded, finetune: Path, out: Path, world: World) -> Session:
    """A session over packed rows of judged answers."""
    common = _common(config, start, finetune, out, world)
    rows = {split: _Rows.open(config, start, out, split) for split in SPLITS}
    session = Session(
        **common,
        config=config,
        samples=rows["train"].samples,
        validation=rows["val"].samples,
        objective=rows["train"].objective,
        check_objective=rows["val"].objective,
    )

    def begin(device: Device, rows_at_once: int, stop: Stop) -> None:
        for one in rows.values():
            one.refer(session, device, rows_at_once, stop)
        val = rows["val"]
        check = Validation(val.samples, session.renderer.tokenizer, rows_at_once, stop, val.objective)
        _measure_before(session, check, device)

    session.begin = begin
    return session


def _of_draws(config: Prefer, start: Loaded, finetune: Path, out: Path, world: World) -> Session:
    """A session over answers that the model draws itself, with its copy as the reference."""
    loss = config.loss
    assert isinstance(loss, Grpo)
    reference = None
    if loss.kl_weight and config.lora is None:
        reference = copy.deepcopy(start.model).requires_grad_(False).eval()
    common = _common(config, start, finetune, out, world)
    known = {split: asked.questions(out, split, start.renderer) for split in SPLITS}
    rollouts = Rollouts(loss, known["train"], start.renderer, start.model, config.seed, out, reference, world)
    rows = max(1, config.tokens_per_step // (loss.answers * rollouts.length)) * loss.answers
    say(f"  a step asks {rows // loss.answers} questions, and draws {loss.answers} answers to each")
    session = Session(
        **common,
        config=config.model_copy(update={"tokens_per_step": rows * rollouts.length}),
        samples=rollouts,
        validation=HeldOut(loss, known["val"], start.renderer, out / "answers.jsonl"),
        objective=Policy(loss, lambda: rollouts.drawn),
        early=False,
    )

    def begin(device: Device, rows_at_once: int, stop: Stop) -> None:
        rollouts.device, rollouts.rows_at_once = device, rows_at_once
        if reference is not None:
            reference.to(device.place)
        _measure_before(session, session.validation, device)

    session.begin = begin
    return session


def _common(config: Prefer, start: Loaded, finetune: Path, out: Path, world: World) -> dict[str, Any]:
    """What sessions of both kinds have."""
    kept = None
    if config.lora is not None:
        lora.attach(start.model, config.lora, config.seed)
        below = BaseModel(finetune / "model", huggingface.digest(finetune / "model"))
        kept = Adapters(start.model, start.renderer, config.lora, below)
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


def _measure_before(session: Session, check: Samples | Check, device: Device) -> None:
    """Write what is measured of the model as it starts, if that is not known yet."""
    assert not isinstance(check, Samples)
    path = session.out / BEFORE
    if session.world.is_first and leftovers.load(path, session.out, "prefer: measuring the first model") is None:
        leftovers.save(path, check.measure(session.model, device), {})


@dataclass(eq=False)
class _Rows:
    """The rows of a split, and what is minimized over them."""

    split: Split
    samples: Samples
    objective: Preference

    @classmethod
    def open(cls, config: Prefer, start: Loaded, out: Path, split: Split) -> "_Rows":
        assert not isinstance(config.loss, Grpo)
        samples = Samples(out / ROWS, split, 2 * start.model.config.context, start.tokenizer.hash)
        return cls(split, samples, Preference(config.loss, Table(judged_rows.kinds_of(out, split))))

    def refer(self, session: Session, device: Device, rows_at_once: int, stop: Stop) -> None:
        """Look up what the reference says, or ask it: the model as it is before the first step."""
        if isinstance(self.objective.loss, SimPo):
            return
        rows, table, world = session.out / ROWS, self.objective.table, session.world
        file, finished = rows / f"{self.split}.reference.npy", rows / f"{self.split}.reference.json"
        with world.alike():
            known = world.is_first and leftovers.load(finished, rows, "prefer: asking the reference") is not None
        if not world.broadcast(known):
            found = reference_of(session.model, self.samples, table, rows_at_once, device, world, stop)
            if world.is_first:
                with whole_file(file) as opened:
                    np.save(opened, found, allow_pickle=False)
                leftovers.save(finished, {}, files.listed(rows, [file.name]))
            world.barrier()
        reference = np.asarray(np.load(file, allow_pickle=False), np.float32)
        self.objective.table = Table(table.kinds, reference)
