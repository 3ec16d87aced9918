"""
Sources of documents: folders, tables, crawls, remote files, the standard library, toy worlds.

A source lists its pieces and gives the complete documents of each. Their order depends on nothing but their names and
the config. Data that cannot become a document also comes out, as a rejected row. Nothing is lost without a trace.

Sources on the Hugging Face hub and on the web are in data/sources/remote.py.
"""

import glob
import hashlib
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Annotated, Literal, TypeVar

from bloomery.core import io as core_io
from bloomery.core.config import Between, DiskPath, Seed
from bloomery.core.errors import DataError
from bloomery.data import isolated
from bloomery.data.readers import bytes as readers_bytes
from bloomery.data.readers import read as readers_read
from bloomery.data.readers import rows
from bloomery.data.readers.bytes import ReadError, unreadable
from bloomery.data.readers.read import DocumentItem, FileSource, RejectedDocument, SourceBase, SourceChunk, TableSource
from bloomery.data.sources import remote, stdlib, toy_worlds
from bloomery.data.sources.remote import Address, Elsewhere, Hub, PresetSource, Remote

GROUP_BYTES, GROUP_FILES = 32 * 2**20, 4000
"""How much of a folder of small files is one piece."""
T = TypeVar("T")
SPLIT_BYTES = 64 * 2**20
"""How much of a large file of lines is one piece."""
WORLDS_PER_PIECE, WORLD_BYTES = 50_000, 400


class Folder(FileSource):
    """Files of text, Markdown, HTML or source code, one document each; .gz and .zst too. HTML becomes plain text."""

    kind: Literal["folder"] = "folder"
    path: DiskPath
    """The folder to read."""
    patterns: tuple[str, ...] = ("*.txt", "*.md")
    """Patterns of file names to read."""
    recursive: bool = True
    """Whether to read subfolders too."""

    def names(self) -> tuple[str, ...]:
        return self.patterns


class Jsonl(TableSource):
    """
    Files with one JSON object per line: .jsonl, .jsonl.zst, .jsonl.gz. A .json file may also hold one list of objects.
    `path` may hold wildcards.
    """

    kind: Literal["jsonl"] = "jsonl"
    path: DiskPath
    """The file or files to read."""


class Parquet(TableSource):
    """Parquet files, with one document per row. `path` may hold wildcards."""

    kind: Literal["parquet"] = "parquet"
    path: DiskPath
    """The file or files to read."""


class Csv(TableSource):
    """
    Tables with a first row of names, as in RFC 4180: .csv with commas, .tsv with tabs, .gz and .zst of them.

    `path` may hold wildcards. Fields may hold line breaks in quotes; IDs count lines, not rows.
    """

    kind: Literal["csv"] = "csv"
    path: DiskPath
    """The file or files to read."""


class Warc(FileSource):
    """
    Crawls: the HTML and text pages of WARC files, the texts of WET files, .gz and .zst of them. `path` may hold
    wildcards. Needs the extra `web`.
    """

    kind: Literal["warc"] = "warc"
    path: DiskPath
    """The file or files to read."""

    def packages(self) -> tuple[str, ...]:
        return ("resiliparse",)


class AnyFiles(TableSource):
    """
    A file, a folder with everything below it, or wildcards. The extension of a file gives its format: jsonl, json (a
    list of objects, or a line for each; other JSON is text), parquet, csv, WARC, HTML or text. The data tools read
    files in this way.
    """

    kind: Literal["files"] = "files"
    path: DiskPath
    """The file or folder to read."""
    id_field: str | None = "id"
    needs_id: bool = False
    domain_field: str | None = "domain"

    def names(self) -> tuple[str, ...]:
        return (str(self.path),)


class StandardLibrary(SourceBase):
    """What every Python includes: the sources of its modules, or their docstrings and the language reference."""

    kind: Literal["standard_library"] = "standard_library"
    subset: Literal["code", "docs"]
    """The source code, or the documentation."""
    exclude: tuple[str, ...] = stdlib.EXCLUDED
    """Patterns of file and folder names to skip."""
    license: str | None = "PSF-2.0"


class Worlds(SourceBase):
    """Texts about invented worlds, from our own generator (`bloomery.data.sources.toy_worlds`)."""

    kind: Literal["worlds"] = "worlds"
    count: Annotated[int, Between(1, 10**9, "these are 400 GB of text")]
    """Documents to generate."""
    seed: Seed = 0
    """Seed of its random choices."""
    license: str | None = "CC0-1.0"


