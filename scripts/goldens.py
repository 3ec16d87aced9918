"""
Check that a change of the code changed no result: the bytes of small runs, and every help text.

    python scripts/goldens.py            compare with tests/golden/*.json
    python scripts/goldens.py --write    record what the code does now

Four runs of every stage: with default settings, on two ranks, on two ranks that share the model (FSDP), and finetuning
with LoRA on a base in NF4. Compared are the sha256 of every file of every stage, and of metrics without what depends on
speed. Losses of another kind of CPU or another torch differ in their last digits: there they are compared within
1e-3, and files by data stages alone. Takes two minutes on two cores.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from kill_runs import RECIPE, content  # noqa: E402

from bloomery import cli  # noqa: E402
from bloomery.cli import VERBS  # noqa: E402
from bloomery.core.log import METRICS, read_metrics  # noqa: E402
from bloomery.core.pipeline import versions  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
TWO_RANKS = ("pretrain.num_processes=2", "finetune.num_processes=2")
RUNS = {
    "default": (),
    "two_ranks": TWO_RANKS,
    "fsdp": (*TWO_RANKS, "pretrain.parallelism=fsdp", "finetune.parallelism=fsdp"),
    "lora_nf4": ("finetune.lora.base_dtype=nf4",),
}
"""Name of a run -> its settings."""
DATA_STAGES = ("01-fetch", "03-filter", "04-dedup", "05-tokenizer", "06-shard", "08-synthesize", "09-instruct")
MOST_DIFFERENCE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    now = {"runs": runs(), "help": helps()}
    if options.write:
        for name, value in now.items():
            (GOLDEN / f"{name}.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
        return
    found = differences(now["runs"], json.loads((GOLDEN / "runs.json").read_text()))
    found += [
        f"help of {verb}"
        for verb, text in json.loads((GOLDEN / "help.json").read_text()).items()
        if now["help"].get(verb) != text
    ]
    print("\n".join(found) or "nothing differs")
    sys.exit(1 if found else 0)


def runs() -> dict[str, Any]:
    done: dict[str, Any] = {"machine": processor(), "torch": versions()["torch"], "files": {}, "losses": {}}
    with tempfile.TemporaryDirectory() as folder:
        (recipe := Path(folder, "small.toml")).write_text(RECIPE)
        for name, settings in RUNS.items():
            out = Path(folder, name)
            words = [sys.executable, "-m", "bloomery.cli", "run", str(recipe), "--runs", str(out), *settings]
            subprocess.run(words, check=True, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
            done["files"][name] = {without_fingerprint(file): value for file, value in content(out).items()}
            done["losses"][name] = {
                without_fingerprint(file.parent.name): [line["loss"] for line in read_metrics(file) if "loss" in line]
                for file in sorted(out.glob(f"small/??-*/{METRICS}"))
            }
    return done


def without_fingerprint(name: str) -> str:
    """`05-tokenizer-d5ac9306/x` -> `05-tokenizer/x`."""
    stage, slash, rest = name.partition("/")
    return f"{stage.rpartition('-')[0]}{slash}{rest}"


def processor() -> str:
    """The CPU's name, and the instructions that the kernels use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {versions()['native']}"


def helps() -> dict[str, str]:
    """Verb -> its help text at 80 columns; "" -> that of the program."""
    surroundings = os.environ | {"COLUMNS": "80"}

    def of(*words: str) -> str:
        command = (sys.executable, "-m", "bloomery.cli", *words, "--help")
        return subprocess.run(command, check=True, capture_output=True, text=True, env=surroundings).stdout

    return {
        " ".join(words): of(*words)
        for words in [verb.split() for verb in VERBS] + [["data", name] for name in cli.DATA]
    }


def differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    same = (now["machine"], now["torch"]) == (before["machine"], before["torch"])
    found = []
    for run, files in before["files"].items():
        names = {*files, *now["files"][run]}
        found += [
            f"{run}: {file}"
            for file in sorted(names if same else {name for name in names if name.startswith(DATA_STAGES)})
            if files.get(file) != now["files"][run].get(file)
        ]
        for stage, losses in before["losses"][run].items():
            pairs = zip(losses, now["losses"][run][stage], strict=True)
            far = [number for number, (was, is_now) in enumerate(pairs) if not close(was, is_now, same=same)]
            found += [f"{run}: losses of {stage}, first at {far[0]}"] if far else []
    return found


def close(was: float, is_now: float, *, same: bool) -> bool:
    return was == is_now if same else math.isclose(was, is_now, rel_tol=MOST_DIFFERENCE)


if __name__ == "__main__":
    main()
