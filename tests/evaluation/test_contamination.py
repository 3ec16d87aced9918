import random
from pathlib import Path

import pytest

from bloomery.core.config import build
from bloomery.data import documents
from bloomery.data.executor import ExecutorConfig
from bloomery.evaluation import tasks
from bloomery.evaluation.tasks import EvalItem, TaskFiles
from bloomery.stages import decontaminate
from bloomery.stages.config import Decontaminate
from tests.data.made_documents import write_documents
from tests.evaluation.sets import SETS, needs_sets

NAMES = ("hellaswag", "arc_easy", "winogrande", "boolq", "gsm8k", "lambada")


def filler(rng: random.Random) -> str:
    return " ".join(f"word{rng.randrange(10_000)}" for _ in range(60))


@pytest.mark.slow
@needs_sets
def test_every_planted_question_is_dirty_and_without_any_none_is(tmp_path: Path) -> None:
    rng = random.Random(1)
    asked = {name: tasks.rows(name, TaskFiles((SETS,)))[:150] for name in NAMES}
    planted = {name: {item.row for item in rng.sample(items, 20)} for name, items in asked.items()}
    texts = [filler(rng) for _ in range(300)]
    assert not any(tasks.dirty(asked, texts, tmp_path / "before").values())
    for name, items in asked.items():
        for item in items:
            if item.row in planted[name]:
                texts.append(f"{filler(rng)} {item.solved.upper() if item.row % 2 else item.solved}\n{filler(rng)}")
    rng.shuffle(texts)
    found = tasks.dirty(asked, texts, tmp_path)
    for name in NAMES:
        assert planted[name] <= found[name]
        assert len(found[name] - planted[name]) <= 20, name  # those that share a passage, or 13 words, with one of them


def test_a_question_that_several_tasks_ask_is_found_in_each_of_them(tmp_path: Path) -> None:
    rng = random.Random(3)
    items = [EvalItem(prompts=(filler(rng),), choices=("yes", "no"), row=row) for row in range(1, 31)]
    asked = {"copa": items, "core.copa": items[5:], "core.piqa": items[:20]}
    texts = [filler(rng), items[8].solved, items[25].solved]
    found = tasks.dirty(asked, texts, tmp_path)
    assert found == {"copa": {9, 26}, "core.copa": {9, 26}, "core.piqa": {9}}


def test_the_stage_removes_what_the_table_asks(tmp_path: Path) -> None:
    rng = random.Random(2)
    task = tmp_path / "tasks" / "copa_val.jsonl"
    task.parent.mkdir()
    task.write_text(
        '{"premise": "The gray lamp fell off the high shelf.", "question": "effect", '
        '"choice1": "It broke.", "choice2": "It sang.", "label": 0}\n'
    )
    texts = {"clean": filler(rng), "dirty": f"{filler(rng)} The gray lamp fell off the high shelf, therefore it broke."}
    rows = [{"id": name, "text": text, "source": "s", "domain": "web"} for name, text in texts.items()]
    write_documents(tmp_path / "in", rows)
    config = build(Decontaminate, {"tasks": ["copa"], "data": [str(task.parent)]})
    told = decontaminate.run(config, documents.parts(tmp_path / "in"), tmp_path / "out", ExecutorConfig(workers=1))
    assert (told["kept"], told["reasons"]) == (1, {"decontaminate.copa": 1})
    before = decontaminate.external_inputs(config)
    task.write_text(task.read_text().replace("sang", "flew"))
    assert decontaminate.external_inputs(config) != before
