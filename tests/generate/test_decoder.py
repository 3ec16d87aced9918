"""Packed weights give the logits of the model, and a sequence's bits do not depend on what is computed with it."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import pytest

from bloomery.core import native
from bloomery.core.chat import SamplingConfig
from bloomery.generate import decoder
from bloomery.generate import engine as engine_module
from bloomery.generate.decoder import CACHE_FORMATS, LIBRARY, Decoder, PagePool, Pages, pack
from bloomery.generate.engine import Engine
from bloomery.model import quantize
from bloomery.model.config import Lora, ModelConfig
from bloomery.model.quantize import GROUP
from bloomery.model.transformer import Transformer
from tests.model.made import CHOICES, SHAPES, VOCAB_SIZE, lively, random_ids
from tests.model.test_lora import adapted

import torch
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(native.library(LIBRARY) is None, reason=f"native/{LIBRARY}.so: {native.state(LIBRARY)}")
WIDE = {"hidden_size": 96, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "context_length": 80}
KINDS = {
    "Llama": ModelConfig(**WIDE, intermediate_size=160),
    "GPT-2": ModelConfig(
        **WIDE, intermediate_size=160, biases="all", norm="layernorm", mlp=("gelu_tanh",), position_embedding="learned"
    ),
    "Gemma 3": ModelConfig(
        **WIDE,
        intermediate_size=160,
        norm_order="both",
        qk_norm=True,
        mlp=("geglu_tanh",),
        sliding_window=(16, "full"),
        rope_local_theta=100.0,
        norm_plus_one=True,
        scale_embeddings=True,
        query_pre_attn_scalar=20.0,
    ),
    "OLMo 2": ModelConfig(**WIDE, intermediate_size=176, norm_order="after", qk_norm=True, qk_norm_over="width"),
    "GPT-NeoX": ModelConfig(
        **WIDE,
        intermediate_size=160,
        parallel_residual=True,
        partial_rotary_factor=0.25,
        biases="all",
        norm="layernorm",
        mlp=("gelu",),
    ),
    "Baichuan2-13B": ModelConfig(
        **WIDE, intermediate_size=160, position_embedding="alibi", normalize_head=True, tie_embeddings=False
    ),
    "SmolLM3 and more": ModelConfig(
        **WIDE, intermediate_size=160, rope_layers=(True, False), biases="qkv", mlp=("relu2", "geglu")
    ),
}


@pytest.fixture(params=[4, 8, 16, 17])
def lanes(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every width of vectors that this CPU has; 17 stands for 16 with VNNI."""
    library = decoder._library()
    assert library is not None
    choose = library.bloomery_decode_lanes
    if choose(ctypes.c_int64(request.param)) != request.param:
        choose(ctypes.c_int64(17))
        pytest.skip(f"this CPU has no vectors of {request.param} numbers")
    yield request.param
    choose(ctypes.c_int64(17))


def of(model: Transformer, format: decoder.PanelFormat | str = "float32") -> Decoder:
    packed = Decoder.of(model, format, torch.float32)  # type: ignore[arg-type]
    assert packed is not None
    return packed


def logits(packed: Decoder, ids: Sequence[int], cuts: Sequence[int] = ()) -> Tensor:
    """After every token of a sequence, whose pages are out of order, computed in parts."""
    count = Pages.needed(len(ids))
    memory, pages = Pages(packed.config, count, packed.dtype), torch.arange(count, dtype=torch.int32).flip(0)[None]
    parts = []
    for begin, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        some = range(begin, end)
        found, finite = packed.step(ids[begin:end], [0] * len(some), some, pages, memory, range(len(some)))
        assert finite
        parts.append(found)
    return torch.cat(parts)


def far(got: Tensor, right: Tensor) -> float:
    return float((got - right).norm() / right.norm())


