"""What a child says and how it ends become a verdict, which is kept until something changes that it depends on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.core.errors import HardwareError
from bloomery.hw import kernel_trials
from bloomery.hw.host import CommandResult, Host
from bloomery.hw.kernel_trials import KernelTrial, TrialResult, command, judge, trials
from tests.hw.machines import MATRIX, install, machine, plant, told, torch_folder

DEVICE = {"device": "GPU", "vendor": "amd", "dtype": "bfloat16"}
RIGHT = {"case": "NN", "error": 0.003, "cosine": 1.0, "unwritten": 0.0, "finite": True, "zeros": False}
WRONG = RIGHT | {"error": 0.5}
MATMUL = KernelTrial(kernel="matmul", implementation="hipblaslt")
TRAINING = KernelTrial(kernel="training")


@pytest.mark.parametrize(
    ("trial", "reply", "words"),
    [
        (MATMUL, told(DEVICE, {"trying": "NN"}, code=-11), "signal 11 (SIGSEGV) at NN"),
        (MATMUL, told(DEVICE, {"trying": "TN"}, code=None), "timed out at TN"),
        (MATMUL, told(DEVICE, {"trying": "NN"}, code=1, err="x\nRuntimeError: HIP error"), "RuntimeError: HIP error"),
        (MATMUL, told(DEVICE), "without an answer"),
        (MATMUL, told(DEVICE, RIGHT | {"error": 0.9, "cosine": 0.4}), "relative error 0.9, where 0.02 is allowed"),
        (MATMUL, told(DEVICE, RIGHT | {"error": float("nan"), "cosine": float("nan")}), "relative error nan"),
        (MATMUL, told(DEVICE, RIGHT | {"unwritten": 0.25, "error": 1.0}), "leaves 25% of its output unwritten"),
        (MATMUL, told(DEVICE, RIGHT | {"error": 0.03}), "0.03"),
        (TRAINING, told(DEVICE, code=-6), "signal 6 (SIGABRT)"),
        (TRAINING, told(DEVICE, {"first_loss": 3.5, "last_loss": 3.4}), "but must halve"),
        (TRAINING, told(DEVICE, {"first_loss": 3.5, "last_loss": float("nan")}), "but must halve"),
    ],
)
def test_a_failure_says_what_happened_and_where(trial: KernelTrial, reply: CommandResult, words: str) -> None:
    found = judge(trial, reply)
    assert found.status == "failed"
    assert words in found.why


def test_gradients_may_be_twice_as_far_off_as_what_goes_forward() -> None:
    assert judge(MATMUL, told(DEVICE, RIGHT | {"case": "gradient of q", "error": 0.03})).status == "passed"


def test_a_line_that_was_cut_by_a_crash_is_left_out() -> None:
    reply = CommandResult(code=-11, out='{"trying": "NN"}\n{"case": "NN", "err')
    assert judge(MATMUL, reply).why == "was killed by signal 11 (SIGSEGV) at NN"


def test_what_an_implementation_lacks_here_is_no_failure() -> None:
    found = judge(MATMUL, told(DEVICE, {"absent": "not compiled with it"}))
    assert (found.status, found.why) == ("absent", "not compiled with it")


def test_a_trial_is_a_line_that_a_person_can_paste(tmp_path: Path) -> None:
    trial = KernelTrial(kernel="speed", env={"A_SWITCH": "1"})
    assert command(Host(root=tmp_path), trial) == [
        *("env", "A_SWITCH=1", "python3", "-X", "faulthandler", "-m", "bloomery.hw.probes", "speed")
    ]


@pytest.mark.parametrize("vendor", ["amd", "nvidia", "apple", "cpu"])
def test_every_vendor_has_its_trials_with_names_of_their_own(vendor: str) -> None:
    names = [one.name for one in trials(vendor)]
    assert len(set(names)) == len(names)
    assert names[0] == "launch"
    assert "training" in names


# --- what is kept ---------------------------------------------------------------------------------------------------

FOUND = [
    TrialResult(kernel="attention", implementation="flash", status="passed", why="right", milliseconds=0.8),
    TrialResult(kernel="attention", implementation="efficient", status="failed", why="returns NaN"),
    TrialResult(kernel="attention", implementation="math", status="passed", why="right", milliseconds=3.0),
    TrialResult(kernel="rms-norm", implementation="torch", status="passed", why="right"),
]


def strix_halo(root: Path) -> Host:
    return replace(MATRIX["strix-halo"].build(root), cache=root / "cache")


def test_outcomes_are_kept(tmp_path: Path) -> None:
    host = strix_halo(tmp_path)
    assert kernel_trials.load(host, "amd") is None
    kernel_trials.save(host, "amd", FOUND)
    assert kernel_trials.load(host, "amd") == FOUND
    assert kernel_trials.load(host, "cpu") is None


def newer_driver(host: Host) -> Host:
    plant(host.root, {"sys/module/amdgpu/version": "6.16.6\n"})
    return host


def newer_kernel(host: Host) -> Host:
    plant(host.root, {"proc/sys/kernel/osrelease": "6.17.1\n"})
    return host


def other_torch(host: Host) -> Host:
    return replace(host, torch=torch_folder(host.root, "2.12.1+rocm7.2", hip="7.2.1"))


def other_triton(host: Host) -> Host:
    install(host.root, **{"pytorch_triton_rocm": "3.6.0"})
    return host


def other_environment(host: Host) -> Host:
    return replace(host, env={"TORCH_BLAS_PREFER_HIPBLASLT": "0"})


def other_chip(host: Host) -> Host:
    return replace(machine(host.root / "other", "7900-xtx"), torch=host.torch, cache=host.cache)


@pytest.mark.parametrize(
    "change", [newer_driver, newer_kernel, other_torch, other_triton, other_environment, other_chip]
)
def test_nothing_is_known_any_more_when_something_changes_that_a_kernel_depends_on(
    tmp_path: Path, change: Callable[[Host], Host]
) -> None:
    host = strix_halo(tmp_path)
    kernel_trials.save(host, "amd", FOUND)
    assert kernel_trials.load(change(host), "amd") is None


def test_variables_that_no_kernel_reads_change_nothing(tmp_path: Path) -> None:
    host = strix_halo(tmp_path)
    kernel_trials.save(host, "amd", FOUND)
    assert kernel_trials.load(replace(host, env={"HOME": "/", "TORCHELASTIC_RUN_ID": "7"}), "amd") == FOUND


def test_the_fastest_that_passed_is_taken() -> None:
    taken = kernel_trials.choose(FOUND)
    assert {kernel: one.implementation for kernel, one in taken.items()} == {"attention": "flash", "rms-norm": "torch"}


def test_a_kernel_with_one_sound_implementation_is_no_reason_to_stop_and_one_without_is_named() -> None:
    kernel_trials.check(FOUND)
    bad = TrialResult(kernel="rms-norm", implementation="torch", status="failed", why="returns zeros")
    with pytest.raises(HardwareError, match=r"rms-norm-torch computes wrong numbers.*: returns zeros"):
        kernel_trials.check([FOUND[0], bad])
    kernel_trials.check([TrialResult(kernel="block", implementation="compiled", status="failed", why="crashes")])


def test_nothing_more_is_tried_where_not_even_a_sum_is_computed(tmp_path: Path) -> None:
    asked = []

    def run(words: object, limit: float) -> CommandResult:
        asked.append(words)
        return CommandResult(code=None)

    found = list(kernel_trials.tried(Host(root=tmp_path, run=run), "amd"))
    assert [one.name for one in found] == ["launch"]
    assert len(asked) == 1


def test_behind_a_trial_that_fails_nothing_in_its_process_counts(tmp_path: Path) -> None:
    """Of a real child process: what came before the failure is whole, and the rest is tried in the next."""
    host, asked = Host.here(), []

    def run(words: Sequence[str], limit: float) -> CommandResult:
        asked.append(list(words[words.index("-m") + 2 :]))
        return host.run(words, limit)

    waiting = [KernelTrial(kernel=name) for name in ("launch", "rms-norm", "nonsense", "cross-entropy")]
    found = list(kernel_trials.together(replace(host, run=run), waiting))
    assert [(one.kernel, one.status) for one in found] == [
        ("launch", "passed"),
        ("rms-norm", "passed"),
        ("nonsense", "failed"),
        ("cross-entropy", "passed"),
    ]
    assert "KeyError" in found[2].why
    assert asked == [
        ["launch", "rms-norm", "nonsense", "cross-entropy"],
        ["nonsense", "cross-entropy"],
        ["cross-entropy"],
    ]


def test_wrong_numbers_are_told_of_one_trial_and_the_rest_is_tried_again_elsewhere(tmp_path: Path) -> None:
    asked = []

    def run(words: Sequence[str], limit: float) -> CommandResult:
        asked.append(list(words[words.index("-m") + 2 :]))
        bad = asked[-1].index("b") if "b" in asked[-1] else len(asked[-1])  # it and all behind it
        replies = [told(DEVICE, RIGHT if n < bad else WRONG).out for n, _ in enumerate(asked[-1])]
        several = len(replies) > 1
        return CommandResult(code=0, out="".join(kernel_trials.NEXT_TRIAL * several + one for one in replies))

    found = list(kernel_trials.together(Host(root=tmp_path, run=run), [KernelTrial(kernel=name) for name in "abcd"]))
    assert [(one.kernel, one.status) for one in found] == [
        ("a", "passed"),
        ("b", "failed"),
        ("c", "passed"),
        ("d", "passed"),
    ]
    assert asked == [["a", "b", "c", "d"], ["c", "d"]]


def test_a_trial_that_ends_the_process_of_several_has_failed_and_the_rest_is_tried_in_the_next(tmp_path: Path) -> None:
    asked = []

    def run(words: Sequence[str], limit: float) -> CommandResult:
        asked.append(list(words[words.index("-m") + 2 :]))
        replies = [told(DEVICE, RIGHT).out] * len(asked[-1])
        if "b" in asked[-1]:
            until = asked[-1].index("b") + 1
            return CommandResult(code=-11, out="".join(kernel_trials.NEXT_TRIAL + one for one in replies[:until]))
        several = len(replies) > 1
        return CommandResult(code=0, out="".join(kernel_trials.NEXT_TRIAL * several + one for one in replies))

    waiting = [KernelTrial(kernel=name) for name in "abcd"]
    found = list(kernel_trials.together(Host(root=tmp_path, run=run), waiting))
    assert [(one.kernel, one.status) for one in found] == [
        ("a", "passed"),
        ("b", "failed"),
        ("c", "passed"),
        ("d", "passed"),
    ]
    assert asked == [["a", "b", "c", "d"], ["b", "c", "d"], ["c", "d"]], "it is tried again as a first"
