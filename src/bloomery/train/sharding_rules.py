"""
RULES: for each weight of a model, the unit it is gathered with and the axes of a mesh that cut it. Needs no torch.

A mesh has three axes. `dp_replicate` holds copies of the model. `dp_shard` cuts each copy: a device holds a part of
each tensor and gathers a unit when it computes it. `tp` cuts the matmuls themselves, so a device never holds the
whole of a matrix. The kinds of a weight say how tp cuts it:

    column       W (R × D) by its rows R: each device computes some of the outputs, and whole heads of attention
    row          W (R × D) by its columns D: each device adds to all outputs, which are then summed
    vocabulary   a table (V × D) by its rows V: each device has the logits of some token IDs
    sequence     not cut: between the matmuls, each device has some of the tokens of a row
    heads        not cut: a vector that all heads share, and each device has some of the heads

(Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; sequence: Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198)

The placement of an adapter, of NF4 codes and of scales follows from the row of its matrix. With tp = 1, dp_shard cuts
all tensors along dim 0, as FSDP2 does. With more, it cuts a matrix along the dim that tp leaves whole.

Uneven shapes are padded in two cases: dim 0 that dp_shard cuts, and a vocabulary that tp cuts. Other uneven shapes are
refused by name. These are heads and inner widths that tp does not divide, and dim 1 that dp_shard does not divide.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bloomery.core.errors import ConfigError
from bloomery.model.config import Base, ModelConfig
from bloomery.train.config import Mesh

ShardingKind = Literal["column", "row", "vocabulary", "sequence", "heads"]
BLOCK = r"(blocks\.\d+)\."


@dataclass(frozen=True, kw_only=True)
class ShardingRule:
    """A row of the table."""

    pattern: str
    """Of the whole name of a parameter."""
    unit: str
    """What is gathered together, as a template of the match."""
    kind: ShardingKind
    quantized: bool = False
    """Whether a frozen one may be kept in int8 or NF4."""
    adapted: bool = False
    """Whether LoRA may add to it."""


RULES = (
    ShardingRule(pattern=r"embed\.weight", unit="embed", kind="vocabulary"),
    ShardingRule(pattern=r"positions\.weight", unit="embed", kind="sequence"),
    ShardingRule(
        pattern=rf"{BLOCK}(?:attention\.[qkv]|mlp\.(?:gate|up))\.weight",
        unit=r"\1",
        kind="column",
        quantized=True,
        adapted=True,
    ),
    ShardingRule(
        pattern=rf"{BLOCK}(?:attention\.out|mlp\.down)\.weight", unit=r"\1", kind="row", quantized=True, adapted=True
    ),
    ShardingRule(pattern=rf"{BLOCK}(?:attention\.[qkv]|mlp\.(?:gate|up))\.bias", unit=r"\1", kind="column"),
    ShardingRule(pattern=rf"{BLOCK}(?:attention\.out|mlp\.down)\.bias", unit=r"\1", kind="sequence"),
    ShardingRule(pattern=rf"{BLOCK}(?:attention|mlp)(?:_post)?_norm\.(?:weight|bias)", unit=r"\1", kind="sequence"),
    ShardingRule(
        pattern=rf"{BLOCK}attention\.(?:(?:[qk]|pair)_norm\.weight|lambda_[qk][12])", unit=r"\1", kind="heads"
    ),
    ShardingRule(pattern=r"norm\.(?:weight|bias)", unit="head", kind="sequence"),
    ShardingRule(pattern=r"head\.weight", unit="head", kind="vocabulary"),
)
"""Each parameter of a model fits one row and no other. Embedding and head are units of their own."""

CUTS: dict[tuple[ShardingKind, str], tuple[int | None, int]] = {
    ("column", "weight"): (0, 1),
    ("column", "bias"): (0, 0),
    ("column", "scales"): (0, 1),
    ("column", "lora_a"): (None, 1),
    ("column", "lora_b"): (0, 0),
    ("column", "magnitude"): (0, 0),
    ("row", "weight"): (1, 0),
    ("row", "scales"): (1, 0),
    ("row", "lora_a"): (1, 1),
    ("row", "lora_b"): (None, 0),
    ("row", "magnitude"): (None, 0),
    ("vocabulary", "weight"): (0, 1),
}
"""
Of a kind and the last part of a name: the dims that tp and dp_shard cut, where tp has several devices. What stands not
here is not cut by tp, and by dp_shard along dim 0. Scales of int8, one for each row, are never cut along dim 1.
"""
DERIVED = {"scales": "quantized", "lora_a": "adapted", "lora_b": "adapted", "magnitude": "adapted"}
"""Last parts of names that belong to a matrix, and what its row must allow."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a tensor lies. dp_replicate never cuts one."""

    unit: str
    kind: ShardingKind
    tp: int | None
    """Dim that tp cuts. None: each device has all of it."""
    dp_shard: int
    """Dim that dp_shard cuts."""


