import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core import io as core_io
from bloomery.core.errors import CheckpointError, RunError
from bloomery.core.io import MANIFEST
from bloomery.train.state import SpikeStats, State
from bloomery.weights import checkpoint
from bloomery.weights.checkpoint import (
    RetentionPolicy,
    RollbackInfo,
    SavedGuard,
    SavedState,
    Saver,
    damage,
    newest,
    save,
)
from bloomery.weights.safetensors import save_tensors

import safetensors.torch
import torch

PART = "shard-00001-model-00001-of-00001.safetensors"
"""The one file of training state that one process writes, as torch.distributed.checkpoint names it."""


def write(root: Path, step: int, keep: int = 3) -> Path:
    """A checkpoint that says everywhere which step it is of."""

    def model(folder: Path) -> None:
        save_tensors(folder / "model.safetensors", {"weight": torch.full((5, 3), float(step))})

    training = {"weight/step": torch.tensor(float(step)), "weight/momentum": torch.full((5, 3), step / 3)}
    return save(root, step, model, training, {"step": step, "samples": 7 * step, "metrics": {"loss": 1 / 3}}, keep=keep)


def bare(root: Path, step: int, **how: Any) -> Path:
    """A checkpoint that holds nothing but its state."""
    return save(root, step, lambda folder: None, {}, {"step": step, "samples": 0}, **how)


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
    assert names(folder) == ["environment.json", MANIFEST, "model.safetensors", "state.json", "training"]
    assert names(folder / "training") == [PART]


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


def copied(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("000000001"), folder)


def linked(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder.with_name("000000001"))


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("a missing file", lambda f: (f / "training" / PART).unlink(), f"training/{PART} is gone"),
    ("no manifest", lambda f: (f / MANIFEST).unlink(), "it has no manifest"),
    ("a torn manifest", lambda f: (f / MANIFEST).write_text('{"step": 2, "sha'), "its manifest.json cannot be read: "),
    ("a manifest without end", lambda f: (f / MANIFEST).write_text("[" * 10**5), "its manifest.json cannot be read: "),
    ("another manifest", lambda f: (f / MANIFEST).write_text('{"outputs": 3}'), "its manifest.json cannot be read: "),
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
    (
        "training state of another step",
        lambda f: shutil.copy(f.parent / "000000001" / "training" / PART, f / "training" / "other.safetensors"),
        "training/other.safetensors is not in its manifest",
    ),
    (
        "training state in one file, torn",
        lambda f: (f / checkpoint.OLD_TRAINING).write_bytes(b"torn"),
        "training.safetensors is not in its manifest",
    ),
    ("another step's files", copied, "it is of step 1"),
    ("a link to another step", linked, "it is of step 1"),
]


@pytest.mark.parametrize(("do", "told"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], do: Callable[[Path], Any], told: str
) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    do(folder)
    assert damage(folder).startswith(told)
    assert newest_step(tmp_path) == 1
    assert f"{folder}: {told}" in capsys.readouterr().err
    write(tmp_path, 2)
    assert newest_step(tmp_path) == 2
    assert names(tmp_path) == ["000000001", "000000002"]
    assert not damage(tmp_path / "000000001")


@pytest.mark.parametrize("name", [".DS_Store", "000000002-F32.gguf", "notes/why.txt", "training/.DS_Store"])
def test_what_others_put_beside_a_checkpoint_does_not_damage_it(tmp_path: Path, name: str) -> None:
    """As Finder does, and llama.cpp's converter, which writes into the folder that it reads."""
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"theirs")
    assert newest_step(tmp_path) == 2
    write(tmp_path, 3)
    assert file.read_bytes() == b"theirs"


@pytest.mark.parametrize(
    ("name", "owner", "what"), [("model.safetensors", core_io, "sha256_file"), (MANIFEST, Path, "exists")]
)
def test_a_checkpoint_that_cannot_be_read_is_passed_over_and_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    owner: Any,
    what: str,
) -> None:
    """As where a sector is bad, or the right to read was taken."""
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    whole = getattr(owner, what)

    def read(path: Path) -> Any:
        if path == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return whole(path)

    monkeypatch.setattr(owner, what, read)
    assert newest_step(tmp_path) == 1
    assert f": {file} cannot be read: Input/output error" in capsys.readouterr().err


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
    every = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
    name = data.draw(st.sampled_from([name for name in every if name != MANIFEST]))
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


