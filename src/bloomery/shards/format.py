"""
Token files in the layout of llm.c, each with a JSON index; for conversations also a file of loss masks.

    NAME.bin       256 int32 (magic, version, number of tokens), then the tokens, little-endian
                   20240520 / 1 for uint16, 20240801 / 7 for uint32
    NAME.mask      one byte a token: 1 where the token is to be learned
    NAME.json      tokens, bounds of documents, tokenizer hash, sha256 of the files, and how samples are cut

llm.c, modded-nanogpt and this project read each other's files. The index is written last: without it a shard is not
there.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from bloomery.core.errors import DataError
from bloomery.core.io import sha256_bytes, sha256_file, whole_file
from bloomery.core.records import Count, NameInside, read_record

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MOST_TOKENS = 2**31 - 1
"""Of a file: its header counts them as an int32."""
EDGE_BYTES = 2**16
STARTS_AT_ONCE = 10_000
KINDS: dict[int, tuple[int, int, Any]] = {2: (20240520, 1, np.dtype("<u2")), 4: (20240801, 7, np.dtype("<u4"))}
OTHERS = {
    20240326: "a GPT-2 model of llm.c, not a token file",
    20240327: "a debug state of llm.c, not a token file",
    20240328: "a tokenizer of llm.c, not a token file",
    20240522: "an evaluation file of llm.c, not a token file",
    20240527: "a training state of llm.c, not a token file",
    20240803: "a Llama-3 model of llm.c, not a token file",
}
"""What else of llm.c begins with such a header."""

Layout = Literal["stream", "rows"]
"""stream: samples are windows that share one token, the last target and next input. rows: packed, side by side."""


Tokens = NDArray[Any]
"""uint16 or uint32."""


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One token file, memory-mapped."""

    path: Path
    tokens: Tokens
    mask: NDArray[np.uint8] | None
    starts: NDArray[np.int64]
    """Where documents begin: the bounds that masks and positions keep to."""
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
    Write PATH.bin, PATH.mask and PATH.json. `starts` are the positions where documents begin. Returns the index.

    Two bytes per token are used where the vocabulary allows it, four otherwise.
    """
    if mask is not None and len(mask) != len(tokens):
        raise ValueError(f"{len(mask)} marks of a mask for {len(tokens)} tokens")
    return write_pieces(
        path,
        [(tokens, np.asarray(starts, dtype=np.int64))],
        num_tokens=len(tokens),
        vocab_size=vocab_size,
        tokenizer_hash=tokenizer_hash,
        layout=layout,
        mask=mask,
        facts=facts,
    )


def write_pieces(
    path: Path,
    pieces: Iterable[tuple[NDArray[np.integer[Any]], NDArray[np.int64]]],
    *,
    num_tokens: int,
    vocab_size: int,
    tokenizer_hash: str,
    layout: Layout = "stream",
    mask: NDArray[np.uint8] | None = None,
    facts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """
    As `write`, for a shard that comes in pieces: their tokens, and where documents begin in each. Of the tokens only
    one piece has to be in memory. Raises ValueError where they are not `num_tokens`. Returns the index without starts.
    """
    magic, version, kind = KINDS[2 if vocab_size <= 2**16 else 4]
    header = np.zeros(HEADER_INTS, dtype="<i4")
    file, index_file = _named(path, ".bin"), _named(path, ".json")
    if num_tokens > MOST_TOKENS:
        what = f"{num_tokens:,} tokens are more than the header of a token file allows ({MOST_TOKENS:,})"
        raise DataError(what, where=str(file), hint="Lower shard.shard_tokens to write more and smaller shards.")
    header[:3] = magic, version, num_tokens
    index_file.unlink(missing_ok=True)  # an earlier index must not vouch for these files
    digest = hashlib.sha256(header.tobytes())
    starts: list[NDArray[np.int64]] = []
    written = 0
    with whole_file(file) as opened:
        opened.write(header.tobytes())
        for tokens, begins in pieces:
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
                raise ValueError(f"tokens {tokens.min()} to {tokens.max()} are outside the vocabulary of {vocab_size}")
            data = np.ascontiguousarray(tokens, dtype=kind).data
            opened.write(data)
            digest.update(data)
            starts.append(begins + written)
            written += len(tokens)
        if written != num_tokens:
            raise ValueError(f"{written} tokens were given for a shard of {num_tokens}")
    hashes = {file.name: digest.hexdigest()}
    if mask is not None:
        with whole_file(_named(path, ".mask")) as opened:
            opened.write(np.ascontiguousarray(mask, dtype=np.uint8).data)
        hashes[_named(path, ".mask").name] = sha256_file(_named(path, ".mask"))
    known: dict[str, Any] = {
        "vocab_size": vocab_size,
        "tokenizer_hash": tokenizer_hash,
        "layout": layout,
        "facts": facts,
    }
    return _index(path, num_tokens, starts, hashes, **known)


def vouch(
    path: Path,
    starts: Sequence[NDArray[np.int64]],
    *,
    vocab_size: int,
    tokenizer_hash: str,
    facts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the index of a PATH.bin that others made, which is hashed. Returns it without starts. Raises DataError."""
    file = _named(path, ".bin")
    hashes = {file.name: sha256_file(file)}
    known: dict[str, Any] = {"vocab_size": vocab_size, "tokenizer_hash": tokenizer_hash, "facts": facts}
    return _index(path, len(read_tokens(file)), starts, hashes, layout="stream", **known)


