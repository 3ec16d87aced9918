"""
Filters on length, characters, lines, boilerplate, URLs, language, code and personal data.

    length        documents that are too short or too long
    characters    broken encodings, and documents of something other than words
    lines         lists, menus, teasers and truncated lines
    boilerplate   what web sites say about themselves, and templates that nobody filled in
    urls          documents from listed hosts, or from addresses that contain listed words
    language      documents in a language that the recipe does not name
    code          files that nobody wrote by hand, or that hold data
    pii           mail addresses, IP addresses, phone numbers and keys, each validated: masked, or a reason to drop

These filters share one file because each is short and is built from the same features and base classes.
"""

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
from pydantic import Field, model_validator

from bloomery.core import extras
from bloomery.core.config import DiskPath, PositiveLength, Ratio, Share, TextLength
from bloomery.data.filters import features
from bloomery.data.filters.features import (
    BatchFeatures,
    FeatureValues,
    FilterBase,
    Flags,
    RuleFinding,
    above,
    below,
    of_list,
    one_of,
    shares,
    sums,
)


class Length(FilterBase):
    """Documents that are too short or too long, in characters."""

    kind: Literal["length"] = "length"
    min_characters: TextLength = 100
    """Minimum number of characters."""
    max_characters: PositiveLength | None = None
    """Maximum number of characters. Not set: no limit."""
    min_words: TextLength = 0
    """Minimum number of words, separated by white space."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        yield below("length.too_short", facts.sizes, self.min_characters)
        if self.max_characters is not None:
            yield above("length.too_long", facts.sizes, self.max_characters)
        if self.min_words:
            yield below("length.too_few_words", facts.words.counts, self.min_words)


class Characters(FilterBase):
    """
    Broken encodings, and documents with too many characters other than letters.

    The measures are similar to the quality signals of RedPajama-V2 (Weber et al. 2024, arXiv 2411.12372); the limits
    are our own.
    """

    kind: Literal["characters"] = "characters"
    nul: bool = False
    """Whether documents may contain the character NUL, which does not occur in text."""
    max_controls: Share = 0.001
    """Maximum share of control characters (without tabs and line breaks) and of U+FFFD, the mark of lost bytes."""
    max_non_letters: Share = 0.4
    """Maximum share of digits, marks and symbols among characters other than white space."""
    min_ascii: Share = 0.0
    """Minimum share of ASCII. Values above 0 remove whole languages. The key exists for old recipes."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        if not self.nul:
            yield above("characters.nul", facts.each(facts.places("\0")), 0)
        yield above("characters.controls", shares(facts.count(features.CONTROL), facts.sizes), self.max_controls)
        others = facts.word_sizes - facts.count(features.LETTER)
        yield above("characters.non_letters", shares(others, facts.word_sizes), self.max_non_letters)
        ascii_only = facts.sizes - facts.each(facts.leads)
        if self.min_ascii:
            yield below("characters.ascii", shares(ascii_only, facts.sizes), self.min_ascii)


BULLETS = ("•", "‣", "●", "◦", "⁃", "▪", "-", "*", "+")
ENDS = (*".!?:;,\"')]", "…", "”", "’", "»", "。", "！", "？", "」")
ELLIPSES = ("...", "…")


