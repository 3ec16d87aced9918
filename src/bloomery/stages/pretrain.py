"""The stage `pretrain`: token files -> a language model."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.config import is_of_hub
from bloomery.core.errors import CheckpointError, UnreachableError
from bloomery.core.records import content_hash
from bloomery.evaluation.llmc_choices import MultipleChoiceEval
from bloomery.hw import device as devices
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer, on_meta
from bloomery.shards import format
from bloomery.shards.build import ANNEAL, TRAIN
from bloomery.shards.loader import AnnealedDataset, PackedDataset
from bloomery.stages.config import Pretrain, start_digest
from bloomery.stages.rollouts import continuing
from bloomery.tokenizer.chat_template import EVERY_SPECIAL, Renderer
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import checkpointing, fsdp, launch
from bloomery.train.checkpointing import FullModelSaver
from bloomery.train.plan.memory import check_shard, rows_at_once, rows_per_step
from bloomery.train.trainer import Evaluation, TrainingRun
from bloomery.weights import hf, locate
from bloomery.weights.hf import Lineage


def run(config: Pretrain, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    if launch.stays_here(config):
        return train(config, inputs, out, World.alone())
    return launch.stage("bloomery.stages.pretrain:train", config, inputs, out)


def train(config: Pretrain, inputs: Mapping[str, Path], out: Path, world: World) -> dict[str, Any]:
    """What each rank does."""
    devices.keep_freed_memory()
    tokenizer = Tokenizer.load(inputs["tokenizer"])
    model, own = start(config, tokenizer, world)
    renderer, folder, length = Renderer(tokenizer), inputs["shard"], config.model.context_length
    samples = course(config, folder, tokenizer.hash)
    lineage = Lineage(
        tokenizer=tokenizer.hash, template=None, shards=content_hash(folder), base=start_digest(config) or None
    )
    if world.is_first:
        go_on(config, samples, out, lineage)
    world.barrier()
    stats = TrainingRun(
        name="pretrain",
        config=config,
        model=model,
        model_saver=FullModelSaver(model, renderer, lineage),
        tokenizer=tokenizer,
        samples=samples,
        validation=PackedDataset(folder, "val", length, tokenizer.hash, verify=True),
        out=out,
        world=world,
        own=own,
        sampler=continuing(renderer),
        evaluations=evaluations(config, tokenizer),
        from_scratch=config.start_from is None,
    ).run()
    if isinstance(samples, AnnealedDataset):
        stats["anneal_from_step"] = samples.switch // rows_per_step(config, length) + 1
    return stats


def go_on(config: Pretrain, samples: PackedDataset | AnnealedDataset, out: Path, lineage: Lineage) -> None:
    """Leave for longer runs how this one trains, and bring over what a shorter one has done of it."""

    def alike(steps: int) -> float:
        """How many samples come in the order of every run that is as long or longer: the anneal mix is at the end."""
        if not isinstance(samples, AnnealedDataset):
            return math.inf
        return float(AnnealedDataset(samples.main, samples.last, steps * rows_per_step(config, samples.length)).switch)

    checkpointing.remember_settings(config, out)
    if config.continue_from is not None:
        checkpointing.bring_checkpoint(config.continue_from.expanduser(), config, out, lineage, samples_alike=alike)


def evaluations(config: Pretrain, tokenizer: Tokenizer) -> dict[str, Evaluation]:
    """Evaluations in addition to the validation loss. Raises DataError for an invalid file of questions."""
    if config.hellaswag is None:
        return {}
    rows = rows_at_once(config, config.model.context_length)
    file, limit = config.hellaswag.expanduser(), config.hellaswag_questions
    questions = MultipleChoiceEval.read(file, tokenizer, limit=limit, rows_at_once=rows)
    return {"hellaswag": lambda *how: questions.accuracy("hellaswag", *how)}


def digest(start_from: Path) -> str:
    """A hash of the model that training starts from. Raises UnreachableError where it is not there yet."""
    path = start_from.expanduser()
    if not is_of_hub(start_from) and not path.exists():
        hint = (
            "Use a run, stage, checkpoint or model folder, a GGUF file, or hub:OWNER/NAME. To download a folder:\n"
            f"hf download OWNER/NAME --include '*.json' '*.safetensors' --local-dir {start_from}"
        )
        raise UnreachableError("there is no such model", where=str(start_from), hint=hint)
    return hf.digest(locate.locate_model(path))


def num_rows(config: Pretrain, num_ids: int) -> int:
    """
    Rows of the tables of ids: those of the tokenizer, or more where the model that training starts from is there and
    has more.
    """
    folder = None if config.start_from is None else config.start_from.expanduser()
    known = folder is not None and folder.exists()
    return max(num_ids, hf.config_of(locate.locate_model(folder))[1]) if folder is not None and known else num_ids


def start(config: Pretrain, tokenizer: Tokenizer, world: World) -> tuple[Transformer, fsdp.OwnParts | None]:
    """
    The model at the first step: initialized from the seed, or read. Of ranks that will hold parts of it, the first one
    initializes it alone, and each reads its own parts. Raises CheckpointError where the model that is read has another
    shape than in the recipe, or another tokenizer than the shards.
    """
    mesh = check_shard(config, world.size)
    if config.start_from is None:
        if mesh is not None and not world.is_first:
            return on_meta(config.model, tokenizer.vocab_size), None
        model = Transformer(config.model, tokenizer.vocab_size)
        model.initialize(config.seed)
        return model, None
    special = [name for name in EVERY_SPECIAL if tokenizer.special_id(name) is not None]
    path = locate.locate_model(config.start_from.expanduser())
    own = None if mesh is None else fsdp.OwnParts(mesh, world.rank)
    loaded = hf.load(path, dtype=config.weight_dtype, special=special, take=None if own is None else own.take)
    where, shape = str(config.start_from), loaded.model.config
    if loaded.tokenizer.hash != tokenizer.hash:
        what = f"has the tokenizer {loaded.tokenizer.hash[:8]}, but the shards were made with {tokenizer.hash[:8]}"
        hint = f'Use its tokenizer: [tokenizer] kind = "import", path = "{where}".'
        raise CheckpointError(what, where=where, hint=hint)
    names = [one for one in type(shape).model_fields if shape.of_every_layer(one) != config.model.of_every_layer(one)]
    if config.model.context_length < shape.context_length and shape.position_embedding != "learned":
        names.remove("context_length")  # shorter sequences; the model keeps its context
    if other := [f"{name} = {getattr(shape, name)!r}, not {getattr(config.model, name)!r}" for name in names]:
        hint = "Set its shape in [pretrain.model]; known shapes have a preset."
        raise CheckpointError(f"has {'; '.join(other)}", where=where, hint=hint)
    return loaded.model.train(), own


def course(config: Pretrain, folder: Path, tokenizer_hash: str) -> PackedDataset | AnnealedDataset:
    """What is trained on: the mix, and at the end the anneal mix where there is one."""
    length = config.model.context_length
    main = PackedDataset(folder, TRAIN, length, tokenizer_hash, verify=True)
    if not format.names(folder, ANNEAL):
        return main
    last = PackedDataset(folder, ANNEAL, length, tokenizer_hash, verify=True)
    return AnnealedDataset(main, last, config.steps * rows_per_step(config, length))
