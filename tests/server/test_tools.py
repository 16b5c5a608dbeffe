"""Calls of tools in the forms in which models write them, whole and in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.server._grammars import types_of
from rabbitllm.server._tools import FORMS as TABLE
from rabbitllm.server._tools import MARKERS, CallReader, ParsedToolCall, is_known
from tests.server.serving import PATIENT

TOOLS = ("add", "weather", "full")
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
    "qwen 2.5 coder, fenced": ('```json\n{"name": "weather", "arguments": {"city": "Köln"}}\n```', "", (WEATHER,)),
    "qwen 2.5 coder, braces": ('{{"name": "weather", "arguments": {"city": "Köln"}}}', "", (WEATHER,)),
    "qwen 2.5 coder, braces in a block": (
        '<tool_call>\n{{"name": "weather", "arguments": {"city": "Köln"}}}\n</tool_call>',
        "",
        (WEATHER,),
    ),
    "qwen 2.5 coder, fenced after text, a fence in its arguments": (
        'I call it:\n\n```json\n{\n  "name": "weather",\n  "arguments": {"city": "```x```"}\n}\n```\n',
        "I call it:",
        (ParsedToolCall("weather", '{"city": "```x```"}'),),
    ),
    "qwen 2.5 coder, signatures' marks": (
        'So.\n<tools>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tools>\n'
        '<tools>{{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}}</tools>',
        "So.",
        (WEATHER, ADD),
    ),
    "signatures' marks, no end": ('<tools>\n{"name": "weather", "arguments": {"city": "Köln"}}', "", (WEATHER,)),
    **{
        f"signatures' marks, {what}": (f"Here: <tools>{text}</tools> are all.",) * 2 + ((),)
        for what, text in {
            "the name of no tool": '{"name": "somebody", "arguments": {"city": "Köln"}}',
            "no arguments": '{"name": "weather"}',
            "more than a call": '{"name": "weather", "arguments": {}, "id": 7}',
            "a call and text": '{"name": "weather", "arguments": {}} is what I write',
            "a signature": '{"type": "function", "function": {"name": "weather", "parameters": {}}}',
            "a list": '[{"name": "weather", "arguments": {}}]',
            "arguments of another kind": '{"name": "weather", "arguments": [1]}',
        }.items()
    },
    "a fence that calls nothing, then a call": (
        '```json\n{"name": "weather", "city": 1}\n```\n<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}',
        '```json\n{"name": "weather", "city": 1}\n```',
        (WEATHER,),
    ),
    "a fence that calls nothing": ('```json\n{"name": "Bo"}\n```', '```json\n{"name": "Bo"}\n```', ()),
    "a fence of another language": ("```js\n1```", "```js\n1```", ()),
    "the beginning of a fence": ("```j", "```j", ()),
    "json that calls nothing": ('{"name": "somebody", "age": 7}', '{"name": "somebody", "age": 7}', ()),
    "a list": ("[1, 2] are numbers", "[1, 2] are numbers", ()),
    "text": ("2 < 3 and <tool is no call", "2 < 3 and <tool is no call", ()),
    "nothing": ("", "", ()),
    "spaces": ("  \n", "  \n", ()),
}
BAR = "\uff5c"
NS = "]<]minimax[>["
FULL = {"a": 1, "b": 'x "y"\nz', "c": [1, "two", True], "d": {"e": None}}
JSON = json.dumps(FULL)
PUBLISHED = {
    "GLM 4.6": (
        "GLM 4.5 to 4.7",
        "\n<tool_call>full\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        '<arg_value>x "y"\nz</arg_value>\n<arg_key>c</arg_key>\n<arg_value>[1, "two", true]</arg_value>\n'
        '<arg_key>d</arg_key>\n<arg_value>{"e": null}</arg_value>\n</tool_call>\n<tool_call>full\n'
        "<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "GLM 4.7": (
        "GLM 4.5 to 4.7",
        "<tool_call>full<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
        '<arg_value>x "y"\nz</arg_value><arg_key>c</arg_key><arg_value>[1, "two", true]</arg_value>'
        '<arg_key>d</arg_key><arg_value>{"e": null}</arg_value></tool_call><tool_call>full'
        "<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    "MiniMax M1": (
        "MiniMax M1",
        f'<tool_calls>\n{{"name": "full", "arguments": {JSON}}}\n{{"name": "full", "arguments": {{"a": 2}}}}\n'
        "</tool_calls>",
    ),
    "MiniMax M2": (
        "MiniMax M2",
        '\n<minimax:tool_call>\n<invoke name="full">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">x "y"\nz</parameter>\n<parameter name="c">[1, "two", true]</parameter>\n'
        '<parameter name="d">{"e": null}</parameter>\n</invoke>\n<invoke name="full">\n'
        '<parameter name="a">2</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "MiniMax M3": (
        "MiniMax M3",
        '\n#<tool_call>\n#<invoke name="full">#<a>1#</a>#<b>x "y"\nz#</b>#<c>#<item>1#</item>#<item>two#</item>'
        '#<item>true#</item>#</c>#<d>#<e>#</e>#</d>#</invoke>\n#<invoke name="full">#<a>2#</a>#</invoke>\n'
        "#</tool_call>".replace("#", NS),
    ),
    "DeepSeek R1": (
        "DeepSeek V3, R1, V3.1",
        f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>full\n```json\n{JSON}\n"
        f"```<{BAR}tool▁call▁end{BAR}>\n<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>full\n```json\n"
        f'{{"a": 2}}\n```<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>',
    ),
    "DeepSeek V3.1": (
        "DeepSeek V3, R1, V3.1",
        f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>full<{BAR}tool▁sep{BAR}>{JSON}<{BAR}tool▁call▁end{BAR}>"
        f'<{BAR}tool▁call▁begin{BAR}>full<{BAR}tool▁sep{BAR}>{{"a": 2}}<{BAR}tool▁call▁end{BAR}>'
        f"<{BAR}tool▁calls▁end{BAR}>",
    ),
    **{
        f"DeepSeek {version}": (
            f"DeepSeek {version}",
            f'\n\n<|DSML|{block}>\n<|DSML|invoke name="full">\n<|DSML|parameter name="a" string="false">1'
            '</|DSML|parameter>\n<|DSML|parameter name="b" string="true">x "y"\nz</|DSML|parameter>\n'
            '<|DSML|parameter name="c" string="false">[1, "two", true]</|DSML|parameter>\n'
            '<|DSML|parameter name="d" string="false">{"e": null}</|DSML|parameter>\n</|DSML|invoke>\n'
            '<|DSML|invoke name="full">\n<|DSML|parameter name="a" string="false">2</|DSML|parameter>\n'
            f"</|DSML|invoke>\n</|DSML|{block}>".replace("|", BAR),
        )
        for version, block in (("V3.2", "function_calls"), ("V4", "tool_calls"))
    },
    "Kimi K2": (
        "Kimi K2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.full:0<|tool_call_argument_begin|>{JSON}"
        '<|tool_call_end|><|tool_call_begin|>functions.full:1<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ),
    "Gemma 4": (
        "Gemma 4",
        '<|tool_call>call:full{a:1,b:<|"|>x "y"\nz<|"|>,c:[1,<|"|>two<|"|>,true],d:{e:None}}<tool_call|>'
        "<|tool_call>call:full{a:2}<tool_call|>",
    ),
}
"""Template that was published -> its form, and what it makes of two calls after the text of an answer."""
UNTYPED = {"MiniMax M3": {"c": ["1", "two", "true"], "d": {"e": ""}}}
"""Arguments that are texts where no schema says more."""
TYPES = {
    "full": {"a": "integer", "b": "string", "c": "array", "d": "object"},
    "add": {"a": "integer", "b": "array"},
    "weather": {"city": "string"},
}


def read(pieces: list[str], *, is_cut: bool = False) -> tuple[str, tuple[ParsedToolCall, ...]]:
    reader = CallReader(TOOLS, TYPES, [("<think>", "</think>")])
    text = "".join(reader.feed(piece) for piece in pieces)
    rest, calls = reader.end(is_cut=is_cut)
    return text + rest, calls


@pytest.mark.parametrize("form", FORMS)
def test_tool_call_formats(form: str) -> None:
    written, text, calls = FORMS[form]
    answer, read_calls = read([written])
    assert (answer.rstrip() if calls else answer, read_calls) == (text, calls)


@pytest.mark.parametrize("name", PUBLISHED)
def test_forms_of_published_templates(name: str) -> None:
    """Whole, in single characters, cut off in the first call, and without its arguments."""
    form, written = PUBLISHED[name]
    for pieces in ([f"Text.{written}"], list(f"Text.{written}")):
        text, calls = read(pieces)
        assert text.rstrip() == "Text."
        arguments = FULL | UNTYPED.get(name, {})
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("full", arguments), ("full", {"a": 2})]
    opening = TABLE[form].opening
    assert is_known(f"{{% if tools %}}{opening}")
    named = written.index("full") + len("full")
    for end in range(written.index(opening) + len(opening), written.index("two")):
        assert read([written[:end]]) == (written[:end], ())
        text, calls = read([written[:end]], is_cut=True)
        if not calls:  # the name may go on
            assert (text, end < named + len(":0<|tool_call_argument_begin|>")) == (written[:end], True)
            continue
        assert (text.strip(), end > named) == ("", True)
        assert [call.name for call in calls] == ["full"]
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            json.loads(calls[0].arguments)
        assert name == "Gemma 4" or json.dumps(FULL).startswith(calls[0].arguments)
    assert '"b":' in calls[0].arguments  # whole ones before the cut one
    assert read([written.replace(opening, "<other>")])[0].startswith(written[:1])


def test_forms_in_the_table_are_all_published() -> None:
    others = {"Hermes, Qwen 2.5 and 3", "Qwen 3 Coder, 3.5", "Qwen 2.5 Coder", "Qwen 2.5 Coder, fenced"}
    assert {form for form, _ in PUBLISHED.values()} | others == set(TABLE)
    assert not is_known("{% for tool in tools %}{{ tool }}{% endfor %}[add(a=1)]")
    assert not is_known("{% for tool in tools %}<tools>{{ tool }}</tools>{% endfor %}```json")
    assert not is_known("{% if tools %}<|open|>call tool=<tool_call>")
    assert is_known('{{ tools }} Respond as {"name": function, "parameters": {}}')


@pytest.mark.parametrize("name", PUBLISHED)
def test_thousands_of_begun_calls_are_read_in_one_go(name: str) -> None:
    """As of a model that repeats itself up to its limit; time that grows with their square would be a minute."""
    form, written = PUBLISHED[name]
    opening = TABLE[form].opening
    begun = written[written.index(opening) + len(opening) : written.index("two")]
    for text in ((opening + begun) * 4_000, opening + begun * 4_000):
        assert read([text]) == (text, ())
        assert all(call.name == "full" for call in read([text], is_cut=True)[1])


def test_elements_within_each_other_have_the_types_of_the_schema() -> None:
    """Also behind references, which may go round; tags that do not match are no call."""
    node = {"type": "object", "properties": {"n": {"type": "number"}, "next": {"$ref": "#/$defs/node"}}}
    schema = {
        "$defs": {"node": node},
        "properties": {
            "a.b": {"type": "string"},
            "a": {"$ref": "#/$defs/node"},
            "flags": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
            "none": {"type": "array"},
            "free": {"type": "object"},
        },
    }
    types = {"add": types_of(schema)}
    written = (
        '#<tool_call>#<invoke name="add">#<a>#<n>1.5#</n>#<next>#<n>2#</n>#</next>#</a>#<a.b>7#</a.b>'
        "#<flags>#<item>true#</item>#<item>null#</item>#</flags>#<none>#</none>#<free>#<item>x#</item>#</free>"
        "#</invoke>#</tool_call>"
    ).replace("#", NS)
    reader = CallReader(TOOLS, types)
    assert reader.feed(written) == ""
    _, (call,) = reader.end()
    assert json.loads(call.arguments) == {
        "a": {"n": 1.5, "next": {"n": 2}},
        "a.b": "7",
        "flags": [True, None],
        "none": [],
        "free": {"item": "x"},
    }
    for broken in ("</next>", "<next>", "<free>"):
        wrong = written.replace(broken, "<other>")
        reader = CallReader(TOOLS, types)
        assert (reader.feed(wrong), reader.end()) == ("", (wrong, ()))


def test_a_fence_is_held_back_only_while_it_may_be_a_call() -> None:
    reader = CallReader(TOOLS)
    assert reader.feed("So:\n```json\n{") == "So:\n"
    assert reader.feed('\n  "city": 1') == '```json\n{\n  "city": 1'
    assert reader.feed(', "x": 2}\n```\n') == ', "x": 2}\n```\n'
    assert reader.feed("<tools> are ") == "<tools> are "
    assert reader.feed('```json\n{"name": "weather", "age": 7}') == ""
    assert reader.feed("\n```\n") == '```json\n{"name": "weather", "age": 7}\n```\n'
    assert reader.feed('```json\n{"name": "weather", "arguments": {"city": "Köln"}}') == ""
    assert reader.feed("\n``` Done.") == ""
    assert reader.end() == (" Done.", (WEATHER,))


CALLED = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}</tool_call>'
WRONG = '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'
CONSIDERED = ' <think><tool_call>{"name": "add", "ar'
CUT: dict[str, Any] = {
    "in a value": ('<tool_call>\n{"name": "weather", "arguments": {"city": "K', "", ("weather", '{"city": "K')),
    "after the arguments": (
        '<tool_call>{"name": "weather", "arguments": {"city": "x"}',
        "",
        ("weather", '{"city": "x"}'),
    ),
    "in the closing mark": ('So. <tool_call>{"name": "weather", "arguments": {}}\n</tool', "So.", ("weather", "{}")),
    "before the arguments": ('<tool_call>{"name": "weather", "arguments": ', "", ("weather", "")),
    "in a second call": (CALLED + '<tool_call>{"name": "weather", "arguments": {"ci', "", ADD, ("weather", '{"ci')),
    "in the name of a second one": (CALLED + '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', ADD),
    "behind a call": (CALLED + " Now ", " Now", ADD),
    "in a value without quotes": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2",
        "",
        ("add", '{"a": 1'),
    ),
    "mistral": ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": ', "", ("weather", '{"city": ')),
    "mistral, in a second call": (
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}, {"name": "weather", "arguments": {',
        "",
        ADD,
        ("weather", "{"),
    ),
    "mistral, later": ('[TOOL_CALLS]weather[ARGS]{"city": "K', "", ("weather", '{"city": "K')),
    "llama 3": ('{"name": "weather", "parameters": {"city": "K', "", ("weather", '{"city": "K')),
    "llama 3, tagged": ('<|python_tag|>{"name": "weather", "parameters": {"city": "K', "", ("weather", '{"city": "K')),
    "in a fence": ('So:\n```json\n{"name": "weather", "arguments": {"city": "K', "So:", ("weather", '{"city": "K')),
    "in a mark that calls nothing": ("Write <tool_call> and so",),
    "in text that names a tool": ('Write <tool_call>, then {"name": "weather",',),
    "in json that calls nothing": ('{"name": "Bo", "arguments": {"a',),
    "in json with the name of a tool inside": ('[1, {"name": "add", "a',),
    "behind a call whose arguments are none": (WRONG,),
    "in reasoning behind a call": (CALLED + CONSIDERED, CONSIDERED, ADD),
    "in text behind the mark of GLM": ("The mark <tool_call>weather is",),
    "in text behind a call": (
        CALLED + 'So {"name": "add", "arguments": {"a',
        'So {"name": "add", "arguments": {"a',
        ADD,
    ),
    "in a mark within a value": (
        '<tool_call>{"name": "add", "arguments": {"a": "[TOOL_CALLS]weather <tool_call>full ',
        "",
        ("add", '{"a": "[TOOL_CALLS]weather <tool_call>full '),
    ),
    "in a value that looks like a call": (
        '{"name": "add", "parameters": {"name": "full", "arguments": {"a',
        "",
        ("add", '{"name": "full", "arguments": {"a'),
    ),
    "in a list": ('[{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}, {"na', "", ADD),
    "behind what is no call": ('<tools>{"name": "add", "id": 7}</tools> is',),
}
"""Answers without an end, and their text and calls; those without calls stay as they are."""


@pytest.mark.parametrize("where", CUT)
def test_answers_that_were_cut_off(where: str) -> None:
    written, text, *calls = (*CUT[where], CUT[where][0])[: max(len(CUT[where]), 2)]
    expected = tuple(call if isinstance(call, ParsedToolCall) else ParsedToolCall(*call) for call in calls)
    for pieces in [written], list(written):
        answer, read_calls = read(pieces, is_cut=True)
        assert (answer.rstrip(), read_calls) == (text.rstrip(), expected)


def test_a_list_is_the_same_in_pieces_and_is_no_call_without_its_end() -> None:
    written = '[{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}]'
    for pieces in [written], list(written):
        assert read(pieces) == ("", (ADD,))
        assert read([*pieces[:-1], pieces[-1][:-1]]) == (written[:-1], ())
    assert read(list("[TOOL")) == ("[TOOL", ())
    lists = "[{}," * 25_000
    assert read([lists], is_cut=True) == (lists, ())
    for begun in "<tool_call>" + "<function=" * 20_000, "<tool_call><function=add>" + "<parameter=" * 20_000:
        read([begun], is_cut=True)  # in one go
    for marks in "```json" * 10_000, "```json\n" * 10_000, "<tools>{" * 10_000, "<tools></tools>" * 10_000:
        assert read([marks], is_cut=True) == (marks, ())


@PATIENT
@given(form=st.sampled_from(sorted(FORMS)), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_result_is_independent_of_chunking(form: str, cuts: list[int]) -> None:
    written = FORMS[form][0]
    offsets = sorted({0, len(written), *(min(cut, len(written)) for cut in cuts)})
    assert read([written[a:b] for a, b in pairwise(offsets)]) == read([written])


@PATIENT
@given(
    st.one_of(
        st.text(alphabet='<>tool_ca/|[]{}"namergus:,TOL_CS 1\n', max_size=80),
        st.lists(
            st.sampled_from(
                ["<tools>", "</tools>", "```json", "\n```", '{"name": ', '"add"', ', "arguments": ', "{}", "}", "x"]
            ),
            max_size=12,
        ).map("".join),
    )
)
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
