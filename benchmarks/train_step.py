"""
How long does a training step take, beside Hugging Face, nanoGPT and llm.c on the same machine?

    python benchmarks/train_step.py [--json] [--quick] [--nanogpt DIR] [--llmc DIR] [--sizes 4x64 …] [--threads 1 2]
        [--rounds N] [--seconds S] [--programs NAME …]

GPT-2 of 124M parameters at three sizes of batch (rows x tokens), and a Llama of 5M parameters, the demo's kind, at
16x256. Every program is started as a process of its own, in turns, N rounds of them; steps are timed inside it
(stepper.py, llmc_step.c). Times are those of the processor, which other programs disturb least; with two threads those
of the wall. The ratio to a peer is the median of the ratios within each round, of the least time of each.

DIR is a checkout of the peer, and without it the peer is left out; llm.c is compiled with gcc -Ofast -march=native and
OpenMP. --quick measures the smallest size with one thread, once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.stage import machine, versions

HERE = Path(__file__).parent
SIZES = ("4x64", "4x256", "8x512")
SMALL = "small-16x256"
OURS = ("ours", "ours_plain", "ours_float32", "ours_plain_float32")
PEERS = ("huggingface", "huggingface_bfloat16", "huggingface_bfloat16_kept")
NANOGPT = ("nanogpt", "nanogpt_bfloat16", "nanogpt_bfloat16_kept")
LLMC = "llmc"

Times = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--llmc", type=Path)
    parser.add_argument("--sizes", nargs="+", default=[*SIZES, SMALL])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of steps, for each process")
    parser.add_argument("--programs", nargs="+", help="only these")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.threads, options.rounds, options.seconds = [SIZES[0]], [1], 1, 4.0
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        if options.llmc:
            build_llmc(options.llmc, Path(folder))
        for size in options.sizes:
            for threads in options.threads:
                cases.append(case(size, threads, options, Path(folder)))
                if not options.json:
                    show(cases[-1])
    print(json.dumps(result(cases, options)))


def programs(size: str, options: argparse.Namespace) -> list[str]:
    gpt2 = size != SMALL
    names = [*OURS, *PEERS, *(NANOGPT if options.nanogpt and gpt2 else ()), *([LLMC] if options.llmc and gpt2 else ())]
    return [name for name in names if not options.programs or name in options.programs]


def case(size: str, threads: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All programs at one size, in turns."""
    rows, tokens = map(int, size.split("-")[-1].split("x"))
    rounds: dict[str, list[Times]] = {name: [] for name in programs(size, options)}
    for _ in range(options.rounds):
        for name, seen in rounds.items():
            slow = name == LLMC and rows * tokens >= 1024
            if not (slow and seen):  # once is enough of what takes minutes
                seen.append(one(name, size, rows, tokens, threads, options, folder))
    clock = "cpu" if threads == 1 else "wall"
    kinds = {name: summary(seen, clock, rows * tokens) for name, seen in rounds.items()}
    found: dict[str, Any] = {"size": size, "threads": threads, "clock": clock, "load": os.getloadavg()[0]}
    for name, facts in kinds.items():
        if not name.startswith("ours"):
            facts["ours_is_faster"] = faster(rounds, "ours", name, clock)
            facts["plain_is_faster"] = faster(rounds, "ours_plain", name, clock)
    if rounds.get("ours"):
        last = max(rounds["ours"], key=lambda seen: float(seen["shapes_gflops"]))
        achieved = last["flops"] / kinds["ours"]["least_ms"] / 1e6
        found |= {key: round(last[key], 1) for key in ("square_gflops", "shapes_gflops")}
        found |= {"gflops": round(achieved, 1), "share_of_ceiling": round(achieved / last["square_gflops"], 3)}
        found["share_of_shapes_ceiling"] = round(achieved / last["shapes_gflops"], 3)
        if rounds.get("ours_plain_float32"):
            found["faster_than_own_float32"] = faster(rounds, "ours", "ours_plain_float32", clock)
    return found | {"programs": kinds}


