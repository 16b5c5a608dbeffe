"""The model of transformers that GGUF files have, and which of its tensors each tensor of the files becomes.

transformers' own tables and functions make the config, the names and the operations on each tensor; they get a small
file with the same metadata and no data (`formats.gguf.outline`). An operation is recognised by its result on a probe: a
tensor of one column whose elements are the numbers of its rows. So the un-permutation of Llama's Q and K, a
transposition, a norm less one, the order of Qwen 3.5's heads, and the halves of fused experts are found without a table
here. They become strides, elementwise changes, pieces, and tensors of single experts, which a split carries out.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rabbitllm.base.building import BUILDING
from rabbitllm.base.terminal import error_line
from rabbitllm.errors import CorruptShardError, UnknownArchitectureError, UnreadableFormatError
from rabbitllm.formats.bounded import short
from rabbitllm.formats.gguf_types import TENSOR_TYPES
from rabbitllm.formats.tensor_spec import DTYPES, StoredBlocks, TensorPiece, TensorSpec, ValueChange, byte_size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

OUTLINE = "outline.gguf"
"""Name of the small file in its folder."""
MAX_PROBE = 1 << 24
"""Elements of a tensor that an operation is tried on as a whole, if it cannot be tried on one column or row."""
MAX_RUNS = 1024
"""Pieces of a tensor whose rows are in another order, such as the heads of keys and values."""
ORIGINAL = "Use the model's original weights (safetensors), which RabbitLLM splits and compresses itself."


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the model, or a piece of one, that elements of a tensor in a file become.

    Attributes:
        name: the checkpoint's name by transformers.
        shape: its shape; of a piece, that of the piece.
        first: its first element in the file's tensor.
        strides, view: as in `TensorSpec`, in elements of the file's tensor.
        change: operation on each element.
        piece: its part of a larger tensor.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0
    strides: tuple[int, ...] | None = None
    view: tuple[int, ...] | None = None
    change: ValueChange = ValueChange.NONE
    piece: TensorPiece | None = None

    def spec(self, stored: TensorSpec, dtype: str, *, may_stay: bool = True) -> TensorSpec:
        """The specification of the tensor, read from `stored`.

        Args:
            stored: the tensor of the file.
            dtype: of the tensor, if it has to be converted.
            may_stay: whether it keeps its blocks, or its floating dtype: llama.cpp writes vectors in float32 into every
                file. Halves that several tensors make have `dtype` in any case.
        """
        blocks = stored.blocks
        ggml = blocks.kind if blocks is not None else TENSOR_TYPES[stored.dtype]
        if may_stay and blocks is None and (self.piece is None or self.piece.dim == 0):
            dtype = stored.dtype if self.change is ValueChange.NONE else "F32"
        elements = math.prod(self.shape)
        offset = stored.offset + self.first // ggml.elements * ggml.nbytes
        is_plain = ggml.dtype == dtype and self.change is ValueChange.NONE
        if not DTYPES[stored.dtype].quantizable:  # integers are taken as they are
            is_plain, dtype = True, stored.dtype
        raw = None if is_plain else StoredBlocks(ggml, elements // ggml.elements * ggml.nbytes, self.change, may_stay)
        nbytes = byte_size(dtype, self.shape)
        return TensorSpec(
            self.name, dtype, self.shape, stored.file, offset, nbytes, self.strides, self.view, self.piece, raw
        )


def read_gguf_model(
    folder: Path,
    architecture: str,
    tokens: int | None,
    shapes: Mapping[str, tuple[int, ...]],
    file: str,
    complete: Callable[[Any], None],
) -> GgufModel:
    """The model that the metadata in a folder's outline describe.

    Args:
        folder: it.
        architecture: llama.cpp's name.
        tokens: length of the vocabulary.
        shapes: of the tensors by their names in the files.
        file: name of the first file, for messages.
        complete: sets entries of the config that transformers does not read.

    Raises:
        UnknownArchitectureError: transformers does not read this architecture from GGUF.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    from rabbitllm.checkpoints.transformers_gguf import (
        GGUF_ARCHS,
        get_gguf_config,
        load_gguf_checkpoint,
        read_gguf_metadata,
    )

    operations: _ProcessorOperations | _TransformOperations
    try:
        if architecture in GGUF_ARCHS:
            metadata, names = read_gguf_metadata(str(folder / OUTLINE))
            settings = get_gguf_config({"tokenizer.ggml.tokens": tokens, **metadata}, names)
            if heads := metadata.get(f"{architecture}.nextn_predict_layers"):
                settings["mtp_num_hidden_layers"] = heads
            config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
            operations = _TransformOperations(GGUF_ARCHS[architecture](config))
        else:
            with _without_warnings("transformers.modeling_gguf_pytorch_utils"):  # of the vocabulary, which is left out
                settings = load_gguf_checkpoint(str(folder / OUTLINE), return_tensors=False)["config"]
            if tokens is not None:
                settings.setdefault("vocab_size", tokens)
            config_class = CONFIG_MAPPING[settings["model_type"]]
            config = config_class.from_dict(settings | _config_entries_by_shapes(shapes, config_class().to_dict()))
            operations = _processor_operations(architecture, settings)
        complete(config)
        return GgufModel(config, operations, file)
    except (UnknownArchitectureError, UnreadableFormatError, CorruptShardError):
        raise
    except Exception as error:  # metadata of strangers make transformers raise any error
        raise UnknownArchitectureError(
            f"transformers {transformers.__version__} cannot read {file}, of architecture {short(architecture)}, from "
            f"GGUF: {error_line(error)}",
            f"{ORIGINAL} Nothing was changed.",
        ) from error


