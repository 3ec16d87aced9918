"""
Decodes token IDs with a key/value cache, one sequence as a stream or many as a batch.

A sequence of a batch gets the IDs that it would get alone, by test. The next token is greedy, or sampled with
temperature, top-k and top-p.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import CheckpointError, DataError
from bloomery.model.attention import Cache
from bloomery.model.transformer import Transformer

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5
"""Below it, sampling is greedy. Float32 logits divided by this stay finite in float64; by 1e-308 they do not."""


def choose(
    logits: Float[Tensor, " V"],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> int:
    """
    One id. Temperatures below MIN_TEMPERATURE take the highest score; ties go to the smallest id.

    Top-k keeps the k highest scores (0: all); top-p then keeps the fewest of them whose probabilities reach p, at least
    one (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751).
    """
    return choose_each(logits[None], [generator], temperature=temperature, top_k=top_k, top_p=top_p)[0]


def choose_each(
    logits: Float[Tensor, "B V"],
    generators: Sequence[torch.Generator | None],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[int]:
    """
    As `choose`, for rows that each have a generator of their own: a row gets what it would get alone. Raises
    CheckpointError where the largest logit of a row is not finite: NaN is larger than any number.
    """
    likeliest = logits.argmax(dim=-1)
    check_finite(logits.gather(-1, likeliest[:, None]))
    if temperature < MIN_TEMPERATURE:
        greedy: list[int] = likeliest.tolist()
        return greedy
    scores = logits.cpu().double() / temperature  # in this order: Apple's GPUs have no float64
    if not top_k and top_p >= 1.0:  # nothing is left out, and sorting is most of the work
        return _drawn(torch.softmax(scores, dim=-1), generators)
    ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    if top_k:
        ordered, ids = ordered[:, :top_k], ids[:, :top_k]
    chances = torch.softmax(ordered, dim=-1)
    if top_p < 1.0:
        before = chances.cumsum(-1) - chances  # what those ahead of each id already reach
        kept = before < top_p
        kept[:, 0] = True
        chances = torch.where(kept, chances, torch.zeros_like(chances))
    return [int(row[place]) for row, place in zip(ids, _drawn(chances, generators), strict=True)]


def check_finite(numbers: Tensor) -> None:
    """Raises CheckpointError where a number that a model computed is not finite."""
    if not all(map(math.isfinite, numbers.flatten().tolist())):
        what = "the model computes logits that are not finite: its weights are finite, and too large to compute with"
        raise CheckpointError(what, hint="Train it again with lower learning rates, or name an earlier checkpoint.")


def _drawn(chances: Float[Tensor, "B V"], generators: Sequence[torch.Generator | None]) -> list[int]:
    """The place of one in each row, by its own generator."""
    return [int(torch.multinomial(row, 1, generator=own)) for row, own in zip(chances, generators, strict=True)]


@dataclass(frozen=True)
class Completion:
    ids: list[int]
    """Without the id that stopped it."""
    stopped: bool
    """Whether the model ended by itself, and not because its tokens or its context ran out."""


class Engine:
    """Decodes with one model, in float32."""

    def __init__(self, model: Transformer, num_ids: int) -> None:
        """`num_ids` of the tokenizer: rows that a model has beyond them, which others pad it with, are never said."""
        self.model, self.num_ids = model.eval(), num_ids
        self.context = model.config.context

    def stream(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> Iterator[int]:
        """
        Ids one by one as they are decided. The last is a stop id, unless `max_tokens` or the context ran out first.

        Raises DataError for a prompt that is empty or leaves no room in the context.
        """
        self._check(ids)
        generator = torch.Generator()
        generator.manual_seed(seed) if seed is not None else generator.seed()
        room = min(max_tokens, self.context - len(ids))
        cache = Cache.empty(self.model.config, 1, len(ids) + room, self.model.embed.weight)
        scores = self._extend([list(ids)], cache)
        for number in range(room):
            chosen = choose(scores[0], temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            yield chosen
            if chosen in stop_ids or number == room - 1:
                return
            scores = self._extend([[chosen]], cache)

    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, stop_ids: frozenset[int], batch: int = 32
    ) -> list[Completion]:
        """The greedy completion of every prompt, many at a time."""
        return self.draw(prompts, [0] * len(prompts), max_tokens=max_tokens, stop_ids=stop_ids, batch=batch)

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        max_tokens: int,
        stop_ids: frozenset[int],
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        batch: int = 32,
    ) -> list[Completion]:
        """
        A completion of every prompt, each by a seed of its own, many at a time: those nearest in length. They are what
        `stream` gives for the same prompt and seed.
        """
        how = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        done: dict[int, Completion] = {}
        for prompt in prompts:
            self._check(prompt)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for begin in range(0, len(order), batch):
            group = order[begin : begin + batch]
            generators = [torch.Generator().manual_seed(seeds[i]) for i in group]

            def chosen(scores: Tensor, generators: list[torch.Generator] = generators) -> list[int]:
                return choose_each(scores, generators, **how)  # type: ignore[arg-type]

            found = self._complete([prompts[i] for i in group], max_tokens, stop_ids, chosen)
            done |= dict(zip(group, found, strict=True))
        return [done[i] for i in range(len(prompts))]

    def _complete(
        self,
        prompts: list[Sequence[int]],
        max_tokens: int,
        stop_ids: frozenset[int],
        choose_ids: Callable[[Tensor], list[int]],
    ) -> list[Completion]:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        rooms = (self.context - lengths).clamp(max=max_tokens).tolist()
        said: list[list[int]] = [[] for _ in prompts]
        stopped = [False] * len(prompts)
        if not max(rooms):
            return [Completion(ids, end) for ids, end in zip(said, stopped, strict=True)]
        scores, cache = self._begun(prompts, max(rooms))
        seen = torch.arange(cache.capacity) >= (cache.length - lengths)[:, None, None]  # (B, 1, C): no one's padding
        same = bool((lengths == lengths[0]).all())
        for number in range(max(rooms)):
            chosen = choose_ids(scores)
            for row, id in enumerate(chosen):
                if len(said[row]) < rooms[row] and not stopped[row]:
                    stopped[row] = id in stop_ids
                    said[row] += [] if stopped[row] else [id]
            if all(end or len(ids) == room for ids, end, room in zip(said, stopped, rooms, strict=True)):
                break
            places = (lengths + number).clamp(max=self.context - 1)[:, None]  # of a row that is done, any will do
            mask = None if same else seen[:, :, : cache.length + 1]
            scores = self._extend([[id] for id in chosen], cache, places, mask)
        return [Completion(ids, end) for ids, end in zip(said, stopped, strict=True)]

    def _begun(self, prompts: list[Sequence[int]], room: int) -> tuple[Tensor, Cache]:
        """Scores (B, V) of what follows each prompt; a cache in which all end at one place, with room behind it."""
        config, like, longest = self.model.config, self.model.embed.weight, max(map(len, prompts))
        whole = Cache.empty(config, len(prompts), longest + room, like)
        scores = like.new_empty(len(prompts), self.num_ids, dtype=torch.float32)
        for length in {len(prompt) for prompt in prompts}:
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            part = Cache.empty(config, len(rows), length, like)
            scores[rows] = self._extend([prompts[row] for row in rows], part)
            for all_rows, some in ((whole.keys, part.keys), (whole.values, part.values)):
                all_rows[:, rows, :, longest - length : longest] = some
        whole.length = longest
        return scores, whole

    @torch.inference_mode()
    def _extend(
        self, rows: Sequence[Sequence[int]], cache: Cache, places: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Scores (B, V) of what follows, after each row's new ids went into the cache."""
        device = cache.keys.device
        ids, places = torch.tensor(rows, device=device), None if places is None else places.to(device)
        mask = None if mask is None else mask.to(device)
        hidden = self.model.extend(ids, cache, positions=places, mask=mask)
        logits = self.model.logits(hidden[:, -1:])[:, 0, : self.num_ids]
        check_finite(logits.sum(dim=-1))  # which is not finite where any logit is not
        return logits

    def _check(self, ids: Sequence[int]) -> None:
        if not ids:
            raise DataError("the prompt is empty", hint="Give at least one id.")
        if len(ids) >= self.context:
            hint = "Shorten the conversation."
            raise DataError(f"the prompt has {len(ids)} tokens, and the model's context is {self.context}", hint=hint)
