"""Products of several matrices with the same rows of input, as integers, by one call of compiled code.

In decode a product takes some ten microseconds, and so did the calls around it: rounding inputs, starting a team, and
rounding results for each matrix. Here inputs are rounded once for all matrices of a layout, all kernels run in one
team, and what does not depend on the inputs is prepared. Rows of matrices are multiplied independently, so the results
have the bits of separate products.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.rounding import round_up
from rabbitllm.quant import _kernels
from rabbitllm.quant._kernel_interface import CODES, INTEGERS

if TYPE_CHECKING:
    from rabbitllm.quant.products import FusedMatrix, KernelMatrix

_Template = tuple["array[int]", int, int, list[torch.Tensor]]
KEPT_BYTES = 1 << 20
"""Bytes of scratch memory that a thread keeps for its next product."""
_ALIGNMENT = 64


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
        self._templates: dict[tuple[int, torch.Size, torch.dtype], _Template] = {}

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
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = *self._template(key[0], rows, x.dtype), self._forms(x)
        words, scratch_bytes, first, forms = template
        call, words_of_a_product = _compiled()
        results = [torch.empty_like(form) for form in forms]
        data = words[:]
        data[0] = own = data.buffer_info()[0]
        data[1] = x.data_ptr()
        scratch = _scratch(scratch_bytes)
        data[2] = scratch.data_ptr()
        for result in results:
            data[first] = result.data_ptr()
            first += words_of_a_product
        call(own)
        return results

    def _forms(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Tensors like the results, of one element each: `torch.empty` takes twice the time of `torch.empty_like`."""
        return [
            torch.empty((), dtype=torch.float32 if is_wide else x.dtype).expand(*x.shape[:-1], count)
            for count, is_wide in zip(self._rows, self._is_wide, strict=True)
        ]

    def _template(self, threads: int, rows: int, dtype: torch.dtype) -> tuple[array[int], int, int]:
        """The words of `_joint_kernels.py` without addresses of a call; bytes of scratch; place of the first result."""
        from rabbitllm.quant import _integers, _joint_kernels

        team = torchs_team()
        assert team is not None
        nbytes = sum(piece.nbytes for piece in self._pieces)
        threads = min(threads, -(-nbytes // _kernels.WORTH_A_THREAD[CODES]))
        size, layouts, inputs = 0, list[object](), list[int]()
        for piece in self._pieces:
            layout = piece.layout
            if layout in layouts:
                continue
            layouts.append(layout)
            floats = size + round_up(2 * rows * self._columns, _ALIGNMENT)
            inputs += [layout.step, layout.group, layout.order_address, size, floats]
            size = floats + round_up(4 * rows * (self._columns // layout.step) * (1 + layout.groups), _ALIGNMENT)
        products = list[int]()
        for piece, is_wide in zip(self._pieces, self._is_wide, strict=True):
            is_float = is_wide or dtype == torch.float32
            function, _, tile = _kernels.kernel(CODES, piece.scheme, INTEGERS)
            sums = -1 if is_float else size
            count = piece.words[-1]
            size += 0 if is_float else round_up(4 * rows * count, _ALIGNMENT)
            share = round_up(-(-count // threads), tile)  # no tile is divided
            in_team = (team.thread_number, team.thread_count) if threads > 1 else (0, 0)
            products += [function, layouts.index(piece.layout), sums, 0, *in_team, share, 1, *piece.words]
        _, each = _joint_kernels.addresses()
        head = [0, 0, 0, team.parallel, each, threads, _integers.rounding()[0]]
        head += [len(layouts), len(self._pieces), int(dtype == torch.bfloat16), rows, self._columns]
        first = len(head) + len(inputs) + _joint_kernels.BEFORE_PIECE - 1
        return array("q", [*head, *inputs, *products]), size, first


@functools.cache
def _compiled() -> tuple[Callable[[int], None], int]:
    """A function of Python that calls the compiled one, and the words of a product."""
    from rabbitllm.quant import _joint_kernels

    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_joint_kernels.addresses()[0])
    return call, _joint_kernels.PRODUCT_WORDS


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
