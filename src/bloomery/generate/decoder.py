"""
A model's weights, packed for decoding on the CPU, and steps over them by the compiled library.

A step computes the next tokens of several sequences at once: one token of each, or a part of a prompt. The logits of a
sequence do not depend on the other sequences, on the number of threads, or on how its prompt was split: their bits are
the same. Weights in int8 and int4 are multiplied as integers by activations that are rounded to 8 bits, with a scale
for each 64 numbers; others are multiplied in float32. They are packed in one of these formats:

    float32, bfloat16
    int8     a scale for each row
    int4     a factor and an offset for each group of 32 numbers of a row
    nf4      a scale for each block of 64

Keys and values lie in pages of PAGE tokens, which sequences may share.

`Decoder.of` gives None for models that the library does not know: those with differential attention, and all models
where the library is not built. Letters used for shapes are those of layers.py; P is a number of panels of 16 rows.
"""

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache as cached
from typing import Any, Literal

from jaxtyping import Float

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import native
from bloomery.core.errors import ConfigError
from bloomery.core.log import info
from bloomery.model.config import GATED, ModelConfig
from bloomery.model.kernels.cpu import call
from bloomery.model.layers import LayerNorm, RMSNorm, alibi_slopes, rotation
from bloomery.model.quantize import GROUP, NF4, Int4, Int8, QuantizedLinear, int4_groups
from bloomery.model.transformer import Block, Changes, Transformer

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIBRARY = "decode"
PanelFormat = Literal["float32", "bfloat16", "int8", "int4", "nf4"]
FORMATS = ("float32", "bfloat16", "int8", "int4", "nf4")
"""In the order of their numbers in decode.cpp."""
CACHE_FORMATS = (torch.float32, torch.bfloat16, torch.int8)
"""Of keys and values, in the order of their numbers in decode.cpp. int8 has a scale for each token and head."""
PANEL, BLOCK, PAGE = 16, 64, 32
ACTIVATIONS = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2, "gelu": 1, "gelu_tanh": 2, "relu2": 3}
MATRICES = ("attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
LARGE = 2**23
"""Bytes of weights from which several threads are faster than one."""
EMBED_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 5}
"""Of the embeddings, as decode.cpp numbers them."""
ROOM_POSITIONS = 512
"""The room of a step is for a multiple of so many positions: a text that grows seldom needs another."""


class _NativeMatrix(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("format", "rows", "width")] + [
        (name, ctypes.c_void_p) for name in ("codes", "scales", "bias")
    ]


