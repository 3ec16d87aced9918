"""
Memory and time of a training step: traced on fake tensors, or timed on a small model.

A traced step runs model, loss and optimizer on fake tensors, and nothing is allocated. Of a deep model, two small
models are run. What a layer adds between them is added for the other layers.

The meter counts how many bytes of tensors are alive, and what is asked of the device, one operation after another.
It works on fake tensors, which have shapes and no numbers, and on real tensors. A storage counts from the operation
that made it until nobody holds it any more. Of a tensor that is spread over ranks, the part of this rank counts.
Its wrapper tells the size of the whole.

Each storage has a kind: the current kind at the time of its creation, unless the meter knows better. A tensor made
of weights alone is a copy of weights. A tensor with a side as long as the vocabulary is logits. `count_as` sets the
rest.

A step can be traced without numbers, or timed with them.

Timing runs the step with all layers if that takes little time. Otherwise it times a model with one period of the
layer pattern and a model with some more. Each further period is assumed to add what these layers added. The models
take turns in the functions of the training loop, and each time is the best of a few.

Layers are left out before sequences are. A step takes time for each layer, but not for each sequence: some work is
done once for all sequences. Weights are rounded or put together from four bits, and gradients written, only once.
If sequences are left out too, the smaller model is also timed with half of its sequences. This tells what each
further sequence adds.

On a CPU the time is the CPU time of this thread. So other load on the machine at the moment is not part of the
plan. On other devices it is clock time.

Tracing and timing share one file because both run the same step.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import bloomery.hw.require_torch  # noqa: F401
from bloomery.hw import device as devices
from bloomery.hw.device import Device, measured_peak
from bloomery.hw.distributed import World
from bloomery.model import lora as model_lora
from bloomery.model import quantize
from bloomery.model.attention import FLEX_TOKENS, AttentionMask
from bloomery.model.config import Float8, Lora, ModelConfig, cost
from bloomery.model.kernels import cpu, triton
from bloomery.model.transformer import Transformer, on_meta
from bloomery.shards.loader import Batch
from bloomery.train import fsdp
from bloomery.train.collectives import total_norm
from bloomery.train.compile import checkpoint_activations
from bloomery.train.config import Level, Mesh, Optimizer
from bloomery.train.loss import ALIGNED_ROWS, chunks_of
from bloomery.train.optim import Optimizers
from bloomery.train.plan.here import slower
from bloomery.train.plan.memory import LOGITS_CHUNK_BYTES, Machine, Moment, TrainSetup, fits
from bloomery.train.plan.search import Candidate, PlanRequest
from bloomery.train.precision import Precision, set_short_formats
from bloomery.train.step import Placed, clipping, gradients, placed, placed_losses, sparse_embedding_grad
from bloomery.weights.opened import own_weights, put_weight

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Operations of two matrices; the last two arguments that are tensors are multiplied."""
SCALED_PRODUCT = "_scaled_mm"
"""That of float8: the first two arguments are multiplied. It is timed in bfloat16, which takes longer."""

Product = tuple[int, int, int, int, torch.dtype]
"""Matrices, rows, inner, columns and format."""


WEIGHTS, COPIES, WORK, LOGITS, GATHERED = "weights", "copies", "activations", "logits", "gathered"
"""Kinds of what is counted, by the names of `planning.needs`."""
GATHERING = ("all_gather_copy_in", "_allgather_base_", "split_with_sizes_copy")
"""Operations by which parts of weights come together."""
MIXED = ("add", "add_", "sub", "sub_", "mul", "mul_", "lerp", "lerp_", "addcmul_")
"""Operations on tensors of several formats: a CPU first writes the shorter formats out in the longest."""


class _AttentionElsewhere(torch.autograd.Function):
    """
    What attention on a GPU keeps for its backward pass: inputs, output, and a sum for each query in float32. Kernels
    that take whole rows or masks by blocks keep no attention weights.
    """

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        y = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        kept = [] if bias is None else [bias]
        context.save_for_backward(q, k, v, y, q.new_empty(q.shape[:3], dtype=torch.float32), *kept)
        return y.add_(0)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = context.saved_tensors
        sums = upstream[0].sum(-1, dtype=torch.float32)
        # Flash attention adds up the gradient of queries in float32, and grouped heads' gradients after all of them.
        room = [torch.empty_like(q, dtype=torch.float32)]
        if q.shape[1] > k.shape[1]:
            room += [one.new_empty(len(one), q.shape[1], *one.shape[2:]) for one in (k, v)]
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del sums, room
        return *grads, None


