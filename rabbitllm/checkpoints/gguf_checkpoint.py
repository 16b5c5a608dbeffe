"""A checkpoint of GGUF files in transformers' terms: names, shapes, strides, and the files that transformers needs.

transformers' own tables and functions make the config, the tokenizer, the names and the operations on each tensor; they
get a small file with the same metadata and no data (`formats.gguf.outline`). An operation is recognised by its result
on a tensor of one column whose elements are the numbers of its rows: so the un-permutation of Llama's Q and K, a
transposition, a norm less one, the order of Qwen 3.5's heads, and the halves of fused experts are found without a table
here. They become strides, elementwise changes, pieces, and tensors of single experts, which a split carries out.

A set of files is one checkpoint: the first has the metadata. It is therefore used last, so that a split can be resumed
as long as a file is left.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rabbitllm.base.forks import own_lock
from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.gguf_rotary import FACTOR_TENSORS, rope_parameters
from rabbitllm.checkpoints.index import CheckpointIndex, gguf_number
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME, GENERATION_NAME, TOKENIZER_NAMES
from rabbitllm.checkpoints.meta_llama import as_json
from rabbitllm.errors import (
    CorruptShardError,
    CorruptVocabularyError,
    InvalidIndexError,
    MissingShardError,
    UnknownArchitectureError,
    UnreadableFormatError,
)
from rabbitllm.formats.bounded import short
from rabbitllm.formats.gguf import READ_BYTES, GgufArray, GgufFile, outline, strings
from rabbitllm.formats.gguf_types import TENSOR_TYPES
from rabbitllm.formats.tensor_spec import (
    DTYPES,
    Header,
    ReadAt,
    StoredBlocks,
    TensorPiece,
    TensorSpec,
    ValueChange,
    byte_size,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

_DTYPES = {0: "F32", 1: "F16", 32: "BF16"}
"""`general.file_type` -> the dtype of files that are not quantized (gguf.LlamaFileType)."""
MAX_PAIR_BYTES = 1 << 28
"""Limit of the work to find the pairs of a vocabulary without merges: the sum of the squares of the tokens' lengths."""
MAX_PROBE = 1 << 24
"""Elements of a tensor that an operation is tried on as a whole, if it cannot be tried on one column or row."""
MAX_RUNS = 1024
"""Pieces of a tensor whose rows are in another order, such as the heads of keys and values."""
_ORIGINAL = "Use the model's original weights (safetensors), which RabbitLLM splits and compresses itself."
_STOPS = ("eos", "eot", "eom")
_AS_GPT2 = frozenset({"gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion"})
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Names of ways to split text before the merges that transformers lacks. llama.cpp (llama-vocab.cpp) splits like GPT-2,
or sets each digit apart and then splits like GPT-2."""
_BUILDING = own_lock(threading.RLock())


# One tensor of a file, and the tensors of the model that it becomes.


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
        """The specification of the tensor, read from `stored` and converted to `dtype`."""
        blocks = stored.blocks
        kind = blocks.kind if blocks is not None else TENSOR_TYPES[stored.dtype]
        elements = math.prod(self.shape)
        offset = stored.offset + self.first // kind.elements * kind.nbytes
        is_plain = kind.dtype == dtype and self.change is ValueChange.NONE
        if not DTYPES[stored.dtype].quantizable:  # integers are taken as they are
            is_plain, dtype = True, stored.dtype
        held = None if is_plain else StoredBlocks(kind, elements // kind.elements * kind.nbytes, self.change, may_stay)
        nbytes = byte_size(dtype, self.shape)
        return TensorSpec(
            self.name, dtype, self.shape, stored.file, offset, nbytes, self.strides, self.view, self.piece, held
        )


class GgufCheckpoint:
    """The content of such a checkpoint, as far as it is known from headers.

    Args:
        shards: names of all files, used-up ones included, in the order of use.
        files: the headers of those that exist; the one with the metadata must be among them.
        read: reads (offset, length) of that one.
    """

    def __init__(self, shards: Sequence[str], files: Mapping[str, GgufFile], read: ReadAt) -> None:
        self.shards = tuple(shards)
        self.keeps_blocks = True
        self._first = shards[-1]
        self._files = files
        self._read = read
        if self._first not in files:
            raise MissingShardError(
                f"{self._first} is missing; it has the metadata of the model.", "Add the file. Nothing was changed."
            )
        self.metadata = files[self._first].metadata
        for name, file in files.items():
            self._check_part(name, file)
        self.dtype = _DTYPES.get(self._number("general.file_type", -1), "F32")

    def _check_part(self, name: str, file: GgufFile) -> None:
        """Refuse a file that is another part than its name says."""
        count, number = (file.metadata.get(f"split.{key}") for key in ("count", "no"))
        expected = len(self.shards)
        number_in_name = gguf_number(name)
        if expected == 1 and count in (None, 0, 1):
            return
        if count != expected or number_in_name is None or number != number_in_name - 1:
            raise InvalidIndexError(
                f"{name} says that it is file {short(number)} (from 0) of {short(count)}; its name says another.",
                "Download the files again, with their names, or join them with llama-gguf-split --merge.",
            )

    def _number(self, key: str, default: int) -> int:
        found = self.metadata.get(key, default)
        return found if isinstance(found, int) else default

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise CorruptShardError(
                f"{self._first} has no general.architecture in its metadata.", "Download or copy the file again."
            )
        return found

    def taken_from(self, shard: str, header: Header) -> Header:
        """The header that a split uses for a file: the tensors of the model, in the order of the file.

        Raises:
            UnknownArchitectureError, UnreadableFormatError, CorruptShardError: transformers cannot read it.
        """
        specs, left_out = [], []
        for stored in header.tensors:
            targets = self._model.targets(stored.name, stored.shape)
            specs += [target.spec(stored, self.dtype, may_stay=self.keeps_blocks) for target in targets]
            left_out += [] if targets or stored.name in FACTOR_TENSORS else [stored.name]
        if left_out:
            _warn_of(shard, tuple(left_out))
        return Header(tuple(specs), header.metadata, header.data_start, header.comes_first)

    @property
    def config(self) -> Any:
        """The config of transformers that the metadata describe."""
        return self._model.config

    def targets(self, name: str, shape: tuple[int, ...]) -> tuple[Target, ...]:
        """The tensors of the model that a tensor of a file becomes; none if the model has no use for it.

        Raises:
            UnknownArchitectureError, UnreadableFormatError, CorruptShardError: transformers cannot read it.
        """
        return self._model.targets(name, shape)

    def index(self) -> CheckpointIndex:
        """The index of all files that exist."""
        weight_map: dict[str, str] = {}
        for shard in self.shards:
            if shard in self._files:
                weight_map |= {spec.name: shard for spec in self.taken_from(shard, self._files[shard].header).tensors}
        return CheckpointIndex(weight_map, self.shards)

    def derived(self, sidecars: Collection[str]) -> dict[str, bytes]:
        """Config, tokenizer and chat template for transformers: name -> content.

        Args:
            sidecars: names of existing files; a tokenizer that is there is used if the metadata's cannot be.
        """
        # A quantized file does not say the dtype of its model. Nearly all are published in bfloat16, and float32 takes
        # twice the memory and, where pairs of bfloat16 are multiplied, twice the time.
        is_quantized = self._number("general.file_type", -1) not in _DTYPES
        computed = "BF16" if is_quantized and self.keeps_blocks else self.dtype
        files = {CONFIG_NAME: as_json(self._model.config_json(computed))}
        files[GENERATION_NAME] = as_json(self._generation())
        if "tokenizer.ggml.model" in self.metadata and not (
            set(TOKENIZER_NAMES) & set(sidecars) and self._tokenizer_is_unknown()
        ):
            files |= _kept((self._key, "tokenizer"), self._tokenizer)
        return files

    @functools.cached_property
    def _key(self) -> str:
        """A digest of the metadata, and of the names and shapes of the tensors."""
        digest, end = hashlib.sha256(), self._files[self._first].entries_end
        for at in range(0, end, READ_BYTES):
            digest.update(self._read(at, min(READ_BYTES, end - at)))
        for name in sorted(self._files):
            digest.update(repr([(spec.name, spec.shape) for spec in self._files[name].header.tensors]).encode())
        for name, factors in self._factors.items():
            digest.update(name.encode() + factors.tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _factors(self) -> dict[str, npt.NDArray[np.float32]]:
        """The tensors of divisors of rotary frequencies; they belong to the config, so that they are read at once."""
        import numpy as np

        found = {}
        for shard, file in self._files.items():
            for spec in file.header.tensors:
                if spec.name not in FACTOR_TENSORS:
                    continue
                if shard != self._first or spec.blocks is not None or spec.dtype != "F32" or spec.nbytes > READ_BYTES:
                    raise UnreadableFormatError(
                        f"{shard} has {spec.name} as {spec.dtype} of shape {spec.shape}; expected F32 of at most "
                        f"{READ_BYTES:,} bytes in {self._first}.",
                        f"Join the files with llama-gguf-split --merge. {_ORIGINAL}",
                    )
                found[spec.name] = np.frombuffer(self._read(spec.offset, spec.nbytes), "<f4").reshape(spec.shape)
        return found

    def _generation(self) -> dict[str, Any]:
        """The ids of tokens; also those that end a turn or a message, which llama.cpp stops at too."""
        ids: dict[str, Any] = {}
        for key, name in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
            found = self._number(f"tokenizer.ggml.{key}_token_id", -1)
            ids |= {name: found} if found >= 0 else {}
        stops = [self._number(f"tokenizer.ggml.{key}_token_id", -1) for key in _STOPS]
        if kept := list(dict.fromkeys(stop for stop in stops if stop >= 0)):
            ids["eos_token_id"] = kept[0] if len(kept) == 1 else kept
        return ids

    def _tokenizer_is_unknown(self) -> bool:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import select_tokenizer_builder

        try:
            select_tokenizer_builder(self.architecture, self.metadata.get("tokenizer.ggml.model"))
        except ValueError:
            return True
        return not self._knows_how_text_is_split()

    def _knows_how_text_is_split(self) -> bool:
        """Whether transformers, or `_tokenizer`, splits text before the merges as this vocabulary was made."""
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        kind = self.metadata.get("tokenizer.ggml.pre", "gpt-2")
        known = {*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_DIGITS_FIRST}
        return self.metadata.get("tokenizer.ggml.model") != "gpt2" or kind in known

    def _tokenizer(self) -> dict[str, bytes]:
        self._check_vocabulary()
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # AutoTokenizer first reads the whole vocabulary by slower code, to choose a class that, of decoders, makes the
        # same tokenizer.json: 45 of 55 seconds for the 262,000 tokens of Gemma 3
        maker = AutoTokenizer if self._model.is_encoder_decoder else PreTrainedTokenizerFast
        with self._outline() as folder, tempfile.TemporaryDirectory(prefix="rabbitllm-tokenizer-") as made:
            try:
                maker.from_pretrained(folder, gguf_file=_OUTLINE).save_pretrained(made)
            except Exception as error:  # a vocabulary of strangers makes transformers raise any error
                raise CorruptVocabularyError(
                    f"transformers cannot make a tokenizer of the metadata of {self._first}: {_line(error)}",
                    "Put the tokenizer.json of the original model into the same folder; it is then used instead.",
                ) from error
            files = {path.name: path.read_bytes() for path in sorted(Path(made).iterdir()) if path.is_file()}
        if self.metadata.get("tokenizer.ggml.pre") in _DIGITS_FIRST:
            whole = json.loads(files["tokenizer.json"])
            digits = {"type": "Digits", "individual_digits": True}
            whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, whole["pre_tokenizer"]]}
            files["tokenizer.json"] = as_json(whole)
        elif not self._knows_how_text_is_split():
            _warn_of_splitting(self._first, short(self.metadata.get("tokenizer.ggml.pre"), 40))
        config = json.loads(files["tokenizer_config.json"])
        # by this class tokenizer.json is used as it is; others build their own from its vocabulary
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        if (longest := self._number(f"{self.architecture}.context_length", 0)) > 0:
            config["model_max_length"] = longest
        for name in ("is_local", "local_files_only"):
            config.pop(name, None)
        return files | {"tokenizer_config.json": as_json(config)}

    def _check_vocabulary(self) -> None:
        """Refuse a vocabulary whose pairs would take too long to find."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if "tokenizer.ggml.merges" in self.metadata or tokens is None:
            return
        texts = strings(self._read, tokens, self._first) if isinstance(tokens, GgufArray) else iter(_texts(tokens))
        if (total := sum(len(text) ** 2 for text in texts)) > MAX_PAIR_BYTES:
            raise CorruptVocabularyError(
                f"{self._first} has tokens so long that their pairs take {total:,} bytes to look at; at most "
                f"{MAX_PAIR_BYTES:,} are.",
                "Put the tokenizer.json of the original model into the same folder.",
            )

    @contextlib.contextmanager
    def _outline(self, *, long_arrays: bool = True) -> Iterator[Path]:
        """Yield a folder with a small file of the same metadata and names of tensors."""
        names = [spec.name for file in self._files.values() for spec in file.header.tensors]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidIndexError(
                f"Two files of the model have the tensor {short(twice)}.", "Download the files again."
            )
        with tempfile.TemporaryDirectory(prefix="rabbitllm-gguf-") as folder:
            with (Path(folder) / _OUTLINE).open("wb") as file:
                file.writelines(outline(self._files[self._first], self._read, names, long_arrays=long_arrays))
            yield Path(folder)

    @functools.cached_property
    def _model(self) -> _Model:
        found: _Model = _kept((self._key, "model"), self._made_model)
        return found

    def _made_model(self) -> _Model:
        blocks = self._number(f"{self.architecture}.block_count", 0)
        tensors = sum(len(file.header.tensors) for file in self._files.values())
        if blocks > max(tensors, len(self.shards) * 256):
            raise CorruptShardError(
                f"{self._first} declares {blocks:,} layers and has {tensors:,} tensors.",
                "Download or copy the file again.",
            )
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        count = tokens.count if isinstance(tokens, GgufArray) else len(_texts(tokens)) or None
        shapes = {spec.name: spec.shape for file in self._files.values() for spec in file.header.tensors}
        with self._outline(long_arrays=False) as folder:
            return _read_model(folder, self.architecture, count, shapes, self._first, self._set_rotary_frequencies)

    def _set_rotary_frequencies(self, config: Any) -> None:
        """Set the rotary frequencies of a config of transformers, which reads their base alone.

        Raises:
            UnreadableFormatError: a config cannot say them.
        """
        prefix = f"{self.architecture}."
        own = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        try:
            found = rope_parameters(config, own, self._factors)
        except ValueError as error:
            raise UnreadableFormatError(
                f"The rotary frequencies of {self._first} cannot be read: {error}.", f"{_ORIGINAL} Nothing was changed."
            ) from None
        if found is not None:
            config.rope_parameters = found