def _index(
    path: Path,
    num_tokens: int,
    starts: Sequence[NDArray[np.int64]],
    hashes: dict[str, str],
    *,
    vocab_size: int,
    tokenizer_hash: str,
    layout: str,
    facts: dict[str, Any] | None,
) -> dict[str, Any]:
    index = {
        "tokens": num_tokens,
        "documents": sum(map(len, starts)),
        "layout": layout,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer_hash,
        "sha256": hashes,
        "edges": {name: _edges(path.parent / name) for name in hashes},
        **(facts or {}),
    }
    _write_index(_named(path, ".json"), index, starts)
    return index


def _write_index(file: Path, index: dict[str, Any], starts: Sequence[NDArray[np.int64]]) -> None:
    """JSON, in which the starts come last and in blocks: as Python's integers they would need 16 times their space."""
    with whole_file(file, "w") as opened:
        opened.write(json.dumps(index, indent=1, ensure_ascii=False).removesuffix("\n}") + ',\n "starts": [')
        separator = ""
        for begins in starts:
            for at in range(0, len(begins), STARTS_AT_ONCE):
                opened.write(separator + ",".join(map(str, begins[at : at + STARTS_AT_ONCE].tolist())))
                separator = ","
        opened.write("]\n}\n")


def _named(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _edges(file: Path) -> str:
    """sha256 of a file's first and last bytes: what tells two shards of one size apart at once."""
    with file.open("rb") as opened:
        first = opened.read(EDGE_BYTES)
        opened.seek(max(0, file.stat().st_size - EDGE_BYTES))
        return sha256_bytes(first + opened.read(EDGE_BYTES))


def read(path: Path, *, tokenizer_hash: str | None = None, verify: bool = False) -> TokenFile:
    """
    Map PATH.bin and its mask into memory. Raises DataError, which names the file, if a file is torn or foreign, comes
    from another tokenizer, or has another shard's index. With `verify`, also if its sha256 differs from the index.
    """
    file, index_file, mask_file = (_named(path, ending) for ending in (".bin", ".json", ".mask"))
    index, starts = _read_index(index_file)
    if tokenizer_hash is not None and index["tokenizer"] != tokenizer_hash:
        raise DataError(
            f"was made with tokenizer {index['tokenizer'][:8]}, not {tokenizer_hash[:8]}",
            where=str(file),
            hint="Repeat the stage shard with this tokenizer, or use the tokenizer of the shards.",
        )
    vouched = {*index["sha256"], *index.get("edges", ())}
    if file.name not in vouched or not vouched <= {file.name, mask_file.name}:
        raise DataError(f"is the index of {', '.join(sorted(vouched))}", where=str(index_file), hint=_AGAIN)
    tokens = read_tokens(file)
    if len(tokens) != index["tokens"]:
        raise DataError(
            f"holds {len(tokens)} tokens, but its index says {index['tokens']}", where=str(file), hint=_AGAIN
        )
    mask = read_mask(mask_file, len(tokens)) if mask_file.name in index["sha256"] else None
    for name, expected in index.get("edges", {}).items():
        if _edges(path.parent / name) != expected:
            what = "begins or ends with bytes that differ from its index"
            raise DataError(what, where=str(path.parent / name), hint=_AGAIN)
    if verify:
        from bloomery.core import cache

        for name, expected in index["sha256"].items():
            if cache.changed(path.parent, {name: expected}):
                raise DataError("has a sha256 that differs from its index", where=str(path.parent / name), hint=_AGAIN)
    return TokenFile(path=path, tokens=tokens, mask=mask, starts=starts, index=index)


MAX_INDEX_BYTES = 2**26
"""Of an index without the starts of its documents."""
BYTES_PER_START = 21
"""Of a number of 64 bits and a comma. No document is empty, so there are no more of them than tokens."""


class ShardIndex(TypedDict):
    """What is read of an index. It may hold more."""

    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    layout: Layout
    tokenizer: str
    sha256: dict[NameInside, str]
    edges: NotRequired[dict[NameInside, str]]
    document_id: NotRequired[int | None]
    starts: list[Count]


def _read_index(file: Path) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """An index without its starts, and these."""
    if not file.exists():
        hint = "The shard is incomplete. Run its stage again."
        raise DataError("the shard has no index", where=str(file), hint=hint)
    tokens = file.with_suffix(".bin")
    most = MAX_INDEX_BYTES + BYTES_PER_START * (tokens.stat().st_size // 2 if tokens.is_file() else 0)
    index = dict(read_record(file, ShardIndex, error=DataError, fix=_AGAIN, max_bytes=most))
    starts = np.array(index.pop("starts"), dtype=np.int64)
    edges = np.concatenate((np.zeros(1, np.int64), starts, np.array([index["tokens"]], np.int64)))
    if np.any(edges[1:] < edges[:-1]):
        what = f"is not an index: starts do not rise from 0 up to its {index['tokens']} tokens"
        raise DataError(what, where=str(file), hint=_AGAIN)
    return index, starts


_AGAIN = "The file is damaged. Remove its stage folder and run the recipe again."


def read_tokens(file: Path, *, hint: str = _AGAIN) -> Tokens:
    """
    The tokens of a file in llm.c's layout, memory-mapped, whether or not it has an index. Raises DataError, which for
    a torn one says `hint`.
    """
    size = file.stat().st_size if file.is_file() else -1
    if size < HEADER_BYTES:
        shown = "is missing" if size < 0 else f"has {size} bytes, less than a header of {HEADER_BYTES}"
        raise DataError(shown, where=str(file), hint=hint)
    header = np.fromfile(file, dtype="<i4", count=HEADER_INTS)
    kinds = [kind for magic, version, kind in KINDS.values() if (magic, version) == (header[0], header[1])]
    if not kinds:
        other = OTHERS.get(int(header[0]))
        what = f"begins with {header[0]} and {header[1]}, which is {other or 'no token file'}"
        raise DataError(
            what, where=str(file), hint="Use a file with the header 20240520/1 (uint16) or 20240801/7 (uint32)."
        )
    kind, count = kinds[0], int(header[2])
    if (held := (size - HEADER_BYTES) // kind.itemsize) > MOST_TOKENS:
        what = f"holds {held:,} tokens, more than its header allows ({MOST_TOKENS:,}): it says {count:,}"
        raise DataError(what, where=str(file), hint="Split it into several files.")
    if size != HEADER_BYTES + count * kind.itemsize:
        expected = HEADER_BYTES + count * kind.itemsize
        raise DataError(f"has {size} bytes, but {count} tokens need {expected}", where=str(file), hint=hint)
    return np.memmap(file, dtype=kind, mode="r", offset=HEADER_BYTES) if count else np.zeros(0, dtype=kind)


def read_mask(file: Path, num_tokens: int, *, hint: str = _AGAIN) -> NDArray[np.uint8]:
    """The loss mask of as many tokens, memory-mapped. Raises DataError, which says `hint`."""
    size = file.stat().st_size if file.is_file() else -1
    if size != num_tokens:
        shown = "is missing" if size < 0 else f"masks {size} tokens of {num_tokens}"
        raise DataError(shown, where=str(file), hint=hint)
    return np.memmap(file, dtype=np.uint8, mode="r") if size else np.zeros(0, dtype=np.uint8)


def names(folder: Path, split: str) -> list[Path]:
    """Paths, without ending, of the shards of a split, in order."""
    return sorted(path.with_name(path.stem) for path in folder.glob(f"{split}-*.bin"))
