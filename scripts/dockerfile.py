"""
Execute the steps of a Dockerfile in a folder that holds a Linux system, without a container engine.

    debootstrap --variant=minbase --include=python3-pip,python3-dev,ca-certificates bookworm ROOT
    python scripts/dockerfile.py containers/cpu.Dockerfile ROOT [NAME=VALUE ...] [--entry WORDS]

For the machine without an engine: it shows that the steps work, as far as they need no GPU. The folder stands for the
image that FROM names, so its Python may be another. NAME=VALUE sets an ARG, as --build-arg does. --entry starts the
entry point with these words at the end. Needs root, for chroot. Files of the repository come from git.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("root", type=Path)
    parser.add_argument("arguments", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--entry", type=shlex.split, default=[], metavar="WORDS")
    options = parser.parse_args()
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    given, known, folder, entry = dict(one.split("=", 1) for one in options.arguments), {}, "/", []
    for name, rest in steps(options.file):
        print(f"--- {name} {rest}", flush=True)
        variable, _, value = rest.partition("=")
        if name == "ARG":
            known[variable] = given.get(variable, value)
        elif name == "ENV":
            environment[variable] = value
        elif name == "WORKDIR":
            folder = rest
            (options.root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            copy(options.root / folder.lstrip("/"))
        elif name == "RUN":
            run(options.root, folder, ["sh", "-c", rest], environment | known)
        elif name == "ENTRYPOINT":
            entry = json.loads(rest)
    if options.entry:
        run(options.root, folder, entry + options.entry, environment)


def steps(file: Path) -> list[tuple[str, str]]:
    """(instruction, what it is given), with continued lines joined and comments left out."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for line in joined.splitlines() if line.strip() for name, _, rest in [line.partition(" ")]]


def copy(folder: Path) -> None:
    """What `COPY . .` takes of a clean clone: the files that git knows."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def run(root: Path, folder: str, words: list[str], environment: dict[str, str]) -> None:
    """Run a command in the system of `root`, or end with its exit code."""
    inside = ["sh", "-c", f'cd {shlex.quote(folder)} && exec "$@"', "sh", *words]
    if code := subprocess.run(["chroot", root, *inside], env=environment, check=False).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
