"""
What a run needs, before anything is allocated: parameters, bytes, work. Arithmetic on the recipe; needs no torch.

    weights, gradients    4 bytes a parameter each
    optimizer             bytes a parameter, by `OPTIMIZER_BYTES`
    copies of weights     2 bytes for each that takes part in matrix products, unless precision = "float32"
    activations           bytes a token and layer of what the backward pass reads again, by the formula below
"""

from dataclasses import dataclass

from bloomery.core.errors import ConfigError
from bloomery.model.config import ModelConfig
from bloomery.model.cost import cost
from bloomery.train.config import AdamW8bit, Level, Optimizer, Training

BYTES = 4
USUAL_TOKENS = 8192
"""Of a micro-batch that nothing is known to speak against."""

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
    copies_bytes: int
    """Of weights, rounded to the format of matrix products."""
    tokens: int
    """Positions that go through the model, padding included."""
    flops: float

    @property
    def peak_bytes(self) -> int:
        weights = self.weights_bytes + self.gradient_bytes + self.optimizer_bytes
        return weights + self.activation_bytes + self.copies_bytes


def rows_per_step(config: Training, context: int) -> int:
    """Rows of `context` tokens in a step of the whole global batch; at least one."""
    return trained_tokens(config.tokens_per_step, context) // context


def trained_tokens(tokens_per_step: int, context: int) -> int:
    """Of so many tokens a step, those that are trained: whole rows, at least one."""
    return max(1, tokens_per_step // context) * context


def rows_at_once(config: Training, context: int) -> int:
    """Rows of `context` tokens that go through the model together; at least one. `auto` is not decided here."""
    tokens = USUAL_TOKENS if config.micro_batch_tokens == "auto" else config.micro_batch_tokens
    return max(1, tokens // context)


def remarks(config: Training, context: int) -> list[str]:
    """What the numbers come to where that is hardly what they were meant to."""
    tokens = trained_tokens(config.tokens_per_step, context)
    found = []
    if tokens != config.tokens_per_step:
        rows = "1 row" if tokens == context else f"{tokens // context:,} rows"
        found.append(f"a step is {rows} of {context:,}: {tokens:,} tokens, and not {config.tokens_per_step:,}")
    return found


COMPILED_WHOLE = "compiled blocks were not tried with weights that come and go"
SCALES_WHOLE = "its scales are of blocks, which parts of weights would cut"
BASE_WHOLE = "a frozen base lies whole on each device"
"""Why a model is not to be sharded."""


def check_shard(config: Training, ranks: int, *, adapters: bool = False) -> bool:
    """Whether a model is to be sharded. Raises ConfigError for what cannot be done with the parts of one."""
    if config.shard == "none" or ranks == 1:
        return False
    for given, why, cure in (
        (
            f'compile="{config.compile}"' if config.compile != "off" else "",
            COMPILED_WHOLE,
            'Say compile="off".',
        ),
        (
            'optimizer.kind="adamw8bit"' if config.optimizer.kind == "adamw8bit" else "",
            SCALES_WHOLE,
            'Say optimizer.kind="adamw".',
        ),
        (
            "training of adapters (LoRA)" if adapters else "",
            BASE_WHOLE,
            'Say shard="none", or leave out lora.',
        ),
    ):
        if given:
            raise ConfigError(f'{given} does not go with shard="fsdp": {why}', cure=cure)
    return True


def plan(config: Training, model: ModelConfig, vocab_size: int) -> TrainingPlan:
    """An estimate, not yet checked against a dry run: allocator and libraries come on top."""
    facts = cost(model, vocab_size)
    rows = rows_per_step(config, model.context)
    width_bytes = BYTES if config.precision == "float32" else 2
    tokens = config.steps * rows * model.context
    return TrainingPlan(
        parameters=facts.parameters,
        weights_bytes=BYTES * facts.parameters,
        gradient_bytes=BYTES * facts.parameters,
        optimizer_bytes=optimizer_bytes(config.optimizer, model, vocab_size),
        activation_bytes=min(rows, rows_at_once(config, model.context))
        * model.context
        * activation_bytes_per_token(model, config.recompute, width_bytes),
        copies_bytes=width_bytes * facts.matmul_parameters if width_bytes < BYTES else 0,
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


def activation_bytes_per_token(
    model: ModelConfig, recompute: Level = "none", width_bytes: int = 2, *, written_out: bool = True
) -> int:
    """
    Kept for the backward pass, a token, where matrix products are of numbers of `width_bytes`; in each layer

        none         x twice and x / |x| twice in float32, both norms' results, positions' angles, q, k, v, attention
                     weights and result, the feed-forward's inner numbers
        selective    x in float32, the results of all products with weights
        block        x in float32

    and what one layer keeps more at `none`, once, while it is computed again; around the layers three widths. Attention
    weights count where they may be `written_out`, which a GPU does not do.
    """
    D, E, M, b = model.width, model.head_size, model.mlp_width, width_bytes
    heads = (model.num_heads + 2 * model.num_kv_heads) * E
    whole, kept = 0, {"none": 0, "selective": 0, "block": 0}
    for number in range(model.num_layers):
        gates = 2 if model.layer(number)[2] in ("swiglu", "geglu") else 1
        inner = gates * 2 * b * M
        weights = b * model.num_heads * model.context if written_out else 4 * model.num_heads
        layer = 16 * D + 8 + 2 * b * D + 4 * b * E + b * heads + b * model.num_heads * E + weights + inner
        kept["none"] += layer
        kept["selective"] += 4 * D + b * heads + 2 * b * D + gates * b * M
        kept["block"] += 4 * D
        whole = max(whole, layer)
    once = whole - kept[recompute] // model.num_layers + 8 * E + model.context
    again = 0 if recompute == "none" else once
    return kept[recompute] + again + 8 * D + b * D + 4
