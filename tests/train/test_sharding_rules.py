"""One table says where each tensor of each model lies on a mesh."""

import itertools
from typing import Any, get_args

import pytest

from bloomery.core.errors import ConfigError
from bloomery.model import lora
from bloomery.model.config import PRESETS, Base, Lora, ModelConfig
from bloomery.model.transformer import Transformer, on_meta
from bloomery.train import sharding_rules
from bloomery.train.config import AdamW, Mesh
from bloomery.train.plan.sharding import ShardedTensor, ShardingRequest, sharded_tensors
from bloomery.train.sharding_rules import check_mesh, local_shape, placement, rule_of
from tests.model.made import SHAPES, random_config
from tests.weights.test_architectures import FAMILIES

import torch

SMALL = {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96}
KINDS: dict[str, tuple[Any, ...]] = {
    "attention": ("standard", "differential"),
    "mlp": ("swiglu", "gelu"),
    "position_embedding": ("rope", "learned", "alibi"),
    "norm": ("rmsnorm", "layernorm"),
    "norm_order": ("before", "after", "both"),
    "qk_norm": (False, True),
    "biases": ("none", "qkv", "attention", "mlp", "all"),
    "tie_embeddings": (False, True),
}
"""All that adds parameters to a model, or takes some away."""


def tensors(model: ModelConfig, mesh: Mesh, adapters: Lora | None = None, vocab_size: int = 96) -> list[ShardedTensor]:
    ask = ShardingRequest(
        model=model, vocab_size=vocab_size, mesh=mesh, optimizer=AdamW(), rows_per_step=8, lora=adapters
    )
    return list(sharded_tensors(ask))


def over(*, tp: int = 1, dp_shard: int = 1) -> Mesh:
    return Mesh(preset="gpt2-124m", tp=tp, dp_shard=dp_shard)


def fits_one_row(config: ModelConfig, vocab_size: int) -> None:
    used = set()
    for name, _ in on_meta(config, vocab_size).named_parameters():
        used.add(rule_of(name).pattern)
    assert used


@pytest.mark.parametrize("name", PRESETS)
def test_every_weight_of_every_preset_fits_one_row(name: str) -> None:
    fits_one_row(ModelConfig(preset=name), PRESETS[name].vocab_size)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_of_every_family_of_other_programs_fits_one_row(name: str) -> None:
    fits_one_row(FAMILIES[name](1), 96)


@pytest.mark.slow
def test_every_weight_of_every_kind_of_model_fits_one_row_and_every_row_is_needed() -> None:
    used = set()
    for values in itertools.product(*KINDS.values()):
        config = ModelConfig(**SMALL | dict(zip(KINDS, values, strict=True)))
        used |= {rule_of(name).pattern for name, _ in on_meta(config, 96).named_parameters()}
    assert used == {rule.pattern for rule in sharding_rules.RULES}


def test_a_weight_that_no_row_knows_is_named() -> None:
    with pytest.raises(ValueError, match=r"blocks\.0\.router\.weight fits 0 rows"):
        rule_of("blocks.0.router.weight")
    with pytest.raises(ValueError, match=r"head\.lora_a: head\.weight is not adapted"):
        placement("head.lora_a", (4, 64), over())


