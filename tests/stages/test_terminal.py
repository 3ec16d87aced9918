"""The sentence of a stage says the number that matters, for every run that its recipe allows."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from bloomery.core import config, errors, log
from bloomery.core.chat import Message, SamplingConfig
from bloomery.core.log import about
from bloomery.core.pipeline import StagePlan
from bloomery.recipe import STAGES, Recipe
from bloomery.serve.chat_model import StoppedError
from bloomery.stages import plan as stages_plan
from bloomery.stages import terminal
from bloomery.stages.terminal import sentence
from bloomery.tokenizer.chat_template import TooLongError
from tests.calling import Call

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"
NO_DOMAINS = ("evaluate.domains=[]", "shard.weights=[]", "filter.rules=[]", "filter.min_scores=[]")

NOTHING = {"answers": {"n": 0}, "bits_per_byte": {"model": None, "bytes": 0}}
TALKS = {"n": 20, "pretrain": {"bits_per_byte": 0.701}, "finetune": {"bits_per_byte": 0.512}}


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        ({"answers": {"n": 20, "exact": 0.5}}, "answered 50.0 % of 20 questions right"),
        ({"bits_per_byte": {"model": 2.5, "bytes": 3000}}, "measured 2.50 bits per byte on 3.0 kB of validation text"),
        (
            {"conversations": TALKS},
            "measured 0.51 bits per byte on 20 validation conversations (0.70 before finetuning)",
        ),
        ({"tasks": {"arc_easy": {}}}, "scored 1 task"),
        ({}, "wrote its report"),
    ],
)
def test_an_evaluation_without_questions_and_without_shards_has_a_sentence(stats: dict[str, Any], text: str) -> None:
    assert sentence("evaluate", NOTHING | stats) == (text, "")


def demo(*settings: str) -> tuple[Recipe, list[StagePlan]]:
    recipe = config.load(Recipe, DEMO, settings)
    sections = [(stage, getattr(recipe, stage.name)) for stage in STAGES]
    return recipe, [
        StagePlan(stage=stage, config=section, folder=Path(stage.name), fingerprint="", inputs={})
        for stage, section in sections
        if section is not None
    ]


def test_a_first_run_has_an_estimate_that_grows_with_its_steps_and_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed speed of matmuls, as a measured one differs from call to call."""
    monkeypatch.setattr(stages_plan, "_numpy_flops", lambda: 4e11)
    monkeypatch.setattr(stages_plan, "cores", lambda: 2)
    monkeypatch.setattr(stages_plan, "find_gpus", lambda host: [])
    whole = stages_plan.first_seconds(*demo())
    assert whole is not None
    assert 200 < whole < 400, "a measured run took 264 s, with matmuls of 4.3e11 FLOP/s"
    longer = stages_plan.first_seconds(*demo("pretrain.steps=660"))
    assert longer is not None
    assert longer - whole == pytest.approx(330 * 4096 * 25.5e6 / (0.6 * 4e11), rel=0.01)
    source = '{kind="worlds", name="worlds", domain="worlds", count=%d}'
    few, many = (
        stages_plan.first_seconds(*demo(f"fetch.sources=[{source % count}]", *NO_DOMAINS)) for count in (1000, 100_000)
    )
    assert few is not None
    assert many is not None
    assert few < many


def test_no_time_is_estimated_where_a_gpu_or_another_host_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_plan, "find_gpus", lambda host: [])
    hub = '{kind="hub", name="far", domain="web", dataset="made/texts"}'
    assert stages_plan.first_seconds(*demo(f"fetch.sources=[{hub}]", *NO_DOMAINS)) is None
    monkeypatch.setattr(stages_plan, "find_gpus", lambda host: ["a GPU"])
    assert stages_plan.first_seconds(*demo()) is None


