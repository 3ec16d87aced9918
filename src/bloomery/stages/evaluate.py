"""The stage `evaluate`: a run -> how well its model answers and predicts, as report.json and report.html."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import DataError
from bloomery.core.io import whole_file, write_json
from bloomery.core.log import progress
from bloomery.core.pipeline import machine, versions
from bloomery.core.records import read_manifest
from bloomery.data import documents as data_documents
from bloomery.data.documents import is_held_out
from bloomery.evaluation import harness, held_out, tasks
from bloomery.evaluation.harness import EvalRequest, QuestionResult
from bloomery.evaluation.held_out import Compression, JudgedAnswer, measure
from bloomery.evaluation.report import render
from bloomery.evaluation.stats import wilson
from bloomery.generate.engine import Completion, Engine
from bloomery.hw import device as devices
from bloomery.stages import instruct, prefer, run_report
from bloomery.stages.config import Evaluate
from bloomery.stages.rollouts import SAMPLES
from bloomery.tokenizer.chat_template import special_tokens
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.weights import hf, locate
from bloomery.weights.hf import Loaded, LoadFormat, ModelLanguage

SAMPLES_SHOWN = 16
CONVERSATIONS = "conversations.jsonl"
CONTINUED = ("def main():\n", "The module ", "Returns ")


def run(config: Evaluate, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    devices.return_freed_memory()
    device = devices.find(config.device)
    last = "prefer" if "prefer" in inputs else "finetune"
    # One model after the other. A GPU may have room for one of them, in the format of its files; CPUs are often slow
    # in short formats.
    dtype: LoadFormat = "auto" if device.is_gpu else "float32"
    words = hf.language(inputs[last] / "model")
    below = partial(hf.load, base_of(inputs), device.torch_device, dtype=dtype)
    base = below()
    talks = HeldOutTalks.drawn(config, inputs, words, base.model.config.context_length)
    bits, continued = bits_per_byte(base, inputs.get("shard"), config, device), list(continuations(base))
    if talks.asked and words.tokenizer.vocab_size > base.model.vocab_size:  # finetuning added tokens
        assert words.chat is not None, "a finetuned model has a template"
        del base
        base = below(special=special_tokens(words.chat.name))
    talks.measure("pretrain", replace(base, language=words))
    del base
    device.release()
    tuned = hf.load(inputs[last] / "model", device.torch_device, dtype=dtype)
    talks.measure(last, tuned)
    asked = held_out.held_out(config.seed, config.toy_questions)
    judged = ask(tuned, asked, config.max_tokens)
    scores = answers(judged, len(asked) - len(judged))
    report = {
        "recipe": out.parent.name,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "machine": machine() | {"device": device.name},
        "model": describe(tuned),
        "answers": scores,
        "bits_per_byte": bits,
        "leaks": leaks(judged, inputs, tuned.tokenizer),
        **talks.written(out),
        **known_tasks(tuned, config, inputs, out),
        "not_searched": not_searched(inputs),
        **run_report.training(inputs),
        **run_report.corpus(inputs),
        "samples": {"answers": chosen(judged), "continuations": continued},
    }
    write_json(out / "report.json", report)
    with whole_file(out / "report.html", "w") as file:
        file.write(render(report))
    write_json(out / "answers.json", [shown(one) for one in judged])
    return {
        **({name: scores[name] for name in ("exact", "ended")} if judged else {}),
        "answers": scores,
        "bits_per_byte": report["bits_per_byte"],
        "leaks": report["leaks"],
        **{name: report[name] for name in ("conversations", "tasks", "core") if name in report},
    }


def not_searched(inputs: Mapping[str, Path]) -> list[str]:
    """What the model was trained on, and is not searched for the questions: the text is not in this run."""
    starts = [
        read_manifest(inputs[name])["config"].get("start_from")
        for name in ("pretrain", "finetune", "prefer")
        if name in inputs
    ]
    texts = [f"the training text of {start}" for start in starts if start]
    imports = "shard" in inputs and read_manifest(inputs["shard"])["config"].get("imported")
    return [*texts, "imported token files"] if imports else texts


def base_of(inputs: Mapping[str, Path]) -> Path:
    """The model before finetuning: of this run, or the one that it started from."""
    if "pretrain" in inputs:
        return inputs["pretrain"] / "model"
    first = inputs["finetune"] if "finetune" in inputs else inputs["prefer"]
    return locate.locate_model(Path(read_manifest(first)["config"]["start_from"]).expanduser())


def known_tasks(tuned: Loaded, config: Evaluate, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    The scores of the tasks of the table, and CORE, over all questions, those that occur in the training text, and the
    others. Writes tasks.jsonl, a line for every question.
    """
    if not config.tasks:
        return {}
    asked = EvalRequest(
        tasks=tuple(name for name in config.tasks if name != tasks.NAME),
        files=tasks.task_files(config.tasks, config.data),
        limit=config.limit,
        num_fewshot=config.num_fewshot,
        samples=config.samples,
        temperature=config.temperature,
        seed=config.seed,
        run_code=config.run_code,
        allow_partial_sandbox=config.allow_partial_sandbox,
    )
    by_task = harness.evaluate(tuned, asked)
    questions = {name: harness.questions(name, asked) for name in by_task}
    parts: dict[str, list[QuestionResult]] = {}
    if tasks.NAME in config.tasks:
        parts = harness.evaluate_core(tuned, asked)
        questions |= harness.core_questions(asked)
    with tempfile.TemporaryDirectory() as scratch:
        dirty = tasks.dirty(questions, trained_on(inputs, tuned.tokenizer), Path(scratch))
    harness.save(out / "tasks.jsonl", by_task | parts, dirty)
    stats: dict[str, Any] = {
        "tasks": {name: harness.scores(name, results, dirty[name]) for name, results in by_task.items()}
    }
    return stats | ({"core": harness.core_scores(parts, dirty)} if parts else {})


