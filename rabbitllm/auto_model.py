"""The entry point: `AutoModel.from_pretrained` connects source, split and engine."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rabbitllm import prepare
from rabbitllm.base.options import (
    Hosts,
    RunOptions,
    ShardPolicy,
    SplitOptions,
    arguments_checked,
    check_arguments,
    check_model,
    expand,
    parse_dtype,
    parse_max_memory,
)
from rabbitllm.base.terminal import harmless
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.display import split_display
from rabbitllm.display.wait_status import waiting
from rabbitllm.errors import OptionError, SplitMismatchError, system_errors_by_name
from rabbitllm.splitter.filler import ShardExecutor
from rabbitllm.store.layer_store import LayerStore, UnsplitStore
from rabbitllm.store.locations import local_folder_name, resolve_name
from rabbitllm.store.manifest import check_split
from rabbitllm.telemetry.profiler import Profiler

if TYPE_CHECKING:
    from rich.console import Console

    from rabbitllm.engine.devices import Device
    from rabbitllm.engine.load_plan import LoadPlanner, PartChooser, TooLittle
    from rabbitllm.engine.placement import Placement
    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation.draft import Draft

logger = logging.getLogger(__name__)

WITHOUT_EFFECT: Mapping[str, tuple[Any, str]] = {
    "max_seq_len": (512, "the model's own context length applies"),
    "persister": (None, "layer files are always safetensors"),
    "use_gds": (True, "layers are read into pinned memory instead"),
    "kv_cache_dir": (None, "pass cache_implementation='offloaded' to generate() instead"),
    "offload_small_layers_use_cpu_cache": (True, "the page cache serves that purpose"),
}
"""Arguments of RabbitLLM 1.1 that are accepted and ignored: default, and reason."""
_OF_DRAFTS = ("show_progress", "trust_remote_code", "verify_checksums", "fast_bfloat16")
"""Options that a draft model has from its model."""
DELETING = ("sequential_shard_processing", "delete_original")
_NOT_NEEDED = "It is not needed here: remove it."
_OF_GENERATE = "Pass it to model.generate()."
_LIMITS = "Set max_memory: weights that fit stay in memory."
ELSEWHERE: Mapping[str, str] = {
    "load_in_4bit": "Use compression='4bit'.",
    "load_in_8bit": "Use compression='8bit'.",
    "quantization_config": "Use compression='4bit' or '8bit'. A checkpoint that is published quantized needs none.",
    "device_map": "Use device='auto' for all GPUs, or max_memory for a limit of each device.",
    "torch_dtype": "Use dtype.",
    "offload_folder": "Use layer_shards_saving_path for the folder of the layer files.",
    "use_auth_token": "Use token.",
    "use_flash_attention_2": "Use attn_implementation='flash_attention_2'.",
    "gguf_file": "Pass the path of the file as the model, or 'organisation/name:Q4_K_M'.",
    "filename": "Pass the path of the file as the model, or 'organisation/name:Q4_K_M'.",
    "subfolder": "Pass the path of the folder as the model.",
    **dict.fromkeys(("model_path", "model_local_path_or_repo_id"), "Use path_or_repo_id."),
    "config": "Change config.json in the split directory, or before the split in the folder of the model.",
    "max_position_embeddings": "The model's own context length applies; generate() takes max_new_tokens.",
    "n_ctx": "The model's own context length applies; generate() takes max_new_tokens.",
    **dict.fromkeys(("max_length", "max_new_tokens", "temperature", "do_sample", "use_cache"), _OF_GENERATE),
    **dict.fromkeys(("n_gpu_layers", "max_gpu_layers", "install_hooks", "load_resident"), _LIMITS),
    **dict.fromkeys(("low_cpu_mem_usage", "offload_state_dict", "offload_buffers", "use_safetensors"), _NOT_NEEDED),
    **dict.fromkeys(("resume_download", "force_download", "ignore_mismatched_sizes", "_fast_init"), _NOT_NEEDED),
}
"""Arguments of transformers, AirLLM and llama-cpp-python -> what to use here."""


class AutoModel:
    """Loads a model that may fit neither the GPU, nor RAM, nor (while it is prepared) the disk."""

    def __init__(self) -> None:
        raise OSError("AutoModel has no constructor: call AutoModel.from_pretrained(path_or_repo_id, ...).")

    @classmethod
    @arguments_checked(ELSEWHERE, (*DELETING, *WITHOUT_EFFECT), WITHOUT_EFFECT)
    @system_errors_by_name()
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path | None = None,
        device: str | None = None,
        dtype: Any = None,
        max_seq_len: int = 512,
        layer_shards_saving_path: str | Path | None = None,
        profiling_mode: bool = False,
        compression: str | None = None,
        token: str | bool | None = None,
        hf_token: str | None = None,
        prefetching: bool = True,
        prefetch_pin_memory: bool = True,
        delete_original: bool = False,
        attn_implementation: str = "auto",
        persister: Any = None,
        show_layer_progress: bool = True,
        cache_layers: int | None = None,
        use_gds: bool = True,
        kv_cache_dir: str | None = None,
        offload_small_layers: bool = False,
        offload_small_layers_use_cpu_cache: bool = True,
        *,
        pretrained_model_name_or_path: str | Path | None = None,
        sequential_shard_processing: bool = False,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        max_memory: Mapping[int | str, int | str] | None = None,
        max_disk: int | str | None = None,
        min_free_disk: int | str = "1GB",
        shard_transfer: str = "auto",
        trust_remote_code: bool = False,
        exact: bool = False,
        fast_bfloat16: bool | None = False,
        verify_checksums: bool = True,
        fit_scales: bool = False,
        verify_source: bool = False,
        split: bool = True,
        hosts: Hosts | None = None,
        draft: str | os.PathLike[str] | StreamedModel | None = None,
    ) -> StreamedModel:
        """Load a model from its split directory; split the checkpoint first if there is none.

        Arguments up to `offload_small_layers_use_cpu_cache` may be given by position, in the order of RabbitLLM 1.1.

        Args:
            path_or_repo_id: a folder with a checkpoint (safetensors, files of torch.save, GGUF, or Llama as published
                by Meta), a file of weights, a split directory, or a repository on the hub. "organisation/name:Q4_K_M"
                names one GGUF model of several in a repository.
            device: "cuda:N", "cpu", or "auto" for all GPUs. The default is the first GPU, else the CPU.
            dtype: a floating torch dtype or its name. The default is the config's; float16 (Gemma 2 and 3, GLM-4:
                float32) in place of bfloat16 on a GPU without bfloat16.
            layer_shards_saving_path: folder for the split directory. The default is the folder of a local checkpoint,
                and `RABBITLLM_HOME` for a repository.
            profiling_mode: record where time is spent; see `model.profiler`.
            compression: "8bit", "4bit", "4bit-double", "auto" or None; or blocks of llama.cpp, for the CPU: "q8_0",
                "q6_k", "q5_k", "q4_k", "iq4_xs", "q4_0", "q3_k", "q2_k", and its mixtures "q5_k_m" and "q4_k_m".
                "4bit-double" also quantizes the scales. "auto" chooses None or blocks for each tensor, on a
                GPU None, "8bit" or "4bit-double": the least expected loss that fits `max_disk` (or the free disk) and,
                if all weights can stay in memory, `max_memory` (or the free memory).
            token: access token for the hub.
            hf_token: another name of `token`.
            prefetching: read the next layer while the current one computes.
            prefetch_pin_memory: use pinned host memory for a GPU. False also keeps no layers in RAM for it.
            delete_original: delete the original checkpoint when the split is complete. A local file with tensors that
                the split leaves out is deleted only with `sequential_shard_processing=True`.
            attn_implementation: as in transformers. "auto" prefers FlashAttention 2 on a GPU that supports it.
            show_layer_progress: show the progress of a split on stderr, and one line for each pass of 2 seconds or
                more.
            cache_layers: number of decoder layers whose bytes stay in host memory, regardless of `max_memory`.
            offload_small_layers: do not prefer embeddings, norm and head to decoder layers when memory is short.
            sequential_shard_processing: process one shard at a time, and delete each after its last use. If False, all
                shards are kept, and those of a repository are fetched into the hub cache first.
            revision: branch, tag or commit of the repository.
            cache_dir: folder of the hub cache.
            local_files_only: send no requests to the hub.
            max_memory: maximum bytes of weights for each device, e.g. `{0: "14GB", "cpu": "24GB"}`. The default is
                the free memory. With a GPU, "cpu" limits the weights that do not fit on it.
            max_disk: maximum bytes of layer files and fetched shards together, e.g. "50GB".
            min_free_disk: bytes of the disk that must stay free. A split that needs them is refused, or stops.
            shard_transfer: how the shards of a repository arrive if `sequential_shard_processing` is True: "file" (each
                is a file), "stream" (none is a file on this disk), or "auto" (the first of these that fits).
            trust_remote_code: run Python code that the repository contains.
            fit_scales: with 4bit and 4bit-double, search for the scales with the least squared error. The layer files
                have the same size, the loss is smaller, the split is slower.
            verify_source: read all shards that still exist, and compare them with their recorded checksums or with the
                hub's digests. If this call begins the split, record the checksums of all shards.
            exact: dequantize quantized weights instead of multiplying by codes. Results have the bits of an
                unquantized model with the dequantized weights; several times slower on the CPU. Without it, experts of
                bfloat16 differ from transformers' in the last bits for few tokens (CPU).
            fast_bfloat16: multiply bfloat16 and float16 by this package's kernel where it is faster than torch: all
                rows on CPUs without instructions for the dtype, up to 4 with AVX512-BF16; and compute layers by calls
                of compiled code, as with codes. Results differ in the last bits. None, as in the commands: on CPUs,
                not with `exact`.
            verify_checksums: compare layer files with their checksums when this process first reads them.
            split: False reads the checkpoint's own shards and writes nothing; not with `compression`. An existing split
                is still used.
            hosts: processes, here or on other machines, that each compute a part of the model.
            draft: what proposes tokens, several of which `generate` checks in a pass if that pays: "ngram" (those that
                followed the same words before), "mtp" (the checkpoint's own heads), "self" (copies of the streamed
                layers at 2 to 4 bits, in memory), a small model with the same vocabulary, its folder or repository, or
                "auto" (where weights are moved for each pass and the model can drop tokens: "mtp", or without usable
                heads "ngram"). Calls for several sequences, for beams or with pictures do without.
            pretrained_model_name_or_path: transformers' name of `path_or_repo_id`.
            max_seq_len, persister, use_gds, kv_cache_dir, offload_small_layers_use_cpu_cache: accepted without effect.

        Returns:
            A model of transformers' class for it, with the attributes and methods of
            `rabbitllm.engine.streamed_model.StreamedModel` (docs/reference/api.md: `model`). With `hosts`, all
            processes but the first get a worker: its `work()` computes until the first process ends.

        Raises:
            OptionError: an argument has an invalid value.
            CheckpointError: the checkpoint is missing, damaged or not supported.
            HubError: the hub cannot be reached, or refuses access.
            SplitError: the split does not fit on the disk, is in use, or belongs to another model.
            NotEnoughMemoryError: the model needs more memory than there is.
            RabbitLLMError: any other error of this package.
            TypeError: an unknown argument, or the model given twice.
        """
        arguments = locals()
        if None not in (path_or_repo_id, pretrained_model_name_or_path):
            raise TypeError("path_or_repo_id and pretrained_model_name_or_path name one argument, and both are given.")
        for name, (default, instead) in WITHOUT_EFFECT.items():
            if arguments[name] != default:
                logger.warning("%s has no effect: %s.", name, instead)
        check_arguments(arguments)
        request = LoadRequest.of(
            path_or_repo_id if pretrained_model_name_or_path is None else pretrained_model_name_or_path,
            compression,
            layer_shards_saving_path or None,
            revision=revision,
            token=token if token is not None else hf_token,
            cache_dir=cache_dir or None,
            local_files_only=local_files_only,
            shards=ShardPolicy.of(sequential=sequential_shard_processing, delete_original=delete_original),
            of_split={
                "max_disk": max_disk,
                "min_free_disk": min_free_disk,
                "shard_transfer": shard_transfer,
                "profiling": profiling_mode,
                "fit_scales": fit_scales,
                "verify_source": verify_source,
            },
            hosts=hosts,
            device=None if device is None else str(device),
            dtype=dtype,
            attn_implementation=attn_implementation,
            prefetching=prefetching,
            pin_memory=prefetch_pin_memory,
            max_memory=max_memory,
            cache_layers=cache_layers,
            small_layers_resident=not offload_small_layers,
            profiling=profiling_mode,
            show_progress=show_layer_progress,
            trust_remote_code=trust_remote_code,
            exact=exact,
            fast_bfloat16=fast_bfloat16,
            verify_checksums=verify_checksums,
        )
        request = request if split else request.unsplit()
        model: StreamedModel
        model, drafting = load_with_draft(request, draft_of(draft, request))
        if drafting is not None:
            from rabbitllm.generation.draft import use_draft

            use_draft(model, drafting)
        return model


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A model with the options of its split and its run; made by `from_pretrained`, the commands and `batch`.

    Attributes:
        spec: the model.
        split: options of the split; None to stream from the checkpoint's own shards and write nothing.
        run: options for running it.
        hosts: processes that each compute a part of it.
    """

    spec: prepare.ModelSpec
    split: SplitOptions | None
    run: RunOptions = field(default_factory=RunOptions)
    hosts: Hosts | None = None

    @classmethod
    def of(
        cls,
        name: str | os.PathLike[str] | None,
        compression: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        shards: ShardPolicy = ShardPolicy.KEEP,
        of_split: Mapping[str, Any] = MappingProxyType({}),
        hosts: Hosts | None = None,
        dtype: Any = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        **of_run: Any,
    ) -> LoadRequest:
        """Parse and check options as users give them.

        Args:
            name, compression, folder: see `ModelSpec`.
            revision, token, cache_dir, local_files_only: see `HubAccess`.
            shards: which shards are deleted, and when.
            of_split, of_run: further options of `prepare.split_options` and of `RunOptions`.
            hosts: processes that each compute a part of it.
            dtype: a dtype, its name, or "auto".
            max_memory: device -> bytes, in accelerate's form.

        Raises:
            OptionError: an option is invalid, or two contradict each other; or there is no name.
        """
        check_model(name)
        compression = check_split(compression)
        cache = None if cache_dir is None else expand(cache_dir, "cache_dir")
        saving_path = None if folder is None else expand(folder, "layer_shards_saving_path")
        access = HubAccess(revision, token, cache, local_files_only)
        spec = prepare.ModelSpec(str(name), compression, saving_path, access)
        run = RunOptions(dtype=parse_dtype(dtype), max_memory=parse_max_memory(max_memory), **of_run)
        return cls(spec, prepare.split_options(compression, shards, **of_split), run, hosts)

    @property
    def loading(self) -> str:
        """What is said while it is loaded."""
        return f"loading {harmless(self.spec.name)} …"

    def too_little(self, *, loads: bool = False) -> TooLittle:
        """What follows if memory is short: with a device or limits it is for this machine, as one that it loads."""
        return "refuse" if loads or self.run.device is not None or self.run.max_memory is not None else "warn"

    def unsplit(self) -> LoadRequest:
        """The same without a split.

        Raises:
            OptionError: it has options that work only while splitting.
        """
        if self.split is not None:
            check_unsplit(self.split)
        return replace(self, split=None)