class Lines(FilterBase):
    """
    Lists, menus, teasers and truncated lines, by their share of the lines.

    Only lines with text count, without the white space around them. The lists of marks are longer than those of the
    sources. All limits are loose until a recipe sets them.

    Sources of the line limits: Rae et al. 2021, A1.1 (arXiv 2112.11446); Raffel et al. 2020, 2.2 (arXiv 1910.10683);
    Penedo et al. 2023, RefinedWeb, G.2 (arXiv 2306.01116).
    """

    kind: Literal["lines"] = "lines"
    max_bullet_lines: Share = 0.9
    """Maximum share of lines that begin with a bullet."""
    max_ellipsis_lines: Share = 0.3
    """Maximum share of lines that end with an ellipsis."""
    max_short_lines: Share = 1.0
    """Maximum share of lines that are short."""
    short_line_characters: PositiveLength = 30
    """Lines of at most this many characters are short."""
    max_lines_without_end: Share = 1.0
    """Maximum share of lines that do not end in punctuation, a closing quote or a bracket."""
    max_number_lines: Share = 1.0
    """Maximum share of lines without a letter."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        lines = facts.written
        starts, ends = facts.stripped(lines)
        bullets = _any(facts.begins(starts, mark) for mark in BULLETS)
        yield above("lines.bullets", shares(sums(bullets, lines), lines.counts), self.max_bullet_lines)
        dots = _any(facts.begins(np.maximum(ends - len(mark.encode()), starts), mark) for mark in ELLIPSES)
        yield above("lines.ellipses", shares(sums(dots, lines), lines.counts), self.max_ellipsis_lines)
        short = facts.characters(starts, ends) <= self.short_line_characters
        yield above("lines.short", shares(sums(short, lines), lines.counts), self.max_short_lines)
        if self.max_lines_without_end < 1:
            last = facts.last_characters(ends)
            open_ended = ~_any(facts.begins(last, mark) for mark in ENDS)
            yield above("lines.no_end", shares(sums(open_ended, lines), lines.counts), self.max_lines_without_end)
        if self.max_number_lines < 1:
            numbers = facts.spans_without(features.LETTER, starts, ends)
            yield above("lines.numbers", shares(sums(numbers, lines), lines.counts), self.max_number_lines)


def _any(questions: Iterator[Flags]) -> Flags:
    combined = next(questions).copy()
    for further in questions:
        combined |= further
    return combined


PHRASES = (
    *("javascript", "cookie policy", "uses cookies", "use of cookies", "use cookies", "accept cookies"),
    *("privacy policy", "terms of use", "terms of service", "terms and conditions", "all rights reserved"),
    *("sign up for", "subscribe to our", "log in to", "create an account", "click here", "share on facebook"),
)
# how a template leaves room: {{name}}, <%= name %>, ${name}, [Insert name here], [Your Name], Lorem ipsum
TEMPLATE = re.compile(
    r"\{\{[^{}\n]{1,60}\}\}|<%[^%\n]{1,60}%>|\$\{[^{}\n]{1,60}\}|\[(?:insert|your|enter) [^\[\]\n]{1,60}\]|lorem ipsum",
    re.IGNORECASE,
)
TEMPLATE_MARKS = ("{{", "<%", "${", "[insert ", "[your ", "[enter ", "lorem ipsum")


class Boilerplate(FilterBase):
    """
    Boilerplate of web sites, and templates that nobody filled in.

    The phrases are those of Raffel et al. 2020, 2.2 (arXiv 1910.10683), with further phrases of sites. Their limit is a
    share of the lines with text. The marks of templates are our own. Code has such marks on purpose, so use this
    rule for prose.
    """

    kind: Literal["boilerplate"] = "boilerplate"
    max_lines: Share = 0.2
    """Maximum share of lines with one of the phrases."""
    phrases: tuple[str, ...] = PHRASES
    """Phrases to look for, in upper or lower case."""
    max_templates: TextLength = 2
    """Maximum number of unfilled template fields."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        lines = facts.written
        has_phrase: Flags = np.zeros(len(lines.starts), np.bool_)
        for phrase in self.phrases:
            has_phrase |= facts.lines_with(lines, facts.find(phrase.lower().encode()))
        yield above("boilerplate.lines", shares(sums(has_phrase, lines), lines.counts), self.max_lines)
        left = np.zeros(len(facts), np.int64)
        some = sum(facts.each(facts.find(mark.encode())) for mark in TEMPLATE_MARKS)
        for index in np.flatnonzero(live & (some > 0)).tolist():
            left[index] = sum(1 for _ in TEMPLATE.finditer(facts.texts[index]))
        yield above("boilerplate.templates", left, self.max_templates)


