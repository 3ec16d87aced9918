"""
Filters on length, characters, lines, boilerplate, URLs, language and code.

    length        documents that are too short or too long
    characters    broken encodings, and documents of something other than words
    lines         lists, menus, teasers and truncated lines
    boilerplate   what web sites say about themselves, and templates that nobody filled in
    urls          documents from listed hosts, or from addresses that contain listed words
    language      documents in a language that the recipe does not name
    code          files that nobody wrote by hand, or that hold data

These filters share one file because each is short and is built from the same features and base classes.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

import numpy as np
from pydantic import Field, model_validator

from bloomery.core import extras
from bloomery.core.config import DiskPath, PositiveLength, Ratio, Share, TextLength
from bloomery.data.filters import features
from bloomery.data.filters.base import FilterBase, FilterHit, above, below, lines_of
from bloomery.data.filters.features import BatchFeatures, FeatureValues, Flags, shares, sums


class Length(FilterBase):
    """Documents that are too short or too long, in characters."""

    kind: Literal["length"] = "length"
    min_characters: TextLength = 100
    """Minimum number of characters."""
    max_characters: PositiveLength | None = None
    """Maximum number of characters. Not set: no limit."""
    min_words: TextLength = 0
    """Minimum number of words, which white space separates."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[FilterHit]:
        yield below("length.too_short", facts.sizes, self.min_characters)
        if self.max_characters is not None:
            yield above("length.too_long", facts.sizes, self.max_characters)
        if self.min_words:
            yield below("length.too_few_words", facts.words.counts, self.min_words)


