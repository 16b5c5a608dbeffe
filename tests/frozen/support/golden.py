"""Golden data, the rule for changing it, and the surface of Python objects as plain data.

`python -m tests.frozen.make` writes golden files; tests only read them. A name that is gone or changed is excused by a
row of docs/guides/from-rabbitllm-1.1.md, in its section `## Changed since 2.0.0`, whose first cell has the name in
backticks.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "golden"
MOVING = Path(__file__).parent.parent.parent.parent / "docs" / "guides" / "from-rabbitllm-1.1.md"
SECTION = "## Changed since 2.0.0"
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN = (bool, int, float, str, bytes, tuple, list, dict, type(None))


def read(name: str) -> Any:
    """The content of a golden JSON file."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def write(name: str, content: Any) -> None:
    """Write a golden JSON file; only `tests.frozen.make` does."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def excused(text: str) -> frozenset[str]:
    """The names that from-rabbitllm-1.1.md, of which this is the text, declares as changed."""
    _, _, section = text.partition(SECTION + "\n")
    rows = (line.split("|")[1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("|"))
    return frozenset(name for row in rows for name in re.findall(r"`([^`]+)`", row))


def differences(golden: Any, found: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """(name, difference) of everything in `golden` that is not the same in `found`. Additions are no difference: of a
    key to a mapping, or to the end of a list.

    Mappings are compared key by key, each key one more word of the name; everything else as a whole. Of a structure
    that was null, or an empty list, nothing is known.
    """
    if golden in ("null", "empty list"):
        return
    if isinstance(golden, Mapping) and isinstance(found, Mapping):
        for key, value in golden.items():
            name = f"{at}.{key}" if at else key
            if key not in found:
                yield name, "is gone"
            else:
                yield from differences(value, found[key], name)
    elif golden != found and not (isinstance(golden, list) and isinstance(found, list) and _begins(golden, found)):
        yield at, f"was {json.dumps(golden)}, is {json.dumps(found)}"


def _begins(begin: list[Any], whole: list[Any]) -> bool:
    return whole[: len(begin)] == begin


def unexcused(golden: Any, found: Any) -> list[str]:
    """The differences that from-rabbitllm-1.1.md does not declare, of a name or of what it belongs to."""
    known = excused(MOVING.read_text(encoding="utf-8"))
    return [
        f"{name} {difference}"
        for name, difference in differences(golden, found)
        if not any(name == one or name.startswith(f"{one}.") for one in known)
    ]


def signature_of(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Parameter -> kind and default; the order of those that can be given by position; and those that must be given.

    `self` is left out. None: there is no signature.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [one for one in parameters if one.name != "self"]
    return {
        "required": ", ".join(one.name for one in own if one.default is one.empty and one.kind not in _ANY),
        "order": [one.name for one in own if one.kind in by_position],
        "parameters": {
            one.name: [one.kind.name, None if one.default is one.empty else _shown(one.default)] for one in own
        },
    }


def structure_of(value: Any) -> Any:
    """The keys and types of a JSON value, recursively; a list has the structure that its members share."""
    if isinstance(value, Mapping):
        return {str(key): structure_of(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return {"[]": merged([structure_of(one) for one in value])} if value else "empty list"
    names = {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def keys_of(structure: Any) -> Any:
    """A structure of which the types are not known."""
    return {key: keys_of(one) for key, one in structure.items()} if isinstance(structure, Mapping) else "null"


def merged(structures: list[Any]) -> Any:
    """One structure of several: of mappings the keys that all have, of others the one that is not null."""
    if all(isinstance(one, Mapping) for one in structures):
        shared = [key for key in structures[0] if all(key in one for one in structures)]
        return {key: merged([one[key] for one in structures]) for key in shared}
    known = [one for one in structures if one not in ("null", "empty list")]
    return known[0] if known else structures[0]


def surface_of(thing: Any) -> Any:
    """What can be seen of a function, a class or a value, as JSON."""
    if inspect.isclass(thing):
        return _class_surface(thing)
    if callable(thing):
        return {"function": signature_of(thing)}
    return {"value": type(thing).__name__}


def _class_surface(cls: type) -> dict[str, Any]:
    if issubclass(cls, enum.Enum):
        return {"members": {one.name: one.value for one in cls}}
    found: dict[str, Any] = {"call": signature_of(cls)}
    if dataclasses.is_dataclass(cls):
        found["fields"] = {one.name: "field" for one in dataclasses.fields(cls) if not one.name.startswith("_")}
    if issubclass(cls, BaseException):
        found["bases"] = {one.__name__: "base" for one in cls.__mro__[1:-1]}
    members = {name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("_")}
    own = {name: one for name, one in members.items() if _is_ours(cls, name)}
    found["members"] = {name: _member(cls, name, one) for name, one in own.items()}
    return found


def _is_ours(cls: type, name: str) -> bool:
    """Whether a class of the package has this member, and not a class of a library that it builds on."""
    owner = next(one for one in cls.__mro__ if name in vars(one))
    return owner.__module__.partition(".")[0] == "rabbitllm"


def _member(cls: type, name: str, member: Any) -> Any:
    if isinstance(member, property):
        return "property"
    if callable(getattr(cls, name)):
        return {"kind": "method", **(signature_of(getattr(cls, name)) or {})}
    return "attribute"


def _shown(default: Any) -> str:
    return repr(default) if isinstance(default, _PLAIN) else f"a {type(default).__name__}"
