"""
Stage fetch: read whole documents from every source; input that cannot be a document goes to rejected/.

Each piece of a source (a file, or a group of small ones) is a part that one worker reads. A source with a limit takes
rounds, until its first pieces are known to reach the limit. A worker then reads the piece in which that happens once
more, up to the very document. So the result depends on the sources and on their limits alone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from bloomery.core import io as core_io
from bloomery.core.errors import DataError
from bloomery.core.extras import pa, pq
from bloomery.core.log import info
from bloomery.data import documents as data_documents
from bloomery.data import executor
from bloomery.data.documents import DocumentRow, Rolling
from bloomery.data.executor import Counts, Part, PartRecord
from bloomery.data.readers import read
from bloomery.data.readers.bytes import ByteSpan
from bloomery.data.readers.read import SourceChunk
from bloomery.data.sources import local
from bloomery.data.sources.local import DocumentSource
from bloomery.stages.config import Fetch

VERSION = 4
RESUMES = True
preflight = executor.check_workers

WORK = "fetch"
DOCUMENTS, REJECTED = "documents", "rejected"
MOST_NAMED, LONGEST_LICENSE = 100, 100
"""How many licenses are counted by name, and how much of a name is shown: a field may hold anything."""
CUT, TWIN = "-cut", "duplicate_id"
UNKNOWN, OTHERS = "not stated", "others"
SIZES = ("documents", "bytes")
"""What is counted of a domain. The record of a part holds them as a list, in this order."""


def external_inputs(config: Fetch) -> str:
    """A hash of the contents of all sources, for the stage's fingerprint. Raises DataError where one is missing."""
    return core_io.sha256_bytes(core_io.canonical([[source.name, local.digest(source)] for source in config.sources]))


