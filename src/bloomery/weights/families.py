"""
Which architecture of transformers a model is, and for one that is none: why not.

A model that is none is saved in the same kind of folder under a name of our own, which transformers refuses plainly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.core.config import plain
from bloomery.model.config import ModelConfig
from bloomery.weights.architecture import Architecture, Piece
from bloomery.weights.baichuan2 import BAICHUAN1, BAICHUAN2, FIRST_VOCABULARY
from bloomery.weights.gpt2 import GPT2
from bloomery.weights.llama import LLAMA, MISTRAL, QWEN2, QWEN3

MAX_SHOWN = 100
WRITTEN = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)
"""What transformers loads as it is, those first that most programs know."""


def _ours(names: Sequence[str]) -> list[Piece]:
    return [Piece(name, (name,)) for name in names]


OWN = Architecture(
    "BloomeryForCausalLM",
    "bloomery",
    {},
    lambda config: {"bloomery": plain(config)},
    lambda facts: ModelConfig.model_validate(facts["bloomery"]),
    _ours,
)
READ = {one.name: one for one in (*WRITTEN, BAICHUAN2, OWN)} | {"GPT2Model": GPT2, "BaiChuanForCausalLM": BAICHUAN1}


def family(config: ModelConfig) -> Architecture | None:
    """The architecture of transformers that a model is exactly, or None."""
    return next((one for one in WRITTEN if not one.obstacles(config)), None)


def architecture(config: ModelConfig) -> Architecture:
    """What a model is saved as."""
    return family(config) or OWN


def of_file(facts: Mapping[str, Any]) -> Architecture:
    """
    The architecture that a config.json names. Raises ValueError for one that is not known, for none, and where
    `model_type` is of another.
    """
    names, kind = facts.get("architectures"), facts.get("model_type")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        meant = next((f", as in {[one.name]}" for one in READ.values() if one.model_type == kind), "")
        raise ValueError(f"architectures is {shown(names)}, and it must name one of {', '.join(READ)}{meant}")
    known = next((READ[name] for name in names if name in READ), None)
    if known is None:
        raise ValueError(f"its architecture is {shown(', '.join(names))}; known are {', '.join(READ)}")
    if kind not in (None, known.model_type):
        raise ValueError(f"architectures names {known.name}, and model_type is {shown(kind)}, not {known.model_type!r}")
    return BAICHUAN1 if known is BAICHUAN2 and facts.get("vocab_size") == FIRST_VOCABULARY else known


def shown(value: Any) -> str:
    """A value of a config.json, for a message."""
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def exported(config: ModelConfig) -> ModelConfig:
    """The same computation where another architecture can say it: norms without weights have weights of 1."""
    return config if config.norm_weights else ModelConfig(**(config.model_dump() | {"norm_weights": True}))


def reasons(config: ModelConfig) -> list[str]:
    """Which choices keep a model from being what it is closest to of transformers' models; none if it is one."""
    nearest = min(WRITTEN, key=lambda one: len(one.obstacles(exported(config))))
    return [
        f"width={config.width} is no multiple of num_heads={config.num_heads}, as {nearest.name} needs it"
        if field == "width"
        else f"{field}={_shown(config, field)} is nothing that {nearest.name} has"
        for field in nearest.obstacles(exported(config))
    ]


def _shown(config: ModelConfig, field: str) -> str:
    value = getattr(config, field)
    return repr(
        value[0] if isinstance(value, tuple) and len(value) == 1 else list(value) if isinstance(value, tuple) else value
    )
