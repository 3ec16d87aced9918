"""The stage `prefer` on pairs: its rows, that it learns, that it goes on, and that two ranks are one."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.core.chat import Message
from bloomery.core.errors import CheckpointError, ConfigError, DataError
from bloomery.core.log import read_metrics
from bloomery.data.chat.preferences import JudgedRow
from bloomery.data.readers.bytes import ReadError
from bloomery.shards import format
from bloomery.shards.loader import IGNORE, PackedDataset
from bloomery.stages import prefer
from bloomery.tokenizer.chat_template import TEMPLATES, Renderer
from bloomery.tokenizer.jinja_template import JinjaRenderer
from bloomery.train.preference.losses import CHOSEN, REJECTED
from bloomery.weights import hf
from tests.stages.made_prefer import CONTEXT, left, polite_pairs, settings, tuned
from tests.tokenizer.made import made_for, small
from tests.train.test_trainer import die_after


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("run") / "10-finetune-aaaaaaaa")


def pairs(folder: Path) -> list[dict[str, Any]]:
    return [{"kind": "files", "name": "polite", "path": str(polite_pairs(folder / "pairs.jsonl"))}]


@pytest.mark.slow
def test_pairs_are_learned_and_the_margin_of_held_out_ones_rises(finetuned: Path, tmp_path: Path) -> None:
    stats = prefer.run(settings(pairs=pairs(tmp_path), steps=20), {"finetune": finetuned}, tmp_path)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    first = next(line for line in lines if line["step"] == 1 and "loss" in line)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["margin"] == pytest.approx(0, abs=1e-6)
    assert stats["before"]["validation_margin"] == pytest.approx(0, abs=1e-4)
    last = [line for line in lines if "validation_margin" in line][-1]
    assert last["validation_accuracy"] == 1.0
    assert last["validation_margin"] > 0.5
    assert last["validation_loss"] < 0.5
    assert not [line for line in lines if "bits_per_byte" in line or "validation_bits_per_byte" in line]
    assert stats["data"]["kept"] == 120
    loaded = hf.load(tmp_path / "model")
    assert loaded.lineage.template == TEMPLATES["bloomery"].hash


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"loss": {"kind": "ipo"}}, marks=pytest.mark.slow),
        pytest.param({"loss": {"kind": "simpo"}}, marks=pytest.mark.slow),
        {"lora": {"rank": 4, "base_dtype": "nf4"}, "optimizer": {"kind": "adamw", "learning_rate": 0.03}},
    ],
    ids=["ipo", "simpo", "adapters"],
)
def test_every_loss_and_adapters_too_move_the_margin(finetuned: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    stats = prefer.run(settings(pairs=pairs(tmp_path), steps=8, **given), {"finetune": finetuned}, tmp_path)
    last = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "validation_margin" in line][-1]
    assert last["validation_margin"] > stats["before"]["validation_margin"] + 0.02
    hf.load(tmp_path / "model")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="dpo"),
        pytest.param({"lora": {"rank": 4}}, id="adapters", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_ends_in_the_same_bits(
    finetuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    config = settings(pairs=pairs(tmp_path), **given)
    prefer.run(config, {"finetune": finetuned}, tmp_path / "whole")
    with monkeypatch.context() as patched:
        die_after(4, patched)
        with pytest.raises(KeyboardInterrupt):
            prefer.run(config, {"finetune": finetuned}, tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "000000004")
    prefer.run(config, {"finetune": finetuned}, tmp_path / "killed")
    whole, killed = left(tmp_path / "whole"), left(tmp_path / "killed")
    if "lora" in given:  # where the base lies is told from each folder
        assert whole["model"].pop("bloomery.json") == killed["model"].pop("bloomery.json")
    assert killed == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("rows/train.reference.npy", 50),
        ("rows/val.reference.npy", 50),
        ("rows/train.kinds.npy", 5),
        ("rows/train-00000.mask", 50),
        ("rejected.jsonl", 1),
        ("before.json", 0),
    ],
)
def test_what_a_killed_run_left_is_made_again_where_it_was_damaged(
    finetuned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    step: int,
) -> None:
    (tmp_path / "pairs.jsonl").write_text(polite_pairs(tmp_path / "more.jsonl").read_text() + "{}\n")
    source = {"kind": "files", "name": "polite", "path": str(tmp_path / "pairs.jsonl")}
    config = settings(pairs=[source], steps=2)
    out = tmp_path / "killed"
    with monkeypatch.context() as patched:
        die_after(1, patched)
        with pytest.raises(KeyboardInterrupt):
            prefer.run(config, {"finetune": finetuned}, out)
    before = (out / name).read_bytes()
    data = bytearray(before)
    if step:
        for place in range(len(data) - 1, min(130, len(data) // 2), -step):
            data[place] ^= 1
    else:
        data[:] = b'{"a": {"b": [1]}}'
    (out / name).write_bytes(data)
    capsys.readouterr()
    stats = prefer.run(config, {"finetune": finetuned}, out)
    assert (out / name).read_bytes() == before
    assert name in (said := " ".join(capsys.readouterr().err.split()).replace(" ", "")), said
    assert "runsagain,because" in said
    assert set(stats["before"]) >= {"validation_loss", "validation_margin"}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_learn_what_one_learns(finetuned: Path, tmp_path: Path) -> None:
    config = settings(pairs=pairs(tmp_path), steps=3)
    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        prefer.run(config.model_copy(update={"num_processes": ranks}), {"finetune": finetuned}, out)
        found.append(read_metrics(out / "metrics.jsonl"))
    for one, two in zip(*([line for line in lines if "margin" in line] for lines in found), strict=True):
        for name in ("loss", "margin", "accuracy", "gradient_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5)


def test_a_split_without_a_pair_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is left for the split val"):
        prefer.prepare(settings(pairs=pairs(tmp_path), val_fraction=1e-9), Renderer(small()), CONTEXT, tmp_path)


def test_sequences_are_rendered_conversations_cut_at_turns_where_they_are_too_long(tmp_path: Path) -> None:
    renderer = Renderer(small())
    old = [{"role": "user", "content": "Tell me a long story about a lamp, please, now."},
           {"role": "assistant", "content": "There was a lamp. It was in the kitchen. That is all."}]  # fmt: skip
    system = {"role": "system", "content": "Be brief."}
    last = {"role": "user", "content": "2 plus 2?"}
    rows = [
        {"prompt": [system, *old, last], "chosen": "4", "rejected": "5"},
        {"prompt": [last], "chosen": "4", "rejected": "6"},
        {"prompt": "x" * 400, "chosen": "4", "rejected": "6"},
        {"prompt": [last], "chosen": "4", "rejected": "4"},
        {"prompt": [last], "completion": "4", "label": True},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "files", "name": "a", "path": str(tmp_path / "a.jsonl")}
    worlds = {"kind": "worlds", "count": 60}
    stats = prefer.prepare(settings(pairs=[source, worlds]), renderer, CONTEXT, tmp_path)
    assert stats["rejected_by_reason"]["unknown_shape"] == 1
    assert stats["rejected_by_reason"]["same_answer"] == 1
    assert stats["rejected_by_reason"]["too_long"] >= 1
    assert stats["cut_at_a_turn"] >= 1
    rejected = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [one["place"] for one in rejected if one["source"] == "a"] == [f"{tmp_path}/a.jsonl:{n}" for n in (3, 4, 5)]
    found = dict[str, list[str]]()
    for split in prefer.SPLITS:
        samples = PackedDataset(tmp_path / "rows", split, 2 * CONTEXT, small().hash)
        kinds = prefer.kinds_of(tmp_path, split)
        batch = samples.batch(np.arange(samples.num_samples))
        assert int(batch.positions.max()) < CONTEXT
        for row, numbers in enumerate(kinds):
            for number, kind in enumerate(numbers):
                inside = batch.segments[row] == number + 1
                learned = batch.targets[row][inside]
                text = small().decode(learned[learned != IGNORE][:-1].tolist())
                if kind:
                    assert learned[learned != IGNORE][-1] == renderer.end_id
                    found.setdefault(small().decode(batch.ids[row][inside].tolist()), []).append(f"{kind} {text}")
                else:
                    assert (learned == IGNORE).all()
    cut: list[Message] = [system, last]  # type: ignore[list-item]
    wanted = renderer.render([*cut, {"role": "assistant", "content": "4"}])
    assert found[small().decode(wanted.ids)] == [f"{CHOSEN} 4"]
    kinds = np.concatenate([prefer.kinds_of(tmp_path, split).ravel() for split in prefer.SPLITS])
    assert (kinds == CHOSEN).sum() == (kinds == REJECTED).sum() == stats["kept"]


@pytest.mark.parametrize("quiet", ["chosen", "rejected"])
def test_a_pair_of_which_one_answer_is_not_in_the_loss_is_refused(quiet: str) -> None:
    asked = Message(role="user", content="Why?")
    said = {name: [Message(role="assistant", content=name, train=name != quiet)] for name in ("chosen", "rejected")}
    row = JudgedRow([asked], said["chosen"], said["rejected"], "pairs", "f:1")
    found = prefer.fit(Renderer(small()), row, CONTEXT)
    assert isinstance(found, ReadError)
    assert found.reason == "nothing_to_learn"


THINKS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
    "<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>Now I think about it.{% endif %}"
)


def test_a_prompt_that_is_longer_than_what_is_trained_takes_nothing_from_the_answers() -> None:
    """Templates of models that think open a thought where the assistant is to speak, and nowhere else."""
    renderer = JinjaRenderer(small(), THINKS, {"eos_token": "<|end|>"})
    said = [
        Message(role="user", content="Is it?"),
        Message(role="assistant", content="No."),
        Message(role="user", content="And now?"),
    ]
    answers = [[Message(role="assistant", content=text)] for text in ("Now it is red.", "Now it is blue.")]
    found = prefer.fit(renderer, JudgedRow(said, answers[0], answers[1], "pairs", "f:1"), 200)
    assert not isinstance(found, ReadError)
    looked_at = [small().decode(one.ids[one.mask > 0].tolist()) for one in found[0]]
    assert [text.removesuffix("<|end|>") for text in looked_at] == ["Now it is red.", "Now it is blue."]


def test_rows_have_the_length_that_the_recipe_says(tmp_path: Path) -> None:
    config = settings(pairs=[{"kind": "worlds", "count": 50}], sequence_length=60)
    assert (config.answer_tokens(40_960), config.row_tokens(40_960)) == (60, 120)
    assert settings(pairs=[{"kind": "worlds"}]).row_tokens(40_960) == 2 * 1024
    prefer.prepare(config, Renderer(small()), config.answer_tokens(40_960), tmp_path)
    assert PackedDataset(tmp_path / "rows", "train", 120, small().hash).num_samples > 0


def test_a_row_longer_than_the_context_is_refused(finetuned: Path, tmp_path: Path) -> None:
    config = settings(pairs=pairs(tmp_path), sequence_length=CONTEXT + 1)
    with pytest.raises(ConfigError, match=f"more than the model's context of {CONTEXT}"):
        prefer.run(config, {"finetune": finetuned}, tmp_path)


def test_other_templates_and_their_rows_are_written_by_the_same_renderer(tmp_path: Path) -> None:
    renderer = Renderer(made_for("chatml"), TEMPLATES["chatml"])
    config = settings(pairs=[{"kind": "worlds", "count": 50}])
    stats = prefer.prepare(config, renderer, 120, tmp_path)
    assert stats["kept"] == 50
    assert format.read(tmp_path / "rows" / "train-00000").index["template_name"] == "chatml"


def test_checkpoints_of_other_pairs_are_refused(
    finetuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        die_after(2, patched)
        with pytest.raises(KeyboardInterrupt):
            prefer.run(settings(pairs=pairs(tmp_path)), {"finetune": finetuned}, tmp_path)
    shutil.rmtree(tmp_path / "rows")
    other = [{"kind": "worlds", "count": 60}]
    with pytest.raises(CheckpointError, match="was made with shards"):
        prefer.run(settings(pairs=other), {"finetune": finetuned}, tmp_path)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "needs pairs"),
        ({"pairs": [{"kind": "worlds"}], "lora": {"dropout": 0.1}}, "adds noise to probabilities"),
        ({"pairs": [{"kind": "worlds"}], "z_loss": 1e-4}, "this loss does not use"),
        ({"pairs": [{"kind": "worlds"}, {"kind": "worlds"}]}, "two sources have the name"),
        ({"loss": {"kind": "grpo"}}, "problems"),
        (
            {"loss": {"kind": "grpo", "problems": [{"kind": "arithmetic"}]}, "pairs": [{"kind": "worlds"}]},
            "pairs are for other losses",
        ),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_runs(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        settings(**given)
