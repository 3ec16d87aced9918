"""
Find the command that installs the right torch on this machine, and list installed packages.

`python -m bloomery.hw.torch_install --install` runs that command.

torch is no dependency of Bloomery: a pinned torch would overwrite the build that a vendor supplied. This module
needs only the standard library, so it runs before anything is installed. It reads installed packages from the names
of their folders. Nothing is imported, so nothing can crash. The rules, in order:

1. A torch that this interpreter can import and that is new enough stays, whoever built it. If it does not fit the
   GPU, a warning carries the command that replaces it; nothing is replaced unasked.
2. A vendor's torch that is too old is an error, because only its owner can tell what depends on it.
3. AMD: one index serves every target; each target's kernels are an extra, `torch[device-gfx1151]`. Targets that no
   new torch is known to support are not named. If there is no other target, the usual wheel computes on the CPU.
4. Hygon DCU: only the vendor's own DTK has a torch for it, so nothing is installed.
5. NVIDIA: the usual wheel if it is built for CUDA, and driver and card are new enough for it; else a wheel that fits.
6. Apple or no GPU: the usual wheel.
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bloomery.core.errors import HardwareError
from bloomery.hw.host import Gpu, Host, Maker, find_gpus

MINIMUM = (2, 11)
BOUNDS = ">=2.11,<2.14"
AMD_INDEX = "https://repo.amd.com/rocm/whl-multi-arch/"
CUDA_INDEX, OLDER_CUDA_INDEX = (f"https://download.pytorch.org/whl/{name}" for name in ("cu130", "cu126"))
DRIVER_OF_CUDA_13 = 580
"""The usual wheels are for CUDA 13; those for CUDA 12.6 run with drivers from 525 on (NVIDIA, CUDA compatibility)."""
BEFORE_TURING = re.compile(
    r"GTX (?:7\d\d|9\d\d|10\d\d)|GT 10\d\d|MX[123]\d0\b|TITAN (?:X|Xp|V)\b|(?:Tesla|Quadro) [MPV]\d|GV100|\b[PV]100\b"
)
"""Maxwell, Pascal and Volta, which the wheels for CUDA 12.6 alone have kernels for (PyTorch, RELEASE.md)."""
BLACKWELL = re.compile(r"RTX 50\d\d|Blackwell|\bG?B[123]00\b")
"""Which those have none for."""
FUSED_ATTENTION = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")
"""Targets whose fused attention is on by default (AOTriton 0.12, v3src/util.cc). They come first."""

LEGACY = re.compile(r"gfx(?:[678]\d\d|90[02-69c])")
"""
Targets for which no torch that Bloomery can use is known to work. Most have no wheel. Wheels for gfx900 and gfx906
exist, but nobody has tried them on a card (TheRock, SUPPORTED_GPUS.md). The last that worked on gfx906 was torch 2.9.
"""

DTK_ADVICE = (
    "Install the vendor's DTK and its own torch (developer.sourcefind.cn), run `source /opt/dtk/env.sh`, "
    f"and make the virtual environment with --system-site-packages. Bloomery needs torch{BOUNDS}."
)


class MissingTorch(HardwareError, ModuleNotFoundError):  # noqa: N818 - it reads as what it says
    """A part that needs torch was imported where there is none."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.name = "torch"


@dataclass(frozen=True, kw_only=True)
class Torch:
    """An installed torch, as its own version.py tells. Reading that file imports nothing, so nothing can crash."""

    version: str
    built_for: Literal["amd", "nvidia", "hygon", "intel", "cpu"]

    @property
    def new_enough(self) -> bool:
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        return numbers is not None and (int(numbers[1]), int(numbers[2])) >= MINIMUM

    @property
    def from_vendor(self) -> bool:
        """Whether its local version, as in 2.13.0+rocm7.2, is none that the usual wheels carry."""
        return re.fullmatch(r"|cpu|cu\d+", self.version.partition("+")[2]) is None


Command = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    command: Command | None
    """What to run. None: a torch that is new enough is there."""
    why: str
    better: Command | None = None
    """What to run by hand where the torch that is there does not fit the GPU."""


