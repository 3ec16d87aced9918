"""
Filters that drop conversations, each with a reason, and the phrases that they look for.

The filters are members of a tagged union. None of them is applied unless a recipe asks for it. The first filter
that matches drops the conversation.

The filters come from the data pipeline of 1386.ai, which finetuned models of 500 M parameters (its fourth mixture).
After filtering, 99.4 % of the answers of its models ended by themselves; before, 54 % did. Lists of phrases in that
pipeline are lists of phrases here, in English and Chinese. Every number is a setting.

Filters and phrases share one file because each phrase list belongs to one filter.
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from bloomery.core.config import Between, Config, PositiveLength, Share, TextLength
from bloomery.data import decontamination
from bloomery.data.chat.formats import Conversation
from bloomery.data.decontamination import Sought
from bloomery.data.dedup import hashing

OTHER_MODELS = (
    *("ChatGPT", "GPT-4", "GPT-3", "GPT-3.5", "GPT4", "GPT", "OpenAI", "Claude", "Anthropic", "Bard", "Gemini"),
    *("PaLM", "LaMDA", "DeepMind", "Bing Chat", "Copilot", "Vicuna", "LMSYS", "Alpaca", "LLaMA", "Koala"),
    *("WizardLM", "Mistral", "Mixtral", "Qwen", "Tongyi", "DeepSeek", "Ernie", "ChatGLM", "Open Assistant"),
    *("Large Model Systems Organization", "通义千问", "文心一言", "智谱"),
)
"""Names that other assistants, and who makes them, are known by."""


def _any(*phrases: str) -> str:
    return f"(?:{'|'.join(phrases)})"


def _compiled(*phrases: str) -> re.Pattern[str]:
    """An apostrophe stands for both kinds of it."""
    return re.compile(_any(*phrases).replace("'", "['’]"), re.IGNORECASE)


AI = _any("ai", "artificial intelligence", r"a\.i\.")
MODEL = _any("language model", "model", "assistant", "chatbot", "system", "program", "developed", "trained", "created")
I_AM = _any(r"\bi am", r"\bi'm")
MACHINE = (
    rf"\b(?:as|being) an? {AI}(?:[,.]| {MODEL}\b| i\b)",
    r"\b(?:as|being) an? (?:large |ai )?language model\b",
    rf"{I_AM} (?:just |only |simply )?an? (?:{AI}|large language model|language model|chatbot)\b",
    r"\bmy (?:training data|knowledge cut-?off)\b",
    r"(?:作为|我是)(?:一[个名款])?(?:人工智能|AI|大?语言模型|大模型|聊天机器人)",
)
"""What tells that the one who speaks is a machine that others made."""


def identity(names: Sequence[str]) -> re.Pattern[str]:
    """What an assistant says that tells of another one, or of being a machine."""
    if not names:
        return _compiled(*MACHINE)
    listed = f"(?:{'|'.join(re.escape(name) for name in sorted(names, key=len, reverse=True))})"
    called = _any(r"\bi am", r"\bi'm", r"\bmy name is", r"\bcall me", r"\brefer to me as", r"\bthis is")
    created = _any("created", "developed", "trained", "made", "built", "designed", "fine-tuned")
    few = r"[^.!?\n]{0,60}?"
    return _compiled(
        *MACHINE,
        rf"{called} (?:an? |the )?{listed}\b",
        rf"{_any('i', 'model', 'assistant', 'ai')}\b{few}\b{created}\b{few}\bby\b{few}\b{listed}",
        rf"我(?:是|叫){listed}",
        rf"由\s?{listed}[^。！？\n]{{0,10}}(?:训练|开发|研发|创建)",
    )


SORRY = _any(r"(?:i'm|i am) (?:very |really |so )?sorry", "sorry", "i apologi[sz]e", "my apologies", "unfortunately")
CANNOT = _any("can't", "cannot", "can not", "am unable to", "am not able to", "won't", "will not", "do not", "don't")
DO = _any(
    *("help", "assist", "provide", "answer", "do that", "fulfil", "fulfill", "comply", "support", "create", "write"),
    *("generate", "engage", "access", "browse", "give", "offer", "have access", "have the ability"),
)
NOT_ABLE = _any("cannot", "can't", "not able", "unable", "do not", "don't")

OPENINGS = {
    "refusal": _compiled(
        rf"{SORRY}[^.!?\n]{{0,80}}\b{NOT_ABLE}\b",
        rf"i {CANNOT} (?:be able to )?{DO}\b",
        r"i'm (?:unable|not able) to\b",
        rf"as an? (?:{AI}|language model|responsible)[^.!?\n]{{0,80}}{NOT_ABLE}",
        r"(?:很)?(?:抱歉|对不起)[，,。]?\s*(?:但|我|作为|无法|这)",
        r"我(?:无法|不能|没有办法)(?:回答|提供|帮助|满足|协助)",
    ),
    "hedge": _compiled(
        r"as of my (?:last|latest|most recent|current) (?:\w+ )?(?:update|training|knowledge)",
        r"(?:it is|it's) (?:difficult|hard|impossible|not possible) to (?:say|determine|answer|know|give)",
        r"there is (?:no|not a) (?:definitive|single|simple|clear|one)[^.!?\n]{0,20}answer",
        r"without (?:more|further|additional|any) (?:context|information|details)",
        r"(?:it is|it's) (?:important|worth) (?:to (?:note|remember|understand|mention)|noting|mentioning)",
        r"i'm not (?:entirely |quite |really |exactly |completely )?sure\b",
        r"(?:截至|截止)(?:到)?我的(?:知识|训练|最后)",
    ),
}
"""How an answer opens that refuses, or that puts off what it says."""

ENDED = re.compile(
    r"(?:[.!?…。！？；”’」』）】》\"')\]}>*_`~|:：;$%°€£¥=+^/\\-]"
    r"|[\U0001F300-\U0001FAFF\u2600-\u27BF][\uFE0F\u200D]*)\s*\Z"
)
"""The end of a text that was finished: a mark, something closed, code, a formula, a smiley."""
ADDRESS = re.compile(r"(?:https?://|www\.)\S")
NUMBER = re.compile(r"[^A-Za-z]*\d(?:st|nd|rd|th|s)?")
"""A last word that ends a text without a mark: with an address in it, or a number, maybe with signs around it."""
LISTED = re.compile(
    r"\s*(?:[-*•+]|\d+[.)]|[a-zA-Z][.)]|\|)\s|\s*#{1,6}\s|\s{4,}\S|\s*https?://|[^.!?\n]{1,40}:\s|.{0,60}\d\W*\Z"
)
"""A last line that need not end in a mark: an item of a list, a heading, code, an address, a name with its value."""

SPAM = _compiled(
    *(r"\bclick (?:here|the link|below)\b", r"\b(?:buy|order|act|call) now\b", r"\blimited[- ]time offer\b"),
    *(r"\bfree (?:trial|shipping|gift)\b", r"\bsubscribe (?:to|now)\b", r"\bfollow us on\b", r"\b100% free\b"),
    *(r"\bsign up (?:now|today)\b", r"\bvisit our (?:website|store|page)\b", r"\bmoney[- ]back guarantee\b"),
    *(r"\b(?:promo(?:tional)?|discount) code\b", r"\bcheap (?:pills|viagra)\b", r"\bmake money (?:fast|online)\b"),
    *(r"\bcasino bonus\b", r"\bwhatsapp (?:me|us)\b", "加微信", "扫码关注", "点击链接", "限时优惠"),
)
LINK = _compiled(r"https?://", r"\bwww\.")
LEFTOVER = re.compile(
    r"#\s?(?:The )?(?:Given|Rewritten|Created|New|Original) Prompt\s?#?"
    r"|\b(?:The )?(?:Given|Rewritten) Prompt#?:"
    r"|#{2,3} ?(?:Instruction|Response|Human|Assistant) ?:"
    r"|<\|(?:im_start|im_end|endoftext|eot_id|assistant|user|system|prompter|end_of_turn)\|>"
    r"|\[/?INST\]|<<SYS>>"
)
"""Marks of prompts, written as they were written there."""


VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
"""What addresses and numbers are written with."""
BATCH = 256
"""Conversations that are looked at together."""


@dataclass(frozen=True)
class ChatFilterHit:
    """Why a conversation is dropped."""

    reason: str
    value: int | float
    """What was measured, against the filter's limit."""
    what: str = ""
    """The words that were found, where it was words."""


