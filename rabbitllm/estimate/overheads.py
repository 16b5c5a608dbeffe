"""Costs of a token other than products with weights: Python, small operations, and the binding of streamed weights.

The first two are measured on a Llama of transformers that has the model's own sizes and no matrices, run by the same
`generate`; a decoder layer of another kind is assumed to cost as much for each module in it. Binding is measured on the
model's own skeleton, with made-up bytes, by the code that a pass runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rabbitllm.engine.devices import Device
from rabbitllm.engine.load_plan import LoadPlan
from rabbitllm.engine.units import PartReader, Place, UnitJob, UnitSource, typed
from rabbitllm.estimate.bitsandbytes_products import made_up_state
from rabbitllm.estimate.generation import PROMPT_TOKENS
from rabbitllm.formats.tensor_spec import TensorSpec

FEW_LAYERS, MORE_LAYERS = 1, 7
TOKENS = 24
MADE_BYTES = 64 << 20
"""Bytes of a conversion of many tensors (experts) that are carried out; the whole is extrapolated from these."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds per token without the products with weights: once per pass, and per module inside a decoder layer."""

    a_pass: float
    a_module: float


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes that small operations of a layer depend on."""

    vocabulary: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int


def sizes_of(config: Any) -> LayerSizes:
    """Return the sizes in a config; those of a small model for missing entries and ones in another form."""

    def whole(name: str, default: int) -> int:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # raised by transformers if layers differ in it
            return default
        return value if type(value) is int and value > 0 else default

    heads = whole("num_attention_heads", 4)
    key_heads = whole("num_key_value_heads", heads)
    head = whole("head_dim", whole("hidden_size", 16 * heads) // heads)
    return LayerSizes(
        whole("vocab_size", 32),
        whole("hidden_size", 16 * heads),
        whole("intermediate_size", 64),
        heads if heads % key_heads == 0 else key_heads,
        key_heads,
        max(head // 2 * 2, 2),
    )


def overhead(sizes: LayerSizes, dtype: torch.dtype, device: Device) -> Overhead:
    """Measure the overhead, with models of few and of more layers."""
    few, more = (_weightless(layers, sizes, dtype, device) for layers in (FEW_LAYERS, MORE_LAYERS))
    short, long = _token_seconds(few), _token_seconds(more)
    modules = sum(1 for _ in few.model.layers[0].modules())
    a_layer = max(long - short, 0.0) / (MORE_LAYERS - FEW_LAYERS)
    return Overhead(max(short - FEW_LAYERS * a_layer, 0.0), a_layer / modules)


def _weightless(layers: int, sizes: LayerSizes, dtype: torch.dtype, device: Device) -> Any:
    """Return a Llama of these sizes without matrices, since they are never multiplied with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads,
        "head_dim": sizes.head,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**settings, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, _Given(module.out_features, dtype, device.torch_device))
        elif isinstance(module, nn.Embedding):
            model.set_submodule(name, _Given(module.embedding_dim, dtype, device.torch_device))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.ones_like(parameter, dtype=dtype, device=device.torch_device)))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device.torch_device)
    return model.eval()


class _Given(nn.Module):
    """Replaces a matrix: returns the same precomputed result for every input of a shape."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.width = width
        self._results: dict[tuple[int, ...], torch.Tensor] = {}
        self._made = torch.empty(0, dtype=dtype, device=device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return (..., T, width) for ids (..., T) or vectors (..., T, K)."""
        shape = tuple(input.shape[:-1]) if input.is_floating_point() else tuple(input.shape)
        if shape not in self._results:
            self._results[shape] = self._made.new_full((*shape, self.width), 0.5)
        return self._results[shape]


def _token_seconds(model: Any) -> float:
    """Return the median time of a token after the first."""
    prompt = torch.ones(1, PROMPT_TOKENS, dtype=torch.int64, device=model.device)
    clock = _Clock()
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False, streamer=clock
    )
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(clock.times[2:]))


class _Clock:
    """Records the time of each token, as a streamer of `generate`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        """Record the prompt first, then each token."""
        tokens.tolist()  # on a GPU this waits for the tokens
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def binding_seconds(drawn: LoadPlan, unit: str, device: Device) -> float:
    """Measure the seconds to make and bind a unit's parameters from its stored bytes, and to free them."""
    source = drawn.sources[unit]
    part = _made_up(source, device)
    total = 0.0
    for job, times in _in_small(source):
        few = dataclasses.replace(source, jobs=(job,))
        total += times * min(_seconds(few, drawn.model, part, device) for _ in range(3 if times == 1 else 2))
    absent = [(place, place.placeholder(device.torch_device, _never_read)) for place in source.places]
    start = time.perf_counter()
    for place, placeholder in absent:
        place.bind(placeholder)
    return total + time.perf_counter() - start


def _never_read(place: Place) -> torch.Tensor:
    raise AssertionError(place.target)


def _seconds(source: UnitSource, model: Any, part: PartReader, device: Device) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        source.make(model, part)
    device.synchronise()
    return time.perf_counter() - start


def _in_small(source: UnitSource) -> Iterator[tuple[UnitJob, float]]:
    """Yield each job, or one like it with fewer sources, and the factor from its time to that of the whole job."""
    for job in source.jobs:
        of_pattern: dict[str, list[tuple[str, str]]] = {}
        for pattern, name in job.recipe.sources:
            of_pattern.setdefault(pattern, []).append((pattern, name))
        made = sum(place.shape.numel() * place.dtype.itemsize for _, place in job.places)
        count = min(map(len, of_pattern.values()))
        few = max(count * MADE_BYTES // max(made, 1), 1)
        if job.recipe.converter is None or few >= count:
            yield job, 1
            continue
        kept = tuple(entry for entries in of_pattern.values() for entry in entries[:few])
        yield dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, sources=kept)), count / few


def _made_up(source: UnitSource, device: Device) -> PartReader:
    """Return a reader of parts that all have the same bytes, on the device."""
    largest = max((part.nbytes for tensor in source.stored.values() for part in tensor.parts), default=0)
    make = device.host_buffer if device.shares_host_memory else device.device_buffer
    buffer = make(max(largest, 1))
    if any(job.places and (job.recipe.converter or not source.is_view) for job in source.jobs):
        buffer.fill_(0)  # untouched memory is read at no cost

    def read(spec: TensorSpec) -> torch.Tensor:
        said = made_up_state(spec.name)
        return said.to(device.torch_device) if said is not None else typed(buffer[: spec.nbytes], spec)

    return read
