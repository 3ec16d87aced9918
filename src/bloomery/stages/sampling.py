"""What a model in training writes after a prompt: a continuation, or an assistant's answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bloomery.core.chat import SamplingConfig
from bloomery.generate.engine import Engine
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train.validation import Sampler

SAMPLES = SamplingConfig(top_p=0.95, seed=0)
"""With a fixed seed, so that only training makes a difference between two steps."""


def continuing(renderer: Renderer) -> Sampler:
    """Prompts are beginnings of documents."""
    tokenizer = renderer.tokenizer
    return _sampler(renderer, lambda prompt: [tokenizer.document_id, *tokenizer.encode(prompt)])


def answering(renderer: Renderer) -> Sampler:
    """Prompts are what a user says."""
    return _sampler(renderer, lambda prompt: renderer.prompt([{"role": "user", "content": prompt}]))


def _sampler(renderer: Renderer, ids: Callable[[str], list[int]]) -> Sampler:
    tokenizer = renderer.tokenizer
    stop = tokenizer.end_ids | renderer.end_ids

    def sample(model: Transformer, prompts: Sequence[str], max_tokens: int) -> Iterator[str]:
        engine = Engine(model, tokenizer.vocab_size)
        sampling = replace(SAMPLES, max_tokens=max_tokens)
        for prompt in prompts:
            said = engine.stream(ids(prompt), sampling, stop_ids=stop)
            yield renderer.said([id for id in said if id not in stop])

    return sample
