"""Model folders beside transformers, and what is refused; what all families compute is in test_architectures.py."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from bloomery import cli
from bloomery.core.chat import TEMPERATURE, Message, SamplingConfig
from bloomery.core.errors import BloomeryError, CheckpointError, DataError
from bloomery.core.io import MANIFEST
from bloomery.generate.engine import Engine
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.serve.constrained import Form, Grammars
from bloomery.shards.loader import IGNORE, PackedDataset
from bloomery.stages import instruct
from bloomery.stages.config import Evaluate
from bloomery.tokenizer import importers
from bloomery.tokenizer import train as tokenizer_train
from bloomery.tokenizer.chat_template import Renderer, Template
from bloomery.tokenizer.config import SentencePiece
from bloomery.tokenizer.tokenizer import DOCUMENT, END, SPECIAL, Tokenizer
from bloomery.tokenizer.train import train_byte_level
from bloomery.weights import export, hf
from bloomery.weights.architectures import BAICHUAN1, BAICHUAN2, of_file
from bloomery.weights.hf import CONFIG, LINEAGE, WEIGHTS, Lineage
from bloomery.weights.llama import mappings
from bloomery.weights.safetensors import INDEX
from tests.model.made import CHOICES, SHAPES, lively, random_config, random_ids, scores
from tests.tokenizer.made import TEXTS, small, training_texts
from tests.tokenizer.test_train import theirs as trained_elsewhere
from tests.weights.made import in_float64

import safetensors.torch
import torch
import torch.nn.functional as F

VOCAB = small().vocab_size
RENDERER = Renderer(small())
LINEAGE_OF_CHAT = Lineage(tokenizer=small().hash, template=RENDERER.template.hash, shards="5" * 64, step=3)


def saved(folder: Path, seed: int, **lineage: Any) -> Transformer:
    model = lively(random_config(seed), seed, VOCAB)
    hf.save(folder, model, RENDERER, replace(LINEAGE_OF_CHAT, **lineage))
    return model


def theirs(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")


# --- equal to transformers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_transformers_says_the_same_greedily(seed: int, tmp_path: Path) -> None:
    ours, other = saved(tmp_path, seed), theirs(tmp_path)
    prompt = random_ids(1, 5, seed, VOCAB)[0].tolist()
    said = list(
        Engine(ours, VOCAB).stream(prompt, SamplingConfig.greedy(7), stop_ids=frozenset({small().special[END]}))
    )
    ids = torch.tensor([prompt])
    out = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)
    assert out[0, 5:].tolist() == said


def test_transformers_draws_as_we_do_unless_told_otherwise(tmp_path: Path) -> None:
    saved(tmp_path, 0)
    how = theirs(tmp_path).generation_config
    assert (how.do_sample, how.temperature, how.top_k, how.top_p) == (True, TEMPERATURE, 0, 1.0)
    assert SamplingConfig().temperature == Evaluate().chat_temperature == TEMPERATURE
    assert cli.parse(["chat", "runs/demo"]).temperature is None  # the model's own


def test_every_setting_arrives_at_transformers(tmp_path: Path) -> None:
    for seed in range(4):
        ours, other = saved(tmp_path, seed), theirs(tmp_path).config
        shape = ours.config
        assert other.rope_parameters["rope_theta"] == shape.rope_theta != 10_000.0
        assert (other.rms_norm_eps, other.tie_word_embeddings) == (shape.norm_eps, shape.tie_embeddings)
        assert other.max_position_embeddings == shape.context_length
        assert other.head_dim == shape.head_size


def test_a_model_that_converses_ends_its_turn_and_one_that_does_not_ends_its_document(tmp_path: Path) -> None:
    saved(tmp_path / "chat", 0)
    saved(tmp_path / "base", 0, template=None)
    for name, end in (("chat", small().end_id), ("base", small().document_id)):
        model, auto = theirs(tmp_path / name), AutoTokenizer.from_pretrained(tmp_path / name)
        assert model.generation_config.eos_token_id == model.config.eos_token_id == auto.eos_token_id == end
        assert (auto.chat_template is None) == (name == "base")


# --- the tokenizer beside it ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    saved(folder, 0)
    return AutoTokenizer.from_pretrained(folder)


TALKS: list[list[Message]] = [
    [Message(role="user", content="What is 17 plus 25?")],
    [
        Message(role="system", content="Be brief.\n\n  Two spaces."),
        Message(role="user", content="Größe 😀 東京?"),
        Message(role="assistant", content=" yes, \t'quoted' {{ braces }} {% for %} \\ \n"),
        Message(role="tool", content=""),
        Message(role="user", content="12345 + 1"),
    ],
]


@pytest.mark.parametrize("talk", TALKS)
def test_the_chat_template_gives_the_ids_of_the_renderer(auto: Any, talk: list[Message]) -> None:
    assert auto.apply_chat_template(talk, add_generation_prompt=True)["input_ids"] == RENDERER.prompt(talk)
    ids = RENDERER.render(talk).ids
    assert auto.apply_chat_template(talk)["input_ids"] == ids
    assert auto.decode(ids, skip_special_tokens=True) == small().decode(ids)


@settings(max_examples=60)
@given(TEXTS.filter(lambda text: "<|" not in text))
def test_auto_tokenizer_gives_the_same_ids_and_text(auto: Any, text: str) -> None:
    ids = auto(text, add_special_tokens=False)["input_ids"]
    assert ids == small().encode(text)
    assert auto.decode(ids) == small().decode(ids) == text


def test_auto_tokenizer_knows_the_special_tokens(auto: Any) -> None:
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (
        small().document_id,
        small().end_id,
        small().pad_id,
    )
    assert auto.decode([small().document_id]) == DOCUMENT
    spelled = f"a{END}b"  # which transformers takes from text unless told not to, and we never do
    assert small().end_id in auto(spelled)["input_ids"]
    assert auto(spelled, split_special_tokens=True, add_special_tokens=False)["input_ids"] == small().encode(spelled)
    assert auto.model_max_length == random_config(0).context_length


@pytest.mark.parametrize("kind", ["sentencepiece", "imported", "space first"])
def test_auto_tokenizer_gives_the_ids_of_other_kinds_too(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    if kind == "sentencepiece":
        tokenizer = tokenizer_train.train_sentencepiece(training_texts(), SentencePiece(vocab_size=600))
    elif kind == "imported":
        small().save(tmp_path / "other")
        tokenizer = importers.load(tmp_path / "other")
    else:
        (tmp_path / "other.model").write_bytes(trained_elsewhere())
        tokenizer = importers.load(tmp_path / "other.model")
    renderer = Renderer(tokenizer)
    model = lively(random_config(0), 0, tokenizer.vocab_size)
    hf.save(tmp_path / "model", model, renderer, replace(LINEAGE_OF_CHAT, tokenizer=tokenizer.hash))
    auto: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in (*training_texts()[::20], "def f(x):\n\treturn  x\n\n", "Größe 東京 😀", " a", "", "\n"):
        ids = auto(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode(text)
        assert auto.decode(ids) == tokenizer.decode(ids) == text
    for talk in TALKS:
        assert auto.apply_chat_template(talk)["input_ids"] == renderer.render(talk).ids
    assert hf.load(tmp_path / "model").tokenizer.hash == tokenizer.hash


# --- and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*SHAPES, *CHOICES.values(), *map(random_config, range(3))])
def test_a_model_that_was_saved_is_loaded_bit_for_bit(config: Any, tmp_path: Path) -> None:
    model = lively(config, 1, VOCAB)
    hf.save(tmp_path, model, RENDERER, LINEAGE_OF_CHAT)
    found = hf.load(tmp_path)
    assert found.model.config == config
    assert found.lineage == LINEAGE_OF_CHAT
    assert found.tokenizer.hash == small().hash
    for name, weight in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], weight), name
    assert not found.model.training
    again = tmp_path / "again"
    hf.save(again, found.model, found.language, found.lineage)
    for file in again.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


def test_a_tied_head_is_not_written_twice(tmp_path: Path) -> None:
    tied, own = (lively(config, 0, VOCAB) for config in SHAPES[:2])
    hf.save(tmp_path / "tied", tied, RENDERER, LINEAGE_OF_CHAT)
    hf.save(tmp_path / "own", own, RENDERER, LINEAGE_OF_CHAT)
    names = {name: set(safetensors.torch.load_file(tmp_path / name / WEIGHTS)) for name in ("tied", "own")}
    assert "lm_head.weight" not in names["tied"]
    assert "lm_head.weight" in names["own"]
    loaded = hf.load(tmp_path / "tied").model
    assert loaded.head.weight is loaded.embed.weight


def test_every_weight_has_one_counterpart() -> None:
    for config in SHAPES:
        names = [piece.theirs for piece in mappings(list(Transformer(config, VOCAB).state_dict()))]
        assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match=r"'blocks\.0\.bias' has no counterpart"):
        mappings(["blocks.0.bias"])


# --- what is refused -----------------------------------------------------------------------------------------------


def other_tokenizer() -> Tokenizer:
    return train_byte_level(["some other text entirely"] * 3, VOCAB)


def test_weights_are_not_used_with_another_tokenizer(tmp_path: Path) -> None:
    saved(tmp_path, 0)
    other = other_tokenizer()
    other.save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        hf.load(tmp_path)
    assert caught.value.what == (
        f"the model was trained with the tokenizer {small().hash[:8]}, but this one is {other.hash[:8]}"
    )
    assert caught.value.where == str(tmp_path)
    assert "Use the tokenizer next to the weights" in caught.value.hint


def test_weights_are_not_used_with_another_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Template(name="chatml", role="<|{role}|>")
    saved(tmp_path, 0, template=trained.hash)
    with pytest.raises(CheckpointError) as caught:
        hf.load(tmp_path)
    assert caught.value.what == (
        f"the model was trained with the chat template bloomery {trained.hash[:8]}, "
        f"but this one is {Template().hash[:8]}"
    )
    saved(tmp_path, 0, template=None)  # one that never saw a conversation takes any
    assert hf.load(tmp_path).lineage.template is None


def test_weights_are_read_into_a_model_where_it_is(tmp_path: Path) -> None:
    model = saved(tmp_path, 0)
    for shape in (model.config, model.config.model_copy(update={"tie_embeddings": True})):
        hf.save(tmp_path, lively(shape, 3, VOCAB), RENDERER, LINEAGE_OF_CHAT)
        other = lively(shape, 1, VOCAB)
        weights = list(other.parameters())
        hf.fill(other, tmp_path, replace(LINEAGE_OF_CHAT, step=99))
        assert all(mine is weight for mine, weight in zip(weights, other.parameters(), strict=True))
        for name, weight in hf.load(tmp_path).model.state_dict().items():
            assert torch.equal(other.state_dict()[name], weight), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_read_without_numbers_where_another_rank_will_tell_them(tmp_path: Path, tied: bool) -> None:
    model = saved(tmp_path, 0)
    hf.save(
        tmp_path, lively(model.config.model_copy(update={"tie_embeddings": tied}), 3, VOCAB), RENDERER, LINEAGE_OF_CHAT
    )
    whole, empty = hf.load(tmp_path), hf.load(tmp_path, "meta")
    assert empty.model.config == whole.model.config
    shapes = {name: weight.shape for name, weight in whole.model.named_parameters()}
    assert {name: weight.shape for name, weight in empty.model.named_parameters()} == shapes
    assert all(weight.is_meta for weight in empty.model.parameters())
    assert (empty.model.head.weight is empty.model.embed.weight) == tied
    assert empty.tokenizer.hash == whole.tokenizer.hash


@pytest.mark.parametrize("field", ["tokenizer", "template", "shards", "base"])
def test_weights_that_were_made_from_something_else_are_not_gone_on_with(tmp_path: Path, field: str) -> None:
    model = saved(tmp_path / "000000003", 0)
    before = model.state_dict()["norm.weight"].clone()
    made = (getattr(LINEAGE_OF_CHAT, field) or "none")[:8]
    lineage = Lineage(**{**asdict(LINEAGE_OF_CHAT), field: "7" * 64})
    with pytest.raises(CheckpointError) as caught:
        hf.fill(model, tmp_path / "000000003", lineage)
    assert caught.value.what == f"was made with {field} {made}, but this one is 77777777"
    assert caught.value.hint == f"To train from the start, remove {tmp_path}."
    assert torch.equal(model.state_dict()["norm.weight"], before)


def change(file: Path, do: Callable[[dict[str, Any]], Any]) -> None:
    facts = json.loads(file.read_text())
    do(facts)
    file.write_text(json.dumps(facts))


def change_weights(folder: Path, do: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    do(weights)
    (folder / WEIGHTS).write_bytes(safetensors.torch.save(weights))


def indexed(folder: Path, files: dict[str, Any]) -> None:
    """The weights under another name, and an index."""
    (folder / WEIGHTS).rename(folder / "b.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


NAME = "model.layers.0.mlp.up_proj.weight"
BROKEN: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no config", lambda f: (f / CONFIG).unlink(), f"there is no {CONFIG}"),
    ("no weights", lambda f: (f / WEIGHTS).unlink(), f"there is no {WEIGHTS}"),
    ("no tokenizer", lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer.json"),
    ("a weight less", lambda f: change_weights(f, lambda w: w.pop(NAME)), f"{NAME} is missing"),
    (
        "a smaller weight",
        lambda f: change_weights(f, lambda w: w.update({"model.norm.weight": torch.ones(3)})),
        "model.norm.weight has shape (3,), not",
    ),
    (
        "another width",
        lambda f: change(f / CONFIG, lambda c: c.update(intermediate_size=7)),
        "gate_proj.weight has shape",
    ),
    *(
        (f"a giant {name}", lambda f, name=name: change(f / CONFIG, lambda c: c.update({name: 10**12})), told)
        for name, told in {
            "head_dim": "must be at most 65,536, got 1000000000000",
            "intermediate_size": "4,194,304, got 1000000000000",
            "vocab_size": "not a number from 1 to 4,194,304",
            "num_hidden_layers": "num_hidden_layers: input should be less than 1000000",
        }.items()
    ),
    ("an index of numbers", lambda f: indexed(f, {NAME: 1}), "input should be a valid string, got 1"),
    ("an index of what is nowhere", lambda f: indexed(f, {NAME: "a.safetensors"}), "there is no a.safetensors"),
    ("an index of too much", lambda f: indexed(f, {"more": "b.safetensors"}), "b.safetensors: more"),
    ("a setting less", lambda f: change(f / CONFIG, lambda c: c.pop("hidden_size")), "lacks 'hidden_size'"),
    ("an impossible shape", lambda f: change(f / CONFIG, lambda c: c.update(num_attention_heads=0)), "num_heads"),
    ("another lineage", lambda f: change(f / LINEAGE, lambda c: c.pop("shards")), "shards: field required"),
    (
        "a lineage of null",
        lambda f: change(f / LINEAGE, lambda c: c.update(tokenizer=None)),
        "tokenizer: input should be a valid string, got None",
    ),
    (
        "a step of text",
        lambda f: change(f / LINEAGE, lambda c: c.update(step="9")),
        "step: input should be a valid integer, got '9'",
    ),
    (
        "a template of a list",
        lambda f: change(f / LINEAGE, lambda c: c.update(template_name=[])),
        "template_name: input should be a valid string, got []",
    ),
    ("torn weights", lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), f"{WEIGHTS}: is torn"),
    ("empty weights", lambda f: (f / WEIGHTS).write_bytes(b""), f"{WEIGHTS}: is torn"),
    (
        "a torn config",
        lambda f: (f / CONFIG).write_bytes((f / CONFIG).read_bytes()[:-9]),
        f"{CONFIG}: cannot be read: ",
    ),
    ("a torn tokenizer", lambda f: (f / "tokenizer.json").write_bytes(b"{"), "is not a tokenizer"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    saved(folder, 2)
    return folder


@pytest.mark.parametrize(("do", "told"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_folder_that_is_not_as_it_was_saved_is_refused_by_name(
    whole: Path, tmp_path: Path, do: Callable[[Path], Any], told: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    do(folder)
    with pytest.raises(BloomeryError) as caught:
        hf.load(folder)
    assert isinstance(caught.value, CheckpointError | DataError)
    assert told in str(caught.value)
    assert str(folder) in caught.value.where
    assert caught.value.hint
    assert "manifest.json" not in caught.value.hint


def test_the_folder_of_a_stage_is_made_again_where_a_file_in_it_is_damaged(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    (tmp_path / MANIFEST).write_text("{}")
    for name in (WEIGHTS, CONFIG):
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])
        with pytest.raises(CheckpointError) as caught:
            hf.load(folder)
        assert "Remove its stage's manifest.json" in caught.value.hint


# --- Models of others: rows for special tokens, Baichuan2 laid out by hand, and what can be done with -----------------


PLAIN = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=48, context_length=40, norm_eps=1e-6
)
LAYERS = range(PLAIN.num_layers)


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


def test_a_special_token_without_a_row_is_left_out_and_an_ordinary_token_is_not(tmp_path: Path) -> None:
    size = plain_tokenizer(tmp_path)
    llama(tmp_path, size)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = hf.load(tmp_path).language
    assert words.tokenizer.vocab_size == size
    assert max(words.tokenizer.encode("an <image> of it")) < size
    longer, added = hf.tokenizer_of(tmp_path, size)
    assert sorted(added.values()) == [*range(size, size + len(SPECIAL))]
    assert not longer.holds("<image>")
    tokenizer.add_tokens(["ordinary"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="token IDs, but the model has"):
        hf.load(tmp_path)


def test_a_sentencepiece_folder_has_the_tokens_and_the_opening_of_its_other_files(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab"]
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1, 1]
    (tmp_path / "tokenizer.model").write_bytes(spelled(pieces, kinds))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": len(pieces)}))
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    llama(tmp_path, len(pieces) + 1, bos_token_id=1, eos_token_id=2)
    words = hf.load(tmp_path).language
    assert words.tokenizer.special_id("<|im_end|>") == len(pieces)
    assert len(pieces) in words.stop_ids
    assert words.text_ids("ab") == [1, *words.tokenizer.encode("ab")]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": len(pieces) + 7}))
    with pytest.raises(DataError, match="which is not the next one"):
        hf.load(tmp_path)


def spelled(pieces: list[str], kinds: list[int]) -> bytes:
    """A SentencePiece model of BPE with a fallback to bytes, as its protocol buffers."""

    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 127:
            length, size = length + bytes([size % 128 + 128]), size // 128
        return bytes([8 * number + 2]) + length + bytes([size]) + content

    data = b""
    for place, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        score = b"\x15" + struct.pack("<f", float(-place))
        data += field(1, field(1, piece.encode()) + score + bytes([24, kind]))
    return data + field(2, bytes([24, 2, 0x98, 0x02, 1])) + field(3, b"")


def test_a_gguf_file_says_whether_a_text_opens_with_a_token(tmp_path: Path) -> None:
    size = plain_tokenizer(tmp_path)
    llama(tmp_path, size + 1, bos_token_id=size)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([first := "<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=[first, "$A"], special_tokens=[(first, size)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": first}))
    loaded = hf.load(tmp_path)
    assert loaded.language.opening_ids == [size]
    export.write(loaded, tmp_path / "a.gguf", "gguf", "float32")
    data = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "b.gguf").write_bytes(data.replace(b"tokenizer.huggingface.json", b"tokenizer.huggingface.jXon"))
    for name in ("a", "b"):  # with the tokenizer.json inside, and as others write it
        assert hf.load(tmp_path / f"{name}.gguf").language.text_ids("it") == loaded.language.text_ids("it")


def test_a_gguf_file_has_the_tokens_that_config_json_alone_names(tmp_path: Path) -> None:
    size = plain_tokenizer(tmp_path)
    llama(tmp_path, size + 2, bos_token_id=size, eos_token_id=size + 1)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = hf.load(tmp_path)
    export.write(loaded, tmp_path / "a.gguf", "gguf", "float32")
    again = hf.load(tmp_path / "a.gguf").language
    assert again.tokenizer.document_id == size
    assert again.stop_ids == loaded.language.stop_ids == {size, size + 1}


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_BOUNDARIES: dict[str, tuple[list[str], dict[str, str]]] = {
    "no special token": ([], {}),
    "padding alone": (["<pad>"], {"pad_token": "<pad>"}),
    "a chat template alone": (["<|im_start|>", "<|im_end|>"], {"chat_template": TURNS}),
    "no EOS": (["<s>"], {"bos_token": "<s>"}),
    "no BOS": (["</s>"], {"eos_token": "</s>"}),
}
"""Special tokens of a tokenizer, and what tokenizer_config.json says."""


def without_boundaries(folder: Path, name: str) -> Path:
    special, said = NO_BOUNDARIES[name]
    size = plain_tokenizer(folder)
    ids = {f"{role}_id": size for role in said if role != "chat_template"}
    llama(folder, size + len(special), **({"bos_token_id": None, "eos_token_id": None} | ids))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("name", NO_BOUNDARIES)
def test_a_tokenizer_without_a_token_that_begins_or_ends_a_text_goes_through_every_file(
    tmp_path: Path, name: str
) -> None:
    first = hf.load(without_boundaries(tmp_path / "in", name))
    ids, asked = random_ids(2, 30, 0, first.model.vocab_size), Message(role="user", content="the lamp")
    export.write(first, tmp_path / "hf", "hf", "float32")
    export.write(first, tmp_path / "a.gguf", "gguf", "float32")
    export.write(hf.load(tmp_path / "a.gguf"), tmp_path / "back", "hf", "float32")
    for path in ("hf", "a.gguf", "back"):
        again = hf.load(tmp_path / path)
        assert torch.equal(scores(again.model, ids), scores(first.model, ids))
        assert again.language.text_ids("the lamp") == first.language.text_ids("the lamp")
        assert again.language.stop_ids == first.language.stop_ids
        if first.language.chat is not None:
            assert again.renderer.prompt([asked]) == first.renderer.prompt([asked])
            assert again.renderer.end_ids == first.renderer.end_ids == {first.tokenizer.special_id("<|im_end|>")}
    config, size = AutoConfig.from_pretrained(tmp_path / "hf"), first.model.vocab_size
    assert config.eos_token_id == (size - 1 if name == "no BOS" else None), "not the 2 that a Llama has by default"
    assert config.bos_token_id == (size - 1 if name == "no EOS" else None)
    assert len(list(Engine(first.model, size).stream(first.language.text_ids("it"), SamplingConfig.greedy(3)))) == 3
    if name in ("no EOS", "no BOS"):
        assert first.tokenizer.document_id == size - 1
    else:
        with pytest.raises(DataError, match="defines no token that begins or ends a text") as caught:
            first.tokenizer.document_id  # noqa: B018
        assert "Add bos_token or eos_token to tokenizer_config.json" in caught.value.hint
        if not first.language.stop_ids:
            with pytest.raises(DataError, match="form: the model has no token that ends an answer"):
                Grammars(first.tokenizer, first.language.stop_ids).constraint(Form("regex", "[0-9]", "form"))
        added = hf.load(tmp_path / "in", special=SPECIAL)  # as continued pretraining asks for
        assert added.tokenizer.document_id == added.tokenizer.special_id(DOCUMENT)


def test_conversations_are_packed_and_read_without_a_token_that_opens_documents(tmp_path: Path) -> None:
    chat = hf.load(without_boundaries(tmp_path / "in", "a chat template alone")).renderer
    talks = [
        chat.render([Message(role="user", content=f"{n}?"), Message(role="assistant", content=f"{n} lamps.")])
        for n in range(9)
    ]
    instruct.write_rows(tmp_path, "train", talks, chat, 65)
    rows = PackedDataset(tmp_path, "train", 64, chat.tokenizer.hash)
    batch = rows.batch(np.arange(rows.num_samples))
    assert int((batch.targets != IGNORE).sum()) == sum(sum(talk.mask) for talk in talks)
    assert int(((batch.positions == 0) & (batch.ids == talks[0].ids[0])).sum()) == len(talks)


def test_an_import_keeps_matrices_that_have_more_digits_than_the_embedding(tmp_path: Path) -> None:
    size = plain_tokenizer(tmp_path / "in")
    weights = llama(tmp_path / "in", size)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].bfloat16()
    safetensors.torch.save_file(weights, tmp_path / "in" / "model.safetensors")
    export.take_in(tmp_path / "in", tmp_path / "out")
    kept = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(kept[name], weight.float()) for name, weight in weights.items())


@pytest.mark.parametrize("none", [True, -1, 2.5, "x", {}, [], [True]])
def test_what_is_no_id_neither_begins_nor_ends_a_text(tmp_path: Path, none: object) -> None:
    for name, facts in (("said", {"eos_token_id": none}), ("left out", {"eos_token_id": None})):
        llama(tmp_path / name, plain_tokenizer(tmp_path / name), **facts)
    said, left_out = (hf.load(tmp_path / name, special=SPECIAL).model.head.weight for name in ("said", "left out"))
    assert torch.equal(said, left_out)


def test_a_model_of_others_answers_here_and_is_saved_as_ours(tmp_path: Path) -> None:
    llama(tmp_path / "theirs", plain_tokenizer(tmp_path / "theirs"))
    found = hf.load(tmp_path / "theirs", special=SPECIAL)
    prompt = found.renderer.prompt([{"role": "user", "content": "the lamp"}])
    engine = Engine(found.model, found.tokenizer.vocab_size)
    said = list(engine.stream(prompt, SamplingConfig.greedy(5), stop_ids=found.renderer.end_ids))
    assert 1 <= len(said) <= 5
    hf.save(tmp_path / "ours", found.model, found.language, found.lineage)
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
    logits: torch.Tensor = normed(x, "model.norm.weight") @ (head / head.norm(dim=1, keepdim=True)).T
    return logits


@pytest.mark.parametrize("size", ["7B", "13B"])
def test_baichuan2_is_read_without_its_code_and_computes_and_learns_what_its_formulas_say(
    size: str, tmp_path: Path
) -> None:
    rows = plain_tokenizer(tmp_path)
    weights = baichuan(tmp_path, rows, max_position_embeddings=40 if size == "7B" else None)
    model = hf.load(tmp_path).model
    assert model.config.position_embedding == ("rope" if size == "7B" else "alibi")
    ids = random_ids(1, 30, 1, rows)
    expected = by_formula(weights, ids[0], alibi=size == "13B")
    assert float(expected.std()) > 0.1
    assert float((scores(model, ids)[0, :, :rows] - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    exact = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    model.double()
    with in_float64():
        for logits in (model.logits(model(ids))[0, :, :rows], by_formula(exact, ids[0], alibi=size == "13B")):
            torch.autograd.backward(F.cross_entropy(logits[:-1], ids[0, 1:]))
    for name, weight in model.named_parameters():
        grad = exact[mappings([name])[0].theirs].grad
        assert weight.grad is not None
        assert grad is not None
        assert float((weight.grad - grad).norm()) < 1e-5 * float(grad.norm()), name


def test_baichuan2_13b_goes_back_into_its_own_files_with_a_head_of_length_1(tmp_path: Path) -> None:
    rows = plain_tokenizer(tmp_path / "theirs")
    weights = baichuan(tmp_path / "theirs", rows, max_position_embeddings=None)
    loaded = hf.load(tmp_path / "theirs")
    export.write(loaded, tmp_path / "back", "hf", "float32")
    facts = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (facts["architectures"], facts["model_max_length"]) == (["BaichuanForCausalLM"], 40)
    assert "max_position_embeddings" not in facts
    files = [safetensors.torch.load_file(tmp_path / name / WEIGHTS) for name in ("theirs", "back")]
    assert files[0].keys() == files[1].keys()
    for name in files[0].keys() - {"lm_head.weight"}:
        assert torch.equal(files[0][name], files[1][name]), name
    torch.testing.assert_close(files[1]["lm_head.weight"].norm(dim=1), torch.ones(rows))
    ids = random_ids(1, 30, 1, rows)
    expected = by_formula(weights, ids[0], alibi=True)
    again = hf.load(tmp_path / "back").model
    assert float((scores(again, ids)[0, :, :rows] - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_the_first_generation_has_a_plain_head() -> None:
    facts = {"architectures": ["BaichuanForCausalLM"]}
    assert of_file(facts | {"vocab_size": 64_000}) is BAICHUAN1
    assert of_file(facts | {"vocab_size": 125_696}) is BAICHUAN2
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    heads = [kind.understand(shape | {"max_position_embeddings": 16}) for kind in (BAICHUAN1, BAICHUAN2)]
    assert [config.normalize_head for config in heads] == [False, True]


def test_a_downloaded_model_in_another_template_ends_with_the_token_of_that_template(tmp_path: Path) -> None:
    """In a model folder and in a GGUF file alike: both take the roles from one place."""
    llama(tmp_path, plain_tokenizer(tmp_path))
    words = hf.load(tmp_path).language
    assert words.roles_with(chats=True) == words.roles
    renderer = Renderer(small())
    spoken = replace(words, tokenizer=small(), chat=renderer)
    assert spoken.roles_with(chats=True) == {**words.roles, "eos_token": renderer.template.end}
