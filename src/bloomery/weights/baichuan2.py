"""
Baichuan2, which is read and not written: 7B is a Llama with rotary positions, 13B has ALiBi.

Queries, keys and values are one matrix (W_pack). The head of the second generation is used with rows of length 1
(NormHead); its rows are normalized once, as they are read, so that nothing else has to know. The first generation, with
a vocabulary of 64,000, has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bloomery.model.config import ModelConfig
from bloomery.weights import llama
from bloomery.weights.architecture import Architecture, Piece

FIRST_VOCABULARY = 64_000


def pieces(names: Sequence[str], *, normalized: bool = True) -> list[Piece]:
    found = []
    for piece in llama.pieces(names):
        if piece.theirs.endswith("self_attn.q_proj.weight"):
            ours = tuple(piece.ours[0].replace(".q.", f".{which}.") for which in "qkv")
            found.append(Piece(piece.theirs.replace("q_proj", "W_pack"), ours))
        elif piece.theirs == "lm_head.weight":
            found.append(replace(piece, normalized=normalized))
        elif not piece.theirs.endswith(("self_attn.k_proj.weight", "self_attn.v_proj.weight")):
            found.append(piece)
    return found


def understand(facts: Mapping[str, Any]) -> ModelConfig:
    """13B says how long it was trained, and no number of positions: that is how the two are told apart."""
    positions = "rotary" if "max_position_embeddings" in facts else "alibi"
    context = facts["max_position_embeddings"] if positions == "rotary" else facts["model_max_length"]
    known = llama.understand(dict(facts) | {"max_position_embeddings": context})
    return ModelConfig(**(known.model_dump() | {"positions": positions}))


BAICHUAN2 = Architecture("BaichuanForCausalLM", "baichuan", {}, llama.describe, understand, pieces)
BAICHUAN1 = replace(BAICHUAN2, pieces=lambda names: pieces(names, normalized=False))
