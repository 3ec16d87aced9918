"""What is saved here is what transformers computes; all families are in test_families.py."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from transformers import AutoTokenizer, LlamaForCausalLM

from bloomery import cli
from bloomery.core.bounds import TEMPERATURE
from bloomery.core.errors import BloomeryError, CheckpointError, DataError
from bloomery.core.io import MANIFEST
from bloomery.evaluation.config import Evaluate
from bloomery.generate.engine import Engine
from bloomery.model.transformer import Transformer
from bloomery.serve.chat_model import Sampling
from bloomery.tokenizer import importers
from bloomery.tokenizer import train as tokenizer_train
from bloomery.tokenizer.chat_template import Message, Renderer, Template
from bloomery.tokenizer.config import SentencePiece
from bloomery.tokenizer.tokenizer import DOCUMENT, Tokenizer
from bloomery.tokenizer.train import train
from bloomery.train.loss import token_loss
from bloomery.weights import architectures, hf
from bloomery.weights.hf import CONFIG, LINEAGE, WEIGHTS, Lineage
from bloomery.weights.safetensors import INDEX
from tests.model.made import CHOICES, SHAPES, lively, random_config, random_ids
from tests.tokenizer.made import TEXTS, small, training_texts
from tests.tokenizer.test_pieces import theirs as trained_elsewhere

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


@pytest.mark.parametrize("seed", range(6))
def test_transformers_computes_the_same_scores(seed: int, tmp_path: Path) -> None:
    ours, other = saved(tmp_path, seed), theirs(tmp_path)
    ids = random_ids(2, ours.config.context, seed, VOCAB)
    with torch.no_grad():
        mine, yours = ours.logits(ours(ids)), other(ids).logits
    assert yours.dtype == torch.float32
    assert float(yours.std()) > 0.5
    assert float((mine - yours).abs().max()) < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_transformers_computes_the_same_gradients(seed: int, tmp_path: Path) -> None:
    ours, other = saved(tmp_path, seed), theirs(tmp_path)
    ids = random_ids(2, ours.config.context, seed, VOCAB)
    hidden = ours(ids)[:, :-1].flatten(0, 1)
    torch.autograd.backward(token_loss(hidden, ours.head.weight, ids[:, 1:].flatten()))
    torch.autograd.backward(
        F.cross_entropy(other(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    )
    yours = dict(other.named_parameters())
    compared = 0
    for name, weight in ours.named_parameters():
        mine, expected = weight.grad, yours[architectures.llama_name(name)].grad
        assert mine is not None
        assert float((mine - expected).norm()) <= 1e-4 * float(expected.norm()), name
        compared += 1
    assert compared == len(yours)


@pytest.mark.parametrize("seed", range(3))
def test_transformers_says_the_same_greedily(seed: int, tmp_path: Path) -> None:
    ours, other = saved(tmp_path, seed), theirs(tmp_path)
    prompt = random_ids(1, 5, seed, VOCAB)[0].tolist()
    said = list(Engine(ours, VOCAB).stream(prompt, max_tokens=7, stop_ids=frozenset({small().end_id})))
    ids = torch.tensor([prompt])
    out = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)
    assert out[0, 5:].tolist() == said


def test_transformers_draws_as_we_do_unless_told_otherwise(tmp_path: Path) -> None:
    saved(tmp_path, 0)
    how = theirs(tmp_path).generation_config
    assert (how.do_sample, how.temperature, how.top_k, how.top_p) == (True, TEMPERATURE, 0, 1.0)
    assert Sampling().temperature == Evaluate().answer_temperature == TEMPERATURE
    assert cli.parse(["chat", "runs/demo"]).temperature == TEMPERATURE


def test_every_setting_arrives_at_transformers(tmp_path: Path) -> None:
    for seed in range(4):
        ours, other = saved(tmp_path, seed), theirs(tmp_path).config
        shape = ours.config
        assert other.rope_parameters["rope_theta"] == shape.rope_theta != 10_000.0
        assert (other.rms_norm_eps, other.tie_word_embeddings) == (shape.norm_eps, shape.tie_embeddings)
        assert other.max_position_embeddings == shape.context
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
    assert auto.apply_chat_template(talk)["input_ids"] == RENDERER.render(talk).ids


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
    assert auto.model_max_length == random_config(0).context


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
    hf.save(again, found.model, found.renderer, found.lineage)
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
        names = [architectures.llama_name(name) for name in Transformer(config, VOCAB).state_dict()]
        assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match=r"'blocks\.0\.bias' has no counterpart"):
        architectures.llama_name("blocks.0.bias")


# --- what is refused -----------------------------------------------------------------------------------------------


def other_tokenizer() -> Tokenizer:
    return train(["some other text entirely"] * 3, VOCAB)


def test_weights_are_not_used_with_another_tokenizer(tmp_path: Path) -> None:
    saved(tmp_path, 0)
    other = other_tokenizer()
    other.save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        hf.load(tmp_path)
    assert caught.value.what == (
        f"the model was trained with the tokenizer {small().hash[:8]}, and this one is {other.hash[:8]}"
    )
    assert caught.value.where == str(tmp_path)
    assert "Use the tokenizer that lies beside the weights" in caught.value.hint


def test_weights_are_not_used_with_another_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Template(name="chatml", role="<|{role}|>")
    saved(tmp_path, 0, template=trained.hash)
    with pytest.raises(CheckpointError) as caught:
        hf.load(tmp_path)
    assert caught.value.what == (
        f"the model was trained with the chat template bloomery {trained.hash[:8]}, "
        f"and this one is {Template().hash[:8]}"
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


@pytest.mark.parametrize("field", ["tokenizer", "template", "shards", "base"])
def test_weights_that_were_made_from_something_else_are_not_gone_on_with(tmp_path: Path, field: str) -> None:
    model = saved(tmp_path / "000000003", 0)
    before = model.state_dict()["norm.weight"].clone()
    made = (getattr(LINEAGE_OF_CHAT, field) or "none")[:8]
    lineage = Lineage(**{**asdict(LINEAGE_OF_CHAT), field: "7" * 64})
    with pytest.raises(CheckpointError) as caught:
        hf.fill(model, tmp_path / "000000003", lineage)
    assert caught.value.what == f"was made with {field} {made}, and this one is 77777777"
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
            "vocab_size": "no number of ids from 1 to 4,194,304",
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
    ("a torn tokenizer", lambda f: (f / "tokenizer.json").write_bytes(b"{"), "is no tokenizer"),
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
