"""Counts the calls of functions by their qualified names, in all threads, without a change of any of them."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

import rabbitllm
from rabbitllm.engine.expert_finding import is_routed

PACKAGE = str(Path(rabbitllm.__file__).parent)


class CallCounts(Counter[str]):
    """Number of calls: "package.file:function" -> calls."""

    @property
    def files(self) -> set[str]:
        """Files of this package that were entered."""
        return {name.partition(":")[0] for name in self if name.startswith("rabbitllm/")}

    @property
    def functions(self) -> set[str]:
        """Functions of this package that were entered, without comprehensions and lambdas."""
        return {name for name in self if name.startswith("rabbitllm/") and not name.endswith(">")}


@contextlib.contextmanager
def counted_calls(*others: str) -> Iterator[CallCounts]:
    """Count calls of this package while the context is open.

    Args:
        others: qualified names of functions of other packages to count.
    """
    counts, wanted = CallCounts(), frozenset(others)

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            counts[f"rabbitllm{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"] += 1
        elif code.co_qualname in wanted:
            counts[code.co_qualname] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def called_parts(model: Any) -> Counter[str]:
    """How often each Linear, router and module of experts in a model's layers is called from now on, as where the rows
    of several sequences wait for each other; by name."""
    counts = Counter[str]()

    def noted(name: str, ordinary: Callable[..., Any], *args: Any, **named: Any) -> Any:
        counts[name] += 1
        return ordinary(*args, **named)

    for name, part in model.named_modules():
        if ".layers." in name and (isinstance(part, nn.Linear) or is_routed(part)):
            counts[name] = 0
            part._compiled_call_impl = functools.partial(noted, name, part._call_impl)
    return counts
