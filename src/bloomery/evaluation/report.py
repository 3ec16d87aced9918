"""
Render report.json as report.html, a single page that needs no other file.

A section is a function of the whole report. Missing values appear as a dash, and nothing is guessed. A report of
half a run is a page too.

The sections are:

    training       loss, the gradients of each layer, and time, during the training of a model
    preferences    margins or rewards, during training, and before and after it
    tasks          results of benchmarks with their intervals, clean and dirty
    conversations  how many, how long, what is in the loss and what was dropped; results
                   on validation conversations, before and after finetuning

All sections of this page share one file because they read the same data and end up on the same page.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import (
    DASH,
    NOTHING,
    STYLE,
    Bar,
    Curve,
    Html,
    Report,
    Section,
    Tile,
    at,
    cell,
    count,
    counted,
    decimal,
    facts,
    folded,
    heat,
    join,
    listed,
    named,
    note,
    number,
    percent,
    scored,
    sequence,
    tag,
    tallied,
    text,
    tile,
)
from bloomery.evaluation.data_report import classifiers, dropped, duplicates, fetched, funnel, the_mix, tokenizer


def known_tasks(report: Report) -> list[object]:
    rows: list[list[object]] = []
    looked = False
    for name, task in named(report, "tasks").items():
        for metric, score in named(task, "scores").items():
            parts = [_part(task, part, metric) for part in ("clean", "dirty")]
            looked = looked or at(task, "dirty_n") is not None
            chance = percent(at(task, "chance")) if metric in ("acc", "acc_norm") else DASH
            rows.append([text(name), text(metric), scored(metric, score), count(at(score, "n")), chance, *parts])
    heads = ["Task", "Score", "Value (95% interval)", "Questions", "Chance", "Clean", "Dirty"]
    others = ", ".join(text(one) for one in sequence(report, "not_searched"))
    note_of_search = f"{LOOKED}{f' Not searched: {others}.' if others else ''}" if looked else ""
    content = [charts.table(heads, rows), note(TOLD, note_of_search)] if rows else []
    cuts = [(text(name), number(at(task, "prompts_cut"))) for name, task in named(report, "tasks").items()]
    content += [note(f"{name}: {count(cut)} prompts were longer than the context.") for name, cut in cuts if cut]
    return [*content, *_core(report)]


TOLD = (
    "acc: the most likely choice is correct; acc_norm: the most likely choice per byte. tasks.jsonl has every question."
)
LOOKED = (
    " Dirty questions occur in the training text: 13 words in a row, or the whole question. Clean questions do not."
)


def _core(report: Report) -> list[object]:
    core = named(report, "core")
    if not core:
        return []
    missing = [text(one) for one in sequence(core, "missing")]
    num_dirty, lost = number(core.get("dirty_n")), sequence(core, "clean", "missing")
    clean = ""
    if num_dirty:
        without = f", without {len(lost) - len(missing)} completely dirty tasks" * (len(lost) > len(missing))
        others = f"on the other questions it is {_mean(core, 'clean')}{without}"
        clean = f" {count(num_dirty)} questions occur in the training text; {others}."
    if not missing:
        return [note(f"CORE, the mean of 22 centered accuracies: {_mean(core)}.{clean}")]
    sentence = f"Mean of {22 - len(missing)} centered accuracies of CORE's 22: {_mean(core)}.{clean} "
    return [note(sentence, f"It is not CORE: {', '.join(missing)} are missing.")]


def _mean(core: Any, *path: str) -> str:
    low, high, mean = (number(at(core, *path, name)) for name in ("low", "high", "mean_of_parts"))
    return DASH if mean is None or low is None or high is None else f"{mean:.4f} ({low:.4f} to {high:.4f})"


def _part(task: Any, subset: str, metric: str) -> Html | str:
    score = named(task, subset, metric)
    under = tag("span", f"of {count(score.get('n'))}", class_="under")
    return join(scored(metric, score), under) if number(score.get("n")) else DASH


MODELS = {"pretrain": "before finetuning", "finetune": "after finetuning", "prefer": "after preference tuning"}


def talk_tiles(report: Report) -> list[Html]:
    """Of the last model that was asked."""
    stats = named(report, "conversations")
    last = next((model for model in reversed(MODELS) if model in stats), None)
    if last is None:
        return []
    ended, bits = at(stats, last, "ended", "value"), at(stats, last, "bits_per_byte")
    low, high = (percent(at(stats, last, "ended", key)) for key in ("low", "high"))
    asked = f"of {count(stats.get('n'))}, before the token limit; 95% interval {low} to {high}"
    caption = "of the assistant's text in validation conversations"
    return [tile("Ended answers", percent(ended), asked), tile("Bits per byte", decimal(bits), caption)]


def held_out_talks(report: Report) -> list[object]:
    stats = named(report, "conversations")
    rows = [_row(name, named(stats, model)) for model, name in MODELS.items() if model in stats]
    heads = ["Model", "Ended answers (95% interval)", "Bits per byte", "Perplexity", "Length, model", "Length, data"]
    warmth = number(stats.get("temperature"))
    drawn = "at temperature 0" if warmth == 0 else f"at temperature {text(stats.get('temperature'))}"
    asked = f"The model answered once in each of {count(stats.get('n'))} validation conversations, with at most "
    how = f"{count(stats.get('max_tokens'))} tokens, {drawn}."
    measured = " Bits per byte and perplexity are of the answers in the data. Lengths are means. "
    measured += "conversations.jsonl has every answer."
    return [charts.table(heads, rows), note(asked, how, measured)] if rows else []


def _row(name: str, stats: Mapping[str, Any]) -> list[object]:
    ended = scored("ended", stats.get("ended"))
    sizes = [decimal(at(stats, "length", key), 1) for key in ("said", "given")]
    return [name, ended, decimal(stats.get("bits_per_byte")), decimal(stats.get("perplexity")), *sizes]


SMOOTHING = 20
"""A smoothed curve is a mean over one such part of its points to either side."""
COLUMNS = 60
"""Of a picture of gradients over the run, at most."""
PASSES = ("pretrain", "finetune")
PHASES = {
    "data": "loading data",
    "forward_backward": "forward and backward",
    "optimizer": "clipping and update",
    "hooks": "logging, saving, evaluating",
}

ReportRows = Sequence[Mapping[str, Any]]


def training(report: Report) -> list[object]:
    parts: list[object] = []
    known = [phase for phase in PASSES if listed(report, "curves", phase)]
    for phase in known or PASSES:
        rows = listed(report, "curves", phase)
        parts.append(tag("h3", phase.capitalize()))
        parts += phase_curves(phase.capitalize(), rows) if rows else [NOTHING]
        parts += gradient_flow(rows) + time_by_phase(rows) + troubles(rows) + written(report, phase)
    return parts


def phase_curves(phase: str, rows: ReportRows) -> list[object]:
    loss, checked = series(rows, "loss"), series(rows, "validation_loss")
    reach = max(1, len(loss) // SMOOTHING)
    drawn = [
        Curve("training loss", loss, "faint"),
        Curve(f"moving average of {2 * reach + 1} logged steps", charts.smoothed(loss, reach)),
        Curve("validation loss", checked, "dots"),
    ]
    speeds = [value for _, value in series(rows, "tokens_per_second") if value > 0]
    bits, shares = series(rows, "validation_bits_per_byte"), [value for _, value in series(rows, "mfu")]
    last: list[Tile] = [
        ("Steps", count(max((x for x, _ in loss + checked), default=None))),
        ("Last training loss", decimal(loss[-1][1] if loss else None)),
        ("Last validation loss", decimal(checked[-1][1] if checked else None)),
        ("Median speed", f"{count(statistics.median(speeds) if speeds else None)} tokens/s"),
    ]
    if bits:
        last.insert(3, ("Last validation bits per byte", decimal(bits[-1][1])))
    if shares:
        last.append(("Median MFU (share of the measured peak)", percent(statistics.median(shares))))
    if memory := series(rows, "memory_bytes"):
        last.append(("Peak memory", charts.size(max(value for _, value in memory))))
    rate, norm = (Curve(key, series(rows, key)) for key in ("learning_rate", "gradient_norm"))
    small = [
        charts.curves("Learning rate", [rate], x_axis="step", y_axis="learning rate", from_zero=True),
        charts.curves("Gradient norm", [norm], x_axis="step", y_axis="norm before clipping", from_zero=True),
    ]
    if update := relative_updates(rows):
        curve = Curve("update / weights", update)
        title = "Update size"
        small.append(charts.curves(title, [curve], x_axis="step", y_axis="norm of update / weights", from_zero=True))
    big = charts.curves(f"{phase}: loss", drawn, x_axis="step", y_axis="loss in nats per token")
    return [facts(last), big, tag("div", *small, class_="small")]


def gradient_flow(rows: ReportRows) -> list[object]:
    """How large the gradient of each layer was: over the run, and layer by layer at its beginning, middle and end."""
    flows = [(number(row.get("step")), named(row, "gradient_flow")) for row in rows]
    seen = [(step, flow) for step, flow in flows if step is not None and flow]
    if not seen:
        return []
    layers = list(seen[0][1])
    seen = [seen[n * len(seen) // min(len(seen), COLUMNS)] for n in range(min(len(seen), COLUMNS))]
    steps = [step for step, _ in seen]
    picture = heat(
        "Gradient flow: norm of each layer's gradient over the run",
        [(layer, [number(flow.get(layer)) for _, flow in seen]) for layer in layers],
        steps,
        x_axis="step",
        unit="norm",
    )
    looks = {0: "faint", len(seen) // 2: "dots", len(seen) - 1: "strong"}
    drawn = [Curve(f"step {charts.short(steps[n])}", by_depth(seen[n][1], layers), look) for n, look in looks.items()]
    profile = charts.curves("Gradient norm by layer", drawn, x_axis="layer", y_axis="gradient norm", from_zero=True)
    caption = note(
        f"Layers are numbered from {layers[0]} (0) to {layers[-1]} ({len(layers) - 1}). Norms are before clipping."
    )
    return [picture, profile, caption]


def by_depth(flow: Mapping[str, Any], layers: Sequence[str]) -> list[tuple[float, float]]:
    norms = [(depth, number(flow.get(layer))) for depth, layer in enumerate(layers)]
    return [(float(depth), value) for depth, value in norms if value is not None]


def relative_updates(rows: ReportRows) -> list[tuple[float, float]]:
    weights = dict(series(rows, "weight_norm"))
    return [(step, value / weights[step]) for step, value in series(rows, "update_norm") if weights.get(step)]


def time_by_phase(rows: ReportRows) -> list[object]:
    spent: dict[str, float] = {}
    for row in rows:
        for phase, seconds in named(row, "seconds").items():
            spent[phase] = spent.get(phase, 0.0) + (number(seconds) or 0.0)
    whole = sum(spent.values())
    bars = [
        Bar(name, spent[phase], f"{charts.duration(spent[phase])} ({percent(spent[phase] / whole)})")
        for phase, name in PHASES.items()
        if whole and phase in spent
    ]
    return [charts.bars("Training time by phase", bars, axis="seconds")] if bars else []


def troubles(rows: ReportRows) -> list[object]:
    """What was skipped, where the run went back, and which hooks failed."""
    incidents: list[list[object]] = []
    for row in rows:
        step = count(row.get("step"))
        if "skipped" in row:
            samples = ", ".join(map(str, sequence(row, "samples")[:8]))
            incidents.append([step, "skipped", f"{text(row['skipped'])}; samples {samples} …"])
        if "rolled_back_to" in row:
            incidents.append([step, "rolled back", f"to step {count(row['rolled_back_to'])}"])
        if "failed" in row:
            incidents.append([step, f"{text(row['failed'])} failed", text(row.get("error"))])
    table = tag("div", charts.table(["Step", "Event", "Details"], incidents), class_="commands")
    return [tag("h4", "Problems during training"), table] if incidents else []


def written(report: Report, phase: str) -> list[object]:
    cards = [
        tag(
            "article",
            tag("p", tag("b", f"step {count(sample.get('step'))}"), class_="tagged"),
            tag("p", tag("b", text(sample.get("prompt"))), text(sample.get("text")), class_="quote", dir="auto"),
            class_="card",
        )
        for sample in reversed(listed(report, "written", phase))
    ]
    return [tag("h4", "Samples during training, newest first"), folded(cards, "cards")] if cards else []


def series(rows: ReportRows, key: str) -> list[tuple[float, float]]:
    points = [(number(row.get("step")), number(row.get(key))) for row in rows]
    return [(step, value) for step, value in points if step is not None and value is not None]


NAMES = {
    "loss": ("Loss", "loss"),
    "margin": ("Margin: preference for the better answer", "nats"),
    "accuracy": ("Pairs ranked correctly", "share"),
    "reward": ("Reward: correct answers", "share"),
    "kl": ("KL divergence from the reference model", "nats per token"),
    "clip_fraction": ("Tokens with a clipped ratio", "share"),
    "ended": ("Ended answers", "share"),
    "answer_tokens": ("Length of answers", "tokens"),
}
"""What metrics.jsonl may hold, with a title and the name of an axis."""
METHODS = {"dpo": "DPO", "ipo": "IPO", "simpo": "SimPO", "grpo": "GRPO"}


def preferred(report: Report) -> list[object]:
    """Nothing for a run without the stage `prefer`."""
    rows, stats = listed(report, "curves", "prefer"), named(report, "preference")
    if not rows and not stats:
        return []
    parts: list[object] = [tag("h3", "Prefer"), facts(known(stats))]
    before = named(stats, "before")
    after = [row for row in rows if any(name in row for name in before)]
    if before and after:
        listed_names = [name for name in before if name in after[-1]]
        cells = [[spoken(name), decimal(before[name]), decimal(after[-1][name])] for name in listed_names]
        parts.append(charts.table(["On the validation split", "Before", "After"], cells))
    drawn = [
        charts.curves(title, curves(rows, name), x_axis="step", y_axis=axis)
        for name, (title, axis) in NAMES.items()
        if series(rows, name)
    ]
    parts.append(tag("div", *drawn, class_="small"))
    data = named(stats, "data")
    table = tallied("Rejected rows, by reason", named(data, "rejected_by_reason"), None, "rows")
    parts += [table] if table is not None else []
    if data:
        parts.append(note("rejected.jsonl of this stage lists the rejected rows, with file, line and reason."))
    return parts + gradient_flow(rows) + time_by_phase(rows) + troubles(rows) + written(report, "prefer")


def known(stats: Mapping[str, Any]) -> list[Tile]:
    data = named(stats, "data")
    tiles: list[Tile] = [("Method", METHODS.get(text(stats.get("method")), text(stats.get("method"))))]
    tiles += [("Steps", count(stats.get("steps"))), ("Rows read", count(data.get("read")))]
    for split, name in (("train", "Trained on"), ("val", "Validation")):
        sizes = named(data, split)
        counts = [f"{count(sizes[key])} {key}" for key in ("questions", "chosen", "rejected") if key in sizes]
        tiles.append((name, ", ".join(counts) or "–"))
    tiles.append(("Truncated at a turn", count(data.get("cut_at_a_turn"))))
    return tiles if stats else tiles[:0]


def curves(rows: list[Mapping[str, Any]], name: str) -> list[Curve]:
    seen = series(rows, name)
    drawn = [Curve("training", seen, "faint")]
    drawn.append(Curve("smoothed", charts.smoothed(seen, max(1, len(seen) // SMOOTHING))))
    held_out = series(rows, f"validation_{name}")
    return [*drawn, Curve("validation", held_out, "dots")] if held_out else drawn


def spoken(name: str) -> str:
    return name.removeprefix("validation_").replace("_", " ")


ReportSections = tuple[tuple[str, str, Section], ...]
"""Anchor, title and content of each."""

RIVALS = {"model": "this model", "xz": "xz", "zstd": "zstd"}
COPYING = " Library questions test copying: each contains its answer, and the answers also occur in the training data."


def render(report: Report, sections: ReportSections | None = None) -> str:
    """
    The page for the data of report.json, as HTML: all of SECTIONS, or some.

    Any part of the data may be missing. All text in it is escaped, wherever it came from.
    """
    title = f"{at(report, 'recipe') or 'A run'}: report"
    shown = SECTIONS if sections is None else sections
    contents = [tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name, _ in shown]
    rendered = [
        tag("section", tag("h2", name), *(make(report) or [NOTHING]), id=anchor) for anchor, name, make in shown
    ]
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
        tag("main", *rendered),
        tag("footer", *foot(report)),
    ]
    styled = tag("head", head, tag("title", title), tag("style", Html(STYLE)))
    return f"<!doctype html>\n{tag('html', styled, tag('body', *body), lang='en')}\n"


# --- sections ------------------------------------------------------------------------------------------------------


def headline(report: Report) -> list[object]:
    answers, model, leaks = named(report, "answers"), named(report, "model"), named(report, "leaks")
    exact, (low, high) = number(answers.get("exact")), [*map(number, sequence(answers, "interval")), None, None][:2]
    reach = charts.interval(low, exact, high) if low is not None and exact is not None and high is not None else None
    asked = f"of {count(answers.get('n'))} validation questions; 95% interval {percent(low)} to {percent(high)}"
    if answers.get("not_asked"):
        asked += f"; {count(answers.get('not_asked'))} more were skipped because they do not fit into the context"
    num_leaks = number(leaks.get("found"))
    seen = f"of {count(leaks.get('checked'))} validation questions or answers occur in the training text"
    shape = f"context of {count(model.get('context_length'))} tokens, vocabulary of {count(model.get('vocab_size'))}"
    tiles = [
        tile("Exactly correct answers", percent(exact), asked, reach),
        tile("Ended answers", percent(answers.get("ended")), "before the token limit"),
        tile("Leaks", count(num_leaks), seen, look="tile wrong" if num_leaks else "tile"),
    ]
    if answers.get("n") == 0:  # of the small worlds, which the run may not have
        tiles = talk_tiles(report)
    tiles.append(tile("Parameters", charts.short(model.get("parameters")), shape))
    bits = named(report, "bits_per_byte")
    known = [(name, number(bits.get(key)), key != "model") for key, name in RIVALS.items()]
    rows = [Bar(name, value, decimal(value), quiet=quiet) for name, value, quiet in known]
    chart = charts.bars("Bits per byte of validation text", rows, axis="bits per byte (lower is better)")
    over = (
        f"Measured on {charts.size(bits.get('bytes'))} of text in {count(bits.get('documents'))} validation documents"
    )
    return [tag("div", *tiles, class_="tiles"), chart, note(over, ", with the pretrained model.")]


def trained(report: Report) -> list[object]:
    return [*training(report), *preferred(report)]


def by_kind(report: Report) -> list[object]:
    rows: list[list[object]] = []
    if at(report, "answers", "n") == 0:
        return [note("This run has no questions about the small worlds of the demo.")]
    for kind, scores in named(report, "answers", "by_kind").items():
        cells = [cell(f"{kind}, {key}", at(scores, key), percent, 1.0, key == "ended") for key in ("exact", "ended")]
        rows.append([kind, count(at(scores, "n")), *cells])
    caption = "Exactly correct: the answer equals the expected answer, and the model ended it before the token limit."
    copied = COPYING if any(str(row[0]).startswith("library") for row in rows) else ""
    table = charts.table(["Kind of question", "Questions", "Exactly correct", "Ended"], rows)
    return [table, note(caption, copied)] if rows else []


def by_domain(report: Report) -> list[object]:
    domains = named(report, "bits_per_byte", "by_domain")
    top = max((number(at(scores, key)) or 0.0 for scores in domains.values() for key in RIVALS), default=0.0) or 1.0
    rows: list[list[object]] = []
    for domain, scores in domains.items():
        bits = [cell(f"{domain}, {RIVALS[k]}", at(scores, k), decimal, top, k != "model") for k in RIVALS]
        rows.append([domain, *bits, charts.size(at(scores, "bytes")), count(at(scores, "documents"))])
    caption = "Bits per byte: lower is better. xz and zstd compress the same text."
    heads = ["Domain", *RIVALS.values(), "Text", "Documents"]
    return [charts.table(heads, rows), note(caption)] if rows else []


def answers(report: Report) -> list[object]:
    samples = listed(report, "samples", "answers")
    parts: list[object] = []
    for title, right in (("Correct", True), ("Wrong", False), ("Not graded", None)):
        cards = [conversation(one) for one in samples if one.get("exact") is right]
        parts += [tag("h3", f"{title} ({len(cards)} shown)"), folded(cards, "cards")] if cards else []
    return parts if samples else []


def conversation(sample: Mapping[str, Any]) -> Html:
    turns = [(text(message.get("role")), text(message.get("content"))) for message in listed(sample, "messages")]
    said = [*turns, ("assistant", text(sample.get("said")))]
    bubbles = [
        tag("p", tag("span", f"{role}: ", class_="who"), content, class_=f"bubble {role}", dir="auto")
        for role, content in said
    ]
    right = sample.get("exact")
    late = " It reached the token limit." if sample.get("ended") is False else ""
    lead, look = ("✗ expected: ", "verdict wrong") if right is False else ("expected: ", "verdict")
    verdict = tag("p", lead, tag("q", text(sample.get("expected"))), late, class_=look)
    if right:
        verdict = tag("p", "✓ exactly correct", class_="verdict right")
    head = tag("p", tag("b", text(sample.get("kind"))), class_="tagged")
    return tag("article", head, tag("div", *bubbles, class_="talk"), verdict, class_="card")


def continuations(report: Report) -> list[object]:
    cards = [
        tag("p", tag("b", text(sample.get("prompt"))), text(sample.get("text")), class_="card quote", dir="auto")
        for sample in listed(report, "samples", "continuations")
    ]
    caption = note("The prompt is in bold. The model wrote the rest.")
    return [caption, folded(cards, "cards wide")] if cards else []


def time_spent(report: Report) -> list[object]:
    stages = listed(report, "stages")
    whole = sum(number(one.get("seconds")) or 0.0 for one in stages)
    unit, name = (60.0, "minutes") if whole >= 300 else (1.0, "seconds")
    rows = []
    for stage in stages:
        seconds = number(stage.get("seconds"))
        label = text(stage.get("stage")) + (", after it resumed" if stage.get("resumed") else "")
        rows.append(Bar(label, None if seconds is None else seconds / unit, charts.duration(seconds)))
    caption = note(f"Total: {charts.duration(whole)}.")
    return [charts.bars("Time by stage", rows, axis=name), caption] if rows else []


SOURCES = (
    ("Answers, bits per byte, leaks, samples, this report", "evaluate", "report.json"),
    ("Benchmarks, by question", "evaluate", "tasks.jsonl"),
    *(("Training curves", stage, "metrics.jsonl, samples.jsonl") for stage in ("pretrain", "finetune", "prefer")),
    ("Data mix", "shard", "manifest.json"),
    ("Conversations", "instruct", "report.html, rejected.jsonl, dropped.jsonl"),
    ("Read and rejected documents", "fetch", "manifest.json, rejected/"),
    ("Dropped documents", "filter", "manifest.json, dropped/"),
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
    caption = "RECIPE is the recipe file of this run. To run a finished stage again, first move its folder away."
    return [
        tag("div", charts.table(["Numbers", "Command", "Files"], rows), class_="commands"),
        note(caption),
    ]


def foot(report: Report) -> list[object]:
    model = named(report, "model")
    known: list[Tile] = [(name, text(value)) for name, value in named(report, "versions").items()]
    known += [(name, text(value)) for name, value in named(report, "machine").items()]
    if model:
        known += [(f"{name} hash", tag("code", text(model.get(name)))) for name in ("tokenizer", "template")]
        known.append(("model folder", tag("code", text(model.get("folder")))))
    return [facts(known, look="foot")]


DATA: ReportSections = (
    ("read", "Read documents", fetched),
    ("dropped", "Dropped documents", dropped),
    ("classifier", "Classifiers", classifiers),
    ("duplicates", "Duplicates", duplicates),
    ("tokenizer", "Tokenizer", tokenizer),
)
TRAINING: ReportSections = (("curves", "Training", trained),)
MIX: ReportSections = (("mix", "Data mix", the_mix),)
WORK: ReportSections = (("time", "Time by stage", time_spent), ("again", "How to reproduce each number", again))

SECTIONS: ReportSections = (
    ("headline", "Summary", headline),
    ("answers", "Validation questions by kind", by_kind),
    ("talks", "Validation conversations", held_out_talks),
    ("text", "Validation text by domain", by_domain),
    ("tasks", "Benchmarks", known_tasks),
    *TRAINING,
    *MIX,
    *DATA,
    ("samples", "Sample answers", answers),
    ("continuations", "Continuations", continuations),
    *WORK,
)
IN_SHORT: ReportSections = (("short", "Summary", funnel),)
DATA_SECTIONS: ReportSections = (*IN_SHORT, *DATA, *MIX, *WORK)
"""Of the page that a run has before there is a model."""


def before_evaluation(*, read: bool, trained: bool) -> ReportSections:
    """Of the page of a run that has read documents, or has trained a model, or both, and is not evaluated."""
    return (*IN_SHORT[:read], *TRAINING[:trained], *DATA[: len(DATA) if read else 0], *MIX, *WORK)


TITLE = "Conversations"


def page(report: Report) -> str:
    """The page for the data of the stage's report.json, as HTML. Any part of the data may be missing."""
    return render({"recipe": TITLE, **report}, CONVERSATION_SECTIONS)


