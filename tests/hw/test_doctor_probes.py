"""What probes found becomes findings: what a run does without is a warning, what it needs a failure."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.hw import probes
from bloomery.hw.doctor.finding import Finding
from bloomery.hw.doctor.report import examine, exit_code
from bloomery.hw.host import CommandResult, Host
from tests.hw.machines import MATRIX, answering, computes, examined, recorded, replying, told

SWITCH = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
DEVICE = {"device": "GPU", "vendor": "amd", "dtype": "bfloat16"}


def findings(root: Path, kind: str = "strix-halo-tuned", **replies: CommandResult) -> dict[str, Finding]:
    """Of a machine of the matrix on which some probes say something else."""
    replies = {name.replace("_", "-"): reply for name, reply in replies.items()}
    return examined(replying(MATRIX[kind].build(root), replies))


def test_an_implementation_that_fails_beside_a_sound_one_is_a_warning(tmp_path: Path) -> None:
    found = findings(tmp_path, attention_flash=told(DEVICE, {"trying": "heads of 64"}, code=-11))
    assert found["attention-flash"].status == "warn"
    assert "signal 11" in found["attention-flash"].value
    assert "-m bloomery.model.kernels.trials attention-flash" in found["attention-flash"].hint
    assert "attention by efficient" in found["choice"].value


def test_the_only_implementation_that_fails_is_a_failure(tmp_path: Path) -> None:
    found = findings(tmp_path, training=told(DEVICE, {"first_loss": 3.5, "last_loss": 3.6}))
    assert found["training"].status == "fail"
    assert "--force-reinstall" in found["training"].hint
    assert exit_code(list(found.values())) == 2


def test_a_device_that_hangs_at_once_is_asked_nothing_more(tmp_path: Path) -> None:
    found = findings(tmp_path, launch=told(DEVICE, {"trying": "sum"}, code=None))
    assert found["launch"].status == "fail"
    assert not {"training", "rms-norm-torch"} & found.keys()


@pytest.mark.parametrize("flex", [True, False])
def test_without_fused_attention_it_is_told_what_that_costs(tmp_path: Path, flex: bool) -> None:
    """Long rows go to the kernel that torch compiles for a mask, where it passed."""
    absent = told(DEVICE, {"absent": "No available kernel"})
    names = ["attention_flash", "attention_efficient", "attention_varlen", *([] if flex else ["attention_flex"])]
    found = findings(tmp_path, **dict.fromkeys(names, absent))  # type: ignore[arg-type]
    assert ("attention" in found) is not flex
    assert flex or (found["attention"].status, "square" in found["attention"].value) == ("warn", True)
    assert ("several documents in a row by flex" in found["choice"].value) is flex


def test_attention_of_amd_is_tried_with_the_switch_that_opens_it_and_runs_set_it(tmp_path: Path) -> None:
    host, asked = MATRIX["strix-halo-tuned"].build(tmp_path), []

    def reply(command: Sequence[str]) -> CommandResult | None:
        asked.append(command)
        return None

    found = examined(answering(host, reply))["aotriton"]
    assert (found.status, found.value) == ("ok", f"fused attention passed with {SWITCH}=1, which runs set")
    opened = {command[-1] for command in asked if f"{SWITCH}=1" in command}
    assert opened == {"attention-flash", "attention-efficient", "attention-varlen"}


def test_a_user_who_shut_fused_attention_is_told_what_it_costs(tmp_path: Path) -> None:
    absent = told(DEVICE, {"absent": "No available kernel"})
    host = replying(
        MATRIX["strix-halo-tuned"].build(tmp_path), {"attention-flash": absent, "attention-efficient": absent}
    )
    asked: list[Sequence[str]] = []

    def reply(command: Sequence[str]) -> CommandResult | None:
        asked.append(command)
        return None

    found = examined(replace(answering(host, reply), env={**host.env, SWITCH: "0"}))["aotriton"]
    assert found.status == "warn"
    assert found.hint.startswith(f"unset {SWITCH}")
    assert not any(f"{SWITCH}=1" in command for command in asked)


def test_a_switch_that_makes_products_faster_is_told(tmp_path: Path) -> None:
    def reply(command: Sequence[str]) -> CommandResult | None:
        flops = 36.9e12 if "TORCH_BLAS_PREFER_HIPBLASLT=1" in command else 5.1e12
        return told(DEVICE, {"flops": flops}, {"bytes_per_second": 212e9}) if command[-1] == "speed" else None

    found = examined(answering(MATRIX["strix-halo-tuned"].build(tmp_path), reply))["hipblaslt"]
    assert found.value == "36.9 TFLOP/s with hipBLASLt, 5.1 without, 5.1 with default settings"
    assert (found.status, found.hint) == ("warn", "export TORCH_BLAS_PREFER_HIPBLASLT=1")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (told({"trying": "round 2: 90.0 GiB"}, code=-9), "signal 9 (SIGKILL) at round 2: 90.0 GiB"),
        (told({"wrong_1": 0}, {"wrong_2": 3}, {"filled_bytes": 2**36}), "3 blocks of memory lost"),
    ],
)
def test_memory_that_cannot_be_filled_again_is_a_failure(tmp_path: Path, reply: CommandResult, words: str) -> None:
    found = findings(tmp_path, refill=reply)["refill"]
    assert found.status == "fail"
    assert words in found.value


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (told({"trying": "8 processes"}, code=None), "timed out"),
        (told({"wrong": 5, "bytes_per_second": 1e9}, {"ranks": 8, "codes": [0] * 8}), "wrong sums"),
        (told({"ranks": 8, "codes": [0, -6, 1, 1, 1, 1, 1, 1]}), "-6"),
    ],
)
def test_gpus_that_cannot_add_up_are_a_failure(tmp_path: Path, reply: CommandResult, words: str) -> None:
    found = findings(tmp_path, "mi300x", all_reduce=reply)["all-reduce"]
    assert found.status == "fail"
    assert words in found.value
    assert "NCCL_P2P_DISABLE" in found.hint


def test_apple_is_asked_what_it_can_answer(tmp_path: Path) -> None:
    host = Host(root=tmp_path, system="Darwin", processor="arm64", torch=MATRIX["no-gpu"].build(tmp_path).torch)
    facts = told({"version": "2.13.0", "gpus": 0, "targets": [], "apple": True})
    found = examine(replace(host, run=recorded({"torch": facts, **computes("apple", "float32")})), tmp_path)
    assert {"launch", "matmul", "attention-math", "training"} <= {one.id for one in found}


def test_memory_is_filled_twice_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    probes.refill(share=1e-3, piece_bytes=2**20)
    said = capsys.readouterr().out
    assert '{"wrong_1": 0}' in said
    assert '{"wrong_2": 0}' in said


@pytest.mark.slow
def test_two_processes_add_up_here_too(capfd: pytest.CaptureFixture[str]) -> None:
    probes.all_reduce()
    said = capfd.readouterr().out
    assert '"wrong": 0' in said
    assert '"codes": [0, 0]' in said
