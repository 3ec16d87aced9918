"""
What filters share: text features of a whole batch of documents, domains, results, word lists, and the preset filter.

Each feature is computed once, for all documents of a batch at a time.

A table gives the properties of each Unicode character as bits of one byte. The same bits are computed for all
characters of a batch.

Features and the character table share one file because every feature is counted from these bits.

A recipe gives a word list in itself, or names a text file with one word a line. The filter `preset` stands for the
filters of a known corpus, under the name of that corpus. A saved recipe spells these filters out.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from bloomery.core import io as core_io
from bloomery.core.config import Config
from bloomery.core.errors import DataError
from bloomery.core.extras import pa

SPACE = 1
"""White space, as `str.split` takes it; on every byte of the character."""
BREAK = 2
"""What `str.splitlines` ends a line at."""
LETTER = 4
ALNUM = 8
"""A letter, a digit or another number."""
SOLID = 16
"""Not white space, and more than a mark: a word without any of these is a symbol."""
INNER = 32
"""A byte of a character that is not its first."""
TERMINAL = 64
"""A mark that ends a sentence in one of the world's scripts."""
CONTROL = 128
"""
A control character other than tab and the line breaks, or U+FFFD, which stands for bytes that were no text. With it,
all eight bits are taken.
"""

# Unicode's property Sentence_Terminal, with three marks of Khmer, without the newest scripts.
TERMINALS = (
    "21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736 17D4-17D6 "
    "17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F 203C-203D 2047-2049 "
    "2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB "
    "FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048 110BE-110C1 11141-11143 "
    "111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 "
    "1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 16B37-16B38 "
    "16B44 16E98 1BC9F 1DA88"
)
# The marks that CCNet (Wenzek et al. 2019, arXiv 1911.00359) takes out of text, and control characters.
MARKS = (
    "0-8 B-1F 22-2D 2F 3A-3E 40 5B-60 7B-9F AB B4 BB 2013-2014 2019 201C-201E 2026 2236 2501 25BA 3001 3008-300D "
    "3010-3011 FF05 FF08-FF09 FF0C FF11 FF1A-FF1B FF5E"
)
BREAKS = "A-D 1C-1E 85 2028-2029"
CONTROLS = "0-8 E-1B 1F 7F-84 86-9F FFFD"

Bits = NDArray[np.uint8]
Positions = NDArray[np.int64]


@cache
def of_every_code_point() -> Bits:
    """1,114,112 bytes: the bits of each code point. Letters and numbers as this Python's Unicode knows them."""
    table: Bits = np.zeros(0x110000, np.uint8)
    code_points = np.arange(1, len(table), dtype=np.uint32).view("<U1")
    letters, spaces = np.char.isalpha(code_points), np.char.isspace(code_points)
    numbers = np.char.isalnum(code_points)
    table[1:] = letters * np.uint8(LETTER) | numbers * np.uint8(ALNUM) | spaces * np.uint8(SPACE)
    table[_code_points(BREAKS)] |= BREAK
    table[_code_points(TERMINALS)] |= TERMINAL
    table[_code_points(CONTROLS)] |= CONTROL
    solid: NDArray[np.bool_] = (table & (SPACE | TERMINAL)) == 0
    solid[_code_points(MARKS)] = False
    table |= solid * np.uint8(SOLID)
    return table


def _code_points(ranges: str) -> Positions:
    pairs = [piece.partition("-") for piece in ranges.split()]
    return np.concatenate([np.arange(int(low, 16), int(high or low, 16) + 1) for low, _, high in pairs])


@cache
def _of_every_byte() -> bytes:
    """Of ASCII what it is; of further bytes that they are inner, or nothing for those that begin a character."""
    table: Bits = np.zeros(256, np.uint8)
    table[:0x80] = of_every_code_point()[:0x80]
    table[0x80:0xC0] = INNER
    return table.tobytes()