Files = Folder | Jsonl | Parquet | Csv | Warc | AnyFiles
DocumentSource = Files | StandardLibrary | Worlds | Hub | Address | Remote | PresetSource


def pieces(source: DocumentSource) -> list[SourceChunk]:
    """
    What a source reads, piece by piece. The order is that of names; of a folder that is only sampled, that of hashes.

    Raises DataError where there is nothing.
    """
    if isinstance(source, Elsewhere):
        return remote.pieces(source)
    if isinstance(source, Worlds):
        starts = range(0, source.count, WORLDS_PER_PIECE)
        some = [(f"{start:06d}", min(WORLDS_PER_PIECE, source.count - start)) for start in starts]
        return [SourceChunk(name, ((name, ""),), count * WORLD_BYTES) for name, count in some]
    if isinstance(source, StandardLibrary):
        return list(_grouped(_sampled(source, _library(source))))
    if isinstance(source, Folder):
        return list(_grouped(_sampled(source, files_of(source))))
    files = files_of(source)
    # all in one child: workers then find them noted
    isolated.problems(
        path for name, path in files if (_form(source, name) or readers_read.format_of(name)) == "parquet"
    )
    return list(_grouped(files, {name for name, path in files if _splits(source, name, path)}))


def items(source: DocumentSource, piece: SourceChunk) -> Iterator[DocumentItem]:
    """
    The documents of one piece as rows of `documents.SCHEMA`, and rejected documents. `limited` applies the limits.

    Raises DataError for broken input, with file, position and hint, unless the source says `invalid = "skip"`.
    """
    if isinstance(source, Elsewhere):
        return remote.items(source, piece)
    if isinstance(source, Worlds):
        return _worlds(source, int(piece.name))
    if isinstance(source, StandardLibrary):
        return _documented(source, piece)
    return (
        item
        for name, path in piece.members
        for item in readers_read.items(source, Path(path), name, form=_form(source, name), span=piece.span)
    )


class Limited:
    """
    Items with the bytes of their texts as UTF-8 (0 of what is rejected), up to a number of documents or bytes.

    Iterated over once. It ends with the document that makes a number full, or before the one that goes beyond it.
    """

    def __init__(
        self, document_items: Iterable[DocumentItem], max_documents: int | None, max_bytes: int | None
    ) -> None:
        self._found, self._max_documents, self._max_bytes = document_items, max_documents, max_bytes
        self.stopped = False
        """Whether a limit has ended it."""

    def __iter__(self) -> Iterator[tuple[DocumentItem, int]]:
        most_documents = math.inf if self._max_documents is None else self._max_documents
        most_bytes = math.inf if self._max_bytes is None else self._max_bytes
        documents = total = 0
        for item in self._found:
            num_bytes = 0 if isinstance(item, RejectedDocument) else rows.utf8_bytes(item["text"])
            if total + num_bytes > most_bytes:
                self.stopped = True
                return
            yield item, num_bytes
            if not isinstance(item, RejectedDocument):
                documents, total = documents + 1, total + num_bytes
                if documents >= most_documents or total >= most_bytes:
                    self.stopped = True
                    return


def read(source: DocumentSource) -> Iterator[DocumentItem]:
    """All items of a source, up to its limits. Raises DataError as `pieces` and `items` do."""
    document_items = (item for piece in pieces(source) for item in items(source, piece))
    return (item for item, _ in Limited(document_items, source.max_documents, source.max_bytes))


def pinned(source: DocumentSource) -> str | None:
    """The version of a data set or file from elsewhere, as a person can ask for it again."""
    return remote.pinned(source) if isinstance(source, Elsewhere) else None


def digest(source: DocumentSource) -> str:
    """A hash of all that `read` could see outside the config: names, sizes and contents of its files, or their pins."""
    if isinstance(source, Elsewhere):
        return remote.digest(source)
    if isinstance(source, Worlds):
        return ""
    if isinstance(source, StandardLibrary):
        reference = [(stdlib.TOPICS, stdlib.root() / stdlib.TOPICS)] if source.subset == "docs" else []
        files = stdlib.files(source.exclude) + reference
    else:
        files = files_of(source)
    facts = [(name, _size(path), _of_file(core_io.sha256_file, path)) for name, path in files]
    return core_io.sha256_bytes(core_io.canonical(facts))


