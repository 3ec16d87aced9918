"""Known categories. "seed-1386" has the names and weights of 1386.ai (scripts/generate_synthetic.py), our questions."""

from collections.abc import Mapping, Sequence

from bloomery.data.synthesis.prompts import Category, Slot


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
