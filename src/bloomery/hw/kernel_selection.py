"""
Select each kernel of a run: the fastest implementation that passed its trial.

An implementation that failed its trial is never selected. Bloomery tries a GPU when a run first meets it. It tries
again when driver, torch, Triton or environment have changed. Only `bloomery doctor` tries a CPU. The compiled
library is what differs between two CPUs, and tests compare it.

torch chooses an implementation of attention for each call: the first of a list that accepts the tensors. So a run
leaves on all that passed, fastest first, and then asks torch what it would take.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.core import native
from bloomery.core.log import info
from bloomery.hw import device as devices
from bloomery.hw import kernel_trials
from bloomery.hw import require_torch as require_torch
from bloomery.hw.device import Device, compiles_kernels
from bloomery.hw.host import Host
from bloomery.hw.kernel_trials import TrialResult

import torch
from torch.nn.attention import SDPBackend

LIBRARY, PRODUCTS = "training", "products"
"""Of native/: that which holds kernels of training, and that which has part in attention."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Implementations of attention in torch, by their words in trials."""
WORTH_A_CHANGE = 1.1
"""A library for matmuls replaces torch's choice only if the other library takes at least this many times as long."""
LONG_ROW = 1024
"""Tokens from which on attention that keeps a number for each pair of tokens is worth a warning."""
_ATTENTION: dict[str, str] = {}
"""What torch takes in this process: kind of call -> implementation. Empty where no GPU was asked."""


def select_kernels(device: Device, host: Host | None = None, keep: Path | None = None) -> Mapping[str, TrialResult]:
    """
    Take the kernels for a run on this device in this process, and say which. Returns kernel -> implementation.

    With `keep`, a file, the outcomes of trials are kept there and taken from there again. So a resumed run chooses the
    same kernels after the machine was tried again.

    Raises HardwareError where one that training needs fails on this machine in all its implementations.
    """
    host = host or Host.here()
    devices.trust(())
    devices.leave_attention(())
    _ATTENTION.clear()
    outcomes = _kept(device, host, keep) if keep is not None else known(device, host)
    if outcomes is None:
        return {}
    kernel_trials.check(outcomes)
    selected = kernel_trials.choose(outcomes)
    if device.torch_device.type == "cuda":
        _take_attention(device, outcomes)
        _take_matmuls([one for one in outcomes if one.kernel == "matmul"])
    _trust(selected)
    wrong = {one.name: one.why for one in _failed(outcomes)}
    if fault := kernel_trials.library_fault(outcomes):
        native.refuse(LIBRARY, fault)
        if any(one.kernel == "attention" and one.implementation == kernel_trials.NATIVE for one in _failed(outcomes)):
            native.refuse(PRODUCTS, fault)
    info(f"  kernels: {kernel_trials.summary(outcomes)}")
    for name, why in wrong.items():
        info(f"  {name} is not used here: {why}", style="yellow")
    _report_attention(device)
    return selected


def trust_tried(device: Device) -> None:
    """Use our own kernels where earlier trials of this GPU found them fastest, and this process has selected none."""
    outcomes = None if _ATTENTION else kernel_trials.load(Host.here(), device.vendor)
    if outcomes is not None:
        _take_attention(device, outcomes)
        _trust(kernel_trials.choose(outcomes))


def _trust(selected: Mapping[str, TrialResult]) -> None:
    devices.trust(kernel for kernel, one in selected.items() if one.implementation == kernel_trials.OWN)


def _failed(outcomes: Sequence[TrialResult]) -> list[TrialResult]:
    return [one for one in outcomes if one.status == "failed"]


def _kept(device: Device, host: Host, file: Path) -> Sequence[TrialResult] | None:
    """The outcomes in the file of a run. A new file is written; that of another machine is replaced, with a warning."""
    if (kept := kernel_trials.read(file, host, device.vendor)) is not None:
        return kept
    outcomes = known(device, host)
    if outcomes is not None:
        if file.exists():
            what = "this machine, its driver or its software has changed since the run began"
            info(f"  {what}: kernels are chosen again, and numbers may differ in their last bits", style="yellow")
        kernel_trials.write(file, host, device.vendor, outcomes)
    return outcomes


def known(device: Device, host: Host) -> Sequence[TrialResult] | None:
    """What trials of this machine found. A GPU that was not tried as it is now is tried first."""
    outcomes = kernel_trials.load(host, device.vendor)
    if outcomes is not None or device.torch_device.type == "cpu":
        return outcomes
    with kernel_trials.alone(host):
        outcomes = kernel_trials.load(host, device.vendor)  # another rank has been here
        if outcomes is None:
            info("  this device is new, or its driver or software is: its kernels are tried first, once")
            outcomes = list(kernel_trials.tried(host, device.vendor))
            kernel_trials.save(host, device.vendor, outcomes)
    return outcomes


def why_not(name: str, device: Device, host: Host | None = None) -> str:
    """What a trial found to be wrong with an implementation, by its name; "" for nothing."""
    outcomes = kernel_trials.load(host or Host.here(), device.vendor) or ()
    return next((one.why for one in outcomes if one.name == name and one.status == "failed"), "")


