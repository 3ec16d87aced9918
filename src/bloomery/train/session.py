"""
What surrounds the loop in a stage: device, batches, resume, checkpoints, metrics, progress.

Pretraining and finetuning differ in where their weights and samples come from, and in nothing here.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bloomery.core.config import plain
from bloomery.core.log import METRICS, Metrics, kept, progress, say
from bloomery.core.stop import Stop, Terminated, on_signals
from bloomery.hw import device as devices
from bloomery.hw import dist
from bloomery.hw.device import Device
from bloomery.hw.dist import RankLostError, World
from bloomery.hw.peak import listed_peak
from bloomery.model.cost import cost
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Samples, Source, batches, others_begin
from bloomery.tokenizer.chat import Renderer
from bloomery.train import compiled, exactness, extension, launch, parallel
from bloomery.train.checkpoints import Checkpoints
from bloomery.train.clock import Clock
from bloomery.train.config import WSD, Training
from bloomery.train.device import fast_dtype, find_device, short
from bloomery.train.guard import Guard, forget
from bloomery.train.hooks import Failure, Hook, Hooks
from bloomery.train.keeping import Adapters, Kept, Whole
from bloomery.train.loop import NextToken, train
from bloomery.train.norms import Norms
from bloomery.train.objective import Objective
from bloomery.train.optim import Optimizers
from bloomery.train.plan import check_shard, remarks, rows_at_once, rows_per_step
from bloomery.train.planning.dry_run import Trial, tell
from bloomery.train.planning.here import decided
from bloomery.train.precision import Precision
from bloomery.train.progress import Learning, last_loss
from bloomery.train.recorder import Recorder
from bloomery.train.sampling import Sampler, sampling
from bloomery.train.schedule import decay_start, share
from bloomery.train.sinks import MAIN_LOG, main_log, watcher
from bloomery.train.state import State
from bloomery.train.validation import Check, Validation, evaluating
from bloomery.weights.checkpoint import Keep, Saver
from bloomery.weights.huggingface import Lineage

LOG = "log.txt"
STEPS_BETWEEN_TRIMS = 25

T = TypeVar("T")
Evaluation = Callable[[Transformer, Device, Stop], Mapping[str, float]]
"""Of a model, where it computes, and whether to end early (by Terminated): numbers by name."""


@dataclass
class Session:
    """A training run: what it trains, on what, and where it leaves its results."""

    name: str
    config: Training
    model: Transformer
    renderer: Renderer
    samples: Source
    validation: Samples | Check
    """Samples whose loss is measured, or what measures something else."""
    lineage: Lineage
    out: Path
    sampler: Sampler | None = None
    """What writes samples, for those who ask for them."""
    kept: Kept | None = None
    """What of the model is saved; the whole of it, if nothing else is said."""
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    """What is measured besides the validation loss, at the same steps; of its numbers, one has the name it has here."""
    measured: dict[int, float] = field(default_factory=dict)
    """Step -> validation loss, so far."""
    objective: Objective | None = None
    """What is minimized; the cross entropy of the next token, if nothing else is said."""
    check_objective: Objective | None = None
    """The same for the validation samples, where it knows them one by one."""
    begin: Callable[[Device, int, Stop], None] | None = None
    """Called when the model is in its place and as it starts, before it is trained; with the rows that fit at once."""
    from_scratch: bool = False
    """Whether the model has random weights. Then it has to become better than an untrained one: see progress.py."""
    early: bool = True
    """Whether samples may be made before the steps in front of them are done."""
    world: World = field(default_factory=World.alone)
    """The ranks that train it together; each has a session. The first one writes."""
    _stop: Stop = field(default_factory=Stop)
    _failures: list[Failure] = field(default_factory=list)
    _checkpoints: Checkpoints = field(init=False)
    _validation: Check = field(init=False)
    _start_loss: float | None = field(init=False, default=None)
    """The validation loss of the weights that training starts from, where this rank measures it."""
    _sharded: bool = field(init=False, default=False)
    """Whether ranks hold parts of the model. Then whatever computes with it is done by all of them."""
    _desk: Path = field(init=False)
    """Where this rank writes what it tells: `out` for the first, and for the others a folder that is thrown away."""

    def run(self) -> dict[str, Any]:
        """
        Train to the end from the newest whole checkpoint, and leave the model in `out/model`. Asked to stop by SIGTERM
        or Ctrl-C, it saves and raises Terminated; in the last save, or as it leaves the model, it ends that first.
        """
        with parallel.desk(self.out, self.world) as self._desk, kept(self._desk / LOG), on_signals() as self._stop:
            device = find_device(self.config)
            dist.check_devices(self.world, device.place)
            self.config = decided(self.config, self.model.config, self.model.vocab_size, device, self.world)
            self._sharded = check_shard(self.config, self.world.size, adapters=isinstance(self.kept, Adapters))
            if self._sharded:  # weights go where they compute one group at a time, and leave their part there
                parallel.shard(self.model, self.world, device)
            compiled.prepare(self.model, self.config, self.samples, device, self._desk, self.world)
            optimizers = Optimizers(self.model, self.config.optimizer, fast_dtype(device))
            if self.begin is not None:
                self.begin(device, rows_at_once(self.config, self.samples.length), self._stop)
            self._validation = self._check()
            if self.config.dry_run and not self._sharded:
                self.config = self._tried(optimizers, device)
            self._start_loss = self._measured_start(device)
            with Saver(self.out / "checkpoints", self._keep, self.world) as saver:
                self._checkpoints = self._safe(saver, optimizers, device)
                state, self._stop.saves = self._checkpoints.resume(), True
                began, first_step = time.monotonic(), state.step
                failures = self._train(state, optimizers, device)
            steps, seconds = state.step - first_step, time.monotonic() - began
            with self.world.alike():
                self._learning.check(state, self.measured if self._acts else None)
            self._checkpoints.leave_model(self.out / "model", state)
            if self.world.any(self._stop.asked):
                raise Terminated(self._stop.code)
        facts = cost(self.model.config, self.model.vocab_size)
        return {
            "parameters": facts.parameters,
            "steps": state.step,
            "tokens": state.step * self.tokens_per_step,
            "supervised_tokens": state.tokens,
            "epochs": round(self.samples.epochs(state.samples), 3),
            "loss": None if (loss := last_loss(state)) is None else round(loss, 5),
            "validation_loss": self.measured.get(state.step),
            "skipped_steps": state.guard.skipped,
            "rollbacks": len(state.guard.rollbacks),
            "failures": failures,
            "continued": extension.told(self.out),
            "tokens_per_second": round(steps * self.tokens_per_step / seconds) if steps else None,
            "device": device.name,
            "precision": short(device.compute_dtype),
            "threads": devices.threads(),
            "peak_bytes": device.peak_bytes(),
            "peak_flops_measured": parallel.peak(device, self.world),
            "peak_flops_catalogue": listed_peak(device) or "unknown",
        }

    def _tried(self, optimizers: Optimizers, device: Device) -> Training:
        """The settings, with as many rows at once as two steps have shown to fit."""
        rows = rows_at_once(self.config, self.samples.length)
        trial = Trial(
            model=self.model,
            optimizers=optimizers,
            samples=self.samples,
            validation=self._validation,
            device=device,
            world=self.world,
            precision=Precision.decide(self.config.precision, device),
            max_norm=self.config.max_norm,
            objective=self.minimized,
            one_shape=self.config.compile != "off",
        )
        found = trial.run(rows, self.rows)
        tell(found, self.rows, self.config.steps, device, self.world)
        if found.rows >= min(rows, -(-self.rows // self.world.size)):
            return self.config
        fewer = self.config.model_copy(update={"micro_batch_tokens": found.rows * self.samples.length})
        compiled.decide(self.model, fewer, self.samples, device, self._desk, self.world)
        return fewer

    def _measured_start(self, device: Device) -> float | None:
        """
        The validation loss before the first step; None where there is none, or where it is another rank's to measure.
        A run that resumes measures it again, before it takes up a checkpoint, and so needs no record of it.
        """
        if not self._acts or not isinstance(self._validation, Validation):
            return None
        check, found = self._validation, list[float]()

        def run(state: State) -> None:
            found.append(check.measure(self.model, device)[check.name])

        hook = Hook(lambda state: True, run, "evaluate", vital=False)
        try:
            Hooks([hook], failures=self._failures).after_step(State())
        except Terminated:
            if self.world.size == 1:
                raise  # else all ranks stop together, before the next step
        return found[0] if found and math.isfinite(found[0]) else None

    @property
    def _learning(self) -> Learning:
        return Learning(
            name=self.name,
            vocab_size=self.model.vocab_size if self.objective is None else None,
            warmup_steps=self.config.schedule.warmup_steps,
            from_scratch=self.from_scratch,
            start_loss=self._start_loss,
        )

    @property
    def minimized(self) -> Objective:
        return self.objective or NextToken(self.config.z_loss)

    def _check(self) -> Check:
        if not isinstance(self.validation, Samples):
            return self.validation
        rows = rows_at_once(self.config, self.validation.length)
        return Validation(self.validation, self.renderer.tokenizer, rows, self._leave, self.check_objective)

    @property
    def _leave(self) -> Stop:
        """What ends an evaluation early: nothing, where all ranks evaluate together and none of them may leave."""
        return Stop() if self._sharded else self._stop

    @property
    def _keep(self) -> Keep:
        """Which checkpoints stay. From the one at the end of a level part, longer runs can go on: see extension.py."""
        config, schedule = self.config, self.config.schedule
        level = frozenset([decay_start(schedule, config.steps)] if isinstance(schedule, WSD) else [])
        every, goals_every = config.keep_every_steps, config.evaluate_every
        return Keep(last=config.keep_checkpoints, every=every, steps=level, goals_every=goals_every)

    @property
    def _acts(self) -> bool:
        """Whether this rank does what happens after a step."""
        return self.world.is_first or self._sharded

    def _agreed(self, value: T) -> T:
        """What the first rank finds, where all have to do the same."""
        found: T = self.world.broadcast(value) if self._sharded else value
        return found

    @property
    def rows(self) -> int:
        """Samples of a step."""
        return rows_per_step(self.config, self.samples.length)

    @property
    def tokens_per_step(self) -> int:
        """Positions that go through the model in a step, padding included."""
        return self.rows * self.samples.length

    def _train(self, state: State, optimizers: Optimizers, device: Device) -> list[dict[str, Any]]:
        """The rest of the steps. Returns what failed on the way without stopping it."""
        precision = Precision.decide(self.config.precision, device)
        precision.restore(state.precision)

        def roll_back(state: State) -> None:
            recorder.rolled_back(state.step, self._checkpoints.roll_back(state))

        facts = plain(self.config) | {"model": plain(self.model.config)}
        sinks = self.config.sinks if self.world.is_first else ()
        watchers = [watcher(sink, self.out.name, self.out, facts) for sink in sinks]
        with (
            self._recorder(state, device) as recorder,
            sampling(self.config, self.model, self.sampler, self._desk, state.step, self._agreed) as samples,
        ):
            recorder.watchers += [one.take for one in watchers]
            hooks = Hooks(
                [*self._hooks(state, device, recorder, samples), *(one.hook() for one in watchers)],
                save=(lambda state: None) if self._sharded else partial(self._save, recorder),
                record=recorder.failed,
                failures=self._failures,
                world=self.world,
                stop=self._stop,
            )
            source = batches(self.samples, first=state.samples, size=self.rows, seed=self.config.seed, early=self.early)
            with closing(source):
                try:
                    train(
                        self.model,
                        optimizers,
                        source,
                        state=state,
                        steps=self.config.steps,
                        micro_batch=rows_at_once(self.config, self.samples.length),
                        learning_rate_share=lambda step: share(self.config.schedule, step, self.config.steps),
                        max_norm=self.config.max_norm,
                        device=device,
                        world=self.world,
                        precision=precision,
                        objective=self.minimized,
                        guard=self._guard(recorder),
                        roll_back=roll_back,
                        hooks=hooks,
                        norms=recorder.norms,
                        clock=recorder.clock,
                        stop=self._stop,
                    )
                except Terminated:
                    self._save(recorder, state)
                    self._checkpoints.wait()
                    hooks.raise_fatal()
                    say(f"asked to stop after step {state.step}; the same command goes on from here", style="yellow")
                    raise
                except Exception as error:
                    self._rescue(state, error, recorder)
                    raise
                finally:
                    Hooks([one.end() for one in watchers], record=recorder.failed).after_step(state)
        self._checkpoints.check_finite(state)
        return hooks.told(self.name)

    def _save(self, recorder: Recorder, state: State) -> None:
        """What metrics tell of a step is safe before its weights are: a power cut leaves no hole in them."""
        self._checkpoints.save(state, before=recorder.metrics.sync)

    def _rescue(self, state: State, error: Exception, recorder: Recorder) -> None:
        """Save the last finished step before an error is raised. In the midst of an update, weights are of no step."""
        if self.world.is_first and (recorder.clock.before_update or isinstance(error, RankLostError)):
            with launch.busy():
                self._checkpoints.rescue(state, before=recorder.metrics.sync)

    @contextmanager
    def _recorder(self, state: State, device: Device) -> Iterator[Recorder]:
        with (
            Metrics(self._desk / METRICS, state.step) as metrics,
            progress(self.name, "steps", self.config.steps) as meter,
        ):
            recorder = Recorder(
                metrics=metrics,
                meter=meter,
                clock=Clock(),
                norms=Norms(self.model, every=self.config.norms_every if self._acts else 0),
                device=device,
                tokens_per_step=self.tokens_per_step,
                flops_per_token=cost(self.model.config, self.model.vocab_size).train_flops_per_token,
                peak_flops=parallel.peak(device, self.world),
                listed_flops=listed_peak(device, self.world.size),
                bytes_per_token=self._validation.bytes_per_token,
            )
            of = f" on {self.world.size} ranks together" if self.world.size > 1 else ""
            found = [
                f"{self.name} on {device.name}; {recorder.peaks()}{of}",
                *remarks(self.config, self.samples.length),
            ]
            say("\n".join(f"  {one}" for one in found))
            recorder.start_at(state, tells=self.world.is_first)
            yield recorder

    def _guard(self, recorder: Recorder) -> Guard:
        how = self.config
        return Guard(how.skip_sigma, how.skip_window, how.max_skips, recorder.skipped)

    def _safe(self, saver: Saver, optimizers: Optimizers, device: Device) -> Checkpoints:
        return Checkpoints(
            name=self.name,
            root=self.out / "checkpoints",
            model=self.model,
            kept=self.kept or Whole(self.model, self.renderer),
            optimizers=optimizers,
            lineage=self.lineage,
            environment=exactness.environment(self.config, device, self.world, optimizers),
            goals=self._keep.is_goal,
            others_begin=partial(others_begin, self.samples),
            saver=saver,
            world=self.world,
        )

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _hooks(self, start: State, device: Device, recorder: Recorder, samples: Sequence[Hook]) -> Sequence[Hook]:
        """Log, save, evaluate: in this order, so that the weights are safe before anything else may fail."""
        steps, every, keep = self.config.steps, self.config.evaluate_every, self._keep
        others = partial(others_begin, self.samples)

        def evaluation_is_due(state: State) -> bool:
            return state.step % every == 0 or state.step == steps

        def save_is_due(state: State) -> bool:
            late = self._agreed(self._checkpoints.late(self.config.save_every_seconds))
            doubtful = state.guard.in_a_row > 0 and state.step < steps
            return (late or keep.is_goal(state.step) or state.step == steps) and not doubtful

        evaluations = self._evaluations(device, recorder)
        known = {
            line["step"]: float(line["validation_loss"]) for line in recorder.metrics.kept if "validation_loss" in line
        }
        self.measured.update(known)
        everywhere = [
            Hook(lambda s: others(s.samples, s.samples + self.rows), lambda s: forget(s.guard), "course"),
            Hook(lambda s: s.step % STEPS_BETWEEN_TRIMS == 0, lambda s: devices.return_freed_memory(), "memory"),
        ]
        if not self._acts:
            return everywhere
        main = [main_log(self._desk / MAIN_LOG, start.step, recorder.watchers)] if self.config.main_log else []
        if start.step:  # the process may have died between saving and evaluating
            there = self._agreed([name for one in recorder.metrics.kept if one["step"] == start.step for name in one])
            missed = [
                Hook(evaluation_is_due, run, hook, vital=False) for hook, name, run in evaluations if name not in there
            ]
            Hooks([*missed, *samples], record=recorder.failed, failures=self._failures).after_step(start)
        return [
            Hook(lambda s: s.step % self.config.log_every == 0 or s.step == steps, recorder.log, "log"),
            *main,
            Hook(lambda s: bool(recorder.norms.latest), recorder.log_norms, "norms"),
            everywhere[0],
            Hook(save_is_due, partial(self._save, recorder), "save"),
            Hook(evaluation_is_due, lambda s: self._checkpoints.wait(), "save"),
            *(Hook(evaluation_is_due, run, hook, vital=False) for hook, _, run in evaluations),
            Hook(evaluation_is_due, lambda s: self._learning.check_early(s, self.measured), "learning"),
            everywhere[1],
            *samples,
        ]

    def _evaluations(self, device: Device, recorder: Recorder) -> list[tuple[str, str, Callable[[State], None]]]:
        """Each as the name of its hook, that of a number which it writes, and what it does."""

        def written(measure: Evaluation) -> Callable[[State], None]:
            def run(state: State) -> None:
                try:
                    with evaluating(self.model):
                        found = measure(self.model, device, self._leave)
                except Terminated:
                    if self.world.size == 1:
                        raise
                    return  # all ranks stop after this step; a run that goes on from it evaluates first
                recorder.write(state.step, **found)
                if "validation_loss" in found:
                    self.measured[state.step] = found["validation_loss"]

            return run

        others = [(name, name, written(measure)) for name, measure in self.evaluations.items()]

        def measure(model: Transformer, device: Device, stop: Stop) -> dict[str, float]:
            return self._validation.measure(model, device)

        return [("evaluate", self._validation.name, written(measure)), *others]
