"""Answers that must have a form, from OpenAI's own client: a random model at temperature 1.5 has no other choice."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

import rabbitllm
from rabbitllm.generation.reasoning import AnswerFormat, Thoughts
from rabbitllm.server._answer_reader import AnswerReader
from rabbitllm.server._grammars import answer_grammar, json_type, must_call
from rabbitllm.server._metrics import CONTENT_TYPE
from rabbitllm.server.api_error import APIError
from rabbitllm.server.schemas import ChatBody, parsed
from tests.generation.test_grammar import follows
from tests.server.serving import NAME, STREAMED, Running, running
from tests.server.test_tools import FULL, PUBLISHED
from tests.support.builders import VOCABULARY_SIZE, build_checkpoint, make_tokenizer
from tests.support.schemas import check
from tests.support.scripted import scripted_checkpoint
from tests.support.tiny_models import load, split

HELLO: Any = [{"role": "user", "content": "hi"}]
HOT: Any = {"model": NAME, "messages": HELLO, "temperature": 1.5, "max_tokens": 600}
FORMS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "coder": "<tool_call>\n<function=f>\n",
    "mistral": "[TOOL_CALLS]",
    "later": "[TOOL_CALLS]f[ARGS]",
    "bare": "",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
    "glm 4.7": "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "minimax m1": "<tool_calls>",
    "minimax m2": "<minimax:tool_call>",
    "minimax m3": "]<]minimax[>[<tool_call>",
    "kimi": "<|tool_calls_section_begin|>",
    "deepseek": "<\uff5ctool▁call▁begin\uff5c>",
}
"""What templates of each form show."""
ADD: Any = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"$ref": "#/$defs/unit"},
        "list": {"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 2},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["a", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["km", "light years"]}},
}
ONE_CALL = ("bare", "minimax m3", "kimi")
"""Forms in which there is one forced call."""
MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
SCHEMAS = {"add": ADD, "stop": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "stop"}},
]
FORCED: Any = {"type": "function", "function": {"name": "add"}}


class Place(BaseModel):
    kind: Literal["town", "city"]
    people: int = Field(ge=0, le=1000)


class Rabbit(BaseModel):
    """Without bounds, which Anthropic's client leaves out."""

    color: Literal["grey", "brown"]
    ears: list[Literal["left", "right"]]
    is_tame: bool


class Person(BaseModel):
    initial: Literal["a", "b"]
    home: Place
    places: list[Place] | None = Field(max_length=2)


@pytest.fixture(scope="module")
def split_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("structured") / "llama"
    build_checkpoint(folder, "llama", max_position_embeddings=2048, vocab_size=VOCABULARY_SIZE + len(MARKS))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([*MARKS])  # as Qwen's: tokens that no text has, and not special
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ tools }}"
    tokenizer.save_pretrained(folder)
    return split(folder)


@pytest.fixture(scope="module")
def served(split_folder: Path) -> Iterator[Running]:
    with running(split_folder) as server:
        yield server


