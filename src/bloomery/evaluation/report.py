"""
report.json as one page: report.html, which needs nothing but itself.

A section is a function of the whole report. What is not there is shown as a dash: nothing is guessed, and a report of
half a run is a page too.
"""

from collections.abc import Mapping
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import Bar, Html, count, decimal, number, percent, tag
from bloomery.evaluation.classifier_report import classifiers
from bloomery.evaluation.corpus_report import dropped, duplicates, fetched, funnel, the_mix, tokenizer
from bloomery.evaluation.pieces import (
    NOTHING,
    Fact,
    Report,
    Section,
    at,
    cell,
    facts,
    folded,
    listed,
    named,
    note,
    sequence,
    text,
    tile,
)
from bloomery.evaluation.preference_report import preferred
from bloomery.evaluation.style import STYLE
from bloomery.evaluation.talk_report import held_out_talks, talk_tiles
from bloomery.evaluation.task_report import known_tasks
from bloomery.evaluation.training_report import training

Sections = tuple[tuple[str, str, Section], ...]
"""Anchor, title and content of each."""

RIVALS = {"model": "this model", "xz": "xz", "zstd": "zstd"}
COPYING = " The library's questions test copying: what they ask for stands in them, and their answers in training too."


def render(report: Report, sections: Sections | None = None) -> str:
    """
    The page for the data of report.json, as HTML: all of SECTIONS, or some.

    Any part of the data may be missing. All text in it is escaped, wherever it came from.
    """
    title = f"{at(report, 'recipe') or 'A run'}: report"
    shown = SECTIONS if sections is None else sections
    contents = [tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name, _ in shown]
    made = [tag("section", tag("h2", name), *(make(report) or [NOTHING]), id=anchor) for anchor, name, make in shown]
    head = Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">')
    when = text(at(report, "made")).replace("T", " ").replace("Z", " UTC")
    body = [
        tag(
            "header",
            tag("p", "Bloomery report", class_="over"),
            tag("h1", text(at(report, "recipe"))),
            tag("p", when) if at(report, "made") else None,
        ),
        tag("nav", tag("ol", *contents), aria_label="Contents"),
        tag("main", *made),
        tag("footer", *foot(report)),
    ]
    styled = tag("head", head, tag("title", title), tag("style", Html(STYLE)))
    return f"<!doctype html>\n{tag('html', styled, tag('body', *body), lang='en')}\n"


# --- sections ------------------------------------------------------------------------------------------------------


def headline(report: Report) -> list[object]:
    answers, model, leaks = named(report, "answers"), named(report, "model"), named(report, "leaks")
    exact, (low, high) = number(answers.get("exact")), [*map(number, sequence(answers, "interval")), None, None][:2]
    reach = charts.interval(low, exact, high) if low is not None and exact is not None and high is not None else None
    asked = f"of {count(answers.get('n'))} held-out questions; 95% interval {percent(low)} to {percent(high)}"
    if answers.get("not_asked"):
        asked += f"; {count(answers.get('not_asked'))} more did not fit the model's context and were not asked"
    found = number(leaks.get("found"))
    seen = f"of {count(leaks.get('checked'))} held-out questions or answers stand in the training text"
    shape = f"context of {count(model.get('context'))} tokens, vocabulary of {count(model.get('vocab_size'))}"
    tiles = [
        tile("Answers exactly right", percent(exact), asked, reach),
        tile("Answers that ended", percent(answers.get("ended")), "by themselves; the others ran into the limit"),
        tile("Leaks", count(found), seen, look="tile wrong" if found else "tile"),
    ]
    if answers.get("n") == 0:  # of the small worlds, which the run may not have
        tiles = talk_tiles(report)
    tiles.append(tile("Parameters", charts.short(model.get("parameters")), shape))
    bits = named(report, "bits_per_byte")
    known = [(name, number(bits.get(key)), key != "model") for key, name in RIVALS.items()]
    rows = [Bar(name, value, decimal(value), quiet=quiet) for name, value, quiet in known]
    chart = charts.bars("Bits per byte of held-out text", rows, axis="bits per byte (less is better)")
    over = f"Over {charts.size(bits.get('bytes'))} in {count(bits.get('documents'))} held-out documents."
    return [tag("div", *tiles, class_="tiles"), chart, note(over, " The model is measured as it was pretrained.")]


