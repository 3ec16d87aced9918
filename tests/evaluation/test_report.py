"""The page of a report: whole, honest about what is missing, and deaf to markup in its data."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bloomery.evaluation import charts
from bloomery.evaluation.charts import heat
from bloomery.evaluation.report import DATA_SECTIONS, SECTIONS, render
from tests.evaluation.made import DOMAINS, corpus, full

VOID = {"meta"}


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


FINITE = st.floats(allow_nan=False, allow_infinity=False)
SERIES = st.one_of(
    st.lists(FINITE, min_size=1, max_size=6),
    FINITE.flatmap(lambda same: st.lists(st.just(same), min_size=1, max_size=6)),
    st.lists(st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 1e300, 1.7976931348623157e308]), min_size=1, max_size=6),
)


@settings(max_examples=150, deadline=None)
@given(SERIES, SERIES)
@example([60.0], [6.2448])
@example([1.0, 2.0], [1e-12, 1e-12])
@example([0.0], [1.0000000000000002])
@example([1.7976931348623157e308, -9.9792015476736e291], [0.0, 0.0])
def test_every_series_of_finite_numbers_has_a_chart(xs: list[float], ys: list[float]) -> None:
    points = list(zip(xs, ys, strict=False))
    sizes = [abs(y) for y in ys]
    rows = [(f"row {n}", [y, None]) for n, y in enumerate(ys)]
    made = [
        *(charts.curves("t", [charts.Curve("c", points, look)], x_axis="x", y_axis="y") for look in ("strong", "dots")),
        charts.curves("t", [charts.Curve("c", points)], x_axis="x", y_axis="y", from_zero=True),
        charts.bars("t", [charts.Bar("b", size, "v", mark=size) for size in sizes], axis="x"),
        heat("t", rows, [0.0, 1.0], x_axis="x", unit="u"),
    ]
    for chart in made:
        assert chart is not None
        assert not re.search(r"\b(nan|inf)\b", re.sub(r'aria-label="[^"]*"', "", chart))


@given(FINITE, FINITE)
def test_ticks_ascend_around_what_they_measure(low: float, high: float) -> None:
    found = charts.ticks(min(low, high), max(low, high), 4)
    assert found == sorted(set(found))
    assert 2 <= len(found) <= 12


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
    places = [("answers", "by_kind"), ("corpus", "filter", "reasons"), ("corpus", "shard", "mix"), ("versions",)]
    for path in (*places, ("corpus", "filter", "scores")):
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
    wanted += [data["shard"]["anneal"]["worlds"]["asked_tokens"], data["shard"]["anneal_documents"]]
    wanted += [data["dedup"]["clusters"], data["dedup"]["largest_cluster"]]
    wanted += list(data["filter"]["reasons"].values())
    assert all(f"{number:,}" in seen for number in wanted)
    assert "0.9871" in seen  # the area under the curve
    assert all(f"{ratio:.2f}" in seen for ratio in data["tokenizer"]["bytes_per_token"].values())
    assert all(shown in seen for shown in ("193", "2.81", "2.23", "27.2%", "2.17", "0.27"))


def test_a_share_is_drawn_as_long_as_it_is() -> None:
    widths = [found.get("width") for found in by_look(section(render(full()), "answers"), "bar-fill")]
    kinds = full()["answers"]["by_kind"].values()
    assert widths == [f"{scores[key] * 100:.2f}%" for scores in kinds for key in ("exact", "ended")]


def test_questions_that_test_copying_are_said_to() -> None:
    assert "Library questions test copying" in Checked(render(full())).seen
    report = full()
    report["answers"]["by_kind"] = {"sum": report["answers"]["by_kind"]["sum"]}
    assert "test copying" not in Checked(render(report)).seen


def test_every_reason_has_a_bar_and_the_longest_comes_first() -> None:
    found = by_look(section(render(full()), "dropped"), "bar-fill")
    reasons = corpus()["filter"]["reasons"]
    assert len(found) == len(reasons) + len(DOMAINS) + 1  # and those kept by domain, and refused conversations
    widths = [float((bar.get("width") or "").rstrip("%")) for bar in found[: len(reasons)]]
    assert widths == sorted(widths, reverse=True)
    assert len(by_look(section(render(full()), "read"), "bar-fill")) == len(corpus()["fetch"]["reasons"])


def test_a_run_that_asked_no_questions_tells_of_its_conversations_instead() -> None:
    ended = {"value": 0.75, "low": 0.6, "high": 0.86, "n": 40}
    talks = {
        "n": 40,
        "finetune": {"ended": ended, "bits_per_byte": 1.25},
        "pretrain": {"ended": ended | {"value": 0.0}},
    }
    nothing = {"n": 0, "exact": 0.0, "ended": 0.0, "interval": [0.0, 1.0], "by_kind": {}}
    page = section(render({**full(), "answers": nothing, "conversations": talks}), "headline")
    assert "Exactly correct answers" not in page
    assert "Leaks" not in page
    for shown in ("75%", "of 40, before the token limit; 95% interval 60% to 86%", "1.250"):
        assert shown in page
    assert "no questions about" in section(render({**full(), "answers": nothing}), "answers")


def test_a_run_without_a_model_has_a_page_of_its_data() -> None:
    data = {
        key: full()[key] for key in ("recipe", "made", "versions", "machine", "corpus", "dropped_samples", "stages")
    }
    page = render(data, DATA_SECTIONS)
    anchors = [attrs["id"] for name, attrs in Checked(page).started if name == "section"]
    assert anchors == [anchor for anchor, _, _ in DATA_SECTIONS]
    assert "Nothing was recorded" not in page
    for shown in ("61.2 MB", "11,214", "12.29M", "2.91–4.12", "MIT (5,201)", "arc_easy", "2.23", "byte_bpe"):
        assert shown in Checked(page).seen
    assert "—" in render({}, DATA_SECTIONS)


def test_a_classifier_is_shown_with_all_that_is_known_of_it() -> None:
    page = section(render(full()), "classifier")
    seen = Checked("<section " + page + "</section>").seen
    for shown in ("0.9871", "95.1%", "94.2%", "0.0213", "Calibration", "Precision and recall", "low scores are kept"):
        assert shown in seen
    assert seen.count("Just kept: the 20 documents nearest the threshold") == 2
    quality, toxicity = page.split("toxicity:")
    assert quality.index("return") < quality.index("click")
    assert toxicity.index("click") < toxicity.index("return")


def by_look(page: str, look: str) -> list[ElementTree.Element]:
    return [part for drawing in drawings(page) for part in drawing.iter() if look in (part.get("class") or "").split()]


def test_curves_have_every_point_of_the_data() -> None:
    data = full()
    rows = [*data["curves"]["pretrain"], *data["curves"]["finetune"]]
    for row in rows:
        row.pop("gradient_flow", None)
    page = section(render(data), "curves")
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