@pytest.fixture
def of_form(served: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(form: str) -> Running:
        template = served.service.tokenizer.chat_template
        monkeypatch.setattr(served.service.tokenizer, "chat_template", "{# " + FORMS[form] + " #}" + template)
        return served

    return use


def test_without_the_package_the_extra_is_named(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = served.post("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}})
    assert answer.status_code == 400
    assert "need the package llguidance, which is not installed. Run pip install" in answer.json()["error"]["message"]


def test_parse_gives_an_object(served: Running) -> None:
    completions = served.openai().chat.completions
    for seed in range(5):
        answer = completions.parse(**HOT, seed=seed, response_format=Person)
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_without_a_name_around_it(served: Running, kind: str) -> None:
    bare = {"type": kind, "schema": {"enum": ["the rain", "a longer one"]}}
    for seed in range(3):
        answer = served.openai().chat.completions.create(**HOT, seed=seed, response_format=bare)
        assert answer.choices[0].message.content in ('"the rain"', '"a longer one"')


def test_streamed_answers_are_the_same(served: Running) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": ADD, "strict": True}}
    client = served.openai()
    whole = client.chat.completions.create(**HOT, seed=3, response_format=form).choices[0].message.content
    chunks = client.chat.completions.create(**HOT, seed=3, response_format=form, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    check(ADD, json.loads(whole or ""))


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "x" /[0-9]{2}/'}, r"x\d\d"),
        ({"grammar": 'root ::= "x" [0-9] [0-9]'}, r"x\d\d"),
        ({"json": {"enum": [1, "b"]}}, '1|"b"'),
        ({"json": '{"const": 5}', "regex": None}, "5"),
    ],
)
def test_structured_outputs_as_vllm_names_them(served: Running, outputs: Any, pattern: str) -> None:
    client = served.openai()
    chat = client.chat.completions.create(**HOT, n=3, extra_body={"structured_outputs": outputs})
    assert all(re.fullmatch(pattern, choice.message.content or "") for choice in chat.choices)
    options: Any = {"model": NAME, "prompt": "a", "temperature": 1.5, "max_tokens": 50}
    completion = client.completions.create(**options, extra_body={"structured_outputs": outputs})
    assert re.fullmatch(pattern, completion.choices[0].text)


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "no schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            "response_format",
            "uniqueItems",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "unheard": 1}}},
            "response_format",
            "unheard",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs", "not a text"),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs", "NoExtensionBias"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "list of texts"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "both",
        ),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice", "not among the tools"),
        ({"tool_choice": FORCED, "tools": TOOLS[1:]}, "tool_choice", "add"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "required"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            },
            "tools",
            "not",
        ),
    ],
)
def test_what_cannot_be_guaranteed_is_refused(
    served: Running, fields: Mapping[str, Any], param: str, named: str
) -> None:
    answer = served.post("/v1/chat/completions", {"messages": HELLO, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("form", FORMS)
def test_forced_calls(of_form: Any, form: str) -> None:
    """Whole, and cut off, which is no text either."""
    client: openai.OpenAI = of_form(form).openai()
    for choice, several in ("required", True), ("required", False), (FORCED, True):
        options: Any = {"parallel_tool_calls": several, "seed": 1}
        answer = client.chat.completions.create(**HOT, tools=TOOLS, tool_choice=choice, **options)
        calls: Any = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert not answer.choices[0].message.content
        assert len(calls) == 1 or (several and choice == "required" and form not in ONE_CALL)
        for call in calls:
            check(SCHEMAS[call.function.name], json.loads(call.function.arguments))
        assert choice == "required" or calls[0].function.name == "add"
    forced: Any = {**HOT, "tools": TOOLS, "tool_choice": FORCED, "seed": 1}
    cuts: Any = {"max_tokens": 2}, {"max_tokens": answer.usage.completion_tokens * 3 // 4}, {"stop": ["km", "light"]}
    for index, limit in enumerate(cuts):
        reason = "stop" if "stop" in limit else "length"
        cut = client.chat.completions.create(**{**forced, **limit}).choices[0]
        begun = [call.function for call in cut.message.tool_calls or ()]
        assert (cut.finish_reason, cut.message.content or "", bool(begun)) == (reason, "", index > 0)
        assert all(call.name == "add" and len(call.arguments) <= len(calls[0].function.arguments) for call in begun)
        chunks = [*client.chat.completions.create(**{**forced, **limit}, stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        streamed = [call.function for delta in deltas for call in delta.tool_calls or ()]
        assert [call.arguments for call in streamed] == [call.arguments for call in begun]
        assert chunks[-1].choices[0].finish_reason == reason
        assert not any(delta.content for delta in deltas)


@pytest.mark.parametrize("name", PUBLISHED)
def test_forced_calls_are_written_as_templates_show(name: str) -> None:
    """As the published template shows two of them, or as bare JSON."""
    _, written = PUBLISHED[name]
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([*MARKS])
    kinds = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}, "d": {"type": "object"}}
    full = {"type": "object", "properties": kinds, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "full", "parameters": full}}]
    body = parsed(ChatBody, {"messages": HELLO, "tools": tools, "tool_choice": "required"})
    grammar = answer_grammar(body, tokenizer, body.tools or (), None, written, forced=must_call(body))
    assert grammar is not None
    bare = json.dumps({"name": "full", "parameters": FULL})
    is_own = name.startswith(("GLM", "MiniMax M1", "MiniMax M2", "DeepSeek R1", "DeepSeek V3.1"))
    once = re.sub(r"<\|tool_call_begin\|>functions.full:1.*?<\|tool_call_end\|>", "", written.strip())  # of Kimi
    expected = [is_own, is_own or name == "Kimi K2", not is_own and name != "Kimi K2"]
    assert [follows(grammar, text, tokenizer) for text in (written.strip(), once, bare)] == expected


@pytest.mark.parametrize("form", ["coder", "glm", "glm 4.7", "minimax m2"])
def test_texts_without_quotes_are_free_or_refused(of_form: Any, form: str) -> None:
    server = of_form(form)
    text: Any = {"properties": {"t": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["t"]}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": text}}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required", "temperature": 1.5, "max_tokens": 70}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] in ("tool_calls", "length")
    text["required"] = None
    assert "more than a list of properties" in server.post("/v1/chat/completions", body).json()["error"]["message"]
    text["required"] = ["t"]
    text["properties"]["t"] = {"type": "string", "pattern": "^a"}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert "The parameter t is a text with a form" in refused.json()["error"]["message"]


WORD: Any = {"type": "string"}


