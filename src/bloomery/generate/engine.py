"""
Decodes token IDs with a key/value cache, one sequence as a stream or many as a batch.

A sequence of a batch gets the IDs that it would get alone, by test. sampling.py chooses each next token.
"""

import copy
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import CheckpointError, ConfigError, DataError
from bloomery.core.log import info, size
from bloomery.generate.decoder import Decoder, PackedAdapter, Pages
from bloomery.generate.sampling import TokenSampler, choose_each, suits_numpy
from bloomery.hw import device as devices
from bloomery.hw import kernel_selection
from bloomery.hw.host import Host, free_bytes
from bloomery.model.attention import Cache
from bloomery.model.kernels import cpu
from bloomery.model.quantize import QuantizedLinear, kept_bytes
from bloomery.model.transformer import Changes, Transformer, changed

import torch
from torch import Tensor

MAX_DRAFT_TOKENS = 32
"""As many tokens as a part of a prompt has."""
DRAFT_NGRAMS = (3, 2)
"""Lengths of the endings that are looked up, the longest first."""
PROMPT_TOKENS = 256
"""Of a prompt, that are computed at once with packed weights: what they need as room is small next to the weights."""
FEWEST_KEYS = 256
"""That a step on a GPU reads; then twice as many, and so on. A GPU's cache grows by as many tokens."""
PROMPT_STEP = 128
"""On a GPU. Prompts whose lengths differ by less may be computed together, the shorter ones filled up."""
IDLE_STEPS = 2
"""That an engine keeps with their caches for the next texts."""


def check_finite(numbers: Tensor | NDArray[np.float32]) -> None:
    """Raises CheckpointError where a number that a model computed is not finite."""
    if not all(map(math.isfinite, numbers.flatten().tolist())):
        what = "the model computes logits that are not finite: its weights are finite, but too large to compute with"
        raise CheckpointError(what, hint="Train it again with lower learning rates, or use an earlier checkpoint.")


def check_rows(logits: Float[Tensor, "B V"]) -> None:
    """As `check_finite`, by the sum of each row, which is not finite where any of its logits is not."""
    check_finite(logits.numpy().sum(-1) if suits_numpy(logits) else logits.sum(dim=-1))


class Drafter:
    """
    Guesses the next tokens of a text: those that followed its last three or two tokens where these occurred before
    (prompt lookup: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). The model then computes all of
    them in one step, and they count as far as they are what it would have said. Guesses that fail become shorter.
    """

    def __init__(self, most: int) -> None:
        """At most so many tokens at once; raises ConfigError for less than 0 or more than MAX_DRAFT_TOKENS."""
        if not 0 <= most <= MAX_DRAFT_TOKENS:
            hint = "0 turns it off; 8 suits answers that repeat parts of their prompt."
            raise ConfigError(
                f"must be at least 0 and at most {MAX_DRAFT_TOKENS}, got {most}", where="draft_tokens", hint=hint
            )
        self._most = self._count = most
        self._followers: list[dict[tuple[int, ...], int]] = [{} for _ in DRAFT_NGRAMS]
        self._indexed = 0

    def guess(self, ids: Sequence[int], room: int) -> list[int]:
        """Up to `room` tokens that may follow; none where the ending is new."""
        if not (count := min(self._count, room)):
            return []
        for at in range(self._indexed, len(ids)):
            for length, followers in zip(DRAFT_NGRAMS, self._followers, strict=True):
                if at >= length:
                    followers[tuple(ids[at - length : at])] = at
        self._indexed = len(ids)
        for length, followers in zip(DRAFT_NGRAMS, self._followers, strict=True):
            begin = followers.get(tuple(ids[-length:]))
            if begin is not None:
                period = len(ids) - begin  # a text that repeats itself continues so
                return [ids[begin + n % period] for n in range(count)]
        return []

    def judge(self, guessed: int, right: int) -> None:
        """How many of the guessed tokens were right."""
        if guessed:
            self._count = min(self._most, 2 * self._count if right == guessed else right + 1)


