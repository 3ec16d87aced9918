"""
Every snippet of the pages that people read runs, and every option, key and recipe in them exists.

    pytest tests/test_snippets.py -k out-of-memory

A page has a folder of its own with materials, in which its blocks run in order: `sh` as a script of bash, `python` as
a program. A block whose first line is a comment that names a file (`# my.toml`) is written to that file instead. A
block that cannot run in a test has `<!-- no run: REASON -->` on the line before; its commands are still parsed, and
its recipes still checked. Pages of which a block runs belong to the slow tests.
"""

import builtins
import contextlib
import io
import json
import os
import random
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any
from unittest import mock

import pytest

from bloomery import cli
from bloomery.core import config
from bloomery.core.errors import BloomeryError, UnreachableError
from bloomery.recipe import Recipe
from tests.snippets import Shell

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(
        page
        for page in (ROOT / "docs").rglob("*.md")
        if page.relative_to(ROOT / "docs").parts[0] in ("index.md", "learn", "do", "understand")
    ),
]
REASONS = {"gpu", "network", "several machines", "another program", "long", "interactive"}
RUN = ("sh", "python", "toml")
SHOWN = ("text", "json", "jsonl", "yaml", "html", "diff", "dockerfile", "make", "c", "javascript")
"""Languages of blocks that are neither run nor checked."""
FENCE = re.compile(r"( *)(`{3,})([^`]*)$")
NO_RUN = re.compile(r"<!-- *no run: *(.*?) *-->")
FILE_NAME = re.compile(r"# *([\w./-]*\w\.\w+)$")
OPERATORS = {"|", "||", "&", "&&", ";", "(", ")", "<", ">", ">>", "|&", ">&", "&>", "<<", ";;"}
WRAPPERS = {"time", "nohup", "nice", "env", "exec", "srun", "mpirun", "ssh", "sudo", "timeout", "torchrun"}
RUNS = re.compile(r"\bruns\b|bloomery status")
OUTPUT_LINES = 20


class SnippetError(Exception):
    """What is wrong with a page, with its name and line."""


@dataclass(frozen=True)
class Block:
    line: int
    """Of its first line of text, from 1."""
    language: str
    text: str
    reason: str
    """Why it does not run; "" where it does."""

    @property
    def runs(self) -> bool:
        return not self.reason and not self.file and self.language in ("sh", "python")

    @property
    def file(self) -> str:
        """The file that its text is written to, or ""."""
        named = FILE_NAME.match(self.text.partition("\n")[0]) if self.language in RUN else None
        return named[1] if named else ""


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page. Raises SnippetError, with the line, for a fence or a reason that is not known."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        indent, fence, language = len(opening[1]), opening[2], opening[3].strip()
        begin = number
        while number < len(lines) and lines[number].strip() != fence:
            number += 1
        if number == len(lines):
            raise SnippetError(f"{begin}: the block has no end")
        if language not in (*RUN, *SHOWN):
            raise SnippetError(f"{begin}: a block of {language!r}; known are {', '.join((*RUN, *SHOWN))}")
        above = next((line for line in reversed(lines[: begin - 1]) if line.strip()), "")
        mark = NO_RUN.fullmatch(above.strip())
        if mark is not None and mark[1] not in REASONS:
            raise SnippetError(f"{begin}: the reason {mark[1]!r} is none of {', '.join(sorted(REASONS))}")
        inside = "\n".join(line[min(indent, len(line) - len(line.lstrip())) :] for line in lines[begin:number])
        yield Block(begin + 1, language, inside, mark[1] if mark else "")
        number += 1


# --- checks of what does not run -----------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """The words behind `bloomery` of every command of a shell script that calls it."""
    text = re.sub(r"<<-? *(['\"]?)(\w+)\1(.*)\n(?s:.*?)\n\s*\2(?=\n|$)", r"\3", text)  # what a command reads
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word not in OPERATORS:
                command.append(word)
                continue
            yield from _called(command)
            # what follows a redirection is a file, and a number before it is a file descriptor
            command = ["<"] if set(word) <= {"<", ">"} or word in (">&", "&>") else []


