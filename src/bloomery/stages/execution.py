"""A whole run: the stages of a recipe that are not done, then the data card and the page of the run folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bloomery.core import run as runs
from bloomery.core import stage
from bloomery.core.log import say
from bloomery.core.stage import Stage
from bloomery.hw import launcher
from bloomery.stages import card, overview, planned


def by_first_process(work: Callable[[], None]) -> None:
    """
    Call `work`. Of several processes that torchrun has started, the first calls it, and the others only train with it.
    """
    process = launcher.launched()
    if process is None or process.size == 1:
        work()
        return
    launcher.address()  # before hours of data stages, at whose end the processes meet
    if process.rank > 0:
        stage.resolve("bloomery.train.launch:follow")()
        return
    try:
        work()
    finally:
        stage.resolve("bloomery.train.launch:dismiss")()


def run(stages: Sequence[Stage], recipe: Any, root: Path, *, until: str | None = None, only: str | None = None) -> None:
    """
    Run what is not done of a recipe in its run folder, up to the stage `until`, or the stage `only` alone. Raises what
    `stage.check_names`, `stage.check_sections`, `stage.lay_out` and `stage.execute` do.
    """
    stage.check_names(stages, until, only)
    stage.check_sections(stages, recipe, until=until, only=only)
    with stage.locked(root):
        plans = stage.lay_out(stages, recipe, root)
        runs.remember(root, recipe, plans)
        if any(plan.stage.name == "pretrain" and not plan.fresh for plan in plans) and (
            reasons := planned.only_here(recipe)
        ):
            say(f"this model can be used here and nowhere else: {'; '.join(reasons)}", "yellow")
        done = stage.execute(plans, until=until, only=only)
        card.write(root)
        page = overview.write(root)
    asked = f"stopped after {until}" if until else f"only {only}" if only else ""
    if asked and (left := [plan.stage.name for plan in plans if not plan.fresh]):
        to_go = "1 stage" if len(left) == 1 else f"{len(left)} stages"
        say(f"{root}: {asked}, as asked; {to_go} to go: {', '.join(left)}")
    else:
        say(f"{root}: {'done' if 'ran' in done.values() else 'everything is fresh, nothing to do'}")
    if page is not None:
        say(f"report: {page}")
