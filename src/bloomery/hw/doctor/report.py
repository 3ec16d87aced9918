"""
The whole examination of a machine, and how it is told.

Files come first, then torch in a child process, then what torch computes, in others: a broken stack can crash or hang
at its first kernel, long after it said that all is well. Each check is a function from facts to findings; one that
does not concern the machine says nothing. The order of CHECKS is the order of the report.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bloomery.hw import wheel
from bloomery.hw.doctor import build, computing, graphics, nodes, packages, system
from bloomery.hw.doctor.finding import Check, Facts, Finding
from bloomery.hw.gpus import find_gpus
from bloomery.hw.host import Host, Reply
from bloomery.hw.trials import Trial, command, merged


def examine(host: Host, runs: Path) -> list[Finding]:
    """Every finding about a machine. `runs` is the folder that runs would be written to."""
    facts = gather(host, runs)
    return [finding for check in CHECKS for finding in check(facts)]


def shown(host: Host) -> Host:
    """The same machine, whose commands are named on the terminal while they run: some take a minute."""

    def run(command: Sequence[str], limit_seconds: float) -> Reply:
        print(f"\r\x1b[K  {command[-1]} …", end="", file=sys.stderr, flush=True)
        reply = host.run(command, limit_seconds)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return reply

    return replace(host, run=run)


def gather(host: Host, runs: Path) -> Facts:
    """What the checks look at. torch is imported in a child process, if there is one."""
    have = wheel.installed(host)
    trial = Trial(kernel="torch")
    reply = host.run(command(host, trial), trial.limit_seconds) if have else Reply(code=1)
    told = merged(reply)
    seen = told if reply.code == 0 and "version" in told else None
    return Facts(host=host, runs=runs, gpus=find_gpus(host), have=have, seen=seen, reply=reply)


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
        lines += [f"{'':<{width + 4}}{line}" for line in finding.cure.splitlines()]
    return lines


CHECKS: tuple[Check, ...] = (
    system.python_version,
    graphics.graphics,
    graphics.amd_driver,
    nodes.amd_nodes,
    nodes.nvidia_nodes,
    system.windows,
    graphics.hsa_override,
    graphics.visible,
    graphics.mixed,
    graphics.allocator,
    graphics.gtt,
    graphics.several,
    graphics.kernel_log,
    build.torch_build,
    packages.conflicts,
    system.processor,
    system.quota,
    system.memory,
    system.memory_speed,
    system.shared_memory,
    system.disk,
    system.compiled,
    computing.kernels,
    computing.speed,
    computing.refill,
    computing.all_reduce,
)
