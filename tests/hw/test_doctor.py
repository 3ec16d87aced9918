"""Each machine is told exactly what is wrong with it, and how to mend it; docs list what can be told."""

import ast
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.core import native
from bloomery.hw.doctor import report
from bloomery.hw.doctor.finding import Finding
from bloomery.hw.doctor.report import as_lines, examine, exit_code
from bloomery.hw.host import CommandResult, Host, Node, Space, User, find_gpus, rocminfo_targets
from bloomery.hw.kernel_trials import trials
from tests.hw.machines import (
    BLACKLIST,
    GIB,
    MACHINES,
    MATRIX,
    RENDER,
    ROCMINFO,
    TROUBLES,
    computes,
    examined,
    machine,
    measured,
    plant,
    recorded,
    replying,
    sees,
    told,
    torch_folder,
)

ROOT = Path(__file__).parents[2]
SEEN_AMD = {"version": "2.13.0+rocm7.2", "hip": "7.2.1", "cuda": None, "gpus": 1, "targets": ["gfx1151"]}
FAMILIES = {"native-": native.NAMES, "package-": ("torchvision", "torchaudio")}


def healthy(root: Path, *, env: Mapping[str, str] | None = None, **replies: CommandResult) -> Host:
    """A Strix Halo on which all is well but for what is given."""
    return replace(replying(MATRIX["strix-halo-tuned"].build(root), replies), env=env or {})


# --- whole machines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MATRIX)
def test_each_machine_is_told_what_is_wrong_with_it_and_how_to_mend_it_and_nothing_else(
    tmp_path: Path, name: str
) -> None:
    findings, wrong = examine(MATRIX[name].build(tmp_path), tmp_path / "runs"), MATRIX[name].wrong
    assert {finding.id: finding.status for finding in findings if finding.status != "ok"} == wrong
    assert all(finding.value and bool(finding.hint) == (finding.status != "ok") for finding in findings)
    assert exit_code(findings) == max(({"warn": 1, "fail": 2}[status] for status in wrong.values()), default=0)


def test_on_a_hygon_dcu_nothing_says_to_install_torch_by_pip(tmp_path: Path) -> None:
    for name in ("hygon", "hygon-without-torch"):
        findings = examined(MATRIX[name].build(tmp_path / name)).values()
        assert not [finding for finding in findings if "pip install" in finding.hint or "wheel" in finding.hint]


@pytest.mark.parametrize("kind", MACHINES)
def test_every_machine_without_torch_is_told_how_to_get_it_and_whatever_is_not_well_has_a_hint(
    tmp_path: Path, kind: str
) -> None:
    findings = examined(machine(tmp_path, kind))
    assert findings["torch"].status == "fail"
    assert ("DTK" if kind == "hygon" else "pip install") in findings["torch"].hint
    assert "training" not in findings
    assert all(finding.hint for finding in findings.values() if finding.status != "ok")


@pytest.mark.parametrize("name", MATRIX)
def test_a_quick_examination_runs_nothing_but_the_import_of_torch_and_finds_the_same(tmp_path: Path, name: str) -> None:
    host = MATRIX[name].build(tmp_path)
    whole, ran = {finding.id: finding for finding in examine(host, tmp_path / "runs")}, list[str]()

    def run(command: Sequence[str], limit_seconds: float) -> CommandResult:
        ran.append(command[-1])
        return host.run(command, limit_seconds)

    found = [finding for _, finding in report.findings(replace(host, run=run), tmp_path / "runs", quick=True)]
    assert not {"speed", "memory", "disk", "refill", "all-reduce", "launch", "training"} & {*ran}
    assert {finding.id: finding for finding in found[:-1]}.items() <= whole.items()
    assert found[-1].id == "quick"
    assert report.verdict(found, tmp_path / "runs")[0] != report.verdict([*whole.values()], tmp_path / "runs")[
        0
    ] or any(finding.status == "fail" for finding in found)


# --- the pages --------------------------------------------------------------------------------------------------------


