"""An answer is found again after every change of a dict, and only then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.engine import _dict_changes as dict_changes
from rabbitllm.engine._dict_changes import remembered

TELLS = dict_changes._way() is not dict_changes._unknown


def changes_of(linear: nn.Linear) -> list[Callable[[], Any]]:
    """Changes to a module by other means each."""
    parameters, own, hooks = linear._parameters, vars(linear), linear._forward_pre_hooks
    handles = list[Any]()
    return [
        lambda: setattr(linear, "weight", nn.Parameter(torch.zeros(2, 2))),
        lambda: linear.register_parameter("bias", None),
        lambda: parameters.update(weight=None),
        lambda: parameters.__setitem__("weight", nn.Parameter(torch.ones(2, 2))),
        lambda: setattr(linear, "in_features", 3),
        lambda: setattr(linear, "added", 3),
        lambda: delattr(linear, "added"),
        linear.eval,
        lambda: own.__setitem__("in_features", 4),
        lambda: own.update(forward=print),
        lambda: own.pop("forward"),
        lambda: handles.append(linear.register_forward_pre_hook(print)),
        lambda: handles.pop().remove(),
        lambda: hooks.update({7: print}),
        hooks.clear,
        parameters.popitem,
    ]


def test_each_change_is_seen() -> None:
    linear, calls = nn.Linear(2, 2), list[int]()
    dicts: list[dict[Any, Any]] = [linear._parameters, vars(linear), linear._forward_pre_hooks, {}]

    def answer() -> bool:
        calls.append(1)
        return len(calls) % 3 == 0

    known, changes = remembered(answer, dicts * 2), changes_of(linear)
    assert not known()
    for change in changes:
        before = len(calls)
        change()
        assert known() is ((before + 1) % 3 == 0)
        assert len(calls) == before + 1
        if TELLS:
            assert known() is known() is (len(calls) % 3 == 0)
            assert len(calls) == before + 1
    other = remembered(answer, [{1: 2}])
    assert other() is (len(calls) % 3 == 0)


@pytest.mark.skipif(not TELLS, reason="this Python tells of no changes")
def test_no_thread_gets_an_old_answer() -> None:
    facts, asked, may_answer = {"is": True}, threading.Event(), threading.Event()
    answers = list[bool]()

    def answer() -> bool:
        is_true = facts["is"]
        if threading.current_thread() is thread:
            asked.set()
            assert may_answer.wait(600)
        return is_true

    known = remembered(answer, [facts])
    thread = threading.Thread(target=lambda: answers.append(known()))
    assert known()
    facts["is"] = False
    thread.start()
    assert asked.wait(600)
    assert not known()  # found here, since the thread has not yet
    facts["is"] = True
    may_answer.set()
    thread.join()
    assert answers == [False]
    assert known()
