"""
What conversations are left out, each for a reason: members of a tagged union, none of which is applied unasked.

They are those of a pipeline that finetuned models of 500 M parameters (its fourth mixture), whose answers ended by
themselves in 99.4 % of cases afterwards, and in 54 % before; what was a list of phrases there is one here, in English
and Chinese, and every number is a setting. A conversation goes for the first filter that finds something.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from bloomery.core.bounds import Between, PositiveLength, Share, TextLength
from bloomery.core.config import Config
from bloomery.data import overlap, unspaced
from bloomery.data.conversations import phrases
from bloomery.data.conversations.conversation import Conversation
from bloomery.data.sought import Sought

VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
"""What addresses and numbers are written with."""
BATCH = 256
"""Conversations that are looked at together."""


@dataclass(frozen=True)
class Finding:
    """Why a conversation is dropped."""

    reason: str
    value: int | float
    """What was measured, against the filter's limit."""
    what: str = ""
    """The words that were found, where it was words."""


@dataclass(frozen=True)
class Dropped:
    conversation: Conversation
    finding: Finding


Test = Callable[[Sequence[Conversation]], list[Finding | None]]
"""Looks at some conversations, in their order; it may remember those that came before."""


def said_by(conversation: Conversation, role: str) -> list[str]:
    """What one role says, message after message."""
    return [message["content"] for message in conversation.messages if message["role"] == role]


def num_words(text: str) -> int:
    """Words of a text; of what is written without spaces two characters count as one."""
    if text.isascii():
        return len(text.split())
    alone = unspaced.count(text)
    return len(unspaced.spaced(text).split()) - alone + alone // 2


class Filtering(Config):
    """What every filter has."""

    sources: tuple[str, ...] = ()
    """Only conversations of these sources are looked at; of all, where none is named."""

    def finding(self, conversation: Conversation) -> Finding | None:
        """What is wrong with one conversation by itself."""
        raise NotImplementedError

    def test(self) -> Test:
        """A new test, that has seen nothing yet. Raises DataError where it cannot be made."""
        return lambda some: [self.finding(one) for one in some]


class Identity(Filtering):
    """
    An assistant says that it is, or was made by, somebody else: "as an AI language model", "I am ChatGPT", "trained by
    OpenAI". A model that learns it says so of itself. Value: answers that do.

    Source: the filter "identity leaks" of the pipeline above, and the twenty "as an AI" phrases of its first version.
    """

    kind: Literal["identity"] = "identity"
    names: tuple[str, ...] = phrases.OTHER_MODELS
    """Names of models and makers that the assistant must not call its own."""

    def test(self) -> Test:
        pattern = phrases.identity(self.names)

        def one(conversation: Conversation) -> Finding | None:
            found = [match for said in said_by(conversation, "assistant") if (match := pattern.search(said))]
            return Finding("identity", len(found), found[0][0]) if found else None

        return lambda some: [one(conversation) for conversation in some]


class Refusal(Filtering):
    """
    An answer opens with a refusal or a hedge: "I'm sorry, but", "I cannot", "As of my last update". Reasons
    refusal.refusal and refusal.hedge; value: the number of the answer.

    Source: the filter of openings of the pipeline above.
    """

    kind: Literal["refusal"] = "refusal"
    openings: Literal["both", "refusals", "hedges"] = "both"
    opening_characters: PositiveLength = 160
    """How much of an answer counts as its opening."""

    def finding(self, conversation: Conversation) -> Finding | None:
        for number, said in enumerate(said_by(conversation, "assistant"), 1):
            opening = said.lstrip(" \t\n\"'*#>-")[: self.opening_characters]
            for name, pattern in phrases.OPENINGS.items():
                if self.openings in ("both", f"{name}s") and (match := pattern.match(opening)):
                    return Finding(f"refusal.{name}", number, match[0])
        return None


