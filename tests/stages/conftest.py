from collections.abc import Iterator

import pytest

from bloomery.data.sources import http_client
from tests.data.synthesis.model_server import ModelServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-other-secret")
    monkeypatch.setattr(http_client, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(http_client, "LONGEST_WAIT_SECONDS", 0.002)
    with ModelServer().serving() as made:
        yield made


@pytest.fixture(autouse=True)
def workers_start_at_once(warm_workers: None) -> None:
    """All that this process starts."""
