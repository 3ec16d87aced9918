"""
How much of each domain goes into a mix: exact arithmetic over tokens, with weights, epoch caps and a token target.

    wanted(d) = min(size · weight(d) / Σ weights, tokens(d) · max_epochs(d))

`size` is the token target, or the largest for which no cap is reached before the others have their share. A domain
gives all of its documents as often as they fit, and of one epoch more those that come first in that epoch's order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from bloomery.core.errors import DataError

MAX_EPOCHS = "max_epochs"
"""Why a domain gives less than its share was to be."""


class Ask(NamedTuple):
    """What a recipe wants of one domain."""

    domain: str
    weight: float
    max_epochs: float


@dataclass(frozen=True)
class Quota:
    """What one domain gives."""

    share: Fraction
    """Asked of the mix."""
    asked: Fraction
    """Tokens that this share is."""
    wanted: Fraction
    """Tokens to give: no more than the epochs allow."""
    epochs: int
    """How often every document comes."""
    rest: int
    """Tokens of one epoch more: its documents, in order, that begin before as many."""

    @property
    def limited_by(self) -> str | None:
        """What keeps it from giving all that is asked."""
        return MAX_EPOCHS if self.wanted < self.asked else None


def quotas(sizes: Mapping[str, int], asks: Sequence[Ask], tokens: int | None) -> dict[str, Quota]:
    """
    What each domain gives, where `sizes` are the tokens that there are. Fewer than one document's tokens come on top,
    because documents are whole. Raises DataError for a domain without documents.
    """
    for ask in asks:
        if not sizes.get(ask.domain):
            known = ", ".join(sorted(sizes)) or "none"
            raise DataError(f"no documents of domain {ask.domain!r} are left", cure=f"Domains here: {known}.")
    total = sum(Fraction(ask.weight) for ask in asks)
    shares = {ask.domain: Fraction(ask.weight) / total for ask in asks}
    most = {ask.domain: sizes[ask.domain] * Fraction(ask.max_epochs) for ask in asks}
    size = min(most[domain] / share for domain, share in shares.items()) if tokens is None else Fraction(tokens)
    found = {}
    for domain, share in shares.items():
        wanted = min(size * share, most[domain])
        epochs = int(wanted // sizes[domain])
        rest = ceil(wanted - epochs * sizes[domain])
        found[domain] = Quota(share=share, asked=size * share, wanted=wanted, epochs=epochs, rest=rest)
    return found


def reached(
    quotas: Mapping[str, Quota], sizes: Mapping[str, int], tokens: Mapping[str, int], documents: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """For each domain what was asked, what was reached, how often it comes, and what held it back."""
    everything = sum(tokens.values())
    return {
        domain: {
            "asked": round(float(quota.share), 4),
            "share": round(tokens[domain] / everything, 4),
            "asked_tokens": ceil(quota.asked),
            "tokens": tokens[domain],
            "documents": documents[domain],
            "epochs": round(tokens[domain] / sizes[domain], 3),
            "limited_by": quota.limited_by,
        }
        for domain, quota in quotas.items()
    }
