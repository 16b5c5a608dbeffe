"""What a batch takes on: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from rabbitllm.errors import OptionError


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch takes on.

    Attributes:
        running: requests in one pass, at most.
        waiting: requests that wait for a place, at most, beside those for whom there is one at the next pass.
        cache_bytes: keys and values of all requests, and those kept for later prompts; None for half of the
            memory that is free when the batch begins, on the devices that compute.
        chunk: tokens of one prompt in a pass, so that a long one does not keep the others waiting; of several
            together it may be more, see `picking.Pace`.
        exact: compute each request's rows by themselves: its tokens are then those that it gets alone in any dtype,
            at the price of speed.
    """

    running: int = 64
    waiting: int = 256
    cache_bytes: int | None = None
    chunk: int = 512
    exact: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: a number below one.
        """
        for name in ("running", "waiting", "cache_bytes", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}, which is none at all.", "Give at least 1.")
