"""Trials of a kernel for products before it is used: the samples, and the tolerated error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rabbitllm.quant.compression import BLOCKS, CODES_A_BYTE, Quantized

if TYPE_CHECKING:
    import torch

    Product = Callable[[Quantized, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

TOLERANCE = 1e-5
"""Maximum error relative to the norm of a product: float32 sums of thousands of terms, in another order."""


def meaning(scheme: str) -> torch.Tensor:
    """Values of codes that every kind of table represents exactly: float32, (16,) or (256,)."""
    import torch

    if scheme == "4bit":
        return torch.tensor([(code - 8) / 8 for code in range(16)])
    return torch.tensor([(code - 127) / 128 / (1 << abs(code - 127).bit_length() % 4) for code in range(256)])


def first_error(products: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """The relative error (of norms) of the first product that exceeds `TOLERANCE`; None if none does.

    Args:
        products: the kernel's result and the correct one, for each product.
    """
    for got, expected in products:
        error = float((got - expected).norm() / expected.norm())
        if not error < TOLERANCE:  # true for NaN too
            return error
    return None


def of_codes(
    scheme: str, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]], product: Product
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Products with random codes: the kernel's result, and the result of indexing and float32.

    Args:
        scheme: "4bit" or "8bit".
        dtype: of the inputs.
        shapes: inputs T, rows N and columns K of each product.
        product: the kernel; takes a form (N, K), codes (uint8, one-dimensional), scales (float32, one per block), the
            values of the codes, and inputs (T, K); returns (T, N).
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    values = meaning(scheme)
    for inputs, rows, columns in shapes:
        elements = rows * columns
        codes = torch.randint(0, 256, (elements // CODES_A_BYTE[scheme],), dtype=torch.uint8, generator=generator)
        scales = torch.rand(-(-elements // BLOCKS[scheme]), generator=generator)
        x = torch.randn(inputs, columns, generator=generator).to(dtype)
        apart = torch.stack([codes >> 4, codes & 15], -1).view(-1) if scheme == "4bit" else codes
        matrix = (values[apart.long()] * scales.repeat_interleave(BLOCKS[scheme])[:elements]).view(rows, columns)
        yield product(Quantized(scheme, (rows, columns), "float32"), codes, scales, values, x), x.float() @ matrix.T
