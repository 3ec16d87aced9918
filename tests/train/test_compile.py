import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.core.config import build
from bloomery.core.errors import RunError
from bloomery.hw.distributed import World
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Batch, PackedDataset
from bloomery.train import compile
from bloomery.train.compile import TIGHT, Verdict, checkpoint_activations, compile_blocks, usual_batches
from bloomery.train.config import Mesh, Training
from bloomery.train.plan.here import DryRun
from bloomery.train.step import accumulate_gradients, gradients
from tests.model.made import SHAPES, lively
from tests.train.made import T, on_cpu, random_batch, session, write_samples
from tests.train.test_memory import Small

import torch
from torch import Tensor, nn

BATCH = random_batch(3)
ROOT = Path(__file__).parents[2]


def telling(seen: list[tuple[int, ...]]) -> Callable[..., Any]:
    """A compiler whose programs tell the rows and tokens that they were given."""

    def compiler(plain: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
        def call(x: Tensor, *inputs: Any) -> Tensor:
            seen.append(tuple(x.shape[:2]))
            return plain(x, *inputs)

        return call

    return compiler


def tried(compiler: Callable[..., Any], wanted: Any = "on", level: Any = "none", **how: Any) -> tuple[Verdict, Any]:
    model = lively(SHAPES[0])
    checkpoint_activations(model, level)

    def trial() -> tuple[float, float]:
        loss = accumulate_gradients(model, BATCH, 2, on_cpu()).loss
        norm = float(nn.utils.get_total_norm(gradients(model)))
        model.zero_grad(set_to_none=True)
        return loss, norm

    return compile_blocks(model, wanted, [trial], tolerance=TIGHT, compiler=compiler, **how), model


def honest(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: plain(*inputs)


def wrong(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: plain(*inputs) * 1.5


class Steeper(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> Tensor:
        return upstream[0] * 1.1


def wrong_backward(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: Steeper.apply(plain(*inputs))  # type: ignore[no-untyped-call]


def broken(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fail(*inputs: Any) -> Tensor:
        raise RuntimeError("no lowering for this\nand a long dump")

    return fail


def slow(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wait(*inputs: Any) -> Tensor:
        time.sleep(0.05)
        return plain(*inputs)

    return wait


def is_plain(model: Any) -> bool:
    return all("forward" not in block.__dict__ for block in model.blocks)


def test_blocks_that_agree_are_compiled_and_train_the_same() -> None:
    verdict, model = tried(honest)
    assert verdict.compiled
    assert verdict.why.startswith("loss and gradient norm agree")
    assert not is_plain(model)
    found = accumulate_gradients(model, BATCH, 2, on_cpu())
    assert found == accumulate_gradients(lively(SHAPES[0]), BATCH, 2, on_cpu())


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        (wrong, r"^it computes a loss of [\d.]+ where the plain blocks have [\d.]+$"),
        (wrong_backward, r"^it computes a gradient norm of [\d.]+ where the plain blocks have [\d.]+$"),
        (broken, r"^it failed with RuntimeError: no lowering for this$"),
    ],
)
def test_wrong_numbers_and_errors_are_caught_and_said_and_the_plain_blocks_are_taken(compiler: Any, why: str) -> None:
    verdict, model = tried(compiler)
    assert not verdict.compiled
    assert re.search(why, verdict.why), verdict.why
    assert is_plain(model)
    assert not gradients(model)
    assert accumulate_gradients(model, BATCH, 2, on_cpu()) == accumulate_gradients(
        lively(SHAPES[0]), BATCH, 2, on_cpu()
    )


def test_what_compiles_too_long_is_given_up() -> None:
    verdict, model = tried(slow, limit_seconds=0.02)
    assert verdict == Verdict(False, "it failed with TimeoutError: it took longer than 0 s")
    assert is_plain(model)


def test_auto_takes_only_what_is_faster() -> None:
    verdict, model = tried(slow, "auto")
    assert not verdict.compiled
    assert "without it" in verdict.why
    assert is_plain(model)


def test_off_tries_nothing() -> None:
    assert tried(broken, "off")[0] == Verdict(False, "not asked for")


def test_blocks_go_back_to_recomputation_where_they_had_it() -> None:
    model = tried(broken, level="full")[1]
    assert all(block.__dict__["forward"].plain for block in model.blocks)


def test_without_gradients_and_for_what_was_not_tried_the_plain_blocks_run() -> None:
    seen: list[tuple[int, ...]] = []
    model = tried(telling(seen))[1]
    before = len(seen)
    with torch.no_grad():
        model(torch.arange(3)[None])
    two = BATCH.split(2)[0]
    one_document = replace(two, segments=np.zeros_like(two.segments))
    for untried in (replace(two, **{name: getattr(two, name)[:, 1:] for name in PARTS}), random_batch(5), one_document):
        accumulate_gradients(model, untried, len(untried.ids), on_cpu())
    assert len(seen) == before
    accumulate_gradients(model, two, 2, on_cpu())
    assert len(seen) == before + len(model.blocks)


PARTS = ("ids", "targets", "positions", "segments")


@pytest.mark.slow
@pytest.mark.parametrize(("rows_at_once", "samples"), [(3, 23), (8, 23), (64, 2), (2, 2)])
def test_the_trial_is_of_the_micro_batches_that_training_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int, samples: int
) -> None:
    """Whatever a step and the corpus hold: those micro-batches run compiled, and no others; so after a resume."""
    write_samples(tmp_path / "shards", samples)
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(compile, "STATIC", telling(seen))
    for steps in (1, 2):
        seen.clear()
        session(
            tmp_path / "shards", tmp_path / "out", compile="on", micro_batch_tokens=rows_at_once * T, steps=steps
        ).run()
        assert set(seen) == {(min(rows_at_once, 4), T)}
    assert json.loads((tmp_path / "out" / "compile.json").read_text())[str(min(rows_at_once, 4))]["compiled"]


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run after which there are half as many rows as before."""
    whole = DryRun.run
    monkeypatch.setattr(DryRun, "run", lambda self, rows, most: replace(whole(self, rows, most), rows=rows // 2))


@pytest.mark.usefixtures("halved")
def test_fewer_rows_after_the_dry_run_are_tried_and_compiled_in_their_turn(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(compile, "STATIC", telling(seen))
    session(shards, tmp_path, compile="on", micro_batch_tokens=4 * T, dry_run=True).run()
    steps, halves, blocks = 9, 2, 2
    assert seen[-steps * halves * blocks :] == [(2, T)] * (steps * halves * blocks)
    assert (4, T) in seen


@pytest.mark.usefixtures("halved")
def test_a_number_of_rows_that_fails_says_nothing_of_another(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def fails(plain: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
        def call(x: Tensor, *inputs: Any) -> Tensor:
            if len(x) == 4:
                raise RuntimeError("out of memory")
            seen.append(tuple(x.shape[:2]))
            return plain(x, *inputs)

        return call

    monkeypatch.setattr(compile, "STATIC", fails)
    for _ in range(2):
        seen.clear()
        session(shards, tmp_path, compile="on", micro_batch_tokens=4 * T, dry_run=True).run()
        noted = json.loads((tmp_path / "compile.json").read_text())
        assert {rows: one["compiled"] for rows, one in noted.items()} == {"4": False, "2": True}
        assert set(seen) == {(2, T)}


def test_rows_that_memory_does_not_hold_are_left_to_the_dry_run(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "STATIC", telling([]))
    Small(monkeypatch, rows=2)
    stats = session(shards, tmp_path, compile="on", micro_batch_tokens=4 * T, dry_run=True).run()
    assert stats["steps"] == 9
    noted = json.loads((tmp_path / "compile.json").read_text())
    assert not noted["4"]["compiled"]
    assert noted["4"]["why"].startswith("it failed with OutOfMemoryError")
    assert noted["2"]["compiled"]


def test_blocks_that_memory_holds_only_compiled_are_compared_with_half_the_rows_at_once() -> None:
    model = lively(SHAPES[0])

    def trial() -> tuple[float, float]:
        if not isinstance(model.blocks[0].forward, compile._Compiled):
            raise torch.OutOfMemoryError("out of memory")
        return compile._pass(model, BATCH, on_cpu())

    halves = [partial(compile._pass, model, BATCH, on_cpu(), 2)]
    verdict = compile_blocks(model, "on", [trial], compiler=honest)
    assert verdict.why == "memory runs out in a pass of the plain blocks"
    assert compile_blocks(model, "on", [trial], compiler=honest, halves=[trial]) == verdict
    assert compile_blocks(model, "on", [trial], compiler=honest, halves=halves).compiled


def test_gradients_that_leave_float16_at_the_first_scale_say_nothing_of_the_compiler() -> None:
    model = lively(SHAPES[0])
    with torch.no_grad():
        model.head.weight.mul_(100)
    trial = partial(compile._pass, model, BATCH, on_cpu(torch.float16))
    assert math.isfinite(trial()[1])
    assert compile_blocks(model, "on", [trial], compiler=honest).compiled


def test_blocks_are_compiled_on_all_ranks_or_on_none(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first rank has noted it, and as the one finds it where the others do not."""

    class Company(World):
        def any(self, yes: bool) -> bool:
            return True

    monkeypatch.setattr(compile, "STATIC", telling([]))
    run = session(shards, tmp_path)
    config = run.config.model_copy(update={"compile": "on"})
    verdict = compile.prepare(run.model, config, run.samples, on_cpu(), tmp_path, Company.alone())
    assert verdict == Verdict(False, compile.ELSEWHERE)
    assert not any(isinstance(block.forward, compile._Compiled) for block in run.model.blocks)


def test_kinds_of_micro_batches_are_tried_that_are_not_seldom() -> None:
    def kinds(documents: list[int], rows: int, had: int | None = None, ranks: int = 1) -> list[bool]:
        """Of rows with so many documents each."""
        segments = np.arange(T)[None] % np.array(documents)[:, None]
        whole = replace(random_batch(len(documents)), segments=segments)

        class Made(PackedDataset):
            def __init__(self) -> None:
                self.length, self.num_samples = T, len(documents)

            def batch(self, numbers: Any) -> Batch:
                return Batch(*(getattr(whole, name)[numbers] for name in (*PARTS, "samples")))

        config = build(Training, {"steps": 1, "global_batch_tokens": 64 * T, "micro_batch_tokens": rows * T})
        found = usual_batches(Made(), config, ranks)
        assert all(len(batch.ids) == (had or rows) for batch in found)
        return [bool((batch.segments == batch.segments[:, :1]).all()) for batch in found]

    assert kinds([1], 2) == [True]
    assert kinds([2, 3], 4) == [False]
    assert kinds([1, 2], 1) == [False, True]
    assert kinds([1, 2], 4) == [False, True]
    assert kinds([1, 2], 8) == [False], "one of 256"
    assert kinds([1], 8, had=2, ranks=32) == [True], "a rank has 2 rows of the 64 of a step"


def test_what_came_of_the_trial_is_written_whole_or_not_at_all(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile, "compile_blocks", lambda *args, **how: Verdict(False, "it was slow"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(KeyboardInterrupt):
            session(shards, tmp_path, compile="on").run()
    assert not (tmp_path / "compile.json").exists()
    session(shards, tmp_path, compile="on").run()
    assert json.loads((tmp_path / "compile.json").read_text()) == {"3": {"compiled": False, "why": "it was slow"}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read: Expecting value"),
        ("null", "cannot be read: input should be a valid dictionary"),
        ("{}", "does not say whether blocks were compiled"),
    ],
)
def test_what_came_of_the_trial_and_cannot_be_read_is_named_with_the_hint(
    shards: Path, tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "compile.json").write_text(text)
    with pytest.raises(RunError, match=rf"compile.json: {why}.*\nRemove it"):
        session(shards, tmp_path, compile="on").run()


def test_a_compiler_that_compiled_nothing_is_not_believed() -> None:
    """torch calls the plain code where it cannot follow it, and the numbers agree then."""
    verdict, model = tried(partial(torch.compile, disable=True))
    assert verdict == Verdict(False, "torch compiled none of it (0 graph breaks)")
    assert is_plain(model)


def test_what_layers_share_of_a_mask_is_made_before_the_first_compiled_block() -> None:
    seen: list[bool] = []

    def compiler(plain: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
        def call(x: Tensor, rope: Any, mask: Any, cache: Any) -> Tensor:
            before = len(mask._made)
            output = plain(x, rope, mask, cache)
            seen.append(len(mask._made) == before > 0)
            return output

        return call

    with native_off():
        assert tried(compiler)[0].compiled
    assert seen
    assert all(seen)


@contextmanager
def native_off() -> Iterator[None]:
    """As while torch compiles, when no library of ours is called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "ready", lambda *tensors: False)
        yield


def test_auto_compiles_for_gpus_alone() -> None:
    config = build(Training, {"steps": 1, "global_batch_tokens": 1})
    device = on_cpu().device
    assert config.compile == "auto"
    assert compile.settled(config, device).compile == "off"
    gpu = replace(device, torch_device=torch.device("cuda", 0))
    assert compile.settled(config, gpu).compile == "auto"
    assert compile.settled(config, gpu, early=False).compile == "off", "a trial would sample answers"
    for update in ({"mesh": Mesh(dp_shard=2)}, {"deterministic": True}):
        assert compile.settled(config.model_copy(update=update), gpu).compile == "off"
    wanted = config.model_copy(update={"compile": "on"})
    assert compile.settled(wanted, device) == wanted


def test_more_programs_than_torch_may_make_are_a_failure_of_the_trial_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would only warn, and call the plain code from then on."""
    dynamo: Any = importlib.import_module("torch._dynamo")

    def stops(*inputs: Any) -> Tensor:
        assert dynamo.config.fail_on_recompile_limit_hit
        assert dynamo.config.recompile_limit >= compile.PROGRAMS
        raise dynamo.exc.FailOnRecompileLimitHit("recompile limit reached")

    monkeypatch.setattr(compile, "_by_torch", lambda compiler: True)
    verdict, model = tried(lambda plain: stops)
    assert verdict == Verdict(False, "it failed with FailOnRecompileLimitHit: recompile limit reached")
    assert is_plain(model)
    assert not dynamo.config.fail_on_recompile_limit_hit


def by_torch(program: str) -> list[str]:
    """
    What came of each level, told by a process of its own: the compiler cannot look through the checks that tests put
    around functions.
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


GRAPHS = """
from functools import partial
import torch
from bloomery.model.config import ModelConfig
from tests.train import test_compile
shape = test_compile.SHAPES[0].model_dump(exclude_unset=True) | {"num_layers": 9}
compiler = partial(torch.compile, dynamic=False, backend="aot_eager")
for level, attention in (("none", "standard"), ("full", "differential"), ("selective", "standard")):
    torch._dynamo.reset()
    test_compile.SHAPES = (ModelConfig(**shape | {"attention": attention}),)
    print(test_compile.tried(compiler, level=level)[0].why)
"""


@pytest.mark.slow
def test_blocks_of_a_kind_are_one_graph_for_each_shape_without_a_break() -> None:
    """Micro-batches have two and one rows. Layers of other numbers share a program: torch would compile eight."""
    told = by_torch(GRAPHS)
    assert len(told) == 3
    assert all("plain blocks; 2 graphs compiled in" in why for why in told), told


REAL = """
import torch
from bloomery.train.compile import STATIC
from tests.train import test_compile
test_compile.BATCH = test_compile.random_batch(2)
for level in ("none", "selective"):
    torch._dynamo.reset()
    verdict, _ = test_compile.tried(STATIC, level=level)
    print(verdict.compiled, verdict.why)
"""


@pytest.mark.slow
def test_what_torch_compiles_agrees_with_the_plain_blocks() -> None:
    """Rows are as many in each micro-batch, so that there is one graph."""
    told = by_torch(REAL)
    assert len(told) == 2
    assert all(why.startswith("True loss and gradient norm agree") for why in told), told


@pytest.mark.parametrize(
    ("compiler", "elsewhere", "compile_mode", "why"),
    [
        (honest, False, "on", None),
        (honest, True, "off", "it is not on another rank"),
        (broken, False, "off", "it failed with RuntimeError: no lowering for this"),
    ],
)
def test_a_model_that_is_to_lie_in_parts_is_decided_by_layers_that_each_rank_has_whole(
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: Callable[..., Any],
    elsewhere: bool,
    compile_mode: str,
    why: str | None,
) -> None:
    tried_layers: list[int] = []

    def counted(model: Transformer, *arguments: Any, **settings: Any) -> Verdict:
        tried_layers.append(len(model.blocks))
        return compile_blocks(model, *arguments, **settings)

    class Company(World):
        def any(self, yes: bool) -> bool:
            return yes or elsewhere

    monkeypatch.setattr(compile, "STATIC", compiler)
    monkeypatch.setattr(compile, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(compile, "GAIN", 100.0)
    monkeypatch.setattr(compile, "compile_blocks", counted)
    run = session(shards, tmp_path)
    config = run.config.model_copy(update={"compile": "auto", "parallelism": "fsdp"})
    inputs = run.model.config, run.samples, on_cpu(), tmp_path
    settings = compile.settled_before_sharding(config, *inputs, Company.alone())
    assert settings.compile == compile_mode
    assert tried_layers == [1]
    if why is not None:
        (note,) = json.loads((tmp_path / "compile.json").read_text()).values()
        assert note == {"compiled": False, "why": why}
        assert compile.settled_before_sharding(config, *inputs, World.alone()).compile == "off", (
            "a resumed run asks none"
        )
        assert tried_layers == [1]


def test_auto_waits_for_that_trial_on_gpus_alone() -> None:
    config = build(Training, {"steps": 1, "global_batch_tokens": 64, "compile": "auto", "parallelism": "fsdp"})
    gpu = replace(on_cpu().device, torch_device=torch.device("cuda", 0))
    assert compile.settled(config, gpu).compile == "auto"
    assert compile.settled(config, on_cpu().device).compile == "off"
    assert compile.settled(config.model_copy(update={"mesh": Mesh(dp_shard=2)}), gpu).compile == "off"
