"""Seconds and passes of a token with drafts and without, of one model and its draft, with memory for a share of it.

All rows take turns in one process, on the same model. What an answer of a row teaches, the next one knows. Before each
pass the layer files leave the page cache, as on a machine without memory for them. In the row "always wrong" the draft
proposes other tokens than it chose: this must not be slower than 0.97 of the rate without a draft.

    python -m benchmarks decode.drafts --model FOLDER [--draft FOLDER|self] [--share 0.25] [--turns 5] [--only ROW ...]
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.lib import command_line, report
from benchmarks.lib.measure import drop_pages, fresh_folder, spread
from benchmarks.lib.process import REPOSITORY
from benchmarks.lib.runs import in_turns

PLAIN, NGRAM, MODEL, WRONG = "no draft", "ngram", "draft model", "always wrong"
ROWS = (PLAIN, NGRAM, MODEL, WRONG)
LEAST = 0.97
"""Of the rate without a draft, if drafts are always wrong."""
PROMPTS = {
    "code": "Write a Python class Stack with push, pop, peek and size, and a class Queue with the same methods. Use "
    "type hints and docstrings, and show an example of each.",
    "prose": "Describe a day of a rabbit in a meadow, from dawn to night, as a short story with vivid details.",
}
TEMPERATURES = (0.0, 0.7)


@dataclass
class Answer:
    """One answer.

    Attributes:
        row, text, temperature, turn: what was measured.
        seconds: of all tokens after the first.
        tokens: number of these.
        passes: passes of the answer.
        right: by depth, the share of drafted tokens that were right.
        ids: the answer.
    """

    row: str
    text: str
    temperature: float
    turn: int
    seconds: float
    tokens: int
    passes: int
    right: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


class _Wrong:
    """A source whose tokens are replaced by others."""

    def __init__(self, source: Any, vocabulary: int) -> None:
        self._source, self._vocabulary = source, vocabulary

    def propose(self, ids: Any, most: int) -> Any:
        """Propose the tokens next to those of the source, or where it has none next to the last ones."""
        from rabbitllm.generation.draft import Proposal

        drafted = self._source.propose(ids, most).tokens
        drafted = drafted if drafted.numel() else ids[:, -most:]
        return Proposal((drafted + 1) % self._vocabulary)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@contextlib.contextmanager
def wrong(vocabulary: int) -> Iterator[None]:
    """Let all drafts be wrong."""
    draft: Any = importlib.import_module("rabbitllm.generation.draft")
    proposals_of = draft.proposals_of

    def wrapped(*args: Any) -> Any:
        return _Wrong(proposals_of(*args), vocabulary)

    with patch.object(draft, "proposals_of", wrapped):
        yield


class _Times:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left."""


def answer(
    model: Any,
    drafting: Any,
    row: str,
    text: str,
    temperature: float,
    turn: int,
    tokens: int,
    files: Sequence[Path] = (),
) -> Answer:
    """Generate one answer of exactly so many tokens; `files` leave the page cache before each pass.

    `drafting` is the row's own, None without a draft.
    """
    import torch

    messages = [{"role": "user", "content": PROMPTS[text]}]
    has_template = bool(getattr(model.tokenizer, "chat_template", None))
    words = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = words if has_template else PROMPTS[text]
    ids = model.tokenizer(prompt, return_tensors="pt", add_special_tokens=not has_template).input_ids
    streamer, passes = _Times(), 0

    def count(*args: Any) -> None:
        nonlocal passes
        if not model.streamer.is_drafting:
            passes += 1
            for path in files:
                drop_pages(path)

    chosen = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    options: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens, "streamer": streamer, **chosen}
    drafting = drafting and drafting.streaming_to(streamer)
    hook = model.get_decoder().register_forward_pre_hook(count)
    try:
        torch.manual_seed(turn)
        with wrong(model.config.get_text_config().vocab_size) if row == WRONG else contextlib.nullcontext():
            result = model.generate(ids, **options, **({"custom_generate": drafting} if drafting else {}))
    finally:
        hook.remove()
    times = streamer.times[-tokens:]
    brought = None if drafting is None else drafting.brought
    right = [] if brought is None else [a / b for a, b in zip(brought.right, brought.checked, strict=True)]
    made = result[0, ids.shape[1] :].tolist()
    return Answer(row, text, temperature, turn, times[-1] - times[0], tokens - 1, passes, right, made)


def drafting_of(model: Any, draft: Any, row: str) -> Any:
    """The steps with the draft of a row; None without one."""
    from rabbitllm.generation.draft import Drafting

    if row == PLAIN:
        return None
    drafting = Drafting(draft if row in (MODEL, WRONG) and draft is not None else "ngram")
    drafting.prepare(model)
    return drafting


