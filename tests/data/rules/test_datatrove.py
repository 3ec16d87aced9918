"""Given the same words, every rule drops what datatrove's filter of the same name drops, for the same reason."""

import re
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from bloomery.data.filters.apply import DocumentColumns, judge
from bloomery.data.filters.published import C4, FineWeb, Gopher, Repetition
from bloomery.data.readers import rows
from tests.shared import SHARED, needs

DOCUMENTS = 150

filters: Any = pytest.importorskip("datatrove.pipeline.filters", reason="datatrove is not installed")
datatrove: Any = pytest.importorskip("datatrove.data")
tokenizers: Any = pytest.importorskip("datatrove.utils.word_tokenizers")

REASONS = {
    "gopher_short_doc": "gopher.too_few_words",
    "gopher_long_doc": "gopher.too_many_words",
    "gopher_below_avg_threshold": "gopher.short_words",
    "gopher_above_avg_threshold": "gopher.long_words",
    "gopher_too_many_hashes": "gopher.symbols",
    "gopher_too_many_ellipsis": "gopher.symbols",
    "gopher_too_many_bullets": "gopher.bullet_lines",
    "gopher_too_many_end_ellipsis": "gopher.ellipsis_lines",
    "gopher_below_alpha_threshold": "gopher.few_alphabetic_words",
    "gopher_enough_stop_words": "gopher.few_stop_words",
    "lorem_ipsum": "c4.lorem_ipsum",
    "curly_bracket": "c4.curly_bracket",
    "too_few_sentences": "c4.too_few_sentences",
    "line_punct_ratio": "fineweb.few_line_ends",
    "short_line_ratio": "fineweb.short_lines",
    "char_dup_ratio": "fineweb.duplicate_line_characters",
    "list_ratio": "fineweb.lines_per_word",
    "dup_line_frac": "repetition.duplicate_lines",
    "dup_line_char_frac": "repetition.duplicate_line_characters",
    "dup_para_frac": "repetition.duplicate_paragraphs",
    "dup_para_char_frac": "repetition.duplicate_paragraph_characters",
    **{f"top_{n}_gram": f"repetition.top_{n}gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"repetition.duplicate_{n}grams" for n in range(5, 11)},
}


class Whitespace(tokenizers.WordTokenizer):
    """Our definition of words and of sentences, handed to datatrove the way it takes a tokenizer."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return [text[start:end] for start, end in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        ends = [m.end() for m in re.finditer(r"\S+", text) if re.search(r"[.?!][\"'”’)\]]{0,4}$", m.group())]
        if text and (not ends or ends[-1] < len(text.rstrip())):
            ends.append(len(text))
        return list(zip([0, *ends], ends, strict=False))


def texts(name: str) -> Iterator[str]:
    for _, row in rows.jsonl(SHARED / "data" / "dev" / f"{name}.jsonl.zst"):
        assert isinstance(row, dict)
        yield row["text"]


def reason(judge: Any, text: str) -> str | None:
    with warnings.catch_warnings(action="ignore"):  # it takes means of nothing
        found = judge.filter(datatrove.Document(text=text, id="1"))
    return None if found is True else REASONS[found[1]]


@needs(SHARED / "data" / "dev")
@pytest.mark.parametrize("corpus", ["web", "code", "sci", "toxicity"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Gopher(), "GopherQualityFilter"),
        (C4(), "C4QualityFilter"),
        (FineWeb(), "FineWebQualityFilter"),
        (Repetition(min_top_count=1), "GopherRepetitionFilter"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_verdicts_are_those_of_datatrove_given_the_same_words(ours: Any, theirs: str, corpus: str) -> None:
    batch = list(islice(texts(corpus), DOCUMENTS))
    names = [str(number) for number in range(len(batch))]
    found = judge([ours], DocumentColumns(batch, ["web"] * len(batch), [None] * len(batch), names)).reasons
    peer = getattr(filters, theirs)(language=Whitespace())
    assert found == [reason(peer, text) for text in batch]
    assert set(found) != {None}
