"""Products of several matrices by one call of compiled code: with the same rows of input, or chosen for each call.

In decode a product takes some ten microseconds, and so did the calls around it: preparing inputs, starting a team, and
rounding results for each matrix. Here inputs are prepared once for all matrices that take them alike, all kernels run
in one team, and what does not depend on the inputs is prepared. Rows of matrices are multiplied independently, so the
results have the bits of separate products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.programs import HALVES, Place, Program, Words
from rabbitllm.quant import _kernels
from rabbitllm.quant._kernel_interface import ARGUMENTS, BEFORE_WORK, CODES, INTEGERS, TURNED, Preparation
from rabbitllm.quant.plain import matrix_of
from rabbitllm.quant.products import FusedMatrix, KernelMatrix
from rabbitllm.quant.turned import TurnedMatrix, TurnedOperands


class JointProduct:
    """Multiplies matrices, (N, K) with one K, with the same rows of input; see `of`.

    Attributes:
        max_inputs: rows of input up to which this is the fastest method for all of them.
    """

    def __init__(self, matrices: Sequence[KernelMatrix], is_wide: Sequence[bool]) -> None:
        self.matrices = tuple(matrices)
        self._is_wide = tuple(is_wide)
        self.max_inputs = min(matrix.max_inputs for matrix in matrices)
        rounded = {matrix.rounding.dtype for matrix in matrices if matrix.rounding is not None}
        self._rounds, self._widths = bool(rounded), dict[torch.dtype, list[int]]()
        for dtype in (*HALVES, torch.float32):
            how = [matrix.method_for(1, dtype) for matrix in matrices]
            is_fit = {method for method, _ in how} == {CODES} and rounded <= {dtype}
            if is_fit and (dtype in HALVES or {width for _, width in how} == {INTEGERS}):
                self._widths[dtype] = [width for _, width in how]
        self._columns: int = matrices[0].form.shape[1]
        self._rows = [matrix.form.shape[0] for matrix in matrices]
        self._programs: dict[tuple[int, torch.Size, torch.dtype], tuple[Program, list[torch.Tensor]]] = {}

    @classmethod
    def of(cls, matrices: Sequence[KernelMatrix | FusedMatrix], is_wide: Sequence[bool]) -> JointProduct | None:
        """The product of matrices with one number of columns, all multiplied from their codes for a row of input; None
        if not all are.

        `is_wide` says for each whether its result stays in float32.
        """
        usable = [matrix for matrix in matrices if isinstance(matrix, KernelMatrix)]
        columns = {matrix.form.shape[1] for matrix in usable}
        if len(usable) < len(matrices) or len(columns) > 1 or torchs_team() is None:
            return None
        product = cls(usable, is_wide)
        return product if product._widths else None

    def is_for(self, dtype: torch.dtype) -> bool:
        """Whether inputs of a dtype are multiplied so."""
        return dtype in self._widths

    def takes(self, x: torch.Tensor, rows: int) -> bool:
        """Whether it is meant for such inputs, so many rows."""
        is_by_row = rows == 1 or x.dim() == 3 or not self._rounds
        return rows <= self.max_inputs and self.is_for(x.dtype) and is_by_row

    def __call__(self, x: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """`x @ W.T` for each matrix, (..., N) of x's dtype or float32.

        Args:
            x: (..., K), without gaps, which it `takes`.
            rows: of all its dimensions but the last.
        """
        key = torch.get_num_threads(), x.shape, x.dtype
        if (prepared := self._programs.get(key)) is None:
            program = Program.of(
                lambda to, at, *results: self.add_to(to, rows, x.dtype, at, results), 1 + len(self._rows), dtype=x.dtype
            )
            prepared = self._programs[key] = program, self._forms(x)
        program, forms = prepared
        results = [torch.empty_like(form) for form in forms]
        program(x.data_ptr(), *[result.data_ptr() for result in results])
        return results

    def _forms(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Tensors like the results, of one element each: `torch.empty` takes twice the time of `torch.empty_like`."""
        return [
            torch.empty((), dtype=torch.float32 if is_wide else x.dtype, device="cpu").expand(*x.shape[:-1], count)
            for count, is_wide in zip(self._rows, self._is_wide, strict=True)
        ]

    def add_to(self, program: Program, rows: int, dtype: torch.dtype, x: Place, results: Sequence[Place]) -> None:
        """Add it to a program: for so many rows of a dtype at a place, with the results at others."""
        from rabbitllm.quant import joint_kernels  # numba comes with it

        is_half, columns, inputs = dtype in HALVES, self._columns, dict[Any, list[Place]]()
        changed: dict[Any, Place] = {None: x}
        widths = self._widths[dtype]
        operands = [matrix.operands(width) for matrix, width in zip(self.matrices, widths, strict=True)]
        nbytes = sum(count * row_bytes for count, (*_, row_bytes, _, _) in zip(self._rows, operands, strict=True))
        threads = _kernels.threads_for(CODES, nbytes)
        products, sums = list[int | Place](), list[Words]()
        for index, (matrix, (codes, scales, table, *sizes)) in enumerate(zip(self.matrices, operands, strict=True)):
            width, rows_of, out = widths[index], self._rows[index], results[index]
            change = matrix.rounding if matrix.order is None else matrix.order.data_ptr()
            if change not in changed:
                changed[change] = program.room(rows * columns * dtype.itemsize)
                if isinstance(change, int):
                    program.add(joint_kernels.reorder, [x, is_half, rows, columns, change, changed[change]])
                elif change is not None:
                    change.add_to(program, x, changed[change], rows, columns)
            how = matrix.preparation(width), change
            if how not in inputs:
                prepare, numbers, input_bytes, other_bytes = how[0]
                inputs[how] = [program.room(rows * input_bytes), program.room(rows * other_bytes)]
                sizes_of_x = is_half, rows, columns // numbers[0], columns
                program.add(prepare, [changed[change], *sizes_of_x, *numbers, *inputs[how]])
            if is_half and not self._is_wide[index]:
                out = program.room(4 * rows * rows_of)
                sums.append([out, results[index], rows * rows_of])
            function, tile = _kernels.kernel(CODES, matrix.kernel, width)
            products += [function, tile, 1, codes, scales, *inputs[how], table, out, *sizes, rows, rows_of]
        program.add(joint_kernels.multiply, [len(self.matrices), *products], threads)
        for words in sums:
            program.add(joint_kernels.narrow, words)


