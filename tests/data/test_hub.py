import errno
import json
from pathlib import Path
from urllib.parse import unquote

import huggingface_hub
import pytest

from bloomery.core.errors import DataError
from bloomery.data.sources import download
from bloomery.data.sources.download import Repository
from tests.data import hub_server
from tests.data.hub_server import Hub

SMALL, LARGE = b'{"text": "small"}\n', b'{"text": "large"}\n' * 200
FILES = {
    "README.md": b"---\n---\n",
    "data/train-00000.jsonl": LARGE,
    "data/train-00001.jsonl": SMALL,
    "data/test-00000.jsonl": SMALL * 2,
    "data/deep/er/x.jsonl": SMALL * 3,
    "other/y z+é.txt": b"a name that has to be quoted",
    "script.py": b"print()",
}


def names(repository: Repository, *patterns: str) -> list[str]:
    return [file.name for file in download.listing(repository, patterns)]


def content(repository: Repository, *patterns: str) -> dict[str, bytes]:
    """Everything that is downloaded, by name."""
    return {
        file.name: download.download(file, attempts=repository.attempts, token=download.token()).read_bytes()
        for file in download.listing(repository, patterns)
    }


def commit_anew(repository: Repository) -> str:
    """What another process would find."""
    download.commit.cache_clear()
    return download.commit(repository)


def test_files_are_listed_by_the_hubs_own_client_over_pages_and_come_as_they_are(hub: Hub) -> None:
    sha = hub.put("us/books", FILES)
    repository = Repository("us/books")
    assert download.commit(repository) == sha
    assert content(repository, "**/*") == FILES
    assert len(hub.asked("/tree/")) > 2
    assert hub.asked("cursor=")


