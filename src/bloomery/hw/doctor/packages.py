"""Packages that get into each other's way: built for another maker's GPUs, or lying in the same folder."""

import shlex
from collections.abc import Iterator

from bloomery.hw.doctor.finding import Facts, Finding
from bloomery.hw.installed import Distribution, numbers
from bloomery.hw.wheel import AMD_INDEX, maker_to_serve

TRITONS = ("triton-rocm", "pytorch-triton-rocm")
"""AMD's builds of Triton. PyPI's `triton` writes into the same folder and takes its place."""
BITSANDBYTES_ON_AMD = (0, 50)
"""The first with all of its 4-bit kernels for AMD; earlier ones gave NaN."""


def conflicts(facts: Facts) -> Iterator[Finding]:
    if facts.have is None:
        return
    if {facts.have.built_for, maker_to_serve(facts.gpus)} & {"amd", "hygon"}:
        yield from _for_cuda(facts)
    if facts.have.built_for in ("amd", "hygon"):
        yield from _triton(facts)
        yield from _library_path(facts)
    yield from _companions(facts)


def _for_cuda(facts: Facts) -> Iterator[Finding]:
    """What was compiled for CUDA and is imported by other libraries as soon as it is found."""
    xformers = facts.packages.get("xformers")
    if xformers and not _amd_build(xformers):
        value = f"xformers {xformers.version} was built for CUDA; attention needs none of it"
        yield Finding(id="package-xformers", status="warn", value=value, cure=_uninstall(facts, "xformers"))
    flash = facts.packages.get("flash-attn")
    if flash and "cu1" in flash.local:
        value = f"flash-attn {flash.version} was built for CUDA; attention needs none of it"
        yield Finding(id="package-flash-attn", status="warn", value=value, cure=_uninstall(facts, "flash-attn"))
    quantizer = facts.packages.get("bitsandbytes")
    if quantizer and numbers(quantizer.version) < BITSANDBYTES_ON_AMD:
        value = f"bitsandbytes {quantizer.version} computes NaN on AMD; nothing here uses it"
        yield Finding(id="package-bitsandbytes", status="warn", value=value, cure=_uninstall(facts, "bitsandbytes"))


def _triton(facts: Facts) -> Iterator[Finding]:
    usual = facts.packages.get("triton")
    own = next((facts.packages[name] for name in TRITONS if name in facts.packages), None)
    if usual and not _amd_build(usual) and (own or (facts.have and facts.have.built_for == "amd")):
        value = (
            f"triton {usual.version} of PyPI lies over {own.name if own else 'the one of AMD'}, and compiles for CUDA"
        )
        again = f"{own.name}=={own.version}" if own else "triton-rocm"
        install = [
            facts.host.python,
            "-m",
            "pip",
            "install",
            "--force-reinstall",
            "--no-deps",
            "--index-url",
            AMD_INDEX,
        ]
        cure = f"{_uninstall(facts, 'triton')} && {shlex.join([*install, again])}"
        yield Finding(id="triton", status="fail", value=value, cure=cure)
    elif own or usual:
        found = own or usual
        yield Finding(id="triton", status="ok", value=f"{found.name} {found.version}" if found else "")


def _library_path(facts: Facts) -> Iterator[Finding]:
    """The wheel brings its own libraries; those of another version, found before them, crash it."""
    path = facts.host.env.get("LD_LIBRARY_PATH", "")
    if (
        any("/rocm" in part or "/hip" in part for part in path.split(":"))
        and facts.have
        and facts.have.built_for == "amd"
    ):
        value = f"LD_LIBRARY_PATH={path!r} comes before the libraries that torch brings"
        yield Finding(id="library-path", status="warn", value=value, cure="unset LD_LIBRARY_PATH")


def _companions(facts: Facts) -> Iterator[Finding]:
    """torch, torchvision and torchaudio are built together; of another build they cannot be imported."""
    have = facts.have
    torch = facts.packages.get("torch")
    if have is None or torch is None:
        return
    if torch.version.partition("+")[0] != have.version.partition("+")[0]:
        value = f"torch is {have.version} by its files and {torch.version} by pip: two of them lie over each other"
        cure = f"{_uninstall(facts, 'torch')} && {shlex.quote(facts.host.python)} -m bloomery.hw.wheel --install"
        yield Finding(id="torch-twice", status="fail", value=value, cure=cure)
    for name in ("torchvision", "torchaudio"):
        other = facts.packages.get(name)
        if other and other.local not in (torch.local, have.version.partition("+")[2]):
            value = f"{name} {other.version} was built for another torch than {have.version}"
            yield Finding(id=f"package-{name}", status="warn", value=value, cure=_uninstall(facts, name))


def _amd_build(package: Distribution) -> bool:
    return any(mark in package.local for mark in ("rocm", "das", "dtk"))


def _uninstall(facts: Facts, name: str) -> str:
    return shlex.join([facts.host.python, "-m", "pip", "uninstall", "-y", name])
