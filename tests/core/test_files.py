import errno
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core import io as core_io
from bloomery.core.errors import RunError
from bloomery.core.log import Metrics, read_metrics

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of one mebibyte."""
    place = tmp_path_factory.mktemp("small")
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "bloomery-test", place], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this user may not mount a small file system: {error}")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.fixture
def small(full: Path) -> Iterator[Path]:
    yield full
    for place in full.iterdir():
        shutil.rmtree(place) if place.is_dir() else place.unlink()


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.bin"
    with core_io.whole_file(path) as file:
        file.write(b"first")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"first"
    assert [p.name for p in path.parent.iterdir()] == ["a.bin"]
    with pytest.raises(TypeError), core_io.whole_file(path) as file:
        file.writelines([b"second", "which is no bytes"])
    assert path.read_bytes() == b"first"
    assert [p.name for p in path.parent.iterdir()] == ["a.bin"]


def test_a_killed_writer_leaves_no_file(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from bloomery.core.io import whole_file
with whole_file(Path({str(tmp_path / "a.bin")!r})) as file:
    file.write(b"x" * 100_000)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin" + core_io.PARTIAL]


def test_a_full_disk_names_the_file_what_is_free_and_the_hint(small: Path) -> None:
    path = small / "deep" / "big.bin"
    with pytest.raises(RunError) as caught, core_io.whole_file(path) as file:
        file.write(bytes(2 * 2**20))
    assert str(caught.value).startswith(f"{path}: cannot be written: {os.strerror(errno.ENOSPC)}.")
    assert "Its file system has 1.0 MiB free" in caught.value.what
    assert caught.value.hint == "Free some space and run the same command again. Finished parts are kept."
    assert [p for p in small.rglob("*") if p.is_file()] == []


def test_a_full_disk_is_noticed_when_the_last_bytes_are_flushed(small: Path) -> None:
    (small / "most.bin").write_bytes(bytes(2**20))
    with pytest.raises(RunError, match=r"a\.json: cannot be written"):
        core_io.write_json(small / "a.json", {"a": 1})
    assert [p.name for p in small.iterdir()] == ["most.bin"]


def test_a_file_system_without_inodes_is_not_called_full(tmp_path: Path) -> None:
    try:
        options = "size=1m,nr_inodes=4"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "bloomery-test", tmp_path], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this user may not mount a small file system: {error}")
    try:
        for number in range(3):
            (tmp_path / str(number)).touch()
        with pytest.raises(RunError) as caught:
            core_io.write_json(tmp_path / "a.json", {})
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert "its file system has no inodes left for new files, and 1.0 MiB free" in caught.value.what
    assert "Remove files of any size there" in caught.value.hint


@pytest.mark.parametrize(
    ("inodes", "favail", "told"), [(4, 0, "no inodes left"), (4, 1, "MiB free"), (0, 0, "MiB free")]
)
def test_inodes_are_named_only_where_they_are_counted_and_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int, favail: int, told: str
) -> None:
    facts = os.statvfs(tmp_path)
    values = [*facts]
    values[5], values[7] = inodes, favail
    monkeypatch.setattr(os, "statvfs", lambda folder: os.statvfs_result(values))
    with pytest.raises(RunError) as caught, core_io.disk_errors(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "x")
    assert ("inodes" in caught.value.what) == (told == "no inodes left")


def test_metrics_on_a_full_disk_fail_as_everything_else_does_and_lose_no_line(small: Path) -> None:
    with Metrics(small / "metrics.jsonl", 0) as metrics:
        metrics.write(step=1, loss=2.5)
    (small / "most.bin").write_bytes(bytes(2**20 - 3 * 4096))

    def go_on() -> None:
        with Metrics(small / "metrics.jsonl", 1) as metrics:
            for step in range(2, 2000):
                metrics.write(step=step, loss=1 / step)

    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written"):
        go_on()
    (small / "most.bin").unlink()
    kept = read_metrics(small / "metrics.jsonl")
    assert [line["step"] for line in kept] == list(range(1, len(kept) + 1))
    assert len(kept) > 1


def test_a_limit_on_file_sizes_is_named_as_such(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # Python ignores the signal, so that errno tells
    try:
        with pytest.raises(RunError) as caught, core_io.whole_file(tmp_path / "a.bin") as file:
            file.write(bytes(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.what.startswith("cannot be written: File too large")
    assert "ulimit -f" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_the_system_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), core_io.whole_file(tmp_path / "a"):
        raise IsADirectoryError(errno.EISDIR, "x")
    with pytest.raises(RunError, match="quota"), core_io.disk_errors(tmp_path / "no" / "such" / "folder"):
        raise OSError(errno.EDQUOT, "x")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_what_the_system_does_not_let_us_write_is_named_with_the_hint(tmp_path: Path, number: int) -> None:
    told = f"{os.strerror(number)}\nChange its permissions"
    with pytest.raises(RunError, match=f"{tmp_path}/a: {told}"), core_io.disk_errors(tmp_path / "a"):
        raise OSError(number, "x")
    with pytest.raises(RunError, match=f"/b: {told}"), core_io.disk_errors(tmp_path / "a"):
        raise OSError(number, "x", "/b")


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(RunError, match=rf"{tmp_path}/a(/b)?: (File exists|Not a directory)\n.*choose another folder"):
        core_io.write_json(tmp_path / "a" / "b" / "c.json", {})


def test_what_was_listed_of_a_folder_tells_what_became_of_it(tmp_path: Path) -> None:
    for name in ("a.txt", "deep/b.txt", f"c{core_io.PARTIAL}", f"d{core_io.PARTIAL}/e.txt", core_io.MANIFEST):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    listed = core_io.listing(tmp_path)
    assert {name: facts["bytes"] for name, facts in listed.items()} == {"a.txt": 5, "deep/b.txt": 10}
    assert core_io.find_corruption(tmp_path, listed, thorough=True) == ""
    (tmp_path / "a.txt").write_text("A.txt")
    assert core_io.find_corruption(tmp_path, listed) == ""
    assert core_io.find_corruption(tmp_path, listed, thorough=True) == "a.txt has another sha256"
    (tmp_path / "deep" / "b.txt").write_text("")
    assert core_io.find_corruption(tmp_path, dict(reversed(listed.items()))) == "deep/b.txt has 0 bytes instead of 10"
    (tmp_path / "deep" / "b.txt").unlink()
    assert core_io.find_corruption(tmp_path, listed) == "deep/b.txt is gone"


def test_text_is_written_with_one_kind_of_line_end_and_read_back(tmp_path: Path) -> None:
    core_io.write_json(tmp_path / "a.json", {"b": "é\u2028\n", "a": [1, None]})
    assert core_io.read_json(tmp_path / "a.json") == {"b": "é\u2028\n", "a": [1, None]}
    raw = (tmp_path / "a.json").read_bytes()
    assert raw.endswith(b"}\n")
    assert raw.index(b'"b"') < raw.index(b'"a"')
    assert b"\r" not in raw


@given(JSON)
def test_the_hash_of_a_value_does_not_depend_on_the_order_of_its_keys(value: object) -> None:
    def turned(inner: object) -> object:
        if isinstance(inner, dict):
            return {key: turned(inner[key]) for key in reversed(inner)}
        return [turned(item) for item in inner] if isinstance(inner, list) else inner

    assert core_io.canonical(turned(value)) == core_io.canonical(value)


def test_a_file_has_the_hash_of_its_bytes(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "a").write_bytes(data)
    assert core_io.sha256_file(tmp_path / "a") == core_io.sha256_bytes(data) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("kind", ["link", "hard link"])
def test_a_link_in_the_place_of_what_is_written_is_replaced_and_its_target_stays(tmp_path: Path, kind: str) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    for name in ("new.json", "new.json.partial"):
        (tmp_path / name).symlink_to(mine) if kind == "link" else (tmp_path / name).hardlink_to(mine)
    core_io.write_json(tmp_path / "new.json", 1)
    assert mine.read_text() == "mine"
    assert (tmp_path / "new.json").read_text() == "1\n"
    assert not (tmp_path / "new.json").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "new.json"]
