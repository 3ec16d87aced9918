"""The stage `tokenizer`: documents -> a tokenizer, and how well it does by domain."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.core.files import sha256_bytes
from bloomery.core.log import say
from bloomery.data import document
from bloomery.data.holdout import LARGEST_SHARE, is_held_out
from bloomery.stages.config import Vocabulary
from bloomery.tokenizer.train import train


def run(config: Vocabulary, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    folder = document.handed_on(inputs["dedup"])
    texts = sample(folder, config.sample_bytes)
    tokenizer = train((text for domain in sorted(texts) for text in texts[domain]), config.vocab_size)
    if tokenizer.vocab_size < config.vocab_size:
        say(f"the text holds only {tokenizer.vocab_size} of {config.vocab_size} ids", style="yellow")
    tokenizer.save(out)
    ratios = {}
    for domain, some in texts.items():
        ids = sum(map(len, tokenizer.encode_batch(some)))
        ratios[domain] = round(sum(len(text.encode()) for text in some) / max(ids, 1), 3)
    return {"vocab_size": tokenizer.vocab_size, "hash": tokenizer.hash, "bytes_per_token": ratios}


def sample(folder: Path, sample_bytes: int) -> dict[str, list[str]]:
    """
    About `sample_bytes` of text, the same share of every domain (or all that a domain has), documents by hash.

    Documents that a recipe could hold out are left out. Raises DataError where nothing is left.
    """
    sizes: dict[str, int] = defaultdict(int)
    for row in _documents(folder):
        sizes[row["domain"]] += len(row["text"].encode())
    if not sizes:
        raise DataError("no documents are left", where=str(folder), cure="Fetch more, or filter less.")
    keep = _shares(sizes, sample_bytes)
    chosen: dict[str, list[str]] = {domain: [] for domain in sizes}
    for row in _documents(folder):
        if int(sha256_bytes(row["id"].encode())[:8], 16) < keep[row["domain"]] * 2**32:
            chosen[row["domain"]].append(row["text"])
    return chosen


def _shares(sizes: Mapping[str, int], budget: int) -> dict[str, float]:
    """Which share of each domain fills the budget evenly; what small domains leave goes to the larger ones."""
    shares: dict[str, float] = {}
    left, remaining = budget, sorted(sizes, key=lambda domain: sizes[domain])
    while remaining:
        domain = remaining.pop(0)
        part = min(sizes[domain], left // (len(remaining) + 1))
        shares[domain] = part / max(sizes[domain], 1)
        left -= part
    return shares


def _documents(folder: Path) -> Iterator[document.Row]:
    rows = document.read(folder, ["id", "domain", "text"])
    return (row for row in rows if not is_held_out(row["text"], LARGEST_SHARE))
