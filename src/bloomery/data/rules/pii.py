"""Rule `pii`: mail addresses, IP addresses, phone numbers and keys, masked or a reason to drop."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from bloomery.core.bounds import TextLength
from bloomery.data.facts import private
from bloomery.data.facts.batch import Facts, Flags, one_of
from bloomery.data.facts.private import Kind
from bloomery.data.facts.verdict import Common, Finding, above

DIGIT = one_of(b"0123456789")
HEX_OR_COLON = one_of(b"0123456789abcdefABCDEF:")


class Pii(Common):
    """
    Mail addresses, IP addresses, phone numbers and keys.

    Sources: mail addresses and public IP addresses as Penedo et al. 2024, 3.7 (arXiv 2406.17557) mask them; keys by the
    forms that their issuers publish, and what is assigned to a name like `secret` if it looks random, akin to Ben Allal
    et al. 2023 (SantaCoder, arXiv 2301.03988).
    """

    kind: Literal["pii"] = "pii"
    find: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("mail", "ip", "key")
    action: Literal["mask", "drop"] = "mask"
    """mask: <EMAIL>, <IP>, <PHONE> or <KEY> stands in the place of each, and the rest of the document stays."""
    max_found: TextLength = 0
    """With action "drop": how many of one kind a document may hold."""
    private_ips: bool = False
    """Whether addresses count that mean nobody outside: 127.0.0.1, 10.0.0.1, 192.0.2.1, fe80::1."""

    def masked(self, facts: Facts, asked: Flags) -> dict[int, tuple[str, Counter[str]]]:
        if self.action == "drop":
            return {}
        found: dict[int, tuple[str, Counter[str]]] = {}
        for place, spans in self._found(facts, asked):
            found[place] = (private.masked(facts.texts[place], spans), Counter(str(span.kind) for span in spans))
        return found

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        if self.action == "mask":
            return
        counts = {kind: np.zeros(len(facts), np.int64) for kind in self.find}
        for place, spans in self._found(facts, live):
            for span in spans:
                counts[span.kind][place] += 1
        for kind, number in counts.items():
            yield above(f"pii.{kind}", number, self.max_found)

    def _found(self, facts: Facts, asked: Flags) -> Iterator[tuple[int, list[private.Span]]]:
        """What each of the documents asked for holds, those without anything left out."""
        without_ip = tuple(kind for kind in self.find if kind != "ip")
        may_have_ip = _may_have_ip(facts) if "ip" in self.find else asked
        for place in np.flatnonzero(asked).tolist():
            kinds = self.find if may_have_ip[place] else without_ip
            if spans := private.find(facts.texts[place], kinds, private_ips=self.private_ips):
                yield place, spans


def _may_have_ip(facts: Facts) -> Flags:
    """Which documents have three dots between digits, or two colons beside a hexadecimal digit or each other."""
    dots, colons = facts.places("."), facts.places(":")
    dots = dots[DIGIT[facts.raw[dots - 1]] & DIGIT[facts.raw[dots + 1]]]
    colons = colons[HEX_OR_COLON[facts.raw[colons - 1]] | HEX_OR_COLON[facts.raw[colons + 1]]]
    return np.asarray((facts.each(dots) >= 3) | (facts.each(colons) >= 2))
