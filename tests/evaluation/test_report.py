"""The page of a report: whole, honest about what is missing, and deaf to markup in its data."""

import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from bloomery.evaluation import charts
from bloomery.evaluation.report import SECTIONS, render

VOID = {"meta"}
DOMAINS = ("code", "documentation", "worlds")
KINDS = ("library", "library, later turn", "moved, later turn", "sum", "sum, later turn", "where", "who")


def full() -> dict[str, Any]:
    """A report as the stage `evaluate` leaves it, of a small run."""
    return {
        "recipe": "demo",
        "made": "2025-03-04T15:16:17Z",
        "versions": {"python": "3.11.9", "bloomery": "0.1.0", "torch": "2.9.1", "numpy": "2.3.1"},
        "machine": {"system": "Linux", "processor": "x86_64", "cores": 2, "device": "cpu"},
        "model": {
            **{"parameters": 2_412_800, "context": 256, "vocab_size": 4096, "folder": "09-finetune-5ab3c1d2/model"},
            **{"tokenizer": "4f1c" * 16, "template": "a07e" * 16},
        },
        "answers": {
            **{"n": 200, "exact": 0.635, "ended": 0.985, "interval": [0.5664, 0.6987]},
            "by_kind": {
                kind: {"n": 28, "exact": round(0.97 - 0.11 * place, 4), "ended": round(1 - 0.01 * place, 4)}
                for place, kind in enumerate(KINDS)
            },
        },
        "bits_per_byte": {
            **{"model": 1.3127, "xz": 2.0461, "zstd": 2.1189, "bytes": 812_345, "documents": 311},
            "by_domain": {
                domain: {"model": 1.1 + 0.2 * n, "xz": 1.9, "zstd": 2.0 + 0.1 * n, "bytes": 270_000, "documents": 104}
                for n, domain in enumerate(DOMAINS)
            },
        },
        "leaks": {"checked": 200, "found": 0},
        "curves": {"pretrain": curve(3000, 8.3, 2.31, 0.02), "finetune": curve(420, 1.14, 0.21, 0.01)},
        "corpus": corpus(),
        "dropped_samples": [
            {
                "reason": reason,
                "value": 0.1234567 * (n + 1),
                "domain": "code",
                "text": f"def f{n}():\n    return {{}}\n" * 6,
            }
            for n, reason in enumerate(list(corpus()["filter"]["reasons"])[:8])
        ],
        "samples": {
            "answers": [talk(kind, right) for right in (True, False) for kind in KINDS],
            "continuations": [
                {"prompt": "def main():\n", "text": "    parser = argparse.ArgumentParser()\n    return parser\n"},
                {"prompt": "The module ", "text": "textwrap has fill and wrap. Which module has fill?"},
            ],
        },
        "stages": [
            {
                "stage": stage,
                "folder": f"{n:02d}-{stage}-9f31c2aa",
                "seconds": 3.7 * n**2 + 0.4,
                "resumed": stage == "pretrain",
            }
            for n, stage in enumerate([*corpus(), "pretrain", "finetune"], 1)
        ],
    }


def curve(steps: int, first: float, last: float, peak: float) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for step in range(10, steps + 1, 10):
        fallen = last + (first - last) * math.exp(-7 * step / steps)
        rows.append(
            {
                **{"step": step, "loss": fallen + 0.12 * math.sin(step * 12.9898), "tokens_per_second": 8700.0},
                **{"learning_rate": peak * (1 - step / steps), "gradient_norm": 0.4 + 0.2 * math.sin(step * 7.31)},
            }
        )
        if step % 100 == 0:
            rows.append({"step": step, "validation_loss": fallen + 0.05})
    return rows


