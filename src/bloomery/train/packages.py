"""What settings of training need of this machine, looked for before the first stage of a run. Needs no torch."""

from importlib.util import find_spec

from bloomery.core.stage import resolve
from bloomery.data import extras
from bloomery.hw import launcher
from bloomery.train.config import Training

SINKS = ("wandb", "trackio")
"""Kinds that are a package, and an extra, of the same name."""


def needed(section: str, config: Training) -> None:
    """
    Raises DataError for a sink whose package is missing, and HardwareError for more ranks than the machine has devices.
    Each names its key. Where a launcher has started this process, it says how many ranks there are.
    """
    process = launcher.launched()
    ranks = config.ranks if process is None else process.local_size
    if ranks > 1 and find_spec("torch") is not None:  # which takes seconds to load
        resolve("bloomery.hw.dist:check_ranks")(ranks, config.device, f"{section}.ranks")
    for place, sink in enumerate(config.sinks):
        if sink.kind in SINKS:
            extras.load(sink.kind, extra=sink.kind, where=f"{section}.sinks.{place}")