def _called(command: list[str]) -> Iterator[list[str]]:
    words = list(command)
    while words and re.match(r"\w+=", words[0]):
        del words[0]
    if not words or words[0] == "<":
        return
    names = [word.rpartition("/")[2] for word in words]
    if names[0] == "bloomery":
        yield words[1:]
    elif names[0] in WRAPPERS and "bloomery" in names:
        yield words[names.index("bloomery") + 1 :]
    elif "-m" in words and words[words.index("-m") + 1 :][:1] in (["bloomery"], ["bloomery.cli"]):
        yield words[words.index("-m") + 2 :]


def check_command(words: list[str], folder: Path) -> str:
    """What is wrong with the options, the recipe or the settings of a command that is called in a folder; or ""."""
    said = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(said),
            contextlib.chdir(folder),
            mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}),
        ):
            options = cli.parse(words)
            recipe: Path | None = getattr(options, "recipe", None)
            if recipe is not None and not (recipe.parts[:1] == ("runs",) and recipe.name == "recipe.toml"):
                config.load(Recipe, recipe, options.settings if options.verb in ("run", "plan") else ())
    except SystemExit as end:
        return said.getvalue() if end.code else ""
    except BloomeryError as error:
        is_hub = isinstance(error, UnreachableError) and "hub:" in " ".join(words)  # which no test asks
        return "" if is_hub else str(error)
    return ""


def check_recipe(text: str) -> str:
    """What is wrong with TOML that is a recipe or a part of one; or "". A part is merged into whole recipes."""
    try:
        tree = tomllib.loads(text)
    except ValueError as error:
        return str(error)
    small = tomllib.loads(SMALL)
    shapeless = {**small, "pretrain": {"depth": 2}}
    demo = tomllib.loads((ROOT / "recipes" / "demo.toml").read_text(encoding="utf-8"))
    problems = []
    for base in ({"name": "part"}, shapeless, demo, small):
        try:
            config.from_tree(Recipe, _merged(base, tree), where="a part of a recipe")
        except BloomeryError as error:
            problems.append(str(error))
        else:
            return ""
    return min(problems, key=len)


def _merged(base: Any, part: Any) -> Any:
    if (
        not isinstance(base, dict)
        or not isinstance(part, dict)
        or part.get("kind", base.get("kind")) != base.get("kind")
    ):
        return part
    return base | {name: _merged(base.get(name), value) for name, value in part.items()}


# --- a page --------------------------------------------------------------------------------------------------------


def check_page(page: Path, name: str, folder: Path, shell: Shell) -> None:
    """Run and check the blocks of a page in a folder. Raises SnippetError for the first that is wrong."""
    try:
        for block in list(blocks(page.read_text(encoding="utf-8"))):
            _check_block(block, folder, shell)
    except SnippetError as error:
        raise SnippetError(f"{name}:{error}") from None


def _check_block(block: Block, folder: Path, shell: Shell) -> None:
    if block.language in SHOWN:
        return
    if block.language == "toml" and (what := check_recipe(block.text)):
        raise SnippetError(f"{block.line}: {what}")
    if block.file:
        (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.file).write_text(block.text + "\n", encoding="utf-8")
    elif block.reason:
        _check_unrun(block, folder)
    elif block.language != "toml":
        code, line, output = shell.run(block.text, folder, line=block.line, python=block.language == "python")
        if code:
            last = "\n".join(output.splitlines()[-OUTPUT_LINES:])
            what = f"exit code {code} of the {block.language} block of line {block.line}"
            raise SnippetError(f"{line}: {what}\n{block.text}\n--- its last lines of output\n{last}")


def _check_unrun(block: Block, folder: Path) -> None:
    if block.language == "python":
        try:
            compile(block.text, "snippet", "exec")
        except SyntaxError as error:
            raise SnippetError(f"{block.line}: {error}") from None
    elif block.language == "sh":
        try:
            found = list(commands(block.text))
        except ValueError as error:  # of quotes that have no end
            raise SnippetError(f"{block.line}: {error}") from None
        for words in found:
            if what := check_command(words, folder):
                raise SnippetError(f"{block.line}: bloomery {shlex.join(words)}\n{what}")


# --- what a page finds in its folder -------------------------------------------------------------------------------

SMALL = """\
# A tiny model of documents/ that answers as conversations.jsonl does: half a minute on one core.
name = "small"

[[fetch.sources]]
kind = "folder"
name = "documents"
domain = "documents"
path = "documents"

[[filter.rules]]
kind = "length"
min_characters = 200

[tokenizer]
vocab_size = 512

[shard]
val_fraction = 0.1

[pretrain]
steps = 20
global_batch_tokens = 1024
model = { hidden_size = 64, num_layers = 2, num_heads = 4, num_kv_heads = 2, intermediate_size = 128 }

[[instruct.sources]]
kind = "jsonl"
name = "conversations"
path = "conversations.jsonl"

[finetune]
steps = 20
global_batch_tokens = 1024

[evaluate]
toy_questions = 10
max_tokens = 16
val_bytes = 5000
"""


