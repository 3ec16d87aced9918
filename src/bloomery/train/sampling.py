"""Samples: what the model writes after given beginnings while it trains, for people to read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bloomery.core.log import SAMPLES as SAMPLES
from bloomery.core.log import Metrics, read_metrics, say
from bloomery.model.transformer import Transformer
from bloomery.train import parallel
from bloomery.train.config import Training
from bloomery.train.hooks import Hook
from bloomery.train.state import State

SHOWN = 200

Sampler = Callable[[Transformer, Sequence[str], int], Iterator[str]]
"""Of a model, prompts and a number of tokens: what follows each prompt. A stage gives it: training knows no text."""


@contextmanager
def sampling(
    config: Training,
    model: Transformer,
    sampler: Sampler | None,
    out: Path,
    step: int,
    agreed: Callable[[bool], bool] = bool,
) -> Iterator[list[Hook]]:
    """
    The hook that samples every so many steps, if that was asked for; its lines of lost steps are dropped, and those of
    `step`, which a run goes on from, if they are not all there: then it is due after that step too. `agreed` says what
    all ranks take for true.
    """
    if sampler is None or not config.sample_every:
        yield []
        return
    told = [line.get("prompt") for line in read_metrics(out / SAMPLES) if line["step"] == step]
    whole = agreed(told == list(config.prompts))
    with Metrics(out / SAMPLES, step if whole else step - 1) as file:

        def is_due(state: State) -> bool:
            return state.step % config.sample_every == 0 and not (whole and state.step == step)

        def sample(state: State) -> None:
            try:
                texts = sampler(model, config.prompts, config.sample_tokens)
                if parallel.is_sharded(model):
                    texts = iter(list(texts))  # all ranks end what they do together before one may fail to write it
                for prompt, text in zip(config.prompts, texts, strict=True):
                    file.write(step=state.step, prompt=prompt, text=text)
                    say(f"  step {state.step}: {prompt!r} -> {text[:SHOWN]!r}")
                file.sync()
            finally:
                parallel.settle(model)
                model.train()

        yield [Hook(is_due, sample, "sample", vital=False)]
