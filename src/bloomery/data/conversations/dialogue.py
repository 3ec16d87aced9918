"""Plain dialogue: text in which lines begin with who speaks, as in "User: … Assistant: …"."""

import re
from collections.abc import Sequence

from bloomery.data.conversations.conversation import Message, Messages, Role
from bloomery.data.unpack import Problem

ANSWERERS: dict[str, tuple[str, ...]] = {
    "user": ("assistant", "bot", "ai", "model", "gpt"),
    "human": ("assistant", "ai", "gpt", "bot", "bing"),
    "prompter": ("assistant",),
    "person": ("assistant", "bot", "ai"),
    "customer": ("agent", "assistant", "support"),
    "question": ("answer",),
    "q": ("a",),
    "prompt": ("response", "completion", "answer"),
    "instruction": ("response", "output", "answer"),
    "用户": ("助手", "助理", "机器人"),
    "问": ("答",),
}
"""Who asks, and who may answer: the first that speaks of a line says which pair a text has."""
BESIDE: dict[str, Role] = {"system": "system", "tool": "tool", "observation": "tool", "系统": "system"}
NAMES = sorted({*ANSWERERS, *BESIDE, *(name for names in ANSWERERS.values() for name in names)}, key=len, reverse=True)
LABEL = re.compile(
    rf"^[ \t]*(?:#+[ \t]*|\*\*)?({'|'.join(NAMES)})(?:\*\*)?[ \t]*[:：](?:\*\*)?", re.IGNORECASE | re.MULTILINE
)


def parsed(text: str, names: tuple[str, str] | None = None) -> Messages | Problem:
    """
    The messages of a dialogue, without white space around them. `names`: how the two speakers are written.

    Only the pair of speakers that a text begins with opens messages, a tool, and the system in front of them; another
    label, such as "Answer:" or "System:" in what an assistant says, is text.
    """
    spots = _spots(text, names)
    if not spots:
        told = f"as {names[0]!r} and {names[1]!r}" if names else 'such as "User:" and "Assistant:"'
        return Problem("no_speaker", 0, f"no line begins with a speaker, {told}")
    if text[: spots[0][0]].strip():
        return Problem("no_speaker", 0, "begins with text of nobody: a dialogue begins with who speaks")
    ends = [begin for begin, _, _ in spots[1:]] + [len(text)]
    return [
        Message(role=role, content=text[after:end].strip()) for (_, after, role), end in zip(spots, ends, strict=True)
    ]


def is_dialogue(text: str, names: tuple[str, str] | None = None) -> bool:
    """Whether a text looks like a dialogue: it begins with a speaker, and one that answers comes after."""
    found = parsed(text, names)
    return not isinstance(found, Problem) and any(message["role"] == "assistant" for message in found)


def _spots(text: str, names: tuple[str, str] | None) -> Sequence[tuple[int, int, Role]]:
    """Begin and end of every label that opens a message, and its role."""
    if names is not None:
        longest_first = sorted(names, key=len, reverse=True)  # one may begin as the other does
        label = re.compile(rf"^[ \t]*({'|'.join(map(re.escape, longest_first))})", re.MULTILINE)
        return [(m.start(), m.end(), "user" if m[1] == names[0] else "assistant") for m in label.finditer(text)]
    labels = [(match.start(), match.end(), match[1].lower()) for match in LABEL.finditer(text)]
    asker = next((name for _, _, name in labels if name in ANSWERERS), None)
    if asker is None:
        return []
    answerer = next((name for _, _, name in labels if name in ANSWERERS[asker]), None)
    roles: dict[str, Role] = {**BESIDE, asker: "user"}
    if answerer is not None:
        roles[answerer] = "assistant"
    found = [(begin, end, roles[name]) for begin, end, name in labels if name in roles]
    return [spot for number, spot in enumerate(found) if spot[2] != "system" or number == 0]
