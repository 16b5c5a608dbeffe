"""Loads a model as `from_pretrained` does, generates greedily, and takes the time. Shows nothing.

First one token right after loading, which reads all that was not read yet; then the turns, whose times are reported,
with the profiler off; then one turn with the profiler on, which gives the bytes, the overlap and the limit. The prompt
is of random tokens, and a generation always has the wanted length.
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

# The most memory that this process has had. Knows nothing of models.


def peak_memory() -> int | None:
    """Bytes resident at the peak, pages of mapped files included; None where the system does not tell."""
    try:
        # not what getrusage tells: on Linux that includes what the parent had before this program was started
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
    """What to generate.

    Attributes:
        tokens: new ones, of each sequence.
        prompt_tokens: of each sequence.
        batch: sequences.
        turns: whose times are taken.
    """

    tokens: int = 32
    prompt_tokens: int = 16
    batch: int = 1
    turns: int = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation; seconds.

    Attributes:
        first: until the first token was there.
        further: for each pass after that, in the mean.
    """

    first: float
    further: float


@dataclass(frozen=True)
class Measured:
    """What came of it.

    Attributes:
        name: of the model, as it was given.
        request: what was generated.
        device, dtype, compression: how.
        placement: where the weights are; prints as a table.
        load: seconds until the model was there, splitting included if it was not split yet.
        first_after_load: seconds of the very first token.
        turns: with the profiler off.
        sums: kind of pass -> sums, of the turn with the profiler on.
        profile: that turn's, see `rabbitllm.telemetry.record`.
        passes: that turn's.
        in_place: "device tier" -> stored bytes that each pass uses where they are.
        trace: that turn's.
        peak: bytes of memory that the process had at its peak, mapped files included; None where it is not known.
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
        """Of all sequences together, after the first."""
        return self.request.batch / self.further

    def per_token(self, nbytes: int) -> float:
        """Bytes of all further passes -> bytes for each token that they made."""
        return nbytes / (self.sums[FURTHER].passes * self.request.batch)


def measure(
    source: str, request: BenchRequest, options: Mapping[str, Any], say: Callable[[str], None] = lambda text: None
) -> Measured:
    """Load and generate.

    Args:
        source: as for `AutoModel.from_pretrained`.
        request: what to generate.
        options: for `AutoModel.from_pretrained`.
        say: told what is being done.

    Raises:
        RabbitLLMError: as `AutoModel.from_pretrained` does.
    """
    say("loading")
    import rabbitllm.engine.load  # noqa: F401  what that imports is no part of loading

    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # the profile of a split that is made now
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
    """Ids (batch, prompt tokens), the same every time."""
    random = torch.Generator().manual_seed(SEED)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (request.batch, request.prompt_tokens), generator=random).to(model.device)


def _turn(model: Any, prompt: torch.Tensor, tokens: int) -> Turn:
    """Generate so many tokens of each sequence."""
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
