"""One line over a slow pass: where it is, how fast tokens come, where the time goes. A fast pass shows nothing.

Measures with hooks around the units, from outside; knows nothing of how weights come.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from rabbitllm.base.words import LinePiece, Row, duration, fitting
from rabbitllm.display.region import THE_REGION, Claim, LinePace
from rabbitllm.engine.pass_ledger import PassLedger, RunningPass, Waited
from rabbitllm.telemetry.passes import PassInput

SLOW_SECONDS = 2.0
"""A pass that is over sooner needs no line."""


class PassLine:
    """Watches the units of passes; shows those passes that are slow.

    Args:
        modules: the units, each called once in a pass.
        waited: what callers have waited for weights in all.
        clock: seconds.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        waited: Callable[[], Waited] = lambda: (0.0, 0.0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = PassLedger(len(modules))
        self._waited = waited
        self._clock = clock
        self._claim: Claim | None = None
        self._pace = LinePace(clock())
        self._open = False
        self._start = 0.0
        self._kind = ""
        self._slow_kind = ""
        self._mark = 0.0
        self._waited_before: Waited = (0.0, 0.0)
        THE_REGION.observe()
        for module in modules:
            module.register_forward_pre_hook(self._before_weights, prepend=True)
            module.register_forward_pre_hook(self._before_computing)
            module.register_forward_hook(self._after, always_call=True)

    @contextlib.contextmanager
    def over(self, entry: PassInput, text: Any) -> Iterator[None]:
        """A pass is what happens inside the context; one inside another is part of it.

        Args:
            entry: what goes in.
            text: the KV cache.
        """
        if self._open:
            yield
            return
        self._open, self._kind = True, entry.kind
        self._start = self._mark = self._clock()
        self._waited_before = self._waited()
        if self._ledger.begin(entry, text, self._start):
            self._pace = LinePace(self._start)
        try:
            yield
        finally:  # torch runs no hooks after a KeyboardInterrupt, but this
            self._open = False
            self._slow_kind = self._kind if self._clock() - self._start >= SLOW_SECONDS else ""
            if self._claim is not None:
                self._claim.release()
                self._claim = None

    def rows(self, width: int) -> Sequence[Row]:
        """For the region."""
        return [fitting(pieces_of(self._facts()), width)]

    def line(self) -> str:
        """For the region."""
        return ", ".join(piece.text for piece in pieces_of(self._facts()) if piece.text)

    def _facts(self) -> RunningPass:
        return self._ledger.facts(self._clock())

    def _before_weights(self, module: nn.Module, args: Any) -> None:
        if self._open:
            self._lap("compute")

    def _before_computing(self, module: nn.Module, args: Any) -> None:
        if self._open:
            self._lap("dequantize")

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open:
            return
        now = self._lap("compute")
        self._ledger.unit_done()
        slow = now - self._start >= SLOW_SECONDS or self._slow_kind == self._kind
        if slow and self._claim is None:
            self._claim = THE_REGION.claim(self, self._pace)

    def _lap(self, work: str) -> float:
        """What passed since the last lap was this work, but for what was waited meanwhile."""
        now, (disk, copies) = self._clock(), self._waited()
        disk_before, copies_before = self._waited_before
        waited = (disk - disk_before, copies - copies_before)
        worked = max(now - self._mark - sum(waited), 0.0)
        self._ledger.spend(*waited, **{work: worked})
        self._mark, self._waited_before = now, (disk, copies)
        return now


def pieces_of(facts: RunningPass) -> list[LinePiece]:
    """What the line says, the most important with the lowest rank."""
    found = [
        LinePiece(f"pass {facts.number}", 0),
        LinePiece(f"{facts.prompt:,} tokens of prompt" if facts.prompt else "", 2),
        LinePiece(f"layer {facts.layer} of {facts.layers}", 1),
        LinePiece(duration(facts.seconds) if facts.prompt else "", 4),
        LinePiece(_pace_text(facts.tokens_per_second), 2, "bold"),
    ]
    ranks = {"disk": 3, "compute": 5, "dequantize": 6, "copies": 7}
    shares = [(name, share) for name, share in facts.spent.shares.items() if share >= 0.005]
    return found + [LinePiece(f"{name} {100 * share:.0f} %", ranks[name]) for name, share in shares]


def _pace_text(rate: float | None) -> str:
    if rate is None:
        return ""
    return f"{rate:.1f} tokens/s" if rate >= 10 else f"{rate:.2f} tokens/s" if rate >= 0.1 else f"{rate:.3f} tokens/s"
