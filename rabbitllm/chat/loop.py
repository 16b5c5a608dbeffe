"""The chat loop at a terminal or over a pipe: reads lines, shows answers as they are generated, executes commands.

On a terminal there is a prompt, and Ctrl-C stops an answer. Over a pipe each line is a message, only answers go to
stdout, and everything else to stderr.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import counted, harmless, put_fact, size
from rabbitllm.chat.conversation import Conversation, Exchange, SavedChat, read_chat, write_chat
from rabbitllm.errors import ChatError, RabbitLLMError
from rabbitllm.generation.session import (
    BY_THE_CONTEXT,
    BY_THE_LIMIT,
    BY_THE_USER,
    PLACES,
    AnswerWork,
    ChatAnswer,
    Session,
)
from rabbitllm.generation.streams import print_text

COMMANDS: dict[str, tuple[str, str]] = {
    "/system": ("[TEXT]", "set the system prompt; without a text show it, with - remove it"),
    "/save": ("FILE", "write the conversation as JSON"),
    "/load": ("FILE", "go on with a saved conversation instead of this one"),
    "/drop": ("[N]", "forget the oldest exchange, or the N oldest"),
    "/reset": ("", "forget everything but the system prompt"),
    "/stats": ("", "tokens, times, passes and bytes, of the last answer and of all"),
    "/help": ("", "this list"),
    "/exit": ("", "leave; Ctrl-D does it too"),
}
"""Command -> its argument, in brackets if optional, and its help text."""
QUOTES = '"""'
"""Mark at the beginning and end of a message of several lines."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its argument; an empty one if there is none."""

    name: str
    argument: str


def command_of(line: str) -> Command | None:
    """The command on a line; None if the line is a message for the model.

    Raises:
        ChatError: an unknown command, a missing argument, or an unexpected one.
    """
    if not line.startswith("/"):
        return None
    name, _, rest = line.partition(" ")
    argument = rest.strip()
    if name not in COMMANDS:
        raise ChatError(
            f"There is no command {name[:40]!r}.", "/help lists them; a message may begin with a space, then a slash."
        )
    takes = COMMANDS[name][0]
    if argument and not takes:
        raise ChatError(f"{name} takes nothing more.", f"Type {name} alone.")
    if not argument and takes and not takes.startswith("["):
        raise ChatError(f"{name} needs the name of a file.", f"For example {name} talk.json.")
    return Command(name, argument)


def count_of(argument: str) -> int:
    """The number in the argument of /drop; 1 by default.

    Raises:
        ChatError: the argument is no number, or below 1.
    """
    if not argument:
        return 1
    if not (argument.isascii() and argument.isdigit()) or int(argument[:9]) < 1:
        raise ChatError(f"/drop takes a number of exchanges, not {argument[:40]!r}.", "For example /drop 3.")
    return int(argument[:9])


# The output of /stats.


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of all answers.

    Attributes:
        answers: number of answers.
        tokens, prompt_tokens, kept_tokens, seconds, work: sums of the attributes of `ChatAnswer`.
        further_tokens, further_seconds: number of tokens after each first one, and their time.
    """

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0
    seconds: float = 0.0
    further_tokens: int = 0
    further_seconds: float = 0.0
    work: AnswerWork = field(default_factory=AnswerWork)

    def plus(self, answer: ChatAnswer) -> Totals:
        """The totals with one more answer."""
        return Totals(
            self.answers + 1,
            self.tokens + answer.tokens,
            self.prompt_tokens + answer.prompt_tokens,
            self.kept_tokens + answer.kept_tokens,
            self.seconds + answer.seconds,
            self.further_tokens + max(answer.tokens - 1, 0),
            self.further_seconds + (answer.seconds - answer.first if answer.tokens > 1 else 0.0),
            self.work.plus(answer.work),
        )

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first of each answer; None if there were no further ones."""
        return self.further_tokens / self.further_seconds if self.further_tokens and self.further_seconds else None


@dataclass(frozen=True, slots=True)
class CacheState:
    """The current state of the KV cache.

    Attributes:
        kept: whether it is kept between answers.
        tokens: number of tokens in it.
        nbytes: its size in bytes.
        context: tokens that the model has room for; None without a limit.
    """

    kept: bool
    tokens: int
    nbytes: int
    context: int | None


def show_stats(
    console: Console, last: ChatAnswer | None, totals: Totals, cache: CacheState, in_place: Mapping[str, int]
) -> None:
    """Print the output of /stats.

    Args:
        console: console to print to.
        last: the last answer; None before the first.
        totals: totals of all answers.
        cache: current state of the KV cache.
        in_place: "device tier" -> bytes of weights that each pass uses without copying them.
    """
    if last is None:
        put_fact(console, "answers", "none yet")
    else:
        console.print(Text("last answer", "bold"))
        put_fact(console, "  first token", _duration(last.first))
        _show(console, last.tokens, last.rate, last.prompt_tokens, last.kept_tokens, last.work)
        if totals.answers > 1:
            console.print(Text(f"all {totals.answers:,} answers", "bold"))
            put_fact(console, "  time", _duration(totals.seconds))
            _show(console, totals.tokens, totals.rate, totals.prompt_tokens, totals.kept_tokens, totals.work)
    for place, nbytes in in_place.items():
        put_fact(console, "in place", f"{size(nbytes)} {place}, used by each pass without being moved")
    of = f" of {cache.context:,}" if cache.context is not None else ""
    held = f"{cache.tokens:,}{of} tokens, {size(cache.nbytes)}"
    put_fact(console, "KV cache", held if cache.kept else "not kept: of this kind of model it cannot go on exactly")


