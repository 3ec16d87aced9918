"""
The shape of a model, its parameters and FLOPs, presets by name, and settings of adapters. No torch.

The shape is numbers and choices. Scaling stretches rotary positions beyond the context that a model was first
trained with. A preset includes the vocabulary that its published number of parameters counts. Nothing here needs
torch. The presets:

    plasma      1386.ai: Plasma 1.0, 1.1 and 1.2
    gpt2        Radford et al. 2019; as trained by llm.c, whose table of 50257 is padded to 50304 while it trains
    harness     LanguageModelTrainingHarness: its norms have no trained weights. In its 1b, differential layers have
                heads half as wide as here, and half as many key heads
    llama-3.1   Dubey et al. 2024, https://arxiv.org/abs/2407.21783
    baichuan2   Yang et al. 2023, https://arxiv.org/abs/2309.10305; without its NormHead

Counts from the shape alone:

    parameters  tables V·D (twice if untied) and context·D; in each layer four matrices of attention and two or three
                of the feed-forward; norms, biases, and what differential attention and norms of queries and
                keys learn
    FLOPs       6·(weights in matmuls) + Σ layers 6·H·(E + F)·seen per training token

E is the width of a head, and F the width of its values (2E in differential attention). `seen` is the mean number of
tokens that a token sees: T/2 for the causal triangle as in llm.c (forward 2, backward 4), W − W²/2T in a window of W.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from bloomery.core.config import Between, Config, Context
from bloomery.core.errors import DataError


@dataclass(frozen=True)
class ModelPreset:
    config: dict[str, Any]
    """Of a ModelConfig."""
    vocab_size: int
    """For the parameter count in listings; a recipe's tokenizer sets its own vocabulary size."""


def _shape(width: int, num_layers: int, num_heads: int, num_kv_heads: int, intermediate_size: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
    }


def _gpt2(width: int, num_layers: int, num_heads: int) -> ModelPreset:
    shape = _shape(width, num_layers, num_heads, num_heads, 4 * width)
    kinds = {"mlp": "gelu_tanh", "position_embedding": "learned", "norm": "layernorm", "biases": "all"}
    return ModelPreset(shape | kinds | {"context_length": 1024}, 50257)


PLASMA = {"norm_eps": 1e-6}
HARNESS = {"context_length": 8192, "rope_theta": 100_000.0, "norm_affine": False, "norm_eps": 1.1920928955078125e-07}
LLAMA_31 = {
    "context_length": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_context_length": 8192},
    "tie_embeddings": False,
}
BAICHUAN2 = {"context_length": 4096, "norm_eps": 1e-6, "tie_embeddings": False}

PRESETS = {
    "plasma-235m": ModelPreset(_shape(1024, 18, 16, 4, 2816) | PLASMA | {"context_length": 1024}, 32_000),
    "plasma-500m": ModelPreset(_shape(1280, 26, 20, 4, 3584) | PLASMA | {"context_length": 1024}, 48_000),
    "plasma-756m": ModelPreset(
        _shape(1536, 28, 24, 4, 4096) | PLASMA | {"context_length": 2048, "rope_theta": 100_000.0, "qk_norm": True},
        48_000,
    ),
    "gpt2-124m": _gpt2(768, 12, 12),
    "gpt2-350m": _gpt2(1024, 24, 16),
    "gpt2-774m": _gpt2(1280, 36, 20),
    "gpt2-1558m": _gpt2(1600, 48, 25),
    "harness-220m": ModelPreset(_shape(1024, 12, 16, 8, 3584) | HARNESS, 50_304),
    "harness-smol": ModelPreset(_shape(512, 30, 8, 4, 1408) | HARNESS, 50_304),
    "harness-smed": ModelPreset(_shape(768, 30, 12, 6, 2048) | HARNESS, 50_304),
    "harness-med": ModelPreset(_shape(960, 32, 15, 5, 2560) | HARNESS, 50_304),
    "harness-1b": ModelPreset(
        _shape(2048, 16, 32, 8, 8192) | HARNESS | {"attention": ["standard", "differential"]}, 50_304
    ),
    "llama-3.1-8b": ModelPreset(_shape(4096, 32, 32, 8, 14_336) | LLAMA_31, 128_256),
    "llama-3.1-70b": ModelPreset(_shape(8192, 80, 64, 8, 28_672) | LLAMA_31, 128_256),
    "llama-3.1-405b": ModelPreset(_shape(16_384, 126, 128, 8, 53_248) | LLAMA_31, 128_256),
    "baichuan2-7b": ModelPreset(_shape(4096, 32, 32, 32, 11_008) | BAICHUAN2, 125_696),
    "baichuan2-13b": ModelPreset(
        _shape(5120, 40, 40, 40, 13_696) | BAICHUAN2 | {"position_embedding": "alibi"}, 125_696
    ),
}