_OUTLINE = "outline.gguf"
_KEPT: dict[tuple[str, str], Any] = {}
"""The last models and tokenizers: a split opens its source several times, and each takes transformers seconds."""
MAX_KEPT = 4


def _kept(key: tuple[str, str], make: Callable[[], Any]) -> Any:
    """Return what was made for this key, or make it."""
    if key not in _KEPT:
        made = make()
        while len(_KEPT) >= MAX_KEPT:
            _KEPT.pop(next(iter(_KEPT)), None)
        _KEPT[key] = made
    found: Any = _KEPT.get(key)
    return make() if found is None else found


def _texts(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, tuple) else []


@functools.cache
def _warn_of(shard: str, names: tuple[str, ...]) -> None:
    """Warn once of tensors that transformers does not use either."""
    logger.warning("%s: transformers has no parameter for %s, which is left out.", shard, listed(names))


@functools.cache
def _warn_of_splitting(shard: str, kind: str) -> None:
    """Warn once that transformers does not split text as the vocabulary was made."""
    logger.warning(
        "%s: transformers does not know how its vocabulary splits text (%s), and splits it like GPT-2; some ids differ "
        "from those of llama.cpp. With the tokenizer.json of the original model in the same folder none do.",
        shard,
        kind,
    )


def _line(error: Exception) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= 400 else text[:397] + "..."


