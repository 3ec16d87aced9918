import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.core.errors import BloomeryError, ConfigError, DataError
from bloomery.data import decontamination
from bloomery.evaluation import tasks
from bloomery.evaluation.tasks import TASKS, EvalItem, TaskFiles
from tests.evaluation.sets import SETS, needs_sets, write

ON_THE_HUB: dict[str, tuple[dict[str, Any], str, int]] = {
    "hellaswag": (
        {
            "activity_label": "Baking",
            "ctx_a": "A cook [step] stirs  the dough. [title]",
            "ctx_b": "then she",
            "endings": ["sings.", "[b] rests.", "c", "d"],
            "label": "1",
        },
        "Baking: A cook stirs the dough.. Then she  rests.",
        1,
    ),
    "arc_easy": (
        {"question": "Why?", "choices": {"text": ["So.", "Thus."], "label": ["1", "2"]}, "answerKey": "2"},
        "Question: Why?\nAnswer: Thus.",
        1,
    ),
    "piqa": (
        {"goal": "Open a jar", "sol1": "Twist.", "sol2": "Wait.", "label": 0},
        "Question: Open a jar\nAnswer: Twist.",
        0,
    ),
    "openbookqa": (
        {"question_stem": "Ice is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": " B"},
        "Ice is cold",
        1,
    ),
    "boolq": (
        {"passage": "Ice is cold.", "question": "is ice cold", "label": 1},
        "Ice is cold.\nQuestion: is ice cold?\nAnswer: yes",
        1,
    ),
    "winogrande": (
        {"sentence": "Tom thanked Ann as _ had help.", "option1": "Tom", "option2": "Ann", "answer": "1"},
        "Tom thanked Ann as Tom had help.",
        0,
    ),
    "copa": (
        {
            "premise": "It rained.",
            "question": "effect",
            "choice1": "The road dried.",
            "choice2": "The road got wet.",
            "label": 1,
        },
        "It rained therefore the road got wet.",
        1,
    ),
    "commonsense_qa": (
        {"question": "Where? ", "choices": {"text": ["here", "there"], "label": ["A", "B"]}, "answerKey": "A"},
        "Question: Where?\nA. here\nB. there\nAnswer: A",
        0,
    ),
    "mmlu": (
        {"question": "2+2?", "subject": "high_school_mathematics", "choices": ["1", "4", "3", "2"], "answer": 1},
        "2+2?\nA. 1\nB. 4\nC. 3\nD. 2\nAnswer: B",
        1,
    ),
    "lambada": ({"text": "She saw the old lamp"}, "She saw the old lamp", 0),
    "gsm8k": ({"question": "1+1?", "answer": "It is 2.\n#### 2"}, "Question: 1+1?\nAnswer: It is 2.\n#### 2", 0),
    "svamp": (
        {"Body": "Ann has 2.", "Question": "And 1 more?", "Equation": "( 2.0 + 1.0 )", "Answer": "3"},
        "Question: Ann has 2. And 1 more?\nAnswer: ( 2.0 + 1.0 )\n#### 3",
        0,
    ),
}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_row_of_the_hub_becomes_the_prompt_of_the_field(name: str, tmp_path: Path) -> None:
    row, solved, gold = ON_THE_HUB[name]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}_test.parquet")
    (item,) = tasks.rows(name, TaskFiles((tmp_path,)))
    assert (item.solved, item.gold, item.row) == (solved, gold, 1)


def test_every_task_of_the_table_is_told_by_a_row_of_the_hub() -> None:
    assert set(ON_THE_HUB) == {name for name, task in TASKS.items() if task.dataset and task.kind != "program"} - {
        "arc_challenge"
    }


COUNTS = {
    "hellaswag": 10042,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "openbookqa": 500,
    "boolq": 3270,
    "winogrande": 1267,
    "copa": 100,
    "commonsense_qa": 1221,
    "mmlu": 14042,
    "lambada": 5153,
    "gsm8k": 1319,
    "svamp": 300,
}


