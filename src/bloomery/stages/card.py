"""
The data card of a run: what its text is, whose, under which licenses, what became of it, and the hashes to check.

Written beside the stages after every `bloomery run`, as data_card.json for programs and data_card.md for people, from
the manifests of the stages that are done. What a stage did not say is left out: nothing is guessed.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.core import files, run
from bloomery.core.stage import content_hash, find_manifest

STAGES = ("fetch", "filter", "dedup", "tokenizer", "shard")
CARD = "data_card"
SHOWN_LICENSES = 6
"""In the table for people; the JSON has all of them."""
MIX = ("asked", "share", "tokens", "asked_tokens", "documents", "epochs", "limited_by")
COUNTS = ("documents", "kept", "dropped", "removed", "rejected")


def write(root: Path) -> Path | None:
    """Write both files into a run folder; returns the Markdown, or None where nothing was fetched yet."""
    folders = {name: folder for name, folder in run.current(root).items() if name in STAGES}
    done = {name: found for name, folder in folders.items() if (found := find_manifest(folder)) is not None}
    if "fetch" not in done:
        return None
    card = facts(root.name, done, {name: content_hash(folders[name]) for name in done})
    files.write_json(root / f"{CARD}.json", card)
    with files.whole_file(root / f"{CARD}.md", "w") as file:
        file.write(markdown(card))
    return root / f"{CARD}.md"


def facts(name: str, manifests: Mapping[str, Mapping[str, Any]], hashes: Mapping[str, str]) -> dict[str, Any]:
    """The card as JSON data. `manifests` and `hashes` (of the content) by stage; fetch is among them."""
    fetched = manifests["fetch"]
    counted: Mapping[str, Any] = fetched["stats"].get("by_source", {})
    sources = [_source(source, counted.get(source.get("name"), {})) for source in fetched["config"].get("sources", ())]
    sharded: Mapping[str, Any] = manifests.get("shard", {}).get("stats", {})
    return {
        "run": name,
        "sources": sources,
        "stages": {
            stage: {
                "sha256": hashes[stage],
                "finished": manifest["finished"],
                **{key: manifest["stats"][key] for key in COUNTS if isinstance(manifest["stats"].get(key), int)},
                "reasons": manifest["stats"].get("reasons", {}),
            }
            for stage, manifest in manifests.items()
        },
        "by_domain": {
            stage: manifest["stats"]["by_domain"]
            for stage, manifest in manifests.items()
            if isinstance(manifest["stats"].get("by_domain"), dict)
        },
        "mix": sharded.get("mix", {}),
        **({"anneal": sharded["anneal"]} if sharded.get("anneal") else {}),
        "versions": fetched["versions"],
    }


def _source(config: Mapping[str, Any], counts: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of one source: its config without what is not set, its license, and what it gave."""
    said = {key: value for key, value in config.items() if value not in (None, [], {}, "")}
    return {
        "name": config.get("name"),
        "domain": config.get("domain"),
        "license": config.get("license"),
        "counts": counts,
        "config": said,
    }


def markdown(card: Mapping[str, Any]) -> str:
    """The card for people."""
    lines = [f"# Data of {card['run']}", "", "## Sources", ""]
    header = ("source", "domain", "license", "documents", "bytes", "rejected")
    rows = [
        (one["name"], one["domain"], _licenses(one), *(one["counts"].get(key) for key in header[3:]))
        for one in card["sources"]
    ]
    lines += [*_table(header, rows), ""]
    versions = {one["name"]: one["counts"]["version"] for one in card["sources"] if "version" in one["counts"]}
    lines += [*(f"- {name} is {version}" for name, version in versions.items()), ""] if versions else []
    lines += ["## What became of the documents", ""]
    kept = [name for name in COUNTS if any(name in stage for stage in card["stages"].values())]
    rows = [(name, *(stage.get(key) for key in kept), stage["sha256"][:16]) for name, stage in card["stages"].items()]
    lines += [*_table(("stage", *kept, "sha256 of its content"), rows), ""]
    for name, stage in card["stages"].items():
        if stage["reasons"]:
            most = sorted(stage["reasons"].items(), key=lambda pair: (-pair[1], pair[0]))
            lines += [f"Reasons in {name}: " + ", ".join(f"{reason} {count:,}" for reason, count in most) + ".", ""]
    for title, mix in (("The mix", card["mix"]), ("The mix of the last part of training", card.get("anneal"))):
        if mix:
            lines += [f"## {title}", ""]
            keys = [key for key in MIX if any(key in one for one in mix.values())]
            shown = [(name, *(one.get(key) for key in keys)) for name, one in mix.items() if isinstance(one, Mapping)]
            lines += [*_table(("domain", *keys), shown), ""]
    lines += ["## How to get it again", "", "The recipe is recipe.toml in this folder; the same sources give the same"]
    lines += [
        "hashes, whatever the number of workers. Each dropped document is kept, with its reason, in the folder of"
    ]
    lines += ["the stage that dropped it."]
    return "\n".join(lines) + "\n"


def _licenses(source: Mapping[str, Any]) -> str | None:
    """Of the documents, where they say their own; else of the source."""
    found = source["counts"].get("licenses")
    if isinstance(found, Mapping) and found:
        first = sorted(map(str, found), key=lambda name: (-found[name], name))
        more = [f"and {len(first) - SHOWN_LICENSES} more"] if len(first) > SHOWN_LICENSES else []
        return ", ".join([*first[:SHOWN_LICENSES], *more])
    license: str | None = source["license"]
    return license


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(map(_cell, row)) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
