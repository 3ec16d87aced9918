"""
What a person sees, put into the README: the demo's questions and answers, and the table of held-out answers.

    make demo 2>&1 | tee /tmp/demo.log
    python scripts/transcript.py --run runs/demo --log /tmp/demo.log

Asks the finished model again, so that what stands in the README is what it says. The log, without the lines of the
installation, becomes docs/transcript.txt.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from tree import between

from bloomery.core.run_dir import current

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--log", type=Path, help="output of a first `make demo`")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    text = between(text, "transcript", f"```text\n{conversation(options.run)}```\n")
    text = between(text, "answers", answers(options.run))
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


def answers(run: Path) -> str:
    """Rows of the table: every kind of held-out question, and all together."""
    report = json.loads((current(run)["evaluate"] / "report.json").read_text(encoding="utf-8"))["answers"]
    rows = [*report["by_kind"].items(), (f"all {report['n']}", report)]
    head = "| held-out questions | exactly right | ended by itself |\n|---|---|---|\n"
    return head + "".join(f"| {kind} | {row['exact']:.0%} | {row['ended']:.0%} |\n" for kind, row in rows)


if __name__ == "__main__":
    main()