@needs_sets
@pytest.mark.parametrize("name", COUNTS)
def test_every_row_of_the_real_sets_is_a_question_with_a_right_answer(name: str) -> None:
    items = tasks.rows(name, TaskFiles((SETS,)))
    assert len(items) == COUNTS[name]
    assert [item.row for item in items] == list(range(1, len(items) + 1))
    if TASKS[name].kind == "choice" and name != "commonsense_qa":  # llm-foundry's has four choices
        assert sum(1 / len(item.choices) for item in items) / len(items) == pytest.approx(TASKS[name].chance, abs=2e-3)
    for item in items:
        assert item.question
        assert (0 <= item.gold < len(item.choices)) if item.choices else item.answer
        assert all(prompt == prompt.rstrip() or prompt.endswith("?") for prompt in item.prompts) or name == "openbookqa"


# --- where rows are ------------------------------------------------------------------------------------------------


def test_of_several_splits_the_one_that_is_asked_is_found_and_examples_come_from_another(tmp_path: Path) -> None:
    for split in ("train", "test", "validation"):
        write(tmp_path / "deep" / f"gsm8k_{split}.jsonl", [{"question": split, "answer": "#### 1"}])
    place = TaskFiles((tmp_path,))
    assert [one.prompts[0] for one in tasks.rows("gsm8k", place)] == ["Question: test\nAnswer:"]
    assert [one.prompts[0] for one in tasks.rows("gsm8k", place, examples=True)] == ["Question: train\nAnswer:"]


def test_a_file_that_is_named_itself_may_be_called_as_it_likes(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{"query": "a", "choices": ["b", "c"], "gold": 1}])
    assert tasks.rows("copa", tasks.task_files(["copa"], [path]))[0].solved == "a c"
    with pytest.raises(
        DataError, match=r"mine\.jsonl: there is no file of copa\n.*any name where .* one task is asked"
    ):
        tasks.rows("copa", tasks.task_files(["copa", "piqa"], [path]))


@pytest.mark.parametrize(
    "called", ["arc_easy_test.jsonl", "ARC-Easy.jsonl", "squad.jsonl", "lambada_openai_test.jsonl"]
)
def test_a_file_that_is_called_as_another_task_is_never_asked_as_this_one(called: str, tmp_path: Path) -> None:
    path = write(tmp_path / called, [{"query": "a", "choices": ["b", "c"], "gold": 1}])
    with pytest.raises(
        DataError, match=r"there is no file of arc_challenge; its name would be one of (arc_easy|squad|lam)"
    ):
        tasks.rows("arc_challenge", tasks.task_files(["arc_challenge"], [path]))


def test_a_folder_with_one_file_of_another_task_is_told_and_not_read_as_a_file(tmp_path: Path) -> None:
    write(tmp_path / "arc_easy_test.jsonl", [{"query": "a", "choices": ["b", "c"], "gold": 1}])
    told = r"there is no file of copa\nAdd a file named copa\.jsonl .* Here is arc_easy_test\.jsonl\."
    with pytest.raises(DataError, match=told):
        tasks.rows("copa", tasks.task_files(["copa"], [tmp_path]))


