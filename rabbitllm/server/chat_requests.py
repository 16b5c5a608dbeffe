"""From the body of `/v1/chat/completions` to requests for the batch. Needs a tokenizer, but no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rabbitllm.generation.request import Request
from rabbitllm.server.api_error import bad
from rabbitllm.server.generation_requests import checked_length, requests_of
from rabbitllm.server.schemas import ChatBody, ContentPart, Message, Tool
from rabbitllm.server.settings import ModelLimits, Settings
from rabbitllm.server.templates import OURS, Template
from rabbitllm.server.unsupported import refuse_unsupported


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """A checked chat request.

    Attributes:
        requests: one for each choice.
        likeliest: see `Request`; None for no probabilities.
        tools: names of the tools in the prompt; empty for none.
        types: tool -> parameter -> its type in JSON schema.
    """

    requests: tuple[Request, ...]
    likeliest: int | None = None
    tools: tuple[str, ...] = ()
    types: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def chat_asked(body: ChatBody, template: Template, model: ModelLimits, settings: Settings) -> ChatAsked:
    """Check the body and make its requests.

    Raises:
        APIError: the body asks for something unsupported or invalid.
    """
    refuse_unsupported(body)
    tools = _tools(body, template)
    likeliest = _likeliest(body)
    more = _variables(body, template, bool(tools))
    messages = _messages(body.messages, template)
    ids = template.ids(messages, [tool.model_dump(exclude_none=True) for tool in tools], more)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    length = checked_length(ids, asked, model, settings, "messages")
    requests = requests_of(
        body, [ids], length, (*body.stops, *template.stops), likeliest, model=model, settings=settings
    )
    return ChatAsked(
        requests,
        likeliest,
        tuple(tool.function.name for tool in tools),
        {tool.function.name: _types(tool.function.parameters) for tool in tools},
    )


def _likeliest(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs needs logprobs to be true.", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _tools(body: ChatBody, template: Template) -> list[Tool]:
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        what = choice if isinstance(choice, str) else "a tool that must be called"
        raise bad(
            f"tool_choice: {str(what)[:40]} is not supported: nothing here forces a model to call a tool. "
            'Expected "auto" or "none".',
            "tool_choice",
            "unsupported_parameter",
        )
    if not body.tools or choice == "none":
        return []
    if body.parallel_tool_calls is False:
        raise bad(
            "parallel_tool_calls: false is not supported: nothing here keeps a model from calling several tools.",
            "parallel_tool_calls",
            "unsupported_parameter",
        )
    if not template.reads("tools", with_tools=True):
        raise bad("This model's chat template has no place for tools.", "tools", "unsupported_parameter")
    return body.tools


def _variables(body: ChatBody, template: Template, with_tools: bool) -> dict[str, Any]:
    """The further variables of the template; messages and tools are passed to it separately."""
    found: dict[str, Any] = {}
    if body.chat_template_kwargs:
        wrong = sorted(OURS & body.chat_template_kwargs.keys())
        if wrong:
            raise bad(f"chat_template_kwargs: {wrong[0]} cannot be set.", "chat_template_kwargs")
        found |= body.chat_template_kwargs
    if body.response_format is not None and body.response_format.type != "text":
        if not template.reads("response_format", with_tools=with_tools):
            raise bad(
                f"response_format: {body.response_format.type} is not supported: this model's chat template has no "
                "place for it. Ask for JSON in a message instead.",
                "response_format",
                "unsupported_parameter",
            )
        found["response_format"] = body.response_format.model_dump(exclude_none=True)
    if body.reasoning_effort is not None:
        if not template.reads("reasoning_effort", with_tools=with_tools):
            raise bad(
                "reasoning_effort is not supported: this model's chat template has no place for it.",
                "reasoning_effort",
                "unsupported_parameter",
            )
        found["reasoning_effort"] = body.reasoning_effort
    return found


def _messages(messages: list[Message], template: Template) -> list[dict[str, Any]]:
    """Messages in the form that chat templates expect."""
    found = []
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        role = message.role
        if role == "developer" and not template.reads("developer"):
            role = "system"
        made: dict[str, Any] = {"role": role, "content": _text(message, place)}
        if message.name is not None:
            made["name"] = message.name
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            if role != "assistant":
                raise bad(f"{place} is of {role}, and only an assistant calls tools.", f"{place}.tool_calls")
            if not template.reads("tool_calls", with_tools=True):
                raise bad(
                    "This model's chat template has no place for calls of tools.",
                    f"{place}.tool_calls",
                    "unsupported_parameter",
                )
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        found.append(made)
    return found


def _text(message: Message, place: str) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise bad(f"{place} has no content.", f"{place}.content")
        return ""
    if isinstance(message.content, str):
        return message.content
    return "".join(_part(part, f"{place}.content.{number}") for number, part in enumerate(message.content))


def _part(part: ContentPart, place: str) -> str:
    if part.type not in ("text", "refusal"):
        raise bad(f"{place} is of type {part.type[:40]}; this model takes text only.", place, "unsupported_content")
    said = part.text if part.text is not None else (part.model_extra or {}).get("refusal")
    if not isinstance(said, str):
        raise bad(f"{place} has no text.", place)
    return said


def _arguments(given: str | dict[str, Any]) -> Any:
    """Arguments as a dict, which templates expect; unchanged if they are not a JSON object."""
    if isinstance(given, dict):
        return given
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _types(parameters: dict[str, Any] | None) -> dict[str, str]:
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    return {str(name): str(schema.get("type", "")) for name, schema in properties.items() if isinstance(schema, dict)}
