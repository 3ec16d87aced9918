"""The whole way, small: every stage of a recipe, in one folder, killed, broken, and without room."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zstandard

from bloomery import cli
from bloomery.core.config import to_toml
from bloomery.core.records import content_hash
from bloomery.recipe import STAGES
from bloomery.stages import plan as stages_plan
from bloomery.stages.terminal import SHOWN_ANSWERS
from bloomery.weights import hf
from tests import warm

DEMO = Path(__file__).parents[1] / "recipes" / "demo.toml"
NAMES = [stage.name for stage in STAGES if not stage.optional]

WORDS = re.findall(
    r"\w+",
    """
    the of and to in that is was for it with as on be at by this have from or had not are but what all were when we
    there can an your which their said if do will each about how up out them then she many some so these would other
    into has more her two like him see time could no make than first been its who now people my made over did down
    """,
)
VERBS = ("read", "write", "open", "close", "find", "count", "sort", "merge")


def prose(rng: random.Random) -> str:
    """Sentences of common words, and numbers, in paragraphs."""
    paragraphs = []
    for _ in range(rng.randint(3, 6)):
        sentences = [" ".join(rng.choices(WORDS, k=rng.randint(6, 14))).capitalize() for _ in range(rng.randint(2, 5))]
        paragraphs.append(". ".join(sentences) + f" {rng.randint(1, 999)}.")
    return "\n\n".join(paragraphs) + "\n"


def code(rng: random.Random) -> str:
    functions = [
        f"def {rng.choice(VERBS)}_{rng.choice(WORDS)}(value, limit={rng.randint(1, 99)}):\n"
        f'    """{" ".join(rng.choices(WORDS, k=8)).capitalize()}."""\n'
        f"    if value > limit:\n        return value - {rng.randint(1, 9)}\n"
        f"    return {rng.choice(VERBS)}(value, limit)\n"
        for _ in range(rng.randint(4, 7))
    ]
    return "\n\n".join(functions)


def write_texts(folder: Path) -> None:
    for kind, make, ending in (("code", code, "py"), ("docs", prose, "txt")):
        (folder / kind).mkdir(parents=True)
        for number in range(60):
            (folder / kind / f"{number:02d}.{ending}").write_text(make(random.Random(f"{kind} {number}")))


def write_task(path: Path) -> Path:
    """Questions of a known task; the first stands in a document."""
    docs = (path.parent / "docs" / "00.txt").read_text().split()
    asked = [" ".join(docs[:20]), *(f"It is said that number {number} is not in any text" for number in range(5))]
    rows = [{"query": question, "choices": ["so it is.", "or not."], "gold": 0} for question in asked]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small(folder: Path) -> dict[str, Any]:
    """The demo's recipe, as small as it goes."""
    tree: dict[str, Any] = tomllib.loads(DEMO.read_text(encoding="utf-8"))
    tree["name"] = "small"
    tree["fetch"]["sources"] = [
        {"kind": "folder", "name": "code", "domain": "code", "path": str(folder / "code"), "patterns": ["*.py"]},
        {"kind": "folder", "name": "docs", "domain": "docs", "path": str(folder / "docs")},
        {"kind": "worlds", "name": "worlds", "domain": "worlds", "count": 200},
    ]
    tree["classify"] |= {"samples": 120, "features": 4096}
    tree["tokenizer"] = {"vocab_size": 600}
    tree["shard"]["tokens"] = 30_000
    training = {"global_batch_tokens": 1024, "micro_batch_tokens": 512, "save_every_seconds": 1e-3, "log_every": 1}
    tree["pretrain"] |= training | {"steps": 8, "eval_every": 3}
    tree["pretrain"]["schedule"]["warmup_steps"] = 4
    tree["pretrain"]["model"] |= {"hidden_size": 32, "num_layers": 2, "intermediate_size": 48}
    tree["instruct"]["sources"] = [{"kind": "worlds", "count": 300}]
    tree["finetune"] |= training | {"steps": 6, "eval_every": 4}
    tree["evaluate"] = {"toy_questions": 15, "max_tokens": 12, "val_bytes": 3000, "tasks": ["copa"]}
    tree["evaluate"]["data"] = [str(write_task(folder / "copa.jsonl"))]
    return tree


