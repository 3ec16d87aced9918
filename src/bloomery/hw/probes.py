"""
Probe a device in a child process: memory, speed, correct kernels, training, all-reduce.

`python -m bloomery.hw.probes NAME…` runs probes of torch and prints their answers as lines of JSON. It writes each
line as soon as it is known. So after a crash the missing lines show how far the probe got.

The probes, by the names in `PROBES`:

    torch             what torch was built for and what it sees; nothing is computed
    refill            whether the memory that the device claims to have can be filled, freed and filled again
    speed             how fast the device multiplies and copies
    all-reduce        whether the GPUs of this machine can add up their numbers, each driven by a process of its own
    training          a small model that is trained: everything together, and the one probe whose answer cannot be
                      right by accident
    block-compiled    a transformer block as torch compiles it, compared with the uncompiled block on the same device
    all others        single operations of training, forward and backward, compared with the CPU's result in float64

Some GPUs have a correct forward pass and wrong gradients. So every kernel probe checks both.

Outputs get memory that is full of a canary, so that a kernel that wrote nothing, or not everything, is noticed.
Without the canary the memory may still hold the right numbers of the previous kernel.

The probes share one file because one command runs them, and all compare and print in the same way.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from bloomery.core import child
from bloomery.hw import require_torch as require_torch
from bloomery.hw.device import Device, compiles_kernels, find, is_rocm, measured_peak
from bloomery.hw.kernel_trials import NEXT_TRIAL

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CANARY = 31744.0  # 31 · 2¹⁰ is exact in every format that training uses, and no result of a probe


TIMED_SECONDS, FEWEST_ROUNDS, MOST_ROUNDS = 0.3, 5, 100
"""How long a trial is timed, and the rounds that this may take."""


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def answer(words: Sequence[str], run: Callable[[str], object]) -> None:
    """Run the probes that a command line names, and mark where the answers of each begin if there are several."""
    for name in words:
        if len(words) > 1:
            print(NEXT_TRIAL, end="", flush=True)
        run(name)


def tell_device(device: Device) -> None:
    say(device=device.name, vendor=device.vendor, dtype=str(device.compute_dtype).removeprefix("torch."))


def canaries(like: Tensor, *shape: int) -> Tensor:
    """A tensor for a kernel to write into."""
    return torch.full(shape, CANARY, device=like.device, dtype=like.dtype)


def poison(*examples: Tensor) -> None:
    """
    Fill with canaries the memory that the next tensors of these sizes will get. Allocators of GPUs hand out the block
    that was freed last. The CPU's allocator may not, so there this works only by chance.
    """
    for example in examples:
        for _ in range(2):
            torch.full_like(example, CANARY, requires_grad=False)


def compare(case: str, actual: Tensor, expected: Tensor) -> None:
    """Report how far the device's numbers are from the CPU's."""
    actual, expected = (one.detach().cpu().double().flatten() for one in (actual, expected))
    sizes = actual.norm() * expected.norm()
    say(
        case=case,
        error=float((actual - expected).norm() / expected.norm()),
        cosine=float(actual @ expected / sizes) if sizes else 0.0,
        unwritten=float((actual == CANARY).double().mean()),
        finite=bool(actual.isfinite().all()),
        zeros=not bool(actual.any()),
    )


def tell_time(device: Device, work: Callable[[], object]) -> None:
    """
    Tell how long some work takes: the best of some rounds after a first. Other programs on the device disturb most of
    them, and rarely all.
    """
    times, end = list[float](), time.perf_counter() + TIMED_SECONDS
    while len(times) < FEWEST_ROUNDS or (time.perf_counter() < end and len(times) < MOST_ROUNDS):
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - began)
    say(milliseconds=1e3 * min(times[1:]))


def torch_itself() -> None:
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = [torch.cuda.get_device_properties(number) for number in range(seen)]
    say(
        version=torch.__version__,
        hip=torch.version.hip,
        cuda=torch.version.cuda,
        gpus=seen,
        names=[one.name for one in facts],
        chips=[one.gcnArchName if is_rocm() else f"sm_{one.major}{one.minor}" for one in facts],
        targets=sorted({name.partition(":")[0] for name in torch.cuda.get_arch_list()}),
        apple=torch.backends.mps.is_available(),
    )


SHARE = 0.8
PIECE_BYTES = 2**28


def refill(share: float = SHARE, piece_bytes: int = PIECE_BYTES) -> None:
    """Each piece is given a number of its own, which it must still hold when all of them are there."""
    device = find()
    tell_device(device)
    num_bytes = int(share * device.free_bytes())
    for round_ in (1, 2):
        say(trying=f"round {round_}: {num_bytes / 2**30:.1f} GiB")
        say(**{f"wrong_{round_}": _fill(device, num_bytes // piece_bytes, piece_bytes)})
        device.release()
    say(filled_bytes=num_bytes)


def _fill(device: Device, count: int, piece_bytes: int) -> int:
    """How many pieces do not hold what was written to them."""
    pieces = [
        torch.full((piece_bytes // 4,), number, dtype=torch.int32, device=device.torch_device)
        for number in range(count)
    ]
    return sum(int(piece.min()) != number or int(piece.max()) != number for number, piece in enumerate(pieces))


COPY_BYTES = {"cpu": 2**27}
"""Large enough to pass by every cache; 2³⁰ elsewhere."""


def speed() -> None:
    device = find()
    tell_device(device)
    say(trying="matmuls")
    say(flops=measured_peak(device))
    say(trying="copies")
    say(bytes_per_second=copy_rate(device))


def copy_rate(device: Device) -> float:
    """Bytes that pass between device and its memory in a second of copying: each is read once and written once."""
    count = min(COPY_BYTES.get(device.torch_device.type, 2**30), device.memory_bytes // 8)
    source = torch.zeros(count, dtype=torch.uint8, device=device.torch_device)
    target = torch.ones_like(source)
    best = float("inf")
    for _ in range(5):
        device.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * count / best


WATCHDOG_SECONDS = 10
COUNT = 2**22


def all_reduce() -> None:
    """Start a process for each GPU (two without one), which end by themselves when one of them waits too long."""
    device = find()
    tell_device(device)
    world = max(2, torch.cuda.device_count() if device.torch_device.type == "cuda" else 0)
    say(trying=f"{world} processes")
    with tempfile.TemporaryDirectory() as folder:
        words = {"WORLD_SIZE": str(world), "BLOOMERY_MEET": str(Path(folder) / "meet")}
        processes = [
            subprocess.Popen(
                child.leashed([sys.executable, "-m", "bloomery.hw.probes", "all-reduce-rank"]),
                env={**os.environ, **words, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world)
        ]
        codes = [process.wait() for process in processes]
    say(ranks=world, codes=codes)


def rank() -> None:
    """One of them: it adds what all have, several times, and the first tells what came out and how fast."""
    device = find()
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        device.backend,
        init_method=f"file://{os.environ['BLOOMERY_MEET']}",
        rank=number,
        world_size=world,
        timeout=timedelta(seconds=WATCHDOG_SECONDS),
    )
    values = torch.full((COUNT,), float(number + 1), device=device.torch_device)
    best, wrong = float("inf"), 0
    for _ in range(3):
        total = values.clone()
        device.synchronize()
        began = time.perf_counter()
        dist.all_reduce(total)
        device.synchronize()
        best = min(best, time.perf_counter() - began)
        wrong += int((total != world * (world + 1) / 2).sum())
    if number == 0:
        say(wrong=wrong, bytes_per_second=2 * (world - 1) / world * 4 * COUNT / best)
    dist.destroy_process_group()


STEPS = 60


def training() -> None:
    device = find()
    tell_device(device)
    say(trying="the first step")
    curve = losses(device)
    say(first_loss=curve[0], last_loss=curve[-1])


def losses(device: Device) -> list[float]:
    """
    Cross entropy, by step, of one attention layer that learns to copy the token two positions back.

    It exercises the operations of training: embedding, fused attention, matmuls, softmax, their gradients, AdamW.
    """
    torch.manual_seed(0)
    period = torch.randint(0, 32, (16, 2))
    ids = period.repeat(1, 17).to(device.torch_device)
    table, into, out = nn.Embedding(32, 64), nn.Linear(64, 192), nn.Linear(64, 32)
    model = nn.ModuleList([table, into, out]).to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for step in range(STEPS):
        with torch.autocast(device.torch_device.type, torch.bfloat16, enabled=device.compute_dtype == torch.bfloat16):
            hidden = table(ids[:, :-1])
            q, k, v = into(hidden).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            logits = out(hidden + mixed.transpose(1, 2).flatten(2))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        history.append(float(loss.detach()))
        if step % 20 == 0:
            say(trying=f"step {step + 1}")
    return history


WIDTH, HEADS, BLOCK_TOKENS = 512, 8, 256


def compiled() -> None:
    device = find()
    tell_device(device)
    if device.torch_device.type == "cuda" and not compiles_kernels(device.torch_device):
        say(absent="Triton is not installed")
        return
    if device.torch_device.type == "cpu" and not (
        shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    ):
        say(absent="there is no C++ compiler")
        return
    if (
        device.torch_device.type == "mps"
        or importlib.util.find_spec("torch._inductor") is None
        or sys.platform == "win32"
    ):
        say(absent="torch compiles nothing for this device")
        return
    torch.manual_seed(0)
    shapes = ((4, BLOCK_TOKENS, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    tensors = [torch.randn(shape) * shape[-2] ** -0.5 for shape in shapes]
    x, *weights = [one.to(device.torch_device, device.compute_dtype).requires_grad_() for one in tensors]
    fast = torch.compile(_block, dynamic=False)
    say(trying="forward")
    plain, output = _block(x, *weights), fast(x, *weights)
    compare("forward", output, plain)
    say(trying="gradients")
    upstream = torch.randn_like(plain)
    right = torch.autograd.grad(plain, [x, *weights], upstream)
    grads = torch.autograd.grad(output, [x, *weights], upstream)
    for name, grad, other in zip(("x", "qkv", "out", "up", "down"), grads, right, strict=True):
        compare(f"gradient of {name}", grad, other)
    tell_time(device, lambda: torch.autograd.grad(fast(x, *weights), [x, *weights], upstream))


def _block(x: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
    q, k, v = (F.rms_norm(x, (WIDTH,)) @ qkv).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.transpose(1, 2).flatten(2) @ out
    y: Tensor = x + F.silu(F.rms_norm(x, (WIDTH,)) @ up) @ down
    return y


HEAD_WIDTHS = (64, 128)
KERNEL_TOKENS = 200  # no multiple of a kernel's block, so that edges are computed too
LONG = {"cpu": 512}
"""Tokens of the attention that is timed; 2048 elsewhere."""
NOT_HERE = (
    "No available kernel",
    "No viable backend",
    "not compiled",
    "not been compiled",
    "is not supported",
    "only supports",
    "not enabled",
)
"""Words of errors of a kernel that this build or chip does not have."""


def is_not_here(error: RuntimeError) -> bool:
    return any(words in str(error) for words in NOT_HERE)


def launch() -> None:
    """The simplest kernel: a sum into canaries. Broken stacks mostly end here."""
    device = find()
    tell_device(device)
    say(trying="sum")
    a, b = torch.arange(4096.0), torch.arange(4096.0).flip(0) / 3
    out = torch.add(a.to(device.torch_device), b.to(device.torch_device), out=canaries(a.to(device.torch_device), 4096))
    compare("sum", out, a + b)


def matmul(library: str | None = None) -> None:
    """Products in the three layouts that layers and their gradients ask for, by one of the libraries for them."""
    device = find()
    tell_device(device)
    with ExitStack() as stack:
        if library is not None:
            before = torch.backends.cuda.preferred_blas_library()
            try:
                torch.backends.cuda.preferred_blas_library(library)
            except RuntimeError as error:
                say(absent=first_line(error))
                return
            stack.callback(torch.backends.cuda.preferred_blas_library, before)
        _products(device)


def _products(device: Device) -> None:
    torch.manual_seed(0)
    M, K, N = 200, 328, 136
    sides = {"NN": ((M, K), (K, N)), "NT": ((M, K), (N, K)), "TN": ((K, M), (K, N))}
    for name, (left, right) in sides.items():
        say(trying=name)
        a, b = (torch.randn(*shape).to(device.compute_dtype) for shape in (left, right))
        x, y = a.to(device.torch_device), b.to(device.torch_device)
        if name == "NT":
            b, y = b.t(), y.t()
        if name == "TN":
            a, x = a.t(), x.t()
        compare(name, torch.mm(x, y, out=canaries(x, M, N)), a.double() @ b.double())
    size = 256 if device.torch_device.type == "cpu" else 2048
    square = torch.randn(size, size, device=device.torch_device, dtype=device.compute_dtype)
    tell_time(device, lambda: square @ square)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def attention(name: str) -> None:
    """One of torch's implementations of attention, at the widths of heads that models have."""
    device = find()
    tell_device(device)
    torch.manual_seed(0)
    with sdpa_kernel(getattr(SDPBackend, name)):
        for width in HEAD_WIDTHS:
            q, k, v, grad = (torch.randn(1, 4, KERNEL_TOKENS, width).to(device.compute_dtype) for _ in range(4))
            try:
                forward_and_back(device, f"heads of {width}", _sdpa, plain_attention, (q, k, v), grad)
            except RuntimeError as error:
                if not is_not_here(error):
                    raise
                say(absent=first_line(error))
                return
        shape = (1, 8, LONG.get(device.torch_device.type, 2048), HEAD_WIDTHS[0])
        tensors = [torch.randn(shape, device=device.torch_device, dtype=device.compute_dtype) for _ in range(3)]
        for tensor in tensors:
            tensor.requires_grad_()
        tell_time(device, lambda: torch.autograd.grad(_sdpa(*tensors).sum(), tensors))


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula."""
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, -torch.inf), dim=3) @ v


def forward_and_back(
    device: Device,
    case: str,
    work: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    grad: Tensor,
    names: str = "qkv",
) -> None:
    """Compare an operation and its gradients on the device with the formula in float64."""
    say(trying=case)
    theirs = [one.detach().to(device.torch_device).requires_grad_() for one in inputs]
    ours = [one.detach().double().requires_grad_() for one in inputs]
    upstream = grad.to(device.torch_device)
    poison(upstream)
    actual, expected = work(*theirs), formula(*ours)
    compare(case, actual, expected)
    say(trying=f"{case}, gradients")
    poison(*(one.detach() for one in theirs))
    grads = torch.autograd.grad(actual, theirs, upstream.to(actual.dtype))
    right = torch.autograd.grad(expected, ours, grad.double())
    for name, theirs_grad, other in zip(names, grads, right, strict=True):
        compare(f"{case}, gradient of {name}", theirs_grad, other)


def rms_norm() -> None:
    device = find()
    tell_device(device)
    torch.manual_seed(0)
    x, weight, grad = 3 * torch.randn(65, 328), torch.rand(328) + 0.5, torch.randn(65, 328)
    forward_and_back(
        device, "norm", lambda x, g: F.rms_norm(x, (328,), g, 1e-6), plain_rms_norm, (x, weight), grad, "xg"
    )
    rows, scale = norm_inputs(device)

    def work() -> object:
        normed = F.rms_norm(rows, (1024,), scale, 1e-6).to(device.compute_dtype)  # as layers hand it on
        return torch.autograd.grad(normed.sum(), (rows, scale))

    tell_time(device, work)


NORM_ROWS = {"cpu": 4096}


def norm_inputs(device: Device) -> tuple[Tensor, Tensor]:
    """What a norm is timed on: on a GPU as many rows as a micro-batch has tokens."""
    count = NORM_ROWS.get(device.torch_device.type, 2**15)
    rows, scale = (one.to(device.torch_device) for one in (torch.randn(count, 1024), torch.ones(1024)))
    return rows.requires_grad_(), scale.requires_grad_()


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def cross_entropy() -> None:
    """The loss of each row and its gradient, in float32 on scores of the compute format."""
    device = find()
    tell_device(device)
    torch.manual_seed(0)
    scores, targets = (4 * torch.randn(65, 5003)).to(device.compute_dtype), torch.randint(0, 5003, (65,))
    places = targets.to(device.torch_device)
    forward_and_back(
        device,
        "loss",
        lambda s: F.cross_entropy(s.float(), places, reduction="none"),
        lambda s: torch.logsumexp(s, 1) - s.gather(1, targets[:, None])[:, 0],
        (scores,),
        torch.rand(65),
        "s",
    )
    many, labels = entropy_inputs(device)
    tell_time(device, lambda: torch.autograd.grad(F.cross_entropy(many.float(), labels, reduction="sum"), many))


def entropy_inputs(device: Device) -> tuple[Tensor, Tensor]:
    """What a loss is timed on."""
    scores = torch.randn(1024, 8192, device=device.torch_device).to(device.compute_dtype)
    return scores.requires_grad_(), torch.arange(1024, device=device.torch_device)


PROBES = {
    "torch": torch_itself,
    "launch": launch,
    "matmul": matmul,
    "matmul-blas": lambda: matmul("cublas"),
    "matmul-blaslt": lambda: matmul("cublaslt"),
    "attention-flash": lambda: attention("FLASH_ATTENTION"),
    "attention-efficient": lambda: attention("EFFICIENT_ATTENTION"),
    "attention-cudnn": lambda: attention("CUDNN_ATTENTION"),
    "attention-math": lambda: attention("MATH"),
    "rms-norm": rms_norm,
    "cross-entropy": cross_entropy,
    "block-compiled": compiled,
    "training": training,
    "speed": speed,
    "refill": refill,
    "all-reduce": all_reduce,
    "all-reduce-rank": rank,
}


def run(name: str) -> None:
    PROBES[name]()


if __name__ == "__main__":
    answer(sys.argv[1:], run)
