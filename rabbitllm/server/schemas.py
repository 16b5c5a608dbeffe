"""Schemas of request bodies: the fields of OpenAI's interface, with their types and bounds.

Other fields are kept in `model_extra`. Those that would change an answer are refused, not ignored (`NEUTRAL`); unknown
fields, and those that change no answer (`user`, `store`, `metadata`), are ignored as in OpenAI-compatible servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rabbitllm.generation.request import MAX_CHOICES, SEEDS
from rabbitllm.server.api_error import bad, unsupported

MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 10_000
MAX_TOOLS = 128

Token = Annotated[int, Field(ge=0)]
_Parsed = TypeVar("_Parsed", bound=BaseModel)


class _Strict(BaseModel):
    """A schema without conversion between numbers and strings."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptionsBody(_Strict):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerationBody(_Strict):
    """Fields shared by chats and completions."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=SEEDS)
    seed: int | None = Field(None, ge=-SEEDS - 1, le=SEEDS)
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends, without empty ones.

        Raises:
            APIError: too many.
        """
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(given) > MAX_STOPS:
            raise bad(f"stop has {len(given)} texts; expected at most {MAX_STOPS}.", "stop")
        return tuple(dict.fromkeys(text for text in given if text))

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ContentPart(_Strict):
    """A part of a message's content."""

    type: str
    text: str | None = None
    image_url: str | dict[str, Any] | None = None
    input_audio: dict[str, Any] | None = None


class CalledFunction(_Strict):
    """`tool_calls[].function`."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(_Strict):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Strict):
    """One of `messages`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(_Strict):
    """`tools[].function`."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Strict):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class ResponseFormat(_Strict):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None


class Embedding(_Strict):
    """Body of `/v1/embeddings`."""

    model: str | None = None
    input: str | list[str] | list[Token] | list[list[Token]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)


def parsed(kind: type[_Parsed], body: Any) -> _Parsed:
    """A body as one of these schemas.

    Raises:
        APIError: the body does not fit; the message names the field and the problem.
    """
    if not isinstance(body, dict):
        raise bad("The request body is not a JSON object.")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        where = _field(found[0]["loc"])
        same = [one["msg"] for one in found if _field(one["loc"]) == where]
        problems = "; or ".join(dict.fromkeys(text[:1].lower() + text[1:] for text in same[:4]))
        raise bad(f"{where or 'The body'}: {problems}.", where or None) from None


def _field(location: tuple[int | str, ...]) -> str:
    """`messages.0.content`, without the names of the types that pydantic tried."""
    types = {"str", "int", "float", "bool", "dict", "list"}
    kept = [str(part) for part in location if isinstance(part, int) or (part.isidentifier() and part not in types)]
    return ".".join(kept)[:200]


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"], []),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "prediction": (),
}
"""Field -> values without effect, unless the model has a value of its own; None counts for every field."""


def refuse_unsupported(body: GenerationBody, of_the_model: Mapping[str, float]) -> None:
    """Refuse a field that would change the answer and is not supported.

    Args:
        body: the body.
        of_the_model: field -> the value that every answer is made with, where that is not the neutral one.

    Raises:
        APIError: there is one.
    """
    for name, value in (body.model_extra or {}).items():
        if name not in NEUTRAL or value is None:
            continue
        kept = (of_the_model[name],) if name in of_the_model else NEUTRAL[name]
        if not any(
            value == neutral and (value is neutral or bool not in (type(value), type(neutral))) for neutral in kept
        ):
            what = f" or use {' or '.join(map(repr, kept))}" if kept else ""
            raise unsupported(f"{name} is not supported; omit it{what}.", name)