def corpus() -> dict[str, Any]:
    sizes = {"code": 5210, "documentation": 2144, "worlds": 6000}
    reasons = {"gopher.too_few_words": 812, "classifier": 377, "repetition.duplicate_line_characters": 154}
    reasons |= {"code.long_line": 61, "fineweb.short_lines": 44, "code.generated": 23, "code.xml": 1}
    return {
        "fetch": {
            **{"documents": 13_354, "bytes": 61_204_112, "rejected": 12, "reasons": {"not_utf8": 8, "binary": 4}},
            "by_domain": {domain: {"documents": n, "bytes": n * 4583} for domain, n in sizes.items()},
        },
        "classify": {"classifiers": [judged("quality", "high"), judged("toxicity", "low")]},
        "filter": {
            **{"documents": 13_354, "kept": 11_873, "dropped": 1481, "reasons": reasons},
            "by_domain": {domain: {"documents": n, "kept": n - 400, "dropped": 400} for domain, n in sizes.items()},
        },
        "dedup": {
            **{"documents": 11_873, "kept": 11_214, "removed": 659, "exact": 403, "near": 256, "compared": 1877},
            "by_domain": {d: {"documents": n - 400, "kept": n - 620, "removed": 220} for d, n in sizes.items()},
        },
        "tokenizer": {"vocab_size": 4096, "bytes_per_token": {"code": 2.913, "documentation": 3.402, "worlds": 4.118}},
        "shard": {
            **{"tokens": 12_288_004, "documents": 14_020, "held_out_tokens": 250_112, "held_out_documents": 224},
            "mix": {
                "code": {"asked": 0.45, "tokens": 5_529_601, "epochs": 1.213, "share": 0.45},
                "documentation": {"asked": 0.3, "tokens": 3_072_001, "epochs": 4.0, "share": 0.25},
                "worlds": {"asked": 0.25, "tokens": 3_686_402, "epochs": 0.87, "share": 0.3},
            },
        },
        "instruct": {
            **{"conversations": 20_000, "refused": 3, "cut_at_a_turn": 17, "refused_by_reason": {"too_long": 3}},
            "train": {
                "conversations": 19_600,
                "rows": 3466,
                "tokens": 880_112,
                "supervised": 171_002,
                "packing": 0.9879,
            },
        },
    }


def judged(name: str, keep: str) -> dict[str, Any]:
    """The statistics of one classifier."""
    return {
        **{"name": name, "kind": "contrast", "keep": keep, "examples": 4000, "positives": 2000, "held_out": 402},
        **{"auc": 0.98712, "precision": 0.9512, "recall": 0.9421, "brier": 0.0413, "threshold": 0.5},
        **{"calibration_error": 0.0213, "strength": 10.0},
        "bins": [
            {"low": n / 10, "high": (n + 1) / 10, "texts": 40, "score": n / 10 + 0.05, "positive": n / 10 + 0.03}
            for n in range(10)
        ],
        "cuts": [
            {"threshold": n / 20, "precision": 0.5 + n / 50, "recall": 1 - n / 40, "reached": 0.5} for n in range(1, 20)
        ],
        "caught": {"broken": 1.0, "cut": 0.7234, "repeated": 0.9787, "shuffled": 0.9355, "spam": 1.0},
        "telling_positive": ["return", "self .", "the", ") :", "\n \n", "in the", "import"],
        "telling_negative": ["click", "buy", "Ã ©", "online ,", "deals", "! !", "best"],
    }


def talk(kind: str, right: bool) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "Mia put the lamp in the kitchen. Tom hid the coin in the shed. Who had the coin?"}
    ]
    if "later" in kind:
        messages += [
            {"role": "assistant", "content": "Tom had the coin."},
            {"role": "user", "content": "Where is the lamp?"},
        ]
    answer = "The lamp is in the kitchen."
    said = answer if right else "The lamp is in the shed."
    return {"kind": kind, "messages": messages, "expected": answer, "said": said, "exact": right, "ended": True}


