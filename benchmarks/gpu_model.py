"""
How fast should a training step be on a GPU, and does the estimate agree with what others have published?

    python benchmarks/gpu_model.py [--json] [--into FILE]

The estimate is that of plans (train/plan/gpu_time.py). It needs no GPU. PUBLISHED are speeds that others have reported,
each with its own shape, batch, GPUs and the conditions that its author names. No constant was changed to fit them.
TARGETS are what Bloomery wants to show. For each the result says what the estimate expects, and where the time goes.

`mfu` counts the whole square of attention, as most publications do. `mfu_causal` counts half of it, as runs of Bloomery
do. Both are shares of the spec sheet.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bloomery.core.pipeline import machine, versions
from bloomery.hw.specs import named
from bloomery.model.config import ModelConfig, cost
from bloomery.train.config import AdamW, Muon, Optimizer
from bloomery.train.plan import gpu_time
from bloomery.train.plan.gpu_time import Program, StepTime, rates, step_time
from bloomery.train.plan.memory import Machine, TrainSetup, Workload, of_entry

SHORT_STREAM = Program(residual_bytes=2)
"""What peers run: compiled, with the residual stream in bfloat16."""
EVERY_SECOND = replace(SHORT_STREAM, matmuls_again=0.5)
"""torchtitan's selective checkpointing: every second matmul of a block is computed again."""
POWER = 500 / 700
"""torchtitan's H100 stop at 500 of 700 W. At a limit, FLOP/s are taken to fall as the power does."""


