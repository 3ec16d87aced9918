"""
How the next token of a sequence is chosen from its logits: bias, penalties, and which of the likeliest may be sampled.

The order is that of transformers. A bias is added to logits; then come the repetition penalty (Keskar et al. 2019,
https://arxiv.org/abs/1909.05858), presence and frequency penalties, and the rule that no n-gram occurs twice. Logits
are divided by the temperature. Of the tokens that are left, top-k keeps the k likeliest, and top-p the fewest of these
whose probabilities reach p (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751). Min-p keeps those of at least that
share of the highest probability (https://arxiv.org/abs/2407.01082). Typical-p keeps those whose surprise -log p is
nearest to the entropy (Meister et al. 2022, https://arxiv.org/abs/2202.00666).

V is the number of token IDs, C a number of candidates, B of sequences.
"""

from collections.abc import Sequence

from jaxtyping import Bool, Float, Int

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import DataError
from bloomery.hw import device as devices

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5
"""Below it, sampling is greedy. Float32 logits divided by this stay finite in float64; by 1e-308 they do not."""
FEW, MORE = 256, 4096
"""Candidates of top-p and typical-p that are tried before all IDs are sorted, which takes as long as a small model."""


class TokenSampler:
    """Chooses the tokens of one sequence. It keeps of the text only what its settings read."""

    def __init__(
        self,
        sampling: SamplingConfig,
        prompt: Sequence[int] = (),
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`seed` replaces that of `sampling`, and `generator` both."""
        self.sampling = sampling
        self.is_greedy = sampling.temperature < MIN_TEMPERATURE
        counted = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )
        self._counts: Float[Tensor, " V"] | None = None
        """How often each ID occurs in the window; made for the first choice."""
        self._followers: dict[tuple[int, ...], set[int]] | None = {} if sampling.no_repeat_ngram else None
        self._is_counted = counted
        self.reads_text = counted or self._followers is not None
        self.changes_logits = self.reads_text or bool(sampling.logit_bias)
        self._text: list[int] = []
        self._bias: tuple[Tensor, Tensor] | None = None
        if sampling.logit_bias:
            ids, biases = zip(*sampling.logit_bias, strict=True)
            self._bias = torch.tensor(ids), torch.tensor(biases)
        self._generator = generator
        if generator is None and not self.is_greedy:
            self._generator = torch.Generator()
            seed = sampling.seed if seed is None else seed
            self._generator.manual_seed(seed) if seed is not None else self._generator.seed()
        for id in prompt if self.reads_text else ():
            self.accept(id)

    def accept(self, id: int) -> None:
        """A token that the sequence now has."""
        if not self.reads_text:
            return
        self._text.append(id)
        if self._counts is not None:
            window = self.sampling.penalty_window
            self._count(id, 1)
            if window and len(self._text) > window:
                self._count(self._text[-1 - window], -1)
        if self._followers is not None and len(self._text) >= (n := self.sampling.no_repeat_ngram):
            self._followers.setdefault(tuple(self._text[len(self._text) - n : -1]), set()).add(id)

    def _count(self, id: int, times: int) -> None:
        if self._counts is not None and id < len(self._counts):
            self._counts[id] += times

    def choose(self, logits: Float[Tensor, " V"], allowed: Bool[Tensor, " V"] | None = None) -> int:
        """
        One token ID of those allowed, which the text then has. Temperatures below MIN_TEMPERATURE take the largest
        logit; ties go to the smallest ID. Where every allowed token would repeat an n-gram, repeating is allowed.

        Raises DataError where none is allowed.
        """
        logits = self._changed(logits, allowed)
        if self.is_greedy:
            (id,) = most_likely(logits[None])
        else:
            id = int(_drawn(*distribution(logits, self.sampling), self.point()))
        self.accept(id)
        return id

    def point(self) -> Float[Tensor, "1"]:
        """The next random number from 0 to 1, which decides a token: float64, on the CPU."""
        return torch.rand(1, generator=self._generator, dtype=torch.float64)

    def _changed(self, logits: Tensor, allowed: Tensor | None) -> Tensor:
        """Logits after bias, penalties and bans, as a copy where there are any."""
        if allowed is None and not self.changes_logits:
            return logits
        logits = logits.clone()
        if self._bias is not None:
            logits[self._bias[0]] += self._bias[1]
        if self._is_counted:
            if self._counts is None:
                window = torch.tensor(self._text[-self.sampling.penalty_window :], dtype=torch.long)
                self._counts = torch.bincount(window[window < len(logits)], minlength=len(logits)).to(logits.dtype)
            logits = self._penalized(logits, self._counts)
        if allowed is not None:
            logits.masked_fill_(~allowed, -torch.inf)
            if not bool(allowed.any()):
                raise DataError("no token may follow the answer so far", hint="Loosen the grammar or schema.")
        if banned := self._banned(len(logits)):
            left = logits.clone()
            left[banned] = -torch.inf
            logits = left if bool((left > -torch.inf).any()) else logits
        return logits

    def _banned(self, num_ids: int) -> list[int]:
        """IDs that would end an n-gram that the text has already."""
        before = self.sampling.no_repeat_ngram - 1
        if self._followers is None or len(self._text) < before:
            return []
        last = tuple(self._text[len(self._text) - before :])
        return [id for id in self._followers.get(last, ()) if id < num_ids]

    def _penalized(self, logits: Float[Tensor, " V"], counts: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        sampling, occurred = self.sampling, counts > 0
        if (factor := sampling.repetition_penalty) != 1.0:
            repeated = torch.where(logits < 0, logits * factor, logits / factor)
            logits = torch.where(occurred, repeated, logits)
        return logits - sampling.presence_penalty * occurred - sampling.frequency_penalty * counts


def suits_numpy(logits: Tensor) -> bool:
    """Whether NumPy reads these rows, which is faster on a CPU: torch wakes its threads for each row."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32


def most_likely(logits: Float[Tensor, "B V"]) -> list[int]:
    """The first ID of the largest logit of each row."""
    ids: list[int] = (logits.numpy().argmax(-1) if suits_numpy(logits) else logits.argmax(-1)).tolist()
    return ids


def choose_each(
    logits: Float[Tensor, "B V"], samplers: Sequence[TokenSampler], allowed: Sequence[Tensor | None] = ()
) -> list[int]:
    """One token ID for each sequence, by its own sampler: what it would get alone. The logits are finite."""
    plain = not any(sampler.changes_logits for sampler in samplers) and all(mask is None for mask in allowed)
    # A GPU adds up chances in one order only where nobody asked for the same bits each time.
    on_gpu = devices.is_gpu(logits.device) and not torch.are_deterministic_algorithms_enabled()
    if plain and (on_gpu or all(sampler.is_greedy for sampler in samplers)):
        return _choose_together(logits, samplers)  # a GPU waits once, and hands over only the IDs
    logits = logits.cpu()  # Apple's GPUs have no float64
    masks = allowed or [None] * len(samplers)
    return [sampler.choose(row, mask) for row, sampler, mask in zip(logits, samplers, masks, strict=True)]


def _choose_together(logits: Float[Tensor, "B V"], samplers: Sequence[TokenSampler]) -> list[int]:
    """As `choose_each`, where logits stay as they are: all rows of the same settings at once, where the logits are."""
    if all(sampler.is_greedy for sampler in samplers):
        return most_likely(logits)
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, sampler in enumerate(samplers):
        how = sampler.sampling
        groups.setdefault((how.temperature, how.top_k, how.top_p, how.min_p, how.typical_p), []).append(row)
    if len(groups) == 1:
        all_ids: list[int] = _choose_alike(logits, samplers).tolist()
        return all_ids
    chosen = torch.empty(len(samplers), dtype=torch.long, device=logits.device)
    for rows in groups.values():
        chosen[rows] = _choose_alike(logits[rows], [samplers[row] for row in rows])
    ids: list[int] = chosen.tolist()
    return ids


def _choose_alike(logits: Float[Tensor, "B V"], samplers: Sequence[TokenSampler]) -> Int[Tensor, " B"]:
    if samplers[0].is_greedy:
        return logits.argmax(-1)
    points = torch.stack([sampler.point() for sampler in samplers]).to(logits.device)
    return _drawn(*distribution(logits, samplers[0].sampling), points)[:, 0]


def distribution(
    logits: Float[Tensor, "*B V"], sampling: SamplingConfig
) -> tuple[Float[Tensor, "*B C"], Int[Tensor, "*B C"] | None]:
    """
    What is sampled from, at a temperature that is not 0: numbers in the ratios of the candidates' probabilities, and
    the candidates' IDs, from the likeliest to the least. No IDs: the candidates are all IDs, in their order.
    """
    scaled = logits.double() / sampling.temperature
    ids: Tensor | None = None
    if sampling.top_k or sampling.top_p < 1.0:
        scaled, ids = _likeliest(scaled, sampling)
    chances = torch.softmax(scaled, dim=-1)
    if sampling.min_p:
        chances = torch.where(chances >= sampling.min_p * chances.amax(-1, keepdim=True), chances, 0.0)
    if sampling.typical_p < 1.0:
        chances = _typical(chances / chances.sum(-1, keepdim=True), sampling.typical_p)
    return chances, ids


def _likeliest(scaled: Float[Tensor, "*B V"], sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """The candidates of top-k and top-p, from the highest to the lowest; of equal ones the smaller ID is first."""
    num_ids = scaled.shape[-1]
    top_k = min(sampling.top_k or num_ids, num_ids)
    if top_k < num_ids:
        ordered, ids = (some[..., :top_k] for some in _highest(scaled, top_k))
        total = (ordered - ordered[..., :1]).exp().sum(-1, keepdim=True)
    else:
        total = (scaled - scaled.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
        for count in (FEW, MORE, num_ids):
            ordered, ids = _highest(scaled, count)
            if ordered.shape[-1] >= num_ids:
                break
            if float((ordered - ordered[0]).exp().sum()) >= sampling.top_p * float(total):
                break
    if sampling.top_p < 1.0:
        chances = (ordered - ordered[..., :1]).exp() / total
        kept = chances.cumsum(-1) - chances < sampling.top_p  # what the likelier ones already reach
        kept[..., 0] = True
        most = int(kept.sum(-1).max())
        ordered, ids = ordered.masked_fill(~kept, -torch.inf)[..., :most], ids[..., :most]
    return ordered, ids


def _highest(scaled: Float[Tensor, "*B V"], count: int) -> tuple[Tensor, Tensor]:
    """So many of the highest, and those that equal the last of them, in order; and their IDs. Of several rows, all."""
    if count >= scaled.shape[-1] or scaled.dim() > 1:
        return torch.sort(scaled, dim=-1, descending=True, stable=True)
    some = (scaled >= torch.topk(scaled, count).values[-1]).nonzero()[:, 0]
    ordered, order = torch.sort(scaled[some], descending=True, stable=True)
    return ordered, some[order]


def _typical(chances: Float[Tensor, "*B C"], mass: float) -> Float[Tensor, "*B C"]:
    """Zero for the candidates whose surprise is farther from the entropy than that of those that reach the mass."""
    surprise = -chances.log()
    entropy = torch.where(chances > 0, chances * surprise, 0.0).sum(-1, keepdim=True)
    far, most = (surprise - entropy).abs(), chances.shape[-1]
    for count in (FEW, MORE, most):
        nearest, order = torch.topk(far, min(count, most), largest=False)
        reached = chances.gather(-1, order).cumsum(-1)
        if count >= most or bool((reached[..., -1] >= mass).all()):
            break
    last = (reached < mass).sum(-1, keepdim=True).clamp(max=nearest.shape[-1] - 1)
    return torch.where(far <= nearest.gather(-1, last), chances, 0.0)


def _drawn(
    chances: Float[Tensor, "*B C"], ids: Int[Tensor, "*B C"] | None, point: Float[Tensor, "*B 1"]
) -> Int[Tensor, "*B 1"]:
    """An ID, as often as its number is large: by one random number from 0 to 1 in the sum of all."""
    sums = chances.cumsum(-1)
    # The first sum above the point: where a chance is 0, the sum is that of the index before.
    index = torch.searchsorted(sums, point * sums[..., -1:], right=True)
    index = index.minimum((sums < sums[..., -1:]).sum(-1, keepdim=True))  # a point may be rounded up to the sum
    return index if ids is None else ids.gather(-1, index)