def conversation_headline(report: Report) -> list[object]:
    train, val = named(report, "splits", "train"), named(report, "splits", "val")
    tokens, learned = number(train.get("tokens")), number(train.get("supervised"))
    share = learned / tokens if learned is not None and tokens else None
    gone = [count(report.get(name)) for name in ("rejected", "dropped")]
    tiles = [
        tile(
            "Conversations", count(report.get("conversations")), f"of {count(report.get('read'))} rows in the sources"
        ),
        tile("Training tokens", charts.short(tokens), f"in {count(train.get('rows'))} sequences"),
        tile("In the loss", percent(share), "of these tokens: the assistant's text and its end tokens"),
        tile(
            "Packing efficiency",
            percent(train.get("packing")),
            f"in sequences of {count(report.get('sequence_length'))} tokens",
        ),
    ]
    known = counted(report, cut_at_a_turn="Truncated at a turn")
    known += [("Rejected", gone[0]), ("Dropped", gone[1]), ("Validation", count(val.get("conversations")))]
    known += [(f"{name} hash", tag("code", text(report.get(name)))) for name in ("template", "tokenizer")]
    return [tag("div", *tiles, class_="tiles"), facts(known)]


def by_source(report: Report) -> list[object]:
    bars, rows = [], []
    for source in listed(report, "sources"):
        share = number(source.get("supervised_share"))
        bars.append(Bar(text(source.get("source")), share, f"{percent(share)} of {count(source.get('tokens'))} tokens"))
        sizes = [count(source.get(name)) for name in ("read", "rejected", "dropped", "conversations", "in_rows", "cap")]
        rows.append([text(source.get("source")), *sizes, count(source.get("tokens")), text(source.get("license"))])
    heads = ["Source", "Read", "Rejected", "Dropped", "Kept", "In sequences, with copies", "Cap", "Tokens", "License"]
    caption = "Read is the sum of kept, rejected and dropped. Licenses can also be those of rows."
    axis = "share of a source's tokens that are in the loss"
    chart = charts.bars("In the loss, by source", bars, axis=axis, form=percent, top=1.0)
    return [chart, charts.table(heads, rows), note(caption)] if rows else []


