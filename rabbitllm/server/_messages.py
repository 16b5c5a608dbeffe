"""Anthropic's `/v1/messages`, from and to the chats of `/v1/chat/completions`. Pure: dicts in, dicts and bytes out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rabbitllm.formats.bounded import decode_message
from rabbitllm.generation.request import Result
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server._streaming import Dialect, cut_in, text_of
from rabbitllm.server.api_error import APIError, bad, begun_chat, refuse_others, taken, unsupported

HARMLESS = ("metadata", "service_tier", "inference_geo", "context_management", "cache_control", "betas", "diagnostics")
"""Fields that change no answer."""
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "priority")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "image": ("source",),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
"""Type of a block -> its keys."""
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def chat_of(body: Any, template: ChatTemplate) -> dict[str, Any]:
    """The body of a chat that asks for the same.

    Args:
        body: the body, decoded.
        template: the model's chat template.

    Raises:
        APIError: it has a field or a block that is not supported, or of a wrong form.
    """
    fields, chat = begun_chat(body, HARMLESS, _SAME, "system")
    for system in chat["messages"]:
        system["content"] = _text(system["content"], "system")
    for index, message in enumerate(taken(fields, "messages", list)):
        chat["messages"] += _messages(message, f"messages.{index}")
    if chat["messages"] and chat["messages"][-1]["role"] == "assistant":
        raise unsupported("The last of messages is an answer, which cannot be continued.", "messages")
    chat["stop"] = fields.pop("stop_sequences", None)
    chat["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(taken(fields, "tools", list))]
    if choice := taken(fields, "tool_choice", dict):
        refuse_others(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = named if choice.get("type") == "tool" else _CHOICES.get(str(choice.get("type")), "?")
        chat["parallel_tool_calls"] = False if choice.get("disable_parallel_tool_use") else None
    output = dict(taken(fields, "output_config", dict))
    if form := taken(output, "format", dict):
        refuse_others(form, ("type", "schema", "name"), "output_config.format")
        schema = {"name": "answer", "schema": form.get("schema")}
        chat["response_format"] = {"type": form.get("type"), "json_schema": schema}
    chat["reasoning_effort"] = output.get("effort") if "reasoning_effort" in template.settable() else None
    refuse_others(output, ("effort",), "output_config")
    if thinking := taken(fields, "thinking", dict):
        thinks = thinking.get("type") != "disabled"
        chat["chat_template_kwargs"] = dict.fromkeys(template.switches, thinks)
        has_budget = thinks and template.thought_tokens is not None
        chat["thinking_token_budget"] = thinking.get("budget_tokens") if has_budget else None
        refuse_others(thinking, ("type", "budget_tokens", "display"), "thinking")
    refuse_others(fields, ())
    return chat


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise bad(f"{where} is neither a text nor a list of blocks.", where)
    return blocks


def _text(content: Any, where: str) -> str:
    blocks = _blocks(content, where)
    if wrong := [block for block in blocks if block.get("type") != "text" or not isinstance(block.get("text"), str)]:
        raise unsupported(f"{where} has a block of type {str(wrong[0].get('type'))[:40]}; expected text.", where)
    for block in blocks:
        refuse_others(block, ("type", "cache_control", *_KEYS["text"]), where)
    return "\n\n".join(block["text"] for block in blocks)


def _messages(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """A message as messages of a chat: results of tools come first, each by itself."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise bad(f"{where} is no message of user or assistant.", where)
    refuse_others(message, ("role", "content"), where)
    parts: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    blocks = _blocks(message.get("content"), f"{where}.content")
    for index, block in enumerate(blocks):
        path, kind = f"{where}.content.{index}", block.get("type")
        refuse_others(block, ("type", "cache_control", *_KEYS.get(str(kind), block)), path)
        if kind == "text":
            parts.append({"type": "text", "text": block.get("text")})
        elif kind == "image":
            parts.append(_image(block, path))
        elif kind == "thinking":
            answer["reasoning_content"] = answer.get("reasoning_content", "") + str(block.get("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result":
            content = _blocks(block.get("content") or "", path)
            results = [_image(each, path) if each.get("type") == "image" else each for each in content]
            only_text = all(each.get("type") == "text" for each in results)
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": _text(results, path) if only_text else results,
            }
        elif kind != "redacted_thinking":
            raise unsupported(f"{path} is of type {str(kind)[:40]}, which is not supported.", path)
    if parts or answer or not blocks:
        only_text = all(part["type"] == "text" for part in parts)
        yield {"role": message["role"], "content": _text(parts, where) if only_text else parts, **answer}


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    source = block.get("source")
    refuse_others(block, ("type", "cache_control", "source"), where)
    if not isinstance(source, dict) or source.get("type") not in ("base64", "url"):
        raise unsupported(f"{where}: a picture needs a source of type base64 or url.", where)
    refuse_others(source, ("type", "media_type", "data", "url"), where)
    url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise unsupported(f"{where} is of type {str(kind)[:40]}; only tools of the client are supported.", where)
    names = ("type", "name", "description", "input_schema", "cache_control", "eager_input_streaming", "strict")
    refuse_others(tool, names, where)
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


class Messages(Dialect):
    """Answers as Anthropic's messages.

    Args:
        stops: stop sequences of the request.
        prompt_tokens: length of the prompt.
    """

    def __init__(self, stops: Sequence[str], prompt_tokens: int) -> None:
        self._stops = stops
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._kind = ""
        self._has_begun = False
        self._reason = ""

    def whole(self, answer: Mapping[str, Any], ends: Sequence[Result]) -> dict[str, Any]:
        """A message."""
        (choice,) = answer["choices"]
        message = choice["message"]
        blocks: list[dict[str, Any]] = []
        if reasoning := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            arguments = arguments_of(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
        usage = _usage(answer["usage"])
        return self._message(answer, blocks, usage) | self._ending(choice["finish_reason"], ends)

    def frame(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of a chunk."""
        out = b""
        if not self._has_begun:
            self._has_begun = True
            usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
            start = self._message(chunk, [], usage) | {"stop_reason": None, "stop_sequence": None}
            out += _event("message_start", message=start)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._reason = choice["finish_reason"] or self._reason
            if reasoning := delta.get("reasoning_content"):
                out += self._in_block("thinking", {"thinking": "", "signature": ""})
                out += self._delta({"type": "thinking_delta", "thinking": reasoning})
            if delta.get("content"):
                out += self._in_block("text", {"text": ""})
                out += self._delta({"type": "text_delta", "text": delta["content"]})
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                out += self._closed()
                out += self._in_block("tool_use", {"id": call["id"], "name": function["name"], "input": {}})
                arguments = json.dumps(arguments_of(function["arguments"]), ensure_ascii=False)
                out += self._delta({"type": "input_json_delta", "partial_json": arguments})
        return out

    def idle(self) -> bytes:
        """An event: some clients count no comments as a sign of life."""
        return _event("ping")

    def end(self, last: Mapping[str, Any], ends: Sequence[Result]) -> bytes:
        """The events after the last chunk."""
        ending = _event("message_delta", delta=self._ending(self._reason, ends), usage=_usage(last["usage"]))
        return self._closed() + ending + _event("message_stop")

    def failed(self, error: APIError) -> bytes:
        """The event of an error."""
        return _event("error", **error.as_object(anthropic=True))

    def _message(self, answer: Mapping[str, Any], blocks: list[Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        ids = {"id": answer["id"], "type": "message", "role": "assistant", "model": answer["model"]}
        return {**ids, "content": blocks, "usage": usage}

    def _ending(self, reason: str, ends: Sequence[Result]) -> dict[str, Any]:
        stop = ends[0].stop if ends[0].stop in self._stops else None
        return {"stop_reason": "stop_sequence" if stop else _STOPS[reason], "stop_sequence": stop}

    def _in_block(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """Begin a block of this kind, unless it has begun."""
        if self._kind == kind:
            return b""
        closed, self._kind = self._closed(), kind
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _closed(self) -> bytes:
        kind, self._kind = self._kind, ""
        return _event("content_block_stop", index=self._index) if kind else b""


def arguments_of(text: str) -> dict[str, Any]:
    """Arguments of a call as an object; of a call whose arguments are none, under the name that says so."""
    try:
        value = decode_message(text.encode())  # it can be written again
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        **cut_in(usage),
    }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + text_of({"type": kind, **fields}) + b"\n\n"
