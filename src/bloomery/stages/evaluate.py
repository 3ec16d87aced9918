"""The stage `evaluate`: a run -> how well its model answers and predicts, as report.json and report.html."""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from bloomery.core.bounds import TEMPERATURE
from bloomery.core.errors import DataError
from bloomery.core.io import whole_file, write_json
from bloomery.core.log import progress
from bloomery.core.pipeline import machine, read_manifest, versions
from bloomery.data import documents as data_documents
from bloomery.data.documents import is_held_out
from bloomery.evaluation import contamination, harness, held_out, tasks
from bloomery.evaluation.harness import EvalRequest, QuestionResult
from bloomery.evaluation.held_out import JudgedAnswer
from bloomery.evaluation.perplexity import Compression, measure
from bloomery.evaluation.report import render
from bloomery.evaluation.stats import wilson
from bloomery.generate.engine import Engine
from bloomery.hw import device as devices
from bloomery.stages import execution, instruct, prefer
from bloomery.stages.config import Evaluate
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.weights import hf
from bloomery.weights.hf import Loaded

SAMPLES_SHOWN = 16
CONVERSATIONS = "conversations.jsonl"
CONTINUED = ("def main():\n", "The module ", "Returns ")


def run(config: Evaluate, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    devices.return_freed_memory()
    device = devices.find(config.device)
    last = "prefer" if "prefer" in inputs else "finetune"
    tuned = hf.load(inputs[last] / "model", device.place)
    base = hf.load(inputs["pretrain"] / "model", device.place)
    asked = held_out.held_out(config.seed, config.questions)
    judged = ask(tuned, asked, config.max_tokens)
    scores = answers(judged, len(asked) - len(judged))
    report = {
        "recipe": out.parent.name,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "machine": machine() | {"device": device.name},
        "model": describe(tuned),
        "answers": scores,
        "bits_per_byte": bits_per_byte(base, inputs["shard"], config, device),
        "leaks": leaks(judged, inputs, tuned.tokenizer),
        **held_out_talks({"pretrain": replace(base, renderer=tuned.renderer), last: tuned}, config, inputs, out),
        **known_tasks(tuned, config, inputs, out),
        **execution.training(inputs),
        **execution.corpus(inputs),
        "samples": {"answers": chosen(judged), "continuations": list(continuations(base))},
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


def known_tasks(tuned: Loaded, config: Evaluate, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    The scores of the tasks of the table, and CORE, over all questions, those that stand in the training text, and the
    others. Writes tasks.jsonl, a line for every question.
    """
    if not config.tasks:
        return {}
    asked = EvalRequest(
        tasks=tuple(name for name in config.tasks if name != tasks.NAME),
        place=tasks.place(config.tasks, config.data),
        limit=config.limit,
        shots=config.shots,
        samples=config.samples,
        temperature=config.temperature,
        seed=config.seed,
        run_code=config.run_code,
        weaker_sandbox=config.weaker_sandbox,
    )
    found = harness.evaluate(tuned, asked)
    questions = {name: harness.questions(name, asked) for name in found}
    parts: dict[str, list[QuestionResult]] = {}
    if tasks.NAME in config.tasks:
        parts = harness.evaluate_core(tuned, asked)
        questions |= harness.core_questions(asked)
    with tempfile.TemporaryDirectory() as scratch:
        dirty = contamination.dirty(questions, trained_on(inputs, tuned.tokenizer), Path(scratch))
    harness.save(out / "tasks.jsonl", found | parts, dirty)
    told: dict[str, Any] = {
        "tasks": {name: harness.scores(name, results, dirty[name]) for name, results in found.items()}
    }
    return told | ({"core": harness.core_scores(parts, dirty)} if parts else {})


def held_out_talks(
    models: Mapping[str, Loaded], config: Evaluate, inputs: Mapping[str, Path], out: Path
) -> dict[str, Any]:
    """
    How each model does on held-out conversations: the likelihood of what the assistant says, and whether its own
    answers end. Writes conversations.jsonl, a line for every answer.
    """
    if not config.conversations:
        return {}
    first = next(iter(models.values()))
    longest = first.model.config.context - config.max_tokens
    found = held_out.turns(inputs["instruct"], first.tokenizer.hash)
    asked = held_out.drawn(found, config.conversations, config.seed, longest)
    if not asked:
        hint = f"Lower evaluate.max_tokens ({config.max_tokens}), which has to fit behind the question."
        what = f"no held-out conversation has an answer after {longest} tokens or fewer"
        raise DataError(what, where="evaluate.conversations", hint=hint)
    how: dict[str, Any] = {"max_tokens": config.max_tokens, "temperature": config.answer_temperature}
    told: dict[str, Any] = {"n": len(asked), **how}
    done = 0
    with (
        whole_file(out / CONVERSATIONS, "w") as file,
        progress("evaluate", "answers", len(asked) * len(models)) as meter,
    ):
        for name, loaded in models.items():
            said = []
            for turn, one in zip(asked, held_out.answers(loaded, asked, seed=config.seed, **how), strict=True):
                said.append(one)
                file.write(json.dumps({"model": name, **held_out.shown(loaded, turn, one)}, ensure_ascii=False) + "\n")
                meter.at(done := done + 1)
            told[name] = held_out.answer_scores(loaded, asked, said)
    return {"conversations": told}


def ask(loaded: Loaded, asked: Sequence[held_out.ToyQuestion], max_tokens: int) -> list[JudgedAnswer]:
    """Every question that fits the model's context, in turn, with progress. Raises DataError where none does."""
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size)
    asked = held_out.fitting(engine, loaded.renderer, asked)
    judged: list[JudgedAnswer] = []
    with progress("evaluate", "questions", len(asked)) as meter:
        for start in range(0, len(asked), 50):
            judged += held_out.ask(engine, loaded.renderer, asked[start : start + 50], max_tokens)
            meter.at(len(judged))
    return judged


def answers(judged: Sequence[JudgedAnswer], not_asked: int) -> dict[str, Any]:
    """Of all and of each kind; `not_asked` did not fit the model's context."""
    right, kinds = sum(one.exact for one in judged), held_out.table(judged)
    return {
        **held_out.question_scores(judged),
        "not_asked": not_asked,
        "interval": wilson(right, len(judged)),
        "by_kind": kinds,
    }


def bits_per_byte(base: Loaded, shards: Path, config: Evaluate, device: devices.Device) -> dict[str, Any]:
    """Of the pretrained model and of the compressors, over the held-out documents, by domain and together."""
    texts: dict[str, list[str]] = {}
    for row in data_documents.read(shards / "held-out"):
        texts.setdefault(row["domain"], []).append(row["text"])
    wanted = config.domains or tuple(sorted(texts))
    if missing := [domain for domain in wanted if domain not in texts]:
        hint = f"Domains with held-out documents: {', '.join(sorted(texts))}. Raise shard.hold_out for more."
        raise DataError(f"no document of {', '.join(missing)} was held out", where="evaluate.domains", hint=hint)
    scored = {
        domain: measure(base.model, base.tokenizer, up_to(texts[domain], config.heldout_bytes), device)
        for domain in wanted
    }
    size = sum(one.bytes for one in scored.values())
    return {
        **{name: mean(name, list(scored.values()), size) for name in ("model", "xz", "zstd")},
        "bytes": size,
        "documents": sum(one.documents for one in scored.values()),
        "by_domain": {domain: asdict(one) for domain, one in scored.items()},
    }


def mean(name: str, scored: Sequence[Compression], size: int) -> float | None:
    """Mean over bytes of one predictor's bits per byte; None where nothing was held out."""
    return round(sum(getattr(one, name) * one.bytes for one in scored) / size, 4) if size else None


def up_to(texts: Sequence[str], limit: int) -> list[str]:
    """Whole documents from the front, up to the first that would exceed `limit` bytes; at least one."""
    taken: list[str] = []
    size = 0
    for text in texts:
        if taken and size + len(text.encode()) > limit:
            break
        taken.append(text)
        size += len(text.encode())
    return taken


def leaks(judged: Sequence[JudgedAnswer], inputs: Mapping[str, Path], tokenizer: Tokenizer) -> dict[str, int]:
    """
    How many held-out questions stand somewhere in the training text: the question with all that came before it, or,
    where facts themselves are held out, the sentence that answers it.
    """
    wanted = [(number, needle) for number, one in enumerate(judged) for needle in needles(one.question)]
    found: set[int] = set()
    for text in trained_on(inputs, tokenizer):
        found |= {number for number, needle in wanted if needle in text and stands_in(text, needle)}
    return {"checked": len(judged), "found": len(found)}


def trained_on(inputs: Mapping[str, Path], tokenizer: Tokenizer) -> Iterator[str]:
    """All text that a model was trained on: documents that were not held out, and conversations."""
    held_out_share = read_manifest(inputs["shard"])["config"]["hold_out"]
    documents = (row["text"] for row in data_documents.read(inputs["dedup"] / "kept", ["text"]))
    trained = (text for text in documents if not is_held_out(text, held_out_share))
    preferred = prefer.trained_on(inputs["prefer"], tokenizer) if "prefer" in inputs else ()
    return chain(trained, instruct.trained_on(inputs["instruct"], tokenizer), preferred)


def needles(question: held_out.ToyQuestion) -> list[str]:
    """Text that no training text may hold, if the question is to be new."""
    alone = [question.messages[0]["content"]] if len(question.messages) == 1 else []
    return alone if question.kind.startswith("library") else [question.answer, *alone]


def stands_in(text: str, needle: str) -> bool:
    """Whether `needle` stands in `text` and does not begin inside a word or number: 9 is not 39."""
    place = text.find(needle)
    while place > 0 and text[place - 1].isalnum():
        place = text.find(needle, place + 1)
    return place >= 0


def chosen(judged: Sequence[JudgedAnswer]) -> list[dict[str, Any]]:
    """Some answers to show, right and wrong, every kind if it goes."""
    by_turn = sorted(judged, key=lambda one: (one.exact, one.question.kind))
    wrong = [one for one in by_turn if not one.exact][: SAMPLES_SHOWN // 2]
    kinds: dict[str, JudgedAnswer] = {one.question.kind: one for one in by_turn if one.exact}
    return [shown(one) for one in [*kinds.values(), *wrong][:SAMPLES_SHOWN]]


def shown(one: JudgedAnswer) -> dict[str, Any]:
    return {
        "kind": one.question.kind,
        "messages": one.question.messages,
        "expected": one.question.answer,
        "said": one.said,
        "exact": one.exact,
        "ended": one.ended,
    }


def continuations(base: Loaded) -> Iterator[dict[str, str]]:
    """What the pretrained model writes after a few beginnings, drawn with a fixed seed."""
    tokenizer = base.tokenizer
    engine = Engine(base.model, tokenizer.vocab_size)
    for prompt in CONTINUED:
        ids = [tokenizer.document_id, *tokenizer.encode(prompt)]
        stop = frozenset({tokenizer.document_id, tokenizer.end_id})
        said = list(engine.stream(ids, max_tokens=80, temperature=TEMPERATURE, top_p=0.95, seed=0, stop_ids=stop))
        yield {"prompt": prompt, "text": tokenizer.decode(said)}


def describe(loaded: Loaded) -> dict[str, Any]:
    return {
        "parameters": sum(weight.numel() for weight in loaded.model.parameters()),
        "context": loaded.model.config.context,
        "vocab_size": loaded.model.vocab_size,
        "tokenizer": loaded.tokenizer.hash,
        "template": loaded.renderer.template.hash,
        "folder": f"{loaded.folder.parent.name}/{loaded.folder.name}",
    }