def ids_in_code() -> set[str]:
    """Every `Finding(id=…)`, with the families whose names are put together, and all trials of all makers."""
    ids = {trial.name for vendor in ("amd", "nvidia", "apple", "cpu") for trial in trials(vendor)}
    for file in (ROOT / "src" / "bloomery" / "hw" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding"):
                continue
            id = next(word.value for word in node.keywords if word.arg == "id")
            if isinstance(id, ast.Constant):
                ids.add(str(id.value))
            elif isinstance(id, ast.JoinedStr):
                assert isinstance(id.values[0], ast.Constant)
                start = str(id.values[0].value)
                ids |= {f"{start}{name}" for name in FAMILIES[start]}
            else:
                assert ast.unparse(id) == "outcome.name", ast.unparse(id)  # of a trial
    return ids


# --- single troubles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TROUBLES)
def test_each_trouble_is_told_with_its_hint(tmp_path: Path, name: str) -> None:
    trouble = TROUBLES[name]
    id, _, status = trouble.finding.partition(": ")
    before = examined(MATRIX[trouble.on].build(tmp_path / "before"))
    assert id not in before or before[id].status == "ok"
    finding = examined(trouble.build(tmp_path / "after"))[id]
    assert finding.status == status
    assert trouble.words in finding.value
    assert trouble.hint in finding.hint


@pytest.mark.parametrize(
    ("files", "words", "hint"),
    [
        ({}, "no compute driver for the AMD GPU", "modprobe amdgpu"),
        ({"proc/cmdline": "root=/dev/sda1 nomodeset\n"}, "nomodeset", "s/ nomodeset//"),
        (BLACKLIST, "/etc/modprobe.d/blacklist-amd.conf forbids it", "/blacklist amdgpu/d"),
        ({".dockerenv": ""}, "in this container", "--device=/dev/kfd"),
    ],
)
def test_a_driver_that_is_not_there_says_why(tmp_path: Path, files: dict[str, str], words: str, hint: str) -> None:
    host = machine(tmp_path, "amd-without-kfd")
    plant(tmp_path, files)
    finding = examined(host)["amd-driver"]
    assert (finding.status, words in finding.value, hint in finding.hint) == ("fail", True, True)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HIP_VISIBLE_DEVICES": "0"}, "only the integrated GPU gfx1036 is visible, not the card gfx1201"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, "the integrated GPU gfx1036 is visible, next to the card gfx1201"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, "unset ROCR_VISIBLE_DEVICES; export HIP_VISIBLE_DEVICES=1"),
        ({"HIP_VISIBLE_DEVICES": "1"}, None),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, None),
    ],
)
def test_the_small_gpu_beside_a_card_is_told_while_it_is_let_through(
    tmp_path: Path, env: dict[str, str], words: str | None
) -> None:
    findings = examined(replace(MATRIX["rdna4-and-igpu"].build(tmp_path), env=env))
    assert findings["visible-devices"].status == "ok"
    assert ("mixed-gpus" in findings) is (words is not None)
    assert words is None or words in f"{findings['mixed-gpus'].value} {findings['mixed-gpus'].hint}"


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        ("11.0.0", "fail", "11.0.0 means gfx1100, but the kernel reports gfx1151"),
        ("99.99.99", "fail", "99.99.99 means no target"),
        ("11.5.1", "warn", ""),
    ],
)
def test_an_override_of_a_target_that_has_its_own_kernels_fails_and_one_that_names_the_very_chip_is_a_warning(
    tmp_path: Path, version: str, status: str, words: str
) -> None:
    findings = examined(healthy(tmp_path, env={"HSA_OVERRIDE_GFX_VERSION": version}))
    assert findings["hsa-override"].status == status
    assert findings["hsa-override"].value.startswith(words)
    assert findings["hsa-override"].hint == "unset HSA_OVERRIDE_GFX_VERSION"
    assert version != "11.5.1" or findings["torch"].status == "ok"


