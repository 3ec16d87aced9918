"""
The data pages of a report: documents read, dropped and duplicated, and classifiers.

Corpus: what was read, dropped and found twice, the tokenizer, and the mixture.

Classifiers: how well each classifier separates good text from bad, and what it does to every domain.

These sections share one file because together they describe the data of a run.
"""

from collections.abc import Mapping
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import (
    DASH,
    NOTHING,
    Bar,
    Curve,
    Html,
    Report,
    Tile,
    at,
    cell,
    count,
    counted,
    decimal,
    facts,
    folded,
    listed,
    named,
    note,
    number,
    percent,
    sequence,
    tag,
    tallied,
    text,
    tile,
)

SIDES = ("high", "low")


def classifiers(report: Report) -> list[object]:
    """Every classifier of the run in turn, those that were left out first; nothing where there is none."""
    missing = listed(report, "corpus", "classify", "left_out")
    parts: list[object] = [note(f"{text(one.get('name'))} was skipped: {text(one.get('why'))}.") for one in missing]
    for classifier in listed(report, "corpus", "classify", "classifiers"):
        cut = named(report, "corpus", "filter", "scores", text(classifier.get("name")))
        parts += [
            tag("h3", title(classifier)),
            *quality(classifier),
            *telling(classifier),
            *passing(cut),
            *threshold_samples(classifier, cut),
        ]
    return parts


def title(classifier: Mapping[str, Any]) -> str:
    learned = {"contrast": "on damaged copies", "labeled": "on labels"}.get(text(classifier.get("kind")), "")
    side = {"high": "high scores are kept", "low": "low scores are kept"}.get(text(classifier.get("keep")), "")
    return f"{text(classifier.get('name'))}: " + ", ".join(
        phrase for phrase in (f"trained {learned}" if learned else "", side) if phrase
    )


def quality(classifier: Mapping[str, Any]) -> list[object]:
    cut = decimal(classifier.get("threshold"), 2)
    known: list[Tile] = [("Area under the ROC curve", decimal(classifier.get("auc"), 4))]
    known += [(f"{name} at {cut}", percent(classifier.get(name.lower()))) for name in ("Precision", "Recall")]
    known.append(("Calibration error", decimal(classifier.get("calibration_error"), 4)))
    known.append(("Brier score", decimal(classifier.get("brier"), 4)))
    known += counted(classifier, examples="Examples", positives="Positive examples", held_out="Test examples")
    caught = [Bar(kind, number(share), percent(share)) for kind, share in named(classifier, "caught").items()]
    chart = charts.bars(
        "Detected damage in test texts, by kind", caught, axis=f"share with a score below {cut}", form=percent, top=1.0
    )
    return [facts(known), tag("div", reliability(classifier), trade_off(classifier), class_="small"), chart]


def reliability(classifier: Mapping[str, Any]) -> Html:
    """What share is positive among texts of about one score; on the diagonal, a score means what it says."""
    points = [(number(found.get("score")), number(found.get("positive"))) for found in listed(classifier, "bins")]
    drawn = [
        Curve("ideal", [(0.0, 0.0), (1.0, 1.0)] if points else [], "faint"),
        Curve("measured", [(x, y) for x, y in points if x is not None and y is not None]),
    ]
    return charts.curves("Calibration", drawn, x_axis="mean score", y_axis="share of positives", from_zero=True)


def trade_off(classifier: Mapping[str, Any]) -> Html:
    cuts = listed(classifier, "cuts")

    def line(key: str) -> list[tuple[float, float]]:
        points = [(number(cut.get("threshold")), number(cut.get(key))) for cut in cuts]
        return [(x, y) for x, y in points if x is not None and y is not None]

    drawn = [Curve("precision", line("precision")), Curve("recall", line("recall"), "faint")]
    return charts.curves("Precision and recall", drawn, x_axis="threshold", y_axis="share", from_zero=True)


def telling(classifier: Mapping[str, Any]) -> list[object]:
    """The n-grams of either side, those of text worth keeping first."""
    keys = ("telling_positive", "telling_negative")
    titles = ("N-grams for keeping", "N-grams for dropping")
    parts: list[object] = []
    for title, key in zip(titles, keys if classifier.get("keep") != "low" else keys[::-1], strict=True):
        grams = [tag("li", text(gram).replace("\n", "⏎")) for gram in sequence(classifier, key)]
        parts += [tag("h4", title), tag("ul", *grams, class_="chips") if grams else NOTHING]
    return parts