class _NativeNorm(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int64), ("gain", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class _NativeLayer(ctypes.Structure):
    _fields_ = [
        *(
            (name, _NativeNorm)
            for name in ("attention_norm", "attention_post", "mlp_norm", "mlp_post", "q_norm", "k_norm")
        ),
        *((name, _NativeMatrix) for name in ("qkv", "out", "up", "down")),
        *((name, ctypes.c_int64) for name in ("window", "mlp", "gated")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
    ]


class _NativeModel(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("width", "layers", "heads", "kv_heads", "head", "rotary", "inner", "norm_over_width")
        ),
        *((name, ctypes.c_int64) for name in ("parallel", "cache_format")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("slopes", ctypes.c_void_p),
        ("embed_format", ctypes.c_int64),
        ("embed", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("embed_scale", ctypes.c_float),
        ("layer", ctypes.POINTER(_NativeLayer)),
        ("norm", _NativeNorm),
        ("logits", _NativeMatrix),
    ]


class _NativeStep(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_int64) for name in ("tokens", "outputs", "pages_each", "threads")]
        + [
            (name, ctypes.c_void_p)
            for name in (
                "ids",
                "sequence",
                "position",
                "wanted",
                "pages",
                "keys",
                "values",
                "scales",
                "x",
                "logits",
                "room",
            )
        ]
        + [("adapters", ctypes.c_void_p)]
    )


class _NativeChange(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rank", "width", "rows", "begin")] + [
        (name, ctypes.c_void_p) for name in ("a", "b")
    ]


@dataclass
class Packed:
    """A matrix in panels: codes and scales as decode.cpp reads them. Keeps the tensors alive."""

    format: PanelFormat
    rows: int
    width: int
    codes: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None

    def native(self) -> _NativeMatrix:
        return _NativeMatrix(
            FORMATS.index(self.format), self.rows, self.width, *map(_at, (self.codes, self.scales, self.bias))
        )

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in (self.codes, self.scales) if one is not None)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _transposed(weight: Tensor, block: int = BLOCK) -> Tensor:
    """Numbers or codes of (R, D) in panels: (P, I, 16), filled up with zeros to whole blocks."""
    rows, width = weight.shape
    weight, padded = weight.contiguous(), width + -width % block
    panels = torch.empty(-(-rows // PANEL), padded, PANEL, dtype=weight.dtype)
    call(LIBRARY, "panels", weight, panels, weight.element_size(), rows, width, padded)
    return panels


def _packed_int8(codes: Tensor, scales: Tensor, bias: Tensor | None) -> Packed:
    """Codes (R, D) and scales of rows in panels of fours: (P, I/4, 16, 4). Codes are kept as those plus 128."""
    unsigned = F.pad(codes, (0, -codes.shape[1] % 4)).view(torch.uint8) ^ 128
    fours = _transposed(unsigned.view(torch.int32), BLOCK // 4)
    filled = F.pad(scales.flatten(), (0, -scales.numel() % PANEL)).contiguous()
    return Packed("int8", len(codes), 4 * fours.shape[1], fours, filled, _float(bias))


def pack(weight: Tensor, format: PanelFormat, bias: Tensor | None = None) -> Packed:
    """A dense matrix (R, D) in one of FORMATS. int4 takes the smallest and the largest number of each group."""
    rows, width = weight.shape
    whole = width + -width % BLOCK
    match format:
        case "float32" | "bfloat16":
            return Packed(format, rows, whole, _transposed(weight.to(getattr(torch, format))), bias=_float(bias))
        case "int8":
            scales = weight.abs().amax(1).float() / 127
            codes = torch.round(weight / scales.clamp_min(1e-30)[:, None]).to(torch.int8)
            return _packed_int8(codes, scales, bias)
        case "int4":
            return _packed_int4(*int4_groups(weight), rows, bias)
        case "nf4":
            raise ConfigError("a dense matrix is not packed in NF4", hint="Load the model with --dtype nf4.")


def _packed_int4(codes: Tensor, scales: Tensor, rows: int, bias: Tensor | None) -> Packed:
    """Codes (R, G, 16) and scales (R, G, 2) in panels of 8 codes and of scales, with zeros up to whole blocks."""
    whole = (0, 0, 0, codes.shape[1] % 2, 0, -rows % PANEL)
    codes, scales = F.pad(codes, whole), F.pad(scales, whole)
    panels = [
        numbers.view(-1, PANEL, *numbers.shape[1:]).permute(0, 2, 3, 1).contiguous()
        for numbers in (codes.view(torch.int32), scales)
    ]
    return Packed("int4", rows, codes.shape[1] * GROUP, panels[0], panels[1], _float(bias))


def _pairs(codes: Tensor) -> Tensor:
    """Codes (P, 16, groups, n) of 4 bits -> bytes (P, groups, n/2, 16): the first half of a group in the low bits."""
    first, second = codes.permute(0, 2, 3, 1).chunk(2, dim=2)
    return (first | second << 4).contiguous()


def packed(linear: nn.Module | Tensor, format: PanelFormat | Literal["auto"]) -> Packed:
    """A linear layer. `auto` keeps the format of its weights; a frozen layer in int8, int4 or NF4 keeps its codes."""
    assert isinstance(linear, nn.Linear | QuantizedLinear)
    bias = linear.bias
    if isinstance(linear, Int8) and format in ("auto", "int8"):
        return _packed_int8(linear.weight, linear.scales, bias)
    if isinstance(linear, Int4) and format in ("auto", "int4"):
        return _packed_int4(linear.weight, linear.scales, linear.num_rows, bias)
    if isinstance(linear, NF4) and format in ("auto", "nf4"):
        blocks = F.pad(linear.weight, (0, 0, 0, -linear.num_rows % PANEL)).view(
            -1, PANEL, linear._scales().shape[1], 32
        )
        codes = torch.stack((blocks >> 4, blocks & 15), 4).flatten(3)
        scales = F.pad(linear._scales(), (0, 0, 0, -linear.num_rows % PANEL)).view(*codes.shape[:3])
        scales = scales.permute(0, 2, 1).to(torch.bfloat16).contiguous()
        return Packed("nf4", linear.num_rows, codes.shape[2] * BLOCK, _pairs(codes), scales, _float(bias))
    weight = linear.dense(torch.float32) if isinstance(linear, QuantizedLinear) else linear.weight.detach()
    if format == "auto":
        format = "bfloat16" if weight.dtype == torch.bfloat16 or isinstance(linear, QuantizedLinear) else "float32"
    return pack(weight, format, bias)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()


def _stacked(parts: Sequence[Packed]) -> Packed:
    """Matrices of the same input as one. Each has whole panels, so panels follow each other."""
    first = parts[0]
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([torch.zeros(part.rows) if part.bias is None else part.bias for part in parts])
    scales = None if first.scales is None else torch.cat([part.scales for part in parts if part.scales is not None])
    rows = sum(part.rows for part in parts)
    return Packed(first.format, rows, first.width, torch.cat([part.codes for part in parts]), scales, bias)


class PackedAdapter:
    """
    Low-rank changes of a packed model's matrices: y = W x + b + B A x. Keys and values belong to the adapter that they
    were computed with.
    """

    def __init__(self, config: ModelConfig, changes: Changes) -> None:
        """`changes` of matrices of the blocks, by path."""
        queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        array = (_NativeChange * (len(MATRICES) * config.num_layers))()
        self._kept: list[Any] = [array]
        for number in range(config.num_layers):
            gated = config.layer(number)[2] in GATED
            begins = (0, queries, queries + keys, 0, 0, config.intermediate_size if gated else 0, 0)
            for slot, (name, begin) in enumerate(zip(MATRICES, begins, strict=True)):
                if (pair := changes.get(f"blocks.{number}.{name}")) is not None:
                    a, b = pair[0].float().contiguous(), pair[1].float().T.contiguous()
                    self._kept += (a, b)
                    change = _NativeChange(len(a), a.shape[1], b.shape[1], begin, _at(a), _at(b))
                    array[len(MATRICES) * number + slot] = change
        self.address = ctypes.addressof(array)


class Pages:
    """Memory for keys and values: `count` pages of PAGE tokens, in one of CACHE_FORMATS."""

    def __init__(self, config: ModelConfig, count: int, dtype: torch.dtype) -> None:
        shape = (count, config.num_layers, config.num_kv_heads)
        self.keys = torch.empty(*shape, config.head_size, PAGE, dtype=dtype)
        self.values = torch.empty(*shape, PAGE, config.head_size, dtype=dtype)
        self.scales = torch.empty(*shape, 2, PAGE) if dtype == torch.int8 else None
        self.addresses = tuple(map(_at, (self.keys, self.values, self.scales)))

    def copy(self, source: int, target: int) -> None:
        """The keys and values of one page into another."""
        for numbers in (self.keys, self.values, self.scales):
            if numbers is not None:
                numbers[target] = numbers[source]

    @staticmethod
    def needed(tokens: int) -> int:
        """Pages of a sequence of so many tokens."""
        return -(-tokens // PAGE)


def work_bytes(config: ModelConfig) -> int:
    """Of the intermediate results of a token in a step, as in decode.cpp; without logits."""
    heads = (3 * config.num_heads + 2 * config.num_kv_heads) * config.head_size
    return 4 * (6 * config.hidden_size + heads + 4 * config.intermediate_size)


@dataclass(eq=False)
class _PageNode:
    """
    A page whose tokens are known, in the tree of all texts whose keys and values are there. The path from the root has
    all tokens before them. A page of fewer than PAGE tokens has no children, and no text uses it: it is copied.
    """

    page: int
    ids: tuple[int, ...]
    parent: "_PageNode | None"
    children: dict[tuple[int, ...], "_PageNode"] = field(default_factory=dict)
    users: int = 0


@dataclass(eq=False)
class PagedText:
    """The pages of a sequence: those of the tree, then its own, which come into the tree once they are full."""

    nodes: list[_PageNode] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    root: _PageNode = field(default_factory=lambda: _PageNode(-1, (), None))
    length: int = 0
    """Tokens whose keys and values are in the pages."""

    @property
    def pages(self) -> list[int]:
        return [*(node.page for node in self.nodes), *self.own]

    @property
    def num_pages(self) -> int:
        return len(self.nodes) + len(self.own)


class PagePool:
    """
    Pages of keys and values for many sequences. Those of an adapter, or of the model alone, that begin with the same
    tokens share their full pages.

    The pages of a sequence that has left are kept until others need them: the least recently used go first. So a text
    that continues an earlier one computes its new tokens alone. One thread uses a pool.
    """

    def __init__(self, config: ModelConfig, count: int, dtype: torch.dtype) -> None:
        self.memory, self.count = Pages(config, count, dtype), count
        self._free = list(range(count - 1, -1, -1))
        self._roots = weakref.WeakKeyDictionary[object, _PageNode]()
        """By adapter; that of texts without one is under the pool itself."""
        self._unused: dict[_PageNode, None] = {}
        """Nodes without users, the least recently used first. A node is behind its children, so the first has none."""

    @staticmethod
    def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        each = config.head_size * dtype.itemsize + (4 if dtype == torch.int8 else 0)
        return 2 * config.num_layers * config.num_kv_heads * each * PAGE

    @property
    def available(self) -> int:
        """Pages that a sequence can have, some of which are those of texts that nobody uses now."""
        return len(self._free) + len(self._unused)

    def _root(self, adapter: PackedAdapter | None) -> _PageNode:
        return self._roots.setdefault(adapter or self, _PageNode(-1, (), None))

    def missing(self, ids: Sequence[int], adapter: PackedAdapter | None = None) -> int:
        """Pages of `available` that a sequence of these IDs takes, and a token after them."""
        shared = sum(1 for node in self._path(self._root(adapter), ids) if node.users)
        return Pages.needed(len(ids) + 1) - shared

    def begin(self, ids: Sequence[int], adapter: PackedAdapter | None = None) -> PagedText:
        """A sequence with the keys and values that are there of its first tokens: of all but the last token at most."""
        text = PagedText(root=self._root(adapter))
        for node in self._path(text.root, ids):
            self._use(node)
            text.nodes.append(node)
        text.length = PAGE * len(text.nodes)
        self._copy_part(text, ids[text.length : len(ids) - 1])
        return text

    def _path(self, node: _PageNode, ids: Sequence[int]) -> list[_PageNode]:
        """Nodes below a root of the longest known beginning in full pages, without the last ID."""
        path = list[_PageNode]()
        for begin in range(0, len(ids) - PAGE, PAGE):
            child = node.children.get(tuple(ids[begin : begin + PAGE]))
            if child is None:
                break
            path.append(node := child)
        return path

    def _copy_part(self, text: PagedText, ids: Sequence[int]) -> None:
        """Copy the page that begins with the most of these IDs. The numbers behind them are overwritten later."""
        node = text.nodes[-1] if text.nodes else text.root
        best, length = None, 0
        for child in node.children.values():
            same = _same(child.ids, ids)
            if same > length:
                best, length = child, same
        if best is None:
            return
        self._use(best)  # so that its page is not the one that is taken
        if self.grow(text, text.length + length):
            self.memory.copy(best.page, text.own[0])
            text.length += length
        self._leave(best)

    def grow(self, text: PagedText, tokens: int) -> bool:
        """Give a sequence pages for so many tokens; whether there are enough. It keeps what it got."""
        while text.num_pages < Pages.needed(tokens):
            if not self._free and not self._evict():
                return False
            text.own.append(self._free.pop())
        return True

    def advance(self, text: PagedText, ids: Sequence[int], length: int) -> None:
        """The first `length` of these IDs are in the pages now, and those behind are not. Full pages are shared."""
        text.length = length
        while len(text.nodes) < length // PAGE:
            begin = PAGE * len(text.nodes)
            self._add(text, tuple(ids[begin : begin + PAGE]))
        spare = text.own[Pages.needed(length) - len(text.nodes) :]
        del text.own[len(text.own) - len(spare) :]
        self._free += spare

    def end(self, text: PagedText, ids: Sequence[int]) -> None:
        """A sequence leaves. Its pages are kept while there is room, the last one too."""
        self.advance(text, ids, text.length)
        rest = tuple(ids[PAGE * len(text.nodes) : text.length])
        last = text.nodes[-1] if text.nodes else text.root
        if rest and not any(child.ids[: len(rest)] == rest for child in last.children.values()):
            self._add(text, rest)
        self._free += text.own
        for node in reversed(text.nodes):
            self._leave(node)
        text.nodes, text.own, text.length = [], [], 0

    def _add(self, text: PagedText, ids: tuple[int, ...]) -> None:
        """The first of a sequence's own pages comes into the tree, or goes where the tree has one of the same IDs."""
        parent, page = text.nodes[-1] if text.nodes else text.root, text.own.pop(0)
        node = parent.children.get(ids)
        if node is None:
            shorter = [child for child in parent.children.values() if child.ids == ids[: len(child.ids)]]
            node = parent.children[ids] = _PageNode(page, ids, parent)
            for child in shorter:
                self._remove(child)
        else:
            self._free.append(page)
        self._use(node)
        text.nodes.append(node)

    def _use(self, node: _PageNode) -> None:
        node.users += 1
        self._unused.pop(node, None)

    def _leave(self, node: _PageNode) -> None:
        node.users -= 1
        if not node.users:
            self._unused[node] = None

    def _evict(self) -> bool:
        node = next(iter(self._unused), None)
        if node is not None:
            self._remove(node)
        return node is not None

    def _remove(self, node: _PageNode) -> None:
        assert not node.users
        assert not node.children
        assert node.parent is not None
        del self._unused[node], node.parent.children[node.ids]
        self._free.append(node.page)


def _same(first: Sequence[int], second: Sequence[int]) -> int:
    """How many IDs two texts begin with that are the same."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class _StepRoom:
    """Everything that a step of so many tokens reads and writes except weights, keys, values and logits."""

    def __init__(self, decoder: "Decoder", tokens: int, outputs: int, threads: int, longest: int) -> None:
        self.tokens, self.outputs, self.threads = tokens, outputs, threads
        self.longest = longest + -longest % ROOM_POSITIONS
        self._tensors = (
            torch.empty(tokens, decoder.config.hidden_size),
            torch.zeros(decoder.room_numbers(tokens, threads, self.longest)),
        )
        self.numbers: list[Any] = [(ctypes.c_int64 * count)() for count in (tokens, tokens, tokens, outputs)]
        """The IDs, sequences and positions of the tokens, and whose logits are asked for."""
        addresses = [*map(ctypes.addressof, self.numbers), *map(_at, self._tensors)]
        names = ("ids", "sequence", "position", "wanted", "x", "room")
        named = dict(zip(names, addresses, strict=True))
        self.native = _NativeStep(tokens=tokens, outputs=outputs, threads=threads, **named)
        self.address = ctypes.addressof(self.native)


class Decoder:
    """A packed model. Make one with `Decoder.of`."""

    def __init__(
        self, model: Transformer, format: PanelFormat | Literal["auto"], cache: torch.dtype | None = None
    ) -> None:
        config = self.config = model.config
        library = _opened()
        assert library is not None, "Decoder.of gives none without the library"
        self._library = library
        self._kept: list[Any] = []
        """Tensors and structures whose addresses the library has."""
        self._last = threading.local()
        """The room of the last step in this thread."""
        self.embed = model.embed.weight.detach().contiguous()
        self.positions = None if model.positions is None else model.positions.weight.detach().float()
        self.vocab_size = model.vocab_size
        root = torch.tensor(config.hidden_size**0.5, dtype=self.embed.dtype)
        is_float32 = format == "float32" or (format == "auto" and _is_float32(model))
        self.dtype = cache or (torch.float32 if is_float32 else torch.bfloat16)
        tables = {local: self._table(local) for local in (False, True)}
        layers = (_NativeLayer * config.num_layers)()
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            layers[number] = self._layer(block, number, format, tables)
        head = pack(model.head_rows().detach(), _head_format(format, is_float32))
        self.num_bytes = sum(packed.num_bytes for packed in self._kept if isinstance(packed, Packed)) + head.num_bytes
        self._model = _NativeModel(
            width=config.hidden_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head=config.head_size,
            rotary=config.rotary_size,
            inner=config.intermediate_size,
            norm_over_width=config.qk_norm_over == "width",
            parallel=config.parallel_residual,
            cache_format=CACHE_FORMATS.index(self.dtype),
            eps=config.norm_eps,
            scale=(config.query_pre_attn_scalar or config.head_size) ** -0.5,
            slopes=self._address(torch.tensor(alibi_slopes(config.num_heads)))
            if config.position_embedding == "alibi"
            else None,
            embed_format=EMBED_FORMATS[self.embed.dtype],
            embed=_at(self.embed),
            positions=_at(self.positions),
            embed_scale=float(root) if config.scale_embeddings else 1.0,
            layer=layers,
            norm=self._norm(model.norm),
            logits=self._keep(head),
        )
        self._kept.append(layers)
        self._address_of_model = ctypes.addressof(self._model)

    @classmethod
    def of(
        cls,
        model: Transformer,
        format: PanelFormat | Literal["auto"] = "auto",
        cache: torch.dtype | None = None,
    ) -> "Decoder | None":
        """
        The model, packed; None where the library is not built or does not know the model's layers. `cache` is the
        number format of keys and values, one of CACHE_FORMATS; by default float32 next to weights in float32.
        """
        return cls(model, format, cache) if cls.packs(model) else None

    @staticmethod
    def packs(model: Transformer) -> bool:
        """Whether `of` packs this model. It may have shapes alone."""
        return _library() is not None and is_known(model)

    def _keep(self, matrix: Packed) -> _NativeMatrix:
        self._kept.append(matrix)
        return matrix.native()

    def _address(self, tensor: Tensor | None) -> int | None:
        self._kept.append(tensor)
        return _at(tensor)

    def _table(self, local: bool) -> tuple[Tensor, Tensor] | None:
        config = self.config
        if config.position_embedding != "rope" or (local and config.rope_local_theta is None):
            return None
        cos, sin = rotation(torch.arange(config.context_length)[None], config, torch.float32, local=local)
        half = config.rotary_size // 2
        return cos[0, 0, :, :half].contiguous(), sin[0, 0, :, :half].contiguous()

    def _norm(self, norm: nn.Module | None) -> _NativeNorm:
        match norm:
            case RMSNorm():
                gain = norm.gain()
                return _NativeNorm(1, self._address(None if gain is None else gain.detach().float().contiguous()), None)
            case LayerNorm():
                return _NativeNorm(2, self._address(_float(norm.weight)), self._address(_float(norm.bias)))
            case _:
                return _NativeNorm(0, None, None)

    def _layer(
        self,
        block: Block,
        number: int,
        format: PanelFormat | Literal["auto"],
        tables: dict[bool, tuple[Tensor, Tensor] | None],
    ) -> _NativeLayer:
        config, attention, mlp = self.config, block.attention, block.mlp
        _, window, kind = config.layer(number)
        table = tables[config.rope_local_theta is not None and window != "full"] if config.rotates(number) else None
        up = [packed(mlp.gate, format), packed(mlp.up, format)] if kind in GATED else [packed(mlp.up, format)]
        return _NativeLayer(
            attention_norm=self._norm(block.attention_norm),
            attention_post=self._norm(block.attention_post_norm),
            mlp_norm=self._norm(block.mlp_norm),
            mlp_post=self._norm(block.mlp_post_norm),
            q_norm=self._norm(attention.q_norm),
            k_norm=self._norm(attention.k_norm),
            qkv=self._keep(_stacked([packed(one, format) for one in (attention.q, attention.k, attention.v)])),
            out=self._keep(packed(attention.out, format)),
            up=self._keep(_stacked(up)),
            down=self._keep(packed(mlp.down, format)),
            window=0 if window == "full" else window,
            mlp=ACTIVATIONS[kind],
            gated=kind in GATED,
            cosines=None if table is None else self._address(table[0]),
            sines=None if table is None else self._address(table[1]),
        )

    def step(
        self,
        ids: Sequence[int],
        sequence: Sequence[int],
        position: Sequence[int],
        pages: Tensor,
        memory: Pages,
        outputs: Sequence[int],
        adapters: Sequence[PackedAdapter | None] = (),
    ) -> tuple[Float[Tensor, "O V"], bool]:
        """
        Logits after the tokens `outputs` (indices into `ids`), and whether all of them are finite. The keys and values
        of all tokens go into their pages. `adapters` are those of the sequences, if any has one: each changes the rows
        of its own tokens alone.

        Token n is at `position[n]` of sequence `sequence[n]`, whose pages are row `sequence[n]` of `pages` (int32). All
        earlier positions of that sequence are in the pages, or are among the tokens of this step.
        """
        N, longest = len(ids), max(position) + 1
        room = self._room_for(N, len(outputs), longest)
        if not 0 <= min(ids) <= max(ids) < len(self.embed):
            raise IndexError(f"token IDs {min(ids)} to {max(ids)} for embeddings of {len(self.embed)}")
        for array, numbers in zip(room.numbers, (ids, sequence, position, outputs), strict=True):
            array[:] = numbers
        logits = torch.empty(len(outputs), -(-self.vocab_size // PANEL) * PANEL)
        step = room.native
        step.pages, step.pages_each, step.logits = _at(pages), pages.shape[1], _at(logits)
        step.keys, step.values, step.scales = memory.addresses
        changes = None
        if any(adapters):
            each = (None if (one := adapters[number]) is None else one.address for number in sequence)
            changes = (ctypes.c_void_p * N)(*each)
        step.adapters = None if changes is None else ctypes.addressof(changes)
        finite = self._library.bloomery_decode(self._address_of_model, room.address, longest)
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size], bool(finite)

    def room_numbers(self, tokens: int, threads: int, longest: int) -> int:
        """Numbers in float32 that a step needs for its intermediate results."""
        return int(self._library.bloomery_decode_room(self._address_of_model, tokens, threads, longest))

    def _room_for(self, tokens: int, outputs: int, longest: int) -> _StepRoom:
        """That of this thread's last step where it has the same size: an answer is many steps of one token."""
        threads = torch.get_num_threads() if self.num_bytes >= LARGE or tokens > 1 else 1
        room: _StepRoom | None = getattr(self._last, "room", None)
        size = (tokens, outputs, threads)
        if room is None or (room.tokens, room.outputs, room.threads) != size or room.longest < longest:
            self._last.room = room = None  # given up before the next one is made
            self._last.room = room = _StepRoom(self, *size, longest)
        return room


def _head_format(format: PanelFormat | Literal["auto"], is_float32: bool) -> PanelFormat:
    """The head of weights in NF4 is in bfloat16, as the embedding is."""
    if format == "auto":
        return "float32" if is_float32 else "bfloat16"
    return "bfloat16" if format == "nf4" else format


@cached
def _opened() -> ctypes.CDLL | None:
    """The library with the types of its functions, or None."""
    if (library := native.library(LIBRARY)) is None:
        return None
    for function in (library.bloomery_decode, library.bloomery_decode_room, library.bloomery_decode_lanes):
        function.restype = ctypes.c_int64
    library.bloomery_decode_room.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 3)
    library.bloomery_decode.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    return library


@cached
def _library() -> ctypes.CDLL | None:
    """
    The library, once it has computed the logits of two small models right. One that computes others is refused, with a
    line that says so.
    """
    library = _opened()
    if library is None:
        return None
    for config in TRIED:
        model = Transformer(config, 50)
        model.initialize(0)
        with torch.inference_mode():
            expected = model.logits(model(torch.arange(40)[None]))[0]
        pages = torch.arange(Pages.needed(40), dtype=torch.int32)[None]
        memory = Pages(config, Pages.needed(40), torch.float32)
        logits, _ = Decoder(model, "float32").step(range(40), [0] * 40, range(40), pages, memory, range(40))
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            native.refuse(LIBRARY, "it computes other logits than torch")
            info(f"Decoding with torch, which is slower: the compiled library is {native.state(LIBRARY)}.", "yellow")
            return None
    return library


_TRIED = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "context_length": 40}
TRIED = (
    ModelConfig(**_TRIED, intermediate_size=96),
    ModelConfig(**_TRIED, intermediate_size=96, norm="layernorm", mlp=("gelu",), biases="all", sliding_window=(9,)),
)


def _is_float32(model: Transformer) -> bool:
    """Whether every linear layer has its weights in float32."""
    layers = (one for one in model.modules() if isinstance(one, nn.Linear | QuantizedLinear))
    return all(not isinstance(one, QuantizedLinear) and one.weight.dtype == torch.float32 for one in layers)


def is_known(model: Transformer) -> bool:
    """Whether the library computes what this model does."""
    config = model.config
    widths = (config.num_heads * config.head_size, config.num_kv_heads * config.head_size, config.intermediate_size)
    matrices = (one for block in model.blocks for name, one in block.named_modules() if name.endswith(MATRICES))
    return (
        model.embed.weight.device.type in ("cpu", "meta")
        and set(config.attention) == {"standard"}
        and set(config.mlp) <= ACTIVATIONS.keys()
        and all(width % PANEL == 0 for width in widths)
        and all(isinstance(one, nn.Linear | QuantizedLinear) for one in matrices)
    )
