"""
Filters of known papers: Gopher's quality and repetition rules, C4 and FineWeb.

    gopher        the quality rules for prose of Gopher
    c4            pages without sentences, with code or with dummy text
    fineweb       lists, menus and broken lines
    repetition    text that repeats its lines, its paragraphs or its phrases

These filters share one file so that each can be compared with its paper and with the others.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bloomery.core.config import DiskPath, PositiveLength, Ratio, Share, TextLength
from bloomery.core.io import GOLDEN, splitmix64
from bloomery.data.filters import features
from bloomery.data.filters.features import (
    NEWLINE,
    BatchFeatures,
    FeatureValues,
    FilterBase,
    Flags,
    Positions,
    RuleFinding,
    Spans,
    above,
    below,
    one_of,
    only,
    shares,
    sums,
    wordlist,
)

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
OPENING_CHARACTERS = 400
"""Where a document's stop words are looked for first: prose has two of them within a line or two."""


class Gopher(FilterBase):
    """
    Quality rules for prose. Source: Rae et al. 2021, Scaling Language Models, A1.1 (arXiv 2112.11446).

    Details that the paper leaves open follow common reference code. A word of only marks counts neither for the
    number of words nor for their mean length. Blank lines are lines. A bullet is • or -. Case counts.
    """

    kind: Literal["gopher"] = "gopher"
    min_words: TextLength = 50
    """Minimum number of words."""
    max_words: PositiveLength = 100_000
    """Maximum number of words."""
    min_mean_word_characters: Ratio = 3.0
    """Minimum mean length of a word."""
    max_mean_word_characters: Ratio = 10.0
    """Maximum mean length of a word."""
    max_symbols_per_word: Ratio = 0.1
    """Maximum number of hash signs per word, and of ellipses per word."""
    max_bullet_lines: Share = 0.9
    """Maximum share of lines that begin with a bullet."""
    max_ellipsis_lines: Share = 0.3
    """Maximum share of lines that end with an ellipsis."""
    min_alphabetic_words: Share = 0.8
    """Minimum share of words with a letter in them."""
    min_stop_words: TextLength = 2
    """Minimum number of different words of `stop_words`."""
    stop_words: tuple[str, ...] = STOP_WORDS
    """The words that `min_stop_words` counts."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        words = facts.words
        symbols = facts.words_without(features.SOLID)
        counted = words.counts - facts.each_word(symbols)
        yield RuleFinding(
            "gopher.too_few_words", (counted < self.min_words) | (words.counts == 0), counted.astype(np.float64)
        )
        yield above("gopher.too_many_words", counted, self.max_words)
        mean = shares(_word_characters(facts, symbols), counted)
        yield below("gopher.short_words", mean, self.min_mean_word_characters)
        yield above("gopher.long_words", mean, self.max_mean_word_characters)
        for symbol_counts in (facts.each(facts.places("#")), ellipses(facts)):
            yield above("gopher.symbols", shares(symbol_counts, words.counts), self.max_symbols_per_word)
        yield above("gopher.bullet_lines", bullet_lines(facts), self.max_bullet_lines)
        yield above("gopher.ellipsis_lines", ellipsis_lines(facts), self.max_ellipsis_lines)
        alphabetic = words.counts - facts.each_word(facts.words_without(features.LETTER))
        yield below("gopher.few_alphabetic_words", shares(alphabetic, words.counts), self.min_alphabetic_words)
        yield below("gopher.few_stop_words", self._stop_words(facts, live), self.min_stop_words)

    def _stop_words(self, facts: BatchFeatures, live: Flags) -> Positions:
        stop_words, counts = frozenset(self.stop_words), np.zeros(len(facts), np.int64)
        for index in np.flatnonzero(live).tolist():
            text = facts.texts[index]
            opening = text[:OPENING_CHARACTERS].split()[:-1]  # the last of them may be cut
            counts[index] = len(stop_words.intersection(opening))
            if counts[index] < self.min_stop_words:
                counts[index] = len(stop_words.intersection(text.split()))
        return counts


def _word_characters(facts: BatchFeatures, symbols: Positions) -> Positions:
    """Characters in each document's words, without those that are symbols."""
    starts, ends = facts.words.starts[symbols], facts.words.ends[symbols]
    marks = np.append(0, np.cumsum(facts.characters(starts, ends)))
    before, after = (np.searchsorted(symbols, bound) for bound in (facts.words.first, facts.words.last))
    return np.asarray(facts.word_sizes - (marks[after] - marks[before]))