def passing(cut: Mapping[str, Any]) -> list[object]:
    """The share of each domain that passes the limits, and how its scores lie."""
    rows = []
    for domain, tally in named(cut, "by_domain").items():
        passed, whole = number(at(tally, "passed")), number(at(tally, "documents"))
        share = passed / whole if passed is not None and whole else None
        rows.append(Bar(domain, share, f"{percent(share)} of {count(whole)}"))
    chart = charts.bars(
        "Documents above the threshold, by domain", rows, axis="share of a domain's documents", form=percent, top=1.0
    )
    return [chart] if rows else []


def threshold_samples(classifier: Mapping[str, Any], cut: Mapping[str, Any]) -> list[object]:
    parts: list[object] = []
    for title, side in (("Just kept", "kept"), ("Just dropped", "dropped")):
        cards = [card(found) for found in listed(cut, "samples", side)]
        if cards:
            parts += [tag("h4", f"{title}: the {len(cards)} documents nearest the threshold"), folded(cards, "cards")]
    return parts


def card(sample: Mapping[str, Any]) -> Html:
    seen = f"score {decimal(sample.get('value'))}, threshold {decimal(sample.get('cut'), 2)}"
    head = tag("p", tag("b", text(sample.get("domain"))), tag("span", seen), class_="tagged")
    return tag("article", head, tag("p", text(sample.get("text")), class_="quote", dir="auto"), class_="card")


MOST_RULES = 8
"""Columns of the table of rules by domain; the rest are one more."""
MOST_LANGUAGES = 12
MIX_HEADS = ("Domain", "Requested", "Actual", "Tokens requested", "Tokens", "Epochs", "Limited by")


def funnel(report: Report) -> list[object]:
    """How much text came in, and how much was left after each stage."""
    corpus = named(report, "corpus")
    read, ruled, single = (named(corpus, name) for name in ("fetch", "filter", "dedup"))
    shard = named(corpus, "shard")
    whole = number(read.get("documents"))
    steps = [("Read", read.get("documents")), ("After filters", ruled.get("kept"))]
    steps.append(("After deduplication", single.get("kept")))
    rows = []
    for name, value in steps:
        kept = number(value)
        share = f" ({percent(kept / whole)})" if kept is not None and whole else ""
        rows.append(Bar(name, kept, f"{count(value)}{share}"))
    ratios = [number(value) for value in named(corpus, "tokenizer", "bytes_per_token").values()]
    known = [ratio for ratio in ratios if ratio is not None]
    shown = f"{decimal(min(known), 2)}–{decimal(max(known), 2)}" if known else DASH
    tiles = [
        tile("Text read", charts.size(read.get("bytes")), f"in {count(read.get('documents'))} documents"),
        tile("Documents kept", count(single.get("kept")), "after filters and deduplication"),
        tile("Training tokens", charts.short(shard.get("tokens")), f"in {count(shard.get('documents'))} documents"),
        tile("Bytes per token", shown, "lowest and highest domain"),
    ]
    return [tag("div", *tiles, class_="tiles"), charts.bars("Documents", rows, axis="documents")] if corpus else []


def fetched(report: Report) -> list[object]:
    read = named(report, "corpus", "fetch")
    if not read:
        return []
    known = counted(read, documents="Documents", rejected="Rejected by readers")
    known.insert(1, ("Text", charts.size(read.get("bytes"))))
    rows: list[list[object]] = []
    for source, tally in named(read, "by_source").items():
        sizes = [count(at(tally, "documents")), charts.size(at(tally, "bytes")), count(at(tally, "rejected"))]
        rows.append([source, *sizes, _most(named(tally, "reasons")), _most(named(tally, "licenses"))])
    heads = ["Source", "Documents", "Text", "Rejected", "Main reasons", "Licenses"]
    table = tag("div", charts.table(heads, rows), class_="commands") if rows else None
    parts: list[object] = [facts(known), table]
    rejected = tallied("Rejected by readers", named(read, "reasons"), number(read.get("rejected")), "documents")
    return [part for part in (*parts, rejected) if part is not None]


def _most(counts: Mapping[str, Any]) -> str:
    """The three most frequent of some counts, in words."""
    ranked = sorted(
        ((number(value) or 0.0, name) for name, value in counts.items()), key=lambda pair: (-pair[0], pair[1])
    )
    shown = [f"{name} ({count(value)})" for value, name in ranked[:3]]
    return ", ".join(shown) + (f" and {len(ranked) - 3} more" if len(ranked) > 3 else "") or DASH


