"""A model over a mesh learns what it learns on one device."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.core.errors import ConfigError
from bloomery.hw import distributed
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.model.config import Base, Lora, ModelConfig
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer, on_meta
from bloomery.shards.loader import IGNORE, Batch
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import collectives, compile, fsdp, launch, optim
from bloomery.train.checkpointing import AdapterSaver, FullModelSaver
from bloomery.train.collectives import Norms, gradient_norm
from bloomery.train.compile import checkpoint_activations
from bloomery.train.config import AdamW, AdamW8bit, AdEMAMix, Level, Lion, Mesh, Muon, Optimizer
from bloomery.train.mesh import check_model
from bloomery.train.optim import Optimizers
from bloomery.train.plan.gpu_time import bus_bytes
from bloomery.train.plan.memory import BASES, TrainSetup, Workload, of_memory
from bloomery.train.plan.sharding import ShardingRequest, sharded
from bloomery.train.precision import Precision
from bloomery.train.step import accumulate_gradients, clipping, gradients
from bloomery.weights import checkpoint, hf
from bloomery.weights.hf import BaseModel, ModelLanguage
from tests.tokenizer.made import small
from tests.train.made import LINEAGE, content, lines, newest_state, on_cpu, processor, session, stopped, write_samples

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE = {
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
    "context_length": 32,
    "tie_embeddings": False,
}
VOCAB, STEPS, FEW, T = 97, 5, 3, 8
UNEVEN = 7
"""Tokens of a row that tp does not divide."""
MESHES = {
    4: ((1, 4, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4)),
    8: ((1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4), (2, 1, 4)),
}
METHODS: dict[str, Lora | None] = {
    "full": None,
    "LoRA": Lora(rank=4, base_dtype="float32"),
    "NF4": Lora(rank=4, base_dtype="nf4"),
    "DoRA, NF4": Lora(rank=4, base_dtype="nf4", dora=True),
    "DoRA, int8": Lora(rank=4, base_dtype="int8", dora=True),
    "bfloat16": Lora(rank=4, base_dtype="bfloat16"),
}
READ = (
    *(METHODS[name] for name in ("DoRA, NF4", "DoRA, int8", "bfloat16")),
    Lora(dora=True, base_dtype="float32"),
    None,
)
"""What a frozen base is read for. None: for training of all weights."""
OTHERS: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True},
    "norms that heads share": {"qk_norm": True},
    "pairs of heads": {"attention": "differential"},
    "norms at both ends": {"norm_order": "both", "parallel_residual": False},
    "uneven tokens": {"biases": "all"},
    "all biases": {"biases": "all", "norm": "layernorm", "mlp": "gelu", "position_embedding": "learned"},
}
LEVELS: dict[str, Level] = {"recomputed": "full", "partly recomputed": "selective"}
OTHERS |= {name: {} for name in LEVELS}
COUNTED = ("", "ZeRO 1", "ZeRO 2", *LEVELS)
"""Of these cases, received bytes are compared with those of the plan."""
STAGES = {"ZeRO 1": 1, "ZeRO 2": 2, "ZeRO 1, tied": 1, "ZeRO 2, tied": 2}
OTHERS |= {name: {"tie_embeddings": name.endswith("tied")} for name in STAGES}
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": AdamW(learning_rate=1e-3, weight_decay=0.1),
    "muon": Muon(muon_lr=1e-3, learning_rate=1e-3),
    "lion": Lion(learning_rate=1e-5),
    "ademamix": AdEMAMix(learning_rate=1e-3, ramp_steps=STEPS),
    "adamw8bit": AdamW8bit(learning_rate=1e-3, weight_decay=0.1, block=32),
}
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
THREE = ("full", "LoRA", "NF4")
"""Methods that are tried on every mesh."""
Case = tuple[str, str, tuple[int, int, int]]
"""Method, what of the shape is another, and mesh."""


def cases(ranks: int) -> list[Case]:
    three: list[Case] = [(method, "", axes) for method in THREE for axes in MESHES[ranks]]
    if ranks == 8:
        return three
    more: list[Case] = [
        ("full", other, axes) for other in OTHERS if other not in (*STAGES, *LEVELS) for axes in ((1, 2, 2), (1, 1, 4))
    ]
    more += [("full", optimizer, (1, 2, 2)) for optimizer in ("muon", "lion", "ademamix", "adamw8bit")]
    more += [("full", "adamw8bit", (1, 4, 1)), ("NF4", "adamw8bit", (2, 2, 1))]
    more += [(method, "recomputed", (1, 2, 2)) for method in ("full", "NF4", "DoRA, NF4")]
    more += [("full", "partly recomputed", (1, 1, 4)), ("LoRA", "partly recomputed", (1, 2, 2))]
    adapted: list[Case] = [(method, "", (1, 2, 2)) for method in METHODS if method not in THREE]
    one: list[Case] = [("DoRA, NF4", "all biases", (1, 2, 2)), ("LoRA", "tied", (2, 2, 1)), ("full", "tied", (1, 4, 1))]
    stages: list[Case] = [("full", other, axes) for other in STAGES for axes in ((2, 2, 1), (1, 2, 2))]
    stages += [("NF4", "ZeRO 1", (1, 4, 1)), ("LoRA", "ZeRO 1", (1, 2, 2)), ("LoRA", "ZeRO 2", (2, 2, 1))]
    return [*three, *[case for case in more if case != ("full", "pairs of heads", (1, 1, 4))], *adapted, *one, *stages]


def of_axes(axes: tuple[int, int, int], other: str = "") -> Mesh:
    return Mesh(dp_replicate=axes[0], dp_shard=axes[1], tp=axes[2], zero_stage=STAGES.get(other, 3))


def made(method: str, other: str, layers: int) -> Transformer:
    model = Transformer(ModelConfig(**SHAPE | {"num_layers": layers} | OTHERS.get(other, {})), VOCAB)
    model.initialize(0)
    if (adapters := METHODS[method]) is not None:
        lora.attach(model, adapters, 0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, weight in lora.weights(model).items():
                if name.endswith("lora_b"):  # at 0, A would learn nothing in the first step
                    weight.copy_(torch.empty(weight.shape).normal_(0, 0.02, generator=generator))
    checkpoint_activations(model, LEVELS.get(other, "none"))
    return model


def size(method: str, other: str, axes: tuple[int, int, int]) -> tuple[int, int]:
    """
    Layers, and rows of a batch, by two for every rank: two micro-batches and layers on four ranks. What eight of them
    or another shape could break is within a layer, and of adapters within a micro-batch.
    """
    small = other != "" or math.prod(axes) > 4 or method not in THREE
    return (1 if small else 2), (2 if small and method != "full" else 4) * axes[0] * axes[1]


def batch(rows: int, tokens: int = T) -> Batch:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (rows, tokens + 1))
    targets = np.where(rng.random((rows, tokens)) < 0.8, ids[:, 1:], IGNORE)
    places = np.arange(tokens)[None].repeat(rows, 0)
    return Batch(ids[:, :-1], targets, places, np.zeros_like(places), np.arange(rows))


def learned(
    model: Transformer, other: str, rows: int, world: World, number_type: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Any]:
    """Losses, gradient norms and norms of changes of clipped steps, of two sequences at once."""
    precision = on_cpu(number_type)
    optimizer, steps = OPTIMIZERS.get(other, OPTIMIZERS["adamw"]), FEW if other else STEPS
    optimizers = Optimizers(model, optimizer, torch.float32, seed=seed, world=world)
    norms = Norms(model, every=steps)
    told: dict[str, Any] = {"losses": [], "norms": []}
    given = batch(rows, UNEVEN if other == "uneven tokens" else T)
    for step in range(1, steps + 1):
        told["losses"].append(accumulate_gradients(model, given, 2, precision, world=world).loss)
        norm = gradient_norm(gradients(model))
        told["norms"].append(float(norm))
        norms.before_update(step)
        optimizers.step(clipping(0.1, norm), step)
        norms.after_update()
        optimizers.zero_grad()
    told["changes"] = [norms.latest["weight_norm"], norms.latest["update_norm"]]
    return told


class Received(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that this rank receives by ring algorithms, by collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = dict.fromkeys(COLLECTIVES, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_allgather_base_" in name:
            self.bytes["all-gather"] += args[0].nbytes - args[1].nbytes
        elif "alltoall_base_" in name:
            count = torch.distributed.ProcessGroup.unbox(args[2]).size()
            self.bytes["all-to-all"] += args[0].nbytes * (count - 1) / count
        elif "_reduce_scatter_base_" in name:
            self.bytes["reduce-scatter"] += args[1].nbytes - args[0].nbytes
        elif "c10d.allreduce_" in name:
            self._reduced(args[0][0].nbytes, torch.distributed.ProcessGroup.unbox(args[1]).size())
        elif "_c10d_functional.all_reduce" in name:
            group: Any = distributed_c10d
            self._reduced(args[0].nbytes, group._resolve_process_group(args[2]).size())
        elif "_c10d_functional.all_gather_into_tensor" in name:
            self.bytes["all-gather"] += args[0].nbytes * (args[1] - 1)
        elif "_c10d_functional.reduce_scatter_tensor" in name:
            self.bytes["reduce-scatter"] += args[0].nbytes * (args[2] - 1) / args[2]
        else:
            assert "allgather" not in name, name
            assert "reduce_scatter" not in name, name
            assert "alltoall" not in name, name
        return func(*args, **(kwargs or {}))

    def _reduced(self, size: int, count: int) -> None:
        self.bytes["all-reduce"] += 2 * size * (count - 1) / count


def received(model: Transformer, rows: int, world: World, number_type: torch.dtype = torch.float32) -> dict[str, float]:
    """By a rank in the gradients of a step whose tokens all count."""
    whole = batch(rows)
    with Received() as bytes_by_collective:
        accumulate_gradients(model, replace(whole, targets=whole.ids), 2, on_cpu(number_type), world=world)
    model.zero_grad()
    counted: dict[str, float] = bytes_by_collective.bytes
    return counted


def planned(method: str, other: str, layers: int, rows: int, mesh: Mesh, **settings: Any) -> dict[str, float]:
    """What the plan says of it."""
    model = ModelConfig(**SHAPE | {"num_layers": layers, "context_length": T})
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "optimizer": AdamW(), "rows_per_step": rows, "rows": 2}
    ask = ShardingRequest(
        model=model,
        mesh=mesh,
        lora=METHODS[method],
        activation_checkpointing=LEVELS.get(other, "none"),
        **{"matmul_bytes": 4, "muon_bytes": 4, **sizes, **settings},
    )
    by_collective = dict.fromkeys(COLLECTIVES, 0.0)
    for traffic in sharded(ask, of_memory(2**34, mesh.devices)).traffic:
        by_collective[traffic.collective] += traffic.num_bytes
    return by_collective


def over_meshes(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(1)
    found = {}
    for method, other, axes in cases(world.size):
        layers, rows = size(method, other, axes)
        model = made(method, other, layers)
        fsdp.shard(model, world, processor(), of_axes(axes, other))
        told = learned(model, other, rows, world)
        if other in COUNTED:
            told["received"] = received(model, rows, world)
        told["held"] = world.gather(sum(collectives.local(one).nbytes for one in model.parameters()))
        found[f"{method} {other} {axes}"] = told
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_every_mesh_learns_what_one_device_learns(ranks: int) -> None:
    found, alone = launch.run("tests.train.test_mesh:over_meshes", {}, ranks), dict[tuple[str, str, int, int], Any]()
    for method, other, axes in cases(ranks):
        told = found[f"{method} {other} {axes}"]
        layers, rows = size(method, other, axes)
        if (method, other, layers, rows) not in alone:
            model = made(method, other, layers)
            held = sum(one.nbytes for one in [*model.parameters(), *model.buffers()])
            alone[method, other, layers, rows] = learned(model, other, rows, World.alone()), held
        expected, held = alone[method, other, layers, rows]
        assert expected["losses"][-1] < expected["losses"][0] - 0.001
        for name, allowed in (("losses", 2e-6), ("norms", 2e-6), ("changes", 1e-5)):
            assert told[name] == pytest.approx(expected[name], rel=allowed), (method, other, axes, name)
        if other in COUNTED:
            bytes_of_plan = planned(method, other, layers, rows, of_axes(axes, other))
            assert told["received"] == pytest.approx(bytes_of_plan, rel=0.02, abs=100), (method, other, axes)
        assert max(told["held"]) * axes[1] * axes[2] < 1.25 * held  # tp does not cut norms and some adapters


HALVED: list[Case] = [
    *(("full", "", axes) for axes in MESHES[4]),
    *(("full", other, (1, 2, 2)) for other in ("tied", "muon", "lion", "ademamix", "adamw8bit", "all biases")),
    ("full", "pairs of heads", (1, 4, 1)),
    ("full", "ZeRO 1", (2, 2, 1)),
    ("full", "ZeRO 2", (2, 2, 1)),
]


def halved(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """
    What all weights learn in bfloat16, over a mesh and in one process. Also how alike the ways are that they take, and
    how alike those of two processes whose random bits differ.
    """
    torch.set_num_threads(1)
    found = {}
    for method, other, axes in HALVED:
        layers, rows = size(method, other, axes)
        told: list[Any] = []
        for company, seed in ((world, 0), (World.alone(), 0), (World.alone(), 1)):
            model, start = made(method, other, layers), made(method, other, layers)
            fsdp.keep_weights(model, "bfloat16", sharded=company.size > 1)
            if company.size > 1:
                fsdp.shard(model, world, processor(torch.bfloat16), of_axes(axes, other))
            formats = sorted({str(one.dtype) for one in model.parameters()})
            said = learned(model, other, rows, company, torch.bfloat16, seed) | {"formats": formats}
            pairs = zip(model.parameters(), start.parameters(), strict=True)
            way = torch.cat([(collectives.whole(now).float() - before).flatten() for now, before in pairs])
            told.append(said | {"way": way.detach()})
            if company.size > 1 and other == "":
                said["received"] = received(model, rows, world, torch.bfloat16)
                told[0] |= said
        over, alone, another = (one.pop("way") for one in told)
        alike = [float(torch.cosine_similarity(one, alone, dim=0)) for one in (over, another)]
        found[f"{other} {axes}"] = [*told[:2], alike]
    return found


@pytest.mark.slow
def test_weights_in_bfloat16_learn_over_every_mesh_what_they_learn_on_one_device() -> None:
    """Up to the random bits of their rounding, which each part has of its own."""
    found = launch.run("tests.train.test_mesh:halved", {}, 4)
    assert len(found) == len(HALVED)
    for method, other, axes in HALVED:
        over, alone, (cosine, usual) = found[f"{other} {axes}"]
        assert over["formats"] == ["torch.bfloat16", "torch.float32"]
        assert over["losses"] == pytest.approx(alone["losses"], rel=2e-3), (other, axes)
        assert over["norms"] == pytest.approx(alone["norms"], rel=2e-2), (other, axes)
        assert cosine > usual - 0.02, (other, axes)
        if "received" in over:
            layers, rows = size(method, other, axes)
            bytes_of_plan = planned(
                method, other, layers, rows, of_axes(axes, other), matmul_bytes=2, weight_dtype="bfloat16"
            )
            assert over["received"] == pytest.approx(bytes_of_plan, rel=0.02, abs=100), axes


def compiled_over_tp(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Of two methods: what a trial says, and what compiled and plain blocks learn."""
    torch.set_num_threads(1)
    found = dict[str, Any]()
    for method, other in (("full", ""), ("NF4", "recomputed")):
        told: list[Any] = []
        for compiles in (True, False):
            model = made(method, other, 1)
            fsdp.shard(model, world, processor(), Mesh(tp=2))
            if compiles:
                trials = [partial(compile._pass, model, batch(2), on_cpu())]
                verdict = compile.compile_blocks(model, "on", trials, tolerance=compile.TIGHT)
                told.append([verdict.compiled, verdict.why])
            told.append(learned(model, other, 2, world))
        found[method] = told
    return found