def test_an_override_of_a_chip_without_kernels_of_its_own_is_a_warning(tmp_path: Path) -> None:
    host = machine(tmp_path, "igpu-and-nvidia", env={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"})
    assert examined(host)["hsa-override"].status == "warn"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (CommandResult(code=-11), "signal 11"),
        (CommandResult(code=None), "timed out"),
        (CommandResult(code=1, err="x\nImportError: no lib"), "lib"),
    ],
)
def test_a_torch_that_cannot_be_imported_fails_with_how_it_ended_and_its_machine_is_asked_nothing(
    tmp_path: Path, reply: CommandResult, words: str
) -> None:
    findings = examined(healthy(tmp_path, torch=reply))
    assert findings["torch"].status == "fail"
    assert words in findings["torch"].value
    assert "--force-reinstall" in findings["torch"].hint
    assert not {"launch", "speed", "refill", "choice"} & findings.keys()


def test_a_torch_without_kernels_for_the_gpu_fails(tmp_path: Path) -> None:
    finding = examined(healthy(tmp_path, torch=told(SEEN_AMD | {"targets": ["gfx942"]})))["torch"]
    assert (finding.status, "gfx1151" in finding.value, "device-gfx1151" in finding.hint) == ("fail", True, True)


def test_a_torch_that_sees_no_gpu_says_what_hides_it(tmp_path: Path) -> None:
    host = healthy(tmp_path, env={"HIP_VISIBLE_DEVICES": ""}, torch=told(SEEN_AMD | {"gpus": 0}))
    finding = examined(host)["torch"]
    assert (finding.status, finding.hint) == ("fail", "unset HIP_VISIBLE_DEVICES")
    assert "HIP_VISIBLE_DEVICES=''" in finding.value


def test_a_processors_torch_on_a_machine_with_a_gpu_fails(tmp_path: Path) -> None:
    replies = {"torch": sees("2.13.0+cpu", hip=None, gpus=0), **computes("cpu")}
    finding = examined(machine(tmp_path, "7900-xtx", replies=replies, torch=torch_folder(tmp_path, "2.13.0+cpu")))
    assert finding["torch"].status == "fail"
    assert "torch[device-gfx1100]" in finding["torch"].hint


