"""The rules of the house that a machine can check. Each failure names the file and the line."""

import ast
import gc
import json
import re
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from bloomery.core.extras import DATA
from tests.hw.machines import HIDE_TORCH

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bloomery"
TREE = runpy.run_path(str(ROOT / "scripts" / "tree.py"))
LINES = runpy.run_path(str(ROOT / "scripts" / "lines.py"))
ORDER: tuple[str, ...] = TREE["ORDER"]

MAX_FILE_LINES, MIN_FILE_LINES, MAX_FUNCTION_LINES = 800, 100, 80
MAX_MODULES = 175
MAX_HELP_SECONDS = 0.5
WITHOUT_TORCH = ("core", "data", "tokenizer", "shards", "checks", "recipe", "cli", "api")
TYPES_FROM_THE_RIGHT = {"checks.py": "bloomery.recipe.Recipe"}
"""A recipe calls its checks, which name its type for mypy alone."""
IMPORTS_WHEN_CALLED = (
    "cli.py",
    "api.py",
    "core/io.py",
    "hw/device.py",
    "hw/host.py",
    "hw/kernel_trials.py",
    "serve/chat_model.py",
    "serve/models.py",
    "shards/format.py",
    "train/precision.py",
    "weights/hf.py",
    "weights/locate.py",
    "weights/opened.py",
)
"""
Whose functions import what they need: `--help` and `import bloomery` start at once, and a model in one format
is read, and a step of training computes, without what only others need, such as the start of a command.
"""
TORCH_IN_HW = ("hw/kernel_selection.py", "hw/device.py", "hw/distributed.py", "hw/probes.py", "hw/require_torch.py")
BROAD_EXCEPT_ALLOWED = (
    "cli.py",
    "serve/server.py",
    "generate/scheduler.py",
    "train/state.py",
    "train/launch.py",
    "evaluation/sandbox_child.py",
    "weights/pickled.py",
)
"""Where a process, request or rank ends with what was raised or sends it on; and hooks, which must not end a run."""
RUNS = ("eval", "exec", "torch.load", "torch.save")
ISOLATED = (("evaluation/sandbox_child.py", "exec"), ("weights/pickled.py", "torch.load"))
"""Where text runs behind walls, and where a child process with limits reads what a user has named."""
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
READS_JSON = {
    "serve/openai_api.py": "bodies of requests, which guard.py has bounded",
    "serve/constrained.py": "what a model writes by a form, and schemas of requests, which guard.py has bounded",
    "core/io.py": "the reader that all others go through",
    "data/chat/formats.py": "a list of messages, or the arguments of a call, that is text in a row",
    "data/isolated.py": "what a child process says, and what it is asked",
    "data/sources/http_client.py": "what a server answers, of which 10,000 bytes are read",
    "data/readers/rows.py": "rows of documents, of which each that is no JSON is rejected with its reason",
    "data/synthesis/generate.py": "what a server answers, whose bytes are bounded",
    "evaluation/tasks.py": "what the same module has written into an item",
    "evaluation/sandbox_child.py": "what the process that started this one asks",
    "hw/distributed.py": "what other ranks of the same run say",
    "hw/kernel_trials.py": "what a child process says",
    "hw/hosts.py": "what the process that starts ranks says",
    "hw/monitor.py": "what tools of vendors print",
    "weights/pickled.py": "what a child process says",
    "tokenizer/importers.py": "what the library of tokenizers has just written",
    "tokenizer/tokenizer.py": "what the library of tokenizers has just written",
}
"""Modules that parse JSON without a record, and what they parse. Files are read by `records.read_record`."""
VENDOR_ATTRIBUTES = {"cuda", "mps", "xpu", "hip", "is_cuda", "nccl"}
VENDOR_TEXT = re.compile(r"(cuda|mps|xpu|hip)(:\d+)?|.*\b(nccl|rccl|rocm)\b.*", re.IGNORECASE | re.DOTALL)
SMALL_AND_ALONE = {
    "hw/io_speed.py": "a program of its own, which a child process runs",
}
"""Modules under 100 lines that only one other imports, and why they are not a part of that one."""
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}


