"""
A training run: its device, resume, checkpoints, metrics and progress around the loop of step.py.

`TrainingRun` is what a stage asks for: it sets up, resumes, trains and leaves the model. The stage decides what differs
between pretraining and finetuning: data, loss mask, loss function, and which weights train. Hooks run in the order
given, after a step, and at no other time.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bloomery.core.config import plain
from bloomery.core.log import METRICS, Metrics, doing, info, kept, progress
from bloomery.core.signals import StopRequest, Terminated, on_signals
from bloomery.hw import device as devices
from bloomery.hw import distributed, launcher
from bloomery.hw.device import Device, listed_peak
from bloomery.hw.distributed import RankLostError, World
from bloomery.hw.monitor import GpuMonitor
from bloomery.model.config import ModelConfig, cost
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import PackedDataset, SampleSource, batches, others_begin
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import checkpointing, compile, fsdp
from bloomery.train.checkpointing import Checkpoints, ModelSaver
from bloomery.train.collectives import Norms
from bloomery.train.config import Mesh, Training, WSDSchedule, remarks
from bloomery.train.loss import chunks_of
from bloomery.train.metrics import MAIN_LOG, MetricsLogger, main_log, watcher
from bloomery.train.optim import Optimizers, decay_start, learning_rate_share
from bloomery.train.plan.here import DryRun, decided, offload_cost, tell
from bloomery.train.plan.memory import check_shard, logits_chunk_bytes, rows_at_once, rows_per_step
from bloomery.train.precision import Precision, compute_in_short_formats, short
from bloomery.train.progress import KeptWeights, ProgressCheck, best_step, last_loss
from bloomery.train.state import Failure, Hook, Hooks, PhaseTimer, SpikeGuard, State, forget
from bloomery.train.step import CausalLMLoss, LossFunction, Trainer
from bloomery.train.validation import EvalCheck, Sampler, Validation, evaluating, sampling
from bloomery.weights.checkpoint import RetentionPolicy, Saver

LOG, GPUS = "log.txt", "gpus.csv"
STEPS_BETWEEN_TRIMS = 25
FEWEST_STEPS_BETWEEN = 10
"""Of the ends of epochs that are evaluated: each evaluation saves a checkpoint too."""

T = TypeVar("T")
Evaluation = Callable[[Transformer, Precision, StopRequest], Mapping[str, float]]
"""Of a model, where and how it computes, and whether to end early (by Terminated): numbers by name."""


@dataclass
class TrainingRun:
    """A training run: what it trains, on what, and where it leaves its results."""

    name: str
    config: Training
    model: Transformer
    model_saver: ModelSaver
    tokenizer: Tokenizer
    samples: SampleSource
    validation: PackedDataset | EvalCheck
    """Samples whose loss is measured, or what measures something else."""
    out: Path
    sampler: Sampler | None = None
    """What writes samples, for those who ask for them."""
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    """Measurements at the same steps as the validation loss, by name; each returns a number of its own name."""
    measured: dict[int, float] = field(default_factory=dict)
    """Step -> validation loss, so far."""
    errors: dict[int, float] = field(default_factory=dict)
    """Step -> standard error of the validation loss, where that is measured."""
    selection: KeptWeights | None = None
    """Which weights are left, and when training ends early. None: the last weights, after all steps."""
    loss_function: LossFunction | None = None
    """What is minimized. None: the cross entropy of the next token."""
    validation_loss_function: LossFunction | None = None
    """The same for the validation samples, where it knows them one by one."""
    begin: Callable[[Precision, int, StopRequest], None] | None = None
    """Called with the rows that fit at once, when the initial model is on its device, before training."""
    from_scratch: bool = False
    """Whether the model has random weights. Then it has to become better than an untrained one: see progress.py."""
    early: bool = True
    """Whether samples may be made before the steps in front of them are done."""
    world: World = field(default_factory=World.alone)
    """The ranks that train it together; each has a run. The first one writes."""
    own: fsdp.OwnParts | None = None
    """Weights that this rank has read, of a model that has shapes alone."""
    _stop: StopRequest = field(default_factory=StopRequest)
    _ended: bool = False
    """Whether the last step is done, or that after which all ranks stop, and the weights are those of it."""
    _failures: list[Failure] = field(default_factory=list)
    _checkpoints: Checkpoints = field(init=False)
    _validation: EvalCheck = field(init=False)
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
        with (
            fsdp.desk(self.out, self.world) as self._desk,
            kept(self._desk / LOG),
            on_signals() as self._stop,
            ExitStack() as stack,
        ):
            doing("choosing kernels and number format")
            precision = Precision.of_run(self.config, self._desk, self.world)
            device = precision.device
            on_processor = device.torch_device.type == "cpu"
            stack.enter_context(chunks_of(logits_chunk_bytes(device.memory_bytes, processor=on_processor)))
            distributed.check_devices(self.world, device.torch_device)
            is_open = self.config.activation_checkpointing == "auto"
            self.config = compile.settled(self.config, device, self.early)
            self.config = decided(self.config, self._shape, self.model.vocab_size, device, self.world, self._desk)
            mesh = check_shard(self.config, self.world.size, adapters=self.model_saver.of_adapters)
            self._sharded = mesh is not None
            self._set_formats(precision)
            if mesh is not None:
                self._shard(mesh, precision, stack)
            if is_open:
                info(f"  activation_checkpointing: {self.config.activation_checkpointing}, as little as fits")
            doing("compiling blocks" if self.config.compile != "off" else "moving the model to its device")
            compile.prepare(self.model, self.config, self.samples, precision, self._desk, self.world)
            how = self.config
            optimizers = Optimizers(self.model, how.optimizer, precision.muon_dtype, seed=how.seed, world=self.world)
            if self.begin is not None:
                self.begin(precision, rows_at_once(self.config, self.samples.length), self._stop)
            self._validation = self._check()
            if self.config.dry_run and not self._sharded:
                doing("dry run: two steps, an evaluation and a save")
                self.config = self._tried(optimizers, precision)
            doing("validation loss before the first step")
            self._start_loss = self._measured_start(precision)
            doing("reading the newest checkpoint")
            with Saver(self.out / "checkpoints", self._keep, self.world) as saver:
                self._checkpoints = self._safe(saver, optimizers, device)
                state, self._stop.saves = self._checkpoints.resume(), True
                stack.enter_context(self._taking_over(state))
                began, first_step = time.monotonic(), state.step
                failures = self._train(state, optimizers, precision)
            steps, seconds = state.step - first_step, time.monotonic() - began
            best = self._kept_step(state)
            with self.world.alike():
                self._learning.check(state, self.measured if self._acts else None, best)
                if warning := self._learning.warning(self.measured, self.errors, best) if self._acts else "":
                    info(warning, "yellow")
            if best != state.step:
                self._ended = False  # from here on, weights are not those of the last step
                self._checkpoints.take_weights(best)
            self._checkpoints.leave_model(self.out / "model", best)
            if self.world.any(self._stop.asked):
                raise Terminated(self._stop.code)
        facts = cost(self.model.config, self.model.vocab_size)
        return {
            "parameters": facts.parameters,
            "steps": state.step,
            "tokens": state.step * self.global_batch_tokens,
            "supervised_tokens": state.tokens,
            "epochs": round(self.samples.epochs(state.samples), 3),
            "loss": None if (loss := last_loss(state)) is None else round(loss, 5),
            "validation_loss": self.measured.get(best),
            **({} if self.selection is None else {"best_step": best, "ended_early": state.step < self.config.steps}),
            "skipped_steps": state.guard.skipped,
            "rollbacks": len(state.guard.rollbacks),
            "failures": failures,
            "continued": checkpointing.continued_from(self.out),
            "tokens_per_second": round(steps * self.global_batch_tokens / seconds) if steps else None,
            "device": device.name,
            "precision": short(precision.dtype),
            "threads": devices.threads(),
            "peak_bytes": device.peak_bytes(),
            "peak_flops_measured": fsdp.peak(device, self.world),
            "peak_flops_catalogue": listed_peak(device, self.world.size) or "unknown",
        }

    def _set_formats(self, precision: Precision) -> None:
        """The formats of weights, of the residual stream and of float8 that the settings ask for."""
        compute_in_short_formats(self.model, self.config, precision)
        fsdp.keep_weights(self.model, self.config.weight_dtype, sharded=self._sharded)

    def _shard(self, mesh: Mesh, precision: Precision, stack: ExitStack) -> None:
        """Weights go where they compute one group at a time, and leave their part there, or on the host."""
        device, offload = precision.device, self.config.offload == "host"
        inputs = self._shape, self.samples, precision, self._desk, self.world
        self.config = compile.settled_before_sharding(self.config, *inputs)
        spread = self.world.any(any(weight.is_meta for weight in self.model.parameters()))
        if offload:
            info(offload_cost(self.config, self._shape, self.model.vocab_size, device, self.world))
        if self.world.size == 1:
            stack.enter_context(distributed.joined_alone())
        fsdp.shard(self.model, self.world, device, mesh, spread=spread, own=self.own, offload=offload)

    def _tried(self, optimizers: Optimizers, precision: Precision) -> Training:
        """The settings, with as many rows at once as two steps have shown to fit."""
        rows = rows_at_once(self.config, self.samples.length)
        trial = DryRun(
            model=self.model,
            optimizers=optimizers,
            samples=self.samples,
            validation=self._validation,
            world=self.world,
            precision=precision.for_trial(),
            max_grad_norm=self.config.max_grad_norm,
            loss_function=self.minimized,
            one_shape=self.config.compile != "off",
        )
        outcome = trial.run(rows, self.rows)
        tell(outcome, self.rows, self.config.steps, precision.device, self.world)
        if outcome.rows >= min(rows, -(-self.rows // self.world.size)):
            return self.config
        fewer = self.config.model_copy(update={"micro_batch_tokens": outcome.rows * self.samples.length})
        compile.decide(self.model, fewer, self.samples, precision, self._desk, self.world)
        return fewer

    def _measured_start(self, precision: Precision) -> float | None:
        """
        The validation loss before the first step; None where there is none, or where it is another rank's to measure.
        A run that resumes measures it again, before it takes up a checkpoint, and so needs no record of it.
        """
        if not self._acts or not isinstance(self._validation, Validation):
            return None
        check, losses = self._validation, list[float]()

        def run(state: State) -> None:
            losses.append(check.measure(self.model, precision)[check.name])

        hook = Hook(lambda state: True, run, "evaluate", vital=False)
        try:
            Hooks([hook], failures=self._failures).after_step(State())
        except Terminated:
            if self.world.size == 1:
                raise  # else all ranks stop together, before the next step
        return losses[0] if losses and math.isfinite(losses[0]) else None

    @property
    def _learning(self) -> ProgressCheck:
        return ProgressCheck(
            name=self.name,
            vocab_size=self.model.vocab_size if self.loss_function is None else None,
            warmup_steps=self.config.schedule.warmup_steps,
            from_scratch=self.from_scratch,
            start_loss=self._start_loss,
            keeps_best=self.selection is not None and self.selection.keeps_best,
        )

    @property
    def _shape(self) -> ModelConfig:
        """The model's, with the context that its samples use."""
        shape = self.model.config
        return shape.model_copy(update={"context_length": min(shape.context_length, self.samples.length)})

    @property
    def _epoch_ends(self) -> frozenset[int]:
        """The steps behind which an epoch has ended, and that are evaluated for it: none soon after another."""
        if self.selection is None:
            return frozenset()
        ends, epochs = list[int](), self.config.steps * self.rows // self.samples.num_samples
        for epoch in range(1, epochs + 1):
            step = -(-epoch * self.samples.num_samples // self.rows)
            if step - (ends[-1] if ends else 0) >= FEWEST_STEPS_BETWEEN:
                ends.append(step)
        return frozenset(ends)

    def _best_step(self) -> int | None:
        """That of the lowest validation loss among those whose checkpoint is there."""
        root = self.out / "checkpoints"
        return best_step({step: loss for step, loss in self.measured.items() if (root / f"{step:09d}").is_dir()})

    def _kept_step(self, state: State) -> int:
        """The step whose weights are left, the same on all ranks."""
        if self.selection is None or not self.selection.keeps_best:
            return state.step
        best = self.world.broadcast(self._best_step())
        if best is None:
            info("no evaluation finished, so the last weights are kept", "yellow")
            return state.step
        step: int = best
        return step

    def _ends_early(self) -> bool:
        """Whether evaluations no longer improve, on any rank."""
        if self.selection is None or self.selection.early_stopping is None:
            return False
        return self.world.any(self.selection.ends(self.measured, self.errors))

    @property
    def minimized(self) -> LossFunction:
        return self.loss_function or CausalLMLoss(self.config.z_loss)

    def _check(self) -> EvalCheck:
        if not isinstance(self.validation, PackedDataset):
            return self.validation
        rows = rows_at_once(self.config, self.validation.length)
        by_row = self.selection is not None and self.validation_loss_function is None
        return Validation(self.validation, self.tokenizer, rows, self._leave, self.validation_loss_function, by_row)

    @property
    def _leave(self) -> StopRequest:
        """What ends an evaluation early: nothing, where all ranks evaluate together and none of them may leave."""
        return StopRequest() if self._sharded else self._stop

    @property
    def _keep(self) -> RetentionPolicy:
        """Which checkpoints stay. Longer runs can resume from the checkpoint that ends a level part."""
        config, schedule = self.config, self.config.schedule
        level = frozenset([decay_start(schedule, config.steps)] if isinstance(schedule, WSDSchedule) else [])
        return RetentionPolicy(
            last=config.keep_last,
            every=config.keep_every,
            steps=level,
            goals_every=config.eval_every,
            goals=self._epoch_ends,
            best=self._best_step if self.selection is not None and self.selection.keeps_best else None,
        )

    @property
    def _acts(self) -> bool:
        """Whether this rank does what happens after a step."""
        return self.world.is_first or self._sharded

    def _agreed(self, value: T) -> T:
        """What the first rank finds, where all have to do the same."""
        agreed: T = self.world.broadcast(value) if self._sharded else value
        return agreed

    @property
    def rows(self) -> int:
        """Samples of a step."""
        return rows_per_step(self.config, self.samples.length)

    @property
    def global_batch_tokens(self) -> int:
        """Positions that go through the model in a step, padding included."""
        return self.rows * self.samples.length

    def _train(self, state: State, optimizers: Optimizers, precision: Precision) -> list[dict[str, Any]]:
        """Run the remaining steps. Returns the failures of hooks that did not stop the run."""
        precision.restore(state.precision)
        precision.device.restart_peak()  # that of trials does not count

        def roll_back(state: State) -> None:
            recorder.rolled_back(state.step, self._checkpoints.roll_back(state))

        facts = plain(self.config) | {"model": plain(self.model.config)}
        sinks = self.config.sinks if self.world.is_first else ()
        watchers = [watcher(sink, self.out.name, self.out, facts) for sink in sinks]
        with (
            self._recorder(state, precision.device) as recorder,
            sampling(self.config, self.model, self.sampler, self._desk, state.step, self._agreed) as samples,
        ):
            recorder.watchers += [one.take for one in watchers]
            hooks = Hooks(
                [*self._hooks(state, precision, recorder, samples), *(one.hook() for one in watchers)],
                save=(lambda state: None) if self._sharded else partial(self._save, recorder),
                record=recorder.failed,
                failures=self._failures,
                world=self.world,
                stop=self._stop,
            )
            source = batches(self.samples, first=state.samples, size=self.rows, seed=self.config.seed, early=self.early)
            with closing(source):
                trainer = Trainer(
                    model=self.model,
                    optimizers=optimizers,
                    batches=source,
                    state=state,
                    steps=self.config.steps,
                    micro_batch=rows_at_once(self.config, self.samples.length),
                    learning_rate_share=lambda step: learning_rate_share(self.config.schedule, step, self.config.steps),
                    max_grad_norm=self.config.max_grad_norm,
                    world=self.world,
                    precision=precision,
                    loss_function=self.minimized,
                    guard=self._guard(recorder),
                    roll_back=roll_back,
                    hooks=hooks,
                    norms=recorder.norms,
                    timer=recorder.timer,
                    stop=self._stop,
                    ends_early=self._ends_early,
                )
                try:
                    with distributed.exchanging() if self._sharded else nullcontext():
                        trainer.train()
                    self._ended = True
                except Terminated:
                    self._ended = True
                    self._save(recorder, state)
                    self._checkpoints.wait()
                    hooks.raise_fatal()
                    info(f"asked to stop after step {state.step}; the same command resumes from here")
                    raise
                except Exception as error:
                    self._rescue(state, error, recorder)
                    raise
                finally:
                    Hooks([one.end() for one in watchers], record=recorder.failed).after_step(state)
        self._checkpoints.check_finite(state)
        return hooks.report_failures(self.name)

    def _save(self, recorder: MetricsLogger, state: State) -> None:
        """What metrics tell of a step is safe before its weights are: a power cut leaves no hole in them."""
        self._checkpoints.save(state, before=recorder.metrics.sync)

    def _rescue(self, state: State, error: Exception, recorder: MetricsLogger) -> None:
        """
        Save the last finished step before an error is raised. In the midst of an update, weights are of no step. If the
        first rank was killed, another one with all weights saves.
        """
        lost = isinstance(error, RankLostError) and recorder.timer.phase != "optimizer"
        acts = (lost or recorder.timer.before_update) if self.world.is_first else (lost and self._takes_over())
        if acts:
            with launcher.busy():
                log = recorder.metrics.sync if self.world.is_first else partial(self._log_last_step, state)
                self._checkpoints.rescue(state, before=log)

    @contextmanager
    def _taking_over(self, state: State) -> Iterator[None]:
        """While the block runs, another rank saves the last step if the first one is killed after it."""
        try:
            yield
        except RankLostError:
            if self._ended and not self.world.is_first and self._takes_over():
                with launcher.busy():
                    self._checkpoints.rescue(state, before=partial(self._log_last_step, state))
            raise

    def _takes_over(self) -> bool:
        """Whether this rank saves in place of the first."""
        return not self._sharded and launcher.takes_over()

    def _log_last_step(self, state: State) -> None:
        """Write the line of the last step in place of the first rank, which may have been killed before it did."""
        with Metrics(self.out / METRICS, state.step) as metrics:
            is_due = state.step % self.config.log_every == 0 or state.step == self.config.steps
            if is_due and not any(line["step"] == state.step and "learning_rate" in line for line in metrics.kept):
                metrics.write(step=state.step, **state.metrics)
            state.logged = state.step if is_due else state.step - state.step % self.config.log_every
            metrics.sync()

    @contextmanager
    def _recorder(self, state: State, device: Device) -> Iterator[MetricsLogger]:
        doing("measuring the speed of matmuls")
        every = self.config.gpu_stats_every_seconds if self.world.is_first else 0
        with (
            Metrics(self._desk / METRICS, state.step) as metrics,
            GpuMonitor(every, self._desk / GPUS if self.config.gpu_csv else None) as gpus,
            progress(self.name, "steps", self.config.steps) as meter,
        ):
            recorder = MetricsLogger(
                metrics=metrics,
                meter=meter,
                timer=PhaseTimer(),
                norms=Norms(self.model, every=self.config.grad_stats_every if self._acts else 0),
                device=device,
                global_batch_tokens=self.global_batch_tokens,
                flops_per_token=cost(self._shape, self.model.vocab_size).train_flops_per_token,
                peak_flops=fsdp.peak(device, self.world),
                listed_flops=listed_peak(device, self.world.size),
                bytes_per_token=self._validation.bytes_per_token,
                gpus=gpus,
            )
            of = f" on {self.world.size} ranks together" if self.world.size > 1 else ""
            messages = [
                f"{self.name} on {device.name}; {recorder.peaks()}{of}",
                *remarks(self.config, self.samples.length),
            ]
            info("\n".join(f"  {one}" for one in messages))
            recorder.start_at(state, tells=self.world.is_first)
            yield recorder

    def _guard(self, recorder: MetricsLogger) -> SpikeGuard:
        how = self.config
        return SpikeGuard(how.spike_sigma, how.spike_window, how.max_skipped_steps, recorder.skipped)

    def _safe(self, saver: Saver, optimizers: Optimizers, device: Device) -> Checkpoints:
        return Checkpoints(
            name=self.name,
            root=self.out / "checkpoints",
            model=self.model,
            model_saver=self.model_saver,
            optimizers=optimizers,
            environment=checkpointing.environment(self.config, device, self.world, optimizers),
            goals=self._keep.is_goal,
            others_begin=partial(others_begin, self.samples),
            saver=saver,
            world=self.world,
        )

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _hooks(
        self, start: State, precision: Precision, recorder: MetricsLogger, samples: Sequence[Hook]
    ) -> Sequence[Hook]:
        """Log, save, evaluate: in this order, so that the weights are safe before anything else may fail."""
        steps, every, keep, epoch_ends = self.config.steps, self.config.eval_every, self._keep, self._epoch_ends
        others = partial(others_begin, self.samples)

        def evaluation_is_due(state: State) -> bool:
            return state.step % every == 0 or state.step == steps or state.step in epoch_ends

        def save_is_due(state: State) -> bool:
            late = self._agreed(self._checkpoints.late(self.config.save_every_seconds))
            doubtful = state.guard.in_a_row > 0 and state.step < steps
            return (late or keep.is_goal(state.step) or state.step == steps) and not doubtful

        evaluations = self._evaluations(precision, recorder)
        known = {
            line["step"]: float(line["validation_loss"]) for line in recorder.metrics.kept if "validation_loss" in line
        }
        self.measured.update(known)
        noise = "validation_standard_error"
        self.errors.update({line["step"]: float(line[noise]) for line in recorder.metrics.kept if noise in line})
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

    def _evaluations(
        self, precision: Precision, recorder: MetricsLogger
    ) -> list[tuple[str, str, Callable[[State], None]]]:
        """Each as the name of its hook, that of a number which it writes, and what it does."""

        def written(measure: Evaluation) -> Callable[[State], None]:
            def run(state: State) -> None:
                try:
                    with evaluating(self.model):
                        metrics = measure(self.model, precision, self._leave)
                except Terminated:
                    if self.world.size == 1:
                        raise
                    return  # all ranks stop after this step; a resumed run evaluates first
                recorder.write(state.step, **metrics)
                if "validation_loss" in metrics:
                    self.measured[state.step] = metrics["validation_loss"]
                    self.errors[state.step] = metrics.get("validation_standard_error", 0.0)

            return run

        others = [(name, name, written(measure)) for name, measure in self.evaluations.items()]

        def measure(model: Transformer, precision: Precision, stop: StopRequest) -> dict[str, float]:
            return self._validation.measure(model, precision)

        return [("evaluate", self._validation.name, written(measure)), *others]
