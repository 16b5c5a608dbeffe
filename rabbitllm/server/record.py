"""The log line of a request, written at its end."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, field

from rabbitllm.base.terminal import counted, harmless
from rabbitllm.generation.request import Finished

logger = logging.getLogger("rabbitllm.server.requests")

SCOPE_KEY = "rabbitllm.record"
"""Key of a request's record in its ASGI scope."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class Record:
    """An HTTP request.

    Attributes:
        id: the caller's `x-request-id` if it is a plain word, else a new one.
        what: method and path.
        status: HTTP status of the response; 0 where there was none.
        error: the code of a refusal, or of an error that ended a stream; its message where it has no code.
        gone: whether the client disconnected before the end.
        finished: the end of each choice.
        started: `time.perf_counter()`.
    """

    id: str
    what: str
    status: int = 0
    error: str | None = None
    gone: bool = False
    finished: list[Finished] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def line(self) -> str:
        """The log line: what happened, how long it took, and its tokens."""
        parts = [f"{harmless(self.what, 80)} {self.status or 'no answer'}"]
        if self.error is not None:
            parts[0] += f" {harmless(self.error, 60)}"
        if self.gone:
            parts.append("client left")
        if self.finished:
            parts += self._generated()
        parts.append(f"{time.perf_counter() - self.started:.2f} s")
        return ", ".join(parts) + f" [{self.id}]"

    def _generated(self) -> list[str]:
        prompt, kept = (sum(getattr(one, name) for one in self.finished) for name in ("prompt_tokens", "kept_tokens"))
        new = sum(one.new_tokens for one in self.finished)
        parts = [f"{prompt:,} + {counted(new, 'token')}" + (f" ({kept:,} kept)" if kept else "")]
        firsts = [one.first for one in self.finished if one.first is not None]
        if firsts:
            parts.append(f"first after {min(firsts):.2f} s")
            after = max(one.seconds for one in self.finished) - min(firsts)
            if new > len(firsts) and after > 0:
                parts.append(f"then {(new - len(firsts)) / after:.1f} tokens/s")
        return parts


def request_id(given: str | None) -> str:
    """The caller's id if it is a plain word, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex[:20]
