"""The shape of a model, as numbers and choices. Needs no torch."""

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from bloomery.core.bounds import Between, Context
from bloomery.core.config import Config
from bloomery.model.presets import PRESETS
from bloomery.model.scaling import RopeScaling

Heads = Annotated[int, Between(1, 2**14, "no model has more heads")]
MAX_WEIGHTS = 10**13
T = TypeVar("T")
AttentionKind = Literal["standard", "differential"]
FeedForwardKind = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2"]
Window = Context | Literal["full"]


def _listed(value: Any) -> Any:
    """`attention = "differential"` is a cycle of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Cycle = Annotated[tuple[T, ...], Field(min_length=1), BeforeValidator(_listed)]
"""Layer N takes entry N, and begins again after the last."""


class ModelConfig(Config):
    """
    A decoder. By default the Llama shape: rotary positions, grouped key/value heads, SwiGLU, RMSNorm, no biases.

    That maps onto `LlamaForCausalLM` without loss (Touvron et al. 2023, https://arxiv.org/abs/2307.09288); which other
    choices another program can load, `bloomery.weights` knows.
    """

    preset: str = ""
    """A known shape, by its name in `model/presets.py`. What else is said here is changed in it."""
    width: Annotated[int, Between(1, 2**20, "no model is wider")] = 256
    """Of the residual stream."""
    num_layers: Annotated[int, Between(1, 1000, "no model is deeper")] = 6
    num_heads: Heads = 8
    """Query heads."""
    num_kv_heads: Heads = 4
    """Key/value heads; each serves num_heads / num_kv_heads query heads."""
    head_width: Annotated[int, Between(1, 2**16, "no head is wider")] | None = None
    """Of one head. None: the width is split among the query heads."""
    mlp_width: Annotated[int, Between(1, 2**22, "no model is wider")] = 704
    context: Context = 256
    """Most tokens that the model sees at once."""
    attention: Cycle[AttentionKind] = ("standard",)
    """Differential: a pair of heads is one, whose weights are those of the first less λ times those of the second."""
    sliding_window: Cycle[Window] = ("full",)
    """How many tokens a token sees, itself and those before it."""
    feed_forward: Cycle[FeedForwardKind] = ("swiglu",)
    """Gated (swiglu, geglu) or plain (gelu, its approximation by tanh, the square of relu)."""
    positions: Literal["rotary", "absolute", "alibi", "none"] = "rotary"
    """Absolute: a learned table, which ends with the context. None: the causal mask alone tells the order."""
    rope_theta: Annotated[float, Between(0.1, 1e15, "angles fall as its powers, and end in float32")] = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Annotated[float, Between(1e-12, 0.1, "it is added to a mean square near 1")] = 1e-5
    norm_weights: bool = True
    """Whether norms learn a factor for each number."""
    qk_norm: bool = False
    """RMSNorm on the queries and keys of each head, before they are turned."""
    biases: Literal["none", "qkv", "all"] = "none"
    """All: also in LayerNorm. The head has none in any case."""
    tie_embeddings: bool = True
    """The head is the embedding, transposed."""

    @property
    def head_size(self) -> int:
        """Width of one head: E."""
        return self.head_width or self.width // self.num_heads

    def layer(self, number: int) -> tuple[AttentionKind, Window, FeedForwardKind]:
        """What layer `number`, counted from 0, is made of."""
        cycles = (self.attention, self.sliding_window, self.feed_forward)
        attention, window, feed_forward = (cycle[number % len(cycle)] for cycle in cycles)
        return attention, window, feed_forward  # type: ignore[return-value]

    def of_every_layer(self, name: str) -> Any:
        """A setting; of one that cycles, an entry for each layer. Two cycles that say the same are equal so."""
        value = getattr(self, name)
        return tuple(value[n % len(value)] for n in range(self.num_layers)) if isinstance(value, tuple) else value

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        """The preset's numbers, under what is given. Its name is not kept: a shape is the same however it was said."""
        if not isinstance(given, dict) or not isinstance(given.get("preset", 0), str):
            return given
        name, own = given["preset"], {key: value for key, value in given.items() if key != "preset"}
        if name and name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"known are {', '.join(PRESETS)}"
            raise ValueError(f"there is no preset {name!r}; {hint}")
        return (PRESETS[name].config if name else {}) | own

    @model_validator(mode="after")
    def _is_no_larger_than_any(self) -> "ModelConfig":
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        if (weights := self.num_layers * self.width * (heads + 2 * self.mlp_width)) > MAX_WEIGHTS:
            raise ValueError(
                f"num_layers {self.num_layers:,}, width {self.width:,} and mlp_width {self.mlp_width:,} are about "
                f"{weights:.1e} weights; no model has more than {MAX_WEIGHTS:.0e}"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelConfig":
        if self.head_width is None and (self.width % self.num_heads or self.width < self.num_heads):
            raise ValueError(
                f"width {self.width} must be a multiple of num_heads {self.num_heads}, or head_width given"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(f"rotary positions turn pairs of numbers, and a head has {self.head_size}")
        if self.positions != "rotary" and self.rope_scaling is not None:
            raise ValueError(f"rope_scaling is for rotary positions, and positions is {self.positions!r}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"yarn divides by the logarithm of rope_theta {self.rope_theta}, which must be above 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if "differential" in self.attention and self.num_kv_heads % 2:
            raise ValueError(f"differential attention pairs heads: num_kv_heads {self.num_kv_heads} must be even")
        return self
