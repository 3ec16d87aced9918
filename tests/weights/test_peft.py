import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.errors import CheckpointError, DataError
from bloomery.model import lora
from bloomery.model.config import Base, Lora, ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.chat_template import TEMPLATES, Renderer
from bloomery.weights import architectures, export, hf, locate
from bloomery.weights import peft as weights_peft
from bloomery.weights.hf import BaseModel, Lineage
from bloomery.weights.opened import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.model.made import CHOICES, SHAPES, assert_merged, lively, random_ids, scores
from tests.tokenizer.made import small

import safetensors.torch
import torch
from torch import nn

theirs_warn = pytest.mark.filterwarnings("ignore")
"""Of peft: it says which of its own settings it mends, and what of its dependencies is old."""
VOCAB = small().vocab_size
GPT2 = CHOICES["absolute positions"].model_copy(update={"num_kv_heads": 4})
NEOX = CHOICES["GPT-NeoX"].model_copy(update={"num_kv_heads": 4, "tie_embeddings": False})
FAMILIES = {"Llama": SHAPES[0], "Qwen2": CHOICES["Qwen2"], "GPT-2": GPT2, "GPT-NeoX": NEOX}
LINEAGE = Lineage(tokenizer=small().hash, template=TEMPLATES["bloomery"].hash, shards="5" * 64, base="6" * 64)


def adapted(root: Path, shape: ModelConfig, settings: Lora, seed: int = 2) -> tuple[Transformer, Path]:
    """A base in root/base, and in root/adapters what was trained beside it: a model in training, and that folder."""
    renderer = Renderer(small())
    hf.save(root / "base", lively(shape, 0, VOCAB), renderer, LINEAGE)
    model = lively(shape, 0, VOCAB)
    lora.attach(model, settings, seed=1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in lora.weights(model).values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    below = BaseModel(root / "base", hf.digest(root / "base"))
    weights, folder = lora.weights(model), root / "adapters"
    hf.save_adapters(folder, weights, model, renderer, LINEAGE, settings, below)
    return model.eval(), folder


def logits_of(model: Transformer) -> torch.Tensor:
    return scores(model, random_ids(2, 30, vocab_size=VOCAB))


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found - wanted).abs().max()) < 2e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("base", ["bfloat16", "int8", "nf4", "nf4_double"])
@pytest.mark.parametrize("name", ["", "absolute positions", "Qwen2"])
def test_a_base_that_is_read_in_its_format_is_the_one_that_was_frozen_after_reading(
    tmp_path: Path, name: str, base: Base
) -> None:
    """Also of adapters, which are merged first, and no block ever has a matrix in another format."""
    shape = CHOICES[name] if name else SHAPES[0]
    settings = Lora(rank=2, base_dtype=base, target_modules=("attention.*",))
    _, folder = adapted(tmp_path, shape, settings)
    for path in (tmp_path / "base", folder):
        later, streamed = hf.load(path).model, hf.load(path, base=base).model
        assert not any(type(one) is nn.Linear for one in streamed.blocks.modules())
        for model in (later, streamed):
            lora.attach(model, settings, seed=3)
        wanted, found = later.state_dict(), streamed.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) and found[key].dtype == wanted[key].dtype for key in wanted)
        assert (streamed.head.weight is streamed.embed.weight) == shape.tie_embeddings


@pytest.mark.parametrize("base", ["float32", "bfloat16", "int8", "nf4", "nf4_double"])
@pytest.mark.parametrize("name", ["", "Qwen2", "absolute positions", "differential"])
def test_a_folder_of_adapters_is_read_as_the_model_that_was_trained(tmp_path: Path, name: str, base: Base) -> None:
    """Of a quantised base too: what is merged into is what the base computed with."""
    model, folder = adapted(tmp_path, CHOICES[name] if name else SHAPES[0], Lora(rank=3, base_dtype=base))
    loaded = hf.load(folder)
    assert close(logits_of(loaded.model), logits_of(model))
    assert_merged(loaded.model, model)
    assert loaded.lineage == LINEAGE
    assert loaded.folder == folder
    names = {"adapter_config.json", "adapter_model.safetensors", "bloomery.json", "tokenizer.json"}
    assert {file.name for file in folder.iterdir()} == names | {"tokenizer_config.json", "SHA256SUMS"}


