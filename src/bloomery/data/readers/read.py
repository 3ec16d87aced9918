"""
Turns local files into documents by the settings that all sources share.

A source lists pieces (files, or groups of small files) and gives the items of each piece. An item is a row of the
document schema (data/documents.py), or a rejected row with its reason. `items` reads one local file. Sources that fetch
files from elsewhere pass a local path to it. The names of documents and their content do not depend on that path.

Conditions can be set on fields of a row, and on the length and lines of the text. They apply while a source is
read, before any filter of the stage filter sees the document. Examples are a score that is too low, and code of too
few lines. A document that fails goes to rejected/ with the condition as its reason and the value that it saw.

Settings, reading and conditions share one file because they are applied to each row in one pass.
"""

import re
import string
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import ftfy
from pydantic import Field, model_validator

from bloomery.core.config import Between, Bytes, Config, DocumentCount, FieldNumber, RowBytes, Share, TextLength
from bloomery.core.errors import DataError
from bloomery.data.documents import DocumentRow
from bloomery.data.readers import bytes as readers_bytes
from bloomery.data.readers import rows
from bloomery.data.readers import web as readers_web
from bloomery.data.readers.bytes import ByteSpan, ReadError

COMMENT = re.compile(r"\s*(#|//|/\*|\*|--|;|%|\"\"\"|'''|<!--)")


