"""
One dial for a model and its training: the number of layers. Needs no torch.

    width             64 · depth
    heads             width / 64, each with keys and values of its own
    mlp width         8/3 · width, rounded up to a multiple of 64
    tokens            r · P        P: weights that are multiplied for each token, the head included; r: 20
    tokens a step     2¹⁹ · (tokens / D₁₂)^0.383, rounded to a power of two
    steps             tokens / tokens a step
    rates             those of depth 12 times (tokens a step / 2¹⁹)^½; for all but Muon's matrices also times
                      (768 / width)^½ with Muon, and 768 / width with the others

The form, one number from which the rest follows, is nanochat's; its ratio of 64 between width and depth, its Muon rates
and its square roots are too. r is that of Hoffmann et al. 2022 (https://arxiv.org/abs/2203.15556); the exponent that of
Bergsma et al. 2025 (https://arxiv.org/abs/2505.13738). D₁₂ is what 20 tokens for each weight make of depth 12 with a
vocabulary of 32768. AdamW's rates at 768 numbers fall with the width as those of Brown et al. 2020, table 2.1.
"""

import math
from collections.abc import Mapping
from typing import Any

from bloomery.core.errors import ConfigError
from bloomery.model.config import ModelConfig
from bloomery.model.cost import cost
from bloomery.train.config import Muon

HEAD_WIDTH = 64
WIDTH_PER_LAYER = 64
REFERENCE_WIDTH = 768
STEP_TOKENS, HORIZON = 2**19, 2_202_009_600
"""Of depth 12: tokens a step, and tokens in all."""
STEP_EXPONENT = 0.383
TOKENS_PER_PARAMETER = 20.0
RATES = {
    "muon": {"matrix_learning_rate": 0.02, "learning_rate": 3e-3},
    "adamw": {"learning_rate": 6e-4},
    "adamw8bit": {"learning_rate": 6e-4},
    "ademamix": {"learning_rate": 6e-4},
    "lion": {"learning_rate": 1e-4},
}
"""At depth 12, by the optimizer's kind."""


def filled(section: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """
    [pretrain] with what follows from its `depth`, but for what it says itself.

    Raises ConfigError where it says another number of layers, or a shape by name.
    """
    depth = section["depth"]
    given = dict(section.get("model", {}))
    if given.get("preset"):
        what = f"depth={depth} and model.preset={given['preset']!r} both say the shape"
        raise ConfigError(what, where="pretrain", cure="Leave one of the two.")
    if given.get("num_layers", depth) != depth:
        what = f"depth={depth}, and model.num_layers={given['num_layers']}"
        raise ConfigError(what, where="pretrain", cure="Leave one of the two, or make them agree.")
    model = shape(depth, given)
    read = ModelConfig.model_validate(model)
    ratio = section.get("tokens_per_parameter", TOKENS_PER_PARAMETER)
    tokens = ratio * cost(read, vocab_size).matmul_parameters
    step = section.get("tokens_per_step", step_tokens(tokens, read.context))
    optimizer = {"kind": Muon().kind} | dict(section.get("optimizer", {}))
    return {
        **section,
        "model": model,
        "tokens_per_step": step,
        "steps": section.get("steps", max(1, round(tokens / step))),
        "optimizer": rates(optimizer["kind"], read.width, step) | optimizer,
    }


def shape(depth: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a ModelConfig; those given stay, and others follow them."""
    width = given.get("width", WIDTH_PER_LAYER * depth)
    heads = given.get("num_heads", max(1, width // HEAD_WIDTH))
    mlp_width = 64 * math.ceil(8 * width / 3 / 64)
    made = {"width": width, "num_layers": depth, "num_heads": heads, "num_kv_heads": heads, "mlp_width": mlp_width}
    return made | dict(given)


def step_tokens(tokens: float, context: int) -> int:
    """A power of two, and at least one row."""
    wanted = STEP_TOKENS * (tokens / HORIZON) ** STEP_EXPONENT
    return max(int(2 ** round(math.log2(wanted))), context)


def rates(kind: str, width: int, tokens_per_step: int) -> dict[str, float]:
    """Learning rates by their keys; none for a kind that is not known, whose fault is told elsewhere."""
    batch = math.sqrt(tokens_per_step / STEP_TOKENS)
    wide = REFERENCE_WIDTH / width
    factors = {"matrix_learning_rate": batch, "learning_rate": batch * (math.sqrt(wide) if kind == "muon" else wide)}
    return {name: float(f"{rate * factors[name]:.3g}") for name, rate in RATES.get(kind, {}).items()}
