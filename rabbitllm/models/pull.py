"""Prepares a model and reports where its parts are; or predicts whether it would fit.

A split as `AutoModel.from_pretrained` makes it, with one difference: the shards of a repository are by default taken
one at a time, and those fetched for the split are not kept; files that the user had before are kept, in the hub cache
as well as in a folder.
"""

from __future__ import annotations

import enum
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rabbitllm import prepare
from rabbitllm.auto_model import LoadRequest, prepare_model
from rabbitllm.base import progress
from rabbitllm.base.options import ShardPolicy
from rabbitllm.base.terminal import counted, listed, put, put_fact, size, size_rounded_up
from rabbitllm.checkpoints.checkpoint import NO_TOKENIZER, SourceIdentity, lacks_tokenizer, sidecars_in
from rabbitllm.checkpoints.config import read_config
from rabbitllm.checkpoints.index import gguf_label
from rabbitllm.errors import IncompleteSplitError, OptionError, RabbitLLMError, system_errors_by_name
from rabbitllm.estimate.split_estimate import STANDARD, CompressionEstimate, Rates, Route
from rabbitllm.models.library import DAMAGED, SplitEntry, as_record, look
from rabbitllm.splitter.filler import ShardExecutor
from rabbitllm.splitter.plan import PlannedFiles, PlannedShard


class Shards(enum.Enum):
    """The state of a checkpoint's shards after a split."""

    KEPT = "kept"
    FETCHED = "fetched, and not kept"
    DELETED = "deleted"
    PARTLY = "partly here"


def shard_policy(*, sequential: bool = False, keep_shards: bool = False, delete_original: bool = False) -> ShardPolicy:
    """The policy for shards by the options of commands: by default fetched ones are not kept.

    Args:
        sequential: delete each shard once it is used up, wherever it is.
        keep_shards: for a repository: fetch all shards into the hub cache first, and keep them.
        delete_original: remove the rest of the original once the split is complete.

    Raises:
        OptionError: `sequential` and `keep_shards`.
    """
    if sequential and keep_shards:
        raise OptionError("sequential deletes shards, but keep_shards keeps them.", "Remove one of the two options.")
    return ShardPolicy.of(sequential=sequential, delete_original=delete_original, keep_fetched=keep_shards)


@dataclass(frozen=True, slots=True)
class Pulled:
    """A prepared model.

    Attributes:
        name: the user's name for it, normalised.
        entry: its split directory.
        config_folder: folder of config and tokenizer.
        before: whether it was complete before this call, or before it had waited for another process.
        seconds: duration of this call.
        shards: their state; None where it is unknown.
        shards_at: the folder that has shards, if any.
        peak_disk_bytes: peak size of the split directory during the split; 0 where nothing was split.
    """

    name: str
    entry: SplitEntry
    config_folder: Path
    before: bool
    seconds: float
    shards: Shards | None
    shards_at: Path | None
    peak_disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DryRun:
    """The outcome that `pull` would have.

    Attributes:
        name: the user's name for it, normalised.
        estimate: the estimate at the requested compression.
        routes: those that the request allows, preferred ones first.
        kept: shards that are kept although others are deleted, since the split leaves out tensors of them.
        gguf: "GGUF Q4_K_M" for such files; None for others.
        is_local: whether all shards are on this machine.
        has_tokenizer: whether texts can be read.
    """

    name: str
    estimate: CompressionEstimate
    routes: tuple[Route, ...]
    kept: tuple[PlannedShard, ...] = ()
    gguf: str | None = None
    is_local: bool = False
    has_tokenizer: bool = True

    @property
    def route(self) -> Route | None:
        """The route that would be taken."""
        return next((route for route in self.routes if route.fits), None)

    @property
    def shown(self) -> Route | None:
        """The route that would be taken, else the last one, which lacks least."""
        return self.route or (self.routes[-1] if self.routes else None)

    @property
    def fits(self) -> bool:
        """Whether `pull` would succeed, by the estimate."""
        return self.estimate.finished or self.route is not None


@system_errors_by_name()
def pull(request: LoadRequest, executor: ShardExecutor | None = None) -> Pulled:
    """Find a model, split it unless that is done, and report where its parts are.

    Args:
        request: the model, its split and its later run; a layer too large for the memory of this machine is only a
            warning, unless the request has a device or limits.
        executor: fills layer files elsewhere, quantizing on the CPU; None for this process.

    Raises:
        RabbitLLMError: see `AutoModel.from_pretrained`; anything that can be refused is refused before the split.
    """
    start = time.perf_counter()
    ends: list[progress.SplitDone] = []

    def note(event: progress.Event) -> None:
        if isinstance(event, progress.SplitDone):
            ends.append(event)

    with progress.listening(note, shows=False):
        prepared = prepare_model(request, executor, loads=False)
    source = prepared.source
    entry = look(source.split_folder)
    if entry is None:
        raise IncompleteSplitError(f"{source.split_folder} was removed during the split.", "Make the same call again.")
    if entry.state == DAMAGED and not entry.legacy:
        raise IncompleteSplitError(
            f"{entry.folder} is damaged: {entry.problem}.",
            f"Make its layers again: rabbitllm verify {shlex.quote(str(entry.folder))} --repair.",
        )
    shards, folder = shards_of(source, entry.source)
    peak, seconds = ends[-1].peak_disk_bytes if ends else 0, time.perf_counter() - start
    return Pulled(source.name, entry, prepared.config_folder, not ends, seconds, shards, folder, peak)


