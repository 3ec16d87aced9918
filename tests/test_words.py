"""scripts/words.py finds names and words that it refuses, and nothing else."""

import runpy
from collections import Counter
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


@pytest.mark.slow  # `make lint` runs the same
def test_package_and_pages_have_no_more_of_them_than_are_noted() -> None:
    uses = WORDS["uses"]([WORDS["SOURCE"], *WORDS["PAGES"]])
    assert Counter(use.name for use in uses) == WORDS["REMAINING"], [
        f"{use.file}:{use.line} {use.name}" for use in uses
    ]
    assert WORDS["mean_of_docstrings"]() <= WORDS["MEAN_OF_DOCSTRINGS"]


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


def faults(folder: Path, text: str, name: str = "page.md") -> list[tuple[str, int]]:
    """What the script says of a page, with the lines."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    reader = "in_page" if path.suffix == ".md" else "in_module"
    return [(use.name, use.line) for use in WORDS[reader](path)]


LONG = "The model " + "reads " * 29 + "text."
GOOD = "A stage reads text. It writes a folder with one file for each part, and a record that names them."


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        (f"# Title\n\n{GOOD}\n\n{LONG}\n", ("long sentence", 5)),
        (f"{GOOD}\n\n- an item\n- {LONG}\n", ("long sentence", 4)),
        (f"| a | b |\n|---|---|\n| c | {LONG} |\n", ("long sentence", 3)),
        ("A run goes\non after a stop.\n", ("goes on", 1)),
        ("It is short.\nIt runs on\na processor.\n", ("processor", 2)),
        ("The file is **read** and the\nsum is [written](x.md).\n", ("passives", 1)),
        ("It is read. It was told to stop. It is split.\n", ("passives", 1)),
        ("The run is stopped. The step is\nsaved. The error is reported.\n", ("passives", 2)),
        (f"{'word ' * 19}ends. {'word ' * 19}ends.\n", ("mean of a page", 1)),
    ],
)
def test_faults_of_pages_are_found_with_their_line(page: str, fault: tuple[str, int], tmp_path: Path) -> None:
    assert fault in faults(tmp_path, page)


@pytest.mark.parametrize(
    "page",
    [
        GOOD,
        f"```text\n{LONG}\nit goes on on a processor\n```\n",
        f"<!-- {LONG} -->\n",
        "Set `goes on = {processor}` and read [a page](goes-on.md).\n",
        "The step is saved. The error is reported.\n\nThe run is stopped.\n",
        f"{'word ' * 8}(e.g. `a.b`, 0.5, Li et al. 2024). W{'ord word ' * 10}ends.\n",
        "\n".join(f"- {'word ' * 20}without an end" for _ in range(5)),
    ],
)
def test_good_pages_and_code_in_them_are_not(page: str, tmp_path: Path) -> None:
    assert faults(tmp_path, page) == []


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (f'raise RunError(\n    "{LONG}"\n)', ("long sentence", 2)),
        (f'raise RunError("no", hint="{LONG[:40]}"\n    f"{{x}} {LONG[40:]}")', ("long sentence", 1)),
        (f'info(f"{LONG[:-1]} {{x}}.")', ("long sentence", 1)),
        (f'p.add_argument("--x", help="{LONG}")', ("long sentence", 1)),
        ('info(f"{x} is skipped and is not read")', ("passives", 1)),
        (f'def f():\n    """\n    Short.\n\n    {LONG}\n    """', ("long docstring", 5)),
        (f'class A:\n    x = 1\n    """{LONG}"""', ("long docstring", 3)),
    ],
)
def test_faults_of_messages_and_docstrings_are_found_with_their_line(
    code: str, fault: tuple[str, int], tmp_path: Path
) -> None:
    assert fault in faults(tmp_path, code, "module.py")


@pytest.mark.parametrize(
    "code",
    [
        f'x = "{LONG}"',
        f'def _f():\n    """{LONG}"""',
        f'_x = 1\n"""{LONG}"""',
        f'def f():\n    """Short.\n\n        {LONG}\n    """',
    ],
)
def test_private_docstrings_and_other_strings_are_not(code: str, tmp_path: Path) -> None:
    assert faults(tmp_path, code, "module.py") == []
