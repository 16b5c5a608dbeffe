"""The methods of a streamed model that differ from those of an ordinary transformers model.

The model keeps the name and the module of its class, its config and its `forward`. Its placement is fixed: it cannot be
moved, cast or copied.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rabbitllm.base import openmp
from rabbitllm.base.options import RunOptions, expand
from rabbitllm.base.rounding import round_up
from rabbitllm.engine import _placeholders
from rabbitllm.engine._expert_pool import read_uses, write_uses
from rabbitllm.engine._processor import read_processor
from rabbitllm.engine._routed import has_few_rows
from rabbitllm.engine._saving import Origin, compare_resident, save
from rabbitllm.engine._streamer import Streamer
from rabbitllm.engine._whole_steps import is_whole
from rabbitllm.engine.pass_line import PassLine, pass_input_of
from rabbitllm.engine.placement import Placement
from rabbitllm.engine.transformers_api import has_adapter
from rabbitllm.engine.weight_tensors import AbsentWeight, untrainable
from rabbitllm.errors import CopyError, NotANumberError, OptionError
from rabbitllm.telemetry.passes import PassInput
from rabbitllm.telemetry.profiler import Profiler

logger = logging.getLogger(__name__)


_HOOKS_OF_ACCELERATE = ("_old_forward", "_hf_hook")
"""Attributes that `accelerate.hooks.add_hook_to_module` sets to put a hook around a module, in this order."""


class SharedPasses(Protocol):
    """Coroutines that share the passes of a model; see `generation.coroutines`."""

    def is_coroutine(self) -> bool:
        """Whether the current caller of the model is one of them."""

    def wait_for_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for the other callers, until this call may compute or has been computed.

        Returns:
            The result of the call; None if the caller has to compute it.
        """


class PassMemory(Protocol):
    """Keeps passes within the memory that weights leave; see `generation.memory`."""

    def make_room(self, batch: int, length: int, past: int) -> None:
        """Make room for a pass of `batch` sequences of `length` tokens each, after `past` ones."""

    def chunk(self, tokens: torch.Tensor, options: dict[str, Any]) -> int | None:
        """Tokens of each sequence (batch, length) in a pass of its prefill; None for all. `options`: of the model."""


def refuse_overflow(values: torch.Tensor, name: str, *, can_exclude: bool = False) -> None:
    """Refuse values that are no numbers, as where float16 has overflowed.

    Args:
        values: of any shape and dtype.
        name: of the values, in the plural.
        can_exclude: whether they may be -inf: logits are, of a token that is never chosen.

    Raises:
        NotANumberError: NaN, inf or, unless `can_exclude`, -inf is among them.
    """
    if bool((values < torch.inf if can_exclude else values.isfinite()).all()):
        return
    if values.dtype == torch.float16:
        raise NotANumberError(
            f"The {name} contain inf or nan: values exceed float16.",
            "Load the model with dtype='float32', or dtype='bfloat16' on a GPU that has it.",
        )
    raise NotANumberError(f"The {name} contain inf or nan; expected numbers.", "Check the weights with verify.")


@dataclass(frozen=True)
class Internals:
    """What a model knows of its loading, for its own methods.

    Attributes:
        device: of the inputs.
        is_resident: whether all weights are always ready to use.
        origin: the files of its weights, and its config as it was loaded.
        held_bytes: see `StreamedModel.get_memory_footprint`.
        options: of the run.
    """

    device: torch.device
    is_resident: bool
    origin: Origin
    held_bytes: int
    options: RunOptions


if TYPE_CHECKING:
    from transformers import GenerationMixin

    class _TransformersModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """What type checkers and editors know of the model's own class."""
else:
    _TransformersModel = object  # the model's own class comes after it, see `adopt`


