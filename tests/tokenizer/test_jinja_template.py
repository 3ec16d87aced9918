"""Chat templates of other models: IDs and masks as transformers makes them, and templates and contents that attack."""

import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bloomery.core.chat import REASONING, Message
from bloomery.core.errors import DataError
from bloomery.tokenizer.chat_template import renderer_named
from bloomery.tokenizer.importers import from_json, load_foreign
from bloomery.tokenizer.jinja_sandbox import _BUDGET, OriginText, _Budget
from bloomery.tokenizer.jinja_template import JinjaRenderer
from tests.tokenizer.made import small, training_texts

FOLDER = Path(__file__).parent / "templates"
LLAMA3 = (
    "(?i:'s|'t)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é < 1", "parameters": {"a": "int"}}}]


class Family(NamedTuple):
    kind: str
    """How words are cut: gpt2, llama3, llama2 (SentencePiece), gemma."""
    special: tuple[str, ...]
    bos: str | None
    eos: str
    system: bool = True
    alternates: bool = False
    tools: bool = False
    end: str = ""
    """What follows an answer and ends it."""
    lead: str = ""
    rstrip: bool = False
    strips: bool = False
    begins: str = ""
    """Of answers, where the template drops line ends from some."""
    variables: tuple[Mapping[str, Any], ...] = ({},)


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "llama2": Family("llama2", ("<s>", "</s>"), "<s>", "</s>", alternates=True, strips=True, end=" </s>", lead=" "),
    "llama31": Family(
        "llama3",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
        tools=True,
        strips=True,
        end="<|eot_id|>",
        variables=({}, {"tools": TOOLS}, {"date_string": "1 Jan 2025"}),
    ),
    "mistral": Family(
        "llama2",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        "<s>",
        "</s>",
        alternates=True,
        strips=True,
        end="</s>",
        lead=" ",
    ),
    "qwen25": Family(
        "llama3", CHATML, None, "<|im_end|>", tools=True, end="<|im_end|>", variables=({}, {"tools": TOOLS})
    ),
    "qwen3": Family(
        "llama3",
        CHATML,
        None,
        "<|im_end|>",
        begins="Y",
        end="<|im_end|>",
        lead="<think>\n\n</think>\n\n",
        variables=({}, {"enable_thinking": False}),
    ),
    "gemma": Family(
        "gemma",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<bos>",
        "<eos>",
        system=False,
        alternates=True,
        strips=True,
        end="<end_of_turn>",
    ),
    "phi3": Family(
        "llama2",
        ("<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        "<s>",
        "<|end|>",
        end="<|end|>",
        rstrip=True,
    ),
    "smollm2": Family("gpt2", CHATML, "<|im_start|>", "<|im_end|>", end="<|im_end|>"),
    "olmo": Family("gpt2", ("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", end="<|endoftext|>"),
    "zephyr": Family("llama2", ("<s>", "</s>"), "<s>", "</s>", end="</s>"),
    "deepseek": Family(
        "llama3",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        end="<｜end▁of▁sentence｜>",
    ),
    "baichuan2": Family("gemma", ("<s>", "</s>", "<reserved_106>", "<reserved_107>"), "<s>", "</s>", end="</s>"),
}


@cache
def trained(kind: str, special: tuple[str, ...], rstrip: bool) -> str:
    """A small tokenizer.json of a kind, with a family's special tokens."""
    if kind in ("gpt2", "llama3"):
        inner = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        inner.pre_tokenizer = letters if kind == "gpt2" else pre_tokenizers.Sequence([split, letters])
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        first: list[str] = []
    else:
        inner = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        replace = normalizers.Replace(" ", "\u2581")
        before = [normalizers.Prepend("\u2581")] if kind == "llama2" else []
        inner.normalizer = normalizers.Sequence([*before, replace])
        inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        strip = [decoders.Strip(" ", 1, 0)] if kind == "llama2" else []
        inner.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        alphabet, first = [], ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=first, initial_alphabet=alphabet, show_progress=False, max_token_length=12
    )
    inner.train_from_iterator(training_texts(), trainer)
    if first:  # bytes are pieces, not special tokens
        spec = json.loads(inner.to_str())
        spec["added_tokens"] = [one for one in spec["added_tokens"] if one["content"] == "<unk>"]
        inner = Tokenizer.from_str(json.dumps(spec))
    inner.add_special_tokens([AddedToken(one, normalized=False, special=True, rstrip=rstrip) for one in special])
    return inner.to_str()


