"""scripts/words.py finds names and words that it refuses, and nothing else."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORDS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "words.py"))


def names(folder: Path, text: str, package: str = "train") -> list[str]:
    """What the script says of one module of a package, in order of its lines."""
    path = folder / package / "module.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    before, WORDS["words"].__globals__["SOURCE"] = WORDS["words"].__globals__["SOURCE"], folder
    try:
        return [use.name for use in WORDS["uses"]([path])]
    finally:
        WORDS["words"].__globals__["SOURCE"] = before


def test_the_package_has_none_of_them() -> None:
    assert [f"{use.file}:{use.line} {use.name}" for use in WORDS["uses"]([WORDS["SOURCE"]])] == []


@pytest.mark.parametrize(
    "code",
    [
        "def f(one): ...",
        "def found(): ...",
        "made = 1",
        "class A:\n    place: int",
        "x.told()",
        "for part in x: ...",
        "with x as given: ...",
        "try: ...\nexcept E as thing: ...",
        "lambda taken: 1",
        "[\n    wanted\n    for wanted in x\n]",
    ],
)
def test_names_that_say_nothing_are_found(code: str, tmp_path: Path) -> None:
    assert "identifiers" in names(tmp_path, code)


@pytest.mark.parametrize("code", ["y = [one for one in x]", "document = 1", "partial = given_names = 2", "x = 'one'"])
def test_names_that_say_something_are_not(code: str, tmp_path: Path) -> None:
    assert names(tmp_path, code) == []


@pytest.mark.parametrize(
    ("sentence", "word"),
    [
        ("the run goes on from here", "goes on"),
        ("it is told in a line", "is told"),
        ("matrix products in float32", "products"),
        ("on the processor alone", "processor"),
        ("the scores of each token", "scores of a model"),
        ("documents that are held out", "held out"),
        ("the ids of a text", "ids"),
        ("say the cure", "cure"),
    ],
)
def test_words_of_our_own_are_found_in_text(sentence: str, word: str, tmp_path: Path) -> None:
    for code in (f'"""A module: {sentence}."""', f"# {sentence}", f"x = f'{sentence} {{y}}'"):
        assert names(tmp_path, code) == [word]


@pytest.mark.parametrize("sentence", ["an inner product of two vectors", "attention scores of a query"])
def test_words_of_the_field_are_not(sentence: str, tmp_path: Path) -> None:
    assert names(tmp_path, f"# {sentence}") == []
