"""Packages of extras: there, or one error with the command that installs all that are missing."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from bloomery.core import config, extras, pipeline
from bloomery.core.errors import DataError, MissingPackageError
from bloomery.recipe import STAGES, Recipe
from tests.calling import Call

ROOT = Path(__file__).parents[2]
RECIPE = """
name = "much"
[engine]
kind = "ray"
[[fetch.sources]]
kind = "folder"
name = "pages"
domain = "web"
path = "{root}"
patterns = ["*.txt", "*.html"]
[filter]
rules = [{{ kind = "language" }}]
[tokenizer]
kind = "sentencepiece"
vocab_size = 400
[pretrain]
steps = 1
global_batch_tokens = 512
sinks = [{{ kind = "tensorboard" }}, {{ kind = "wandb" }}]
"""


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_installed", lambda package: False)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "a.txt").write_text("A page of text.")
    path = tmp_path / "much.toml"
    path.write_text(RECIPE.format(root=folder))
    return path


def test_a_package_that_is_there_is_handed_over() -> None:
    assert extras.load("pyarrow.compute").utf8_length is not None
    assert extras.pa.schema([]).names == []


def test_a_package_that_is_missing_is_named_with_the_key_and_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resiliparse.extract", None)
    with pytest.raises(DataError, match=r"^fetch: the package resiliparse is needed .*\nInstall it: ") as caught:
        extras.load("resiliparse.extract", where="fetch")
    assert "pip install 'bloomery[web]'" in str(caught.value)


def test_a_package_that_finds_no_memory_is_not_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError("libarrow.so: cannot allocate memory")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ImportError, match="cannot allocate"):
        extras.load("pyarrow")


def test_a_module_of_an_extra_says_how_to_install_it_when_it_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"package pyarrow.*\n.*pip install 'bloomery\[data\]'"):
        _ = extras.pa.schema


def test_every_package_is_in_the_extra_that_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"sklearn": "scikit-learn"}
    for package, extra in extras.EXTRAS.items():
        listed = [re.split(r"[\[<>=;]", line)[0] for line in project["optional-dependencies"][extra]]
        assert names.get(package, package) in listed
        assert not any(line.startswith(names.get(package, package)) for line in project["dependencies"])


def test_one_error_names_all_that_a_run_needs_before_it_begins(
    recipe: Path, tmp_path: Path, nothing_installed: None, call: Call
) -> None:
    code, _, told = call("run", recipe, "--runs", tmp_path / "runs", "--until", "pretrain")
    assert code == 2
    assert told.splitlines()[1] == "error: packages that the recipe needs are not installed:"
    keys = {line.split()[0]: line for line in told.splitlines()[1:] if line.startswith("  ")}
    assert keys.keys() == {*extras.DATA, "ray", "resiliparse", "py3langid", "sentencepiece", "wandb"}
    assert keys["resiliparse"].endswith("(for fetch.sources.0)")
    assert keys["wandb"].endswith("(for pretrain.sinks.1)")
    assert keys["pyarrow"].endswith("(for fetch, classify, filter, dedup, tokenizer, shard)")
    assert "Install them: pip install 'bloomery[data,ray,sentencepiece,wandb,web]'" in told
    assert not list((tmp_path / "runs" / "much").glob("0*"))


def test_only_what_the_stages_asked_for_need_is_named(
    recipe: Path, tmp_path: Path, nothing_installed: None, call: Call
) -> None:
    code, _, told = call("run", recipe, "--runs", tmp_path / "runs", "--until", "fetch")
    assert (code, "bloomery[data,ray,web]" in told, "wandb" in told) == (2, True, False)


def test_a_store_that_cannot_be_asked_names_what_the_other_stages_need_too(
    recipe: Path, tmp_path: Path, nothing_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    words = ['fetch.sources=[{kind="remote", name="b", domain="web", patterns=["s3://b/*.jsonl"]}]']
    bucket = config.load(Recipe, recipe, words)
    with pytest.raises(MissingPackageError, match=r"(?s)s3fs \(for fetch.sources.0\).*bloomery\[data,ray,s3,web\]"):
        pipeline.run(STAGES, bucket, tmp_path / "run", until="filter")


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
def test_a_plan_is_made_without_the_packages_and_says_which_are_missing(
    recipe: Path, tmp_path: Path, nothing_installed: None, call: Call
) -> None:
    words = [recipe, "--runs", tmp_path / "runs", "pretrain.sinks=[]"]
    code, out, _ = call("plan", *words)
    assert (code, "Packages that the recipe needs are not installed:" in out) == (0, True)
    assert "missing_packages" in call("plan", *words, "--json")[1]
    assert "missing_packages" not in call("plan", *words, "--json", "--device", "rtx-4090")[1]


def test_a_stage_that_is_done_needs_nothing(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = config.load(Recipe, recipe, ['engine.kind="local"', 'fetch.sources.0.patterns=["*.txt"]'])
    plans = pipeline.plan_stages(STAGES, plain, tmp_path / "run")
    assert pipeline.execute(plans, until="fetch") == {"fetch": "ran"}
    for package in extras.EXTRAS:
        monkeypatch.setitem(sys.modules, package, None)
    assert pipeline.execute(plans, until="fetch") == {"fetch": "fresh"}