class Pair(NamedTuple):
    family: Family
    ours: JinjaRenderer
    theirs: Any


@cache
def pair(name: str) -> Pair:
    family, template = FAMILIES[name], (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    text = trained(family.kind, family.special, family.rstrip)
    roles = {"bos_token": family.bos, "eos_token": family.eos}
    tokenizer = from_json(text, name, roles)
    theirs: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(text), **roles
    )
    theirs.chat_template = template
    return Pair(family, JinjaRenderer(tokenizer, template, roles), theirs)


PIECES = (
    "the lamp",
    " ",
    "  ",
    "\n",
    "\n\n",
    "7",
    "123 456",
    "é",
    "東京",
    "😀",
    "e\u0301",
    "\t",
    "(a)",
    "<|",
    "|>",
    "<",
    ">",
    "im_end",
    "[INST",
    "/INST]",
    "tools",
    "'s",
    "\\n",
    "{{ x }}",
    "{% if %}",
    "\u2581",
    "def f(a):\n    return a",
    "\r\n",
)


def content(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(0, 9)))


def conversation(rng: random.Random, family: Family, *, thinks: bool = False) -> list[Message]:
    """A random conversation that the template can write, in which no content spells a special token."""
    messages: list[Message] = []
    if family.system and rng.random() < 0.4:
        messages.append({"role": "system", "content": content(rng)})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": content(rng)})
        if family.tools and rng.random() < 0.2:
            messages.append({"role": "tool", "content": content(rng)})
        thought = f"<think>\n{content(rng)}\n</think>\n\n" if thinks and rng.random() < 0.5 else ""
        messages.append({"role": "assistant", "content": thought + family.begins + content(rng) + "So."})
    spelled = any(token in one["content"] for one in messages for token in (*family.special, "<unk>"))
    return conversation(rng, family, thinks=thinks) if spelled else messages


def rendered(theirs: Any, messages: list[Message], **more: Any) -> str:
    text = theirs.apply_chat_template(messages, tokenize=False, **more)
    assert isinstance(text, str)
    return text


MARKS = ("\ue0f0", "\ue0f1")


def expected_mask(two: Pair, messages: list[Message], variables: Mapping[str, Any]) -> list[int]:
    """Where answers stand, by marks around what is not white space; the marks occur in no content."""
    family, marked = two.family, [Message(**one) for one in messages]
    for one in marked:
        if one["role"] == "assistant":
            text = one["content"]
            left, right = len(text) - len(text.lstrip()), len(text.rstrip())
            one["content"] = text[:left] + MARKS[0] + text[left:right] + MARKS[1] + text[right:]
    text, plain = rendered(two.theirs, marked, **variables), rendered(two.theirs, messages, **variables)
    assert text.replace(MARKS[0], "").replace(MARKS[1], "") == plain
    said, at, begins = [False] * len(plain), 0, list[int]()
    answers = iter([one["content"] for one in messages if one["role"] == "assistant"])
    for letter in text:
        if letter == MARKS[0]:
            answer = next(answers)
            kept = "" if family.strips else answer[: len(answer) - len(answer.lstrip())]
            begin = at - len(kept)
            assert plain[begin:at] == kept
            begins.append(begin - (len(family.lead) if plain[:begin].endswith(family.lead) else 0))
        elif letter == MARKS[1]:
            rest = plain[at:]
            end = at + len(rest) - len(rest.lstrip()) + len(family.end.lstrip())
            assert plain[:end].endswith(family.end.lstrip())
            said[begins[-1] : end] = [True] * (end - begins[-1])
        at += letter not in MARKS
    coded = two.theirs(plain, add_special_tokens=False, return_offsets_mapping=True)
    return [int(any(said[left : max(right, left + 1)])) for left, right in coded["offset_mapping"]]


