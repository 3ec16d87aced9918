"""
report.json as one page: report.html, which needs nothing but itself.

A section is a function of the whole report. What is not there is shown as a dash: nothing is guessed, and a report of
half a run is a page too.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import DASH, Bar, Curve, Html, count, decimal, join, number, percent, tag

Report = Mapping[str, Any]
Fact = tuple[str, object]
Section = Callable[[Report], Sequence[object]]

SHOWN_AT_ONCE = 6
"""Samples of a kind before the rest is folded away."""
SMOOTHING = 20
"""A smoothed curve is a mean over one such part of its points to either side."""
RIVALS = {"model": "this model", "xz": "xz", "zstd": "zstd"}
COPYING = " The library's questions test copying: what they ask for stands in them, and their answers in training too."


def render(report: Report) -> str:
    """
    The page for the data of report.json, as HTML.

    Any part of the data may be missing. All text in it is escaped, wherever it came from.
    """
    title = f"{at(report, 'recipe') or 'A run'}: report"
    contents = [tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name, _ in SECTIONS]
    sections = [
        tag("section", tag("h2", name), *(make(report) or [NOTHING]), id=anchor) for anchor, name, make in SECTIONS
    ]
    head = Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">')
    when = text(at(report, "made")).replace("T", " ").replace("Z", " UTC")
    body = [
        tag(
            "header", tag("p", "Bloomery report", class_="over"), tag("h1", text(at(report, "recipe"))), tag("p", when)
        ),
        tag("nav", tag("ol", *contents), aria_label="Contents"),
        tag("main", *sections),
        tag("footer", *foot(report)),
    ]
    styled = tag("head", head, tag("title", title), tag("style", Html(charts.STYLE)))
    return f"<!doctype html>\n{tag('html', styled, tag('body', *body), lang='en')}\n"


# --- what the data holds -------------------------------------------------------------------------------------------


def at(data: Any, *path: str) -> Any:
    """The value at a path of keys, or None where the path breaks off."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def named(data: Any, *path: str) -> Mapping[str, Any]:
    found = at(data, *path)
    return found if isinstance(found, Mapping) else {}


def sequence(data: Any, *path: str) -> list[Any]:
    found = at(data, *path)
    return list(found) if isinstance(found, list | tuple) else []


def listed(data: Any, *path: str) -> list[Mapping[str, Any]]:
    return [one for one in sequence(data, *path) if isinstance(one, Mapping)]


def text(value: Any) -> str:
    return DASH if value is None else str(value)


# --- pieces --------------------------------------------------------------------------------------------------------

NOTHING = tag("p", f"{DASH} Nothing was recorded.", class_="missing")


def facts(pairs: Sequence[Fact], look: str = "facts") -> Html:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_=look)


def counted(data: Mapping[str, Any], **names: str) -> list[Fact]:
    """`tokens="Tokens to train on"` shows `data["tokens"]` as a count, under that name."""
    return [(name, count(data.get(key))) for key, name in names.items()]


def note(*sentences: object) -> Html:
    return tag("p", *sentences, class_="note")


def folded(cards: Sequence[Html], look: str) -> Html:
    """The first cards, and a fold with the rest."""
    first, rest = cards[:SHOWN_AT_ONCE], cards[SHOWN_AT_ONCE:]
    summary = tag("summary", f"{len(rest)} more")
    more = tag("details", summary, tag("div", *rest, class_=look)) if rest else None
    return join(tag("div", *first, class_=look), more)


def tallied(title: str, reasons: Mapping[str, Any], whole: float | None, axis: str) -> Html | None:
    """Bars of counts, the largest first, each with its share of the whole."""
    rows = []
    for reason, value in sorted(reasons.items(), key=lambda pair: (-(number(pair[1]) or 0.0), pair[0])):
        n = number(value)
        rows.append(Bar(reason, n, count(n) + (f" ({percent(n / whole)})" if whole and n is not None else "")))
    return charts.bars(title, rows, axis=axis)


# --- sections ------------------------------------------------------------------------------------------------------


