"""
Tensors in safetensors files: written whole, and read tensor by tensor.

Reading works from one file, or from several files with an index.

    SHA256SUMS      sha256 and name of each file of a folder, as `sha256sum -c SHA256SUMS` reads it; see `verify`

A folder in a stage, or a checkpoint, is compared with that manifest too. A third-party folder has neither.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import cache
from bloomery.core import io as core_io
from bloomery.core.errors import CheckpointError
from bloomery.core.io import MANIFEST, read_regular, sha256_file, whole_file
from bloomery.core.records import MAX_MANIFEST_BYTES, RECIPE, STAGE_FOLDER, ListedFile, NameInside, read_record

import torch
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS_SUFFIX = ".safetensors"
STEP_FOLDER = "[0-9]" * 9
"""The name of the folder of a checkpoint: its step, so that names sort as numbers do."""
NUMBERS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The dtypes that are read, by their names in safetensors and torch. Other dtypes need separate scales."""
STATE_NUMBERS = {"F64": "float64", "I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
"""Those that only states of training have."""
MAX_HEADER_BYTES = 100 * 10**6
"""Of a safetensors file; the limit of its own library."""
PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt")


UNROUNDED = "Use the same model in one of these formats: the original, or a copy that its tools converted back."
"""The hint where a model is quantized."""


def rounded(name: str, tensor: Tensor, form: torch.dtype, where: str) -> Tensor:
    """A weight in another number format. Raises CheckpointError where one of its numbers becomes infinite there."""
    there = tensor.to(form)
    is_same = there.dtype == tensor.dtype or there.is_meta or _is_finite(there)
    if not is_same and not torch.equal(there.isfinite(), tensor.isfinite()):
        largest = float(tensor[tensor.isfinite()].abs().max())
        kind = str(form).removeprefix("torch.")
        what = f"{name} holds numbers up to {largest:g}, but the largest {kind} is {torch.finfo(form).max:g}"
        raise CheckpointError(what, where=where, hint="Use --dtype float32.")
    return there


def finite(name: str, tensor: Tensor, where: str, hint: str) -> Tensor:
    """The same tensor. Raises CheckpointError, with its name, where one of its numbers is NaN or infinite."""
    if tensor.is_floating_point() and not _is_finite(tensor):
        bad = int((~tensor.isfinite()).sum())
        what = f"{name} holds {bad:,} of {tensor.numel():,} numbers that are NaN or infinite"
        raise CheckpointError(what, where=where, hint=hint)
    return tensor


def _is_finite(tensor: Tensor) -> bool:
    """
    The least and the largest number tell it exactly, without memory, and in a tenth of the time of `isfinite`: 36 ms a
    GiB on two cores.
    """
    return tensor.numel() == 0 or all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def check_header(file: Path, hint: str) -> None:
    """
    Raises CheckpointError for a safetensors file whose header cannot be: one that would ask for more memory than the
    file has bytes.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        what = f"is torn: its header says {length:,} bytes" if size >= 8 else f"is torn: it has {size} bytes"
        raise CheckpointError(f"{what}, and the file has {size:,}" if size >= 8 else what, where=str(file), hint=hint)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a safetensors file that is whole or absent."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # aligned, as the format asks for
    shapes = {name: list(tensors[name].shape) for name in names}
    forms = {name: tensors[name].dtype for name in names}
    write_file(path, names, shapes, {name: tensors[name].detach for name in names}, forms)


SHARD_BYTES = 5 * 10**9
"""Of one file of a model that is written, unless another size is asked for."""


def save_sharded(
    folder: Path,
    tensors: Mapping[str, Callable[[], Tensor]],
    shapes: Mapping[str, list[int]],
    forms: Mapping[str, torch.dtype],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """
    Write tensors as safetensors files of up to `shard_bytes`, with an index where that makes
    several. A tensor is made when it is written, and forgotten before the next one is made.
    """
    files: list[list[str]] = [[]]
    size, total = 0, 0
    for name in sorted(tensors):
        tensor_bytes = math.prod(shapes[name]) * forms[name].itemsize
        if files[-1] and size + tensor_bytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size, total = size + tensor_bytes, total + tensor_bytes
    width = len(files)
    stem = WEIGHTS.removesuffix(".safetensors")
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file_name = WEIGHTS if width == 1 else f"{stem}-{number:05}-of-{width:05}.safetensors"
        write_file(folder / file_name, names, shapes, tensors, {name: forms[name] for name in names})
        weight_map |= dict.fromkeys(names, file_name)
    if width > 1:
        core_io.write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_file(
    path: Path,
    names: Sequence[str],
    shapes: Mapping[str, list[int]],
    tensors: Mapping[str, Callable[[], Tensor]],
    forms: Mapping[str, torch.dtype],
) -> None:
    """
    Write a safetensors file: the length of its header, the header in JSON, the bytes of each tensor. A tensor is made
    when it is written.
    """
    kinds = {getattr(torch, name): short for short, name in (NUMBERS | STATE_NUMBERS).items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + math.prod(shapes[name]) * forms[name].itemsize
        header[name] = {"dtype": kinds[forms[name]], "shape": shapes[name], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with core_io.whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            ready = tensors[name]().detach().to("cpu", forms[name]).contiguous()
            file.write(ready.view(-1).view(torch.uint8).numpy().data if ready.numel() else b"")


class WeightIndex(TypedDict):
    """What INDEX holds: the file of each tensor."""

    weight_map: dict[str, NameInside]


def files_of_index(index: Path, hint: str) -> dict[str, str]:
    """
    Tensor -> name of its file, as an index says. Raises CheckpointError for an index that cannot be read, and for a
    name that is no safetensors file of the same folder.
    """
    names = read_record(index, WeightIndex, error=CheckpointError, fix=hint)["weight_map"]
    if wrong := [name for name in names.values() if Path(name).name != name or not name.endswith(WEIGHTS_SUFFIX)]:
        what = f"names the file {wrong[0]!r}, which is not a safetensors file in the same folder"
        raise CheckpointError(what, where=str(index), hint=hint)
    return names


@runtime_checkable
class TensorReader(Protocol):
    """The tensors of a model's files, by transformers' names."""

    file: Path

    @property
    def names(self) -> frozenset[str]: ...

    def stored_name(self, name: str) -> str | None: ...

    def number_format(self, name: str) -> str | None:
        """The number format that `get` gives a tensor in; None where there is none of this name."""
        ...

    def get(self, name: str) -> Tensor | None: ...

    def num_numbers(self) -> int: ...


class Tensors:
    """The tensors of a model folder, by name. Raises CheckpointError where there are none, or a file is torn."""

    def __init__(self, folder: Path, hint: str) -> None:
        """`hint` is what helps where a file is damaged."""
        self._folder, self._hint = folder, hint
        self._open: dict[str, Any] = {}
        if (folder / WEIGHTS).is_file():
            self.file = folder / WEIGHTS
            self._files = dict.fromkeys(self._handle(WEIGHTS).keys(), WEIGHTS)
        elif (folder / INDEX).is_file():
            self.file = folder / INDEX
            self._files = files_of_index(self.file, hint)
        else:
            raise self._missing()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def stored_name(self, name: str) -> str | None:
        """
        The name that a tensor has in the files; None where there is none. Files of the bare network, without a head,
        lack the first part of each name.
        """
        stored = next((one for one in (name, name.partition(".")[2]) if one in self._files), None)
        return None if stored != name and name.startswith("lm_head") else stored

    def get(self, name: str) -> Tensor | None:
        """
        A tensor, on the CPU, in the number format that it has there; None where there is none of this name. Raises
        CheckpointError for numbers in another format than NUMBERS, and for NaN and infinite ones.
        """
        if (stored := self.stored_name(name)) is None:
            return None
        where = str(self._folder / self._files[stored])
        if (form := self._slice(stored).get_dtype()) not in NUMBERS:
            what = f"{stored} is stored as {form}; only {', '.join(NUMBERS.values())} can be read"
            raise CheckpointError(what, where=where, hint=UNROUNDED)
        try:
            tensor: Tensor = self._handle(self._files[stored]).get_tensor(stored)
        except SafetensorError as error:
            raise CheckpointError(f"{stored}: {error}", where=where, hint=self._hint) from None
        return finite(stored, tensor, where, self._hint)

    def number_format(self, name: str) -> str | None:
        """The number format of a tensor, by torch's name; None where there is none of this name."""
        stored = self.stored_name(name)
        return None if stored is None else NUMBERS.get(self._slice(stored).get_dtype())

    def num_numbers(self) -> int:
        """How many numbers all of them hold. Raises CheckpointError where a file lacks one that the index names."""
        return sum(math.prod(self._slice(name).get_shape()) for name in self._files)

    def _slice(self, name: str) -> Any:
        """A tensor that is not read yet, of this name in the files."""
        try:
            return self._handle(self._files[name]).get_slice(name)
        except SafetensorError as error:
            where = str(self._folder / self._files[name])
            raise CheckpointError(f"{name}: {error}", where=where, hint=self._hint) from None

    def _handle(self, name: str) -> Any:
        if name not in self._open:
            file = self._folder / name
            if not file.is_file():
                raise CheckpointError(
                    f"there is no {name}, which the index names", where=str(self.file), hint=self._hint
                )
            check_header(file, self._hint)
            try:
                self._open[name] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"is torn: {error}", where=str(file), hint=self._hint) from None
        return self._open[name]

    def _missing(self) -> CheckpointError:
        if pickled := is_pickled(self._folder):
            what = f"its weights are a pickle ({pickled}), which could run any code while it is read"
            hint = f"Use the same model as safetensors. Or give the file itself: {self._folder / pickled}"
            return CheckpointError(what, where=str(self._folder), hint=hint)
        hint = "Give a run, stage, checkpoint or model folder."
        return CheckpointError(f"there is no {WEIGHTS}", where=str(self._folder), hint=hint)