def one(name: str, size: str, rows: int, tokens: int, threads: int, options: argparse.Namespace, folder: Path) -> Times:
    """A program's steps, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if name == LLMC:
        command = ["./llmc_step", str(rows), str(tokens), "6", str(options.seconds)]
        run = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
        steps = [list(map(float, line.split()[1:])) for line in run.stderr.splitlines() if line.startswith("STEP")]
        wall, cpu, losses = (list(column) for column in zip(*steps, strict=True))
        return {"wall": wall[1:], "cpu": cpu[1:], "losses": losses, "peak_bytes": None}
    if "plain" in name:
        environment["BLOOMERY_NATIVE"] = "0"
    if not name.startswith("ours"):
        environment["GOMP_SPINCOUNT"] = environment.get("GOMP_SPINCOUNT", "300000")  # GNU's own; ours is lower
    shape = ["--shape", "small"] if size == SMALL else []
    words = [name, *shape, "--rows", str(rows), "--tokens", str(tokens), "--threads", str(threads)]
    words += ["--seconds", str(options.seconds)] + (["--folder", str(options.nanogpt)] if options.nanogpt else [])
    command = [sys.executable, str(HERE / "stepper.py"), *words]
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: Times = json.loads(run.stdout.splitlines()[-1])
    return found


def summary(rounds: list[Times], clock: str, tokens: int) -> dict[str, Any]:
    times = [second * 1e3 for seen in rounds for second in seen[clock]]
    wall = [second * 1e3 for seen in rounds for second in seen["wall"]]
    peaks = [seen["peak_bytes"] for seen in rounds if seen["peak_bytes"]]
    return {
        "least_ms": round(min(times), 1),
        "median_ms": round(statistics.median(times), 1),
        "least_wall_ms": round(min(wall), 1),
        "median_wall_ms": round(statistics.median(wall), 1),
        "tokens_per_second": round(tokens / min(times) * 1e3, 1),
        "steps": len(times),
        "first_loss": round(rounds[0]["losses"][0], 4),
        "peak_bytes": max(peaks, default=None),
    }


def faster(rounds: dict[str, list[Times]], name: str, peer: str, clock: str) -> float | None:
    """How many times faster `name` is than `peer`: the median over rounds; over all where the peer ran once."""
    ours, theirs = ([min(seen[clock]) for seen in rounds.get(which, ())] for which in (name, peer))
    if not ours or not theirs:
        return None
    if len(ours) != len(theirs):
        return round(float(min(theirs) / min(ours)), 2)
    return round(float(statistics.median(their / our for our, their in zip(ours, theirs, strict=True))), 2)


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


def show(found: dict[str, Any]) -> None:
    head = f"{found['size']}, threads: {found['threads']}"
    print(f"{head}; {found.get('gflops')} GFLOP/s of {found.get('square_gflops')}", file=sys.stderr)
    for name, facts in found["programs"].items():
        ratio = f"{facts['ours_is_faster']:6.2f} x" if facts.get("ours_is_faster") else ""
        print(
            f"  {name:<26} {facts['least_ms']:9.1f} ms  {facts['tokens_per_second']:8.0f} tokens/s {ratio}",
            file=sys.stderr,
        )


def result(cases: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The first case in front, all of them in the notes."""
    first = cases[0]
    speeds = {name: facts["tokens_per_second"] for name, facts in first["programs"].items()}
    version = {
        "hugging": metadata.version("transformers"),
        "nanogpt": head(options.nanogpt),
        "llmc": head(options.llmc),
    }
    best = {name: speed for name, speed in speeds.items() if not name.startswith("ours")}
    return {
        "name": "train_step",
        "ours": {"value": speeds.get("ours"), "unit": "tokens/s"},
        "peers": {
            name: {"value": speed, "unit": "tokens/s", "version": version.get(name.split("_")[0].removesuffix("face"))}
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