@dataclass(frozen=True)
class Completion:
    ids: list[int]
    """Without the id that stopped it."""
    end_id: int | None = None
    """The id that stopped it, if the model ended by itself, and not because its tokens or its context ran out."""

    @property
    def stopped(self) -> bool:
        return self.end_id is not None


class Engine:
    """Decodes with one model, in the number format of its weights."""

    def __init__(
        self,
        model: Transformer,
        num_ids: int,
        *,
        pack: bool = False,
        draft_tokens: int = 0,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """
        `num_ids` of the tokenizer: rows that a model has beyond them, which others pad it with, are never said. `pack`
        copies the weights in the order of the compiled library, where there is memory for it: decoding on the CPU is
        then several times as fast. The weights must not change afterwards. With packed weights, `stream` guesses up to
        `draft_tokens` at once (see Drafter): the same tokens come, sooner where an answer repeats parts of the text.
        Keys and values are then in `cache_dtype`: torch.float32, torch.bfloat16 or torch.int8. By default they are in
        float32 next to weights in float32, and else in bfloat16. Raises ConfigError for a `cache_dtype` without packed
        weights.
        """
        self.model, self.num_ids = model.eval(), num_ids
        self.context = model.config.context_length
        self.decoder = Decoder.of(model, cache=cache_dtype) if pack and _fits(model) else None
        if cache_dtype is not None and self.decoder is None:
            raise unpacked(cache_dtype)
        self.draft_tokens = draft_tokens
        self.drafter()  # which checks the number
        self.adapter: PackedAdapter | None = None
        self._idle: dict[int, StaticStep] = {}
        self._graphs = devices.GraphPool(model.embed.weight.device)
        self._replays = devices.is_gpu(model.embed.weight.device)
        if self._replays:
            kernel_selection.trust_tried(devices.find(open=False))

    def adapted(self, changes: Changes) -> "Engine":
        """An engine of the same packed weights, which adds low-rank changes to the results of their matmuls."""
        assert self.decoder is not None
        other = copy.copy(self)
        other.model = changed(self.model, changes)
        other.adapter = PackedAdapter(self.model.config, changes)
        return other

    def stream(
        self, ids: Sequence[int], sampling: SamplingConfig, *, stop_ids: frozenset[int] = frozenset()
    ) -> Iterator[int]:
        """
        Token IDs as they are decided. The last is a stop ID, unless `max_tokens` or the context ran out first.

        Raises DataError for a prompt that is empty or leaves no room in the context.
        """
        self.check(ids, sampling)
        sampler = TokenSampler(sampling, ids)
        room = min(sampling.max_tokens, self.context - len(ids))
        rows = self.rows([ids], [room])
        if isinstance(rows, PackedBatch) and self.draft_tokens:
            yield from self._stream_drafted(list(ids), rows, sampler, room, stop_ids)
            return
        logits = rows.begin()
        for number in range(room):
            (chosen,) = choose_each(logits, [sampler])
            yield chosen
            if chosen in stop_ids or number == room - 1:
                return
            logits = rows.extend([0], [chosen])

    def _stream_drafted(
        self, ids: list[int], rows: "PackedBatch", sampler: TokenSampler, room: int, stop_ids: frozenset[int]
    ) -> Iterator[int]:
        drafter, drafts, end = self.drafter(), list[int](), len(ids) + room
        logits = rows.begin()
        while len(ids) < end:
            right = 0
            for row in logits:
                ids.append(sampler.choose(row))
                yield ids[-1]
                if ids[-1] in stop_ids:
                    return
                if right == len(drafts) or ids[-1] != drafts[right]:
                    break
                right += 1
            rows.lengths[0] += right
            drafter.judge(len(drafts), right)
            drafts = drafter.guess(ids, end - len(ids) - 1)
            if len(ids) < end:
                logits = rows.extend([0], ids[-1:], drafts)

    def drafter(self) -> Drafter:
        return Drafter(self.draft_tokens)

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
            self.check(prompt, sampling)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for begin in range(0, len(order), batch):
            group = order[begin : begin + batch]
            samplers = [TokenSampler(sampling, prompts[i], None if seeds is None else seeds[i]) for i in group]
            completions = self._generate([prompts[i] for i in group], sampling.max_tokens, samplers, stop_ids)
            done |= dict(zip(group, completions, strict=True))
        return [done[i] for i in range(len(prompts))]

    def _generate(
        self,
        prompts: list[Sequence[int]],
        max_tokens: int,
        samplers: list[TokenSampler],
        stop_ids: frozenset[int],
    ) -> list[Completion]:
        rooms = [min(max_tokens, self.context - len(prompt)) for prompt in prompts]
        said: list[list[int]] = [[] for _ in prompts]
        ends: list[int | None] = [None] * len(prompts)
        if not max(rooms):
            return [Completion(ids, end) for ids, end in zip(said, ends, strict=True)]
        rows = self.rows(prompts, rooms)
        logits, open_rows = rows.begin(), list(range(len(prompts)))
        while True:
            chosen = choose_each(logits, [samplers[row] for row in open_rows])
            for row, id in zip(open_rows, chosen, strict=True):
                if rooms[row]:
                    ends[row] = id if id in stop_ids else None
                    said[row] += [] if id in stop_ids else [id]
            going = [n for n, row in enumerate(open_rows) if ends[row] is None and len(said[row]) < rooms[row]]
            if not going:
                return [Completion(ids, end) for ids, end in zip(said, ends, strict=True)]
            open_rows, chosen = [open_rows[n] for n in going], [chosen[n] for n in going]
            logits = rows.extend(open_rows, chosen)

    def rows(self, prompts: Sequence[Sequence[int]], rooms: Sequence[int]) -> "PackedBatch | ModelBatch":
        """Prompts that are decoded together, with memory for so many more tokens of each."""
        if self.decoder is not None:
            return PackedBatch(self.decoder, self.num_ids, prompts, rooms, self.adapter)
        tokens = max(len(prompt) + room for prompt, room in zip(prompts, rooms, strict=True))
        if not self._replays:
            return ModelBatch(StaticStep(self.model, self.num_ids, len(prompts), tokens), prompts)
        step = self._step(1 << (len(prompts) - 1).bit_length(), tokens)
        batch = ModelBatch(step, prompts, PROMPT_STEP)
        weakref.finalize(batch, self._put_back, step).atexit = False
        return batch

    def kept_tokens(self, tokens: int) -> int:
        """For how many tokens a text of that length takes memory, where the model itself decodes."""
        return -(-tokens // FEWEST_KEYS) * FEWEST_KEYS if self._replays else tokens

    def _step(self, num_rows: int, tokens: int) -> "StaticStep":
        """
        The smallest idle step with memory for texts of that length, or a new one. Before a new one for several rows,
        whose keys and values take much memory, idle ones are given up.
        """
        idle = list(self._idle.items())  # a copy: texts that end put steps back meanwhile
        for key, step in sorted(idle, key=lambda item: item[1].cache.capacity):
            fits = step.num_rows == num_rows and step.cache.capacity >= tokens
            if fits and self._idle.pop(key, None) is not None:  # another thread may have been faster
                return step
        if num_rows > 1:
            self._idle.clear()
        return StaticStep(self.model, self.num_ids, num_rows, self.kept_tokens(tokens), self._graphs)

    def give_up_idle(self, tokens: int, most: int) -> None:
        """
        Give up idle steps until they and a text of `tokens` have memory for `most` tokens at most. The step that the
        text will take is given up last.
        """
        idle = sorted(self._idle.items(), key=lambda item: item[1].cache.capacity)
        fitting = next((item for item in idle if item[1].num_rows == 1 and item[1].cache.capacity >= tokens), None)
        held = sum(step.num_rows * step.cache.capacity for _, step in idle)
        needed = 0 if fitting else self.kept_tokens(tokens)
        for key, step in sorted(idle, key=lambda item: item is fitting):
            if held + needed <= most:
                return
            held -= step.num_rows * step.cache.capacity
            self._idle.pop(key, None)

    def _put_back(self, step: "StaticStep") -> None:
        if not step.sound:
            return
        self._idle[id(step)] = step
        for key in list(self._idle)[:-IDLE_STEPS]:
            self._idle.pop(key, None)

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Float[Tensor, " D"]:
        """
        The mean of the last layer's normed hidden states over all tokens, in float32 on the CPU.

        Raises DataError for IDs that are none or more than the context.
        """
        if not 0 < len(ids) <= self.context:
            what = f"the text has {len(ids)} tokens, and the model takes 1 to {self.context}"
            raise DataError(what, where="input", hint="Shorten the text." if ids else "Pass at least one token.")
        hidden = self.model(torch.tensor([list(ids)], device=self.model.embed.weight.device))
        mean: Tensor = hidden[0].float().mean(dim=0).cpu()
        check_finite(mean.sum())
        return mean

    def check_tokens(self, ids: Iterable[int], where: str) -> None:
        """Raises DataError for IDs that are none of this model's."""
        if (wrong := next((id for id in ids if not 0 <= id < self.num_ids), None)) is not None:
            hint = f"This model's token IDs are 0 to {self.num_ids - 1}."
            raise DataError(f"there is no token {wrong}", where=where, hint=hint)

    def check(self, ids: Sequence[int], sampling: SamplingConfig) -> None:
        """Raises DataError for a prompt that is empty or leaves no room, and for a bias of a token that is none."""
        self.check_tokens((id for id, _ in sampling.logit_bias), "logit_bias")
        self.check_tokens(ids, "prompt")
        if not ids:
            raise DataError("the prompt is empty", hint="Pass at least one token ID.")
        if len(ids) >= self.context:
            hint = "Shorten the conversation."
            raise DataError(f"the prompt has {len(ids)} tokens, but the model's context is {self.context}", hint=hint)


def unpacked(cache_dtype: torch.dtype) -> ConfigError:
    what = f"keys and values in {str(cache_dtype).removeprefix('torch.')} need weights that are packed"
    hint = "Remove it to use the number format of the weights. Only models on the CPU are packed."
    return ConfigError(what, where="kv_dtype", hint=hint)


class PackedBatch:
    """Sequences that are decoded with packed weights. A sequence that has ended takes no more work."""

    def __init__(
        self,
        decoder: Decoder,
        num_ids: int,
        prompts: Sequence[Sequence[int]],
        rooms: Sequence[int],
        adapter: PackedAdapter | None = None,
    ) -> None:
        self.decoder, self.num_ids, self.prompts = decoder, num_ids, prompts
        self.adapters = [adapter] * len(prompts)
        self.lengths = [0] * len(prompts)
        each = [Pages.needed(len(prompt) + room) for prompt, room in zip(prompts, rooms, strict=True)]
        self.memory = Pages(decoder.config, sum(each), decoder.dtype)
        self.pages = torch.zeros(len(prompts), max(each), dtype=torch.int32)
        for row, count in enumerate(each):
            self.pages[row, :count] = torch.arange(count) + sum(each[:row])

    def begin(self) -> Tensor:
        """Logits (B, V) of what follows each prompt."""
        logits, finite = torch.empty(len(self.prompts), self.num_ids), True
        for row, prompt in enumerate(self.prompts):
            for begin in range(0, len(prompt), PROMPT_TOKENS):
                ids = prompt[begin : begin + PROMPT_TOKENS]
                last = [len(ids) - 1] if begin + len(ids) == len(prompt) else []
                positions = range(begin, begin + len(ids))
                rows = [row] * len(ids)
                some, sound = self.decoder.step(ids, rows, positions, self.pages, self.memory, last, self.adapters)
                finite = finite and sound
                if last:
                    logits[row] = some[0, : self.num_ids]
            self.lengths[row] = len(prompt)
        if not finite:  # of rows that may be beyond the tokenizer's
            check_rows(logits)
        return logits

    def extend(self, rows: Sequence[int], ids: Sequence[int], drafts: Sequence[int] = ()) -> Tensor:
        """
        Logits of what follows, for some rows, after one more ID of each. Behind a single row may be drafts:
        the logits after each of them follow, and they do not count as part of the row yet.
        """
        assert not drafts or len(rows) == 1
        positions = [self.lengths[row] for row in rows]
        positions += range(positions[0] + 1, positions[0] + 1 + len(drafts))
        every = [*rows, *(rows[0] for _ in drafts)]
        new = [*ids, *drafts]
        logits, finite = self.decoder.step(
            new, every, positions, self.pages, self.memory, range(len(new)), self.adapters
        )
        logits = logits[:, : self.num_ids]
        if not finite:
            check_rows(logits)
        for row in rows:
            self.lengths[row] += 1
        return logits


@torch.inference_mode()
def computed(
    model: Transformer, num_ids: int, ids: Tensor, cache: Cache, ends: Int[Tensor, " B"] | None = None
) -> tuple[Float[Tensor, "B V"], Float[Tensor, " B"]]:
    """
    Logits of what follows, after each row's new IDs went into the cache, and their sums, which are not finite where any
    logit is not. `ends` are the places of the last IDs that count. Matmuls are in the number format of the cache.
    """
    dtype, kind = cache.keys.dtype, ids.device.type
    # Converted weights are not kept: a graph would keep them in memory of its own.
    with nullcontext() if dtype == torch.float32 else torch.autocast(kind, dtype=dtype, cache_enabled=False):
        hidden = model.extend(ids, cache)
        last = hidden[:, -1:] if ends is None else hidden.gather(1, ends[:, None, None].expand(-1, 1, hidden.shape[2]))
        logits = model.logits(last)[:, 0, :num_ids]
    return logits, logits.sum(dim=-1)


class StaticStep:
    """
    A step for so many rows in memory that never moves: IDs, positions, keys and values. What it reads of the keys grows
    by doubling. A GPU captures the step once for each such number of keys, and then replays it: the host asks for one
    thing instead of hundreds. Elsewhere, and where a step cannot be captured, the same step is computed as it is.

    The logits equal those of a whole pass up to the order of sums.
    """

    def __init__(
        self, model: Transformer, num_ids: int, num_rows: int, tokens: int, pool: devices.GraphPool | None = None
    ) -> None:
        """Memory for `tokens` of each row. Graphs share that of `pool`; without it, none is captured."""
        self.model, self.num_ids, self.num_rows, self._pool = model, num_ids, num_rows, pool
        device = model.embed.weight.device
        like = torch.empty(0, dtype=compute_format(model), device=device)
        self.cache = Cache.empty(model.config, num_rows, tokens, like)
        self._inputs = torch.zeros(2, num_rows, 1, dtype=torch.int64, device=device)
        self._host = torch.zeros(2, num_rows, 1, dtype=torch.int64, pin_memory=devices.is_gpu(device))
        self.ids, self.cache.positions = self._inputs
        self.sound = True
        """Whether all that was computed is finite: other numbers in its memory would reach the next text."""
        self.graphs: dict[int, devices.Graph | None] = {}
        """By the keys that are read; None where a step is computed as it is."""

    def captures(self) -> bool:
        """Whether a graph is tried: on a GPU that holds each weight whole."""
        weights = chain(self.model.parameters(), self.model.buffers())
        return devices.is_gpu(self._inputs.device) and all(type(one) in cpu.PLAIN for one in weights)

    def run(self, ids: Sequence[int], positions: Sequence[int]) -> Float[Tensor, "B V"]:
        """
        Logits of what follows a token of each row, at its position. A row may be computed again at its last position,
        which changes nothing. Rows that are left over compute the first token of the first row. Raises CheckpointError
        for logits that are not finite.
        """
        count, left = len(ids), self.num_rows - len(ids)
        self._host.copy_(torch.tensor([[*ids, *[ids[0]] * left], [*positions, *[0] * left]])[:, :, None])
        self._inputs.copy_(self._host, non_blocking=True)  # whose end the check below waits for
        keys = FEWEST_KEYS
        while keys <= max(positions):
            keys *= 2
        keys = min(keys, self.cache.capacity)
        if keys not in self.graphs:
            pool = self._pool if self.captures() else None
            self.graphs[keys] = None if pool is None else pool.captured(lambda: self._compute(keys))
        graph = self.graphs[keys]
        logits, sums = self._compute(keys) if graph is None else graph.replay()
        self.sound = False
        check_finite(sums[:count])
        self.sound = True
        return logits[:count]

    def _compute(self, keys: int) -> tuple[Tensor, Tensor]:
        self.cache.length = keys - 1  # which the step makes longer by one
        return computed(self.model, self.num_ids, self.ids, self.cache)


def compute_format(model: Transformer) -> torch.dtype:
    """
    Of a step on a GPU: the number format of the embedding. Where that is float32 and the matrices of blocks are frozen
    in fewer bytes, it is the format that the GPU computes in.
    """
    table = model.embed.weight
    frozen = [module.weight for module in model.modules() if isinstance(module, QuantizedLinear)]
    short = bool(frozen) and all(weight.dtype != torch.float32 for weight in frozen)
    if table.dtype != torch.float32 or not short or not devices.is_gpu(table.device):
        return table.dtype
    return devices.find(open=False).compute_dtype


class ModelBatch:
    """
    Sequences that are decoded by the model itself. Those that have ended are computed again where they ended, until
    they are at least half of all. Then the others move on alone, except on a GPU. There a captured step takes nearly
    as long for fewer rows, and each number of rows would be captured again.
    """

    def __init__(self, step: StaticStep, prompts: Sequence[Sequence[int]], prompt_step: int = 1) -> None:
        """Prompts whose lengths are the same in steps of `prompt_step` are computed together."""
        self.step, self.prompts, self._prompt_step = step, prompts, prompt_step
        self.last = [prompt[-1] for prompt in prompts]
        self.positions = [len(prompt) - 1 for prompt in prompts]
        self._moves = not step.captures()
        self._slots = {row: row for row in range(len(prompts))}
        """Of each prompt's row: its row in the step."""

    def begin(self) -> Tensor:
        """Logits (B, V) of what follows each prompt. Behind shorter ones, their last token is repeated, unseen."""
        step, groups = self.step, dict[int, list[int]]()
        like = step.cache.keys
        logits = torch.empty(len(self.prompts), step.num_ids, device=like.device)
        for row, prompt in enumerate(self.prompts):
            groups.setdefault(-(-len(prompt) // self._prompt_step), []).append(row)
        for rows in groups.values():
            prompts = [self.prompts[row] for row in rows]
            ends, longest = [len(prompt) - 1 for prompt in prompts], max(map(len, prompts))
            ids = [[*prompt, *[prompt[-1]] * (longest - len(prompt))] for prompt in prompts]
            cache = Cache.empty(step.model.config, len(rows), longest, like)
            inputs = [torch.tensor(numbers, device=like.device) for numbers in (ids, ends)]
            logits[rows], sums = computed(step.model, step.num_ids, inputs[0], cache, inputs[1])
            check_finite(sums)
            for all_rows, some in ((step.cache.keys, cache.keys), (step.cache.values, cache.values)):
                all_rows[:, rows, :, :longest] = some
        return logits

    def extend(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Logits of what follows, for some rows, after one more ID of each. Rows that are left out have ended."""
        if self._moves and 2 * len(rows) <= self.step.num_rows:
            self._move(rows)
        slots = [self._slots[row] for row in rows]
        for slot, id in zip(slots, ids, strict=True):
            self.last[slot], self.positions[slot] = id, self.positions[slot] + 1
        logits = self.step.run(self.last, self.positions)
        return logits if len(rows) == len(self.last) else logits[slots]

    def _move(self, rows: Sequence[int]) -> None:
        """To a step that has these rows alone."""
        step, slots = self.step, [self._slots[row] for row in rows]
        self.step = StaticStep(step.model, step.num_ids, len(rows), step.cache.capacity)
        self.step.cache.keys.copy_(step.cache.keys[:, slots])
        self.step.cache.values.copy_(step.cache.values[:, slots])
        self.last, self.positions = ([each[slot] for slot in slots] for each in (self.last, self.positions))
        self._slots = {row: slot for slot, row in enumerate(rows)}


def _fits(model: Transformer) -> bool:
    """Whether a copy of the weights leaves half of the free memory. Where it does not, a line says so."""
    needed, free = kept_bytes(model), free_bytes(Host.here())
    if model.embed.weight.device.type == "cpu" and needed > free // 2:
        info(f"Decoding without packed weights: they take {size(needed)}, and {size(free)} are free. It is slower.")
        return False
    return True