def trained(report: Report) -> list[object]:
    return [*training(report), *preferred(report)]


def by_kind(report: Report) -> list[object]:
    rows: list[list[object]] = []
    if at(report, "answers", "n") == 0:
        return [note("No question of the small worlds was asked: the run has none.")]
    for kind, scores in named(report, "answers", "by_kind").items():
        cells = [cell(f"{kind}, {key}", at(scores, key), percent, 1.0, key == "ended") for key in ("exact", "ended")]
        rows.append([kind, count(at(scores, "n")), *cells])
    told = "Right means equal to the expected answer, letter by letter, and ended by the model itself."
    copied = COPYING if any(str(row[0]).startswith("library") for row in rows) else ""
    table = charts.table(["Kind of question", "Asked", "Exactly right", "Ended"], rows)
    return [table, note(told, copied)] if rows else []


def by_domain(report: Report) -> list[object]:
    domains = named(report, "bits_per_byte", "by_domain")
    top = max((number(at(scores, key)) or 0.0 for scores in domains.values() for key in RIVALS), default=0.0) or 1.0
    rows: list[list[object]] = []
    for domain, scores in domains.items():
        bits = [cell(f"{domain}, {RIVALS[k]}", at(scores, k), decimal, top, k != "model") for k in RIVALS]
        rows.append([domain, *bits, charts.size(at(scores, "bytes")), count(at(scores, "documents"))])
    told = "Bits per byte; less is better. xz and zstd compress the same text."
    heads = ["Domain", *RIVALS.values(), "Text", "Documents"]
    return [charts.table(heads, rows), note(told)] if rows else []


def answers(report: Report) -> list[object]:
    found = listed(report, "samples", "answers")
    parts: list[object] = []
    for title, right in (("Right", True), ("Wrong", False), ("Not judged", None)):
        cards = [conversation(one) for one in found if one.get("exact") is right]
        parts += [tag("h3", f"{title} ({len(cards)} shown)"), folded(cards, "cards")] if cards else []
    return parts if found else []


def conversation(one: Mapping[str, Any]) -> Html:
    turns = [(text(message.get("role")), text(message.get("content"))) for message in listed(one, "messages")]
    said = [*turns, ("assistant", text(one.get("said")))]
    bubbles = [
        tag("p", tag("span", f"{role}: ", class_="who"), content, class_=f"bubble {role}", dir="auto")
        for role, content in said
    ]
    right = one.get("exact")
    late = " It did not end by itself." if one.get("ended") is False else ""
    lead, look = ("✗ expected: ", "verdict wrong") if right is False else ("expected: ", "verdict")
    verdict = tag("p", lead, tag("q", text(one.get("expected"))), late, class_=look)
    if right:
        verdict = tag("p", "✓ exactly right", class_="verdict right")
    head = tag("p", tag("b", text(one.get("kind"))), class_="tagged")
    return tag("article", head, tag("div", *bubbles, class_="talk"), verdict, class_="card")


def continuations(report: Report) -> list[object]:
    cards = [
        tag("p", tag("b", text(one.get("prompt"))), text(one.get("text")), class_="card quote", dir="auto")
        for one in listed(report, "samples", "continuations")
    ]
    told = note("The beginning in bold was given; the model wrote the rest.")
    return [told, folded(cards, "cards wide")] if cards else []