def shards_of(source: prepare.Source, origin: SourceIdentity | None) -> tuple[Shards | None, Path | None]:
    """The state of a split's shards now, and the folder that has some; None where it is unknown.

    Args:
        source: where the model was found.
        origin: the checkpoint that was split, if that is recorded.
    """
    if origin is None or (source.repository is None and source.local is None):
        return None, None
    names = list(origin.fingerprints)
    if source.repository is not None:
        cached = [file[1] for name in names if (file := source.repository.cached(name)) is not None]
        count, state_if_none = len(cached), Shards.FETCHED
        folder = cached[0].parent if cached else None
    else:
        assert source.local is not None
        count, state_if_none = sum((source.local / name).is_file() for name in names), Shards.DELETED
        folder = source.local if count else None
    return (Shards.KEPT if count == len(names) else Shards.PARTLY if count else state_if_none), folder


@system_errors_by_name()
def dry_run(request: LoadRequest) -> DryRun:
    """Predict from headers whether `pull` would fit, by the plan's own estimate. Writes and measures nothing.

    Raises:
        RabbitLLMError: see `rabbitllm.plan`.
    """
    from rabbitllm.estimate.plan import split_estimate_at  # imports all measuring code, which a split does not need
    from rabbitllm.estimate.scan import SourceScan

    assert request.split is not None
    options = prepare.with_memory(request.split, request.run)
    scan = SourceScan(request.spec, options)
    source = scan.source
    compression = options.compression if options.compression in scan.folders else next(iter(scan.folders))
    if compression in scan.plans and compression not in scan.manifests:
        try:
            with prepare.acceptance(source, request.run, too_little=request.too_little()) as accept:
                accept(PlannedFiles(scan.plans[compression], scan.folders[compression]))
        except RabbitLLMError as error:
            scan.refused[compression] = error.problem
    estimate = split_estimate_at(scan, compression, Rates(None, None, {}, options.threads))
    policy = options.shards
    standard = not (policy.takes_one_at_a_time if source.repository is not None else policy.deletes_used)
    routes = tuple(route for route in estimate.routes if (route.name == STANDARD) is standard)
    if options.shard_transfer != "auto" and not standard:
        stream = options.shard_transfer == "stream"
        routes = tuple(route for route in routes if (route.name == "sequential_stream") is stream)
    plan = scan.plans.get(compression)
    kept = tuple(shard for shard in plan.shards if shard.is_kept(plan.source, policy)) if plan is not None else ()
    shards = plan.shards if plan is not None else ()
    gguf = gguf_label((shard.name for shard in shards), {shard.name: shard.metadata for shard in shards})
    is_local = not any(shard.staged for shard in shards)
    has_tokenizer = scan.checkpoint is None or not lacks_tokenizer(scan.checkpoint.sidecar_sizes(), scan.config)
    kept = kept if policy.deletes_original else ()
    return DryRun(source.name, estimate, routes, kept, gguf, is_local, has_tokenizer)


def pulled_record(pulled: Pulled) -> dict[str, Any]:
    """For `json.dumps`; sizes in bytes, times in seconds."""
    return {
        **as_record(pulled.entry),
        "model": pulled.name,
        "already_whole": pulled.before,
        "seconds": pulled.seconds,
        "original": pulled.shards.value if pulled.shards is not None else None,
        "original_at": str(pulled.shards_at) if pulled.shards_at is not None else None,
        "peak_disk_bytes": pulled.peak_disk_bytes,
    }


def dry_run_record(outcome: DryRun) -> dict[str, Any]:
    """For `json.dumps`."""
    route = outcome.shown
    lacking = route.lacking if route is not None else None
    return {
        "model": outcome.name,
        "fits": outcome.fits,
        "state": outcome.estimate.state,
        "folder": str(outcome.estimate.folder),
        "compression": outcome.estimate.compression,
        "output_bytes": outcome.estimate.output_bytes,
        "peak_bytes": route.disk_bytes if route is not None else None,
        "created_bytes": route.created_bytes if route is not None else None,
        "route": route.name if route is not None else None,
        "lacking": lacking.record() if lacking is not None else None,
        "obstacle": outcome.estimate.obstacle,
    }