def test_adapters_whose_lineage_names_no_base_are_refused(tmp_path: Path) -> None:
    _, folder = adapted(tmp_path, SHAPES[0], Lora(rank=3))
    facts = json.loads((folder / hf.LINEAGE).read_text())
    del facts[hf.BASE]
    (folder / hf.LINEAGE).write_text(json.dumps(facts))
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="has no key 'adapts', which names the base model of the adapters"):
        hf.load(folder)


@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_dora_are_read_as_the_model_that_was_trained(tmp_path: Path, family: str, base: Base) -> None:
    settings = Lora(rank=3, dora=True, base_dtype=base, target_modules=("attention.q", "attention.v", "mlp.*"))
    model, folder = adapted(tmp_path, FAMILIES[family], settings)
    assert close(logits_of(hf.load(folder).model), logits_of(model))
    again = lively(FAMILIES[family], 0, VOCAB)
    lora.attach(again, settings, seed=9)
    weights_peft.fill(again, folder)
    for name, weight in lora.weights(again).items():
        assert torch.equal(weight, lora.weights(model)[name]), name


@theirs_warn
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_same_logits_from_our_adapters_of_dora(tmp_path: Path, family: str) -> None:
    peft, transformers = theirs()
    settings = Lora(rank=3, alpha=5, dora=True, target_modules=("attention.q", "attention.v", "mlp.*"))
    model, folder = adapted(tmp_path, FAMILIES[family], settings)
    base = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"))
    found = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    with torch.no_grad():
        logits = found(random_ids(2, 30, vocab_size=VOCAB)).logits
    assert close(logits, logits_of(model))


@theirs_warn
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stabilized", [False, True])
def test_peft_computes_the_same_logits_from_our_adapters(tmp_path: Path, family: str, stabilized: bool) -> None:
    peft, transformers = theirs()
    targets = ("attention.q", "attention.v", "mlp.*", "blocks.1.attention.out")
    settings = Lora(rank=3, alpha=5, target_modules=targets, rank_stabilized=stabilized)
    model, folder = adapted(tmp_path, FAMILIES[family], settings)
    base = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"))
    found = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    with torch.no_grad():
        logits = found(random_ids(2, 30, vocab_size=VOCAB)).logits
    assert close(logits, logits_of(model))
    assert close(logits_of(hf.load(folder).model), logits)


@theirs_warn
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_that_peft_trained_are_merged_into_the_same_logits(tmp_path: Path, family: str) -> None:
    peft, transformers = theirs()
    shape = FAMILIES[family]
    hf.save(tmp_path / "base", lively(shape, 0, VOCAB), Renderer(small()), LINEAGE)
    base = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"))
    names = {"GPT-2": ["c_attn", "c_fc"], "GPT-NeoX": ["query_key_value", "dense_h_to_4h"]}.get(
        family, ["q_proj", "down_proj"]
    )
    ranks = {rf".*\.[0]\..*{names[0]}": 2, names[1]: 3}
    alphas = {rf".*\.[01]\.(self_attn|attn|attention)\.{names[0]}": 11, rf"^.*\.0\.mlp\.{names[1]}": 3}
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=names,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        use_rslora=True,
        rank_pattern=ranks,
        alpha_pattern=alphas,
    )
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(str(tmp_path / "adapters"))
    with torch.no_grad():
        logits = model(random_ids(2, 30, vocab_size=VOCAB)).logits
    loaded = hf.load(tmp_path / "adapters")
    assert close(logits_of(loaded.model), logits)
    assert loaded.renderer.name == "bloomery"
    assert loaded.language.source != tmp_path / "adapters"


