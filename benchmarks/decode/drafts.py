"""Seconds and passes of a token with drafts and without, of one model and its draft, with memory for a share of it.

All rows take turns in one process, each with one answer. What an answer of a row teaches, the next one knows. As on a
machine without memory for the layer files, they leave the page cache before each pass, and are read past it if that is
faster; the table says what passes read from the disk. In the rows "always wrong" the draft proposes other tokens than
it chose: this must not be slower than 0.97 of the rate without a draft. The row "self" has the memory of the others,
its copies included; if they do not fit, a note says so.

llama.cpp's rows are its `llama-server` (`--llama FOLDER`), built as for `decode.instructions`, with the server. A
control group, which only root can make, gives it the memory of the other rows, and that of a draft model.

    python -m benchmarks decode.drafts --model FOLDER [--draft FOLDER] [--share 0.25] [--only ROW ...]
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.lib import command_line, llama, report
from benchmarks.lib.measure import drop_pages, fresh_copy, fresh_folder, read_speed, spread
from benchmarks.lib.process import REPOSITORY, Cap, PeerError, control_group
from benchmarks.lib.runs import in_turns
from benchmarks.lib.worker import bytes_read

PLAIN, NGRAM, MODEL, SELF, WRONG = "no draft", "ngram", "draft model", "self", "always wrong"
PLAIN_INSIDE, WRONG_INSIDE = f"{PLAIN}, all in memory", f"{WRONG}, all in memory"
PEER, PEER_MODEL = "llama.cpp", "llama.cpp, draft model"
PEERS = (PEER, PEER_MODEL)
ROWS = (PLAIN, NGRAM, MODEL, SELF, WRONG, PLAIN_INSIDE, WRONG_INSIDE, *PEERS)
WITHOUT = {**dict.fromkeys(ROWS, PLAIN), WRONG_INSIDE: PLAIN_INSIDE, PEER_MODEL: PEER}
"""Row -> the one without a draft with which it is compared; llama.cpp without one is compared with this project."""
LEAST = 0.97
"""Of the rate without a draft, if drafts are always wrong."""
SPEED_BYTES = 1 << 30
"""What is read to measure the disk."""
PEER_ROOM_BYTES = 256 << 20
"""For llama.cpp's KV caches and activations."""
PEER_DRAFTS = ("--spec-type", "draft-simple", "--spec-draft-n-max", "16", "--spec-draft-p-min", "0.75")
"""More than the 3 tokens that it drafts by default, as far as its draft is sure."""
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
        read: bytes that came from the disk, of all passes.
        drafting: seconds in which tokens were drafted.
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
    read: int = 0
    drafting: float = 0.0
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
        """Ignore the end: no text is printed."""


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

    ids = torch.tensor([prompt_ids(model, text)])
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
    before = bytes_read()
    try:
        torch.manual_seed(turn)
        with (
            wrong(model.config.get_text_config().vocab_size)
            if row in (WRONG, WRONG_INSIDE)
            else contextlib.nullcontext()
        ):
            result = model.generate(ids, **options, **({"custom_generate": drafting} if drafting else {}))
    finally:
        hook.remove()
    times = streamer.times[-tokens:]
    brought = None if drafting is None else drafting.brought
    right = [] if brought is None else [a / b for a, b in zip(brought.right, brought.checked, strict=True)]
    new_ids, seconds = result[0, ids.shape[1] :].tolist(), times[-1] - times[0]
    drafted = 0.0 if brought is None else brought.seconds
    read = bytes_read() - before
    return Answer(row, text, temperature, turn, seconds, tokens - 1, passes, read, drafted, right, new_ids)


def prompt_ids(model: Any, text: str) -> list[int]:
    """A prompt's tokens, in the chat template where there is one."""
    messages = [{"role": "user", "content": PROMPTS[text]}]
    has_template = bool(getattr(model.tokenizer, "chat_template", None))
    words = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = words if has_template else PROMPTS[text]
    return list(model.tokenizer(prompt, add_special_tokens=not has_template).input_ids)


