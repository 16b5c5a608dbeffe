"""`rabbitllm.quality`: measures the loss of a compressed model against the uncompressed one.

Compares their next-token distributions on the same text, by one pass over the weights of each, layer by layer, so that
neither has to fit into memory. Models with the bundled tokenizer also answer held-out problems. The reference is read
from whole shards or from an existing split; nothing is written for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rabbitllm.auto_model import LoadRequest, load
from rabbitllm.base.options import arguments_checked, expand, is_named
from rabbitllm.base.plain_json import fields_of
from rabbitllm.base.terminal import Column, Printed, counted, harmless, put, put_fact, put_table, size, text_on
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.local import entry_in
from rabbitllm.demo.models import BundledModel
from rabbitllm.demo.tasks import Problem, held_out
from rabbitllm.engine.devices import resolve_devices
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.errors import CheckpointError, OptionError, QualityError, system_errors_by_name
from rabbitllm.evaluation.compare import Summary, compare
from rabbitllm.generation.request import ModelLimits
from rabbitllm.generation.scoring import ScoredText
from rabbitllm.models.library import compression_to_run
from rabbitllm.prepare import ModelSpec, split_options
from rabbitllm.store.locations import resolve_name, spelled_out
from rabbitllm.store.manifest import read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

_SET_IT = "Set its path, as in against='FOLDER'."
SHARE = 3
"""By default 1 / `SHARE` of free memory is for the weights of each model. A pass reads each weight once, so resident
weights gain nothing. The rest is for waiting micro-batches."""


def compared_spec(spec: ModelSpec, *, alone: bool) -> ModelSpec:
    """The compared model; the default compression is that of an existing split.

    Raises:
        QualityError: with `alone`, it is uncompressed without a request by `compression`, and would be compared with
            itself.
    """
    chosen = compression_to_run(spec.name, spec.compression, spec.folder)
    if alone and spec.compression is None and chosen is None:
        manifest = read_manifest(expand(resolve_name(spec.name)))
        if manifest is None or manifest.compression is None:
            raise QualityError(
                f"{spec.name} is not compressed; the default comparison is with the uncompressed model.",
                "Set one, as in compression='4bit', or a model to compare with, as in against='FOLDER'.",
            )
    return replace(spec, compression=chosen)


def reference_spec(spec: ModelSpec) -> ModelSpec:
    """The same model uncompressed.

    Raises:
        QualityError: the uncompressed model of a split directory cannot be found.
    """
    folder = expand(resolve_name(spec.name))
    manifest = read_manifest(folder)
    if manifest is None:
        return replace(spec, compression=None)
    if manifest.compression is None:
        return spec
    split_folder = spelled_out(folder)
    uncompressed = split_folder.with_name(split_folder.name.removesuffix(f".{manifest.compression}"))
    plain = read_manifest(uncompressed)
    if plain is not None and plain.compression is None and plain.source.fingerprints == manifest.source.fingerprints:
        return ModelSpec(str(uncompressed), folder=spec.folder)
    with contextlib.suppress(CheckpointError, OSError):  # no checkpoint is there
        entry_in(split_folder.parent)
        return ModelSpec(str(split_folder.parent), folder=spec.folder)
    if manifest.source.kind == "hub":
        return ModelSpec(manifest.source.name, folder=spec.folder, access=HubAccess(manifest.source.commit))
    raise QualityError(f"{folder} is compressed, and its parent folder does not hold the uncompressed model.", _SET_IT)


def _load_as(request: LoadRequest, spec: ModelSpec, *, split: bool) -> Any:
    """Load a model.

    Args:
        request: how it runs.
        spec: the model.
        split: whether it may be split first.

    Raises:
        RabbitLLMError: as `AutoModel.from_pretrained` does.
    """
    run = replace(request.run, show_progress=split)
    request = replace(request, spec=spec, split=split_options(spec.compression), run=run)
    with contextlib.redirect_stdout(sys.stderr):  # output while loading must not mix with the result
        return load(request if split else request.unsplit())


LEAST_POSITIONS = 16
"""Minimum number of predicted tokens."""


def bundled_text() -> str:
    """English prose, dialogue, figures and some code, a few kB."""
    return files("rabbitllm.evaluation").joinpath("text.txt").read_text(encoding="utf-8")


def text_of(path: Path) -> str:
    """The text of a file.

    Raises:
        OptionError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"{path} cannot be read as text: {why}.", "Use a file of UTF-8 text.") from error


