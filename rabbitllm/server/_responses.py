"""OpenAI's `/v1/responses`, from and to the chats of `/v1/chat/completions`. Pure: dicts in, dicts and bytes out.

Nothing is stored: each request has the whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rabbitllm.generation.request import Result
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server._streaming import Dialect, cut_in, text_of
from rabbitllm.server.api_error import APIError, bad, begun_chat, refuse_others, taken, unsupported

HARMLESS = (
    *("store", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prompt_cache_options", "stream_options", "client_metadata"),
)
"""Fields that change no answer."""
_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "priority")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content", "phase"),
    "reasoning": ("content", "summary", "encrypted_content"),
    "function_call": ("call_id", "name", "namespace", "arguments", "caller"),
    "function_call_output": ("call_id", "output", "caller"),
}
"""Type of an item -> its keys."""
_STORED = "this server stores no responses; send the whole conversation in input"


def chat_of(body: Any, template: ChatTemplate) -> dict[str, Any]:
    """The body of a chat that asks for the same.

    Args:
        body: the body, decoded.
        template: the model's chat template.

    Raises:
        APIError: it has a field or an item that is not supported, or of a wrong form.
    """
    fields, chat = begun_chat(body, HARMLESS, _SAME, "instructions")
    for name in ("previous_response_id", "conversation", "background", "prompt"):
        if fields.pop(name, None):
            raise unsupported(f"{name} is not supported: {_STORED}.", name)
    if "message.output_text.logprobs" in taken(fields, "include", list):
        problem = "include: message.output_text.logprobs is not supported; omit it, or use logprobs of a chat."
        raise unsupported(problem, "include")
    chat["max_completion_tokens"] = fields.pop("max_output_tokens", None)
    if isinstance(fields.get("input"), str):
        fields["input"] = [{"role": "user", "content": fields["input"]}]
    chat["messages"] += _messages(taken(fields, "input", list))
    chat["tools"] = [_tool(*each) for each in _functions(taken(fields, "tools", list))]
    choice = fields.pop("tool_choice", None)
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    refuse_others(choice if is_named else {}, ("type", "name"), "tool_choice")
    chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}} if is_named else choice
    reasoning, text = taken(fields, "reasoning", dict), dict(taken(fields, "text", dict))
    chat["reasoning_effort"] = reasoning.get("effort") if "reasoning_effort" in template.settable() else None
    refuse_others(reasoning, ("effort", "summary", "generate_summary", "context"), "reasoning")
    form, chat["verbosity"] = taken(text, "format", dict), text.pop("verbosity", None)
    refuse_others(text, (), "text")
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
    chat["response_format"] = form or None
    if fields.pop("truncation", None) not in (None, "disabled"):
        raise unsupported("truncation is not supported; omit it or use 'disabled'.", "truncation")
    refuse_others(fields, ())
    return chat


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Items as messages: reasoning, text and calls that follow each other are one answer."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}

    def in_answer(name: str) -> dict[str, Any]:
        """The answer that a text, reasoning or a call belongs to; a second text begins another."""
        nonlocal answer
        if not answer or answer.get(name):
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        return answer

    for index, item in enumerate(items):
        where = f"input.{index}"
        kind = str(item.get("type", "message")) if isinstance(item, dict) else None
        if kind is not None:
            refuse_others(item, ("type", "id", "status", *_KEYS.get(kind, item)), where)
        if kind == "message" and item.get("role") == "assistant":
            in_answer("content")["content"] = _content(item.get("content"), where)
        elif kind == "reasoning":
            parts = _content(item.get("content") or item.get("summary"), where) or ""
            if text := parts if isinstance(parts, str) else "\n".join(str(part.get("text")) for part in parts):
                in_answer("reasoning_content")["reasoning_content"] = text
        elif kind == "function_call":
            name = _full_name(item.get("namespace"), item.get("name"))
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            in_answer("").setdefault("tool_calls", []).append(call)
        elif kind in ("message", "function_call_output"):
            answer = {}
            content = _content(item.get("content" if kind == "message" else "output"), where)
            of_tool = {"role": "tool", "tool_call_id": item.get("call_id")}
            messages.append({**({"role": item.get("role")} if kind == "message" else of_tool), "content": content})
        else:
            raise unsupported(f"{where} is of type {str(kind)[:40]}, which is not supported.", where)
    return messages


def _content(content: Any, where: str) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where} is neither a text nor a list of parts.", where)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        path = f"{where}.content.{index}"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "refusal":
            parts.append({"type": "refusal", "refusal": part.get("refusal")})
        elif kind == "input_image" and part.get("image_url"):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail")}})
        else:
            raise unsupported(f"{path} is of type {str(kind)[:40]}, which is not supported.", path)
        refuse_others(part, ("type", "text", "refusal", "image_url", "detail", "annotations", "logprobs"), path)
    return parts


def _full_name(namespace: Any, name: Any) -> Any:
    """The name that a model knows a function of a namespace by."""
    return f"{namespace}__{name}" if namespace else name


def _functions(tools: Sequence[Any]) -> Iterator[tuple[Any, str, Any]]:
    """Tools, their places in the request, and the namespaces that they are in, whose description comes first."""
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            yield tool, where, None
            continue
        refuse_others(tool, ("type", "name", "description", "tools"), where)
        for inner, function in enumerate(taken(dict(tool), "tools", list)):
            if inner == 0 and tool.get("description") and isinstance(function, dict):
                texts = (tool["description"], function.get("description"))
                function = {**function, "description": "\n\n".join(str(text) for text in texts if text)}
            yield function, f"{where}.tools.{inner}", tool.get("name")


_LEAVE_OUT = {"web_search": 'Leave it out; in Codex\'s config.toml: web_search = "disabled".'}


def _tool(tool: Any, where: str, namespace: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        hint = _LEAVE_OUT.get(str(kind), "Leave it out.")
        raise unsupported(f"{where} is of type {str(kind)[:40]}; only functions are supported. {hint}", where)
    if not isinstance(tool.get("name"), str):
        raise bad(f"{where} has no name.", where)
    names = ("description", "parameters", "strict")
    refuse_others(tool, ("type", "name", *names), where)
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": {"name": _full_name(namespace, tool["name"]), **function}}


class Responses(Dialect):
    """Answers as OpenAI's responses.

    Args:
        body: the request, of which the response repeats some fields.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        functions = _functions(body.get("tools") or [])
        self._spaces = {_full_name(space, tool["name"]): (space, tool["name"]) for tool, _, space in functions if space}
        self._answer: Mapping[str, Any] = {}
        self._items: list[dict[str, Any]] = []
        self._open = False
        self._number = -1
        self._reason = ""

    def whole(self, answer: Mapping[str, Any], ends: Sequence[Result]) -> dict[str, Any]:
        """A response."""
        (choice,) = answer["choices"]
        self._take({**answer, "choices": [{"delta": choice["message"], "finish_reason": None}]})
        self._reason = choice["finish_reason"]
        self._close()
        return self._response(answer["usage"])

    def frame(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of a chunk."""
        out = b""
        if not self._answer:
            self._answer = chunk
            out += self._event("response.created", response=self._response(None))
            out += self._event("response.in_progress", response=self._response(None))
        return out + self._take(chunk)

    def idle(self) -> bytes:
        """An event: Codex leaves a stream that has none for five minutes, whatever comments it has."""
        return self._event("response.in_progress", response=self._response(None))

    def end(self, last: Mapping[str, Any], ends: Sequence[Result]) -> bytes:
        """The events after the last chunk."""
        out, response = self._close(), self._response(last["usage"])
        return out + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: APIError) -> bytes:
        """The event of an error."""
        details = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response(None), "status": "failed", "error": details})

    def _take(self, chunk: Mapping[str, Any]) -> bytes:
        """Add a chunk to the items; returns its events."""
        self._answer, out = chunk, b""
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._reason = choice["finish_reason"] or self._reason
            if reasoning := delta.get("reasoning_content"):
                out += self._text("reasoning", "rs_", {"type": "reasoning_text", "text": ""}, reasoning)
            if text := delta.get("content"):
                empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                out += self._text("message", "msg_", empty, text)
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                space, name = self._spaces.get(function["name"], (None, function["name"]))
                fields = {
                    "call_id": call["id"],
                    "name": name,
                    "arguments": "",
                    **({"namespace": space} if space else {}),
                }
                out += self._close() + self._begin("function_call", "fc_", fields)
                arguments = self._items[-1]["arguments"] = function["arguments"]
                out += self._of_item("response.function_call_arguments.delta", delta=arguments)
                out += self._of_item("response.function_call_arguments.done", arguments=arguments)
        return out

    def _text(self, kind: str, lead: str, empty: Mapping[str, Any], text: str) -> bytes:
        out = b""
        if not self._open or self._items[-1]["type"] != kind:
            fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            out += self._close() + self._begin(kind, lead, {**fields, "content": []})
            self._items[-1]["content"].append(dict(empty))
            out += self._of_item("response.content_part.added", content_index=0, part=empty)
        part = self._items[-1]["content"][0]
        part["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return out + self._of_item(f"response.{part['type']}.delta", content_index=0, delta=text, **logprobs)

    def _begin(self, kind: str, lead: str, fields: Mapping[str, Any]) -> bytes:
        name = f"{lead}{self._answer['id'].removeprefix('resp_')}_{len(self._items)}"
        self._items.append({"type": kind, "id": name, "status": "in_progress", **fields})
        self._open = True
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _close(self) -> bytes:
        """The events that end the open item."""
        if not self._open:
            return b""
        self._open, item, out = False, self._items[-1], b""
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        for part in item.get("content", ()):
            logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            out += self._of_item(f"response.{part['type']}.done", content_index=0, text=part["text"], **logprobs)
            out += self._of_item("response.content_part.done", content_index=0, part=part)
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        event = {"type": kind, "sequence_number": self._number, **fields}
        return f"event: {kind}\ndata: ".encode() + text_of(event) + b"\n\n"

    def _response(self, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """The response so far; finished if there is a usage."""
        body, is_cut = self._body, self._reason == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        return {
            "id": self._answer["id"],
            "object": "response",
            "created_at": self._answer["created"],
            "model": self._answer["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items,
            "usage": None if usage is None else _usage(usage),
            **{name: body.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")},
            "metadata": body.get("metadata") or {},
            "previous_response_id": None,
            "store": False,
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "reasoning": body.get("reasoning"),
            "truncation": "disabled",
            "text": body.get("text") or {"format": {"type": "text"}},
        }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        **cut_in(usage),
    }
