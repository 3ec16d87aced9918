"""A static step, as a GPU replays it, gives the logits of whole passes. Here a processor captures and replays it."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest

from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import CheckpointError
from bloomery.generate import engine as engines
from bloomery.generate.engine import Engine, ModelBatch
from bloomery.generate.scheduler import Request, Scheduler
from bloomery.model import lora, quantize
from bloomery.model.config import Lora
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer
from tests.model.made import CHOICES, SHAPES, VOCAB_SIZE, any_config, lively, random_ids, scores

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NEVER = frozenset({VOCAB_SIZE})
LIMIT = 1e-5
"""Of the largest logit: float32 sums in another order."""
HOST = ("item", "_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "is_nonzero")
"""Operations that wait for a GPU, or bring numbers of the host."""


POOLS: list[tuple[int, "Stream"]] = []
"""Of each graph that was captured: where."""
GRAPHS: list["Recorded"] = []


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A CUDA graph of a processor: replays the operations that were captured into the tensors that they gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        GRAPHS.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tensors(result), tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in tensors(part)] if isinstance(value, (tuple, list)) else []


class Stream:
    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        pass


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured as on a GPU, and the compiled library, which a recording cannot see, is left out."""

    @contextmanager
    def stream(_: Stream) -> Iterator[None]:
        yield

    @contextmanager
    def graph(graph: Recorded, *, pool: int, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        POOLS.append((pool, stream))
        with graph:
            yield

    POOLS.clear()
    GRAPHS.clear()
    for name, value in {
        "CUDAGraph": Recorded,
        "graph": graph,
        "stream": stream,
        "Stream": Stream,
        "current_stream": Stream,
        "set_stream": lambda stream: None,
        "graph_pool_handle": partial(next, count()),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cpu, "ready", lambda *_: False)
    monkeypatch.setattr(engines.StaticStep, "captures", lambda self: True)


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "FEWEST_KEYS", 8)


def static(model: Transformer) -> Engine:
    engine = Engine(model, VOCAB_SIZE)
    engine._replays = True
    return engine


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    return [random_ids(1, length, seed + number)[0].tolist() for number, length in enumerate(lengths)]


