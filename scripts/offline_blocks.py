"""
Compile for GPUs what torch.compile writes for a block of ours, on a machine without a GPU.

    python scripts/offline_blocks.py TARGET             one JSON object; TARGET is gfx1151, gfx942, 90, …
    python scripts/offline_blocks.py --write            all TARGETS, into benchmarks/results/offline_blocks.json

The block is traced on the CPU, forward and backward. Its graphs are handed to torch's compiler as graphs of a GPU
whose facts are pretended. Each Triton kernel that the compiler writes is compiled for the target, in every
configuration it would try. Matmuls and attention are those of libraries, and are not compiled here.

This takes private parts of torch 2.13 and Triton 3.7, and says nothing about numbers or speed on a device.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "offline_blocks.json"
TARGETS = ("gfx1151", "gfx1100", "gfx942", "90")
SHAPE = {"hidden_size": 256, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 704}
ROWS, TOKENS = 2, 128
LIMIT_SECONDS = 900
LOCAL_BYTES = {"gfx": 64 * 1024, "cuda": 227 * 1024}
"""Of shared memory that a launch may ask for, on the smallest of the targets."""
MOST_SPILLS = 16


def pretend(target: str) -> tuple[Any, Any]:
    """A torch and a Triton whose GPU is the target. Returns its facts, and Triton's word for it. Call it first."""
    import torch

    hip = target.startswith("gfx")
    torch.version.hip, torch.version.cuda = ("7.2.0", None) if hip else (None, "13.0")
    major, minor = (int(target[3:-2]), int(target[-2], 16)) if hip else (int(target) // 10, int(target) % 10)
    warp = 64 if target.startswith("gfx9") else 32
    facts = types.SimpleNamespace(
        name=target,
        major=major,
        minor=minor,
        gcnArchName=target,
        multi_processor_count=32,
        total_memory=2**36,
        regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=warp,
        shared_memory_per_block=2**16,
        shared_memory_per_block_optin=2**16,
        L2_cache_size=2**21,
        is_integrated=0,
    )
    from torch._dynamo.device_interface import CudaInterface

    answers: dict[str, Any] = {
        "get_device_properties": lambda *_, **__: facts,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda *_: None,
        "get_raw_stream": lambda *_: 0,
        "set_device": lambda *_: None,
        "exchange_device": lambda *_: 0,
        "maybe_exchange_device": lambda *_: 0,
    }
    for name, answer in answers.items():
        setattr(CudaInterface, name, staticmethod(answer))
    for name in ("get_device_properties", "current_device"):
        setattr(CudaInterface.Worker, name, staticmethod(answers[name]))
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    of_triton = GPUTarget("hip", target, warp) if hip else GPUTarget("cuda", int(target), 32)
    limits = {"max_shared_mem": 2**16, "multiprocessor_count": 32, "warpSize": warp, "max_num_regs": 2**16}
    driver = types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda _: limits | {"sm_clock_rate": 1, "mem_clock_rate": 1}),
        get_current_target=lambda: of_triton,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        map_python_to_cpp_type=lambda kind: kind,
    )
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda *_: None
    for known in vars(torch.utils._triton).values():  # what was asked before there was a GPU
        getattr(known, "cache_clear", lambda: None)()
    vars(torch._C).setdefault("_cuda_getCurrentRawStream", lambda _: 0)
    inverted: Any = torch.bitwise_not
    vars(torch)["Tensor"].__invert__ = lambda tensor: inverted(tensor)  # its own asks for the device
    return facts, of_triton


