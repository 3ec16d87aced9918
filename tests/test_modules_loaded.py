"""
How many of Bloomery's modules are loaded for one thing: what a reader has to know of before he knows that nothing else
takes part.

Packages (`__init__`) do not count. A row is lowered when its path gets shorter. It grows only with a reason.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery import __version__
from tests.weights.made import model

ROOT = Path(__file__).parents[1]

MODEL = """
import numpy as np
from bloomery.hw import device as devices
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Batch
from bloomery.train.config import AdamW
from bloomery.train.optim import Optimizers
from bloomery.train.precision import Precision
shape = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=24, context_length=16)
model, ids = Transformer(shape, 64), np.zeros((2, 16), np.int64)
model.initialize(0)
batch = Batch(ids, ids, np.tile(np.arange(16), (2, 1)), ids, np.arange(2))
optimizers, precision = Optimizers(model, AdamW()), Precision.decide("auto", devices.find("cpu"))
"""
GRADIENTS = f"""{MODEL}
from bloomery.train.step import accumulate_gradients
accumulate_gradients(model, batch, 2, precision)
optimizers.step()
"""
TRAINER = f"""{MODEL}
from bloomery.train.state import State
from bloomery.train.step import Trainer
how = {{"steps": 1, "micro_batch": 2, "learning_rate_share": lambda step: 1.0, "max_grad_norm": 1.0}}
Trainer(model, optimizers, iter([batch]), state=State(), precision=precision, **how).train()
"""
RECIPE = """
from pathlib import Path
from bloomery.core import config
from bloomery.recipe import Recipe
config.load(Recipe, Path("recipes/demo.toml"))
"""
CHAT = """
import sys, bloomery
bloomery.load(sys.argv[1]).chat("Hi", max_tokens=1)
"""
COUNT = """
import json, sys
names = [name for name, module in sys.modules.items() if name.startswith("bloomery.")]
print(json.dumps(sorted(name for name in names if not hasattr(sys.modules[name], "__path__"))))
"""
MOST = {
    "gradients of a batch and an update": (GRADIENTS, 27),
    "the trainer, and a step": (TRAINER, 27),
    "a recipe": (RECIPE, 54),
    "a chat": (CHAT, 40),
}
"""
What is done -> a program that does it, and how many modules it may load. Training over a mesh takes ten: they cut
weights, also while these are read.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_no_more_modules_are_loaded_than_one_thing_needs(name: str, tmp_path: Path) -> None:
    program, most = MOST[name]
    command = [sys.executable, "-c", program + COUNT, str(model(tmp_path / "model", context=100))]
    names = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    assert len(names) <= most, "\n".join(names)


FIRST_LINE = """
import sys
from bloomery import cli
from bloomery.core import log
def say(text, **style):
    print(text, sorted({"torch", "numpy", "pyarrow", "pydantic", "bloomery.recipe"} & sys.modules.keys()))
    raise SystemExit(0)
log.say = say
cli.main(["run", "recipes/demo.toml"])
"""


def test_the_first_line_of_a_run_comes_before_anything_large_is_imported() -> None:
    command = [sys.executable, "-c", FIRST_LINE]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert out == f"Bloomery {__version__} · recipes/demo.toml []\n"