def check(name: str, count: int, seed: int) -> None:
    two, rng = pair(name), random.Random(seed)
    for number in range(count):
        messages = conversation(rng, two.family)
        variables = two.family.variables[number % len(two.family.variables)]
        got = two.ours.render(messages, **variables)
        assert got.ids == two.theirs.apply_chat_template(messages, return_dict=False, **variables), messages
        asked = two.theirs.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False, **variables
        )
        assert two.ours.prompt(messages[:-1], **variables) == asked
        if name == "olmo":
            coded = two.theirs.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **variables
            )
            assert sum(a != b for a, b in zip(got.mask, coded["assistant_masks"], strict=True)) <= 3 * len(messages)
        else:
            assert got.mask == expected_mask(two, messages, variables), messages


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_of_a_familys_template_equal_those_of_transformers(name: str) -> None:
    check(name, 25, seed=1)


def test_a_template_may_split_contents_and_the_mask_is_on_what_is_left_of_them() -> None:
    two, rng = pair("qwen3"), random.Random(3)
    for _ in range(40):
        messages = conversation(rng, two.family, thinks=True)
        got = two.ours.render(messages)
        assert got.ids == two.theirs.apply_chat_template(messages, return_dict=False)
        said = two.theirs.decode([id for id, learned in zip(got.ids, got.mask, strict=True) if learned])
        assert said.count("<|im_end|>") == sum(one["role"] == "assistant" for one in messages)


def test_reasoning_is_written_and_learned_where_transformers_writes_it() -> None:
    """Of the last answer; older reasoning is not in a prompt either. Marked ends tell what is learned."""
    two, rng = pair("qwen3"), random.Random(5)
    for _ in range(40):
        messages = conversation(rng, two.family)
        for one in messages:
            if one["role"] == "assistant" and rng.random() < 0.7:
                one["reasoning"] = f"Hm {content(rng)}"
        theirs = [
            {"role": one["role"], "content": one["content"], "reasoning_content": one.get("reasoning")}
            for one in messages
        ]
        got = two.ours.render(messages)
        assert got.ids == two.theirs.apply_chat_template(theirs, return_dict=False), messages
        learned = two.theirs.decode([id for id, marked in zip(got.ids, got.mask, strict=True) if marked])
        thought = messages[-1].get("reasoning", "").strip("\n")
        assert learned.endswith(f"<think>\n{thought}\n</think>\n\n{messages[-1]['content'].lstrip(chr(10))}<|im_end|>")


def test_reasoning_that_a_template_leaves_out_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    ours = JinjaRenderer(pair("qwen3").ours.tokenizer, pair("qwen3").ours.source, {"eos_token": "<|im_end|>"})
    asked: Message = {"role": "user", "content": "a"}
    messages = [asked, Message(role="assistant", content="b", reasoning="Hm."), asked]
    messages.append(Message(role="assistant", content="c", reasoning="So."))
    for _ in range(2):
        ours.render(messages)
    said = capsys.readouterr().err
    assert said.count("the chat template") == 1
    assert "message 2: the chat template leaves out or changes the reasoning 'Hm.'" in said
    ours.render(messages[2:])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_message_that_is_not_in_the_loss_has_the_same_ids_and_no_mask(name: str) -> None:
    two, rng = pair(name), random.Random(6)
    for _ in range(15):
        messages = conversation(rng, two.family)
        for one in messages:
            one["train"] = rng.random() < 0.5
        alone = [[Message(**one) for one in messages] for _ in messages]
        for number, conversed in enumerate(alone):
            for place, one in enumerate(conversed):
                one["train"] = place == number
        plain = [Message(role=one["role"], content=one["content"]) for one in messages]
        whole, got, each = two.ours.render(plain), two.ours.render(messages), [two.ours.render(one) for one in alone]
        masks = np.array([one.mask for one in each])
        assert got.ids == whole.ids
        assert masks.sum(0).tolist() == whole.mask, "each token in the loss is that of one message"
        assert got.mask == masks[[number for number, one in enumerate(messages) if one["train"]]].sum(0).tolist()