def drafting_of(model: Any, draft: Any, row: str) -> Any:
    """The steps with the draft of a row; None without one."""
    from rabbitllm.generation.draft import Drafting

    if row in (PLAIN, PLAIN_INSIDE):
        return None
    drafting = Drafting(draft if row != NGRAM and draft is not None else "ngram")
    drafting.prepare(model)
    return drafting


@dataclass(frozen=True)
class Subjects:
    """The models of the rows of this project.

    Attributes:
        streamed: the model with memory for a share of its bytes.
        copies: the same, which has copies in that memory; None if no row asks for it, or if they do not fit.
        inside: the model all in memory; None if no row asks for it.
        draft: the draft model, or None.
        room: bytes of memory of the first two.
        refused: why there are no copies.
    """

    streamed: Any
    copies: Any
    inside: Any
    draft: Any
    room: int
    refused: str

    def of(self, row: str) -> tuple[Any, Any]:
        """A row's model and its draft."""
        if row == SELF:
            return self.copies, SELF
        model = self.inside if row in (PLAIN_INSIDE, WRONG_INSIDE) else self.streamed
        return model, self.draft if row in (MODEL, WRONG, WRONG_INSIDE) else None


def load(options: Any, work: Path, rows: Sequence[str]) -> Subjects:
    """Load the models. Each has files of its own: what one of them maps does not leave the page cache."""
    from rabbitllm import AutoModel
    from rabbitllm.engine import span_reader
    from rabbitllm.errors import OptionError
    from rabbitllm.generation.draft import prepare_draft

    common: dict[str, Any] = {"device": "cpu", "show_layer_progress": False, "fast_bfloat16": None}

    def loaded(name: str, **limits: Any) -> Any:
        source, folder = options.model, work / name
        if (source / "split.json").exists():  # it would be used where it is
            if not folder.exists():
                fresh_copy(source, folder)
            source = folder
        place = {"layer_shards_saving_path": folder, "compression": options.compression}
        gc.collect()  # a model that is gone maps its files up to here
        with patch.object(span_reader, "stays_cached", lambda *_: False):
            return AutoModel.from_pretrained(source, **place, **common, **limits)

    streamed: Any = loaded("model")
    room = round(options.share * sum(path.stat().st_size for path in files_of(work, "model")))
    limit = {"max_memory": {"cpu": room}} if options.share < 1 else {}
    if limit:
        streamed = None
        streamed = loaded("model", **limit)
    copies, refused = None, ""
    if SELF in rows:
        try:
            copies = loaded("copies", draft=SELF, **limit)
        except OptionError as error:
            refused = str(error).splitlines()[0]
    inside = loaded("inside") if WRONG_INSIDE in rows or PLAIN_INSIDE in rows else None
    draft = None
    if options.draft is not None:
        draft = AutoModel.from_pretrained(options.draft, layer_shards_saving_path=work / "draft", **common)
        for model in (streamed, inside):
            if model is not None:
                prepare_draft(model, draft)
    return Subjects(streamed, copies, inside, draft, room, refused)


def files_of(work: Path, *names: str) -> list[Path]:
    """The layer files of models."""
    files = sorted(path for name in names for path in (work / name).rglob("*.safetensors"))
    assert files, f"no layer files in {names} of {work}: nothing would leave the page cache"
    return files


