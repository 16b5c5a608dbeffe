"""Problems with exactly one correct answer, for training the bundled model and for scoring any copy of it.

Four kinds: sums, comparisons, sorting and small facts.  Every problem belongs permanently either to training or
to the held-out side, and the choice depends on the problem alone, never on a seed:

* sums, comparisons, sorting: a hash of the problem without its wording and without the order of its numbers,
  so ``12 + 30`` and ``30 + 12`` are the same problem and fall on the same side;
* facts: training includes every fact, but for each fact one wording is held out and only used when scoring;
  other facts train that wording.

Independent of tokenizers, models and torch.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

KINDS: tuple[str, ...] = ("sum", "comparison", "sorting", "fact")

HELD_OUT_ONE_IN = 10
LARGEST_NUMBER = 999
LARGEST_SORTED_NUMBER = 99

_SUM_WORDINGS = ("{a} + {b} = ?", "What is {a} + {b}?", "Add {a} and {b}.")
_LARGER_WORDINGS = ("Which is larger, {a} or {b}?", "Which number is bigger, {a} or {b}?")
_SMALLER_WORDINGS = ("Which is smaller, {a} or {b}?", "Which number is less, {a} or {b}?")
_SORT_UP_WORDINGS = ("Sort: {numbers}", "Sort from low to high: {numbers}")
_SORT_DOWN_WORDINGS = ("Sort from high to low: {numbers}",)


@dataclass(frozen=True)
class Problem:
    """A question as ``prompt``, and its only correct ``answer``."""

    kind: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Relation:
    """Facts of one relation: wordings with a ``{x}`` to fill, and the answer for every subject."""

    name: str
    wordings: tuple[str, ...]
    answers: dict[str, str]


RELATIONS = tuple(
    Relation(one["name"], tuple(one["wordings"]), one["answers"])
    for one in json.loads(files("rabbitllm.demo").joinpath("facts.json").read_text(encoding="utf-8"))
)
"""The small facts that the bundled model is trained on."""


def ask(question: str) -> str:
    """The prompt format that the model was trained on."""
    return f"Q: {question}\nA:"


def exact_match(answer_text: str, problem: Problem) -> bool:
    """Whether a generated answer is correct; only surrounding white space is ignored."""
    return answer_text.strip() == problem.answer


def held_out(n: int, seed: int = 0) -> list[Problem]:
    """``n`` different problems that training never includes, in equal parts of each kind, in alternation.

    Raises ValueError if ``n`` is not a multiple of the number of kinds or exceeds the number of facts.
    """
    if n <= 0 or n % len(KINDS):
        raise ValueError(f"n must be a positive multiple of {len(KINDS)}, not {n}")
    per_kind = n // len(KINDS)
    rng = random.Random(f"held-out {seed}")
    by_prompt = sorted(facts(kept_back=True), key=lambda problem: problem.prompt)
    if per_kind > len(by_prompt):
        raise ValueError(f"there are only {len(by_prompt)} held-out facts, {per_kind} were asked for")
    columns = [_distinct(kind, per_kind, rng) for kind in KINDS[:-1]]
    columns.append(rng.sample(by_prompt, per_kind))
    return [problem for row in zip(*columns, strict=True) for problem in row]


def facts(*, kept_back: bool) -> list[Problem]:
    """Every fact in its held-out wording, or in all its other wordings."""
    return [problem for problem, is_kept_back in _worded_facts() if is_kept_back == kept_back]


def is_held_out(kind: str, numbers: Sequence[int]) -> bool:
    """Whether a problem over ``numbers`` is held out, independent of their order and of the wording."""
    return _hash(f"{kind} {' '.join(map(str, sorted(numbers)))}") % HELD_OUT_ONE_IN == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _distinct(kind: str, count: int, rng: random.Random) -> list[Problem]:
    """Held-out problems of ``kind``, no two over the same numbers."""
    problems: dict[tuple[int, ...], Problem] = {}
    while len(problems) < count:
        numbers = draw_numbers(kind, rng, for_scoring=True)
        problems.setdefault(tuple(sorted(numbers)), problem_of(kind, numbers, rng))
    return list(problems.values())


def draw_numbers(kind: str, rng: random.Random, *, for_scoring: bool) -> tuple[int, ...]:
    """Random numbers for a problem of the requested side."""
    numbers = _any_numbers(kind, rng)
    while is_held_out(kind, numbers) != for_scoring:
        numbers = _any_numbers(kind, rng)
    return numbers


def _any_numbers(kind: str, rng: random.Random) -> tuple[int, ...]:
    if kind == "sorting":
        largest = rng.choice((9, LARGEST_SORTED_NUMBER, LARGEST_SORTED_NUMBER))
        return tuple(rng.randint(0, largest) for _ in range(rng.randint(3, 5)))
    a, b = _random_number(rng), _random_number(rng)
    if kind == "comparison":
        # Half the pairs are close together: those that differ in the first digit are too easy.
        if rng.random() < 0.5:
            b = min(LARGEST_NUMBER, max(0, a + rng.randint(-20, 20)))
        if a == b:
            b = a + 1 if a < LARGEST_NUMBER else a - 1
    return a, b


def _random_number(rng: random.Random) -> int:
    """A number whose length is drawn first, so that short ones are not rare."""
    return rng.randint(0, rng.choice((9, 99, LARGEST_NUMBER, LARGEST_NUMBER)))


def problem_of(kind: str, numbers: tuple[int, ...], rng: random.Random) -> Problem:
    """A problem over these numbers in one of the wordings of its kind."""
    if kind == "sum":
        a, b = numbers
        return Problem(kind, ask(rng.choice(_SUM_WORDINGS).format(a=a, b=b)), str(a + b))
    if kind == "comparison":
        a, b = numbers
        larger = rng.random() < 0.5
        wording = rng.choice(_LARGER_WORDINGS if larger else _SMALLER_WORDINGS)
        return Problem(kind, ask(wording.format(a=a, b=b)), str(max(a, b) if larger else min(a, b)))
    if kind == "sorting":
        down = rng.random() < 0.4
        wording = rng.choice(_SORT_DOWN_WORDINGS if down else _SORT_UP_WORDINGS)
        question = wording.format(numbers=" ".join(map(str, numbers)))
        return Problem(kind, ask(question), " ".join(map(str, sorted(numbers, reverse=down))))
    raise ValueError(f"no such kind of problem: {kind!r}")


def _worded_facts() -> list[tuple[Problem, bool]]:
    """Every fact in every wording, with whether that wording is held out for that fact."""
    worded: list[tuple[Problem, bool]] = []
    for relation in RELATIONS:
        for subject, answer in relation.answers.items():
            kept_back = _hash(f"{relation.name} {subject}") % len(relation.wordings)
            for index, wording in enumerate(relation.wordings):
                worded.append((Problem("fact", ask(wording.format(x=subject)), answer), index == kept_back))
    return worded