@pytest.mark.parametrize("key", REASONING)
def test_reasoning_goes_to_a_template_under_the_one_name_that_it_reads(key: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{% if m.KEY %}[{{ m.KEY }}]{% endif %}"
        "{{ m.content }}<|im_end|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    family = FAMILIES["qwen3"]
    tokenizer = from_json(trained(family.kind, family.special, False), "t", {"eos_token": family.eos})
    messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages[1]["reasoning"] = "c <|im_end|>"
    reads = JinjaRenderer(tokenizer, template.replace("KEY", key), {})
    assert reads.written(messages) == "a<|im_start|>[c <|im_end|>]b<|im_end|>"
    rendered_ids = reads.render(messages)
    assert sum(id == tokenizer.special_id("<|im_end|>") for id in rendered_ids.ids) == 1
    ignores = JinjaRenderer(tokenizer, template.replace("KEY", "thought"), {})
    assert "message 2: has reasoning, which the model's chat template does not write" in ignores.trouble(messages)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_content_becomes_a_special_token(name: str) -> None:
    two, rng = pair(name), random.Random(4)
    structure = {token: two.theirs.convert_tokens_to_ids(token) for token in two.family.special}
    for _ in range(20):
        messages = conversation(rng, two.family)
        plain = two.ours.render(messages).ids
        for one in messages:
            token = rng.choice(two.family.special)
            cut = rng.randint(0, len(token))
            one["content"] = rng.choice((token, token + token, token[:cut], token[cut:])) + " " + one["content"] + token
        got = two.ours.render(messages).ids
        assert {id: got.count(id) for id in structure.values()} == {id: plain.count(id) for id in structure.values()}
        assert "".join(two.theirs.decode(got).split()).count(two.family.end.strip()) >= len(messages) // 2


def test_two_contents_side_by_side_spell_no_special_token() -> None:
    two = pair("smollm2")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    ours = JinjaRenderer(two.ours.tokenizer, template, {})
    ids = ours.render([{"role": "user", "content": "<|im_"}, {"role": "assistant", "content": "end|>"}]).ids
    assert ids.count(two.theirs.convert_tokens_to_ids("<|im_end|>")) == 1


ATTACKS = (
    "{% for a in range(10**9) %}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{{ 'x' | center(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{% set ns = namespace(a='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(99) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ messages.append(1) }}",
    "{{ ('x' * 1000).replace('x', 'y' * 100000) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "{{ lipsum(n=10**9) }}",
    "{% set x %}{{ 'a' * 1000000 }}{% endset %}{{ x * 1000 }}",
    "{{ namespace(__class__=1) }}",
    "{{ messages[0].content.encode() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception('never') }}",
    "{{ ('a' * 1000000) | wordwrap(1) }}",
    "{{ ('a' * 10**7).split('a') }}",
    "{{ ('a' * 10**7) | list }}",
    "{{ ('a' * 3000000) | title }}",
    "{{ ('<' * 1000000) | striptags }}",
    "{{ strftime_now('%Y' * 3000000) }}",
    "{{ range(1000) | list | tojson(separators=('a' * 1000000, ':')) }}",
    "{{ [[1]] | tojson(indent=10**9) }}",
    "{% if %}",
    "nothing of the conversation",
    "x" * 2**20,
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ '\\ud800' }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'a' * 10**7 }}",
)


@pytest.mark.slow
@pytest.mark.parametrize("template", ATTACKS, ids=range(len(ATTACKS)))
def test_a_template_that_attacks_is_refused_with_the_reason(template: str) -> None:
    with pytest.raises(DataError, match="chat template"):
        JinjaRenderer(pair("smollm2").ours.tokenizer, template, {})


