"""Every finding has a verdict, and everything that is not well has a cure."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.hw.doctor import report
from bloomery.hw.doctor.finding import Finding
from bloomery.hw.doctor.report import as_lines, examine, exit_code
from bloomery.hw.host import CommandResult, Host, Node, Space, User
from tests.hw.machines import GIB, MACHINES, machine, plant, told, torch_folder
from tests.hw.matrix import computes

SEEN_AMD = {"version": "2.13.0+rocm7.2", "hip": "7.2.1", "cuda": None, "gpus": 1, "targets": ["gfx1151"]}


def healthy(root: Path, *, env: Mapping[str, str] | None = None, **replies: CommandResult) -> Host:
    """A Strix Halo on which all is well but for what is given."""
    torch = torch_folder(root, "2.13.0+rocm7.2", hip="7.2.1")
    host = machine(
        root, "strix-halo", env=env, replies={"torch": told(SEEN_AMD), **computes("amd"), **replies}, torch=torch
    )
    plant(root, {"sys/class/drm/renderD128/device/mem_info_gtt_total": str(96 * GIB)})
    return host


def by_id(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.id for finding in findings}) == len(findings)
    return {finding.id: finding for finding in findings}


def test_a_healthy_machine_has_nothing_to_hint(tmp_path: Path) -> None:
    findings = examine(healthy(tmp_path), tmp_path / "runs")
    assert exit_code(findings) == 0, as_lines(findings)
    assert {"python", "gpu", "amd-device-nodes", "gtt", "torch", "matmul-hipblas", "training"} <= by_id(findings).keys()
    assert not [finding for finding in findings if finding.hint]


@pytest.mark.parametrize("kind", MACHINES)
def test_every_machine_without_torch_is_told_how_to_get_it(tmp_path: Path, kind: str) -> None:
    findings = by_id(examine(machine(tmp_path, kind), tmp_path / "runs"))
    assert findings["torch"].status == "fail"
    assert ("DTK" if kind == "hygon" else "pip install") in findings["torch"].hint
    assert "training" not in findings


@pytest.mark.parametrize("kind", MACHINES)
def test_whatever_is_not_well_has_a_hint(tmp_path: Path, kind: str) -> None:
    assert all(finding.hint for finding in examine(machine(tmp_path, kind), tmp_path) if finding.status != "ok")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (CommandResult(code=-11), "signal 11"),
        (CommandResult(code=None), "in time"),
        (CommandResult(code=1, err="x\nImportError: no lib"), "lib"),
    ],
)
def test_a_torch_that_cannot_be_imported_fails_with_how_it_ended(
    tmp_path: Path, reply: CommandResult, words: str
) -> None:
    finding = by_id(examine(healthy(tmp_path, torch=reply), tmp_path))["torch"]
    assert finding.status == "fail"
    assert words in finding.value
    assert "--force-reinstall" in finding.hint


def test_a_torch_without_kernels_for_the_gpu_fails(tmp_path: Path) -> None:
    host = healthy(tmp_path, torch=told(SEEN_AMD | {"targets": ["gfx942"]}))
    finding = by_id(examine(host, tmp_path))["torch"]
    assert (finding.status, "gfx1151" in finding.value, "device-gfx1151" in finding.hint) == ("fail", True, True)


def test_a_torch_that_sees_no_gpu_says_what_hides_it(tmp_path: Path) -> None:
    host = healthy(tmp_path, env={"HIP_VISIBLE_DEVICES": ""}, torch=told(SEEN_AMD | {"gpus": 0}))
    finding = by_id(examine(host, tmp_path))["torch"]
    assert finding.status == "fail"
    assert "HIP_VISIBLE_DEVICES=''" in finding.value
    assert finding.hint == "unset HIP_VISIBLE_DEVICES"


def test_a_processors_torch_on_a_machine_with_a_gpu_fails(tmp_path: Path) -> None:
    replies = {"torch": told(SEEN_AMD | {"version": "2.13.0+cpu", "hip": None, "gpus": 0}), **computes("cpu")}
    host = machine(tmp_path, "7900-xtx", replies=replies, torch=torch_folder(tmp_path, "2.13.0+cpu"))
    finding = by_id(examine(host, tmp_path))["torch"]
    assert finding.status == "fail"
    assert "torch[device-gfx1100]" in finding.hint


def test_device_nodes_that_are_absent_or_closed_fail(tmp_path: Path) -> None:
    host = healthy(tmp_path)
    closed = {**host.nodes, "dev/dri/renderD128": Node(owner=0, group=44, mode=0o660)}
    host = replace(host, nodes=closed, user=User(number=1000, groups=frozenset({992})))
    finding = by_id(examine(host, tmp_path))["amd-device-nodes"]
    assert finding.status == "fail"
    assert finding.value == "closed to this user: /dev/dri/renderD128 (of group video)"
    assert finding.hint.startswith('sudo usermod -aG video,render "$USER"')
    (tmp_path / "dev/kfd").unlink()
    plant(tmp_path, {".dockerenv": ""})
    finding = by_id(examine(host, tmp_path))["amd-device-nodes"]
    assert finding.value.startswith("absent: /dev/kfd; closed")
    assert "--device=/dev/kfd" in finding.hint


def test_an_override_of_a_target_that_has_its_own_kernels_fails(tmp_path: Path) -> None:
    finding = by_id(examine(healthy(tmp_path, env={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}), tmp_path))["hsa-override"]
    assert finding.status == "fail"
    assert finding.value == "11.0.0 stands for gfx1100; the kernel says gfx1151"
    assert finding.hint == "unset HSA_OVERRIDE_GFX_VERSION"


def test_a_gpu_that_gets_half_of_the_memory_is_told_the_kernel_parameter(tmp_path: Path) -> None:
    host = healthy(tmp_path)
    plant(tmp_path, {"sys/class/drm/renderD128/device/mem_info_gtt_total": str(64 * GIB)})
    finding = by_id(examine(host, tmp_path))["gtt"]
    assert finding.status == "warn"
    assert "ttm.pages_limit=25165824" in finding.hint  # 96 GiB of 4 KiB


def test_a_large_carve_out_of_memory_is_fine(tmp_path: Path) -> None:
    host = healthy(tmp_path)
    folder = "sys/class/drm/renderD128/device"
    sizes = {f"{folder}/mem_info_gtt_total": str(16 * GIB), f"{folder}/mem_info_vram_total": str(96 * GIB)}
    plant(tmp_path, sizes)
    assert by_id(examine(host, tmp_path))["gtt"].status == "ok"


def test_scarce_disk_memory_and_shm_are_warnings(tmp_path: Path) -> None:
    little = Space(total=GIB // 16, free=5 * GIB)
    host = replace(healthy(tmp_path), spaces=dict.fromkeys((str(tmp_path), "dev/shm"), little))
    plant(tmp_path, {".dockerenv": "", "dev/shm/x": "", "proc/self/cgroup": "0::/\n"})
    plant(tmp_path, {"sys/fs/cgroup/memory.max": str(2 * GIB)})
    findings = by_id(examine(host, tmp_path / "runs/not/yet/there"))
    assert {name: findings[name].status for name in ("disk", "memory", "shm")} == dict.fromkeys(
        ("disk", "memory", "shm"), "warn"
    )


def test_the_worst_finding_decides_the_exit_code() -> None:
    ok, warn, fail = (Finding(id="x", status=status, value="") for status in ("ok", "warn", "fail"))
    assert [exit_code(found) for found in ([], [ok], [ok, warn], [fail, warn])] == [0, 0, 1, 2]


def test_a_report_shows_each_finding_and_its_hint() -> None:
    finding = Finding(id="disk", status="warn", value="little", hint="first\nsecond")
    assert [line.split() for line in as_lines([finding])] == [["!", "disk", "little"], ["first"], ["second"]]


def test_what_is_asked_is_named_while_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = healthy(tmp_path)
    assert examine(report.shown(host), tmp_path) == examine(host, tmp_path)
    said = capsys.readouterr().err
    assert "  attention-flash …" in said
    assert said.endswith("\r\x1b[K")


def test_the_order_of_checks_is_the_order_of_the_report(tmp_path: Path) -> None:
    names = [finding.id for finding in examine(healthy(tmp_path), tmp_path)]
    assert names[:2] == ["python", "gpu"]
    assert names[-3:] == ["speed", "hipblaslt", "refill"]
    assert len(report.CHECKS) >= 20
