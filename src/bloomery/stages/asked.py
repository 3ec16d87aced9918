"""Questions with one right number, as prompts; and what could not become one."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from bloomery.core.errors import DataError
from bloomery.core.files import whole_file
from bloomery.core.log import progress, say
from bloomery.core.records import read_lines
from bloomery.data.conversations.conversation import Message, Rejected
from bloomery.data.holdout import is_held_out
from bloomery.data.preferences import readers
from bloomery.data.preferences.arithmetic import Problem
from bloomery.data.unpack import Problem as Trouble
from bloomery.evaluation.written import last_number, marked_number
from bloomery.stages.instruct import gone, write_line
from bloomery.stages.judged_rows import REJECTED_ROWS, ROWS, SPLITS, Split, load_prepared, save_prepared
from bloomery.stages.rollouts import Question
from bloomery.tokenizer.chat import Renderer
from bloomery.train.preference.config import Grpo


class AskedQuestion(TypedDict):
    """A line of a split."""

    id: str
    question: str
    solution: str


def prepare(loss: Grpo, hold_out: float, renderer: Renderer, context: int, out: Path) -> dict[str, Any]:
    """
    Write the questions to train and to validate on, and what was rejected; once. Returns what there is to say.

    Raises DataError for sources that cannot be read, and where nothing is left to learn from or to validate on.
    """
    if (known := load_prepared(out)) is not None:
        return known
    kept: dict[Split, list[Problem]] = {split: [] for split in SPLITS}
    reasons, read, cut = Counter[str](), 0, context - loss.answer_tokens
    with whole_file(out / REJECTED_ROWS, "w") as file, progress("prefer", "questions") as meter:
        for one in readers.problems(loss.problems):
            read += 1
            meter.at(read)
            found = one if isinstance(one, Rejected) else _too_long(one, renderer, cut)
            if isinstance(found, Rejected):
                reasons[found.problem.reason] += 1
                write_line(file, found.told)
            elif isinstance(one, Problem):
                kept["val" if is_held_out(one.question, hold_out) else "train"].append(one)
    why = gone("rejected", reasons, out / REJECTED_ROWS)
    for split in SPLITS:
        if not kept[split]:
            what = f"of {read} questions none is left for the split {split}"
            raise DataError(what, where="prefer", cure=f"Add questions, or change prefer.hold_out. {why}".rstrip())
        with whole_file(_file(out, split), "w") as file:
            for one in kept[split]:
                write_line(file, {"id": one.id, "question": one.question, "solution": one.solution})
    if why:
        say(f"prefer: {why}", "yellow")
    return save_prepared(
        out,
        {
            "read": read,
            "kept": read - reasons.total(),
            "rejected": reasons.total(),
            "rejected_by_reason": dict(sorted(reasons.items())),
            "template": renderer.template.hash,
            "train": {"questions": len(kept["train"])},
            "val": {"questions": len(kept["val"])},
        },
    )


def questions(out: Path, split: Split, renderer: Renderer) -> list[Question]:
    """What `prepare` left of a split."""
    found = []
    for row in read_lines(_file(out, split), AskedQuestion):
        number = _right(row["solution"])
        assert number is not None, "a problem without a number was rejected"
        found.append(Question(row["id"], row["question"], tuple(_prompt(row["question"], renderer)), number))
    return found


def _file(out: Path, split: Split) -> Path:
    return out / ROWS / f"{split}.questions.jsonl"


def _prompt(question: str, renderer: Renderer) -> list[int]:
    return renderer.prompt([Message(role="user", content=question)])


def _right(solution: str) -> Any:
    number = marked_number(solution)
    return last_number(solution) if number is None else number


def _too_long(one: Problem, renderer: Renderer, most: int) -> Problem | Rejected:
    row = {"id": one.id, "question": one.question}
    if _right(one.solution) is None:
        return Rejected(one.source, one.place, Trouble("no_number", 0, "its solution holds no number"), row)
    tokens = len(_prompt(one.question, renderer))
    if tokens <= most:
        return one
    what = f"its {tokens} tokens leave less than loss.answer_tokens of the context"
    return Rejected(one.source, one.place, Trouble("too_long", tokens, what), row)


def texts(out: Path) -> Iterator[str]:
    """The questions that were trained on."""
    if _file(out, "train").is_file():
        yield from (row["question"] for row in read_lines(_file(out, "train"), AskedQuestion))
