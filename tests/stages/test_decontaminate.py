import io
import json
import random
from pathlib import Path

import pytest
import zstandard

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.data import documents
from bloomery.data.executor import ExecutorConfig
from bloomery.data.readers import rows
from bloomery.stages import decontaminate, dedup
from bloomery.stages.config import Decontaminate, Dedup
from tests.data.made_documents import part_rows, write_documents
from tests.shared import SHARED, needs

DATA = SHARED / "data"
needs_sets = needs(DATA / "eval")

FIELDS = ("query", "question", "ctx", "context", "prompt")


def questions() -> list[tuple[str, int, str]]:
    """Task, row and question of all shared sets, as they stand in their files."""
    found = []
    for path in sorted((DATA / "eval").glob("*.jsonl.zst")):
        for number, row in rows.jsonl(path):
            assert isinstance(row, dict)
            text = next((row[name] for name in FIELDS if name in row), None)
            if text is None:
                text = f"{row['context_options'][0]} {row['continuation']}"
            if path.name.startswith(("arc", "commonsense", "boolq")):
                text = text.split("Question:")[-1].split("\nChoices:")[0].removesuffix("\nAnswer:")
            found.append((path.name.removesuffix(".jsonl.zst"), number, text.strip()))
    return found


def dressed(text: str, rng: random.Random) -> str:
    """With other case, punctuation or line breaks."""
    kind = rng.randrange(4)
    if kind == 0:
        return text.upper()
    if kind == 1:
        return text.replace(" ", "\n")
    return text if kind == 2 else "".join(" — " if c in ",.;:!?" else c for c in text)


def clean_texts(count: int) -> list[str]:
    with (DATA / "dev" / "web.jsonl.zst").open("rb") as file:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8", newline="\n")
        return [json.loads(line)["text"] for line, _ in zip(lines, range(count), strict=False)]


def written(texts: dict[str, str], folder: Path) -> list[Path]:
    rows = [{"id": name, "text": text, "source": "s", "domain": "web"} for name, text in texts.items()]
    write_documents(folder, rows)
    return documents.parts(folder)


@pytest.mark.slow
@needs_sets
def test_eighty_planted_questions_are_all_found_and_clean_text_is_left_alone(tmp_path: Path) -> None:
    rng = random.Random(0)
    asked = [one for one in questions() if len(one[2].split()) >= 4]
    clean = clean_texts(600)
    texts = {f"clean-{number}": text for number, text in enumerate(clean)}
    planted = {}
    for number, one in enumerate(rng.sample(asked, 80)):
        host = rng.choice(clean)[:3000]
        cut = rng.randrange(len(host))
        planted[f"planted-{number}"] = one
        texts[f"planted-{number}"] = f"{host[:cut]}\n{dressed(one[2], rng)}\n{host[cut:]}"
    config = Decontaminate(files=(DATA / "eval",))
    stats = decontaminate.run(config, written(texts, tmp_path / "in"), tmp_path / "out", ExecutorConfig(workers=1))
    dropped = {row["id"]: row for row in documents.read(tmp_path / "out" / "dropped")}
    assert set(planted) <= set(dropped)
    listed = {(hit["id"], hit["task"], hit["row"]) for hit in part_rows(tmp_path / "out" / "hits.parquet")}
    assert {(name, task, row) for name, (task, row, _) in planted.items()} <= listed
    assert all(row["reason"].startswith("decontaminate.") for row in dropped.values())
    assert stats["documents"] == 680 == stats["kept"] + stats["dropped"]
    false = len(dropped) - 80
    print(json.dumps({"clean documents": len(clean), "dropped of them": false}))
    assert false <= len(clean) * 0.005


def quiz(folder: Path) -> Path:
    path = folder / "quiz.jsonl"
    path.write_text('{"question": "Which of these old ships has sunk in the bay?"}\n')
    return path


