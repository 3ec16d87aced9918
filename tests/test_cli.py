import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bloomery import arguments, cli
from bloomery.core.config import Config
from bloomery.core.errors import DataError
from bloomery.core.stage import Stage
from bloomery.hw.doctor import report as doctor
from bloomery.hw.doctor.finding import Finding
from tests.weights.made import model

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes" / "demo.toml"


def verbs() -> dict[str, argparse.ArgumentParser]:
    for action in arguments.parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError


VERBS = verbs()
REPORTS = [name for name, verb in VERBS.items() if "--json" in verb.format_usage()]

# --- a small recipe of two stages ----------------------------------------------------------------------------------


class Section(Config):
    number: int = 1


class Recipe(Config):
    name: str
    make: Section = Section()
    double: Section = Section()


def work(config: Section, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    if config.number == 13:
        raise DataError("13 is no number", where="make", cure="Take another.")
    if config.number == 14:
        raise KeyboardInterrupt
    if config.number == 15:
        raise ZeroDivisionError("a bug")
    (out / "out.txt").write_text("x" * config.number)
    return {"characters": config.number}


HERE = "tests.test_cli"
STAGES = (Stage(name="make", run=f"{HERE}:work"), Stage(name="double", run=f"{HERE}:work", after=("make",)))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe file in the folder that commands run in."""
    monkeypatch.setattr("bloomery.recipe.STAGES", STAGES)
    monkeypatch.setattr("bloomery.recipe.Recipe", Recipe)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text('name = "small"\n')
    return path


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """A verb with its arguments -> exit code, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def stages(call: Call) -> dict[str, str]:
    return {one["stage"]: one["state"] for one in json.loads(call("status", "runs/small", "--json")[1])["stages"]}


# --- help ----------------------------------------------------------------------------------------------------------


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
    example = re.search(r"Example: bloomery (.*)$", text)
    assert example
    words = shlex.split(example[1])
    assert words[0] == verb
    assert callable(cli.VERBS[arguments.parse(words).verb])
    assert f"usage: bloomery {verb} " in text
    for action in VERBS[verb]._actions:
        assert action.help, f"{verb}: {action.dest} explains nothing"


def test_without_a_verb_there_is_help(call: Call) -> None:
    code, out, _ = call()
    assert code == 0
    assert all(verb in out for verb in VERBS)
    assert "bloomery run recipes/demo.toml" in out
    assert out.startswith("usage: bloomery [-h] [--version] VERB ...\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fly"], "there is no verb 'fly'\nVerbs: run, plan, status, "),
        (["statsu", "runs/a"], "there is no verb 'statsu'\nDid you mean 'status'?"),
        (["run"], "the following arguments are required: RECIPE\n"),
        (["status"], "the following arguments are required: RUN\n"),
        (["chat"], "the following arguments are required: MODEL\n"),
        (["status", "a", "b=c"], "unrecognized arguments: b=c"),
        (["run", "a.toml", "--fast"], "unrecognized arguments: --fast"),
        (["eval", "a", "--questions", "many"], "argument --questions: 'many' is no whole number"),
        (["run", "a.toml", "--until", "a", "--only", "a"], "argument --only: not allowed with argument --until"),
    ],
)
def test_words_that_are_no_command_exit_with_2_and_say_which(words: list[str], told: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert f"error: {told}" in capsys.readouterr().err


# --- exit codes ----------------------------------------------------------------------------------------------------


def test_done_is_0_and_what_the_user_can_fix_is_2_without_a_traceback(call: Call, recipe: Path) -> None:
    assert call("run", recipe)[0] == 0
    code, out, err = call("run", recipe, "make.number=13")
    assert (code, out) == (2, "")
    assert err.splitlines()[-2:] == ["DataError: make: 13 is no number", "Take another."]
    assert "Traceback" not in err


def test_an_interruption_is_130_and_says_how_to_go_on(call: Call, recipe: Path) -> None:
    code, _, err = call("run", recipe, "make.number=14")
    assert code == 130
    assert err.splitlines()[-1] == "interrupted; the same command goes on from here"
    assert "Traceback" not in err


def test_a_fault_of_ours_is_1_with_a_traceback(call: Call, recipe: Path) -> None:
    code, _, err = call("run", recipe, "make.number=15")
    assert code == 1
    assert "Traceback" in err
    assert "ZeroDivisionError: a bug" in err
    assert err.splitlines()[-1].startswith("This is a fault of Bloomery's, not yours.")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "none.toml"], r"none\.toml: no such recipe\nRecipes in that folder: small\.toml"),
        (["run", "small.toml", "make.numbr=3"], r"make\.numbr: unknown key\nDid you mean 'number'\?"),
        (["run", "small.toml", "mkae.number=3"], r"mkae: unknown key\nDid you mean 'make'\?"),
        (["run", "small.toml", "make.number=three"], r"make\.number: .*got 'three'"),
        (["run", "small.toml", "make"], r"expected key=value, got 'make'"),
        (["run", "small.toml", "--until", "mkae"], r"no stage 'mkae'\nDid you mean 'make'\? Stages: make, double\.$"),
        (["run", "small.toml", "--only", "x"], r"there is no stage 'x'\nStages: make, double\.$"),
        (["run", "small.toml", "--only", "double"], r"its input make is not done .*\n.*--until make"),
        (["run", "small.toml", "--runs", "small.toml"], r"small\.toml.*: Not a directory\n.*another folder"),
        (["status", "runs/none"], r"runs/none: does not exist .*\n.*bloomery run RECIPE"),
        (["status", "."], r"is no run folder \(it has no current\.json\)"),
        (["clean", "runs/none"], r"runs/none: does not exist"),
        (["chat", "runs/none"], r"runs/none: does not exist\nName a run folder"),
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
    assert done.stderr.startswith("RunError: /none: does not exist")


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


