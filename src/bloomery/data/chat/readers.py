"""
Chat data of the section [instruct]: its settings, and a reader of complete conversations, row by row.

The settings say where conversations come from and which of them are dropped. presets.toml names chat data sets that
many models were trained on, and mixtures of them. A preset is settings of a source. A recipe overrides any of them, and
the resolved recipe holds all of them.

A row that does not fit also comes out, as a rejected row. The order depends on nothing but names and the config. For a
data set on the Hugging Face hub, only as many files are downloaded as its cap needs. With a cap, files come in the
order of the hash of their names.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, field_validator, model_validator

from bloomery.core import io as core_io
from bloomery.core.chat import as_message
from bloomery.core.config import Between, Config, DiskPath, DocumentCount, RowBytes, Seed, packaged, repeated
from bloomery.core.errors import DataError
from bloomery.core.extras import for_files, pa, pq
from bloomery.core.log import info
from bloomery.data.chat import formats
from bloomery.data.chat.filters import ChatFilter
from bloomery.data.chat.formats import (
    LISTS,
    ChatFormat,
    ChatRow,
    Conversation,
    Fields,
    Messages,
    RejectedRow,
    ToolUse,
    not_text,
)
from bloomery.data.readers import bytes as readers_bytes
from bloomery.data.readers import rows
from bloomery.data.readers.bytes import ReadError
from bloomery.data.readers.read import FieldIs, Name, first_unmet
from bloomery.data.readers.rows import RowOrError
from bloomery.data.sources import download, local, remote, toy_worlds
from bloomery.data.sources.local import AnyFiles
from bloomery.data.sources.remote import AtHub

ChatPresetName = Literal[
    "dolly",
    "no_robots",
    "oasst1",
    "slimorca",
    "ultrachat",
    "alpaca",
    "wizardlm",
    "hh_helpful",
    "metamath",
    "capybara",
    "codealpaca",
    "evolcode",
]
MixtureName = Literal["plasma-v3", "plasma-v4"]
PRESETS = Path(__file__).with_name("presets.toml")

SYNTHESIZE = "synthesize"
"""What reports call the conversations that the stage of that name has left."""


class ChatSource(Config):
    """What every source of conversations has."""

    name: Name
    """Name of the source in reports."""
    license: str | None = None
    """License of conversations that do not name their own (`license`)."""
    max_conversations: DocumentCount | None = None
    """Maximum number of conversations to read, before filters."""
    max_turns: DocumentCount | None = None
    """A conversation is truncated after this many answers."""
    repeat: Annotated[int, Between(1, 1000, "each is in the rows once more")] = 1
    """How often each conversation of the training split occurs in the packed sequences."""


class ToyChats(ChatSource):
    """Conversations of the generator of small worlds, whose answers a program can check."""

    kind: Literal["worlds"] = "worlds"
    name: Name = "worlds"
    count: Annotated[int, Between(1, 10**8, "all are in memory")] = 10_000
    """Number of conversations."""
    seed: Seed = 0
    """Seed of its random choices."""


class Shaped(ChatSource):
    """What every source has whose files hold rows."""

    shape: ChatFormat | None = None
    """
    The shape of its rows. None: the first row of each file that fits a shape decides.

    "messages" is OpenAI's list of {"role", "content"}. "sharegpt" is a list of {"from", "value"}. "exchanges" is a list
    of {"input", "output"}. "alpaca" has an instruction, input and output. "pairs" has a question and its answer.
    "dialogue" is text of lines such as "User: …". "tree" has rows that are messages with a parent.
    """
    messages_field: str | None = None
    """The field with the list of messages, or with the text of a dialogue. None: one of the usual names."""
    question_field: str | None = None
    """The field with the question or instruction. Not set: one of the usual names."""
    context_field: str | None = None
    """The field with the input of an instruction. Not set: one of the usual names."""
    answer_field: str | None = None
    """The field with the answer, for "alpaca" and "pairs". None: one of the usual names."""
    system_field: str | None = None
    """The field with the system message. None: `system`, `system_prompt` and `tools`, if a row has them."""
    speakers: tuple[str, str] | None = None
    """How the two speakers of a dialogue are written, as in ["<|prompter|>", "<|assistant|>"]."""
    separator: str = ""
    """For text files: the text between two dialogues. Empty: a file is one dialogue."""
    accept: tuple[FieldIs, ...] = ()
    """Conditions that a row must meet. Other rows are rejected, with the condition and the value."""
    max_row_bytes: RowBytes = 16 * 2**20
    """
    A longer row is rejected (`too_long`). In parquet, only its text counts. This limits the memory for reading. In a
    .json list, a longer element ends the reading of its file.
    """

    @property
    def fields(self) -> Fields:
        return Fields(
            messages=self.messages_field,
            question=self.question_field,
            context=self.context_field,
            answer=self.answer_field,
            system=self.system_field,
            speakers=self.speakers,
        )


class ChatFiles(Shaped):
    """
    Files of this machine: .jsonl, .json (a list), .parquet and .txt, the first two and the last also as .gz and .zst.

    With kind = "jsonl" they are lines of objects, whatever their names.
    """

    kind: Literal["files", "jsonl"] = "files"
    """`files`: the extension of each file gives its format. `jsonl`: each file holds JSON lines, whatever its name."""
    path: DiskPath
    """A file, a folder with everything below it, or wildcards."""

    def packages(self) -> tuple[str, ...]:
        return () if self.kind == "jsonl" else for_files([self.path])


class ChatHub(Shaped, AtHub):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")


class ChatPreset(Shaped, AtHub):
    """A well-known data set with its files, shape, cap and license, from presets.toml. Your own keys override them."""

    kind: Literal["preset"] = "preset"
    preset: ChatPresetName
    """Name of the preset. None: the same as `name`."""
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, raw: Any) -> Any:
        return remote.filled(cls, raw, packaged(PRESETS)["presets"])


class Mixture(Config):
    """Several presets with the caps of a known model, which replace this source."""

    kind: Literal["mixture"] = "mixture"
    name: MixtureName
    """Name of the mixture."""


ChatSourceConfig = ToyChats | ChatFiles | ChatHub | ChatPreset


class Conversations(Config):
    sources: tuple[Annotated[ChatSourceConfig | Mixture, Field(discriminator="kind")], ...] = (ToyChats(),)
    """Where conversations come from."""
    filters: tuple[Annotated[ChatFilter, Field(discriminator="kind")], ...] = ()
    """Filters, in this order. The first match is the reason why a conversation is dropped."""

    @field_validator("sources")
    @classmethod
    def _spell_out(cls, sources: tuple[ChatSourceConfig | Mixture, ...]) -> tuple[ChatSourceConfig | Mixture, ...]:
        return tuple(_spelled_out(sources))

    @model_validator(mode="after")
    def _names_differ(self) -> "Conversations":
        names = [source.name for source in self.sources]
        if SYNTHESIZE in names:
            raise ValueError(f"the name {SYNTHESIZE!r} is reserved for the stage of that name")
        if twice := repeated(names):
            raise ValueError(f"two sources have the name {twice[0]!r}; give each its own name")
        return self

    @property
    def read(self) -> tuple[ChatSourceConfig, ...]:
        """The sources; mixtures are spelled out already."""
        return tuple(source for source in self.sources if not isinstance(source, Mixture))


def _spelled_out(sources: Sequence[ChatSourceConfig | Mixture]) -> Iterator[ChatSourceConfig]:
    for source in sources:
        if isinstance(source, Mixture):
            for preset, settings in packaged(PRESETS)["mixtures"][source.name].items():
                yield ChatPreset.model_validate({"kind": "preset", "name": preset, **settings})
        else:
            yield source


ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".text")
"""Of names of files that can hold conversations, behind .gz and .zst."""
OTHER_ENDING = ReadError("other_ending", 0, f"its name ends in none of {', '.join(ENDINGS)}")

ChatItem = Conversation | RejectedRow
T = TypeVar("T")


class _File(NamedTuple):
    source: Shaped
    path: Path
    name: str
    """In its source; ids begin with it."""
    where: str
    """The location in messages: the path, or data set, commit and file."""


def conversations(read: Iterable[ChatSourceConfig]) -> Iterator[ChatItem]:
    """Every conversation of every source, up to its cap, or why it is none. Raises DataError as `digest` does."""
    for source in read:
        seen: set[str] = set()
        yield from capped(source.max_conversations, _items(source, seen))
        if isinstance(source, Shaped):
            warn_of_missing(
                source.name, {"context_field": source.context_field, "system_field": source.system_field}, seen
            )


def warn_of_missing(source: str, optional: Mapping[str, str | None], seen: Set[str]) -> None:
    """Say which of the fields that a source names, and that a row may lack, are in none of the rows that were read."""
    for key, name in optional.items():
        if name is not None and name.partition(".")[0] not in seen:
            info(f"{source}: no row that was read has a field {name!r}, which {key} names", "yellow")


def digest(read: Iterable[ChatSourceConfig]) -> str:
    """
    A hash of the contents of all files, and of the commits of data sets, for a stage's fingerprint.

    Raises DataError where a file cannot be read, or the hub does not say what a revision is.
    """
    hashes = []
    for source in read:
        if isinstance(source, ChatFiles):
            hashes += [_sha256(path) for _, path in local_files(source)]
        elif not isinstance(source, ToyChats):
            hashes.append(download.digest(source.repository))
    return " ".join(hashes)


def _sha256(path: Path) -> str:
    try:
        return core_io.sha256_file(path)
    except OSError as error:
        raise readers_bytes.unreadable(path, error) from None


def capped(limit: int | None, items: Iterator[T | RejectedRow]) -> Iterator[T | RejectedRow]:
    """So many of what is understood, and what is rejected before the last of them."""
    accepted = 0
    for item in items:
        yield item
        accepted += not isinstance(item, RejectedRow)
        if accepted == limit:
            return


def _items(source: ChatSourceConfig, seen: set[str]) -> Iterator[ChatItem]:
    """What a source holds; the names of the fields of its rows are added to `seen`."""
    if isinstance(source, ToyChats):
        for number, talk in enumerate(toy_worlds.conversations(source.seed, source.count)):
            messages = [as_message(message) for message in talk.messages()]
            yield Conversation(messages, source.name, f"{source.name}/{number}", str(number), source.license)
        return
    for file in _files(source):
        yield from _of_file(file, seen)


def _files(source: Shaped) -> Iterator[_File]:
    """Every file of a source, downloaded when its turn comes. Raises DataError where there are none."""
    if isinstance(source, ChatFiles):
        every = _all_files(source)
        _that_hold(source, every)  # or there is nothing to read
        for name, path in sorted(every, key=lambda file: _can_hold(source, file[0])):  # what cannot comes first
            yield _File(source, path, name, str(path))
        return
    assert isinstance(source, ChatHub | ChatPreset)
    repository = source.repository
    listed = download.listing(repository, source.files, config=source.config, split=source.split)
    others = [file.name for file in listed if _ending(file.name) is None]
    if others and (source.files or source.config is not None or len(others) == len(listed)):
        hint = f"Set files of source {source.name!r} to files that end in {', '.join(ENDINGS)}."
        raise DataError(f"no conversations are read from {others[0]}", where=source.dataset, hint=hint)
    listed = [file for file in listed if file.name not in others]
    if source.max_conversations is not None:
        listed.sort(key=lambda file: hashlib.sha256(f"{source.name}/{file.name}".encode()).digest())
    for file in listed:
        path, where = remote.from_hub(repository, file)
        yield _File(source, path, file.name, where)


def local_files(source: ChatFiles) -> list[tuple[str, Path]]:
    """Name and path of the files of a source. In a folder, of those that can hold conversations."""
    return _that_hold(source, _all_files(source))


def _that_hold(source: ChatFiles, files: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    kept = [(name, path) for name, path in files if _can_hold(source, name)]
    if not kept:
        hint = f"Give a file or folder with names that end in {', '.join(ENDINGS)}, also with .gz or .zst."
        raise DataError("holds no conversations", where=str(source.path), hint=hint)
    return kept


def _all_files(source: ChatFiles) -> list[tuple[str, Path]]:
    return local.files_of(AnyFiles(name=source.name, domain=source.name, path=source.path))


def _can_hold(source: Shaped, name: str) -> bool:
    """Whether a file of this name can hold conversations."""
    return (isinstance(source, ChatFiles) and source.kind == "jsonl") or _ending(name) is not None


def _ending(name: str) -> str | None:
    """How a file's name ends, behind .gz and .zst; None where no conversations are read from such a file."""
    path = Path(name)
    ending = (Path(path.stem) if path.suffix in readers_bytes.FRAMES else path).suffix.lower()
    packed = path.suffix in readers_bytes.FRAMES and ending == ".parquet"
    return ending if ending in ENDINGS and not packed else None