def right(model: Transformer, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model.logits(model(torch.tensor([list(ids)])))[0]


def test_the_families_have_every_kind_of_feed_forward_that_is_packed() -> None:
    assert {kind for config in KINDS.values() for kind in config.mlp} == set(decoder.ACTIVATIONS)


@pytest.mark.parametrize("name", KINDS)
def test_logits_of_each_family_are_those_of_the_model(name: str, lanes: int) -> None:
    model = lively(KINDS[name])
    ids = random_ids(1, 70, 1)[0].tolist()
    assert far(logits(of(model), ids), right(model, ids)) < 2e-6


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8", "int4"])
def test_bits_depend_neither_on_cuts_of_the_prompt_nor_on_threads(format: str, lanes: int) -> None:
    packed = of(lively(KINDS["Llama"]), format)
    ids = random_ids(1, 70, 1)[0].tolist()
    whole, threads = logits(packed, ids), torch.get_num_threads()
    assert torch.equal(logits(packed, ids, (7, 8, 9, 22, 23, 65)), whole)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert torch.equal(logits(packed, ids, (64,)), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_bits_do_not_depend_on_the_other_sequences_of_a_step(format: str) -> None:
    packed = of(lively(KINDS["Gemma 3"]), format)
    asked = [random_ids(1, length, length)[0].tolist() for length in (5, 33, 40, 1, 64, 17, 2)]
    sizes = [Pages.needed(len(ids) + 1) for ids in asked]
    memory = Pages(packed.config, sum(sizes), packed.dtype)
    pages = torch.zeros(len(asked), max(sizes), dtype=torch.int32)
    for row, size in enumerate(sizes):
        pages[row, :size] = torch.arange(size) + sum(sizes[:row])
    ids = [id for one in asked for id in one]
    sequence = [row for row, one in enumerate(asked) for _ in one]
    position = [at for one in asked for at in range(len(one))]
    ends = [sum(map(len, asked[: row + 1])) - 1 for row in range(len(asked))]
    together, _ = packed.step(ids, sequence, position, pages, memory, ends)
    next_ones, _ = packed.step(
        [3] * len(asked), range(len(asked)), [len(one) for one in asked], pages, memory, range(7)
    )
    for row, one in enumerate(asked):
        alone = logits(packed, [*one, 3])
        assert torch.equal(together[row], alone[-2])
        assert torch.equal(next_ones[row], alone[-1])


def test_codes_are_multiplied_as_the_numbers_that_they_stand_for(lanes: int) -> None:
    """
    Frozen layers in int8, int4 and NF4 keep their codes. Coded scales of NF4 are rounded to bfloat16. What int8 and
    int4 are multiplied by is rounded to 8 bits. A number near a half may be rounded the other way, since sums differ.
    """
    ids = random_ids(1, 12, 1)[0].tolist()
    for base, limit in (("bfloat16", 2e-6), ("int8", 4e-2), ("int4", 4e-2), ("nf4", 2e-6), ("nf4_double", 1e-2)):
        model = lively(KINDS["Llama"])
        replace_layers(model, partial(quantize.frozen, base=base))  # type: ignore[arg-type]
        got = logits(of(model, "auto"), ids)[:, :VOCAB_SIZE]
        assert far(got, right_with_bfloat16_head(model, ids)) < limit, base
        if base in ("int8", "int4"):
            replace_layers(model, InputsIn8Bits)
            apart = [far(*rows) for rows in zip(got, right_with_bfloat16_head(model, ids), strict=True)]
            assert median(apart) < 2e-6, base
            assert max(apart) < 5e-3, base


class InputsIn8Bits(nn.Module):
    """A layer of integers as its formula says: each 64 inputs have a scale, and are rounded to its multiples."""

    def __init__(self, layer: quantize.QuantizedLinear) -> None:
        super().__init__()
        self.weight, self.bias = layer.dense(torch.float32), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        blocks = torch.nn.functional.pad(x, (0, -width % 64)).view(*x.shape[:-1], -1, 64)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        rounded = (torch.round(blocks / scale) * scale).flatten(-2)[..., :width]
        return torch.nn.functional.linear(rounded, self.weight, self.bias)


def replace_layers(model: Transformer, make: Callable[[Any], nn.Module]) -> None:
    for block in model.blocks:
        for part, names in ((block.attention, "q k v out"), (block.mlp, "gate up down")):
            for name in names.split():
                setattr(part, name, make(getattr(part, name)))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_integers_have_the_same_bits_with_every_instruction(format: str) -> None:
    """The sums of a block are exact. Vectors of other lengths add blocks in another order, or not at once."""
    packed, library = of(lively(KINDS["Llama"]), format), decoder._library()
    assert library is not None
    ids, found = random_ids(1, 40, 1)[0].tolist(), {}
    try:
        for lanes in (16, 17):
            if library.bloomery_decode_lanes(ctypes.c_int64(lanes)) == lanes:
                found[lanes] = logits(packed, ids)
    finally:
        library.bloomery_decode_lanes(ctypes.c_int64(17))
    if len(found) < 2:
        pytest.skip("this CPU has no VNNI")
    assert torch.equal(found[16], found[17])


def right_with_bfloat16_head(model: Transformer, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        hidden = model(torch.tensor([list(ids)]))[0]
        return torch.matmul(hidden, model.head_rows().to(torch.bfloat16).float().t())


@pytest.mark.parametrize("spread", [1.0, 1e-4, 1e-6, 300.0])
def test_int4_is_as_near_as_its_sixteen_steps_allow(spread: float) -> None:
    weight = spread * torch.randn(50, 200, generator=torch.Generator().manual_seed(1)) + 0.3 * spread
    packed = pack(weight, "int4")
    assert packed.scales is not None
    four = packed.codes.view(torch.uint8).unflatten(-1, (16, 4)).movedim(-1, 3)  # type: ignore[no-untyped-call]  # of 8 codes: (P, groups, 4, 4, 16)
    codes = torch.cat((four.flatten(2, 3) & 15, four.flatten(2, 3) >> 4), 2)  # (P, groups, 32, 16)
    factor, added = packed.scales.float().unbind(2)
    numbers = codes.float() * factor[:, :, None] + added[:, :, None]
    dense = numbers.permute(0, 3, 1, 2).reshape(-1, packed.width)[:50, :200]
    groups = torch.nn.functional.pad(weight, (0, 24)).view(50, -1, GROUP)
    step = (groups.amax(2) - groups.amin(2)) / 15
    # Half a step, and the rounding of factor and offset to float16, whose smallest numbers are 2^-24 apart.
    allowed = 0.51 * step + 2.0**-11 * groups.amin(2).abs() + 2.0**-10 * 15 * step + 16 * 2.0**-24
    allowed = allowed.repeat_interleave(GROUP, 1)[:, :200]
    assert ((dense - weight).abs() <= allowed).all()


@pytest.mark.parametrize("name", KINDS)
def test_an_engine_with_packed_weights_says_what_the_model_says(name: str) -> None:
    model = lively(KINDS[name])
    packed, plain = (Engine(model, VOCAB_SIZE, pack=pack) for pack in (True, False))
    assert packed.decoder is not None
    assert plain.decoder is None
    asked = [random_ids(1, length, length)[0].tolist() for length in (3, 40, 12, 79, 3)]
    often = frozenset(range(0, VOCAB_SIZE, 9))
    for sampling in (SamplingConfig.greedy(20), SamplingConfig(max_tokens=20, temperature=0.8, top_p=0.9, seed=3)):
        ours, theirs = (engine.generate_batch(asked, sampling, stop_ids=often) for engine in (packed, plain))
        assert ours == theirs
        for prompt, completion in zip(asked, ours, strict=True):
            streamed = list(packed.stream(prompt, sampling, stop_ids=often))
            assert streamed[: len(completion.ids)] == completion.ids


@pytest.mark.parametrize("name", KINDS)
def test_keys_and_values_in_fewer_bits_round_the_logits_and_keep_their_bits_in_parts(name: str, lanes: int) -> None:
    model, ids = lively(KINDS[name]), random_ids(1, 70, 1)[0].tolist()
    decoders = [Engine(model, VOCAB_SIZE, pack=True, cache_dtype=dtype).decoder for dtype in CACHE_FORMATS]
    exact, *small = [packed for packed in decoders if packed is not None]
    assert [packed.dtype for packed in (exact, *small)] == list(CACHE_FORMATS)
    each = [PagePool.page_bytes(packed.config, packed.dtype) for packed in (exact, *small)]
    assert each == [each[0], each[0] // 2, each[0] // 4 + each[0] // 16]  # of int8 also a scale for 16 numbers
    right = logits(exact, ids)
    for packed in small:
        got = logits(packed, ids)
        assert 1e-5 < far(got, right) < 3e-2, packed.dtype
        assert torch.equal(logits(packed, ids, (7, 8, 9, 22, 23, 65)), got), packed.dtype


def test_weights_that_leave_no_memory_are_not_packed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_module, "free_bytes", lambda host: 1000)
    assert Engine(lively(KINDS["Llama"]), VOCAB_SIZE, pack=True).decoder is None
    assert "Decoding without packed weights" in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", [name for name, config in CHOICES.items() if "differential" in name])
def test_a_model_that_the_library_does_not_know_is_decoded_by_torch(name: str) -> None:
    model = lively(CHOICES[name])
    assert Decoder.of(model) is None
    ids = random_ids(1, 5, 1)[0].tolist()
    packed, plain = (Engine(model, VOCAB_SIZE, pack=pack) for pack in (True, False))
    never = frozenset({VOCAB_SIZE})
    greedy = SamplingConfig.greedy(9)
    assert list(packed.stream(ids, greedy, stop_ids=never)) == list(plain.stream(ids, greedy, stop_ids=never))


def test_adapters_and_a_library_that_computes_wrong_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Decoder.of(adapted(Lora())) is None
    decoder._library.cache_clear()
    monkeypatch.setattr(native, "_REFUSED", {})
    monkeypatch.setattr(Transformer, "logits", lambda self, hidden: 2 * hidden @ self.head_rows().t())
    assert Decoder.of(lively(KINDS["Llama"])) is None
    assert native.state(LIBRARY) == "off (it computes other logits than torch)"
    monkeypatch.undo()
    decoder._library.cache_clear()
    assert Decoder.of(lively(SHAPES[0])) is not None


def test_a_layer_of_another_kind_is_not_packed() -> None:
    model = lively(KINDS["Llama"])
    mlp: Any = model.blocks[1].mlp
    mlp.down = nn.Sequential(mlp.down)
    assert Decoder.of(model) is None


def test_a_model_with_an_activation_that_the_library_lacks_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively(CHOICES["no positions"], 0)
    assert decoder.is_known(model)
    monkeypatch.delitem(decoder.ACTIVATIONS, "relu2")
    assert not decoder.is_known(model)