def test_a_run_runs_once_and_then_is_fresh(call: Call, recipe: Path) -> None:
    assert "runs/small: done" in call("run", recipe)[2]
    assert "everything is fresh, nothing to do" in call("run", recipe)[2]
    assert stages(call) == {"make": "done", "double": "done"}


def test_until_stops_there_and_only_runs_one(call: Call, recipe: Path) -> None:
    stopped = "runs/small: stopped after make, as asked; 1 stage to go: double"
    for _ in range(2):
        assert call("run", recipe, "--until", "make")[2].splitlines()[-1] == stopped
    assert stages(call) == {"make": "done", "double": "waiting"}
    code, _, err = call("run", recipe, "--only", "double")
    assert (code, err.splitlines()[-1]) == (0, "runs/small: done")
    assert stages(call) == {"make": "done", "double": "done"}
    only = call("run", recipe, "make.number=3", "--only", "make")[2].splitlines()[-1]
    assert only == "runs/small: only make, as asked; 1 stage to go: double"
    assert "everything is fresh" in call("run", recipe, "--until", "make")[2]


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
    assert "everything is fresh" in call("run", tmp_path / "runs/small/recipe.toml")[2]


def test_status_shows_every_stage_on_a_line(call: Call, recipe: Path, tmp_path: Path) -> None:
    call("run", recipe, "--until", "make")
    code, out, _ = call("status", "runs/small")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [["make", "done"], ["double", "waiting"]]
    assert "characters=1" in out.splitlines()[0]
    (next((tmp_path / "runs/small").glob("01-make-*")) / "out.txt").write_text("y")
    assert "sha256" not in call("status", "runs/small")[1]
    assert re.match(r"make +damaged .*out\.txt has another sha256\n", call("status", "runs/small", "--verify")[1])


