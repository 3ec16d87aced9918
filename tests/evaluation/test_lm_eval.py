"""
Our scores are those of lm-evaluation-harness: the same model folder, the same rows, its own task definitions.

It runs in a process of its own, for it warns, and takes seconds to import.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from bloomery.evaluation import harness, tasks
from bloomery.evaluation.harness import EvalRequest
from bloomery.evaluation.tasks import EvalItem, TaskFiles
from bloomery.weights import hf
from tests.evaluation.sets import SETS, needs_sets, write
from tests.weights.made import model

LM_EVAL = importlib.util.find_spec("lm_eval")
COUNT = 50

pytestmark = [
    pytest.mark.slow,
    needs_sets,
    pytest.mark.skipif(LM_EVAL is None, reason="needs lm-eval: pip install lm-eval"),
]

THEIRS = """
import json, sys
from pathlib import Path
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
folder, opening = Path(sys.argv[1]), sys.argv[2] == "True"
model = HFLM(pretrained=str(folder / "model"), add_bos_token=opening, device="cpu", batch_size=7, dtype="float32")
names = [path.stem for path in sorted((folder / "tasks").glob("*.yaml"))]
manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
found = simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0)
told = {}
for name, samples in found["samples"].items():
    rows = sorted(samples, key=lambda one: one["doc_id"])
    told[name] = [
        {metric: one[metric] for metric in ("acc", "acc_norm", "acc_bytes", "perplexity") if metric in one}
        | {"log_p": [float(answer[0]) for answer in one["filtered_resps"]]}
        for one in rows
    ]
