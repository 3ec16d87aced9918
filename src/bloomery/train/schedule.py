"""
Learning rates as pure functions of the step. Needs no torch.

The formulas are those of llm.c's schedulers.h and of 1386.ai's scheduler.py, whose warm-up makes its first step at
1 / W of the peak and whose decay makes its first step at the peak and its last one just above `final`.
"""

import math
from fractions import Fraction

from bloomery.train.config import WSD, Constant, Schedule


def share(schedule: Schedule, step: int, steps: int) -> float:
    """The learning rate of step 1 … steps as a share of its peak. See the kinds of `Schedule` for the formulas."""
    t, warmup = step - 1, schedule.warmup_steps
    if t < warmup:
        return (t + 1) / warmup
    if isinstance(schedule, Constant):
        return 1.0
    start = decay_start(schedule, steps)
    if t < start:
        return 1.0
    x = (t - start) / (steps - start) if t < steps else 1.0
    shape = schedule.shape if isinstance(schedule, WSD) else schedule.kind
    fall = {"linear": x, "cosine": (1 - math.cos(math.pi * x)) / 2, "1-sqrt": math.sqrt(x)}[shape]
    return schedule.final + (1.0 - schedule.final) * (1.0 - fall)


def decay_start(schedule: Schedule, steps: int) -> int:
    """How many steps come before the decay: until there, how many follow makes no difference to the learning rate."""
    if isinstance(schedule, Constant):
        return steps
    if not isinstance(schedule, WSD):
        return schedule.warmup_steps
    if schedule.decay_steps is not None:
        length = schedule.decay_steps
    else:
        written = Fraction(str(schedule.decay))  # 0.29 · 100 is below 29 in binary
        length = max(1, int(written * steps)) if schedule.decay else 0
    return max(schedule.warmup_steps, steps - length)