def ellipses(facts: BatchFeatures) -> Positions:
    """How many ellipses each document has: three dots that no earlier one has taken, or the character."""
    dots = facts.places(".")
    opens = np.flatnonzero(np.diff(dots, prepend=-1) != 1)
    runs = np.append(0, np.cumsum(np.diff(opens, append=len(dots)) // 3))
    before, after = (np.searchsorted(dots[opens], bound) for bound in (facts.starts, facts.ends))
    return np.asarray(runs[after] - runs[before] + facts.each(facts.places("…")))


def bullet_lines(facts: BatchFeatures) -> FeatureValues:
    """Share of each document's lines that begin with • or -, after white space."""
    starts = facts.words.starts
    dashes = np.flatnonzero(facts.raw[starts] == ord("-"))
    words = np.append(dashes, facts.words_at(facts.places("•")))
    return _share_of_lines(facts, np.sort(words), at_start=True)


def ellipsis_lines(facts: BatchFeatures) -> FeatureValues:
    """Share of each document's lines that end with ... or …, before white space."""
    starts, ends = facts.words.starts, facts.words.ends
    dots = np.flatnonzero(facts.last_bytes == ord("."))
    for back in (2, 3):
        dots = dots[(facts.raw[ends[dots] - back] == ord(".")) & (ends[dots] - back >= starts[dots])]
    after = facts.places("…") + len("…".encode())
    characters = np.searchsorted(ends, after)  # no text ends before its last word does
    characters = characters[ends[np.minimum(characters, len(ends) - 1)] == after]
    return _share_of_lines(facts, np.sort(np.append(dots, characters)), at_start=False)


def _share_of_lines(facts: BatchFeatures, words: Positions, *, at_start: bool) -> FeatureValues:
    """Share of each document's lines that have one of these words, by ascending number, as their first or last."""
    lines = facts.broken
    if not len(words):
        return np.zeros(len(facts))
    line = np.searchsorted(lines.starts, facts.words.starts[words], side="right") - 1
    near = words - 1 if at_start else words + 1
    outer = (near < 0) | (near >= len(facts.words.starts))
    other = facts.words.starts[np.where(outer, words, near)]
    alone = outer | (np.searchsorted(lines.starts, other, side="right") - 1 != line)
    return shares(_each_line(lines, line[alone]), lines.counts)


def _each_line(lines: Spans, chosen: Positions) -> Positions:
    return np.asarray(np.searchsorted(chosen, lines.last) - np.searchsorted(chosen, lines.first))


LINE_ENDS = (".", "?", "!", '"', "'")
SENTENCE_END = re.compile(r"[.?!][\"'”’)\]]{0,4}$")
SENTENCE_ENDS = re.compile(r"[.?!][\"'”’)\]]{0,4}(?=\s|$)")

ENDS_LINE, ENDS_SENTENCE, CLOSES = one_of("".join(LINE_ENDS).encode()), one_of(b".?!"), one_of(b"\"')]")
MAY_CLOSE = CLOSES | one_of(bytes(mark.encode()[-1] for mark in "”’"))
CITES = one_of(b"0123456789]ec")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
POLICY_SIGNS = ("terms of use", "privacy policy", "cookie")
"""What every phrase has one of."""
CITATION = re.compile(r"\[[0-9]*]|\[edit]|\[citation needed]")


class C4(FilterBase):
    """
    Pages without sentences, with code or with dummy text. Source: Raffel et al. 2020, 2.2 (arXiv 1910.10683).

    The paper deletes lines without an end mark or with one of "...", and lines of too few words or with a word too
    long. It also deletes lines that name JavaScript, cookies, terms or policies. Documents stay whole here. As in the
    reference code, only the lines that the paper would keep count as sentences and can drop a page. Citation marks
    like [1] do not count.
    """

    kind: Literal["c4"] = "c4"
    min_sentences: TextLength = 5
    """Minimum number of sentences in the lines that the paper would keep."""
    min_kept_lines: Share = 0.0
    """Minimum share of lines that the paper would keep, of all lines with text."""
    min_line_words: TextLength = 3
    """Minimum number of words in a line that counts."""
    need_line_ends: bool = True
    """Whether lines must end with punctuation to count. FineWeb had better results without this condition."""
    max_word_characters: PositiveLength = 1000
    """A line with a longer word does not count."""
    curly_brackets: bool = False
    """Whether documents may contain a curly bracket, which the paper takes for code."""
    bad_words: tuple[str, ...] = ()
    """Words and phrases that drop a document, in upper or lower case."""
    bad_words_path: DiskPath | None = None
    """A text file with such words, one per line."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        lines = _LineVerdicts(self, facts)
        lorem, curly = lines.first_in_each(lines.lorem), lines.first_in_each(lines.curly)
        yield RuleFinding("c4.lorem_ipsum", (lorem > 0) & ((curly == 0) | (lorem <= curly)), lorem.astype(np.float64))
        yield RuleFinding("c4.curly_bracket", curly > 0, curly.astype(np.float64))
        yield below("c4.too_few_sentences", sums(lines.sentences, lines.spans), self.min_sentences)
        if self.min_kept_lines:
            kept = sums(lines.sentences > 0, lines.spans)
            yield below("c4.few_kept_lines", shares(kept, sums(lines.written, lines.spans)), self.min_kept_lines)
        if self.bad_words or self.bad_words_path is not None:
            yield above("c4.bad_words", self._bad_words(facts, live), 0)

    def _bad_words(self, facts: BatchFeatures, live: Flags) -> Positions:
        entries, counts = wordlist(self.bad_words, self.bad_words_path), np.zeros(len(facts), np.int64)
        for index in np.flatnonzero(live).tolist():
            counts[index] = len(entries.find(facts.texts[index]))
        return counts


class _LineVerdicts:
    """What becomes of each line of a batch under the paper's rules for lines."""

    def __init__(self, rule: C4, facts: BatchFeatures) -> None:
        self.rule, self.facts = rule, facts
        self.spans = facts.broken
        self.first, self.after = facts.words_in(self.spans)
        self.written = self.first < self.after
        kept = self._whole()
        self.lorem = kept & self._with(b"lorem ipsum")
        kept &= ~(self.lorem | self._with(b"javascript"))
        brackets = facts.lines_with(self.spans, facts.places("{"))
        self.curly = kept & brackets if not rule.curly_brackets else np.zeros_like(kept)
        kept &= ~self.curly
        for sign in POLICY_SIGNS:
            kept &= ~facts.lines_with(self.spans, facts.find_any(POLICY, sign))
        self.sentences = np.where(kept, self._sentences(), 0)
        for number in np.flatnonzero(self.written & facts.lines_with(self.spans, self._citations())).tolist():
            self._look_again(number)

    def first_in_each(self, lines: Flags) -> Positions:
        """The number of the first such line in each document, counted from 1; 0 where there is none."""
        chosen = np.append(np.flatnonzero(lines), len(lines))
        first = chosen[np.searchsorted(chosen, self.spans.first)]
        return np.where(first < self.spans.last, first - self.spans.first + 1, 0)

    def _with(self, phrase: bytes) -> Flags:
        return self.facts.lines_with(self.spans, self.facts.find(phrase))

    def _whole(self) -> Flags:
        """Lines of enough words, none too long, that end as sentences do."""
        facts, words = self.facts, self.facts.words
        kept = np.asarray(self.after - self.first >= max(1, self.rule.min_line_words))
        long = np.flatnonzero(words.ends - words.starts > self.rule.max_word_characters)
        sizes = facts.characters(words.starts[long], words.ends[long])
        kept &= ~facts.lines_with(self.spans, words.starts[long[sizes > self.rule.max_word_characters]])
        if not self.rule.need_line_ends:
            return kept
        last = self.after[kept] - 1
        ends = words.ends[last]
        ended = ENDS_LINE[facts.last_bytes[last]]
        dots = ends - 3 >= words.starts[last]
        for back in (1, 2, 3):
            dots &= facts.raw[np.maximum(ends - back, 0)] == ord(".")
        kept[kept] = ended & ~dots
        return kept

    def _sentences(self) -> Positions:
        """How many sentences end in each line; its own end counts, whatever it is."""
        ended = _sentence_ends(self.facts)
        before = np.append(0, np.cumsum(ended))
        counts = np.asarray(before[self.after] - before[self.first])
        counts[self.written] += ~ended[self.after[self.written] - 1]
        return counts

    def _citations(self) -> Positions:
        """Opening brackets that may begin a citation mark."""
        brackets = self.facts.places("[")
        return np.asarray(brackets[CITES[self.facts.raw[brackets + 1]]])

    def _look_again(self, number: int) -> None:
        """Judge a line without its citation marks."""
        line = self.facts.data[self.spans.starts[number] : self.spans.ends[number]].decode().strip()
        words, cited = line.split(), CITATION.sub("", line)
        lowered = cited.lower()
        self.lorem[number] = self.curly[number] = False
        self.sentences[number] = 0
        if (
            (len(line) > self.rule.max_word_characters and max(map(len, words)) > self.rule.max_word_characters)
            or (self.rule.need_line_ends and (not cited.endswith(LINE_ENDS) or cited.endswith("...")))
            or len(words) < self.rule.min_line_words
        ):
            return
        self.lorem[number] = "lorem ipsum" in lowered
        if self.lorem[number] or "javascript" in lowered:
            return
        self.curly[number] = "{" in cited and not self.rule.curly_brackets
        if self.curly[number] or any(phrase in lowered for phrase in POLICY):
            return
        cited = cited.strip()
        ends_itself = not cited or SENTENCE_END.search(cited) is not None
        self.sentences[number] = len(SENTENCE_ENDS.findall(cited)) + (not ends_itself)


def _sentence_ends(facts: BatchFeatures) -> Flags:
    """Which words end a sentence: with one of its marks, and after that at most four closing ones."""
    starts, ends = facts.words.starts, facts.words.ends
    ended = ENDS_SENTENCE[facts.last_bytes]
    doubtful = np.flatnonzero(MAY_CLOSE[facts.last_bytes])
    ends = ends[doubtful]
    for _ in range(4):
        last = facts.last_characters(ends)
        closing = CLOSES[facts.raw[last]] | facts.begins(last, "”") | facts.begins(last, "’")
        closing &= last > starts[doubtful]
        doubtful, ends = doubtful[closing], last[closing]
        ended[doubtful] |= ENDS_SENTENCE[facts.raw[ends - 1]]
    return ended


class FineWeb(FilterBase):
    """
    Lists, menus and broken lines. Source: Penedo et al. 2024, The FineWeb Datasets, 3.6 (arXiv 2406.17557).

    Only lines with text count, including the white space around them. The paper gives 0.1 for characters in duplicate
    lines; the published corpus was made with 0.01, which is the default here.
    """

    kind: Literal["fineweb"] = "fineweb"
    min_lines_with_end: Share = 0.12
    """Minimum share of lines whose last character ends a sentence, in any script. A closing quote does not."""
    max_short_lines: Share = 0.67
    """Maximum share of lines that are short."""
    short_line_characters: PositiveLength = 30
    """Lines of at most this many characters are short."""
    max_duplicate_line_characters: Share = 0.01
    """Maximum share of characters in duplicate lines."""
    max_lines_per_word: Ratio = 0.3
    """Maximum ratio of lines to words."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        lines = facts.written
        yield RuleFinding("fineweb.no_lines", lines.counts == 0, np.zeros(len(facts)))
        ended = facts.bits[facts.last_characters(lines.ends)] & features.TERMINAL > 0
        yield below("fineweb.few_line_ends", shares(sums(ended, lines), lines.counts), self.min_lines_with_end)
        sizes = facts.characters(lines.starts, lines.ends)
        short = sums(sizes <= self.short_line_characters, lines)
        yield above("fineweb.short_lines", shares(short, lines.counts), self.max_short_lines)
        feeds = facts.lines.counts - 1
        repeated = sums(sizes * facts.repeated[facts.has_words], lines)
        yield above(
            "fineweb.duplicate_line_characters",
            shares(repeated, facts.sizes - feeds),
            self.max_duplicate_line_characters,
        )
        yield above("fineweb.lines_per_word", shares(feeds, facts.words.counts), self.max_lines_per_word)


LineHashes = NDArray[np.uint64]

ODD = np.uint64(GOLDEN)
LONG_WORD = 256
"""Bytes of a word that are hashed for all words at a time."""
MASKS = np.array([2 ** (8 * size) - 1 for size in range(9)], np.uint64)
"""What keeps the first 0, 1, … 8 bytes of a number that was read from text."""

NgramShares = Annotated[tuple[Share, ...], Field(max_length=32)]


class Repetition(FilterBase):
    """
    Text that repeats itself. Source: Rae et al. 2021, table A1.

    Shares are of all characters of the document, including white space, as in common reference code. A repeated n-gram
    does not count if it overlaps one already found.
    """

    kind: Literal["repetition"] = "repetition"
    max_duplicate_lines: Share = 0.3
    """Maximum share of lines that are duplicates."""
    max_duplicate_line_characters: Share = 0.2
    """Maximum share of characters in duplicate lines."""
    max_duplicate_paragraphs: Share = 0.3
    """Maximum share of paragraphs that are duplicates."""
    max_duplicate_paragraph_characters: Share = 0.2
    """Maximum share of characters in duplicate paragraphs."""
    max_top_ngrams: NgramShares = (0.20, 0.18, 0.16)
    """Maximum share of characters in the most frequent 2-gram, 3-gram, … of words."""
    min_top_count: PositiveLength = 2
    """How often a phrase must occur to count as frequent."""
    max_duplicate_ngrams: NgramShares = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
    """Maximum share of characters in repetitions of an earlier 5-gram, 6-gram, … of words."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        count, share = _paragraphs(facts)
        yield above("repetition.duplicate_paragraphs", count, self.max_duplicate_paragraphs)
        yield above("repetition.duplicate_paragraph_characters", share, self.max_duplicate_paragraph_characters)
        count, share = _lines(facts)
        yield above("repetition.duplicate_lines", count, self.max_duplicate_lines)
        yield above("repetition.duplicate_line_characters", share, self.max_duplicate_line_characters)
        longest = max(len(self.max_top_ngrams) + 1, len(self.max_duplicate_ngrams) + 4)
        for repeats in _repeats(facts, live, longest):
            if repeats.n - 2 < len(self.max_top_ngrams):
                top = _top(facts, repeats, self.min_top_count)
                yield above(f"repetition.top_{repeats.n}gram", top, self.max_top_ngrams[repeats.n - 2])
            if 0 <= repeats.n - 5 < len(self.max_duplicate_ngrams):
                most = self.max_duplicate_ngrams[repeats.n - 5]
                duplicates = _duplicates(facts, repeats, live, most)
                yield above(f"repetition.duplicate_{repeats.n}grams", duplicates, most)


def _lines(facts: BatchFeatures) -> tuple[FeatureValues, FeatureValues]:
    """Shares of the lines that repeat an earlier one, by number and by characters."""
    longer = facts.lines.starts < facts.lines.ends
    filled, repeated = only(facts.lines, longer), facts.repeated[longer]
    characters = _characters_of(facts, filled, repeated)
    # a run of line feeds at the start or the end leaves an empty line there
    opens = (facts.raw[facts.starts] == NEWLINE) & (facts.starts < facts.ends)
    closes = (facts.raw[facts.ends - 1] == NEWLINE) & (facts.starts < facts.ends)
    number = filled.counts + opens + closes
    again = sums(repeated, filled) + (opens & closes)
    return shares(again, number), shares(characters, facts.sizes)


def _paragraphs(facts: BatchFeatures) -> tuple[FeatureValues, FeatureValues]:
    """Shares of the paragraphs, which two line feeds or more separate, that repeat an earlier one."""
    some = facts.words.counts > 0
    first = facts.words.starts[facts.words.first[some]]
    last = facts.words.ends[facts.words.last[some] - 1]
    feeds = np.flatnonzero((facts.raw[:-1] == NEWLINE) & (facts.raw[1:] == NEWLINE))
    gaps = feeds[np.diff(feeds, prepend=-2) != 1]
    owner = np.searchsorted(first, gaps, side="right") - 1
    inside = (owner >= 0) & (gaps < last[np.maximum(owner, 0)]) if len(first) else np.zeros(0, np.bool_)
    gaps = gaps[inside] if len(first) else gaps[:0]
    resumes = gaps + 2
    while len(further := np.flatnonzero(facts.raw[resumes] == NEWLINE)):
        resumes[further] += 1
    starts, ends = np.sort(np.append(first, resumes)), np.sort(np.append(gaps, last))
    bounds = Spans(starts, ends, np.searchsorted(starts, facts.starts), np.searchsorted(starts, facts.ends))
    repeated = facts.repeats(bounds)
    characters = _characters_of(facts, bounds, repeated)
    return shares(sums(repeated, bounds), bounds.counts), shares(characters, facts.sizes)


def _characters_of(facts: BatchFeatures, spans: Spans, chosen: Flags) -> Positions:
    sizes = np.zeros(len(spans.starts), np.int64)
    sizes[chosen] = facts.characters(spans.starts[chosen], spans.ends[chosen])
    return sums(sizes, spans)


class Repeats(NamedTuple):
    """The n-grams of words that come twice or more in their document."""

    n: int
    starts: Positions
    """The number of each one's first word, ascending."""
    documents: Positions
    """Whose it is."""
    keys: LineHashes
    """What it says, as a hash that also tells documents apart."""
    first: Positions
    """Of each n-gram that comes again, where in these arrays it comes for the first time."""
    counts: Positions
    """How often it comes."""


def _repeats(facts: BatchFeatures, live: Flags, longest: int) -> Iterator[Repeats]:
    """
    For n = 2, 3, … up to `longest`: what comes more than once.

    An n-gram that repeats begins with an (n-1)-gram that does, so each n looks only where the last one found something.
    """
    words, documents = _words_of(facts, live)
    hashes = _hashes(facts, words)
    # one place of its own for each word of the batch; the rest of a document's last words is never asked for
    everywhere: LineHashes = np.zeros(len(facts.words.starts) + longest, np.uint64)
    everywhere[words] = hashes
    starts, keys = words, hashes + splitmix64(documents.astype(np.uint64))
    for n in range(2, longest + 1):
        within = starts + n <= facts.words.last[documents]
        starts, documents, keys = starts[within], documents[within], keys[within]
        keys = splitmix64(keys * ODD + everywhere[starts + n - 1])
        twice, first, counts = _twice(keys)
        starts, documents, keys = starts[twice], documents[twice], keys[twice]
        yield Repeats(n, starts, documents, keys, first, counts)


def _words_of(facts: BatchFeatures, live: Flags) -> tuple[Positions, Positions]:
    """The numbers of the words of the documents that are still in, and whose they are."""
    owner = np.repeat(np.arange(len(facts)), facts.words.counts)
    chosen = np.flatnonzero(live[owner])
    return chosen, owner[chosen]


def _hashes(facts: BatchFeatures, words: Positions) -> LineHashes:
    """A 64-bit hash of each word; two different ones agree with p = 2**-64."""
    starts, ends = facts.words.starts[words], facts.words.ends[words]
    sizes = ends - starts
    padded = facts.data + bytes(8)
    eights: NDArray[Any] = np.ndarray((len(facts.data),), "<u8", padded, 0, (1,))
    keys: LineHashes = splitmix64(eights[starts] & MASKS[np.minimum(sizes, 8)]) + sizes.astype(np.uint64)
    longer = np.flatnonzero(sizes > 8)
    done = 8
    while len(longer) and done < LONG_WORD:
        piece = eights[starts[longer] + done] & MASKS[np.minimum(sizes[longer] - done, 8)]
        keys[longer] = splitmix64(keys[longer] * ODD + piece)
        done += 8
        longer = longer[sizes[longer] > done]
    for word in longer:  # so long that few fit into a batch
        rest = facts.data[starts[word] + done : ends[word]]
        digest = hashlib.blake2b(rest, digest_size=8).digest()
        keys[word] = splitmix64(keys[word : word + 1] + np.frombuffer(digest, np.uint64))[0]
    return keys


def _twice(keys: LineHashes) -> tuple[Positions, Positions, Positions]:
    """Where hashes stand that come more than once; among those, where each comes first; and how often it comes."""
    # most come once, and a table of their last bits finds those without sorting
    size = max(1024, 1 << (4 * len(keys)).bit_length())
    buckets = (keys & np.uint64(size - 1)).astype(np.int64)
    likely = np.flatnonzero(np.bincount(buckets, minlength=size)[buckets] > 1)
    order = likely[np.argsort(keys[likely])]
    ordered = keys[order]
    groups = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(order)])
    counts = np.diff(groups, append=len(order))
    again = np.repeat(counts > 1, counts)
    places = order[again]
    counts = counts[counts > 1]
    first = np.minimum.reduceat(places, np.cumsum(counts) - counts) if len(counts) else places
    twice = np.sort(places)
    return twice, np.searchsorted(twice, first), counts