@dataclass(frozen=True)
class Module:
    path: Path
    tree: ast.Module

    @property
    def place(self) -> str:
        """As in `hw/device.py`, below the package; as in `tests/x.py` elsewhere."""
        return self.path.relative_to(SOURCE if self.path.is_relative_to(SOURCE) else ROOT).as_posix()

    @property
    def part(self) -> str:
        """The package of the house, or the module on its top floor."""
        return self.place.split("/")[0].removesuffix(".py")

    @property
    def name(self) -> str:
        dotted = self.path.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", ".")
        return dotted.removesuffix(".__init__")

    def at(self, node: ast.AST | int, what: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path.relative_to(ROOT)}:{line}: {what}"


def parsed(folder: Path) -> list[Module]:
    files = sorted(folder.rglob("*.py"))
    gc.disable()
    found = [Module(file, ast.parse(file.read_text(encoding="utf-8"), str(file))) for file in files]
    gc.freeze()  # millions of nodes that stay
    gc.enable()
    return found


@cache
def package() -> list[Module]:
    """Every module of Bloomery."""
    return parsed(SOURCE)


@cache
def everything() -> list[Module]:
    """All Python that is kept in this repository."""
    return package() + [module for name in ("tests", "scripts", "benchmarks") for module in parsed(ROOT / name)]


@dataclass(frozen=True)
class Import:
    node: ast.Import | ast.ImportFrom
    names: tuple[str, ...]
    """What is imported, in full. For `from a import b`: a.b, which may be a module or a name in a."""
    inside: bool
    """Whether it stands in a function."""
    for_types: bool
    """Whether only a type checker reads it."""


@cache
def imports(module: Module) -> tuple[Import, ...]:
    def visit(node: ast.AST, inside: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield Import(node, tuple(alias.name for alias in node.names), inside, for_types)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
            yield Import(node, names, inside, for_types)
        else:
            inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside, for_types or typing_only)

    return tuple(visit(module.tree, False, False))


@cache
def walked(module: Module) -> tuple[ast.AST, ...]:
    return tuple(node for node in ast.walk(module.tree) if not isinstance(node, ast.expr_context))


def nodes(modules: list[Module]) -> Iterator[tuple[Module, ast.AST]]:
    for module in modules:
        for node in walked(module):
            yield module, node


def report(broken: list[str]) -> None:
    assert not broken, "\n" + "\n".join(broken)


def test_every_package_has_its_place_in_the_order() -> None:
    report([module.at(1, f"{module.part} has no place in ORDER") for module in package() if not placed(module)])


def placed(module: Module) -> bool:
    return module.part in ORDER or module.place == "__init__.py"


def test_a_module_imports_only_from_its_own_package_or_from_the_left() -> None:
    broken = []
    for module in package():
        allowed = {*ORDER[: ORDER.index(module.part) + 1], "__version__"} if module.part in ORDER else {"core", "api"}
        for found in imports(module):
            for name in found.names:
                if name.startswith("."):
                    broken.append(module.at(found.node, "relative import; write it in full"))
                elif found.for_types and TYPES_FROM_THE_RIGHT.get(module.place) == name:
                    continue
                elif name.startswith("bloomery.") and name.split(".")[1] not in allowed:
                    broken.append(module.at(found.node, f"{module.part} must not import {name}"))
    report(broken)


def test_imports_stand_at_the_top_of_the_file() -> None:
    report(
        [
            module.at(found.node, "import inside a function")
            for module in package()
            if module.place not in IMPORTS_WHEN_CALLED
            for found in imports(module)
            if found.inside
        ]
    )


def test_packages_of_the_extra_data_come_from_one_module() -> None:
    report(
        [
            module.at(found.node, "import it from bloomery.core.extras, which imports it when it is used")
            for module in package()
            if module.place != "core/extras.py"
            for found in imports(module)
            if not found.for_types and any(name.split(".")[0] in DATA for name in found.names)
        ]
    )


def test_the_package_has_no_more_modules_than_a_reader_can_keep_in_view() -> None:
    """Packages (`__init__`) do not count. A new file needs a joint of its own, or takes the place of another."""
    files = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MAX_MODULES


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {module.name for module in package()}
    graph: dict[str, set[str]] = {}
    for module in package():
        wanted = {name for found in imports(module) if not (found.inside or found.for_types) for name in found.names}
        parents = {name.rpartition(".")[0] for name in wanted}
        graph[module.name] = ((wanted | parents) & names) - {module.name, "bloomery"}
    report([f"import cycle: {' -> '.join(circle)}" for circle in circles(graph)])


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Every cycle that a depth-first walk closes."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in done:
            for further in sorted(graph.get(name, ())):
                yield from walk(further, [*path, name])
            done.add(name)

    for name in sorted(graph):
        yield from walk(name, [])


