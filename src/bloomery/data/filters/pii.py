"""
Finds mail addresses, IP addresses, phone numbers and keys; masks them or drops the document.

Every match is validated before it counts.
"""

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from bloomery.core.config import TextLength
from bloomery.data.filters.base import FilterBase, FilterHit, above
from bloomery.data.filters.features import BatchFeatures, Flags, one_of

PrivateKind = Literal["mail", "ip", "phone", "key"]

PLACEHOLDERS: dict[PrivateKind, str] = {"mail": "<EMAIL>", "ip": "<IP>", "phone": "<PHONE>", "key": "<KEY>"}


class PrivateSpan(NamedTuple):
    start: int
    end: int
    kind: PrivateKind


def find(text: str, kinds: Sequence[PrivateKind], *, private_ips: bool = False) -> list[PrivateSpan]:
    """What a text holds of these kinds, in order; where two overlap, the one that begins first, the longer of two."""
    spans: list[PrivateSpan] = []
    if "key" in kinds:
        spans += (PrivateSpan(start, end, "key") for start, end in keys(text))
    if "mail" in kinds:
        spans += (PrivateSpan(start, end, "mail") for start, end in mails(text))
    if "ip" in kinds:
        spans += (PrivateSpan(start, end, "ip") for start, end in ips(text, private=private_ips))
    if "phone" in kinds:
        spans += (PrivateSpan(start, end, "phone") for start, end in phones(text))
    apart: list[PrivateSpan] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if not apart or span.start >= apart[-1].end:
            apart.append(span)
    return apart


def masked(text: str, spans: Sequence[PrivateSpan]) -> str:
    """The text with a placeholder for each span; spans ascend and do not overlap."""
    pieces, done = [], 0
    for start, end, kind in spans:
        pieces += [text[done:start], PLACEHOLDERS[kind]]
        done = end
    return "".join([*pieces, text[done:]])


LOCAL_CHARACTERS, DOMAIN_CHARACTERS = 64, 254  # RFC 5321, 4.5.3.1
LATIN_END = "\u0250"
"""Scripts without white space between words begin after it: what stands before an address there is not its own."""
DOMAIN = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.)+([A-Za-z]{2,24})(?![A-Za-z0-9-])")
FILES = frozenset(
    {
        *("png", "jpg", "jpeg", "gif", "svg", "webp", "ico", "css", "scss", "js", "mjs", "ts", "tsx", "jsx", "json"),
        *("html", "md", "py", "rb", "go", "rs", "java", "txt", "zip"),
    }
)
"""What looks like a top-level domain in the name of a file. Some are both; a mail address there is rare."""


def mails(text: str) -> Iterator[tuple[int, int]]:
    """
    Addresses of people: what stands at an @, with a domain that ends in letters.

    Not `git@host:path`, not image@2x.png, not the @ of a decorator or of package@1.2.3.
    """
    at = text.find("@")
    while at >= 0:
        local = _local(text[max(0, at - LOCAL_CHARACTERS) : at])
        domain = DOMAIN.match(text, at + 1, at + 1 + DOMAIN_CHARACTERS)
        if local and domain and domain[1].lower() not in FILES:
            end = domain.end()
            if not (local == "git" and text[end : end + 1] in (":", "/")):
                yield at - len(local), end
        at = text.find("@", at + 1)


def _local(before: str) -> str:
    """The part of an address before its @, from what stands there; "" where it is none."""
    size = len(before)
    while size and ((before[size - 1] < LATIN_END and before[size - 1].isalnum()) or before[size - 1] in "._%+'-"):
        size -= 1
    local = before[size:].lstrip(".%+'-")  # a quote before an address is not its own
    return local if not local.endswith(".") else ""


IPV4 = re.compile(r"(?<![\w.-])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w-]|\.[0-9])")
IPV6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:]|\.[0-9])")
LOCAL_IPV6 = re.compile(r"(?<![\w:.])(?:f[cde][0-9a-f]{2}:(?:[0-9a-f]{0,4}:){1,6}[0-9a-f]{0,4}|::1)(?![\w:])", re.I)
VERSION = re.compile(
    r"(?:\bv|ver|version|release|revision|build|assembly\w*|[~<>=!]=|[~^])[\s\"'(:=]*\Z", re.IGNORECASE
)
VERSION_CHARACTERS = 24
SMALL_OCTET = 20
"""Four numbers under it are the number of a version, or a public resolver such as 8.8.8.8: nobody's either way."""