def lengths(report: Report) -> list[object]:
    bins = listed(report, "lengths")
    whole = sum(number(one.get("conversations")) or 0.0 for one in bins)
    rows = []
    for bucket in bins:
        n = number(bucket.get("conversations"))
        shown = f"{count(n)} ({percent(n / whole)})" if n is not None and whole else count(n)
        rows.append(Bar(f"{count(bucket.get('from'))} to {count(bucket.get('to'))}", n, shown))
    return [charts.bars("Conversations by length in tokens", rows, axis="conversations, with copies")] if rows else []


def conversation_samples(report: Report) -> list[object]:
    keys = [
        tag("span", tag("mark", "in the loss", class_="learned"), class_="key"),
        tag("span", tag("span", "not in the loss", class_="unlearned"), class_="key"),
        tag("span", tag("b", "<|end|>", class_="special"), " a special token, which no text can contain", class_="key"),
    ]
    cards = [_card(one) for one in listed(report, "samples")]
    return [tag("p", *keys, class_="legend"), tag("div", *cards, class_="cards wide")] if cards else []


def _card(sample: Mapping[str, Any]) -> Html:
    runs = []
    for run in listed(sample, "runs"):
        look = "special" if run.get("special") else None
        content = tag("b", text(run.get("text")), class_=look) if look else text(run.get("text"))
        runs.append(tag("mark" if run.get("learned") else "span", content, class_=_LOOKS[bool(run.get("learned"))]))
    seen = f"{count(sample.get('supervised'))} of {count(sample.get('tokens'))} tokens in the loss"
    cut = number(sample.get("shown")), number(sample.get("tokens"))
    rest = "" if None in cut or cut[0] == cut[1] else f"; the first {count(cut[0])} are shown"
    head = tag("p", tag("b", text(sample.get("source"))), tag("span", f"{seen}{rest}"), class_="tagged")
    where = tag("p", tag("code", text(sample.get("place"))), class_="note")
    return tag("article", head, tag("p", *runs, class_="quote", dir="auto"), where, class_="card")


_LOOKS = {True: "learned", False: "unlearned"}


def gone(report: Report) -> list[object]:
    whole = number(at(report, "read"))
    parts = [
        tallied(
            "Rejected: not a valid conversation, or too long for a sequence",
            named(report, "rejected_by_reason"),
            whole,
            "rows",
        ),
        tallied("Dropped by filters", named(report, "dropped_by_reason"), whole, "conversations"),
    ]
    caption = note("rejected.jsonl and dropped.jsonl in this folder list each of them, with location and reason.")
    shown = [part for part in parts if part is not None]
    return [*shown, caption] if shown else [note("No row was rejected or dropped.")]


CONVERSATION_SECTIONS: ReportSections = (
    ("short", "Summary", conversation_headline),
    ("samples", "Sample conversations", conversation_samples),
    ("sources", "Sources", by_source),
    ("lengths", "Lengths", lengths),
    ("gone", "Rejected and dropped", gone),
)