def test_a_circle_is_found_where_there_is_one() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == [["b", "c", "b"]]


def test_the_data_half_never_imports_torch() -> None:
    broken = []
    for module in package():
        in_hw = module.place in TORCH_IN_HW
        barred = module.part in WITHOUT_TORCH or (module.part == "hw" and not in_hw)
        for found in imports(module):
            late = module.place in IMPORTS_WHEN_CALLED and found.inside
            if barred and not (found.for_types or late) and any(name.split(".")[0] == "torch" for name in found.names):
                broken.append(module.at(found.node, f"{module.place} must not import torch"))
    report(broken)


def test_files_fit_on_a_few_screens() -> None:
    sizes = {module: len(module.path.read_text(encoding="utf-8").splitlines()) for module in everything()}
    report([module.at(1, f"{lines} lines") for module, lines in sizes.items() if lines > MAX_FILE_LINES])


def test_packages_stay_within_their_budget_of_lines() -> None:
    budget: dict[str, int] = LINES["BUDGET"]
    counts: dict[str, int] = LINES["lines_by_package"]()
    over = {name: count for name, count in counts.items() if count > budget.get(name, 0)}
    report([f"{name}: {n} lines of {budget.get(name, 0)}, in BUDGET of scripts/lines.py" for name, n in over.items()])


def test_functions_fit_on_a_screen() -> None:
    report(
        [
            module.at(node, f"{node.name} has {lines} lines")
            for module, node in nodes(everything())
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
        ]
    )


def test_a_small_module_serves_more_than_one_other() -> None:
    names = {module.name: module for module in package() if module.path.name != "__init__.py"}
    users: dict[str, set[str]] = {name: set() for name in names}
    for module in package():
        named = {name for found in imports(module) for name in found.names}
        named |= {name.rpartition(".")[0] for name in named}
        strings = (node.value for node in walked(module) if isinstance(node, ast.Constant))
        named |= {value.partition(":")[0] for value in strings if isinstance(value, str)}
        for name in named & names.keys() - {module.name}:
            users[name].add(module.name)
    small = {
        module.place
        for name, module in names.items()
        if len(users[name]) < 2 and len(module.path.read_text(encoding="utf-8").splitlines()) < MIN_FILE_LINES
    }
    assert small == SMALL_AND_ALONE.keys()


def test_a_class_or_type_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for module in package():
        for node in module.tree.body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names = [name for name in [node.targets[0].id] if name[0].isupper() and not name.isupper()]
            for name in names:
                places.setdefault(name, []).append(module.at(node, name))
    report([place for found in places.values() if len(found) > 1 for place in found])


FILE_NAME = re.compile(r"(?<![\w/.*-])((?:\w+/)+\w+\.py)\b")
NOT_OURS = {
    "_inductor/analysis/device_info.py",
    "pydoc_data/topics.py",
    "scripts/eval_prompts.py",
    "scripts/generate_synthetic.py",
    "stages/NAME.py",
    "tools/utils.py",
}
"""Files of torch, of Python and of 1386.ai; and a name that stands for any."""


def test_files_that_pages_and_docstrings_name_are_there() -> None:
    files = {f"/src/bloomery/{module.place}" for module in package()} | {f"/{module.place}" for module in everything()}
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    sources = [module.path for module in package()]
    broken = []
    for page in [*pages, *sources]:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for name in FILE_NAME.findall(line):
                if name not in NOT_OURS and not any(file.endswith(f"/{name}") for file in files):
                    broken.append(f"{page.relative_to(ROOT)}:{number}: {name}")
    report(broken)


