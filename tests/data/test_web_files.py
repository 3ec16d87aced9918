import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from bloomery.core.errors import DataError, RunError
from bloomery.data.sources import download, http_client
from bloomery.data.sources.download import Content, WebFile
from tests.data import hub_server
from tests.data.hub_server import Hub

MIB = 1 << 20
DATA = random.Random(0).randbytes(3 * MIB + 17)


def served(hub: Hub, data: bytes = DATA, name: str = "/files/corpus.jsonl.zst", *mirrors: str) -> WebFile:
    """A file at a plain address whose sha256 is known."""
    hub.plain[name] = data
    content = Content("sha256", hashlib.sha256(data).hexdigest())
    return WebFile(name, (*mirrors, hub.endpoint + name), content, len(data))


def partial(file: WebFile) -> Path:
    place = download.cache_path(file.content, file.name)
    return place.with_name(place.name + ".partial")


def test_a_file_comes_as_it_is_and_only_once(hub: Hub) -> None:
    file = served(hub)
    path = download.download(file, attempts=1)
    assert path.read_bytes() == DATA
    assert path.name.endswith(".jsonl.zst")
    assert download.download(file, attempts=1) == path
    assert hub.sent() == len(DATA)


@example_settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, len(DATA) - 1), max_size=5))
def test_wherever_connections_are_cut_the_file_is_the_same_and_no_byte_comes_twice(cuts: list[int]) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        hub_server.serving() as hub,
    ):
        patch.setattr(http_client, "FIRST_WAIT_SECONDS", 0.0)
        patch.setenv("BLOOMERY_CACHE", folder)
        name = f"/files/{len(cuts)}.txt"
        file = served(hub, DATA, name)
        for cut in cuts:
            hub.fail(name, cut_after=cut)
        assert download.download(file, attempts=len(cuts) + 2).read_bytes() == hub.plain[name]
        assert hub.sent() == len(hub.plain[name])


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_what_passes_is_waited_for(hub: Hub, status: int) -> None:
    file = served(hub)
    hub.fail("corpus", status=status, times=3)
    assert download.download(file, attempts=4).read_bytes() == DATA
    assert hub.sent() == len(DATA)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honored(hub: Hub, status: int) -> None:
    file = served(hub)
    hub.fail("corpus", status=status, headers={"Retry-After": "1"})
    download.download(file, attempts=2)
    first, second = hub.asked("corpus")
    assert second.at - first.at >= 1.0


def test_a_server_that_asks_for_hours_is_not_waited_for(hub: Hub) -> None:
    file = served(hub)
    hub.fail("corpus", status=429, headers={"Retry-After": "86400"})
    with pytest.raises(DataError, match="86,400 s"):
        download.download(file, attempts=5)


def test_attempts_are_bounded_and_what_came_is_kept(hub: Hub) -> None:
    file = served(hub)
    hub.fail("corpus", cut_after=2 * MIB)
    hub.fail("corpus", status=500, times=100)
    with pytest.raises(DataError, match=r"HTTP 500 \(3 attempts\)"):
        download.download(file, attempts=3)
    assert partial(file).stat().st_size == 2 * MIB
    hub.faults.clear()
    hub.forget()
    assert download.download(file, attempts=1).read_bytes() == DATA
    assert hub.sent() == len(DATA) - 2 * MIB


def test_progress_earns_new_attempts(hub: Hub) -> None:
    file = served(hub)
    hub.fail("corpus", cut_after=MIB, times=3)
    assert download.download(file, attempts=2).read_bytes() == DATA


def test_a_server_without_ranges_sends_it_from_the_start(hub: Hub) -> None:
    file = served(hub)
    hub.fail("corpus", cut_after=MIB, no_ranges=True)
    hub.fail("corpus", no_ranges=True)
    assert download.download(file, attempts=3).read_bytes() == DATA
    assert hub.sent() == len(DATA) + MIB


def test_a_server_without_ranges_that_always_cuts_is_given_up(hub: Hub) -> None:
    file = served(hub)
    hub.fail("corpus", cut_after=2 * MIB, no_ranges=True, times=1000)
    with pytest.raises(DataError, match="3 attempts"):
        download.download(file, attempts=3)


def test_wrong_bytes_are_fetched_once_more(hub: Hub) -> None:
    file = served(hub)
    hub.fail("corpus", wrong=True)
    assert download.download(file, attempts=1).read_bytes() == DATA
    assert len(hub.asked("corpus")) == 2


def test_bytes_that_stay_wrong_are_an_error_that_names_both_hashes(hub: Hub) -> None:
    file = served(hub)
    hub.fail("corpus", wrong=True, times=100)
    got = hashlib.sha256(bytes([DATA[0] ^ 1]) + DATA[1:]).hexdigest()
    with pytest.raises(DataError, match=f"corpus.*{got}, expected {file.content.value}, twice"):
        download.download(file, attempts=5)
    assert len(hub.asked("corpus")) == 2
    assert not download.cache_path(file.content, file.name).exists()
    assert not partial(file).exists()


