"""
Lines of Python by package, against a budget for each; `make check` prints them.

`python scripts/lines.py` exits with 1 where a package is over its budget. A row of BUDGET grows only with a reason in
docs/decisions. The sum has to come down to 39,000.
"""

import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "bloomery"
BUDGET = {
    "(top)": 1_800,
    "core": 4_080,
    "hw": 6_050,
    "data": 13_600,
    "tokenizer": 3_380,
    "shards": 1_690,
    "model": 4_255,
    "weights": 6_575,
    "train": 11_540,
    "generate": 2_170,
    "evaluation": 4_690,
    "serve": 3_920,
    "stages": 6_480,
}


def lines_by_package() -> dict[str, int]:
    """Lines of all Python files, by package; those of modules outside of packages as "(top)"."""
    counts = dict.fromkeys(BUDGET, 0)
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        package = parts[0] if len(parts) > 1 else "(top)"
        counts[package] = counts.get(package, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return counts


def main() -> int:
    counts = lines_by_package()
    for package, count in counts.items():
        over = "  OVER" if count > BUDGET.get(package, 0) else ""
        print(f"{package:<12}{count:>7,} of {BUDGET.get(package, 0):>7,}{over}")
    print(f"{'all':<12}{sum(counts.values()):>7,} of {sum(BUDGET.values()):>7,}")
    return int(any(count > BUDGET.get(package, 0) for package, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
