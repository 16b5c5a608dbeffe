"""From the bodies of chats and completions to requests for the batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import MediaError
from rabbitllm.generation.media import openai_part, text_of_parts
from rabbitllm.generation.reasoning import Thoughts
from rabbitllm.generation.request import MAX_CHOICES, ModelLimits, Prompt, Request, ThinkingBudget
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server._grammars import answer_grammar, must_call, types_of
from rabbitllm.server._tools import FORMS, call_tokens
from rabbitllm.server.api_error import (
    BAD_MEDIA,
    UNSUPPORTED,
    bad,
    bad_options,
    prompt_errors,
    unsupported,
)
from rabbitllm.server.schemas import (
    NO_LIMIT,
    ChatBody,
    CompletionBody,
    ContentPart,
    GenerationBody,
    Message,
    Tool,
    refuse_unsupported,
)
from rabbitllm.server.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A checked request for a chat or for completions.

    Attributes:
        requests: one for each choice.
        top_logprobs: see `Request`; None for no probabilities.
        tools: names of the tools in the prompt; empty for none.
        types: tool -> parameter -> its type; see `types_of`.
        most_calls: how many tool calls of an answer count; None for all.
        must_call: whether an answer is nothing but tool calls.
        echoes: the prompt's text that each completion begins with; empty if `echo` is off.
        candidates: answers to each prompt, of which the `n` most likely ones are returned.
        n: see above; 0 for all.
        max_tokens: the limit of new tokens where the context made it less than the request's.
        scored: prompts whose tokens get log probabilities, one for each choice.
    """

    requests: tuple[Request, ...]
    top_logprobs: int | None = None
    tools: tuple[str, ...] = ()
    types: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    most_calls: int | None = None
    must_call: bool = False
    echoes: tuple[str, ...] = ()
    candidates: int = 1
    n: int = 0
    max_tokens: int | None = None
    scored: tuple[tuple[int, ...], ...] = ()

    @property
    def keeps_tokens(self) -> bool:
        """Whether the answer needs tokens with their probabilities."""
        return any(request.top_logprobs is not None for request in self.requests)


def _new_tokens(prompt: Prompt, max_tokens: int | None, limits: ModelLimits, settings: Settings, param: str) -> int:
    """The limit of new tokens after a prompt; `max_tokens` is the request's own, cut to the rest of the context.

    `param` is the field with the prompt.
    """
    with bad_options(param):
        limits.check_ids(prompt.ids)
    with bad_options(param, "context_length_exceeded"):
        return limits.new_tokens(len(prompt.ids), max_tokens, settings.max_new_tokens, cut=True)


def _cut(max_tokens: int | None, new_tokens: Sequence[int]) -> int | None:
    return min(new_tokens) if max_tokens is not None and min(new_tokens) < max_tokens else None


def _requests_of(
    body: GenerationBody,
    prompts: Sequence[tuple[Prompt, int]],
    stops: tuple[str, ...],
    top_logprobs: int | None,
    limits: ModelLimits,
    settings: Settings,
    count: int,
) -> tuple[Request, ...]:
    """`count` requests for each prompt: all of the first, then all of the second; each prompt with its new tokens."""
    requested = body.sampling
    with bad_options("logit_bias"):
        limits.check_bias(requested)
    least = min(new for _, new in prompts)
    if body.min_tokens is not None and body.min_tokens > least:
        raise bad(f"min_tokens is {body.min_tokens}, and the limit of new tokens {least}.", "min_tokens")
    sampling = requested.over(settings.sampling)
    make = partial(Request, top_logprobs=top_logprobs, seconds=settings.seconds, priority=body.priority or 0)
    return tuple(
        make(prompt.ids, max_new_tokens, sampling.nth(index), stops, media=prompt.media)
        for index, (prompt, max_new_tokens) in enumerate(pair for pair in prompts for _ in range(count))
    )


