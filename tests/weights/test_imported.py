"""Models of others: rows for special tokens, Baichuan2 laid out by hand, and what can be done with them here."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from bloomery.generate.engine import Engine
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.tokenizer import DOCUMENT, END, SPECIAL
from bloomery.weights import hf
from tests.model.made import random_ids
from tests.tokenizer.made import small

import safetensors.torch
import torch
import torch.nn.functional as F

EVEN = ModelConfig(width=32, num_layers=2, num_heads=4, num_kv_heads=4, mlp_width=48, context=40, norm_eps=1e-6)
LAYERS = range(EVEN.num_layers)


def plain_tokenizer(folder: Path) -> int:
    """Save a tokenizer without our special tokens; returns how many ids it has."""
    spec = json.loads(json.dumps(small().spec))
    names = {token["content"] for token in spec["added_tokens"]}
    kept = [name for name, _ in sorted(spec["model"]["vocab"].items(), key=lambda pair: pair[1]) if name not in names]
    spec["added_tokens"] = []
    spec["model"]["vocab"] = {name: id for id, name in enumerate(kept)}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizers.Tokenizer.from_str(json.dumps(spec)).save(str(folder / "tokenizer.json"))
    return len(kept)


def llama(folder: Path, rows: int, **facts: Any) -> dict[str, torch.Tensor]:
    """A folder as transformers saves it; returns the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        some: torch.Tensor = torch.randn(size, generator=generator) * size[-1] ** -0.5
        return some

    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = draw(rows, 32), draw(rows, 32) * 3
    for layer in LAYERS:
        at = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            weights[f"{at}self_attn.{name}_proj.weight"] = draw(32, 32)
        weights[f"{at}mlp.gate_proj.weight"], weights[f"{at}mlp.up_proj.weight"] = draw(48, 32), draw(48, 32)
        weights[f"{at}mlp.down_proj.weight"] = draw(32, 48)
        weights[f"{at}input_layernorm.weight"] = 1 + draw(32)
        weights[f"{at}post_attention_layernorm.weight"] = 1 + draw(32)
    weights["model.norm.weight"] = 1 + draw(32)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 3,
        "eos_token_id": [5, 6],
    }
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | facts).items() if v is not None}))
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(weights))
    return weights


def scores(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(ids))


def test_special_tokens_that_a_tokenizer_lacks_get_rows_like_the_closest_it_has(tmp_path: Path) -> None:
    size = plain_tokenizer(tmp_path)
    theirs = llama(tmp_path, size + 2)  # some models have rows that no id uses
    found = hf.load(tmp_path)
    assert found.model.vocab_size == found.tokenizer.vocab_size == size + len(SPECIAL)
    special = found.tokenizer.special
    embed, head = found.model.embed.weight, found.model.head.weight
    tables = theirs["model.embed_tokens.weight"], theirs["lm_head.weight"]
    assert torch.equal(embed[:size], tables[0][:size])
    assert torch.equal(head[:size], tables[1][:size])
    assert torch.equal(embed[special[DOCUMENT]], tables[0][3])
    assert torch.equal(embed[special[END]], tables[0][5])
    assert torch.equal(head[special[DOCUMENT]], tables[1][5])
    assert torch.equal(head[special[END]], tables[1][5])
    torch.testing.assert_close(head[special["<|user|>"]], tables[1].mean(0))


@pytest.mark.parametrize("none", [True, -1, 2.5, "x", {}, [], [True]])
def test_what_is_no_id_neither_begins_nor_ends_a_text(tmp_path: Path, none: object) -> None:
    for name, facts in (("said", {"eos_token_id": none}), ("left out", {"eos_token_id": None})):
        llama(tmp_path / name, plain_tokenizer(tmp_path / name), **facts)
    said, left_out = (hf.load(tmp_path / name).model.head.weight for name in ("said", "left out"))
    assert torch.equal(said, left_out)


