"""
Errors that a user can cause and fix. Anything else that is raised is a bug.

    BloomeryError
      ConfigError        a recipe, an override or a flag is wrong
      DataError          an input file, document, shard or conversation is wrong
        UnreachableError what it stands on elsewhere cannot be seen now
      CheckpointError    a checkpoint is missing, torn, of another shape or of another tokenizer
      HardwareError      the machine lacks what was asked of it
      RunError           a run folder is missing, busy, or not as its manifest says

Each message says what is wrong with the value in it, where, and what to do. `cli.py` prints these
without a traceback and exits 2.
"""


class BloomeryError(Exception):
    """Base of every error that a user can fix: what is wrong, where it is, and the cure."""

    def __init__(self, what: str, *, where: str = "", cure: str = "") -> None:
        self.what, self.where, self.cure = what, where, cure
        super().__init__("\n".join(line for line in (f"{where}: {what}" if where else what, cure) if line))


class ConfigError(BloomeryError): ...


class DataError(BloomeryError): ...


class UnreachableError(DataError): ...


class CheckpointError(BloomeryError): ...


class HardwareError(BloomeryError): ...


class RunError(BloomeryError): ...