def test_adapters_of_peft_with_a_tokenizer_and_a_template_speak_in_it(tmp_path: Path) -> None:
    _, folder = adapted(tmp_path / "run", SHAPES[0], Lora(rank=3))
    export.write_adapters(folder, out := tmp_path / "out")
    template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    settings = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    for words in (hf.language(out), hf.load(out).language):
        assert words.chat is not None
        assert words.chat.source == template
    (out / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    assert hf.language(out).source != out  # the words of the base
    spec = json.loads((out / "tokenizer.json").read_text())
    first, second = spec["added_tokens"][:2]
    first["id"], second["id"] = second["id"], first["id"]
    vocabulary = spec["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in (first, second) if token["content"] in vocabulary}
    (out / "tokenizer.json").write_text(json.dumps(spec))
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="its tokenizer gives"):
        hf.load(out)


def theirs() -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
        import transformers
    return peft, transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_taken_up_bit_for_bit_where_training_goes_on(tmp_path: Path, family: str) -> None:
    settings = Lora(rank=3, target_modules=("attention.q", "attention.v", "mlp.*"))
    model, folder = adapted(tmp_path, FAMILIES[family], settings)
    other = lively(FAMILIES[family], 0, VOCAB)
    lora.attach(other, settings, seed=9)
    hf.fill_adapters(other, folder, LINEAGE)
    for name, weight in lora.weights(model).items():
        assert torch.equal(weight, lora.weights(other)[name]), name
    wrong = Lineage(tokenizer=small().hash, template=None, shards="7" * 64)
    with pytest.raises(CheckpointError, match="was made with"):
        hf.fill_adapters(other, folder, wrong)
    fewer = lively(FAMILIES[family], 0, VOCAB)
    lora.attach(fewer, Lora(rank=3, target_modules=("attention.q",)), seed=9)
    with pytest.raises(CheckpointError, match="the adapters differ at"):
        hf.fill_adapters(fewer, folder, LINEAGE)


def test_adapters_have_the_names_that_the_files_of_their_base_have(tmp_path: Path) -> None:
    """A Phi-3 is a Llama by its shape, but PEFT finds its matrices by the names of a Phi-3."""
    settings = Lora(rank=3, target_modules=("all-linear",))
    model, folder = adapted(tmp_path, SHAPES[0], settings)
    base, kind = tmp_path / "base", architectures.PHI3
    weights = hf.load(base).weights
    fused = {one.theirs: architectures.gathered(one, weights).contiguous() for one in kind.pieces(list(weights))}
    safetensors.torch.save_file(fused, base / hf.WEIGHTS)
    facts = json.loads((base / hf.CONFIG).read_text()) | {"architectures": [kind.name], "model_type": kind.model_type}
    (base / hf.CONFIG).write_text(json.dumps(facts))
    (base / "SHA256SUMS").unlink()
    below = BaseModel(base, hf.digest(base))
    hf.save_adapters(folder, lora.weights(model), model, Renderer(small()), LINEAGE, settings, below)
    names = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
    assert {name.split(".")[-3] for name in names} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert close(logits_of(hf.load(folder).model), logits_of(model))
    other = lively(SHAPES[0], 0, VOCAB)
    lora.attach(other, settings, seed=9)
    weights_peft.fill(other, folder)
    assert torch.equal(logits_of(other.eval()), logits_of(model))


def test_exporting_adapters_merges_them_and_a_run_can_move_as_a_whole(tmp_path: Path) -> None:
    model, _ = adapted(tmp_path / "run", SHAPES[0], Lora(rank=2, base_dtype="int8"))
    (tmp_path / "run").rename(tmp_path / "moved")
    folder = locate.locate_model(tmp_path / "moved" / "adapters")
    written = export.write(hf.load(folder), tmp_path / "out", "hf", "float32")
    assert "model.safetensors" in written["files"]
    assert close(logits_of(hf.load(tmp_path / "out").model), logits_of(model))


def test_adapters_without_their_base_or_on_another_one_are_refused(tmp_path: Path) -> None:
    _, folder = adapted(tmp_path, SHAPES[0], Lora(rank=2))
    hf.save(tmp_path / "base", lively(SHAPES[0], 8, VOCAB), Renderer(small()), LINEAGE)
    with pytest.raises(CheckpointError, match=r"the model was trained with the base .*, but this one is"):
        hf.load(folder)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"needs the base model \.\./base, which is not at"):
        hf.load(folder)


