"""Counts: those of all parts together are the counts of the whole, and their order follows from the names alone."""

from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.executor import Counts, ranked

ENTRIES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["kept", "dropped", "z", "y"]), st.integers(0, 9)))


def counted(entries: list[tuple[str, str, int]]) -> Counts:
    counts = Counts("kept", "dropped")
    for group, name, number in entries:
        counts.add(group, {name: number})
    return counts


@given(st.lists(ENTRIES))
def test_merged_parts_are_the_counts_of_the_whole(parts: list[list[tuple[str, str, int]]]) -> None:
    whole, merged = counted([entry for part in parts for entry in part]), Counts("kept", "dropped")
    for part in parts:
        merged.merge(counted(part).to_json(sort_groups=False))
    assert list(merged.to_json().items()) == list(whole.to_json().items())
    assert merged.total() == whole.total()
    assert sum(whole.total().values()) == sum(number for part in parts for *_, number in part)
    assert list(merged.to_json(sort_groups=False)) == list(dict.fromkeys(group for part in parts for group, *_ in part))


def test_the_names_of_the_constructor_come_first_and_are_there_where_they_are_0() -> None:
    counts = counted([("b", "z", 1), ("b", "y", 2), ("a", "dropped", 3), ("b", "z", 1)])
    written = counts.to_json()
    assert [(group, list(numbers.items())) for group, numbers in written.items()] == [
        ("a", [("kept", 0), ("dropped", 3)]),
        ("b", [("kept", 0), ("dropped", 0), ("y", 2), ("z", 2)]),
    ]
    assert list(counts.to_json(by_number=True)["b"]) == ["y", "z", "dropped", "kept"]
    assert list(ranked({"a": 1, "c": 2, "b": 2})) == ["b", "c", "a"]
    assert counts["b"]["y"] == 2
    assert not counts["unknown"]