@dataclass(frozen=True)
class HeldOutTalks:
    """Validation conversations, and what each model makes of them. Without any, nothing is measured."""

    asked: Sequence[held_out.HeldOutAnswer]
    sampling: SamplingConfig
    scores: dict[str, Any] = field(default_factory=dict)
    """By model: the likelihood of the assistant's messages, and whether the model's own answers end."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """One for every answer."""

    @classmethod
    def drawn(cls, config: Evaluate, inputs: Mapping[str, Path], words: ModelLanguage, context: int) -> "HeldOutTalks":
        """Raises DataError where no conversation has room for an answer in `context` tokens."""
        sampling = SamplingConfig(max_tokens=config.max_tokens, temperature=config.chat_temperature, seed=config.seed)
        if not config.conversations:
            return cls((), sampling)
        longest = context - config.max_tokens
        candidates = held_out.turns(inputs["instruct"], words.tokenizer.hash)
        asked = held_out.drawn(candidates, config.conversations, config.seed, longest)
        if not asked:
            hint = f"Lower evaluate.max_tokens ({config.max_tokens}), which must fit after the question."
            what = f"no validation conversation has an answer after {longest} tokens or fewer"
            raise DataError(what, where="evaluate.conversations", hint=hint)
        return cls(asked, sampling)

    def measure(self, name: str, loaded: Loaded) -> None:
        if not self.asked:
            return
        said: list[Completion] = []
        with progress("evaluate", f"answers of {name}", len(self.asked)) as meter:
            for turn, answer in zip(self.asked, held_out.answers(loaded, self.asked, self.sampling), strict=True):
                said.append(answer)
                self.lines.append({"model": name, **held_out.shown(loaded, turn, answer)})
                meter.at(len(said))
        self.scores[name] = held_out.answer_scores(loaded, self.asked, said)

    def written(self, out: Path) -> dict[str, Any]:
        """What the report says of them. Writes conversations.jsonl, a line for every answer."""
        if not self.asked:
            return {}
        with whole_file(out / CONVERSATIONS, "w") as file:
            for line in self.lines:
                instruct.write_line(file, line)
        sampling = {"max_tokens": self.sampling.max_tokens, "temperature": self.sampling.temperature}
        return {"conversations": {"n": len(self.asked), **sampling, **self.scores}}


def ask(loaded: Loaded, asked: Sequence[held_out.ToyQuestion], max_tokens: int) -> list[JudgedAnswer]:
    """Every question that fits the model's context, in turn, with progress. Raises DataError where none does."""
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size, pack=True)
    asked = held_out.fitting(engine, loaded.renderer, asked)
    judged: list[JudgedAnswer] = []
    with progress("evaluate", "questions", len(asked)) as meter:
        for start in range(0, len(asked), 50):
            judged += held_out.ask(engine, loaded.renderer, asked[start : start + 50], max_tokens)
            meter.at(len(judged))
    return judged