def _of_file(file: _File, seen: set[str]) -> Iterator[ChatItem]:
    jsonl = isinstance(file.source, ChatFiles) and file.source.kind == "jsonl"
    ending = ".jsonl" if jsonl else _ending(file.name)
    if ending is None:
        yield RejectedRow(file.source.name, file.where, OTHER_ENDING)
    elif ending in (".txt", ".text"):
        yield from _of_text(file)
    elif ending == ".json":
        yield from _of_rows(file, rows.objects(file.path, file.source.max_row_bytes, setting=readers_bytes.ROW), seen)
    elif ending == ".parquet":
        yield from _of_rows(file, _parquet(file), seen)
    else:
        yield from _of_rows(file, rows.jsonl(file.path, file.source.max_row_bytes, setting=readers_bytes.ROW), seen)


def _of_text(file: _File) -> Iterator[ChatItem]:
    data = readers_bytes.whole(file.path, file.source.max_row_bytes, setting=readers_bytes.ROW)
    text = data if isinstance(data, ReadError) else rows.decode(data)
    for ending, piece in rows.parts(text, file.source.separator):
        messages = formats.parse_dialogue(piece, file.source.speakers) if isinstance(piece, str) else piece
        yield _item(file, ending, {"text": piece} if isinstance(piece, str) else None, messages)


