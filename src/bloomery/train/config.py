"""How a model is trained, as numbers. Needs no torch."""

from typing import Annotated, Literal

from pydantic import Field

from bloomery.core.config import VOLATILE, Config, Count, Positive, Share
from bloomery.hw.host import Wanted


class Muon(Config):
    """
    Muon for the matrices of the blocks, AdamW for the rest.

    The momentum of a matrix is orthogonalized before it is applied (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/).
    """

    kind: Literal["muon"] = "muon"
    matrix_learning_rate: float = Field(0.02, gt=0)
    learning_rate: float = Field(3e-3, gt=0)
    """Of AdamW: embedding, head and norms."""
    weight_decay: float = Field(0.01, ge=0)
    momentum: Share = 0.95
    beta1: Share = 0.9
    beta2: Share = 0.95


class AdamW(Config):
    """AdamW with decoupled weight decay on matrices only (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = Field(6e-4, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    beta1: Share = 0.9
    beta2: Share = 0.95


class Schedule(Config):
    """
    Learning rate as a share of its peak: a linear warm-up, a level part, then a decay to `final`.

        share(s) = s / W                      for s ≤ W
                   1                          for s ≤ (1 − decay) · N
                   1 − (1 − final) · shape(x) after, x from 0 to 1; the smaller one where it meets the warm-up
    """

    warmup_steps: Count = 0
    decay: Share = 0.5
    """Share of all steps that the decay takes."""
    shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    final: Share = 0.0


class Training(Config):
    """What pretraining and finetuning have in common."""

    steps: Positive
    tokens_per_step: Positive
    """Of the whole global batch."""
    optimizer: Annotated[Muon | AdamW, Field(discriminator="kind")] = Muon()
    schedule: Schedule = Schedule()
    max_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    seed: int = 0
    device: Wanted = "auto"
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of matrix products; weights and optimizer are float32. `auto` takes what the device has units for."""
    micro_batch_tokens: Positive = Field(8192, json_schema_extra=VOLATILE)
    """Tokens that go through the model at once."""
    save_every_seconds: float = Field(20.0, gt=0, json_schema_extra=VOLATILE)
    keep_checkpoints: Positive = Field(2, json_schema_extra=VOLATILE)
    evaluate_every: Positive = Field(100, json_schema_extra=VOLATILE)
    """Steps between measurements of the validation loss."""
    log_every: Positive = Field(10, json_schema_extra=VOLATILE)

    # When an update is not made, and when the run goes back: see guard.py. Volatile, so that a run which these have stopped
    # can go on with others.
    skip_sigma: float = Field(6.0, gt=0, json_schema_extra=VOLATILE)
    """A step is skipped whose loss or gradient norm lies so many deviations above the mean of the window."""
    skip_window: Annotated[int, Field(ge=2)] = Field(128, json_schema_extra=VOLATILE)
    """Accepted steps that mean and deviation are taken of; before there are so many, only what is not finite counts."""
    max_skips: Positive = Field(3, json_schema_extra=VOLATILE)
    """After so many skipped steps in a row the run goes back to the newest good checkpoint, and on behind them."""
    norms_every: Count = Field(25, json_schema_extra=VOLATILE)
    """Steps between measurements of the norms of weights, updates and each layer's gradient; 0 for none."""
