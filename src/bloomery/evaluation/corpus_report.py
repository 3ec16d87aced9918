"""The data half of a report: what was read, dropped and found twice, the tokenizer, and the mix."""

from collections.abc import Mapping
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import DASH, Bar, Html, count, decimal, number, percent, tag
from bloomery.evaluation.pieces import (
    Report,
    at,
    counted,
    facts,
    folded,
    listed,
    named,
    tallied,
    text,
)


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
    if not made:
        return []
    told = counted(made, vocab_size="Vocabulary", unused_tokens="Never used in the sample")
    return [facts(told), chart, _sampled(made), _fertility(made)]


def _sampled(made: Mapping[str, Any]) -> Html | None:
    """What the tokenizer learned from, and what it is worth on text that it did not."""
    known, unseen, gpt2 = (
        named(made, *key) for key in (("sample",), ("bytes_per_token_unseen",), ("gpt2", "bytes_per_token"))
    )
    heads = ["Domain", "Learned from", "Documents", "Of its text", "Bytes per token, unseen", "GPT-2 there"]
    rows: list[list[object]] = []
    for domain in known:
        one = named(known, domain)
        sizes = [charts.size(one.get("bytes")), count(one.get("documents")), percent(one.get("share"))]
        rows.append([domain, *sizes, decimal(unseen.get(domain), 2), decimal(gpt2.get(domain), 2)])
    return charts.table(heads, rows) if rows else None


def _fertility(made: Mapping[str, Any]) -> Html | None:
    rows: list[list[object]] = []
    for language in named(made, "fertility"):
        one = named(made, "fertility", language)
        ratios = [decimal(one.get(f"tokens_per_{unit}"), 2) for unit in ("word", "character")]
        rows.append([language, count(one.get("documents")), *ratios])
    return charts.table(["Language or script", "Documents", "Tokens per word", "Per character"], rows) if rows else None
