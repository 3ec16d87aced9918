"""Machines of which a process reaches a part: some nodes, some chips by torch, some makers by a driver."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.hw.host import Host, Space, find_gpus
from bloomery.hw.torch_install import install_command
from tests.hw.machines import (
    AMD,
    CUDA,
    MATRIX,
    NVIDIA,
    PROCESSOR_NODE,
    ROCM,
    examined,
    kfd_node,
    machine,
    plant,
    recorded,
    sees,
    torch_folder,
)

NODES, BUS = "sys/class/kfd/kfd/topology/nodes", "sys/bus/pci/devices"


def amd(root: Path, *versions: int, env: Mapping[str, str] | None = None, **facts: object) -> Host:
    """GPUs by the kernel's numbers, with a torch whose account of itself begins as `facts` say."""
    texts = [PROCESSOR_NODE, *(kfd_node(version, 64, 128 + n) for n, version in enumerate(versions))]
    plant(root, {f"{NODES}/{n}/properties": text for n, text in enumerate(texts)})
    plant(root, {"dev/kfd": "", **{f"dev/dri/renderD{128 + n}": "" for n in range(len(versions))}})
    version = str(facts.pop("version", ROCM))
    torch = torch_folder(root, version, hip="7.2.1" if "rocm" in version else None)
    return machine(root, "none", torch=torch, env=env, replies={"torch": sees(version, **facts)})  # type: ignore[arg-type]


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_a_container_that_is_given_one_nvidia_gpu_of_many_is_well(tmp_path: Path) -> None:
    host = MATRIX["nvidia"].build(tmp_path)
    plant(tmp_path, {".dockerenv": "", "dev/nvidia3": "", "dev/shm/x": ""})
    (tmp_path / "dev/nvidia0").unlink()
    assert examined(host)["nvidia-driver"].status == "ok"
    folder = "proc/driver/nvidia/gpus"
    plant(
        tmp_path, {f"{folder}/0000:0{n}:00.0/information": f"Model: \t X\nDevice Minor: \t {n}\n" for n in range(1, 4)}
    )
    told = examined(host)
    assert told["nvidia-driver"].status == "ok"
    assert told["nvidia-driver"].value.endswith("present: /dev/nvidia3; missing: /dev/nvidia1, /dev/nvidia2")
    assert told["torch"].status == "ok"
    (tmp_path / ".dockerenv").unlink()
    assert examined(host)["nvidia-driver"].status == "warn"


def test_no_node_of_an_nvidia_gpu_is_a_failure(tmp_path: Path) -> None:
    host = MATRIX["nvidia"].build(tmp_path)
    plant(tmp_path, {".dockerenv": ""})
    (tmp_path / "dev/nvidia0").unlink()
    assert examined(host)["nvidia-driver"].status == "fail"


@pytest.mark.parametrize(
    ("kept", "inside", "status"), [("131", True, "ok"), ("131", False, "warn"), ("", True, "fail")]
)
def test_one_open_node_of_eight_amd_gpus_is_enough(tmp_path: Path, kept: str, inside: bool, status: str) -> None:
    host = MATRIX["mi300x"].build(tmp_path)
    plant(tmp_path, {".dockerenv": ""} if inside else {})
    for number in range(128, 136):
        if str(number) != kept:
            (tmp_path / f"dev/dri/renderD{number}").unlink()
    host = replace(host, run=recorded({"torch": sees(gpus=1 if kept else 0, target="gfx942")}))
    told = examined(host)
    assert told["amd-device-nodes"].status == status
    assert "/dev/dri/renderD130" in told["amd-device-nodes"].value
    if kept:
        assert told["amd-device-nodes"].value.startswith("accessible: /dev/dri/renderD131; missing: ")
        assert told["torch"].status == "ok"