class Checked(HTMLParser):
    """Fails for an element that is not closed where it should be, and keeps what a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.started: list[tuple[str, dict[str, str | None]]] = []
        self.seen = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.started.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.seen += data + "\n"

    def count(self, tag: str, look: str) -> int:
        return sum(name == tag and look in (attrs.get("class") or "").split() for name, attrs in self.started)


def drawings(page: str) -> list[ElementTree.Element]:
    """Every drawing, parsed as XML; a drawing inside another comes with it."""
    found, depth, start = [], 0, 0
    for match in re.finditer(r"<svg\b|</svg>", page):
        if match.group() == "</svg>":
            depth -= 1
            if depth == 0:
                found.append(ElementTree.fromstring(page[start : match.end()]))
        else:
            start = match.start() if depth == 0 else start
            depth += 1
    return found


def section(page: str, anchor: str) -> str:
    return page[page.index(f'id="{anchor}"') :].split("</section>")[0]


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in JSON data, what lies deeper first; of long lists only the ends."""
    if isinstance(data, dict):
        for key in data:
            yield from paths(data[key], (*path, key))
    elif isinstance(data, list):
        for place in sorted({0, len(data) - 1}, reverse=True) if data else ():
            yield from paths(data[place], (*path, place))
    if path:
        yield path