@pytest.mark.parametrize(
    ("of_t", "beside", "named"),
    [
        ({"type": ["string", "null"]}, {"required": ["t"], "$schema": "x", "additionalProperties": False}, ""),
        ({**WORD, "enum": ["a", "b"], "deprecated": True}, {}, ""),
        ({"$ref": "#/$defs/a~1b", "deprecated": True}, {"$defs": {"a/b": WORD}}, ""),
        (WORD, {"required": ["t", "u"]}, "more than a list"),
        (WORD, {"minProperties": 1}, "more than a list"),
        (WORD, {"not": {}}, "more than a list"),
        ({"$ref": "#/$defs/c"}, {"$defs": {"a": {"$anchor": "c", "type": "integer"}}}, "a text with a form"),
        ({"$ref": "#/$defs/a", "maxLength": 2}, {"$defs": {"a": WORD}}, "a text with a form"),
        ({"anyOf": [WORD, {"type": "null"}], "maxLength": 2}, {}, "a text with a form"),
        ({"enum": ["a</parameter>"]}, {}, "a text with a form"),
        ({**WORD, "enum": ["a", "bc"], "maxLength": 1}, {}, "a text with a form"),
        (False, {}, "a text with a form"),
    ],
)
def test_calls_without_quotes_guarantee_all_or_refuse(of_t: Any, beside: Any, named: str) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"t": of_t}, **beside}}
    tools = [{"type": "function", "function": function}]
    body = parsed(ChatBody, {"messages": HELLO, "tools": tools, "tool_choice": "required"})
    with pytest.raises(APIError, match=named) if named else contextlib.nullcontext():
        answer_grammar(body, make_tokenizer(), body.tools or (), None, "<tool_call> <function=", forced=must_call(body))


