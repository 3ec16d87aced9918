"""
The parts of gpu.py within one process, each of which says what it learns in lines of JSON as soon as it knows it.

    python benchmarks/gpu_parts.py PART '{"device": "auto", "quick": false, "ranks": 2, "seconds": 60}'

Shapes: GPT-2 124M and plasma-500m on sequences of 1,024 tokens with several documents each; Llama 3.1 8B for adapters
and decoding. Weights are random. Times are of the clock, after the device has finished.
"""

import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.config import build
from bloomery.core.errors import HardwareError
from bloomery.generate.engine import Engine
from bloomery.hw import device as devices
from bloomery.hw import kernel_selection, probes
from bloomery.hw.device import Device, listed_peak, measured_peak
from bloomery.model import lora as model_lora
from bloomery.model.attention import AttentionMask, fused_attention
from bloomery.model.config import PRESETS, Float8, Lora, ModelConfig, cost
from bloomery.model.kernels import triton
from bloomery.model.kernels.trials import _dense, _documents, _few, _plain_loss, _torchs
from bloomery.model.quantize import frozen, kept_bytes
from bloomery.model.transformer import Transformer, on_meta
from bloomery.shards.loader import Batch
from bloomery.train import collectives
from bloomery.train.compile import checkpoint_activations, compile_blocks
from bloomery.train.config import AdamW
from bloomery.train.loss import check_float8, chunk_tokens, chunks_of
from bloomery.train.optim import Optimizers
from bloomery.train.plan.memory import logits_chunk_bytes
from bloomery.train.plan.trace import TracedStep, trace
from bloomery.train.precision import Precision, set_short_formats
from bloomery.train.step import accumulate_gradients, clipping, gradients
from bloomery.weights.opened import own_weights, put_weight

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

GIB = 2**30
ROOT = Path(__file__).resolve().parents[1]
TOKENS = 1024
HEADS = ((20, 4), (12, 12), (15, 5))
TINY = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 128,
    "context_length": 64,
}
TRAINED = {"gpt2-124m": 50_263, "plasma-500m": 48_000}
"""Preset -> the vocabulary that its recipe has."""
LARGEST_ROWS = 32
TIMED_SECONDS, WARM_STEPS = 6.0, 2
MICRO_BATCHES = 4
"""Of a training step that is timed: recipes have 4 to 32, so that the update and its wait weigh little."""
SHOWN_KERNELS = 12
GPU_ONLY = "needs a GPU"


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Setting:
    """What gpu.py asked for, and the device."""

    def __init__(self, device: str, quick: bool, ranks: int, seconds: float) -> None:
        self.choice, self.quick, self.ranks, self.seconds = device, quick, ranks, seconds
        self._device: Device | None = None

    @property
    def device(self) -> Device:
        """Found when it is first asked for: parts that start others leave the GPU alone."""
        if self._device is None:
            self._device = devices.find("cpu" if self.choice == "cpu" else "auto")
            kernel_selection.select_kernels(self._device)
        return self._device

    @property
    def timed_seconds(self) -> float:
        """Of a measurement; --quick only tries whether it runs."""
        return 0.1 if self.quick else TIMED_SECONDS

    @property
    def chunk_bytes(self) -> int:
        """Of logits, as runs take them on this device."""
        return logits_chunk_bytes(self.device.memory_bytes, processor=not self.on_gpu)

    @property
    def on_gpu(self) -> bool:
        return self.device.torch_device.type == "cuda"

    def shape(self, preset: str, tokens: int) -> tuple[ModelConfig, int]:
        """A preset's shape with this context, and its vocabulary; a tiny one where that is asked for."""
        if self.quick:
            return build(ModelConfig, TINY), 500
        kinds = PRESETS[preset].config | {"context_length": tokens}
        return build(ModelConfig, kinds), TRAINED.get(preset, PRESETS[preset].vocab_size)


# --- 1. doctor, attention ------------------------------------------------------------------------------------------