def _top(facts: BatchFeatures, repeats: Repeats, least: int) -> FeatureValues:
    """Share of each document's characters in its most frequent n-gram, with single spaces; the first of several."""
    words, n = facts.words, repeats.n
    starts, documents, counts = repeats.starts[repeats.first], repeats.documents[repeats.first], repeats.counts
    if least == 1:  # where none comes twice, the first one stands for all
        once = np.flatnonzero((words.counts >= n) & ~np.isin(np.arange(len(facts)), documents))
        starts, documents = np.append(starts, words.first[once]), np.append(documents, once)
        counts = np.append(counts, np.ones(len(once), np.int64))
    order = np.lexsort((starts, -counts, documents))
    order = order[np.diff(documents[order], prepend=-1) > 0]
    order = order[counts[order] >= least]
    characters = np.full(len(order), n - 1)
    for offset in range(n):
        word = starts[order] + offset
        characters += facts.characters(words.starts[word], words.ends[word])
    top_shares = np.zeros(len(facts))
    top_shares[documents[order]] = characters * counts[order] / np.maximum(facts.sizes[documents[order]], 1)
    return top_shares


def _duplicates(facts: BatchFeatures, repeats: Repeats, live: Flags, most: float) -> FeatureValues:
    """
    Share of each document's characters that lie in repeats of an earlier n-gram, without white space.

    It is exact where it is above `most`; elsewhere it may be 0.
    """
    duplicate_shares = np.zeros(len(facts))
    covered = _covered_bytes(facts, repeats)
    for index in np.flatnonzero(live & (covered > most * facts.sizes)).tolist():
        low, high = np.searchsorted(repeats.documents, (index, index + 1))
        span = slice(facts.words.first[index], facts.words.last[index])
        sizes = facts.characters(facts.words.starts[span], facts.words.ends[span])
        before = np.append(0, np.cumsum(sizes)).tolist()
        seen: set[int] = set()
        characters = free = 0
        numbers = (repeats.starts[low:high] - facts.words.first[index]).tolist()
        for start, key in zip(numbers, repeats.keys[low:high].tolist(), strict=True):
            if start < free:
                continue
            if key in seen:
                free = start + repeats.n
                characters += before[free] - before[start]
            else:
                seen.add(key)
        duplicate_shares[index] = characters / facts.sizes[index]
    return duplicate_shares


def _covered_bytes(facts: BatchFeatures, repeats: Repeats) -> Positions:
    """Bytes of words that lie in any repeat of an earlier n-gram: no fewer than the characters that will count."""
    later: Flags = np.ones(len(repeats.keys), np.bool_)
    later[repeats.first] = False
    starts, documents = repeats.starts[later], repeats.documents[later]
    ends = starts + repeats.n
    fresh = np.maximum(starts, np.append(0, ends[:-1]))
    bytes_before = facts.word_bytes_before
    covered = np.append(0, np.cumsum(bytes_before[ends] - bytes_before[fresh]))
    before, after = (np.searchsorted(documents, np.arange(len(facts)) + step) for step in (0, 1))
    return np.asarray(covered[after] - covered[before])
