"""
What was trained is what answers: a small model from shared text to held-out answers, and its scores.

    python benchmarks/answers.py [--folder FOLDER] [--json] [--quick] [SETTING=VALUE ...]

A run of 10 million parameters on the text and conversations in the folder $BLOOMERY_SHARED, by the command that a user
would give: web pages, books, questions and code; three sets of conversations, English and Chinese, one answer or many.
Printed is what the run found: how full the rows of conversations are; for the model before and after finetuning, the
share of held-out answers that end, drawn as chat draws them and greedy ones, and how likely the given ones are; the
scores of the finetuned model on the known tasks that are in the folder, with intervals. With --folder the run stays
there and goes on where it was.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import stand_in

from bloomery.core.io import read_json
from bloomery.core.pipeline import machine, versions
from bloomery.core.records import CURRENT, read_manifest

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
val_fraction = 0.01
weights = [
    {{ domain = "web", weight = 0.5 }},
    {{ domain = "qa", weight = 0.35 }},
    {{ domain = "code", weight = 0.15 }},
]

[pretrain]
steps = 1200
global_batch_tokens = 4096
model.hidden_size = 320
model.num_layers = 6
model.num_heads = 5
model.num_kv_heads = 5
model.intermediate_size = 864
model.context_length = 512
optimizer = {{ kind = "muon", muon_lr = 0.02, learning_rate = 0.003 }}
schedule = {{ kind = "wsd", warmup_steps = 20, decay_fraction = 0.4 }}

[instruct]
sequence_length = 513
val_fraction = 0.04

[finetune]
steps = 2400
global_batch_tokens = 4096
optimizer = {{ kind = "muon", muon_lr = 0.02, learning_rate = 0.002 }}
schedule = {{ kind = "wsd", decay_fraction = 0.7 }}

[evaluate]
toy_questions = 0
conversations = 300
max_tokens = 320
val_bytes = 200_000
limit = 300
run_code = true
tasks = {tasks}
data = ["{data}"]
"""
GREEDY = ("evaluate.chat_temperature=0", "evaluate.tasks=[]", "evaluate.val_bytes=1")
QUICK = (
    "pretrain.steps=2",
    "pretrain.schedule.warmup_steps=1",
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
        greedy = ran([*command, *GREEDY], folder, quiet=options.json)
        drawn = ran(command, folder, quiet=options.json)
        print(json.dumps(found(drawn) | {"greedy": greedy["evaluate"]["stats"]["conversations"]}))


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


def ran(command: list[str], folder: Path, *, quiet: bool) -> dict[str, dict[str, Any]]:
    """Do it; what each stage then says of itself, by its name."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL if quiet else None)
    run = folder / "answers"
    return {name: dict(read_manifest(run / stage)) for name, stage in read_json(run / CURRENT).items()}


def found(stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of that, what the benchmark is about."""
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
