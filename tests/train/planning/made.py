"""What is planned for in tests, and on what."""

from dataclasses import replace
from typing import Any

from bloomery.core.config import build
from bloomery.hw.specs import named
from bloomery.model.config import ModelConfig
from bloomery.stages.config import Finetune, Pretrain
from bloomery.train.config import Training
from bloomery.train.plan import report
from bloomery.train.plan.memory import Machine, of_entry
from bloomery.train.plan.report import PlanReport

SMALL = ModelConfig(hidden_size=64, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=176, context_length=64)


def training(**settings: Any) -> Training:
    return build(Training, {"steps": 10, "global_batch_tokens": 64 * 64, **settings})


def card(name: str = "7900xtx", devices: int = 1) -> Machine:
    return of_entry(named(name), devices)


def plan(
    model: ModelConfig,
    vocab_size: int,
    target: Machine,
    *,
    finetune: bool = False,
    tokens: int = 2**16,
    also: tuple[str, ...] = (),
    **settings: Any,
) -> PlanReport:
    """Of a stage that pretrains, or finetunes, for a thousand steps; `also` are settings that it is given besides."""
    sections = Finetune if finetune else Pretrain
    config = build(sections, {"steps": 1000, "global_batch_tokens": tokens, "optimizer": {"kind": "adamw"}, **settings})
    ask = report.asked("finetune" if finetune else "pretrain", config, model, vocab_size, target)
    return report.planned(replace(ask, available=ask.available | set(also)), config, target)
