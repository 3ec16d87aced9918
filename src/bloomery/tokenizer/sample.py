"""
A balanced, random sample of documents in one pass and in bounded memory.

Each domain gives its weight's share of the budget, and what small domains leave goes to the larger ones: a level L is
found such that the domains' min(size, L · weight) add up to the budget. Documents are taken in the order of the hash of
their ids until that much is there, so the sample depends neither on their order nor on files. As more is seen, L only
falls; so what lies beyond it now will not be wanted later, and is dropped as the pass goes on.
"""

import hashlib
from collections.abc import Mapping

LONGEST = 1_000_000
"""Characters. Of a longer document a window is taken, its place by hash, so that no file outweighs its domain."""
SLACK = 1.25
"""How far memory may run over the budget before what is beyond the level is dropped."""


class Sample:
    """About `budget` bytes of text, by domain. Without weights all domains are sampled, evenly."""

    def __init__(self, budget: int, weights: Mapping[str, float] | None = None) -> None:
        self._budget, self._weights = budget, dict(weights or {})
        self._even = not weights
        self.seen_bytes: dict[str, int] = dict.fromkeys(self._weights, 0)
        self.seen_documents: dict[str, int] = dict.fromkeys(self._weights, 0)
        self._kept: dict[str, list[tuple[bytes, str, int]]] = {domain: [] for domain in self._weights}
        self._last: dict[str, bytes] = {}
        self._held = 0

    def add(self, domain: str, id: str, text: str) -> None:
        """Offer a document."""
        if domain not in self._weights:
            if not self._even:
                return
            self._weights[domain] = 1.0
            self.seen_bytes[domain] = self.seen_documents[domain] = 0
            self._kept[domain] = []
        key = hashlib.sha256(id.encode()).digest()
        if len(text) > LONGEST:
            start = int.from_bytes(key[-8:], "big") % (len(text) - LONGEST)
            text = text[start : start + LONGEST]
        size = len(text.encode())
        self.seen_bytes[domain] += size
        self.seen_documents[domain] += 1
        if key > self._last.get(domain, key):
            return  # beyond what a lower level will want
        self._kept[domain].append((key, text, size))
        self._held += size
        if self._held > self._budget * SLACK + LONGEST:
            self._trim()

    def missing(self) -> list[str]:
        """The domains that were asked for and have no text."""
        return sorted(domain for domain, size in self.seen_bytes.items() if not size)

    def texts(self) -> dict[str, list[str]]:
        """The sample, by domain, in the order of the hashes."""
        self._trim()
        return {
            domain: [text for _, text, _ in self._kept[domain]] for domain in sorted(self._kept) if self._kept[domain]
        }

    def level(self) -> float:
        """L: bytes for each unit of weight."""
        left, weight = float(self._budget), sum(self._weights.values())
        for domain in sorted(self._weights, key=lambda name: self.seen_bytes[name] / self._weights[name]):
            share = self._weights[domain]
            if self.seen_bytes[domain] >= left / weight * share:
                return left / weight
            left, weight = left - self.seen_bytes[domain], weight - share
        return float("inf")

    def _trim(self) -> None:
        level = self.level()
        self._held = 0
        for domain, kept in self._kept.items():
            kept.sort()
            size, wanted = 0, level * self._weights[domain]
            for place, (_, _, one) in enumerate(kept):
                if size >= wanted:
                    del kept[place:]
                    self._last[domain] = kept[-1][0]
                    break
                size += one
            self._held += size
