"""The recipes of containers are sound as far as that shows without an engine, and agree with the doctor's advice."""

import json
import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from bloomery.hw import torch_install
from bloomery.hw.doctor.gpu import CONTAINER_FLAGS

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
KNOWN = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
steps = runpy.run_path(str(ROOT / "scripts" / "dockerfile.py"))["steps"]

of_each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def command(file: Path, verb: str) -> list[str]:
    """The words of the one line among the comments that builds the image, or runs it."""
    lines = [line[2:] for line in file.read_text(encoding="utf-8").splitlines() if line.startswith(f"# docker {verb}")]
    assert len(lines) == 1
    return shlex.split(lines[0])


@of_each_file
def test_every_instruction_is_one_and_the_first_names_an_image_with_its_version(file: Path) -> None:
    found = steps(file)
    assert {name for name, _ in found} <= KNOWN
    assert found[0][0] == "FROM"
    assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", found[0][1])


@of_each_file
def test_no_line_goes_on_behind_a_blank(file: Path) -> None:
    assert not re.search(r"\\[ \t]+$", file.read_text(encoding="utf-8"), re.MULTILINE)


@of_each_file
def test_the_shell_reads_every_step(file: Path) -> None:
    for name, rest in steps(file):
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)


@of_each_file
def test_nothing_is_left_behind_by_installers(file: Path) -> None:
    for name, rest in steps(file):
        if name == "RUN" and "apt-get" in rest:
            assert "apt-get update &&" in rest
            assert "install -y --no-install-recommends" in rest
            assert rest.endswith("rm -rf /var/lib/apt/lists/*")
        if name == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest


@of_each_file
def test_every_variable_has_a_value_before_it_is_used(file: Path) -> None:
    known: set[str] = set()
    for name, rest in steps(file):
        assert set(re.findall(r"\$\{(\w+)\}", rest)) <= known
        if name in ("ARG", "ENV"):
            known.add(rest.partition("=")[0])
            assert "=" in rest


