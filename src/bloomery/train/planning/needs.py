"""
What one way of training keeps in the memory of a device, by arithmetic. Needs no torch.

    weights        4 bytes each; in a base that is frozen, the matrices of blocks by `FROZEN_BYTES`; a reference that
                   stays beside the model counts here too
    gradients      4 bytes a weight that is trained
    optimizer      by `OPTIMIZER_BYTES` of those
    copies         2 bytes a weight that is multiplied, in a format of 16 bits, while a micro-batch is computed; of
                   blocks that are computed again, those of one at a time
    activations    by `activation_bytes_per_token`, of a micro-batch
    logits         scores of one chunk of tokens, and what the loss makes of them
    update         what an optimizer needs besides, while it works
    gathered       weights of the layers at work, where each device keeps a part of all

The peak is the larger of two moments: the last layer's gradient of a micro-batch, and the update.
"""

from dataclasses import asdict, dataclass
from typing import Literal

from bloomery.model.config import ModelConfig
from bloomery.model.cost import cost
from bloomery.model.lora_config import Base, Lora
from bloomery.train.config import Level, Optimizer
from bloomery.train.plan import BYTES, activation_bytes_per_token, optimizer_bytes
from bloomery.train.planning.target import Format

Moment = Literal["loading", "micro-batch", "update"]
Method = Literal["full", "lora", "lora32", "int8", "nf4"]
"""All weights are trained, or low-rank additions to frozen ones: in bfloat16, in float32, in 8 bits, or in 4."""

BASES: dict[Base, Method] = {
    "float32": "lora32",
    "bfloat16": "lora",
    "int8": "int8",
    "nf4": "nf4",
    "nf4_double": "nf4",
}
"""How the weights below adapters are kept."""