def raw_rows(source: ChatFiles | ChatHub, looked_at: Collection[str]) -> Iterator[tuple[str, str, RowOrError]]:
    """
    The raw rows of a source, for readers of other things than conversations: the location for messages, the id by file
    and line, and the row. Rows of parquet files have only the columns in `looked_at`. Raises DataError.
    """
    for file in _files(source):
        if not _can_hold(source, file.name):
            yield file.where, f"{source.name}/{file.name}", OTHER_ENDING
            continue
        ending = _ending(file.name)
        if ending == ".json":
            numbered_rows: Iterator[tuple[int, RowOrError]] = rows.objects(
                file.path, source.max_row_bytes, setting=readers_bytes.ROW
            )
        elif ending == ".parquet":
            numbered_rows = _columns(file, looked_at)
        elif ending in (".txt", ".text"):
            numbered_rows = iter([(0, ReadError("no_rows", 0, "holds plain text, not rows"))])
        else:
            numbered_rows = rows.jsonl(file.path, source.max_row_bytes, setting=readers_bytes.ROW)
        for ending, row in rows.placed(numbered_rows):
            yield f"{file.where}{ending}", f"{source.name}/{file.name}{ending}", row


def _parquet(file: _File) -> Iterator[tuple[int, RowOrError]]:
    source = file.source
    looked_at = {*formats.KNOWN, *(name.partition(".")[0] for name in source.fields.named)}
    return _columns(file, looked_at | {one.field.partition(".")[0] for one in source.accept})


