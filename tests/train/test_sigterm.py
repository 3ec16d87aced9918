"""A training process that gets SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bloomery.core.log import read_metrics
from bloomery.shards.loader import PackedDataset
from bloomery.weights import checkpoint
from tests.train.made import session

GRACE_SECONDS = 30
RUN = """
import sys
from pathlib import Path
from tests.train.made import session
settings = {"steps": int(sys.argv[3]), "save_every_seconds": 1e9, "evaluate_every": 10**9}
session(Path(sys.argv[1]), Path(sys.argv[2]), **settings).run()
"""


@pytest.mark.slow
def test_sigterm_saves_the_newest_step_and_exits_with_143(shards: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(shards), str(tmp_path / "killed")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "1000000"], stderr=subprocess.DEVNULL, env=env)
    try:
        metrics = tmp_path / "killed" / "metrics.jsonl"
        end = time.monotonic() + 180
        while len(read_metrics(metrics)) < 5:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=GRACE_SECONDS) == 143
    finally:
        process.kill()
    saved = checkpoint.newest(tmp_path / "killed" / "checkpoints")
    assert saved is not None
    last = read_metrics(metrics)[-1]["step"]
    assert saved.state["step"] == last
    assert f"asked to stop after step {last}" in (tmp_path / "killed" / "log.txt").read_text()


def test_sigterm_in_the_midst_of_an_evaluation_leaves_the_step_saved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = session(shards, tmp_path / "killed", save_every_seconds=1e9, evaluate_every=4)
    whole, seen = PackedDataset.batch, list[int]()

    def batch(self: object, numbers: object) -> object:
        seen.append(1)
        if run.validation is self and (tmp_path / "killed" / "checkpoints" / "000000004").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, numbers)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedDataset, "batch", batch)
    with pytest.raises(SystemExit) as caught:
        run.run()
    assert caught.value.code == 143
    assert sorted(folder.name for folder in (tmp_path / "killed" / "checkpoints").iterdir()) == [
        "000000000",
        "000000004",
    ]
    assert not [line for line in read_metrics(tmp_path / "killed" / "metrics.jsonl") if "validation_loss" in line]
