"""Which documents no model is trained on: decided by their text alone, so in every run and for every copy alike."""

import hashlib

LARGEST_SHARE = 0.1
"""No recipe holds out more. What learns from text before the split is made (the tokenizer) leaves out this much."""
CUT = 'one text becomes many where its source is told what ends a document, as in separator="\\n\\n".'
"""For those whose few documents all fall on one side."""


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the held-out share. Case and white space do not matter."""
    digest = hashlib.sha256(" ".join(text.casefold().split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64
