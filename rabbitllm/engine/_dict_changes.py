"""Answers that depend on what is in some dicts, found again only when one of these may have been changed.

What is in the dicts of fifty modules lies in hundreds of places of memory, which are no longer in the processor's cache
when a model's next token begins. CPython 3.11 has in each dict the number of its last change (PEP 509), which compiled
code compares. Since 3.12 dicts can be watched: Python calls compiled code before it changes one. Whether all changes
are seen is tried (3.13.0 does not tell of attributes that are set); if not, answers are found each time.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import platform
import sys
import sysconfig
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

Answer: TypeAlias = Callable[[], bool]
_Dicts: TypeAlias = Sequence[dict[Any, Any]]


def remembered(answer: Answer, dicts: Iterable[dict[Any, Any]]) -> Answer:
    """A function that returns what another one does, and calls it only after a change to dicts, which are kept."""
    return _way()(answer, list({id(each): each for each in dicts}.values()))


def _unknown(answer: Answer, dicts: _Dicts) -> Answer:
    """For Pythons that tell of no changes."""
    return answer


class _Numbered:
    """An answer, and the number of the last change of each dict when it was found; see `_dict_kernels.compare`."""

    def __init__(self, answer: Answer, dicts: _Dicts) -> None:
        after = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)  # a dict's length comes first
        numbers = array("q", [word for each in dicts for word in (id(each) + after, -1)])
        self._answer, self._dicts, self._compare = answer, dicts, _function("compare")[0]
        self._known = numbers, numbers.buffer_info()[0], False

    def __call__(self) -> bool:
        numbers, address, known = self._known
        if self._compare(0, address, len(self._dicts), 0):
            numbers = numbers[:]  # other threads ask, too: what is known changes at once, after it was found
            address = numbers.buffer_info()[0]
            self._compare(1, address, len(self._dicts), 0)
            known = self._answer()
            self._known = numbers, address, known
        return known


class _Watched:
    """An answer, and how many changes any watched dict had had when it was found."""

    def __init__(self, answer: Answer, dicts: _Dicts) -> None:
        number, self._count = _watcher()
        for each in dicts:
            ctypes.pythonapi.PyDict_Watch(number, ctypes.py_object(each))
        self._answer, self._dicts, self._known = answer, dicts, (-1, False)

    def __call__(self) -> bool:
        count, (seen, known) = self._count.value, self._known
        if count != seen:
            known = self._answer()
            self._known = count, known
        return known


@functools.cache
def _function(name: str) -> tuple[Any, int]:
    """A function of `_dict_kernels`, which runs with the interpreter lock, and its address."""
    from rabbitllm.base.compiling import CALLBACK, address_of
    from rabbitllm.engine import _dict_kernels  # numba comes with it

    address = address_of(getattr(_dict_kernels, name), CALLBACK)
    return ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_int32, *[ctypes.c_int64] * 3)(address), address


@functools.cache
def _watcher() -> tuple[int, ctypes.c_int64]:
    """The number of our watcher, and of the changes that it has counted."""
    place, (count_change, address) = ctypes.c_int64(), _function("count_change")
    count_change(-1, ctypes.addressof(place), 0, 0)
    number: int = ctypes.pythonapi.PyDict_AddWatcher(ctypes.c_void_p(address))
    atexit.register(ctypes.pythonapi.PyDict_ClearWatcher, number)
    return number, ctypes.c_int64.from_address(place.value)


@functools.cache
def _way() -> Callable[[Answer, _Dicts], Answer]:
    """How changes are seen on this Python."""
    way = _Numbered if sys.version_info < (3, 12) else _Watched
    has_lock = platform.python_implementation() == "CPython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    return way if has_lock and _sees(way) else _unknown


class _Sample:
    """Has attributes."""

    value = 0


def _sees(way: Callable[[Answer, _Dicts], Answer]) -> bool:
    """Whether changes of all kinds are seen, and none where there are none."""
    plain, ordered, sample, calls = {"a": 1}, OrderedDict(a=1), _Sample(), list[int]()
    sample.value = 1

    def answer() -> bool:
        calls.append(1)
        return True

    try:
        known = way(answer, [plain, ordered, vars(sample)])
    except (AttributeError, RuntimeError):  # there is no such function, or no more watchers are possible
        return False
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: plain.update(a=2),
        lambda: plain.pop("a"),
        lambda: ordered.update(b=2),
        ordered.clear,
        lambda: setattr(sample, "value", 2),
        lambda: setattr(sample, "other", 2),
    ]
    seen = list[int]()
    for change in changes:
        change()
        seen += [known() and len(calls) for _ in range(2)]
    return seen == [index // 2 + 1 for index in range(2 * len(changes))]
