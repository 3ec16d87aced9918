"""
Bits per byte of a model on text, compared with two compressors on the same bytes.

    bits per byte = Σ −log₂ p(token | what came before in its document) / bytes of the documents

The number does not depend on the tokenizer. The compressors see all documents of a domain as one stream, and learn
only from that stream. The model has its training behind it, so the model should win. The margin shows how much it
learned.
"""

import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

import bloomery.hw.require_torch  # noqa: F401
from bloomery.generate.engine import check_finite
from bloomery.hw.device import Device
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train.precision import Precision
from bloomery.train.step import micro_batch_loss

import torch

WINDOWS_AT_ONCE = 32


@dataclass(frozen=True)
class Compression:
    """Bits per byte of the same bytes under three predictors."""

    model: float
    xz: float
    zstd: float
    bytes: int
    documents: int


def measure(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], device: Device) -> Compression:
    """Score whole documents. Every token is predicted from at least half a context, where its document has so much."""
    raw = "\n".join(texts).encode()
    size = sum(len(text.encode()) for text in texts)
    nats = document_nats(model, tokenizer, texts, device)
    return Compression(
        model=round(nats / math.log(2) / size, 4),
        xz=round(8 * len(lzma.compress(raw, preset=9)) / len(raw), 4),
        zstd=round(8 * len(zstandard.ZstdCompressor(level=19).compress(raw)) / len(raw), 4),
        bytes=size,
        documents=len(texts),
    )


def document_nats(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], device: Device) -> float:
    """−log p of all documents, each after its opening token, in nats."""
    T, precision = model.config.context_length, Precision.decide("auto", device)
    rows, targets = [], []
    for text in texts:
        ids = np.array([tokenizer.document_id, *tokenizer.encode(text)], dtype=np.int64)
        for start, first in windows(len(ids) - 1, T):
            row = np.full(T, tokenizer.fill_id, dtype=np.int64)
            target = np.full(T, IGNORE, dtype=np.int64)
            piece = ids[start : start + T + 1]
            row[: len(piece) - 1] = piece[:-1]
            target[first : len(piece) - 1] = piece[first + 1 :]
            rows.append(row)
            targets.append(target)
    total = 0.0
    model.eval()
    with torch.no_grad():
        for offset in range(0, len(rows), WINDOWS_AT_ONCE):
            some = np.stack(rows[offset : offset + WINDOWS_AT_ONCE])
            positions = np.broadcast_to(np.arange(T), some.shape).copy()
            batch = Batch(
                some,
                np.stack(targets[offset : offset + WINDOWS_AT_ONCE]),
                positions,
                np.zeros_like(some),
                positions[:, 0],
            )
            loss = micro_batch_loss(model, batch, precision)
            check_finite(loss)
            total += float(loss)
    return total


def windows(num_targets: int, length: int) -> list[tuple[int, int]]:
    """(start, first scored position) of windows that score each target once. All but the first keep half as context."""
    spans = [(0, 0)]
    scored = min(num_targets, length)
    while scored < num_targets:
        start = scored - length // 2
        spans.append((start, length // 2))
        scored = min(num_targets, start + length)
    return spans