class FieldIs(Config):
    """A field of the row has a value in a range, or a value from a list."""

    kind: Literal["field"] = "field"
    field: str
    """"a.b" is the field b of the object a."""
    at_least: FieldNumber | None = None
    """Lowest value that meets the condition."""
    at_most: FieldNumber | None = None
    """Highest value that meets the condition."""
    one_of: tuple[str | Annotated[int, Between(-(2**63), 2**63 - 1, "data has integers of 64 bits")] | bool, ...] = ()
    """Values that meet the condition."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> "FieldIs":
        if self.at_least is None and self.at_most is None and not self.one_of:
            raise ValueError(f"the condition on field {self.field!r} is empty; set at_least, at_most or one_of")
        return self

    @property
    def asks_for_numbers(self) -> bool:
        """Whether only numbers meet the condition."""
        return not self.one_of or all(type(one) is int for one in self.one_of)

    def unmet(self, text: str, row: dict[str, Any]) -> ReadError | None:
        value = rows.at(row, self.field)
        name = f"accept.{self.field}"
        if value is None:
            return ReadError(f"{name}.missing", 0, f"has no field {self.field!r}")
        if self.one_of:
            same = any(type(value) is type(one) and value == one for one in self.one_of)
            return None if same else ReadError(name, 0, f"{self.field} is {value!r}")
        number = rows.number(value)
        if number is None:
            return ReadError(f"{name}.missing", 0, f"field {self.field!r} is {value!r}, not a number")
        return _outside(name, number, self.at_least, self.at_most)


class CharacterCount(Config):
    """The number of characters is in a range."""

    kind: Literal["characters"] = "characters"
    at_least: TextLength | None = None
    """Minimum number of characters."""
    at_most: TextLength | None = None
    """Maximum number of characters."""

    def unmet(self, text: str, row: dict[str, Any]) -> ReadError | None:
        return _outside("accept.characters", len(text), self.at_least, self.at_most)


class LineCount(Config):
    """The number of lines is in a range, and no line is too long."""

    kind: Literal["lines"] = "lines"
    at_least: TextLength | None = None
    """Minimum number of lines."""
    at_most: TextLength | None = None
    """Maximum number of lines."""
    longest: TextLength | None = None
    """Characters of the longest line."""

    def unmet(self, text: str, row: dict[str, Any]) -> ReadError | None:
        lines = text.removesuffix("\n").split("\n")
        if problem := _outside("accept.lines", len(lines), self.at_least, self.at_most):
            return problem
        return _outside("accept.longest_line", max(map(len, lines)), None, self.longest)


class CodeLines(Config):
    """Enough lines with text are code: they do not begin like a comment of any known language."""

    kind: Literal["code_lines"] = "code_lines"
    at_least: Share = 0.3
    """Minimum share of lines that are code."""

    def unmet(self, text: str, row: dict[str, Any]) -> ReadError | None:
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        share = sum(COMMENT.match(line) is None for line in lines) / max(1, len(lines))
        return _outside("accept.code_lines", share, self.at_least, None)


Condition = Annotated[FieldIs | CharacterCount | LineCount | CodeLines, Field(discriminator="kind")]


def first_unmet(conditions: tuple[Condition, ...], text: str, row: dict[str, Any]) -> ReadError | None:
    """The first condition that a document does not meet, as a problem whose reason begins with "accept."; or None."""
    return next((problem for one in conditions if (problem := one.unmet(text, row)) is not None), None)


def _outside(name: str, value: int | float, least: int | float | None, most: int | float | None) -> ReadError | None:
    if least is not None and value < least:
        return ReadError(name, value, f"{value:g} is less than {least:g}")
    if most is not None and value > most:
        return ReadError(name, value, f"{value:g} is more than {most:g}")
    return None


Name = Annotated[str, Field(pattern=r"^[\w.\-]+$")]
FileFormat = Literal["text", "html", "jsonl", "json", "parquet", "csv", "tsv", "warc"]

SUFFIXES: dict[str, FileFormat] = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    **dict.fromkeys((".warc", ".wet"), "warc"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
}
"""What the end of a name says, behind .gz and .zst. Any other file is text."""

REPAIRS = ftfy.TextFixerConfig(
    unescape_html=False,
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    fix_line_breaks=False,
    normalization=None,
    explain=False,
)
"""Mojibake, stray C1 and control characters and broken surrogates are mended; what an author may have meant stays."""


class SourceBase(Config):
    """What every source has."""

    name: Name
    """Name of the source in reports. IDs of documents begin with it."""
    domain: Name
    """Domain of its documents, for the mix and for reports."""
    license: str | None = None
    """License of documents that do not name their own license."""
    max_documents: DocumentCount | None = None
    """Maximum number of documents. Not set: all."""
    max_bytes: Bytes | None = None
    """Maximum bytes of text, as UTF-8. Reading stops before the document that would exceed it. A source of files then
    reads them in the order of the hash of their IDs, so the result is a sample. Other sources read from the start."""


class FileSource(SourceBase):
    """What every source has that reads files."""

    invalid: Literal["error", "skip_rows", "skip"] = "skip_rows"
    """
    What happens to unreadable input. "skip_rows" rejects rows, pages and long documents, each with a reason. A file
    that is damaged or is not text stops the run. "skip" rejects such files too. "error" stops the run at every fault.
    """
    max_document_bytes: RowBytes = 16 * 2**20
    """
    Maximum size of a document, in its file and as text. A longer document is rejected (`too_long`). This limits the
    memory for reading.
    """
    encoding: Literal["utf-8", "detect"] = "utf-8"
    """Encoding of text files. "detect" guesses it (needs the extra `web`), as HTML and WARC always do."""
    separator: str = ""
    """For text files: the text between two documents, such as <|endoftext|>. Empty: a file is one document."""
    repair: bool | None = None
    """Whether ftfy repairs text that was decoded wrongly ("Ã©" for "é"). None: for HTML and WARC."""
    main_content: bool = True
    """For HTML: read only the main part of the page, without navigation, comments and similar parts."""
    accept: tuple[Condition, ...] = ()
    """Conditions that documents must meet. Other documents are rejected, with the condition and the value."""

    def packages(self) -> tuple[str, ...]:
        formats = {format_of(name) for name in self.names()}
        return ("resiliparse",) if self.encoding == "detect" or formats & {"html", "warc"} else ()

    def names(self) -> tuple[str, ...]:
        """The names of its files, as far as the config alone tells them: the format of each is known by its end."""
        return ()


class Best(Config):
    """Of a field that holds a list of objects, only the one with the highest number in its field `by` is kept."""

    field: str
    """The field that holds the list."""
    by: str
    """The field with the number to compare. The object with the highest number wins."""


class TableSource(FileSource):
    """What every source has whose files hold rows of fields. "a.b" is the field b of the object a."""

    text_field: str = "text"
    """The field that holds the text."""
    template: str | None = None
    """Text from several fields instead of one, as in "Question: {question}\\n\\nAnswer: {answer}"."""
    id_field: str | None = None
    """The field with a document's own ID, unique in the whole run. None: source, file and row make the ID."""
    needs_id: bool = True
    """Whether to reject a row without that field. Otherwise file and row make its ID."""
    domain_field: str | None = None
    """The field that holds a document's own domain, for rows that have one."""
    url_field: str = "url"
    """The field that holds the address of a document."""
    license_field: str = "license"
    """The field that holds the license of a document."""
    best: Best | None = None
    """Replace a list with its best object, before any other step: `{ field = "answers", by = "score" }`."""
    markup: Literal["none", "html"] = "none"
    """Whether the text is HTML. Bloomery then takes its plain text (needs the extra `web`)."""

    @model_validator(mode="after")
    def _template_names_fields(self) -> "TableSource":
        if self.template is not None and not [name for _, name in _template(self.template) if name]:
            raise ValueError(f'template {self.template!r} has no field in braces, such as "{{title}}"')
        return self


