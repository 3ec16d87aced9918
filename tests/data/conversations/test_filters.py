"""What each filter finds, what it leaves alone, and that nothing is lost between."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.chat import Message
from bloomery.core.config import build
from bloomery.core.errors import ConfigError
from bloomery.data.chat import filters
from bloomery.data.chat.filters import DroppedConversation, num_words
from bloomery.data.chat.formats import Conversation
from bloomery.data.chat.readers import Conversations

LONG = "This sentence has exactly seven words in it. " * 40
NUMBERED = " ".join(f"number {n} is followed by number {n + 1}," for n in range(40))


def talk(*contents: str, source: str = "a", id: str = "x") -> Conversation:
    roles = ("user", "assistant") * len(contents)
    messages = [Message(role=role, content=said) for role, said in zip(roles, contents, strict=False)]  # type: ignore[typeddict-item]
    return Conversation(messages, source, id, f"{source}:{id}")


def made(*given: dict[str, Any]) -> tuple[filters.ChatFilter, ...]:
    return build(Conversations, {"filters": list(given)}).filters


def reason(given: dict[str, Any], *contents: str) -> str | None:
    (one,) = filters.sifted(made(given), [talk(*contents)])
    return one.finding.reason if isinstance(one, DroppedConversation) else None


IDENTITY = [
    "As an AI language model, I like tea.",
    "I’m ChatGPT.",
    "Hello! I am a large language model trained by OpenAI.",
    "My name is Vicuna, by the way.",
    "I was created by researchers from Anthropic.",
    "我是ChatGPT。",
    "作为一个人工智能，我没有感情。",
]
OTHERS = [
    "Claude Monet painted lilies; technologies such as AI came later.",
    "OpenAI released GPT-4 in 2023.",
    "As an AI researcher at a university, she wrote the paper.",
    "An alpaca is an animal. I am hungry.",
    "The model was trained by her team.",
]


@pytest.mark.parametrize("answer", IDENTITY)
def test_an_assistant_that_is_somebody_else_goes(answer: str) -> None:
    assert reason({"kind": "identity"}, "Who are you?", answer) == "identity"
    assert reason({"kind": "identity"}, answer, "I see.") is None, "what the user says is not learned"


@pytest.mark.parametrize("answer", OTHERS)
def test_a_text_about_models_and_animals_stays(answer: str) -> None:
    assert reason({"kind": "identity"}, "Tell me.", answer) is None


def test_only_the_names_that_are_given_are_looked_for() -> None:
    assert reason({"kind": "identity", "names": ["Bloom"]}, "Who?", "I am Bloom.") == "identity"
    assert reason({"kind": "identity", "names": []}, "Who?", "I am Bloom.") is None


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("I'm sorry, but I can't help with that.", "refusal.refusal"),
        ("Unfortunately, I do not have access to that.", "refusal.refusal"),
        ("I cannot provide medical advice.", "refusal.refusal"),
        ("抱歉，我无法回答。", "refusal.refusal"),
        ("As of my last update, it is so.", "refusal.hedge"),
        ("It’s difficult to say what is best.", "refusal.hedge"),
        ("截至我的知识更新", "refusal.hedge"),
        ("Sorry to hear that! Here is a plan.", None),
        ("The sea. I cannot provide a better answer.", None),
        ("I can help with that.", None),
    ],
)
def test_answers_that_open_with_a_refusal_or_a_hedge_go(answer: str, found: str | None) -> None:
    assert reason({"kind": "refusal"}, "Please.", answer) == found
    assert reason({"kind": "refusal"}, "Please.", "Yes.", "And?", answer) == found
    only = {"kind": "refusal", "openings": "hedges"}
    assert reason(only, "Please.", answer) == (found if found == "refusal.hedge" else None)


AND_SO_ON = "and so on, as can be seen if one reads all that has been written about it,"
ENDS = ("https://a.b/c?d=e", "(https://a.b/c", "www.a.b/c", "42", "1,000.5", "$3", "x:https://a.b/c", "5th", "1990s")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (LONG + "and then it", "truncated.text"),
        (LONG + "Look:\n```python\nprint(1)\n", "truncated.code"),
        ("```\nx = 1\n```", None),
        (LONG, None),
        ("Paris", None),
        (LONG + "\n- the last item of a list", None),
        (LONG + "\n\n    indented = code", None),
        (LONG + "\nSo the answer is 42", None),
        (LONG + "你好。", None),
        (LONG + "Bye 😀", None),
        ("这" * 100, "truncated.text"),
        *((f"{LONG} {AND_SO_ON} {end}", None) for end in ENDS),
        *((f"{LONG} {AND_SO_ON} {end}", "truncated.text") for end in ("GPT", "http", "5 of", "v2beta", "the2")),
        ("这" * 100 + "共有42", None),
        ("这" * 100 + "https://a.b/c", None),
        ("这https://a.b/c" + "这" * 100, "truncated.text"),
    ],
)
def test_answers_that_stop_in_the_middle_go(answer: str, found: str | None) -> None:
    assert reason({"kind": "truncated"}, "Tell me.", answer) == found


def test_a_short_question_with_a_long_answer_goes_by_the_limits_that_are_set() -> None:
    given = {"kind": "length_mismatch"}
    assert reason(given, "Why?", LONG) == "length_mismatch"
    assert reason(given, LONG, LONG) is None
    assert reason(given, "Why?", "So.") is None
    assert reason(given, "word " * 15, LONG) is None, "15 words are no fewer than 15"
    assert reason({**given, "max_answer_words": 10_000}, "Why?", LONG) is None
    assert reason(given, "Hi.", "Hello.", "Why?", LONG) is None
    assert reason({**given, "every": True}, "Hi.", "Hello.", "Why?", LONG) == "length_mismatch"
    assert num_words("两个字一个词") == 3


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("Buy now! Click here for a free trial.", "spam.phrase"),
        ("Click here to see it.", None),
        (NUMBERED + " https://a.b" * 20, "spam.links"),
        (NUMBERED, None),
        ("the same again " * 40, "spam.repetition"),
        ("One line.\n" * 30, "spam.repetition"),
    ],
)
def test_spam_goes(answer: str, found: str | None) -> None:
    assert reason({"kind": "spam"}, "Tell me.", answer) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#Rewritten Prompt#: Do it.", True),
        ("### Instruction: Do it.", True),
        ("Do it.<|im_end|>", True),
        ("What is a rewritten prompt, in the given prompt?", False),
        ("### Summary", False),
    ],
)
def test_marks_of_prompts_go(text: str, found: bool) -> None:
    assert (reason({"kind": "leftovers"}, text, "Done.") == "leftovers") is found


def test_blank_messages_go() -> None:
    assert reason({"kind": "blank"}, "a", " \n") == "blank"
    assert reason({"kind": "blank"}, "", "b") == "blank"
    assert reason({"kind": "blank"}, "a", "b") is None


@pytest.mark.parametrize("text", ["\u200b", "\ufeff", " \u200b\n\u2060\u00ad", "\u200e\x00", "\u3000"])
def test_messages_of_which_nothing_is_seen_are_blank(text: str) -> None:
    assert reason({"kind": "blank"}, "a", text) == "blank"
    assert reason({"kind": "blank"}, text, "b") == "blank"
    assert reason({"kind": "blank"}, "a", f"{text}😀") is None


def test_of_equal_conversations_the_first_stays_also_over_batches() -> None:
    talks = [talk("Q", f"A {n}", id=str(n)) for n in range(600)] + [talk(" q\n", "a  5"), talk("Q", "A 5")]
    found = list(filters.sifted(made({"kind": "duplicates"}), talks))
    assert [one.finding.value for one in found if isinstance(one, DroppedConversation)] == [1, 2]
    questions = list(filters.sifted(made({"kind": "duplicates", "same": "question"}), talks))
    assert sum(isinstance(one, DroppedConversation) for one in questions) == 601
    swapped = [talk("a", "b"), Conversation(list(reversed(talk("a", "b").messages)), "a", "", "")]
    assert not any(
        isinstance(one, DroppedConversation) for one in filters.sifted(made({"kind": "duplicates"}), swapped)
    )


TASK = "A train leaves the station at noon with forty passengers and nobody else, how many are there?"


def test_conversations_that_hold_a_task_go_with_the_task_and_the_words(tmp_path: Path) -> None:
    (tmp_path / "trains.jsonl").write_text(json.dumps({"question": TASK, "answer": "40"}) + "\n")
    given = {"kind": "decontaminate", "files": [str(tmp_path)]}
    talks = [talk("Hi", "Hello."), talk("Please solve: " + TASK.upper(), "40"), talk("Where is the station?", "There.")]
    found = list(filters.sifted(made(given), talks))
    assert [isinstance(one, DroppedConversation) for one in found] == [False, True, False]
    (dropped,) = (one for one in found if isinstance(one, DroppedConversation))
    assert dropped.finding.reason == "decontaminate.trains"
    assert dropped.finding.what.lower() in TASK.lower()
    with pytest.raises(ConfigError, match="must be less than"):
        made({**given, "min_question_words": 13})


def test_each_conversation_comes_out_once_for_its_first_reason_and_in_order() -> None:
    talks = [
        talk("a", "I am ChatGPT, and I'm sorry, but I can't.", id="1"),
        talk("a", "I'm sorry, but I can't.", id="2"),
        talk("a", "Fine.", id="3"),
        talk("a", "I am ChatGPT, and I'm sorry, but I can't.", id="4"),
        talk("a", "Fine.", source="b", id="5"),
    ]
    given = made({"kind": "refusal"}, {"kind": "identity"}, {"kind": "duplicates", "sources": ["a"]})
    found = list(filters.sifted(given, talks))
    assert [one.conversation.id if isinstance(one, DroppedConversation) else one.id for one in found] == list("12345")
    reasons = Counter(one.finding.reason for one in found if isinstance(one, DroppedConversation))
    assert reasons == {"refusal.refusal": 1, "identity": 2}
    assert list(filters.sifted((), talks)) == talks
