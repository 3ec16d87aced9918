"""
The words of the code: identifiers that say nothing, and words of our own where the field has one.

    python scripts/words.py             what is left of both, and an error where there is more than REMAINING
    python scripts/words.py --list      each place, with the word to use
    python scripts/words.py --list PATH [PATH ...]

An identifier of IDENTIFIERS is never a parameter, an attribute, a field, a function or a variable. It may be the target
of a comprehension that stands on one line. WORDS are those of the glossary's left column, each as a pattern of the
sense that is meant, with the contexts in which the word is right. They count in docstrings, comments, and strings with
a space. Counts of REMAINING only fall: lower a number when you have replaced some of its word.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "bloomery"

IDENTIFIERS = frozenset(("one", "found", "given", "made", "place", "part", "told", "wanted", "taken", "thing"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# From Python 3.12 on an f-string is several tokens.
TEXTS = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
KEYS = {("data/quality/thresholds.py", "place"): "a key of the file classifier.json"}
"""Identifiers that are keys of files: module and name, with the reason."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Word:
    """A word to avoid: the pattern of its sense, what to write, and where it is right."""

    name: str
    pattern: str
    instead: str
    packages: tuple[str, ...] = ()
    """Only below these folders of the package; empty: everywhere."""
    allowed: tuple[tuple[str, str], ...] = ()
    """Pairs of a pattern around the word and the reason why the word is right there."""


CODE = re.compile(r"""\{(?:[^{}'"]|'[^' ]*'|"[^" ]*")*\}""")
"""Code in an f-string, which is a part of its text before Python 3.12."""
SQL = (r"(?s)\b(SELECT|FROM|WHERE|AND|JOIN|QUALIFY|CREATE)\b.*", "a name in SQL")

WORDS = (
    Word(
        "products",
        r"\bproducts?\b",
        "matmuls",
        ("model", "train", "hw", "weights", "generate"),
        (
            (r"(inner|dot|outer) products?", "the term of linear algebra"),
            (r"product, scales coded", "a key in the result of a kernel trial"),
            (r"products\.(hpp|cpp|so)|products_\w+\.hpp|products-\w+", "the name of a native source file"),
        ),
    ),
    Word(
        "processor",
        r"\bprocessors?\b",
        "CPU",
        allowed=(
            (r"[Ll]ogits ?[Pp]rocessors?", "a class of transformers"),
            (r"processor_?name|model name", "a field of /proc"),
            (r"host\.processor", "a field of Host"),
            (r"[Cc]o-processors?", "a class of PCI devices"),
        ),
    ),
    Word(
        "scores of a model",
        r"\bscores\b",
        "logits",
        ("model", "train", "generate", "weights"),
        ((r"attention scores|scores of attention|[Ll]oss of scores", "the term of attention"),),
    ),
    Word(
        "ids",
        r"(?<![`._\w-])ids\b(?![`_=(\]])",
        "token IDs",
        ("tokenizer", "model", "generate", "serve", "shards", "train"),
        (
            (r"[Dd]ocument ids|ids of documents|message ids", "ids of documents"),
            (r"len\(ids\)", "a variable in an f-string"),
        ),
    ),
    Word("learned from", r"\blearn(ed|s|t)? from\b", "in the loss; trained on"),
    Word("goes on", r"\b(go|goes|going|went|gone) on\b(?! to\b)", "resumes; continues"),
    Word("is told", r"\b(is|are|was|were|be|been|being) (told|said)\b", "is reported, logged, printed"),
    Word("cure", r"\bcures?\b", "fix"),
    Word(
        "cut of a score",
        r"\b(the|a|each|nearest|their|its) cuts?\b(?! (off|short))",
        "threshold",
        ("data", "stages", "evaluation"),
    ),
    Word(
        "way",
        r"\b(a|the|this|each|other|another|no|its|one) ways?\b(?! (to|that|out|back|of))",
        "configuration",
        ("train",),
    ),
    Word("reckoned", r"\b[Rr]eckon\w*", "estimated"),
    Word("catalogue", r"\bcatalog(ue)?s?\b", "spec sheet"),
    Word("twin", r"\btwins?\b", "duplicate", allowed=(SQL,)),
    Word(
        "walls", r"\bwalls?\b", "isolation", allowed=((r"wall (clock|time)|a wall of|in the wall", "time, or a thing"),)
    ),
    Word(
        "fresh",
        r"\bfresh\b",
        "up to date; new",
        allowed=((r"fresh water", "an example of text"), (r"[\"'`]fresh[\"'`]", "the value in --json")),
    ),
    Word("beside", r"\b[Bb]esides?\b", "next to; in addition to"),
    Word(
        "drawn",
        r"\b(drawn|draws|drew)\b",
        "sampled",
        allowed=((r"(chart|figure|line|curve|plot)s? .{0,20}drawn|drawn (as|by charts)", "pictures"),),
    ),
    Word("as it comes", r"\bas (it|they) comes?\b", "with default settings"),
    Word(
        "held out",
        r"\b[Hh]eld[- ]out\b|\bholds? out\b",
        "validation",
        allowed=(
            (r"[\"'`]held out[\"'`]", "the name of a split of the toy worlds"),
            (r"\bheld-out/", "the name of a folder"),
        ),
    ),
    Word("sight", r"\bsights?\b", "mask", ("model", "train", "generate")),
    Word(
        "turn",
        r"\bturn(s|ed|ing)?\b(?! (into|out|to|off|on)\b)",
        "rope",
        ("model", "hw"),
        ((r"`turned`", "the name of a parameter"),),
    ),
    Word(
        "slope",
        r"\b[Ss]lopes?\b",
        "gradient",
        ("model", "train", "hw", "core"),
        (
            (r"ALiBi slopes?|[Ss]lopes? of (the )?heads?", "the term of ALiBi"),
            (r"`slopes`", "the name of a parameter"),
        ),
    ),
    Word(
        "place",
        r"\bplaces?\b(?! of)",
        "device; position; path",
        allowed=(
            SQL,
            (r"the right place", "an example of text"),
            (r"place    each run|Encode, place and", "a step of the stage shard"),
            (r"`places`", "the name of a parameter"),
            (r"\b[Ii]n-place\b", "the term of PyTorch"),
        ),
    ),
    Word("anew", r"\banew\b", "again"),
    Word("of others", r"\bof others\b", "from Hugging Face; third-party"),
)