def _template(template: str) -> list[tuple[str, str | None]]:
    """Literal text, and the name of the field that follows it. Raises ValueError for braces that do not match."""
    try:
        pieces = [(text, name) for text, name, *_ in string.Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}") from None
    if any(name == "" for _, name in pieces):
        raise ValueError(f"template {template!r} has braces without a field name")
    return pieces


@dataclass(frozen=True)
class RejectedDocument:
    """What a source holds that cannot be a document. Its text stays where it is; the row says where that is."""

    row: DocumentRow
    problem: ReadError
    where: str


DocumentItem = DocumentRow | RejectedDocument


def row_of(item: DocumentItem) -> DocumentRow:
    """The row of an item, whether or not it is a document."""
    return item.row if isinstance(item, RejectedDocument) else item


@dataclass(frozen=True)
class SourceChunk:
    """A part of a source that is read at once, by one worker: a file, or some small ones."""

    name: str
    """Of its first member, for reports. Unique in the source."""
    members: tuple[tuple[str, str], ...]
    """Relative name (it is a part of ids) and place of each: a local path, or what the source makes of it."""
    num_bytes: int
    """About how much there is to read; 0 where nobody knows."""
    span: ByteSpan | None = None
    """Of a large file of lines, where the piece is no more of it."""


def format_of(name: str) -> FileFormat:
    """The format of a file, by the end of its name."""
    path = Path(name)
    suffix = Path(path.stem).suffix if path.suffix in readers_bytes.FRAMES else path.suffix
    return SUFFIXES.get(suffix.lower(), "text")


def items(
    source: FileSource,
    path: Path,
    name: str,
    *,
    form: FileFormat | None = None,
    url: str | None = None,
    span: ByteSpan | None = None,
) -> Iterator[DocumentItem]:
    """
    The documents and rejected documents of one local file, or of a `span` of a jsonl file; every row, page or file is
    one of the two.

    `name` is the file's relative name in its source. Ids begin with it: "SOURCE/NAME:LINE" or "SOURCE/NAME".
    `form` is the format if `name` does not show it. `url` is the address that the file came from. A table, as
    jsonl, json, parquet and csv are, needs a `TableSource`. Raises DataError, with file, position and hint, for
    unreadable input unless `source.invalid` allows it; never for empty or unaccepted documents.
    """
    if form is None:
        named = format_of(name)
        is_text = named == "json" and not rows.holds_rows(path, source.max_document_bytes)
        form = "text" if is_text else named
    for item in READERS[form](source, path, name, form, ReadContext(url, span)):
        if isinstance(item, RejectedDocument) and _stops(source, form, item.problem):
            hint = f'Repair or remove it, or set invalid = "skip" in source {source.name!r} to continue without it.'
            if item.problem.reason == "no_column":
                hint = f"Set text_field or id_field of source {source.name!r} to the right column. {hint}"
            if item.problem.reason == "too_long":
                hint = f"If it is a document, raise max_document_bytes of source {source.name!r}. {hint}"
            raise DataError(item.problem.what, where=item.where, hint=f"{item.problem.hint} {hint}".lstrip())
        yield item


def _stops(source: FileSource, form: FileFormat, problem: ReadError) -> bool:
    if source.invalid == "skip" or not is_fault(problem.reason):
        return False
    if source.invalid == "error" or problem.reason in OF_FILES:
        return True
    return form in ("text", "html") and problem.reason not in OF_DOCUMENTS


def is_fault(reason: str) -> bool:
    """Whether somebody ought to know: the document was damaged, not just empty or not wanted."""
    return reason not in EXPECTED and not reason.startswith("accept.")


OF_FILES = ("torn", "no_rows", "not_warc", "no_column", "compressed")
"""What is wrong with a file of many documents, more of which may be lost."""
OF_DOCUMENTS = ("too_long", "bomb", "too_deep")
"""What is wrong with one document, also where it is a file of its own."""
EXPECTED = ("empty", "http_status", "not_html")


