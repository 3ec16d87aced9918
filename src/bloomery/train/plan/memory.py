"""
Estimate what a run needs before it allocates anything: parameters, memory, work, disk.

Everything is arithmetic on the recipe and needs no torch. Per device, memory consists of:

    weights        4 bytes each, or 2 where weight_dtype = "bfloat16"; in a base that is frozen, the matrices of blocks
                   by `FROZEN_BYTES`; a reference model that stays in memory counts here too
    gradients      as many bytes as a weight that is trained
    optimizer      bytes a parameter that is trained, by `OPTIMIZER_BYTES`
    copies         2 bytes a weight that takes part in matmuls, unless precision = "float32", while a micro-batch is
                   computed; with recomputed blocks, only those of one block at a time
    activations    bytes per token and layer of what the backward pass reads again, by `activation_bytes_per_token`,
                   for a micro-batch
    logits         logits of one chunk of tokens, and what the loss computes from them
    update         what an optimizer needs in addition, while it works
    gathered       weights of the layers at work, if each device keeps a part of all weights

The peak is the larger of two moments: the last layer's gradient of a micro-batch, and the update.

Disk: a run writes checkpoints, models and shards, counted in bytes.

Target: the hardware that a run is planned for. It is a number of devices, what a program may use of their memory,
and how fast they are. Measurements of this machine are passed in.

All estimates are in one file because the peak sums the same terms that the target limits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from bloomery.core.errors import ConfigError, HardwareError
from bloomery.hw.specs import GIB, Entry
from bloomery.model.config import GATED, AttentionKind, Base, Float8, Lora, ModelConfig, cost
from bloomery.train.config import AdamW8bit, Level, Mesh, Optimizer, Training, trained_tokens

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


def rows_per_step(config: Training, context: int) -> int:
    """Rows of `context` tokens in a step of the whole global batch; at least one."""
    return trained_tokens(config.global_batch_tokens, context) // context


def rows_at_once(config: Training, context: int) -> int:
    """Rows of `context` tokens that go through the model together; at least one. `auto` is not decided here."""
    tokens = USUAL_TOKENS if config.micro_batch_tokens == "auto" else config.micro_batch_tokens
    return max(1, tokens // context)


BASE_WHOLE = "a frozen base lies whole on each device"
"""Why a model is not to be sharded."""


ASKED_WHOLE = "each rank asks the model for answers on its own, and would wait for the parts of the others"
ROUNDED_ON_DEVICE = "a host would draw a random number for each weight and step"
SAID_TWICE = "both say how ranks share the model"
SCALES_SCALED = "its scales have scales that reach over rows"
HEADS_APART = "with tp, each device has some of the heads, and a cache of keys has all"
SCALED_APART = "with tp, each device would have scales of its own"
SUMMED_TOGETHER = "with tp, devices add up parts of the stream in float32"
DROPS_OTHERS = "with tp, each device would drop others than one device does"
STAYS_TOGETHER = "stages 1 and 2 keep all weights on the device during a step"
COPIED_AGAIN = "for each token, all weights would come from the host"
ALL_ON_DEVICE = "its answers and its reference need the whole model on the device"


def check_shard(config: Training, ranks: int, *, adapters: bool = False) -> Mesh | None:
    """
    The mesh over which ranks hold parts of a model; None where each holds all of it. A process that offloads alone
    holds the only part. Raises ConfigError for a mesh of another number of ranks, and for what cannot be done with the
    parts of a model.
    """
    mesh, how, offloads = config.mesh, "a mesh", config.offload == "host"
    if mesh is None and config.parallelism == "fsdp":
        mesh, how = Mesh(dp_shard=ranks), 'parallelism="fsdp"'
    elif mesh is None and offloads and ranks == 1:
        mesh, how = Mesh(), 'offload="host"'
    elif mesh is None and offloads:
        what = f'offload="host" needs a sharded model, but each of {ranks:,} processes holds all of it'
        raise ConfigError(what, hint='Set parallelism="fsdp" or a mesh, or offload="none".')
    if mesh is not None and mesh.devices != ranks:
        sizes = " x ".join(f"{axis} {count}" for axis, count in mesh.sizes.items())
        what = f"the mesh {sizes} needs {mesh.devices:,} processes, but {ranks:,} train"
        raise ConfigError(
            what,
            where=f"{type(config).__name__.lower()}.mesh",
            hint=f"Set num_processes={mesh.devices}, or another mesh.",
        )
    if mesh is None or (ranks == 1 and not offloads):
        return None
    cuts, lora = mesh.tp > 1, getattr(config, "lora", None)
    for setting, why, hint in (
        ("" if config.may_shard or not offloads else "[prefer]", ALL_ON_DEVICE, 'Set prefer.offload="none".'),
        ('offload="host"' if offloads and mesh.zero_stage < 3 else "", STAYS_TOGETHER, "Set mesh.zero_stage=3."),
        (
            "sample_every" if offloads and config.sample_every else "",
            COPIED_AGAIN,
            'Set sample_every=0 or offload="none".',
        ),
        ("" if config.may_shard else "[prefer]", ASKED_WHOLE, 'Say prefer.parallelism="none", and no mesh.'),
        (
            'weight_dtype="bfloat16"' if offloads and config.weight_dtype == "bfloat16" else "",
            ROUNDED_ON_DEVICE,
            'Set weight_dtype="float32" or offload="none".',
        ),
        (
            "training of adapters (LoRA)" if adapters and config.mesh is None and ranks > 1 else "",
            BASE_WHOLE,
            f'Say mesh = {{ dp_shard = {ranks} }} and parallelism="none", or leave out lora.',
        ),
        (
            f'float8="{config.float8}"' if cuts and config.float8 != "off" else "",
            SCALED_APART,
            'Say float8="off", or mesh.tp=1.',
        ),
        (
            'residual_dtype="bfloat16"' if cuts and config.residual_dtype == "bfloat16" else "",
            SUMMED_TOGETHER,
            'Say residual_dtype="float32", or mesh.tp=1.',
        ),
        ('parallelism="fsdp"' if config.mesh and config.parallelism == "fsdp" else "", SAID_TWICE, "Leave out one."),
        ("sample_every" if cuts and config.sample_every else "", HEADS_APART, "Say sample_every=0, or mesh.tp=1."),
        (
            "hellaswag" if cuts and getattr(config, "hellaswag", None) else "",
            HEADS_APART,
            "Leave out hellaswag, or say mesh.tp=1.",
        ),
        (
            'lora.base_dtype="nf4_double"' if lora and lora.base_dtype == "nf4_double" else "",
            SCALES_SCALED,
            'Say lora.base_dtype="nf4".',
        ),
        ("lora.dropout" if cuts and lora and lora.dropout else "", DROPS_OTHERS, "Say lora.dropout=0, or mesh.tp=1."),
    ):
        if setting:
            raise ConfigError(f"{setting} does not work with {how}: {why}", hint=hint)
    return mesh


def may_offload(config: Training, devices: int, *, adapters: bool = False) -> bool:
    """Whether a run accepts that weights stay on the host, if several processes shard them."""
    several = config.mesh is None and devices > 1
    asked = config.model_copy(update={"offload": "host", **({"parallelism": "fsdp"} if several else {})})
    try:
        return check_shard(asked, devices, adapters=adapters) is not None
    except ConfigError:
        return False


def check_offload(offload: str, target: "Machine", stage: str) -> None:
    """Raises ConfigError where weights are to stay on a host that has no memory but that of its device."""
    if offload == "host" and not (target.offloads or target.processor):
        what = f'offload="host" frees nothing on {target.name}, which shares the memory of its host'
        raise ConfigError(what, where=f"{stage}.offload", hint='Set offload="none".')


def optimizer_bytes(config: Optimizer, model: ModelConfig, vocab_size: int) -> int:
    """All that the optimizer keeps. With 8 bits a number, each block of numbers also has two scales of four bytes."""
    facts = cost(model, vocab_size)
    matrices = facts.matmul_parameters - vocab_size * model.hidden_size
    tables = vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    counts = (matrices, tables, facts.parameters - matrices - tables)
    scales = 8 * (matrices + tables) // config.block if isinstance(config, AdamW8bit) else 0
    return sum(count * size for count, size in zip(counts, OPTIMIZER_BYTES[config.kind], strict=True)) + scales


def activation_bytes_per_token(
    model: ModelConfig,
    activation_checkpointing: Level = "none",
    width_bytes: int = 2,
    *,
    written_out: bool = True,
    devices: int = 1,
) -> int:
    """
    Bytes a token kept for the backward pass, where numbers in matmuls have `width_bytes`; in each layer

        none         x twice and x / |x| twice in float32, both norms' results, positions' angles, q, k, v, attention
                     weights and result, the feed-forward's inner numbers. x / |x| only where a gain is learned for it,
                     on a CPU always, and never by LayerNorm on a GPU
        selective    x in float32, the results of all matmuls with weights
        full         x in float32

    and once, while a layer is computed again, what it keeps more at `none`. Around the layers: three widths. Attention
    weights count where they may be `written_out`, which a GPU does not do. Each of so many `devices` has some of the
    tokens of the residual stream and its norms.
    """
    level = activation_checkpointing
    return sum(activation_parts(model, level, width_bytes, written_out=written_out, devices=devices))


def activation_parts(
    model: ModelConfig,
    activation_checkpointing: Level,
    width_bytes: int,
    *,
    written_out: bool,
    compiled: bool = False,
    devices: int = 1,
    residual_bytes: int = BYTES,
) -> tuple[int, int]:
    """
    Of `activation_bytes_per_token`: what all layers keep, and what is there once while a layer is computed again.

    A block that is `compiled` computes again what needs no matmul. It keeps x once, and no x / |x|. Instead of the
    second x it keeps the result of attention's last matmul. Of the feed-forward's inner numbers it keeps the results of
    matmuls and the input of the last. Torch's min-cut partitioner saves this of GPT-2, plasma and Llama blocks.

    A number of x has `residual_bytes`. Norms that are not compiled keep it in float32 whatever its format.
    """
    D, E, M, b = model.hidden_size, model.head_size, model.intermediate_size, width_bytes
    r = residual_bytes
    own = -(-D // devices)  # of the residual stream
    heads = (model.num_heads + 2 * model.num_kv_heads) * E
    whole, kept = 0, {"none": 0, "selective": 0, "full": 0}
    for number in range(model.num_layers):
        attention, _, mlp = model.layer(number)
        gates = 2 if mlp in GATED else 1
        inner = gates * 2 * b * M
        weights = b * model.num_heads * model.context_length if written_out else 4 * model.num_heads
        normed = 16 if written_out or (model.norm == "rmsnorm" and model.norm_affine) else 8
        special = 0 if written_out else _special_attention(model, attention, b)
        layer = (
            special + normed * own + 8 + 2 * b * D + 4 * b * E + b * heads + b * model.num_heads * E + weights + inner
        )
        if compiled:
            layer += (r + b - normed) * D - 4 * b * E - inner + (gates + 1) * b * M
        kept["none"] += layer
        kept["selective"] += r * own + b * heads + 2 * b * D + gates * b * M
        kept["full"] += r * own
        whole = max(whole, layer)
    # What is there once: a mask on a CPU, and on a GPU gradients of the layer at work.
    once = whole - kept[activation_checkpointing] // model.num_layers + 8 * E
    once += model.context_length if written_out else 8 * D
    again = 0 if activation_checkpointing == "none" else once
    ends = 8 if r == BYTES else 8 + r  # the last norm has x in both formats
    return kept[activation_checkpointing] + ends * own + b * D + 4, again


def _special_attention(model: ModelConfig, attention: AttentionKind, width_bytes: int) -> int:
    """
    Bytes a token and layer that a GPU keeps in addition: of norms of queries and keys, x and x / |x|; of differential
    attention, values and results of double width, what pairs come to, and the input of their norm.
    """
    H, K, E = model.num_heads, model.num_kv_heads, model.head_size
    normed = (8 if model.norm_affine else 4) * (H + K) * E if model.qk_norm else 0
    pairs = (width_bytes * (2 * H + K) + 4 * H) * E if attention == "differential" else 0
    return normed + pairs


Origin = Literal["measured", "catalogue", "unknown"]
NumberType = Literal["bfloat16", "float16", "float32"]

CONTEXT_BYTES = GIB
"""Of a GPU, which the driver, libraries and their kernels take before the first tensor."""
GAPS = 0.04
"""Share of a GPU that an allocator cannot hand out, as blocks of many sizes leave gaps."""
SYSTEM_SHARE, SYSTEM_BYTES = 0.1, 8 * GIB
"""What the rest of a machine is left, where a GPU takes its memory from it: the larger of the two, but at most half."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    name: str
    devices: int
    memory_bytes: int
    """Of one device."""
    usable_bytes: int
    """Of it, for weights and all that is computed of them."""
    flops: float | None
    """A second, in matmuls of the training format."""
    flops_from: Origin
    bandwidth: float | None
    """Bytes per second of its memory."""
    precision: NumberType
    """What `auto` comes to."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Those of other formats, where they are known too."""
    processor: bool = False
    """Whether it is one, and a run has other code, and no memory but the machine's."""
    shared: bool = False
    """Whether its memory is the host's too, as a CPU's is."""
    host_bytes: int | None = None
    """Memory of the host, which is the same where that is shared. None: nothing is known of the host."""
    lent_bytes: int | None = None
    """What Linux lends it of the host's memory unless told to lend more. None: all, or memory of its own."""
    gemm: float | None = None
    """FLOP/s of square matmuls in bfloat16, as others have measured them."""
    link: float | None = None
    """Bytes per second that it sends to the other devices of its host."""
    offloads: bool = False
    """Whether it has memory of its own, which the host's adds to."""
    float8: bool | None = None
    """Whether it multiplies numbers of 8 bits with a floating point. None: nothing tells."""

    def peak(self, precision: NumberType) -> float | None:
        """None where it is not known; none is borrowed from another format."""
        return self.flops if precision == self.precision else self.peaks.get(precision)