def forged(folder: Path, name: str, data: bytes) -> None:
    """Put other bytes into a file of a checkpoint, and let its manifest vouch for them."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    facts = core_io.read_json(folder / MANIFEST)
    core_io.write_json(folder / MANIFEST, facts | {"outputs": core_io.listing(folder)})


STATES = [b"{}", b"[]", b"null", b"{", b'{"step": 2}', b'{"step": "x", "samples": 14}', b'{"step": 1e9, "samples": 1}']
STATES += [b'{"step": 1000000000, "samples": 14}', b'{"step": -1, "samples": 14}', b'{"step": 3, "samples": 21}']
STATES += [
    b'{"step": 2, "samples": -1}',
    b'{"step": true, "samples": 14}',
    b'{"step": 2, "samples": NaN}',
    b"[" * 10**5,
]
STATES += [b'{"step": 2, "samples": 14, "guard": {"rollbacks": [[1]]}}', b'{"step": 2, "samples": 14, "guard": 5}']
STATES += [b'{"step": 2, "samples": 14, "metrics": {"loss": "low"}}', b'{"step": 2, "samples": 14, "unknown": 1}']


@pytest.mark.parametrize("text", STATES, ids=lambda text: ascii(text[:40]))
def test_a_forged_state_is_passed_over_with_the_reason(
    tmp_path: Path, text: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    forged(folder, "state.json", text)
    assert newest_step(tmp_path) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(rf"{folder}: (its state\.json cannot be read: |it is of step )", told)


HEADERS = [(2**60).to_bytes(8, "little"), b"", (2).to_bytes(8, "little") + b"[]", b"\xff" * 40]
HEADERS += [(4).to_bytes(8, "little") + b"null" + bytes(8)]


@pytest.mark.parametrize("data", HEADERS, ids=lambda data: ascii(data[:12]))
def test_forged_training_state_is_an_error_that_names_it(tmp_path: Path, data: bytes) -> None:
    folder = write(tmp_path, 1)
    forged(folder, f"training/{PART}", data)
    with pytest.raises(CheckpointError, match=rf"(?s){folder}/training.*: (cannot be read|is torn): .*Remove {folder}"):
        newest(tmp_path)


def test_training_state_of_a_weight_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def place(name: str, shape: torch.Size, kind: torch.dtype) -> torch.Tensor:
        return {"other": torch.zeros(shape)}[name]

    with pytest.raises(CheckpointError, match="training: cannot be read: KeyError"):
        newest(tmp_path, alloc=place)


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew(tmp_path: Path) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / "state.json").unlink()
    told = rf"{tmp_path}: none of 2 checkpoints is valid; 000000002: state.json is gone\n.*remove {tmp_path}"
    with pytest.raises(CheckpointError, match=told):
        newest(tmp_path)
    assert names(tmp_path) == ["000000001", "000000002"]


def test_damaged_ones_stay_until_a_new_one_is_whole(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "no space")

    for step in (1, 2, 3):
        write(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"{step:09d}" / "state.json").unlink()
    with pytest.raises(RunError, match="No space left"):
        save(tmp_path, 2, full, {}, {"step": 2, "samples": 0}, keep=3)
    assert [one.name for one in checkpoint.folders(tmp_path)] == ["000000001", "000000002", "000000003"]
    write(tmp_path, 2)
    assert names(tmp_path) == ["000000001", "000000002"]


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/nowhere")], ids=["a file", "a dead link"])
def test_what_is_no_folder_and_in_the_way_is_named(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    write(tmp_path, 6)
    make(tmp_path / "000000007")
    with pytest.raises(RunError, match=r"000000007: is not a folder, but .*\nMove it away"):
        write(tmp_path, 7)
    assert newest_step(tmp_path) == 6


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


def test_a_damaged_one_that_was_passed_over_takes_the_place_of_no_whole_one(tmp_path: Path) -> None:
    """A run that goes on from 4, because 6 is damaged, may save at 9: then 4 stays, and 6 goes."""
    for step in (2, 4, 6):
        bare(tmp_path, step, keep=3, standing=RollbackInfo(goal=True))
    (tmp_path / "000000006" / "state.json").unlink()
    assert newest_step(tmp_path) == 4
    bare(tmp_path, 9, keep=2, standing=RollbackInfo(passed_over=frozenset({6})))
    assert names(tmp_path) == ["000000004", "000000009"]


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
        save(tmp_path, 2, full, {}, {"step": 2, "samples": 0}, keep=1)
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


@pytest.mark.slow
def test_a_process_killed_anywhere_while_it_saves_leaves_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    """Killed before each of its first fifty changes to the disk: a save makes about twenty-five, removals included."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert all(one["whole"] for one in seen)
    steps = [one["step"] for one in seen]
    assert steps == sorted(steps)
    assert steps[-1] > 15  # it did save, and it was
    assert sum(one["torn"] for one in seen) > 20  # killed in the middle of it
    assert max(one["folders"] for one in seen) <= 3


