from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.core.errors import ConfigError, HardwareError
from bloomery.hw import distributed, launcher
from bloomery.hw.distributed import RankLostError, World
from bloomery.train import launch

import torch
import torch.distributed as dist


def test_one_process_alone_sends_nothing_and_waits_for_nobody() -> None:
    world = World.alone()
    tensor = torch.tensor([1.5, 2.0])
    assert world.sum(tensor) is tensor
    assert tensor.tolist() == [1.5, 2.0]
    world.barrier()
    assert (world.rank, world.size, world.is_first) == (0, 1, True)
    assert (world.any(True), world.any(False)) == (True, False)
    assert world.broadcast({"a": 1}) == {"a": 1}
    assert world.gather({"a": 1}) == [{"a": 1}]
    with distributed.joined() as joined:
        assert joined == world


def test_a_rank_is_what_the_launcher_says() -> None:
    assert distributed.launched_world({}) is None
    assert distributed.launched_world({"RANK": "2", "WORLD_SIZE": "3"}) == World(2, 3)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9{40}'"),
        ({"WORLD_SIZE": "3"}, "RANK is not set"),
        ({"WORLD_SIZE": "3", "RANK": "3"}, "RANK='3', but must be an integer from 0 to 2"),
        ({"WORLD_SIZE": "3", "RANK": "one"}, "RANK='one'"),
        ({"WORLD_SIZE": "3", "RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "3", "RANK": "1", "LOCAL_RANK": "2"}, "LOCAL_RANK='2'"),
        ({"WORLD_SIZE": "3", "RANK": "1", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE='4'"),
    ],
)
def test_a_variable_that_names_no_rank_is_refused_by_its_name(env: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"environment: {name}.*\n.*torchrun"):
        distributed.launched_world(env)


@pytest.mark.parametrize(
    "env", [{}, {"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}]
)
def test_ranks_without_a_place_to_meet_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"MASTER_(ADDR|PORT).*\n.*torchrun"):
        launcher.address(env)


def words(task: dict[str, Any], world: World) -> dict[str, Any]:
    """Each thing that ranks can say to each other, once."""
    mine = torch.arange(5.0) * (world.rank + 1)
    world.barrier()
    long = {"text": "é" * (1000 * world.rank), "rank": world.rank}
    return {
        "sum": world.sum(mine).tolist(),
        "counts": world.sum(torch.tensor([world.rank + 1])).tolist(),
        "any": [world.any(world.rank == 1), world.any(False)],
        "broadcast": world.broadcast({"task": task, "from": world.rank}),
        "gather": [one["rank"] * len(one["text"]) for one in world.gather(long)],
        "size": world.size,
    }


@pytest.mark.slow
def test_what_one_rank_says_the_others_hear() -> None:
    assert launch.run("tests.hw.test_distributed:words", {"what": "ü"}, ranks=3) == {
        "sum": [0.0, 6.0, 12.0, 18.0, 24.0],
        "counts": [6],
        "any": [True, False],
        "broadcast": {"task": {"what": "ü"}, "from": 0},
        "gather": [0, 1000, 4000],
        "size": 3,
    }


class Several(World):
    """Two ranks, of which the other says what it is asked to."""

    other = ""

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_may_each_see_another_gpu_as_their_only_one_but_not_the_same(
    monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    """As srun --gpus-per-task shows them, where counting would refuse."""
    facts = SimpleNamespace(uuid="GPU-1", pci_bus_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: facts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    world = Several(0, 2)
    monkeypatch.setattr(Several, "other", "node GPU-1 3" if alike else "node GPU-2 4")
    if alike:
        with pytest.raises(HardwareError, match="ranks 0 and 1 have the same GPU"):
            distributed.check_devices(world, torch.device("cuda", 0))
    else:
        distributed.check_devices(world, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("text", "collective"),
    [
        ("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5", "all-gather"),
        ("NCCL error in: nccl.cpp:1, unhandled system error", "all-gather"),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_a_broken_exchange_of_torch_is_a_lost_rank_by_the_name_of_its_collective(
    text: str, collective: str | None
) -> None:
    def foreach_all_gather() -> None:
        raise RuntimeError(text)

    kind, told = (RuntimeError, text) if collective is None else (RankLostError, rf"\({collective}: ")
    with pytest.raises(kind, match=told), distributed.exchanging("weights"):
        foreach_all_gather()


def test_the_exchange_between_gpus_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits for a rank that is gone cannot be interrupted; on the CPU, ranks wait for evaluations."""
    limits: dict[str, timedelta] = {}

    class Group:
        def _get_backend(self, place: torch.device) -> Any:
            return SimpleNamespace(_set_default_timeout=lambda limit: limits.__setitem__(place.type, limit))

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", Group)
    monkeypatch.setattr(distributed, "_backends", lambda: {"cpu": "gloo"})
    distributed._limit_gpus()
    assert limits == {}
    monkeypatch.setattr(distributed, "_backends", lambda: {"cpu": "gloo", "cuda": "nccl"})
    distributed._limit_gpus()
    assert limits == {"cuda": timedelta(minutes=10)}
    assert distributed.SILENCE > 6 * distributed.GPU_SILENCE