def _show(console: Console, tokens: int, rate: float | None, prompt: int, kept: int, work: AnswerWork) -> None:
    put_fact(console, "  generated", counted(tokens, "token") + (f", {rate:,.2f} a second" if rate else ""))
    put_fact(console, "  prompt", f"{counted(prompt, 'token')}: {kept:,} kept in the cache, {prompt - kept:,} computed")
    put_fact(console, "  passes", f"{work.passes:,}, with {counted(work.tokens, 'token')} altogether")
    moved = [f"{size(work.moved[stage])} {where}" for stage, where in PLACES.items() if stage in work.moved]
    put_fact(console, "  moved", ", ".join(moved) if moved else "nothing: all weights stay where they are used")
    if work.experts:
        found = ", ".join(f"{count:,} {where.removeprefix('experts ')}" for where, count in work.experts.items())
        put_fact(console, "  experts", found)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


# Reads messages: a line each, or several lines between triple quotes.

PROMPT = ">>> "
CONTINUATION = "... "


def read_message(read_line: Callable[[str], str]) -> str:
    """Read the next message or command; an empty line is an empty message.

    A message of several lines has `QUOTES` at the beginning of its first line and at the end of its last one, which may
    be the same line. It also ends at the end of the input.

    Args:
        read_line: shows a prompt and returns a line without its end.

    Raises:
        EOFError: there is no further line.
    """
    line = read_line(PROMPT).rstrip()
    if not line.startswith(QUOTES):
        return line
    lines = []
    line = line[len(QUOTES) :]
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        try:
            line = read_line(CONTINUATION)
        except EOFError:
            return "\n".join(lines).strip()
    lines.append(line.rstrip().removesuffix(QUOTES))
    return "\n".join(lines).strip()


PATIENCE = 0.4
"""Seconds until the progress of the first pass is shown."""
HOW_TO_LEAVE = "/exit or Ctrl-D leaves"
_FIRST_LINE = f"/help lists the commands, {QUOTES} begins several lines, Ctrl-C stops an answer, Ctrl-D leaves"


@dataclass(frozen=True, slots=True)
class Surface:
    """The input and output of a conversation.

    Attributes:
        read_line: shows a prompt and returns a line without its end; raises EOFError after the last.
        answers: file that answers are written to.
        notes: console for everything else.
        interactive: whether input and output are a terminal.
    """

    read_line: Callable[[str], str]
    answers: TextIO
    notes: Console
    interactive: bool


