"""Samples: what the model writes after given beginnings while it trains, for people to read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bloomery.core.log import Metrics, say
from bloomery.model.transformer import Transformer
from bloomery.train import parallel
from bloomery.train.config import Training
from bloomery.train.hooks import Hook
from bloomery.train.state import State

SAMPLES = "samples.jsonl"
SHOWN = 200

Sampler = Callable[[Transformer, Sequence[str], int], Iterator[str]]
"""Of a model, prompts and a number of tokens: what follows each prompt. A stage gives it: training knows no text."""


@contextmanager
def sampling(
    config: Training, model: Transformer, sampler: Sampler | None, out: Path, step: int
) -> Iterator[list[Hook]]:
    """The hook that samples every so many steps, if that was asked for; its lines of lost steps are dropped."""
    if sampler is None or not config.sample_every:
        yield []
        return
    with Metrics(out / SAMPLES, step) as file:

        def sample(state: State) -> None:
            try:
                for prompt, text in zip(
                    config.prompts, sampler(model, config.prompts, config.sample_tokens), strict=True
                ):
                    file.write(step=state.step, prompt=prompt, text=text)
                    say(f"  step {state.step}: {prompt!r} -> {text[:SHOWN]!r}")
            finally:
                parallel.settle(model)
                model.train()

        yield [Hook(lambda state: state.step % config.sample_every == 0, sample, "sample", vital=False)]
