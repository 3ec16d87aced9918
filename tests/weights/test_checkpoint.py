import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import RunError
from bloomery.core.files import MANIFEST
from bloomery.weights import checkpoint
from bloomery.weights.checkpoint import damage, newest, save

import safetensors.torch
import torch


def write(root: Path, step: int, keep: int = 3) -> Path:
    """A checkpoint that says everywhere which step it is of."""

    def model(folder: Path) -> None:
        checkpoint.save_tensors(folder / "model.safetensors", {"weight": torch.full((5, 3), float(step))})

    training = {"weight/step": torch.tensor(float(step)), "weight/momentum": torch.full((5, 3), step / 3)}
    return save(root, step, model, training, {"step": step, "samples": 7 * step, "metrics": {"loss": 1 / 3}}, keep=keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def newest_step(root: Path) -> int | None:
    found = newest(root)
    return None if found is None else int(found.state["step"])


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = write(tmp_path, 12)
    found = newest(tmp_path)
    assert found is not None
    assert found.folder == folder == tmp_path / "000000012"
    assert found.state == {"step": 12, "samples": 84, "metrics": {"loss": 1 / 3}}
    assert torch.equal(found.training["weight/momentum"], torch.full((5, 3), 4.0))
    assert found.training["weight/step"].shape == ()
    model = safetensors.torch.load_file(folder / "model.safetensors")
    assert torch.equal(model["weight"], torch.full((5, 3), 12.0))
    assert names(folder) == [MANIFEST, "model.safetensors", "state.json", "training.safetensors"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 999, 1000, 123_456_789):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["000001000", "123456789"]
    assert newest_step(tmp_path) == 123_456_789


def test_where_there_is_none_there_is_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    (tmp_path / "notes").mkdir()
    (tmp_path / "000000001.partial").mkdir()
    assert newest(tmp_path) is None


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("a missing file", lambda f: (f / "training.safetensors").unlink(), "training.safetensors is gone"),
    ("no manifest", lambda f: (f / MANIFEST).unlink(), "it has no manifest"),
    ("a torn manifest", lambda f: (f / MANIFEST).write_text('{"step": 2, "sha'), "its manifest cannot be read"),
    ("another manifest", lambda f: (f / MANIFEST).write_text('{"outputs": 3}'), "its manifest cannot be read"),
    (
        "an empty file",
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "model.safetensors has 0 bytes instead of 164",
    ),
    (
        "another state",
        lambda f: (f / "state.json").write_bytes((f / "state.json").read_bytes()[::-1]),
        "state.json has another sha256",
    ),
]


@pytest.mark.parametrize(("do", "told"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], do: Callable[[Path], Any], told: str
) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    do(folder)
    assert damage(folder) == told
    assert newest_step(tmp_path) == 1
    assert f"{folder} is passed over: {told}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole checkpoints."""
    root = tmp_path_factory.mktemp("pair")
    for step in (1, 2):
        write(root, step)
    return root


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_bit_anywhere_is_found(pair: Path, data: Any) -> None:
    folder = pair / "000000002"
    name = data.draw(st.sampled_from([name for name in names(folder) if name != MANIFEST]))
    before = (folder / name).read_bytes()
    raw = bytearray(before)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / name).write_bytes(raw)
    try:
        assert damage(folder) == f"{name} has another sha256"
        assert newest_step(pair) == 1
    finally:
        (folder / name).write_bytes(before)
    assert newest_step(pair) == 2


def test_of_two_damaged_ones_neither_is_used(tmp_path: Path) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / "state.json").unlink()
    assert newest(tmp_path) is None


def test_a_step_whose_checkpoint_is_damaged_can_be_saved_again(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    (folder / "state.json").unlink()
    (folder / "stranger.txt").touch()
    torn = tmp_path / "000000002.partial"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    write(tmp_path, 2)
    assert names(tmp_path) == ["000000002"]
    assert newest_step(tmp_path) == 2
    assert not (folder / "stranger.txt").exists()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_damaged_later_one_never_takes_the_place_of_a_whole_one(tmp_path: Path, keep: int) -> None:
    """A run that goes on from 4, because 9 is damaged, may save at 6: that one must stay."""
    for step in (2, 4, 9):
        write(tmp_path, step)
    (tmp_path / "000000009" / "state.json").unlink()
    assert newest_step(tmp_path) == 4
    write(tmp_path, 6, keep=keep)
    assert newest_step(tmp_path) == 6
    assert names(tmp_path) == ["000000002", "000000004", "000000006"][-keep:]


def test_what_an_attempt_that_died_left_half_written_takes_no_room_for_ever(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "000000003.partial").mkdir()
    write(tmp_path, 2)
    assert names(tmp_path) == ["000000001", "000000002"]


def test_a_save_that_fails_leaves_the_one_before_it(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "no space")

    with pytest.raises(RunError, match=r"(?s)000000002: cannot be written: No space left.*Free some space"):
        save(tmp_path, 2, full, {}, {"step": 2}, keep=1)
    assert newest_step(tmp_path) == 1


KILLED = """
import json, os, signal, sys
from pathlib import Path
import safetensors.torch
from bloomery.weights import checkpoint
from tests.weights.test_checkpoint import write

def die_at(number):
    # kill this process before the n-th time that it changes something on the disk
    calls = 0
    def counted(whole):
        def call(*words, **how):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*words, **how)
        return call
    for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))

root, seen = Path(sys.argv[1]), []
write(root, 1, keep=2)
for number in range(1, int(sys.argv[2])):
    step = checkpoint.newest(root).state["step"]
    child = os.fork()
    if child == 0:
        die_at(number)
        while True:
            step += 1
            write(root, step, keep=2)
    os.waitpid(child, 0)
    found = checkpoint.newest(root)
    step = found.state["step"]
    model = safetensors.torch.load_file(found.folder / "model.safetensors")["weight"]
    whole = bool((model == step).all()) and float(found.training["weight/step"]) == step
    torn = len(list(root.glob("*.partial")))
    folders = len(list(root.glob("*"))) - torn
    seen.append({"step": step, "whole": whole, "torn": torn, "folders": folders})
print(json.dumps(seen))
"""


def test_a_process_killed_anywhere_while_it_saves_leaves_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    """Killed before each of its first sixty changes to the disk: a save makes about twenty, removals included."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert all(one["whole"] for one in seen)
    steps = [one["step"] for one in seen]
    assert steps == sorted(steps)
    assert steps[-1] > 30  # it did save, and it was
    assert sum(one["torn"] for one in seen) > 30  # killed in the middle of it
    assert max(one["folders"] for one in seen) == 3