def write_materials(folder: Path) -> None:
    """Documents of Python's own help, with a few that filters drop; answers out of docstrings; recipes."""
    folder.mkdir()
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "small.toml").write_text(SMALL, encoding="utf-8")
    pieces = [
        (f"{name}-{place // 4000}", text[place : place + 4000])
        for name, text in sorted(topics.topics.items())
        for place in range(0, min(len(text), 8000), 4000)
    ]
    texts = {name.lower(): text.strip() + "\n" for name, text in pieces if len(text) > 400}
    names = sorted(texts)[:100]
    copied = texts[names[0]]
    odd = {
        "copy": copied,
        "nearly-a-copy": copied.replace("the", "The", 1) + "Read more in the manual.\n",
        "short": "Under construction.\n",
        "contact": f"{texts[names[1]]}\nQuestions go to jane.doe@example.org or to 192.0.2.17.\n",
        "spam": "BUY NOW!!! $$$ >>> best price <<< click here click here click here!!!\n" * 20,
    }
    (folder / "documents").mkdir()
    for number, name in enumerate(names[:60]):
        (folder / "documents" / f"{name}.{('md', 'txt')[number % 2]}").write_text(texts[name], encoding="utf-8")
    for name, text in odd.items():
        (folder / "documents" / f"{name}.txt").write_text(text, encoding="utf-8")
    written = {name: texts[name] for name in names[40:]} | odd
    articles = [
        {"id": f"article-{number:03d}", "text": text, "url": f"https://example.org/{name}", "domain": domain}
        for number, (name, text) in enumerate(written.items())
        for domain in ("manual" if name in texts and number % 2 else "blog",)
    ]
    asked = answers()
    rng = random.Random(0)
    conversations = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in asked
    ]
    preferences = [
        {"prompt": question, "chosen": answer, "rejected": rng.choice(asked)[1]} for question, answer in asked[:120]
    ]
    preferences = [row for row in preferences if row["chosen"] != row["rejected"]]
    for file, rows in (("articles", articles), ("conversations", conversations), ("preferences", preferences)):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{file}.jsonl").write_text(lines, encoding="utf-8")


def answers() -> list[tuple[str, str]]:
    """Questions about Python's built-in functions and methods, and the first sentences of their docstrings."""
    found = []
    for owner in (builtins, str, list, dict, bytes, set, int, float, tuple):
        for name in sorted(vars(owner)):
            text = (getattr(vars(owner)[name], "__doc__", None) or "").strip().partition("\n\n")[0].replace("\n", " ")
            if not name.startswith("_") and 20 < len(text) < 160:
                full = name if owner is builtins else f"{owner.__name__}.{name}"
                found.append((f"What does {full} do in Python?", text))
    return found


@dataclass
class Workshop:
    """A shell for all pages, and copies of the materials."""

    folder: Path
    shell: Shell

    def place(self, name: str, text: str) -> Path:
        """A new folder for a page, with a finished run in runs/demo where a block that runs names that folder."""
        place = self.folder / name
        shutil.copytree(self.materials, place)
        with contextlib.suppress(SnippetError):
            if any(block.runs and RUNS.search(block.text) for block in list(blocks(text))):
                shutil.copytree(self.runs, place / "runs", symlinks=True)
        return place

    @property
    def materials(self) -> Path:
        made = self.folder / "materials"
        if not made.exists():
            write_materials(made)
        return made

    @property
    def runs(self) -> Path:
        """A folder of runs with `demo`, a tiny one that is done."""
        made = self.folder / "demo"
        if not made.exists():
            shutil.copytree(self.materials, made)
            code, _, output = self.shell.run("bloomery run small.toml name=demo", made)
            assert code == 0, output
        return made / "runs"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("snippets")
    with Shell(folder / "shell") as shell:
        yield Workshop(folder, shell)


def _is_slow(page: Path) -> bool:
    """A page of which a block runs: that takes a server of everything, and often a model. Others are only checked."""
    text = page.read_text(encoding="utf-8")
    with contextlib.suppress(SnippetError):
        return any(block.runs for block in blocks(text))
    return False


