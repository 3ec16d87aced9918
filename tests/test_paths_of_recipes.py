"""No path of a recipe is read without end, and `plan` looks at all of them."""

import glob
import os
import time
from pathlib import Path

import pytest

from bloomery.core import config, pipeline
from bloomery.core.errors import ConfigError, DataError
from bloomery.data.sources import local
from bloomery.recipe import STAGES, Recipe
from bloomery.stages import config as sections

pytestmark = pytest.mark.skipif(os.name != "posix", reason="special files are POSIX")

RECIPE = """
name = "a"
[[fetch.sources]]
kind = "worlds"
name = "w"
domain = "w"
count = 10
[pretrain]
steps = 1
global_batch_tokens = 256
[finetune]
steps = 1
global_batch_tokens = 256
"""
PATHS = {
    "classify.labeled": "classify.labeled={}",
    "classifier": "classify.classifiers=[{{kind='labeled',name='q',keep='high',path={}}}]",
    "bad words": "filter.rules=[{{kind='c4',bad_words_path={}}}]",
    "hosts": "filter.rules=[{{kind='urls',hosts_path={}}}]",
    "tokenizer": "tokenizer={{kind='import',path={}}}",
    "gpt2": "tokenizer.gpt2={}",
    "conversations": "instruct.sources=[{{kind='files',name='x',path={}}}]",
    "files": "fetch.sources=[{{kind='files',name='x',domain='x',path={}}}]",
    "jsonl": "fetch.sources=[{{kind='jsonl',name='x',domain='x',path={}}}]",
    "folder": "fetch.sources=[{{kind='folder',name='x',domain='x',path={}}}]",
    "warc": "fetch.sources=[{{kind='warc',name='x',domain='x',path={}}}]",
    "continue_from": "pretrain.continue_from={}",
    "hellaswag": "pretrain.hellaswag={}",
    "start_from": "pretrain.start_from={}",
    "decontaminate": "dedup.decontaminate={{files=[{}]}}",
    "evaluate": "evaluate={{tasks=['hellaswag'],data=[{}]}}",
    "shards": "shard.imported={{folder={}}}",
}


def laid_out(folder: Path, setting: str) -> list[pipeline.StagePlan]:
    """What `bloomery plan` looks at."""
    (folder / "a.toml").write_text(RECIPE)
    recipe = config.load(Recipe, folder / "a.toml", [setting])
    plans = pipeline.plan_stages(STAGES, recipe, folder / "runs", blind=True)
    for plan in plans:
        sections.check_named_paths(plan.stage.name, plan.config)
    return plans


@pytest.mark.parametrize("name", PATHS)
def test_a_special_file_is_refused_wherever_a_recipe_names_it(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in ("/dev/zero", "/dev/full", "/proc/kmsg", "/proc/self/mem", "/proc/self", tmp_path / "fifo"):
        with pytest.raises(DataError, match=r"no regular file|lies in /proc"):
            laid_out(tmp_path, PATHS[name].format(repr(str(path))))


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_no_file_system_takes_is_refused_wherever_a_recipe_names_it(name: str, tmp_path: Path) -> None:
    for path in ("a" * 300, "a/" * 3000):
        with pytest.raises(ConfigError, match="bytes"):
            laid_out(tmp_path, PATHS[name].format(repr(path)))
    with pytest.raises(ConfigError, match="no NUL"):
        laid_out(tmp_path, PATHS[name].format('"a\\u0000b"'))


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_is_not_there_is_seen_by_plan(name: str, tmp_path: Path) -> None:
    setting = PATHS[name].format(repr(str(tmp_path / "gone")))
    if name in ("tokenizer", "start_from", "shards"):  # which an earlier command may bring: the plan says so
        assert any("there is no" in plan.unseen for plan in laid_out(tmp_path, setting))
        return
    with pytest.raises(DataError):
        laid_out(tmp_path, setting)


@pytest.mark.parametrize("name", ["files", "folder", "jsonl", "warc", "conversations"])
@pytest.mark.parametrize("path", ["/", "**/**/**", "/**/*", "/**/x/**/*.jsonl", "/proc/**/*", "/sys/*/*"])
def test_a_pattern_of_the_whole_disk_is_refused_at_once(
    name: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    began = time.monotonic()
    with pytest.raises(DataError):
        laid_out(tmp_path, PATHS[name].format(repr(path)))
    assert time.monotonic() - began < 2


def test_wildcards_find_what_glob_finds(tmp_path: Path) -> None:
    for name in ("a.jsonl", "x/a.jsonl", "x/y/b.jsonl", "x/y/z/c.txt", ".h/d.jsonl", "x/.e.jsonl", "y/x/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "y")
    for pattern in ("*.jsonl", "**/*.jsonl", "**", "**/**", "x/**/*", "**/x/**/*.jsonl", "*/*.jsonl", "x/**", "*/x/**"):
        expected = {Path(name).resolve() for name in glob.glob(str(tmp_path / pattern), recursive=True)}
        source = local.Jsonl(name="s", domain="d", path=tmp_path / pattern)
        found = [path.resolve() for _, path in local.files_of(source)]
        assert set(found) == {path for path in expected if path.is_file()}, pattern
        assert len(found) == len(set(found)), pattern