Factor = Annotated[float, Between(1, 1e6, "no context is stretched further")]
Frequency = Annotated[float, Between(1e-6, 1e6, "it counts rotations over a context")]


class LinearScaling(Config):
    """
        ω' = ω / factor

    (Chen et al. 2023, https://arxiv.org/abs/2306.15595)
    """

    kind: Literal["linear"] = "linear"
    factor: Factor
    """Ratio of the new context to the original context."""


class Llama3Scaling(Config):
    """
        ω' = ω / factor                     where a rotation takes over original_context_length / low_freq_factor
             ω                              where it takes under original_context_length / high_freq_factor
             between the two, in proportion to original_context_length · ω / 2π

    (Llama 3.1: Dubey et al. 2024, https://arxiv.org/abs/2407.21783)
    """

    kind: Literal["llama3"] = "llama3"
    factor: Factor = 8.0
    """How many times slow rotations are slowed down."""
    low_freq_factor: Frequency = 1.0
    """Sets the wavelength above which rotations are slowed down in full."""
    high_freq_factor: Frequency = 4.0
    """Sets the wavelength below which rotations stay as they are."""
    original_context_length: Context = 8192
    """Context that the weights were trained with."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "Llama3Scaling":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}"
            )
        return self


class YarnScaling(Config):
    """
        ω' = ω · ((1 − r) + r / factor)

    where r rises from 0 to 1 between the pairs that rotate beta_fast and beta_slow times over
    original_context_length tokens. Queries and keys are scaled by attention_factor, √(1/t) of the paper; None:
    0.1 · ln(factor) + 1.

    (Peng et al. 2023, https://arxiv.org/abs/2309.00071)
    """

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    """Ratio of the new context to the original context."""
    original_context_length: Context
    """Context that the weights were trained with."""
    beta_fast: Frequency = 32.0
    """Pairs that rotate more often stay as they are."""
    beta_slow: Frequency = 1.0
    """Pairs that rotate less often are slowed down in full."""
    attention_factor: Annotated[float, Between(1e-3, 1e3, "it scales queries and keys")] | None = None
    """Factor on queries and keys. Not set: 0.1 · ln(factor) + 1."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "YarnScaling":
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} must be above beta_slow {self.beta_slow}")
        return self


class LongRopeScaling(Config):
    """
        ω'(j) = ω(j) / short_factor(j)

    Queries and keys are scaled by attention_factor; None: √(1 + ln(factor) / ln(original_context_length)). Contexts
    are at most original_context_length: beyond it, long_factor replaces short_factor, also for tokens that were
    computed before. Bloomery does not do that; long_factor is there for export.

    (Ding et al. 2024, https://arxiv.org/abs/2402.13753)
    """

    kind: Literal["longrope"] = "longrope"
    factor: Factor
    """Ratio of the longest context to the original context."""
    original_context_length: Context
    """Context that the weights were first trained with."""
    short_factor: tuple[Annotated[float, Between(1e-3, 1e9, "it divides a frequency")], ...]
    """Divisor of each frequency."""
    long_factor: tuple[Annotated[float, Between(1e-3, 1e9, "it divides a frequency")], ...]
    """Divisor of each frequency in longer contexts."""
    attention_factor: Annotated[float, Between(1e-3, 1e3, "it scales queries and keys")] | None = None
    """Factor on queries and keys. Not set: √(1 + ln(factor) / ln(original_context_length))."""


RopeScaling = Annotated[LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling, Field(discriminator="kind")]


