"""The stage `tokenizer`: documents -> a tokenizer, trained or imported, with measurements by domain and language."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.core.config import is_of_hub
from bloomery.core.errors import DataError, UnreachableError
from bloomery.core.io import canonical, sha256_bytes, sha256_file
from bloomery.core.log import info
from bloomery.core.pipeline import resolve
from bloomery.data import documents
from bloomery.data.documents import CUT, LARGEST_SHARE, is_held_out
from bloomery.stages.config import check_named_paths
from bloomery.tokenizer import chat_template, importers, train
from bloomery.tokenizer.chat_template import Renderer
from bloomery.tokenizer.config import AnyKind, ByteBpe, Imported, SentencePiece
from bloomery.tokenizer.fast_encode import Encoder
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.tokenizer.train import Sample

VERSION = 2
preflight = check_named_paths

Texts = Mapping[str, Sequence[str]]
"""Documents by domain."""
UNSEEN = 10
"""The unseen sample, which only measures, has one byte for so many of the training sample."""


def external_inputs(config: AnyKind) -> str:
    """A hash of the files that are imported, for the stage's fingerprint; "" where nothing is."""
    if not isinstance(config, Imported):
        return ""
    if _is_of_model(config.path):
        return str(resolve("bloomery.stages.pretrain:digest")(config.path))
    return sha256_bytes(canonical([sha256_file(file) for file in importers.files(config.path)]))


def _is_of_model(path: Path) -> bool:
    """Whether the tokenizer is part of a GGUF file, or lies with a model of a hub, and torch is needed to read it."""
    return path.suffix == ".gguf" or is_of_hub(path)


def vocab_size(config: AnyKind) -> int:
    """The vocabulary size that the section asks for, or states or finds for an imported tokenizer. Raises DataError."""
    if not isinstance(config, Imported):
        return config.vocab_size
    try:
        return _imported(config).vocab_size
    except UnreachableError:
        if config.vocab_size is None:
            raise
        return config.vocab_size


def run(config: AnyKind, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write out/tokenizer.json. Raises DataError where a domain that was asked for has no document, and where the chat
    template that it is made for cannot be written with it.
    """
    if isinstance(config, Imported) and not config.measure:
        tokenizer = _made(config, {})
        tokenizer.save(out)
        facts = {"vocab_size": tokenizer.vocab_size, "hash": tokenizer.hash, "special": _special(tokenizer, config)}
        return {"kind": config.kind, **facts}
    seen, unseen = sample(documents.handed_on(inputs["dedup"]), config)
    texts = seen.texts()
    tokenizer = _made(config, texts)
    tokenizer.save(out)
    encoder = Encoder(tokenizer)
    others = unseen.texts()
    counts = train.used(tokenizer, encoder, texts)
    return {
        "kind": config.kind,
        "vocab_size": tokenizer.vocab_size,
        "hash": tokenizer.hash,
        "special": _special(tokenizer, config),
        "sample": {domain: _taken(seen, domain, some) for domain, some in texts.items()},
        "bytes_per_token": train.bytes_per_token(texts, counts),
        "bytes_per_token_unseen": train.bytes_per_token(others, train.used(tokenizer, encoder, others)),
        "fertility": train.fertility(encoder, texts, config.languages),
        "unused_tokens": train.unused(tokenizer, counts),
        "gpt2": _compared(config.gpt2, others or texts),
        **encoder.facts(),
    }


def sample(folder: Path, config: AnyKind) -> tuple[Sample, Sample]:
    """
    The documents to train on, and others to measure on, which a recipe may use for validation.

    Raises DataError where nothing is left, or nothing of a domain that was asked for.
    """
    weights = {share.domain: share.weight for share in config.weights}
    seen, unseen = Sample(config.sample_bytes, weights), Sample(max(1, config.sample_bytes // UNSEEN), weights)
    for row in documents.read(folder, ["id", "domain", "text"]):
        held = is_held_out(row["text"], LARGEST_SHARE)
        (unseen if held else seen).add(row["domain"], row["id"], row["text"])
    if missing := seen.missing():
        known = ", ".join(sorted(domain for domain, size in seen.seen_bytes.items() if size)) or "none"
        hint = f"Requested domains with documents: {known}. Fetch more documents, or loosen the filter."
        raise DataError(f"no documents of the domain {missing[0]!r} are left", where=str(folder), hint=hint)
    if not seen.seen_bytes and (few := sum(unseen.seen_documents.values())):
        what = f"all of its {few} documents are among the share of {LARGEST_SHARE:g} that no tokenizer is trained on"
        raise DataError(what, where=str(folder), hint=f"Fetch more documents; {CUT}")
    if not seen.seen_bytes:
        raise DataError("no documents are left", where=str(folder), hint="Fetch more documents, or loosen the filter.")
    return seen, unseen


def _made(config: AnyKind, texts: Texts) -> Tokenizer:
    every = (text for some in texts.values() for text in some)
    match config:
        case ByteBpe():
            tokenizer = train.train_byte_level(
                every, config.vocab_size, config.pattern, chat_template.special_tokens(config.chat_template)
            )
        case SentencePiece():
            tokenizer = train.train_sentencepiece(every, config)
        case Imported():
            tokenizer = _imported(config)
    Renderer(tokenizer, chat_template.TEMPLATES[config.chat_template])  # else the error would come after pretraining
    if not isinstance(config, Imported) and tokenizer.vocab_size < config.vocab_size:
        info(f"the text holds only {tokenizer.vocab_size} of {config.vocab_size} ids", style="yellow")
    return tokenizer


def _special(tokenizer: Tokenizer, config: AnyKind) -> dict[str, int | None]:
    return {name: tokenizer.special_id(name) for name in chat_template.special_tokens(config.chat_template)}


def _imported(config: Imported) -> Tokenizer:
    special = chat_template.special_tokens(config.chat_template)
    if _is_of_model(config.path):
        model = resolve("bloomery.weights.locate:locate_model")(config.path.expanduser())
        tokenizer: Tokenizer = resolve("bloomery.weights.hf:tokenizer_of")(
            model, resolve("bloomery.weights.hf:config_of")(model)[1], special
        )[0]
    else:
        tokenizer = importers.load(config.path, config.pattern, special)
    if config.vocab_size not in (None, tokenizer.vocab_size):
        what = f"it has {tokenizer.vocab_size:,} token IDs, but vocab_size is {config.vocab_size:,}"
        raise DataError(what, where=str(config.path), hint=f"Set vocab_size = {tokenizer.vocab_size}, or remove it.")
    return tokenizer


def _taken(seen: Sample, domain: str, some: Sequence[str]) -> dict[str, Any]:
    num_bytes = sum(len(text.encode()) for text in some)
    share = round(num_bytes / seen.seen_bytes[domain], 4)
    return {"bytes": num_bytes, "documents": len(some), "of_documents": seen.seen_documents[domain], "share": share}


def _compared(folder: Path | None, texts: Texts) -> dict[str, Any]:
    """Bytes per token of GPT-2's tokenizer on the same texts; why not, where its files are neither named nor found."""
    if folder is None:
        shared = os.environ.get("BLOOMERY_SHARED")
        folder = Path(shared) / "data" / "tokenizer" if shared else None
        if folder is None or not folder.is_dir():
            return {"compared": False, "because": "tokenizer.gpt2 names no folder with its vocab.bpe and encoder.json"}
    theirs = importers.load(folder)
    counts = train.used(theirs, Encoder(theirs), texts)
    return {"compared": True, "bytes_per_token": train.bytes_per_token(texts, counts)}
