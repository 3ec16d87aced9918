"""
The Python API, which `import bloomery` exports: models, runs and the data tools, as functions.

Functions import what they need when they are called, so that `import bloomery` takes milliseconds and loads no torch,
numpy, pyarrow or pydantic. Errors that a user can fix are BloomeryErrors: the value, where it is, and the fix.
"""

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, Unpack, get_args, overload

from bloomery.core.errors import ConfigError, DataError, shorten

if TYPE_CHECKING:
    import pyarrow as pa

    from bloomery.hw.host import DeviceChoice
    from bloomery.model.config import ModelConfig
    from bloomery.recipe import Recipe
    from bloomery.serve.chat_model import Asked
    from bloomery.tokenizer.tokenizer import Tokenizer
    from bloomery.weights.hf import Loaded, LoadFormat

    from torch import Tensor

PathText = str | PathLike[str]
Settings = Mapping[str, Any]
"""Key path -> value, as in {"pretrain.steps": 10}."""
D = TypeVar("D", bound="Sequence[str] | Sequence[Mapping[str, Any]] | pa.Table")
"""Documents: a list of texts, a list of dicts with a text, or an Arrow table with a column of texts."""


# --- models --------------------------------------------------------------------------------------------------------


class SamplingOptions(TypedDict, total=False):
    """How tokens are sampled, in the names and limits of OpenAI's chat completions."""

    max_tokens: int
    """Maximum length of the answer in tokens. Default: 512."""
    temperature: float
    """From 0 (the most likely token) to 2. Default: 0.7."""
    top_k: int
    """Sample from the k most likely tokens. Default: 0, which means all."""
    top_p: float
    """Sample from the fewest tokens whose probabilities add up to p. Default: 1."""
    seed: int
    """Seed for sampling. Without a seed, answers differ."""
    stop: str | Sequence[str]
    """The answer ends before the first occurrence of one of these texts."""
    logit_bias: Mapping[int, float] | Mapping[str, float]
    """Numbers from -100 to 100, which are added to the logits of these token IDs."""


