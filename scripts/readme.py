"""
The numbers of PAGES and the answers in README.md, from benchmarks/results and a finished demo.

    python scripts/readme.py                     name each number that differs from the results; exit with 1 if one does
    python scripts/readme.py --write             put the numbers of the results into PAGES
    python scripts/readme.py --run runs/demo     put what the demo's model answers into README.md

A number stands between `<!-- =NAME -->` and `<!-- / -->`, and its NAME is a key of `numbers`. A number without marks
has no result in this repository.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planned import PLANS
from tree import between

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DO = ROOT / "docs" / "do"
PAGES = (README, DO / "plan-cost-and-time.md", *sorted(DO.glob("train-on-*.md")))
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- =(?P<name>[a-z-]+) -->)(?P<value>[^<]*)(<!-- / -->)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--run", type=Path, metavar="RUN", help="the run folder of a demo that is done")
    options = parser.parse_args()
    before, values = {page: page.read_text(encoding="utf-8") for page in PAGES}, numbers()
    stale = changes("".join(before.values()), values)
    if options.write or options.run:
        answers = f"```text\n{conversation(options.run)}```\n" if options.run else None
        for page, text in before.items():
            after = MARKED.sub(lambda mark: f"{mark[1]}{values[mark['name']]}{mark[4]}", text)
            after = between(after, "transcript", answers) if answers and page == README else after
            page.write_text(after, encoding="utf-8")
    elif stale:
        print(*stale, "To fix: python scripts/readme.py --write", sep="\n")
        sys.exit(1)


def changes(page: str, values: Mapping[str, str]) -> list[str]:
    """What is wrong with the marked numbers of the pages: each has the value of the results, and none is left out."""
    marks = {mark["name"]: mark["value"] for mark in MARKED.finditer(page)}
    begun = re.findall(r"^[ \t]*<!-- =[a-z-]+", page, re.MULTILINE)
    return [f"{mark} begins a line, which ends a paragraph in Markdown: move it behind a word" for mark in begun] + [
        f"{name} is {marks.get(name, 'not there')!r}, and {values.get(name, 'not there')!r} by the results"
        for name in sorted({*marks, *values})
        if marks.get(name) != values.get(name)
    ]


def result(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return facts


def numbers() -> dict[str, str]:
    """Each number of the pages, as it stands there."""
    demo, answers, target = result("demo"), result("answers"), result("to_target")
    dedup, kills = result("dedup"), result("kill_runs")
    rates = [run["megabytes_per_second"] for run in dedup["notes"]["runs"]]
    target_tokens = target["notes"]["curves"]["ours"][-1][0] * target["notes"]["global_batch_tokens"]
    right, gpu = demo["notes"]["answers"], result("gpu_h100")["notes"]["demo"]
    demos = [demo["notes"], *demo["notes"].get("other_machines", [])]
    minutes = sorted(round(one["seconds"] / 60) for one in demos)
    percents = sorted(round(100 * one["answers"]["exact"]) for one in demos)
    film = re.search(r"make demo · (\d+) min", (ROOT / "docs" / "images" / "demo.svg").read_text(encoding="utf-8"))
    computed = cpu_hours() | plans()
    return computed | {
        "demo-minutes": f"{minutes[0]} to {minutes[-1]} minutes",
        "demo-recorded": f"{film[1] if film else '?'} minutes",
        "demo-gpu": f"{gpu['seconds']} seconds",
        "demo-right": f"{percents[0]} to {percents[-1]} %",
        "demo-right-gpu": gpu["right"].partition(" of ")[0],
        "demo-questions": str(right["n"]),
        "answers-text": f"{answers['pretrain']['tokens'] / 1e6:.1f} million",
        "answers-conversations": f"{answers['finetune']['tokens'] / 1e6:.1f} million",
        "answers-minutes": f"{(answers['seconds']['pretrain'] + answers['seconds']['finetune']) / 60:.0f} minutes",
        "answers-ended": f"{100 * answers['conversations']['finetune']['ended']['value']:.0f} %",
        "answers-bits": f"{answers['bits_per_byte']['model']:.2f}",
        "answers-xz": f"{answers['bits_per_byte']['xz']:.2f}",
        "target-seconds": f"{target['ours']['value']:.0f} CPU seconds",
        "target-whole": f"{target['notes']['seconds']['longer']:.0f} CPU seconds",
        "target-tokens": f"{target_tokens / 1e6:.1f} million",
        "target-peer": f"{target['notes']['seconds']['nanogpt_bfloat16']:.0f}",
        "step-default": shares("huggingface", "nanogpt"),
        "step-bfloat": shares("huggingface_bfloat16_kept", "nanogpt_bfloat16_kept"),
        "dedup-rates": f"{min(rates):.0f} to {max(rates):.0f} MB/s",
        "dedup-small": f"{dedup['ours']['value']:.1f} MB/s",
        "dedup-peer": f"{dedup['peers']['datatrove']['value']:.2f} MB/s",
        "kills": f"{kills['ours']['value']} times",
        "kill-files": f"{kills['notes']['files_compared']} output files",
    }


def plans() -> dict[str, str]:
    """The numbers of plans, as the pages quote them."""
    found: dict[str, str] = {}
    for name, facts in result("planned").items():
        shown = {
            "peak": f"{facts['peak_bytes'] / 2**30:.1f} GiB",
            "usable": f"{facts['usable_bytes'] / 2**30:.1f} GiB",
            "sequences": f"{facts['sequences']}",
            "speed": "" if facts["seconds"] is None else f"{round(facts['tokens_per_second'], -2):,.0f}",
            "time": "" if facts["seconds"] is None else in_units(facts["seconds"]),
            "cost": "" if facts["cost"] is None else f"{facts['cost']:.2f}",
            "energy": "" if facts["kilowatt_hours"] is None else f"{facts['kilowatt_hours']:.1f} kWh",
        }
        found |= {f"plan-{name}-{field}": shown[field] for field in PLANS[name].quoted}
    return found


def in_units(seconds: float) -> str:
    """29 minutes, 4.3 hours, 36 hours, 4.7 days."""
    hours = seconds / 3600
    if hours < 1:
        return f"{seconds / 60:.0f} minutes"
    if hours < 48:
        return f"{hours:.{1 if hours < 10 else 0}f} hours"
    return f"{hours / 24:.1f} days"


def cpu_hours() -> dict[str, str]:
    """Speed on a CPU by model size, and what 20 tokens for each parameter then take."""
    demo, answers, target, step = result("demo"), result("answers"), result("to_target"), result("train_step")
    recipe = tomllib.loads((ROOT / "recipes" / "demo.toml").read_text(encoding="utf-8"))["pretrain"]
    tokens = recipe["steps"] * recipe["global_batch_tokens"]
    gpt2 = [case for case in step["notes"]["cases"] if case["threads"] == 2 and not case["size"].startswith("small")]
    notes = target["notes"]
    steps, _, seconds, _ = notes["curves"]["ours"][-1]
    rows = {  # parameters, tokens per second, cores
        "demo": (4.0e6, tokens / demo["notes"]["seconds_by_stage"]["pretrain"], 2),
        "answers": (
            answers["pretrain"]["parameters"],
            answers["pretrain"]["tokens"] / answers["seconds"]["pretrain"],
            1,
        ),
        "target": (notes["parameters"]["ours"], steps * notes["global_batch_tokens"] / seconds, 1),
        "gpt": (124_439_808, max(case["programs"]["ours"]["tokens_per_second"] for case in gpt2), 2),
    }
    found = {}
    for name, (parameters, speed, cores) in rows.items():
        hours = 20 * parameters / speed * cores / 3600
        found[f"cpu-{name}-speed"] = f"{speed:,.0f}"
        found[f"cpu-{name}-tokens"] = f"{20 * parameters / 1e6:,.0f} million"
        found[f"cpu-{name}-hours"] = f"{hours:,.0f}"
        found[f"cpu-{name}-time"] = f"{hours / 2:.1f} hours" if hours < 100 else f"{hours / 48:.0f} days"
    return found


def shares(*peers: str) -> str:
    """The time of our step as a share of theirs, over all sizes and both CPUs."""
    cases = [case for name in ("train_step", "train_step_amx") for case in result(name)["notes"]["cases"]]
    shares = [100 / case["faster_than"][peer] for case in cases for peer in peers if peer in case["faster_than"]]
    return f"{min(shares):.0f} to {max(shares):.0f} %"


def conversation(run: Path) -> str:
    """What `bloomery chat` prints for the questions of the Makefile."""
    prompts = re.findall(r"--prompt '([^']*)'", (ROOT / "Makefile").read_text(encoding="utf-8"))
    flags = [flag for prompt in prompts for flag in ("--prompt", prompt)]
    command = [sys.executable, "-m", "bloomery.cli", "chat", str(run), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