def windows(tokenizer: PreTrainedTokenizerBase, text: str, *, window: int, tokens: int) -> list[ScoredText]:
    """Consecutive windows of a text, from its start, each predicted from its second token on.

    Args:
        tokenizer: tokenizer of the models.
        text: any text.
        window: maximum tokens of a window.
        tokens: maximum number of predicted tokens.

    Raises:
        OptionError: `window` or `tokens` is too small.
        QualityError: the text is too short.
    """
    if window < 2 or tokens < LEAST_POSITIONS:
        raise OptionError(
            f"window={window}, tokens={tokens}; expected at least 2 and {LEAST_POSITIONS}.", "Use larger numbers."
        )
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    special_ids = tokenizer("")["input_ids"]
    lead = special_ids[:1] if special_ids[:1] == [tokenizer.bos_token_id] else []
    texts: list[ScoredText] = []
    remaining, begin, step = tokens, 0, window - len(lead)
    while remaining > 0 and begin < len(ids):
        window_ids = (*lead, *ids[begin : begin + step])[: remaining + 1]
        if len(window_ids) > 1:
            texts.append(ScoredText(len(texts), window_ids[:1], window_ids[1:]))
            remaining -= len(window_ids) - 1
        begin += step
    predicted = sum(len(scored.continuation) for scored in texts)
    if predicted < LEAST_POSITIONS:
        raise QualityError(
            f"The text has {predicted} tokens to predict; expected at least {LEAST_POSITIONS}.", "Use a longer text."
        )
    return texts


