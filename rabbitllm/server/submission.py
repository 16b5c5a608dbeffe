"""The requests of one answer, submitted to the batch together."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from rabbitllm.errors import BusyError, ClosedError, OptionError
from rabbitllm.generation.request import Delta, Failed, Finished, FinishReason, Request
from rabbitllm.server.answers import NOTHING, AnswerChoices, Envelope, joined, usage_of
from rabbitllm.server.api_error import BUSY, TOO_LATE, APIError, bad, broken, closing
from rabbitllm.server.event_stream import DONE, event
from rabbitllm.server.inbox import Inbox

logger = logging.getLogger(__name__)

NO_RETRY = {"x-should-retry": "false"}
"""Header against automatic retries by clients: another attempt would take as long."""


class Taking(Protocol):
    """The interface of `rabbitllm.generation.batch.Batch` used here."""

    def submit(self, request: Request, notify: Any) -> Any:
        """See there."""


class Submission:
    """Requests that the batch has accepted.

    Args:
        batch: runs the requests.
        requests: one for each choice.
        inbox: receives their events.

    Attributes:
        finished: the end of each choice; None for those still running.
        error: code of the refusal that ended a stream.

    Raises:
        APIError: the batch refuses one of them; then none is submitted.
    """

    def __init__(self, batch: Taking, requests: Sequence[Request], inbox: Inbox) -> None:
        self._inbox = inbox
        self._handles: list[Any] = []
        self._open = len(requests)
        self.finished: list[Finished | None] = [None] * len(requests)
        self.error: str | None = None
        try:
            for choice, request in enumerate(requests):
                self._handles.append(batch.submit(request, inbox.taker(choice)))
        except Exception as error:
            self.cancel()
            raise refusal_of(error) from error

    def cancel(self) -> None:
        """Cancel all its requests."""
        for handle in self._handles:
            handle.cancel()

    async def events(self) -> AsyncIterator[Sequence[tuple[int, Delta | Finished]]]:
        """Events as they arrive, until all choices have ended.

        Raises:
            APIError: a request failed or took too long.
        """
        while self._open:
            found: list[tuple[int, Delta | Finished]] = []
            for choice, one in await self._inbox.take():
                if isinstance(one, Failed):
                    raise refusal_of(one.error)
                if isinstance(one, Finished):
                    self.finished[choice] = one
                    self._open -= 1
                    if one.ended is FinishReason.TIMEOUT:
                        raise APIError(
                            TOO_LATE,
                            f"The answer was not complete after {one.seconds:.0f} s.",
                            code="timeout",
                            headers=NO_RETRY,
                        )
                    if one.ended is FinishReason.CANCELLED and not one.new_tokens:
                        raise closing()
                found.append((choice, one))
            yield found

    def usage(self, choices_of_a_prompt: int) -> dict[str, Any]:
        """The token usage of the answer."""
        return usage_of([one for one in self.finished if one is not None], choices_of_a_prompt)


async def whole(submission: Submission, envelope: Envelope, choices: AnswerChoices, of_a_prompt: int) -> dict[str, Any]:
    """The whole answer, once it is complete.

    Raises:
        APIError: see `Submission.events`.
    """
    pieces = [NOTHING] * len(submission.finished)
    async for found in submission.events():
        for choice, one in found:
            if isinstance(one, Delta):
                pieces[choice] = joined(pieces[choice], one)
    made = [
        choices.whole(choice, pieces[choice], end) for choice, end in enumerate(submission.finished) if end is not None
    ]
    return envelope.whole(made, submission.usage(of_a_prompt))


async def frames(
    submission: Submission, envelope: Envelope, choices: AnswerChoices, of_a_prompt: int
) -> AsyncIterator[bytes]:
    """The answer as server-sent events, as they arrive."""

    def chunks(parts: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(event(envelope.chunk([part])) for part in parts)

    yield b"".join(chunks(choices.begin(choice)) for choice in range(len(submission.finished)))
    try:
        async for found in submission.events():
            out = b""
            for choice, one in found:
                out += chunks(choices.more(choice, one) if isinstance(one, Delta) else choices.end(choice, one))
            yield out
    except Exception as error:  # the response has begun, so the error is sent as an event
        refusal = refusal_of(error)
        submission.error = refusal.code
        yield event(refusal.as_object())
        yield DONE
        return
    if envelope.include_usage:
        yield event(envelope.last_chunk(submission.usage(of_a_prompt)))
    yield DONE


def refusal_of(error: Exception) -> APIError:
    """The answer to an error of the batch; an unexpected error is logged, its details are not sent to the client."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, BusyError):
        seconds = max(math.ceil(error.retry_after), 1)
        return APIError(
            BUSY,
            f"As many requests wait as may. Try again in {seconds} s.",
            code="queue_full",
            headers={"retry-after": str(seconds)},
        )
    if isinstance(error, ClosedError):
        return closing()
    if isinstance(error, OptionError):
        return bad(error.problem)
    logger.error("A request failed.", exc_info=error)
    return broken()
