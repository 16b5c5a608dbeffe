"""A checkpoint's own shards instead of layer files, for `split=False`: nothing is written, nothing is compressed.

The engine needs only the offset of each tensor, not one file per layer. Two properties of a split are missing:
tensors begin where the checkpoint's writer put them, so unaligned ones are copied when they are used; and the tensors
of a layer may be spread over a file, or over several.
"""

from __future__ import annotations

from pathlib import Path

from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import MissingShardError, UnreadableFormatError
from rabbitllm.formats.safetensors_file import MappedFile
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_store import Maps, StoredTensor


class UnsplitStore:
    """The shards of a local checkpoint, opened for reading: only headers are read.

    Attributes:
        folder: the checkpoint.
        tensors: name -> stored tensor.
        checks: none; a checkpoint's shards have no checksums.
    """

    is_split = False
    checks: LayerChecks | None = None

    def __init__(self, checkpoint: LocalCheckpoint) -> None:
        """
        Raises:
            MissingShardError: a shard is missing.
            UnreadableFormatError: a tensor is not contiguous, so the checkpoint has to be split first.
            CheckpointError: see `read_shard_header`.
        """
        self.folder = checkpoint.folder
        self.label = checkpoint.label
        self.tensors: dict[str, StoredTensor] = {}
        self._maps = Maps(checkpoint.folder)
        owner = checkpoint.index.weight_map
        for shard in checkpoint.index.shards:
            path = self.path(shard)
            if not path.exists():
                raise MissingShardError(
                    f"{path} is missing, which the index names.", "Put it there, or fetch the checkpoint again."
                )
            header = checkpoint.taken_from(shard, read_shard_header(path, shard))
            self._maps.add(shard, header)
            for spec in header.tensors:
                if owner.get(spec.name, shard) == shard:
                    self.tensors[spec.name] = StoredTensor(spec.name, (_in_one_run(spec),), None)

    def mapped(self, file: str) -> MappedFile:
        """A shard, mapped."""
        return self._maps.mapped(file)

    def path(self, file: str) -> Path:
        """A shard's path."""
        return self._maps.path(file)


def _in_one_run(spec: TensorSpec) -> TensorSpec:
    if spec.strides is not None or spec.piece is not None:
        raise UnreadableFormatError(
            f"{spec.file} has the tensor {spec.name!r} at strides or as a piece of a larger one; without a split only "
            "tensors that lie in one run of bytes are read.",
            "Leave split=False out: the split puts them in order.",
        )
    return spec
