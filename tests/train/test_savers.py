"""Adapters of a model in parts, as they are saved."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.hw import distributed
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.model.config import Base, Lora
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import fsdp
from bloomery.train.checkpointing import AdapterSaver
from bloomery.train.config import Mesh
from bloomery.weights import hf
from bloomery.weights.hf import BaseModel
from bloomery.weights.opened import ADAPTER_WEIGHTS
from tests.model.made import CHOICES, lively
from tests.tokenizer.made import small
from tests.train.made import LINEAGE, processor

import safetensors.torch
import torch

GPT2 = CHOICES["absolute positions"].model_copy(update={"num_kv_heads": 4})
"""Transformers has queries, keys and values of it in one tensor."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.c10d.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("base", ["float32", "int8", "nf4"])
def test_dora_of_queries_alone_is_saved_from_a_mesh_as_from_one_device(
    tmp_path: Path, base: Base, one_rank: None
) -> None:
    """The file holds lengths of the rows of keys and values too, which have no adapter."""
    settings, renderer = Lora(rank=2, base_dtype=base, dora=True, target_modules=("*.q",)), Renderer(small())
    hf.save(tmp_path / "base", lively(GPT2, 0, small().vocab_size), renderer, LINEAGE)
    below = BaseModel(tmp_path / "base", hf.digest(tmp_path / "base"))
    for name in ("alone", "mesh"):
        model = lively(GPT2, 0, small().vocab_size)
        lora.attach(model, settings, seed=1)
        if name == "mesh":
            fsdp.shard(model, World.alone(), processor(), Mesh())
        write, _ = AdapterSaver(model, renderer, settings, below, LINEAGE).copied(World.alone())
        write(tmp_path / name, 1)
    alone, mesh = (safetensors.torch.load_file(tmp_path / name / ADAPTER_WEIGHTS) for name in ("alone", "mesh"))
    assert alone.keys() == mesh.keys()
    assert any("c_attn" in name and len(tensor) == 3 * GPT2.hidden_size for name, tensor in alone.items())
    for name, tensor in alone.items():
        assert torch.equal(mesh[name], tensor), name
