"""Loads a model like `from_pretrained`, generates greedily, and measures the time. Prints nothing.

The first token right after loading reads all weights that were not read yet. It is followed by the turns, whose times
are reported, with the profiler off; then by one turn with the profiler on, for the bytes, the overlap and the limit.
The prompt consists of random tokens, and a generation always has the requested length.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rabbitllm.auto_model import AutoModel
from rabbitllm.telemetry.passes import FURTHER, Pass, PassSums
from rabbitllm.telemetry.trace import Trace

# Peak memory of this process. Independent of models.


def peak_memory() -> int | None:
    """Return the peak resident bytes, pages of mapped files included; None if the system does not report it."""
    try:
        # not getrusage: on Linux its value includes the memory of the parent before this program was started
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _from_usage()


def _from_usage() -> int | None:
    if sys.platform == "win32":
        import psutil

        peak: int = psutil.Process().memory_info().peak_wset
        return peak
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


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
class Turn:
    """Times of one generation, seconds.

    Attributes:
        first: time to the first token.
        further: mean time of each pass after that.
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
        profile: of that turn, see `rabbitllm.telemetry.record`.
        passes: of that turn.
        in_place: "device tier" -> stored bytes that each pass uses without moving them.
        trace: of that turn.
        peak: peak memory of the process, bytes, mapped files included; None if not known.
    """

    name: str
    request: BenchRequest
    device: str
    dtype: str
    compression: str | None
    placement: Any
    load: float
    first_after_load: float
    turns: tuple[Turn, ...]
    sums: Mapping[str, PassSums]
    profile: Mapping[str, Any]
    passes: tuple[Pass, ...]
    in_place: Mapping[str, int]
    trace: Trace
    peak: int | None

    @property
    def first(self) -> float:
        """Median seconds to the first token."""
        return statistics.median(turn.first for turn in self.turns)

    @property
    def further(self) -> float:
        """Median seconds of a further pass; it makes a token of each sequence."""
        return statistics.median(turn.further for turn in self.turns)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all sequences together, after the first token."""
        return self.request.batch / self.further

    def per_token(self, nbytes: int) -> float:
        """Convert bytes of all further passes to bytes per token."""
        return nbytes / (self.sums[FURTHER].passes * self.request.batch)


def measure(
    source: str, request: BenchRequest, options: Mapping[str, Any], say: Callable[[str], None] = lambda text: None
) -> Measured:
    """Load a model and generate.

    Args:
        source: as for `AutoModel.from_pretrained`.
        request: size of the generation.
        options: for `AutoModel.from_pretrained`.
        say: called with a description of each step.

    Raises:
        RabbitLLMError: as in `AutoModel.from_pretrained`.
    """
    say("loading")
    import rabbitllm.engine.load  # noqa: F401  its imports are not part of the loading time

    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # the profile of a split that is made by this call
        model = AutoModel.from_pretrained(source, profiling_mode=True, show_layer_progress=False, **options)
    loaded = time.perf_counter() - start
    model.profiler.enabled = False
    prompt = _prompt(model, request)
    say("the first token")
    after_load = _turn(model, prompt, 1)
    turns = []
    for number in range(request.turns):
        say(f"turn {number + 1} of {request.turns}")
        turns.append(_turn(model, prompt, request.tokens))
    say("once more, with the profiler on")
    model.profiler.enabled = True
    with model.profiler.trace() as trace:
        _turn(model, prompt, request.tokens)
    return Measured(
        name=source,
        request=request,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        compression=options.get("compression"),
        placement=model.placement,
        load=loaded,
        first_after_load=after_load.first,
        turns=tuple(turns),
        sums=model.profiler.sums,
        profile=model.profiler.as_json(),
        passes=model.profiler.passes,
        in_place=model.profiler.in_place,
        trace=trace,
        peak=peak_memory(),
    )


def _prompt(model: Any, request: BenchRequest) -> torch.Tensor:
    """Return reproducible random ids (batch, prompt tokens)."""
    random = torch.Generator().manual_seed(SEED)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (request.batch, request.prompt_tokens), generator=random).to(model.device)


def _turn(model: Any, prompt: torch.Tensor, tokens: int) -> Turn:
    """Generate this many tokens of each sequence."""
    ends: list[float] = []

    def stamp(module: Any, args: Any, output: Any) -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        ends.append(time.perf_counter())

    hook = model.register_forward_hook(stamp)
    start = time.perf_counter()
    try:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=0,
        )
    finally:
        hook.remove()
    further = (ends[-1] - ends[0]) / max(len(ends) - 1, 1)
    return Turn(ends[0] - start, further)
