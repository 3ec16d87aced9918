"""The shape of a model, as numbers. Needs no torch."""

from pydantic import Field, model_validator

from bloomery.core.config import Config, Positive


class ModelConfig(Config):
    """
    The Llama shape: rotary positions, grouped key/value heads, SwiGLU, RMSNorm, no biases.

    It maps onto `LlamaForCausalLM` without loss (Touvron et al. 2023, https://arxiv.org/abs/2307.09288).
    """

    width: Positive = 256
    """Of the residual stream."""
    num_layers: Positive = 6
    num_heads: Positive = 8
    """Query heads; the width is split among them."""
    num_kv_heads: Positive = 4
    """Key/value heads; each serves num_heads / num_kv_heads query heads."""
    mlp_width: Positive = 704
    context: Positive = 256
    """Most tokens that the model sees at once."""
    rope_theta: float = Field(10_000.0, gt=0)
    norm_eps: float = Field(1e-5, gt=0)
    tie_embeddings: bool = True
    """The head is the embedding, transposed."""

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @model_validator(mode="after")
    def _divides(self) -> "ModelConfig":
        if self.width % self.num_heads or self.head_width % 2:
            raise ValueError(f"width {self.width} must be num_heads {self.num_heads} times an even head width")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self
