"""
The verbs. The only argv, and the only exit code: 0 done, 1 our fault, 2 the user can fix it, 130 interrupted, 143 asked
to end. `doctor` alone also exits 1 where something is not as it should be, but works.

Imports stand inside the verbs here, and only here, so that `--help` and `status` start at once.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bloomery import arguments
from bloomery.core.errors import BloomeryError, DataError, RunError
from bloomery.core.stop import INTERRUPTED, Terminated

if TYPE_CHECKING:
    from bloomery.recipe import Recipe
    from bloomery.serve.answerer import TextAnswerer
    from bloomery.tokenizer.chat import Message


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    options = arguments.parse(words)
    try:
        code = VERBS[options.verb](options)
        sys.stdout.flush()
        return code
    except BloomeryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except Terminated as ended:
        how = "interrupted" if ended.code == INTERRUPTED else "ended as asked"
        print(f"{how}; the same command goes on from here", file=sys.stderr)
        return int(ended.code or 0)
    except BrokenPipeError:  # whoever read has read enough; what is left to write goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        print("This is a fault of Bloomery's, not yours. The lines above say where.", file=sys.stderr)
        return 1


def show_help(options: argparse.Namespace) -> int:
    arguments.parser().print_help()
    return 0


def run(options: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _run(options)
    from bloomery.train import launch

    if int(os.environ["RANK"]) > 0:  # of several that torchrun has started, the first does all but training
        launch.follow()
        return 0
    try:
        return _run(options)
    finally:
        launch.dismiss()


def _run(options: argparse.Namespace) -> int:
    from bloomery.core import config, stage
    from bloomery.core import run as runs
    from bloomery.core.log import say
    from bloomery.recipe import STAGES, Recipe
    from bloomery.stages import card, overview

    recipe = config.load(Recipe, options.recipe, options.settings)
    stage.check_names(STAGES, options.until, options.only)
    stage.check_sections(STAGES, recipe, until=options.until, only=options.only)
    root = options.runs / recipe.name
    with stage.locked(root):
        plans = stage.lay_out(STAGES, recipe, root)
        runs.remember(root, recipe, plans)
        if any(plan.stage.name == "pretrain" and not plan.fresh for plan in plans) and (why := _only_here(recipe)):
            say(f"this model can be used here and nowhere else: {'; '.join(why)}", "yellow")
        done = stage.execute(plans, until=options.until, only=options.only)
        card.write(root)
        page = overview.write(root)
    asked = f"stopped after {options.until}" if options.until else f"only {options.only}" if options.only else ""
    if asked and (left := [plan.stage.name for plan in plans if not plan.fresh]):
        stages = "1 stage" if len(left) == 1 else f"{len(left)} stages"
        say(f"{root}: {asked}, as asked; {stages} to go: {', '.join(left)}")
    else:
        say(f"{root}: {'done' if 'ran' in done.values() else 'everything is fresh, nothing to do'}")
    if page is not None:
        say(f"report: {page}")
    return 0


def plan(options: argparse.Namespace) -> int:
    from importlib.util import find_spec

    from bloomery.core import config, stage
    from bloomery.data import hosts
    from bloomery.recipe import STAGES, Recipe
    from bloomery.stages import planned
    from bloomery.stages.tokenizer import vocab_size
    from bloomery.train.planning.report import Price

    recipe = config.load(Recipe, options.recipe, options.settings)
    with hosts.impatiently():
        laid = stage.lay_out(STAGES, recipe, options.runs / recipe.name, blind=True)
    made = {}
    if recipe.pretrain is not None:
        tools: dict[str, Any] = {}
        if find_spec("torch") is not None:
            from bloomery.train.planning import here

            tools = {"here": here.here, "check": here.check}
        price = Price(per_hour=options.price, watts=options.watts)
        wish = planned.Wish(device=options.device, memory_bytes=options.memory, devices=options.devices, price=price)
        sections = {"pretrain": recipe.pretrain, "finetune": recipe.finetune, "prefer": recipe.prefer}
        rows = vocab_size(recipe.tokenizer)
        if recipe.pretrain.start_from is not None:
            rows = stage.resolve("bloomery.stages.pretrain:num_rows")(recipe.pretrain, rows)
        made = planned.plans(sections, recipe.pretrain.model, rows, wish, **tools)
    told = planned.facts(
        recipe.name,
        laid,
        stage.missing_sections(STAGES, recipe),
        made,
        ({"depth": _depth_told(recipe)} if recipe.pretrain and recipe.pretrain.depth else {})
        | {"only_here": _only_here(recipe)},
        recipe.shard.tokens,
    )
    print(json.dumps(told) if options.json else "\n".join(planned.lines(told, made)))
    return 0


def _only_here(recipe: "Recipe") -> list[str]:
    """What of the model no other program has; nothing where none is trained, or where there is no torch."""
    from importlib.util import find_spec

    if recipe.pretrain is None or find_spec("torch") is None:
        return []
    from bloomery.weights import families

    return families.reasons(recipe.pretrain.model)


def _depth_told(recipe: "Recipe") -> dict[str, Any]:
    """What the dial of [pretrain] came to, with what the recipe says itself."""
    assert recipe.pretrain is not None
    from bloomery.train.plan import trained_tokens

    model, optimizer = recipe.pretrain.model, recipe.pretrain.optimizer
    return {
        "depth": recipe.pretrain.depth,
        "model": model.model_dump(include={"width", "num_layers", "num_heads", "num_kv_heads", "mlp_width"}),
        "tokens_per_step": trained_tokens(recipe.pretrain.tokens_per_step, model.context),
        "steps": recipe.pretrain.steps,
        "rates": {name: rate for name, rate in optimizer.model_dump().items() if name.endswith("learning_rate")},
    }


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


def data(options: argparse.Namespace) -> int:
    from bloomery.core import config
    from bloomery.core.log import say
    from bloomery.recipe import Recipe
    from bloomery.stages import standalone

    sections = config.plain(config.load(Recipe, options.recipe)) if options.recipe else {}
    words = [word for word in options.inputs if "=" in word and not os.path.exists(word)]
    asked = standalone.Asked(
        tool=options.what,
        inputs=[word for word in options.inputs if word not in words],
        out=options.out,
        sections={name: sections[name] for name in standalone.Sections.model_fields if name in sections},
        settings=[*words, *options.settings],
        text_field=options.text_field,
        id_field=options.id_field,
        workers=options.workers,
        memory_bytes=getattr(options, "memory", None),
        against=getattr(options, "against", ()),
        tokenizer=getattr(options, "tokenizer", None),
    )
    if not asked.inputs:
        raise DataError("no file or folder is named", cure=f"bloomery data {options.what} IN… --out DIR")
    result = standalone.run(asked)
    if options.json:
        print(json.dumps(result))
        return 0
    print(f"{result['documents']:>12,} documents\n{result['kept']:>12,} kept\n{result['dropped']:>12,} dropped")
    for reason, count in sorted(result["reasons"].items(), key=lambda pair: (-pair[1], pair[0])):
        print(f"{count:>12,}   {reason}")
    say(f"{options.out}: done in {result['seconds']:.1f} s")
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
    if options.task:
        from bloomery.evaluation import verb

        verb.run(options)
        return 0
    from bloomery.evaluation import questions
    from bloomery.hw import device
    from bloomery.stages.config import Evaluate
    from bloomery.stages.evaluate import answers, ask, describe
    from bloomery.weights import find, huggingface

    said = {name: value for name in ("questions", "seed") if (value := getattr(options, name)) is not None}
    config = Evaluate(**said)
    loaded = huggingface.load(find.model_folder(options.model), device.find(config.device).place)
    asked = questions.held_out(config.seed, config.questions)
    judged = ask(loaded, asked, config.max_tokens)
    scores = answers(judged, len(asked) - len(judged))
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
    if scores["not_asked"]:
        print(f"{scores['not_asked']} of {len(asked)} did not fit the model's context, and were not asked")
    return 0


def export(options: argparse.Namespace) -> int:
    from bloomery.core.log import say
    from bloomery.weights import export as exports
    from bloomery.weights import find, huggingface

    loaded = huggingface.load(find.model_folder(options.model))
    written = exports.write(loaded, options.out, options.format, options.dtype)
    if options.json:
        print(json.dumps({"model": str(options.model), "out": str(options.out), **written}))
        return 0
    say(f"{options.out}: {written['architecture']} in {written['number_format']}, {', '.join(written['files'])}")
    return 0


def import_(options: argparse.Namespace) -> int:
    from bloomery.core.log import say
    from bloomery.weights import export as exports

    made = exports.take_in(options.source, options.out, options.tokenizer)
    if options.json:
        print(json.dumps({"source": str(options.source), "out": str(options.out), **made}))
        return 0
    say(f"{options.out}: {made['architecture']}, {made['parameters']:,} parameters, {made['vocab_size']:,} ids")
    return 0


def doctor(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from bloomery.hw.doctor import report as checks
    from bloomery.hw.host import Host

    host = checks.shown(Host.here()) if sys.stderr.isatty() else Host.here()
    findings = checks.examine(host, options.runs)
    if options.json:
        print(json.dumps({"findings": [asdict(one) for one in findings], "exit": checks.exit_code(findings)}))
    else:
        print("\n".join(checks.as_lines(findings)))
    return checks.exit_code(findings)


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "": show_help,
    "run": run,
    "plan": plan,
    "status": status,
    "clean": clean,
    "data": data,
    "chat": chat,
    "serve": serve,
    "eval": evaluate,
    "export": export,
    "import": import_,
    "doctor": doctor,
}


if __name__ == "__main__":
    sys.exit(main())
