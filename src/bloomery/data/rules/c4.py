"""Rule `c4`: pages without sentences, with code or with dummy text."""

import re
from collections.abc import Iterator
from typing import Literal

import numpy as np

from bloomery.core.bounds import DiskPath, PositiveLength, Share, TextLength
from bloomery.data.facts.alphabet import Positions
from bloomery.data.facts.batch import Facts, Flags, one_of, shares, sums
from bloomery.data.facts.verdict import Common, Finding, above, below
from bloomery.data.facts.wordlist import wordlist

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


class C4(Common):
    """
    Pages without sentences, with code or with dummy text. Source: Raffel et al. 2020, 2.2 (arXiv 1910.10683).

    The paper deletes lines: those without an end mark or with one of "...", those of too few words or with a word too
    long, those that name JavaScript and those that speak of cookies, terms and policies. Documents stay whole here.
    Only the lines that the paper would keep count as sentences, and are looked at for what drops a page, as in the
    reference code. Citation marks like [1] are passed over.
    """

    kind: Literal["c4"] = "c4"
    min_sentences: TextLength = 5
    """In the lines that the paper would keep."""
    min_kept_lines: Share = 0.0
    """Least share of the lines with text that the paper would keep."""
    min_line_words: TextLength = 3
    need_line_ends: bool = True
    """Whether the lines that count have to end in a mark. FineWeb found it best that they need not."""
    max_word_characters: PositiveLength = 1000
    curly_brackets: bool = False
    """Whether documents may hold a curly bracket, which the paper takes for code."""
    bad_words: tuple[str, ...] = ()
    """Words and phrases that drop a document, in any case."""
    bad_words_path: DiskPath | None = None
    """A text file of such words, one a line."""

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        lines = _Lines(self, facts)
        lorem, curly = lines.first_in_each(lines.lorem), lines.first_in_each(lines.curly)
        yield Finding("c4.lorem_ipsum", (lorem > 0) & ((curly == 0) | (lorem <= curly)), lorem.astype(np.float64))
        yield Finding("c4.curly_bracket", curly > 0, curly.astype(np.float64))
        yield below("c4.too_few_sentences", sums(lines.sentences, lines.spans), self.min_sentences)
        if self.min_kept_lines:
            kept = sums(lines.sentences > 0, lines.spans)
            yield below("c4.few_kept_lines", shares(kept, sums(lines.written, lines.spans)), self.min_kept_lines)
        if self.bad_words or self.bad_words_path is not None:
            yield above("c4.bad_words", self._bad_words(facts, live), 0)

    def _bad_words(self, facts: Facts, live: Flags) -> Positions:
        entries, found = wordlist(self.bad_words, self.bad_words_path), np.zeros(len(facts), np.int64)
        for place in np.flatnonzero(live).tolist():
            found[place] = len(entries.found(facts.texts[place]))
        return found


class _Lines:
    """What becomes of each line of a batch under the paper's rules for lines."""

    def __init__(self, rule: C4, facts: Facts) -> None:
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
        found = np.asarray(before[self.after] - before[self.first])
        found[self.written] += ~ended[self.after[self.written] - 1]
        return found

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


def _sentence_ends(facts: Facts) -> Flags:
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
