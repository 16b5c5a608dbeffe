"""What can be said of the passes of a generation at a moment. Knows no model, no terminal and no clock of its own.

Shares are of the caller's time. On a GPU computing is asked for and not waited for, so there the time in which the host
waits for weights is told, and the rest is called computing.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, TypeAlias

from rabbitllm.telemetry.passes import PROMPT, PassInput

Waited: TypeAlias = tuple[float, float]
"""Seconds that callers have waited in all: for the disk, and for copies to a device."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of the caller: waiting for the disk, waiting for copies, dequantizing (and binding), computing."""

    disk: float = 0.0
    copies: float = 0.0
    dequantize: float = 0.0
    compute: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Name -> part of all, from 0 to 1; empty before anything was spent."""
        found = {"disk": self.disk, "copies": self.copies, "dequantize": self.dequantize, "compute": self.compute}
        total = sum(found.values())
        return {name: seconds / total for name, seconds in found.items()} if total > 0 else {}


@dataclass(frozen=True, slots=True)
class RunningPass:
    """A pass that is under way.

    Attributes:
        number: counted from 1, of all passes of this model.
        prompt: tokens of the prompt that go in; 0 where it is a further token's pass.
        layer: units that are done.
        layers: units of a pass.
        tokens: that came of this generation so far, over the whole batch.
        tokens_per_second: since its prompt was read; None while none came.
        spent: in this pass and the ones of its kind before it, of this generation.
        seconds: since this pass began.
    """

    number: int
    prompt: int
    layer: int
    layers: int
    tokens: int
    tokens_per_second: float | None
    spent: Spent
    seconds: float


def _reference(text: Any) -> Any:
    """A weak reference to a KV cache, so that the cache can be freed; None without a cache, or for a tuple."""
    try:
        return weakref.ref(text) if text is not None else None
    except TypeError:
        return None


class PassLedger:
    """Hears what happens in passes. One thread's passes; another may ask for facts.

    Args:
        layers: units of a pass.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._number = self._done = self._tokens = 0
        self._entry: PassInput | None = None
        self._text: Any = None
        self._start = self._prompt_end = 0.0
        self._spent = Spent()

    def begin(self, entry: PassInput, text: Any, now: float) -> bool:
        """A pass begins; whether it is the first of a generation.

        Args:
            entry: what goes in.
            text: the KV cache, by which it is known whether this pass goes on with the last one's text.
            now: seconds of any one clock.
        """
        last, cache = self._entry, self._text() if self._text is not None else None
        continues = last is not None and text is not None and cache is text
        made = last.made(entry) if continues and last is not None else None
        if not continues or made is None:
            self._tokens, self._prompt_end = 0, now
        elif last is not None:
            self._tokens += made
            if last.kind == PROMPT:
                self._prompt_end = now
        if not continues or last is None or last.kind != entry.kind:
            self._spent = Spent()
        self._entry, self._text = entry, _reference(text)
        self._number, self._done, self._start = self._number + 1, 0, now
        return not continues

    def spend(self, disk: float = 0.0, copies: float = 0.0, dequantize: float = 0.0, compute: float = 0.0) -> None:
        """The caller has spent so many seconds more."""
        old = self._spent
        self._spent = Spent(old.disk + disk, old.copies + copies, old.dequantize + dequantize, old.compute + compute)

    def unit_done(self) -> None:
        """A unit has computed."""
        self._done += 1

    def facts(self, now: float) -> RunningPass:
        """As things are now."""
        entry, elapsed = self._entry, now - self._prompt_end
        prompt = entry.batch * entry.length if entry is not None and entry.kind == PROMPT else 0
        timed = self._tokens - (entry.batch if entry is not None else 0)  # the first came of the prompt itself
        rate = timed / elapsed if timed > 0 and elapsed > 0 and not prompt else None
        done = min(self._done, self._layers)
        return RunningPass(self._number, prompt, done, self._layers, self._tokens, rate, self._spent, now - self._start)
