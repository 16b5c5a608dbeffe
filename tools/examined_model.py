"""Examines one model class: a small random model is saved in shards, split sequentially and compared with transformers.

The result is a `Row`. This runs in a process of its own, since some models make it crash.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

import rabbitllm
from rabbitllm.errors import RabbitLLMError
from tests.support import tiny_configs, tiny_inputs
from tests.support.tiny_inputs import Inputs

OK = "ok"
REFUSED = "refused before any shard was deleted"
UNBUILT = "cannot be built tiny"
WRONG = "WRONG"
LOST = "DELETED THEN REFUSED"
DIED = "the process died"
SOUND = (OK, REFUSED, UNBUILT)

SHARDS = 4
"""Approximate number."""
BUDGETS = {"resident": 1 << 34, "streamed": 0}
"""Limits of memory for weights, bytes."""


@dataclass(frozen=True)
class Case:
    """A model class.

    Attributes:
        model_type: of transformers.
        auto: the auto class that chooses it.
        name: of the class.
    """

    model_type: str
    auto: str
    name: str

    @property
    def key(self) -> str:
        """A name for it that a file may have."""
        return f"{self.model_type}.{self.name}"


@dataclass(frozen=True)
class Row:
    """The result for one class.

    Attributes:
        model_type, name: see `Case`.
        result: one of the constants above.
        why: the reason of any result but `OK`; with `OK`, a restriction if there is one.
        inputs: kinds of input whose outputs were compared.
        blocks: number of numbered blocks, by the names of the tensors.
        files: number of layer files.
        scattered: blocks that have no layer file of their own.
        warnings: those of the package, except about a missing tokenizer.
        seconds: duration.
    """

    model_type: str
    name: str
    result: str
    why: str = ""
    inputs: tuple[str, ...] = ()
    blocks: int = 0
    files: int = 0
    scattered: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong and nothing was lost."""
        return self.result in SOUND


class _Unbuilt(Exception):
    """A model cannot be built, or cannot be called."""


@dataclass
class _Findings:
    """Parts of a row that are known before its result."""

    inputs: tuple[str, ...] = ()
    blocks: int = 0
    files: int = 0
    scattered: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)


def examine(case: Case, folder: Path) -> Row:
    """Build, save, split, load and compare.

    Args:
        case: the class.
        folder: for its files; empty or not there yet.
    """
    findings = _Findings()
    try:
        result, why = _examined(case, folder, findings)
    except _Unbuilt as error:
        result, why = UNBUILT, _said(error)
    return Row(
        case.model_type,
        case.name,
        result,
        why,
        findings.inputs,
        findings.blocks,
        findings.files,
        findings.scattered,
        tuple(dict.fromkeys(findings.warnings)),
    )


def _examined(case: Case, folder: Path, findings: _Findings) -> tuple[str, str]:
    original = folder / "original"
    inputs, model_class = _saved(case, original)
    findings.inputs = inputs.kinds
    findings.blocks = len({block for block, _ in _blocks(original) if block})
    plain = _loaded_plainly(model_class, original)
    expected = tiny_inputs.results(plain, inputs.arguments)
    if not _are_finite(expected):
        raise _Unbuilt("in transformers it has no finite outputs")
    tokens = _tokens_of(plain, inputs)
    refused = {}
    for way, budget in BUDGETS.items():
        copy = shutil.copytree(original, folder / way / case.model_type)  # a name for messages
        shards = _shards(copy)
        with _listening(findings.warnings):
            try:
                model = _loaded(copy, budget)
            except Exception as error:  # a raw one is to be a row too
                if _shards(copy) != shards:
                    return LOST, f"{way}: {_said(error)}"
                if not isinstance(error, RabbitLLMError):
                    return WRONG, f"{way}: nothing was deleted, and a raw error is raised: {_said(error)}"
                refused[way] = _said(error)
                continue
        findings.files = max(findings.files, len(_shards(copy / "splitted_model")))
        findings.scattered = _scattered(copy / "splitted_model")
        wrong = _difference(model, plain, inputs, expected, tokens)
        if wrong:
            return WRONG, f"{way}: {wrong}"
        del model
    if len(refused) == len(BUDGETS):
        return REFUSED, refused["resident"]
    limits = [f"only {' and '.join(BUDGETS.keys() - refused.keys())}: {why}" for why in refused.values()]
    if type(plain).__name__ != case.name and "Thinker" in type(plain).__name__:
        limits.append(f"as {type(plain).__name__}: text, no speech")
    return OK, "; ".join(limits)


