import json
import re
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.errors import DataError
from bloomery.evaluation import tasks
from bloomery.evaluation.tasks import EvalItem, TaskFiles
from tests.shared import SHARED, needs

SEEDS = SHARED / "reference" / "seeds.md"

FILE = """
import os
FACTUAL = [{"q": "Which metal rusts?", "kw": ["iron"]}, {"q": "How many is none?", "kw": ["0", "zero"]}]
CODE = [{"q": "Write one().", "fn": "one", "tests": [((), 1)]}]
INSTRUCTION = [{"q": "Name two birds.", "n": 2}]
ESSAY = [{"q": "Write of rain.", "kw": ["rain", "cloud", "wet"]}]
CONVO = ["Hi!"]
OTHER = [os.getcwd()]
"""


def items(tmp_path: Path) -> list[EvalItem]:
    (tmp_path / "eval_prompts.py").write_text(FILE)
    return tasks.rows("prompts", TaskFiles((tmp_path,)))


def test_prompts_are_read_as_literals_and_nothing_is_run(tmp_path: Path) -> None:
    found = items(tmp_path)
    assert [item.question for item in found][0::2] == ["Which metal rusts?", "Write one().", "Write of rain."]
    assert [bool(item.test) for item in found] == [False, False, True, False, False, False]
    assert found[2].test == "assert one(*()) == 1\n"
    (tmp_path / "eval_prompts.py").write_text("FACTUAL = [__import__('os').system('false')]")
    with pytest.raises(DataError, match="more than literals"):
        tasks.rows("prompts", TaskFiles((tmp_path,)))


RAIN = "Rain falls from a cloud when drops grow heavy. Then the ground gets wet and seeds begin to grow in it. "

SAID: list[tuple[int, str, bool]] = [
    (0, "It is IRON, of course.", True),
    (0, "The environment does.", False),
    (1, "There are 0 of them", True),
    (1, "There are 100", False),
    (1, "zero", True),
    (3, "1. Crow\n2. Owl", True),
    (3, "Two birds: a crow and an owl.", True),
    (3, "crow, owl, tit", False),
    (3, "- owl\n- owl", False),
    (4, RAIN + "People stay at home and read until it is over.", True),
    (4, "Rain and cloud.", False),
    (4, RAIN + RAIN, False),
    (5, "Hello, how are you?", True),
    (5, "I'm sorry, I cannot talk.", False),
    (5, "", False),
]


@pytest.mark.parametrize(("number", "said", "right"), SAID)
def test_every_kind_of_prompt_has_its_check(number: int, said: str, right: bool, tmp_path: Path) -> None:
    assert tasks.is_right(items(tmp_path)[number], said) is right


@needs(SEEDS)
def test_the_real_prompts_are_all_read(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", SEEDS.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "eval_prompts.py").write_text(next(one for one in code if "FACTUAL = [" in one), encoding="utf-8")
    found = tasks.rows("prompts", TaskFiles((tmp_path,)))
    kinds = [json.loads(item.answer)["kind"] for item in found]
    counts: dict[str, Any] = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    assert counts == {"FACTUAL": 40, "CODE": 12, "INSTRUCTION": 10, "ESSAY": 8, "CONVO": 6}
