"""
The whole examination of a machine, and its report.

Files come first, then torch in a child process, then the results of torch, in other child processes. A broken stack
can crash or hang at its first kernel, long after it reported success. Each check is a function from facts to findings.
A check that does not concern the machine yields none. The order of GROUPS is the order of the report.
"""

import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bloomery.core.errors import readable
from bloomery.hw import torch_install
from bloomery.hw.doctor import compute, gpu, software
from bloomery.hw.doctor.finding import CheckFunction, Finding, MachineFacts
from bloomery.hw.host import CommandResult, Host, find_gpus
from bloomery.hw.kernel_trials import KernelTrial, command, merged

GROUPS: dict[str, tuple[CheckFunction, ...]] = {
    "Machine": (
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
        software.processor,
        software.quota,
        software.memory,
        software.shared_memory,
        software.memory_speed,
        software.disk,
    ),
    "Torch": (software.torch_build, software.conflicts, software.compiled),
    "Kernels": (compute.kernels,),
    "Speed": (compute.speed, compute.refill, compute.all_reduce),
}
"""The checks by their title in the report. Those of the first group need no torch."""
NO_COMPUTING = "no speed was measured, and no kernel was tested; kernel results in this report are saved ones"


def examine(host: Host, runs: Path) -> list[Finding]:
    """Every finding about a machine. `runs` is the folder that runs would be written to."""
    return [finding for _, finding in findings(host, runs)]


def findings(host: Host, runs: Path, *, retry: bool = False, quick: bool = False) -> Iterator[tuple[str, Finding]]:
    """
    Every finding with the title of its group, each as soon as it is known. torch is imported after the first group.
    With `retry`, kernels whose results are saved are tried again. `quick` leaves out what computes, and says so.
    """
    have = torch_install.installed(host)
    facts = MachineFacts(host=host, runs=runs, gpus=find_gpus(host), have=have, retry=retry, quick=quick)
    for number, (title, checks) in enumerate(GROUPS.items()):
        if number == 1:
            facts = with_torch(facts)
        for check in () if quick and title == "Speed" else checks:
            yield from ((title, finding) for finding in check(facts))
    if quick:
        yield "Left out", Finding(id="quick", status="ok", value=NO_COMPUTING)


def with_torch(facts: MachineFacts) -> MachineFacts:
    """The facts with what torch says of itself. It is imported in a child process, if there is one."""
    trial = KernelTrial(kernel="torch")
    has = facts.have is not None
    reply = facts.host.run(command(facts.host, trial), trial.limit_seconds) if has else CommandResult(code=1)
    answer = merged(reply)
    return replace(facts, seen=answer if reply.code == 0 and "version" in answer else None, reply=reply)


def shown(host: Host) -> Host:
    """The same machine, whose commands are named on the terminal while they run: some take a minute."""

    def run(command: Sequence[str], limit_seconds: float) -> CommandResult:
        print(f"\r\x1b[K  trying {_task(command)} …", end="", file=sys.stderr, flush=True)
        reply = host.run(command, limit_seconds)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return reply

    return replace(host, run=run)


def _task(command: Sequence[str]) -> str:
    """What a command examines, in words of the report."""
    names = command[command.index("-m") + 2 :] if "-m" in command else command[-1:]
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where all is well, 1 with warnings, 2 with failures."""
    return max(({"ok": 0, "warn": 1, "fail": 2}[finding.status] for finding in findings), default=0)


WIDTH, NAME_WIDTH = 80, 20
MARKS = {"ok": ("✓", "\x1b[32m"), "warn": ("!", "\x1b[33m"), "fail": ("✗", "\x1b[31m")}
"""Of a finding: a character, and the color of a terminal."""


def as_lines(finding: Finding, *, details: bool = False, color: bool = False) -> list[str]:
    """A finding for a person, in 80 columns: a mark, the id, the value, and the fix below it."""
    mark, paint = MARKS[finding.status]
    mark = f"{paint}{mark}\x1b[0m" if color else mark
    indent = " " * (NAME_WIDTH + 4)
    value = finding.value if details else finding.brief or finding.value
    first, *rest = textwrap.wrap(value, WIDTH - len(indent), break_on_hyphens=False) or [""]
    lines = [f"{mark} {finding.id:<{NAME_WIDTH}}  {first}".rstrip(), *(f"{indent}{line}" for line in rest)]
    return [*lines, *(f"    {line}" for hint in finding.hint.splitlines() for line in pasteable(hint, WIDTH - 4))]


def with_lines(
    findings: Iterable[tuple[str, Finding]], *, details: bool = False, color: bool = False
) -> Iterator[tuple[Finding, list[str]]]:
    """Each finding with its lines. The title of a group stands before its first finding."""
    title = ""
    for group, finding in findings:
        head = [] if group == title else [*([""] if title else []), group]
        clean = replace(finding, value=readable(finding.value), hint=readable(finding.hint))
        yield finding, [*head, *as_lines(clean, details=details, color=color)]
        title = group


def pasteable(hint: str, width: int) -> list[str]:
    """A fix in lines of at most `width`. A command that is longer continues after a backslash."""
    if re.match(r"[A-Z].*[.)]$", hint):  # a sentence
        return textwrap.wrap(hint, width)
    line, _, comment = hint.partition("   # ")
    lines = textwrap.wrap(f"# {comment}", width, subsequent_indent="# ") if comment else []
    if len(hint) <= width:
        return [hint]
    words, row = _shell_words(line), ""
    for word in words:
        if row and len(row) + len(word) + 3 > width:
            lines.append(f"{row} \\")
            row = f"  {word}"
        else:
            row = f"{row} {word}" if row else word
    return [*lines, row]


def _shell_words(line: str) -> list[str]:
    """The words of a command as they are written, split only where a shell splits too."""
    words, start = list[str](), 0
    for match in re.finditer(r" +", line):
        try:
            shlex.split(line[start : match.start()])
        except ValueError:  # inside of a quotation
            continue
        words.append(line[start : match.start()])
        start = match.end()
    return [*words, line[start:]]


def verdict(findings: Sequence[Finding], runs: Path) -> tuple[str, str]:
    """One sentence about the machine, and the next command."""
    by_status = {status: [one.id for one in findings if one.status == status] for status in ("fail", "warn")}
    if failed := by_status["fail"]:
        return f"This machine is not ready to train. To fix: {', '.join(failed)} (✗ above).", "bloomery doctor"
    first_run = "bloomery run recipes/demo.toml" + ("" if runs == Path("runs") else f" --runs {shlex.quote(str(runs))}")
    if any(one.id == "quick" for one in findings):
        seen = f"Warnings: {', '.join(by_status['warn'])} (! above)" if by_status["warn"] else "No problem found"
        return f"{seen}. Speed and kernels were not tested.", "bloomery doctor"
    if warned := by_status["warn"]:
        return f"This machine can train. For better speed or stability, fix: {', '.join(warned)} (! above).", first_run
    return "This machine is ready to train.", first_run


def closing(findings: Sequence[Finding], runs: Path) -> list[str]:
    """The verdict and the next command, as lines."""
    sentence, command = verdict(findings, runs)
    return [*textwrap.wrap(sentence, WIDTH), f"Next: {command}"]
