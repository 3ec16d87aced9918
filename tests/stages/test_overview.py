"""The page of a run that is not evaluated: what its stages say of text and training, a document for each reason."""

from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.core.log import METRICS, Metrics
from bloomery.data import documents
from bloomery.stages import run_report
from tests.core.made import manifest
from tests.evaluation.made import full
from tests.stages.test_card import FETCH


def dropped(number: int, reason: str) -> documents.DocumentRow:
    row = {"id": str(number), "text": f"text {number} " * 100, "source": "s", "domain": "web", "url": None}
    return {**row, "license": None, "reason": reason, "value": 0.5}


def test_each_reason_has_its_first_document_whatever_the_parts(tmp_path: Path) -> None:
    rows = [dropped(number, f"rule.{number % 7}") for number in range(40)] + [dropped(99, "last")]
    for part, some in enumerate((rows[:5], rows[5:])):
        path = tmp_path / "dropped" / f"part-{part:05d}.parquet"
        with documents.PartWriter(path, documents.dropped_schema()) as writer:
            writer.write(some)
    found = list(run_report.dropped_samples(tmp_path))
    assert [(one["reason"], one["text"][:7].strip()) for one in found] == [
        *((f"rule.{number}", f"text {number}") for number in range(7)),
        ("last", "text 99"),
    ]
    assert all(len(one["text"]) == run_report.SHOWN_CHARACTERS for one in found)


def test_a_run_that_has_only_fetched_has_a_page_and_one_that_has_not_has_none(tmp_path: Path) -> None:
    core_io.write_json(tmp_path / "current.json", {"fetch": "01-fetch-00000000", "shard": "06-shard-00000000"})
    assert run_report.write_page(tmp_path) is None
    facts = {"stage": "fetch", "seconds": 1.5, "resumed": False}
    core_io.write_json(tmp_path / "01-fetch-00000000" / "manifest.json", FETCH | facts)
    page = run_report.write_page(tmp_path)
    assert page is not None
    assert "code" in page.read_text()


def test_a_run_that_trains_has_its_curves_on_the_page_before_it_is_evaluated(tmp_path: Path) -> None:
    names = {"fetch": "01-fetch-00000000", "pretrain": "07-pretrain-00000000", "prefer": "11-prefer-00000000"}
    told: dict[str, Any] = full()
    lines = {**told["curves"], "prefer": [{"step": 1, "loss": 0.5, "margin": 1.0}]}
    for stage in ("pretrain", "prefer"):
        (tmp_path / names[stage]).mkdir()
        with Metrics(tmp_path / names[stage] / METRICS, 0) as metrics:
            for line in lines[stage]:
                metrics.write(**line)
    done = manifest(seconds=1.5)
    core_io.write_json(tmp_path / names["pretrain"] / "manifest.json", {**done, "stage": "pretrain"})

    def page(*stages: str) -> str:
        core_io.write_json(tmp_path / "current.json", {stage: names[stage] for stage in stages})
        made = run_report.write_page(tmp_path)
        assert made is not None
        return made.read_text()

    alone = page("pretrain")  # on token files of others: nothing was read
    shown = ("Pretrain: loss", "Gradient flow", "Training time by phase", "/metrics.jsonl")
    assert all(one in alone for one in shown)
    assert not any(one in alone for one in ("Read documents", "Finetune", "<h3>Prefer"))
    assert core_io.read_json(tmp_path / "report.json")["curves"] == {"pretrain": lines["pretrain"]}
    assert "<h3>Prefer" in page("pretrain", "prefer")  # which has begun and is not done
    core_io.write_json(tmp_path / names["fetch"] / "manifest.json", FETCH | done | {"stage": "fetch"})
    both = page("fetch", "pretrain")
    assert both.index("<h2>Read documents") > both.index("Pretrain: loss")