# The model by transformers.


def _read_model(
    folder: Path,
    architecture: str,
    tokens: int | None,
    shapes: Mapping[str, tuple[int, ...]],
    file: str,
    complete: Callable[[Any], None],
) -> _Model:
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
    from transformers import CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_ARCHS, get_gguf_config, read_gguf_metadata
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    operations: _ProcessorOperations | _TransformOperations
    try:
        if architecture in GGUF_ARCHS:
            metadata, names = read_gguf_metadata(str(folder / _OUTLINE))
            known = get_gguf_config({"tokenizer.ggml.tokens": tokens, **metadata}, names)
            config = CONFIG_MAPPING[known["model_type"]].from_dict(known)
            operations = _TransformOperations(GGUF_ARCHS[architecture](config))
        else:
            with _without_warnings("transformers.modeling_gguf_pytorch_utils"):  # of the vocabulary, which is left out
                known = load_gguf_checkpoint(str(folder / _OUTLINE), return_tensors=False)["config"]
            if tokens is not None:
                known.setdefault("vocab_size", tokens)
            config = CONFIG_MAPPING[known["model_type"]].from_dict(known | _by_shapes(shapes))
            operations = _processor(architecture, known)
        complete(config)
        return _Model(config, operations, file)
    except (UnknownArchitectureError, UnreadableFormatError, CorruptShardError):
        raise
    except Exception as error:  # metadata of strangers make transformers raise any error
        raise _unknown(architecture, file, _line(error)) from error


