import json
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import io as core_io
from bloomery.core.chat import Message
from bloomery.core.config import build
from bloomery.data import documents
from bloomery.evaluation import held_out
from bloomery.evaluation.held_out import JudgedAnswer, ToyQuestion
from bloomery.evaluation.report import render
from bloomery.stages import evaluate, instruct
from bloomery.stages.config import Evaluate
from bloomery.tokenizer.chat_template import Renderer
from bloomery.weights import hf
from tests.core.made import manifest
from tests.data.made_documents import write_documents
from tests.evaluation.sets import write
from tests.tokenizer.made import small
from tests.weights.made import model


@pytest.mark.parametrize(("limit", "taken"), [(1, 1), (4, 1), (6, 1), (7, 2), (10, 2), (11, 3), (12, 4), (99, 4)])
def test_documents_are_taken_from_the_front_and_none_is_passed_over_for_its_length(limit: int, taken: int) -> None:
    """Short ones are other text than long ones: to fill up with them would measure something else."""
    texts = ["aaaa", "é2", "xxxx", "y"]
    assert evaluate.up_to(texts, limit) == texts[:taken]


def judged(question: str, answer: str, *before: Message, kind: str = "sum") -> JudgedAnswer:
    return JudgedAnswer(ToyQuestion(kind, [*before, Message(role="user", content=question)], answer), "", False)


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """Documents, and conversations that were packed."""
    folders = {name: tmp_path / name for name in ("dedup", "shard", "instruct")}
    core_io.write_json(folders["shard"] / core_io.MANIFEST, manifest(config={"val_fraction": 0.0}))
    texts = ("The key is in the box.", "It makes 139.")
    write_documents(folders["dedup"] / "kept", [row(str(number), text) for number, text in enumerate(texts)])
    talk = [Message(role="user", content="Where is Ada?"), Message(role="assistant", content="Ada is in the barn.")]
    instruct.write_rows(folders["instruct"], "train", [Renderer(small()).render(talk)], Renderer(small()), 40)
    held = [Message(role="user", content="Where is Bo?"), Message(role="assistant", content="Bo is at sea.")]
    instruct.write_rows(folders["instruct"], "val", [Renderer(small()).render(held)], Renderer(small()), 40)
    return folders


def row(id: str, text: str) -> dict[str, Any]:
    return {name: {"id": id, "text": text}.get(name, "") for name in documents.SCHEMA().names}


@pytest.mark.parametrize(
    ("one", "found"),
    [
        (judged("Where is the key?", "The key is in the box."), True),
        (judged("Where is the cup?", "The key is in the bag."), False),
        (judged("Where was Ada?", "Ada is in the barn."), True),  # from a conversation, whoever wrote it
        (judged("Where is Ada?", "Nobody knows."), True),
        (judged("Where is Ada?", "Nobody knows.", Message(role="user", content="Hello.")), False),
        (judged("Where is Bo?", "Bo is at sea."), False),  # validated with, and not trained on
        (judged("What is 1 plus 38?", "39."), False),
        (judged("What is 1 plus 138?", "139."), True),
        (judged("Which are in it?", "The key is in the box.", kind="library"), False),
        (judged("Ada?Ada", "Where is Ada?Ada is in the barn."), False),
    ],
)
def test_what_stands_in_the_training_text_is_a_leak(inputs: dict[str, Path], one: JudgedAnswer, found: bool) -> None:
    new = judged("Where is the moon?", "The moon is up.")
    assert evaluate.leaks([new, one, new], inputs, small()) == {"checked": 3, "found": int(found)}


def test_questions_that_do_not_fit_the_context_are_counted_and_do_not_end_the_stage(tmp_path: Path) -> None:
    asked = held_out.held_out(0, 30)
    lengths = sorted(len(Renderer(small()).prompt(one.messages)) for one in asked)
    loaded = hf.load(model(tmp_path / "model", context=lengths[20]))
    found = evaluate.ask(loaded, asked, 1)
    told = evaluate.answers(found, len(asked) - len(found))
    fit = sum(length < lengths[20] for length in lengths)
    assert (told["n"], told["not_asked"]) == (fit, 30 - fit)
    assert f"{30 - fit} more were skipped" in render({"answers": told})
    assert "did not fit" not in render({"answers": evaluate.answers(found, 0)})


def test_core_is_looked_for_in_the_training_text_and_each_of_its_questions_is_a_line(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    there = {"query": "The key is in", "choices": ["the box.", "the sea."], "gold": 0}
    elsewhere = {"query": "The lamp was on", "choices": ["a shelf.", "the moon."], "gold": 0}
    data = write(tmp_path / "data" / "copa.jsonl", [elsewhere, there, elsewhere | {"query": "The cat sat under"}])
    loaded = hf.load(model(tmp_path / "model", context=64))
    config = build(Evaluate, {"tasks": ["core", "copa"], "data": [str(data.parent)]})
    told = evaluate.known_tasks(loaded, config, inputs, tmp_path)
    assert (told["core"]["n"], told["core"]["dirty_n"], told["core"]["clean"]["n"]) == (3, 1, 2)
    assert told["tasks"]["copa"]["dirty_n"] == 1
    lines = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [(one["task"], one["row"], one["dirty"]) for one in lines] == [
        (name, row, row == 2) for name in ("copa", "core.copa") for row in (1, 2, 3)
    ]