FORMATS = ("residual_dtype", "float8", "weight_dtype")
"""Settings of a run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    model: ModelConfig
    vocab_size: int
    card: str
    devices: int
    rows: int
    """At once on each device."""
    step_tokens: int
    """Of all devices."""
    tokens_per_second: float
    """Of all devices: published, or wanted."""
    source: str
    program: Program | None = None
    setup: TrainSetup | None = None
    """Recomputation and sharding."""
    optimizer: Optimizer = field(default_factory=AdamW)
    power: float = 1.0
    bandwidth: float | None = None
    """Where the card is not as the spec sheet has it."""
    mfu: float = 0.0
    """Wanted."""

    @property
    def way(self) -> TrainSetup:
        return self.setup or TrainSetup(rows=0)

    @property
    def target(self) -> Machine:
        target = of_entry(named(self.card), self.devices)
        assert target.flops is not None
        return replace(target, flops=target.flops * self.power, bandwidth=self.bandwidth or target.bandwidth)

    def estimate(self) -> StepTime:
        what = Workload(
            model=self.model,
            vocab_size=self.vocab_size,
            optimizer=self.optimizer,
            memory_bytes=self.target.memory_bytes,
        )
        way = replace(self.way, rows=self.rows, devices=self.devices)
        rows_per_step = self.step_tokens // self.model.context_length
        return step_time(what, way, rates(self.target, "bfloat16"), rows_per_step, self.program)

    def facts(self) -> dict[str, Any]:
        time, facts = self.estimate(), cost(self.model, self.vocab_size)
        rate, peak = self.step_tokens / time.seconds, of_entry(named(self.card)).flops
        assert peak is not None
        causal = facts.train_flops_per_token
        whole = 2 * causal - 6 * facts.matmul_parameters
        each = rate / self.devices / peak
        return {
            "name": self.name,
            "card": f"{self.devices} x {self.card}",
            "rows": self.rows,
            "formats": {name: getattr(self.way, name) for name in FORMATS},
            "step_tokens": self.step_tokens,
            "tokens_per_second": round(rate),
            "reference": round(self.tokens_per_second),
            "ratio": round(rate / self.tokens_per_second, 3),
            "mfu": round(whole * each, 3),
            "mfu_wanted": self.mfu or None,
            "mfu_causal": round(causal * each, 3),
            "milliseconds": {name: round(1000 * value, 2) for name, value in asdict(time).items() if name != "bus"},
            "step_milliseconds": round(1000 * time.seconds, 1),
            "source": self.source,
        }


def nanochat(depth: int) -> ModelConfig:
    """Of its commit 348fbb3, without value embeddings, which take part in no matmul."""
    heads = depth // 2
    shape = {"hidden_size": 64 * depth, "num_layers": depth, "num_heads": heads, "num_kv_heads": heads}
    kinds = {"mlp": "relu2", "qk_norm": True, "norm_affine": False, "tie_embeddings": False}
    windows = {"context_length": 2048, "sliding_window": [1024, 1024, 1024, "full"]}
    return ModelConfig.model_validate(shape | kinds | windows | {"intermediate_size": 256 * depth})


GPT2, PLASMA = ModelConfig(preset="gpt2-124m"), ModelConfig(preset="plasma-500m")
LLAMA = ModelConfig(preset="llama-3.1-8b", context_length=8192)
SHARDED = TrainSetup(rows=0, sharded=True, activation_checkpointing="selective")
TITAN: dict[str, Any] = {
    "card": "h100",
    "devices": 8,
    "rows": 2,
    "step_tokens": 16 * 8192,
    "power": POWER,
    "bandwidth": 2.4e12,
}

D26 = Case(
    name="nanochat d26",
    model=nanochat(26),
    vocab_size=32_768,
    card="h100",
    devices=8,
    rows=16,
    step_tokens=2**19,
    tokens_per_second=630e3,
    source="nanochat, dev/LOG.md, 2026-02-02: bfloat16, before float8",
    program=SHORT_STREAM,
    optimizer=Muon(),
)
PUBLISHED = (
    Case(
        name="nanochat d24",
        model=nanochat(24),
        vocab_size=32_768,
        card="h100",
        devices=8,
        rows=16,
        step_tokens=2**19,
        tokens_per_second=16_704 * 2**19 / 10_949,
        source="nanochat, dev/LEADERBOARD.md, run 1: 16,704 steps of 2^19 tokens in 10,949 s, bfloat16",
        program=SHORT_STREAM,
        optimizer=Muon(),
    ),
    Case(
        name="llm.c GPT-2 124M",
        model=GPT2,
        vocab_size=50_304,
        card="h100",
        devices=8,
        rows=64,
        step_tokens=2**19,
        tokens_per_second=1e10 / (45 * 60),
        source="modded-nanogpt, README: 10 billion tokens in 45 minutes, as its record 1",
        program=SHORT_STREAM,
    ),
    Case(
        name="torchtitan Llama 3.1 8B",
        model=LLAMA,
        vocab_size=128_256,
        tokens_per_second=8 * 6667,
        source="torchtitan, benchmarks of 2024-12: FSDP, compiled, 500 W, HBM2e with 2.4 TB/s",
        program=EVERY_SECOND,
        setup=SHARDED,
        **TITAN,
    ),
)
OTHERS = (
    Case(
        name="torchtitan Llama 3.1 8B, not compiled",
        model=LLAMA,
        vocab_size=128_256,
        tokens_per_second=8 * 5762,
        source="the same table",
        program=replace(EVERY_SECOND, compiled=False),
        setup=SHARDED,
        **TITAN,
    ),
    D26,
    replace(
        D26,
        name="nanochat d26, float8",
        tokens_per_second=740e3,
        source="the same log: all matmuls in float8, with a scale for each tensor",
        setup=TrainSetup(rows=0, float8="all"),
    ),
    Case(
        name="torchtitan Llama 3.1 8B, float8",
        model=LLAMA,
        vocab_size=128_256,
        tokens_per_second=8 * 8532,
        source="the table of Llama 3.1 8B: all matmuls but the head's in float8; the estimate has the head's too",
        program=EVERY_SECOND,
        setup=replace(SHARDED, float8="all"),
        **TITAN,
    ),
    Case(
        name="torchtitan Llama 3 8B on A100, 64 GPUs",
        model=LLAMA,
        vocab_size=128_256,
        card="a100-80",
        devices=64,
        rows=1,
        step_tokens=64 * 8192,
        tokens_per_second=64 * 2973,
        source="torchtitan, docs/performance.md of 2024: FSDP, not compiled; links between hosts are not counted here",
        program=replace(EVERY_SECOND, compiled=False),
        setup=SHARDED,
    ),
    Case(
        name="llm.c GPT-2 124M on A100",
        model=GPT2,
        vocab_size=50_304,
        card="a100-80",
        devices=8,
        rows=64,
        step_tokens=2**19,
        tokens_per_second=1e10 / (90 * 60),
        source="llm.c, discussion 481: about 90 minutes for 10 billion tokens",
        program=SHORT_STREAM,
    ),
    Case(
        name="plasma-500m on an RTX 5080",
        model=PLASMA,
        vocab_size=48_000,
        card="rtx-5080",
        devices=1,
        rows=8,
        step_tokens=32_768,
        tokens_per_second=16_700,
        source="1386.ai, configs: compiled, gradients computed again",
        program=SHORT_STREAM,
        setup=TrainSetup(rows=0, activation_checkpointing="full"),
    ),
    Case(
        name="plasma-500m on Strix Halo, recomputed",
        model=PLASMA,
        vocab_size=48_000,
        card="strix-halo-128",
        devices=1,
        rows=32,
        step_tokens=32_768,
        tokens_per_second=4750,
        source="a fork of 1386.ai for ROCm, with gradients computed again as upstream does",
        setup=TrainSetup(rows=0, activation_checkpointing="full"),
    ),
    Case(
        name="llm.c's fork on a 7900 XTX",
        model=GPT2,
        vocab_size=50_304,
        card="7900xtx",
        devices=1,
        rows=4,
        step_tokens=4096,
        tokens_per_second=4096 / 0.05834,
        source="llm.c's fork for AMD: 58.34 ms for 4 x 1,024 tokens",
        program=SHORT_STREAM,
    ),
)
WANTED = "what Bloomery wants to show"
TARGETS = (
    Case(
        name="GPT-2 124M, 32 x 1,024",
        model=GPT2,
        vocab_size=50_263,
        card="h100",
        devices=1,
        rows=32,
        step_tokens=2**15,
        tokens_per_second=480e3,
        mfu=0.41,
        source=WANTED,
    ),
    Case(
        name="plasma-500m, 32 x 1,024",
        model=PLASMA,
        vocab_size=48_000,
        card="h100",
        devices=1,
        rows=32,
        step_tokens=2**15,
        tokens_per_second=130e3,
        mfu=0.46,
        source=WANTED,
    ),
    Case(
        name="plasma-500m, its recipe",
        model=PLASMA,
        vocab_size=48_000,
        card="h100",
        devices=8,
        rows=4,
        step_tokens=2**15,
        tokens_per_second=750e3,
        source=f"{WANTED}, and 70 % of eight times one GPU",
    ),
    Case(
        name="plasma-500m, 262,144 tokens a step",
        model=PLASMA,
        vocab_size=48_000,
        card="h100",
        devices=8,
        rows=32,
        step_tokens=2**18,
        tokens_per_second=0.88 * 8 * 130e3,
        source=f"{WANTED}: 88 % of eight times one GPU",
    ),
    Case(
        name="Llama 3.1 8B, FSDP",
        model=LLAMA,
        vocab_size=128_256,
        card="h100",
        devices=8,
        rows=2,
        step_tokens=2**17,
        tokens_per_second=8 * 0.40 * 989.4e12 / 57.9e9,
        mfu=0.40,
        source=f"{WANTED}, with the recomputation that a plan takes",
        setup=SHARDED,
    ),
    Case(
        name="plasma-500m on Strix Halo",
        model=PLASMA,
        vocab_size=48_000,
        card="strix-halo-128",
        devices=1,
        rows=16,
        step_tokens=2**15,
        tokens_per_second=6500,
        source=WANTED,
    ),
    Case(
        name="GPT-2 124M on a 7900 XTX, 4 x 1,024",
        model=GPT2,
        vocab_size=50_263,
        card="7900xtx",
        devices=1,
        rows=4,
        step_tokens=4096,
        tokens_per_second=4096 / 0.058,
        source=WANTED,
    ),
)
SHORT = {
    "GPT-2 124M, 32 x 1,024": TrainSetup(rows=0, residual_dtype="bfloat16", float8="head"),
    "plasma-500m, 32 x 1,024": TrainSetup(rows=0, residual_dtype="bfloat16", float8="all"),
    "plasma-500m, its recipe": TrainSetup(rows=0, residual_dtype="bfloat16", float8="head"),
    "plasma-500m, 262,144 tokens a step": TrainSetup(rows=0, residual_dtype="bfloat16", float8="all"),
    "plasma-500m on Strix Halo": TrainSetup(rows=0, residual_dtype="bfloat16", weight_dtype="bfloat16"),
    "GPT-2 124M on a 7900 XTX, 4 x 1,024": TrainSetup(rows=0, residual_dtype="bfloat16", weight_dtype="bfloat16"),
}
"""The same in the short formats that a recipe may ask for, where they help. None is a default."""
SHORT_TARGETS = tuple(replace(case, setup=SHORT[case.name]) for case in TARGETS if case.name in SHORT)
CONSTANTS = ("MATMUL", "MEMORY", "ATTENTION", "ATTENTION_TOKENS", "LINK", "LAUNCH_SECONDS", "FLOAT8")


def as_text(row: dict[str, Any]) -> str:
    first = f"{row['name']:<40} {row['card']:<18} {row['tokens_per_second']:>10,} of {row['reference']:>10,} tokens/s"
    return f"{first} ({row['ratio'] - 1:+.1%}), {row['step_milliseconds']:>8,.1f} ms, MFU {row['mfu']:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true", help="changes nothing: it takes a second")
    parser.add_argument("--into", type=Path, help="write the result there too")
    options = parser.parse_args()
    groups = {"published": PUBLISHED, "others": OTHERS, "targets": TARGETS, "short_targets": SHORT_TARGETS}
    rows = {group: [case.facts() for case in cases] for group, cases in groups.items()}
    if not options.json:
        for group, found in rows.items():
            print(f"{group}:", *map(as_text, found), sep="\n")
    result = {
        "name": "gpu_model",
        "ours": {
            "value": max(abs(row["ratio"] - 1) for row in rows["published"]),
            "unit": "largest error of three published speeds",
        },
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine(),
        "versions": versions(),
        "notes": {"constants": {name: getattr(gpu_time, name) for name in CONSTANTS}, **rows},
    }
    if options.into:
        options.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
