"""Questions asked while a model trains."""

from pathlib import Path
from typing import Any

import pytest

from bloomery.core.errors import DataError
from bloomery.core.log import read_metrics
from bloomery.stages.config import Pretrain
from bloomery.stages.pretrain import evaluations
from tests.shards.test_choices import by_hand
from tests.tokenizer.made import small
from tests.train.made import SHAPE, session, write_samples


def recipe(**settings: Any) -> Pretrain:
    return Pretrain(steps=1, global_batch_tokens=16, model=SHAPE, **settings)


def test_a_run_asks_at_every_evaluation_also_at_one_that_it_died_in(tmp_path: Path) -> None:
    write_samples(tmp_path / "shards")
    file = tmp_path / "hellaswag_val.bin"
    file.write_bytes(by_hand())
    ask = evaluations(recipe(hellaswag=file), small())["hellaswag"]
    calls: list[int] = []

    def dying(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return ask(*args)

    run = session(tmp_path / "shards", tmp_path / "out", eval_every=4, main_log=True)
    run.evaluations = {"hellaswag": dying}
    with pytest.raises(KeyboardInterrupt):
        run.run()
    run = session(tmp_path / "shards", tmp_path / "out", eval_every=4, main_log=True)
    run.evaluations = {"hellaswag": dying}
    run.run()
    found = [line for line in read_metrics(tmp_path / "out" / "metrics.jsonl") if "hellaswag" in line]
    assert [line["step"] for line in found] == [4, 8, 9]
    assert all(line[name] in (0.0, 0.5, 1.0) for line in found for name in ("hellaswag", "hellaswag_per_token"))
    told = [line for line in (tmp_path / "out" / "main.log").read_text().splitlines() if "eval:" in line]
    assert told == [f"s:{line['step']} eval:{line['hellaswag_per_token']:.4f}" for line in found]


def test_a_file_of_another_kind_is_refused_before_training(tmp_path: Path) -> None:
    assert evaluations(recipe(), small()) == {}
    with pytest.raises(DataError, match="is missing"):
        evaluations(recipe(hellaswag=tmp_path / "none.bin"), small())
