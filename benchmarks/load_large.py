"""
How much memory does it take to load a large model of others, in each number format?

    python benchmarks/load_large.py [--json] [--quick] [--formats bfloat16 int8 nf4] [--folder DIR] [--into FILE]
    python benchmarks/load_large.py --shape llama-1b --formats late-nf4 base-nf4

A folder is written as transformers saves it: the shape of Llama 3.1 8B, weights in bfloat16 that repeat one drawn
block, four files with an index, and a tokenizer of 257 tokens. The folder takes 16 GB of disk and is removed after the
measurement, unless --folder names it. A process of its own loads each format. One of its threads reads the kernel's
count of its anonymous memory (RssAnon) every 10 ms. Pages of the files do not count: the kernel takes them back when
it needs memory. --quick takes a shape of 60 million parameters. --shape llama-1b takes that of TinyLlama.

--ranks 4 reads for LoRA over a mesh of dp_shard=4, as one process of four does, for each rank in turn: its parts alone.
The processes exchange nothing while they read, so the others need not be there. --only 0 3 reads for these ranks alone.

base-nf4 reads the frozen base of adapters, with tables in float32, and attaches adapters to it. late-nf4 first reads
all of it in float32, as versions before did.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bloomery.core.pipeline import machine, versions
from bloomery.tokenizer.tokenizer import byte_letters

import torch

LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B |= {"intermediate_size": 14336, "vocab_size": 128256}
QUICK = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
QUICK |= {"intermediate_size": 1792, "vocab_size": 32000}
LLAMA_1B = {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
LLAMA_1B |= {"intermediate_size": 5632, "vocab_size": 32000}
BASES = ("bfloat16", "int8", "nf4")
FORMATS = (*BASES, *(f"{when}-{base}" for base in BASES for when in ("late", "base")))
FILES = 4
BLOCK = 2**24
"""Numbers of the block that is repeated."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=BASES)
    parser.add_argument("--folder", type=Path, help="a folder, which is written if it is not there, or a GGUF file")
    parser.add_argument("--ranks", type=int, default=1, choices=range(1, 65), metavar="1..64")
    parser.add_argument("--only", type=int, nargs="+", help="these ranks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=("llama-8b", "llama-1b"), default="llama-8b")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--one", choices=FORMATS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        rank = (options.rank, options.ranks)
        print(json.dumps(loaded(options.folder, options.one) if options.rank is None else part(options, *rank)))
        return
    shape = QUICK if options.quick else {"llama-8b": LLAMA_8B, "llama-1b": LLAMA_1B}[options.shape]
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made) / "model"
        if not folder.is_file() and not (folder / "config.json").exists():
            write(folder, shape)
        ranks = [None] if options.ranks == 1 else options.only or range(options.ranks)
        cases = [in_a_process(folder, dtype, rank, options.ranks) for dtype in options.formats for rank in ranks]
    result = {
        "benchmark": "load_large",
        "machine": machine(),
        "versions": versions(),
        "shape": shape,
        "parameters": sum(math.prod(size) for size in sizes(shape).values()),
        "cases": cases,
    }
    for case in cases:
        print(
            f"{case['dtype']:<9} {of_rank(case):<12} {case['model_gib']:6.2f} GiB of weights"
            f"  {case['peak_anonymous_gib']:6.2f} GiB at most"
            f"  {case['seconds']:6.1f} s",
            file=sys.stderr,
        )
    if options.into:
        options.into.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def of_rank(case: dict[str, Any]) -> str:
    return f"rank {case['rank']} of {case['ranks']}" if "rank" in case else ""


