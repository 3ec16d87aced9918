import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from bloomery.core.config import build
from bloomery.core.errors import DataError
from bloomery.data.readers.read import RejectedDocument
from bloomery.data.sources import download, local, remote
from bloomery.data.sources.remote import Remote
from tests.data import bucket_server
from tests.data.bucket_server import Store
from tests.data.hub_server import Hub


def rows(name: str) -> bytes:
    return "".join(json.dumps({"text": f"{name} {number} " + "x" * 300}) + "\n" for number in range(20)).encode()


FILES = {f"corpus/{folder}/{name}.jsonl": rows(f"{folder}{name}") for folder in "ab" for name in "xyz"}


def source(*patterns: str, **more: object) -> Remote:
    return build(Remote, {"name": "far", "domain": "web", "patterns": list(patterns), "attempts": 3, **more})


def texts(one: Remote) -> list[str]:
    return [item["text"] for item in local.read(one) if not isinstance(item, RejectedDocument)]


ALL = [f"{folder}{name} {number} " + "x" * 300 for folder in "ab" for name in "xyz" for number in range(20)]


@pytest.fixture
def memory(hub: Hub) -> Iterator[fsspec.AbstractFileSystem]:
    """A store in this process; the cache is the hub's."""
    store = fsspec.filesystem("memory")
    for name, data in FILES.items():
        store.pipe_file(f"/{name}", data)
    yield store
    store.rm("/corpus", recursive=True)


