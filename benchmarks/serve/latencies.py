"""What requests to a server waited for, and how much came of them: pure figures of what clients noted. Seconds.

A time is of the client's clock, counted from when the first request of a level was sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a client noted of one request.

    Attributes:
        sent: when.
        pieces: when each piece of text came.
        new_tokens: as the server counted them at the end; None if the end did not come.
        prompt_tokens, kept_tokens: as the server counted them; None where it did not say.
        text: what came.
        status: of HTTP; None if there was none.
        error: why it was not answered to its end; None if it was.
    """

    sent: float
    pieces: tuple[float, ...]
    new_tokens: int | None
    prompt_tokens: int | None
    kept_tokens: int | None
    text: str
    status: int | None
    error: str | None

    @classmethod
    def of(cls, noted: Mapping[str, Any]) -> Answer:
        """From the clients' JSON."""
        return cls(**{**noted, "pieces": tuple(noted["pieces"])})

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.new_tokens is not None

    @property
    def first(self) -> float | None:
        """Seconds from sending to the first piece."""
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def tokens(self) -> int:
        """That came; without the server's count, one a piece."""
        return len(self.pieces) if self.new_tokens is None else self.new_tokens


@dataclass(frozen=True)
class Level:
    """So many requests at once, for a while.

    Attributes:
        at_once: requests under way at the same time.
        answers: all that were sent.
        seconds: from the first that was sent to the last piece of any; to the limit, where that cut some short.
    """

    at_once: int
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens_a_second(self) -> float:
        """Of all together, prompts included in the time."""
        return sum(answer.tokens for answer in self.answers) / self.seconds if self.seconds > 0 else 0.0

    @property
    def whole(self) -> int:
        """Requests that were answered to their end."""
        return sum(answer.is_whole for answer in self.answers)

    @property
    def firsts(self) -> list[float]:
        """Waits for first pieces; infinite for the requests that got none."""
        return [math.inf if answer.first is None else answer.first for answer in self.answers]

    @property
    def betweens(self) -> list[float]:
        """Waits for further pieces, of all requests."""
        return [later - earlier for answer in self.answers for earlier, later in itertools.pairwise(answer.pieces)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The least value that at least so many percent of the values do not exceed; None for no values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def linearity(at_once: int, rate: float, alone: float) -> float | None:
    """Of the tokens a second that so many requests would get, if each got what one gets alone; None if that is 0."""
    return rate / (at_once * alone) if alone > 0 else None