def run(config: Fetch, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write out/documents (documents.SCHEMA) and out/rejected (with reason and value).

    Raises DataError for broken input, for two documents with one id, and when there is no document at all.
    """
    if not config.sources:
        raise DataError("there are no sources, so there are no documents", hint="Add [[fetch.sources]] to the recipe.")
    states = [_Taken(number, source) for number, source in enumerate(config.sources)]
    while sum(one.wants_more() for one in states):  # all are asked
        parts = [part for one in states for part in one.todo]
        records = iter(executor.run_parts(config.engine, take, config, parts, out, what=WORK))
        for state in states:
            state.records += [next(records) for _ in state.todo]
    # files that a tool is given need not all be good, as long as one is
    lenient = all(source.kind == "files" for source in config.sources) and any(one.count("documents") for one in states)
    for state in states:
        if not state.count("documents") and not (lenient and state.count("rejected")):
            hint = "Check its path, patterns and fields, and whether max_bytes leaves room for one document."
            rejected = state.tally("reasons")
            why = f"gave no documents ({state.count('rejected')} rejected{_listed(rejected)})"
            if rejected and (first := next(filter(_is_rejected, local.read(state.source)), None)):
                why += f"; the first: {first.where}: {first.problem.what}"
                hint = first.problem.hint or hint
            raise DataError(why, where=state.source.name, hint=hint)
        faults = {name: count for name, count in state.tally("reasons").items() if read.is_fault(name)}
        if faults:
            info(f"fetch: {state.source.name}: rejected{_listed(faults)}; rejected/ says which, and why", "yellow")
        _warn_about_domains(state)
    if any(getattr(source, "id_field", None) for source in config.sources):
        _reject_twins(states, out)
        for state in states:
            if twins := state.tally("reasons").get(TWIN, 0):
                what = f"rejected {twins:,} because an earlier document has the same ID; rejected/ says which"
                info(f"fetch: {state.source.name}: {what}", "yellow")
    _sweep(out, states)
    return _stats(states)


def _warn_about_domains(state: "_Taken") -> None:
    """Say where the field that a source names for the domain is in none of its rows."""
    source = state.source
    name = getattr(source, "domain_field", None) if "domain_field" in source.model_fields_set else None
    if name and state.count("documents") and set(_domains(state.records).to_json()) == {source.domain}:
        what = f"no row has a text in {name!r}, which domain_field names: all are in domain {source.domain!r}"
        info(f"fetch: {source.name}: {what}", "yellow")


def _is_rejected(item: read.DocumentItem) -> TypeGuard[read.RejectedDocument]:
    return isinstance(item, read.RejectedDocument)


def _listed(reasons: Mapping[str, int]) -> str:
    most = sorted(reasons, key=lambda name: (-reasons[name], name))[:3]
    return "".join(f"{',' if place else ':'} {reasons[name]:,} {name}" for place, name in enumerate(most))


def take(config: Fetch, chunk: Part, out: Path) -> PartRecord:
    """Read one piece of a source into files of its own, and count what it holds."""
    source, inputs = config.sources[chunk.inputs["source"]], chunk.inputs
    items = local.Limited(local.items(source, _piece(chunk)), inputs["max_documents"], inputs["max_bytes"])
    reasons: Counter[str] = Counter()
    licenses: Counter[str] = Counter()
    domains = Counts(*SIZES)
    with (
        Rolling(out / DOCUMENTS, chunk.name, data_documents.SCHEMA()) as kept,
        Rolling(out / REJECTED, chunk.name, data_documents.dropped_schema()) as rejected,
    ):
        for item, num_bytes in items:
            if isinstance(item, read.RejectedDocument):
                rejected.write(item.row | {"reason": item.problem.reason, "value": float(item.problem.value)}, 0)
                reasons[item.problem.reason] += 1
            else:
                kept.write(item, num_bytes)
                licenses[_license(item)] += 1
                domains.add(item["domain"], {"documents": 1, "bytes": num_bytes})
    total = domains.total()
    return {
        "files": [f"{DOCUMENTS}/{name}" for name in kept.files] + [f"{REJECTED}/{name}" for name in rejected.files],
        **{name: total[name] for name in SIZES},
        "rejected": reasons.total(),
        "reasons": _most(reasons),
        "licenses": _most(licenses),
        "domains": {domain: list(numbers.values()) for domain, numbers in domains.to_json().items()},
        "stopped": items.stopped,
    }


def _domains(records: Iterable[PartRecord]) -> Counts:
    """The documents and bytes of each domain in some parts."""
    counts = Counts(*SIZES)
    for record in records:
        counts.merge({domain: dict(zip(SIZES, sizes, strict=True)) for domain, sizes in record["domains"].items()})
    return counts


def _piece(chunk: Part) -> SourceChunk:
    inputs, span = chunk.inputs, chunk.inputs.get("span")
    members = tuple((name, place) for name, place in inputs["members"])
    return SourceChunk(inputs["piece"], members, chunk.num_bytes, ByteSpan(*span) if span else None)


def _most(counts: Mapping[str, int]) -> dict[str, int]:
    """The most frequent by name, in the order of names, and all others as one."""
    ranked = sorted(counts, key=lambda name: (name == OTHERS, -counts[name], name))
    named = {name: counts[name] for name in sorted(ranked[:MOST_NAMED])}
    others = sum(counts[name] for name in ranked[MOST_NAMED:])
    return named | ({OTHERS: named.get(OTHERS, 0) + others} if others else {})


@dataclass
class _Taken:
    """What is read of one source so far."""

    number: int
    source: DocumentSource
    parts: list[Part] = field(default_factory=list)
    records: list[PartRecord] = field(default_factory=list)
    """Of the first parts, which are done, in their order."""
    full: bool = False
    """Whether a limit is reached."""

    def count(self, key: str) -> int:
        return sum(record[key] for record in self.records)

    def tally(self, key: str) -> dict[str, int]:
        return _most(sum((Counter(record[key]) for record in self.records), Counter()))

    @cached_property
    def pieces(self) -> list[SourceChunk]:
        return local.pieces(self.source)

    @property
    def todo(self) -> list[Part]:
        return self.parts[len(self.records) :]

    def wants_more(self) -> bool:
        """Whether parts were added or replaced, so that they have to be done."""
        asked = {"documents": self.source.max_documents, "bytes": self.source.max_bytes}
        limits = {key: limit for key, limit in asked.items() if limit is not None}
        if self._cut(limits):
            return True
        done, left = len(self.parts), len(self.pieces) - len(self.parts)
        if self.full or not left:
            return False
        num_parts = left if not limits else 1
        for key, limit in limits.items() if done else ():
            each = max(1, self.count(key) // done)
            num_parts = max(num_parts, min(left, (limit - self.count(key)) // each))
        self.parts += [self._part(number, limits) for number in range(done, done + num_parts)]
        return True

    def _cut(self, limits: Mapping[str, int]) -> bool:
        """Leave out what lies behind a limit. True where the last part that stays has to be read again, up to there."""
        before = dict.fromkeys(limits, 0)
        for number, (chunk, record) in enumerate(zip(self.parts, self.records, strict=True)):
            after = {key: before[key] + record[key] for key in limits}
            over = record["stopped"] or any(after[key] > limits[key] for key in limits)
            if over or any(after[key] == limits[key] for key in limits):
                self.full = True
                again = over and any(before.values()) and not chunk.name.endswith(CUT)
                left = {key: limit - before[key] for key, limit in limits.items()}
                self.parts = [*self.parts[:number], self._part(number, left, CUT) if again else chunk]
                self.records = self.records[: number + (not again)]
                return again
            before = after
        return False

    def _part(self, number: int, limits: Mapping[str, int], ending: str = "") -> Part:
        piece = self.pieces[number]
        inputs = {
            "source": self.number,
            "piece": piece.name,
            "members": piece.members,
            "max_documents": limits.get("documents"),
            "max_bytes": limits.get("bytes"),
            **({"span": piece.span} if piece.span else {}),
        }
        return Part(f"part-{self.number:03d}-{number:06d}{ending}", inputs, piece.num_bytes)


def _reject_twins(states: Sequence[_Taken], out: Path) -> None:
    """
    Of documents that have one id, reject all but the first, in the order of sources, files and rows.

    Raises DataError, which names both, where the later one is of a source without invalid = "skip".
    """
    owners = [(one, number) for one in states for number in range(len(one.parts))]
    owned = [(one, number, name) for one, number in owners for name in _documents(one.records[number])]
    places, firsts = data_documents.places([out / name for *_, name in owned], out / "twins")
    for position, first in zip(places.tolist(), firsts.tolist(), strict=True):
        state, number, name = owned[position >> data_documents.ROW_BITS]
        if getattr(state.source, "invalid", "error") != "skip":
            other, its_number, _ = owned[first >> data_documents.ROW_BITS]
            own = _id_at(out / name, position % 2**data_documents.ROW_BITS)
            same = other is state and its_number == number
            there, here = _place_of(other, its_number, own, 0), _place_of(state, number, own, int(same))
            hint = f"Set another id_field for source {state.source.name!r}, or none: then file and line are the ID."
            raise DataError(
                f"two documents have the ID {own!r}: {there} and {here}", where=state.source.name, hint=hint
            )
    files_of = places >> np.uint64(data_documents.ROW_BITS)
    for file in np.unique(files_of).tolist():
        state, number, name = owned[file]
        rows = places[files_of == file] % np.uint64(2**data_documents.ROW_BITS)
        state.records[number] = _without(state.records[number], name, rows, out)


def _documents(record: PartRecord) -> list[str]:
    return [name for name in record["files"] if name.startswith(DOCUMENTS)]


def _id_at(path: Path, row: int) -> str:
    """The id of one document of a file."""
    ids = pq.read_table(path, columns=["id"]).column("id")
    own: str = ids[row].as_py()
    return own


def _place_of(state: _Taken, number: int, own: str, nth: int) -> str:
    """Where the nth document (from 0) of a part stands that has an id of its own: source, file and line."""
    source, piece = state.source, _piece(state.parts[number])
    if not getattr(source, "id_field", None):
        return own
    nameless = source.model_copy(update={"id_field": None, "invalid": "skip"})
    items = zip(local.items(source, piece), local.items(nameless, piece), strict=True)
    places = (
        str(read.row_of(same)["id"])
        for item, same in items
        if not isinstance(item, read.RejectedDocument) and item["id"] == own
    )
    return next(islice(places, nth, None))


def _without(record: PartRecord, name: str, rows: NDArray[np.uint64], out: Path) -> PartRecord:
    """The record of a part whose file `name` was replaced by one without some rows, which went to the rejected ones."""
    kept_name = name.removesuffix(".parquet") + "-once.parquet"
    twin_name = kept_name.replace(DOCUMENTS, REJECTED, 1)
    begin = num_bytes = 0
    licenses: Counter[str] = Counter(record["licenses"])
    domains = _domains([record])
    with (
        data_documents.PartWriter(out / kept_name) as kept,
        data_documents.PartWriter(out / twin_name, data_documents.dropped_schema()) as rejected,
    ):
        for batch in data_documents.part_batches(out / name):
            again = np.zeros(batch.num_rows, np.bool_)
            again[rows[(rows >= begin) & (rows < begin + batch.num_rows)] - np.uint64(begin)] = True
            kept.write_batch(batch.filter(pa.array(~again)))
            removed = batch.filter(pa.array(again)).to_pylist()
            rejected.write([row | {"text": "", "reason": TWIN, "value": 0.0} for row in removed])
            for row in removed:
                size, license = len(row["text"].encode()), _license(row)
                num_bytes += size
                licenses[license if license in licenses else OTHERS] -= 1
                domains.add(row["domain"], {"documents": -1, "bytes": -size})
            begin += batch.num_rows
    (out / name).unlink()
    return {
        **record,
        "files": [one for one in record["files"] if one != name] + [kept_name, twin_name],
        "documents": record["documents"] - len(rows),
        "bytes": record["bytes"] - num_bytes,
        "rejected": record["rejected"] + len(rows),
        "reasons": record["reasons"] | {TWIN: record["reasons"].get(TWIN, 0) + len(rows)},
        "licenses": {license: count for license, count in licenses.items() if count},
        "domains": {name: list(sizes.values()) for name, sizes in domains.to_json().items() if sizes["documents"]},
    }


def _sweep(out: Path, states: Sequence[_Taken]) -> None:
    """Remove what earlier rounds and attempts have left and no part owns."""
    owned = {out / name for one in states for record in one.records for name in record["files"]}
    owned |= {out / executor.RECORDS / WORK / f"{part.name}.json" for one in states for part in one.parts}
    for folder in (out / DOCUMENTS, out / REJECTED, out / executor.RECORDS / WORK):
        for path in folder.iterdir():
            if path not in owned:
                path.unlink()


def _stats(states: Sequence[_Taken]) -> dict[str, Any]:
    counts = (*SIZES, "rejected")
    domains = _domains(record for one in states for record in one.records)
    return {
        **{key: sum(one.count(key) for one in states) for key in counts},
        "reasons": dict(sorted(sum((Counter(one.tally("reasons")) for one in states), Counter()).items())),
        "by_domain": domains.to_json(sort_groups=False),
        "by_source": {
            state.source.name: {
                **{key: state.count(key) for key in counts},
                "reasons": state.tally("reasons"),
                "licenses": state.tally("licenses"),
                **({"version": version} if (version := local.pinned(state.source)) else {}),
            }
            for state in states
        },
    }


def _license(row: DocumentRow) -> str:
    return (row["license"] or UNKNOWN)[:LONGEST_LICENSE]
