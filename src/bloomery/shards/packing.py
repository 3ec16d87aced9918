"""Packing conversations into rows of one length, longest first, so that little is padding."""

from collections.abc import Sequence


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Rows of indices whose lengths add up to at most `capacity`; every index in exactly one row.

    Longest first, each into the first row that still takes it (Johnson 1973: at most 11/9 of the best number of rows,
    plus 6/9). Ties go by index, so equal inputs give equal rows. Raises ValueError for a length over capacity.

    A tree over the rows holds the largest room below each of its nodes, so that n lengths take n log n steps.
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node n has the children 2n and 2n + 1; the rows are the last `leaves` nodes
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"length {length} does not fit into a row of {capacity}")
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows
