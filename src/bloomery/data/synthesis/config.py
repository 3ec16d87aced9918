"""
Settings of the section [synthesize], question templates, and presets of known categories.

A category of questions is a set of templates with slots. Together they produce every question at most once. A
question is the number of its template and the value of each of its slots. The seed decides which questions come
first, so that a resumed run asks the same questions.

The preset "seed-1386" has the names and weights of 1386.ai (scripts/generate_synthetic.py); its questions are ours.

Settings, templates and presets share one file because a preset is a table of these templates.
"""

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from bloomery.core.bounds import Attempts, Between, Context, PositiveLength, Seed, TokenCount, Weight
from bloomery.core.config import VOLATILE, Config, repeated
from bloomery.data.chat.messages import not_text

SLOT = re.compile(r"\{(\w+)\}")


class Slot(Config):
    name: Annotated[str, Field(pattern=r"^\w+$")]
    values: tuple[str, ...] = Field(min_length=1)


class Category(Config):
    """A kind of question."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    weight: Weight = 1.0
    system: str = ""
    """What the model is told before; it is not part of the conversation that is kept."""
    prompts: tuple[str, ...] = Field(min_length=1)
    """Templates of what a user asks; {name} is filled from the slot of that name."""
    slots: tuple[Slot, ...] = ()
    follow_ups: tuple[tuple[str, ...], ...] = ()
    """What a user says next, turn by turn; of each turn's several, one is drawn."""
    verbatim: bool = False
    """Whether braces in `prompts` are just braces."""

    @model_validator(mode="after")
    def _slots_are_there(self) -> "Category":
        names = [slot.name for slot in self.slots]
        for prompt in self.prompts:
            if missing := next((name for name in _slots(self, prompt) if name not in names), None):
                raise ValueError(f"the prompt {prompt!r} has the slot {missing!r}, and slots has {', '.join(names)}")
        if any(not turn for turn in self.follow_ups):
            raise ValueError("follow_ups has a turn with nothing to say")
        return self


@dataclass(frozen=True)
class ConversationTask:
    """One conversation to ask for."""

    number: int
    category: str
    asks: tuple[str, ...]
    """What the user says, turn by turn."""
    system: str = ""
    document: str = ""
    """The id of the document that it is about."""
    text: str = ""
    """Where the answer is a list of questions: the text that they are about."""
    max_questions: int = 0
    """Above 0, the answer is a list of questions and answers as JSON."""


def tasks(categories: Sequence[Category], seed: int) -> Iterator[ConversationTask]:
    """
    Every question of all categories, each time of the one that is furthest behind its weight. One that has no more
    questions leaves its share to the others.
    """
    left = {category.name: _questions(category, seed) for category in categories}
    weights = {category.name: category.weight for category in categories}
    systems = {category.name: category.system for category in categories}
    given = dict.fromkeys(weights, 0)
    number = 0
    while left:
        name = min(left, key=lambda one: (given[one] + 1) / weights[one])
        asks = next(left[name], None)
        if asks is None:
            del left[name]
            continue
        given[name] += 1
        yield ConversationTask(number, name, asks, systems[name])
        number += 1


def possible(category: Category) -> int:
    """How many different first questions a category has."""
    return sum(_size(category, prompt) for prompt in category.prompts)


def _slots(category: Category, prompt: str) -> list[str]:
    return [] if category.verbatim else list(dict.fromkeys(SLOT.findall(prompt)))


def _size(category: Category, prompt: str) -> int:
    values = {slot.name: len(slot.values) for slot in category.slots}
    return math.prod(values[name] for name in _slots(category, prompt))


def _questions(category: Category, seed: int) -> Iterator[tuple[str, ...]]:
    rng = random.Random(f"{seed} {category.name}")
    total = possible(category)
    order = list(range(total)) if total == len(category.prompts) else rng.sample(range(total), min(total, 10**6))
    for place in order:
        yield (_question(category, place), *(rng.choice(turn) for turn in category.follow_ups))


def _question(category: Category, place: int) -> str:
    for prompt in category.prompts:
        if place < (size := _size(category, prompt)):
            break
        place -= size
    filled: dict[str, str] = {}
    values = {slot.name: slot.values for slot in category.slots}
    for name in _slots(category, prompt):
        place, chosen = divmod(place, len(values[name]))
        filled[name] = values[name][chosen]
    return prompt if category.verbatim else SLOT.sub(lambda found: filled[found[1]], prompt)


