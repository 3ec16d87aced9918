"""A run takes the fastest kernels that passed their trial, says which, and does not start where none did."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.core import native
from bloomery.core.errors import HardwareError
from bloomery.hw import device as devices
from bloomery.hw import kernel_selection, kernel_trials
from bloomery.hw.device import Device, find
from bloomery.hw.host import CommandResult, Host
from bloomery.hw.kernel_trials import TrialResult, TrialStatus
from tests.hw.machines import MATRIX, machine

import torch

GPU = Device(
    torch_device=torch.device("cuda", 0),
    vendor="amd",
    name="AMD Radeon",
    memory_bytes=2**34,
    compute_dtype=torch.bfloat16,
    backend="nccl",
)
CPU = replace(GPU, torch_device=torch.device("cpu"), vendor="cpu")


@pytest.fixture(autouse=True)
def switches(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What torch was told, instead of telling it."""
    told: dict[str, object] = {}
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        monkeypatch.setattr(torch.backends.cuda, f"enable_{name}_sdp", lambda on, name=name: told.__setitem__(name, on))
    monkeypatch.setattr(
        torch.backends.cuda, "preferred_blas_library", lambda library="": told.__setitem__("blas", library)
    )
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", lambda order: told.__setitem__("order", order))
    monkeypatch.setattr(native, "_REFUSED", {})
    for name in ("_TRUSTED", "_WITHOUT"):
        monkeypatch.setattr(devices, name, set())
    monkeypatch.setattr(kernel_selection, "_ATTENTION", {})
    monkeypatch.setenv(kernel_trials.EXPERIMENTAL, "")  # so that it is gone after the test too
    monkeypatch.delenv(kernel_trials.EXPERIMENTAL)
    return told


def attention(**times: float | None) -> list[TrialResult]:
    """Outcomes by implementation: milliseconds, or None for one that failed."""
    return [
        TrialResult(
            kernel="attention",
            implementation=name,
            status="failed" if time is None else "passed",
            why="returns NaN" if time is None else "right",
            milliseconds=time,
        )
        for name, time in times.items()
    ]


def known(root: Path, outcomes: Sequence[TrialResult], vendor: str = "amd") -> Host:
    host = replace(machine(root, "7900-xtx"), cache=root / "cache")
    kernel_trials.save(host, vendor, outcomes)
    return host


@pytest.mark.parametrize(
    ("times", "order"),
    [
        ({"flash": 1.0, "efficient": 2.0, "math": 9.0}, ["flash", "efficient", "math"]),
        ({"flash": 3.0, "efficient": 2.0, "math": 9.0}, ["efficient", "flash", "math"]),
        ({"flash": None, "efficient": 2.0, "math": 9.0}, ["efficient", "math"]),
        ({"flash": 1.0, "efficient": None, "math": 9.0}, ["flash", "math"]),
        ({"flash": 1.0, "efficient": 2.0, "cudnn": 0.5, "math": 0.1}, ["cudnn", "flash", "efficient", "math"]),
        ({"flash": None, "efficient": None, "math": 9.0}, ["math"]),
    ],
)
def test_attention_that_passed_stays_on_fastest_first_and_what_is_not_fused_last(
    tmp_path: Path, switches: dict[str, object], times: dict[str, float | None], order: list[str]
) -> None:
    kernel_selection.select_kernels(GPU, known(tmp_path, attention(**times)))
    names = {"mem_efficient": "efficient"}
    assert {names.get(name, name) for name, value in switches.items() if value is True} == set(order)
    assert isinstance(switches["order"], list)
    numbers = {int(backend.value): name for name, backend in kernel_selection.BACKENDS.items()}
    assert [numbers[number] for number in switches["order"] if number in numbers][: len(order)] == order
    assert sorted(switches["order"]) == sorted(torch._C._get_sdp_priority_order())
    for name in ("flash", "efficient", "cudnn"):
        assert devices.may_attend(name) == (name in order or name not in times)


