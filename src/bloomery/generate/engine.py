"""
Decodes token IDs with a key/value cache, one sequence as a stream or many as a batch.

A sequence of a batch gets the IDs that it would get alone, by test. The next token is greedy, or sampled with
temperature, top-k and top-p.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import CheckpointError, DataError
from bloomery.model.attention import Cache
from bloomery.model.transformer import Transformer

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5
"""Below it, sampling is greedy. Float32 logits divided by this stay finite in float64; by 1e-308 they do not."""


def choose(
    logits: Float[Tensor, " V"],
    sampling: SamplingConfig,
    generator: torch.Generator | None = None,
    seen: Sequence[int] = (),
) -> int:
    """
    One token ID. Temperatures below MIN_TEMPERATURE take the largest logit; ties go to the smallest ID.

    Top-k keeps the k largest logits (0: all); top-p then keeps the fewest of them whose probabilities reach p, at least
    one (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751). Min-p keeps those of at least that share of the
    highest probability (https://arxiv.org/abs/2407.01082). `seen` are the IDs of prompt and answer so far, for the
    repetition penalty (Keskar et al. 2019, https://arxiv.org/abs/1909.05858).
    """
    return choose_each(logits[None], sampling, [generator], [seen])[0]


def choose_each(
    logits: Float[Tensor, "B V"],
    sampling: SamplingConfig,
    generators: Sequence[torch.Generator | None],
    seen: Sequence[Sequence[int]] = (),
) -> list[int]:
    """
    As `choose`, for sequences that each have a generator of their own: a sequence gets what it would get alone. The
    engine has checked that the logits are finite.
    """
    if sampling.repetition_penalty != 1.0:
        logits = _penalized(logits, seen, sampling.repetition_penalty)
    if sampling.temperature < MIN_TEMPERATURE:
        greedy: list[int] = logits.argmax(dim=-1).tolist()
        return greedy
    scaled = logits.cpu().double() / sampling.temperature  # in this order: Apple's GPUs have no float64
    if (
        not sampling.top_k and sampling.top_p >= 1.0 and not sampling.min_p
    ):  # nothing is left out, and sorting is most of the work
        return _sampled(torch.softmax(scaled, dim=-1), generators)
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered, ids = ordered[:, : sampling.top_k], ids[:, : sampling.top_k]
    chances = torch.softmax(ordered, dim=-1)
    if sampling.top_p < 1.0:
        before = chances.cumsum(-1) - chances  # what those ahead of each ID already reach
        kept = before < sampling.top_p
        kept[:, 0] = True
        chances = torch.where(kept, chances, torch.zeros_like(chances))
    if sampling.min_p:
        chances = torch.where(chances >= sampling.min_p * chances[:, :1], chances, torch.zeros_like(chances))
    return [int(row[index]) for row, index in zip(ids, _sampled(chances, generators), strict=True)]


def _penalized(logits: Float[Tensor, "B V"], seen: Sequence[Sequence[int]], penalty: float) -> Float[Tensor, "B V"]:
    """Each row with the logits of its seen IDs nearer to unlikely. An ID that occurred several times counts once."""
    logits = logits.clone()
    for row, ids in zip(logits, seen, strict=True):
        index = torch.tensor(sorted({id for id in ids if id < len(row)}), dtype=torch.long, device=row.device)
        row[index] = torch.where(row[index] < 0, row[index] * penalty, row[index] / penalty)
    return logits


def check_finite(numbers: Tensor) -> None:
    """Raises CheckpointError where a number that a model computed is not finite."""
    if not all(map(math.isfinite, numbers.flatten().tolist())):
        what = "the model computes logits that are not finite: its weights are finite, and too large to compute with"
        raise CheckpointError(what, hint="Train it again with lower learning rates, or name an earlier checkpoint.")


def _sampled(chances: Float[Tensor, "B V"], generators: Sequence[torch.Generator | None]) -> list[int]:
    """An index into each row, by the row's own generator."""
    return [int(torch.multinomial(row, 1, generator=own)) for row, own in zip(chances, generators, strict=True)]


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()
    return generator


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
        self.context = model.config.context_length

    def stream(
        self, ids: Sequence[int], sampling: SamplingConfig, *, stop_ids: frozenset[int] = frozenset()
    ) -> Iterator[int]:
        """
        Token IDs as they are decided. The last is a stop ID, unless `max_tokens` or the context ran out first.

        Raises DataError for a prompt that is empty or leaves no room in the context.
        """
        self._check(ids)
        generator = _generator(sampling.seed)
        room = min(sampling.max_tokens, self.context - len(ids))
        cache = Cache.empty(self.model.config, 1, len(ids) + room, self.model.embed.weight)
        logits = self._extend([list(ids)], cache)
        seen = list(ids)
        for number in range(room):
            chosen = choose(logits[0], sampling, generator, seen)
            seen.append(chosen)
            yield chosen
            if chosen in stop_ids or number == room - 1:
                return
            logits = self._extend([[chosen]], cache)

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        stop_ids: frozenset[int],
        seeds: Sequence[int] | None = None,
        batch: int = 32,
    ) -> list[Completion]:
        """
        A completion of every prompt, many at a time: those nearest in length. They are what `stream` gives for the same
        prompt and seed. `seeds` has a seed for each prompt; without it, each has that of `sampling`.
        """
        done: dict[int, Completion] = {}
        for prompt in prompts:
            self._check(prompt)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for begin in range(0, len(order), batch):
            group = order[begin : begin + batch]
            generators = [_generator(sampling.seed if seeds is None else seeds[i]) for i in group]
            completions = self._generate([prompts[i] for i in group], sampling, generators, stop_ids)
            done |= dict(zip(group, completions, strict=True))
        return [done[i] for i in range(len(prompts))]

    def _generate(
        self,
        prompts: list[Sequence[int]],
        sampling: SamplingConfig,
        generators: list[torch.Generator],
        stop_ids: frozenset[int],
    ) -> list[Completion]:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        rooms = (self.context - lengths).clamp(max=sampling.max_tokens).tolist()
        said: list[list[int]] = [[] for _ in prompts]
        stopped = [False] * len(prompts)
        if not max(rooms):
            return [Completion(ids, end) for ids, end in zip(said, stopped, strict=True)]
        logits, cache = self._begun(prompts, max(rooms))
        seen = torch.arange(cache.capacity) >= (cache.length - lengths)[:, None, None]  # (B, 1, C): no one's padding
        same = bool((lengths == lengths[0]).all())
        for number in range(max(rooms)):
            before = [[*prompt, *ids] for prompt, ids in zip(prompts, said, strict=True)]
            chosen = choose_each(logits, sampling, generators, before)
            for row, id in enumerate(chosen):
                if len(said[row]) < rooms[row] and not stopped[row]:
                    stopped[row] = id in stop_ids
                    said[row] += [] if stopped[row] else [id]
            if all(end or len(ids) == room for ids, end, room in zip(said, stopped, rooms, strict=True)):
                break
            positions = (lengths + number).clamp(max=self.context - 1)[:, None]  # any will do for a row that is done
            mask = None if same else seen[:, :, : cache.length + 1]
            logits = self._extend([[id] for id in chosen], cache, positions, mask)
        return [Completion(ids, end) for ids, end in zip(said, stopped, strict=True)]

    def _begun(self, prompts: list[Sequence[int]], room: int) -> tuple[Tensor, Cache]:
        """Logits (B, V) of what follows each prompt; a cache in which all end at one position, with room behind it."""
        config, like, longest = self.model.config, self.model.embed.weight, max(map(len, prompts))
        whole = Cache.empty(config, len(prompts), longest + room, like)
        logits = like.new_empty(len(prompts), self.num_ids, dtype=torch.float32)
        for length in {len(prompt) for prompt in prompts}:
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            cache = Cache.empty(config, len(rows), length, like)
            logits[rows] = self._extend([prompts[row] for row in rows], cache)
            for all_rows, some in ((whole.keys, cache.keys), (whole.values, cache.values)):
                all_rows[:, rows, :, longest - length : longest] = some
        whole.length = longest
        return logits, whole

    @torch.inference_mode()
    def _extend(
        self, rows: Sequence[Sequence[int]], cache: Cache, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Logits (B, V) of what follows, after each row's new IDs went into the cache. They are all finite."""
        device = cache.keys.device
        ids, positions = torch.tensor(rows, device=device), None if positions is None else positions.to(device)
        mask = None if mask is None else mask.to(device)
        hidden = self.model.extend(ids, cache, positions=positions, mask=mask)
        logits = self.model.logits(hidden[:, -1:])[:, 0, : self.num_ids]
        check_finite(logits.sum(dim=-1))  # which is not finite where any logit is not
        return logits

    def _check(self, ids: Sequence[int]) -> None:
        if not ids:
            raise DataError("the prompt is empty", hint="Give at least one id.")
        if len(ids) >= self.context:
            hint = "Shorten the conversation."
            raise DataError(f"the prompt has {len(ids)} tokens, and the model's context is {self.context}", hint=hint)