def _columns(file: _File, looked_at: Collection[str]) -> Iterator[tuple[int, RowOrError]]:
    if (problem := rows.crashes(file.path)) is not None:
        yield 0, problem
        return
    try:
        names = pq.read_schema(file.path).names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) is not None:
            raise readers_bytes.unreadable(file.path, error) from None
        yield 0, ReadError("torn", 0, f"is not a valid Parquet file: {error}")
        return
    kept = [name for name in names if name in looked_at]
    if not kept:
        what = f"has none of the columns that a known format needs; its columns: {', '.join(names)}"
        yield 0, ReadError("no_column", 0, what)
        return
    most = file.source.max_row_bytes
    for number, row in rows.parquet(file.path, kept):
        size = 0 if isinstance(row, ReadError) else _text_bytes(row)
        yield number, row if size <= most else readers_bytes.too_long(size, most, "its text", setting=readers_bytes.ROW)


def _text_bytes(value: object) -> int:
    """Bytes of all text in a value."""
    if isinstance(value, str):
        return rows.utf8_bytes(value)
    if isinstance(value, Mapping):
        return sum(map(_text_bytes, value.values()))
    return sum(map(_text_bytes, value)) if isinstance(value, list | tuple) else 0


def _of_rows(file: _File, numbered_rows: Iterator[tuple[int, RowOrError]], seen: set[str]) -> Iterator[ChatItem]:
    """Rows as conversations, by the shape of the source, or of the first that has one."""
    source, shape = file.source, file.source.shape
    nodes: list[tuple[int, ChatRow]] = []
    places: list[str] = []
    for ending, row in rows.placed(numbered_rows):
        if isinstance(row, ReadError):
            yield _item(file, ending, None, row)
            continue
        seen.update(row)
        if (unmet := first_unmet(source.accept, "", row)) is not None:
            yield _item(file, ending, row, unmet)
            continue
        own = shape or formats.detected(row, source.fields)
        if shape is None and formats.hollow(row, source.fields) is None:
            shape = own
        if own == "tree":
            problem = formats.trouble(row)
            if problem is not None:
                yield _item(file, ending, row, problem)
            else:
                nodes.append((len(places), row))
                places.append(ending)
        else:
            messages = _read(own, row, source)
            use = (
                formats.with_tools(own, row, source.fields) if own is not None and isinstance(messages, list) else None
            )
            yield _item(file, ending, row, messages, tool_use=use)
    for way in formats.paths(nodes):
        if isinstance(way, formats.Path):
            row = {"id": way.id}
            yield _item(file, places[way.number], row, way.messages, group=f"{source.name}/{way.root}")
        else:
            yield _item(file, places[way[0]], None, way[1])