def dropped(report: Report) -> list[object]:
    corpus = named(report, "corpus")
    ruled, talks = named(corpus, "filter"), named(corpus, "instruct")
    whole = number(ruled.get("documents"))
    tally = counted(ruled, documents="Documents", kept="Kept", dropped="Dropped")
    tally += counted(named(ruled, "masked"), documents="Kept with masked text")[: bool(ruled.get("masked"))]
    parts = [
        facts(tally) if ruled else None,
        tallied("Dropped by filters", named(ruled, "reasons"), whole, "documents"),
        _passed(named(ruled, "by_domain")),
        _rules_by_domain(ruled),
        tallied("Rejected conversations", named(talks, "rejected_by_reason"), None, "conversations"),
        tallied("Dropped conversations", named(talks, "dropped_by_reason"), None, "conversations"),
    ]
    cards = []
    for sample in listed(report, "dropped_samples"):
        value = number(sample.get("value"))
        seen = f"{text(sample.get('domain'))}, value {DASH if value is None else f'{value:.4g}'}"
        head = tag("p", tag("b", text(sample.get("reason"))), tag("span", seen), class_="tagged")
        cards.append(
            tag("article", head, tag("p", text(sample.get("text")), class_="quote", dir="auto"), class_="card")
        )
    samples = [tag("h3", "Sample of each reason"), folded(cards, "cards")] if cards else []
    return [part for part in (*parts, *samples) if part is not None]


def _passed(by_domain: Mapping[str, Any]) -> Html | None:
    rows = []
    for domain, tally in by_domain.items():
        kept, whole = number(at(tally, "kept")), number(at(tally, "documents"))
        share = kept / whole if kept is not None and whole else None
        rows.append(Bar(domain, share, f"{percent(share)} of {count(whole)}"))
    return charts.bars("Kept, by domain", rows, axis="share of a domain's documents", form=percent, top=1.0)


def _rules_by_domain(ruled: Mapping[str, Any]) -> Html | None:
    """Which rule dropped what share of which domain, for the rules that dropped most."""
    domains = named(ruled, "reasons_by_domain")
    ranked = sorted(named(ruled, "reasons").items(), key=lambda pair: (-(number(pair[1]) or 0.0), pair[0]))
    names = [name for name, _ in ranked[:MOST_RULES]]
    rows: list[list[object]] = []
    for name in names:
        row: list[object] = [name]
        for domain in domains:
            whole, num_dropped = (number(at(ruled, *path)) for path in _places(domain, name))
            row.append(percent(num_dropped / whole) if num_dropped is not None and whole else DASH)
        rows.append(row)
    return charts.table(["Share dropped, by domain", *domains], rows) if rows and domains else None