@pytest.mark.slow
def test_blocks_are_compiled_with_their_exchanges_over_tp() -> None:
    told = launch.run("tests.train.test_mesh:compiled_over_tp", {}, 2)
    assert set(told) == {"full", "NF4"}
    for method, ((compiles, why), fast, plain) in told.items():
        assert compiles, why
        assert ("graph breaks" in why) == (method == "NF4"), why  # a base that is dequantized twice leaves the graph
        assert fast["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def updated(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What the first rank receives in an update of Muon, of parts on a GPU and, without a GPU, on the host of some."""
    torch.set_num_threads(1)
    by_mesh = {}
    for axes in MESHES[world.size]:
        counts = []
        for elsewhere in (True, False):
            model = made("full", "", 2)
            fsdp.shard(model, world, processor(), of_axes(axes))
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight)
            token = cpu.ELSEWHERE.set(elsewhere)
            with Received() as bytes_by_collective:
                Optimizers(model, Muon(), torch.float32, world=world).step()
            cpu.ELSEWHERE.reset(token)
            counts.append(bytes_by_collective.bytes)
        by_mesh[str(axes)] = counts
    return by_mesh


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_an_update_of_muon_receives_the_bytes_of_the_plan(ranks: int) -> None:
    by_mesh = launch.run("tests.train.test_mesh:updated", {}, ranks)
    for axes in MESHES[ranks]:
        for received_bytes, offload in zip(by_mesh[str(axes)], ("none", "host"), strict=True):
            muon, others = (
                planned("full", "", 2, 4, of_axes(axes), optimizer=optimizer, offload=offload)
                for optimizer in (Muon(), AdamW())
            )
            expected = {name: muon[name] - others[name] for name in COLLECTIVES}
            assert received_bytes == pytest.approx(expected, rel=0.02, abs=100), (axes, offload)