Heads = Annotated[int, Between(1, 2**14, "no model has more heads")]
MAX_WEIGHTS = 10**13
T = TypeVar("T")
AttentionKind = Literal["standard", "differential"]
FeedForwardKind = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2"]
GATED: tuple[FeedForwardKind, ...] = ("swiglu", "geglu", "geglu_tanh")
"""Feed-forwards with three matrices."""
BIASED = {"none": (), "qkv": ("qkv",), "attention": ("qkv", "out"), "mlp": ("mlp",), "all": ("qkv", "out", "mlp")}
"""Matrices of a block that have biases, by `biases`."""
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
    """A known shape: a name in `model/config.py`. The other keys of this section override it."""
    hidden_size: Annotated[int, Between(1, 2**20, "no model is wider")] = 256
    """Width of the residual stream."""
    num_layers: Annotated[int, Between(1, 1000, "no model is deeper")] = 6
    """Number of blocks."""
    num_heads: Heads = 8
    """Query heads."""
    num_kv_heads: Heads = 4
    """Key/value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: Annotated[int, Between(1, 2**16, "no head is wider")] | None = None
    """Width of one head. None: `hidden_size` divided by `num_heads`."""
    intermediate_size: Annotated[int, Between(1, 2**22, "no model is wider")] = 704
    """Width of the MLP of a block."""
    context_length: Context = 256
    """Maximum number of tokens that the model sees at once."""
    attention: Cycle[AttentionKind] = ("standard",)
    """Type of attention. Differential: the weights of one head minus λ times the weights of a second head."""
    sliding_window: Cycle[Window] = ("full",)
    """Tokens that a token sees, including itself: a number or "full" for each block. The list repeats over blocks."""
    mlp: Cycle[FeedForwardKind] = ("swiglu",)
    """Type of the MLP: gated (swiglu, geglu, geglu_tanh), or plain (gelu, gelu_tanh, relu2: squared relu)."""
    position_embedding: Literal["rope", "learned", "alibi", "none"] = "rope"
    """Type of positions. learned: a table as long as the context. None: only the causal mask gives the order."""
    rope_theta: Annotated[float, Between(0.1, 1e15, "angles fall as its powers, and end in float32")] = 10_000.0
    """Base of the rotation frequencies of RoPE."""
    rope_scaling: RopeScaling | None = None
    """Stretch RoPE to a longer context. Not set: none."""
    rope_layers: Cycle[bool] = (True,)
    """Whether a layer rotates queries and keys. Without RoPE in it, only the causal mask tells the order (NoPE)."""
    rope_local_theta: Annotated[float, Between(0.1, 1e15, "angles fall as its powers")] | None = None
    """Base of RoPE in layers with a sliding window, without `rope_scaling`. Not set: as in the other layers."""
    partial_rotary_factor: Annotated[float, Between(1e-3, 1, "it is the share of a head that rotates")] = 1.0
    """Share of the numbers of a head that RoPE rotates: the first ones."""
    query_pre_attn_scalar: Annotated[float, Between(1e-3, 1e6, "attention is divided by its root")] | None = None
    """Attention logits are divided by the square root of this number. Not set: head_dim."""
    scale_embeddings: bool = False
    """Multiply embeddings by √hidden_size."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Type of the norms."""
    norm_eps: Annotated[float, Between(1e-12, 0.1, "it is added to a mean square near 1")] = 1e-5
    """Added to the variance in a norm."""
    norm_affine: bool = True
    """Whether norms have a trained factor for each number."""
    norm_plus_one: bool = False
    """RMSNorm multiplies by 1 + weight, and weights start at 0 (Gemma)."""
    norm_order: Literal["before", "after", "both"] = "before"
    """Whether norms are before attention and MLP, after them (OLMo 2), or both (Gemma 3)."""
    parallel_residual: bool = False
    """Attention and MLP of a block both read the block's input (GPT-NeoX)."""
    qk_norm: bool = False
    """RMSNorm on the queries and keys of each head, before RoPE."""
    qk_norm_over: Literal["head", "width"] = "head"
    """Whether this norm covers each head separately, or all heads together (OLMo 2)."""
    biases: Literal["none", "qkv", "attention", "mlp", "all"] = "none"
    """
    Biases of linear layers: none, those of queries, keys and values, of attention, of the MLP, or all with LayerNorm.
    The head never has one.
    """
    tie_embeddings: bool = True
    """Whether the head is the embedding, transposed."""
    normalize_head: bool = False
    """Normalize the rows of the head to length 1 (NormHead of Baichuan2)."""

    @property
    def head_size(self) -> int:
        """Width of one head: E."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rotary_size(self) -> int:
        """How many numbers of a head RoPE rotates."""
        return int(self.head_size * self.partial_rotary_factor)

    def biased(self, matrices: Literal["qkv", "out", "mlp"]) -> bool:
        """Whether queries, keys and values, the output of attention, or the MLP have biases."""
        return matrices in BIASED[self.biases]

    def rotates(self, number: int) -> bool:
        """Whether layer `number` has RoPE."""
        return self.position_embedding == "rope" and self.rope_layers[number % len(self.rope_layers)]

    def layer(self, number: int) -> tuple[AttentionKind, Window, FeedForwardKind]:
        """What layer `number`, counted from 0, is made of."""
        cycles = (self.attention, self.sliding_window, self.mlp)
        attention, window, mlp = (cycle[number % len(cycle)] for cycle in cycles)
        return attention, window, mlp  # type: ignore[return-value]

    @property
    def turn(self) -> int:
        """Layers until their kinds begin again."""
        return math.lcm(len(self.attention), len(self.sliding_window), len(self.mlp))

    def of_every_layer(self, name: str) -> Any:
        """A setting; of one that cycles, an entry for each layer. Two cycles that say the same are equal so."""
        value = getattr(self, name)
        return tuple(value[n % len(value)] for n in range(self.num_layers)) if isinstance(value, tuple) else value

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, raw: Any) -> Any:
        """The preset's values, overridden by the given keys. Its name is dropped, so equal shapes compare equal."""
        if not isinstance(raw, dict) or not isinstance(raw.get("preset", 0), str):
            return raw
        name, own = raw["preset"], {key: value for key, value in raw.items() if key != "preset"}
        if name and name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"use one of {', '.join(PRESETS)}"
            raise ValueError(f"there is no preset {name!r}; {hint}")
        return (PRESETS[name].config if name else {}) | own

    @model_validator(mode="after")
    def _is_no_larger_than_any(self) -> "ModelConfig":
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        if (weights := self.num_layers * self.hidden_size * (heads + 2 * self.intermediate_size)) > MAX_WEIGHTS:
            raise ValueError(
                f"num_layers {self.num_layers:,}, hidden_size {self.hidden_size:,} and intermediate_size "
                f"{self.intermediate_size:,} give about {weights:.1e} weights; the limit is {MAX_WEIGHTS:.0e}"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelConfig":
        if self.head_dim is None and (self.hidden_size % self.num_heads or self.hidden_size < self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}; else set head_dim"
            )
        if self.position_embedding == "rope" and self.head_size % 2:
            raise ValueError(f'position_embedding="rope" needs an even head_dim, not {self.head_size}')
        if self.position_embedding != "rope":
            for name in ("rope_scaling", "rope_layers", "rope_local_theta", "partial_rotary_factor"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f'{name} needs position_embedding="rope", not {self.position_embedding!r}')
        elif self.rotary_size % 2 or not self.rotary_size:
            raise ValueError(
                f"partial_rotary_factor {self.partial_rotary_factor} rotates {self.rotary_size} of "
                f"{self.head_size} numbers of a head; it must be an even number above 0"
            )
        self._longrope_fits()
        if self.norm_plus_one and (self.norm != "rmsnorm" or not self.norm_affine):
            raise ValueError("norm_plus_one is for norm='rmsnorm' with norm_affine=true")
        if self.parallel_residual and self.norm_order != "before":
            raise ValueError(f"parallel_residual needs norm_order='before', not {self.norm_order!r}")
        if self.normalize_head and self.tie_embeddings:
            raise ValueError("normalize_head needs a separate output matrix: set tie_embeddings=false")
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"yarn divides by the logarithm of rope_theta {self.rope_theta}, which must be above 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if "differential" in self.attention and self.num_kv_heads % 2:
            raise ValueError(f"differential attention pairs heads: num_kv_heads {self.num_kv_heads} must be even")
        return self

    def _longrope_fits(self) -> None:
        if not isinstance(scaling := self.rope_scaling, LongRopeScaling):
            return
        if self.context_length > scaling.original_context_length:
            raise ValueError(
                f"context_length {self.context_length:,} is beyond original_context_length "
                f"{scaling.original_context_length:,} of longrope; longer contexts are not supported"
            )
        if scaling.original_context_length < 2:
            raise ValueError("original_context_length of longrope must be above 1, because its logarithm divides")
        for name in ("short_factor", "long_factor"):
            if (count := len(getattr(scaling, name))) != self.rotary_size // 2:
                raise ValueError(f"{name} has {count} numbers for {self.rotary_size // 2} frequencies")