def _of_file(read: Callable[[Path], T], path: Path) -> T:
    """What is read of a file. Raises DataError where it cannot be: it may have vanished after it was listed."""
    try:
        return read(path)
    except OSError as error:
        raise unreadable(path, error) from None


def _size(path: Path) -> int:
    return _of_file(os.path.getsize, path)


def _form(source: Files, name: str) -> readers_read.FileFormat | None:
    """The format of a file where the source knows it, whatever the file's name."""
    if isinstance(source, AnyFiles):
        return None
    if isinstance(source, Csv):
        return "tsv" if readers_read.format_of(name) == "tsv" else "csv"
    named = readers_read.format_of(name)
    if source.kind == "jsonl" and named == "json":
        return "json"
    return None if source.kind == "folder" and named == "html" else FORMS[source.kind]


FORMS: dict[str, readers_read.FileFormat] = {"folder": "text", "jsonl": "jsonl", "parquet": "parquet", "warc": "warc"}


def files_of(source: Files) -> list[tuple[str, Path]]:
    """Relative name and path of every file of a source, sorted. Raises DataError where there are none."""
    path = source.path.expanduser()
    if isinstance(source, Folder):
        if not os.path.isdir(path):
            hint = _of_variables(path) or f"Set path of source {source.name!r} to a folder."
            raise DataError("is not a folder", where=str(path), hint=hint)
        return _in_folder(path, source.patterns, recursive=source.recursive)
    if os.path.isdir(path) and isinstance(source, AnyFiles):
        return _in_folder(path, ("*",))
    if os.path.isdir(path):
        raise DataError(
            "is a folder", where=str(path), hint=f'Use a pattern for its files: path = "{path}/*.{source.kind}*"'
        )
    if os.path.exists(path):
        core_io.check_regular(path)
        return [(_name(path.relative_to(path.parent)), path)]
    fixed = Path(*_before_wildcards(path))
    matches = sorted(file for file in _matching(path, fixed) if not core_io.kernel(file))
    if not matches:
        near = ", ".join(sorted(p.name for p in fixed.glob("*"))[:5]) or "nothing, or it does not exist"
        raise DataError("no such file", where=str(path), hint=_of_variables(path) or f"{fixed} holds: {near}.")
    return [(_name(file.relative_to(fixed)), file) for file in matches]


def _of_variables(path: Path) -> str:
    """The hint for a path that names a variable of the shell, or ""."""
    name = re.search(r"\$\w+|\$\{\w+\}", str(path))
    return f"Write the value of {name[0]}: only ~ is expanded in a path." if name else ""


def _matching(path: Path, fixed: Path) -> Iterator[Path]:
    """The files that a path with wildcards names, as `glob` finds them; `fixed` is what it has before them."""
    if "**" not in path.parts:
        yield from (file for file in map(Path, glob.iglob(str(path))) if _is_file(file))
        return
    pattern = path.relative_to(fixed).parts
    for file in core_io.below(fixed, follow=True) if os.path.isdir(fixed) else ():
        parts = file.relative_to(fixed).parts
        if _fits(parts, pattern) and not any(part.startswith(".") for part in parts) and _is_file(file):
            yield file


def _is_file(path: Path) -> bool:
    """Raises DataError for a link to nothing, behind which a document may be missing. Locks of Emacs are such links."""
    if core_io.dangling(path) and not path.name.startswith(".#"):
        hint = "Restore the file or remove the link."
        raise DataError("is a link to a file that does not exist", where=str(path), hint=hint)
    return path.is_file()


