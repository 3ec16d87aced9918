"""GGUF files: what is written is read back, and what is damaged is refused by name."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest

from bloomery.core.errors import CheckpointError, DataError
from bloomery.model.config import ModelConfig
from bloomery.model.quantize import Int4, kept_bytes
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.tokenizer import Tokenizer, parsed
from bloomery.weights import architectures, gguf, gguf_layouts, gguf_writer, hf, llmc
from bloomery.weights.gguf_writer import GGUFFormat, GGUFWords
from bloomery.weights.opened import filled, opened_model
from tests.model.made import SHAPES, lively, random_ids, scores
from tests.tokenizer.made import ELSEWHERE, small
from tests.weights.made import published

import torch
from torch import nn

WORDS = GGUFWords(
    roles={"bos_token": "<|endoftext|>", "eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": None},
    chat_template="{{ messages[0]['content'] }}",
    generation={"temperature": 0.5, "top_k": 7},
)
YARN = {"kind": "yarn", "factor": 4.0, "original_context_length": 10}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "original_context_length": 64}
WIDE = {"head_dim": 24, "rope_scaling": LLAMA3, "rope_theta": 500.0, "context_length": 128}
GEMMA = {"norm_order": "both", "norm_plus_one": True, "scale_embeddings": True, "qk_norm": True, "mlp": "geglu_tanh"}
GEMMA |= {"num_layers": 7, "sliding_window": [*[8] * 5, "full"], "rope_local_theta": 1e4, "query_pre_attn_scalar": 8.0}
FACTORS = {"short_factor": [1.0, 1.1, 1.7], "long_factor": [1.0, 2.3, 9.0]}
LONGROPE: dict[str, Any] = {"partial_rotary_factor": 0.75, "num_heads": 4, "num_kv_heads": 2, "context_length": 32}
LONGROPE |= {"rope_scaling": {"kind": "longrope", "factor": 8.0, "original_context_length": 32, **FACTORS}}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with a head, biases and YaRN": {"tie_embeddings": False, "biases": "all", "rope_scaling": YARN},
    "llama with biases of attention": {"biases": "attention"},
    "llama with biases of the MLP": {"biases": "mlp"},
    "llama with wide heads and Llama 3's scaling": WIDE,
    "qwen2": {"biases": "qkv", "rope_scaling": {"kind": "linear", "factor": 2.0}},
    "qwen3": {"qk_norm": True},
    "smollm3": {"num_layers": 5, "rope_layers": [True, True, True, False], "tie_embeddings": False},
    "olmo2": {"norm_order": "after", "qk_norm": True, "qk_norm_over": "width", "num_heads": 4, "num_kv_heads": 2},
    "gemma3": GEMMA,
    "phi3": {"sliding_window": [8], "partial_rotary_factor": 0.5, "num_heads": 4, "num_kv_heads": 2},
    "phi3 with longrope": LONGROPE,
    "gptneox": {"norm": "layernorm", "biases": "all", "mlp": "gelu", "num_kv_heads": 4, "num_heads": 4}
    | {"tie_embeddings": False, "parallel_residual": True, "partial_rotary_factor": 0.25},
}


def made(file: Path, config: ModelConfig, form: GGUFFormat = "float32", padding: int = 3) -> Transformer:
    model = lively(config, 0, small().vocab_size + padding)
    gguf_writer.write(file, model, small(), WORDS, form, "made")
    return model


def read_back(file: Path) -> Transformer:
    found = gguf.read(file)
    kind = architectures.of_file(found.facts)
    model = Transformer(kind.understand(found.facts), found.facts["vocab_size"]).eval()
    weights = model.state_dict()
    own = [name for name in weights if not (model.config.tie_embeddings and name == "head.weight")]
    for piece in kind.pieces(own):
        tensor = found.tensors.get(piece.theirs, torch.float32)
        assert tensor is not None, piece.theirs
        architectures.spread(piece, tensor, weights)
    assert found.tensors.names == {piece.theirs for piece in kind.pieces(own)}
    return model


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**(SHAPES[0].model_dump() | changes))


@pytest.mark.parametrize("shape", [*(config(**case) for case in CASES.values()), llmc.shape(24, 2, 3, 40)])
def test_a_model_comes_back_with_the_same_shape_and_logits(tmp_path: Path, shape: ModelConfig) -> None:
    model = made(tmp_path / "a.gguf", shape)
    again = read_back(tmp_path / "a.gguf")
    for name in type(shape).model_fields:
        assert again.config.of_every_layer(name) == model.config.of_every_layer(name), name
    ids = random_ids(2, 30, 0, small().vocab_size)
    assert torch.equal(scores(again, ids), scores(model, ids))


def test_the_words_of_a_model_come_back(tmp_path: Path) -> None:
    made(tmp_path / "a.gguf", SHAPES[0])
    found = gguf.read(tmp_path / "a.gguf")
    tokenizer = Tokenizer(parsed(found.tokenizer_json, "a.gguf"))
    assert tokenizer.hash == small().hash
    assert (found.roles, found.chat_template, found.add_bos) == (WORDS.roles, WORDS.chat_template, False)
    ends = {"eos_token_id": small().end_id, "bos_token_id": small().document_id, "pad_token_id": small().pad_id}
    assert found.generation == {"temperature": 0.5, "top_k": 7, **ends}


def test_tokens_merges_and_the_name_of_the_pattern_alone_give_the_same_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "to_json", lambda self: "")
    made(tmp_path / "a.gguf", SHAPES[0])
    inner = parsed(gguf.read(tmp_path / "a.gguf").tokenizer_json, "a.gguf")
    for text in (ELSEWHERE.replace("e\u0301", ""), "the lamp, 12 and é  \n\n it's"):
        assert inner.encode(text).ids == small().encode(text)


@pytest.mark.parametrize(("form", "off"), [("float16", 2e-3), ("bfloat16", 2e-2), ("q8_0", 2e-2), ("q4_0", 0.3)])
def test_a_number_format_rounds_matrices_and_leaves_norms(tmp_path: Path, form: GGUFFormat, off: float) -> None:
    model = made(tmp_path / "a.gguf", config(hidden_size=64, intermediate_size=96), form)
    again = read_back(tmp_path / "a.gguf").state_dict()
    kinds = {name: stored.kind.name for name, stored in gguf.read(tmp_path / "a.gguf").tensors.stored.items()}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == {"float16": "F16", "bfloat16": "BF16"}.get(form, "Q8_0")
    for name, weight in model.state_dict().items():
        assert float((again[name] - weight).abs().max()) <= off * float(weight.abs().max()), name
        assert weight.dim() > 1 or torch.equal(again[name], weight), name
    assert gguf_writer.size_bytes(model, form) < (tmp_path / "a.gguf").stat().st_size


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_keeps_the_blocks_of_a_file_as_they_are(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of queries and keys, whose rows llama.cpp has in another order, and of layers with biases."""
    monkeypatch.setitem(gguf_writer.KINDS, "q4_0", package.GGMLQuantizationType[kind])
    made(tmp_path / "a.gguf", config(hidden_size=64, intermediate_size=96, biases="qkv"), "q4_0")
    opened = opened_model(tmp_path / "a.gguf")
    ours, exact = filled(opened, opened.rows, "int4", "cpu"), filled(opened, opened.rows, "float32", "cpu")
    layers = dict(ours.named_modules())
    matrices = [name for name, layer in exact.named_modules() if isinstance(layer, nn.Linear) and name != "head"]
    assert len(matrices) == 14
    for name in matrices:
        layer, like = layers[name], exact.get_submodule(name)
        assert isinstance(layer, Int4)
        assert isinstance(like, nn.Linear)
        assert torch.equal(layer.dense(torch.float32), like.weight)
        assert (layer.bias is None) == (like.bias is None)
        assert layer.bias is None or torch.equal(layer.bias, like.bias.bfloat16())
    stored = gguf.read(tmp_path / "a.gguf").tensors.stored["blk.0.ffn_up.weight"]
    assert (
        kept_bytes(layers["blocks.0.mlp.up"]) == 96 * 2 * 20 == stored.size_bytes * (20 / 18 if kind == "Q4_0" else 1)
    )