def answers(judged: Sequence[JudgedAnswer], not_asked: int) -> dict[str, Any]:
    """Of all and of each kind; `not_asked` did not fit the model's context."""
    return {
        **held_out.question_scores(judged),
        "not_asked": not_asked,
        "interval": wilson(sum(one.exact for one in judged), len(judged)),
        "by_kind": held_out.table(judged),
    }


def bits_per_byte(base: Loaded, shards: Path | None, config: Evaluate, device: devices.Device) -> dict[str, Any]:
    """Of the pretrained model and of the compressors, over the validation documents, by domain and together."""
    texts: dict[str, list[str]] = {}
    if shards is not None and read_manifest(shards)["config"].get("imported"):
        shards = None  # imported token files have no validation text
    for row in data_documents.read(shards / "held-out") if shards is not None else ():
        texts.setdefault(row["domain"], []).append(row["text"])
    domains = config.domains or tuple(sorted(texts))
    if missing := [domain for domain in domains if domain not in texts]:
        hint = f"Domains with validation documents: {', '.join(sorted(texts))}. Raise shard.val_fraction for more."
        raise DataError(f"no validation document belongs to {', '.join(missing)}", where="evaluate.domains", hint=hint)
    scored = {
        domain: measure(base.model, base.tokenizer, up_to(texts[domain], config.val_bytes), device)
        for domain in domains
    }
    size = sum(one.bytes for one in scored.values())
    return {
        **{name: mean(name, list(scored.values()), size) for name in ("model", "xz", "zstd")},
        "bytes": size,
        "documents": sum(one.documents for one in scored.values()),
        "by_domain": {domain: asdict(one) for domain, one in scored.items()},
    }


def mean(name: str, scored: Sequence[Compression], size: int) -> float | None:
    """Mean over bytes of one predictor's bits per byte; None without validation text."""
    return round(sum(getattr(one, name) * one.bytes for one in scored) / size, 4) if size else None


def up_to(texts: Sequence[str], limit: int) -> list[str]:
    """Whole documents from the front, up to the first that would exceed `limit` bytes; at least one."""
    selected: list[str] = []
    size = 0
    for text in texts:
        if selected and size + len(text.encode()) > limit:
            break
        selected.append(text)
        size += len(text.encode())
    return selected


def leaks(judged: Sequence[JudgedAnswer], inputs: Mapping[str, Path], tokenizer: Tokenizer) -> dict[str, int]:
    """
    How many validation questions occur in the training text: the question with everything before it, or, where the
    facts themselves are for validation, the sentence that answers it.
    """
    numbered_needles = [(number, needle) for number, one in enumerate(judged) for needle in needles(one.question)]
    leaked: set[int] = set()
    for text in trained_on(inputs, tokenizer):
        leaked |= {number for number, needle in numbered_needles if needle in text and stands_in(text, needle)}
    return {"checked": len(judged), "found": len(leaked)}


def trained_on(inputs: Mapping[str, Path], tokenizer: Tokenizer) -> Iterator[str]:
    """All text that a model was trained on: documents outside the validation split, and conversations."""
    trained: Iterator[str] = iter(())
    if "shard" in inputs:
        held_out_share = read_manifest(inputs["shard"])["config"]["val_fraction"]
        documents = (row["text"] for row in data_documents.read(inputs["dedup"] / "kept", ["text"]))
        trained = (text for text in documents if not is_held_out(text, held_out_share))
    answered = instruct.trained_on(inputs["instruct"], tokenizer) if "instruct" in inputs else ()
    preferred = prefer.trained_on(inputs["prefer"], tokenizer) if "prefer" in inputs else ()
    return chain(trained, answered, preferred)