@dataclass(frozen=True)
class Prepared:
    """A model whose weights can be loaded: its split directory is whole, or its checkpoint was found.

    Args:
        request: the model, its split and its run.
        source: where it was found.
        devices: the devices to run it on; None for those that the request names.
        planner: has checked it, and keeps the plan of its layer files; None if nothing was checked.
        profile: of the split; empty where nothing was split.
    """

    request: LoadRequest
    source: prepare.Source
    devices: Sequence[Device] | None
    planner: LoadPlanner | None
    profile: Profiler

    @property
    def folder(self) -> Path | None:
        """Its split directory; None if its checkpoint is read as it is."""
        return self.source.split_folder if self.request.split is not None or self.source.finished else None

    @property
    def config_folder(self) -> Path:
        """The folder of config and tokenizer."""
        has_own = self.folder is not None and (self.folder / "config.json").exists()
        return self.source.split_folder if has_own else self.source.config_folder

    @system_errors_by_name()
    def load(self, run: RunOptions | None = None, console: Console | None = None) -> Any:
        """Return the model as `AutoModel.from_pretrained` does.

        Args:
            run: how it runs, if its limits of memory are other ones by now.
            console: shows that the model is being loaded; None to show nothing.

        Raises:
            RabbitLLMError: as `AutoModel.from_pretrained`.
        """
        from rabbitllm.engine import load
        from rabbitllm.generation.memory import keep_prompts_within_memory

        run = self.request.run if run is None else run
        status = waiting(console, self.request.loading) if console is not None else contextlib.nullcontext()
        with status, self.opened(run) as (store, home, *holders):

            def load_part(share: PartChooser | None = None) -> StreamedModel:
                part = load.load_model(store, run, home, self.devices, share, self.planner)
                part.profiler.before = (self.profile, *part.profiler.before)
                return part

            hosts = self.request.hosts
            if hosts is None:
                model: Any = load_part()
            else:
                from rabbitllm.pipeline.spread import load_spread

                model = load_spread(hosts, run, load_part)
            for holder in holders:
                holder.keep_for(model)
            keep_prompts_within_memory(model)
            return model

    def placement(self, run: RunOptions) -> Placement:
        """Return where the weights would be if they were loaded now."""
        from rabbitllm.engine.devices import resolve_devices
        from rabbitllm.engine.load_plan import make_load_plan

        with self.opened(run) as (store, home, *_):
            return make_load_plan(store, run, home, resolve_devices(run.device, run.max_memory)).placement

    @contextlib.contextmanager
    def opened(self, run: RunOptions) -> Iterator[tuple[Any, ...]]:
        """Yield the weights, the folder of config and tokenizer, and what holds both for a model: a lock, and files."""
        if self.folder is not None:
            with prepare.read_lock(self.folder) as lock:
                store = None if self.planner is None else self.planner.store
                if not (isinstance(store, LayerStore) and run.verify_checksums and store.is_current()):
                    store = LayerStore(self.folder, verify_checksums=run.verify_checksums)
                yield store, self.config_folder, lock
            return
        with split_display.shown(run.show_progress):
            checkpoint, lock = prepare.whole_checkpoint(self.source)
        with lock, prepare.SmallFiles(checkpoint.sidecars(), checkpoint.derived(), checkpoint.folder) as files:
            yield UnsplitStore(checkpoint), files.folder, lock, files


