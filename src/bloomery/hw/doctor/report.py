"""
The whole examination of a machine, and how it is told.

Files come first, then torch in a child process, then what torch computes, in others: a broken stack can crash or hang
at its first kernel, long after it said that all is well. Each check is a function from facts to findings; one that
does not concern the machine says nothing. The order of CHECKS is the order of the report.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from bloomery.hw import wheel
from bloomery.hw.doctor import build, graphics, packages, system
from bloomery.hw.doctor.build import ending, reinstall
from bloomery.hw.doctor.finding import Check, Facts, Finding, merged
from bloomery.hw.gpus import find_gpus
from bloomery.hw.host import Host, Reply

IMPORT_LIMIT_SECONDS = 120.0
PROBE_LIMIT_SECONDS = 240.0
LARGEST_MATMUL_ERROR = 0.02  # bfloat16 keeps 8 bits, which gives about 0.003


def examine(host: Host, runs: Path) -> list[Finding]:
    """Every finding about a machine. `runs` is the folder that runs would be written to."""
    facts = gather(host, runs)
    return [finding for check in CHECKS for finding in check(facts)]


def gather(host: Host, runs: Path) -> Facts:
    """What the checks look at. torch is imported in a child process, if there is one."""
    have = wheel.installed(host)
    reply = probe(host, "torch", IMPORT_LIMIT_SECONDS) if have else Reply(code=1)
    told = merged(reply)
    seen = told if reply.code == 0 and "version" in told else None
    return Facts(host=host, runs=runs, gpus=find_gpus(host), have=have, seen=seen, reply=reply)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where all is well, 1 with warnings, 2 with failures."""
    return max(({"ok": 0, "warn": 1, "fail": 2}[finding.status] for finding in findings), default=0)


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """The report for a person."""
    marks = {"ok": "✓", "warn": "!", "fail": "✗"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.status]} {finding.id:<17} {finding.value}")
        lines += [f"{'':<20}{line}" for line in finding.cure.splitlines()]
    return lines


def probe(host: Host, name: str, limit_seconds: float) -> Reply:
    """Ask torch something in a process of its own."""
    return host.run([host.python, "-X", "faulthandler", "-m", "bloomery.hw.probe", name], limit_seconds)


def computing(facts: Facts) -> Iterator[Finding]:
    """Whether torch computes right numbers here: one product, and sixty steps whose loss must halve."""
    if facts.seen is None:
        return
    reply = probe(facts.host, "compute", PROBE_LIMIT_SECONDS)
    told = merged(reply)
    where = f"on {told.get('device', 'the device')} in {told.get('dtype', 'its dtype')}"
    cure = f"Do not train on it: take the processor, or another torch:\n{reinstall(facts.host)}"
    error = told.get("matmul_error")
    if error is None:
        yield Finding(id="matmul", status="fail", value=f"a matrix product {where} {ending(reply)}", cure=cure)
        return
    right = error < LARGEST_MATMUL_ERROR  # false for NaN
    value = f"relative error {error:.4f} {where}"
    yield Finding(id="matmul", status="ok" if right else "fail", value=value, cure="" if right else cure)
    if "last_loss" not in told:
        yield Finding(id="training", status="fail", value=f"sixty steps {where}: it {ending(reply)}", cure=cure)
        return
    first, last = told["first_loss"], told["last_loss"]
    learned = last < first / 2
    value = f"loss {first:.3f} → {last:.3f} in sixty steps"
    yield Finding(id="training", status="ok" if learned else "fail", value=value, cure="" if learned else cure)


CHECKS: tuple[Check, ...] = (
    system.python_version,
    graphics.graphics,
    graphics.amd_driver,
    graphics.amd_nodes,
    graphics.nvidia_nodes,
    system.windows,
    graphics.hsa_override,
    graphics.visible,
    graphics.mixed,
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
    computing,
)
