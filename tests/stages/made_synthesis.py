"""What the tests of `synthesize` share: a recipe's section for a server on this machine, and what a run leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.data.synthesis.config import Synthesize
from bloomery.stages import synthesize
from tests.data.synthesis.model_server import ModelServer

TOPICS = ["Name a river.", "And a lake.", "Größe?", "What {is} this?", "Why?"]
KINDS = ("openai", "anthropic")
kinds = pytest.mark.parametrize("kind", KINDS)


def provider(server: ModelServer, kind: str, **settings: Any) -> dict[str, Any]:
    if kind == "anthropic":
        return {"kind": kind, "address": server.address, **settings}
    return {"kind": kind, "address": server.address + "/v1/", "model": "m", "key_variable": "OPENAI_API_KEY"} | settings


def config(server: ModelServer, kind: str = "openai", **settings: Any) -> Synthesize:
    priced = {"provider": provider(server, kind)} if "provider" not in settings else {}
    return build(Synthesize, {"enabled": True, "topics": TOPICS, "count": 5, **priced, **settings})


def run(config: Synthesize, out: Path, inputs: dict[str, Path] | None = None) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    return synthesize.run(config, inputs or {}, out)


def lines(out: Path, name: str = synthesize.FILE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]


def asks(out: Path) -> list[str]:
    return [line["messages"][0]["content"] for line in lines(out)]
