"""A checkpoint of GGUF files: its parts, its index, and the config and tokenizer that transformers needs.

A set of files is one checkpoint: the first has the metadata. It is therefore used last, so that a split can be resumed
as long as a file is left.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbitllm.base.logs import warn_once
from rabbitllm.base.terminal import error_line, listed
from rabbitllm.checkpoints._meta_llama import as_json
from rabbitllm.checkpoints.gguf_model import ORIGINAL, OUTLINE, GgufModel, read_gguf_model
from rabbitllm.checkpoints.gguf_rotary import FACTOR_TENSORS, rope_parameters
from rabbitllm.checkpoints.index import GGUF_TYPE, CheckpointIndex, gguf_number
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME, GENERATION_NAME, TOKENIZER_NAMES, check_pair_bytes
from rabbitllm.errors import (
    CorruptShardError,
    CorruptVocabularyError,
    InvalidIndexError,
    MissingShardError,
    UnreadableFormatError,
)
from rabbitllm.formats.bounded import COPY_AGAIN, short
from rabbitllm.formats.gguf import READ_BYTES, GgufArray, GgufFile, outline, strings
from rabbitllm.formats.tensor_spec import Header, LeftOut, ReadAt
from rabbitllm.storage.durable import ScratchFolder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

_DTYPES = {0: "F32", 1: "F16", 32: "BF16"}
"""`general.file_type` -> the dtype of files that are not quantized (gguf.LlamaFileType)."""
_STOPS = ("eos", "eot", "eom")
_AS_GPT2 = frozenset({"gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion"})
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Names of ways to split text before the merges that transformers lacks. llama.cpp (llama-vocab.cpp) splits like GPT-2,
or sets each digit apart and then splits like GPT-2."""


