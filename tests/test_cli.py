import argparse
import ast
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bloomery import __version__, cli
from bloomery.core import config, pipeline
from bloomery.core.pipeline import locked
from bloomery.hw.doctor import report as doctor
from bloomery.hw.doctor.finding import Finding
from bloomery.serve.chat_model import StreamedAnswer, TextAnswerer
from tests.calling import Call
from tests.two_stages import STAGES, Recipe
from tests.weights.made import model

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes" / "demo.toml"


def verbs() -> dict[str, argparse.ArgumentParser]:
    for action in cli.parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError


VERBS = verbs()
REPORTS = [name for name, verb in VERBS.items() if "--json" in verb.format_usage()]

# --- a small recipe of two stages ----------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe file in the folder that commands run in."""
    monkeypatch.setattr("bloomery.recipe.STAGES", STAGES)
    monkeypatch.setattr("bloomery.recipe.Recipe", Recipe)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text('name = "small"\n')
    return path


def stages(call: Call) -> dict[str, str]:
    return {one["stage"]: one["state"] for one in json.loads(call("status", "runs/small", "--json")[1])["stages"]}


# --- help ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 2500, "b\0c"])
@pytest.mark.parametrize("verb", ["run", "plan", "status", "clean", "chat", "eval", "serve"])
def test_a_path_that_no_file_system_has_is_an_error_of_use(
    capsys: pytest.CaptureFixture[str], verb: str, path: str
) -> None:
    words = ("--runs", path) if verb == "serve" else (path,)
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "a path holds no NUL" in said or "bytes, and" in said


def test_there_are_the_verbs_that_are_promised() -> None:
    assert set(VERBS) >= {"run", "plan", "status", "clean", "chat", "serve", "eval", "export", "import", "doctor"}
    assert set(REPORTS) >= {"plan", "status", "clean", "eval", "export", "import", "doctor"}


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_says_what_it_does_and_shows_an_example_that_works(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    words = shlex.split((VERBS[verb].epilog or "").partition("Example:\n  bloomery ")[2])
    assert words[0] == verb
    assert callable(cli.VERBS[cli.parse(words).verb])
    assert f"usage: bloomery {verb} " in text
    for action in VERBS[verb]._actions:
        assert action.help, f"{verb}: {action.dest} explains nothing"


def test_every_help_fits_80_columns_and_every_group_of_options_has_an_example_that_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tools = next(action.choices for action in VERBS["data"]._actions if isinstance(action.choices, dict))
    for name, verb in {**VERBS, **{f"data {name}": verb for name, verb in tools.items()}}.items():
        assert all(len(line) <= 80 for line in verb.format_help().splitlines()), name
        for group in verb._action_groups[2:]:
            if group.title == "tools":
                continue
            assert group.description, f"{name}: {group.title}"
            options = cli.parse(shlex.split(group.description.partition("Example: bloomery ")[2]))
            assert name.split()[0] == options.verb
            assert any(getattr(options, action.dest) != action.default for action in group._group_actions), group.title


def test_without_a_verb_there_is_help(call: Call) -> None:
    code, out, _ = call()
    assert code == 0
    assert all(verb in out for verb in VERBS)
    assert "bloomery run recipes/demo.toml" in out
    assert out.startswith("usage: bloomery [-h] [--version] VERB ...\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fly"], "there is no verb 'fly'\nVerbs: run, launch, plan, status, "),
        (["statsu", "runs/a"], "there is no verb 'statsu'\nDid you mean 'status'?"),
        (["run"], "the following arguments are required: RECIPE\n"),
        (["chat"], "the following arguments are required: MODEL\n"),
        (["status", "a", "b=c"], "unrecognized arguments: b=c"),
        (["run", "a.toml", "--fast"], "unrecognized arguments: --fast"),
        (["eval", "a", "--toy-questions", "many"], "argument --toy-questions: 'many' is not an integer"),
        (["run", "a.toml", "--until", "a", "--only", "a"], "argument --only: not allowed with argument --until"),
    ],
)
def test_words_that_are_no_command_exit_with_2_and_say_which(words: list[str], told: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert f"error: {told}" in capsys.readouterr().err


def test_an_unknown_option_shows_the_usage_of_its_verb(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "a.toml", "--fast"])
    assert capsys.readouterr().err.startswith("usage: bloomery plan ")


