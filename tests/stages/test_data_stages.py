import errno
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError, RunError
from bloomery.data import documents
from bloomery.data.filters.apply import DocumentColumns, judge
from bloomery.data.quality import scorer
from bloomery.stages import classify, dedup, fetch
from bloomery.stages import filter as filtering
from bloomery.stages.config import Classify, Dedup, Fetch, Filter

Stats = Mapping[str, Any]

TOPICS = ("iron", "river", "bread", "light", "music", "stone")
RULES = [
    {"kind": "length", "min_characters": 60},
    {"kind": "gopher", "domains": ["web"], "min_words": 10, "min_stop_words": 0},
    {"kind": "repetition", "domains": ["web"], "max_duplicate_ngrams": [0.5]},
    {"kind": "code", "domains": ["code"]},
]


def sentence(rng: random.Random) -> str:
    one, two = rng.sample(TOPICS, 2)
    verb, place = (
        rng.choice(("met", "left", "found", "kept")),
        rng.choice(("the hill", "the sea", "a town", "its door")),
    )
    return f"The {one} of {rng.randrange(900)} men {verb} the {two} near {place} and {rng.randrange(900)} saw it"


def web_text(number: int) -> str:
    rng = random.Random(number)
    return ".\n\n".join(sentence(rng) for _ in range(rng.randint(4, 12))) + "."


def code_text(number: int) -> str:
    rng = random.Random(number)
    lines = [f"def f{n}_{number}(x):\n    return x * {rng.randrange(900)} + {rng.randrange(900)}\n" for n in range(8)]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Fetch:
    """A folder of code and a jsonl file of web text, with copies, near copies, short and empty ones."""
    root = tmp_path_factory.mktemp("raw")
    (root / "code").mkdir()
    for number in range(60):
        (root / "code" / f"{number}.py").write_text(code_text(number))
    (root / "code" / "empty.py").touch()
    (root / "code" / "generated.py").write_text("# Automatically generated. Do not edit.\n" + code_text(1))
    texts = [web_text(number) for number in range(120)]
    texts += [
        texts[0].upper(),
        texts[1].replace("\n\n", " "),
        texts[2] + " And one more thing.",
        "Too short.",
        "",
        " \n",
    ]
    texts.append(texts[3] + " buy cheap pills now" * 60)
    rows = [{"text": text, "url": f"http://x/{number}"} for number, text in enumerate(texts)]
    (root / "web.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = {"kind": "folder", "name": "code", "domain": "code", "path": str(root / "code"), "patterns": ["*.py"]}
    jsonl = {"kind": "jsonl", "name": "web", "domain": "web", "path": str(root / "web.jsonl")}
    return build(Fetch, {"sources": [folder, jsonl]})


@pytest.fixture(scope="module")
def done(recipe: Fetch, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, Stats]]:
    return run_all(recipe, tmp_path_factory.mktemp("run"))


def run_all(recipe: Fetch, root: Path) -> tuple[dict[str, Path], dict[str, Stats]]:
    """The four stages in order: their folders, and their statistics."""
    folders: dict[str, Path] = {}
    stats: dict[str, Stats] = {}
    stages: list[tuple[str, Callable[..., Stats], Any]] = [
        ("fetch", fetch.run, recipe),
        ("classify", classify.run, Classify(test_fraction=0.2, features=2**14)),
        ("filter", filtering.run, build(Filter, {"rules": RULES, "min_score": 0.02})),
        ("dedup", dedup.run, Dedup()),
    ]
    for name, run, config in stages:
        (root / name).mkdir()
        stats[name] = run(config, dict(folders), root / name)
        folders[name] = root / name
    return folders, stats


def ids(folder: Path) -> list[str]:
    return [row["id"] for row in documents.read(folder, ["id"])]


