"""Settings of low-rank adapters and of the frozen weights below them. Needs no torch."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from bloomery.core.bounds import Between
from bloomery.core.config import Config
from bloomery.core.errors import DataError
from bloomery.model.config import ModelConfig

Base = Literal["float32", "bfloat16", "int8", "nf4", "nf4_double"]
"""
How frozen matrices are kept: 4, 2, 1 + 4 / width, 0.53 and 0.52 bytes a weight. nf4_double also quantises the scales of
nf4.
"""


class Lora(Config):
    """
    Train only small matrices added to the frozen weights (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

        y = W x + s · B A x      A: rank × inputs, B: outputs × rank, s = alpha / rank
    """

    kind: Literal["lora"] = "lora"
    rank: Annotated[int, Between(1, 2**16, "no adapter has more")] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Between(1e-3, 1e6, "updates of the adapter are times alpha / rank")] = 32.0
    """Updates of an adapter are multiplied by alpha / rank."""
    dropout: Annotated[float, Between(0, 0.99, "something has to be left")] = 0.0
    """Share of the inputs of A that is left out in training."""
    target_modules: tuple[str, ...] = Field(("attention.*", "mlp.*"), min_length=1, max_length=64)
    """
    Which matrices of the blocks: paths as `attention.q` in every block or `blocks.3.mlp.down` in one; * stands for
    anything.
    """
    rank_stabilized: bool = False
    """s = alpha / √rank instead (rsLoRA: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
    base_dtype: Base = "float32"
    """How the frozen matrices of the blocks are kept. Embedding, head and vectors stay as they are."""

    @property
    def scale(self) -> float:
        """s"""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


def matrices(model: ModelConfig) -> Iterator[str]:
    """The paths of the matrices of the blocks, in their order."""
    for number in range(model.num_layers):
        is_gated = model.layer(number)[2] in ("swiglu", "geglu")
        yield from (f"blocks.{number}.attention.{name}" for name in ("q", "k", "v", "out"))
        yield from (f"blocks.{number}.mlp.{name}" for name in ("gate", "up", "down") if is_gated or name != "gate")


def targets(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The paths that patterns name, in their own order. Raises DataError for a pattern that names none."""
    for pattern in patterns:
        if not any(_named(name, pattern) for name in names):
            near = ", ".join(dict.fromkeys(_within(name) for name in names))
            what = f"the target {pattern!r} names no matrix of this model"
            raise DataError(what, where="lora.target_modules", hint=f"Each of its blocks has {near}.")
    return [name for name in names if any(_named(name, pattern) for pattern in patterns)]


def _named(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(_within(name), pattern)


def _within(name: str) -> str:
    """A path within its block: of blocks.3.mlp.up mlp.up."""
    return name.split(".", 2)[2]
