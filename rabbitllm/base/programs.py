"""Programs: compiled functions that one call from Python runs one after the other.

A call of a compiled function takes Python some microseconds, as long as a small operation. What does not depend on the
tensors of a call is prepared once: places in memory, scratch memory among them, and numbers. Needs no numba until a
program runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from rabbitllm.base.openmp import PARTS, torchs_team
from rabbitllm.base.rounding import round_up

Place = tuple[int, int]
"""A place in memory: which of the addresses of a call of a `Program`, and bytes from there on."""
Words = Sequence[int | Place]
"""Int64s; a place is replaced by its address."""
OWN, STEPS, SCRATCH, BEGIN, ASKED, FIRST = 0, 4, 7, 8, 9, 10
"""The words of a program with its own address, the number of its functions, that of the scratch memory, the function
that a call begins with, that of the steps of Python, and the first address of a call. A function that sets the second
to 0 is the last one."""
HALVES = torch.bfloat16, torch.float16
"""The dtypes that a program may compute with."""
KEPT_BYTES = 1 << 20
"""Bytes of scratch memory that a thread keeps for its next call."""
_ALIGNMENT = 64


def float_bits(value: float) -> int:
    """The bits of a number in float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


class Program:
    """Compiled functions that one call, which is given so many addresses, runs one after the other.

    Each gets the address of int64s, of which the first is that address itself.

    Args:
        addresses: how many.
        dtype: of `HALVES`: what they compute with where they are written for bfloat16.

    Attributes:
        dtype: the same.
        ends: how many functions there were at the end of each `passing`.
    """

    def __init__(self, addresses: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self._addresses, self.dtype = addresses, dtype
        self._nbytes = self._used = 0
        self._steps: list[tuple[Callable[..., None] | None, Words, int]] = []
        self._words: array[int] | None = None
        self.ends = list[int]()

    @classmethod
    def of(cls, add: Callable[..., None], addresses: int, *form: Any, dtype: torch.dtype = torch.bfloat16) -> Program:
        """The program to which a function adds its steps, which is given it, the places of a call's addresses, and a
        form."""
        program = cls(addresses, dtype)
        add(program, *map(program.address, range(addresses)), *form)
        return program

    def address(self, index: int) -> Place:
        """The place of an address that a call is given."""
        return FIRST + index, 0

    def word(self, index: int) -> Place:
        """The place where that address is itself, before those that follow it."""
        return OWN, 8 * (FIRST + index)

    def room(self, nbytes: int) -> Place:
        """A place in scratch memory."""
        begin, self._used = self._used, round_up(self._used + nbytes, _ALIGNMENT)
        self._nbytes = max(self._nbytes, self._used)
        return SCRATCH, begin

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A context after which the scratch memory that was taken in it is used again."""
        before = self._used
        yield
        self._used = before
        self.ends.append(len(self._steps))

    def add(self, function: Callable[..., None], words: Words, threads: int = 1) -> None:
        """Add a function, which is compiled, the int64s after the first that it gets, and how many threads call it."""
        self._steps.append((function, words, threads))

    def compiled(self, function: Callable[..., None]) -> int:
        """The address of a function, compiled for the dtype."""
        from rabbitllm.base.compiling import address_of, in_float16  # numba comes with it

        return address_of(in_float16(function) if self.dtype is torch.float16 else function)

    def ask(self) -> None:
        """Add a step of Python: the next value of the iterator that a call is given, which calls no program."""
        self._steps.append((None, [], 1))

    def __call__(self, *addresses: int, begin: int = 0, asked: Iterator[object] | None = None) -> None:
        """Run it, from a function on: all before are left out.

        An error of the iterator that is asked ends it.
        """
        if self._words is None:
            self._words = self._joined()
        data = self._words[:]
        data[OWN] = own = data.buffer_info()[0]
        scratch = _scratch(self._nbytes)
        data[SCRATCH] = scratch.data_ptr()
        data[BEGIN] = begin
        data[FIRST : FIRST + len(addresses)] = array("q", addresses)
        if asked is None:
            _compiled()(own)
            return
        errors = list[BaseException]()
        next(answers := _answers(asked, data, errors))
        answer = _as_function(answers.send)
        data[ASKED] = ctypes.c_void_p.from_buffer(answer).value or 0
        _compiled()(own)
        if errors:
            raise errors.pop()

    def _joined(self) -> array[int]:
        """All words: those of `parts.run_program`, the addresses of a call, places, functions, and their words."""
        begin = FIRST + self._addresses
        count = sum(2 + (own is None) + sum(isinstance(word, tuple) for word in step) for own, step, _ in self._steps)
        of_calls = begin + 3 * count
        first = of_calls + 3 * len(self._steps)
        places, calls, words = list[int](), list[int](), list[int]()
        for function, step, threads in self._steps:
            place = OWN, 8 * (first + len(words))
            places += [of_calls + len(calls) + 1, *place]
            if function is None:
                places += [of_calls + len(calls), ASKED, 0]
            calls += [0 if function is None else self.compiled(function), 0, threads]
            for word in (place, *step):
                if isinstance(word, tuple):
                    places += [first + len(words), *word]
                words.append(0 if isinstance(word, tuple) else word)
        of_team = team.address if (team := torchs_team()) is not None else 0
        head = [0, first + len(words), begin, count, len(self._steps), of_team, PARTS, *[0] * (3 + self._addresses)]
        return array("q", [*head, *places, *calls, *words])


prepared = functools.lru_cache(4096)(Program.of)
"""`Program.of` for functions that keep no tensor; if threads differ, a part of the form says how many there are."""


class Programs(dict[tuple[Any, ...], Program]):
    """The last programs of one owner, of whose functions each takes another number of addresses."""

    LIMIT = 64
    """Each number of rows is another form: a server would keep thousands."""

    def of(self, add: Callable[..., None], addresses: int, *form: Any, dtype: torch.dtype = torch.bfloat16) -> Program:
        """As `Program.of`, for as many threads as there are now; made again if it is none of the last ones."""
        key = torch.get_num_threads(), addresses, dtype, *form
        if (program := self.pop(key, None)) is None:
            program = Program.of(add, addresses, *form, dtype=dtype)
            for oldest in [*self][: 1 - self.LIMIT or None]:
                self.pop(oldest, None)  # another thread may have taken it
        self[key] = program
        return program


@functools.cache
def _compiled() -> Callable[[int], None]:
    """A function of Python that runs the words of a program."""
    from rabbitllm.base.compiling import address_of
    from rabbitllm.base.parts import run_program

    return _as_function(address_of(run_program))


class _Kept(threading.local):
    memory: torch.Tensor | None = None


_kept = _Kept()
_as_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _answers(asked: Iterator[object], data: array[int], errors: list[BaseException]) -> Generator[None, object, None]:
    """Take the next value each time that it is sent something; an error ends a program with these words.

    Python raises a Ctrl-C that came while compiled code ran as soon as any code of its own runs again: here within
    `try`. From a function it would go to ctypes, which drops errors.
    """
    try:
        while True:
            yield
            next(asked)
    except GeneratorExit:  # the program has ended
        return
    except BaseException as error:
        data[STEPS] = 0
        errors.append(error)
    yield


def _scratch(nbytes: int) -> torch.Tensor:
    """Memory for one call of a program by this thread."""
    kept = _kept.memory
    if kept is not None and len(kept) >= nbytes:
        return kept
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if nbytes <= KEPT_BYTES:
        _kept.memory = memory
    return memory
