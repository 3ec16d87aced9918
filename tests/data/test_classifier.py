import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from sklearn.metrics import roc_auc_score

from bloomery.core.errors import DataError
from bloomery.data.dedup import hashing
from bloomery.data.dedup.hashing import NgramSizes
from bloomery.data.quality import classifier, scorer
from bloomery.data.quality import examples as quality_examples
from bloomery.data.quality.classifier import Learned, save
from bloomery.data.quality.examples import TextExample, excerpt
from bloomery.data.quality.scorer import load, score
from bloomery.data.sources import stdlib

GOOD = re.findall(r"\w+", "the quiet river carried small boats past green hills while people walked along it and sang")
BAD = re.findall(r"\w+", "buy cheap pills now win money casino bonus free offer deal click here today best price")
WORDS = NgramSizes(2**14)
SETTINGS = {"characters": 1000, "held_out": 0.2, "seed": 0}


def made(words: list[str], number: int, length: int) -> str:
    return " ".join(random.Random(f"{words[0]}{number}").choices(words, k=length))


def examples(count: int = 200) -> list[TextExample]:
    found = []
    for number in range(count):
        found.append(TextExample(made(GOOD, number, 30), True, f"g{number}"))
        found.append(TextExample(made(BAD, number, 30), False, f"b{number}", "spam"))
    return found


