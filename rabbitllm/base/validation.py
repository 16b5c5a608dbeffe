"""What pydantic found wrong with a value, in the words of this package. Independent of pydantic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rabbitllm.base.terminal import harmless

_EXPECTED = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
    "string_too_short": "a length of at least {min_length}",
    "list_type": "a list",
    "too_short": "a length of at least {min_length}, not {actual_length}",
    "too_long": "a length of at most {max_length}, not {actual_length}",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "literal_error": "{expected}",
}
"""Type of an error of pydantic -> what was expected."""


def whole(value: Any) -> Any:
    """Return 2.0 as 2: some clients know one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def problem_of(errors: Iterable[Mapping[str, Any]]) -> str:
    """Return the problem with one value: `expected at least 1`, `expected text or a list`, `is missing`.

    Args:
        errors: `ValidationError.errors()` about that value, with contexts; several if it fits no part of a union. The
            value is named if they have it.
    """
    expected: dict[str, None] = {}
    others: dict[str, None] = {}
    actual = ""
    for error in errors:
        context = {name: whole(value) for name, value in error.get("ctx", {}).items()}
        if error["type"] in _EXPECTED:
            expected[_EXPECTED[error["type"]].format(**context)] = None
        elif error["type"] == "missing":
            others["is missing"] = None
        elif error["type"] == "value_error":
            others[str(context["error"])] = None
        else:
            others[error["msg"][:1].lower() + error["msg"][1:]] = None
        value = error.get("input")
        is_short = isinstance(value, str | float) or (isinstance(value, int) and value.bit_length() < 256)
        actual = f", not {harmless(str(value), 40)}" if is_short else ""
    return "; or ".join([*(["expected " + " or ".join(expected) + actual] if expected else ()), *others])