@dataclass(frozen=True)
class DroppedConversation:
    conversation: Conversation
    finding: ChatFilterHit


Test = Callable[[Sequence[Conversation]], list[ChatFilterHit | None]]
"""Looks at some conversations, in their order; it may remember those that came before."""


def said_by(conversation: Conversation, role: str) -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] == role]


def num_words(text: str) -> int:
    """Words of a text; of what is written without spaces two characters count as one."""
    if text.isascii():
        return len(text.split())
    alone = hashing.count(text)
    return len(hashing.spaced(text).split()) - alone + alone // 2


class Filtering(Config):
    """What every filter has."""

    sources: tuple[str, ...] = ()
    """The filter examines only conversations of these sources. Empty: all sources."""

    def finding(self, conversation: Conversation) -> ChatFilterHit | None:
        """What is wrong with one conversation by itself."""
        raise NotImplementedError

    def test(self) -> Test:
        """A new test, that has seen nothing yet. Raises DataError where it cannot be made."""
        return lambda some: [self.finding(one) for one in some]


class Identity(Filtering):
    """
    An assistant says that it is, or was made by, somebody else: "as an AI language model", "I am ChatGPT", "trained by
    OpenAI". A model that learns this claims it too. Value: number of such answers.

    Source: 1386.ai, the filter "identity leaks", and the twenty "as an AI" phrases of its first version.
    """

    kind: Literal["identity"] = "identity"
    names: tuple[str, ...] = OTHER_MODELS
    """Names of models and makers that the assistant must not call its own."""

    def test(self) -> Test:
        pattern = identity(self.names)

        def find_hit(conversation: Conversation) -> ChatFilterHit | None:
            matches = [match for said in said_by(conversation, "assistant") if (match := pattern.search(said))]
            return ChatFilterHit("identity", len(matches), matches[0][0]) if matches else None

        return lambda some: [find_hit(conversation) for conversation in some]