def test_a_model_of_others_answers_here_and_is_saved_as_ours(tmp_path: Path) -> None:
    llama(tmp_path / "theirs", plain_tokenizer(tmp_path / "theirs"))
    found = hf.load(tmp_path / "theirs")
    prompt = found.renderer.prompt([{"role": "user", "content": "the lamp"}])
    engine = Engine(found.model, found.tokenizer.vocab_size)
    said = list(engine.stream(prompt, max_tokens=5, stop_ids=frozenset({found.renderer.end_id})))
    assert 1 <= len(said) <= 5
    hf.save(tmp_path / "ours", found.model, found.renderer, found.lineage)
    again = hf.load(tmp_path / "ours")
    assert again.lineage.shards == "imported"
    ids = random_ids(2, 30, 0, found.model.vocab_size)
    assert torch.equal(scores(again.model, ids), scores(found.model, ids))


# --- Baichuan2 -----------------------------------------------------------------------------------------------------


def baichuan(folder: Path, rows: int, **facts: Any) -> dict[str, torch.Tensor]:
    """The same model, laid out as Baichuan's files are: one matrix W_pack, and a head that is not normalized."""
    weights = llama(folder, rows)
    packed = {
        name: weight
        for name, weight in weights.items()
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    for layer in LAYERS:
        at = f"model.layers.{layer}.self_attn."
        packed[f"{at}W_pack.weight"] = torch.cat([weights[f"{at}{which}_proj.weight"] for which in "qkv"])
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "model_max_length": 40} | facts
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (folder / "modeling_baichuan.py").write_text("raise SystemExit('code of others was run')\n")
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(packed))
    return weights


def by_formula(weights: dict[str, torch.Tensor], ids: torch.Tensor, *, alibi: bool) -> torch.Tensor:
    """What Baichuan2 computes, written out for one row: nothing of ours."""
    x = weights["model.embed_tokens.weight"][ids]
    T, H, E = len(ids), 4, 8
    place = torch.arange(T)
    angle = place[:, None] * 10_000.0 ** (-torch.arange(0, E, 2) / E)
    cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / H) for head in range(H)])

    def normed(y: torch.Tensor, name: str) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]

    def turned(y: torch.Tensor) -> torch.Tensor:
        return y if alibi else y * cos + torch.cat([-y[..., E // 2 :], y[..., : E // 2]], -1) * sin

    for layer in LAYERS:
        at = f"model.layers.{layer}."
        h = normed(x, f"{at}input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{at}self_attn.{which}_proj.weight"].T).view(T, H, E).transpose(0, 1) for which in "qkv"
        )
        s = turned(q) @ turned(k).transpose(1, 2) / E**0.5
        s = s + slopes[:, None, None] * (place[None, None, :] - place[None, :, None]) * alibi
        s = s.masked_fill(place[None, None, :] > place[None, :, None], -torch.inf)
        y = (s.softmax(-1) @ v).transpose(0, 1).reshape(T, H * E)
        x = x + y @ weights[f"{at}self_attn.o_proj.weight"].T
        h = normed(x, f"{at}post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{at}mlp.{which}_proj.weight"].T for which in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[f"{at}mlp.down_proj.weight"].T
    head = weights["lm_head.weight"]
    scores: torch.Tensor = normed(x, "model.norm.weight") @ (head / head.norm(dim=1, keepdim=True)).T
    return scores


@pytest.mark.parametrize("size", ["7B", "13B"])
def test_baichuan2_is_read_without_its_code_and_computes_what_its_formulas_say(size: str, tmp_path: Path) -> None:
    rows = plain_tokenizer(tmp_path)
    weights = baichuan(tmp_path, rows, max_position_embeddings=40 if size == "7B" else None)
    found = hf.load(tmp_path).model
    assert found.config.positions == ("rotary" if size == "7B" else "alibi")
    ids = random_ids(1, 30, 1, rows)
    expected = by_formula(weights, ids[0], alibi=size == "13B")
    assert float(expected.std()) > 0.1
    assert float((scores(found, ids)[0, :, :rows] - expected).abs().max()) < 1e-5


def test_the_first_generation_has_a_plain_head(tmp_path: Path) -> None:
    from bloomery.weights import architectures
    from bloomery.weights.architectures import BAICHUAN1, BAICHUAN2

    facts = {"architectures": ["BaichuanForCausalLM"]}
    assert architectures.of_file(facts | {"vocab_size": 64_000}) is BAICHUAN1
    assert architectures.of_file(facts | {"vocab_size": 125_696}) is BAICHUAN2
    (head,) = BAICHUAN1.pieces(["head.weight"])
    assert not head.normalized
