import json
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build, plain
from bloomery.core.errors import ConfigError
from bloomery.data.synthesis.config import Synthesize
from tests.data.made_documents import write_documents
from tests.data.synthesis.model_server import ModelServer
from tests.stages.made_synthesis import TOPICS, asks, config, kinds, lines, run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stop", "reason"),
    [
        ("openai", "length", "cut"),
        ("anthropic", "max_tokens", "cut"),
        ("anthropic", "refusal", "refusal"),
        ("openai", "content_filter", "refusal"),
    ],
)
def test_an_answer_that_is_not_whole_is_rejected_with_its_reason(
    server: ModelServer, tmp_path: Path, kind: str, stop: str, reason: str
) -> None:
    server.stop = stop
    stats = run(config(server, kind), tmp_path)
    assert (stats["conversations"], stats["rejected"]) == (0, {reason: 5})
    assert [line["asked"] for line in lines(tmp_path, "rejected.jsonl")] == [[topic] for topic in TOPICS]


@kinds
def test_an_empty_answer_is_rejected(server: ModelServer, tmp_path: Path, kind: str) -> None:
    server.reply = lambda messages: "" if messages[-1]["content"] == "Why?" else "yes"
    assert run(config(server, kind), tmp_path)["rejected"] == {"empty": 1}


def test_duplicates_are_refused_and_others_asked_in_their_place(server: ModelServer, tmp_path: Path) -> None:
    long = "This is the same answer to each and every question that there is, long enough to be no accident."
    server.reply = lambda messages: long if messages[-1]["content"] in TOPICS[:3] else messages[-1]["content"]
    stats = run(config(server, count=3), tmp_path)
    assert (stats["conversations"], stats["rejected"]) == (3, {"duplicate": 2})
    assert asks(tmp_path) == [TOPICS[0], *TOPICS[3:]]


# --- documents --------------------------------------------------------------------------------------------------------

EASY = "The cat sat on the mat. The dog ran to the park. He had fun in the sun. " * 8
HARD = "Institutional considerations necessitate comprehensive epistemological reorientation of methodologies. " * 9
PLAIN = (
    "Rivers carry water from the mountains to the sea. Farmers along the valley often depend on them in summer. " * 25
)


def documents(folder: Path) -> dict[str, Path]:
    rows = [
        {"id": name, "text": text, "domain": domain, "source": "s", "url": "", "license": ""}
        for name, text, domain in (
            ("easy", EASY, "web"),
            ("hard", HARD, "web"),
            ("plain", PLAIN, "books"),
            ("short", "Too short.", "web"),
        )
    ]
    write_documents(folder / "kept", rows)
    return {"dedup": folder}


def about(server: ModelServer, tmp_path: Path, **augment: Any) -> list[dict[str, Any]]:
    made = config(server, topics=[], augment=augment, max_tokens=10**6)
    run(made, tmp_path / "08-synthesize-a", documents(tmp_path / "04-dedup-a"))
    return lines(tmp_path / "08-synthesize-a")


def test_documents_are_summarized_with_their_text_in_the_question(server: ModelServer, tmp_path: Path) -> None:
    server.reply = lambda messages: f"A summary of {len(messages[-1]['content'])} characters of text."
    found = about(server, tmp_path, modes=["summary", "key_points"])
    assert [(line["category"], line["document"]) for line in found] == [
        ("summary", "easy"),
        ("key_points", "hard"),
        ("summary", "plain"),
    ]
    assert EASY.strip() in found[0]["messages"][0]["content"]


def test_easy_text_gets_harder_and_hard_text_simpler_and_the_rest_neither(server: ModelServer, tmp_path: Path) -> None:
    server.reply = lambda messages: "Another version: " + messages[-1]["content"][-60:]
    found = about(server, tmp_path, modes=["harder", "simpler"])
    assert [(line["category"], line["document"]) for line in found] == [("harder", "easy"), ("simpler", "hard")]


def test_each_question_about_a_document_is_a_conversation_and_what_is_no_list_is_rejected(
    server: ModelServer, tmp_path: Path
) -> None:
    pairs = [{"question": f"What is it, {n}?", "answer": f"It is a river, number {n}."} for n in range(9)]

    def reply(messages: list[dict[str, str]]) -> str:
        return (
            "Sorry, no." if "Institutional" in messages[-1]["content"] else f"Here:\n```json\n{json.dumps(pairs)}\n```"
        )

    server.reply = reply
    found = about(server, tmp_path, modes=["questions"], domains=["web", "books"])
    plain_ones = [line for line in found if line["document"] == "plain"]
    assert [line["messages"][1]["content"] for line in plain_ones] == [f"It is a river, number {n}." for n in range(2)]
    assert all(line["messages"][0]["content"].startswith("Rivers carry") for line in plain_ones)
    rejected = lines(tmp_path / "08-synthesize-a", "rejected.jsonl")
    assert [(line["document"], line["reason"]) for line in rejected] == [("hard", "no_questions")]


@pytest.mark.parametrize(
    "said",
    [
        "[",
        "[]",
        "[" * 99_999 + "]",
        "[{" * 99_999,
        '[{"question": "\\ud800?", "answer": "b"}]',
        '[{"question": "a"}]',
        "[1, 2]",
    ],
)
def test_a_list_of_questions_that_is_none_is_rejected(server: ModelServer, tmp_path: Path, said: str) -> None:
    server.reply = lambda messages: said
    assert about(server, tmp_path, modes=["questions"]) == []
    rejected = lines(tmp_path / "08-synthesize-a", "rejected.jsonl")
    assert {line["reason"] for line in rejected} == {"no_questions"}


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"topics": []}, "nothing to generate"),
        ({"provider": None}, "provider is missing"),
        ({"provider": {"kind": "openai", "model": "m", "address": "127.0.0.1/v1"}}, "does not begin with http"),
        ({"provider": {"kind": "openai", "model": "m", "address": "file:///etc/passwd"}}, "does not begin with http"),
        ({"max_dollars": 1.0}, "needs provider.price"),
        ({"augment": {}}, "set one or the other"),
        ({"categories": [{"name": "a", "prompts": ["What is {that}?"]}]}, "has the slot 'that'"),
        ({"categories": [{"name": "topics", "prompts": ["What?"]}]}, "two categories have the name 'topics'"),
    ],
)
def test_settings_with_which_nobody_can_be_asked_are_refused_before_anything_runs(
    settings: dict[str, Any], told: str
) -> None:
    base = {"enabled": True, "topics": TOPICS, "provider": {"kind": "openai", "model": "m"}}
    build(Synthesize, base)
    with pytest.raises(ConfigError, match=told):
        build(
            Synthesize,
            base
            | {name: value for name, value in settings.items() if value is not None}
            | ({"provider": None} if settings.get("provider", 1) is None else {}),
        )


def test_keys_prices_and_concurrency_make_no_other_conversations() -> None:
    one, two = (
        plain(
            build(
                Synthesize, {"provider": {"kind": "openai", "model": "m", "key_variable": name}, "concurrency": many}
            ),
            stable_only=True,
        )
        for name, many in (("A", 1), ("B", 9))
    )
    assert one == two


def test_the_preset_has_questions_for_the_seed_s_fifteen_thousand() -> None:
    from bloomery.data.synthesis.config import categories, possible

    found = categories("seed-1386")
    assert sum(category.weight for category in found) == pytest.approx(1.0)
    assert sum(possible(category) for category in found) > 15_000
