"""
Convert weights that PyTorch pickled to safetensors, once, in a child process with limits on memory and time.

A pickle can run code while it is read. `torch.load(weights_only=True)` makes tensors and plain containers only
(https://docs.pytorch.org/docs/stable/generated/torch.load.html), and refuses everything else that a file names. A fault
in it ends the child and nothing else. Bloomery reads such a file only where a user names the file itself. The
safetensors lie in the cache, in a folder named by the hash of the files, with the model's configuration and tokenizer.

Checkpoints of 1386.ai (Plasma) are read too: {step, model_state_dict, optimizer_state_dict, config}. Their model is a
Llama, or a Qwen3 with `qk_norm`, whose rotary positions turn numbers 2i and 2i + 1 of a head together. Here these are
numbers i and i + E/2, as in transformers, so rows of queries and keys change their order, and logits do not change.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import cache, child
from bloomery.core import io as core_io
from bloomery.core.errors import CheckpointError
from bloomery.core.io import canonical, sha256_bytes, write_json
from bloomery.core.log import info
from bloomery.core.records import NameInside, read_record
from bloomery.weights.safetensors import INDEX, NUMBERS, WEIGHTS, write_file

import torch
from torch import Tensor

if sys.platform != "win32":
    import resource

WEIGHTS_NAME = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin")
INDEX_NAME = "pytorch_model.bin.index.json"
OTHERS = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""Files next to the weights that a model consists of."""
MAX_OTHER_BYTES = 2**28
"""Of one of those files."""
MEMORY_BYTES = 4 * 2**30
"""Of the child, in addition to twice the file."""
SECONDS, BYTES_A_SECOND = 120, 10 * 10**6
HINT = "Use the same model as safetensors."
CHECKPOINT_SUFFIXES = (".pt", ".pth")
TOKENIZERS = ("*.model", "tokenizer.json")
PLASMA_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
"""Keys of `config.model` of 1386.ai, and those of config.json."""
PLASMA_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
PLASMA_NAMES = (
    (r"tok_emb\.weight", "model.embed_tokens.weight"),
    (r"layers\.(\d+)\.attn_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"layers\.(\d+)\.attn\.((?:[qkvo]_proj|[qk]_norm)\.weight)", r"model.layers.\1.self_attn.\2"),
    (r"layers\.(\d+)\.ffn_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"layers\.(\d+)\.ffn\.((?:gate|up|down)_proj\.weight)", r"model.layers.\1.mlp.\2"),
    (r"norm\.weight", "model.norm.weight"),
    (r"output\.weight", "lm_head.weight"),
)


class PickledIndex(TypedDict):
    """What INDEX_NAME holds: the file of each tensor."""

    weight_map: dict[str, NameInside]


def is_named(path: Path) -> bool:
    """Whether a path names pickled weights, or the index of several files."""
    named = path.name == INDEX_NAME or WEIGHTS_NAME.fullmatch(path.name) is not None
    return named or path.suffix in CHECKPOINT_SUFFIXES


def needs_tokenizer(path: Path) -> bool:
    """Whether a file holds no model but its weights and settings: a checkpoint of 1386.ai."""
    return path.suffix in CHECKPOINT_SUFFIXES


def converted(path: Path, tokenizer: Path | None = None) -> Path:
    """
    The folder in the cache with the same model as safetensors, made where it is not there yet. `tokenizer` is the file
    for a checkpoint of 1386.ai, where it is not in the same folder.

    Raises CheckpointError where a file is missing, is no pickle of tensors alone, or needs too much memory or time.
    """
    if needs_tokenizer(path):
        file = tokenizer or _beside(path)
        return _in_cache([path], {"tokenizer.json" if file.suffix == ".json" else "tokenizer.model": file})
    folder, files = path.parent, [path]
    if path.name == INDEX_NAME:
        index = read_record(path, PickledIndex, error=CheckpointError, fix=HINT)
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
        if wrong := next((file for file in files if not WEIGHTS_NAME.fullmatch(file.name)), None):
            raise CheckpointError(f"names {wrong.name}, which holds no weights", where=str(path), hint=HINT)
    others = {file for pattern in OTHERS for file in folder.glob(pattern) if file.name not in (INDEX, INDEX_NAME)}
    return _in_cache(files, {file.name: file for file in sorted(others)})


def _beside(checkpoint: Path) -> Path:
    """The tokenizer in the folder of a checkpoint. Raises CheckpointError where there is none, or several."""
    files = sorted(file for pattern in TOKENIZERS for file in checkpoint.parent.glob(pattern))
    if len(files) != 1:
        what = f"needs its tokenizer in the same folder, which has {', '.join(file.name for file in files) or 'none'}"
        hint = f"Put the .model file there, or add it: bloomery import {checkpoint} OUT --tokenizer FILE"
        raise CheckpointError(what, where=str(checkpoint), hint=hint)
    return files[0]


def _in_cache(files: Sequence[Path], others: Mapping[str, Path]) -> Path:
    """The folder with these weights as safetensors, and other files under these names."""
    if missing := next((file for file in (*files, *others.values()) if not file.is_file()), None):
        raise CheckpointError("does not exist", where=str(missing), hint="Download the whole folder.")
    if large := next((file for file in others.values() if file.stat().st_size > MAX_OTHER_BYTES), None):
        raise CheckpointError("is too large for a configuration or tokenizer", where=str(large), hint=HINT)
    named = [*((file.name, file) for file in files), *others.items()]
    digest = sha256_bytes(canonical([[name, cache.sha256_of(file)] for name, file in named]))
    ready = cache.root() / "unpickled" / digest[:32]
    with cache.locked(cache.root() / f"unpickled-{ready.name}"):
        if not ready.is_dir():
            _make(ready, files, others)
    return ready


def _make(ready: Path, files: Sequence[Path], others: Mapping[str, Path]) -> None:
    partial = ready.with_name(ready.name + core_io.PARTIAL)
    core_io.remove_path(partial)
    partial.mkdir(parents=True)
    try:
        width, weight_map = len(files), dict[str, str]()
        for number, file in enumerate(files, 1):
            name = WEIGHTS if width == 1 else f"model-{number:05}-of-{width:05}.safetensors"
            info(f"{file}: becomes safetensors, once")
            names, config = _in_a_child(file, partial / name)
            weight_map |= dict.fromkeys(names, name)
            if config:
                write_json(partial / "config.json", config)
                write_json(partial / "tokenizer_config.json", PLASMA_ROLES)
        if width > 1:
            write_json(partial / INDEX, {"weight_map": weight_map})
        for name, file in others.items():
            shutil.copyfile(file, partial / name)
        partial.rename(ready)
    finally:
        core_io.remove_path(partial)


def _in_a_child(file: Path, out: Path) -> tuple[list[str], dict[str, Any]]:
    """Convert one file. Returns the names of its tensors, and the config.json that it holds, or {}."""
    size = file.stat().st_size
    seconds = SECONDS + size // BYTES_A_SECOND
    limits = [str(2 * size + MEMORY_BYTES), str(seconds)]
    command = child.leashed([sys.executable, "-m", __name__, str(file), str(out), *limits])
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"was not read within {seconds} s", where=str(file), hint=HINT) from None
    if done.returncode == 0 and out.is_file():
        names, config = json.loads(done.stdout)
        return names, config
    said = done.stderr.strip().splitlines()[-1:] or [f"the process that read it ended with {done.returncode}"]
    raise CheckpointError(f"cannot be read as a pickle of tensors: {said[0][:300]}", where=str(file), hint=HINT)


def _main(file: Path, out: Path, memory_bytes: int, seconds: int) -> int:
    """What the child does. Errors are one line on stderr."""
    if sys.platform != "win32":
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        try:
            held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of torch before 1.6 are no archives, and are read whole
            held = torch.load(file, map_location="cpu", weights_only=True)
        tensors, config = plasma(held) if needs_tokenizer(file) else (checked(held), {})
    except Exception as error:
        text = " ".join(str(error).split())
        sys.stderr.write(f"{type(error).__name__}: {text[:200]}\n")
        return 1
    names = sorted(tensors)
    shapes = {name: list(tensors[name].shape) for name in names}
    forms = {name: tensors[name].dtype for name in names}
    write_file(out, names, shapes, {name: tensors[name].detach for name in names}, forms)
    print(json.dumps([names, config]))
    return 0


def plasma(held: object) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights by transformers' names and config.json, of a checkpoint of 1386.ai. Raises ValueError for another."""
    parts = [held.get(key) for key in ("model_state_dict", "config")] if isinstance(held, Mapping) else [None]
    model = parts[-1].get("model") if isinstance(parts[-1], Mapping) else None
    if not isinstance(parts[0], Mapping) or not isinstance(model, Mapping):
        raise ValueError(
            "it is not a checkpoint of 1386.ai, which holds model_state_dict and config with the key model"
        )
    sizes: dict[str, Any] = {theirs: model.get(name) for name, theirs in PLASMA_SIZES.items()}
    theta, qk_norm = model.get("rope_theta", 10_000.0), model.get("qk_norm", False)
    if wrong := [f"{name} {value!r}" for name, value in sizes.items() if type(value) is not int or value < 1]:
        raise ValueError(f"its config.model has {', '.join(wrong)}")
    if type(theta) not in (int, float) or type(qk_norm) is not bool:
        raise ValueError(f"its config.model has rope_theta {theta!r} and qk_norm {qk_norm!r}")
    if unknown := sorted(map(str, model.keys() - PLASMA_SIZES.keys() - {"rope_theta", "qk_norm", "dropout"})):
        raise ValueError(f"its config.model has {unknown[0]}, which is not known")
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    if head % 2 or head * sizes["num_attention_heads"] != sizes["hidden_size"]:
        raise ValueError(f"its hidden_size {sizes['hidden_size']} is not an even number for each head")
    plain = {str(name).removeprefix("_orig_mod."): tensor for name, tensor in parts[0].items()}
    weights = checked({name: tensor for name, tensor in plain.items() if name != "freqs_cis"})
    tied = "output.weight" not in weights or torch.equal(weights["output.weight"], weights["tok_emb.weight"])
    tensors = {}
    for name, tensor in weights.items():
        new = next((re.sub(old, new, name) for old, new in PLASMA_NAMES if re.fullmatch(old, name)), None)
        if new is None or (len(tensor) % head and re.search(r"\.[qk]_(proj|norm)\.", name)):
            raise ValueError(f"{name} is not a weight of this model")
        if not (tied and name == "output.weight"):
            tensors[new] = _in_halves(tensor, head) if re.search(r"\.[qk]_(proj|norm)\.", name) else tensor
    architecture, kind = ("Qwen3ForCausalLM", "qwen3") if qk_norm else ("LlamaForCausalLM", "llama")
    return tensors, sizes | {
        "architectures": [architecture],
        "model_type": kind,
        "head_dim": head,
        "rope_theta": float(theta),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _in_halves(weight: Tensor, head: int) -> Tensor:
    """Rows of each head: those with even numbers before those with odd ones."""
    return weight.reshape(-1, head // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def checked(held: object) -> dict[str, Tensor]:
    """The tensors of a state dict. Raises ValueError for anything else in it."""
    if not isinstance(held, Mapping):
        raise ValueError(f"it holds {type(held).__name__}, not tensors by name")
    tensors: dict[str, Tensor] = {}
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
            raise ValueError(f"{name} is not a plain tensor")
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel() > max(reach, 0):
            raise ValueError(f"{name} has more numbers than its storage")
        if str(tensor.dtype).removeprefix("torch.") in NUMBERS.values():
            tensors[name] = tensor  # others are buffers, such as masks, which are computed
    return tensors


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
