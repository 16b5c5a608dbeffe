"""`rabbitllm bench`: measures how fast a model generates on this machine, and how the time is divided.

The first token right after loading reads all weights that were not read yet. It is followed by the turns, whose times
are reported, with the profiler off; then by one turn with the profiler on, for the bytes, the overlap and the limit.
The prompt consists of random tokens, and a generation always has the requested length.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console
from rich.text import Text

from rabbitllm.auto_model import LoadRequest, load_with_draft
from rabbitllm.base.plain_json import fields_of
from rabbitllm.base.terminal import counted, harmless, put, put_fact, size
from rabbitllm.engine.free_memory import status_bytes
from rabbitllm.errors import OptionError
from rabbitllm.generation.draft import Draft, use_draft
from rabbitllm.generation.request import Sampling
from rabbitllm.telemetry.passes import (
    BETWEEN_LAYERS,
    COMPUTE,
    DEQUANTIZE,
    FURTHER,
    NOTHING,
    READ,
    READ_WAIT,
    UPLOAD_WAIT,
    Drafts,
    PassSums,
    copies_of,
    shown,
)
from rabbitllm.telemetry.profiler import Trace

if TYPE_CHECKING:
    from rabbitllm.engine.placement import Placement
    from rabbitllm.engine.streamed_model import StreamedModel


def peak_memory() -> int | None:
    """Return the peak resident bytes, pages of mapped files included; None if the system does not report it."""
    # before getrusage: on Linux its value includes the memory of the parent before this program was started
    if peak := status_bytes(Path("/"), "VmHWM"):
        return peak
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024


SEED = 0


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The size of the generation to measure.

    Attributes:
        tokens: new tokens of each sequence.
        prompt_tokens: of each sequence.
        batch: number of sequences.
        turns: number of measured generations.
    """

    tokens: int = 32
    prompt_tokens: int = 16
    batch: int = 1
    turns: int = 3


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Times of one generation, seconds.

    Attributes:
        first: time to the first token.
        further: mean time of each token after that.
    """

    first: float
    further: float


@dataclass(frozen=True)
class Measured:
    """The result of a measurement.

    Attributes:
        name: of the model, as given.
        request: the size of the generation.
        device, dtype, compression: of the model.
        placement: of the weights; prints as a table.
        load: seconds of loading, including a split if one had to be made.
        first_after_load: seconds of the very first token.
        turns: with the profiler off.
        sums: kind of pass -> sums, of the turn with the profiler on.
        profile: of that turn, see `rabbitllm.telemetry._report`.
        in_place: "device tier" -> stored bytes that each pass uses without moving them.
        drafts: what drafts brought in it; None without any.
        trace: of that turn.
        peak: peak memory of the process, bytes, mapped files included; None if not known.
    """

    name: str
    request: BenchRequest
    device: str
    dtype: str
    compression: str | None
    placement: Placement
    load: float
    first_after_load: float
    turns: tuple[TurnTimes, ...]
    sums: Mapping[str, PassSums]
    profile: Mapping[str, Any]
    in_place: Mapping[str, int]
    drafts: Drafts | None
    trace: Trace
    peak: int | None

    @property
    def first(self) -> float:
        """Median seconds to the first token."""
        return statistics.median(turn.first for turn in self.turns)

    @property
    def further(self) -> float:
        """Median seconds of a further token of each sequence."""
        return statistics.median(turn.further for turn in self.turns)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all sequences together, after the first token."""
        return self.request.batch / self.further

    def per_token(self, nbytes: int) -> float:
        """Convert bytes of all further passes to bytes per token."""
        return nbytes / ((self.request.tokens - 1) * self.request.batch)

    @property
    def in_place_per_token(self) -> dict[str, float]:
        """Bytes that are used for each token without being moved, by "device tier"."""
        return {where: self.per_token(nbytes * self.sums[FURTHER].passes) for where, nbytes in self.in_place.items()}