@dataclass(frozen=True)
class Place:
    """Texts, a recipe of them, and a folder for runs."""

    folder: Path

    @property
    def recipe(self) -> Path:
        return self.folder / "small.toml"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def run(self, *settings: str, runs: Path | None = None) -> int:
        return cli.main(["run", str(self.recipe), "--runs", str(runs or self.runs), *settings])

    def stage(self, name: str, runs: Path | None = None) -> Path:
        root = (runs or self.runs) / "small"
        names: dict[str, str] = json.loads((root / "current.json").read_text())
        return root / names[name]


def make_place(folder: Path) -> Place:
    write_texts(folder / "texts")
    place = Place(folder)
    place.recipe.write_text(to_toml(small(folder / "texts")), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A run that is done."""
    made = make_place(tmp_path_factory.mktemp("small"))
    assert made.run() == 0
    return made


def said(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """What a verb prints with --json."""
    capsys.readouterr()
    assert cli.main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def stale(place: Place, capsys: pytest.CaptureFixture[str], *settings: str) -> set[str]:
    """The stages that would run under these settings. What they need is asked of no trace and no clock."""
    with mock.patch.object(stages_plan, "is_traced", return_value=False):
        found = said(capsys, "plan", place.recipe, "--runs", place.runs, "--memory", "16GiB", *settings)["stages"]
    return {one["stage"] for one in found if not one["fresh"]}


def below(*names: str) -> set[str]:
    """These stages, and all that read what they leave."""
    found = set(names)
    for stage in (one for one in STAGES if not one.optional):
        if found & set(stage.after) and stage.name != "synthesize":  # which reads documents only to augment them
            found.add(stage.name)
    return found


def files_of(root: Path) -> dict[str, tuple[int, bytes]]:
    """Moment and content of every file of every stage."""
    found = sorted(path for path in root.rglob("*") if path.is_file() and path.parent != root)
    return {str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.mark.slow
def test_every_stage_of_a_recipe_is_done_by_one_command(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "status", place.runs / "small", "--verify")
    assert found["done"]
    assert [one["stage"] for one in found["stages"]] == NAMES
    assert stale(place, capsys) == set()
    assert said(capsys, "clean", place.runs / "small")["waste"] == []


def test_the_same_command_again_does_nothing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(place.runs / "small")
    assert place.run() == 0
    shown = capsys.readouterr().err
    assert "small: everything is up to date, nothing to do. It took " in shown
    assert re.search(r"^The model answered [\d.]+ % of 15 questions right \(95 % interval: ", shown, re.MULTILINE)
    assert shown.count("\n  > ") == SHOWN_ANSWERS
    assert f"  Talk to it    bloomery chat {place.runs / 'small'}\n" in shown
    assert not re.search(r"[▸✓]|\w=\d", shown)
    assert files_of(place.runs / "small") == before


def test_the_report_says_how_well_the_model_answers_and_predicts(place: Place) -> None:
    report = json.loads((place.stage("evaluate") / "report.json").read_text())
    assert {"exact", "ended", "by_kind"} <= report["answers"].keys()
    assert report["answers"]["n"] == sum(row["n"] for row in report["answers"]["by_kind"].values()) == 15
    assert {"model", "xz", "zstd"} <= report["bits_per_byte"].keys()
    assert report["bits_per_byte"]["by_domain"].keys() == {"code", "docs", "worlds"}
    assert 0 < report["bits_per_byte"]["xz"] < 8 < report["bits_per_byte"]["model"] + 8
    assert report["leaks"]["found"] == 0
    assert report["tasks"]["copa"]["n"] == len((place.stage("evaluate") / "tasks.jsonl").read_text().splitlines()) == 6
    assert report["tasks"]["copa"]["dirty_n"] in (0, 1)  # its document may be one that is held out
    assert [one["stage"] for one in report["stages"]] == [name for name in NAMES if name in STAGES[-1].after]
    page = (place.stage("evaluate") / "report.html").read_text()
    assert len(page) > 1000
    assert (place.runs / "small" / "report.html").read_text() == page


def test_weights_know_what_they_were_made_from(place: Place) -> None:
    base, tuned = (hf.load(place.stage(name) / "model") for name in ("pretrain", "finetune"))
    assert base.lineage.template is None
    assert base.lineage.shards == content_hash(place.stage("shard"))
    assert tuned.lineage.shards == content_hash(place.stage("instruct"))
    assert tuned.lineage.base == content_hash(place.stage("pretrain")) != content_hash(place.stage("finetune"))
    assert base.lineage.tokenizer == tuned.lineage.tokenizer == base.tokenizer.hash
    assert (base.lineage.step, tuned.lineage.step) == (8, 6)


def test_the_model_can_be_asked_at_once(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", str(place.runs / "small"), "--prompt", "What is 1 plus 1?", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("> What is 1 plus 1?")
    assert said(capsys, "eval", place.runs / "small", "--toy-questions", 2)["answers"]["n"] == 2


@pytest.mark.parametrize(
    ("setting", "stage"),
    [
        ("fetch.sources.2.count=201", "fetch"),
        ("classify.seed=1", "classify"),
        ("filter.min_score=0.01", "filter"),
        ("dedup.threshold=0.9", "dedup"),
        ("tokenizer.vocab_size=601", "tokenizer"),
        ("shard.tokens=30001", "shard"),
        ("pretrain.steps=9", "pretrain"),
        ("synthesize.count=3", "synthesize"),
        ("instruct.val_fraction=0.03", "instruct"),
        ("finetune.schedule.decay_fraction=0.9", "finetune"),
        ("evaluate.toy_questions=16", "evaluate"),
    ],
)
def test_a_changed_setting_makes_its_stage_stale_and_those_below_it(
    place: Place, capsys: pytest.CaptureFixture[str], setting: str, stage: str
) -> None:
    assert stale(place, capsys, setting) == below(stage)


def test_what_cannot_change_the_output_makes_nothing_stale(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    volatile = ["pretrain.micro_batch_tokens=1024", "finetune.keep_last=5", "pretrain.save_every_seconds=9.5"]
    assert stale(place, capsys, *volatile, "evaluate.device=cpu") == set()


def test_a_changed_text_makes_everything_stale_but_what_reads_no_text(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place.folder / "texts" / "docs" / "00.txt"
    before = file.read_bytes()
    file.write_bytes(before.replace(b"the", b"teh", 1))
    assert stale(place, capsys) == set(NAMES) - {"synthesize"}
    file.write_bytes(before)
    assert stale(place, capsys) == set()


@pytest.mark.slow
def test_a_changed_threshold_runs_its_stage_and_those_below_and_keeps_the_rest(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(place.runs / "small")
    assert place.run("instruct.val_fraction=0.05") == 0
    shown = capsys.readouterr().err
    again = below("instruct")
    assert again == {"instruct", "finetune", "evaluate"}
    assert set(re.findall(r"^▸ (\w+) +runs$", shown, re.MULTILINE)) == again
    assert set(re.findall(r"^✓ (\w+) +\w.* in .*\.$", shown, re.MULTILINE)) == again
    kept = next(line for line in shown.splitlines() if line.startswith("  up to date"))
    assert set(kept.split("  ")[-1].split(", ")) == set(NAMES) - again - {"synthesize"}
    after = files_of(place.runs / "small")
    assert {name: after[name] for name in before} == before
    waste = said(capsys, "clean", place.runs / "small")["waste"]
    assert {Path(one["path"]).name.split("-")[1] for one in waste} == again
    assert place.run() == 0  # back to what was before: nothing runs
    assert "everything is up to date" in capsys.readouterr().err


# --- broken input --------------------------------------------------------------------------------------------------


def truncated(folder: Path) -> dict[str, Any]:
    lines = "".join(json.dumps({"text": prose(random.Random(n))}) + "\n" for n in range(200))
    raw = zstandard.ZstdCompressor().compress(lines.encode())
    (folder / "bad.jsonl.zst").write_bytes(raw[: len(raw) // 2])
    return {"kind": "jsonl", "path": str(folder / "bad.jsonl.zst")}


def foreign(folder: Path) -> dict[str, Any]:
    (folder / "bad.txt").write_bytes("Größe, in Latin-1".encode("latin-1"))
    return {"kind": "folder", "path": str(folder)}


def empty(folder: Path) -> dict[str, Any]:
    (folder / "bad.jsonl").touch()
    return {"kind": "jsonl", "path": str(folder / "bad.jsonl")}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (truncated, r"bad\.jsonl\.zst:\d+: .*ends early.*\n.*Repair or remove it, or set invalid = \"skip\""),
        (foreign, r"bad\.txt: byte offset 2 holds 0xf6, which is not UTF-8\n.*Repair or remove it, or set invalid"),
        (empty, r"bad\.jsonl: holds no rows\n.*Repair or remove it"),
    ],
    ids=["a compressed file cut short", "a file in another encoding", "an empty file"],
)
def test_broken_input_is_named_with_its_cure_and_what_was_done_stays_done(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, told: str
) -> None:
    tree = tomllib.loads(place.recipe.read_text(encoding="utf-8"))
    tree["fetch"]["sources"].append({"name": "bad", "domain": "docs", **make(tmp_path)})
    broken = tmp_path / "broken.toml"
    broken.write_text(to_toml(tree), encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["run", str(broken), "--runs", str(place.runs)]) == 2
    shown = capsys.readouterr().err
    assert re.search(told, shown), shown
    assert "Traceback" not in shown
    assert stale(place, capsys) == set()
    assert place.run() == 0
    assert "everything is up to date" in capsys.readouterr().err


# --- without room --------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=60k", "bloomery-test", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this user may not mount a small file system: {error}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_with_more_room_the_same_command_goes_on(
    place: Place, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Room for a little more each time, so that the disk is full in one part of a run after another."""
    stopped: list[str] = []
    for size in (60, 100, 150, 200, 300, 500, 1000, 2000, 4000, 16_000):
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(disk)], check=True)
        capsys.readouterr()
        code = place.run(runs=disk)
        shown = capsys.readouterr().err
        assert "Traceback" not in shown, shown
        if code == 0:
            break
        assert code == 2
        assert "No space left on device" in shown
        assert "Free some space and run the same command again. Finished parts are kept." in shown
        stopped.append(re.findall(r"^▸ (\w+)", shown, re.MULTILINE)[-1])
    assert code == 0
    assert stopped == sorted(stopped, key=NAMES.index)  # it never fell back
    assert len(set(stopped)) >= 4
    for name in ("pretrain", "finetune"):
        assert weights(place, name, disk) == weights(place, name)