def test_clean_says_what_it_would_free_and_frees_it_when_told(call: Call, recipe: Path, tmp_path: Path) -> None:
    call("run", recipe)
    assert "nothing to free" in call("clean", "runs/small")[1]
    old = sorted(path for path in (tmp_path / "runs/small").iterdir() if path.is_dir())
    call("run", recipe, "make.number=9")
    code, out, _ = call("clean", "runs/small")
    assert code == 0
    assert "would be freed by --yes" in out
    assert all(path.exists() and path.name in out for path in old)
    told = json.loads(call("clean", "runs/small", "--json")[1])
    assert {Path(one["path"]).name for one in told["waste"]} == {path.name for path in old}
    assert told["freed_bytes"] == 0
    freed = json.loads(call("clean", "runs/small", "--yes", "--json")[1])["freed_bytes"]
    assert freed == sum(one["bytes"] for one in told["waste"]) > 0
    assert not any(path.exists() for path in old)
    assert stages(call) == {"make": "done", "double": "done"}


# --- reports -------------------------------------------------------------------------------------------------------


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    """An untrained model that can be asked."""
    return model(tmp_path / "model", context=300)


def test_every_verb_that_reports_prints_one_json_object_and_nothing_else(
    call: Call, recipe: Path, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("run", recipe)
    monkeypatch.setattr(doctor, "examine", lambda host, runs: [Finding(id="gpu", status="ok", value="none")])
    words = {"status": ["runs/small"], "clean": ["runs/small"], "doctor": [], "eval": [str(talker), "--questions", "3"]}
    words |= {"export": [str(talker), "exported"], "import": [str(talker), "imported"]}
    for verb in sorted(set(REPORTS) - {"plan"}):
        code, out, _ = call(verb, *words[verb], "--json")
        assert code == 0, verb
        assert out.count("\n") == 1, verb
        assert isinstance(json.loads(out), dict), verb


def test_a_plan_says_what_will_run_and_what_it_needs(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("plan", DEMO, "--runs", tmp_path, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["recipe"] == "demo"
    assert [one["stage"] for one in facts["stages"]][-1] == "evaluate"
    assert not any(one["fresh"] for one in facts["stages"])
    assert facts["pretrain"]["parameters"] == facts["finetune"]["parameters"] == 4_000_000
    assert facts["pretrain"]["peak_bytes"] > facts["pretrain"]["weights_bytes"] == 16_000_000
    assert list(tmp_path.iterdir()) == []
    text = call("plan", DEMO, "--runs", tmp_path, "pretrain.steps=7", "pretrain.tokens_per_step=1000")[1]
    assert "pretrain: 4,000,000 parameters, 5,376 tokens" in text


def test_doctor_exits_with_what_it_found(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [Finding(id="torch", status="fail", value="none", cure="Install it.")]
    monkeypatch.setattr(doctor, "examine", lambda host, runs: bad)
    code, out, _ = call("doctor", "--json")
    assert code == json.loads(out)["exit"] == doctor.exit_code(bad) == 2
    code, out, _ = call("doctor")
    assert code == 2
    assert "Install it." in out


def test_eval_asks_as_many_questions_as_told_and_shows_every_kind(call: Call, talker: Path) -> None:
    found = json.loads(call("eval", talker, "--questions", "3", "--json")[1])["answers"]
    assert (found["n"], found["exact"]) == (3, 0.0)
    code, out, _ = call("eval", talker, "--questions", "3")
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


def test_a_conversation_goes_on_until_an_empty_line_or_the_end_of_the_context(
    call: Call, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["Hi", "Ho", "", "Hi", "word " * 400, "Hi"]
    heard: list[list[str]] = []
    whole = cli._say_answer

    def listening(model: Any, messages: Any, options: Any) -> str:
        heard.append([message["content"] for message in messages if message["role"] == "user"])
        return whole(model, messages, options)

    def read(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(cli, "_say_answer", listening)
    code, _, err = call("chat", talker, "--max-tokens", "3")
    assert code == 0
    assert heard == [["Hi"], ["Hi", "Ho"], ["Hi"], ["Hi", "word " * 400], ["Hi"]]
    assert err.count("(new conversation)") == 2
    assert "has a context of 300" in err
