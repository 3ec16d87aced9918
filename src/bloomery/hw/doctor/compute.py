"""
Check whether torch computes correct numbers here, and how fast.

Each probe runs in a process of its own, with a time limit.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bloomery.hw import kernel_trials, specs
from bloomery.hw.doctor.finding import GIB, Finding, MachineFacts
from bloomery.hw.doctor.software import reinstall
from bloomery.hw.kernel_trials import (
    EXPERIMENTAL,
    FUSED_ATTENTION,
    KernelTrial,
    TrialResult,
    command,
    ending,
    merged,
    trials,
)

PREFER_LT = "TORCH_BLAS_PREFER_HIPBLASLT"
WORTH_A_WORD = 1.25
"""A switch is reported where it makes matmuls at least this many times as fast."""
FAR_BELOW = 0.5
"""Large matmuls and copies on a healthy device reach a larger share of the spec sheet."""
LIMITS = {
    "amd": "cd /sys/class/drm && head card*/device/{gpu_busy_percent,power_dpm_force_performance_level,pp_dpm_sclk}"
    "   # another program, or a low clock? See the finding hipblaslt too",
    "nvidia": "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,UTILIZATION   # another program, or a limit of power or heat?",
}
"""What shows why a device is slow."""


def vendor(facts: MachineFacts) -> str:
    """Whose device torch would compute on here, in the words of `Device.vendor`."""
    seen = facts.seen or {}
    if seen.get("gpus"):
        return "amd" if seen.get("hip") or "rocm" in str(seen["version"]) else "nvidia"
    return "apple" if seen.get("apple") else "cpu"


def kernels(facts: MachineFacts) -> Iterator[Finding]:
    """
    Every implementation of every kernel. Results are saved for runs, which take the fastest that passed. Saved results
    count until something changes that they depend on, unless a trial failed or `retry` asks for new ones.
    """
    if facts.seen is None:
        return
    if facts.quick and not kernel_trials.load(facts.host, vendor(facts)):
        return
    outcomes = [] if facts.retry else kernel_trials.load(facts.host, vendor(facts)) or []
    saved = bool(outcomes) and (facts.quick or all(one.status != "failed" for one in outcomes))
    if saved:
        yield from (_finding(facts, outcome, outcomes) for outcome in outcomes)
    else:
        outcomes = []
        for outcome in kernel_trials.tried(facts.host, vendor(facts)):
            outcomes.append(outcome)
            if outcome.status != "failed":
                yield _finding(facts, outcome, outcomes)
        kernel_trials.save(facts.host, vendor(facts), outcomes)
        yield from (_finding(facts, outcome, outcomes) for outcome in outcomes if outcome.status == "failed")
    yield from _quadratic(facts, outcomes)
    yield from _attention_switch(facts, outcomes)
    again = " (saved results; `bloomery doctor --retry` tests again)" if saved else ""
    order = kernel_trials.attention_order(outcomes) if vendor(facts) in ("amd", "nvidia") else []
    then = f"; attention in this order: {', '.join(order)}" if len(order) > 1 else ""
    yield Finding(id="choice", status="ok", value=f"runs use {kernel_trials.summary(outcomes)}{then}{again}")


def _finding(facts: MachineFacts, outcome: TrialResult, outcomes: Sequence[TrialResult]) -> Finding:
    if outcome.status != "failed":
        took = f"{outcome.milliseconds:.2f} ms" if outcome.milliseconds is not None else ""
        absent = "not available: " if outcome.status == "absent" else ""
        value = f"{absent}{outcome.why}{f' ({took})' if took else ''}"
        brief = "" if absent else ", ".join(filter(None, ["correct", took]))
        return Finding(id=outcome.name, status="ok", value=value, brief=brief)
    if outcome.kernel in kernel_trials.REPLACEABLE or outcome.kernel in kernel_trials.choose(outcomes):
        trial = next(trial for trial in trials(vendor(facts)) if trial.name == outcome.name)
        hint = f"{shlex.join(command(facts.host, trial))}   # shows the error; runs use another kernel"
        return Finding(id=outcome.name, status="warn", value=outcome.why, hint=hint)
    hint = f'{reinstall(facts.host)}   # or use the CPU: device="cpu"'
    return Finding(id=outcome.name, status="fail", value=outcome.why, hint=hint)


def _fused(outcomes: Sequence[TrialResult]) -> list[TrialResult]:
    return [one for one in outcomes if one.kernel == "attention" and one.implementation in FUSED_ATTENTION]


def _attention_switch(facts: MachineFacts, outcomes: Sequence[TrialResult]) -> Iterator[Finding]:
    """Whether fused attention on AMD passed with the kernels of AOTriton that are off for some chips."""
    if vendor(facts) != "amd":
        return
    by_user, passed = facts.host.env.get(EXPERIMENTAL), kernel_trials.needs_experimental("amd", outcomes)
    closed = by_user is not None and by_user != "1"
    value = f"fused attention {'passed' if passed else 'did not pass'} with {EXPERIMENTAL}={by_user or 1}"
    if passed and by_user is None:
        value += ", which runs set"
    warn = closed and not passed
    hint = f"unset {EXPERIMENTAL}   # runs set it themselves, and use only what passes" if warn else ""
    yield Finding(id="aotriton", status="warn" if warn else "ok", value=value, hint=hint)


def _quadratic(facts: MachineFacts, outcomes: Sequence[TrialResult]) -> Iterator[Finding]:
    """Without fused attention a GPU keeps a number for each pair of tokens, for each head of each layer."""
    fused = [*_fused(outcomes), *(one for one in outcomes if one.name == kernel_trials.FLEX)]
    if vendor(facts) not in ("amd", "nvidia") or not fused or any(one.status == "passed" for one in fused):
        return
    value = "no fused attention: memory grows with the square of the context (6 bytes for each head and pair of tokens)"
    hint = "bloomery run RECIPE pretrain.model.context_length=1024   # or another short context"
    yield Finding(id="attention", status="warn", value=value, hint=hint)


def speed(facts: MachineFacts) -> Iterator[Finding]:
    """Speed of matmuls and copies, and on AMD of matmuls by each library."""
    if facts.seen is None:
        return
    trial = KernelTrial(kernel="speed")
    reply = facts.host.run(command(facts.host, trial), trial.limit_seconds)
    metrics = merged(reply)
    if "bytes_per_second" not in metrics:
        value = f"the measurement {ending(reply)}"
        hint = f"{shlex.join(command(facts.host, trial))}   # shows more"
        yield Finding(id="speed", status="warn", value=value, hint=hint)
        return
    rate, copied = metrics["flops"] / 1e12, metrics["bytes_per_second"] / 1e9
    value = f"{rate:.2f} TFLOP/s in {metrics['dtype']} matmuls, {copied:.0f} GB/s to and from memory"
    shares = promised(metrics) if vendor(facts) in LIMITS else []
    slow = any(share < FAR_BELOW for share, _ in shares)
    value = ": ".join(
        [value, *([" and ".join(f"{share:.0%} of {whose}" for share, whose in shares)] if shares else [])]
    )
    hint = LIMITS[vendor(facts)] if slow else ""
    yield Finding(id="speed", status="warn" if slow else "ok", value=value, hint=hint)
    if vendor(facts) != "amd":
        return
    rates = {}
    for switch in ("0", "1"):
        other = replace(trial, env={PREFER_LT: switch})
        rates[switch] = merged(facts.host.run(command(facts.host, other), trial.limit_seconds)).get("flops", 0.0) / 1e12
    best = max(rates, key=lambda switch: rates[switch])
    value = f"{rates['1']:.1f} TFLOP/s with hipBLASLt, {rates['0']:.1f} without, {rate:.1f} with default settings"
    slow = rates[best] > WORTH_A_WORD * rate
    hint = f"export {PREFER_LT}={best}" if slow else ""
    yield Finding(id="hipblaslt", status="warn" if slow else "ok", value=value, hint=hint)


def promised(metrics: Mapping[str, Any]) -> list[tuple[float, str]]:
    """
    The measured speeds as shares of this device's specs. For matmuls: of the FLOP/s that others have measured, else of
    the maker's peak. For copies: of the bandwidth. Empty where the specs are doubtful or unknown.
    """
    entry = specs.of_device(str(metrics.get("device", "")))
    if entry is None or entry.sure == "doubtful":
        return []
    shares, peak = [], entry.peak(metrics["dtype"])
    if entry.gemm is not None and metrics["dtype"] == "bfloat16":
        shares.append((metrics["flops"] / entry.gemm, f"the {entry.gemm / 1e12:.4g} TFLOP/s that others measured"))
    elif peak is not None:
        shares.append((metrics["flops"] / peak, f"the spec sheet's {peak / 1e12:.4g} TFLOP/s"))
    if entry.bandwidth is not None:
        shares.append((metrics["bytes_per_second"] / entry.bandwidth, f"{entry.bandwidth / 1e9:.4g} GB/s"))
    return shares


def refill(facts: MachineFacts) -> Iterator[Finding]:
    """Fill most of a GPU's memory, free it, and fill it again."""
    if facts.seen is None or vendor(facts) not in ("amd", "nvidia"):
        return
    trial = KernelTrial(kernel="refill")
    reply = facts.host.run(command(facts.host, trial), trial.limit_seconds)
    metrics = merged(reply)
    if "filled_bytes" in metrics and not metrics["wrong_1"] and not metrics["wrong_2"]:
        value = f"{metrics['filled_bytes'] / GIB:.1f} GiB filled, freed and filled again"
        yield Finding(id="refill", status="ok", value=value)
        return
    wrong = metrics.get("wrong_1", 0) + metrics.get("wrong_2", 0)
    where = f" at {metrics['trying']}" if "trying" in metrics else ""
    value = f"{wrong} blocks of memory lost their contents" if wrong else f"filling memory {ending(reply)}{where}"
    hint = "ps aux --sort=-rss | head   # shows what else uses memory. Integrated GPU: see the finding gtt"
    yield Finding(id="refill", status="fail", value=value, hint=hint)


def all_reduce(facts: MachineFacts) -> Iterator[Finding]:
    """Whether several GPUs can add up their numbers, under a watchdog."""
    if facts.seen is None or facts.seen["gpus"] < 2:
        return
    trial = KernelTrial(kernel="all-reduce")
    reply = facts.host.run(command(facts.host, trial), trial.limit_seconds)
    metrics = merged(reply)
    if reply.code == 0 and metrics.get("wrong") == 0 and not any(metrics.get("codes", [1])):
        value = f"{metrics['ranks']} GPUs: all-reduce at {metrics['bytes_per_second'] / 1e9:.1f} GB/s per GPU"
        yield Finding(id="all-reduce", status="ok", value=value)
        return
    bad = (
        "wrong sums"
        if metrics.get("wrong")
        else ending(reply)
        if reply.code != 0
        else f"ranks ended with {metrics.get('codes')}"
    )
    hint = "export NCCL_P2P_DISABLE=1   # and see the findings iommu and seccomp"
    yield Finding(id="all-reduce", status="fail", value=f"all-reduce between GPUs: {bad}", hint=hint)
