"""
What was trained is what answers: a small model from shared text to held-out answers, and its scores.

    python benchmarks/answers.py [--folder FOLDER] [--json] [--quick] [SETTING=VALUE ...]

A run of 14 million parameters on the text and conversations in the folder $BLOOMERY_SHARED, by the command that a user
would give: web pages, books, questions and code; three sets of conversations, English and Chinese, one answer or many.
Printed is what the run found: how full the rows of conversations are; for the model before and after finetuning, the
share of held-out answers that end and how likely the given ones are; the scores of the finetuned model on the known
tasks that are in the folder, with intervals. With --folder the run stays there and goes on where it was.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import stand_in

from bloomery.core.stage import machine, read_manifest, versions

TALKS = {"instruct": "alpaca", "multiturn_en": "sharegpt", "multiturn_zh": "sharegpt"}
TASKS = (
    *("hellaswag", "arc_easy", "arc_challenge", "openbookqa", "boolq", "winogrande", "copa", "commonsense_qa"),
    *("mmlu", "lambada", "gsm8k", "svamp", "humaneval"),
)
RECIPE = """
name = "answers"

[tokenizer]
vocab_size = 8192
sample_bytes = 12_000_000

[shard]
tokens = 8_000_000
hold_out = 0.01
weights = [
    {{ domain = "web", weight = 0.5 }},
    {{ domain = "qa", weight = 0.35 }},
    {{ domain = "code", weight = 0.15 }},
]

[pretrain]
steps = 500
tokens_per_step = 4096
model = {{ width = 384, num_layers = 6, num_heads = 6, num_kv_heads = 6, mlp_width = 1024, context = 512 }}
optimizer = {{ kind = "muon", matrix_learning_rate = 0.02, learning_rate = 0.003 }}
schedule = {{ kind = "wsd", warmup_steps = 20, decay = 0.4 }}

[instruct]
row_tokens = 513
hold_out = 0.04

[finetune]
steps = 300
tokens_per_step = 4096
optimizer = {{ kind = "muon", matrix_learning_rate = 0.02, learning_rate = 0.002 }}
schedule = {{ kind = "wsd", decay = 0.7 }}

[evaluate]
questions = 0
conversations = 300
max_tokens = 256
heldout_bytes = 200_000
limit = 300
run_code = true
tasks = {tasks}
data = ["{data}"]
"""
QUICK = (
    "pretrain.steps=2",
    "finetune.steps=2",
    "evaluate.limit=2",
    "evaluate.conversations=2",
    "evaluate.max_tokens=8",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    options = parser.parse_args()
    texts = stand_in.shared()
    if texts is None:
        sys.exit("this needs the shared text: name its folder in BLOOMERY_SHARED")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = folder / "answers.toml"
        recipe.write_text(written(texts, quick=options.quick), encoding="utf-8")
        settings = [*(QUICK if options.quick else ()), *options.settings]
        command = [sys.executable, "-m", "bloomery.cli", "run", str(recipe), "--runs", str(folder), *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL if options.json else None)
        print(json.dumps(found(folder / "answers")))


def written(texts: Path, *, quick: bool) -> str:
    """The recipe, with where this machine has the texts."""
    data = texts / "data"
    made = [RECIPE.format(tasks=json.dumps(TASKS), data=data / "eval")]
    made += [
        _table("fetch.sources", source)
        for source in stand_in.sources(texts, quick=quick)
        if source["domain"] in ("web", "qa", "code")
    ]
    made += [
        _table(
            "instruct.sources",
            {"kind": "files", "name": name, "path": str(data / "dev" / f"{name}.jsonl.zst"), "shape": shape},
        )
        for name, shape in TALKS.items()
    ]
    return "".join(made)


def _table(name: str, values: dict[str, Any]) -> str:
    lines = [f"{key} = {stand_in.toml(value)}\n" for key, value in values.items()]
    return "\n".join(["", f"[[{name}]]", "".join(lines)])


def found(run: Path) -> dict[str, Any]:
    """What the stages wrote down."""
    stages = {
        path.parent.name.split("-")[1]: read_manifest(path.parent) for path in sorted(run.glob("*/manifest.json"))
    }
    stats = {name: manifest["stats"] for name, manifest in stages.items()}
    trained = {
        name: {key: stats[name][key] for key in ("parameters", "steps", "tokens", "validation_loss")}
        for name in ("pretrain", "finetune")
    }
    return {
        "benchmark": "answers",
        **trained,
        "instruct": {
            key: stats["instruct"][key] for key in ("read", "conversations", "rejected_by_reason", "train", "val")
        },
        "bits_per_byte": stats["evaluate"]["bits_per_byte"],
        "conversations": stats["evaluate"]["conversations"],
        "tasks": stats["evaluate"]["tasks"],
        "seconds": {name: round(manifest["seconds"], 1) for name, manifest in stages.items()},
        "machine": machine(),
        "versions": versions(),
    }


if __name__ == "__main__":
    main()