def of_text(data: bytes) -> tuple[Bits, Positions, NDArray[np.uint32]]:
    """
    The bits of every byte of UTF-8 text; where its characters of more than one byte begin; and their code points.

    All bits of a character stand on its first byte, and SPACE on the others too.
    """
    bits: Bits = np.frombuffer(bytearray(data.translate(_of_every_byte())), np.uint8)
    raw = np.frombuffer(data, np.uint8)
    leads: Positions = np.flatnonzero(raw >= 0xC0)
    if not len(leads):
        return bits, leads, np.zeros(0, np.uint32)
    first = raw[leads].astype(np.uint32)
    second = raw[leads + 1].astype(np.uint32) & 0x3F
    code_points = np.asarray((first & 0x1F) << np.uint32(6) | second, np.uint32)
    for more, offset in ((first >= 0xE0, 2), (first >= 0xF0, 3)):
        longer = np.flatnonzero(more)
        following = raw[leads[longer] + offset].astype(np.uint32) & 0x3F
        code_points[longer] = code_points[longer] << np.uint32(6) | following
    code_points &= np.uint32(0x1FFFFF)  # a first byte of four has one bit of its mark among those taken
    bits[leads] = lead_bits = of_every_code_point()[code_points]
    for offset in (1, 2):
        blanks = leads[(lead_bits & SPACE > 0) & (first >= (0xC0, 0xE0)[offset - 1])]
        bits[blanks + offset] |= SPACE
    return bits, leads, code_points


Flags = NDArray[np.bool_]
FeatureValues = NDArray[np.float64]
NEWLINE = 10
RARE = 500
"""Bytes for each occurrence from where on it is quicker to search for the next than to look at every byte."""


class Spans(NamedTuple):
    """Pieces of the batch's text, in order: where each begins and ends, and which of them are each document's."""

    starts: Positions
    ends: Positions
    first: Positions
    """The first piece of each document."""
    last: Positions
    """One past the last piece of each document."""

    @property
    def counts(self) -> Positions:
        return self.last - self.first


