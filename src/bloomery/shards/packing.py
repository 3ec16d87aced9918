"""Packing conversations into rows of one length, longest first, so that little is padding."""

from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Rows of indices whose lengths add up to at most `capacity`; every index in exactly one row.

    Longest first, each into the fullest row that still takes it (Johnson 1973: at most 11/9 of the best number of rows,
    plus 4). Ties go by index, so equal inputs give equal rows. Raises ValueError for a length over capacity.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the room they have left
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"length {length} does not fit into a row of {capacity}")
        room = next((room for room in range(length, capacity + 1) if by_room[room]), None)
        if room is None:
            rows.append([])
            row = len(rows) - 1
            room = capacity
        else:
            row = by_room[room].pop()
        rows[row].append(index)
        by_room[room - length].append(row)
    return rows