# --- while training goes on ----------------------------------------------------------------------------------------


def test_checkpoints_of_chosen_steps_stay_for_ever(tmp_path: Path) -> None:
    for step in range(1, 9):
        bare(tmp_path, step, keep=RetentionPolicy(last=2, every=3))
    assert names(tmp_path) == ["000000003", "000000006", "000000007", "000000008"]


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 5000, 5000))
    told = r"No space left on device for it. It needs 5,008 bytes; 5,000 are free; nothing was written\nFree some space"
    with pytest.raises(RunError, match=told):
        save(tmp_path, 2, lambda folder: None, {"a": torch.zeros(2)}, {}, keep=1, model_bytes=5000)
    assert names(tmp_path) == ["000000001"]
    save(tmp_path, 2, lambda folder: None, {"a": torch.zeros(2)}, {}, keep=1, model_bytes=4992)
    assert names(tmp_path) == ["000000002"]


def test_a_checkpoint_with_its_training_state_in_one_file_as_it_once_was_is_still_read(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    shutil.rmtree(folder / "training")
    (folder / "environment.json").unlink()
    save_tensors(folder / "training.safetensors", {"weight/momentum": torch.ones(2)})
    (folder / MANIFEST).unlink()
    core_io.write_json(folder / MANIFEST, {"step": 1, "outputs": core_io.listing(folder)})
    found = newest(tmp_path)
    assert found is not None
    assert found.training["weight/momentum"].tolist() == [1.0, 1.0]
    assert found.environment == {}


def test_training_state_comes_in_several_files_where_one_would_be_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)
    tensors = {f"w{n}": torch.full((7, n + 1), float(n)) for n in range(6)} | {"step": torch.tensor(3.0)}
    save(tmp_path, 1, lambda folder: None, tensors, {"step": 1, "samples": 0}, keep=1)
    assert len(names(tmp_path / "000000001" / "training")) > 2
    found = newest(tmp_path)
    assert found is not None
    assert found.training.keys() == tensors.keys()
    assert all(torch.equal(found.training[name], tensors[name]) for name in tensors)


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    kinds = {file.suffix for file in folder.rglob("*") if file.is_file()}
    assert kinds == {".json", ".safetensors"}
    for file in folder.rglob("*.safetensors"):
        raw = file.read_bytes()
        json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def test_a_state_that_is_read_has_the_fields_of_the_state_that_is_saved() -> None:
    saved = {SavedState: State, SavedGuard: SpikeStats}
    for kind, data in saved.items():
        assert set(kind.__annotations__) == {field.name for field in fields(data)}


# --- Saves that go on in a thread -------------------------------------------------------------------------------------


def test_what_is_saved_is_what_was_when_the_save_began(tmp_path: Path) -> None:
    momentum = torch.full((3,), 1.0)
    gate = threading.Event()

    def slow_model(folder: Path) -> None:
        assert gate.wait(60)
        save_tensors(folder / "model.safetensors", {"weight": torch.ones(2)})

    with Saver(tmp_path, RetentionPolicy(last=2)) as saver:
        saver.start(1, slow_model, {"w/momentum": momentum}, {"step": 1, "samples": 0})
        momentum.fill_(2.0)
        assert newest(tmp_path) is None  # it is not done, and training goes on
        gate.set()
        saver.start(2, slow_model, {"w/momentum": momentum}, {"step": 2, "samples": 0})
        assert newest_step(tmp_path) is not None  # the second waits for the first
    found = [newest(tmp_path, before) for before in (2, 3)]
    assert [float(one.training["w/momentum"][0]) for one in found if one is not None] == [1.0, 2.0]


def test_a_save_that_failed_is_told_at_the_next_one_and_at_the_end(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "no space")

    saver = Saver(tmp_path, RetentionPolicy(last=1))
    ways: list[Callable[[], None]] = [
        lambda: saver.start(2, full, {}, {"step": 2, "samples": 0}),
        lambda: saver.__exit__(None, None, None),
    ]
    for again in ways:
        saver.start(1, full, {}, {"step": 1, "samples": 0})
        with pytest.raises(RunError, match="000000001: cannot be written: No space left"):
            again()
    assert newest(tmp_path) is None


def test_an_end_by_error_waits_for_the_save_that_runs(tmp_path: Path) -> None:

    def interrupted() -> None:
        with Saver(tmp_path, RetentionPolicy(last=1)) as saver:
            saver.start(1, lambda folder: time.sleep(0.2), {}, {"step": 1, "samples": 0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert newest_step(tmp_path) == 1
