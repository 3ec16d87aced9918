"""
What a run needs, before anything is allocated: parameters, bytes, work. Arithmetic on the recipe; needs no torch.

    weights, gradients    4 bytes a parameter each
    optimizer             bytes a parameter, by `OPTIMIZER_BYTES`
    activations           bytes a token and layer of what the backward pass reads again, by the formula below
"""

from dataclasses import dataclass

from bloomery.model.config import ModelConfig
from bloomery.model.cost import cost
from bloomery.train.config import AdamW8bit, Optimizer, Training

BYTES = 4

OPTIMIZER_BYTES = {
    "adamw": (8, 8, 8),
    "muon": (4, 8, 8),
    "ademamix": (12, 12, 12),
    "adamw8bit": (2, 2, 8),
    "lion": (4, 4, 4),
}
"""What an optimizer keeps of a number in a matrix of a block, in a table outside of them, and in a vector."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    parameters: int
    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    tokens: int
    """Positions that go through the model, padding included."""
    flops: float

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def rows_per_step(config: Training, context: int) -> int:
    """Rows of `context` tokens in a step of the whole global batch; at least one."""
    return max(1, config.tokens_per_step // context)


def rows_at_once(config: Training, context: int) -> int:
    """Rows of `context` tokens that go through the model together; at least one."""
    return max(1, config.micro_batch_tokens // context)


def plan(config: Training, model: ModelConfig, vocab_size: int) -> TrainingPlan:
    """An estimate, not yet checked against a dry run: allocator and libraries come on top."""
    facts = cost(model, vocab_size)
    rows = rows_per_step(config, model.context)
    tokens = config.steps * rows * model.context
    return TrainingPlan(
        parameters=facts.parameters,
        weights_bytes=BYTES * facts.parameters,
        gradient_bytes=BYTES * facts.parameters,
        optimizer_bytes=optimizer_bytes(config.optimizer, model, vocab_size),
        activation_bytes=min(rows, rows_at_once(config, model.context))
        * model.context
        * activation_bytes_per_token(model),
        tokens=tokens,
        flops=facts.train_flops_per_token * tokens,
    )


def optimizer_bytes(config: Optimizer, model: ModelConfig, vocab_size: int) -> int:
    """All that the optimizer keeps. With 8 bits a number, each block of them has two scales of four bytes besides."""
    facts = cost(model, vocab_size)
    matrices = facts.matmul_parameters - vocab_size * model.width
    tables = vocab_size * model.width * (1 if model.tie_embeddings else 2)
    counts = (matrices, tables, facts.parameters - matrices - tables)
    scales = 8 * (matrices + tables) // config.block if isinstance(config, AdamW8bit) else 0
    return sum(count * size for count, size in zip(counts, OPTIMIZER_BYTES[config.kind], strict=True)) + scales


def activation_bytes_per_token(model: ModelConfig) -> int:
    """
    Kept for the backward pass, a token: for each layer the residual stream twice and its norms in four bytes, and in
    two bytes queries, keys, values, their turned copies, the attention weights, and the feed-forward's three tensors.
    """
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    wide = 4 * 4 * model.width
    narrow = 2 * (2 * model.width + 2 * heads + model.num_heads * model.head_size + 4 * model.mlp_width)
    weights = 4 * model.num_heads * model.context
    return model.num_layers * (wide + narrow + weights) + 8 * model.width