@dataclass(frozen=True, kw_only=True)
class Cost:
    parameters: int
    """Distinct weights; a tied head counts once."""
    matmul_parameters: int
    """Weights used in a matmul for each token: all except biases, norms and embedding look-ups."""
    train_flops_per_token: float


def cost(config: ModelConfig, vocab_size: int) -> Cost:
    """Of a row of `context_length` tokens."""
    D, V, L = config.hidden_size, vocab_size, config.num_layers
    layers = [config.layer(number) for number in range(L)]
    matmul = V * D + sum(_attention(config) + _feed_forward(config, kind) for _, _, kind in layers)
    tables = 0 if config.tie_embeddings else V * D
    tables += config.context_length * D if config.position_embedding == "learned" else 0
    norms = (4 if config.norm_order == "both" else 2) * _norm(config)
    vectors = _norm(config) + sum(norms + _vectors(config, kind, mlp) for kind, _, mlp in layers)
    seen = sum(_attended(config, kind, window) for kind, window, _ in layers)
    return Cost(
        parameters=matmul + tables + vectors,
        matmul_parameters=matmul,
        train_flops_per_token=6.0 * matmul + seen,
    )


def _attention(config: ModelConfig) -> int:
    return 2 * config.hidden_size * config.head_size * (config.num_heads + config.num_kv_heads)