@system_errors_by_name()
def prepare_model(
    request: LoadRequest, executor: ShardExecutor | None = None, *, loads: bool = True, only_look: bool = False
) -> Prepared:
    """Find a model, and split it unless that is done or not requested.

    Args:
        request: the model, its split and its run, errors in which are raised before the split.
        executor: fills layer files elsewhere, quantizing on the CPU; None for this process.
        loads: whether this process will load the model; if not, a layer too large for memory is only a warning,
            unless the request has a device or limits.
        only_look: begin no split; one that is not made yet is only checked as planned, and cannot be loaded.

    Raises:
        RabbitLLMError: as `AutoModel.from_pretrained`; anything that can be refused is refused before the split.
    """
    run, split = request.run, request.split
    if run.self_draft and request.hosts is not None:
        raise OptionError(
            "draft='self' needs all layers in one process, and several hosts share them.", "Leave the draft out."
        )
    # a device that does not exist is refused before a request to the hub
    devices = prepare.devices_of(run) if loads else None
    source = prepare.find(request.spec, only_look=only_look or split is None)
    if split is None and not source.finished and source.repository is None and source.entry is None:
        prepare.open_weights(source, [source.split_folder])  # names a split where a folder has nothing else
    if split is not None and source.finished and not loads:  # without a check, which would import torch
        profile = prepare.ensure_split(source, prepare.with_memory(split, run), executor=executor)
        return Prepared(request, source, None, None, profile)
    devices = devices or prepare.devices_of(run)
    too_little = "ignore" if request.hosts or executor else request.too_little(loads=loads)
    profile = Profiler()
    with (
        split_display.shown(run.show_progress),
        prepare.acceptance(source, run, devices, too_little=too_little) as planner,
    ):
        options = prepare.with_memory(split or SplitOptions(request.spec.compression), run, devices)
        if source.finished or (split is not None and not only_look):
            profile = prepare.ensure_split(source, options, executor=executor, accept=planner)
        elif split is not None or source.repository is not None:
            prepare.check_from_headers(source, None if split is None else options, planner)
    return Prepared(request, source, devices, planner, profile)


