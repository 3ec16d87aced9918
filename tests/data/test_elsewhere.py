import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build, plain
from bloomery.core.errors import ConfigError, DataError
from bloomery.core.io import sha256_bytes
from bloomery.data.readers.read import DocumentItem, RejectedDocument
from bloomery.data.sources import download, local
from bloomery.data.sources.remote import Address, Hub, Remote
from tests.data import hub_server


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text, "n": number}) + "\n" for number, text in enumerate(texts)).encode()


FILES = {f"data/{name}.jsonl": lines(*(f"{name} {number} " + "x" * 200 for number in range(20))) for name in "abcde"}


def texts(found: Sequence[DocumentItem]) -> list[str]:
    return [item["text"] for item in found if not isinstance(item, RejectedDocument)]


def books(**more: Any) -> Hub:
    return build(Hub, {"kind": "hub", "name": "books", "domain": "web", "dataset": "us/books", **more})


def downloaded(hub: hub_server.Hub) -> set[str]:
    return {request.path.rpartition("/")[2] for request in hub.asked("/resolve/")}


def test_documents_of_the_hub_are_those_of_its_files_in_the_order_of_names(hub: hub_server.Hub) -> None:
    sha = hub.put("us/books", FILES)
    found = list(local.read(books()))
    assert texts(found) == [f"{name} {number} " + "x" * 200 for name in "abcde" for number in range(20)]
    first = found[0]
    assert not isinstance(first, RejectedDocument)
    assert first["id"] == "books/data/a.jsonl:1"
    assert first["url"] == f"hf://datasets/us/books@{sha}/data/a.jsonl"


@pytest.mark.parametrize("limit", [{"max_documents": 30}, {"max_bytes": 30 * 205}])
def test_a_target_downloads_no_more_files_than_it_needs(hub: hub_server.Hub, limit: dict[str, int]) -> None:
    hub.put("us/books", FILES)
    some = list(local.read(books(**limit)))
    assert 28 <= len(some) <= 30
    assert len(downloaded(hub)) == 2
    assert list(local.read(books(**limit))) == some
    assert set(texts(some)) < set(texts(list(local.read(books()))))


def test_a_target_that_ends_with_a_file_does_not_ask_for_the_next(hub: hub_server.Hub) -> None:
    hub.put("us/books", FILES)
    assert len(list(local.read(books(max_documents=40)))) == 40
    assert len(downloaded(hub)) == 2


def test_the_digest_pins_the_commit_without_downloading(hub: hub_server.Hub) -> None:
    hub.put("us/books", FILES)
    before = local.digest(books())
    assert not downloaded(hub)
    assert local.digest(books(endpoint=hub.endpoint)) == before
    sha = hub.put("us/books", {**FILES, "data/f.jsonl": lines("new")})
    download.commit.cache_clear()
    assert local.digest(books()) != before
    hub.forget()
    assert local.digest(books(revision=sha)) == local.digest(books())
    assert not hub.requests


def test_where_it_is_fetched_from_is_not_in_the_fingerprint() -> None:
    moved = books(endpoint="https://example.org", mirrors=["https://example.com"], attempts=2, offline=True)
    assert plain(moved, stable_only=True) == plain(books(), stable_only=True)


def test_offline_documents_come_from_the_cache_alone(hub: hub_server.Hub) -> None:
    hub.put("us/books", FILES)
    online = list(local.read(books()))
    download.commit.cache_clear()
    hub.forget()
    assert list(local.read(books(offline=True))) == online
    assert not hub.requests
    with pytest.raises(DataError, match="offline mode"):
        list(local.read(books(offline=True, dataset="us/other")))


def test_what_is_broken_in_a_file_is_told_with_the_files_own_name_and_its_place_in_the_cache(
    hub: hub_server.Hub,
) -> None:
    sha = hub.put("us/books", {"data/a.jsonl": lines("fine") + b"{broken\n"})
    with pytest.raises(DataError, match=rf"hf://datasets/us/books@{sha}/data/a\.jsonl \(.*/blobs/.*:2\)"):
        list(local.read(books(invalid="error")))