def _feed_forward(config: ModelConfig, kind: FeedForwardKind) -> int:
    return (3 if _is_gated(kind) else 2) * config.hidden_size * config.intermediate_size


def _is_gated(kind: FeedForwardKind) -> bool:
    return kind in GATED


def _norm(config: ModelConfig) -> int:
    """Width of the residual stream."""
    if not config.norm_affine:
        return 0
    return config.hidden_size * (2 if config.norm == "layernorm" and config.biases == "all" else 1)


def _vectors(config: ModelConfig, attention: AttentionKind, mlp: FeedForwardKind) -> int:
    """Vector parameters of a layer, without its two norms."""
    E, M = config.head_size, config.intermediate_size
    normed = config.num_heads + config.num_kv_heads if config.qk_norm_over == "width" else 2
    heads = normed * E if config.qk_norm and config.norm_affine else 0
    pairs = 4 * E + (2 * E if config.norm_affine else 0) if attention == "differential" else 0
    qkv = (config.num_heads + 2 * config.num_kv_heads) * E if config.biased("qkv") else 0
    out = config.hidden_size if config.biased("out") else 0
    feed_forward = config.hidden_size + M + (M if _is_gated(mlp) else 0) if config.biased("mlp") else 0
    return heads + pairs + qkv + out + feed_forward