def state(device: Device) -> str:
    """What this process computes with, as far as it could be otherwise: resumed runs compare it."""
    words = [f"compiled library: {native.state(LIBRARY)}"]
    if device.torch_device.type == "cuda":
        switches: Any = torch.backends.cuda
        enabled = {
            "flash": switches.flash_sdp_enabled(),
            "efficient": switches.mem_efficient_sdp_enabled(),
            "cudnn": switches.cudnn_sdp_enabled(),
            "math": switches.math_sdp_enabled(),
        }
        order = [name for name in _order_now() if enabled[name]]
        others = [name for name in ("varlen", "flex") if devices.may_attend(name)]
        words.append(f"attention: {', '.join([*order, *others])}")
        words.extend(f"{kind} by {name}" for kind, name in _ATTENTION.items())
        words.append(f"matmuls: {torch.backends.cuda.preferred_blas_library()}")
        if torch.are_deterministic_algorithms_enabled():
            words.append("deterministic")
        if devices.kernel_words():
            words.append(f"by Triton: {devices.kernel_words()}")
    return "; ".join(words)


def _take_attention(device: Device, outcomes: Sequence[TrialResult]) -> None:
    """
    Leave on what passed, fastest first, and ask torch what it takes. Some builds put cuDNN first whatever they are
    told; it is switched off where another implementation is faster.
    """
    order, switches = kernel_trials.attention_order(outcomes), _switches()
    documents = kernel_trials.documents_by(outcomes)
    known_here = {one.implementation for one in outcomes if one.kernel == "attention"} | {"flex", "varlen"}
    # Where flex is faster, the other is left alone; where flash attention is, flex still has windows and ALiBi.
    kept = documents if documents[:1] == ["varlen"] else documents[:1]
    left = known_here - {*order, *kept}
    devices.leave_attention(left)
    if kernel_trials.needs_experimental(device.vendor, outcomes):
        os.environ.setdefault(kernel_trials.EXPERIMENTAL, "1")  # AOTriton reads it in the first call of attention
    for name, switch in switches.items():
        switch(name in order)
    rest = [name for name in BACKENDS if name not in order]
    _set_order([*order, *rest])
    if not torch.cuda.is_available():
        return
    _ATTENTION.update(_choices(device))
    if order and (preferred := _ATTENTION[ROWS]) != order[0] and preferred in kernel_trials.FUSED_ATTENTION:
        switches[preferred](False)
        again = _choices(device)
        if again[ROWS] == order[0]:
            devices.leave_attention(left | {preferred})
            _ATTENTION.update(again)
        else:
            switches[preferred](True)


def _switches() -> dict[str, Callable[[bool], None]]:
    switches: Any = torch.backends.cuda
    return {
        "flash": switches.enable_flash_sdp,
        "efficient": switches.enable_mem_efficient_sdp,
        "cudnn": switches.enable_cudnn_sdp,
        "math": switches.enable_math_sdp,
    }


def _set_order(names: Sequence[str]) -> None:
    """Torch tries implementations in this order, and its default has the slowest before cuDNN's."""
    library: Any = torch._C
    others = [number for number in library._get_sdp_priority_order() if number not in map(_number, BACKENDS)]
    library._set_sdp_priority_order([*map(_number, names), *others])


def _order_now() -> list[str]:
    library: Any = torch._C
    names = {_number(name): name for name in BACKENDS}
    return [names[number] for number in library._get_sdp_priority_order() if number in names]


def _number(name: str) -> int:
    """Torch's number of an implementation."""
    backend: Any = BACKENDS[name]
    return int(backend.value)


ROWS, MASKED, FLOAT32 = "causal rows", "masked rows", "rows in float32"


def _choices(device: Device) -> dict[str, str]:
    """Which implementation torch takes on this device, by kind of call, as model/attention.py calls it."""
    library: Any = torch
    half = device.compute_dtype if device.compute_dtype != torch.float32 else torch.float16
    names = {_number(name): name for name in BACKENDS}

    def choice(dtype: torch.dtype, masked: bool) -> str:
        shape = (1, 4, LONG_ROW, 64)
        q, k, v = (torch.zeros(shape, device=device.torch_device, dtype=dtype, requires_grad=True) for _ in range(3))
        bias = torch.zeros(1, 1, LONG_ROW, LONG_ROW, device=device.torch_device, dtype=dtype) if masked else None
        number = library._fused_sdp_choice(q, k, v, bias, 0.0, not masked, scale=None, enable_gqa=False)
        return names.get(int(number), "another")

    return {ROWS: choice(half, False), MASKED: choice(half, True), FLOAT32: choice(torch.float32, False)}


def _report_attention(device: Device) -> None:
    """Say what attention is computed by, and warn where its memory grows with the square of the row."""
    if not _ATTENTION:
        return
    flex = devices.may_attend("flex") and compiles_kernels(device.torch_device)
    info(f"  attention: {', '.join(f'{kind} by {name}' for kind, name in _ATTENTION.items())}")
    square = [kind for kind, name in _ATTENTION.items() if name == "math"]
    if square and not flex:
        what = f"{' and '.join(square)} of {LONG_ROW:,} tokens or more have no fused attention here"
        info(f"  {what}: memory grows with the square of their length. {FIX}", style="yellow")


FIX = "Set a shorter model.context_length, or run `bloomery doctor` to see why kernels failed."


def _take_matmuls(outcomes: Sequence[TrialResult]) -> None:
    """
    Leave torch's choice of a library, unless a library failed or is clearly slower: the trial multiplies other shapes
    than a run, and torch's choice has kernels that add a bias too.
    """
    passed = {one.implementation: one.milliseconds for one in outcomes if one.status == "passed"}
    failed = any(one.status == "failed" for one in outcomes)
    times = [took for took in passed.values() if took]
    if not passed or not (failed or (len(times) > 1 and max(times) >= WORTH_A_CHANGE * min(times))):
        return
    best = min(passed, key=lambda name: passed[name] or float("inf"))
    torch.backends.cuda.preferred_blas_library("cublaslt" if best.endswith("lt") else "cublas")