def stored_shapes(config: Any, architecture: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a GGUF file with a model: name -> shape, in the order of the model.

    Args:
        config: of transformers, of a class that it also makes from GGUF metadata.
        architecture: llama.cpp's name.
    """
    return _Model(config, _processor(architecture, config.to_dict()), "").stored_shapes()


def _by_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Entries of a config that transformers does not read from all metadata, but the shapes of tensors say."""
    found = {}
    for name, shape in shapes.items():
        if name.endswith(".attn_k_norm.weight") and len(shape) == 1:
            found["head_dim"] = shape[0]
        elif name.endswith(".ffn_down_exps.weight") and len(shape) == 3:
            found["moe_intermediate_size"] = shape[2]
    return found


def _unknown(architecture: str, file: str, why: str) -> UnknownArchitectureError:
    import transformers

    return UnknownArchitectureError(
        f"transformers {transformers.__version__} cannot read the architecture {short(architecture)} of {file} from "
        f"GGUF: {why}",
        f"{_ORIGINAL} Nothing was changed.",
    )


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
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        self.names = get_gguf_hf_weights_map(_ModuleNames(model, config), self._processor)

    def apply(self, name: str, probe: npt.NDArray[Any]) -> _Applied | None:
        """The result for a tensor; None if the model has no use for it, or it has several results."""
        held: dict[str, Any] = {"tensors": {}, "config": {}}
        try:
            done = self._processor.process(
                weights=probe, name=name, tensor_key_mapping=self.names, parsed_parameters=held
            )
        except KeyError:  # it has no name in the model
            return None
        if done.name is None:
            [(target, values)] = held["tensors"].items()
            return _Applied(target, values.numpy(), is_joined=len(probe.shape) == 3)
        return _Applied(self.names[done.name], done.weights, is_joined=False) if done.name in self.names else None


def _processor(architecture: str, config: Mapping[str, Any]) -> _ProcessorOperations:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return _ProcessorOperations(TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config))


