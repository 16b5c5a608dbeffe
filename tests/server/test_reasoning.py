"""Reasoning and the answer, whole and in any pieces; and a call that is only considered is no call."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rabbitllm
from rabbitllm.errors import OptionError
from rabbitllm.generation.reasoning import PAIRS, USUAL, AnswerFormat, Thinking
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server._answer_reader import AnswerReader
from rabbitllm.server._tools import ParsedToolCall, call_tokens
from tests.server.serving import NAME, PATIENT, STREAMED, running
from tests.support.builders import make_tokenizer
from tests.support.scripted import scripted_checkpoint
from tests.support.thinking_models import ANSWER, QUESTION, REASONING_TOKENS, THOUGHT, channel_thinker, thinker
from tests.support.tiny_models import load, split

TOOLS = ("delete_all", "add")
CALL = '<tool_call>{"name": "delete_all", "arguments": {}}</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADDED = (ParsedToolCall("add", '{"a": 1}'),)
MISTRAL = "[TOOL_CALLS]delete_all{}"
BARE = '{"name": "delete_all", "parameters": {}}'
CHANNELS = AnswerFormat((USUAL,), has_channels=True)
ALL = AnswerFormat(PAIRS)
EFFORT = Thinking(effort="low")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
COMMENTARY = "<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"

Case = tuple[AnswerFormat, str, str, str, str, tuple[ParsedToolCall, ...]]
FORMS: dict[str, Case] = {  # format, end of the prompt, output -> reasoning, text, calls
    "plain": (ALL, "", "Hello.", "", "Hello.", ()),
    "nothing": (ALL, "", "", "", "", ()),
    "spaces": (ALL, "", " \n ", "", " \n ", ()),
    "usual": (ALL, "", "<think>\nWhy?\n</think>\n\nHello.", "Why?", "Hello.", ()),
    "indented answer": (ALL, "", "\n<think>a</think>\n    x = 1", "a", "    x = 1", ()),
    "twice": (ALL, "", "<think>a</think>\n<think>b</think>c", "ab", "c", ()),
    "empty": (ALL, "", "<think>\n\n</think>\n\nHello.", "", "Hello.", ()),
    "opened by the prompt": (ALL, "assistant\n<think>\n", "Why?\n</think>\n\nHello.", "Why?", "Hello.", ()),
    "closed by the prompt": (ALL, "<think>\n\n</think>\n\n", "Hello.", "", "Hello.", ()),
    "cut off": (ALL, "", "<think>\nWhy", "Why", "", ()),
    "cut off in a mark": (ALL, "", "<think>Why</thi", "Why</thi", "", ()),
    "opened by the prompt, cut off": (ALL, "<think>\n", f"Why {CALL}", f"Why {CALL}", "", ()),
    "no mark": (ALL, "", "<thinner>a", "", "<thinner>a", ()),
    "considered": (ALL, "", f"<think>Perhaps {CALL}? No.</think>No tool.", f"Perhaps {CALL}? No.", "No tool.", ()),
    "considered, opened by the prompt": (
        ALL,
        "<think>\n",
        f"Perhaps {CALL}?</think>No.",
        f"Perhaps {CALL}?",
        "No.",
        (),
    ),
    "considered, never closed": (ALL, "", f"<think>Perhaps {CALL} or", f"Perhaps {CALL} or", "", ()),
    "considered, then made": (ALL, "", f"<think>{CALL}</think>\n{ADD}", CALL, "", ADDED),
    "considered in the answer": (ALL, "", f"So <think>{CALL}</think> no.", "", f"So <think>{CALL}</think> no.", ()),
    "considered after a call": (ALL, "", f"{ADD} <think>{CALL}</think>", "", f" <think>{CALL}</think>", ADDED),
    "considered in the answer, never closed": (ALL, "", f"So <think>{CALL}", "", f"So <think>{CALL}", ()),
    "closed, never opened": (ALL, "", f"Perhaps {CALL}?</think>No.", "", f"Perhaps {CALL}?</think>No.", ()),
    "closed, never opened, then made": (ALL, "", f"{CALL}?</think>{ADD}", "", f"{CALL}?</think>", ADDED),
    "a mark in an argument": (
        ALL,
        "",
        '<tool_call>{"name": "add", "arguments": {"a": "<think>[TOOL_CALLS]"}}</tool_call>',
        "",
        "",
        (ParsedToolCall("add", '{"a": "<think>[TOOL_CALLS]"}'),),
    ),
    "mistral, considered": (ALL, "", f"[THINK]{MISTRAL}[/THINK]No.", MISTRAL, "No.", ()),
    "mistral, considered after a call": (
        ALL,
        "",
        f"[TOOL_CALLS]add{{}}[THINK]{MISTRAL}[/THINK]",
        "",
        "",
        (ParsedToolCall("add", "{}"),),
    ),
    "mistral, closed, never opened": (ALL, "", f"{MISTRAL}[/THINK]No.", "", f"{MISTRAL}[/THINK]No.", ()),
    "bare, considered": (ALL, "", f"<think>{BARE}</think>No.", BARE, "No.", ()),
    "bare, closed, never opened": (ALL, "", f"{BARE}</think>No.", "", f"{BARE}</think>No.", ()),
    "bare, made": (ALL, "", f"<think>a</think>\n{BARE}", "a", "", (ParsedToolCall("delete_all", "{}"),)),
    "gemma": (ALL, "", "<|channel>thought\nWhy?\n<channel|>Hello.", "Why?", "Hello.", ()),
    "other marks": (AnswerFormat(), "", f"<seed:think>{ADD}</seed:think>", "", "<seed:think></seed:think>", ADDED),
    "channels": (CHANNELS, "", f"{ANALYSIS}Why?{FINAL}Hello!", "Why?", "Hello!", ()),
    "channels, end": (CHANNELS, "", f"{ANALYSIS}Why?{FINAL}Hello!<|return|>", "Why?", "Hello!", ()),
    "channels, cut off": (CHANNELS, "", f"{ANALYSIS}Why", "Why", "", ()),
    "channels, cut off in a header": (CHANNELS, "", f"{ANALYSIS}Why?<|end|><|start|>assi", "Why?", "", ()),
    "channels, none": (CHANNELS, "", "Hello!", "", "Hello!", ()),
    "channels, opened by the prompt": (CHANNELS, f"<|start|>assistant{ANALYSIS}", f"Why?{FINAL}Hi", "Why?", "Hi", ()),
    "channels, only the final one": (CHANNELS, "<|start|>assistant", "<|channel|>final<|message|>Hi", "", "Hi", ()),
    "channels, considered": (CHANNELS, "", f"{ANALYSIS}{CALL}{FINAL}No.", CALL, "No.", ()),
    "channels, a call": (CHANNELS, "", f'{ANALYSIS}Why?{COMMENTARY}{{"a": 1}}<|call|>', "Why?", "", ADDED),
    "channels, a call that is cut off": (CHANNELS, "", f'{ANALYSIS}Why?{COMMENTARY}{{"a": ', 'Why?{"a":', "", ()),
    "channels, a preamble": (
        CHANNELS,
        "",
        f"{ANALYSIS}Why?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.{FINAL}Hi",
        "Why?\nI look.",
        "Hi",
        (),
    ),
}


def read(
    form: AnswerFormat, tail: str, pieces: list[str], tools: tuple[str, ...] = TOOLS, *, is_cut: bool = False
) -> Any:
    reader = AnswerReader(form, tail, tools)
    parts = [*map(reader.feed, pieces), reader.end(is_cut=is_cut)]
    return "".join(piece.reasoning for piece in parts), "".join(piece.text for piece in parts), parts[-1].calls


@pytest.mark.parametrize("name", FORMS)
def test_reasoning_formats(name: str) -> None:
    form, tail, written, *expected = FORMS[name]
    reasoning, text, calls = read(form, tail, [written])
    assert [reasoning, text.rstrip() if calls else text, calls] == [
        expected[0],
        expected[1].rstrip() if calls else expected[1],
        expected[2],
    ]


@PATIENT
@given(name=st.sampled_from(sorted(FORMS)), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_result_is_independent_of_chunking(name: str, cuts: list[int]) -> None:
    form, tail, written, *_ = FORMS[name]
    offsets = sorted({0, len(written), *(min(cut, len(written)) for cut in cuts)})
    assert read(form, tail, [written[a:b] for a, b in pairwise(offsets)]) == read(form, tail, [written])
    assert read(form, tail, list(written)) == read(form, tail, [written])


def test_a_call_in_a_channel_that_was_cut_off() -> None:
    form, tail, written, *_ = FORMS["channels, a call that is cut off"]
    assert read(form, tail, [written], is_cut=True) == ("Why?", "", (ParsedToolCall("add", '{"a": '),))
    assert read(form, tail, [written], (), is_cut=True)[2] == ()


@PATIENT
@given(st.text(alphabet="<>/thinkTHINK[]\n a", max_size=60))
def test_text_without_a_mark_at_its_beginning_is_unchanged(written: str) -> None:
    if not written.lstrip().startswith(tuple(mark for pair in PAIRS for mark in pair)):
        assert read(ALL, "", list(written), ()) == ("", written, ())


def test_text_is_not_held_back() -> None:
    reader = AnswerReader(ALL, "")
    assert reader.feed("<think>Why ").reasoning == "Why "
    assert reader.feed("so</th").reasoning == "so"
    assert reader.feed("ink>\nBe").text == "Be"
    assert reader.feed("cause").text == "cause"


def form_of(template: str, tokens: list[str] = [], special: list[str] = []) -> tuple[AnswerFormat, Any]:  # noqa: B006
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(tokens)
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.chat_template = template
    return ChatTemplate(SimpleNamespace(tokenizer=tokenizer)).form, tokenizer  # type: ignore[arg-type]


def test_marks_are_those_of_the_template_and_the_vocabulary() -> None:
    assert form_of("{{ messages }}")[0] == AnswerFormat()
    assert form_of("{{ messages }}[/THINK]")[0].pairs == PAIRS[:2]
    form, _ = form_of("{{ messages }}", ["<seed:think>", "</seed:think>"])
    assert form == AnswerFormat((USUAL, PAIRS[2]))
    form, tokenizer = form_of("", special=["<think>", "</think>", "[TOOL_CALLS]", "<|channel>", "<channel|>"])
    assert form.pairs == (USUAL, PAIRS[-1])
    ids = tokenizer.convert_tokens_to_ids
    assert form.shown == {ids("<think>"), ids("</think>"), ids("<|channel>"), ids("<channel|>")}
    assert call_tokens(tokenizer) == {ids("[TOOL_CALLS]")}
    form, tokenizer = form_of("", special=["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"])
    assert form.has_channels
    assert form.shown == set(
        map(tokenizer.convert_tokens_to_ids, ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"])
    )


def test_channel_content_is_the_final_channel(tmp_path: Path) -> None:
    with running(split(channel_thinker(tmp_path / "channels"))) as served:
        ask: Any = served.openai().chat.completions.create
        message: Any = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        choice = ask(**message).choices[0]
        assert (choice.message.content, choice.message.reasoning_content) == (ANSWER, THOUGHT)
        deltas = [chunk.choices[0].delta for chunk in ask(**message, stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == ANSWER
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
        cut = ask(**message, max_tokens=5).choices[0]
        assert (cut.message.content, cut.message.reasoning_content, cut.finish_reason) == (
            "",
            THOUGHT,
            "length",
        )
        limited = {"messages": message["messages"], "max_tokens": 9}
        budget = {"thinking": {"type": "enabled", "budget_tokens": 1024}}  # agents send it to every model
        assert served.post("/v1/messages", {**limited, **budget}).status_code == 200
        refused = served.post("/v1/chat/completions", {**limited, "thinking_token_budget": 1024})
        assert "(budget_tokens) is not supported" in refused.json()["error"]["message"]
        completion = served.openai().completions.create(model=NAME, prompt=QUESTION, temperature=0, max_tokens=12)
        assert completion.choices[0].text.startswith(f"analysis{THOUGHT}")  # plain text is not taken apart


WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "Hi!"),
    "opened by the prompt": ({"chat_template_kwargs": {"opens": True}}, "Hi!"),
    "with a grammar": ({"structured_outputs": {"choice": ["rabbit"]}}, "rabbit"),
}


def test_a_budget_of_reasoning(tmp_path: Path) -> None:
    line = ("<go>", "<think>", "Why?", " Because.", " So.", "</think>", "Hi!")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if opens is defined %}<think>{% endif %}"
    folder = split(scripted_checkpoint(tmp_path / "model", [line], template, ("<think>", "</think>")))
    body = {"messages": [{"role": "user", "content": "<go>"}], "temperature": 0, "max_tokens": 20}
    asked: list[tuple[dict[str, Any], tuple[str, str]]] = [
        ({**body, **more, "thinking_token_budget": budget}, (thought, answer))
        for more, answer in WAYS.values()
        for budget, thought in ((0, ""), (1, "Why?"), (2, "Why? Because."), (9, "Why? Because. So."))
    ]

    def read(message: dict[str, Any]) -> tuple[str, str]:
        return message.get("reasoning_content") or "", message.get("content") or ""

    with running(folder) as served:
        for request, expected in asked:
            choices = served.post("/v1/chat/completions", {**request, "n": 2}).json()["choices"]
            assert [read(choice["message"]) for choice in choices] == [expected] * 2
            lines = served.post("/v1/chat/completions", {**request, "stream": True}).text.split("\n\n")
            deltas = [read(json.loads(each[6:])["choices"][0]["delta"]) for each in lines if each.startswith("data: {")]
            assert tuple(map("".join, zip(*deltas, strict=True))) == expected
    calls = [
        {"custom_id": str(index), "url": "/v1/chat/completions", "body": request}
        for index, (request, _) in enumerate(asked)
    ]
    answers: Any = rabbitllm.batch(load(folder, STREAMED), calls)
    messages = [answer["response"]["body"]["choices"][0]["message"] for answer in answers]
    assert [read(message) for message in messages] == [expected for _, expected in asked]


def test_tokens_of_reasoning_are_counted_and_thinking_has_a_default(tmp_path: Path) -> None:
    folder = split(thinker(tmp_path / "model"))
    message: Any = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    with running(folder, thinking=Thinking(enabled=False)) as served:
        ask: Any = served.openai().chat.completions.create
        usage = ask(**message).usage
        assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (2, 0)
        thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
        answer = ask(**message, **thinks, n=2)
        assert [choice.message.reasoning_content for choice in answer.choices] == [THOUGHT] * 2
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * REASONING_TOKENS
        last = list(ask(**message, **thinks, stream=True, stream_options={"include_usage": True}))[-1]
        assert last.usage.completion_tokens_details.reasoning_tokens == REASONING_TOKENS
        cut = ask(**message, **thinks, max_tokens=3)
        assert (cut.choices[0].finish_reason, cut.usage.completion_tokens_details.reasoning_tokens) == ("length", 3)
    with pytest.raises(OptionError, match="An effort of thinking cannot be set"), running(folder, thinking=EFFORT):
        pass