class Characters(FilterBase):
    """
    Broken encodings, and documents of something other than words.

    What is measured is akin to the quality signals of RedPajama-V2 (Weber et al. 2024, arXiv 2411.12372); the limits
    are our own.
    """

    kind: Literal["characters"] = "characters"
    nul: bool = False
    """Whether documents may contain NUL, which is in no text."""
    max_controls: Share = 0.001
    """Largest share of control characters (without tabs and line breaks) and of U+FFFD, the mark of lost bytes."""
    max_non_letters: Share = 0.4
    """Largest share of digits, marks and symbols among what is not white space."""
    min_ascii: Share = 0.0
    """Minimum share of ASCII. Values above 0 remove whole languages. The key is here for old recipes."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[FilterHit]:
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
    Lists, menus, teasers and cut lines, by the share of lines that look so.

    Only lines with text count, without the white space around them. The lists of marks are wider than those of the
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

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[FilterHit]:
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
    What web sites say about themselves, and templates that nobody filled in.

    The phrases are those of Raffel et al. 2020, 2.2 (arXiv 1910.10683), with further phrases of sites. Their limit is a
    share of the lines with text. The marks of templates are our own. Code has such marks for good reason, so use this
    rule for prose.
    """

    kind: Literal["boilerplate"] = "boilerplate"
    max_lines: Share = 0.2
    """Largest share of lines with one of the phrases."""
    phrases: tuple[str, ...] = PHRASES
    """Phrases to look for, in upper or lower case."""
    max_templates: TextLength = 2
    """Maximum number of unfilled template fields."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[FilterHit]:
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
    """A host and all below it: `example.com` is also www.example.com, whatever the case, port or spelling (IDN)."""
    hosts_path: DiskPath | None = None
    """A text file of such hosts, one a line."""
    words: tuple[str, ...] = ()
    """Words of addresses, between marks: `casino` is in /casino-royale but not in /occasionally."""
    words_path: DiskPath | None = None
    """A text file of such words, one a line."""
    min_words: PositiveLength = 1
    """How many different words an address needs to be dropped."""

    @model_validator(mode="after")
    def _names_something(self) -> "Urls":
        if not (self.hosts or self.words or self.hosts_path or self.words_path):
            raise ValueError("names neither hosts nor words, so that it drops nothing")
        return self

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[FilterHit]:
        hosts, words = _hosts(self.hosts, self.hosts_path), _words(self.words, self.words_path)
        listed: Flags = np.zeros(len(facts), np.bool_)
        word_counts = np.zeros(len(facts), np.int64)
        for index in np.flatnonzero(live).tolist():
            if (address := facts.addresses[index]) is not None:
                listed[index] = is_listed(host_of(address), hosts)
                word_counts[index] = len(words.intersection(WORD.findall(unquote(address).lower())))
        yield FilterHit("urls.host", listed, np.ones(len(facts)))
        yield above("urls.words", word_counts, self.min_words - 1)


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


LanguageCode = Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]


class Language(FilterBase):
    """
    Documents in a language that the recipe does not name, or in no language that can be identified.

    py3langid identifies the language (Lui and Baldwin 2012, langid.py, ACL demo; an extra: `bloomery[web]`).
    Penedo et al. 2024, 3.3 (arXiv 2406.17557) keep documents from a confidence of 0.65 on, with another classifier.
    """

    kind: Literal["language"] = "language"
    keep: Annotated[tuple[LanguageCode, ...], Field(min_length=1)] = ("en",)
    """Languages that stay, as ISO 639-1 names them."""
    min_confidence: Share = 0.65
    """Minimum probability of the language."""
    max_chars: PositiveLength = 1000
    """Characters from the start of a document that count."""

    def packages(self) -> tuple[str, ...]:
        return ("py3langid",)

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[FilterHit]:
        identifier, names = _identifier(), np.full(len(facts), "", object)
        sure = np.ones(len(facts))
        for index in np.flatnonzero(live).tolist():
            name, confidence = identifier.classify(facts.texts[index][: self.max_chars])
            names[index], sure[index] = name, float(confidence)
        yield below("language.unsure", sure, self.min_confidence)
        for name in sorted(set(names[live]) - set(self.keep)):
            yield FilterHit(f"language.{name}", np.asarray(live & (names == name)), sure)


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

    What a file is, the end of its id or its address tells: `.html`, `.json`, `.py` and so on. HTML tells it itself too.
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

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[FilterHit]:
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

    def _html(self, facts: BatchFeatures, live: Flags, suffixes: list[str]) -> Iterator[FilterHit]:
        kinds = zip(suffixes, facts.texts, strict=True)
        pages = live & np.array([suffix in HTML or (suffix == "" and _begins_html(text)) for suffix, text in kinds])
        visible = np.maximum(_asked(facts, pages, visible_characters), 0)
        few = np.asarray(pages & (visible < self.min_visible_html_characters))
        yield FilterHit("code.few_visible_characters", few, visible)
        share = visible / np.maximum(facts.sizes, 1)
        yield FilterHit("code.markup", np.asarray(pages & (share < self.min_visible_html)), share)

    def _data(self, facts: BatchFeatures, suffixes: list[str]) -> Iterator[FilterHit]:
        data = np.array([suffix in DATA for suffix in suffixes])
        if data.any():
            sizes = facts.sizes.astype(np.float64)
            yield FilterHit("code.short_data", np.asarray(data & (sizes < self.min_data_characters)), sizes)
            yield FilterHit("code.long_data", np.asarray(data & (sizes > self.max_data_characters)), sizes)
            letters = shares(facts.count(features.LETTER), facts.sizes)
            yield FilterHit("code.few_letters", np.asarray(data & (letters < self.min_data_letters)), letters)

    def _comments(self, facts: BatchFeatures, live: Flags, suffixes: list[str]) -> Iterator[FilterHit]:
        if self.min_comments <= 0 and self.max_comments >= 1:
            return
        share = np.zeros(len(facts))
        spoken = np.array([suffix in HASHES or suffix in SLASHES for suffix in suffixes])
        for index in np.flatnonzero(live & spoken).tolist():
            share[index] = comment_share(facts.texts[index], hashes=suffixes[index] in HASHES)
        yield FilterHit("code.few_comments", np.asarray(spoken & (share < self.min_comments)), share)
        yield FilterHit("code.many_comments", np.asarray(spoken & (share > self.max_comments)), share)


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


def _suffix(name: str, address: str | None) -> str:
    suffix = PurePosixPath(name).suffix
    if not suffix and address is not None:
        suffix = PurePosixPath(address.partition("?")[0].partition("#")[0]).suffix
    return suffix.lower()


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