# --- exit codes ----------------------------------------------------------------------------------------------------


def test_done_is_0_and_what_the_user_can_fix_is_2_without_a_traceback(call: Call, recipe: Path) -> None:
    assert call("run", recipe)[0] == 0
    code, out, err = call("run", recipe, "make.number=13")
    assert (code, out) == (2, "")
    assert err.splitlines()[-2:] == ["error: make: 13 is no number", "Take another."]
    assert "Traceback" not in err


def test_an_interruption_is_130_and_says_how_to_go_on(call: Call, recipe: Path) -> None:
    code, _, err = call("run", recipe, "make.number=14")
    assert code == 130
    assert re.fullmatch(r"◐ make       stopped after .* s; nothing of it is kept\.", err.splitlines()[-2])
    assert err.splitlines()[-1] == f"Interrupted. Resume: bloomery run {recipe} make.number=14"
    assert "Traceback" not in err


def test_a_fault_of_ours_is_1_with_a_traceback(call: Call, recipe: Path) -> None:
    code, _, err = call("run", recipe, "make.number=15")
    assert code == 1
    assert "Traceback" in err
    assert "ZeroDivisionError: a bug" in err
    assert err.splitlines()[-1].startswith("This is a bug in Bloomery")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "none.toml"], r"none\.toml: no such recipe\nRecipes in that folder: small\.toml"),
        (["run", "small.toml", "make.numbr=3"], r"make\.numbr: unknown key\nDid you mean 'number'\?"),
        (["run", "small.toml", "make"], r"expected key=value, got 'make'"),
        (["run", "small.toml", "--until", "mkae"], r"no stage 'mkae'\nDid you mean 'make'\? Stages: make, double\.$"),
        (["run", "small.toml", "--runs", "small.toml"], r"small\.toml.*: Not a directory\n.*another folder"),
        (["status", "runs/none"], r"runs/none: does not exist .*\n.*bloomery run RECIPE"),
        (["status", "."], r"is not a run folder \(it has no current\.json\)"),
        (["clean", "runs/none"], r"runs/none: does not exist"),
        (["chat", "runs/none"], r"runs/none: does not exist\nUse a run folder"),
        (["chat", "."], r"holds no model"),
        (["eval", "runs/none", "--json"], r"runs/none: does not exist"),
        (["plan", "none.toml", "--json"], r"no such recipe"),
    ],
)
def test_what_a_user_can_get_wrong_is_2_with_the_cure_and_nothing_on_stdout(
    call: Call, recipe: Path, words: list[str], told: str
) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, ""), err
    assert re.search(told, err), err
    assert "Traceback" not in err


def test_naming_a_run_or_a_stage_that_is_not_there_makes_no_run(call: Call, recipe: Path, tmp_path: Path) -> None:
    for verb in ("status", "clean", "chat"):
        call(verb, "runs/none")
    call("run", recipe, "--only", "x")
    assert not (tmp_path / "runs").exists()


def test_the_exit_code_is_that_of_the_process() -> None:
    command = [sys.executable, "-m", "bloomery.cli", "status", "/none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: /none: does not exist")


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m bloomery.cli plan {shlex.quote(str(DEMO))}"
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


# --- run, status, clean --------------------------------------------------------------------------------------------


def test_until_stops_there_and_only_runs_one(call: Call, recipe: Path) -> None:
    stopped = "up to make as you asked. Still to run: double."
    for began in (r"Done in [\d.]+ s", "Up to date"):
        err = call("run", recipe, "--until", "make")[2]
        assert re.search(rf"^{began}, {stopped}$", err, re.MULTILINE), err
        assert re.search(rf"^  Continue +bloomery run {recipe}$", err, re.MULTILINE)
    assert stages(call) == {"make": "done", "double": "waiting"}
    code, _, err = call("run", recipe, "--only", "double")
    assert (code, "runs/small: done in " in err) == (0, True)
    assert stages(call) == {"make": "done", "double": "done"}
    only = call("run", recipe, "make.number=3", "--only", "make")[2]
    assert re.search(r"^Done in [\d.]+ s, only make as you asked. Still to run: double.$", only, re.MULTILINE)
    assert "everything is up to date" in call("run", recipe, "--until", "make")[2]


