"""Write models for other programs and read theirs: `bloomery export` and `bloomery import`."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import TEMPERATURE
from bloomery.core.config import is_of_hub
from bloomery.core.errors import CheckpointError, RunError, UnreachableError
from bloomery.core.io import check_new_folder, make_folder, new_folder, whole_file, write_json
from bloomery.core.log import info
from bloomery.core.records import read_record
from bloomery.model.transformer import Transformer, on_meta
from bloomery.tokenizer import importers
from bloomery.tokenizer.chat_template import Renderer
from bloomery.weights import architectures, gguf_writer, hf, llmc, locate, peft, pickled, safetensors
from bloomery.weights.architectures import TABLES
from bloomery.weights.card import CARD, Provenance, card, provenance
from bloomery.weights.gguf_writer import GGUFWords
from bloomery.weights.hf import Lineage, Loaded, ModelLanguage
from bloomery.weights.opened import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    GGUF_SUFFIX,
    NumberFormat,
    StoredWeights,
    add_rows,
    is_adapter,
    own_weights,
)
from bloomery.weights.safetensors import SHARD_BYTES

import torch
import torch.nn.functional as F
from torch import Tensor

ExportFormat = Literal["hf", "gguf", "llmc"]
"""Formats of whole models; `write_adapters` is for PEFT."""
FloatFormat = Literal["float32", "bfloat16", "float16"]
ExportNumbers = Literal["float32", "bfloat16", "float16", "q8_0", "q4_0"]
MODEL_FILE, TOKENIZER_FILE = "model.bin", "tokenizer.bin"


def write(
    loaded: Loaded,
    out: Path,
    form: ExportFormat,
    number_format: ExportNumbers,
    shard_bytes: int = SHARD_BYTES,
    license: str | None = None,
) -> dict[str, Any]:
    """
    Write a model for another program, weight by weight: memory holds one of them where the others stay in their files
    (`hf.streamed`). Returns what was written: files, architecture and number format. A GGUF file is `out` itself, the
    other formats are folders. `license` replaces the one that the files of the model state.

    Raises CheckpointError where it is nothing that the program has, with the choices that it is because of; RunError
    where `out` has files in it.
    """
    source = provenance(loaded.folder, license)
    if form == "gguf":
        return _write_gguf(loaded, out, number_format, source)
    if number_format == "q8_0" or number_format == "q4_0":
        hint = "Add --format gguf, or use float32, bfloat16 or float16."
        raise CheckpointError("is a number format of GGUF only", where=f"--dtype {number_format}", hint=hint)
    with new_folder(out):
        if form == "llmc":
            name = _write_llmc(loaded, out, number_format)
        else:
            name = _write_hf(loaded, out, number_format, source, shard_bytes)
        safetensors.write_sums(out)
        return _written(name, number_format, out)


def _written(name: str, number_format: str, out: Path) -> dict[str, Any]:
    return {"architecture": name, "number_format": number_format, "files": sorted(one.name for one in out.iterdir())}


def _write_llmc(loaded: Loaded, out: Path, number_format: FloatFormat) -> str:
    if number_format == "float16":
        raise CheckpointError("llm.c has only float32 and bfloat16", where="--dtype float16", hint="Use one of them.")
    size = sum(weight.numel() for weight in loaded.model.parameters()) * getattr(torch, number_format).itemsize
    info(f"{out}: {size / 2**30:.2f} GiB of weights in {number_format}")
    llmc.write(out / MODEL_FILE, loaded.model, number_format, loaded.tokenizer.vocab_size, loaded.weights)
    importers.write(out / TOKENIZER_FILE, loaded.tokenizer)
    return "GPT-2 of llm.c"


def _write_hf(loaded: Loaded, out: Path, number_format: FloatFormat, source: Provenance, shard_bytes: int) -> str:
    if why := architectures.reasons(loaded.model.config):
        hint = f"Use {loaded.folder} itself with Bloomery: no other program can read it."
        raise CheckpointError("transformers has no such model: " + "; ".join(why), where=str(loaded.folder), hint=hint)
    model, weights = _said_otherwise(loaded)
    size = sum(weight.numel() for weight in model.parameters()) * getattr(torch, number_format).itemsize
    info(f"{out}: {size / 2**30:.2f} GiB of weights in {number_format}")
    words, lineage = loaded.language, loaded.lineage
    hf.save(out, model, words, lineage, number_format=number_format, weights=weights, shard_bytes=shard_bytes)
    name = architectures.architecture(model.config).name
    if name == architectures.BAICHUAN2.name:
        info(f"{out}: transformers loads a {name} only with its authors' code", "yellow")
    _write_card(loaded, out, name, number_format, source)
    return name


def write_adapters(folder: Path, out: Path, license: str | None = None) -> dict[str, Any]:
    """
    Write the adapters of a finetuned model for PEFT, with the tokenizer and chat template that they were trained with.
    A base in the cache of the hub's client is named by OWNER/NAME and its revision, any other by its absolute path.
    Returns what was written, and takes `license`, as `write` does.

    Raises CheckpointError where the folder holds no adapters, or damaged ones; RunError where `out` has files in it.
    """
    if not is_adapter(folder):
        hint = "Remove --format: this is a whole model. Only finetune.lora writes adapters."
        raise CheckpointError("holds no adapters", where=str(folder), hint=hint)
    check_new_folder(out)
    adapter, words = peft.read(folder), hf.language(folder)
    safetensors.verify(folder)
    facts = read_record(folder / ADAPTER_CONFIG, dict[str, Any], error=CheckpointError, fix="The file is damaged.")
    base = hf.base_of(folder)
    if (shape := hf.config_of(folder)[0]) != hf.config_of(base)[0]:
        what = f"these adapters were trained with positions stretched to a context of {shape.context_length}, "
        what += "and the files of PEFT cannot say so"
        raise CheckpointError(what, where=str(folder), hint="Remove --format peft to export the whole model.")
    known = hf.language(base).tokenizer
    if added := [one["content"] for one in words.tokenizer.outline["added_tokens"] if not known.holds(one["content"])]:
        what = f"training added the token {added[0]!r}, and the files of PEFT have no row for it"
        raise CheckpointError(what, where=str(folder), hint="Remove --format peft to export the whole model.")
    info(f"{out}: {(folder / ADAPTER_WEIGHTS).stat().st_size / 2**20:.1f} MiB of adapters in float32")
    with new_folder(out):
        make_folder(out)
        hf.write_words(out, words, shape.context_length, chats=words.chat is not None)
        shutil.copyfile(folder / ADAPTER_WEIGHTS, out / ADAPTER_WEIGHTS)
        named, revision = locate.of_hub(base) or (str(base), None)
        write_json(out / ADAPTER_CONFIG, facts | {"base_model_name_or_path": named, "revision": revision})
        ranks = {len(a) for a, _ in adapter.pairs.values()}
        rows = {
            "base": f"{named}, a {architectures.architecture(shape).name}",
            "rank": ", ".join(map(str, sorted(ranks))),
            "matrices": str(len(adapter.pairs)),
        }
        with whole_file(out / CARD, "w") as file:
            file.write(card(provenance(folder, license), rows, library="peft", title=out.name))
        return _written(architectures.architecture(shape).name, "float32", out)


def _write_gguf(loaded: Loaded, out: Path, number_format: ExportNumbers, source: Provenance) -> dict[str, Any]:
    """As `write`, for one GGUF file."""
    if out.suffix != GGUF_SUFFIX or out.exists():
        why = "exists" if out.exists() else f"does not end with {GGUF_SUFFIX}"
        raise RunError(why, where=str(out), hint=f"Use a new file, for example {out.stem}-new{GGUF_SUFFIX}")
    model, weights = _said_otherwise(loaded)
    info(f"{out}: {gguf_writer.size_bytes(model, number_format) / 2**30:.2f} GiB of weights in {number_format}")
    words = _words(loaded, source.license)
    name = gguf_writer.write(out, model, loaded.tokenizer, words, number_format, out.stem, weights)
    return {"architecture": name, "number_format": number_format, "files": [out.name]}


def _words(loaded: Loaded, license: str | None) -> GGUFWords:
    """What a GGUF file says about text, as `hf.save` says it in a model folder."""
    words, chats = loaded.language, loaded.lineage.template is not None
    source = words.chat.source if words.chat is not None and (chats or not words.is_ours) else None
    generation = {"temperature": TEMPERATURE, "top_p": 1.0}
    if not words.is_ours:
        ends = words.end_ids or (words.chat.end_ids if words.chat is not None else frozenset())
        generation = {"eos_token_id": sorted(ends)} | {**words.generation}
    roles = words.roles_with(chats=chats)
    first = None if words.is_ours else next(iter(words.opening_ids), None)
    opens = first is not None and first == words.tokenizer.special_id(roles.get("bos_token") or "")
    return GGUFWords(roles, source, generation, add_bos=opens, license=license)


def _write_card(loaded: Loaded, folder: Path, architecture: str, number_format: str, source: Provenance) -> None:
    config, lineage = loaded.model.config, loaded.lineage
    rows = {
        "architecture": architecture,
        "parameters": f"{sum(weight.numel() for weight in loaded.model.parameters()):,}",
        "number format": number_format,
        "context": f"{config.context_length:,} tokens",
        "vocabulary": f"{loaded.model.vocab_size:,} token IDs",
        "chat template": loaded.language.chat.name if loaded.language.chat is not None else "none",
        "hash of the base": lineage.base or "none",
        "hash of the data": lineage.shards,
    }
    with whole_file(folder / CARD, "w") as file:
        file.write(card(source, rows))


def push(folder: Path, repository: str, *, public: bool) -> str:
    """
    Upload a folder to the Hugging Face Hub as OWNER/NAME, private unless `public`. Returns its address. The token is
    that of HF_TOKEN or of `hf auth login`. Raises UnreachableError where the hub refuses it or does not answer.
    """
    api = HfApi()
    failures: tuple[type[Exception], ...] = (*locate.transport_errors(HfHubHTTPError), HFValidationError, OSError)
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        if not public and not api.repo_info(repository).private:
            hint = "Add --public, make the repository private, or give another name."
            raise UnreachableError("is public, and was there before", where=f"hub:{repository}", hint=hint)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export from Bloomery")
    except failures as error:
        hint = "Check the network. Set HF_TOKEN to a token with write access, or log in: hf auth login"
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnreachableError(f"was not uploaded: {first}", where=f"hub:{repository}", hint=hint) from None
    return str(address)


def _said_otherwise(loaded: Loaded) -> tuple[Transformer, Mapping[str, Tensor]]:
    """The same computation in a shape that others have, and its weights."""
    config = architectures.exported(loaded.model.config)
    if config == loaded.model.config and not config.normalize_head:
        return loaded.model, loaded.weights
    other = on_meta(config, loaded.model.vocab_size)
    return other.eval(), _OtherWeights(own_weights(other), loaded.weights, loaded.model.config.normalize_head)


@dataclass(frozen=True)
class _OtherWeights(Mapping[str, Tensor]):
    """
    Weights in the form that the target has: norms without weights get weights of 1, and biases of 0. Rows of a head
    that is normalized get length 1.
    """

    shapes: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    normalizes_head: bool

    def __getitem__(self, name: str) -> Tensor:
        if name == TABLES[1] and self.normalizes_head:
            return F.normalize(self.weights[name].float())
        if name in self.weights:
            return self.weights[name]
        return torch.full(self.shapes[name].shape, 0.0 if name.endswith("bias") else 1.0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def read(source: Path, tokenizer: Path | None = None) -> Loaded:
    """
    A model to import: a folder as transformers saves it, a GGUF file, hub:OWNER/NAME, or weights that PyTorch pickled,
    each in its own number format, and left in its files. Checkpoints of 1386.ai and model files of llm.c have their
    tokenizer in the same folder, or it is named; the latter become float32. Raises CheckpointError and DataError, which
    say what cannot be read and why.
    """
    is_made_first = is_of_hub(source) or pickled.is_named(source)
    lacks_tokenizer = pickled.needs_tokenizer(source) and source.is_file()
    path = locate.locate_model(source) if is_made_first and not lacks_tokenizer else source
    if lacks_tokenizer:
        path = pickled.converted(source, tokenizer)
    if path.is_dir() or path.suffix == GGUF_SUFFIX:
        if tokenizer is not None and not lacks_tokenizer:
            hint = "Remove --tokenizer: the model has its own."
            raise CheckpointError("has its own tokenizer", where=str(source), hint=hint)
        return hf.streamed(path, "auto")
    safetensors.verify(source.parent, source.name)
    source_model = llmc.read(source)
    file = tokenizer or _beside(source)
    safetensors.verify(file.parent, file.name)
    new_tokenizer, added = hf.tokenizer_of(file, source_model.vocab_size)
    _of_one_size(source, source_model.vocab_size, file, new_tokenizer.vocab_size - len(added))
    model = Transformer(source_model.config, max(source_model.vocab_size, new_tokenizer.vocab_size))
    weights = model.state_dict()
    with torch.no_grad():
        for name, weight in source_model.weights.items():
            weights[name][: len(weight)].copy_(weight)
    end = new_tokenizer.document_id
    add_rows(model, source_model.vocab_size, added, {} if end in added.values() else {"eos_token_id": end})
    lineage = Lineage(tokenizer=new_tokenizer.hash, template=None, shards=hf.IMPORTED)
    return Loaded(model.eval(), ModelLanguage.ours(Renderer(new_tokenizer)), lineage, source)


def _of_one_size(source: Path, rows: int, file: Path, ids: int) -> None:
    """A tokenizer has as many token IDs as the model, before special tokens are added. Some tables are padded to 64."""
    if rows == ids or (rows % 64 == 0 and 0 < rows - ids < llmc.PADDED_TO):
        return
    hint = "Give the tokenizer that the model was trained with: bloomery import MODEL.bin OUT --tokenizer FILE"
    raise CheckpointError(f"has {rows:,} token IDs, but the tokenizer {file} has {ids:,}", where=str(source), hint=hint)


def take_in(source: Path, out: Path, tokenizer: Path | None = None) -> dict[str, Any]:
    """
    Make a model folder of what `read` reads, in the number format of its matrices: float32 if they have several. Raises
    RunError where `out` has files in it.
    """
    check_new_folder(out)  # before anything is read
    loaded = read(source, tokenizer)
    formats = {loaded.weights[TABLES[0]].dtype}
    if isinstance(loaded.stored, StoredWeights):
        formats = loaded.stored.matrix_formats()
    widest = formats.pop() if len(formats) == 1 else torch.float32  # which holds all others
    number_format: NumberFormat = str(widest).removeprefix("torch.")  # type: ignore[assignment]
    with new_folder(out):
        hf.save(out, loaded.model, loaded.language, loaded.lineage, number_format=number_format, weights=loaded.weights)
        if (path := loaded.folder / CARD).is_file():
            shutil.copyfile(path, out / CARD)  # it states the license
    parameters = sum(weight.numel() for weight in loaded.model.parameters())
    name = architectures.architecture(loaded.model.config).name
    return {
        "architecture": name,
        "parameters": parameters,
        "vocab_size": loaded.model.vocab_size,
        "number_format": number_format,
    }


def _beside(source: Path) -> Path:
    candidates = sorted(source.parent.glob("*tokenizer*.bin"))
    if len(candidates) != 1:
        shown = ", ".join(file.name for file in candidates) or "none"
        hint = "Give the tokenizer: bloomery import MODEL.bin OUT --tokenizer FILE"
        raise CheckpointError(
            f"needs one *tokenizer*.bin in its folder, which has {shown}", where=str(source), hint=hint
        )
    return candidates[0]
