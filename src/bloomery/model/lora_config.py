"""What can be said about low-rank adapters and the frozen weights below them. Needs no torch."""

from typing import Annotated, Literal

from pydantic import Field

from bloomery.core.config import Config, Positive

Base = Literal["float32", "bfloat16", "int8", "nf4", "nf4_double"]
"""
How frozen matrices are kept: 4, 2, 1 + 4 / width, 0.53 and 0.52 bytes a weight. nf4_double also quantises the scales of
nf4.
"""


class Lora(Config):
    """
    Only small matrices beside the frozen ones are trained (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

        y = W x + s · B A x      A: rank × inputs, B: outputs × rank, s = alpha / rank
    """

    kind: Literal["lora"] = "lora"
    rank: Positive = 16
    alpha: float = Field(32.0, gt=0)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of A that is left out in training."""
    targets: tuple[str, ...] = Field(("attention.*", "mlp.*"), min_length=1)
    """
    Which matrices of the blocks: paths as `attention.q` in every block or `blocks.3.mlp.down` in one; * stands for
    anything.
    """
    rank_stabilized: bool = False
    """s = alpha / √rank instead (rsLoRA: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
    base: Base = "float32"
    """How the frozen matrices of the blocks are kept. Embedding, head and vectors stay as they are."""

    @property
    def scale(self) -> float:
        """s"""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)
