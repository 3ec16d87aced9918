"""Rule `repetition`: text that repeats its lines, its paragraphs or its phrases."""

import hashlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bloomery.core.bounds import PositiveLength, Share
from bloomery.data.facts.alphabet import Positions
from bloomery.data.facts.batch import NEWLINE, Facts, Flags, Spans, Values, only, shares, sums
from bloomery.data.facts.verdict import Common, Finding, above

Hashes = NDArray[np.uint64]

ODD = np.uint64(0x9E3779B97F4A7C15)
LONG_WORD = 256
"""Bytes of a word that are hashed for all words at a time."""
MASKS = np.array([2 ** (8 * size) - 1 for size in range(9)], np.uint64)
"""What keeps the first 0, 1, … 8 bytes of a number that was read from text."""

NgramShares = Annotated[tuple[Share, ...], Field(max_length=32)]


class Repetition(Common):
    """
    Text that repeats itself. Source: Rae et al. 2021, table A1.

    Shares are of all the document's characters, white space too, as the field's reference code takes them. Of n-grams
    that repeat an earlier one, those that overlap one already found are passed over.
    """

    kind: Literal["repetition"] = "repetition"
    max_duplicate_lines: Share = 0.3
    max_duplicate_line_characters: Share = 0.2
    max_duplicate_paragraphs: Share = 0.3
    max_duplicate_paragraph_characters: Share = 0.2
    max_top_ngrams: NgramShares = (0.20, 0.18, 0.16)
    """Largest share of characters in the most frequent 2-gram, 3-gram, … of words."""
    min_top_count: PositiveLength = 2
    """How often a phrase has to come before it counts as frequent; once is no repetition."""
    max_duplicate_ngrams: NgramShares = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
    """Largest share of characters in repeats of an earlier 5-gram, 6-gram, … of words."""

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
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
                found = _duplicates(facts, repeats, live, most)
                yield above(f"repetition.duplicate_{repeats.n}grams", found, most)


def _lines(facts: Facts) -> tuple[Values, Values]:
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


def _paragraphs(facts: Facts) -> tuple[Values, Values]:
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


def _characters_of(facts: Facts, spans: Spans, chosen: Flags) -> Positions:
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
    keys: Hashes
    """What it says, as a hash that also tells documents apart."""
    first: Positions
    """Of each n-gram that comes again, where in these arrays it comes for the first time."""
    counts: Positions
    """How often it comes."""


def _repeats(facts: Facts, live: Flags, longest: int) -> Iterator[Repeats]:
    """
    For n = 2, 3, … up to `longest`: what comes more than once.

    An n-gram that repeats begins with an (n-1)-gram that does, so each n looks only where the last one found something.
    """
    words, documents = _words_of(facts, live)
    hashes = _hashes(facts, words)
    # one place of its own for each word of the batch; the rest of a document's last words is never asked for
    everywhere: Hashes = np.zeros(len(facts.words.starts) + longest, np.uint64)
    everywhere[words] = hashes
    starts, keys = words, hashes + _mixed(documents.astype(np.uint64))
    for n in range(2, longest + 1):
        within = starts + n <= facts.words.last[documents]
        starts, documents, keys = starts[within], documents[within], keys[within]
        keys = _mixed(keys * ODD + everywhere[starts + n - 1])
        twice, first, counts = _twice(keys)
        starts, documents, keys = starts[twice], documents[twice], keys[twice]
        yield Repeats(n, starts, documents, keys, first, counts)


def _words_of(facts: Facts, live: Flags) -> tuple[Positions, Positions]:
    """The numbers of the words of the documents that are still in, and whose they are."""
    owner = np.repeat(np.arange(len(facts)), facts.words.counts)
    chosen = np.flatnonzero(live[owner])
    return chosen, owner[chosen]


def _mixed(keys: Hashes) -> Hashes:
    """Each bit in, half of the bits out (Stafford's variant 13 of MurmurHash3's finalizer)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(keys ^ (keys >> np.uint64(31)))


def _hashes(facts: Facts, words: Positions) -> Hashes:
    """A 64-bit hash of each word; two different ones agree with p = 2**-64."""
    starts, ends = facts.words.starts[words], facts.words.ends[words]
    sizes = ends - starts
    padded = facts.data + bytes(8)
    eights: NDArray[Any] = np.ndarray((len(facts.data),), "<u8", padded, 0, (1,))
    keys = _mixed(eights[starts] & MASKS[np.minimum(sizes, 8)]) + sizes.astype(np.uint64)
    longer = np.flatnonzero(sizes > 8)
    done = 8
    while len(longer) and done < LONG_WORD:
        piece = eights[starts[longer] + done] & MASKS[np.minimum(sizes[longer] - done, 8)]
        keys[longer] = _mixed(keys[longer] * ODD + piece)
        done += 8
        longer = longer[sizes[longer] > done]
    for word in longer:  # so long that few fit into a batch
        rest = facts.data[starts[word] + done : ends[word]]
        digest = hashlib.blake2b(rest, digest_size=8).digest()
        keys[word] = _mixed(keys[word : word + 1] + np.frombuffer(digest, np.uint64))[0]
    return keys


def _twice(keys: Hashes) -> tuple[Positions, Positions, Positions]:
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


def _top(facts: Facts, repeats: Repeats, least: int) -> Values:
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
    for place in range(n):
        word = starts[order] + place
        characters += facts.characters(words.starts[word], words.ends[word])
    found = np.zeros(len(facts))
    found[documents[order]] = characters * counts[order] / np.maximum(facts.sizes[documents[order]], 1)
    return found


def _duplicates(facts: Facts, repeats: Repeats, live: Flags, most: float) -> Values:
    """
    Share of each document's characters that lie in repeats of an earlier n-gram, without white space.

    It is exact where it is above `most`; elsewhere it may be 0.
    """
    found = np.zeros(len(facts))
    covered = _covered_bytes(facts, repeats)
    for place in np.flatnonzero(live & (covered > most * facts.sizes)).tolist():
        low, high = np.searchsorted(repeats.documents, (place, place + 1))
        span = slice(facts.words.first[place], facts.words.last[place])
        sizes = facts.characters(facts.words.starts[span], facts.words.ends[span])
        before = np.append(0, np.cumsum(sizes)).tolist()
        seen: set[int] = set()
        characters = free = 0
        numbers = (repeats.starts[low:high] - facts.words.first[place]).tolist()
        for start, key in zip(numbers, repeats.keys[low:high].tolist(), strict=True):
            if start < free:
                continue
            if key in seen:
                free = start + repeats.n
                characters += before[free] - before[start]
            else:
                seen.add(key)
        found[place] = characters / facts.sizes[place]
    return found


def _covered_bytes(facts: Facts, repeats: Repeats) -> Positions:
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