def load(request: LoadRequest, console: Console | None = None) -> Any:
    """Return the model as `AutoModel.from_pretrained` does, split first unless that is done; see `load_with_draft`."""
    return load_with_draft(request, None, console)[0]


def draft_of(draft: Any, request: LoadRequest, find_compression: Callable[[str], str | None] | None = None) -> Any:
    """The argument `draft` of `from_pretrained`, `plan` and the commands -> that of `load_with_draft`.

    A draft model that is not split yet is split beside the model, if the user chose where that is.

    Args:
        draft: a name in any spelling, a folder, a repository, or a loaded model.
        request: the model.
        find_compression: returns the compression of a draft model; None for none.

    Raises:
        OptionError: it names nothing that can be a draft.
    """
    from rabbitllm.generation.draft import KINDS

    if draft is None or hasattr(draft, "placement"):
        return draft
    if not isinstance(draft, str | os.PathLike):
        raise OptionError(
            f"draft is of type {type(draft).__name__}; expected a name, a folder, a repository or a loaded model.",
            'Examples: draft="ngram", draft="Qwen/Qwen2.5-0.5B-Instruct", draft=AutoModel.from_pretrained(...).',
        )
    name, split, options, folder = str(draft), request.split, request.run, request.spec.folder
    if (word := name.lower()) in (*KINDS, "auto", "none"):
        return None if word == "none" else word
    device = None if options.device == "auto" else options.device
    run = RunOptions(device, **{option: getattr(options, option) for option in _OF_DRAFTS})
    compression = None if find_compression is None else find_compression(name)
    spec = prepare.ModelSpec(name, compression, access=replace(request.spec.access, revision=None))
    if split is None:
        return LoadRequest(spec, None, run)
    shards = ShardPolicy.DELETE_FETCHED if split.shards.takes_one_at_a_time else ShardPolicy.KEEP
    splitting = SplitOptions(compression, shards)
    if folder is not None and not (source := prepare.find(spec, only_look=True)).finished:
        spec = replace(spec, folder=_draft_folder(folder / "draft", spec, source, splitting))
    return LoadRequest(spec, splitting, run)