def test_only_hw_names_a_vendor() -> None:
    broken = []
    for module in package():
        if module.part == "hw":
            continue
        prose = docstrings(module.tree)
        for node in walked(module):
            if isinstance(node, ast.Attribute) and (
                node.attr in VENDOR_ATTRIBUTES or ast.unparse(node) == "torch.version"
            ):
                broken.append(module.at(node, ast.unparse(node)))
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in prose
                and VENDOR_TEXT.fullmatch(node.value)
            ):
                broken.append(module.at(node, f"names {node.value!r}"))
        for found in imports(module):
            if any(set(name.split(".")) & (VENDOR_ATTRIBUTES | {"amdsmi", "pynvml"}) for name in found.names):
                broken.append(module.at(found.node, ast.unparse(found.node)))
    report(broken)


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of all strings that stand alone as statements: prose about what stands above them."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def test_nothing_unpickles_and_nothing_evaluates_text() -> None:
    broken = []
    for module, node in nodes(package()):
        if (
            isinstance(node, ast.Call)
            and (name := ast.unparse(node.func)) in RUNS
            and (module.place, name) not in ISOLATED
        ):
            broken.append(module.at(node, f"{name}(…)"))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            broken.append(module.at(node.value, "allow_pickle"))
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if any(set(name.split(".")) & PICKLES for name in names):
                broken.append(module.at(node, ast.unparse(node)))
    report(broken)


def test_json_of_files_is_read_by_one_reader_with_a_schema() -> None:
    broken, used = [], set()
    for module, node in nodes(package()):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        reads = ("load", "loads", "JSONDecoder")
        text = ast.unparse(node) if isinstance(node, ast.Attribute) and name in reads else name
        if text in {f"json.{one}" for one in reads}:
            used.add(module.place)
            if module.place not in READS_JSON:
                broken.append(module.at(node, f"{text}: read files with records.read_record"))
        if name in ("read_json", "parse_json") and module.place not in (
            "core/io.py",
            "core/records.py",
            "core/log.py",
        ):
            broken.append(module.at(node, f"{name}: read files with records.read_record, which has a schema"))
        if isinstance(node, ast.ImportFrom) and node.module == "json":
            broken.append(module.at(node, "import json as a whole, so that its uses can be seen"))
    report(broken + [f"{place} no longer parses JSON: take it out of READS_JSON" for place in READS_JSON.keys() - used])


WRITES_INTO_BLOCKS = ("train/compile.py", "train/mesh.py")
"""Which replace the forward pass of a torch module."""


def test_no_object_is_written_through_its_dict() -> None:
    """A frozen model stays frozen: a default that depends on another setting is a new object."""
    broken = []
    for module, node in nodes(package()):
        writes = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        target = node.value if isinstance(node, ast.Subscript | ast.Attribute) else None
        changes = isinstance(node, ast.Attribute) and node.attr in ("update", "pop", "setdefault", "clear")
        into_dict = (writes or changes) and isinstance(target, ast.Attribute) and target.attr == "__dict__"
        if into_dict and module.place not in WRITES_INTO_BLOCKS:
            broken.append(module.at(node, ast.unparse(node)))
        if isinstance(node, ast.Attribute) and node.attr == "__setattr__" and ast.unparse(node) == "object.__setattr__":
            broken.append(module.at(node, "object.__setattr__"))
    report(broken)


def test_no_error_is_caught_without_knowing_which() -> None:
    broken = []
    for module, node in nodes(package()):
        if isinstance(node, ast.ExceptHandler) and module.place not in BROAD_EXCEPT_ALLOWED:
            caught = ast.unparse(node.type) if node.type else "everything"
            raised_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if re.search(r"\b(everything|Exception|BaseException)\b", caught) and not raised_again:
                broken.append(module.at(node, f"catches {caught}"))
    report(broken)


def test_names_say_what_is_inside() -> None:
    vague = [
        module for module in everything() if VAGUE_NAMES & {*module.path.parts[len(ROOT.parts) :], module.path.stem}
    ]
    report([module.at(1, "this name says nothing") for module in vague])


def test_every_module_says_what_it_is() -> None:
    report([module.at(1, "no docstring") for module in package() if not ast.get_docstring(module.tree)])


def test_init_files_hold_no_code() -> None:
    """But for what imports the API when it is first asked for."""
    allowed = ast.Expr | ast.Import | ast.ImportFrom | ast.Assign
    inits = [one for one in package() if one.path.name == "__init__.py" and one.path.parent != SOURCE]
    report([m.at(node, "code in __init__.py") for m in inits for node in m.tree.body if not isinstance(node, allowed)])


