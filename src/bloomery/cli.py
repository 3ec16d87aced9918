"""
The command line: verbs, options and their help. The only argv, and the only exit code.

    0 done · 1 a bug of Bloomery · 2 the user can fix it · 130 interrupted once · 143 asked to end

A second Ctrl-C ends the process by the signal itself.

`doctor` also exits with 1 where something works, but is not as it should be. Imports stand inside the verbs, so that
`--help` and `status` start at once.
"""

import argparse
import difflib
import json
import math
import os
import re
import shlex
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bloomery import __version__
from bloomery.core import errors
from bloomery.core.chat import TEMPERATURE, SamplingConfig, TemplateName
from bloomery.core.errors import MAX_SEED, MAX_TEMPERATURE, MAX_TOKENS, BloomeryError, DataError, RunError, shorten
from bloomery.core.io import path_problem
from bloomery.core.signals import INTERRUPTED, Terminated, ending_on_sigterm

if TYPE_CHECKING:
    from bloomery.core.pipeline import RunCommand
    from bloomery.stages.terminal import Asks

TEMPLATE_NAMES = get_args(TemplateName)
MODEL = "a run, stage, checkpoint or model folder, a GGUF file, or hub:OWNER/NAME; for example runs/demo"
SETTINGS = "settings that override the recipe, as TOML: pretrain.steps=100 'filter.rules=[]'"
INPUTS = "a file or a folder: text, Markdown, HTML, source code, jsonl, json, parquet, csv, WARC (.gz and .zst too)"
DATA_SETTINGS = "settings of this recipe section, as TOML: 'rules=[{kind=\"gopher\"}]'"
DATA = {
    "filter": ("keep documents that pass the rules; write the others to dropped/, with reasons", "crawl/ --out clean"),
    "dedup": ("remove exact and near duplicates", "clean/kept --out unique"),
    "decontaminate": (
        "drop documents that contain questions of evaluation tasks",
        "unique/kept --out fair --against q.jsonl",
    ),
    "tokenize": ("turn documents into token shards", "fair/kept --out tokens --tokenizer tokenizer.json"),
}
"""The verbs of `data`: what each does, and an example."""


NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
"""As TOML and JSON have it: Python's own `float` also reads digits of other scripts, underscores and spaces."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a verb. Settings may stand before and after options, which argparse alone does not take."""
    top = parser()
    words = sys.argv[1:] if arguments is None else arguments
    verb = next((word for word in words if not word.startswith("-")), None)
    known: dict[str, argparse.ArgumentParser] = top.get_default("verbs")
    if verb is not None and verb not in known:
        near = difflib.get_close_matches(verb, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Verbs: {', '.join(known)}."
        top.error(f"there is no verb {verb!r}\n{hint}")
    options, rest = top.parse_known_args(arguments)
    if rest and (not hasattr(options, "settings") or any(word.startswith("-") for word in rest)):
        (known[verb] if verb else top).error(f"unrecognized arguments: {' '.join(rest)}")
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
    top.set_defaults(verb="")
    verbs = top.add_subparsers(title="verbs", metavar="VERB")
    _run_verbs(verbs)
    _data_verbs(verbs)
    _model_verbs(verbs)
    _export_verbs(verbs)
    _machine_verbs(verbs)
    top.set_defaults(verbs=verbs.choices)
    return top


def _verb(verbs: Any, name: str, brief: str, example: str, *, reports: bool = False) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=brief,
        description=errors.wrapped(f"{brief[0].upper()}{brief[1:]}."),
        epilog=f"Example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # which breaks no command
    )
    verb.set_defaults(verb=name)
    if reports:
        verb.add_argument("--json", action="store_true", help="print only one JSON object to stdout")
    return verb


def _group(verb: argparse.ArgumentParser, title: str, example: str) -> Any:
    """A group of options, with an example of them."""
    return verb.add_argument_group(title, f"Example: bloomery {example}")


