"""The sentence of a stage says the number that matters, for every run that its recipe allows."""

from typing import Any

import pytest

from bloomery.stages.terminal import sentence

NOTHING = {"answers": {"n": 0}, "bits_per_byte": {"model": None, "bytes": 0}}
TALKS = {"n": 20, "pretrain": {"bits_per_byte": 0.701}, "finetune": {"bits_per_byte": 0.512}}


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        ({"answers": {"n": 20, "exact": 0.5}}, "answered 50.0 % of 20 questions right"),
        ({"bits_per_byte": {"model": 2.5, "bytes": 3000}}, "measured 2.50 bits per byte on 3.0 kB of validation text"),
        (
            {"conversations": TALKS},
            "measured 0.51 bits per byte on 20 validation conversations (0.70 before finetuning)",
        ),
        ({"tasks": {"arc_easy": {}}}, "scored 1 task"),
        ({}, "wrote its report"),
    ],
)
def test_an_evaluation_without_questions_and_without_shards_has_a_sentence(stats: dict[str, Any], text: str) -> None:
    assert sentence("evaluate", NOTHING | stats) == (text, "")