def _made(
    name: str,
    weight: float,
    system: str,
    prompts: Sequence[str],
    slots: Mapping[str, Sequence[str]],
    follow_ups: Sequence[Sequence[str]] = (),
) -> Category:
    return Category(
        name=name,
        weight=weight,
        system=system,
        prompts=tuple(prompts),
        slots=tuple(Slot(name=slot, values=tuple(values)) for slot, values in slots.items()),
        follow_ups=tuple(tuple(turn) for turn in follow_ups),
    )


WHO = ("a child of ten", "somebody new to it", "a student", "a busy parent", "a retired teacher", "a sceptic")
LENGTH = ("in one sentence", "in two sentences", "in a short paragraph", "in about a hundred words", "briefly")
THINGS = (
    "compound interest", "photosynthesis", "a vaccine", "inflation", "plate tectonics", "a black hole", "democracy",
    "the water cycle", "natural selection", "a database", "encryption", "the greenhouse effect", "a jury", "GPS",
    "an antibiotic", "the stock market", "a mortgage", "sourdough", "a fossil", "an eclipse", "a recession", "soap",
    "a battery", "a tide", "a dialect", "a patent", "the immune system", "a neural network", "a lens", "a monsoon",
)  # fmt: skip

PRESETS: Mapping[str, tuple[Category, ...]] = {
    "seed-1386": (
        _made(
            "conversational",
            0.20,
            "Answer as a friendly person who is good company: directly, naturally, honestly, and not at length.",
            (
                "Hi! I am {doing}, I am {feeling}, and I have {time}. Any advice?",
                "My {friend} is {doing} and feels {feeling} about it. What could I say?",
                "What does your {friend} find so nice about {hobby}, if you had to guess?",
                "Should I take up {hobby} with my {friend}? We have {time}.",
                "Help me choose between {hobby} and {other} with my {friend} {when}.",
            ),
            {
                "doing": (
                    "moving to a new city", "starting a new job", "learning to cook", "planning a small wedding",
                    "adopting a cat", "going back to school", "trying to sleep better", "training for my first race",
                    "looking for a flat", "giving my first talk", "saving for a trip", "painting a room",
                ),
                "feeling": ("nervous", "excited", "unsure", "tired", "proud", "a little silly"),
                "hobby": (
                    "gardening", "chess", "birdwatching", "pottery", "swimming in lakes", "knitting", "bouldering",
                    "baking", "photography", "playing the ukulele", "hiking", "mending old radios",
                ),
                "other": ("reading", "a museum", "a long walk", "board games", "sleeping in", "visiting friends"),
                "friend": ("sister", "neighbor", "best friend", "uncle", "colleague", "grandmother", "partner", "son"),
                "when": ("on Sunday", "after work", "in the rain", "before the exam", "on my birthday", "this summer"),
                "time": ("an hour a week", "my evenings", "little money", "two small children", "all summer"),
            },
        ),
        _made(
            "general_knowledge",
            0.20,
            "Answer from general knowledge: clearly, accurately, with one interesting detail, and say what is unsure.",
            (
                "What is the history of {subject}, {length}?",
                "How did {subject} reach {country}, and what changed there?",
                "Tell me three facts about {animal} that surprise most people.",
                "How do {animal} differ from {creature}?",
                "What should {who} know about the {aspect} of {country}?",
                "Compare the {aspect} of {country} with that of a neighbor, for {who}, {length}.",
            ),
            {
                "subject": (
                    "paper", "coffee", "the bicycle", "the calendar", "tea", "glass", "the piano", "football", "money",
                    "the compass", "bread", "the printing press", "chess", "the railway", "the telephone", "silk",
                ),
                "animal": ("octopuses", "bees", "crows", "elephants", "bats", "eels", "ants", "wolves", "whales"),
                "creature": ("dogs", "squids", "wasps", "ravens", "mice", "sharks", "termites", "foxes", "seals"),
                "country": (
                    "Portugal", "Vietnam", "Ghana", "Peru", "Norway", "Morocco", "Japan", "Mexico", "Georgia", "Kenya",
                    "New Zealand", "Turkey", "Canada", "Poland", "Indonesia",
                ),
                "aspect": ("food", "music", "climate", "languages", "history", "schools", "landscapes", "trade"),
                "length": LENGTH,
                "who": WHO,
            },
        ),
        _made(
            "factual_qa",
            0.08,
            "Answer the question exactly and shortly.",
            (
                "What is {thing}?",
                "Explain {thing} {length}.",
                "Why does {thing} matter?",
                "How would you explain {thing} to {who}, {length}?",
            ),
            {"thing": THINGS, "length": LENGTH, "who": WHO},
        ),
        _made(
            "reasoning",
            0.12,
            "Think step by step, show each step shortly, and end with the answer on a line of its own.",
            (
                "A train goes {km} km in {hours} hours. How far does it go in {more} hours at the same speed?",
                "{name} has {many} {fruit}, gives away {few} and buys {more} more. How many are left?",
                "A shop takes {percent} % off a coat of {price} euros. What does the coat cost now?",
                "What would happen if {change}? Give the first three consequences.",
                "Give the best argument for and the best against {claim}.",
            ),
            {
                "km": ("120", "150", "210", "240", "300", "360"),
                "hours": ("2", "3"),
                "more": ("4", "5", "6", "7", "9"),
                "name": ("Mia", "Tom", "Ada", "Noor", "Li", "Sam"),
                "fruit": ("apples", "plums", "marbles", "stamps", "coins"),
                "many": ("20", "25", "31", "48"),
                "few": ("3", "8", "12", "17"),
                "percent": ("10", "15", "20", "25", "30"),
                "price": ("40", "60", "80", "120", "200"),
                "change": (
                    "the Earth turned twice as fast", "bees disappeared", "everybody could read minds",
                    "the Moon were gone", "electricity were free", "nobody needed sleep", "oceans were fresh water",
                ),
                "claim": (
                    "a four-day week", "school uniforms", "cities without cars", "homework", "zoos", "nuclear power",
                    "voting at sixteen", "working from home",
                ),
            },
        ),
        _made(
            "creative",
            0.07,
            "Write vividly and simply, without clichés.",
            (
                "Write a story of about {words} words about {figure} who finds {object} in {place}.",
                "Write a poem of eight lines about {scene}.",
                "Describe {scene} through the eyes of {figure}.",
                "Write the first paragraph of a novel that begins with {object}.",
            ),
            {
                "figure": (
                    "a lighthouse keeper", "a tired baker", "a robot gardener", "an old cartographer", "a lost dog",
                    "a night nurse", "a young diver", "a retired magician", "a bus driver",
                ),
                "object": (
                    "a key without a lock", "a letter from the future", "a silent radio", "a map of the sea floor",
                    "a box of seeds", "a clock that runs backwards", "half a photograph", "a red umbrella",
                ),
                "words": ("80", "150", "200"),
                "place": ("an attic", "a desert", "a ship", "the snow", "a museum", "a tram", "a garden", "a dream"),
                "scene": (
                    "a market at dawn", "the last train", "a kitchen after a party", "fog over a harbor",
                    "a library at night", "the first snow", "an empty swimming pool", "rain on a tin roof",
                ),
            },
        ),
        _made(
            "coding",
            0.12,
            "Give a short explanation and then clean code, in Python unless another language is named.",
            (
                "Write a function in {language} that {task}; {wish}.",
                "Write a Python function that {task}, and tests for it; {wish}.",
                "Write {task_in} in {language}; {wish}.",
                "Explain {concept} in Python to {who}, with a small example.",
                "What goes wrong when a program {mistake}, and how is it done right? Explain it to {who}.",
            ),
            {
                "task": (
                    "checks whether a word is a palindrome", "merges two sorted lists", "counts the words of a text",
                    "flattens a nested list", "finds the two numbers of a list with a given sum", "reverses a string",
                    "removes duplicates and keeps the order", "converts Roman numerals", "checks balanced brackets",
                    "groups anagrams", "rotates a matrix", "finds the longest common prefix",
                ),
                "task_in": (
                    "a binary search", "a stack", "a queue", "quicksort", "a program that counts lines of a file",
                    "the sieve of Eratosthenes", "a linked list", "the greatest common divisor",
                ),
                "wish": (
                    "say what it costs in time and memory", "keep it as short as you can", "comment each step",
                    "name the edge cases", "avoid libraries", "begin with the idea", "show it at work",
                ),
                "who": WHO,
                "language": ("JavaScript", "C", "Rust", "Go", "Java", "Bash", "SQL where it is possible"),
                "concept": (
                    "recursion", "a generator", "a closure", "a decorator", "a context manager", "inheritance",
                    "the difference between a list and a tuple", "async and await", "exceptions", "a dataclass",
                ),
                "mistake": (
                    "compares floats with ==", "changes a list while it walks over it", "opens files without closing",
                    "catches every exception", "has a list as default argument", "builds SQL by joining strings",
                ),
            },
        ),
        _made(
            "multi_turn",
            0.10,
            "Answer in a conversation: shortly, completely, and with what was said before in mind.",
            (
                "Can you help me to explain {thing} to {who}, {length}?",
                "I have to explain {thing} to {who}. How do I begin?",
                "How does {who} learn {skill} in {time}?",
            ),
            {
                "thing": THINGS,
                "who": WHO,
                "length": LENGTH,
                "time": ("a week", "a month", "a year", "ten minutes a day", "one afternoon"),
                "skill": (
                    "to draw", "a language", "to swim", "to program", "to sing", "to juggle", "statistics", "to sew",
                    "to speak in public", "to bake bread", "to invest a little money", "to write well",
                ),
            },
            (
                (
                    "Can you give me an example?", "What do beginners get wrong about it?", "Why is that so?",
                    "I do not understand the middle part. Can you say it in another way?",
                ),
                (
                    "Thanks! Now say the most important thing in one sentence.", "What should I look at next?",
                    "Is there a good comparison with something from daily life?",
                ),
            ),
        ),
        _made(
            "summarization",
            0.03,
            "Summarize clearly: the points that matter, nothing else.",
            ("Summarize for {who} what is known about {thing}, {length}.", "What are the main points about {thing}?"),
            {"thing": THINGS, "length": LENGTH, "who": WHO},
        ),
        _made(
            "instruction_following",
            0.08,
            "Follow the instruction to the letter: number, length, format and forbidden words.",
            (
                "List exactly {number} reasons why {claim}. Number them.",
                "Explain {thing} in exactly {number} sentences.",
                "Compare {thing} with {second} in a table of {number} rows.",
                "Describe {thing} without using the word “{word}”.",
                "Give a definition of {thing} in at most {words} words.",
            ),
            {
                "number": ("2", "3", "4", "5", "7"),
                "claim": (
                    "sleep matters", "reading is good for children", "walking helps thinking", "teams need trust",
                    "trees cool cities", "spare parts save money", "music helps memory",
                ),
                "thing": THINGS,
                "second": ("a river", "a clock", "a recipe", "a library", "an orchestra", "a beehive"),
                "word": ("is", "the", "very", "people", "thing"),
                "words": ("10", "15", "20", "25"),
            },
        ),
    )
}  # fmt: skip


