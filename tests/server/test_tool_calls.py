"""Tools from the request through the template to the model, and calls back, with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import NAME, Running, running
from tests.support.scripted import scripted_checkpoint
from tests.support.tiny_models import split

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}got {% endif %}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "called {{ call.function.name }} with {{ call.function.arguments.items() | list }}\n{% endfor %}{% endif %}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{{ message.content }}{% endfor %}"
    "{% if response_format %}{{ response_format.type }}<json>{% endif %}"
)
CONSIDERED = '<tool_call>{"name": "add", "arguments": {"a": 9}}</tool_call>'
LINES = (
    ("<call>", "<tool_call>\n", '{"name": "add", "arguments": {"a": 1, "b": 2}}', "\n</tool_call>"),
    ("<twice>", '<tool_call>{"name": "add"}', '</tool_call><tool_call>{"name": "mul"}</tool_call>'),
    ("<both>", "Let me ", "see.\n", "<tool_call>\n"),
    ("<talk>", "It is ", "three."),
    ("<json>", '{"a": ', "1}"),
    ("<later>", "So: ", "[TOOL_CALLS]"),
    ("<coder>", "<tool_call>\n<function=add>", "<parameter=a>1</parameter>", "<parameter=b>7</parameter></function>"),
    ("<mistral>", "[TOOL_CALLS]", '[{"name": "add", ', '"arguments": {}}]'),
    ("<spanned>", "I look.\n", "[TOOL_CALLS]"),
    ("<ponder>", "<think>", f"Perhaps {CONSIDERED}?", "</think>", "No tool."),
    ("<end>", "</think>"),
    ("<forever>", "<think>Perhaps ", CONSIDERED, " or not"),
)
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("serve") / "scripted"
    scripted_checkpoint(folder, LINES, TEMPLATE, special=("[TOOL_CALLS]", "</think>"))
    with running(split(folder)) as server:
        yield server


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ({"type": "integer"}, {"type": "string"}),
        ({"type": ["null", "integer"]}, {"type": ["null", "string"]}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "integer"}]}),
        ({"oneOf": [{"type": "integer"}]}, {}),
        ({"type": "integer", "anyOf": 7}, {"type": 7}),
    ],
)
def test_values_without_quotes_have_the_types_of_the_schema(scripted: Running, of_a: Any, of_b: Any) -> None:
    """Also those of optional parameters, which have several."""
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": of_a, "b": of_b}}}
    choice = ask(scripted, "<coder>", tools=[{"type": "function", "function": function}]).choices[0]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1, "b": "7"}


def ask(scripted: Running, word: str, **options: Any) -> Any:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "tools": [ADD], **options}
    messages: list[Any] = [{"role": "user", "content": word}]
    return scripted.openai().chat.completions.create(model=NAME, messages=messages, **settings)


@pytest.mark.parametrize(
    ("word", "text", "arguments"),
    [
        ("<call>", None, {"a": 1, "b": 2}),
        ("<both>", "Let me see.", {"a": 1, "b": 2}),
        ("<mistral>", None, {}),
        ("<later>", "So:", {}),
    ],
)
def test_tool_call(scripted: Running, word: str, text: str | None, arguments: dict[str, int]) -> None:
    choice = ask(scripted, word).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == text
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", arguments)

    chunks = [chunk.choices[0] for chunk in ask(scripted, word, stream=True)]
    assert chunks[-1].finish_reason == "tool_calls"
    assert "".join(chunk.delta.content or "" for chunk in chunks).rstrip() == (text or "")
    (streamed,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (streamed.index, streamed.function.name) == (0, "add")
    assert json.loads(streamed.function.arguments) == arguments
    assert streamed.id.startswith("call_")


BAR, NS = "\uff5c", "]<]minimax[>["
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "GLM": (
        ("<tool_call>", "glm\n", "<arg_key>", "n", "</arg_key>", "<arg_value>", "7", "</arg_value>", "</tool_call>"),
        ("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        {"n": 7},
    ),
    "DeepSeek": (
        (
            *(f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁call▁begin{BAR}>", "deepseek", f"<{BAR}tool▁sep{BAR}>"),
            *('{"n": 1}', f"<{BAR}tool▁call▁end{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"),
        ),
        tuple(f"<{BAR}tool▁{mark}{BAR}>" for mark in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
        {"n": 1},
    ),
    "DeepSeek V3.2": (
        (
            *("<", f"{BAR}DSML{BAR}", 'function_calls>\n<|DSML|invoke name="dsml">\n'.replace("|", BAR)),
            '<|DSML|parameter name="n" string="false">3</|DSML|parameter>\n</|DSML|invoke>\n'.replace("|", BAR),
            f"</{BAR}DSML{BAR}function_calls>",
        ),
        (f"{BAR}DSML{BAR}",),
        {"n": 3},
    ),
    "Kimi": (
        (
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.kimi:0"),
            *("<|tool_call_argument_begin|>", '{"n": 2}', "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ),
        (
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
            *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ),
        {"n": 2},
    ),
    "MiniMax M3": (
        (NS, f'<tool_call>\n{NS}<invoke name="minimax">{NS}<n>4{NS}</n>{NS}</invoke>\n', f"{NS}</tool_call>"),
        (NS,),
        {"n": 4},
    ),
    "Gemma 4": (
        ("<|tool_call>", "call:gemma{n:5,t:", '<|"|>', 'x <|"|>}', "<tool_call|>"),
        ("<|tool_call>", '<|"|>', "<tool_call|>"),
        {"n": 5, "t": "x "},
    ),
}
"""Family -> a call as its tokens, those of them that are special, and the arguments. Each token has one successor, so a
mark that comes again is in an ordinary token."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    lines = [(f"<ask {family}>", *tokens) for family, (tokens, _, _) in FAMILIES.items()]
    special = [mark for _, marks, _ in FAMILIES.values() for mark in marks]
    folder: Path = tmp_path_factory.mktemp("serve") / "families"
    scripted_checkpoint(folder, lines, "{{ messages[-1].content }}{# {{ tools }} #}{% if tools %}{% endif %}", special)
    with running(split(folder)) as server:
        yield server


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_of_calls_that_are_special_tokens(families: Running, family: str) -> None:
    tokens, _, arguments = FAMILIES[family]
    name = next(name for name in ("glm", "deepseek", "dsml", "kimi", "minimax", "gemma") if name in "".join(tokens[1:]))
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}, "t": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
    choice = ask(families, f"<ask {family}>", tools=tools).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    _, text, calls, reason = streamed(ask(families, f"<ask {family}>", tools=tools, stream=True))
    assert (text, reason, calls[0].function.arguments) == ("", "tool_calls", call.function.arguments)


