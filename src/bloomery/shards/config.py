"""What shards are made of, as numbers: the weights of domains, or token files of others."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bloomery.core.bounds import Between, DiskPath, InnerShare, Tokens, Weight
from bloomery.core.config import Config, repeated


class ImportedShards(Config):
    """Token files that others made: of llm.c and its kin, of nanoGPT, of 1386. None of the corpus is used then."""

    folder: DiskPath
    """With files for training and for validation, told apart by `train` and `val` in their names."""
    document_id: Annotated[int, Between(0, 2**32 - 1, "token files hold at most 32 bits a token")] | None = None
    """The token between documents. None: the tokenizer's."""
    headerless: Literal["uint16", "uint32"] | None = None
    """What the numbers are in files that hold nothing else, as nanoGPT's. 1386's say it in their meta.yaml."""


class DomainWeight(Config):
    domain: str
    weight: Weight
    """Share of the mix, relative to the other weights."""
    max_epochs: Annotated[float, Between(1e-6, 1e4, "it counts repetitions")] = 4.0
    """How often a document of this domain is repeated at most."""


class Anneal(Config):
    """A mix of its own for the last part of training, when the learning rate falls."""

    weights: tuple[DomainWeight, ...] = Field(min_length=1)
    """As those of the mix. Epochs are counted anew."""
    tokens: Tokens | None = None
    """Size of this mix."""
    share: InnerShare | None = None
    """Its size as a share of both mixes together."""

    @model_validator(mode="after")
    def _one_size_and_one_weight_a_domain(self) -> "Anneal":
        if (self.tokens is None) == (self.share is None):
            raise ValueError("give either tokens or share, so that it is known how large the anneal mix is")
        no_domain_twice("anneal.weights", [weight.domain for weight in self.weights])
        return self


def no_domain_twice(key: str, domains: list[str]) -> None:
    if twice := repeated(domains):
        raise ValueError(f"{key} names the domain {', '.join(map(repr, twice))} twice; leave one of the two")
