"""Answers of held-out conversations: each once, with what stands before it, and scored as the renderer made them."""

import math
from pathlib import Path

import pytest

from bloomery.core.chat import Message, SamplingConfig
from bloomery.evaluation import held_out
from bloomery.evaluation.held_out import HeldOutAnswer
from bloomery.generate.engine import Completion
from bloomery.stages import instruct
from bloomery.tokenizer.chat_template import Renderer
from bloomery.weights.hf import Lineage, Loaded, ModelLanguage
from tests.model.made import lively, random_config
from tests.tokenizer.made import small

import torch
import torch.nn.functional as F

RENDERER = Renderer(small())
ROW_TOKENS = 60


def talk(*contents: str) -> list[Message]:
    roles = ("user", "assistant")
    return [Message(role=roles[number % 2], content=content) for number, content in enumerate(contents)]  # type: ignore[typeddict-item]


TALKS = [talk("Who?", "Ada."), talk("Where?", "Here.", "And Bo?", "At sea, he said."), talk("So?", ""), talk("a", "b")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    instruct.write_rows(tmp_path, "val", [RENDERER.render(one) for one in TALKS], RENDERER, ROW_TOKENS)
    return tmp_path


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    config = random_config(0).model_copy(update={"context_length": ROW_TOKENS})
    model = lively(config, 0, small().vocab_size)
    return Loaded(
        model, ModelLanguage.ours(RENDERER), Lineage(tokenizer=small().hash, template=None, shards="imported"), tmp_path
    )


def found(folder: Path) -> list[HeldOutAnswer]:
    return list(held_out.turns(folder, small().hash))


def test_every_answer_is_found_once_behind_the_prompt_of_the_renderer(folder: Path) -> None:
    expected = {
        (tuple(RENDERER.prompt(one[:place])), one[place]["content"]) for one in TALKS for place in range(1, len(one), 2)
    }
    turns = found(folder)
    assert {(turn.prompt, RENDERER.said(turn.answer)) for turn in turns} == expected
    assert len(turns) == 5
    assert all(turn.answer[-1] == RENDERER.end_id for turn in turns)
    assert len({turn.number for turn in turns}) == len(TALKS)


def test_one_answer_of_a_conversation_is_drawn_and_none_after_too_long_a_prompt(folder: Path) -> None:
    turns = found(folder)
    drawn = held_out.drawn(turns, 3, 0, ROW_TOKENS)
    assert len({turn.number for turn in drawn}) == 3
    assert drawn == held_out.drawn(turns, 3, 0, ROW_TOKENS)
    assert {len(held_out.drawn(turns, 9, seed, ROW_TOKENS)) for seed in range(5)} == {len(TALKS)}
    least = min(len(turn.prompt) for turn in turns)
    assert all(len(turn.prompt) == least for turn in held_out.drawn(turns, 9, 0, least))
    assert held_out.drawn(turns, 9, 0, least - 1) == []


def test_likelihood_is_that_of_the_answer_and_its_end(folder: Path, loaded: Loaded) -> None:
    turns = found(folder)
    nats = 0.0
    for turn in turns:
        ids = torch.tensor([[*turn.prompt, *turn.answer]])
        with torch.no_grad():
            log_p = F.log_softmax(loaded.model.logits(loaded.model(ids))[0].double(), dim=-1)
        nats -= sum(float(log_p[len(turn.prompt) + place - 1, target]) for place, target in enumerate(turn.answer))
    size = sum(len(message["content"].encode()) for one in TALKS for message in one[1::2])
    scores = held_out.answer_scores(loaded, turns, [Completion([5], number or None) for number in range(len(turns))])
    assert scores["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    assert scores["tokens"] == sum(len(turn.answer) for turn in turns)
    assert scores["ended"]["value"] == 0.8
    assert scores["length"] == {"said": 1.8, "given": scores["tokens"] / 5}, "with the token that ends an answer"


def test_each_answer_is_drawn_by_itself_and_cut_where_its_tokens_ran_out(
    folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = found(folder)

    def said(some: list[HeldOutAnswer], seed: int = 0) -> list[Completion]:
        return list(held_out.answers(loaded, some, SamplingConfig(max_tokens=9, temperature=1.5, seed=seed)))

    whole = said(turns)
    assert said(turns[2:4]) == whole[2:4]
    assert said(turns, seed=1) != whole
    assert any(not one.stopped for one in whole)
    for one in whole:
        assert RENDERER.end_id not in one.ids
        assert len(one.ids) + one.stopped == 9 or one.stopped
    monkeypatch.setattr(held_out, "AT_ONCE", 2)
    assert said(turns) == whole, "however many at once"


def test_a_model_that_only_ever_ends_has_ended(folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    always = torch.full((1, 1, small().vocab_size), -1.0)
    always[..., RENDERER.end_id] = 9.0
    monkeypatch.setattr(loaded.model, "logits", lambda hidden: always.expand(*hidden.shape[:-1], -1))
    said = list(held_out.answers(loaded, found(folder), SamplingConfig.greedy(9)))
    assert said == [Completion([], RENDERER.end_id)] * 5
    assert held_out.shown(loaded, found(folder)[0], said[0])["said"] == ""
