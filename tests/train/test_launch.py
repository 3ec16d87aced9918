import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.core.errors import DataError, RunError
from bloomery.core.signals import StopRequest, Terminated
from bloomery.hw import distributed, launcher
from bloomery.hw.distributed import World
from bloomery.model.config import Lora
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Batch
from bloomery.train import launch
from bloomery.train.precision import Precision
from bloomery.train.step import CausalLMLoss, LossSums
from bloomery.weights.opened import ADAPTER_CONFIG
from tests import warm
from tests.model.made import SHAPES
from tests.train.made import lines, newest_state, session, wait_for_steps
from tests.weights.test_peft import adapted

ROOT = Path(__file__).parents[2]


def act(task: dict[str, Any], world: World) -> dict[str, Any]:
    """Do on rank 1 what the task says, while the others wait for it."""
    (Path(task["folder"]) / f"{world.rank}.pid").write_text(str(os.getpid()))
    world.barrier()
    if world.rank == 1 and task["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1 and task["do"] == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if world.rank == 1 and task["do"] == "lag":
        time.sleep(60)
    if world.rank == 1 and task["do"] == "refuse":
        raise DataError("is bad", where="shard 7", hint="Get another.")
    if world.rank == 1 and task["do"] == "crash":
        raise ZeroDivisionError
    if task["do"] == "wait":
        time.sleep(60)
    if task["do"] == "stop":
        time.sleep(0 if world.rank else 2)
        raise Terminated
    world.barrier()
    if world.rank == 1 and task["do"] == "freeze at the end":
        os.kill(os.getpid(), signal.SIGSTOP)
    return {"size": world.size}


def test_every_model_below_adapters_is_copied_under_the_path_that_they_name(tmp_path: Path) -> None:
    """Links in the path of the runs stay: another machine has others."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    runs = tmp_path / "runs"
    _, first = adapted(runs, SHAPES[0], Lora(rank=2))
    shutil.copytree(first, runs / "2" / "model")
    (runs / "2" / "model" / "bloomery.json").unlink()
    facts = json.loads((first / ADAPTER_CONFIG).read_text()) | {"base_model_name_or_path": "../../adapters"}
    (runs / "2" / "model" / ADAPTER_CONFIG).write_text(json.dumps(facts))
    assert list(launch._bases(runs / "2")) == [runs / "adapters", runs / "base"]
    assert list(launch._bases(runs / "base")) == []


def ranks_left(folder: Path) -> list[int]:
    """The ranks' processes that are still there, a moment later."""
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(("size", "wanted", "expected"), [(None, 1, 1), (None, 3, 3), ("1", 3, 3), ("4", 1, 4)])
def test_as_many_processes_train_as_a_launcher_has_started_or_else_as_wanted(
    size: str | None, wanted: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("RANK", "0")
    assert launcher.num_processes(wanted) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "kind", "told"),
    [
        ("die", RunError, r"rank 1 \(process \d+\) was ended by SIGKILL; the other ranks were stopped\n.*checkpoint"),
        ("refuse", DataError, r"^shard 7: is bad\nGet another\.$"),
        ("crash", RunError, r"rank 1 \(process \d+\) ended with exit code 1; the other ranks were stopped"),
    ],
)
def test_a_rank_that_ends_is_named_and_takes_the_others_with_it(
    tmp_path: Path, do: str, kind: type[Exception], told: str
) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=told):
        launch.run("tests.train.test_launch:act", {"do": do, "folder": str(tmp_path)}, ranks=2)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert ranks_left(tmp_path) == []
    assert time.monotonic() - began < 200


@pytest.mark.slow
def test_a_rank_that_freezes_when_the_work_is_done_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 2.0)
    task = {"do": "freeze at the end", "folder": str(tmp_path)}
    assert launch.run("tests.train.test_launch:act", task, ranks=2) == {"size": 2}
    assert ranks_left(tmp_path) == []