def checked_chat(body: ChatBody, template: ChatTemplate, limits: ModelLimits, settings: Settings) -> CheckedCall:
    """Check the body and make its requests.

    Raises:
        APIError: the body asks for something unsupported or invalid.
    """
    refuse_unsupported(body, settings.of_the_model)
    forced, tools = must_call(body), _tools(body, template)
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs needs logprobs to be true.", "top_logprobs")
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    variables = _variables(body, template, settings, with_tools=bool(tools))
    messages = _messages(body.messages, template, settings)
    with prompt_errors():
        prompt = template.prompt(messages, [tool.model_dump(exclude_none=True) for tool in tools], **variables)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    max_tokens = None if max_tokens == NO_LIMIT else max_tokens
    new_tokens = _new_tokens(prompt, max_tokens, limits, settings, "messages")
    stops, n = (*body.stops, *template.stops), body.n or 1
    requests = _requests_of(body, [(prompt, new_tokens)], stops, top_logprobs, limits, settings, n)
    shown = call_tokens(template.tokenizer) if tools else frozenset()
    thoughts = template.thoughts(prompt.ids)
    budget = _budget(body.thinking_token_budget, template, thoughts, len(prompt.ids))
    grammar = answer_grammar(body, template.tokenizer, tools, thoughts, template.sources[bool(tools)], forced=forced)
    form = partial(replace, shown=shown, thoughts=thoughts, thinking_budget=budget, grammar=grammar)
    requests = tuple(form(request) for request in requests)
    functions = [tool.function for tool in tools]
    types = {function.name: types_of(function.parameters or {}) for function in functions}
    names = tuple(function.name for function in functions)
    most_calls, cut = 1 if body.parallel_tool_calls is False else None, _cut(max_tokens, [new_tokens])
    of_calls = names, types, most_calls, bool(forced)
    return CheckedCall(requests, top_logprobs, *of_calls, candidates=n, max_tokens=cut)


def _budget(
    tokens: int | None, template: ChatTemplate, thoughts: Thoughts | None, prompt: int
) -> ThinkingBudget | None:
    if tokens is None:
        return None
    if thoughts is None or template.thought_tokens is None:
        problem = "is not supported: this model's marks of reasoning are no tokens; omit it"
        raise unsupported(f"thinking_token_budget (budget_tokens) {problem}.", "thinking_token_budget")
    return ThinkingBudget(tokens, *template.thought_tokens, prompt, thoughts.reader().is_reasoning)


def _tools(body: ChatBody, template: ChatTemplate) -> list[Tool]:
    if not body.tools or body.tool_choice == "none":
        return []
    if not template.reads("tools", with_tools=True):
        raise unsupported("This model's chat template does not support tools.", "tools")
    return body.tools


def _variables(body: ChatBody, template: ChatTemplate, settings: Settings, *, with_tools: bool) -> dict[str, Any]:
    """The further variables of the template; messages and tools are passed to it separately."""
    settable = template.settable(with_tools=with_tools)
    named = body.chat_template_kwargs or {}
    for name, value in named.items():
        if name not in settable and value is not None:
            hint = f" It reads {', '.join(sorted(settable))}." if settable else ""
            raise unsupported(
                f"chat_template_kwargs: {harmless(name, 60)} is no variable of this model's chat template.{hint}",
                "chat_template_kwargs",
            )
    asked = body.response_format
    form = {"type": "text"} if asked is None else asked.model_dump(exclude_none=True, by_alias=True)
    is_read = form["type"] != "text" and "response_format" in settable
    fields = {"response_format": form if is_read else None, "reasoning_effort": body.reasoning_effort}
    if body.reasoning_effort is not None and "reasoning_effort" not in settable:
        raise unsupported(
            "reasoning_effort is not supported: this model's chat template does not use it.", "reasoning_effort"
        )
    usual = {name: value for name, value in template.thinking(settings.thinking).items() if name in settable}
    return usual | {name: value for name, value in {**named, **fields}.items() if value is not None}


def _messages(messages: list[Message], template: ChatTemplate, settings: Settings) -> list[dict[str, Any]]:
    """Messages in the form that chat templates expect."""
    converted = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role = message.role
        if role == "developer" and not template.reads("developer"):
            role = "system"
        entry: dict[str, Any] = {"role": role, "content": _content(message, where, settings)}
        entry |= message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        entry |= _reasoning(message, template, where)
        if message.tool_calls:
            if role != "assistant":
                raise bad(f"{where} is of {role}; only an assistant can call tools.", f"{where}.tool_calls")
            if not template.reads("tool_calls", with_tools=True):
                raise unsupported("This model's chat template does not support tool calls.", f"{where}.tool_calls")
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        converted.append(entry)
    if FORMS["Kimi K2"].opening in template.sources[1]:
        _number(converted)
    return converted


def _number(messages: list[dict[str, Any]]) -> None:
    """Give calls the ids that Kimi K2 wrote, with name and number: its template repeats them."""
    ids: list[str] = []
    names: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            ids.append(f"functions.{call['function']['name']}:{len(ids)}")
            names[call["id"]] = call["id"] = ids[-1]
        if message.get("tool_call_id") in names:
            message["tool_call_id"] = names[message["tool_call_id"]]


def _reasoning(message: Message, template: ChatTemplate, where: str) -> dict[str, str]:
    """The reasoning of an earlier answer, under the names that the template reads; most templates leave it out."""
    texts = [text for text in (message.reasoning_content, message.reasoning, message.thinking) if text]
    if texts and message.role != "assistant":
        raise bad(f"{where} is of {message.role}; only an assistant has reasoning.", where)
    return template.of_reasoning(texts[0]) if texts else {}


