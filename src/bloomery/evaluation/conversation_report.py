"""The page about conversations before they are trained on: how many, how long, what of them is learned, what went."""

from collections.abc import Mapping
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import Bar, Html, count, number, percent, tag
from bloomery.evaluation.pieces import Report, at, counted, facts, listed, named, note, tallied, text, tile
from bloomery.evaluation.report import Sections, render

TITLE = "Conversations"


def page(report: Report) -> str:
    """The page for the data of the stage's report.json, as HTML. Any part of the data may be missing."""
    return render({"recipe": TITLE, **report}, SECTIONS)


def headline(report: Report) -> list[object]:
    train, val = named(report, "splits", "train"), named(report, "splits", "val")
    tokens, learned = number(train.get("tokens")), number(train.get("supervised"))
    share = learned / tokens if learned is not None and tokens else None
    gone = [count(report.get(name)) for name in ("rejected", "dropped")]
    tiles = [
        tile(
            "Conversations", count(report.get("conversations")), f"of {count(report.get('read'))} rows that were read"
        ),
        tile("Tokens to train on", charts.short(tokens), f"in {count(train.get('rows'))} rows"),
        tile("Learned from", percent(share), "of those tokens: what the assistant says, and where it ends"),
        tile("Rows filled", percent(train.get("packing")), f"of {count(report.get('row_tokens'))} tokens each"),
    ]
    known = counted(report, cut_at_a_turn="Cut at a turn")
    known += [("Rejected", gone[0]), ("Dropped", gone[1]), ("Held out", count(val.get("conversations")))]
    known += [(f"{name} hash", tag("code", text(report.get(name)))) for name in ("template", "tokenizer")]
    return [tag("div", *tiles, class_="tiles"), facts(known)]


def by_source(report: Report) -> list[object]:
    bars, rows = [], []
    for one in listed(report, "sources"):
        share = number(one.get("supervised_share"))
        bars.append(Bar(text(one.get("source")), share, f"{percent(share)} of {count(one.get('tokens'))} tokens"))
        sizes = [count(one.get(name)) for name in ("read", "rejected", "dropped", "conversations", "in_rows", "cap")]
        rows.append([text(one.get("source")), *sizes, count(one.get("tokens")), text(one.get("license"))])
    heads = ["Source", "Read", "Rejected", "Dropped", "Kept", "In rows, with copies", "Cap", "Tokens", "License"]
    told = "Read is kept, rejected and dropped together. Where a source says no license, its rows may."
    axis = "share of the tokens of a source that are learned from"
    chart = charts.bars("Learned from, by source", bars, axis=axis, form=percent, top=1.0)
    return [chart, charts.table(heads, rows), note(told)] if rows else []


def lengths(report: Report) -> list[object]:
    bins = listed(report, "lengths")
    whole = sum(number(one.get("conversations")) or 0.0 for one in bins)
    rows = []
    for one in bins:
        n = number(one.get("conversations"))
        shown = f"{count(n)} ({percent(n / whole)})" if n is not None and whole else count(n)
        rows.append(Bar(f"{count(one.get('from'))} to {count(one.get('to'))}", n, shown))
    return (
        [charts.bars("Conversations by their length in tokens", rows, axis="conversations, with copies")]
        if rows
        else []
    )


def samples(report: Report) -> list[object]:
    keys = [
        tag("span", tag("mark", "learned from", class_="learned"), class_="key"),
        tag("span", tag("span", "only read", class_="unlearned"), class_="key"),
        tag("span", tag("b", "<|end|>", class_="special"), " one token that no text can spell", class_="key"),
    ]
    cards = [_card(one) for one in listed(report, "samples")]
    return [tag("p", *keys, class_="legend"), tag("div", *cards, class_="cards wide")] if cards else []


def _card(one: Mapping[str, Any]) -> Html:
    runs = []
    for run in listed(one, "runs"):
        look = "special" if run.get("special") else None
        content = tag("b", text(run.get("text")), class_=look) if look else text(run.get("text"))
        runs.append(tag("mark" if run.get("learned") else "span", content, class_=_LOOKS[bool(run.get("learned"))]))
    seen = f"{count(one.get('supervised'))} of {count(one.get('tokens'))} tokens learned from"
    cut = number(one.get("shown")), number(one.get("tokens"))
    rest = "" if None in cut or cut[0] == cut[1] else f", the first {count(cut[0])} shown"
    head = tag("p", tag("b", text(one.get("source"))), tag("span", f"{seen}{rest}"), class_="tagged")
    where = tag("p", tag("code", text(one.get("place"))), class_="note")
    return tag("article", head, tag("p", *runs, class_="quote", dir="auto"), where, class_="card")


_LOOKS = {True: "learned", False: "unlearned"}


def gone(report: Report) -> list[object]:
    whole = number(at(report, "read"))
    parts = [
        tallied(
            "Rejected: no conversation, or none that fits into a row",
            named(report, "rejected_by_reason"),
            whole,
            "rows",
        ),
        tallied("Dropped by filters", named(report, "dropped_by_reason"), whole, "conversations"),
    ]
    told = note("rejected.jsonl and dropped.jsonl beside this page hold each of them, with its place and reason.")
    shown = [part for part in parts if part is not None]
    return [*shown, told] if shown else [note("Nothing was rejected, and nothing was dropped.")]


SECTIONS: Sections = (
    ("short", "In short", headline),
    ("samples", "What is learned", samples),
    ("sources", "Sources", by_source),
    ("lengths", "Lengths", lengths),
    ("gone", "What was left out", gone),
)
