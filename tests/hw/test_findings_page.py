"""docs/findings.md names every finding that the code can make, and none that it cannot."""

import ast
import re
import runpy
from pathlib import Path

from bloomery.core import native
from bloomery.hw.kernel_trials import trials

ROOT = Path(__file__).parents[2]
DOCTOR = ROOT / "src" / "bloomery" / "hw" / "doctor"
FAMILIES = {"native-": native.NAMES, "package-": ("torchvision", "torchaudio")}


def ids_in_code() -> set[str]:
    """Every `Finding(id=…)`, with the families whose names are put together, and all trials of all makers."""
    found = {one.name for vendor in ("amd", "nvidia", "apple", "cpu") for one in trials(vendor)}
    for file in DOCTOR.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding"):
                continue
            given = next(word.value for word in node.keywords if word.arg == "id")
            if isinstance(given, ast.Constant):
                found.add(str(given.value))
            elif isinstance(given, ast.JoinedStr):
                assert isinstance(given.values[0], ast.Constant)
                start = str(given.values[0].value)
                found |= {f"{start}{name}" for name in FAMILIES[start]}
            else:
                assert ast.unparse(given) == "one.name", ast.unparse(given)  # of a trial
    return found


def test_the_page_lists_every_finding_of_the_code_and_no_other() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    first = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`([a-z0-9-]+)`", " ".join(first))
    assert sorted(listed) == sorted(ids_in_code())


def test_the_page_shows_what_single_troubles_are_told() -> None:
    """`python scripts/findings.py --write` brings it up to date."""
    script = runpy.run_path(str(ROOT / "scripts" / "findings.py"))
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert script["block"](page, script["SINGLE"]) == script["troubles"]()
