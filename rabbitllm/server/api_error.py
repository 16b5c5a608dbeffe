"""An error response, in OpenAI's form.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

A message goes to the client. It never contains a path of this machine or any part of a traceback.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jinja2

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import MediaError, MissingPackageError, OptionError, ProcessorError
from rabbitllm.generation.template import PromptRefused

logger = logging.getLogger(__name__)
_Field = TypeVar("_Field", list[Any], dict[str, Any])

BAD_REQUEST, UNAUTHORISED, FORBIDDEN, NOT_FOUND = 400, 401, 403, 404
TIMED_OUT, TOO_LARGE, BUSY, BROKEN, CLOSING, TOO_LATE = 408, 413, 429, 500, 503, 504
NOT_A_NUMBER = "not_a_number"
"""The code of results that JSON has no numbers for."""

_ERROR_TYPES = {
    UNAUTHORISED: "authentication_error",
    FORBIDDEN: "permission_error",
    BUSY: "rate_limit_error",
    TOO_LATE: "timeout_error",
    TIMED_OUT: "timeout_error",
}
_OF_ANTHROPIC = {NOT_FOUND: "not_found_error", TOO_LARGE: "request_too_large"}
"""Types that Anthropic's interface has besides; its type of what is broken is api_error."""


@dataclass(eq=False)
class APIError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status.
        message: the value found, and the value expected.
        param: the field of the request at fault.
        code: a machine-readable word.
        headers: headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    def as_object(self, *, anthropic: bool = False) -> dict[str, Any]:
        """For `json.dumps`, with the type that OpenAI's interface names, or Anthropic's."""
        types = {**_ERROR_TYPES, **_OF_ANTHROPIC} if anthropic else _ERROR_TYPES
        broken = "api_error" if anthropic else "server_error"
        error_type = types.get(self.status, "invalid_request_error" if self.status < BROKEN else broken)
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


def bad(
    message: str, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
) -> APIError:
    """The error for an invalid request."""
    return APIError(BAD_REQUEST, message, param, code, headers)


@contextlib.contextmanager
def bad_options(param: str | None = None, code: str | None = None) -> Iterator[None]:
    """Answer an `OptionError` that is raised inside as an invalid request, without its advice for the command line."""
    try:
        yield
    except OptionError as error:
        raise bad(error.problem, param, code) from None


def unsupported(message: str, param: str) -> APIError:
    """The error for a field, or a value of it, that is not supported."""
    return bad(message, param, "unsupported_parameter")


def take_fields(body: Any, harmless_names: Collection[str]) -> dict[str, Any]:
    """The fields of a body, without those that change no answer.

    Raises:
        APIError: it is no object.
    """
    if not isinstance(body, dict):
        raise bad("The request body is not a JSON object.")
    return {name: value for name, value in body.items() if name not in harmless_names}


def begun_chat(
    body: Any, harmless_names: Collection[str], same: Collection[str], system: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The other fields of a body in another interface's form, and the chat that its fields of the same name begin.

    Args:
        body: the body, decoded.
        harmless_names: fields that change no answer.
        same: fields of the same name and form in a chat.
        system: name of the system prompt, which the chat has as it is.
    """
    fields = take_fields(body, harmless_names)
    chat = {name: fields.pop(name) for name in same if fields.get(name) is not None}
    content = fields.pop(system, None)
    return fields, chat | {"messages": [{"role": "system", "content": content}] if content else []}


def taken(fields: dict[str, Any], name: str, kind: type[_Field]) -> _Field:
    """Take a field out of others; empty if it is missing or null.

    Raises:
        APIError: it is of another type than a list or an object.
    """
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, kind):
        raise bad(f"{name}: expected {'a list' if kind is list else 'an object'}.", name)
    return kind() if value is None else value


def refuse_others(value: Mapping[str, Any], names: Collection[str], where: str = "") -> None:
    """Refuse fields that have a value, of other names than these.

    Raises:
        APIError: there is one.
    """
    for name, content in value.items():
        if name not in names and content not in (None, 0, "", [], {}):
            full = f"{where}.{name}".strip(".")[:200]
            raise unsupported(f"{harmless(full, 100)} is not supported; omit it.", full)


def closing(*, failed: bool = False) -> APIError:
    """The error while the server shuts down, also since the thread that computes answers has failed."""
    headers = {"retry-after": "10", **CLOSE}
    if failed:
        return APIError(CLOSING, "The server has failed; its log has the reason.", code="failed", headers=headers)
    return APIError(CLOSING, "The server is shutting down.", code="shutting_down", headers=headers)


PROMPT_ERRORS = (PromptRefused, OptionError, MediaError, ProcessorError, MissingPackageError)
"""Errors of `ChatTemplate.prompt`."""
UNSUPPORTED, BAD_MEDIA = "unsupported_content", "invalid_media"
"""Codes of errors about pictures and sounds."""


@contextlib.contextmanager
def prompt_errors() -> Iterator[None]:
    """Answer an error of `ChatTemplate.prompt` that is raised inside as an invalid request."""
    try:
        yield
    except PROMPT_ERRORS as error:
        raise prompt_error(error) from error


def prompt_error(error: Exception) -> APIError:
    """The error for a conversation that cannot become a prompt.

    It quotes a template that raises on purpose, and nothing else of a template.

    Args:
        error: one of `PROMPT_ERRORS`.
    """
    if isinstance(error, OptionError):
        return bad(error.problem, "messages", "context_length_exceeded")
    if isinstance(error, MediaError):
        return bad(error.problem, "messages", UNSUPPORTED if "takes no" in error.problem else BAD_MEDIA)
    if not isinstance(error, PromptRefused):  # its message has paths of this machine
        logger.warning("pictures cannot be read: %s", error)
        return bad("This server cannot read pictures; its log has the reason.", "messages", UNSUPPORTED)
    cause = error.error
    if error.by_processor and not isinstance(cause, jinja2.TemplateError):
        reason = f": {harmless(str(cause), 300)}" if type(cause) is ValueError else ""
        return bad(f"The model's processor refuses these pictures{reason}.", "messages", BAD_MEDIA)
    reason = f": {str(cause)[:300].rstrip('.')}" if isinstance(cause, jinja2.TemplateError) and cause.message else ""
    return bad(f"The model's chat template refuses this conversation{reason}.", "messages", "template_error")


CLOSE = {"connection": "close"}
"""Response header that closes the connection, so that the rest of the request is not read."""