class GgufCheckpoint:
    """A checkpoint of GGUF files, by their headers.

    Args:
        shards: names of all files, used-up ones included, in the order of use.
        files: the headers of those that exist; the one with the metadata must be among them.
        read: reads (offset, length) of that one.
    """

    def __init__(self, shards: Sequence[str], files: Mapping[str, GgufFile], read: ReadAt) -> None:
        self.loses_metadata = True
        self.shards = tuple(shards)
        self._keeps_blocks, self._narrows = True, False
        self._first = shards[-1]
        self._files = files
        self._read = read
        if self._first not in files:
            raise MissingShardError(
                f"{self._first} is missing; it has the metadata of the model.", "Add the file. Nothing was changed."
            )
        self.metadata = files[self._first].metadata
        if self.metadata.get("general.type") == "adapter" or "adapter.type" in self.metadata:
            raise UnreadableFormatError(
                f"{self._first} is an adapter (LoRA), not a model.",
                "Use the GGUF file of the model; llama.cpp's llama-export-lora merges an adapter into it.",
            )
        for name, file in files.items():
            self._check_part(name, file)
        self.dtype = _DTYPES.get(self._number("general.file_type", -1), "F32")

    def with_dtype(self, dtype: str | None) -> GgufCheckpoint:
        """Its tensors dequantized to a dtype, a key of `DTYPES`; "auto": to the file's own, but those of float32, which
        llama.cpp needs for norms, stay; None: with their blocks."""
        changed = copy.copy(self)
        changed._keeps_blocks, changed._narrows = dtype is None, dtype not in (None, "auto")
        changed.dtype = self.dtype if dtype in (None, "auto") else dtype
        return changed

    def _check_part(self, name: str, file: GgufFile) -> None:
        """Refuse a file that is another part than its name says."""
        count, index = (file.metadata.get(f"split.{key}") for key in ("count", "no"))
        expected = len(self.shards)
        number_in_name = gguf_number(name)
        if expected == 1 and count in (None, 0, 1):
            return
        if count != expected or number_in_name is None or index != number_in_name - 1:
            raise InvalidIndexError(
                f"{name} says that it is file {short(index)} (from 0) of {short(count)}; its name says another.",
                "Download the files again, with their names, or join them with llama-gguf-split --merge.",
            )

    def _number(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        return value if isinstance(value, int) else default

    @functools.cached_property
    def _type_name(self) -> str:
        """llama.cpp's name of the type of most tensors, such as "Q4_K_M"; empty if the file does not say it."""
        from gguf import LlamaFileType

        names = {int(member): member.name for member in LlamaFileType if member is not LlamaFileType.GUESSED}
        name = names.get(self._number("general.file_type", -1), "")
        return name.removeprefix("MOSTLY_").removeprefix("ALL_")

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CorruptShardError(f"{self._first} has no general.architecture in its metadata.", COPY_AGAIN)
        return name

    def taken_from(self, shard: str, header: Header) -> Header:
        """The header that a split uses for a file: the tensors of the model, in the order of the file.

        Raises:
            UnknownArchitectureError, UnreadableFormatError, CorruptShardError: transformers cannot read it.
        """
        specs, left_out = [], []
        for stored in header.tensors:
            targets = self.model.targets(stored.name, stored.shape)
            is_exact = stored.blocks is None and stored.dtype == "F32" and not self._narrows
            may_stay = self._keeps_blocks or is_exact
            specs += [target.spec(stored, self.dtype, may_stay=may_stay) for target in targets]
            # divisors of rotary frequencies are in the config
            left_out += [] if targets or stored.name in FACTOR_TENSORS else [LeftOut(stored.name, stored.extent)]
        if left_out:
            text = "%s: transformers has no parameter for %s, which is left out."
            warn_once(logger, text, shard, listed([tensor.name for tensor in left_out]))
        about = {GGUF_TYPE: self._type_name} if shard == self._first and self._type_name else {}
        return Header(tuple(specs), about, header.data_start, header.comes_first, tuple(left_out))

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
            sidecars: names of existing files; their tokenizer is used if transformers cannot use the metadata's.
        """
        # A quantized file does not say the dtype of its model. Nearly all are published in bfloat16, and float32 takes
        # twice the memory and, where pairs of bfloat16 are multiplied, twice the time.
        is_quantized = self._number("general.file_type", -1) not in _DTYPES
        computed = "BF16" if is_quantized and self._keeps_blocks else self.dtype
        files = {CONFIG_NAME: as_json(self.model.config_json(computed))}
        files[GENERATION_NAME] = as_json(self._generation())
        if "tokenizer.ggml.model" in self.metadata and not (
            set(TOKENIZER_NAMES) & set(sidecars) and self._tokenizer_is_unknown()
        ):
            files |= _cached((self._key, "tokenizer"), self._tokenizer)
        return files

    @functools.cached_property
    def _key(self) -> str:
        """A digest of the metadata, and of the names and shapes of the tensors."""
        digest, end = hashlib.sha256(), self._files[self._first].entries_end
        for offset in range(0, end, READ_BYTES):
            digest.update(self._read(offset, min(READ_BYTES, end - offset)))
        for name in sorted(self._files):
            digest.update(repr([(spec.name, spec.shape) for spec in self._files[name].header.tensors]).encode())
        for name, factors in self._factors.items():
            digest.update(name.encode() + factors.tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _factors(self) -> dict[str, npt.NDArray[np.float32]]:
        """The tensors of divisors of rotary frequencies, which belong to the config."""
        import numpy as np

        factors = {}
        for shard, file in self._files.items():
            for spec in file.header.tensors:
                if spec.name not in FACTOR_TENSORS:
                    continue
                if shard != self._first or spec.blocks is not None or spec.dtype != "F32" or spec.nbytes > READ_BYTES:
                    raise UnreadableFormatError(
                        f"Tensor {spec.name} in {shard} is {spec.dtype} of shape {spec.shape}; expected F32, at most "
                        f"{READ_BYTES:,} bytes, in {self._first}.",
                        f"Join the files with llama-gguf-split --merge. {ORIGINAL}",
                    )
                factors[spec.name] = np.frombuffer(self._read(spec.offset, spec.nbytes), "<f4").reshape(spec.shape)
        return factors

    def _generation(self) -> dict[str, Any]:
        """The ids of tokens; also those that end a turn or a message, which llama.cpp stops at too."""
        ids: dict[str, Any] = {}
        for key, name in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
            token = self._number(f"tokenizer.ggml.{key}_token_id", -1)
            ids |= {name: token} if token >= 0 else {}
        stops = [self._number(f"tokenizer.ggml.{key}_token_id", -1) for key in _STOPS]
        if eos := list(dict.fromkeys(stop for stop in stops if stop >= 0)):
            ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos
        return ids

    def _tokenizer_is_unknown(self) -> bool:
        from rabbitllm.checkpoints.transformers_gguf import select_tokenizer_builder

        try:
            select_tokenizer_builder(self.architecture, self.metadata.get("tokenizer.ggml.model"))
        except ValueError:
            return True
        return not self._knows_how_text_is_split()

    def _knows_how_text_is_split(self) -> bool:
        """Whether transformers, or `_tokenizer`, splits text before the merges as this vocabulary was made."""
        from rabbitllm.checkpoints.transformers_gguf import GGUF_PRE_TOKENIZER_SPLITS

        pre_tokenizer = self.metadata.get("tokenizer.ggml.pre", "gpt-2")
        supported = {*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_DIGITS_FIRST}
        return self.metadata.get("tokenizer.ggml.model") != "gpt2" or pre_tokenizer in supported

    def _tokenizer(self) -> dict[str, bytes]:
        self._check_vocabulary()
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # AutoTokenizer first reads the whole vocabulary by slower code, to choose a class that, of decoders, makes the
        # same tokenizer.json: 45 of 55 seconds for the 262,000 tokens of Gemma 3
        tokenizer_class = AutoTokenizer if self.model.config.is_encoder_decoder else PreTrainedTokenizerFast
        with self._outline() as folder, ScratchFolder() as output:
            try:
                tokenizer_class.from_pretrained(folder, gguf_file=OUTLINE).save_pretrained(output)
            except Exception as error:  # a vocabulary of strangers makes transformers raise any error
                raise CorruptVocabularyError(
                    f"transformers cannot build a tokenizer from the metadata of {self._first}: {error_line(error)}",
                    "Put the tokenizer.json of the original model into the same folder; it is then used instead.",
                ) from error
            files = {path.name: path.read_bytes() for path in sorted(output.iterdir()) if path.is_file()}
        if self.metadata.get("tokenizer.ggml.pre") in _DIGITS_FIRST:
            tokenizer = json.loads(files["tokenizer.json"])
            digits = {"type": "Digits", "individual_digits": True}
            tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
            files["tokenizer.json"] = as_json(tokenizer)
        elif not self._knows_how_text_is_split():
            warn_once(
                logger,
                "%s: transformers does not recognise this vocabulary's pre-tokenizer (%s) and uses GPT-2's; some token "
                "ids will differ from llama.cpp's. To prevent that, put the original model's tokenizer.json into the "
                "same folder.",
                *(self._first, short(self.metadata.get("tokenizer.ggml.pre"), 40)),
            )
        config = json.loads(files["tokenizer_config.json"])
        # by this class tokenizer.json is used as it is; others build their own from its vocabulary
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        if (context_length := self._number(f"{self.architecture}.context_length", 0)) > 0:
            config["model_max_length"] = context_length
        for name in ("is_local", "local_files_only"):
            config.pop(name, None)
        return files | {"tokenizer_config.json": as_json(config)}

    def _check_vocabulary(self) -> None:
        """Refuse a vocabulary whose pairs would take too long to find."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if "tokenizer.ggml.merges" in self.metadata or tokens is None:
            return
        texts = strings(self._read, tokens, self._first) if isinstance(tokens, GgufArray) else iter(_texts(tokens))
        check_pair_bytes(texts, self._first)

    @contextlib.contextmanager
    def _outline(self, *, long_arrays: bool = True) -> Iterator[Path]:
        """Yield a folder with a small file of the same metadata and names of tensors."""
        names = [spec.name for file in self._files.values() for spec in file.header.tensors]
        if len(set(names)) != len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise InvalidIndexError(
                f"Two files of the model have the tensor {short(repeated)}.", "Download the files again."
            )
        with ScratchFolder() as folder:
            with (folder / OUTLINE).open("wb") as file:
                file.writelines(outline(self._files[self._first], self._read, names, long_arrays=long_arrays))
            yield folder

    @functools.cached_property
    def model(self) -> GgufModel:
        """The model of transformers that the metadata describe.

        Raises:
            UnknownArchitectureError, UnreadableFormatError, CorruptShardError: transformers cannot read it.
        """
        model: GgufModel = _cached((self._key, "model"), self._read_model)
        return model

    def _read_model(self) -> GgufModel:
        blocks = self._number(f"{self.architecture}.block_count", 0)
        tensors = sum(len(file.header.tensors) for file in self._files.values())
        if blocks > max(tensors, len(self.shards) * 256):
            problem = f"{self._first} declares {blocks:,} layers and has {tensors:,} tensors."
            raise CorruptShardError(problem, COPY_AGAIN)
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        count = tokens.count if isinstance(tokens, GgufArray) else len(_texts(tokens)) or None
        shapes = {spec.name: spec.shape for file in self._files.values() for spec in file.header.tensors}
        with self._outline(long_arrays=False) as folder:
            return read_gguf_model(folder, self.architecture, count, shapes, self._first, self._set_rotary_frequencies)

    def _set_rotary_frequencies(self, config: Any) -> None:
        """Set the rotary frequencies of a config of transformers, which reads only their base.

        Raises:
            UnreadableFormatError: a config cannot express them.
        """
        prefix = f"{self.architecture}."
        metadata = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        try:
            parameters = rope_parameters(config, metadata, self._factors)
        except ValueError as error:
            raise UnreadableFormatError(
                f"The rotary frequencies of {self._first} cannot be read: {error}.", f"{ORIGINAL} Nothing was changed."
            ) from None
        if parameters is not None:
            config.rope_parameters = parameters


_CACHE: dict[tuple[str, str], Any] = {}
"""The last models and tokenizers: a split opens its source several times, and each takes transformers seconds."""
MAX_CACHED = 4


def _cached(key: tuple[str, str], make: Callable[[], Any]) -> Any:
    """Return the object in the cache, or make it."""
    value = _CACHE.get(key)
    if value is None:
        value = make()
        while len(_CACHE) >= MAX_CACHED:
            _CACHE.pop(next(iter(_CACHE)), None)
        _CACHE[key] = value
    return value


def _texts(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, tuple) else []
