"""
The words that people read: names that say nothing, words of our own where the field has one, and sentences.

    python scripts/words.py             print each fault with its file, line and fix; exit with 1 if there is any
    python scripts/words.py --list      print those too that REMAINING allows
    python scripts/words.py --list PATH [PATH ...]

An identifier of IDENTIFIERS is never a parameter, an attribute, a field, a function or a variable. It may be the target
of a comprehension that stands on one line. WORDS are those of the glossary's left column, each as a pattern of the
sense that is meant, with the contexts in which the word is right. They count in docstrings, comments, strings with a
space, and pages.

Pages are README, CHANGELOG, CONTRIBUTING and docs/. Messages are errors, hints, help texts and lines of a run. No
sentence of them, and of public docstrings, is longer than LONGEST. A page and all docstrings together have a limit on
their mean. A chain of passives is two in one sentence, or three such sentences in a row of one paragraph.

Counts of REMAINING only fall: lower a number when you have mended some of them.
"""

import argparse
import ast
import gc
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
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
    pages: str = ""
    """The pattern in pages, where the word has other senses too; empty: the same."""


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
            (r"products\.(hpp|cpp|so)|products_\w+\.hpp|products-\w+", "the name of a native source file"),
        ),
    ),
    Word("processor", r"\bprocessors?\b", "CPU"),
    Word(
        "scores of a model",
        r"\bscores\b",
        "logits",
        ("model", "train", "generate", "weights"),
        ((r"attention scores|scores of attention|[Ll]oss of scores", "the term of attention"),),
        pages=r"\b\d[\d,.]* scores\b|\bscores of (the |each |every )?(next )?tokens?\b",
    ),
    Word(
        "ids",
        r"(?<![`._\w-])ids\b(?![`_=(\]])",
        "token IDs",
        ("tokenizer", "model", "generate", "serve", "shards", "train"),
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
        pages=r"\b(every|each|chosen|fastest|cheapest) ways?\b(?! (to|that|out|back|of))",
    ),
    Word("reckoned", r"\b[Rr]eckon\w*", "estimated"),
    Word("catalogue", r"\bcatalog(ue)?s?\b", "spec sheet"),
    Word("twin", r"\btwins?\b", "duplicate", allowed=(SQL,)),
    Word(
        "walls", r"\bwalls?\b", "isolation", allowed=((r"wall (clock|time)|a wall of|in the wall", "time, or a thing"),)
    ),
    Word("fresh", r"\bfresh\b", "up to date; new", allowed=((r"[\"'`]fresh[\"'`]", "the value in --json"),)),
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
        pages=r"\bturn(s|ed|ing)? (queries|keys|heads|the (query|key|head))\b",
    ),
    Word(
        "slope",
        r"\b[Ss]lopes?\b",
        "gradient",
        ("model", "train", "hw", "core"),
        ((r"ALiBi slopes?|[Ss]lopes? of (the )?heads?", "the term of ALiBi"),),
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
            (r"\b[Ii]n[- ]place\b", "the term of PyTorch"),
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


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[tuple[ast.AST, bool]]:
    """Every node of a module, and whether it is within a comprehension on one line."""
    every: list[tuple[ast.AST, bool]] = [(parsed(path), False)]
    for node, inline in every:
        inline = inline or (isinstance(node, COMPREHENSIONS) and node.lineno == node.end_lineno)
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                every.append((value, inline))
            elif isinstance(value, list):
                every += [(child, inline) for child in value if isinstance(child, ast.AST)]
    return every


def identifiers(path: Path) -> Iterator[Use]:
    """Uses of IDENTIFIERS as names in a Python file."""
    for node, inline in nodes(path):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                line = node.lineno
            case ast.Name(id=name, ctx=ast.Store()) if not inline:
                line = node.lineno
            case ast.Attribute(attr=name):
                line = node.end_lineno or node.lineno
            case ast.ExceptHandler(name=str(name)):
                line = node.lineno
            case _:
                continue
        if name in IDENTIFIERS and (path.relative_to(SOURCE).as_posix(), name) not in KEYS:
            yield Use(path, line, "identifiers", name, "what it holds")


def words(path: Path) -> Iterator[Use]:
    """Uses of WORDS in the docstrings, comments and sentences of a Python file."""
    package = path.relative_to(SOURCE).parts[0]
    code = path.read_text(encoding="utf-8")
    there = [word for word in WORDS if not word.packages or package in word.packages]
    chosen = [word for word in there if re.search(word.pattern, code)]
    for token in tokenize.generate_tokens(io.StringIO(code).readline) if chosen else ():
        if token.type not in TEXTS or " " not in token.string:
            continue
        for word in chosen:
            values = CODE if token.string.lower().startswith(("f", "rf")) else None
            for match in matches(word, word.pattern, token.string, values):
                line = token.start[0] + token.string.count("\n", 0, match.start())
                yield Use(path, line, word.name, around(match), word.instead)


def matches(word: Word, pattern: str, text: str, values: re.Pattern[str] | None = None) -> list[re.Match[str]]:
    """Uses of a word in its sense, without those that are right."""
    found = list(re.finditer(pattern, text))
    if not found:
        return []
    right = [match.span() for allowed, _ in word.allowed for match in re.finditer(allowed, text)]
    right += [match.span() for match in values.finditer(text)] if values else []
    return [match for match in found if not any(a <= match.start() and match.end() <= b for a, b in right)]


def around(match: re.Match[str]) -> str:
    return match.string[max(0, match.start() - 30) : match.end() + 30].replace("\n", " ")


# --- Sentences: pages, messages and docstrings ---------------------------------------------------------------------

PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "docs")
LONGEST = 30
"""Words of a sentence, at most."""
MEAN, MEAN_OF_README, MEAN_OF_DOCSTRINGS = 18, 16, 15
"""Mean words of a sentence, at most: of a page, of README.md, and of all docstrings together."""
PRINTS, HELPS = ("info", "note", "tell", "say", "doing"), ("_verb", "_group")
"""Functions that print a line of a run, and those that make a help text. A class named …Error makes a message too."""
KEYWORDS = ("hint", "help", "description", "epilog")
"""Arguments that a person reads."""
MIN_WORDS = 3
"""Shorter sentences, such as a name with a full stop, are left out of means."""

