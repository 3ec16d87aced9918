"""
How long does a training step take, beside Hugging Face, nanoGPT and llm.c on the same machine?

    python benchmarks/train_step.py [--json] [--quick] [--nanogpt DIR] [--llmc DIR] [--sizes 4x64 …] [--threads 1 2]
        [--rounds N] [--programs NAME …] [--into FILE]

GPT-2 of 124M parameters at three sizes of batch (rows x tokens), and a Llama of 5M parameters, the demo's kind, at
16x256. Every program is a process of its own that trains one model (stepper.py, llmc_step.c); they take turns, N rounds
of them, and only one computes at a time. They live throughout, but from 4x256 on, where all of them would not fit into
memory, each begins anew for its turn, with one step of a few tokens first. Times are those of the processor with one
thread, which other programs disturb least, and those of the wall with several. What counts of a round is the median of
its steps, and a ratio is the median over rounds of the ratios within each. From 4x256 on, peers in float32, which give
their memory back after each step, go without a warm-up, and so does llm.c, which runs once there; at 8x512, where its
step takes minutes, it is left out, and all others run once.

The ceiling is that of large products of square matrices in bfloat16, measured after each of our turns in our process.

DIR is a checkout of the peer, and without it the peer is left out; llm.c is compiled as its Makefile does it. --into
keeps each finished size in a file, and does not measure again what that file has of the same commit. --quick measures
the smallest size with one thread, once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.pipeline import machine, versions

HERE = Path(__file__).parent
SIZES = ("4x64", "4x256", "8x512")
SMALL = "small-16x256"
OURS = ("ours", "ours_plain")
DEFAULTS = ("huggingface", "nanogpt")
BFLOAT16 = ("huggingface_bfloat16_kept", "nanogpt_bfloat16_kept")
EAGER = ("ours_plain_float32", "huggingface")
LLMC = "llmc"
STEPS = {"4x64": 3, "4x256": 1, "8x512": 1, SMALL: 3}
"""Of a round, without those that warm up."""

Turns = dict[str, list[dict[str, Any]]]


def main() -> None:
    options = arguments()
    cases: list[dict[str, Any]] = []
    known = json.loads(options.into.read_text()) if options.into and options.into.exists() else []
    if "dirty" in str(head(HERE)):
        known = []
    with tempfile.TemporaryDirectory() as folder:
        if options.llmc:
            build_llmc(options.llmc, Path(folder))
        for together, sizes in ((True, SIZES[:1]), (False, SIZES[1:]), (True, (SMALL,))):
            shape = shape_of(sizes[0])
            asked = [(size, threads) for size in options.sizes if size in sizes for threads in options.threads]
            keys = [{"size": size, "threads": threads, "commit": head(HERE)} for size, threads in asked]
            kept = [next((one for one in known if key.items() <= one.items()), None) for key in keys]
            with workers(programs(shape, options), shape, options) if together and None in kept else nobody() as at:
                for key, found in zip(keys, kept, strict=True):
                    cases.append(found or key | case(key["size"], key["threads"], options, at, Path(folder)))
                    if options.into and not found:
                        known.append(cases[-1])
                        options.into.write_text(json.dumps(known, indent=1) + "\n")
                    if not options.json:
                        show(cases[-1])
    print(json.dumps(result(cases, options)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--llmc", type=Path)
    parser.add_argument("--sizes", nargs="+", default=[*SIZES, SMALL], choices=[*SIZES, SMALL])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2, help="at 8x512 never more than one")
    parser.add_argument("--programs", nargs="+", help="only these")
    parser.add_argument("--into", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.threads, options.rounds = [SIZES[0]], [1], 1
    return options


def shape_of(size: str) -> str:
    return "small" if size == SMALL else "gpt2"


def programs(shape: str, options: argparse.Namespace) -> list[str]:
    if shape == "small":
        names = [*OURS, *EAGER]
    else:
        peers = [name for name in (*DEFAULTS, *BFLOAT16) if options.nanogpt or not name.startswith("nanogpt")]
        names = [*OURS, *peers, *([LLMC] if options.llmc else [])]
    return [name for name in names if not options.programs or name in options.programs]


@contextmanager
def nobody() -> Iterator[dict[str, Any]]:
    yield {}


@contextmanager
def workers(names: list[str], shape: str, options: argparse.Namespace) -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """A process for each program, all of them ready."""
    at = {}
    for name in names:
        if name == LLMC:
            continue
        environment = os.environ | {"BLOOMERY_NATIVE": "0" if "plain" in name else "1"}
        if not name.startswith("ours"):
            environment["GOMP_SPINCOUNT"] = environment.get("GOMP_SPINCOUNT", "300000")  # GNU's own; ours is lower
        words = [name, "--shape", shape, *(["--nanogpt", str(options.nanogpt)] if options.nanogpt else [])]
        command = [sys.executable, str(HERE / "stepper.py"), *words]
        pipe = subprocess.PIPE
        at[name] = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    try:
        for name in at:
            answer(name, at)
        yield at
    finally:
        for worker in at.values():
            worker.communicate()


def ask(name: str, at: dict[str, "subprocess.Popen[str]"], **turn: int) -> dict[str, Any]:
    print(json.dumps(turn), file=at[name].stdin, flush=True)
    told: dict[str, Any] = json.loads(answer(name, at))
    return told


def answer(name: str, at: dict[str, "subprocess.Popen[str]"]) -> str:
    stdout = at[name].stdout
    line = stdout.readline() if stdout else ""
    if not line:
        raise SystemExit(f"{name} ended with {at[name].wait()}")
    return line


def case(
    size: str, threads: int, options: argparse.Namespace, at: dict[str, "subprocess.Popen[str]"], folder: Path
) -> dict[str, Any]:
    """All programs at one size, in turns."""
    rows, tokens = map(int, size.split("-")[-1].split("x"))
    shape = shape_of(size)
    turns: Turns = {name: [] for name in programs(shape, options) if name != LLMC or size in SIZES[:2]}
    for _ in range(options.rounds if size != SIZES[2] else 1):
        for name, seen in turns.items():
            if name == LLMC and (size == SIZES[0] or not seen):
                seen.append(turn_of_llmc(rows, tokens, threads, size != SIZES[0], folder))
            elif name != LLMC:
                warm = 0 if size in SIZES[1:] and name in DEFAULTS else 1
                turn = {"rows": rows, "tokens": tokens, "threads": threads, "warm": warm, "steps": STEPS[size]}
                if at:
                    seen.append(ask(name, at, **turn))
                    continue
                with workers([name], shape, options) as alone:
                    ask(name, alone, rows=1, tokens=8, threads=threads, warm=0, steps=1)
                    seen.append(ask(name, alone, **turn))
    return found(turns, "cpu" if threads == 1 else "wall", rows * tokens)


def found(turns: Turns, clock: str, tokens: int) -> dict[str, Any]:
    """What the turns of one size say, with ratios above 1 where ours takes less time."""
    times = {name: [statistics.median(seen[clock]) * 1e3 for seen in rounds] for name, rounds in turns.items()}
    facts: dict[str, Any] = {"clock": clock, "load": round(os.getloadavg()[0], 2)}
    facts["programs"] = {
        name: {
            "median_ms": round(statistics.median(times[name]), 1),
            "least_ms": round(min(times[name]), 1),
            "tokens_per_second": round(tokens / statistics.median(times[name]) * 1e3, 1),
            "rounds": len(times[name]),
            "first_loss": round(rounds[0]["losses"][0], 4),
            "peak_bytes": max((seen["peak_bytes"] for seen in rounds if seen["peak_bytes"]), default=None),
        }
        for name, rounds in turns.items()
    }
    for name, label in (("ours", "faster_than"), ("ours_plain", "plain_faster_than")):
        facts[label] = {peer: faster(times, name, peer) for peer in times if name in times and peer != name}
    best = [name for name in BFLOAT16 if name in times]
    if best and "ours" in times:
        quickest = min(best, key=lambda name: statistics.median(times[name]))
        facts["faster_than_best_bfloat16"] = facts["faster_than"][quickest]
    if "ours" in times:
        speeds = [
            (seen["flops"] / milliseconds / 1e6, seen["ceiling_gflops"])
            for seen, milliseconds in zip(turns["ours"], times["ours"], strict=True)
        ]
        facts["gflops"], facts["ceiling_gflops"] = (
            round(statistics.median(column), 1) for column in zip(*speeds, strict=True)
        )
        facts["share_of_ceiling"] = round(statistics.median(done / most for done, most in speeds), 3)
    return facts


def faster(times: dict[str, list[float]], name: str, peer: str) -> float:
    """How many times: the median over rounds; of the medians where the peer ran once."""
    ours, theirs = times[name], times[peer]
    if len(ours) != len(theirs):
        return round(statistics.median(theirs) / statistics.median(ours), 2)
    return round(statistics.median(their / our for our, their in zip(ours, theirs, strict=True)), 2)


def turn_of_llmc(rows: int, tokens: int, threads: int, once: bool, folder: Path) -> dict[str, Any]:
    """Its program keeps one size for life, and starts quickly."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = ["./llmc_step", str(rows), str(tokens), "1" if once else "2"]
    run = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    steps = [list(map(float, line.split()[1:])) for line in run.stderr.splitlines() if line.startswith("STEP")]
    wall, cpu, losses = (list(column) for column in zip(*steps, strict=True))
    return {"wall": wall[-1:], "cpu": cpu[-1:], "losses": losses, "peak_bytes": None}