WORD = re.compile(r"[^\W_]+")
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*:)?//")


class Urls(FilterBase):
    """
    Documents from hosts, or from addresses with words, that a list names; those without an address stay.

    Source: Penedo et al. 2023, RefinedWeb, G.1 (arXiv 2306.01116), who also let several weaker words drop an address.
    """

    kind: Literal["urls"] = "urls"
    hosts: tuple[str, ...] = ()
    """A host and its subdomains: `example.com` includes www.example.com, in any case, port or spelling (IDN)."""
    hosts_path: DiskPath | None = None
    """A text file with such hosts, one per line."""
    words: tuple[str, ...] = ()
    """Words of addresses, between marks: `casino` is in /casino-royale but not in /occasionally."""
    words_path: DiskPath | None = None
    """A text file with such words, one per line."""
    min_words: PositiveLength = 1
    """How many different words an address needs to be dropped."""

    @model_validator(mode="after")
    def _names_something(self) -> "Urls":
        if not (self.hosts or self.words or self.hosts_path or self.words_path):
            raise ValueError("has neither hosts nor words, so it drops nothing: set one of them")
        return self

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        hosts, words = _hosts(self.hosts, self.hosts_path), _words(self.words, self.words_path)
        listed: Flags = np.zeros(len(facts), np.bool_)
        word_counts = np.zeros(len(facts), np.int64)
        for index in np.flatnonzero(live).tolist():
            if (address := facts.addresses[index]) is not None:
                listed[index] = is_listed(host_of(address), hosts)
                word_counts[index] = len(words.intersection(WORD.findall(unquote(address).lower())))
        yield RuleFinding("urls.host", listed, np.ones(len(facts)))
        yield above("urls.words", word_counts, self.min_words - 1)


@of_list
def _hosts(named: Sequence[str]) -> frozenset[str]:
    return frozenset(host for entry in named if (host := host_of(entry)))


@of_list
def _words(named: Sequence[str]) -> frozenset[str]:
    return frozenset(entry.lower() for entry in named)


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


LanguageCode = Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]


class Language(FilterBase):
    """
    Documents in a language that the recipe does not name, or in no language that can be identified.

    py3langid identifies the language (Lui and Baldwin 2012, langid.py, ACL demo; an extra: `bloomery[web]`).
    Penedo et al. 2024, 3.3 (arXiv 2406.17557) keep documents from a confidence of 0.65 on, with another classifier.
    """

    kind: Literal["language"] = "language"
    keep: Annotated[tuple[LanguageCode, ...], Field(min_length=1)] = ("en",)
    """Languages to keep, as ISO 639-1 codes."""
    min_confidence: Share = 0.65
    """Minimum probability of the language."""
    max_chars: PositiveLength = 1000
    """Characters from the start of a document that count."""

    def packages(self) -> tuple[str, ...]:
        return ("py3langid",)

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        identifier, names = _identifier(), np.full(len(facts), "", object)
        sure = np.ones(len(facts))
        for index in np.flatnonzero(live).tolist():
            name, confidence = identifier.classify(facts.texts[index][: self.max_chars])
            names[index], sure[index] = name, float(confidence)
        yield below("language.unsure", sure, self.min_confidence)
        for name in sorted(set(names[live]) - set(self.keep)):
            yield RuleFinding(f"language.{name}", np.asarray(live & (names == name)), sure)


@cache
def _identifier() -> Any:
    langid = extras.load("py3langid.langid")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


