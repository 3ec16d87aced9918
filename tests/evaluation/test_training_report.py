import re
from xml.etree import ElementTree

from bloomery.evaluation.charts import heat
from bloomery.evaluation.report import gradient_flow, relative_updates, render, time_by_phase, training, troubles
from tests.evaluation.made import flow, full


def text_of(*parts: object) -> str:
    return re.sub(r"\s+", " ", re.sub("<.*?>", " ", " ".join(map(str, parts))))


def cells(page: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(f"<a>{page}</a>").iter("rect"))


def test_the_page_tells_of_speed_memory_bits_and_time() -> None:
    seen = text_of(*training(full()))
    for told in ("41.2%", "812.3 MB", "Last validation bits per byte", "forward and backward", "Update size"):
        assert told in seen, told
    assert "Problems during training" in seen
    assert seen.index("step 800") < seen.index("step 700")  # of what it wrote, the latest first


def test_the_flow_of_gradients_has_a_cell_for_each_layer_at_each_step() -> None:
    rows = [{"step": 20 * n, "gradient_flow": flow(20 * n)} for n in range(1, 8)]
    picture, profile, _ = gradient_flow(rows)
    found = cells(str(picture))
    assert len(found) == 7 * 8
    titles = [cell.findtext("title") or "" for cell in found]
    assert f"blocks.2, step 60: {flow(60)['blocks.2']:.3g}" in titles
    strengths = {title: float(cell.get("fill-opacity") or 0) for title, cell in zip(titles, found, strict=True)}
    values = {title: float(title.rsplit(" ", 1)[1]) for title in titles}
    assert sorted(titles, key=lambda one: strengths[one])[-1] == max(titles, key=lambda one: values[one])
    assert "step 20" in text_of(profile)
    assert "step 140" in text_of(profile)


def test_a_long_run_is_drawn_in_some_columns() -> None:
    rows = [{"step": n, "gradient_flow": {"embed": 1.0, "norm": 2.0}} for n in range(1000)]
    assert len(cells(str(gradient_flow(rows)[0]))) == 2 * 60


def test_equal_ratios_are_equal_steps_of_strength() -> None:
    found = cells(
        heat("t", [("a", [1.0, 10.0, 100.0]), ("b", [None, 0.0, 10.0])], [1.0, 2.0, 3.0], x_axis="step", unit="u")
    )
    strengths = [float(cell.get("fill-opacity") or 0) for cell in found]
    assert strengths == [0.06, 0.53, 1.0, 0.0, 0.53]


def test_a_picture_without_a_number_is_a_dash() -> None:
    assert "—" in heat("t", [("a", [None])], [1.0], x_axis="step", unit="u")
    assert gradient_flow([{"step": 3, "loss": 1.0}]) == []


def test_a_run_without_trouble_has_no_table_of_it() -> None:
    assert troubles([{"step": 3, "loss": 1.0}]) == []
    assert time_by_phase([{"step": 3, "loss": 1.0}]) == []


def test_the_size_of_an_update_is_relative_to_the_weights() -> None:
    assert relative_updates([{"step": 3, "weight_norm": 8.0, "update_norm": 2.0}, {"step": 4}]) == [(3.0, 0.25)]


def test_a_page_with_all_of_training_is_whole() -> None:
    assert render(full()).count('class="heat"') == 2
