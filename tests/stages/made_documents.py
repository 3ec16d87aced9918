"""Documents of three domains for the stages tokenizer and shard, and what folders and shards hold."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bloomery.data import documents
from bloomery.data.sources import toy_worlds
from bloomery.shards import format
from tests.tokenizer.made import CODE, ELSEWHERE, small

DOMAINS = {"web": 300, "code": 60, "other": 25}


def text(domain: str, number: int) -> str:
    rng = random.Random(f"{domain} {number}")
    if domain == "web":
        return f"{number}. " + " ".join(toy_worlds.documents(number, rng.randint(1, 4)))
    lines = (CODE if domain == "code" else ELSEWHERE).splitlines(keepends=True)
    return f"# {number}\n" + "".join(rng.choices(lines, k=rng.randint(3, 20)))


ROWS = [
    {"id": f"{domain}/{number}", "text": text(domain, number), "source": "s", "domain": domain}
    for domain, count in DOMAINS.items()
    for number in range(count)
]


def laid_out(folder: Path, rows: Sequence[Mapping[str, str]], parts: int = 1) -> dict[str, Path]:
    """Inputs of both stages: documents, dealt to this many files, and the small tokenizer."""
    (folder / "dedup" / "kept").mkdir(parents=True)
    for number in range(parts):
        with documents.PartWriter(folder / "dedup" / "kept" / f"part-{number:05d}.parquet") as writer:
            writer.write([dict(row) for row in rows[number::parts]])
    small().save(folder / "tokenizer")
    return {"dedup": folder / "dedup", "tokenizer": folder / "tokenizer"}


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of every file."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def documents_of(folder: Path, split: str) -> list[bytes]:
    """The documents of a split as bytes, cut at their opening tokens and nowhere else."""
    found: list[bytes] = []
    for path in format.names(folder, split):
        made = format.read(path, tokenizer_hash=small().hash, verify=True)
        assert made.tokens[0] == small().document_id
        starts = np.flatnonzero(made.tokens == small().document_id).tolist()
        assert starts == made.starts.tolist()
        assert len(starts) == made.index["documents"]
        for start, end in zip(starts, [*starts[1:], len(made.tokens)], strict=True):
            found.append(small().decode_bytes(made.tokens[start + 1 : end].tolist()))
    return found
