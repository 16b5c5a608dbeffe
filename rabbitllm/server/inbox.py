"""A queue of events from the batch's thread to an event loop, whose clients may read slowly.

Pieces that wait are joined, so that the queue is never larger than the answers themselves, however many passes made
them. The loop is woken once, however many events came meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from rabbitllm.generation.request import Delta, Event, TokenLogprob

Taken = list[tuple[int, Event]]


class Inbox:
    """Where the events of one answer's requests arrive.

    Args:
        choices: how many requests.
        keep_tokens: whether tokens are kept; else only text is.
        text_of: what is kept of a piece as its text; called in the batch's thread.
        watch: called with each event's choice, the event and `time.perf_counter()`, in the batch's thread.
    """

    def __init__(
        self,
        choices: int,
        *,
        keep_tokens: bool = True,
        text_of: Callable[[Delta], str] = lambda piece: piece.text,
        watch: Callable[[int, Event, float], None] = lambda choice, event, now: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._there = asyncio.Event()
        self._lock = threading.Lock()
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._tokens: list[list[TokenLogprob]] = [[] for _ in range(choices)]
        self._ends: Taken = []
        self._waiting: dict[int, None] = {}
        self._rung = False
        self._keep_tokens = keep_tokens
        self._text_of = text_of
        self._watch = watch

    def taker(self, choice: int) -> Callable[[Event], None]:
        """What the batch calls with the events of a choice."""
        return lambda event: self.put(choice, event)

    def put(self, choice: int, event: Event) -> None:
        """Take an event; from any thread.

        Raises:
            RuntimeError: the loop has ended.
        """
        self._watch(choice, event, time.perf_counter())
        text = self._text_of(event) if isinstance(event, Delta) else ""
        with self._lock:
            if isinstance(event, Delta):
                self._texts[choice].append(text)
                if self._keep_tokens:
                    self._tokens[choice] += event.tokens
                self._waiting[choice] = None
            else:
                self._ends.append((choice, event))
            ring, self._rung = not self._rung, True
        if ring:
            self._loop.call_soon_threadsafe(self._there.set)

    async def take(self) -> Taken:
        """What has come, the pieces of each choice as one; waits until there is something.

        A piece always comes before its choice's end.
        """
        await self._there.wait()
        with self._lock:
            found: Taken = []
            for choice in self._waiting:
                found.append((choice, Delta("".join(self._texts[choice]), tuple(self._tokens[choice]))))
                self._texts[choice].clear()
                self._tokens[choice].clear()
            found += self._ends
            self._waiting.clear()
            self._ends = []
            self._rung = False
            self._there.clear()
        return found