def stored_shapes(config: Any, architecture: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a GGUF file with a model: name -> shape, in the order of the model.

    Args:
        config: of transformers, of a class that it also makes from GGUF metadata.
        architecture: llama.cpp's name.
    """
    return GgufModel(config, _processor_operations(architecture, config.to_dict()), "").stored_shapes()


_BIASES = {".attn_output.bias": "attention_bias", ".ffn_down.bias": "mlp_bias"}
"""Ending of a tensor -> the entry of configs that says whether there are such tensors."""


def _config_entries_by_shapes(shapes: Mapping[str, tuple[int, ...]], usual: Mapping[str, Any]) -> dict[str, int]:
    """Entries of a config that transformers does not read from all metadata, but the names and shapes of tensors say.

    Args:
        shapes: of the tensors.
        usual: a config of the same class without entries of its own.
    """
    entries: dict[str, int] = {}
    for name, shape in shapes.items():
        entry = next((entry for ending, entry in _BIASES.items() if name.endswith(ending)), None)
        if entry is not None and usual.get(entry) is False:
            entries[entry] = True
        if name.endswith(".attn_k_norm.weight") and len(shape) == 1:
            entries["head_dim"] = shape[0]
        elif name.endswith(".ffn_down_exps.weight") and len(shape) == 3:
            entries["moe_intermediate_size"] = shape[2]
    return entries


# transformers has two loaders, each for other architectures: processors with a map of all names, and the transforms
# that it uses for safetensors too. Both are applied to a probe.


class _Applied(NamedTuple):
    """The result of an operation: a parameter's name, its values, and whether several tensors may make it."""

    target: str
    values: npt.NDArray[Any]
    is_joined: bool


class _ProcessorOperations:
    """Names and operations by the processor of an architecture.

    Args:
        processor: of transformers.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.names: dict[str, str] = {}
        """GGUF name -> name of the model."""

    def read_names(self, model: Any, config: Any) -> None:
        """Find the names of a model's parameters."""
        from rabbitllm.checkpoints.transformers_gguf import get_gguf_hf_weights_map

        self.names = get_gguf_hf_weights_map(_ModuleNames(model, config), self._processor)

    def apply(self, name: str, probe: npt.NDArray[Any]) -> _Applied | None:
        """The result for a tensor; None if the model has no use for it, or it has several results."""
        parsed: dict[str, Any] = {"tensors": {}, "config": {}}
        try:
            result = self._processor.process(
                weights=probe, name=name, tensor_key_mapping=self.names, parsed_parameters=parsed
            )
        except KeyError:  # it has no name in the model
            return None
        if result.name is None:
            [(target, values)] = parsed["tensors"].items()
            return _Applied(target, values.numpy(), is_joined=len(probe.shape) == 3)
        return _Applied(self.names[result.name], result.weights, is_joined=False) if result.name in self.names else None


def _processor_operations(architecture: str, config: Mapping[str, Any]) -> _ProcessorOperations:
    from rabbitllm.checkpoints.transformers_gguf import TENSOR_PROCESSORS, TensorProcessor

    return _ProcessorOperations(TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config))


