"""
Which tokens may attend to which, as a small object.

A dense mask exists only where a kernel needs it. Letters used for shapes are those of layers.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxtyping import Bool, Float, Int

import bloomery.hw.require_torch  # noqa: F401
from bloomery.model.kernels import cpu

import torch
from torch import Tensor

M = TypeVar("M")
ALL = slice(None)
Mask = Bool[Tensor, "B T S"]  # True where a token may look


@dataclass(frozen=True)
class AttentionMask:
    """
    Tokens look back, within their own segment, and no further than the window.

    The T queries are the last T of the S keys: all of them in training, the new ones after those in a cache. Distances
    count tokens in the row.
    """

    num_queries: int
    num_keys: int
    device: torch.device
    window: int | None = None
    """How many tokens a token sees, with itself. None: all."""
    segments: Int[Tensor, "B S"] | None = None
    """Which document each token belongs to. None: a row is one document."""
    allowed: Mask | None = None
    """What may be seen at all, where that is less."""
    slopes: Float[Tensor, " H"] | None = None
    """Of ALiBi: how much a score falls with each token of distance."""
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def offset(self) -> int:
        """The place of the first query among the keys."""
        return self.num_keys - self.num_queries

    @property
    def is_windowed(self) -> bool:
        """Whether some query cannot see the first key because it is too far."""
        return self.window is not None and self.window < self.num_keys

    @property
    def is_causal(self) -> bool:
        """Whether the only limit is that nobody looks ahead."""
        return self.segments is None and self.allowed is None and self.slopes is None and not self.is_windowed

    def mask(self) -> Bool[Tensor, "b T S"]:
        """True where a token may look; b is 1 where all rows are alike."""
        return self.cached("mask", self._mask)

    def bias(self, dtype: torch.dtype) -> Float[Tensor, "b 1 T S"]:
        """The mask as a bias to add to attention scores, without ALiBi."""
        return self.cached(("bias", dtype), lambda: self._bias(dtype))

    def distance(self, dtype: torch.dtype, rows: slice = ALL, keys: slice = ALL) -> Float[Tensor, "t s"]:
        """How many tokens a key lies before a query."""
        if (rows, keys) != (ALL, ALL):
            return (self._places()[rows] - self._keys()[:, keys]).to(dtype)
        return self.cached(("distance", dtype), lambda: (self._places() - self._keys()).to(dtype))

    def first(self, batch: int) -> Int[Tensor, "B T"] | None:
        """
        The first key that each query sees in training. None where a query does not see all keys from there to itself,
        or where a window is so short that leaving out whole blocks of keys is better.
        """
        if self.allowed is not None or self.slopes is not None or self.is_windowed or self.offset:
            return None
        return self.cached(("first", batch), lambda: self._first(batch))

    def _first(self, batch: int) -> Tensor | None:
        if self.segments is None:
            return torch.zeros((batch, self.num_keys), dtype=torch.long, device=self.device)
        together = bool((self.segments[:, 1:] >= self.segments[:, :-1]).all())
        return cpu.first_seen(self.segments.expand(batch, -1)) if together else None

    def cached(self, name: Any, make: Callable[[], M]) -> M:
        """What `make` gives, made once: layers share it."""
        if name not in self._made:
            self._made[name] = make()
        value: M = self._made[name]
        return value

    def _places(self) -> Int[Tensor, "T 1"]:
        return torch.arange(self.offset, self.num_keys, device=self.device)[:, None]

    def _keys(self) -> Int[Tensor, "1 S"]:
        return torch.arange(self.num_keys, device=self.device)[None, :]

    def chunk(self, rows: slice, keys: slice) -> Bool[Tensor, "b t s"]:
        """The mask of some queries and keys, not cached: the whole mask of a long sequence is never in memory."""
        return self._mask(rows, keys)

    def _mask(self, rows: slice = ALL, keys: slice = ALL) -> Tensor:
        query, key = self._places()[rows], self._keys()[:, keys]
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        seen = seen[None]
        if self.segments is not None:
            seen = seen & (self.segments[:, self.offset :][:, rows, None] == self.segments[:, None, keys])
        return seen if self.allowed is None else seen & self.allowed[:, rows, keys]

    def _bias(self, dtype: torch.dtype) -> Tensor:
        mask = self.mask()[:, None]
        return torch.zeros(mask.shape, device=self.device, dtype=dtype).masked_fill(~mask, -torch.inf)
