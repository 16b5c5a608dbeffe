"""The problems that the bundled model is trained on: none of them is ever in a held-out set."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rabbitllm.demo.tasks import KINDS, Problem, draw_numbers, facts, problem_of

# Sums need by far the most practice; the held-out set has equal parts.
_SHARES: tuple[float, ...] = (0.45, 0.15, 0.2, 0.2)


def training_stream(seed: int = 0) -> Iterator[Problem]:
    """Training problems without end."""
    rng = random.Random(f"training {seed}")
    training_facts = facts(kept_back=False)
    while True:
        kind = rng.choices(KINDS, _SHARES)[0]
        if kind == "fact":
            yield rng.choice(training_facts)
        else:
            yield problem_of(kind, draw_numbers(kind, rng, for_scoring=False), rng)


def text_of(problem: Problem) -> str:
    """A problem's prompt with its answer; the tokenizer adds the end token."""
    return f"{problem.prompt} {problem.answer}"