MEASURED_SHARE = 0.9
"""Of a CPU's measured peak, in the matmuls of a step: the measured ones are large and square."""


def of_entry(entry: Entry, devices: int = 1, memory_bytes: int | None = None) -> Machine:
    """
    A machine with `devices` of the entry's device, and with `memory_bytes` on each instead of the entry's memory.
    Raises HardwareError if the memory size is not known.
    """
    size = memory_bytes or entry.memory_bytes
    if size is None:
        raise HardwareError(f"the memory of {entry.key} is not known", hint="Set it too: --memory 32GiB.")
    precision: NumberType = "bfloat16" if entry.peak("bfloat16") else "float16" if entry.peak("float16") else "float32"
    if entry.key.startswith("apple-"):
        precision = "float32"  # as hw/device.py has it for mps
    peak = entry.peak(precision)
    return Machine(
        name=entry.key,
        devices=devices,
        memory_bytes=size,
        usable_bytes=usable(size, shared=entry.shared),
        flops=peak,
        flops_from="catalogue" if peak else "unknown",
        bandwidth=entry.bandwidth,
        precision=precision,
        peaks=entry.flops,
        shared=entry.shared,
        host_bytes=size if entry.shared else None,
        lent_bytes=size // 2 if entry.gtt else None,
        gemm=entry.gemm,
        link=entry.link,
        offloads=not entry.shared,
        float8=entry.float8,
    )


