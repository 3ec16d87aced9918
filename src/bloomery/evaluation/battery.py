"""
The benchmark prompts of 1386.ai, read from its own file scripts/eval_prompts.py, which is parsed and never run.

    FACTUAL       right where one of the keywords is in the answer, as a word or a beginning of one
    CODE          right where the function that is written passes the tests; needs leave to run code
    INSTRUCTION   right where exactly as many different things are listed as were asked for
    ESSAY         right from 25 words on, with two keywords and no sentence twice
    CONVO         right where something is said, three words at least, and nothing is refused
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.evaluation.shapes import Item

FEWEST_WORDS, FEWEST_KEYWORDS, FEWEST_SPOKEN = 25, 2, 3
REFUSAL = re.compile(r"\b(as an ai|i cannot|i can't|i am unable|i'm unable|i'm sorry)\b", re.IGNORECASE)


def rows_of(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The prompts of a Python file whose lists are literals. Raises DataError for a file without."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"is no Python: {error}", where=str(path), cure="Name scripts/eval_prompts.py.") from None
    number = 0
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if not (isinstance(node, ast.Assign) and isinstance(target, ast.Name) and target.id in CHECKS):
            continue
        for one in _literal(node.value, path):
            number += 1
            yield number, {"kind": target.id, **(one if isinstance(one, dict) else {"q": one})}


def _literal(value: ast.expr, path: Path) -> list[Any]:
    try:
        return list(ast.literal_eval(value))
    except (ValueError, TypeError) as error:
        cure = "Write the prompts out: this file is read, and never run."
        raise DataError(f"holds something else than literals: {error}", where=str(path), cure=cure) from None


def prompt(row: Mapping[str, Any]) -> Item:
    """A row of `rows_of`: `answer` holds what its check needs, as JSON."""
    facts = {key: value for key, value in row.items() if key != "q"}
    test = ""
    if row["kind"] == "CODE":
        test = "".join(f"assert {row['fn']}(*{tuple(given)!r}) == {wanted!r}\n" for given, wanted in row["tests"])
        facts.pop("tests")
    return Item(prompts=(row["q"],), answer=json.dumps(facts), test=test)


def is_right(item: Item, said: str) -> bool:
    """What the check of a prompt says of an answer; programs are run instead."""
    facts = json.loads(item.answer)
    return CHECKS[facts["kind"]](facts, said)


def _has_keyword(facts: Mapping[str, Any], said: str) -> bool:
    return any(_holds(said, keyword) for keyword in facts["kw"])


def _holds(said: str, keyword: str) -> bool:
    """At the beginning of a word; numbers only whole: 0 is not in 100."""
    ending = r"(?!\d)" if keyword.strip()[-1].isdigit() else ""
    return re.search(rf"(?<!\w){re.escape(keyword.strip())}{ending}", said, re.IGNORECASE) is not None


def _lists_as_many(facts: Mapping[str, Any], said: str) -> bool:
    lines = [line for line in said.strip().splitlines() if line.strip()]
    numbered = [line for line in lines if re.match(r"\s*(\d+[.)]|[-*•])\s*\S", line)]
    if not numbered and len(lines) == 1:
        listed = re.split(r",\s*(?:and\s+)?|\s+and\s+", lines[0].rpartition(":")[2].strip(" ."))
    else:
        listed = [re.sub(r"^\s*(\d+[.)]|[-*•])\s*", "", line) for line in numbered or lines]
    different = {one.strip(" .").lower() for one in listed if one.strip(" .")}
    return len(different) == len(listed) and len(listed) == int(facts["n"])


def _is_essay(facts: Mapping[str, Any], said: str) -> bool:
    sentences = [one.strip().lower() for one in re.split(r"[.!?]\s", said) if one.strip()]
    keywords = sum(_holds(said, keyword) for keyword in facts["kw"])
    long = len(said.split()) >= FEWEST_WORDS
    return long and keywords >= FEWEST_KEYWORDS and len(set(sentences)) == len(sentences) and not REFUSAL.search(said)


def _speaks(facts: Mapping[str, Any], said: str) -> bool:
    return len(said.split()) >= FEWEST_SPOKEN and not REFUSAL.search(said)


def _is_program(facts: Mapping[str, Any], said: str) -> bool:
    raise AssertionError("programs are run")


CHECKS: Mapping[str, Callable[[Mapping[str, Any], str], bool]] = {
    "FACTUAL": _has_keyword,
    "CODE": _is_program,
    "INSTRUCTION": _lists_as_many,
    "ESSAY": _is_essay,
    "CONVO": _speaks,
}
