"""
How many bytes of tensors live, and what is asked of the device, while an operation after the other runs. Works on fake
tensors, which have shapes and no numbers, as on real ones.

A storage counts from the operation that made it until nobody holds it any more. Of a tensor that is spread over ranks
the part of this rank counts: its wrapper tells the size of the whole.

Each storage is of a kind: `Meter.making` at the time that it was made, unless it is known better: what is made of
weights alone is a copy of them, what has a side as long as the vocabulary is scores, and `count_as` says the rest.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.model import products

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Operations of two matrices; the last two arguments that are tensors are multiplied."""

Product = tuple[int, int, int, int, torch.dtype]
"""Matrices, rows, inner, columns and format."""


WEIGHTS, COPIES, WORK, LOGITS, GATHERED = "weights", "copies", "activations", "logits", "gathered"
"""Kinds of what is counted, by the names of `planning.needs`."""
GATHERING = ("all_gather_copy_in", "_allgather_base_", "split_with_sizes_copy")
"""Operations by which parts of weights come together."""
MIXED = ("add", "add_", "sub", "sub_", "mul", "mul_", "lerp", "lerp_", "addcmul_")
"""Operations of tensors of several formats, for which a processor writes the shorter ones out in the longest."""


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, *, on_processor: bool = False, vocab_size: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self._on_processor, self._vocab_size = 0, on_processor, vocab_size
        self.peak = 0
        """The most that lived at once since `restart`."""
        self.at_peak: Counter[str] = Counter()
        """Of it, by kind."""
        self.making = WEIGHTS
        """The kind of what is made now, where nothing else is known of it."""
        self._by_kind: Counter[str] = Counter()
        self.products: Counter[Product] = Counter()
        self.kinds: set[tuple[object, ...]] = set()
        """Of products in a short format: operation, sizes, and which sides are transposed."""
        self.moved = 0
        """Bytes that other operations read and wrote, views not counted."""
        self._held: dict[int, tuple[int, str]] = {}
        self._resize: Callable[..., Any] | None = None

    def restart(self) -> None:
        self.peak, self.at_peak, self.moved = self.live, self._by_kind.copy(), 0
        self.products.clear()

    def __enter__(self) -> "Meter":
        original, meter = torch.UntypedStorage.resize_, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # sharded weights are freed and filled by it
            made = original(storage, size)
            if (key := storage._cdata) in meter._held:
                before, kind = meter._held[key]
                meter._held[key] = size, kind
                meter._change(size - before, kind)
            return made

        self._resize = original
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(keywords or {}))
        given = [one for one in tree_iter((arguments, keywords)) if isinstance(one, Tensor)]
        results = [one for one in tree_iter(made) if isinstance(one, Tensor)]
        kind = self._kind(given)
        for one in results:
            self.hold(one, self._scores(one) or kind)
        name = function.overloadpacket.__name__
        if name in GATHERING:
            for one in (*given, *results):
                if self._held.get(_storage(one)._cdata, (0, ""))[1] == WORK:  # and no part of a weight, which is read
                    self.count_as(GATHERED, one)
        if self._on_processor and name in MIXED:
            self._reached(written_out(given), self.making)
        if name in PRODUCTS:
            left, right = given[-2:]
            sizes = (1, *left.shape, right.shape[1]) if left.dim() == 2 else (*left.shape, right.shape[2])
            self.products[(*sizes, left.dtype)] += 1
            if left.element_size() == 2:
                self.kinds.add((name, sizes, *(one.stride(-1) == 1 for one in (left, right))))
        elif not function.is_view:
            self.moved += sum(one.numel() * one.element_size() for one in (*given, *results))
        return made

    def hold(self, tensor: Tensor, kind: str | None = None) -> None:
        """Count a tensor that is there already, until it is gone."""
        storage = _storage(tensor)
        key = storage._cdata
        if key not in self._held:
            self._held[key] = storage.nbytes(), kind or self.making
            self._change(*self._held[key])
            weakref.finalize(storage, self._drop, key)

    def count_as(self, kind: str, tensor: Tensor) -> None:
        """Let a tensor that is there be of another kind from now on."""
        key = _storage(tensor)._cdata
        if key in self._held:
            size, before = self._held[key]
            self._by_kind[before] -= size
            self._by_kind[kind] += size
            self._held[key] = size, kind

    def _kind(self, given: list[Tensor]) -> str:
        """Of what an operation makes of these."""
        kinds = {self._held.get(_storage(one)._cdata, (0, ""))[1] for one in given}
        return COPIES if self.making == WORK and kinds == {WEIGHTS} else self.making

    def _scores(self, made: Tensor) -> str | None:
        padded = made.ndim == 2 and made.shape[1] == products.aligned(self._vocab_size)
        return LOGITS if self.making == WORK and (padded or self._vocab_size in made.shape) else None

    def _change(self, size: int, kind: str) -> None:
        self.live += size
        self._by_kind[kind] += size
        self._reached(0, kind)

    def _reached(self, more: int, kind: str) -> None:
        """Keep the most that there was, with so much more of a kind for the moment."""
        if self.live + more > self.peak:
            self.peak, self.at_peak = self.live + more, self._by_kind.copy()
            self.at_peak[kind] += more

    def _drop(self, key: int) -> None:
        size, kind = self._held.pop(key, (0, self.making))
        self.live -= size
        self._by_kind[kind] -= size


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    found: torch.UntypedStorage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
    return found


def written_out(tensors: list[Tensor]) -> int:
    """Bytes of copies of those that are not of the longest format, in that."""
    sizes = [one.element_size() for one in tensors if one.is_floating_point() and one.dim()]
    longest = max(sizes, default=0)
    return sum(one.numel() * longest for one in tensors if one.dim() and 1 < one.element_size() < longest)
