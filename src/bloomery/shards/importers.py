"""
Import token files of llm.c, nanoGPT and 1386.ai: add an index and Bloomery's file names.

    llm.c      *train*.bin, *val*.bin        header, tokens; nanoGPT's speed runs have the same
    nanoGPT    train.bin, val.bin            tokens alone
    1386       train_0000.bin, train_mask_0000.bin, val_0000.bin, meta.yaml     rows of tokens alone, masks apart

Documents are found by the token that stands between them. A file with a header is linked, and copied if it cannot
be linked. A file without a header is rewritten. It becomes several shards if it has more tokens than the header
of one shard counts.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bloomery.core import cache
from bloomery.core.errors import DataError, UnreachableError
from bloomery.core.io import canonical, disk_errors, sha256_bytes, sync_folder
from bloomery.core.log import info
from bloomery.shards import format
from bloomery.shards.format import Tokens
from bloomery.tokenizer.chat_template import EVERY_SPECIAL
from bloomery.tokenizer.tokenizer import DOCUMENT, Tokenizer

META = "meta.yaml"
SPLITS = ("train", "val")
BLOCK_TOKENS = 2**24
A_FEW, LOOKED_AT = 4, 2**20
"""Of tokens without a header: how many are too few to tell their size by them, and how many are enough."""

Headerless = Literal["uint16", "uint32"]


@dataclass(frozen=True)
class ForeignTokenFile:
    """A token file that another program wrote."""

    path: Path
    tokens: Tokens
    mask: NDArray[np.uint8] | None = None
    sequence_length: int | None = None
    """Of one that is made of rows."""
    has_header: bool = True


@dataclass(frozen=True)
class Meaning:
    """What the token IDs in the files mean."""

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
    tokenizer_file: str = "",
) -> dict[str, Any]:
    """
    Make shards in `out` from the token files in `folder`. Returns the report of the stage `shard`.

    `document_id` is the token between documents, by default the tokenizer's. `headerless` gives the number format of
    files without a header. `tokenizer_file` names the file that the tokenizer was imported from. Raises DataError,
    which names the file, if a file is torn or of another kind, contradicts its metadata, or has token IDs that the
    tokenizer lacks.
    """
    meaning = Meaning(
        tokenizer.hash, tokenizer.vocab_size, tokenizer.document_id if document_id is None else document_id
    )
    by_split = find(folder, tokenizer, headerless, tokenizer_file)
    counts: dict[str, tuple[int, int]] = {}
    for split, files in by_split.items():
        sources = [part for file in files for part in _parts(file)]
        indexes = [
            _take(source, out / f"{split}-{number:05d}", meaning, {"shard": number, "shards": len(sources)})
            for number, source in enumerate(sources)
        ]
        counts[split] = (sum(one["tokens"] for one in indexes), sum(one["documents"] for one in indexes))
        if not (filled := [one for one in sources if len(one.tokens)]):
            raise DataError(f"holds no tokens for {split}", where=str(folder), hint=_AGAIN)
        if counts[split][1] == len(filled) and all(one.tokens[0] != meaning.document_id for one in filled):
            what = f"the token {meaning.document_id}, which should separate documents, does not occur in {split}"
            hint = "Set document_id to the separator, or use the tokenizer that made the files."
            raise DataError(what, where=str(folder), hint=hint)
    return {
        "tokens": counts["train"][0],
        "documents": counts["train"][1],
        "held_out_tokens": counts["val"][0],
        "held_out_documents": counts["val"][1],
        "tokenizer": tokenizer.hash,
        "files": {split: [source.path.name for source in sources] for split, sources in by_split.items()},
    }


def digest(folder: Path) -> str:
    """A hash of names and contents of the files that `adopt` reads. Raises DataError."""
    files = [*_binaries(folder), *([folder / META] if (folder / META).is_file() else [])]
    return sha256_bytes(canonical([[file.name, cache.sha256_of(file)] for file in files]))


def find(
    folder: Path, tokenizer: Tokenizer, headerless: Headerless | None = None, tokenizer_file: str = ""
) -> dict[str, list[ForeignTokenFile]]:
    """The files of each split, in the order of their names. Raises DataError where a split has none."""
    binaries = _binaries(folder)
    if (folder / META).is_file():
        by_split = _rows(folder, tokenizer, tokenizer_file)
    else:
        by_split = {split: [] for split in SPLITS}
        for file in binaries:
            named = [split for split in SPLITS if split in file.stem.lower()]
            if len(named) != 1:
                what = "has neither train nor val in its name"
                raise DataError(what, where=str(file), hint="Add train or val to its name, or remove the file.")
            by_split[named[0]].append(_source(file, headerless))
    if lacking := [split for split in SPLITS if not by_split[split]]:
        hint = "Add one for each split, such as fineweb_train_000001.bin and fineweb_val_000000.bin."
        raise DataError(f"holds no file for {lacking[0]}", where=str(folder), hint=hint)
    return by_split


def _binaries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        hint = "Set shard.imported.folder to the folder of the token files."
        if folder.exists():
            raise DataError("is a file, not a folder", where=str(folder), hint=hint)
        raise UnreachableError("there is no such folder", where=str(folder), hint=hint)
    files = sorted(folder.glob("*.bin"))
    if not files:
        raise DataError("holds no .bin files", where=str(folder), hint="Use a folder of token files.")
    return files


def _source(file: Path, headerless: Headerless | None) -> ForeignTokenFile:
    if headerless is None:
        return ForeignTokenFile(file, format.read_tokens(file, hint=_AGAIN))
    return ForeignTokenFile(file, _bare(file, np.dtype(headerless).newbyteorder("<")), has_header=False)


def _bare(file: Path, kind: Any) -> Tokens:
    """The numbers of a file that holds nothing else, memory-mapped."""
    size = file.stat().st_size
    if size == 0 or size % kind.itemsize:
        what = f"has {size} bytes, not a multiple of {kind.itemsize} bytes per token"
        raise DataError(what, where=str(file), hint=_AGAIN)
    with file.open("rb") as opened:
        head = int.from_bytes(opened.read(4), "little")
    if head in (*format.OTHERS, *(magic for magic, *_ in format.KINDS.values())):
        raise DataError(f"begins with {head}: it has a header", where=str(file), hint="Remove headerless.")
    tokens = np.memmap(file, dtype=kind, mode="r")
    first, second = tokens[:LOOKED_AT:2], tokens[1:LOOKED_AT:2]
    if kind.itemsize == 2 and len(second) > A_FEW and first.any() and not second.any():
        what = f"every second token is 0: it has four bytes per token, not {kind.itemsize}"
        raise DataError(what, where=str(file), hint='Set headerless = "uint32", or dtype in meta.yaml.')
    return tokens


_AGAIN = "It is damaged. Make it or fetch it again."


# --- rows of 1386 --------------------------------------------------------------------------------------------------


def _rows(folder: Path, tokenizer: Tokenizer, tokenizer_file: str) -> dict[str, list[ForeignTokenFile]]:
    file = folder / META
    meta = read_meta(file)
    _same_vocabulary(meta, file, tokenizer)
    _same_name(meta, file, tokenizer_file)
    _masks_are_told(meta, folder)
    kind, row = np.dtype(str(meta["dtype"])).newbyteorder("<"), int(meta["pack_len"] or 0)
    by_split = {split: _rows_of(folder, split, kind, row, masked=bool(meta.get("has_loss_mask"))) for split in SPLITS}
    for split, sources in by_split.items():
        there = {
            f"n_{split}_shards": len(sources),
            f"n_{split}_sequences": sum(len(source.tokens) for source in sources) // row,
        }
        for name, number in there.items():
            if (said := meta.get(name)) not in (None, number):
                what = f"says {name}: {said!r}, but there are {number}"
                raise DataError(what, where=str(file), hint="Add the missing files, or remove files of another corpus.")
    return by_split


def _rows_of(folder: Path, split: str, kind: Any, row: int, *, masked: bool) -> list[ForeignTokenFile]:
    sources = []
    for file in sorted(folder.glob(f"{split}_*.bin")):
        if file.stem.startswith(f"{split}_mask_"):
            continue
        tokens = _bare(file, kind)
        if len(tokens) % row:
            what = f"holds {len(tokens)} tokens, not a multiple of {row} a row"
            raise DataError(what, where=str(file), hint=_AGAIN)
        mask = file.with_name(file.name.replace(f"{split}_", f"{split}_mask_"))
        marks = format.read_mask(mask, len(tokens), hint=_AGAIN) if masked else None
        sources.append(ForeignTokenFile(file, tokens, marks, row, has_header=False))
    return sources


def _same_vocabulary(meta: Mapping[str, Any], file: Path, tokenizer: Tokenizer) -> None:
    """Our tokenizer may have more token IDs only by the special tokens that the import added."""
    size = int(meta["vocab_size"] or 0)
    if size not in _own_sizes(tokenizer):
        what = f"the files have a vocabulary of {size}, but this tokenizer has {tokenizer.vocab_size} token IDs"
        hint = f"Import the tokenizer that made them: {meta.get('tokenizer')!r}."
        raise DataError(what, where=str(file), hint=hint)


def _own_sizes(tokenizer: Tokenizer) -> set[int]:
    """
    The vocabulary sizes that a tokenizer may have had before special tokens were added: without the special tokens at
    its end that its model lacks, with all of them, or with only the first, if that token ends texts.
    """
    ours = {tokenizer.special_id(name) for name in EVERY_SPECIAL if name not in tokenizer.spec["model"]["vocab"]}
    first = tokenizer.vocab_size
    while first - 1 in ours:
        first -= 1
    return {first, tokenizer.vocab_size} | ({first + 1} if first == tokenizer.special[DOCUMENT] else set())


def _same_name(meta: Mapping[str, Any], file: Path, tokenizer_file: str) -> None:
    """Names of files are compared where both are of one kind: x.model and y.model are two tokenizers."""
    stated = meta.get("tokenizer")
    theirs, ours = Path(str(stated or "")), Path(tokenizer_file)
    if not theirs.suffix or theirs.suffix != ours.suffix:
        named = f"names the tokenizer {stated!r}" if stated else "names no tokenizer"
        own = f"{ours.name!r}" if tokenizer_file else "no imported file"
        info(f"shard: {file} {named}, and this run's is of {own}: only the number of token IDs was compared", "yellow")
    elif theirs.name != ours.name:
        hint = f"Import {theirs.name}. If {ours.name} is the same, rename it."
        what = f"the rows were made with the tokenizer {theirs.name!r}, but this run has {ours.name!r}"
        raise DataError(what, where=str(file), hint=hint)


def _masks_are_told(meta: Mapping[str, Any], folder: Path) -> None:
    """A mask that is not read would have prompts learned."""
    said = meta.get("has_loss_mask")
    there = [mask for split in SPLITS for mask in sorted(folder.glob(f"{split}_mask_*.bin"))]
    if there and not said:
        what = f"{'lacks has_loss_mask' if said is None else 'says has_loss_mask: false'}, but {there[0].name} exists"
        hint = "Write has_loss_mask: true. If all tokens are in the loss, remove the mask files instead."
        raise DataError(what, where=str(folder / META), hint=hint)


def read_meta(file: Path) -> dict[str, int | bool | str | None]:
    """
    The plain `key: value` lines of a meta.yaml; what is nested below a key is left out. Raises DataError for a line
    of any other form, and where something is missing or contradicts itself that says how to read the rows.
    """
    facts: dict[str, int | bool | str | None] = {}
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8: {error}", where=str(file), hint=_AGAIN) from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line[0] in " \t-":
            continue
        key, colon, value = line.partition(":")
        if not colon or not key.isidentifier() or value[:1] not in ("", " ") or key in facts:
            hint = "Write each line as `key: value`."
            raise DataError(f"{line!r} is not a key and a value", where=f"{file}:{number}", hint=hint)
        facts[key] = _scalar(value.strip())
    for name in ("pack_len", "vocab_size"):
        if type(facts.get(name)) is not int or int(str(facts[name])) < 1:
            raise DataError(f"{name} is {facts.get(name)!r}, not a number", where=str(file), hint=_META)
    if facts.get("dtype") not in ("uint16", "uint32"):
        raise DataError(f"dtype is {facts.get('dtype')!r}, not uint16 or uint32", where=str(file), hint=_META)
    if not isinstance(masked := facts.get("has_loss_mask"), bool | None):
        raise DataError(f"has_loss_mask is {masked!r}, not true or false", where=str(file), hint=_META)
    if (read := facts.get("seq_len")) not in (None, int(str(facts["pack_len"])) - 1):
        what = f"seq_len is {read!r}, but pack_len is {facts['pack_len']}, not one more"
        raise DataError(what, where=str(file), hint="Correct the wrong value, or pack the rows again.")
    return facts


_META = "meta.yaml says how the rows in its folder are read: pack_len, vocab_size, dtype and has_loss_mask."


def _scalar(text: str) -> int | bool | str | None:
    """A value without its comment; a number also where it is quoted."""
    if quoted := re.fullmatch(r"""(['"])(.*?)\1(\s+#.*)?""", text):
        return int(quoted[2]) if quoted[2].isdecimal() else quoted[2]
    text = re.sub(r"(^|\s+)#.*", "", text)
    words: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return text


# --- taking them in ------------------------------------------------------------------------------------------------


def _parts(source: ForeignTokenFile) -> Iterator[ForeignTokenFile]:
    """A file as shards: one, but for tokens without a header that are more than ours counts. Rows stay whole."""
    most = format.MOST_TOKENS - format.MOST_TOKENS % (source.sequence_length or 1)
    if len(source.tokens) <= most:
        yield source
        return
    for first in range(0, len(source.tokens), most):
        mask = None if source.mask is None else source.mask[first : first + most]
        yield replace(source, tokens=source.tokens[first : first + most], mask=mask)


def _take(source: ForeignTokenFile, path: Path, meaning: Meaning, numbering: Mapping[str, int]) -> dict[str, Any]:
    """Write PATH.bin and its index. Returns the index."""
    facts: dict[str, Any] = {"document_id": meaning.document_id, "source": source.path.name, **numbering}
    known: dict[str, Any] = {"vocab_size": meaning.vocab_size, "tokenizer_hash": meaning.tokenizer_hash}
    if source.has_header:
        starts = [begins + number * BLOCK_TOKENS for number, (_, begins) in enumerate(_pieces(source, meaning))]
        _link(source.path, path.with_name(path.name + ".bin"))
        return format.vouch(path, starts, facts=facts, **known)
    rows = {} if source.sequence_length is None else {"row_tokens": source.sequence_length}
    return format.write_pieces(
        path,
        _pieces(source, meaning),
        num_tokens=len(source.tokens),
        layout="rows" if rows else "stream",
        mask=source.mask,
        facts=facts | rows,
        **known,
    )


def _pieces(source: ForeignTokenFile, meaning: Meaning) -> Iterator[tuple[Tokens, NDArray[np.int64]]]:
    """
    The tokens of a file in blocks, and where documents begin in each. A file may begin in the midst of one. Raises
    DataError where an id is not the tokenizer's.
    """
    where = str(source.path)
    if source.tokens.dtype.itemsize == 2 and meaning.vocab_size > 2**16:
        what = f"has two bytes per token, too few for this tokenizer's {meaning.vocab_size:,} token IDs"
        raise DataError(what, where=where, hint=_TOKENIZER)
    for first in range(0, len(source.tokens), BLOCK_TOKENS):
        block = source.tokens[first : first + BLOCK_TOKENS]
        if (highest := int(block.max())) >= meaning.vocab_size:
            what = f"token {first + int(block.argmax()):,} is {highest}, outside the vocabulary of {meaning.vocab_size}"
            raise DataError(what, where=where, hint=_TOKENIZER)
        begins = np.flatnonzero(block == meaning.document_id)
        if first == 0 and (len(begins) == 0 or begins[0] != 0):
            begins = np.concatenate([[0], begins])
        yield block, begins.astype(np.int64)


_TOKENIZER = "Use the tokenizer that made the file."


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