class BatchFeatures:
    """
    A batch of texts and where they come from.

    The texts lie one after the other as UTF-8, with a line feed before, between and after them. So no word and no line
    reaches from one into the next. Offsets are bytes; lengths that rules compare are characters.
    """

    def __init__(self, texts: Sequence[str], addresses: Sequence[str | None], names: Sequence[str]) -> None:
        """`addresses`: where on the web each text is from, if it is; `names`: their ids, which may end as files do."""
        self.texts, self.addresses, self.names = texts, addresses, names
        pieces = [text.encode() for text in texts]
        self.data = b"\n".join([b"", *pieces, b"", b""])
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        self.ends: Positions = np.cumsum(sizes + 1)
        self.starts: Positions = self.ends - sizes

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def raw(self) -> Bits:
        return np.frombuffer(self.data, np.uint8)

    @cached_property
    def _read(self) -> tuple[Bits, Positions, NDArray[np.uint32]]:
        return of_text(self.data)

    @cached_property
    def bits(self) -> Bits:
        """What every byte is: the bits at the top of this file."""
        return self._read[0]

    @property
    def leads(self) -> Positions:
        """Where the characters outside ASCII begin."""
        return self._read[1]

    @cached_property
    def _inner(self) -> Positions:
        return np.flatnonzero((self.bits & INNER) > 0)

    def characters(self, starts: Positions, ends: Positions) -> Positions:
        if not len(self._inner):
            return ends - starts
        inner = np.searchsorted(self._inner, ends) - np.searchsorted(self._inner, starts)
        return np.asarray(ends - starts - inner)

    @cached_property
    def sizes(self) -> Positions:
        return self.characters(self.starts, self.ends)

    def each(self, places: Positions) -> Positions:
        """How many of these ascending positions lie in each document."""
        return np.asarray(np.searchsorted(places, self.ends) - np.searchsorted(places, self.starts))

    def count(self, bit: int) -> Positions:
        """How many characters of each document have one of the bits at the top of this file."""
        having = (self.bits & bit) > 0
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return np.fromiter((np.count_nonzero(having[start:end]) for start, end in spans), np.int64, len(self))

    def places(self, character: str) -> Positions:
        if character.isascii():
            byte = character.encode()
            rare = self.data.count(byte) * RARE < len(self.data)
            return _finds(self.data, byte) if rare else np.flatnonzero(self.raw == ord(character))
        _, leads, code_points = self._read
        return np.asarray(leads[code_points == ord(character)])

    @cached_property
    def lowered(self) -> bytes:
        """The text with the letters A to Z lowered."""
        return self.data.lower()

    def find(self, phrase: bytes) -> Positions:
        """Where a phrase begins, whatever its case in ASCII."""
        return _finds(self.lowered, phrase)

    def find_any(self, phrases: Iterable[str], sign: str) -> Positions:
        """Where `sign` is part of one of those phrases that have it, whatever the case in ASCII."""
        having = [(phrase.encode(), phrase.encode().find(sign.encode())) for phrase in phrases if sign in phrase]
        places = _finds(self.lowered, sign.encode()).tolist()
        within = (
            any(self.lowered.startswith(phrase, position - offset) for phrase, offset in having if position >= offset)
            for position in places
        )
        return np.array([place for place, found in zip(places, within, strict=True) if found], np.int64)

    @cached_property
    def words(self) -> Spans:
        """The words of all texts, which white space separates."""
        blank = self.bits & SPACE
        edges = np.flatnonzero(blank[1:] != blank[:-1]) + 1
        starts, ends = edges[0::2], edges[1::2]
        return Spans(starts, ends, np.searchsorted(starts, self.starts), np.searchsorted(starts, self.ends))

    @cached_property
    def word_bytes_before(self) -> Positions:
        """Bytes of all words before each, and of all."""
        return np.append(0, np.cumsum(self.words.ends - self.words.starts))

    @cached_property
    def word_sizes(self) -> Positions:
        """Characters of each document that are not white space."""
        inner = self._inner[self.bits[self._inner] & SPACE == 0]
        before = self.word_bytes_before
        return np.asarray(before[self.words.last] - before[self.words.first] - self.each(inner))

    @cached_property
    def last_bytes(self) -> Bits:
        """The last byte of each word."""
        return self.raw[self.words.ends - 1]

    @cached_property
    def _doubtful(self) -> tuple[Positions, Bits]:
        """The words that do not begin with a letter, and all bits of their characters: only they are looked through."""
        usual = LETTER | SOLID
        doubtful = np.flatnonzero((self.bits[self.words.starts] & usual) != usual)
        return doubtful, self._bits_of(self.words.starts[doubtful], self.words.ends[doubtful])

    def words_without(self, bit: int) -> Positions:
        """Which words have no character with this bit, LETTER or SOLID."""
        words, bits = self._doubtful
        return np.asarray(words[(bits & bit) == 0])

    def each_word(self, words: Positions) -> Positions:
        """How many of the words, given by ascending number, belong to each document."""
        return np.asarray(np.searchsorted(words, self.words.last) - np.searchsorted(words, self.words.first))

    def last_characters(self, ends: Positions) -> Positions:
        """Where the last character of each span begins that ends at `ends`."""
        last = ends - 1
        while len(longer := np.flatnonzero(self.bits[last] & INNER)):
            last[longer] -= 1
        return last

    @cached_property
    def lines(self) -> Spans:
        """What line feeds separate, as `text.split("\\n")` gives it."""
        feeds = np.flatnonzero(self.raw[:-1] == NEWLINE)
        starts, ends = feeds[:-1] + 1, feeds[1:]
        first = np.searchsorted(starts, self.starts)
        return Spans(starts, ends, first, np.append(first[1:], len(starts)))

    @cached_property
    def written(self) -> Spans:
        """Those lines that hold more than white space."""
        return only(self.lines, self.has_words)

    @cached_property
    def has_words(self) -> Flags:
        """Which of `lines` hold more than white space."""
        first, last = self.words_in(self.lines)
        return np.asarray(first < last)

    @cached_property
    def repeated(self) -> Flags:
        """Which of `lines` say what an earlier one of their document does; empty ones do too."""
        return self.repeats(self.lines)

    @cached_property
    def broken(self) -> Spans:
        """Lines as `text.splitlines()` gives them; where one ends in \\r\\n, the \\r is left on it."""
        breaks = np.flatnonzero((self.bits[:-1] & BREAK) > 0)
        returns = (self.raw[breaks] == 13) & (self.raw[breaks + 1] == NEWLINE)
        breaks = breaks[~returns]
        width = np.where(self.raw[breaks] < 0x80, 1, np.where(self.raw[breaks] < 0xE0, 2, 3))
        starts, ends = (breaks + width)[:-1], breaks[1:]
        first = np.searchsorted(starts, self.starts)
        lines = Spans(starts, ends, first, np.append(first[1:], len(starts)))
        last = lines.last[lines.counts > 0] - 1
        whole: Flags = np.ones(len(starts), np.bool_)
        whole[last] = starts[last] < ends[last]
        return only(lines, whole)

    def words_in(self, lines: Spans) -> tuple[Positions, Positions]:
        """The number of the first word of each line, and one past the last."""
        starts = self.words.starts
        return np.searchsorted(starts, lines.starts), np.searchsorted(starts, lines.ends)

    def stripped(self, lines: Spans) -> tuple[Positions, Positions]:
        """Where lines that all hold words begin and end without the white space around them."""
        first, after = self.words_in(lines)
        return self.words.starts[first], self.words.ends[after - 1]

    def lines_with(self, lines: Spans, places: Positions) -> Flags:
        flags: Flags = np.zeros(len(lines.starts), np.bool_)
        line = np.searchsorted(lines.starts, places, side="right") - 1
        inside = line >= 0
        inside[inside] = places[inside] < lines.ends[line[inside]]
        flags[line[inside]] = True
        return flags

    def begins(self, places: Positions, mark: str) -> Flags:
        """Whether a mark of at most three bytes stands at each position. No position may lie beyond the texts."""
        flags: Flags = np.ones(len(places), np.bool_)
        for step, byte in enumerate(mark.encode()):
            flags &= self.raw[places + step] == byte
        return flags

    def spans_without(self, bit: int, starts: Positions, ends: Positions) -> Flags:
        """Which spans, none of them empty, have no character with this bit."""
        return np.asarray((self._bits_of(starts, ends) & bit) == 0)

    def _bits_of(self, starts: Positions, ends: Positions) -> Bits:
        """The bits of all characters of each span together."""
        if not len(starts):
            return np.zeros(0, np.uint8)
        edges = np.column_stack((starts, ends)).ravel()
        return np.asarray(np.bitwise_or.reduceat(self.bits, edges)[::2])

    def words_at(self, places: Positions) -> Positions:
        """The numbers of the words that begin at one of these ascending positions."""
        starts = self.words.starts
        near = np.searchsorted(starts, places)
        near, places = near[near < len(starts)], places[near < len(starts)]
        return np.asarray(near[starts[near] == places])

    def repeats(self, spans: Spans) -> Flags:
        """Whether each piece says what an earlier one of its document does."""
        repeated: Flags = np.zeros(len(spans.starts), np.bool_)
        if len(spans.starts) < 2:
            return repeated
        bounds = np.column_stack((spans.starts, spans.ends)).ravel()
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(self.data)]
        pieces = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)
        codes = pieces.dictionary_encode().indices.to_numpy()[::2].astype(np.int64)
        document = np.repeat(np.arange(len(self)), spans.counts)
        _, first = np.unique(document * len(bounds) + codes, return_index=True)
        repeated[:] = True
        repeated[first] = False
        return repeated