@pytest.mark.parametrize("base", [base for base in get_args(Base) if base != "nf4_double"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", [("attention.*", "mlp.*"), ("attention.q", "mlp.down")])
def test_adapters_and_codes_have_the_names_shapes_and_bytes_that_training_makes(
    base: Base, dora: bool, targets: tuple[str, ...]
) -> None:
    config = ModelConfig(**SMALL | {"biases": "all", "norm": "layernorm", "tie_embeddings": False})
    adapters = Lora(rank=4, base_dtype=base, dora=dora, target_modules=targets)
    model = Transformer(config, 96)
    lora.attach(model, adapters, 0)
    made = {
        name: (
            tuple(tensor.shape),
            tensor.element_size(),
            isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad,
        )
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())
        if name in model.state_dict()  # tables that all layers share are not
    }
    assert {one.name: (one.shape, one.number_bytes, one.trained) for one in tensors(config, over(), adapters)} == made


@pytest.mark.parametrize(("tp", "dp_shard"), [(1, 3), (1, 4), (2, 2), (4, 1), (2, 8)])
@pytest.mark.parametrize("base", [None, "bfloat16", "int8", "nf4"])
def test_the_part_of_a_device_is_the_first_chunk_of_the_first_chunk(base: Any, tp: int, dp_shard: int) -> None:
    """As torch.chunk has it, which FSDP2 and DTensor follow; also for rows that do not divide evenly."""
    config = ModelConfig(
        hidden_size=1024,
        num_layers=1,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=2048,
        tie_embeddings=False,
        qk_norm=True,
    )
    if dp_shard == 3:
        config = config.model_copy(update={"hidden_size": 768})
    adapters = None if base is None else Lora(rank=4, base_dtype=base, dora=True)
    for one in tensors(config, over(tp=tp, dp_shard=dp_shard), adapters, vocab_size=97):
        part = torch.empty(one.shape, device="meta")
        for dim, count in ((one.tp, tp), (one.dp_shard, dp_shard)):
            part = part if dim is None else torch.chunk(part, count, dim)[0]
        assert tuple(part.shape) == one.local_shape, one.name
        assert (one.tp is None) == (placement(one.name, one.shape, over(tp=2)).tp is None or tp == 1)


@pytest.mark.parametrize("shape", [*SHAPES, *map(random_config, range(4))])
def test_a_mesh_cuts_every_matrix_or_says_by_name_why_not(shape: ModelConfig) -> None:
    """All devices of tp and dp_shard together hold a matrix once, but for padding of rows."""
    for tp, dp_shard in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        try:
            found = tensors(shape, over(tp=tp, dp_shard=dp_shard))
        except ConfigError as error:
            assert str(error.where).startswith("mesh.")  # noqa: PT017
            continue
        for one in found:
            for dim, (size, local) in enumerate(zip(one.shape, one.local_shape, strict=True)):
                devices = (tp if one.tp == dim else 1) * (dp_shard if one.dp_shard == dim else 1)
                assert local * devices == size or (dim == 0 and local == -(-size // devices)), one.name


def test_heads_inner_width_and_columns_that_do_not_divide_are_refused_by_name() -> None:
    config = ModelConfig(**SMALL | {"num_kv_heads": 2})
    with pytest.raises(ConfigError, match=r"num_kv_heads is 2, and tp=4 does not divide it"):
        check_mesh(config, over(tp=4))
    with pytest.raises(ConfigError, match=r"intermediate_size is 97, and tp=2"):
        check_mesh(config.model_copy(update={"intermediate_size": 97}), over(tp=2))
    with pytest.raises(ConfigError, match=r"num_kv_heads is 2, and tp=2 does not divide pairs of it"):
        check_mesh(ModelConfig(**SMALL | {"attention": "differential"}), over(tp=2))
    with pytest.raises(ConfigError, match="norm over all heads"):
        check_mesh(ModelConfig(**SMALL | {"qk_norm": True, "qk_norm_over": "width"}), over(tp=2))
    with pytest.raises(ConfigError, match="position_embedding='alibi' counts all heads"):
        check_mesh(ModelConfig(**SMALL | {"position_embedding": "alibi"}), over(tp=2))
    with pytest.raises(ConfigError, match="normalize_head=true scales the whole table"):
        check_mesh(ModelConfig(**SMALL | {"normalize_head": True, "tie_embeddings": False}), over(tp=2))
    with pytest.raises(ConfigError, match="scales of scales"):
        check_mesh(config, over(dp_shard=2), "nf4_double")
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp\.up\.weight has 64 numbers along dim 1, but dp_shard=3"):
        local_shape("blocks.0.mlp.up.weight", (96, 64), over(tp=2, dp_shard=3))
    with pytest.raises(ConfigError, match=r"dp_shard=4 does not divide blocks of 32"):
        local_shape("blocks.0.mlp.up.weight", (96, 64), over(tp=2, dp_shard=4), block=32)
    check_mesh(config, over(tp=2), "nf4")
