"""The recipes of containers are sound as far as that shows without an engine, and agree with the doctor's advice."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from bloomery.hw import torch_install
from bloomery.hw.doctor.gpu import CONTAINER_FLAGS

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
KNOWN = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
Step = tuple[str, str]

pytestmark = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def steps(file: Path) -> list[Step]:
    """(instruction, what it is given), with continued lines joined and comments left out."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for line in joined.splitlines() if line.strip() for name, _, rest in [line.partition(" ")]]


def command(file: Path, verb: str) -> list[str]:
    """The words of the one line among the comments that builds the image, or runs it."""
    lines = [line[2:] for line in file.read_text(encoding="utf-8").splitlines() if line.startswith(f"# docker {verb}")]
    assert len(lines) == 1
    return shlex.split(lines[0])


def test_every_instruction_is_one_and_the_first_names_an_image_with_its_version(file: Path) -> None:
    found = steps(file)
    assert {name for name, _ in found} <= KNOWN
    assert found[0][0] == "FROM"
    assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", found[0][1])


def test_no_line_goes_on_behind_a_blank(file: Path) -> None:
    assert not re.search(r"\\[ \t]+$", file.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_shell_reads_every_step(file: Path) -> None:
    for name, rest in steps(file):
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)


def test_nothing_is_left_behind_by_installers(file: Path) -> None:
    for name, rest in steps(file):
        if name == "RUN" and "apt-get" in rest:
            assert "apt-get update &&" in rest
            assert "install -y --no-install-recommends" in rest
            assert rest.endswith("rm -rf /var/lib/apt/lists/*")
        if name == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest


def test_every_variable_has_a_value_before_it_is_used(file: Path) -> None:
    known: set[str] = set()
    for name, rest in steps(file):
        assert set(re.findall(r"\$\{(\w+)\}", rest)) <= known
        if name in ("ARG", "ENV"):
            known.add(rest.partition("=")[0])
            assert "=" in rest


def test_torch_is_installed_once_within_the_bounds_and_before_the_rest(file: Path) -> None:
    installs = [rest for name, rest in steps(file) if name == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    assert torch_install.BOUNDS in installs[0]
    index = torch_install.AMD_INDEX if file.stem == "rocm" else "${INDEX}"
    assert index in installs[0]
    assert installs[1].endswith("install --no-cache-dir '.[data]'")


def test_what_is_started_is_given_as_a_list(file: Path) -> None:
    given = {name: json.loads(rest) for name, rest in steps(file) if name in ("ENTRYPOINT", "CMD")}
    assert given == {"ENTRYPOINT": ["bloomery"], "CMD": ["doctor"]}


def test_the_image_is_built_from_this_file_and_run_by_its_name(file: Path) -> None:
    build, run = command(file, "build"), command(file, "run")
    assert build[build.index("-f") + 1] == f"containers/{file.name}"
    assert build[-1] == "."
    assert run[-2:] == [build[build.index("-t") + 1], "doctor"]
    for option in (
        build[build.index("--build-arg") + 1 : build.index("--build-arg") + 2] if "--build-arg" in build else []
    ):
        assert f"ARG {option.partition('=')[0]}=" in file.read_text(encoding="utf-8")


def test_the_container_gets_the_devices_and_the_hosts_shared_memory(file: Path) -> None:
    run = command(file, "run")
    assert "--ipc=host" in run
    if file.stem == "rocm":
        advised = [word for word in shlex.split(CONTAINER_FLAGS) if word.startswith(("--", "$(")) or "=" in word]
        assert set(advised) <= set(run)
        assert run[run.index("--group-add") + 1] == "$(stat -c %g /dev/kfd)"
    else:
        assert run[run.index("--gpus") + 1] == "all"


def test_runs_and_caches_stay_outside(file: Path) -> None:
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv", "runs"} <= set(left_out)
