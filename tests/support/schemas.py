"""JSON schemas of many kinds: made from a seed, whose values are of bounded length, and those of published clients."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pydantic

NAMES = ("name", "age", "city", "tags", "is_open", "price", "Größe", "a b", 'q"uote', "x-1")
PATTERNS = (
    "^[A-Z]{2,5}-[0-9]{3}$",
    "^(red|green|blue)$",
    "^[a-f0-9]{8}$",
    "^\\+[0-9]{6,9}$",
    "^[a-z]{1,9}@[a-z]{2,6}$",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def schema_of(seed: int) -> dict[str, Any]:
    """A schema."""
    drawn = random.Random(seed)
    named = {f"part{index}": _value(drawn, 1, ()) for index in range(drawn.randint(0, 2))}
    refs = tuple(f"#/$defs/{name}" for name in named)
    whole = _object(drawn, 3, refs)
    return {**whole, "$defs": named} if named else whole


def public_schemas(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Schemas of the types of OpenAI's and Anthropic's clients, whole ones and definitions in them."""
    import anthropic.types
    import openai.types.chat
    import openai.types.responses

    places = vars(anthropic.types), vars(openai.types.chat), vars(openai.types.responses)
    classes = [cls for place in places for cls in place.values() if isinstance(cls, type)]
    models = sorted({cls for cls in classes if issubclass(cls, pydantic.BaseModel)}, key=repr)
    drawn = random.Random(seed)
    for model in drawn.choices(models, k=count):
        whole = model.model_json_schema()
        named = whole.get("$defs", {})
        yield {**named[drawn.choice(sorted(named))], "$defs": named} if named and drawn.random() < 0.7 else whole


def check(schema: Mapping[str, Any], value: Any) -> None:
    """Compare with the reference of the standard, formats included.

    Raises:
        ValidationError: the value does not fit.
    """
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)


def _object(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    names = drawn.sample(NAMES, drawn.randint(1, 4))
    properties = {name: _value(drawn, depth - 1, refs) for name in names}
    required = drawn.sample(names, drawn.randint(0, len(names)))
    described = {"title": "A thing", "description": "It has a form."} if drawn.random() < 0.3 else {}
    return {**described, "type": "object", "properties": properties, "required": required, **_NO_MORE}


_NO_MORE = {"additionalProperties": False}


def _value(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    kinds = [_text, _choice, _whole, _real, _pattern, _format, _plain]
    if depth > 0:
        kinds += [_array, _array, _any, _tuple]
        if drawn.random() < 0.5:
            return _object(drawn, depth, refs)
    if refs and drawn.random() < 0.3:
        return {"$ref": drawn.choice(refs)}
    return drawn.choice(kinds)(drawn, depth, refs)


def _text(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    least = drawn.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + drawn.randint(0, 8)}


def _choice(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    values = ["red", "green", "dark blue", 'a "b"\\', "ü", 1, 2.5, None, True, {"a": [1, "x"]}]
    if drawn.random() < 0.3:
        return {"const": drawn.choice(values)}
    return {"enum": drawn.sample(values, drawn.randint(1, 4))}


def _whole(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    low = drawn.randint(-1000, 1000)
    low_word, high_word = drawn.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
    several = {"multipleOf": drawn.choice((2, 5))} if drawn.random() < 0.2 else {}
    return {"type": "integer", low_word: low, high_word: low + drawn.randint(12, 5000), **several}


def _real(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    low = round(drawn.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "maximum": round(low + drawn.uniform(0.5, 900), 2)}


def _pattern(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "string", "pattern": drawn.choice(PATTERNS)}


def _format(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "string", "format": drawn.choice(FORMATS)}


def _plain(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    return drawn.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}))


def _array(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    least = drawn.randint(0, 2)
    items = _value(drawn, depth - 1, refs)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + drawn.randint(0, 2)}


def _tuple(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    entries = [_value(drawn, depth - 1, refs) for _ in range(2)]
    return {"type": "array", "prefixItems": entries, "items": False, "minItems": 2}


def _any(drawn: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    if drawn.random() < 0.2:
        return {"allOf": [_value(drawn, depth - 1, refs)]}
    return {"anyOf": [_value(drawn, depth - 1, refs) for _ in range(drawn.randint(2, 3))]}