def scored_answers(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[ScoredText]:
    """Problems with their correct answers and the end token, to be scored."""
    prompts = tokenizer([problem.prompt for problem in problems])["input_ids"]
    answers = tokenizer([f" {problem.answer}" for problem in problems])["input_ids"]
    return [
        ScoredText(index, tuple(prompt), (*answer, tokenizer.eos_token_id))
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def is_bundled_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer is that of the bundled model, whose problems such a model can answer."""
    written = files("rabbitllm.demo").joinpath("model", "tokenizer.json").read_text(encoding="utf-8")
    bundled = json.loads(written)
    special = {token["content"]: token["id"] for token in bundled["added_tokens"]}
    return bool(tokenizer.get_vocab() == {**bundled["model"]["vocab"], **special})


WINDOW, TOKENS, PROBLEMS = 512, 4096, 400
"""Defaults: tokens of a window, predicted tokens, and held-out problems."""
DTYPE = "float32"
"""The default dtype of the computation: the rounding of bfloat16 would be as large as the loss of 8bit."""
PROBLEMS_TEXT, BUNDLED_TEXT = "held-out problems", "the bundled text"


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """One of the two models.

    Attributes:
        name: name as given.
        compression: its compression, or None.
        nbytes: bytes of its stored weights.
        right: number of held-out problems that it answers exactly; None if there were none.
    """

    name: str
    compression: str | None
    nbytes: int
    right: int | None = None


@dataclass(frozen=True, slots=True)
class Quality(Printed):
    """The result of a comparison; prints as `rabbitllm quality` does.

    Attributes:
        model: the compared model.
        reference: the reference.
        text: name of the text of the comparison.
        windows: number of windows or problems in it.
        dtype: dtype of the computation.
        summary: comparison over all positions.
        problems: number of held-out problems to answer; 0 for none.
    """

    model: ComparedModel
    reference: ComparedModel
    text: str
    windows: int
    dtype: str
    summary: Summary
    problems: int

    def __str__(self) -> str:
        return text_on(lambda console: show(self, console))

    def as_json(self) -> dict[str, Any]:
        """The result as a dict for `json.dumps`: sizes in bytes, divergences in nats."""
        names = {"error": "standard_error", "percentile": "percentile_99"}
        divergence = asdict(self.summary.divergence)
        return {
            "model": _model_record(self.model, self.summary.perplexity),
            "against": _model_record(self.reference, self.summary.reference_perplexity),
            **fields_of(self, "text", "windows"),
            "positions": self.summary.positions,
            "dtype": self.dtype,
            "divergence": {names.get(name, name): value for name, value in divergence.items()},
            "agreement": self.summary.agreement,
            "problems": self.problems,
        }


@arguments_checked()
@system_errors_by_name()
def quality(
    model: str | os.PathLike[str] | Any,
    against: str | os.PathLike[str] | Any | None = None,
    *,
    text: str | os.PathLike[str] | None = None,
    compression: str | None = None,
    window: int | None = None,
    tokens: int = TOKENS,
    problems: int | None = None,
    device: str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    dtype: str | None = DTYPE,
    exact: bool = False,
    layer_shards_saving_path: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    verify_checksums: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Quality:
    """Compare a model's next-token distributions with those of the uncompressed model.

    Args:
        model: name or path for `AutoModel.from_pretrained`, which splits the model first if needed; or a loaded model.
        against: the reference, named or loaded in the same way, for which nothing is written; None for the same model
            uncompressed, in its shards, its split, or on the hub.
        text: a file of UTF-8 text; by default the held-out problems for a model with the bundled tokenizer, else a text
            that comes with the package.
        compression: compression of the model; None for that of an existing split.
        window: tokens of a window; None for 512, or the model's context if that is smaller.
        tokens: maximum number of predicted tokens.
        problems: number of held-out problems to answer, for models with the bundled tokenizer; a multiple of 4, 0 for
            none. None for 400 without a text, else for none.
        device: as in `AutoModel.from_pretrained`; this and the arguments that follow are for both models.
        max_memory: as in `AutoModel.from_pretrained`; the default is a third of the free memory for each model.
        dtype: dtype of the computation; None for the config's.
        exact: as in `AutoModel.from_pretrained`.
        layer_shards_saving_path: as in `AutoModel.from_pretrained`.
        revision: as in `AutoModel.from_pretrained`.
        trust_remote_code: as in `AutoModel.from_pretrained`.
        verify_checksums: as in `AutoModel.from_pretrained`.
        say: function that is called with a description of each step.

    Returns:
        The comparison; divergences are in nats.

    Raises:
        QualityError: the two cannot be compared, the text is too short, or the uncompressed model cannot be found.
        RabbitLLMError: as `AutoModel.from_pretrained` and scoring do.
    """
    has_name = is_named(model)
    gpus = (gpu for gpu in resolve_devices(device, None) if gpu.name != "cpu")
    shares: dict[int | str, int | str] = {gpu.name: gpu.free_bytes() // SHARE for gpu in gpus}
    shares["cpu"] = available_ram() // SHARE
    request = LoadRequest.of(
        model if has_name else "",
        folder=layer_shards_saving_path or None,
        revision=revision,
        device=device,
        dtype=dtype,
        max_memory=max_memory or shares,
        trust_remote_code=trust_remote_code,
        exact=exact,
        verify_checksums=verify_checksums,
    )
    if against is not None and is_named(against):
        against = replace(request.spec, name=str(against))
    content = text_of(expand(Path(text))) if text is not None else None  # before an hour of splitting
    say("loading")
    spec = compared_spec(replace(request.spec, compression=compression), alone=against is None) if has_name else None
    reference_named, reference = _reference(request, spec, against)
    compared: Any = _load_as(request, spec, split=True) if spec is not None else model
    tokenizer = _tokenizer_of(reference, compared)
    count = problems if problems is not None else PROBLEMS if text is None else 0
    questions = _problems(count) if is_bundled_tokenizer(tokenizer) else []
    if text is None and questions:
        shown, texts = PROBLEMS_TEXT, scored_answers(tokenizer, questions)
    else:
        shown, written = (str(text), content) if content is not None else (BUNDLED_TEXT, bundled_text())
        context = ModelLimits.of(reference).context
        if window is not None and context is not None and window > context:
            raise OptionError(
                f"A window of {window:,} tokens is too long; the model's context has {context:,}.",
                "Use a smaller window.",
            )
        chosen = min(WINDOW, context or WINDOW) if window is None else window
        texts = windows(tokenizer, written, window=chosen, tokens=tokens)
    summary = compare(compared, reference, texts, say=say)
    sides = []
    for loaded, named in ((compared, spec), (reference, reference_named)):
        side = _compared_model(loaded, named)
        if questions:
            say("answering problems")
            side = replace(side, right=BundledModel().right_answers(loaded, tokenizer, questions))
        sides.append(side)
    dtype_name = str(compared.dtype).removeprefix("torch.")
    return Quality(sides[0], sides[1], shown, len(texts), dtype_name, summary, len(questions))


def _reference(request: LoadRequest, spec: ModelSpec | None, against: Any) -> tuple[ModelSpec | None, Any]:
    """The reference: its name if it was given by name, and the loaded model."""
    if isinstance(against, ModelSpec):
        return against, _load_as(request, against, split=False)
    if against is not None:
        return None, against
    if spec is None:
        raise OptionError(
            "against is required when the model is already loaded.", "Pass a model or its name as against."
        )
    uncompressed = reference_spec(spec)
    try:
        return uncompressed, _load_as(request, uncompressed, split=False)
    except CheckpointError as error:
        raise QualityError(f"The uncompressed model cannot be read. {error.problem}", _SET_IT) from error


def _problems(count: int) -> list[Problem]:
    try:
        return held_out(count) if count else []
    except ValueError as error:
        raise OptionError(f"problems={count} is not possible: {error}.", "Use a multiple of 4.") from error


def _tokenizer_of(reference: Any, model: StreamedModel) -> Any:
    """The common tokenizer of both models.

    Raises:
        QualityError: one of them has no tokenizer, or their vocabularies differ.
    """
    first, second = reference.tokenizer, model.tokenizer
    if first is None or second is None:
        folder = (reference if first is None else model).name_or_path
        raise QualityError(
            "The model has no tokenizer, so the text cannot be tokenized.",
            f"Put its tokenizer files into {folder}, where its config.json is.",
        )
    if first.get_vocab() != second.get_vocab():
        raise QualityError(
            "The models have different vocabularies, so their distributions cannot be compared.",
            "Compare a model with the one it was made from.",
        )
    return first


def _compared_model(model: StreamedModel, named: ModelSpec | None) -> ComparedModel:
    name, compression = (named.name, named.compression) if named is not None else (str(model.name_or_path), None)
    used = (tensor for key, tensor in model._internals.origin.store.tensors.items() if key not in model.unused_tensors)
    manifest = read_manifest(Path(model.name_or_path))
    recorded = manifest.compression if manifest is not None else None
    return ComparedModel(name, compression or recorded, sum(tensor.nbytes for tensor in used))


def _model_record(side: ComparedModel, perplexity: float) -> dict[str, Any]:
    return {
        "name": side.name,
        "compression": side.compression,
        "bytes": side.nbytes,
        "perplexity": perplexity,
        "right": side.right,
    }


_TABLE = (Column(""), Column("compression"), Column("weights", True), Column("perplexity", True), Column("right", True))


def show(quality: Quality, console: Console) -> None:
    """Print a comparison."""
    summary = quality.summary
    put(console, Text(harmless(quality.model.name), "bold"))
    console.print()
    put_fact(console, "against", harmless(quality.reference.name, 400))
    on = f"{harmless(quality.text, 400)}: {counted(summary.positions, 'token')} in {counted(quality.windows, 'window')}"
    put_fact(console, "on", on if quality.windows != summary.positions else harmless(quality.text, 400))
    put_fact(console, "computed in", quality.dtype)
    console.print()
    rows = [
        _row("reference", quality.reference, summary.reference_perplexity, quality.problems),
        _row("model", quality.model, summary.perplexity, quality.problems),
    ]
    columns = _TABLE if quality.problems else _TABLE[:-1]
    put_table(console, columns, [row[: len(columns)] for row in rows])
    console.print()
    divergence = summary.divergence
    put(console, Text("KL divergence of the model from the reference, nats per token", "dim"))
    for name, value in (
        ("mean", f"{number(divergence.mean)} ± {number(divergence.error)}"),
        ("median", number(divergence.median)),
        ("99th percentile", number(divergence.percentile)),
        ("largest", number(divergence.largest)),
    ):
        console.print(f"  {name:<18}{value}", soft_wrap=True)
    console.print()
    same = f"{summary.agreement:.2%}" if summary.agreement < 1 else "100%"
    put(console, Text(f"The most likely token is the same at {same} of {counted(summary.positions, 'position')}."))


def number(value: float) -> str:
    """A number with four decimals; below 0.01 with three significant digits, below 0.0001 with an exponent."""
    if value == 0:
        return "0"
    return f"{value:.4f}" if value >= 0.01 else f"{value:.2e}" if value < 1e-4 else f"{value:.3g}"


def _row(label: str, side: ComparedModel, perplexity: float, problems: int) -> list[str]:
    right = f"{side.right} of {problems}" if side.right is not None else ""
    return [label, side.compression or "none", size(side.nbytes), f"{perplexity:,.4f}", right]
