"""Tensors that several open files have a piece of each, or that lie in one in another order: made when asked for.

They are copies, in memory of their own. Knows how pieces make a whole, and nothing of why they were cut.
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
    """Makes tensors of the pieces that files have; asked like a `ShardFile`.

    Args:
        path: what to call it.
        files: the open files by name.
        pieces: tensor name -> what the files have of it, in order.
    """

    def __init__(self, path: Path, files: Mapping[str, ShardFile], pieces: Mapping[str, Sequence[TensorSpec]]) -> None:
        self.path = path
        self._files = files
        self._pieces = pieces

    def viewable(self, spec: TensorSpec) -> bool:
        """Never."""
        return False

    def has_rows(self, spec: TensorSpec) -> bool:
        """No part of a tensor is made without the rest."""
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
        """Never; see `ShardFile.fill`."""
        return False

    def hold_mapping(self) -> None:
        """Copies hold nothing."""

    def close(self) -> None:
        """Closes nothing: the files are closed where they were opened."""
