"""The tensors of a file of `torch.save` as records, for both of its formats.

Independent of either format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rabbitllm.errors import CorruptShardError
from rabbitllm.formats.strided import is_contiguous
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, byte_size
from rabbitllm.formats.torch_pickle import PickledTensor, element_bytes


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """One tensor of such a file.

    Attributes:
        name: its name in the checkpoint. Never a path.
        dtype: a key of `DTYPES`.
        shape: elements along each dimension as torch counts them (two F4 values are one element).
        strides: in elements, one per dimension.
        file: name of the shard, relative to the checkpoint.
        storage: the key of its storage; tensors with one key share bytes.
        storage_begin, storage_end: the storage, bytes from the start of the file.
        offset: of its first element, bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    file: str
    storage: str
    storage_begin: int
    storage_end: int
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements, as torch counts them."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Length in bytes, in row-major order."""
        return self.elements * element_bytes(self.dtype)

    @property
    def contiguous(self) -> bool:
        """Whether its bytes are in row-major order in the file: `nbytes` bytes from `offset`."""
        return is_contiguous(self.shape, self.strides)

    def spec(self) -> TensorSpec:
        """The same tensor as in a safetensors file, but with strides if it is not contiguous.

        Raises:
            CorruptShardError: a scalar or a strided tensor of a dtype smaller than a byte, which cannot be represented.
        """
        shape = self.shape
        if DTYPES[self.dtype].bits < 8:
            if not shape or not self.contiguous:
                what = "strided" if shape else "a scalar"
                raise CorruptShardError(
                    f"{self.file} has a tensor {self.name!r} of {self.dtype} that is {what}; elements smaller than a "
                    "byte are only read where they lie one after the other.",
                    "Save it again as a contiguous tensor of one dimension or more.",
                )
            shape = (*shape[:-1], shape[-1] * 8 // DTYPES[self.dtype].bits)
        assert byte_size(self.dtype, shape) == self.nbytes
        strides = None if self.contiguous else self.strides
        return TensorSpec(self.name, self.dtype, shape, self.file, self.offset, self.nbytes, strides)


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The tensors of such a file.

    Attributes:
        tensors: in the pickle's order.
        left_out: keys of a training checkpoint other than its state dict; they hold no weights.
        size: size of the file in bytes.
    """

    tensors: tuple[TorchTensor, ...]
    left_out: tuple[str, ...]
    size: int


def placed(name: str, tensor: PickledTensor, begin: int, end: int, file: str) -> TorchTensor:
    """A tensor whose storage is at bytes `begin` to `end` of the file."""
    offset = begin + tensor.first * element_bytes(tensor.dtype)
    return TorchTensor(name, tensor.dtype, tensor.shape, tensor.strides, file, tensor.storage.key, begin, end, offset)