def renamed_base(folder: Path, name: str, **more: Any) -> None:
    """Adapters as PEFT alone leaves them, whose base has another name."""
    for own in ("bloomery.json", "SHA256SUMS"):
        (folder / own).unlink(missing_ok=True)
    facts = json.loads((folder / ADAPTER_CONFIG).read_text()) | {"base_model_name_or_path": name} | more
    (folder / ADAPTER_CONFIG).write_text(json.dumps(facts))


@pytest.mark.parametrize("start", ["adapters", "work", "absolute"])
def test_the_base_of_adapters_is_looked_for_from_their_folder_and_then_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    model, folder = adapted(tmp_path, SHAPES[0], Lora(rank=2))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    moved = {"adapters": folder / "models" / "base", "work": Path("models/base").resolve()}
    moved["absolute"] = tmp_path / "elsewhere" / "base"
    shutil.move(tmp_path / "base", moved[start])
    renamed_base(folder, str(moved[start]) if start == "absolute" else "models/base")
    assert hf.base_of(folder) == moved[start]
    assert close(logits_of(hf.load(folder).model), logits_of(model))
    if start == "work":  # the folder of the adapters goes first
        hf.save(folder / "models" / "base", lively(SHAPES[0], 8, VOCAB), Renderer(small()), LINEAGE)
        assert hf.base_of(folder) == folder / "models" / "base"


@pytest.mark.parametrize("name", ["models/tiny", "./models", "../models/tiny", "a/b/c", "gpt2"])
def test_a_base_that_is_nowhere_is_an_error_with_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, folder = adapted(tmp_path, SHAPES[0], Lora(rank=2))
    monkeypatch.chdir(tmp_path)
    renamed_base(folder, name)
    with pytest.raises(CheckpointError) as caught:
        hf.load(folder)
    assert f"needs the base model {name}" in caught.value.what
    assert f"{folder / name} or {Path(name)} in the working directory" in caught.value.what
    assert (f"hf download {name}\n" in caught.value.hint) == (name in ("models/tiny", "gpt2"))


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 5000, "a\0b", "~no one/x", "\ud800", "..", ""])
def test_a_base_whose_name_is_no_path_and_a_working_directory_that_is_gone_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match="needs the base model"):
        locate.named_model(tmp_path / ADAPTER_CONFIG, name)


def test_adapters_that_are_torn_or_more_than_that_are_refused(tmp_path: Path) -> None:
    _, folder = adapted(tmp_path, SHAPES[0], Lora(rank=2))
    facts = json.loads((folder / ADAPTER_CONFIG).read_text())
    for change, what in (
        ({"use_dora": True}, "holds no PEFT adapter"),
        ({"peft_type": "LOHA"}, "its kind is 'LOHA'"),
    ):
        (folder / ADAPTER_CONFIG).write_text(json.dumps(facts | change))
        with pytest.raises(CheckpointError, match=what):
            hf.load(folder)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(facts))
    (folder / ADAPTER_WEIGHTS).write_bytes((folder / ADAPTER_WEIGHTS).read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="holds no PEFT adapter"):
        hf.load(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base model"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA', which changes the base model"),
        ({"alpha_pattern": {"([a-z._0-9]+)+X": 2.0}}, "may take too long"),
        ({"lora_alpha": 1e300}, "not a finite|NaN|infinite"),
    ],
)
def test_adapters_that_would_be_merged_wrongly_or_never_are_refused(
    tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    _, folder = adapted(tmp_path, SHAPES[0], Lora(rank=2))
    (folder / "SHA256SUMS").unlink()
    facts = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(facts | change))
    with pytest.raises(CheckpointError, match=what):
        hf.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: (a[:0], b[:, :0]),
        lambda a, b: (a[0], b),
        lambda a, b: (a, b[:, :1]),
        lambda a, b: (a[None], b),
        lambda a, b: (a.int(), b),
    ],
    ids=["rank 0", "vector", "other rank", "three dimensions", "integers"],
)
def test_tensors_that_are_no_low_rank_matrices_are_refused_by_name(tmp_path: Path, change: Any) -> None:
    _, folder = adapted(tmp_path, SHAPES[0], Lora(rank=2))
    (folder / "SHA256SUMS").unlink()
    tensors = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
    first = min(name for name in tensors if name.endswith("lora_A.weight"))
    second = first.replace("lora_A", "lora_B")
    a, b = change(tensors[first], tensors[second])
    safetensors.torch.save_file(tensors | {first: a.contiguous(), second: b.contiguous()}, folder / ADAPTER_WEIGHTS)
    with pytest.raises(CheckpointError, match=r"_proj has (tensors|numbers)"):
        hf.load(folder)
    safetensors.torch.save_file({}, folder / ADAPTER_WEIGHTS)
    with pytest.raises(CheckpointError, match="it has no matrix"):
        hf.load(folder)


