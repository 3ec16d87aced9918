"""
Damaged copies of documents, as text that a classifier shall learn to turn away when nobody has labeled any.

A copy is about as long as its original and keeps its lines and indentation where it can: what is to be learned is the
damage, not the length or the shape. All of it is a function of the text, the kind and a seed.
"""

import hashlib
import random
import re
from collections.abc import Callable

MOJIBAKE = ("Ã©", "â€™", "â€œ", "Â", "ï¿½", "�", "Ã¼", "â€”", "ðŸ", "Ð¿")
"""UTF-8 read as Windows-1252, and what replaces what cannot be read."""

OFFERS = ("buy {a} online", "cheap {a}", "best {a} {b} deals", "{a} for sale", "free {a} download", "discount {a} {b}")
PUSHES = ("Click here!", "Limited time offer!", "Order now!", "Act fast!", "100% guaranteed.", "No questions asked.")
CLAIMS = (
    "Looking for {a}? You have come to the right place.",
    "Our {a} is the best {a} for your {b}.",
    "Everyone needs {a} to get {b} today.",
    "Read our top 10 {a} reviews and save on {b}.",
)
GOODS = (
    *(
        "pills",
        "shoes",
        "watches",
        "casino",
        "bonus",
        "loans",
        "insurance",
        "handbags",
        "jewelry",
        "software",
        "hosting",
    ),
    *("followers", "backlinks", "vitamins", "diet", "iphone", "sunglasses", "mortgage", "credit", "dating", "essays"),
    *("hosting", "coupons", "furniture", "tickets", "jerseys"),
)


def damage(text: str, kind: str, seed: int = 0) -> str:
    """
    A damaged copy of about the same length and never longer. `kind` is one of KINDS.

    A text of few words may come out as it is.
    """
    digest = hashlib.sha256(f"{seed}:{kind}:".encode() + text.encode("utf-8", "replace")).digest()
    return KINDS[kind](text, random.Random(int.from_bytes(digest[:8])))[: len(text)]


def choose(name: str, seed: int = 0) -> str:
    """The kind of damage for a document, by hash of its id."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return sorted(KINDS)[int.from_bytes(digest[:8]) % len(KINDS)]


def _shuffled(text: str, rng: random.Random) -> str:
    """Words change places; white space stays where it is."""
    pieces = re.split(r"(\s+)", text)
    words = pieces[::2]
    rng.shuffle(words)
    pieces[::2] = words
    return "".join(pieces)


def _repeated(text: str, rng: random.Random) -> str:
    """From some place on, a phrase of the text comes again and again, with its lines."""
    pieces = re.split(r"(?<=\s)(?=\S)", text)
    size = rng.randint(3, 12)
    start = rng.randrange(max(1, len(pieces) - size))
    phrase = "".join(pieces[start : start + size]).rstrip() + rng.choice((" ", " ", "\n"))
    head = text[: int(len(text) * rng.uniform(0.0, 0.5))]
    return head + phrase * round((len(text) - len(head)) / len(phrase))


def _cut(text: str, rng: random.Random) -> str:
    """Two halves of the lines interleave, and many lines go on with the end of another, as when columns are misread."""
    lines, end = text.split("\n"), "\n"
    if len(lines) < 4:
        end = " "
        pieces = re.split(r"(?<=[.,;:!?])\s+", text)
        lines = [" ".join(pieces[start : start + 2]) for start in range(0, len(pieces), 2)]
    half = (len(lines) + 1) // 2
    mixed = [line for pair in zip(lines[:half], [*lines[half:], ""], strict=False) for line in pair]
    cut: list[str] = []
    tails: list[str] = []
    for line in mixed:
        spot = rng.randint(0, len(line)) if rng.random() < 0.6 else len(line)
        seam = tails.pop(0) if tails and rng.random() < 0.7 else ""
        cut.append(line[:spot] + seam)
        tails += [line[spot:]] if spot < len(line) else []
    cut += tails
    return end.join(cut)


def _broken(text: str, rng: random.Random) -> str:
    """Characters become mojibake or vanish, mostly those that are not ASCII."""
    share = rng.uniform(0.01, 0.06)
    out = []
    for character in text:
        if character.isspace() or rng.random() > (share if character.isascii() else 0.9):
            out.append(character)
        elif rng.random() < 0.7:
            out.append(rng.choice(MOJIBAKE))
    return "".join(out)


def _spam(text: str, rng: random.Random) -> str:
    """Sentences that sell, with words of the text in them and lines about as long as its own."""
    own = re.findall(r"[^\W\d_]{4,}", text[:4000]) or GOODS
    wide = max(40, min(400, len(text) // (text.count("\n") + 1)))
    topic = rng.sample(GOODS, 4) + rng.choices(own, k=2)
    lines, line, size = [], "", 0
    while size < len(text):
        form = rng.choice((OFFERS, OFFERS, CLAIMS, PUSHES))
        line += rng.choice(form).format(a=rng.choice(topic), b=rng.choice(topic)) + rng.choice((" ", ", ", " - "))
        if len(line) >= wide or size + len(line) >= len(text):
            lines.append(line.rstrip(" ,-"))
            line, size = "", size + len(lines[-1]) + 1
    return "\n".join(lines)


KINDS: dict[str, Callable[[str, random.Random], str]] = {
    "broken": _broken,
    "cut": _cut,
    "repeated": _repeated,
    "shuffled": _shuffled,
    "spam": _spam,
}
