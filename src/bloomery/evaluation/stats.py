"""Means of evaluation results, their confidence intervals, and how both are written."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def wilson(successes: int, n: int) -> tuple[float, float]:
    """
    The 95 % interval of a share, after Wilson (1927): never outside 0 … 1, and honest for small n and shares near 1.

    (0, 1) for n = 0: nothing is known.
    """
    if n == 0:
        return 0.0, 1.0
    z = 1.959964
    share = successes / n
    middle = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # where the share is 0 or 1, so is the bound


@dataclass(frozen=True)
class Score:
    """The mean of some numbers, and where it would lie with 95 % confidence."""

    value: float | None
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Score":
        """Of shares by Wilson, of other numbers by bootstrap; without any number, nothing is known."""
        if not values:
            return cls(None, 0.0, 1.0, 0)
        if all(value in (0, 1) for value in values):
            low, high = wilson(round(sum(values)), len(values))
        else:
            low, high = bootstrap(values)
        return cls(round(sum(values) / len(values), 6), round(low, 6), round(high, 6), len(values))


def bootstrap(values: Sequence[float], *, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean, from means of resamples of the same size (Efron 1979); a seed fixes it."""
    array, rng = np.asarray(values, np.float64), np.random.default_rng(seed)
    means = [float(array[rng.integers(0, len(array), len(array))].mean()) for _ in range(draws)]
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return low, high


def pass_at(k: int, tried: int, passed: int) -> float:
    """
    pass@k = 1 − C(tried − passed, k) / C(tried, k)

    The chance that one of k programs passes, of `tried` that were written, without bias (Chen et al. 2021, Evaluating
    large language models trained on code, §2.1).
    """
    assert 0 <= passed <= tried >= k >= 1, f"pass@{k} of {passed} of {tried}"
    return 1.0 - math.comb(tried - passed, k) / math.comb(tried, k)


PERCENT = ("acc", "acc_norm", "exact", "flexible", "right", "ended")


def shown(metric: str, score: Mapping[str, Any]) -> str:
    if score["value"] is None:
        return "–"
    if metric in PERCENT or metric.startswith("pass@"):
        return f"{score['value']:.1%} ({score['low']:.1%} to {score['high']:.1%})"
    value, low, high = (_written(score[name]) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _written(number: float) -> str:
    """With four digits, and no exponent below a billion."""
    return f"{number:,.0f}" if 1000 <= number < 1e9 else f"{number:.4g}"
