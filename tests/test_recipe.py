import inspect
import json
import re
import shlex
import sys
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest

from bloomery import checks, cli, recipe
from bloomery.core import config
from bloomery.core.errors import ConfigError, RunError
from bloomery.core.pipeline import Stage, check_sections, plan_stages, remember
from bloomery.data import documents
from bloomery.hw.launcher import PROCESSES_A_CORE, cores
from bloomery.recipe import STAGES, Recipe
from bloomery.tokenizer.config import ByteBpe, Imported, SentencePiece
from tests.calling import Call

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes" / "demo.toml"
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
PARALLEL = ("fetch", "filter", "dedup", "shard")
"""Sections of the stages that work on parts."""


def test_every_stage_is_a_section_of_the_recipe_and_in_its_order() -> None:
    assert [stage.name for stage in STAGES] == [name for name in Recipe.model_fields if name not in ("name", "engine")]
    assert [stage.name for stage in STAGES] == re.findall(r"^    (\w+) +\S", recipe.__doc__ or "", re.MULTILINE)


def test_every_check_is_called() -> None:
    written = [one for one in vars(checks).values() if inspect.isfunction(one) and one.__module__ == checks.__name__]
    helpers = {checks.skipped, checks.start_shape}
    of_recipes = [one for one in written if list(inspect.signature(one).parameters) == ["recipe"]]
    assert [one for one in of_recipes if one.__name__[0] != "_" and one not in helpers] == [
        checks.resolve,
        *checks.CHECKS,
    ]


def test_a_stage_follows_only_stages_before_it() -> None:
    seen: set[str] = set()
    for stage in STAGES:
        assert set(stage.after) <= seen, stage.name
        seen.add(stage.name)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: str(stage.name))
def test_every_path_of_a_stage_leads_to_a_function_that_takes_its_section(stage: Stage) -> None:
    declared = Recipe.model_fields[stage.name].annotation
    options = [one for one in get_args(declared) if one is not NoneType]
    section = options[0] if NoneType in get_args(declared) else declared
    run = inspect.signature(stage.runner())
    assert list(run.parameters) == ["config", "inputs", "out"]
    assert run.parameters["config"].annotation is section
    for name, known in (("external_inputs", [section]), ("is_incomplete", [section, Path])):
        if function := getattr(stage.code, name, None):
            taken = [one.annotation for one in inspect.signature(function).parameters.values()]
            for one, expected in zip(taken, known, strict=True):
                assert one == expected or expected in get_args(one)


def test_one_rate_on_the_command_line_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'name = "a"\nfetch = {}\npretrain = {steps = 1, global_batch_tokens = 512}\n'
        "finetune = {steps = 8, global_batch_tokens = 512}\n"
    )
    before, after = (
        config.plain(config.load(Recipe, tmp_path / "a.toml", settings))
        for settings in ([], ["pretrain.optimizer.learning_rate=0.5", "finetune.schedule.warmup_steps=7"])
    )
    before["pretrain"]["optimizer"]["learning_rate"] = 0.5
    before["finetune"]["schedule"]["warmup_steps"] = 7
    assert after == before


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.name))
def test_the_commands_above_a_recipe_have_the_sections_that_they_need(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    verb = "plan" if "[finetune.mesh]" in text else "run"  # nobody has the machine
    found = re.findall(rf"^# +bloomery {verb} recipes/{path.name}(?: --until (\w+))?", text, re.MULTILINE)
    assert found
    assert verb == "run" or "bloomery run recipes" not in text
    for until in found:
        check_sections(STAGES, config.load(Recipe, path), until=until or None)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.name))
def test_every_recipe_loads_and_survives_being_written(path: Path, tmp_path: Path) -> None:
    loaded = config.load(Recipe, path)
    assert loaded.name == path.stem
    copy = tmp_path / "recipe.toml"
    copy.write_text(config.to_toml(config.plain(loaded)), encoding="utf-8")
    assert config.load(Recipe, copy) == loaded
    assert not loaded.synthesize.enabled


