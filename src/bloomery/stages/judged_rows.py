"""Judged answers as packed rows, with what each sequence of a row is; and what could not become one."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from bloomery.core import files, leftovers
from bloomery.core.errors import DataError
from bloomery.core.files import whole_file
from bloomery.core.log import progress, say
from bloomery.core.records import read_record
from bloomery.data.conversations.conversation import Messages, Rejected
from bloomery.data.holdout import is_held_out
from bloomery.data.preferences import readers
from bloomery.data.preferences.judged import Judged
from bloomery.data.unpack import Problem
from bloomery.shards import packed as shards
from bloomery.stages.instruct import gone, write_line
from bloomery.tokenizer.chat import Renderer
from bloomery.train.preference.config import Kto, Prefer
from bloomery.train.preference.pairs import CHOSEN, ELSEWHERE, REJECTED

ROWS, PREPARED, REJECTED_ROWS = "rows", "prepared.json", "rejected.jsonl"
NEIGHBORS = 16
"""How many examples are tried for an answer to another question that fits behind a prompt."""

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True, eq=False)
class Answer:
    """A prompt and an answer as ids, of which the answer is looked at."""

    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    kind: int


@dataclass(frozen=True, eq=False)
class Group:
    """Answers that are looked at together: a pair, or a single one."""

    answers: list[Answer]
    prompt: Messages
    said: Messages
    """Of a single one, what is answered."""


class Prepared(TypedDict):
    """What `prepare` had to say of the rows, as far as anything but a report reads it."""

    hash: str


class PreparedFile(TypedDict):
    record: Prepared


def prepared(out: Path) -> dict[str, Any]:
    """What `prepare` had to say of the rows, here or in asked.py. `hash` names their content."""
    return {**read_record(out / ROWS / PREPARED, PreparedFile)["record"]}


def load_prepared(out: Path) -> dict[str, Any] | None:
    """The same of an earlier attempt, if its rows are unchanged; else None, and what is left of them is removed."""
    found = leftovers.load(out / ROWS / PREPARED, out, "prefer: making rows")
    if found is None:
        files.remove_path(out / ROWS)
        (out / ROWS).mkdir(parents=True)
    return found


def save_prepared(out: Path, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Write down that the rows are there; returns `stats` with the hash of their content."""
    outputs = files.listed(out, [f"{ROWS}/{path.name}" for path in sorted((out / ROWS).iterdir())])
    hashes = {name.removeprefix(f"{ROWS}/"): facts["sha256"] for name, facts in outputs.items()}
    whole = {**stats, "hash": files.sha256_bytes(files.canonical(hashes))}
    leftovers.save(out / ROWS / PREPARED, whole, outputs | files.listed(out, [REJECTED_ROWS]))
    return whole


def kinds_of(out: Path, split: Split) -> NDArray[np.int8]:
    """What each sequence of each row is, as numbers of train/preference/pairs.py."""
    return np.asarray(np.load(out / ROWS / f"{split}.kinds.npy", allow_pickle=False), np.int8)


def prepare(config: Prefer, renderer: Renderer, context: int, out: Path) -> dict[str, Any]:
    """
    Write rows of two contexts to train and to validate on, and what was rejected; once. Returns what there is to say.

    Raises DataError for sources that cannot be read, and where nothing is left to learn from or to validate on.
    """
    if (known := load_prepared(out)) is not None:
        return known
    with whole_file(out / REJECTED_ROWS, "w") as file, progress("prefer", "pairs") as meter:
        sorter = _Sorter(config, renderer, context, file)
        for number, one in enumerate(readers.judged(config.pairs)):
            meter.at(number)
            sorter.take(one)
    why = gone("rejected", sorter.reasons, out / REJECTED_ROWS)
    for split, cure in (("train", "Add pairs, or lower prefer.hold_out."), ("val", "Add pairs, or raise it.")):
        if not sorter.kept[split]:
            what = f"of {sorter.counts['read']} rows none is left for the split {split}"
            raise DataError(what, where="prefer", cure=f"{cure} {why}".rstrip())
    if why:
        say(f"prefer: {why}", "yellow")
    stats: dict[str, Any] = {name: sorter.counts[name] for name in ("read", "kept", "rejected", "cut_at_a_turn")}
    stats["rejected_by_reason"] = dict(sorted(sorter.reasons.items()))
    stats["template"] = renderer.template.hash
    for split in SPLITS:
        stats[split] = _write(config, renderer, context, out / ROWS, split, sorter.kept[split])
    stats = save_prepared(out, stats)
    say(summary(stats))
    return stats