def ips(text: str, *, private: bool = False) -> Iterator[tuple[int, int]]:
    """IPv4 and IPv6 addresses; those that mean nobody outside (loopback, documentation, …) only with `private`."""
    if text.count(".") >= 3:
        for match in IPV4.finditer(text):
            octets = [int(octet) for octet in match[0].split(".")]
            before = text[max(0, match.start() - VERSION_CHARACTERS) : match.start()]
            if max(octets) < SMALL_OCTET or VERSION.search(before):
                continue
            if _means_somebody(match[0], private):
                yield match.span()
    if text.count(":") >= 2:
        for match in IPV6.finditer(text):
            if _means_somebody(match[0], private):
                yield match.span()
        if private:
            for match in LOCAL_IPV6.finditer(text):
                if _means_somebody(match[0], private):
                    yield match.span()


def _means_somebody(address: str, private: bool) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # 999.1.1.1, 01.2.3.4, two ::
        return False
    return private or (parsed.is_global and not parsed.is_multicast)


PHONE = re.compile(
    r"(?<![\w.+-])(?:\+[1-9][0-9]{0,2}[ .-]?(?:\([0-9]{1,4}\)[ .-]?)?[0-9]{1,4}(?:[ .-]?[0-9]{2,4}){1,4}"
    r"|\([2-9][0-9]{2}\) ?[2-9][0-9]{2}[.-][0-9]{4}|[2-9][0-9]{2}([.-])[2-9][0-9]{2}\1[0-9]{4})(?![\w-])"
)


def phones(text: str) -> Iterator[tuple[int, int]]:
    """Numbers in international form (+ and 8 to 15 digits, E.164), and in the North American one."""
    for match in PHONE.finditer(text):
        if 8 <= sum(map(str.isdigit, match[0])) <= 15:
            yield match.span()