def rule_of(name: str) -> ShardingRule:
    """The row of a parameter. Raises ValueError for a name that fits none, or several."""
    rows = [rule for rule in RULES if re.fullmatch(rule.pattern, name)]
    if len(rows) != 1:
        raise ValueError(f"{name} fits {len(rows)} rows of train/sharding_rules.py, not one")
    return rows[0]


def stays_float32(name: str) -> bool:
    """Whether a parameter is gathered in float32: one of a norm or of learned positions, which no matmul multiplies."""
    return name.rpartition(".")[0].endswith(("norm", "positions"))


def placement(name: str, shape: Sequence[int], mesh: Mesh) -> Placement:
    """Where a tensor of a model lies, by its name with or without adapters. Raises ValueError as `rule_of`."""
    plain = name.replace(".base.", ".")
    module, _, last = plain.rpartition(".")
    key = f"{module}.weight" if last in DERIVED else plain
    rule = rule_of(key)
    if last in DERIVED and not getattr(rule, DERIVED[last]):
        raise ValueError(f"{name}: {key} is not {DERIVED[last]} by train/sharding_rules.py")
    tp, dp_shard = CUTS.get((rule.kind, last), (None, 0))
    if last == "scales" and shape[1] == 1:
        tp, dp_shard = (0 if tp == 0 else None), 0
    if mesh.tp == 1:
        tp, dp_shard = None, 0
    match = re.fullmatch(rule.pattern, key)
    assert match is not None
    return Placement(unit=match.expand(rule.unit), kind=rule.kind, tp=tp, dp_shard=dp_shard)


def local_shape(name: str, shape: Sequence[int], mesh: Mesh, block: int = 1) -> tuple[int, ...]:
    """
    The shape of the part of one device, with padding. `block`: numbers of dim 1 that must stay together. Raises
    ConfigError for a shape that is not padded and does not divide.
    """
    where, sizes = placement(name, shape, mesh), list(shape)
    for axis, dim, count in (("tp", where.tp, mesh.tp), ("dp_shard", where.dp_shard, mesh.dp_shard)):
        if dim is None or count == 1:
            continue
        together = block if dim == 1 else 1
        padded = dim == 0 and (axis == "dp_shard" or where.kind == "vocabulary")
        if sizes[dim] % (count * together) and not padded:
            whole = f"blocks of {together} of " if together > 1 else ""
            what = f"{name} has {sizes[dim]:,} numbers along dim {dim}, but {axis}={count} does not divide {whole}them"
            raise ConfigError(what, where=f"mesh.{axis}", hint=f"Set mesh.{axis} to a divisor, or to 1.")
        sizes[dim] = -(-sizes[dim] // count)
    return tuple(sizes)


def check_mesh(model: ModelConfig, mesh: Mesh, base: Base | None = None) -> None:
    """Raises ConfigError where tp does not divide what it cuts, or where a base cannot be cut."""
    if base == "nf4_double" and mesh.dp_shard * mesh.tp > 1:
        what = 'lora.base_dtype="nf4_double" has scales of scales that span rows, but a mesh cuts rows'
        raise ConfigError(what, where="finetune.mesh", hint='Set finetune.lora.base_dtype="nf4".')
    if mesh.tp == 1:
        return
    whole = 2 if "differential" in model.attention else 1  # pairs of heads stay together
    for field, each in (("num_heads", 1), ("num_kv_heads", whole), ("intermediate_size", 1)):
        count = getattr(model, field)
        if count % (mesh.tp * each):
            what = f"{field} is {count:,}, and tp={mesh.tp} does not divide {'pairs of ' if each > 1 else ''}it"
            raise ConfigError(what, where="mesh.tp", hint=f"Set mesh.tp to a divisor of {count // each:,}.")
    for setting, why in (
        ("qk_norm_over='width'" if model.qk_norm and model.qk_norm_over == "width" else "", "takes a norm over"),
        ("position_embedding='alibi'" if model.position_embedding == "alibi" else "", "counts"),
    ):
        if setting:
            what = f"{setting} {why} all heads, but tp gives each device only some of them"
            raise ConfigError(what, where="mesh.tp", hint="Set mesh.tp=1.")
    if model.normalize_head:
        what = "normalize_head=true scales the whole table, but tp gives each device only some of its rows"
        raise ConfigError(what, where="mesh.tp", hint="Set mesh.tp=1.")


def frozen_tensors(name: str, shape: Sequence[int], base: Base) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """
    What a frozen matrix is kept as: names, shapes, bytes a number, and how many numbers of dim 1 stay together, as
    model/quantize.py makes them.
    """
    rows, width = shape
    blocks = -(-width // 64)
    match base:
        case "float32" | "bfloat16":
            yield name, (rows, width), 4 if base == "float32" else 2, 1
        case "int8":
            yield name, (rows, width), 1, 1
            yield name.removesuffix("weight") + "scales", (rows, 1), 4, 1
        case "nf4" | "nf4_double":
            yield name, (rows, 32 * blocks), 1, 32
            yield name.removesuffix("weight") + "scales", (rows, blocks), 2, 1
