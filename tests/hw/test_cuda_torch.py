"""What a GPU of NVIDIA would be told, tried with and run out of: under a torch that pretends to have two."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bloomery.core.errors import HardwareError
from bloomery.hw import device as devices
from bloomery.hw import kernel_selection, kernel_trials, specs
from bloomery.hw.distributed import World
from bloomery.hw.host import CommandResult, Host
from bloomery.model.transformer import Transformer
from bloomery.train.step import BatchLoss, accumulate_gradients, retry_on_oom, retry_on_overflow
from tests.hw import cuda_torch
from tests.hw.machines import machine
from tests.model.made import VOCAB_SIZE
from tests.train.made import SHAPE, on_cpu, random_batch

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def pretended() -> Iterator[None]:
    with cuda_torch.pretended(torch):
        yield


def test_the_gpu_of_this_rank_is_found_with_its_format_and_its_entry(tmp_path: Path) -> None:
    found = devices.find(host=machine(tmp_path, "nvidia", env={"LOCAL_RANK": "1"}))
    assert (found.vendor, str(found.torch_device), found.backend) == ("nvidia", "cuda:1", "nccl")
    assert found.compute_dtype == torch.bfloat16
    assert found.is_gpu
    assert (found.peak_bytes(), found.free_bytes()) == (3 * 2**30, 78 * 2**30)
    assert found.others_bytes() == 2**30 - 2**28, "of the gibibyte that is not free, torch keeps a quarter"
    entry = specs.of_device(found.name, found.memory_bytes)
    assert entry is not None
    assert (entry.key, devices.listed_peak(found, 2)) == ("h100", 2 * 989.4e12)
    assert devices.find("cpu").vendor == "cpu"
    with pytest.raises(HardwareError, match="finds no such device"):
        devices.find("mps")


def test_numbers_reach_the_device_whole_and_come_back() -> None:
    numbers = [torch.arange(12).view(3, 4), torch.tensor([7])]
    staged = devices.staged(numbers, torch.device("cuda", 0))
    assert [(one.dtype, one.tolist()) for one in staged] == [(torch.int64, one.tolist()) for one in numbers]
    assert torch.equal(devices.copied_to_host([torch.ones(2, device="cuda")])[0], torch.ones(2))


class Children:
    """A host whose commands find the pretended torch too."""

    def __init__(self, root: Path) -> None:
        self.host = replace(machine(root, "nvidia"), cache=root / "cache", python=sys.executable)
        self.host = replace(self.host, run=self.run)

    def run(self, command: Sequence[str], limit_seconds: float) -> CommandResult:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=cuda_torch.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_seconds,
        )
        return CommandResult(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.mark.slow
def test_trials_in_children_see_the_gpu_and_what_they_say_is_judged(tmp_path: Path) -> None:
    host: Host = Children(tmp_path).host
    all_trials = {trial.name: trial for trial in kernel_trials.trials("nvidia")}
    asked = ("launch", "attention-flash", "rms-norm-torch")
    found = {one.name: one for one in kernel_trials.together(host, [all_trials[name] for name in asked])}
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(asked, "passed"), found
    assert all(one.milliseconds for name, one in found.items() if name != "launch")


def test_a_gpu_that_was_never_met_is_tried_once_and_the_choice_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"attention-flash": 1.0, "attention-efficient": 2.0, "attention-math": 9.0, "matmul-cublas": 1.0}
    calls = list[str]()

    def tried(host: Host, vendor: str) -> list[kernel_trials.TrialResult]:
        calls.append(vendor)
        return [
            kernel_trials.TrialResult(
                kernel=trial.kernel,
                implementation=trial.implementation,
                status="failed" if trial.name == "attention-cudnn" else "passed",
                why="returns NaN" if trial.name == "attention-cudnn" else "right",
                milliseconds=times.get(trial.name),
            )
            for trial in kernel_trials.trials(vendor)
        ]

    monkeypatch.setattr(kernel_trials, "tried", tried)
    monkeypatch.setattr(kernel_selection, "_ATTENTION", {})
    for name in ("_TRUSTED", "_WITHOUT"):
        monkeypatch.setattr(devices, name, set())
    told: dict[str, bool] = {}
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        monkeypatch.setattr(torch.backends.cuda, f"enable_{name}_sdp", lambda on, name=name: told.__setitem__(name, on))
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", lambda order: None)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors, **how: 1)
    device = devices.find(host=machine(tmp_path, "nvidia"))
    host = replace(machine(tmp_path, "nvidia"), cache=tmp_path / "cache")
    for _ in range(2):
        kernel_selection.select_kernels(device, host)
    assert calls == ["nvidia"]
    assert told == {"flash": True, "mem_efficient": True, "cudnn": False, "math": True}
    assert not devices.may_attend("cudnn")
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    assert "attention-cudnn is not used here: returns NaN" in text
    assert "attention: causal rows by flash, masked rows by flash, rows in float32 by flash" in text


FORMS = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.00 GiB."),
    lambda: torch.AcceleratorError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtCreate(handle)`"),
    lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    lambda: RuntimeError("NCCL error: unhandled cuda error\nFailed to CUDA calloc async 4194304 bytes"),
)


class Full(nn.Module):
    """An embedding that has room for a few rows."""

    def __init__(self, inner: nn.Module, rows: int, error: RuntimeError) -> None:
        super().__init__()
        self.inner, self.rows, self.error = inner, rows, error
        self.seen = list[int]()

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.inner.weight  # type: ignore[assignment]
        return weight

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.append(len(ids))
        if len(ids) > self.rows:
            raise self.error
        found: Tensor = self.inner(ids)
        return found


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_a_step_takes_half_as_many_rows_in_every_form_of_a_full_gpu_and_ends_with_a_hint_where_one_is_too_much(
    form: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Transformer(SHAPE, VOCAB_SIZE)
    model.initialize(0)
    batch, world, precision = random_batch(8), World.alone(), on_cpu()

    def compute(rows: int) -> tuple[BatchLoss, Tensor]:
        work = partial(accumulate_gradients, model, batch, rows, precision)
        return retry_on_overflow(model, precision, work)

    (whole, norm), _ = retry_on_oom(model, world, 8, compute)
    model.zero_grad(set_to_none=True)
    full = Full(model.embed, 2, FORMS[form]())
    model.embed = full  # type: ignore[assignment]
    (loss, same), rows = retry_on_oom(model, world, 8, compute)
    assert rows == 2
    assert full.seen[:3] == [8, 4, 2]
    assert loss.loss == pytest.approx(whole.loss)
    assert float(same) == pytest.approx(float(norm), rel=1e-4)
    assert "memory ran out: from now on, 2 sequences" in " ".join(capsys.readouterr().err.split())
    full.rows = 0
    with pytest.raises(HardwareError, match="memory is too small for 1 sequence at once") as failure:
        retry_on_oom(model, world, 2, compute)
    assert "micro_batch_tokens" in str(failure.value)
