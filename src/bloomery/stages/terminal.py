"""
What `bloomery run` and `bloomery status` print for people: the head of a run, one sentence a stage, the end, the state.
And the conversation of `bloomery chat`.

This module imports no section of a recipe and no torch, so that both verbs answer at once. Sentences are made of the
statistics in the manifest of a stage. A key that an older manifest lacks leaves its part of the sentence out.
"""

import importlib
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol

from rich.live import Live
from rich.text import Text
from typing_extensions import TypedDict

from bloomery.core import errors, log
from bloomery.core.chat import LIMITS, Message, SamplingConfig, lone_surrogate
from bloomery.core.errors import BloomeryError, ConfigError, readable
from bloomery.core.log import SAMPLES, about, counted, duration, percent, read_metrics, say, short, size
from bloomery.core.pipeline import StagePlan, Stats, plain_sentence
from bloomery.core.records import MAX_MANIFEST_BYTES, find_manifest, finishing_command, read_record
from bloomery.core.run_dir import TRASH, Moved, RunState, StageState, Waste
from bloomery.hw.host import Host, find_gpus, memory_bytes
from bloomery.hw.launcher import cores

PAGE, ANSWERS = "report.html", "answers.json"
SECONDS_BETWEEN_LOOKS = 2.0
SHOWN_ANSWERS, SHOWN_CHARACTERS = 3, 140
TRAINED = ("prefer", "finetune", "pretrain")
"""The stages that leave a model, the last one first."""


# --- the head ------------------------------------------------------------------------------------------------------


def head(
    root: Path, plans: Sequence[StagePlan], due: Sequence[StagePlan], first_seconds: Callable[[], float | None]
) -> None:
    """
    What a run will do, where, and for about how long: as the last run, or of a first one what `first_seconds`
    estimates. Nothing where there is nothing to do.
    """
    if not due:
        return
    names = [plan.stage.name for plan in due if not plan.config.is_idle()]
    reused = [plan.stage.name for plan in plans if plan not in due and plan.fresh and not plan.config.is_idle()]
    last = expected(due)
    seconds = last or first_seconds() or 0.0
    source = "based on the last run" if last else "a rough estimate: this recipe has not run yet"
    log.table(
        [
            ("run", str(root)),
            ("machine", machine(Host.here())),
            ("will run", ", ".join(names)),
            *([("up to date", ", ".join(reused))] if reused else []),
            *([("time", f"{about(seconds)}, {source}")] if seconds else []),
            ("Ctrl-C", "is safe: the same command resumes"),
        ]
    )
    say("")


