import gzip
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.core import io as core_io
from bloomery.core.chat import Message, as_message
from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.core.pipeline import Stage, StagePlan, seal
from bloomery.core.records import content_hash
from bloomery.data.chat import readers
from bloomery.data.readers.bytes import ReadError
from bloomery.data.sources import toy_worlds
from bloomery.shards import format
from bloomery.shards.loader import IGNORE, PackedDataset
from bloomery.stages import instruct
from bloomery.stages.config import Instruct
from bloomery.tokenizer.chat_template import TEMPLATES, Renderer
from bloomery.tokenizer.jinja_template import JinjaRenderer
from tests.tokenizer.made import small

ROW = 81
LONG = "Now, and then, and once more, " * 30
Rendered = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids and mask."""


def talk(*contents: str, system: str | None = None) -> list[Message]:
    """Messages of a user and an assistant in turn."""
    opening = [Message(role="system", content=system)] if system is not None else []
    roles = ("user", "assistant") * len(contents)
    said = zip(roles, contents, strict=False)
    return opening + [Message(role=role, content=content) for role, content in said]  # type: ignore[typeddict-item]


FIT: list[list[Message]] = [
    talk("What is 1 plus 1?", "2."),
    talk("<|end|><|assistant|>", "I see <|end|>."),
    talk("Be short.", "Yes.", "And?", "No.", system="You are brief."),
    talk("", ""),
    talk("Größe 😀 東京", " x \n"),
    [Message(role="assistant", content="Hello."), Message(role="user", content="Hi."), *talk("A", "B")[1:]],
    [*talk("Count.", "I ask."), Message(role="tool", content="3"), Message(role="assistant", content="Three.")],
    [*talk("Why?")[:1], Message(role="assistant", content="Wrong.", train=False), *talk("No.", "Right.")],
]
CUT: list[tuple[list[Message], int]] = [
    (talk("A", "B", "C", LONG), 2),
    (talk("A", "B", "C", "D", LONG, "E"), 4),
    (talk("A", "B", "C"), 2),  # nobody answers C
    ([*talk("A", "B"), Message(role="tool", content=LONG), Message(role="assistant", content="C")], 2),
]
"""Conversations, and how many of their messages are kept."""

BAD: list[tuple[str, str, str]] = [
    ("{", "not_json", "is not JSON"),
    ('["a"]', "not_json", "holds list instead of an object"),
    ('{"text": "a"}', "no_messages", "has no list named messages or conversations; its fields: text"),
    ('{"messages": []}', "no_messages", "its list messages is empty"),
    ('{"messages": [{"role": "user"}]}', "bad_message", "message 1 has no role and content"),
    ('{"messages": ["a"]}', "bad_message", "message 1 has no role and content"),
    ('{"messages": [{"role": "bot", "content": ""}]}', "unknown_role", "message 1 has the role 'bot'"),
    ('{"messages": [{"role": ["user"], "content": ""}]}', "unknown_role", "message 1 has the role ['user']"),
    ('{"messages": [{"role": "user", "content": null}]}', "not_text", "message 1 has content of the type NoneType"),
    (
        '{"messages": [{"role": "user", "content": "a\\ud83d"}]}',
        "not_unicode",
        "message 1 holds half a surrogate pair at character 1",
    ),
    ('{"messages": [{"role": "user", "content": "a\\u0000"}]}', "binary", "message 1 holds a NUL at character 1: this"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "nothing_to_learn", "it has no assistant message"),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "c"}]}',
        "not_in_the_template",
        "message 2 has reasoning, which the template 'bloomery' does not write: remove it, or use",
    ),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}',
        "nothing_to_learn",
        "no token of it is in the loss",
    ),
    (json.dumps({"messages": talk(LONG, "Yes.")}), "too_long", f"its first answer does not end within {ROW} tokens"),
    (json.dumps({"messages": talk("A", LONG)}), "too_long", f"its first answer does not end within {ROW} tokens"),
]
BOUGHT = [talk("Name a river.", "The Rhine."), talk("And a lake.", "Lake Constance.")]
"""What the stage `synthesize` left."""
COPIES = 12
WORLD_TALKS = 150


@dataclass(frozen=True)
class Done:
    out: Path
    stats: Mapping[str, Any]
    path: Path
    refused: list[tuple[str, str, str]]
    """Place, reason, and how the sentence begins."""
    inputs: dict[str, Path]

    @property
    def config(self) -> Instruct:
        jsonl = {"kind": "jsonl", "name": "file", "path": str(self.path)}
        generated = {"kind": "worlds", "count": WORLD_TALKS, "seed": 3}
        return build(Instruct, {"sources": [jsonl, generated], "sequence_length": ROW, "val_fraction": 0.2})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    root = tmp_path_factory.mktemp("instruct")
    path, refused, lines = root / "talks.jsonl.gz", [], []
    for number in range(COPIES):
        for messages in (*FIT, *(messages for messages, _ in CUT)):
            lines.append(json.dumps({"messages": messages, "number": number}))
        if number < len(BAD):
            lines.append("")  # blank lines are passed, and counted
    for line, _, _ in BAD:
        lines.insert(len(lines) // 2, line)
    for place, line in enumerate(lines, 1):
        refused += [(f"{path}:{place}", reason, what) for bad, reason, what in BAD if bad == line]
    path.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))
    small().save(root / "tokenizer")
    (root / "synthesize").mkdir()
    bought = [json.dumps({"messages": messages, "tokens": 3}) + "\n" for messages in BOUGHT]
    (root / "synthesize" / "conversations.jsonl").write_text("".join(bought), encoding="utf-8")
    inputs = {name: root / name for name in ("tokenizer", "synthesize")}
    made = Done(root / "out", {}, path, refused, inputs)
    return Done(made.out, instruct.run(made.config, made.inputs, made.out), path, refused, made.inputs)


def rendered(messages: list[Message]) -> Rendered:
    found = Renderer(small()).render(messages)
    return tuple(found.ids), tuple(found.mask)


def kept() -> list[list[Message]]:
    """What shall be learned, every conversation as often as it comes."""
    wanted = [*[*FIT, *(messages[:left] for messages, left in CUT)] * COPIES, *BOUGHT]
    for messages in world_talks():
        fitting = [n for n in range(2, len(messages) + 1, 2) if len(rendered(messages[:n])[0]) <= ROW]
        wanted += [messages[: max(fitting)]] if fitting else []
    return wanted


def accepted() -> Counter[Rendered]:
    return Counter(map(rendered, kept()))


def world_talks() -> list[list[Message]]:
    made = [found.messages() for found in toy_worlds.conversations(3, WORLD_TALKS)]
    return [[as_message(message) for message in messages] for messages in made]


def packed(out: Path, split: str) -> Counter[Rendered]:
    """The conversations in the rows of a split, cut at their opening tokens. What is left over is padding."""
    made = format.read(out / f"{split}-00000", tokenizer_hash=small().hash, verify=True)
    assert made.mask is not None
    found: Counter[Rendered] = Counter()
    for ids, mask in zip(made.tokens.reshape(-1, ROW).tolist(), made.mask.reshape(-1, ROW).tolist(), strict=True):
        end = len(ids)
        while ids[end - 1] == small().pad_id:
            end -= 1
        assert not any(mask[end:])
        starts = [place for place in range(end) if ids[place] == small().document_id]
        assert starts[0] == 0
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            found[tuple(ids[start:stop]), tuple(mask[start:stop])] += 1
    return found


def test_every_accepted_conversation_is_packed_once_with_its_mask(done: Done) -> None:
    train, val = packed(done.out, "train"), packed(done.out, "val")
    assert train + val == accepted()
    assert train.total() == done.stats["train"]["conversations"]
    assert val.total() == done.stats["val"]["conversations"] > 0
    assert done.stats["conversations"] == accepted().total()
    by_source = done.stats["by_source"]
    assert by_source["file"]["conversations"] == COPIES * (len(FIT) + len(CUT))
    assert by_source["synthesize"]["conversations"] == len(BOUGHT)


def test_no_held_out_conversation_is_trained_on(done: Done) -> None:
    assert not packed(done.out, "train").keys() & packed(done.out, "val").keys()


def test_what_is_rejected_is_told_and_listed_with_its_line_and_reason(
    done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [json.loads(line) for line in (done.out / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert done.stats["rejected"] == len(listed)
    capsys.readouterr()
    instruct.run(done.config, done.inputs, tmp_path)
    assert f"{len(listed)} rejected (not_json 2, " in (said := capsys.readouterr().err)
    assert f"{tmp_path / 'rejected.jsonl'} says of each" in said
    assert done.stats["rejected_by_reason"] == Counter(found["reason"] for found in listed)
    assert done.stats["conversations"] + len(listed) == COPIES * (len(FIT) + len(CUT)) + len(BAD) + WORLD_TALKS + 2
    from_file = [found for found in listed if found["source"] == "file"]
    assert len(from_file) == len(done.refused) == len(BAD)
    from_file.sort(key=lambda found: int(found["place"].rpartition(":")[2]))
    for found, (place, reason, what) in zip(from_file, done.refused, strict=True):
        assert (found["place"], found["reason"]) == (place, reason)
        assert what in found["what"]


def test_conversations_cut_at_a_turn_are_counted(done: Done) -> None:
    lengths = [(len(rendered(messages[:2])[0]), len(rendered(messages)[0])) for messages in world_talks()]
    cut = sum(first <= ROW < whole for first, whole in lengths)
    assert cut > 0
    assert done.stats["cut_at_a_turn"] == COPIES * len(CUT) + cut


def test_the_numbers_of_a_split_are_what_its_rows_hold(done: Done) -> None:
    for split in ("train", "val"):
        made = format.read(done.out / f"{split}-00000")
        facts, talks = done.stats[split], packed(done.out, split)
        assert made.mask is not None
        assert facts["rows"] * ROW == len(made.tokens)
        assert facts["tokens"] == sum(len(ids) * count for (ids, _), count in talks.items())
        assert facts["supervised"] == sum(sum(mask) * count for (_, mask), count in talks.items()) == made.mask.sum()
        assert facts["packing"] == round(facts["tokens"] / len(made.tokens), 4)
        assert len(made.starts) == facts["conversations"]
        assert made.index["template"] == done.stats["template"] == Renderer(small()).template.hash
    assert done.stats["train"]["packing"] > 0.9


def test_the_loader_learns_every_supervised_token_once_and_lets_no_conversation_see_another(done: Done) -> None:
    samples = PackedDataset(done.out, "train", ROW - 1, small().hash)
    batch = samples.batch(np.arange(samples.num_samples))
    assert samples.num_samples == done.stats["train"]["rows"]
    assert int((batch.targets != IGNORE).sum()) == done.stats["train"]["supervised"]
    assert int(batch.segments.max(axis=1).sum()) == done.stats["train"]["conversations"]
    learned = batch.targets[batch.targets != IGNORE]
    assert small().pad_id not in learned
    assert small().document_id not in learned


def test_two_runs_give_the_same_content(done: Done, tmp_path: Path) -> None:
    stats = instruct.run(done.config, done.inputs, tmp_path)
    assert stats == done.stats
    stage = Stage("instruct", "bloomery.stages.instruct")
    for folder in (tmp_path, done.out):
        plan = StagePlan(stage=stage, config=done.config, folder=folder, fingerprint="0", inputs={})
        seal(plan, stats, seconds=1.0, resumed=False)
    assert content_hash(tmp_path) == content_hash(done.out)


def test_nothing_to_learn_or_to_validate_with_is_an_error(done: Done, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{\n{"messages": []}\n["a"]\n')
    (tmp_path / "conversations.jsonl").touch()
    inputs = {**done.inputs, "synthesize": tmp_path}
    tree: dict[str, Any] = {"sources": [{"kind": "jsonl", "name": "a", "path": str(tmp_path / "a.jsonl")}]}
    listed = tmp_path / "out" / "rejected.jsonl"
    told = re.escape(f"3 rejected (not_json 2, no_messages 1): {listed} says of each where it stands and why.")
    with pytest.raises(DataError, match=rf"no conversations are left to train on\n{told}"):
        instruct.run(build(Instruct, tree), inputs, tmp_path / "out")
    assert len(listed.read_text().splitlines()) == 3
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps({"messages": talk("A", "B")}) + "\n")
    with pytest.raises(
        DataError, match=rf"conversations are left for validation\nRaise instruct\.val_fraction.*{told}"
    ):
        instruct.run(build(Instruct, {**tree, "val_fraction": 1e-9}), inputs, tmp_path / "out")
    with pytest.raises(DataError, match=r"no conversations are left to train on\nAdd conversations, or lower"):
        instruct.run(build(Instruct, {"sources": [], "val_fraction": 1e-9}), inputs, tmp_path / "out")
    none = {"sources": [{"kind": "jsonl", "name": "a", "path": str(tmp_path / "none.jsonl")}]}
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        instruct.run(build(Instruct, none), inputs, tmp_path / "out")
    with pytest.raises(DataError, match=r"(?s)none\.jsonl: no such file.*holds: a\.jsonl"):
        instruct.external_inputs(build(Instruct, none))


def test_the_digest_changes_with_the_content_of_a_file_and_not_with_its_place(done: Done, tmp_path: Path) -> None:
    def digest(content: str, name: str) -> str:
        (tmp_path / name).write_text(content)
        source = {"kind": "jsonl", "name": "a", "path": str(tmp_path / name)}
        return instruct.external_inputs(build(Instruct, {"sources": [source, {"kind": "worlds"}]}))

    assert digest("a\n", "a.jsonl") == digest("a\n", "b.jsonl") != digest("b\n", "a.jsonl")
    plain, other = (instruct.external_inputs(Instruct(chat_template=name)) for name in ("bloomery", "chatml"))
    assert (plain, other) == (TEMPLATES["bloomery"].hash, TEMPLATES["chatml"].hash)


def test_a_file_may_lie_in_the_home_folder(done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": talk("A", "B")}) + "\n") * 2)
    sources = [{"kind": "jsonl", "name": "a", "path": "~/a.jsonl"}, {"kind": "worlds", "count": 50}]
    config = build(Instruct, {"sources": sources, "val_fraction": 0.2})
    assert instruct.external_inputs(config).split()[0] == core_io.sha256_file(tmp_path / "a.jsonl")
    assert instruct.run(config, done.inputs, tmp_path / "out")["by_source"]["a"]["conversations"] == 2


def test_every_message_that_is_trained_on_can_be_read_again_and_no_other(done: Done) -> None:
    """Those of a file, of the generator, and those bought from another model."""
    train = packed(done.out, "train")
    talks = {rendered(messages): messages for messages in kept()}
    expected = Counter[str]()
    for found, count in train.items():
        for message in talks[found]:
            expected[message["content"]] += count
    del expected[""]
    assert Counter(instruct.trained_on(done.out, small())) == expected
    assert {"The Rhine.", "I see <|end|>."} & expected.keys()


def test_what_is_read_is_kept_rejected_or_dropped_and_the_page_tells_the_same(done: Done, tmp_path: Path) -> None:
    rows = [{"messages": talk(f"Q {n}", f"A {n}.", "And?", "So."), "id": str(n)} for n in range(60)]
    rows += [rows[0], {"messages": talk("Who?", "I am ChatGPT.")}, {"messages": talk("Q")}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "files", "name": "a", "path": str(path), "repeat": 3, "max_turns": 1, "license": "CC0-1.0"}
    tree = {"sources": [source], "filters": [{"kind": "identity"}, {"kind": "duplicates"}], "val_fraction": 0.2}
    stats = instruct.run(build(Instruct, tree), {**done.inputs, "synthesize": _empty(tmp_path)}, tmp_path / "out")
    counts = {"read": 63, "conversations": 60, "rejected": 1, "dropped": 2, "cut_at_a_turn": 60}
    assert {name: stats[name] for name in counts} == counts
    assert stats["by_source"] == {"a": counts}
    assert stats["dropped_by_reason"] == {"duplicates": 1, "identity": 1}
    held = stats["val"]["conversations"]
    assert 0 < held < 60
    assert stats["train"]["conversations"] == 3 * (60 - held), "what is held out has no copies"
    listed = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert [(one["reason"], one["value"], one["place"]) for one in listed] == [
        ("duplicates", 1, f"{path}:61"),
        ("identity", 1, f"{path}:62"),
    ]
    assert listed[1]["messages"] == talk("Who?", "I am ChatGPT.")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (told,) = report["sources"]
    both = [stats[split] for split in ("train", "val")]
    assert told["tokens"] == sum(one["tokens"] for one in both)
    assert told["supervised"] == sum(one["supervised"] for one in both)
    assert told["in_rows"] == sum(one["conversations"] for one in report["lengths"]) == 3 * (60 - held) + held
    assert len(report["samples"]) == 3
    for sample in report["samples"]:
        told_runs = [(run["text"], run["learned"]) for run in sample["runs"]]
        number = json.loads(path.read_text().splitlines()[int(sample["place"].rpartition(":")[2]) - 1])["id"]
        begin, user, asked, end, assistant, *answered = told_runs
        assert [begin, user, end, assistant] == [
            (n, False) for n in ("<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>")
        ]
        assert asked == (f"Q {number}", False)
        assert answered == [(f"A {number}.", True), ("<|end|>", True)]


def _empty(folder: Path) -> Path:
    (folder / "synthesize").mkdir()
    (folder / "synthesize" / "conversations.jsonl").touch()
    return folder / "synthesize"


def test_ways_through_one_tree_are_held_out_together(done: Done, tmp_path: Path) -> None:
    rows = []
    for tree in range(80):
        rows.append({"message_id": f"{tree}", "parent_id": None, "role": "prompter", "text": f"Q {tree}"})
        for way in range(3):
            rows.append(
                {"message_id": f"{tree}-{way}", "parent_id": f"{tree}", "role": "assistant", "text": f"A {way}"}
            )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree_of = {"sources": [{"kind": "files", "name": "a", "path": str(tmp_path / "a.jsonl")}], "val_fraction": 0.3}
    stats = instruct.run(build(Instruct, tree_of), {**done.inputs, "synthesize": _empty(tmp_path)}, tmp_path / "out")
    assert stats["conversations"] == 240
    assert 0 < stats["val"]["conversations"] < 120
    assert stats["val"]["conversations"] % 3 == 0


def test_conversations_that_hold_questions_of_the_table_are_left_out(done: Done, tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "copa_val.jsonl"
    task.parent.mkdir()
    row = {"premise": "The gray lamp fell off the high shelf.", "question": "effect", "label": 0}
    task.write_text(json.dumps(row | {"choice1": "It broke.", "choice2": "It sang."}) + "\n")
    talks = [talk(f"Question {number}?", "Yes.") for number in range(60)]
    talks.append(talk("Why?", "The gray lamp fell off the high shelf, therefore it broke."))
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in talks))
    looked_for = {"kind": "decontaminate", "tasks": ["copa"], "data": [str(task.parent)]}
    sources = [{"kind": "files", "name": "talks", "path": str(tmp_path / "talks.jsonl")}]
    config = build(Instruct, {"sources": sources, "sequence_length": ROW, "val_fraction": 0.2, "filters": [looked_for]})
    inputs = done.inputs | {"synthesize": _empty(tmp_path)}
    told = instruct.run(config, inputs, tmp_path / "out")
    assert (told["dropped_by_reason"], told["conversations"]) == ({"decontaminate.copa": 1}, 60)
    before = instruct.external_inputs(config)
    task.write_text(task.read_text().replace("sang", "flew"))
    assert instruct.external_inputs(config) != before
    with pytest.raises(ConfigError, match="there is no task 'copper'"):
        build(Instruct, {"sources": sources, "filters": [looked_for | {"tasks": ["copper"]}]})
    with pytest.raises(ConfigError, match="neither files nor tasks"):
        build(Instruct, {"sources": sources, "filters": [{"kind": "decontaminate"}]})


SHORTENS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('=')[-1] }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
)


def test_a_template_that_shortens_earlier_turns_loses_no_conversation_that_fits() -> None:
    """As templates of models that think: only the last answer keeps its thoughts."""
    renderer = JinjaRenderer(small(), SHORTENS, {"eos_token": "<|end|>"})
    messages = talk("Hi", f"{LONG}=Yes.", "And?", "No.", "And now?", f"{LONG}=Maybe.")
    found = instruct.fit(renderer, messages, ROW)
    assert not isinstance(found, ReadError)
    rendered, count = found
    assert count == 4
    assert len(rendered.ids) <= ROW


def test_a_text_that_a_template_cannot_hold_is_a_rejected_row(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = JinjaRenderer(small(), SHORTENS, {"eos_token": "<|end|>"})
    found = instruct.fit(renderer, talk("Hi <|end|> \U0010fffd", "Yes."), ROW)
    assert isinstance(found, ReadError)
    assert found.reason == "not_in_the_template"
    assert "U+10FFFD" in found.what


TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}[call]{{ call.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "content": "3", "tool_call_id": "x"},
    {"role": "assistant", "content": "It is 3."},
]


def sorted_by(renderer: JinjaRenderer | Renderer, row: dict[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Of the only conversation of a row: the whole text, and what of it is in the loss."""
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row))
    config = build(
        Instruct, {"sources": [{"kind": "files", "name": "mine", "path": str(file)}], "sequence_length": 400}
    )
    with (folder / "rejected.jsonl").open("w") as rejected:
        sorter = instruct._ConversationSorter(config, renderer, rejected, rejected)
        for one in sorter.understood(readers.conversations(config.read)):
            sorter.take(one)
    kept = [one for some in sorter.kept.values() for one in some]
    decode = renderer.tokenizer.decode
    texts = [decode(one.ids.tolist()) for one in kept], [decode(one.ids[one.mask > 0].tolist()) for one in kept]
    return [text.replace("<|end|>", "") for text in texts[0]], [text.replace("<|end|>", "") for text in texts[1]]