def measure(
    load_request: LoadRequest,
    request: BenchRequest,
    say: Callable[[str], None] = lambda text: None,
    draft: LoadRequest | Draft | Literal["auto"] | None = None,
) -> Measured:
    """Load a model and generate.

    Args:
        load_request: the model; it is loaded with its profiler.
        request: size of the generation.
        say: called with a description of each step.
        draft: see `load_with_draft`; a batch of several sequences does without "auto".

    Raises:
        RabbitLLMError: as in `AutoModel.from_pretrained`, or a batch of several sequences has a draft.
    """
    if request.batch > 1 and draft not in (None, "auto"):
        raise OptionError("Drafts are for one sequence, or for requests; found --batch.", "Leave one of the two out.")
    say("loading")
    import rabbitllm.engine.load  # noqa: F401  its imports are not part of the loading time

    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # the profile of a split that is made by this call
        profiled = replace(load_request, run=replace(load_request.run, profiling=True, show_progress=False))
        model, drafting = load_with_draft(profiled, draft)
    if drafting is not None:
        use_draft(model, drafting)
    loaded = time.perf_counter() - start
    model.profiler.enabled = False
    prompt = _prompt(model, request)
    say("the first token")
    after_load = _turn(model, prompt, 1)
    turns = []
    for index in range(request.turns):
        say(f"turn {index + 1} of {request.turns}")
        turns.append(_turn(model, prompt, request.tokens))
    say("once more, with the profiler on")
    model.profiler.enabled = True
    with model.profiler.trace() as trace:
        _turn(model, prompt, request.tokens)
    return Measured(
        name=load_request.spec.name,
        request=request,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        compression=load_request.spec.compression,
        placement=model.placement,
        load=loaded,
        first_after_load=after_load.first,
        turns=tuple(turns),
        sums=model.profiler.sums,
        profile=model.profiler.as_json(),
        in_place=model.profiler.in_place,
        drafts=model.profiler.drafts,
        trace=trace,
        peak=peak_memory(),
    )


def _prompt(model: StreamedModel, request: BenchRequest) -> torch.Tensor:
    """Return reproducible random ids (batch, prompt tokens)."""
    random = torch.Generator().manual_seed(SEED)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (request.batch, request.prompt_tokens), generator=random).to(model.device)


def _turn(model: StreamedModel, prompt: torch.Tensor, tokens: int) -> TurnTimes:
    """Generate this many tokens of each sequence."""
    ends: list[float] = []

    def stamp(module: Any, args: Any, output: Any) -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        ends.append(time.perf_counter())

    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    greedy = Sampling(temperature=0).arguments() | {"num_beams": 1, "pad_token_id": 0}
    with model.register_forward_hook(stamp):
        start = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **lengths, **greedy)
    further = (ends[-1] - ends[0]) / max(tokens - 1, 1)
    return TurnTimes(ends[0] - start, further)


def as_record(measured: Measured) -> dict[str, Any]:
    """Convert a measurement; see the module."""
    further = measured.sums[FURTHER]
    return {
        "model": measured.name,
        **fields_of(measured, "device", "dtype", "compression"),
        **fields_of(measured.request, "tokens", "prompt_tokens", "batch"),
        "load_seconds": measured.load,
        "first_after_load_seconds": measured.first_after_load,
        "first_token_seconds": measured.first,
        "token_seconds": measured.further,
        "tokens_per_second": measured.tokens_per_second,
        "turns": [{"first_token_seconds": turn.first, "token_seconds": turn.further} for turn in measured.turns],
        "bytes_per_token": {
            "disk": measured.per_token(further.disk_bytes),
            "copied": measured.per_token(further.copied_bytes),
            "in_place": measured.in_place_per_token,
        },
        **fields_of(further, "overlap", "bottleneck"),
        "peak_memory_bytes": measured.peak,
        "placement": [
            {"device": entry.device, "tier": entry.tier, "units": entry.units, "bytes": entry.stored_bytes}
            for entry in measured.placement.contents
        ],
        "profile": measured.profile,
    }


BAR = 36
"""Columns of a full bar."""
_STYLES = {READ_WAIT: "blue", UPLOAD_WAIT: "cyan", DEQUANTIZE: "magenta", COMPUTE: "yellow", BETWEEN_LAYERS: "white"}
_LABELS = {stage: shown(stage) for stage in _STYLES} | {READ_WAIT: "wait for weights"}


