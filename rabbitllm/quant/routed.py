"""A product of matrices that are chosen for each call, as a step of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.programs import Place, Program
from rabbitllm.quant import _kernels
from rabbitllm.quant._kernel_interface import ARGUMENTS, BEFORE_WORK, BFLOAT16, CODES, PAIRS


def preparation(scheme: Any, width: int, layout: Any, columns: int) -> tuple[Any, tuple[int, ...], int, int]:
    """How a kernel by codes takes inputs, as the attributes of a `RoutedProduct` say it: the function that prepares
    rows, three of its words, and for each row bytes of these and of what is with them."""
    from rabbitllm.quant import _integers, joint_kernels  # numba comes with them

    if layout is not None:
        numbers = layout.step, layout.group, layout.order_address
        others = 4 * (columns // layout.step) * (1 + layout.groups)
        return _integers.round_inputs, numbers, 2 * columns, others
    if width == PAIRS:
        return joint_kernels.widen_inputs, (columns, 0, 0), 2 * columns, 0
    if scheme == BFLOAT16:
        return joint_kernels.widen_inputs, (2 * width, 1, 0), 4 * columns, 0
    return joint_kernels.widen_inputs, (columns, 1, 1), 2 * columns, 2 * columns


@dataclass(frozen=True)
class RoutedProduct:
    """A product of matrices of one form that are chosen for each call, each with rows of its own.

    Attributes:
        scheme, width: of the kernel by codes.
        layout: of its inputs as integers; None if it takes others.
        shape: (N, K) of each matrix.
        nbytes: of the codes of each.
        max_inputs: rows of a matrix up to which this is the fastest method.
    """

    scheme: Any
    width: int
    layout: Any
    shape: tuple[int, ...]
    nbytes: int
    max_inputs: int

    def add_to(
        self, program: Program, rows: int, x: Place, chosen: Place, out: Place, sources: int | Place, number: int
    ) -> None:
        """Add it to a program.

        Args:
            rows: of all results, bfloat16 at `out`.
            x: bfloat16 rows of input.
            chosen: see `joint_kernels.ROUTED_WORDS`.
            sources: the number of each row's input, int64; 0 for the row's own; -1 if all have one input.
            number: of the matrix whose words a chosen one has: 0, 1, ...
        """
        from rabbitllm.base.compiling import address_of  # numba comes with it
        from rabbitllm.quant import joint_kernels

        team, (count, columns) = torchs_team(), self.shape
        assert team is not None
        threads = _kernels.threads_for(CODES, rows * self.nbytes)
        function, tile = _kernels.kernel(CODES, self.scheme, self.width)
        rounded = 1 if sources == -1 else rows
        prepare, numbers, input_bytes, other_bytes = preparation(self.scheme, self.width, self.layout, columns)
        of_work = 8 * (joint_kernels.ROUNDING_WORDS + BEFORE_WORK + rows * len(ARGUMENTS))
        sizes = input_bytes * rounded, other_bytes * rounded, 4 * count * rows, of_work
        words: list[int | Place] = [x, chosen, 0 if sources == -1 else sources, out, *map(program.room, sizes)]
        words += [function, team.address, threads, tile]
        words += [address_of(prepare), columns, *numbers, input_bytes, other_bytes]
        words += [rounded, rows, count, number * len(ARGUMENTS)]
        program.add(joint_kernels.routed, words)
