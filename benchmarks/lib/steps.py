"""A run that makes one token after the other: what is measured of it, and what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lib.checkpoint import SCALES
from benchmarks.lib.runs import Run, equal_in_turn

PROMPT_TOKENS = 16


@dataclass
class StepsRun(Run):
    """One row of one turn; seconds.

    Attributes:
        load_seconds: until the model can be used; layer files are there already.
        first_token_seconds: from the call of `generate`.
        token_seconds: median of `step_seconds`, which leave out the first token.
        step_bytes: read from the disk in those steps.
    """

    load_seconds: float = 0.0
    first_token_seconds: float = 0.0
    token_seconds: float = 0.0
    step_seconds: Sequence[float] = ()
    step_bytes: Sequence[int] = ()
    tokens: Sequence[int] = ()
    dtype: str = ""
    threads: int = 0

    @property
    def headline(self) -> float:
        """Seconds a token."""
        return self.token_seconds


def prompt_for(scale: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    """So many tokens of a scale's vocabulary, the same each time."""
    return [(i * 37 + 11) % SCALES[scale].vocab_size for i in range(tokens)]


def tokens_equal(runs: Sequence[StepsRun], row: str, reference: str) -> list[bool]:
    """Whether a row made the tokens of another one, for every turn in which both ran."""
    return equal_in_turn(runs, row, reference, lambda run: run.tokens)
