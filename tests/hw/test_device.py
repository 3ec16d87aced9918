"""The device is what the hardware is, not what a vendor's own test claims."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery.core.errors import HardwareError
from bloomery.hw import device
from bloomery.hw.host import DeviceChoice
from tests.hw.machines import GIB, ZEN2, machine, plant

import torch

OPENED: list[torch.device] = []
"""GPUs that were opened."""


def pretend(monkeypatch: pytest.MonkeyPatch, *, hip: str | None, count: int = 1, **facts: object) -> None:
    """A torch that sees GPUs of one kind."""
    shown = SimpleNamespace(**{"name": "GPU", "total_memory": 24 * GIB, "major": 9, "minor": 0} | facts)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", OPENED.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: shown)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ("gfx906:sramecc+:xnack-", torch.float16),
        ("gfx900", torch.float16),
        ("gfx1030", torch.float16),
        ("gfx1012", torch.float16),
        ("gfx908:sramecc+:xnack-", torch.bfloat16),
        ("gfx90a", torch.bfloat16),
        ("gfx942:sramecc+:xnack-", torch.bfloat16),
        ("gfx1100", torch.bfloat16),
        ("gfx1151", torch.bfloat16),
        ("gfx1201", torch.bfloat16),
    ],
)
def test_an_amd_gpu_computes_in_bf16_only_with_matrix_instructions_for_it_and_else_in_fp16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, dtype: torch.dtype
) -> None:
    pretend(monkeypatch, hip="7.2.0", gcnArchName=target)
    found = device.find(host=machine(tmp_path, "7900-xtx"))
    assert (found.vendor, found.backend, found.torch_device.type, found.compute_dtype) == ("amd", "nccl", "cuda", dtype)


def test_an_amd_wheel_that_says_so_only_in_its_version_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+rocm7.14")
    assert device.is_rocm()


@pytest.mark.parametrize(("major", "dtype"), [(7, torch.float16), (8, torch.bfloat16), (12, torch.bfloat16)])
def test_an_nvidia_gpu_computes_in_bf16_from_ampere_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: int, dtype: torch.dtype
) -> None:
    pretend(monkeypatch, hip=None, major=major)
    found = device.find(host=machine(tmp_path, "nvidia"))
    assert (found.vendor, found.compute_dtype) == ("nvidia", dtype)


def test_a_gpu_inside_a_processor_has_no_more_memory_than_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, hip="7.2.0", gcnArchName="gfx1151", total_memory=96 * GIB)
    host = machine(tmp_path, "strix-halo")
    plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{32 * GIB}"})
    assert device.find(host=host).memory_bytes == 32 * GIB


def test_each_process_of_a_machine_takes_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, hip="7.2.0", count=8, gcnArchName="gfx942")
    assert device.find(host=machine(tmp_path, "mi300x", env={"LOCAL_RANK": "3"})).torch_device == torch.device(
        "cuda", 3
    )


@pytest.mark.usefixtures("no_gpu")
def test_a_processor_has_the_memory_of_its_control_group(tmp_path: Path) -> None:
    host = machine(tmp_path, "none")
    plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{8 * GIB}"})
    found = device.find(host=host)
    assert (found.name, found.memory_bytes, found.backend) == ("Some Processor", 8 * GIB, "gloo")
    assert found.compute_dtype == torch.bfloat16


@pytest.mark.usefixtures("no_gpu")
def test_an_older_processor_computes_in_float32(tmp_path: Path) -> None:
    assert device.find("cpu", machine(tmp_path, "none", cpuinfo=ZEN2)).compute_dtype == torch.float32


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("wanted", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_an_error_with_a_hint(tmp_path: Path, wanted: DeviceChoice) -> None:
    with pytest.raises(HardwareError, match="doctor"):
        device.find(wanted, machine(tmp_path, "none"))


def test_a_processor_reports_its_peak_memory() -> None:
    found = device.find("cpu")
    found.synchronize()
    assert found.peak_bytes() > 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is of glibc")
def test_freed_memory_stays_with_the_process() -> None:
    """After a few rounds, a large block that was freed is taken again without page faults."""
    code = """
import resource, torch
from bloomery.hw.device import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.zeros(2**25)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
if not keep_freed_memory():
    raise SystemExit(9)