def _attended(config: ModelConfig, attention: AttentionKind, window: Window) -> float:
    """FLOPs of attention scores and weighted sums of values, per training token."""
    T, E = config.context_length, config.head_size
    W = T if window == "full" else min(window, T)
    seen = W - W * W / (2 * T)
    values = 2 * E if attention == "differential" else E
    return 6.0 * config.num_heads * (E + values) * seen


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
    """Scale of an adapter: its output is multiplied by alpha / rank."""
    dropout: Annotated[float, Between(0, 0.99, "something has to be left")] = 0.0
    """Share of the inputs of A that is left out in training."""
    target_modules: tuple[str, ...] = Field(("attention.*", "mlp.*"), min_length=1, max_length=64)
    """
    Which matrices of the blocks: `attention.q` in every block, `blocks.3.mlp.down` in one, * for anything. Also:
    "all-linear", names of other programs (q_proj, W_pack, c_attn, gate_up_proj), and "re:" with a regular expression.
    """
    rank_stabilized: bool = False
    """s = alpha / √rank instead (rsLoRA: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """
    Train the length of each row of W + s · B A apart from its direction (DoRA: Liu et al. 2024,
    https://arxiv.org/abs/2402.09353). Not with dropout.
    """
    base_dtype: Base | Literal["auto"] = "float32"
    """
    Number format of the frozen matrices of the blocks. Embedding, head and vectors do not change. "auto": as in the
    files of the model; float16 and the blocks of a quantized GGUF file become bfloat16.
    """

    @model_validator(mode="after")
    def _drops_nothing_of_a_direction(self) -> "Lora":
        if self.dora and self.dropout:
            raise ValueError(f"dora needs whole rows, but dropout={self.dropout:g} drops part of them: set dropout=0")
        return self

    @property
    def frozen_dtype(self) -> Base:
        """The format that `base_dtype` names. "auto" is replaced once the model is known."""
        assert self.base_dtype != "auto", "the model that says which format auto is was not looked at"
        return self.base_dtype

    @property
    def scale(self) -> float:
        """s"""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


def matrices(model: ModelConfig) -> Iterator[str]:
    """The paths of the matrices of the blocks, in their order."""
    for number in range(model.num_layers):
        is_gated = model.layer(number)[2] in GATED
        yield from (f"blocks.{number}.attention.{name}" for name in ("q", "k", "v", "out"))
        yield from (f"blocks.{number}.mlp.{name}" for name in ("gate", "up", "down") if is_gated or name != "gate")


NAMES: Mapping[str, tuple[str, ...]] = {
    "q_proj": ("attention.q",),
    "k_proj": ("attention.k",),
    "v_proj": ("attention.v",),
    "o_proj": ("attention.out",),
    "out_proj": ("attention.out",),
    "dense": ("attention.out",),
    "qkv_proj": ("attention.q", "attention.k", "attention.v"),
    "query_key_value": ("attention.q", "attention.k", "attention.v"),
    "W_pack": ("attention.q", "attention.k", "attention.v"),
    "c_attn": ("attention.q", "attention.k", "attention.v"),
    "attn.c_proj": ("attention.out",),
    "c_proj": ("attention.out", "mlp.down"),
    "c_fc": ("mlp.up",),
    "fc1": ("mlp.up",),
    "fc2": ("mlp.down",),
    "dense_h_to_4h": ("mlp.up",),
    "dense_4h_to_h": ("mlp.down",),
    "mlp.c_proj": ("mlp.down",),
    "gate_proj": ("mlp.gate",),
    "up_proj": ("mlp.up",),
    "gate_up_proj": ("mlp.gate", "mlp.up"),
    "down_proj": ("mlp.down",),
    "w1": ("mlp.gate",),
    "w2": ("mlp.down",),
    "w3": ("mlp.up",),
    "all-linear": ("attention.*", "mlp.*"),
}
"""Names that other programs have for matrices of a block, or for several of them in one."""
EXPRESSION = "re:"


def targets(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The paths that patterns name, in their own order. Raises DataError for a pattern that names none."""
    for pattern in patterns:
        if not any(_named(name, pattern) for name in names):
            near = ", ".join(dict.fromkeys(_within(name) for name in names))
            what = f"the target {pattern!r} matches no matrix of this model"
            within = {_within(name) for name in names}
            others = ", ".join(name for name, ours in NAMES.items() if any(_fits(one, ours) for one in within))
            hint = f"Use the matrices of a block: {near}. Other names for them: {others}."
            raise DataError(what, where="lora.target_modules", hint=hint)
    return [name for name in names if any(_named(name, pattern) for pattern in patterns)]


def _named(name: str, pattern: str) -> bool:
    if pattern.startswith(EXPRESSION):
        try:
            expression = re.compile(pattern.removeprefix(EXPRESSION))
        except re.error as error:
            what = f"the target {pattern!r} is not a regular expression: {error}"
            raise DataError(
                what, where="lora.target_modules", hint="Use Python's syntax for regular expressions."
            ) from None
        return bool(expression.fullmatch(name) or expression.fullmatch(_within(name)))
    return fnmatchcase(name, pattern) or _fits(_within(name), NAMES.get(pattern, (pattern,)))


def _fits(within: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(within, pattern) for pattern in patterns)


def _within(name: str) -> str:
    """A path within its block: of blocks.3.mlp.up mlp.up."""
    return name.split(".", 2)[2]


Float8 = Literal["off", "head", "all"]
"""Which matmuls of training multiply numbers of 8 bits."""
FLOAT8_SIDE = 16
"""What GPUs want each side of a matmul of 8-bit numbers to be a multiple of."""


def without_float8(hidden_size: int, name: str = "") -> str:
    """What to set for a model with a matrix that cannot be multiplied in 8 bits."""
    only_off = name == "head" or hidden_size % FLOAT8_SIDE
    return 'Set float8="off".' if only_off else 'Set float8="head" or "off".'
