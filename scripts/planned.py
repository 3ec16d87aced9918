"""
The plans that the pages under docs/do quote, in benchmarks/results/planned.json. A test computes them again.

    python scripts/planned.py --write            plan each of PLANS again, and write the numbers
    python scripts/planned.py                    name each plan whose numbers differ; exit with 1 if one does

Each plan is for a device that this machine does not need to have, so the numbers are the same on every machine.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "planned.json"
TOLERANCE = 0.01
"""Other versions of torch round tensors to other sizes."""
GPT2, TINYSTORIES, PLASMA = (f"recipes/{name}.toml" for name in ("gpt2-124m", "tinystories", "plasma-235m"))


class Plan(NamedTuple):
    recipe: str
    wish: dict[str, Any]
    """Arguments of `bloomery.plan`."""
    quoted: tuple[str, ...]
    """What the pages quote of it, by the names of `plans` in readme.py."""


PLANS = {
    "gpt-mixed": Plan(GPT2, {"device": "9070xt"}, ("peak", "sequences", "speed", "time")),
    "tiny-mixed": Plan(TINYSTORIES, {"device": "9070xt"}, ("peak", "sequences", "speed", "time")),
    "gpt-navi": Plan(GPT2, {"device": "7900xtx"}, ("peak", "usable", "sequences", "speed", "time")),
    "gpt-laptop": Plan(GPT2, {"device": "rtx-4060-ti-8"}, ("peak", "usable", "sequences", "time")),
    "plasma-laptop": Plan(PLASMA, {"memory_bytes": 8 * 2**30}, ("peak", "usable", "sequences")),
    "gpt-instinct": Plan(GPT2, {"device": "mi300x"}, ("peak", "usable", "speed", "time")),
    "gpt-instincts": Plan(
        GPT2,
        {"device": "mi300x", "devices": 8, "price": 16.0, "power_watts": 6000.0},
        ("peak", "speed", "time", "cost", "energy"),
    ),
    "tiny-apple": Plan(TINYSTORIES, {"device": "apple-m4", "memory_bytes": 16 * 2**30}, ("speed", "time")),
    "gpt-ada": Plan(GPT2, {"device": "rtx-4090"}, ("peak", "usable", "speed", "time")),
    "gpt-halo": Plan(GPT2, {"device": "strix-halo-128"}, ("peak", "sequences", "speed", "time")),
}
KEPT = ("peak_bytes", "usable_bytes", "tokens_per_second", "seconds", "cost", "kilowatt_hours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # the text is not needed, so no network is
    now = {name: planned(name) for name in PLANS}
    if options.write:
        RESULTS.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    elif stale := differences(now):
        print(*stale, "To fix: python scripts/planned.py --write; python scripts/readme.py --write", sep="\n")
        sys.exit(1)


def planned(name: str) -> dict[str, float | None]:
    """The numbers of one plan that pages quote. None for a time where the speed of the device is not known."""
    import bloomery

    plan = PLANS[name]
    facts = bloomery.plan(ROOT / plan.recipe, runs=ROOT / "runs" / "planned", **plan.wish)["pretrain"]
    return {key: facts[key] for key in KEPT} | {"sequences": facts["choice"]["rows"]}


def differences(now: dict[str, dict[str, float | None]]) -> list[str]:
    """The plans whose numbers are not those of RESULTS, within TOLERANCE."""
    before = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [
        f"{name}: {key} is {value}, and {before[name][key]} by {RESULTS.name}"
        for name, facts in now.items()
        for key, value in facts.items()
        if not _close(value, before[name][key])
    ]


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))


if __name__ == "__main__":
    main()