def make_item(
    source: SourceBase,
    name: str,
    text: str | ReadError,
    *,
    where: str = "",
    own: str | None = None,
    url: str | None = None,
    license: str | None = None,
    domain: str | None = None,
) -> DocumentItem:
    """A row, or what is rejected. `own` is the document's own id, which then stands alone."""
    if isinstance(text, str):
        text = rows.checked(text)
    row: DocumentRow = {
        "id": own if own is not None else f"{source.name}/{name}",
        "text": "" if isinstance(text, ReadError) else text,
        "source": source.name,
        "domain": domain if domain is not None else source.domain,
        "url": url,
        "license": license if license is not None else source.license,
    }
    return RejectedDocument(row, text, where) if isinstance(text, ReadError) else row


def _finished(
    source: FileSource, text: str | ReadError, fields: dict[str, Any], *, page: bool, web: bool
) -> str | ReadError:
    """Text as the source wants it: of a page what is seen, repaired where asked for, not too long, and accepted."""
    if isinstance(text, ReadError) or (page and isinstance(text := rows.checked(text), ReadError)):
        return text
    if page:
        text = readers_web.plain_text(text, main_content=source.main_content)
        if isinstance(text, ReadError):
            return text
    if source.repair or (source.repair is None and web):
        text = ftfy.fix_text(text, REPAIRS)
    if isinstance(text := rows.checked(text), ReadError):
        return text
    # a character takes 4 bytes at most, so that most texts need no count
    if 4 * len(text) > source.max_document_bytes < (size := len(text.encode())):
        return readers_bytes.too_long(size, source.max_document_bytes, "its text")
    return first_unmet(source.accept, text, fields) or text


class ReadContext(NamedTuple):
    """What a reader gets in addition to the file."""

    url: str | None
    """The address that it came from."""
    span: ByteSpan | None
    """The part of the file to read; None: all of it."""


def _text_file(
    source: FileSource, path: Path, name: str, form: FileFormat, context: ReadContext
) -> Iterator[DocumentItem]:
    data = readers_bytes.whole(path, source.max_document_bytes)
    page, text = form == "html", data if isinstance(data, ReadError) else ""
    if not isinstance(data, ReadError):
        text = readers_web.decoded(data, page=page) if page or source.encoding == "detect" else rows.decode(data)
    for ending, piece in rows.parts(text, "" if page else source.separator):
        finished = _finished(source, piece, {}, page=page, web=page)
        yield make_item(source, name + ending, finished, where=f"{path}{ending}", url=context.url)


def _crawl(source: FileSource, path: Path, name: str, form: FileFormat, context: ReadContext) -> Iterator[DocumentItem]:
    number = 0
    for number, record in readers_web.records(path, source.max_document_bytes):
        data = record.data
        page = data if isinstance(data, ReadError) else readers_web.decoded(data, record.charset, page=record.page)
        text = _finished(source, page, {}, page=record.page, web=True)
        yield make_item(source, f"{name}:{number}", text, where=f"{path}:{number}", url=record.url)
    if number == 0:
        yield _no_rows(source, path, name)


def _table(source: FileSource, path: Path, name: str, form: FileFormat, context: ReadContext) -> Iterator[DocumentItem]:
    assert isinstance(source, TableSource), f"{type(source).__name__} does not say which fields of {name} are read"
    empty = True
    for suffix, row in rows.placed(_rows(source, path, form, context.span)):
        empty = False
        yield _row_item(source, name + suffix, row, f"{path}{suffix}", context.url)
    if empty and context.span is None:
        yield _no_rows(source, path, name)


def _no_rows(source: FileSource, path: Path, name: str) -> DocumentItem:
    return make_item(source, name, ReadError("no_rows", 0, "holds no rows"), where=str(path))