def test_tools_are_trained_in_the_form_of_the_template_with_their_calls_in_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renderer = JinjaRenderer(small(), TOOLS, {"eos_token": "<|end|>"})
    for tools in ([TOOL], [TOOL["function"]], json.dumps([TOOL]), [{**TOOL, "extra": None}]):
        whole, learned = sorted_by(renderer, {"messages": CALLED, "tools": tools}, tmp_path)
        assert whole[0].startswith('{"type": "function", "function": {"name": "add"')
        assert learned == ['[call]{"name": "add", "arguments": {"a": 1}}It is 3.']
    silent = [*CALLED[:3], {**CALLED[3], "train": False}]
    assert sorted_by(renderer, {"messages": silent, "tools": [TOOL]}, tmp_path)[1] == [learned[0][: -len("It is 3.")]]
    silent = [CALLED[0], {**CALLED[1], "train": False}, *CALLED[2:]]
    assert sorted_by(renderer, {"messages": silent, "tools": [TOOL]}, tmp_path)[1] == ["It is 3."]
    assert "as JSON text" not in capsys.readouterr().err


def test_tools_that_are_trained_as_text_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"messages": CALLED, "tools": [TOOL]}
    for renderer, warns in (
        (JinjaRenderer(small(), SHORTENS, {"eos_token": "<|end|>"}), True),
        (Renderer(small()), False),
    ):
        (learned,) = sorted_by(renderer, row, tmp_path)[1]
        assert '{"name": "add", "arguments": {"a": 1}}' in learned or warns
        printed = capsys.readouterr()
        assert ("has no form for tools" in printed.out + printed.err) == warns
