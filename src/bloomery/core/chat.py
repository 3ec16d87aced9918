"""
Messages of a chat with their roles, and how an answer is sampled.

Sampling settings and their limits are the same from the command line and HTTP to the engine. The default temperature
applies wherever nobody sets another: in chat, over HTTP, in evaluation, and in exported models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, get_args

from bloomery.core.errors import MAX_SEED, MAX_TEMPERATURE, MAX_TOKENS, DataError, shorten

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)
REASONING = ("reasoning_content", "reasoning", "thinking")
"""What data sets and chat templates call the reasoning of a message: Qwen3 the first, gpt-oss the last."""


class Message(TypedDict):
    role: Role
    content: str
    reasoning: NotRequired[str]
    """What an assistant thinks before it answers. Only some chat templates write it."""
    train: NotRequired[bool]
    """False: no token of the message is in the loss."""


class ToolMessage(Message, total=False):
    """A message with the parts that only templates made for tools write. Arguments of calls are JSON data."""

    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str


def message_problem(value: object) -> str:
    """Why a value is no message, and what it has to be, or ""."""
    if not isinstance(value, Mapping) or not {"role", "content"} <= value.keys():
        return "has no role and content"
    role, content = value["role"], value["content"]
    if role not in ROLES:
        return f"has the role {role!r}; roles are {', '.join(ROLES)}"
    if not isinstance(content, str):
        return f"has {type(content).__name__} as its content, not text"
    if (index := lone_surrogate(content)) is not None:
        return f"holds half a surrogate pair at character {index}; write it as one character, or leave it out"
    return ""


def check_messages(messages: Sequence[Message]) -> None:
    """Raises DataError for the first message that is none."""
    for number, message in enumerate(messages, 1):
        if what := message_problem(message):
            raise DataError(what, where=f"message {number}")


def as_message(value: Mapping[str, Any]) -> Message:
    """The message that a mapping without a `message_problem` is."""
    return Message(role=value["role"], content=value["content"])


class BadCharacter(NamedTuple):
    """A character that no text may hold: a stable reason, its position, and a sentence."""

    reason: str
    position: int
    what: str


def bad_character(content: str, whose: str = "") -> BadCharacter | None:
    """
    Why no message that is read can hold this content, by the rule for documents: a NUL, or half a surrogate pair.

    A renderer writes NUL all the same: an untrained model says it.
    """
    subject = f"{whose} " if whose else ""
    if (nul := content.find("\0")) >= 0:
        return BadCharacter("binary", nul, f"{subject}holds a NUL at character {nul}: this is not text")
    if (index := lone_surrogate(content)) is not None:
        return BadCharacter("not_unicode", index, f"{subject}holds half a surrogate pair at character {index}")
    return None


def lone_surrogate(text: str) -> int | None:
    """The index of half a surrogate pair, which JSON can spell and UTF-8 cannot hold; None where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


TEMPERATURE = 0.7
"""A small model of natural text that takes the most likely token each time often repeats itself, and does not end."""
MAX_BIASES, MAX_BIAS = 1024, 100.0
"""Entries of a logit bias, and the size of each."""

TemplateName = Literal["bloomery", "chatml", "llama3", "user-assistant", "baichuan2"]
"""Of the chat templates that come with Bloomery: tokenizer/chat_template.py."""
LIMITS: dict[str, tuple[float, float]] = {
    "max_tokens": (0, MAX_TOKENS),
    "temperature": (0, MAX_TEMPERATURE),
    "top_k": (0, MAX_TOKENS),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "penalty_window": (0, MAX_TOKENS),
    "no_repeat_ngram": (0, 1024),
    "seed": (-MAX_SEED - 1, MAX_SEED),
}
"""The least and the largest value of each number. A server and a recipe may take less."""
ABOVE_ZERO = ("typical_p",)
"""Shares of which 0 would leave no token."""