def _read(shape: ChatFormat | None, row: ChatRow, source: Shaped) -> Messages | ReadError:
    """A row by its file's shape. Of merged tables, where other columns hold nothing, by that of those with values."""
    shape = shape or formats.hollow(row, source.fields)
    if shape is None:
        what = f"matches no known conversation format; its fields: {', '.join(row)}"
        return ReadError("unknown_shape", 0, what)
    messages = formats.READ[shape](row, source.fields)
    merged = source.shape is None and any(one is None or (one == [] and name in LISTS) for name, one in row.items())
    if merged and isinstance(messages, ReadError) and messages.reason in ("no_field", "no_messages", "bad_message"):
        own = formats.detected(row, source.fields)
        if own is not None and own not in (shape, "tree"):
            return formats.READ[own](row, source.fields)
    return messages


def _item(
    file: _File,
    ending: str,
    row: ChatRow | None,
    messages: Messages | ReadError,
    group: str = "",
    tool_use: ToolUse | None = None,
) -> ChatItem:
    location, source = f"{file.where}{ending}", file.source
    if isinstance(messages, list) and not any(message["role"] == "assistant" for message in messages):
        messages = ReadError("nothing_to_learn", 0, "it has no assistant message")
    own, license = (row or {}).get("id"), (row or {}).get("license")
    for name, value in (("id", own), ("license", license)):
        if isinstance(messages, list) and isinstance(value, str):
            messages = not_text(value, f"field {name!r}") or messages
    if isinstance(messages, ReadError):
        return RejectedRow(source.name, location, messages, row)
    return Conversation(
        messages=messages,
        source=source.name,
        id=str(own) if isinstance(own, str | int) and own != "" else f"{source.name}/{file.name}{ending}",
        location=location,
        license=license if isinstance(license, str) else source.license,
        tool_use=tool_use,
        group=group,
    )