@dataclass(frozen=True)
class Peer:
    """llama.cpp with the same weights and memory.

    Attributes:
        program: `llama-server`.
        file, draft: GGUF files of the model, and of the draft model or None.
        room: bytes for the model's weights.
        work: folder of logs.
    """

    program: Path
    file: Path
    draft: Path | None
    room: int
    work: Path

    def answers(self, row: str, turn: int, tokens: int, model: Any) -> Iterator[Answer]:
        """The answers of a row, with this project's prompts and ways to choose tokens.

        Args:
            model: of this project.

        Raises:
            PeerError: the program failed.
            SystemExit: no control group can be made.
        """
        import torch

        prompts = {text: prompt_ids(model, text) for text in PROMPTS}
        context = max(map(len, prompts.values())) + tokens + 64
        sizes = {"--ctx-size": context, "--batch-size": 64, "--parallel": 1, "--threads": torch.get_num_threads()}
        arguments = ["--model", str(self.file), "--no-repack", *(str(part) for size in sizes.items() for part in size)]
        room = self.room + PEER_ROOM_BYTES
        if row == PEER_MODEL:
            assert self.draft is not None
            arguments += ["--model-draft", str(self.draft), *PEER_DRAFTS]
            room += self.draft.stat().st_size
        own = model.generation_config
        drawn = {"top_k": own.top_k or 0, "top_p": own.top_p or 1.0, "min_p": own.min_p or 0.0}
        drawn["repeat_penalty"] = own.repetition_penalty or 1.0
        label = f"drafts-{row.replace(' ', '-').replace(',', '')}-{turn}"
        with control_group(f"rabbitllm-drafts-{os.getpid()}") as group:
            for file in filter(None, (self.file, self.draft)):  # what is cached is another group's
                drop_pages(file)
            with llama.serving(self.program, arguments, self.work, label, cap=Cap(group, room)) as ask:
                for text, prompt in prompts.items():
                    for temperature in TEMPERATURES:
                        body = {"n_predict": tokens, "temperature": temperature, "seed": turn, **drawn}
                        reply = ask("/completion", prompt=prompt, ignore_eos=True, return_tokens=True, **body)
                        times = reply["timings"]
                        passes = times["predicted_n"] - times.get("draft_n_accepted", 0)
                        seconds, count = times["predicted_ms"] / 1000, times["predicted_n"] - 1
                        yield Answer(row, text, temperature, turn, seconds, count, passes, ids=reply["tokens"])


def gguf_of(source: Path, split: Path, target: Path) -> Path:
    """llama.cpp's file of a checkpoint: itself, or the one that is made of its layer files."""
    if source.suffix == ".gguf":
        return source
    return llama.write_file(next(path.parent for path in split.rglob("split.json")), target, "auto")


def tabulate(answers: Sequence[Answer], rows: Sequence[str]) -> report.Table:
    """A line for each row, text and temperature that has answers."""
    lines = []
    for text in PROMPTS:
        for temperature in TEMPERATURES:
            for row in rows:
                key = (row, text, temperature)
                of = [answer for answer in answers if (answer.row, answer.text, answer.temperature) == key]
                if not of:
                    continue
                drafted = spread(answer.drafting / answer.passes for answer in of)
                read = sum(answer.read for answer in of) / sum(answer.passes for answer in of)
                right = " ".join(f"{share:.0%}" for share in of[-1].right[:4]) or "-"
                lines.append(
                    (
                        f"{row}, {text}, {temperature}",
                        report.shown(spread(answer.seconds / answer.tokens for answer in of), 4),
                        report.shown(spread((answer.tokens + 1) / answer.passes for answer in of)),
                        report.shown(spread(rates(answers, of))),
                        "-" if row in PEERS else f"{read / 1e9:.2f}",
                        "-" if row in PEERS else report.shown(drafted),
                        right,
                    )
                )
    headings = ("row", "s/token", "tokens a pass", "of the rate without", "GB read a pass", "s drafting a pass")
    return report.Table((*headings, "right by depth, last turn"), lines)