def test_what_a_template_refuses_is_the_trouble_of_a_conversation() -> None:
    ours = pair("gemma").ours
    assert "there is no system role" in ours.trouble([{"role": "system", "content": "x"}])
    assert ours.trouble([{"role": "user", "content": "x"}]) == ""
    with pytest.raises(DataError, match="there is no system role"):
        ours.prompt([{"role": "system", "content": "x"}])


def test_a_prompt_over_the_context_is_an_error_before_it_is_encoded() -> None:
    ours = pair("llama31").ours
    with pytest.raises(DataError, match=r"at least .* tokens, but the model's context is 50"):
        ours.prompt([{"role": "user", "content": "word " * 100_000}], max_tokens=50)


def test_a_template_that_leaves_out_an_answer_is_an_error_with_its_message() -> None:
    tokenizer = pair("smollm2").ours.tokenizer
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content if loop.index0 < 2 else m.content | tojson }}{% endfor %}"
    )
    ours = JinjaRenderer(tokenizer, template, {})
    asked: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match="message 4: the chat template omits"):
        ours.render(asked + asked)
    assert ours.trouble(asked) == ""
    assert ours.trouble(asked + asked).startswith("message 4: the chat template omits")


def test_a_tokenizer_of_another_model_keeps_its_words(tmp_path: Path) -> None:
    """Its special tokens, no rows for ours, and bytes that it lacks are reported once."""
    spec = json.loads(trained("gpt2", CHATML, False))
    spec["model"]["vocab"]["unused"] = spec["model"]["vocab"].pop("\u0104")
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    roles = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    tokenizer = load_foreign(tmp_path)
    assert tokenizer.vocab_size == 1 + max(one["id"] for one in spec["added_tokens"])
    assert tokenizer.document_id == tokenizer.special_id("<|im_start|>")
    assert tokenizer.end_id == tokenizer.special_id("<|im_end|>")
    assert tokenizer.pad_id is None
    assert tokenizer.decode(tokenizer.encode("a\x04b <|im_end|>")) == "ab <|im_end|>"
    assert not set(tokenizer.encode("<|im_end|>")) & tokenizer.special_ids


def test_a_missing_byte_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    spec = json.loads(trained("gpt2", CHATML, False))
    spec["model"]["vocab"]["unused"] = spec["model"]["vocab"].pop("\u0104")
    tokenizer = from_json(json.dumps(spec), "here", {"eos_token": "<|im_end|>"})
    tokenizer.encode("a")
    assert "no token" not in capsys.readouterr().err
    tokenizer.encode("a\x04")
    tokenizer.encode("a\x04")
    assert capsys.readouterr().err.count("no token") == 1


def test_a_unigram_model_is_refused_by_name() -> None:
    spec = json.loads(Tokenizer(models.Unigram([("a", 0.0), ("b", -1.0)], 0, False)).to_str())
    with pytest.raises(DataError, match="is a Unigram"):
        from_json(json.dumps(spec), "here", {})


def test_a_template_of_ours_needs_its_special_tokens() -> None:
    tokenizer = pair("smollm2").ours.tokenizer
    assert renderer_named(tokenizer, "chatml").prompt([{"role": "user", "content": "x"}])
    with pytest.raises(DataError, match="the tokenizer has no special tokens"):
        renderer_named(tokenizer, "llama3")


