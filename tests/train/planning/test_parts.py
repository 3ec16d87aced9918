"""What the arithmetic says of a rank that holds a part, against two ranks that do."""

from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.hw.dist import World
from bloomery.train import launch, parallel
from bloomery.train.config import Training
from bloomery.train.planning.needs import Trained, Way, needs
from tests.train.made import SHAPE, session


def held(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session that tells how many bytes of weights and of the optimizer's numbers each rank holds."""
    made = session(Path(task["shards"]), Path(task["out"]), world, **task["settings"])
    made.run()
    kept = made._checkpoints.optimizers.state()
    groups = list(made.model.parameters()), [kept[name] for name in kept if not name.endswith("/step")]
    own = [sum(parallel.local(one).nbytes for one in tensors) for tensors in groups]
    return {"held": world.gather(own), "vocab_size": made.model.vocab_size}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_rank_with_a_part_holds_what_the_arithmetic_says(kind: str, shards: Path, tmp_path: Path) -> None:
    settings = {"optimizer": {"kind": kind}, "shard": "fsdp"}
    task = {"shards": str(shards), "out": str(tmp_path / "out"), "settings": settings}
    found = launch.run("tests.train.planning.test_parts:held", task, 2)
    optimizer = build(Training, {"steps": 1, "tokens_per_step": 1, "optimizer": {"kind": kind}}).optimizer
    what = Trained(model=SHAPE, vocab_size=found["vocab_size"], optimizer=optimizer)
    needed = needs(what, Way(rows=1, sharded=True, devices=2))
    for weights, remembered in found["held"]:
        assert weights == pytest.approx(needed.weights, rel=0.02)
        assert remembered == pytest.approx(needed.optimizer, rel=0.02)