@pytest.fixture
def s3(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A bucket `b` on the loopback, which S3's own client finds by the environment."""
    s3fs = pytest.importorskip("s3fs", reason="needs the extra s3")
    for name, value in (("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with bucket_server.serving() as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        store.objects |= {f"b/{name}": data for name, data in FILES.items()}
        yield store
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def gcs(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The same bucket as Google's own client finds it."""
    gcsfs = pytest.importorskip("gcsfs", reason="needs the extra gcs")
    gcsfs.GCSFileSystem.clear_instance_cache()
    with bucket_server.serving() as store:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.endpoint)
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        store.objects |= {f"b/{name}": data for name, data in FILES.items()}
        yield store
    gcsfs.GCSFileSystem.clear_instance_cache()


def test_a_store_is_listed_by_patterns_and_read_in_the_order_of_names(memory: fsspec.AbstractFileSystem) -> None:
    assert texts(source("memory://corpus/**/*.jsonl")) == ALL
    assert texts(source("memory://corpus/a/x.jsonl")) == ALL[:20]
    assert len(texts(source("memory://corpus/a/x.jsonl", "memory://corpus/b/*.jsonl"))) == 80
    (first, *_) = local.read(source("memory://corpus/**/*.jsonl"))
    assert not isinstance(first, RejectedDocument)
    assert first["id"] == "far/a/x.jsonl:1"
    assert first["url"] == "memory:///corpus/a/x.jsonl"


def test_a_copy_that_was_cut_goes_on(memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RANGE_BYTES", 1000)
    (file, *_) = remote.listing(["memory://corpus/a/x.jsonl"], attempts=1)
    place = download.cache_path(file.content, file.name)
    partial = place.with_name(place.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(FILES["corpus/a/x.jsonl"][:2500])
    asked: list[int] = []
    range_of = remote._range

    def watched(address: str, begin: int, end: int) -> bytes:
        asked.append(begin)
        return range_of(address, begin, end)

    monkeypatch.setattr(remote, "_range", watched)
    assert remote.copied(file, attempts=1, offline=False).read_bytes() == FILES["corpus/a/x.jsonl"]
    assert asked[0] == 2500


def test_a_file_that_changes_while_it_is_copied_is_an_error(memory: fsspec.AbstractFileSystem) -> None:
    (file, *_) = remote.listing(["memory://corpus/a/x.jsonl"], attempts=1)
    memory.pipe_file("/corpus/a/x.jsonl", FILES["corpus/a/x.jsonl"].swapcase())
    with pytest.raises(DataError, match="has changed since it was listed"):
        remote.copied(file, attempts=1, offline=False)
    assert not download.cache_path(file.content, file.name).exists()


def test_what_is_not_there_is_named(memory: fsspec.AbstractFileSystem) -> None:
    with pytest.raises(DataError, match="no file matches"):
        texts(source("memory://corpus/**/*.parquet"))
    with pytest.raises(DataError, match="no such file"):
        texts(source("memory://corpus/none.jsonl"))


def test_a_scheme_that_nobody_knows_is_named(hub: Hub) -> None:
    with pytest.raises(DataError, match="nowhere"):
        texts(source("nowhere://a/b"))


@pytest.mark.slow
def test_a_bucket_is_read_by_its_own_client_over_pages(s3: Store) -> None:
    assert texts(source("s3://b/corpus/**/*.jsonl")) == ALL
    assert sum("list" in path or path == "b" for _, path, _ in s3.requests) > 1
    before = s3.sent
    assert texts(source("s3://b/corpus/**/*.jsonl")) == ALL
    assert s3.sent == before, "the cache has it"


def test_files_of_one_name_in_two_buckets_are_two(s3: Store) -> None:
    s3.objects["c/corpus/a/x.jsonl"] = rows("cx")
    found = list(local.read(source("s3://b/corpus/a/x.jsonl", "s3://c/corpus/a/x.jsonl")))
    ids = [item["id"] for item in found if not isinstance(item, RejectedDocument)]
    assert (ids[0], ids[-1]) == ("far/b/corpus/a/x.jsonl:1", "far/c/corpus/a/x.jsonl:20")


def test_googles_storage_is_read_by_its_own_client(gcs: Store) -> None:
    assert texts(source("gs://b/corpus/**/*.jsonl")) == ALL
    before, sent = local.digest(source("gs://b/corpus/**/*.jsonl")), gcs.sent
    gcs.objects["b/corpus/a/x.jsonl"] = rows("aX")
    assert local.digest(source("gs://b/corpus/**/*.jsonl")) != before
    assert gcs.sent == sent
    assert texts(source("gs://b/corpus/a/*.jsonl"))[0].startswith("aX 0")


def test_the_digest_of_a_bucket_downloads_nothing_and_sees_a_change(s3: Store) -> None:
    before = local.digest(source("s3://b/corpus/**/*.jsonl"))
    assert s3.sent == 0
    s3.objects["b/corpus/a/x.jsonl"] = rows("other")[: len(FILES["corpus/a/x.jsonl"])]
    assert local.digest(source("s3://b/corpus/**/*.jsonl")) != before


def test_a_bucket_that_is_out_of_order_for_a_while_is_asked_again(s3: Store) -> None:
    s3.failures = [503, 500]
    assert texts(source("s3://b/corpus/a/*.jsonl")) == ALL[:60]


def test_a_target_takes_no_more_objects_than_it_needs(s3: Store) -> None:
    assert len(texts(source("s3://b/corpus/**/*.jsonl", max_documents=20))) == 20
    assert len({path for method, path, _ in s3.requests if method == "GET" and path.endswith(".jsonl")}) == 1


def test_a_bucket_that_may_not_be_read_says_what_to_set(s3: Store) -> None:
    s3.denied = True
    with pytest.raises(DataError, match=r"may not be read.*\n.*AWS_ACCESS_KEY_ID"):
        texts(source("s3://b/corpus/**/*.jsonl"))


def test_a_folder_of_the_web_is_listed_and_downloaded_like_any_file_of_the_web(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs the extra http")
    hub.plain["/corpus/"] = b'<a href="x.jsonl">x</a> <a href="y.jsonl">y</a> <a href="other.txt">no</a>'
    hub.plain |= {f"/corpus/{name}.jsonl": FILES[f"corpus/a/{name}.jsonl"] for name in "xy"}
    hub.fail("x.jsonl", method="GET", cut_after=500, no_ranges=True)
    assert texts(source(f"{hub.endpoint}/corpus/*.jsonl")) == ALL[:40]
