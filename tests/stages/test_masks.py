"""
Masks of packed conversations against a checker of their own, on whole data sets in English and Chinese.

The checker knows neither the renderer nor the readers: it takes the rows apart at the ids that `tokenizer.json` calls
special, decodes what stands between them with the `tokenizers` library, and compares with the plain JSON of the data
set, whose roles it names itself.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import zstandard

from bloomery.core.config import build
from bloomery.stages import instruct
from bloomery.stages.config import Instruct
from tests.tokenizer.made import small

SHARED = Path(os.environ.get("BLOOMERY_SHARED", "/nowhere")) / "data" / "dev"
SETS = ("multiturn_en", "multiturn_zh")
SPEAKERS = {
    "human": "<|user|>",
    "gpt": "<|assistant|>",
    "function_call": "<|assistant|>",
    "observation": "<|tool|>",
}
ROW = 1025
HEADER_BYTES = 1024

Said = tuple[tuple[str, str], ...]
"""Speaker and content of every message."""

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared text is not here (BLOOMERY_SHARED)")


def expected(path: Path) -> Iterator[tuple[str, Said]]:
    """Source and messages of every row of a data set: the tools, if any, are what the system says."""
    data = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read().decode()
    for line in data.split("\n"):
        if line:
            row = json.loads(line)
            opening = [("<|system|>", row["tools"])] if row["tools"] and row["tools"] != "[]" else []
            told = [(SPEAKERS[message["from"]], message["value"]) for message in row["conversations"]]
            yield row["source"], (*opening, *told)


@dataclass
class Checked:
    conversations: int = 0
    supervised: int = 0
    answers: int = 0


def check(out: Path, folder: Path, wanted: Collection[Said]) -> Checked:
    """
    Take every row apart. Raises AssertionError where an id is learned that should not be, or the other way round,
    where a message has another text, or where a conversation is none of `wanted`, or the beginning of one.
    """
    spelled = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    special = {token["id"]: token["content"] for token in added}
    begun = {said[:end] for said in wanted for end in range(1, len(said) + 1)}
    done = Checked()
    for split in ("train", "val"):
        ids = np.fromfile(out / f"{split}-00000.bin", np.uint16, offset=HEADER_BYTES).reshape(-1, ROW)
        mask = np.fromfile(out / f"{split}-00000.mask", np.uint8).reshape(-1, ROW)
        for row, learned in zip(ids.tolist(), mask.tolist(), strict=True):
            for said, count in conversations(row, learned, special, spelled):
                assert said in begun, said
                assert said[-1][0] == "<|assistant|>", "the rows end with an answer"
                done.conversations += 1
                done.supervised += count
                done.answers += sum(speaker == "<|assistant|>" for speaker, _ in said)
    return done


def conversations(
    row: list[int], learned: list[int], special: dict[int, str], spelled: tokenizers.Tokenizer
) -> Iterator[tuple[Said, int]]:
    """The messages of each conversation of a row, and how many ids of it are learned; asserts which."""
    place, said, count = 0, list[tuple[str, str]](), 0
    while place < len(row) and special.get(row[place]) != "<|pad|>":
        name = special[row[place]]  # nothing but special ids stands between messages
        assert not learned[place], f"{name} is learned at {place}"
        if name == "<|endoftext|>":
            if said:
                yield tuple(said), count
            place, said, count = place + 1, [], 0
            continue
        end = place + 1
        while row[end] not in special:
            end += 1
        assert special[row[end]] == "<|end|>", "a message has its end"
        says = learned[place + 1 : end + 1]
        assert set(says) == {int(name == "<|assistant|>")}, f"{name}: content and end are learned, or neither is"
        said.append((name, spelled.decode(row[place + 1 : end], skip_special_tokens=False)))
        count += sum(says)
        place = end + 1
    if said:
        yield tuple(said), count
    assert not any(learned[place:]), "padding is learned"
    assert all(special.get(id) == "<|pad|>" for id in row[place:])


def run(folder: Path, paths: list[Path]) -> dict[str, Any]:
    small().save(folder / "tokenizer")
    (folder / "synthesize").mkdir()
    (folder / "synthesize" / "conversations.jsonl").touch()
    sources = [{"kind": "files", "name": path.name.partition(".")[0], "path": str(path)} for path in paths]
    config = build(Instruct, {"sources": sources, "row_tokens": ROW, "hold_out": 0.1})
    inputs = {name: folder / name for name in ("tokenizer", "synthesize")}
    return instruct.run(config, inputs, folder / "out")


@needs_shared
@pytest.mark.parametrize("name", SETS)
def test_masks_of_a_sample_of_each_set_are_what_a_checker_of_their_own_derives(name: str, tmp_path: Path) -> None:
    """The rows of every source in it whose hash is small, and those that call tools."""
    path = SHARED / f"{name}.jsonl.zst"
    data = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
    lines = [line for line in data.split(b"\n") if line and hashlib.sha256(line).digest()[0] < 24]
    (tmp_path / "some.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(lines) + b"\n"))
    sources = compared(tmp_path, [tmp_path / "some.jsonl.zst"])
    assert sources >= {json.loads(line)["source"] for line in data.split(b"\n") if line}


@needs_shared
@pytest.mark.slow
def test_masks_of_every_set_are_what_a_checker_of_their_own_derives(tmp_path: Path) -> None:
    compared(tmp_path, [SHARED / f"{name}.jsonl.zst" for name in SETS])


def compared(folder: Path, paths: list[Path]) -> set[str]:
    """Run the stage, check its rows and numbers; returns the sources whose rows were looked at."""
    rows = [one for path in paths for one in expected(path)]
    stats = run(folder, paths)
    found = check(folder / "out", folder / "tokenizer", [said for _, said in rows])
    assert stats["read"] == len(rows) == stats["conversations"] + stats["rejected"]
    assert set(stats["rejected_by_reason"]) <= {"too_long"}
    assert found.conversations == stats["conversations"]
    assert found.supervised == stats["train"]["supervised"] + stats["val"]["supervised"]
    if not stats["cut_at_a_turn"] and not stats["rejected"]:
        assert found.answers == sum(speaker == "<|assistant|>" for _, said in rows for speaker, _ in said)
    return {source for source, _ in rows}


def test_the_checker_sees_a_mask_that_is_wrong(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
    lines = [json.dumps({"conversations": [{**talk[0], "value": f"Hi {n}."}, talk[1]]}) for n in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    run(tmp_path, [tmp_path / "a.jsonl"])
    wanted: list[Said] = [(("<|user|>", f"Hi {n}."), ("<|assistant|>", "Hello.")) for n in range(200)]
    assert check(tmp_path / "out", tmp_path / "tokenizer", wanted).conversations == 200
    path = tmp_path / "out" / "train-00000.mask"
    right = path.read_bytes()
    for place in (0, 1, right.index(1), right.index(1) - 1):
        wrong = bytearray(right)
        wrong[place] ^= 1
        path.write_bytes(wrong)
        with pytest.raises(AssertionError):
            check(tmp_path / "out", tmp_path / "tokenizer", wanted)
    path.write_bytes(right)
    with pytest.raises(AssertionError):
        check(tmp_path / "out", tmp_path / "tokenizer", wanted[:1])
