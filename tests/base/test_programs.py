"""Programs, and what they ask Python for."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rabbitllm.base.compiling import share, system_call, to_array
from rabbitllm.base.programs import Place, Program, Programs

pytestmark = pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="other system calls")
_TO_THREAD, _CTRL_C = 234, 2
"""Of Linux on x86-64: the system call `tgkill`, and a signal."""


def interrupt(data):  # type: ignore[no-untyped-def]
    """Send this thread a Ctrl-C: after the own address, that of `syscall`, the process, and the thread."""
    words = to_array(data, 4)
    system_call(words[1], _TO_THREAD, words[2], words[3], _CTRL_C)


def put(data):  # type: ignore[no-untyped-def]
    """Write a number at an address."""
    words = to_array(data, 3)
    share(words[1], words[2])


def test_a_ctrl_c_while_compiled_code_runs_ends_the_program_at_the_next_question() -> None:
    syscall, written = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0, np.zeros(2, np.int64)
    program, answers = Program(2), list[int]()
    program.ask()
    program.add(put, [program.address(0), 1])
    program.add(interrupt, [syscall, os.getpid(), threading.get_native_id()])
    program.ask()
    program.add(put, [program.address(1), 1])

    def numbers() -> Iterator[int]:
        for number in range(2):
            answers.append(number)
            yield number

    with pytest.raises(KeyboardInterrupt):
        program(written.ctypes.data, written.ctypes.data + 8, asked=numbers())
    assert answers == [0]
    assert written.tolist() == [1, 0]


def test_an_owner_keeps_its_last_programs() -> None:
    programs, added = Programs(), list[int]()

    def add(program: Program, address: Place, form: int) -> None:
        added.append(form)

    for form in range(Programs.LIMIT + 10):
        programs.of(add, 1, form)
        assert programs.of(add, 1, 0) is programs.of(add, 1, 0)
    assert len(programs) == Programs.LIMIT
    assert added == [*range(Programs.LIMIT + 10)]  # what is used stays
    programs.of(add, 1, 1)
    assert added[-1] == 1
