"""
The verbs. The only argv, and the only exit code: 0 done, 1 our fault, 2 the user can fix it, 130 interrupted. `doctor`
alone also exits 1 where something is not as it should be, but works.

Imports stand inside the verbs here, and only here, so that `--help` and `status` start at once.
"""

import argparse
import difflib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery import __version__
from bloomery.core.errors import BloomeryError, DataError, RunError

if TYPE_CHECKING:
    from bloomery.serve.answerer import TextAnswerer
    from bloomery.tokenizer.chat import Message

MODEL = "a run folder, a stage folder, a checkpoint folder or a model folder, for example runs/demo"
SETTINGS = "settings that win over the recipe, in TOML's words: pretrain.steps=100 'filter.rules=[]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    options = parse(arguments)
    try:
        code = int(options.verb(options) or 0)
        sys.stdout.flush()
        return code
    except BloomeryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read has read enough; what is left to write goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        print("This is a fault of Bloomery's, not yours. The lines above say where.", file=sys.stderr)
        return 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a verb. Settings may stand before and after options, which argparse alone does not take."""
    top = parser()
    words = sys.argv[1:] if arguments is None else arguments
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is not None and verb not in (known := top.get_default("verbs")):
        near = difflib.get_close_matches(verb, known, n=1)
        cure = f"Did you mean {near[0]!r}?" if near else f"Verbs: {', '.join(known)}."
        top.error(f"there is no verb {verb!r}\n{cure}")
    options, rest = top.parse_known_args(arguments)
    if rest and (not hasattr(options, "settings") or any(word.startswith("-") for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.settings = [*options.settings, *rest]
    return options


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="bloomery",
        description="Raw text to a language model that answers, on the machine you have.",
        epilog="A first run: bloomery run recipes/demo.toml, then: bloomery chat runs/demo",
    )
    top.add_argument("--version", action="version", version=f"bloomery {__version__}")
    top.set_defaults(verb=lambda _: top.print_help())
    verbs = top.add_subparsers(title="verbs", metavar="VERB")
    _run_verbs(verbs)
    _model_verbs(verbs)
    _machine_verbs(verbs)
    top.set_defaults(verbs=tuple(verbs.choices))
    return top


def _verb(
    verbs: Any, name: str, run: Any, brief: str, example: str, *, reports: bool = False
) -> argparse.ArgumentParser:
    one: argparse.ArgumentParser = verbs.add_parser(
        name, help=brief, description=f"{brief[0].upper()}{brief[1:]}.", epilog=f"Example: {example}"
    )
    one.set_defaults(verb=run)
    if reports:
        one.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else there")
    return one


def _run_verbs(verbs: Any) -> None:
    one = _verb(verbs, "run", run, "run a recipe: what is done stays, the rest runs", "bloomery run recipes/demo.toml")
    _recipe_arguments(one)
    stages = one.add_mutually_exclusive_group()
    stages.add_argument("--until", metavar="STAGE", help="stop after this stage")
    stages.add_argument("--only", metavar="STAGE", help="run this stage alone; its inputs have to be done")

    one = _verb(
        verbs, "plan", plan, "say what a recipe needs, before it runs", "bloomery plan recipes/demo.toml", reports=True
    )
    _recipe_arguments(one)

    one = _verb(verbs, "status", status, "say how far a run is", "bloomery status runs/demo", reports=True)
    one.add_argument("run", type=Path, metavar="RUN", help="a run folder, for example runs/demo")
    one.add_argument("--verify", action="store_true", help="compare every file with its sha256 too")

    one = _verb(
        verbs,
        "clean",
        clean,
        "say what a run folder does not need, and free it when told",
        "bloomery clean runs/demo --yes",
        reports=True,
    )
    one.add_argument("run", type=Path, metavar="RUN", help="a run folder, for example runs/demo")
    one.add_argument("--yes", action="store_true", help="remove it; without this, nothing is removed")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return value


def _recipe_arguments(one: argparse.ArgumentParser) -> None:
    one.add_argument("recipe", type=Path, metavar="RECIPE", help="a TOML file, for example recipes/demo.toml")
    one.add_argument("settings", nargs="*", default=[], metavar="key=value", help=SETTINGS)
    one.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run folders (default: runs)")


def _model_verbs(verbs: Any) -> None:
    one = _verb(
        verbs, "chat", chat, "talk to a model in the terminal", "bloomery chat runs/demo --prompt 'What is 17 plus 25?'"
    )
    one.add_argument("model", type=Path, metavar="MODEL", help=MODEL)
    one.add_argument("--prompt", action="append", default=[], help="ask this and end; may be given several times")
    one.add_argument("--temperature", type=_temperature, default=0.0, help="0 takes the likeliest token (default)")
    one.add_argument("--max-tokens", type=_positive, default=128, help="longest answer (default: 128)")
    one.add_argument("--seed", type=int, default=0, help="of the draw, where the temperature is above 0")

    one = _verb(
        verbs, "serve", serve, "serve all models over HTTP, with a page to talk to them", "bloomery serve --port 8000"
    )
    one.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run folders (default: runs)")
    one.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    one.add_argument("--port", type=int, default=8000, help="default: 8000")

    one = _verb(
        verbs,
        "eval",
        evaluate,
        "ask a model held-out questions, and judge the answers",
        "bloomery eval runs/demo",
        reports=True,
    )
    one.add_argument("model", type=Path, metavar="MODEL", help=MODEL)
    one.add_argument("--questions", type=_positive, help="how many (default: as a recipe's evaluate.questions)")
    one.add_argument("--seed", type=int, help="which ones (default: as a recipe's evaluate.seed)")


def _machine_verbs(verbs: Any) -> None:
    one = _verb(
        verbs,
        "doctor",
        doctor,
        "examine this machine: what fits, what is wrong, what cures it",
        "bloomery doctor",
        reports=True,
    )
    one.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder that runs will be written to (default: runs)"
    )


def run(options: argparse.Namespace) -> int:
    from bloomery.core import config, stage
    from bloomery.core import run as runs
    from bloomery.core.log import say
    from bloomery.recipe import STAGES, Recipe
    from bloomery.stages import card, data_report

    recipe = config.load(Recipe, options.recipe, options.settings)
    stage.check_names(STAGES, options.until, options.only)
    root = options.runs / recipe.name
    with stage.locked(root):
        plans = stage.lay_out(STAGES, recipe, root)
        runs.remember(root, recipe, plans)
        done = stage.execute(plans, until=options.until, only=options.only)
        card.write(root)
        page = data_report.write(root)
    asked = f"stopped after {options.until}" if options.until else f"only {options.only}" if options.only else ""
    if asked and (left := [plan.stage.name for plan in plans if not plan.fresh]):
        stages = "1 stage" if len(left) == 1 else f"{len(left)} stages"
        say(f"{root}: {asked}, as asked; {stages} to go: {', '.join(left)}")
    else:
        say(f"{root}: {'done' if 'ran' in done.values() else 'everything is fresh, nothing to do'}")
    report = plans[-1].folder / "report.html"
    if plans[-1].stage.name in done and report.is_file():
        say(f"report: {report}")
    elif page is not None and done:
        say(f"report of the data: {page}")
    return 0


def plan(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from bloomery.core import config, stage
    from bloomery.recipe import STAGES, Recipe
    from bloomery.stages.tokenizer import vocab_size
    from bloomery.train.plan import plan as training_plan

    recipe = config.load(Recipe, options.recipe, options.settings)
    plans = stage.lay_out(STAGES, recipe, options.runs / recipe.name)
    stages = [{"stage": one.stage.name, "fresh": one.fresh, "folder": str(one.folder)} for one in plans]
    ids = vocab_size(recipe.tokenizer)
    needs = {
        name: training_plan(section, recipe.pretrain.model, ids)
        for name, section in (("pretrain", recipe.pretrain), ("finetune", recipe.finetune))
    }
    facts = {name: asdict(one) | {"peak_bytes": one.peak_bytes} for name, one in needs.items()}
    if options.json:
        print(json.dumps({"recipe": recipe.name, "stages": stages, **facts}))
        return 0
    for one in stages:
        print(f"{one['stage']:<11} {'fresh' if one['fresh'] else 'will run':<9} {one['folder']}")
    for name, need in needs.items():
        print(
            f"{name}: {need.parameters:,} parameters, {need.tokens:,} tokens, {need.flops:.3g} FLOPs, about "
            f"{need.peak_bytes / 2**20:,.0f} MiB (weights {need.weights_bytes / 2**20:,.0f}, gradients "
            f"{need.gradient_bytes / 2**20:,.0f}, optimizer {need.optimizer_bytes / 2**20:,.0f}, activations "
            f"{need.activation_bytes / 2**20:,.0f}) besides Python and torch"
        )
    return 0


def status(options: argparse.Namespace) -> int:
    from bloomery.core import run as runs
    from bloomery.core.log import say
    from bloomery.core.stage import brief

    states = runs.states(options.run, thorough=options.verify)
    damaged = [one for one in states if one.state == "damaged"]
    if options.json:
        rows = [{**one.__dict__, "folder": str(one.folder)} for one in states]
        print(json.dumps({"run": str(options.run), "done": all(s.state == "done" for s in states), "stages": rows}))
        return 2 if damaged else 0
    for one in states:
        seconds = f"{one.seconds:8.1f} s" if one.seconds is not None else " " * 10
        print(f"{one.stage:<11} {one.state:<8} {seconds}  {one.damage or brief(one.stats)}".rstrip())
    for one in damaged:
        say(f"To make {one.stage} again: rm {one.folder / 'manifest.json'}, then run the recipe.")
    return 2 if damaged else 0


def clean(options: argparse.Namespace) -> int:
    from bloomery.core import run as runs
    from bloomery.core import stage

    runs.current(options.run)  # of what is no run folder, none is made
    with stage.locked(options.run):
        found = runs.waste(options.run)
        freed = runs.remove(found) if options.yes else 0
    if options.json:
        rows = [{"path": str(one.path), "bytes": one.size, "why": one.why} for one in found]
        print(json.dumps({"run": str(options.run), "waste": rows, "freed_bytes": freed}))
        return 0
    for one in found:
        print(f"{one.size / 2**20:10.1f} MiB  {one.path}  ({one.why})")
    total = sum(one.size for one in found) / 2**20
    print(
        f"{total:10.1f} MiB  " + ("freed" if options.yes else "would be freed by --yes" if found else "nothing to free")
    )
    return 0


def chat(options: argparse.Namespace) -> int:
    from bloomery.core.log import say
    from bloomery.serve.models import answerer
    from bloomery.weights.find import model_folder

    model = answerer(str(options.model), model_folder(options.model))
    if options.prompt:
        for prompt in options.prompt:
            print(f"> {prompt}")
            _say_answer(model, [{"role": "user", "content": prompt}], options)
        return 0
    say(f"{options.model}. An empty line starts a new conversation; Ctrl-D ends.")
    messages: list[Message] = []
    while (line := _read_line()) is not None:
        if not line.strip():
            messages = []
            say("(new conversation)", "dim")
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _say_answer(model, messages, options)})
        except DataError as error:
            messages = []
            say(f"{error}\n(new conversation)")
    return 0


def _read_line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


def _say_answer(model: "TextAnswerer", messages: "list[Message]", options: argparse.Namespace) -> str:
    from bloomery.serve.answerer import Sampling

    sampling = Sampling(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    said = []
    for piece in model.answer(messages, sampling).pieces:
        print(piece.text, end="", flush=True)
        said.append(piece.text)
    print()
    return "".join(said)


def serve(options: argparse.Namespace) -> int:
    from bloomery.serve.models import Shelf
    from bloomery.serve.server import serve as serve_models

    if not options.runs.is_dir():
        cure = "Name the folder that holds run folders: --runs DIR"
        raise RunError("does not exist", where=str(options.runs), cure=cure)
    serve_models(Shelf(options.runs), options.host, options.port)
    return 0


def evaluate(options: argparse.Namespace) -> int:
    from bloomery.evaluation import questions
    from bloomery.hw import device
    from bloomery.stages.config import Evaluate
    from bloomery.stages.evaluate import answers, ask, describe
    from bloomery.weights import find, huggingface

    said = {name: value for name in ("questions", "seed") if (value := getattr(options, name)) is not None}
    config = Evaluate(**said)
    loaded = huggingface.load(find.model_folder(options.model), device.find(config.device).place)
    judged = ask(loaded, questions.held_out(config.seed, config.questions), config.max_tokens)
    scores = answers(judged)
    if options.json:
        print(json.dumps({"model": describe(loaded), "answers": scores}))
        return 0
    for kind, row in scores["by_kind"].items():
        print(f"{kind:<22} {row['exact']:7.1%} exact  {row['ended']:7.1%} ended  of {row['n']}")
    low, high = scores["interval"]
    print(
        f"{'all':<22} {scores['exact']:7.1%} exact  {scores['ended']:7.1%} ended  of {scores['n']}  "
        f"(95 %: {low:.1%} to {high:.1%})"
    )
    return 0


def doctor(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from bloomery.hw import doctor as checks
    from bloomery.hw.host import Host

    findings = checks.examine(Host.here(), options.runs)
    if options.json:
        print(json.dumps({"findings": [asdict(one) for one in findings], "exit": checks.exit_code(findings)}))
    else:
        print("\n".join(checks.as_lines(findings)))
    return checks.exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
