"""A queue of events from the batch's thread to an event loop whose clients may read slowly.

Waiting pieces are joined, so that the queue is never larger than the answers themselves, however many passes
produced them. The loop is woken once, however many events arrive meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from rabbitllm.generation.request import Delta, Event, TokenLogprob

Taken = list[tuple[int, Event]]


class Inbox:
    """Receives the events of one answer's requests.

    Args:
        choices: number of requests.
        keep_tokens: whether to keep tokens as well as text.
        text_of: the text to keep of a piece; called in the batch's thread.
        watch: called with the choice, the event and `time.perf_counter()`, in the batch's thread.
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
        """The callback for the events of a choice."""
        return lambda event: self.put(choice, event)

    def put(self, choice: int, event: Event) -> None:
        """Add an event; callable from any thread.

        Raises:
            RuntimeError: the event loop is closed.
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
        """The events that have arrived, with the pieces of each choice joined; waits until there is one.

        A piece always comes before the end of its choice.
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
