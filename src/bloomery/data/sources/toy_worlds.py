"""
Generates toy texts and chats with checkable answers: stories, sums and library facts.

A world is a few facts. It becomes a document that states them, or a conversation of several turns that asks about
them. The answer to each question follows from the facts alone.

Some facts are kept for validation. The hash of the fact selects them, not the seed. They are of three kinds. The
first is which object is at which location or with whom. The second is which two numbers are added or compared. The
third is which library names are asked about together. No document and no training conversation of any seed states a
validation fact. Each validation question asks for a validation fact. So no validation question ever occurs as text.
Nor does its answer, except for the library's.

The questions about the library test copying and nothing else. A name is in its module whatever stands next to it,
so the answers do occur in training. A longer list there may hold all names of a validation list. A conversation has
three names, a document four to seven.

The library facts are true in every supported Python version.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

PEOPLE = "Ada Ben Cleo Dan Eva Finn Gina Hugo Ida Jon Kim Leo Mia Noah Olga Paul Rosa Sam Tom Zoe".split()

THINGS = (
    "apple bag ball basket bell book bottle box coat coin cup drum hammer hat key knife lamp letter map mirror "
    "ring rope shoe spoon"
).split()

PLACES = (
    "aboard ashore away backstage downstairs home indoors inside nearby outdoors outside overhead underground upstairs"
).split()

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "argparse": ("ArgumentParser", "Namespace", "FileType"),
    "ast": ("parse", "unparse", "walk"),
    "binascii": ("hexlify", "unhexlify"),
    "bisect": ("insort",),
    "calendar": ("isleap", "monthrange", "weekday"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
    "contextlib": ("closing", "contextmanager", "suppress", "nullcontext"),
    "copy": ("deepcopy", "copy"),
    "csv": ("DictReader", "DictWriter", "writer"),
    "datetime": ("timedelta", "timezone", "date"),
    "difflib": ("SequenceMatcher", "ndiff"),
    "fnmatch": ("fnmatch", "translate", "fnmatchcase"),
    "fractions": ("Fraction",),
    "functools": ("partial", "reduce", "wraps"),
    "getpass": ("getpass", "getuser"),
    "glob": ("glob", "iglob"),
    "gzip": ("GzipFile", "compress", "decompress"),
    "heapq": ("heapify", "heappop", "heappush", "nlargest", "nsmallest"),
    "hmac": ("digest",),
    "html": ("escape", "unescape"),
    "inspect": ("getdoc", "getmembers", "getsource", "signature"),
    "itertools": ("accumulate", "chain", "combinations", "cycle", "groupby", "islice", "permutations", "product"),
    "json": ("JSONDecoder", "JSONEncoder", "dumps", "loads"),
    "keyword": ("iskeyword", "kwlist"),
    "linecache": ("checkcache", "clearcache", "getline"),
    "locale": ("getlocale", "setlocale", "strcoll"),
    "math": ("ceil", "factorial", "floor", "gcd", "hypot", "isclose", "sqrt"),
    "operator": ("attrgetter", "itemgetter", "methodcaller"),
    "os": ("getcwd", "listdir", "makedirs", "remove", "rename"),
    "pathlib": ("Path", "PurePath", "PosixPath"),
    "platform": ("machine", "processor", "uname"),
    "pprint": ("PrettyPrinter", "pformat", "pprint"),
    "queue": ("LifoQueue", "PriorityQueue", "SimpleQueue"),
    "random": ("choice", "randint", "sample", "shuffle", "uniform"),
    "re": ("findall", "finditer", "fullmatch", "sub"),
    "secrets": ("choice",),
    "shlex": ("join", "quote", "split"),
    "shutil": ("copyfile", "copytree", "move", "rmtree", "which"),
    "signal": ("alarm", "pause"),
    "socket": ("gethostname", "socketpair"),
    "statistics": ("mean", "median", "mode", "stdev", "variance"),
    "string": ("Formatter", "Template", "capwords"),
    "struct": ("calcsize", "pack", "unpack"),
    "subprocess": ("Popen", "run"),
    "tempfile": ("NamedTemporaryFile", "TemporaryDirectory", "mkdtemp", "mkstemp"),
    "textwrap": ("dedent", "fill", "indent", "shorten", "wrap"),
    "threading": ("Barrier", "Condition", "Event", "Lock", "Semaphore", "Thread"),
    "time": ("monotonic", "sleep", "strftime"),
    "tokenize": ("untokenize",),
    "types": ("MappingProxyType", "MethodType", "SimpleNamespace"),
    "unicodedata": ("category", "lookup", "normalize"),
    "weakref": ("WeakKeyDictionary", "WeakSet", "finalize", "proxy"),
    "zipfile": ("ZipFile", "ZipInfo"),
    "zlib": ("compressobj", "decompressobj"),
}
"""Public names of modules of the standard library."""


LARGEST = 49
"""Operands of a sum lie between 0 and this."""
HELD_OUT_OF = 10
"""One fact in this many is kept for validation."""

WorldSplit = Literal["train", "held out"]
WorldFact = tuple[str, ...]


@dataclass(frozen=True)
class WorldTurn:
    question: str
    answer: str
    kind: str
    fact: WorldFact
    """What the answer states; it decides whether the turn is kept for validation."""


@dataclass(frozen=True)
class WorldConversation:
    """A context that opens the first question, and turns that follow from it."""

    context: str
    turns: tuple[WorldTurn, ...]

    def messages(self) -> list[dict[str, str]]:
        """As role and content, the last message being the last answer."""
        listed = []
        for number, turn in enumerate(self.turns):
            opening = f"{self.context} {turn.question}" if number == 0 and self.context else turn.question
            listed += [{"role": "user", "content": opening}, {"role": "assistant", "content": turn.answer}]
        return listed

    @property
    def kind(self) -> str:
        """Of the last turn, and whether it came alone or after others."""
        return self.turns[-1].kind + ("" if len(self.turns) == 1 else ", later turn")


def is_held_out(fact: WorldFact) -> bool:
    """Whether a fact is kept from all training text, in every run alike. The empty fact never is."""
    if not fact:
        return False
    digest = hashlib.sha256("\0".join(fact).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_OF == 0


def documents(seed: int, count: int, first: int = 0) -> Iterator[str]:
    """
    Texts about worlds: a story and its end, a page of sums or of numbers compared, or a note on the library each.

    Those that have the numbers `first` to `count` - 1; each depends on its number and the seed alone.
    """
    for index in range(first, count):
        rng = random.Random(f"document {seed} {index}")
        yield rng.choices((_story_text, _sums_text, _numbers_text, _library_text), weights=(5, 4, 2, 2))[0](rng)


def conversations(seed: int, count: int, split: WorldSplit = "train") -> Iterator[WorldConversation]:
    """
    Conversations of one to four turns. In the split "held out" the last turn asks for a validation fact; in "train" no
    turn does.
    """
    done, index = 0, 0
    while done < count:
        rng = random.Random(f"{split} {seed} {index}")
        index += 1
        make = rng.choices((_story, _sums, _numbers, _library), weights=(6, 4, 2, 2))[0]
        talk = make(rng, rng.choices((1, 2, 3, 4), weights=(3, 3, 3, 2))[0], split == "held out")
        if talk is not None:
            done += 1
            yield talk


# --- stories -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Move:
    """A person has brought the object of the story to a location."""

    person: str
    location: str


def _moves(rng: random.Random, item: str, count: int) -> list[_Move]:
    """Moves of one object by different people to different locations. No move is a validation fact."""
    people = [person for person in PEOPLE if not is_held_out(("who", item, person))]
    places = [place for place in PLACES if not is_held_out(("where", item, place))]
    pairs = zip(rng.sample(people, count), rng.sample(places, count), strict=True)
    return [_Move(person, place) for person, place in pairs]


def _tell(item: str, moves: Sequence[_Move]) -> str:
    first = f"Today {moves[0].person} put the {item} {moves[0].location}."
    return " ".join([first, *(f"Then {move.person} took it {move.location}." for move in moves[1:])])


def _asked(item: str, moves: Sequence[_Move], which: str) -> WorldTurn:
    """One of four questions about a story as it stands: where the thing is or was first, who had it last or first."""
    first, last = moves[0], moves[-1]
    match which:
        case "where now":
            return WorldTurn(
                f"Where is the {item} now?",
                f"The {item} is {last.location} now.",
                which,
                ("where", item, last.location),
            )
        case "where first":
            answer = f"The {item} was {first.location} first."
            return WorldTurn(f"Where was the {item} first?", answer, which, ("where", item, first.location))
        case "who last":
            return WorldTurn(
                f"Who had the {item} last?", f"{last.person} had the {item} last.", which, ("who", item, last.person)
            )
        case _:
            answer = f"{first.person} had the {item} first."
            return WorldTurn(f"Who had the {item} first?", answer, "who first", ("who", item, first.person))


QUESTIONS = ("where now", "where first", "who last", "who first")


def _story(rng: random.Random, num_turns: int, held_out: bool) -> WorldConversation | None:
    """An object changes hands; the questions ask where it is and was. It may move between the questions."""
    item = rng.choice(THINGS)
    moves = _moves(rng, item, rng.randint(1, 4))
    which = rng.choice(QUESTIONS)
    more = num_turns > 1 and rng.random() < 0.4
    index = -1 if more or which.endswith(("now", "last")) else 0
    asks = "where now" if more else which
    if held_out:
        changed = _with_held_out(rng, item, moves, index, asks)
        if changed is None:
            return None
        moves = changed
    earlier = moves[:-1] if more and len(moves) > 1 else moves
    more = len(earlier) < len(moves)
    turns = [_asked(item, earlier, _safe(rng, item, earlier)) for _ in range(num_turns - 1)]
    turns.append(_asked(item, moves, asks))
    if more:
        move, asked = moves[-1], turns[-1]
        question = f"Then {move.person} took it {move.location}. {asked.question}"
        turns[-1] = WorldTurn(question, asked.answer, asked.kind, asked.fact)
    return WorldConversation(_tell(item, earlier), tuple(turns))


def _safe(rng: random.Random, item: str, moves: Sequence[_Move]) -> str:
    """A question about a training fact. There always is one: at most one fact of a story can be a validation fact."""
    return rng.choice([which for which in QUESTIONS if not is_held_out(_asked(item, moves, which).fact)])


def _with_held_out(rng: random.Random, item: str, moves: Sequence[_Move], index: int, asks: str) -> list[_Move] | None:
    """The moves, with a new person or location in the move asked about: a validation fact. None if there is none."""
    kind = asks.split()[0]
    used = {move.person for move in moves} | {move.location for move in moves}
    some = [x for x in (PLACES if kind == "where" else PEOPLE) if x not in used and is_held_out((kind, item, x))]
    if not some:
        return None
    changed, old = list(moves), moves[index]
    new = rng.choice(some)
    changed[index] = _Move(old.person, new) if kind == "where" else _Move(new, old.location)
    return changed


def _story_text(rng: random.Random) -> str:
    """A story, and what is true at its end."""
    item = rng.choice(THINGS)
    moves = _moves(rng, item, rng.randint(1, 5))
    turns = [_asked(item, moves, which) for which in rng.sample(QUESTIONS, len(QUESTIONS))]
    asked = rng.random() < 0.5
    return " ".join([_tell(item, moves), *(f"{t.question} {t.answer}" if asked else t.answer for t in turns)])


# --- sums ----------------------------------------------------------------------------------------------------------


def sum_of(a: int, b: int) -> WorldTurn:
    """
    The sum of a and b. Two-digit numbers are added with the last digits first, as at school.

    The fact is the same for b plus a. Sums of one-digit numbers are never validation facts: other sums build on them.
    """
    fact: WorldFact = ("plus", str(min(a, b)), str(max(a, b)))
    if a < 10 and b < 10:
        return WorldTurn(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.", "sum", ())
    steps = f"{a % 10} plus {b % 10} is {a % 10 + b % 10}, so {a} plus {b} is {a + b}."
    return WorldTurn(f"What is {a} plus {b}?", steps, "sum", fact)


def _sums(rng: random.Random, num_turns: int, held_out: bool) -> WorldConversation | None:
    """A sum, then sums that each start from the last result."""
    turns: list[WorldTurn] = []
    result = -1
    for number in range(num_turns):
        a = result if 0 <= result <= LARGEST else rng.randint(0, LARGEST)
        b = rng.randint(0, LARGEST if a != result else 9)
        turn = sum_of(a, b)
        if is_held_out(turn.fact) != (held_out and number == num_turns - 1):
            return None
        turns.append(turn if a != result else WorldTurn(f"Now add {b}.", turn.answer, turn.kind, turn.fact))
        result = a + b
    return WorldConversation("", tuple(turns))


def _sums_text(rng: random.Random) -> str:
    pairs = [(rng.randint(0, LARGEST), rng.randint(0, LARGEST)) for _ in range(rng.randint(5, 9))]
    turns = [turn for turn in (sum_of(a, b) for a, b in pairs) if not is_held_out(turn.fact)]
    return " ".join(turn.answer[0].upper() + turn.answer[1:] for turn in turns)


def _larger(a: int, b: int) -> WorldTurn:
    """Which of two different numbers is larger. The fact is the same in either order."""
    low, high = sorted((a, b))
    return WorldTurn(
        f"Which is larger, {a} or {b}?", f"{high} is larger than {low}.", "larger", ("larger", str(low), str(high))
    )


def _numbers(rng: random.Random, num_turns: int, held_out: bool) -> WorldConversation | None:
    """Pairs of numbers, the later ones with the winner of the one before."""
    turns: list[WorldTurn] = []
    a = rng.randint(0, 99)
    for number in range(num_turns):
        turn = _larger(a, rng.choice([n for n in range(100) if n != a]))
        if is_held_out(turn.fact) != (held_out and number == num_turns - 1):
            return None
        question = turn.question if not turns else turn.question.replace("Which is larger,", "And")
        turns.append(WorldTurn(question, turn.answer, turn.kind, turn.fact))
        a = int(turn.fact[2])
    return WorldConversation("", tuple(turns))


def _numbers_text(rng: random.Random) -> str:
    turns = [_larger(*rng.sample(range(100), 2)) for _ in range(rng.randint(6, 10))]
    return " ".join(turn.answer for turn in turns if not is_held_out(turn.fact))


# --- the library ---------------------------------------------------------------------------------------------------


def _library(rng: random.Random, num_turns: int, held_out: bool) -> WorldConversation | None:
    """A few names and the modules they are in; the questions ask which module has a name."""
    modules = rng.sample(sorted(FUNCTIONS), rng.randint(2, 3))
    pairs = [(rng.choice(FUNCTIONS[module]), module) for module in modules]
    listing = ("library", *sorted(name for name, _ in pairs))
    if len(set(listing)) < len(listing) or is_held_out(listing) != held_out:
        return None
    context = "In Python, you find " + _and([f"{name} in {module}" for name, module in pairs]) + "."
    asked = [rng.choice(pairs) for _ in range(num_turns)]
    turns = [
        WorldTurn(f"Where is {name}?", f"You find {name} in {module}.", "library", listing) for name, module in asked
    ]
    return WorldConversation(context, tuple(turns))


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _library_text(rng: random.Random) -> str:
    """Some names and their modules, and then the same once more in another order."""
    pairs = [(name, module) for module in rng.sample(sorted(FUNCTIONS), 8) for name in FUNCTIONS[module]]
    some = rng.sample(pairs, min(len(pairs), rng.randint(4, 7)))
    again = rng.sample(some, len(some))
    first, second = ([f"{name} in {module}" for name, module in listed] for listed in (some, again))
    return f"In Python, you find {_and(first)}. So you find {_and(second)}."