def test_a_run_says_what_it_will_do_and_a_sentence_for_each_stage(call: Call, recipe: Path) -> None:
    lines = call("run", recipe)[2].splitlines()
    assert lines[0] == f"Bloomery {__version__} · {recipe}"
    assert [line.split()[0] for line in lines[1:5]] == ["run", "machine", "will", "Ctrl-C"]
    assert lines[3] == "  will run  make, double"
    told = [line for line in lines if line.startswith(("▸", "✓"))]
    assert told[0] == "▸ make       runs"
    assert re.fullmatch(r"✓ make       done in 0\.\d s: characters 1\.", told[1])
    assert not any("=" in line for line in lines)
    verbose = call("run", recipe, "make.number=5", "-v")[2]
    assert "\ncharacters=5\n" in verbose
    assert "\nruns/small/01-make-" in verbose


def test_an_up_to_date_run_imports_no_recipe_until_something_that_it_depends_on_changes(
    call: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(*words: str) -> set[str]:
        return set(re.findall(r"^▸ (\w+)", call("run", recipe, *words)[2], re.MULTILINE))

    assert ran() == {"make", "double"}
    loads: list[Path] = []
    load = config.load

    def counted(cls: Any, path: Path, *rest: Any) -> Any:
        loads.append(path)
        return load(cls, path, *rest)

    monkeypatch.setattr(config, "load", counted)
    assert (ran(), ran(), loads) == (set(), set(), [])
    assert (ran("make.number=2"), len(loads)) == ({"make", "double"}, 1)
    assert (ran(), len(loads)) == (set(), 2)  # the folders of the run are those of other settings meanwhile
    folder = json.loads((tmp_path / "runs/small/current.json").read_text())["make"]
    output = tmp_path / "runs/small" / folder / "out.txt"
    output.write_text("another size")
    assert ran() == {"make"}
    assert (ran(), len(loads)) == (set(), 3)
    recipe.write_text(recipe.read_text() + "# a comment\n")
    assert (ran(), len(loads)) == (set(), 4)
    output.unlink()
    assert ran("--until", "make") == {"make"}


@pytest.mark.parametrize(
    "words",
    [
        ["make.number=2", "double.number=3", "--runs", "elsewhere"],
        ["--runs", "elsewhere", "make.number=2", "double.number=3"],
        ["make.number=2", "--runs", "elsewhere", "double.number=3"],
    ],
)
def test_settings_may_stand_before_and_after_options(
    call: Call, recipe: Path, tmp_path: Path, words: list[str]
) -> None:
    assert call("run", recipe, *words)[0] == 0
    made = sorted(path.read_text() for path in (tmp_path / "elsewhere").rglob("out.txt"))
    assert made == ["xx", "xxx"]


def test_settings_win_over_the_recipe_and_are_remembered(call: Call, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text('name = "small"\n[make]\nnumber = 2\n[double]\nnumber = 4\n')
    call("run", recipe, "make.number=7")
    assert (tmp_path / "runs/small/recipe.toml").read_text() == (
        'name = "small"\n\n[make]\nnumber = 7\n\n[double]\nnumber = 4\n'
    )
    assert "everything is up to date" in call("run", tmp_path / "runs/small/recipe.toml")[2]


def test_status_shows_every_stage_on_a_line(call: Call, recipe: Path, tmp_path: Path) -> None:
    call("run", recipe, "--until", "make")
    code, out, _ = call("status", "runs/small")
    first, make, double, last = out.splitlines()
    assert (code, first) == (0, "runs/small: stopped, 1 of 2 stages done")
    assert re.fullmatch(r"✓ make       done in 0\.\d s: characters 1", make)
    assert (double, last) == ("○ double     waiting", "Resume it: bloomery run runs/small/recipe.toml")
    call("run", recipe)
    (next((tmp_path / "runs/small").glob("01-make-*")) / "out.txt").write_text("y")
    assert call("status", "runs/small")[0] == 0  # the size is the same
    code, out, _ = call("status", "runs/small", "--verify")
    assert (code, out.splitlines()[:2]) == (
        2,
        ["runs/small: damaged (make), 1 of 2 stages done", "✗ make       damaged: out.txt has another sha256"],
    )
    assert "Recreate make: rm runs/small/01-make-" in out


def test_status_says_whether_a_run_lives_and_how_far_it_is(call: Call, recipe: Path, tmp_path: Path) -> None:
    call("run", recipe, "--until", "make")
    root = tmp_path / "runs/small"
    folder = root / json.loads((root / "current.json").read_text())["double"]
    folder.mkdir()
    line = {"step": 30, "loss": 2.5, "tokens_per_second": 50.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (root / "recipe.toml").write_text("[double]\nsteps = 120\nglobal_batch_tokens = 100\n")
    far = "step 30 of 120 (25 %), loss 2.50"
    assert call("status", "runs/small")[1].splitlines()[2] == f"◐ double     stopped, {far}"
    alive = f"runs/small: process {os.getpid()} runs double, {far}, 50 tokens/s, 3 min left; 1 of 2 stages done"
    with pipeline.locked(root):
        assert call("status")[1] == f"● {alive}\n"
        found = json.loads(call("status", "runs/small", "--json")[1])
        assert (found["pid"], found["running"], found["stages"][1]["seconds_left"]) == (os.getpid(), "double", 180.0)
    assert call("status")[1] == "◐ runs/small: stopped in double at step 30, 1 of 2 stages done\n"
    assert json.loads(call("status", "--json")[1])["runs"][0]["pid"] is None


def test_a_run_that_cannot_be_read_hides_no_other(call: Call, recipe: Path, tmp_path: Path) -> None:
    call("run", recipe)
    (tmp_path / "runs/torn").mkdir()
    (tmp_path / "runs/torn/current.json").write_text("{")
    code, out, _ = call("status")
    assert (code, len(out.splitlines())) == (2, 2)
    assert re.search(r"^✗ runs/torn: its state cannot be read: .*current\.json", out, re.MULTILINE)
    assert re.search(r"^✓ runs/small: done in", out, re.MULTILINE)
    rows = {Path(one["run"]).name: one for one in json.loads(call("status", "--json")[1])["runs"]}
    assert (rows["small"]["error"], rows["small"]["done"], rows["torn"]["done"]) == ("", True, False)
    assert "current.json" in rows["torn"]["error"]


def test_a_renamed_run_folder_is_finished_where_it_is(call: Call, recipe: Path, tmp_path: Path) -> None:
    call("run", recipe, "--until", "make")
    (tmp_path / "runs/small").rename(tmp_path / "runs/other")
    command = call("status", "runs/other")[1].splitlines()[-1]
    assert command == "Resume it: bloomery run runs/other/recipe.toml name=other"
    code, _, err = call(*command.split()[3:])
    assert code == 0, err
    assert call("status", "runs/other")[1].startswith("runs/other: done in")


def test_watching_ends_with_ctrl_c_and_without_an_error(
    call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("run", recipe)
    looks: list[float] = []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("bloomery.stages.terminal.time.sleep", wait)
    code, out, _ = call("status", "--watch")
    assert (code, looks) == (0, [2.0] * 3)
    assert out.count("✓ runs/small: done in ") == 3


def test_clean_says_what_it_would_move_and_moves_it_when_told(call: Call, recipe: Path, tmp_path: Path) -> None:
    call("run", recipe)
    assert "nothing to free" in call("clean", "runs/small")[1]
    old = sorted(path for path in (tmp_path / "runs/small").iterdir() if path.is_dir())
    call("run", recipe, "make.number=9")
    code, out, _ = call("clean", "runs/small")
    assert code == 0
    assert "--yes moves it to .trash" in out
    assert all(path.exists() and path.name in out for path in old)
    told = json.loads(call("clean", "runs/small", "--json")[1])
    assert {Path(one["path"]).name for one in told["waste"]} == {path.name for path in old}
    assert (told["moved_bytes"], told["freed_bytes"], told["restore"]) == (0, 0, [])
    code, out, _ = call("clean", "runs/small", "--yes")
    assert code == 0
    assert not any(path.exists() for path in old)
    assert stages(call) == {"make": "done", "double": "done"}
    commands = out[out.index("To restore it:\n") :].splitlines()[1:]
    assert len(commands) == 1
    subprocess.run(["sh", "-c", commands[0]], check=True, cwd=tmp_path)
    assert all(path.exists() for path in old)
    moved = json.loads(call("clean", "runs/small", "--yes", "--json")[1])
    assert moved["moved_bytes"] == sum(one["bytes"] for one in told["waste"]) > 0
    assert (moved["freed_bytes"], len(moved["restore"])) == (0, 1)
    freed = json.loads(call("clean", "runs/small", "--now", "--json")[1])["freed_bytes"]
    assert freed >= moved["moved_bytes"]
    assert list((tmp_path / "runs/small/.trash").iterdir()) == []
    assert stages(call) == {"make": "done", "double": "done"}


@pytest.mark.parametrize("flags", [["--yes"], ["--now"], ["--yes", "--now"]])
def test_clean_removes_nothing_where_current_json_names_nothing(
    call: Call, recipe: Path, tmp_path: Path, flags: list[str]
) -> None:
    call("run", recipe)
    call("run", recipe, "make.number=9")
    root = tmp_path / "runs/small"
    (root / "current.json").write_text("{}")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    code, out, err = call("clean", "runs/small", *flags)
    assert (code, out) == (2, "")
    assert "names no stage" in err
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_in_progress_is_not_cleaned(call: Call, recipe: Path, tmp_path: Path) -> None:
    call("run", recipe)
    with locked(tmp_path / "runs/small"):
        code, _, err = call("clean", "runs/small", "--now")
    assert code == 2
    assert "is running in it" in err


def test_status_of_a_damaged_manifest_shows_it_and_a_run_makes_it_again(
    call: Call, recipe: Path, tmp_path: Path
) -> None:
    call("run", recipe)
    path = next((tmp_path / "runs/small").glob("01-make-*/manifest.json"))
    path.write_text('{"outputs": 5}')
    code, out, err = call("status", "runs/small")
    assert code == 2
    assert re.search(r"make +damaged: manifest\.json cannot be read", out)
    assert re.search(r"double +done", out)
    assert "Traceback" not in err
    code, _, err = call("run", recipe)
    assert code == 0
    assert "make runs again: manifest.json cannot be read" in err
    assert stages(call) == {"make": "done", "double": "done"}


# --- stdout and stderr that lead nowhere ---------------------------------------------------------------------------

PROCESS = """
import sys
from tests import two_stages
import bloomery.recipe
from bloomery import cli
bloomery.recipe.STAGES, bloomery.recipe.Recipe = two_stages.STAGES, two_stages.Recipe
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "asked", "code", "how"),
    [
        (16, signal.SIGTERM, 143, "Ended as asked"),
        (17, signal.SIGTERM, 143, "Ended as asked"),
        (16, signal.SIGINT, 130, "Interrupted"),
    ],
)
def test_a_signal_in_a_data_stage_ends_it_in_order_with_its_workers_and_the_command_that_resumes(
    recipe: Path, tmp_path: Path, number: int, asked: signal.Signals, code: int, how: str
) -> None:
    os.mkfifo(tmp_path / "started")
    started = os.open(tmp_path / "started", os.O_RDWR)  # also for writing: no worker that ends closes it
    words = ["run", str(recipe), f"make.number={number}", "--runs", str(tmp_path / "runs")]
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "STARTED": str(tmp_path / "started")}
    with subprocess.Popen(
        [sys.executable, "-c", listening + PROCESS, *words], stderr=subprocess.PIPE, env=env
    ) as process:
        try:
            pids = b""
            while pids.count(b"\n") < number - 15:
                assert select.select([started], [], [], 60)[0], "no worker has started"
                pids += os.read(started, 100)
            process.send_signal(asked)
            told = process.communicate(timeout=60)[1].decode()
        finally:
            process.kill()
            os.close(started)
    assert process.returncode == code
    assert f"\n{how}. Resume: bloomery run {recipe} make.number={number} --runs {tmp_path / 'runs'}\n" in told
    assert re.search(r"make +stopped after", told)
    assert "Traceback" not in told
    assert [file.read_text() for file in tmp_path.glob("runs/small/*/left.txt")] == ["in order"]
    for pid in map(int, pids.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def shell(folder: Path, words: str, streams: str) -> tuple[int, str, str]:
    """A command whose streams are redirected by a shell; returns its exit code, stdout and stderr."""
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(PROCESS)} {words} {streams}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=folder, env=env)
    return done.returncode, done.stdout, done.stderr


FULL = [
    ("run small.toml", "> /dev/full", 0),
    ("run small.toml", "2> /dev/full", 0),
    ("run small.toml", "> /dev/full 2>&1", 0),
    ("run small.toml", ">&- 2>&-", 0),
    ("run small.toml", "<&- >&- 2>&-", 0),
    ("run small.toml make.number=13", "> /dev/full 2>&1", 2),
    ("run small.toml make.number=15", "> /dev/full 2>&1", 1),
    ("status runs/done", "> /dev/full", 2),
    ("status runs/done --json", "> /dev/full 2>&1", 2),
    ("status runs/done --json", ">&-", 0),
    ("clean runs/done", "> /dev/full", 2),
    ("clean runs/done --yes --json", "> /dev/full", 2),
    ("--help", "> /dev/full", 2),
    ("run --help", ">&- 2>&-", 0),
    ("fly", "2> /dev/full", 2),
    ("--help", "| true; exit ${PIPESTATUS[0]}", 0),
]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(("words", "streams", "code"), FULL)
def test_streams_that_are_full_or_closed_are_no_fault_of_ours_and_end_no_run(
    call: Call, recipe: Path, tmp_path: Path, words: str, streams: str, code: int
) -> None:
    call("run", recipe, "--runs", "runs")
    (tmp_path / "runs/small").rename(tmp_path / "runs/done")
    found, out, err = shell(tmp_path, words, streams)
    assert found == code, err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert out == ""
    if code == 2 and "2>" not in streams and "> /dev/full" in streams:
        assert "standard output: cannot be written: No space left on device\nRedirect it to a disk" in err
    if words == "run small.toml":
        assert stages(call) == {"make": "done", "double": "done"}


def test_a_file_that_is_opened_takes_the_place_of_no_closed_stream(tmp_path: Path) -> None:
    """Else what a library writes to descriptor 2 lands in a checkpoint."""
    code = (
        "from bloomery.core import errors; errors.open_closed(); import os; f = open('a', 'w'); "
        "os.write(2, b'noise'); os.write(1, b'noise'); f.write(str(f.fileno())); import sys; sys.stdin.read()"
    )
    subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} <&- >&- 2>&-"], check=True, cwd=tmp_path
    )
    assert int((tmp_path / "a").read_text()) > 2


def test_what_the_encoding_of_stdout_lacks_is_shown_as_its_number() -> None:
    code = "from bloomery.core import errors; errors.show_every_character(); print('\\xe4 \\udcff')"
    words, surroundings = [sys.executable, "-c", code], {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert subprocess.run(words, check=True, capture_output=True, env=surroundings).stdout == b"\\xe4 \\udcff\n"


@pytest.mark.slow
def test_a_reader_of_stderr_that_leaves_ends_no_run(recipe: Path, tmp_path: Path, call: Call) -> None:
    assert shell(tmp_path, "run small.toml", "2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}")[0] == 0
    assert stages(call) == {"make": "done", "double": "done"}


# --- reports -------------------------------------------------------------------------------------------------------


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    """An untrained model that can be asked."""
    return model(tmp_path / "model", context=300)


@pytest.mark.slow
def test_every_verb_that_reports_prints_one_json_object_and_nothing_else(
    call: Call, recipe: Path, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("run", recipe)
    monkeypatch.setattr(doctor, "examine", lambda host, runs: [Finding(id="gpu", status="ok", value="none")])
    words = {
        "status": ["runs/small"],
        "clean": ["runs/small"],
        "doctor": [],
        "eval": [str(talker), "--toy-questions", "3"],
    }
    words |= {"export": [str(talker), "exported"], "import": [str(talker), "imported"]}
    for verb in sorted(set(REPORTS) - {"plan"}):
        code, out, _ = call(verb, *words[verb], "--json")
        assert code == 0, verb
        assert out.count("\n") == 1, verb
        assert isinstance(json.loads(out), dict), verb


def test_doctor_exits_with_what_it_found(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [Finding(id="torch", status="fail", value="none", hint="Install it.")]
    monkeypatch.setattr(doctor, "findings", lambda host, runs, retry, quick: [("Torch", one) for one in bad])
    code, out, _ = call("doctor", "--json")
    assert code == json.loads(out)["exit"] == doctor.exit_code(bad) == 2
    code, out, _ = call("doctor")
    assert code == 2
    assert "Install it." in out


def test_eval_asks_as_many_questions_as_told_and_shows_every_kind(call: Call, talker: Path) -> None:
    found = json.loads(call("eval", talker, "--toy-questions", "3", "--json")[1])["answers"]
    assert (found["n"], found["exact"]) == (3, 0.0)
    code, out, _ = call("eval", talker, "--toy-questions", "3")
    assert code == 0
    assert all(kind in out for kind in found["by_kind"])
    assert re.search(r"^all .*of 3", out, re.MULTILINE)


# --- chat ----------------------------------------------------------------------------------------------------------


def test_chat_answers_prompts_and_ends(call: Call, talker: Path) -> None:
    code, out, _ = call("chat", talker, "--prompt", "Hi", "--prompt", "Ho", "--max-tokens", "4")
    assert code == 0
    assert out.startswith("> Hi\n")
    assert "\n> Ho\n" in out
    again = call("chat", talker, "--prompt", "Hi", "--prompt", "Ho", "--max-tokens", "4")[1]
    assert again == out
    drawn = [
        call("chat", talker, "--prompt", "Hi", "--temperature", "9", "--seed", seed)[1] for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_conversation_goes_on_until_a_reset_and_a_message_that_does_not_fit_is_taken_back(
    call: Call, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["Hi", "Ho", "", "/reset", "Hi", "word " * 400, "Hi"]
    heard: list[list[str]] = []
    whole = TextAnswerer.answer

    def listening(self: TextAnswerer, messages: Any, sampling: Any, *, drops: bool) -> StreamedAnswer:
        heard.append([message["content"] for message in messages if message["role"] == "user"])
        return whole(self, messages, sampling, drops=drops)

    def read(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(TextAnswerer, "answer", listening)
    code, _, err = call("chat", talker, "--max-tokens", "3")
    assert code == 0
    assert heard == [["Hi"], ["Hi", "Ho"], ["Hi"], ["Hi", "word " * 400], ["Hi", "Hi"]]
    assert err.count("(new conversation") == 1
    assert "has a context of 300" in err


# --- commands that errors propose -----------------------------------------------------------------------------------

COMMAND = re.compile(r"bloomery (?:" + "|".join(cli.VERBS).strip("|") + r")\b[^`\n#;]*")


def proposed() -> list[tuple[str, str]]:
    """Every command in the text of a fix, with its file. A placeholder stands for each value."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            fixes: list[ast.expr] = []
            if isinstance(node, ast.keyword) and node.arg == "hint":
                fixes = [node.value]
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                named = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
                fixes = [node.value] if named & {"hint", "LESS_MEMORY"} else []
            for fix in fixes:
                found += [(path.name, words) for words in COMMAND.findall(text_of(fix))]
    return found


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "8" for part in node.values)
    return "\n".join(text_of(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


@pytest.mark.slow
def test_every_command_that_an_error_proposes_is_one() -> None:
    commands = proposed()
    assert len(commands) > 10
    for file, command in commands:
        words = shlex.split(command.replace("bloomery data 8", "bloomery data filter"))[1:]
        try:
            cli.parse(words)
        except SystemExit:
            pytest.fail(f"{file}: {command}")


def test_serve_takes_its_token_from_a_flag_or_the_environment_and_needs_it_where_others_reach_it(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOOMERY_TOKEN", raising=False)
    code, _, err = call("serve", "--runs", tmp_path, "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert re.search(r"For example: BLOOMERY_TOKEN=\w{32} bloomery serve --host 0\.0\.0\.0", err)
    for flag in (["--token", "short"], ["--token", ""]):
        code, _, err = call("serve", "--runs", tmp_path, *flag)
        assert (code, "it needs at least 16" in err) == (2, True)
    tokens: list[Any] = []
    monkeypatch.setattr("bloomery.serve.server.serve", lambda models, host, port, token: tokens.append(token))
    monkeypatch.setenv("BLOOMERY_TOKEN", "of the environment")
    assert call("serve", "--runs", tmp_path)[0] == 0
    assert call("serve", "--runs", tmp_path, "--token", "of the flag")[0] == 0
    monkeypatch.setenv("BLOOMERY_TOKEN", "")
    assert call("serve", "--runs", tmp_path)[0] == 0
    assert tokens == ["of the environment", "of the flag", None], "an empty variable is none"