def load(options: Any, work: Path) -> tuple[Any, Any]:
    """The model, with memory for a share of its bytes, and its draft model or None."""
    from rabbitllm import AutoModel

    common: dict[str, Any] = {"device": "cpu", "show_layer_progress": False, "fast_bfloat16": None}
    draft, own = None, options.draft == "self"
    if options.draft is not None and not own:
        draft = AutoModel.from_pretrained(options.draft, layer_shards_saving_path=work / "draft", **common)
    place = {"layer_shards_saving_path": work / "model", "compression": options.compression}
    limit: dict[str, Any] = {}
    if options.share < 1:
        AutoModel.from_pretrained(options.model, **place, **common)
        whole = sum(path.stat().st_size for path in (work / "model").rglob("*.safetensors"))
        limit = {"max_memory": {"cpu": round(options.share * whole)}}
    model = AutoModel.from_pretrained(options.model, **place, draft="self" if own else None, **common, **limit)
    if own:
        return model, "self"
    if draft is not None:
        from rabbitllm.generation.draft import prepare_draft

        prepare_draft(model, draft)
    return model, draft


def tabulate(answers: Sequence[Answer], rows: Sequence[str]) -> report.Table:
    """A line for each row, text and temperature."""
    lines = []
    for text in PROMPTS:
        for temperature in TEMPERATURES:
            for row in rows:
                of = [one for one in answers if (one.row, one.text, one.temperature) == (row, text, temperature)]
                right = " ".join(f"{share:.0%}" for share in of[-1].right[:4]) or "-"
                lines.append(
                    (
                        f"{row}, {text}, {temperature}",
                        report.shown(spread(one.seconds / one.tokens for one in of), 4),
                        report.shown(spread((one.tokens + 1) / one.passes for one in of)),
                        report.shown(spread(rates(answers, of))),
                        right,
                    )
                )
    headings = ("row", "s/token", "tokens a pass", "of the rate without", "right by depth, last turn")
    return report.Table(headings, lines)


def rates(answers: Sequence[Answer], of: Sequence[Answer]) -> list[float]:
    """The rate of each answer, of that without a draft in the same turn."""
    plain = {(one.text, one.temperature, one.turn): one.seconds for one in answers if one.row == PLAIN}
    known = [(plain.get((one.text, one.temperature, one.turn)), one.seconds) for one in of]
    return [without / seconds for without, seconds in known if without]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if drafts that are always wrong are too slow."""
    parser = command_line.parser(__doc__, 5, ROWS)
    parser.add_argument("--model", type=Path, default=REPOSITORY / "rabbitllm" / "demo" / "model", metavar="FOLDER")
    parser.add_argument("--draft", metavar="FOLDER", help="the draft model, or self; without it, only ngram")
    parser.add_argument("--compression", metavar="SCHEME", help="of the model's split")
    parser.add_argument("--share", type=float, default=0.25, help="of the model's bytes in memory; 1 for all")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    options = command_line.parsed(parser, arguments, tokens=8)
    command_line.settle(options, "drafts")
    rows = [row for row in options.only if row != MODEL or options.draft is not None]
    answers: list[Answer] = []
    with fresh_folder(options.work_dir / "drafts") as work:
        model, draft = load(options, work)
        files = sorted((work / "model").rglob("*.safetensors"))
        drafting = {row: drafting_of(model, draft, row) for row in rows}
        for row in rows:  # kernels are compiled, files are compared with their checksums
            answer(model, drafting[row], row, "code", 0.0, 0, min(8, options.tokens))
        for turn, row in in_turns(rows, options.turns):
            for text in PROMPTS:
                for temperature in TEMPERATURES:
                    answers.append(answer(model, drafting[row], row, text, temperature, turn, options.tokens, files))
    name = options.draft and Path(options.draft).name
    compression = f" at {options.compression}" if options.compression else ""
    notes = [f"{options.model.name}{compression}, draft {name}, memory for {options.share:.0%}."]
    worst = spread(rates(answers, [one for one in answers if one.row == WRONG]))
    reached = report.median(worst)
    notes.append(report.reach("always wrong, of the rate without a draft", reached, LEAST, at_most=False))
    greedy = {(one.row, one.text): one.ids for one in answers if not one.temperature}
    same = [greedy[row, text] == greedy[PLAIN, text] for row, text in greedy if (PLAIN, text) in greedy]
    notes.append(f"Greedy answers equal to those without a draft: {sum(same)} of {len(same)}.")
    title = f"Tokens with drafts, {command_line.turns(options)}"
    report.write(options.results, title, tabulate(answers, rows), notes, answers, work=options.work_dir)
    return 0 if options.smallest or reached is None or reached >= LEAST else 1
