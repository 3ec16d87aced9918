"""
How an answer is sampled: the settings and their limits, from the command line and HTTP to the engine.

The default temperature applies wherever nobody sets one: in chat, over HTTP, in evaluation, and in exported models.
"""

from dataclasses import dataclass

from bloomery.core.errors import DataError

TEMPERATURE = 0.7
"""A small model of natural text that takes the most likely token each time often repeats itself, and does not end."""
MAX_TEMPERATURE = 100.0
MAX_TOKENS = 2**24
"""Above every context and every vocabulary."""
MAX_SEED = 2**63 - 1
"""Random generators take 63 bits and a sign."""

LIMITS: dict[str, tuple[float, float]] = {
    "max_tokens": (0, MAX_TOKENS),
    "temperature": (0, MAX_TEMPERATURE),
    "top_k": (0, MAX_TOKENS),
    "top_p": (0, 1),
    "seed": (-MAX_SEED - 1, MAX_SEED),
}
"""The least and the largest value of each number. A server and a recipe may take less."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How each next token is chosen, and when to stop. Raises DataError for a value out of its limits."""

    max_tokens: int = 256
    """Of the answer."""
    temperature: float = TEMPERATURE
    """Logits are divided by it. 0 takes the most likely token each time."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probabilities reach p; above 0."""
    seed: int | None = None
    """None: a new one each time."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer and are not in it. They are looked for where token IDs become text."""

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and (name != "top_p" or value > 0)):
                least = "above 0" if name == "top_p" else f"at least {low:,}"
                raise DataError(f"must be {least} and at most {high:,}, got {value}", where=name)

    @classmethod
    def greedy(cls, max_tokens: int) -> "SamplingConfig":
        """The most likely token each time."""
        return cls(max_tokens=max_tokens, temperature=0.0)