print(json.dumps(told))
"""


def lettered(item: EvalItem) -> dict[str, Any]:
    letters = [chr(65 + place) for place in range(len(item.choices))]
    return {"choices": {"text": list(item.choices), "label": letters}, "answerKey": letters[item.gold]}


def hellaswag(item: EvalItem) -> dict[str, Any]:
    about, _, context = item.prompts[0].partition(": ")
    endings = list(item.choices)
    return {"activity_label": about, "ctx_a": context, "ctx_b": "", "endings": endings, "label": str(item.gold)}


def arc(item: EvalItem) -> dict[str, Any]:
    question = item.prompts[0].removeprefix("Question: ").removesuffix("\nAnswer:")
    return {"question": question, **lettered(item)}


def boolq(item: EvalItem) -> dict[str, Any]:
    passage, _, question = (
        item.prompts[0].removeprefix("Passage: ").removesuffix("?\nAnswer:").rpartition("\nQuestion: ")
    )
    return {"passage": passage, "question": question, "label": item.gold}


def winogrande(item: EvalItem) -> dict[str, Any]:
    first, second = (prompt.split() for prompt in item.prompts)
    same = next(place for place, words in enumerate(zip_longest(first, second)) if words[0] != words[1])
    options = [" ".join(words[same:]) for words in (first, second)]
    sentence = f"{' '.join(first[:same])} _ {item.choices[0]}"
    return {"sentence": sentence, "option1": options[0], "option2": options[1], "answer": str(item.gold + 1)}


def mmlu(item: EvalItem) -> dict[str, Any]:
    question, *choices = item.prompts[0].removesuffix("\nAnswer:").rsplit("\n", 4)
    plain = [choice[3:] for choice in choices]
    return {"question": question, "subject": "abstract_algebra", "choices": plain, "answer": item.gold}


def piqa(item: EvalItem) -> dict[str, Any]:
    goal = item.prompts[0].removeprefix("Question: ").removesuffix("\nAnswer:")
    return {"goal": goal, "sol1": item.choices[0], "sol2": item.choices[1], "label": item.gold}


def goals() -> list[EvalItem]:
    """Questions as PIQA's, which is not among the shared sets."""
    rows = []
    for number in range(COUNT):
        words = ("a spoon", "the old towel", "warm water and 2 stones", "glue", "nothing at all")
        one, other = words[number % 5], words[(number // 5 + number + 1) % 5]
        rows.append({"goal": f"Open jar {number}", "sol1": f"Use {one}.", "sol2": f"Take {other}", "label": number % 2})
    return [tasks.piqa(row) for row in rows]


NATIVE: Mapping[str, tuple[str, str, Callable[[EvalItem], dict[str, Any]]]] = {
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation", hellaswag),
    "arc_easy": ("arc/arc_easy.yaml", "test", arc),
    "openbookqa": (
        "openbookqa/openbookqa.yaml",
        "test",
        lambda item: {"question_stem": item.prompts[0], **lettered(item)},
    ),
    "boolq": ("super_glue/boolq/default.yaml", "validation", boolq),
    "winogrande": ("winogrande/default.yaml", "validation", winogrande),
    "lambada": (
        "lambada/lambada_openai.yaml",
        "test",
        lambda item: {"text": f"{item.prompts[0]} {item.choices[0]}"},
    ),
    "mmlu": ("mmlu/default/mmlu_abstract_algebra.yaml", "test", mmlu),
    "piqa": ("piqa/piqa.yaml", "validation", piqa),
}
"""Task -> lm-eval's definition, the split it asks, and a row as the hub has it."""


@pytest.fixture(scope="module", params=[True, False], ids=["with an opening token", "without"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its tasks' rows, and what lm-eval says of them."""
    assert LM_EVAL is not None
    assert LM_EVAL.submodule_search_locations is not None
    made = tmp_path_factory.mktemp("both")
    model(made / "model", context=256)
    stock = Path(LM_EVAL.submodule_search_locations[0]) / "tasks"
    for name, (definition, split, native) in NATIVE.items():
        items = goals() if name == "piqa" else tasks.rows(name, TaskFiles((SETS,)))
        picked = items[:: max(1, len(items) // COUNT)][:COUNT] if name != "mmlu" else items[:COUNT]
        rows = write(made / "rows" / f"{name}_{split}.jsonl", [native(item) for item in picked])
        metrics = (
            ""
            if name == "lambada"
            else "metric_list:\n"
            + "".join(
                f"  - metric: {metric}\n    aggregation: mean\n    higher_is_better: true\n"
                for metric in ("acc", "acc_norm", "acc_bytes")
            )
        )
        (made / "tasks").mkdir(exist_ok=True)
        (made / "tasks" / f"local_{name}.yaml").write_text(
            f"include: {stock / definition}\ntask: local_{name}\ndataset_path: json\ndataset_name: null\n"
            "training_split: null\nfewshot_split: null\n"
            f"validation_split: {split if split == 'validation' else 'null'}\n"
            f"test_split: {split if split == 'test' else 'null'}\n"
            f"dataset_kwargs:\n  data_files:\n    {split}: {rows}\n{metrics}"
        )
    opening = bool(request.param)
    (made / "opening.json").write_text(json.dumps(opening))
    environment = dict(os.environ, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(made / "cache"))
    command = [sys.executable, "-W", "ignore", "-c", THEIRS, str(made), str(opening)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (made / "theirs.json").write_text(ran.stdout.splitlines()[-1])
    return made


@pytest.mark.parametrize("name", NATIVE)
def test_every_item_is_judged_as_by_lm_eval(name: str, folder: Path) -> None:
    theirs = json.loads((folder / "theirs.json").read_text())[f"local_{name}"]
    loaded = hf.load(folder / "model")
    opening = json.loads((folder / "opening.json").read_text())
    place = TaskFiles((folder / "rows",))
    ours = harness.evaluate(loaded, EvalRequest(tasks=(name,), files=place, opening=opening))[name]
    items = tasks.rows(name, place)
    assert len(ours) == len(theirs) == COUNT
    for item, mine, yours in zip(items, ours, theirs, strict=True):
        if name == "lambada":
            assert mine.facts["log_p"] == pytest.approx(yours["log_p"][0], abs=2e-3)
            assert mine.scores["acc"] == yours["acc"]
            continue
        assert mine.facts["log_p"] == pytest.approx(yours["log_p"], abs=2e-3)
        assert mine.scores["acc"] == yours["acc"]
        if name == "winogrande":  # what differs there are the beginnings, and lm-eval would divide by their lengths
            continue
        assert mine.scores["acc_norm"] == yours["acc_bytes"]
        if all(choice.isascii() for choice in item.choices):
            assert mine.scores["acc_norm"] == yours["acc_norm"]