def test_documents_without_one_for_validation_end_a_run_after_fetch_with_the_fix(call: Call, tmp_path: Path) -> None:
    recipe = tmp_path / "few.toml"
    source = '{kind = "worlds", name = "worlds", domain = "worlds", count = 5}'
    recipe.write_text(f'name = "few"\n[fetch]\nsources = [{source}]\n')
    words = ["run", recipe, "--until", "shard", "--runs", tmp_path / "runs", "tokenizer.vocab_size=300"]
    code, _, err = call(*words, "shard.val_fraction=1e-6")
    assert code == 2
    assert "no document is left for validation" in err
    assert "Raise shard.val_fraction" in err
    assert [path.parent.name[:8] for path in (tmp_path / "runs").rglob("manifest.json")] == ["01-fetch"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "about 1 s"),
        (7.4, "about 7 s"),
        (43, "about 40 s"),
        (278, "about 4 min 30 s"),
        (131_400, "about 1 day 12 h"),
    ],
)
def test_an_estimate_shows_no_digits_that_nobody_knows(seconds: float, words: str) -> None:
    assert about(seconds) == words


# --- chat ----------------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What a model answers."""

    dropped: int
    words: list[str]

    @property
    def texts(self) -> Iterator[str]:
        for word in self.words:
            if word == "^C":
                raise KeyboardInterrupt
            if word == "stopped":
                raise StoppedError
            yield word


