"""Tasks whose answers are written out: numbers, programs and the benchmark prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bloomery import cli
from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import ConfigError, HardwareError
from bloomery.evaluation import harness, sandbox
from bloomery.evaluation.harness import EvalRequest, Generation, Writing
from bloomery.evaluation.tasks import EvalItem, TaskFiles
from bloomery.weights import hf
from bloomery.weights.hf import Loaded
from tests.evaluation.sets import write
from tests.evaluation.test_battery import FILE
from tests.weights.made import model


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return hf.load(model(tmp_path / "model", context=100))


def says(monkeypatch: pytest.MonkeyPatch, texts: Sequence[Sequence[str]]) -> None:
    def answer(loaded: Loaded, items: Sequence[EvalItem], how: Writing, seen: Any) -> list[Generation]:
        assert len(items) == len(texts)
        return [Generation(list(some), False) for some in texts]

    monkeypatch.setattr(harness, "write", answer)


def program_set(folder: Path) -> TaskFiles:
    rows = [
        {
            "task_id": f"T/{number}",
            "prompt": f'def times(x):\n    """x times {number}"""\n',
            "entry_point": "times",
            "canonical_solution": f"    return {number} * x\n",
            "test": f"def check(candidate):\n    assert candidate(3) == {3 * number}\n",
        }
        for number in (2, 5)
    ]
    write(folder / "humaneval.jsonl", rows)
    return TaskFiles((folder,))


def can_hold() -> bool:
    try:
        sandbox.check()
    except HardwareError:
        return False
    return True


def test_a_number_is_right_behind_the_mark_or_at_the_end(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"{number}?", "answer": f"So\n#### {number}"} for number in (1, 2, 3)]
    write(tmp_path / "gsm8k_test.jsonl", rows)
    says(monkeypatch, [["It is #### 1", "#### 7"], ["that makes 2.", "#### 2"], ["no", "none"]])
    asked = EvalRequest(tasks=("gsm8k",), files=TaskFiles((tmp_path,)), num_fewshot=0, samples=2, temperature=1.0)
    results = harness.evaluate(loaded, asked)["gsm8k"]
    assert [one.scores for one in results] == [
        {"exact": 0.5, "flexible": 0.5},
        {"exact": 0.5, "flexible": 1.0},
        {"exact": 0.0, "flexible": 0.0},
    ]


@pytest.mark.skipif(not can_hold(), reason="there is no sandbox here")
def test_who_writes_the_known_solutions_passes_all_and_pass_at_one_is_the_share(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = program_set(tmp_path)
    says(monkeypatch, [["    return 2 * x\n", "    return x\n"], ["    return x * 5\n"] * 2])
    asked = EvalRequest(tasks=("humaneval",), files=place, samples=2, chat=False, run_code=True)
    found = harness.evaluate(loaded, asked)["humaneval"]
    assert [one.scores for one in found] == [{"pass@1": 0.5}, {"pass@1": 1.0}]
    assert found[0].facts["ended"] == ["passed", "failed"]


def test_programs_do_not_run_unless_that_was_allowed(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"humaneval runs code that the model writes, which is not enabled"):
        harness.evaluate(loaded, EvalRequest(tasks=("humaneval",), files=program_set(tmp_path)))


def test_prompts_are_judged_by_their_checks_and_their_programs_left_out_where_code_may_not_run(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eval_prompts.py").write_text(FILE)
    fenced = "```python\ndef one():\n    return 1\n```"
    says(monkeypatch, [["Iron."], ["100"], [fenced], ["crow, owl"], ["no"], ["Hello, my friend."]])
    asked = EvalRequest(tasks=("prompts",), files=TaskFiles((tmp_path,)))
    results = harness.evaluate(loaded, asked)["prompts"]
    assert [(one.row, one.scores["right"]) for one in results] == [(1, 1.0), (2, 0.0), (4, 1.0), (5, 0.0), (6, 1.0)]
    if can_hold():
        allowed = EvalRequest(tasks=("prompts",), files=TaskFiles((tmp_path,)), run_code=True)
        assert harness.evaluate(loaded, allowed)["prompts"][2].scores == {"right": 1.0}


def test_what_is_drawn_is_the_same_for_a_seed_and_a_prompt_that_is_too_long_keeps_its_end(loaded: Loaded) -> None:
    items = [EvalItem(prompts=(text,), row=row) for row, text in enumerate(("the lamp", "the lamp " * 60), 1)]
    how = Writing(SamplingConfig(max_tokens=12, temperature=1.0, seed=0), samples=3, chat=False)
    found = harness.write(loaded, items, how, lambda done: None)
    assert [one.cut for one in found] == [False, True]
    assert found == harness.write(loaded, items, how, lambda done: None)
    assert found[1:] == harness.write(loaded, items[1:], how, lambda done: None)
    assert len(set(found[0].texts)) > 1
    greedy = harness.write(loaded, items, Writing(SamplingConfig.greedy(12)), lambda done: None)
    assert all(len(one.texts) == 1 for one in greedy)


def test_eval_prints_scores_and_writes_every_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"query": f"number {n} is", "choices": ["odd", "even"], "gold": (n + 1) % 2} for n in range(30)]
    write(tmp_path / "copa.jsonl", rows)
    words = ["eval", str(model(tmp_path / "model", context=100)), "--task", "copa", "--data", str(tmp_path)]
    assert cli.main([*words, "--limit", "20", "--json", "--out", str(tmp_path / "out.jsonl")]) == 0
    told = json.loads(capsys.readouterr().out)["tasks"]["copa"]
    assert (told["n"], told["chance"]) == (20, 0.5)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sum(line["acc"] for line in lines) / 20 == told["scores"]["acc"]["value"]
    assert cli.main(words) == 0
    assert "copa             acc " in capsys.readouterr().out
    assert cli.main([*words[:2], "--task", "coppa"]) == 2


def test_eval_refuses_what_it_could_not_write_or_would_ignore_before_it_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "copa.jsonl", [{"query": "is 1", "choices": ["odd", "even"], "gold": 0}])
    before, words = file.read_bytes(), ["eval", str(model(tmp_path / "model", context=100))]
    monkeypatch.setattr(harness, "ask", None)
    asked = [*words, "--task", "copa", "--data", str(tmp_path)]
    for more, match in (
        ([*asked, "--out", str(tmp_path)], "is a folder"),
        ([*asked, "--out", str(file)], "which --out would replace"),
        ([*asked, "--toy-questions", "3"], "is not for benchmarks"),
        ([*asked, "--task", "piqa"], "there is no file of piqa"),
        ([*words, "--out", str(tmp_path / "new.jsonl")], "--out: is for benchmarks"),
        ([*words, "--num-fewshot", "2"], "--num-fewshot: is for benchmarks"),
    ):
        assert cli.main(more) == 2
        assert match in capsys.readouterr().err
    assert file.read_bytes() == before


def test_prompts_that_lost_their_beginning_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"query": f"number {n} " * (40 if n else 1), "choices": ["odd", "even"], "gold": 0} for n in range(3)]
    write(tmp_path / "copa.jsonl", rows)
    words = ["eval", str(model(tmp_path / "model", context=60)), "--data", str(tmp_path)]
    assert cli.main([*words, "--task", "copa", "--task", "core"]) == 0
    said = capsys.readouterr().out
    assert "copa             2 of 3 prompts were longer than the context" in said
    assert "\n2 of 3 prompts were longer than the context, and lost their beginning" in said