def train(given: Sequence[TextExample], grams: NgramSizes = WORDS, **more: object) -> Learned:
    return classifier.train(given, grams, **(SETTINGS | more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def learned() -> Learned:
    return train(examples())


@cache
def contrasted() -> tuple[TextExample, ...]:
    """Real modules and their docstrings, of several lengths, and damaged copies of them."""
    found = []
    for number, (name, path) in enumerate(stdlib.files()[::2]):
        source = path.read_text(encoding="utf-8")
        for part, whole in (("code", source), ("docs", stdlib.docstrings(name, source))):
            if len(whole) > 200:
                text, group = excerpt(whole, 200 + 150 * (number % 10)), f"{part}/{name}"
                kind = quality_examples.choose(group)
                found.append(TextExample(text, True, group))
                found.append(TextExample(quality_examples.damage(text, kind), False, group, kind))
    return tuple(found)


@pytest.fixture(scope="module")
def contrast() -> Learned:
    return train(contrasted(), NgramSizes(2**16), characters=1500, strength=30.0)


def test_what_was_learned_tells_good_from_bad(learned: Learned) -> None:
    quality = learned.quality
    assert quality.auc > 0.99
    assert min(quality.precision or 0.0, quality.recall, quality.caught["spam"]) > 0.95
    assert quality.brier < 0.05
    assert "river" in " ".join(learned.telling_positive)
    assert "casino" in " ".join(learned.telling_negative)
    assert not set(learned.telling_positive) & set(learned.telling_negative)
    good, bad = score(learned.classifier, [made(GOOD, 999, 50), made(BAD, 999, 50)])
    assert bad < 0.2 < 0.8 < good


def test_scores_after_a_reload_are_equal(tmp_path: Path, learned: Learned) -> None:
    texts = [example.text for example in examples(20)] + ["", "\u2028", "unseen words only"]
    save(learned, {"name": "quality"}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["classifier.json", "classifier.safetensors"]
    assert list(score(load(tmp_path), texts)) == list(score(learned.classifier, texts))


@pytest.mark.parametrize("grams", [WORDS, NgramSizes(2**14, None, (2, 4)), NgramSizes(5000, (2, 3), (3, 3))])
def test_a_score_is_that_of_the_formula_and_does_not_depend_on_the_other_texts(grams: NgramSizes) -> None:
    model = train(examples(60), grams).classifier
    texts = [example.text for example in examples(300)] + ["", " ", "a", "\ud800"]
    together = list(score(model, texts))
    assert together == [next(score(model, [text])) for text in texts]
    for text, found in zip(texts, together, strict=True):
        families = [found.buckets for found in hashing.hashed([text], grams)]
        sums = [model.weights[sorted(set(b.tolist()))].sum(dtype=np.float64) / max(len(b), 1) ** 0.5 for b in families]
        logit = model.bias + sum(sums)
        assert found == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-6)


def test_training_twice_gives_the_same_numbers(learned: Learned) -> None:
    again = train(examples())
    assert np.array_equal(again.classifier.weights, learned.classifier.weights)
    assert (again.classifier.bias, again.quality) == (learned.classifier.bias, learned.quality)
    assert (again.telling_positive, again.telling_negative) == (learned.telling_positive, learned.telling_negative)


def test_an_n_gram_that_says_no_more_than_its_words_is_not_told(learned: Learned) -> None:
    assert classifier._says_more("a b", {"a b": 2.0, "a": 0.5, "b": 0.9})
    assert not classifier._says_more("a b", {"a b": -2.0, "a": -1.5})
    assert not classifier._says_more("a b", {"a b": 2.0, "b": 3.0})


def test_a_document_and_its_damaged_copy_are_never_split_up() -> None:
    pairs = [
        TextExample(text, keep, f"g{n}")
        for n in range(200)
        for text, keep in ((f"good {n}", True), (f"bad {n}", False))
    ]
    quality = train(pairs).quality
    assert quality.held_out % 2 == 0
    assert quality.held_out < quality.examples / 3


@pytest.mark.slow
def test_length_alone_does_not_tell_a_copy_from_its_original() -> None:
    truth = [example.positive for example in contrasted()]
    lengths = [round(len(example.text), -2) for example in contrasted()]
    assert roc_auc_score(truth, lengths) == pytest.approx(0.5, abs=0.05)


def test_good_text_is_kept_at_every_length_it_was_learned_at(contrast: Learned) -> None:
    good = [example.text for example in contrasted() if example.positive and len(example.text) > 1200]
    for length in (300, 600, 1200):
        assert np.mean([value > 0.5 for value in score(contrast.classifier, [text[:length] for text in good])]) > 0.65


def test_contrast_teaches_what_damage_looks_like(contrast: Learned) -> None:
    quality = contrast.quality
    assert quality.auc > 0.85
    assert set(quality.caught) == set(quality_examples.KINDS)
    assert min(quality.caught[kind] for kind in ("broken", "shuffled", "spam")) > 0.6


def test_spam_scores_below_short_code_and_short_prose(contrast: Learned) -> None:
    code = "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / 2\n"
    prose = (
        "Return the sum of the values.\n\nIf the list is empty, the result is 0. Raises TypeError for other objects.\n"
    )
    spam = "buy cheap pills now " * 40
    of_code, of_prose, of_spam = score(contrast.classifier, [code, prose, spam])
    assert of_spam < min(of_code, of_prose)
    assert of_spam < 0.3


def test_an_excerpt_is_the_whole_or_the_start_and_the_middle() -> None:
    assert excerpt("short", 10) == "short"
    text = "".join(chr(33 + n % 90) for n in range(1000))
    start, middle = excerpt(text, 100).split("\n")
    assert text.startswith(start)
    assert text[500:550] == middle


def test_too_few_examples_are_an_error_that_says_how_many() -> None:
    with pytest.raises(
        DataError, match=r"(?s)part of the examples that measures has \d+ positive and 0 negative texts.*are enough"
    ):
        train([TextExample(f"text {n}", True, str(n)) for n in range(50)])


def test_a_broken_classifier_is_an_error(tmp_path: Path, learned: Learned) -> None:
    with pytest.raises(DataError, match=r"classifier\.json: cannot be read: No such file"):
        load(tmp_path)
    save(learned, {}, tmp_path)
    whole = (tmp_path / scorer.ARRAYS).read_bytes()
    (tmp_path / scorer.ARRAYS).write_bytes(whole[:100])
    with pytest.raises(DataError, match="no readable classifier"):
        load(tmp_path)
    (tmp_path / scorer.ARRAYS).write_bytes(safetensors.numpy.save({"weights": np.zeros(3), "bias": np.zeros(1)}))
    with pytest.raises(DataError, match="its arrays are not weights of"):
        load(tmp_path)
    (tmp_path / scorer.ARRAYS).write_bytes(whole)
    facts = json.loads((tmp_path / scorer.FACTS).read_text())
    (tmp_path / scorer.FACTS).write_text(json.dumps(facts | {"format": 9}))
    with pytest.raises(DataError, match="format is 9"):
        load(tmp_path)
