"""
Read and write LoRA adapters in the format of PEFT, apart from their base model.

    adapter_config.json           rank, alpha, which matrices, and where the base lies
    adapter_model.safetensors     A and B of each matrix, under transformers' names

Transformers keeps several of our matrices as one (c_attn of GPT-2), and so does PEFT. Then the A matrices of the parts
lie below each other, and B has the parts along its diagonal. PEFT has no base in int8 or NF4 of ours. An adapter that
was trained on such a base says so in bloomery.json. It is merged into the weights that the base computed with.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from safetensors import SafetensorError
from typing_extensions import TypedDict

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import CheckpointError
from bloomery.core.io import write_json
from bloomery.core.records import RecordPath, read_record
from bloomery.model import lora, quantize
from bloomery.model.config import Base, Lora
from bloomery.model.transformer import Transformer
from bloomery.weights import architectures
from bloomery.weights.architectures import Architecture, WeightMapping, joined, parted
from bloomery.weights.opened import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from bloomery.weights.safetensors import check_header, finite, save_tensors

import safetensors.torch
import torch
from torch import Tensor, nn

PREFIX = "base_model.model."
MAGNITUDE = "lora_magnitude_vector"
_AGAIN = "The adapter is damaged or belongs to another model. Use the adapter of this model."


Alpha = Annotated[float, Field(gt=0)]


class AdapterConfig(TypedDict):
    """What is read of ADAPTER_CONFIG. What else would change the model has to be absent: `_more`."""

    peft_type: str
    base_model_name_or_path: RecordPath
    revision: NotRequired[str | None]
    lora_alpha: Alpha
    alpha_pattern: NotRequired[dict[str, Alpha] | None]
    use_rslora: NotRequired[bool | None]
    use_dora: NotRequired[bool | None]


@dataclass(frozen=True)
class Adapter:
    """What lies in a folder of adapters."""

    base: str
    """The folder of the model that it changes, or its name on a hub, as it is written there."""
    scales: Mapping[str, float]
    """s of each matrix, by transformers' name of the matrix."""
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """A and B, by the same name."""
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    """Lengths of the rows, by the same name; of DoRA, for every matrix."""
    revision: str | None = None
    """Of the base, where it is a model of a hub."""


def save(
    folder: Path, weights: Mapping[str, Tensor], model: Transformer, settings: Lora, base: str, kind: Architecture
) -> None:
    """
    Write the adapters of a model, whose weights by name these are: its own, or copies. `base` says where it lies,
    `kind` how its files name its weights.
    """
    pieces = _pieces(model, kind)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for piece, a, b in _joined(pieces, weights, model):
        name = piece.theirs.removesuffix(".weight")
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
        ranks[name] = len(a)
        if settings.dora:
            tensors[f"{PREFIX}{name}.{MAGNITUDE}"] = _magnitudes(piece, weights, model)
    save_tensors(folder / ADAPTER_WEIGHTS, tensors)
    wider = {name: rank for name, rank in ranks.items() if rank != settings.rank}
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilized,
        "use_dora": settings.dora,
        "target_modules": _targets(ranks, [piece.theirs.removesuffix(".weight") for piece in pieces]),
        "rank_pattern": wider,
        "alpha_pattern": {name: _alpha(settings, rank) for name, rank in wider.items()},
        "fan_in_fan_out": any(piece.transposed for piece in pieces),
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    write_json(folder / ADAPTER_CONFIG, facts)