def build_llmc(checkout: Path, folder: Path) -> None:
    """Its CPU program, and a model of random weights in its format, beside each other in `folder`."""
    flags = ["-Ofast", "-march=native", "-fopenmp", "-DOMP", "-DTESTING", "-Wno-unused-result", f"-I{checkout}"]
    command = ["gcc", *flags, str(HERE / "llmc_step.c"), "-o", str(folder / "llmc_step"), "-lm"]
    subprocess.run(command, check=True)
    context, vocab_size, layers, heads, width, padded = 1024, 50257, 12, 12, 768, 50304
    header = np.zeros(256, np.int32)
    header[:8] = 20240326, 3, context, vocab_size, layers, heads, width, padded
    matrices, ones = [(padded, width), (context, width)], ("ln1w", "ln2w")
    shapes = {"ln1w": 1, "ln1b": 1, "qkvw": 3 * width, "qkvb": 3, "outw": width, "outb": 1}
    shapes |= {"ln2w": 1, "ln2b": 1, "upw": 4 * width, "upb": 4, "downw": 4 * width, "downb": 1}
    rng = np.random.default_rng(0)
    with (folder / "gpt2_124M.bin").open("wb") as file:
        header.tofile(file)
        for shape in matrices:
            (rng.standard_normal(shape, np.float32) * np.float32(0.02)).tofile(file)
        for name, times in shapes.items():
            if name in ones:
                np.ones((layers, width), np.float32).tofile(file)
            elif name.endswith("b"):
                np.zeros((layers, times * width), np.float32).tofile(file)
            else:
                (rng.standard_normal((layers, times * width), np.float32) * np.float32(0.02)).tofile(file)
        np.ones(width, np.float32).tofile(file)
        np.zeros(width, np.float32).tofile(file)