def test_a_model_that_llama_cpp_does_not_have_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for changes, why in (
        ({"mlp": ["geglu"]}, "hidden_act='gelu' would be 'silu' there"),
        ({"sliding_window": [8], "head_dim": 12}, "sliding_window=8 would be None there"),
        (GEMMA | {"rope_local_theta": 2e4}, "rope_local_base_freq=20000.0 would be 10000.0 there"),
        (GEMMA | {"query_pre_attn_scalar": 5.0}, "query_pre_attn_scalar=5 would be 8 there"),
        ({"rope_layers": [True, False]}, r"no_rope_layers=\[1, 0\] would be \[1, 1\] there"),
        (LONGROPE | {"mlp": "geglu"}, "hidden_act='gelu' would be 'silu' there"),
    ):
        with pytest.raises(CheckpointError, match=why):
            made(tmp_path / "a.gguf", config(**changes))
    huge = lively(SHAPES[0], 0, small().vocab_size)
    with torch.no_grad():
        huge.get_parameter("blocks.0.attention.q.weight")[0, 0] = 1e38
    for form in ("float16", "q8_0"):
        with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight holds numbers up to 1e\+38"):
            gguf_writer.write(tmp_path / "a.gguf", huge, small(), WORDS, form, "huge")
    assert not list(tmp_path.iterdir())