def streamed(chunks: Any) -> tuple[str, str, list[Any], str | None]:
    """Reasoning, text, calls and finish reason."""
    choices = [chunk.choices[0] for chunk in chunks]
    reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)
    text = "".join(choice.delta.content or "" for choice in choices)
    return reasoning, text, [c for choice in choices for c in choice.delta.tool_calls or []], choices[-1].finish_reason


@pytest.mark.parametrize("tools", [[ADD], None])
@pytest.mark.parametrize(
    ("word", "reasoning", "text"),
    [
        ("<ponder>", f"Perhaps {CONSIDERED}?", "No tool."),
        ("<think>", f"Perhaps {CONSIDERED}?", "No tool."),  # the prompt ends inside
        ("<forever>", f"Perhaps {CONSIDERED} or not", ""),
        ("<end>", "", "No tool."),
    ],
)
def test_call_inside_reasoning_is_ignored(scripted: Running, word: str, reasoning: str, text: str, tools: Any) -> None:
    choice = ask(scripted, word, tools=tools).choices[0]
    assert choice.finish_reason == "stop"
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert getattr(choice.message, "reasoning_content", "") == reasoning
    assert streamed(ask(scripted, word, tools=tools, stream=True)) == (reasoning, text, [], "stop")


def test_a_stop_text_is_not_found_across_a_marker(scripted: Running) -> None:
    """The marker is a special token, and part of the text in which stop texts are looked for."""
    choice = ask(scripted, "<spanned>", stop=["\n[{", "k.\n["]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == "I loo"
    choice = ask(scripted, "<spanned>", stop=["\n[{"]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert [call.function.name for call in choice.message.tool_calls] == ["add"]
    reasoning, text, calls, reason = streamed(ask(scripted, "<spanned>", stop=["\n[{"], stream=True))
    assert (reasoning, text.rstrip(), reason) == ("", "I look.", "tool_calls")
    assert [call.function.name for call in calls] == ["add"]
    without = ask(scripted, "<spanned>", stop=["\n[{"], tools=None).choices[0]
    assert without.message.content == "I look."  # no tools, no marker: the text that the client sees


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_templates_get_earlier_reasoning(scripted: Running, name: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", name: "the hare"},
        {"role": "user", "content": "<talk>"},
    ]
    answer = scripted.post("/v1/chat/completions", {"messages": messages, "temperature": 0})
    assert answer.status_code == 200, answer.text
    tokens = len(scripted.model.tokenizer("a(the hare)b<talk>", add_special_tokens=False)["input_ids"])
    assert answer.json()["usage"]["prompt_tokens"] == tokens
    answer = scripted.post("/v1/chat/completions", {"messages": [{**messages[0], name: "the hare"}]})
    assert answer.json()["error"]["message"] == "messages.0 is of user; only an assistant has reasoning."


def test_plain_text_has_no_tool_calls(scripted: Running) -> None:
    for answer in (ask(scripted, "<talk>"), ask(scripted, "<talk>", tools=None)):
        assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("It is three.", None)
        assert answer.choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content for chunk in ask(scripted, "<talk>", stream=True)]
    assert [piece for piece in pieces if piece] == ["It is ", "three."]


def test_tool_choice_none_hides_tools_from_the_template(scripted: Running) -> None:
    with_tools, without_tools = ask(scripted, "<talk>"), ask(scripted, "<talk>", tool_choice="none")
    assert without_tools.usage.prompt_tokens < with_tools.usage.prompt_tokens
    answer = ask(scripted, "<call>", tool_choice="none")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content.startswith("<tool_call>")


def test_templates_get_tool_calls_and_results(scripted: Running) -> None:
    """Arguments as the table that templates expect."""
    messages = [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3 <talk>"},
    ]
    answer = scripted.openai().chat.completions.create(model=NAME, messages=messages, temperature=0)  # type: ignore[arg-type]
    expected = "addcalled add with [('a', 1)]\ngot 3 <talk>"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(scripted.model.tokenizer(expected, add_special_tokens=False)["input_ids"])
    assert answer.choices[0].message.content == "It is three."


@pytest.mark.parametrize("arguments", ["", " ", None, "{}", {}])
def test_templates_get_calls_without_arguments(scripted: Running, arguments: Any) -> None:
    """Clients send it back in any of these forms; some send the answer of a tool as null."""
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": None},
        {"role": "user", "content": "<talk>"},
    ]
    answer = scripted.post("/v1/chat/completions", {"messages": messages, "temperature": 0})
    expected = "addcalled add with []\ngot <talk>"
    assert answer.status_code == 200, answer.text
    tokens = len(scripted.model.tokenizer(expected, add_special_tokens=False)["input_ids"])
    assert answer.json()["usage"]["prompt_tokens"] == tokens


def test_templates_get_the_response_format(scripted: Running) -> None:
    answer = ask(scripted, "", tools=None, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"a": 1}


def test_without_parallel_calls_the_first_counts(scripted: Running) -> None:
    """Codex asks for this by default."""
    names = [
        [call.function.name for call in ask(scripted, "<twice>", **options).choices[0].message.tool_calls]
        for options in ({}, {"parallel_tool_calls": False})
    ]
    assert names == [["add", "mul"], ["add"]]
