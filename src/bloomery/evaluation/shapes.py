"""
From a row of an evaluation set to what a model is asked.

Prompts and choices are those of lm-evaluation-harness, so that scores can be compared. Rows come as their data sets
have them on the hub, or as llm-foundry and DCLM hand them on: {query, choices, gold}, {context, continuation}, and
{context_options, continuation, gold}. Between prompt and choice stands one space.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a task, as it is put to a model."""

    prompts: tuple[str, ...]
    """One for all choices, or one for each."""
    choices: tuple[str, ...] = ()
    """What may follow; without choices, `answer` is compared with what the model writes."""
    gold: int = 0
    """The place of the right choice."""
    answer: str = ""
    """The right text, with its reasoning where the data has it."""
    head: str = ""
    """What stands before the examples and the question."""
    test: str = ""
    """Code that raises where a program is wrong."""
    row: int = 0
    """From 1, in the task's file."""

    @property
    def question(self) -> str:
        """What no training text may hold."""
        return self.prompts[0]

    @property
    def solved(self) -> str:
        """The question with its right answer, as an example of what is wanted."""
        prompt = self.prompts[self.gold if len(self.prompts) > 1 else 0]
        return f"{prompt} {self.choices[self.gold] if self.choices else self.answer}"


Shape = Callable[[Row], Item]


def ready(row: Row, ending: str = "") -> Item:
    """A row whose question is written out; `ending` is what llm-foundry puts between it and a choice."""
    if "context_options" in row:
        options = tuple(row["context_options"])
        return Item(prompts=options, choices=(row["continuation"],) * len(options), gold=int(row["gold"]))
    if "continuation" in row:
        return Item(prompts=(row["context"].strip() + ending,), choices=(row["continuation"].strip(),))
    return Item(prompts=(row["query"] + ending,), choices=tuple(row["choices"]), gold=int(row["gold"]))


def hellaswag(row: Row) -> Item:
    if "query" in row:
        return ready(row)
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}" if "ctx_a" in row else row["ctx"]
    choices = tuple(map(_without_brackets, row["endings"]))
    return Item(
        prompts=(_without_brackets(f"{row['activity_label']}: {context}"),), choices=choices, gold=int(row["label"])
    )


def _without_brackets(text: str) -> str:
    """WikiHow's headings become sentences, and what else stands in brackets goes."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def arc(row: Row) -> Item:
    if "query" in row:
        return ready(row, "\nAnswer:")
    return _lettered(row, f"Question: {row['question']}\nAnswer:")


def openbookqa(row: Row) -> Item:
    return ready(row) if "query" in row else _lettered(row, row["question_stem"])


def _lettered(row: Row, prompt: str) -> Item:
    """Choices as the hub has AI2's: {"text": […], "label": […]}, and the label of the right one."""
    choices, labels = row["choices"]["text"], list(row["choices"]["label"])
    return Item(prompts=(prompt,), choices=tuple(choices), gold=labels.index(row["answerKey"].strip()))


def piqa(row: Row) -> Item:
    if "query" in row:
        return ready(row, "\nAnswer:")
    return Item(
        prompts=(f"Question: {row['goal']}\nAnswer:",), choices=(row["sol1"], row["sol2"]), gold=int(row["label"])
    )


def boolq(row: Row) -> Item:
    if "query" in row:
        return ready(row, "\nAnswer:")
    right = row["label"] if "label" in row else row["answer"]
    prompt = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return Item(prompts=(prompt,), choices=("no", "yes"), gold=int(right))


def winogrande(row: Row) -> Item:
    """The choices are beginnings here, and what follows is the same."""
    if "sentence" not in row:
        return ready(row)
    before, _, after = row["sentence"].partition("_")
    prompts = tuple(before + row[option] for option in ("option1", "option2"))
    return Item(prompts=prompts, choices=(after.strip(),) * 2, gold=int(row["answer"]) - 1)


def copa(row: Row) -> Item:
    if "query" in row:
        return ready(row)
    link = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = tuple(row[name][0].lower() + row[name][1:] for name in ("choice1", "choice2"))
    return Item(prompts=(f"{row['premise'].strip()[:-1]} {link}",), choices=choices, gold=int(row["label"]))


def commonsense_qa(row: Row) -> Item:
    if "query" in row:
        return ready(row)
    texts = row["choices"]["text"]
    prompt = f"Question: {row['question'].strip()}\n{_listed(texts)}\nAnswer:"
    return Item(prompts=(prompt,), choices=tuple(LETTERS[: len(texts)]), gold=LETTERS.index(row["answerKey"]))


def mmlu(row: Row) -> Item:
    right = row["label"] if "label" in row else row["answer"]
    gold = LETTERS.index(right) if isinstance(right, str) else int(right)
    about = row["subject"].replace("_", " ")
    return Item(
        head=f"The following are multiple choice questions (with answers) about {about}.\n\n",
        prompts=(f"{row['question'].strip()}\n{_listed(row['choices'])}\nAnswer:",),
        choices=tuple(LETTERS[: len(row["choices"])]),
        gold=gold,
    )


def _listed(choices: Sequence[str]) -> str:
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))


def lambada(row: Row) -> Item:
    """The last word of a passage."""
    if "continuation" in row:
        return ready(row)
    context, _, word = row["text"].rpartition(" ")
    return Item(prompts=(context,), choices=(word,))


def gsm8k(row: Row) -> Item:
    return Item(prompts=(f"Question: {row['question']}\nAnswer:",), answer=row["answer"])


def svamp(row: Row) -> Item:
    """The hub's rows have a body and a question, llm-foundry's both in `context`; an equation leads to the answer."""
    question = row["context"] if "context" in row else f"{row['Body'].strip()} {row['Question'].strip()}"
    steps = row["chain_of_thought"] if "context" in row else row["Equation"]
    result = str(row["answer"] if "context" in row else row["Answer"])
    return Item(prompts=(f"Question: {question}\nAnswer:",), answer=f"{steps}\n#### {result}")


def humaneval(row: Row) -> Item:
    test = f"{row['test']}\ncheck({row['entry_point']})\n"
    return Item(prompts=(row["prompt"],), answer=row["canonical_solution"], test=test)