class Refusal(Filtering):
    """
    An answer opens with a refusal or a hedge: "I'm sorry, but", "I cannot", "As of my last update". Reasons
    refusal.refusal and refusal.hedge; value: the number of the answer.

    Source: 1386.ai, the filter of openings.
    """

    kind: Literal["refusal"] = "refusal"
    openings: Literal["both", "refusals", "hedges"] = "both"
    """Openings of an answer that drop the conversation."""
    opening_characters: PositiveLength = 160
    """How much of an answer counts as its opening."""

    def finding(self, conversation: Conversation) -> ChatFilterHit | None:
        for number, said in enumerate(said_by(conversation, "assistant"), 1):
            opening = said.lstrip(" \t\n\"'*#>-")[: self.opening_characters]
            for name, pattern in OPENINGS.items():
                if self.openings in ("both", f"{name}s") and (match := pattern.match(opening)):
                    return ChatFilterHit(f"refusal.{name}", number, match[0])
        return None


class Truncated(Filtering):
    """
    An answer stops in mid-sentence or in an unclosed code fence. Such answers do not teach a model where to stop. An
    answer of `min_words` and more stops in mid-sentence if it does not end in a punctuation mark, address or number.
    Value: words of the answer.

    Source: 1386.ai, the filter "truncated answers".
    """

    kind: Literal["truncated"] = "truncated"
    min_words: PositiveLength = 40
    """Shorter answers may end without a mark: names, numbers, titles."""

    def finding(self, conversation: Conversation) -> ChatFilterHit | None:
        for said in said_by(conversation, "assistant"):
            text = said.rstrip()
            if text.count("```") % 2:
                return ChatFilterHit("truncated.code", num_words(text), text[-40:])
            if not _ended(text) and (words := num_words(text)) >= self.min_words:
                return ChatFilterHit("truncated.text", words, text[-40:])
        return None


