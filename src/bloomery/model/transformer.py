"""
The model: embedding, blocks, norm, head. It knows nothing of ranks, devices, optimizers or files.

Letters used for shapes are those of layers.py; V is the vocabulary.
"""

import copy
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

from jaxtyping import Float, Int

from bloomery.hw.device import constant
from bloomery.model.attention import AttentionMask, Cache, Mask, attention, computed_in
from bloomery.model.config import AttentionKind, ModelConfig, Window
from bloomery.model.layers import Formats, NormalizedHead, Rotation, alibi_slopes, build_mlp, norm, rotation

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Block(nn.Module):
    """
    x = x + attention(norm(x))
    x = x + mlp(norm(x))

    Norms stand before, after or at both ends of attention and mlp. With parallel_residual, both read the first x.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        before, after = config.norm_order != "after", config.norm_order != "before"
        self.attention_norm = norm(config) if before else None
        self.attention = attention(config, layer)
        self.attention_post_norm = norm(config) if after else None
        self.mlp_norm = norm(config) if before else None
        self.mlp = build_mlp(config, layer)
        self.mlp_post_norm = norm(config) if after else None

    def forward(
        self, x: Float[Tensor, "B _ D"], rope: Rotation | None, mask: AttentionMask, cache: Cache | None
    ) -> Float[Tensor, "B _ D"]:
        attended = self.attention(x if self.attention_norm is None else self.attention_norm(x), rope, mask, cache)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        entry, x = x, x + attended
        read = entry if self.parallel else x
        added = self.mlp(read if self.mlp_norm is None else self.mlp_norm(read))
        y: Tensor = x + (added if self.mlp_post_norm is None else self.mlp_post_norm(added))
        return y


class _Unset(TorchFunctionMode):
    """Leaves new weights as they are. On the meta device, normal_ would import torch's compiler, which takes 2 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def on_meta(config: ModelConfig, vocab_size: int) -> "Transformer":
    """A model whose weights have shapes and no numbers yet."""
    with torch.device("meta"), _Unset():
        return Transformer(config, vocab_size)


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.embed = nn.Embedding(vocab_size, config.hidden_size)
        self.positions = (
            nn.Embedding(config.context_length, config.hidden_size) if config.position_embedding == "learned" else None
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = norm(config)
        head_class = NormalizedHead if config.normalize_head else nn.Linear
        self.head = head_class(config.hidden_size, vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.embed_scale_dtype: torch.dtype | None = None
        """Number format of the factor √D of embeddings, a tensor that is filled there. None: that of their table."""
        self.residual_dtype: torch.dtype | None = None
        """Number format of the residual stream in training mode. None: float32."""
        self.head_float8: Formats | None = None
        """Number formats of 8 bits that the loss multiplies the head in, in training mode."""

    def initialize(self, seed: int) -> None:
        """
        Fill the weights from a seed: N(0, 0.02²), and N(0, 0.02² / 2L) where they write to the residual stream. Biases
        are 0, norms 1, and the vectors of differential attention N(0, 0.1²).

        The scale by depth is GPT-2's (Radford et al. 2019, §2.3). The draw is made on the CPU, so that every device
        starts from the same numbers.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            with torch.no_grad():
                if name.endswith("bias"):
                    weight.zero_()
                elif "norm.weight" in name:
                    weight.fill_(0.0 if self.config.norm_plus_one else 1.0)
                else:
                    weight.copy_(torch.empty(weight.shape).normal_(0.0, self._start(name), generator=generator))

    def _start(self, name: str) -> float:
        """Standard deviation of a weight before training."""
        if "lambda_" in name:
            return 0.1
        into_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
        return 0.02 / math.sqrt(2 * self.config.num_layers) if into_stream else 0.02

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        bounds: Int[Tensor, " N"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """
        The normed residual stream after the last block; `logits` computes the logits from it.

        Tokens attend only to themselves and earlier tokens of the same segment. By default positions count from 0 in
        each row, and a row is one segment, which is faster. `bounds` are those of the segments, for GPUs: see
        `attention.segment_bounds`.
        """
        with self._computing(ids.device):
            return self._run(ids, positions, segments, None, None, bounds)

    def extend(
        self,
        ids: Int[Tensor, "B T"],
        cache: Cache,
        *,
        positions: Int[Tensor, "B T"] | None = None,
        mask: Mask | None = None,
    ) -> Float[Tensor, "B T D"]:
        """
        As forward, for T more tokens after those in the cache, which grows by them.

        `mask` says which of all S tokens are visible; by default all earlier tokens are. Positions start at the
        cache's length unless given, or the cache has them.
        """
        with self._computing(ids.device):
            hidden = self._run(ids, cache.positions if positions is None else positions, None, mask, cache)
        cache.length += ids.shape[1]
        return hidden

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        with self._computing(hidden.device):
            logits: Tensor = self.head(hidden)
        return logits.float()

    def head_rows(self, dtype: torch.dtype | None = None) -> Float[Tensor, "V D"]:
        """
        The matrix that logits are computed with: the head's weight, or its rows with length 1, which may be in the
        number format that they are multiplied in.
        """
        return self.head.rows(dtype) if isinstance(self.head, NormalizedHead) else self.head.weight

    def _computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Computes in the number format of the matrices, where they are not in float32 and nobody set another."""
        dtype = self.embed.weight.dtype
        if dtype == torch.float32 or torch.is_autocast_enabled(device.type):
            return nullcontext()
        return torch.autocast(device.type, dtype=dtype)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor | None,
        segments: Tensor | None,
        mask: Tensor | None,
        cache: Cache | None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        config, x, before = self.config, self.embed(ids), cache.length if cache else 0
        if positions is None:
            positions = torch.arange(before, before + ids.shape[1], device=ids.device)[None]
        if x.dtype != torch.float64:
            x = x.float()  # the residual stream, whatever the table is kept or gathered in
        if self.positions is not None:
            x = x + self.positions(positions)
        if config.scale_embeddings:
            x = x * x.new_full((), config.hidden_size**0.5, dtype=self.embed_scale_dtype or self.embed.weight.dtype)
        if self.residual_dtype is not None and self.training:
            x = x.to(self.residual_dtype)
        ropes: dict[bool, Rotation] = {}
        masks: dict[tuple[Window, AttentionKind], AttentionMask] = {}
        for number, block in enumerate(self.blocks):
            kind, window, _ = config.layer(number)
            if (window, kind) not in masks:
                masks[window, kind] = self._attention_mask(kind, window, ids, cache, segments, mask, bounds)
            local = config.rope_local_theta is not None and window != "full"
            if config.rotates(number) and local not in ropes:
                ropes[local] = self._rotation(positions, computed_in(x), local, cache)
            x = block(x, ropes[local] if config.rotates(number) else None, masks[window, kind], cache)
        normed: Tensor = self.norm(x)
        return normed

    def _rotation(self, positions: Tensor, dtype: torch.dtype, local: bool, cache: Cache | None) -> Rotation:
        if cache is None or cache.positions is None:
            return rotation(positions, self.config, dtype, local=local)

        def table() -> Rotation:
            return rotation(
                torch.arange(cache.capacity, device=positions.device)[None], self.config, dtype, local=local
            )

        cos, sin = cache.kept(("rope", local), table)
        return cos[0, 0][positions][:, None], sin[0, 0][positions][:, None]

    def _attention_mask(
        self,
        kind: AttentionKind,
        window: Window,
        ids: Tensor,
        cache: Cache | None,
        segments: Tensor | None,
        mask: Tensor | None,
        bounds: Tensor | None,
    ) -> AttentionMask:
        slopes: Tensor | None = None
        if self.config.position_embedding == "alibi":
            make = partial(self._slopes, kind, ids.device)
            slopes = make() if cache is None else cache.kept(("slopes", kind), make)
        return AttentionMask(
            num_queries=ids.shape[1],
            num_keys=(cache.length if cache else 0) + ids.shape[1],
            device=ids.device,
            window=None if window == "full" else window,
            segments=segments,
            allowed=mask,
            slopes=slopes,
            positions=cache.positions if cache else None,
            bounds=bounds,
        )

    def _slopes(self, kind: AttentionKind, device: torch.device) -> Tensor:
        """Of ALiBi, for each query head. The heads of a pair have the same, for it is their difference that counts."""
        heads, pairs = self.config.num_heads, self.config.num_kv_heads // 2
        if kind == "standard":
            return constant(alibi_slopes(heads), device)
        slopes = constant(alibi_slopes(heads // 2), device).view(pairs, 1, -1)
        return slopes.expand(-1, 2, -1).flatten()


Changes = Mapping[str, tuple[Float[Tensor, "r D"], Float[Tensor, "R r"]]]
"""Of matrices by path: A, and B times its scale."""


def changed(model: Transformer, changes: Changes) -> Transformer:
    """A model that shares all tensors of another, with changes added after its matmuls: y = W x + b + B A x."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    model = copy.deepcopy(model, shared)
    for name, (a, b) in changes.items():
        model.get_submodule(name).register_forward_hook(partial(_added, a, b))
    return model


def _added(a: Tensor, b: Tensor, _: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor:
    return y + F.linear(F.linear(inputs[0].float(), a.float()), b.float()).to(y.dtype)
