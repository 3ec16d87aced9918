import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.data import documents
from bloomery.data.documents import LARGEST_SHARE, is_held_out
from bloomery.shards import format
from bloomery.shards.loader import PackedDataset
from bloomery.stages import shard
from bloomery.stages import tokenizer as stage
from bloomery.stages.config import Shard
from bloomery.tokenizer.config import ByteBpe, DomainShare, Imported, SentencePiece
from bloomery.tokenizer.tokenizer import Tokenizer
from tests.stages.made_documents import DOMAINS, ROWS, documents_of, hashes, laid_out
from tests.tokenizer.made import small


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return laid_out(tmp_path_factory.mktemp("inputs"), ROWS)


LEARNED = [row for row in ROWS if not is_held_out(row["text"], LARGEST_SHARE)]
"""What a tokenizer may learn from."""


# --- tokenizer -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tokenizer_that_is_saved_is_the_one_that_is_reported(inputs: dict[str, Path], tmp_path: Path) -> None:
    stats = stage.run(ByteBpe(vocab_size=500), inputs, tmp_path)
    made = Tokenizer.load(tmp_path)
    assert stats["hash"] == made.hash
    assert stats["vocab_size"] == made.vocab_size == 500
    for domain, ratio in stats["bytes_per_token"].items():
        own = [row["text"] for row in ROWS if row["domain"] == domain]
        some = [text for text in own if not is_held_out(text, LARGEST_SHARE)]
        tokens = sum(len(made.encode(one)) for one in some)
        assert ratio == round(sum(len(one.encode()) for one in some) / tokens, 3)
    assert stats["bytes_per_token"].keys() == DOMAINS.keys()


@pytest.mark.slow
def test_the_tokenizer_never_learns_from_what_a_recipe_may_hold_out(tmp_path: Path) -> None:
    secret = [row | {"text": row["text"] + " zzqxj" * 40} for row in ROWS if is_held_out(row["text"], LARGEST_SHARE)]
    rows = [row for row in ROWS if not is_held_out(row["text"], LARGEST_SHARE)]
    held = [row for row in secret if is_held_out(row["text"], LARGEST_SHARE)]
    folders = [tmp_path / "with", tmp_path / "without"]
    made: list[str] = []
    for folder, some in zip(folders, ([*rows, *held], rows), strict=True):
        inputs = laid_out(folder, some)
        (folder / "out").mkdir()
        made.append(stage.run(ByteBpe(vocab_size=400), inputs, folder / "out")["hash"])
    assert held
    assert made[0] == made[1]


