"""A progress line for slow passes: the layer, tokens per second, and the shares of the time.

Hooks around the units measure, independent of the reading of weights. The size of a pass follows from the arguments of
the model's forward.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from rabbitllm.base.terminal import LinePiece, Row, duration, fitting
from rabbitllm.display.region import THE_REGION, Claim, LinePace
from rabbitllm.telemetry.passes import PROMPT, PassInput

if TYPE_CHECKING:
    from transformers import Cache

_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_CACHES = ("cache", "past_key_values", "cache_params")  # the last two before transformers 5.24


def pass_input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[PassInput, Any]:
    """The size of the input, and the KV cache (None without one).

    Args:
        args, kwargs: of a model's forward: ids (batch, length) or embeddings (batch, length, hidden).
    """
    tensor = next((kwargs[name] for name in _INPUTS if kwargs.get(name) is not None), args[0] if args else None)
    shape = tuple(getattr(tensor, "shape", ()))
    batch, length = shape[:2] if len(shape) >= 2 else (1, 0)
    cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    logits = kwargs.get("logits_to_keep")
    return PassInput(batch, length, _cached(cache), logits if isinstance(logits, int) and logits > 0 else None), cache


def _cached(cache: Cache) -> int | None:
    tell = getattr(cache, "get_seq_length", None)
    try:
        return int(tell() if tell is not None else cache.seqlen_offset)  # of xLSTM
    except (ValueError, TypeError, AttributeError, NotImplementedError):  # a state-space model's cache has no length
        return None


Waited: TypeAlias = tuple[float, float]
"""Seconds that callers have waited in all: for the disk, and for copies to a device."""


WORK = {"disk": 3, "copies": 7, "dequantize": 6, "compute": 5}
"""Parts of a caller's time (waiting for the disk and for copies, dequantizing and binding, computing) -> the rank of
the share in the line."""


class PassLedger:
    """Records the passes of one thread; another thread may read. Times are seconds of one clock.

    Shares are of the caller's time. A GPU computes asynchronously: the time in which the host waits for weights is
    reported, and the rest counts as computing.

    Attributes:
        number: of the running pass, counted from 1, of all passes of this model.
        layer: units that have computed in it.
        tokens: generated so far by this generation, in all sequences of the batch.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.number = self.layer = self.tokens = 0
        self._input = PassInput(0, 0, 0)
        self._kv_cache: Any = None
        self._start = self._prompt_end = 0.0
        self._spent = Counter[str]()

    def begin(self, pass_input: PassInput, kv_cache: Any, now: float) -> bool:
        """Record the begin of a pass; return whether it is the first of a generation.

        Args:
            pass_input: the size of the input.
            kv_cache: the pass continues a generation if the last pass had the same one.
            now: the time.
        """
        last, last_cache = self._input, self._kv_cache() if self._kv_cache is not None else None
        continues = kv_cache is not None and last_cache is kv_cache
        tokens = last.made(pass_input) if continues else None
        if tokens is None:
            self.tokens, self._prompt_end = 0, now
        else:
            self.tokens += tokens
            if last.kind == PROMPT:
                self._prompt_end = now
        if not continues or last.kind != pass_input.kind:
            self._spent = Counter()
        self._input, self._kv_cache = pass_input, None
        with contextlib.suppress(TypeError):  # a tuple has no weak references
            self._kv_cache = weakref.ref(kv_cache) if kv_cache is not None else None
        self.number, self.layer, self._start = self.number + 1, 0, now
        return not continues

    def spend(self, **seconds: float) -> None:
        """Add seconds of the caller, by kinds of `WORK`."""
        self._spent.update(seconds)

    def unit_done(self) -> None:
        """Record that a unit has computed."""
        self.layer = min(self.layer + 1, self.layers)

    @property
    def prompt(self) -> int:
        """Tokens of the prompt in a prefill; 0 in a decode pass."""
        return self._input.batch * self._input.length if self._input.kind == PROMPT else 0

    @property
    def shares(self) -> dict[str, float]:
        """Kind of `WORK` -> share of the time of this pass and the earlier ones of its kind, in this generation."""
        spent = dict(self._spent)
        total = sum(spent.values())
        return {name: spent.get(name, 0.0) / total for name in WORK} if total > 0 else {}

    def seconds(self, now: float) -> float:
        """Seconds since this pass began."""
        return now - self._start

    def tokens_per_second(self, now: float) -> float | None:
        """The rate since the prefill; None before the first token of a decode pass."""
        timed, elapsed = self.tokens - self._input.batch, now - self._prompt_end  # the first comes from the prefill
        return timed / elapsed if timed > 0 and elapsed > 0 and not self.prompt else None


