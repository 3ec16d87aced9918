import json
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.core.errors import DataError
from bloomery.data import documents
from bloomery.data.filters.apply import PRESETS
from bloomery.stages import filter as filtering
from bloomery.stages.config import Filter
from tests.stages.made_documents import hashes

PROSE = "The furnace was lit before dawn, and it had to burn until the iron ran. Nobody knew who had built it. "
TEXTS = {
    "web": [PROSE, "Too short.", PROSE + " Write to ada@example.org, or to bob@example.org. ", "same line\n" * 40],
    "code": ["x = 1\n" * 30, "# from 93.184.216.34\n" + "def f(x):\n    return x\n" * 9, "y" * 3000, "\0" * 200],
}
RULES: list[dict[str, Any]] = [
    {"kind": "characters", "max_non_letters": 0.9},
    {"kind": "pii"},
    {"kind": "length", "min_characters": 30},
    {"kind": "repetition", "domains": ["web"], "max_duplicate_ngrams": []},
    {"kind": "code", "domains": ["code"]},
]


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    """Three parts of documents, as the stage before leaves them."""
    for number in range(3):
        rows = [
            {
                "id": f"{domain}/{number}/{place}",
                "text": text,
                "source": "s",
                "domain": domain,
                "url": None,
                "license": "",
            }
            for domain, texts in TEXTS.items()
            for place, text in enumerate(texts)
        ]
        path = tmp_path / "fetch" / "documents" / f"part-{number:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        with documents.PartWriter(path) as part:
            part.write(rows)
    return tmp_path / "fetch"


def run(fetched: Path, out: Path, rules: list[dict[str, Any]] = RULES, **engine: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return filtering.run(build(Filter, {"rules": rules, "engine": engine}), {"fetch": fetched}, out)


def test_every_document_is_kept_or_dropped_with_its_rule_and_value(fetched: Path, tmp_path: Path) -> None:
    stats = run(fetched, tmp_path / "out")
    kept = {row["id"] for row in documents.read(tmp_path / "out" / "kept")}
    dropped = {row["id"]: (row["reason"], row["value"]) for row in documents.read(tmp_path / "out" / "dropped")}
    assert kept | set(dropped) == {row["id"] for row in documents.read(fetched / "documents")}
    assert not kept & set(dropped)
    assert stats["documents"] == stats["kept"] + stats["dropped"] == 24
    assert json.loads(json.dumps(stats)) == stats
    assert dropped["web/0/1"] == ("length.too_short", 10)
    assert dropped["web/1/3"][0] == "repetition.duplicate_lines"
    assert dropped["code/2/2"] == ("code.long_line", 3000)
    assert dropped["code/2/3"] == ("characters.nul", 200)
    assert stats["reasons"] == {
        "characters.nul": 3,
        "code.long_line": 3,
        "length.too_short": 3,
        "repetition.duplicate_lines": 3,
    }
    assert stats["by_domain"]["web"] | {"bytes_kept": 0} == {
        **{"documents": 12, "kept": 6, "dropped": 6, "bytes_kept": 0, "pass_rate": 0.5}
    }
    assert stats["reasons_by_domain"]["code"] == {"characters.nul": 3, "code.long_line": 3}


def test_a_kept_document_has_the_masked_text_and_it_is_counted(fetched: Path, tmp_path: Path) -> None:
    stats = run(fetched, tmp_path / "out")
    kept = {row["id"]: row["text"] for row in documents.read(tmp_path / "out" / "kept")}
    assert kept["web/0/2"] == PROSE + " Write to <EMAIL>, or to <EMAIL>. "
    assert kept["code/0/1"].startswith("# from <IP>\n")
    assert kept["web/0/0"] == PROSE
    assert stats["masked"] == {"documents": 6, "mail": 6, "ip": 3}
    assert stats["masked_by_domain"]["code"] == {"documents": 3, "ip": 3}


def test_workers_and_an_attempt_that_died_leave_the_same_bytes(fetched: Path, tmp_path: Path) -> None:
    stats = run(fetched, tmp_path / "one", workers=1)
    assert run(fetched, tmp_path / "two", workers=2) == stats
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    before = hashes(tmp_path / "two")
    (tmp_path / "two" / "kept" / "part-00001.parquet").write_bytes(b"torn")
    (tmp_path / "two" / "parts" / "filter" / "part-00002.json").unlink()
    assert run(fetched, tmp_path / "two") == stats
    assert hashes(tmp_path / "two") == before


def test_every_preset_can_judge(fetched: Path, tmp_path: Path) -> None:
    for name in PRESETS:
        rules = [{"kind": "preset", "name": name, "domains": ["web"]}]
        if any(rule.kind == "language" for rule in PRESETS[name]):
            pytest.importorskip("py3langid", reason="py3langid is not installed")
        stats = run(fetched, tmp_path / name, rules)
        assert stats["by_domain"]["code"]["kept"] == 12
        assert stats["by_domain"]["web"]["kept"] < 12


def test_the_digest_follows_the_lists_that_rules_name(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("example.com\n")
    config = build(Filter, {"rules": [{"kind": "urls", "hosts_path": str(path)}]})
    before = filtering.external_inputs(config)
    path.write_text("example.org\n")
    assert filtering.external_inputs(config) not in ("", before)
    assert filtering.external_inputs(Filter()) == ""
    path.unlink()
    with pytest.raises(DataError, match=r"hosts\.txt: cannot be read"):
        filtering.external_inputs(config)
