"""Calls of tools in the forms in which models write them, whole and in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.server._tools import MARKERS, CallReader, ParsedToolCall
from tests.server.serving import PATIENT

TOOLS = ("add", "weather")
ADD = ParsedToolCall("add", '{"a": 1, "b": [2, "x"]}')
WEATHER = ParsedToolCall("weather", '{"city": "Köln"}')
FORMS = {
    "hermes": ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>', "", (ADD,)),
    "hermes, two and text": (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
        "Let me see.",
        (ADD, WEATHER),
    ),
    "hermes, cut off": ('<tool_call>\n{"name": "add", "argum', '<tool_call>\n{"name": "add", "argum', ()),
    "hermes, no end": ('<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}', "", (WEATHER,)),
    "qwen 3 coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>",
        "",
        (WEATHER,),
    ),
    "qwen 3 coder, types": (
        '<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, "x"]\n</parameter>\n'
        "</function>\n</tool_call>",
        "",
        (ADD,),
    ),
    "qwen 3 coder, no end of the function": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</tool_call>",
        "",
        (WEATHER,),
    ),
    **{
        f"qwen 3 coder, cut off in {where}": (written, written, ())
        for where, written in {
            "a name": "<tool_call>\n<function=wea",
            "a value": "<tool_call>\n<function=weather>\n<parameter=city>\nKö",
            "the end": "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</func",
        }.items()
    },
    "mistral": ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}]', "", (ADD,)),
    "mistral, two": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}, '
        '{"name": "weather", "arguments": {"city": "Köln"}}]',
        "",
        (ADD, WEATHER),
    ),
    "mistral, later": ('[TOOL_CALLS]weather[ARGS]{"city": "Köln"}', "", (WEATHER,)),
    "mistral, later, two": (
        'So: [TOOL_CALLS]weather{"city": "Köln"}[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1, "b": [2, "x"]}',
        "So:",
        (WEATHER, ADD),
    ),
    "llama 3": ('{"name": "weather", "parameters": {"city": "Köln"}}', "", (WEATHER,)),
    "llama 3, tagged": ('<|python_tag|>{"name": "weather", "parameters": {"city": "Köln"}}', "", (WEATHER,)),
    "llama 3, two": (
        '{"name": "weather", "parameters": {"city": "Köln"}}; {"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}',
        "",
        (WEATHER, ADD),
    ),
    "json that calls nothing": ('{"name": "somebody", "age": 7}', '{"name": "somebody", "age": 7}', ()),
    "a list": ("[1, 2] are numbers", "[1, 2] are numbers", ()),
    "text": ("2 < 3 and <tool is no call", "2 < 3 and <tool is no call", ()),
    "nothing": ("", "", ()),
    "spaces": ("  \n", "  \n", ()),
}
TYPES = {"add": {"a": "integer", "b": "array"}, "weather": {"city": "string"}}


def read(pieces: list[str]) -> tuple[str, tuple[ParsedToolCall, ...]]:
    reader = CallReader(TOOLS, TYPES)
    text = "".join(reader.feed(piece) for piece in pieces)
    rest, calls = reader.end()
    return text + rest, calls


@pytest.mark.parametrize("form", FORMS)
def test_tool_call_formats(form: str) -> None:
    written, text, calls = FORMS[form]
    answer, read_calls = read([written])
    assert (answer.rstrip() if calls else answer, read_calls) == (text, calls)


@PATIENT
@given(form=st.sampled_from(sorted(FORMS)), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_result_is_independent_of_chunking(form: str, cuts: list[int]) -> None:
    written = FORMS[form][0]
    offsets = sorted({0, len(written), *(min(cut, len(written)) for cut in cuts)})
    assert read([written[a:b] for a, b in pairwise(offsets)]) == read([written])


@PATIENT
@given(st.text(alphabet='<>tool_ca/|[]{}"namergus:,TOL_CS 1\n', max_size=80))
def test_text_without_calls_is_unchanged(written: str) -> None:
    """Whatever it begins like."""
    text, calls = read(list(written))
    if calls:
        assert all(json.loads(call.arguments) is not None for call in calls if call.arguments[:1] == "{")
    else:
        assert text == written


def test_text_is_not_held_back() -> None:
    reader = CallReader(TOOLS)
    assert reader.feed("Hello ") == "Hello "
    assert reader.feed("a <to") == "a "
    assert reader.feed("y>") == "<toy>"
    assert reader.feed("and " + MARKERS[0]) == "and "
    assert reader.feed("x") == ""