Dollars = Annotated[float, Between(0, 1e6, "nobody asks for more")]

ReadingEase = Annotated[float, Between(-10_000, 10_000, "Flesch's reading ease of a text ends at 121")]


class TokenPrice(Config):
    """Of a million tokens, as the page of the provider says. Prices change, so none is known here."""

    input_dollars: Dollars
    output_dollars: Dollars


class Anthropic(Config):
    """The API of Anthropic, through its own client; needs `pip install 'bloomery[anthropic]'`."""

    kind: Literal["anthropic"] = "anthropic"
    model: str = Field("claude-haiku-4-5", min_length=1)
    address: str | None = Field(None, json_schema_extra=VOLATILE)
    """Another address than the client's own, such as that of a gateway."""
    key_variable: str = Field("ANTHROPIC_API_KEY", min_length=1, json_schema_extra=VOLATILE)
    """The environment variable that holds the key."""
    price: TokenPrice | None = Field(None, json_schema_extra=VOLATILE)

    @model_validator(mode="after")
    def _is_an_address(self) -> "Anthropic":
        _check_address(self.address)
        return self


class OpenAI(Config):
    """A server that speaks OpenAI's protocol: Ollama, vLLM, llama.cpp, `bloomery serve` and many providers."""

    kind: Literal["openai"] = "openai"
    model: str = Field(min_length=1)
    address: str = "http://127.0.0.1:11434/v1"
    """The part before /chat/completions. By default Ollama on this machine."""
    key_variable: str = Field("", json_schema_extra=VOLATILE)
    """The environment variable that holds the key; empty for a server that needs none."""
    price: TokenPrice | None = Field(None, json_schema_extra=VOLATILE)
    limit_field: Literal["max_tokens", "max_completion_tokens"] = Field("max_tokens", json_schema_extra=VOLATILE)
    """What the server calls the longest answer: newer models of OpenAI take only the second."""

    @model_validator(mode="after")
    def _is_an_address(self) -> "OpenAI":
        _check_address(self.address)
        return self


