import lzma
import math
import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.errors import CheckpointError
from bloomery.data.sources import toy_worlds
from bloomery.evaluation import held_out
from bloomery.evaluation.held_out import document_nats, measure, windows
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from tests.model.made import lively
from tests.tokenizer.made import CODE, ELSEWHERE, small
from tests.train.made import processor

import torch

T = 24
SHAPE = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    context_length=T,
    tie_embeddings=False,
)
TEXTS = ["short", "", "a", "é", *toy_worlds.documents(5, 4), CODE, ELSEWHERE]


def model() -> Transformer:
    return lively(SHAPE, vocab_size=small().vocab_size)


@given(st.integers(0, 300), st.integers(1, 40))
def test_windows_score_every_target_once_and_from_half_a_context_where_there_is_one(targets: int, length: int) -> None:
    seen: list[int] = []
    for start, first in windows(targets, length):
        scored = range(start + first, min(start + length, targets))
        assert all(target - start >= min(target, length // 2) for target in scored)
        seen += scored
    assert seen == list(range(targets))


def slow_nats(one: Transformer, text: str) -> float:
    """Each token from a forward pass of its own, over what its window holds before it."""
    ids = [small().document_id, *small().encode(text)]
    total = 0.0
    for start, first in windows(len(ids) - 1, T):
        for target in range(start + first + 1, min(start + T, len(ids) - 1) + 1):
            with torch.no_grad():
                scores = one.logits(one(torch.tensor([ids[start:target]])))[0, -1]
            total -= float(scores.log_softmax(0)[ids[target]])
    return total


@pytest.mark.slow
def test_the_bits_of_documents_are_those_of_their_tokens_one_by_one() -> None:
    one = model()
    lengths = [len(small().encode(text)) for text in TEXTS]
    assert min(lengths) == 0 < T < max(lengths)
    expected = [slow_nats(one, text) for text in TEXTS]
    for text, nats in zip(TEXTS, expected, strict=True):
        assert document_nats(one, small(), [text], processor()) == pytest.approx(nats, rel=1e-5, abs=1e-6)
    assert document_nats(one, small(), TEXTS, processor()) == pytest.approx(sum(expected), rel=1e-5)


def test_neither_the_order_of_documents_nor_what_is_scored_at_once_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    one = model()
    whole = document_nats(one, small(), TEXTS, processor())
    monkeypatch.setattr(held_out, "WINDOWS_AT_ONCE", 3)
    assert document_nats(one, small(), random.Random(1).sample(TEXTS, len(TEXTS)), processor()) == pytest.approx(whole)


def test_a_short_document_is_scored_in_one_forward_pass_from_its_opening_token() -> None:
    one, ids = model(), [small().document_id, *small().encode("the lamp")]
    with torch.no_grad():
        chances = one.logits(one(torch.tensor([ids[:-1]])))[0].log_softmax(1)
    expected = -sum(float(row[target]) for row, target in zip(chances, ids[1:], strict=True))
    assert document_nats(one, small(), ["the lamp"], processor()) == pytest.approx(expected, rel=1e-5)


def test_a_model_that_knows_nothing_needs_the_logarithm_of_its_vocabulary_for_every_token() -> None:
    one = model()
    torch.nn.init.zeros_(one.head.weight)
    tokens = sum(len(small().encode(text)) for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    found = measure(one, small(), TEXTS, processor())
    assert document_nats(one, small(), TEXTS, processor()) == pytest.approx(tokens * math.log(small().vocab_size))
    assert found.model == round(tokens * math.log2(small().vocab_size) / size, 4)
    assert (found.bytes, found.documents) == (size, len(TEXTS))


def test_the_compressors_get_the_same_documents_as_one_stream() -> None:
    raw = "\n".join(TEXTS).encode()
    found = measure(model(), small(), TEXTS, processor())
    assert found.xz == round(8 * len(lzma.compress(raw, preset=9)) / len(raw), 4)
    assert found.zstd == round(8 * len(zstandard.ZstdCompressor(level=19).compress(raw)) / len(raw), 4)


def test_a_domain_that_repeats_itself_is_cheap_to_a_compressor_and_not_to_a_model_that_sees_each_document_alone() -> (
    None
):
    one = model()
    once, often = (measure(one, small(), [CODE] * count, processor()) for count in (1, 20))
    assert often.model == pytest.approx(once.model, abs=1e-3)
    assert often.xz < once.xz / 3


def test_a_model_whose_logits_are_not_finite_compresses_nothing() -> None:
    model = lively(SHAPE, vocab_size=small().vocab_size)
    with torch.no_grad():
        model.get_parameter("norm.weight")[0] = 3.4e38
    with pytest.raises(CheckpointError, match="logits that are not finite"):
        document_nats(model, small(), ["A lamp stands upstairs."], processor())
