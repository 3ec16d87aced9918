"""Packages that settings of training need, looked for before the first stage of a run. Needs no torch."""

from bloomery.data import extras
from bloomery.train.config import Training

SINKS = ("wandb", "trackio")
"""Kinds that are a package, and an extra, of the same name."""


def needed(section: str, config: Training) -> None:
    """Raises DataError, with the key, for a sink whose package is missing."""
    for place, sink in enumerate(config.sinks):
        if sink.kind in SINKS:
            extras.load(sink.kind, extra=sink.kind, where=f"{section}.sinks.{place}")
