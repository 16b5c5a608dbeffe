"""The inspection of a name: a file, a checkpoint's folder, a split directory or a repository on the hub.

Finds them as a split would and reads headers only; of a repository, by range requests. Writes only small files into
the hub cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rabbitllm import prepare
from rabbitllm.base.options import expand
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardMetadata, is_sidecar
from rabbitllm.checkpoints.fetch import side_by_side
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import ALL_WEIGHT_SUFFIXES
from rabbitllm.errors import CheckpointError, CheckpointNotFoundError, MissingShardError, OptionError, RabbitLLMError
from rabbitllm.models.inspection.files import family_in, layers_of, look_at_file, of_spec
from rabbitllm.models.inspection.records import Inspection, TensorInfo, Tensors, row_major
from rabbitllm.splitter.plan import tensors_by_shard
from rabbitllm.store.layer_store import LayerStore, StoredTensor
from rabbitllm.store.manifest import JOURNAL_NAME, is_finished

HEADER_THREADS = 8
_FILE_SUFFIXES = (*ALL_WEIGHT_SUFFIXES, ".model", ".json")


def look(
    name: str | Path, *, revision: str | None = None, token: str | bool | None = None, opcodes: bool = False
) -> Inspection:
    """The content of a file, folder or repository.

    Args:
        name: a file, a folder, or a repository as `organisation/name`.
        revision: branch, tag or commit of the repository.
        token: access token for the hub.
        opcodes: list the pickles of a file instead of its tensors.

    Returns:
        A record; its `refusal` is the problem with it, if any.

    Raises:
        CheckpointNotFoundError: nothing of that name exists.
        HubError: the hub did not answer.
        OptionError: opcodes of something that is not a file.
    """
    path = expand(name)
    if str(name) and path.exists() and not path.is_dir():
        return look_at_file(path, opcodes=opcodes)
    if opcodes:
        raise OptionError(f"--opcodes lists the pickles of a file, and {name} is none.", "Name one of its files.")
    if path.is_dir() and is_finished(path):
        return _look_at_split(path)
    if path.is_dir() and (path / JOURNAL_NAME).exists():
        raise CheckpointNotFoundError(
            f"{path} is a split that is unfinished; some of its tensors are still in their shards.",
            "Name the checkpoint that it is made from: `rabbitllm plan` says how far it came, and the call that began "
            "it goes on.",
        )
    if not path.is_dir() and path.suffix in _FILE_SUFFIXES:
        raise CheckpointNotFoundError(f"There is no file {str(path)!r}.", "Check the path.")
    return _look_at_checkpoint(str(name), revision, token)


def _look_at_split(folder: Path) -> Inspection:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sizes = {path.name: path.stat().st_size for path in files if path.suffix == ".safetensors"}
    beside = tuple(path.name for path in files if is_sidecar(path.name, path.stat().st_size))
    total = sum(sizes.values())
    try:
        store = LayerStore(folder)
    except RabbitLLMError as error:
        return Inspection(str(folder), "a split directory", total, None, sizes, beside=beside, refusal=error)
    layers, order = layers_of(store.tensors, family_in(folder))
    if store.manifest is not None:
        layers = {tensor: record.id for record in store.manifest.layers for tensor in record.tensors}
        order = tuple(record.id for record in store.manifest.layers)
    content = Tensors(tuple(_stored(tensor, layers[tensor.name]) for tensor in store.tensors.values()), order)
    made = "RabbitLLM 1.1's" if store.manifest is None else f"of {store.manifest.source.name}"
    title = f"a split directory, {store.compression or 'uncompressed'}, {made}"
    return Inspection(str(folder), title, total, content, sizes, beside=beside)


def _stored(tensor: StoredTensor, layer: str) -> TensorInfo:
    first = tensor.parts[0]
    dtype = tensor.quantized.scheme if tensor.quantized is not None else first.dtype
    strides = row_major(tensor.shape)
    return TensorInfo(tensor.name, dtype, tensor.shape, strides, first.offset, tensor.nbytes, layer, first.file)


def _look_at_checkpoint(name: str, revision: str | None, token: str | bool | None) -> Inspection:
    sought = prepare.Sought(name, access=HubAccess(revision, token), only_look=True)
    source = prepare.find(sought)
    checkpoint = prepare.open_weights(source, [source.split_folder])
    if checkpoint is None:
        return _look_at_split(source.split_folder)
    shards = checkpoint.index.shards
    found = dict(zip(shards, side_by_side(lambda s: _facts(checkpoint, s), shards, HEADER_THREADS), strict=True))
    facts = {shard: one for shard, one in found.items() if isinstance(one, ShardMetadata)}
    absent = tuple(shard for shard, one in found.items() if one is None)
    specs = [spec for one in facts.values() for spec in one.header.tensors]
    layers, order = layers_of((spec.name for spec in specs), family_in(source.config_folder))
    commit = source.repository.commit if source.repository is not None else None
    return Inspection(
        name if commit is None else f"{name} at commit {commit}",
        "a checkpoint on the hub" if commit is not None else "a checkpoint",
        sum(one.size for one in facts.values()),
        Tensors(tuple(of_spec(spec, layers[spec.name]) for spec in specs), order),
        {shard: one.size for shard, one in facts.items()},
        absent,
        _sidecars(checkpoint),
        refusal=_refusal(checkpoint, found, facts, absent),
    )


def _facts(checkpoint: Checkpoint, shard: str) -> ShardMetadata | CheckpointError | None:
    """The metadata of a shard, or the error in it; None where the shard is absent."""
    try:
        return checkpoint.facts(shard)
    except CheckpointError as error:
        return error


def _refusal(
    checkpoint: Checkpoint,
    found: Mapping[str, ShardMetadata | CheckpointError | None],
    facts: Mapping[str, ShardMetadata],
    absent: tuple[str, ...],
) -> CheckpointError | None:
    """The error that a split would raise: an unsound shard, missing shards, or an unsound index."""
    broken = next((one for one in found.values() if isinstance(one, CheckpointError)), None)
    if broken is not None:
        return broken
    if absent:
        some = ", ".join(absent[:5]) + (" …" if len(absent) > 5 else "")
        return MissingShardError(
            f"{checkpoint.label} lacks {len(absent)} of the {len(found)} shards its index names: {some}.",
            "Put them there, or give the repository they come from.",
        )
    try:
        tensors_by_shard(checkpoint.index, facts.values())
    except CheckpointError as error:
        return error
    return None


def _sidecars(checkpoint: Checkpoint) -> tuple[str, ...]:
    return tuple(sorted(checkpoint.sidecar_sizes()))