def _check_address(address: str | None) -> None:
    if address is not None and not address.startswith(("http://", "https://")):
        raise ValueError(f"address {address!r} does not begin with http:// or https://")


Provider = Annotated[Anthropic | OpenAI, Field(discriminator="kind")]

Mode = Literal["summary", "key_points", "questions", "harder", "simpler"]


class Augment(Config):
    """
    Conversations about the documents of this run, after [dedup]: the ROCm fork's modes.

    harder and simpler rewrite a document, and take those that are easy or hard to read: by Flesch's reading ease
    (1948, https://doi.org/10.1037/h0057532) above `easy_from` and below `hard_below`. It is meant for English.
    """

    modes: tuple[Mode, ...] = Field(("summary", "key_points", "questions", "harder", "simpler"), min_length=1)
    """In turn, one for each document; a document that a mode cannot take gets the next one that can."""
    domains: tuple[str, ...] = ()
    """None named: all."""
    max_characters: Annotated[int, Between(200, 10**9, "less says nothing, and no model reads more")] = 4000
    """Longer documents are cut at the end of a paragraph, or else of a word."""
    min_words: PositiveLength = 50
    """Shorter documents are left out."""
    words_per_question: PositiveLength = 200
    max_questions: Annotated[int, Between(1, 1000, "no answer holds more")] = 5
    easy_from: ReadingEase = 80.0
    hard_below: ReadingEase = 60.0


