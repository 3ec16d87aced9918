"""
Where documents come from: folders, tables, crawls, the hub and the web, Python's own library, a generator of ours.

A source lists its pieces, and gives the documents of each, whole, in an order that depends on nothing but their names
and the config. What cannot become a document comes out too, as `Rejected`, so that nothing is lost without a trace.
"""

import glob
import hashlib
import math
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Annotated, Literal

from bloomery.core import files
from bloomery.core.bounds import Between, DiskPath, Seed
from bloomery.core.errors import DataError
from bloomery.data import elsewhere, isolated, library, reading, rows, unpack, worlds
from bloomery.data.elsewhere import Address, Elsewhere, Hub, Preset, Remote
from bloomery.data.reading import Columns, Common, Item, Piece, Reading, Rejected
from bloomery.data.unpack import Problem, unreadable

GROUP_BYTES, GROUP_FILES = 32 * 2**20, 4000
"""How much of a folder of small files is one piece."""
SPLIT_BYTES = 64 * 2**20
"""How much of a large file of lines is one piece."""
WORLDS_PER_PIECE, WORLD_BYTES = 50_000, 400


class Folder(Reading):
    """Files of text, Markdown, HTML or source code, one document each; .gz and .zst too. Of HTML, its plain text."""

    kind: Literal["folder"] = "folder"
    path: DiskPath
    patterns: tuple[str, ...] = ("*.txt", "*.md")
    recursive: bool = True


class Jsonl(Columns):
    """Files of JSON objects, one a line: .jsonl, .jsonl.zst, .jsonl.gz. `path` may hold wildcards."""

    kind: Literal["jsonl"] = "jsonl"
    path: DiskPath


class Parquet(Columns):
    """Parquet files, one document a row. `path` may hold wildcards."""

    kind: Literal["parquet"] = "parquet"
    path: DiskPath


class Csv(Columns):
    """
    Tables with a first row of names, as in RFC 4180: .csv with commas, .tsv with tabs, .gz and .zst of them.

    `path` may hold wildcards. Fields may hold line breaks in quotes; ids count lines, not rows.
    """

    kind: Literal["csv"] = "csv"
    path: DiskPath


class Warc(Reading):
    """
    Crawls: the HTML and text pages of WARC files, the texts of WET files, .gz and .zst of them. `path` may hold
    wildcards. Needs the extra `web`.
    """

    kind: Literal["warc"] = "warc"
    path: DiskPath


class AnyFiles(Columns):
    """
    A file, a folder with all that is below it, or wildcards: each file by the end of its name, jsonl and parquet, csv,
    WARC, HTML, and text. What the data tools read.
    """

    kind: Literal["files"] = "files"
    path: DiskPath
    id_field: str | None = "id"
    needs_id: bool = False
    domain_field: str | None = "domain"


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
    count: Annotated[int, Between(1, 10**9, "these are 400 GB of text")]
    """Documents to generate."""
    seed: Seed = 0
    license: str | None = "CC0-1.0"


Files = Folder | Jsonl | Parquet | Csv | Warc | AnyFiles
Source = Files | StandardLibrary | Worlds | Hub | Address | Remote | Preset


def pieces(source: Source) -> list[Piece]:
    """
    What a source reads, piece by piece. The order is that of names; of a folder that is only sampled, that of hashes.

    Raises DataError where there is nothing.
    """
    if isinstance(source, Elsewhere):
        return elsewhere.pieces(source)
    if isinstance(source, Worlds):
        starts = range(0, source.count, WORLDS_PER_PIECE)
        some = [(f"{start:06d}", min(WORLDS_PER_PIECE, source.count - start)) for start in starts]
        return [Piece(name, ((name, ""),), count * WORLD_BYTES) for name, count in some]
    if isinstance(source, StandardLibrary):
        return list(_grouped(_sampled(source, _library(source))))
    if isinstance(source, Folder):
        return list(_grouped(_sampled(source, files_of(source))))
    found = files_of(source)
    # all in one child: workers then find them noted
    isolated.problems(path for name, path in found if (_form(source, name) or reading.format_of(name)) == "parquet")
    return list(_grouped(found, {name for name, path in found if _splits(source, name, path)}))


def items(source: Source, piece: Piece) -> Iterator[Item]:
    """
    The documents of one piece as rows of `document.SCHEMA`, and what it rejects. Limits are `limited`'s affair.

    Raises DataError for broken input, with file, place and cure, unless the source says `invalid = "skip"`.
    """
    if isinstance(source, Elsewhere):
        return elsewhere.items(source, piece)
    if isinstance(source, Worlds):
        return _worlds(source, int(piece.name))
    if isinstance(source, StandardLibrary):
        return _documented(source, piece)
    return (
        item
        for name, path in piece.members
        for item in reading.items(source, Path(path), name, form=_form(source, name), span=piece.span)
    )