def read(folder: Path) -> Adapter:
    """Adapters of ours or of PEFT. Raises CheckpointError if they are torn or hold more than low-rank matrices."""
    try:
        facts = read_record(folder / ADAPTER_CONFIG, AdapterConfig, error=CheckpointError, fix=_AGAIN)
        check_header(folder / ADAPTER_WEIGHTS, _AGAIN)
        tensors = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
        if (more := _more(facts)) != "":
            hint = "Merge it with PEFT and use the whole model."
            raise CheckpointError(f"holds more than low-rank matrices: {more}", where=str(folder), hint=hint)
        pairs, scales, magnitudes, alphas = {}, {}, {}, facts.get("alpha_pattern") or {}
        _check_patterns(alphas)
        for name in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
            matrix = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            pairs[matrix] = (tensors.pop(name), tensors.pop(name.replace(".lora_A.", ".lora_B.")))
            if facts.get("use_dora"):
                magnitudes[matrix] = tensors.pop(name.replace("lora_A.weight", MAGNITUDE))
            rank = _rank(matrix, *pairs[matrix], magnitudes.get(matrix))
            alpha = float(_of_pattern(alphas, matrix, facts["lora_alpha"]))
            scales[matrix] = alpha / (math.sqrt(rank) if facts.get("use_rslora") else rank)
        base = facts["base_model_name_or_path"]
        if not pairs:
            raise ValueError("it has no matrix")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        what = f"holds no PEFT adapter: {type(error).__name__}: {error}"
        raise CheckpointError(what, where=str(folder), hint=_AGAIN) from None
    for name, pair in pairs.items():
        for side, tensor in zip("AB", pair, strict=True):
            finite(f"{name}.lora_{side}.weight", tensor, str(folder / ADAPTER_WEIGHTS), _AGAIN)
    if tensors:
        what = f"changes more than matrices: {', '.join(sorted(tensors)[:3])}"
        raise CheckpointError(
            what, where=str(folder / ADAPTER_WEIGHTS), hint="Merge it with PEFT and use the whole model."
        )
    for name, lengths in magnitudes.items():
        finite(f"{name}.{MAGNITUDE}", lengths, str(folder / ADAPTER_WEIGHTS), _AGAIN)
    return Adapter(base, scales, pairs, magnitudes, facts.get("revision"))


def merging(model: Transformer, adapter: Adapter, kept_as: Base, folder: Path) -> Callable[[str, Tensor], Tensor]:
    """
    What makes of each weight of a model the one with adapters added, in float32: rounded before as the base was kept.
    Of the model, only names and shapes count. Raises CheckpointError where the adapters belong to another model.
    """
    pieces = _adapted_pieces(model, adapter, folder)
    parts = {ours: (theirs, number) for theirs in pieces for number, ours in enumerate(pieces[theirs].ours)}

    @torch.no_grad()
    def merged(ours: str, weight: Tensor) -> Tensor:
        if ours not in parts:
            return weight
        weight, (name, number) = weight.float(), parts[ours]
        if kept_as != "float32":
            weight = quantize.frozen_weight(weight, kept_as).dense(torch.float32)
        if name not in adapter.pairs:
            return weight
        a, b = adapter.pairs[name]
        sizes = [len(model.get_parameter(one)) for one in pieces[name].ours]
        changes = parted(pieces[name], adapter.scales[name] * (b.float() @ a.float()), sizes)
        weight = weight + changes[number]
        if (lengths := adapter.magnitudes.get(name)) is not None:
            weight *= (parted(pieces[name], lengths, sizes)[number] / torch.linalg.vector_norm(weight, dim=1))[:, None]
        return finite(ours, weight, str(folder), _AGAIN)

    return merged


