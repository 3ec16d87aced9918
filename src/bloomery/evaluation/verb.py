"""`bloomery eval --task`: tasks of the table on one model, as lines or as one JSON object."""

import argparse
import json
from typing import Any

from bloomery.core.log import say
from bloomery.evaluation import benchmark, core_average, shown, tasks
from bloomery.evaluation.benchmark import Asked
from bloomery.hw import device
from bloomery.weights import find, huggingface


def run(options: argparse.Namespace) -> None:
    """Ask, write the results of every question where that was asked for, and print the scores."""
    asked = Asked(
        tasks=tuple(name for name in options.task if name != core_average.NAME),
        place=tasks.place(options.task, options.data, offline=options.offline),
        limit=options.limit,
        shots=options.shots,
        samples=options.samples,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed or 0,
        opening=not options.no_opening,
        run_code=options.run_code,
        weaker_sandbox=options.weaker_sandbox,
    )
    loaded = huggingface.load(find.model_folder(options.model), device.find().place)
    found = benchmark.run(loaded, asked)
    told: dict[str, Any] = {name: benchmark.scores(name, results) for name, results in found.items()}
    parts = benchmark.core(loaded, asked) if core_average.NAME in options.task else {}
    whole = benchmark.core_scores(parts) if parts else None
    if options.out is not None:
        benchmark.save(options.out, found | parts)
        say(f"{options.out}: {sum(map(len, (found | parts).values())):,} questions")
    if options.json:
        core = {} if whole is None else {"core": whole}
        print(json.dumps({"model": str(options.model), "seed": asked.seed, "tasks": told, **core}))
    else:
        print("\n".join([*shown.lines(told), *([] if whole is None else shown.core(whole))]))