class Model:
    """A loaded model, which `load` returns."""

    def __init__(self, name: str, loaded: "Loaded") -> None:
        from bloomery.serve.models import answerer_of

        self.name = name
        self._loaded, self._answerer = loaded, answerer_of(name, loaded)

    def __repr__(self) -> str:
        return f"bloomery.load({self.name!r})"

    @property
    def tokenizer(self) -> "Tokenizer":
        """`encode(text) -> list[int]`, `decode(token_ids) -> str`, `vocab_size`, `document_id`."""
        return self._loaded.tokenizer

    @property
    def config(self) -> "ModelConfig":
        """The shape of the model: `context_length`, `hidden_size`, `num_layers`, …"""
        return self._loaded.model.config

    def generate(self, prompt: str, **options: Unpack[SamplingOptions]) -> str:
        """Continue a text, without a chat template. Raises the same errors as `stream`."""
        return "".join(self.stream(prompt, **options))

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Iterator[str]:
        """
        Continue a text, and yield pieces as the model generates them. The prompt begins a document, as in pretraining.
        The continuation ends when the model ends the document or its turn.

        Raises DataError for an option outside its range, and for a prompt that fills the context.
        """
        if not isinstance(prompt, str):
            raise DataError(f"must be a text, got {shorten(repr(prompt))}", where="prompt")
        asked = self._checked([{"role": "user", "content": prompt}], options)
        answer = self._answerer.continuation(prompt, asked.sampling)
        return (piece.text for piece in answer.pieces if piece.text)

    @overload
    def chat(
        self,
        messages: str | Iterable[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        **options: Unpack[SamplingOptions],
    ) -> str: ...

    @overload
    def chat(
        self, messages: str | Iterable[Mapping[str, Any]], *, stream: Literal[True], **options: Unpack[SamplingOptions]
    ) -> Iterator[str]: ...

    def chat(
        self, messages: str | Iterable[Mapping[str, Any]], *, stream: bool = False, **options: Unpack[SamplingOptions]
    ) -> str | Iterator[str]:
        """
        Answer a conversation, with the model's chat template. `bloomery chat` gives the same answer for the same seed,
        temperature and max_tokens. `messages` is a question, or a list of `{"role": "user", "content": "…"}`. With
        `stream`, returns an iterator over pieces of the answer.

        Raises DataError for a message without role or content, an option outside its range, and a conversation that
        fills the context.
        """
        if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
            what = f"must be a question or a list of messages, got {shorten(repr(messages))}"
            raise DataError(what, where="messages", hint='For example [{"role": "user", "content": "Hello"}].')
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        asked = self._checked(conversation, options)
        pieces = self._answerer.answer(asked.messages, asked.sampling).pieces
        texts = (piece.text for piece in pieces if piece.text)
        return texts if stream else "".join(texts)

    def logits(self, text: str | Sequence[int]) -> "Tensor":
        """
        Logits (T, V) in float32 on the model's device, for T token IDs and a vocabulary of size V. Row t predicts the
        token after the first t + 1 token IDs. A text becomes `[tokenizer.document_id, *tokenizer.encode(text)]`, as in
        `generate`. A downloaded model has its own first token, or none.

        Raises DataError for an empty list, a token ID outside the vocabulary, and more token IDs than the context.
        """
        from bloomery.core.chat import bad_character

        import torch

        model, size = self._loaded.model, self.tokenizer.vocab_size
        if isinstance(text, str):
            if problem := bad_character(text, "the text"):
                raise DataError(problem.what, where="logits", hint="Remove that character.")
            ids = self._loaded.language.text_ids(text)
        else:
            ids = _whole_numbers(text)
        if wrong := [id for id in ids if not 0 <= id < size]:
            hint = f"Use token IDs from 0 to {size - 1:,}: encode the text with the model's tokenizer."
            raise DataError(f"there is no token ID {wrong[0]}", where="logits", hint=hint)
        if not 1 <= len(ids) <= self.config.context_length:
            what = f"{len(ids):,} token IDs, but the model's context is {self.config.context_length:,}"
            raise DataError(what, where="logits", hint=f"Pass 1 to {self.config.context_length:,} token IDs.")
        with torch.no_grad():
            hidden = model(torch.tensor([ids], device=model.embed.weight.device))
            logits: Tensor = model.logits(hidden)[0, :, :size]
        return logits

    def _checked(self, messages: list[Any], options: Mapping[str, Any]) -> "Asked":
        from bloomery.core.chat import LIMITS, SamplingConfig
        from bloomery.serve import openai_api

        known = {*LIMITS, "max_completion_tokens", "stop", "logit_bias"}
        if unknown := next((name for name in options if name not in known), None):
            hint = f"Options are {', '.join(sorted(known))}. The server supports more."
            raise DataError("is not an option of the Python API", where=unknown, hint=hint)
        stop = options.get("stop")
        more: dict[str, Any] = {"stop": list(stop)} if isinstance(stop, tuple) else {}
        if isinstance(biases := options.get("logit_bias"), Mapping):
            more["logit_bias"] = {str(id): bias for id, bias in biases.items()}
        longest = {} if "max_completion_tokens" in options else {"max_tokens": SamplingConfig.max_tokens}
        body = {**longest, **options, **more, "model": self.name, "messages": messages}
        return openai_api.validated(openai_api.ChatRequest, body).asked()


def _whole_numbers(values: Iterable[Any]) -> list[int]:
    """Token IDs of a list, an array or a tensor. Raises DataError for what is no list of whole numbers."""
    try:
        if isinstance(values, bytes) or any(isinstance(value, bool) for value in values):
            raise TypeError
        return [operator.index(value) for value in values]
    except TypeError:
        what = f"must be a text or a list of token IDs, got {shorten(repr(values))}"
        raise DataError(what, where="logits", hint="Encode the text with the model's tokenizer.") from None


def load(model: PathText, *, device: "DeviceChoice" = "auto", dtype: "LoadFormat" = "auto") -> Model:
    """
    Load a model. `model` is the same as for `bloomery chat`: a run folder, a stage folder, a checkpoint folder, a model
    folder of Hugging Face, a GGUF file, or "hub:OWNER/NAME". `dtype` is the number format of the weights in memory.
    "auto" is the format of the file.

    Raises CheckpointError if the model is missing or damaged, HardwareError if the device is missing, and ConfigError
    for an unknown `dtype`.
    """
    from bloomery.hw import device as devices
    from bloomery.weights import hf, locate
    from bloomery.weights.opened import LoadFormat

    if dtype not in get_args(LoadFormat):
        hint = f"Formats are {', '.join(get_args(LoadFormat))}."
        raise ConfigError(f"{shorten(repr(dtype))} is not a number format", where="dtype", hint=hint)
    folder = locate.locate_model(Path(os.path.expanduser(model)))
    return Model(str(model), hf.load(folder, devices.find(device).torch_device, dtype=dtype))


# --- runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path
    """Path of the run folder."""

    @property
    def stages(self) -> dict[str, Path]:
        """The folder of each stage of the last recipe that ran. Stages that have not run are missing."""
        from bloomery.core import records

        return records.stage_folders(self.folder)

    def model(self, *, device: "DeviceChoice" = "auto") -> Model:
        """Load the trained model of the run, as `load` does."""
        return load(self.folder, device=device)


def run(
    recipe: PathText | Mapping[str, Any],
    settings: Settings | None = None,
    *,
    runs: PathText = "runs",
    until: str | None = None,
    only: str | None = None,
) -> Run:
    """
    Run a recipe: a TOML file, or a dict of its sections. Stages that are up to date do not run again. `settings`
    override the recipe. `until` is the last stage to run, and `only` is the single stage to run. Progress goes to
    stderr, as with `bloomery run`.

    Raises ConfigError for a wrong recipe or setting, and other BloomeryErrors if a stage fails. Ctrl-C saves the state
    of training and raises KeyboardInterrupt. The same call resumes.
    """
    from bloomery.core import log
    from bloomery.core.signals import INTERRUPTED, Terminated
    from bloomery.hw import launcher
    from bloomery.recipe import STAGES
    from bloomery.stages.run_report import by_first_process, run_recipe

    launcher.adopt()
    if until is not None and only is not None:
        raise ConfigError(f"until={until!r} and only={only!r} exclude each other", hint="Set only one of them.")
    resolved = _recipe(recipe, settings)
    folder = Path(runs).expanduser() / resolved.name

    def work() -> None:
        run_recipe(STAGES, resolved, folder, until=until, only=only)

    try:
        with log.story():
            by_first_process(work)
    except Terminated as ended:
        if ended.code != INTERRUPTED:  # asked to end by SIGTERM, the process does
            raise
        raise KeyboardInterrupt from None
    return Run(folder)


def plan(
    recipe: PathText | Mapping[str, Any],
    settings: Settings | None = None,
    *,
    runs: PathText = "runs",
    device: str | None = None,
    memory_bytes: int | None = None,
    devices: int | None = None,
    price: float | None = None,
    power_watts: float | None = None,
) -> dict[str, Any]:
    """
    Estimate what a recipe needs, as `bloomery plan --json`: stages, parameters, memory and time. Writes no files.

    By default, the plan is for this machine. To plan for another machine, pass `device` ("mi300x"), its
    `memory_bytes` or the number of `devices`. `price` (per hour) and `power_watts` are for all devices together.
    """
    from bloomery import cli
    from bloomery.recipe import STAGES
    from bloomery.stages import plan as stages_plan
    from bloomery.train.plan.report import HourlyPrice

    money = cli.MONEY_OR_WATTS_RANGE
    memory_bytes, devices, price, power_watts = map(_copied, (memory_bytes, devices, price, power_watts))
    numbers: dict[str, tuple[float | None, tuple[float, float]]] = {
        "memory_bytes": (memory_bytes, cli.DEVICE_BYTES_RANGE),
        "devices": (devices, cli.DEVICES_RANGE),
        "price": (price, money),
        "power_watts": (power_watts, money),
    }
    for name, (number, (low, high)) in numbers.items():
        whole = int if name in ("memory_bytes", "devices") else (int, float)
        right = isinstance(number, whole) and not isinstance(number, bool) and low <= number <= high
        if number is not None and not right:
            kind = "a whole number" if whole is int else "a number"
            raise ConfigError(f"got {shorten(repr(number))}", where=name, hint=f"Pass {kind} from {low:,} to {high:,}.")
    if device is not None and not isinstance(device, str):
        hint = "Pass the name of a device, such as 'mi300x'."
        raise ConfigError(f"got {shorten(repr(device))}", where="device", hint=hint)
    resolved = _recipe(recipe, settings)
    cost = HourlyPrice(per_hour=price, watts=power_watts)
    wish = stages_plan.Wish(device=device, memory_bytes=memory_bytes, devices=devices, price=cost)
    if mesh := stages_plan.mesh_plan(resolved, wish):
        return stages_plan.mesh_facts(resolved.name, mesh)
    return stages_plan.report(STAGES, resolved, Path(runs).expanduser() / resolved.name, wish)[0]


def status(run_folder: PathText, *, verify: bool = False) -> dict[str, Any]:
    """
    Progress of a run, as `bloomery status --json`: {"run", "done", "pid", "running", "error",
    "stages"}. `verify` compares every file with its SHA-256. Raises RunError if the folder is not a run folder.
    """
    from bloomery.core import run_dir

    folder = Path(run_folder).expanduser()
    return run_dir.as_json(run_dir.run_state(folder, thorough=verify))


def _recipe(recipe: PathText | Mapping[str, Any], settings: Settings | None) -> "Recipe":
    from copy import deepcopy

    from bloomery.core import config
    from bloomery.recipe import Recipe

    overrides = _overrides(settings)
    if isinstance(recipe, Mapping):
        return config.from_tree(Recipe, deepcopy(dict(recipe)), overrides, where="recipe")
    if not isinstance(recipe, str | PathLike):
        what = f"{shorten(repr(recipe))} is not a recipe"
        raise ConfigError(what, where="recipe", hint="Pass the path of a TOML file, or a dict of its sections.")
    return config.load(Recipe, Path(recipe).expanduser(), overrides)


def _overrides(settings: Settings | None) -> list[tuple[str, Any]]:
    if settings is None:
        return []
    if not isinstance(settings, Mapping) or not all(isinstance(path, str) for path in settings):
        what = f"{shorten(repr(settings))} is not a dict with strings as keys"
        raise ConfigError(what, where="settings", hint='Write, for example, {"pretrain.steps": 100}.')
    return [(path, _copied(value)) for path, value in settings.items()]


def _copied(value: Any) -> Any:
    """A copy of a setting, with the numbers of NumPy and torch as those of Python."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value.item() if getattr(value, "ndim", None) == 0 else value


# --- data tools ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dropped:
    """A dropped document."""

    index: int
    """Position in the input, from 0."""
    reason: str
    """The rule ("length.too_short"), "exact", "near", "decontaminate.TASK", "empty", …, as in `result.json`."""
    value: float | None = None
    """What the rule measured. For a near duplicate: the Jaccard similarity to the kept document."""
    duplicate_of: int | None = None
    """For a duplicate: the index of the kept document."""


@dataclass(frozen=True)
class Selection(Generic[D]):
    """The documents that a data tool keeps and drops."""

    kept: D
    """Kept documents, with the type and order of the input. Rules can change (mask, shorten) their text."""
    kept_indices: list[int]
    """Positions of `kept` in the input."""
    dropped: list[Dropped]
    """Dropped documents, in the order of the input."""
    reasons: dict[str, int]
    """The number of dropped documents for each reason."""


def filter(
    documents: D,
    rules: Sequence[Mapping[str, Any]] | None = None,
    settings: Settings | None = None,
    *,
    text_field: str = "text",
    workers: int = 1,
) -> Selection[D]:
    """
    Keep documents that pass all rules, as `bloomery data filter`.

    `rules` is a list such as `[{"kind": "length", "min_characters": 200}]`. The default is the preset "gopher", which
    drops languages other than English. Raises DataError for invalid documents, and ConfigError for invalid rules or
    settings.
    """
    overrides = [*([] if rules is None else [("rules", rules)]), *_overrides(settings)]
    return _tool("filter", documents, overrides, text_field, workers)


def dedup(
    documents: D, settings: Settings | None = None, *, text_field: str = "text", workers: int = 1
) -> Selection[D]:
    """
    Keep one document of each group of exact or near duplicates, as `bloomery data dedup`. It is the longest, or the
    first of several with the same length.

    `settings` are keys of [dedup], such as `{"threshold": 0.7}`. Raises the same errors as `filter`.
    """
    return _tool("dedup", documents, _overrides(settings), text_field, workers)


def decontaminate(
    documents: D,
    texts: Sequence[str] = (),
    settings: Settings | None = None,
    *,
    files: Sequence[PathText] = (),
    tasks: Sequence[str] = (),
    text_field: str = "text",
    workers: int = 1,
) -> Selection[D]:
    """
    Drop documents that contain questions of evaluation tasks, as `bloomery data decontaminate`.

    `texts` are questions, `files` are jsonl or parquet files of tasks or folders of such files, and `tasks` are names
    of tasks of `bloomery eval`. Questions of fewer than 4 words are skipped (`min_question_words`). Raises the same
    errors as `filter`, and ConfigError without any question.
    """
    for name, value in (("files", files), ("tasks", tasks)):
        if isinstance(value, str):
            raise ConfigError(f"{shorten(repr(value))} is a str", where=name, hint=f"Pass a list: {name}=[{value!r}]")
    overrides = [*([("tasks", [*tasks])] if tasks else []), *_overrides(settings)]
    if not texts and not files and not {"files", "tasks"} & {path for path, _ in overrides}:
        raise ConfigError("there is no text to look for", where="decontaminate", hint="Pass texts, files or tasks.")
    if texts:  # they stand in a field of this name
        overrides = [
            (path, [*value, "text"] if path == "fields" and isinstance(value, list | tuple) else value)
            for path, value in overrides
        ]
    against = [str(Path(file).expanduser()) for file in files]
    return _tool("decontaminate", documents, overrides, text_field, workers, against, texts)


def _tool(
    name: str,
    documents: D,
    settings: Sequence[tuple[str, Any]],
    text_field: str,
    workers: int,
    against: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> Selection[D]:
    """The tool of `bloomery data` on a file of the documents in a temporary folder; their IDs are their numbers."""
    import tempfile

    from bloomery.core import log
    from bloomery.data import documents as data_documents
    from bloomery.stages import data_tools

    rows = _rows(documents, text_field, "documents")
    with tempfile.TemporaryDirectory(prefix="bloomery-") as temporary, log.quiet():
        folder = Path(temporary)
        source, out = folder / "documents.jsonl", folder / "out"
        _write(source, [{"id": f"{number:012d}", **row} for number, row in enumerate(rows, 1)])
        if texts:
            _write(folder / "texts.jsonl", _rows(texts, "text", "texts"))
            against = [*against, str(folder / "texts.jsonl")]
        asked = data_tools.DataCommand(
            name, [str(source)], out, {}, settings, id_field="id", workers=workers, against=against
        )
        result = data_tools.run(asked)
        kept = {_index(row["id"]): row["text"] for row in data_documents.read(out / data_tools.KEPT, ["id", "text"])}
        dropped = [_dropped(row) for row in data_documents.read(out / data_tools.DROPPED)]
    indices = sorted(kept)
    texts_kept = [None if kept[index] == rows[index]["text"] else kept[index] for index in indices]
    return Selection(
        kept=_taken(documents, indices, texts_kept, text_field),
        kept_indices=indices,
        dropped=sorted(dropped, key=lambda document: document.index),
        reasons=result["reasons"],
    )


def _rows(documents: Any, text_field: str, where: str) -> list[dict[str, str]]:
    """Each document as the data tools read it: text, and where they are there domain, url and license."""
    fields = (text_field, "domain", "url", "license")
    if hasattr(documents, "schema") and hasattr(documents, "to_pylist"):
        if text_field not in documents.schema.names:
            hint = f"Set text_field to one of its columns: {', '.join(documents.schema.names)}."
            raise DataError(f"has no column {text_field!r}", where=where, hint=hint)
        if twice := [name for name in fields if documents.schema.names.count(name) > 1]:
            what = f"has {documents.schema.names.count(twice[0])} columns named {twice[0]!r}"
            raise DataError(what, where=where, hint="Rename all but one.")
        entries = documents.select([name for name in documents.schema.names if name in fields]).to_pylist()
    elif isinstance(documents, list | tuple):
        entries = [{text_field: entry} if isinstance(entry, str) else entry for entry in documents]
    else:
        hint = "Pass a list of texts, a list of dicts with a text, or a pyarrow Table."
        raise DataError(f"{shorten(repr(documents))} is a {type(documents).__name__}", where=where, hint=hint)
    rows = [_row(entry, text_field, fields[1:], f"{where}[{index}]") for index, entry in enumerate(entries)]
    if not any(row["text"].strip() for row in rows):
        raise DataError("every text is empty" if rows else "is empty", where=where, hint="Pass at least one text.")
    return rows


def _row(document: Any, text_field: str, more: Sequence[str], where: str) -> dict[str, str]:
    if not isinstance(document, Mapping):
        what = f"{shorten(repr(document))} is a {type(document).__name__}"
        raise DataError(what, where=where, hint="Pass each document as a string, or as a dict with its text.")
    text = document.get(text_field)
    if not isinstance(text, str):
        known = text_field in document
        what = f"its {text_field!r} is {shorten(repr(text))}, not a text" if known else f"has no field {text_field!r}"
        hint = "Remove the document, or set text_field to the field that holds the text."
        raise DataError(what, where=where, hint=hint)
    return {"text": text, **{name: document[name] for name in more if isinstance(document.get(name), str)}}


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    import json

    with path.open("wb") as file:
        for row in rows:  # the escape of half a surrogate pair is the same in Python and JSON
            file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _index(id: str) -> int:
    """From the ID of a document, or the file and line that stand for it where its line could not be read."""
    return int(id.rpartition(":")[2]) - 1


def _dropped(row: Mapping[str, Any]) -> Dropped:
    kept_id = row.get("kept_id")
    return Dropped(_index(row["id"]), row["reason"], row["value"], None if kept_id is None else _index(kept_id))


def _taken(documents: Any, indices: list[int], texts: list[str | None], text_field: str) -> Any:
    """The documents at these indices, with the texts that are not None in the place of their own."""
    if isinstance(documents, list | tuple):
        kept = [documents[index] for index in indices]
        for number, (document, text) in enumerate(zip(kept, texts, strict=True)):
            if text is not None:
                kept[number] = text if isinstance(document, str) else {**document, text_field: text}
        return tuple(kept) if isinstance(documents, tuple) else kept
    from bloomery.core.extras import pa

    try:
        table = documents.take(pa.array(indices, pa.int64()))
    except pa.ArrowNotImplementedError:  # of views, which polars writes; pyarrow 26 slices and joins them
        slices = [documents.slice(index, 1) for index in indices] or [documents.slice(0, 0)]
        is_batch = isinstance(documents, pa.RecordBatch)
        table = pa.concat_batches(slices) if is_batch else pa.concat_tables(slices).combine_chunks()
    if all(text is None for text in texts):
        return table
    column = table.column(text_field)
    merged = [old if new is None else new for old, new in zip(column.to_pylist(), texts, strict=True)]
    return table.set_column(table.schema.get_field_index(text_field), text_field, pa.array(merged, column.type))