def test_an_nvidia_driver_that_is_too_old_for_torch_is_told_with_the_wheel_that_it_can_run(tmp_path: Path) -> None:
    host = MATRIX["nvidia"].build(tmp_path)
    plant(tmp_path, {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  R\n"})
    blind = recorded({"torch": sees("2.13.0+cu130", gpus=0, hip=None, cuda="13.0")})
    finding = examined(replace(host, run=blind))["torch"]
    assert finding.value == "2.13.0+cu130 needs driver 580 or newer; this one is 550.54"
    assert "whl/cu126" in finding.hint


def test_a_vendors_torch_whose_libraries_are_not_found_is_told_to_load_its_environment(tmp_path: Path) -> None:
    torch = torch_folder(tmp_path, "2.11.0+das.opt1.dtk2604", hip="6.1")
    reply = CommandResult(code=1, err="ImportError: libgalaxyhip.so.5: cannot open shared object file")
    finding = examined(machine(tmp_path, "hygon", torch=torch, replies={"torch": reply}))["torch"]
    assert (finding.status, finding.hint) == ("fail", "source /opt/dtk/env.sh")
    assert "libgalaxyhip" in finding.value


def test_a_torch_of_others_on_a_hygon_dcu_fails_without_a_word_of_pip(tmp_path: Path) -> None:
    torch = torch_folder(tmp_path, "2.13.0+rocm7.2", hip="7.2.1")
    finding = examined(machine(tmp_path, "hygon", torch=torch, replies={"torch": sees(gpus=0)}))["torch"]
    assert finding.status == "fail"
    assert "pip" not in finding.hint


def test_device_nodes_that_are_absent_or_closed_fail(tmp_path: Path) -> None:
    host = healthy(tmp_path)
    closed = {**host.nodes, "dev/dri/renderD128": Node(owner=0, group=44, mode=0o660)}
    host = replace(host, nodes=closed, user=User(number=1000, groups=frozenset({992})))
    finding = examined(host)["amd-device-nodes"]
    assert finding.status == "fail"
    assert finding.value == "no permission: /dev/dri/renderD128 (group video)"
    assert finding.hint.startswith('sudo usermod -aG video,render "$USER"')
    (tmp_path / "dev/kfd").unlink()
    plant(tmp_path, {".dockerenv": ""})
    finding = examined(host)["amd-device-nodes"]
    assert finding.value.startswith("missing: /dev/kfd; no permission")
    assert "--device=/dev/kfd" in finding.hint


@pytest.mark.parametrize(("gtt", "carved", "status"), [(64, 0, "warn"), (16, 96, "ok")])
def test_a_gpu_that_gets_half_of_the_memory_is_told_the_kernel_parameter_and_a_large_carve_out_is_fine(
    tmp_path: Path, gtt: int, carved: int, status: str
) -> None:
    host = healthy(tmp_path)
    sizes = {"gtt": gtt, "vram": carved}
    plant(tmp_path, {f"{RENDER}/mem_info_{name}_total": str(size * GIB) for name, size in sizes.items()})
    finding = examined(host)["gtt"]
    assert finding.status == status
    assert status == "ok" or "ttm.pages_limit=25165824" in finding.hint  # 96 GiB of 4 KiB


def test_scarce_disk_memory_and_shm_are_warnings(tmp_path: Path) -> None:
    little = Space(total=GIB // 16, free=5 * GIB)
    host = replace(healthy(tmp_path), spaces=dict.fromkeys((str(tmp_path), "dev/shm"), little))
    plant(tmp_path, {".dockerenv": "", "dev/shm/x": "", "proc/self/cgroup": "0::/\n"})
    plant(tmp_path, {"sys/fs/cgroup/memory.max": str(2 * GIB)})
    findings = {finding.id: finding.status for finding in examine(host, tmp_path / "runs/not/yet/there")}
    assert [findings[name] for name in ("disk", "memory", "shm")] == ["warn"] * 3


def test_a_full_disk_is_not_measured(tmp_path: Path) -> None:
    host = MATRIX["no-gpu"].build(tmp_path)
    findings = examined(replace(host, spaces={**host.spaces, str(tmp_path): Space(total=GIB, free=0)}))
    assert findings["disk"].status == "fail"
    assert "disk-speed" not in findings


@pytest.mark.parametrize(
    ("device", "flops"),
    [("NVIDIA GeForce RTX 4090", 150e12), ("Apple M2", 1e12), ("a device that nobody knows", 1e9)],
)
def test_a_speed_is_held_only_against_what_is_known_of_the_device(tmp_path: Path, device: str, flops: float) -> None:
    host = replying(MATRIX["nvidia"].build(tmp_path), {"speed": measured(device, flops, 900e9)})
    finding = examined(host)["speed"]
    assert (finding.status, finding.hint) == ("ok", "")
    assert ("spec sheet" in finding.value) == ("RTX" in device)


# --- Windows ----------------------------------------------------------------------------------------------------------


def test_windows_lends_its_gpus_by_their_libraries_or_by_amds_runtime(tmp_path: Path) -> None:
    plain = machine(tmp_path / "a", "wsl")
    assert find_gpus(plain) == []
    plant(plain.root, {"usr/lib/wsl/lib/libcuda.so.1": ""})
    assert [gpu.maker for gpu in find_gpus(plain)] == ["nvidia"]
    reply = CommandResult(code=0, out=ROCMINFO.format(target="gfx1201"))
    lent = machine(tmp_path / "b", "wsl", replies={"rocminfo": reply})
    assert [gpu.target for gpu in find_gpus(lent)] == ["gfx1201"]


def test_windows_without_anything_to_lend_is_told_to_update(tmp_path: Path) -> None:
    host = MATRIX["wsl-without-runtime"].build(tmp_path)
    (tmp_path / "dev/dxg").unlink()
    finding = examined(host)["wsl"]
    assert (finding.status, finding.hint.partition(" ")[0]) == ("warn", "wsl")


def test_windows_itself_lists_nvidias_gpus(tmp_path: Path) -> None:
    listed = CommandResult(code=0, out="GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\nGPU 1: NVIDIA T4 (UUID: GPU-2)\n")
    host = Host(root=tmp_path, system="Windows", run=recorded({"-L": listed}))
    assert [gpu.name for gpu in find_gpus(host)] == ["NVIDIA GeForce RTX 4090", "NVIDIA T4"]


def test_only_gpus_count_among_the_agents_of_a_runtime(tmp_path: Path) -> None:
    """Some versions pad their lines; a processor's name may hold the GPU's, and an NPU is an agent too."""
    padded = "\n".join(f"{line}   " for line in ROCMINFO.format(target="gfx1151").splitlines())
    for text in (ROCMINFO.format(target="gfx1151"), padded):
        host = Host(root=tmp_path, run=recorded({"rocminfo": CommandResult(code=0, out=text)}))
        assert rocminfo_targets(host) == ["gfx1151"]
    assert rocminfo_targets(Host(root=tmp_path, run=recorded({}))) == []


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_worst_finding_decides_the_exit_code() -> None:
    ok, warn, fail = (Finding(id="x", status=status, value="") for status in ("ok", "warn", "fail"))
    assert [exit_code(findings) for findings in ([], [ok], [ok, warn], [fail, warn])] == [0, 0, 1, 2]


def test_a_report_shows_each_finding_and_its_hint() -> None:
    finding = Finding(id="disk", status="warn", value="little", hint="first\nsecond")
    assert [line.split() for line in as_lines(finding)] == [["!", "disk", "little"], ["first"], ["second"]]


def test_what_is_asked_is_named_while_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = healthy(tmp_path)
    assert examine(report.shown(host), tmp_path) == examine(host, tmp_path)
    said = capsys.readouterr().err
    assert "  trying attention-flash" in said
    assert said.endswith("\r\x1b[K")


def test_the_order_of_checks_is_the_order_of_the_report(tmp_path: Path) -> None:
    names = list(examined(healthy(tmp_path)))
    assert names[:2] == ["python", "gpu"]
    assert names[-3:] == ["speed", "hipblaslt", "refill"]
    assert {"amd-device-nodes", "gtt", "torch", "matmul-hipblas", "training"} <= set(names)
    assert sum(map(len, report.GROUPS.values())) >= 20


def test_no_line_is_longer_than_80_columns_and_a_long_command_can_still_be_pasted() -> None:
    command = "python3 -m pip install --index-url https://example.org/a/long/address 'torch>=2.9,<3' --force-reinstall"
    finding = Finding(id="torch", status="fail", value="many words " * 20, hint=f"{command}   # or another build")
    lines = as_lines(finding)
    assert max(map(len, lines)) <= 80
    pasted = "\n".join(line for line in lines[-3:] if "#" not in line).replace("\\\n", "")
    assert shlex.split(pasted) == shlex.split(command)


def test_the_verdict_names_what_is_to_be_fixed_and_the_next_command() -> None:
    ok, warn, fail = (Finding(id=status, status=status, value="") for status in ("ok", "warn", "fail"))
    assert report.verdict([ok], Path("runs")) == ("This machine is ready to train.", "bloomery run recipes/demo.toml")
    assert "warn (!" in report.verdict([ok, warn], Path("runs"))[0]
    sentence, command = report.verdict([ok, warn, fail], Path("runs"))
    assert "not ready to train. To fix: fail" in sentence
    assert command == "bloomery doctor"


def test_saved_results_are_shown_and_tried_again_when_asked_or_when_one_failed(tmp_path: Path) -> None:
    asked: list[str] = []
    host = replace(MATRIX["no-gpu"].build(tmp_path), cache=tmp_path / "cache")

    def run(command: Sequence[str], limit_seconds: float) -> CommandResult:
        asked.extend(command)
        return host.run(command, limit_seconds)

    for retry, tries in ((False, True), (False, False), (True, True)):
        asked.clear()
        found = {one.id for _, one in report.findings(replace(host, run=run), tmp_path, retry=retry)}
        assert ("launch" in asked) is tries
        assert {"launch", "training", "choice"} <= found
