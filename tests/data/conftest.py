"""A hub on the loopback with an empty cache, for the tests of what comes from elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.data.sources import download, http_client
from tests.data import hub_server


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """It is what HF_ENDPOINT names; nobody has a token; attempts follow each other at once."""
    proxies = [f"{kind}_proxy" for kind in ("http", "https", "all")]
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", *proxies, *map(str.upper, proxies)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(http_client, "FIRST_WAIT_SECONDS", 0.01)
    download.commit.cache_clear()
    with hub_server.serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
    download.commit.cache_clear()
