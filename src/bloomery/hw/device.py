"""
The device that a process computes on, and its measured peak. The only file with torch's vendor names.

AMD answers to `torch.cuda` too (ROCm), with `nccl` standing for RCCL. A vendor's own test is not always right:
`torch.cuda.is_bf16_supported()` is True on every AMD GPU, and compute capabilities of AMD GPUs are above every
threshold of NVIDIA's. So neither decides anything for AMD here.

This module also holds which of Bloomery's own GPU kernels this process may use. The answer is none, until trials on
this device find a kernel correct and fastest. Callers ask before each use. Permission comes from
hw/kernel_selection.py.

The peak is the reference for a model's own FLOP/s.
Vendors' tables go by names that change. They count half a card or sparse zeros, and do not mention a laptop's power
limit. So the peak is that of some large matmuls of random numbers on this device: the median of a warm GPU, or
the best of a CPU. They run now, in the format that training uses. A share of it is called a share of the measured
peak, never a share of a vendor's peak.
"""

import ctypes
import gc
import importlib.util
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from bloomery.core.errors import HardwareError
from bloomery.core.log import info
from bloomery.hw import require_torch as require_torch
from bloomery.hw.host import INTEGRATED, DeviceChoice, Host, fast_bf16, free_bytes, memory_bytes

import torch

if sys.platform != "win32":
    import resource

Vendor = Literal["amd", "nvidia", "apple", "cpu"]
Backend = Literal["nccl", "gloo"]

WITHOUT_BF16 = ("gfx8", "gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c", "gfx926", "gfx10")
"""Beginnings of AMD targets that have no bfloat16 matrix instructions (LLVM, AMDGPUUsage.rst)."""

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # glibc, malloc.h
TOP_PAD_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Device:
    torch_device: torch.device
    vendor: Vendor
    name: str
    memory_bytes: int
    """Memory that this process may use. For a CPU: the machine's, or as much as its control group allows."""
    compute_dtype: torch.dtype
    """bfloat16 where the hardware multiplies it; else float16 on a GPU, and float32 on a CPU."""
    backend: Backend
    """Of torch.distributed."""
    shared: bool = False
    """Whether a GPU has no memory but the host's."""

    def open(self) -> None:
        """Compute on this GPU from now on, where no other is named."""
        if self.is_gpu:
            torch.cuda.set_device(self.torch_device)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU of NVIDIA or AMD, which computes while the host does other work."""
        return is_gpu(self.torch_device)

    def synchronize(self) -> None:
        """Wait until everything that was asked of the device is done."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)
        elif self.torch_device.type == "mps":
            torch.mps.synchronize()

    def free_bytes(self) -> int:
        """
        Memory that this process could still take. On an integrated GPU the driver may report more than there is.
        The system's free memory is therefore a limit too.
        """
        if self.torch_device.type != "cuda":
            return min(free_bytes(Host.here()), self.memory_bytes)
        free, whole = torch.cuda.mem_get_info(self.torch_device)
        inside = getattr(torch.cuda.get_device_properties(self.torch_device), "is_integrated", False)
        limits = [free, self.memory_bytes]
        return min([*limits, free_bytes(Host.here())] if inside or self.memory_bytes < whole else limits)

    def release(self) -> None:
        """Return freed memory to the driver."""
        if self.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    def others_bytes(self) -> int:
        """Memory of a GPU that others than this process's tensors use: its libraries, other processes, the screen."""
        if self.torch_device.type != "cuda":
            return 0
        free, whole = torch.cuda.mem_get_info(self.torch_device)
        return max(0, whole - free - torch.cuda.memory_reserved(self.torch_device))

    def restart_peak(self) -> None:
        """Let `peak_bytes` of a GPU begin again with what is there now."""
        if self.torch_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        """The most memory that this process has held: on the device, or on a CPU in total (0 where unknown)."""
        if self.torch_device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        if self.torch_device.type == "mps":
            return torch.mps.driver_allocated_memory()  # the largest so far, as the driver keeps what it took
        if sys.platform == "win32":
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def find(choice: DeviceChoice = "auto", host: Host | None = None, *, open: bool = True) -> Device:
    """
    The device that this process should use. On a machine with several GPUs, the one that LOCAL_RANK says. A GPU is
    opened, unless the caller does it later by `Device.open`: while it is, other processes may have no access.

    Raises HardwareError where the wanted device is not there.
    """
    host = host or Host.here()
    if choice in ("auto", "cuda") and torch.cuda.is_available():
        device = _gpu(host)
        if open:
            device.open()
        return device
    if choice in ("auto", "mps") and torch.backends.mps.is_available():
        return Device(
            torch_device=torch.device("mps"),
            vendor="apple",
            name=f"Apple {host.processor}",
            memory_bytes=torch.mps.recommended_max_memory(),
            compute_dtype=torch.float32,
            backend="gloo",
            shared=True,
        )
    if choice in ("auto", "cpu"):
        return Device(
            torch_device=torch.device("cpu"),
            vendor="cpu",
            name=_processor_name(host),
            memory_bytes=memory_bytes(host) or 0,
            compute_dtype=torch.bfloat16 if fast_bf16(host) else torch.float32,
            backend="gloo",
        )
    what = f"device={choice!r} is set, but torch {torch.__version__} finds no such device on this machine"
    raise HardwareError(what, hint='Run `bloomery doctor` to find the cause, or set device="auto" or device="cpu".')