FENCE = re.compile(r"\s*(```|~~~)")
ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
LABEL = re.compile(r"\s*\*\*[^*]{1,60}[.:]\*\*\s*")
"""Bold words in front of a paragraph, such as **Context.**, are a heading."""
MARKUP = (
    (re.compile(r"(?s)<!--.*?-->"), ""),
    (re.compile(r"(?s)``.+?``|`[^`]+`"), "code"),
    (re.compile(r"<[^<>]*>"), ""),
    (re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"\*\*|\b__|__\b"), ""),
    (re.compile(r"\bhttps?://[^\s)]*[^\s).,;:]"), "address"),
)
END = re.compile(
    r"""(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bal)[.!?]["')\]*]*(?=\s+["'(\[*]*(?:[A-Z0-9]|code\b)|\s+["“][a-z]|\s*$)"""
)
WORD = re.compile(r"[^\W_][\w'’.,/:@%+-]*")
ADVERBS = r"(?:(?:not|also|then|only|always|never|still|often|both|all|each|again|\w+ly)\s+){0,2}"
PARTICIPLES = (
    "(?!need|allow|limit|suppos|bas)[a-z]{2,}ed|begun|bought|broken|brought|built|caught|chosen|cut|done|drawn|driven|fed|"
    "forgotten|found|given|held|hidden|hit|kept|known|laid|left|lost|made|meant|overwritten|paid|put|read|rebuilt|reset|"
    "rewritten|run|said|seen|sent|set|shown|shut|sold|spent|split|taken|taught|thrown|told|understood|won|written"
)
PASSIVE = re.compile(rf"\b(?:is|are|was|were|be|been|being)\s+{ADVERBS}(?:{PARTICIPLES})\b")