def broken(tmp_path: Path, files: dict[str, list[dict[str, Any]]], name: str = "copa") -> None:
    for file, rows in files.items():
        write(tmp_path / file, rows)
    tasks.rows(name, TaskFiles((tmp_path,)))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"x.jsonl": [], "y.jsonl": []}, r"there is no file of copa\n.*copa\.jsonl"),
        ({"a/copa.jsonl": [], "b/copa.jsonl": []}, r"a/copa\.jsonl: is copa, and so is .*b/copa\.jsonl"),
        (
            {"copa.jsonl": [{"query": "a"}]},
            r"copa\.jsonl:1: is not a row of this task: KeyError: 'choices'; its fields: query",
        ),
        ({"copa.jsonl": []}, r"has no rows of copa"),
    ],
)
def test_what_is_wrong_with_a_set_is_told_with_its_place(
    tmp_path: Path, files: dict[str, list[dict[str, Any]]], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        broken(tmp_path, files)


def test_an_unknown_task_and_a_folder_that_is_not_there_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task 'helaswag'\nUse one of hellaswag, arc_easy"):
        tasks.named(["helaswag"])
    with pytest.raises(DataError, match="none: does not exist"):
        tasks.rows("copa", TaskFiles((tmp_path / "none",)))
    assert issubclass(DataError, BloomeryError)


# --- examples ------------------------------------------------------------------------------------------------------


def test_examples_stand_before_a_question_the_same_in_any_company_and_never_the_question_itself() -> None:
    pool = [
        EvalItem(prompts=(f"Q{number}",), choices=("yes", "no"), gold=number % 2, row=number) for number in range(1, 30)
    ]
    first = [tasks.prompted(item, pool, 3).prompts[0] for item in pool]
    again = [tasks.prompted(item, pool, 3).prompts[0] for item in random.Random(0).sample(pool, len(pool))]
    assert sorted(first) == sorted(again)
    for item, prompt in zip(pool, first, strict=True):
        *examples, question = prompt.split("\n\n")
        assert question == item.question
        assert len(set(examples)) == 3
        assert set(examples) <= {one.solved for one in pool} - {item.solved}
    with pytest.raises(DataError, match="num_fewshot=40 is more than the 28 examples"):
        tasks.prompted(pool[0], pool, 40)


def test_examples_are_of_the_same_subject_and_its_heading_stands_once() -> None:
    def row(subject: str, number: int) -> EvalItem:
        facts = {"question": f"{subject} {number}", "subject": subject, "choices": ["a", "b"], "answer": 0}
        return replace(tasks.mmlu(facts), row=number)

    pool = [row(subject, number) for subject in ("art", "law") for number in range(6)]
    prompt = tasks.prompted(row("law", 9), pool, 5).prompts[0]
    assert prompt.count("about law.") == 1
    assert "art" not in prompt
    assert prompt.endswith("\n\nlaw 9\nA. a\nB. b\nAnswer:")


# --- what decontamination looks for --------------------------------------------------------------------------------


@needs_sets
def test_an_answer_without_its_number_is_refused_and_never_right(tmp_path: Path) -> None:
    file = write(tmp_path / "gsm8k_test.jsonl", [{"question": "The capital of France?", "answer": "18"}])
    with pytest.raises(DataError, match="has no number after ####"):
        tasks.rows("gsm8k", TaskFiles((file,)))


def test_a_short_question_is_found_without_the_list_of_its_choices(tmp_path: Path) -> None:
    row = {"question": "Which organ pumps blood?", "choices": ["heart", "liver"], "answer": 0, "subject": "anatomy"}
    items = tasks.rows("mmlu", TaskFiles((write(tmp_path / "mmlu_test.jsonl", [row]),)))
    text = "A page. Which organ pumps blood? The heart does."
    assert tasks.dirty({"mmlu": items}, [text], tmp_path) == {"mmlu": {1}}
    assert tasks.dirty({"mmlu": items}, ["A page of other words."], tmp_path) == {"mmlu": set()}


@pytest.mark.parametrize("name", ["hellaswag", "winogrande", "boolq", "gsm8k"])
def test_decontamination_reads_the_questions_of_the_table(name: str, tmp_path: Path) -> None:
    items = tasks.rows(name, TaskFiles((SETS,)))[:20]
    path = write(tmp_path / f"{name}.jsonl", list(tasks.as_rows(items)))
    found = {piece.row for piece in decontamination.task_texts(path)}
    assert found == set(range(1, 21))
    assert json.loads(path.read_text().splitlines()[0])


def test_half_a_surrogate_pair_in_a_task_is_told_with_its_row(tmp_path: Path) -> None:
    row = {"task_id": "T/1", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1\n"}
    write(tmp_path / "humaneval.jsonl", [{**row, "test": "def check(f):\n    assert f() == '\ud83d'\n"}])
    with pytest.raises(DataError, match=r"humaneval\.jsonl:1: .* half a surrogate pair at character 33;"):
        tasks.rows("humaneval", TaskFiles((tmp_path,)))