def headline(report: Report) -> list[object]:
    answers, model, leaks = named(report, "answers"), named(report, "model"), named(report, "leaks")
    exact, (low, high) = number(answers.get("exact")), [*map(number, sequence(answers, "interval")), None, None][:2]
    reach = charts.interval(low, exact, high) if low is not None and exact is not None and high is not None else None
    asked = f"of {count(answers.get('n'))} held-out questions; 95% interval {percent(low)} to {percent(high)}"
    found = number(leaks.get("found"))
    seen = f"of {count(leaks.get('checked'))} held-out questions or answers stand in the training text"
    shape = f"context of {count(model.get('context'))} tokens, vocabulary of {count(model.get('vocab_size'))}"
    tiles = [
        tile("Answers exactly right", percent(exact), asked, reach),
        tile("Answers that ended", percent(answers.get("ended")), "by themselves; the others ran into the limit"),
        tile("Leaks", count(found), seen, look="tile wrong" if found else "tile"),
        tile("Parameters", charts.short(model.get("parameters")), shape),
    ]
    bits = named(report, "bits_per_byte")
    known = [(name, number(bits.get(key)), key != "model") for key, name in RIVALS.items()]
    rows = [Bar(name, value, decimal(value), quiet=quiet) for name, value, quiet in known]
    chart = charts.bars("Bits per byte of held-out text", rows, axis="bits per byte (less is better)")
    over = f"Over {charts.size(bits.get('bytes'))} in {count(bits.get('documents'))} held-out documents."
    return [tag("div", *tiles, class_="tiles"), chart, note(over, " The model is measured as it was pretrained.")]


def tile(name: str, value: str, below: str, picture: Html | None = None, look: str = "tile") -> Html:
    big = tag("p", value, class_="big")
    return tag("div", tag("h3", name), big, picture, tag("p", below, class_="note"), class_=look)


def by_kind(report: Report) -> list[object]:
    rows: list[list[object]] = []
    for kind, scores in named(report, "answers", "by_kind").items():
        cells = [cell(f"{kind}, {key}", at(scores, key), percent, 1.0, key == "ended") for key in ("exact", "ended")]
        rows.append([kind, count(at(scores, "n")), *cells])
    told = "Right means equal to the expected answer, letter by letter, and ended by the model itself."
    copied = COPYING if any(str(row[0]).startswith("library") for row in rows) else ""
    table = charts.table(["Kind of question", "Asked", "Exactly right", "Ended"], rows)
    return [table, note(told, copied)] if rows else []


def cell(label: str, value: Any, form: charts.Format, top: float, quiet: bool) -> Html:
    """A number with its bar, for a table."""
    return join(tag("span", form(value)), charts.bar(Bar(label, number(value), form(value), quiet=quiet), top))


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


def loss_curves(report: Report) -> list[object]:
    parts: list[object] = []
    for phase in ("pretrain", "finetune"):
        rows = listed(report, "curves", phase)
        parts += [tag("h3", phase.capitalize()), *(phase_curves(phase.capitalize(), rows) if rows else [NOTHING])]
    return parts


