"""
Plan a run over a mesh without any device: placement and bytes of every tensor, memory, communication and speed.

The model is built on the meta device, so that its tensors have shapes and no numbers. RULES of
train/sharding_rules.py say where each tensor lies. Everything after that is arithmetic:

    resident     weights, adapters, gradients and optimizer numbers of this device's parts
    gathered     the unit at work and the next one in transfer, in the format of matmuls; codes stay codes. Trained
                 weights have their whole gradient in float32 too
    copies       the largest matrix written out of its int8 or NF4 codes, by plain tensor operations; where nothing
                 is gathered, float32 weights rounded for matmuls
    activations  as in train/plan/memory.py. Each device of tp has its heads, its part of the inner width, and its
                 tokens of the residual stream and its norms. Matmuls keep the inputs of all tokens
    logits       one chunk of the loss, cut by tp

Communication counts the bytes that a device receives in a step, by ring algorithms: (n − 1) / n of a gathered or
reduced tensor, twice that for an all-reduce. Units are gathered in the forward and again in the backward pass of each
micro-batch. With tp, each block gathers its inputs and scatters the sums of its outputs twice in a forward pass, and
the gradients of both in a backward pass. The collectives of training on CPUs are those of this plan, by test. Those of
Muon's update are the ones of GPUs.

Speed: the FLOP/s of the spec sheet times LORA_MFU. A token costs 4 FLOP for each weight in a matmul with LoRA, and 6 in
full training; looking up an embedding costs none. If the links need longer at the rate of the spec sheet, they decide.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bloomery.core.errors import ConfigError
from bloomery.core.log import counted
from bloomery.core.pipeline import resolve
from bloomery.hw.specs import GIB, HOST_LINK, LORA_MFU
from bloomery.model.config import PRESETS, Lora, ModelConfig, cost, matrices, targets
from bloomery.train.config import AdamW8bit, Finetune, Level, Mesh, Optimizer
from bloomery.train.plan import memory
from bloomery.train.plan.gpu_time import BUS, HOST_MEMORY
from bloomery.train.plan.memory import (
    BYTES,
    FILE_BYTES,
    HOST_SHARE,
    LOGITS_CHUNK_BYTES,
    OPTIMIZER_BYTES,
    PROCESS_BYTES,
    UPDATE_NUMBERS,
    USUAL_TOKENS,
    Machine,
    MemoryEstimate,
    NumberType,
    activation_bytes_per_token,
    check_offload,
    pinned_bytes,
    shared_update_bytes,
    with_host,
)
from bloomery.train.sharding_rules import (
    ShardingKind,
    check_mesh,
    frozen_tensors,
    local_shape,
    placement,
    rule_of,
    stays_float32,
)

MATMUL_BYTES = 2
"""Of a number in matmuls: bfloat16."""
UNPACKED_BYTES = {"float32": 2, "bfloat16": 0, "int8": 6, "nf4": 10, "nf4_double": 10}
"""Of a number of a frozen matrix, while it is written out: float32 first, then bfloat16."""
DORA_BYTES = 12
"""More of it with DoRA, which adds B A in float32 and takes the length of each row."""
HOST_DEVICES = 8
"""Of one host, at most."""


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A tensor of the model and the part of it that a device holds."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    unit: str
    kind: ShardingKind
    tp: int | None
    """Dim that tp cuts."""
    dp_shard: int | None
    """Dim that dp_shard cuts."""
    number_bytes: int
    trained: bool
    optimizer_bytes: float
    """For each number; of 8-bit moments with their part of a scale."""
    is_code: bool
    """Whether it is of codes and their scales."""
    as_it_is: bool
    """Whether it is gathered as it is kept: norms, and all of a block with codes."""

    @property
    def numbers(self) -> int:
        return _product(self.shape)

    @property
    def local_numbers(self) -> int:
        return _product(self.local_shape)

    @property
    def local_bytes(self) -> int:
        return self.local_numbers * self.number_bytes

    @property
    def local_optimizer_bytes(self) -> int:
        return round(self.optimizer_bytes * self.local_numbers)

    def gathered_numbers(self, mesh: Mesh) -> int:
        """Of the part that a device of tp computes with."""
        return self.local_numbers * (mesh.dp_shard if self.dp_shard is not None else 1)

    def gathered_bytes(self, mesh: Mesh, matmul_bytes: int) -> int:
        width = self.number_bytes if self.as_it_is else min(self.number_bytes, matmul_bytes)
        return self.gathered_numbers(mesh) * width


@dataclass(frozen=True, kw_only=True)
class ShardingRequest:
    """What is trained on which mesh."""

    model: ModelConfig
    """Its context is the length of the packed sequences."""
    vocab_size: int
    mesh: Mesh
    optimizer: Optimizer
    rows_per_step: int
    """Of the whole global batch."""
    lora: Lora | None = None
    """None: all weights are trained."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights that are trained in full, but for norms and learned positions."""
    activation_checkpointing: Level = "full"
    rows: int = 0
    """At once on each device. 0: as many as fit."""
    matmul_bytes: int = MATMUL_BYTES
    muon_bytes: int = MATMUL_BYTES
    """Of a number that devices send each other: 4 where matmuls are in float32."""
    offload: Literal["none", "auto", "host"] = "none"
    """Whether parts, gradients and optimizer stay on the host; `auto`: where nothing else fits."""
    can_offload: bool = True
    """Whether a run would accept that."""
    num_processes: int = 1
    """That a run starts by itself."""

    @property
    def precision(self) -> NumberType:
        """Of matmuls."""
        return "float32" if self.matmul_bytes == BYTES else "bfloat16"

    @property
    def rows_per_device(self) -> int:
        """Of a step, on each device of dp_replicate and dp_shard."""
        return -(-self.rows_per_step // (self.mesh.dp_replicate * self.mesh.dp_shard))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a device receives in a step."""

    collective: str
    axis: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    ask: ShardingRequest
    target: Machine
    link: float | None
    """Bytes per second of a device."""
    tensors: Sequence[ShardedTensor]
    rows: int
    memory: MemoryEstimate
    host: dict[str, int]
    """Bytes of a host, by what takes them."""
    traffic: Sequence[Traffic]
    needed: int | None = None
    """The smallest dp_shard that fits, where this one does not."""

    @property
    def fits(self) -> bool:
        there = self.target.host_bytes
        host = there is None or sum(self.host.values()) <= HOST_SHARE * there
        return host and self.memory.peak <= self.target.usable_bytes

    @property
    def micro_batches(self) -> int:
        return -(-self.ask.rows_per_device // self.rows)

    @property
    def step_tokens(self) -> int:
        return self.ask.rows_per_step * self.ask.model.context_length

    @property
    def flops_per_token(self) -> float:
        return (6.0 if self.ask.lora is None else 4.0) * cost(self.ask.model, self.ask.vocab_size).matmul_parameters

    @property
    def compute_seconds(self) -> float | None:
        """Of a step, at LORA_MFU of the spec sheet; waiting for the longest device included."""
        if (peak := self.target.peak(self.ask.precision)) is None:
            return None
        tokens = self.micro_batches * self.rows * self.ask.model.context_length  # of each dp_shard part
        return tokens * self.flops_per_token / self.ask.mesh.tp / (LORA_MFU * peak)

    @property
    def link_seconds(self) -> float | None:
        """Of a step, where all that a device receives comes at the rate of its links, or of what joins hosts."""
        if self.link is None:
            return None
        seconds = 0.0
        for traffic in self.traffic:
            joined = min(self.link, HOST_LINK) if self._spans_hosts(traffic.axis) else self.link
            seconds += traffic.num_bytes / joined
        return seconds

    def _spans_hosts(self, axis: str) -> bool:
        """Whether devices that exchange over an axis are on several hosts: tp is the innermost axis."""
        mesh = self.ask.mesh
        extents = {"tp": mesh.tp, "dp_shard": mesh.tp * mesh.dp_shard, "dp_replicate": mesh.devices}
        return extents[axis] > HOST_DEVICES

    @property
    def offloads(self) -> bool:
        return self.ask.offload == "host"

    @property
    def bus_bytes(self) -> int:
        """What a device and its host copy in a step: weights for both passes of each micro-batch, and gradients."""
        if not self.offloads:
            return 0
        weights = sum(_passes(self.ask, tensor.unit) * tensor.local_bytes for tensor in self.tensors)
        gradients = BYTES * sum(tensor.local_numbers for tensor in self.tensors if tensor.trained)
        moved = self.micro_batches * (weights + gradients)
        if self.ask.optimizer.kind == "muon" and self.ask.lora is None:  # whole matrices come, and directions go
            sides = (tensor for tensor in self.tensors if tensor.optimizer_bytes == OPTIMIZER_BYTES["muon"][0])
            moved += 2 * self.ask.muon_bytes * sum(tensor.numbers for tensor in sides)
        return moved

    @property
    def host_seconds(self) -> float:
        """Of a step, for the bus and for the update on the host, where parts stay there. Nothing overlaps with them."""
        if not self.offloads:
            return 0.0
        trained = ((tensor.local_numbers, tensor.optimizer_bytes) for tensor in self.tensors if tensor.trained)
        update = sum(numbers * (16 + 2 * size) for numbers, size in trained)  # as gpu_time.py counts an update
        return self.bus_bytes / BUS + min(HOST_DEVICES, self.ask.mesh.devices) * update / HOST_MEMORY

    @property
    def tokens_per_second(self) -> float | None:
        if self.compute_seconds is None:
            return None
        return self.step_tokens / (max(self.compute_seconds, self.link_seconds or 0.0) + self.host_seconds)

    def facts(self) -> dict[str, Any]:
        """As JSON data."""
        ask, mesh = self.ask, self.ask.mesh
        moment, parts = self.memory.at_peak
        return {
            "preset": mesh.preset,
            "parameters": cost(ask.model, ask.vocab_size).parameters,
            "trained_parameters": sum(tensor.numbers for tensor in self.tensors if tensor.trained),
            "mesh": {**mesh.sizes, "zero_stage": mesh.zero_stage},
            "method": "full" if ask.lora is None else "dora" if ask.lora.dora else "lora",
            "base_dtype": "float32" if ask.lora is None else ask.lora.frozen_dtype,
            "device": self.target.name,
            "devices": mesh.devices,
            "row_tokens": ask.model.context_length,
            "rows": self.rows,
            "micro_batches": self.micro_batches,
            "step_tokens": self.step_tokens,
            "peak_bytes": self.memory.peak,
            "usable_bytes": self.target.usable_bytes,
            "at_peak": {"moment": moment, **{f"{name}_bytes": size for name, size in parts.items()}},
            "host_devices": min(HOST_DEVICES, mesh.devices),
            "host_bytes": sum(self.host.values()),
            "at_host": {f"{name}_bytes": size for name, size in self.host.items()},
            "traffic": [asdict(traffic) for traffic in self.traffic],
            "compute_seconds": _rounded(self.compute_seconds),
            "link_seconds": _rounded(self.link_seconds),
            "offload": "host" if self.offloads else "none",
            "bus_bytes": self.bus_bytes,
            "host_seconds": _rounded(self.host_seconds),
            "tokens_per_second": _rounded(self.tokens_per_second),
            "assumptions": self.assumptions(),
            "fits": self.fits,
            "dp_shard_that_fits": self.needed,
            "units": [
                {
                    "unit": names[0],
                    "units": len(names),
                    "bytes": sum(tensor.local_bytes for tensor in parts),
                    "tensors": [asdict(tensor) | {"local_bytes": tensor.local_bytes} for tensor in parts],
                }
                for names, parts in self.units()
            ],
        }

    def units(self) -> list[tuple[list[str], list[ShardedTensor]]]:
        """Units with their tensors. Blocks that are alike stand together, with the tensors of the first."""
        alike: dict[Any, tuple[list[str], list[ShardedTensor]]] = {}
        for unit, parts in _units(self.tensors).items():
            key = tuple(replace(tensor, name=tensor.name.removeprefix(unit), unit="") for tensor in parts)
            alike.setdefault(key, ([], parts))[0].append(unit)
        return list(alike.values())

    def assumptions(self) -> list[str]:
        """What the speed and the memory of a host rest on."""
        peak, flop = self.target.peak(self.ask.precision), 4 if self.ask.lora is not None else 6
        lines = []
        if peak is not None:
            share = f"{LORA_MFU:.1%} of the {peak / 1e12:,.0f} TFLOP/s of the spec sheet"
            lines.append(f"Matmuls reach {share}, as published for LoRA of 70B.")
            lines.append(f"A token takes {flop} FLOP for each weight in a matmul.")
        if self.link is not None:
            lines.append(f"Each device receives {self.link / 1e9:,.0f} GB/s, by the spec sheet, while it computes.")
        if self.offloads:
            rates = f"{BUS / 1e9:.0f} GB/s for the bus, and {HOST_MEMORY / 1e9:.0f} GB/s for the host's memory"
            lines.append(f"The plan assumes {rates}. No copy overlaps with matmuls.")
        if any(self._spans_hosts(traffic.axis) for traffic in self.traffic):
            lines.append(
                f"A host has {HOST_DEVICES} devices. From other hosts, each receives {HOST_LINK / 1e9:.0f} GB/s."
            )
        return lines

    def lines(self) -> list[str]:
        """As text; the caller wraps it."""
        ask, mesh, facts = self.ask, self.ask.mesh, cost(self.ask.model, self.ask.vocab_size)
        moment, parts = self.memory.at_peak
        usable = self.target.usable_bytes / GIB
        text = [
            f"finetune: {mesh.preset}, {facts.parameters / 1e9:,.1f} billion parameters, {self._method()}",
            f"mesh: dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x tp {mesh.tp} = "
            f"{counted(mesh.devices, 'device')} of {self.target.name}"
            f"{'' if mesh.zero_stage == 3 else f', ZeRO stage {mesh.zero_stage}'}"
            f"{', offloaded to the host' if self.offloads else ''}",
            f"step: {counted(ask.rows_per_step, 'sequence')} of {ask.model.context_length:,} tokens, {self.rows} at "
            f"once on each device, {counted(self.micro_batches, 'micro-batch', 'micro-batches')}",
            "",
            f"memory of a device: {self.memory.peak / GIB:,.1f} GiB at the peak ({moment}), {usable:,.1f} GiB usable",
            *(f"  {PARTS[name]:<30}{size / GIB:>9,.2f} GiB" for name, size in parts.items() if size),
            f"memory of a host: {sum(self.host.values()) / GIB:,.1f} GiB for "
            f"{counted(min(HOST_DEVICES, mesh.devices), 'device')}",
            *(f"  {HOST_PARTS[name]:<30}{size / GIB:>9,.2f} GiB" for name, size in self.host.items()),
        ]
        if self.traffic:
            text += ["", "received by a device in a step:"]
            for traffic in self.traffic:
                text.append(f"  {f'{traffic.collective} over {traffic.axis}':<30}{traffic.num_bytes / 1e9:>9,.2f} GB")
        if self.tokens_per_second is not None:
            assert self.compute_seconds is not None
            links = "" if self.link_seconds is None else f", {self.link_seconds:,.1f} s of transfers"
            host = f"; the host adds {self.host_seconds:,.1f} s" if self.offloads else ""
            text += [
                "",
                f"speed: about {self.tokens_per_second:,.0f} tokens/s; a step takes {self.compute_seconds:,.1f} s of "
                f"matmuls{links}, and the longer decides{host}",
            ]
        return [*text, *(f"  {line}" for line in self.assumptions())]

    def _method(self) -> str:
        lora = self.ask.lora
        if lora is None:
            return f"all trained by {self.ask.optimizer.kind}"
        return f"{'DoRA' if lora.dora else 'LoRA'} of rank {lora.rank} on a base in {lora.frozen_dtype}"


PARTS = {
    "weights": "weights and adapters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "copies": "copies of weights",
    "activations": "activations",
    "logits": "logits of a chunk",
    "update": "update",
    "gathered": "gathered units",
}
HOST_PARTS = {
    "processes": "processes",
    "offloaded": "parts, gradients, optimizer",
    "loading": "parts while loading",
    "saving": "copies of a save",
}


def asked(config: Finetune, sequence_length: int) -> ShardingRequest:
    """
    What a section asks for, on packed sequences of so many tokens with the last target. Raises ConfigError for
    sequences that are longer than the context of the shape, and for weights in bfloat16 that are trained.
    """
    assert config.mesh is not None
    assert config.mesh.preset is not None
    preset, context = config.mesh.preset, sequence_length - 1
    model = ModelConfig(preset=preset)
    if context > model.context_length:
        what = f"instruct.sequence_length={sequence_length:,} is more than the context of {preset}"
        raise ConfigError(what, where="finetune.mesh", hint=f"Set at most {model.context_length + 1}.")
    memory.check_shard(config, config.mesh.devices, adapters=config.lora is not None)
    level, rows_per_step = config.activation_checkpointing, memory.rows_per_step(config, context)
    ask = ShardingRequest(
        model=model.model_copy(update={"context_length": context}),
        vocab_size=PRESETS[preset].vocab_size,
        mesh=config.mesh,
        optimizer=config.optimizer,
        rows_per_step=rows_per_step,
        lora=config.lora,
        weight_dtype=config.weight_dtype,
        activation_checkpointing="full" if level == "auto" else level,
        offload=config.offload,
        matmul_bytes=BYTES if config.precision == "float32" else MATMUL_BYTES,
        muon_bytes=MATMUL_BYTES if config.compute_dtype in ("auto", "bfloat16") else BYTES,
        num_processes=config.num_processes,
        can_offload=memory.may_offload(config, config.mesh.devices, adapters=config.lora is not None),
    )
    if config.micro_batch_tokens == "auto":
        return ask
    return replace(ask, rows=min(memory.rows_at_once(config, context), ask.rows_per_device))


def fix(plan: ShardingPlan) -> list[str]:
    """Settings with which a plan fits that does not; none where none were found. First those that train all weights."""
    if plan.ask.lora is None and plan.ask.precision == "bfloat16" and plan.ask.offload != "host":
        halved, settings = replace(plan.ask, weight_dtype="bfloat16"), ["finetune.weight_dtype=bfloat16"]
        if _planned(halved, plan.target, plan.link).fits:
            return settings
        if _planned(replace(halved, optimizer=AdamW8bit()), plan.target, plan.link).fits:
            return [*settings, 'finetune.optimizer={kind="adamw8bit"}']
    lora = Lora() if plan.ask.lora is None else plan.ask.lora
    if lora.frozen_dtype != "nf4":
        ask = replace(plan.ask, lora=lora.model_copy(update={"base_dtype": "nf4"}))
        if _planned(ask, plan.target, plan.link).fits:
            return ["finetune.lora.base_dtype=nf4"]
    if plan.needed:
        devices = plan.needed * plan.ask.mesh.devices // plan.ask.mesh.dp_shard
        processes = [] if plan.ask.num_processes == devices else [f"finetune.num_processes={devices}"]
        return [f"finetune.mesh.dp_shard={plan.needed}", *processes]
    can = plan.target.offloads and plan.ask.can_offload
    ask = replace(plan.ask, offload="host")
    return ["finetune.offload=host"] if can and _planned(ask, with_host(plan.target), plan.link).fits else []


def sharded(ask: ShardingRequest, target: Machine, link: float | None = None) -> ShardingPlan:
    """
    The plan of a mesh. Raises ConfigError for a shape that the mesh cannot cut, by name.
    """
    check_offload(ask.offload, target, "finetune")
    plan = _planned(ask, target, link)
    if plan.fits:
        return plan
    if ask.offload == "auto" and target.offloads and ask.can_offload:
        offloaded = _planned(replace(ask, offload="host"), target, link)
        if offloaded.fits:
            return offloaded
    return replace(plan, needed=_dp_shard_that_fits(ask, target))


def _planned(ask: ShardingRequest, target: Machine, link: float | None) -> ShardingPlan:
    tensors = list(sharded_tensors(ask))
    rows = ask.rows or _rows_that_fit(ask, tensors, target)
    return ShardingPlan(
        ask=ask,
        target=target,
        link=link,
        tensors=tensors,
        rows=rows,
        memory=device_memory(ask, tensors, rows),
        host=_host_memory(ask, tensors),
        traffic=step_traffic(ask, tensors, rows),
    )


def sharded_tensors(ask: ShardingRequest) -> Iterator[ShardedTensor]:
    """All tensors of the model, with those of adapters and codes, in the order of the model."""
    check_mesh(ask.model, ask.mesh, None if ask.lora is None else ask.lora.frozen_dtype)
    model, lora = resolve("bloomery.model.transformer:on_meta")(ask.model, ask.vocab_size), ask.lora
    adapted = set() if lora is None else set(targets(list(matrices(ask.model)), lora.target_modules))
    for name, weight in model.named_parameters():
        shape = tuple(weight.shape)
        module = name.rpartition(".")[0]
        if lora is None:
            yield _tensor(ask, name, shape, trained=True)
            continue
        inner = name.replace(module, f"{module}.base", 1) if module in adapted else name
        if not rule_of(name).quantized:
            yield _tensor(ask, inner, shape)
            continue
        for frozen, sizes, number_bytes, block in frozen_tensors(inner, shape, lora.frozen_dtype):
            is_code = lora.frozen_dtype not in ("float32", "bfloat16")
            yield _tensor(ask, frozen, sizes, number_bytes=number_bytes, block=block, is_code=is_code)
        if module in adapted:
            yield _tensor(ask, f"{module}.lora_a", (lora.rank, shape[1]), trained=True)
            yield _tensor(ask, f"{module}.lora_b", (shape[0], lora.rank), trained=True)
            if lora.dora:
                yield _tensor(ask, f"{module}.magnitude", shape[:1], trained=True)


def _tensor(
    ask: ShardingRequest,
    name: str,
    shape: tuple[int, ...],
    *,
    trained: bool = False,
    number_bytes: int | None = None,
    block: int = 1,
    is_code: bool = False,
) -> ShardedTensor:
    mesh, where = ask.mesh, placement(name, shape, ask.mesh)
    if number_bytes is None:
        number_bytes = 2 if ask.weight_dtype == "bfloat16" and not stays_float32(name) else BYTES
    has_codes = ask.lora is not None and ask.lora.frozen_dtype not in ("float32", "bfloat16")
    sort = 0 if where.kind in ("column", "row") and len(shape) == 2 else 1 if len(shape) == 2 else 2
    # adapters learn by Adam's two moments, which are those of a vector
    coded = ask.optimizer if isinstance(ask.optimizer, AdamW8bit) else None
    kept: float = 8 if ask.lora is not None and coded is None else OPTIMIZER_BYTES[ask.optimizer.kind][sort]
    kept += 8 / coded.block if coded is not None and sort < 2 else 0
    return ShardedTensor(
        name=name,
        shape=shape,
        local_shape=local_shape(name, shape, mesh, block),
        unit=where.unit,
        kind=where.kind,
        tp=where.tp if mesh.tp > 1 else None,
        dp_shard=where.dp_shard if mesh.dp_shard > 1 else None,
        number_bytes=number_bytes,
        trained=trained,
        optimizer_bytes=kept if trained else 0,
        is_code=is_code,
        as_it_is=(has_codes and where.unit.startswith("blocks.")) or stays_float32(name),
    )


def device_memory(ask: ShardingRequest, tensors: Sequence[ShardedTensor], rows: int) -> MemoryEstimate:
    """Bytes of the fullest device, in a step with several micro-batches after the first step."""
    mesh, model, lora = ask.mesh, ask.model, ask.lora
    trained = [tensor for tensor in tensors if tensor.trained]
    local_trained = sum(tensor.local_numbers for tensor in trained)
    tokens = rows * model.context_length
    own, level = computed_shape(model, mesh.tp), ask.activation_checkpointing
    devices = mesh.tp if tokens_are_cut(ask) else 1
    kept = activation_bytes_per_token(own, level, ask.matmul_bytes, written_out=False, devices=devices)
    largest = max(
        tensor.gathered_numbers(mesh) * (2 if tensor.is_code and _is_packed(lora) else 1)
        for tensor in tensors
        if len(tensor.shape) == 2 and tensor.unit.startswith("blocks.")
    )
    unpacked = 0 if lora is None else UNPACKED_BYTES[lora.frozen_dtype] + (DORA_BYTES if lora.dora else 0)
    rounded = 0 if mesh.dp_shard > 1 or ask.offload == "host" else _rounded_bytes(ask, tensors)
    chunk = min(tokens, max(1, LOGITS_CHUNK_BYTES // (BYTES * ask.vocab_size)))
    table = ask.vocab_size * model.hidden_size
    logits = chunk * ask.vocab_size * (ask.matmul_bytes + BYTES)
    logits += table * (BYTES + ask.matmul_bytes) if lora is None else 0  # the gradient of the head in both formats
    halves = (tensor.local_numbers for tensor in trained if tensor.number_bytes == 2)
    rounding = 2 * BYTES * max(halves, default=0)  # of a weight in bfloat16: its numbers and random bits
    update = 5 * BYTES * min(UPDATE_NUMBERS, local_trained)
    if ask.optimizer.kind == "muon" and lora is None:
        dealt = [one.numbers for one in trained if len(one.shape) == 2 and one.unit.startswith("blocks.")]
        update = shared_update_bytes(max(dealt), sum(dealt), mesh.devices, mesh.dp_replicate, ask.muon_bytes)
    estimate = MemoryEstimate(
        weights=sum(tensor.local_bytes for tensor in tensors),
        gradients=sum(tensor.local_bytes for tensor in trained),
        optimizer=sum(tensor.local_optimizer_bytes for tensor in trained),
        copies=unpacked * largest + rounded,
        activations=tokens * kept,
        logits=-(-logits // mesh.tp),
        update=update + rounding,
        gathered=_gathered(ask, tensors),
    )
    if ask.offload != "host":
        return estimate
    on_device = ask.optimizer.kind == "muon" and lora is None  # the only optimizer that computes there
    update = 5 * BYTES * max(UPDATE_NUMBERS, largest) if on_device else 0
    gathered = estimate.gathered + _moving(ask, tensors)
    return replace(estimate, weights=0, gradients=0, optimizer=0, update=update, gathered=gathered)


def tokens_are_cut(ask: ShardingRequest) -> bool:
    """Whether each device of tp has some of the tokens between the matmuls: see train/mesh.py."""
    return ask.mesh.tp > 1 and ask.model.context_length % ask.mesh.tp == 0


def computed_shape(model: ModelConfig, tp: int) -> ModelConfig:
    """The shape of what a device of tp computes of all tokens: some of the heads and of the inner width."""
    cut = {name: getattr(model, name) // tp for name in ("num_heads", "num_kv_heads", "intermediate_size")}
    return model.model_copy(update={"head_dim": model.head_size, **cut})


def _rounded_bytes(ask: ShardingRequest, tensors: Sequence[ShardedTensor]) -> int:
    """
    Of weights that are kept in float32 and rounded for matmuls, where nothing is gathered in their format: those of
    head and block at work if blocks are computed again, and all if not.
    """
    sizes = {
        unit: sum(ask.matmul_bytes * one.local_numbers for one in parts if one.number_bytes > ask.matmul_bytes)
        for unit, parts in _units(tensors).items()
    }
    if ask.activation_checkpointing == "none":
        return sum(sizes.values())
    block = max(size for unit, size in sizes.items() if unit.startswith("blocks."))
    return block + sizes["embed" if ask.model.tie_embeddings else "head"]


def _is_packed(lora: Lora | None) -> bool:
    """Whether a byte holds two numbers."""
    return lora is not None and lora.frozen_dtype.startswith("nf4")


def _units(tensors: Sequence[ShardedTensor]) -> dict[str, list[ShardedTensor]]:
    units: dict[str, list[ShardedTensor]] = {}
    for tensor in tensors:
        units.setdefault(tensor.unit, []).append(tensor)
    return units


def _gathered(ask: ShardingRequest, tensors: Sequence[ShardedTensor]) -> int:
    """
    The largest two units that are there together, or where `zero_stage` says so, all; nothing where dp_shard cuts
    nothing and the device keeps all.
    """
    mesh, units = ask.mesh, _units(tensors)
    if mesh.dp_shard == 1 and ask.offload != "host":
        return 0
    weights = {unit: sum(one.gathered_bytes(mesh, ask.matmul_bytes) for one in parts) for unit, parts in units.items()}
    gradients = {
        unit: BYTES * sum(tensor.gathered_numbers(mesh) for tensor in parts if tensor.trained)
        for unit, parts in units.items()
    }

    def largest_two(sizes: Mapping[str, int]) -> int:
        block = max(size for unit, size in sizes.items() if unit.startswith("blocks."))
        other = max(sizes.get(unit, 0) for unit in ("embed", "head"))
        return block + max(block if ask.model.num_layers > 1 else 0, other)

    if mesh.zero_stage == 3:
        return largest_two({unit: size + gradients[unit] for unit, size in weights.items()})
    return sum(weights.values()) + (largest_two(gradients) if mesh.zero_stage == 2 else sum(gradients.values()))


def _moving(ask: ShardingRequest, tensors: Sequence[ShardedTensor]) -> int:
    """
    Of the largest unit, where it comes from the host and its gradient goes there: this device's part as it is kept and
    rounded, and the gradient in float32, whole and this device's part.
    """
    return max(
        sum(
            tensor.local_bytes
            + ask.matmul_bytes * tensor.local_numbers
            + (BYTES * (tensor.gathered_numbers(ask.mesh) + tensor.local_numbers) if tensor.trained else 0)
            for tensor in parts
        )
        for parts in _units(tensors).values()
    )


def _host_memory(ask: ShardingRequest, tensors: Sequence[ShardedTensor]) -> dict[str, int]:
    """
    Of a host. Each process reads its parts tensor by tensor, and has them here until all are read. A save copies what
    is trained here: all of it for adapters, which the first process writes, and the parts of this host's devices in
    full training.
    """
    devices = min(HOST_DEVICES, ask.mesh.devices)
    largest = max(tensor.local_numbers for tensor in tensors) * BYTES
    trained = [tensor for tensor in tensors if tensor.trained]
    decoded = ask.optimizer.kind == "adamw8bit"  # in a checkpoint, its moments are float32
    saved = [(tensor, tensor.number_bytes + round(8 if decoded else tensor.optimizer_bytes)) for tensor in trained]
    if ask.lora is not None:
        copies = sum(tensor.numbers * size for tensor, size in saved)
    else:
        copies = devices * sum(tensor.local_numbers * size for tensor, size in saved)
    read = sum(tensor.local_bytes for tensor in tensors)
    saving, loading = copies + min(copies, FILE_BYTES), devices * (read + largest)
    if ask.offload == "host":
        parts = sum(pinned_bytes(tensor.local_bytes) for tensor in tensors)
        parts += sum(pinned_bytes(BYTES * one.local_numbers) + one.local_optimizer_bytes for one in trained)
        return {"processes": devices * PROCESS_BYTES, "offloaded": devices * parts, "saving": max(saving, loading)}
    return {"processes": devices * PROCESS_BYTES} | ({"loading": loading} if loading >= saving else {"saving": saving})


def _passes(ask: ShardingRequest, unit: str) -> int:
    """In how many passes a unit is gathered, each time."""
    # a frozen embedding has no backward pass, and the loss uses the head once for both passes
    again = unit.startswith("blocks.") or (unit == "embed" and ask.lora is None and not ask.model.tie_embeddings)
    return 2 if again else 1


def step_traffic(ask: ShardingRequest, tensors: Sequence[ShardedTensor], rows: int) -> list[Traffic]:
    """What each device receives in a step, by collective and axis."""
    mesh, model = ask.mesh, ask.model
    micro_batches, cut = -(-ask.rows_per_device // rows), tokens_are_cut(ask)
    reached: dict[tuple[str, str], float] = {}

    def add(collective: str, axis: str, num_bytes: float, count: int, *, once: bool = False) -> None:
        if count > 1 and num_bytes:
            passes = (2 if collective == "all-reduce" else 1) * (1 if once else micro_batches)
            received = passes * num_bytes * (count - 1) / count
            reached[collective, axis] = reached.get((collective, axis), 0.0) + received

    for unit, parts in _units(tensors).items():
        whole = sum(tensor.gathered_bytes(mesh, ask.matmul_bytes) for tensor in parts)
        kept = mesh.zero_stage < 3
        add("all-gather", "dp_shard", whole * (1 if kept else _passes(ask, unit)), mesh.dp_shard, once=kept)
    once = mesh.zero_stage == 1
    for tensor in tensors:
        if tensor.trained:
            add("reduce-scatter", "dp_shard", BYTES * tensor.gathered_numbers(mesh), mesh.dp_shard, once=once)
            add("all-reduce", "dp_replicate", BYTES * tensor.local_numbers, mesh.dp_replicate, once=once)
            bias = tensor.name.endswith(("out.bias", "down.bias"))
            if tensor.tp is None and (cut or tensor.kind != "sequence" or bias):  # else all have the same
                add("all-reduce", "tp", BYTES * tensor.gathered_numbers(mesh), mesh.tp, once=once)
    stream = rows * model.context_length * model.hidden_size * ask.matmul_bytes
    again = ask.activation_checkpointing != "none"
    trained = ask.lora is None  # if not, nothing in front of the first layer has a gradient
    entered = (2 + again) * 2 * model.num_layers  # of attention and feed-forward, in each pass
    left = entered - again * model.num_layers  # a block is computed again without its last sum
    if cut:
        add("all-gather", "tp", stream * (entered + trained + 1), mesh.tp)  # and of the embedding, and after the norm
        add("reduce-scatter", "tp", stream * (left - (not trained) + 1), mesh.tp)
        add("all-reduce", "tp", stream, mesh.tp)  # of the head
    else:  # a gradient, and not x, is summed where a layer is entered
        add("all-reduce", "tp", stream * (4 * model.num_layers + again * model.num_layers + 1 + trained), mesh.tp)
    add("all-reduce", "tp", rows * model.context_length * BYTES * (mesh.tp + 1), mesh.tp)  # of logits, for the loss
    for tensor in tensors:
        if tensor.kind == "row" and tensor.name.endswith(".magnitude"):  # lengths of whole rows of DoRA
            add("all-reduce", "tp", (1 + again) * BYTES * tensor.numbers, mesh.tp)
    for collective, axis, num_bytes, count in _matrix_traffic(ask, tensors):
        add(collective, axis, num_bytes, count, once=True)
    return [Traffic(collective=kind, axis=axis, num_bytes=int(size)) for (kind, axis), size in reached.items()]


def _matrix_traffic(ask: ShardingRequest, tensors: Sequence[ShardedTensor]) -> Iterator[tuple[str, str, float, int]]:
    """
    What an update of Muon exchanges: collective, axis, bytes and ranks. Devices that share a copy swap parts of
    matrices for whole ones, and back, as train.collectives.MeshAxes does. Parts on the host are gathered in float32.
    """
    if ask.optimizer.kind != "muon":
        return
    mesh = ask.mesh
    matrices = [one for one in tensors if one.trained and len(one.shape) == 2 and one.unit.startswith("blocks.")]
    alike = Counter((one.shape, one.tp, one.dp_shard, one.local_numbers) for one in matrices)
    for (_, tp, dp_shard, local), number in alike.items():
        cuts = {"dp_shard": 1 if dp_shard is None else mesh.dp_shard, "tp": 1 if tp is None else mesh.tp}
        if ask.offload == "host":
            yield "all-gather", "dp_shard", number * BYTES * local * cuts["dp_shard"], cuts["dp_shard"]
            yield "all-gather", "tp", number * BYTES * local * cuts["dp_shard"] * cuts["tp"], cuts["tp"]
            continue
        share = -(-number // mesh.devices) * cuts["dp_shard"] * cuts["tp"] * local * ask.muon_bytes
        for axis, count in cuts.items():
            yield "all-to-all", axis, 2 * share, count
        if tp is None:
            yield "all-gather", "tp", mesh.tp * share, mesh.tp
        copies = mesh.devices // (cuts["dp_shard"] * cuts["tp"])
        yield "all-gather", "dp_replicate", copies * share, mesh.dp_replicate


def _rows_that_fit(ask: ShardingRequest, tensors: Sequence[ShardedTensor], target: Machine) -> int:
    """The largest power of two up to the rows of a device and USUAL_TOKENS that fits; 1 where none does."""
    most = min(ask.rows_per_device, max(1, USUAL_TOKENS // ask.model.context_length))
    candidates = [2**power for power in range(most.bit_length())]
    fitting = [rows for rows in candidates if device_memory(ask, tensors, rows).peak <= target.usable_bytes]
    return max(fitting, default=1)


def _dp_shard_that_fits(ask: ShardingRequest, target: Machine) -> int | None:
    """The smallest power of two above the mesh's own that fits with one row; None for none that may be."""
    mesh, count = ask.mesh, 1
    while count <= 1024:
        wider = mesh.model_copy(update={"dp_shard": count})
        if count > mesh.dp_shard and wider.devices <= 1024:
            try:
                if _planned(replace(ask, mesh=wider, rows=1), replace(target, devices=wider.devices), None).fits:
                    return count
            except ConfigError:  # columns that so many do not divide
                return None
        count *= 2
    return None


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