def _in_folder(path: Path, patterns: Sequence[str], *, recursive: bool = True) -> list[tuple[str, Path]]:
    split_patterns = [((("**",) if recursive else ()) + PurePath(pattern).parts) for pattern in patterns]
    kept = []
    for file in core_io.below(path):
        parts = file.relative_to(path).parts
        if any(_fits(parts, pattern) for pattern in split_patterns) and _is_file(file):
            kept.append((_name(file.relative_to(path)), file))
    if not kept:
        shown = ", ".join(patterns)
        raise DataError(
            f"holds no file that matches {shown}", where=str(path), hint="Change patterns or path of the source."
        )
    return sorted(kept)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the names of a path fit a pattern. In it "**" is any number of names."""
    if len(pattern) == 2 and pattern[0] == "**":
        return pattern[1] == "**" or fnmatchcase(parts[-1], pattern[1])
    fits = [True, *(all(one == "**" for one in pattern[: end + 1]) for end in range(len(pattern)))]
    for name in parts:
        after = [False]
        for end, element in enumerate(pattern):
            after.append(after[end] or fits[end + 1] if element == "**" else fits[end] and fnmatchcase(name, element))
        fits = after
    return fits[-1]


def _before_wildcards(path: Path) -> Iterator[str]:
    for folder in path.parent.parts:
        if glob.has_magic(folder):
            return
        yield folder


def _name(relative: Path) -> str:
    """A file's name as text; bytes that are not UTF-8, which POSIX allows in names, are written out."""
    return relative.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


Member = tuple[str, Path | None]
"""Name of a document that is a file, and where it is; topics of the language reference are no files."""


def _sampled(source: SourceBase, members: Sequence[Member]) -> Sequence[Member]:
    """In the order of names, or of the hash of their ids where the source takes only some of them."""
    if source.max_bytes is None and source.max_documents is None:
        return members
    return sorted(members, key=lambda member: hashlib.sha256(f"{source.name}/{member[0]}".encode()).digest())


def _splits(source: Files, name: str, path: Path) -> bool:
    """Whether a file is read in spans."""
    form = _form(source, name) or readers_read.format_of(name)
    return form == "jsonl" and path.suffix not in readers_bytes.FRAMES and _size(path) >= 2 * SPLIT_BYTES


def _grouped(members: Iterable[Member], split: Container[str] = ()) -> Iterator[SourceChunk]:
    """Small files together, up to GROUP_BYTES or GROUP_FILES; those to `split` in spans."""
    held: list[tuple[str, str]] = []
    size = 0
    for name, path in members:
        if name in split and path is not None:
            if held:
                yield SourceChunk(held[0][0], tuple(held), size)
                held, size = [], 0
            for span in readers_bytes.spans(path, SPLIT_BYTES):
                yield SourceChunk(f"{name}:{span.first}", ((name, str(path)),), span.end - span.begin, span)
            continue
        held.append((name, str(path or "")))
        size += _size(path) if path else 0
        if size >= GROUP_BYTES or len(held) >= GROUP_FILES:
            yield SourceChunk(held[0][0], tuple(held), size)
            held, size = [], 0
    if held:
        yield SourceChunk(held[0][0], tuple(held), size)


def _worlds(source: Worlds, first: int) -> Iterator[DocumentItem]:
    last = min(source.count, first + WORLDS_PER_PIECE)
    texts = toy_worlds.documents(source.seed, last, first=first)
    return (readers_read.make_item(source, f"{number:06d}", text) for number, text in enumerate(texts, first))


def _library(source: StandardLibrary) -> list[Member]:
    members: list[Member] = list(stdlib.files(source.exclude))
    return members if source.subset == "code" else [*members, *((f"{TOPICS}{name}", None) for name in stdlib.topics())]


TOPICS = "topics/"


def _documented(source: StandardLibrary, piece: SourceChunk) -> Iterator[DocumentItem]:
    """Code, or docstrings and topics of the language reference."""
    topics: dict[str, str] = {}
    for name, path in piece.members:
        if not path:
            topics = topics or stdlib.topics()
            url, where = stdlib.url(stdlib.TOPICS), stdlib.TOPICS
            yield readers_read.make_item(source, name, topics[name.removeprefix(TOPICS)], url=url, where=where)
            continue
        text = rows.decode(_bytes(Path(path)))
        if source.subset == "docs":
            name, text = stdlib.module_name(name), _docstrings(stdlib.module_name(name), text)
        yield readers_read.make_item(source, name, text, url=stdlib.url(name), where=path)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def _docstrings(module: str, text: str | ReadError) -> str | ReadError:
    if isinstance(text, ReadError):
        return text
    try:
        return stdlib.docstrings(module, text)
    except (SyntaxError, ValueError) as error:
        return ReadError("not_python", getattr(error, "lineno", None) or 0, f"is not Python: {error}")