REMAINING: dict[str, int] = {}
"""Uses that are left, by word; `identifiers` are those of IDENTIFIERS. A word without a number has none."""


@dataclass(frozen=True, order=True)
class Use:
    file: Path
    line: int
    name: str
    text: str
    instead: str


def identifiers(path: Path) -> Iterator[Use]:
    """Uses of IDENTIFIERS as names in a Python file."""
    banned: list[tuple[int, str]] = []

    def visit(node: ast.AST, inline: bool) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                banned.append((node.lineno, name))
            case ast.arg(arg=name):
                banned.append((node.lineno, name))
            case ast.Name(id=name, ctx=ast.Store()) if not inline:
                banned.append((node.lineno, name))
            case ast.Attribute(attr=name):
                banned.append((node.end_lineno or node.lineno, name))
            case ast.ExceptHandler(name=str(name)):
                banned.append((node.lineno, name))
        inline = inline or (isinstance(node, COMPREHENSIONS) and node.lineno == node.end_lineno)
        for child in ast.iter_child_nodes(node):
            visit(child, inline)

    visit(ast.parse(path.read_text()), False)
    for line, name in banned:
        if name in IDENTIFIERS and (path.relative_to(SOURCE).as_posix(), name) not in KEYS:
            yield Use(path, line, "identifiers", name, "what it holds")


def words(path: Path) -> Iterator[Use]:
    """Uses of WORDS in the docstrings, comments and sentences of a Python file."""
    package = path.relative_to(SOURCE).parts[0]
    chosen = [word for word in WORDS if not word.packages or package in word.packages]
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in TEXTS or " " not in token.string:
            continue
        for word in chosen:
            right = [match.span() for pattern, _ in word.allowed for match in re.finditer(pattern, token.string)]
            if token.string.lower().startswith(("f", "rf")):
                right += [match.span() for match in CODE.finditer(token.string)]
            for match in re.finditer(word.pattern, token.string):
                if not any(start <= match.start() and match.end() <= end for start, end in right):
                    line = token.start[0] + token.string.count("\n", 0, match.start())
                    around = token.string[max(0, match.start() - 30) : match.end() + 30].replace("\n", " ")
                    yield Use(path, line, word.name, around, word.instead)


def uses(paths: list[Path]) -> list[Use]:
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return sorted(use for file in files for use in (*identifiers(file), *words(file)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each use")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders of the package (default: all)")
    options = parser.parse_args()
    places = uses([path.resolve() for path in options.paths] or [SOURCE])
    if options.list:
        for use in places:
            print(f"{use.file.relative_to(ROOT)}:{use.line}: {use.name}: …{use.text}… → {use.instead}")
    count = Counter(use.name for use in places)
    for name in sorted({*count, *REMAINING}, key=lambda name: -count[name]):
        print(f"{name:<20}{count[name]:>6} of at most {REMAINING.get(name, 0)}")
    if options.paths:
        return 0
    more = [name for name in count if count[name] > REMAINING.get(name, 0)]
    fewer = [name for name, number in REMAINING.items() if count[name] < number]
    for name in more:
        print(
            f"error: {name}: more uses than REMAINING allows; `python scripts/words.py --list` shows them",
            file=sys.stderr,
        )
    for name in fewer:
        print(f"error: {name}: fewer uses than REMAINING says; lower its number to {count[name]}", file=sys.stderr)
    return 1 if more or fewer else 0


if __name__ == "__main__":
    raise SystemExit(main())
