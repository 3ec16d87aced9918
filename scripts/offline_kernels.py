"""
Compiles Bloomery's GPU kernels for GPUs that are not there, and says what each of them takes: registers, shared memory
(LDS), and numbers that found no register (spills). It needs Triton and no GPU.

`python scripts/offline_kernels.py [TARGET …]` prints one JSON object and exits with 1 where a limit is passed.
`--write` puts it into benchmarks/results/offline_kernels.json, and the table into docs/understand/kernels.md.
`--known` compiles nothing, and prints the table of what was written, and of which kernels one would be made now.

What is compiled is what the launching code asks Triton for when it is called with the shapes of CASES, so that a kernel
is never compiled with other constants than it is used with.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bloomery.model.kernels import triton as kernels_triton
from bloomery.model.kernels.triton import Launch, language, recorded

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "offline_kernels.json"
PAGE = ROOT / "docs" / "understand" / "kernels.md"
LDS_BYTES = 65536
"""The smallest of all targets, of one workgroup: RDNA3, RDNA4, CDNA2 and CDNA3."""
SPILLS_TOLERATED = 16
"""Registers that another version of Triton may spill: with 3.8.0 a plain product on gfx1151 has 13, with 3.7.1 none."""
THREADS = 1024
"""Of a workgroup, on every target."""


@dataclass(frozen=True)
class Target:
    gpu: GPUTarget
    machine: int | None = None
    """The number by which an AMD object says which chip it is for (LLVM, AMDGPUUsage.rst)."""


TARGETS = {
    "gfx1151": Target(GPUTarget("hip", "gfx1151", 32), 0x4A),
    "gfx1100": Target(GPUTarget("hip", "gfx1100", 32), 0x41),
    "gfx1201": Target(GPUTarget("hip", "gfx1201", 32), 0x4E),
    "gfx90a": Target(GPUTarget("hip", "gfx90a", 64), 0x3F),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 0x4C),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 0x4F),
    "sm_80": Target(GPUTarget("cuda", 80, 32)),
    "sm_90": Target(GPUTarget("cuda", 90, 32)),
    "sm_120": Target(GPUTarget("cuda", 120, 32)),
}
FULL, HALF = torch.float32, torch.bfloat16


def made(*shape: int, dtype: torch.dtype = FULL) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norm(width: int, given: torch.dtype, computed: torch.dtype, rows: int = 4096) -> None:
    x, weight = made(rows, width, dtype=given).requires_grad_(), made(width).requires_grad_()
    torch.autograd.backward(kernels_triton.rms_norm(x, weight, 1e-5, computed).sum())


def rotate(heads: int, width: int, dtype: torch.dtype, normed: bool, tokens: int = 1024) -> None:
    x = made(4, tokens, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
    weight = made(width).requires_grad_() if normed else None
    angles = made(1, 1, tokens, width, dtype=dtype)
    y = kernels_triton.rotate(x, angles, angles, weight, 1e-5 if normed else None)
    torch.autograd.backward(y, torch.empty_like(y))


def entropy(width: int, dtype: torch.dtype, grads: torch.dtype | None = None) -> None:
    logits, targets = made(1024, width, dtype=dtype), made(1024, dtype=torch.int64)
    other = None if grads is None else made(1024, width, dtype=grads)
    kernels_triton.cross_entropy_(logits, targets, z_loss=1e-4, grads=other)


def gemv(rows: int, shape: tuple[int, int], dtype: torch.dtype, base: str) -> None:
    width, outputs = shape
    blocks, groups, double = -(-width // 64), -(-width // 32), base == "nf4_double"
    codes, scales = {
        "int8": ((width,), made(outputs, 1)),
        "int4": ((groups, 16), made(outputs, groups, 2, dtype=torch.float16)),
        "nf4": ((32 * blocks,), made(outputs, blocks, dtype=torch.int8 if double else HALF)),
    }[base.partition("_")[0]]
    kernels_triton.gemv(
        made(rows, width, dtype=dtype),
        made(outputs, *codes, dtype=torch.int8 if base == "int8" else torch.uint8),
        scales,
        base.partition("_")[0],
        numbers=made(16),
        coarse=made(-(-scales.numel() // 256) + 1) if double else None,
        bias=made(outputs),
    )


CASES: Mapping[str, Callable[[], None]] = {
    "1024 wide, float32 to bfloat16": partial(norm, 1024, FULL, HALF),
    "4095 wide, float32": partial(norm, 4095, FULL, FULL),
    "8192 wide, bfloat16": partial(norm, kernels_triton.LARGEST_ROW, HALF, HALF),
    "16 heads of 64, bfloat16": partial(rotate, 16, 64, HALF, False),
    "32 heads of 128, bfloat16, normed": partial(rotate, 32, 128, HALF, True),
    "5 heads of 80, float32, normed": partial(rotate, 5, 80, FULL, True),
    "50257 logits, bfloat16": partial(entropy, 50257, HALF),
    "50304 logits, bfloat16, gradients in float8": partial(entropy, 50304, HALF, torch.float8_e5m2),
    "128256 logits, float32": partial(entropy, 128256, FULL),
    "1 × 4096 × 14336, int8, bfloat16": partial(gemv, 1, (4096, 14336), HALF, "int8"),
    "16 × 4096 × 4096, int8, bfloat16": partial(gemv, 16, (4096, 4096), HALF, "int8"),
    "1 × 4096 × 1024, int4, bfloat16": partial(gemv, 1, (4096, 1024), HALF, "int4"),
    "3 × 4096 × 4096, int4, bfloat16": partial(gemv, 3, (4096, 4096), HALF, "int4"),
    "1 × 4096 × 4096, nf4, bfloat16": partial(gemv, 1, (4096, 4096), HALF, "nf4"),
    "16 × 4096 × 14336, nf4, bfloat16": partial(gemv, 16, (4096, 14336), HALF, "nf4"),
    "1 × 1280 × 1000, nf4_double, bfloat16": partial(gemv, 1, (1280, 1000), HALF, "nf4_double"),
    "16 × 1280 × 100, nf4_double, float32": partial(gemv, 16, (1280, 100), FULL, "nf4_double"),
    "1 × 2 × 2, nf4, bfloat16": partial(gemv, 1, (2, 2), HALF, "nf4"),
    "a token, a head of 2, bfloat16, normed": partial(rotate, 1, 2, HALF, True, 1),
    "a row of 1, float32": partial(norm, 1, FULL, FULL, 1),
    "1 score, float32": partial(entropy, 1, FULL),
}


def asked() -> dict[str, Launch]:
    """What the launching code asks for, by name and case; what is asked for twice, once."""
    found: dict[str, Launch] = {}
    for case, work in CASES.items():
        with recorded() as launches:
            work()
        for one in launches:
            back = ", back" if one.constants.get("back") or one.arguments.get("sign") == -1.0 else ""
            found[f"{one.kernel}: {case}{back}"] = one
    return found


class Elsewhere:
    """What Triton asks of a GPU's driver before it compiles, answered for a GPU that is not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name].gpu

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0


