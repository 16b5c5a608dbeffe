"""`/v1/messages` and `/v1/responses` with the clients of Anthropic and OpenAI, and the small endpoints.

The model thinks, writes a text and calls a tool; what it says is scripted, so every answer is known.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import openai
import pytest
from rich.console import Console

from rabbitllm.server import _messages, _responses
from rabbitllm.server.api_error import APIError
from rabbitllm.server.schemas import ChatBody, CompletionBody, parsed
from rabbitllm.server.server import put_greeting
from tests.server.serving import NAME, Running, running
from tests.support.scripted import scripted_checkpoint
from tests.support.tiny_models import split

if TYPE_CHECKING:
    import anthropic  # takes two seconds, which a process that only collects these tests has no need of

CALL = ('{"name": "add", "arguments": {"a": ', "1}}")
LINES = (
    ("<go>", "<think>", "Why?", " Because.", "</think>", "I add. ", "<tool_call>", *CALL, "</tool_call>"),
    ("<talk>", "It is ", "three."),
    ("<agents>", '{"name": "multi_agent_v1__close_agent", "arguments": {"target": "a"}}'),
)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}{{ message.role }}:"
    "{{ message.reasoning_content or '' }}{% for call in message.tool_calls or [] %}"
    "{{ call.id }}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ message.tool_call_id or '' }}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<talk>{% endif %}"
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"name": "add", "description": "adds", "input_schema": SCHEMA}
FUNCTION: Any = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": False}


CLOSE_AGENT: Any = {
    "type": "function",
    "name": "close_agent",
    "description": "Close an agent.",
    "strict": False,
    "parameters": {"type": "object"},
}
NAMESPACE: Any = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for sub-agents.",
    "tools": [CLOSE_AGENT],
}


@pytest.fixture(scope="module")
def scripted_split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("serve") / "scripted"
    scripted_checkpoint(folder, LINES, TEMPLATE, special=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    return split(folder)


@pytest.fixture(scope="module")
def scripted(scripted_split: Path) -> Iterator[Running]:
    with running(scripted_split, api_key="secret-key") as server:
        yield server


@pytest.fixture(scope="module")
def claude(scripted: Running) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=scripted.address, api_key="secret-key", max_retries=0, timeout=600)


def create(claude: anthropic.Anthropic, content: Any = "<go>", **options: Any) -> Any:
    messages = content if isinstance(content, list) and "role" in content[0] else [{"role": "user", "content": content}]
    return claude.messages.create(model=NAME, messages=messages, **{"max_tokens": 12, **options})


def shown(scripted: Running, answer_usage: int, expected: str) -> None:
    """The prompt has the tokens of the expected text."""
    assert answer_usage == len(scripted.model.tokenizer(expected, add_special_tokens=False)["input_ids"])


def prompt_tokens(usage: Any) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_message_has_blocks(claude: anthropic.Anthropic) -> None:
    answer = create(claude, tools=[TOOL])
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = answer.content
    assert (thinking.thinking, text.text) == ("Why? Because.", "I add.")
    assert (call.name, call.input, call.id[:6]) == ("add", {"a": 1}, "toolu_")
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("tool_use", None, "assistant")
    assert answer.usage.output_tokens == 10
    plain = create(claude, "<talk>")
    assert (plain.content[0].text, plain.stop_reason) == ("It is three.", "end_turn")
    stopped = create(claude, "<talk>", stop_sequences=["thr"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("It is ", "stop_sequence", "thr")
    assert create(claude, "<talk>", max_tokens=1).stop_reason == "max_tokens"


def test_a_streamed_message_is_the_same(claude: anthropic.Anthropic) -> None:
    whole = create(claude, tools=[TOOL])
    with claude.messages.stream(
        model=NAME, max_tokens=12, messages=[{"role": "user", "content": "<go>"}], tools=[TOOL]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[0].thinking == whole.content[0].thinking  # type: ignore[union-attr]
    assert final.content[1].text.rstrip() == whole.content[1].text  # type: ignore[union-attr]
    assert final.content[2].input == whole.content[2].input  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    messages: list[Any] = [{"role": "user", "content": "<go>"}]
    with claude.messages.stream(model=NAME, max_tokens=7, messages=messages, tools=[TOOL]) as cut:
        final = cut.get_final_message()
    for answer in create(claude, tools=[TOOL], max_tokens=7), final:
        assert (answer.stop_reason, answer.content[-1].input) == ("max_tokens", {"arguments": '{"a": '})


def test_templates_get_a_conversation_of_messages(scripted: Running, claude: anthropic.Anthropic) -> None:
    conversation: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "<talk>"},
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}]
    expected = 'system:s1\n\ns2user:aassistant:hmt1add{"a": 1}btool:t13user:<talk>'
    answer = create(claude, conversation, system=system)
    assert answer.content[0].text == "It is three."
    shown(scripted, prompt_tokens(answer.usage), expected)
    count = claude.messages.count_tokens(model=NAME, messages=conversation, system=system)
    assert count.input_tokens == prompt_tokens(answer.usage)
    empty: list[Any] = [{"role": "user", "content": []}]
    assert claude.messages.count_tokens(model=NAME, messages=[*conversation, *empty], system=system) != count
    shown(scripted, claude.messages.count_tokens(model=NAME, messages=empty).input_tokens, "user:")
    more = claude.messages.count_tokens(model=NAME, messages=conversation, system=system, tools=[TOOL])
    assert more.input_tokens > count.input_tokens


def test_thinking_has_a_switch_and_a_budget(claude: anthropic.Anthropic) -> None:
    assert create(claude, "<go>", thinking={"type": "disabled"}).content[0].text == "It is three."
    budget: Any = {"type": "enabled", "budget_tokens": 1}
    answer = create(claude, thinking=budget, tools=[TOOL])
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert (answer.content[0].thinking, answer.usage.output_tokens) == ("Why?", 9)
    assert create(claude, thinking={"type": "enabled", "budget_tokens": 7}).content[0].thinking == "Why? Because."


def test_a_limit_that_the_context_cuts_is_said(scripted: Running, claude: anthropic.Anthropic) -> None:
    context = scripted.service.limits.context
    usage = create(claude, max_tokens=100_000).usage
    assert usage.max_tokens == context - prompt_tokens(usage)
    with claude.messages.stream(
        model=NAME, max_tokens=100_000, messages=[{"role": "user", "content": "<go>"}]
    ) as stream:
        assert [event.usage.max_tokens for event in stream if event.type == "message_delta"] == [usage.max_tokens]  # type: ignore[attr-defined]
    assert not hasattr(create(claude).usage, "max_tokens")
    usage = respond(scripted, max_output_tokens=100_000).usage
    assert usage.max_tokens == context - usage.input_tokens
    assert not hasattr(respond(scripted).usage, "max_tokens")


def test_messages_are_refused_in_anthropics_form(scripted: Running, claude: anthropic.Anthropic) -> None:
    import anthropic

    server_tool: Any = {"type": "web_search_20250305", "name": "web_search"}
    document: Any = [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}]
    for options, message in (
        ({"tools": [server_tool]}, "tools.0 is of type web_search_20250305; only tools of the client"),
        ({"content": document}, "messages.0.content.0 is of type document, which is not supported"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers is not supported; omit it."),
        ({"content": [{"role": "assistant", "content": "a"}]}, "which cannot be continued"),
        ({"extra_body": {"top_k": -7}}, "top_k"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=message) as refused:
            create(claude, **options)
        assert refused.value.body["type"] == "error"  # type: ignore[index]
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    stranger = anthropic.Anthropic(base_url=scripted.address, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        create(stranger)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "a"}])
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_arguments_that_json_cannot_write(number: str) -> None:
    function = {"name": "f", "arguments": f'{{"a": {number}}}'}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    message = {"content": None, "tool_calls": [{"id": "1", "function": function}]}
    answer = {"id": "", "model": "", "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    whole = _messages.Messages((), 1).whole(answer, [SimpleNamespace(stop=None)])  # type: ignore[list-item]
    assert whole["content"][0]["input"] == {"arguments": function["arguments"]}


def test_a_number_that_is_too_large_is_refused(scripted: Running) -> None:
    with scripted.http as client:
        answer = client.post("/v1/responses", content='{"input": "<go>", "metadata": {"a": 1e999}}')
    assert answer.status_code == 400
    assert "the number '1e999' is too large" in answer.json()["error"]["message"]


def respond(scripted: Running, content: Any = "<go>", **options: Any) -> Any:
    return scripted.openai().responses.create(
        model=NAME, input=content, **{"temperature": 0, "max_output_tokens": 12, **options}
    )


def test_a_response_has_items(scripted: Running) -> None:
    answer = respond(scripted, tools=[FUNCTION])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = answer.output
    assert reasoning.content[0].text == "Why? Because."
    assert (answer.output_text, message.content[0].text) == ("I add.", "I add.")
    assert (call.name, json.loads(call.arguments), call.status) == ("add", {"a": 1}, "completed")
    assert (answer.status, answer.usage.output_tokens) == ("completed", 10)
    assert answer.usage.output_tokens_details.reasoning_tokens == 4
    cut = respond(scripted, "<talk>", max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"


def test_a_streamed_response_is_the_same(scripted: Running) -> None:
    whole = respond(scripted, tools=[FUNCTION])
    with scripted.openai().responses.stream(
        model=NAME, input="<go>", tools=[FUNCTION], temperature=0, max_output_tokens=12
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text.rstrip() == whole.output_text
    assert final.output[2].arguments == whole.output[2].arguments
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text
    with scripted.openai().responses.stream(
        model=NAME, input="<go>", tools=[FUNCTION], temperature=0, max_output_tokens=7
    ) as stream:
        *_, last = stream
    assert last.type == "response.incomplete"
    for response in respond(scripted, tools=[FUNCTION], max_output_tokens=7), last.response:
        assert [item.status for item in response.output] == ["completed", "completed", "incomplete"]
        assert (response.status, response.output[2].arguments) == ("incomplete", '{"a": ')  # type: ignore[union-attr]
    assert final.usage == whole.usage.model_copy(update={"input_tokens_details": final.usage.input_tokens_details})


def test_idle_streams_have_events(scripted: Running, scripted_split: Path) -> None:
    """Codex and others count no comments; the clients read the same answer."""
    import anthropic

    with running(scripted_split, heartbeat_seconds=1e-4) as restless:
        claude = anthropic.Anthropic(base_url=restless.address, api_key="none", max_retries=0)
        raw = {"model": NAME, "max_tokens": 12, "stream": True, "messages": [{"role": "user", "content": "<go>"}]}
        assert restless.post("/v1/messages", raw).text.count('event: ping\ndata: {"type":"ping"}') > 2
        with claude.messages.stream(model=NAME, max_tokens=12, messages=[{"role": "user", "content": "<go>"}]) as said:
            assert said.get_final_message().content[0].thinking == "Why? Because."  # type: ignore[union-attr]
        with restless.openai().responses.stream(model=NAME, input="<go>", tools=[FUNCTION], temperature=0) as events:
            kinds = [event.type for event in events]
            final = events.get_final_response()
    assert kinds.count("response.in_progress") > 1  # one is at the beginning
    assert [item.model_dump(exclude={"id", "call_id"}) for item in final.output] == [
        item.model_dump(exclude={"id", "call_id"}) for item in streamed_output(scripted)
    ]


def streamed_output(scripted: Running) -> Any:
    with scripted.openai().responses.stream(model=NAME, input="<go>", tools=[FUNCTION], temperature=0) as stream:
        return stream.get_final_response().output


def test_templates_get_the_items_of_a_conversation(scripted: Running) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "t1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "t1", "output": "3"},
        {"role": "user", "content": "<talk>"},
    ]
    answer = respond(scripted, items, instructions="s")
    assert answer.output_text == "It is three."
    shown(scripted, answer.usage.input_tokens, 'system:suser:aassistant:hmt1add{"a": 1}btool:t13user:<talk>')
    again = [*items, *[item.model_dump() for item in respond(scripted, "<go>", tools=[FUNCTION]).output]]
    assert respond(scripted, [*again, {"role": "user", "content": "<talk>"}]).output_text == "It is three."


def test_codex_has_functions_in_namespaces(scripted: Running) -> None:
    codex: dict[str, Any] = {
        "model": NAME,
        "stream": True,
        "input": [
            {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "s"}]},
            {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "<agents>"}]},
        ],
        "tools": [NAMESPACE],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a219ee",
        "client_metadata": {"session_id": "01a219ee", "x-codex-window-id": "01a219ee:0"},
    }
    events = scripted.post("/v1/responses", codex).text.split("\n\n")
    (call,) = json.loads(events[-2].partition("data: ")[2])["response"]["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("multi_agent_v1", "close_agent", '{"target": "a"}')
    of_codex = {name: call[name] for name in ("type", "id", "call_id", "namespace", "name", "arguments")}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "closed"}
    chat = _responses.chat_of({**codex, "input": [of_codex, output]}, scripted.service.template)
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "multi_agent_v1__close_agent"
    (close,) = (tool["function"] for tool in chat["tools"])
    assert close["name"] == "multi_agent_v1__close_agent"
    assert close["description"] == "Tools for sub-agents.\n\nClose an agent."


LOW = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}


def test_responses_refuse_what_needs_a_store(scripted: Running) -> None:
    for options, message in (
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported: this server stores no responses"),
        ({"background": True}, "background is not supported"),
        ({"tools": [{**NAMESPACE, "tools": [{"type": "custom"}]}]}, "tools.0.tools.0 is of type custom"),
        ({"tools": [{"type": "web_search"}]}, "web_search; only functions are supported. Leave it out; in Codex"),
        ({"truncation": "auto"}, "truncation is not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs is not supported"),
        ({"content": [{"role": "user", "content": [LOW]}]}, "has the detail low; expected auto"),
        ({"extra_body": {"max_tool_calls": 3}}, "max_tool_calls is not supported"),
        ({"content": [{"type": "item_reference", "id": "a"}]}, "input.0 is of type item_reference"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            respond(scripted, **options)


MESSAGES_BODY: dict[str, Any] = {
    "model": NAME,
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "b"}]}],
        },
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
}
RESPONSES_BODY: dict[str, Any] = {
    "model": NAME,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "b"}]},
        {"type": "reasoning", "id": "1", "summary": [{"type": "summary_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "d"}]},
    ],
    "tools": [FUNCTION, NAMESPACE],
    "tool_choice": {"type": "function", "name": "add"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompt": [1, 2, -1]}, "prompt.2: expected at least 0, not -1."),
        ({"prompt": [[1], [2, "x"]]}, 'prompt.1.1: expected a whole number, not "x".'),
        ({"prompt": [-1]}, "prompt.0: expected text or at least 0 or a list, not -1."),
        ({"prompt": ["a", 5], "echo": 5}, "prompt.1: expected text, not 5."),
        ({"prompt": 5}, "prompt: expected text or a list, not 5."),
        ({"prompt": 10**5000}, "prompt: expected text or a list."),
        ({"prompt": "a", "stop": ["a", 5]}, "stop.1: expected text, not 5."),
    ],
)
def test_the_item_that_does_not_fit_is_named(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(APIError) as refused:
        parsed(CompletionBody, body)
    assert refused.value.message == problem
    assert refused.value.param == problem.partition(".")[0].partition(":")[0]


@pytest.mark.parametrize(
    ("chat_of", "body"), [(_messages.chat_of, MESSAGES_BODY), (_responses.chat_of, RESPONSES_BODY)]
)
def test_bodies_of_any_form_are_refused_or_read(scripted: Running, chat_of: Any, body: dict[str, Any]) -> None:
    """Each value, also those in lists and objects, in turn replaced by hostile ones, or joined by another field."""

    def ways(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        yield where
        for key, inner in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            yield from ways(inner, (*where, key))

    def outcome(changed: Any) -> str:
        try:
            parsed(ChatBody, chat_of(changed, scripted.service.template))
        except APIError as error:
            return f"{error.status} {error.message}"
        return "400 "

    assert outcome(body) == "400 "
    for where in ways(body):
        for value in (None, 5, "x", [], {}, [5], [[]], {"type": []}, {"type": "x", "content": 5}, True):
            changed = copy.deepcopy({"": body})
            inner: Any = changed
            for key in ("", *where)[:-1]:
                inner = inner[key]
            inner[("", *where)[-1]] = value
            assert outcome(changed[""]).startswith("400 ")
        inner = copied = copy.deepcopy(body)
        for key in where:
            inner = inner[key]
        if isinstance(inner, dict) and {"schema", "input_schema", "parameters", "input"}.isdisjoint(where):
            inner["strange"] = "a"
            assert "strange is not supported" in outcome(copied) or "format" in where, where


def test_tokens_and_templates(scripted: Running) -> None:
    tokenizer = scripted.model.tokenizer
    ids = tokenizer("the rain")["input_ids"]
    context = scripted.service.limits.context
    for body in ({"content": "the rain"}, {"prompt": "the rain", "add_special_tokens": True}):
        answer = scripted.post("/tokenize", body).json()
        assert answer == {"tokens": ids, "count": len(ids), "max_model_len": context}
    assert scripted.post("/detokenize", {"tokens": [*ids, 2]}).json()["content"] == tokenizer.decode([*ids, 2])
    messages = [{"role": "user", "content": "<go>"}]
    assert scripted.post("/apply-template", {"messages": messages}).json() == {"prompt": "user:<go>"}
    chat = scripted.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert chat == tokenizer("user:<go>", add_special_tokens=False)["input_ids"]
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [1 << 20]}), ("/detokenize", {"tokens": "a"})):
        assert scripted.post(path, body).status_code == 400
    refused = scripted.post("/detokenize", {"tokens": [1 << 20]})
    assert refused.json()["error"]["message"].startswith("The list has the token 1048576; ")
    refused = scripted.post("/tokenize", {"content": "a" * 4_000_000})
    assert refused.json()["error"]["message"].startswith("The text has 4,000,000 letters; ")
    refused = scripted.post("/v1/rerank", {"query": "a", "documents": ["b"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_embeddings")


def test_the_start_names_a_form_of_calls_that_is_not_read(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def greeting(template: str) -> str:
        monkeypatch.setattr(served.model.tokenizer, "chat_template", template)
        console = Console(file=io.StringIO(), width=200)
        put_greeting(console, served.service, served.address, is_local=True)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    note = "calls stay text: the chat template shows them in a form that is not known here"
    assert note in greeting("{% for tool in tools %}[{{ tool }}]{% endfor %}{{ messages }}")
    assert note not in greeting("{% for tool in tools %}<tool_call>{{ tool }}{% endfor %}{{ messages }}")
    assert note not in greeting("{{ messages }}")


def test_kimi_gets_the_ids_that_it_writes(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for call in m.tool_calls or [] %}<|tool_calls_section_begin|>"
        "{{ call.id }}{% endfor %}{{ m.tool_call_id or '' }} {% endfor %}"
    )
    monkeypatch.setattr(served.model.tokenizer, "chat_template", template)
    calls = [{"id": name, "function": {"name": name[:3], "arguments": "{}"}} for name in ("add1", "sub1", "add2")]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "sub1", "content": "1"},
        {"role": "tool", "tool_call_id": "add1", "content": "2"},
        {"role": "assistant", "tool_calls": calls[2:]},
        {"role": "tool", "tool_call_id": "add2", "content": "3"},
    ]
    mark = "<|tool_calls_section_begin|>"
    assert served.post("/apply-template", {"messages": messages}).json()["prompt"] == (
        f"user: assistant:{mark}functions.add:0{mark}functions.sub:1 tool:functions.sub:1 tool:functions.add:0 "
        f"assistant:{mark}functions.add:2 tool:functions.add:2 "
    )


def test_requests_of_clients_that_know_one_kind_of_number(scripted: Running) -> None:
    body = {"messages": [{"role": "user", "content": "<talk>"}], "max_tokens": 2.0, "temperature": 0}
    assert scripted.post("/v1/chat/completions", body).json()["usage"]["completion_tokens"] == 2
