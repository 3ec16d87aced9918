import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bloomery import cli
from bloomery.core.errors import ConfigError, DataError, RunError
from bloomery.hw import hosts, launcher

ROOT = Path(__file__).parents[2]
SSH = """#!/bin/sh
printf '%s\\n' "$*" >> "$FAKE_SSH_LOG"
while [ "$1" != "--" ]; do shift; done
[ "$2" = gone ] && exit 255
exec sh -c "$3"
"""
"""A host for every name but `gone`: this machine."""
RANK = """
import json, os, pathlib, signal, sys, time
folder, does = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
text = json.dumps({"pid": os.getpid(), "cwd": os.getcwd(), **os.environ})
(folder / (rank + ".new")).write_text(text)
(folder / (rank + ".new")).rename(folder / (rank + ".json"))
while len(list(folder.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
time.sleep(0 if rank in does else 60 if does else 0)
sys.exit(does.get(rank, 0))
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `ssh` in front of all others, `hosts` of four ranks, and a working directory that needs quotes."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "it's $HOME").mkdir()
    (tmp_path / "hosts").write_text("# the lab\n\nme@node1 slots=2\n127.0.0.1   slots=1 # old\nnode3\n")
    monkeypatch.chdir(tmp_path / "it's $HOME")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setattr(hosts, "GRACE_SECONDS", 3.0)
    monkeypatch.setattr(hosts, "PYTHON", (sys.executable,))
    return tmp_path


def command(folder: Path, does: dict[str, int]) -> list[str]:
    return ["-c", RANK, str(folder), json.dumps(does)]


def told(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}


def left(folder: Path) -> list[int]:
    """The ranks that are still there a moment later."""
    pids = [rank["pid"] for rank in told(folder).values()]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_each_host_starts_its_ranks_by_a_command_that_ssh_hands_on_whole(cluster: Path) -> None:
    hosts.start(command(cluster, {}), cluster / "hosts")
    ranks = told(cluster)
    assert [ranks[rank]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "0"]
    assert [ranks[rank]["LOCAL_WORLD_SIZE"] for rank in range(4)] == ["2", "2", "1", "1"]
    assert {rank["WORLD_SIZE"] for rank in ranks.values()} == {"4"}
    assert {rank["MASTER_ADDR"] for rank in ranks.values()} == {"node1"}
    assert len({rank["MASTER_PORT"] for rank in ranks.values()}) == 1
    assert {rank["cwd"] for rank in ranks.values()} == {str(cluster / "it's $HOME")}
    calls = (cluster / "log").read_text().splitlines()
    assert len(calls) == 3
    assert all("-o BatchMode=yes -o ConnectTimeout=15" in call for call in calls)
    assert sorted(call.partition(" -- ")[2].split()[0] for call in calls) == ["127.0.0.1", "me@node1", "node3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "last", "message"),
    [
        ({"1": 2}, "node3", "^me@node1: ranks 0 to 1 ended with exit code 2; the ranks of the other hosts were ended"),
        ({"2": 9}, "node3", "^127.0.0.1: rank 2 ended with exit code 9"),
        (
            {},
            "gone",
            "^gone: ssh cannot connect, or lost the connection, with rank 3;.*\n.*remove it from .*hosts, then run",
        ),
    ],
)
def test_a_host_that_fails_is_named_and_ends_the_others(
    cluster: Path, does: dict[str, int], last: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (cluster / "hosts").read_text()
    (cluster / "hosts").write_text(text.replace("node3", last))
    monkeypatch.setattr(hosts, "GRACE_SECONDS", 1.0)
    with pytest.raises(RunError, match=message):
        hosts.start(command(cluster, does), cluster / "hosts")
    assert left(cluster) == []


SAVES = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] != "0":
    while not (folder / "saves").exists():
        time.sleep(0.02)
    sys.exit(2)
note = pathlib.Path(os.environ["BLOOMERY_RANK_BUSY"])
note.touch()
(folder / "saves").touch()
time.sleep(3)
(folder / "saved").touch()
note.unlink()
time.sleep(60)
"""
"""The first rank saves for seconds after all others have failed, and then hangs."""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [60.0, 0.5])
@pytest.mark.parametrize("names", ["a\nb\n", "a slots=2\n"])
def test_a_first_rank_that_saves_is_waited_for_longer_than_one_that_hangs(
    cluster: Path, names: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster / "two").write_text(names)
    monkeypatch.setattr(hosts, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(launcher, "BUSY_SECONDS", seconds)
    before = time.monotonic()
    with pytest.raises(RunError, match="ended with exit code 2"):
        hosts.start(["-c", SAVES, str(cluster)], cluster / "two")
    assert (cluster / "saved").exists() == (seconds > 3)
    assert time.monotonic() < before + 30  # the sleep of a minute is ended


STARTER = """
import sys
from pathlib import Path
from bloomery.hw import hosts
hosts.PYTHON = (sys.executable,)
hosts.start(sys.argv[2:], Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_the_ranks_of_all_hosts_end_with_the_process_that_started_them(cluster: Path, number: int, code: int) -> None:
    """Asked to stop, each rank is asked; killed, the hosts notice that nobody speaks to them."""
    words = [sys.executable, "-c", STARTER, str(cluster / "hosts"), *command(cluster, {"9": 0})]
    with subprocess.Popen(words) as parent:
        deadline = time.monotonic() + 60
        while len(told(cluster)) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.send_signal(number)
        assert parent.wait(30) == code
    assert len(told(cluster)) == 4
    assert left(cluster) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "", "--on", "skypilot"], "--gpu: it is empty"),
        (
            ["--on", "slurm", "pretrain.mesh={dp_shard=2}", "finetune.mesh={dp_shard=2}"],
            "dp_shard 2 x tp 1 needs 2 process",
        ),
    ],
)
def test_a_script_that_no_job_could_run_is_not_printed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", str(ROOT / "recipes" / "demo.toml"), *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 hosts"),
        ("a\na", ":2: a is listed twice\n.*slots=N"),
        ("a slots=0", ":1: 'a slots=0' is not a host"),
        ("-oProxyCommand=x", ":1: '-oProxyCommand=x' is not a host"),
        ("a; rm -r x", "is not a host"),
        ("a b", "is not a host"),
        ("#" + "x" * 2**16 + "\ngpu1 slots=8", "more than 65,536 characters"),
        ("a slots=1000\nb slots=25", "2 hosts and 1025 ranks; the limits are 256 and 1024"),
    ],
)
def test_a_file_that_names_no_hosts_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(DataError, match=message):
        hosts.start([], tmp_path / "hosts")


def test_the_interface_towards_a_machine_has_the_address_that_it_sees() -> None:
    assert hosts.interface("127.0.0.1") == ("lo" if sys.platform == "linux" else None)
    assert hosts.interface("no.such.host.invalid") is None


def lint(script: str) -> None:
    """Have a shell read a script without running it, and ShellCheck, which finds more."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if (tool := Path(sys.executable).with_name("shellcheck")).exists():  # not every machine has a wheel of it
        told = subprocess.run([tool, "-"], input=script, text=True, capture_output=True, check=False)
        assert told.returncode == 0, told.stdout


RECIPE = 'name = "small"\nfetch.sources = [{ kind = "worlds", name = "a", domain = "a", count = 3 }]\n'


@pytest.mark.parametrize("more", [[], ["--gpu", "none"]])
def test_a_script_for_slurm_starts_the_same_command_on_every_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """Run with an `srun` that tells its words, in a shell that also checks the script as a whole."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a recipe.toml").write_text(RECIPE)
    words = ["launch", "a recipe.toml", "--on", "slurm", "--machines", "2", "--ranks", "4", *more]
    assert cli.main([*words, "tokenizer.vocab_size=300"]) == 0
    script = capsys.readouterr().out
    options = dict(line[8:].partition("=")[::2] for line in script.splitlines() if line.startswith("#SBATCH "))
    assert (options["--nodes"], options["--ntasks-per-node"]) == ("2", "4")
    assert options.get("--gpus-per-node") == (None if more else "4")
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    lint(script)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = subprocess.run(["sh"], input=script, text=True, check=True, capture_output=True, env=env).stdout.split("|")
    python = told.index(sys.executable)
    assert told[python:-1] == [
        *(sys.executable, "-m", "bloomery.cli", "run", "a recipe.toml", "tokenizer.vocab_size=300"),
        *("--runs", "runs"),
    ]


def test_a_task_for_skypilot_is_yaml_whose_lines_a_shell_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)
    words = ["launch", "r.toml", "--on", "skypilot", "--machines", "3", "--ranks", "2", "--gpu", "MI300X"]
    assert cli.main([*words, "tokenizer.vocab_size=300"]) == 0
    task = yaml.safe_load(capsys.readouterr().out)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (3, "MI300X:2")
    assert task["volumes"] == {"/shared": "bloomery-runs"}
    assert "--runs /shared/runs" in task["run"]
    for name in ("setup", "run"):
        lint(f"#!/bin/bash\n{task[name]}")


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "4,5,6,7",
    "SLURM_JOB_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "3411", strict=True)
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (SLURM, ("5", "8", "1", "4", "gpu07")),
        ({**SLURM, "MASTER_ADDR": "login", "MASTER_PORT": "99"}, ("5", "8", "1", "4", "login")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "a"}, ("3", "4", "0", "1", "a")),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            ("1", "2", "1", "2", "127.0.0.1"),
        ),
        (
            {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0"}
            | {"MV2_COMM_WORLD_LOCAL_SIZE": "2", **SLURM},
            ("0", "2", "0", "2", "127.0.0.1"),
        ),
    ],
)
def test_what_srun_and_mpirun_say_gets_the_names_of_torchrun(env: dict[str, str], expected: tuple[str, ...]) -> None:
    env = dict(env)
    launcher.adopt(env)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert tuple(env[name] for name in names) == expected
    process = launcher.launched(env)
    assert process is not None
    assert (process.rank, process.local_size) == (int(expected[0]), int(expected[3]))
    assert launcher.address(env)[0] == expected[4]


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},  # a batch script, which is no task
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "WORLD_SIZE": "2", "RANK": "0"},  # torchrun, started by srun
    ],
)
def test_a_process_alone_and_one_of_torchrun_stay_as_they_are(env: dict[str, str]) -> None:
    adopted = dict(env)
    launcher.adopt(adopted)
    assert adopted == env


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID='x'.*\n.*srun"),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_LOCALID"}, "SLURM_LOCALID is not set"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "MASTER_ADDR is not set, but there are 4 processes\n.*mpirun",
        ),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_JOB_NODELIST"}, "MASTER_ADDR is not set"),
    ],
)
def test_a_launcher_that_says_too_little_is_refused_by_name(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launcher.adopt(dict(env))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[07-09,12],login", "gpu07"),
        ("r[1-2]n[3,5]x,b", "r1n3x"),
        ("n[10]", "n10"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes: str, first: str) -> None:
    assert launcher.first_host(nodes) == first


def test_jobs_meet_at_ports_that_systems_do_not_give_away() -> None:
    jobs = range(1000, 2000), range(30_000, 31_000), range(4_194_000, 4_195_000)
    for some in jobs:
        ports = {launcher.port_of(str(job)) for job in some}
        ports_of_steps = {launcher.port_of(f"{job}.{step}") for job in some[:100] for step in range(3)}
        assert (len(ports), len(ports_of_steps)) == (1000, 300)
        assert all(15_000 <= port < 30_000 for port in ports | ports_of_steps)
    assert 15_000 <= launcher.port_of("prterun-node-7@1") < 30_000


@pytest.mark.parametrize(
    ("env", "same", "other"),
    [
        ({**SLURM, "SLURM_JOB_ID": "78"}, {**SLURM, "SLURM_JOB_ID": "78", "SLURM_PROCID": "0"}, SLURM),
        ({**MPICH, "PBS_JOBID": "5.a"}, {**MPICH, "PBS_JOBID": "5.a", "PMI_RANK": "3"}, {**MPICH, "PBS_JOBID": "6.a"}),
    ],
)
def test_the_processes_of_a_job_meet_where_those_of_another_do_not(
    env: dict[str, str], same: dict[str, str], other: dict[str, str]
) -> None:
    ports = []
    for one in (env, same, other):
        launcher.adopt(adopted := dict(one))
        ports.append(adopted["MASTER_PORT"])
    assert ports[0] == ports[1] != ports[2]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_launcher_of_one_machine_is_found_above_scripts(tmp_path: Path) -> None:
    """This test starts two ranks, one by a script, as mpirun of MPICH would; a job of it has no other name."""
    code = (
        "import os; from bloomery.hw import launcher; e = dict(os.environ); launcher.adopt(e); print(e['MASTER_PORT'])"
    )
    words = [sys.executable, "-c", code]
    (tmp_path / "script").write_text('#!/bin/sh\n"$@"\nexit 0\n')
    ports = set()
    for rank, before in enumerate(([], ["sh", str(tmp_path / "script")])):
        sizes = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), **sizes}
        done = subprocess.run([*before, *words], env=env, check=True, capture_output=True, text=True)
        ports.add(int(done.stdout))
    assert ports == {launcher.port_of(str(os.getpid()))}
