"""The stage `prefer` on answers that the model draws itself: what they are worth, that it learns, that it goes on."""

import copy
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.core.config import build, plain
from bloomery.core.errors import DataError, RunError
from bloomery.core.log import read_metrics
from bloomery.generate.engine import Completion
from bloomery.model import lora
from bloomery.model.config import Lora
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.stages import prefer, rollouts
from bloomery.stages.rollouts import PolicyQuestion, Rollouts, judge
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train.preference.config import Grpo, Prefer
from bloomery.train.preference.losses import GRPOLoss, by_token
from bloomery.weights import hf
from tests import warm
from tests.stages.made_prefer import CONTEXT, guessing, left, settings, tuned
from tests.tokenizer.made import small
from tests.train.made import on_cpu
from tests.train.test_trainer import die_after

import torch

RENDERER = Renderer(small())


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("run") / "10-finetune-aaaaaaaa")


def drawing(given: dict[str, Any] | None = None, **more: Any) -> Prefer:
    """Questions whose answer is one digit, which a model that knows nothing hits now and then."""
    loss = {
        "kind": "grpo",
        "problems": [{"kind": "arithmetic", "largest": 3, "count": 16}],
        "group_size": 8,
        "max_new_tokens": 2,
        "check_questions": 8,
        **(given or {}),
    }
    return settings(loss=loss, global_batch_tokens=32 * 20, **more)


def question(text: str = "What is 2 plus 2?", right: str = "4") -> PolicyQuestion:
    prompt = RENDERER.prompt([{"role": "user", "content": text}])
    return PolicyQuestion("a", text, tuple(prompt), Decimal(right))


@pytest.mark.parametrize(
    ("said", "ended", "marked", "right"),
    [
        ("4", True, False, True),
        ("2 plus 2 is 4.", True, False, True),
        ("4", False, False, False),
        ("5", True, False, False),
        ("It is #### 4 and not 5", True, False, True),
        ("It is #### 5 and not 4", True, False, False),
        ("4", True, True, False),
        ("#### 4", True, True, True),
        ("#### 4.00", True, True, True),
        ("$4", True, False, True),
        ("none", True, False, False),
    ],
)
def test_an_answer_is_right_that_ends_and_says_the_number(said: str, ended: bool, marked: bool, right: bool) -> None:
    assert (
        judge(RENDERER, question(), Completion(small().encode(said), 0 if ended else None), marked=marked).right
        == right
    )


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """The code of devices that are no CPU, on this CPU."""
    token = cpu.ELSEWHERE.set(True)
    yield
    cpu.ELSEWHERE.reset(token)


@pytest.fixture
def source(finetuned: Path, tmp_path: Path) -> Callable[..., Rollouts]:
    def make(**given: Any) -> Rollouts:
        loss = Grpo.model_validate(
            {"problems": [{"kind": "arithmetic"}], "group_size": 4, "max_new_tokens": 5, **given}
        )
        model = hf.load(finetuned / "model").model
        known = [question(f"What is {n} plus {n}?", str(2 * n)) for n in (1, 12, 3)]
        return Rollouts(loss, known, RENDERER, model, 7, tmp_path, model, precision=on_cpu(), rows_at_once=3)

    return make


def test_a_sample_is_the_same_whoever_asks_for_it_and_when(source: Callable[..., Rollouts]) -> None:
    whole = source().batch(np.arange(12))
    for numbers in (np.arange(4), np.arange(4, 12), np.array([3, 11])):
        part = source().batch(numbers)
        assert np.array_equal(part.ids, whole.ids[numbers])
        assert np.array_equal(part.targets, whole.targets[numbers])
    assert len({tuple(row) for row in whole.ids}) > 6  # answers to one question differ


def test_only_what_was_answered_is_learned_with_its_end(source: Callable[..., Rollouts]) -> None:
    made = source()
    batch = made.batch(np.arange(12))
    for row, number in enumerate(batch.samples):
        asked_of = made._question(int(number))
        learned = batch.targets[row] != IGNORE
        begin = len(asked_of.prompt) - 1
        assert tuple(batch.ids[row, : begin + 1]) == asked_of.prompt
        count = int(learned.sum())
        assert learned[begin : begin + count].all()
        answer = batch.targets[row][learned].tolist()
        assert RENDERER.end_id not in answer[:-1]
        assert answer[-1] == RENDERER.end_id or count == 5


