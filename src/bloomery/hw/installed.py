"""Which packages lie beside torch, by the names of their folders: nothing is imported, so nothing can crash."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bloomery.hw.host import Host


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """An installed package. `name` is in lower case, with hyphens (PEP 503)."""

    name: str
    version: str
    folder: Path
    """Of its metadata."""

    @property
    def local(self) -> str:
        """The end of a version that says who built it, as rocm7.2 in 2.13.0+rocm7.2; "" for none."""
        return self.version.partition("+")[2]


def distributions(host: Host) -> Mapping[str, Distribution]:
    """The packages of the host's interpreter by name; of two with one name, that which is found first."""
    found: dict[str, Distribution] = {}
    for place in host.packages:
        for folder in sorted(place.glob("*.dist-info")) if place.is_dir() else ():
            name, _, version = folder.name.removesuffix(".dist-info").partition("-")
            name = re.sub(r"[-_.]+", "-", name).lower()
            found.setdefault(name, Distribution(name=name, version=version, folder=folder))
    return found


def numbers(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version, to compare by: 2.13.0a0+git -> (2, 13, 0)."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()
