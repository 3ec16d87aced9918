"""
What a model costs, from its shape alone: parameters and floating-point operations. Needs no torch.

    parameters  V·D (+ V·D untied) + L·(D·(H+2K)·E + H·E·D + 3·D·M + 2·D) + D
    FLOPs       6·(parameters − embedding lookup) + 6·L·H·E·T a token of training, attention counted causal

The second line is the convention of llm.c (forward 2, backward 4; half of the attention square).
"""

from dataclasses import dataclass

from bloomery.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Cost:
    parameters: int
    """Distinct weights; a tied head counts once."""
    matmul_parameters: int
    """Weights that take part in a matrix product for each token: all but the embedding's look-up."""
    train_flops_per_token: float


def cost(config: ModelConfig, vocab_size: int) -> Cost:
    D, E, M, V = config.width, config.head_size, config.mlp_width, vocab_size
    attention = D * E * (config.num_heads + 2 * config.num_kv_heads) + config.num_heads * E * D
    block = attention + 3 * D * M
    norms = (2 * config.num_layers + 1) * D
    tables = V * D if config.tie_embeddings else 2 * V * D
    matmul = config.num_layers * block + V * D
    return Cost(
        parameters=tables + config.num_layers * block + norms,
        matmul_parameters=matmul,
        train_flops_per_token=6.0 * matmul + 6.0 * config.num_layers * config.num_heads * E * config.context,
    )
