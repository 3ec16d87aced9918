"""
How long a step takes, from what it computes and what it moves. Needs no torch.

    seconds   micro-batches · (products / (share · peak) + traffic / bandwidth) + update / bandwidth

`share` is what products of a step reach of large square ones: see target.py. Traffic is what lies outside of products:
activations written once and read three times, scores read and written twice, weights rounded for each micro-batch and
their gradients added up. Between devices nothing is counted: a plan cannot know how they are connected.
"""

from dataclasses import dataclass

from bloomery.model.cost import cost
from bloomery.train.plan import activation_bytes_per_token
from bloomery.train.planning.needs import FROZEN_BYTES, Trained, Way, adapter_parameters, remembered_bytes
from bloomery.train.planning.target import Target

ACTIVATION_PASSES = 4
SCORE_PASSES = 4
WEIGHT_BYTES_PER_MICRO_BATCH = 4 + 2 + 2 + 2 + 2 + 8
"""Read and rounded, read forward and backward, a gradient written and added to that in float32."""
FROZEN_PASSES = 2
UPDATE_BYTES = 4 + 4 + 8 + 16 + 4
"""A gradient read for its norm and for the update, a weight and two moments read and written."""

LINK = 12e9
"""Bytes a second between a card and its host, as copies over PCIe 3.0 with 16 lanes reach; newer ones are faster."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    tokens_per_second: float
    """Of all devices."""
    ceiling: float
    """If matrix products ran at the peak and nothing else took time: the roofline, with what is computed twice."""
    timed: bool = False
    """Whether steps of two small models on this machine tell it, and not the peak."""


def products_per_token(what: Trained, way: Way) -> float:
    """Floating-point operations of products a token, with those that are done again."""
    whole = cost(what.model, what.vocab_size).train_flops_per_token
    again = {"none": 0.0, "selective": 0.0, "block": whole / 3}[way.recompute]
    if way.method == "full":
        return whole + again
    adapters = 6.0 * adapter_parameters(what.model, way.rank)
    return whole * 2 / 3 + again + adapters  # no gradient of a frozen weight


def pace(what: Trained, way: Way, target: Target, rows_per_step: int) -> Pace | None:
    """None where the target's peak in this format is not known. `rows_per_step` are those of all devices together."""
    peak = target.peak(way.precision)
    if peak is None:
        return None
    tokens = way.rows * what.model.context
    micro_batches = max(1, -(-rows_per_step // (way.rows * way.devices)))
    compute = products_per_token(what, way) * tokens / peak
    moved, updated = _traffic(what, way, tokens)
    waiting = [0.0 if target.bandwidth is None else size / target.bandwidth for size in (moved, updated)]
    seconds = micro_batches * (compute / target.share + waiting[0]) + waiting[1]
    if way.offload:
        seconds += 2 * remembered_bytes(what, way) / LINK
    done = rows_per_step * what.model.context
    busy = min(way.devices, -(-rows_per_step // way.rows))
    return Pace(tokens_per_second=done / seconds, ceiling=busy * tokens / compute)


def _traffic(what: Trained, way: Way, tokens: int) -> tuple[float, float]:
    """Bytes of a micro-batch, and of an update."""
    b, part = way.bytes_per_number, way.devices if way.sharded else 1
    scores = SCORE_PASSES * tokens * what.vocab_size * (b + (0 if what.processor else 4)) / 2
    each = activation_bytes_per_token(what.model, "none", b, written_out=what.processor)
    activations = (ACTIVATION_PASSES + (way.recompute != "none")) * tokens * each
    if way.method == "full":
        return (
            activations + scores + WEIGHT_BYTES_PER_MICRO_BATCH * what.parameters,
            UPDATE_BYTES * what.parameters / part,
        )
    frozen = FROZEN_PASSES * (2 + FROZEN_BYTES[way.method])  # written out, and read again by a product
    return activations + scores + frozen * what.parameters, UPDATE_BYTES * adapter_parameters(
        what.model, way.rank
    ) / part
