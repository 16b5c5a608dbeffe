"""Tensors whose pieces are in several open files, or in one file in another order; made when they are used.

They are copies, in memory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.lazy.shard_file import ShardFile

if TYPE_CHECKING:
    import torch


class JoinedFiles:
    """Makes tensors from pieces in files, with the interface of a `ShardFile`.

    Args:
        path: for messages.
        files: the open files by name.
        pieces: tensor name -> its pieces in the files, in order.
    """

    def __init__(self, path: Path, files: Mapping[str, ShardFile], pieces: Mapping[str, Sequence[TensorSpec]]) -> None:
        self.path = path
        self._files = files
        self._pieces = pieces

    def viewable(self, spec: TensorSpec) -> bool:
        """False: such a tensor is always a copy."""
        return False

    def has_rows(self, spec: TensorSpec) -> bool:
        """False: such a tensor is only read whole."""
        return False

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """See `ShardFile.tensor`."""
        import torch

        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            pieces = self._pieces[spec.name]
            parts = [self._part(piece) for piece in pieces]
            cut = pieces[0].piece
            return torch.cat(parts, cut.dim) if cut is not None else parts[0].clone()

    def _part(self, piece: TensorSpec) -> torch.Tensor:
        plain = piece._replace(shape=piece.sizes, view=None, piece=None)
        return self._files[piece.file].tensor(plain).reshape(piece.shape)

    def fill(self, spec: TensorSpec, buffer: memoryview) -> bool:
        """Read nothing; return False, see `ShardFile.fill`."""
        return False

    def hold_mapping(self) -> None:
        """Do nothing: copies use no mapping."""

    def close(self) -> None:
        """Do nothing: the checkpoint closes the files."""