def _cases() -> list[Any]:
    named = [(page, page.relative_to(ROOT).as_posix()) for page in PAGES]
    return [pytest.param(*case, id=case[1], marks=[pytest.mark.slow] if _is_slow(case[0]) else []) for case in named]


needs_bash = pytest.mark.skipif(
    shutil.which("bash") is None or sys.platform == "win32", reason="snippets are run by bash"
)


@needs_bash
@pytest.mark.parametrize(("page", "name"), _cases())
def test_every_snippet_of_a_page_is_right(page: Path, name: str, workshop: Workshop) -> None:
    folder = workshop.place(name.replace("/", "-"), page.read_text(encoding="utf-8"))
    what = ""
    try:
        check_page(page, name, folder, workshop.shell)
    except SnippetError as error:
        what = str(error)
    if what:
        pytest.fail(what, pytrace=False)
    shutil.rmtree(folder)


# --- the test itself -----------------------------------------------------------------------------------------------


def fenced(language: str, text: str, above: str = "") -> str:
    return f"# A page\n\n{above}\n```{language}\n{text}\n```\n"


@pytest.mark.slow
@needs_bash
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (fenced("sh", "true"), ""),
        (fenced("sh", "bloomery status runs/demo | grep -q fetch && echo yes > new.txt\ntest -s new.txt"), ""),
        (fenced("sh", "cat <<EOF > some.txt\nbloomery none\nEOF"), ""),
        (fenced("python", "import bloomery\nassert bloomery.status('runs/demo')['done']"), ""),
        (fenced("sh", "bloomery run recipes/demo.toml 'pretrain.steps=90' # short", "<!-- no run: long -->"), ""),
        (fenced("toml", f"# new.toml\n{SMALL}") + fenced("sh", "bloomery plan new.toml >/dev/null"), ""),
        (fenced("toml", "[finetune.lora]\nrank = 4"), ""),
        (fenced("text", "anything"), ""),
        (fenced("sh", "true\nfalse\ntrue"), "page.md:6: exit code 1 of the sh block of line 5"),
        (fenced("sh", "true\nbloomery status runs/none"), "page.md:6: exit code 2"),
        (fenced("sh", "bloomery status runs/demo --tomorrow"), "unrecognized arguments: --tomorrow"),
        (fenced("python", "x = 1\nx / 0"), 'line 6, in <module>\n    x / 0'),
        (fenced("python", "import sys\nsys.exit('no')"), "exit code 1"),
        (fenced("sh", "A=1 bloomery run \\\n --wrong x", "<!-- no run: gpu -->"), "unrecognized arguments: --wrong"),
        (fenced("sh", "x && bloomery rum a.toml", "<!-- no run: gpu -->"), "there is no verb 'rum'"),
        (fenced("sh", "bloomery run none.toml", "<!-- no run: gpu -->"), "no such recipe"),
        (fenced("sh", "bloomery plan small.toml pretrain.stepz=9", "<!-- no run: gpu -->"), "Did you mean 'steps'?"),
        (fenced("sh", "echo 'open", "<!-- no run: network -->"), "No closing quotation"),
        (fenced("python", "x = = 1", "<!-- no run: long -->"), "invalid syntax"),
        (fenced("sh", "true", "<!-- no run: lazy -->"), "page.md:4: the reason 'lazy' is none of"),
        (fenced("console", "$ true"), "page.md:4: a block of 'console'"),
        (fenced("toml", "[finetune]\nsteps = 3\nspeed = 4"), "finetune.speed: unknown key"),
        (fenced("toml", "[pretrain\nsteps = 3"), "page.md:5: "),
        ("```sh\ntrue\n", "page.md:1: the block has no end"),
    ],
    ids=lambda value: value.splitlines()[-2] if "\n" in value and "```" in value else None,
)  # fmt: skip
def test_a_wrong_snippet_is_reported_with_its_line(text: str, said: str, tmp_path: Path, workshop: Workshop) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    folder = workshop.place(f"page-{len(os.listdir(workshop.folder))}", text)
    if not said:
        check_page(page, "page.md", folder, workshop.shell)
        return
    with pytest.raises(SnippetError) as raised:
        check_page(page, "page.md", folder, workshop.shell)
    assert said in str(raised.value)
    assert str(raised.value).startswith("page.md:")