def compiled(one: Launch, name: str) -> dict[str, int]:
    """
    Registers of a thread, bytes of shared memory, and registers spilled. Triton looks at the arguments as it does for a
    launch: which are 1, which 16 divides, which tensors are below 2 GiB.
    """
    target = TARGETS[name]
    triton.runtime.driver.set_active(Elsewhere(name))
    asks = getattr(language(), one.kernel).warmup
    kernel = asks(
        grid=one.grid, **in_formats_of(name, one.arguments), **one.constants, num_warps=one.warps, num_stages=one.stages
    )
    if one.warps * target.gpu.warp_size > THREADS:
        raise SystemExit(f"{one.kernel} asks for {one.warps} warps of {target.gpu.warp_size} threads")
    took = of_amd(kernel, target) if target.machine is not None else of_nvidia(kernel)
    return took | {"lds_bytes": kernel.metadata.shared}


def in_formats_of(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with float8 as the chip has it."""
    own = {torch.float8_e5m2: torch.float8_e5m2fnuz} if name == "gfx942" else {}
    return {
        place: value.to(own[value.dtype]) if isinstance(value, Tensor) and value.dtype in own else value
        for place, value in arguments.items()
    }


def of_amd(kernel: Any, target: Target) -> dict[str, int]:
    text, binary = kernel.asm["amdgcn"], kernel.asm["hsaco"]

    def number(name: str) -> int:
        found = re.search(rf"^\s*(?:- )?\.{name}:\s*(\d+)", text, re.MULTILINE)
        return int(found[1]) if found else 0

    if binary[:4] != b"\x7fELF" or int.from_bytes(binary[48:52], "little") & 0xFF != target.machine:
        raise SystemExit(f"what was compiled is not for {target.gpu.arch}")
    if number("wavefront_size") != target.gpu.warp_size:
        raise SystemExit(f"warps of {number('wavefront_size')} threads for {target.gpu.arch}")
    scratch = -(-number("private_segment_fixed_size") // 4)
    return {"registers": number("vgpr_count"), "spills": max(number("vgpr_spill_count"), scratch)}


def of_nvidia(kernel: Any) -> dict[str, int]:
    """By the program that takes objects apart, which Triton brings."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return {"registers": usage["REG"], "spills": -(-max(usage["STACK"], usage["LOCAL"]) // 4)}


def faults(found: Mapping[str, Mapping[str, Mapping[str, int]]]) -> list[str]:
    """What does not fit, wherever it was compiled."""
    rows = [(kernel, target, took) for kernel, row in found.items() for target, took in row.items()]
    lds = [f"{k} on {t}: {took['lds_bytes']} bytes of LDS" for k, t, took in rows if took["lds_bytes"] > LDS_BYTES]
    return lds + [f"{k} on {t}: {took['spills']} spills" for k, t, took in rows if took["spills"] > SPILLS_TOLERATED]


def digest(launches: Mapping[str, Launch]) -> str:
    """Of everything that the numbers follow from, besides Triton."""
    whole = hashlib.sha256((ROOT / "src/bloomery/model/kernels/triton_source.py").read_bytes())
    for name, one in launches.items():
        types = {place: value.dtype if isinstance(value, Tensor) else value for place, value in one.arguments.items()}
        whole.update(f"{name} {types} {dict(one.constants)} {one.warps} {one.stages}\n".encode())
    return whole.hexdigest()[:16]


def table(found: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    targets = list(TARGETS)
    rows = [f"| kernel, case | {' | '.join(targets)} |", f"|---|{'---|' * len(targets)}"]
    for kernel, row in found.items():
        cells = [f"{t['registers']} / {t['lds_bytes']} / {t['spills']}" for t in (row[name] for name in targets)]
        rows.append(f"| `{kernel.partition(': ')[0]}`: {kernel.partition(': ')[2]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    if "--known" in sys.argv:
        known = json.loads(RESULTS.read_text(encoding="utf-8"))
        print(json.dumps({"table": table(known["kernels"]), "digest": digest(asked())}, ensure_ascii=False))
        return
    wanted = [name for name in sys.argv[1:] if not name.startswith("--")] or list(TARGETS)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # what an earlier version of the kernels left says nothing
        launches = asked()
        found = {name: {target: compiled(one, target) for target in wanted} for name, one in launches.items()}
    told = {"triton": triton.__version__, "digest": digest(launches), "kernels": found, "faults": faults(found)}
    print(json.dumps(told, ensure_ascii=False))
    if "--write" in sys.argv:
        RESULTS.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        page, start, end = PAGE.read_text(encoding="utf-8"), "<!-- offline -->", "<!-- /offline -->"
        page = page.partition(start)[0] + f"{start}\n{table(found)}\n{end}" + page.partition(end)[2]
        PAGE.write_text(page, encoding="utf-8")
    sys.exit(1 if told["faults"] else 0)


if __name__ == "__main__":
    main()
