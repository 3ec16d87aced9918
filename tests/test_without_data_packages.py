"""Everything but the data stages runs where the packages of the extra `data` are not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.core.extras import DATA
from bloomery.weights import locate
from tests.stages.test_imported import written
from tests.test_house_rules import package, placed
from tests.weights import made

WITHOUT_DATA = f"""
import sys

class Refuses:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {DATA!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Refuses(finder) for finder in sys.meta_path]
"""
"""As sitecustomize.py of a process and of all its children: they find everything but these packages."""

COMMANDS = """
import json, sys
from pathlib import Path
from bloomery import cli

commands, runs = json.loads(sys.argv[1]), Path(sys.argv[2])
for command in commands:
    print(">", *command, flush=True)
    assert cli.main(command) == 0
from bloomery.serve import models, server
assert server.app(models.ModelRegistry(runs), ["127.0.0.1"]).routes
"""
IMPORTS = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
"""
INSTRUCT = """
[instruct]
sources = [{{ kind = "jsonl", name = "mine", path = "{path}" }}]
val_fraction = 0.3
[finetune]
steps = 2
global_batch_tokens = 128
"""


def child(folder: Path, code: str, *arguments: str) -> None:
    (folder / "sitecustomize.py").write_text(WITHOUT_DATA)
    command = [sys.executable, "-c", "import sitecustomize; sitecustomize.Refuses" + code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_every_module_is_imported_without_the_data_packages(tmp_path: Path) -> None:
    child(tmp_path, IMPORTS, json.dumps([module.name for module in package() if placed(module)]))


@pytest.mark.slow
def test_a_model_is_finetuned_on_a_jsonl_file_asked_evaluated_and_exported(tmp_path: Path) -> None:
    recipe = written(tmp_path / "theirs")
    talks = tmp_path / "mine.jsonl"
    with talks.open("w") as file:
        for number in range(40):
            turns = [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": str(number)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    text = recipe.read_text().replace("context = 16", "context = 64") + INSTRUCT.format(path=talks)
    recipe.write_text(text.replace("global_batch_tokens = 64", "global_batch_tokens = 128"))
    runs, model = tmp_path / "runs", made.model(tmp_path / "talker", context=96)
    commands = [
        ["plan", str(recipe), "--runs", str(runs), "--device", "rtx-4090"],
        ["run", str(recipe), "--runs", str(runs), "--until", "finetune"],
        ["status", str(runs / "theirs")],
        ["chat", str(runs / "theirs"), "--prompt", "Say 7", "--max-tokens", "2"],
        ["eval", str(model), "--toy-questions", "2", "--json"],
        ["export", str(runs / "theirs"), str(tmp_path / "exported")],
    ]
    child(tmp_path, COMMANDS, json.dumps(commands), str(runs))
    assert locate.locate_model(tmp_path / "exported")