class Limited:
    """
    Items with the bytes of their texts as UTF-8 (0 of what is rejected), up to a number of documents or bytes.

    Iterated over once. It ends with the document that makes a number full, or before the one that goes beyond it.
    """

    def __init__(self, found: Iterable[Item], max_documents: int | None, max_bytes: int | None) -> None:
        self._found, self._max_documents, self._max_bytes = found, max_documents, max_bytes
        self.stopped = False
        """Whether a limit has ended it."""

    def __iter__(self) -> Iterator[tuple[Item, int]]:
        most_documents = math.inf if self._max_documents is None else self._max_documents
        most_bytes = math.inf if self._max_bytes is None else self._max_bytes
        documents = total = 0
        for item in self._found:
            num_bytes = 0 if isinstance(item, Rejected) else rows.utf8_bytes(item["text"])
            if total + num_bytes > most_bytes:
                self.stopped = True
                return
            yield item, num_bytes
            if not isinstance(item, Rejected):
                documents, total = documents + 1, total + num_bytes
                if documents >= most_documents or total >= most_bytes:
                    self.stopped = True
                    return


def read(source: Source) -> Iterator[Item]:
    """All items of a source, up to its limits. Raises DataError as `pieces` and `items` do."""
    found = (item for piece in pieces(source) for item in items(source, piece))
    return (item for item, _ in Limited(found, source.max_documents, source.max_bytes))


def pinned(source: Source) -> str | None:
    """The version of a data set or file from elsewhere, as a person can ask for it again."""
    return elsewhere.pinned(source) if isinstance(source, Elsewhere) else None


def digest(source: Source) -> str:
    """A hash of all that `read` could see outside the config: names, sizes and contents of its files, or their pins."""
    if isinstance(source, Elsewhere):
        return elsewhere.digest(source)
    if isinstance(source, Worlds):
        return ""
    if isinstance(source, StandardLibrary):
        reference = [(library.TOPICS, library.root() / library.TOPICS)] if source.part == "docs" else []
        found = library.files(source.exclude) + reference
    else:
        found = files_of(source)
    return files.sha256_bytes(files.canonical([(n, path.stat().st_size, files.sha256_file(path)) for n, path in found]))


def _form(source: Files, name: str) -> reading.Format | None:
    """The format of a file where the source knows it, whatever the file's name."""
    if isinstance(source, AnyFiles):
        return None
    if isinstance(source, Csv):
        return "tsv" if reading.format_of(name) == "tsv" else "csv"
    return None if isinstance(source, Folder) and reading.format_of(name) == "html" else FORMS[source.kind]


FORMS: dict[str, reading.Format] = {"folder": "text", "jsonl": "jsonl", "parquet": "parquet", "warc": "warc"}


def files_of(source: Files) -> list[tuple[str, Path]]:
    """Relative name and path of every file of a source, sorted. Raises DataError where there are none."""
    path = source.path.expanduser()
    if isinstance(source, Folder):
        if not os.path.isdir(path):
            raise DataError("is not a folder", where=str(path), cure=f"Set path of source {source.name!r} to one.")
        return _in_folder(path, source.patterns, recursive=source.recursive)
    if os.path.isdir(path) and isinstance(source, AnyFiles):
        return _in_folder(path, ("*",))
    if os.path.isdir(path):
        raise DataError("is a folder", where=str(path), cure=f'Name its files: path = "{path}/*.{source.kind}*"')
    if os.path.exists(path):
        files.check_regular(path)
        return [(_name(path.relative_to(path.parent)), path)]
    fixed = Path(*_before_wildcards(path))
    found = sorted(file for file in _matching(path, fixed) if not files.kernel(file))
    if not found:
        near = ", ".join(sorted(p.name for p in fixed.glob("*"))[:5]) or "nothing, or it does not exist"
        raise DataError("no such file", where=str(path), cure=f"{fixed} holds: {near}.")
    return [(_name(file.relative_to(fixed)), file) for file in found]


def _matching(path: Path, fixed: Path) -> Iterator[Path]:
    """The files that a path with wildcards names, as `glob` finds them; `fixed` is what it has before them."""
    if "**" not in path.parts:
        yield from (Path(name) for name in glob.iglob(str(path)) if os.path.isfile(name))
        return
    pattern = path.relative_to(fixed).parts
    for file in files.below(fixed, follow=True) if os.path.isdir(fixed) else ():
        parts = file.relative_to(fixed).parts
        if _fits(parts, pattern) and not any(part.startswith(".") for part in parts):
            yield file


