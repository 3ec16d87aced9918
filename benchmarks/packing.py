"""
How full are rows of packed conversations?

    python benchmarks/packing.py [--json] [--quick] [--data FOLDER] [--template chatml]

Renders every conversation of FOLDER/dev (instruct and multiturn_*.jsonl.zst; by default of data in $BLOOMERY_SHARED
or ../shared) in a template with GPT-2's tokenizer, which lies in FOLDER/tokenizer, and packs those that fit into rows
of 257 to 4,097 tokens: first-fit-decreasing as the stage `instruct` does, beside next-fit in the order of the files,
which is what "fill a row, then begin another" comes to, and the fewest rows that there could be if conversations
could be cut anywhere. --quick takes every tenth.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from stand_in import PLACE

from bloomery.core.chat import Message
from bloomery.core.pipeline import machine, versions
from bloomery.data.readers import bytes as readers_bytes
from bloomery.data.readers import rows
from bloomery.shards.build import first_fit_decreasing
from bloomery.tokenizer import chat_template, importers
from bloomery.tokenizer.chat_template import TEMPLATES, Renderer

ROLES = {"human": "user", "gpt": "assistant", "system": "system", "function_call": "assistant", "observation": "tool"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=PLACE / "data")
    parser.add_argument("--template", choices=tuple(TEMPLATES), default="bloomery")
    options = parser.parse_args()
    tokenizer = importers.load(options.data / "tokenizer", special=chat_template.special_tokens(options.template))
    renderer = Renderer(tokenizer, TEMPLATES[options.template])
    talks = [talk for talk in conversations(options.data / "dev") if not renderer.trouble(talk)]
    lengths = [len(renderer.render(talk).ids) for talk in talks[:: 10 if options.quick else 1]]
    found = {str(capacity): packed(lengths, capacity) for capacity in (257, 513, 1025, 2049, 4097)}
    ours = found["2049"]
    print(
        json.dumps(
            {
                "name": "packing",
                "ours": {"value": ours["efficiency"], "unit": "share of a row of 2,049 that is conversation"},
                "peers": {"next_fit": {"value": ours["next_fit"], "unit": "the same", "version": "the rule itself"}},
                "ratio_to_best_peer": round(ours["efficiency"] / ours["next_fit"], 3),
                "conversations": len(lengths),
                "by_row_tokens": found,
                "machine": machine(),
                "versions": versions(),
                "notes": f"template {options.template}, GPT-2's tokenizer",
            }
        )
    )


def conversations(folder: Path) -> Iterator[list[Message]]:
    for name in ("instruct", "multiturn_en", "multiturn_zh"):
        for _, row in rows.jsonl(folder / f"{name}.jsonl.zst"):
            if isinstance(row, readers_bytes.ReadError):
                continue
            if "instruction" in row:
                asked = "\n\n".join(part for part in (row["instruction"], row["input"]) if part)
                said = [("user", asked), ("assistant", row["output"])]
            else:
                said = [(ROLES[turn["from"]], turn["value"]) for turn in row["conversations"]]
            yield [cast(Message, {"role": role, "content": content}) for role, content in said]


def packed(lengths: list[int], capacity: int) -> dict[str, Any]:
    fit = [length for length in lengths if length <= capacity]
    began = time.perf_counter()
    count = len(first_fit_decreasing(fit, capacity))
    seconds = time.perf_counter() - began
    filled = sum(fit)
    return {
        "efficiency": round(filled / (count * capacity), 5),
        "next_fit": round(filled / (next_fit(fit, capacity) * capacity), 5),
        "rows": count,
        "fewest_rows_thinkable": -(-filled // capacity),
        "too_long": len(lengths) - len(fit),
        "seconds": round(seconds, 4),
    }


def next_fit(lengths: list[int], capacity: int) -> int:
    count, room = 0, 0
    for length in lengths:
        if length > room:
            count, room = count + 1, capacity
        room -= length
    return count


if __name__ == "__main__":
    main()
