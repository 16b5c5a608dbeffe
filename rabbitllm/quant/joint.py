"""Products of several matrices with the same rows of input, as integers, by one call of compiled code.

In decode a product takes some ten microseconds, and so did the calls around it: rounding inputs, starting a team, and
rounding results for each matrix. Here inputs are rounded once for all matrices of a layout, all kernels run in one
team, and what does not depend on the inputs is prepared. Rows of matrices are multiplied independently, so the results
have the bits of separate products.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.rounding import round_up
from rabbitllm.quant import _kernels
from rabbitllm.quant._kernel_interface import ARGUMENTS, BEFORE_WORK, CODES, INTEGERS

if TYPE_CHECKING:
    from rabbitllm.quant.products import FusedMatrix, KernelMatrix

Place = tuple[int, int]
"""A place in memory: which of the addresses of a call of a `Program`, and bytes from there on."""
Words = Sequence[int | Place]
"""Int64s; a place is replaced by its address."""
OWN, SCRATCH, FIRST = 0, 6, 7
"""The words of a program with its own address, with that of the scratch memory, and with the first one of a call."""
KEPT_BYTES = 1 << 20
"""Bytes of scratch memory that a thread keeps for its next product."""
_ALIGNMENT = 64


def float_bits(value: float) -> int:
    """The bits of a number in float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


class Program:
    """Compiled functions, each of the address of int64s, that one call runs one after the other.

    The first of the int64s is that address itself.

    Args:
        addresses: how many a call is given.
    """

    def __init__(self, addresses: int) -> None:
        self._addresses = addresses
        self._nbytes = 0
        self._steps: list[tuple[int, Words, int]] = []
        self._words: array[int] | None = None

    def address(self, index: int) -> Place:
        """The place of an address that a call is given."""
        return FIRST + index, 0

    def room(self, nbytes: int) -> Place:
        """A place in scratch memory."""
        begin, self._nbytes = self._nbytes, round_up(self._nbytes + nbytes, _ALIGNMENT)
        return SCRATCH, begin

    def add(self, function: int, words: Words, threads: int = 1) -> None:
        """Add a function, by its address, the int64s after the first that it gets, and how many threads call it."""
        self._steps.append((function, words, threads))

    def __call__(self, *addresses: int) -> None:
        """Run it."""
        if self._words is None:
            self._words = self._joined()
        data = self._words[:]
        data[OWN] = own = data.buffer_info()[0]
        scratch = _scratch(self._nbytes)
        data[SCRATCH] = scratch.data_ptr()
        for index, address in enumerate(addresses, FIRST):
            data[index] = address
        _compiled()(own)

    def _joined(self) -> array[int]:
        """All words: those of `_joint_kernels.py`, the addresses of a call, places, functions, and their words."""
        begin = FIRST + self._addresses
        count = 2 * len(self._steps) + sum(isinstance(word, tuple) for _, step, _ in self._steps for word in step)
        of_calls = begin + 3 * count
        first = of_calls + 3 * len(self._steps)
        places, calls, words = list[int](), list[int](), list[int]()
        for function, step, threads in self._steps:
            place = OWN, 8 * (first + len(words))
            places += [of_calls + len(calls) + 1, *place]
            calls += [function, 0, threads]
            for word in (place, *step):
                if isinstance(word, tuple):
                    places += [first + len(words), *word]
                words.append(0 if isinstance(word, tuple) else word)
        parallel = team.parallel if (team := torchs_team()) is not None else 0
        head = [0, first + len(words), begin, count, len(self._steps), parallel, *[0] * (1 + self._addresses)]
        return array("q", [*head, *places, *calls, *words])


