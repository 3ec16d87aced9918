import re
import statistics
from collections import Counter

import numpy as np
import pytest

from bloomery.data.quality import scorer
from bloomery.data.quality.scorer import STOP_WORDS, WEIGHTS, heuristic_score, shares
from bloomery.data.sources import stdlib

PROSE = (
    "The river begins in the hills, where it is hardly more than a ditch. In spring, when the snow has gone, it is "
    "the loudest thing in the valley. People have built mills along it since the town was founded! Why did they stop? "
    "Nobody who lives there can say for certain, but most of them think that the railway had something to do with it.\n"
    "\nLater the mills were turned into houses. Some of these still have their wheels, which turn when the water is "
    "high, and children are told that the wheels remember the grain. It is a small town, and it likes its stories.\n\n"
)
TEXTS = [
    PROSE,
    PROSE * 5,
    "",
    "x",
    "buy cheap pills now " * 40,
    "日本語。テキスト。",
    "A B C. D E F! G?",
    "w " * 30_000,
]


def test_the_weights_sum_to_one() -> None:
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)


def test_the_known_score_of_spam_comes_out() -> None:
    assert next(heuristic_score(["buy cheap pills now " * 40])) == pytest.approx(0.511, abs=0.0005)


def test_prose_scores_above_spam_lists_and_code() -> None:
    code = "def f(x):\n    return x + 1\n" * 10
    links = "http://a.example/b http://c.example/d click here read more " * 20
    prose, *others = heuristic_score([PROSE * 2, code, links, "word " * 300])
    assert prose > 0.8
    assert max(others) < 0.7


@pytest.mark.parametrize("text", [*TEXTS, stdlib.files()[0][1].read_text(encoding="utf-8")])
def test_shares_equal_those_of_plain_python(text: str) -> None:
    found = {name: values[0] for name, values in shares([text]).items()}
    words = re.findall(r"[^\W\u2e80-\u2fdf\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+", text.lower())
    n = len(words)
    root = len(set(words)) / max(n, 1) ** 0.5
    low, high = 0.3 + 0.2 * (root - 2), 0.8 + (root - 4) / 80
    assert found["diversity"] == pytest.approx(0.1 if root < 2 else low if root < 4 else high if root <= 20 else 0.9)
    stops = sum(word in STOP_WORDS for word in words) / max(n, 1)
    assert found["naturalness"] == (
        0.3 if stops < 0.2 else 0.6 if stops < 0.3 else 1.0 if stops <= 0.6 else 0.7 if stops <= 0.7 else 0.3
    )
    three = Counter(zip(words, words[1:], words[2:], strict=False))
    share = max(three.values(), default=0) / max(n - 2, 1)
    assert found["repetition"] == (1.0 if n < 50 or share <= 0.02 else 0.6 if share <= 0.05 else 0.2)
    pieces = [len(re.findall(r"\w+", one)) for one in re.split(r"""[.!?](?=[ \t\n\r"')]|$)""", text)]
    sizes = [size for size in pieces if size]
    if text.isascii() and len(sizes) > 1:
        mean, deviation = statistics.fmean(sizes), statistics.pstdev(sizes)
        step = 0.3 if mean < 5 else 0.6 if mean < 10 else 0.5 if mean > 50 else 1.0
        assert found["sentences"] == pytest.approx(0.6 * step + 0.4 * min(1.0, deviation / 8))


def test_length_follows_its_steps() -> None:
    texts = ["w " * count for count in (49, 50, 125, 200, 5000, 12_500, 20_000, 20_001)]
    found = [shares([text])["length"][0] for text in texts]
    assert found == pytest.approx([0.2, 0.5, 0.65, 1.0, 1.0, 0.85, 0.7, 0.5])


def test_boilerplate_templates_and_addresses_cost_what_they_should() -> None:
    texts = ["a b", "Read more", "read more " * 3, "read more " * 5, "{{ name }}", "[Insert name] {{x}}"]
    found = shares(texts)
    assert found["boilerplate"].tolist() == [1.0, 0.7, 0.4, 0.1, 1.0, 1.0]
    assert found["no_template"].tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.7, 0.4])
    words = "word " * 99
    clean = shares([words, words + "a@b.example", words + "http://x http://y", words + "a@b.example " * 9])["clean"]
    assert clean.tolist() == [1.0, 0.7, 0.7, 0.1]


def test_a_score_does_not_depend_on_the_other_texts() -> None:
    assert list(heuristic_score(TEXTS)) == [next(heuristic_score([text])) for text in TEXTS]
    assert all(0 <= value <= 1 for value in heuristic_score(TEXTS))


def test_every_share_is_one_number_for_each_text() -> None:
    found = shares(TEXTS)
    assert set(found) == set(WEIGHTS)
    assert all(values.shape == (len(TEXTS),) and np.isfinite(values).all() for values in found.values())
    assert scorer.heuristic_score([]).__class__.__name__ == "generator"
    assert list(heuristic_score([])) == []