def far(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


def largest_error(model: Transformer, lengths: Sequence[int], ends_after: int) -> tuple[float, ModelBatch]:
    """Of all logits up to the end of the context, where the second row ends early and the longest last."""
    context, texts = model.config.context_length, prompts(lengths)
    batch = static(model).rows(texts, [context - length for length in lengths])
    assert isinstance(batch, ModelBatch)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    logits, rows = batch.begin(), list(range(len(texts)))
    while rows:
        kept = []
        for row, some in zip(rows, logits.clone(), strict=True):
            found[row].append(some)
            if len(texts[row]) < context and not (row == 1 and len(texts[row]) == lengths[1] + ends_after):
                texts[row].append(int(some.argmax()))
                kept.append(row)
        rows = kept
        logits = batch.extend(rows, [texts[row][-1] for row in rows]) if rows else logits
    right = [scores(model, torch.tensor([text]))[0, length - 1 :] for text, length in zip(texts, lengths, strict=True)]
    return max(far(torch.stack(some), rows) for some, rows in zip(found, right, strict=True)), batch


@pytest.mark.parametrize("name", CHOICES)
def test_a_static_step_computes_the_logits_of_whole_passes(name: str) -> None:
    error, batch = largest_error(lively(CHOICES[name]), [1, 9, 4], ends_after=3)
    assert error <= LIMIT
    assert batch.step.num_rows == 1, "the longest text is left alone"
    assert list(batch.step.graphs)[-1] == 40, "all that there is, after powers of two"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_model_computes_the_logits_of_whole_passes_in_a_static_step(seed: int) -> None:
    assert largest_error(lively(any_config(seed), seed), [2, 7, 7, 1], ends_after=1)[0] <= LIMIT


def frozen(base: str, adapters: bool = False) -> Transformer:
    model = lively(CHOICES["Qwen3"])
    if adapters:
        lora.attach(model, Lora(base_dtype=base, rank=2, dora=base == "int8"), seed=0)
        for name, weight in model.named_parameters():
            if name.endswith("lora_b"):
                weight.data.normal_(generator=torch.Generator().manual_seed(1))
        return model
    for name, linear in list(lora._linears(model)):
        assert isinstance(linear, torch.nn.Linear)
        lora._put(model, name, quantize.frozen(linear, base))  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("base", ["int8", "int4", "nf4", "nf4_double"])
@pytest.mark.parametrize("adapters", [False, True])
def test_frozen_matrices_and_adapters_go_through_a_captured_step(base: str, adapters: bool, graphs: None) -> None:
    if base == "int4" and adapters:
        pytest.skip("adapters have no base in int4")
    assert largest_error(frozen(base, adapters), [3, 2], ends_after=2)[0] <= LIMIT


@pytest.mark.parametrize("name", ["differential in a window", "ALiBi in a window", "Gemma 3", "Phi-3", "NormHead"])
def test_what_is_captured_reads_nothing_of_the_host_and_replays_at_every_position(name: str, graphs: None) -> None:
    error, batch = largest_error(lively(CHOICES[name]), [1, 9, 4], ends_after=3)
    assert error <= LIMIT
    assert all(batch.step.graphs[keys] is not None for keys in (16, 32, 40))


def test_texts_of_one_size_share_a_step_and_its_graphs(graphs: None) -> None:
    engine, texts = static(lively(SHAPES[0])), prompts([3, 5, 4])
    plain = Engine(engine.model, VOCAB_SIZE)
    sampling = SamplingConfig.greedy(16)
    for text in texts:
        assert list(engine.stream(text, sampling)) == list(plain.stream(text, sampling))
    (step,) = engine._idle.values()
    assert list(step.graphs) == [8, 16, 24]
    together = engine.generate_batch(texts, sampling, stop_ids=frozenset(range(0, VOCAB_SIZE, 9)))
    assert together == plain.generate_batch(texts, sampling, stop_ids=frozenset(range(0, VOCAB_SIZE, 9)))
    assert {one.num_rows for one in engine._idle.values()} == {4}, "others were given up for memory of several rows"


def test_few_steps_serve_all_numbers_of_texts_and_their_graphs_share_one_pool(graphs: None) -> None:
    engine = static(lively(SHAPES[0]))
    plain, sampling = Engine(engine.model, VOCAB_SIZE), SamplingConfig.greedy(6)
    for number in (5, 8, 6, 7, 5):
        texts = prompts(range(2, 2 + number), seed=number)
        found = engine.generate_batch(texts, sampling, stop_ids=NEVER)
        assert found == plain.generate_batch(texts, sampling, stop_ids=NEVER)
    (step,) = engine._idle.values()
    assert step.num_rows == 8
    assert len(POOLS) == len(step.graphs), "none was captured again"
    engine.generate_batch(prompts([3]), sampling, stop_ids=NEVER)
    assert len(POOLS) > len(step.graphs)
    assert len(set(POOLS)) == 1


def test_what_a_graph_gave_outlives_the_next_graph_of_its_pool(graphs: None) -> None:
    engine = static(lively(SHAPES[0]))
    first, second = (engine.rows([text], [9]) for text in prompts([3, 4]))
    first.begin(), second.begin()
    logits = first.extend([0], [1])
    before = logits.clone()
    with torch.inference_mode():
        for _, _, _, result in [one for graph in GRAPHS for one in graph.operations]:
            for tensor in tensors(result):
                if tensor.is_floating_point():
                    tensor.fill_(7.0)  # as the graph does that has their memory too
    assert torch.equal(logits, before)


def test_a_right_padded_prompt_gets_the_logits_that_it_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes prompts of different lengths at once."""
    passes, plain = list[tuple[int, ...]](), Transformer.extend

    def counted(self: Transformer, ids: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        passes.append(tuple(ids.shape))
        return plain(self, ids, *others, **more)

    model = lively(CHOICES["differential in a window"])
    monkeypatch.setattr(Transformer, "extend", counted)
    monkeypatch.setattr(engines, "PROMPT_STEP", 8)
    texts = prompts([3, 7, 1, 9])
    logits = static(model).rows(texts, [5] * 4).begin()
    assert passes == [(3, 7), (1, 9)]
    for row, text in zip(logits, texts, strict=True):
        assert far(row, scores(model, torch.tensor([text]))[0, -1]) <= LIMIT


def test_streams_at_a_time_have_steps_of_their_own(graphs: None) -> None:
    engine = static(lively(SHAPES[0]))
    whole = list(engine.stream([3, 4], SamplingConfig.greedy(9), stop_ids=NEVER))
    one, other, third = (engine.stream([3, 4], SamplingConfig.greedy(9), stop_ids=NEVER) for _ in range(3))
    assert next(third) == whole[0]
    mixed = [next(one), next(other), next(other), next(one), next(one), next(other)]
    assert mixed == [whole[0], whole[0], whole[1], whole[1], whole[2], whole[2]]
    assert list(other) == whole[3:]
    assert [list(one), list(third)] == [whole[3:], whole[1:]]
    assert len(engine._idle) == engines.IDLE_STEPS


def test_a_step_that_cannot_be_captured_is_computed_as_it_is(
    graphs: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = static(lively(SHAPES[0]))
    right = list(engine.stream([3, 4], SamplingConfig.greedy(9), stop_ids=NEVER))
    plain: Callable[..., torch.Tensor] = Transformer.logits

    def asks(self: Transformer, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.sum().item() < 1e9
        return plain(self, hidden)

    monkeypatch.setattr(Transformer, "logits", asks)
    engine = static(engine.model)
    assert list(engine.stream([3, 4], SamplingConfig.greedy(9), stop_ids=NEVER)) == right
    (step,) = engine._idle.values()
    assert set(step.graphs.values()) == {None}
    told = capsys.readouterr()
    assert (told.out + told.err).count("Decoding without a CUDA graph, which is slower: operation not permitted") == 2


def test_logits_that_are_not_finite_are_an_error_of_a_static_step_too(graphs: None) -> None:
    model = lively(SHAPES[1])
    engine = static(model)
    rows = engine.rows([[1, 2]], [5])
    rows.begin()
    with torch.no_grad():
        model.head.weight[7, 0] = torch.inf
    with pytest.raises(CheckpointError, match="logits that are not finite"):
        rows.extend([0], [3])
    del rows
    gc.collect()
    assert not engine._idle, "its numbers would reach the next text"


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_a_model_in_bfloat16_keeps_its_cache_and_computes_in_it(dtype: torch.dtype) -> None:
    model = lively(SHAPES[0]).to(dtype)
    batch = static(model).rows([[1, 2, 3]], [9])
    assert isinstance(batch, ModelBatch)
    assert batch.step.cache.keys.dtype == dtype
    texts, logits = [1, 2, 3], batch.begin()
    for id in (5, 6, 7, 8, 9):
        texts.append(id)
        logits = batch.extend([0], [id])
    assert far(logits[0], scores(model, torch.tensor([texts]))[0, -1]) < 0.03


@pytest.mark.parametrize("base", ["bfloat16", "int8", "nf4"])
def test_a_static_step_in_bfloat16_is_as_near_to_float32_as_a_whole_pass_in_bfloat16(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rounds where a whole pass rounds: the distance from float32 is that of the format."""
    monkeypatch.setattr(engines, "compute_format", lambda model: torch.bfloat16)
    monkeypatch.setattr(cpu, "ready", lambda *_: False)
    model, ids = frozen(base), random_ids(1, 30, 5)
    batch = static(model).rows([ids[0, :4].tolist()], [30])
    steps = [batch.begin().clone(), *(batch.extend([0], [id]).clone() for id in ids[0, 4:].tolist())]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = scores(model, ids)[0, 3:]
    exact = scores(model, ids)[0, 3:]
    step_error, whole_error = far(torch.cat(steps), exact), far(whole, exact)
    assert 1e-3 < whole_error < 0.05, "a pass in float32 would say nothing"
    assert step_error < 1.5 * whole_error


def test_requests_of_a_scheduler_take_turns_with_static_steps(graphs: None) -> None:
    model = lively(SHAPES[0])
    texts = prompts([3, 6, 2, 4])
    plain = [list(Engine(model, VOCAB_SIZE).stream(text, SamplingConfig.greedy(9), stop_ids=NEVER)) for text in texts]
    with Scheduler(static(model)) as scheduler:
        tickets = [scheduler.submit(Request(text, SamplingConfig.greedy(9), NEVER)) for text in texts]
        assert [[token.id for token in ticket] for ticket in tickets] == plain
