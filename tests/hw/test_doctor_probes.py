"""What probes found becomes findings: what a run does without is a warning, what it needs a failure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.hw import probes
from bloomery.hw.doctor.finding import Finding
from bloomery.hw.doctor.report import examine, exit_code
from bloomery.hw.host import CommandResult, Host
from tests.hw.machines import MATRIX, answering, computes, examined, recorded, replying, told

SWITCH = "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"
DEVICE = {"device": "GPU", "vendor": "amd", "dtype": "bfloat16"}


def findings(root: Path, kind: str = "strix-halo-tuned", **replies: CommandResult) -> dict[str, Finding]:
    """Of a machine of the matrix on which some probes say something else."""
    replies = {name.replace("_", "-"): reply for name, reply in replies.items()}
    return examined(replying(MATRIX[kind].build(root), replies))


def finding_where(root: Path, id: str, change: Callable[[bool, CommandResult], CommandResult]) -> Finding:
    """Where fused attention replies otherwise, with and without the switch that the environment sets."""
    host = MATRIX["strix-halo-tuned"].build(root)

    def reply(command: Sequence[str]) -> CommandResult | None:
        if command[-1] not in ("attention-flash", "attention-efficient"):
            return None
        return change(command[0] == "env", host.run(command, 1.0))

    return examined(answering(host, reply))[id]


def taking(reply: CommandResult, milliseconds: float) -> CommandResult:
    return replace(reply, out=re.sub(r'"milliseconds": [0-9.]+', f'"milliseconds": {milliseconds}', reply.out))


def test_an_implementation_that_fails_beside_a_sound_one_is_a_warning(tmp_path: Path) -> None:
    found = findings(tmp_path, attention_flash=told(DEVICE, {"trying": "heads of 64"}, code=-11))
    assert found["attention-flash"].status == "warn"
    assert "signal 11" in found["attention-flash"].value
    assert "-m bloomery.hw.probes attention-flash" in found["attention-flash"].hint
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


@pytest.mark.parametrize("helps", [True, False])
def test_without_fused_attention_it_is_told_what_that_costs_and_what_may_help(tmp_path: Path, helps: bool) -> None:
    absent = told(DEVICE, {"absent": "No available kernel"})
    found = finding_where(tmp_path, "attention", lambda switched, reply: reply if switched and helps else absent)
    assert found.status == "warn"
    assert "square" in found.value
    assert found.hint.startswith(SWITCH) is helps


@pytest.mark.parametrize(("milliseconds", "status"), [(0.8, "warn"), (2.0, "ok"), (None, "ok")])
def test_a_switch_that_makes_attention_faster_is_told(tmp_path: Path, milliseconds: float | None, status: str) -> None:
    def change(switched: bool, reply: CommandResult) -> CommandResult:
        if switched and milliseconds is None:
            return told(DEVICE, {"trying": "heads of 64"}, code=-11)
        return taking(reply, milliseconds if switched and milliseconds else 2.1)

    found = finding_where(tmp_path, "aotriton", change)
    assert found.status == status
    assert "takes 2.10 ms as it is" in found.value
    assert (found.hint == SWITCH) is (status == "warn")


def test_attention_that_is_wrong_takes_no_time(tmp_path: Path) -> None:
    def change(switched: bool, reply: CommandResult) -> CommandResult:
        return taking(reply, 0.8) if switched else replace(reply, code=-11)

    found = finding_where(tmp_path, "aotriton", change)
    assert found.status == "warn"
    assert found.value.startswith("fused attention fails as it is, 0.80 ms with")


def test_a_switch_that_makes_products_faster_is_told(tmp_path: Path) -> None:
    def reply(command: Sequence[str]) -> CommandResult | None:
        flops = 36.9e12 if "TORCH_BLAS_PREFER_HIPBLASLT=1" in command else 5.1e12
        return told(DEVICE, {"flops": flops}, {"bytes_per_second": 212e9}) if command[-1] == "speed" else None

    found = examined(answering(MATRIX["strix-halo-tuned"].build(tmp_path), reply))["hipblaslt"]
    assert found.value == "36.9 TFLOP/s with hipBLASLt, 5.1 without, 5.1 as it is"
    assert (found.status, found.hint) == ("warn", "export TORCH_BLAS_PREFER_HIPBLASLT=1")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (told({"trying": "round 2: 90.0 GiB"}, code=-9), "signal 9 (SIGKILL) at round 2: 90.0 GiB"),
        (told({"wrong_1": 0}, {"wrong_2": 3}, {"filled_bytes": 2**36}), "3 pieces of memory lost"),
    ],
)
def test_memory_that_cannot_be_filled_again_is_a_failure(tmp_path: Path, reply: CommandResult, words: str) -> None:
    found = findings(tmp_path, refill=reply)["refill"]
    assert found.status == "fail"
    assert words in found.value


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (told({"trying": "8 processes"}, code=None), "did not end in time"),
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
