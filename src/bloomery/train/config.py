"""
How a model is trained, as numbers. Needs no torch.

`by_scaling_rules` derives a model's shape and settings from one number, the number of layers:

    width             64 · depth
    heads             width / 64, each with keys and values of its own
    mlp width         8/3 · width, rounded up to a multiple of 64
    tokens            r · P        P: weights that are multiplied for each token, the head included; r: 20
    tokens per step   2¹⁹ · (tokens / D₁₂)^0.383, rounded to a power of two, and down to whole sequences
    steps             tokens / tokens per step
    rates             those of depth 12 times (tokens per step / 2¹⁹)^½; for all but Muon's matrices also times
                      (768 / width)^½ with Muon, and 768 / width with the others

The form, one number from which the rest follows, is nanochat's. So are its ratio of 64 between width and depth, its
Muon rates and its square roots. r is that of Hoffmann et al. 2022 (https://arxiv.org/abs/2203.15556). The exponent
is that of Bergsma et al. 2025 (https://arxiv.org/abs/2505.13738). D₁₂ is what 20 tokens for each weight make of
depth 12 with a vocabulary of 32768. AdamW's rates at 768 numbers fall with the width as those of Brown et al. 2020,
table 2.1.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from bloomery.core.config import (
    VOLATILE,
    Between,
    Config,
    Context,
    DiskPath,
    Seed,
    Share,
    Steps,
    StepsOrNone,
    build,
    plain,
)
from bloomery.core.errors import ConfigError
from bloomery.hw.host import DeviceChoice
from bloomery.model.config import PRESETS, Base, Float8, Lora, ModelConfig, RopeScaling, cost

Momentum = Annotated[float, Between(0, 0.9999999, "a mean that keeps all never moves")]
"""Share of a running mean that is kept from step to step."""


LearningRate = Annotated[
    float, Between(1e-12, 10, "a larger one throws weights away with its first step", "a smaller one changes no weight")
]
Decay = Annotated[float, Between(0, 100, "each step takes learning rate × decay of a weight, and it has only one")]
Epsilon = Annotated[float, Between(1e-20, 1, "a larger one outweighs every gradient, a smaller one is lost")]

Level = Literal["none", "full", "selective"]
USUAL_CONTEXT = 1024
"""Of rows for a model whose context may be a hundred times that."""
LEVELS: tuple[Level, ...] = ("none", "selective", "full")
"""From the one that needs the most memory on; each computes more again."""


class Adam(Config):
    """What the relatives of Adam have in common."""

    learning_rate: LearningRate = 6e-4
    """Peak of the learning rate."""
    weight_decay: Decay = 0.1
    """Weight decay of matrices."""
    decay_embeddings: bool = True
    """Whether the tables of embedding and head decay too, as the matrices of the blocks do. Vectors never do."""
    beta1: Momentum = 0.9
    """Share of the running mean of gradients that is kept."""
    beta2: Momentum = 0.95
    """Share of the running mean of squared gradients that is kept."""
    epsilon: Epsilon = 1e-8
    """Added to the denominator of an update."""


class AdamW(Adam):
    """AdamW with decoupled weight decay on matrices only (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101)."""

    kind: Literal["adamw"] = "adamw"


class AdamW8bit(Adam):
    """
    AdamW whose two moments are kept in 8 bits per number, with a scale for each block of them (Dettmers et al. 2021,
    https://arxiv.org/abs/2110.02861). Those of norms and biases stay in float32.
    """

    kind: Literal["adamw8bit"] = "adamw8bit"
    block: Annotated[int, Between(1, 2**20, "a scale for more numbers is one for all")] = 256
    """How many numbers share a scale."""


class AdEMAMix(Adam):
    """
    AdamW with a second, slow mean of the gradients (Pagliardini et al. 2024,
    https://arxiv.org/abs/2409.03137).
    """

    kind: Literal["ademamix"] = "ademamix"
    beta2: Momentum = 0.999
    beta3: Momentum = 0.9999
    """Share of the slow mean that is kept."""
    alpha: Annotated[float, Between(0, 1000, "it weighs the slow mean against the fast one")] = 8.0
    """Weight of the slow mean; the fast mean has weight 1."""
    ramp_steps: StepsOrNone = 2000
    """Steps over which α rises from 0 and β₃ from β₁. The paper takes all steps of the run."""


class Lion(Config):
    """
    The sign of a mix of momentum and gradient (Chen et al. 2023, https://arxiv.org/abs/2302.06675). Every number moves
    by the learning rate, which is therefore three to ten times smaller than AdamW's, and the decay as much larger.
    """

    kind: Literal["lion"] = "lion"
    learning_rate: LearningRate = 1e-4
    """Peak of the learning rate."""
    weight_decay: Decay = 0.5
    """Weight decay of matrices."""
    decay_embeddings: bool = True
    """Whether embedding and head decay too."""
    beta1: Momentum = 0.9
    """Share of momentum in the direction of an update."""
    beta2: Momentum = 0.99
    """Share of the running mean of gradients that is kept."""


class Muon(Config):
    """
    Muon for the matrices of the blocks, AdamW for the rest.

    Orthogonalizes the momentum of a matrix before it applies it (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/).
    """

    kind: Literal["muon"] = "muon"
    muon_lr: LearningRate = 0.02
    """Learning rate of Muon, for the matrices of the blocks."""
    learning_rate: LearningRate = 3e-3
    """Learning rate of AdamW, for embedding, head and norms."""
    weight_decay: Decay = 0.01
    """Weight decay of matrices."""
    decay_embeddings: bool = False
    """Whether embedding and head decay too."""
    momentum: Momentum = 0.95
    """Momentum of Muon."""
    newton_schulz_steps: Annotated[int, Between(1, 100, "five are enough, and each costs three matmuls")] = 5
    """Iterations that make an update orthogonal."""
    scaling: Literal["original", "match_rms_adamw"] = "original"
    """Factor on a matrix's rate: √max(1, rows / columns), or 0.2 √max(rows, columns), for rates tuned for AdamW."""
    beta1: Momentum = 0.9
    """AdamW: share of the running mean of gradients that is kept."""
    beta2: Momentum = 0.95
    """AdamW: share of the running mean of squared gradients that is kept."""
    epsilon: Epsilon = 1e-8
    """AdamW: added to the denominator of an update."""


Optimizer = Annotated[Muon | AdamW | AdEMAMix | AdamW8bit | Lion, Field(discriminator="kind")]


class ConstantSchedule(Config):
    """
    Learning rate as a share of its peak: a linear warm-up, then level.

        share(t) = (t + 1) / W      for t < W, where t counts steps from 0
                   1                after
    """

    kind: Literal["constant"] = "constant"
    warmup_steps: StepsOrNone = 0
    """Number of steps in which the learning rate rises to its peak."""


class LinearSchedule(Config):
    """
    A linear warm-up, then a line down to `min_lr_ratio`, r.

        share(t) = r + (1 − r) · (1 − x)      x = (t − W) / (N − W)
    """

    kind: Literal["linear"] = "linear"
    warmup_steps: StepsOrNone = 0
    """Number of steps in which the learning rate rises to its peak."""
    min_lr_ratio: Share = 0.0
    """Learning rate at the end, as a share of the peak."""


class CosineSchedule(Config):
    """
    A linear warm-up, then half a wave down to `min_lr_ratio`, r (Loshchilov and Hutter 2016, https://arxiv.org/abs/1608.03983).

        share(t) = r + (1 − r) · (1 + cos πx) / 2      x = (t − W) / (N − W)
    """

    kind: Literal["cosine"] = "cosine"
    warmup_steps: StepsOrNone = 0
    """Number of steps in which the learning rate rises to its peak."""
    min_lr_ratio: Share = 0.0
    """Learning rate at the end, as a share of the peak."""


class WSDSchedule(Config):
    """
    Warm-up, stable, decay (Hägele et al. 2024, https://arxiv.org/abs/2405.18392): level until the decay begins;
    r is `min_lr_ratio`.

        share(t) = 1                                       for t < S = max(W, N − decay steps)
                   r + (1 − r) · (1 − shape(x))    x = (t − S) / (N − S); shape(x) = x, √x or (1 − cos πx) / 2

    Until S it does not depend on N: from the end of its constant part, a run may resume with more steps, or decay.
    """

    kind: Literal["wsd"] = "wsd"
    warmup_steps: StepsOrNone = 0
    """Number of steps in which the learning rate rises to its peak."""
    decay_fraction: Share = 0.5
    """Share of all steps that the decay takes, rounded down to whole steps, but at least one step unless it is 0."""
    decay_steps: StepsOrNone | None = None
    """Steps of the decay, instead of `decay_fraction`."""
    shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Shape of the decay."""
    min_lr_ratio: Share = 0.0
    """Learning rate at the end, as a share of the peak."""


Schedule = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule | WSDSchedule, Field(discriminator="kind")]


class WeightsAndBiases(Config):
    """https://wandb.ai; needs `pip install 'bloomery[wandb]'` and, unless it is offline, an account."""

    kind: Literal["wandb"] = "wandb"
    project: str = "bloomery"
    """Name of the project there."""
    offline: bool = False
    """Keep the numbers in the stage's folder, for `wandb sync`."""

    def packages(self) -> tuple[str, ...]:
        return ("wandb",)


class TensorBoard(Config):
    """Event files in the stage's folder tensorboard/; nothing needs to be installed to write them."""

    kind: Literal["tensorboard"] = "tensorboard"


class Trackio(Config):
    """A dashboard on this machine (https://huggingface.co/docs/trackio); needs `pip install 'bloomery[trackio]'`."""

    kind: Literal["trackio"] = "trackio"
    project: str = "bloomery"
    """Name of the project there."""

    def packages(self) -> tuple[str, ...]:
        return ("trackio",)


Sink = Annotated[WeightsAndBiases | TensorBoard | Trackio, Field(discriminator="kind")]


Ranks = Annotated[int, Between(1, 1024, "each rank is a process of this machine")]
CheckpointCount = Annotated[int, Between(1, 1000, "each is as large as model and optimizer")]
GpuSeconds = Annotated[int, Between(0, 3600, "no run is watched by the hour")]
StepWindow = Annotated[int, Between(2, 10**6, "a deviation takes two steps, and all are in memory")]
StepTokens = Annotated[int, Between(1, 2**32, "no run takes more in one step")]


def trained_tokens(global_batch_tokens: int, context: int) -> int:
    """Of so many tokens per step, those that are trained: whole rows, at least one."""
    return max(1, global_batch_tokens // context) * context


MeshAxis = Annotated[int, Between(1, 1024, "no plan is for more devices")]


class Mesh(Config):
    """Devices along three axes that train a model together: as many as there are processes."""

    preset: str | None = None
    """Shape of the model for `bloomery plan`: a name in `model/config.py`. Training uses the shape of its weights."""
    device: str | None = None
    """Device for `bloomery plan`: a name in `hw/specs.py`. Not set: `plan` needs `--device` or `--memory`."""
    dp_replicate: MeshAxis = 1
    """Copies of the model. Each copy trains on different sequences."""
    dp_shard: MeshAxis = 1
    """Devices that share a copy: each holds a part of every tensor, and gathers a block when it computes it."""
    tp: MeshAxis = 1
    """Devices that compute each matmul together, each with its part of the matrix."""
    zero_stage: Literal[1, 2, 3] = 3
    """
    What `dp_shard` shards, as in ZeRO: optimizer state (1), also gradients (2), also weights (3). With 1 and 2, each
    device gathers all weights once per step. With 1, it also keeps all gradients, and reduces them once per step.
    """

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it, the outermost first."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}

    @property
    def devices(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @model_validator(mode="after")
    def _is_of_a_known_shape(self) -> "Mesh":
        if self.preset is not None and self.preset not in PRESETS:
            near = difflib.get_close_matches(self.preset, PRESETS, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"known are {', '.join(PRESETS)}"
            raise ValueError(f"preset: there is no preset {self.preset!r}; {hint}")
        if self.devices > 1024:
            raise ValueError(f"a plan is for at most 1,024 devices, not {self.devices:,}")
        if self.zero_stage < 3 and self.dp_shard == 1:
            raise ValueError(f"zero_stage={self.zero_stage} needs several devices of dp_shard, which is 1")
        return self


class Training(Config):
    """What pretraining and finetuning have in common."""

    steps: Steps
    """Number of updates."""
    global_batch_tokens: StepTokens
    """Tokens of one update, over all micro-batches and devices."""
    optimizer: Optimizer = Muon()
    """How gradients become updates."""
    schedule: Schedule = Field(WSDSchedule(), validate_default=True)
    """How the learning rate changes over the steps, as a share of its peak."""
    max_grad_norm: Annotated[float, Between(1e-6, 1e12, "a larger one clips none", "a smaller one leaves nothing")] = (
        1.0
    )
    """Gradients are scaled down to this global norm."""
    z_loss: Annotated[float, Between(0, 10, "a larger one outweighs the cross entropy")] = 0.0
    """Weight of the penalty (log Σ exp logits)² of each supervised token, which keeps the logits near zero."""
    seed: Seed = 0
    """Seed of the initial weights and of the order of the data."""
    device: DeviceChoice = "auto"
    """Where training runs. `auto`: a GPU if there is one, or else the CPU."""
    precision: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of matmuls. `auto` chooses a format that the hardware supports."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """
    Format of matrices that are trained, and of their gradients and checkpoints. `bfloat16` halves them, computes in
    bfloat16 and rounds updates stochastically. The optimizer stays in float32, and so do vectors, or with shards only
    those of norms.
    """
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """
    Format of the residual stream in training, to which each layer adds its result. `bfloat16` makes GPUs move fewer
    bytes, and rounds each sum. It needs matmuls in bfloat16.
    """
    float8: Float8 = "off"
    """
    Which matmuls of training multiply numbers of 8 bits: none, those of the head, or also those of the blocks. It needs
    a GPU that does so, such as H100 or MI300X, and pays where `compile` works. It rounds more than bfloat16.
    """
    deterministic: bool = Field(False, json_schema_extra=VOLATILE)
    """
    Whether GPUs compute the same bits each time, which is slower: attention and sums otherwise add in any order. CPUs
    always do. An operation that cannot is an error. The choice of kernels is kept in the run.
    """
    activation_checkpointing: Level | Literal["auto"] = Field("none", json_schema_extra=VOLATILE)
    """
    What the backward pass computes again to save memory: nothing, whole blocks, or all but matmuls. `auto`: nothing,
    unless a micro-batch does not fit; then as little as needed.
    """
    compile: Literal["off", "auto", "on"] = Field("auto", json_schema_extra=VOLATILE)
    """
    Whether torch.compile compiles the blocks. If the first step differs from the uncompiled blocks, training uses the
    uncompiled blocks. `auto`: on GPUs, if it makes a step faster.
    """
    micro_batch_tokens: StepTokens | Literal["auto"] = Field("auto", json_schema_extra=VOLATILE)
    """Tokens that the model processes at once. `auto`: as many as fit into memory and increase the speed."""
    dry_run: bool = Field(True, json_schema_extra=VOLATILE)
    """Whether to try two steps, an evaluation and a save before the first step. The trial changes nothing."""
    save_every_seconds: Annotated[float, Between(1e-9, 1e9, "1e9 is 31 years", "no clock is finer")] = Field(
        20.0, json_schema_extra=VOLATILE
    )
    """Seconds between checkpoints to resume from. The start and each evaluation also save one, for rollbacks."""
    keep_last: CheckpointCount = Field(2, json_schema_extra=VOLATILE)
    """How many of the newest checkpoints to keep, in addition to the checkpoint for a rollback."""
    keep_every: Steps | None = Field(None, json_schema_extra=VOLATILE)
    """Steps between checkpoints that are kept forever. Not set: none."""
    num_processes: Ranks = Field(1, json_schema_extra=VOLATILE)
    """Number of processes on this machine that train together. Under torchrun, torchrun sets it."""
    parallelism: Literal["none", "fsdp"] = Field("none", json_schema_extra=VOLATILE)
    """
    `none`: each rank holds the whole model and optimizer state. `fsdp`: each rank holds a part of them, as in a mesh
    with only `dp_shard`.
    """
    mesh: Mesh | None = Field(None, json_schema_extra=VOLATILE)
    """Axes over which ranks share model and data. Not set: `parallelism` decides."""
    offload: Literal["none", "auto", "host"] = Field("none", json_schema_extra=VOLATILE)
    """
    `host`: weights, gradients and optimizer state stay in the computer's memory, and the device gets one layer after
    another. This is slow. It needs `fsdp`, a mesh, or a single process. `auto`: only if nothing else fits.
    """
    eval_every: Steps = Field(100, json_schema_extra=VOLATILE)
    """Steps between measurements of the validation loss."""
    log_every: Steps = Field(10, json_schema_extra=VOLATILE)
    """Steps between lines of metrics."""

    # When a step is skipped, and when the run goes back: see state.py. Volatile, so that a run which these limits
    # have stopped can resume with other limits.
    spike_sigma: Annotated[
        float, Between(0.1, 1e9, "a larger one skips none", "a smaller one skips nearly every step")
    ] = Field(6.0, json_schema_extra=VOLATILE)
    """
    Training skips a step if the logarithm of its loss or gradient norm is this many standard deviations above the mean
    of the window.
    """
    spike_window: StepWindow = Field(128, json_schema_extra=VOLATILE)
    """Accepted steps in the window. Until it is full, only steps that are not finite are skipped."""
    max_skipped_steps: Steps = Field(3, json_schema_extra=VOLATILE)
    """
    After this many skipped steps in a row, the run restores the weights of an earlier step, and continues with the next
    data.
    """
    grad_stats_every: StepsOrNone = Field(25, json_schema_extra=VOLATILE)
    """Steps between measurements of the norms of weights, updates and each layer's gradient; 0 for none."""

    # Outputs in addition to metrics.jsonl.
    main_log: bool = Field(False, json_schema_extra=VOLATILE)
    """Whether to write `main.log` too, in the format of llm.c."""
    sinks: tuple[Sink, ...] = Field((), json_schema_extra=VOLATILE)
    """Other destinations of the metrics."""
    gpu_stats_every_seconds: GpuSeconds = Field(10, json_schema_extra=VOLATILE)
    """Seconds between readings of use, memory, power and temperature of the first machine's GPUs; 0 for none."""
    gpu_csv: bool = Field(False, json_schema_extra=VOLATILE)
    """Whether to write each of these readings to `gpus.csv` too."""
    sample_every: StepsOrNone = Field(0, json_schema_extra=VOLATILE)
    """
    Steps between samples of the model's text; 0 for none. The run prints samples and appends them to samples.jsonl.
    """
    prompts: tuple[str, ...] = Field(("The ",), json_schema_extra=VOLATILE)
    """Prompts of the samples: beginnings of texts when pretraining, messages of a user when finetuning."""
    sample_tokens: Context = Field(48, json_schema_extra=VOLATILE)
    """Maximum length of a sample."""

    @property
    def may_shard(self) -> bool:
        """Whether ranks may hold parts of the model."""
        return True

    @property
    def compute_dtype(self) -> Literal["auto", "bfloat16", "float16", "float32"]:
        """Format of matmuls: weights in bfloat16 are multiplied as they are."""
        return "bfloat16" if self.weight_dtype == "bfloat16" else self.precision

    @property
    def short_formats(self) -> dict[str, tuple[str, str]]:
        """Of `residual_dtype` and `float8`, those that are set, with their value and their default."""
        values = {"residual_dtype": (self.residual_dtype, "float32"), "float8": (self.float8, "off")}
        return {name: pair for name, pair in values.items() if pair[0] != pair[1]}

    @property
    def keeps_reference(self) -> bool:
        """Whether training needs the initial model at every step, and not only before the first."""
        return False

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the lowest validation loss stays, and is what the run leaves."""
        return False

    @property
    def not_planned(self) -> str:
        """What a plan of the updates does not count; "" for nothing."""
        return ""

    @field_validator("schedule")
    @classmethod
    def _default_gives_way_to_a_short_run(cls, schedule: Schedule, info: Any) -> Schedule:
        steps = info.data.get("steps", schedule.warmup_steps)
        is_default = schedule is cls.model_fields["schedule"].default
        return (
            schedule.model_copy(update={"warmup_steps": min(schedule.warmup_steps, steps)}) if is_default else schedule
        )

    @model_validator(mode="after")
    def _warmup_ends_before_the_run(self) -> "Training":
        warmup = self.schedule.warmup_steps
        if not self.steps:
            return self  # they follow from a number of epochs, and are checked when they are known
        if warmup > self.steps:
            raise ValueError(
                f"schedule.warmup_steps={warmup} is more than steps={self.steps}: the learning rate never reaches "
                f"its peak; set at most {self.steps}"
            )
        decay = getattr(self.schedule, "decay_steps", None) or 0
        if decay and warmup + decay > self.steps:
            raise ValueError(
                f"schedule.warmup_steps={warmup} and decay_steps={decay} are more than steps={self.steps}; set a decay "
                f"of at most {self.steps - warmup}"
            )
        return self

    @model_validator(mode="after")
    def _weights_are_multiplied_as_they_are(self) -> "Training":
        if self.weight_dtype == "bfloat16" and self.precision not in ("auto", "bfloat16"):
            raise ValueError(
                f'weight_dtype="bfloat16" multiplies in bfloat16, not in {self.precision}: remove one of the two'
            )
        if self.weight_dtype == "bfloat16" and getattr(self, "lora", None) is not None:
            raise ValueError(
                'weight_dtype applies to trained weights, and lora freezes them: set lora.base_dtype="bfloat16"'
            )
        return self

    @model_validator(mode="after")
    def _short_formats_have_bfloat16_around_them(self) -> "Training":
        for name, (value, _) in self.short_formats.items():
            setting = f'{name}="{value}"'
            if self.precision not in ("auto", "bfloat16"):
                raise ValueError(f"{setting} needs matmuls in bfloat16, not in {self.precision}: remove one of the two")
            if name == "float8" and getattr(self, "lora", None) is not None:
                raise ValueError(f"{setting} applies to trained weights, and lora freezes them: remove one of the two")
        return self

    @model_validator(mode="after")
    def _decay_leaves_something_of_a_weight(self) -> "Training":
        """Each step multiplies weights by 1 − learning rate · weight decay."""
        decay = self.optimizer.weight_decay
        for name in ("learning_rate", "muon_lr"):
            rate = getattr(self.optimizer, name, 0.0)
            if not rate * decay < 1:
                raise ValueError(
                    f"optimizer.{name}={rate:g} times weight_decay={decay:g} is {rate * decay:.3g}, no less than 1: "
                    "each step would set weights to zero or flip their sign"
                )
        return self


def remarks(config: Training, context: int) -> list[str]:
    """What the numbers come to where that is hardly what they were meant to."""
    tokens = trained_tokens(config.global_batch_tokens, context)
    messages = []
    if tokens != config.global_batch_tokens:
        rows = "1 row" if tokens == context else f"{tokens // context:,} rows"
        messages.append(f"a step is {rows} of {context:,}: {tokens:,} tokens, and not {config.global_batch_tokens:,}")
    return messages


class Adapters(Config):
    """What finetuning has before the settings of Training: a default optimizer depends on it."""

    start_from: DiskPath | None = None
    """
    Model to start from: a run, stage, checkpoint or model folder, a GGUF file, or hub:OWNER/NAME. Not set: the model
    of the previous stage.
    """
    lora: Lora | None = None
    """Train small matrices added to frozen ones, by AdamW if no optimizer is named. None: train every weight."""

    @property
    def asks_for_format(self) -> bool:
        """Whether a frozen base is kept in the format of its files, which `on_base` then names."""
        return self.lora is not None and self.lora.base_dtype == "auto"

    def on_base(self, form: Base) -> Self:
        """The same settings, with a frozen base in that format."""
        assert self.lora is not None
        return self.model_copy(update={"lora": self.lora.model_copy(update={"base_dtype": form})})


class EarlyStopping(Config):
    """
    End training after `patience` evaluations whose validation loss was not the lowest so far.

    The count begins again only with an improvement: a loss below that of the improvement before it by more than
    `min_delta` and by more than the noise. The noise is the standard error of the mean loss, from the losses of the
    single validation sequences.
    """

    patience: Annotated[int, Between(1, 1000, "no run has more evaluations")] = 3
    """Number of evaluations without improvement after which training ends."""
    min_delta: Annotated[float, Between(0, 100, "no loss falls further")] = 0.0
    """Smallest improvement of the validation loss, in nats per token."""


Epochs = Annotated[float, Between(1e-3, 10_000, "a model knows its data by heart long before")]


class Finetune(Training, Adapters):
    """The same loop, on conversations, from the pretrained weights or those of another model."""

    steps: StepsOrNone = 0
    """Number of updates. Not set: the number that `epochs` needs."""
    epochs: Epochs | None = None
    """Number of passes over the sequences, instead of `steps`."""
    rope_scaling: RopeScaling | None = None
    """Stretch the positions of the model to sequences that are longer than its context. Not set: none."""
    keep: Literal["best", "last"] = "best"
    """Which weights the run keeps: "best" has the lowest validation loss, "last" is the last step."""
    early_stopping: EarlyStopping | None = None
    """End training when the validation loss no longer falls. Not set: train all steps."""
    eval_every: Steps = 100
    """Steps between measurements of the validation loss. The end of an epoch is measured too."""
    optimizer: Optimizer = Field(Muon(muon_lr=0.01, learning_rate=1e-3), validate_default=True)
    schedule: Schedule = Field(LinearSchedule(), validate_default=True)

    @field_validator("optimizer")
    @classmethod
    def _adapters_learn_by_adam(cls, optimizer: Optimizer, info: Any) -> Optimizer:
        """Muon makes steps of one size in all directions, which makes no sense of factors that start at 0."""
        is_default = optimizer is cls.model_fields["optimizer"].default
        return AdamW(learning_rate=1e-3, weight_decay=0.0) if is_default and info.data.get("lora") else optimizer

    @model_validator(mode="after")
    def _has_one_length(self) -> "Finetune":
        if self.steps and self.epochs is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs:g} are both set; remove one of them")
        if not self.steps and self.epochs is None:
            raise ValueError("the length of training is missing: set epochs, such as epochs=3, or steps")
        return self

    @property
    def keeps_best(self) -> bool:
        return self.keep == "best"

    @property
    def not_planned(self) -> str:
        return "" if self.steps else "the number of steps is known when [instruct] has packed its sequences"

    def of_length(self, num_samples: int, rows: int) -> Self:
        """
        The same with `steps` in place of `epochs`, of so many samples and rows a step. Raises ConfigError where the
        steps of the schedule do not fit.
        """
        if self.epochs is None:
            return self
        known = {name: value for name, value in plain(self).items() if name != "epochs" and value is not None}
        return build(type(self), known | {"steps": math.ceil(self.epochs * num_samples / rows)}, "finetune")


Depth = Annotated[int, Between(1, 1000, "no model is deeper")]
TokenRatio = Annotated[float, Between(1e-9, 1e9, "it counts the tokens for each weight")]

HEAD_WIDTH = 64
WIDTH_PER_LAYER = 64
REFERENCE_WIDTH = 768
STEP_TOKENS, HORIZON = 2**19, 2_202_009_600
"""Of depth 12: tokens per step, and tokens in all."""
STEP_EXPONENT = 0.383
TOKENS_PER_PARAMETER = 20.0
RATES = {
    "muon": {"muon_lr": 0.02, "learning_rate": 3e-3},
    "adamw": {"learning_rate": 6e-4},
    "adamw8bit": {"learning_rate": 6e-4},
    "ademamix": {"learning_rate": 6e-4},
    "lion": {"learning_rate": 1e-4},
}
"""At depth 12, by the optimizer's kind."""


class ScaledKeys(Config):
    """The keys of [pretrain] that the scaling rules use."""

    model_config = ConfigDict(extra="ignore")
    depth: Depth
    model: ModelConfig
    tokens_per_parameter: TokenRatio = TOKENS_PER_PARAMETER
    global_batch_tokens: StepTokens | None = None
    steps: Steps | None = None
    optimizer: Optimizer


class _Place(Config):
    """So that errors say where it stands."""

    pretrain: ScaledKeys


def by_scaling_rules(section: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """
    [pretrain] with what follows from its `depth`, a number of layers, but for what it says itself.

    Raises ConfigError if the section has another number of layers, the name of a shape, or an unusable value.
    """
    model, optimizer = section.get("model", {}), section.get("optimizer", {})
    if isinstance(model, Mapping):
        _no_second_shape(section["depth"], model)
        model = shape_of_depth(section["depth"], model)
    if isinstance(optimizer, Mapping):
        optimizer = {"kind": Muon().kind} | dict(optimizer)
    section = {**section, "model": model, "optimizer": optimizer}
    read = build(_Place, {"pretrain": section}).pretrain
    tokens = read.tokens_per_parameter * cost(read.model, vocab_size).matmul_parameters
    target_tokens = read.global_batch_tokens or step_tokens(tokens)
    step = trained_tokens(target_tokens, read.model.context_length)
    return {
        **section,
        "global_batch_tokens": read.global_batch_tokens or step,
        "steps": read.steps or max(1, round(tokens / step)),
        "optimizer": scaled_rates(read.optimizer.kind, read.model.hidden_size, step) | optimizer,
    }


def _no_second_shape(depth: int, settings: Mapping[str, Any]) -> None:
    if settings.get("preset"):
        what = f"depth={depth} and model.preset={settings['preset']!r} both set the shape"
        raise ConfigError(
            what,
            where="pretrain",
            hint=f"Remove one of them. On the command line, replace the section: 'pretrain={{depth={depth}}}'",
        )
    if settings.get("num_layers", depth) != depth:
        what = f"depth={depth}, and model.num_layers={settings['num_layers']}"
        raise ConfigError(
            what,
            where="pretrain",
            hint=f"Remove one of them. On the command line, replace the section: 'pretrain={{depth={depth}}}'",
        )


def shape_of_depth(depth: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a ModelConfig. Keys in `settings` stay; the other keys follow from the depth and usable settings."""
    numbers = {key: value for key, value in settings.items() if type(value) is int and value > 0}
    width = numbers.get("hidden_size", WIDTH_PER_LAYER * depth)
    heads = numbers.get("num_heads", max(1, width // HEAD_WIDTH))
    intermediate_size = 64 * math.ceil(8 * width / 3 / 64)
    derived = {
        "hidden_size": width,
        "num_layers": depth,
        "num_heads": heads,
        "num_kv_heads": heads,
        "intermediate_size": intermediate_size,
    }
    return derived | dict(settings)


def step_tokens(tokens: float) -> int:
    """A power of two."""
    target = STEP_TOKENS * (tokens / HORIZON) ** STEP_EXPONENT
    return int(2 ** round(math.log2(target)))


def scaled_rates(kind: str, width: int, global_batch_tokens: int) -> dict[str, float]:
    """Learning rates by their keys."""
    batch = math.sqrt(global_batch_tokens / STEP_TOKENS)
    wide = REFERENCE_WIDTH / width
    factors = {"muon_lr": batch, "learning_rate": batch * (math.sqrt(wide) if kind == "muon" else wide)}
    return {name: float(f"{rate * factors[name]:.3g}") for name, rate in RATES[kind].items()}
