"""Rows of special tokens that a recipe asks for and a tokenizer lacks."""

from pathlib import Path

import pytest

from bloomery.tokenizer.chat_template import TEMPLATES, special_tokens
from bloomery.tokenizer.tokenizer import DOCUMENT, END, SPECIAL
from bloomery.weights import hf
from tests.weights.test_hf import llama, plain_tokenizer

import torch


def test_special_tokens_that_a_tokenizer_lacks_get_rows_like_the_closest_it_has(tmp_path: Path) -> None:
    size = plain_tokenizer(tmp_path)
    theirs = llama(tmp_path, size + 2)  # some models have rows that no id uses
    found = hf.load(tmp_path, special=SPECIAL)
    assert found.model.vocab_size == found.tokenizer.vocab_size == size + len(SPECIAL)
    special = found.tokenizer.special
    embed, head = found.model.embed.weight, found.model.head.weight
    tables = theirs["model.embed_tokens.weight"], theirs["lm_head.weight"]
    assert torch.equal(embed[:size], tables[0][:size])
    assert torch.equal(head[:size], tables[1][:size])
    assert torch.equal(embed[special[DOCUMENT]], tables[0][3])
    assert torch.equal(embed[special[END]], tables[0][5])
    assert torch.equal(head[special[DOCUMENT]], tables[1][5])
    assert nearly(head[special[END]], tables[1][5])
    torch.testing.assert_close(head[special["<|user|>"]], tables[1].mean(0))


def nearly(row: torch.Tensor, other: torch.Tensor) -> bool:
    """Alike, and yet to be told apart."""
    return float(torch.cosine_similarity(row.detach(), other, dim=0)) > 0.9 and not torch.equal(row, other)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_rows_of_new_tokens_differ_and_what_ends_a_message_ends_a_text(tmp_path: Path, template: str) -> None:
    theirs = llama(tmp_path, plain_tokenizer(tmp_path))
    asked = special_tokens(template)
    found = hf.load(tmp_path, special=asked)
    ids = {name: found.tokenizer.special_id(name) for name in asked}
    embed, head = found.model.embed.weight, found.model.head.weight
    assert nearly(head[ids[TEMPLATES[template].end]], theirs["lm_head.weight"][5])
    others = [id for name, id in ids.items() if name not in (DOCUMENT, END, TEMPLATES[template].opening)]
    assert len(torch.unique(embed[others], dim=0)) == len(others)
    again = hf.load(tmp_path, special=asked)
    assert torch.equal(again.model.embed.weight, embed)
    table = theirs["model.embed_tokens.weight"]
    assert bool(((embed[others] - table.mean(0)).norm(dim=1) > table.std(0).norm() / 3).all())