def _in_folder(path: Path, patterns: Sequence[str], *, recursive: bool = True) -> list[tuple[str, Path]]:
    wanted = [((("**",) if recursive else ()) + PurePath(pattern).parts) for pattern in patterns]
    kept = []
    for file in files.below(path):
        parts = file.relative_to(path).parts
        if any(_fits(parts, pattern) for pattern in wanted):
            kept.append((_name(file.relative_to(path)), file))
    if not kept:
        shown = ", ".join(patterns)
        raise DataError(f"holds no file that matches {shown}", where=str(path), cure="Change patterns, or the path.")
    return sorted(kept)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the names of a path fit a pattern. In it "**" is any number of names."""
    if len(pattern) == 2 and pattern[0] == "**":
        return pattern[1] == "**" or fnmatchcase(parts[-1], pattern[1])
    fits = [True, *(all(one == "**" for one in pattern[: end + 1]) for end in range(len(pattern)))]
    for part in parts:
        after = [False]
        for end, one in enumerate(pattern):
            after.append(after[end] or fits[end + 1] if one == "**" else fits[end] and fnmatchcase(part, one))
        fits = after
    return fits[-1]


def _before_wildcards(path: Path) -> Iterator[str]:
    for part in path.parent.parts:
        if glob.has_magic(part):
            return
        yield part


def _name(relative: Path) -> str:
    """A file's name as text; bytes that are not UTF-8, which POSIX allows in names, are written out."""
    return relative.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


Member = tuple[str, Path | None]
"""Name of a document that is a file, and where it is; topics of the language reference are no files."""


def _sampled(source: Common, members: Sequence[Member]) -> Sequence[Member]:
    """In the order of names, or of the hash of their ids where the source takes only some of them."""
    if source.max_bytes is None and source.max_documents is None:
        return members
    return sorted(members, key=lambda member: hashlib.sha256(f"{source.name}/{member[0]}".encode()).digest())


def _splits(source: Files, name: str, path: Path) -> bool:
    """Whether a file is read in spans."""
    form = _form(source, name) or reading.format_of(name)
    return form == "jsonl" and path.suffix not in unpack.FRAMES and path.stat().st_size >= 2 * SPLIT_BYTES


def _grouped(members: Iterable[Member], split: Container[str] = ()) -> Iterator[Piece]:
    """Small files together, up to GROUP_BYTES or GROUP_FILES; those to `split` in spans."""
    held: list[tuple[str, str]] = []
    size = 0
    for name, path in members:
        if name in split and path is not None:
            if held:
                yield Piece(held[0][0], tuple(held), size)
                held, size = [], 0
            for span in unpack.spans(path, SPLIT_BYTES):
                yield Piece(f"{name}:{span.first}", ((name, str(path)),), span.end - span.begin, span)
            continue
        held.append((name, str(path or "")))
        size += path.stat().st_size if path else 0
        if size >= GROUP_BYTES or len(held) >= GROUP_FILES:
            yield Piece(held[0][0], tuple(held), size)
            held, size = [], 0
    if held:
        yield Piece(held[0][0], tuple(held), size)


def _worlds(source: Worlds, first: int) -> Iterator[Item]:
    last = min(source.count, first + WORLDS_PER_PIECE)
    texts = worlds.documents(source.seed, last, first=first)
    return (reading.make_item(source, f"{number:06d}", text) for number, text in enumerate(texts, first))


def _library(source: StandardLibrary) -> list[Member]:
    found: list[Member] = list(library.files(source.exclude))
    return found if source.part == "code" else [*found, *((f"{TOPICS}{name}", None) for name in library.topics())]


TOPICS = "topics/"


def _documented(source: StandardLibrary, piece: Piece) -> Iterator[Item]:
    """Code, or docstrings and topics of the language reference."""
    topics: dict[str, str] = {}
    for name, place in piece.members:
        if not place:
            topics = topics or library.topics()
            url, where = library.url(library.TOPICS), library.TOPICS
            yield reading.make_item(source, name, topics[name.removeprefix(TOPICS)], url=url, where=where)
            continue
        text = rows.decode(_bytes(Path(place)))
        if source.part == "docs":
            name, text = library.module_name(name), _docstrings(library.module_name(name), text)
        yield reading.make_item(source, name, text, url=library.url(name), where=place)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def _docstrings(module: str, text: str | Problem) -> str | Problem:
    if isinstance(text, Problem):
        return text
    try:
        return library.docstrings(module, text)
    except (SyntaxError, ValueError) as error:
        return Problem("not_python", getattr(error, "lineno", None) or 0, f"is not Python: {error}")
