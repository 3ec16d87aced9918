"""What each character of Unicode is to a rule, as bits of one byte, and the same for all characters of a batch."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

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
"""A control character other than tab and the line breaks, or U+FFFD, which stands for bytes that were no text."""

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
    for more, place in ((first >= 0xE0, 2), (first >= 0xF0, 3)):
        longer = np.flatnonzero(more)
        following = raw[leads[longer] + place].astype(np.uint32) & 0x3F
        code_points[longer] = code_points[longer] << np.uint32(6) | following
    code_points &= np.uint32(0x1FFFFF)  # a first byte of four has one bit of its mark among those taken
    bits[leads] = found = of_every_code_point()[code_points]
    for place in (1, 2):
        blanks = leads[(found & SPACE > 0) & (first >= (0xC0, 0xE0)[place - 1])]
        bits[blanks + place] |= SPACE
    return bits, leads, code_points