def machine(host: Host) -> str:
    """The GPUs, the CPU, its cores, and the memory, as far as they are known without torch."""
    names = [gpu.name or gpu.target or gpu.maker for gpu in find_gpus(host)]
    gpus = [f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    model = re.search(r"^model name\s*:\s*(.*)$", host.read("proc/cpuinfo") or "", re.MULTILINE)
    memory = memory_bytes(host)
    return ", ".join(
        [
            *gpus,
            model[1].strip() if model else platform.machine(),
            counted(cores(), "core"),
            *([f"{size(memory)} of memory"] if memory else []),
        ]
    )


def expected(due: Sequence[StagePlan]) -> float:
    """Seconds that stages took when they ran last with other settings, scaled by their steps; 0 where one never ran."""
    total = 0.0
    for plan in due:
        if plan.config.is_idle():
            continue
        others = plan.folder.parent.glob(f"{plan.folder.name.removesuffix(plan.fingerprint)}*")
        done = [manifest for folder in others if (manifest := find_manifest(folder)) is not None]
        if not done:
            return 0.0
        last = max(done, key=lambda manifest: manifest["finished"])
        steps, steps_then = getattr(plan.config, "steps", None), last["config"].get("steps")
        total += last["seconds"] * (steps / steps_then if steps and steps_then else 1)
    return total


# --- one sentence a stage ------------------------------------------------------------------------------------------


def sentence(stage: str, stats: Stats) -> tuple[str, str]:
    """What a stage has done, and what stands after the time that it took."""
    try:
        return SENTENCES[stage](stats) if stage in SENTENCES else plain_sentence(stage, stats)
    except KeyError:  # statistics of another version
        return plain_sentence(stage, stats)


def _fetch(stats: Stats) -> tuple[str, str]:
    sources = counted(len(stats["by_source"]), "source")
    text = f"read {counted(stats['documents'], 'document')} ({size(stats['bytes'])}) from {sources}"
    return text, f"; {stats['rejected']:,} rejected" if stats["rejected"] else ""


def _classify(stats: Stats) -> tuple[str, str]:
    learned = stats["classifiers"]
    skipped = f"; skipped {len(stats['left_out'])}, which no threshold uses" if stats.get("left_out") else ""
    if not learned:
        return "trained no classifier", skipped
    areas = ", ".join(f"{one['auc']:.2f}" for one in learned if isinstance(one.get("auc"), float))
    return f"trained {counted(len(learned), 'classifier')}{f' (AUC {areas})' if areas else ''}", skipped


def _filter(stats: Stats) -> tuple[str, str]:
    return _kept(stats), _reasons(stats["reasons"])


def _dedup(stats: Stats) -> tuple[str, str]:
    copies = [f"{stats[name]:,} {name}" for name in ("exact", "near") if stats.get(name)]
    parts = [f"{' and '.join(copies)} {'copy' if stats['removed'] == 1 else 'copies'}"] if copies else []
    parts += [f"{stats['dropped']:,} dropped"] if stats.get("dropped") else []
    return _kept(stats), f": {', '.join(parts) or 'no copies'}"


def _kept(stats: Stats) -> str:
    documents = counted(stats["documents"], "document")
    return f"kept {stats['kept']:,} of {documents} ({percent(stats['kept'], stats['documents'])})"


def _reasons(reasons: Mapping[str, int]) -> str:
    """The most frequent reason, and how many others there are: ": 51 too short, 25 other"."""
    if not reasons:
        return ""
    most = min(reasons, key=lambda name: (-reasons[name], name))
    rest = sum(reasons.values()) - reasons[most]
    return f": {reasons[most]:,} {_words(most)}" + (f", {rest:,} other" if rest else "")


def _words(reason: str) -> str:
    return "low score" if reason == "classifier" else reason.rpartition(".")[2].replace("_", " ")


def _tokenizer(stats: Stats) -> tuple[str, str]:
    verb = "took over" if stats.get("kind") == "import" else "trained"
    rates = [rate for rate in stats["bytes_per_token"].values() if rate]
    low, high = (f"{end(rates):.1f}" for end in (min, max)) if rates else ("", "")
    spread = low if low == high else f"{low} to {high}"
    return f"{verb} {counted(stats['vocab_size'], 'token')}", f": {spread} bytes each" if rates else ""


def _shard(stats: Stats) -> tuple[str, str]:
    rest = f" and {short(stats['held_out_tokens'])} for validation" if stats.get("held_out_tokens") else ""
    return f"wrote {short(stats['tokens'])} training tokens{rest}", ""


def _trained(stats: Stats) -> tuple[str, str]:
    parameters = stats.get("trained_parameters", stats["parameters"])
    loss = stats.get("validation_loss", stats.get("loss"))
    parts = [f"loss {loss:.2f}"] if isinstance(loss, int | float) else []
    parts += [f"{counted(stats['skipped_steps'], 'step')} skipped"] if stats.get("skipped_steps") else []
    text = f"trained {short(parameters)} parameters for {counted(stats['steps'], 'step')}"
    return text, f": {', '.join(parts)}" if parts else ""


def _synthesize(stats: Stats) -> tuple[str, str]:
    rejected = sum(stats.get("rejected", {}).values())
    cost = f" for ${stats['dollars']:.2f}" if stats.get("dollars") else ""
    text = f"wrote {counted(stats['conversations'], 'conversation')}{cost}"
    return text, f"; {rejected:,} rejected" if rejected else ""


def _instruct(stats: Stats) -> tuple[str, str]:
    train, val = stats["train"], stats["val"]
    rest = [f"{stats[name]:,} {name}" for name in ("rejected", "dropped") if stats.get(name)]
    conversations = counted(train["conversations"] + val["conversations"], "conversation")
    text = f"packed {conversations} into {counted(train['rows'] + val['rows'], 'sequence')}"
    return text, f"; {', '.join(rest)}" if rest else ""


def _prefer(stats: Stats) -> tuple[str, str]:
    text, rest = _trained(stats)
    return f"{text} with {stats['method'].upper()}", rest


def _evaluate(stats: Stats) -> tuple[str, str]:
    answers, bits = stats["answers"], stats["bits_per_byte"]
    if answers["n"]:
        return f"answered {100 * answers['exact']:.1f} % of {counted(answers['n'], 'question')} right", ""
    if bits["bytes"]:
        return f"measured {bits['model']:.2f} bits per byte on {size(bits['bytes'])} of validation text", ""
    talks, tasks = stats.get("conversations", {}), stats.get("tasks", {})
    if talks.get("n"):
        last = next(name for name in TRAINED if name in talks)
        after, before = (talks[name]["bits_per_byte"] for name in (last, "pretrain"))
        where = counted(talks["n"], "validation conversation")
        return f"measured {after:.2f} bits per byte on {where} ({before:.2f} before finetuning)", ""
    return f"scored {counted(len(tasks), 'task')}" if tasks else "wrote its report", ""


SENTENCES = {
    "fetch": _fetch,
    "classify": _classify,
    "filter": _filter,
    "dedup": _dedup,
    "tokenizer": _tokenizer,
    "shard": _shard,
    "pretrain": _trained,
    "synthesize": _synthesize,
    "instruct": _instruct,
    "finetune": _trained,
    "prefer": _prefer,
    "evaluate": _evaluate,
}


# --- the end -------------------------------------------------------------------------------------------------------


def ending(state: RunState, *, seconds: float | None, left: Sequence[str], asked: str, again: str) -> None:
    """
    The end of a run: what it has come to, some answers, and what to do next. `seconds` is None where there was nothing
    to do. `left` are the stages that a run leaves which ends as `asked`, and `again` is the command that runs them.
    """
    root, done = state.root, {stage.stage: stage for stage in state.stages if stage.state == "done"}
    say("")
    if left:
        began = f"Done in {duration(seconds)}" if seconds is not None else "Up to date"
        say(f"{began}, {asked} as you asked. Still to run: {', '.join(left)}.", style="bold")
    elif seconds is None:
        took = sum(stage.seconds or 0.0 for stage in done.values())
        say(f"{root}: everything is up to date, nothing to do. It took {duration(took)}.", style="bold green")
    else:
        say(f"{root}: done in {duration(seconds)}.", style="bold green")
    if "evaluate" in done and not left:
        score(done["evaluate"])
    elif (trained := next((done[name] for name in TRAINED if name in done), None)) is not None and not left:
        samples(trained)
    say("")
    log.table(next_steps(root, set(done), again if left else ""))


def score(stage: StageState) -> None:
    """The score of an evaluation, and some of the answers."""
    text, _ = sentence("evaluate", stage.stats)
    low, high = stage.stats.get("answers", {}).get("interval", (0.0, 1.0))
    interval = f" (95 % interval: {100 * low:.1f} to {100 * high:.1f} %)" if text.startswith("answered") else ""
    say(f"The model {text}{interval}." if interval else f"{text[:1].upper()}{text[1:]}.")
    for question, answer, right in answers(stage.folder / ANSWERS):
        say("")
        say(f"  > {question}", indent=4)
        say(f"    {answer}" + ("" if right else "  (wrong)"), style="" if right else "dim", indent=4)


class ShownAnswer(TypedDict):
    """A row of ANSWERS, as far as it is shown."""

    kind: str
    messages: list[dict[str, Any]]
    said: str
    exact: bool


def answers(path: Path) -> list[tuple[str, str, bool]]:
    """Question, answer, and whether it is right: of some kinds of question, the first without a history."""
    if not path.is_file():
        return []
    first: dict[str, ShownAnswer] = {}
    for row in read_record(path, list[ShownAnswer], max_bytes=MAX_MANIFEST_BYTES):
        if len(row["messages"]) == 1:
            first.setdefault(row["kind"], row)
    rows = list(first.values())[:: max(1, len(first) // SHOWN_ANSWERS)][:SHOWN_ANSWERS]
    return [(_line(row["messages"][0]["content"]), _line(row["said"]) or "(nothing)", row["exact"]) for row in rows]


def samples(stage: StageState) -> None:
    """What a model that only continues text wrote last."""
    for line in read_metrics(stage.folder / SAMPLES)[-2:]:
        say("")
        say(f"  > {_line(line['prompt'])}", indent=4)
        say(f"    {_line(line['text'])}", indent=4)


def next_steps(root: Path, done: set[str], again: str) -> list[tuple[str, str]]:
    """Commands that make sense after a run."""
    rows = [("Continue", again)] if again else []
    if done & set(TRAINED):
        others = [] if str(root.parent) == "runs" else ["--runs", str(root.parent)]
        rows += [
            ("Talk to it", shlex.join(["bloomery", "chat", str(root)])),
            ("In a browser", shlex.join(["bloomery", "serve", *others])),
        ]
    if (root / PAGE).is_file():
        rows.append(("Report", str(root / PAGE)))
    return rows or [("Its state", shlex.join(["bloomery", "status", str(root)]))]


def _line(text: str) -> str:
    """A text on one line, without its end if it is long."""
    words = " ".join(text.split())
    return words if len(words) <= SHOWN_CHARACTERS else f"{words[: SHOWN_CHARACTERS - 1]}…"


# --- status --------------------------------------------------------------------------------------------------------

MARKS = {"done": ("✓", "green"), "runs": ("●", "cyan"), "begun": ("◐", "yellow"), "damaged": ("✗", "red")}


def status_text(states: Sequence[RunState], *, each: bool) -> Text:
    """One run with `each` of its stages on a line, or a line for each run."""
    if not states:
        return Text("No run yet. Start one: bloomery run RECIPE")
    lines = [line for state in states for line in (status_lines(state) if each else [run_line(state)])]
    text = Text()
    for number, (mark, style, line) in enumerate(lines):
        text.append("\n" if number else "").append(f"{mark} " if mark else "", style).append(readable(line))
    return text


def run_line(state: RunState) -> tuple[str, str, str]:
    kind = "damaged" if state.damaged or state.error else "done" if state.done else "runs" if state.pid else "begun"
    return *MARKS[kind], f"{state.root}: {summary(state)}"


def clean_lines(
    root: Path,
    waste: Sequence[Waste],
    old: Sequence[Waste],
    freed: int,
    moved: Moved,
    strangers: Sequence[Path],
    *,
    asked: bool,
) -> list[str]:
    """What `bloomery clean` found of a run, and what it did where it was `asked` to."""

    def row(num_bytes: int, text: str) -> str:
        return f"{num_bytes / 2**20:10.1f} MiB  {text}"

    lines = [row(item.size, f"{item.path}  ({item.why})") for item in (*waste, *old)]
    if not waste and not old:
        lines.append(row(0, "nothing to free"))
    elif not asked:
        total = sum(item.size for item in (*waste, *old))
        lines.append(row(total, f"can be removed: --yes moves it to {TRASH}"))
        lines.append(f"{'':16}and deletes older trash; --now deletes all at once")
    lines += [row(freed, "freed")] if freed else []
    if moved.moves:
        where = f"moved to {root / TRASH}; the next clean after a day deletes it"
        lines += [row(sum(item.size for item in waste), where), "To restore it:"]
        lines += [f"  {command}" for command in moved.restore()]
    return lines + [f"{'':16}left: {path} (clean did not put it there)" for path in strangers]


def show(text: Text) -> None:
    """Print to stdout: on a terminal in color."""
    if sys.stdout.isatty():
        log.screen().print(text)
    else:
        print(text.plain)


def watch(look: Callable[[], Text]) -> None:
    """Show what `look` returns every SECONDS_BETWEEN_LOOKS, in the same place of a terminal, until Ctrl-C."""
    screen = Live(console=log.screen(), auto_refresh=False)
    with suppress(KeyboardInterrupt), screen if sys.stdout.isatty() else nullcontext():
        while True:
            text = look()
            if sys.stdout.isatty():
                screen.update(text, refresh=True)
            else:
                print(f"{text.plain}\n", flush=True)
            time.sleep(SECONDS_BETWEEN_LOOKS)


def status_lines(state: RunState) -> Iterator[tuple[str, str, str]]:
    """Mark, style and text of each line about a run: its state, each stage, what to do next."""
    yield "", "bold", f"{state.root}: {summary(state)}"
    for stage in state.stages:
        kind = "runs" if stage.stage == state.running else stage.state
        mark, style = MARKS.get(kind, ("○", "dim"))
        if stage.idle and stage.state != "damaged":
            continue
        yield mark, style, f"{stage.stage:<{log.NAME}} {stage_text(stage, kind)}"
    if state.damaged:
        for stage in state.damaged:
            yield "", "", f"Recreate {stage.stage}: rm {stage.folder / 'manifest.json'}, then run the recipe"
    elif state.pid is None and not state.done:
        yield "", "", f"Resume it: {finishing_command(state.root)}"


def stage_text(stage: StageState, kind: str) -> str:
    """What became of a stage."""
    if stage.state == "damaged":
        return f"damaged: {stage.damage}"
    if stage.state == "done":
        text, rest = sentence(stage.stage, stage.stats)
        return f"{text} in {duration(stage.seconds or 0)}{rest}"
    if stage.state == "waiting":
        return "waiting"
    if stage.step is None:
        return "runs" if kind == "runs" else "begun, not finished"
    of = f" of {stage.steps:,} ({percent(stage.step, stage.steps)})" if stage.steps else ""
    parts = [f"step {stage.step:,}{of}"]
    parts += [f"loss {short(stage.loss)}"] if stage.loss is not None else []
    if kind == "runs":
        parts += [f"{short(stage.tokens_per_second)} tokens/s"] if stage.tokens_per_second else []
        parts += [f"{duration(stage.seconds_left)} left"] if stage.seconds_left else []
    else:
        parts.insert(0, "stopped")
    return ", ".join(parts)


def summary(state: RunState) -> str:
    """The state of a run in a few words: does it live, how far is it, when is it done."""
    if state.error:
        return f"its state cannot be read: {' '.join(state.error.split())}"
    stages = [stage for stage in state.stages if not stage.idle]
    count = f"{sum(stage.state == 'done' for stage in stages)} of {len(stages)} stages done"
    if state.damaged:
        return f"damaged ({', '.join(stage.stage for stage in state.damaged)}), {count}"
    if state.pid is not None:
        running = next((stage for stage in stages if stage.stage == state.running), None)
        step = f", {stage_text(running, 'runs')}" if running and running.step is not None else ""
        return f"process {state.pid} runs {state.running}{step}; {count}"
    if state.done:
        evaluated = next((stage for stage in stages if stage.stage == "evaluate"), None)
        exact = evaluated.stats.get("exact") if evaluated else None
        total = duration(sum(stage.seconds or 0 for stage in stages))
        return f"done in {total}" + (f", {100 * exact:.1f} % right" if isinstance(exact, float) else "")
    begun = next((stage for stage in stages if stage.state == "begun"), None)
    at = f" in {begun.stage}" + (f" at step {begun.step:,}" if begun.step is not None else "") if begun else ""
    return f"stopped{at}, {count}"


# --- chat ----------------------------------------------------------------------------------------------------------

CHAT_HELP = """\
/help              this list
/system TEXT       tell the model how to answer from now on; without TEXT: remove it
/reset             start a new conversation
/restore           swap this conversation and the one before the last /reset
/again             send an unanswered message again
/model MODEL       continue the conversation with another model
/temperature T     set the temperature; 0 always takes the likeliest token
/save FILE         append the conversation to a file, as a line of training data
/exit              end the chat; so does Ctrl-D
A line that ends with \\ continues on the next line. Lines between two lines of \"\"\" are one message.
To send a message that begins with /, type //. Ctrl-C stops an answer, or takes the line into the history."""
BLOCK = '"""'


class TerminalAnswer(Protocol):
    """An answer on its way: the messages that did not fit, and its text in pieces."""

    @property
    def dropped(self) -> int: ...

    @property
    def texts(self) -> Iterator[str]: ...


Asks = Callable[[list[Message], SamplingConfig], TerminalAnswer]
"""A model that answers a conversation, without its oldest messages if it does not fit. Raises BloomeryError."""


class TerminalChat:
    """A conversation in a terminal. Lines that begin with a slash are commands."""

    def __init__(self, ask: Asks, load: Callable[[Path], Asks], sampling: SamplingConfig) -> None:
        self._ask, self._load, self.sampling = ask, load, sampling
        self.messages: list[Message] = []
        """The whole conversation, with the messages that do not fit into the model's context."""
        self._before: list[Message] = []
        """The conversation before the last /reset."""
        self._system = self._unanswered = ""
        self._dropped = 0
        with suppress(ImportError):  # Windows has none
            importlib.import_module("readline")  # input() then edits lines, and has a history

    def run(self) -> None:
        """Answer messages until the input ends, or /exit. Ctrl-C stops an answer or a command, and never the chat."""
        if isinstance(sys.stdin, TextIOWrapper):  # a message with a wrong byte is refused, and the chat continues
            sys.stdin.reconfigure(errors="surrogateescape")
        while True:
            lines: list[str] = []
            try:
                text = read_message(lines)
                if text is None or text.strip() == "/exit":
                    return
                lines = []
                self._obey(text)
            except errors.OutputError:  # nobody can read the rest
                raise
            except BloomeryError as error:
                log.info(str(error))
            except KeyboardInterrupt:
                print()
                if lines:
                    self._take_back("\n".join(lines))
                else:
                    log.info("(Ctrl-D or /exit ends the chat)", "dim")

    def _obey(self, text: str) -> None:
        """Do a command, or send a message. An empty one does nothing."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, value = text[1:].partition(" ")
            self.command(name.strip(), value.strip())
        elif text.strip():
            self.say(text.removeprefix("/") if text.startswith("//") else text)

    def say(self, text: str) -> None:
        """Send a message, and print the answer. Without an answer the conversation stays as it was before."""
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []
        try:
            answer = self._ask(self._opening + asked, self.sampling)
            if answer.dropped not in (0, self._dropped):
                what = "message does" if answer.dropped == 1 else "messages do"
                log.info(f"(the oldest {answer.dropped} {what} not fit: the model answers without them)", "dim")
            self._dropped = answer.dropped
            for piece in log.print_pieces(answer.texts):
                said.append(piece)
        except KeyboardInterrupt:
            print(" (stopped)")
            if not said:
                self._take_back(text)
                return
        except errors.OutputError:
            raise
        except BloomeryError as error:
            if said:
                print()
            log.info(str(error))
            self._take_back(text)
            return
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        if text == self._unanswered:
            self._unanswered = ""

    def _take_back(self, text: str) -> None:
        """Keep a message that got no answer for /again."""
        self._unanswered = text
        log.info("(not in the conversation; /again sends the message again)", "dim")

    @property
    def _opening(self) -> list[Message]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def command(self, name: str, value: str) -> None:
        """Do what a line with a slash says. Raises ConfigError for a command that is none, or a wrong value."""
        match name:
            case "help":
                print(CHAT_HELP)
            case "system":
                if (at := lone_surrogate(value)) is not None:
                    what = f"holds bytes that are not UTF-8, at character {at}"
                    raise ConfigError(what, where="/system", hint="Use a terminal or a file in UTF-8.")
                self._system = value
                log.info("(the system message is set)" if value else "(no system message)", "dim")
            case "reset":
                self._before = self.messages or self._before
                self._begin([], "new conversation")
            case "restore" if self._before:
                earlier, self._before = self._before, self.messages
                self._begin(earlier, f"the earlier conversation of {counted(len(earlier), 'message')}")
            case "restore":
                raise ConfigError("there is no earlier conversation", where="/restore", hint="/reset saves one.")
            case "again" if self._unanswered:
                self.say(self._unanswered)
            case "again":
                raise ConfigError("every message has an answer", where="/again", hint="Type the message again.")
            case "model" if value:
                self._ask = self._load(Path(os.path.expanduser(value)))
                log.info(f"({value} answers from here on)", "dim")
            case "temperature":
                unset = self.sampling.unset - {"temperature"}  # what else the model recommends still holds
                self.sampling = replace(self.sampling, temperature=temperature(value), unset=unset)
                log.info(f"(temperature {self.sampling.temperature:g})", "dim")
            case "save" if value:
                self._save(Path(os.path.expanduser(value)))
            case "model" | "save":
                raise ConfigError("needs a value", where=f"/{name}", hint="/help shows its syntax.")
            case _:
                raise ConfigError(f"there is no command /{readable(name)}", hint="/help lists them.")

    def _begin(self, messages: list[Message], what: str) -> None:
        self.messages, self._dropped = messages, 0
        log.info(f"({what})", "dim")

    def _save(self, file: Path) -> None:
        if not self.messages:
            raise ConfigError("the conversation has no message yet", where="/save", hint="Ask something first.")
        try:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"messages": self._opening + self.messages}, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            what = f"cannot be written: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(what, where=str(file), hint="Name a file in a folder that exists.") from None
        log.info(f"({counted(len(self.messages), 'message')} appended to {file})", "dim")


def temperature(value: str) -> float:
    """Raises ConfigError for what is no number within the limits."""
    low, high = LIMITS["temperature"]
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not low <= number <= high:
        raise ConfigError(f"{value!r} is not a number from {low:g} to {high:g}", where="/temperature")
    return number


def _input(prompt: str) -> str:
    """A line. One that Ctrl-C discards goes into the history, so that an arrow key brings it back."""
    try:
        return input(prompt)
    except KeyboardInterrupt:
        readline = sys.modules.get("readline")  # Windows has none
        if readline is not None and (line := readline.get_line_buffer()):
            readline.add_history(line)
        raise


def read_message(lines: list[str]) -> str | None:
    """
    One message: a line, lines that end with a backslash, or a block. None at the end of the input. `lines` gets each
    line before the last one, so that Ctrl-C does not lose them.
    """
    try:
        line = _input("> ")
        if line.strip() == BLOCK:
            while (line := _input("… ")).strip() != BLOCK:
                lines.append(line)
            return "\n".join(lines)
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = _input("… ")
    except EOFError:
        return "\n".join(lines) if lines else None
    return "\n".join([*lines, line])