def doctor(setting: Setting) -> None:
    command = [sys.executable, "-m", "bloomery.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=0.8 * setting.seconds)
    if done.stdout.strip().endswith("}"):
        found = json.loads(done.stdout)
        say(
            doctor_exit=found["exit"],
            findings=[{"id": f["id"], "status": f["status"], "value": f["value"]} for f in found["findings"]],
        )
    else:
        say(doctor_exit=done.returncode, doctor_error=(done.stderr.strip().splitlines() or ["no message"])[-1])
    say(
        device=setting.device.name,
        memory_gib=round(setting.device.memory_bytes / GIB, 1),
        kernels=kernel_selection.state(setting.device),
    )
    tokens, rows = (64, 1) if setting.quick else (TOKENS, 2)
    for (heads, keys), packed, dtype in product(HEADS, (True, False), (torch.bfloat16, torch.float32)):
        say(attention=[attention_taken(setting.device, heads, keys, tokens, rows, packed, dtype)])


def attention_taken(
    device: Device, heads: int, keys: int, tokens: int, rows: int, packed: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """What torch's choice is for these heads, and the operation that took the most time in ours, forward and back."""
    where = device.torch_device
    q, k, v = (
        torch.randn(rows, count, tokens, 64, device=where, dtype=dtype, requires_grad=True)
        for count in (heads, keys, keys)
    )
    plain = AttentionMask(num_queries=tokens, num_keys=tokens, device=where)
    mask = _documents(tokens, where, rows, tokens // 3 + 1) if packed else plain
    visible = mask.mask()[:, None] if packed else None
    choice = torch._fused_sdp_choice(q, k, v, visible, 0.0, not packed, enable_gqa=heads != keys)
    row: dict[str, Any] = {"heads": f"{heads}/{keys}", "packed": packed, "dtype": str(dtype).removeprefix("torch.")}
    row["sdpa"] = SDPBackend(choice).name.lower() if choice in range(5) else str(choice)

    def work() -> None:
        output = fused_attention(q, k, v, mask)
        torch.autograd.grad(output.float().sum(), (q, k, v))

    work()  # the first compiles
    began = time.perf_counter()
    _, top = profiled(device, work)
    row["ms_profiled"] = round(1e3 * (time.perf_counter() - began), 2)
    return row | {"longest": top[0]["kernel"] if top else ""}


def profiled(device: Device, work: Callable[[], object]) -> tuple[float, list[dict[str, Any]]]:
    """Milliseconds of all kernels of some work, and the kernels that took the most of them."""
    gpu = device.torch_device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if gpu else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        work()
        device.synchronize()
    events = [event for event in profile.key_averages() if not gpu or event.device_type.name == "CUDA"]

    def own(event: Any) -> float:
        return float(event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3

    total = sum(map(own, events)) or 1.0
    longest = sorted(events, key=own, reverse=True)[:SHOWN_KERNELS]
    return total, [
        {
            "kernel": event.key[:120],
            "ms": round(own(event), 3),
            "share": round(own(event) / total, 3),
            "calls": event.count,
        }
        for event in longest
        if own(event)
    ]


# --- 2. tests ------------------------------------------------------------------------------------------------------


def tests(setting: Setting) -> None:
    if setting.choice == "cpu":
        say(tests=GPU_ONLY)
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", "--tb=line", str(ROOT / "tests" / "model")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=0.95 * setting.seconds
    )
    lines = done.stdout.strip().splitlines()
    say(tests=lines[-1] if lines else done.stderr.strip()[-300:], tests_exit=done.returncode)
    say(failed=[{"test": line} for line in lines if line.startswith(("FAILED", "ERROR"))])


# --- 3. training ---------------------------------------------------------------------------------------------------


def train(setting: Setting) -> None:
    say(measured_tflops=round(measured_peak(setting.device) / 1e12, 2))
    for preset, compiled, float8 in [*((p, c, "off") for c in (False, True) for p in TRAINED), *SHORT]:
        if compiled and setting.quick and not setting.on_gpu:
            say(
                training=[
                    {"preset": preset, "compile": True, "float8": float8, "note": "left out: it compiles too long"}
                ]
            )
            continue
        try:
            with chunks_of(setting.chunk_bytes):
                row = trained(setting, preset, compiled, float8)
        except (torch.OutOfMemoryError, HardwareError) as error:
            row = {"preset": preset, "compile": compiled, "float8": float8, "note": str(error).splitlines()[0]}
        say(training=[row])
        devices.give_back_memory()


SHORT: tuple[tuple[str, bool, Float8], ...] = (("gpt2-124m", True, "head"), ("plasma-500m", True, "all"))
"""Preset, whether blocks are compiled, and float8: with a residual stream in bfloat16."""


def trained(setting: Setting, preset: str, compiled: bool, float8: Float8) -> dict[str, Any]:
    """Some steps; with `float8`, the residual stream is in bfloat16 too."""
    device = setting.device
    if float8 != "off":
        check_float8(device)
    model_config, vocab_size = setting.shape(preset, TOKENS)
    precision = Precision.decide("auto", device)
    rows, planned = planned_rows(setting, model_config, vocab_size)
    model = random_model(model_config, vocab_size, device).train()
    set_short_formats(model, "float32" if float8 == "off" else "bfloat16", float8, device.torch_device)
    optimizers = Optimizers(model, AdamW(), precision.muon_dtype)
    batch = packed_batch(MICRO_BATCHES * rows, model_config.context_length, vocab_size)
    micro_batch = packed_batch(rows, model_config.context_length, vocab_size)
    row: dict[str, Any] = {"preset": preset, "compile": compiled, "float8": float8, "rows": rows}
    row["planned_gib"] = round(planned / GIB, 2)
    if compiled:
        trials = [partial(passed, model, micro_batch, precision)]
        verdict = compile_blocks(model, "on", trials, limit_seconds=0.3 * setting.seconds)
        row["verdict"] = verdict.why
    reset_peak(device)
    norm = torch.zeros(())

    def step() -> float:
        nonlocal norm
        loss = accumulate_gradients(model, batch, rows, precision).loss
        norm = collectives.gradient_norm(gradients(model))
        optimizers.step(clipping(1.0, norm))
        optimizers.zero_grad()
        return loss

    seconds, losses = paced(device, step, setting.timed_seconds)
    speed = batch.ids.size / seconds
    work = speed * cost(model_config, vocab_size).train_flops_per_token
    row |= {
        "tokens_per_second": round(speed),
        "ms_a_step": round(1e3 * seconds, 2),
        "mfu_of_measured": round(work / measured_peak(device), 4),
    }
    if listed := listed_peak(device):
        row["mfu_of_listed"] = round(work / listed, 4)
    row |= {f"peak_{name}_gib": round(size / GIB, 2) for name, size in peaks(device).items()}
    row["loss"] = round(losses[-1], 4)
    row["syncs_of_a_micro_batch"] = synchronizations(
        device, lambda: accumulate_gradients(model, micro_batch, rows, precision)
    )
    optimizers.zero_grad()
    total, top = profiled(device, step)
    row |= {"kernel_ms_a_step": round(total, 2), "busy": round(total / 1e3 / seconds, 3)}
    words = [preset, *(["compiled"] if compiled else []), *(["float8"] if float8 != "off" else [])]
    say(**{f"top_kernels_{'_'.join(words)}": top})
    return row


def passed(model: Transformer, batch: Batch, precision: Precision) -> tuple[float, float]:
    """Loss and gradient norm of a pass, whose gradients are gone."""
    loss = accumulate_gradients(model, batch, len(batch.ids), precision).loss
    norm = float(collectives.gradient_norm(gradients(model)))
    model.zero_grad(set_to_none=True)
    return loss, norm


def planned_rows(setting: Setting, model: ModelConfig, vocab_size: int) -> tuple[int, int]:
    """As many rows as a trace finds room for, at most LARGEST_ROWS; and the bytes that it finds."""
    rows = 4 if setting.quick else LARGEST_ROWS
    while True:
        step = TracedStep(
            model=model,
            vocab_size=vocab_size,
            optimizer=AdamW(),
            activation_checkpointing="none",
            precision=setting.device.compute_dtype,
            rows=rows,
            accumulates=True,
            on_processor=not setting.on_gpu,
            logits_chunk_bytes=setting.chunk_bytes,
        )
        peak = trace(step).peak
        if rows == 1 or not setting.on_gpu or peak < 0.9 * setting.device.free_bytes():
            return rows, peak
        rows //= 2


def random_model(model_config: ModelConfig, vocab_size: int, device: Device) -> Transformer:
    """On the device, without a pass through the host's memory."""
    model = on_meta(model_config, vocab_size)
    for name, _ in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        empty = torch.empty(getattr(module, leaf).shape, device=device.torch_device)
        setattr(module, leaf, nn.Parameter(fill(name, empty)))
    if model_config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model.to(device.torch_device)


def fill(name: str, weight: Tensor) -> Tensor:
    if weight.dim() > 1:
        return weight.normal_(0.0, 0.02)
    return weight.fill_(1.0 if "norm.weight" in name else 0.0)


def packed_batch(rows: int, tokens: int, vocab_size: int) -> Batch:
    """Rows of three documents each."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (rows, tokens + 1))
    place = np.arange(tokens)
    segments = np.broadcast_to(place // (tokens // 3 + 1), (rows, tokens)).copy()
    positions = np.broadcast_to(place % (tokens // 3 + 1), (rows, tokens)).copy()
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), positions, segments, np.arange(rows))


def paced(device: Device, step: Callable[[], float], seconds: float) -> tuple[float, list[float]]:
    """The median time of some steps after the first, and their losses."""
    losses = [step() for _ in range(WARM_STEPS)]
    device.synchronize()
    times = list[float]()
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 100):
        began = time.perf_counter()
        losses.append(step())
        device.synchronize()
        times.append(time.perf_counter() - began)
    return float(np.median(times)), losses


def reset_peak(device: Device) -> None:
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks(device: Device) -> dict[str, int]:
    """Bytes of tensors, and of what the allocator holds for them. Nothing on a CPU, where a process has much else."""
    if device.torch_device.type != "cuda":
        return {}
    return {"tensors": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def synchronizations(device: Device, work: Callable[[], object]) -> int | None:
    """How often the host waits for the device within a micro-batch; the loss that is read at its end included."""
    if device.torch_device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


# --- 5. kernels ------------------------------------------------------------------------------------------------------


def kernels(setting: Setting) -> None:
    device = setting.device
    if not devices.compiles_kernels(device.torch_device):
        say(kernels=GPU_ONLY if not setting.on_gpu else "Triton is not installed")
        return
    for name, shape, ours, torchs, size in kernel_cases(setting):
        row: dict[str, Any] = {"kernel": name, "shape": shape}
        for label, work in (("ours", ours), ("torch", torchs)):
            try:
                row[f"{label}_ms"] = round(milliseconds(device, work), 4)
            except (RuntimeError, ValueError) as error:
                row[f"{label}_error"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if "ours_ms" in row and "torch_ms" in row:
            row["times_as_fast"] = round(row["torch_ms"] / row["ours_ms"], 3)
        if "ours_ms" in row and size:
            row["gb_per_second"] = round(size / row["ours_ms"] / 1e6, 1)
        say(kernels=[row])


Case = tuple[str, str, Callable[[], object], Callable[[], object], int]
"""Kernel, shape, ours, torch's, and the bytes that have to move."""


def torchs_norm(x: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    return F.rms_norm(x, (x.shape[1],), gain, 1e-6).to(dtype)


def kernel_cases(setting: Setting) -> Iterator[Case]:
    where, dtype = setting.device.torch_device, setting.device.compute_dtype
    tokens = 256 if setting.quick else LARGEST_ROWS * TOKENS

    def numbers(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=where, dtype=kind)

    for width in (768, 1280, 4096):
        x, gain, back = (
            numbers(tokens, width).requires_grad_(),
            torch.ones(width, device=where, requires_grad=True),
            numbers(tokens, width, kind=dtype),
        )

        def normed(y: Callable[[], Tensor], x: Tensor = x, gain: Tensor = gain, back: Tensor = back) -> object:
            return torch.autograd.grad(y(), (x, gain), back)

        ours = partial(normed, partial(triton.rms_norm, x, gain, 1e-6, dtype))
        plain = partial(normed, partial(torchs_norm, x, gain, dtype))
        yield "rms-norm", f"{tokens}x{width}", ours, plain, tokens * width * (4 + 2 + 4 + 2 + 4)
    for vocab_size in (48_000, 50_304, 128_256):
        rows = min(tokens, chunk_tokens(vocab_size))
        logits, targets = numbers(rows, vocab_size, kind=dtype), torch.randint(vocab_size, (rows,), device=where)
        loss = partial(triton.cross_entropy_, logits, targets)
        yield "cross-entropy", f"{rows}x{vocab_size}", loss, partial(_plain_loss, logits, targets), 3 * logits.nbytes
    for heads, normed_too in product((20, 4), (False, True)):
        q = numbers(tokens // TOKENS or 1, min(tokens, TOKENS), heads, 64, kind=dtype).transpose(1, 2).requires_grad_()
        angle = numbers(1, 1, q.shape[2], 64, kind=dtype)
        weight = torch.ones(64, device=where, requires_grad=True) if normed_too else None
        wanted = [q, *([weight] if weight is not None else [])]

        def turned(
            kind: Callable[..., Tensor],
            q: Tensor = q,
            angle: Tensor = angle,
            weight: Tensor | None = weight,
            wanted: list[Tensor] = wanted,
        ) -> object:
            return torch.autograd.grad(kind(q, angle, angle, weight), wanted, torch.ones_like(q))

        ours = partial(turned, lambda q, c, s, w: triton.rotate(q, c, s, w, None if w is None else 1e-6))
        yield (
            f"rotary{'-norm' if normed_too else ''}",
            str(tuple(q.shape)),
            ours,
            partial(turned, _torchs),
            4 * q.nbytes,
        )
    side = 256 if setting.quick else 4096
    for base, rows in product(("int8", "int4", "nf4"), (1, 16)):
        matrix, x = frozen(nn.Linear(side, side, device=where), base), numbers(rows, side, kind=dtype)  # type: ignore[arg-type]
        size = kept_bytes(matrix)
        yield f"gemv-{base}", f"{rows}x{side}x{side}", partial(_few, matrix, x), partial(_dense, matrix, x), size


def milliseconds(device: Device, work: Callable[[], object]) -> float:
    """The median of some times, after two."""
    times = list[float]()
    for _ in range(12):
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times[2:]))


# --- 6. adapters on 8 billion weights --------------------------------------------------------------------------------


def large(setting: Setting) -> None:
    device, tokens = setting.device, 2048
    model_config, vocab_size = setting.shape("llama-3.1-8b", tokens)
    precision = Precision.decide("auto", device)
    for base in ("bfloat16", "nf4"):
        adapters = Lora(base_dtype=base)
        step = TracedStep(
            model=model_config,
            vocab_size=vocab_size,
            optimizer=AdamW(),
            activation_checkpointing="full",
            precision=device.compute_dtype,
            rows=1,
            accumulates=False,
            on_processor=not setting.on_gpu,
            logits_chunk_bytes=setting.chunk_bytes,
            lora=adapters,
        )
        planned = trace(step).peak
        row: dict[str, Any] = {
            "base": base,
            "tokens": model_config.context_length,
            "planned_gib": round(planned / GIB, 2),
        }
        if setting.on_gpu and planned > 0.95 * device.free_bytes():
            say(adapters=[row | {"note": "it does not fit this device"}])
            continue
        try:
            with chunks_of(setting.chunk_bytes):
                say(adapters=[row | adapted(setting, model_config, vocab_size, adapters, precision)])
        except torch.OutOfMemoryError as error:
            say(adapters=[row | {"note": str(error).splitlines()[0]}])
        devices.give_back_memory()


def adapted(
    setting: Setting, model_config: ModelConfig, vocab_size: int, adapters: Lora, precision: Precision
) -> dict[str, Any]:
    device = setting.device
    reset_peak(device)
    model = frozen_model(model_config, vocab_size, device, adapters.base_dtype)
    model_lora.attach(model, adapters, seed=0)
    model.to(device.torch_device).train()
    checkpoint_activations(model, "full")
    optimizers = Optimizers(model, AdamW(), precision.muon_dtype)
    batch = packed_batch(1, model_config.context_length, vocab_size)

    def step() -> float:
        loss = accumulate_gradients(model, batch, 1, precision).loss
        optimizers.step(clipping(1.0, collectives.gradient_norm(gradients(model))))
        optimizers.zero_grad()
        return loss

    seconds, losses = paced(device, step, setting.timed_seconds)
    facts = {"tokens_per_second": round(batch.ids.size / seconds), "loss": round(losses[-1], 3)}
    return facts | {f"peak_{name}_gib": round(size / GIB, 2) for name, size in peaks(device).items()}


def frozen_model(
    model_config: ModelConfig, vocab_size: int, device: Device, base: str, kept_as: str = "float32"
) -> Transformer:
    """Weights made on the device one after another, in the format that they stay in."""
    model = on_meta(model_config, vocab_size)
    for name, weight in own_weights(model).items():
        numbers = fill(name, torch.empty(weight.shape, device=device.torch_device))
        put_weight(model, name, numbers, kept_as, device.torch_device, base)  # type: ignore[arg-type]
    if model_config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model


# --- 7. decoding -----------------------------------------------------------------------------------------------------


DECODED_LAYERS = 2
"""Of an 8B model, that have weights of their own; the others share them in turn, to be built in time. They are larger
than the caches of a GPU."""


def decode(setting: Setting) -> None:
    device = setting.device
    bandwidth = probes.copy_rate(device)
    say(gb_per_second=round(bandwidth / 1e9, 1))
    prompt, count = list(range(1, 33)), 16 if setting.quick else 48
    for preset, form in product(("gpt2-124m", "plasma-500m", "llama-3.1-8b"), ("bfloat16", "int8", "nf4")):
        model_config, vocab_size = setting.shape(preset, TOKENS)
        row: dict[str, Any] = {"preset": preset, "weights": form}
        try:
            model = repeated_model(model_config, vocab_size, device, form)
            engine = Engine(model, vocab_size)
            table = 0 if model_config.tie_embeddings else model.head.weight.nbytes
            read = sum(map(kept_bytes, model.blocks)) + (table or model.embed.weight.nbytes)
            speed, limit = tokens_per_second(device, engine, [prompt], count), bandwidth / read
            row |= {
                "gib": round(read / GIB, 3),
                "tokens_per_second": round(speed, 1),
                "limit": round(limit, 1),
                "share": round(speed / limit, 4),
            }
            if preset == "llama-3.1-8b":
                row["tokens_per_second_of_8"] = round(tokens_per_second(device, engine, [prompt] * 8, count), 1)
            row["captures"] = sum(one is not None for step in engine._idle.values() for one in step.graphs.values())
            del model, engine
        except torch.OutOfMemoryError as error:
            row["note"] = str(error).splitlines()[0]
        devices.give_back_memory()
        say(decoding=[row])


def tokens_per_second(device: Device, engine: Engine, prompts: list[list[int]], count: int) -> float:
    """Of all prompts together, after the prompts: the best of two times, behind one in which steps are captured."""
    best = math.inf
    for _ in range(3):
        rows = engine.rows(prompts, [count] * len(prompts))
        logits, every = rows.begin(), range(len(prompts))
        device.synchronize()
        began = time.perf_counter()
        for _ in range(count - 1):
            logits = rows.extend(every, logits.argmax(dim=-1).tolist())
        device.synchronize()
        best = min(best, time.perf_counter() - began)
        del rows
    return (count - 1) * len(prompts) / best


def repeated_model(model_config: ModelConfig, vocab_size: int, device: Device, form: str) -> Transformer:
    """A model whose layers share the weights of the first few in turn."""
    few = min(model_config.num_layers, DECODED_LAYERS if model_config.hidden_size >= 4096 else model_config.num_layers)
    model = on_meta(model_config, vocab_size)
    made = frozen_model(model_config.model_copy(update={"num_layers": few}), vocab_size, device, "float32", form)
    model.embed, model.positions, model.norm, model.head = made.embed, made.positions, made.norm, made.head
    for number, block in enumerate(model.blocks):
        for path, module in list(made.blocks[number % few].named_modules()):
            if not list(module.children()):
                parent, _, name = path.rpartition(".")
                setattr(block.get_submodule(parent), name, module)
    return model.to(device.torch_device)


# --- 8. AMD ----------------------------------------------------------------------------------------------------


def amd(setting: Setting) -> None:
    if setting.device.vendor != "amd":
        say(amd="no AMD GPU")
        return
    switches: tuple[tuple[str, dict[str, str]], ...] = (
        ("attention-flash", {}),
        ("attention-flash", {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}),
        ("attention-efficient", {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}),
        ("speed", {"TORCH_BLAS_PREFER_HIPBLASLT": "0"}),
        ("speed", {"TORCH_BLAS_PREFER_HIPBLASLT": "1"}),
    )
    for probe, env in switches:
        command = [sys.executable, "-m", "bloomery.hw.probes", probe]
        row: dict[str, Any] = {"probe": probe, "with": " ".join(f"{name}={value}" for name, value in env.items())}
        try:
            done = subprocess.run(
                command,
                env=os.environ | env,
                capture_output=True,
                text=True,
                check=False,
                timeout=0.3 * setting.seconds,
            )
        except subprocess.TimeoutExpired:
            say(amd=[row | {"ended": "did not end in time"}])
            continue
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        facts = {key: value for answer in answers for key, value in answer.items()}
        kept = {key: facts[key] for key in ("absent", "milliseconds", "flops", "bytes_per_second") if key in facts}
        say(amd=[row | {"ended": done.returncode} | kept])


RUN: dict[str, Callable[[Setting], None]] = {
    "doctor": doctor,
    "tests": tests,
    "train": train,
    "kernels": kernels,
    "large": large,
    "decode": decode,
    "amd": amd,
}


def main(parts: Mapping[str, Callable[[Setting], None]]) -> None:
    """Run the part that the command line names."""
    parts[sys.argv[1]](Setting(**json.loads(sys.argv[2])))


if __name__ == "__main__":
    main(RUN)
