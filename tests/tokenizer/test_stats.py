import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.tokenizer import train
from bloomery.tokenizer.fast_encode import Encoder
from bloomery.tokenizer.train import Sample
from tests.tokenizer.made import CODE, ELSEWHERE, small

TEXTS = {"code": [CODE, CODE + "x = 1\n"], "other": [ELSEWHERE, ""]}


def test_bytes_per_token_and_unused_ids_are_what_counting_one_by_one_gives() -> None:
    counts = train.used(small(), Encoder(small()), TEXTS)
    ratios = train.bytes_per_token(TEXTS, counts)
    for domain, some in TEXTS.items():
        ids = [id for text in some for id in small().encode(text)]
        assert ratios[domain] == round(sum(len(text.encode()) for text in some) / len(ids), 3)
        assert all(counts[domain][id] == ids.count(id) for id in range(small().vocab_size))
    seen = {id for some in TEXTS.values() for text in some for id in small().encode(text)}
    assert train.unused(small(), counts) == small().vocab_size - len(seen | small().special_ids)
    assert train.used(small(), Encoder(small()), {"none": [""]})["none"].sum() == 0


def test_fertility_counts_tokens_for_words_and_characters_by_script() -> None:
    texts = {"a": ["the lamp is here", "один два"], "b": ["東京都は日本の首都", "12 !"]}
    found = train.fertility(Encoder(small()), texts, "script")
    assert found.keys() == {"latin", "cyrillic", "japanese", "none"}
    tokens = len(small().encode("the lamp is here"))
    assert found["latin"] == {
        "documents": 1,
        "tokens_per_word": round(tokens / 4, 3),
        "tokens_per_character": round(tokens / 16, 3),
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [("Größe", "latin"), ("ёлка и", "cyrillic"), ("中文文本", "cjk"), ("한국어", "hangul"), ("العربية", "arabic"),
     ("ひらがなと漢字", "japanese"), ("हिन्दी", "devanagari"), ("123 ...", "none"), ("", "none")],
)  # fmt: skip
def test_a_script_is_what_most_letters_are(text: str, name: str) -> None:
    assert train.script(text) == name


def test_languages_are_told_apart_by_name_where_asked() -> None:
    pytest.importorskip("py3langid")
    texts = {
        "a": ["This is a sentence in the English language about a lamp.", "Dies ist ein Satz in deutscher Sprache."]
    }
    assert train.fertility(Encoder(small()), texts, "langid").keys() == {"en", "de"}


# --- sample -----------------------------------------------------------------------------------------------------------


Documents = list[tuple[str, str, str]]


def drawn(sizes: dict[str, tuple[int, int]], seed: int = 0) -> Documents:
    """Documents of each domain: how many, and about how long."""
    rng = random.Random(seed)
    return [
        (domain, f"{domain}/{number}", "".join(rng.choices("abcé ", k=rng.randint(1, 2 * length))))
        for domain, (count, length) in sizes.items()
        for number in range(count)
    ]


def taken(documents: Sequence[tuple[str, str, str]], budget: int, **weights: float) -> Sample:
    made = Sample(budget, {domain: float(weight) for domain, weight in weights.items()})
    for document in documents:
        made.add(*document)
    return made


def sizes(made: Sample) -> dict[str, int]:
    return {domain: sum(len(text.encode()) for text in some) for domain, some in made.texts().items()}


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1),
    st.integers(1, 4000),
    st.randoms(use_true_random=False),
)
def test_the_sample_depends_neither_on_the_order_of_documents_nor_on_what_memory_drops(
    domains: dict[str, tuple[int, int]], budget: int, rng: random.Random
) -> None:
    documents = drawn(domains)
    first = taken(documents, budget).texts()
    turned = documents[:]
    rng.shuffle(turned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "SLACK", 0.0)  # dropped at every document
        patch.setattr(train, "LONGEST", 400)
        assert taken(turned, budget).texts() == first
    assert sum(map(len, first.values())) <= len(documents)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1),
    st.integers(1, 6000),
)
def test_the_budget_is_filled_evenly_and_what_small_domains_leave_goes_to_the_others(
    domains: dict[str, tuple[int, int]], budget: int
) -> None:
    documents = drawn(domains)
    whole: Counter[str] = Counter()
    for domain, _, text in documents:
        whole[domain] += len(text.encode())
    made = taken(documents, budget)
    got, longest = sizes(made), 80 * 2
    assert min(budget, whole.total()) <= sum(got.values()) <= budget + longest * len(domains)
    level = made.level()
    for domain, size in whole.items():
        assert min(size, level) <= got[domain] <= min(size, level + longest)


def test_weights_say_what_the_sample_is_made_of_and_leave_out_what_they_do_not_name() -> None:
    documents = drawn({"a": (500, 50), "b": (500, 50), "c": (500, 50)})
    got = sizes(taken(documents, 20_000, a=3, b=1))
    assert got.keys() == {"a", "b"}
    assert got["a"] == pytest.approx(15_000, abs=200)
    assert got["b"] == pytest.approx(5_000, abs=200)


def test_a_domain_without_text_is_missing_where_it_was_asked_for() -> None:
    assert taken([("a", "1", "text"), ("b", "2", "")], 100, a=1, b=1, c=1).missing() == ["b", "c"]
    assert taken([("a", "1", "text")], 100).missing() == []


def test_memory_stays_near_the_budget_and_no_file_outweighs_its_domain() -> None:
    made = Sample(50_000)
    for number in range(3000):
        made.add("ab"[number % 2], str(number), "x" * 1000)
        assert made._held <= 50_000 * train.SLACK + train.LONGEST + 1000
    made = Sample(50_000)
    made.add("a", "long", "é" * (3 * train.LONGEST))
    assert [len(text) for text in made.texts()["a"]] == [train.LONGEST]


def test_the_sample_is_from_everywhere_and_not_from_the_start() -> None:
    documents = [("a", f"{number}", f"{number:04d} " * 20) for number in range(2000)]
    numbers = sorted(int(text[:4]) for text in taken(documents, 20_000).texts()["a"])
    assert len(numbers) == 200
    assert numbers[20] < 400
    assert 800 < numbers[100] < 1200
    assert numbers[-20] > 1600