def test_forced_calls_in_streams_and_batch_lines(of_form: Any, split_folder: Path) -> None:
    server: Running = of_form("hermes")
    options: Any = {"tools": TOOLS, "tool_choice": FORCED, "seed": 1}
    whole: Any = server.openai().chat.completions.create(**HOT, **options).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in server.openai().chat.completions.create(**HOT, **options, stream=True)]
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)
    (streamed,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert streamed.function.arguments == whole[0].function.arguments
    outputs = {"structured_outputs": {"regex": "[ab]{3}-[0-9]"}}
    lines = [
        {"custom_id": str(index), "url": "/v1/chat/completions", "body": {**HOT, "seed": 2, **more}}
        for index, more in enumerate((options, outputs))
    ]
    model = load(split_folder, STREAMED)
    model.tokenizer.chat_template = server.service.tokenizer.chat_template
    called, matched = (answer["response"]["body"]["choices"][0] for answer in rabbitllm.batch(model, lines))
    assert called["finish_reason"] == "tool_calls"
    assert called["message"]["tool_calls"][0]["function"] == whole[0].function.model_dump()
    assert re.fullmatch("[ab]{3}-[0-9]", matched["message"]["content"])


def test_probabilities_have_no_end(split_folder: Path) -> None:
    """Neither that of a tokenizer without one, nor where ends are ignored: the grammar ends the answer."""
    model = load(split_folder, STREAMED)
    model.tokenizer.eos_token, model.generation_config.eos_token_id = None, None
    asked = {"structured_outputs": {"choice": ["the rain"]}, "temperature": 0, "ignore_eos": True}
    body = {"prompt": "a", "logprobs": 1, **asked}, {"messages": HELLO, "logprobs": True, **asked}
    urls = "/v1/completions", "/v1/chat/completions"
    lines = [{"custom_id": url, "url": url, "body": each} for url, each in zip(urls, body, strict=True)]
    plain, chat = (line["response"]["body"]["choices"][0]["logprobs"] for line in rabbitllm.batch(model, lines))
    assert "".join(plain["tokens"]) == "".join(entry["token"] for entry in chat["content"]) == "the rain"


def test_responses_have_a_form(of_form: Any) -> None:
    responses = of_form("hermes").openai().responses
    hot: Any = {"model": NAME, "input": "hi", "temperature": 1.5, "max_output_tokens": 600}
    assert isinstance(responses.parse(**hot, text_format=Person).output_parsed, Person)
    tools: Any = [{"type": "function", "name": "add", "parameters": ADD, "strict": True}]
    for choice in "required", {"type": "function", "name": "add"}:
        (call,) = responses.create(**hot, tools=tools, tool_choice=choice, parallel_tool_calls=False).output
        check(ADD, json.loads(call.arguments))
        with responses.stream(**hot, tools=tools, tool_choice=choice, parallel_tool_calls=False) as stream:
            (streamed,) = stream.get_final_response().output
        assert (streamed.name, streamed.status) == ("add", "completed")
        check(ADD, json.loads(streamed.arguments))


def test_messages_have_a_form(of_form: Any) -> None:
    import anthropic  # a second of each process that only collects these tests

    server: Running = of_form("hermes")
    messages = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0).messages
    hot: Any = {"model": NAME, "messages": HELLO, "max_tokens": 600, "extra_body": {"temperature": 1.5}}
    assert isinstance(messages.parse(**hot, output_format=Rabbit).parsed_output, Rabbit)
    form: Any = {"format": {"type": "json_schema", "schema": ADD}}
    check(ADD, json.loads(messages.create(**hot, output_config=form).content[0].text))  # type: ignore[union-attr]
    tools: Any = [{"name": "add", "input_schema": ADD}, {"name": "stop", "input_schema": SCHEMAS["stop"]}]
    for choice in {"type": "any"}, {"type": "tool", "name": "add"}:
        forced: Any = {**hot, "tools": tools, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        with messages.stream(**forced) as stream:
            streamed = stream.get_final_message()
        for answer in messages.create(**forced), streamed:
            assert answer.stop_reason == "tool_use"
            (call,) = answer.content
            check(SCHEMAS[call.name], call.input)
            assert choice["type"] == "any" or call.name == "add"


def test_a_call_or_the_form(served: Running) -> None:
    """A tool may be called, or the answer has the form."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
    heads = set()
    for seed in range(4):
        answer = served.openai().chat.completions.create(**HOT, seed=seed, tools=TOOLS, response_format=form)
        message = answer.choices[0].message
        heads.add("call" if message.tool_calls else message.content)
    assert heads <= {"call", "7"}
    assert "7" in heads


def test_metrics_count_forced_tokens(served: Running) -> None:
    before = served.batch.stats.forced_tokens
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "abcdef"}}}
    served.openai().chat.completions.create(**HOT, response_format=form)
    after = served.batch.stats.forced_tokens
    assert after == before + 8  # the quotes and the end too, but not the first one
    with served.http as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert f"\nrabbitllm_forced_tokens_total {after}\n" in answer.text


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "integer"),
        ({"$ref": "#/$defs/unit"}, "string"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/unit"}]}, "string"),
        ({"enum": [1, 2]}, "number"),
        ({"$ref": "#/$defs/none"}, ""),
        ({"$ref": "#"}, "object"),
        ({"$ref": "#/$defs/round"}, ""),
        ({"anyOf": [{"$ref": "#/$defs/round"}, {"$ref": "#/$defs/round"}, {"type": "null"}]}, "null"),
        ({}, ""),
    ],
)
def test_types_of_parameters(schema: Any, expected: str) -> None:
    around = {"round": {"$ref": "#/$defs/round"}}
    assert json_type(schema, {**ADD, "$defs": ADD["$defs"] | around}) == expected


def test_calls_in_channels() -> None:
    tokenizer = make_tokenizer()
    marks = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
    tokenizer.add_tokens(list(marks), special_tokens=True)
    thoughts = Thoughts(AnswerFormat.of((), tokenizer), "<|start|>assistant")
    body: Any = {"messages": HELLO, "tools": TOOLS, "response_format": {"type": "json_object"}}
    either, forced = (
        answer_grammar(chat, tokenizer, chat.tools or (), thoughts, forced=must_call(chat))
        for chat in (parsed(ChatBody, body), parsed(ChatBody, {**body, "tool_choice": FORCED}))
    )
    assert either is not None
    assert forced is not None
    written = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 7, "unit": "km"}'
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for text in (written, thought + written):
        assert follows(either, text, tokenizer)
        assert follows(forced, text, tokenizer)
        reader = AnswerReader(thoughts.form, thoughts.tail, SCHEMAS)
        piece, rest = reader.feed(text), reader.end()
        assert [(call.name, json.loads(call.arguments)) for call in rest.calls] == [("add", {"a": 7, "unit": "km"})]
        assert piece.text + rest.text == ""
    final = '<|channel|>final<|message|>{"b": 1}'
    assert follows(either, thought + final, tokenizer)
    assert not follows(forced, final, tokenizer)


def test_an_answer_after_reasoning(tmp_path: Path) -> None:
    """A model that thinks goes on thinking, and then has no other choice than the form."""
    thought = "<think>", "I ", "know", ".", "</think>", "No", " idea"
    scripted_checkpoint(tmp_path, [("<go>", *thought)], "{{ messages[-1].content }}", ("<think>", "</think>"))
    messages: Any = [{"role": "user", "content": "<go>"}]
    outputs = {"structured_outputs": {"choice": ["rabbit", "hare"]}}
    with running(split(tmp_path)) as server:
        answer = server.openai().chat.completions.create(
            model=NAME, messages=messages, temperature=0, extra_body=outputs
        )
    message: Any = answer.choices[0].message
    assert message.reasoning_content == "I know."
    assert message.content in ("rabbit", "hare")
    assert answer.choices[0].finish_reason == "stop"