def _gpu(host: Host) -> Device:
    from bloomery.hw import launcher

    index = launcher.number("LOCAL_RANK", host.env, 0) % torch.cuda.device_count()
    facts = torch.cuda.get_device_properties(index)
    amd = is_rocm()
    target = str(getattr(facts, "gcnArchName", "")).partition(":")[0] if amd else ""
    bf16 = not target.startswith(WITHOUT_BF16) if amd else facts.major >= 8
    shared = target in INTEGRATED or bool(getattr(facts, "is_integrated", False))  # with the CPU
    size = min(facts.total_memory, memory_bytes(host) or facts.total_memory) if shared else facts.total_memory
    return Device(
        torch_device=torch.device("cuda", index),
        vendor="amd" if amd else "nvidia",
        name=facts.name,
        memory_bytes=size,
        compute_dtype=torch.bfloat16 if bf16 else torch.float16,
        backend="nccl",
        shared=shared,
    )


HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Looked up once: some versions of torch do not compile code that looks for a module."""


def is_gpu(device: torch.device) -> bool:
    """Whether it is a GPU of AMD or NVIDIA: torch has one name for both."""
    return device.type == "cuda"


def float8_formats(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """The formats of 8 bits that matmuls of a device take: with four bits of exponent, and with five."""
    name = torch.cuda.get_device_properties(device).gcnArchName if is_gpu(device) and is_rocm() else ""
    if name.startswith("gfx94"):  # which has them without infinities and without −0
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def multiplies_float8(device: torch.device) -> bool | None:
    """Whether a device has matrix units for numbers of 8 bits, by its kind. None for a GPU that is not here."""
    if not is_gpu(device):
        return False
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(device)
    if is_rocm():
        return str(facts.gcnArchName).startswith(("gfx94", "gfx95", "gfx12"))
    return (facts.major, facts.minor) >= (8, 9)


def compiles_kernels(device: torch.device) -> bool:
    """Whether torch can write kernels for a GPU, which needs Triton."""
    return is_gpu(device) and HAS_TRITON


def is_rocm() -> bool:
    """Whether this torch was built for AMD. Some of AMD's wheels say so only in their version."""
    return bool(torch.version.hip) or "rocm" in torch.__version__


