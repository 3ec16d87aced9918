"""How token files of others are taken in, as numbers."""

from pathlib import Path
from typing import Literal

from bloomery.core.config import Config, Count


class ImportedShards(Config):
    """Token files that others made: of llm.c and its kin, of nanoGPT, of 1386. None of the corpus is used then."""

    folder: Path
    """With files for training and for validation, told apart by `train` and `val` in their names."""
    document_id: Count | None = None
    """The token between documents. None: the tokenizer's."""
    headerless: Literal["uint16", "uint32"] | None = None
    """What the numbers are in files that hold nothing else, as nanoGPT's. 1386's say it in their meta.yaml."""
