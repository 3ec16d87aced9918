"""Run folders whose JSON is damaged or of the wrong shape, and shards."""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis.strategies import SearchStrategy

from bloomery.core.io import read_json
from bloomery.core.records import STAGE_FOLDER
from bloomery.shards import format, importers
from bloomery.shards.loader import PackedDataset
from tests.fuzz.mutation import bytes_like, json_like, named, split
from tests.fuzz.outcome import RefusedError, Target, WrongError, command
from tests.tokenizer.made import small

RECIPE = """\
name = "run"
[[fetch.sources]]
kind = "jsonl"
name = "docs"
domain = "text"
path = "docs.jsonl"
[tokenizer]
vocab_size = 300
[shard]
val_fraction = 0.1
"""
ONE_IN = 20
"""Of damaged run folders, so many are run again to their end."""
T = 16


def runs(folder: Path) -> Target:
    """A run up to its shards, of which one file is another one."""
    os.chdir(folder)
    texts = [f"Document {number} tells of {number * 7} lamps and of a cat that sleeps." for number in range(40)]
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "recipe.toml").write_text(RECIPE)
    command("run", "recipe.toml", "engine.workers=1", "--until", "shard")
    run = folder / "runs" / "run"
    stages = sorted(path.name for path in run.iterdir() if STAGE_FOLDER.fullmatch(path.name))
    places = {
        _without_fingerprint(path.relative_to(run)): path.relative_to(run) for path in sorted(run.rglob("*.json"))
    }
    inputs: dict[str, SearchStrategy[bytes]] = {
        name: json_like([read_json(run / place)]) for name, place in places.items() if _is_small(run / place)
    }
    places["recipe.toml"] = Path("recipe.toml")
    inputs["recipe.toml"] = bytes_like([(run / "recipe.toml").read_bytes()])

    def attempt(data: bytes, work: Path) -> None:
        name, body = split(data, list(inputs))
        shutil.copytree(folder, work, dirs_exist_ok=True)
        os.chdir(work)
        damaged = work / "runs" / "run"
        (damaged / places[name]).write_bytes(body)
        rerun = zlib.crc32(data) % ONE_IN == 0
        refused = _refusals(
            *(("status", damaged), ("status", damaged, "--verify", "--json"), ("clean", damaged)),
            *(("plan", "recipe.toml"), ("clean", damaged, "--yes")),
            *((("run", "recipe.toml", "engine.workers=1", "--until", "shard"),) if rerun else ()),
        )
        if gone := [stage for stage in stages if not (damaged / stage).is_dir()]:
            raise WrongError("lost", f"clean --yes removed the only folder of {', '.join(gone)}", "clean --yes")
        if refused:
            raise RefusedError(refused)

    return Target(named(inputs), attempt)


def _without_fingerprint(path: Path) -> str:
    """A case is of the same file when fingerprints have changed: 01-fetch/manifest.json."""
    stage, *rest = path.parts
    return "/".join([stage.rpartition("-")[0] if STAGE_FOLDER.fullmatch(stage) else stage, *rest])


def _is_small(file: Path) -> bool:
    return file.stat().st_size < 20_000


def _refusals(*commands: tuple[str | Path, ...]) -> str:
    """The longest message of those that are refused; all are called."""
    messages = [""]
    for words in commands:
        try:
            command(*words)
        except RefusedError as refused:
            messages.append(str(refused))
    return max(messages, key=len)


def shards(folder: Path) -> Target:
    """Shards of ours with their index, and token files of others."""
    tokens = np.random.default_rng(1).integers(10, 600, 200)
    tokens[::20] = small().document_id
    facts: dict[str, Any] = {"document_id": small().document_id}
    known: dict[str, Any] = {"vocab_size": small().vocab_size, "tokenizer_hash": small().hash}
    starts = list(range(0, 200, 20))
    for split_name in ("train", "val"):
        format.write(folder / f"{split_name}-00000", tokens, starts=starts, facts=facts, **known)
    ours, theirs = folder / "train-00000.bin", folder / "train.bin"
    theirs.write_bytes(tokens.astype("<u2").tobytes())
    index = read_json(folder / "train-00000.json")
    own = {
        "train-00000.json": json_like([index]),
        "train-00000.bin": bytes_like([ours.read_bytes()]),
    }
    adopted = {
        "llmc/train.bin": bytes_like([ours.read_bytes()]),
        "bare/train.bin": bytes_like([theirs.read_bytes()]),
        "rows/meta.yaml": bytes_like(
            [f"pack_len: 20\nvocab_size: {small().vocab_size}\ndtype: uint16\nhas_loss_mask: false\n".encode()]
        ),
    }

    def attempt(data: bytes, work: Path) -> None:
        name, body = split(data, [*own, *adopted])
        if name in own:
            for file in folder.glob("train-00000.*"):
                shutil.copy(file, work)
            (work / name).write_bytes(body)
            samples = PackedDataset(work, "train", T, small().hash, verify=True)
            samples.batch(samples.order(0, 4, 0))
            return
        kind = name.partition("/")[0]
        (place := work / kind).mkdir()
        numbered = "_0000" if kind == "rows" else ""
        for split_name in ("train", "val"):
            shutil.copy(ours if kind == "llmc" else theirs, place / f"{split_name}{numbered}.bin")
        (work / name).write_bytes(body)
        (out := work / "out").mkdir()
        importers.digest(place)
        told = importers.adopt(place, out, small(), headerless="uint16" if kind == "bare" else None)
        samples = PackedDataset(out, "train", 8, small().hash, verify=True)
        if told["tokens"] != sum(format.read(path).index["tokens"] for path in format.names(out, "train")):
            raise WrongError("lost", f"{told['tokens']} tokens are said to be there", "adopted tokens")
        samples.batch(samples.order(0, 4, 0))

    return Target(named({**own, **adopted}), attempt)
