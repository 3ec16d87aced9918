"""Shared by all checks: the facts that they examine, and the format of findings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from bloomery.hw import torch_install
from bloomery.hw.host import CommandResult, Gpu, Host
from bloomery.hw.torch_install import Distribution, distributions

FindingStatus = Literal["ok", "warn", "fail"]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact with a verdict. `id` stays the same between versions, so that scripts can rely on it."""

    id: str
    status: FindingStatus
    value: str
    hint: str = ""
    """What to do, as a line to paste where there is one."""
    brief: str = ""
    """What the terminal shows instead of `value` unless details are asked for; "" for `value` itself."""

    def as_json(self) -> dict[str, str]:
        return {"id": self.id, "status": self.status, "value": self.value, "hint": self.hint}


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What several checks look at, found once."""

    host: Host
    runs: Path
    gpus: Sequence[Gpu]
    have: torch_install.Torch | None
    seen: Mapping[str, Any] | None = None
    """What torch says of itself when it is imported; None where it is absent, the import failed or is still to come."""
    reply: CommandResult = field(default_factory=lambda: CommandResult(code=1))
    """Of that import."""
    retry: bool = False
    """Whether to try kernels again whose results are saved."""
    quick: bool = False
    """Whether to leave out what computes: speeds, and trials of kernels without saved results."""

    @property
    def amd(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.maker == "amd"]

    @cached_property
    def packages(self) -> Mapping[str, Distribution]:
        return distributions(self.host)


CheckFunction = Callable[[MachineFacts], Iterator[Finding]]