def installed(host: Host) -> Torch | None:
    """The torch that the host's interpreter would import, or None."""
    if host.torch is None or not (file := host.torch / "version.py").is_file():
        return None
    text = file.read_text(encoding="utf-8")
    facts = dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE))
    version = facts.get("__version__", "")
    local = version.partition("+")[2]
    if "das" in local or "dtk" in local:
        return Torch(version=version, built_for="hygon")
    if "hip" in facts or "rocm" in facts or "rocm" in local:  # some of AMD's wheels leave hip unset
        return Torch(version=version, built_for="amd")
    return Torch(version=version, built_for="nvidia" if "cuda" in facts else "intel" if "xpu" in facts else "cpu")


def maker_to_serve(gpus: Sequence[Gpu]) -> Maker | None:
    """
    The maker whose GPUs torch is chosen for. One torch serves one maker.

    An NVIDIA card beats an AMD GPU without fused attention, such as the small integrated GPU of many CPUs. Otherwise
    AMD beats NVIDIA.
    """
    makers = {gpu.maker for gpu in gpus}
    strong = any(gpu.target in FUSED_ATTENTION for gpu in gpus)
    order: tuple[Maker, ...] = ("hygon", "amd", "nvidia", "apple") if strong else ("hygon", "nvidia", "amd", "apple")
    return next((maker for maker in order if maker in makers), None)


def fresh_command(host: Host) -> tuple[Command, str]:
    """(command, why) for a machine that has no torch. Raises HardwareError where there is none to install."""
    gpus = find_gpus(host)
    maker = maker_to_serve(gpus)
    usual = (host.python, "-m", "pip", "install", f"torch{BOUNDS}")
    if maker == "hygon":
        raise HardwareError("this machine has a Hygon DCU, which no public torch wheel supports", hint=DTK_ADVICE)
    if maker == "nvidia":
        return _for_nvidia(host, usual, [gpu.name for gpu in gpus if gpu.maker == "nvidia"])
    if maker != "amd":
        return usual, "an Apple GPU was found" if maker == "apple" else "no GPU was found"
    detected = {gpu.target for gpu in gpus if gpu.target}
    if not detected:
        why = (
            "an AMD GPU was found, but the kernel does not name its chip (is the amdgpu driver loaded, and "
            "/sys/class/kfd visible?), so this is torch's default wheel, which computes on the CPU"
        )
        return usual, why
    old = legacy(detected)
    without = f"no torch{BOUNDS} is known to work on AMD {', '.join(old)}"
    if len(old) == len(detected):
        return usual, f"{without}, so this is torch's default wheel, which computes on the CPU"
    targets = sorted(detected.difference(old), key=lambda target: (target not in FUSED_ATTENTION, target))
    wheel = f"torch[{','.join(f'device-{target}' for target in targets)}]{BOUNDS}"
    return (*usual[:-1], "--index-url", AMD_INDEX, wheel), (
        f"AMD {', '.join(targets)} found" + (f"; {without}" if old else "")
    )


def legacy(targets: Iterable[str]) -> list[str]:
    """Those of AMD's targets that no new torch is known to work on."""
    return sorted(target for target in targets if LEGACY.fullmatch(target))


def _for_nvidia(host: Host, usual: Command, names: Sequence[str]) -> tuple[Command, str]:
    """The usual wheels are for CUDA on Linux with x86 alone, and for the newest CUDA."""
    why = "an NVIDIA GPU was found"
    older = [name for name in names if BEFORE_TURING.search(name)]
    if older and not any(BLACKWELL.search(name) for name in names):
        command = (*usual[:-1], "--index-url", OLDER_CUDA_INDEX, usual[-1])
        return command, f"{older[0]} was found, which CUDA 13 has no kernels for"
    driver = re.search(r"\b(\d{3})\.\d+", host.read("proc/driver/nvidia/version") or "")
    if driver and int(driver[1]) < DRIVER_OF_CUDA_13:
        command = (*usual[:-1], "--index-url", OLDER_CUDA_INDEX, usual[-1])
        return command, f"{why}, with driver {driver[1]}, which is too old for CUDA 13"
    if host.system == "Windows" or host.processor.lower() in ("aarch64", "arm64"):
        return (*usual[:-1], "--index-url", CUDA_INDEX, usual[-1]), why
    return usual, why


