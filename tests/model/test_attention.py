import math
from typing import Any

import pytest

from bloomery.model.attention import Cache, DifferentialAttention
from bloomery.model.mask import AttentionMask
from tests.model.made import CHOICES, SHAPES, lively

import torch


def test_an_empty_cache_has_room_for_every_layer_and_looks_like_the_weights() -> None:
    config = SHAPES[0]
    cache = Cache.empty(config, 3, 17, torch.zeros(1, dtype=torch.bfloat16))
    assert cache.keys.shape == cache.values.shape == (2, 3, 2, 17, 8)
    assert cache.keys.dtype == cache.values.dtype == torch.bfloat16
    assert (cache.capacity, cache.length) == (17, 0)
    assert cache.keys.data_ptr() != cache.values.data_ptr()


@pytest.mark.parametrize("layer", [0, 2])
def test_differential_attention_is_its_formula(layer: int) -> None:
    """A query head reads the keys of its place in the pair, and the values of the pair side by side."""
    config = CHOICES["differential in turn, many groups"].model_copy(update={"qk_norm": False})
    part: Any = DifferentialAttention(config, layer)
    torch.nn.init.normal_(part.pair_norm.weight)
    for name in ("q1", "k1", "q2", "k2"):
        torch.nn.init.normal_(getattr(part, f"lambda_{name}"), std=0.3)
    T, E, group = 7, config.head_size, 4
    x = torch.randn(2, T, config.width)
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    parts = [part.lambda_q1 @ part.lambda_k1, part.lambda_q2 @ part.lambda_k2]
    amount = torch.exp(parts[0]) - torch.exp(parts[1]) + start
    q, k, v = (getattr(part, name)(x).view(2, T, -1, E).transpose(1, 2) for name in "qkv")  # (B, 8, T, E), (B, 2, T, E)
    ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
    values = torch.cat((v[:, 0], v[:, 1]), dim=2)  # one pair of key heads
    found = []
    for pair in range(group):
        maps = [
            (q[:, which * group + pair] @ k[:, which].transpose(1, 2) / math.sqrt(E)).masked_fill(ahead, -torch.inf)
            for which in (0, 1)
        ]
        y = (maps[0].softmax(2) - amount * maps[1].softmax(2)) @ values
        y = y / torch.sqrt((y * y).mean(2, keepdim=True) + config.norm_eps) * part.pair_norm.weight
        found.append(y * (1 - start))
    expected = torch.cat(found, dim=2) @ part.out.weight.T
    sight = AttentionMask(num_queries=T, num_keys=T, device=x.device)
    assert torch.allclose(part(x, None, sight), expected, atol=1e-5)


def test_pairs_of_differential_attention_share_a_slope_of_alibi() -> None:
    model = lively(CHOICES["differential in a window"])
    slopes = model._slopes("differential", torch.device("cpu")).view(1, 2, 2)
    assert slopes[0, 0].tolist() == slopes[0, 1].tolist() == [2.0**-4, 2.0**-8]