# what a key begins with, and what may follow
KEYS: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = (
    (("AKIA", "ASIA"), re.compile(r"[0-9A-Z]{16}\b")),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), re.compile(r"[A-Za-z0-9]{36,251}\b")),
    (("github_pat_",), re.compile(r"[A-Za-z0-9_]{22,251}\b")),
    (("glpat-",), re.compile(r"[A-Za-z0-9_-]{20,}")),
    (("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-"), re.compile(r"[A-Za-z0-9-]{10,}")),
    (("AIza",), re.compile(r"[0-9A-Za-z_-]{35}\b")),
    (("sk_live_", "rk_live_", "pk_live_"), re.compile(r"[0-9A-Za-z]{16,}\b")),
    (("sk-",), re.compile(r"[A-Za-z0-9_-]{32,}")),
    (("hf_",), re.compile(r"[A-Za-z0-9]{30,}\b")),
    (("npm_",), re.compile(r"[A-Za-z0-9]{36}\b")),
    (("eyJ",), re.compile(r"[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}")),
)
ASSIGNED = re.compile(r"[:=]\s{0,4}([\"'])([A-Za-z0-9+/_=.~!@#$%^&*-]{16,200})\1")
SECRET = re.compile(
    r"(?:api_?-?key|secret|token|passw(?:or)?d|access_?-?key|private_?-?key)\w{0,20}[\"']?\s{0,4}\Z", re.IGNORECASE
)
SECRET_NAMES = ("secret", "token", "passw", "key")
SECRET_CHARACTERS = 48
BEGIN_KEY = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
END_KEY = re.compile(r"-----END (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
MIN_ENTROPY = 3.5
"""Bits for each character, in an assigned secret. 16 different characters have 4; English words about 3."""


def keys(text: str) -> Iterator[tuple[int, int]]:
    """Access keys and tokens, private keys as a whole, and random values that are assigned to a name like `secret`."""
    for signs, pattern in KEYS:
        for sign in signs:
            yield from _beginning(text, sign, pattern)
    if "PRIVATE KEY" in text:
        yield from _private_keys(text)
    lowered = text.lower()
    if not any(name in lowered for name in SECRET_NAMES):
        return
    for match in ASSIGNED.finditer(text):
        before = text[max(0, match.start() - SECRET_CHARACTERS) : match.start()]
        if _looks_random(match[2]) and SECRET.search(before):
            yield match.span(2)


def _beginning(text: str, sign: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Spans where a word begins with `sign` and `pattern` follows."""
    spot = text.find(sign)
    while spot >= 0:
        after = spot + len(sign)
        if (spot == 0 or not (text[spot - 1].isalnum() or text[spot - 1] == "_")) and (
            match := pattern.match(text, after)
        ):
            yield spot, match.end()
            after = match.end()
        spot = text.find(sign, after)


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    spot = 0
    while begins := BEGIN_KEY.search(text, spot):
        ends = END_KEY.search(text, begins.end())
        if ends is None:  # cut off: the rest is the key
            yield begins.start(), len(text)
            return
        yield begins.start(), ends.end()
        spot = ends.end()


def _looks_random(value: str) -> bool:
    counts = Counter(value)
    entropy = -sum(count / len(value) * math.log2(count / len(value)) for count in counts.values())
    mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return mixed and entropy >= MIN_ENTROPY and "example" not in value.lower()


DIGIT = one_of(b"0123456789")
HEX_OR_COLON = one_of(b"0123456789abcdefABCDEF:")


class Pii(FilterBase):
    """
    Mail addresses, IP addresses, phone numbers and keys.

    Mail addresses and public IP addresses: as Penedo et al. 2024, 3.7 (arXiv 2406.17557) mask them. Keys: by the forms
    that their issuers publish. A value of a name like `secret` is a key if it looks random, akin to Ben Allal et al.
    2023 (SantaCoder, arXiv 2301.03988).
    """

    kind: Literal["pii"] = "pii"
    find: Annotated[tuple[PrivateKind, ...], Field(min_length=1)] = ("mail", "ip", "key")
    """What to look for: mail addresses, IP addresses, phone numbers, keys."""
    action: Literal["mask", "drop"] = "mask"
    """mask: <EMAIL>, <IP>, <PHONE> or <KEY> stands in the place of each, and the rest of the document stays."""
    max_hits: TextLength = 0
    """With action "drop": how many of one kind a document may contain."""
    private_ips: bool = False
    """Whether private addresses count too: 127.0.0.1, 10.0.0.1, 192.0.2.1, fe80::1."""

    def masked(self, facts: BatchFeatures, asked: Flags) -> dict[int, tuple[str, Counter[str]]]:
        if self.action == "drop":
            return {}
        masked_texts: dict[int, tuple[str, Counter[str]]] = {}
        for index, spans in self._found(facts, asked):
            masked_texts[index] = (masked(facts.texts[index], spans), Counter(str(span.kind) for span in spans))
        return masked_texts

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[FilterHit]:
        if self.action == "mask":
            return
        counts = {kind: np.zeros(len(facts), np.int64) for kind in self.find}
        for index, spans in self._found(facts, live):
            for span in spans:
                counts[span.kind][index] += 1
        for kind, number in counts.items():
            yield above(f"pii.{kind}", number, self.max_hits)

    def _found(self, facts: BatchFeatures, asked: Flags) -> Iterator[tuple[int, list[PrivateSpan]]]:
        """What each of the documents asked for holds, those without anything left out."""
        without_ip = tuple(kind for kind in self.find if kind != "ip")
        may_have_ip = _may_have_ip(facts) if "ip" in self.find else asked
        for index in np.flatnonzero(asked).tolist():
            kinds = self.find if may_have_ip[index] else without_ip
            if spans := find(facts.texts[index], kinds, private_ips=self.private_ips):
                yield index, spans


def _may_have_ip(facts: BatchFeatures) -> Flags:
    """Which documents have three dots between digits, or two colons next to a hexadecimal digit or each other."""
    dots, colons = facts.places("."), facts.places(":")
    dots = dots[DIGIT[facts.raw[dots - 1]] & DIGIT[facts.raw[dots + 1]]]
    colons = colons[HEX_OR_COLON[facts.raw[colons - 1]] | HEX_OR_COLON[facts.raw[colons + 1]]]
    return np.asarray((facts.each(dots) >= 3) | (facts.each(colons) >= 2))
