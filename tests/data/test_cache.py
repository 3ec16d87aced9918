"""Hashes of files that lie elsewhere: noted in the cache, and taken again after any change."""

import errno
import json
import os
from pathlib import Path

import pytest

from bloomery.core import cache
from bloomery.core import io as core_io
from bloomery.shards import importers
from tests.shards.test_foreign import rows, speed_run


@pytest.mark.parametrize("place", [1024, 150_000, -1])
@pytest.mark.parametrize("name", ["train_0001.bin", "train_mask_0001.bin", "val_0000.bin"])
def test_a_change_anywhere_in_a_file_changes_the_digest_and_an_untouched_file_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: int
) -> None:
    theirs = rows(tmp_path / "theirs")
    (theirs / name).write_bytes(bytes(300_000))
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "QUICKLY_HASHED", 200_000)
    monkeypatch.setattr(cache, "SETTLED_NANOSECONDS", 0)
    before, times = importers.digest(theirs), (theirs / name).stat()
    hashed: list[str] = []
    whole = core_io.sha256_file

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return whole(path)

    monkeypatch.setattr(core_io, "sha256_file", counted)
    assert importers.digest(theirs) == before
    assert (len(hashed), name in hashed) == (6, False)
    changed = bytearray((theirs / name).read_bytes())
    changed[place] ^= 1
    (theirs / name).write_bytes(changed)
    os.utime(theirs / name, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert importers.digest(theirs) != before
    assert name in hashed


def test_a_file_that_has_just_changed_is_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "QUICKLY_HASHED", 0)
    importers.digest(speed_run(tmp_path / "theirs"))
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_used_costs_time_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.bin"
    file.write_bytes(bytes(1000))
    hashed = core_io.sha256_file(file)
    for name in ("QUICKLY_HASHED", "SLOWLY_HASHED", "SETTLED_NANOSECONDS"):
        monkeypatch.setattr(cache, name, 0)
    slow, unnoted = f"{file} is hashed: ", f"every start hashes {file} again, because its hash cannot be saved: "

    def told() -> tuple[bool, bool]:
        assert cache.sha256_of(file) == hashed
        err = capsys.readouterr().err
        return slow in err, unnoted in err

    monkeypatch.setenv("BLOOMERY_CACHE", os.devnull)
    assert told() == (True, True)
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr("bloomery.core.cache.fcntl.flock", no_locks)
        assert told() == (True, True)
    assert told() == (True, False)
    assert told() == (False, False)
    (note,) = (tmp_path / "cache" / "hashes").glob("*.json")
    state = json.loads(note.read_text())["state"]
    for broken in (json.dumps({"state": state}), json.dumps({"state": state, "sha256": 1}), "[" * 100_000):
        note.write_text(broken)
        assert told() == (True, False)
        assert told() == (False, False)