def phase_curves(phase: str, rows: Sequence[Mapping[str, Any]]) -> list[object]:
    loss, checked = series(rows, "loss"), series(rows, "validation_loss")
    reach = max(1, len(loss) // SMOOTHING)
    drawn = [
        Curve("train loss", loss, "faint"),
        Curve(f"mean of {2 * reach + 1} logged steps", charts.smoothed(loss, reach)),
        Curve("validation loss", checked, "dots"),
    ]
    speeds = [value for _, value in series(rows, "tokens_per_second") if value > 0]
    last = [
        ("Steps", count(max((x for x, _ in loss + checked), default=None))),
        ("Last train loss", decimal(loss[-1][1] if loss else None)),
        ("Last validation loss", decimal(checked[-1][1] if checked else None)),
        ("Median speed", f"{count(statistics.median(speeds) if speeds else None)} tokens/s"),
    ]
    rate, norm = (Curve(key, series(rows, key)) for key in ("learning_rate", "gradient_norm"))
    small = [
        charts.curves("Learning rate", [rate], x_axis="step", y_axis="learning rate", from_zero=True),
        charts.curves("Gradient norm", [norm], x_axis="step", y_axis="norm before clipping", from_zero=True),
    ]
    big = charts.curves(f"{phase}: loss", drawn, x_axis="step", y_axis="loss in nats per token")
    return [facts(last), big, tag("div", *small, class_="small")]


def series(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    found = [(number(row.get("step")), number(row.get(key))) for row in rows]
    return [(step, value) for step, value in found if step is not None and value is not None]


def the_mix(report: Report) -> list[object]:
    corpus = named(report, "corpus")
    shard, talks = named(corpus, "shard"), named(corpus, "instruct")
    if not (shard or talks or named(corpus, "fetch")):
        return []
    size = counted(shard, tokens="Tokens to train on", documents="Documents to train on")
    size += counted(shard, held_out_tokens="Tokens held out", held_out_documents="Documents held out")
    bars, rows = [], []
    domains = {**named(corpus, "fetch", "by_domain"), **named(shard, "mix")}
    for domain in domains:
        mix = named(shard, "mix", domain)
        asked, share = number(mix.get("asked")), number(mix.get("share"))
        if mix:
            bars.append(Bar(domain, share, f"{percent(share)} of {percent(asked)}", mark=asked))
        fetched = named(corpus, "fetch", "by_domain", domain)
        kept = [count(at(corpus, stage, "by_domain", domain, "kept")) for stage in ("filter", "dedup")]
        read = [count(fetched.get("documents")), charts.size(fetched.get("bytes"))]
        rows.append([domain, *read, *kept, count(mix.get("tokens")), decimal(mix.get("epochs"), 2)])
    heads = ["Domain", "Fetched", "Bytes", "After rules", "After duplicates", "Tokens in mix", "Epochs"]
    key = tag("p", tag("span", tag("i", class_="mark"), "what the recipe asked for", class_="key"), class_="legend")
    chart = charts.bars("Share of the mix, reached and asked", bars, axis="share of all tokens", form=percent)
    told = counted(talks, conversations="Conversations", refused="Refused", cut_at_a_turn="Cut at a turn")
    told += counted(named(talks, "train"), rows="Rows to train on", supervised="Tokens learned from")
    told.append(("Rows filled", percent(at(talks, "train", "packing"))))
    return [
        facts(size),
        chart,
        key if bars else None,
        charts.table(heads, rows),
        tag("h3", "Conversations"),
        facts(told),
    ]


def dropped(report: Report) -> list[object]:
    corpus = named(report, "corpus")
    ruled, read, talks = named(corpus, "filter"), named(corpus, "fetch"), named(corpus, "instruct")
    tally = counted(ruled, documents="Documents", kept="Kept", dropped="Dropped")
    whole = number(ruled.get("documents"))
    parts = [
        facts(tally) if ruled else None,
        tallied("Dropped by rules and classifier", named(ruled, "reasons"), whole, "documents"),
        tallied("Rejected when read", named(read, "reasons"), None, "documents"),
        tallied("Conversations refused", named(talks, "refused_by_reason"), None, "conversations"),
    ]
    cards = []
    for one in listed(report, "dropped_samples"):
        value = number(one.get("value"))
        seen = f"{text(one.get('domain'))}, value {DASH if value is None else f'{value:.4g}'}"
        head = tag("p", tag("b", text(one.get("reason"))), tag("span", seen), class_="tagged")
        cards.append(tag("article", head, tag("p", text(one.get("text")), class_="quote", dir="auto"), class_="card"))
    samples = [tag("h3", "Samples"), folded(cards, "cards")] if cards else []
    return [part for part in (*parts, *samples) if part is not None]


def judge(report: Report) -> list[object]:
    quality = named(report, "corpus", "classify")
    if not quality:
        return []
    known: list[Fact] = [("Area under the ROC curve", decimal(quality.get("auc"), 4))]
    known += [(name, percent(quality.get(name.lower()))) for name in ("Precision", "Recall")]
    known.append(("Brier score", decimal(quality.get("brier"), 4)))
    known += counted(quality, examples="Examples", held_out="Held out to measure")
    caught = [Bar(kind, number(share), percent(share)) for kind, share in named(quality, "caught").items()]
    title = "Held-out bad text that it finds, by kind"
    chart = charts.bars(title, caught, axis="share that scores below 0.5", form=percent, top=1.0)
    parts: list[object] = [facts(known), chart]
    for title, key in (("Speaks for keeping", "telling_keep"), ("Speaks for dropping", "telling_drop")):
        grams = [tag("li", text(gram).replace("\n", "⏎")) for gram in sequence(quality, key)]
        parts += [tag("h3", title), tag("ul", *grams, class_="chips") if grams else NOTHING]
    return parts


def duplicates(report: Report) -> list[object]:
    dedup = named(report, "corpus", "dedup")
    if not dedup:
        return []
    known = counted(dedup, documents="Documents", kept="Kept", removed="Removed")
    known += counted(dedup, exact="Exact copies", near="Near copies", compared="Pairs compared")
    bars = []
    for domain, tally in named(dedup, "by_domain").items():
        removed, whole = number(at(tally, "removed")), number(at(tally, "documents"))
        share = removed / whole if removed is not None and whole else None
        bars.append(Bar(domain, share, f"{percent(share)} ({count(removed)})"))
    chart = charts.bars("Removed, by domain", bars, axis="share of the documents of a domain", form=percent)
    return [facts(known), chart]


def tokenizer(report: Report) -> list[object]:
    made = named(report, "corpus", "tokenizer")
    ratios = sorted(named(made, "bytes_per_token").items(), key=lambda pair: -(number(pair[1]) or 0.0))
    bars = [Bar(domain, number(value), decimal(value, 2)) for domain, value in ratios]
    chart = charts.bars("Bytes per token, by domain", bars, axis="bytes per token (more is better)")
    return [facts(counted(made, vocab_size="Vocabulary")), chart] if made else []


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
    *(("Loss curves", stage, "metrics.jsonl") for stage in ("pretrain", "finetune")),
    ("Mix", "shard", "manifest.json"),
    ("Conversations", "instruct", "manifest.json, refused.jsonl"),
    ("Documents read and rejected", "fetch", "manifest.json, rejected/"),
    ("Documents dropped", "filter", "manifest.json, dropped/"),
    ("Classifier", "classify", "classifier.json"),
    ("Duplicates", "dedup", "manifest.json, duplicates/"),
    ("Bytes per token", "tokenizer", "manifest.json"),
)


def again(report: Report) -> list[object]:
    folders = {text(one.get("stage")): text(one.get("folder")) for one in listed(report, "stages")}
    rows = [
        [name, tag("code", f"bloomery run RECIPE --only {stage}"), tag("code", f"{folders.get(stage, '…')}/{files}")]
        for name, stage, files in SOURCES
    ]
    told = "RECIPE is the recipe file of this run. A stage that is done is not run again: put its folder aside first."
    return [tag("div", charts.table(["Number", "Command", "Where it is written"], rows), class_="commands"), note(told)]


def foot(report: Report) -> list[object]:
    model = named(report, "model")
    known: list[Fact] = [(name, text(value)) for name, value in named(report, "versions").items()]
    known += [(name, text(value)) for name, value in named(report, "machine").items()]
    known += [(f"{name} hash", tag("code", text(model.get(name)))) for name in ("tokenizer", "template")]
    return [facts([*known, ("model folder", tag("code", text(model.get("folder"))))], look="foot")]


SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("headline", "In short", headline),
    ("answers", "Held-out answers by kind", by_kind),
    ("text", "Held-out text by domain", by_domain),
    ("curves", "Loss curves", loss_curves),
    ("mix", "The mix", the_mix),
    ("dropped", "What was dropped", dropped),
    ("classifier", "The classifier", judge),
    ("duplicates", "Duplicates", duplicates),
    ("tokenizer", "The tokenizer", tokenizer),
    ("samples", "Answers to read", answers),
    ("continuations", "Continuations", continuations),
    ("time", "Where the time went", time_spent),
    ("again", "Each number again", again),
)
