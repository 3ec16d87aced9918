"""
The standard library of the running Python as text: sources, docstrings, language reference.

Every CPython includes them, so that a recipe can run where nothing can be downloaded. They are read from where the
interpreter keeps them, and never imported.
"""

import ast
import fnmatch
import os
import platform
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from bloomery.core.errors import DataError

EXCLUDED = (
    "site-packages",
    "dist-packages",
    "__pycache__",
    "config-*",
    "_sysconfigdata*",  # written by the build, with the paths of the machine that built it
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "distutils",
    "__phello__",  # two copies of a hello, to test freezing
    "msilib",  # tables of Windows installers
    "encodings",  # mostly mapping tables of 256 lines each
    "entities.py",  # html: a table of 2,231 names
    "pydoc_data",  # its topics are the language reference, read as documents of their own
)
"""File and folder names that are no text worth learning from: other people's packages, tests, tables."""

TOPICS = "pydoc_data/topics.py"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def root() -> Path:
    """Where the library's sources are. Raises DataError where this Python has none, as when they are in a zip."""
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "os.py").is_file():
        raise DataError(
            "this Python has no sources of its standard library there (they may be zipped or compiled)",
            where=str(folder),
            hint='Use a full CPython (python.org, pyenv, uv, conda or a distribution), or use kind = "folder".',
        )
    return folder


def files(exclude: Iterable[str] = EXCLUDED) -> list[tuple[str, Path]]:
    """Relative name and path of every source file, sorted. `exclude`: patterns of file or folder names."""
    patterns, base = tuple(exclude), root()
    members = []
    for folder, folders, names in os.walk(base):
        folders[:] = [name for name in folders if not _matches(name, patterns)]
        paths = [Path(folder, name) for name in names if name.endswith(".py") and not _matches(name, patterns)]
        members += [(path.relative_to(base).as_posix(), path) for path in paths]
    return sorted(members)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def url(relative: str) -> str:
    """Where that file of this Python's version can be seen."""
    return f"https://github.com/python/cpython/blob/v{platform.python_version().rstrip('+')}/Lib/{relative}"


def module_name(relative: str) -> str:
    return relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def topics() -> dict[str, str]:
    """The language reference by topic, as `help("topic")` prints it. Raises DataError where it is missing."""
    path = root() / TOPICS
    hint = 'Install the whole library (its package pydoc_data), or remove the source with subset = "docs".'
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"the language reference cannot be read: {error}", where=str(path), hint=hint) from None
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "topics":
            texts: dict[str, str] = ast.literal_eval(node.value)
            return {name: texts[name].strip("\n") + "\n" for name in sorted(texts)}
    raise DataError("holds no dict `topics`", where=str(path), hint=hint)


def docstrings(module: str, source: str) -> str:
    """
    What a module says of itself: its docstring, then signature and docstring of its public members, in their order.

    Members without a docstring are left out. Returns "" where nothing is documented; raises SyntaxError.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old docstrings are no concern of ours
        tree = ast.parse(source)
    pieces = []
    if own := ast.get_docstring(tree):
        pieces.append(f"{module}\n\n{own}")
    for owner, node in _members(tree.body):
        if text := ast.get_docstring(node):
            pieces.append(f"{_signature(f'{module}.{owner}', node)}\n\n{textwrap.indent(text, ' ' * 4)}")
    return "\n\n\n".join(piece.rstrip() for piece in pieces) + ("\n" if pieces else "")


def _members(nodes: Iterable[ast.stmt], owner: str = "") -> Iterator[tuple[str, Definition]]:
    for node in nodes:
        if isinstance(node, ast.If | ast.Try):
            yield from _members([*node.body, *node.orelse], owner)
        elif isinstance(node, Definition) and (not node.name.startswith("_") or node.name.endswith("__")):
            yield owner, node
            if isinstance(node, ast.ClassDef):
                yield from _members(node.body, f"{owner}{node.name}.")


def _signature(owner: str, node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {owner}{node.name}({bases})" if bases else f"class {owner}{node.name}"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{kind}{owner}{node.name}({ast.unparse(node.args)}){result}"
