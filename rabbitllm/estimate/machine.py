"""The measured rates of this machine; each is measured once, however many models use it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import Device, resolve_devices
from rabbitllm.estimate.cost_model import PROMPT_TOKENS
from rabbitllm.estimate.measure import (
    DIRECT,
    DROPPED,
    SET_BYTES,
    FileSample,
    something_to_read,
    upload_rate,
    working_set,
)
from rabbitllm.quant.schemes import SCHEMES, check_compression

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Measured = TypeVar("Measured")


# Costs of a token other than products with weights: Python and small operations. They are measured on a Llama of
# transformers that has the model's own sizes and no matrices, run by the same `generate`; a decoder layer of another
# kind is assumed to cost as much for each module in it.

FEW_LAYERS, MORE_LAYERS = 1, 7
TOKENS = 24


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


TYPICAL = LayerSizes(vocabulary=128256, hidden=4096, inner=14336, heads=32, key_heads=8, head=128)
"""Sizes of a model with 8 billion parameters."""
TYPICAL_SHAPES = {(4096, 4096): 1, (14336, 4096): 3, (4096, 14336): 1}
"""(rows, columns) -> share of the bytes, in the same model."""
TYPICAL_UNIT = 32 << 20
"""Size of one read when measuring."""


def sizes_of(config: PretrainedConfig) -> LayerSizes:
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
        model: PreTrainedModel = LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | nn.Embedding):
            width = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
            model.set_submodule(name, _Given(width, dtype, device.torch_device))
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


def _token_seconds(model: PreTrainedModel) -> float:
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


def product_key(device: str, form: str, mapped: bool, tokens: int) -> Hashable:
    """Return the key of a measurement of products in `Machine.measured`.

    Args:
        device: its name.
        form: form that weights are multiplied from.
        mapped: whether they are resident in mapped files, or come into a buffer for each pass.
        tokens: number at a time.
    """
    return ("product", device, form, mapped, tokens)


@dataclass
class Machine:
    """The devices and options that models would run with, and their rates.

    Attributes:
        devices: the first layer's first.
        options: as `AutoModel.from_pretrained` would get them.
        min_free: bytes of the disk to keep free.
        rough: for many models in little time, reuse the first measurement of each kind for all: large products of one
            form are about equally fast, whatever their shapes. The other costs of a token depend on the sizes of
            layers; typical sizes are measured. Nothing is measured for the first token after a prompt.
        files: files to measure reading with; None to choose them for each model.
    """

    devices: Sequence[Device]
    options: RunOptions
    min_free: int
    rough: bool = False
    files: Sequence[Path] | None = None
    _known: dict[Hashable, object] = field(default_factory=dict)

    def device(self, name: str) -> Device:
        """Return a device by name."""
        return next(device for device in self.devices if device.name == name)

    def something_to_read(self, folder: Path, files: Sequence[Path]) -> AbstractContextManager[Sequence[Path]]:
        """Yield its own `files`; without them see `measure.something_to_read`."""
        return something_to_read(folder, files, self.min_free) if self.files is None else nullcontext(self.files)

    def measured(self, key: Hashable, measure: Callable[[], Measured]) -> Measured:
        """Measure a rate for one model, of its own shapes and sizes; `key` identifies the kind of measurement."""
        return self._once(key, measure) if self.rough else measure()

    def overhead(self, sizes: LayerSizes, dtype: torch.dtype, device: str) -> Overhead:
        """Return the overhead of layers of these sizes."""
        sizes = TYPICAL if self.rough else sizes
        return self._once(("overhead", sizes, dtype, device), lambda: overhead(sizes, dtype, self.device(device)))

    def upload(self, device: str) -> float:
        """See `measure.upload_rate`."""
        return self._once(("upload", device), lambda: upload_rate(self.device(device)))

    def _once(self, key: Hashable, measure: Callable[[], Measured]) -> Measured:
        if key not in self._known:
            self._known[key] = measure()
        return cast(Measured, self._known[key])


@contextlib.contextmanager
def rough_machine(folder: Path, min_free: int) -> Iterator[Machine]:
    """Provide all GPUs, or the CPU, and a file to read, which is removed afterwards; loggers are silent meanwhile.

    Args:
        folder: the future folder of layer files.
        min_free: bytes of its disk to keep free.
    """
    options = RunOptions(device="auto", show_progress=False)
    devices = resolve_devices("auto", None)
    with something_to_read(folder, (), min_free) as files, _quiet("transformers", "rabbitllm"):
        yield Machine(devices, options, min_free, rough=True, files=files)


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence these loggers, whose warnings are about models that are not loaded."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def measurements(machine: Machine) -> Iterator[tuple[Callable[[], float | None], str]]:
    """Yield measurements of a rough machine: a function that returns bytes per second, and its description."""
    sample = FileSample(machine.files or (), TYPICAL_UNIT)
    for mode, words in ((DIRECT, "past the page cache"), (DROPPED, "through the page cache")):
        measure = partial(machine.measured, ("read", mode), partial(sample.rate, mode))
        yield measure, f"reading the disk of layer files, {words}"
    for device in machine.devices:
        plain = "bfloat16" if device.has_bf16 else "float16"
        coded = dict.fromkeys(scheme.codes for scheme in SCHEMES.values()) if device.shares_host_memory else ()
        for form in (plain, *coded):
            codes = " codes" if form in SCHEMES else ""
            yield partial(_product, machine, device, form), f"multiplying with {form}{codes} on {device.name}"
        if not device.shares_host_memory:
            yield partial(machine.upload, device.name), f"copying from host memory to {device.name}"


def _product(machine: Machine, device: Device, form: str) -> float:
    if form in SCHEMES:
        check_compression(form)
    dtype = torch.bfloat16 if device.has_bf16 else torch.float16

    def measure() -> float:
        return working_set(form, TYPICAL_SHAPES, dtype, device, SET_BYTES, mapped=True).rate(1)

    return machine.measured(product_key(device.name, form, True, 1), measure)