@of_each_file
def test_torch_is_installed_once_within_the_bounds_and_before_the_rest(file: Path) -> None:
    installs = [rest for name, rest in steps(file) if name == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    assert torch_install.BOUNDS in installs[0]
    index = torch_install.AMD_INDEX if file.stem == "rocm" else "${INDEX}"
    assert index in installs[0]
    assert installs[1].endswith("install --no-cache-dir '.[data]'")


@of_each_file
def test_what_is_started_is_given_as_a_list(file: Path) -> None:
    given = {name: json.loads(rest) for name, rest in steps(file) if name in ("ENTRYPOINT", "CMD")}
    assert given == {"ENTRYPOINT": ["bloomery"], "CMD": ["doctor"]}


@of_each_file
def test_the_image_is_built_from_this_file_and_run_by_its_name(file: Path) -> None:
    build, run = command(file, "build"), command(file, "run")
    assert build[build.index("-f") + 1] == f"containers/{file.name}"
    assert build[-1] == "."
    assert run[-2:] == [build[build.index("-t") + 1], "doctor"]
    for option in (
        build[build.index("--build-arg") + 1 : build.index("--build-arg") + 2] if "--build-arg" in build else []
    ):
        assert f"ARG {option.partition('=')[0]}=" in file.read_text(encoding="utf-8")


@of_each_file
def test_the_container_gets_the_devices_and_the_hosts_shared_memory(file: Path) -> None:
    run = command(file, "run")
    assert "--ipc=host" in run
    if file.stem == "rocm":
        advised = [word for word in shlex.split(CONTAINER_FLAGS) if word.startswith(("--", "$(")) or "=" in word]
        assert set(advised) <= set(run)
        assert run[run.index("--group-add") + 1] == "$(stat -c %g /dev/kfd)"
    assert ("--gpus" in run) == (file.stem == "cuda")


@of_each_file
def test_runs_and_caches_stay_outside(file: Path) -> None:
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv", "runs"} <= set(left_out)


# --- containers/run ------------------------------------------------------------------------------------------------

ENGINE = """\
#!/bin/sh
[ "$1" != image ] || exit "$HAVE_IMAGE"
printf '%s\\n' "$@" >> "$SAID"
echo -- >> "$SAID"
"""
"""A stand-in for an engine. It writes down what it is asked; with HAVE_IMAGE=0 it has every image."""


class Machine:
    """A folder with an engine, one AMD GPU and a home."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, folder / "said"
        for name in ("docker", "podman"):
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / name).write_text(ENGINE, encoding="utf-8")
            (folder / "bin" / name).chmod(0o755)
        for node, version in (("0", 0), ("1", 110501)):
            (folder / "nodes" / node).mkdir(parents=True)
            properties = f"cpu_cores_count 0\ngfx_target_version {version}\n"
            (folder / "nodes" / node / "properties").write_text(properties, encoding="utf-8")
        (folder / "kfd").touch()
        (folder / "my work").mkdir()

    def call(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.said.unlink(missing_ok=True)
        known = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "SAID": str(self.said),
        }
        amd = {name: str(self.folder / name.lower()) for name in ("KFD", "DRI")} | {
            "KFD_NODES": str(self.folder / "nodes")
        }
        return subprocess.run(
            [ROOT / "containers" / "run", *words],
            env=known | amd | {"HAVE_IMAGE": "0"} | environment,
            cwd=self.folder / "my work",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def asked(self, *words: str, **environment: str) -> list[list[str]]:
        """What the engine was asked: the words of each call."""
        done = self.call(*words, **environment)
        assert (done.returncode, done.stderr) == (0, "")
        return [call.splitlines() for call in self.said.read_text(encoding="utf-8").split("--\n")[:-1]]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@of_each_file
def test_a_container_gets_what_its_file_says_and_the_current_folder(file: Path, machine: Machine) -> None:
    (asked,) = machine.asked(file.stem, "run", "my recipe.toml")
    documented = command(file, "run")
    image = f"bloomery-{file.stem}" + ("-gfx1151" if file.stem == "rocm" else "")
    assert asked[asked.index(image) :] == [image, "run", "my recipe.toml"]
    needed = [word for word in documented[2 : documented.index("-v")] if word != "-it" and not word.startswith("$")]
    assert set(needed) <= set(asked)
    here = str(machine.folder / "my work")
    assert asked[asked.index("--workdir") + 1] == here
    folders = [asked[place + 1] for place, word in enumerate(asked) if word == "--volume"]
    assert folders[0] == f"{here}:{here}"
    assert {folder.rpartition(":")[0] for folder in folders[1:]} == {
        str(machine.folder / ".cache" / name) for name in ("bloomery", "huggingface")
    }
    assert asked[asked.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"


def test_an_image_is_built_once_for_the_chip_that_the_kernel_names(machine: Machine) -> None:
    build, _ = machine.asked("rocm", HAVE_IMAGE="1")
    assert build[build.index("--build-arg") + 1] == "TARGET=gfx1151"
    assert build[-3:] == ["-t", "bloomery-rocm-gfx1151", str(ROOT)]
    build, _ = machine.asked("rocm", REBUILD="1", TARGET="gfx942")
    assert build[build.index("--build-arg") + 1] == "TARGET=gfx942"
    assert len(machine.asked("rocm")) == 1


def test_only_a_server_opens_a_port_on_this_machine_alone_and_with_a_token(machine: Machine) -> None:
    (asked,) = machine.asked("cpu", "serve", "runs/demo", BLOOMERY_TOKEN="secret", PORT="9000")
    assert asked[asked.index("--publish") + 1] == "127.0.0.1:9000:8000"
    assert asked[-5:] == ["runs/demo", "--host", "0.0.0.0", "--port", "8000"]
    assert "secret" not in "".join(asked)
    (asked,) = machine.asked("cpu")
    assert asked[-1] == "doctor"
    assert "--publish" not in asked


def test_podman_has_other_words(machine: Machine) -> None:
    (asked,) = machine.asked("cuda", ENGINE="podman")
    assert "nvidia.com/gpu=all" in asked
    assert "--userns=keep-id" in asked
    assert "--gpus" not in asked


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        ([], {}, "Give cpu, cuda or rocm"),
        (["gpu"], {}, "the first argument is 'gpu'"),
        (["cpu"], {"ENGINE": "none"}, "no program 'none'"),
        (["cpu", "serve"], {}, "Set BLOOMERY_TOKEN"),
        (["rocm"], {"KFD_NODES": "/none"}, "reports no AMD GPU"),
        (["rocm"], {"KFD": "/none"}, "there is no /dev/kfd"),
    ],
)
def test_what_is_missing_is_said_before_a_container_starts(
    machine: Machine, words: list[str], environment: dict[str, str], said: str
) -> None:
    done = machine.call(*words, **environment | {"HAVE_IMAGE": "1"})
    assert done.returncode == 2
    assert done.stderr.startswith("containers/run: ")
    assert said in done.stderr
    assert not machine.said.exists()
