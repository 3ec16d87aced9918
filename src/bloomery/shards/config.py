"""
Weights of domains, imported token files, and how many tokens each domain contributes.

    wanted(d) = min(size · weight(d) / Σ weights, tokens(d) · max_epochs(d))

`size` is the token target. Without a target, `size` is the largest value for which no cap is reached before the
others have their share. A domain gives all of its documents as many times as they fit. Of one more epoch it gives
the documents that come first in that epoch's order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from bloomery.core.config import Between, Config, DiskPath, InnerShare, TokenCount, Weight, repeated
from bloomery.core.errors import DataError


class ImportedShards(Config):
    """Token files of other programs: llm.c, nanoGPT or 1386.ai. The recipe's documents are not used then."""

    folder: DiskPath
    """The folder of token files. `train` and `val` in their names distinguish training from validation."""
    document_id: Annotated[int, Between(0, 2**32 - 1, "token files hold at most 32 bits per token")] | None = None
    """The token between documents. None: the tokenizer's."""
    headerless: Literal["uint16", "uint32"] | None = None
    """Number type of files without a header, such as nanoGPT's. Those of 1386.ai have it in their meta.yaml."""


class DomainWeight(Config):
    domain: str
    """The domain."""
    weight: Weight
    """Weight of the domain: its share of the mix, relative to the other domains."""
    max_epochs: Annotated[float, Between(1e-6, 1e4, "it counts repetitions")] = 4.0
    """Maximum number of times that a document of this domain occurs."""


class Anneal(Config):
    """A mix of its own for the last part of training, when the learning rate falls."""

    weights: tuple[DomainWeight, ...] = Field(min_length=1)
    """Weights of domains, as in the mix. Epochs are counted again from the start."""
    tokens: TokenCount | None = None
    """Size of this mix."""
    fraction: InnerShare | None = None
    """Size of this mix, as a share of both mixes together."""

    @model_validator(mode="after")
    def _one_size_and_one_weight_a_domain(self) -> "Anneal":
        if (self.tokens is None) == (self.fraction is None):
            raise ValueError("set either tokens or fraction: one of them gives the size of the anneal mix")
        no_domain_twice("anneal.weights", [weight.domain for weight in self.weights])
        return self


def no_domain_twice(key: str, domains: list[str]) -> None:
    if twice := repeated(domains):
        raise ValueError(f"{key} has the domain {', '.join(map(repr, twice))} twice; remove one of them")


MAX_EPOCHS = "max_epochs"
"""Why a domain gives less than its share was to be."""


class MixTarget(NamedTuple):
    """What a recipe wants of one domain."""

    domain: str
    weight: float
    max_epochs: float


@dataclass(frozen=True)
class MixShare:
    """What one domain gives."""

    share: Fraction
    """Asked of the mix."""
    asked: Fraction
    """Tokens that this share is."""
    target_tokens: Fraction
    """Tokens to give: no more than the epochs allow."""
    epochs: int
    """How often every document comes."""
    rest: int
    """Tokens of one epoch more: its documents, in order, that begin before as many."""

    @property
    def limited_by(self) -> str | None:
        """What keeps it from giving all that is asked."""
        return MAX_EPOCHS if self.target_tokens < self.asked else None


def quotas(sizes: Mapping[str, int], asks: Sequence[MixTarget], tokens: int | None) -> dict[str, MixShare]:
    """
    What each domain gives, where `sizes` are the tokens that there are. Fewer than one document's tokens come on top,
    because documents are whole. Raises DataError for a domain without documents.
    """
    for ask in asks:
        if not sizes.get(ask.domain):
            known = ", ".join(sorted(sizes)) or "none"
            raise DataError(f"no documents of domain {ask.domain!r} are left", hint=f"Use one of the domains {known}.")
    total = sum(Fraction(ask.weight) for ask in asks)
    shares = {ask.domain: Fraction(ask.weight) / total for ask in asks}
    most = {ask.domain: sizes[ask.domain] * Fraction(ask.max_epochs) for ask in asks}
    size = min(most[domain] / share for domain, share in shares.items()) if tokens is None else Fraction(tokens)
    by_domain = {}
    for domain, share in shares.items():
        target_tokens = min(size * share, most[domain])
        epochs = int(target_tokens // sizes[domain])
        rest = ceil(target_tokens - epochs * sizes[domain])
        by_domain[domain] = MixShare(
            share=share, asked=size * share, target_tokens=target_tokens, epochs=epochs, rest=rest
        )
    return by_domain


def reached(
    quotas: Mapping[str, MixShare], sizes: Mapping[str, int], tokens: Mapping[str, int], documents: Mapping[str, int]
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
