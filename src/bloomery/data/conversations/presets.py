"""
Data sets of conversations that many have learned from, by name; and mixtures of them.

A preset is nothing but settings of a source: which files, how rows are conversations, how many at most, and the license
that the data set's card states. A recipe overrides any of them, and the resolved recipe holds all.
"""

from collections.abc import Iterator
from typing import Any, Literal

from bloomery.core.config import Config
from bloomery.data import elsewhere

PresetName = Literal[
    "dolly",
    "no_robots",
    "oasst1",
    "slimorca",
    "ultrachat",
    "alpaca",
    "wizardlm",
    "hh_helpful",
    "metamath",
    "capybara",
    "codealpaca",
    "evolcode",
]
MixtureName = Literal["plasma-v3", "plasma-v4"]

ENGLISH = [{"kind": "field", "field": "lang", "one_of": ["en"]}]

PRESETS: dict[str, dict[str, Any]] = {
    "dolly": {
        "dataset": "databricks/databricks-dolly-15k",
        "files": ["databricks-dolly-15k.jsonl"],
        "shape": "alpaca",
        "question_field": "instruction",
        "context_field": "context",
        "answer_field": "response",
        "max_conversations": 15_000,
        "license": "CC-BY-SA-3.0",
    },
    "no_robots": {
        "dataset": "HuggingFaceH4/no_robots",
        "files": ["data/train-*.parquet"],
        "shape": "messages",
        "max_conversations": 10_000,
        "license": "CC-BY-NC-4.0",
    },
    "oasst1": {
        "dataset": "OpenAssistant/oasst1",
        "files": ["data/train-*.parquet"],
        "shape": "tree",
        "accept": ENGLISH,
        "max_conversations": 60_000,
        "license": "Apache-2.0",
    },
    "slimorca": {
        "dataset": "Open-Orca/SlimOrca",
        "files": ["oo-labeled_correct.gpt4.sharegpt.jsonl"],
        "shape": "sharegpt",
        "max_conversations": 200_000,
        "license": "MIT",
    },
    "ultrachat": {
        "dataset": "HuggingFaceH4/ultrachat_200k",
        "files": ["data/train_sft-*.parquet"],
        "shape": "messages",
        "max_conversations": 150_000,
        "license": "MIT",
    },
    "alpaca": {
        "dataset": "tatsu-lab/alpaca",
        "files": ["data/train-*.parquet"],
        "shape": "alpaca",
        "max_conversations": 50_000,
        "license": "CC-BY-NC-4.0",
    },
    "wizardlm": {
        "dataset": "WizardLMTeam/WizardLM_evol_instruct_70k",
        "files": ["alpaca_evol_instruct_70k.json"],
        "shape": "alpaca",
        "max_conversations": 70_000,
        "license": "MIT",
    },
    "hh_helpful": {
        "dataset": "Anthropic/hh-rlhf",
        "files": ["helpful-base/train.jsonl.gz"],
        "shape": "dialogue",
        "messages_field": "chosen",
        "speakers": ["Human:", "Assistant:"],
        "max_conversations": 50_000,
        "license": "MIT",
    },
    "metamath": {
        "dataset": "meta-math/MetaMathQA",
        "files": ["MetaMathQA-395K.json"],
        "shape": "pairs",
        "question_field": "query",
        "answer_field": "response",
        "max_conversations": 50_000,
        "license": "MIT",
    },
    "capybara": {
        "dataset": "LDJnr/Capybara",
        "files": ["CapybaraPure_Decontaminated.jsonl"],
        "shape": "exchanges",
        "messages_field": "conversation",
        "max_conversations": 16_000,
        "license": "Apache-2.0",
    },
    "codealpaca": {
        "dataset": "sahil2801/CodeAlpaca-20k",
        "files": ["code_alpaca_20k.json"],
        "shape": "alpaca",
        "max_conversations": 20_000,
        "license": "CC-BY-4.0",
    },
    "evolcode": {
        "dataset": "theblackcat102/evol-codealpaca-v1",
        "files": ["train.jsonl"],
        "shape": "alpaca",
        "max_conversations": 110_000,
        "license": "Apache-2.0",
    },
}

MIXTURES: dict[str, dict[str, dict[str, int]]] = {
    "plasma-v3": {
        "slimorca": {"max_conversations": 120_000},
        "ultrachat": {"max_conversations": 80_000},
        "wizardlm": {"max_conversations": 50_000},
        "metamath": {"max_conversations": 45_000},
        "alpaca": {"max_conversations": 40_000},
        "hh_helpful": {"max_conversations": 30_000},
        "oasst1": {"max_conversations": 25_000},
        "capybara": {"max_conversations": 15_000},
        "dolly": {"max_conversations": 15_000},
        "no_robots": {"max_conversations": 10_000},
    },
    "plasma-v4": {
        "no_robots": {"max_conversations": 10_000, "copies": 3},
        "dolly": {"max_conversations": 15_000, "copies": 2},
        "codealpaca": {"max_conversations": 20_000},
        "evolcode": {"max_conversations": 30_000},
        "oasst1": {"max_conversations": 8_000},
        "capybara": {"max_conversations": 8_000},
        "slimorca": {"max_conversations": 80_000},
        "wizardlm": {"max_conversations": 35_000},
        "alpaca": {"max_conversations": 35_000},
        "metamath": {"max_conversations": 20_000},
        "ultrachat": {"max_conversations": 32_000, "max_answers": 3},
    },
}
"""
What a pipeline took to finetune models of 235 and 500 M parameters, in its third and fourth version. The fourth also
had four copies of conversations about the model itself, which each model needs of its own: add them as a source.
"""


def filled(cls: type[Config], given: Any) -> Any:
    """The settings of a preset under those that are given. Raises ValueError for a name that is none."""
    if not isinstance(given, dict):
        return given
    preset = given.get("preset", given.get("name"))
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; presets: {', '.join(PRESETS)}")
    defaults = {"name": preset, "preset": preset, **PRESETS[preset]}
    if given.get("config") is not None:
        defaults.pop("files", None)
    return {key: elsewhere.parsed(cls, key, value) for key, value in {**defaults, **given}.items()}


def mixed(name: str) -> Iterator[dict[str, Any]]:
    """The settings of the presets of a mixture."""
    for preset, settings in MIXTURES[name].items():
        yield {"kind": "preset", "name": preset, "preset": preset, **settings}
