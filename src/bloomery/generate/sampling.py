"""From scores to ids: greedy, or by chance under temperature, top-k and top-p."""

import math
from collections.abc import Sequence

from jaxtyping import Float

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.errors import CheckpointError

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5
"""Below it, sampling is greedy. Float32 logits divided by this stay finite in float64; by 1e-308 they do not."""


def choose(
    logits: Float[Tensor, " V"],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> int:
    """
    One id. Temperatures below MIN_TEMPERATURE take the highest score; ties go to the smallest id.

    Top-k keeps the k highest scores (0: all); top-p then keeps the fewest of them whose probabilities reach p, at least
    one (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751).
    """
    return choose_each(logits[None], [generator], temperature=temperature, top_k=top_k, top_p=top_p)[0]


def choose_each(
    logits: Float[Tensor, "B V"],
    generators: Sequence[torch.Generator | None],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[int]:
    """
    As `choose`, for rows that each have a generator of their own: a row gets what it would get alone. Raises
    CheckpointError where the largest logit of a row is not finite: NaN is larger than any number.
    """
    likeliest = logits.argmax(dim=-1)
    check_finite(logits.gather(-1, likeliest[:, None]))
    if temperature < MIN_TEMPERATURE:
        greedy: list[int] = likeliest.tolist()
        return greedy
    scores = logits.cpu().double() / temperature  # in this order: Apple's GPUs have no float64
    if not top_k and top_p >= 1.0:  # nothing is left out, and sorting is most of the work
        return _drawn(torch.softmax(scores, dim=-1), generators)
    ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    if top_k:
        ordered, ids = ordered[:, :top_k], ids[:, :top_k]
    chances = torch.softmax(ordered, dim=-1)
    if top_p < 1.0:
        before = chances.cumsum(-1) - chances  # what those ahead of each id already reach
        kept = before < top_p
        kept[:, 0] = True
        chances = torch.where(kept, chances, torch.zeros_like(chances))
    return [int(row[place]) for row, place in zip(ids, _drawn(chances, generators), strict=True)]


def check_finite(numbers: Tensor) -> None:
    """Raises CheckpointError where a number that a model computed is not finite."""
    if not all(map(math.isfinite, numbers.flatten().tolist())):
        what = "the model computes logits that are not finite: its weights are finite, and too large to compute with"
        raise CheckpointError(what, cure="Train it again with lower learning rates, or name an earlier checkpoint.")


def _drawn(chances: Float[Tensor, "B V"], generators: Sequence[torch.Generator | None]) -> list[int]:
    """The place of one in each row, by its own generator."""
    return [int(torch.multinomial(row, 1, generator=own)) for row, own in zip(chances, generators, strict=True)]