def _ended(text: str) -> bool:
    """Whether a text without white space behind it came to its end, as far as its last line and word tell."""
    if not text or ENDED.search(text) or LISTED.match(text.rpartition("\n")[2]):
        return True
    word = text.rsplit(None, 1)[-1]
    word = word[len(word.rstrip(VISIBLE)) :]  # of Chinese the last word may be all of a paragraph
    return ADDRESS.search(word) is not None or NUMBER.fullmatch(word) is not None


class LengthMismatch(Filtering):
    """
    A short question with a long answer: the question cannot determine such an answer. Value: words of the answer.

    Source: 1386.ai (questions of fewer than 15 words, answers of more than 200).
    """

    kind: Literal["length_mismatch"] = "length_mismatch"
    min_question_words: TextLength = 15
    """A question of fewer words is short."""
    max_answer_words: PositiveLength = 200
    """Maximum number of words of an answer to a short question."""
    every: bool = False
    """Whether to check all exchanges and not only the first. A later question may depend on earlier ones."""

    def finding(self, conversation: Conversation) -> ChatFilterHit | None:
        asked = 0
        for message in conversation.messages:
            if message["role"] == "user":
                asked += num_words(message["content"])
            elif message["role"] == "assistant":
                words = num_words(message["content"])
                if asked < self.min_question_words and words > self.max_answer_words:
                    return ChatFilterHit("length_mismatch", words)
                if not self.every:
                    return None
                asked = 0
        return None


