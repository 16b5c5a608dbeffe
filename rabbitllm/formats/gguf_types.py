"""The types of tensors in GGUF files: numbers, names and sizes.

Source: https://github.com/ggml-org/ggml, `enum ggml_type` in `include/ggml.h`, and `src/ggml-common.h`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensors.

    Attributes:
        number: in the file.
        name: of ggml.
        elements, nbytes: of a block; an element of a type that is not quantized is a block.
        dtype: the safetensors dtype of a type that is not quantized; None for blocks of codes.
    """

    number: int
    name: str
    elements: int
    nbytes: int
    dtype: str | None = None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row.

        Raises:
            ValueError: it does not consist of whole blocks.
        """
        if columns % self.elements:
            raise ValueError(
                f"a row of {columns} elements is not a multiple of {self.elements}, the block size of {self.name}"
            )
        return columns // self.elements * self.nbytes


_ALL = (
    TensorType(0, "F32", 1, 4, "F32"),
    TensorType(1, "F16", 1, 2, "F16"),
    TensorType(2, "Q4_0", 32, 18),
    TensorType(3, "Q4_1", 32, 20),
    TensorType(6, "Q5_0", 32, 22),
    TensorType(7, "Q5_1", 32, 24),
    TensorType(8, "Q8_0", 32, 34),
    TensorType(10, "Q2_K", 256, 84),
    TensorType(11, "Q3_K", 256, 110),
    TensorType(12, "Q4_K", 256, 144),
    TensorType(13, "Q5_K", 256, 176),
    TensorType(14, "Q6_K", 256, 210),
    TensorType(16, "IQ2_XXS", 256, 66),
    TensorType(17, "IQ2_XS", 256, 74),
    TensorType(18, "IQ3_XXS", 256, 98),
    TensorType(19, "IQ1_S", 256, 50),
    TensorType(20, "IQ4_NL", 32, 18),
    TensorType(21, "IQ3_S", 256, 110),
    TensorType(22, "IQ2_S", 256, 82),
    TensorType(23, "IQ4_XS", 256, 136),
    TensorType(24, "I8", 1, 1, "I8"),
    TensorType(25, "I16", 1, 2, "I16"),
    TensorType(26, "I32", 1, 4, "I32"),
    TensorType(27, "I64", 1, 8, "I64"),
    TensorType(28, "F64", 1, 8, "F64"),
    TensorType(29, "IQ1_M", 256, 56),
    TensorType(30, "BF16", 1, 2, "BF16"),
    TensorType(34, "TQ1_0", 256, 54),
    TensorType(35, "TQ2_0", 256, 66),
    TensorType(39, "MXFP4", 32, 17),
    TensorType(40, "NVFP4", 64, 36),
)
TENSOR_TYPES = {entry.name: entry for entry in _ALL}
"""By name. Q8_1 and Q8_K are for inputs only, never in files; Q1_0 has no decoder in the package `gguf` 0.19."""
BY_NUMBER = {entry.number: entry for entry in _ALL}
BLOCK_TYPES = {entry.name: entry for entry in _ALL if entry.dtype is None}
"""The quantized ones."""
