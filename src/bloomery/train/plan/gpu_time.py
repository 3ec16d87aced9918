"""
Seconds of a training step on a GPU: from its shapes, a spec sheet and seven constants. No torch.

    matmuls     FLOPs / (MATMUL · peak) + bytes of both sides and the result / (MEMORY · bandwidth)
    attention   FLOPs / (ATTENTION · MATMUL · peak · S / (S + ATTENTION_TOKENS)), S: twice the mean number of keys
    the rest    bytes that other kernels move / (MEMORY · bandwidth)
    exchange    bytes between devices / (LINK · what a device sends in one direction), as far as nothing hides it
    step        the larger of these together and of kernels · LAUNCH_SECONDS, and the exchange
    offload     bytes between host and device / BUS, none of them hidden; the update's bytes / HOST_MEMORY

Adding a matmul's bytes to its FLOPs makes narrow matmuls slower than wide ones, as they are. A peak that was measured
with square matmuls already contains their bytes, which are taken out again.

Each byte is counted for a fused kernel that reads its inputs and writes its outputs once. `benchmarks/gpu_counts.py`
counts the same from the code, and `benchmarks/gpu_model.py` compares the whole with what others have published.

Not counted: documents that do not see each other (their attention is cheaper), evaluation, saving, other hosts.
"""

import math
from collections import Counter
from dataclasses import dataclass

from bloomery.model.config import GATED, ModelConfig
from bloomery.train.plan.memory import (
    BYTES,
    FROZEN_BYTES,
    MUON_BYTES,
    OPTIMIZER_BYTES,
    Machine,
    NumberType,
    TrainSetup,
    Workload,
    adapter_parameters,
    base_bytes,
    matrix_sides,
    trained_parameters,
)

MATMUL = 0.80
"""Of the peak, in a large matmul without its bytes. The best shapes reach 0.80 on an H100 (Bekman, mamf-finder)."""
MEMORY = 0.90
"""Of the bandwidth, as a large copy reaches."""
ATTENTION, ATTENTION_TOKENS = 0.375, 600
"""
Of the speed of matmuls, for long rows; and the length at which half of that is reached. On an H100 they give 185, 230
and 285 TFLOP/s at 1,024, 2,048 and 16,384 tokens. So does FlashAttention-2 with its backward pass (Dao 2023,
https://arxiv.org/abs/2307.08691, figure 7, read from the curves).
"""
LINK = 0.80
"""Of what the links send, as large sums of NCCL reach within a host."""
LAUNCH_SECONDS = 5e-6
"""Of the host for each kernel, of PyTorch with gradients."""

FLOAT8 = 2.0
"""How many times the FLOPs of matmuls in bfloat16 those in float8 reach, as spec sheets have it."""

SQUARE = 8192
"""Side of the matmuls that tell a measured peak: see `hw.device.SIZES`."""
KERNELS, KERNELS_ALONE = {True: 50, False: 120}, 130
"""Of a layer forward and backward, by whether blocks are compiled; and of the rest: see benchmarks/gpu_counts.py."""
EAGER = 2.1
"""How many times the bytes of fused kernels the plain ones move, with norms and rotation in one kernel each."""
LOGIT_BYTES = {True: 6, False: 14}
"""Of a logit in two bytes: in a kernel that reads it twice and writes its gradient, or in torch's operations."""
ORTHOGONAL_BYTES = 22
"""Of a number in a matrix that Muon orthogonalizes, in addition to its state."""
HOST_DEVICES, BUCKET_BYTES = 8, 2**25
BUS, HOST_MEMORY = 25e9, 40e9
"""
Assumed bytes per second where weights stay on the host. Copies from and to pinned memory: 80 % of a PCIe 4.0 bus of 16
lanes (31.5). The host's memory: 80 % of two channels of DDR4-3200 (51.2). Neither is measured.
"""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches, in FLOP/s and bytes per second."""

    matmul: float
    memory: float
    link: float | None


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on each device."""

    matmuls: float
    attention: float
    memory: float
    """Kernels that are neither."""
    update: float
    exchange: float
    """With other devices, as far as nothing is computed meanwhile."""
    host: float
    """In which the host asks for all kernels, while the device works on those before."""
    bus: float = 0.0
    """Copies between host and device, where weights stay on the host. One device's do not overlap with its work."""

    @property
    def seconds(self) -> float:
        return max(self.matmuls + self.attention + self.memory + self.update, self.host) + self.exchange + self.bus


