"""Packed rows of templates that open no conversation with a token of its own: where each begins is in the index."""

from pathlib import Path

import numpy as np
import pytest

from bloomery.core.chat import Message
from bloomery.core.errors import DataError
from bloomery.shards import format
from bloomery.shards.loader import IGNORE, PackedDataset
from bloomery.stages import finetune, instruct
from bloomery.tokenizer.chat_template import TEMPLATES, Rendered, Renderer, Template
from tests.model.made import SHAPES, lively
from tests.tokenizer.made import made_for

import torch

ROW = 81


def rendered(renderer: Renderer, *contents: str) -> Rendered:
    roles = ("user", "assistant") * len(contents)
    said = zip(roles, contents, strict=False)
    return renderer.render([Message(role=role, content=content) for role, content in said])  # type: ignore[typeddict-item]


def written(folder: Path, name: str, *talks: tuple[str, ...]) -> tuple[PackedDataset, Renderer, list[Rendered]]:
    """One row that holds these conversations."""
    folder.mkdir(exist_ok=True)
    renderer = Renderer(made_for(name), TEMPLATES[name])
    some = [rendered(renderer, *talk) for talk in talks]
    facts = instruct.write_rows(folder, "train", some, renderer, ROW)
    assert facts["rows"] == 1
    return PackedDataset(folder, "train", ROW - 1, renderer.tokenizer.hash), renderer, some


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_conversation_of_a_row_counts_its_positions_from_its_own_beginning(tmp_path: Path, name: str) -> None:
    samples, _, some = written(tmp_path, name, ("Who?", "A much longer answer."), ("Why?", "So."), ("x", "y"))
    batch = samples.batch(np.array([0]))
    lengths = sorted((len(talk.ids) for talk in some), reverse=True)
    opens = np.flatnonzero(batch.positions[0] == 0).tolist()
    assert opens == [0, lengths[0], lengths[0] + lengths[1]]
    assert [int((batch.segments[0] == n).sum()) for n in (1, 2)] == lengths[:2]
    assert int((batch.targets != IGNORE).sum()) == sum(sum(talk.mask) for talk in some)


@pytest.mark.parametrize("name", TEMPLATES)
def test_changing_one_conversation_leaves_the_logits_of_the_other_in_its_row_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    first, renderer, some = written(tmp_path / "a", name, ("Who is there?", "It is me."), ("Why?", "So."))
    second, _, others = written(tmp_path / "b", name, ("Why not?", "It is me."), ("Why?", "So."))
    cut, other_cut = len(some[0].ids), len(others[0].ids)
    model = lively(SHAPES[0].model_copy(update={"context_length": ROW}), 0, renderer.tokenizer.vocab_size)
    logits = []
    for samples in (first, second):
        batch = samples.batch(np.array([0]))
        ids, positions, segments = (torch.from_numpy(part) for part in (batch.ids, batch.positions, batch.segments))
        with torch.no_grad():
            logits.append(model.logits(model(ids, positions=positions, segments=segments))[0])
    size = len(some[1].ids)
    assert torch.equal(logits[0][cut : cut + size], logits[1][other_cut : other_cut + size])


def test_the_rows_say_their_template_and_one_that_is_another_by_now_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "chatml", ("Who?", "Me."))
    assert finetune.template_of(tmp_path) is TEMPLATES["chatml"]
    was = TEMPLATES["chatml"].hash[:8]
    monkeypatch.setitem(TEMPLATES, "chatml", Template(name="chatml"))
    with pytest.raises(DataError, match=f"in the template chatml {was}, but known are bloomery .*, chatml"):
        finetune.template_of(tmp_path)
    assert format.read(tmp_path / "train-00000").index["template_name"] == "chatml"
