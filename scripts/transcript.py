"""
What a person sees, put into the README: the demo's questions and answers.

    make demo 2>&1 | tee /tmp/demo.log
    python scripts/transcript.py --run runs/demo --log /tmp/demo.log

Asks the finished model again, so that what stands in the README is what it says. The log, without the lines of the
installation, becomes docs/transcript.txt.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tree import between

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--log", type=Path, help="output of a first `make demo`")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    text = between(text, "transcript", f"```text\n{conversation(options.run)}```\n")
    README.write_text(text, encoding="utf-8")
    if options.log:
        lines = options.log.read_text(encoding="utf-8").split("\n")
        first = next(number for number, line in enumerate(lines) if line.startswith("▸ fetch"))
        last = max(number for number, line in enumerate(lines) if "browser:" in line)
        (ROOT / "docs" / "transcript.txt").write_text("\n".join(lines[first : last + 1]) + "\n", encoding="utf-8")


def conversation(run: Path) -> str:
    """What `bloomery chat` prints for the questions of the Makefile."""
    prompts = re.findall(r"--prompt '([^']*)'", (ROOT / "Makefile").read_text(encoding="utf-8"))
    flags = [flag for prompt in prompts for flag in ("--prompt", prompt)]
    command = [sys.executable, "-m", "bloomery.cli", "chat", str(run), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
