"""
Records each request and its cost in files, and enforces the spending limit.

Requests, answers and costs go to requests.jsonl in each stage's folder. These files outlive the process.

A line before a request states the most that it may cost. A line after it states the real cost, with the answer.
Each line holds its own SHA-256. A request with only the first line counts as spent in full; the process died or the
connection broke. The recorded sum is therefore an upper bound of what is paid, whatever happens.

A question that has its answer is never asked again. This also holds when a changed recipe has a new folder in the
same run. The records of the other folders are read too. Their costs count against the budget, in dollars at the
price that each request had.
"""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.core.io import disk_errors, sha256_bytes
from bloomery.data.readers import rows
from bloomery.data.synthesis.client import ProviderAnswer, most_tokens
from bloomery.data.synthesis.config import Synthesize, TokenPrice

FILE = "requests.jsonl"
SHA256 = "sha256"
"""Of a line: the key of the hash of its other keys."""
TokenCounts = Sequence[int]
"""Read and written."""
DollarAmounts = Sequence[float]
"""Of a million tokens read, and of a million written."""


class Budget:
    """The requests of a folder. Every method may be called from any thread."""

    def __init__(self, folder: Path, config: Synthesize) -> None:
        self._path = folder / FILE
        self._config = config
        price = (config.provider and config.provider.price) or TokenPrice(input_dollars=0.0, output_dollars=0.0)
        self._price = price.input_dollars, price.output_dollars
        self._lock = threading.Condition()
        self._open: dict[str, tuple[int, int]] = {}
        """Requests under way: tokens in and out, at most."""
        self._taken = [0, 0]
        self.dollars = 0.0
        """What that cost."""
        self.answers: dict[str, ProviderAnswer] = {}
        self.lost = 0
        """Requests that may have been paid for, and brought nothing."""
        self.served = 0
        """Those that brought an answer since this was opened."""
        for path in sorted({*folder.parent.glob(f"*-synthesize-*/{FILE}"), self._path}):
            self._read(path)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        with self._lock, disk_errors(self._path):
            self._file.close()

    def reserve(self, name: str, system: str, messages: Sequence[Mapping[str, str]]) -> bool:
        """
        Set aside what a request may cost at most. False where the budget has no room for it, also when all requests
        under way have come in; until then it waits. It also waits for the same request where that is under way, and
        where it has its answer then, nothing is set aside.
        """
        most = most_tokens(system, messages, self._config.max_answer_tokens)
        with self._lock:
            while name in self._open or not self._has_room(most):
                if not self._open:
                    return False
                self._lock.wait()
                if name in self.answers:
                    return True
            self._open[name] = most
            self._write({"request": name, "at_most": most, "price": self._price})
        return True

    def answered(self, name: str, answer: ProviderAnswer) -> None:
        with self._lock:
            self._settle(name)
            self.served += 1
            self._take(name, answer, self._price)
            self._write({"request": name, "answer": asdict(answer), "price": self._price})

    def not_served(self, name: str, why: str) -> None:
        """The request was turned down, and cost nothing."""
        with self._lock:
            self._settle(name)
            self._write({"request": name, "not_served": why})

    def unknown(self, name: str, why: str) -> None:
        """Nobody knows whether the request was served: it counts as paid."""
        with self._lock:
            most = self._settle(name)
            self._lose(most, self._price)
            self._write({"request": name, "unknown": why})

    @property
    def tokens(self) -> tuple[int, int]:
        """Read and written so far, those of lost requests at most."""
        return self._taken[0], self._taken[1]

    def _has_room(self, most: tuple[int, int]) -> bool:
        more = [sum(kind) for kind in zip(most, *self._open.values(), strict=True)]
        limit = self._config.max_dollars
        affordable = limit is None or self.dollars + _cost(more, self._price) <= limit
        return sum(self._taken) + sum(more) <= self._config.max_tokens and affordable

    def _settle(self, name: str) -> tuple[int, int]:
        most = self._open.pop(name)
        self._lock.notify_all()
        return most

    def _take(self, name: str, answer: ProviderAnswer, price: DollarAmounts) -> None:
        self.answers[name] = answer
        self._spend((answer.input_tokens, answer.output_tokens), price)

    def _lose(self, most: TokenCounts, price: DollarAmounts) -> None:
        self.lost += 1
        self._spend(most, price)

    def _spend(self, tokens: TokenCounts, price: DollarAmounts) -> None:
        self._taken = [sum(kind) for kind in zip(self._taken, tokens, strict=True)]
        self.dollars += _cost(tokens, price)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.closed:  # an interrupt has ended the stage: who reads this counts what was under way as paid
            return
        with disk_errors(self._path):
            line = {**line, SHA256: _sha256(line)}
            self._file.write(json.dumps(line) + "\n")  # in ASCII: an answer may hold half a surrogate pair
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self, path: Path) -> None:
        """What earlier attempts left. A last line that a dying process left torn is cut off."""
        if not path.exists():
            return
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
        begun: dict[str, tuple[TokenCounts, DollarAmounts]] = {}
        for number, line in rows.jsonl(path):
            price = self._price_of(line)
            match _unchanged(line):
                case {"request": str(name), "at_most": [int(), int()] as most}:
                    if name in begun:
                        self._lose(*begun[name])
                    begun[name] = most, price
                case {"request": str(name), "answer": dict(answer)} if _is_whole(answer):
                    begun.pop(name, None)
                    self._take(name, ProviderAnswer(**answer), price)
                case {"request": str(name), "not_served": str()}:
                    begun.pop(name, None)
                case {"request": str(name), "unknown": str()}:
                    self._lose(*begun.pop(name, ((0, 0), price)))
                case _:
                    hint = (
                        "Its disk is damaged, or it was changed by hand. Remove that line: its request is made again."
                    )
                    raise DataError("is no line of a ledger, or was changed", where=f"{path}:{number}", hint=hint)
        for most, price in begun.values():
            self._lose(most, price)

    def _price_of(self, line: object) -> DollarAmounts:
        """At which a line was written; today's, where it does not say."""
        match line:
            case {"price": [int() | float(), int() | float()] as price}:
                return float(price[0]), float(price[1])
        return self._price


def _unchanged(line: object) -> object:
    """The content of a line, or None for one that is not as it was written."""
    content = {name: value for name, value in line.items() if name != SHA256} if isinstance(line, dict) else {}
    return content if isinstance(line, dict) and line.get(SHA256) == _sha256(content) else None


def _sha256(line: Mapping[str, Any]) -> str:
    return sha256_bytes(json.dumps(line, sort_keys=True).encode())


def _cost(tokens: TokenCounts, price: DollarAmounts) -> float:
    """Dollars."""
    return sum(count * dollars for count, dollars in zip(tokens, price, strict=True)) / 1e6


def _is_whole(answer: Mapping[str, Any]) -> bool:
    kinds = {"text": str, "stopped": str, "model": str, "id": str, "input_tokens": int, "output_tokens": int}
    return answer.keys() == kinds.keys() and all(isinstance(answer[name], kind) for name, kind in kinds.items())