sizes = [faults() for _ in range(5)]
raise SystemExit(sizes[-1] > 1000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 9:
        pytest.skip("this system has another C library than glibc")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        RuntimeError("HIP error: out of memory"),
        RuntimeError("NCCL Error 1: unhandled cuda error\nFailed to CUDA calloc async 608 bytes"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 18.0 GB)"),
    ],
    ids=lambda error: str(error)[:24],
)
def test_every_form_of_memory_that_ran_out_is_known(error: RuntimeError) -> None:
    assert device.is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not device.is_out_of_memory(error)


def test_a_gpu_that_refuses_all_work_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise torch.AcceleratorError("CUDA error: out of memory\nmore lines")

    pretend(monkeypatch, hip=None)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(HardwareError, match=r"has failed since then: CUDA error: out of memory\n.*micro_batch_tokens"):
        device.give_back_memory()


def test_a_gpu_is_opened_when_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of its kernels are other processes, which a driver may keep out while it is open."""
    pretend(monkeypatch, hip=None)
    OPENED.clear()
    found = device.find(host=machine(tmp_path, "nvidia"), open=False)
    assert OPENED == []
    found.open()
    assert [torch.device("cuda", 0)] == OPENED
    assert device.find(host=machine(tmp_path, "nvidia")) == found
    assert len(OPENED) == 2


@pytest.mark.parametrize(("seconds", "size"), [(0.1, 64), (0.0, 8)])
def test_the_measured_peak_is_of_random_numbers_of_few_where_a_matmul_takes_long_and_leaves_a_runs_own_alone(
    monkeypatch: pytest.MonkeyPatch, seconds: float, size: int
) -> None:
    multiplied: list[torch.Tensor] = []
    mm = torch.mm

    def watched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        multiplied.append(left)
        return mm(left, right)

    monkeypatch.setattr(torch, "mm", watched)
    monkeypatch.setitem(device.SIZES, "cpu", 64)
    monkeypatch.setattr(device, "SECONDS", seconds)
    before = torch.get_rng_state()
    assert device._measured.__wrapped__(device.find("cpu"), "cpu", torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert multiplied[-1].shape == (size, size)
    assert len(set(multiplied[-1].flatten().tolist())) > 0.95 * size**2


NEW_NAME = "_accelerator_setAllocatorSettings"
"""Since torch 2.13, which warns of the old one."""


class Allocator:
    """What is asked of torch's allocator, of a driver that may not know it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, works: bool) -> None:
        self.settings = list[str]()
        for module, name in ((torch.cuda.memory, "_set_allocator_settings"), (torch._C, NEW_NAME)):
            monkeypatch.setattr(module, name, self.settings.append, raising=False)
        monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        plain = torch.empty

        def empty(*sizes: int, **how: object) -> torch.Tensor:
            if not works:
                raise RuntimeError("CUDA driver error: operation not supported")
            return plain(*sizes)

        monkeypatch.setattr(torch, "empty", empty)


def of_vendor(vendor: device.Vendor) -> device.Device:
    return device.Device(
        torch_device=torch.device("cuda", 0),
        vendor=vendor,
        name="GPU",
        memory_bytes=GIB,
        compute_dtype=torch.bfloat16,
        backend="nccl",
    )


@pytest.mark.parametrize(
    ("vendor", "works", "asked"),
    [
        ("nvidia", True, ["expandable_segments:True"]),
        ("nvidia", False, ["expandable_segments:True", "expandable_segments:False"]),
        ("amd", True, []),
    ],
)
def test_blocks_of_memory_grow_where_the_driver_can_let_them(
    vendor: device.Vendor, works: bool, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in device.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    allocator = Allocator(monkeypatch, tmp_path, works=works)
    assert device.expand_segments(of_vendor(vendor)) == (asked == ["expandable_segments:True"])
    assert allocator.settings == asked


def test_settings_of_the_allocator_that_a_person_made_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    allocator = Allocator(monkeypatch, tmp_path, works=True)
    assert not device.expand_segments(of_vendor("nvidia"))
    assert not allocator.settings


def test_copies_for_the_host_are_equal_contiguous_and_apart() -> None:
    tensors = [torch.randn(3, 4).t(), torch.arange(5, dtype=torch.int16), torch.zeros(())]
    copies = device.copied_to_host(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)
        assert copy.dtype == tensor.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() != tensor.data_ptr()