def attention_elsewhere(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """
    Attention as a GPU holds it in memory. Below FLEX_TOKENS, torch's memory-efficient kernel takes masks: as a bias in
    the format of queries, and with each key head repeated for its queries. So it does for all rows where the trial of
    FlexAttention failed.
    """
    k, v, bias = k.to(q.dtype), v.to(q.dtype), None
    plain = mask.is_causal and mask.num_queries in (1, mask.num_keys)
    if not plain and (mask.allowed is not None or mask.num_queries < FLEX_TOKENS or not devices.may_attend("flex")):
        group = q.shape[1] // k.shape[1]
        k, v = (one if group == 1 else one.repeat_interleave(group, dim=1) for one in (k, v))
        bias = mask.bias(q.dtype)
    output: Tensor = _AttentionElsewhere.apply(q, k, v, bias)  # type: ignore[no-untyped-call]
    return output


class TensorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        """Of matmuls in a short format: operation, sizes, and which sides are transposed."""
        self.moved = 0
        """Bytes that other operations read and wrote, views not counted."""
        self._held: dict[int, tuple[int, str]] = {}
        self._resize: Callable[..., Any] | None = None

    def restart(self) -> None:
        self.peak, self.at_peak, self.moved = self.live, self._by_kind.copy(), 0
        self.products.clear()

    def __enter__(self) -> "TensorMeter":
        original, meter = torch.UntypedStorage.resize_, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # sharded weights are freed and filled by it
            result = original(storage, size)
            if (key := storage._cdata) in meter._held:
                before, kind = meter._held[key]
                meter._held[key] = size, kind
                meter._change(size - before, kind)
            return result

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
        output = function(*arguments, **(keywords or {}))
        inputs = [one for one in tree_iter((arguments, keywords)) if isinstance(one, Tensor)]
        results = [one for one in tree_iter(output) if isinstance(one, Tensor)]
        kind = self._kind(inputs)
        for tensor in results:
            self.hold(tensor, self._scores(tensor) or kind)
        name = function.overloadpacket.__name__
        if name in GATHERING:
            for tensor in (*inputs, *results):
                if self._held.get(_storage(tensor)._cdata, (0, ""))[1] == WORK:  # no part of a weight, which is read
                    self.count_as(GATHERED, tensor)
        if self._on_processor and name in MIXED:
            self._reached(written_out(inputs), self.making)
        if name in PRODUCTS or name == SCALED_PRODUCT:
            left, right = inputs[-2:] if name in PRODUCTS else inputs[:2]
            sizes = (1, *left.shape, right.shape[1]) if left.dim() == 2 else (*left.shape, right.shape[2])
            self.products[(*sizes, left.dtype if name in PRODUCTS else torch.bfloat16)] += 1
            if left.element_size() == 2:
                self.kinds.add((name, sizes, *(one.stride(-1) == 1 for one in (left, right))))
        elif not function.is_view:
            self.moved += sum(one.numel() * one.element_size() for one in (*inputs, *results))
        return output

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

    def _kind(self, inputs: list[Tensor]) -> str:
        """Of what an operation makes of these."""
        kinds = {self._held.get(_storage(one)._cdata, (0, ""))[1] for one in inputs}
        return COPIES if self.making == WORK and kinds == {WEIGHTS} else self.making

    def _scores(self, tensor: Tensor) -> str | None:
        widths = cpu.aligned(self._vocab_size), -(-self._vocab_size // ALIGNED_ROWS) * ALIGNED_ROWS
        padded = tensor.ndim == 2 and tensor.shape[1] in widths
        return LOGITS if self.making == WORK and (padded or self._vocab_size in tensor.shape) else None

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
    storage: torch.UntypedStorage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
    return storage


def written_out(tensors: list[Tensor]) -> int:
    """Bytes of copies of those that are not of the longest format, in that."""
    sizes = [one.element_size() for one in tensors if one.is_floating_point() and one.dim()]
    longest = max(sizes, default=0)
    return sum(one.numel() * longest for one in tensors if one.dim() and 1 < one.element_size() < longest)


TRACED_KERNELS = frozenset({"rms-norm", "rotary", "rotary-norm", "cross-entropy"})
"""Our own GPU kernels of a training step."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """Some rows, in one or more micro-batches."""

    model: ModelConfig
    vocab_size: int
    optimizer: Optimizer
    activation_checkpointing: Level
    precision: torch.dtype
    rows: int
    """Of a micro-batch."""
    accumulates: bool
    """Whether there are more micro-batches, whose gradients are there before its own."""
    on_processor: bool = True
    ranks: int = 1
    """That each hold a part of weights, gradients and optimizer; this is the step of one of them."""
    weight_dtype: str = "float32"
    residual_dtype: str = "float32"
    float8: Float8 = "off"
    lora: Lora | None = None
    """The adapters that are trained on frozen weights. None: all weights are trained."""
    packed: bool = True
    """Whether rows have several documents. On a CPU this makes no difference to memory, and is not traced."""
    logits_chunk_bytes: int = LOGITS_CHUNK_BYTES
    """Of float32 logits, on another device than a CPU."""
    kernels: frozenset[str] = field(default_factory=lambda: TRACED_KERNELS & devices.all_trusted())
    """Our own kernels, on another device than a CPU: those that this process trusts. They keep less than torch's."""

    def with_layers(self, layers: int) -> "TracedStep":
        return replace(self, model=self.model.model_copy(update={"num_layers": layers}))

    def load(self, *, initialized: bool = False) -> Transformer:
        """The model as a stage hands it to the loop, with weights of any value unless it is to be initialized."""
        if self.lora is None:
            model = Transformer(self.model, self.vocab_size)
            if initialized:
                model.initialize(0)
            fsdp.keep_weights(model, self.weight_dtype, sharded=self.ranks > 1)
            return model
        model = on_meta(self.model, self.vocab_size)  # a frozen base is read weight by weight
        for name, weight in own_weights(model).items():
            numbers = torch.empty(weight.shape).normal_(0.0, 0.02) if initialized else torch.empty(weight.shape)
            put_weight(model, name, numbers, "float32", "cpu", self.lora.frozen_dtype)
        if self.model.tie_embeddings:
            model.head.weight = model.embed.weight
        model_lora.attach(model, self.lora, seed=0)
        return model

    def prepare(self, model: Transformer, precision: Precision) -> Optimizers:
        """Set up a model as a run does when the model is on its device."""
        checkpoint_activations(model, self.activation_checkpointing)
        world = World.alone() if self.on_processor else World(0, self.ranks)
        return Optimizers(model, self.optimizer, precision.muon_dtype, world=world)


class Traced(NamedTuple):
    """Bytes of tensors, and what a micro-batch and an update ask of the device."""

    loading: int
    """The most while the model is built, on a CPU: each weight exists in full before it is frozen."""
    resting: int
    """Weights, and what the optimizer remembers."""
    learning: int
    """The most during the forward and backward pass."""
    updating: int
    """The most while the optimizer works."""
    room: int
    """Workspace that matmul libraries keep."""
    products: Counter[Product]
    """Of a micro-batch."""
    moved: int
    """Bytes that its other operations read and write."""
    update_products: Counter[Product]
    update_moved: int
    kept_learning: Counter[str]
    """What `learning` is made of, by kind."""
    kept_updating: Counter[str]

    @property
    def peak(self) -> int:
        return max(self.loading, self.room + max(self.learning, self.updating))

    @property
    def at_peak(self) -> tuple[Moment, dict[str, int]]:
        """When the most is there, and its parts, which add up to it."""
        if self.peak == self.loading:
            return "loading", {"weights": self.loading}
        moment: Moment = "micro-batch" if self.learning >= self.updating else "update"
        kept, most = (
            (self.kept_learning, self.learning) if moment == "micro-batch" else (self.kept_updating, self.updating)
        )
        parts = {kind: size for kind, size in kept.items() if size > 0}
        rest = "activations" if moment == "micro-batch" else "update"
        parts[rest] = parts.get(rest, 0) + most - sum(parts.values())  # what rounding of small models has left
        return moment, parts | {"libraries": self.room}


KERNEL_BYTES = 7 * 2**20 // 10
"""
Of the code that oneDNN compiles and keeps for each size and layout of a matmul with two bytes a number. Measured as
the growth of a process: 0.5 to 1.0 MiB for 14 of 16 sizes and layouts (torch 2.13, AMX).
"""


@cache
def trace(step: TracedStep) -> Traced:
    """A step after the first, so that all that the optimizer remembers is there."""
    return extrapolated(step)


def extrapolated(step: TracedStep) -> Traced:
    """As `trace`, which keeps its results."""
    turns = 2 if step.ranks == 1 else 3  # ranks gather the next of their layers early: both of two would lie together
    layers, few, more = step.model.num_layers, turns * step.model.turn, (turns + 1) * step.model.turn
    if layers <= more:
        return _traced(step)
    low, high = _traced(step.with_layers(few)), _traced(step.with_layers(more))
    return _line(low, high, (layers - few) / (more - few))


def _line(low: Traced, high: Traced, times: float) -> Traced:
    """Linear extrapolation: low + times · (high − low), for each number."""
    values = list[Any]()
    for first, second in zip(low, high, strict=True):
        if isinstance(first, int):
            assert isinstance(second, int)
            values.append(round(first + times * (second - first)))
        else:
            assert isinstance(first, Counter)
            assert isinstance(second, Counter)
            values.append(
                Counter({key: round(first[key] + times * (count - first[key])) for key, count in second.items()})
            )
    return Traced(*values)


def no_device(dtype: torch.dtype) -> Device:
    """What stands for the device of a trace, which computes nothing."""
    return Device(
        torch_device=torch.device("cpu"),
        vendor="cpu",
        name="nothing",
        memory_bytes=0,
        compute_dtype=dtype,
        backend="gloo",
    )


def _traced(step: TracedStep) -> Traced:
    device = no_device(step.precision)
    precision = Precision.decide("auto", device)
    counting = TensorMeter(on_processor=step.on_processor, vocab_size=step.vocab_size)
    chunks = chunks_of(step.logits_chunk_bytes)
    kernels = triton.traced(frozenset() if step.on_processor else step.kernels)
    with (
        _company(step.ranks) as mesh,
        _apart(step.on_processor) as room,
        chunks,
        kernels,
        FakeTensorMode(),
        counting as meter,
    ):
        model = step.load()
        set_short_formats(model, step.residual_dtype, step.float8, device.torch_device)
        loading = meter.peak if step.on_processor else 0
        if mesh is not None:
            gathered = torch.float32 if step.on_processor else step.precision
            fsdp.shard(model, World(0, step.ranks), device, devices=mesh, dtype=gathered)
        optimizers = step.prepare(model, precision)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in trained:
            weight.register_post_accumulate_grad_hook(partial(_learned, meter))  # type: ignore[no-untyped-call]
            weight.grad = torch.empty_like(weight)
        meter.making = "optimizer"
        optimizers.step()
        optimizers.zero_grad()
        resting, meter.making = meter.live, WORK
        ids = torch.zeros((step.rows, step.model.context_length), dtype=torch.int64)
        segments = ids.clone() if step.packed and not step.on_processor else None
        batch = Placed(ids, ids.clone(), segments, ids.flatten().clone(), ids.flatten().clone())
        total = torch.zeros(())
        if step.accumulates:
            for weight in trained:
                weight.grad = torch.empty_like(weight)
                meter.count_as("gradients", weight.grad)
        meter.restart()
        with sparse_embedding_grad(model):
            loss, entropy = placed_losses(model, batch, precision, scale=1 / ids.numel())
            torch.autograd.backward(loss)
        total += entropy
        del loss, entropy
        learning, matmuls, moved, during = meter.peak, meter.products.copy(), meter.moved, meter.at_peak
        meter.restart()
        meter.making = "update"
        norm = nn.utils.get_total_norm(gradients(model))
        nn.utils.clip_grads_with_norm_(trained, 1.0, norm)
        optimizers.step()
        kept = sum(room) + (KERNEL_BYTES * len(meter.kinds) if step.on_processor else 0)
        most = loading, resting, learning, meter.peak, kept
        return Traced(*most, matmuls, moved, meter.products.copy(), meter.moved, during, meter.at_peak)


@contextmanager
def _company(ranks: int) -> Iterator[DeviceMesh | None]:
    """Other ranks that nobody hears: what they would say has the right size and no meaning. None for one alone."""
    if ranks == 1:
        yield None
        return
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield fsdp.device_mesh(Mesh(dp_shard=ranks), "cpu")
    finally:
        torch.distributed.destroy_process_group()


def _learned(meter: TensorMeter, weight: torch.Tensor) -> None:
    assert weight.grad is not None
    meter.count_as("gradients", weight.grad)


@contextmanager
def _apart(on_processor: bool) -> Iterator[list[int]]:
    """Nothing without numbers is kept for later, nothing with numbers taken from before. Gives what `ROOM` comes to."""
    room = [0, 0, 0]
    elsewhere, room_token = cpu.ELSEWHERE.set(not on_processor), cpu.ROOM.set(room)
    attention_token = cpu.ATTENTION_ELSEWHERE.set(None if on_processor else attention_elsewhere)
    quantize.forget()
    try:
        yield room
    finally:
        quantize.forget()
        cpu.ROOM.reset(room_token)
        cpu.ATTENTION_ELSEWHERE.reset(attention_token)
        cpu.ELSEWHERE.reset(elsewhere)


SLICE_SECONDS, SLICE_PARAMETERS = 0.4, 10**8
"""Of a micro-batch of the larger model, at the peak; and how many weights that model may have at most."""
MAX_SECONDS = 3.0
"""Of a plan, for all times of a slice: a round that was begun is ended, and slow steps need no repetition."""
TIMES = 3
"""Of slices, whose errors the layers that are left out multiply. A whole model takes longer and needs one less."""


DOCUMENTS = 3
"""Of each sequence that is timed on a GPU, where another kernel than that of whole sequences takes them."""


class Timed(NamedTuple):
    """Seconds."""

    first: float
    """Of the first micro-batch of a step, forward and backward."""
    further: float
    """Of each other one, which adds to the gradients that are there."""
    updating: float

    def step(self, micro_batches: int) -> float:
        return self.first + (micro_batches - 1) * self.further + self.updating


def timed(step: TracedStep, device: Device) -> Timed | None:
    """None where even the small models are too large to be made for a plan."""
    layers, few = step.model.num_layers, step.model.turn
    more = _layers(step, device)
    if cost(step.with_layers(more).model, step.vocab_size).parameters > SLICE_PARAMETERS:
        return None
    if layers <= more:
        return measured((step,), device)[0]
    low, high = measured((step.with_layers(few), step.with_layers(more)), device)
    times = (layers - few) / (more - few)
    return Timed(*(max(first, first + times * (second - first)) for first, second in zip(low, high, strict=True)))


@cache
def measured(steps: tuple[TracedStep, ...], device: Device) -> list[Timed]:
    """Of models that take turns, so that what disturbs one disturbs the others; once a process for the same ones."""
    rows, all_rows = _rows(steps[-1], device), steps[0].rows
    fewer = [replace(steps[0], rows=rows // 2)] if 1 < rows < all_rows else []
    ready = [_Ready(step, device) for step in [*(replace(step, rows=rows) for step in steps), *fewer]]
    rounds = list[list[Timed]]()
    while len(rounds) < (TIMES + 1 if len(steps) > 1 else TIMES) and _total(rounds) < MAX_SECONDS:
        rounds.append([one.once() for one in ready])
    warm = rounds[1:] or rounds
    best = [Timed(*(min(values) for values in zip(*times, strict=True))) for times in zip(*warm, strict=True)]
    low = with_rows(best[0], best[-1] if fewer else None, rows, all_rows)
    share = all_rows / rows
    more = [
        Timed(
            low.first + share * (timing.first - best[0].first),
            low.further + share * (timing.further - best[0].further),
            timing.updating,
        )
        for timing in best[1 : len(steps)]
    ]
    return [low, *more]


def with_rows(timed: Timed, half: Timed | None, rows: int, all_rows: int) -> Timed:
    """How long all rows take, by some of them and by half of those; without a half, each row costs the same."""
    if half is None:
        return Timed(timed.first * all_rows / rows, timed.further * all_rows / rows, timed.updating)

    def whole(some: float, fewer: float) -> float:
        per_row = min(max(some - fewer, 0.0) / (rows - rows // 2), some / rows)
        return some + (all_rows - rows) * per_row

    return Timed(whole(timed.first, half.first), whole(timed.further, half.further), timed.updating)


def _layers(step: TracedStep, device: Device) -> int:
    """Of the larger model: whole turns, as many as are soon done with all rows, two at least; or all there are."""
    layers, turn = step.model.num_layers, step.model.turn
    more = min(layers, 2 * turn)
    while more < layers and _is_small(step.with_layers(min(layers, more + turn)), device):
        more = min(layers, more + turn)
    return more


def _is_small(step: TracedStep, device: Device) -> bool:
    parameters = cost(step.model, step.vocab_size).parameters
    return parameters <= SLICE_PARAMETERS and step.rows * _row_seconds(step, device) <= SLICE_SECONDS


def _rows(step: TracedStep, device: Device) -> int:
    """Of a micro-batch: all of them, unless that takes too long."""
    return max(1, min(step.rows, int(SLICE_SECONDS / _row_seconds(step, device))))


def _row_seconds(step: TracedStep, device: Device) -> float:
    """What one row takes at the peak."""
    work = cost(step.model, step.vocab_size).train_flops_per_token * step.model.context_length
    return work / measured_peak(replace(device, compute_dtype=step.precision))


def _total(rounds: Sequence[Sequence[Timed]]) -> float:
    return sum(sum(one) for times in rounds for one in times)


class _Ready:
    """A model that can make steps."""

    def __init__(self, step: TracedStep, device: Device) -> None:
        self._accumulates, self._device = step.accumulates, device
        self._precision = Precision.decide("auto", replace(device, compute_dtype=step.precision))
        self._model: Transformer = step.load(initialized=True).to(device.torch_device)
        self._optimizers: Optimizers = step.prepare(self._model, self._precision)
        rows, length = step.rows, step.model.context_length
        ids = np.random.default_rng(0).integers(0, step.vocab_size, (rows, length))
        places = np.tile(np.arange(length), (rows, 1))
        documents = DOCUMENTS if step.packed and device.is_gpu else 1
        batch = Batch(ids, ids, places, places // (length // documents + 1), np.arange(rows))
        self._batch = placed(batch, device.torch_device)

    def once(self) -> Timed:
        began = self._now()
        self._learn()
        learned = again = self._now()
        if self._accumulates:
            self._learn()
            again = self._now()
        self._optimizers.step(clipping(1.0, total_norm(gradients(self._model))))
        self._optimizers.zero_grad()
        first, updating = learned - began, self._now() - again
        return Timed(first, again - learned if self._accumulates else first, updating)

    def _learn(self) -> None:
        with sparse_embedding_grad(self._model):
            loss, _ = placed_losses(self._model, self._batch, self._precision, scale=1 / self._batch.ids.numel())
            torch.autograd.backward(loss)

    def _now(self) -> float:
        self._device.synchronize()
        return devices.now(self._device)


def traceable(way: TrainSetup) -> bool:
    """Whether the step is one that this software traces. What a compiler keeps is known by arithmetic alone."""
    parts = not way.sharded or (way.method == "full" and way.zero_stage == 3 and not way.offload)
    return parts and not way.compiled


def check(ask: PlanRequest, target: Machine, option: Candidate) -> Candidate:
    """
    An option with its traced memory, if it can be traced, and its timed speed, if the target is this machine. What
    takes more than twice the memory by arithmetic is not traced: in the longest contexts a trace takes minutes.
    """
    if not traceable(option.way) or option.needs.peak > 2 * target.usable_bytes:
        return option
    what = traced_step(option, option.way.rows * option.way.devices < ask.rows_per_step)
    traced = trace(what)
    moment, kept = traced.at_peak
    kept["weights"] += option.what.reference_bytes(option.way)  # which takes part in no step that is traced
    peak = sum(kept.values())
    option = replace(option, peak_bytes=peak, fits=fits(option.what, option.way, target, peak), traced=(moment, kept))
    if target.flops_from != "measured" or option.pace is None or option.way.sharded:  # others are waited for there
        return option
    seconds = timed(what, _device(target))
    if seconds is None:
        return option
    parts = -(-ask.rows_per_step // (option.way.rows * option.way.devices))
    tokens = ask.rows_per_step * ask.what.model.context_length
    rate = tokens / (seconds.step(parts) * (slower(target.devices) if target.processor else 1.0))
    return replace(
        option, pace=replace(option.pace, tokens_per_second=rate, ceiling=max(rate, option.pace.ceiling), timed=True)
    )


def _device(target: Machine) -> Device:
    """The device that a target here stands for."""
    return devices.find("cpu" if target.processor else "auto")


def traced_step(option: Candidate, accumulates: bool) -> TracedStep:
    """The step of a configuration, for tracing and timing."""
    return TracedStep(
        model=option.what.model,
        vocab_size=option.what.vocab_size,
        optimizer=option.what.optimizer,
        activation_checkpointing=option.way.activation_checkpointing,
        precision=getattr(torch, option.way.precision),
        rows=option.way.rows,
        accumulates=accumulates,
        on_processor=option.what.processor,
        ranks=option.way.num_shards,
        weight_dtype=option.way.weight_dtype,
        residual_dtype=option.way.residual_dtype,
        float8=option.way.float8,
        lora=option.what.adapters(option.way),
        logits_chunk_bytes=option.what.logits_chunk_bytes,
    )