def test_a_longer_or_shorter_file_is_not_taken_and_no_byte_beyond_is_written(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = served(hub)
    hub.plain["/files/corpus.jsonl.zst"] = DATA[:-4]
    with pytest.raises(DataError, match="has no bytes from"):
        download.download(file, attempts=2)
    partial(file).unlink(missing_ok=True)
    hub.plain["/files/corpus.jsonl.zst"] = DATA + b"more" * MIB
    written: list[int] = []

    def append(file: FileIO, data: bytes) -> None:
        write(file, data)
        written.append(file.tell())

    write = download.append
    monkeypatch.setattr(download, "append", append)
    with pytest.raises(DataError, match=rf"has more than {len(DATA):,} bytes, twice"):
        download.download(file, attempts=2)
    assert max(written) <= len(DATA)
    assert not partial(file).exists()


def test_a_file_of_unknown_size_leaves_some_of_the_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    file = replace(served(hub), num_bytes=None)
    monkeypatch.setattr(download, "UNCHECKED_BYTES", MIB)
    full = shutil.disk_usage("/")._replace(free=download.RESERVED_BYTES - 1)
    with monkeypatch.context() as patch:
        patch.setattr("bloomery.data.sources.download.shutil.disk_usage", lambda path: full)
        with pytest.raises(
            RunError, match=r"came of a file whose size its server does not say, and 1\.0 GiB"
        ) as caught:
            download.download(file, attempts=2)
        assert file.name in caught.value.hint
        assert MIB <= partial(file).stat().st_size < 2 * MIB
        monkeypatch.setattr(download, "UNCHECKED_BYTES", 2 * len(DATA))
        assert download.download(file, attempts=1).read_bytes() == DATA  # a small one is never refused


def test_bytes_of_another_file_that_were_begun_do_not_survive(hub: Hub) -> None:
    file = served(hub)
    partial(file).parent.mkdir(parents=True)
    partial(file).write_bytes(b"x" * MIB)
    assert download.download(file, attempts=1).read_bytes() == DATA


def test_a_download_that_died_before_the_last_step_asks_for_nothing(hub: Hub) -> None:
    file = served(hub)
    partial(file).parent.mkdir(parents=True)
    partial(file).write_bytes(DATA)
    assert download.download(file, attempts=1).read_bytes() == DATA
    assert not hub.requests


def test_a_file_that_was_cut_in_the_cache_is_downloaded_again(hub: Hub) -> None:
    file = served(hub)
    download.download(file, attempts=1).write_bytes(DATA[:100])
    assert download.download(file, attempts=1).read_bytes() == DATA


def test_mirrors_are_tried_in_order_and_go_on_where_the_first_was_cut(hub: Hub) -> None:
    with hub_server.serving() as broken:
        file = served(hub, DATA, "/files/a.txt", broken.endpoint + "/files/a.txt")
        broken.plain["/files/a.txt"] = DATA
        broken.fail("a.txt", cut_after=2 * MIB)
        broken.fail("a.txt", status=404, times=100)
        assert download.download(file, attempts=2).read_bytes() == DATA
        assert broken.sent() == 2 * MIB
        assert hub.sent() == len(DATA) - 2 * MIB


def test_when_no_address_works_each_is_named_with_its_reason(hub: Hub) -> None:
    file = WebFile("a", (f"{hub.endpoint}/a?key=secret", "http://127.0.0.1:9/b"), Content("sha256", "0" * 64))
    with pytest.raises(DataError, match=r"/a: HTTP 404.*127\.0\.0\.1:9/b: the connection failed") as caught:
        download.download(file, attempts=1)
    assert "secret" not in str(caught.value)


def versioned(hub: Hub) -> WebFile:
    """A file of which no hash is known, only what its server calls its version."""
    address = hub.endpoint + "/files/log.txt"
    hub.plain["/files/log.txt"] = DATA
    seen = download.version(address, attempts=1)
    assert seen["num_bytes"] == len(DATA)
    return WebFile("log.txt", (address,), Content("etag", "1" * 64), seen["num_bytes"], etag=seen["etag"])


def test_without_a_hash_it_goes_on_only_while_the_version_is_the_same(hub: Hub) -> None:
    file = versioned(hub)
    hub.fail("log.txt", cut_after=2 * MIB)
    assert download.download(file, attempts=2).read_bytes() == DATA
    assert hub.asked("log.txt", "GET")[-1].headers["If-Range"] == file.etag
    assert hub.sent() == len(DATA)


def test_a_file_that_changes_while_it_is_downloaded_is_an_error_not_a_mixture(hub: Hub) -> None:
    file = versioned(hub)
    hub.fail("log.txt", method="GET", cut_after=2 * MIB)
    hub.fail("log.txt", method="GET", etag='"another"', times=100)
    with pytest.raises(DataError, match="has changed on its server"):
        download.download(file, attempts=3)
    assert not download.cache_path(file.content, file.name).exists()


def test_with_a_hash_another_version_name_makes_no_difference(hub: Hub) -> None:
    file = served(hub)
    hub.fail("corpus", cut_after=2 * MIB)
    hub.fail("corpus", etag='"another"')
    assert download.download(file, attempts=2).read_bytes() == DATA


def test_a_server_that_knows_no_head_is_asked_for_one_byte(hub: Hub) -> None:
    hub.plain["/x"] = DATA
    hub.fail("/x", method="HEAD", status=405)
    assert download.version(hub.endpoint + "/x", attempts=1)["num_bytes"] == len(DATA)
    assert hub.asked("/x")[-1].headers["Range"] == "bytes=0-0"
    assert hub.sent() <= 1


@contextmanager
def redirecting(target: str, body_bytes: int) -> Iterator[tuple[str, list[int]]]:
    """The address of a server that redirects to `target`, and the bytes of body that it could send with that."""
    sent: list[int] = []

    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("Content-Length", str(body_bytes))
            self.end_headers()
            with suppress(OSError):  # the client has closed the connection
                for _ in range(body_bytes // MIB):
                    self.wfile.write(bytes(MIB))
                    sent.append(MIB)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirect)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", sent
    finally:
        server.shutdown()
        server.server_close()  # joins the threads of its requests
        thread.join()


def test_the_body_of_a_redirect_is_not_read(hub: Hub) -> None:
    file = served(hub)
    with redirecting(file.addresses[0], 256 * MIB) as (address, sent):
        assert download.download(replace(file, addresses=(address,)), attempts=1).read_bytes() == DATA
    assert sum(sent) < 64 * MIB, "more than the buffers of the sockets hold"


CHILD = """
import resource
import sys
from bloomery.data.sources import download
from bloomery.data.sources.download import Content
from bloomery.data.sources.download import WebFile
name, address, sha256, size, limit = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
download.download(WebFile(name, (address,), Content("sha256", sha256), int(size)), attempts=1)
"""


def child(file: WebFile, folder: Path, limit: int = 0) -> subprocess.Popen[bytes]:
    """A process that downloads, and may write no file beyond a limit of bytes."""
    arguments = [file.name, file.addresses[0], file.content.value, str(file.num_bytes), str(limit)]
    env = {**os.environ, "BLOOMERY_CACHE": str(folder)}
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], env=env, stderr=subprocess.PIPE)