def is_pickled(folder: Path) -> str:
    """The name of a file with weights that is never read, or ""."""
    return next((file.name for pattern in PICKLES for file in sorted(folder.glob(pattern))), "")


SUMS = "SHA256SUMS"
MAX_SUMS_BYTES = 2**20
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\\0]+)")


class Listing(TypedDict):
    """The manifest of a stage or of a checkpoint, as far as it is read here."""

    outputs: dict[NameInside, ListedFile]


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS for all files that lie directly in a folder."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file() and file.name != SUMS)
    with whole_file(folder / SUMS, "w") as file:
        file.writelines(f"{sha256_file(folder / name)}  {name}\n" for name in names)


def verify(folder: Path, only: str | None = None) -> None:
    """
    Compare the files of a model folder with every record of their sha256, or `only` the file of this name. Raises
    CheckpointError, which names the file and what makes it again, for one that is gone or differs.

    About 0.7 s a GiB on one core of 2026; hashes of unchanged files are noted in the cache.
    """
    folder = folder.resolve()
    for record, hashes, hint in _records(folder):
        selected = hashes if only is None else {name: hashes[name] for name in (only,) if name in hashes}
        if trouble := cache.changed(folder, selected):
            raise CheckpointError(f"{trouble}, unlike in {record}", where=str(folder), hint=hint)