def _rows(
    source: TableSource, path: Path, form: FileFormat, span: ByteSpan | None
) -> Iterator[tuple[int, rows.RowOrError]]:
    if form == "jsonl":
        return rows.jsonl(path, source.max_document_bytes, span)
    if form == "json":
        return rows.objects(path, source.max_document_bytes)
    asked = [name for _, name in _template(source.template) if name] if source.template else [source.text_field]
    asked += [source.id_field] if source.id_field and source.needs_id else []
    asked += [source.best.field] if source.best else []
    looked_at = [one.field for one in source.accept if isinstance(one, FieldIs)]
    looked_at += [name for name in (source.id_field, source.domain_field) if name and name not in asked]
    looked_at += [source.url_field, source.license_field]
    if form == "parquet":
        return rows.parquet(path, asked, looked_at)
    cells = rows.delimited(path, "\t" if form == "tsv" else ",", source.max_document_bytes, asked, looked_at)
    numbers = {one.field for one in source.accept if isinstance(one, FieldIs) and one.asks_for_numbers} - {*asked}
    named = ((number, row if isinstance(row, ReadError) else _with_numbers(row, numbers)) for number, row in cells)
    return named if numbers else cells


def _with_numbers(row: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    """A row of a table whose cells are all text, with the numbers that the cells of these names spell."""
    return row | {name: rows.spelled_number(row[name]) for name in names & row.keys()}


def _row_item(source: TableSource, name: str, row: rows.RowOrError, where: str, url: str | None) -> DocumentItem:
    if isinstance(row, ReadError):
        return make_item(source, name, row, where=where)
    own = None
    text: str | ReadError | None = None
    if source.best is not None:
        row = row | {source.best.field: _best(source.best, row)}
    if source.id_field is not None:
        own = rows.at(row, source.id_field)
        if not _is_id(own) and not source.needs_id:
            own = None
        elif not _is_id(own):
            fields = ", ".join(row)
            text, own = ReadError("no_id", 0, f"has no id in field {source.id_field!r}; its fields: {fields}"), None
    if text is None:
        text = _text(source, row)
    text = _finished(source, text, row, page=False, web=source.markup == "html")
    address, license = rows.at(row, source.url_field), rows.at(row, source.license_field)
    domain = rows.at(row, source.domain_field) if source.domain_field else None
    domain = str(domain) if type(domain) is int else domain
    return make_item(
        source,
        name,
        text,
        where=where,
        own=None if own is None else str(own),
        url=_unicode(address) if isinstance(address, str) else url,
        license=_unicode(license) if isinstance(license, str) else None,
        domain=_unicode(domain) if isinstance(domain, str) and domain else None,
    )


def _is_id(value: Any) -> bool:
    """Whether a value can be a document's id: a whole number, or text without NULs and halves of surrogate pairs."""
    return type(value) is int or (isinstance(value, str) and isinstance(rows.checked(value), str))


def _unicode(value: str) -> str:
    """A value of any field but the text, with "?" for unpaired surrogates."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _best(best: Best, row: dict[str, Any]) -> dict[str, Any] | None:
    """The object of a list with the highest number, the first of equals; None where there is none."""
    candidates = rows.at(row, best.field)
    objects = [one for one in candidates if isinstance(one, dict)] if isinstance(candidates, list) else []
    listed = [(value, one) for one in objects if (value := rows.number(rows.at(one, best.by))) is not None]
    return max(listed, key=lambda pair: pair[0])[1] if listed else None


def _text(source: TableSource, row: dict[str, Any]) -> str | ReadError:
    if source.template is None:
        return _string(source, source.text_field, row)
    pieces: list[str] = []
    for text, name in _template(source.template):
        value = _string(source, name, row) if name else ""
        if isinstance(value, ReadError):
            return value
        if name and not value:
            return ReadError("empty", 0, f"its field {name!r} is empty")
        pieces += (text, value)
    return "".join(pieces)


def _string(source: TableSource, field: str, row: dict[str, Any]) -> str | ReadError:
    """The text of a field, of markup what is seen; "" where it is null."""
    value = rows.at(row, field)
    if value is None and field not in row and field.partition(".")[0] not in row:
        return ReadError("no_text", 0, f"has no field {field!r}; its fields: {', '.join(row)}")
    if value is not None and not isinstance(value, str):
        return ReadError("not_text", 0, f"{field!r} holds {type(value).__name__} instead of a string")
    if value and source.markup == "html":
        if isinstance(seen := rows.checked(value), str):
            seen = readers_web.plain_text(seen, main_content=source.main_content)
        return seen.strip() if isinstance(seen, str) else seen
    return value or ""


Reader = Callable[[FileSource, Path, str, FileFormat, ReadContext], Iterator[DocumentItem]]
READERS: dict[FileFormat, Reader] = {
    "text": _text_file,
    "html": _text_file,
    "warc": _crawl,
    **dict.fromkeys(("jsonl", "json", "parquet", "csv", "tsv"), _table),
}