class Truncated(Filtering):
    """
    An answer stops in mid-sentence, or in code that is not closed: a model that learns from it learns no end. Looked
    at are answers of so many words and more that end in no mark, address or number, and fences. Value: words of the
    answer.

    Source: the filter "truncated answers" of the pipeline above.
    """

    kind: Literal["truncated"] = "truncated"
    min_words: PositiveLength = 40
    """Shorter answers may end as they like: names, numbers, titles."""

    def finding(self, conversation: Conversation) -> Finding | None:
        for said in said_by(conversation, "assistant"):
            text = said.rstrip()
            if text.count("```") % 2:
                return Finding("truncated.code", num_words(text), text[-40:])
            if not _ended(text) and (words := num_words(text)) >= self.min_words:
                return Finding("truncated.text", words, text[-40:])
        return None


def _ended(text: str) -> bool:
    """Whether a text without white space behind it came to its end, as far as its last line and word tell."""
    if not text or phrases.ENDED.search(text) or phrases.LISTED.match(text.rpartition("\n")[2]):
        return True
    word = text.rsplit(None, 1)[-1]
    word = word[len(word.rstrip(VISIBLE)) :]  # of Chinese the last word may be all of a paragraph
    return phrases.ADDRESS.search(word) is not None or phrases.NUMBER.fullmatch(word) is not None


class LengthMismatch(Filtering):
    """
    A short question with a long answer: what was asked for cannot be told from it. Value: words of the answer.

    Source: the pipeline above (fewer than 15 words, more than 200).
    """

    kind: Literal["length_mismatch"] = "length_mismatch"
    min_question_words: TextLength = 15
    """A question of fewer words …"""
    max_answer_words: PositiveLength = 200
    """… must not have an answer of more."""
    every: bool = False
    """Whether all exchanges are looked at, and not the first alone: a later question may lean on what stands before."""

    def finding(self, conversation: Conversation) -> Finding | None:
        asked = 0
        for message in conversation.messages:
            if message["role"] == "user":
                asked += num_words(message["content"])
            elif message["role"] == "assistant":
                words = num_words(message["content"])
                if asked < self.min_question_words and words > self.max_answer_words:
                    return Finding("length_mismatch", words)
                if not self.every:
                    return None
                asked = 0
        return None


class Spam(Filtering):
    """
    Advertising, links, and the same over and over. Reasons spam.phrase (value: phrases), spam.links (in 100 words)
    and spam.repetition (share of an answer's lines, or of its runs of four words, that stood in it before).

    Source: the filter "spam" of the pipeline above; shares of repeated runs as in Rae et al. 2021, A1.1.
    """

    kind: Literal["spam"] = "spam"
    max_phrases: TextLength = 1
    """More of them, in all messages, drop it."""
    max_links: Annotated[float, Between(0, 100, "it counts links in 100 words")] = 5.0
    """In 100 words of what the assistant says."""
    max_repeated: Share = 0.5
    min_words: PositiveLength = 30
    """Links and repetitions are looked for in answers of so many words and more."""

    def finding(self, conversation: Conversation) -> Finding | None:
        found = phrases.SPAM.findall(conversation.text)
        if len(found) > self.max_phrases:
            return Finding("spam.phrase", len(found), found[0])
        for said in said_by(conversation, "assistant"):
            words = said.split() if said.isascii() else unspaced.spaced(said).split()
            if len(words) < self.min_words:
                continue
            links = 100 * len(phrases.LINK.findall(said)) / len(words)
            if links > self.max_links:
                return Finding("spam.links", round(links, 4))
            repeated = max(_again(list(zip(*(words[n:] for n in range(4)), strict=False))), _again(_lines(said)))
            if repeated > self.max_repeated:
                return Finding("spam.repetition", round(repeated, 4))
        return None


def _lines(text: str) -> list[str]:
    """Lines that are long enough to be no brace or number."""
    return [line for line in map(str.strip, text.split("\n")) if len(line) > 3]


def _again(parts: Sequence[object]) -> float:
    """The share of parts that stood before them; 0 of fewer than five."""
    return 1 - len(set(parts)) / len(parts) if len(parts) >= 5 else 0.0


class Leftovers(Filtering):
    """
    Marks of the prompts that a data set was made with: "#Rewritten Prompt#", "### Instruction:". Value: how many.

    Source: the filter "evol_franken" of the pipeline above.
    """

    kind: Literal["leftovers"] = "leftovers"

    def finding(self, conversation: Conversation) -> Finding | None:
        found = phrases.LEFTOVER.findall(conversation.text)
        return Finding("leftovers", len(found), found[0]) if found else None


