"""Models out of this house and into it: `bloomery export` and `bloomery import`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import CheckpointError
from bloomery.core.io import check_new_folder
from bloomery.model.transformer import Transformer
from bloomery.tokenizer import importers
from bloomery.tokenizer.chat_template import Renderer
from bloomery.weights import architectures, hf, integrity, llmc
from bloomery.weights.hf import Lineage, Loaded, NumberFormat

import torch

ExportFormat = Literal["hf", "llmc"]
MODEL_FILE, TOKENIZER_FILE = "model.bin", "tokenizer.bin"


def write(loaded: Loaded, out: Path, form: ExportFormat, number_format: NumberFormat) -> dict[str, Any]:
    """
    Write a model for another program. Returns what was written: files, architecture and number format.

    Raises CheckpointError where it is nothing that the program has, with the choices that it is because of; RunError
    where `out` has files in it.
    """
    check_new_folder(out)
    config = loaded.model.config
    if form == "llmc":
        if number_format == "float16":
            raise CheckpointError("llm.c has float32 and bfloat16", where="--dtype float16", hint="Take one of these.")
        llmc.write(out / MODEL_FILE, loaded.model, number_format, loaded.tokenizer.vocab_size)
        importers.write(out / TOKENIZER_FILE, loaded.tokenizer)
        integrity.write_sums(out)
        name = "GPT-2 of llm.c"
    else:
        if why := architectures.reasons(config):
            hint = f"{loaded.folder} itself can be used here, and nowhere else."
            raise CheckpointError(
                "transformers has no such model: " + "; ".join(why), where=str(loaded.folder), hint=hint
            )
        model = _said_otherwise(loaded.model)
        hf.save(out, model, loaded.renderer, loaded.lineage, number_format=number_format)
        name = architectures.architecture(model.config).name
    return {"architecture": name, "number_format": number_format, "files": sorted(one.name for one in out.iterdir())}


def _said_otherwise(model: Transformer) -> Transformer:
    """
    The same computation in a shape that others have: norms without weights get weights of 1, and biases of 0. Rows of
    a head that is normalized get length 1.
    """
    config = architectures.exported(model.config)
    if config == model.config:
        return model
    other = Transformer(config, model.vocab_size)
    weights: Mapping[str, torch.Tensor] = model.state_dict()
    with torch.no_grad():
        for name, weight in other.state_dict().items():
            weight.copy_(weights[name]) if name in weights else weight.fill_(0.0 if name.endswith("bias") else 1.0)
        other.head.weight.copy_(model.head_rows())
    return other.eval()


def read(source: Path, tokenizer: Path | None = None) -> Loaded:
    """
    A model to import: a folder as transformers saves it, or a model file of llm.c, whose tokenizer is in the same
    folder or is named. Raises CheckpointError and DataError, which say what cannot be read and why.
    """
    if source.is_dir():
        if tokenizer is not None:
            hint = "Leave --tokenizer out: a folder has its own."
            raise CheckpointError("has a tokenizer of its own", where=str(source), hint=hint)
        return hf.load(source)
    integrity.verify(source.parent, source.name)
    source_model = llmc.read(source)
    file = tokenizer or _beside(source)
    integrity.verify(file.parent, file.name)
    new_tokenizer, added = hf.tokenizer_of(file, source_model.vocab_size)
    _of_one_size(source, source_model.vocab_size, file, new_tokenizer.vocab_size - len(added))
    model = Transformer(source_model.config, max(source_model.vocab_size, new_tokenizer.vocab_size))
    weights = model.state_dict()
    with torch.no_grad():
        for name, weight in source_model.weights.items():
            weights[name][: len(weight)].copy_(weight)
    end = new_tokenizer.document_id
    hf.add_rows(model, source_model.vocab_size, added, {} if end in added.values() else {"eos_token_id": end})
    lineage = Lineage(tokenizer=new_tokenizer.hash, template=None, shards=hf.IMPORTED)
    return Loaded(model.eval(), new_tokenizer, Renderer(new_tokenizer), lineage, source)


def _of_one_size(source: Path, rows: int, file: Path, ids: int) -> None:
    """A tokenizer has as many token IDs as the model, before special tokens are added. Some tables are padded to 64."""
    if rows == ids or (rows % 64 == 0 and 0 < rows - ids < llmc.PADDED_TO):
        return
    hint = "Name the one that the model was trained with: bloomery import MODEL.bin OUT --tokenizer FILE"
    raise CheckpointError(f"has {rows:,} ids, and the tokenizer {file} has {ids:,}", where=str(source), hint=hint)


def take_in(source: Path, out: Path, tokenizer: Path | None = None) -> dict[str, Any]:
    """Make a model folder of ours of what `read` reads. Raises RunError where `out` has files in it."""
    check_new_folder(out)
    loaded = read(source, tokenizer)
    hf.save(out, loaded.model, loaded.renderer, loaded.lineage)
    parameters = sum(weight.numel() for weight in loaded.model.parameters())
    name = architectures.architecture(loaded.model.config).name
    return {"architecture": name, "parameters": parameters, "vocab_size": loaded.model.vocab_size}


def _beside(source: Path) -> Path:
    candidates = sorted(source.parent.glob("*tokenizer*.bin"))
    if len(candidates) != 1:
        shown = ", ".join(file.name for file in candidates) or "none"
        hint = "Name it: bloomery import MODEL.bin OUT --tokenizer FILE"
        raise CheckpointError(
            f"needs one *tokenizer*.bin in its folder, which has {shown}", where=str(source), hint=hint
        )
    return candidates[0]
