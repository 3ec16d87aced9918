"""
The engine on a Ray cluster: the same function over the same parts, through Ray Data.

Every node sees `out` and the inputs under the same paths (a shared file system). A part's files are written by the
node that has it; its record comes back to the driver, which writes it. So a cluster leaves what one machine leaves.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bloomery.core import errors
from bloomery.core.errors import BloomeryError
from bloomery.data import extras


def run(
    address: str | None,
    workers: int | None,
    work: Callable[..., Any],
    config: Any,
    parts: Sequence[Any],
    out: Path,
) -> Iterator[tuple[Any, Any]]:
    """
    Parts with their records, as they come back.

    Ray is started for the time of this call where no address is given and none runs in this process. Raises what
    `work` raises, and DataError where Ray is not installed.
    """
    ray, data = extras.load("ray", extra="ray"), extras.load("ray.data", extra="ray")
    ours = not ray.is_initialized()
    if ours:
        _start(ray, address, workers)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    try:
        order = sorted(range(len(parts)), key=lambda place: -parts[place].num_bytes)
        rows = data.from_items([{"place": place} for place in order], override_num_blocks=len(parts))
        kept = list(parts)
        done = rows.map(_task, fn_args=(work, config, kept, out), num_cpus=1, concurrency=workers)
        for row in done.iter_rows():
            answer = row["answer"]
            if "error" in answer:
                raise getattr(errors, answer["error"])(answer["what"], where=answer["where"], cure=answer["cure"])
            yield parts[row["place"]], answer["record"]
    finally:
        if ours:
            ray.shutdown()


def _start(ray: Any, address: str | None, workers: int | None) -> None:
    """Join the cluster at `address`, or start one of this machine's that nobody else can reach."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    quiet = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        ray.init(num_cpus=workers, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    else:
        ray.init(address=address, **quiet)


def _task(row: dict[str, Any], work: Callable[..., Any], config: Any, parts: Sequence[Any], out: Path) -> Any:
    """One part, on whatever node it came to. The user's errors come back as data: Ray would wrap them in its own."""
    place = int(row["place"])
    try:
        answer = {"record": work(config, parts[place], out)}
    except BloomeryError as error:
        answer = {"error": type(error).__name__, "what": error.what, "where": error.where, "cure": error.cure}
    return {"place": place, "answer": answer}
