"""A block that compiles for a GPU is one graph: each break costs what a kernel over several operations would save."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from bloomery.hw import device as devices
from bloomery.model import attention, layers
from bloomery.model.attention import AttentionMask, segment_bounds
from bloomery.model.config import ModelConfig
from bloomery.model.layers import rotation
from bloomery.model.transformer import Block

import torch
from torch.nn.attention import flex_attention

ROOT = Path(__file__).parents[2]
TOKENS = 1024
CASES = [
    (None, True, "_flash_attention_forward"),
    (100, True, "flex_attention"),
    (None, False, "scaled_dot_product_attention"),
]
"""Window, whether rows have several documents, and the attention that computes them."""


def graphs(window: int | None, documents: bool) -> list[str]:
    """Of a block. Tensors without numbers stand for those of a GPU, which the compiler asks for nothing."""
    shape = ModelConfig(num_layers=1, hidden_size=64, num_heads=4, num_kv_heads=2, intermediate_size=128, qk_norm=True)
    segments = np.broadcast_to(np.arange(TOKENS) // 400, (2, TOKENS)).copy()
    bounds = segment_bounds(segments)
    assert bounds is not None
    with torch.device("meta"):
        block = Block(shape, 0).bfloat16()
        x = torch.randn(2, TOKENS, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(TOKENS)[None]
    mask = AttentionMask(num_queries=TOKENS, num_keys=TOKENS, device=x.device, window=window)
    if documents:
        there, ends = (torch.from_numpy(one).to("meta") for one in (segments, bounds))
        mask = replace(mask, segments=there, bounds=ends)
    found = list[str]()

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        found.append(str(graph.graph))
        return graph.forward

    rope = rotation(positions, shape, torch.bfloat16)
    assert isinstance(block.attention, attention.Attention)
    block.attention.prepare(mask, x)
    torch.compile(block.forward, backend=keep, dynamic=False, fullgraph=True)(x, rope, mask, None)
    return found


def half(x: torch.Tensor) -> torch.dtype:
    return torch.bfloat16


def nothing(*tensors: torch.Tensor) -> None:
    pass


def main() -> None:
    with (
        mock.patch.object(devices, "is_gpu", lambda device: device.type == "meta"),
        mock.patch.object(devices, "HAS_TRITON", True),
        mock.patch.object(attention, "computed_in", half),
        mock.patch.object(layers, "_computed", half),
        mock.patch.object(flex_attention, "_validate_device", nothing),
    ):
        print(json.dumps([graphs(window, documents) for window, documents, _ in CASES]))


@pytest.mark.slow
def test_a_block_over_documents_windows_and_plain_rows_is_one_graph() -> None:
    """In a process without checks of types, which the compiler does not read."""
    command = [sys.executable, "-c", "from tests.model import test_one_graph; test_one_graph.main()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    for (*_, taken), found in zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert len(found) == 1
        assert taken in found[0]
