"""Every route of the API over HTTP, with the openai client, small random models and a published one."""

import base64
import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from bloomery.serve import constrained
from bloomery.serve.chat_model import ModelInfo, TextAnswerer
from bloomery.serve.constrained import ToolFormat, ToolText
from bloomery.serve.models import answerer_of
from bloomery.serve.server import serving
from bloomery.tokenizer.jinja_template import JinjaRenderer
from bloomery.weights import hf
from tests.tokenizer.made import made_for
from tests.weights.made import model as made_model
from tests.weights.made import published

import torch

ASK: Any = [{"role": "user", "content": "Where is the lamp?"}]
CONTEXT = 1024
PUBLISHED = pytest.param("published", marks=pytest.mark.slow)
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}{{ '\\n' + (tool | tojson) }}"
    "{% endfor %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Loaded:
    """Models that are loaded already."""

    is_loading = False

    def __init__(self, **models: TextAnswerer) -> None:
        self.models = models

    def names(self) -> list[ModelInfo]:
        return [ModelInfo(name, 1, Path(name), one.words.context) for name, one in self.models.items()]

    def get(self, name: str) -> TextAnswerer:
        return self.models[name]


class Site(NamedTuple):
    url: str
    client: openai.OpenAI
    loaded: hf.Loaded
    models: Loaded

    def post(self, route: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + route, json={"model": "chats", **body}, timeout=600)


def with_tools(loaded: hf.Loaded) -> hf.Loaded:
    """The same model with a tokenizer and a template that know tools."""
    tokenizer = made_for("chatml")
    chat = JinjaRenderer(
        tokenizer,
        TOOL_TEMPLATE,
        {"eos_token": "<|im_end|>"},
        [id for id in [tokenizer.special_id("<|im_end|>")] if id is not None],
    )
    return replace(loaded, language=replace(loaded.language, tokenizer=tokenizer, chat=chat, is_ours=False))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    loaded = hf.load(made_model(tmp_path_factory.mktemp("model"), context=CONTEXT))
    base = replace(loaded, language=replace(loaded.language, chat=None))
    models = Loaded(
        chats=answerer_of("chats", loaded),
        base=answerer_of("base", base),
        tools=answerer_of("tools", with_tools(loaded)),
    )
    with serving(models) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield Site(url, client, loaded, models)


def recomputed(loaded: hf.Loaded, ids: list[int]) -> torch.Tensor:
    """Log-probabilities (T, V) of what follows each token, by the model without a cache."""
    with torch.inference_mode():
        return torch.log_softmax(loaded.model.logits(loaded.model(torch.tensor([ids])))[0].float(), dim=-1)


# --- chat ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_a_recomputed_forward_pass(site: Site, stream: bool) -> None:
    asked: Any = {"model": "chats", "messages": ASK, "max_tokens": 12, "seed": 3, "logprobs": True, "top_logprobs": 4}
    got: Any = site.client.chat.completions.create(**asked, stream=stream)
    scores = [
        one
        for chunk in (got if stream else [got])
        for c in chunk.choices
        for one in (c.logprobs.content if c.logprobs else [])
    ]
    prompt = site.loaded.renderer.prompt(ASK)
    tokenizer = site.loaded.tokenizer
    spelled = {
        bytes(tokenizer.decode_bytes([id])): id for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids
    }
    answer = [spelled[bytes(one.bytes)] for one in scores]
    assert len(answer) >= 2
    expected = recomputed(site.loaded, prompt + answer)[len(prompt) - 1 :]
    for row, id, one in zip(expected, answer, scores, strict=False):
        assert one.logprob == pytest.approx(float(row[id]), abs=1e-4)
        best = torch.topk(row[: tokenizer.vocab_size], 4).values.tolist()
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(best, abs=1e-4)
        assert one.token == bytes(one.bytes).decode("utf-8", "replace")