@pytest.mark.slow
def test_the_same_documents_give_the_same_tokenizer(inputs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        stage.run(ByteBpe(vocab_size=400, sample_bytes=30_000), inputs, tmp_path / name)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_a_sample_larger_than_all_text_is_all_of_it_but_what_may_be_held_out(inputs: dict[str, Path]) -> None:
    seen, unseen = stage.sample(inputs["dedup"] / "kept", ByteBpe(sample_bytes=10**9))
    assert sorted(one for some in seen.texts().values() for one in some) == sorted(row["text"] for row in LEARNED)
    held = sorted(row["text"] for row in ROWS if is_held_out(row["text"], LARGEST_SHARE))
    assert sorted(one for some in unseen.texts().values() for one in some) == held


def test_a_domain_that_was_asked_for_and_is_not_there_is_named(inputs: dict[str, Path], tmp_path: Path) -> None:
    config = ByteBpe(weights=(DomainShare(domain="code", weight=1), DomainShare(domain="books", weight=1)))
    with pytest.raises(DataError, match=r"(?s)domain 'books' are left.*with documents: code\."):
        stage.run(config, inputs, tmp_path)


def test_the_report_says_what_was_sampled_what_is_unused_and_how_languages_do(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    weights = (DomainShare(domain="code", weight=3), DomainShare(domain="web", weight=1))
    stats = stage.run(ByteBpe(vocab_size=420, sample_bytes=8000, weights=weights), inputs, tmp_path)
    sample = stats["sample"]
    assert sample.keys() == stats["bytes_per_token"].keys() == {"code", "web"}
    assert sample["code"]["bytes"] == pytest.approx(6000, abs=1000)
    assert sample["web"]["bytes"] == pytest.approx(2000, abs=1000)
    assert 0 < sample["web"]["share"] < 1
    assert stats["bytes_per_token_unseen"].keys() <= {"code", "web"}
    assert stats["fertility"]["latin"]["tokens_per_word"] > stats["fertility"]["latin"]["tokens_per_character"] > 0
    assert stats["unused_tokens"] > 100  # most of 256 bytes
    assert stats["encoder"] == "tiktoken"


def test_gpt2_is_compared_where_its_files_are_and_only_there(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOOMERY_SHARED", raising=False)
    stats = stage.run(ByteBpe(vocab_size=400), inputs, tmp_path / "a")
    assert stats["gpt2"]["compared"] is False
    folder = tmp_path / "gpt2"
    folder.mkdir()
    made = small().spec["model"]
    (folder / "encoder.json").write_text(json.dumps(made["vocab"]), encoding="utf-8")
    merges = "".join(f"{left} {right}\n" for left, right in made["merges"])
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    stats = stage.run(ByteBpe(vocab_size=400, gpt2=folder), inputs, tmp_path / "b")
    assert stats["gpt2"]["compared"] is True
    assert stats["gpt2"]["bytes_per_token"]["web"] > stats["bytes_per_token_unseen"]["web"]  # 700 ids against 400


@pytest.mark.slow
def test_an_imported_tokenizer_is_saved_as_it_is_and_its_file_is_in_the_fingerprint(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = Imported(path=inputs["tokenizer"])
    stats = stage.run(config, inputs, tmp_path)
    assert stats["hash"] == small().hash
    assert stage.vocab_size(config) == small().vocab_size
    assert stage.vocab_size(ByteBpe(vocab_size=321)) == 321
    assert len(stage.external_inputs(config)) == 64
    assert stage.external_inputs(ByteBpe()) == ""


def test_sentencepiece_is_a_kind_of_the_stage(inputs: dict[str, Path], tmp_path: Path) -> None:
    stats = stage.run(SentencePiece(vocab_size=420), inputs, tmp_path)
    assert stats["kind"] == "sentencepiece"
    made = Tokenizer.load(tmp_path)
    assert made.hash == stats["hash"]
    assert made.vocab_size == 420
    assert all(made.decode(made.encode(row["text"])) == row["text"] for row in ROWS[::10])


def test_no_documents_make_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)no documents are left.*loosen the filter"):
        stage.run(ByteBpe(), laid_out(tmp_path, []), tmp_path / "out")
    held = [row for row in ROWS if is_held_out(row["text"], LARGEST_SHARE)][:2]
    with pytest.raises(DataError, match=r"(?s)all of its 2 documents are among the share of 0\.1 .*separator="):
        stage.run(ByteBpe(), laid_out(tmp_path / "held", held), tmp_path / "out")


# --- shard ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("shard")
    return out, shard.run(Shard(val_fraction=0.1, shard_tokens=5000), inputs, out)


def test_documents_in_are_documents_trained_on_and_documents_held_out(sharded: tuple[Path, dict[str, Any]]) -> None:
    out, stats = sharded
    train, val = documents_of(out, "train"), documents_of(out, "val")
    held = sorted(row["text"].encode() for row in ROWS if is_held_out(row["text"], 0.1))
    assert sorted(train + val) == sorted(row["text"].encode() for row in ROWS)
    assert sorted(val) == held
    assert sorted(one["text"].encode() for one in documents.read(out / "held-out")) == held
    assert (stats["documents"], stats["held_out_documents"]) == (len(train), len(val))
    assert stats["tokens"] == sum(len(format.read(path).tokens) for path in format.names(out, "train"))
    assert stats["held_out_tokens"] == sum(len(format.read(path).tokens) for path in format.names(out, "val"))
    assert stats["tokenizer"] == small().hash


def test_shards_hold_whole_documents_and_are_about_as_long_as_asked(sharded: tuple[Path, dict[str, Any]]) -> None:
    lengths = [len(format.read(path).tokens) for path in format.names(sharded[0], "train")]
    longest = max(len(small().encode(row["text"])) + 1 for row in ROWS)
    assert len(lengths) > 3
    assert all(abs(length - 5000) < longest for length in lengths[:-1])
    assert PackedDataset(sharded[0], "train", 64, small().hash).num_samples > 100


def test_another_seed_is_another_order_of_the_same_documents(
    inputs: dict[str, Path], sharded: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    other = build(Shard, {"val_fraction": 0.1, "shard_tokens": 5000, "seed": 1})
    shard.run(other, inputs, tmp_path)
    assert sorted(documents_of(tmp_path, "train")) == sorted(documents_of(sharded[0], "train"))
    assert documents_of(tmp_path, "train") != documents_of(sharded[0], "train")


MIXES: list[dict[str, Any]] = [
    {"weights": [("web", 1, 1), ("code", 1, 4)], "tokens": 4000},
    {"weights": [("web", 3, 4), ("code", 1, 4), ("other", 2, 4)], "tokens": 9000},
    {"weights": [("code", 0.7, 2.5), ("other", 0.3, 1)], "tokens": None},
    {"weights": [("other", 1, 3.5)], "tokens": None},
    {"weights": [("web", 9, 0.5), ("other", 1, 9)], "tokens": None},
]


@pytest.mark.parametrize("mix", MIXES)
def test_the_mix_reaches_the_asked_shares_within_one_document(
    inputs: dict[str, Path], tmp_path: Path, mix: dict[str, Any]
) -> None:
    weights = [{"domain": domain, "weight": weight, "max_epochs": epochs} for domain, weight, epochs in mix["weights"]]
    tree = {"weights": weights, "val_fraction": 0.1, **({"tokens": mix["tokens"]} if mix["tokens"] else {})}
    stats = shard.run(build(Shard, tree), inputs, tmp_path)
    lengths: dict[str, dict[bytes, int]] = {domain: {} for domain in DOMAINS}
    for row in ROWS:
        if not is_held_out(row["text"], 0.1):
            lengths[row["domain"]][row["text"].encode()] = len(small().encode(row["text"])) + 1
    sizes = {domain: sum(some.values()) for domain, some in lengths.items()}
    total_weight = sum(weight for _, weight, _ in mix["weights"])
    size = mix["tokens"] or min(sizes[d] * epochs * total_weight / weight for d, weight, epochs in mix["weights"])
    copies = Counter(documents_of(tmp_path, "train"))
    seen: set[bytes] = set()
    for domain, weight, epochs in mix["weights"]:
        found = {one: copies[one] for one in lengths[domain]}
        reached = sum(count * lengths[domain][one] for one, count in found.items())
        assert 0 <= reached - size * weight / total_weight < max(lengths[domain].values()) + 1e-6
        assert max(found.values()) <= -(-epochs // 1)
        assert max(found.values()) - min(found.values()) <= 1
        facts = stats["mix"][domain]
        assert facts["tokens"] == reached
        assert facts["epochs"] == round(reached / sizes[domain], 3)
        assert facts["share"] == round(reached / stats["tokens"], 4)
        assert facts["asked"] == round(weight / total_weight, 4)
        seen |= set(found)
    assert set(copies) <= seen
    assert stats["mix"].keys() == {domain for domain, _, _ in mix["weights"]}


def test_a_domain_with_two_weights_is_refused() -> None:
    weights = [{"domain": domain, "weight": 1} for domain in ("web", "code", "web")]
    with pytest.raises(ConfigError, match=r"weights has the domain 'web' twice; remove one"):
        build(Shard, {"weights": weights})


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        (
            {"weights": [{"domain": "webb", "weight": 1}]},
            r"(?s)no documents of domain 'webb' are left.*code, other, web",
        ),
        ({"val_fraction": 1e-9}, r"(?s)no document is left for validation.*Raise shard\.val_fraction"),
    ],
)
def test_a_split_that_cannot_be_made_is_an_error_with_its_hint(
    inputs: dict[str, Path], tmp_path: Path, tree: dict[str, Any], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        shard.run(build(Shard, tree), inputs, tmp_path)