class _TransformOperations:
    """Names and operations by transforms, as of other checkpoints.

    Args:
        transforms: of transformers: renamings, which follow each other, and converters, of which one is used.
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        from transformers.core_model_loading import WeightRenaming

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
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters)
        if target not in self._parameters:
            return None
        tensor = torch.from_numpy(probe)
        entry = next((one for one in self._converters if pattern in one.source_patterns), None)
        if entry is None:
            return _Applied(target, probe, is_joined=probe.ndim == 3)
        given = {one: tensor if one == pattern else torch.zeros_like(tensor) for one in entry.source_patterns}
        for operation in entry.operations:
            made = operation.convert(given, source_patterns=[*given], target_patterns=[target])
            given = {target: next(iter(made.values()))}
        return _Applied(target, given[target].numpy(), is_joined=len(entry.source_patterns) > 1)


class _Model:
    """A model of transformers, its names in GGUF files, and the operations on its tensors."""

    def __init__(self, config: Any, operations: _ProcessorOperations | _TransformOperations, file: str) -> None:
        self.config = config
        self._operations = operations
        self._file = file
        self._class = _class_of(config)
        with _BUILDING:
            self._experts = self._read_names()
        self._found: dict[tuple[str, tuple[int, ...]], tuple[Target, ...]] = {}

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has an encoder."""
        return bool(self.config.is_encoder_decoder)

    def config_json(self, dtype: str) -> dict[str, Any]:
        """The content of a config.json."""
        found: dict[str, Any] = self.config.to_diff_dict()
        found["architectures"] = [self._class.__name__]
        found["dtype"] = DTYPES[dtype].torch_name
        found.pop("_name_or_path", None)
        return found

    def _read_names(self) -> dict[str, tuple[str, ...]]:
        """Read all names; ending of a fused parameter -> patterns of its experts' names."""
        import torch
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

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
        found = {}
        for name, target in self._operations.names.items():
            if target not in self._shapes or (name == "output.weight" and self.config.tie_word_embeddings):
                continue
            shape = self._shapes[target]
            ending = next((known for known in self._experts if target.endswith(known)), None)
            if ending is not None:
                experts, rows, *columns = shape
                shape = (experts, rows // len(self._experts[ending]), *columns)
            found[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = shape
        return found

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
            probe = -(1.0 + np.arange(math.prod(probed), dtype=np.float64)).reshape(probed)
            try:
                with np.errstate(all="ignore"):
                    done = self._operations.apply(name, probe)
            except (ValueError, IndexError, RuntimeError):  # it needs more of the tensor
                continue
            if done is None:
                return ()
            if done.is_joined:
                return self._joined(name, shape, probed, done)
            return self._one(name, shape, probed, done)
        raise self._refused(name, shape)

    def _refused(self, name: str, shape: tuple[int, ...]) -> UnreadableFormatError:
        return UnreadableFormatError(
            f"{self._file}: transformers changes the tensor {name} of shape {shape} in a way that is not known here.",
            f"{_ORIGINAL} Nothing was changed.",
        )

    def _joined(self, name: str, shape: tuple[int, ...], probed: tuple[int, ...], done: _Applied) -> list[Target]:
        """The targets of a tensor of all experts."""
        values, begin = done.values, 0
        if values.shape != probed:  # a half of a fused tensor; the other half is zero
            rows = shape[1]
            begin = next((at for at in range(0, values.shape[1], rows) if values[0, at, 0]), 0)
            if values.shape[1] % rows or not (values[:, begin : begin + rows] == -_numbers(probed)).all():
                raise self._refused(name, shape)
        elif not (values == -_numbers(probed)).all():
            raise self._refused(name, shape)
        return self._expert_targets(done.target, shape, values.shape[1], begin)

    def _expert_targets(self, target: str, shape: tuple[int, ...], rows: int, begin: int) -> list[Target]:
        """One target for each expert by the names in published checkpoints; or one for all, if there are none."""
        experts, own, columns = shape
        ending = next((known for known in self._experts if target.endswith(known)), None)
        if ending is None or len(self._experts[ending]) != rows // own:
            piece = None if rows == own else TensorPiece(target, (experts, rows, columns), 1, begin)
            return [Target(target if piece is None else f"{target}.{begin}", shape, piece=piece)]
        pattern = target.removesuffix(ending) + self._experts[ending][begin // own]
        return [
            Target(pattern.replace("*", str(expert)), (own, columns), expert * own * columns)
            for expert in range(experts)
        ]

    def _one(self, name: str, shape: tuple[int, ...], probed: tuple[int, ...], done: _Applied) -> list[Target]:
        """The targets of a tensor whose elements are changed one by one, and may be in another order."""
        values, found = done.values, _order_of(done.values)
        if found is None or values.size != math.prod(probed):
            raise self._refused(name, shape)
        change, order = found
        steps, is_row = _strides_of(order), probed != shape and probed == (1, shape[-1])
        columns = shape[-1] if len(shape) > 1 and probed != shape and not is_row else 1
        if len(shape) == 2 and columns > 1 and probed[0] > 1 and values.shape == probed[::-1]:
            return [Target(done.target, shape[::-1], 0, (1, columns), shape[::-1], change)]
        if (columns > 1 and values.shape[-1] != 1) or (is_row and (values.shape != probed or steps is None)):
            raise self._refused(name, shape)
        made = (*values.shape[:-1], values.shape[-1] * columns) if values.shape else ()
        if steps is None:
            return self._in_runs(name, shape, Target(done.target, made, change=change), order)
        sizes, strides = steps
        if is_row:
            made, sizes, strides = shape, (shape[0], *sizes), (shape[1], *strides)
        if len(sizes) <= 1 + is_row:  # in the order of the file
            return [Target(done.target, made, change=change)]
        if columns > 1:
            sizes, strides = (*sizes, columns), (*(stride * columns for stride in strides), 1)
        return [Target(done.target, made, 0, strides, sizes, change)]

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
    silenced = logging.getLogger(name)
    with _BUILDING:
        silenced.addFilter(_nothing)
        try:
            yield
        finally:
            silenced.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


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


def _numbers(shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    import numpy as np

    return (1.0 + np.arange(math.prod(shape), dtype=np.float64)).reshape(shape)


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
        others = np.flatnonzero(np.diff(order) != step)
        run = int(others[0]) + 1 if others.size else order.size
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
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )

    for name in getattr(config, "architectures", None) or ():
        if isinstance(found := getattr(transformers, str(name), None), type):
            return found
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(f"transformers has no text-generating model of type {config.model_type!r}")