def parent(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


def test_the_page_is_well_formed_and_so_is_every_drawing() -> None:
    page = render(full())
    assert page.startswith("<!doctype html>")
    assert Checked(page).started
    assert len(drawings(page)) > 20


def test_every_entry_of_the_contents_leads_to_a_section() -> None:
    started = Checked(render(full())).started
    anchors = [attrs["id"] for name, attrs in started if name == "section"]
    assert [attrs["href"] for name, attrs in started if name == "a"] == [f"#{anchor}" for anchor in anchors]
    assert len(anchors) == len(SECTIONS)


def test_the_page_needs_nothing_but_itself() -> None:
    page = render(full())
    assert not re.search(r"https?:|<script|<link|<img|url\(|@import|\bon\w+=", page)


def test_markup_in_any_text_stays_text() -> None:
    poison = '<script>alert("1")</script>&\'"\x00\ud800'

    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poisoned(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poisoned(item) for item in value]
        return value + poison if isinstance(value, str) else value

    data = poisoned(full())
    for path in [("answers", "by_kind"), ("corpus", "filter", "reasons"), ("corpus", "shard", "mix"), ("versions",)]:
        spot = parent(data, (*path, ""))
        for key in list(spot):
            spot[key + poison] = spot.pop(key)
    page = render(data)
    page.encode()
    assert "<script" not in page
    assert len(drawings(page)) == len(drawings(render(full())))
    assert '<script>alert("1")</script>&\'"' in Checked(page).seen


def test_an_empty_report_has_every_section_and_invents_no_number() -> None:
    page = render({})
    assert all(f"<h2>{name}</h2>" in page for _, name, _ in SECTIONS)
    for anchor, _, _ in SECTIONS:
        seen = re.sub("<.*?>|95% interval", "", section(page, anchor))
        assert not re.search(r"\d", seen), anchor


@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("value", ["gone", None, "text", -1.0, float("nan"), [], {}, [3]])
def test_any_part_may_be_missing_or_odd(value: Any, depth: int) -> None:
    for phase in (0, 1):
        data = full()
        data["curves"] = {name: rows[:3] for name, rows in data["curves"].items()}
        places = [path for path in paths(data) if len(path) == depth]
        for path in places[phase::2]:
            holder = parent(data, path)
            if value == "gone":
                del holder[path[-1]]
            elif value == value or isinstance(holder[path[-1]], float):
                holder[path[-1]] = value
        page = render(data)
        assert "nan" not in page
        assert "None" not in page


def test_the_headline_shows_the_numbers_of_the_data() -> None:
    seen = Checked(section(render(full()), "headline").split(">", 1)[1]).seen
    for shown in (
        "63.5%",
        "98.5%",
        "56.6% to 69.9%",
        "of 200",
        "1.313",
        "2.046",
        "2.119",
        "812.3 kB",
        "2.413M",
        "4,096",
    ):
        assert shown in seen


def test_every_count_of_the_corpus_is_shown() -> None:
    seen = Checked(render(full())).seen
    data = corpus()
    wanted = [data["shard"]["tokens"], data["dedup"]["compared"], data["instruct"]["train"]["supervised"]]
    wanted += [facts["tokens"] for facts in data["shard"]["mix"].values()]
    wanted += list(data["filter"]["reasons"].values())
    assert all(f"{number:,}" in seen for number in wanted)
    assert "0.9871" in seen  # the area under the curve
    assert all(f"{ratio:.2f}" in seen for ratio in data["tokenizer"]["bytes_per_token"].values())


def test_a_share_is_drawn_as_long_as_it_is() -> None:
    widths = [found.get("width") for found in by_look(section(render(full()), "answers"), "bar-fill")]
    kinds = full()["answers"]["by_kind"].values()
    assert widths == [f"{scores[key] * 100:.2f}%" for scores in kinds for key in ("exact", "ended")]


def test_questions_that_test_copying_are_said_to() -> None:
    assert "library's questions test copying" in Checked(render(full())).seen
    report = full()
    report["answers"]["by_kind"] = {"sum": report["answers"]["by_kind"]["sum"]}
    assert "test copying" not in Checked(render(report)).seen


def test_every_reason_has_a_bar_and_the_longest_comes_first() -> None:
    found = by_look(section(render(full()), "dropped"), "bar-fill")
    data = corpus()
    num_reasons = len(data["filter"]["reasons"]) + len(data["fetch"]["reasons"]) + 1
    assert len(found) == num_reasons
    widths = [float((bar.get("width") or "").rstrip("%")) for bar in found[: len(data["filter"]["reasons"])]]
    assert widths == sorted(widths, reverse=True)


def by_look(page: str, look: str) -> list[ElementTree.Element]:
    return [part for drawing in drawings(page) for part in drawing.iter() if look in (part.get("class") or "").split()]


def test_curves_have_every_point_of_the_data() -> None:
    page = section(render(full()), "curves")
    rows = [*full()["curves"]["pretrain"], *full()["curves"]["finetune"]]
    lines = [len((line.get("points") or "").split()) for line in by_look(page, "faint")]
    assert sum(lines) == sum("loss" in row for row in rows)
    assert len(by_look(page, "dot")) == sum("validation_loss" in row for row in rows)


def test_a_loss_is_drawn_where_its_axis_says() -> None:
    drawn = charts.curves("t", [charts.Curve("a", [(0.0, 1.0), (10.0, 3.0)])], x_axis="step", y_axis="loss")
    line = by_look(drawn, "strong")[0].get("points")
    labels = {text.text: text.get("y") for text in by_look(drawn, "row")}
    assert labels["1"] == "100.00%"
    assert labels["3"] == "0.00%"
    assert line == "0.0,1000.0 1000.0,0.0"


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (0.0, 0.635), (2.31, 8.3), (0.0, 1481.0), (1e-5, 3e-4), (5.0, 5.0), (0.0, 0.0), (-3.0, 4.0)],
)
def test_ticks_are_round_and_hold_the_data(low: float, high: float) -> None:
    found = charts.ticks(low, high, 4)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 7
    step = (found[-1] - found[0]) / (len(found) - 1)
    assert re.fullmatch(r"(1|2|2\.5|5)0*e[+-]\d+", re.sub(r"\.?0+e", "e", f"{step:.6e}"))


def test_smoothing_keeps_a_straight_line_and_shows_whole_windows_only() -> None:
    line = [(float(x), 3.0 * x) for x in range(20)]
    assert charts.smoothed(line, 4) == line[4:-4]
    assert charts.smoothed(line[:8], 4) == []


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (charts.count(1234567), "1,234,567"),
        (charts.percent(1.0), "100%"),
        (charts.percent(0.6352), "63.5%"),
        (charts.percent(0.0001), "<0.1%"),
        (charts.size(999), "999 bytes"),
        (charts.size(61_204_112), "61.2 MB"),
        (charts.duration(0.44), "0.4 s"),
        (charts.duration(754), "12 min 34 s"),
        (charts.duration(7500), "2 h 05 min"),
        (charts.short(1_500_000), "1.5M"),
        (charts.short(0.00002), "2e-5"),
        (charts.short(True), charts.DASH),
        (charts.decimal(float("inf")), charts.DASH),
    ],
)
def test_numbers_are_written_for_people(shown: str, wanted: str) -> None:
    assert shown == wanted