SLOW_SECONDS = 2.0
"""Shorter passes have no line."""


class PassLine:
    """Measures passes with hooks on the units; shows a line for slow ones.

    Args:
        modules: the units, each called once in a pass.
        waited: returns the seconds that callers have waited for weights in all.
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
            module.register_forward_pre_hook(lambda module, args: self._lap("compute"), prepend=True)
            module.register_forward_pre_hook(lambda module, args: self._lap("dequantize"))
            module.register_forward_hook(self._after, always_call=True)

    @contextlib.contextmanager
    def over(self, pass_input: PassInput, kv_cache: Any) -> Iterator[None]:
        """A context around one pass; a nested one belongs to the outer pass."""
        if self._open:
            yield
            return
        self._open, self._kind = True, pass_input.kind
        self._start = self._mark = self._clock()
        self._waited_before = self._waited()
        if self._ledger.begin(pass_input, kv_cache, self._start):
            self._pace = LinePace(self._start)
        try:
            yield
        finally:  # torch runs no hooks after a KeyboardInterrupt
            self._open = False
            self._slow_kind = self._kind if self._clock() - self._start >= SLOW_SECONDS else ""
            if self._claim is not None:
                self._claim.release()
                self._claim = None

    def rows(self, width: int) -> Sequence[Row]:
        """The line as a row of the region."""
        return [fitting(self._pieces(), width)]

    def line(self) -> str:
        """The line as plain text, for the region."""
        return ", ".join(piece.text for piece in self._pieces() if piece.text)

    def _pieces(self) -> list[LinePiece]:
        """The pieces of the line, the most important with the lowest rank."""
        ledger, now = self._ledger, self._clock()
        pieces = [
            LinePiece(f"pass {ledger.number}", 0),
            LinePiece(f"{ledger.prompt:,} tokens of prompt" if ledger.prompt else "", 2),
            LinePiece(f"layer {ledger.layer} of {ledger.layers}", 1),
            LinePiece(duration(ledger.seconds(now)) if ledger.prompt else "", 4),
            LinePiece(_pace_text(ledger.tokens_per_second(now)), 2, "bold"),
        ]
        shares = [(name, share) for name, share in ledger.shares.items() if share >= 0.005]
        return pieces + [LinePiece(f"{name} {100 * share:.0f} %", WORK[name]) for name, share in shares]

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open:
            return
        self._lap("compute")
        self._ledger.unit_done()
        slow = self._mark - self._start >= SLOW_SECONDS or self._slow_kind == self._kind
        if slow and self._claim is None:
            self._claim = THE_REGION.claim(self, self._pace)

    def _lap(self, work: str) -> None:
        """Record the time since the last lap of a pass as this work, less the waits in it."""
        if not self._open:
            return
        now, (disk, copies) = self._clock(), self._waited()
        disk_before, copies_before = self._waited_before
        waited = (disk - disk_before, copies - copies_before)
        worked = max(now - self._mark - sum(waited), 0.0)
        self._ledger.spend(disk=waited[0], copies=waited[1], **{work: worked})
        self._mark, self._waited_before = now, (disk, copies)


def _pace_text(rate: float | None) -> str:
    if rate is None:
        return ""
    return f"{rate:.1f} tokens/s" if rate >= 10 else f"{rate:.2f} tokens/s" if rate >= 0.1 else f"{rate:.3f} tokens/s"
