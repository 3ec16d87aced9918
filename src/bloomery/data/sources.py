"""
Where documents come from: folders, jsonl, parquet, the standard library of the running Python, a generator of ours.

`read` streams the documents of a source, whole, in an order that depends on nothing but their names and the config.
What cannot become a document comes out too, as `Rejected` with its reason, so that nothing is lost without a trace.
"""

import glob
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from bloomery.core import files
from bloomery.core.config import Config, Count, Positive
from bloomery.core.errors import DataError
from bloomery.data import library, rows, worlds
from bloomery.data.document import Row
from bloomery.data.rows import Problem

Name = Annotated[str, Field(pattern=r"^[\w.\-]+$")]


class Common(Config):
    """What every source has."""

    name: Name
    """What reports call it. Ids of documents begin with it."""
    domain: Name
    """What its documents are mixed and reported as."""
    license: str | None = None
    """License of its documents, where they do not say themselves."""
    max_documents: Positive | None = None
    max_bytes: Positive | None = None
    """Reading stops before the document that would bring the text, as UTF-8, above this. Where documents are files,
    they are then read in the order of the hash of their ids, so that what is taken is a sample; else from the start."""


class FromFiles(Common):
    path: Path
    invalid: Literal["error", "skip"] = "error"
    """What is not readable text stops the run, or is skipped and kept as a rejected row with its reason."""


class Folder(FromFiles):
    """Text files, one document each."""

    kind: Literal["folder"] = "folder"
    patterns: tuple[str, ...] = ("*.txt", "*.md")
    recursive: bool = True


class Jsonl(FromFiles):
    """Files of JSON objects, one a line: .jsonl, .jsonl.zst, .jsonl.gz. `path` may hold wildcards."""

    kind: Literal["jsonl"] = "jsonl"
    text_field: str = "text"
    id_field: str | None = None
    """The field that holds a document's own id, unique in the whole run. Without: source, file and line make it."""


class Parquet(FromFiles):
    """Parquet files, one document a row. `path` may hold wildcards."""

    kind: Literal["parquet"] = "parquet"
    text_field: str = "text"
    id_field: str | None = None
    """The column that holds a document's own id, unique in the whole run. Without: source, file and row make it."""


class StandardLibrary(Common):
    """What every Python ships: the sources of its modules, or their docstrings and the language reference."""

    kind: Literal["standard_library"] = "standard_library"
    part: Literal["code", "docs"]
    exclude: tuple[str, ...] = library.EXCLUDED
    """Patterns of file and folder names that are left out."""
    license: str | None = "PSF-2.0"


class Worlds(Common):
    """Texts about invented worlds, from our own generator (`bloomery.data.worlds`)."""

    kind: Literal["worlds"] = "worlds"
    count: Positive
    """Documents to generate."""
    seed: Count = 0
    license: str | None = "CC0-1.0"


Source = Folder | Jsonl | Parquet | StandardLibrary | Worlds


@dataclass(frozen=True)
class Rejected:
    """What a source holds that cannot be a document. Its text stays where it is; the row says where that is."""

    row: Row
    problem: Problem
    where: str


Item = Row | Rejected


def read(source: Source) -> Iterator[Item]:
    """
    The documents of a source as rows of `document.SCHEMA`, and what it rejects.

    Empty files and texts are rejected. Other trouble (bytes that are not UTF-8, lines that are not JSON, files cut
    short) raises DataError with file, place and cure, unless the source says `invalid = "skip"`.
    """
    documents = num_bytes = 0
    for item in _items(source):
        if isinstance(item, Rejected):
            if item.problem.reason != "empty" and isinstance(source, FromFiles) and source.invalid == "error":
                cure = f'Repair or remove it, or set invalid = "skip" in source {source.name!r} to go on without it.'
                raise DataError(item.problem.what, where=item.where, cure=cure)
        else:
            documents, num_bytes = documents + 1, num_bytes + len(item["text"].encode())
            if source.max_documents is not None and documents > source.max_documents:
                return
            if source.max_bytes is not None and num_bytes > source.max_bytes:
                return
        yield item


def digest(source: Source) -> str:
    """A hash of all that `read` could see outside the config: names, sizes and contents of its files."""
    if isinstance(source, Worlds):
        return ""
    facts = [(name, path.stat().st_size, files.sha256_file(path)) for name, path in _files(source)]
    return files.sha256_bytes(files.canonical(facts))


def _items(source: Source) -> Iterator[Item]:
    if isinstance(source, Folder):
        return _sampled(source, [(name, _file_reader(source, name, path)) for name, path in _files(source)])
    if isinstance(source, StandardLibrary):
        return _sampled(source, _library(source))
    if isinstance(source, Worlds):
        texts = enumerate(worlds.documents(source.seed, source.count))
        return (_item(source, f"{i:06d}", text) for i, text in texts)
    return _tables(source)


def _files(source: Folder | Jsonl | Parquet | StandardLibrary) -> list[tuple[str, Path]]:
    """Relative name and path of every file of a source, sorted. Raises DataError where there are none."""
    if isinstance(source, StandardLibrary):
        reference = [(library.TOPICS, library.root() / library.TOPICS)] if source.part == "docs" else []
        return library.files(source.exclude) + reference
    path = source.path.expanduser()
    if isinstance(source, Folder):
        return _in_folder(source, path)
    if path.is_file():
        return [(_name(path.relative_to(path.parent)), path)]
    if path.is_dir():
        raise DataError("is a folder", where=str(path), cure=f'Name its files: path = "{path}/*.{source.kind}*"')
    fixed = Path(*_before_wildcards(path))
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not found:
        near = ", ".join(sorted(p.name for p in fixed.glob("*"))[:5]) or "nothing, or it does not exist"
        raise DataError("no such file", where=str(path), cure=f"{fixed} holds: {near}.")
    return [(_name(file.relative_to(fixed)), file) for file in found]


