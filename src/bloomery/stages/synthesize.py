"""
The stage `synthesize`: conversations written by another model, within a budget.

Off unless a recipe says `enabled = true` and names who is asked: a key in the environment alone never spends money.
Requests and answers are written to requests.jsonl at once, so that nothing is paid for twice. At the end they are
sorted into conversations.jsonl and rejected.jsonl.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bloomery.core.errors import BloomeryError, DataError
from bloomery.core.io import whole_file
from bloomery.core.log import ProgressMeter, info, progress
from bloomery.data import documents
from bloomery.data.documents import LARGEST_SHARE, is_held_out
from bloomery.data.sources import http_client
from bloomery.data.sources.http_client import PassingError, RefusedError
from bloomery.data.synthesis import config as synthesis_config
from bloomery.data.synthesis import generate
from bloomery.data.synthesis.config import ConversationTask, Synthesize
from bloomery.data.synthesis.generate import Ask, Budget, NewConversations, TaskOutcome, UnknownError
from bloomery.stages.instruct import write_line

VERSION = 3
RESUMES = True
OWNS_LEFTOVERS = True

FILE, REJECTED = "conversations.jsonl", "rejected.jsonl"
OF_ONE_QUESTION = (400, 413, 422)
"""HTTP statuses of one question: if others were answered, only this question is rejected, and the run continues."""


class _EndError(Exception):
    """Nothing more is asked: the budget has no room, or another request has failed for good."""


def run(config: Synthesize, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    if not config.enabled:
        with whole_file(out / FILE):
            pass
        return {"enabled": False, "conversations": 0}
    ask = generate.asker(config)
    with closing(Budget(out, config)) as ledger:
        collection = _Collection(config, ask, ledger)
        with progress("synthesize", "conversations", config.count) as meter:
            collection.fill(_tasks(config, inputs), meter)
        written = Counter({"": 0})
        with whole_file(out / FILE, "w") as good, whole_file(out / REJECTED, "w") as bad:
            for row, reason in generate.rows(collection.outcomes):
                write_line(bad if reason else good, row)
                written[reason] += 1
        read, wrote = ledger.tokens
        if not written[""] and ledger.lost and collection.ended_by == "budget":
            what = f"{ledger.lost} requests without an answer count as paid, and the budget has no room for more"
            hint = "Check that the provider responds, then raise synthesize.max_tokens, or max_dollars."
            raise DataError(what, where=collection.where, hint=hint)
        stats = {
            "enabled": True,
            "conversations": written.pop(""),
            "rejected": dict(written),
            "unfinished": collection.unfinished,
            "input_tokens": read,
            "output_tokens": wrote,
            "lost_requests": ledger.lost,
            "ended_by": collection.ended_by,
        }
        if config.provider is not None and config.provider.price is not None:
            stats["dollars"] = round(ledger.dollars, 6)
    _tell(config, stats)
    return stats


def _tell(config: Synthesize, stats: Mapping[str, Any]) -> None:
    if stats["conversations"] < config.count:
        why = {"budget": "the budget has no room for another request", "questions": "there are no more questions"}
        said = why.get(stats["ended_by"], stats["ended_by"])
        info(f"synthesize: {stats['conversations']} of {config.count} conversations, since {said}", "yellow")
    if stats["rejected"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in stats["rejected"].items())
        info(f"synthesize: rejected {reasons}; see {REJECTED}", "yellow")


def _tasks(config: Synthesize, inputs: Mapping[str, Path]) -> Iterator[ConversationTask]:
    if config.augment is None:
        return synthesis_config.tasks(config.named, config.seed)
    rows = documents.read(inputs["dedup"] / "kept", ["id", "text", "domain"])
    # No model is trained on validation documents. The tokenizer leaves out the same share.
    return generate.tasks(config.augment, (row for row in rows if not is_held_out(row["text"], LARGEST_SHARE)))


@dataclass
class _Collection:
    """Tasks and what became of them."""

    config: Synthesize
    ask: Ask
    ledger: Budget
    outcomes: list[TaskOutcome] = field(default_factory=list)
    ended_by: str = "count"
    unfinished: int = 0
    """Conversations of several turns that the budget cut off. A run with a larger budget continues them."""
    _kept: NewConversations = field(default_factory=NewConversations)
    _asked: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    def fill(self, tasks: Iterator[ConversationTask], meter: ProgressMeter) -> None:
        """
        Ask until there are as many conversations as wanted, or the questions or the budget end.

        Raises DataError where a request fails for good. The error is printed at once, and waits before another attempt
        end. Requests under way are waited for, since they are paid for. An interrupt waits for nothing: requests under
        way then count as paid in full.
        """
        failure: RefusedError | None = None
        under_way: dict[Future[TaskOutcome | None], ConversationTask] = {}
        with self._stopping():
            while True:
                while failure is None and self._wants_more(len(under_way)):
                    if (task := next(tasks, None)) is None:
                        self.ended_by = "questions"
                    elif not self._take_known(task):
                        under_way[self._started(task)] = task
                meter.at(self._kept.count, **self._spent())
                if not under_way:
                    break
                finished, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for future in finished:
                    task = under_way.pop(future)
                    try:
                        self._take(task, future.result())
                    except RefusedError as error:
                        self._stop.set()
                        if failure is None and under_way:
                            info(f"synthesize: {error}; it ends when the requests in progress are answered", "yellow")
                        failure = failure or error
        if failure is not None:
            hint = f"{failure.hint} Earlier answers are kept. Run the recipe again when it responds.".lstrip()
            raise DataError(str(failure), where=self.where, hint=hint) from None

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Whatever ends the block, nothing more is asked then."""
        try:
            yield
        finally:
            self._stop.set()

    def _started(self, task: ConversationTask) -> Future[TaskOutcome | None]:
        """The task at work, in a thread that the end of the program does not wait for: a pool's would be waited for."""
        future: Future[TaskOutcome | None] = Future()

        def work() -> None:
            try:
                future.set_result(self._work(task))
            except (RefusedError, BloomeryError) as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise

        threading.Thread(target=work, name=f"synthesize {task.number}", daemon=True).start()
        return future

    def _wants_more(self, under_way: int) -> bool:
        open_ = self.ended_by == "count" and self._kept.count + under_way < self.config.count
        return open_ and under_way < self.config.concurrency

    def _take_known(self, task: ConversationTask) -> bool:
        """Whether a task needs nobody: it was asked before, in this run or in an earlier one."""
        name = generate.request_name(self.config, task, len(task.asks) - 1)
        if name in self._asked:
            return True
        self._asked.add(name)
        known = generate.outcome(self.config, task, self.ledger.answers)
        if known is not None:
            self._take(task, known)
        return known is not None

    def _take(self, task: ConversationTask, task_outcome: TaskOutcome | None) -> None:
        if task_outcome is None:
            if not self._stop.is_set():
                self.ended_by = "budget"
            self.unfinished += generate.request_name(self.config, task, 0) in self.ledger.answers
            return
        self.outcomes.append(task_outcome)
        for _ in self._kept.sorted_out(task_outcome):
            pass

    def _work(self, task: ConversationTask) -> TaskOutcome | None:
        """Ask the turns that are missing. None where nothing more is asked."""
        messages: list[dict[str, str]] = []
        for turn, question in enumerate(task.asks):
            if (task_outcome := generate.outcome(self.config, task, self.ledger.answers)) is not None:
                return task_outcome
            messages.append({"role": "user", "content": question})
            name = generate.request_name(self.config, task, turn)
            if name not in self.ledger.answers:
                try:
                    http_client.patiently(
                        lambda: self._ask(name, task.system, messages),  # noqa: B023
                        attempts=self.config.attempts,
                        what="synthesize",
                        stop=self._stop,
                    )
                except _EndError:
                    return None
            messages.append({"role": "assistant", "content": self.ledger.answers[name].text})
        return generate.outcome(self.config, task, self.ledger.answers)

    def _ask(self, name: str, system: str, messages: list[dict[str, str]]) -> None:
        if self._stop.is_set() or not self.ledger.reserve(name, system, messages):
            raise _EndError
        if name in self.ledger.answers:  # another conversation begins with the same question, and was quicker
            return
        if self._stop.is_set():  # while the budget had no room yet
            self.ledger.not_served(name, "it was not sent, since the stage had ended")
            raise _EndError
        try:
            answer = self.ask(system, messages, name)
        except UnknownError as error:
            self.ledger.unknown(name, str(error))
            raise
        except (PassingError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.status in OF_ONE_QUESTION and self.ledger.served:
                self.ledger.answered(name, generate.not_taken(str(error)))
                return
            self.ledger.not_served(name, str(error))
            raise
        except BaseException as error:
            self.ledger.unknown(name, type(error).__name__)  # what it says may hold the key
            raise
        self.ledger.answered(name, answer)

    def _spent(self) -> dict[str, float]:
        provider = self.config.provider
        if provider is not None and provider.price is not None:
            return {"dollars": self.ledger.dollars}
        return {"tokens": float(sum(self.ledger.tokens))}

    @property
    def where(self) -> str:
        provider = self.config.provider
        assert provider is not None
        return http_client.shown(provider.address) if provider.address else f"{provider.kind}, {provider.model}"