def _processor_name(host: Host) -> str:
    lines = (host.read("proc/cpuinfo") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else host.processor


_TRUSTED: set[str] = set()
_WITHOUT: set[str] = set()
"""Implementations of attention that this process leaves alone."""


def leave_attention(names: Iterable[str]) -> None:
    """Compute attention by none of these implementations from now on, and by all others."""
    _WITHOUT.clear()
    _WITHOUT.update(names)


def may_attend(name: str) -> bool:
    """Whether attention may be computed by an implementation, on a device that was tried or where nothing is known."""
    return name not in _WITHOUT


def trust(kernels: Iterable[str]) -> None:
    """Use our own implementation of these kernels from now on, and of no others."""
    _TRUSTED.clear()
    _TRUSTED.update(kernels)


def trusted(kernel: str) -> bool:
    return kernel in _TRUSTED


def all_trusted() -> frozenset[str]:
    return frozenset(_TRUSTED)


def kernel_words() -> str:
    """The kernels for which our own implementation is used, in words; "" for none."""
    return ", ".join(sorted(_TRUSTED))


OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|out of memory|(CUBLAS|CUDNN|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_ALLOC_FAILED"
    r"|hipblaslt.*allocat|Failed to (CUDA|HIP) (malloc|calloc)|(cuda|hip)ErrorMemoryAllocation",
    re.IGNORECASE,
)
"""How drivers and libraries say it, whose memory torch's allocator does not manage."""


def is_out_of_memory(error: BaseException) -> bool:
    """
    Whether an operation failed for want of memory: of torch's allocator, of a driver, of a library for matmuls,
    attention or exchange, or on a CPU.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def staged(numbers: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """
    Integers below 2³¹ on a device, in int64 and in their shapes. A GPU gets all of them in one copy from pinned memory,
    in four bytes each, for which the host does not wait.
    """
    if device.type == "cpu":
        return list(numbers)
    sizes = [tensor.numel() for tensor in numbers]
    buffer = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=is_gpu(device))
    for slot, tensor in zip(torch.split(buffer, sizes), numbers, strict=True):
        slot.copy_(tensor.flatten())
    moved = buffer.to(device, non_blocking=True).long()
    return [flat.view(tensor.shape) for flat, tensor in zip(torch.split(moved, sizes), numbers, strict=True)]


def constant(numbers: Sequence[float], device: torch.device | str) -> torch.Tensor:
    """A few numbers in float32 on a device. The host does not wait until a GPU has them."""
    if not is_gpu(torch.device(device)):
        return torch.tensor(numbers, dtype=torch.float32, device=device)
    return torch.tensor(numbers, dtype=torch.float32, pin_memory=True).to(device, non_blocking=True)


def copied_to_host(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """
    Copies in the host's memory, whole when this returns. Those of a GPU go into pinned memory, all at once, which is
    ten times as fast as one after another into other memory. Where the driver pins no more, other memory will do.
    """
    copies, gpu, may_pin = list[torch.Tensor](), False, True
    for tensor in tensors:
        on_gpu = is_gpu(tensor.device)
        pinned = on_gpu and may_pin
        try:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        except RuntimeError:
            if not pinned:
                raise
            may_pin = pinned = False
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies.append(copy.copy_(tensor.detach(), non_blocking=pinned))
        gpu = gpu or on_gpu
    if gpu:
        torch.cuda.synchronize()
    return copies


WARM_CALLS = 2
"""Before some work is captured: they compile kernels, and make what is kept."""


@dataclass(frozen=True)
class Graph:
    """What a GPU replays, and the tensors that it then overwrites, as any graph of the same pool may."""

    graph: Any
    """A torch.cuda.CUDAGraph."""
    outputs: tuple[torch.Tensor, ...]
    lock: threading.Lock

    def replay(self) -> tuple[torch.Tensor, ...]:
        """Copies of what comes out, made before another graph of the pool begins."""
        with self.lock:
            self.graph.replay()
            return tuple(one.clone() for one in self.outputs)


_CAPTURE = threading.Lock()
"""A process captures one graph at a time."""


class GraphPool:
    """
    Graphs of a GPU that share the memory in which they compute: as much as the largest needs, and not their sum. So one
    is replayed after another, on one stream. All are captured on the same stream: torch shares no memory otherwise.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._shared: tuple[Any, Any] | None = None
        """Where graphs are captured: a stream, and torch's name for their memory."""

    def captured(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> Graph | None:
        """
        Some work as one graph, after it ran a few times. None where it cannot be captured, and a line says so. The work
        reads and writes only memory that stays, and never waits for the GPU.
        """
        with _CAPTURE:  # the stream is shared, and threads would record what others compute on it
            if self._shared is None:
                self._shared = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
            stream, pool = self._shared
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(WARM_CALLS):
                    work()
            before.wait_stream(stream)
            try:  # other threads may ask for memory meanwhile
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    outputs = work()
            except RuntimeError as error:
                if isinstance(
                    error.__context__, KeyboardInterrupt | SystemExit
                ):  # it came in the midst: it is not lost
                    raise error.__context__ from None
                torch.cuda.set_stream(before)  # which a graph that failed leaves to its own
                self._shared = None
                reason = str(error.__context__ or error).strip().partition("\n")[0]
                info(f"Decoding without a CUDA graph, which is slower: {reason}")
                return None
        return Graph(graph, outputs, self._lock)


ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
"""There on Linux, and not in Windows' subsystem for it."""


def expand_segments(device: Device) -> bool:
    """
    Let torch's allocator grow its blocks on an NVIDIA GPU, so that tensors of changing sizes leave no gaps. Call it
    before the first tensor. Returns whether it does: not where the environment has settings of its own, and not where
    the driver cannot.
    """
    own = any(name in os.environ for name in ALLOCATOR_SETTINGS)
    if device.vendor != "nvidia" or own or not NVIDIA_DRIVER.exists():
        return False
    # torch 2.13 has a new name for it, and warns of the old one
    setting = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    setting("expandable_segments:True")
    try:
        torch.empty(2**20, device=device.torch_device).fill_(1.0)
        device.synchronize()
    except RuntimeError:
        setting("expandable_segments:False")
        return False
    return True


def give_back_memory() -> None:
    """
    Release the GPU memory that torch caches, so that blocks of other sizes fit. Raises HardwareError where the driver
    refuses everything since an error: no smaller batch helps then, until the process ends.
    """
    if not torch.cuda.is_available():
        return
    gc.collect()  # a model that is part of a cycle of objects holds its memory until then
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        what = f"the GPU ran out of memory and has failed since then: {str(error).strip().partition(chr(10))[0]}"
        hint = "Set a smaller micro_batch_tokens and run the same command: it resumes from the newest checkpoint."
        raise HardwareError(what, hint=hint) from error


def threads() -> int:
    """How many threads one operation of torch uses on the CPU."""
    return torch.get_num_threads()


def return_freed_memory() -> None:
    """Return to the system, once, the memory that `keep_freed_memory` kept: gaps between blocks add up."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def keep_freed_memory() -> bool:
    """
    Tell glibc to keep what torch frees, instead of returning pages that the next step must fault in again.

    Training on a CPU frees and takes the same large blocks every step. Keeping them made a step of a 124M model
    1.4 times faster. The price: memory of the process never shrinks. Call it before the first large tensor.
    Returns whether it was applied; it does nothing with other C libraries.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    wishes = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: TOP_PAD_BYTES}
    granted = [library.mallopt(name, value) == 1 for name, value in wishes.items()]
    return all(granted)


SIZES = {"cpu": 1536, "mps": 4096, "cuda": 8192}
SECONDS = 0.3
WARM_SECONDS = {"cuda": 2.0, "mps": 2.0}
"""In which a GPU comes to the clock that it can hold."""


def listed_peak(device: Device, devices: int = 1) -> float | None:
    """FLOP/s of that many devices in their compute format, by the spec sheet; None where it lists none."""
    if device.torch_device.type == "cpu":  # its name may contain a GPU's: "… w/ Radeon 8060S"
        return None
    from bloomery.hw import specs

    entry = specs.of_device(device.name, device.memory_bytes)
    peak = None if entry is None else entry.peak(str(device.compute_dtype).removeprefix("torch."))
    return None if peak is None else devices * peak


def now(device: Device) -> float:
    """
    Seconds. On a CPU those of this thread, so that other load on the machine does not count. A peak and the steps that
    are compared with it need the same clock.
    """
    return time.thread_time() if device.torch_device.type == "cpu" else time.perf_counter()


def measured_peak(device: Device) -> float:
    """FLOP/s of square matmuls in the device's compute format. Measured once in a process."""
    return _measured(device, device.torch_device.type, device.compute_dtype)


@cache
def _measured(device: Device, kind: str, dtype: torch.dtype) -> float:
    size, torch_device = SIZES[kind], device.torch_device
    generator = torch.Generator(torch_device).manual_seed(0)  # its own: a run's random numbers stay as they are
    # Random numbers: matrices of ones switch few transistors, and a GPU meets no power limit with them.
    left, right = (torch.randn(size, size, device=torch_device, generator=generator).to(dtype) for _ in range(2))

    def timed(left: torch.Tensor, right: torch.Tensor) -> float:
        before = now(device)
        torch.mm(left, right)
        device.synchronize()
        return now(device) - before

    few = slice(size // 8)
    small = [timed(left[few, few], right[few, few]) for _ in range(2)]  # the first one also sets up the library
    if kind == "cpu" and 8**3 * small[1] > SECONDS:  # a CPU without units for the format would take 20 seconds
        left, right, size = left[few, few], right[few, few], size // 8
    seconds, began = [timed(left, right)], time.perf_counter()
    while time.perf_counter() < began + WARM_SECONDS.get(kind, 0.0) + SECONDS:
        seconds.append(timed(left, right))
        if time.perf_counter() < began + WARM_SECONDS.get(kind, 0.0):
            seconds.clear()
    typical = min(seconds) if kind == "cpu" else statistics.median(seconds)
    return 2.0 * size**3 / typical
