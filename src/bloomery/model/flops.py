"""
Parameters and floating-point operations of a model, from its shape alone. Needs no torch.

    parameters  tables V·D (twice if untied) and context·D; in each layer four matrices of attention and two or three
                of the feed-forward; norms, biases, and what differential attention and norms of queries and
                keys learn
    FLOPs       6·(weights in matmuls) + Σ layers 6·H·(E + F)·seen per training token

E is the width of a head, F of its values (2E in differential attention), and `seen` the mean number of tokens that
a token sees: T/2 for the causal triangle as in llm.c (forward 2, backward 4), W − W²/2T in a window of W.
"""

from dataclasses import dataclass

from bloomery.model.config import AttentionKind, FeedForwardKind, ModelConfig, Window


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
    vectors = _norm(config) + sum(2 * _norm(config) + _vectors(config, kind, mlp) for kind, _, mlp in layers)
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
    return kind in ("swiglu", "geglu")


def _norm(config: ModelConfig) -> int:
    """Of the residual stream."""
    if not config.norm_affine:
        return 0
    return config.hidden_size * (2 if config.norm == "layernorm" and config.biases == "all" else 1)


def _vectors(config: ModelConfig, attention: AttentionKind, mlp: FeedForwardKind) -> int:
    """Vector parameters of a layer, without its two norms."""
    E, M = config.head_size, config.intermediate_size
    heads = 2 * E if config.qk_norm and config.norm_affine else 0
    pairs = 4 * E + (2 * E if config.norm_affine else 0) if attention == "differential" else 0
    qkv = (config.num_heads + 2 * config.num_kv_heads) * E if config.biases != "none" else 0
    others = 2 * config.hidden_size + M + (M if _is_gated(mlp) else 0) if config.biases == "all" else 0
    return heads + pairs + qkv + others


def _attended(config: ModelConfig, attention: AttentionKind, window: Window) -> float:
    """FLOPs of attention scores and weighted sums of values, per training token."""
    T, E = config.context_length, config.head_size
    W = T if window == "full" else min(window, T)
    seen = W - W * W / (2 * T)
    values = 2 * E if attention == "differential" else E
    return 6.0 * config.num_heads * (E + values) * seen