def damaged(file: Path, at: int, data: bytes) -> str:
    """What is said of a file with other bytes at a place."""
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    changed = file.with_name("damaged.gguf")
    changed.write_bytes(bytes(content))
    with pytest.raises(CheckpointError) as error:
        read_whole(changed)
    return str(error.value)


def read_whole(file: Path) -> None:
    found = gguf.read(file)
    for name in found.tensors.names:
        found.tensors.get(name)


def test_a_damaged_header_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    made(file, SHAPES[0])
    data = file.read_bytes()
    huge = struct.pack("<Q", 2**60)
    assert "begins with b'GGML'" in damaged(file, 0, b"GGML")
    assert "has version 77" in damaged(file, 4, struct.pack("<I", 77))
    assert "is big-endian" in damaged(file, 4, struct.pack(">I", 3))
    assert f"says that it has {2**60:,} tensors" in damaged(file, 8, huge)
    assert f"says that it has {2**60:,} entries of metadata" in damaged(file, 16, huge)
    assert f"has a name of {2**60:,} bytes" in damaged(file, 24, huge)
    tokens = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    assert f"says that it has {2**60:,} items in tokenizer.ggml.tokens" in damaged(file, tokens, huge)
    norm = data.index(b"blk.0.attn_norm.weight") + len("blk.0.attn_norm.weight")
    assert "blk.0.attn_norm.weight has 99 dimensions" in damaged(file, norm, struct.pack("<I", 99))
    assert "blk.0.attn_norm.weight lies at bytes" in damaged(file, norm + 4, struct.pack("<Q", 2**40))
    assert "blk.0.attn_norm.weight lies at bytes" in damaged(file, norm + 16, struct.pack("<Q", 2**60))
    assert "blk.0.attn_norm.weight has shape (16,), not (32,)" in damaged(file, norm + 4, struct.pack("<Q", 16))
    assert "has the number format 99, which Bloomery does not read" in damaged(file, norm + 12, struct.pack("<I", 99))
    assert "share bytes of the file" in damaged(file, norm + 16, struct.pack("<Q", 0))
    first = data.index(b"blk.0.ffn_norm.weight")
    assert "twice" in damaged(file, data.index(b"blk.1.ffn_norm.weight"), b"blk.0.ffn_norm.weight")
    assert "blk.0.ffn_norm.weight is missing" in damaged(file, first, b"blk.0.fXn_norm.weight")
    assert "has the unknown architecture 'lXama'" in damaged(file, data.index(b"llama", 24), b"lXama")
    assert "by the unknown rule 'qXen2'" in damaged_words(file, b"qwen2", b"qXen2")
    layers = data.index(b"llama.block_count") + len("llama.block_count") + 4
    assert "has 0 layers and 4 heads" in damaged(file, layers, struct.pack("<I", 0))
    start = gguf.read(file).tensors.stored["blk.0.attn_norm.weight"].start
    nan = struct.pack("<f", float("nan"))
    assert "blk.0.attn_norm.weight holds 1 of 32 numbers that are NaN" in damaged(file, start + 8, nan)
    for size in (3, 20, 100, norm + 6, len(data) - 40):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"less than a header|torn|has a name|says that|lies at bytes"):
            gguf.read(tmp_path / "cut.gguf")


def damaged_words(file: Path, was: bytes, now: bytes) -> str:
    """What is said of a file without a tokenizer.json, with another word after `tokenizer.ggml.pre`."""
    data = file.read_bytes().replace(b"tokenizer.huggingface.json", b"tokenizer.huggingface.jXon")
    at = data.index(was, data.index(b"tokenizer.ggml.pre"))
    file.with_name("words.gguf").write_bytes(data)
    return damaged(file.with_name("words.gguf"), at, now)


