"""Parts: the same bytes from any number of workers, after any death, and names for what died."""

import importlib
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bloomery.core import io as core_io
from bloomery.core.errors import DataError, RunError
from bloomery.data.executor import ExecutorConfig, Part, _paths, run_parts
from tests.data.made_parts import Trouble, double

PARTS = [Part(f"part-{number:05d}", number, num_bytes=number) for number in range(9)]
ONE, THREE = ExecutorConfig(workers=1), ExecutorConfig(workers=3)


def run(out: Path, engine: ExecutorConfig = ONE, config: Trouble | None = None) -> list[int]:
    return [record["number"] for record in run_parts(engine, double, config or Trouble(), PARTS, out, what="double")]


def content(out: Path) -> dict[str, str]:
    return {name: facts["sha256"] for name, facts in core_io.listing(out).items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("expected")
    assert run(out) == list(range(9))
    found = content(out)
    assert len(found) == 3 * len(PARTS)
    return found


def test_workers_leave_what_one_process_leaves(tmp_path: Path, expected: dict[str, str]) -> None:
    assert run(tmp_path, THREE) == list(range(9))
    assert content(tmp_path) == expected


def work_in_a_cluster(out: Path) -> None:
    """It is started once: the first work does not end what it has started, and the second finds it there."""
    ray: Any = importlib.import_module("ray")
    cluster = ExecutorConfig(kind="ray", workers=2)
    with mock.patch.object(ray, "shutdown") as ends:
        with pytest.raises(DataError, match="row of part-00004") as caught:
            run(out / "b", cluster, Trouble(part="part-00004", what="data"))
        assert caught.value.hint == "Mend it."
        assert run(out / "a", cluster) == list(range(9))
        assert ends.call_count == 1
    ray.shutdown()
    assert run(out / "b", ONE) == list(range(9))


@pytest.mark.slow
def test_a_cluster_leaves_what_one_process_leaves(tmp_path: Path, expected: dict[str, str]) -> None:
    """In a process of its own, so that nothing of Ray is left in the one that runs the tests."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    process = multiprocessing.get_context("spawn").Process(target=work_in_a_cluster, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert content(tmp_path / "a") == expected
    assert content(tmp_path / "b") == expected


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for engine in (ONE, THREE):
        run(tmp_path / "out", engine, Trouble(log=log))
    assert len(log.read_text().splitlines()) == len(PARTS)


def test_a_part_whose_file_is_gone_or_short_is_done_again_and_no_other(
    tmp_path: Path, expected: dict[str, str]
) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    run(out)
    (out / "doubled" / "part-00003.txt").unlink()
    (out / "squared" / "part-00008.txt").write_text("")
    run(out, ONE, Trouble(log=log))
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["part-00003", "part-00008"]
    assert content(out) == expected


@pytest.mark.parametrize("engine", [ONE, THREE])
def test_a_part_whose_file_was_damaged_and_kept_its_size_is_done_again_and_no_other(
    tmp_path: Path, expected: dict[str, str], capsys: pytest.CaptureFixture[str], engine: ExecutorConfig
) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    run(out, engine)
    damaged = out / "squared" / "part-00008.txt"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    run(out, engine, Trouble(log=log))
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["part-00008"]
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"part-00008 runs again, because \S*squared/part-00008.txt has another sha256", said)
    assert content(out) == expected


def test_a_part_whose_record_is_of_an_older_version_is_done_again(tmp_path: Path, expected: dict[str, str]) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    run(out)
    (place,) = (out / "parts").rglob("part-00003.json")
    whole = core_io.read_json(place)
    record = whole["record"]
    hashed = core_io.sha256_bytes(core_io.canonical(record))
    core_io.write_json(place, {"record": record, "sha256": hashed, "bytes": {"doubled/part-00003.txt": 2}})
    run(out, ONE, Trouble(log=log))
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["part-00003"]
    assert content(out) == expected


@pytest.mark.parametrize("changed", [{"files": []}, {}, {"files": ["doubled/part-00003.txt"], "sum": [""]}])
def test_a_part_whose_record_was_changed_is_done_again_and_no_other(
    tmp_path: Path, expected: dict[str, str], capsys: pytest.CaptureFixture[str], changed: dict[str, Any]
) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    run(out)
    (place,) = (out / "parts").rglob("part-00003.json")
    core_io.write_json(place, core_io.read_json(place) | {"record": changed})
    run(out, ONE, Trouble(log=log))
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["part-00003"]
    assert "part-00003 runs again, because its record was changed" in " ".join(capsys.readouterr().err.split())
    assert content(out) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("what", "said"), [("killed", "killed by signal 9"), ("left", "ended with code 3")])
def test_a_worker_that_dies_names_its_part_and_the_rest_goes_on_next_time(
    tmp_path: Path, expected: dict[str, str], what: str, said: str
) -> None:
    with pytest.raises(RunError, match=f"part-00004 .*{said}"):
        run(tmp_path, THREE, Trouble(part="part-00004", what=what))
    assert run(tmp_path, THREE) == list(range(9))
    assert content(tmp_path) == expected


def test_a_worker_that_a_library_ends_is_no_lack_of_memory_and_its_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="part-00004 was killed by signal 6") as caught:
        run(tmp_path, THREE, Trouble(part="part-00004", what="aborted"))
    assert "a library cannot read its input" in caught.value.hint
    assert "memory" not in caught.value.hint
    members = [(f"{n}.parquet", f"/in/{n}.parquet") for n in range(9)]
    given = {"source": 0, "piece": "0.parquet", "members": members, "max_bytes": None}
    assert _paths(given) == ["/in/0.parquet", "/in/1.parquet", "/in/2.parquet"]
    assert _paths(Path("/in/a.jsonl")) == ["/in/a.jsonl"]


@pytest.mark.parametrize("engine", [ONE, THREE], ids=["here", "workers"])
def test_an_error_of_the_data_comes_out_as_it_is(tmp_path: Path, engine: ExecutorConfig) -> None:
    with pytest.raises(DataError, match="is no good") as caught:
        run(tmp_path, engine, Trouble(part="part-00002", what="data"))
    assert (caught.value.where, caught.value.hint) == ("row of part-00002", "Mend it.")


def test_a_fault_in_a_worker_comes_out_with_its_part_and_on_stderr_with_its_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="part-00002: "):
        run(tmp_path, THREE, Trouble(part="part-00002", what="fault"))
    assert re.search(r"made_parts\.py(.|\n)*ZeroDivisionError: a fault", capfd.readouterr().err)


def test_an_address_needs_a_cluster() -> None:
    with pytest.raises(ValueError, match="is for a Ray cluster"):
        ExecutorConfig(address="auto")


def work_slowly(out: Path, log: Path) -> None:
    run(out, ExecutorConfig(workers=2), Trouble(log=log, seconds=0.03))


@pytest.mark.slow
def test_killed_at_any_moment_the_next_run_leaves_the_same_and_no_worker_outlives_its_parent(
    tmp_path: Path, expected: dict[str, str]
) -> None:
    log, moments = tmp_path / "log", random.Random(0)
    for _ in range(4):
        parent = multiprocessing.get_context("spawn").Process(target=work_slowly, args=(tmp_path / "out", log))
        parent.start()
        before = len(_lines(log))
        while len(_lines(log)) == before and parent.is_alive():
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.05))
        assert parent.pid is not None
        os.kill(parent.pid, signal.SIGKILL)
        parent.join()
        for worker in {int(line.split()[1]) for line in _lines(log)}:
            assert _ends(worker), worker
    run(tmp_path / "out", THREE)
    assert content(tmp_path / "out") == expected


def _lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def _ends(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(_running(pid)):
            return True
        time.sleep(0.02)
    return False


def _running(pid: int) -> Iterator[bool]:
    """Whether there is such a process that is no zombie."""
    try:
        yield "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return