# --- weights, gradients and optimizer on the host ---------------------------------------------------------------------

OFFLOADED: list[Case] = [
    *((method, "", (2, 2, 1)) for method in METHODS),
    *(("full", other, (1, 2, 2)) for other in ("", "tied", "muon", "lion", "ademamix", "adamw8bit", "pairs of heads")),
    ("DoRA, NF4", "all biases", (1, 1, 4)),
    ("NF4", "", (1, 4, 1)),
]


def offloaded(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What each rank learns with its parts on the host, and without."""
    torch.set_num_threads(1)
    found = {}
    for method, other, axes in OFFLOADED:
        told = []
        for offload in (True, False):
            model = made(method, other, 1)
            fsdp.shard(model, world, processor(), of_axes(axes, other), offload=offload)
            told.append(learned(model, other, 8, world))
        found[f"{method} {other} {axes}"] = told
    return found


@pytest.mark.slow
def test_parts_on_the_host_learn_what_parts_on_the_device_learn() -> None:
    """Bit for bit, as nothing moves on a CPU. The units do go through all of FSDP2's offloading."""
    found = launch.run("tests.train.test_mesh:offloaded", {}, 4)
    assert len(found) == len(OFFLOADED)
    for case, (on_host, on_device) in found.items():
        assert on_host == on_device, case
        assert on_host["losses"][-1] < on_host["losses"][0] - 0.001, case


@pytest.mark.parametrize(("method", "other"), [("full", "muon"), ("DoRA, NF4", "")])
def test_one_process_that_offloads_learns_what_it_learns_without(method: str, other: str) -> None:
    alone = learned(made(method, other, 1), other, 2, World.alone())
    with distributed.joined_alone():
        model = made(method, other, 1)
        fsdp.shard(model, World.alone(), processor(), Mesh(), offload=True)
        told = learned(model, other, 2, World.alone())
    for name, allowed in (("losses", 2e-6), ("norms", 2e-6), ("changes", 1e-5)):
        assert told[name] == pytest.approx(alone[name], rel=allowed), name


@pytest.mark.parametrize(("method", "other"), [("full", ""), ("full", "tied"), ("NF4", ""), ("LoRA", "tied")])
def test_the_bus_carries_the_bytes_of_both_plans(method: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights, those that FSDP2 asks the host for; of gradients, those that it leaves there for each micro-batch."""
    moved, asked_for, (layers, rows) = [0], FSDPParam.all_gather_inputs, (2, 4)

    def counted(self: Any) -> Any:
        moved[0] += self._sharded_param_data.nbytes
        return asked_for.fget(self)  # type: ignore[attr-defined]

    monkeypatch.setattr(FSDPParam, "all_gather_inputs", property(counted))
    with distributed.joined_alone():
        model = made(method, other, layers)
        fsdp.shard(model, World.alone(), processor(), Mesh(), offload=True)
        accumulate_gradients(model, batch(rows), 2, on_cpu())
    moved[0] += 2 * sum(collectives.local(grad).nbytes for grad in gradients(model))
    shape = ModelConfig(**SHAPE | {"num_layers": layers, "context_length": T} | OTHERS.get(other, {}))
    sizes: dict[str, Any] = {"model": shape, "vocab_size": VOCAB, "optimizer": AdamW(), "lora": METHODS[method]}
    adapters = METHODS[method] or Lora()
    kept = "full" if METHODS[method] is None else BASES[adapters.frozen_dtype]
    way = TrainSetup(rows=2, method=kept, rank=adapters.rank, sharded=True, offload=True)
    assert bus_bytes(Workload(**sizes), way, rows) == pytest.approx(moved[0], rel=0.001)
    ask = ShardingRequest(mesh=Mesh(), rows_per_step=rows, rows=2, offload="host", **sizes)
    assert sharded(ask, of_memory(2**34)).bus_bytes == moved[0]


def on_host_of_gpus(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A part as FSDP2 keeps it: in the host's memory, over a mesh of GPUs."""
    facts = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    specification = DTensorSpec(mesh, (Shard(0),), tensor_meta=facts)
    return DTensor(tensor, specification, requires_grad=False)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parts_on_the_host_of_gpus_are_updated_measured_and_copied_there(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain weights are. Without a GPU, a mesh of them still has host parts, and nothing may want to move these."""
    monkeypatch.setattr(optim, "computed_on", lambda weight: torch.device("cpu"))  # where Muon has its matmuls
    plain, parts = (Transformer(ModelConfig(**SHAPE | {"num_layers": 1}), VOCAB) for _ in range(2))
    plain.initialize(0)
    told: list[list[Any]] = [[], []]
    with distributed.joined_alone():
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp_shard",))
        for name, weight in list(plain.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            part = torch.nn.Parameter(on_host_of_gpus(weight.detach().clone(), mesh))
            parts.get_submodule(owner)._parameters[leaf] = part
        for model, found in zip((plain, parts), told, strict=True):
            optimizers, norms = Optimizers(model, OPTIMIZERS[optimizer], torch.float32), Norms(model, every=1)
            generator = torch.Generator().manual_seed(0)
            for step in (1, 2):
                for weight in model.parameters():
                    grad = torch.randn(weight.shape, generator=generator)
                    weight.grad = grad if model is plain else on_host_of_gpus(grad, mesh)
                norm = gradient_norm(gradients(model))
                norms.before_update(step)
                optimizers.step(clipping(0.1, norm), step)
                norms.after_update()
                found += [float(norm), norms.latest["update_norm"], collectives.is_finite(model, World.alone())]
                optimizers.restore(optimizers.state(checkpoint.as_part))
            found += [collectives.whole(weight) for weight in model.parameters()]
            if optimizer != "adamw8bit":  # of which a last bit of a gradient moves some codes by one
                found += [collectives.local(one) for one in checkpoint.copy_state(optimizers.state()).values()]
        assert {str(weight.device) for weight in parts.parameters()} == {"cpu"}
        assert collectives.computed_on(next(parts.parameters())).type == "cuda"
    for mine, theirs in zip(*told, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-4 if optimizer == "adamw8bit" else 1e-7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
@pytest.mark.parametrize("other", ["", "tied"])
@pytest.mark.parametrize("reads", [True, False])
def test_parts_of_a_mesh_of_gpus_are_made_pinned_filled_and_left_on_the_host(
    reads: bool, other: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, asked_to_pin = torch.empty, list[bool]()

    def on_no_gpu(*sizes: Any, device: Any = None, **how: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*sizes, device="cpu" if str(device).startswith("cuda") else device, **how)
        return made

    def policy(pin_memory: bool) -> CPUOffloadPolicy:
        asked_to_pin.append(pin_memory)
        return CPUOffloadPolicy(pin_memory=False)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", on_no_gpu)
    monkeypatch.setattr(fsdp, "CPUOffloadPolicy", policy)
    gpu = replace(processor(torch.bfloat16), torch_device=torch.device("cuda"), vendor="amd")
    model = made("full", other, 1)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    own = None
    if reads:
        own, model = fsdp.OwnParts(Mesh(), 0), on_meta(model.config, VOCAB)
        for name, weight in weights.items():
            own.take(model, name, weight, "float32", "float32")
        if other == "tied":
            model.head.weight = model.embed.weight
    with distributed.joined_alone():
        fsdp.shard(model, World.alone(), gpu, Mesh(), spread=True, own=own, offload=True)
        one = session(shards, tmp_path, compile="off")
        compile.prepare(model, one.config, one.samples, Precision.decide("bfloat16", gpu), tmp_path, World.alone())
        parts = dict(model.named_parameters())
        assert parts.keys() == weights.keys()
        for name, part in parts.items():
            assert isinstance(part, DTensor)
            assert (str(part.device), part.device_mesh.device_type) == ("cpu", "cuda")
            assert torch.equal(collectives.local(part), weights[name])
        copied = dict(fsdp.copy_of(model, World.alone()).named_parameters())
        assert all(torch.equal(copied[name], weight) for name, weight in weights.items())
    assert asked_to_pin == [True]


@pytest.mark.parametrize(
    ("adapters", "mesh", "told"),
    [
        (Lora(base_dtype="nf4_double"), Mesh(dp_shard=2), "scales of scales"),
        (Lora(base_dtype="nf4"), Mesh(tp=3), "num_heads is 8, and tp=3 does not divide it"),
        (Lora(base_dtype="nf4"), Mesh(dp_shard=4, tp=2), "scales has 2 numbers along dim 1, but dp_shard=4"),
    ],
)
def test_adapters_that_a_mesh_cannot_train_are_refused_by_name(adapters: Lora, mesh: Mesh, told: str) -> None:
    model = Transformer(ModelConfig(**SHAPE), VOCAB)
    lora.attach(model, adapters, 0)
    fsdp._keep_as_parameters(model)
    with pytest.raises(ConfigError, match=told):
        check_model(model, mesh)


@pytest.mark.parametrize("axes", [(1, 4, 1), (2, 2, 2), (1, 1, 4), (1, 3, 1)])
@pytest.mark.parametrize("adapters", READ)
def test_each_rank_keeps_of_what_it_reads_its_part_of_the_quantized_whole(
    adapters: Lora | None, axes: tuple[int, int, int]
) -> None:
    shape = SHAPE | OTHERS["all biases"]
    whole = Transformer(ModelConfig(**shape), VOCAB)
    whole.initialize(0)
    weights = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    if adapters is not None:
        lora.attach(whole, adapters, 0)
    mesh = of_axes(axes)
    expected = {name.replace(".base.", "."): tensor for name, tensor in whole.state_dict().items()}
    for rank in range(mesh.devices):
        own = fsdp.OwnParts(mesh, rank, dora=adapters is not None and adapters.dora)
        model = on_meta(ModelConfig(**shape), VOCAB)
        for name, weight in weights.items():
            own.take(model, name, weight, "float32", "float32" if adapters is None else adapters.frozen_dtype)
        assert all(one.is_meta for one in model.state_dict().values())
        assert own._parts.keys() == {name for name in expected if "lora_" not in name}
        for name, kept in own._parts.items():
            assert torch.equal(kept, own._cut(name, expected[name], ("tp", "dp_shard"))), (rank, name)


def largest_sum(profiler: Any) -> int:
    """The largest number of bytes of tensors that were allocated and not freed, at any moment of a profile."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    largest: int = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return largest


@pytest.mark.parametrize("base", ["float32", "bfloat16", "int8", "nf4"])
def test_a_rank_that_reads_its_parts_allocates_no_more_than_these_and_a_tensor(base: Base) -> None:
    shape, mesh, ids = ModelConfig(**SHAPE), Mesh(dp_shard=4), 4096
    whole = Transformer(shape, ids)
    whole.initialize(0)
    weights = {name: weight.detach().bfloat16() for name, weight in whole.named_parameters()}
    own, model = fsdp.OwnParts(mesh, 3), on_meta(shape, ids)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        for name, weight in weights.items():
            own.take(model, name, weight, "float32", base)
    kept = sum(part.nbytes for part in own._parts.values())
    assert kept < largest_sum(profiler) <= kept + max(weight.nbytes for weight in weights.values())


# --- runs and their checkpoints --------------------------------------------------------------------------------------

NARROW = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, context_length=T, qk_norm=True
)
CHAIN = ((2, 2, 2), (1, 4, 1), (1, 1, 2), (1, 1, 1))
AFTER = 2
"""A step that is saved, from which the next mesh goes on."""
ADAPTED = Lora(rank=2, base_dtype="int8", dora=True)
RUN: dict[str, Any] = {
    "steps": 5,
    "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
    "eval_every": 4,
    "grad_stats_every": 2,
    "save_every_seconds": 1e9,
    "keep_every": AFTER,
    "micro_batch_tokens": T,
}


def trained(folder: Path, axes: tuple[int, int, int], out: str, world: World) -> None:
    """A run in full and one of adapters, over a mesh, from their newest checkpoints. The first rank has weights."""
    mesh = dict(zip(("dp_replicate", "dp_shard", "tp"), axes, strict=True))
    for method in ("full", "adapters"):
        with torch.device("cpu" if world.is_first else "meta"):
            model = Transformer(NARROW, small().vocab_size)
        if world.is_first:
            model.initialize(5)
        run = session(folder / "shards", folder / out / method, world, mesh=mesh, **RUN)
        run.model, run.model_saver = model, FullModelSaver(model, Renderer(small()), LINEAGE)
        if method == "adapters":
            lora.attach(model, ADAPTED, 0)
            base = BaseModel(folder / "base", hf.digest(folder / "base"))
            run.model_saver = AdapterSaver(model, ModelLanguage.ours(Renderer(small())), ADAPTED, base, LINEAGE)
            run.from_scratch = False
        run.run()


def go_on(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Runs over a mesh; where there was none before, once more from a step on the way."""
    torch.set_num_threads(1)
    folder, axes = Path(task["folder"]), tuple(task["axes"])
    trained(folder, axes, task["out"], world)
    if task["again"]:
        if world.is_first:
            for method in ("full", "adapters"):
                stopped(folder / task["out"] / method, folder / "again" / method, AFTER)
        world.barrier()
        trained(folder, axes, "again", world)
    return {}


@pytest.mark.slow
def test_runs_go_on_from_mesh_to_mesh_and_bit_for_bit_on_the_same(tmp_path: Path) -> None:
    write_samples(tmp_path / "shards")
    model = Transformer(NARROW, small().vocab_size)
    model.initialize(5)
    hf.save(tmp_path / "base", model, Renderer(small()), LINEAGE)
    trained(tmp_path, (1, 1, 1), "alone", World.alone())
    for number, axes in enumerate(CHAIN):
        ranks, task = math.prod(axes), {"folder": str(tmp_path), "axes": axes, "out": str(number), "again": not number}
        if number:
            for method in ("full", "adapters"):
                stopped(tmp_path / str(number - 1) / method, tmp_path / str(number) / method, AFTER)
        go_on(task, World.alone()) if ranks == 1 else launch.run("tests.train.test_mesh:go_on", task, ranks)
        for method in ("full", "adapters"):
            alone, other = tmp_path / "alone" / method, tmp_path / str(number) / method
            assert newest_state(other)["samples"] == newest_state(alone)["samples"]
            for name, allowed in (("loss", 1e-6), ("validation_loss", 2e-5), ("gradient_norm", 2e-5)):
                told, expected = ([line[name] for line in lines(out, name)] for out in (other, alone))
                assert told == pytest.approx(expected, abs=allowed), (axes, method, name)
                assert len(told) == len(expected)
    first, again = tmp_path / "0", tmp_path / "again"
    for method in ("full", "adapters"):
        newest = checkpoint.folders(first / method / "checkpoints")[-1]
        assert content(newest) == content(again / method / "checkpoints" / newest.name)
        environment = json.loads((newest / "environment.json").read_text())
        assert environment["parallelism"] == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