def test_llama_3_scaling_follows_from_its_factors() -> None:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for changes in ({}, {"factor": 8.0}, {"original_max_position_embeddings": 4096, "high_freq_factor": 2.5}):
        factors = gguf_layouts.llama3_factors(500_000.0, 64, scaling | changes)
        as_stored = torch.tensor(factors, dtype=torch.float32).tolist()
        assert gguf_layouts.llama3_scaling(as_stored, 500_000.0, Path("a")) == {
            "rope_type": "llama3",
            **scaling,
            **changes,
        }
    for count, original in ((8, 32), (4, 8192), (3, 512), (16, 2000)):  # where few frequencies tell it
        few = scaling | {"original_max_position_embeddings": original}
        factors = gguf_layouts.llama3_factors(500_000.0, count, few)
        computed = gguf_layouts.llama3_scaling(factors, 500_000.0, Path("a"))
        assert computed is not None
        assert computed.pop("rope_type") == "llama3"
        assert gguf_layouts.llama3_factors(500_000.0, count, computed) == pytest.approx(factors, rel=1e-6)
    with pytest.raises(CheckpointError, match="do not match Llama 3"):
        gguf_layouts.llama3_scaling([1.0, 3.0, 2.0, 5.0], 500_000.0, Path("a"))


def test_a_sentencepiece_vocabulary_has_the_ids_of_llama_cpp() -> None:
    """A space before each part between special tokens, user-defined ones too; rows at the end may have no token."""
    tokens = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "\u2581a",
        "<|u|>",
        "[PAD262]",
    ]
    kinds = np.array([2, 3, *[6] * 256, 1, 1, 1, 4, 5])
    entries = {"tokenizer.ggml.scores": -np.arange(len(tokens), dtype=float), "tokenizer.ggml.token_type": kinds}
    inner = parsed(gguf._sentencepiece(gguf.Metadata(entries, Path("a")), tokens), "a")
    ids = {name: tokens.index(name) for name in ("\u2581a", "a", "<|u|>")}
    assert inner.encode("aa<|u|>a").ids == [ids["\u2581a"], ids["a"], ids["<|u|>"], ids["\u2581a"]]
    assert inner.token_to_id("[PAD262]") is None


def test_a_wrong_sampling_setting_is_reported_with_its_file_and_key(tmp_path: Path) -> None:
    words, model = replace(WORDS, chat_template=None), lively(SHAPES[0], 0, small().vocab_size)
    gguf_writer.write(tmp_path / "a.gguf", model, small(), words, "float32", "made")
    data = (tmp_path / "a.gguf").read_bytes()
    assert hf.language(tmp_path / "a.gguf").sampling == {"temperature": 0.5, "top_k": 7}
    key, number = b"general.sampling.temp", struct.pack("<f", 0.5)
    at = data.index(number, data.index(key))
    (tmp_path / "b.gguf").write_bytes(data[:at] + struct.pack("<f", -0.5) + data[at + 4 :])
    with pytest.raises(DataError, match=r"b\.gguf: general\.sampling\.temp must be at least 0 and at most") as caught:
        hf.language(tmp_path / "b.gguf").sampling  # noqa: B018
    assert "gguf-set-metadata" in caught.value.hint


def test_a_scale_of_positions_without_a_type_is_linear(tmp_path: Path) -> None:
    """As in llama.cpp."""
    made(tmp_path / "a.gguf", config(rope_scaling={"kind": "linear", "factor": 2.0}))
    data = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "b.gguf").write_bytes(data.replace(b"llama.rope.scaling.type", b"llama.rope.scaling.xxxx"))
    for name in "ab":
        meta = gguf.read(tmp_path / f"{name}.gguf")
        assert meta.facts["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}, name


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_space_before_each_text_goes_into_the_file(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    spec = {"normalizer": None, "pre_tokenizer": before}
    assert gguf_writer._puts_space_first(spec, "a") == (scheme == "always")
    assert ("without a chat template" in capsys.readouterr().err) == (scheme == "first")
    with pytest.raises(CheckpointError, match="changes text by the step NFKC, which llama"):
        gguf_writer._puts_space_first(spec | {"normalizer": {"type": "NFKC"}}, "a")


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 20.0, "temperature": 0.5}, {"top_k": 20, "temperature": 0.5}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    ],
)
def test_sampling_settings_go_into_the_file_as_a_chat_reads_them(
    tmp_path: Path, generation: dict[str, Any], expected: dict[str, Any]
) -> None:
    words, model = replace(WORDS, chat_template=None, generation=generation), lively(SHAPES[0], 0, small().vocab_size)
    gguf_writer.write(tmp_path / "a.gguf", model, small(), words, "float32", "made")
    assert hf.language(tmp_path / "a.gguf").sampling == expected


def test_the_window_of_a_phi3_is_written_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "a.gguf", config(**CASES["phi3"]))
    assert "ignores the sliding window of Phi-3: after 8 tokens" in " ".join(capsys.readouterr().err.split())


