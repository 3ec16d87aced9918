from typing import Any

from bloomery.evaluation.report import render
from tests.evaluation.made import full


def preferring() -> dict[str, Any]:
    report = full()
    report["curves"]["prefer"] = [
        {
            "step": step,
            "loss": 0.69 - step / 100,
            "margin": step / 20,
            "accuracy": 0.5 + step / 60,
            "learning_rate": 1e-4,
        }
        for step in range(1, 21)
    ] + [{"step": 20, "validation_margin": 0.875, "validation_accuracy": 0.8125}]
    report["preference"] = {
        "method": "dpo",
        "steps": 20,
        "before": {"validation_margin": 0.0, "validation_accuracy": 0.5},
        "data": {
            **{"read": 110, "cut_at_a_turn": 3, "rejected_by_reason": {"same_answer": 7, "too_long": 3}},
            **{"train": {"chosen": 95, "rejected": 95}, "val": {"chosen": 5, "rejected": 5}},
        },
    }
    return report


def test_a_report_shows_margins_on_the_way_and_before_and_after() -> None:
    page = render(preferring())
    for told in (
        "Prefer</h3>",
        "DPO",
        "Margin: preference for the better",
        "0.875",
        "0.8125",
        "same_answer",
        "95 chosen",
        "validation",
    ):
        assert told in page, told
    assert "Reward: correct answers" not in page


def test_a_report_without_the_stage_says_nothing_of_it() -> None:
    assert "Prefer</h3>" not in render(full())


def test_parts_of_it_may_be_missing() -> None:
    report = preferring()
    report["preference"] = {}
    assert "Margin: preference for the better" in render(report)
    del report["curves"]["prefer"]
    report["preference"] = {"method": "grpo"}
    assert "GRPO" in render(report)
