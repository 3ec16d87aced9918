"""
Token files in the layout of llm.c, each beside a JSON index; for conversations also a file of loss masks.

    NAME.bin       256 int32 (magic, version, number of tokens), then the tokens, little-endian
                   20240520 / 1 for uint16, 20240801 / 7 for uint32
    NAME.mask      one byte a token: 1 where the token is to be learned
    NAME.json      tokens, bounds of documents, tokenizer hash, sha256 of the files, and how samples are cut

llm.c, modded-nanogpt and this project read each other's files. The index is written last: without it a shard is not
there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bloomery.core.errors import DataError
from bloomery.core.files import read_json, sha256_file, whole_file, write_json

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
KINDS: dict[int, tuple[int, int, Any]] = {2: (20240520, 1, np.dtype("<u2")), 4: (20240801, 7, np.dtype("<u4"))}

Layout = Literal["stream", "rows"]
"""stream: samples are windows that share one token, the last target and next input. rows: packed, side by side."""

Tokens = NDArray[Any]
"""uint16 or uint32."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One token file, memory-mapped."""

    path: Path
    tokens: Tokens
    mask: NDArray[np.uint8] | None
    index: dict[str, Any]


def write(
    path: Path,
    tokens: NDArray[np.integer[Any]],
    *,
    vocab_size: int,
    starts: Sequence[int],
    tokenizer_hash: str,
    layout: Layout = "stream",
    mask: NDArray[np.uint8] | None = None,
    facts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """
    Write PATH.bin, PATH.mask and PATH.json. `starts` are the places where documents begin. Returns the index.

    Two bytes a token are used where the vocabulary allows it, four otherwise.
    """
    magic, version, kind = KINDS[2 if vocab_size <= 2**16 else 4]
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"tokens {tokens.min()} to {tokens.max()} are outside of a vocabulary of {vocab_size}")
    if mask is not None and len(mask) != len(tokens):
        raise ValueError(f"{len(mask)} marks of a mask for {len(tokens)} tokens")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = magic, version, len(tokens)
    path.with_suffix(".json").unlink(missing_ok=True)  # an earlier index must not vouch for these files
    with whole_file(path.with_suffix(".bin")) as file:
        file.write(header.tobytes())
        file.write(np.ascontiguousarray(tokens, dtype=kind).data)
    names = [path.with_suffix(".bin").name]
    if mask is not None:
        with whole_file(path.with_suffix(".mask")) as file:
            file.write(np.ascontiguousarray(mask, dtype=np.uint8).data)
        names.append(path.with_suffix(".mask").name)
    index = {
        "tokens": len(tokens),
        "documents": len(starts),
        "layout": layout,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer_hash,
        "sha256": {name: sha256_file(path.parent / name) for name in names},
        **(facts or {}),
        "starts": [int(start) for start in starts],
    }
    write_json(path.with_suffix(".json"), index)
    return index


def read(path: Path, *, tokenizer_hash: str | None = None, verify: bool = False) -> Shard:
    """
    Map PATH.bin and its mask into memory. Raises DataError, which names the file, for one that is torn, foreign or
    made with another tokenizer; with `verify` also for one whose content is not what its index says.
    """
    file = path.with_suffix(".bin")
    try:
        index: dict[str, Any] = read_json(path.with_suffix(".json"))
    except FileNotFoundError:
        cure = "It was not finished. Run its stage again."
        raise DataError("the shard has no index", where=str(path.with_suffix(".json")), cure=cure) from None
    except ValueError as error:
        raise DataError(f"is no index: {error}", where=str(path.with_suffix(".json")), cure=_AGAIN) from None
    if lacking := [key for key in ("tokens", "layout", "tokenizer", "sha256", "starts") if key not in index]:
        raise DataError(f"lacks {', '.join(lacking)}", where=str(path.with_suffix(".json")), cure=_AGAIN)
    if tokenizer_hash is not None and index["tokenizer"] != tokenizer_hash:
        raise DataError(
            f"was made with tokenizer {index['tokenizer'][:8]}, not {tokenizer_hash[:8]}",
            where=str(file),
            cure="Make the shards again with this tokenizer, or use theirs.",
        )
    tokens = read_tokens(file)
    if len(tokens) != index["tokens"]:
        raise DataError(f"holds {len(tokens)} tokens, its index says {index['tokens']}", where=str(file), cure=_AGAIN)
    mask_file = path.with_suffix(".mask")
    mask = read_mask(mask_file, len(tokens)) if mask_file.name in index["sha256"] else None
    if verify:
        for name, expected in index["sha256"].items():
            if sha256_file(path.parent / name) != expected:
                raise DataError("has another sha256 than its index says", where=str(path.parent / name), cure=_AGAIN)
    return Shard(path=path, tokens=tokens, mask=mask, index=index)


_AGAIN = "The file is damaged. Remove its stage's manifest.json and run the recipe again."


def read_tokens(file: Path) -> Tokens:
    """The tokens of a file in llm.c's layout, memory-mapped, whether or not it has an index. Raises DataError."""
    size = file.stat().st_size if file.is_file() else -1
    if size < HEADER_BYTES:
        shown = "is missing" if size < 0 else f"has {size} bytes, less than a header of {HEADER_BYTES}"
        raise DataError(shown, where=str(file), cure=_AGAIN)
    header = np.fromfile(file, dtype="<i4", count=HEADER_INTS)
    found = [kind for magic, version, kind in KINDS.values() if (magic, version) == (header[0], header[1])]
    if not found:
        raise DataError(
            f"begins with {header[0]} and {header[1]}, which is no token file",
            where=str(file),
            cure="Known are 20240520/1 (uint16) and 20240801/7 (uint32).",
        )
    kind, count = found[0], int(header[2])
    if size != HEADER_BYTES + count * kind.itemsize:
        expected = HEADER_BYTES + count * kind.itemsize
        raise DataError(f"has {size} bytes, {count} tokens need {expected}", where=str(file), cure=_AGAIN)
    return np.memmap(file, dtype=kind, mode="r", offset=HEADER_BYTES) if count else np.zeros(0, dtype=kind)


def read_mask(file: Path, num_tokens: int) -> NDArray[np.uint8]:
    """The loss mask of as many tokens, memory-mapped. Raises DataError."""
    size = file.stat().st_size if file.is_file() else -1
    if size != num_tokens:
        shown = "is missing" if size < 0 else f"masks {size} tokens of {num_tokens}"
        raise DataError(shown, where=str(file), cure=_AGAIN)
    return np.memmap(file, dtype=np.uint8, mode="r") if size else np.zeros(0, dtype=np.uint8)


def names(folder: Path, split: str) -> list[Path]:
    """Paths, without ending, of the shards of a split, in order."""
    return sorted(path.with_suffix("") for path in folder.glob(f"{split}-*.bin"))


def concatenate(documents: Iterable[Sequence[int] | Tokens], vocab_size: int) -> tuple[Tokens, list[int]]:
    """Documents end to end, and where each begins."""
    starts: list[int] = []
    pieces: list[Tokens] = []
    place = 0
    kind = np.uint16 if vocab_size <= 2**16 else np.uint32
    for document in documents:
        starts.append(place)
        pieces.append(np.asarray(document, dtype=kind))
        place += len(document)
    return (np.concatenate(pieces) if pieces else np.zeros(0, dtype=kind)), starts