def test_metadata_that_changes_the_results_is_refused_by_name(tmp_path: Path) -> None:
    made(tmp_path / "a.gguf", config(rope_scaling={"kind": "linear", "factor": 2.0}))
    data = (tmp_path / "a.gguf").read_bytes()
    data = data.replace(b"llama.rope.scaling.factor", b"llama.attention.clamp_kqv")
    (tmp_path / "b.gguf").write_bytes(data)
    opened_model(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"clip_qkv = 2\.0 changes what LlamaForCausalLM computes"):
        opened_model(tmp_path / "b.gguf")


def test_scaled_frequencies_of_an_impossible_base_are_refused(tmp_path: Path) -> None:
    made(tmp_path / "a.gguf", config(**WIDE))
    data = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(data.replace(struct.pack("<f", 500.0), struct.pack("<f", -1.0)))
    with pytest.raises(CheckpointError, match="rope_theta: must be at least"):
        opened_model(tmp_path / "a.gguf")


@pytest.mark.slow
def test_a_published_file_is_read() -> None:
    found = gguf.read(published())
    shape = architectures.of_file(found.facts).understand(found.facts)
    assert (shape.hidden_size, shape.num_layers, shape.rope_theta, shape.norm_eps) == (576, 30, 100_000.0, 1e-5)
    assert found.roles["eos_token"] == "<|im_end|>"
    assert found.chat_template is not None
    embedding = found.tensors.get("model.embed_tokens.weight")
    assert embedding is not None
    assert (embedding.shape, embedding.dtype) == ((49152, 576), torch.bfloat16)
    inner = parsed(found.tokenizer_json, "published")
    # as transformers 5.24 and llama.cpp encode it
    assert inner.encode("The capital of France is", add_special_tokens=False).ids == [504, 3575, 282, 4649, 314]
    assert inner.encode("Hello world 1234 it's").ids == [19556, 905, 216, 33, 34, 35, 36, 357, 506]


READ = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
READ |= {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}
READ |= {"TQ1_0", "TQ2_0", "MXFP4", "NVFP4"}
"""What the package decodes in version 0.19."""


@pytest.mark.parametrize("form", package.GGMLQuantizationType, ids=lambda form: form.name)
def test_a_file_with_a_tensor_of_any_type_is_read_as_the_package_does_or_refused_by_type_and_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: package.GGMLQuantizationType
) -> None:
    gate, written = "blk.0.ffn_gate.weight", list[Any]()
    shape = config(hidden_size=256, intermediate_size=256, num_layers=1)
    rng, (block, width) = np.random.default_rng(0), package.GGML_QUANT_SIZES[form]
    quantize = package.quants.quantize

    def blocks(numbers: Any, kind: Any) -> Any:
        """Random blocks, of whose scales none is infinite."""
        if kind != form or numbers.shape != (256, 256):
            return quantize(numbers, kind)
        some = rng.integers(0, 256, (4 * 256 * 256 // block, width), dtype=np.uint8)
        if form.name in READ:
            with np.errstate(all="ignore"):
                dense = package.quants.dequantize(some, form).reshape(len(some), block)
            some = some[(np.abs(dense) < 1e30).all(1)]
        written.append(some[: 256 * 256 // block].reshape(256, -1))
        return written[0]

    monkeypatch.setattr(
        gguf_writer, "_kind", lambda name, *how: form if name == gate else package.GGMLQuantizationType.F32
    )
    monkeypatch.setattr(package.quants, "quantize", blocks)
    monkeypatch.setattr(gguf_writer, "_check_range", lambda *_: None)
    made(tmp_path / "a.gguf", shape)
    if form.name in READ:
        found = gguf.read(tmp_path / "a.gguf").tensors.get("model.layers.0.mlp.gate_proj.weight", torch.float32)
        assert found is not None
        assert torch.equal(found, torch.from_numpy(package.quants.dequantize(written[0], form)))
        return
    with pytest.raises(CheckpointError, match=f"{gate} has the number format {form.name}, which") as caught:
        gguf.read(tmp_path / "a.gguf")
    assert set(caught.value.hint.partition("Bloomery reads ")[2].rstrip(".").split(", ")) == READ


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K"])
def test_blocks_become_the_numbers_that_the_package_of_llama_cpp_makes_of_them(kind: str) -> None:
    form = package.GGMLQuantizationType[kind]
    block, width = package.GGML_QUANT_SIZES[form]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (50, width), dtype=np.uint8)
    blocks[:, 1] &= 0x3F  # no scale is infinite
    blocks[:, 3] &= 0x3F
    blocks[:, -1] &= 0x3F
    expected = package.quants.dequantize(blocks.reshape(1, -1), form).reshape(50, block)
    assert torch.equal(gguf_layouts.dequantize(blocks, form), torch.from_numpy(expected))