def test_documents_in_are_documents_out_at_every_stage(done: tuple[dict[str, Path], dict[str, Stats]]) -> None:
    folders, _ = done
    fetched = ids(folders["fetch"] / "documents")
    rejected = ids(folders["fetch"] / "rejected")
    kept, dropped = ids(folders["filter"] / "kept"), ids(folders["filter"] / "dropped")
    single, removed = ids(folders["dedup"] / "kept"), ids(folders["dedup"] / "duplicates")
    assert len(fetched) + len(rejected) == 62 + 127
    assert len(set(fetched + rejected)) == len(fetched + rejected)
    assert sorted(kept + dropped) == sorted(fetched)
    assert sorted(single + removed) == sorted(kept)
    assert min(map(len, (rejected, kept, dropped, single, removed))) > 0


def test_texts_stay_whole_from_source_to_end(done: tuple[dict[str, Path], dict[str, Stats]]) -> None:
    texts = {row["id"]: row["text"] for row in documents.read(done[0]["dedup"] / "kept")}
    whole = {f"web/web.jsonl:{number + 1}": web_text(number) for number in range(120)}
    shared = set(texts) & set(whole)
    assert len(shared) > 100
    assert all(texts[name] == whole[name] for name in shared)
    assert "\n\n" in texts[min(shared)]


def test_statistics_say_what_the_folders_hold(done: tuple[dict[str, Path], dict[str, Stats]]) -> None:
    folders, stats = done
    fetched = list(documents.read(folders["fetch"] / "documents"))
    assert stats["fetch"]["documents"] == len(fetched) == documents.count(folders["fetch"] / "documents")
    assert stats["fetch"]["bytes"] == sum(len(row["text"].encode()) for row in fetched)
    assert stats["fetch"]["by_domain"]["code"]["documents"] == 61
    assert stats["fetch"]["by_source"]["code"]["rejected"] == 1
    assert stats["fetch"]["reasons"] == {"empty": 3}
    for name, out in (("filter", "dropped"), ("dedup", "removed")):
        found, tally = stats[name], list(stats[name]["by_domain"].values())
        assert found["documents"] == found["kept"] + found[out]
        assert [sum(domain[key] for domain in tally) for key in ("documents", "kept", out)] == [
            found[key] for key in ("documents", "kept", out)
        ]
    assert sum(stats["filter"]["reasons"].values()) == stats["filter"]["dropped"]
    assert stats["dedup"]["exact"] + stats["dedup"]["near"] == stats["dedup"]["removed"]
    json.dumps(stats)


def test_a_dropped_document_has_the_reason_that_its_rule_gives(done: tuple[dict[str, Path], dict[str, Stats]]) -> None:
    config = build(Filter, {"rules": RULES})
    dropped = {row["id"]: row for row in documents.read(done[0]["filter"] / "dropped")}
    assert dropped["code/generated.py"]["reason"] == "code.generated"
    assert dropped["web/web.jsonl:124"]["reason"] == "length.too_short"
    assert dropped["web/web.jsonl:127"]["reason"].startswith("repetition.")
    for row in dropped.values():
        verdicts = judge(config.rules, DocumentColumns([row["text"]], [row["domain"]], [row["url"]], [row["id"]]))
        ruled = (verdicts.reasons[0], verdicts.values[0])
        assert (row["reason"], row["value"]) == (
            ("classifier", row["score"]) if row["reason"] == "classifier" else ruled
        )


def test_every_document_has_the_score_of_the_saved_classifier(done: tuple[dict[str, Path], dict[str, Stats]]) -> None:
    folders, stats = done
    learned = scorer.load(folders["classify"] / "quality")
    kept = list(documents.read(folders["filter"] / "kept"))
    assert [row["score"] for row in kept] == list(scorer.score(learned, [row["text"] for row in kept]))
    (told,) = stats["classify"]["classifiers"]
    assert told["auc"] > 0.7
    assert told["examples"] == 2 * stats["fetch"]["documents"]


