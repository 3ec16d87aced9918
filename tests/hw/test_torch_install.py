"""One command per machine, and what is there is never overwritten unasked."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.core.errors import HardwareError
from bloomery.hw import torch_install
from bloomery.hw.host import CommandResult, Host, find_gpus
from bloomery.hw.torch_install import AMD_INDEX, install_command
from tests.hw.machines import MACHINES, MATRIX, machine, plant, torch_folder

PIP = ("python3", "-m", "pip", "install")
USUAL = (*PIP, "torch>=2.11,<2.14")
SOURCE = Path(torch_install.__file__).parents[2]


def amd(*targets: str) -> tuple[str, ...]:
    extras = ",".join(f"device-{target}" for target in targets)
    return (*PIP, "--index-url", AMD_INDEX, f"torch[{extras}]>=2.11,<2.14")


COMMANDS = {
    "none": USUAL,
    "nvidia": USUAL,
    "strix-halo": amd("gfx1151"),
    "7900-xtx": amd("gfx1100"),
    "7900-xtx-x2": amd("gfx1100"),
    "mi300x": amd("gfx942"),
    "r9700-and-igpu": amd("gfx1201", "gfx1036"),
    "igpu-and-nvidia": USUAL,
    "amd-without-kfd": USUAL,
    "wsl": USUAL,
}


@pytest.mark.parametrize("kind", [kind for kind in MACHINES if kind != "hygon"])
def test_each_machine_has_one_command(tmp_path: Path, kind: str) -> None:
    assert install_command(machine(tmp_path, kind)).command == COMMANDS[kind]


def test_nothing_is_installed_for_a_hygon_dcu(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="DTK"):
        install_command(machine(tmp_path, "hygon"))


def test_an_amd_gpu_that_the_kernel_does_not_describe_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    assert "amdgpu" in install_command(machine(tmp_path, "amd-without-kfd")).why


@pytest.mark.parametrize(
    ("kind", "version", "cuda", "hip"),
    [
        ("none", "2.13.0+cpu", None, None),
        ("none", "2.11.0", "13.0", None),
        ("nvidia", "2.12.1+cu130", "13.0", None),
        ("nvidia", "2.11.0a0+nv26.01", "13.1", None),
        ("strix-halo", "2.13.0+rocm7.2", None, "7.2.1"),
        ("strix-halo", "2.13.0+rocm7.14", None, None),
        ("mi300x", "2.14.0a0+gitabc1234", None, "7.2.0"),
        ("hygon", "2.11.0+das.opt1.dtk2604", None, "6.1"),
    ],
)
def test_a_torch_that_is_new_enough_and_fits_stays(
    tmp_path: Path, kind: str, version: str, cuda: str | None, hip: str | None
) -> None:
    choice = install_command(machine(tmp_path, kind, torch=torch_folder(tmp_path, version, cuda=cuda, hip=hip)))
    assert choice.command is None
    assert choice.better is None


@pytest.mark.parametrize("version", ["2.9.1+rocm7.2.0.git7e1940d4", "2.9.0+das.opt1.dtk2604", "2.10.0a0+nv25.11"])
@pytest.mark.parametrize("kind", ["strix-halo", "nvidia", "none"])
def test_a_vendors_torch_that_is_too_old_is_an_error_and_stays(tmp_path: Path, kind: str, version: str) -> None:
    host = machine(tmp_path, kind, torch=torch_folder(tmp_path, version))
    with pytest.raises(HardwareError, match="is a vendor build"):
        install_command(host)


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0+cpu", "1.13.1+cu117"])
def test_a_usual_torch_that_is_too_old_is_replaced(tmp_path: Path, version: str) -> None:
    choice = install_command(machine(tmp_path, "7900-xtx", torch=torch_folder(tmp_path, version)))
    assert choice.command == amd("gfx1100")
    assert version in choice.why


@pytest.mark.parametrize(
    ("kind", "version", "cuda"),
    [("strix-halo", "2.13.0+cpu", None), ("strix-halo", "2.13.0", "13.0"), ("nvidia", "2.13.0+cpu", None)],
)
def test_a_torch_that_cannot_use_the_gpu_stays_with_the_command_that_replaces_it(
    tmp_path: Path, kind: str, version: str, cuda: str | None
) -> None:
    choice = install_command(machine(tmp_path, kind, torch=torch_folder(tmp_path, version, cuda=cuda)))
    assert choice.command is None
    assert choice.better == (*PIP, "--force-reinstall", *COMMANDS[kind][4:])
    assert "cannot use the GPU" in choice.why


def test_a_half_removed_torch_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "site-packages/torch").mkdir(parents=True)
    host = machine(tmp_path, "none", torch=tmp_path / "site-packages/torch")
    assert torch_install.installed(host) is None
    assert install_command(host).command == USUAL


def test_the_missing_torch_error_carries_the_machines_own_command(tmp_path: Path) -> None:
    assert "torch[device-gfx1151]" in str(torch_install.missing(machine(tmp_path / "amd", "strix-halo")))
    assert "DTK" in str(torch_install.missing(machine(tmp_path / "dcu", "hygon")))


def test_it_runs_before_anything_is_installed() -> None:
    """-S hides site-packages, where every dependency lives; -I the environment."""
    path = f"sys.path.insert(0, {str(SOURCE)!r})"
    code = f"import sys; {path}; from bloomery.hw.torch_install import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2), done.stderr
    assert "pip install" in done.stdout or "error: " in done.stderr


def test_a_good_torch_of_the_base_interpreter_is_shared_with_a_new_environment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = machine(tmp_path / "a", "none", torch=torch_folder(tmp_path / "a", "2.13.0"))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    old = machine(tmp_path / "b", "none", torch=torch_folder(tmp_path / "b", "2.9.0+rocm6.4", hip="6.4"))
    for host, flags in ((shared, "--system-site-packages\n"), (old, ""), (machine(tmp_path / "c", "none"), "")):
        monkeypatch.setattr(Host, "here", lambda host=host: host)
        assert torch_install.main(["--venv-flags"]) == 0
        assert capsys.readouterr().out == flags


def test_a_warning_is_printed_and_nothing_runs_where_torch_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = machine(tmp_path, "strix-halo", torch=torch_folder(tmp_path, "2.13.0+cpu"))
    monkeypatch.setattr(Host, "here", lambda: host)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it must not install"))
    assert torch_install.main(["--install"]) == 0
    assert "WARNING" in (shown := capsys.readouterr().err)
    assert "--force-reinstall" in shown


@pytest.mark.parametrize(("pip_code", "code"), [(0, 0), (1, 2)])
def test_install_runs_exactly_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip_code: int, code: int
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, pip_code)

    host = machine(tmp_path, "mi300x")
    monkeypatch.setattr(Host, "here", lambda: host)
    monkeypatch.setattr(subprocess, "run", run)
    assert torch_install.main(["--install"]) == code
    assert ran == [amd("gfx942")]


# --- the machines of the matrix -------------------------------------------------------------------------------------

CUDA_13, CUDA_12 = (f"https://download.pytorch.org/whl/{name}" for name in ("cu130", "cu126"))
NEEDED = {"cuda-torch-on-amd": amd("gfx1100"), "cpu-torch-on-nvidia": USUAL}
"""What is to be put over the torch that is there, where it does not fit and something fits better."""


@pytest.mark.parametrize("name", [name for name in MATRIX if not name.startswith("hygon")])
def test_each_machine_of_the_matrix_keeps_its_torch_or_is_told_one_command(tmp_path: Path, name: str) -> None:
    choice = install_command(MATRIX[name].build(tmp_path))
    needed = NEEDED.get(name)
    assert choice.command is None
    assert choice.better == (needed and (*PIP, "--force-reinstall", *needed[4:]))


@pytest.mark.parametrize("name", MATRIX)
def test_no_machine_with_a_gpu_gets_a_torch_for_processors_in_silence(tmp_path: Path, name: str) -> None:
    host = replace(MATRIX[name].build(tmp_path), torch=None)
    gpus = find_gpus(host)
    if name.startswith("hygon"):
        with pytest.raises(HardwareError, match="Hygon"):
            install_command(host)
        return
    choice = install_command(host)
    assert choice.command is not None
    if any(gpu.maker == "amd" for gpu in gpus):
        assert AMD_INDEX in choice.command
        assert all(f"device-{gpu.target}" in choice.command[-1] for gpu in gpus)
    elif gpus:
        assert choice.command == USUAL
    else:
        assert choice.why == "no GPU was found"


@pytest.mark.parametrize(
    ("change", "index"),
    [
        ({"system": "Linux", "processor": "x86_64"}, None),
        ({"system": "Linux", "processor": "aarch64"}, CUDA_13),
        ({"system": "Windows", "processor": "AMD64"}, CUDA_13),
    ],
)
def test_where_the_usual_wheel_is_none_for_cuda_another_index_is_named(
    tmp_path: Path, change: dict[str, str], index: str | None
) -> None:
    listed = CommandResult(code=0, out="GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\n")
    host = machine(tmp_path, "nvidia", replies={"-L": listed})
    command = install_command(Host(root=host.root, run=host.run, **change)).command  # type: ignore[arg-type]
    assert command == ((*PIP, "--index-url", index, USUAL[-1]) if index else USUAL)


@pytest.mark.parametrize(
    ("names", "index"),
    [
        (["NVIDIA GeForce GTX 1080 Ti"], "cu126"),
        (["Tesla V100-SXM2-16GB"], "cu126"),
        (["Tesla P40", "NVIDIA GeForce RTX 3090"], "cu126"),
        (["NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 5090"], None),  # no wheel has kernels for both
        (["NVIDIA GeForce GTX 1660"], None),
        (["NVIDIA GeForce RTX 2080 Ti"], None),
        (["NVIDIA H100 80GB HBM3"], None),
        (["NVIDIA RTX PRO 6000 Blackwell"], None),
        (["Tesla T4"], None),
        (["Quadro RTX 6000"], None),
    ],
)
def test_a_card_from_before_turing_gets_the_wheel_that_has_its_kernels(
    tmp_path: Path, names: list[str], index: str | None
) -> None:
    host = machine(tmp_path, "nvidia")
    files = {f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information": name for number, name in enumerate(names, 1)}
    plant(tmp_path, {path: f"Model: \t\t {name}\nIRQ:   \t\t 77\n" for path, name in files.items()})
    choice = install_command(host)
    assert choice.command == ((*PIP, "--index-url", CUDA_12, USUAL[-1]) if index == "cu126" else USUAL)
    assert index is None or names[0] in choice.why


def test_an_older_driver_gets_the_wheel_that_it_can_run(tmp_path: Path) -> None:
    host = machine(tmp_path, "nvidia")
    plant(
        tmp_path, {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Release\n"}
    )
    choice = install_command(host)
    assert choice.command == (*PIP, "--index-url", CUDA_12, USUAL[-1])
    assert "driver 550" in choice.why