def of_memory(memory_bytes: int, devices: int = 1) -> Machine:
    """So many GPUs of which nothing is known but their memory."""
    return Machine(
        name=f"a device of {memory_bytes / GIB:.3g} GiB",
        devices=devices,
        memory_bytes=memory_bytes,
        usable_bytes=usable(memory_bytes),
        flops=None,
        flops_from="unknown",
        bandwidth=None,
        precision="bfloat16",
        offloads=True,
    )


def usable(memory_bytes: int, *, shared: bool = False) -> int:
    """Of the memory of a GPU; `shared` with the rest of the machine or its own."""
    if shared:
        return memory_bytes - min(max(SYSTEM_BYTES, int(SYSTEM_SHARE * memory_bytes)), memory_bytes // 2)
    return int((1 - GAPS) * memory_bytes) - CONTEXT_BYTES


Moment = Literal["loading", "micro-batch", "update"]
Method = Literal["full", "lora", "lora32", "int8", "nf4"]
"""All weights are trained, or low-rank additions to frozen ones: in bfloat16, in float32, in 8 bits, or in 4."""

BASES: dict[Base, Method] = {
    "float32": "lora32",
    "bfloat16": "lora",
    "int8": "int8",
    "nf4": "nf4",
    "nf4_double": "nf4",
}
"""How the weights below adapters are kept."""

FROZEN_BYTES = {"lora": 2.0, "lora32": 4.0, "int8": 1.0, "nf4": 0.5 + 2 / 64}
"""
Of a weight of a matrix of a block. NF4 is half a byte, and two bytes of scale for 64 of them (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314). Tables and vectors stay in float32.
"""
LOGITS_CHUNK_BYTES = 2**27
"""Of float32 logits on a CPU, as `train.loss.CHUNK_BYTES`."""
LARGEST_CHUNK_BYTES, CHUNK_SHARE, ROOMY_BYTES = 2**30, 1 / 24, 20 * 2**30
"""
The same on other devices with so much memory: at most so many, and of it at most this share, as a power of two. Each
chunk reads and writes the gradient of the head once, so larger chunks save traffic. Smaller devices need the memory.
"""


def logits_chunk_bytes(memory_bytes: int, *, processor: bool) -> int:
    """Bytes of float32 logits that exist at once on a device with this memory (0: unknown)."""
    if processor or memory_bytes < ROOMY_BYTES:
        return LOGITS_CHUNK_BYTES
    room = int(CHUNK_SHARE * memory_bytes)
    return min(LARGEST_CHUNK_BYTES, 1 << (room.bit_length() - 1))


UPDATE_NUMBERS, WIDE_UPDATE_NUMBERS, COPIES_AT_ONCE = 2**21, 2**25, 8
"""
As `train.optim.BATCH_NUMBERS` on a CPU, WIDE_BATCH_NUMBERS and COPIES_AT_ONCE on other devices; of float32 and
bfloat16, a handful of times.
"""


@dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """One way to train the same."""

    rows: int
    """That go through the model at once, on each device."""
    activation_checkpointing: Level = "none"
    precision: NumberType = "bfloat16"
    method: Method = "full"
    rank: int = Lora().rank
    """Of the low-rank additions."""
    sharded: bool = False
    """Whether each device keeps a part of weights, gradients and optimizer, and not all of them."""
    devices: int = 1
    shards: int = 0
    """Parts that a whole copy is in, if sharded. 0: as many as devices."""
    zero_stage: int = 3
    """What of these parts is together during a step: see `Mesh`."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights that are trained."""
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the residual stream."""
    float8: Float8 = "off"
    """Which matmuls multiply numbers of 8 bits. Memory is planned as for bfloat16, which needs about as much."""
    compiled: bool = False
    """Whether a GPU's blocks are compiled for sure, and not where a trial speaks for it."""
    offload: bool = False
    """Whether weights, gradients and optimizer stay on the host. It is sharded then, if only into one part."""

    @property
    def num_shards(self) -> int:
        return (self.shards or self.devices) if self.sharded else 1

    @property
    def weight_bytes(self) -> int:
        return 2 if self.weight_dtype == "bfloat16" else BYTES

    @property
    def residual_bytes(self) -> int:
        return 2 if self.residual_dtype == "bfloat16" else BYTES

    @property
    def bytes_per_number(self) -> int:
        """In matmuls."""
        return 4 if self.precision == "float32" else 2


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on each device."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    logits: int
    update: int
    gathered: int

    @property
    def resting(self) -> int:
        return self.weights + self.optimizer

    @property
    def peak(self) -> int:
        return sum(self.at_peak[1].values())

    @property
    def at_peak(self) -> tuple[Moment, dict[str, int]]:
        """When the most is there, and its parts."""
        parts = asdict(self)
        updating = {name: parts.pop(name) for name in ("update",)}
        learning = {name: parts.pop(name) for name in ("copies", "activations", "logits", "gathered")}
        if sum(learning.values()) >= sum(updating.values()):
            return "micro-batch", parts | learning
        return "update", parts | updating


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained: a shape with its vocabulary and optimizer, on rows of its context."""

    model: ModelConfig
    vocab_size: int
    optimizer: Optimizer
    processor: bool = False
    """Whether on one, where attention may keep its weights."""
    memory_bytes: int = 0
    """Of the device; 0 where that is unknown."""
    lora: Lora | None = None
    """What a recipe says of adapters, where it has some."""
    initialized: bool = False
    """Whether its weights are made, and not read."""
    reference: bool = False
    """Whether memory holds a copy of the initial model too. Adapters need no copy: the base below them is frozen."""

    @property
    def parameters(self) -> int:
        return cost(self.model, self.vocab_size).parameters

    @property
    def logits_chunk_bytes(self) -> int:
        return logits_chunk_bytes(self.memory_bytes, processor=self.processor)

    def adapters(self, way: TrainSetup) -> Lora | None:
        """The adapters of a configuration: as in the recipe, on a base in the configuration's format."""
        if way.method == "full":
            return None
        base = next(base for base, method in BASES.items() if method == way.method)
        if self.lora is None:
            return Lora(rank=way.rank, base_dtype=base)
        return (
            self.lora
            if BASES[self.lora.frozen_dtype] == way.method
            else self.lora.model_copy(update={"base_dtype": base})
        )

    def reference_bytes(self, way: "TrainSetup") -> int:
        """Of the copy, whose matrices are in the format of matmuls, unless a CPU computes."""
        if not self.reference or way.method != "full":
            return 0
        whole = way.weight_bytes * self.parameters
        if self.processor or way.bytes_per_number >= way.weight_bytes:
            return whole
        as_kept = self.model.tie_embeddings or self.model.normalize_head
        head = self.vocab_size * self.model.hidden_size if as_kept else 0
        matrices = cost(self.model, self.vocab_size).matmul_parameters - head
        return whole - (way.weight_bytes - way.bytes_per_number) * matrices


def remembered_bytes(what: Workload, way: TrainSetup) -> int:
    """All that the optimizer keeps."""
    if way.method == "full":
        return optimizer_bytes(what.optimizer, what.model, what.vocab_size)
    return 8 * adapter_parameters(what.model, way.rank)


def saved_state_bytes(what: Workload, way: TrainSetup) -> int:
    """What a checkpoint has of the optimizer: moments in 8 bits as float32 if ranks code their own parts."""
    if way.sharded and what.optimizer.kind == "adamw8bit":
        return 8 * trained_parameters(what, way)
    return remembered_bytes(what, way)


def needs(what: Workload, way: TrainSetup) -> MemoryEstimate:
    """Of a step with more than one micro-batch, after the first step."""
    facts = cost(what.model, what.vocab_size)
    num_shards = way.num_shards
    trained = trained_parameters(what, way)
    adapters = 0 if way.method == "full" else trained
    tokens = way.rows * what.model.context_length
    b = way.bytes_per_number
    head = what.vocab_size * what.model.hidden_size
    block = (facts.matmul_parameters - head) // what.model.num_layers
    whole = facts.matmul_parameters if way.activation_checkpointing == "none" else head + block
    compiled = way.compiled and way.method == "full" and not (way.sharded or what.processor)
    level = way.activation_checkpointing
    r, on_cpu = way.residual_bytes, what.processor
    kept, again = activation_parts(what.model, level, b, written_out=on_cpu, compiled=compiled, residual_bytes=r)
    logits = logits_bytes(what, way)
    if not what.processor:  # a layer is computed again when the logits are gone: the larger of the two counts
        again = max(0, again - logits // tokens)
    copied = whole if way.method == "full" else trained + head + largest_matrix(what.model)
    if way.sharded:  # weights are gathered in the format of matmuls, or as codes
        copied = largest_matrix(what.model) if way.method in ("int8", "nf4") else 0
    update = 5 * BYTES * min(UPDATE_NUMBERS, trained) // num_shards
    if what.optimizer.kind == "muon" and way.method == "full" and not what.processor:
        total = sum(k * n for k, n in matrix_sides(what.model))
        copies, number = way.devices // num_shards, MUON_BYTES[way.precision]
        update = shared_update_bytes(largest_matrix(what.model), total, way.devices, copies, number)
    estimate = MemoryEstimate(
        weights=(base_bytes(what, way) + BYTES * adapters) // num_shards + what.reference_bytes(way),
        gradients=way.weight_bytes * trained // num_shards,
        optimizer=remembered_bytes(what, way) // num_shards,
        copies=0 if b == way.weight_bytes else b * copied,
        activations=tokens * (kept + again),
        logits=logits,
        update=update + rounded_bytes(what, way) // num_shards,
        gathered=gathered_bytes(what, way) if way.sharded else 0,
    )
    if not way.offload or what.processor:
        return estimate
    on_device = way.method == "full" and what.optimizer.kind == "muon"  # the only optimizer that computes there
    update = 5 * BYTES * max(UPDATE_NUMBERS, largest_matrix(what.model)) if on_device else 0
    gathered = estimate.gathered + moving_bytes(what, way)
    return replace(estimate, weights=0, gradients=0, optimizer=0, update=update, gathered=gathered)


def moving_bytes(what: Workload, way: TrainSetup) -> int:
    """
    Of the largest unit, which comes from the host: its part as it is kept, and rounded. In training of all weights, its
    gradient goes there: in float32, whole and this device's part.
    """
    facts, shards = cost(what.model, what.vocab_size), way.num_shards
    table = what.vocab_size * what.model.hidden_size
    block = (facts.matmul_parameters - table) // what.model.num_layers
    kept = max(int(FROZEN_BYTES.get(way.method, 4.0) * block), BYTES * table)
    parts = (kept + way.bytes_per_number * max(block, table)) // shards
    return parts + (BYTES * max(block, table) * (shards + 1) // shards if way.method == "full" else 0)


def offloaded_bytes(what: Workload, way: TrainSetup) -> int:
    """
    Of the host for all its devices: weights and gradients, pinned, so that each part is rounded up to a power of two,
    and what the optimizer keeps.
    """
    trained = trained_parameters(what, way)
    adapters = 0 if way.method == "full" else trained
    kept = base_bytes(what, way) + BYTES * (adapters + trained)
    once = int(kept * pinned_share(what, way.num_shards)) + remembered_bytes(what, way)
    return -(-way.devices // way.num_shards) * once


MUON_BYTES = {"bfloat16": 2, "float16": 4, "float32": 4}
"""Of a number in Muon's matmuls, and in what ranks exchange for them: as `Precision.muon_dtype`."""


def shared_update_bytes(largest: int, total: int, devices: int, copies: int, number_bytes: int) -> int:
    """Of an update by Muon: a device's share of a batch, and its part of all results. Sizes are in numbers."""
    share = max(largest, min(WIDE_UPDATE_NUMBERS * COPIES_AT_ONCE // max(COPIES_AT_ONCE, copies), total // devices))
    return share * max(5 * BYTES, number_bytes * (copies + 3))


PROCESS_BYTES = 330 * 2**20
"""Of a process that has loaded torch and its libraries, before the first tensor; measured with torch 2.13 on a CPU."""
FILE_BYTES = 256 * 2**20
"""Of a save: as `weights.checkpoint.FILE_BYTES`, put together in memory."""
HOST_SHARE = 0.95
"""Of the memory of a host, that the processes of a run may use."""


def host_needs(what: Workload, way: TrainSetup, target: Machine, peak_bytes: int) -> dict[str, int]:
    """
    Bytes of the host's memory, by what takes them: processes, loading, training in the same memory, and saving.

    Weights are read tensor by tensor, so loading takes the model and its largest tensor, on each rank; of a sharded
    model, on the first rank alone. A save copies trained weights and optimizer. Loading ends before the first save, so
    the larger of the two counts.
    """
    weights = loaded_bytes(what, way)
    largest = BYTES * max(what.vocab_size * what.model.hidden_size, largest_matrix(what.model))
    loading = (1 if way.sharded else target.devices) * weights + target.devices * largest
    copies = way.weight_bytes * trained_parameters(what, way) + saved_state_bytes(what, way)
    saving = pinned(what, way, copies) + min(copies, FILE_BYTES)
    process = {"processes": target.devices * PROCESS_BYTES}
    if way.offload and not target.processor:
        return process | {"offloaded": max(offloaded_bytes(what, way), loading - saving), "saving": saving}
    if target.processor or target.shared:
        training = target.devices * peak_bytes + saving
        if training >= loading:
            return process | {"training": target.devices * peak_bytes, "saving": saving}
    return process | ({"loading": loading} if loading >= saving else {"saving": saving})


LARGE_HOST_BYTES = 2**41
"""Of memory, beyond which no plan expects a host to go whose memory is not known."""


def with_host(target: Machine) -> Machine:
    """A target whose host has to hold what its devices offload."""
    return replace(target, host_bytes=target.host_bytes or LARGE_HOST_BYTES)


def fits(what: Workload, way: TrainSetup, target: Machine, peak_bytes: int) -> bool:
    """Whether a device holds the peak, and the host what it has to hold."""
    host = target.host_bytes is None or in_host(what, way, target, peak_bytes)
    return peak_bytes <= target.usable_bytes and host


def in_host(what: Workload, way: TrainSetup, target: Machine, peak_bytes: int) -> bool:
    assert target.host_bytes is not None
    return sum(host_needs(what, way, target, peak_bytes).values()) <= HOST_SHARE * target.host_bytes


def loaded_bytes(what: Workload, way: TrainSetup) -> int:
    """Of a model while it is read, in its format; while it is initialized, in float32."""
    return BYTES * what.parameters if what.initialized else base_bytes(what, way)


def trained_parameters(what: Workload, way: TrainSetup) -> int:
    return what.parameters if way.method == "full" else adapter_parameters(what.model, way.rank)


def largest_matrix(model: ModelConfig) -> int:
    """Its number of weights: frozen weights are written out for each matmul, one matrix at a time."""
    return max(k * n for k, n in matrix_sides(model))


def adapter_parameters(model: ModelConfig, rank: int) -> int:
    """Parameters of the two matrices of this rank that each matrix of the blocks gets."""
    return rank * sum(k + n for k, n in matrix_sides(model))


def matrix_sides(model: ModelConfig) -> Iterator[tuple[int, int]]:
    """Inputs and outputs of each matrix of the blocks."""
    D, M = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    for number in range(model.num_layers):
        yield from ((D, queries), (D, keys), (D, keys), (queries, D), (D, M), (M, D))
        if model.layer(number)[2] in GATED:
            yield D, M


def pinned(what: Workload, way: TrainSetup, num_bytes: int) -> int:
    """
    Bytes of host memory for copies of trained weights and of what the optimizer keeps. PyTorch rounds the memory of
    each copy that a GPU writes up to a power of two. The rounding of matrices and tables counts.
    """
    if what.processor or way.method != "full" or way.sharded:
        return num_bytes
    return int(num_bytes * pinned_share(what))


def pinned_share(what: Workload, shards: int = 1) -> float:
    """How many times its bytes a part of a matrix or table takes in pinned memory, on average."""
    sizes = [-(-k * n // shards) for k, n in matrix_sides(what.model)]
    sizes.append(-(-what.vocab_size * what.model.hidden_size // shards))
    return sum(map(pinned_bytes, sizes)) / sum(sizes)


def pinned_bytes(num_bytes: int) -> int:
    """As PyTorch rounds pinned memory: up to a power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()


def rounded_bytes(what: Workload, way: TrainSetup) -> int:
    """Of the largest weight and its gradient in float32, while an update of bfloat16 is computed."""
    table = what.vocab_size * what.model.hidden_size
    return 0 if way.weight_bytes == BYTES else 2 * BYTES * max(table, largest_matrix(what.model))


def base_bytes(what: Workload, way: TrainSetup) -> int:
    """Of the weights that were there before the additions."""
    facts, method = cost(what.model, what.vocab_size), way.method
    if method == "full":
        return way.weight_bytes * facts.parameters
    blocks = facts.matmul_parameters - what.vocab_size * what.model.hidden_size
    return int(BYTES * (facts.parameters - blocks) + FROZEN_BYTES[method] * blocks)


def logits_bytes(what: Workload, way: TrainSetup) -> int:
    """
    Logits in the format of matmuls, and in float32 once on a CPU and twice on a GPU; the gradient of the head in both.
    """
    tokens = min(way.rows * what.model.context_length, max(1, what.logits_chunk_bytes // (BYTES * what.vocab_size)))
    b, table = way.bytes_per_number, what.vocab_size * what.model.hidden_size
    scores = tokens * what.vocab_size * (b if what.processor else b + 2 * BYTES)
    if way.method != "full":
        return scores
    return scores + table * ((way.weight_bytes if what.processor else BYTES) + b)


def gathered_bytes(what: Workload, way: TrainSetup) -> int:
    """
    The block at work, the next block in transfer, and the tables; with their gradients where they are trained. All
    blocks, and in stage 1 all gradients, where these stay together during a step.
    """
    facts, model = cost(what.model, what.vocab_size), what.model
    tables = what.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    block = (facts.parameters - tables) // model.num_layers
    if way.zero_stage < 3:
        blocks = int(FROZEN_BYTES.get(way.method, float(way.bytes_per_number)) * (facts.parameters - tables))
        return blocks + 2 * tables + BYTES * (trained_parameters(what, way) if way.zero_stage == 1 else 2 * block)
    kept = int(2 * FROZEN_BYTES.get(way.method, 2.0) * block + 2 * tables)
    if way.method != "full" or not what.processor:  # gradients of a table are counted with its logits
        return kept
    return kept + BYTES * (block + tables // (1 if model.tie_embeddings else 2))


TOKEN_BYTES = {True: 2, False: 4}
"""Of a token ID in a shard, by whether all token IDs are below 2¹⁶."""


def training_bytes(config: Training, what: Workload, way: TrainSetup) -> int:
    """Of a stage that trains: checkpoints that stay, one to go back to, one that is being written, and the model."""
    model = way.weight_bytes * trained_parameters(what, way)
    checkpoint = model + saved_state_bytes(what, way)
    kept = 0 if config.keep_every is None else config.steps // config.keep_every
    return (config.keep_last + 2 + kept + config.keeps_best) * checkpoint + (
        model if way.method == "full" else BYTES * what.parameters
    )


def shard_bytes(tokens: int, vocab_size: int) -> int:
    """Of so many tokens in token files."""
    return tokens * TOKEN_BYTES[vocab_size <= 2**16]
