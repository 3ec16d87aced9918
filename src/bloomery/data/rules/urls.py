"""Rule `urls`: documents from hosts, or from addresses with words, that a list names."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import numpy as np
from pydantic import model_validator

from bloomery.core.bounds import DiskPath, PositiveLength
from bloomery.data.facts.batch import Facts, Flags
from bloomery.data.facts.verdict import Common, Finding, above
from bloomery.data.facts.wordlist import lines_of

WORD = re.compile(r"[^\W_]+")
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*:)?//")


class Urls(Common):
    """
    Documents from hosts, or from addresses with words, that a list names; those without an address stay.

    Source: Penedo et al. 2023, RefinedWeb, G.1 (arXiv 2306.01116), who also let several weaker words drop an address.
    """

    kind: Literal["urls"] = "urls"
    hosts: tuple[str, ...] = ()
    """A host and all below it: `example.com` is also www.example.com, whatever the case, port or spelling (IDN)."""
    hosts_path: DiskPath | None = None
    """A text file of such hosts, one a line."""
    words: tuple[str, ...] = ()
    """Words of addresses, between marks: `casino` is in /casino-royale but not in /occasionally."""
    words_path: DiskPath | None = None
    min_words: PositiveLength = 1
    """How many different words an address needs to be dropped."""

    @model_validator(mode="after")
    def _names_something(self) -> "Urls":
        if not (self.hosts or self.words or self.hosts_path or self.words_path):
            raise ValueError("names neither hosts nor words, so that it drops nothing")
        return self

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        hosts, words = _hosts(self.hosts, self.hosts_path), _words(self.words, self.words_path)
        listed: Flags = np.zeros(len(facts), np.bool_)
        found = np.zeros(len(facts), np.int64)
        for place in np.flatnonzero(live).tolist():
            if (address := facts.addresses[place]) is not None:
                listed[place] = is_listed(host_of(address), hosts)
                found[place] = len(words.intersection(WORD.findall(unquote(address).lower())))
        yield Finding("urls.host", listed, np.ones(len(facts)))
        yield above("urls.words", found, self.min_words - 1)


@cache
def _hosts(entries: tuple[str, ...], path: Path | None) -> frozenset[str]:
    named = [*entries, *(lines_of(path) if path is not None else ())]
    return frozenset(host for entry in named if (host := host_of(entry)))


@cache
def _words(entries: tuple[str, ...], path: Path | None) -> frozenset[str]:
    return frozenset([*(entry.lower() for entry in entries), *(lines_of(path) if path is not None else ())])


def host_of(address: str) -> str:
    """The host of an address, or of a bare host, in the letters that DNS knows; "" where there is none."""
    lowered = address.strip().lower()
    try:
        host = urlsplit(lowered if SCHEME.match(lowered) else f"//{lowered}").hostname or ""
    except ValueError:  # brackets that hold no address
        return ""
    host = unquote(host).removeprefix("*.").strip(".")
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:  # a label that is empty or too long: no such host, but the same spelling is the same host
        return host


def is_listed(host: str, hosts: frozenset[str]) -> bool:
    """Whether a host or one above it is listed."""
    while host:
        if host in hosts:
            return True
        host = host.partition(".")[2]
    return False