def weights(place: Place, stage: str, runs: Path | None = None) -> bytes:
    return (place.stage(stage, runs) / "model" / hf.WEIGHTS).read_bytes()


# --- killed --------------------------------------------------------------------------------------------------------


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was done before
        os.kill(process, signal.SIGKILL)


def killed(place: Place, runs: Path, stage: str, seconds: float) -> bool:
    """Run in a process of its own, and kill it this long after `stage` begins. False if it was done before."""
    words, env = ["run", str(place.recipe), "--runs", str(runs)], os.environ | {"OMP_NUM_THREADS": "1"}
    read, write = os.pipe()
    run = warm.python(["-m", "bloomery.cli", *words], env, err=write)
    os.close(write)
    timer: threading.Timer | None = None
    with open(read, encoding="utf-8") as shown:
        for line in shown:
            if line.startswith(f"▸ {stage}"):
                timer = threading.Timer(seconds, kill, (run.pid,))
                timer.start()
    code = run.wait()
    if timer is not None:
        timer.cancel()
    assert code in (0, -signal.SIGKILL)
    return code != 0


KILLS = [("dedup", 0.1), ("pretrain", 0.3), ("finetune", 0.2)]
"""Where, and about how many seconds after it began."""


@pytest.fixture(scope="module")
def whole(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a process that nobody killed."""
    runs = tmp_path_factory.mktemp("whole")
    assert not killed(place, runs, "nothing", 0)
    return runs


@pytest.mark.slow
def test_a_run_killed_at_several_moments_makes_the_same_models_bit_for_bit(
    place: Place, whole: Path, tmp_path: Path
) -> None:
    rng = random.Random(1)
    kills = sum(killed(place, tmp_path, stage, seconds * rng.uniform(0.1, 1.5)) for stage, seconds in KILLS)
    assert kills >= 2
    assert not killed(place, tmp_path, "nothing", 0)
    for name in ("pretrain", "finetune"):
        assert weights(place, name, tmp_path) == weights(place, name, whole)
