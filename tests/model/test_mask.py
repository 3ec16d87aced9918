from hypothesis import given
from hypothesis import strategies as st

from bloomery.model.attention import AttentionMask

import torch

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(1, 8))
def test_a_token_may_look_back_within_its_segment_and_window_and_nowhere_else(
    rows: list[list[int]], window: int
) -> None:
    mask = AttentionMask(num_queries=6, num_keys=6, device=CPU, segments=torch.tensor(rows), window=window).mask()
    for row, segments in enumerate(rows):
        for here in range(6):
            for there in range(6):
                allowed = here - window < there <= here and segments[there] == segments[here]
                assert bool(mask[row, here, there]) == allowed


def test_new_tokens_see_all_that_came_before_them() -> None:
    mask = AttentionMask(num_queries=2, num_keys=5, device=CPU).mask()
    assert mask.tolist() == [[[True] * 4 + [False], [True] * 5]]


def test_rows_of_one_document_without_a_limit_are_plainly_causal() -> None:
    plain = AttentionMask(num_queries=5, num_keys=5, device=CPU)
    assert plain.is_causal
    assert AttentionMask(num_queries=5, num_keys=5, device=CPU, window=5).is_causal
    assert not AttentionMask(num_queries=5, num_keys=5, device=CPU, window=4).is_causal
    assert not AttentionMask(num_queries=5, num_keys=5, device=CPU, slopes=torch.ones(2)).is_causal
    assert not AttentionMask(
        num_queries=5, num_keys=5, device=CPU, segments=torch.zeros(1, 5, dtype=torch.long)
    ).is_causal


def test_a_mask_is_made_once_and_shared_by_the_layers() -> None:
    mask = AttentionMask(num_queries=4, num_keys=4, device=CPU)
    assert mask.mask() is mask.mask()
    assert mask.bias(torch.float32) is mask.bias(torch.float32)
    assert mask.bias(torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(mask.bias(torch.float32)[:, 0].isinf(), ~mask.mask())