class StreamedModel(_TransformersModel):
    """A model of transformers whose weights are resident or streamed.

    It is an instance of transformers' class for the model, with its `forward`, `generate` and `config`. Logits are a
    tensor of shape (batch, tokens, vocabulary) in the dtype of the computation, on `model.device`. These methods come
    before those of the class.

    Attributes:
        tokenizer: the checkpoint's tokenizer; None if it has none.
        processor: makes inputs of text, pictures and sounds; read at its first use. None for a model of text alone.
        profiler: times and bytes of each layer, with `profiling_mode=True`.
        placement: device and tier of each unit; prints as a table.
        streamer: installs and runs the hooks; internal.
        pass_line: shows slow passes; internal.
        shared_passes: callers that share passes; internal.
        pass_memory: what keeps passes within memory; internal.
        hosts: processes that compute layers on other hosts; None if all layers are here. `hosts.close()` ends them.
        unused_tensors: stored tensors that the model class ignores; they are never read.
        heads: its heads for multi-token prediction, if it was loaded with them; internal.
    """

    tokenizer: PreTrainedTokenizerBase | None
    profiler: Profiler
    placement: Placement
    streamer: Streamer
    pass_line: PassLine | None = None
    shared_passes: SharedPasses | None = None
    pass_memory: PassMemory | None = None
    hosts: Any | None = None
    unused_tensors: tuple[str, ...]
    heads: Any | None = None
    _internals: Internals

    @functools.cached_property
    def processor(self) -> Any | None:
        """The checkpoint's processor; None if the model takes text alone.

        Raises:
            ProcessorError: one of its files is missing or malformed.
            MissingPackageError: Pillow or torchvision is not installed.
        """
        return read_processor(self._internals.origin.home, self.config, self._internals.options.trust_remote_code)

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self._internals.device

    @property
    def takes_sequences(self) -> bool:
        """Whether rows of several sequences may be one call of all layers (`_whole_steps.py`): none is streamed."""
        return not self.placement.streamed_bytes and any(map(is_whole, self.modules()))

    @property
    def has_few_rows(self) -> bool:
        """Whether experts are streamed, and all of these multiply some rows of a prompt at a time (`_routed.py`)."""
        sources = [source for pool in self.streamer.pools.values() for source in pool.sources]
        return bool(sources) and all(map(has_few_rows, sources))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a pass.

        Unless every unit is resident, it has no gradients, which would keep every layer's weights, and passes of
        several threads come one after the other: a streamed layer's weights are in memory for one pass.

        Raises:
            MediaError: the prompt has more or fewer placeholders than its pictures or sounds need.
        """
        openmp.look()
        try:
            return self._called(*args, **kwargs)
        except ValueError as error:
            if (media_error := _placeholders.explained(error, self.config)) is None:
                raise
            raise media_error from error

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does.

        Raises:
            OptionError: `use_mtp=True`, for which transformers reads a checkpoint's own shards, and the model is split,
                or transformers knows no heads of it.
        """
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else self.generation_config)
        if kwargs.get("use_mtp", getattr(config, "use_mtp", False)):
            if self._internals.origin.store.is_split:
                raise OptionError(
                    "use_mtp=True needs the shards of the checkpoint; the model was loaded from a split directory.",
                    "Use --draft mtp, or load the checkpoint with split=False.",
                )
            text = self.config.get_text_config(decoder=True)
            if not getattr(text, "num_mtp_layers", None):
                raise OptionError(
                    f"use_mtp=True: transformers knows no heads of {text.model_type}.", "Use --draft mtp."
                )
        return super().generate(*args, **kwargs)

    def _prepare_position_ids_for_generation(self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        """As in transformers, whose `generate` calls it first, with the whole prompt.

        Raises:
            MediaError: as `__call__` does.
        """
        is_ids = not inputs_tensor.is_floating_point()
        if is_ids:
            _placeholders.warn_of_empty(self.config, inputs_tensor, model_kwargs)
        try:
            return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        except (RuntimeError, IndexError, StopIteration) as error:
            explanation = _placeholders.explained_by_grids(self.config, inputs_tensor, model_kwargs) if is_ids else None
            if explanation is None:
                raise
            raise explanation from error

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **more: Any
    ) -> Any:
        """As in transformers; in chunks if a pass of all tokens does not fit in memory."""
        is_shared = self.shared_passes is not None and self.shared_passes.is_coroutine()
        if self.pass_memory is not None and generation_config.prefill_chunk_size is None and not is_shared:
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = self.pass_memory.chunk(input_ids, model_kwargs)
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **more)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        shared = self.shared_passes
        if shared is not None and shared.is_coroutine():
            computed = shared.wait_for_pass(args, kwargs)
            if computed is not None:
                return self._finite(computed)
            with self.streamer.passing(), torch.no_grad():
                return self._finite(super().__call__(*args, **kwargs))
        if self._internals.is_resident:
            with self.streamer.memory_explained():
                return self._finite(self._pass(*args, **kwargs))
        with self.streamer.passing(), torch.no_grad():
            output = self._finite(self._pass(*args, **kwargs))
        return untrainable(output, (*args, *kwargs.values()), training=self.training)

    def _finite(self, output: Any) -> Any:
        """The output, unless its last logits show that float16 has overflowed.

        Raises:
            NotANumberError: they do. Tokens would be garbage, and sampling from NaN ends the use of CUDA in a process.
        """
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor) and logits.dim() == 3 and logits.dtype == torch.float16:
            refuse_overflow(logits[:, -1], "logits", can_exclude=True)
        return output

    @contextlib.contextmanager
    def joint_pass(self, pass_input: PassInput) -> Iterator[None]:
        """A context around one pass of several callers; see `rabbitllm.generation`."""
        if self.streamer.is_drafting:
            with self.streamer.passing(), torch.no_grad():
                yield
            return
        openmp.look()
        shown = contextlib.nullcontext() if self.pass_line is None else self.pass_line.over(pass_input, None)
        with self.streamer.passing(), torch.no_grad(), shown, self.profiler.forward(pass_input, None):
            for pool in self.streamer.pools.values():
                pool.lend(0)  # what a prompt of `generate` had
            yield

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        is_seen = self.profiler.enabled or self.pass_line is not None
        if self.streamer.is_drafting or not (is_seen or self.pass_memory):
            return super().__call__(*args, **kwargs)
        pass_input, kv_cache = pass_input_of(args, kwargs)
        if self.pass_memory is not None:
            self.pass_memory.make_room(pass_input.batch, pass_input.length, pass_input.past or 0)
        if not is_seen:
            return super().__call__(*args, **kwargs)
        shown = contextlib.nullcontext() if self.pass_line is None else self.pass_line.over(pass_input, kv_cache)
        with shown, self.profiler.forward(pass_input, kv_cache):
            return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refused: a second model is loaded, not copied."""
        raise self._copy_error("copied (copy.deepcopy)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: pickle, torch.save and ray.put call it."""
        raise self._copy_error("pickled (pickle, torch.save, ray.put)")

    def __copy__(self) -> Self:
        """A second object for the same weights, hooks and threads, as of any module."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(
            {name: value.copy() if isinstance(value, dict) else value for name, value in vars(self).items()}
        )
        return copied

    def _replicate_for_data_parallel(self) -> Any:
        """Refused: torch.nn.DataParallel calls it on several GPUs."""
        raise self._copy_error("replicated (torch.nn.DataParallel)")

    def _copy_error(self, done: str) -> CopyError:
        return CopyError(
            f"A model of rabbitllm cannot be {done}: its weights depend on open files and devices of this process.",
            "Call AutoModel.from_pretrained again, in the process that needs the model: it uses an existing split, and "
            "mapped files are in memory once. model.save_pretrained(folder) writes a checkpoint.",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as any module does, but refuse accelerate's hooks if weights are streamed or quantized."""
        if name in _HOOKS_OF_ACCELERATE and any(type(weight) is not torch.nn.Parameter for weight in self.parameters()):
            raise CopyError(
                "accelerate cannot place this model (cpu_offload, disk_offload, dispatch_model): it is streamed or "
                "compressed, and already placed.",
                "Set max_memory= of AutoModel.from_pretrained instead.",
            )
        super().__setattr__(name, value)

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Whether `generate` compiles, which it does by default on a GPU with a static cache.

        Not if weights are streamed: compiled code or a captured graph would use the weights of an earlier pass.
        """
        return super()._valid_auto_compile_criteria(*args, **kwargs) and self._internals.is_resident

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the model unchanged: the placement was decided when it was loaded.

        Logs a warning with the alternative unless the model has this device and dtype already.
        """
        targets = [value for value in (*args, *kwargs.values()) if value is not None and not isinstance(value, bool)]
        device, dtype = self.device, str(self.dtype)
        present = {str(device), dtype, dtype.removeprefix("torch.")} | ({device.type} if not device.index else set())
        if not {str(value) for value in targets} <= present:
            self._warn_of_no_effect(", ".join(map(str, targets)))
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Leave the weights unchanged; `type`, `double` and a wrapper's own `to` call it; see `to`."""
        sample = torch.empty(0, dtype=self.dtype, device=self.device)
        moved = fn(sample)
        if (moved.device, moved.dtype) != (sample.device, sample.dtype):
            self._warn_of_no_effect(f"{moved.device}, {moved.dtype}")
        return self

    def _warn_of_no_effect(self, targets: str) -> None:
        logger.warning(
            "model.to(%s) has no effect: device and dtype of the weights are set when the model is loaded. "
            "Set them with device=, dtype= and max_memory= of AutoModel.from_pretrained.",
            targets,
        )

    def cuda(self, *args: Any, **kwargs: Any) -> Self:
        """See `to`."""
        device = args[0] if args else kwargs.get("device")
        return self.to("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)

    def cpu(self) -> Self:
        """See `to`."""
        return self.to("cpu")

    def half(self, *args: Any) -> Self:
        """See `to`."""
        return self.to("float16")

    def float(self, *args: Any) -> Self:
        """See `to`."""
        return self.to("float32")

    def double(self, *args: Any) -> Self:
        """See `to`."""
        return self.to("float64")

    def bfloat16(self, *args: Any) -> Self:
        """See `to`."""
        return self.to("bfloat16")

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters of the whole model, resident or not. Tied weights count once.

        Args:
            only_trainable: count only parameters that require gradients.
            exclude_embeddings: do not count embeddings.

        Returns:
            The number of elements, not bytes.
        """
        total: int = super().num_parameters(only_trainable, exclude_embeddings)
        counted = dict(self.named_parameters())
        embeddings = {f"{name}.weight" for name, m in self.named_modules() if isinstance(m, torch.nn.Embedding)}
        for target, source in self.all_tied_weights_keys.items():
            if {target, source} <= counted.keys() and not (exclude_embeddings and target in embeddings):
                total -= counted[target].numel() if counted[target].requires_grad or not only_trainable else 0
        return total

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of weights in memory between two passes, on any device, and of the buffers for streamed ones.

        Weights that are used in mapped files count too.

        Args:
            return_buffers: count the buffers of the modules too.

        Returns:
            Bytes.
        """
        buffers = (buffer.nbytes for buffer in self.buffers()) if return_buffers else ()
        return self._internals.held_bytes + sum(buffers)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights by name, as of any module; resident ones are compared with their checksums first.

        Raises:
            IncompleteSplitError: a checksum differs.
        """
        compare_resident(self._internals.origin)
        return super().state_dict(*args, **kwargs)

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie weights as transformers does; those that are not in memory stay so, and are stored as one tensor."""
        weights = self.named_parameters(remove_duplicate=False)
        absent = [(name, weight) for name, weight in weights if isinstance(weight, AbsentWeight)]
        super().tie_weights(*args, **kwargs)
        for name, weight in absent:
            module, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(module), leaf, weight)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """Resize the embeddings as transformers does, if both are in memory; the present size is always accepted.

        Args:
            new_num_tokens: number of rows; None for the present number.
            pad_to_multiple_of: rounds the number of rows up.
            mean_resizing: as in transformers.

        Raises:
            AbsentWeightError: one of them is not in memory. Nothing was changed.
        """
        embedding, head = self.get_input_embeddings(), self.get_output_embeddings()
        weights = [getattr(module, "weight", None) for module in (embedding, head)]
        absent = [weight for weight in weights if isinstance(weight, AbsentWeight)]
        if absent:
            rows = embedding.weight.shape[0]
            if round_up(rows if new_num_tokens is None else new_num_tokens, pad_to_multiple_of or 1) == rows:
                return embedding
            for weight in absent:
                weight.sum()  # raises the error before anything is changed
            embedding.weight = copy.deepcopy(embedding.weight)  # transformers writes to it
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        *,
        max_shard_size: int | str = "50GB",
        tokenizer: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the whole model as a checkpoint that transformers loads: safetensors, config and generation config.

        The weights are copied from the model's files to the shards, a few megabytes at a time. Uncompressed weights
        keep their bits and their stored dtype; 4bit and 8bit ones are dequantized to the dtype that the model computes
        in; published quantized ones stay quantized. Resident uncompressed weights are written with their changes in
        memory (a merged adapter); other changes are refused. With an adapter of `load_adapter`, only the adapter is
        saved, as transformers does.

        Args:
            save_directory: a folder without weights; it need not exist.
            is_main_process: False writes nothing.
            max_shard_size: maximum bytes of a shard; a larger tensor gets a separate shard.
            tokenizer: write the tokenizer too, and the files of the processor.
            **kwargs: other arguments of transformers; those that would change the result are refused.

        Raises:
            OptionError: the folder holds a model; or an argument is not possible here. Nothing was written.
            NotEnoughSpaceException, DiskFullError: the disk has too little space. Nothing was written.
            RabbitLLMError: the model was changed in a way that cannot be written as its stored tensors.
        """
        if has_adapter(self):
            super().save_pretrained(save_directory, is_main_process, max_shard_size=max_shard_size, **kwargs)
        elif is_main_process:
            save(
                self,
                self._internals.origin,
                expand(save_directory),
                max_shard_size=max_shard_size,
                tokenizer=tokenizer,
                show_progress=self._internals.options.show_progress,
                **kwargs,
            )

    def save_expert_use(self, path: str | Path) -> None:
        """Write the use counts of the streamed experts to a file, for `load_expert_use` of a later process.

        If all experts are resident, the file has no counts.

        Args:
            path: the file; an existing one with use counts is replaced.

        Raises:
            OptionError: a file of that name is another one.
            OSError: the file cannot be written.
        """
        pools = self.streamer.pools.values()
        write_uses(Path(path), {name: uses for pool in pools for name, uses in pool.uses().items()})

    def load_expert_use(self, path: str | Path) -> None:
        """Read the experts that were used most, by a file of `save_expert_use`, as far as memory allows.

        Args:
            path: a file that `save_expert_use` wrote for this model.

        Raises:
            OptionError: the file was written for another model.
            CorruptShardError, OSError: it cannot be read.
        """
        with self.streamer.pass_lock:
            for pool in self.streamer.pools.values():
                pool.warm(read_uses(Path(path), pool.sources))

    def print_profile_summary(self) -> None:
        """Print the times of the stages."""
        print(self.profiler.report())


def adopt(model: PreTrainedModel, device: torch.device, placement: Placement) -> StreamedModel:
    """Add the methods of `StreamedModel` to a model; it keeps its class name and module for pipelines and servers."""
    model_type = type(model)
    body = {"__module__": model_type.__module__, "__qualname__": model_type.__qualname__, "__doc__": model_type.__doc__}
    model.__class__ = type(model_type.__name__, (StreamedModel, model_type), body)
    streamed = cast("StreamedModel", model)
    streamed.placement = placement
    # for transformers: pipelines do not move the model, and a static cache has each layer's part on the layer's device
    where = {placed.unit: placed.device for placed in placement.units}
    # not a device's name: with "cpu" accelerate and peft assume that they placed the model, and place it again
    streamed.hf_device_map = where if len(set(where.values())) > 1 else {"": device}
    return streamed
