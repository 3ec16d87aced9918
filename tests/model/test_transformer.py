import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.model.attention import Cache
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer, on_meta
from tests.model.made import CHOICES, SHAPES, VOCAB_SIZE, any_config, lively, random_ids

import torch
from torch import Tensor

T = 24
NAMED = dict(zip(["grouped", "one key head", "many key heads"], SHAPES, strict=True)) | CHOICES
shapes = pytest.mark.parametrize("config", NAMED.values(), ids=NAMED)
precisions = pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])


def hidden(model: Transformer, ids: Tensor, bf16: bool = False, **how: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out: Tensor = model(ids, **how)
    return out


# --- who sees whom -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@shapes
@precisions
def test_a_token_cannot_see_the_future(config: ModelConfig, bf16: bool) -> None:
    model, ids = lively(config), random_ids(2, T)
    before = hidden(model, ids, bf16)
    for place in range(1, T):
        other = ids.clone()
        other[:, place:] = random_ids(2, T - place, seed=place + 1)
        after = hidden(model, other, bf16)
        assert torch.equal(after[:, :place], before[:, :place]), place
        assert not torch.equal(after[:, place:], before[:, place:])


@shapes
@precisions
def test_a_conversation_cannot_see_another_in_its_row(config: ModelConfig, bf16: bool) -> None:
    model, ids = lively(config), random_ids(2, T)
    cut = 9
    segments = (torch.arange(T) >= cut).long().expand(2, T)
    positions = torch.cat((torch.arange(cut), torch.arange(T - cut))).expand(2, T)
    before = hidden(model, ids, bf16, segments=segments, positions=positions)
    other = ids.clone()
    other[:, :cut] = random_ids(2, cut, seed=5)
    after = hidden(model, other, bf16, segments=segments, positions=positions)
    assert torch.equal(after[:, cut:], before[:, cut:])
    assert not torch.equal(after[:, :cut], before[:, :cut])


@shapes
@precisions
def test_rows_may_share_their_conversations(config: ModelConfig, bf16: bool) -> None:
    model, ids = lively(config), random_ids(3, T)
    segments = (torch.arange(T) >= 9).long()[None]
    each = hidden(model, ids, bf16, segments=segments.expand(3, T))
    assert torch.equal(hidden(model, ids, bf16, segments=segments), each)


@shapes
def test_no_gradient_flows_into_the_future_or_into_another_conversation(config: ModelConfig) -> None:
    model = lively(config)
    model.embed = torch.nn.Embedding(T, config.hidden_size)
    segments = (torch.arange(T) >= 9).long()[None]
    out = model(torch.arange(T)[None], segments=segments)  # each place has an embedding of its own
    torch.autograd.backward(out[0, 15] @ torch.arange(1.0, config.hidden_size + 1))
    seen = model.embed.weight.grad
    assert seen is not None
    windows = [config.layer(number)[1] for number in range(config.num_layers)]
    reach = sum(T if window == "full" else window - 1 for window in windows)
    assert [place for place in range(T) if seen[place].abs().sum() > 0] == list(range(max(9, 15 - reach), 16))


@shapes
def test_a_packed_conversation_is_what_it_is_alone(config: ModelConfig) -> None:
    """Positions restart, and nothing else tells the model where in a row it is."""
    model, ids = lively(config), random_ids(1, T)
    cut = 10
    segments = (torch.arange(T) >= cut).long()[None]
    positions = torch.cat((torch.arange(cut), torch.arange(T - cut)))[None]
    packed = hidden(model, ids, segments=segments, positions=positions)
    assert torch.allclose(packed[:, :cut], hidden(model, ids[:, :cut]), atol=1e-5)
    assert torch.allclose(packed[:, cut:], hidden(model, ids[:, cut:]), atol=1e-5)


@shapes
def test_a_row_is_what_it_is_alone(config: ModelConfig) -> None:
    model, ids = lively(config), random_ids(3, T)
    together = hidden(model, ids)
    for row in range(3):
        assert torch.allclose(together[row], hidden(model, ids[row : row + 1])[0], atol=1e-5)


@shapes
def test_order_matters(config: ModelConfig) -> None:
    model, ids = lively(config), random_ids(1, T)
    turned = hidden(model, torch.cat((ids[:, :-1].flip(1), ids[:, -1:]), dim=1))
    assert not torch.allclose(turned[:, -1], hidden(model, ids)[:, -1], atol=1e-3)


@pytest.mark.parametrize(("window", "layers", "reach"), [((4,), 1, 3), ((4,), 2, 6), ((3, "full"), 1, 2)])
def test_a_window_ends_after_as_many_tokens_as_it_says(window: tuple[Any, ...], layers: int, reach: int) -> None:
    model = lively(CHOICES["windows in turn"].model_copy(update={"sliding_window": window, "num_layers": layers}))
    ids = random_ids(1, T)
    before = hidden(model, ids)[0, -1]
    for distance in range(1, T):
        other = ids.clone()
        other[0, -1 - distance] += 1 if other[0, -1 - distance] == 0 else -1
        assert torch.equal(hidden(model, other)[0, -1], before) == (distance > reach), distance


@shapes
def test_a_row_of_one_segment_is_a_row_without_segments(config: ModelConfig) -> None:
    model, ids = lively(config), random_ids(2, T)
    segments, positions = torch.zeros(2, T, dtype=torch.long), torch.arange(T).expand(2, T)
    assert torch.equal(hidden(model, ids, segments=segments, positions=positions), hidden(model, ids))


@shapes
def test_every_weight_has_a_gradient_under_autocast_near_that_in_float32(config: ModelConfig) -> None:
    model, ids = lively(config), random_ids(2, T)
    segments = (torch.arange(T) >= 9).long().expand(2, T)
    found = []
    for bf16 in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            scores = model.logits(model(ids, segments=segments))
        torch.autograd.backward(scores.logsumexp(dim=-1).sum())
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in found[0].items():
        other = found[1][name]
        assert gradient is not None, name
        assert other is not None, name
        # λ is one number, and a norm's weights are few: all tokens add to them with changing signs
        loose = 0.3 if "lambda" in name else 0.25 if "norm" in name else 0.1
        assert float((gradient - other).norm()) < loose * float(gradient.norm()) + 1e-2, name


# --- with a cache --------------------------------------------------------------------------------------------------


def decoded(model: Transformer, ids: Tensor, pieces: list[int]) -> Tensor:
    """The hidden states of ids that are handed over in pieces of these sizes."""
    B, total = ids.shape
    cache = Cache.empty(model.config, B, total, model.embed.weight)
    found = []
    for size in pieces:
        begin = cache.length
        with torch.no_grad():
            found.append(model.extend(ids[:, begin : begin + size], cache))
        assert cache.length == begin + size
    return torch.cat(found, dim=1)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(0, 1000), st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_decoding_in_pieces_of_any_size_is_one_forward_pass(seed: int, pieces: list[int]) -> None:
    config = any_config(seed)
    model = lively(config.model_copy(update={"context_length": sum(pieces)}), seed)
    ids = random_ids(2, sum(pieces), seed)
    full = hidden(model, ids)
    assert torch.allclose(decoded(model, ids, pieces), full, atol=5e-5)
    assert torch.allclose(decoded(model, ids, [1] * sum(pieces)), full, atol=5e-5)


@pytest.mark.slow
@shapes
@precisions
def test_a_token_at_a_time_is_one_forward_pass(config: ModelConfig, bf16: bool) -> None:
    model, ids = lively(config), random_ids(2, T)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = decoded(model, ids, [3, 1, 8, *[1] * (T - 12)])
    expected = hidden(model, ids, bf16)
    error = (found - expected).float().norm() / expected.float().norm()
    assert float(error) < (0.02 if bf16 else 1e-5)


@shapes
def test_rows_of_unequal_length_decode_together_under_a_mask(config: ModelConfig) -> None:
    """Padding on the left is never looked at, and positions begin after it."""
    model, ids, short = lively(config), random_ids(1, 9), random_ids(1, 5, seed=1)
    padded = torch.cat((torch.full((1, 4), 7), short), dim=1)
    seen = torch.ones(2, 9, dtype=torch.bool)
    seen[1, :4] = False
    mask = seen[:, None, :] | torch.eye(9, dtype=torch.bool)
    positions = torch.stack((torch.arange(9), (torch.arange(9) - 4).clamp(min=0)))
    cache = Cache.empty(model.config, 2, 9, model.embed.weight)
    with torch.no_grad():
        found = model.extend(torch.cat((ids, padded)), cache, positions=positions, mask=mask)
    assert torch.allclose(found[0], hidden(model, ids)[0], atol=1e-5)
    assert torch.allclose(found[1, 4:], hidden(model, short)[0], atol=1e-5)


# --- the start of training -----------------------------------------------------------------------------------------


def weights(model: Transformer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def test_the_first_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    found = []
    for noise, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(noise)
        model = Transformer(SHAPES[1], VOCAB_SIZE)
        before = torch.get_rng_state()
        model.initialize(seed)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(weights(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not any(weight.isnan().any() for weight in found[0].values())
    assert not torch.equal(found[0]["embed.weight"], found[2]["embed.weight"])


def test_what_writes_to_the_residual_stream_starts_smaller_the_deeper_the_model_is() -> None:
    config = ModelConfig(
        hidden_size=128, num_layers=8, num_heads=4, num_kv_heads=2, intermediate_size=256, tie_embeddings=False
    )
    model = Transformer(config, 300)
    model.initialize(0)
    for name, weight in model.state_dict().items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            into_stream = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 / math.sqrt(16) if into_stream else 0.02
            assert float(weight.std()) == pytest.approx(expected, rel=0.03), name
            assert float(weight.mean()) == pytest.approx(0, abs=expected / 30), name


def test_a_tied_head_is_the_embedding_and_stays_it() -> None:
    tied, own = (Transformer(config, VOCAB_SIZE) for config in SHAPES[:2])
    assert tied.head.weight is tied.embed.weight
    assert own.head.weight is not own.embed.weight
    tied.load_state_dict(weights(lively(SHAPES[0])))
    assert tied.head.weight is tied.embed.weight


def test_scores_are_float32_under_autocast() -> None:
    model = lively(SHAPES[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.logits(model(random_ids(1, 3))).dtype == torch.float32


# --- without numbers -----------------------------------------------------------------------------------------------


@shapes
def test_a_model_without_numbers_has_every_shape_of_one_with_them(config: ModelConfig) -> None:
    empty, full = on_meta(config, VOCAB_SIZE), Transformer(config, VOCAB_SIZE)
    assert {name: weight.shape for name, weight in empty.state_dict().items()} == {
        name: weight.shape for name, weight in full.state_dict().items()
    }
    assert all(weight.is_meta for weight in empty.parameters())


@pytest.mark.slow
def test_a_model_without_numbers_leaves_the_compiler_of_torch_alone() -> None:
    """It takes longer to import than all else that a first answer needs."""
    program = """
import sys
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import on_meta
on_meta(ModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=64), 100)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