class Spam(Filtering):
    """
    Advertising, links and repetition. Reasons spam.phrase (value: phrases), spam.links (in 100 words)
    and spam.repetition (share of an answer's lines, or of its runs of four words, that stood in it before).

    Source: 1386.ai, the filter "spam"; shares of repeated runs as in Rae et al. 2021, A1.1.
    """

    kind: Literal["spam"] = "spam"
    max_phrases: TextLength = 1
    """Maximum number of phrases in all messages."""
    max_links: Annotated[float, Between(0, 100, "it counts links in 100 words")] = 5.0
    """Maximum number of links in 100 words of the assistant."""
    max_repeated: Share = 0.5
    """Maximum share of an answer that is repetition."""
    min_words: PositiveLength = 30
    """Minimum number of words of an answer in which the filter looks for links and repetitions."""

    def finding(self, conversation: Conversation) -> ChatFilterHit | None:
        phrases = SPAM.findall(conversation.text)
        if len(phrases) > self.max_phrases:
            return ChatFilterHit("spam.phrase", len(phrases), phrases[0])
        for said in said_by(conversation, "assistant"):
            words = said.split() if said.isascii() else hashing.spaced(said).split()
            if len(words) < self.min_words:
                continue
            links = 100 * len(LINK.findall(said)) / len(words)
            if links > self.max_links:
                return ChatFilterHit("spam.links", round(links, 4))
            repeated = max(_again(list(zip(*(words[n:] for n in range(4)), strict=False))), _again(_lines(said)))
            if repeated > self.max_repeated:
                return ChatFilterHit("spam.repetition", round(repeated, 4))
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

    Source: 1386.ai, the filter "evol_franken".
    """

    kind: Literal["leftovers"] = "leftovers"

    def finding(self, conversation: Conversation) -> ChatFilterHit | None:
        matches = LEFTOVER.findall(conversation.text)
        return ChatFilterHit("leftovers", len(matches), matches[0]) if matches else None


class Blank(Filtering):
    """
    A message that says nothing, or nothing that is seen: U+200B, U+FEFF. An assistant's that a user says nothing to.
    Value: the number of the message.
    """

    kind: Literal["blank"] = "blank"

    def finding(self, conversation: Conversation) -> ChatFilterHit | None:
        for number, message in enumerate(conversation.messages, 1):
            if message["role"] in ("user", "assistant") and all(map(_unseen, message["content"])):
                return ChatFilterHit("blank", number)
        return None


def _unseen(character: str) -> bool:
    """Whether a character is white space, or one of control or of format."""
    return character.isspace() or unicodedata.category(character) in ("Cc", "Cf")


class Duplicates(Filtering):
    """
    An earlier conversation is equal, except for case and white space. Value: number of earlier ones.

    Source: 1386.ai, the filter "dup".
    """

    kind: Literal["duplicates"] = "duplicates"
    same: Literal["conversation", "question"] = "conversation"
    """What to compare: all messages, or only the first message of the user."""

    def test(self) -> Test:
        seen: dict[bytes, int] = {}

        def find_hit(conversation: Conversation) -> ChatFilterHit | None:
            asked = said_by(conversation, "user")
            parts = (
                asked[:1] if self.same == "question" else [f"{m['role']} {m['content']}" for m in conversation.messages]
            )
            if not parts:
                return None
            plain = "\n".join(" ".join(part.casefold().split()) for part in parts)
            key = hashlib.blake2b(plain.encode(), digest_size=16).digest()
            before = seen[key] = seen.get(key, -1) + 1
            return ChatFilterHit("duplicates", before) if before else None

        return lambda some: [find_hit(conversation) for conversation in some]


class DecontaminateChats(Filtering, Sought):
    """
    A conversation holds text of an evaluation task: 13 of its words in a row, or a shorter question whole (see
    `data/decontamination.py`). Reason decontaminate.TASK; value: matches.

    Source: 1386.ai, which looked for its benchmarks and for the 309 prompts of its own test set.
    """

    kind: Literal["decontaminate"] = "decontaminate"

    def looking_in(self, paths: Sequence[Path], fields: Sequence[str]) -> "DecontaminateChats":
        """The same, with its tasks as files."""
        return self.model_copy(update={"files": tuple(paths), "fields": tuple(fields), "tasks": ()})

    def test(self) -> Test:
        assert not self.tasks, "tasks have been written into files before"
        settings = decontamination.OverlapSettings(
            files=self.files,
            fields=self.fields,
            ngram_words=self.ngram_words,
            min_question_words=self.min_question_words,
        )
        index = decontamination.OverlapIndex.of(settings)

        def look(some: Sequence[Conversation]) -> list[ChatFilterHit | None]:
            matches: dict[int, list[decontamination.Match]] = {}
            for match in index.find([one.text for one in some]):
                matches.setdefault(match.text, []).append(match)
            return [self._found(index, one, matches.get(number, [])) for number, one in enumerate(some)]

        return look

    def _found(
        self, index: decontamination.OverlapIndex, conversation: Conversation, matches: Sequence[decontamination.Match]
    ) -> ChatFilterHit | None:
        if not matches:
            return None
        first = min(matches)
        (_, words), *_ = decontamination.located(conversation.text, [(first.word, first.words)])
        return ChatFilterHit(f"decontaminate.{index.rows[first.row][0]}", len(matches), words)


ChatFilter = (
    Identity | Refusal | Truncated | LengthMismatch | Spam | Leftovers | Blank | Duplicates | DecontaminateChats
)  # fmt: skip


def sifted(
    filters: Sequence[ChatFilter], conversations: Iterable[Conversation]
) -> Iterator[Conversation | DroppedConversation]:
    """Conversations in their order; where a filter finds something, a `DroppedConversation`. Raises DataError."""
    tests = [(one.sources, one.test()) for one in filters]
    waiting = iter(conversations)
    while some := list(islice(waiting, BATCH)):
        dropped: dict[int, ChatFilterHit] = {}
        for named, test in tests:
            left = [n for n, one in enumerate(some) if n not in dropped and (not named or one.source in named)]
            findings = zip(left, test([some[n] for n in left]), strict=True)
            dropped |= {n: finding for n, finding in findings if finding is not None}
        for number, conversation in enumerate(some):
            yield DroppedConversation(conversation, dropped[number]) if number in dropped else conversation