GENERATED = re.compile(r"auto-?generated|automatically generated|generated by|do not edit", re.IGNORECASE)
GENERATED_LINES = 5
XML, XML_CHARACTERS = "<?xml version=", 100
TAG = re.compile(r"<[^<>]*>")
HTML = frozenset({".html", ".htm", ".xhtml"})
DATA = frozenset({".json", ".yaml", ".yml"})
HASHES = frozenset({".py", ".pyi", ".rb", ".sh", ".pl", ".r", ".jl"})
SLASHES = frozenset(
    {
        *(".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".go", ".java", ".js", ".jsx"),
        *(".ts", ".tsx", ".rs", ".kt", ".swift"),
    }
)


class Code(FilterBase):
    """
    Files that nobody wrote by hand, or that hold data. Source: Li et al. 2023, StarCoder, 3 (arXiv 2305.06161);
    the limits on lines are those of Chen et al. 2021, Codex, 3.1.

    The extension of the ID or address gives the file type, such as `.html` or `.py`. HTML also shows by its text.
    """

    kind: Literal["code"] = "code"
    max_line_characters: PositiveLength = 1000
    """Maximum length of a line."""
    max_mean_line_characters: Ratio = 100.0
    """Maximum mean length of a line."""
    min_alphanumeric: Share = 0.25
    """Minimum share of characters that are letters or digits."""
    xml: bool = False
    """Whether files may begin as XML does."""
    generated: bool = False
    """Whether one of the first five lines may say that a program wrote the file."""
    min_visible_html: Share = 0.2
    """Minimum share of an HTML file that a reader sees."""
    min_visible_html_characters: TextLength = 100
    """Minimum number of characters of an HTML file that a reader sees."""
    min_data_characters: TextLength = 50
    """Minimum number of characters of a JSON or YAML file."""
    max_data_characters: PositiveLength = 5000
    """Maximum number of characters of a JSON or YAML file."""
    min_data_letters: Share = 0.5
    """Minimum share of letters in JSON and YAML files."""
    min_comments: Share = 0.0
    """Minimum share of comments and docstrings, in languages with comments after # or //. StarCoder: 0.01."""
    max_comments: Share = 1.0
    """Maximum share of comments and docstrings. StarCoder: 0.8."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        lines = facts.lines
        longest = np.maximum.reduceat(facts.characters(lines.starts, lines.ends), lines.first)
        yield above("code.long_line", longest, self.max_line_characters)
        yield above("code.long_lines", facts.sizes / lines.counts, self.max_mean_line_characters)
        yield below("code.few_alphanumeric", shares(facts.count(features.ALNUM), facts.sizes), self.min_alphanumeric)
        if not self.xml:
            yield above("code.xml", _asked(facts, live, _xml), -1)
        if not self.generated:
            yield above("code.generated", _asked(facts, live, _generated), -1)
        suffixes = [_suffix(name, address) for name, address in zip(facts.names, facts.addresses, strict=True)]
        yield from self._html(facts, live, suffixes)
        yield from self._data(facts, suffixes)
        yield from self._comments(facts, live, suffixes)

    def _html(self, facts: BatchFeatures, live: Flags, suffixes: list[str]) -> Iterator[RuleFinding]:
        kinds = zip(suffixes, facts.texts, strict=True)
        pages = live & np.array([suffix in HTML or (suffix == "" and _begins_html(text)) for suffix, text in kinds])
        visible = np.maximum(_asked(facts, pages, visible_characters), 0)
        few = np.asarray(pages & (visible < self.min_visible_html_characters))
        yield RuleFinding("code.few_visible_characters", few, visible)
        share = visible / np.maximum(facts.sizes, 1)
        yield RuleFinding("code.markup", np.asarray(pages & (share < self.min_visible_html)), share)

    def _data(self, facts: BatchFeatures, suffixes: list[str]) -> Iterator[RuleFinding]:
        data = np.array([suffix in DATA for suffix in suffixes])
        if data.any():
            sizes = facts.sizes.astype(np.float64)
            yield RuleFinding("code.short_data", np.asarray(data & (sizes < self.min_data_characters)), sizes)
            yield RuleFinding("code.long_data", np.asarray(data & (sizes > self.max_data_characters)), sizes)
            letters = shares(facts.count(features.LETTER), facts.sizes)
            yield RuleFinding("code.few_letters", np.asarray(data & (letters < self.min_data_letters)), letters)

    def _comments(self, facts: BatchFeatures, live: Flags, suffixes: list[str]) -> Iterator[RuleFinding]:
        if self.min_comments <= 0 and self.max_comments >= 1:
            return
        share = np.zeros(len(facts))
        spoken = np.array([suffix in HASHES or suffix in SLASHES for suffix in suffixes])
        for index in np.flatnonzero(live & spoken).tolist():
            share[index] = comment_share(facts.texts[index], hashes=suffixes[index] in HASHES)
        yield RuleFinding("code.few_comments", np.asarray(spoken & (share < self.min_comments)), share)
        yield RuleFinding("code.many_comments", np.asarray(spoken & (share > self.max_comments)), share)


def _asked(facts: BatchFeatures, asked: Flags, question: Callable[[str], int]) -> FeatureValues:
    """What a question about one text answers for each document that it is asked of; -1 for the others."""
    answers = np.full(len(facts), -1.0)
    for index in np.flatnonzero(asked).tolist():
        answers[index] = question(facts.texts[index])
    return answers


def _xml(text: str) -> int:
    return text[:XML_CHARACTERS].find(XML)


def _generated(text: str) -> int:
    """The number of the line that says it, from 1; -1 where none does."""
    match = GENERATED.search("\n".join(text.split("\n", GENERATED_LINES)[:GENERATED_LINES]))
    return -1 if match is None else match.string.count("\n", 0, match.start()) + 1


ROW = re.compile(r":[0-9]+(#[0-9]+)?$")
"""The row of a table or an archive, at the end of the name that its document has where none is given."""
HOLDS_DOCUMENTS = (
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".csv",
    ".tsv",
    ".warc",
    ".wet",
    ".gz",
    ".zst",
    ".bz2",
    ".xz",
    ".zip",
)


def _suffix(name: str, address: str | None) -> str:
    """Of the file that a document was, not of the table or the archive that holds it."""
    names = (ROW.sub("", name), (address or "").partition("?")[0].partition("#")[0])
    suffixes = (PurePosixPath(one).suffix.lower() for one in names)
    return next((one for one in suffixes if one and one not in HOLDS_DOCUMENTS), "")


def _begins_html(text: str) -> bool:
    return text[:200].lstrip().lower().startswith(("<!doctype html", "<html"))


def visible_characters(text: str) -> int:
    """Characters of an HTML page that a reader sees: what is no tag, no script and no style; blanks count once."""
    for name in ("script", "style"):
        text = _without(text, f"<{name}", f"</{name}", leave="<")  # and the end tag's > makes an empty tag of it
    return len(" ".join(TAG.sub(" ", _without(text, "<!--", "-->")).split()))


def _without(text: str, opens: str, closes: str, *, leave: str = "") -> str:
    """A text with `leave` for what stands between two marks, and for them. Without the second, it ends at the first."""
    lowered, kept, spot = text.lower(), [], 0
    if len(lowered) != len(text):  # a letter that becomes two, such as İ
        lowered = text
    while (start := lowered.find(opens, spot)) >= 0:
        kept.append(text[spot:start])
        end = lowered.find(closes, start + len(opens))
        if end < 0:
            return "".join(kept)
        kept.append(leave)
        spot = end + len(closes)
    return "".join([*kept, text[spot:]])


def comment_share(text: str, *, hashes: bool) -> float:
    """Share of a file's characters in whole lines of comment, in docstrings, and between /* and */."""
    mark, blocks = ("#", (('"""', '"""'), ("'''", "'''"))) if hashes else ("//", (("/*", "*/"),))
    stripped = [line.strip() for line in text.split("\n")]
    characters = sum(len(line) for line in stripped if line.startswith(mark))
    for opens, closes in blocks:
        characters += len(text) - len(_without(text, opens, closes))
    return min(1.0, characters / max(1, len(text)))


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
    """mask: <EMAIL>, <IP>, <PHONE> or <KEY> replaces each, and the rest of the document stays."""
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

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
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