def test_what_holds_a_question_is_dropped_before_copies_are_looked_for(tmp_path: Path) -> None:
    config = build(Dedup, {"decontaminate": {"files": [str(quiz(tmp_path))]}})
    story = "The men of the iron town went down to the river and there they found a boat made of light wood"
    texts = {"bad": f"{story}. Which of these old ships\nhas SUNK in the bay", "copy": story, "again": story.upper()}
    stats = dedup.deduplicate(config, written(texts, tmp_path / "in"), tmp_path / "out")
    out = tmp_path / "out"
    assert [row["id"] for row in documents.read(out / "kept")] == ["again"]
    assert [(row["id"], row["kept_id"]) for row in documents.read(out / "duplicates")] == [("copy", "again")]
    (gone,) = documents.read(out / "dropped")
    assert (gone["id"], gone["reason"], gone["value"]) == ("bad", "decontaminate.quiz", 1.0)
    (hit,) = part_rows(out / "hits.parquet")
    assert (hit["task"], hit["row"], hit["matched"]) == ("quiz", 1, "Which of these old ships\nhas SUNK in the bay")
    assert texts["bad"][hit["place"] :].startswith("Which")
    assert (stats["documents"], stats["kept"], stats["removed"], stats["dropped"], stats["hits"]) == (3, 1, 1, 1, 1)
    assert stats["by_domain"]["web"]["dropped"] == 1


@pytest.mark.slow
def test_workers_do_not_change_a_byte(tmp_path: Path) -> None:
    paths = written({f"d{n}": f"text {n} " + "old ships has sunk in the bay " * n for n in range(9)}, tmp_path / "in")
    more = tmp_path / "more" / "part-00001.parquet"
    more.parent.mkdir()
    more.write_bytes(paths[0].read_bytes())
    config = Decontaminate(files=(quiz(tmp_path),))
    seen = []
    for workers in (1, 2):
        out = tmp_path / f"out-{workers}"
        stats = decontaminate.run(config, [*paths, more], out, ExecutorConfig(workers=workers))
        seen.append((stats, {path.relative_to(out): path.read_bytes() for path in out.rglob("*.parquet")}))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", ["long-hashes.npy", "rows.json"])
def test_an_index_that_was_damaged_before_the_search_went_on_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    question = "When the river froze in the seventh winter, who carried the heavy lamp across it to the mill?"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "riddles.jsonl").write_text(json.dumps({"question": question, "answer": "None."}) + "\n")
    paths = written({"a": f"They asked: {question}", "b": "Another text."}, tmp_path / "documents")
    config = build(Decontaminate, {"files": [str(tmp_path / "tasks")]})
    with monkeypatch.context() as patched:
        patched.setattr(decontaminate, "run_parts", killed)
        with pytest.raises(KeyboardInterrupt):
            decontaminate.run(config, paths, tmp_path / "out")
    (damaged,) = (tmp_path / "out").rglob(name)
    data = bytearray(damaged.read_bytes())
    places = range(128, len(data)) if name.endswith(".npy") else [data.index(b"13") + 1]
    for place in places:
        data[place] ^= 1
    damaged.write_bytes(data)
    stats = decontaminate.run(config, paths, tmp_path / "out")
    assert (stats["kept"], stats["dropped"], stats["hits"]) == (1, 1, {"riddles": 1})


def killed(*args: object, **more: object) -> None:
    raise KeyboardInterrupt


def test_the_digest_follows_the_content_of_the_tasks(tmp_path: Path) -> None:
    config = Dedup(decontaminate=Decontaminate(files=(quiz(tmp_path),)))
    before = dedup.external_inputs(config)
    assert before == dedup.external_inputs(config)
    (tmp_path / "quiz.jsonl").write_text('{"question": "Another one than before?"}\n')
    assert dedup.external_inputs(config) != before
    assert dedup.external_inputs(Dedup()) == ""
    with pytest.raises(DataError, match=r"gone\.jsonl: does not exist"):
        dedup.external_inputs(Dedup(decontaminate=Decontaminate(files=(tmp_path / "gone.jsonl",))))


def test_tasks_whose_every_text_is_too_short_are_an_error(tmp_path: Path) -> None:
    (path := tmp_path / "short.jsonl").write_text('{"question": "two words"}\n')
    parts = written({"a": "two words"}, tmp_path / "documents")
    with pytest.raises(DataError, match="every text of the tasks has fewer than 4 words"):
        decontaminate.run(Decontaminate(files=(path,)), parts, tmp_path / "out")
    done = decontaminate.run(Decontaminate(files=(path,), min_question_words=2), parts, tmp_path / "out")
    assert done["dropped"] == 1


def test_limits_that_leave_nothing_to_find_are_errors() -> None:
    with pytest.raises(ConfigError, match="min_question_words=13 must be less than"):
        build(Decontaminate, {"files": ["a.jsonl"], "min_question_words": 13})
    with pytest.raises(ConfigError, match="files"):
        build(Decontaminate, {"files": []})
