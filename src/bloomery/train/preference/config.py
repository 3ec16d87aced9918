"""The section [prefer] of a recipe. Needs no torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bloomery.core.config import VOLATILE, Between, Config, Context, InnerShare, Steps, repeated
from bloomery.data.chat.preferences import Pairs, Problems
from bloomery.train.config import USUAL_CONTEXT, AdamW, Adapters, LinearSchedule, Optimizer, Schedule, Training

Beta = Annotated[float, Between(1e-6, 1e3, "it weighs log-probabilities")]
LossFactor = Annotated[float, Between(0, 1e3, "it weighs one part of the loss")]


class Dpo(Config):
    """
    Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

        −log σ(βh)      h = log π(chosen) / π₀(chosen) − log π(rejected) / π₀(rejected)
    """

    kind: Literal["dpo"] = "dpo"
    beta: Beta = 0.1
    """Strength of the penalty for leaving the reference π₀."""
    smoothing: Annotated[float, Between(0, 0.49, "it is a share of less than half")] = 0.0
    """Share ε of pairs that are treated as reversed: − (1 − ε) log σ(βh) − ε log σ(−βh)."""


class Ipo(Config):
    """
    Identity preference optimization (Azar et al. 2023, https://arxiv.org/abs/2310.12036), of means by token.

        (h − 1 / 2β)²      h as of DPO, each log-probability divided by the number of its tokens
    """

    kind: Literal["ipo"] = "ipo"
    beta: Beta = 0.1
    """Strength of the pull towards the reference."""


class SimPo(Config):
    """
    Simple preference optimization, which has no reference (Meng et al. 2024, https://arxiv.org/abs/2405.14734).

        −log σ(β · (mean log π(chosen) − mean log π(rejected)) − γ)      means by token
    """

    kind: Literal["simpo"] = "simpo"
    beta: Beta = 2.0
    """Factor on the difference of mean log-probabilities."""
    gamma: LossFactor = 1.0
    """Margin γ by which a chosen answer should be better."""


class Grpo(Config):
    """
    Group-relative policy optimization: the model samples answers and is rewarded for right ones (Shao et al. 2024,
    https://arxiv.org/abs/2402.03300).

        − min(ρA, clip(ρ, 1 − ε, 1 + ε) A) + β (q − log q − 1)      for each token; ρ = π / π at sampling,
                                                                     q = π₀ / π, A = (r − mean) / deviation of the group
    """

    kind: Literal["grpo"] = "grpo"
    problems: tuple[Annotated[Problems, Field(discriminator="kind")], ...] = Field(min_length=1)
    """Questions whose answers are numbers."""
    group_size: Annotated[int, Between(2, 4096, "a group has two, and all are in memory")] = 8
    """Number of answers to each question."""
    max_new_tokens: Context = 48
    """Maximum length of an answer. A longer answer counts as wrong."""
    temperature: Annotated[float, Between(1e-3, 100, "logits are divided by it")] = 1.0
    """Temperature at which answers are sampled."""
    marked: bool = False
    """Whether a correct answer must have its number after ####. Otherwise the last number counts."""
    clip: InnerShare = 0.2
    """ε"""
    kl_coef: LossFactor = 0.04
    """β, the weight of the distance from the reference. 0: no reference."""
    updates: Annotated[int, Between(1, 1000, "answers are soon those of another model")] = 1
    """Number of updates with the same answers. After the first, ρ is no longer 1."""
    normalize: Literal["answers", "tokens"] = "answers"
    """Whether each answer weighs the same, or each token (Yu et al. 2025, https://arxiv.org/abs/2503.14476)."""
    deviation: bool = True
    """Whether A is divided by the deviation of the group (without: Liu et al. 2025, https://arxiv.org/abs/2503.20783)."""
    check_questions: Annotated[int, Between(1, 10**6, "all are in memory")] = Field(64, json_schema_extra=VOLATILE)
    """Number of validation questions that the model answers at temperature 0 at each evaluation."""


Loss = Annotated[Dpo | Ipo | SimPo | Grpo, Field(discriminator="kind")]


class Prefer(Training, Adapters):
    """The same loop, from the finetuned weights, on what people or programs judge better."""

    loss: Loss = Dpo()
    """How preferences become a loss."""
    pairs: tuple[Annotated[Pairs, Field(discriminator="kind")], ...] = ()
    """Where preference pairs come from. The loss grpo uses `loss.problems` instead."""
    sequence_length: Context | None = None
    """
    Maximum number of tokens of an answer with its prompt. A packed row holds two of these. Not set: the model's
    context, at most 1,024. The loss grpo uses the model's context.
    """
    val_fraction: InnerShare = 0.05
    """Share of questions for validation, chosen by a hash of each question."""
    optimizer: Optimizer = AdamW(learning_rate=5e-5, weight_decay=0.0)
    schedule: Schedule = Field(LinearSchedule(warmup_steps=5), validate_default=True)
    eval_every: Steps = Field(20, json_schema_extra=VOLATILE)

    def answer_tokens(self, context: int) -> int:
        """The most tokens that an answer may have with its prompt, for a model with this context."""
        usual = USUAL_CONTEXT if self.sequence_length is None else self.sequence_length
        return context if isinstance(self.loss, Grpo) else min(context, usual)

    def row_tokens(self, context: int) -> int:
        """Of a row, which holds two answers where they are pairs."""
        return self.answer_tokens(context) * (1 if isinstance(self.loss, Grpo) else 2)

    @model_validator(mode="after")
    def _compares_models_in_one_format(self) -> "Prefer":
        """What the model would have answered before, and its reference, are computed without these settings."""
        for name, (value, _) in self.short_formats.items():
            raise ValueError(f'{name}="{value}" is for pretraining and finetuning: remove it')
        return self

    @property
    def may_shard(self) -> bool:
        """Each rank samples and reads answers on its own, so ranks go through the model at other times."""
        return False

    @property
    def keeps_reference(self) -> bool:
        return isinstance(self.loss, Grpo) and self.loss.kl_coef > 0

    @property
    def not_planned(self) -> str:
        match self.loss:
            case Grpo():
                return "the time of drawing answers, and of asking for their log-probabilities, is not planned"
            case SimPo():
                return ""
            case _:
                return "the time of one forward pass over all rows, before the first step, is not planned"

    @model_validator(mode="after")
    def _something_to_learn_from(self) -> "Prefer":
        draws = isinstance(self.loss, Grpo)
        if draws and self.pairs:
            raise ValueError('pairs are for other losses; with loss.kind = "grpo" set loss.problems')
        if draws and self.sequence_length is not None:
            raise ValueError('sequence_length is for pairs; with loss.kind = "grpo" set loss.max_new_tokens')
        if not draws and not self.pairs:
            raise ValueError(f'loss.kind = "{self.loss.kind}" needs pairs, as in pairs = [{{ kind = "worlds" }}]')
        names = [one.name for one in (self.loss.problems if isinstance(self.loss, Grpo) else self.pairs)]
        if twice := repeated(names):
            raise ValueError(f"two sources have the name {twice[0]!r}; give each its own name")
        return self

    @model_validator(mode="after")
    def _nothing_is_dropped(self) -> "Prefer":
        """A ratio to what was computed without dropout would be of the dropout."""
        if self.lora is not None and self.lora.dropout:
            raise ValueError(f"lora.dropout = {self.lora.dropout} adds noise to probabilities; set it to 0")
        return self

    @model_validator(mode="after")
    def _only_what_is_minimized(self) -> "Prefer":
        if self.z_loss:
            raise ValueError(f"z_loss = {self.z_loss} is for cross entropy, which this loss does not use; set it to 0")
        return self
