"""The environment of chat templates: transformers' own, with a limit on the output of each operation.

A template is untrusted, and one operation of it (`'x' * 10**10`, `|center(10**10)`) can take all memory before a
monitor could react. So the output of each operation that can exceed its inputs is estimated beforehand, and each step
of a loop and each call checks the time. A template within the limits gives the same text. Not limited: a comparison of
two deeply nested lists.
"""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from types import GeneratorType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ELEMENT = 16
"""The cost of a list element, and of a step of a loop, in letters."""
MAX_OPERATIONS = 16
"""Limit of all operations of a template, in multiples of the limit of one; joining texts one by one is usual."""
INTEGER_BITS = 1 << 20

_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_WIDTHS = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d*)(?:\.(\d*))?|\{[^{}]*:[^\d{}]*(\d*)[^\d{}]*(\d*)")
_WIDTHS_FROM_VALUES = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
_WIDENING = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes"})
_PER_LETTER = frozenset({"translate", "wordwrap", "urlize"})
_PER_LINE = frozenset({"indent", "expandtabs"})
_OF_ELEMENTS = frozenset(
    {
        *("length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "items"),
        *("dictsort", "sort", "unique", "groupby", "reverse", "slice", "min", "max", "random", "attr", "default", "d"),
    }
)  # fmt: skip
"""Filters that do not make a text of their input."""


class TemplateBudget:
    """The remaining output and time of a template.

    Args:
        letters: maximum letters that one operation may make.
        seconds: time limit of the template.
    """

    def __init__(self, letters: float, seconds: float) -> None:
        self.letters, self._left = letters, letters * MAX_OPERATIONS
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def spend(self, letters: float) -> None:
        """Count the letters that an operation is about to make.

        Raises:
            ValueError: they exceed the limit.
        """
        self._left -= letters
        if letters > self.letters or self._left < 0:
            raise ValueError(f"its output has more than {self.letters:,} letters")

    def step(self) -> None:
        """Count a step of a loop, or a call.

        Raises:
            ValueError: too many steps, or the time limit is exceeded.
        """
        self.spend(ELEMENT)
        if time.monotonic() > self._deadline:
            raise ValueError(f"it takes more than {self._seconds:.0f} s")


class _Mine(threading.local):
    budget = TemplateBudget(math.inf, math.inf)


MINE = _Mine()
"""The budget of the template that this thread runs; unlimited outside of `bounded_template`."""


def install() -> None:
    """Make transformers compile chat templates for this environment; without a budget they run as before."""
    from transformers.utils import chat_template_utils

    if chat_template_utils.ImmutableSandboxedEnvironment is not BoundedEnvironment:
        chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
        chat_template_utils._compile_jinja_template.cache_clear()


def _weight(value: Any) -> int:
    """Approximate letters of a value as text; a list that occurs several times counts each time.

    Stops counting at the limit of one operation.
    """
    if isinstance(value, str):
        return len(value)
    limit, total, left = MINE.budget.letters, 0, [value]
    while left and total <= limit:
        one = left.pop()
        if isinstance(one, str | bytes):
            total += len(one)
            continue
        if isinstance(one, Namespace):
            one = one._Namespace__attrs
        total += ELEMENT
        if isinstance(one, int):
            total += one.bit_length() // 3
        elif isinstance(one, (dict, *_CONTAINERS)):
            total += ELEMENT * len(one)
            if total <= limit:
                left.extend(one)
                left.extend(one.values() if isinstance(one, dict) else ())
    return total


def _widest(given: Iterable[Any]) -> int:
    inner = [part for one in given for part in (one if isinstance(one, tuple) else (one,))]
    sizes = (one if isinstance(one, int) else len(one) for one in inner if isinstance(one, int | str | bytes))
    return max(sizes, default=0)


def _formatted(text: str, given: Any) -> int:
    """Upper bound of the letters of a formatted text: each field has the largest width and contains all values."""
    text = text.replace("%%", "")
    widths = [int(digits) for found in _WIDTHS.findall(text) for digits in found if digits]
    if _WIDTHS_FROM_VALUES.search(text):
        widths.append(_widest(given if isinstance(given, tuple) else (given,)))
    return len(text) + (text.count("%") + text.count("{")) * (max(widths, default=0) + _weight(given))


def _estimate(name: str, value: Any, given: Sequence[Any]) -> int:
    """Estimate of the letters that a filter or a method makes, if they can exceed a few times its input's."""
    widest = _widest(given)
    if name in _WIDENING:
        return widest
    if name in ("batch", "lipsum"):  # a list filled up; words in paragraphs
        return widest * (ELEMENT if name == "batch" else widest)
    if name == "round":
        return int(10 ** min(widest, 1000))
    if name == "tojson":  # by indent and separators
        return _weight(value) * (1 + widest)
    if isinstance(value, str | bytes):
        if name in _PER_LINE:
            breaks = value.count("\t") + len(value.splitlines()) if isinstance(value, str) else len(value)
            return (breaks + 1) * widest
        if name in _PER_LETTER:
            return len(value) * (1 + _weight([one for one in given if not isinstance(one, int)]))
        if name == "replace" and len(given) > 1:
            count = value.count(str(given[0])) if isinstance(value, str) else len(value) + 1
            return count * _weight(given[1])
        if name == "format" and isinstance(value, str):
            return _formatted(value, tuple(given))
    if name == "join" and isinstance(value, list | str):
        return _weight(value) + len(value) * widest
    return 0 if name in _OF_ELEMENTS else _weight(value)


def _values(args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    return [*args, *(named[name] for name in sorted(named, reverse=True))]  # `replace` has its `old` before its `new`


def _counted(made: Iterator[Any]) -> Iterator[Any]:
    for one in made:
        MINE.budget.step()
        yield one


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    before = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        if len(args) > before:
            if name in ("join", "sum") and not isinstance(args[before], str):
                args = (*args[:before], [*args[before]], *args[before + 1 :])
            MINE.budget.spend(_estimate(name, args[before], _values(args[before + 1 :], named)))
        made = function(*args, **named)
        return _counted(made) if isinstance(made, GeneratorType) else made

    return bounded


class _Filters(dict[str, Callable[..., Any]]):
    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded_filter(name, function))


class _Code(CodeGenerator):
    """Jinja's compiler, with a step counted in each loop, and a check of the operands of `~`."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("one_step"), lineno=node.lineno))
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        name = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        if frame.eval_ctx.volatile:
            name = "(markup_join if context.eval_ctx.volatile else str_join)"
        self.write(f"{name}(environment.fitting((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


def _concat(parts: Iterable[str]) -> str:
    kept = [*parts]
    MINE.budget.spend(sum(map(len, kept)))
    return "".join(kept)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, whose operations are charged to this thread's budget before they run."""

    code_generator_class = _Code
    concat = staticmethod(_concat)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.finalize = self._shown
        given, self.filters = self.filters, _Filters()
        for name, function in given.items():
            self.filters[name] = function

    @property
    def one_step(self) -> None:
        """Counts a step; generated code reads this once for each step of a loop."""
        MINE.budget.step()

    def fitting(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the parts unchanged after charging their size to the budget."""
        MINE.budget.spend(sum(map(_weight, parts)))
        return parts

    def _shown(self, value: Any) -> Any:
        MINE.budget.spend(_weight(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Jinja's `call_binop`, within the budget."""
        if operator == "+":
            MINE.budget.spend(_size(left) + _size(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * abs(right) if operator == "**" else bits + right.bit_length()
            if bits > INTEGER_BITS:
                raise ValueError("it computes with integers of more than a million bits")
        elif operator == "%" and isinstance(left, str):
            MINE.budget.spend(_formatted(left, right))
        elif operator == "*":
            MINE.budget.spend(_product(left, right))
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        """Jinja's `call`, within the budget."""
        MINE.budget.step()
        value, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(value, str | bytes | int):
            if name == "join" and args:  # may be an iterator
                args = ([*args[0]], *args[1:])
                MINE.budget.spend(_estimate(name, args[0], [value]))
            else:
                MINE.budget.spend(_estimate(name, value, _values(args, named)))
        elif name == "generate_lorem_ipsum":
            MINE.budget.spend(_estimate("lipsum", value, _values(args, named)))
        return super().call(__context, __obj, *args, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's `wrap_str_format`, within the budget."""
        made = super().wrap_str_format(value)
        if made is None:
            return None

        @functools.wraps(made)
        def bounded(*args: Any, **named: Any) -> str:
            MINE.budget.spend(_formatted(value.__self__, (*args, *named.values())))
            return made(*args, **named)

        return bounded


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, list | tuple) else 0


def _product(left: Any, right: Any) -> int:
    times = left if isinstance(left, int) else right if isinstance(right, int) else 0
    return max(0, times) * (_size(left) + _size(right))
