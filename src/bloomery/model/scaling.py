"""How rotary positions are stretched beyond the context that a model was first trained with. Needs no torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bloomery.core.bounds import Between, Context
from bloomery.core.config import Config

Factor = Annotated[float, Between(1, 1e6, "no context is stretched further")]
Frequency = Annotated[float, Between(1e-6, 1e6, "it counts turns over a context")]


class Linear(Config):
    """
        ω' = ω / factor

    (Chen et al. 2023, https://arxiv.org/abs/2306.15595)
    """

    kind: Literal["linear"] = "linear"
    factor: Factor


class Llama3Scaling(Config):
    """
        ω' = ω / factor                     where a turn takes more than original_context / low_freq_factor tokens
             ω                              where it takes fewer than original_context / high_freq_factor
             between the two, in proportion to original_context · ω / 2π

    (Llama 3.1: Dubey et al. 2024, https://arxiv.org/abs/2407.21783)
    """

    kind: Literal["llama3"] = "llama3"
    factor: Factor = 8.0
    low_freq_factor: Frequency = 1.0
    high_freq_factor: Frequency = 4.0
    original_context: Context = 8192

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "Llama3Scaling":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}"
            )
        return self


class Yarn(Config):
    """
        ω' = ω · ((1 − r) + r / factor)

    where r rises from 0 to 1 between the numbers that turn beta_fast and beta_slow times over original_context tokens.
    Queries and keys are scaled by attention_factor, √(1/t) of the paper; None: 0.1 · ln(factor) + 1.

    (Peng et al. 2023, https://arxiv.org/abs/2309.00071)
    """

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    original_context: Context
    beta_fast: Frequency = 32.0
    beta_slow: Frequency = 1.0
    attention_factor: Annotated[float, Between(1e-3, 1e3, "it scales queries and keys")] | None = None

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "Yarn":
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} must be above beta_slow {self.beta_slow}")
        return self


RopeScaling = Annotated[Linear | Llama3Scaling | Yarn, Field(discriminator="kind")]
