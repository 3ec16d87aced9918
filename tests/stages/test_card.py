"""The data card: everything that the manifests say about the text, and nothing else."""

from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.stages import run_report

VERSIONS = {"python": "3.11"}


def manifest(config: dict[str, Any], stats: dict[str, Any]) -> dict[str, Any]:
    finished = {"finished": "2026-01-01T00:00:00Z", "versions": VERSIONS}
    made = {"stage": "fetch", "seconds": 1.0, "resumed": False}
    return {"config": config, "stats": stats, "outputs": {}, **made, **finished}


FETCH = manifest(
    {
        "sources": [
            {"name": "a|b", "domain": "web", "kind": "jsonl", "path": "a.jsonl", "license": "MIT", "max_bytes": None},
            {"name": "c", "domain": "code", "kind": "folder", "path": "c", "license": None},
        ]
    },
    {
        "documents": 12,
        "rejected": 1,
        "reasons": {"empty": 1},
        "by_source": {
            "a|b": {"documents": 9, "bytes": 1234, "rejected": 1},
            "c": {
                **{"documents": 3, "bytes": 99, "rejected": 0, "version": "us/c@1234"},
                "licenses": {"BSD-3-Clause": 2, "Apache-2.0": 1},
            },
        },
        "by_domain": {"web": {"documents": 9}, "code": {"documents": 3}},
    },
)
ANNEAL = {"code": {"asked": 1.0, "share": 0.9}}
SHARD = manifest(
    {},
    {
        "tokens": 5,
        "documents": 10,
        "held_out_documents": 2,
        "anneal": ANNEAL,
        "mix": {"web": {"asked": 0.5, "epochs": 2.0}, "code": {"asked": 0.5, "share": 0.4}},
    },
)


def test_a_card_names_sources_licenses_counts_the_mix_and_hashes() -> None:
    found = run_report.facts("demo", {"fetch": FETCH, "shard": SHARD}, {"fetch": "f" * 64, "shard": "5" * 64})
    assert found["sources"][0]["counts"] == {"documents": 9, "bytes": 1234, "rejected": 1}
    assert found["sources"][0]["config"] == {
        "name": "a|b",
        "domain": "web",
        "kind": "jsonl",
        "path": "a.jsonl",
        "license": "MIT",
    }
    assert found["stages"]["fetch"]["sha256"] == "f" * 64
    assert found["stages"]["fetch"]["documents"] == 12
    text = run_report.markdown(found)
    assert "| a\\|b | web | MIT | 9 | 1,234 | 1 |" in text
    assert "| c | code | BSD-3-Clause, Apache-2.0 | 3 | 99 | 0 |" in text
    assert "- c is us/c@1234\n" in text
    assert "Reasons in fetch: empty 1." in text
    assert "| stage | documents | rejected | validation | SHA-256 of its content |" in text
    assert f"| shard | 10 | – | 2 | {'5' * 16} |" in text
    assert "| code | 0.5 | 0.4 | – |" in text
    assert "## Annealing mix" in text
    assert "| code | 1.0 | 0.9 |" in text
    assert found["anneal"] == ANNEAL


def test_a_run_without_documents_has_no_card_and_a_begun_one_has(tmp_path: Path) -> None:
    core_io.write_json(tmp_path / "current.json", {"fetch": "01-fetch-00000000", "shard": "06-shard-00000000"})
    assert run_report.write_card(tmp_path) is None
    core_io.write_json(tmp_path / "01-fetch-00000000" / "manifest.json", FETCH)
    assert run_report.write_card(tmp_path) == tmp_path / "data_card.md"
    assert set(core_io.read_json(tmp_path / "data_card.json")["stages"]) == {"fetch"}
