"""All that changes while training, besides weights and optimizer. Plain data; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bloomery.train import guard
from bloomery.train.guard import Past


@dataclass
class State:
    """All that a resume needs besides weights and optimizer."""

    step: int = 0
    samples: int = 0
    """Seen so far; the number of the next sample, and the loader's whole state."""
    tokens: int = 0
    """Supervised so far, and learned from."""
    metrics: dict[str, float | int] = field(default_factory=dict)
    """
    Of the last step: learning rate and supervised tokens; if there was an update, the loss in nats a token and the
    gradient norm before clipping too.
    """
    guard: Past = field(default_factory=Past)
    precision: dict[str, float] = field(default_factory=dict)
    """Of the scaler that float16 needs."""
    rows: int = 0
    """That go through the model at once since memory ran out; 0 where it did not."""

    first_loss: float | None = None
    """Of the first step: that of the weights which training started from. None where it was not finite."""

    logged: int = 0
    """The newest step whose line is in metrics.jsonl."""

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "State":
        """What `dataclasses.asdict` made of a State, in which JSON has names for numbers that are not finite."""
        known = saved.get("metrics", {})
        metrics = {name: float(value) if isinstance(value, str) else value for name, value in known.items()}
        return cls(**{**saved, "metrics": metrics, "guard": guard.restored(saved.get("guard", {}))})