def test_a_full_disk_is_told_and_what_came_is_kept(hub: Hub, tmp_path: Path) -> None:
    file, limit = served(hub), MIB + 12_345
    process = child(file, tmp_path / "cache", limit)
    told = process.communicate(timeout=120)[1].decode()
    assert process.returncode != 0
    assert "RunError" in told
    assert "Finished parts are kept" in told
    assert partial(file).read_bytes() == DATA[:limit]
    hub.forget()
    assert download.download(file, attempts=1).read_bytes() == DATA
    assert hub.sent() == len(DATA) - limit


def test_after_kill_9_it_goes_on_from_what_the_dead_process_has_left(hub: Hub, tmp_path: Path) -> None:
    file = served(hub)
    hub.fail("corpus", pause=0.02)
    process = child(file, tmp_path / "cache")
    deadline = time.monotonic() + 120
    while not (partial(file).exists() and partial(file).stat().st_size >= MIB):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = partial(file).stat().st_size
    assert MIB <= left < len(DATA)
    hub.forget()
    assert download.download(file, attempts=1).read_bytes() == DATA
    assert hub.sent() == len(DATA) - left


def test_two_processes_at_once_download_it_once(hub: Hub, tmp_path: Path) -> None:
    file = served(hub)
    hub.fail("corpus", pause=0.002)
    both = [child(file, tmp_path / "cache") for _ in range(2)]
    for process in both:
        process.communicate(timeout=120)
    assert [process.returncode for process in both] == [0, 0]
    assert hub.sent() == len(DATA)
    assert download.download(file, attempts=1).read_bytes() == DATA


def test_offline_only_the_cache_is_asked(hub: Hub) -> None:
    file = served(hub)
    with pytest.raises(DataError, match=r"is not in the cache .* offline mode"):
        download.download(file, attempts=1, offline=True)
    download.download(file, attempts=1)
    hub.forget()
    assert download.download(file, attempts=1, offline=True).read_bytes() == DATA
    assert not hub.requests
