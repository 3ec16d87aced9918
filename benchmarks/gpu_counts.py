"""
What does a training step ask of a GPU? Counted on tensors without numbers, so that it needs none.

    python benchmarks/gpu_counts.py [--json] [--quick] [--presets NAME …] [--into FILE]

For each preset, of a micro-batch and of an update: kernels, bytes that kernels other than matmuls read and write, work
of matmuls, and those matmuls whose sides are no multiples of 8 numbers, which GPUs compute several times slower. An
operation that is no view counts as one kernel. Attention counts as a kernel forward and two backward, of the causal
half; what torch takes there is a question for `make gpu`. Operations that read a number of the device on the host are
counted apart: within a micro-batch there are none.

`fused` counts once more, as if kernels between matmuls were fused: operations that follow each other without a matmul
between them are one kernel, which reads its inputs once and writes what others read. That is the least a compiler can
reach without computing anything again.

The code is that of training, as it runs on a GPU without Triton kernels of ours and without torch.compile. --quick
takes GPT-2 124M alone.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bloomery.core.config import build
from bloomery.core.pipeline import machine, versions
from bloomery.model.attention import AttentionMask
from bloomery.model.config import PRESETS, ModelConfig, cost
from bloomery.model.kernels import cpu
from bloomery.train.collectives import total_norm
from bloomery.train.config import AdamW, Muon, Optimizer
from bloomery.train.loss import chunks_of
from bloomery.train.plan.memory import LARGEST_CHUNK_BYTES
from bloomery.train.plan.trace import TracedStep, attention_elsewhere, no_device
from bloomery.train.precision import Precision
from bloomery.train.step import Placed, gradients, placed_losses

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

VOCABULARIES = {"gpt2-124m": 50_263}
"""Of recipes, where they are not the preset's."""
TOKENS_AT_ONCE = 2**15
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ALIGNED = 8
"""Numbers of 2 bytes in 16 bytes."""
NO_KERNELS = frozenset(("device", "empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh"))
"""Operations that ask nothing of the device, besides views."""
HOST_READS = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "item"))
PRESET_NAMES = ("gpt2-124m", "plasma-235m", "plasma-500m", "harness-220m", "harness-1b")
WRITES_ONLY = frozenset(("zeros", "zeros_like", "new_zeros", "fill_", "zero_", "full", "ones_like", "arange", "copy_"))


@dataclass
class Counts:
    """Of some work on a device."""

    kernels: int = 0
    bytes_moved: int = 0
    """By kernels that are no matmuls."""
    matmul_flops: int = 0
    matmuls: int = 0
    unaligned: Counter[str] = field(default_factory=Counter)
    """Matmuls in a short format with a side that is no multiple of ALIGNED, by their sides."""
    unaligned_flops: int = 0
    host_reads: int = 0
    attention_flops: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    fused_kernels: int = 0
    fused_bytes: int = 0

    def facts(self) -> dict[str, Any]:
        facts = asdict(self) | {"by_name": dict(self.by_name.most_common(12)), "unaligned": dict(self.unaligned)}
        return facts | {"gigabytes_moved": round(self.bytes_moved / 1e9, 2)}


class DispatchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what happens within."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.operations: list[Operation] = []
        self._storages: list[torch.UntypedStorage] = []
        """Held, so that none gets the address of another."""

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self.counts.fused_kernels, self.counts.fused_bytes = fused_kernels(self.operations)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        output = function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        if name in HOST_READS:
            self.counts.host_reads += 1
        if function.is_view or name in NO_KERNELS or name.startswith("_unsafe_view"):
            return output
        inputs = [one for one in tree_iter((arguments, keywords)) if isinstance(one, Tensor)]
        results = [one for one in tree_iter(output) if isinstance(one, Tensor)]
        self.counts.kernels += 1
        self.counts.by_name[name] += 1
        held = [[one.untyped_storage() for one in tensors] for tensors in (inputs, results)]
        self._storages += [*held[0], *held[1]]
        sizes = [{one._cdata: one.nbytes() for one in storages} for storages in held]
        self.operations.append(Operation(name not in PRODUCTS, *sizes))
        if name in PRODUCTS:
            self._multiply(inputs[-2:])
        else:
            read = [] if name in WRITES_ONLY else inputs
            self.counts.bytes_moved += sum(one.numel() * one.element_size() for one in (*read, *results))
        return output

    def _multiply(self, sides: list[Tensor]) -> None:
        left, right = sides
        batch, rows, inner, columns = (
            (1, *left.shape, right.shape[1]) if left.dim() == 2 else (*left.shape, right.shape[2])
        )
        flops = 2 * batch * rows * inner * columns
        self.counts.matmul_flops += flops
        self.counts.matmuls += 1
        if left.element_size() == 2 and any(side % ALIGNED for side in (rows, inner, columns)):
            self.counts.unaligned[f"{rows}x{inner}x{columns}"] += 1
            self.counts.unaligned_flops += flops


@dataclass
class Operation:
    fusible: bool
    read: dict[int, int]
    """Storage -> its bytes."""
    written: dict[int, int]


Version = tuple[int, int]
"""A storage, and how often it has been written."""


def fused_kernels(operations: list[Operation]) -> tuple[int, int]:
    """
    How many kernels all but matmuls become, and the bytes that they move. The level of an operation is the number of
    matmuls on the longest path to it. Two that are connected and have the same level are one kernel.
    """
    versions, levels, producers = Counter[int](), dict[Version, int](), dict[Version, int]()
    sizes, users = dict[Version, int](), dict[Version, list[int]]()
    reads, writes, roots = list[list[Version]](), list[list[Version]](), list(range(len(operations)))
    own_levels = list[int]()

    def root(number: int) -> int:
        while roots[number] != number:
            roots[number] = roots[roots[number]]
            number = roots[number]
        return number

    for number, operation in enumerate(operations):
        reads.append([(one, versions[one]) for one in operation.read])
        sizes |= {version: operation.read[version[0]] for version in reads[-1]}
        level = max((levels.get(version, 0) for version in reads[-1]), default=0) + (not operation.fusible)
        own_levels.append(level)
        for version in reads[-1]:
            users.setdefault(version, []).append(number)
            before = producers.get(version)
            joins = before is not None and operation.fusible and operations[before].fusible
            if joins and before is not None and own_levels[before] == level:
                roots[root(number)] = root(before)
        versions.update(operation.written.keys())
        writes.append([(one, versions[one]) for one in operation.written])
        for version in writes[-1]:
            sizes[version], levels[version] = operation.written[version[0]], level
            producers[version] = number
    kernels = dict[int, set[int]]()
    for number, operation in enumerate(operations):
        if operation.fusible:
            kernels.setdefault(root(number), set()).add(number)
    moved = 0
    for members in kernels.values():
        made = {version for number in members for version in writes[number]}
        inputs = {version[0]: sizes[version] for number in members for version in reads[number] if version not in made}
        outputs = {
            version[0]: sizes[version]
            for version in made
            if version not in users or any(user not in members for user in users[version])
        }
        moved += sum(inputs.values()) + sum(outputs.values())
    return len(kernels), moved


