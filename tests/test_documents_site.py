"""The reference pages are as the code is, pictures as their sources, and the built site leads nowhere but to itself."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import bloomery
from bloomery import cli
from bloomery.recipe import Recipe
from bloomery.train.preference.losses import GRPOLoss, PreferenceLoss
from tests.hw.test_doctor import ids_in_code

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference, drawings, site, planned = script("reference"), script("drawings"), script("site"), script("planned")


def text(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


# --- pages that are generated ----------------------------------------------------------------------------------------


def test_every_generated_page_is_as_the_code_is() -> None:
    """`python scripts/reference.py --write` brings them up to date."""
    stale = [path.name for path, made in reference.generated().items() if path.read_text(encoding="utf-8") != made]
    assert stale == [], "run: python scripts/reference.py --write"


@pytest.mark.slow
@pytest.mark.parametrize("name", planned.PLANS)
def test_a_plan_that_a_page_quotes_is_what_is_planned_now(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python scripts/planned.py --write` and `python scripts/readme.py --write` bring the pages up to date."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert planned.differences({name: planned.planned(name)}) == []


def test_every_row_of_a_generated_table_stands_on_one_line_with_all_its_cells() -> None:
    for path in reference.generated():
        cells = 0
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            there = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            assert not there or (line.endswith("|") and there == (cells or there)), f"{path.name}:{number}"
            cells = there


def test_every_key_of_a_recipe_is_on_its_page_and_has_an_effect() -> None:
    page = text("recipe.md")
    keys = list(reference.every_key())
    assert {key.path for key in keys} >= {"name", "pretrain.optimizer.muon_lr", "fetch.sources.path"}
    assert {key.path for key in keys if f"`{key.path}`" not in page} == set()
    assert {key.path for key in keys if not key.effect} == set()


def test_a_key_runs_its_stage_again_unless_it_is_volatile_or_below_one_that_is() -> None:
    again = {key.path: key.again for key in reference.every_key(Recipe)}
    assert again["pretrain.steps"]
    assert again["pretrain.optimizer.muon_lr"]
    assert not again["pretrain.log_every"]
    assert not again["pretrain.sinks.project"]
    assert not again["filter.engine.workers"]


def test_every_verb_and_option_is_on_its_page() -> None:
    page = text("commands.md")
    for name, parser in reference.verbs(cli.parser()).items():
        for inner in (parser, *reference.verbs(parser).values()):
            flags = [
                flag for action in inner._actions for flag in action.option_strings if flag not in ("-h", "--help")
            ]
            assert {flag for flag in flags if f"`{flag}" not in page} == set(), name
        assert f"### bloomery {name}\n" in page


def test_every_exported_name_is_on_its_page() -> None:
    assert {name for name in bloomery.__all__ if f"### bloomery.{name}\n" not in text("python.md")} == set()


def test_every_finding_of_doctor_is_on_its_page_and_no_other() -> None:
    listed = [id for part in reference.TABLES["doctor"]["parts"] for row in part["rows"] for id in row["ids"]]
    assert sorted(listed) == sorted(ids_in_code())


# --- tables that no code says ----------------------------------------------------------------------------------------


def metric_keys() -> set[str]:
    return {row["key"] for part in reference.TABLES["metrics"]["parts"] for row in part["rows"]}


def file_patterns() -> list[str]:
    return [row["path"] for part in reference.TABLES["files"]["parts"] for row in part["rows"]]


def test_every_metric_of_a_preference_loss_is_on_the_page() -> None:
    pairs = {*PreferenceLoss.metrics, *(f"validation_{name}" for name in PreferenceLoss.metrics)}
    assert pairs | {*GRPOLoss.metrics} <= metric_keys()


def test_a_pattern_of_a_file_is_of_one_folder_unless_it_has_two_stars() -> None:
    assert reference.matches("*-fetch-*/documents/*.parquet", "01-fetch-9f31c2aa/documents/part-000.parquet")
    assert not reference.matches("*-fetch-*/*.parquet", "01-fetch-9f31c2aa/documents/part-000.parquet")
    assert reference.matches("**/model.safetensors", "07-pretrain-9f31c2aa/checkpoints/000000005/model.safetensors")


@pytest.mark.slow
def test_a_small_run_writes_no_file_and_no_metric_that_is_not_on_the_pages(tmp_path: Path) -> None:
    from tests.test_end_to_end import make_place
    from tests.test_preferred_end_to_end import DRAWS, WORDS

    place = make_place(tmp_path)
    more = ('pretrain.sinks=[{kind="tensorboard"}]', "pretrain.main_log=true", "pretrain.grad_stats_every=2")
    for settings in (WORDS, DRAWS):
        assert place.run("finetune.lora.rank=2", "finetune.sample_every=3", *more, *settings) == 0
    root = place.runs / "small"
    # `**` of a folder would match whatever is in it: each file of a model and a checkpoint has a row of its own
    patterns = [pattern for pattern in file_patterns() if not pattern.endswith("/**") or pattern.startswith(".trash")]
    paths = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    assert [path for path in paths if not any(reference.matches(one, path) for one in patterns)] == []
    lines = [json.loads(line) for path in root.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    assert {key for line in lines for key in line} - metric_keys() == set()


def test_the_glossary_is_in_alphabetical_order_and_each_term_links_to_a_page() -> None:
    parts = re.split(r"^## ", text("glossary.md"), flags=re.MULTILINE)[1:-1]
    names = [part.splitlines()[0] for part in parts]
    assert 40 <= len(names) <= 90
    assert names == sorted(names, key=str.lower)
    assert [name for name, part in zip(names, parts, strict=True) if "](" not in part] == []


# --- pictures and the site -------------------------------------------------------------------------------------------


def test_every_picture_is_of_its_source() -> None:
    """`python scripts/drawings.py --write` draws those that are not."""
    assert [path.name for path in drawings.stale()] == []


def test_a_drawing_has_no_style_of_its_own_and_a_picture_loads_nothing() -> None:
    for source in drawings.SOURCES.glob("*.dot"):
        assert not re.search(r"fontname|fontsize|fillcolor|bgcolor|[^\w]color=", source.read_text(encoding="utf-8"))
        svg = drawings.picture(source).read_text(encoding="utf-8")
        assert re.findall(r"https?://[^\"\s]+", svg) == ["http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"]


def test_the_tool_of_the_site_is_pinned_and_brings_no_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert all("==" in line and "torch" not in line for line in extras["docs"])


PAGE = """<html><body><h1 id="top">A</h1><a href="b.html#there">b</a><a href="https://example.org">away</a>{}</body></html>"""


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("", None),
        ('<a href="b.html#missing">b</a>', "a.html: there is no anchor b.html#missing"),
        ('<a href="#missing">b</a>', "a.html: there is no anchor #missing"),
        ('<img src="c.png">', "a.html: there is no c.png"),
        ('<a href="../outside.html">b</a>', "a.html: there is no ../outside.html"),
        ('<script src="https://example.org/x.js"></script>', "a.html: loads https://example.org/x.js"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "a.html: loads //example.org/x.css"),
    ],
)
def test_the_check_of_a_site_finds_what_leads_nowhere_and_what_comes_from_elsewhere(
    tmp_path: Path, more: str, problem: str | None
) -> None:
    (tmp_path / "a.html").write_text(PAGE.format(more))
    (tmp_path / "b.html").write_text('<h2 id="there">B</h2>')
    site.page.cache_clear()
    assert list(site.problems(tmp_path)) == ([problem] if problem else [])


def test_a_style_sheet_that_loads_a_font_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text("@font-face { src: url(https://fonts.example.org/a.woff2) }")
    assert list(site.problems(tmp_path)) == ["x.css: loads https://fonts.example.org/a.woff2"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zensical") is None, reason="needs the extra docs: pip install 'bloomery[docs]'")
def test_the_site_builds_without_a_warning_and_every_link_leads_somewhere() -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "site.py")], check=True, cwd=ROOT)
