"""Random tensors, by which kernels and the classes of models are tried before they are used or replaced."""

from __future__ import annotations

import torch


class RandomTensors:
    """Makes random tensors on the CPU, whatever torch's default device and dtype are: the same ones for a seed.

    The random numbers of the program that loads a model are left alone.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Of the normal distribution, around 0."""
        return torch.randn(shape, dtype=torch.float32, generator=self._generator, device="cpu").to(dtype)

    def positive(self, *shape: int, least: float = 0.5, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """From `least` to 1 more than that, all alike."""
        uniform = torch.rand(shape, dtype=torch.float32, generator=self._generator, device="cpu")
        return (uniform + least).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """From `low` to `high - 1`, all alike."""
        return torch.randint(low, high, shape, dtype=dtype, generator=self._generator, device="cpu")
