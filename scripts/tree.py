"""
The tree of the package for docs/understand/source-map.md, made from the first sentence of each module's docstring.

`python scripts/tree.py` prints it; `--write` puts it between the two marks of that page.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bloomery"
PAGE = ROOT / "docs" / "understand" / "source-map.md"
ORDER = (
    "core",
    "hw",
    "data",
    "tokenizer",
    "shards",
    "model",
    "weights",
    "train",
    "generate",
    "evaluation",
    "serve",
    "stages",
    "checks",
    "recipe",
    "arguments",
    "cli",
    "api",
)
"""The order in which data flows, and in which packages may import: only from the left."""

START, END = "<!-- tree -->", "<!-- /tree -->"


def summary(module: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


def tree() -> str:
    """The block for the page, packages in the order of the data, modules by name."""
    rows: list[tuple[str, str]] = [("src/bloomery/", "")]
    for part in ORDER:
        folder = SOURCE / part
        if folder.is_dir():
            rows.append((f"  {part}/", summary(folder / "__init__.py")))
            modules = sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")
            rows += [(f"    {module.relative_to(folder).as_posix()}", summary(module)) for module in modules]
        elif (module := SOURCE / f"{part}.py").is_file():
            rows.append((f"  {module.name}", summary(module)))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(["```text", *(f"{name:<{width}}{text}".rstrip() for name, text in rows), "```"])


def block(page: str) -> str:
    """What stands between the marks of a page."""
    return page.partition(START)[2].partition(END)[0].strip("\n")


def between(text: str, name: str, content: str) -> str:
    """The text with what stands between <!-- name --> and <!-- /name --> replaced."""
    marked = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    found = re.subn(marked, lambda match: match[1] + content + match[2], text, flags=re.DOTALL)
    if found[1] != 1:
        raise SystemExit(f"the page has no block {name}")
    return found[0]


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), "tree", f"{tree()}\n"), encoding="utf-8")
    else:
        print(tree())


if __name__ == "__main__":
    main()
