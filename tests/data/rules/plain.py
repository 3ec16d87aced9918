"""The rules as one would write them for one document at a time: what the code on batches has to agree with."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bloomery.data.filters.features import CONTROLS, MARKS, TERMINALS
from bloomery.data.filters.heuristics import BULLETS, GENERATED, TEMPLATE, Boilerplate, Characters, Code, Length, Lines
from bloomery.data.filters.heuristics import ENDS as LINE_ENDS
from bloomery.data.filters.published import C4, POLICY, FineWeb, Gopher, Repetition

Found = tuple[str, float] | None


def listed(ranges: str) -> set[str]:
    pairs = [piece.split("-") for piece in ranges.split()]
    return {chr(code) for pair in pairs for code in range(int(pair[0], 16), int(pair[-1], 16) + 1)}


ENDS = tuple(listed(TERMINALS))
CONTROL = listed(CONTROLS)
NO_WORD = listed(MARKS) | listed(TERMINALS)


def verdict(rule: Any, text: str) -> Found:
    """The first question of a rule that drops the text, and the value."""
    questions: dict[Any, Any] = {Length: length, Gopher: gopher, Repetition: repetition, C4: c4, FineWeb: fineweb}
    questions |= {Code: code, Characters: characters, Lines: lines, Boilerplate: boilerplate}
    return next(((reason, float(value)) for reason, broken, value in questions[type(rule)](rule, text) if broken), None)


Questions = Iterator[tuple[str, bool, float]]


def length(rule: Length, text: str) -> Questions:
    yield "length.too_short", len(text) < rule.min_characters, len(text)
    yield "length.too_long", rule.max_characters is not None and len(text) > rule.max_characters, len(text)
    yield "length.too_few_words", len(text.split()) < rule.min_words, len(text.split())


def characters(rule: Characters, text: str) -> Questions:
    yield "characters.nul", not rule.nul and "\0" in text, text.count("\0")
    controls = sum(character in CONTROL for character in text) / max(1, len(text))
    yield "characters.controls", controls > rule.max_controls, controls
    solid = "".join(text.split())
    others = sum(not character.isalpha() for character in solid) / max(1, len(solid))
    yield "characters.non_letters", others > rule.max_non_letters, others
    in_ascii = sum(map(str.isascii, text)) / max(1, len(text))
    yield "characters.ascii", in_ascii < rule.min_ascii, in_ascii


def lines(rule: Lines, text: str) -> Questions:
    found = [line.strip() for line in text.split("\n") if line.strip()]
    number = max(1, len(found))
    for reason, broken, most in (
        ("bullets", [line.startswith(BULLETS) for line in found], rule.max_bullet_lines),
        ("ellipses", [line.endswith(("...", "…")) for line in found], rule.max_ellipsis_lines),
        ("short", [len(line) <= rule.short_line_characters for line in found], rule.max_short_lines),
        ("no_end", [not line.endswith(LINE_ENDS) for line in found], rule.max_lines_without_end),
        ("numbers", [not any(map(str.isalpha, line)) for line in found], rule.max_number_lines),
    ):
        yield f"lines.{reason}", sum(broken) / number > most, sum(broken) / number


def boilerplate(rule: Boilerplate, text: str) -> Questions:
    found = [line.lower() for line in text.split("\n") if line.strip()]
    share = sum(any(phrase in line for phrase in rule.phrases) for line in found) / max(1, len(found))
    yield "boilerplate.lines", share > rule.max_lines, share
    left = len(TEMPLATE.findall(text))
    yield "boilerplate.templates", left > rule.max_templates, left


def gopher(rule: Gopher, text: str) -> Questions:
    words = text.split()
    counted = [word for word in words if set(word) - NO_WORD]
    yield "gopher.too_few_words", len(counted) < rule.min_words or not words, len(counted)
    yield "gopher.too_many_words", len(counted) > rule.max_words, len(counted)
    mean = sum(map(len, counted)) / max(1, len(counted))
    yield "gopher.short_words", mean < rule.min_mean_word_characters, mean
    yield "gopher.long_words", mean > rule.max_mean_word_characters, mean
    for symbols in (text.count("#"), text.count("...") + text.count("…")):
        yield "gopher.symbols", symbols / len(words) > rule.max_symbols_per_word, symbols / len(words)
    lines = text.splitlines()
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)
    yield "gopher.bullet_lines", bullets > rule.max_bullet_lines, bullets
    ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
    yield "gopher.ellipsis_lines", ellipses > rule.max_ellipsis_lines, ellipses
    alphabetic = sum(any(map(str.isalpha, word)) for word in words) / len(words)
    yield "gopher.few_alphabetic_words", alphabetic < rule.min_alphabetic_words, alphabetic
    found = len(set(words) & set(rule.stop_words))
    yield "gopher.few_stop_words", found < rule.min_stop_words, found


def duplicates(pieces: list[str]) -> tuple[int, int]:
    """How many pieces repeat an earlier one, and their characters."""
    seen: set[str] = set()
    again = []
    for piece in pieces:
        if piece in seen:
            again.append(piece)
        seen.add(piece)
    return len(again), sum(map(len, again))


def repetition(rule: Repetition, text: str) -> Questions:
    whole = max(1, len(text))
    for name, pieces, most, most_characters in (
        (
            "paragraph",
            re.split("\n{2,}", text.strip()),
            rule.max_duplicate_paragraphs,
            rule.max_duplicate_paragraph_characters,
        ),
        ("line", re.split("\n+", text), rule.max_duplicate_lines, rule.max_duplicate_line_characters),
    ):
        number, size = duplicates(pieces)
        yield f"repetition.duplicate_{name}s", number / len(pieces) > most, number / len(pieces)
        yield f"repetition.duplicate_{name}_characters", size / whole > most_characters, size / whole
    words = text.split()
    for n in range(2, 40):
        if n - 2 < len(rule.max_top_ngrams):
            top = top_characters(words, n, rule.min_top_count) / whole
            yield f"repetition.top_{n}gram", top > rule.max_top_ngrams[n - 2], top
        if 0 <= n - 5 < len(rule.max_duplicate_ngrams):
            again = repeated_characters(words, n) / whole
            yield f"repetition.duplicate_{n}grams", again > rule.max_duplicate_ngrams[n - 5], again


def top_characters(words: list[str], n: int, least: int) -> int:
    grams = Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))
    if not grams:
        return 0
    gram, count = grams.most_common(1)[0]
    return len(" ".join(gram)) * count if count >= least else 0


def repeated_characters(words: list[str], n: int) -> int:
    seen: set[tuple[str, ...]] = set()
    found = start = 0
    while start <= len(words) - n:
        gram = tuple(words[start : start + n])
        if gram in seen:
            found += len("".join(gram))
            start += n
        else:
            seen.add(gram)
            start += 1
    return found


def c4(rule: C4, text: str) -> Questions:
    sentences = kept = 0
    lines = text.splitlines()
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        words = line.split()
        if any(len(word) > rule.max_word_characters for word in words) or len(words) < rule.min_line_words:
            continue
        line = re.sub(r"\[[0-9]*]|\[edit]|\[citation needed]", "", line)
        if rule.need_line_ends and (not line.endswith((".", "?", "!", '"', "'")) or line.endswith("...")):
            continue
        lowered = line.lower()
        yield "c4.lorem_ipsum", "lorem ipsum" in lowered, number
        if "javascript" in lowered:
            continue
        yield "c4.curly_bracket", "{" in line and not rule.curly_brackets, number
        if any(phrase in lowered for phrase in POLICY):
            continue
        ends = [bool(re.search(r"[.?!][\"'”’)\]]{0,4}$", word)) for word in line.split()]
        sentences += sum(ends) + (not ends[-1] if ends else 0)
        kept += bool(ends)
    yield "c4.too_few_sentences", sentences < rule.min_sentences, sentences
    share = kept / max(1, sum(bool(line.strip()) for line in lines))
    yield "c4.few_kept_lines", share < rule.min_kept_lines, share
    lowered = text.lower()
    bad = {word.lower() for word in rule.bad_words if re.search(rf"(?<!\w){re.escape(word.lower())}(?!\w)", lowered)}
    yield "c4.bad_words", bool(bad), len(bad)


def fineweb(rule: FineWeb, text: str) -> Questions:
    lines = [line for line in text.split("\n") if line.strip()]
    yield "fineweb.no_lines", not lines, 0
    ended = sum(line.endswith(ENDS) for line in lines) / len(lines)
    yield "fineweb.few_line_ends", ended < rule.min_lines_with_end, ended
    short = sum(len(line) <= rule.short_line_characters for line in lines) / len(lines)
    yield "fineweb.short_lines", short > rule.max_short_lines, short
    again = duplicates(lines)[1] / len(text.replace("\n", ""))
    yield "fineweb.duplicate_line_characters", again > rule.max_duplicate_line_characters, again
    feeds = text.count("\n") / len(text.split())
    yield "fineweb.lines_per_word", feeds > rule.max_lines_per_word, feeds


def code(rule: Code, text: str) -> Questions:
    lines = text.split("\n")
    longest, mean = max(map(len, lines)), len(text) / len(lines)
    yield "code.long_line", longest > rule.max_line_characters, longest
    yield "code.long_lines", mean > rule.max_mean_line_characters, mean
    alphanumeric = sum(map(str.isalnum, text)) / max(1, len(text))
    yield "code.few_alphanumeric", alphanumeric < rule.min_alphanumeric, alphanumeric
    xml = text[:100].find("<?xml version=")
    yield "code.xml", xml >= 0 and not rule.xml, xml
    written = next((number for number, line in enumerate(lines[:5], 1) if GENERATED.search(line)), -1)
    yield "code.generated", written > 0 and not rule.generated, written