def _content(message: Message, where: str, settings: Settings) -> str | list[Mapping[str, Any]]:
    """The text of a message, or its parts if there are pictures or sounds among them."""
    if message.content is None:
        if message.role not in ("assistant", "tool"):
            raise bad(f"{where} has no content.", f"{where}.content")
        return ""
    if isinstance(message.content, str):
        return message.content
    parts = []
    for index, part in enumerate(message.content):
        path = f"{where}.content.{index}"
        extra = [name for name in sorted(ContentPart.model_fields.keys() - {"type", part.type}) if getattr(part, name)]
        if extra:
            raise unsupported(f"{path} is of type {harmless(part.type, 40)} and has {extra[0]}; omit it.", path)
        try:
            media = openai_part(part.model_dump(exclude_none=True), path, settings.media_folder)
        except MediaError as error:
            raise bad(error.problem, path, BAD_MEDIA) from error
        if media is not None and message.role not in ("user", "tool"):
            raise bad(f"{where} is of {message.role}; only a user can send pictures and sounds.", path, UNSUPPORTED)
        parts.append(media or {"type": "text", "text": _text(part, path)})
    return text_of_parts(parts)


def _text(part: ContentPart, where: str) -> str:
    if part.type not in ("text", "refusal"):
        supported = "text, image_url and input_audio are supported"
        raise bad(f"{where} is of type {part.type[:40]}; {supported}.", where, UNSUPPORTED)
    text = part.text if part.type == "text" else part.refusal
    if not isinstance(text, str):
        raise bad(f"{where} has no text.", where)
    return text


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Arguments as a dict, which templates expect; unchanged if they are not a JSON object."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():  # a call without arguments
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def checked_completion(
    body: CompletionBody, tokenizer: PreTrainedTokenizerBase, limits: ModelLimits, settings: Settings
) -> CheckedCall:
    """Check the body and make its requests.

    Raises:
        APIError: the body asks for something unsupported or invalid.
    """
    refuse_unsupported(body, settings.of_the_model)
    if body.suffix:
        raise unsupported("suffix is not supported; omit it.", "suffix")
    n = body.n or 1
    candidates = body.best_of or n
    if candidates < n:
        raise bad(f"best_of is {candidates}, less than n, which is {n}.", "best_of")
    if candidates > n and body.stream:
        raise bad("best_of needs whole answers, which are not streamed; omit best_of or stream.", "best_of")
    entries = list_prompts(body.prompt)
    if not entries:
        raise bad("There is no prompt.", "prompt")
    if len(entries) * candidates > MAX_CHOICES:  # before any of them becomes tokens
        raise bad(f"{len(entries)} prompts with n={candidates} are more than {MAX_CHOICES} choices.", "prompt")
    prompts = [Prompt(tuple(token_ids(entry, tokenizer, limits, "prompt"))) for entry in entries]
    max_tokens = body.max_tokens if body.max_tokens is not None else settings.completion_new_tokens
    max_tokens = settings.max_new_tokens if max_tokens == NO_LIMIT else max_tokens
    pairs = [(prompt, _new_tokens(prompt, max_tokens, limits, settings, "prompt")) for prompt in prompts]
    top_logprobs = 0 if body.logprobs is None and candidates > n else body.logprobs
    requests = _requests_of(body, pairs, body.stops, top_logprobs, limits, settings, candidates)
    grammar = answer_grammar(body, tokenizer)
    requests = tuple(replace(request, grammar=grammar) for request in requests)
    echoes: tuple[str, ...] = ()
    if body.echo:
        texts = [entry if isinstance(entry, str) else str(tokenizer.decode(entry)) for entry in entries]
        echoes = tuple(text for text in texts for _ in range(candidates))
    return CheckedCall(
        requests,
        body.logprobs,
        echoes=echoes,
        candidates=candidates,
        n=n,
        max_tokens=_cut(body.max_tokens, [new for _, new in pairs]),
        scored=tuple(request.prompt for request in requests) if body.echo and body.logprobs is not None else (),
    )


def list_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Each prompt, as text or as ids."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [entry for entry in prompt if isinstance(entry, int)]
    return [ids] if ids else [entry for entry in prompt if not isinstance(entry, int)]


def token_ids(
    prompt: str | list[int], tokenizer: PreTrainedTokenizerBase, limits: ModelLimits, field: str
) -> list[int]:
    """The token ids of a prompt; ids are returned unchanged.

    Raises:
        APIError: the text of `field` cannot fit into the context: a tokenizer would take long to find that out.
    """
    if not isinstance(prompt, str):
        return prompt
    with bad_options(field, "context_length_exceeded"):
        limits.check_letters(len(prompt), f"The {field}")
    return [int(token) for token in tokenizer(prompt)["input_ids"]]