@pytest.mark.slow
def test_a_frozen_rank_is_named_with_its_collective_and_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes no connection, so that the others would wait for it within torch."""
    monkeypatch.setenv("BLOOMERY_RANK_SECONDS", "10")
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    told = r"rank 0, in sum: rank 1 \(.*, process \d+, (?:after collective|within start) \d+\) "
    told += r"did not respond for 10 s\n.*resumes"
    with pytest.raises(RunError, match=told):
        launch.run("tests.train.test_launch:act", {"do": "freeze", "folder": str(tmp_path)}, ranks=2)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert ranks_left(tmp_path) == []


def be_slow_to_read() -> None:
    """A rank of srun. The second takes a second to read each message of the first, which has nothing to do."""
    if os.environ["RANK"] == "1":
        store = distributed._store()

        def get(key: str) -> bytes:
            time.sleep(1)
            read: bytes = store.get(key)
            return read

        slow = SimpleNamespace(wait=store.wait, set=store.set, get=get)
        distributed._store = lambda: slow  # type: ignore[assignment]
    launch.by_first_process(lambda: None)


@pytest.mark.slow
def test_the_first_rank_ends_when_the_others_have_read_its_last_message() -> None:
    """Its process holds the store, unless torchrun does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    started = [
        warm.start("tests.train.test_launch:be_slow_to_read", [], {**env, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    assert [process.wait(timeout=60) for process in started] == [0, 0]


class Broken(CausalLMLoss):
    """A device that now and then computes what is no number."""

    calls = 0

    def losses(self, model: Transformer, micro_batch: Batch, precision: Precision, scale: float = 1.0) -> LossSums:
        sums = super().losses(model, micro_batch, precision, scale)
        Broken.calls += 1
        return LossSums(*(one * math.nan for one in sums[:2])) if Broken.calls == 3 else sums


def broken(task: dict[str, Any], world: World) -> dict[str, Any]:
    made = session(Path(task["shards"]), Path(task["out"]), world)
    made.loss_function = Broken() if world.rank == 1 else CausalLMLoss()
    return made.run()


@pytest.mark.slow
def test_a_rank_that_computes_no_number_is_named_and_its_step_changes_no_weight(shards: Path, tmp_path: Path) -> None:
    done = launch.run("tests.train.test_launch:broken", {"shards": str(shards), "out": str(tmp_path / "out")}, 2)
    skipped = [line["skipped"] for line in lines(tmp_path / "out", "skipped")]
    assert skipped == ["the loss is nan, from rank 1 of 2"]
    assert (done["steps"], done["skipped_steps"]) == (9, 1)


@pytest.mark.slow
def test_the_first_rank_is_waited_for_when_others_have_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have nothing to save."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    with pytest.raises(Terminated) as caught:
        launch.run("tests.train.test_launch:act", {"do": "stop", "folder": str(tmp_path)}, ranks=2)
    assert caught.value.code == 143
    assert ranks_left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ranks_do_not_outlive_the_process_that_started_them(tmp_path: Path) -> None:
    task = {"do": "wait", "folder": str(tmp_path)}
    code = f"from bloomery.train import launch; launch.run('tests.train.test_launch:act', {task}, 2)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.kill()
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert ranks_left(tmp_path) == []


TRAIN = """
import json, sys
from bloomery.train import launch
launch.run("tests.train.made:trained", json.loads(sys.argv[1]), 2)
"""


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("to", "number", "code", "more"),
    [
        ("all", signal.SIGTERM, 143, {"optimizer": {"kind": "adamw"}}),
        ("parent", signal.SIGINT, 130, {"optimizer": {"kind": "adamw"}}),
        ("parent", signal.SIGTERM, 143, {"parallelism": "fsdp"}),
    ],
)
def test_ranks_that_are_asked_to_stop_stop_after_the_same_step_which_is_saved(
    shards: Path, tmp_path: Path, to: str, number: int, code: int, more: dict[str, Any]
) -> None:
    """However many are asked, and however often: managers signal a whole group, and the parent hands it on."""
    settings = {"steps": 100_000, "save_every_seconds": 1e6, "eval_every": 10**6, **more}
    task = {"shards": str(shards), "out": str(tmp_path / "out"), "settings": settings}
    parent = warm.python(["-c", TRAIN, json.dumps(task)], os.environ)
    wait_for_steps(tmp_path / "out")
    for pid in [*(children(parent.pid) if to == "all" else []), parent.pid]:
        os.kill(pid, number)
    assert parent.wait(timeout=60) == code
    assert newest_state(tmp_path / "out")["step"] == lines(tmp_path / "out")[-1]["step"] >= 5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ranks_that_are_asked_to_stop_while_they_start_are_no_failure(shards: Path, tmp_path: Path) -> None:
    task = {"shards": str(shards), "out": str(tmp_path / "out"), "settings": {}}
    parent = warm.python(["-c", TRAIN, json.dumps(task)], os.environ)
    deadline = time.monotonic() + 120
    while len(children(parent.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    parent.terminate()
    assert parent.wait(timeout=60) == 143


def test_a_rank_that_waits_for_one_that_was_stopped_before_it_started_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 100.0)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(100)"
    starts = "import time; print(flush=True); time.sleep(100)"
    commands = [[sys.executable, "-c", code] for code in (deaf, starts)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline()
        stop = StopRequest()
        stop.asked, stop.saves = True, True
        with pytest.raises(Terminated):
            launch._watch(processes, tmp_path, stop)
        assert processes[0].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_rank_that_the_others_gave_up_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library for GPUs aborts the ranks that wait, and the cause is the rank that runs on."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    waits, aborts = "import time; time.sleep(60)", "import os; os.abort()"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in (aborts, waits, aborts)]
    try:
        with pytest.raises(RunError, match=rf"^rank 1 \(process {processes[1].pid}\) stopped responding"):
            launch._watch(processes, tmp_path, StopRequest())
    finally:
        for process in processes:
            process.kill()
            process.wait()
