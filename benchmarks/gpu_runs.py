"""
The parts of gpu.py that start runs or ranks: twice with one seed, killed and resumed, and several GPUs.

    python benchmarks/gpu_runs.py PART '{"device": "auto", "quick": false, "ranks": 2, "seconds": 60}'

Runs go by the command that people use, on toy worlds, which need no network.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gpu_parts import TOKENS, Setting, main, packed_batch, random_model, say

from bloomery.core.log import METRICS, read_metrics
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.shards.loader import Batch
from bloomery.train import fsdp, launch
from bloomery.train.precision import Precision
from bloomery.train.step import accumulate_gradients

RECIPE = """
name = "gpu"
fetch.sources = [{{ kind = "worlds", name = "a", domain = "a", count = {count} }}]
filter.rules = [{{ kind = "length", min_characters = 20 }}]
filter.min_scores = []
tokenizer.vocab_size = 512
shard = {{ tokens = {tokens}, val_fraction = 0.05 }}

[pretrain]
steps = {steps}
global_batch_tokens = {batch}
device = "{device}"
compile = "off"
model.hidden_size = {width}
model.num_layers = 4
model.num_heads = 4
model.num_kv_heads = 2
model.intermediate_size = {inner}
model.context_length = 96
schedule = {{ kind = "wsd", warmup_steps = 5 }}
save_every_seconds = 0.1
eval_every = 1000
log_every = 1
"""


class Runs:
    """Runs of a small recipe by the command that people use. The data are made once."""

    def __init__(self, setting: Setting, folder: Path, steps: int) -> None:
        self.folder, self.setting = folder, setting
        sizes = {"count": 500, "tokens": 40_000, "batch": 768, "width": 32, "inner": 48}
        if not setting.quick:
            sizes = {"count": 4000, "tokens": 400_000, "batch": 12_288, "width": 512, "inner": 1408}
        device = "cpu" if setting.choice == "cpu" else "auto"
        (folder / "recipe.toml").write_text(RECIPE.format(steps=steps, device=device, **sizes), encoding="utf-8")
        self.wait(self.start("data", "--until", "shard"))

    def start(self, name: str, *words: str) -> "subprocess.Popen[bytes]":
        if name != "data" and not (self.folder / name).exists():
            shutil.copytree(self.folder / "data", self.folder / name)
        command = [sys.executable, "-m", "bloomery.cli", "run", "recipe.toml", "--runs", name, *words]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def pretrain(self, name: str, *settings: str) -> "subprocess.Popen[bytes]":
        return self.start(name, "--until", "pretrain", *(f"pretrain.{one}" for one in settings))

    def wait(self, process: "subprocess.Popen[bytes]") -> int:
        return process.wait(self.setting.seconds)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Metrics of the pretraining of a run."""
        return [line for file in self.folder.glob(f"{name}/*/*pretrain*/{METRICS}") for line in read_metrics(file)]

    def losses(self, name: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines(name) if "loss" in line}

    def speed(self, name: str) -> float | None:
        speeds = [line["tokens_per_second"] for line in self.lines(name) if "tokens_per_second" in line]
        return float(np.median(speeds[len(speeds) // 2 :])) if speeds else None

    def log(self, name: str) -> str:
        text = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return " ".join(text.split())[-500:]

    def until(self, name: str, step: int, process: "subprocess.Popen[bytes]") -> bool:
        """Whether a run comes to a step before it ends."""
        while process.poll() is None:
            if max(self.losses(name), default=0) >= step:
                return True
            time.sleep(0.05)
        return False


def first_difference(first: Mapping[int, float], second: Mapping[int, float]) -> int | None:
    """The first step whose loss is another; None for none."""
    return next((step for step in sorted(first.keys() | second.keys()) if first.get(step) != second.get(step)), None)


def repeat(setting: Setting) -> None:
    steps = 20
    with tempfile.TemporaryDirectory(prefix="bloomery-gpu-") as name:
        runs = Runs(setting, Path(name), steps)
        for run in ("first", "second"):
            code = runs.wait(runs.pretrain(run))
            say(**{f"{run}_exit": code, f"{run}_speed": runs.speed(run)})
            if code:
                say(log=runs.log(run))
                return
        same = first_difference(runs.losses("first"), runs.losses("second"))
        say(steps=len(runs.losses("first")), last_loss=runs.losses("first").get(steps), first_step_that_differs=same)
        process = runs.pretrain("killed")
        hit = runs.until("killed", steps // 2, process)
        process.kill()
        process.wait()
        say(killed_after_step=max(runs.losses("killed"), default=0) if hit else None)
        code = runs.wait(runs.pretrain("killed"))
        say(
            resumed_exit=code,
            first_step_that_differs_after_resume=first_difference(runs.losses("first"), runs.losses("killed")),
        )
        if code:
            say(log=runs.log("killed"))


# --- several GPUs --------------------------------------------------------------------------------------------------


def all_reduce(setting: Setting) -> None:
    command = [sys.executable, "-m", "bloomery.hw.probes", "all-reduce"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=0.9 * setting.seconds)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    facts = {key: value for answer in answers for key, value in answer.items()}
    say(
        exit=done.returncode,
        **{key: facts[key] for key in ("ranks", "codes", "wrong", "bytes_per_second") if key in facts},
    )


def ranks(setting: Setting) -> None:
    count = setting.ranks
    kinds = {
        "one": (),
        "ddp": (f"num_processes={count}",),
        "fsdp": (f"num_processes={count}", 'parallelism="fsdp"'),
    }
    with tempfile.TemporaryDirectory(prefix="bloomery-gpu-") as name:
        runs = Runs(setting, Path(name), 20)
        alone: dict[int, float] = {}
        for kind, settings in kinds.items():
            code = runs.wait(runs.pretrain(kind, *settings))
            losses = runs.losses(kind)
            alone = alone or losses
            gap = max((abs(losses[step] - alone[step]) for step in losses.keys() & alone.keys()), default=None)
            row = {"kind": kind, "ranks": 1 if kind == "one" else count, "exit": code, "steps": len(losses)}
            say(runs=[row | {"tokens_per_second": runs.speed(kind), "largest_difference_of_loss": gap}])
            if code:
                say(**{f"log_{kind}": runs.log(kind)})


def overlap(setting: Setting) -> None:
    task = {"device": setting.choice, "quick": setting.quick}
    for kind in ("ddp", "fsdp"):
        say(overlap=[launch.run("gpu_runs:overlap_on_rank", task | {"kind": kind}, setting.ranks)])


def overlap_on_rank(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Seconds of a step of all ranks, and of the same work without the others."""
    setting = Setting(task["device"], task["quick"], world.size, 100.0)
    device, precision = setting.device, Precision.decide("auto", setting.device)
    model_config, vocab_size = setting.shape("gpt2-124m", TOKENS)
    rows = 2 if setting.quick else 8
    model = random_model(model_config, vocab_size, device).train()
    batch = packed_batch(rows * world.size, model_config.context_length, vocab_size)
    own = batch.of_rank(world.rank, world.size)

    def work(batch: Batch, world: World) -> float:
        loss = accumulate_gradients(model, batch, max(1, rows // 2), precision, world=world).loss
        model.zero_grad(set_to_none=True)
        return loss

    seconds = setting.timed_seconds
    alone = count_steps(device, lambda: work(own, World.alone()), world, seconds)
    if task["kind"] == "fsdp":
        fsdp.shard(model, world, device)
    together = count_steps(device, lambda: work(batch, world), world, seconds)
    facts = {"kind": task["kind"], "ms_alone": round(1e3 * alone, 3), "ms_together": round(1e3 * together, 3)}
    return facts | {"ms_of_waiting": round(1e3 * (together - alone), 3)}


def count_steps(device: Device, step: Callable[[], float], world: World, seconds: float) -> float:
    """The median time of steps, as many on each rank."""
    times = list[float]()
    step()
    began = time.perf_counter()
    while not world.any(len(times) >= 3 and time.perf_counter() - began > seconds):
        start = time.perf_counter()
        step()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def kill(setting: Setting) -> None:
    """Ends one rank of two in the midst, and looks how long the command takes to end; then it resumes."""
    settings = (f"num_processes={setting.ranks}",)
    with tempfile.TemporaryDirectory(prefix="bloomery-gpu-") as name:
        runs = Runs(setting, Path(name), 60)
        process = runs.pretrain("killed", *settings)
        hit = runs.until("killed", 30, process)
        victims = children(process.pid) if hit else []
        if not victims:
            process.kill()
            process.wait()
            say(killed="no rank was there to be killed", log=runs.log("killed"))
            return
        os.kill(victims[-1], signal.SIGKILL)
        began = time.monotonic()
        code = process.wait(0.5 * setting.seconds)
        say(seconds_to_end=round(time.monotonic() - began, 1), exit=code, message=runs.log("killed")[-300:])
        code = runs.wait(runs.pretrain("killed", *settings))
        say(resumed_exit=code, steps=max(runs.losses("killed"), default=0))


def children(parent: int) -> list[int]:
    """Processes that a process of ours has started; none where the system does not tell."""
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


RUN: dict[str, Callable[[Setting], None]] = {
    "repeat": repeat,
    "all-reduce": all_reduce,
    "ranks": ranks,
    "overlap": overlap,
    "kill": kill,
}


if __name__ == "__main__":
    main(RUN)