FROZEN_BYTES = {"lora": 2.0, "lora32": 4.0, "int8": 1.0, "nf4": 0.5 + 2 / 64}
"""
Of a weight of a matrix of a block. NF4 is half a byte, and two bytes of scale for 64 of them (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314). Tables and vectors stay in float32.
"""
LOGITS_CHUNK_BYTES = 2**27
"""Of float32 scores, as `train.loss.CHUNK_BYTES`."""
UPDATE_NUMBERS = 2**21
"""As `train.optim_muon.BATCH_NUMBERS`; of float32 and bfloat16, a handful of times."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train the same."""

    rows: int
    """That go through the model at once, on each device."""
    recompute: Level = "none"
    precision: Format = "bfloat16"
    method: Method = "full"
    rank: int = Lora().rank
    """Of the low-rank additions."""
    sharded: bool = False
    """Whether each device keeps a part of weights, gradients and optimizer, and not all of them."""
    devices: int = 1
    offload: bool = False
    """Whether the optimizer's numbers stay in the host's memory, and come for the update, some at a time."""

    @property
    def bytes_per_number(self) -> int:
        """In matrix products."""
        return 4 if self.precision == "float32" else 2


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes on each device."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    logits: int
    update: int
    gathered: int

    @property
    def resting(self) -> int:
        return self.weights + self.optimizer

    @property
    def peak(self) -> int:
        return sum(self.at_peak[1].values())

    @property
    def at_peak(self) -> tuple[Moment, dict[str, int]]:
        """When the most is there, and its parts."""
        parts = asdict(self)
        updating = {name: parts.pop(name) for name in ("update",)}
        learning = {name: parts.pop(name) for name in ("copies", "activations", "logits", "gathered")}
        if sum(learning.values()) >= sum(updating.values()):
            return "micro-batch", parts | learning
        return "update", parts | updating


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What is trained: a shape with its vocabulary and optimizer, on rows of its context."""

    model: ModelConfig
    vocab_size: int
    optimizer: Optimizer
    processor: bool = False
    """Whether on one, where attention may keep its weights."""
    lora: Lora | None = None
    """What a recipe says of adapters, where it has some."""
    reference: bool = False
    """Whether a copy of the model as it began stays beside it. Below adapters it is there anyway."""

    @property
    def parameters(self) -> int:
        return cost(self.model, self.vocab_size).parameters

    def adapters(self, way: Way) -> Lora | None:
        """Those of a way: as the recipe says, on a base as the way says."""
        if way.method == "full":
            return None
        base = next(base for base, method in BASES.items() if method == way.method)
        if self.lora is None:
            return Lora(rank=way.rank, base=base)
        return self.lora if BASES[self.lora.base] == way.method else self.lora.model_copy(update={"base": base})

    def reference_bytes(self, method: Method) -> int:
        return BYTES * self.parameters if self.reference and method == "full" else 0


def remembered_bytes(what: Trained, way: Way) -> int:
    """All that the optimizer keeps, wherever that is."""
    if way.method == "full":
        return optimizer_bytes(what.optimizer, what.model, what.vocab_size)
    return 8 * adapter_parameters(what.model, way.rank)


def needs(what: Trained, way: Way) -> Needs:
    """Of a step with more than one micro-batch, after the first step."""
    facts = cost(what.model, what.vocab_size)
    part = way.devices if way.sharded else 1
    trained = facts.parameters if way.method == "full" else adapter_parameters(what.model, way.rank)
    adapters = 0 if way.method == "full" else trained
    tokens = way.rows * what.model.context
    b = way.bytes_per_number
    head = what.vocab_size * what.model.width
    block = (facts.matmul_parameters - head) // what.model.num_layers
    whole = facts.matmul_parameters if way.recompute == "none" else head + block
    copied = whole if way.method == "full" else trained + head + largest_matrix(what.model)
    return Needs(
        weights=(base_bytes(what, way.method) + BYTES * adapters) // part + what.reference_bytes(way.method),
        gradients=BYTES * trained // part,
        optimizer=0 if way.offload else remembered_bytes(what, way) // part,
        copies=0 if way.sharded or b == BYTES else b * copied,
        activations=tokens * activation_bytes_per_token(what.model, way.recompute, b, written_out=what.processor),
        logits=logits_bytes(what, way),
        update=5 * BYTES * min(UPDATE_NUMBERS, trained) // part,
        gathered=gathered_bytes(what, way) if way.sharded else 0,
    )


def largest_matrix(model: ModelConfig) -> int:
    """Numbers of it: what is frozen is written out for each product, one matrix at a time."""
    return model.width * max(model.mlp_width, model.num_heads * model.head_size)


def adapter_parameters(model: ModelConfig, rank: int) -> int:
    """Of two matrices of this rank beside each matrix of the blocks."""
    heads, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    total = 0
    for number in range(model.num_layers):
        gates = 2 if model.layer(number)[2] in ("swiglu", "geglu") else 1
        ends = 2 * (model.width + heads) + 2 * (model.width + keys) + (gates + 1) * (model.width + model.mlp_width)
        total += rank * ends
    return total


def base_bytes(what: Trained, method: Method) -> int:
    """Of the weights that were there before the additions."""
    facts = cost(what.model, what.vocab_size)
    if method == "full":
        return BYTES * facts.parameters
    blocks = facts.matmul_parameters - what.vocab_size * what.model.width
    return int(BYTES * (facts.parameters - blocks) + FROZEN_BYTES[method] * blocks)


def logits_bytes(what: Trained, way: Way) -> int:
    """Scores in the format of products and in float32, and the gradient of the head in both."""
    tokens = min(way.rows * what.model.context, max(1, LOGITS_CHUNK_BYTES // (BYTES * what.vocab_size)))
    b, table = way.bytes_per_number, what.vocab_size * what.model.width
    scores = tokens * what.vocab_size * (b if what.processor else b + BYTES)
    if way.method != "full":
        return scores
    return scores + table * (BYTES + (b if b < BYTES else BYTES))


def gathered_bytes(what: Trained, way: Way) -> int:
    """Two blocks, one at work and the next on its way, and the tables; with their gradients where they are trained."""
    facts, model = cost(what.model, what.vocab_size), what.model
    tables = what.vocab_size * model.width * (1 if model.tie_embeddings else 2)
    block = (facts.parameters - tables) // model.num_layers
    kept = int(2 * FROZEN_BYTES.get(way.method, 2.0) * block + 2 * tables)
    return kept if way.method != "full" else kept + BYTES * (block + tables // (1 if model.tie_embeddings else 2))


def kv_bytes(model: ModelConfig, bytes_per_number: int = 2) -> int:
    """Of keys and values of one conversation as long as the context."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * model.context * bytes_per_number
