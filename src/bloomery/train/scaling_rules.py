"""
Derive a model's shape and training settings from one number: the number of layers. No torch.

    width             64 · depth
    heads             width / 64, each with keys and values of its own
    mlp width         8/3 · width, rounded up to a multiple of 64
    tokens            r · P        P: weights that are multiplied for each token, the head included; r: 20
    tokens per step   2¹⁹ · (tokens / D₁₂)^0.383, rounded to a power of two, and down to whole sequences
    steps             tokens / tokens per step
    rates             those of depth 12 times (tokens per step / 2¹⁹)^½; for all but Muon's matrices also times
                      (768 / width)^½ with Muon, and 768 / width with the others

The form, one number from which the rest follows, is nanochat's. So are its ratio of 64 between width and depth, its
Muon rates and its square roots. r is that of Hoffmann et al. 2022 (https://arxiv.org/abs/2203.15556). The exponent
is that of Bergsma et al. 2025 (https://arxiv.org/abs/2505.13738). D₁₂ is what 20 tokens for each weight make of
depth 12 with a vocabulary of 32768. AdamW's rates at 768 numbers fall with the width as those of Brown et al. 2020,
table 2.1.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict

from bloomery.core.config import Between, Config, Steps, build
from bloomery.core.errors import ConfigError
from bloomery.model.config import ModelConfig, cost
from bloomery.train.config import Muon, Optimizer, StepTokens, trained_tokens

Depth = Annotated[int, Between(1, 1000, "no model is deeper")]
TokenRatio = Annotated[float, Between(1e-9, 1e9, "it counts the tokens for each weight")]

HEAD_WIDTH = 64
WIDTH_PER_LAYER = 64
REFERENCE_WIDTH = 768
STEP_TOKENS, HORIZON = 2**19, 2_202_009_600
"""Of depth 12: tokens per step, and tokens in all."""
STEP_EXPONENT = 0.383
TOKENS_PER_PARAMETER = 20.0
RATES = {
    "muon": {"muon_lr": 0.02, "learning_rate": 3e-3},
    "adamw": {"learning_rate": 6e-4},
    "adamw8bit": {"learning_rate": 6e-4},
    "ademamix": {"learning_rate": 6e-4},
    "lion": {"learning_rate": 1e-4},
}
"""At depth 12, by the optimizer's kind."""


class Given(Config):
    """The keys of [pretrain] that the scaling rules use."""

    model_config = ConfigDict(extra="ignore")
    depth: Depth
    model: ModelConfig
    tokens_per_parameter: TokenRatio = TOKENS_PER_PARAMETER
    global_batch_tokens: StepTokens | None = None
    steps: Steps | None = None
    optimizer: Optimizer


class _Place(Config):
    """So that errors say where it stands."""

    pretrain: Given


def filled(section: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """
    [pretrain] with what follows from its `depth`, a number of layers, but for what it says itself.

    Raises ConfigError if the section has another number of layers, the name of a shape, or an unusable value.
    """
    model, optimizer = section.get("model", {}), section.get("optimizer", {})
    if isinstance(model, Mapping):
        _no_second_shape(section["depth"], model)
        model = shape(section["depth"], model)
    if isinstance(optimizer, Mapping):
        optimizer = {"kind": Muon().kind} | dict(optimizer)
    section = {**section, "model": model, "optimizer": optimizer}
    read = build(_Place, {"pretrain": section}).pretrain
    tokens = read.tokens_per_parameter * cost(read.model, vocab_size).matmul_parameters
    target_tokens = read.global_batch_tokens or step_tokens(tokens)
    step = trained_tokens(target_tokens, read.model.context_length)
    return {
        **section,
        "global_batch_tokens": read.global_batch_tokens or step,
        "steps": read.steps or max(1, round(tokens / step)),
        "optimizer": rates(read.optimizer.kind, read.model.hidden_size, step) | optimizer,
    }


def _no_second_shape(depth: int, settings: Mapping[str, Any]) -> None:
    if settings.get("preset"):
        what = f"depth={depth} and model.preset={settings['preset']!r} both set the shape"
        raise ConfigError(
            what,
            where="pretrain",
            hint=f"Remove one of them. On the command line, replace the section: 'pretrain={{depth={depth}}}'",
        )
    if settings.get("num_layers", depth) != depth:
        what = f"depth={depth}, and model.num_layers={settings['num_layers']}"
        raise ConfigError(
            what,
            where="pretrain",
            hint=f"Remove one of them. On the command line, replace the section: 'pretrain={{depth={depth}}}'",
        )


def shape(depth: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a ModelConfig. Keys in `settings` stay; the other keys follow from the depth and usable settings."""
    numbers = {key: value for key, value in settings.items() if type(value) is int and value > 0}
    width = numbers.get("hidden_size", WIDTH_PER_LAYER * depth)
    heads = numbers.get("num_heads", max(1, width // HEAD_WIDTH))
    intermediate_size = 64 * math.ceil(8 * width / 3 / 64)
    derived = {
        "hidden_size": width,
        "num_layers": depth,
        "num_heads": heads,
        "num_kv_heads": heads,
        "intermediate_size": intermediate_size,
    }
    return derived | dict(settings)


def step_tokens(tokens: float) -> int:
    """A power of two."""
    target = STEP_TOKENS * (tokens / HORIZON) ** STEP_EXPONENT
    return int(2 ** round(math.log2(target)))


def rates(kind: str, width: int, global_batch_tokens: int) -> dict[str, float]:
    """Learning rates by their keys."""
    batch = math.sqrt(global_batch_tokens / STEP_TOKENS)
    wide = REFERENCE_WIDTH / width
    factors = {"muon_lr": batch, "learning_rate": batch * (math.sqrt(wide) if kind == "muon" else wide)}
    return {name: float(f"{rate * factors[name]:.3g}") for name, rate in RATES[kind].items()}
