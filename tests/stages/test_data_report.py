"""The page about the data of a run: from what stages have left, and nothing else."""

import json
from pathlib import Path
from typing import Any

from bloomery.core import files
from bloomery.data import document
from bloomery.stages import data_report
from tests.evaluation.made import corpus

FOLDERS = {"fetch": "01-fetch-00000000", "filter": "03-filter-00000000", "dedup": "04-dedup-00000000"}


def finished(root: Path, stage: str) -> Path:
    folder = root / FOLDERS[stage]
    manifest: dict[str, Any] = {
        "stage": stage,
        "seconds": 2.5,
        "resumed": False,
        "outputs": {},
        "stats": corpus()[stage],
    }
    files.write_json(folder / "manifest.json", manifest | {"stats": corpus()[stage]})
    return folder


def dropped(folder: Path) -> None:
    rows = [("code", "gopher.too_few_words"), ("web", "gopher.too_few_words"), ("web", "classifier"), ("web", "new")]
    with document.Writer(folder / "dropped", document.dropped_schema()) as writer:
        for number, (domain, reason) in enumerate(rows):
            row = {"id": str(number), "text": f"{number} " * 400, "source": "s", "domain": domain, "url": None}
            writer.write(row | {"license": None, "reason": reason, "value": 0.5})


def test_a_run_has_a_page_of_the_stages_that_are_done(tmp_path: Path) -> None:
    files.write_json(tmp_path / "current.json", FOLDERS)
    assert data_report.write(tmp_path) is None
    finished(tmp_path, "fetch")
    assert data_report.write(tmp_path) == tmp_path / "data_report.html"
    assert "13,354" in (tmp_path / "data_report.html").read_text()
    dropped(finished(tmp_path, "filter"))
    data_report.write(tmp_path)
    report = json.loads((tmp_path / "data_report.json").read_text())
    assert set(report["corpus"]) == {"fetch", "filter"}
    assert [one["folder"] for one in report["stages"]] == [FOLDERS["fetch"], FOLDERS["filter"]]
    page = (tmp_path / "data_report.html").read_text()
    assert "gopher.too_few_words" in page
    assert "--only dedup" not in page


def test_there_is_one_sample_for_each_reason(tmp_path: Path) -> None:
    dropped(finished(tmp_path, "filter"))
    found = list(data_report.dropped_samples(tmp_path / FOLDERS["filter"]))
    assert [(one["reason"], one["domain"]) for one in found] == [
        ("gopher.too_few_words", "code"),
        ("classifier", "web"),
    ]
    assert {len(one["text"]) for one in found} == {300}
