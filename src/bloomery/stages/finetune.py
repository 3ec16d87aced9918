"""The stage `finetune`: a language model and packed conversations -> a model that answers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bloomery.core.errors import DataError
from bloomery.core.log import counted, info
from bloomery.core.records import content_hash
from bloomery.hw import device as devices
from bloomery.hw.distributed import World
from bloomery.model import lora, quantize
from bloomery.model.config import Base
from bloomery.model.transformer import Transformer
from bloomery.shards import format
from bloomery.shards.loader import PackedDataset
from bloomery.stages import instruct
from bloomery.stages.config import Finetune
from bloomery.stages.rollouts import answering
from bloomery.tokenizer.chat_template import OWN, TEMPLATES, ChatRenderer, Renderer, Template, special_tokens
from bloomery.train import fsdp, launch
from bloomery.train.checkpointing import AdapterSaver, FullModelSaver, ModelSaver
from bloomery.train.config import Adapters
from bloomery.train.plan.memory import check_shard, rows_per_step
from bloomery.train.progress import KeptWeights
from bloomery.train.trainer import TrainingRun
from bloomery.weights import hf, locate
from bloomery.weights.hf import BaseModel, Lineage, Loaded
from bloomery.weights.opened import TakeWeight

FEW_STEPS = 10
"""With fewer, there is little to choose the best of."""

T = TypeVar("T", bound=Adapters)


def run(config: Finetune, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    if launch.stays_here(config):
        return train(config, inputs, out, World.alone())
    return launch.stage("bloomery.stages.finetune:train", config, inputs, out)


def train(config: Finetune, inputs: Mapping[str, Path], out: Path, world: World) -> dict[str, Any]:
    """What each rank does."""
    devices.keep_freed_memory()
    folder, start = inputs["instruct"], model_of(config, inputs)
    config = in_known_format(config, start)
    mesh, own = check_shard(config, world.size, adapters=config.lora is not None), None
    if mesh is not None:  # each rank reads the parts that it will hold
        own = fsdp.OwnParts(mesh, world.rank, dora=config.lora is not None and config.lora.dora)
    take = None if own is None else own.take
    rows = format.read(format.names(folder, "train")[0]).index
    if config.start_from is None:
        base = hf.load(start, dtype=config.weight_dtype, base=base_dtype(config), take=take)
        renderer: ChatRenderer = Renderer(base.tokenizer, template_of(folder))
    else:
        base = load(start, rows, config, take)
        renderer = base.renderer
    is_stretched = stretch(base.model, config, int(rows["row_tokens"]) - 1)
    lineage = Lineage(
        tokenizer=base.tokenizer.hash,
        template=renderer.hash,
        shards=content_hash(folder),
        base=content_hash(inputs["pretrain"]) if config.start_from is None else hf.digest(start),
    )
    words = replace(base.language, chat=renderer)
    model_saver: ModelSaver = FullModelSaver(base.model, words, lineage)
    kept: dict[str, int] = {}
    if config.lora is not None:
        below = BaseModel(start, hf.digest(start), is_stretched)
        lora.attach(base.model, config.lora, config.seed)
        model_saver = AdapterSaver(base.model, words, config.lora, below, lineage)
        trained = sum(weight.numel() for weight in lora.weights(base.model).values())
        kept = {"trained_parameters": trained, "model_bytes": quantize.kept_bytes(base.model)}
    length = int(rows["row_tokens"]) - 1
    samples = PackedDataset(folder, "train", length, base.tokenizer.hash, verify=True)
    rows_a_step = rows_per_step(config, length)
    measured = config.of_length(samples.num_samples, rows_a_step)
    if config.epochs is not None and measured.steps < FEW_STEPS and world.is_first:
        epochs = f"{config.epochs:g} {'epoch' if config.epochs == 1 else 'epochs'} of"
        what = f"{epochs} {counted(samples.num_samples, 'row')} with {counted(rows_a_step, 'row')} a step"
        info(f"  {what}: {counted(measured.steps, 'step')}. For more, lower finetune.global_batch_tokens.", "yellow")
    stats = TrainingRun(
        name="finetune",
        config=measured,
        model=base.model,
        model_saver=model_saver,
        tokenizer=base.tokenizer,
        samples=samples,
        validation=PackedDataset(folder, "val", length, base.tokenizer.hash, verify=True),
        out=out,
        world=world,
        own=own,
        sampler=answering(renderer),
        selection=KeptWeights(config.keeps_best, config.early_stopping),
    ).run()
    return stats | kept


def model_of(config: Finetune, inputs: Mapping[str, Path]) -> Path:
    """The folder or file of the model that training starts from."""
    if config.start_from is None:
        return inputs["pretrain"] / "model"
    return locate.locate_model(config.start_from.expanduser())


def base_dtype(config: Adapters) -> Base:
    """The format that the matrices of a frozen base are read into."""
    return "float32" if config.lora is None else config.lora.frozen_dtype


def in_known_format(config: T, start: Path) -> T:
    """The same settings, with the number format of a model's files where its frozen base is to be kept in that."""
    return config.on_base(hf.frozen_format(start)) if config.asks_for_format else config


def load(start: Path, rows: Mapping[str, Any], config: Finetune, take: TakeWeight | None = None) -> Loaded:
    """
    The model to start from, with rows for the special tokens that the rows' template needs and it lacks. Raises
    DataError where the rows were written in another template.
    """
    template = None if rows["template_name"] == OWN else rows["template_name"]
    lacks = template is not None and instruct.lacking(hf.language(start).tokenizer, template)
    special = special_tokens(template) if template and lacks else ()
    formats: dict[str, Any] = {"dtype": config.weight_dtype, "base": base_dtype(config)}
    loaded = hf.load(start, **formats, special=special, template=template, take=take)
    if loaded.renderer.hash != rows["template"]:
        what = f"the rows are written in the template {rows['template'][:8]}, "
        what += f"and the model has {loaded.renderer.hash[:8]}"
        raise DataError(what, where=str(start), hint="Run the stage instruct again.")
    return loaded


def stretch(model: Transformer, config: Finetune, length: int) -> bool:
    """
    Give a model the context of longer rows, and say whether that changed it. Raises DataError where nothing says how
    its positions reach so far.
    """
    shape = model.config
    if length > shape.context_length and shape.position_embedding in ("rope", "learned") and not config.rope_scaling:
        what = f"rows of {length} tokens are longer than the model's context of {shape.context_length}"
        raise DataError(
            what, where="finetune", hint="Set finetune.rope_scaling, or a shorter instruct.sequence_length."
        )
    scaling = config.rope_scaling or shape.rope_scaling
    longer = {"context_length": max(length, shape.context_length), "rope_scaling": scaling}
    model.config = shape.model_copy(update=longer)
    return model.config != shape


def template_of(folder: Path) -> Template:
    """The template that packed rows were written in. Raises DataError where ours of that name is another by now."""
    path = format.names(folder, "train")[0]
    facts = format.read(path).index
    name, written = facts.get("template_name", "bloomery"), facts["template"]
    if name not in TEMPLATES or TEMPLATES[name].hash != written:
        known = ", ".join(f"{one.name} {one.hash[:8]}" for one in TEMPLATES.values())
        what = f"its conversations are written in the template {name} {written[:8]}, but known are {known}"
        raise DataError(what, where=str(path), hint="Run the stage instruct again.")
    return TEMPLATES[name]
