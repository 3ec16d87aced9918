"""
Select each kernel of a run: the fastest implementation that passed its trial.

An implementation that failed its trial is never selected. Bloomery tries a GPU when a run first meets it. It tries
again when driver, torch, Triton or environment have changed. Only `bloomery doctor` tries a CPU. The compiled
library is what differs between two CPUs, and tests compare it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.core import native
from bloomery.core.log import info
from bloomery.hw import kernel_trials
from bloomery.hw import require_torch as require_torch
from bloomery.hw.device import Device
from bloomery.hw.host import Host
from bloomery.hw.kernel_trials import TrialResult

import torch

LIBRARY, PRODUCTS = "training", "products"
"""Of native/: that which holds kernels of training, and that which has part in attention."""


def select_kernels(device: Device, host: Host | None = None) -> Mapping[str, TrialResult]:
    """
    Take the kernels for a run on this device in this process, and say which. Returns kernel -> implementation.

    Raises HardwareError where one that training needs fails on this machine in all its implementations.
    """
    host = host or Host.here()
    kernel_trials.trust(())
    outcomes = known(device, host)
    if outcomes is None:
        return {}
    kernel_trials.check(outcomes)
    selected = kernel_trials.choose(outcomes)
    if device.torch_device.type == "cuda":
        _take_attention({one.implementation: one for one in outcomes if one.kernel == "attention"})
        if "matmul" in selected and selected["matmul"].implementation:
            library = "cublaslt" if selected["matmul"].implementation.endswith("lt") else "cublas"
            torch.backends.cuda.preferred_blas_library(library)
    kernel_trials.trust(kernel for kernel, one in selected.items() if one.implementation == kernel_trials.OWN)
    wrong = {one.name: one.why for one in _failed(outcomes)}
    if fault := kernel_trials.library_fault(outcomes):
        native.refuse(LIBRARY, fault)
        if any(one.kernel == "attention" and one.implementation == kernel_trials.NATIVE for one in _failed(outcomes)):
            native.refuse(PRODUCTS, fault)
    info(f"  kernels: {kernel_trials.summary(outcomes)}")
    for name, why in wrong.items():
        info(f"  {name} is not used here: {why}", style="yellow")
    return selected


def _failed(outcomes: Sequence[TrialResult]) -> list[TrialResult]:
    return [one for one in outcomes if one.status == "failed"]


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
        attention = {
            "flash": switches.flash_sdp_enabled(),
            "efficient": switches.mem_efficient_sdp_enabled(),
            "cudnn": switches.cudnn_sdp_enabled(),
            "math": switches.math_sdp_enabled(),
        }
        words.append(f"attention: {', '.join(name for name, on in attention.items() if on)}")
        words.append(f"matmuls: {torch.backends.cuda.preferred_blas_library()}")
        if kernel_trials.state():
            words.append(f"by Triton: {kernel_trials.state()}")
    return "; ".join(words)


def _take_attention(outcomes: Mapping[str, TrialResult]) -> None:
    """
    Leave on what passed, but of the fused ones none that torch prefers to the fastest. `efficient` stays behind
    `flash`, because it also takes masks, and `math` stays for what no fused one takes.
    """
    passed = {name: one.milliseconds or float("inf") for name, one in outcomes.items() if one.status == "passed"}
    fused = [name for name in ("flash", "efficient", "cudnn") if name in passed]
    fastest = min(fused, key=lambda name: passed[name], default="math")
    on = {fastest, "math", *(["efficient"] if fastest == "flash" else [])} & passed.keys()
    torch.backends.cuda.enable_flash_sdp("flash" in on)
    torch.backends.cuda.enable_mem_efficient_sdp("efficient" in on)
    torch.backends.cuda.enable_cudnn_sdp("cudnn" in on)
    torch.backends.cuda.enable_math_sdp("math" in on)