def install_command(host: Host) -> Choice:
    """What to install on this machine, given what is there. Raises HardwareError where only its owner can decide."""
    have = installed(host)
    if have is None:
        command, why = fresh_command(host)
        return Choice(command=command, why=why)
    if not have.new_enough:
        if have.from_vendor:
            what = f"torch {have.version} is a vendor build, but Bloomery needs torch{BOUNDS}"
            hint = "Nothing was changed. Use a newer image or release of that vendor, or a new virtual environment."
            raise HardwareError(what, where=str(host.torch), hint=DTK_ADVICE if have.built_for == "hygon" else hint)
        command, why = fresh_command(host)
        return Choice(command=command, why=f"torch {have.version} is too old; {why}")
    why = f"torch {have.version} is installed"
    maker = maker_to_serve(find_gpus(host))
    if maker in (None, "apple", have.built_for):
        return Choice(command=None, why=why)
    if maker == "hygon":
        return Choice(command=None, why=f"{why}, but it cannot use the Hygon DCU. {DTK_ADVICE}")
    command, reason = fresh_command(host)
    helps = maker == "nvidia" or AMD_INDEX in command
    why = f"{why}, but it cannot use the GPU: {reason}"
    return Choice(command=None, why=why, better=forced(command) if helps else None)


def forced(command: Command) -> Command:
    """The same install over a torch of the same version, forced because `2.13.0+cpu` satisfies `2.13.0`."""
    return (*command[:4], "--force-reinstall", *command[4:])


def missing(host: Host) -> MissingTorch:
    """The error for a part that needs torch where there is none."""
    try:
        command, why = fresh_command(host)
    except HardwareError as error:
        return MissingTorch(f"torch is not installed, and {error.what}", hint=error.hint)
    hint = f"Install the build for this machine ({why}):\n  {shlex.join(command)}"
    return MissingTorch("torch is not installed, and this part of Bloomery needs it", hint=hint)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bloomery.hw.torch_install", description="Which torch this machine needs."
    )
    parser.add_argument("--install", action="store_true", help="run the command instead of printing it")
    help_text = "print what `python -m venv` needs so that the new environment sees a good torch of this interpreter"
    parser.add_argument("--venv-flags", action="store_true", help=help_text)
    options = parser.parse_args(arguments)
    host = Host.here()
    try:
        choice = install_command(host)
    except HardwareError as error:
        if options.venv_flags:
            return 0  # an environment of its own leaves the old torch in peace
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.venv_flags:
        base = sys.prefix == sys.base_prefix  # an environment made inside another one sees only the base of both
        if base and choice.command is None and choice.better is None:
            print("--system-site-packages")
        return 0
    print(f"{choice.why}.", file=sys.stderr)
    if choice.better is not None:
        print(f"WARNING: to use the GPU, replace it with:\n  {shlex.join(choice.better)}", file=sys.stderr)
    if choice.command is None:
        return 0
    if not options.install:
        print(shlex.join(choice.command))
        return 0
    print(shlex.join(choice.command), file=sys.stderr, flush=True)
    return 2 if subprocess.run(choice.command, check=False).returncode else 0


if __name__ == "__main__":
    sys.exit(main())


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """An installed package. `name` is in lower case, with hyphens (PEP 503)."""

    name: str
    version: str
    folder: Path
    """Of its metadata."""

    @property
    def local(self) -> str:
        """The end of a version that says who built it, as rocm7.2 in 2.13.0+rocm7.2; "" for none."""
        return self.version.partition("+")[2]


def distributions(host: Host) -> Mapping[str, Distribution]:
    """The packages of the host's interpreter by name; of two with one name, that which is found first."""
    packages: dict[str, Distribution] = {}
    for directory in host.packages:
        for folder in sorted(directory.glob("*.dist-info")) if directory.is_dir() else ():
            name, _, version = folder.name.removesuffix(".dist-info").partition("-")
            name = re.sub(r"[-_.]+", "-", name).lower()
            packages.setdefault(name, Distribution(name=name, version=version, folder=folder))
    return packages


def numbers(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version, to compare by: 2.13.0a0+git -> (2, 13, 0)."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()