@dataclass(frozen=True, kw_only=True)
class Program:
    """The code that computes a step, where it is not ours."""

    compiled: bool = True
    residual_bytes: int = 4
    """Of a number in the residual stream."""
    matmuls_again: float = 0.0
    """Share of the matmuls of blocks that are computed again in the backward pass."""


def rates(target: Machine, precision: NumberType) -> Rates:
    """Of a device whose peak in this format is known. Bytes take no time where its bandwidth is not."""
    peak, measured = target.peak(precision), target.flops_from == "measured"
    assert peak is not None
    memory = (target.bandwidth or math.inf) * (1.0 if measured else MEMORY)
    square = peak if measured else None if precision == "float32" else target.gemm
    matmul = MATMUL * peak
    if square is not None:
        number = 4 if precision == "float32" else 2
        matmul = 1 / max(1 / square - 3 * number / (2 * SQUARE * memory), 1 / (2 * square))
    return Rates(matmul=matmul, memory=memory, link=None if target.link is None else LINK * target.link)


def step_time(
    what: Workload, way: TrainSetup, at: Rates, rows_per_step: int, program: Program | None = None
) -> StepTime:
    """
    Of a step with so many rows on all devices together. Blocks of a sharded model run as they are, other ones compiled,
    unless a program is given.
    """
    program = program or Program(compiled=not way.sharded, residual_bytes=way.residual_bytes)
    model, b, devices = what.model, way.bytes_per_number, way.devices
    tokens = way.rows * model.context_length
    micro_batches = max(1, -(-rows_per_step // (way.rows * devices)))
    frozen, again = way.method != "full", way.activation_checkpointing
    table = what.vocab_size * model.hidden_size
    chunks = max(1, -(-tokens * 4 * what.vocab_size // what.logits_chunk_bytes))

    passes = 2 if frozen else 3
    in_blocks = passes + max(program.matmuls_again, float(again == "full"))
    weights = list(matrix_sides(model))
    head, blocks = (FLOAT8 if way.float8 in kinds else 1.0 for kinds in (("head", "all"), ("all",)))
    flops = 2.0 * tokens * (in_blocks / blocks * sum(k * n for k, n in weights) + passes / head * table)
    if frozen:
        flops += 6.0 * tokens * adapter_parameters(model, way.rank)
    sides = in_blocks * sum(tokens * (k + n) + k * n for k, n in weights)
    sides += passes * (tokens * (model.hidden_size + what.vocab_size) + chunks * table)
    converted, saved = _conversions(what, way, tokens, program.compiled)
    matmuls = flops / at.matmul + (b * sides - saved) / at.memory

    attention = sum(_attention_flops(model, number, again == "full") for number in range(model.num_layers))
    moved = tokens * _activation_bytes(model, b, program, again != "none")
    moved += tokens * what.vocab_size * LOGIT_BYTES[program.compiled] * b / 2 + converted
    if frozen:
        moved += passes * (2 + FROZEN_BYTES[way.method]) * what.parameters
    else:
        # Weights in float32 are rounded, and gradients added to float32; those in the format of matmuls are neither.
        first, further = ((4 + b) + (b + 4), (4 + b) + (b + 8)) if way.weight_bytes != b else (b, 4 * b)
        moved += (first + (micro_batches - 1) * further) / micro_batches * what.parameters
        moved += (chunks - 1) * (b + 8) * table + 16 * table  # the head's gradient, and the embedding's
    kernels = KERNELS[program.compiled] * model.num_layers + KERNELS_ALONE
    kernels = int(kernels * (4 / 3 if again == "full" else 1))

    micro = matmuls + tokens * attention / at.matmul + moved / at.memory
    exchange, copied = _exchange(what, way, at, micro_batches, micro)
    orthogonal, update = _update(what, way)
    return StepTime(
        matmuls=micro_batches * matmuls + orthogonal / at.matmul,
        attention=micro_batches * tokens * attention / at.matmul,
        memory=(micro_batches * moved + copied) / at.memory,
        update=host_update(what, way) if way.offload else update / at.memory,
        exchange=exchange,
        host=(micro_batches + 0.2) * kernels * LAUNCH_SECONDS,
        bus=bus_bytes(what, way, rows_per_step) / BUS if way.offload else 0.0,
    )


def _conversions(what: Workload, way: TrainSetup, tokens: int, compiled: bool) -> tuple[float, float]:
    """
    Bytes that kernels move to round sides of matmuls to 8 bits, and those that the matmuls then read less.

        input      read for its maximum, and read and rounded; read and written once more, transposed
        gradient   the same; that of logits has a known maximum, and the kernel of the loss rounds it if there is one
        weight     for both passes read for its maximum, and read and rounded; transposed once

    Blocks that are not compiled, and the head, also write x / s(x) in float32 and read it. The kernel of the loss takes
    no z-loss, which is not counted.
    """
    if way.float8 == "off":
        return 0.0, 0.0
    b, w, D, V = way.bytes_per_number, way.weight_bytes, what.model.hidden_size, what.vocab_size

    def rounded(number: int, fused: bool) -> int:
        """Bytes for a number of so many bytes, its maximum included."""
        return 2 * number + 1 if fused else 2 * number + 4 + 5

    of_logits = 2 - (b - 1) if compiled else b + 4 + 5 + 2
    converted = float(tokens * ((rounded(b, False) + 2) * D + of_logits * V) + (rounded(w, False) + 2) * V * D)
    saved = float((b - 1) * (2 * tokens * (D + V) + 2 * V * D))
    if way.float8 == "all":
        for k, n in matrix_sides(what.model):
            converted += tokens * (rounded(b, compiled) + 2) * (k + n) + (2 * rounded(w, compiled) + 2) * k * n
            saved += (b - 1) * (2 * tokens * (k + n) + 2 * k * n)
    return converted, saved


def _attention_flops(model: ModelConfig, number: int, again: bool) -> float:
    """Of a token in a layer, as FLOPs of matmuls that take as long."""
    kind, window, _ = model.layer(number)
    T = model.context_length
    W = T if window == "full" else min(window, T)
    seen = W - W * W / (2 * T)
    values = 2 if kind == "differential" else 1
    forward = 2.0 * model.num_heads * model.head_size * (1 + values) * seen
    return forward * (4.5 if again else 3.5) * (2 * seen + ATTENTION_TOKENS) / (2 * seen) / ATTENTION


def _activation_bytes(model: ModelConfig, b: int, program: Program, again: bool) -> float:
    """
    Of a token, that kernels between matmuls and attention read and write in all layers, where each reads its inputs and
    writes its outputs once:

        sum and norm   forward r + b in, r + b out; backward b + 2r in, r + b out, and two more gradients of one input
        positions      queries and keys in and out, in both passes
        feed-forward   act(gate) · up and its gradients, or act(up)
        biases         gradients of the results once more
    """
    r, D, M = program.residual_bytes, model.hidden_size, model.intermediate_size
    heads = (model.num_heads + model.num_kv_heads) * model.head_size
    norms = 4 if model.norm_order == "both" else 2
    total = 0.0
    for number in range(model.num_layers):
        gated = model.layer(number)[2] in GATED
        turned = 2 * b * heads if model.rotates(number) or model.qk_norm else 0
        forward = norms * (2 * r + 2 * b) * D + turned + (3 if gated else 2) * b * M
        backward = norms * (3 * r + 2 * b) * D + 3 * b * D + turned + (5 if gated else 3) * b * M
        backward += b * (heads + model.num_kv_heads * model.head_size + D) * model.biased("out")
        backward += b * (D + M) * model.biased("mlp")
        total += (2 if again else 1) * forward + backward
    return total * (1.0 if program.compiled else EAGER)


def _update(what: Workload, way: TrainSetup) -> tuple[float, float]:
    """FLOPs and bytes of an update on each device: the gradient is read for its norm too."""
    shards = way.num_shards
    if way.method != "full":
        return 0.0, 32.0 * adapter_parameters(what.model, way.rank) / shards
    in_blocks = sum(k * n for k, n in matrix_sides(what.model))
    matrices, tables, _ = OPTIMIZER_BYTES[what.optimizer.kind]
    moved = 4.0 * way.weight_bytes * what.parameters + 2 * (
        matrices * in_blocks + tables * (what.parameters - in_blocks)
    )
    if what.optimizer.kind != "muon":
        return 0.0, moved / shards
    computed = _matrix_share(what.model, 1 if way.offload else way.devices)  # all where parts are on the host
    flops = sum(5.0 * number * (4 * min(k, n) ** 2 * max(k, n) + 2 * min(k, n) ** 3) for number, k, n in computed)
    numbers = sum(number * k * n for number, k, n in _matrix_share(what.model, way.devices))
    return flops, moved / shards + ORTHOGONAL_BYTES * numbers


def _matrix_share(model: ModelConfig, devices: int) -> list[tuple[int, int, int]]:
    """How many matrices the busiest of these devices orthogonalizes, with their sides."""
    return [(-(-number // devices), k, n) for (k, n), number in Counter(matrix_sides(model)).items()]


def host_update(what: Workload, way: TrainSetup) -> float:
    """Seconds of an update by the CPU, of the parts of all devices of a host."""
    return _update(what, way)[1] * min(way.devices, HOST_DEVICES) / HOST_MEMORY


def bus_bytes(what: Workload, way: TrainSetup, rows_per_step: int) -> float:
    """
    Between the host and each device in a step. In each micro-batch, blocks come for both passes, the head for one, an
    embedding of its own for both if it is trained, and gradients go. Muon also moves matrices to the device and back.
    """
    trained, tied = trained_parameters(what, way), what.model.tie_embeddings
    table = BYTES * what.vocab_size * what.model.hidden_size
    blocks = base_bytes(what, way) + (0 if way.method == "full" else BYTES * trained) - (1 if tied else 2) * table
    tables = table * (1 if tied else 3 if way.method == "full" else 2)
    micro_batches = max(1, -(-rows_per_step // (way.rows * way.devices)))
    moved = micro_batches * (2 * blocks + tables + BYTES * trained) / way.num_shards
    if way.method == "full" and what.optimizer.kind == "muon":
        moved += 2 * MUON_BYTES[way.precision] * sum(k * n for k, n in matrix_sides(what.model))
    return moved


def _exchange(what: Workload, way: TrainSetup, at: Rates, micro_batches: int, micro: float) -> tuple[float, float]:
    """
    Seconds of a step that only the links work, and bytes that are copied for them. Sums begin within the last backward
    pass, and end with the gradient of the embedding. Parts are gathered and summed in each micro-batch.
    """
    if way.devices == 1 or at.link is None:
        return 0.0, 0.0
    others = (way.devices - 1) / way.devices
    directions = _direction_bytes(what, way) / at.link
    trained = what.parameters if way.method == "full" else adapter_parameters(what.model, way.rank)
    if way.sharded:
        gathered = FROZEN_BYTES.get(way.method, way.bytes_per_number)
        sent = others * (2 * min(gathered, way.bytes_per_number) * what.parameters + 4 * trained)
        first = others * way.bytes_per_number * what.vocab_size * what.model.hidden_size
        late = max(sent / at.link - micro, first / at.link)
        return micro_batches * late + directions, micro_batches * 16.0 * what.parameters
    last = min(4.0 * trained, max(BUCKET_BYTES, 4.0 * what.vocab_size * what.model.hidden_size))
    late = max(2 * others * 4.0 * trained / at.link - micro * 2 / 3, 2 * others * last / at.link)
    return late + directions, 16.0 * trained


def _direction_bytes(what: Workload, way: TrainSetup) -> float:
    """
    That a device receives in an update of Muon: parts of its share of the matrices, its part of their directions, and
    the same part of those from other copies. All matrices in float32 where parts are on the host.
    """
    if way.method != "full" or what.optimizer.kind != "muon":
        return 0.0
    shards, copies = way.num_shards, way.devices // way.num_shards
    if way.offload:
        return 4.0 * sum(k * n for k, n in matrix_sides(what.model)) * (shards - 1) / shards
    share = sum(number * k * n for number, k, n in _matrix_share(what.model, way.devices))
    return MUON_BYTES[way.precision] * share * (2 * (shards - 1) / shards + copies - 1)