def _draft_folder(folder: Path, spec: prepare.ModelSpec, source: prepare.Source, options: SplitOptions) -> Path:
    """The folder for the split of a draft: one of its own, or `folder` itself, where earlier versions had the first."""
    with contextlib.suppress(SplitMismatchError):
        earlier = prepare.find(replace(spec, folder=folder), only_look=True) if folder.is_dir() else None
        if earlier is not None and earlier.finished:
            prepare.check_finished(earlier, options)
            return folder
    if source.local is not None:
        return folder / local_folder_name(source.local / (source.entry or ""))
    return folder / resolve_name(spec.name).replace("/", "--").replace(":", "-")


def load_with_draft(request: LoadRequest, draft: Any, console: Console | None = None) -> tuple[Any, Draft | None]:
    """Load a model, and before it its draft model, so that the model is placed in the memory that is left.

    Args:
        request: the model.
        draft: a draft, the request for one, "auto" for one that costs nothing where it helps, or None.
        console: see `Prepared.load`.

    Raises:
        RabbitLLMError: see `AutoModel.from_pretrained`, and `prepare_draft` for a draft that does not suit the model.
    """
    prepared, draft = prepare_with_draft(request, draft, console)
    if prepared.profile.stages:
        print(prepared.profile.report())
    model = prepared.load(console=console)
    if draft is None or not hasattr(model, "placement"):  # a worker
        return model, None

    from rabbitllm.generation.draft import chosen_draft

    return model, chosen_draft(model, draft)


def prepare_with_draft(request: LoadRequest, draft: Any, console: Console | None = None) -> tuple[Prepared, Any]:
    """Load a draft model, and prepare its model with what drafts need; for the arguments see `load_with_draft`."""
    if draft is None:
        return prepare_model(request), None
    if isinstance(draft, LoadRequest):
        sources = [prepare.find(model.spec, only_look=model.split is None) for model in (request, draft)]
        if not all(source.finished for source in sources):  # before a split vocabularies are compared
            from rabbitllm.generation.draft import check_folders

            check_folders(*(source.config_folder for source in sources))
        draft = load(draft, console)
    return prepare_model(replace(request, run=request.run.drafted(draft))), draft


def check_unsplit(options: SplitOptions) -> None:
    """Refuse options of a split for a model that is not split.

    Raises:
        OptionError: see above.
    """
    named = {
        f"compression={options.compression!r}": options.compression is not None,
        "sequential_shard_processing=True": options.shards.deletes_used,
        "delete_original=True": options.shards.deletes_rest,
        "verify_source=True": options.verify_source,
    }
    if wrong := next((name for name, is_set in named.items() if is_set), None):
        raise OptionError(
            f"{wrong} works only while splitting, and split=False does not split.", "Remove one of the two."
        )
