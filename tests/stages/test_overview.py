"""The page of a run without a model: what its stages say of the text, and one document for each reason."""

from pathlib import Path

from bloomery.core import files
from bloomery.data import document
from bloomery.stages import overview
from tests.stages.test_card import FETCH


def dropped(number: int, reason: str) -> document.Row:
    row = {"id": str(number), "text": f"text {number} " * 100, "source": "s", "domain": "web", "url": None}
    return {**row, "license": None, "reason": reason, "value": 0.5}


def test_each_reason_has_its_first_document_whatever_the_parts(tmp_path: Path) -> None:
    rows = [dropped(number, f"rule.{number % 7}") for number in range(40)] + [dropped(99, "last")]
    for part, some in enumerate((rows[:5], rows[5:])):
        path = tmp_path / "dropped" / f"part-{part:05d}.parquet"
        with document.PartWriter(path, document.dropped_schema()) as writer:
            writer.write(some)
    found = list(overview.dropped_samples(tmp_path))
    assert [(one["reason"], one["text"][:7].strip()) for one in found] == [
        *((f"rule.{number}", f"text {number}") for number in range(7)),
        ("last", "text 99"),
    ]
    assert all(len(one["text"]) == overview.SHOWN_CHARACTERS for one in found)


def test_a_run_that_has_only_fetched_has_a_page_and_one_that_has_not_has_none(tmp_path: Path) -> None:
    files.write_json(tmp_path / "current.json", {"fetch": "01-fetch-00000000", "shard": "06-shard-00000000"})
    assert overview.write(tmp_path) is None
    facts = {"stage": "fetch", "seconds": 1.5, "resumed": False}
    files.write_json(tmp_path / "01-fetch-00000000" / "manifest.json", FETCH | facts)
    page = overview.write(tmp_path)
    assert page is not None
    assert "code" in page.read_text()