def _places(domain: str, rule: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ("by_domain", domain, "documents"), ("reasons_by_domain", domain, rule)


def duplicates(report: Report) -> list[object]:
    dedup = named(report, "corpus", "dedup")
    if not dedup:
        return []
    known = counted(dedup, documents="Documents", kept="Kept", removed="Removed")
    known += counted(dedup, exact="Exact duplicates", near="Near duplicates", compared="Compared pairs")
    titles = {
        "clusters": "Clusters of duplicates",
        "largest_cluster": "Documents in the largest cluster",
        "dropped": "Contain an evaluation question",
        "hits": "Matches with evaluation questions",
    }
    known += counted(dedup, **{key: name for key, name in titles.items() if key in dedup})
    bars = []
    for domain, tally in named(dedup, "by_domain").items():
        removed, whole = number(at(tally, "removed")), number(at(tally, "documents"))
        share = removed / whole if removed is not None and whole else None
        bars.append(Bar(domain, share, f"{percent(share)} ({count(removed)})"))
    kinds = {name: value for name, value in named(dedup, "reasons").items() if number(value)}
    chart = charts.bars("Removed, by domain", bars, axis="share of a domain's documents", form=percent)
    whole = number(dedup.get("documents"))
    hits = tallied("Matches with evaluation tasks", named(dedup, "hits_by_task"), None, "matches")
    parts: list[object | None] = [facts(known), tallied("Removed, by kind", kinds, whole, "documents"), chart, hits]
    return [part for part in parts if part is not None]


def tokenizer(report: Report) -> list[object]:
    stats = named(report, "corpus", "tokenizer")
    if not stats:
        return []
    known: list[Tile] = [("Kind", text(stats.get("kind"))), *counted(stats, vocab_size="Vocabulary")]
    known += counted(stats, unused_tokens="Token IDs that do not occur in the sample")
    known.append(("Encoder", text(stats.get("encoder"))))
    bars = []
    for domain, value in sorted(named(stats, "bytes_per_token").items(), key=lambda pair: -(number(pair[1]) or 0.0)):
        bars.append(Bar(domain, number(value), decimal(value, 2)))
    chart = charts.bars("Bytes per token, by domain", bars, axis="bytes per token (higher is better)")
    why = named(stats, "gpt2").get("because")
    gpt2_note = note(f"Not compared with GPT-2's tokenizer: {why}.") if isinstance(why, str) else None
    parts = [facts(known), chart, _sampled(stats), gpt2_note, _fertility(named(stats, "fertility"))]
    return [part for part in parts if part is not None]


def _sampled(stats: Mapping[str, Any]) -> Html | None:
    """The tokenizer's training sample, and how well it compresses unseen text."""
    known, unseen, gpt2 = (
        named(stats, *key) for key in (("sample",), ("bytes_per_token_unseen",), ("gpt2", "bytes_per_token"))
    )
    heads = ["Domain", "Sample", "Documents", "Share of the domain", "Bytes per token, unseen text", "GPT-2, same text"]
    rows: list[list[object]] = []
    for domain in known:
        sample = named(known, domain)
        sizes = [charts.size(sample.get("bytes")), count(sample.get("documents")), percent(sample.get("share"))]
        rows.append([domain, *sizes, decimal(unseen.get(domain), 2), decimal(gpt2.get(domain), 2)])
    return charts.table(heads, rows) if rows else None


def _fertility(languages: Mapping[str, Any]) -> Html | None:
    ranked = sorted(languages, key=lambda name: (-(number(at(languages, name, "documents")) or 0.0), name))
    rows: list[list[object]] = []
    for name in ranked[:MOST_LANGUAGES]:
        stats = named(languages, name)
        fertility = [decimal(stats.get(key), 2) for key in ("tokens_per_word", "tokens_per_character")]
        rows.append([name, count(stats.get("documents")), *fertility])
    heads = ["Language or script", "Documents", "Tokens per word", "Tokens per character"]
    return charts.table(heads, rows) if rows else None


def the_mix(report: Report) -> list[object]:
    corpus = named(report, "corpus")
    shard, talks = named(corpus, "shard"), named(corpus, "instruct")
    if not (shard or talks or named(corpus, "fetch")):
        return []
    size = counted(shard, tokens="Training tokens", documents="Training documents")
    last = {"anneal_tokens": "Annealing tokens", "anneal_documents": "Annealing documents"}
    size += counted(shard, **{key: name for key, name in last.items() if key in shard})
    size += counted(shard, held_out_tokens="Validation tokens", held_out_documents="Validation documents")
    conversation_tiles = counted(
        talks, conversations="Conversations", rejected="Rejected", cut_at_a_turn="Truncated at a turn"
    )
    conversation_tiles += counted(named(talks, "train"), rows="Training sequences", supervised="Tokens in the loss")
    conversation_tiles.append(("Packing efficiency", percent(at(talks, "train", "packing"))))
    anneal = [tag("h3", "Annealing"), *_shares(shard, "anneal")] if named(shard, "anneal") else []
    return [
        facts(size),
        *_shares(shard, "mix"),
        _through(corpus),
        *anneal,
        *([tag("h3", "Conversations"), facts(conversation_tiles)] if talks or not shard else []),
    ]


def _shares(shard: Mapping[str, Any], key: str) -> list[object]:
    """Asked against reached, and how often each domain comes."""
    bars, rows = [], []
    for domain, stats in named(shard, key).items():
        asked, share = number(at(stats, "asked")), number(at(stats, "share"))
        bars.append(Bar(domain, share, f"{percent(share)} of {percent(asked)}", mark=asked))
        epochs = cell(f"{domain}, epochs", at(stats, "epochs"), _epochs, _top(shard, key), False)
        limit = at(stats, "limited_by")
        tokens = [count(at(stats, name)) for name in ("asked_tokens", "tokens")]
        rows.append([domain, percent(asked), percent(share), *tokens, epochs, text(limit) if limit else "nothing"])
    legend = tag("p", tag("span", tag("i", class_="mark"), "requested in the recipe", class_="key"), class_="legend")
    chart = charts.bars("Share of the mix, actual and requested", bars, axis="share of all tokens", form=percent)
    if not bars:
        return []
    return [chart, legend, charts.table(MIX_HEADS, rows)]


def _epochs(value: Any) -> str:
    return decimal(value, 2)


def _top(shard: Mapping[str, Any], key: str) -> float:
    epochs = [number(at(one, "epochs")) or 0.0 for one in named(shard, key).values()]
    return max(epochs, default=0.0) or 1.0


def _through(corpus: Mapping[str, Any]) -> Html | None:
    """Documents of each domain, stage by stage."""
    rows: list[list[object]] = []
    read = named(corpus, "fetch", "by_domain")
    for domain in read:
        kept = [count(at(corpus, stage, "by_domain", domain, "kept")) for stage in ("filter", "dedup")]
        tokens = count(at(corpus, "shard", "mix", domain, "tokens"))
        rows.append(
            [domain, count(at(read, domain, "documents")), charts.size(at(read, domain, "bytes")), *kept, tokens]
        )
    heads = ["Domain", "Read", "Text", "After filters", "After deduplication", "Tokens in the mix"]
    return charts.table(heads, rows) if rows else None
