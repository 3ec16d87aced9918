"""
An architecture as others know it: its name, its configuration, and where each of our weights lies in its files.

A piece is one tensor of theirs, which is one of ours, or several of ours one below the other.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.model.config import ModelConfig

import torch
import torch.nn.functional as F
from torch import Tensor

CYCLES = ("attention", "sliding_window", "feed_forward")
"""Fields of a ModelConfig that layers take in turns; of a cycle that is longer than the model, its end says nothing."""
TABLES = ("embed.weight", "head.weight")
"""Weights with a row for each id."""

BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
"""Tensors that some files hold beside weights, and that follow from the configuration: frequencies, causal masks."""


@dataclass(frozen=True)
class Piece:
    """A tensor of theirs."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    """Theirs has inputs × outputs, ours outputs × inputs."""
    normalized: bool = False
    """Theirs is used with rows of length 1, and ours has them so."""


@dataclass(frozen=True)
class Architecture:
    name: str
    """As transformers calls it in config.json."""
    model_type: str
    allowed: Mapping[str, Callable[[ModelConfig], bool]]
    """Field of a ModelConfig -> whether it is such as the architecture has it."""
    describe: Callable[[ModelConfig], dict[str, Any]]
    """What config.json says of a model, besides architecture, vocabulary and special tokens."""
    understand: Callable[[Mapping[str, Any]], ModelConfig]
    """The model of a config.json. Raises ValueError for what ours cannot be, KeyError for what it lacks."""
    pieces: Callable[[Sequence[str]], list[Piece]]
    """The tensors of a model whose weights, without a tied head, have these names of ours."""

    def obstacles(self, config: ModelConfig) -> list[str]:
        """The fields of a model that this architecture does not have so."""
        used = {name: getattr(config, name)[: config.num_layers] for name in CYCLES}
        config = config.model_copy(update=used)
        return [field for field, holds in self.allowed.items() if not holds(config)]


def renamed(name: str, patterns: Sequence[tuple[str, str]], architecture: str) -> str:
    """
    Their name of one of our weights, by the first pattern that is all of it. Raises ValueError for a weight that none
    fits.
    """
    for pattern, replacement in patterns:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    raise ValueError(f"{name!r} has no counterpart in a {architecture}")


def gathered(piece: Piece, weights: Mapping[str, Tensor]) -> Tensor:
    """Their tensor, made of ours."""
    parts = [weights[name] for name in piece.ours]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.t() if piece.transposed else whole


def spread(piece: Piece, given: Tensor, weights: Mapping[str, Tensor]) -> None:
    """Copy their tensor into ours. Raises ValueError for another shape."""
    parts = [weights[name] for name in piece.ours]
    if piece.transposed and given.dim() == 2:
        given = given.t()
    wanted = (sum(len(part) for part in parts), *parts[0].shape[1:])
    if given.shape != wanted:
        turned = tuple(reversed(wanted)) if piece.transposed else wanted
        raise ValueError(f"{piece.theirs} has shape {tuple(given.shape)}, not {turned}")
    if piece.normalized:
        given = F.normalize(given.float())
    with torch.no_grad():
        for part, some in zip(parts, torch.split(given, [len(part) for part in parts]), strict=True):
            part.copy_(some)


def is_uniform(cycle: Sequence[Any], *values: Any) -> bool:
    """Whether every layer has the same, and that one of these values."""
    return len(set(cycle)) == 1 and cycle[0] in values