def test_the_engine_of_a_recipe_is_that_of_its_stages_but_for_those_that_say_otherwise(tmp_path: Path) -> None:
    steps = "{steps = 1, global_batch_tokens = 512}"
    text = f'name = "a"\npretrain = {steps}\nfinetune = {steps}\n'
    (tmp_path / "a.toml").write_text(text + "[fetch]\n[dedup.engine]\nworkers = 5\n")
    loaded = config.load(Recipe, tmp_path / "a.toml", ["engine.workers=3"])
    found = {name: getattr(loaded, name).engine.workers for name in PARALLEL}
    assert found == {**dict.fromkeys(PARALLEL, 3), "dedup": 5}
    assert config.build(Recipe, config.plain(loaded)) == loaded


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ((), ByteBpe),
        (("tokenizer.vocab_size=999", "tokenizer.pattern=gpt2"), ByteBpe),
        (("tokenizer.kind=sentencepiece", "tokenizer.vocab_size=999"), SentencePiece),
        (('tokenizer={kind="import", path="somewhere"}',), Imported),
    ],
)
def test_a_tokenizer_without_a_kind_is_a_byte_level_bpe(settings: tuple[str, ...], kind: type[config.Config]) -> None:
    made = config.load(Recipe, DEMO, settings).tokenizer
    assert type(made) is kind
    if len(settings) == 2:
        assert isinstance(made, ByteBpe | SentencePiece)
        assert (made.vocab_size, made.sample_bytes) == (999, 6_000_000)


# --- recipes that end before training ------------------------------------------------------------------------------