def show(measured: Measured, console: Console) -> None:
    """Print a measurement."""
    put(console, Text(headline(measured), "bold"))
    console.print()
    for name, value in _rows(measured):
        put_fact(console, name, value)
    console.print()
    put(console, Text("time of a decode pass, by stage (profiler on)", "dim"))
    for label, seconds, share, style in shares(measured.sums[FURTHER]):
        bar = "█" * round(share * BAR)
        row = Text.assemble(f"  {label:<18}{seconds * 1e3:>10,.2f} ms {share:>5.0%}  ", (bar, style))
        console.print(row, soft_wrap=True)
    console.print()
    put(console, Text("placement of the weights", "dim"))
    for line in str(measured.placement).splitlines():
        console.print(Text(f"  {line}"), soft_wrap=True)


def headline(measured: Measured) -> str:
    """Return the title: the model, its compression or dtype, and its device."""
    how = measured.compression or measured.dtype
    return f"{harmless(measured.name)}, {how}, on {measured.device}"


def summary(measured: Measured) -> str:
    """Return the main figures in one line, for a picture."""
    further = measured.sums[FURTHER]
    rate = f"{measured.tokens_per_second:.3g} tokens/s"
    if measured.request.batch > 1:  # else one says what the other does
        rate = f"{measured.further:.3g} s/pass, {rate}"
    elif measured.further >= 1:
        rate = f"{measured.further:.3g} s/token"
    return f"{rate}, overlap {further.overlap:.0%}, limit: {shown(further.bottleneck or 'none')}"


def shares(further: PassSums) -> Iterator[tuple[str, float, float, str]]:
    """Yield (label, mean seconds per pass, share of it, colour) of the calling thread's stages; the rest comes last."""
    for stage, seconds in further.caller_seconds.items():
        yield _LABELS[stage], seconds, seconds * further.passes / further.wall, _STYLES[stage]


def _rows(measured: Measured) -> Iterator[tuple[str, str]]:
    request, further = measured.request, measured.sums[FURTHER]
    sequences = "" if request.batch == 1 else f" in each of {counted(request.batch, 'sequence')}"
    prompt = counted(request.prompt_tokens, "token")
    medians = f"medians of {counted(len(measured.turns), 'turn')}"
    yield "generated", f"{counted(request.tokens, 'token')} after {prompt}{sequences}; {medians}"
    yield "load", f"{measured.load:.2f} s, splitting included"
    yield "first token", f"{measured.first:.3f} s; directly after loading {measured.first_after_load:.3f} s"
    times = sorted(turn.further for turn in measured.turns)
    spread = f" ({times[0]:.4f} to {times[-1]:.4f})" if len(times) > 1 else ""
    yield "each further", f"{measured.further:.4f} s{spread}, {measured.tokens_per_second:,.2f} tokens/s"
    if measured.drafts is not None:
        yield "drafts", measured.drafts.words()
    yield "bytes a token", ", ".join(_bytes(measured, further))
    yield "overlap", f"{further.overlap:.0%} (the longer of transfer and compute time, over wall time)"
    yield "limit", shown(further.bottleneck or "none")
    if measured.peak is not None:
        yield "peak memory", f"{size(measured.peak)}, with pages of mapped files"


def _bytes(measured: Measured, further: PassSums) -> Iterator[str]:
    read, copied = further.stages.get(READ, NOTHING), copies_of(further.stages)
    if read.nbytes:
        yield f"{size(round(measured.per_token(read.nbytes)))} from the disk at {_rate(read.nbytes, read.busy_seconds)}"
    if copied.nbytes:
        yield f"{size(round(measured.per_token(copied.nbytes)))} copied at {_rate(copied.nbytes, copied.busy_seconds)}"
    for where, nbytes in measured.in_place_per_token.items():
        yield f"{size(round(nbytes))} in memory ({where})"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{size(round(nbytes / seconds))}/s"