def show_pulled(pulled: Pulled, request: LoadRequest, console: Console) -> None:
    """Print the outcome."""
    entry = pulled.entry
    how = entry.form
    state = "is ready; it was complete already" if pulled.before else "is ready"
    put(console, Text(f"{pulled.name}, {how}, {state}", "bold green"))
    put_fact(console, "folder", str(entry.folder))
    put_fact(console, "layer files", f"{entry.layers}; the folder has {size(entry.nbytes - entry.copies_bytes)}")
    if pulled.shards is not None:
        put_fact(console, "original", _ORIGINALS[pulled.shards].format(pulled.shards_at))
    if not pulled.before:
        put_fact(console, "time", f"{pulled.seconds:.1f} s, at most {size(pulled.peak_disk_bytes)} in the folder")
    has_none = lacks_tokenizer(sidecars_in(entry.folder), read_config(entry.folder))
    put_fact(console, "next", f"{NO_TOKENIZER} in {entry.folder}" if has_none else next_command(pulled, request))
    if entry.gguf is not None and entry.compression is None and pulled.shards is Shards.KEPT:
        put_fact(console, "unsplit", f"{no_split_command(pulled.name)}; it needs no more disk than the GGUF file")


_ORIGINALS = {
    Shards.KEPT: "kept, in {}",
    Shards.FETCHED: "on the hub; the downloaded shards are not kept",
    Shards.DELETED: "its shards were deleted: these layer files are the only copy",
    Shards.PARTLY: "some of its shards are in {}",
}
"""The original of a pulled model, with the folder of its shards."""


def next_command(pulled: Pulled, request: LoadRequest) -> str:
    """The command that runs this model."""
    return shlex.join(["rabbitllm", "run", *model_words(pulled.name, request)]) + ' "What is a rabbit?"'


def no_split_command(name: str) -> str:
    """The command that runs a GGUF model from its own file."""
    return shlex.join(["rabbitllm", "run", name, "--no-split"])


def model_words(name: str, request: LoadRequest) -> list[str]:
    """The arguments that name a model and this split of it."""
    words = [name]
    if request.spec.compression is not None:
        words += ["--compression", request.spec.compression]
    if request.spec.folder is not None:
        words += ["--dir", str(request.spec.folder)]
    if request.spec.access.revision is not None:
        words += ["--revision", request.spec.access.revision]
    return words


def show_dry_run(outcome: DryRun, request: LoadRequest, console: Console, typed: Callable[[str], str] = str) -> None:
    """Print the plan, and whether it fits; `typed` names arguments as options."""
    estimate, how = outcome.estimate, outcome.estimate.compression or outcome.gguf or "uncompressed"
    put(console, Text(f"{outcome.name}, {how}", "bold"))
    if estimate.output_bytes is not None:
        put_fact(console, "layer files", f"{size(estimate.output_bytes)} in {estimate.folder}")
    if estimate.state == "unfinished":
        used = f"{estimate.shards_used} of {counted(estimate.shards, 'shard')} used up"
        put_fact(console, "begun", f"{used}; pull resumes it")
    if (route := outcome.shown) is not None:
        put_fact(console, "on the disk", f"at most {size_rounded_up(route.disk_bytes)} more than now")
        created = f"{size_rounded_up(route.created_bytes)} ({route.created_bytes:,} bytes)"
        put_fact(console, "written", f"at most {created}; --max-disk limits this")
        put_fact(console, "shards", _shards_text(route, request))
    for shard in outcome.kept:
        put_fact(console, "kept", f"{shard.name}, since the split leaves out {listed(map(str, shard.left_out), 3)}")
    if outcome.gguf is not None and estimate.compression is None and outcome.is_local and not estimate.finished:
        put_fact(console, "unsplit", f"{no_split_command(outcome.name)}; it needs no more disk than the GGUF file")
    if not outcome.has_tokenizer:
        put_fact(console, "texts", NO_TOKENIZER)
    text, style = _verdict(outcome)
    put(console, Text(typed(text), style))


def _shards_text(route: Route, request: LoadRequest) -> str:
    assert request.split is not None
    if request.split.shards.deletes_used:
        return "each is deleted after use"
    if not request.split.shards.takes_one_at_a_time:
        return "downloaded to the hub cache and kept"
    return "kept where they are" if route.name == STANDARD else "fetched one by one and not kept; those here stay"


def _verdict(outcome: DryRun) -> tuple[str, str]:
    if outcome.estimate.finished:
        return "Already complete.", "bold green"
    if outcome.estimate.obstacle is not None:
        return f"The split cannot be made: {outcome.estimate.obstacle}.", "bold red"
    if outcome.fits:
        return "The split fits. `rabbitllm plan` estimates its time.", "bold green"
    if not outcome.routes:
        return "The split cannot be made this way: `rabbitllm plan` shows other ways.", "bold red"
    lacking = outcome.routes[-1].lacking
    assert lacking is not None
    text = f"The split does not fit: it needs {lacking.needed} at its peak; {lacking.found}."
    return f"{text} `rabbitllm plan` shows other ways.", "bold red"