def _saved(case: Case, folder: Path) -> tuple[Inputs, Any]:
    """Save a small random model in shards; return inputs for it, and its class."""
    errors: list[Exception] = []
    classes = [cls for name in (case.auto, case.name) if (cls := getattr(transformers, name, None)) is not None]
    for model in itertools.chain.from_iterable(tiny_configs.models(cls, case.model_type, errors) for cls in classes):
        _shake(model)
        try:
            part = getattr(model, "thinker", model)  # of a model that speaks, the part that makes text
            inputs = tiny_inputs.inputs_of(part)
            if not _are_finite(tiny_inputs.results(part, inputs.arguments)):
                raise _Unbuilt("it has no finite outputs")
            size = sum(tensor.nbytes for tensor in model.state_dict().values())
            model.save_pretrained(folder, max_shard_size=max(size // SHARDS, 1))
        except Exception as error:
            errors.append(error)
            shutil.rmtree(folder, ignore_errors=True)
            continue
        return inputs, type(part)
    raise _Unbuilt(_said(errors[0]))


def _are_finite(tensors: list[torch.Tensor]) -> bool:
    """Whether there are outputs, and all of them are finite."""
    return bool(tensors) and all(tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point())


def _shake(model: Any) -> None:
    """Add noise to all weights: a weight that is not loaded could otherwise have the right value by initialization.

    Rows of padding tokens keep their values, since some types (youtu) set them to zero whenever they are loaded.
    """
    generator = torch.Generator().manual_seed(3)
    padding = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.padding_idx is not None]
    with torch.no_grad():
        rows = [embedding.weight[embedding.padding_idx].clone() for embedding in padding]
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        for embedding, row in zip(padding, rows, strict=True):
            embedding.weight[embedding.padding_idx] = row


def _loaded_plainly(model_class: Any, folder: Path) -> Any:
    """As transformers loads it, each weight at an address that suits every kernel."""
    try:
        model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:
        raise _Unbuilt(f"transformers saves it and cannot load it: {_said(error)}") from error
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _loaded(folder: Path, budget: int) -> Any:
    return rabbitllm.AutoModel.from_pretrained(
        folder,
        device="cpu",
        max_memory={"cpu": budget},
        min_free_disk=0,
        sequential_shard_processing=True,
        show_layer_progress=False,
    )


def _tokens_of(plain: Any, inputs: Inputs) -> torch.Tensor | None:
    """Tokens that it generates; None if it does not generate."""
    try:
        return tiny_inputs.generated(plain, inputs.arguments) if plain.can_generate() else None
    except Exception:
        return None


def _difference(
    model: Any, plain: Any, inputs: Inputs, expected: list[torch.Tensor], tokens: torch.Tensor | None
) -> str:
    """The first fault of a loaded model; empty if there is none."""
    if type(model).__name__ != type(plain).__name__:
        return f"it is loaded as {type(model).__name__}"
    try:
        got = tiny_inputs.results(model, inputs.arguments)
        generated = tiny_inputs.generated(model, inputs.arguments) if tokens is not None else None
    except Exception as error:
        return f"it raises {_said(error)}"
    if not tiny_inputs.same(got, expected):
        again = tiny_inputs.results(plain, inputs.arguments)
        if not tiny_inputs.same(again, expected):
            raise _Unbuilt("transformers computes something else each time")
        return _how_far(got, expected)
    if tokens is not None and generated is not None and not torch.equal(generated, tokens):
        return "equal results, and other tokens"
    return ""


def _how_far(got: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    if [(t.shape, t.dtype) for t in got] != [(t.shape, t.dtype) for t in expected]:
        return "its results have other shapes or dtypes"
    pairs = [(a.double(), b.double()) for a, b in zip(got, expected, strict=True) if a.numel()]
    if any(a.isnan().any() for a, _ in pairs):
        return "its results are NaN"
    return f"its results are off by {max(float((a - b).abs().max()) for a, b in pairs):.1g}"


def _shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _blocks(folder: Path) -> Iterator[tuple[str, str]]:
    """The block and the file of each tensor. A block is a name up to the first number after a word; else it is ""."""
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                words = name.split(".")
                number = next((index for index, word in enumerate(words) if index and word.isdigit()), len(words))
                yield ".".join(words[: number + 1]) if number + 1 < len(words) else "", path.name


def _scattered(folder: Path) -> tuple[str, ...]:
    """Blocks that are in several files, or share theirs."""
    files, blocks = defaultdict(set), defaultdict(set)
    for block, file in _blocks(folder):
        files[block].add(file)
        blocks[file].add(block)
    own = {block for block in files if len(files[block]) == 1 and len(blocks[min(files[block])]) == 1}
    return tuple(sorted(files.keys() - own - {""}))


class _Listener(logging.Handler):
    def __init__(self, warnings: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        if "tokenizer" not in (text := record.getMessage()):
            self._warnings.append(text)

    def __enter__(self) -> None:
        logging.getLogger("rabbitllm").addHandler(self)

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("rabbitllm").removeHandler(self)


def _listening(warnings: list[str]) -> _Listener:
    return _Listener(warnings)


def _said(error: Exception) -> str:
    """An error in one line, without the places of this machine."""
    text = error.problem if isinstance(error, RabbitLLMError) else str(error)
    line = re.sub(r"\s+", " ", re.sub(r"/\S*/", "", text)).strip()[:240]
    return line if isinstance(error, RabbitLLMError | _Unbuilt | ValueError) else f"{type(error).__name__}: {line}"