def test_the_end_that_is_learned_is_the_one_that_was_said(
    source: Callable[..., Rollouts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models whose template ends a turn by one token, and a text by another with a smaller ID."""
    made, other = source(kl_coef=0.0), RENDERER.end_id - 1
    monkeypatch.setattr(made, "renderer", Renderer(small()))
    monkeypatch.setattr(made.renderer, "end_ids", frozenset({other, RENDERER.end_id}))
    said = torch.full((1, 1, small().vocab_size), -1.0)
    said[..., RENDERER.end_id] = 9.0
    monkeypatch.setattr(made.model, "logits", lambda hidden: said.expand(*hidden.shape[:-1], -1))
    targets = made.batch(np.arange(4)).targets
    assert set(targets[targets != IGNORE].tolist()) == {RENDERER.end_id}


def test_log_probabilities_of_then_are_those_of_the_model_that_drew(source: Callable[..., Rollouts]) -> None:
    made = source(updates=2, temperature=1.5)
    batch = made.batch(np.arange(8))
    assert made.drawn.now is not None
    assert made.drawn.before is not None
    expected = by_token(made.model, batch, on_cpu(), 1.5).detach().numpy()
    assert np.allclose(made.drawn.now, expected, atol=1e-5)
    assert np.allclose(made.drawn.before, expected, atol=1e-5)
    assert source(kl_coef=0.0).batch(np.arange(4)) is not None


def test_a_batch_ends_with_its_longest_answer(source: Callable[..., Rollouts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "LENGTH_STEP", 1)
    short, whole = source(updates=2, max_new_tokens=9), source(updates=2, max_new_tokens=9)
    whole.trims = False
    numbers = np.arange(4)  # to the shorter question alone
    batch, full = short.batch(numbers), whole.batch(numbers)
    length = batch.ids.shape[1]
    assert full.ids.shape[1] == whole.length > length
    assert (full.targets[:, length:] == IGNORE).all()
    assert (full.targets[:, length - 1] != IGNORE).any()
    for name in ("ids", "targets", "positions", "segments"):
        assert np.array_equal(getattr(batch, name), getattr(full, name)[:, :length])
    assert short.drawn.now is not None
    assert whole.drawn.now is not None
    assert np.allclose(short.drawn.now, whole.drawn.now[:, :length], atol=1e-6)


def test_answers_that_share_rows_have_the_same_log_probabilities_and_micro_batches_after_a_resume(
    source: Callable[..., Rollouts], elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(model: Transformer, asked: Any, seeds: Any, renderer: Any, sampling: Any) -> list[Completion]:
        return [Completion([5 + seed % 7] * (1 + seed % 5), RENDERER.end_id) for seed in seeds]

    monkeypatch.setattr(rollouts, "LENGTH_STEP", 4)
    monkeypatch.setattr(rollouts, "answered", answered)
    made, again = source(updates=2, max_new_tokens=27), source(updates=2, max_new_tokens=27)
    sizes = list[int]()

    def asked_for(model: Transformer, micro_batch: Batch, *settings: Any) -> torch.Tensor:
        sizes.append(len(micro_batch.ids))
        return by_token(model, micro_batch, *settings)

    monkeypatch.setattr(rollouts, "by_token", asked_for)
    batch = made.batch(made.order(0, 12, 0))
    assert sum(sizes) == 2 * 12
    assert len(sizes) < 2 * 12 / made.rows_at_once
    for values in (made.drawn.now, made.drawn.before):
        assert values is not None
        assert np.allclose(values, by_token(made.model, batch, on_cpu()).detach().numpy(), atol=1e-5)
    read = again.batch(again.order(12, 12, 0))
    assert again.used_before
    parts = [
        GRPOLoss(one.loss, lambda: made.drawn, one.length_step, one.capacity).micro_batches(answers, 3, on_cpu())
        for one, answers in ((made, batch), (again, read))
    ]
    assert len(parts[0]) < 4
    for first, second in zip(*parts, strict=True):
        for name in rollouts.FIELDS:
            assert np.array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("adapters", [{"rank": 4}, {"rank": 4, "base_dtype": "nf4"}, {"rank": 4, "dora": True}])
def test_the_reference_of_adapters_is_the_base_itself_and_says_what_a_copy_of_it_says(
    source: Callable[..., Rollouts], adapters: dict[str, Any]
) -> None:
    made, separate = source(), source()
    for one in (made, separate):
        lora.attach(one.model, build(Lora, adapters), 0)
        one.reference = None
    separate.reference = copy.deepcopy(separate.model)  # before its adapters say anything
    for one in (made, separate):
        for name, weight in lora.weights(one.model).items():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(1))
    batch = made.batch(np.arange(8))
    assert np.array_equal(separate.batch(np.arange(8)).ids, batch.ids)
    assert np.array_equal(np.asarray(made.drawn.before), np.asarray(separate.drawn.before))
    now = by_token(made.model, batch, on_cpu()).detach().numpy()
    assert not np.allclose(np.asarray(made.drawn.before), now, atol=1e-3), "adapters are on again"


@pytest.mark.parametrize(("adapters", "models"), [({"rank": 4}, 1), (None, 2)])
def test_a_run_with_adapters_has_one_model_and_a_run_of_all_weights_has_a_second(
    finetuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: dict[str, Any] | None, models: int
) -> None:
    def alive() -> list[Transformer]:
        gc.collect()
        return [model for model in gc.get_objects() if isinstance(model, Transformer)]

    others, seen = alive(), list[int]()
    told = Rollouts._told

    def counted(self: Rollouts, *arguments: Any) -> Any:
        seen.append(sum(not any(model is other for other in others) for model in alive()))
        return told(self, *arguments)

    monkeypatch.setattr(Rollouts, "_told", counted)
    prefer.run(drawing(steps=1, **({} if adapters is None else {"lora": adapters})), {"finetune": finetuned}, tmp_path)
    assert set(seen) == {models}


def test_answers_of_several_updates_are_kept_until_no_checkpoint_needs_them(source: Callable[..., Rollouts]) -> None:
    made = source(updates=3)
    order = [made.order(8 * step, 8, 0).tolist() for step in range(7)]
    assert order == [list(range(0, 8))] * 3 + [list(range(8, 16))] * 3 + [list(range(16, 24))]
    for step in range(4):
        batch = made.batch(made.order(8 * step, 8, 0))
    again = source(updates=3)
    other = again.batch(again.order(8 * 4, 8, 0))  # read, not drawn
    assert np.array_equal(other.ids, batch.ids)
    assert again.drawn.now is not None
    assert made.drawn.now is not None
    assert np.array_equal(again.drawn.now, made.drawn.now)
    assert again.drawn.facts == made.drawn.facts
    assert kept(made.out) == [0, 8]
    (made.out / "checkpoints" / "000000003").mkdir(parents=True)
    made.batch(made.order(8 * 6, 8, 0))
    assert kept(made.out) == [8, 16]


def kept(out: Path) -> list[int]:
    """The first samples of the batches whose answers are kept, each in a file with a record next to it."""
    paths = sorted((out / rollouts.FOLDER).iterdir())
    assert [path.suffix for path in paths] == [".json", ".npz"] * (len(paths) // 2)
    return [int(path.stem) for path in paths[::2]]


@pytest.mark.parametrize("place", [40, 300, 900, -60, -10])
def test_answers_that_were_damaged_are_not_learned_from(source: Callable[..., Rollouts], place: int) -> None:
    made = source(updates=3)
    for step in range(2):
        made.batch(made.order(8 * step, 8, 0))
    (file,) = (made.out / rollouts.FOLDER).glob("*.npz")
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    again = source(updates=3)
    with pytest.raises(RunError, match=r"damaged: .*0\.npz has another sha256\nRemove .*checkpoints to train from"):
        again.batch(again.order(8, 8, 0))


@pytest.mark.slow
def test_right_answers_are_learned_and_the_reward_rises(tmp_path: Path) -> None:
    """The model answers some digit, and every right one is 3."""
    start = guessing(tmp_path / "10-finetune-bbbbbbbb")
    asked_for = [(a, b, 3 - a - b) for a in range(4) for b in range(4 - a)] + [(a, 3 - a) for a in range(4)]
    rows = [{"question": f"What is {' plus '.join(map(str, terms))}?", "answer": "#### 3"} for terms in asked_for]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [{"kind": "files", "name": "a", "path": str(tmp_path / "a.jsonl")}]
    learning = {"optimizer": {"kind": "adamw", "learning_rate": 0.008}, "schedule": {"kind": "constant"}}
    config = drawing({"problems": problems, "kl_coef": 0.01}, steps=16, eval_every=16, val_fraction=0.3, **learning)
    stats = prefer.run(config, {"finetune": start}, tmp_path)
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "reward" in line]
    early, late = (sum(line["reward"] for line in some) / 4 for some in (lines[:4], lines[-4:]))
    assert late > early + 0.2
    assert {"kl", "clip_fraction", "answer_tokens", "ended", "reward_deviation"} <= lines[0].keys()
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 1e-4
    assert stats["before"]["validation_ended"] == 1.0
    checked = [
        line["validation_reward_drawn"]
        for line in read_metrics(tmp_path / "metrics.jsonl")
        if "validation_reward" in line
    ]
    assert all(0 <= reward <= 1 for reward in (*checked, stats["before"]["validation_reward_drawn"]))
    assert checked
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {"question", "right", "said", "is_right", "ended"} <= answers[0].keys()
    assert stats["data"]["kept"] == 14
    assert stats["data"]["val"]["questions"] > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"loss": {"updates": 2}}, id="twice"),
        pytest.param({"loss": {"updates": 2}, "lora": {"rank": 4}}, id="adapters"),
    ],
)
def test_a_run_that_was_killed_in_the_midst_of_its_updates_ends_in_the_same_bits(
    finetuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    config = drawing(given["loss"], dry_run=True, **{name: value for name, value in given.items() if name != "loss"})
    prefer.run(config, {"finetune": finetuned}, tmp_path / "whole")
    for step in (1, 3, 4):
        with monkeypatch.context() as patched:
            die_after(step, patched)
            with pytest.raises(KeyboardInterrupt):
                prefer.run(config, {"finetune": finetuned}, tmp_path / "killed")
    prefer.run(config, {"finetune": finetuned}, tmp_path / "killed")
    assert left(tmp_path / "killed") == left(tmp_path / "whole")
    lines = [line for line in left(tmp_path / "whole")["metrics"] if "clip_fraction" in line]
    assert lines[0]["clip_fraction"] == 0.0


def preferred(config: dict[str, Any], finetuned: str, out: str) -> None:
    """What a process of its own does."""
    prefer.run(build(Prefer, config), {"finetune": Path(finetuned)}, Path(out))


@pytest.mark.slow
def test_a_process_that_was_killed_goes_on_to_the_same_bits(finetuned: Path, tmp_path: Path) -> None:
    config = json.loads(json.dumps(plain(drawing({"updates": 2}, steps=8)), default=str))

    def start(out: Path) -> warm.Process:
        words = [config, str(finetuned), str(out)]
        return warm.start(f"{__name__}:preferred", words, os.environ | {"OMP_NUM_THREADS": "1"})

    assert start(tmp_path / "whole").wait() == 0
    process = start(tmp_path / "killed")
    while process.poll() is None and not (tmp_path / "killed" / "checkpoints" / f"{3:09d}").exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert start(tmp_path / "killed").wait() == 0
    assert left(tmp_path / "killed") == left(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_draw_the_answers_that_one_draws(finetuned: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        config = drawing({"updates": 2}, steps=4).model_copy(update={"num_processes": ranks})
        prefer.run(config, {"finetune": finetuned}, tmp_path / str(ranks))
        found.append([line for line in read_metrics(tmp_path / str(ranks) / "metrics.jsonl") if "reward" in line])
    for one, two in zip(*found, strict=True):
        for name in ("reward", "answer_tokens", "ended", "gradient_norm", "kl"):
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5), name


def test_questions_that_leave_no_room_are_rejected_with_their_line(tmp_path: Path) -> None:
    rows = [{"question": f"{'x ' * 60 * (n % 2)}{n}\u2028\x85?", "answer": f"#### {n}"} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss = Grpo.model_validate(
        {"problems": [{"kind": "files", "name": "a", "path": tmp_path / "a.jsonl"}], "max_new_tokens": 8}
    )
    stats = prefer.prepare_prompts(loss, 0.2, RENDERER, CONTEXT, tmp_path)
    assert (stats["kept"], stats["rejected_by_reason"]) == (20, {"too_long": 20})
    found = [one for split in ("train", "val") for one in prefer.questions(tmp_path, split, RENDERER)]
    assert sorted(int(one.right) for one in found) == list(range(0, 40, 2))
    assert json.loads((tmp_path / "rejected.jsonl").read_text().split("\n")[0])["place"].endswith("a.jsonl:2")
    assert set(prefer.texts(tmp_path)) < {row["question"] for row in rows}
    with pytest.raises(DataError, match="none of 40 questions is left"):
        prefer.prepare_prompts(loss, 0.0, RENDERER, CONTEXT, tmp_path / "none")
