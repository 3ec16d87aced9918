"""Real documents for slow tests: those that lie beside the project, or generated ones."""

import json
from functools import cache
from itertools import islice

import zstandard

from bloomery.data.sources import toy_worlds
from tests.shared import SHARED

GPT2 = SHARED / "data" / "tokenizer"


@cache
def documents(count: int) -> list[str]:
    """Some of every file; where there are no files, or not enough in them, from the generator."""
    files = sorted((SHARED / "data" / "dev").glob("*.jsonl.zst"))
    found: list[str] = []
    for file in files:
        with file.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            lines = stream.read().decode().split("\n")
        rows = (json.loads(line) for line in lines if line)
        found += islice((row.get("text") or json.dumps(row, ensure_ascii=False) for row in rows), count // len(files))
    return [*found, *toy_worlds.documents(0, count - len(found))]