@dataclass(frozen=True)
class RoutedProduct:
    """A product of matrices of one form that are chosen for each call, each with rows of its own.

    Attributes:
        method, scheme, width: of the kernel, by codes or of turned matrices.
        preparation: of its inputs.
        shape: (N, K) of each matrix.
        nbytes: of the codes of each.
        max_inputs: rows of a matrix up to which this is the fastest method.
        is_ordered: whether each has an order of its inputs.
    """

    method: str
    scheme: Any
    width: int
    preparation: Preparation
    shape: tuple[int, ...]
    nbytes: int
    max_inputs: int
    is_ordered: bool = False

    @classmethod
    def of(cls, matrix: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[RoutedProduct, tuple[int, ...]] | None:
        """The product where matrices like this one, or like this plain weight, are chosen for inputs of a dtype, and
        the words of this one; None without a kernel for few inputs."""
        if torchs_team() is None:
            return None
        if (turned := TurnedOperands.of(matrix)) is not None:
            codes, scales, table, row_bytes, shift, scheme, width, (rows, columns), most = turned
            product = cls(TURNED, scheme, width, turned.preparation, (rows, columns), columns * row_bytes, most)
            return product, (codes, scales, 0, 0, table, 0, row_bytes, columns, shift, 0, rows)
        matrix = matrix_of(matrix) if isinstance(matrix, torch.Tensor) else matrix
        if not isinstance(matrix, KernelMatrix) or isinstance(matrix, TurnedMatrix):
            return None
        method, width = matrix.method_for(1, dtype)
        if method != CODES:
            return None
        codes, scales, table, *sizes = matrix.operands(width)
        shape, how = tuple(matrix.form.shape), matrix.preparation(width)
        order = 0 if matrix.order is None else matrix.order.data_ptr()
        nbytes, most = shape[0] * sizes[0], matrix.max_inputs
        product = cls(CODES, matrix.kernel, width, how, shape, nbytes, most, is_ordered=bool(order))
        return product, (codes, scales, order, 0, table, 0, *sizes, 0, shape[0])  # see `joint_kernels.routed`

    def add_to(
        self,
        program: Program,
        rows: int,
        x: Place,
        chosen: Place,
        out: Place,
        sources: int | Place,
        number: int,
        is_wide: bool = False,
    ) -> None:
        """Add it to a program.

        Args:
            rows: of all results, in the program's dtype at `out`, or float32 if that `is_wide`.
            x: rows of input in the program's dtype.
            chosen: see `joint_kernels.ROUTED_WORDS`.
            sources: the number of each row's input, int64; 0 for the row's own; -1 if all have one input.
            number: of the matrix whose words a chosen one has: 0, 1, ...
        """
        from rabbitllm.quant import joint_kernels  # numba comes with it

        team, (count, columns) = torchs_team(), self.shape
        assert team is not None
        threads = _kernels.threads_for(self.method, rows * self.nbytes)
        function, tile = _kernels.kernel(self.method, self.scheme, self.width)
        rounded = 1 if sources == -1 and not self.is_ordered else rows
        prepare, numbers, input_bytes, other_bytes = self.preparation
        of_work = 8 * (BEFORE_WORK + rows * len(ARGUMENTS))
        sizes = input_bytes * rounded, other_bytes * rounded, 4 * count * rows, of_work
        words: list[int | Place] = [x, chosen, 0 if rounded < rows else sources, out, *map(program.room, sizes)]
        if is_wide:
            words[3], words[6] = 0, out
        words += [function, team.address, threads, tile]
        words += [program.compiled(prepare), columns, *numbers, input_bytes, other_bytes]
        words += [rounded, rows, count, number * len(ARGUMENTS)]
        words += map(program.compiled, (joint_kernels.prepare_rows, joint_kernels.narrow_rows))
        program.add(joint_kernels.routed, words)