def changes(model: Transformer, adapter: Adapter, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """
    A, and B times its scale, of each matrix of a model that is adapted, by path. Of the model, only names and shapes
    count. Raises CheckpointError where the adapters belong to another model.
    """
    pieces, pairs = _adapted_pieces(model, adapter, folder), dict[str, tuple[Tensor, Tensor]]()
    for name, (a, b) in adapter.pairs.items():
        paths = pieces[name].ours
        parts = parted(pieces[name], adapter.scales[name] * b.float(), [len(model.get_parameter(one)) for one in paths])
        pairs |= {path.removesuffix(".weight"): (a.float(), part) for path, part in zip(paths, parts, strict=True)}
    return pairs


def _adapted_pieces(model: Transformer, adapter: Adapter, folder: Path) -> dict[str, WeightMapping]:
    """Transformers' matrices by name. Raises CheckpointError where the adapters belong to another model."""
    pieces = {piece.theirs.removesuffix(".weight"): piece for piece in _named_pieces(model, adapter)}
    if strange := sorted(adapter.pairs.keys() - pieces.keys()):
        what = f"adapts {strange[0]}, which the model does not have"
        raise CheckpointError(what, where=str(folder), hint=_AGAIN)
    for name, (a, b) in adapter.pairs.items():
        ours = [model.get_parameter(one).shape for one in pieces[name].ours]
        if (len(b), a.shape[1]) != (sum(shape[0] for shape in ours), ours[0][1]):
            what = f"adapts {name} with a change of shape {(len(b), a.shape[1])}"
            raise CheckpointError(what, where=str(folder), hint=_AGAIN)
    return pieces


def fill(model: Transformer, folder: Path) -> None:
    """Read adapters that `save` left into those of a model, bit for bit. Raises CheckpointError for others."""
    own, saved = lora.weights(model), read(folder)
    pieces = _named_pieces(model, saved)
    expected = {piece.theirs.removesuffix(".weight"): piece for piece, _, _ in _joined(pieces, own, model)}
    if expected.keys() != saved.pairs.keys():
        odd = sorted(expected.keys() ^ saved.pairs.keys())[0]
        raise CheckpointError(f"the adapters differ at {odd}", where=str(folder), hint=_AGAIN)
    with torch.no_grad():
        for name, piece in expected.items():
            a, b = saved.pairs[name]
            paths = [one.removesuffix(".weight") for one in piece.ours]
            sizes = [_outputs(model, path) for path in paths]
            if len(b) != sum(sizes):
                raise CheckpointError(f"{name} has another shape", where=str(folder), hint=_AGAIN)
            b = torch.cat(parted(piece, b, sizes))
            lengths = None if name not in saved.magnitudes else torch.cat(parted(piece, saved.magnitudes[name], sizes))
            row = column = 0
            for path, rows in zip(paths, sizes, strict=True):
                if f"{path}.lora_a" in own:
                    mine_a, mine_b = own[f"{path}.lora_a"], own[f"{path}.lora_b"]
                    rank = len(mine_a)
                    if a[column : column + rank].shape != mine_a.shape:
                        raise CheckpointError(f"{name} has another shape", where=str(folder), hint=_AGAIN)
                    mine_a.copy_(a[column : column + rank])
                    mine_b.copy_(b[row : row + rows, column : column + rank])
                    if f"{path}.magnitude" in own and lengths is not None:
                        own[f"{path}.magnitude"].copy_(lengths[row : row + rows])
                    column += rank
                row += rows


def _pieces(model: Transformer, kind: Architecture) -> list[WeightMapping]:
    """An architecture's matrices of the blocks, and which of ours each of them is."""
    linears = [name for name, one in model.named_modules() if isinstance(one, nn.Linear | quantize.QuantizedLinear)]
    paths = {name.removesuffix(".base") for name in linears}
    return kind.pieces([f"{path}.weight" for path in sorted(paths) if path.startswith("blocks.")])


def _named_pieces(model: Transformer, adapter: Adapter) -> list[WeightMapping]:
    """As `_pieces`, of the first architecture that has what is adapted: many a Phi-3 is a Llama by its shape."""
    first = architectures.architecture(model.config)
    for kind in (first, *(one.bound(model.config.num_heads) for one in architectures.WRITTEN)):
        with suppress(ValueError):
            pieces = _pieces(model, kind)
            if adapter.pairs.keys() <= {piece.theirs.removesuffix(".weight") for piece in pieces}:
                return pieces
    return _pieces(model, first)


def unadapted_parts(weights: Mapping[str, Tensor], model: Transformer, kind: Architecture) -> Iterator[str]:
    """Paths of matrices without an adapter that an architecture has in one tensor with one that has an adapter."""
    for piece in _pieces(model, kind):
        paths = [name.removesuffix(".weight") for name in piece.ours]
        bare = [path for path in paths if f"{path}.lora_a" not in weights]
        yield from bare if len(bare) < len(paths) else []


def _joined(
    pieces: list[WeightMapping], weights: Mapping[str, Tensor], model: Transformer
) -> Iterator[tuple[WeightMapping, Tensor, Tensor]]:
    """Each matrix of transformers that is adapted, with its A and B."""
    for piece in pieces:
        paths = [name.removesuffix(".weight") for name in piece.ours]
        if not any(f"{path}.lora_a" in weights for path in paths):
            continue
        parts = [weights[f"{path}.lora_a"].detach() for path in paths if f"{path}.lora_a" in weights]
        column, below = 0, []
        for path in paths:
            b = weights.get(f"{path}.lora_b")
            rank = 0 if b is None else b.shape[1]
            block = parts[0].new_zeros(_outputs(model, path), sum(len(part) for part in parts))
            if b is not None:
                block[:, column : column + rank] = b.detach()
            below.append(block)
            column += rank
        yield piece, torch.cat(parts), joined(piece, below)


def _magnitudes(piece: WeightMapping, weights: Mapping[str, Tensor], model: Transformer) -> Tensor:
    """Lengths of the rows of a matrix of transformers; of parts without an adapter, as they are."""
    parts = []
    for path in (name.removesuffix(".weight") for name in piece.ours):
        own = weights.get(f"{path}.magnitude")
        if own is None:
            module = model.get_submodule(path)
            whole = module.dense(torch.float32) if isinstance(module, quantize.QuantizedLinear) else module.weight
            own = torch.linalg.vector_norm(whole.float(), dim=1)
        parts.append(own.detach().to(weights[next(iter(weights))].device))
    return joined(piece, parts)


def _outputs(model: Transformer, path: str) -> int:
    module = model.get_submodule(path)
    if isinstance(module, lora.LoRALinear):
        return module.base.num_rows
    return module.num_rows if isinstance(module, quantize.QuantizedLinear) else len(module.get_parameter("weight"))


def _alpha(settings: Lora, rank: int) -> float:
    """What PEFT makes the same s of, for a matrix of several."""
    return settings.scale * (math.sqrt(rank) if settings.rank_stabilized else rank)


def _targets(adapted: Mapping[str, int], every: list[str]) -> list[str]:
    """The last names of matrices where these say it, or else their whole names."""
    short = {name.rpartition(".")[2] for name in adapted}
    exact = {name for name in every if name.rpartition(".")[2] in short} == set(adapted)
    return sorted(short if exact else adapted)


MAX_PATTERN = 256
"""Characters of an expression. It also has two repetitions at most, and none of a group: their time would explode."""


def _rank(name: str, a: Tensor, b: Tensor, lengths: Tensor | None) -> int:
    """The rank of an adapter. Raises ValueError for tensors that are none."""
    tensors = [a, b, *([] if lengths is None else [lengths])]
    if any(tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) for tensor in tensors):
        raise ValueError(f"{name} has numbers in {', '.join(str(tensor.dtype) for tensor in tensors)}")
    if (
        a.dim() != 2
        or b.dim() != 2
        or not 1 <= len(a) == b.shape[1]
        or (lengths is not None and lengths.shape != b.shape[:1])
    ):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"{name} has tensors of the shapes {shapes}, which do not fit together")
    return len(a)


def _check_patterns(patterns: Mapping[str, Any]) -> None:
    """Raises ValueError for an expression that may take too long."""
    for key in patterns:
        if len(key) > MAX_PATTERN or len(re.findall(r"[*+?{]", key)) > 2 or re.search(r"\)[*+?{]", key):
            raise ValueError(f"the expression {key[:80]!r} of its patterns may take too long")


def _of_pattern(patterns: Mapping[str, Any], name: str, usual: Any) -> Any:
    """The first whose key, an expression, is the end of a name as PEFT has it."""
    try:
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), usual)
    except re.error as error:
        raise ValueError(f"a key of its patterns is not a regular expression: {error}") from None


def _more(facts: Mapping[str, Any]) -> str:
    """What of PEFT's is more than W + s · B A; "" where nothing is."""
    if facts.get("peft_type") != "LORA":
        return f"its kind is {facts.get('peft_type')!r}"
    start = facts.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(("pissa", "olora", "corda", "loftq")):
        return f"init_lora_weights is {start!r}, which changes the base model"
    keys = ("layer_replication", "modules_to_save", "lora_bias", "alora_invocation_tokens")
    return ", ".join(f"{key} is {facts[key]!r}" for key in keys if facts.get(key))
