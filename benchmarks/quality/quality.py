"""Loss against bytes: formats of RabbitLLM, of bitsandbytes through transformers, and of llama.cpp, on the same models.

Each row computes the same text in float32 with the weights of a format: the mean divergence of its next-token
distributions from those of the checkpoint (docs/guides/compression.md), and the bytes of all stored weights. Rounding
of inputs is in the row of bitsandbytes' LLM.int8, but not in those of llama.cpp; notes below the table compare its own
program with the same file.

    python -m benchmarks quality --model NAME=FOLDER [--model …] [--text NAME=FILE] [--tokens N] [--only TEXT …]

Without --model it takes the bundled one. A text is a file; the default is the held-out problems, and held-out prose for
a model with the name `larger`. RabbitLLM's rows go through the engine, others through transformers.

Of the checkpoint's logits only the states in front of its head are kept: 4 bytes for each of a token's channels.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rabbitllm.demo
from benchmarks.lib import command_line, llama, pictures, report
from benchmarks.lib.measure import fresh_folder
from benchmarks.lib.process import PeerError
from benchmarks.quality.llama_cpp import PLAIN, PRESETS, next_tokens, quantized, serving, tool, types
from rabbitllm import AutoModel
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.demo.tasks import held_out
from rabbitllm.errors import RabbitLLMError
from rabbitllm.evaluation.compare import Summary, compare_logits, summarize
from rabbitllm.evaluation.quality import number, scored_answers, text_of, windows
from rabbitllm.formats.gguf import read_gguf
from rabbitllm.generation.scoring import ScoredText
from tools.demo_prose import held_out_prose

WINDOW, TOKENS, PROBLEMS = 128, 4096, 400
ASKED = 32
"""Texts in the middle of which llama.cpp's own program predicts the next token."""
AUTO, OURS, BITSANDBYTES, LLAMA_CPP = "RabbitLLM auto", "RabbitLLM", "bitsandbytes", "llama.cpp"
COMPRESSED = ("8bit", "4bit", "4bit-double", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs")
BUDGETS = (0.22, 0.25, 0.285, 0.31, 0.335, 0.36, 0.385, 0.41, 0.46, 0.51, 0.535, 0.57)
"""Of `auto`: shares of the weights' bytes; config and tokenizer are added."""
_RESULTS = command_line.RESULTS / "quality"
_WORK = command_line.WORK / "quality"


@dataclass(frozen=True)
class Row:
    """One format of one model.

    Attributes:
        model: its name.
        maker: of the format.
        name: of the format.
        nbytes: of all weights.
        summary: against the checkpoint.
        note: below the table.
    """

    model: str
    maker: str
    name: str
    nbytes: int
    summary: Summary
    note: str = ""


@dataclass(frozen=True)
class Extent:
    """The number of bundled problems or of tokens of prose, the budgets of `auto`, and words of the rows to compute."""

    problems: int = PROBLEMS
    tokens: int = TOKENS
    budgets: Sequence[float] = BUDGETS
    only: Sequence[str] = ("",)

    def has(self, maker: str, name: str) -> bool:
        """Whether a row is computed."""
        return any(words in f"{maker} {name}" for words in self.only)


WHOLE = Extent()


class Subject:
    """A model and its text.

    Args:
        name: in the table.
        folder: of the checkpoint.
        text: a file; None for the model's default.
        extent: of the measurement.
    """

    def __init__(self, name: str, folder: Path, text: Path | None, extent: Extent = WHOLE) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name, self.folder, self.extent = name, folder, extent
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.texts: list[ScoredText] = (
            scored_answers(tokenizer, held_out(extent.problems))
            if text is None and name != "larger"
            else windows(
                tokenizer, text_of(text) if text is not None else held_out_prose(), window=WINDOW, tokens=extent.tokens
            )
        )
        self.targets = [torch.tensor(text.continuation) for text in self.texts]
        self.plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.states = self._states()
        self.weights = sum(weight.numel() for weight in self.plain.parameters())
        self.nbytes = 2 * self.weights

    @torch.inference_mode()
    def _states(self) -> list[torch.Tensor]:
        """The inputs of the checkpoint's head for each text: logits would take a hundred times as much."""
        states: list[torch.Tensor] = []
        head = self.plain.get_output_embeddings()
        with head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])):
            for logits in self._logits(self.plain):  # none is kept
                if len(states) == 1 and not torch.equal(head.forward(states[0])[0, -len(logits)], logits[0]):
                    raise SystemExit(f"{self.folder}: logits are not just the product of the head; use another model.")
        return states

    @torch.inference_mode()
    def _logits(self, model: Any) -> Iterator[torch.Tensor]:
        """Logits of the positions of each text."""
        for text in self.texts:
            ids = torch.tensor([[*text.context, *text.continuation[:-1]]])
            yield model(input_ids=ids, use_cache=False).logits[0, len(text.context) - 1 :]

    @torch.inference_mode()
    def summary(self, model: Any) -> Summary:
        """The summary of a model of transformers, text by text."""
        head, parts = self.plain.get_output_embeddings(), []
        for states, other, targets in zip(self.states, self._logits(model), self.targets, strict=True):
            parts.append(compare_logits(head(states)[0, -len(targets) :], other, targets))
        return summarize(parts)

    def middles(self) -> list[tuple[list[int], int]]:
        """Some texts up to their middle, and the next token."""
        cut = [(text, len(text.continuation) // 2) for text in self.texts[:ASKED]]
        return [([*text.context, *text.continuation[:middle]], text.continuation[middle]) for text, middle in cut]

    @torch.inference_mode()
    def at_middles(self, model: Any) -> torch.Tensor:
        """Logits of those next tokens."""
        read = [torch.tensor([ids]) for ids, _ in self.middles()]
        return torch.stack([model(input_ids=ids, use_cache=False).logits[0, -1] for ids in read])


def ours(subject: Subject, work: Path) -> Iterator[Row]:
    """Every compression, and `auto` at several budgets."""
    extra = sum(file.stat().st_size for file in LocalCheckpoint(subject.folder).sidecars().values())
    wishes: list[tuple[str, str, dict[str, Any]]] = [(OURS, name, {"compression": name}) for name in COMPRESSED]
    for share in subject.extent.budgets:
        wishes.append((AUTO, f"{share:.1%}", {"compression": "auto", "max_disk": extra + int(subject.nbytes * share)}))
    if subject.extent.has(OURS, "none"):
        yield Row(subject.name, OURS, "none", subject.nbytes, subject.summary(subject.plain))
    for maker, name, wish in wishes:
        if not subject.extent.has(maker, name):
            continue
        try:
            with fresh_folder(work / "split") as folder:
                model = AutoModel.from_pretrained(
                    subject.folder,
                    device="cpu",
                    dtype="float32",
                    layer_shards_saving_path=folder,
                    show_layer_progress=False,
                    **wish,
                )
                nbytes = sum(placed.counted for placed in model.placement.units)
                yield Row(subject.name, maker, name, nbytes, subject.summary(model))
                del model
        except RabbitLLMError as error:
            print(f"{maker} {name} is left out: {error.problem}", file=sys.stderr)


def of_bitsandbytes(subject: Subject) -> Iterator[Row]:
    """bitsandbytes' formats as transformers loads them: embedding and head are not quantized, its default."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    wishes: Mapping[str, dict[str, Any]] = {
        "NF4": nf4,
        "NF4, double": {**nf4, "bnb_4bit_use_double_quant": True},
        "LLM.int8": {"load_in_8bit": True},
    }
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of rounded inputs at each product
    for name, wish in wishes.items():
        if not subject.extent.has(BITSANDBYTES, name):
            continue
        try:
            model = AutoModelForCausalLM.from_pretrained(
                subject.folder, dtype=torch.float32, device_map="cpu", quantization_config=BitsAndBytesConfig(**wish)
            ).eval()
            nbytes = sum(map(_stored, model.parameters()))
            yield Row(subject.name, BITSANDBYTES, name, nbytes, subject.summary(model))
        except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
            print(f"{BITSANDBYTES} {name} is left out: {error}", file=sys.stderr)


def _stored(parameter: Any) -> int:
    """Bytes of a parameter of transformers with bitsandbytes; others count as bfloat16."""
    if (state := getattr(parameter, "quant_state", None)) is not None:
        nbytes = int(parameter.numel() * parameter.element_size()) + _bytes(state.absmax, state.code)
        return nbytes + (_bytes(state.state2.absmax, state.state2.code, state.offset) if state.nested else 0)
    if parameter.dtype is torch.int8:
        return int(parameter.numel()) + 4 * len(parameter)  # a float32 for each row
    return 2 * int(parameter.numel())


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def of_llama_cpp(subject: Subject, work: Path) -> Iterator[Row]:
    """llama.cpp's formats, made by its tool from the checkpoint's GGUF file, the first row; all norms are float32."""
    presets = [preset for preset in (PLAIN, *PRESETS) if subject.extent.has(LLAMA_CPP, preset)]
    if not presets:
        return
    try:
        program = tool(work.parent)
        with fresh_folder(work / "gguf") as folder:
            plain = llama.write_file(subject.folder, folder / f"{PLAIN}.gguf", PLAIN)
            for preset in presets:
                path = plain if preset == PLAIN else quantized(program, plain, folder / f"{preset}.gguf", preset)
                with fresh_folder(folder / "split") as split:
                    model = AutoModel.from_pretrained(
                        path, device="cpu", dtype="float32", layer_shards_saving_path=split, show_layer_progress=False
                    )
                    summary, expected = subject.summary(model), subject.at_middles(model)
                    del model
                tensors = read_gguf(path).header.tensors
                note = f"{types(tensors)}.{_own_predictions(subject, path, expected, work.parent)}"
                nbytes = sum(spec.nbytes if spec.blocks is None else spec.blocks.nbytes for spec in tensors)
                yield Row(subject.name, LLAMA_CPP, preset, nbytes, summary, note)
                if path != plain:
                    path.unlink()
    except PeerError as error:
        print(f"{LLAMA_CPP} is left out: {error}", file=sys.stderr)


def _own_predictions(subject: Subject, path: Path, expected: torch.Tensor, work: Path) -> str:
    """What llama.cpp's own program predicts of the file, as a sentence; "" if it fails."""
    contexts = [ids for ids, _ in subject.middles()]
    try:
        with serving(path, max(map(len, contexts)) + 16, work) as ask:
            predictions = next_tokens(ask, contexts, expected.shape[1])
    except PeerError as error:
        print(f"{LLAMA_CPP}'s own program is left out: {error}", file=sys.stderr)
        return ""
    targets = torch.tensor([token for _, token in subject.middles()])
    own = summarize([compare_logits(expected, predictions, targets)])
    return (
        f" llama.cpp itself is {number(own.divergence.mean)} ± {number(own.divergence.error)} from these weights in "
        f"float32 at {own.positions} positions, and finds the same token most likely at "
        f"{round(own.agreement * own.positions)}."
    )


def table(rows: Sequence[Row], subject: Subject) -> report.Table:
    """The table of one model, the smallest row first."""
    shown = []
    for row in sorted(rows, key=lambda row: row.nbytes):
        divergence = row.summary.divergence
        shown.append(
            (
                f"{row.maker} {row.name}",
                _digits(row.nbytes / 1e6, 1, 3),
                f"{8 * row.nbytes / subject.weights:.2f}",
                f"{number(divergence.mean)} ± {number(divergence.error)}",
                number(divergence.percentile),
                _digits(row.summary.perplexity, 2, 4),
                f"{row.summary.agreement:.1%}",
            )
        )
    return report.Table(("format", "MB", "bits a weight", "divergence", "99 in 100 below", "perplexity", "same"), shown)


def _digits(value: float, large: int, small: int) -> str:
    """A number with `large` decimals from 10 on, and with `small` below."""
    return f"{value:.{large if value >= 10 else small}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER", help="a model")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="its text")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="predicted tokens of each text")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="compute rows with this in their names")
    parser.add_argument("--work", type=Path, default=_WORK, help="for temporary files")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="file to write, without suffix")
    options = command_line.parsed(parser, arguments)
    extent = Extent(tokens=options.tokens, only=options.only)
    if options.smallest:
        extent = Extent(4, 2 * WINDOW, BUDGETS[5:6], options.only)
        print(f"{LLAMA_CPP} is left out: it would have to be built first.")
    bundled = f"bundled={Path(rabbitllm.demo.__file__).parent / 'model'}"
    folders = dict(pair.split("=", 1) for pair in options.model or [bundled])
    texts = dict(pair.split("=", 1) for pair in options.text)
    options.work.mkdir(parents=True, exist_ok=True)
    every: list[Row] = []
    tables: dict[str, report.Table] = {}
    notes: list[str] = []
    drawn: dict[str, pictures.Picture] = {}
    for name, folder in folders.items():
        subject = Subject(name, Path(folder), Path(texts[name]) if name in texts else None, extent)
        others = () if options.smallest else of_llama_cpp(subject, options.work)
        rows = [*ours(subject, options.work), *of_bitsandbytes(subject), *others]
        if not rows:
            raise SystemExit(f"No row of {name} has {' or '.join(options.only)} in its name.")
        positions, perplexity = rows[0].summary.positions, rows[0].summary.reference_perplexity
        tables[
            f"{name}: {subject.weights / 1e6:.1f} million weights, {positions:,} positions, perplexity {perplexity:.4f}"
        ] = table(rows, subject)
        notes += [f"{name}, {row.maker} {row.name}: {row.note}" for row in rows if row.note]
        every += rows
        drawn[name] = picture(name, rows)
    first, *more = tables
    rest = {heading: tables[heading] for heading in more}
    title, held = f"Loss against bytes. {first}", {"pictures": drawn}
    report.write(options.results, title, tables[first], notes, every, work=options.work, more=rest, facts=held)
    return 0


def picture(name: str, rows: Sequence[Row]) -> pictures.Picture:
    """Loss over bytes, a colour for each maker."""
    makers: dict[str, list[tuple[str, float, float]]] = {AUTO: []}
    for row in rows:
        if row.summary.divergence.mean > 0:
            makers.setdefault(row.maker, []).append((row.name, row.nbytes / 1e6, row.summary.divergence.mean))
    across, upwards = "MB of weights as stored", "mean divergence from the checkpoint, nats a token"
    return pictures.points(name, across, upwards, {maker: points for maker, points in makers.items() if points})
