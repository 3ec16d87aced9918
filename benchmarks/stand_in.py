"""Text of this machine in the place of a recipe's sources, so that the whole data half runs without a network."""

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACE = Path(os.environ.get("BLOOMERY_SHARED", ROOT.parent / "shared"))
"""Where shared text may be."""
DOMAINS = {
    "web": ("web.jsonl.zst", "web"),
    "wiki": ("web.jsonl.zst", "wiki"),
    "qa": ("qa.jsonl.zst", "qa"),
    "code": ("code.jsonl.zst", "code"),
    "arxiv": ("sci.jsonl.zst", "sci"),
}
"""The five domains of recipes/plasma-500m.toml: the file that stands in, and the value of its field `source`."""


def shared() -> Path | None:
    """The folder of texts that tests and benchmarks may use, where this machine has it."""
    return PLACE if (PLACE / "data" / "dev").is_dir() else None


def sources(texts: Path, *, quick: bool = False) -> list[dict[str, Any]]:
    """
    Sources in TOML's terms: rows of the shared files, each in the domain that it stands in for.

    `quick` takes 4 MB of each.
    """
    return [
        {
            "kind": "jsonl",
            "name": domain,
            "domain": domain,
            "path": str(texts / "data" / "dev" / file),
            "id_field": "id",
            **({"max_bytes": 4_000_000} if quick else {}),
            "accept": [{"kind": "field", "field": "source", "one_of": [source]}],
        }
        for domain, (file, source) in DOMAINS.items()
    ]


def setting(texts: Path, *, quick: bool = False) -> str:
    """`fetch.sources=…` for the command line."""
    return "fetch.sources=" + toml(sources(texts, quick=quick))


def toxicity(texts: Path) -> list[str]:
    """Settings that add a classifier of toxicity, learned from the labels that are there, and the limits of all."""
    labels = {
        "kind": "labeled",
        "name": "toxicity",
        "path": str(texts / "data" / "dev" / "toxicity.jsonl.zst"),
        "group_field": "group",
        "keep": "low",
        "samples": 20_000,
    }
    quality = {"kind": "contrast", "name": "quality", "samples": 4000}
    return ["classify.classifiers=" + toml([quality, labels]), 'filter.thresholds="seed-1386"']


def toml(value: Any) -> str:
    """A value as a recipe writes it, in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)
