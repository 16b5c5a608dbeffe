"""JSON schemas as llguidance takes them: what it would read inexactly is said in another way, or refused.

A rewritten schema allows nothing more. It is narrower for dates and times, which llguidance checks by their digits,
and for bounds of numbers that it keeps as float64 or int64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import OptionError

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""
_SCHEMAS = {
    *("additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not"),
    *("oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
}
"""Keywords whose values are schemas. Values of unknown ones are, if a `$ref` leads into them."""
_MOST, _EDGE = (1 << 63) - 1024, 10**18
"""The largest bound, and the least one that needs a bound on the other side: llguidance overflows beyond."""
_MOST_STEPS = 100_000
"""Limit of what numbers must be multiples of: llguidance takes a second for as many, and minutes for some more."""
_ABOUT = frozenset({"type", "title", "description", "$comment"})
_BESIDE = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"})
"""Keywords that may know properties which their schema does not list."""
_YEAR = r"([1-9]\d{3}|0([1-9]\d\d|0([1-9]\d|0[1-9])))"
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = rf"^({_YEAR}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{_LEAP}-02-29)"
_FORMATS = {"date": _DAY, "time": r"^\d\d:\d\d:[0-5]", "date-time": rf"{_DAY}.*[Tt]\d\d:\d\d:[0-5]"}
"""Days that exist and years of at least 1, as calendars of most languages have them; no leap seconds, which the time
of the day and the zone may exclude."""


def exact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of which llguidance allows only what fits this one.

    Raises:
        OptionError: it has numbers that cannot be guaranteed, or take too long.
        RecursionError: it is nested too deeply.
    """
    numbers = list[int]()
    whole: dict[str, Any] = _exact(schema, numbers, _SCHEMAS | {*_referred(schema)} - {"const", "enum"})
    steps = math.lcm(*numbers) if _are_joined(schema) else sum({*numbers})
    if steps > _MOST_STEPS:
        raise OptionError(
            f'The JSON schema\'s "multipleOf" have {steps:,} remainders; expected at most {_MOST_STEPS:,}.',
            "Use smaller ones, or leave them out.",
        )
    return whole


def _are_joined(schema: Any) -> bool:
    """Whether several parts of a schema may have to hold for one number."""
    if isinstance(schema, Mapping):
        words = schema.keys() & {"multipleOf", *_BESIDE}
        return "allOf" in words or len(words) > 1 or any(map(_are_joined, schema.values()))
    return isinstance(schema, list) and any(map(_are_joined, schema))


def _referred(schema: Any) -> Iterator[str]:
    """The words of all `$ref`."""
    if isinstance(schema, Mapping):
        if isinstance(place := schema.get("$ref"), str):
            words = unquote(place).split("/")
            yield from (word.replace("~1", "/").replace("~0", "~") for word in words)
        schema = list(schema.values())
    for each in schema if isinstance(schema, list) else ():
        yield from _referred(each)


def _exact(schema: Any, numbers: list[int], words: Collection[str]) -> Any:
    """The same; adds the digits of all `multipleOf`: a number is compared by its remainder after each digit.

    Args:
        schema: the schema, or several.
        numbers: they are added to it.
        words: keywords whose values are schemas.
    """
    if isinstance(schema, list):
        return [_exact(each, numbers, words) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    node = dict(schema)
    for word, value in schema.items():
        if word in _NAMED and isinstance(value, Mapping):
            node[word] = {name: _exact(each, numbers, words) for name, each in value.items()}
        elif word in words:
            node[word] = _exact(value, numbers, words)
    step = schema.get("multipleOf")
    if isinstance(step, int | float) and step is not True and 0 < step < math.inf:
        numbers.append(int("".join(map(str, Decimal(str(step)).normalize().as_tuple().digits))))
    for word in "const", "enum":
        _check_numbers(schema.get(word))
    _limit(node, "minimum", "maximum", 1)
    _limit(node, "maximum", "minimum", -1)
    _name(node)
    pattern = _FORMATS.get(form) if isinstance(form := schema.get("format"), str) else None
    if pattern is not None and isinstance(more := node.get("allOf", []), list):
        node["allOf"] = [*more, {"pattern": pattern}]
    return node


def _check_numbers(value: Any) -> None:
    """Check that llguidance writes the numbers of a value as they are: it keeps them as float64."""
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_numbers(each)
    elif isinstance(value, int | float) and (abs(value) >= 1 << 63 or value != _read(value)):
        raise _too_long(value)


def _read(number: float) -> float:
    """A number as llguidance reads it: its digits as float64, by a power of ten as float64."""
    if isinstance(number, int) or not math.isfinite(number):
        return float(number)
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    value, power = float("".join(map(str, digits))), int(exponent)
    if power < -308:
        value, power = value / 1e308, power + 308
    value = value * float(f"1e{power}") if power > 0 else value / float(f"1e{-power}")
    return math.copysign(value, number)


def _limit(node: dict[str, Any], word: str, other: str, sign: int) -> None:
    """Move a bound that llguidance does not keep exactly inwards; `sign` is 1 for a lower bound, -1 for an upper."""
    for key in word, f"exclusive{word.capitalize()}":
        bound = node.get(key)
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            continue
        if bound * sign >= _MOST:
            raise _too_long(bound)
        if abs(bound) >= _EDGE:
            node.setdefault(other, sign * _MOST)
        if abs(bound) >= 1 << 53:  # llguidance compares digits of the shortest text, and adds 1 to excluded ones
            least = int(max(bound * sign, -(1 << 63))) + (key != word)
            near = float(max(least, -_MOST))
            while near < least or int(Decimal(str(near))) < least:
                near = math.nextafter(near, math.inf)
            node[key] = int(near) * sign
        else:
            while _read(node[key]) * sign < bound * sign:
                node[key] = math.nextafter(node[key], sign * math.inf)


def _name(node: dict[str, Any]) -> None:
    """Say what properties may be called, or that there are no others, in the words that llguidance knows."""
    names = node.get("propertyNames")
    words = names.keys() - _ABOUT if isinstance(names, Mapping) and names.get("type", "string") == "string" else None
    if words == set() or names is True:
        del node["propertyNames"]
    elif words in ({"enum"}, {"pattern"}) and not node.keys() & {"properties", "patternProperties", *_BESIDE}:
        assert names is not None
        keyword, listed = ("properties", names.get("enum")) if "enum" in names else ("patternProperties", None)
        listed = listed if isinstance(listed, list) else [names.get("pattern")]
        if all(isinstance(name, str) for name in listed):
            del node["propertyNames"]
            node[keyword] = dict.fromkeys(listed, node.get("additionalProperties", {}))
            node["additionalProperties"] = False
    if node.get("unevaluatedProperties") is False and not node.keys() & {"additionalProperties", *_BESIDE}:
        node["additionalProperties"] = node.pop("unevaluatedProperties")


def _too_long(number: float) -> OptionError:
    return OptionError(
        f"The JSON schema has the number {harmless(str(number), 40)}, which has too many digits to be guaranteed.",
        "Use numbers of at most 15 digits, or texts.",
    )