class Blank(Filtering):
    """
    A message that says nothing, or nothing that is seen: U+200B, U+FEFF. An assistant's that a user says nothing to.
    Value: the number of the message.
    """

    kind: Literal["blank"] = "blank"

    def finding(self, conversation: Conversation) -> Finding | None:
        for number, message in enumerate(conversation.messages, 1):
            if message["role"] in ("user", "assistant") and all(map(_unseen, message["content"])):
                return Finding("blank", number)
        return None


def _unseen(character: str) -> bool:
    """Whether a character is white space, or one of control or of format."""
    return character.isspace() or unicodedata.category(character) in ("Cc", "Cf")


class Duplicates(Filtering):
    """
    An earlier conversation says the same, but for case and white space. Value: how many came before it.

    Source: the filter "dup" of the pipeline above.
    """

    kind: Literal["duplicates"] = "duplicates"
    same: Literal["conversation", "question"] = "conversation"
    """What is compared: all that is said, or only what the user says first."""

    def test(self) -> Test:
        seen: dict[bytes, int] = {}

        def one(conversation: Conversation) -> Finding | None:
            asked = said_by(conversation, "user")
            parts = (
                asked[:1] if self.same == "question" else [f"{m['role']} {m['content']}" for m in conversation.messages]
            )
            if not parts:
                return None
            plain = "\n".join(" ".join(part.casefold().split()) for part in parts)
            key = hashlib.blake2b(plain.encode(), digest_size=16).digest()
            before = seen[key] = seen.get(key, -1) + 1
            return Finding("duplicates", before) if before else None

        return lambda some: [one(conversation) for conversation in some]


class Decontaminate(Filtering, Sought):
    """
    A conversation holds text of an evaluation task: 13 of its words in a row, or a shorter question whole (see
    `data/overlap.py`). Reason decontaminate.TASK; value: matches.

    Source: the pipeline above, which looked for its benchmarks and for the 309 prompts of its own battery.
    """

    kind: Literal["decontaminate"] = "decontaminate"

    def looking_in(self, paths: Sequence[Path], fields: Sequence[str]) -> "Decontaminate":
        """The same, with its tasks as files."""
        return self.model_copy(update={"files": tuple(paths), "fields": tuple(fields), "tasks": ()})

    def test(self) -> Test:
        assert not self.tasks, "tasks have been written into files before"
        settings = overlap.Settings(
            files=self.files,
            fields=self.fields,
            ngram_words=self.ngram_words,
            min_question_words=self.min_question_words,
        )
        index = overlap.Index.of(settings)

        def look(some: Sequence[Conversation]) -> list[Finding | None]:
            matches: dict[int, list[overlap.Match]] = {}
            for match in index.find([one.text for one in some]):
                matches.setdefault(match.text, []).append(match)
            return [self._found(index, one, matches.get(number, [])) for number, one in enumerate(some)]

        return look

    def _found(self, index: overlap.Index, one: Conversation, matches: Sequence[overlap.Match]) -> Finding | None:
        if not matches:
            return None
        first = min(matches)
        (_, words), *_ = overlap.located(one.text, [(first.word, first.words)])
        return Finding(f"decontaminate.{index.rows[first.row][0]}", len(matches), words)


Filter = (
    Identity | Refusal | Truncated | LengthMismatch | Spam | Leftovers | Blank | Duplicates | Decontaminate
)  # fmt: skip


def sifted(filters: Sequence[Filter], found: Iterable[Conversation]) -> Iterator[Conversation | Dropped]:
    """Conversations in their order, those that a filter finds something in as `Dropped`. Raises DataError."""
    tests = [(one.sources, one.test()) for one in filters]
    waiting = iter(found)
    while some := list(islice(waiting, BATCH)):
        dropped: dict[int, Finding] = {}
        for named, test in tests:
            left = [n for n, one in enumerate(some) if n not in dropped and (not named or one.source in named)]
            findings = zip(left, test([some[n] for n in left]), strict=True)
            dropped |= {n: finding for n, finding in findings if finding is not None}
        for number, one in enumerate(some):
            yield Dropped(one, dropped[number]) if number in dropped else one
