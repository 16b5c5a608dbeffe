"""`rabbitllm batch` and `rabbitllm.batch`: an input, a model loaded for it, an output; with a progress display.

    input ─▶ scan ─▶ unanswered lines, in an efficient order ─▶ answers ─▶ journal ─▶ output, in the input's order

A separate thread writes the answers, so that no pass waits for the disk: during an fsync the next answers collect
and are written together.

The model is loaded so that its weights leave room for as many lines as possible. Streamed weights cost their time once
per pass, however many lines share the pass. So, while lines wait, memory for one more line is worth more than the same
memory for weights. The KV cache gets the memory that the longest lines need together, up to half of the free memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from rich.console import Console

from rabbitllm.auto_model import LoadRequest, prepare_with_draft
from rabbitllm.base.forks import DaemonThread
from rabbitllm.batch_jobs.answers import answered
from rabbitllm.batch_jobs.display import JobDisplay, Progress
from rabbitllm.batch_jobs.inputs import CHARACTERS_OF_A_TOKEN, InputScan, scanned
from rabbitllm.batch_jobs.inputs import opened as opened_input
from rabbitllm.batch_jobs.items import BatchAnswer, Defaults, JobLimits
from rabbitllm.batch_jobs.journal import BatchJournal, check_output, clear_lock, errors_of_finished, opened
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.display.region import THE_REGION
from rabbitllm.engine.devices import Device, dtype_on, resolve_devices
from rabbitllm.engine.skeleton import read_config
from rabbitllm.generation.kv_cache import cost_by_config
from rabbitllm.generation.memory import cost_of_a_pass, free_memory, weight_limits
from rabbitllm.generation.reasoning import Thinking
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.models.library import folders_of
from rabbitllm.store.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from rabbitllm.engine.streamed_model import StreamedModel

Groups = Generator[list[BatchAnswer]]
"""Answers, in groups that are complete at the same time."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch job.

    Attributes:
        source: the input; see `inputs.opened`.
        out: the output.
        model: the request for the model; or a model from `AutoModel.from_pretrained`.
        defaults: for values that lines omit.
        limits: limits of the batch.
        columns: see `inputs.opened`.
        overwrite: see `journal.opened`.
        elsewhere: provides the missing answers, if no model is loaded in this process.
    """

    source: Any
    out: Path
    model: LoadRequest | Any
    defaults: Defaults
    limits: JobLimits
    columns: Mapping[str, str] | None = None
    overwrite: bool = False
    elsewhere: Callable[[InputScan, BatchJournal], Groups] | None = None

    @property
    def name(self) -> str:
        """The model's name as the user gave it."""
        return str(self.model.spec.name if isinstance(self.model, LoadRequest) else self.model.name_or_path)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the model that change answers."""
        if not isinstance(self.model, LoadRequest):
            return {"dtype": str(self.model.dtype).removeprefix("torch.")}
        spec = self.model.spec
        return {"compression": spec.compression, "revision": spec.access.revision, "dtype": self.model.run.dtype}


def work(batch: BatchJob) -> Progress:
    """Run the job; a finished output of the same input, model and settings is kept.

    Everything that can be refused is refused before the model is loaded.

    Raises:
        RabbitLLMError: the input cannot be read, the output exists already or belongs to another input, the model
            cannot be loaded, or the disk is full; earlier answers are kept.
    """
    check_output(batch.out, batch.source, folders_of(batch.name) if batch.out.exists() else ())
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(opened_input(batch.source, batch.columns))
        scan = scanned(file, batch.defaults)
        defaults: dict[str, Any] = {}
        for name, value in asdict(batch.defaults).items():  # files on disk have all options on one level, in this order
            defaults |= value if isinstance(value, dict) else {name: value}
        defaults["thinking"] = defaults.pop("enabled")
        recorded = ("temperature", "top_p", "seed")
        for name in [name for name, value in defaults.items() if value is None and name not in recorded]:
            del defaults[name]  # earlier versions lack it
        head = {"input": scan.digest, "lines": len(scan), "model": batch.name, **batch.settings, **defaults}
        head |= {"exact": True} if batch.limits.exact else {}
        if not batch.overwrite and (errors := errors_of_finished(batch.out, head)) is not None:
            clear_lock(batch.out)
            return Progress(len(scan), len(scan), errors, len(scan), 0, 0, 0.0)
        journal = stack.enter_context(opened(batch.out, len(scan), head, overwrite=batch.overwrite))
        progress = Progress(len(journal), journal.done, journal.errors, journal.resumed, 0, 0, 0.0)
        if journal.done < len(journal):
            progress = _answer(batch, scan, journal)
        journal.write_output(batch.out)
        return progress


def _answer(batch: BatchJob, scan: InputScan, journal: BatchJournal) -> Progress:
    display = JobDisplay()
    if batch.elsewhere is not None:
        with THE_REGION.claim(display):
            return keep(batch.elsewhere(scan, journal), journal, display.update)
    if isinstance(batch.model, LoadRequest):
        ready = BatchModel.load(batch.model, scan.longest(batch.limits.sequences), batch.limits)
    else:
        ready = BatchModel(batch.model)
    if batch.defaults.thinking != Thinking():
        ChatTemplate(ready.model).thinking(batch.defaults.thinking)  # refused now, not with each line
    if ready.manifest is not None:
        journal.check_weights(digest_of(ready.manifest.source))
    limits = replace(batch.limits, cache_bytes=batch.limits.cache_bytes or ready.cache_bytes, draft=ready.draft)
    items = map(scan.item, scan.ordered(journal.missing()))
    line, ready.model.pass_line = ready.model.pass_line, None  # one row for all passes
    try:
        with THE_REGION.claim(display):
            progress = keep(answered(ready.model, batch.name, items, limits, display.watch), journal, display.update)
            return replace(progress, forced_tokens=display.forced_tokens)
    finally:
        ready.model.pass_line = line


def keep(groups: Groups, journal: BatchJournal, notify: Callable[[Progress], object]) -> Progress:
    """Make answers from any source durable.

    Args:
        groups: the answers.
        journal: the journal of the output.
        notify: called with the progress whenever more answers are durable; in a separate thread.

    Raises:
        RabbitLLMError, OSError, MemoryError: see `answers.answered` and `BatchJournal.add`; earlier answers are kept.
    """
    start, tokens, failed = time.monotonic(), [0, 0], list[BaseException]()
    waiting: queue.SimpleQueue[list[BatchAnswer] | None] = queue.SimpleQueue()

    def progress() -> Progress:
        counts = len(journal), journal.done, journal.errors, journal.resumed
        return Progress(*counts, tokens[0], tokens[1], time.monotonic() - start)

    def write() -> None:
        received: list[list[BatchAnswer] | None] = []
        try:
            notify(progress())
            while None not in received:
                received = [waiting.get()]
                while not waiting.empty():
                    received.append(waiting.get())
                answers = [answer for group in received for answer in group or ()]
                if answers:
                    journal.add(answers)
                    tokens[0] += sum(answer.prompt_tokens for answer in answers)
                    tokens[1] += sum(answer.new_tokens for answer in answers)
                    notify(progress())
        except BaseException as error:
            failed.append(error)

    def check() -> None:
        if failed:
            raise failed[0]

    writer = DaemonThread(write, "rabbitllm-journal")
    writer.start()
    try:
        with contextlib.closing(groups):
            for group in groups:
                check()
                waiting.put(group)
    finally:
        waiting.put(None)
        writer.join()
    check()
    return progress()


SPARE_TOKENS = 256
"""Allowance for the chat template of a line."""
CACHE_SHARE = 2
"""The KV cache gets at most 1 / `CACHE_SHARE` of the free memory, if no size is given. Lines that need more do not
raise this limit, and the memory of a pass does not lower it."""
MAX_PASS_SHARE = 4
"""The activations of a pass get at most 1 / `MAX_PASS_SHARE` of the free memory."""


@dataclass(frozen=True, slots=True)
class BatchModel:
    """A loaded model.

    Attributes:
        model: a model from `AutoModel.from_pretrained`.
        cache_bytes: limit of the KV cache; None if it could not be predicted before the model was loaded.
        manifest: of its split; None without one.
        draft: its draft, loaded.
    """

    model: StreamedModel
    cache_bytes: int | None = None
    manifest: Manifest | None = None
    draft: Any = "auto"

    @classmethod
    def load(cls, request: LoadRequest, lengths: Sequence[int], limits: JobLimits) -> BatchModel:
        """Load the model, and split it first if necessary.

        Args:
            request: the model, its split and its run.
            lengths: estimated tokens of the longest lines that ask for a generation.
            limits: limits of the batch; without one of the KV cache it gets the need of the lines, up to half of the
                free memory.

        Raises:
            RabbitLLMError: see `AutoModel.from_pretrained`.
        """
        console = Console(stderr=True, highlight=False)
        with contextlib.redirect_stdout(sys.stderr):  # output while loading is not part of the result
            prepared, draft = prepare_with_draft(request, limits.draft, console)
            run = prepared.request.run
            cache_bytes, pass_bytes = limits.cache_bytes, 0
            if request.split is not None and run.max_memory is None:
                devices = resolve_devices(run.device, None)
                free = sum(device.free_bytes() for device in devices)
                config = read_config(prepared.config_folder, run.trust_remote_code)
                dtype = expected_dtype(config, run.dtype, devices)
                if cache_bytes is None:
                    needed = needed_bytes(config, lengths, limits.sequences, dtype)
                    cache_bytes = min(needed, free // CACHE_SHARE) or None
                texts = min(len(lengths), limits.sequences)
                pass_bytes = min(worthwhile_pass_bytes(config, texts, dtype), free // MAX_PASS_SHARE)
            run = replace(run, max_memory=weight_limits(run, cache_bytes, pass_bytes), show_progress=False)
            model = prepared.load(run, console)
        transformers.logging.set_verbosity_error()  # no warnings about missing kernels amid progress
        if cache_bytes is not None and limits.cache_bytes is None:  # less may be free now than was predicted
            cache_bytes = left_of(free_memory(model), cache_bytes, pass_bytes)
        manifest = read_manifest(prepared.folder) if prepared.folder is not None else None
        return cls(model, cache_bytes, manifest, draft)


def left_of(free: int, cache_bytes: int, pass_bytes: int) -> int:
    """Bytes of the KV cache, once the weights are loaded, if the user gave no size.

    Args:
        free: free memory in bytes.
        cache_bytes: predicted size of the KV cache.
        pass_bytes: working memory of a pass; the KV cache may take half of the free memory even so.
    """
    return min(cache_bytes, max(free - pass_bytes, free // CACHE_SHARE))


def digest_of(source: SourceIdentity) -> str:
    """A digest that identifies weights: of the fingerprints of their source shards."""
    fingerprints = json.dumps(sorted(source.fingerprints.items()))
    return hashlib.blake2b(fingerprints.encode(), digest_size=16).hexdigest()


def needed_bytes(config: PretrainedConfig, lengths: Sequence[int], sequences: int, dtype: torch.dtype) -> int:
    """Bytes of the KV caches of the longest lines, all at the same time.

    Args:
        config: the model's config.
        lengths: estimated tokens of each line.
        sequences: limit of lines at a time.
        dtype: the dtype to compute in.
    """
    text = config.get_text_config(decoder=True)
    max_length = getattr(text, "max_position_embeddings", None)
    cost = cost_by_config(text, dtype)
    longest = sorted(lengths, reverse=True)[:sequences]
    if not longest:
        return 0
    # the longest one has to fit alone, even where a character is a token
    longest.append(CHARACTERS_OF_A_TOKEN * longest[0] + SPARE_TOKENS)
    return sum(cost.bytes_for(min(length, max_length) if isinstance(max_length, int) else length) for length in longest)


def worthwhile_pass_bytes(config: PretrainedConfig, texts: int, dtype: torch.dtype) -> int:
    """Bytes, without the KV cache, for a pass with enough tokens to be worth reading the weights.

    Args:
        config: the model's config.
        texts: limit of lines answered at a time.
        dtype: the dtype to compute in.
    """
    return cost_of_a_pass(config.get_text_config(decoder=True), dtype.itemsize).worthwhile(texts)


def expected_dtype(config: PretrainedConfig, requested: str | None, devices: Sequence[Device]) -> torch.dtype:
    """The dtype in which a model will compute, as far as its config tells.

    Args:
        config: the model's config.
        requested: by the caller; None if that is left to the checkpoint and the devices.
        devices: those that compute.
    """
    import torch

    if requested is not None:
        named: torch.dtype = getattr(torch, requested)
        return named
    own = getattr(config, "dtype", None) or torch.bfloat16
    return dtype_on(devices, own, config.get_text_config(decoder=True).model_type)
