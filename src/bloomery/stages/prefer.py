"""The stage `prefer`: a model that answers, and answers that were judged or can be checked -> a better one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.files import read_json, whole_file, write_json
from bloomery.core.stage import content_hash
from bloomery.core.stop import Stop
from bloomery.data.preferences import readers
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model import lora
from bloomery.shards.loader import Samples
from bloomery.stages import instruct, judged_rows
from bloomery.stages.judged_rows import PREPARED, ROWS, SPLITS, Split
from bloomery.stages.sampling import answering
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import launch
from bloomery.train.keeping import Adapters
from bloomery.train.preference.config import Grpo, Prefer, SimPo
from bloomery.train.preference.pairs import Preference, Table, reference_of
from bloomery.train.session import Session
from bloomery.train.validation import Validation
from bloomery.weights import huggingface
from bloomery.weights.huggingface import BaseModel, Lineage, Loaded

BEFORE = "before.json"
"""The numbers of the validation pairs before the first step."""


def digest(config: Prefer) -> str:
    """A hash of the contents of all files that are read, for the stage's fingerprint. Raises DataError."""
    return readers.digest(config.loss.problems if isinstance(config.loss, Grpo) else config.pairs)


def run(config: Prefer, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """Raises DataError for sources that cannot be read, and where nothing is left to learn from."""
    start = huggingface.load(inputs["finetune"] / "model")
    data = judged_rows.prepare(config, start.renderer, start.model.config.context, out)
    del start
    return {**launch.stage("bloomery.stages.prefer:train", config, inputs, out), "data": data}


def trained_on(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Every message that the stage has left to learn from, and every question."""
    yield from instruct.trained_on(folder / ROWS, tokenizer)


def train(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What each rank does for `run`."""
    config, inputs, out = launch.unpacked(Prefer, task)
    devices.keep_freed_memory()
    start = huggingface.load(inputs["finetune"] / "model")
    kept = adapted(config, start, inputs["finetune"] / "model")
    rows = {split: _Rows.open(config, start, out, split) for split in SPLITS}
    session = Session(
        name="prefer",
        config=config,
        model=start.model.train(),
        renderer=start.renderer,
        samples=rows["train"].samples,
        validation=rows["val"].samples,
        lineage=Lineage(
            tokenizer=start.tokenizer.hash,
            template=start.renderer.template.hash,
            shards=read_json(out / ROWS / PREPARED)["hash"],
            base=content_hash(inputs["finetune"]),
        ),
        out=out,
        world=world,
        sampler=answering(start.renderer),
        kept=kept,
        objective=rows["train"].objective,
        check_objective=rows["val"].objective,
    )

    def begin(device: Device, rows_at_once: int, stop: Stop) -> None:
        for one in rows.values():
            one.refer(session, device, rows_at_once, stop)
        measure_before(session, rows["val"], device, rows_at_once, stop)

    session.begin = begin
    return {**session.run(), "before": read_json(out / BEFORE) if world.is_first else {}}


def adapted(config: Prefer, start: Loaded, folder: Path) -> Adapters | None:
    """With adapters, where they are asked for: then what is kept is these."""
    if config.lora is None:
        return None
    lora.attach(start.model, config.lora, config.seed)
    return Adapters(start.model, start.renderer, config.lora, BaseModel(folder, huggingface.digest(folder)))


def measure_before(session: Session, rows: "_Rows", device: Device, rows_at_once: int, stop: Stop) -> None:
    """Write what the validation pairs say of the model as it starts, if that is not known yet."""
    if not session.world.is_first or (session.out / BEFORE).exists():
        return
    check = Validation(rows.samples, session.renderer.tokenizer, rows_at_once, stop, rows.objective)
    write_json(session.out / BEFORE, check.measure(session.model, device))


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
        file, table, world = session.out / ROWS / f"{self.split}.reference.npy", self.objective.table, session.world
        known = world.broadcast(file.exists())
        if not known:
            found = reference_of(session.model, self.samples, table, rows_at_once, device, world, stop)
            if world.is_first:
                with whole_file(file) as opened:
                    np.save(opened, found, allow_pickle=False)
            world.barrier()
        reference = np.asarray(np.load(file, allow_pickle=False), np.float32)
        self.objective.table = Table(table.kinds, reference)
