"""
The drawings of docs: docs/drawings/NAME.dot becomes docs/images/NAME.svg, all in one style.

    python scripts/drawings.py             name the stale pictures, and exit with 1 if there are any
    python scripts/drawings.py --write     draw these with Graphviz

A DOT file has nodes, edges, labels, ranks and clusters, and no style. A picture holds the SHA-256 of its source and of
the style, so that a check needs no Graphviz.
"""

import argparse
import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES, PICTURES = ROOT / "docs" / "drawings", ROOT / "docs" / "images"

FONT = "Helvetica,Arial,sans-serif"
GREY = "#8b8b93"
STYLE = (
    "-Gbgcolor=transparent",
    "-Gpad=0.15",
    "-Gnodesep=0.3",
    "-Granksep=0.4",
    f"-Gfontname={FONT}",
    "-Gfontsize=11",
    f"-Gfontcolor={GREY}",
    f"-Gcolor={GREY}",
    "-Gstyle=rounded",
    f"-Nfontname={FONT}",
    "-Nfontsize=12",
    "-Nfontcolor=#2b2320",
    "-Nshape=box",
    "-Nstyle=rounded,filled",
    "-Nfillcolor=#fdeee3",
    "-Ncolor=#e2743b",
    "-Nmargin=0.16,0.09",
    "-Nheight=0.4",
    f"-Efontname={FONT}",
    "-Efontsize=10",
    f"-Efontcolor={GREY}",
    f"-Ecolor={GREY}",
    "-Earrowsize=0.7",
)
"""Light boxes with dark text, and grey edges: both can be read on a white and on a black page."""


def digest(source: Path) -> str:
    """The SHA-256 of a drawing and the style."""
    return hashlib.sha256(source.read_bytes() + "\n".join(STYLE).encode()).hexdigest()


def picture(source: Path) -> Path:
    return PICTURES / f"{source.stem}.svg"


def stale() -> list[Path]:
    """The drawings whose picture is missing or of another source."""
    drawings = sorted(SOURCES.glob("*.dot"))
    made = {one: path.read_text("utf-8") for one in drawings if (path := picture(one)).exists()}
    return [one for one in drawings if digest(one) not in made.get(one, "")]


def draw(source: Path) -> str:
    """The SVG of a drawing. Raises CalledProcessError where Graphviz cannot read it."""
    command = ["dot", "-Tsvg", *STYLE, str(source)]
    svg = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    svg = re.sub(r"<!DOCTYPE.*?>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)  # the DTD is on another host
    return svg.replace("<svg", f"<!-- {digest(source)} -->\n<svg", 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the pictures of docs, or check them.")
    parser.add_argument("--write", action="store_true", help="draw those that are not of their source")
    names = stale()
    if not parser.parse_args().write:
        if names:
            print("not of their source; run: python scripts/drawings.py --write", *names, sep="\n  ", file=sys.stderr)
        return bool(names)
    for source in names:
        picture(source).write_text(draw(source), encoding="utf-8")
        print(picture(source).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