@dataclass(frozen=True)
class Sentence:
    file: Path
    line: int
    text: str
    ended: bool
    """Whether it has an end mark. Headings, cells and items without one are left out of means."""

    @property
    def length(self) -> int:
        """In words. Code is one word."""
        return len(WORD.findall(self.text))

    @property
    def passives(self) -> int:
        return len(PASSIVE.findall(self.text))

    def use(self, name: str, instead: str) -> Use:
        return Use(self.file, self.line, name, shorten(self.text), instead)


def shorten(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}…"


def plain(text: str) -> str:
    """Markdown without its marks, line by line as before. Code becomes the word `code`."""
    for pattern, instead in MARKUP:
        for match in reversed(list(pattern.finditer(text))):
            new = match.expand(instead)
            text = text[: match.start()] + new + "\n" * (match[0].count("\n") - new.count("\n")) + text[match.end() :]
    return text


def sentences(file: Path, line: int, text: str) -> list[Sentence]:
    """The sentences of a paragraph that begins at this line."""
    text = plain(text[label.end() :] if (label := LABEL.match(text)) else text)
    ends = [0, *(match.end() for match in END.finditer(text)), len(text)]
    found = []
    for start, end in pairwise(ends):
        if sentence := text[start:end].strip():
            first = line + text.count("\n", 0, text.index(sentence, start))
            found.append(Sentence(file, first, " ".join(sentence.split()), bool(END.search(sentence))))
    return found


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs, items, headings and cells of a Markdown page, each with its first line."""
    block: list[str] = []
    first, fence = 1, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        mark = FENCE.match(line)
        alone = line.lstrip().startswith(("|", "#", "<!--"))
        item = ITEM.match(line)
        if block and (alone or mark or item or not line.strip()):
            yield first, "\n".join(block)
            block = []
        if mark or fence:
            if mark and fence in ("", mark[1]):
                fence = "" if fence else mark[1]
        elif alone:
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|#")) if "|" in line else [line.strip("# ")]
            yield from ((number, cell) for cell in cells if cell.strip(" -:"))
        elif line.strip():
            first = first if block else number
            block.append(line[item.end() :] if item else line)


def literal(node: ast.AST) -> str:
    """The text of a string in code, with `N` for each value in it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(literal(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return literal(left) + literal(right)
    return "N"


def messages(path: Path) -> Iterator[list[Sentence]]:
    """Errors, hints, help texts and lines of a run, each line of them as a list."""
    every = [node for node, _ in nodes(path)]
    assigned: dict[str, list[ast.expr]] = {}
    for node in every:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    for node in every:
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = node.args if name in HELPS else node.args[:1] if name in PRINTS or name.endswith("Error") else []
        helps = [word.value for word in node.keywords if word.arg == "help"]
        named = sorted({text.id for text in (*texts, *helps) if isinstance(text, ast.Name)})
        texts = [*texts, *(word.value for word in node.keywords if word.arg in KEYWORDS)]
        for text in [*texts, *(value for word in named for value in assigned.pop(word, []) if helps or name in HELPS)]:
            for line in literal(text).splitlines():
                yield [replace(sentence, line=text.lineno) for sentence in sentences(path, 1, line)]


def docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    """Paragraphs of the docstrings of a module and of its public classes, functions and names, with their lines."""
    public = True
    for child in node.body:
        match child:
            case ast.Expr(value=ast.Constant(value=str(text))) if public:
                block, margin = "", " " * child.col_offset
                for number, row in enumerate([row.removeprefix(margin) for row in text.splitlines()] + [""]):
                    if row.strip() and not row.startswith("    "):
                        block += f"{row}\n"
                    elif block:
                        yield child.lineno + number - block.count("\n"), block
                        block = ""
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("_") and not isinstance(node, FUNCTIONS):
                    yield from docstrings(child)
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        public = not (isinstance(targets[0], ast.Name) and targets[0].id.startswith("_"))


def faults(paragraph: list[Sentence]) -> Iterator[Use]:
    """Sentences of a paragraph that are too long, and chains of passives."""
    row = 0
    for sentence in paragraph:
        if sentence.length > LONGEST:
            yield sentence.use("long sentence", f"split it: {sentence.length} words, at most {LONGEST}")
        row = row + 1 if sentence.passives else 0
        if sentence.passives > 1 or row == 3:
            yield sentence.use("passives", "say who does it: subject, verb, object")
            row = 0


def mean(texts: list[Sentence]) -> float:
    """Mean words of a sentence that ends."""
    lengths = [text.length for text in texts if text.ended and text.length >= MIN_WORDS]
    return sum(lengths) / len(lengths) if lengths else 0.0


def in_page(path: Path) -> Iterator[Use]:
    """Faults of a Markdown page."""
    text = path.read_text(encoding="utf-8")
    hint = " (in the code: this page is generated)" if text.startswith("<!-- Generated") else ""
    parts = [sentences(path, line, paragraph) for line, paragraph in paragraphs(text)]
    everything = " ".join(sentence.text for paragraph in parts for sentence in paragraph)
    chosen = [word for word in WORDS if re.search(word.pages or word.pattern, everything)]
    for paragraph in parts:
        for use in faults(paragraph):
            yield replace(use, instead=use.instead + hint)
        for sentence in paragraph:
            for word in chosen:
                for match in matches(word, word.pages or word.pattern, sentence.text):
                    yield Use(path, sentence.line, word.name, around(match), word.instead + hint)
    limit = MEAN_OF_README if path.name == "README.md" and path.parent == ROOT else MEAN
    whole = [sentence for paragraph in parts for sentence in paragraph]
    if (words_each := mean(whole)) > limit:
        longest = max(whole, key=lambda sentence: sentence.length)
        why = f"{words_each:.1f} words a sentence, at most {limit}"
        yield Use(path, longest.line, "mean of a page", why, "begin with this sentence, its longest")


def in_module(path: Path) -> Iterator[Use]:
    """Faults of the sentences of a Python file."""
    for message in messages(path):
        yield from faults(message)
    for line, text in docstrings(parsed(path)):
        for use in faults(sentences(path, line, text)):
            if use.name == "long sentence":
                yield replace(use, name="long docstring")


def uses(paths: list[Path]) -> list[Use]:
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.suffix in (".py", ".md")
    ]
    return sorted(
        use
        for file in files
        for use in (in_page(file) if file.suffix == ".md" else (*identifiers(file), *words(file), *in_module(file)))
    )


def mean_of_docstrings() -> float:
    paths = list(SOURCE.rglob("*.py"))
    return mean(
        [one for path in paths for line, text in docstrings(parsed(path)) for one in sentences(path, line, text)]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each use, also if REMAINING allows it")
    parser.add_argument("paths", nargs="*", type=Path, help="modules, pages and folders (default: all)")
    options = parser.parse_args()
    gc.disable()  # the trees stay until the end: looking through them again and again takes half of the time
    uses_there = uses([path.resolve() for path in options.paths] or [SOURCE, *PAGES])
    count = Counter(use.name for use in uses_there)
    more = [name for name in count if count[name] > REMAINING.get(name, 0)]
    for use in uses_there:
        if options.list or use.name in more:
            print(f"{use.file.relative_to(ROOT)}:{use.line}: {use.name}: …{use.text}… → {use.instead}")
    for name in sorted({*count, *REMAINING}, key=lambda name: (-count[name], name)):
        print(f"{name:<20}{count[name]:>6} of at most {REMAINING.get(name, 0)}")
    if options.paths:
        return 0
    fewer = [name for name, number in REMAINING.items() if count[name] < number]
    for name in fewer:
        print(f"error: {name}: fewer uses than REMAINING says; lower its number to {count[name]}", file=sys.stderr)
    print(f"docstrings have {(words_each := mean_of_docstrings()):.1f} words a sentence, at most {MEAN_OF_DOCSTRINGS}")
    return 1 if more or fewer or words_each > MEAN_OF_DOCSTRINGS else 0


if __name__ == "__main__":
    raise SystemExit(main())