def _finds(data: bytes, phrase: bytes) -> Positions:
    positions, spot = [], data.find(phrase)
    while spot >= 0:
        positions.append(spot)
        spot = data.find(phrase, spot + 1)
    return np.array(positions, np.int64)


def only(spans: Spans, selected: Flags) -> Spans:
    """Those pieces alone."""
    before = np.append(0, np.cumsum(selected))
    return Spans(spans.starts[selected], spans.ends[selected], before[spans.first], before[spans.last])


def one_of(marks: bytes) -> Flags:
    """Of each of the 256 bytes whether it is one of these."""
    table: Flags = np.zeros(256, np.bool_)
    table[list(marks)] = True
    return table


def sums(values: NDArray[np.int64] | Flags, spans: Spans) -> Positions:
    """Of one value for each piece, the sum for each document."""
    before = np.append(0, np.cumsum(values, dtype=np.int64))
    return np.asarray(before[spans.last] - before[spans.first])


def shares(counts: NDArray[np.int64], whole: NDArray[np.int64]) -> FeatureValues:
    """part / whole, and 0 where there is nothing to share."""
    return np.asarray(counts / np.maximum(whole, 1))


class FilterBase(Config):
    domains: tuple[str, ...] | None = None
    """Domains that the rule applies to. None: all."""

    @model_validator(mode="after")
    def _something_passes(self) -> Self:
        for name in type(self).model_fields:
            most_name = name.replace("min_", "max_", 1)
            least, most = getattr(self, name), getattr(self, most_name, None)
            if most_name != name and most is not None and least > most:
                raise ValueError(f"no document meets both: {name} = {least} is above {most_name} = {most}")
        return self


