"""
Weights that PyTorch has pickled become safetensors, once, in a child process with limits on memory and time.

A pickle can run code while it is read. `torch.load(weights_only=True)` makes tensors and plain containers only
(https://docs.pytorch.org/docs/stable/generated/torch.load.html), and refuses everything else that a file names. A fault
in it ends the child and nothing else. Bloomery reads such a file only where a user names the file itself. The
safetensors lie in the cache, in a folder named by the hash of the files, with the model's configuration and tokenizer.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
HINT = "Take the same model as safetensors."


class PickledIndex(TypedDict):
    """What INDEX_NAME holds: the file of each tensor."""

    weight_map: dict[str, NameInside]


def is_named(path: Path) -> bool:
    """Whether a path names pickled weights, or the index of several files."""
    return path.name == INDEX_NAME or WEIGHTS_NAME.fullmatch(path.name) is not None


def converted(path: Path) -> Path:
    """
    The folder in the cache with the same model as safetensors, made where it is not there yet.

    Raises CheckpointError where a file is missing, is no pickle of tensors alone, or needs too much memory or time.
    """
    folder, files = path.parent, [path]
    if path.name == INDEX_NAME:
        index = read_record(path, PickledIndex, error=CheckpointError, fix=HINT)
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
        if wrong := next((file for file in files if not WEIGHTS_NAME.fullmatch(file.name)), None):
            raise CheckpointError(f"names {wrong.name}, which holds no weights", where=str(path), hint=HINT)
    if missing := next((file for file in files if not file.is_file()), None):
        raise CheckpointError("does not exist", where=str(missing), hint="Fetch the whole folder.")
    others = sorted(
        {file for pattern in OTHERS for file in folder.glob(pattern) if file.name not in (INDEX, INDEX_NAME)}
    )
    if large := next((file for file in others if file.stat().st_size > MAX_OTHER_BYTES), None):
        raise CheckpointError("is too large for a configuration or tokenizer", where=str(large), hint=HINT)
    digest = sha256_bytes(canonical([[file.name, cache.sha256_of(file)] for file in (*files, *others)]))
    ready = cache.root() / "unpickled" / digest[:32]
    with cache.locked(cache.root() / f"unpickled-{ready.name}"):
        if not ready.is_dir():
            _make(ready, files, others)
    return ready


def _make(ready: Path, files: Sequence[Path], others: Sequence[Path]) -> None:
    partial = ready.with_name(ready.name + core_io.PARTIAL)
    core_io.remove_path(partial)
    partial.mkdir(parents=True)
    try:
        width, weight_map = len(files), dict[str, str]()
        for number, file in enumerate(files, 1):
            name = WEIGHTS if width == 1 else f"model-{number:05}-of-{width:05}.safetensors"
            info(f"{file}: becomes safetensors, once")
            weight_map |= dict.fromkeys(_in_a_child(file, partial / name), name)
        if width > 1:
            write_json(partial / INDEX, {"weight_map": weight_map})
        for file in others:
            shutil.copyfile(file, partial / file.name)
        partial.rename(ready)
    finally:
        core_io.remove_path(partial)


def _in_a_child(file: Path, out: Path) -> list[str]:
    """Convert one file. Returns the names of its tensors."""
    size = file.stat().st_size
    seconds = SECONDS + size // BYTES_A_SECOND
    limits = [str(2 * size + MEMORY_BYTES), str(seconds)]
    command = child.leashed([sys.executable, "-m", __name__, str(file), str(out), *limits])
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"was not read within {seconds} s", where=str(file), hint=HINT) from None
    if done.returncode == 0 and out.is_file():
        names: list[str] = json.loads(done.stdout)
        return names
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
        tensors = checked(held)
    except Exception as error:
        text = " ".join(str(error).split())
        sys.stderr.write(f"{type(error).__name__}: {text[:200]}\n")
        return 1
    names = sorted(tensors)
    shapes = {name: list(tensors[name].shape) for name in names}
    forms = {name: tensors[name].dtype for name in names}
    write_file(out, names, shapes, {name: tensors[name].detach for name in names}, forms)
    print(json.dumps(names))
    return 0


def checked(held: object) -> dict[str, Tensor]:
    """The tensors of a state dict. Raises ValueError for anything else in it."""
    if not isinstance(held, Mapping):
        raise ValueError(f"it holds {type(held).__name__}, and no tensors by name")
    tensors: dict[str, Tensor] = {}
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is {type(tensor).__name__}, and no tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
            raise ValueError(f"{name} is no plain tensor")
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel() > max(reach, 0):
            raise ValueError(f"{name} has more numbers than its storage")
        if str(tensor.dtype).removeprefix("torch.") in NUMBERS.values():
            tensors[name] = tensor  # others are buffers, such as masks, which are computed
    return tensors


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
