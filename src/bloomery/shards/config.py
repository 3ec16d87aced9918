"""What shards are made of, as numbers: the weights of domains, or token files of others."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from bloomery.core.config import Config, Count, Positive


class ImportedShards(Config):
    """Token files that others made: of llm.c and its kin, of nanoGPT, of 1386. None of the corpus is used then."""

    folder: Path
    """With files for training and for validation, told apart by `train` and `val` in their names."""
    document_id: Count | None = None
    """The token between documents. None: the tokenizer's."""
    headerless: Literal["uint16", "uint32"] | None = None
    """What the numbers are in files that hold nothing else, as nanoGPT's. 1386's say it in their meta.yaml."""


class Weight(Config):
    domain: str
    weight: float = Field(gt=0)
    """Share of the mix, relative to the other weights."""
    max_epochs: float = Field(4.0, gt=0)
    """How often a document of this domain is repeated at most."""


class Anneal(Config):
    """A mix of its own for the last part of training, when the learning rate falls."""

    weights: tuple[Weight, ...] = Field(min_length=1)
    """As those of the mix. Epochs are counted anew."""
    tokens: Positive | None = None
    """Size of this mix."""
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Its size as a share of both mixes together."""

    @model_validator(mode="after")
    def _one_size_and_one_weight_a_domain(self) -> "Anneal":
        if (self.tokens is None) == (self.share is None):
            raise ValueError("give either tokens or share, so that it is known how large the anneal mix is")
        no_domain_twice("anneal.weights", [weight.domain for weight in self.weights])
        return self


def no_domain_twice(key: str, domains: list[str]) -> None:
    if twice := sorted({domain for domain in domains if domains.count(domain) > 1}):
        raise ValueError(f"{key} names the domain {', '.join(map(repr, twice))} twice; leave one of the two")