class Choosing:
    """torch's choice of attention on a GPU that nobody has: the first of its list that is on and takes the call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, cudnn_first: bool = False, takes_mask: str = "") -> None:
        self.on: dict[str, bool] = {}
        self.order: list[int] = []
        self.cudnn_first, self.takes_mask = cudnn_first, takes_mask
        for switch, name in (("flash", "flash"), ("mem_efficient", "efficient"), ("cudnn", "cudnn"), ("math", "math")):
            monkeypatch.setattr(
                torch.backends.cuda, f"enable_{switch}_sdp", lambda on, name=name: self.on.__setitem__(name, on)
            )
        monkeypatch.setattr(torch._C, "_set_sdp_priority_order", lambda order: setattr(self, "order", order))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch, "_fused_sdp_choice", self.choice)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **how: zeros(*shape, device="meta", **how))

    def choice(self, q: torch.Tensor, k: object, v: object, mask: object, *rest: object, **how: object) -> int:
        names = {int(backend.value): name for name, backend in kernel_selection.BACKENDS.items()}
        order = [names[number] for number in self.order if number in names]
        if self.cudnn_first:
            order = ["cudnn", *(name for name in order if name != "cudnn")]
        for name in order:
            half = q.dtype != torch.float32
            fits = {"flash": half and mask is None, "cudnn": half, "efficient": True, "math": True}[name]
            if self.on[name] and fits and (mask is None or name in ("math", self.takes_mask)):
                return int(kernel_selection.BACKENDS[name].value)
        return -1


def test_a_run_says_what_torch_takes_for_each_kind_of_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Choosing(monkeypatch, takes_mask="efficient")
    times = attention(flash=1.0, efficient=2.0, cudnn=3.0, math=9.0)
    kernel_selection.select_kernels(replace(GPU, vendor="nvidia"), known(tmp_path, times, "nvidia"))
    said = capsys.readouterr()
    words = "causal rows by flash, masked rows by efficient, rows in float32 by efficient"
    assert f"attention: {words}" in said.out + said.err
    assert "square" not in said.out + said.err
    assert words.replace(", ", "; ") in kernel_selection.state(replace(GPU, vendor="nvidia"))


def test_an_implementation_that_torch_prefers_to_a_faster_one_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs = Choosing(monkeypatch, cudnn_first=True)
    kernel_selection.select_kernels(GPU, known(tmp_path, attention(flash=1.0, cudnn=2.0, math=9.0)))
    assert (torchs.on["flash"], torchs.on["cudnn"]) == (True, False)
    assert not devices.may_attend("cudnn")
    torchs = Choosing(monkeypatch, cudnn_first=True)
    kernel_selection.select_kernels(GPU, known(tmp_path, attention(flash=2.0, cudnn=1.0, math=9.0)))
    assert (torchs.on["flash"], torchs.on["cudnn"]) == (True, True)


@pytest.mark.parametrize("flex", [True, False])
def test_attention_without_a_fused_kernel_is_warned_of_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flex: bool
) -> None:
    Choosing(monkeypatch)
    monkeypatch.setattr(kernel_selection, "compiles_kernels", lambda device: True)
    status: TrialStatus = "passed" if flex else "failed"
    tried = TrialResult(kernel=kernel_trials.FLEX, status=status, why="", milliseconds=1.0)
    kernel_selection.select_kernels(GPU, known(tmp_path, [*attention(flash=None, math=9.0), tried]))
    said = capsys.readouterr()
    assert ("memory grows with the square of their length" in said.out + said.err) is not flex
    assert devices.may_attend("flex") is flex


@pytest.mark.parametrize(
    ("varlen", "flex", "taken"),
    [
        (1.0, 2.0, {"varlen", "flex"}),
        (2.0, 1.0, {"flex"}),
        (1.0, None, {"varlen"}),
        (None, 1.0, {"flex"}),
        (None, None, set()),
    ],
)
def test_several_documents_in_a_row_are_left_to_the_faster_that_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, varlen: float | None, flex: float | None, taken: set[str]
) -> None:
    """Flash attention does not know windows and ALiBi, for which the other stays."""
    Choosing(monkeypatch)
    tried = [
        TrialResult(kernel=name, status="passed" if took else "failed", why="", milliseconds=took)
        for name, took in ((kernel_trials.VARLEN, varlen), (kernel_trials.FLEX, flex))
    ]
    kernel_selection.select_kernels(GPU, known(tmp_path, [*attention(flash=1.0, math=9.0), *tried]))
    assert {name for name in ("varlen", "flex") if devices.may_attend(name)} == taken


def test_the_switch_of_amd_is_set_where_attention_passed_with_it(tmp_path: Path) -> None:
    kernel_selection.select_kernels(GPU, known(tmp_path, attention(flash=None, efficient=None, math=9.0)))
    assert kernel_trials.EXPERIMENTAL not in os.environ
    host = known(tmp_path, attention(flash=1.0, math=9.0))
    kernel_selection.select_kernels(GPU, host)
    assert os.environ[kernel_trials.EXPERIMENTAL] == "1"
    opened = replace(host, env={**host.env, kernel_trials.EXPERIMENTAL: "1"})
    assert kernel_trials.load(opened, "amd") is not None, "a later stage of the process finds the same trials"
    closed = replace(host, env={**host.env, kernel_trials.EXPERIMENTAL: "0"})
    assert kernel_trials.load(closed, "amd") is None


@pytest.mark.parametrize(
    ("times", "taken"),
    [((5.0, 0.7), "cublaslt"), ((0.7, 5.0), "cublas"), ((1.0, 1.05), None), ((None, 5.0), "cublaslt")],
)
def test_torchs_library_for_matmuls_stays_unless_it_is_clearly_slower_or_wrong(
    tmp_path: Path, switches: dict[str, object], times: tuple[float | None, float], taken: str | None
) -> None:
    outcomes = [
        TrialResult(
            kernel="matmul",
            implementation=name,
            status="failed" if time is None else "passed",
            why="",
            milliseconds=time,
        )
        for name, time in zip(("hipblas", "hipblaslt"), times, strict=True)
    ]
    kernel_selection.select_kernels(GPU, known(tmp_path, outcomes))
    assert switches.get("blas") == taken  # torch's word for both makers'


def norms(of_torch: float, ours: float | None) -> list[TrialResult]:
    right = TrialResult(kernel="rms-norm", implementation="torch", status="passed", why="right", milliseconds=of_torch)
    status: TrialStatus = "failed" if ours is None else "passed"
    return [right, replace(right, implementation="triton", status=status, why="returns zeros", milliseconds=ours)]


@pytest.mark.parametrize(
    ("of_torch", "ours", "taken"), [(2.0, 1.0, True), (1.0, 2.0, False), (1.0, 1.0, False), (2.0, None, False)]
)
def test_a_kernel_of_our_own_is_used_only_where_it_is_right_and_faster(
    tmp_path: Path, of_torch: float, ours: float | None, taken: bool
) -> None:
    devices.trust(("rms-norm",))  # as a device before this one was told
    kernel_selection.select_kernels(GPU, known(tmp_path, [*attention(flash=1.0), *norms(of_torch, ours)]))
    assert devices.trusted("rms-norm") == taken
    assert ("by Triton: rms-norm" in kernel_selection.state(GPU)) == taken


def test_a_kernel_of_our_own_that_failed_is_named_and_keeps_nobody_from_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel_selection.select_kernels(GPU, known(tmp_path, norms(1.0, None)))
    said = capsys.readouterr()
    assert "rms-norm by torch" in said.out + said.err
    assert "rms-norm-triton is not used here: returns zeros" in said.out + said.err


def test_a_device_that_was_not_tried_trusts_nothing(tmp_path: Path) -> None:
    devices.trust(("rms-norm",))
    host = replace(MATRIX["no-gpu"].build(tmp_path), cache=tmp_path / "cache")
    kernel_selection.select_kernels(find("cpu", host), host)
    assert not devices.kernel_words()


def test_a_run_says_what_it_takes_and_what_it_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel_selection.select_kernels(GPU, known(tmp_path, attention(flash=1.0, efficient=None)))
    said = capsys.readouterr()
    assert "kernels: attention by flash" in said.out + said.err
    assert "attention-efficient is not used here: returns NaN" in said.out + said.err


def test_a_run_does_not_start_where_a_kernel_fails(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="attention-flash computes wrong numbers"):
        kernel_selection.select_kernels(GPU, known(tmp_path, attention(flash=None, math=None)))


def test_a_new_gpu_is_tried_once(tmp_path: Path) -> None:
    host, asked = MATRIX["7900-xtx-x2"].build(tmp_path), list[str]()

    def run(command: Sequence[str], limit: float) -> CommandResult:
        asked.extend(command)
        return host.run(command, limit)

    watched = replace(host, run=run, cache=tmp_path / "cache")
    taken = kernel_selection.select_kernels(GPU, watched)
    assert {"launch", "matmul-blaslt", "attention-flash", "training"} <= set(asked)
    assert taken["attention"].implementation == "flash"
    asked.clear()
    assert kernel_selection.select_kernels(GPU, watched) == taken
    assert asked == []


def test_a_processor_is_not_tried_by_a_run(tmp_path: Path) -> None:
    host = replace(
        MATRIX["no-gpu"].build(tmp_path), cache=tmp_path / "cache", run=lambda *_: pytest.fail("it was tried")
    )
    assert kernel_selection.select_kernels(find("cpu", host), host) == {}


def test_a_compiled_library_that_failed_is_not_used(tmp_path: Path) -> None:
    kernel_selection.select_kernels(CPU, known(tmp_path, attention(flash=2.0, native=None), "cpu"))
    assert native.library("training") is None
    assert native.state("training") == "off (attention-native returns NaN)"
    assert native.library("products") is None  # it has part in attention


def test_a_resumed_run_can_see_which_kernels_were_taken(tmp_path: Path) -> None:
    before = kernel_selection.state(CPU)
    kernel_selection.select_kernels(CPU, known(tmp_path, attention(flash=2.0, native=None), "cpu"))
    assert kernel_selection.state(CPU) != before
    assert "attention: " in kernel_selection.state(GPU)


def test_a_compiled_library_that_is_slower_than_torch_is_not_used(tmp_path: Path) -> None:
    taken = kernel_selection.select_kernels(CPU, known(tmp_path, attention(flash=2.0, native=3.0), "cpu"))
    assert taken["attention"].implementation == "flash"
    assert native.state("training") == "off (it takes 3.0 ms where torch takes 2.0)"


def test_a_compiled_block_that_failed_is_known_with_its_reason(tmp_path: Path) -> None:
    bad = TrialResult(kernel="block", implementation="compiled", status="failed", why="timed out")
    host = known(tmp_path, [bad])
    assert kernel_selection.why_not("block-compiled", GPU, host) == "timed out"
    assert kernel_selection.why_not("training", GPU, host) == ""


def test_a_deterministic_run_keeps_its_choice_after_the_machine_was_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two libraries that are as fast as each other: the next trial may see them the other way round."""
    keep = tmp_path / "kernels.json"
    first = kernel_selection.select_kernels(GPU, known(tmp_path, attention(flash=1.0, efficient=1.1, math=9.0)), keep)
    again = known(tmp_path, attention(flash=1.1, efficient=1.0, math=9.0))
    assert kernel_selection.select_kernels(GPU, again, keep) == first
    assert kernel_selection.select_kernels(GPU, again)["attention"].implementation == "efficient"
    capsys.readouterr()
    other = replace(again, env={**again.env, "TORCH_BLAS_PREFER_HIPBLASLT": "0"})
    kernel_trials.save(other, "amd", attention(flash=None, efficient=1.0, math=9.0))
    assert kernel_selection.select_kernels(GPU, other, keep)["attention"].implementation == "efficient"
    said = capsys.readouterr()
    assert "has changed since the run began" in said.out + said.err