def test_the_digest_follows_the_content_of_every_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    config = build(Fetch, {"sources": [{"kind": "folder", "name": "a", "domain": "web", "path": str(tmp_path)}]})
    before = fetch.external_inputs(config)
    assert fetch.external_inputs(config) == before
    (tmp_path / "a.txt").write_text("two")
    assert fetch.external_inputs(config) != before


def test_labels_teach_when_there_are_some(done: tuple[dict[str, Path], dict[str, Stats]], tmp_path: Path) -> None:
    lines = [{"text": web_text(number), "label": 1} for number in range(100)]
    lines += [{"text": f"win {number} money now " * 10, "label": 0} for number in range(100)]
    path = tmp_path / "labeled.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = Classify(labeled=path, test_fraction=0.2)
    (told,) = classify.run(config, done[0], tmp_path / "out")["classifiers"]
    assert told["auc"] > 0.95
    assert told["examples"] == 200
    before = classify.external_inputs(config)
    path.write_text(path.read_text() + '{"text": "x", "label": 2}\n')
    assert classify.external_inputs(config) != before
    with pytest.raises(DataError, match=r"labeled\.jsonl:201.*label 2"):
        classify.run(config, done[0], tmp_path / "again")
    assert classify.external_inputs(Classify()) == ""


def test_two_classifiers_and_their_limits_work_together(
    done: tuple[dict[str, Path], dict[str, Stats]], tmp_path: Path
) -> None:
    rows = [{"words": web_text(number), "kind": "fine"} for number in range(100)]
    rows += [{"words": f"win {number} money now " * 10, "kind": "spam"} for number in range(100)]
    (tmp_path / "spam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spam: dict[str, Any] = {"kind": "labeled", "name": "spam", "path": str(tmp_path / "spam.jsonl"), "keep": "low"}
    spam |= {
        "text_field": "words",
        "label_field": "kind",
        "positive": ["spam"],
        "negative": ["fine"],
        "test_fraction": 0.2,
    }
    quality = {"kind": "contrast", "test_fraction": 0.2, "features": 2**14}
    folders = {"fetch": done[0]["fetch"], "classify": tmp_path / "classify"}
    told = classify.run(build(Classify, {"classifiers": [quality, spam]}), folders, folders["classify"])
    assert [(one["name"], one["keep"]) for one in told["classifiers"]] == [("quality", "high"), ("spam", "low")]
    config = build(
        Filter,
        {
            "thresholds": [
                {"classifier": "spam", "max_score": 0.9, "domains": ["web"]},
                {"min_score": 0.3, "heuristic_weight": 0.4, "max_chars": 500},
            ]
        },
    )
    (tmp_path / "filter").mkdir()
    stats = filtering.run(config, folders, tmp_path / "filter")
    kept, dropped = (list(documents.read(tmp_path / "filter" / name)) for name in ("kept", "dropped"))
    assert len(kept) + len(dropped) == stats["documents"] == 186
    for row in kept:
        assert 0.6 * row["score"] + 0.4 * row["heuristic"] >= 0.3
        assert row["domain"] != "web" or row["score_spam"] < 0.9
    for row in dropped:
        mixed = 0.6 * row["score"] + 0.4 * row["heuristic"]
        value = row["score_spam"] if row["reason"] == "limit.spam" else mixed
        assert row["value"] == pytest.approx(value)
        assert (row["value"] >= 0.9) if row["reason"] == "limit.spam" else (row["value"] < 0.3)
    assert sum(tally["documents"] for tally in stats["scores"]["spam"]["by_domain"].values()) == 186
    assert {len(found) for found in stats["scores"]["quality"]["samples"].values()} <= set(range(21))


def test_a_limit_without_a_classifier_is_an_error(
    done: tuple[dict[str, Path], dict[str, Stats]], tmp_path: Path
) -> None:
    config = build(Filter, {"thresholds": [{"min_score": 0.3}]})
    with pytest.raises(DataError, match="but no classifier"):
        filtering.run(config, {"fetch": done[0]["fetch"]}, tmp_path)


def test_keys_have_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"samples belongs in \[\[classify.classifiers\]\]"):
        build(Classify, {"samples": 10, "classifiers": [{"kind": "contrast"}]})
    with pytest.raises(ConfigError, match="two classifiers have the name 'quality'"):
        build(Classify, {"classifiers": [{"kind": "contrast"}, {"kind": "contrast"}]})
    plain = build(Classify, {"samples": 10})
    assert build(Classify, plain.model_dump(mode="json")).named == plain.named
    label = {"kind": "labeled", "name": "a", "path": str(tmp_path), "keep": "low"}
    with pytest.raises(ConfigError, match="label 1 is both positive and negative"):
        build(Classify, {"classifiers": [label | {"negative": [1]}]})
    with pytest.raises(ConfigError, match="needs positive_from"):
        build(Classify, {"classifiers": [label | {"negative_below": 0.1}]})


