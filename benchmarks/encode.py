"""
How fast is text encoded on one core, and are the ids those of `tokenizers`?

    python benchmarks/encode.py [--json] [--quick] [--data FOLDER] [--documents N] [--kind sentencepiece]

Trains a tokenizer, saves it, and encodes the same documents with our encoder and with the saved tokenizer.json as
`tokenizers` reads it, in turns, both held to one thread. All ids are compared, also with those that `transformers`
gives for the saved file, where that is installed. FOLDER holds *.jsonl.zst files with `text`, searched through (by
default $BLOOMERY_SHARED or ../shared). Without one, and to fill up, documents come from the standard library and the
generator. --quick takes 3,000 documents and a small vocabulary.
"""

import os

os.environ["RAYON_NUM_THREADS"] = "1"  # read when `tokenizers` first works
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import tokenizers
from stand_in import PLACE

from bloomery.core.pipeline import machine, versions
from bloomery.data.sources import local, toy_worlds
from bloomery.tokenizer import train as tokenizer_train
from bloomery.tokenizer.config import SentencePiece
from bloomery.tokenizer.fast_encode import Encoder
from bloomery.tokenizer.tokenizer import FILE
from bloomery.tokenizer.train import train_byte_level

ROOT = Path(__file__).parents[1]
ROUNDS = 3
BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=PLACE)
    parser.add_argument("--documents", type=int)
    parser.add_argument("--kind", choices=("byte_bpe", "sentencepiece"), default="byte_bpe")
    options = parser.parse_args()
    count = options.documents or (3_000 if options.quick else 100_000)
    texts = list(islice(documents(options.data, count), count))
    print(json.dumps(result(texts, 4096 if options.quick else 32_768, options)))


def documents(folder: Path, count: int) -> Iterator[str]:
    """Documents of every file in turn, then generated ones and the standard library's."""
    files = sorted(folder.rglob("*.jsonl.zst")) if folder.name else []
    streams = [islice(_jsonl(file), count // len(files) if count < 50_000 else None) for file in files]
    library = local.StandardLibrary(name="library", domain="code", subset="code")
    code = (item["text"] for item in local.read(library) if isinstance(item, dict))
    return chain(*streams, code, toy_worlds.documents(0, count))


def _jsonl(file: Path) -> Iterator[str]:
    source = local.Jsonl(name="file", domain="text", path=file, invalid="skip")
    return (item["text"] for item in local.read(source) if isinstance(item, dict))


def result(texts: list[str], vocab_size: int, options: argparse.Namespace) -> dict[str, Any]:
    sample = texts[:: max(1, len(texts) // 6000)]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    if options.kind == "byte_bpe":
        tokenizer = train_byte_level(sample, vocab_size)
    else:
        tokenizer = tokenizer_train.train_sentencepiece(sample, SentencePiece(vocab_size=vocab_size))
    began = time.process_time()
    encoder = Encoder(tokenizer)
    encoder.encode_batch(texts[:BATCH])  # the first texts are checked, which belongs to the start
    startup = time.process_time() - began
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        exported = tokenizers.Tokenizer.from_file(str(Path(folder) / FILE))
        in_transformers = elsewhere(Path(folder), texts, encoder)
    exported.encode_special_tokens = True
    batches = [texts[at : at + BATCH] for at in range(0, len(texts), BATCH)]
    ours, theirs, different = [], [], 0
    for _ in range(1 if options.quick else ROUNDS):
        seconds = [0.0, 0.0]
        different = 0
        for batch in batches:
            began = time.process_time()
            quick = encoder.encode_batch(batch)
            middle = time.process_time()
            slow = [coded.ids for coded in exported.encode_batch_fast(batch, add_special_tokens=False)]
            seconds[0] += middle - began
            seconds[1] += time.process_time() - middle
            different += sum(one.tolist() != other for one, other in zip(quick, slow, strict=True))
        ours.append(megabytes / seconds[0])
        theirs.append(megabytes / seconds[1])
        if not options.json:
            print(f"{ours[-1]:.2f} MB/s, tokenizers {theirs[-1]:.2f}; {different} differ", file=sys.stderr)
    best = {"value": round(max(theirs), 3), "unit": "MB/s", "version": version("tokenizers")}
    return {
        "name": "encode",
        "ours": {"value": round(max(ours), 3), "unit": "MB/s"},
        "peers": {"tokenizers": best},
        "ratio_to_best_peer": round(max(ours) / max(theirs), 3),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions() | {"tiktoken": version("tiktoken")},
        "notes": {
            "quick": options.quick,
            "kind": options.kind,
            "commit": commit(),
            "documents": len(texts),
            "megabytes": round(megabytes, 3),
            "documents_with_other_ids": different,
            "documents_with_other_ids_in_transformers": in_transformers,
            "vocab_size": tokenizer.vocab_size,
            "startup_seconds": round(startup, 3),
            "seconds_are": "of the processor; one thread; ids as lists (tokenizers) and as arrays (ours)",
            **encoder.facts(),
        },
    }


def elsewhere(folder: Path, texts: list[str], encoder: Encoder) -> int | None:
    """How many documents get other ids from `transformers`; None where it is not installed."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        return None
    read = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / FILE), model_max_length=10**12)
    different = 0
    for at in range(0, len(texts), BATCH):
        batch = texts[at : at + BATCH]
        theirs = read(batch, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        different += sum(one.tolist() != ids for one, ids in zip(encoder.encode_batch(batch), theirs, strict=True))
    return different


def commit() -> str:
    """Of this project, as git names it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