def rates(answers: Sequence[Answer], of: Sequence[Answer]) -> list[float]:
    """The rate of each answer, of that without a draft in the same turn."""
    plain = {
        (answer.row, answer.text, answer.temperature, answer.turn): answer.seconds / answer.tokens for answer in answers
    }
    known = [(plain.get((WITHOUT[answer.row], answer.text, answer.temperature, answer.turn)), answer) for answer in of]
    return [without / (answer.seconds / answer.tokens) for without, answer in known if without]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if drafts that are always wrong are too slow."""
    parser = command_line.parser(__doc__, 5, ROWS)
    parser.add_argument("--model", type=Path, default=REPOSITORY / "rabbitllm" / "demo" / "model", metavar="FOLDER")
    parser.add_argument("--draft", metavar="FOLDER", help="the draft model; without it, only ngram and self")
    parser.add_argument("--compression", metavar="SCHEME", help="of the model's split")
    parser.add_argument("--share", type=float, default=0.25, help="of the model's bytes in memory; 1 for all")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="with llama-server; without it, only this project")
    options = command_line.parsed(parser, arguments, tokens=8)
    command_line.settle(options, "drafts")
    command_line.check_tokens(options)
    left_out = {MODEL} if options.draft is None else set[str]()
    left_out |= {PEER_MODEL} if options.draft is None else set()
    left_out |= {*PEERS} if options.llama is None else set()
    left_out |= {SELF, PLAIN_INSIDE, WRONG_INSIDE} if options.share >= 1 else set()
    needed = {*options.only, *(WITHOUT[row] for row in options.only)} - left_out
    rows = [row for row in ROWS if row in needed]
    answers, failed = list[Answer](), dict[str, str]()
    with fresh_folder(options.work_dir / "drafts") as work:
        subjects = load(options, work, rows)
        if subjects.refused:
            failed[SELF] = subjects.refused
            rows.remove(SELF)
        files = files_of(work, "model", *(["copies"] if SELF in rows else ()))
        disk = [read_speed(files, SPEED_BYTES)]
        ours = [row for row in rows if row not in PEERS]
        drafting = {row: drafting_of(*subjects.of(row), row) for row in ours}
        peer = None
        if len(ours) < len(rows):
            file = gguf_of(options.model if options.compression is None else work, work / "model", work / "model.gguf")
            draft = Path(options.draft) if PEER_MODEL in rows else None
            draft = draft and gguf_of(draft, work / "draft", work / "draft.gguf")
            program = options.llama.absolute() / "llama-server"
            peer = Peer(program, file.absolute(), draft and draft.absolute(), subjects.room, options.work_dir)
        for row in ours:  # kernels are compiled, files are compared with their checksums
            answer(subjects.of(row)[0], drafting[row], row, "code", 0.0, 0, min(8, options.tokens))
        for turn, row in in_turns([row for row in rows if row in PEERS], options.turns):
            assert peer is not None
            try:
                answers += peer.answers(row, turn, options.tokens, subjects.streamed)
            except PeerError as error:
                failed[row] = str(error)
        # a machine changes within minutes, so what is compared is measured side by side
        texts = [(text, temperature) for text in PROMPTS for temperature in TEMPERATURES]
        for index, row in in_turns(ours, options.turns * len(texts)):
            (turn, number), model = divmod(index, len(texts)), subjects.of(row)[0]
            cold = files if model is not subjects.inside else ()
            answers.append(answer(model, drafting[row], row, *texts[number], turn, options.tokens, cold))
        disk.append(read_speed(files, SPEED_BYTES))
    name = options.draft and Path(options.draft).name
    compression = f" at {options.compression}" if options.compression else ""
    notes = [f"{options.model.name}{compression}, draft {name}, memory for {options.share:.0%}."]
    notes.append(f"The disk reads {disk[0] / 1e9:.1f} GB/s before and {disk[1] / 1e9:.1f} GB/s after the rows.")
    notes += [f"{row}: {why}" for row, why in failed.items()]
    if peer is not None:
        notes.append(f"llama.cpp drafts with {' '.join(PEER_DRAFTS)}; {PEER} is compared with this project's {PLAIN}.")
    worst = dict[str, float | None]()
    for row in (WRONG, WRONG_INSIDE):
        if row in rows:
            worst[row] = report.median(spread(rates(answers, [answer for answer in answers if answer.row == row])))
            notes.append(report.reach(f"{row}, of the rate without a draft", worst[row], LEAST, at_most=False))
    greedy = {(answer.row, answer.text): answer.ids for answer in answers if not answer.temperature}
    drafts = [(row, text) for row, text in greedy if row != PEER and row not in WITHOUT.values()]
    same = [greedy[key] == greedy[WITHOUT[key[0]], key[1]] for key in drafts]
    notes.append(f"Greedy answers equal to those without a draft: {sum(same)} of {len(same)}.")
    title = f"Tokens with drafts, {command_line.turns(options)}"
    report.write(options.results, title, tabulate(answers, rows), notes, answers, work=options.work_dir)
    return 0 if options.smallest or all(rate is None or rate >= LEAST for rate in worst.values()) else 1
