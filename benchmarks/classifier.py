"""
How well does a classifier tell, beside fastText on the same split, and how fast does it score?

    python benchmarks/classifier.py [--json] [--quick] [--labels FILE] [--splits 3]

Labeled text (jsonl with text, label and group; by default the shared toxicity set) is split by group, several times:
eight parts teach, one calibrates, one measures. Ours learns with the defaults of a `labeled` classifier. fastText
learns from the same texts with each of SETTINGS; that which orders the calibrating part best is measured, as ours
picks its penalty. Where fastText is not installed it is left out, and said so. Then text as long as documents are is
scored on one core. Ends with one line of JSON.
"""

import argparse
import importlib
import json
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score
from stand_in import PLACE

from bloomery.core.pipeline import machine, versions
from bloomery.data.dedup.hashing import NgramSizes
from bloomery.data.quality import classifier, examples, scorer
from bloomery.data.quality.examples import Labels, TextExample
from bloomery.data.quality.scorer import Classifier
from bloomery.stages.config import Labeled

SHARED = PLACE / "data" / "dev" / "toxicity.jsonl.zst"
PACKAGE = "fasttext-numpy2-wheel"
SETTINGS: tuple[dict[str, Any], ...] = (
    {"wordNgrams": 2, "epoch": 25, "lr": 0.5},
    {"wordNgrams": 2, "epoch": 10, "lr": 0.1, "minn": 2, "maxn": 5},
    {"wordNgrams": 1, "epoch": 5, "lr": 0.5, "minn": 3, "maxn": 6},
    {"wordNgrams": 2, "epoch": 5, "lr": 0.5},
)
"""Plain words and word pairs, and with characters too: what automatic tuning arrives at on texts as short as these."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true", help="one split, fewer texts")
    parser.add_argument("--labels", type=Path, default=SHARED)
    parser.add_argument("--splits", type=int, default=3)
    options = parser.parse_args()
    config = Labeled(name="benchmark", path=options.labels, keep="low", group_field="group")
    found = labeled(config, 8000 if options.quick else config.samples)
    runs = []
    for seed in range(1 if options.quick else options.splits):
        runs.append(split(config, found, seed))
        if not options.json:
            print(runs[-1])
    print(json.dumps(result(config, runs, speeds(found))))


def labeled(config: Labeled, samples: int) -> list[TextExample]:
    return examples.labeled(
        config.path,
        Labels(config.positive, config.negative),
        text_field=config.text_field,
        label_field=config.label_field,
        group_field=config.group_field,
        samples=samples,
        characters=config.max_chars,
        seed=config.seed,
    )


def split(config: Labeled, found: Sequence[TextExample], seed: int) -> dict[str, Any]:
    """The area under the ROC curve of ours and theirs on one split, and the seconds that they learned."""
    grams = NgramSizes(config.features, config.ngrams, config.character_ngrams)
    begun = time.process_time()
    learned = classifier.train(found, grams, characters=config.max_chars, held_out=config.test_fraction, seed=seed)
    ours = {"auc": learned.quality.auc, "cpu_seconds": time.process_time() - begun, "strength": learned.strength}
    ours["calibration_error"] = learned.quality.calibration_error
    return {"seed": seed, "held_out": learned.quality.held_out, "ours": ours, "fasttext": fasttext(found, config, seed)}


def fasttext(found: Sequence[TextExample], config: Labeled, seed: int) -> dict[str, Any] | None:
    """Of SETTINGS the one that is best on the calibrating part; None where fastText is not installed."""
    if (library := peer()) is None:
        return None
    truth = np.array([example.positive for example in found])
    measured, calibrating, teaching = classifier.split([e.group for e in found], truth, config.test_fraction, seed)
    lines = [" ".join(example.text.lower().split()) for example in found]
    tried: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.writelines(f"__label__{int(truth[n])} {lines[n]}\n" for n in np.flatnonzero(teaching))
        file.flush()
        for setting in SETTINGS:
            begun = time.process_time()
            model = library.train_supervised(file.name, thread=1, verbose=0, seed=seed, dim=100, **setting)
            seconds = time.process_time() - begun
            scores = np.array([positive(model, line) for line in lines])
            areas = [float(roc_auc_score(truth[part], scores[part])) for part in (calibrating, measured)]
            tried.append({"auc": areas[1], "calibrating": areas[0], "cpu_seconds": seconds, "setting": setting})
    best = max(tried, key=lambda one: one["calibrating"])
    return best | {"all": [round(one["auc"], 4) for one in tried]}


def peer() -> ModuleType | None:
    try:
        return importlib.import_module("fasttext")
    except ImportError:
        return None


def positive(model: Any, line: str) -> float:
    """The probability of label 1. Its own `predict` fails with numpy 2; what is below it does not."""
    found = {name: float(value) for value, name in model.f.predict(line + "\n", 2, 0.0, "strict")}
    return found["__label__1"]


def speeds(found: Sequence[TextExample]) -> dict[str, float]:
    """Megabytes that one core scores in a second, of texts of 3,000 characters: the best of three."""
    joined = "\n".join(example.text for example in found)
    texts = [joined[begin : begin + 3000] for begin in range(0, min(len(joined), 6_000_000), 3000)]
    size = sum(len(text.encode()) for text in texts) / 1e6
    weights = np.random.default_rng(0).random(2**20, np.float32)
    told = {}
    for name, characters in (("words", None), ("words and characters", (4, 4))):
        made = Classifier(weights, 0.0, NgramSizes(2**20, (1, 2), characters), 3000)
        told[name] = size / best([lambda made=made: list(scorer.score(made, texts))] * 3)
    return told | {"heuristic": size / best([lambda: list(scorer.heuristic_score(texts))] * 3)}


def best(calls: Sequence[Any]) -> float:
    seconds = []
    for call in calls:
        begun = time.process_time()
        call()
        seconds.append(time.process_time() - begun)
    return min(seconds)


def result(config: Labeled, runs: Sequence[dict[str, Any]], speed: dict[str, float]) -> dict[str, Any]:
    ours = float(np.mean([one["ours"]["auc"] for one in runs]))
    theirs = [one["fasttext"]["auc"] for one in runs if one["fasttext"]]
    peers: dict[str, Any] = {}
    notes = [f"{len(runs)} splits of {config.path.name} by group; megabytes a second and core: " + told(speed)]
    if theirs:
        value = float(np.mean(theirs))
        peers["fasttext"] = {"value": value, "unit": "AUC", "version": f"{PACKAGE} {metadata.version(PACKAGE)}"}
        gaps = [round(one["ours"]["auc"] - one["fasttext"]["auc"], 4) for one in runs]
        notes.append(f"ours less fastText on each split: {gaps}")
    else:
        notes.append("fastText is not installed and left out")
    return {
        "name": "classifier",
        "ours": {"value": ours, "unit": "AUC", "megabytes_per_second": speed},
        "peers": peers,
        "ratio_to_best_peer": ours / peers["fasttext"]["value"] if theirs else None,
        "splits": list(runs),
        "machine": machine(),
        "versions": versions(),
        "notes": notes,
    }


def told(speed: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in speed.items())


if __name__ == "__main__":
    main()