class RuleFinding(NamedTuple):
    """What one question of a rule found in each document of a batch."""

    reason: str
    """A stable name like `gopher.too_few_words`, which dropped documents carry."""
    broken: Flags
    """Which documents it drops."""
    values: FeatureValues
    """What it saw of each document."""


@runtime_checkable
class Drops(Protocol):
    """A rule that drops documents."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[RuleFinding]:
        """
        The rule's questions in order; the first that drops a document is its reason.

        `live` are the documents that nothing has dropped so far; what is found of the others does not matter, so costly
        questions leave them out. It is brought up to date between two questions.
        """
        ...


def above(reason: str, values: NDArray[np.float64] | NDArray[np.int64], most: float | int) -> RuleFinding:
    """Drops what is over a limit."""
    return RuleFinding(reason, np.asarray(values > most), values.astype(np.float64))


def below(reason: str, values: NDArray[np.float64] | NDArray[np.int64], least: float | int) -> RuleFinding:
    """Drops what is under a limit."""
    return RuleFinding(reason, np.asarray(values < least), values.astype(np.float64))


@runtime_checkable
class Masks(Protocol):
    """A rule that replaces parts of a text."""

    def masked(self, facts: BatchFeatures, asked: Flags) -> dict[int, tuple[str, Counter[str]]]:
        """For each document of those asked whose text changes: the new text, and how many of each kind were in it."""
        ...


WORD = re.compile(r"\w+")


def lines_of(path: Path) -> list[str]:
    """The lines of a text file, lowered, without blank ones and those that begin with #. Raises DataError."""
    try:
        core_io.check_regular(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot be read: {error}", where=str(path), hint="Use a UTF-8 text file with one entry a line."
        ) from None
    stripped = (line.strip().lower() for line in text.split("\n"))
    return [line for line in stripped if line and not line.startswith("#")]


class Wordlist:
    """Finds words and phrases in texts: whole words only, in any case."""

    def __init__(self, entries: Iterable[str]) -> None:
        lowered = {entry.lower() for entry in entries}
        self.words = frozenset(entry for entry in lowered if WORD.fullmatch(entry))
        self.phrases = {
            entry: re.compile(rf"(?<!\w){re.escape(entry)}(?!\w)") for entry in sorted(lowered - self.words)
        }

    def find(self, text: str) -> set[str]:
        """Those entries that a text has."""
        lowered = text.lower()
        return set(self.words.intersection(WORD.findall(lowered))) | set(self._phrases(lowered))

    def _phrases(self, lowered: str) -> Iterator[str]:
        for entry, pattern in self.phrases.items():
            if entry in lowered and pattern.search(lowered):
                yield entry


Made = TypeVar("Made")


def of_list(make: Callable[[Sequence[str]], Made]) -> Callable[[tuple[str, ...], Path | None], Made]:
    """
    What `make` makes of a rule's list: the entries of the recipe, and the lines of the file that it names. It is kept
    until the file changes.
    """

    @cache
    def kept(entries: tuple[str, ...], path: Path | None, version: tuple[int, ...]) -> Made:
        return make([*entries, *(lines_of(path) if path is not None else ())])

    return lambda entries, path: kept(entries, path, _stamp(path))


wordlist = of_list(Wordlist)


def _stamp(path: Path | None) -> tuple[int, ...]:
    """What changes with a file, as a part of the key of a cache: its number, size and time. () without a file."""
    try:
        state = path.stat() if path is not None else None
    except OSError:  # who reads the file says why it cannot be read
        return ()
    return () if state is None else (state.st_ino, state.st_size, state.st_mtime_ns)


class RulePreset(FilterBase):
    """
    The rules of a known corpus, which `bloomery.data.filters.apply` lists.

    Loading a recipe replaces this rule by those rules, for the same domains.
    """

    kind: Literal["preset"] = "preset"
    name: Literal["gopher", "c4", "fineweb", "fineweb-edu-like", "starcoder", "seed-1386", "seed-1386-ascii"]
    """Name of the preset."""