CALLS: dict[str, Callable[[str], Any]] = {
    "strip": lambda text: text.strip(),
    "lstrip": lambda text: text.lstrip("a"),
    "rstrip": lambda text: text.rstrip(),
    "split": lambda text: text.split(),
    "split by": lambda text: text.split("a"),
    "split once": lambda text: text.split("a", 1),
    "rsplit by": lambda text: text.rsplit("a", 1),
    "rsplit": lambda text: text.rsplit(None, 1),
    "splitlines": lambda text: text.splitlines(),
    "lines with ends": lambda text: text.splitlines(keepends=True),
    "partition": lambda text: list(text.partition("a")),
    "rpartition": lambda text: list(text.rpartition("a")),
    "removeprefix": lambda text: text.removeprefix("a"),
    "removesuffix": lambda text: text.removesuffix("a"),
    "slice": lambda text: text[1:-1],
    "reverse": lambda text: text[::-1],
    "letters": list,
    "twice": lambda text: text * 2,
    "sum": lambda text: "x" + text + text,
    "join": lambda text: text.join(["x", "y", text]),
    "replace": lambda text: text.replace("a", text[:2]),
    "upper": lambda text: text.upper(),
    "title": lambda text: text.title(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_traced_text_does_what_a_text_does_and_keeps_origins(name: str) -> None:
    """Each character of the text has an origin of its own, which is found with it afterwards."""
    rng = random.Random(5)
    token = _BUDGET.set(_Budget())
    for _ in range(200):
        text = "".join(rng.choices("aab \n\r\tÄßé", k=rng.randint(0, 12)))
        origins = "".join(map(chr, range(2000, 2000 + len(text))))
        plain, traced = CALLS[name](text), CALLS[name](OriginText(text, origins))
        pieces = traced if isinstance(traced, list) else [traced]
        assert [str.__str__(one) for one in pieces] == (plain if isinstance(plain, list) else [plain])
        for piece in pieces:
            assert len(piece._from) == len(piece)
            for letter, origin in zip(str.__iter__(piece), piece._from, strict=True):
                at = ord(origin) - 2000
                assert at < 0 or letter == text[at] or name in ("upper", "title")
    _BUDGET.reset(token)


NO_ENDS = {
    "none is written": "{{ m.content }}",
    "it is left out of the loss": "{% generation %}{{ m.content }}{% endgeneration %}<|end|>",
}


@pytest.mark.parametrize("answer", NO_ENDS.values(), ids=NO_ENDS)
def test_answers_whose_end_is_not_learned_are_warned_of_once(answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    template = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{answer}{{% endfor %}}"
    ours = JinjaRenderer(small(), template, {"eos_token": "<|end|>"})
    talk: list[Message] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    for _ in range(2):
        assert any(ours.render(talk).mask)
    said = capsys.readouterr()
    assert (said.out + said.err).count("no token that ends an answer is in the loss") == 1


@pytest.mark.parametrize("content", ["", "I add them."])
@pytest.mark.parametrize("calls", [1, 2])
def test_calls_of_tools_are_written_as_transformers_writes_them_and_are_in_the_loss(content: str, calls: int) -> None:
    ours, theirs = pair("qwen25").ours, pair("qwen25").theirs
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "é <|im_end|>", "b": [1, 2.5]}}}
    asked: list[Any] = [{"role": "user", "content": "Add 1 and 2."}]
    called = {"role": "assistant", "content": content, "tool_calls": [call] * calls}
    whole = [*asked, called, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}, *asked]
    plain: list[Any] = json.loads(json.dumps(whole).replace(" <|im_end|>", ""))
    expected = theirs.apply_chat_template(plain, tools=TOOLS, tokenize=True, return_dict=False)
    assert ours.render(plain, tools=TOOLS).ids == expected
    prompt = ours.prompt(plain[:1], tools=TOOLS)
    assert prompt == expected[: len(prompt)]
    rendered = ours.render(whole, tools=TOOLS)
    learned = theirs.decode([id for id, mask in zip(rendered.ids, rendered.mask, strict=True) if mask])
    said = f"{content}\n" if content else ""
    written = '<tool_call>\n{"name": "add", "arguments": {"a": "é <|im_end|>", "b": [1, 2.5]}}\n</tool_call>'
    assert learned == f"{said}{chr(10).join([written] * calls)}<|im_end|>It is 3.<|im_end|>"
    ends = [id for id, mask in zip(rendered.ids, rendered.mask, strict=True) if mask and id in ours.end_ids]
    assert len(ends) == 2, "an argument spells no special token"
    assert ours.writes_tools
    assert not pair("smollm2").ours.writes_tools
