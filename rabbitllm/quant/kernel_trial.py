"""On what a kernel for products is tried before it is used, and how far it may be off. Knows no kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rabbitllm.quant.compression import BLOCKS, CODES_A_BYTE, Quantized

if TYPE_CHECKING:
    import torch

    Product = Callable[[Quantized, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

TOLERANCE = 1e-5
"""Of the norm of a product: sums of thousands in float32, in another order."""


def meaning(scheme: str) -> torch.Tensor:
    """What codes may mean so that every kind of table has it as it is: float32, (16,) or (256,)."""
    import torch

    if scheme == "4bit":
        return torch.tensor([(code - 8) / 8 for code in range(16)])
    return torch.tensor([(code - 127) / 128 / (1 << abs(code - 127).bit_length() % 4) for code in range(256)])


def first_error(products: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """The norm of what a kernel is off by over that of what is right, where first that is too much; None if nowhere.

    Args:
        products: each as the kernel gives it, and as it is.
    """
    for got, expected in products:
        error = float((got - expected).norm() / expected.norm())
        if not error < TOLERANCE:  # so that no number counts as off
            return error
    return None


def of_codes(
    scheme: str, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]], product: Product
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Products with made-up codes, each as a kernel gives it, and as indexing and float32 do.

    Args:
        scheme: "4bit" or "8bit".
        dtype: of the inputs.
        shapes: inputs T, rows N and columns K of each.
        product: the kernel, of a form (N, K), its codes (uint8, one-dimensional), scales (float32, one a block), what
            the codes mean, and inputs (T, K): (T, N).
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