@pytest.fixture
def text_only(tmp_path: Path) -> Path:
    """A recipe of documents alone, and its text."""
    for number in range(200):
        words = " ".join(f"word{(number * place) % 97} of line {place}" for place in range(80))
        (tmp_path / "texts" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Document {number}. {words}\n")
    path = tmp_path / "text.toml"
    source = f'kind = "folder"\nname = "notes"\ndomain = "prose"\npath = {json.dumps(str(tmp_path / "texts"))}\n'
    path.write_text(
        f'name = "text"\n[engine]\nworkers = 1\n[[fetch.sources]]\n{source}[tokenizer]\nvocab_size = 300\n'
        "[classify]\ntest_fraction = 0.3\nfeatures = 1024\n"
    )
    return path


@pytest.mark.slow
def test_a_recipe_without_training_runs_to_its_shards_and_all_that_tells_of_it_works(
    text_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    assert cli.main(["run", str(text_only), *runs, "--until", "shard"]) == 0
    root = tmp_path / "runs" / "text"
    assert "Data mix" in (root / "report.html").read_text()
    assert json.loads((root / "data_card.json").read_text())["mix"]["prose"]["tokens"] > 0
    capsys.readouterr()
    assert cli.main(["status", str(root), "--json"]) == 0
    states = {one["stage"]: one["state"] for one in json.loads(capsys.readouterr().out)["stages"]}
    assert states == {
        **dict.fromkeys(("fetch", "classify", "filter", "dedup", "tokenizer", "shard"), "done"),
        **dict.fromkeys(("synthesize", "instruct"), "waiting"),
    }
    for told in (text_only, root / "recipe.toml"):
        assert cli.main(["plan", str(told), *runs, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert [one["stage"] for one in facts["stages"] if one["fresh"]] == list(states)[:6]
        needed = {"pretrain": ["pretrain"], "finetune": ["pretrain", "finetune"], "evaluate": ["pretrain", "finetune"]}
        assert facts["missing_sections"] == needed
    assert cli.main(["plan", str(text_only), *runs]) == 0
    assert "finetune, evaluate: the recipe has no [pretrain] and [finetune]" in " ".join(
        capsys.readouterr().out.split()
    )
    assert cli.main(["run", str(root / "recipe.toml"), *runs, "--until", "shard"]) == 0
    assert "everything is up to date, nothing to do" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["status", str(root)]) == 0
    lines = capsys.readouterr().out
    assert "done in" in lines
    assert "Resume it" not in lines


@pytest.mark.parametrize(
    ("settings", "words", "told"),
    [
        ([], [], "stage pretrain: the recipe has no section [pretrain], which it needs"),
        ([], ["--until", "finetune"], "stage finetune: the recipe has no section [pretrain] and [finetune]"),
        ([], ["--only", "pretrain"], "or stop earlier: --until shard or --until instruct"),
        (
            ["pretrain.steps=1", "pretrain.global_batch_tokens=512"],
            [],
            "stage finetune: the recipe has no section [finetune], which it needs\n"
            "Add [finetune] to the recipe, or stop earlier: --until pretrain or --until instruct",
        ),
    ],
)
def test_a_run_that_comes_to_a_stage_without_its_section_stops_before_it_begins(
    text_only: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    words: list[str],
    told: str,
) -> None:
    assert cli.main(["run", str(text_only), "--runs", str(tmp_path / "runs"), *settings, *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_missing_package_of_a_sink_is_told_before_the_first_stage_and_only_where_it_would_be_used(
    text_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    sinks = 'pretrain.sinks=[{kind = "tensorboard"}, {kind = "wandb"}]'
    command = ["run", str(text_only), "--runs", str(tmp_path / "runs"), "pretrain.steps=1", sinks]
    command += ["pretrain.global_batch_tokens=512"]
    assert cli.main([*command, "--until", "pretrain"]) == 2
    told = capsys.readouterr().err
    assert "\nerror: packages that the recipe needs are not installed:\n  wandb (for pretrain.sinks.1)" in told
    assert "pip install 'bloomery[wandb]'" in told
    assert cli.main([*command, "--until", "fetch"]) == 0


def test_a_corpus_too_small_for_a_classifier_goes_on_without_one_unless_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    said = [
        f"Speech {n} in town. " + " ".join(f"word{n * place % 23} and {place}" for place in range(30))
        for n in range(12)
    ]
    (tmp_path / "texts" / "all.txt").write_text("\n\n".join(said))
    source = f'kind = "folder"\nname = "notes"\ndomain = "prose"\npath = {json.dumps(str(tmp_path / "texts"))}\n'
    path = tmp_path / "one.toml"
    head = 'name = "one"\n[engine]\nworkers = 1\n'
    path.write_text(f"{head}[[fetch.sources]]\n{source}[tokenizer]\nvocab_size = 300\n")

    def ran(runs: str, *words: str) -> tuple[int, str]:
        code = cli.main(["run", str(path), "--runs", str(tmp_path / runs), "--until", "shard", *words])
        return code, capsys.readouterr().err

    code, err = ran("runs", "shard.val_fraction=0")
    assert code == 0
    assert "skipped 'quality'" in err
    kept = next((tmp_path / "runs" / "one").glob("03-filter-*")) / "kept"
    assert [row["score"] for row in documents.read(kept, ["score"])] == [None]
    assert "quality was skipped: the part" in (tmp_path / "runs" / "one" / "report.html").read_text()
    own = ["run", str(tmp_path / "runs" / "one" / "recipe.toml"), "--runs", str(tmp_path / "again"), "--until", "shard"]
    assert cli.main(own) == 0
    assert "skipped 'quality'" in capsys.readouterr().err
    code, err = ran("runs")
    assert code == 2
    assert "Raise shard.val_fraction (up to 0.1), or fetch more documents; one text becomes many" in err
    assert ran("runs", 'fetch.sources.0.separator="\\n\\n"', "shard.val_fraction=0.1")[0] == 0
    for asked, runs in (  # where nothing is done yet, and where it was done without
        ("classify.seed=0", "other"),
        ("classify.seed=0", "runs"),
        ("filter.min_score=0.1", "runs"),
        ("classify.required=true", "runs"),
    ):
        code, err = ran(runs, asked, "shard.val_fraction=0")
        assert code == 2
        assert "classify, classifier 'quality': the part of the examples that measures has 0 positive" in err
        assert "about 51 documents are enough" in err
    assert ran("runs", "shard.val_fraction=0")[0] == 0
    only = ["run", str(path), "--runs", str(tmp_path / "runs"), "--only", "filter", "filter.min_score=0.1"]
    assert cli.main(only) == 2
    assert "a threshold needs scores, but 'quality' was not trained: the part" in capsys.readouterr().err
    code, err = ran("contrary", "classify.required=false", "filter.min_score=0.1")
    assert (code, "remove classify.required=false" in err) == (2, True)


@pytest.mark.parametrize("asked", [None, "classify.seed=0", "classify.required=false", "classify.required=true"])
def test_the_recipe_of_a_run_asks_for_classifiers_as_its_recipe_did(tmp_path: Path, asked: str | None) -> None:
    given, own, limit = tmp_path / "given.toml", tmp_path / "recipe.toml", "filter.min_score=0.5"
    given.write_text('name = "a"\n[[fetch.sources]]\nkind = "folder"\nname = "b"\ndomain = "c"\npath = "d"\n')
    settings = [asked] if asked else []
    first = config.load(Recipe, given, settings)
    assert first.classify.required is (asked in ("classify.seed=0", "classify.required=true"))
    remember(tmp_path, first, [])
    again = config.load(Recipe, own)
    assert (again, again.classify.required) == (first, first.classify.required)
    if asked == "classify.required=false":
        with pytest.raises(ConfigError, match=r"remove classify\.required=false"):
            config.load(Recipe, own, [limit])
        return
    limited = config.load(Recipe, own, [limit])
    assert limited.classify.required is True
    remember(tmp_path, limited, [])
    own.write_text(own.read_text().replace("min_score = 0.5", ""))
    assert config.load(Recipe, own).classify.required is first.classify.required


def test_rows_have_to_fit_a_model_only_where_there_is_one_to_finetune(text_only: Path) -> None:
    training = ["steps=1", "global_batch_tokens=512"]
    pretrain = [*(f"pretrain.{one}" for one in training), "pretrain.model.context_length=64"]
    assert config.load(Recipe, text_only, pretrain).finetune is None
    both = [*pretrain, *(f"finetune.{one}" for one in training)]
    with pytest.raises(ConfigError, match=r"set instruct\.sequence_length=65, not 257"):
        config.load(Recipe, text_only, [*both, "instruct.sequence_length=257"])
    assert config.load(Recipe, text_only, both).instruct.sequence_length == 65
    assert config.load(Recipe, text_only, [*both, "instruct.samples=1"]).instruct.sequence_length == 65
    assert config.load(Recipe, text_only, pretrain).instruct.sequence_length == 65
    assert config.load(Recipe, text_only).instruct.sequence_length == 257


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["instruct.sources=[]"], r"nothing to finetune on: instruct\.sources is empty"),
        (
            ["evaluate.tasks=['copa', 'humaneval']"],
            r"(?s)evaluate: .*humaneval, which runs code.*evaluate\.run_code=true",
        ),
        (
            ["evaluate.domains=['worlds', 'webb']"],
            r"evaluate\.domains names 'webb', but no source has .*fetch\.sources: code, docs, worlds",
        ),
        (["evaluate.conversations=5", "evaluate.max_tokens=256"], r"evaluate\.max_tokens=256 leaves no room"),
        (
            [
                "prefer={steps=1, global_batch_tokens=512}",
                'prefer.loss={kind="grpo", max_new_tokens=256, problems=[{kind="files", name="a", path="a"}]}',
            ],
            r"prefer\.loss\.max_new_tokens=256 leaves no room",
        ),
        (
            ["instruct.chat_template='chatml'", "tokenizer.chat_template='llama3'"],
            r"instruct\.chat_template='chatml' marks turns by <\|im_start\|>.*remove tokenizer\.chat_template",
        ),
        (
            ["finetune.lora={target_modules=['mlp.*', 'atention.q']}"],
            r"finetune\.lora\.target_modules: the target 'atention\.q' matches no",
        ),
        (
            ["finetune.lora={target_modules=['blocks.9.mlp.up']}"],
            r"finetune\.lora\.target_modules.*of a block: attention\.q, .*mlp\.down",
        ),
    ],
)
def test_what_finetuning_could_not_do_is_told_before_anything_runs(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config.load(Recipe, DEMO, settings)


def test_code_that_may_run_and_domains_that_documents_tell_are_left_to_the_run(text_only: Path, tmp_path: Path) -> None:
    allowed = config.load(Recipe, DEMO, ["evaluate.tasks=['humaneval']", "evaluate.run_code=true"])
    assert allowed.evaluate.tasks == ("humaneval",)
    with pytest.raises(ConfigError, match=r"fetch\.sources: prose"):
        config.load(Recipe, text_only, ["evaluate.domains=['web']"])
    own = f'fetch.sources=[{{kind="files", name="notes", domain="prose", path="{tmp_path}"}}]'
    assert config.load(Recipe, text_only, [own, "evaluate.domains=['web']"]).evaluate.domains == ("web",)


def test_what_is_preferred_is_a_stage_only_where_a_recipe_has_its_section(tmp_path: Path) -> None:
    plain = plan_stages(STAGES, config.load(Recipe, DEMO), tmp_path)
    words = ["prefer.steps=60", "prefer.global_batch_tokens=8192", 'prefer.pairs=[{kind="worlds"}]']
    told = re.search(
        r"^bloomery run recipes/demo.toml (.*)$",
        (ROOT / "docs" / "understand" / "preferences.md").read_text(),
        re.MULTILINE,
    )
    assert told
    assert shlex.split(told[1]) == words
    asked = plan_stages(STAGES, config.load(Recipe, DEMO, words), tmp_path)
    assert [one.folder.name[:2] for one in plain] == [f"{number:02d}" for number in range(1, 12)]
    assert [one.stage.name for one in asked[-3:]] == ["finetune", "prefer", "evaluate"]
    assert [one.folder for one in asked[:10]] == [one.folder for one in plain[:10]]
    assert asked[-1].inputs["prefer"] == asked[-2].folder
    assert "prefer" not in plain[-1].inputs
    with pytest.raises(RunError, match=r"has no section \[prefer\]"):
        check_sections(STAGES, config.load(Recipe, DEMO), until="prefer")
    check_sections(STAGES, config.load(Recipe, DEMO))


# --- how many processes -----------------------------------------------------------------------------------------------

TOO_MANY = PROCESSES_A_CORE * cores() + 1


def sources(folder: Path) -> list[str]:
    (folder / "text.txt").write_text("Some text.\n")
    (folder / "a.toml").write_text(
        'name = "a"\n[[fetch.sources]]\nkind = "files"\nname = "a"\ndomain = "text"\n'
        f'path = "{folder}/text.txt"\n'
        '[instruct]\nsources = [{kind = "worlds", count = 10}]\n'
        "[pretrain]\nsteps = 1\nglobal_batch_tokens = 512\n[finetune]\nsteps = 1\nglobal_batch_tokens = 512\n"
        '[prefer]\nsteps = 1\nglobal_batch_tokens = 512\npairs = [{kind = "worlds"}]\n'
    )
    return [str(folder / "a.toml"), "--runs", str(folder / "runs")]


@pytest.mark.parametrize("verb", ["plan", "run"])
@pytest.mark.parametrize(
    "key",
    [
        *(f"{name}.engine.workers" for name in PARALLEL),
        "pretrain.num_processes",
        "finetune.num_processes",
        "prefer.num_processes",
    ],
)
def test_more_processes_than_the_machine_has_any_use_for_are_refused_before_anything_starts(
    verb: str, key: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpu in ("torch.cuda.is_available", "torch.backends.mps.is_available"):
        monkeypatch.setattr(gpu, lambda: False)
    code, _, said = call(verb, *sources(tmp_path), f"{key}={TOO_MANY}")
    assert code == 2
    assert f"{key}: {TOO_MANY} processes on {cores()} CPU cores; the limit is {TOO_MANY - 1}" in said
    assert not list((tmp_path / "runs").glob("a/0*"))


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_more_ranks_than_gpus_are_refused_before_anything_starts(
    verb: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    code, _, said = call(verb, *sources(tmp_path), "pretrain.num_processes=3")
    assert code == 2
    assert "pretrain.num_processes: 3 ranks are set, but this machine has 2 GPUs" in said
    assert not list((tmp_path / "runs").glob("a/0*"))


@pytest.mark.parametrize("tool", ["filter", "dedup", "tokenize"])
def test_the_workers_of_a_data_command_are_counted_too(tool: str, tmp_path: Path, call: Call) -> None:
    sources(tmp_path)
    words = [str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--workers", str(TOO_MANY)]
    code, _, said = call("data", tool, *words)
    assert code == 2
    assert f"engine.workers: {TOO_MANY} processes" in said