def sizes(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama of transformers, in the order in which they are saved."""
    D, F, V = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    kv = D * shape["num_key_value_heads"] // shape["num_attention_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}self_attn.q_proj.weight": (D, D), f"{at}self_attn.k_proj.weight": (kv, D)}
        found |= {f"{at}self_attn.v_proj.weight": (kv, D), f"{at}self_attn.o_proj.weight": (D, D)}
        found |= {f"{at}mlp.gate_proj.weight": (F, D), f"{at}mlp.up_proj.weight": (F, D)}
        found |= {f"{at}mlp.down_proj.weight": (D, F)}
        found |= {f"{at}input_layernorm.weight": (D,), f"{at}post_attention_layernorm.weight": (D,)}
    return found | {"model.norm.weight": (D,), "lm_head.weight": (V, D)}


def write(folder: Path, shape: dict[str, int]) -> None:
    """The folder, written tensor by tensor, without the library: it would hold a whole file in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    data = block.view(torch.uint8).numpy().tobytes()
    wanted = list(sizes(shape).items())
    share = -(-len(wanted) // FILES)
    weight_map: dict[str, str] = {}
    for number in range(FILES):
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        some = wanted[number * share : (number + 1) * share]
        weight_map |= dict.fromkeys([tensor for tensor, _ in some], name)
        header, end = dict[str, Any](), 0
        for tensor, size in some:
            begin, end = end, end + 2 * math.prod(size)
            header[tensor] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for piece in repeated(data, end):
                file.write(piece)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192, **shape}
    facts |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    facts |= {"eos_token_id": 256}
    letters = [*byte_letters().values(), "<|end_of_text|>"]
    inner = tokenizers.Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_of_text|>"}))
    (folder / "config.json").write_text(json.dumps(facts))


def repeated(data: bytes, size: int) -> Iterator[bytes]:
    while size > 0:
        yield data[:size]
        size -= len(data)


def in_a_process(folder: Path, dtype: str, rank: int | None, ranks: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--folder", str(folder), "--one", dtype]
    command += [] if rank is None else ["--ranks", str(ranks), "--rank", str(rank)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def loaded(folder: Path, dtype: Any) -> dict[str, Any]:
    """Load a model here. Returns seconds, bytes of the model, and the peak of anonymous memory above what was there."""
    from bloomery.model import lora, quantize
    from bloomery.model.config import Lora
    from bloomery.weights import hf

    def load() -> int:
        when, _, base = dtype.partition("-")
        if base:
            model = hf.load(folder, base=base if when == "base" else "float32").model
            lora.attach(model, Lora(base_dtype=base), seed=0)
        else:
            model = hf.load(folder, dtype=dtype).model
        return quantize.kept_bytes(model)

    return {"dtype": dtype} | measured(load)


def part(options: argparse.Namespace, rank: int, ranks: int) -> dict[str, Any]:
    """As `loaded`, what one process of several keeps of the frozen base of adapters."""
    from bloomery.hw.device import find
    from bloomery.hw.distributed import World
    from bloomery.model import lora
    from bloomery.model.config import Lora
    from bloomery.train import collectives, fsdp
    from bloomery.train.config import Mesh
    from bloomery.weights import hf

    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    base, mesh, device = options.one.rpartition("-")[2], Mesh(dp_shard=ranks), find("cpu")

    def load() -> int:
        own = fsdp.OwnParts(mesh, rank)
        model = hf.load(options.folder, base=base, take=own.take).model
        lora.attach(model, Lora(base_dtype=base), seed=0)
        fsdp.shard(model, World(rank, ranks), device, mesh, spread=True, own=own)
        return sum(collectives.local(weight).nbytes for weight in model.parameters())

    return {"dtype": options.one, "rank": rank, "ranks": ranks} | measured(load)


def measured(load: Callable[[], int]) -> dict[str, Any]:
    """Of what `load` does, which returns bytes that it keeps. They are in memory until the watch ends."""
    before, stop, peak = anonymous(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.01):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    size = load()
    seconds = time.perf_counter() - start
    stop.set()
    watcher.join()
    return {
        "seconds": round(seconds, 1),
        "model_gib": round(size / 2**30, 3),
        "peak_anonymous_gib": round(peak[0] / 2**30, 3),
        "of_the_process_before_gib": round(before / 2**30, 3),
    }


def anonymous() -> int:
    """Bytes of this process that are no part of a file."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


if __name__ == "__main__":
    main()
