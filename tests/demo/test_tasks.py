"""The problems are right, repeatable, and never shared between training and scoring."""

from __future__ import annotations

import ast
import calendar
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from rabbitllm.demo import tasks
from rabbitllm.demo.tasks import KINDS, RELATIONS, Problem, exact_match, facts, held_out
from tools.demo_training import text_of, training_stream

SAMPLE = 20_000

PINNED_HELD_OUT = [
    "Q: 97 + 676 = ?\nA: 773",
    "Q: Which is smaller, 38 or 93?\nA: 38",
    "Q: Sort from high to low: 30 80 13\nA: 80 30 13",
    "Q: Name the element with the symbol Na.\nA: sodium",
]
PINNED_TRAINING = [
    "Q: 8 + 37 = ?\nA: 45",
    "Q: Which number is less, 709 or 711?\nA: 709",
    "Q: What is 717 + 776?\nA: 1493",
]


@pytest.fixture(scope="module")
def stream() -> list[Problem]:
    return list(islice(training_stream(0), SAMPLE))


def numbers_in(problem: Problem) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", problem.prompt)]


def solve(problem: Problem) -> str:
    """The answer worked out from the words of the prompt alone."""
    numbers = numbers_in(problem)
    if problem.kind == "sum":
        return str(sum(numbers))
    if problem.kind == "comparison":
        wants_larger = "larger" in problem.prompt or "bigger" in problem.prompt
        assert wants_larger != ("smaller" in problem.prompt or "less" in problem.prompt)
        return str(max(numbers) if wants_larger else min(numbers))
    assert problem.kind == "sorting"
    return " ".join(map(str, sorted(numbers, reverse="high to low" in problem.prompt)))


def key(problem: Problem) -> tuple[str, ...]:
    """What makes two problems the same one: the numbers in any order, or the very words of a fact."""
    if problem.kind == "fact":
        return (problem.kind, problem.prompt)
    return (problem.kind, *map(str, sorted(numbers_in(problem))))


def test_every_generated_answer_is_right(stream: list[Problem]) -> None:
    for problem in [*stream, *held_out(800, 3)]:
        if problem.kind != "fact":
            assert problem.answer == solve(problem), problem


def test_prompts_have_one_form(stream: list[Problem]) -> None:
    for problem in stream:
        assert re.fullmatch(r"Q: [^\n]+\nA:", problem.prompt)
        assert problem.answer == problem.answer.strip() != ""
        assert text_of(problem) == f"{problem.prompt} {problem.answer}"


def test_same_seed_same_problems(stream: list[Problem]) -> None:
    assert list(islice(training_stream(0), 500)) == stream[:500]
    assert list(islice(training_stream(1), 500)) != stream[:500]
    assert held_out(200, 7) == held_out(200, 7)
    assert held_out(200, 7) != held_out(200, 8)


def test_held_out_sets_are_stable() -> None:
    """The recorded score and the trained weights are only worth something for these very problems."""
    assert [*map(text_of, held_out(4, 0))] == PINNED_HELD_OUT
    assert [*map(text_of, islice(training_stream(0), 3))] == PINNED_TRAINING


def test_held_out_problems_are_not_in_training(stream: list[Problem]) -> None:
    scored = {key(problem) for seed in range(5) for problem in held_out(800, seed)}
    assert scored.isdisjoint(key(problem) for problem in stream)


def test_the_side_of_a_problem_ignores_order_and_wording() -> None:
    for a in range(40):
        for b in range(40):
            assert tasks.is_held_out("sum", (a, b)) == tasks.is_held_out("sum", (b, a))
    assert tasks.is_held_out("sorting", (9, 4, 7)) == tasks.is_held_out("sorting", (4, 7, 9))


def test_about_one_problem_in_ten_is_held_out() -> None:
    pairs = [(a, b) for a in range(150) for b in range(a, 150)]
    share = sum(tasks.is_held_out("sum", pair) for pair in pairs) / len(pairs)
    assert 0.09 < share < 0.11


def test_held_out_has_equal_parts_and_no_repeats() -> None:
    problems = held_out(400, 0)
    assert len({key(problem) for problem in problems}) == 400
    for kind in KINDS:
        assert sum(problem.kind == kind for problem in problems) == 100


@pytest.mark.parametrize("count", [0, -4, 6, 4 * 1000])
def test_held_out_refuses_a_count_it_cannot_keep(count: int) -> None:
    with pytest.raises(ValueError, match=r"multiple of 4|only \d+ held-out facts"):
        held_out(count, 0)


def test_training_shows_every_kind_and_every_fact(stream: list[Problem]) -> None:
    assert {problem.kind for problem in stream} == set(KINDS)
    shown = {problem for problem in stream if problem.kind == "fact"}
    taught = set(facts(kept_back=False))
    # About 4,000 draws from 1,335 leave some 67 undrawn; far more missing would mean a skewed draw.
    assert shown <= taught
    assert len(taught - shown) < 120


def test_each_fact_holds_out_one_wording() -> None:
    kept_back = {problem.prompt for problem in facts(kept_back=True)}
    trained = {problem.prompt for problem in facts(kept_back=False)}
    assert kept_back.isdisjoint(trained)
    for relation in RELATIONS:
        for subject in relation.answers:
            prompts = {tasks.ask(wording.format(x=subject)) for wording in relation.wordings}
            assert len(prompts & kept_back) == 1
            assert len(prompts & trained) == len(relation.wordings) - 1
        for wording in relation.wordings:
            assert any(tasks.ask(wording.format(x=subject)) in trained for subject in relation.answers)


def test_no_question_has_two_answers() -> None:
    answers: dict[str, set[str]] = {}
    for problem in [*facts(kept_back=True), *facts(kept_back=False)]:
        answers.setdefault(problem.prompt, set()).add(problem.answer)
    assert all(len(texts) == 1 for texts in answers.values())


def test_exact_match_forgives_white_space_only() -> None:
    problem = Problem("sum", tasks.ask("2 + 2 = ?"), "4")
    assert exact_match(" 4\n", problem)
    assert not exact_match("4.", problem)
    assert not exact_match("44", problem)
    assert not exact_match("", problem)


def test_tasks_import_no_heavy_packages() -> None:
    code = "import sys, rabbitllm.demo.tasks; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    imported = {
        name
        for node in ast.walk(ast.parse(Path(str(tasks.__file__)).read_text(encoding="utf-8")))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert {name.split(".")[0] for name in imported} <= set(sys.stdlib_module_names)


def test_tables_agree_with_the_calendar_and_themselves() -> None:
    tables = {relation.name: relation.answers for relation in RELATIONS}
    months = list(calendar.month_name)[1:]
    for index, month in enumerate(months):
        if month != "February":
            assert tables["days"][month] == str(calendar.monthrange(2023, index + 1)[1])
        assert tables["next month"][month] == months[(index + 1) % 12]
    days = list(calendar.day_name)
    for index, day in enumerate(days):
        assert tables["next day"][day] == days[(index + 1) % 7]
    for forward, backward in (
        ("capital", "country"),
        ("symbol", "element"),
        ("next day", "previous day"),
        ("next month", "previous month"),
    ):
        assert {value: name for name, value in tables[forward].items()} == tables[backward]
        assert len(tables[forward]) == len(tables[backward])