def time_spent(report: Report) -> list[object]:
    stages = listed(report, "stages")
    whole = sum(number(one.get("seconds")) or 0.0 for one in stages)
    unit, name = (60.0, "minutes") if whole >= 300 else (1.0, "seconds")
    rows = []
    for one in stages:
        seconds = number(one.get("seconds"))
        label = text(one.get("stage")) + (", since it was resumed" if one.get("resumed") else "")
        rows.append(Bar(label, None if seconds is None else seconds / unit, charts.duration(seconds)))
    told = note(f"Together: {charts.duration(whole)}.")
    return [charts.bars("Time by stage", rows, axis=name), told] if rows else []


SOURCES = (
    ("Answers, bits per byte, leaks, samples, this page", "evaluate", "report.json"),
    ("Known tasks, question by question", "evaluate", "tasks.jsonl"),
    *(("Curves of training", stage, "metrics.jsonl, samples.jsonl") for stage in ("pretrain", "finetune", "prefer")),
    ("Mix", "shard", "manifest.json"),
    ("Conversations", "instruct", "report.html, rejected.jsonl, dropped.jsonl"),
    ("Documents read and rejected", "fetch", "manifest.json, rejected/"),
    ("Documents dropped", "filter", "manifest.json, dropped/"),
    ("Classifiers", "classify", "NAME/classifier.json"),
    ("Duplicates", "dedup", "manifest.json, duplicates/"),
    ("Bytes per token", "tokenizer", "manifest.json"),
)


def again(report: Report) -> list[object]:
    folders = {text(one.get("stage")): text(one.get("folder")) for one in listed(report, "stages")}
    rows = [
        [name, tag("code", f"bloomery run RECIPE --only {stage}"), tag("code", f"{folders.get(stage, '…')}/{files}")]
        for name, stage, files in SOURCES
        if not folders or stage in folders
    ]
    told = "RECIPE is the recipe file of this run. A stage that is done is not run again: put its folder aside first."
    return [tag("div", charts.table(["Number", "Command", "Where it is written"], rows), class_="commands"), note(told)]


def foot(report: Report) -> list[object]:
    model = named(report, "model")
    known: list[Fact] = [(name, text(value)) for name, value in named(report, "versions").items()]
    known += [(name, text(value)) for name, value in named(report, "machine").items()]
    if model:
        known += [(f"{name} hash", tag("code", text(model.get(name)))) for name in ("tokenizer", "template")]
        known.append(("model folder", tag("code", text(model.get("folder")))))
    return [facts(known, look="foot")]


DATA: Sections = (
    ("read", "What was read", fetched),
    ("dropped", "What was dropped", dropped),
    ("classifier", "Classifiers", classifiers),
    ("duplicates", "Duplicates", duplicates),
    ("tokenizer", "The tokenizer", tokenizer),
)
TRAINING: Sections = (("curves", "Training", trained),)
MIX: Sections = (("mix", "The mix", the_mix),)
WORK: Sections = (("time", "Where the time went", time_spent), ("again", "Each number again", again))

SECTIONS: Sections = (
    ("headline", "In short", headline),
    ("answers", "Held-out answers by kind", by_kind),
    ("talks", "Held-out conversations", held_out_talks),
    ("text", "Held-out text by domain", by_domain),
    ("tasks", "Known tasks", known_tasks),
    *TRAINING,
    *MIX,
    *DATA,
    ("samples", "Answers to read", answers),
    ("continuations", "Continuations", continuations),
    *WORK,
)
IN_SHORT: Sections = (("short", "In short", funnel),)
DATA_SECTIONS: Sections = (*IN_SHORT, *DATA, *MIX, *WORK)
"""Of the page that a run has before there is a model."""


def before_evaluation(*, read: bool, trained: bool) -> Sections:
    """Of the page of a run that has read documents, or has trained a model, or both, and is not evaluated."""
    return (*IN_SHORT[:read], *TRAINING[:trained], *DATA[: len(DATA) if read else 0], *MIX, *WORK)