def needles(question: held_out.ToyQuestion) -> list[str]:
    """Text that no training text may hold, if the question is to be new."""
    alone = [question.messages[0]["content"]] if len(question.messages) == 1 else []
    return alone if question.kind.startswith("library") else [question.answer, *alone]


def stands_in(text: str, needle: str) -> bool:
    """Whether `needle` stands in `text` and does not begin inside a word or number: 9 is not 39."""
    position = text.find(needle)
    while position > 0 and text[position - 1].isalnum():
        position = text.find(needle, position + 1)
    return position >= 0


def chosen(judged: Sequence[JudgedAnswer]) -> list[dict[str, Any]]:
    """Some answers to show, right and wrong, every kind if it goes."""
    by_turn = sorted(judged, key=lambda answer: (answer.exact, answer.question.kind))
    wrong = [one for one in by_turn if not one.exact][: SAMPLES_SHOWN // 2]
    kinds: dict[str, JudgedAnswer] = {one.question.kind: one for one in by_turn if one.exact}
    return [shown(one) for one in [*kinds.values(), *wrong][:SAMPLES_SHOWN]]


def shown(answer: JudgedAnswer) -> dict[str, Any]:
    return {
        "kind": answer.question.kind,
        "messages": answer.question.messages,
        "expected": answer.question.answer,
        "said": answer.said,
        "exact": answer.exact,
        "ended": answer.ended,
    }


def continuations(base: Loaded) -> Iterator[dict[str, str]]:
    """What the pretrained model writes after a few beginnings, sampled with a fixed seed."""
    tokenizer, engine = base.tokenizer, Engine(base.model, base.tokenizer.vocab_size, pack=True)
    sampling, stop = replace(SAMPLES, max_tokens=80), tokenizer.end_ids
    for prompt in CONTINUED:
        ids = base.language.text_ids(prompt)
        yield {"prompt": prompt, "text": tokenizer.decode(list(engine.stream(ids, sampling, stop_ids=stop)))}


def describe(loaded: Loaded) -> dict[str, Any]:
    return {
        "parameters": sum(weight.numel() for weight in loaded.model.parameters()),
        "context_length": loaded.model.config.context_length,
        "vocab_size": loaded.model.vocab_size,
        "tokenizer": loaded.tokenizer.hash,
        "template": loaded.renderer.hash,
        "folder": f"{loaded.folder.parent.name}/{loaded.folder.name}",
    }


OF_TASKS = {
    **dict.fromkeys(("out", "num_fewshot", "limit", "max_tokens")),
    **dict.fromkeys(("offline", "no_bos", "run_code", "allow_partial_sandbox"), False),
    **{"data": [], "samples": 1, "temperature": 0.0},
}
"""Options of `bloomery eval` that only benchmarks have, and their defaults."""


def run_command(options: argparse.Namespace) -> None:
    """Ask a model the questions of the demo, and print its scores. Raises DataError for options of benchmarks."""
    if others := [name for name, value in OF_TASKS.items() if getattr(options, name) != value]:
        where = f"--{others[0].replace('_', '-')}"
        raise DataError("is for benchmarks, and none was named", where=where, hint="Add --task NAME, or remove it.")
    said = {name: value for name in ("toy_questions", "seed") if (value := getattr(options, name)) is not None}
    config = Evaluate(**said)
    loaded = hf.load(locate.locate_model(options.model), devices.find(config.device).torch_device, dtype=options.dtype)
    asked = held_out.held_out(config.seed, config.toy_questions)
    judged = ask(loaded, asked, config.max_tokens)
    scores = answers(judged, len(asked) - len(judged))
    if options.json:
        print(json.dumps({"model": describe(loaded), "answers": scores}))
        return
    for kind, row in scores["by_kind"].items():
        print(f"{kind:<22} {row['exact']:7.1%} exact  {row['ended']:7.1%} ended  of {row['n']}")
    low, high = scores["interval"]
    print(
        f"{'all':<22} {scores['exact']:7.1%} exact  {scores['ended']:7.1%} ended  of {scores['n']}  "
        f"(95 %: {low:.1%} to {high:.1%})"
    )
    if scores["not_asked"]:
        print(f"{scores['not_asked']} of {len(asked)} questions did not fit into the model's context and were skipped")
