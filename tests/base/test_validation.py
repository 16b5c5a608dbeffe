"""What pydantic finds wrong, in this package's words; each problem is one of a real schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rabbitllm.base.validation import problem_of


def even(value: int) -> int:
    if value % 2:
        raise ValueError("expected an even number")
    return value


class Body(BaseModel):
    model_config = ConfigDict(strict=True)

    above: float = Field(1.0, gt=0, le=1)
    least: int = Field(1, ge=1, lt=10)
    finite: float = Field(1.0, allow_inf_nan=False)
    stop: str | list[str] | None = None
    role: Literal["user", "tool"] = "user"
    messages: list[int] = Field([1], min_length=1, max_length=2)
    pairs: Annotated[int, AfterValidator(even)] = 2
    flag: bool = True
    name: str = Field("x", min_length=1)
    part: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("above", 0.0, "expected more than 0"),
        ("above", 2.0, "expected at most 1"),
        ("above", "1", "expected a number"),
        ("least", 0, "expected at least 1"),
        ("least", 10, "expected less than 10"),
        ("least", 1.5, "expected a whole number"),
        ("finite", float("nan"), "expected a finite number"),
        ("stop", 5, "expected text or a list"),
        ("role", "x", "expected 'user' or 'tool'"),
        ("messages", [], "expected a length of at least 1, not 0"),
        ("messages", [1, 2, 3], "expected a length of at most 2, not 3"),
        ("pairs", 3, "expected an even number"),
        ("flag", "yes", "expected true or false"),
        ("name", "", "expected a length of at least 1"),
        ("part", [], "expected an object"),
    ],
)
def test_problems(field: str, value: Any, problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Body.model_validate({field: value})
    assert problem_of(refused.value.errors(include_input=False)) == problem
    if isinstance(value, int | float | str) and field != "pairs":
        assert problem_of(refused.value.errors()) == f"{problem}, not {value}"


def test_a_missing_field() -> None:
    class Needs(BaseModel):
        name: str

    with pytest.raises(ValidationError) as refused:
        Needs.model_validate({})
    assert problem_of(refused.value.errors()) == "is missing"


def test_a_value_that_is_named_is_harmless_and_short() -> None:
    with pytest.raises(ValidationError) as refused:
        Body.model_validate({"least": "\x1b[31m" + "9" * 100})
    assert problem_of(refused.value.errors()) == f"expected a whole number, not \\x1b[31m{'9' * 35}…"
