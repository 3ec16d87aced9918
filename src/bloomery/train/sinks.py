"""
Where else the numbers of metrics.jsonl go: Weights & Biases, TensorBoard, Trackio, and a main.log as llm.c writes it.

All but metrics.jsonl are optional. A package that is asked for and not there is said before the first stage; a service
that fails later is said once, left alone from then on, and stops nothing.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from bloomery.core.files import disk_errors, whole_file
from bloomery.data import extras
from bloomery.train.config import Sink, TensorBoard, Trackio, WeightsAndBiases
from bloomery.train.events import EventFile
from bloomery.train.hooks import Hook
from bloomery.train.state import State


@runtime_checkable
class Target(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


MAIN_LOG = "main.log"
Open = Callable[[], Target]
Watch = Callable[[int, Mapping[str, Any]], None]


@dataclass
class Watcher:
    """A sink with what it has not taken yet. It opens with its first line, so that a dead service costs no start."""

    name: str
    open: Open
    _waiting: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    _target: Target | None = None
    _works: bool = True

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        if self._works and (numbers := flat(values)):
            self._waiting.append((step, numbers))

    def hook(self) -> Hook:
        return Hook(lambda state: bool(self._waiting), self._pass_on, self.name, vital=False, once=True)

    def _pass_on(self, state: State) -> None:
        waiting, self._waiting = self._waiting, []
        self._works = False
        self._target = self._target or self.open()
        for step, numbers in waiting:
            self._target.write(step, numbers)
        self._works = True

    def end(self) -> Hook:
        """The hook that runs once, at the end."""
        return Hook(lambda state: self._works and self._target is not None, self._close, self.name, vital=False)

    def _close(self, state: State) -> None:
        self._pass_on(state)
        assert self._target is not None
        self._target.close()


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics: those inside others as outer/inner, texts and lists left out."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in flat(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def watcher(sink: Sink, run: str, out: Path, facts: Mapping[str, Any]) -> Watcher:
    """
    What passes numbers on to a sink. `run` names the run there, `facts` are its settings. Raises DataError where a
    package is missing.
    """
    match sink:
        case WeightsAndBiases():
            module = extras.load("wandb", extra="wandb")
            return Watcher("wandb", lambda: _WandB(module, sink, run, out, facts))
        case Trackio():
            module = extras.load("trackio", extra="trackio")
            return Watcher("trackio", lambda: _Trackio(module, sink, run, facts))
        case TensorBoard():
            return Watcher("tensorboard", lambda: EventFile(out / "tensorboard"))


class _WandB:
    """A run that is killed and goes on is one run there too: its id is the name of the stage's folder."""

    def __init__(self, module: Any, sink: WeightsAndBiases, run: str, out: Path, facts: Mapping[str, Any]) -> None:
        mode = "offline" if sink.offline else "online"
        how = {"project": sink.project, "name": run, "id": run, "resume": "allow", "dir": str(out), "mode": mode}
        self._run = module.init(config=dict(facts), **how)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, module: Any, sink: Trackio, run: str, facts: Mapping[str, Any]) -> None:
        self._module = module
        module.init(project=sink.project, name=run, config=dict(facts), resume="allow")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


class MainLog:
    """
    main.log in the words of llm.c (logger.h), for those whose scripts read it.

        s:12 trl:3.1416 lr:0.000600 norm:1.23      training: the batch that is read after 12 updates
        s:20 tel:3.0000                            validation loss after 20 updates
        s:20 eval:0.3000                           accuracy on HellaSwag after 20 updates, by mean loss of a token

    A resumed run drops the lines of the steps that were lost.
    """

    def __init__(self, path: Path, resume_at: int) -> None:
        before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        with whole_file(path, "w") as file:
            file.writelines(f"{line}\n" for line in before if _updates(line) <= resume_at)
        self._path = path

    def train(self, state: State) -> None:
        if "loss" in state.metrics:
            loss, lr, norm = (state.metrics[name] for name in ("loss", "learning_rate", "gradient_norm"))
            self._add(f"s:{state.step - 1} trl:{loss:.4f} lr:{lr:.6f} norm:{norm:.2f}")

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """What an evaluation has found."""
        for name, word in (("validation_loss", "tel"), ("hellaswag_per_token", "eval")):
            if isinstance(value := values.get(name), float):
                self._add(f"s:{step} {word}:{value:.4f}")

    def _add(self, line: str) -> None:
        with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def main_log(path: Path, resume_at: int, watchers: list[Watch]) -> Hook:
    """The hook that writes it; what evaluations find comes from the watchers of metrics."""
    file = MainLog(path, resume_at)
    watchers.append(file.take)
    return Hook(lambda state: True, file.train, "main_log")


def _updates(line: str) -> float:
    """After how many updates a line could be written; a line that is none of ours does not stay."""
    found = re.fullmatch(r"s:(\d+) (trl|tel|eval):.*", line)
    if found is None:
        return float("inf")
    return float(found[1]) + (found[2] == "trl")
