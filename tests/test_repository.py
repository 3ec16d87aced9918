"""Workflows call the same make targets, the package names what it runs on, and links of documents lead to files."""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md"]
PINNED = re.compile(r"[\w.-]+/[\w./-]+@(v\d+\.\d+\.\d+|[0-9a-f]{40})")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
VERSION = "Programming Language :: Python :: "


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def versions() -> list[str]:
    """The versions of Python that the package says it runs on."""
    named = (line.removeprefix(VERSION) for line in project()["project"]["classifiers"] if line.startswith(VERSION))
    return [version for version in named if "." in version]


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def test_there_are_workflows_for_tests_documents_and_wheels() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "test", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_that_are_there_and_actions_of_one_version(path: Path) -> None:
    called = [word for step in steps(path) for word in re.findall(r"\bmake ([\w-]+)", step.get("run", ""))]
    assert set(called) <= targets()
    assert called or path.stem == "wheels"
    for step in steps(path):
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or PINNED.fullmatch(step["uses"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_ends_by_itself(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        assert job["timeout-minutes"] <= 180
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_tests_and_wheels_are_for_the_versions_and_systems_that_the_package_names() -> None:
    assert versions() == ["3.11", "3.12", "3.13", "3.14"]
    assert project()["project"]["requires-python"] == f">={versions()[0]}"
    test, wheels = (jobs(ROOT / ".github" / "workflows" / f"{name}.yml") for name in ("test", "wheels"))
    assert test["check"]["strategy"]["matrix"]["python"] == versions()
    assert test["check"]["strategy"]["matrix"]["os"] == wheels["wheels"]["strategy"]["matrix"]["os"]
    assert project()["tool"]["cibuildwheel"]["build"].split() == [f"cp{one.replace('.', '')}-*" for one in versions()]


def test_what_pip_installs_by_default_is_neither_torch_nor_the_data_half() -> None:
    names = {re.split(r"[\[<>=;]", line)[0] for line in project()["project"]["dependencies"]}
    assert names >= {"gguf", "jinja2"}
    assert not names & {"torch", "duckdb", "pyarrow", "scipy", "scikit-learn"}


def test_other_files_for_people_and_hosts_can_be_read() -> None:
    for path in (*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".pre-commit-config.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == project()["project"]["version"]
    assert citation["license"] == project()["project"]["license"]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_document_leads_to_a_file(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_index_links_every_page_and_the_readme_leads_to_each_in_two_links() -> None:
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if page.parent.name == "decisions"}

    def linked(page: Path) -> set[Path]:
        return {(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))} & pages

    index, readme = ROOT / "docs" / "index.md", ROOT / "README.md"
    assert pages - linked(index) - decisions == {index}
    assert decisions <= linked(ROOT / "docs" / "decisions" / "README.md") | linked(index)
    assert index in linked(readme)
