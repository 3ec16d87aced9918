"""Single things that can be wrong with a machine, each on one that is sound otherwise."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.hw.doctor.finding import Finding
from bloomery.hw.doctor.report import examine
from bloomery.hw.gpus import find_gpus, rocminfo_targets
from bloomery.hw.host import CommandResult, Host, Space
from tests.hw.machines import GIB, ROCMINFO, machine, plant, recorded, torch_folder
from tests.hw.matrix import MATRIX, sees
from tests.hw.troubles import BLACKLIST, TROUBLES, measured, troubled


def of(host: Host, runs: Path) -> dict[str, Finding]:
    return {one.id: one for one in examine(host, runs)}


@pytest.mark.parametrize("name", TROUBLES)
def test_each_trouble_is_told_with_its_hint(tmp_path: Path, name: str) -> None:
    trouble = TROUBLES[name]
    host = MATRIX[trouble.on].build(tmp_path)
    assert trouble.id not in {one.id for one in examine(host, tmp_path / "runs") if one.status != "ok"}
    found = of(troubled(host, trouble), tmp_path / "runs")[trouble.id]
    assert found.status == trouble.status
    assert trouble.words in found.value
    assert trouble.hint in found.hint


@pytest.mark.parametrize(
    ("files", "words", "hint"),
    [
        ({}, "without its compute driver", "modprobe amdgpu"),
        ({"proc/cmdline": "root=/dev/sda1 nomodeset\n"}, "nomodeset", "s/ nomodeset//"),
        (BLACKLIST, "/etc/modprobe.d/blacklist-amd.conf forbids it", "/blacklist amdgpu/d"),
        ({".dockerenv": ""}, "in this container", "--device=/dev/kfd"),
    ],
)
def test_a_driver_that_is_not_there_says_why(tmp_path: Path, files: dict[str, str], words: str, hint: str) -> None:
    host = machine(tmp_path, "amd-without-kfd")
    plant(tmp_path, files)
    found = of(host, tmp_path / "runs")["amd-driver"]
    assert found.status == "fail"
    assert words in found.value
    assert hint in found.hint


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"HIP_VISIBLE_DEVICES": "0"}, "is the only one that is let through"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, "gfx1036 inside the processor stands beside gfx1201"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, "unset ROCR_VISIBLE_DEVICES; export HIP_VISIBLE_DEVICES=1"),
        ({"HIP_VISIBLE_DEVICES": "1"}, None),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, None),
    ],
)
def test_the_small_gpu_beside_a_card_is_told_while_it_is_let_through(
    tmp_path: Path, env: dict[str, str], told: str | None
) -> None:
    host = MATRIX["rdna4-and-igpu"].build(tmp_path)
    found = {one.id: one for one in examine(replace(host, env={**host.env, **env}), tmp_path / "runs")}
    assert found["visible-devices"].status == "ok"
    assert ("mixed-gpus" in found) is (told is not None)
    assert told is None or told in f"{found['mixed-gpus'].value} {found['mixed-gpus'].hint}"


def test_an_override_that_names_no_chip_says_so(tmp_path: Path) -> None:
    host = MATRIX["strix-halo-tuned"].build(tmp_path)
    host = replace(host, env={**host.env, "HSA_OVERRIDE_GFX_VERSION": "99.99.99"})
    found = {one.id: one for one in examine(host, tmp_path / "runs")}["hsa-override"]
    assert (found.status, found.value.startswith("99.99.99 stands for no target")) == ("fail", True)


def test_an_override_of_a_chip_without_kernels_of_its_own_is_a_warning(tmp_path: Path) -> None:
    host = machine(tmp_path, "igpu-and-nvidia", env={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"})
    assert of(host, tmp_path / "runs")["hsa-override"].status == "warn"


def test_an_nvidia_driver_that_is_too_old_for_torch_is_told_with_the_wheel_that_it_can_run(tmp_path: Path) -> None:
    host = MATRIX["nvidia"].build(tmp_path)
    plant(tmp_path, {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  R\n"})
    blind = recorded({"torch": sees("2.13.0+cu130", gpus=0, hip=None, cuda="13.0")})
    found = of(replace(host, run=blind), tmp_path / "runs")["torch"]
    assert found.value == "2.13.0+cu130 needs driver 580 or newer; this one is 550.54"
    assert "whl/cu126" in found.hint


def test_a_vendors_torch_whose_libraries_are_not_found_is_told_to_load_its_environment(tmp_path: Path) -> None:
    torch = torch_folder(tmp_path, "2.11.0+das.opt1.dtk2604", hip="6.1")
    reply = CommandResult(code=1, err="ImportError: libgalaxyhip.so.5: cannot open shared object file")
    found = of(machine(tmp_path, "hygon", torch=torch, replies={"torch": reply}), tmp_path / "runs")["torch"]
    assert (found.status, found.hint) == ("fail", "source /opt/dtk/env.sh")
    assert "libgalaxyhip" in found.value


def test_a_torch_of_others_on_a_hygon_dcu_fails_without_a_word_of_pip(tmp_path: Path) -> None:
    torch = torch_folder(tmp_path, "2.13.0+rocm7.2", hip="7.2.1")
    found = of(machine(tmp_path, "hygon", torch=torch, replies={"torch": sees(gpus=0)}), tmp_path / "runs")["torch"]
    assert found.status == "fail"
    assert "pip" not in found.hint


def test_windows_lends_its_gpus_by_their_libraries_or_by_amds_runtime(tmp_path: Path) -> None:
    plain = machine(tmp_path / "a", "wsl")
    assert find_gpus(plain) == []
    plant(plain.root, {"usr/lib/wsl/lib/libcuda.so.1": ""})
    assert [gpu.maker for gpu in find_gpus(plain)] == ["nvidia"]
    lent = machine(
        tmp_path / "b", "wsl", replies={"rocminfo": CommandResult(code=0, out=ROCMINFO.format(target="gfx1201"))}
    )
    assert [gpu.target for gpu in find_gpus(lent)] == ["gfx1201"]


def test_windows_without_anything_to_lend_is_told_to_update(tmp_path: Path) -> None:
    host = MATRIX["wsl-without-runtime"].build(tmp_path)
    (tmp_path / "dev/dxg").unlink()
    found = of(host, tmp_path / "runs")["wsl"]
    assert (found.status, found.hint.partition(" ")[0]) == ("warn", "wsl")


def test_windows_itself_lists_nvidias_gpus(tmp_path: Path) -> None:
    listed = CommandResult(code=0, out="GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\nGPU 1: NVIDIA T4 (UUID: GPU-2)\n")
    host = Host(root=tmp_path, system="Windows", run=recorded({"-L": listed}))
    assert [gpu.name for gpu in find_gpus(host)] == ["NVIDIA GeForce RTX 4090", "NVIDIA T4"]


def test_only_gpus_count_among_the_agents_of_a_runtime(tmp_path: Path) -> None:
    """Some versions pad their lines; a processor's name may hold the GPU's, and an NPU is an agent too."""
    padded = "\n".join(f"{line}   " for line in ROCMINFO.format(target="gfx1151").splitlines())
    for text in (ROCMINFO.format(target="gfx1151"), padded):
        assert rocminfo_targets(Host(root=tmp_path, run=recorded({"rocminfo": CommandResult(code=0, out=text)}))) == [
            "gfx1151"
        ]
    assert rocminfo_targets(Host(root=tmp_path, run=recorded({}))) == []


def test_a_full_disk_is_not_measured(tmp_path: Path) -> None:
    host = MATRIX["no-gpu"].build(tmp_path)
    full = Space(total=GIB, free=0)
    found = of(replace(host, spaces={**host.spaces, str(tmp_path): full}), tmp_path / "runs")
    assert found["disk"].status == "fail"
    assert "disk-speed" not in found


@pytest.mark.parametrize(
    ("device", "flops"),
    [("NVIDIA GeForce RTX 4090", 150e12), ("Apple M2", 1e12), ("a device that nobody knows", 1e9)],
)
def test_a_speed_is_held_only_against_what_is_known_of_the_device(tmp_path: Path, device: str, flops: float) -> None:
    host = MATRIX["nvidia"].build(tmp_path)
    reply = measured(device, flops, 900e9)

    def run(command: Sequence[str], limit: float) -> CommandResult:
        return reply if command[-1] == "speed" else host.run(command, limit)

    found = of(replace(host, run=run), tmp_path / "runs")["speed"]
    assert (found.status, found.hint) == ("ok", "")
    assert ("catalogue" in found.value) == ("RTX" in device)