def _run_verbs(verbs: Any) -> None:
    verb = _verb(verbs, "run", "run the stages of a recipe that are not up to date", "bloomery run recipes/demo.toml")
    _recipe_arguments(verb)
    selection = _group(verb, "run a part of the recipe", "run recipes/demo.toml --until shard")
    stages = selection.add_mutually_exclusive_group()
    stages.add_argument("--until", metavar="STAGE", help="stop after this stage")
    stages.add_argument("--only", metavar="STAGE", help="run only this stage; its inputs must be done")
    verb.add_argument("-v", "--verbose", action="store_true", help="show every number and setting of each stage")
    hosts = "start ranks by ssh on the hosts of this file; a line is `HOST slots=N`"
    verb.add_argument("--hosts", type=_path, metavar="FILE", help=hosts)

    brief = "print a script that runs a recipe on several machines"
    verb = _verb(verbs, "launch", brief, "bloomery launch recipes/demo.toml --on slurm --machines 2 > job.sh")
    _recipe_arguments(verb)
    verb.add_argument("--on", choices=("slurm", "skypilot"), required=True, help="the program that starts the script")
    for name, most, default in (("machines", 256, 1), ("ranks", 1024, 8), ("hours", 8760, 24)):
        what = {"ranks": "ranks on each machine", "hours": "time limit in hours"}.get(name, f"number of {name}")
        verb.add_argument(f"--{name}", type=_whole(1, most), default=default, help=f"{what} (default: {default})")
    verb.add_argument("--gpu", default="H100", help="SkyPilot's name for the GPU of each rank, or none (default: H100)")

    verb = _verb(
        verbs, "plan", "estimate the memory and time of a recipe", "bloomery plan recipes/demo.toml", reports=True
    )
    _recipe_arguments(verb)
    other = _group(verb, "plan for another machine", "plan recipes/gpt2-124m.toml --device 7900xtx --devices 2")
    other.add_argument("--device", metavar="NAME", help="plan for this device, for example mi300x")
    other.add_argument("--memory", type=DEVICE_BYTES, metavar="SIZE", help="memory of a device, for example 16GiB")
    devices = "number of devices that train together (default: the recipe's num_processes)"
    other.add_argument("--devices", type=DEVICES, metavar="N", help=devices)
    drawn = _group(verb, "a mesh of devices", "plan recipes/llama-3.1-405b-lora-8x192gb.toml --html a.html")
    drawn.add_argument("--html", type=_path, metavar="FILE", help="draw the devices of each tensor of finetune.mesh")
    cost = _group(verb, "cost", "plan recipes/demo.toml --price 2.5 --power-watts 900")
    cost.add_argument(
        "--price", type=MONEY_OR_WATTS, metavar="PER_HOUR", help="price of all devices per hour, in any currency"
    )
    cost.add_argument("--power-watts", type=MONEY_OR_WATTS, metavar="W", help="power of all devices together")

    brief = "show the progress of runs, and the time left"
    verb = _verb(verbs, "status", brief, "bloomery status runs/demo --watch", reports=True)
    verb.add_argument("run", type=_path, nargs="?", metavar="RUN", help="a run folder (default: all runs)")
    verb.add_argument("--runs", type=_path, default=Path("runs"), help="folder of run folders (default: runs)")
    verb.add_argument("--verify", action="store_true", help="compare every file with its sha256 too")
    verb.add_argument("--watch", action="store_true", help="update the output every 2 seconds, until Ctrl-C")

    brief = "list files that a run no longer needs, and move or delete them on request"
    verb = _verb(verbs, "clean", brief, "bloomery clean runs/demo --yes", reports=True)
    verb.add_argument("run", type=_path, metavar="RUN", help="a run folder, for example runs/demo")
    verb.add_argument("--yes", action="store_true", help="move them to RUN/.trash; delete trash older than a day")
    verb.add_argument("--now", action="store_true", help="delete them, and the whole trash, at once")


def _data_verbs(verbs: Any) -> None:
    """`data` and its own verbs: stages of the data half on files of any kind, without a recipe."""
    brief = "filter, deduplicate, decontaminate or tokenize files, without a recipe"
    data = _verb(verbs, "data", brief, "bloomery data filter crawl/ --out clean 'rules=[{kind=\"gopher\"}]'")
    inner = data.add_subparsers(title="tools", metavar="TOOL", required=True, help="TOOL --help lists its options")
    for name, (brief, example) in DATA.items():
        verb = _verb(inner, name, brief, f"bloomery data {name} {example}", reports=True)
        verb.set_defaults(verb="data", what=name)
        verb.add_argument("inputs", nargs="+", type=str, metavar="IN", help=f"{INPUTS}; and {DATA_SETTINGS}")
        holds = "shards/, tokenizer/ and dropped/" if name == "tokenize" else "kept/ and dropped/"
        verb.add_argument(
            "--out", type=_path, required=True, metavar="DIR", help=f"a new folder for {holds}, or one to resume in"
        )
        verb.set_defaults(settings=[])
        verb.add_argument("--recipe", type=_path, help="read the settings from this recipe")
        fields = _group(verb, "fields of jsonl, parquet and csv", f"data {name} in/ --out out --text-field body")
        fields.add_argument("--text-field", default="text", help="field or column that holds the text (default: text)")
        fields.add_argument("--id-field", help="field or column that holds the ID (default: id, or file and row)")
        more = " --memory 8GiB" if name in ("dedup", "tokenize") else ""
        limits = _group(verb, "processes and memory", f"data {name} in/ --out out --workers 2{more}")
        limits.add_argument("--workers", type=_whole(1, 4096), help="processes (default: one for each core)")
        if more:
            size = "memory budget, for example 256MB or 8GiB"
            limits.add_argument("--memory", type=_bytes(2**26, 2**50), metavar="SIZE", help=size)
        if name == "decontaminate":
            verb.add_argument("--against", action="append", default=[], metavar="FILE", help="questions of a test")
        if name == "tokenize":
            source = "a run, a tokenizer.json, .model, .tiktoken, or a folder with one (default: train one)"
            verb.add_argument("--tokenizer", type=_path, help=source)


