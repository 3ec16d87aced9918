import os
import socket
from pathlib import Path

import pytest

from bloomery.core import io as core_io
from bloomery.core.errors import DataError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="special files are POSIX")


def test_only_regular_files_are_hashed_and_the_error_says_what_else_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
    for name, kind in (("fifo", "a FIFO"), ("link", "a character device"), ("socket", "a socket"), (".", "a folder")):
        with pytest.raises(DataError, match=f"{name}.*is {kind}, and no regular file"):
            core_io.sha256_file(tmp_path / name)
    with pytest.raises(DataError, match="view into the kernel"):
        core_io.sha256_file(Path("/proc/self/mem"))
    with pytest.raises(FileNotFoundError):
        core_io.sha256_file(tmp_path / "gone")


def test_a_link_to_a_regular_file_is_hashed_as_that_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert core_io.sha256_file(tmp_path / "link") == core_io.sha256_file(tmp_path / "file")


@pytest.mark.parametrize("path", ["/proc", "/proc/self", "/sys/kernel", "/dev", "/dev/pts"])
def test_folders_of_the_kernel_are_known_also_behind_links(path: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    assert core_io.kernel(tmp_path / "link") == "/" + path.split("/")[1]
    assert core_io.kernel("/process") == core_io.kernel("/dev/shm") == core_io.kernel(tmp_path) == ""


def test_a_walk_takes_no_special_file_and_no_folder_twice_and_never_enters_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "data" / "inner").mkdir(parents=True)
    (tmp_path / "data" / "a").write_text("a")
    (tmp_path / "data" / "inner" / "b").write_text("b")
    (tmp_path / "data" / "inner" / "up").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "proc").symlink_to("/proc/self")
    os.mkfifo(tmp_path / "data" / "fifo")
    for follow in (False, True):
        found = sorted(file.name for file in core_io.below(tmp_path / "data", follow=follow))
        assert found == ["a", "b"]


def test_the_root_of_the_file_system_and_more_entries_than_a_data_set_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="root of the file system"):
        next(core_io.below(Path("/")))
    (tmp_path / "link").symlink_to("/")
    with pytest.raises(DataError, match="root of the file system"):
        next(core_io.below(tmp_path / "link"))
    monkeypatch.setattr(core_io, "MAX_ENTRIES", 10)
    for number in range(12):
        (tmp_path / str(number)).touch()
    with pytest.raises(DataError, match="more than 10 files and folders"):
        list(core_io.below(tmp_path))