def show(facts: dict[str, Any]) -> None:
    head = f"{facts['size']}, threads: {facts['threads']}"
    share = f"; {facts['gflops']} GFLOP/s of {facts['ceiling_gflops']}" if "gflops" in facts else ""
    print(head + share, file=sys.stderr)
    for name, seen in facts["programs"].items():
        ratio, plain = (facts[label].get(name) for label in ("faster_than", "plain_faster_than"))
        ratios = "".join(f"{value:7.2f} x" if value else " " * 9 for value in (ratio, plain))
        speed = f"{seen['median_ms']:9.1f} ms  {seen['tokens_per_second']:8.0f} tokens/s"
        print(f"  {name:<26} {speed} {ratios}", file=sys.stderr)


def result(cases: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The first case in front, all of them in the notes."""
    first = cases[0]
    speeds = {name: facts["tokens_per_second"] for name, facts in first["programs"].items()}
    version = {
        "huggingface": metadata.version("transformers"),
        "nanogpt": head(options.nanogpt),
        "llmc": head(options.llmc),
    }
    best = {name: speed for name, speed in speeds.items() if not name.startswith("ours")}
    return {
        "name": "train_step",
        "ours": {"value": speeds.get("ours"), "unit": "tokens/s"},
        "peers": {
            name: {"value": speed, "unit": "tokens/s", "version": version[name.split("_")[0]]}
            for name, speed in best.items()
        },
        "ratio_to_best_peer": round(speeds["ours"] / max(best.values()), 3) if best and "ours" in speeds else None,
        "machine": machine() | {"load": os.getloadavg()[0], "model": processor()},
        "versions": versions() | {"transformers": metadata.version("transformers")},
        "notes": {"quick": options.quick, "commit": head(HERE), "rounds": options.rounds, "cases": cases},
    }


def head(checkout: Path | None) -> str | None:
    """The commit of a checkout, or the name of a folder that is none."""
    if checkout is None:
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else checkout.name


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
