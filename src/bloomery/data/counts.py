"""
Counts by group and name: how many documents of a domain were kept, and how many were dropped for which reason.

A worker counts the documents of its part, and the record of the part holds `to_json`. The stage merges the records of
all parts. Its manifest and the reports hold `to_json` of the sum.
"""

from collections import Counter
from collections.abc import Mapping


def ranked(numbers: Mapping[str, int]) -> dict[str, int]:
    """Numbers by name, the largest first, equal ones by name."""
    return dict(sorted(numbers.items(), key=lambda pair: (-pair[1], pair[0])))


class Counts:
    """
    Whole numbers by group and name, such as {"web": {"documents": 3, "kept": 2}}.

    A group is a domain or a source. It has each of `names` from its first count on, also where that stays 0.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._groups: dict[str, Counter[str]] = {}

    def __getitem__(self, group: str) -> Counter[str]:
        """The numbers of a group; of an unknown group none."""
        return self._groups.get(group, Counter())

    def add(self, group: str, numbers: Mapping[str, int]) -> None:
        """Add to the numbers of a group. A number may be negative."""
        if group not in self._groups:
            self._groups[group] = Counter(dict.fromkeys(self._names, 0))
        known = self._groups[group]
        for name, number in numbers.items():
            known[name] += number

    def merge(self, by_group: Mapping[str, Mapping[str, int]]) -> None:
        """Add what `to_json` returned for another part."""
        for group, numbers in by_group.items():
            self.add(group, numbers)

    def total(self) -> Counter[str]:
        """The sums over all groups."""
        whole: Counter[str] = Counter()
        for numbers in self._groups.values():
            whole.update(numbers)
        return whole

    def to_json(self, *, sort_groups: bool = True, by_number: bool = False) -> dict[str, dict[str, int]]:
        """
        JSON data: groups by name, or in the order of their first count.

        The names of the constructor come first, in their order, the others by name; or all by number, the largest
        first.
        """
        listed = sorted(self._groups) if sort_groups else self._groups
        return {group: ranked(self._groups[group]) if by_number else self._ordered(group) for group in listed}

    def _ordered(self, group: str) -> dict[str, int]:
        numbers = self._groups[group]
        return {name: numbers[name] for name in (*self._names, *sorted(numbers.keys() - set(self._names)))}