def summary(stats: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    train, val = stats["train"], stats["val"]
    return (
        f"prefer: {stats['kept']:,} of {stats['read']:,} rows kept ({stats['rejected']:,} rejected, "
        f"{stats['cut_at_a_turn']:,} cut at a turn); {train['chosen']:,} better and {train['rejected']:,} worse "
        f"answers in {train['rows']:,} rows, {train['packing']:.1%} full, "
        f"{train['supervised'] / train['tokens']:.1%} of them looked at; "
        f"held out: {val['chosen']:,} and {val['rejected']:,}"
    )


@dataclass
class _Sorter:
    config: Prefer
    renderer: Renderer
    context: int
    rejected: IO[str]
    kept: dict[str, list[Group]] = field(default_factory=lambda: {"train": [], "val": []})
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def take(self, one: Judged | Rejected) -> None:
        self.counts["read"] += 1
        if isinstance(one, Rejected):
            self._reject(one)
            return
        single = isinstance(self.config.loss, Kto)
        found = fit(self.renderer, one, self.context, single)
        if isinstance(found, Problem):
            self._reject(Rejected(one.source, one.place, found, {"id": one.id, "prompt": one.prompt}))
            return
        groups, cut = found
        self.counts["kept"] += 1
        self.counts["cut_at_a_turn"] += cut
        self.kept["val" if is_held_out(one.asked, self.config.hold_out) else "train"] += groups

    def _reject(self, one: Rejected) -> None:
        self.counts["rejected"] += 1
        self.reasons[one.problem.reason] += 1
        write_line(self.rejected, one.told)


def fit(renderer: Renderer, one: Judged, context: int, single: bool) -> tuple[list[Group], bool] | Problem:
    """
    Groups of what was judged, each sequence in at most `context` tokens, and whether turns were left out for it: the
    oldest ones of the prompt, what the system says aside. With `single`, answers apart from each other.
    """
    if not single and (one.chosen is None or one.rejected is None):
        return Problem("no_pair", 0, 'is a single answer with a label; loss.kind = "kto" learns from those')
    said = [(kind, answer) for kind, answer in ((CHOSEN, one.chosen), (REJECTED, one.rejected)) if answer is not None]
    for _, answer in said:
        if what := renderer.trouble([*one.prompt, *answer]):
            return Problem("not_in_the_template", 0, what)
    for cut, prompt in enumerate(_beginnings(one.prompt)):
        answers = [_answer(renderer, prompt, answer, kind) for kind, answer in said]
        if max(len(answer.ids) for answer in answers) > context:
            continue
        if len(answers) == 2 and np.array_equal(answers[0].ids, answers[1].ids):
            return Problem("same_answer", 0, "the two answers are the same as the template writes them")
        groups = [Group(answers, prompt, [])]
        if single:
            groups = [Group([a], prompt, said) for a, (_, said) in zip(answers, said, strict=True)]
        return groups, cut > 0
    return Problem("too_long", 0, f"the last message before the answers and one of these take over {context} tokens")


def _beginnings(prompt: Messages) -> Iterator[Messages]:
    """The prompt, and then with ever less of its older turns: each begins with what a user says."""
    yield prompt
    system = prompt[:1] if prompt[0]["role"] == "system" else []
    for place in range(len(system) + 1, len(prompt)):
        if prompt[place]["role"] == "user":
            yield system + prompt[place:]


def _answer(renderer: Renderer, prompt: Messages, answer: Messages, kind: int) -> Answer:
    """What is learned of a conversation, but nothing before its answer."""
    rendered = renderer.render([*prompt, *answer])
    mask = np.array(rendered.mask, np.uint8)
    mask[: len(renderer.prompt(prompt))] = 0
    return Answer(np.array(rendered.ids, np.uint32), mask, kind)


def _write(
    config: Prefer, renderer: Renderer, context: int, folder: Path, split: Split, groups: Sequence[Group]
) -> dict[str, Any]:
    lines = [group.answers for group in groups]
    if isinstance(config.loss, Kto):
        lines = [_with_elsewhere(renderer, groups, place, context) for place in range(len(groups))]
    row_tokens = 2 * context + 1
    packed = shards.write(
        folder / f"{split}-00000",
        lines,
        tokenizer=renderer.tokenizer,
        row_tokens=row_tokens,
        longest_padding=context,
        facts={"template": renderer.template.hash, "template_name": renderer.template.name},
    )
    listed = [[answer.kind for index in row for answer in lines[index]] for row in packed.rows]
    kinds = np.zeros((len(listed), max(map(len, listed))), np.int8)
    for row, numbers in enumerate(listed):
        kinds[row, : len(numbers)] = numbers
    with whole_file(folder / f"{split}.kinds.npy") as file:
        np.save(file, kinds, allow_pickle=False)
    counts = {"chosen": int((kinds == CHOSEN).sum()), "rejected": int((kinds == REJECTED).sum())}
    return {
        **counts,
        "rows": len(packed.rows),
        "tokens": packed.tokens,
        "supervised": packed.supervised,
        "packing": packed.full(row_tokens),
    }


def _with_elsewhere(renderer: Renderer, groups: Sequence[Group], place: int, context: int) -> list[Answer]:
    """A single answer, and behind its prompt the answer to one of the next questions, if one fits."""
    own = groups[place]
    for step in range(1, min(NEIGHBORS, len(groups))):
        other = groups[(place + step) % len(groups)]
        if other.prompt == own.prompt:
            continue
        found = _answer(renderer, own.prompt, other.said, ELSEWHERE)
        if len(found.ids) <= context:
            return [*own.answers, found]
    return own.answers