def graphs() -> list[tuple[bool, Any, Any]]:
    """Of a block: whether it is the backward pass, the graph, and its inputs."""
    from bloomery.model.attention import AttentionMask
    from bloomery.model.config import ModelConfig
    from bloomery.model.layers import rotation
    from bloomery.model.transformer import Block

    import torch
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    config = ModelConfig(**SHAPE, context_length=TOKENS)
    block = Block(config, 0)
    x = torch.randn(ROWS, TOKENS, config.hidden_size, requires_grad=True)
    mask = AttentionMask(num_queries=TOKENS, num_keys=TOKENS, device=x.device)
    found = list[tuple[bool, Any, Any]]()

    def keep(backward: bool) -> Any:
        def compiler(graph: Any, inputs: Any) -> Any:
            found.append((backward, graph, inputs))
            return graph

        return compiler

    def backend(graph: Any, inputs: Any) -> Any:
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=keep(False),
            bw_compiler=keep(True),
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )

    with torch.autocast("cpu", dtype=torch.bfloat16):
        rope = rotation(torch.arange(TOKENS)[None], config, torch.bfloat16)
        block.attention.prepare(mask, x)
        y = torch.compile(block, backend=backend, fullgraph=True)(x, rope, mask, None)
    y.sum().backward()
    return found


def compiled(target: str) -> dict[str, Any]:
    """What came of all kernels of both graphs."""
    os.environ |= {name: tempfile.mkdtemp() for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    traced = graphs()  # before any GPU is pretended
    facts, _ = pretend(target)
    import torch
    import torch._inductor.compile_fx as compile_fx
    import triton
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    kernels = list[dict[str, Any]]()

    def precompile(self: Any, *_: Any, **__: Any) -> None:
        for config in self.configs:
            meta = self._create_compile_meta(config)
            of_triton = heuristics.GPUTarget(meta["device_type"], meta["cc"], self.device_props.warp_size_or_default)
            source = heuristics.ASTSource(self.fn, meta["signature"], meta["constants"], meta["configs"][0])
            options = self._create_compile_options(config, meta)
            made = triton.compile(source, target=of_triton, options=options)
            spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", made.asm.get("amdgcn", ""))
            kernels.append(
                {
                    "kernel": self.inductor_meta.get("kernel_name", "?"),
                    "shared_bytes": made.metadata.shared,
                    "spills": int(spills[1]) if spills else 0,
                    "binary": next(name for name in ("hsaco", "cubin") if name in made.asm),
                }
            )

    def there(tensor: Any) -> Any:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")

    answers: dict[str, Any] = {
        "get_device_properties": lambda *_, **__: facts,
        "get_device_capability": lambda *_, **__: (facts.major, facts.minor),
        "get_device_name": lambda *_: facts.name,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "is_bf16_supported": lambda *_, **__: True,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(heuristics.CachingAutotuner, "precompile", precompile))
        for backward, graph, inputs in traced:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            with fake, torch.no_grad():
                moved = [there(one) if isinstance(one, torch.Tensor) else one for one in inputs]
                left = iter(moved)
                for node in graph.graph.nodes:
                    if node.op == "call_function" and "device" in node.kwargs:
                        node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
                    if node.op == "placeholder":
                        node.meta["val"] = next(left)
                    elif "val" in node.meta:
                        node.meta["val"] = tree_map_only(torch.Tensor, there, node.meta["val"])
            graph.recompile()
            with torch.no_grad(), torch._guards.tracing(torch._guards.TracingContext(fake)):
                compile_fx.compile_fx_inner(graph, moved, is_backward=backward)
    most = LOCAL_BYTES["gfx" if target.startswith("gfx") else "cuda"]
    return {
        "target": target,
        "kernels": len({one["kernel"] for one in kernels}),
        "configurations": len(kernels),
        "most_spills": max(one["spills"] for one in kernels),
        "most_shared_bytes": max(one["shared_bytes"] for one in kernels),
        "binary": sorted({one["binary"] for one in kernels}),
        "fits": all(one["shared_bytes"] <= most and one["spills"] <= MOST_SPILLS for one in kernels),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.target:
        print(json.dumps(compiled(options.target)))
        return
    if not options.write:
        parser.error("say a target or --write")
    rows = []
    for target in TARGETS:
        command = [sys.executable, __file__, target]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_SECONDS)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
