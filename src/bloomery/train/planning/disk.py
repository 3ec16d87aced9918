"""What a run writes, in bytes: checkpoints, models and shards. Needs no torch."""

from bloomery.train.config import Training
from bloomery.train.plan import BYTES
from bloomery.train.planning.needs import Trained, Way, adapter_parameters, base_bytes, needs

TOKEN_BYTES = {True: 2, False: 4}
"""Of an id in a shard, by whether all ids are below 2¹⁶."""


def training_bytes(config: Training, what: Trained, way: Way) -> int:
    """Of a stage that trains: checkpoints that stay, one to go back to, one that is being written, and the model."""
    whole = needs(what, Way(rows=1, method=way.method, rank=way.rank, precision=way.precision))
    model = BYTES * what.parameters if way.method == "full" else BYTES * adapter_parameters(what.model, way.rank)
    checkpoint = model + whole.optimizer
    kept = 0 if config.keep_every_steps is None else config.steps // config.keep_every_steps
    return (config.keep_checkpoints + 2 + kept) * checkpoint + (
        model if way.method == "full" else base_bytes(what, "full")
    )


def shard_bytes(tokens: int, vocab_size: int) -> int:
    """Of so many tokens in token files."""
    return tokens * TOKEN_BYTES[vocab_size <= 2**16]
