"""
One function for each loss on preferences: from log-probabilities of whole answers to a loss for each.

Letters used for shapes: P pairs, or single answers. All losses and rewards are in nats.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.train.preference.config import Dpo, Ipo, Kto, SimPo

import torch
import torch.nn.functional as F
from torch import Tensor


class Answers(NamedTuple):
    """Answers under the model that is trained, and under the reference."""

    now: Float[Tensor, " P"]
    """Log-probability of all its tokens."""
    before: Float[Tensor, " P"]
    tokens: Float[Tensor, " P"]


class Judged(NamedTuple):
    """What a loss makes of pairs."""

    losses: Float[Tensor, " P"]
    chosen: Float[Tensor, " P"]
    """How much the loss takes the model to like the chosen answer: its reward."""
    rejected: Float[Tensor, " P"]


def dpo(chosen: Answers, rejected: Answers, how: Dpo) -> Judged:
    """Rafailov et al. 2023, eq. 7; with smoothing, Mitchell's conservative DPO."""
    good, bad = (how.beta * (one.now - one.before) for one in (chosen, rejected))
    margin = good - bad
    losses = -(1 - how.smoothing) * F.logsigmoid(margin) - how.smoothing * F.logsigmoid(-margin)
    return Judged(losses, good, bad)


def ipo(chosen: Answers, rejected: Answers, how: Ipo) -> Judged:
    """Azar et al. 2023, eq. 17."""
    good, bad = ((one.now - one.before) / one.tokens for one in (chosen, rejected))
    return Judged((good - bad - 1 / (2 * how.beta)).square(), how.beta * good, how.beta * bad)


def simpo(chosen: Answers, rejected: Answers, how: SimPo) -> Judged:
    """Meng et al. 2024, eq. 6."""
    good, bad = (how.beta * one.now / one.tokens for one in (chosen, rejected))
    return Judged(-F.logsigmoid(good - bad - how.gamma), good, bad)


def kto(
    answers: Answers, wanted: Bool[Tensor, " P"], divergence: Float[Tensor, ""], how: Kto
) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    """Losses and rewards (Ethayarajh et al. 2024, eq. 8). `divergence` is z, which has no gradient."""
    reward = how.beta * (answers.now - answers.before)
    gain = torch.where(wanted, reward - how.beta * divergence, how.beta * divergence - reward)
    weight = torch.where(wanted, how.wanted, how.unwanted)
    return weight * (1 - torch.sigmoid(gain)), reward


def clipped(
    now: Tensor, drawn: Tensor, advantage: Tensor, clip: float
) -> tuple[Float[Tensor, "..."], Bool[Tensor, "..."]]:
    """
    −min(ρA, clip(ρ) A) with ρ = exp(now − drawn), and where the clipped one counts (Schulman et al. 2017, eq. 7,
    https://arxiv.org/abs/1707.06347).
    """
    ratio = torch.exp(now - drawn)
    free, held = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
    return -torch.minimum(free, held), held < free


def divergence(now: Tensor, before: Tensor) -> Float[Tensor, "..."]:
    """
    An estimate of KL(now ‖ before) from tokens drawn by `now`, unbiased and never negative: q − log q − 1, where q is
    before / now ("k3": Schulman 2020, http://joschu.net/blog/kl-approx.html).
    """
    log_q = before - now
    return torch.exp(log_q) - log_q - 1