def standard_surface() -> Surface:
    """The surface on this process's stdin and stdout."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # gives `input` history and editing, where available
            import readline  # noqa: F401
    else:
        _tolerate_any_bytes(sys.stdin)
    return Surface(
        lambda prompt: input(prompt if interactive else ""),
        sys.stdout,
        Console(highlight=False, stderr=not interactive),
        interactive,
    )


def _tolerate_any_bytes(stream: Any) -> None:
    with contextlib.suppress(AttributeError, ValueError):  # the stream is no text file
        stream.reconfigure(errors="replace")


class ChatLoop:
    """Runs a conversation.

    Args:
        session: session that generates the answers.
        surface: input and output.
        model: name of the model, for files.
        conversation: conversation to continue.
    """

    def __init__(self, session: Session, surface: Surface, model: str, conversation: Conversation) -> None:
        self._session = session
        self._surface = surface
        self._model = model
        self._last: ChatAnswer | None = None
        self._totals = Totals()
        self._failed = False
        self.conversation = conversation

    def run(self, in_place: dict[str, int] | None = None) -> bool:
        """Run until the input ends or /exit; returns whether there were no errors.

        Args:
            in_place: see `show_stats`.
        """
        self._in_place = in_place or {}
        if self._surface.interactive:
            self._note(_FIRST_LINE)
        for remark in self._session.remarks:
            self._note(remark)
        while True:
            try:
                message = read_message(self._surface.read_line)
            except EOFError:
                if self._surface.interactive:
                    self._put("\n")
                break
            except KeyboardInterrupt:
                if not self._surface.interactive:
                    raise
                self._put("\n")
                self._note(HOW_TO_LEAVE)
                continue
            try:
                if not self._take(message):
                    break
            except RabbitLLMError as error:
                self._refuse(str(error))
            except BrokenPipeError:  # the reader has closed the pipe
                raise
            except (OSError, RuntimeError, MemoryError) as error:  # includes torch's out-of-memory errors
                self._session.forget()
                self._refuse(
                    f"{type(error).__name__}: {harmless(str(error), 500)}\n  What to do: /save keeps what was said."
                )
        return not self._failed

    def _take(self, message: str) -> bool:
        """Handle a message or command; returns whether to continue."""
        if not message.strip():
            return True
        command = command_of(message) if "\n" not in message else None
        if command is None:
            self._ask(message.strip())
            return True
        if command.name == "/exit":
            return False
        self._carry_out(command)
        return True

    def _ask(self, question: str) -> None:
        question = question.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        with _interruptible() as stopped, self._waiting() as (at_unit, begin):
            came = False

            def write(text: str) -> None:
                nonlocal came
                text = text if came else text.lstrip()
                if text:
                    came = True
                    begin()
                    self._put(text)

            answer = self._session.answer(self.conversation.messages(question), write, stopped=stopped, at_unit=at_unit)
        self._put("\n" if answer.text or not self._surface.interactive else "")
        self._last, self._totals = answer, self._totals.plus(answer)
        if answer.ended == BY_THE_USER and not answer.text:
            self._note("stopped before anything came; the question was taken back")
            return
        stopped_early = answer.ended == BY_THE_USER
        self.conversation = self.conversation.with_exchange(Exchange(question, answer.text, stopped_early))
        if stopped_early:
            self._note("stopped; what came so far stays in the conversation")
        elif answer.ended == BY_THE_CONTEXT:
            self._note(
                f"the context of {self._session.context:,} tokens is full: /drop forgets the oldest exchange, "
                "/reset all of them"
            )
        elif answer.ended == BY_THE_LIMIT:
            self._note(f"ended after {counted(answer.tokens, 'token')}; --max-new-tokens sets that limit")
        elif not answer.text:
            self._note("the model ended its answer at once")
        if self._surface.interactive:
            self._put("\n")

    def _carry_out(self, command: Command) -> None:
        match command.name:
            case "/help":
                self._help()
            case "/stats":
                session = self._session
                state = CacheState(
                    session.kept is not None, session.cached_tokens, session.cache_bytes, session.context
                )
                show_stats(self._surface.notes, self._last, self._totals, state, self._in_place)
            case "/reset":
                self.conversation = self.conversation.emptied()
                self._session.forget()
                self._note("forgotten, but for the system prompt" if self.conversation.system else "forgotten")
            case "/drop":
                had = len(self.conversation.exchanges)
                self.conversation = self.conversation.without_oldest(count_of(command.argument))
                left = len(self.conversation.exchanges)
                self._note(f"forgot {counted(had - left, 'exchange')}; {left:,} left")
            case "/system":
                self._system(command.argument)
            case "/save":
                path = _path(command.argument)
                write_chat(path, SavedChat(self._model, self.conversation))
                self._note(f"wrote {counted(len(self.conversation.exchanges), 'exchange')} to {harmless(str(path))}")
            case "/load":
                self._load(_path(command.argument))

    def _help(self) -> None:
        for name, (argument, does) in COMMANDS.items():
            put_fact(self._surface.notes, f"{name} {argument.strip('[]')}", does)
        put_fact(self._surface.notes, QUOTES, f"begins a message of several lines, which ends with {QUOTES}")
        put_fact(self._surface.notes, "Ctrl-C", "stops an answer; what came of it stays")

    def _system(self, text: str) -> None:
        if text:
            self.conversation = self.conversation.with_system(None if text == "-" else text)
            self._note("the system prompt is removed" if text == "-" else "the system prompt is set")
        else:
            self._note(harmless(self.conversation.system or "", 2000) or "there is no system prompt")

    def _load(self, path: Path) -> None:
        saved = read_chat(path)
        self.conversation = saved.conversation
        count = counted(len(saved.conversation.exchanges), "exchange")
        other = f" with {harmless(saved.model)}" if saved.model != self._model else ""
        self._note(f"loaded {count}{other} from {harmless(str(path))}")

    def _put(self, text: str) -> None:
        print_text(text, self._surface.answers)

    def _note(self, text: str) -> None:
        notes = self._surface.notes
        notes.print(Text(text, "dim"), soft_wrap=not notes.is_terminal)

    def _refuse(self, text: str) -> None:
        self._failed = True
        self._surface.notes.print(Text(f"error: {text}", "red"), soft_wrap=not self._surface.notes.is_terminal)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[tuple[Callable[[int, int], None], Callable[[], None]]]:
        """Show the progress of the first pass; yields callbacks for each of its units and for the first text."""
        status = self._surface.notes.status("")
        began = time.monotonic()
        showing = False

        def at_unit(done: int, units: int) -> None:
            nonlocal showing
            if self._surface.interactive and time.monotonic() - began > PATIENCE:
                status.update(f"[dim]reading the question: {done} of {units} layers[/]")
                if not showing:
                    showing = True
                    status.start()

        def begin() -> None:
            nonlocal showing
            if showing:
                showing = False
                status.stop()

        try:
            yield at_unit, begin
        finally:
            begin()


def _path(argument: str) -> Path:
    return Path(argument.strip("\"'")).expanduser()


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Catch Ctrl-C inside the context; yields a function that returns whether it was pressed.

    The second Ctrl-C interrupts at once. Has an effect only in the main thread.
    """
    pressed = False

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: pressed
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