def _records(folder: Path) -> Iterator[tuple[Path, Mapping[str, str], str]]:
    """Each file that records hashes of a model folder, these by name, and how a damaged file is made again."""
    stage = folder.parent
    if folder.name == "model" and STAGE_FOLDER.fullmatch(stage.name) and os.path.lexists(stage / MANIFEST):
        hint = f"Remove {stage / MANIFEST}, and run: bloomery run {stage.parent / RECIPE}"
        yield stage / MANIFEST, _listed(stage / MANIFEST, "model/"), hint
    if fnmatch(folder.name, STEP_FOLDER) and os.path.lexists(folder / MANIFEST):
        yield folder / MANIFEST, _listed(folder / MANIFEST, ""), "Name another checkpoint, or train this step again."
    if os.path.lexists(folder / SUMS):
        hint = "Run, export or import it again, or fetch it again. After a change of your own, remove its "
        yield folder / SUMS, _sums(folder / SUMS), f"{hint}line from {SUMS}."


def _listed(manifest: Path, prefix: str) -> dict[str, str]:
    """Name -> sha256 of the files that a manifest lists directly below `prefix`."""
    fix = "Remove it and run the recipe again."
    listed = read_record(manifest, Listing, error=CheckpointError, fix=fix, max_bytes=MAX_MANIFEST_BYTES)["outputs"]
    names = ((name, name.removeprefix(prefix)) for name in listed if name.startswith(prefix))
    return {short: listed[name]["sha256"] for name, short in names if "/" not in short}


def _sums(file: Path) -> dict[str, str]:
    """Name -> sha256 of the files that are there: what a reader needs and does not find, it reports itself."""
    hint = f"Create or download the folder again, or remove {file} to skip the check."
    try:
        text = read_regular(file, MAX_SUMS_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(file), hint=hint) from None
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    sums = {line[2]: line[1] for line in lines if line is not None}
    if None in lines or not sums:
        raise CheckpointError("is not a list of sha256 and names", where=str(file), hint=hint)
    return {name: sha256 for name, sha256 in sums.items() if (file.parent / name).exists()}