@pytest.mark.parametrize("cgroup", [False, True])
def test_a_pod_is_a_container(tmp_path: Path, cgroup: bool) -> None:
    env = {} if cgroup else {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    host = machine(tmp_path, "none", env=env, spaces={"dev/shm": Space(total=64 * 2**20, free=64 * 2**20)})
    plant(tmp_path, {"dev/shm/x": "", **({"proc/1/cgroup": "0::/kubepods/burstable/pod1\n"} if cgroup else {})})
    told = examined(host)["shm"]
    assert told.status == "warn"
    assert "emptyDir" in told.hint


# --- torch ------------------------------------------------------------------------------------------------------------


def test_a_card_that_torch_cannot_use_is_a_failure_whatever_its_attention(tmp_path: Path) -> None:
    statuses = {
        version: examined(amd(tmp_path / str(version), version, version=CUDA, gpus=0, hip=None, cuda="13.0"))["torch"]
        for version in (110000, 120000, 120001, 100300, 90008, 110501, 100306, 110500)
    }
    assert [version for version, finding in statuses.items() if finding.status != "fail"] == [100306, 110500]
    assert {statuses[version].status for version in (100306, 110500)} == {"warn"}


def test_a_card_without_kernels_beside_one_with_them_is_told(tmp_path: Path) -> None:
    host = amd(tmp_path / "a", 110000, 120000, gpus=2)
    assert examined(host)["torch"].status == "warn"
    assert "no kernels for gfx1200" in examined(host)["torch"].value
    assert "device-gfx1200" in examined(host)["torch"].hint
    hidden = amd(tmp_path / "b", 110000, 120000, target="gfx1100", env={"HIP_VISIBLE_DEVICES": "0"})
    assert examined(hidden)["torch"].status == "ok"


@pytest.mark.parametrize(("env", "status"), [({}, "warn"), ({"HIP_VISIBLE_DEVICES": "0,1,2,3,4,5"}, "ok")])
def test_a_torch_that_sees_fewer_gpus_than_there_are_says_how_many(
    tmp_path: Path, env: dict[str, str], status: str
) -> None:
    told = examined(amd(tmp_path, *[90402] * 8, target="gfx942", gpus=6, env=env))["torch"]
    assert told.status == status
    assert ("6 of 8 GPUs" in told.value) == (status == "warn")


# --- makers -----------------------------------------------------------------------------------------------------------


def test_a_card_without_a_driver_is_found_beside_the_gpu_inside_a_processor(tmp_path: Path) -> None:
    card = {f"{BUS}/0000:01:00.0/vendor": f"{NVIDIA}\n", f"{BUS}/0000:01:00.0/class": "0x030000\n"}
    own = {f"{BUS}/0000:0a:00.0/vendor": f"{AMD}\n", f"{BUS}/0000:0a:00.0/class": "0x030000\n"}
    plant(tmp_path, card | own | {"sys/class/drm/card0/device/vendor": f"{AMD}\n"})
    host = replace(amd(tmp_path, 100306), torch=None)
    assert [(gpu.maker, gpu.target) for gpu in find_gpus(host)] == [("amd", "gfx1036"), ("nvidia", "")]
    assert (install_command(host).command or ())[-1] == "torch>=2.11,<2.14"
    assert examined(host)["nvidia-driver"].status == "fail"
    plant(tmp_path, {"sys/bus/pci/drivers/vfio-pci/0000:01:00.0/vendor": f"{NVIDIA}\n"})  # lent to a virtual machine
    assert [gpu.maker for gpu in find_gpus(host)] == ["amd"]


def test_an_amd_gpu_without_a_driver_beside_a_card_that_is_served_is_only_a_warning(tmp_path: Path) -> None:
    host = MATRIX["nvidia"].build(tmp_path)
    plant(tmp_path, {f"{BUS}/0000:0a:00.0/vendor": f"{AMD}\n", f"{BUS}/0000:0a:00.0/class": "0x030000\n"})
    told = examined(host)
    assert (told["amd-driver"].status, told["torch"].status) == ("warn", "ok")


def test_a_hygon_dcu_that_only_the_compute_topology_shows_is_one(tmp_path: Path) -> None:
    texts = [PROCESSOR_NODE, kfd_node(90208, 240, 128, vendor=7572), kfd_node(90208, 240, 129, vendor=7572)]
    plant(tmp_path, {f"{NODES}/{n}/properties": text for n, text in enumerate(texts)})
    host = machine(tmp_path, "none")
    assert [gpu.maker for gpu in find_gpus(host)] == ["hygon", "hygon"]
    told = examined(host)["torch"]
    assert told.status == "fail"
    assert "DTK" in told.hint
    assert "pip install torch" not in told.hint


# --- chips that no new torch works on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "target"), [(90006, "gfx906"), (90000, "gfx900"), (80003, "gfx803")])
def test_of_a_chip_that_no_new_torch_works_on_no_wheel_is_recommended(
    tmp_path: Path, version: int, target: str
) -> None:
    host = replace(amd(tmp_path, version), torch=None)
    choice = install_command(host)
    assert (choice.command or ())[-1] == "torch>=2.11,<2.14"
    assert f"known to work on AMD {target}" in choice.why
    assert "on the CPU" in choice.why
    there = examined(amd(tmp_path, version, version="2.13.0+cpu", gpus=0, hip=None))["torch"]
    assert there.status == "warn"
    assert f"known to work on {target}" in there.value


def test_an_old_chip_beside_a_newer_one_is_left_out_of_its_wheel(tmp_path: Path) -> None:
    host = amd(tmp_path, 90006, 110000, gpus=2)
    choice = install_command(replace(host, torch=None))
    assert (choice.command or ())[-1] == "torch[device-gfx1100]>=2.11,<2.14"
    assert "known to work on AMD gfx906" in choice.why
    told = examined(host)["torch"]
    assert (told.status, told.hint) == ("warn", "export HIP_VISIBLE_DEVICES=1")
