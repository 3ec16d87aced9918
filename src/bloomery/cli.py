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
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery import arguments
from bloomery.core import shortage, streams
from bloomery.core.errors import BloomeryError, DataError, RunError
from bloomery.core.stop import INTERRUPTED, Terminated

if TYPE_CHECKING:
    from bloomery.serve.answerer import TextAnswerer
    from bloomery.tokenizer.chat import Message


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    streams.open_closed()
    streams.show_every_character()
    with streams.checked_output():
        return _main(words)


def _main(words: Sequence[str] | None) -> int:
    try:
        code = VERBS[(options := _parsed(words)).verb](options)
        sys.stdout.flush()
        return code
    except BloomeryError as error:
        if isinstance(error, streams.OutputError):
            streams.discard(streams.STDOUT)
        streams.tell(f"{type(error).__name__}: {error}")
        return 2
    except KeyboardInterrupt:
        streams.tell("interrupted; the same command goes on from here")
        return 130
    except Terminated as ended:
        how = "interrupted" if ended.code == INTERRUPTED else "ended as asked"
        streams.tell(f"{how}; the same command goes on from here")
        return int(ended.code or 0)
    except BrokenPipeError:  # whoever read has read enough; what is left to write goes nowhere
        streams.discard(streams.STDOUT)
        return 0
    except Exception as error:
        if (short := shortage.as_error(error)) is not None:
            streams.tell(str(short))
            shortage.skip_teardown_after_import(error, 2)
            return 2
        streams.tell(f"{traceback.format_exc()}This is a fault of Bloomery's, not yours. The lines above say where.")
        return 1


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    try:
        return arguments.parse(words)
    except SystemExit:
        sys.stdout.flush()  # of a help text that nobody can read
        raise


def show_help(options: argparse.Namespace) -> int:
    arguments.parser().print_help()
    return 0


def run(options: argparse.Namespace) -> int:
    from bloomery.core import config
    from bloomery.recipe import STAGES, Recipe
    from bloomery.stages import execution

    def whole() -> None:
        recipe = config.load(Recipe, options.recipe, options.settings)
        execution.run(STAGES, recipe, options.runs / recipe.name, until=options.until, only=options.only)

    execution.by_first_process(whole)
    return 0


def plan(options: argparse.Namespace) -> int:
    from bloomery.core import config
    from bloomery.recipe import STAGES, Recipe
    from bloomery.stages import planned
    from bloomery.train.planning.report import Price

    recipe = config.load(Recipe, options.recipe, options.settings)
    price = Price(per_hour=options.price, watts=options.watts)
    wish = planned.Wish(device=options.device, memory_bytes=options.memory, devices=options.devices, price=price)
    told, made = planned.report(STAGES, recipe, options.runs / recipe.name, wish)
    print(json.dumps(told) if options.json else "\n".join(planned.lines(told, made)))
    return 0


def status(options: argparse.Namespace) -> int:
    from bloomery.core import run as runs
    from bloomery.core.log import say
    from bloomery.core.stage import brief

    states = runs.states(options.run, thorough=options.verify)
    damaged = [one for one in states if one.state == "damaged"]
    if options.json:
        print(json.dumps(runs.summary(options.run, states)))
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

    root: Path = options.run
    runs.current(root)  # of what is no run folder, none is made
    with stage.locked(root):
        found, old = runs.waste(root), runs.expired(root, now=options.now)
        freed = runs.delete([*found, *old] if options.now else old) if options.yes or options.now else 0
        moved = runs.remove(root, found) if options.yes and not options.now else runs.Moved()
        strangers = runs.strangers(root)
    moved_bytes = sum(one.size for one in found) if moved.moves else 0
    if options.json:
        rows, trash = ([{"path": str(w.path), "bytes": w.size, "why": w.why} for w in some] for some in (found, old))
        print(
            json.dumps(
                {
                    "run": str(root),
                    "waste": rows,
                    "trash": trash,
                    "moved_bytes": moved_bytes,
                    "freed_bytes": freed,
                    "restore": moved.restore(),
                    "left_in_trash": [str(path) for path in strangers],
                }
            )
        )
        return 0
    for one in (*found, *old):
        print(f"{one.size / 2**20:10.1f} MiB  {one.path}  ({one.why})")
    if not found and not old:
        print(f"{0:10.1f} MiB  nothing to free")
    elif not (options.yes or options.now):
        print(f"{sum(one.size for one in (*found, *old)) / 2**20:10.1f} MiB  would go: --yes moves it to {runs.TRASH}")
        print(f"{'':16}and frees what is there for a day; --now frees all at once")
    if freed:
        print(f"{freed / 2**20:10.1f} MiB  freed")
    if moved.moves:
        print(f"{moved_bytes / 2**20:10.1f} MiB  moved to {root / runs.TRASH}; freed by the next clean after a day")
        print("\n".join(["To restore it:", *(f"  {command}" for command in moved.restore())]))
    for path in strangers:
        print(f"{'':16}left: {path} (clean did not put it there)")
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
    token = os.environ.get("BLOOMERY_TOKEN") if options.token is None else options.token
    serve_models(Shelf(options.runs), options.host, options.port, token)
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