def test_the_first_of_several_answers_is_the_one_that_is_given_alone_and_the_others_differ(site: Site) -> None:
    asked: Any = {"model": "chats", "messages": ASK, "max_tokens": 8, "seed": 5}
    alone = site.client.chat.completions.create(**asked).choices[0].message.content
    several = site.client.chat.completions.create(**asked, n=4)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert texts[0] == alone
    assert len(set(texts)) > 1
    assert texts == [c.message.content for c in site.client.chat.completions.create(**asked, n=4).choices]
    streamed = ["", "", "", ""]
    for chunk in site.client.chat.completions.create(**asked, n=4, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert several.usage is not None
    assert several.usage.completion_tokens >= 4


def test_the_beginning_of_an_answer_is_continued(site: Site) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The lamp"}]
    reply = site.post("/v1/chat/completions", messages=begun, max_tokens=6, temperature=0).json()
    whole = site.loaded.renderer.render(begun).ids
    assert reply["usage"]["prompt_tokens"] == len(whole) - 1  # all but the end of the turn
    text = reply["choices"][0]["message"]["content"]
    raw = site.post("/v1/completions", prompt=whole[:-1], max_tokens=6, temperature=0).json()["choices"][0]["text"]
    assert raw.startswith(text) or text.startswith(raw)


def test_a_bias_and_penalties_change_the_answer(site: Site) -> None:
    plain = site.post("/v1/chat/completions", messages=ASK, max_tokens=8, temperature=0).json()
    lamp = site.loaded.tokenizer.encode(" lamp")[0]
    biased = site.post("/v1/chat/completions", messages=ASK, max_tokens=8, temperature=0, logit_bias={str(lamp): 100})
    text = biased.json()["choices"][0]["message"]["content"]
    assert text == site.loaded.tokenizer.decode([lamp]) * 8
    ngram = site.post(
        "/v1/chat/completions",
        messages=ASK,
        max_tokens=8,
        temperature=0,
        logit_bias={str(lamp): 100},
        no_repeat_ngram=1,
    )
    assert ngram.json()["choices"][0]["message"]["content"].count("lamp") <= 1
    assert plain["timings"]["predicted_n"] == plain["usage"]["completion_tokens"]


def test_the_oldest_messages_are_left_out_where_that_is_asked_for(site: Site) -> None:
    turns = [{"role": role, "content": f"{number} " * 40} for number in range(12) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "Be brief."}, *turns, *ASK]
    refused = site.post("/v1/chat/completions", messages=messages, max_tokens=4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    reply = site.post("/v1/chat/completions", messages=messages, max_tokens=4, truncation="oldest").json()
    dropped = reply["dropped_messages"]
    kept = [messages[0], *messages[1 + dropped :]]
    assert kept[1]["role"] == "user"
    assert reply["usage"]["prompt_tokens"] == len(site.loaded.renderer.prompt(kept)) <= CONTEXT - 4
    more = [messages[0], *messages[1 + dropped - 2 :]]
    assert len(site.loaded.renderer.prompt(more)) > CONTEXT - 4 - 1
    short = site.post("/v1/chat/completions", messages=ASK, max_tokens=4, truncation="oldest").json()
    assert "dropped_messages" not in short


def test_a_model_without_a_chat_template_names_the_route_that_continues_text(site: Site) -> None:
    refused = site.post("/v1/chat/completions", model="base", messages=ASK)
    assert refused.status_code == 400
    assert "/v1/completions" in refused.json()["error"]["message"]
    assert site.post("/v1/completions", model="base", prompt="The lamp", max_tokens=3).status_code == 200


# --- forms -----------------------------------------------------------------------------------------------------------

SCHEMAS: dict[str, Any] = {
    "numbers": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": -50, "maximum": 50}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "a list of choices": {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 1, "maxItems": 4},
    "references": {
        "$defs": {"name": {"type": "string", "maxLength": 6}},
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/name"}, "last": {"$ref": "#/$defs/name"}},
        "required": ["first", "last"],
        "additionalProperties": False,
    },
    "one of two": {
        "anyOf": [
            {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False},
            {"type": "null"},
        ]
    },
    "a pattern": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]{2}$"},
}