LONGEST_ANSWER = 4096
"""Tokens of a server's answer in a conversation that sets no `max_tokens`, if context and memory allow so many."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How each next token is chosen, and when to stop. Raises DataError for a value out of its limits."""

    max_tokens: int = 512
    """Of the answer. A server takes LONGEST_ANSWER in a conversation that sets none."""
    temperature: float = TEMPERATURE
    """Logits are divided by it. 0 takes the most likely token each time."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probabilities reach p; 0: take the most likely one."""
    min_p: float = 0.0
    """Sample from the tokens whose probability is at least this share of the highest; 0: from all."""
    typical_p: float = 1.0
    """Sample from the tokens nearest to the expected surprise whose probabilities reach p; above 0. 1: from all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that occurred are divided by it, or multiplied where below 0. 1: unchanged."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occurred."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it occurred."""
    penalty_window: int = 0
    """The three penalties count the last so many tokens of prompt and answer; 0: all."""
    no_repeat_ngram: int = 0
    """No sequence of so many tokens occurs twice in prompt and answer; 0: any may."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token IDs, and what is added to the logit of each: from -100 to 100, for at most 1,024 tokens."""
    seed: int | None = None
    """None: a new one each time."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer and are not in it. They are looked for where token IDs become text."""
    unset: frozenset[str] = field(default=frozenset(), compare=False)
    """Fields that nobody has set: what the makers of a model recommend replaces them."""

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and (name not in ABOVE_ZERO or value > 0)):
                least = "above 0" if name in ABOVE_ZERO else f"at least {low:,}"
                raise DataError(f"must be {least} and at most {high:,}, got {value}", where=name)
        if len(self.logit_bias) > MAX_BIASES:
            what = f"has {len(self.logit_bias):,} tokens; the limit is {MAX_BIASES:,}"
            raise DataError(what, where="logit_bias", hint="Remove the smallest biases.")
        biased = [id for id, _ in self.logit_bias]
        if len(set(biased)) < len(biased):
            twice = next(id for id in biased if biased.count(id) > 1)
            raise DataError(f"names token {twice} twice", where="logit_bias", hint="List each token once.")
        for id, bias in self.logit_bias:
            if not (0 <= id < MAX_TOKENS and -MAX_BIAS <= bias <= MAX_BIAS):
                hint = f"Use an ID from 0 to {MAX_TOKENS - 1:,} and a bias from -100 to 100."
                raise DataError(f"has the bias {bias} for token {id}", where="logit_bias", hint=hint)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "SamplingConfig":
        """What is set, where None stands for nothing; the other fields are `unset`."""
        known = {name: value for name, value in settings.items() if value is not None}
        return cls(**known, unset=frozenset(one.name for one in fields(cls) if one.name not in known))

    def recommended(self, settings: Mapping[str, Any]) -> "SamplingConfig":
        """The same, with the settings that the makers of a model recommend where nothing else is set."""
        return replace(
            self, **{name: value for name, value in settings.items() if name in self.unset}, unset=frozenset()
        )

    @classmethod
    def greedy(cls, max_tokens: int) -> "SamplingConfig":
        """The most likely token each time."""
        return cls(max_tokens=max_tokens, temperature=0.0)


def sampling_of(
    generation: Mapping[str, Any],
    where: str = "generation_config.json",
    *,
    keys: Mapping[str, str] = MappingProxyType({}),
    hint: str = "Correct or remove it.",
) -> dict[str, float]:
    """
    The settings of SamplingConfig that a generation_config.json names. `do_sample` false means temperature 0.

    Raises DataError for a value that is no number, or out of its limits. The error names the file `where`, the key, and
    its fix; `keys` are other names that the file has for keys.
    """
    names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")}
    names["no_repeat_ngram_size"] = "no_repeat_ngram"
    whole = ("top_k", "no_repeat_ngram_size")
    if generation.get("do_sample") is False:
        generation = {**generation, "temperature": 0.0}
    named = dict[str, Any]()
    for name, ours in names.items():
        if (value := generation.get(name)) is None:
            continue
        key, is_part = keys.get(name, name), name in whole and isinstance(value, float) and not value.is_integer()
        if isinstance(value, bool) or not isinstance(value, int | float) or is_part:
            raise DataError(f"{key} must be a number, got {shorten(repr(value))}", where=where, hint=hint)
        if name in ("top_p", "typical_p") and value <= 0:
            continue  # some programs write that for "off"
        named[ours] = max(0, int(value)) if name in whole else value
        try:
            SamplingConfig(**{ours: named[ours]})
        except DataError as error:
            raise DataError(f"{key} {error.what}", where=where, hint=hint) from None
    return named