def test_adapters_that_are_their_own_base_are_refused(tmp_path: Path) -> None:
    _, folder = adapted(tmp_path, SHAPES[0], Lora(rank=2))
    other = tmp_path / "other"
    for one, base in ((folder, other), (other, folder)):
        one.mkdir(exist_ok=True)
        facts = json.loads((folder / ADAPTER_CONFIG).read_text()) | {"base_model_name_or_path": str(base)}
        (one / ADAPTER_CONFIG).write_text(json.dumps(facts))
    shutil.copyfile(folder / ADAPTER_WEIGHTS, other / ADAPTER_WEIGHTS)
    (folder / "bloomery.json").unlink()
    for start in (folder, other):
        with pytest.raises(CheckpointError, match="is its own base model"):
            hf.load(start)


@pytest.mark.parametrize("number_format", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_merging_weight_by_weight_exports_the_same_bytes_as_merging_the_whole_model(
    tmp_path: Path, family: str, number_format: Any
) -> None:
    _, folder = adapted(tmp_path / "run", FAMILIES[family], Lora(rank=3, base_dtype="nf4"))
    streamed = hf.streamed(folder)
    assert all(weight.is_meta for weight in streamed.model.parameters())
    for name, loaded in (("whole", hf.load(folder)), ("streamed", streamed)):
        export.write(loaded, tmp_path / name, "hf", number_format)
    files = {path.name for path in (tmp_path / "whole").iterdir()} - {"README.md"}
    assert "model.safetensors" in files
    for name in files:
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_adapters_whose_base_is_in_the_cache_of_the_hub_are_exported_with_its_name_and_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = adapted(tmp_path, SHAPES[0], Lora(rank=3))
    commit, cache = "0123456789abcdef" * 2 + "01234567", tmp_path / "cache"
    base = cache / "models--some--model" / "snapshots" / commit
    base.parent.mkdir(parents=True)
    (tmp_path / "base").rename(base)
    renamed_base(folder, str(base))
    export.write_adapters(folder, tmp_path / "out")
    facts = json.loads((tmp_path / "out" / ADAPTER_CONFIG).read_text())
    assert (facts["base_model_name_or_path"], facts["revision"]) == ("some/model", commit)
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert hf.base_of(tmp_path / "out") == base
    assert close(logits_of(hf.load(tmp_path / "out").model), logits_of(model))


def test_adapters_are_exported_alone_with_their_words_and_the_path_of_their_base(tmp_path: Path) -> None:
    model, folder = adapted(tmp_path / "run", SHAPES[0], Lora(rank=3))
    written = export.write_adapters(folder, tmp_path / "out")
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(written["files"])
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        (tmp_path / "run" / "base").resolve()
    )
    assert "chat_template" in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert close(logits_of(hf.load(tmp_path / "out").model), logits_of(model))
    with pytest.raises(CheckpointError, match="holds no adapters"):
        export.write_adapters(tmp_path / "run" / "base", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_adapters_with_a_token_that_their_base_lacks_are_not_exported_alone(tmp_path: Path) -> None:
    _, folder = adapted(tmp_path / "run", SHAPES[0], Lora(rank=3))
    base = tmp_path / "run" / "base"
    for name in (hf.LINEAGE, "SHA256SUMS"):
        (base / name).unlink()
    spec = json.loads((base / "tokenizer.json").read_text())
    last = spec["added_tokens"].pop()["content"]
    spec["model"]["vocab"].pop(last, None)
    (base / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match=re.escape(f"training added the token {last!r}, and the files of PEFT")):
        export.write_adapters(folder, tmp_path / "out")
