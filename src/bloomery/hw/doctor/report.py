"""
The whole examination of a machine, and its report.

Files come first, then torch in a child process, then the results of torch, in other child processes. A broken stack
can crash or hang at its first kernel, long after it reported success. Each check is a function from facts to findings.
A check that does not concern the machine yields none. The order of CHECKS is the order of the report.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bloomery.hw import torch_install
from bloomery.hw.doctor import compute, gpu, software
from bloomery.hw.doctor.finding import CheckFunction, Finding, MachineFacts
from bloomery.hw.gpus import find_gpus
from bloomery.hw.host import CommandResult, Host
from bloomery.hw.kernel_trials import KernelTrial, command, merged


def examine(host: Host, runs: Path) -> list[Finding]:
    """Every finding about a machine. `runs` is the folder that runs would be written to."""
    facts = gather(host, runs)
    return [finding for check in CHECKS for finding in check(facts)]


def shown(host: Host) -> Host:
    """The same machine, whose commands are named on the terminal while they run: some take a minute."""

    def run(command: Sequence[str], limit_seconds: float) -> CommandResult:
        print(f"\r\x1b[K  {command[-1]} …", end="", file=sys.stderr, flush=True)
        reply = host.run(command, limit_seconds)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return reply

    return replace(host, run=run)


def gather(host: Host, runs: Path) -> MachineFacts:
    """What the checks look at. torch is imported in a child process, if there is one."""
    have = torch_install.installed(host)
    trial = KernelTrial(kernel="torch")
    reply = host.run(command(host, trial), trial.limit_seconds) if have else CommandResult(code=1)
    answer = merged(reply)
    seen = answer if reply.code == 0 and "version" in answer else None
    return MachineFacts(host=host, runs=runs, gpus=find_gpus(host), have=have, seen=seen, reply=reply)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where all is well, 1 with warnings, 2 with failures."""
    return max(({"ok": 0, "warn": 1, "fail": 2}[finding.status] for finding in findings), default=0)


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """The report for a person."""
    marks = {"ok": "✓", "warn": "!", "fail": "✗"}
    width = max((len(finding.id) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.status]} {finding.id:<{width}}  {finding.value}")
        lines += [f"{'':<{width + 4}}{line}" for line in finding.hint.splitlines()]
    return lines


CHECKS: tuple[CheckFunction, ...] = (
    software.python_version,
    gpu.graphics,
    gpu.amd_driver,
    gpu.amd_nodes,
    gpu.nvidia_nodes,
    software.windows,
    gpu.hsa_override,
    gpu.visible,
    gpu.mixed,
    gpu.allocator,
    gpu.gtt,
    gpu.several,
    gpu.kernel_log,
    software.torch_build,
    software.conflicts,
    software.processor,
    software.quota,
    software.memory,
    software.memory_speed,
    software.shared_memory,
    software.disk,
    software.compiled,
    compute.kernels,
    compute.speed,
    compute.refill,
    compute.all_reduce,
)