def _in_folder(source: Folder, path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        raise DataError("is not a folder", where=str(path), cure=f"Set path of source {source.name!r} to one.")
    found = {file for pattern in source.patterns for file in (path.rglob if source.recursive else path.glob)(pattern)}
    if not (kept := sorted((_name(file.relative_to(path)), file) for file in found if file.is_file())):
        shown = ", ".join(source.patterns)
        raise DataError(f"holds no file that matches {shown}", where=str(path), cure="Change patterns, or the path.")
    return kept


def _before_wildcards(path: Path) -> Iterator[str]:
    for part in path.parent.parts:
        if glob.has_magic(part):
            return
        yield part


def _name(relative: Path) -> str:
    """A file's name as text; bytes that are not UTF-8, which POSIX allows in names, are written out."""
    return relative.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _sampled(source: Common, items: Iterable[tuple[str, Callable[[], Item]]]) -> Iterator[Item]:
    """Items in the order of their names, or of their names' hash where the source takes only some of them."""
    if source.max_bytes is not None or source.max_documents is not None:
        items = sorted(items, key=lambda item: hashlib.sha256(f"{source.name}/{item[0]}".encode()).digest())
    return (make() for _, make in items)


def _file_reader(source: Folder | StandardLibrary, name: str, path: Path) -> Callable[[], Item]:
    url = library.url(name) if isinstance(source, StandardLibrary) else None
    return lambda: _item(source, name, _text(path), url=url, where=str(path))


def _text(path: Path) -> str | Problem:
    try:
        return rows.decode(path.read_bytes())
    except OSError as error:
        raise rows.unreadable(path, error) from None


def _library(source: StandardLibrary) -> list[tuple[str, Callable[[], Item]]]:
    found = library.files(source.exclude)
    if source.part == "code":
        return [(name, _file_reader(source, name, path)) for name, path in found]

    def documented(name: str, path: Path) -> Callable[[], Item]:
        module = library.module_name(name)
        return lambda: _item(source, module, _docstrings(module, path), url=library.url(name), where=str(path))

    def topic(name: str, text: str) -> Callable[[], Item]:
        url = library.url(library.TOPICS)
        return lambda: _item(source, f"topics/{name}", text, url=url, where=library.TOPICS)

    modules = [(library.module_name(name), documented(name, path)) for name, path in found]
    return modules + [(f"topics/{name}", topic(name, text)) for name, text in library.topics().items()]


def _docstrings(module: str, path: Path) -> str | Problem:
    text = _text(path)
    if isinstance(text, Problem):
        return text
    try:
        return library.docstrings(module, text)
    except (SyntaxError, ValueError) as error:
        return Problem("not_python", getattr(error, "lineno", None) or 0, f"is not Python: {error}")


def _tables(source: Jsonl | Parquet) -> Iterator[Item]:
    """Rows of jsonl and parquet files, in their order."""
    asked = [source.text_field] + ([source.id_field] if source.id_field else [])
    for name, path in _files(source):
        found = rows.jsonl(path) if isinstance(source, Jsonl) else rows.parquet(path, asked, ("url", "license"))
        empty = True
        for number, row in found:
            empty = False
            yield _table_item(source, f"{name}:{number}", row, f"{path}:{number}")
        if empty:
            yield _item(source, name, Problem("no_rows", 0, "is empty: it holds no rows"), where=str(path))


def _table_item(source: Jsonl | Parquet, place: str, row: rows.Found, where: str) -> Item:
    if isinstance(row, Problem):
        return _item(source, place, row, where=where)
    text, own = row.get(source.text_field), row.get(source.id_field) if source.id_field else None
    fields = ", ".join(row)
    if text is not None and not isinstance(text, str):
        text = Problem("not_text", 0, f"{source.text_field!r} holds {type(text).__name__} instead of a string")
    if source.text_field not in row:
        text = Problem("no_text", 0, f"has no field {source.text_field!r}; its fields: {fields}")
    if source.id_field and (not isinstance(own, str | int) or own == ""):
        text, own = Problem("no_id", 0, f"has no id in field {source.id_field!r}; its fields: {fields}"), None
    said = {key: value for key in ("url", "license") if isinstance(value := row.get(key), str)}
    return _item(source, place, text or "", where=where, own=None if own is None else str(own), **said)


def _item(
    source: Common,
    place: str,
    text: str | Problem,
    *,
    where: str = "",
    own: str | None = None,
    url: str | None = None,
    license: str | None = None,
) -> Item:
    """A row, or what is rejected. `own` is the document's own id, which then stands alone."""
    if isinstance(text, str):
        text = _checked(text)
    row: dict[str, Any] = {
        "id": own if own is not None else f"{source.name}/{place}",
        "text": "" if isinstance(text, Problem) else text,
        "source": source.name,
        "domain": source.domain,
        "url": url,
        "license": license if license is not None else source.license,
    }
    return Rejected(row, text, where) if isinstance(text, Problem) else row


def _checked(text: str) -> str | Problem:
    if not text or text.isspace():
        return Problem("empty", 0, "is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        spot = error.start
        return Problem("not_unicode", spot, f"character {spot} is half a surrogate pair, which no UTF-8 can hold")
    return text
