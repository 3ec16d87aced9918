import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bloomery.data import documents
from tests.data.hub_server import Hub

RECIPE = """
[[fetch.sources]]
kind = "hub"
name = "books"
domain = "web"
dataset = "us/books"
"""
CHILD = """
import sys
from pathlib import Path
from bloomery.core import config, pipeline
from bloomery.core.errors import BloomeryError
from bloomery.recipe import STAGES
from bloomery.stages.config import Fetch
class Only(config.Config):
    fetch: Fetch
recipe, runs, *overrides = sys.argv[1:]
try:
    pipeline.execute(pipeline.plan_stages(STAGES[:1], config.load(Only, Path(recipe), overrides), Path(runs)))
except BloomeryError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
"""The stage fetch of a recipe and nothing else, as `bloomery run` does it."""

SECRET = "hf_this_is_secret"
ROWS = 2500


def rows(name: str) -> bytes:
    """Something over a megabyte, so that it is sent in many pieces."""
    return b"".join(json.dumps({"text": f"{name} {number} " + "word " * 80}).encode() + b"\n" for number in range(ROWS))


FILES = {f"data/{name}.jsonl": rows(name) for name in "abcd"}


def start(folder: Path, hub: Hub, *overrides: str) -> subprocess.Popen[str]:
    (folder / "far.toml").write_text(RECIPE)
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": SECRET, "BLOOMERY_CACHE": str(folder / "cache")}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder / "far.toml"), str(folder / "runs"), *overrides],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(folder: Path, hub: Hub, *overrides: str) -> str:
    process = start(folder, hub, *overrides)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 0, told
    return told


def fetched(folder: Path) -> list[dict[str, Any]]:
    (stage,) = [path.parent for path in (folder / "runs").rglob("01-fetch-*/manifest.json")]
    return list(documents.read(stage / "documents"))


def killed(folder: Path, hub: Hub, sent: int) -> None:
    """A run that is killed when so many bytes are on their way to it."""
    hub.fail("blobs", pause=0.02, times=100)
    process = start(folder, hub)
    deadline = time.monotonic() + 120
    while hub.sent("blobs") < sent and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.faults.clear()


@pytest.mark.slow
def test_after_kill_9_the_documents_are_the_same_and_nothing_comes_twice(hub: Hub, tmp_path: Path) -> None:
    hub.put("us/books", FILES)
    killed(tmp_path, hub, sent=len(FILES["data/a.jsonl"]) * 3 // 2)
    finished(tmp_path, hub)
    assert [row["text"] for row in fetched(tmp_path)] == [
        json.loads(line)["text"] for data in FILES.values() for line in data.splitlines()
    ]
    assert any(request.headers["Range"] for request in hub.asked("blobs")), "it went on from a partial file"
    under_way = 1_000_000  # what the dead process had in its buffers and its sockets'
    assert hub.sent("blobs") < sum(map(len, FILES.values())) + under_way


@pytest.mark.slow
def test_a_revision_that_moved_after_a_kill_is_told_and_fetched_as_a_whole(hub: Hub, tmp_path: Path) -> None:
    hub.put("us/books", FILES)
    killed(tmp_path, hub, sent=len(FILES["data/a.jsonl"]) // 2)
    new = hub.put("us/books", {name: data.replace(b"word", b"WORD") for name, data in FILES.items()})
    told = finished(tmp_path, hub)
    assert f"revision 'main' is now {new}" in " ".join(told.split())
    found = fetched(tmp_path)
    assert len(found) == 4 * ROWS
    assert all(new in row["url"] for row in found)


@pytest.mark.slow
def test_a_target_downloads_less_and_no_token_is_left_anywhere(hub: Hub, tmp_path: Path) -> None:
    commit = hub.put("us/books", FILES)
    told = finished(tmp_path, hub, "fetch.sources.0.max_documents=3000")
    assert len(fetched(tmp_path)) == 3000
    assert len({request.path for request in hub.asked("blobs")}) == 2
    (manifest,) = (tmp_path / "runs").rglob("01-fetch-*/manifest.json")
    stats = json.loads(manifest.read_text())["stats"]
    assert stats["by_source"]["books"]["version"] == f"us/books@{commit}"
    assert any(request.headers["Authorization"] == f"Bearer {SECRET}" for request in hub.requests)
    assert SECRET not in told
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_what_cannot_be_fetched_is_one_error_with_its_hint(hub: Hub, tmp_path: Path) -> None:
    hub.put("us/books", FILES)
    hub.datasets["us/books"].gated = True
    process = start(tmp_path, hub)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in told
    assert "Accept its terms at" in " ".join(told.split())