def validated(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """Whether JSON data is of a schema, as far as SCHEMAS use the notation."""
    root = root or schema
    if "$ref" in schema:
        return validated(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(validated(value, one, root) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    if type(value) is not kinds[schema["type"]]:
        return False
    if isinstance(value, dict):
        known = schema["properties"]
        inner = all(key in known and validated(one, known[key], root) for key, one in value.items())
        return inner and set(schema["required"]) <= set(value)
    if isinstance(value, list):
        fits = schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(validated(one, schema["items"], root) for one in value)
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", 99) and bool(re.fullmatch(schema.get("pattern", "(?s).*"), value))
    return not isinstance(value, int) or schema.get("minimum", value) <= value <= schema.get("maximum", value)


def answers(site: Site, model: str, **asked: Any) -> list[tuple[str, str]]:
    body = {"model": model, "messages": ASK, "max_tokens": 200, "n": 8, "seed": 1, "temperature": 1, **asked}
    reply = site.post("/v1/chat/completions", **body)
    assert reply.status_code == 200, reply.text
    return [(one["message"]["content"], one["finish_reason"]) for one in reply.json()["choices"]]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("model", ["chats", "tools", PUBLISHED])
def test_every_sample_is_of_the_schema(site: Site, model: str, schema: dict[str, Any]) -> None:
    if model == "published" and model not in site.models.models:
        site.models.models[model] = answerer_of(model, hf.load(published(), dtype="auto"))
    form = {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": schema}}
    said = answers(site, model, response_format=form, n=3 if model == "published" else 8)
    for text, finish in said:
        assert finish == "stop"
        assert validated(json.loads(text), schema), text


@pytest.mark.parametrize("model", ["chats", PUBLISHED])
def test_every_finished_sample_of_json_is_an_object(site: Site, model: str) -> None:
    if model == "published" and model not in site.models.models:
        site.models.models[model] = answerer_of(model, hf.load(published(), dtype="auto"))
    n = 2 if model == "published" else 16
    said = answers(
        site,
        model,
        response_format={"type": "json_object"},
        max_tokens=300 if model == "published" else 150,
        n=n,
        temperature=0.7,
    )
    ended = [text for text, finish in said if finish == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert all(text.lstrip().startswith("{") for text, _ in said)


def test_expressions_choices_and_grammars_are_obeyed(site: Site) -> None:
    grammar = 'start: "f(" arg ("," arg)* ")"\narg: /[a-z]{1,3}/ | start'
    for text, finish in answers(site, "chats", guided_regex="(ab|c){2,5}é?"):
        assert re.fullmatch("(ab|c){2,5}é?", text)
        assert finish == "stop"
    choices = ["yes", "no", 'a "quote"\nand a line', "<|end|>"]
    assert {text for text, _ in answers(site, "chats", guided_choice=choices, n=16)} <= set(choices)
    for text, finish in answers(site, "chats", guided_grammar=grammar):
        assert finish == "length" or (text.startswith("f(") and text.count("(") == text.count(")"))
    for text, _ in answers(site, "chats", guided_json=json.dumps(SCHEMAS["a pattern"])):
        assert validated(json.loads(text), SCHEMAS["a pattern"])
    inside = {"type": "json_object", "schema": SCHEMAS["a pattern"]}
    for text, _ in answers(site, "chats", response_format=inside):
        assert validated(json.loads(text), SCHEMAS["a pattern"])
    body = {"model": "base", "prompt": "Two digits: ", "guided_regex": "[0-9]{2}"}
    assert re.fullmatch("[0-9]{2}", site.post("/v1/completions", **body).json()["choices"][0]["text"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_json": {"type": "objec"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "guided_grammar"),
        (
            {"guided_grammar": "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60))},
            "guided_grammar",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["b"]}, "guided_choice"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_an_error_that_names_the_field(
    site: Site, body: dict[str, Any], param: str
) -> None:
    refused = site.post("/v1/chat/completions", messages=ASK, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert len(refused.text) < 2000


def test_the_longest_chains_of_definitions_that_are_allowed_are_compiled(site: Site) -> None:
    last, count = {"type": "integer", "minimum": 1, "maximum": 3}, constrained.MAX_DEFINITIONS
    definitions: dict[str, Any] = {
        f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}, "required": ["x"]}
        for n in range(count - 1)
    }
    schema = {"$defs": {**definitions, f"a{count - 1}": last}, "$ref": "#/$defs/a0"}
    assert site.post("/v1/chat/completions", messages=ASK, guided_json=schema, max_tokens=3).status_code == 200
    rules = "\n".join(f"r{n}: r{n + 1}" for n in range(count - 2))
    grammar = f'start: r0\n{rules}\nr{count - 2}: "a"'
    assert answers(site, "chats", guided_grammar=grammar, n=1) == [("a", "stop")]


# --- tools -----------------------------------------------------------------------------------------------------------

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Where a thing is.",
            "parameters": {
                "$defs": {"word": {"type": "string", "pattern": "^[a-z]{1,5}$"}},
                "type": "object",
                "properties": {"thing": {"$ref": "#/$defs/word"}, "room": {"enum": [1, 2]}},
                "required": ["thing"],
            },
        },
    }
    for name in ("find", "move")
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_has_to_be_made_is_one_of_the_tools(site: Site, choice: Any, stream: bool) -> None:
    asked: Any = {
        "model": "tools",
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": choice,
        "seed": 2,
        "max_tokens": 200,
    }
    got: Any = site.client.chat.completions.create(**asked, stream=stream)
    if stream:
        choices = [one for chunk in got for one in chunk.choices]
        calls = [call for one in choices for call in one.delta.tool_calls or []]
        assert not any(one.delta.content for one in choices)
        finish = choices[-1].finish_reason
    else:
        calls, finish = got.choices[0].message.tool_calls, got.choices[0].finish_reason
        assert got.choices[0].message.content is None
    assert finish == "tool_calls"
    assert len(calls) == 1
    assert calls[0].function.name in (["find", "move"] if choice == "required" else ["move"])
    arguments = json.loads(calls[0].function.arguments)
    assert re.fullmatch("[a-z]{1,5}", arguments["thing"])
    assert arguments.get("room", 1) in (1, 2)
    assert set(arguments) <= {"thing", "room"}


def test_messages_with_calls_and_results_render_through_the_template(site: Site) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"thing": "lamp"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "room 2 <|im_end|>"},
    ]
    shown = site.post("/apply-template", model="tools", messages=messages, tools=TOOLS).json()["prompt"]
    assert '<tool_call>\n{"name": "find", "arguments": {"thing": "lamp"}}\n</tool_call><|im_end|>' in shown
    assert shown.startswith("<|im_start|>system\nTools:\n")
    assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
    items = [
        *ASK,
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"thing": "lamp"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "room 2 <|im_end|>"},
    ]
    call["function"]["arguments"] = ""  # as some clients write none
    assert '"arguments": {}}' in site.post("/apply-template", model="tools", messages=messages).json()["prompt"]
    refused = site.post("/v1/chat/completions", model="tools", messages=messages[:-1], tools=TOOLS)
    assert "the last one is from the assistant" in refused.json()["error"]["message"]  # its calls have no result
    call["function"]["arguments"] = '{"thing": "lamp"}'
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body: Any = {"model": "tools", "input": items, "tools": flat}
    tokens = site.post("/tokenize", model="tools", messages=messages, tools=TOOLS).json()["tokens"]
    assert site.post("/v1/responses/input_tokens", **body).json()["input_tokens"] == len(tokens)
    end = site.models.models["tools"].words.renderer().end_ids
    assert len([id for id in tokens if id in end]) == 4  # the one in the result is text
    answer = site.client.responses.create(**body, tool_choice="required", max_output_tokens=200)
    assert [item.type for item in answer.output] == ["function_call"]


@pytest.mark.parametrize("model", ["chats", "base"])
def test_a_model_whose_template_was_not_made_for_tools_refuses_them(site: Site, model: str) -> None:
    refused = site.post("/v1/chat/completions", model=model, messages=ASK, tools=TOOLS)
    assert refused.status_code == 400
    said = "does not support tools" if model == "chats" else "has no chat template"
    assert said in refused.json()["error"]["message"]
    assert site.post("/v1/chat/completions", messages=ASK, tools=TOOLS, tool_choice="none").status_code == 200


FORMATS = {
    "hermes": ("<tool_call>\n", "arguments", "\n</tool_call>"),
    "bare": ("", "parameters", ""),
    "mistral": ("[TOOL_CALLS] [", "arguments", "]"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_in_an_answer_are_found_however_it_is_cut(name: str, size: int) -> None:
    format = ToolFormat(*FORMATS[name])
    one = json.dumps({"name": "find", format.arguments: {"thing": "a {lamp}"}})
    two = json.dumps({"name": "move", format.arguments: {}})
    between = ", " if name == "mistral" else f"{format.end}\n{format.begin}"
    before = "" if name == "bare" else "I look.\n"
    cases = {
        before + format.begin + one + between + two + format.end: (before.rstrip(), ["find", "move"]),
        format.begin + one.replace("find", "fly") + format.end: (format.begin + one.replace("find", "fly"), []),
        "No < call [TOOL": ("No < call [TOOL", []),
        format.begin + one[:-1]: (format.begin + one[:-1], []),
    }
    for text, (content, names) in cases.items():
        filter = ToolText(format, ["find", "move"])
        shown = "".join(filter.add(text[begin : begin + size]) for begin in range(0, len(text), size))
        rest, calls = filter.end("")
        assert [call.name for call in calls] == names
        assert (shown + rest).rstrip() == (
            content + (format.end if content and not names and "fly" in text else "")
        ).rstrip()
    assert ToolText(format, ["find", "move"], one_call=True).end(next(iter(cases)))[1][0].arguments == {
        "thing": "a {lamp}"
    }


FIND, MOVE, FLY = (f'{{"name": "{name}", "parameters": {{}}}}' for name in ("find", "move", "fly"))
BROKEN = '{"name": "find", "parameters": {"name": "move", "parameters": {}} and so'


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("begin", "end", "text", "content", "names"),
    [
        (
            "<tool_call>\n",
            "\n</tool_call>",
            f"Hi <tool_call>{FIND}</tool_call>\nI wait. <tool_call>{FLY}</tool_call>",
            f"Hi \nI wait. <tool_call>{FLY}</tool_call>",
            ["find"],
        ),
        (
            "<tool_call>\n",
            "\n</tool_call>",
            f"<tool_call>{BROKEN}</tool_call><tool_call>{MOVE}</tool_call> So.",
            f"<tool_call>{BROKEN}</tool_call> So.",
            ["move"],
        ),
        ("<tool_call>\n", "\n</tool_call>", f"A <tool_call> is no {MOVE}", f"A <tool_call> is no {MOVE}", []),
        ("[TOOL_CALLS] [", "]", f"[TOOL_CALLS] [{FIND}, {FLY}, {MOVE}] So.", f"{FLY} So.", ["find", "move"]),
        ("[TOOL_CALLS] [", "]", f"[TOOL_CALLS] [{FIND}, {BROKEN}", f", {BROKEN}", ["find"]),
        ("Call: now [", "]", f"Call:\nnow [{FIND}]", "", ["find"]),
        ("", "", BROKEN, BROKEN, []),
        ("", "", f"{FIND}; {MOVE}\nSo.", "So.", ["find", "move"]),
    ],
)
def test_text_that_is_no_call_stays_in_the_answer(
    begin: str, end: str, text: str, content: str, names: list[str], size: int
) -> None:
    filter = ToolText(ToolFormat(begin, "parameters", end), ["find", "move"])
    shown = "".join(filter.add(text[at : at + size]) for at in range(0, len(text), size))
    rest, calls = filter.end("")
    assert (shown + rest, [call.name for call in calls]) == (content, names)


def test_the_format_of_calls_is_found_in_the_template(site: Site) -> None:
    assert ToolFormat.of(site.models.models["tools"].words.renderer()) == ToolFormat(*FORMATS["hermes"])
    assert ToolFormat.of(site.loaded.renderer) is None


# --- completions -----------------------------------------------------------------------------------------------------


def test_texts_and_token_ids_are_continued_alike(site: Site) -> None:
    ids = site.loaded.language.text_ids("The lamp is")
    asked: Any = {"model": "chats", "max_tokens": 6, "temperature": 0}
    texts = [
        site.client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in ("The lamp is", ids, [ids])
    ]
    both = site.client.completions.create(prompt=["The lamp is", "The lamp is"], n=2, **asked)
    assert {*texts, *(choice.text for choice in both.choices)} == {texts[0]}
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    streamed = site.client.completions.create(prompt=ids, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in streamed) == texts[0]


def test_a_text_that_is_longer_than_the_context_has_the_code_of_openai(site: Site) -> None:
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "lamp " * CONTEXT}]}),
        ("completions", {"prompt": "a " * CONTEXT}),
    ):
        answer = site.post(f"/v1/{path}", **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_text_offsets_do_not_count_special_tokens_which_are_not_in_the_text(site: Site) -> None:
    tokenizer = site.loaded.tokenizer
    lamp = tokenizer.encode("The lamp")
    ids = [min(tokenizer.special_ids), *lamp, max(tokenizer.special_ids), *tokenizer.encode(" é")]
    (choice,) = site.post("/v1/completions", prompt=ids, max_tokens=0, echo=True, logprobs=0).json()["choices"]
    offsets, text = choice["logprobs"]["text_offset"], choice["text"]
    assert text == "The lamp é"
    assert offsets[:2] == [0, 0]
    assert offsets[1 + len(lamp) :][:2] == [len("The lamp")] * 2


def test_an_echoed_prompt_has_the_logprobs_of_a_recomputed_forward_pass(site: Site) -> None:
    got = site.client.completions.create(model="chats", prompt="The lamp is on.", max_tokens=0, echo=True, logprobs=2)
    choice, ids = got.choices[0], site.loaded.language.text_ids("The lamp is on.")
    assert choice.text == "The lamp is on."
    assert choice.logprobs is not None
    expected = recomputed(site.loaded, ids)
    values = [float(expected[at, id]) for at, id in enumerate(ids[1:])]
    assert choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == "The lamp is on."
    offsets = [sum(map(len, choice.logprobs.tokens[:number])) for number in range(len(ids) - 1)]
    assert choice.logprobs.text_offset == offsets
    pairs = zip(choice.logprobs.tokens, choice.logprobs.top_logprobs or [], strict=True)
    assert all(token in top and 2 <= len(top) <= 3 for token, top in pairs)
    raw = site.client.completions.create(model="chats", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    assert raw.choices[0].logprobs is not None
    first, *rest = raw.choices[0].logprobs.token_logprobs or []
    assert first is None
    assert rest == pytest.approx(values, abs=1e-4)


def test_an_answer_that_a_stop_string_ends_has_its_logprobs_and_its_time(site: Site) -> None:
    asked: Any = {"prompt": "The lamp is", "max_tokens": 12, "temperature": 0, "logprobs": 1}
    text, every = (site.post("/v1/completions", **asked).json()["choices"][0][key] for key in ("text", "logprobs"))
    begin = len(text) * 2 // 3
    got = site.post("/v1/completions", **asked, stop=text[begin : begin + 2]).json()
    choice, times = got["choices"][0], got["timings"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == text[: text.index(text[begin : begin + 2])]
    count = sum(offset < len(choice["text"]) for offset in every["text_offset"])
    assert 1 < count < len(every["tokens"])
    assert choice["logprobs"]["tokens"] == every["tokens"][:count]
    assert choice["logprobs"]["text_offset"] == every["text_offset"][:count]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(every["token_logprobs"][:count], abs=1e-4)
    assert times["predicted_n"] == got["usage"]["completion_tokens"]
    assert times["predicted_per_second"] == pytest.approx(1000 * times["predicted_n"] / times["predicted_ms"])


def test_the_best_of_several_answers_is_the_likeliest_by_its_mean_logprob(site: Site) -> None:
    asked: Any = {"model": "chats", "prompt": "The", "max_tokens": 5, "seed": 1, "temperature": 2}
    every = site.client.completions.create(**asked, n=6, logprobs=0)
    best = site.client.completions.create(**asked, n=1, best_of=6)

    def mean(choice: Any) -> float:
        values: list[float] = choice.logprobs.token_logprobs
        return sum(values) / max(1, len(values))

    assert [choice.text for choice in best.choices] == [max(every.choices, key=mean).text]
    assert best.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": ["x"] * 9, "n": 8}, "prompt"),
        ({"prompt": [2**20]}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"prompt": "x", "logit_bias": {"5000": 1}}, "logit_bias"),
    ],
)
def test_a_wrong_completion_is_an_error_that_names_the_field(site: Site, body: dict[str, Any], param: str) -> None:
    refused = site.post("/v1/completions", **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


# --- tokens and embeddings -------------------------------------------------------------------------------------------


def test_embeddings_are_the_mean_of_the_last_hidden_states(site: Site) -> None:
    texts = ["The lamp is on.", "A box."]
    got = site.client.embeddings.create(model="chats", input=texts)  # the client asks for base64
    floats = site.post("/v1/embeddings", input=texts).json()
    for text, one, plain in zip(texts, got.data, floats["data"], strict=True):
        with torch.inference_mode():
            hidden = site.loaded.model(torch.tensor([site.loaded.language.text_ids(text)]))[0]
        expected = hidden.float().mean(0).tolist()
        assert one.embedding == pytest.approx(expected, abs=1e-5)
        assert plain["embedding"] == pytest.approx(expected, abs=1e-5)
    packed = site.post("/v1/embeddings", input="A box.", encoding_format="base64").json()["data"][0]["embedding"]
    raw = base64.b64decode(packed)
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(floats["data"][1]["embedding"], abs=1e-6)
    assert floats["usage"]["prompt_tokens"] == sum(len(site.loaded.language.text_ids(text)) for text in texts)
    assert site.post("/v1/embeddings", input="x", dimensions=8).json()["error"]["param"] == "dimensions"
    assert site.post("/v1/embeddings", input=[[1] * (CONTEXT + 1)]).json()["error"]["param"] == "input"


def test_tokens_go_to_text_and_back(site: Site) -> None:
    text = "The lamp is “on”.\n"
    whole = site.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert whole["tokens"] == site.loaded.language.text_ids(text)
    assert whole["count"] == len(whole["tokens"]) == len(whole["token_strs"])
    assert whole["max_model_len"] == CONTEXT
    bare = site.post("/tokenize", content=text, add_special=False).json()["tokens"]
    assert bare == site.loaded.tokenizer.encode(text)
    assert site.post("/detokenize", tokens=bare).json()["content"] == text
    long = site.post("/tokenize", prompt="lamp " * 2000).json()
    assert long["count"] > CONTEXT  # counting is what it is for


def test_a_conversation_is_counted_and_shown_as_the_model_gets_it(site: Site) -> None:
    ids = site.loaded.renderer.prompt(ASK)
    assert site.post("/tokenize", messages=ASK).json()["tokens"] == ids
    shown = site.post("/apply-template", messages=ASK).json()["prompt"]
    names = {token["id"]: token["content"] for token in site.loaded.tokenizer.spec["added_tokens"]}
    assert shown == "".join(names.get(id) or site.loaded.tokenizer.decode([id]) for id in ids)
    counted = site.post("/v1/responses/input_tokens", input=ASK[0]["content"]).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": len(ids)}


# --- responses -------------------------------------------------------------------------------------------------------


def test_a_response_is_the_answer_of_a_chat(site: Site) -> None:
    chat = site.client.chat.completions.create(model="chats", messages=ASK, max_tokens=8, temperature=0)
    got = site.client.responses.create(model="chats", input=ASK, max_output_tokens=8, temperature=0)
    assert got.output_text == chat.choices[0].message.content
    assert got.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    asked: Any = {"model": "chats", "input": ASK, "max_output_tokens": 8, "temperature": 0}
    events = list(site.client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == ("response.incomplete" if got.status == "incomplete" else "response.completed")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == got.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": []}, "input"),
        ({"input": "x " * CONTEXT}, "input"),
    ],
)
def test_a_wrong_response_is_an_error_that_names_the_field(site: Site, body: dict[str, Any], param: str) -> None:
    refused = site.post("/v1/responses", **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_count_requests_and_tokens(site: Site) -> None:
    def value(line: str) -> float:
        rows = [one for one in httpx.get(f"{site.url}/metrics").text.splitlines() if one.startswith(line)]
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    names = ("bloomery_generated_tokens_total", "bloomery_prompt_tokens_total", "bloomery_request_seconds_count")
    before = [value(f'{name}{{model="chats"}}') for name in names]
    usage = site.post("/v1/chat/completions", messages=ASK, max_tokens=5).json()["usage"]
    after = [value(f'{name}{{model="chats"}}') for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        usage["completion_tokens"],
        usage["prompt_tokens"],
        1,
    ]
    assert value("bloomery_requests_in_progress") == 0
    text = httpx.get(f"{site.url}/metrics").text
    for name in ("bloomery_request_seconds", "bloomery_first_token_seconds"):
        rows = [row for row in text.splitlines() if row.startswith(f'{name}_bucket{{model="chats"')]
        counts = [float(row.rpartition(" ")[2]) for row in rows]
        assert counts == sorted(counts)
        assert 'le="+Inf"' in rows[-1]
    assert math.isfinite(value("bloomery_request_seconds_sum"))