ProviderTemperature = Annotated[
    float, Between(1e-3, 2, "providers take no more", "logits are divided by it", or_zero=True)
]
Connections = Annotated[int, Between(1, 256, "each is a thread and a connection")]


class Synthesize(Config):
    """Conversations written by another model. Off: a key in the environment alone never spends money."""

    enabled: bool = False
    provider: Provider | None = None
    """Who is asked."""
    topics: tuple[str, ...] = ()
    """Questions to ask as they are, each once."""
    categories: tuple[Category, ...] = ()
    """Questions made of templates, in the proportion of their weights."""
    preset: Literal["seed-1386"] | None = None
    """Categories with the names and weights of 1386.ai, and questions of our own."""
    augment: Augment | None = None
    count: Annotated[int, Between(1, 10**8, "each is a request")] = 100
    """Conversations to have. A document that brings several questions may exceed it by a few."""
    max_answer_tokens: Context = 512
    """Of one turn. A longer answer comes cut, and is not kept."""
    temperature: ProviderTemperature | None = None
    """None: as the provider has it."""
    max_tokens: TokenCount = 100_000
    """Budget for all that is read and written. A request that could exceed it is not made."""
    max_dollars: Annotated[float, Between(1e-6, 1e9, "no request costs less, and nobody has more")] | None = None
    """The same in dollars; it needs the provider's `price`."""
    seed: Seed = 0
    concurrency: Connections = Field(4, json_schema_extra=VOLATILE)
    """Requests under way at once."""
    attempts: Attempts = Field(6, json_schema_extra=VOLATILE)
    """Of a request that fails for now (429, 5xx, broken connections), with growing waits or as long as asked."""
    timeout_seconds: Annotated[float, Between(1e-3, 86_400, "a day is 86,400 seconds", "no server answers sooner")] = (
        Field(120.0, json_schema_extra=VOLATILE)
    )
    """Of a request. With kind = "anthropic", where its client measures, from one piece of the answer to the next."""

    def needs(self, after: tuple[str, ...]) -> tuple[str, ...]:
        return after if self.enabled and self.augment is not None else ()

    @property
    def named(self) -> tuple[Category, ...]:
        """All categories, with those of the preset and the topics."""
        asked = (Category(name="topics", prompts=self.topics, verbatim=True),) if self.topics else ()
        return (*PRESETS.get(self.preset or "", ()), *self.categories, *asked)

    @model_validator(mode="after")
    def _somebody_can_be_asked_something(self) -> "Synthesize":
        if not self.enabled:
            return self
        if self.provider is None:
            raise ValueError('provider says who is asked: { kind = "anthropic" } or { kind = "openai", model = "…" }')
        if not self.named and self.augment is None:
            raise ValueError("nothing to ask for: name topics, categories, a preset, or augment")
        if self.named and self.augment is not None:
            raise ValueError("augment asks about documents, topics and categories do not; take one of the two")
        for category in self.named:
            for text in (*category.prompts, category.system):
                if (problem := not_text(text, f"a question or system message of {category.name!r}")) is not None:
                    raise ValueError(f"{problem.what}: {text[:40]!r}")
        names = [category.name for category in self.named]
        if twice := repeated(names):
            raise ValueError(f"two categories have the name {twice[0]!r}")
        if self.max_dollars is not None and self.provider.price is None:
            raise ValueError(f"max_dollars={self.max_dollars} needs provider.price, the dollars of a million tokens")
        return self