def test_a_domain_may_have_a_limit_of_its_own(done: tuple[dict[str, Path], dict[str, Stats]], tmp_path: Path) -> None:
    config = build(Filter, {"min_scores": [{"domain": "code", "min_score": 1.0}]})
    stats = filtering.run(config, done[0], tmp_path)
    assert stats["by_domain"]["code"]["kept"] == 0
    assert stats["by_domain"]["web"]["dropped"] == 0
    assert stats["reasons"] == {"classifier": 61}


def test_a_domain_that_no_document_has_is_named(
    done: tuple[dict[str, Path], dict[str, Stats]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filtering.run(build(Filter, {"rules": [{"kind": "length", "domains": ["wbe"]}]}), done[0], tmp_path)
    assert "no document has the domain 'wbe'; the domains are code, web" in capsys.readouterr().err


def test_nothing_left_is_an_error_that_names_the_reasons(
    done: tuple[dict[str, Path], dict[str, Stats]], tmp_path: Path
) -> None:
    config = build(Filter, {"rules": [{"kind": "length", "min_characters": 10**6}]})
    with pytest.raises(DataError, match=r"(?s)none of 186 documents is kept: length\.too_short \(186\).*Loosen"):
        filtering.run(config, done[0], tmp_path)
    assert documents.count(tmp_path / "dropped") == 186
    with pytest.raises(DataError, match="holds no documents"):
        dedup.run(Dedup(), {"filter": tmp_path}, tmp_path / "dedup")


def test_no_documents_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no sources"):
        fetch.run(Fetch(), {}, tmp_path)
    (tmp_path / "empty.txt").touch()
    source = {"kind": "folder", "name": "a", "domain": "web", "path": str(tmp_path)}
    with pytest.raises(DataError, match=r"a: gave no documents \(1 rejected: 1 empty\)"):
        fetch.run(build(Fetch, {"sources": [source]}), {}, tmp_path / "out")


def test_a_full_disk_leaves_no_torn_part_and_the_next_attempt_is_whole(
    recipe: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pq.ParquetWriter.write_table

    def full(writer: Any, table: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(RunError, match=r"part-000-000000-000\.parquet: .*No space left on device"):
            fetch.run(recipe, {}, tmp_path)
    assert not list(tmp_path.rglob("part-*"))
    assert pq.ParquetWriter.write_table is whole
    assert fetch.run(recipe, {}, tmp_path)["documents"] == documents.count(tmp_path / "documents") == 186


def test_bands_that_do_not_divide_are_an_error_with_one_that_does() -> None:
    with pytest.raises(ConfigError, match="112 permutations do not make 15 equal bands; use 14"):
        build(Dedup, {"num_bands": 15})
    with pytest.raises(ConfigError, match=r"ngrams must be \[shortest, longest\]"):
        build(Classify, {"ngrams": [3, 1]})
