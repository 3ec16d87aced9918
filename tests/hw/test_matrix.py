"""Each machine of the matrix is told exactly what is wrong with it, and how to mend it."""

import re
import runpy
from pathlib import Path

import pytest

from bloomery.hw.doctor.report import as_lines, examine, exit_code
from tests.hw.matrix import MATRIX

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", MATRIX)
def test_each_machine_is_told_what_is_wrong_with_it_and_nothing_else(tmp_path: Path, name: str) -> None:
    findings = examine(MATRIX[name].build(tmp_path), tmp_path / "runs")
    assert {one.id: one.status for one in findings if one.status != "ok"} == MATRIX[name].wrong, as_lines(findings)


@pytest.mark.parametrize("name", MATRIX)
def test_what_is_wrong_comes_with_its_value_and_a_cure_and_what_is_well_with_none(tmp_path: Path, name: str) -> None:
    for one in examine(MATRIX[name].build(tmp_path), tmp_path / "runs"):
        assert one.value, one
        assert bool(one.hint) == (one.status != "ok"), one


@pytest.mark.parametrize("name", MATRIX)
def test_the_exit_code_is_that_of_the_worst(tmp_path: Path, name: str) -> None:
    expected = max(({"warn": 1, "fail": 2}[status] for status in MATRIX[name].wrong.values()), default=0)
    assert exit_code(examine(MATRIX[name].build(tmp_path), tmp_path / "runs")) == expected


def test_on_a_hygon_dcu_nothing_says_to_install_torch_by_pip(tmp_path: Path) -> None:
    for name in ("hygon", "hygon-without-torch"):
        findings = examine(MATRIX[name].build(tmp_path / name), tmp_path / "runs")
        assert not [one for one in findings if "pip install" in one.hint or "wheel" in one.hint]


def test_the_page_shows_what_each_machine_is_told() -> None:
    """`python scripts/findings.py --write` brings it up to date."""
    script = runpy.run_path(str(ROOT / "scripts" / "findings.py"))
    page = (ROOT / "docs" / "hw.md").read_text(encoding="utf-8")
    assert script["block"](page, script["MACHINES"]) == script["machines"]()


def test_the_readme_shows_findings_that_there_are(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"^✓ (\S+)", readme.partition("<!-- doctor -->")[2].partition("<!-- /doctor -->")[0], re.MULTILINE
    )
    known = {one.id for one in examine(MATRIX["no-gpu"].build(tmp_path), tmp_path / "runs")}
    assert shown
    assert set(shown) <= known | {"shm"}