def test_the_tree_on_the_page_is_current() -> None:
    block: Callable[[str], str] = TREE["block"]
    page = TREE["PAGE"].read_text(encoding="utf-8")
    assert block(page) == TREE["tree"](), "run: python scripts/tree.py --write"


def test_a_module_is_listed_with_its_first_sentence_on_however_many_lines(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""\nReads files, and each of them\nonly once. Another sentence.\n\nMore.\n"""\n')
    assert TREE["summary"](tmp_path / "a.py") == "Reads files, and each of them only once"


NAMES = r"`(?:\w+\.)*\w+`(?:(?:,| and) `(?:\w+\.)*\w+`)*"
"""Names in the tables of the source map, one or several."""


def test_every_file_and_name_of_the_source_maps_tables_exists() -> None:
    """In the forms: FILE (`NAME`, ...), and `NAME` in FILE, where "of" may stand for "in"."""
    rows = [line for line in TREE["PAGE"].read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    paths = {path for row in rows for path in re.findall(r"`([\w/]+(?:/|\.\w+))`", row) if "/" in path or ".py" in path}
    missing = [path for path in sorted(paths) if not any((root / path).exists() for root in (SOURCE, ROOT))]
    assert not missing
    pairs = list[tuple[str, str]]()
    for row in rows:
        after = re.findall(r"`([\w/]+\.py)` \(([^)]*)\)", row)
        before = [
            (path, names) for names, path in re.findall(rf"({NAMES})(?: \([^)]*\))? (?:in|of) `([\w/]+\.py)`", row)
        ]
        pairs += [(path, name) for path, names in (*after, *before) for name in re.findall(r"`([\w.]+)`", names)]
    assert len(pairs) >= 28
    assert not [(path, name) for path, name in pairs if not is_defined(SOURCE / path, name)]


def is_defined(module: Path, name: str) -> bool:
    """Whether a module binds a name at its top, or a class of it `CLASS.NAME`."""
    body: list[ast.stmt] = ast.parse(module.read_text(encoding="utf-8")).body
    for part in name.split("."):
        named = [(one, getattr(one, "name", None)) for one in body]
        named += [(one, target.id) for one in body for target in targets(one) if isinstance(target, ast.Name)]
        found = next((one for one, own in named if own == part), None)
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


def targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def test_help_starts_in_half_a_second() -> None:
    """Processor seconds, the best of three: what else the machine does is not our fault."""
    code = "import sys; sys.argv = ['bloomery', '--help']; from bloomery.cli import main; sys.exit(main())"
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < MAX_HELP_SECONDS


IMPORT_ALL = f"""
import importlib, json, sys
{HIDE_TORCH}
from bloomery.hw.torch_install import MissingTorch
outcome = {{}}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
        outcome[name] = "imported"
    except MissingTorch:
        outcome[name] = "told"
    except Exception as error:
        outcome[name] = type(error).__name__ + ": " + str(error)
print(json.dumps(outcome))
"""


@cache
def outcomes_without_torch() -> dict[str, str]:
    """What becomes of importing each module where there is no torch, by the module's name."""
    names = [module.name for module in package() if placed(module)]
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, str] = json.loads(done.stdout)
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("part", ORDER)
def test_without_torch_a_module_works_or_says_how_to_install_it(part: str) -> None:
    fine = ("imported",) if part in WITHOUT_TORCH else ("imported", "told")
    mine = [module for module in package() if module.part == part]
    outcome = outcomes_without_torch()
    report([module.at(1, outcome[module.name]) for module in mine if outcome[module.name] not in fine])


def test_every_test_that_the_security_page_names_is_there() -> None:
    page = (ROOT / "docs" / "understand" / "security.md").read_text(encoding="utf-8")
    tests = [module for module in everything() if module.place.startswith("tests/")]
    known = {node.name for _, node in nodes(tests) if isinstance(node, ast.FunctionDef)}
    files = {module.place for module in tests}
    named = set(re.findall(r"`(test_\w+)`", page)), set(re.findall(r"tests/[\w/]+\.py", page))
    assert all(named)
    assert (named[0] - known, named[1] - files) == (set(), set())