def _path(text: str) -> Path:
    """The type of an option that names a file or a folder, whether it is there or not."""
    if why := path_problem(text):
        raise argparse.ArgumentTypeError(f"{shorten(text, 40)!r}: {why}")
    return Path(text)


def _whole(low: int, high: int) -> Callable[[str], int]:
    """The type of an option that is a whole number with two ends."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,19}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{shorten(text, 40)!r} is not an integer from {_range(low, high)}")
        return int(text)

    return read


def _number(low: float, high: float, *, or_zero: bool = False) -> Callable[[str], float]:
    """The type of an option that is a number with two ends."""

    def read(text: str) -> float:
        value = float(text) if re.fullmatch(NUMBER, text) else math.nan
        if not (low <= value <= high or (or_zero and value == 0)):
            what = f"{_range(low, high)}{', or 0' if or_zero else ''}"
            raise argparse.ArgumentTypeError(f"{shorten(text, 40)!r} is not a number from {what}")
        return value

    return read


def _bytes(low: int, high: int) -> Callable[[str], int]:
    """The type of an option that is a size with two ends."""

    def read(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?([kKMGT]?)(i?)B?", text)
        if not match:
            what = f"{shorten(text, 40)!r} is not a size in bytes, such as 256MB or 8GiB, from {_range(low, high)}"
            raise argparse.ArgumentTypeError(what)
        number, letter, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " kMGT".index(letter.replace("K", "k") or " "))
        if not low <= size <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a size from {_range(low, high)} bytes")
        return size

    return read


def _range(low: float, high: float) -> str:
    low_text, high_text = (f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in (low, high))
    return f"{low_text} to {high_text}"


SEED = _whole(0, MAX_SEED)
TEMPERATURES = _number(1e-3, MAX_TEMPERATURE, or_zero=True)
ANSWER_TOKENS = _whole(1, MAX_TOKENS)
MONEY_OR_WATTS_RANGE, DEVICES_RANGE = (0.0, 1e9), (1, 1024)
DEVICE_BYTES_RANGE = 3 * 2**29, 2**50
"""Less than 1.5 GiB a device needs for itself."""
MONEY_OR_WATTS, DEVICES = _number(*MONEY_OR_WATTS_RANGE), _whole(*DEVICES_RANGE)
DEVICE_BYTES = _bytes(*DEVICE_BYTES_RANGE)


def _recipe_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("recipe", type=_path, metavar="RECIPE", help="a TOML file, for example recipes/demo.toml")
    verb.add_argument("settings", nargs="*", default=[], metavar="key=value", help=SETTINGS)
    verb.add_argument("--runs", type=_path, default=Path("runs"), help="folder of run folders (default: runs)")


def _model_verbs(verbs: Any) -> None:
    verb = _verb(
        verbs, "chat", "talk to a model in the terminal", "bloomery chat runs/demo --prompt 'What is 17 plus 25?'"
    )
    verb.add_argument("model", type=_path, metavar="MODEL", help=MODEL)
    verb.add_argument("--prompt", action="append", default=[], help="ask this and end; may be given several times")
    verb.add_argument("--complete", action="store_true", help="continue the text of --prompt, without a chat template")
    _dtype_argument(verb)
    sampling = _group(verb, "sampling", "chat runs/demo --temperature 0 --max-tokens 40")
    template = f"chat template in place of the model's own: {', '.join(TEMPLATE_NAMES)}"
    sampling.add_argument("--template", choices=TEMPLATE_NAMES, metavar="NAME", help=template)
    hottest = f"0 always takes the likeliest token (default: as the model recommends, or {TEMPERATURE})"
    sampling.add_argument("--temperature", type=TEMPERATURES, help=hottest)
    sampling.add_argument("--top-k", type=_whole(0, MAX_TOKENS), help="sample from the k likeliest tokens; 0 for all")
    likeliest = "sample from the likeliest tokens with total probability p"
    sampling.add_argument("--top-p", type=_number(1e-6, 1), help=likeliest)
    longest = "longest answer in tokens (default: 512)"
    sampling.add_argument("--max-tokens", type=ANSWER_TOKENS, default=512, help=longest)
    sampling.add_argument("--seed", type=SEED, default=0, help="equal seeds give equal answers (default: 0)")

    verb = _verb(verbs, "serve", "serve all models over HTTP, with a chat page", "bloomery serve --port 8000")
    verb.add_argument("models", nargs="*", type=_path, metavar="MODEL", help=f"another model to serve: {MODEL}")
    verb.add_argument("--runs", type=_path, default=Path("runs"), help="folder of run folders (default: runs)")
    _dtype_argument(verb)
    kept = _group(verb, "speed and memory", "serve --dtype int8 --kv-dtype int8 --unload-after 600")
    formats = "number format of keys and values on the CPU (default: float32 next to float32 weights, else bfloat16)"
    kept.add_argument("--kv-dtype", choices=("auto", "float32", "bfloat16", "int8"), default="auto", help=formats)
    guessed = "tokens to draft at once; speeds up answers that repeat their prompt (default: 0)"
    kept.add_argument("--draft-tokens", type=_whole(0, 32), default=0, help=guessed)
    idle = "unload a model after so many seconds without a request (default: 0: only to make room for another model)"
    kept.add_argument("--unload-after", type=_whole(0, 10**6), default=0, metavar="SECONDS", help=idle)
    address = _group(verb, "network", "serve --host 0.0.0.0 --port 8080 --token SECRET")
    address.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    address.add_argument("--port", type=_whole(0, 65_535), default=8000, help="port to listen on (default: 8000)")
    token = "API key that clients must send; required with --host (default: BLOOMERY_TOKEN)"
    address.add_argument("--token", help=token)

    verb = _verb(
        verbs,
        "eval",
        "score a model on benchmarks, or on validation questions of the demo",
        "bloomery eval runs/demo --task hellaswag --task arc_easy --data tasks/",
        reports=True,
    )
    verb.add_argument("model", type=_path, metavar="MODEL", help=MODEL)
    _dtype_argument(verb)
    toy = _group(verb, "questions of the demo", "eval runs/demo --toy-questions 500 --seed 1")
    number = "number of questions (default: as a recipe's evaluate.toy_questions)"
    toy.add_argument("--toy-questions", type=_whole(1, 10**6), help=number)
    toy.add_argument("--seed", type=SEED, help="which questions (default: as a recipe's evaluate.seed)")
    _task_arguments(verb)


def _export_verbs(verbs: Any) -> None:
    example = "bloomery export runs/demo out --format hf --dtype bfloat16"
    verb = _verb(verbs, "export", "write a model for another program", example, reports=True)
    verb.add_argument("model", type=_path, metavar="MODEL", help=MODEL)
    verb.add_argument("out", type=_path, metavar="OUT", help="a new folder, or a new .gguf file")
    verb.add_argument(
        "--format",
        choices=("hf", "gguf", "peft", "llmc"),
        default="hf",
        help="for transformers (default), llama.cpp and Ollama, PEFT (adapters only), or llm.c",
    )
    formats = ("float32", "bfloat16", "float16", "q8_0", "q4_0")
    weights = "number format of the weights; q8_0 and q4_0 only for gguf (default: float32)"
    verb.add_argument("--dtype", choices=formats, default="float32", help=weights)
    size = "largest file of weights of --format hf, in GB (default: 5)"
    verb.add_argument("--shard-size", type=_number(1e-5, 1e6), default=5.0, help=size)
    license = "license for the model card, for example apache-2.0 (default: license of the base)"
    verb.add_argument("--license", metavar="ID", help=license)
    push = "upload the exported folder to a private repository"
    upload = _group(verb, "upload", "export runs/demo out --push hub:me/demo")
    upload.add_argument("--push", type=_repository, metavar="hub:OWNER/NAME", help=push)
    upload.add_argument("--public", action="store_true", help="create a public repository with --push")

    verb = _verb(
        verbs,
        "import",
        "convert a model from Hugging Face, llama.cpp or llm.c into a model folder",
        "bloomery import gpt2_124M.bin models/gpt2 --tokenizer gpt2_tokenizer.bin",
        reports=True,
    )
    source = "a folder of transformers, a GGUF file, hub:OWNER/NAME, a .bin of llm.c, or a .pt of 1386.ai"
    verb.add_argument("source", type=_path, metavar="IN", help=source)
    verb.add_argument("out", type=_path, metavar="OUT", help="a new folder")
    verb.add_argument("--tokenizer", type=_path, help="tokenizer of a .bin or .pt (default: the file next to it)")


def _repository(text: str) -> str:
    """OWNER/NAME of hub:OWNER/NAME."""
    prefix, _, name = text.partition(":")
    if prefix != "hub" or len(parts := name.split("/")) != 2 or not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not hub:OWNER/NAME")
    return name


def _dtype_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "int4", "nf4"),
        default="auto",
        help="number format of the weights in memory (default: as in the file; quantized GGUF: bfloat16)",
    )


def _task_arguments(verb: argparse.ArgumentParser) -> None:
    """Of `eval`, where it asks tasks of the table in docs/understand/evaluation.md."""
    asked = _group(verb, "benchmarks", "eval runs/demo --task hellaswag --limit 200 --num-fewshot 5")
    names = "a task, for example hellaswag; may be given several times"
    asked.add_argument("--task", action="append", default=[], metavar="NAME", help=names)
    files = "file of a task, or a folder with files (default: from the hub)"
    asked.add_argument("--data", action="append", type=_path, default=[], metavar="PATH", help=files)
    asked.add_argument("--offline", action="store_true", help="use only files in the cache")
    asked.add_argument(
        "--limit", type=_whole(1, 10**12), help="questions of each task, chosen by --seed (default: all)"
    )
    shots = "examples before each question (default: set by the task)"
    asked.add_argument("--num-fewshot", type=_whole(0, 1000), help=shots)
    asked.add_argument("--no-bos", action="store_true", help="prompts without the token that opens a document")
    asked.add_argument("--out", type=_path, metavar="FILE", help="write every question's result as a line of JSON")
    example = "eval runs/demo --task humaneval --run-code --samples 10"
    written = _group(verb, "answers that the model writes", example)
    number = "answers to each question (default: 1)"
    written.add_argument("--samples", type=_whole(1, 10_000), default=1, help=number)
    hottest = "temperature of answers (default: 0, the likeliest token)"
    written.add_argument("--temperature", type=TEMPERATURES, default=0.0, help=hottest)
    longest = "longest answer in tokens (default: set by the task)"
    written.add_argument("--max-tokens", type=ANSWER_TOKENS, help=longest)
    code = "run programs that the model writes, in a sandbox"
    written.add_argument("--run-code", action="store_true", help=code)
    partial = "run them even if the kernel cannot isolate the sandbox fully"
    written.add_argument("--allow-partial-sandbox", action="store_true", help=partial)


def _machine_verbs(verbs: Any) -> None:
    brief = "check this machine, and print a fix for each problem"
    verb = _verb(verbs, "doctor", brief, "bloomery doctor", reports=True)
    verb.add_argument("--runs", type=_path, default=Path("runs"), help="folder for runs (default: runs)")
    trials = verb.add_mutually_exclusive_group()
    trials.add_argument("--retry", action="store_true", help="try every kernel again, also those with saved results")
    trials.add_argument("--quick", action="store_true", help="measure no speed, and try no kernel")
    verb.add_argument("-v", "--verbose", action="store_true", help="show the errors of each kernel")


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    errors.open_closed()
    errors.show_every_character()
    with errors.checked_output():
        return _main(words)


def _main(words: Sequence[str] | None) -> int:
    try:
        options = _parsed(words)
        with nullcontext() if options.verb in ("run", "serve") else ending_on_sigterm():  # which handle it themselves
            code = VERBS[options.verb](options)
        sys.stdout.flush()
        return code
    except BloomeryError as error:
        if isinstance(error, errors.OutputError):
            errors.discard(errors.STDOUT)
        errors.tell(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        errors.tell("interrupted; run the same command again to resume")
        return 130
    except Terminated as ended:
        how = "interrupted" if ended.code == INTERRUPTED else "ended as asked"
        errors.tell(f"{how}; run the same command again to resume")
        return int(ended.code or 0)
    except BrokenPipeError:  # whoever read has read enough; what is left to write goes nowhere
        errors.discard(errors.STDOUT)
        return 0
    except Exception as error:
        if (short := errors.as_error(error)) is not None:
            errors.tell(str(short))
            errors.skip_teardown_after_import(error, 2)
            return 2
        errors.tell(f"{traceback.format_exc()}This is a bug in Bloomery, not your mistake. The lines above say where.")
        return 1


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    try:
        return parse(words)
    except SystemExit:
        sys.stdout.flush()  # of a help text that nobody can read
        raise


def show_help(options: argparse.Namespace) -> int:
    parser().print_help()
    return 0


def launch(options: argparse.Namespace) -> int:
    from bloomery.core import config
    from bloomery.hw import hosts
    from bloomery.recipe import Recipe
    from bloomery.stages.plan import check_ranks

    check_ranks(recipe := config.load(Recipe, options.recipe, options.settings), options.machines * options.ranks)
    print(hosts.script(recipe.name, vars(options)), end="")
    return 0


def run(options: argparse.Namespace) -> int:
    from bloomery.core import log
    from bloomery.hw import launcher

    launcher.adopt()
    if os.environ.get("RANK", "0") == "0" and not options.hosts:  # of a launcher's processes, the first one talks
        log.say(f"Bloomery {__version__} · {options.recipe}", style="bold")  # before anything large is imported

    from bloomery.core import pipeline, records, run_dir
    from bloomery.stages import terminal

    alone, asked = launcher.num_processes() == 1 and not options.hosts, options.until or options.only
    command = pipeline.RunCommand(options.recipe, tuple(options.settings), options.runs)
    with log.story(verbose=options.verbose), ending_on_sigterm() if alone else nullcontext():
        if alone and (root := command.up_to_date()) is not None and asked in (None, *records.stage_folders(root)):
            terminal.ending(run_dir.run_state(root), seconds=None, left=[], asked="", again="")
            return 0
        try:
            _run_recipe(options, command, remember=alone)
        except (KeyboardInterrupt, Terminated) as ended:
            code = INTERRUPTED if isinstance(ended, KeyboardInterrupt) else int(ended.code or 0)
            how = "Interrupted" if code == INTERRUPTED else "Ended as asked"
            log.say(f"{how}. Resume: {_again(options, stages=True)}", style="bold")
            return code
    return 0


def _run_recipe(options: argparse.Namespace, command: "RunCommand", *, remember: bool) -> None:
    from bloomery.core import config
    from bloomery.hw import hosts
    from bloomery.recipe import STAGES, Recipe
    from bloomery.stages.plan import watched
    from bloomery.stages.run_report import by_first_process, run_recipe

    recipe = config.load(Recipe, options.recipe, options.settings)
    if options.hosts:
        return hosts.start(shlex.split(_again(options, stages=True, ranks=True))[1:], options.hosts)

    @ending_on_sigterm()  # a rank that waits for others in compiled code does not end, so ranks themselves do without
    def work() -> None:
        before = command.before(watched(recipe)) if remember else None
        root = options.runs / recipe.name
        left = run_recipe(STAGES, recipe, root, until=options.until, only=options.only, again=_again(options))
        if not left:
            command.remember(root, before)

    by_first_process(work)


def _again(options: argparse.Namespace, *, stages: bool = False, ranks: bool = False) -> str:
    """The command of a run, without `--until` and `--only` unless `stages`; or that of its `ranks` on hosts."""
    words = ["bloomery", "run", str(options.recipe), *options.settings]
    words += ["--runs", str(options.runs)] if options.runs != Path("runs") else []
    more = ["--verbose"] * options.verbose if ranks else ["--hosts", str(options.hosts)] if options.hosts else []
    chosen = [word for name in ("until", "only") if (stage := getattr(options, name)) for word in (f"--{name}", stage)]
    return shlex.join([*words, *more, *(chosen if stages else ())])


def plan(options: argparse.Namespace) -> int:
    from bloomery.core import config
    from bloomery.recipe import STAGES, Recipe
    from bloomery.stages import plan as stages_plan
    from bloomery.train.plan.report import HourlyPrice

    recipe = config.load(Recipe, options.recipe, options.settings)
    price = HourlyPrice(per_hour=options.price, watts=options.power_watts)
    wish = stages_plan.Wish(device=options.device, memory_bytes=options.memory, devices=options.devices, price=price)
    words = ["bloomery", "plan", str(options.recipe)]
    if mesh := stages_plan.mesh_plan(recipe, wish, options.html):
        text = stages_plan.mesh_lines(mesh, [*words, *options.settings, *wish.words()], options.html)
        print(json.dumps(stages_plan.mesh_facts(recipe.name, mesh)) if options.json else "\n".join(text))
        return 0 if mesh.fits else 2
    facts, plans = stages_plan.report(STAGES, recipe, options.runs / recipe.name, wish)
    text = [*stages_plan.lines(facts, plans), "", *(errors.wrapped(line) for line in stages_plan.verdict(plans))]
    runs = [] if options.runs == Path("runs") else ["--runs", str(options.runs)]
    text += stages_plan.next_command(words, options.settings, runs, wish, plans, facts)
    print(json.dumps(facts) if options.json else "\n".join(text))
    return 2 if facts["fits"] is False else 0


def status(options: argparse.Namespace) -> int:
    from bloomery.core import run_dir
    from bloomery.stages import terminal

    def look() -> list[run_dir.RunState]:
        if options.run is None:
            return run_dir.run_states(options.runs, thorough=options.verify)
        return [run_dir.run_state(options.run, thorough=options.verify)]

    if options.watch:
        if options.json:
            hint = "Leave out --watch, and call it as often as you need the numbers."
            raise errors.ConfigError("--watch shows text, not JSON", where="--json", hint=hint)
        terminal.watch(lambda: terminal.status_text(look(), each=options.run is not None))
        return 0
    states = look()
    if options.json:
        facts = [run_dir.as_json(state) for state in states]
        print(json.dumps(facts[0] if options.run is not None else {"runs": facts}))
    else:
        terminal.show(terminal.status_text(states, each=options.run is not None))
    return 2 if any(state.damaged or state.error for state in states) else 0


def clean(options: argparse.Namespace) -> int:
    from bloomery.core import pipeline, records, run_dir
    from bloomery.stages import terminal

    root: Path = options.run
    records.stage_folders(root)  # of what is no run folder, none is made
    with pipeline.locked(root):
        waste, old = run_dir.waste(root), run_dir.expired(root, now=options.now)
        freed = run_dir.delete([*waste, *old] if options.now else old) if options.yes or options.now else 0
        moved = run_dir.remove(root, waste) if options.yes and not options.now else run_dir.Moved()
        strangers = run_dir.strangers(root)
    if options.json:
        rows, trash = ([{"path": str(w.path), "bytes": w.size, "why": w.why} for w in some] for some in (waste, old))
        print(
            json.dumps(
                {
                    "run": str(root),
                    "waste": rows,
                    "trash": trash,
                    "moved_bytes": sum(one.size for one in waste) if moved.moves else 0,
                    "freed_bytes": freed,
                    "restore": moved.restore(),
                    "left_in_trash": [str(path) for path in strangers],
                }
            )
        )
        return 0
    print("\n".join(terminal.clean_lines(root, waste, old, freed, moved, strangers, asked=options.yes or options.now)))
    return 0


def data(options: argparse.Namespace) -> int:
    from bloomery.core import config
    from bloomery.core.log import duration, info
    from bloomery.recipe import Recipe
    from bloomery.stages import data_tools

    sections = config.plain(config.load(Recipe, options.recipe)) if options.recipe else {}
    words = [word for word in options.inputs if "=" in word and not os.path.exists(word)]
    asked = data_tools.DataCommand(
        tool=options.what,
        inputs=[word for word in options.inputs if word not in words],
        out=options.out,
        sections={name: sections[name] for name in data_tools.ToolSections.model_fields if name in sections},
        settings=[*words, *options.settings],
        text_field=options.text_field,
        id_field=options.id_field,
        workers=options.workers,
        memory_bytes=getattr(options, "memory", None),
        against=getattr(options, "against", ()),
        tokenizer=getattr(options, "tokenizer", None),
    )
    if not asked.inputs:
        raise DataError("no file or folder is given", hint=f"bloomery data {options.what} IN… --out DIR")
    result = data_tools.run(asked)
    if options.json:
        print(json.dumps(result))
        return 0
    print(f"{result['documents']:>12,} documents\n{result['kept']:>12,} kept\n{result['dropped']:>12,} dropped")
    for reason, count in sorted(result["reasons"].items(), key=lambda pair: (-pair[1], pair[0])):
        print(f"{count:>12,}   {reason}")
    where = options.out / ("shards" if options.what == "tokenize" else "kept")
    info(f"{where}: done in {duration(result['seconds'])}")
    return 0


def chat(options: argparse.Namespace) -> int:
    from bloomery.core.log import info, print_pieces
    from bloomery.hw import device
    from bloomery.serve.models import answerer_of
    from bloomery.weights import hf
    from bloomery.weights.locate import locate_model

    def read(name: Path) -> hf.Loaded:
        where = device.find().torch_device
        return hf.load(locate_model(name), where, dtype=options.dtype, template=options.template)

    def load(name: Path) -> "Asks":
        loaded = read(name)
        loaded.renderer  # noqa: B018  raises for a model without a chat template, before anything is asked
        model = answerer_of(str(name), loaded)
        return lambda messages, sampling: model.answer(messages, sampling, drops=True)

    said = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")}
    sampling = SamplingConfig.of(said)
    if options.complete:
        if not options.prompt:
            raise DataError("--complete continues the text of --prompt", where="--prompt", hint="Add --prompt TEXT.")
        loaded = read(options.model)
        model = answerer_of(str(options.model), loaded)
        for prompt in options.prompt:
            print(prompt, end="", flush=True)
            deque(print_pieces(model.continuation(prompt, sampling).texts), maxlen=0)
        return 0
    ask = load(options.model)
    if options.prompt:
        for prompt in options.prompt:
            print(f"> {prompt}")
            deque(print_pieces(ask([{"role": "user", "content": prompt}], sampling).texts), maxlen=0)
        return 0
    info(f"{options.model}. /help lists commands; Ctrl-D or /exit ends.")
    from bloomery.stages.terminal import TerminalChat

    TerminalChat(ask, load, sampling).run()
    return 0


def serve(options: argparse.Namespace) -> int:
    from bloomery.serve.models import LoadSettings, ModelRegistry
    from bloomery.serve.server import serve as serve_models
    from bloomery.weights.locate import locate_model

    if not options.runs.is_dir() and not options.models:
        raise RunError("does not exist", where=str(options.runs), hint="Pass a model, or a folder of runs: --runs DIR")
    named = {str(model): locate_model(model) for model in options.models}
    token = (os.environ.get("BLOOMERY_TOKEN") or None) if options.token is None else options.token
    settings = LoadSettings(options.dtype, options.kv_dtype, options.draft_tokens, options.unload_after)
    serve_models(ModelRegistry(options.runs, named, settings), options.host, options.port, token)
    return 0


def evaluate(options: argparse.Namespace) -> int:
    if options.task:
        from bloomery.evaluation import harness

        harness.run_command(options)
    else:
        from bloomery.stages import evaluate as stages_evaluate

        stages_evaluate.run_command(options)
    return 0


def export(options: argparse.Namespace) -> int:
    from bloomery.core.log import info
    from bloomery.weights import export as exports
    from bloomery.weights import hf, locate

    path = locate.locate_model(options.model)
    if options.push is not None and options.format not in ("hf", "peft"):
        raise DataError("uploads folders of --format hf or peft", where="--push", hint="Remove --format.")
    if options.format == "peft" and options.dtype != "float32":
        raise DataError("adapters are written in float32", where=f"--dtype {options.dtype}", hint="Remove --dtype.")
    if options.format == "peft":
        written = exports.write_adapters(path, options.out, options.license)
    else:
        shard_bytes = int(options.shard_size * 10**9)
        written = exports.write(
            hf.streamed(path), options.out, options.format, options.dtype, shard_bytes, options.license
        )
    if options.push is not None:
        written["address"] = exports.push(options.out, options.push, public=options.public)
    if options.json:
        print(json.dumps({"model": str(options.model), "out": str(options.out), **written}))
        return 0
    info(f"{options.out}: {written['architecture']} in {written['number_format']}, {', '.join(written['files'])}")
    return 0


def import_(options: argparse.Namespace) -> int:
    from bloomery.core.log import info
    from bloomery.weights import export as exports

    facts = exports.take_in(options.source, options.out, options.tokenizer)
    if options.json:
        print(json.dumps({"source": str(options.source), "out": str(options.out), **facts}))
        return 0
    sizes = f"{facts['parameters']:,} parameters in {facts['number_format']}, {facts['vocab_size']:,} token IDs"
    info(f"{options.out}: {facts['architecture']}, {sizes}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    from bloomery.hw.doctor import report
    from bloomery.hw.host import Host

    host = report.shown(Host.here()) if sys.stderr.isatty() else Host.here()
    findings = report.findings(host, options.runs, retry=options.retry, quick=options.quick)
    if options.json:
        known = [finding for _, finding in findings]
        print(json.dumps({"findings": [one.as_json() for one in known], "exit": report.exit_code(known)}))
        return report.exit_code(known)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    terminal = sys.__stdout__ if color else sys.stdout  # which shows the colors of marks
    known = []
    for finding, lines in report.with_lines(findings, details=options.verbose, color=color):
        print(*lines, sep="\n", file=terminal, flush=True)
        known.append(finding)
    print("", *report.closing(known, options.runs), sep="\n")
    return report.exit_code(known)


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "": show_help,
    "run": run,
    "launch": launch,
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