def test_files_and_config_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="remove one of them"):
        books(files=["a"], config="b")


def address(hub: hub_server.Hub, path: str = "/a/plain.txt", **more: Any) -> Address:
    return build(Address, {"kind": "address", "name": "plain", "domain": "web", "address": hub.endpoint + path, **more})


def test_a_file_by_its_address_is_a_document(hub: hub_server.Hub) -> None:
    hub.plain["/a/plain.txt"] = b"All of it."
    (found,) = local.read(address(hub))
    assert not isinstance(found, RejectedDocument)
    assert (found["id"], found["text"], found["url"]) == (
        "plain/plain.txt",
        "All of it.",
        f"{hub.endpoint}/a/plain.txt",
    )


def test_packed_tables_by_address_are_read_by_their_names_or_as_told(hub: hub_server.Hub) -> None:
    hub.plain["/rows.jsonl.gz"] = hub.plain["/download"] = gzip.compress(lines("one", "two"))
    assert texts(list(local.read(address(hub, "/rows.jsonl.gz")))) == ["one", "two"]
    hub.plain["/download"] = lines("one", "two")
    assert texts(list(local.read(address(hub, "/download", format="jsonl")))) == ["one", "two"]


def test_with_a_hash_the_digest_asks_nobody_and_other_bytes_are_refused(hub: hub_server.Hub) -> None:
    source = address(hub, sha256=sha256_bytes(b"All of it."))
    local.digest(source)
    assert not hub.requests
    hub.plain["/a/plain.txt"] = b"Something else."
    with pytest.raises(DataError, match=f"expected {sha256_bytes(b'All of it.')}"):
        list(local.read(source))


def test_without_a_hash_the_digest_is_the_servers_version(hub: hub_server.Hub) -> None:
    hub.plain["/a/plain.txt"] = b"All of it."
    before = local.digest(address(hub))
    assert hub.sent() == 0
    hub.plain["/a/plain.txt"] = b"All of it"
    assert local.digest(address(hub)) != before


def test_an_address_offline_is_what_was_downloaded(hub: hub_server.Hub) -> None:
    hub.plain["/a/plain.txt"] = b"All of it."
    online = list(local.read(address(hub)))
    hub.forget()
    assert list(local.read(address(hub, offline=True))) == online
    assert not hub.requests
    with pytest.raises(DataError, match="offline mode"):
        local.digest(address(hub, "/b", offline=True))


def test_an_address_that_is_not_there_is_told_without_its_query(hub: hub_server.Hub) -> None:
    with pytest.raises(DataError, match="/b: HTTP 404") as caught:
        local.digest(address(hub, "/b?key=secret"))
    assert "secret" not in str(caught.value)


def test_mirrors_of_an_address_need_a_hash(hub: hub_server.Hub) -> None:
    with pytest.raises(ConfigError, match="set sha256"):
        address(hub, mirrors=["https://example.org/a"])
    with pytest.raises(ConfigError, match="address"):
        build(Address, {"name": "a", "domain": "b", "address": "https://user:password@example.org/a"})


def folder(*patterns: str, **more: Any) -> Remote:
    return build(Remote, {"name": "far", "domain": "web", "patterns": list(patterns), **more})


def test_files_of_a_store_are_listed_by_pattern_and_read(hub: hub_server.Hub, tmp_path: Path) -> None:
    for name, data in FILES.items():
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    source = folder(f"file://{tmp_path}/store/**/*.jsonl")
    found = list(local.read(source))
    assert len(found) == 100
    assert len(list(local.read(folder(f"file://{tmp_path}/store/data/a.jsonl")))) == 20
    before = local.digest(source)
    (tmp_path / "store" / "data" / "a.jsonl").write_bytes(lines("changed"))
    assert local.digest(source) != before
    assert len(list(local.read(source))) == 81
    online = list(local.read(source))
    (tmp_path / "store").rename(tmp_path / "gone")
    assert list(local.read(folder(*source.patterns, offline=True))) == online