_OF_HEADS = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
_OF_HEADS |= {"shared_head_norm": "norm"}
"""llama.cpp's name of a tensor beside the layer of a head for multi-token prediction -> Qwen's."""


class _TransformOperations:
    """Names and operations by transforms, as of other checkpoints.

    Args:
        transforms: of transformers: renamings, which follow each other, and converters, of which one is used.
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        from rabbitllm.checkpoints.transformers_gguf import WeightRenaming

        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if not isinstance(entry, WeightRenaming)]
        self.names: dict[str, str] = {}
        """Unknown: nothing is written with these."""
        self._parameters: frozenset[str] = frozenset()

    def read_names(self, model: Any, config: Any) -> None:
        """Find the names of a model's parameters."""
        self._parameters = frozenset(model.state_dict())

    def apply(self, name: str, probe: npt.NDArray[Any]) -> _Applied | None:
        """As `_ProcessorOperations.apply`; of tensors that are joined the others are zeros."""
        import torch

        from rabbitllm.checkpoints.transformers_gguf import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters)
        if target.startswith("mtp.nextn."):
            part = target.split(".")[2]
            values = probe if part == "eh_proj" else probe - 1  # norms are stored plus one
            return _Applied(f"mtp.{_OF_HEADS[part]}.weight", values, is_joined=False) if part in _OF_HEADS else None
        if target.startswith("mtp."):
            target = f"mtp.layers.0.{target.removeprefix('mtp.')}"
        elif target not in self._parameters:
            return None
        tensor = torch.from_numpy(probe)
        entry = next((converter for converter in self._converters if pattern in converter.source_patterns), None)
        if entry is None:
            return _Applied(target, probe, is_joined=probe.ndim == 3)
        tensors = {key: tensor if key == pattern else torch.zeros_like(tensor) for key in entry.source_patterns}
        for operation in entry.operations:
            outputs = operation.convert(tensors, source_patterns=[*tensors], target_patterns=[target])
            tensors = {target: next(iter(outputs.values()))}
        return _Applied(target, tensors[target].numpy(), is_joined=len(entry.source_patterns) > 1)


