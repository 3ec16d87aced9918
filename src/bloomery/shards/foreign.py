"""
Token files that others made, so that they can be trained on: each gets an index, and a name as ours have.

    llm.c      *train*.bin, *val*.bin        header, tokens; nanoGPT's speed runs have the same
    nanoGPT    train.bin, val.bin            tokens alone
    1386       train_0000.bin, train_mask_0000.bin, val_0000.bin, meta.yaml     rows of tokens alone, masks beside

Documents are found by the token that stands between them. What has a header is linked, and copied where that cannot be;
what has none is written anew.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bloomery.core.errors import DataError
from bloomery.core.files import canonical, disk_errors, sha256_bytes, sync_folder
from bloomery.shards import format
from bloomery.shards.format import Tokens
from bloomery.tokenizer.tokenizer import SPECIAL, Tokenizer

META = "meta.yaml"
SPLITS = ("train", "val")
BLOCK_TOKENS = 2**24
EDGE_BYTES = 2**16

Headerless = Literal["uint16", "uint32"]


@dataclass(frozen=True)
class Source:
    """A token file of others."""

    path: Path
    tokens: Tokens
    mask: NDArray[np.uint8] | None = None
    row_tokens: int | None = None
    """Of one that is made of rows."""
    has_header: bool = True


@dataclass(frozen=True)
class Meaning:
    """What the ids of the files mean."""

    tokenizer_hash: str
    vocab_size: int
    document_id: int
    """The token that stands between documents."""


def adopt(
    folder: Path,
    out: Path,
    tokenizer: Tokenizer,
    *,
    document_id: int | None = None,
    headerless: Headerless | None = None,
) -> dict[str, Any]:
    """
    Make shards in `out` of the token files in `folder`. Returns what the stage `shard` reports.

    `document_id` is the token between documents, by default the tokenizer's. `headerless` says what the numbers are
    in files that do not say it. Raises DataError, which names the file, for what is torn, is something else, or has
    ids that the tokenizer does not have.
    """
    meaning = Meaning(
        tokenizer.hash, tokenizer.vocab_size, tokenizer.document_id if document_id is None else document_id
    )
    found = find(folder, tokenizer, headerless)
    counts: dict[str, tuple[int, int]] = {}
    for split, sources in found.items():
        indexes = [
            _take(source, out / f"{split}-{number:05d}", meaning, {"shard": number, "shards": len(sources)})
            for number, source in enumerate(sources)
        ]
        counts[split] = (sum(one["tokens"] for one in indexes), sum(one["documents"] for one in indexes))
        if counts[split][1] == len(sources) and all(one.tokens[0] != meaning.document_id for one in sources):
            what = f"the token {meaning.document_id}, which shall stand between documents, is nowhere in {split}"
            cure = "Say which one does (document_id), or use the tokenizer that the files were made with."
            raise DataError(what, where=str(folder), cure=cure)
    return {
        "tokens": counts["train"][0],
        "documents": counts["train"][1],
        "held_out_tokens": counts["val"][0],
        "held_out_documents": counts["val"][1],
        "tokenizer": tokenizer.hash,
        "files": {split: [source.path.name for source in sources] for split, sources in found.items()},
    }


def digest(folder: Path) -> str:
    """A hash of names, sizes, and first and last bytes of the files that `adopt` reads. Raises DataError."""
    facts = []
    for file in [*_binaries(folder), *([folder / META] if (folder / META).is_file() else [])]:
        with file.open("rb") as opened:
            first = opened.read(EDGE_BYTES)
            opened.seek(max(0, file.stat().st_size - EDGE_BYTES))
            facts.append([file.name, file.stat().st_size, sha256_bytes(first + opened.read(EDGE_BYTES))])
    return sha256_bytes(canonical(facts))


def find(folder: Path, tokenizer: Tokenizer, headerless: Headerless | None = None) -> dict[str, list[Source]]:
    """The files of each split, in the order of their names. Raises DataError where a split has none."""
    binaries = _binaries(folder)
    if (folder / META).is_file():
        found = _rows(folder, tokenizer)
    else:
        found = {split: [] for split in SPLITS}
        for file in binaries:
            named = [split for split in SPLITS if split in file.stem.lower()]
            if len(named) != 1:
                what = "is named neither as for training nor as for validation"
                raise DataError(what, where=str(file), cure="Put train or val into its name, or take it away.")
            found[named[0]].append(_source(file, headerless))
    if lacking := [split for split in SPLITS if not found[split]]:
        cure = "Both training and validation need one, as fineweb_train_000001.bin and fineweb_val_000000.bin."
        raise DataError(f"holds no file for {lacking[0]}", where=str(folder), cure=cure)
    return found


def _binaries(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.bin"))
    if not found:
        raise DataError("holds no .bin files", where=str(folder), cure="Name a folder of token files.")
    return found


def _source(file: Path, headerless: Headerless | None) -> Source:
    if headerless is None:
        return Source(file, format.read_tokens(file))
    return Source(file, _bare(file, np.dtype(headerless).newbyteorder("<")), has_header=False)


def _bare(file: Path, kind: Any) -> Tokens:
    """The numbers of a file that holds nothing else, memory-mapped."""
    size = file.stat().st_size
    if size == 0 or size % kind.itemsize:
        what = f"has {size} bytes, which is no number of tokens of {kind.itemsize} bytes"
        raise DataError(what, where=str(file), cure=_AGAIN)
    with file.open("rb") as opened:
        head = np.frombuffer(opened.read(4), dtype="<i4")
    if len(head) and int(head[0]) in (*format.OTHERS, *(magic for magic, *_ in format.KINDS.values())):
        raise DataError(f"begins with {head[0]}: it has a header", where=str(file), cure="Leave headerless out.")
    return np.memmap(file, dtype=kind, mode="r")


_AGAIN = "It is damaged. Make it or fetch it again."


# --- rows of 1386 --------------------------------------------------------------------------------------------------


def _rows(folder: Path, tokenizer: Tokenizer) -> dict[str, list[Source]]:
    meta = read_meta(folder / META)
    _same_vocabulary(meta, folder / META, tokenizer)
    kind = np.dtype(str(meta["dtype"])).newbyteorder("<")
    row = int(meta["pack_len"] or 0)
    found: dict[str, list[Source]] = {}
    for split in SPLITS:
        sources = []
        for file in sorted(folder.glob(f"{split}_*.bin")):
            if file.stem.startswith(f"{split}_mask_"):
                continue
            tokens = _bare(file, kind)
            if len(tokens) % row:
                what = f"holds {len(tokens)} tokens, which are no rows of {row}"
                raise DataError(what, where=str(file), cure=_AGAIN)
            mask = None
            if meta.get("has_loss_mask"):
                mask = format.read_mask(file.with_name(file.name.replace(f"{split}_", f"{split}_mask_")), len(tokens))
            sources.append(Source(file, tokens, mask, row, has_header=False))
        rows = sum(len(source.tokens) for source in sources) // row
        if (said := meta.get(f"n_{split}_sequences", rows)) != rows:
            what = f"says {said} rows for {split}, and there are {rows}"
            raise DataError(what, where=str(folder / META), cure="A file is missing, or one is of another corpus.")
        found[split] = sources
    return found


def _same_vocabulary(meta: Mapping[str, Any], file: Path, tokenizer: Tokenizer) -> None:
    """Ours may have more ids by the special tokens that conversations need, and by no others."""
    size = int(meta["vocab_size"] or 0)
    if not size <= tokenizer.vocab_size <= size + len(SPECIAL):
        what = f"the files have a vocabulary of {size}, and this tokenizer has {tokenizer.vocab_size} ids"
        cure = f"They were made with the tokenizer {meta.get('tokenizer')!r}: import that one."
        raise DataError(what, where=str(file), cure=cure)


def read_meta(file: Path) -> dict[str, int | bool | str | None]:
    """
    The plain `key: value` lines of a meta.yaml; what is nested below a key is left out. Raises DataError for a line
    of any other form, and where something is missing that says how to read the rows.
    """
    facts: dict[str, int | bool | str | None] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line[0] in " \t-":
            continue
        key, colon, value = line.partition(":")
        if not colon or not key.isidentifier() or value[:1] not in ("", " ") or key in facts:
            cure = "Only lines of the form `key: value` are read."
            raise DataError(f"{line!r} is no key and value", where=f"{file}:{number}", cure=cure)
        facts[key] = _scalar(value.strip())
    for name in ("pack_len", "vocab_size"):
        if type(facts.get(name)) is not int or int(str(facts[name])) < 1:
            raise DataError(f"{name} is {facts.get(name)!r}, not a number", where=str(file), cure=_META)
    if facts.get("dtype") not in ("uint16", "uint32"):
        raise DataError(f"dtype is {facts.get('dtype')!r}, not uint16 or uint32", where=str(file), cure=_META)
    return facts


_META = "meta.yaml says how the rows beside it are read: pack_len, vocab_size and dtype."


def _scalar(text: str) -> int | bool | str | None:
    words: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if text.lstrip("-").isdecimal():
        return int(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


# --- taking them in ------------------------------------------------------------------------------------------------


def _take(source: Source, path: Path, meaning: Meaning, place: Mapping[str, int]) -> dict[str, Any]:
    """Write PATH.bin and its index. Returns the index."""
    facts: dict[str, Any] = {"document_id": meaning.document_id, "source": source.path.name, **place}
    known: dict[str, Any] = {"vocab_size": meaning.vocab_size, "tokenizer_hash": meaning.tokenizer_hash}
    if source.has_header:
        starts = [begins + number * BLOCK_TOKENS for number, (_, begins) in enumerate(_pieces(source, meaning))]
        _link(source.path, path.with_name(path.name + ".bin"))
        return format.vouch(path, starts, facts=facts, **known)
    rows = {} if source.row_tokens is None else {"row_tokens": source.row_tokens}
    return format.write_pieces(
        path,
        _pieces(source, meaning),
        num_tokens=len(source.tokens),
        layout="rows" if rows else "stream",
        mask=source.mask,
        facts=facts | rows,
        **known,
    )


def _pieces(source: Source, meaning: Meaning) -> Iterator[tuple[Tokens, NDArray[np.int64]]]:
    """
    The tokens of a file in blocks, and where documents begin in each. A file may begin in the midst of one. Raises
    DataError where an id is not the tokenizer's.
    """
    where = str(source.path)
    if source.tokens.dtype.itemsize == 2 and meaning.vocab_size > 2**16:
        what = f"has two bytes a token, too few for the {meaning.vocab_size:,} ids of this tokenizer"
        raise DataError(what, where=where, cure=_TOKENIZER)
    for first in range(0, len(source.tokens), BLOCK_TOKENS):
        block = source.tokens[first : first + BLOCK_TOKENS]
        if (highest := int(block.max())) >= meaning.vocab_size:
            what = (
                f"token {first + int(block.argmax()):,} is {highest}, outside of a vocabulary of {meaning.vocab_size}"
            )
            raise DataError(what, where=where, cure=_TOKENIZER)
        begins = np.flatnonzero(block == meaning.document_id)
        if first == 0 and (len(begins) == 0 or begins[0] != 0):
            begins = np.concatenate([[0], begins])
        yield block, begins.astype(np.int64)


_TOKENIZER = "Use the tokenizer that the file was made with."


def _link(source: Path, target: Path) -> None:
    """The file under another name; a copy where the file system cannot do that."""
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source.resolve(), target)
        except OSError:
            partial = target.with_name(target.name + ".partial")
            shutil.copyfile(source, partial)
            partial.replace(target)
        sync_folder(target.parent)
