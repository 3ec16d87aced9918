"""
Well-known corpora by name: location, fields to read, what to exclude, and license.

Many models were trained on these corpora. A preset is nothing but settings of a source; a recipe overrides any of
them. The resolved recipe holds all of them, so that a run can be repeated after this table has changed.
"""

from typing import Any, Literal

SourcePresetName = Literal[
    "fineweb-edu",
    "fineweb",
    "wikipedia",
    "stackexchange",
    "starcoder",
    "arxiv",
    "finemath",
    "cosmopedia",
    "tinystories",
    "tinyshakespeare",
]


def _characters(at_least: int, at_most: int | None = None) -> dict[str, Any]:
    return {"kind": "characters", "at_least": at_least, **({"at_most": at_most} if at_most else {})}


PRESETS: dict[str, dict[str, Any]] = {
    "fineweb-edu": {
        "dataset": "HuggingFaceFW/fineweb-edu",
        "files": ["sample/10BT/*.parquet"],
        "domain": "web",
        "license": "ODC-By-1.0",
        "id_field": "id",
        "accept": [{"kind": "field", "field": "score", "at_least": 3.0}, _characters(200)],
        "max_bytes": 30_000_000_000,
    },
    "fineweb": {
        "dataset": "HuggingFaceFW/fineweb",
        "files": ["sample/10BT/*.parquet"],
        "domain": "web",
        "license": "ODC-By-1.0",
        "id_field": "id",
        "accept": [_characters(200)],
        "max_bytes": 30_000_000_000,
    },
    "wikipedia": {
        "dataset": "wikimedia/wikipedia",
        "files": ["20231101.en/*.parquet"],
        "domain": "wiki",
        "license": "CC-BY-SA-3.0 OR GFDL-1.3-or-later",
        "accept": [_characters(300)],
        "max_bytes": 6_000_000_000,
    },
    "stackexchange": {
        "dataset": "HuggingFaceH4/stack-exchange-preferences",
        "files": ["**/*.parquet"],
        "domain": "qa",
        "license": "CC-BY-SA-4.0",
        "best": {"field": "answers", "by": "pm_score"},
        "template": "Question: {question}\n\nAnswer: {answers.text}",
        "markup": "html",
        "main_content": False,
        "accept": [{"kind": "field", "field": "answers.pm_score", "at_least": 1.0}, _characters(100)],
        "max_bytes": 4_000_000_000,
    },
    "starcoder": {
        "dataset": "bigcode/starcoderdata",
        "files": ["python/*.parquet", "javascript/*.parquet"],
        "domain": "code",
        "license": "permissive, by file: see https://huggingface.co/datasets/bigcode/the-stack",
        "text_field": "content",
        "accept": [
            _characters(100, 50_000),
            {"kind": "lines", "at_least": 5, "longest": 500},
            {"kind": "code_lines", "at_least": 0.3},
        ],
        "max_bytes": 8_000_000_000,
    },
    "arxiv": {
        "dataset": "ccdv/arxiv-classification",
        "files": ["data/train-*.parquet"],
        "domain": "arxiv",
        "license": "by paper: see https://info.arxiv.org/help/license",
        "accept": [_characters(200)],
        "max_bytes": 3_000_000_000,
    },
    "finemath": {
        "dataset": "HuggingFaceTB/finemath",
        "files": ["finemath-4plus/*.parquet"],
        "domain": "math",
        "license": "ODC-By-1.0",
        "accept": [_characters(200)],
        "max_bytes": 6_000_000_000,
    },
    "cosmopedia": {
        "dataset": "HuggingFaceTB/cosmopedia",
        "files": ["data/**/*.parquet"],
        "domain": "synthetic",
        "license": "Apache-2.0",
        "accept": [_characters(200)],
        "max_bytes": 5_000_000_000,
    },
    "tinystories": {
        "dataset": "roneneldan/TinyStories",
        "files": ["data/train-*.parquet"],
        "domain": "stories",
        "license": "CDLA-Sharing-1.0",
    },
    "tinyshakespeare": {
        "address": "https://raw.githubusercontent.com/karpathy/char-rnn/"
        "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
        "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "domain": "plays",
        "license": "public domain",
    },
}
"""
What the corpora of the web, wikipedia, questions, code and papers leave out, and how much of them is taken, is what a
pipeline took that trained models of 500 M parameters on them; max_bytes is of text, and ends the download.

- fineweb-edu: `score` is the classifier's number. The set was cut at the rounded one (from 2.5 on); 3 is stricter.
- fineweb: the random sample of 10 billion tokens, like that of fineweb-edu.
- stackexchange: questions with two answers and more, as HTML. pm_score is log2(1 + votes), rounded, plus one for the
  accepted answer; the best answer is the one with the highest, and has to reach 1.
- starcoder: gated; accept its terms on its page. A folder for each language: `files` takes others. What the hub calls
  the-stack-dedup is where licenses of single files are told.
- arxiv: the papers of a benchmark, its part for training, without the labels: about 2 GB. Papers keep the licenses of
  their authors.
- finemath: of its two cuts the better one (4plus; `files = ["finemath-3plus/*.parquet"]` takes the larger).
- cosmopedia: texts written by Mixtral-8x7B-Instruct, in eight folders: textbooks, stories, how-tos, course notes.
- tinystories: of the set's files the one that its card shows, without the newer stories by GPT-4 alone.
- tinyshakespeare: one document of 1.1 MB.
"""