class GgufModel:
    """A model of transformers, its names in GGUF files, and the operations on its tensors."""

    def __init__(self, config: Any, operations: _ProcessorOperations | _TransformOperations, file: str) -> None:
        self.config = config
        self._operations = operations
        self._file = file
        self._class = _class_of(config)
        with BUILDING:
            self._experts = self._read_names()
        self._found: dict[tuple[str, tuple[int, ...]], tuple[Target, ...]] = {}

    def config_json(self, dtype: str) -> dict[str, Any]:
        """The content of a config.json."""
        content: dict[str, Any] = self.config.to_diff_dict()
        content["architectures"] = [self._class.__name__]
        content["dtype"] = DTYPES[dtype].torch_name
        content.pop("_name_or_path", None)
        return content

    def _read_names(self) -> dict[str, tuple[str, ...]]:
        """Read all names; ending of a fused parameter -> patterns of its experts' names."""
        import torch
        from transformers import Concatenate, MergeModulelist, WeightConverter

        from rabbitllm.checkpoints.transformers_gguf import get_model_conversion_mapping

        with torch.device("meta"):
            model = self._class(self.config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._operations.read_names(model, self.config)
        experts = {}
        for entry in get_model_conversion_mapping(model):
            operations = [type(operation) for operation in getattr(entry, "operations", ())]
            if isinstance(entry, WeightConverter) and operations in ([MergeModulelist], [MergeModulelist, Concatenate]):
                experts[entry.target_patterns[0]] = tuple(entry.source_patterns)
        return experts

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a file with this model: name -> shape, in the order of the model."""
        shapes = {}
        for name, target in self._operations.names.items():
            if target not in self._shapes or (name == "output.weight" and self.config.tie_word_embeddings):
                continue
            shape = self._shapes[target]
            ending = next((suffix for suffix in self._experts if target.endswith(suffix)), None)
            if ending is not None:
                experts, rows, *columns = shape
                shape = (experts, rows // len(self._experts[ending]), *columns)
            shapes[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = shape
        return shapes

    def targets(self, name: str, shape: tuple[int, ...]) -> tuple[Target, ...]:
        """The tensors of the model that a tensor of a file becomes; none if the model has no use for it.

        Raises:
            UnreadableFormatError: transformers does something to it that is not known here.
        """
        if (name, shape) not in self._found:
            self._found[name, shape] = tuple(self._targets(name, shape))
        return self._found[name, shape]

    def _targets(self, name: str, shape: tuple[int, ...]) -> Sequence[Target]:
        import numpy as np

        probes = [shape]
        if len(shape) > 1:
            probes = [(*shape[:-1], 1), *([(1, shape[1])] if len(shape) == 2 else []), *probes]
        for probed in dict.fromkeys(probes):
            if math.prod(probed) > MAX_PROBE and probed == shape and len(probes) > 1:
                continue
            try:
                with np.errstate(all="ignore"):
                    result = self._operations.apply(name, _probe(probed))
            except (ValueError, IndexError, RuntimeError):  # it needs more of the tensor
                continue
            if result is None:
                return ()
            if result.is_joined:
                return self._joined(name, shape, probed, result)
            return self._one(name, shape, probed, result)
        raise self._refused(name, shape)

    def _refused(self, name: str, shape: tuple[int, ...]) -> UnreadableFormatError:
        return UnreadableFormatError(
            f"{self._file}: transformers converts the tensor {name} of shape {shape} in an unsupported way.",
            f"{ORIGINAL} Nothing was changed.",
        )

    def _joined(self, name: str, shape: tuple[int, ...], probed: tuple[int, ...], result: _Applied) -> list[Target]:
        """The targets of a tensor of all experts."""
        import numpy as np

        values, rows = result.values, shape[1]
        # of a half of a fused tensor the other half is zero
        begin = next((row for row in range(0, values.shape[1], rows) if values[0, row, 0]), 0)
        if values.shape[1] % rows or not np.array_equal(values[:, begin : begin + rows], _probe(probed)):
            raise self._refused(name, shape)
        return self._expert_targets(result.target, shape, values.shape[1], begin)

    def _expert_targets(self, target: str, shape: tuple[int, ...], rows: int, begin: int) -> list[Target]:
        """One target for each expert by the names in published checkpoints; or one for all, if there are none."""
        experts, expert_rows, columns = shape
        ending = next((suffix for suffix in self._experts if target.endswith(suffix)), None)
        if ending is None or len(self._experts[ending]) != rows // expert_rows:
            piece = None if rows == expert_rows else TensorPiece(target, (experts, rows, columns), 1, begin)
            return [Target(target if piece is None else f"{target}.{begin}", shape, piece=piece)]
        pattern = target.removesuffix(ending) + self._experts[ending][begin // expert_rows]
        return [
            Target(pattern.replace("*", str(expert)), (expert_rows, columns), expert * expert_rows * columns)
            for expert in range(experts)
        ]

    def _one(self, name: str, shape: tuple[int, ...], probed: tuple[int, ...], result: _Applied) -> list[Target]:
        """The targets of a tensor whose elements are changed one by one, and may be in another order."""
        values, change_and_order = result.values, _order_of(result.values)
        if change_and_order is None or values.size != math.prod(probed):
            raise self._refused(name, shape)
        change, order = change_and_order
        steps, is_row = _strides_of(order), probed != shape and probed == (1, shape[-1])
        columns = shape[-1] if len(shape) > 1 and probed != shape and not is_row else 1
        if len(shape) == 2 and columns > 1 and probed[0] > 1 and values.shape == probed[::-1]:
            return [Target(result.target, shape[::-1], 0, (1, columns), shape[::-1], change)]
        if (columns > 1 and values.shape[-1] != 1) or (is_row and (values.shape != probed or steps is None)):
            raise self._refused(name, shape)
        target_shape = (*values.shape[:-1], values.shape[-1] * columns) if values.shape else ()
        if steps is None:
            return self._in_runs(name, shape, Target(result.target, target_shape, change=change), order)
        sizes, strides = steps
        if is_row:
            target_shape, sizes, strides = shape, (shape[0], *sizes), (shape[1], *strides)
        if len(sizes) <= 1 + is_row:  # in the order of the file
            return [Target(result.target, target_shape, change=change)]
        if columns > 1:
            sizes, strides = (*sizes, columns), (*(stride * columns for stride in strides), 1)
        return [Target(result.target, target_shape, 0, strides, sizes, change)]

    def _in_runs(self, name: str, shape: tuple[int, ...], whole: Target, order: npt.NDArray[np.int64]) -> list[Target]:
        """The pieces of a tensor whose rows are in an order without strides: runs of rows, all of one length."""
        import numpy as np

        run = int(np.gcd.reduce([order.size, *(np.flatnonzero(np.diff(order) != 1) + 1)]))
        if order.size != whole.shape[0] or order.size // run > MAX_RUNS:
            raise self._refused(name, shape)
        inner = whole.shape[1:]
        return [
            Target(
                f"{whole.name}.{begin}",
                (run, *inner),
                int(order[begin]) * math.prod(inner),
                change=whole.change,
                piece=TensorPiece(whole.name, whole.shape, 0, begin),
            )
            for begin in range(0, order.size, run)
        ]


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Silence a logger meanwhile."""
    silenced, refuse = logging.getLogger(name), lambda record: False
    with BUILDING:
        silenced.addFilter(refuse)
        try:
            yield
        finally:
            silenced.removeFilter(refuse)


class _ModuleNames:
    """A module by the names of its parameters, as `get_gguf_hf_weights_map` asks for them.

    Of a module within a module that function finds nothing, and takes a tenth of a second each.
    """

    def __init__(self, module: Any, config: Any, depth: int = 1) -> None:
        self.config = config
        self._module = module
        self._depth = depth

    def state_dict(self) -> Iterable[str]:
        return list(self._module.state_dict())

    def named_children(self) -> list[tuple[str, _ModuleNames]]:
        if not self._depth:
            return []
        return [
            (name, _ModuleNames(child, self.config, self._depth - 1)) for name, child in self._module.named_children()
        ]


def _probe(shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """The numbers of its elements from 1, negated: the logarithm of their negatives exists."""
    import numpy as np

    return -(1.0 + np.arange(math.prod(shape), dtype=np.float64)).reshape(shape)


def _order_of(values: npt.NDArray[Any]) -> tuple[ValueChange, npt.NDArray[np.int64]] | None:
    """The elementwise change, and the index of each element in the file, of the result of an operation on a probe."""
    import numpy as np

    flat = np.asarray(values, np.float64).ravel()
    if not flat.size or not np.isfinite(flat).all():
        return None
    back: dict[ValueChange, Callable[[], npt.NDArray[np.float64]]] = {
        ValueChange.NONE: lambda: -flat - 1,
        ValueChange.MINUS_ONE: lambda: -flat - 2,
        ValueChange.LOG_OF_NEGATIVE: lambda: np.round(np.exp(np.clip(flat, -1, 40))).astype(np.float64) - 1,
    }
    for change, undo in back.items():
        order = undo()
        if np.array_equal(np.sort(order), np.arange(flat.size)):
            return change, order.astype(np.int64)
    return None


def _strides_of(order: npt.NDArray[np.int64]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and strides of a view that has its elements in this order; None if there is no such view."""
    import numpy as np

    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    while order.size > 1:
        step = order[1] - order[0]
        breaks = np.flatnonzero(np.diff(order) != step)
        run = int(breaks[0]) + 1 if breaks.size else order.size
        if step <= 0 or order.size % run:
            return None
        rows = order.reshape(-1, run)
        if not (rows == rows[:, :1] + step * np.arange(run)).all():
            return None
        sizes, strides = (run, *sizes), (int(step), *strides)
        order = rows[:, 0]
    return sizes, strides


def _class_of(config: Any) -> Any:
    """The class of transformers for a config."""
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    for name in getattr(config, "architectures", None) or ():
        if isinstance(model_class := getattr(transformers, str(name), None), type):
            return model_class
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(f"transformers has no text-generating model of type {config.model_type!r}")