def test_our_hub_is_one_to_all_of_its_client(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    sha = hub.put("us/books", FILES)
    api = huggingface_hub.HfApi(endpoint=hub.endpoint, token=False)
    told = api.dataset_info("us/books", files_metadata=True)
    assert told.sha == sha
    assert sorted(file.rfilename for file in told.siblings or ()) == sorted(FILES)
    found = api.get_paths_info("us/books", ["data/train-00000.jsonl", "nothing"], repo_type="dataset")
    assert [(file.path, getattr(file, "size", None)) for file in found] == [("data/train-00000.jsonl", len(LARGE))]
    for name, data in FILES.items():
        path = api.hf_hub_download("us/books", name, repo_type="dataset", cache_dir=tmp_path / "theirs")
        assert Path(path).read_bytes() == data
    assert hub.asked("resolve", "HEAD")


def test_large_files_are_named_by_sha256_and_small_ones_by_git(hub: Hub) -> None:
    hub.put("us/books", FILES)
    found = {file.name: file for file in download.listing(Repository("us/books"))}
    assert found["data/train-00000.jsonl"].content.kind == "sha256"
    assert found["data/train-00001.jsonl"].content.kind == "git"
    assert found["data/train-00000.jsonl"].num_bytes == len(LARGE)


def test_patterns_choose_files(hub: Hub) -> None:
    hub.put("us/books", FILES)
    repository = Repository("us/books")
    assert names(repository, "data/*.jsonl") == [
        "data/test-00000.jsonl",
        "data/train-00000.jsonl",
        "data/train-00001.jsonl",
    ]
    assert names(repository, "data/**/*.jsonl") == [
        "data/deep/er/x.jsonl",
        "data/test-00000.jsonl",
        "data/train-00000.jsonl",
        "data/train-00001.jsonl",
    ]
    assert names(repository, "data/train-0000?.jsonl", "other/*") == [
        "data/train-00000.jsonl",
        "data/train-00001.jsonl",
        "other/y z+é.txt",
    ]


def test_without_patterns_it_is_what_can_hold_documents(hub: Hub) -> None:
    hub.put("us/books", FILES)
    assert set(names(Repository("us/books"))) == set(FILES) - {"README.md", "script.py"}


def test_only_the_folder_that_patterns_lie_in_is_listed(hub: Hub) -> None:
    hub.put("us/books", FILES)
    names(Repository("us/books"), "data/deep/**/*.jsonl", "data/deep/er/*")
    assert all("/data/deep" in unquote(request.path) for request in hub.asked("/tree/"))


def test_a_config_is_what_the_card_declares(hub: Hub) -> None:
    hub.put("us/books", FILES)
    hub.datasets["us/books"].card = {
        "configs": [
            {
                "config_name": "main",
                "data_files": [
                    {"split": "train", "path": "data/train-*"},
                    {"split": "test", "path": ["data/test-*"]},
                ],
            },
            {"config_name": "deep", "data_files": "data/deep/**"},
        ]
    }
    repository = Repository("us/books")
    assert len(download.listing(repository, config="main")) == 2
    assert [f.name for f in download.listing(repository, config="main", split="test")] == ["data/test-00000.jsonl"]
    assert [f.name for f in download.listing(repository, config="deep")] == ["data/deep/er/x.jsonl"]
    with pytest.raises(DataError, match=r"no config 'x'.*\n.*main, deep"):
        download.listing(repository, config="x")
    with pytest.raises(DataError, match="no split 'dev'"):
        download.listing(repository, config="main", split="dev")


def test_nothing_that_matches_is_an_error_that_shows_what_there_is(hub: Hub) -> None:
    hub.put("us/books", FILES)
    with pytest.raises(DataError, match=r"matches data/\*\.csv.*\n.*data/deep/er/x\.jsonl"):
        names(Repository("us/books"), "data/*.csv")
    with pytest.raises(DataError, match="no such folder"):
        names(Repository("us/books"), "nowhere/*.csv")


def test_the_digest_is_the_commit_and_needs_no_file_and_no_list(hub: Hub) -> None:
    hub.put("us/books", FILES)
    first = download.digest(Repository("us/books"))
    assert len(hub.requests) == 1
    assert hub.sent("resolve") == 0
    hub.put("us/books", {**FILES, "new.txt": b"new"})
    assert download.digest(Repository("us/books")) == first, "asked twice in one process"
    commit_anew(Repository("us/books"))
    assert download.digest(Repository("us/books")) != first


def test_a_pinned_revision_asks_nobody(hub: Hub) -> None:
    sha = hub.put("us/books", FILES)
    download.digest(Repository("us/books", sha))
    download.digest(Repository("us/books", sha, offline=True))
    assert not hub.requests


def test_a_revision_that_moved_is_told_and_only_changed_files_come_again(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = Repository("us/books")
    old = hub.put("us/books", FILES)
    content(repository)
    capsys.readouterr()
    new = hub.put("us/books", {**FILES, "data/train-00001.jsonl": b'{"text": "changed"}\n'})
    hub.forget()
    assert commit_anew(repository) == new
    told = capsys.readouterr().err
    assert new in told
    assert f'revision = "{old}"' in told
    assert content(repository)["data/train-00001.jsonl"] == b'{"text": "changed"}\n'
    assert hub.sent("resolve") + hub.sent("blobs") == len(b'{"text": "changed"}\n')
    assert commit_anew(repository) == new
    assert "is now" not in capsys.readouterr().err, "told once"


def test_old_and_new_files_never_mix_when_a_revision_moves_between_listing_and_download(hub: Hub) -> None:
    hub.put("us/books", FILES)
    listed = download.listing(Repository("us/books"))
    hub.put("us/books", {name: data + b"\n{}" for name, data in FILES.items()})
    for file in listed:
        assert download.download(file, attempts=1).read_bytes() == FILES[file.name]


def test_tags_and_branches_with_a_slash_are_revisions(hub: Hub) -> None:
    sha = hub.put("us/books", FILES, revision="refs/convert/parquet")
    assert download.commit(Repository("us/books", "refs/convert/parquet")) == sha
    with pytest.raises(DataError, match="has no revision 'v9'"):
        download.commit(Repository("us/books", "v9"))


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 500, 502, 503])
@pytest.mark.parametrize("where", ["/revision/", "/tree/"])
def test_listing_waits_for_what_passes(hub: Hub, monkeypatch: pytest.MonkeyPatch, where: str, status: int) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the hub's client has waits of its own
    hub.put("us/books", FILES)
    hub.fail(where, status=status, times=3)
    assert content(Repository("us/books"), "**/*") == FILES