class Talk:
    """A chat whose lines are given, with what its models heard."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *lines: str,
        dropped: int = 0,
        words: Sequence[str] = (),
        failing: Sequence[str] = (),
        sampling: SamplingConfig | None = None,
    ) -> None:
        """`failing` is what the first model says once there is a conversation."""
        self.heard: list[tuple[str, list[Message], SamplingConfig]] = []
        self._dropped, self._words, self._failing, left = dropped, [*words], [*failing], [*lines]

        def read(prompt: str) -> str:
            line = left.pop(0) if left else "^D"
            if line in ("^C", "^D"):
                raise KeyboardInterrupt if line == "^C" else EOFError
            return line

        monkeypatch.setattr("builtins.input", read)
        self.chat = terminal.TerminalChat(
            self.model("first"), lambda path: self.model(str(path)), sampling or SamplingConfig()
        )
        self.chat.run()

    def model(self, name: str) -> terminal.Asks:
        def ask(messages: list[Message], sampling: SamplingConfig) -> Told:
            self.heard.append((name, [*messages], sampling))
            if (error := {"too long": TooLongError("does not fit"), "^C": KeyboardInterrupt()}.get(name)) is not None:
                raise error
            failing = self._failing if name == "first" and len(messages) > 2 else []
            return Told(self._dropped if len(messages) > 2 else 0, failing or self._words or [name, " said"])

        return ask

    @property
    def contents(self) -> list[list[str]]:
        return [[message["content"] for message in messages] for _, messages, _ in self.heard]


def test_a_chat_keeps_its_conversation_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(monkeypatch, "a", "b", "", "c", "/reset", "d", "/exit", "e")
    first, second, third, fourth = talk.contents
    assert (first, second) == (["a"], ["a", "first said", "b"])
    assert third == [*second, "first said", "c"], "an empty line does nothing"
    assert fourth == ["d"]


def test_a_conversation_that_was_reset_comes_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Talk(
        monkeypatch, "/restore", "a", "/reset", "/reset", "/restore", "b", "/reset", "c", "/restore", "/restore"
    )
    assert talk.contents == [["a"], ["a", "first said", "b"], ["c"]]
    assert [message["content"] for message in talk.chat.messages] == ["c", "first said"]
    assert capsys.readouterr().err.count("there is no earlier conversation") == 1


def test_lines_become_one_message_by_backslashes_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(monkeypatch, "a\\", "b", "", '"""', "c", "", "/help", '"""', "", "//slash", "", "end\\")
    assert [said[-1] for said in talk.contents] == ["a\nb", "c\n\n/help", "/slash", "end"]


def test_commands_change_what_is_asked_and_who_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(monkeypatch, "/system Be brief.", "/temperature 0", "a", "/model other", "b", "/system", "/reset", "c")
    (first, asked, sampling), (second, more, _), (_, last, _) = talk.heard
    assert (first, second) == ("first", "other")
    assert asked == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert [message["content"] for message in more] == ["Be brief.", "a", "first said", "b"]
    assert sampling.temperature == 0
    assert last == [{"role": "user", "content": "c"}]


def test_a_temperature_leaves_the_other_settings_that_the_model_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(monkeypatch, "a", "/temperature 0.5", "b", sampling=SamplingConfig.of({}))
    before, after = (sampling.recommended({"temperature": 0.2, "top_p": 0.9}) for _, _, sampling in talk.heard)
    assert (before.temperature, after.temperature, after.top_p) == (0.2, 0.5, 0.9)


def test_bytes_that_are_not_utf_8_and_names_that_cannot_be_written_end_no_chat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.jsonl"
    talk = Talk(monkeypatch, f"/save {file}", "/system caf\udce9", "a", f"/save {file}", f"/save {tmp_path}/a\0b")
    assert talk.contents == [["a"]], "the system message was refused"
    assert len(file.read_text(encoding="utf-8").splitlines()) == 1, "nothing was saved before the first message"
    said = capsys.readouterr().err
    assert "/system: holds bytes that are not UTF-8, at character 3" in said
    assert said.count("cannot be written: embedded null byte") == 1
    assert "/save: the conversation has no message yet" in said


def test_the_home_folder_can_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    talk = Talk(monkeypatch, "/model ~/other", "a", "/save ~/talk.jsonl", "/save ~nobody-here/x")
    assert [name for name, _, _ in talk.heard] == [f"{tmp_path}/other"]
    assert (tmp_path / "talk.jsonl").is_file()


@pytest.mark.parametrize("line", ["/temperature 1", "a"])
def test_an_output_that_cannot_be_written_ends_the_chat(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise errors.OutputError("cannot be written", where="standard output")

    monkeypatch.setattr(log, "print_pieces" if line == "a" else "info", refuse)
    with pytest.raises(errors.OutputError):
        Talk(monkeypatch, line)


def test_a_conversation_is_saved_as_lines_of_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.jsonl"
    Talk(monkeypatch, "/system ü", "a", f"/save {file}", "/reset", "b", f"/save {file}", f"/save {tmp_path}")
    first, second = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert [one["content"] for one in first["messages"]] == ["ü", "a", "first said"]
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant"]
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nothing", "there is no command /nothing"),
        ("/model", "/model: needs a value"),
        ("/temperature hot", "'hot' is not a number from 0 to 100"),
        ("/temperature nan", "'nan' is not a number"),
        ("/temperature 101", "'101' is not a number"),
    ],
)
def test_a_wrong_command_is_an_error_and_the_chat_goes_on(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Talk(monkeypatch, line, "a").contents == [["a"]]
    assert said in capsys.readouterr().err


def test_messages_that_do_not_fit_are_left_out_and_that_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Talk(monkeypatch, "a", "b", "c", dropped=2)
    assert talk.contents[-1] == ["a", "first said", "b", "first said", "c"], "the model leaves out what does not fit"
    assert [message["content"] for message in talk.chat.messages][::2] == ["a", "b", "c"]
    assert capsys.readouterr().err.count("the oldest 2 messages do not fit") == 1


def test_an_answer_that_is_stopped_stays_in_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(monkeypatch, "a", "b", words=["Be", "gun", "^C", "never"])
    assert talk.contents == [["a"], ["a", "Begun", "b"]]


@pytest.mark.parametrize(
    ("model", "words"), [("too long", ()), ("^C", ()), ("first", ("^C",)), ("first", ("be", "stopped"))]
)
def test_a_message_without_an_answer_can_be_sent_again_and_the_conversation_stays(
    model: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["a", f"/model {model}", "b", "/again", "/model other", "/again", "/again", "c"]
    talk = Talk(monkeypatch, *lines, failing=words)
    asked = ["a", "first said", "b"]
    assert talk.contents == [["a"], asked, asked, asked, [*asked, "other said", "c"]]
    assert capsys.readouterr().err.count("every message has an answer") == 1


def test_ctrl_c_at_the_prompt_neither_ends_the_chat_nor_loses_a_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Talk(monkeypatch, "a", "^C", '"""', "b", "c", "^C", "d", "/again")
    first, second, third = talk.contents
    assert (first, second) == (["a"], ["a", "first said", "d"])
    assert third == [*second, "first said", "b\nc"]
    assert capsys.readouterr().err.count("Ctrl-D or /exit ends") == 1


def test_a_line_that_ctrl_c_discards_goes_into_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    history: list[str] = []
    lines = SimpleNamespace(get_line_buffer=lambda: "half typed", add_history=history.append)
    monkeypatch.setitem(sys.modules, "readline", lines)
    Talk(monkeypatch, "a", "^C", "b")
    assert history == ["half typed"]