class JointProduct:
    """Multiplies matrices with the same rows of input; see `of`.

    Attributes:
        matrices: (N, K) each, with one K.
        max_inputs: rows of input up to which this is the fastest method for all of them.
    """

    def __init__(self, matrices: Sequence[KernelMatrix], is_wide: Sequence[bool]) -> None:
        self.matrices = tuple(matrices)
        self._is_wide = tuple(is_wide)
        self._pieces = [piece for matrix in matrices if (piece := matrix.as_integers()) is not None]
        self.max_inputs = min(piece.max_inputs for piece in self._pieces)
        self._columns: int = matrices[0].form.shape[1]
        self._rows = [matrix.form.shape[0] for matrix in matrices]
        self._programs: dict[tuple[int, torch.Size, torch.dtype], tuple[Program, list[torch.Tensor]]] = {}

    @classmethod
    def of(cls, matrices: Sequence[KernelMatrix | FusedMatrix], is_wide: Sequence[bool]) -> JointProduct | None:
        """The product of matrices that are all multiplied as integers, with one number of columns; None if not all are.

        Args:
            matrices: at least one.
            is_wide: for each, whether its result stays in float32.
        """
        from rabbitllm.quant.products import KernelMatrix

        usable = [matrix for matrix in matrices if isinstance(matrix, KernelMatrix)]
        columns = {matrix.form.shape[1] for matrix in usable}
        if len(usable) < len(matrices) or len(columns) > 1 or torchs_team() is None:
            return None
        return cls(usable, is_wide) if all(matrix.as_integers() is not None for matrix in usable) else None

    def __call__(self, x: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """`x @ W.T` for each matrix.

        Args:
            x: (..., K), float32 or bfloat16, without gaps.
            rows: of all its dimensions but the last.

        Returns:
            (..., N) of x's dtype, or float32.
        """
        key = torch.get_num_threads(), x.shape, x.dtype
        if (prepared := self._programs.get(key)) is None:
            program = Program(1 + len(self.matrices))
            places = [program.address(1 + index) for index in range(len(self.matrices))]
            self.add_to(program, rows, x.dtype, program.address(0), places)
            prepared = self._programs[key] = program, self._forms(x)
        program, forms = prepared
        results = [torch.empty_like(form) for form in forms]
        program(x.data_ptr(), *[result.data_ptr() for result in results])
        return results

    def _forms(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Tensors like the results, of one element each: `torch.empty` takes twice the time of `torch.empty_like`."""
        return [
            torch.empty((), dtype=torch.float32 if is_wide else x.dtype).expand(*x.shape[:-1], count)
            for count, is_wide in zip(self._rows, self._is_wide, strict=True)
        ]

    def add_to(self, program: Program, rows: int, dtype: torch.dtype, x: Place, results: Sequence[Place]) -> None:
        """Add it to a program: for so many rows of a dtype at a place, with the results at others."""
        from rabbitllm.quant import _integers, _joint_kernels

        team = torchs_team()
        assert team is not None
        nbytes = sum(piece.nbytes for piece in self._pieces)
        threads = min(torch.get_num_threads(), -(-nbytes // _kernels.WORTH_A_THREAD[CODES]))
        size, layouts, inputs = 0, list[object](), list[int | Place]()
        for piece in self._pieces:
            layout = piece.layout
            if layout in layouts:
                continue
            layouts.append(layout)
            floats = size + round_up(2 * rows * self._columns, _ALIGNMENT)
            inputs += [layout.step, layout.group, layout.order_address, size, floats]
            size = floats + round_up(4 * rows * (self._columns // layout.step) * (1 + layout.groups), _ALIGNMENT)
        products = list[int | Place]()
        for piece, is_wide, result in zip(self._pieces, self._is_wide, results, strict=True):
            is_float = is_wide or dtype == torch.float32
            function, _, tile = _kernels.kernel(CODES, piece.scheme, INTEGERS)
            sums = -1 if is_float else size
            count = piece.words[-1]
            size += 0 if is_float else round_up(4 * rows * count, _ALIGNMENT)
            share = round_up(-(-count // threads), tile)  # no tile is divided
            in_team = (team.thread_number, team.thread_count) if threads > 1 else (0, 0)
            products += [function, layouts.index(piece.layout), sums, result, *in_team, share, 1, *piece.words]
        product, each, _ = _joint_kernels.addresses()
        head: list[int | Place] = [x, program.room(size), team.parallel, each, threads, _integers.rounding()[0]]
        head += [len(layouts), len(self._pieces), int(dtype == torch.bfloat16), rows, self._columns]
        program.add(product, [*head, *inputs, *products])


@dataclass(frozen=True)
class RoutedProduct:
    """A product of matrices of one form that are chosen for each call, each with rows of its own.

    Attributes:
        scheme: of the kernel.
        layout: of its inputs.
        shape: (N, K) of each matrix.
        nbytes: of the codes of each.
        max_inputs: rows of a matrix up to which this is the fastest method.
    """

    scheme: Any
    layout: Any
    shape: tuple[int, int]
    nbytes: int
    max_inputs: int

    @classmethod
    def of(cls, matrix: Any) -> tuple[RoutedProduct, tuple[int, ...]] | None:
        """Of a matrix, and the matrix's words, which a call takes; None if it is not multiplied as integers."""
        from rabbitllm.quant.products import KernelMatrix

        piece = matrix.as_integers() if isinstance(matrix, KernelMatrix) and torchs_team() is not None else None
        if piece is None:
            return None
        return cls(piece.scheme, piece.layout, tuple(matrix.form.shape), piece.nbytes, piece.max_inputs), piece.words

    def add_to(
        self, program: Program, rows: int, x: Place, chosen: Place, out: Place, sources: int | Place, number: int
    ) -> None:
        """Add it to a program.

        Args:
            rows: of all results, bfloat16 at `out`.
            x: bfloat16 rows of input.
            chosen: see `_joint_kernels.ROUTED_WORDS`.
            sources: the number of each row's input, int64; 0 for the row's own; -1 if all have one input.
            number: of the matrix whose words a chosen one has: 0, 1, ...
        """
        from rabbitllm.base.compiling import address_of
        from rabbitllm.quant import _integers, _joint_kernels

        team, layout, (count, columns) = torchs_team(), self.layout, self.shape
        assert team is not None
        threads = min(torch.get_num_threads(), -(-rows * self.nbytes // _kernels.WORTH_A_THREAD[CODES]))
        function, _, tile = _kernels.kernel(CODES, self.scheme, INTEGERS)
        share = round_up(-(-count // threads), tile)  # no tile is divided
        in_team = (team.thread_number, team.thread_count) if threads > 1 else (0, 0)
        rounded = 1 if sources == -1 else rows
        float_bytes = 4 * (columns // layout.step) * (1 + layout.groups)
        sizes = (
            2 * columns * rounded,
            float_bytes * rounded,
            4 * count * rows,
            8 * (BEFORE_WORK + rows * len(ARGUMENTS)),
        )
        words: list[int | Place] = [x, chosen, 0 if sources == -1 else sources, out, *map(program.room, sizes)]
        words += [function, team.parallel, threads, *in_team, share, _integers.rounding()[0], columns, layout.step]
        words += [layout.group, layout.order_address, float_bytes, rounded, rows, count, number * len(ARGUMENTS)]
        program.add(address_of(_joint_kernels.routed), words)


@functools.cache
def _compiled() -> Callable[[int], None]:
    """A function of Python that runs the words of a program."""
    from rabbitllm.quant import _joint_kernels

    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_joint_kernels.addresses()[2])


class _Kept(threading.local):
    memory: torch.Tensor | None = None


_kept = _Kept()


def _scratch(nbytes: int) -> torch.Tensor:
    """Memory for one product of this thread."""
    kept = _kept.memory
    if kept is not None and len(kept) >= nbytes:
        return kept
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes <= KEPT_BYTES:
        _kept.memory = memory
    return memory