def test_listing_that_is_cut_is_asked_for_again(hub: Hub) -> None:
    hub.put("us/books", FILES)
    hub.fail("/revision/", cut_after=10)
    assert content(Repository("us/books"), "**/*") == FILES


def test_a_hub_that_stays_broken_is_an_error_with_its_answer(hub: Hub) -> None:
    hub.put("us/books", FILES)
    hub.fail("/revision/", status=503, times=100)
    with pytest.raises(DataError, match=r"HTTP 503 \(2 attempts\)"):
        download.commit(Repository("us/books", attempts=2))


def test_a_hub_that_is_not_there_is_an_error_that_names_it(hub: Hub) -> None:
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9.*connection failed"):
        download.commit(Repository("us/books", endpoint="http://127.0.0.1:9", attempts=1))


def test_a_data_set_that_is_not_there_says_so(hub: Hub) -> None:
    with pytest.raises(DataError, match="is not on the hub, or is private"):
        download.commit(Repository("us/nothing"))


def test_a_gated_data_set_says_where_to_accept_its_terms(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("us/gated", FILES)
    hub.datasets["us/gated"].gated = True
    hub.datasets["us/gated"].readers = ("hf_good",)
    repository = Repository("us/gated")
    with pytest.raises(DataError, match=r"is gated.*\n.*/datasets/us/gated, then set HF_TOKEN"):
        content(repository)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(DataError, match=r"HTTP 403.*\n.*set HF_TOKEN") as caught:
        content(repository)
    assert "hf_other" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert content(repository, "**/*") == FILES


def test_a_token_goes_to_no_other_host_and_into_no_file(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.put("us/books", FILES)
    hub.fail("resolve", status=500)
    hub.fail("blobs", cut_after=5)
    with hub_server.serving() as mirror:
        mirror.put("us/books", FILES)
        hub.fail("data/test-00000.jsonl", status=404)
        content(Repository("us/books", mirrors=(mirror.endpoint,)))
        assert mirror.requests
        assert not any(request.headers["Authorization"] for request in mirror.requests)
    on_cdn = [request for request in hub.requests if request.on_cdn]
    assert on_cdn
    assert not any(request.headers["Authorization"] for request in on_cdn)
    assert any(request.headers["Authorization"] == "Bearer hf_secret" for request in hub.asked("resolve"))
    assert not any(b"hf_secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "hf_secret" not in capsys.readouterr().err


def test_mirrors_list_and_serve_where_the_hub_does_not(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the hub's client has waits of its own
    hub.put("us/books", FILES)
    repository = Repository("us/books", endpoint="http://127.0.0.1:9", mirrors=(hub.endpoint,), attempts=1)
    assert content(repository, "**/*") == FILES


def test_offline_what_the_cache_has_is_used_and_the_rest_is_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("us/books", FILES)
    first = download.listing(Repository("us/books"), ["data/train-*"])
    download.download(first[0], attempts=1)
    hub.forget()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = Repository("us/books")
    assert repository.cut_off
    commit_anew(repository)
    assert download.listing(repository, ["data/train-*"]) == first
    assert download.download(first[0], attempts=1, offline=True).read_bytes() == LARGE
    with pytest.raises(DataError, match="not in the cache"):
        download.download(first[1], attempts=1, offline=True)
    with pytest.raises(DataError, match="not in the cache"):
        names(repository, "other/*")
    with pytest.raises(DataError, match="revision 'v2' is not in the cache"):
        download.commit(Repository("us/books", "v2"))
    assert not hub.requests


def test_a_listing_that_was_cut_in_the_cache_is_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    hub.put("us/books", FILES)
    names(Repository("us/books"), "**/*")
    for path in (tmp_path / "cache" / "hub").rglob("tree-*.json"):
        path.write_text(json.dumps([])[:1])
    assert set(names(Repository("us/books"), "**/*")) == set(FILES)


def test_a_cache_that_cannot_be_written_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.put("us/books", FILES)
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(Exception, match=errno.errorcode[errno.ENOTDIR] + "|Not a directory"):
        names(Repository("us/books"))
