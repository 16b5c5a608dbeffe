"""How many tokens are drafted for each pass, on made-up durations: never much slower than without a draft, and near the
best width where a draft pays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from rabbitllm.generation._width import Costs, Width

Cost = Callable[[int], float]


@dataclass
class Machine:
    """Durations of passes and drafts, in passes of one row.

    Attributes:
        rows: rows -> a pass.
        step, behind: a drafted token, and one with which the draft catches up.
        noise: passes differ by up to this share; one of fifty takes twenty times as long.
    """

    rows: Cost
    step: float = 0.0
    behind: float = 0.0
    noise: float = 0.0


@dataclass
class Outcome:
    """Tokens and time of `decode`, and the widths of its passes."""

    tokens: int
    seconds: float
    draft_seconds: float
    widths: list[int]

    @property
    def rate(self) -> float:
        """Tokens in the time of a pass of one row."""
        return self.tokens / self.seconds


def learn(width: Width, drafted: int, right: int, seconds: float | None, step: float, lacks: int = 1) -> None:
    """Take in a pass of one sequence, and its draft."""
    width.costs.learn_pass(drafted + 1, seconds, drafted > 0)
    width.learn(drafted, drafted, right, rows=drafted + 1, draft_seconds=step, lacks=lacks)


def decode(
    width: Width,
    machine: Machine,
    tokens: int,
    chance: float | Callable[[int], float],
    prompt: int = 40,
    seed: int = 0,
    sure: float | None = None,
) -> Outcome:
    """Decode an answer after a prompt, whose pass takes no time here. A drafted token is right by `chance`, which may
    depend on the number of tokens so far; a source that is `sure` of its tokens decides where it stops."""
    dice = random.Random(seed)
    outcome = Outcome(0, 0.0, 0.0, [])
    seen, known = 0, prompt
    while outcome.tokens < tokens:
        lacks, is_prompt = known - seen, known == prompt
        drafted = width.choose(tokens - outcome.tokens - 1, lacks)
        if sure is not None:
            drafted = next((count for count in range(1, drafted + 1) if not width.goes_on(sure)), drafted)
        draft_seconds = machine.step * drafted + machine.behind * lacks * (drafted > 0)
        likely = chance(outcome.tokens) if callable(chance) else chance
        right = next((index for index in range(drafted) if dice.random() >= likely), drafted)
        clean = machine.rows(drafted + 1)
        shaken = clean * (1 + machine.noise * dice.random()) * (20 if machine.noise and dice.random() < 0.02 else 1)
        learn(width, drafted, right, None if is_prompt else shaken, draft_seconds, lacks)
        outcome.tokens += right + 1
        outcome.seconds += clean + draft_seconds
        outcome.draft_seconds += draft_seconds
        outcome.widths.append(drafted)
        known += right + 1
        seen = known - 1 if drafted else seen
    return outcome


STREAMED = Machine(lambda rows: 1 + 0.01 * rows)
RESIDENT = Machine(lambda rows: 1 + 0.6 * (rows - 1))
STEEP = Machine(lambda rows: rows)
FLAT_LATER = Machine(lambda rows: 1.0 if rows == 1 else 1.6 + 0.1 * rows)
KERNELS = Machine(lambda rows: 1.0 if rows == 1 else 2 + 0.17 * rows)
"""A small model in memory, whose passes of one row have kernels of their own."""
MACHINES = {"streamed": STREAMED, "resident": RESIDENT, "steep": STEEP, "flat later": FLAT_LATER, "kernels": KERNELS}


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("name", MACHINES)
def test_drafts_that_are_always_wrong_cost_less_than_three_percent(name: str, noise: float) -> None:
    for step, behind in ((0.0, 0.0), (0.02, 0.001), (0.3, 0.02)):
        machine = Machine(MACHINES[name].rows, step, behind, noise)
        # a model that seems to be streamed may be in the page cache, so that rows cost more than is assumed
        for row_cost, tokens in ((0.5, 96), (0.06, 256)):
            width = Width(Costs(row_cost, step))
            first = decode(width, machine, tokens, 0.0)
            # the prompt has to be read by the draft to know what it proposes
            assert tokens / (first.seconds - 40 * behind) > 0.97
            # and in later answers not even that
            assert min(decode(width, machine, 128, 0.0, seed=seed).rate for seed in range(1, 5)) > 0.97
            # nor if the draft is as sure of them as can be
            assert min(decode(width, machine, 128, 0.0, seed=seed, sure=1.0).rate for seed in range(5, 9)) > 0.97


@pytest.mark.parametrize("name", ["streamed", "resident", "flat later"])
@pytest.mark.parametrize("chance", [0.5, 0.8, 0.97])
def test_it_comes_near_the_best_width(name: str, chance: float) -> None:
    machine = Machine(MACHINES[name].rows, 0.02, 0.001, 0.1)
    best = max(
        sum(chance**depth for depth in range(count + 1)) / (machine.rows(count + 1) + machine.step * count)
        for count in range(33)
    )
    outcome = decode(Width(Costs(0.06 if name == "streamed" else 0.5, 0.02)), machine, 2000, chance)
    assert outcome.rate > max(0.97, 0.8 * best)


def test_wide_drafts_of_a_streamed_model_begin_at_once() -> None:
    assert decode(Width(Costs(0.06)), STREAMED, 60, 0.98).widths[:4] == [3, 8, 0, 18]


def test_a_draft_that_may_not_pay_waits_for_passes_without_one() -> None:
    """The first passes take long, by chance; measured by them alone, wrong drafts would seem cheap."""
    slow = iter([1.0, 3.0, 2.0])
    width = Width(Costs(0.5))
    outcome = decode(width, Machine(lambda rows: next(slow, KERNELS.rows(rows))), 4, 0.0)
    assert outcome.widths == [0, 0, 0, 0]
    assert decode(width, KERNELS, 96, 0.0).rate > 0.97


def test_what_one_answer_measured_another_knows() -> None:
    costs = Costs(0.5)
    decode(Width(costs), STREAMED, 200, 0.98)
    assert decode(Width(costs), STREAMED, 60, 0.98).widths[0] > 4
    assert decode(Width(Costs(0.5)), STREAMED, 60, 0.98).widths[0] == 0


def test_no_wrong_draft_is_wanted_for_ever_where_rows_are_nearly_free() -> None:
    outcome = decode(Width(Costs(0.06)), STREAMED, 400, 0.0)
    assert sum(outcome.widths[100:]) / 300 < 0.8


def test_the_width_follows_the_text() -> None:
    """Prose, where drafts are wrong, then code, then prose again."""
    outcome = decode(Width(Costs(0.06, 0.02)), STREAMED, 900, lambda tokens: 0.95 if 300 <= tokens < 600 else 0.0)
    assert max(outcome.widths[20:250]) <= 2
    code = next(index for index, width in enumerate(outcome.widths) if width > 8)
    assert 290 < code < 320
    assert outcome.rate > 1.3
    assert max(outcome.widths[code + 120 :]) <= 2


def test_a_source_that_is_not_asked_reads_nothing() -> None:
    """A draft model that is too slow: it is tried, and then its text is not even read."""
    width, machine = Width(Costs(0.5, 0.3)), Machine(RESIDENT.rows, 0.9, 0.3)
    first = decode(width, machine, 200, 0.9)
    assert sum(width > 0 for width in first.widths) <= 4
    later = decode(width, machine, 200, 0.9)
    assert sum(later.widths) == 0
    assert later.draft_seconds == 0


def test_a_long_prompt_is_read_where_the_answer_pays_for_it() -> None:
    width, machine = Width(Costs(0.06, 0.02)), Machine(STREAMED.rows, 0.02, 0.02)
    decode(width, machine, 200, 0.9)
    assert max(decode(width, machine, 200, 0.9, prompt=1000).widths) > 4  # 20 passes to save 150
    assert sum(decode(width, machine, 20, 0.9, prompt=1000).widths) == 0
    assert sum(decode(width, machine, 200, 0.9, prompt=10_000).widths) == 0
    assert width.choose(100_000, 10_000) == 0  # answers end before their limit


def test_what_drafts_are_compared_with_is_measured_again() -> None:
    """The layer files have come into the page cache: a pass of one row takes a tenth, and drafts pay no more."""
    width = Width(Costs(0.06, 0.02))
    decode(width, Machine(STREAMED.rows, 0.02, 0.001), 300, 0.7)
    cached = Machine(lambda rows: 0.1 if rows == 1 else 1.0, 0.02, 0.001)
    assert sum(width > 0 for width in decode(width, cached, 1000, 0.7).widths[-200:]) <= 4


def test_first_passes_that_compile_kernels_are_not_believed() -> None:
    """The first pass of any number of rows, and the first draft, take a thousand times as long."""
    compiled = set[int]()

    def rows(count: int) -> float:
        is_first, _ = count not in compiled, compiled.add(count)
        return STREAMED.rows(count) * (1000 if is_first else 1)

    width = Width(Costs(0.06, 0.02))
    assert width.choose(100, 40) == 3
    learn(width, 3, 3, None, 1000.0, 40)
    decode(width, Machine(rows, 0.02, 0.001), 600, 0.95)
    assert decode(width, Machine(STREAMED.rows, 0.02, 0.001), 600, 0.95).rate > 3


def test_an_outlier_is_forgotten() -> None:
    """The only wide pass was slow, by chance; narrower ones would do without ever trying again."""
    machine = Machine(lambda rows: 1 + 0.001 * rows, 0.02)
    width = Width(Costs(0.06, 0.02))
    for rows, seconds in ((1, 1.0), (5, 1.0), (12, 8.0)):
        learn(width, rows - 1, rows - 1, seconds, 0.02 * (rows - 1), 0)
    assert 0 < width.choose(100) < 9
    assert max(decode(width, machine, 1000, 0.95).widths[:30]) < 9
    assert max(decode(width, machine, 1000, 0.95).widths) > 12


def test_a_source_that_stops_itself_may_go_further_than_most_drafts_did() -> None:
    machine = Machine(STREAMED.rows, 0.05)
    known, sure = Width(Costs(0.06, 0.05)), Width(Costs(0.06, 0.05))
    decode(known, machine, 400, 0.5)
    decode(sure, machine, 400, 0.5, sure=0.5)
    assert sure.choose(100) > known.choose(100) > 0
    # what it has lost so far limits it as before
    sure.credit = 0.1
    assert sure.choose(100) == 1


def test_a_source_goes_on_while_it_is_sure() -> None:
    def proposed(width: Width, sureness: float) -> int:
        most = width.choose(100)
        return next((count for count in range(1, most + 1) if not width.goes_on(sureness)), most)

    cheap, dear = Width(Costs(0.06, 0.02)), Width(Costs(0.5, 0.02))
    for width, machine in ((cheap, STREAMED), (dear, FLAT_LATER)):
        decode(width, machine, 400, 0.95)
    proposed(cheap, 0.5)  # from now on it is known to stop by itself
    found = [proposed(cheap, sureness) for sureness in (0.99, 0.7, 0.1)]
    assert found == sorted(found, reverse=True)
    assert proposed(cheap, 0.99) > 2 * proposed(cheap, 0.5)
    assert proposed(dear, 0.5) <= proposed(cheap, 0.5)

    # what a source that overrates itself is sure of counts less
    def steps(sureness: float) -> int:
        cheap.choose(100)
        return next(count for count in range(100) if not cheap.goes_on(sureness))

    before = steps(0.97)
    for _ in range(30):
        cheap.choose(1)
        cheap.goes_on(0.97)
        learn(cheap, 1, 0, 1.01, 0.02)
    cheap.credit = 10.0
    assert steps(0.97) < before / 2


def decode_together(
    machine: Machine, row_cost: float, sequences: int, passes: int, chance: Callable[[int], float]
) -> float:
    """Tokens in the time in which a pass without drafts gives one for each sequence, per sequence."""
    dice = random.Random(0)
    costs = Costs(row_cost, machine.step)
    widths = [Width(costs) for _ in range(sequences)]
    tokens, seconds = 0, 0.0
    for _ in range(passes):
        counts = [width.choose(64, 1, sequences, sequences) for width in widths]
        rights = [
            next((place for place in range(count) if dice.random() >= chance(index)), count)
            for index, count in enumerate(counts)
        ]
        rows = sequences + sum(counts)
        took = machine.rows(rows)
        costs.learn_pass(rows, took, any(counts))
        for width, count, right in zip(widths, counts, rights, strict=True):
            width.learn(count, count, right, rows=rows, draft_seconds=machine.step * count, lacks=1)
        tokens += sequences + sum(rights)
        seconds += took + machine.step * sum(counts)
    return tokens / sequences / (seconds / machine.rows(sequences))


@pytest.mark.parametrize("sequences", [2, 8, 24])
@pytest.mark.parametrize("name", MACHINES)
def test_sequences_that_share_a_pass(name: str, sequences: int) -> None:
    """Each bears what its own draft costs: wrong ones cost little, and right ones are used where rows are cheap."""
    machine, row_cost = Machine(MACHINES[name].rows, 0.001), 0.06 if name == "streamed" else 0.5
    assert decode_together(machine, row_cost, sequences, 128, lambda index: 0.0) > 0.97
    rate = decode_together(machine, row_cost, sequences, 300, lambda index: 0.95)
    best = max(
        sum(0.95**depth for depth in range(count + 1))
        * machine.rows(sequences)
        / (machine.rows(sequences * (count + 1)) + 0.001 * sequences * count)
        for count in range(33)
    )
    assert rate > max(0.95, 0.7 * best)
    mixed = decode_together(machine, row_cost, sequences, 300, lambda index: 0.95 * (index % 2))
    assert mixed > max(0.95, 0.6 * (1 + best) / 2)
