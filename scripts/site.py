"""
Build the site of docs/ into site/, and check it: `make docs` calls this.

    python scripts/site.py             build with warnings as errors, then check
    python scripts/site.py --check     check what is built already

Every link of a built page leads to a page and an anchor that exist. No page loads anything from another host.
"""

import argparse
import html.parser
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("video", "src")}
"""What a browser loads by itself; a link is followed by its reader."""
REFERENCES = {*LOADED, ("a", "href")}
ELSEWHERE = re.compile(r"(https?:)?//")
STYLE_LOADS = re.compile(r"url\(\s*['\"]?((?:https?:)?//[^'\")]+)|@import\s+['\"]((?:https?:)?//[^'\"]+)")


class Page(html.parser.HTMLParser):
    """The anchors and references of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.references: list[tuple[str, str, str]] = []
        """Tag, attribute, value."""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if (tag, name) in REFERENCES and value:
                self.references.append((tag, name, value))


@cache
def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def problems(site: Path) -> Iterator[str]:
    """What is wrong with a built site, a line for each."""
    for path in sorted(site.rglob("*.html")):
        where = path.relative_to(site).as_posix()
        for tag, name, value in page(path).references:
            if ELSEWHERE.match(value):
                if (tag, name) in LOADED:
                    yield f"{where}: loads {value}"
            elif not re.match(r"[a-z]+:", value) and path.name != "404.html":
                yield from (f"{where}: {why}" for why in broken(site, path, value))
    for path in sorted(site.rglob("*.css")):
        for match in STYLE_LOADS.finditer(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site).as_posix()}: loads {match[1] or match[2]}"


def broken(site: Path, path: Path, link: str) -> Iterator[str]:
    """Why a link within the site leads nowhere, if it does."""
    target, anchor = urldefrag(link)
    file = (path.parent / unquote(target)).resolve() if target else path
    file = file / "index.html" if file.is_dir() else file
    if not file.is_relative_to(site.resolve()) or not file.is_file():
        yield f"there is no {link}"
    elif anchor and file.suffix == ".html" and unquote(anchor) not in page(file).anchors and anchor != "__":
        yield f"there is no anchor {link}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the site, and check it.")
    parser.add_argument("--check", action="store_true", help="check what is built")
    if not parser.parse_args().check:
        build = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
        if code := subprocess.run(build, cwd=ROOT).returncode:
            return code
    found = list(problems(SITE))
    print(*found, sep="\n", file=sys.stderr)
    print(f"site/: {sum(1 for _ in SITE.rglob('*.html'))} pages, {len(found)} problems")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