@contextmanager
def fused(counts: Counts) -> Iterator[None]:
    """Attention as a trace has it, whose work is counted."""

    def counted(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        B, H, T, E = q.shape
        W = min(mask.window or T, T)
        counts.attention_flops += int(6 * B * H * T * (E + v.shape[3]) * (W - W * W / (2 * T)))
        return attention_elsewhere(q, k, v, mask)

    token, elsewhere = cpu.ATTENTION_ELSEWHERE.set(counted), cpu.ELSEWHERE.set(True)
    try:
        yield
    finally:
        cpu.ATTENTION_ELSEWHERE.reset(token)
        cpu.ELSEWHERE.reset(elsewhere)


def counts_of(
    model: ModelConfig, vocab_size: int, rows: int, optimizer: Optimizer, *, packed: bool = True
) -> dict[str, Counts]:
    """Of a micro-batch whose gradients add to others, and of the update after it."""
    step = TracedStep(
        model=model,
        vocab_size=vocab_size,
        optimizer=optimizer,
        activation_checkpointing="none",
        precision=torch.bfloat16,
        rows=rows,
        accumulates=True,
        on_processor=False,
    )
    precision, found = (
        Precision.decide("auto", no_device(torch.bfloat16)),
        {name: Counts() for name in ("micro-batch", "update")},
    )
    with fused(found["micro-batch"]), chunks_of(LARGEST_CHUNK_BYTES), FakeTensorMode():
        transformer = step.load()
        optimizers = step.prepare(transformer, precision)
        for weight in transformer.parameters():
            weight.grad = torch.empty_like(weight)
        optimizers.step()  # the first makes what it remembers
        ids = torch.zeros((rows, model.context_length), dtype=torch.int64)
        batch = Placed(ids, ids.clone(), ids.clone() if packed else None, ids.flatten().clone(), ids.flatten().clone())
        with DispatchCounter(found["micro-batch"]):
            loss, _ = placed_losses(transformer, batch, precision, scale=1 / ids.numel())
            torch.autograd.backward(loss)
        with DispatchCounter(found["update"]):
            total_norm(gradients(transformer))
            optimizers.step()
    return found


def of_preset(name: str, optimizer: Optimizer, *, packed: bool = True) -> dict[str, Any]:
    model = build(ModelConfig, {"preset": name, "context_length": min(8192, PRESETS[name].config["context_length"])})
    vocab_size = VOCABULARIES.get(name, PRESETS[name].vocab_size)
    rows = max(1, TOKENS_AT_ONCE // model.context_length)
    found = counts_of(model, vocab_size, rows, optimizer, packed=packed)
    facts: dict[str, Any] = {"preset": name, "rows": rows, "tokens": model.context_length, "packed": packed}
    facts["optimizer"] = optimizer.kind
    facts |= {part: counts.facts() for part, counts in found.items()}
    whole = cost(model, vocab_size).train_flops_per_token * rows * model.context_length
    work = found["micro-batch"].matmul_flops + found["micro-batch"].attention_flops
    return facts | {"work_over_that_of_the_model": round(work / whole, 4)}


def as_text(row: dict[str, Any]) -> str:
    batch, update = row["micro-batch"], row["update"]
    unaligned = batch["unaligned_flops"] / batch["matmul_flops"]
    work = f"{batch['matmul_flops'] / 1e12:>6.1f} TFLOP ({unaligned:.1%} unaligned), host reads {batch['host_reads']}"
    fused = f"(fused {batch['fused_kernels']:,}, {batch['fused_bytes'] / 1e9:.1f} GB)"
    first = f"{batch['kernels']:>6,} kernels {batch['gigabytes_moved']:>7.1f} GB {fused} {work}"
    then = f"{update['kernels']:>6,} kernels {update['gigabytes_moved']:>6.1f} GB"
    return f"{row['preset']:<14} {row['optimizer']:<6} {first}; update {then}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESET_NAMES)
    parser.add_argument("--into", type=Path, help="write the result there too")
    options = parser.parse_args()
    names = ["gpt2-124m"] if options.quick else options.presets
    rows = [of_preset(name, optimizer) for name in names for optimizer in (AdamW(), Muon())]
    if not options.json:
        print("\n".join(map(as_text, rows)))
    result = {
        "name": "gpu_counts",
        "ours": {"value": rows[0]["micro-batch"]["kernels"], "unit": "kernels of a micro-batch"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine(),
        "versions": versions(),
        "notes": {"rows": rows},
    }
    if options.into:
        options.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
